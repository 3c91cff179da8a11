"""The simulated service of one set of VMs: its events, answers and faults, and the scenario that is played.

Starts no thread and reads no clock: times are seconds since the Unix epoch.
Invariant: everything that is due is done before a request is answered.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import count
from typing import NamedTuple
from uuid import UUID, uuid4

import msgspec

from scheduled_events_agent.simulator.azure import Azure, SimulatedEvent, SimulatorError, event_json
from scheduled_events_agent.simulator.faults import RIGHT_ANSWERS, Fault, FaultQueue, faulty_response
from scheduled_events_agent.simulator.protocol import (
    Answer,
    Imds,
    Request,
    VirtualMachine,
    make_error,
    proxied,
    purpose_of,
    version_of,
)
from scheduled_events_agent.simulator.recording import Recording, Replay, as_played
from scheduled_events_agent.simulator.scenario import Scenario, Step

PORTAL = "the portal"
"""``approved_by`` of an event that none of its VMs approved."""


def _new_id() -> str:
    return str(uuid4()).upper()


class Service:
    """The state of the simulated service. Not safe for several threads at once; its owner holds a lock."""

    def __init__(
        self,
        vms: Sequence[str | VirtualMachine],
        others: Sequence[str],
        scenario: Scenario | Recording | None,
        *,
        speed: float,
        rate_limit: int | None,
        shutdown_delay_seconds: float,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        """``shutdown_delay_seconds``: real time from the last thing to happen to the end; infinite: no end."""
        self.vms = _machines(vms, scenario)
        self.polls = dict.fromkeys(self.vms, 0)
        self.faults = {vm: FaultQueue(rate_limit) for vm in self.vms}
        self.names: dict[str, str] = {}
        """The scenario's name of an event -> the event's first id."""
        self.began_at: float | None = None
        self.has_ended = False
        self._scenario = scenario
        self._speed = speed
        self._shutdown_delay_seconds = shutdown_delay_seconds
        self._ends_at = math.inf
        self._agenda: deque[tuple[float, Callable[[float], object]]] = deque()  # what to do when
        plan = scenario if isinstance(scenario, Scenario) else Scenario()
        self._planned = {step.event.name for step in plan.timeline if step.event and step.event.name}
        self._replay = Replay(self.vms, new_id=new_id) if isinstance(scenario, Recording) else None
        self.azure = self._replay or Azure(
            (*self.vms, *others, *plan.others),
            new_id=new_id,
            incarnation=plan.incarnation,
            incarnation_step=plan.incarnation_step,
            speed=speed,
        )
        self._imds = Imds(self.azure, self.vms)

    # Time

    def begin(self, now: float) -> None:
        """Let the time of the scenario or the recording begin."""
        self.began_at = now
        if self._replay is not None and isinstance(self._scenario, Recording):
            for at, recorded, body in as_played(self._scenario, now, self._speed):
                self._agenda.append((at, partial(self._replay.show, recorded=recorded, body=body)))
        elif isinstance(self._scenario, Scenario):
            for step in sorted(self._scenario.timeline, key=lambda step: step.at):
                self._agenda.append((now + step.at / self._speed, partial(self._run_step, step=step)))
            if self._scenario.ends is not None:
                self._ends_at = now + self._scenario.ends / self._speed
        if self._agenda:
            self.azure.log("began", now)

    def advance(self, now: float) -> None:
        """Do everything that is due, each thing at its own time."""
        while (due := self.next_due()) <= now:
            if self._agenda and self._agenda[0][0] == due:
                _, do = self._agenda.popleft()
                do(due)
            elif self.azure.next_due <= due:
                self.azure.advance(due)
            else:
                self.has_ended = True

    def next_due(self) -> float:
        """When there is next something to do."""
        next_step = self._agenda[0][0] if self._agenda else math.inf
        return min(next_step, self.azure.next_due, self._end_due())

    def _end_due(self) -> float:
        """When the scenario ends, as far as is known now."""
        if (
            self._scenario is None
            or self.began_at is None
            or self.has_ended
            or self._shutdown_delay_seconds == math.inf
        ):
            return math.inf
        if self._ends_at < math.inf:
            return self._ends_at
        if self._agenda or self.azure.next_due < math.inf:
            return math.inf
        last = self.azure.history[-1].at.timestamp() if self.azure.history else self.began_at
        return max(last, *(queue.ends_at() for queue in self.faults.values())) + self._shutdown_delay_seconds

    # Requests

    def choose_fault(self, now: float, vm: str, request: Request) -> Fault | None:
        """The fault that hits this request."""
        purpose = purpose_of(request)
        if self.began_at is None and purpose == "poll":
            self.begin(now)
        self.advance(now)
        return self.faults[vm].next_fault(now, purpose, version_of(request))

    def answer(self, now: float, vm: str, request: Request, fault: Fault | None) -> Answer:
        """The answer to a request."""
        self.advance(now)
        is_too_soon = self.faults[vm].is_over_limit(now)
        if fault is None and is_too_soon:
            return make_error(429, "Too many requests")
        if fault is not None and fault.kind not in RIGHT_ANSWERS:
            needs_right = fault.request_is_processed or fault.kind == "truncated"
            right = self._imds.answer(now, vm, request) if needs_right else None
            wrong = faulty_response(fault, f"http://{request.headers.get('host', '')}", right)
            if right is None:
                return wrong
            return msgspec.structs.replace(wrong, accepted=right.accepted, approved=right.approved)
        answer = self._imds.answer(now, vm, request)
        if answer.status == 200 and purpose_of(request) == "poll":
            self.polls[vm] += 1
        return proxied(answer) if fault is not None and fault.kind == "proxied" else answer

    # Actions

    def play(self, now: float, step: Step) -> str:
        """Carry out a step; returns the id of the event that it was about, if there was one."""
        event_id = ""
        if step.event:
            if step.event.name in self.names or step.event.name in self._planned:
                raise SimulatorError(
                    f'there is an event "{step.event.name}" already; give another name', kind="usage"
                )
            event_id = self.azure.schedule(now, step.event)
            if step.event.name:
                self.names[step.event.name] = event_id
        elif step.fault:
            self._add_fault(now, step.fault)
        elif step.clear_faults:
            self.clear_faults(now, tuple(self.vms))
        elif step.reset_incarnation is not None:
            self.azure.reset_incarnation(now, step.reset_incarnation)
        elif step.named:
            action, name = step.named
            event_id = self.id_of(name)
            match action:
                case "approve":
                    self.azure.approve(now, event_id, PORTAL)
                case "cancel":
                    self.azure.cancel(now, event_id)
                case "start":
                    self.azure.start(now, event_id)
                case "end":
                    self.azure.end(now, event_id)
        return event_id

    def clear_faults(self, now: float, vms: Sequence[str]) -> None:
        """End the faults of these ports."""
        for name in vms:
            self.faults[name].clear()
            self.azure.log("behaved", now, vm=name)

    def refused(self, now: float) -> set[str]:
        """The VMs whose ports refuse connections."""
        return {vm for vm, faults in self.faults.items() if faults.refuses(now)}

    def refused_until(self, now: float) -> float:
        """When next a port accepts connections again by itself; infinite if none does."""
        active = [one for faults in self.faults.values() for one in faults.active(now)]
        ends = [one.until for one in active if one.fault.kind == "refused" and one.until is not None]
        return min(ends, default=math.inf)

    def find(self, event_id: str) -> SimulatedEvent | None:
        """The event of this id or name, or None while it is only planned."""
        if event_id in self._planned:
            return None
        return self.azure.event(self.id_of(event_id))

    def id_of(self, name: str) -> str:
        """The id of an event that may be given by its name in the scenario."""
        return self.names.get(name, name)

    def vm(self, name: str) -> str:
        """The name of a VM that has a port; "": the first one."""
        if name and name not in self.vms:
            raise SimulatorError(f"no VM {name!r} here; expected one of {', '.join(self.vms)}", kind="usage")
        return name or next(iter(self.vms))

    def _run_step(self, now: float, step: Step) -> None:
        """Carry out one step of the scenario; a step that is no longer possible is reported and skipped."""
        if step.event and step.event.name:
            self._planned.discard(step.event.name)
        try:
            self.play(now, step)
        except SimulatorError as error:
            self.azure.log("skipped", now, text=str(error))

    def _add_fault(self, now: float, fault: Fault) -> None:
        vms = [self.vm(vm) for vm in fault.vms] or list(self.vms)
        until = None if fault.seconds is None else now + fault.seconds / self._speed
        text = f"{fault.kind} {fault.status}" if fault.kind == "status" else fault.kind
        for name in vms:
            scaled = msgspec.structs.replace(fault, delay_seconds=fault.delay_seconds / self._speed)
            self.faults[name].add(scaled, until)
            self.azure.log("fault", now, vm=name, text=text)


class Announcement(NamedTuple):
    """An event at the moment when a scenario announces it."""

    at: datetime
    event: bytes
    """The event as an object of a document."""


def announcements(scenario: Scenario, began_at: float, version: str) -> Iterator[Announcement]:
    """Every event of a scenario that documents of this api-version show, if no client approves any.

    An event that begins as Started is announced by its start. Faults have no effect. The ids of the events are the
    same each time.
    """
    numbers = count(1)
    service = Service(
        (),
        (),
        scenario,
        speed=1.0,
        rate_limit=None,
        shutdown_delay_seconds=0.0,
        new_id=lambda: str(UUID(int=next(numbers))),
    )
    service.begin(began_at)
    while not service.has_ended:
        service.advance(service.next_due())
    for entry in service.azure.history:
        event = entry.event
        if event is None:
            continue
        is_announced = entry.kind == "scheduled" or (entry.kind == "started" and event.plan.begins_started)
        body = event_json(event, version)
        if is_announced and body is not None:
            yield Announcement(entry.at, body)


def _machines(
    vms: Sequence[str | VirtualMachine], scenario: Scenario | Recording | None
) -> dict[str, VirtualMachine]:
    if not vms and isinstance(scenario, Recording):
        origin = scenario.origin
        vms = [VirtualMachine(name=origin.vm, vm_id=origin.vm_id, scale_set=origin.scale_set)]
    elif not vms and isinstance(scenario, Scenario):
        ids = scenario.vm_ids
        scale_set = scenario.scale_set
        vms = [VirtualMachine(name=vm, vm_id=ids.get(vm, ""), scale_set=scale_set) for vm in scenario.vms]
    machines = [VirtualMachine(name=vm) if isinstance(vm, str) else vm for vm in vms or ("vm-1",)]
    by_name = {machine.name: machine for machine in machines}
    if len(by_name) < len(machines):
        raise SimulatorError("two VMs have the same name", kind="usage")
    return by_name
