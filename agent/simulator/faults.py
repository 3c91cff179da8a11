"""How the simulated endpoint misbehaves: which fault befalls a request, and the request limit.

Owns the kinds of faults, their spans and counts. Does no I/O and reads no clock; the server carries faults
out. The one invariant: of several faults that apply, the one that was made first is taken.
"""

from collections import deque
from typing import Literal

import msgspec

from agent.simulator.protocol import Purpose

FaultKind = Literal[
    "slow",  # the right answer, late
    "empty",  # 200 without a body, as while the service is being switched on
    "status",  # an error status with a JSON body
    "stall",  # the request is read and never answered
    "reset",  # the connection is reset instead of an answer
    "redirect",  # 302 to another path of this endpoint
    "html",  # 200 with a web page, as from a proxy
    "garbage",  # 200 with bytes that are not JSON
    "not-http",  # an answer that is not HTTP
    "truncated",  # the connection ends in the middle of the body
    "half-closed",  # the same, but the connection stays open in the other direction
    "wrong-length",  # the right answer, announced shorter than it is
    "bad-chunks",  # a body that is announced as chunked and is not
    "gzip-bomb",  # a small body, packed although nobody asked, that is huge when it is unpacked
    "oversized",  # a huge body, announced by Content-Length
    "endless",  # a body without a length that does not end
    "drip",  # the right answer, a byte at a time
]
FaultScope = Literal["any", "poll", "approve", "instance"]

# The service answers five requests a second to the whole VM.
RATE_LIMIT = 5


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One way to misbehave. Seconds are real ones."""

    kind: FaultKind
    on: FaultScope = "any"
    """Which requests it befalls: of documents, approvals, instance data, or any."""
    status: int = 500
    """For ``status``."""
    delay_seconds: float = 1.0
    """For ``slow``: how late; for ``drip``: between two bytes."""
    size_bytes: int = 64 * 1024 * 1024
    """For ``oversized``, and of what is packed in ``gzip-bomb``."""
    until: float | None = None
    """Seconds since the epoch; None: without an end in time."""
    count: int | None = None
    """How many requests it befalls; None: all."""
    takes_effect: bool = False
    """Whether the request is carried out although its answer is spoilt: an approval that is not confirmed."""


class FaultBook:
    """The faults and the request limit of one VM's port. Times are seconds since the Unix epoch."""

    def __init__(self, rate_limit: int | None) -> None:
        self._rate_limit = rate_limit
        self._faults: list[tuple[Fault, int | None]] = []  # with the count that is left
        self._recent: deque[float] = deque(maxlen=rate_limit or 0)

    def add(self, fault: Fault) -> None:
        """Let the fault apply from now on."""
        self._faults.append((fault, fault.count))

    def clear(self) -> None:
        """End every fault."""
        self._faults.clear()

    def ends_at(self) -> float:
        """When the last fault with an end in time is over; 0 if there is none."""
        return max((fault.until for fault, _ in self._faults if fault.until is not None), default=0.0)

    def active(self, now: float) -> tuple[tuple[Fault, int | None], ...]:
        """The faults that may still befall a request, each with how many it is to befall (None: any number)."""
        return tuple((fault, left) for fault, left in self._faults if fault.until is None or now < fault.until)

    def take(self, now: float, purpose: Purpose) -> Fault | None:
        """The fault that befalls a request of this purpose that comes now."""
        for index, (fault, left) in enumerate(self._faults):
            if fault.until is not None and now >= fault.until:
                continue
            if fault.on in ("any", purpose):
                if left is not None:
                    self._faults[index : index + 1] = [(fault, left - 1)] if left > 1 else []
                return fault
        if self._faults:
            self._faults = [item for item in self._faults if item[0].until is None or now < item[0].until]
        return None

    def is_over_limit(self, now: float) -> bool:
        """Count one more request; True if it comes too soon. Refused requests do not count."""
        if self._rate_limit is None:
            return False
        if len(self._recent) == self._rate_limit and now - self._recent[0] < 1.0:
            return True
        self._recent.append(now)
        return False
