"""The simulator for users: the service and its HTTP ports under one lock and one clock.

It moves the time, records the requests of clients, and waits for events and requests.
Invariant: everything that is due is done before a request is answered. So a document never depends on which
thread ran first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from scheduled_events_agent.simulator.azure import EventType, LogEntry, Plan, SimulatedEvent, SimulatorError
from scheduled_events_agent.simulator.faults import RATE_LIMIT, ActiveFault, Fault, FaultKind
from scheduled_events_agent.simulator.protocol import Answer, Request, RequestRecord, VirtualMachine
from scheduled_events_agent.simulator.recording import Recording
from scheduled_events_agent.simulator.scenario import Scenario, Step
from scheduled_events_agent.simulator.server import LOOPBACK, Server
from scheduled_events_agent.simulator.service import PORTAL, Service

T = TypeVar("T")

TIMEOUT_SECONDS = 60.0
"""Default time limit of a wait, far longer than anything that is waited for takes."""

# Within these, every time that a scenario can name is a date, on Windows too (where they end with the year 3000).
_MIN_SPEED = 0.1
_MAX_SPEED = 1e6
# More than a day of one VM that polls once a second; a bound so that a simulator left running does not grow.
_MAX_RECORDS = 100_000


class Simulator:
    """A Scheduled Events endpoint with one port per VM; a context manager.

    Every ``seconds`` given to a method is simulated: it passes in 1/``speed`` of the time. DurationInSeconds
    is not scaled, since it is only shown; nor are time limits of waiting, nor the request limit.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        vms: Sequence[str | VirtualMachine] = (),
        *,
        others: Sequence[str] = (),
        scenario: Scenario | Recording | None = None,
        speed: float = 1.0,
        port: int = 0,
        bind: str = LOOPBACK,
        rate_limit: int | None = RATE_LIMIT,
        begins_at_first_poll: bool = False,
        requests_file: Path | None = None,
        shutdown_delay_seconds: float = 3.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Without ``vms``: those of the scenario, else vm-1. Listens at once, but answers from ``start`` on.

        ``scenario``: a recording plays by itself; nothing else can be scheduled beside it.

        ``bind``: the address of this machine to listen on; 0.0.0.0 or ::, all of them.
        ``others``: names of further VMs that events may name and that have no port.
        ``begins_at_first_poll``: the scenario's time begins with the first request for a document.
        ``shutdown_delay_seconds``: real time from the scenario's last event to its end; math.inf: it does not end.
        ``requests_file`` gets each request as a line of JSON.
        ``clock`` gives seconds since the epoch and must run as fast as real time.
        """
        if not _MIN_SPEED <= speed <= _MAX_SPEED:
            expected = f"a number from {_MIN_SPEED:g} to {_MAX_SPEED:.0f}"
            raise SimulatorError(f"speed: expected {expected}; got {speed:g}", kind="usage")
        self.speed = speed
        self._clock = clock or _steady_wall_clock()
        self._service = Service(
            vms,
            others,
            scenario,
            speed=speed,
            rate_limit=rate_limit,
            shutdown_delay_seconds=shutdown_delay_seconds,
        )
        self.vms: dict[str, VirtualMachine] = self._service.vms
        self._begins_at_first_poll = begins_at_first_poll
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # A condition for the one thread that waits for a time: a request does not wake it.
        self._agenda_changed = threading.Condition(lock)
        self._is_closed = False
        self._timekeeper = threading.Thread(target=self._keep_time, name="simulator-time", daemon=True)
        self._requests: deque[RequestRecord] = deque(maxlen=_MAX_RECORDS)
        try:
            self._stream = (
                None if requests_file is None else requests_file.open("w", encoding="utf-8", buffering=1)
            )
        except OSError as error:
            text = f"cannot write requests to {requests_file}: {error.strerror}"
            raise SimulatorError(text, kind="usage") from error
        self._server = Server(self.vms, self._respond, port, bind=bind)

    # Start and end

    def start(self) -> Self:
        """Begin to answer; does not block."""
        with self._changed:
            if not self._begins_at_first_poll:
                self._service.begin(self._clock())
        self._timekeeper.start()
        self._server.start()
        return self

    def close(self) -> None:
        """End every connection; waiting calls give up. What was recorded stays readable."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._agenda_changed.notify()
        self._server.close()
        if self._timekeeper.is_alive():
            self._timekeeper.join()
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def endpoint(self, vm: str = "") -> str:
        """``http://127.0.0.1:PORT`` of a VM, by default of the first one."""
        return self._server.url(self._service.vm(vm))

    @property
    def is_open(self) -> bool:
        """Whether clients on other machines can connect."""
        return self._server.is_open

    # Actions

    def play(self, step: Step) -> str:
        """Carry out a step of a scenario's timeline now; returns the id of its event, if it has one.

        Events may be given by the names that scenario files give them, or by their ids. Raises SimulatorError if
        it cannot be done.
        """
        return self._do(lambda now: self._service.play(now, step))

    def schedule(self, type_: EventType, *, vms: Sequence[str] = (), id_: str = "", **plan: Any) -> str:
        """Announce an event, by default for the first VM and with the notice of its type; returns its id.

        ``plan``: further fields of Plan, such as ``notice_seconds``, ``lasts_seconds`` and ``source``.
        """
        return self.play(Step(at=0.0, event=Plan(type=type_, vms=tuple(vms), id=id_ or None, **plan)))

    def approve(self, event_id: str, by: str = PORTAL) -> None:
        """Approve as another VM or the portal would. Does not count as a request."""
        self._do(lambda now: self._service.azure.approve(now, self._service.id_of(event_id), by))

    def cancel(self, event_id: str) -> None:
        """Take back an event that has not started."""
        self.play(Step(at=0.0, cancel=event_id))

    def start_event(self, event_id: str) -> None:
        """Start a scheduled event now, approved or not."""
        self.play(Step(at=0.0, start=event_id))

    def end(self, event_id: str) -> None:
        """Let an event be over now, whether it was Started or not."""
        self.play(Step(at=0.0, end=event_id))

    def reset_incarnation(self, incarnation: int = 1) -> None:
        """Let DocumentIncarnation begin anew, as after a day without a request."""
        self.play(Step(at=0.0, reset_incarnation=incarnation))

    def fault(self, vm: str | None, kind: FaultKind, **fault: Any) -> None:
        """Inject a fault on a VM's port (None: on all), until it is cleared or ``seconds`` or ``count`` end it.

        ``fault``: further fields of Fault, such as ``status`` and ``on``.
        """
        vms = () if vm is None else (self._service.vm(vm),)
        self.play(Step(at=0.0, fault=Fault(kind=kind, vms=vms, **fault)))

    def clear_faults(self, vm: str | None = None) -> None:
        """End the faults of a VM's port (None: of all)."""
        vms = tuple(self.vms) if vm is None else (self._service.vm(vm),)
        self._do(lambda now: self._service.clear_faults(now, vms))

    # Queries

    def event(self, event_id: str) -> SimulatedEvent:
        """The event that has, or once had, this id; a scenario's own name of it does as well."""
        with self._at_present() as service:
            return service.azure.event(service.id_of(event_id))

    def events(self) -> tuple[SimulatedEvent, ...]:
        """Every event there has been, oldest first."""
        with self._at_present() as service:
            return service.azure.events()

    @property
    def incarnation(self) -> int:
        """DocumentIncarnation as it is now."""
        with self._at_present() as service:
            return service.azure.incarnation

    @property
    def is_finished(self) -> bool:
        """Whether the scenario is finished."""
        return self._service.has_ended

    def faults(self, vm: str = "") -> tuple[ActiveFault, ...]:
        """The faults that may hit a request to this VM."""
        with self._at_present() as service:
            return service.faults[service.vm(vm)].active(self._clock())

    def polls(self, vm: str = "") -> int:
        """The number of documents that this VM was served."""
        with self._changed:
            return self._service.polls[self._service.vm(vm)]

    def requests(self, vm: str | None = None) -> tuple[RequestRecord, ...]:
        """The requests of clients, in the order in which they were answered (the last 100,000)."""
        with self._changed:
            return tuple(record for record in self._requests if vm is None or record.vm == vm)

    def approvals(self, event_id: str | None = None) -> tuple[RequestRecord, ...]:
        """Approvals that were accepted, with an effect or not: all, or those of one event, by any id of it."""
        with self._changed:
            ids = None if event_id is None else {known.casefold() for known in self.event(event_id).ids}
            return tuple(
                record
                for record in self._requests
                if record.accepted and (ids is None or not ids.isdisjoint(map(str.casefold, record.accepted)))
            )

    def history(self) -> tuple[LogEntry, ...]:
        """The log entries so far, in order."""
        with self._at_present() as service:
            return tuple(service.azure.history)

    def stream(self) -> Iterator[LogEntry]:
        """Every log entry as it is written, from the first one on, until the scenario ends or ``close``."""
        sent = 0
        history = self._service.azure.history
        while True:
            with self._changed:
                while not (len(history) > sent or self.is_finished or self._is_closed):
                    self._changed.wait(1.0)  # on Windows Ctrl-C cannot break a wait, only come after it
                unsent = history[sent:]
                sent = len(history)
            if not unsent:
                return
            yield from unsent

    # Waiting. Time limits are real seconds.

    def wait_until(self, test: Callable[[], T], what: str, timeout_seconds: float = TIMEOUT_SECONDS) -> T:
        """Wait until ``test`` gives something true and return that; ``what`` completes the error's sentence.

        The test runs, under the simulator's lock, whenever something has happened or a request was answered.
        """
        with self._at_present():
            self._changed.wait_for(lambda: test() or self._is_closed, timeout_seconds)
            result = test()
            if result:
                return result
            why = (
                "the simulator was closed while" if self._is_closed else f"gave up after {timeout_seconds:g} s of"
            )
            raise SimulatorError(f"{why} waiting until {what}; {self._account()}", kind="timeout")

    def wait_polled(self, event_id: str, vm: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> SimulatedEvent:
        """Wait until a VM was served a document with the event."""
        name = self._service.vm(vm)
        return self._wait_event(event_id, lambda event: name in event.seen_by, f"seen by {name}", timeout_seconds)

    def wait_approved(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> SimulatedEvent:
        """Wait until the event is approved."""
        return self._wait_event(event_id, lambda event: event.approved_at is not None, "approved", timeout_seconds)

    def wait_started(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> SimulatedEvent:
        """Wait until the event has started; it may be gone by then."""
        return self._wait_event(event_id, lambda event: event.started_at is not None, "started", timeout_seconds)

    def wait_gone(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> SimulatedEvent:
        """Wait until the event is gone from the document."""
        return self._wait_event(event_id, lambda event: event.status == "Gone", "gone", timeout_seconds)

    def wait_polls(self, count: int = 1, vm: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Wait until a VM was served ``count`` more documents than it has now."""
        name = self._service.vm(vm)
        with self._changed:
            goal = self._service.polls[name] + count
            self.wait_until(
                lambda: self._service.polls[name] >= goal, f"{name} has polled {count} times more", timeout_seconds
            )

    # How

    def _respond(self, vm: str, connection: int, request: Request) -> tuple[Answer, Fault | None]:
        """Answer a request and record it; also the fault in sending the answer."""
        with self._changed:
            due = self._service.next_due()
            fault = self._service.choose_fault(self._clock(), vm, request)
        if fault is not None and fault.kind == "slow":
            self._server.closing.wait(fault.delay_seconds)
        with self._at_present() as service:
            answer = service.answer(self._clock(), vm, request, fault)
            self._record(
                RequestRecord(
                    at=datetime.now(UTC),
                    monotonic=time.monotonic(),
                    vm=vm,
                    connection=connection,
                    method=request.method,
                    path=request.target,
                    status=answer.status,
                    fault=fault.kind if fault else "",
                    headers=request.headers,
                    body=request.body.decode("utf-8", "replace"),
                    accepted=answer.accepted,
                    approved=answer.approved,
                    incarnation=service.azure.incarnation,
                )
            )
            service.advance(self._clock())  # an approval may have made something due at once
            if service.next_due() != due:
                self._agenda_changed.notify()
            self._changed.notify_all()
        return answer, fault

    def _record(self, record: RequestRecord) -> None:
        self._requests.append(record)
        if self._stream is None or self._stream.closed:
            return
        try:
            self._stream.write(msgspec.json.encode(record).decode() + "\n")
        except OSError as error:  # the client must get its answer
            text = f"requests are no longer written: {error.strerror}"
            self._service.azure.log("skipped", self._clock(), text=text)
            with suppress(OSError):  # it still has what could not be written
                self._stream.close()

    @contextmanager
    def _at_present(self) -> Iterator[Service]:
        """The service with everything done that was due, under the lock."""
        with self._changed:
            history = self._service.azure.history
            sent = len(history)
            has_ended = self.is_finished
            self._service.advance(self._clock())
            self._refuse()
            if len(history) > sent or self.is_finished != has_ended:
                self._changed.notify_all()
            yield self._service

    def _refuse(self) -> None:
        """Have the ports refuse connections, or accept them, as the faults say now."""
        if not self._is_closed:
            self._server.refuse(self._service.refused(self._clock()))

    def _do(self, action: Callable[[float], T]) -> T:
        """Change something, and let every waiting thread know."""
        with self._at_present() as service:
            result = action(self._clock())
            service.advance(self._clock())
            self._refuse()
            self._agenda_changed.notify()
            self._changed.notify_all()
            return result

    def _keep_time(self) -> None:
        with self._changed:
            while not self._is_closed:
                with self._at_present() as service:
                    due = min(service.next_due(), service.refused_until(self._clock()))
                # At least hourly: systems limit how long one may wait, and clocks get set.
                self._agenda_changed.wait(min(max(0.0, due - self._clock()), 3600.0))

    def _wait_event(
        self, event_id: str, test: Callable[[SimulatedEvent], bool], what: str, timeout_seconds: float
    ) -> SimulatedEvent:
        def found() -> SimulatedEvent | None:
            event = self._service.find(event_id)
            return event if event and test(event) else None

        event = self.wait_until(found, f"event {event_id} was {what}", timeout_seconds)
        assert event is not None  # noqa: S101  # wait_until returns what is true, which its type cannot say
        return event

    def _account(self) -> str:
        """The state of events and requests, for the message of a wait that timed out."""
        events = [f"{event.plan.type} {event.id} {event.status}" for event in self._service.azure.events()]
        last = ", ".join(map(str, list(self._requests)[-3:])) or "none"
        return f"events: {', '.join(events) or 'none'}; {len(self._requests)} requests, the last: {last}"


def _steady_wall_clock() -> Callable[[], float]:
    """Seconds since the epoch that pass steadily, also if the wall clock is set."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
