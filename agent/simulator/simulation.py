"""The simulator as a whole: Azure's model, the metadata service and the HTTP ports under one lock and one clock.

Owns the passing of time, the agenda of a scenario or a recording, and the record of what clients sent. The one
invariant: everything that was due is done before a request is answered, so that what a document shows never
depends on which thread ran first.
"""

import heapq
import itertools
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, TypeVar
from uuid import uuid4

import msgspec

from agent.simulator.azure import (
    NOTICE_SECONDS,
    Azure,
    EventType,
    Happening,
    Plan,
    SimulatedEvent,
    SimulatorError,
    Source,
    describe,
)
from agent.simulator.faults import RATE_LIMIT, Fault, FaultBook, FaultKind, FaultScope
from agent.simulator.protocol import (
    Answer,
    Imds,
    Request,
    VirtualMachine,
    make_answer,
    make_error,
    purpose_of,
)
from agent.simulator.recording import Recording, Replay, as_played
from agent.simulator.scenario import EventStep, FaultStep, Scenario, Step
from agent.simulator.server import LOOPBACK, Server

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long waiting lasts at most, by default: far more than what is waited for takes."""

# More than a day of one VM polling once a second; a bound so that a simulator left running does not grow.
_MAX_RECORDS = 100_000
_MAX_NAMES = 10_000
# Within these, every time that a scenario can name is a date, on Windows too (where they end with the year 3000).
_MIN_SPEED, _MAX_SPEED = 0.1, 1e6
_SOMEBODY = "somebody else"
_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in.</body></html>"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a client sent, and what it got."""

    number: int
    at: datetime
    """When it was answered, by the wall clock."""
    monotonic: float
    """The same by time.monotonic(), just before the first byte of the answer was sent."""
    vm: str
    connection: int
    """Counted from 1; requests on one kept-alive connection have the same number."""
    method: str
    path: str
    """With its query."""
    status: int
    """0 if there was no answer."""
    fault: str
    """Kind of the fault that befell it; "" for none."""
    headers: dict[str, str]
    """Names in lower case."""
    body: str
    accepted: tuple[str, ...]
    """Ids that this request asked to start and that were not refused."""
    approved: tuple[str, ...]
    """Those of them on which it had an effect: not on what was approved or had started before."""
    incarnation: int
    """DocumentIncarnation at that moment."""


class Simulator:
    """A Scheduled Events endpoint with one port per VM; a context manager.

    Every ``seconds`` given to a method is simulated: it passes in 1/``speed`` of the time. DurationInSeconds
    is not scaled, for it is a text in the document; nor are time limits of waiting, nor the request limit.
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
        is_endless: bool = False,
        requests_file: Path | None = None,
        linger_seconds: float = 3.0,
        incarnation: int | None = None,
        incarnation_step: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Without ``vms``: those of the scenario, else vm-1. Listens at once, but answers from ``start`` on.

        ``scenario``: a recording plays by itself; nothing else can be scheduled beside it.

        ``bind``: the address of this machine to listen on; 0.0.0.0 or ::, all of them.
        ``others``: names of further VMs that events may name and that have no port.
        ``begins_at_first_poll``: the scenario's time begins with the first request for a document.
        ``is_endless``: the scenario's end is not the simulator's; ``linger_seconds``: real time in which clients
        can still see that its last event has gone. ``requests_file`` gets each request as a line of JSON.
        ``clock`` gives seconds since the epoch and must run as fast as real time.
        """
        if not _MIN_SPEED <= speed <= _MAX_SPEED:
            expected = f"a number from {_MIN_SPEED:g} to {_MAX_SPEED:.0f}"
            raise SimulatorError(f"speed: expected {expected}; got {speed:g}", kind="usage")
        machines = _machines(vms, scenario)
        numbering = scenario if isinstance(scenario, Scenario) else Scenario()
        self.speed = speed
        self.vms: dict[str, VirtualMachine] = machines
        self._is_endless = is_endless
        self._linger_seconds = linger_seconds
        self._clock = clock or _steady_wall_clock()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # One of its own for the one thread that waits for a time, so that a request does not wake it.
        self._agenda_changed = threading.Condition(lock)
        self._replay = Replay(machines, new_id=_new_id) if isinstance(scenario, Recording) else None
        self._azure = self._replay or Azure(
            (*machines, *others, *numbering.others),
            new_id=_new_id,
            incarnation=numbering.incarnation if incarnation is None else incarnation,
            incarnation_step=incarnation_step or numbering.incarnation_step,
        )
        self._imds = Imds(self._azure, machines)
        self._faults = {vm: FaultBook(rate_limit) for vm in machines}
        self._records: deque[RequestRecord] = deque(maxlen=_MAX_RECORDS)
        self._record_numbers = itertools.count(1)
        self._polls = dict.fromkeys(machines, 0)
        self._scenario = scenario
        self._begins_at_first_poll = begins_at_first_poll
        self._began: float | None = None
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._planned = {step.event.name for step in numbering.timeline if step.event and step.event.name}
        self._named: dict[str, str] = {}  # a scenario's names of events -> ids
        self._ended = threading.Event()
        self._is_closed = False
        self._timekeeper = threading.Thread(target=self._keep_time, name="simulator-time", daemon=True)
        self._server = Server(machines, self, port, bind=bind)
        self._record_stream: TextIO | None = None
        if requests_file is not None:
            try:
                self._record_stream = requests_file.open("w", encoding="utf-8", buffering=1)
            except OSError as error:
                self._server.close()
                raise SimulatorError(
                    f"cannot write requests to {requests_file}: {error.strerror}", kind="usage"
                ) from error

    # Its own life

    def start(self) -> Self:
        """Begin to answer; does not block."""
        with self._changed:
            if not self._begins_at_first_poll:
                self._begin(self._clock())
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
        if self._record_stream is not None:
            self._record_stream.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def endpoint(self, vm: str = "") -> str:
        """``http://127.0.0.1:PORT`` of a VM, by default of the first one."""
        return f"http://{self._server.host}:{self._server.ports[self._vm(vm)]}"

    @property
    def is_open(self) -> bool:
        """Whether clients on other machines can connect."""
        return self._server.is_open

    # What happens

    def play(self, step: Step) -> str:
        """Do what a step of a scenario's timeline says, whatever its ``at``; returns the id of its event, if any.

        Events may be given by the names that scenario files give them, or by their ids. Raises SimulatorError if
        it cannot be done.
        """
        name = step.event.name if step.event else None
        if name and (name in self._planned or name in self._named):
            raise SimulatorError(f'there is an event "{name}" already; give another name', kind="usage")
        return self._do(lambda now: self._carry_out(now, step))

    def schedule(
        self,
        type_: EventType,
        *,
        vms: Sequence[str] = (),
        source: Source = "Platform",
        notice_seconds: float | None = None,
        duration_seconds: int = -1,
        description: str | None = None,
        lasts_seconds: float | None = 10.0,
        start_delay_seconds: float = 0.5,
        starts_when_approved: bool = True,
        all_must_approve: bool = False,
        begins_started: bool = False,
        shows_started: bool = True,
        new_id_at_start: bool = False,
        id_: str = "",
    ) -> str:
        """Announce an event, by default for the first VM and with the notice of its type; returns its id.

        It starts ``start_delay_seconds`` after the first approval (``all_must_approve``: after one by each of its
        VMs) or at NotBefore (a whole second, so up to a second more than ``notice_seconds`` away), and is gone
        ``lasts_seconds`` later (None: at ``end``).
        """
        step = EventStep(
            type=type_,
            id=id_ or None,
            vms=tuple(vms),
            source=source,
            notice=notice_seconds,
            duration=None if duration_seconds < 0 else duration_seconds,
            description=description,
            lasts=lasts_seconds,
            start_delay=start_delay_seconds,
            starts_when_approved=starts_when_approved,
            all_must_approve=all_must_approve,
            begins_started=begins_started,
            shows_started=shows_started,
            new_id_at_start=new_id_at_start,
        )
        return self._do(lambda now: self._azure.schedule(now, self._plan_of(step)))

    def approve(self, event_id: str, by: str = "") -> None:
        """Approve as somebody other than the client would: another VM, the portal. Does not count as a request."""
        self._do(lambda now: self._azure.approve(now, self._id(event_id), by or _SOMEBODY))

    def cancel(self, event_id: str) -> None:
        """Take back an event that has not started."""
        self._do(lambda now: self._azure.cancel(now, self._id(event_id)))

    def start_event(self, event_id: str) -> None:
        """Start a scheduled event now, approved or not."""
        self._do(lambda now: self._azure.start(now, self._id(event_id)))

    def end(self, event_id: str) -> None:
        """Let an event be over now, whether it was Started or not."""
        self._do(lambda now: self._azure.end(now, self._id(event_id)))

    def reset_incarnation(self, incarnation: int = 1) -> None:
        """Let DocumentIncarnation begin anew, as after a day without a request."""
        self._do(lambda now: self._azure.reset_incarnation(now, incarnation))

    def fault(
        self,
        vm: str | None,
        kind: FaultKind,
        *,
        on: FaultScope = "any",
        seconds: float | None = None,
        count: int | None = None,
        status: int = 500,
        delay_seconds: float = 1.0,
        size_bytes: int = 64 * 1024 * 1024,
        takes_effect: bool = False,
    ) -> None:
        """Misbehave on a VM's port (None: on every one) for a time, for a number of requests, or until cleared."""
        step = FaultStep(
            kind=kind,
            vms=() if vm is None else (self._vm(vm),),
            on=on,
            for_=seconds,
            count=count,
            status=status,
            delay=delay_seconds,
            size_bytes=size_bytes,
            takes_effect=takes_effect,
        )
        self._do(lambda now: self._add_fault(now, step))

    def clear_faults(self, vm: str | None = None) -> None:
        """Behave again."""
        vms = tuple(self.vms) if vm is None else (self._vm(vm),)
        self._do(lambda now: self._clear_faults(now, vms))

    # What has happened

    def event(self, event_id: str) -> SimulatedEvent:
        """The event that has, or once had, this id; a scenario's own name of it does as well."""
        with self._changed:
            self._advance()
            return self._azure.event(self._id(event_id))

    def events(self) -> tuple[SimulatedEvent, ...]:
        """Every event there has been, oldest first."""
        with self._changed:
            self._advance()
            return self._azure.events()

    @property
    def incarnation(self) -> int:
        """DocumentIncarnation as it is now."""
        with self._changed:
            self._advance()
            return self._azure.incarnation

    @property
    def is_finished(self) -> bool:
        """Whether the scenario is at its end."""
        return self._ended.is_set()

    def names(self) -> dict[str, str]:
        """Names that a scenario or ``play`` gave to events, and the ids that these had first."""
        with self._changed:
            return dict(self._named)

    def faults(self, vm: str = "") -> tuple[tuple[Fault, int | None], ...]:
        """The faults that may befall a request to this VM, each with how many it still will (None: any number)."""
        with self._changed:
            return self._faults[self._vm(vm)].active(self._clock())

    def polls(self, vm: str = "") -> int:
        """How many documents this VM has been served."""
        with self._changed:
            return self._polls[self._vm(vm)]

    def requests(self, vm: str | None = None) -> tuple[RequestRecord, ...]:
        """What clients sent, in the order in which it was answered (the last 100,000)."""
        with self._changed:
            return tuple(record for record in self._records if vm is None or record.vm == vm)

    def approvals(self, event_id: str | None = None) -> tuple[RequestRecord, ...]:
        """Approvals that were accepted, with an effect or not: all, or those of one event, by any id of it."""
        with self._changed:
            if event_id is None:
                return tuple(record for record in self._records if record.accepted)
            ids = {known.casefold() for known in self.event(event_id).ids}
            return tuple(
                record for record in self._records if any(one.casefold() in ids for one in record.accepted)
            )

    def happenings(self) -> tuple[Happening, ...]:
        """What is worth telling, in order (the last 10,000)."""
        with self._changed:
            self._advance()
            return tuple(self._azure.history)

    def follow(self) -> Iterator[Happening]:
        """Every happening as it happens, from the first one on, until the scenario ends or ``close``."""
        told = 0
        while True:
            with self._changed:
                while not (self._azure.told > told or self._ended.is_set() or self._is_closed):
                    self._changed.wait(1.0)  # on Windows Ctrl-C cannot break a wait, only come after it
                news, told = self._azure.news(told), self._azure.told
            if not news:
                return
            yield from news

    # Waiting for it. Time limits are real seconds.

    def wait_until(self, test: Callable[[], T], what: str, timeout_seconds: float = PATIENCE_SECONDS) -> T:
        """Wait until ``test`` gives something true and return that; ``what`` completes the error's sentence.

        The test runs, under the simulator's lock, whenever something has happened or a request was answered.
        """
        with self._changed:
            self._advance()
            self._changed.wait_for(lambda: test() or self._is_closed, timeout_seconds)
            result = test()
            if result:
                return result
            why = "the simulator was closed" if self._is_closed else f"waited {timeout_seconds:g} s in vain"
            raise SimulatorError(f"{why} until {what}; {self._account()}", kind="timeout")

    def wait_seen(self, event_id: str, vm: str = "", timeout_seconds: float = PATIENCE_SECONDS) -> SimulatedEvent:
        """Wait until a VM has been served a document with the event."""
        name = self._vm(vm)
        return self._wait_event(event_id, lambda event: name in event.seen_by, f"seen by {name}", timeout_seconds)

    def wait_approved(self, event_id: str, timeout_seconds: float = PATIENCE_SECONDS) -> SimulatedEvent:
        """Wait until somebody has approved the event."""
        return self._wait_event(event_id, lambda event: event.approved_at is not None, "approved", timeout_seconds)

    def wait_started(self, event_id: str, timeout_seconds: float = PATIENCE_SECONDS) -> SimulatedEvent:
        """Wait until the event has started; it may be gone by then."""
        return self._wait_event(event_id, lambda event: event.started_at is not None, "started", timeout_seconds)

    def wait_gone(self, event_id: str, timeout_seconds: float = PATIENCE_SECONDS) -> SimulatedEvent:
        """Wait until the event has gone from the document."""
        return self._wait_event(event_id, lambda event: event.status == "Gone", "gone", timeout_seconds)

    def wait_polls(self, count: int = 1, vm: str = "", timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a VM has been served ``count`` more documents than it has now."""
        name = self._vm(vm)
        with self._changed:
            goal = self._polls[name] + count
            self.wait_until(
                lambda: self._polls[name] >= goal, f"{name} has polled {count} times more", timeout_seconds
            )

    def wait_requests(
        self,
        count: int,
        *,
        vm: str | None = None,
        method: str | None = None,
        timeout_seconds: float = PATIENCE_SECONDS,
    ) -> tuple[RequestRecord, ...]:
        """Wait until there have been ``count`` requests of this kind in all, whatever they got; returns them."""

        def enough() -> tuple[RequestRecord, ...]:
            found = tuple(record for record in self.requests(vm) if method in (None, record.method))
            return found if len(found) >= count else ()

        kind = f"{method or 'any'} requests of {vm or 'any VM'}"
        return self.wait_until(enough, f"there were {count} {kind}", timeout_seconds)

    def wait_finished(self, timeout_seconds: float) -> None:
        """Wait until the scenario is at its end."""
        self.wait_until(self._ended.is_set, "the scenario had ended", timeout_seconds)

    # Called by the server

    def choose_fault(self, vm: str, request: Request) -> Fault | None:
        """The fault that befalls this request."""
        purpose = purpose_of(request)
        with self._changed:
            now = self._clock()
            if self._began is None and purpose == "poll":
                self._begin(now)
            self._advance()
            return self._faults[vm].take(now, purpose)

    def answer(self, vm: str, connection: int, request: Request, fault: Fault | None, *, is_heard: bool) -> Answer:
        """The answer to a request, which is recorded."""
        with self._changed:
            now = self._clock()
            self._advance()
            told = self._azure.told
            is_too_soon = self._faults[vm].is_over_limit(now)
            is_honest = fault is None or fault.kind in ("slow", "drip")
            if is_too_soon and fault is None:
                answer = make_error(429, "Too many requests")
            elif not is_heard:
                # The client gave up waiting. An approval counts all the same, as far as it is one.
                right = self._imds.answer(now, vm, request) if request.method == "POST" else None
                answer = _effects_of(right, Answer(status=0, wire=b""))
            elif fault is None or is_honest:
                answer = self._imds.answer(now, vm, request)
                if answer.status == 200 and purpose_of(request) == "poll":
                    self._polls[vm] += 1
            else:
                answer = self._spoilt(now, vm, request, fault)
            record = RequestRecord(
                number=next(self._record_numbers),
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
                incarnation=self._azure.incarnation,
            )
            self._records.append(record)
            if self._record_stream is not None and not self._is_closed:
                self._record_stream.write(msgspec.json.encode(record).decode() + "\n")
            if self._azure.told > told:
                self._advance()  # an approval may have made something due at once
                self._agenda_changed.notify()
            self._changed.notify_all()
            return answer

    # How

    def _spoilt(self, now: float, vm: str, request: Request, fault: Fault) -> Answer:
        """What is sent instead of the right answer, as far as it is bytes."""
        needs_right = fault.takes_effect or fault.kind in ("truncated", "half-closed", "wrong-length")
        right = self._imds.answer(now, vm, request) if needs_right else None
        return _effects_of(right, self._wrong(vm, fault, right))

    def _wrong(self, vm: str, fault: Fault, right: Answer | None) -> Answer:
        match fault.kind:
            case "empty":
                return make_answer(200)
            case "status":
                return make_error(fault.status)
            case "redirect":
                return make_answer(302, headers=(("Location", f"{self.endpoint(vm)}/redirected"),))
            case "html":
                return make_answer(200, _PAGE, content_type="text/html; charset=utf-8")
            case "garbage":
                return make_answer(200, b'\x00\xff\xfe{"DocumentIncarnation"')
            case "truncated" | "half-closed" if right is not None:
                cut = len(right.wire) - (len(right.body) + 1) // 2
                return msgspec.structs.replace(right, wire=right.wire[:cut])
            case "wrong-length" if right is not None:
                shorter = make_answer(right.status, right.body[: len(right.body) // 2])
                return msgspec.structs.replace(right, wire=shorter.wire + right.body[len(right.body) // 2 :])
            case "bad-chunks":
                return _bare(200, "Transfer-Encoding: chunked", b"zz\r\nnot a chunk\r\n0\r\n\r\n")
            case "gzip-bomb":
                return make_answer(200, _pack(fault.size_bytes), headers=(("Content-Encoding", "gzip"),))
            case "oversized":
                return _bare(200, f"Content-Length: {fault.size_bytes}")
            case "endless":
                return _bare(200, "Connection: close")
            case "not-http":
                return Answer(status=0, wire=b"\x15\x03\x01 this is not HTTP\r\n\r\n")
        return Answer(status=0, wire=b"")  # reset and stall send nothing

    def _do(self, action: Callable[[float], T]) -> T:
        """Change something, and let everybody know."""
        with self._changed:
            self._advance()
            result = action(self._clock())
            self._advance()
            self._agenda_changed.notify()
            self._changed.notify_all()
            return result

    def _begin(self, now: float) -> None:
        self._began = now
        if isinstance(self._scenario, Recording):
            assert self._replay is not None  # noqa: S101  # made together
            plan = [
                (due, partial(self._replay.show, recorded=recorded, body=body))
                for due, recorded, body in as_played(self._scenario, now, self.speed)
            ]
        else:
            steps = self._scenario.timeline if self._scenario else ()
            plan = [(now + step.at / self.speed, partial(self._play, step=step)) for step in steps]
        if plan:
            self._azure.tell("began", now)
        self._agenda = [(due, number, action) for number, (due, action) in enumerate(plan)]
        heapq.heapify(self._agenda)
        self._agenda_changed.notify()

    def _advance(self) -> None:
        """Do what is due, each thing at its own time."""
        now = self._clock()
        told = self._azure.told
        while (due := self._next_due()) <= now:
            if self._agenda and self._agenda[0][0] == due:
                heapq.heappop(self._agenda)[2](due)
            elif self._azure.next_due <= due:
                self._azure.advance(due)
            else:
                self._ended.set()
                self._changed.notify_all()
        if self._azure.told > told:
            self._changed.notify_all()

    def _next_due(self) -> float:
        next_step = self._agenda[0][0] if self._agenda else math.inf
        return min(next_step, self._azure.next_due, self._end_due())

    def _end_due(self) -> float:
        """When the scenario is at its end, as far as can be told now."""
        if self._is_endless or self._scenario is None or self._began is None or self._ended.is_set():
            return math.inf
        if isinstance(self._scenario, Scenario) and self._scenario.ends is not None:
            return self._began + self._scenario.ends / self.speed
        if self._agenda or self._azure.next_due < math.inf:
            return math.inf
        last = self._azure.history[-1].at.timestamp() if self._azure.history else self._began
        return max(last, *(book.ends_at() for book in self._faults.values())) + self._linger_seconds

    def _keep_time(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._advance()
                # At least hourly: systems limit how long one may wait, and clocks get set.
                self._agenda_changed.wait(min(max(0.0, self._next_due() - self._clock()), 3600.0))

    def _play(self, now: float, step: Step) -> None:
        """Take one step of the scenario; one that has become impossible is told and left out."""
        try:
            self._carry_out(now, step)
        except SimulatorError as error:
            self._azure.tell("skipped", now, text=str(error))

    def _carry_out(self, now: float, step: Step) -> str:
        """Do what a step says; returns the id of the event it was about, if it was about one."""
        event_id = ""
        if step.event:
            event_id = self._azure.schedule(now, self._plan_of(step.event))
            if step.event.name:
                self._named[step.event.name] = event_id
                if len(self._named) > _MAX_NAMES:
                    del self._named[next(iter(self._named))]
        elif step.fault:
            self._add_fault(now, step.fault)
        elif step.clear_faults:
            self._clear_faults(now, tuple(self.vms))
        elif step.reset_incarnation is not None:
            self._azure.reset_incarnation(now, step.reset_incarnation)
        elif step.named:
            action, name = step.named
            event_id = self._id(name)
            if action == "approve":
                self._azure.approve(now, event_id, _SOMEBODY)
            else:
                {"cancel": self._azure.cancel, "start": self._azure.start, "end": self._azure.end}[action](
                    now, event_id
                )
        return event_id

    def _plan_of(self, step: EventStep) -> Plan:
        notice = NOTICE_SECONDS[step.type] if step.notice is None else step.notice
        return Plan(
            type=step.type,
            vms=step.vms or (next(iter(self.vms)),),
            source=step.source,
            notice_seconds=notice / self.speed,
            duration_seconds=-1 if step.duration is None else int(step.duration),
            description=describe(step.type, step.source) if step.description is None else step.description,
            lasts_seconds=None if step.lasts is None else step.lasts / self.speed,
            start_delay_seconds=step.start_delay / self.speed,
            starts_when_approved=step.starts_when_approved,
            all_must_approve=step.all_must_approve,
            begins_started=step.begins_started,
            shows_started=step.shows_started,
            new_id_at_start=step.new_id_at_start,
            id=step.id or "",
        )

    def _add_fault(self, now: float, step: FaultStep) -> None:
        fault = Fault(
            kind=step.kind,
            on=step.on,
            status=step.status,
            delay_seconds=step.delay / self.speed,
            size_bytes=step.size_bytes,
            until=None if step.for_ is None else now + step.for_ / self.speed,
            count=step.count,
            takes_effect=step.takes_effect,
        )
        text = f"{step.kind} {step.status}" if step.kind == "status" else step.kind
        for name in [self._vm(vm) for vm in step.vms] or self.vms:
            self._faults[name].add(fault)
            self._azure.tell("fault", now, vm=name, text=text)

    def _clear_faults(self, now: float, vms: tuple[str, ...]) -> None:
        for name in vms:
            self._faults[name].clear()
            self._azure.tell("behaved", now, vm=name)

    def _vm(self, name: str) -> str:
        if not name:
            return next(iter(self.vms))
        if name not in self.vms:
            raise SimulatorError(f"no VM {name!r} here; expected one of {', '.join(self.vms)}", kind="usage")
        return name

    def _find(self, event_id: str) -> SimulatedEvent | None:
        """The event, or None while it is only planned."""
        if event_id in self._planned and event_id not in self._named:
            return None
        return self._azure.event(self._id(event_id))

    def _id(self, event_id: str) -> str:
        """The id of an event that may be given by its name in the scenario."""
        return self._named.get(event_id, event_id)

    def _wait_event(
        self, event_id: str, test: Callable[[SimulatedEvent], bool], what: str, timeout_seconds: float
    ) -> SimulatedEvent:
        def found() -> SimulatedEvent | None:
            event = self._find(event_id)
            return event if event and test(event) else None

        event = self.wait_until(found, f"event {event_id} was {what}", timeout_seconds)
        assert event is not None  # noqa: S101  # wait_until returns what is true, which its type cannot say
        return event

    def _account(self) -> str:
        """What there is to see, for the message of a wait in vain."""
        events = [f"{event.plan.type} {event.id} {event.status}" for event in self._azure.events()]
        requests = [
            f"{record.vm} {record.method} {record.status}{f' ({record.fault})' if record.fault else ''}"
            for record in list(self._records)[-3:]
        ]
        return (
            f"events: {', '.join(events) or 'none'}; "
            f"{len(self._records)} requests, the last: {', '.join(requests) or 'none'}"
        )


def _effects_of(right: Answer | None, wrong: Answer) -> Answer:
    """The wrong answer to a request that was carried out as the right one tells, or (None) was not."""
    if right is None:
        return wrong
    return msgspec.structs.replace(wrong, accepted=right.accepted, approved=right.approved)


def _bare(status: int, header: str, body: bytes = b"") -> Answer:
    """An answer with this header alone; without ``body``, that is the server's to make up."""
    head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json; charset=utf-8\r\n{header}\r\n\r\n"
    return Answer(status=status, wire=head.encode() + body)


@lru_cache(maxsize=1)
def _pack(size_bytes: int) -> bytes:
    """A gzip of an empty document with so many blanks behind it, made without holding them."""
    packer = zlib.compressobj(wbits=31)
    parts = [packer.compress(b'{"DocumentIncarnation":1,"Events":[]}')]
    blank = b" " * 2**20
    parts += [packer.compress(blank) for _ in range(size_bytes // len(blank))]
    return b"".join([*parts, packer.compress(blank[: size_bytes % len(blank)]), packer.flush()])


def _machines(
    vms: Sequence[str | VirtualMachine], scenario: Scenario | Recording | None
) -> dict[str, VirtualMachine]:
    if not vms and isinstance(scenario, Recording):
        origin = scenario.origin
        vms = [VirtualMachine(name=origin.vm, vm_id=origin.vm_id, scale_set=origin.scale_set)]
    elif not vms and isinstance(scenario, Scenario):
        vms = [
            VirtualMachine(name=name, vm_id=scenario.vm_ids.get(name, ""), scale_set=scenario.scale_set)
            for name in scenario.vms
        ]
    machines = [VirtualMachine(name=vm) if isinstance(vm, str) else vm for vm in vms or ("vm-1",)]
    by_name = {machine.name: machine for machine in machines}
    if len(by_name) < len(machines):
        raise SimulatorError("two VMs have the same name", kind="usage")
    return by_name


def _new_id() -> str:
    return str(uuid4()).upper()


def _steady_wall_clock() -> Callable[[], float]:
    """Seconds since the epoch that pass steadily, whatever is done to the wall clock meanwhile."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def _time(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)
