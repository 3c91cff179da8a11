"""The seam to the store of a fleet: what a store must do so that the VMs of a group can act together through it.

How the Leases of a Kubernetes cluster would fit, tried on a real API server: the ETag is ``resourceVersion`` and
``uid`` together, for a PUT with the ``resourceVersion`` of a Lease that is gone creates it anew; the age is the
answer's Date less the newest time in ``managedFields``, both by the API server's clock; the list goes by a label
and names no ``resourceVersion``, so that it is current.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from scheduled_events_agent import AgentError

MAX_RECORDS = 2000
"""Of a group: one for each VM and event under way."""

ErrorKind = Literal["unreachable", "timeout", "throttled", "denied", "not_found", "bad_response", "setup"]
"""not_found: there is no such store. setup: something is wrong on this machine."""

OnRequest = Callable[[str, int | str, float], None]
"""Gets the method of each request, the status of its answer or the kind of error, and the seconds it took."""


class BackendError(AgentError):
    """The store did not do what it was asked, or did it and the answer was lost."""

    def __init__(self, message: str, *, kind: ErrorKind, retry_after: float = 0.0) -> None:
        """``retry_after``: seconds to leave the store alone, if it said so."""
        super().__init__(message, kind=kind)
        self.retry_after = retry_after


class Record(NamedTuple):
    """What one VM says of one event."""

    key: str
    """Letters, digits and ``|_.-`` only."""
    etag: str
    """Changes with each write."""
    age: float | None
    """Seconds between its last write and the list, both by the store's clock; None if the store does not tell."""
    fields: Mapping[str, str]
    """Below 1 KiB in all."""


class Backend(Protocol):
    """The store of one group, for one thread. Each call ends within 70 seconds, and may raise BackendError.

    A write that raised may have had its effect, or have it up to two minutes later.
    """

    def list(self) -> list[Record]:
        """All records of the group, with every write that was answered before the list was sent."""

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
