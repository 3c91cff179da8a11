"""Recordings: documents that a real endpoint gave, one line of JSON each, and how they are played.

When a document is played later, its NotBefore times are moved: they are as far ahead as when it was recorded.
Nothing else in it changes.
"""

import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from scheduled_events_agent.imds.document import parse_not_before
from scheduled_events_agent.policy.typed_yaml import Problem
from scheduled_events_agent.simulator.azure import Azure, Plan, SimulatorError
from scheduled_events_agent.simulator.scenario import ScenarioError, read_file

SUFFIX = ".jsonl"
_MAX_FILE_BYTES = 64 * 1024 * 1024
VmName = Annotated[str, Meta(pattern=r"^\S{1,128}\Z")]
_Aware = Annotated[datetime, Meta(tz=True)]


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line: whose documents these are."""

    vm: VmName
    vm_id: str = ""
    scale_set: str = ""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Any further line: what the endpoint gave from ``at`` on, until the next one."""

    at: _Aware
    document: dict[str, Any] | None = None
    body: str | None = None
    """The body in place of ``document``, if it was not a JSON object."""

    def __post_init__(self) -> None:
        if (self.document is None) == (self.body is None):
            raise ValueError("expected either document or body")


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    origin: Origin
    documents: tuple[Recorded, ...]


class Replay(Azure):
    """Documents as they were recorded, in place of events that are simulated.

    Approvals of events in the present document are counted, and change nothing.
    """

    def __init__(self, vms: Iterable[str], *, new_id: Callable[[], str]) -> None:
        super().__init__(vms, new_id=new_id)
        self._body = b""
        self._ids: frozenset[str] = frozenset()

    def show(self, now: float, recorded: Recorded, body: bytes) -> None:
        """From now on every document, in whatever api-version, is this body."""
        events = _events(recorded.document)
        self._body = body
        self._ids = frozenset(str(event.get("EventId", "")).casefold() for event in events)
        incarnation = (recorded.document or {}).get("DocumentIncarnation")
        self.incarnation = incarnation if isinstance(incarnation, int) else self.incarnation
        self.log("document", now, text=summarize(recorded))

    def document(self, version: str) -> bytes:  # noqa: ARG002 - it is as it was recorded
        return self._body

    def mark_served(self, now: float, vm: str, version: str) -> None:
        """Do nothing: a recording has no events to mark."""

    def is_pending(self, event_id: str) -> bool:
        return event_id.casefold() in self._ids

    def approve(self, now: float, event_id: str, by: str) -> bool:
        self.log("approved", now, vm=by, text=f"{event_id}; the recording does not change")
        return False

    def schedule(self, now: float, plan: Plan) -> str:  # noqa: ARG002 - rejected, whatever it is
        raise SimulatorError(
            "a recording is played, which has its own events; play a scenario instead", kind="usage"
        )


def load_recording(name: str) -> Recording:
    """The recording in a file; raises SimulatorError, or ScenarioError with the first line that is wrong."""
    return parse_recording(read_file(name, "recording", _MAX_FILE_BYTES), name)


def parse_recording(text: bytes, name: str) -> Recording:
    """Read a recording; raises ScenarioError with the first line that is wrong."""
    origin: Origin | None = None
    documents: list[Recorded] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            if origin is None:
                origin = msgspec.json.decode(line, type=Origin)
            else:
                documents.append(msgspec.json.decode(line, type=Recorded))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            which = "the first" if origin is None else "a"
            message = f"not {which} line of a recording: {error}"
            raise ScenarioError((Problem(file=name, line=number, message=message),)) from error
    if origin is None or not documents:
        hint = f"make one with simulate --record {name}"
        raise ScenarioError((Problem(file=name, line=1, message="there is no document in it", hint=hint),))
    return Recording(origin=origin, documents=tuple(sorted(documents, key=lambda recorded: recorded.at)))


def make_recorded(at: datetime, body: bytes) -> Recorded:
    """The line for an answer of an endpoint."""
    try:  # by the library that writes the line: what it cannot read, such as NaN, it could not write as it came
        return Recorded(at=at, document=msgspec.json.decode(body, type=dict[str, Any]))
    except (ValueError, RecursionError):
        return Recorded(at=at, body=body.decode("utf-8", "replace"))


def as_played(recording: Recording, began: float, speed: float) -> list[tuple[float, Recorded, bytes]]:
    """When (seconds since the epoch) each document is shown if the first one is at ``began``, and its bytes."""
    first = recording.documents[0].at.timestamp()

    def played(time: float) -> float:
        return began + (time - first) / speed

    return [
        (played(recorded.at.timestamp()), recorded, _shifted(recorded, played)) for recorded in recording.documents
    ]


def rename_vm(recording: Recording, name: str) -> Recording:
    """A copy of the recording in which its VM has another name, such as that of a real machine."""
    old, new = (msgspec.json.encode(text) for text in (recording.origin.vm, name))
    documents = msgspec.json.encode(recording.documents).replace(old, new)
    return Recording(
        origin=msgspec.structs.replace(recording.origin, vm=name),
        documents=msgspec.json.decode(documents, type=tuple[Recorded, ...]),
    )


def summarize(recorded: Recorded) -> str:
    """A summary of a document, for people."""
    if recorded.document is None:
        return "not a document" if recorded.body else "empty"
    events = [
        " ".join(
            str(event.get(key, "?"))[: 8 if key == "EventId" else 40]
            for key in ("EventType", "EventId", "EventStatus")
        )
        for event in _events(recorded.document)
    ]
    return ", ".join(events) or "no events"


def _shifted(recorded: Recorded, played: Callable[[float], float]) -> bytes:
    if recorded.document is None:
        return (recorded.body or "").encode()
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(recorded.document))  # a copy
    for event in _events(document):
        if "NotBefore" in event:
            event["NotBefore"] = _shifted_time(event["NotBefore"], played)
    return msgspec.json.encode(document)


def _shifted_time(value: Any, played: Callable[[float], float]) -> Any:
    """A later time written in the same form, on the next whole second; a text that is no time is not changed."""
    at = parse_not_before(value)
    if at is None:
        return value
    is_iso = value.strip()[4] == "-"
    try:
        new = datetime.fromtimestamp(math.ceil(round(played(at.timestamp()), 3)), UTC)
    except (ValueError, OverflowError, OSError):
        return value
    return new.strftime("%Y-%m-%dT%H:%M:%SZ") if is_iso else format_datetime(new, usegmt=True)


def _events(document: dict[str, Any] | None) -> list[dict[str, Any]]:
    events = (document or {}).get("Events")
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
