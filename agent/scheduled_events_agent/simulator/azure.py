"""A model of Azure's side of Scheduled Events: plans of events and the time in, documents out.

Keeps the state of every simulated event and writes the document in each api-version. Does no I/O and reads no
clock. It follows Azure's documentation and shares no code with the agent's parser. So each checks the other.
Invariant: the events of a document change only together with its DocumentIncarnation, and an event that is gone
never comes back.
"""

import json
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from scheduled_events_agent import AgentError

EventType = Literal["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate", "SpotRebalanceRecommendation"]
Source = Literal["Platform", "User"]
Status = Literal["Scheduled", "Started", "Gone"]
Outcome = Literal["", "completed", "canceled"]
LifecycleKind = Literal["scheduled", "polled", "approved", "started", "renamed", "gone"]
LogEntryKind = Literal[LifecycleKind, "began", "reset", "fault", "behaved", "document", "skipped"]
# Seconds, written in scenario files as durations.
Duration = Annotated[
    float, Meta(description="A duration such as 9s, 5m, 1h30m or 2d.", extra={"kind": "duration"})
]
Name = Annotated[str, Meta(pattern=r"^\S{1,128}$", description="no blanks")]
Names = Annotated[tuple[Name, ...], Meta(extra={"kind": "one-or-many"})]

EVENTS_VERSIONS = (
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
    "2024-07-09",
)
# An early warning of an eviction: it never starts, and an approval has no effect.
_RECOMMENDATION = "SpotRebalanceRecommendation"
# The first api-version that shows each of these; dates in this form compare as texts.
_TYPE_SINCE = {"Preempt": "2017-11-01", "Terminate": "2019-01-01", _RECOMMENDATION: "2024-07-09"}
_FIELD_SINCE = {
    "Description": "2019-04-01",
    "EventSource": "2019-08-01",
    "DurationInSeconds": "2020-07-01",
}
_UNDERSCORE_VERSION = "2017-03-01"

# The shortest notice that Microsoft promises for each type; a Terminate's is set on the scale set.
_NOTICE_SECONDS: dict[EventType, float] = {
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Preempt": 30.0,
    "Terminate": 300.0,
    "SpotRebalanceRecommendation": 0.0,
}
# Texts that the real service has been seen to send.
_DESCRIPTIONS: dict[tuple[EventType, Source], str] = {
    ("Freeze", "Platform"): (
        "Virtual machine is being paused because of a memory-preserving Live Migration operation."
    ),
    ("Reboot", "Platform"): "Host server is undergoing maintenance.",
    ("Redeploy", "Platform"): "Virtual machine has encountered a failure.",
    ("Reboot", "User"): "Virtual machine is going to be restarted as requested by authorized user.",
    ("Redeploy", "User"): "Virtual machine is going to be redeployed as requested by authorized user.",
}


class SimulatorError(AgentError):
    """The simulator cannot do what it was asked for, or waited too long for something (kind ``timeout``)."""


class Plan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename=lambda field: field.removesuffix("_seconds"),
):
    """The plan of one event, as in a scenario file. Seconds are simulated ones."""

    type: EventType
    name: Name | None = None
    """The name by which later steps of a scenario refer to it."""
    id: str | None = None
    """The EventId; by default a new one."""
    vms: Names = ()
    """Names of the VMs in Resources; by default the first VM."""
    source: Source = "Platform"
    notice_seconds: Duration | None = None
    """From now to NotBefore, which is rounded up to a whole second; by default as Azure promises for the type."""
    duration_seconds: Duration | None = None
    """DurationInSeconds as shown; None: unknown. It has no effect on the simulated life."""
    description: str | None = None
    """The Description; by default the real service's for such events, often empty."""
    lasts_seconds: Duration | None = 10.0
    """From Started (a recommendation: from its announcement) until it is gone; None: until ``end``."""
    start_delay_seconds: Duration = 0.5
    """From the approval to Started."""
    starts_when_approved: bool = True
    """False: something else on the host holds up the start until NotBefore, approval or not."""
    all_must_approve: bool = False
    """It is approved when each of its VMs has approved it, or when the portal (no VM at all) has."""
    begins_started: bool = False
    """Straight to Started, as after a hardware failure."""
    shows_started: bool = True
    """False: it is over before any document has shown it Started."""
    new_id_at_start: bool = False
    """True: it gets another id once Started, as in Microsoft's mock server."""


class SimulatedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event at one moment; it is kept after it is gone."""

    id: str
    ids: tuple[str, ...]
    """Every id it has had, the first one first."""
    plan: Plan
    """The plan, with its defaults filled in."""
    status: Status
    outcome: Outcome = ""
    scheduled_at: datetime
    not_before_at: datetime
    approved_at: datetime | None = None
    approved_by: str = ""
    """The VM, or the portal, that approved it first, or with ``all_must_approve`` last."""
    approvers: tuple[str, ...] = ()
    """The VMs, or the portal, whose approvals had an effect, in order."""
    started_at: datetime | None = None
    gone_at: datetime | None = None
    seen_by: tuple[str, ...] = ()
    """VMs that were served a document with it."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A log entry: a change of an event, or an action on the endpoint."""

    kind: LogEntryKind
    at: datetime
    event: SimulatedEvent | None = None
    vm: str = ""
    text: str = ""


class Azure:
    """The events of one set of VMs, which all of them see. Times are seconds since the Unix epoch.

    The seconds of a plan pass in 1/``speed`` of the time. Not safe for use by several threads at once.
    """

    def __init__(
        self,
        vms: Iterable[str],
        *,
        new_id: Callable[[], str],
        incarnation: int = 1,
        incarnation_step: int = 1,
        speed: float = 1.0,
    ) -> None:
        self.vms = tuple(vms)
        self.incarnation = incarnation
        self.history: list[LogEntry] = []
        self.next_due = math.inf
        """When ``advance`` will next have something to do."""
        self._reached = -math.inf
        self._incarnation_step = incarnation_step
        self._new_id = new_id
        self._speed = speed
        self._events: dict[str, SimulatedEvent] = {}  # by first id, folded
        self._first_id: dict[str, str] = {}  # folded id, first or later -> key of _events
        self._live: dict[str, SimulatedEvent] = {}  # the part of _events that is not gone
        self._texts: dict[str, bytes] = {}  # by api-version, until the document changes

    # Actions

    def schedule(self, now: float, plan: Plan) -> str:
        """Announce an event; returns its id."""
        self.advance(now)
        plan = _replace(
            plan,
            vms=plan.vms or self.vms[:1],
            notice_seconds=_NOTICE_SECONDS[plan.type] if plan.notice_seconds is None else plan.notice_seconds,
            description=_description(plan) if plan.description is None else plan.description,
        )
        for vm in plan.vms:
            if vm not in self.vms:
                raise SimulatorError(f"no VM {vm!r} here; expected one of {', '.join(self.vms)}", kind="usage")
        event_id = plan.id or self._new_id()
        key = event_id.casefold()
        if key in self._first_id:
            raise SimulatorError(f"there has been an event {event_id} before; give another id", kind="usage")
        self._first_id[key] = key
        event = SimulatedEvent(
            id=event_id,
            ids=(event_id,),
            plan=plan,
            status="Scheduled",
            scheduled_at=_time(now),
            # Rounded up, and started at the rounded time: the notice is never shorter than planned, and nothing
            # starts before the NotBefore that the document shows.
            not_before_at=_time(math.ceil(now + (plan.notice_seconds or 0.0) / self._speed)),
        )
        self._keep(key, event)
        if plan.begins_started and plan.type != _RECOMMENDATION:
            self._start(now, key)
        else:
            self.log("scheduled", now, event)
            self._document_changed()
        return event_id

    def approve(self, now: float, event_id: str, by: str) -> bool:
        """Count a start request, by default for every VM of the event; returns whether it had an effect."""
        self.advance(now)
        key = self._known(event_id)
        event = self._events[key]
        if event.plan.type == _RECOMMENDATION:
            return False
        if event.status != "Scheduled" or event.approved_at is not None or by in event.approvers:
            return False
        approvers = (*event.approvers, by)
        if event.plan.all_must_approve and by in self.vms:
            if by not in event.plan.vms:
                return False
            if missing := [vm for vm in event.plan.vms if vm not in approvers]:
                self._keep(key, _replace(event, approvers=approvers))
                self.log("approved", now, self._events[key], by, f"still without {', '.join(missing)}")
                return True
        self._keep(key, _replace(event, approved_at=_time(now), approved_by=by, approvers=approvers))
        self.log("approved", now, self._events[key], by)
        return True

    def cancel(self, now: float, event_id: str) -> None:
        """Take the event back before it has started."""
        self._leave(now, self._scheduled(now, event_id, "canceled"), "canceled")

    def start(self, now: float, event_id: str) -> None:
        """Start the event at once, approved or not."""
        key = self._scheduled(now, event_id, "started")
        if self._events[key].plan.type == _RECOMMENDATION:
            raise SimulatorError(f"event {event_id} is a recommendation, which does not start", kind="usage")
        self._start(now, key)

    def end(self, now: float, event_id: str) -> None:
        """Let the event be over, also if no document has shown it Started."""
        self.advance(now)
        key = self._known(event_id)
        if self._events[key].status == "Gone":
            raise SimulatorError(f"event {event_id} is gone already", kind="usage")
        self._leave(now, key, "completed")

    def reset_incarnation(self, now: float, incarnation: int = 1) -> None:
        """Let the numbering begin anew, as after a day without a request."""
        self.advance(now)
        self._document_changed()
        self.incarnation = incarnation
        self.log("reset", now, text=f"DocumentIncarnation is {incarnation}")

    def advance(self, now: float) -> None:
        """Do everything that is due until ``now``, each thing at its own time."""
        while self.next_due <= now:
            due, key = min((self._due(event), key) for key, event in self._live.items())
            at = max(due, self._reached)  # it may have waited for another event, and be due since before that one
            event = self._live[key]
            if event.status == "Scheduled" and event.plan.type != _RECOMMENDATION:
                self._start(at, key)
            else:
                self._leave(at, key, "completed")
        self._reached = max(self._reached, now)

    def log(
        self,
        kind: LogEntryKind,
        now: float,
        event: SimulatedEvent | None = None,
        vm: str = "",
        text: str = "",
    ) -> None:
        """Add to the history."""
        self.history.append(LogEntry(kind=kind, at=_time(now), event=event, vm=vm, text=text))

    # Queries

    def event(self, event_id: str) -> SimulatedEvent:
        """The event that has, or once had, this id."""
        return self._events[self._known(event_id)]

    def events(self) -> tuple[SimulatedEvent, ...]:
        """Every event there has been, oldest first."""
        return tuple(self._events.values())

    def is_pending(self, event_id: str) -> bool:
        """Whether a start request may name this id: the present id of an event that is not gone."""
        key = self._first_id.get(event_id.casefold())
        return key in self._live and self._live[key].id.casefold() == event_id.casefold()

    def document(self, version: str) -> bytes:
        """The document of one api-version. The same bytes object until something changes."""
        text = self._texts.get(version)
        if text is None:
            events = [_shown(event, version) for event in self._live.values() if _is_shown(event, version)]
            content = {"DocumentIncarnation": self.incarnation, "Events": events}
            text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
            self._texts[version] = text
        return text

    def mark_served(self, now: float, vm: str, version: str) -> None:
        """Note that a VM was given the present document of this api-version."""
        for key, event in self._live.items():
            if vm not in event.seen_by and _is_shown(event, version):
                seen = _replace(event, seen_by=(*event.seen_by, vm))
                self._events[key] = self._live[key] = seen
                self.log("polled", now, seen, vm)

    # How

    def _start(self, now: float, key: str) -> None:
        event = self._events[key]
        if not event.plan.shows_started:
            self._keep(key, _replace(event, started_at=_time(now)))
            self._leave(now, key, "completed")
            return
        started = _replace(event, status="Started", started_at=_time(now))
        if event.plan.new_id_at_start:
            new_id = self._new_id()
            self._first_id[new_id.casefold()] = key
            started = _replace(started, id=new_id, ids=(*event.ids, new_id))
            self.log("renamed", now, started, text=f"the new id of {event.id} is {new_id}")
        self._keep(key, started)
        self.log("started", now, started)
        self._document_changed()

    def _leave(self, now: float, key: str, outcome: Outcome) -> None:
        gone = _replace(self._events[key], status="Gone", outcome=outcome, gone_at=_time(now))
        self._keep(key, gone)
        self.log("gone", now, gone)
        self._document_changed()

    def _keep(self, key: str, event: SimulatedEvent) -> None:
        self._events[key] = self._live[key] = event
        if event.status == "Gone":
            del self._live[key]
        self.next_due = min(map(self._due, self._live.values()), default=math.inf)

    def _due(self, event: SimulatedEvent) -> float:
        plan = event.plan
        begins_at = event.scheduled_at if plan.type == _RECOMMENDATION else event.started_at
        if begins_at is not None:
            lasts = math.inf if plan.lasts_seconds is None else plan.lasts_seconds
            return begins_at.timestamp() + lasts / self._speed
        not_before = event.not_before_at.timestamp()
        if event.approved_at is None or not plan.starts_when_approved or self._waits_for_others(event):
            return not_before
        return min(not_before, event.approved_at.timestamp() + plan.start_delay_seconds / self._speed)

    def _waits_for_others(self, event: SimulatedEvent) -> bool:
        """A scale set deletes its VMs in the order of NotBefore, those with the same one together."""
        return event.plan.type == "Terminate" and any(
            other.plan.type == "Terminate"
            and other.status == "Scheduled"
            and other.approved_at is None
            and other.not_before_at <= event.not_before_at
            for other in self._live.values()
        )

    def _document_changed(self) -> None:
        self.incarnation += self._incarnation_step
        self._texts.clear()

    def _known(self, event_id: str) -> str:
        key = self._first_id.get(event_id.casefold())
        if key is None:
            raise SimulatorError(f"there has never been an event {event_id!r}", kind="usage")
        return key

    def _scheduled(self, now: float, event_id: str, what: str) -> str:
        """The key of an event that has not started."""
        self.advance(now)
        key = self._known(event_id)
        status = self._events[key].status
        if status != "Scheduled":
            raise SimulatorError(f"event {event_id} is {status}; only a Scheduled one can be {what}", kind="usage")
        return key


def event_json(event: SimulatedEvent, version: str) -> bytes | None:
    """The event as an object of a document in this api-version; None if that does not show it."""
    return json.dumps(_shown(event, version)).encode() if _is_shown(event, version) else None


def _description(plan: Plan) -> str:
    return _DESCRIPTIONS.get((plan.type, plan.source), "")


def _is_shown(event: SimulatedEvent, version: str) -> bool:
    return version >= _TYPE_SINCE.get(event.plan.type, "")


def _shown(event: SimulatedEvent, version: str) -> dict[str, Any]:
    plan = event.plan
    underscore = "_" if version == _UNDERSCORE_VERSION else ""
    # The status of a recommendation is not documented.
    is_blank = event.status == "Started" or plan.type == _RECOMMENDATION
    fields: dict[str, Any] = {
        "EventId": event.id,
        "EventStatus": event.status,
        "EventType": plan.type,
        "ResourceType": "VirtualMachine",
        "Resources": [f"{underscore}{name}" for name in plan.vms],
        "NotBefore": "" if is_blank else format_datetime(event.not_before_at, usegmt=True),
        "Description": plan.description,
        "EventSource": plan.source,
        "DurationInSeconds": -1 if plan.duration_seconds is None else int(plan.duration_seconds),
    }
    return {name: value for name, value in fields.items() if version >= _FIELD_SINCE.get(name, "")}


def _time(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)


_replace = msgspec.structs.replace
