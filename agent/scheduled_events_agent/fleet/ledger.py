"""The ledger: what the VMs of a group tell each other, as rows that all of them can read.

Three calls, so that another store can stand behind them. Each call blocks for a bounded time, and may have had its
effect although it raises (the answer was lost). Keys hold letters, digits and ``|_.-`` only.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from scheduled_events_agent import AgentError

OnRequest = Callable[[str, int | str, float], None]
"""Gets the method of each request, the status of its answer or the kind of error, and the seconds it took."""


class LedgerError(AgentError):
    """The ledger did not do what it was asked, or did it and the answer was lost.

    ``kind``: unreachable, timeout, throttled, denied, missing (there is no such table), bad_answer, setup
    (something is wrong on this machine).
    """

    def __init__(self, message: str, *, kind: str, retry_after: float = 0.0) -> None:
        """``retry_after``: seconds to leave it alone, if it said so."""
        super().__init__(message, kind=kind)
        self.retry_after = retry_after


class Row(NamedTuple):
    """One row of a partition."""

    key: str
    content: Mapping[str, str]
    version: str
    """Changes with each write; see ``put_if_unchanged``."""


class Ledger(Protocol):
    """Rows by partition and key. For any thread. Each call raises LedgerError."""

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        """Write the row, whatever was there; None deletes it."""

    def put_if_unchanged(self, partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        """Write the row if it still has this version, "" if there is none. False: it was changed meanwhile.

        None deletes it; True also if it is not there any more.
        """

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        """All rows of the partition whose keys begin so, ordered by their key.

        They show each write that was answered before: the protocol relies on it.
        """
