"""Faults of the simulated endpoint: which fault hits a request, the wrong answers, and the request limit.

Does no I/O and reads no clock. The server applies a fault to the connection. If several faults apply, the first
one counts.
"""

from collections import deque
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from scheduled_events_agent.simulator.azure import Duration, Names
from scheduled_events_agent.simulator.protocol import Answer, Purpose, make_answer, make_error

FaultKind = Literal[
    "slow",  # the right answer, late
    "empty",  # 200 without a body, as while the service is being switched on
    "status",  # an error status with a JSON body
    "stall",  # the request is read and never answered
    "reset",  # the connection is reset instead of an answer
    "redirect",  # 302 to another path of this endpoint
    "html",  # 200 with a web page, as from a proxy
    "garbage",  # 200 with bytes that are not JSON
    "truncated",  # the connection ends in the middle of the body
    "endless",  # a body without a length that does not end
    "drip",  # the right answer, a byte at a time
    "clock_ahead",  # the right answer, dated by a clock that is ahead of this machine's
    "clock_behind",  # the right answer, dated by a clock that is behind this machine's
    "undated",  # the right answer without the header Date
    # of Azure's Guest Proxy Agent
    "proxied",  # the right answer, with the header that it adds
    "denied",  # 403 without a body: its rules deny the request
    "misdirected",  # 421 without a body: it has no record of the connection
    "no_rules",  # 500 without a body: its rules are not there yet
    "refused",  # it does not run: the port refuses connections
]
RIGHT_ANSWERS: tuple[FaultKind, ...] = ("slow", "drip", "clock_ahead", "clock_behind", "undated", "proxied")
"""Faults with the right document: it comes late, or with other headers."""
FaultScope = Literal["any", "events", "poll", "approve", "instance"]

# The service answers five requests a second to the whole VM.
RATE_LIMIT = 5
_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in.</body></html>"


class Fault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"seconds": "for", "delay_seconds": "delay", "clock_seconds": "by"},
):
    """One fault of the endpoint, as in a scenario file. Seconds are simulated ones."""

    kind: FaultKind
    vms: Names = ()
    """The VMs whose ports it hits; by default all."""
    on: FaultScope = "any"
    """Which requests it hits: for documents, approvals, both of them (events), instance data, or any."""
    api_version: str | None = None
    """Only requests in this api-version."""
    seconds: Duration | None = None
    """How long it lasts; None: without an end in time."""
    count: Annotated[int | None, Meta(ge=1)] = None
    """How many requests it hits; None: all."""
    status: Annotated[int, Meta(ge=100, le=599)] = 500
    """For ``status``."""
    delay_seconds: Duration = 1.0
    """For ``slow``: how late; for ``drip``: between two bytes."""
    clock_seconds: Duration = 600.0
    """For ``clock_ahead`` and ``clock_behind``: by how much, in real seconds."""
    request_is_processed: bool = False
    """Whether the request is carried out although its answer is wrong: an approval that is not confirmed."""

    def __post_init__(self) -> None:
        is_narrowed = self.on != "any" or self.api_version is not None or self.count is not None
        if self.kind == "refused" and is_narrowed:
            raise ValueError("refused has no on, api_version or count: no connection brings a request")

    def is_about(self, purpose: Purpose, version: str) -> bool:
        """Whether it hits a request of this purpose and api-version."""
        if self.kind == "refused" or self.api_version not in (None, version):
            return False
        return self.on in ("any", purpose) or (self.on == "events" and purpose in ("poll", "approve"))


class ActiveFault(NamedTuple):
    """A fault of one port. ``until`` is in seconds since the epoch, None: no end in time."""

    fault: Fault
    until: float | None
    left: int | None
    """How many requests it will still hit; None: any number."""


class FaultQueue:
    """The faults and the request limit of one VM's port. Times are seconds since the Unix epoch."""

    def __init__(self, rate_limit: int | None) -> None:
        self._rate_limit = rate_limit
        self._faults: list[ActiveFault] = []
        self._recent: deque[float] = deque(maxlen=rate_limit or 0)

    def add(self, fault: Fault, until: float | None) -> None:
        """Let the fault apply from now on."""
        self._faults.append(ActiveFault(fault, until, fault.count))

    def clear(self) -> None:
        """End every fault."""
        self._faults.clear()

    def ends_at(self) -> float:
        """When the last fault with an end in time is over; 0 if there is none."""
        return max((one.until for one in self._faults if one.until is not None), default=0.0)

    def active(self, now: float) -> tuple[ActiveFault, ...]:
        """The faults that may still hit a request."""
        return tuple(one for one in self._faults if one.until is None or now < one.until)

    def refuses(self, now: float) -> bool:
        """Whether the port refuses connections."""
        return any(one.fault.kind == "refused" for one in self.active(now))

    def next_fault(self, now: float, purpose: Purpose, version: str) -> Fault | None:
        """The fault that hits a request of this purpose and api-version that comes now."""
        for index, (fault, until, left) in enumerate(self._faults):
            if fault.is_about(purpose, version) and (until is None or now < until):
                if left is not None:
                    self._faults[index : index + 1] = [ActiveFault(fault, until, left - 1)] if left > 1 else []
                return fault
        return None

    def is_over_limit(self, now: float) -> bool:
        """Count one more request; True if it comes too soon. Rejected requests do not count."""
        if self._rate_limit is None:
            return False
        if len(self._recent) == self._rate_limit and now - self._recent[0] < 1.0:
            return True
        self._recent.append(now)
        return False


def faulty_response(fault: Fault, endpoint: str, right: Answer | None) -> Answer:
    """The answer that is sent instead of the right one. Only ``truncated`` needs the right one."""
    match fault.kind:
        case "empty":
            return make_answer(200)
        case "status":
            return make_error(fault.status)
        case "denied":
            return _answer_of_guest_proxy(403)
        case "misdirected":
            return _answer_of_guest_proxy(421)
        case "no_rules":
            return _answer_of_guest_proxy(500)
        case "redirect":
            return make_answer(302, headers=(("Location", f"{endpoint}/redirected"),))
        case "html":
            return make_answer(200, _PAGE, content_type="text/html; charset=utf-8")
        case "garbage":
            return make_answer(200, b'\x00\xff\xfe{"DocumentIncarnation"')
        case "truncated" if right is not None:
            cut = len(right.wire) - (len(right.body) + 1) // 2
            return msgspec.structs.replace(right, wire=right.wire[:cut])
        case "endless":  # the server sends the body
            return Answer(status=200, wire=b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    return Answer(status=0, wire=b"")  # reset and stall send nothing


def _answer_of_guest_proxy(status: int) -> Answer:
    return make_answer(status, headers=(("Connection", "close"),))
