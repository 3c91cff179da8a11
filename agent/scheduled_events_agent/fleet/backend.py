"""The storage interface of a fleet: list, put if the ETag matches, delete if the ETag matches."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from scheduled_events_agent import AgentError

MAX_RECORDS = 2000
"""Most records of a group, besides old ones. There is one for each VM and event under way."""
_OLD_SECONDS = 86_400.0

ErrorKind = Literal["unreachable", "timeout", "throttled", "denied", "not_found", "bad_response", "setup"]
"""not_found: there is no such store. setup: something is wrong on this machine."""

OnRequest = Callable[[str, int | str, float], None]
"""Called after each request with its method, the status of its answer or the kind of error, and its seconds."""


class BackendError(AgentError):
    """A request to the store failed, or it succeeded and the answer was lost."""

    def __init__(self, message: str, *, kind: ErrorKind, retry_after: float = 0.0) -> None:
        """``retry_after``: seconds that the store asks to wait; 0 if it does not ask."""
        super().__init__(message, kind=kind)
        self.retry_after = retry_after


class Record(NamedTuple):
    """The record of one VM about one event."""

    key: str
    """The key: letters, digits and ``|_.-`` only."""
    etag: str
    """The version; it changes with each write."""
    age: float | None
    """Seconds between its last write and the list, both by the store's clock; None if the store does not tell."""
    fields: Mapping[str, str]
    """The contents, below 1 KiB in all."""

    @property
    def is_old(self) -> bool:
        """Whether it counts for nothing, and any VM may delete it."""
        return self.age is not None and self.age > _OLD_SECONDS


def limited(records: Sequence[Record], partition: str) -> list[Record]:
    """The records, but of old ones only some: however many VMs have gone, the group can be listed.

    Raises BackendError if there are too many others.
    """
    current = [record for record in records if not record.is_old]
    if len(current) > MAX_RECORDS:
        raise BackendError(f"more than {MAX_RECORDS:,} records: {partition}", kind="bad_response")
    old = [record for record in records if record.is_old]
    return [*current, *old[:MAX_RECORDS]]


class Backend(Protocol):
    """The store of one group, for one thread. Each call ends within 70 seconds, and may raise BackendError.

    A write that raised may have had its effect, or have it up to two minutes later.
    """

    def list(self) -> list[Record]:
        """All records of the group, with every write that was answered before the list was sent.

        Of old ones, some may be missing.
        """

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        """Write a record: create it if ``etag`` is "", else replace the one that has this ETag.

        Returns the new ETag; None if the record was changed, created or deleted meanwhile.
        """

    def delete(self, key: str, etag: str) -> bool:
        """Delete the record that has this ETag. False if it was changed meanwhile; True also if it is gone."""


def plain_key(text: str) -> str:
    """``text`` as a part of a key, for which stores allow only some characters: itself, or its hash."""
    low = text.lower()
    is_plain = re.fullmatch(r"[a-z0-9_.-]{1,80}", low) is not None
    return low if is_plain else hashlib.sha256(text.encode(errors="replace")).hexdigest()
