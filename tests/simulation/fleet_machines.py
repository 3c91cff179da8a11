"""One VM of a simulated fleet: a whole engine, and the fleet's client beside it as in its thread.

Real are the engine with its store (in memory), FleetClient and ``plan``. Simulated are the threads, the hooks, the
network and the process, which may be killed between any two requests and any two transactions.
"""

import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from machine import Machine, SimulatedExecutor
from msgspec.structs import replace
from oracle import BrokenError
from stepped_thread import KilledError, SteppedThread

from scheduled_events_agent.daemon import fleet as thread
from scheduled_events_agent.engine import Engine, FleetUpdate, HookCommand, MachinePaused
from scheduled_events_agent.fleet.backend import BackendError, Record
from scheduled_events_agent.fleet.client import FleetClient
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.store import Store, file
from scheduled_events_agent.workflow import (
    ApprovalAnswered,
    Approve,
    FleetEventStatus,
    FleetRequest,
    HookOutcome,
    OperatorAction,
    RunHook,
)

if TYPE_CHECKING:
    from fleet_simulation import FleetSimulation

_POLL_SECONDS = 1
_MAX_PAST_WAKES = 100
_KILL_CHANCE = 0.003
_DEAD_SECONDS = 200.0
"""A VM that dies while it waits holds up those behind it for three of its intervals."""
_NO_PATH = Path("/nonexistent/state.db")

Kind = Literal["list", "create", "update", "delete"]


class Sent(NamedTuple):
    """One request to the store."""

    kind: Kind
    key: str = ""
    etag: str = ""
    fields: Mapping[str, str] | None = None


class Vm(Machine):
    """One VM. ``engine`` is None while its agent does not run."""

    def __init__(self, simulation: "FleetSimulation", vm_id: str, name: str) -> None:
        """``name``: what Azure calls it. Two VMs may have one."""
        self.simulation = simulation
        self.vm_id = vm_id
        self.name = name
        self.clock_set_at = 0.0
        self.is_dead = False
        self.frozen_until = 0.0
        self.disturbed_until = 0.0
        """Until when something is wrong with it, or follows from that."""
        self.killed_until = 0.0
        """Until when its agent is down, and what follows from that."""
        self.appeared_at: dict[str, float] = {}
        """When it first saw this appearance of an event."""
        self.up_since = 0.0
        """Since when its agent runs, and the VM does not stand still."""
        self.unavailable_from: float | None = None
        """Since when no request of it was answered as it should."""
        self.asked_pause = 0.0
        """The pause that the store asked for with its last error, in seconds."""
        self.documents: dict[str, tuple[str, ...]] = {}
        """Resources of the events, as it has last read them."""
        self.seen_at: dict[str, float] = {}
        """When the process that runs has first decided on the event."""
        self.requests: tuple[FleetRequest, ...] = ()
        """What it asks of its fleet."""
        self.listed_at = 0.0
        """When the last list was sent that has been answered."""
        self.executor = SimulatedExecutor(self)
        self._poll_phase = self.chance("polls").random()
        self._fleet_thread = SteppedThread()
        self._frozen: list[Callable[[], None]] = []
        """What goes on when the VM does."""
        self._operators: dict[str, str] = {}
        self._begun: set[str] = set()
        self._known: dict[str, str] = {}
        """Workflow id -> event, of the open workflows."""
        self._names: dict[str, str] = {}
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        file._migrate(self._connection, 0)

    # --- the machine

    @property
    def schedule(self) -> "FleetSimulation":
        return self.simulation

    def is_shutting_down(self) -> bool:
        return False

    def chance(self, what: str) -> random.Random:
        return self.simulation.chance(f"{self.vm_id}: {what}")

    @property
    def is_frozen(self) -> bool:
        return self.simulation.at < self.frozen_until

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do it then, if the agent lives so long; if the VM stands still, when it goes on."""
        self.at(self.simulation.at + seconds, what)

    def at(self, at: float, what: Callable[[], None]) -> None:
        """Do it at this time, if the agent lives so long; if the VM stands still, when it goes on."""
        life = self.life

        def go() -> None:
            if life != self.life or self.engine is None:
                return
            if self.is_frozen:
                self._frozen.append(go)
            else:
                what()

        self.simulation.do_at(at, go)

    def freeze(self, seconds: float) -> None:
        """The VM stands still."""
        if self.is_dead or self.is_frozen:
            return
        self.simulation.log(f"{self.vm_id} stands still for {seconds:.0f} s")
        self.frozen_until = self.simulation.at + seconds
        self.disturb(seconds + 5.0)
        self.simulation.oracle.stopped(self)
        self.simulation.after(seconds, lambda: self._thaw(seconds))

    def _thaw(self, seconds: float) -> None:
        if self.is_dead:
            return
        self.simulation.log(f"{self.vm_id} goes on")
        self.up_since = self.simulation.at
        waiting, self._frozen = self._frozen, []
        if self.engine is not None:
            self._mail.append(MachinePaused(seconds))
            self.poll_soon()
            self.turn_soon()
        for go in waiting:
            go()
        self.simulation.oracle.looks(self)

    def disturb(self, seconds: float) -> None:
        """Something is wrong with it for so long."""
        self.disturbed_until = max(self.disturbed_until, self.simulation.at + seconds)

    def set_clock(self, offset: int) -> None:
        if self.is_frozen:
            # Once it has polled again: see below.
            self.simulation.after(self.frozen_until - self.simulation.at + 2.0, lambda: self.set_clock(offset))
            return
        self.simulation.log(f"{self.vm_id}: its clock is set, now {offset:+d} s")
        if self.engine is not None and self._read_at is not None:
            # Until the next poll the wall clock says how old the document is: that is not checked here.
            self._read_at += timedelta(seconds=offset - self.wall_offset)
        self.wall_offset = offset
        self.clock_set_at = self.simulation.at
        self.turn_soon()
        self.simulation.oracle.looks(self)

    # --- the agent's life

    def start(self) -> None:
        """Nothing of the fleet is stored: it comes from the store again."""
        if self.is_dead or self.engine is not None:
            return
        fleet = self.simulation.settings.fleet
        self._mail: list[Any] = [Identity(name=self.name, vm_id=self.vm_id, group="web")]
        self._body = b""
        self._read_at: datetime | None = None
        self._client: FleetClient | None = None
        self._published: tuple[FleetRequest, ...] | None = None
        self.requests = ()
        self._has_news = False
        self._last = FleetUpdate(group="web", settings=fleet)
        self._turn_at = self._poll_at = self._sync_at = -1.0
        self._past_wakes = 0
        self._sent = 0
        self.unavailable_from = None
        self.seen_at = {}
        self.documents = {}
        self.up_since = self.simulation.at
        store = CrashingStore(self._connection, _NO_PATH)
        store.vm = self
        self.executor = SimulatedExecutor(self)
        try:
            self.engine = Engine(
                self.simulation.settings,
                store,
                self.simulation.metrics,
                self.executor,
                self,
                put=self.executor.report,
                notify=self.executor.notify,
                publish_fleet_requests=self._publish,
            )
            self.engine.start()
            self._looks_again = bool(self.engine.workflows)
        except KilledError:
            self.crash("while it starts")
            return
        self.poll_soon()

    def crash(self, how: str = "", *, down_seconds: float | None = None) -> None:
        """Kill -9. ``down_seconds``: until it starts again; by default what chance gives."""
        self.simulation.log(f"{self.vm_id}: its agent is killed {how}".rstrip())
        self.executor.close()
        self.life += 1
        self.engine = None
        if self._fleet_thread.is_busy:
            self._fleet_thread.resume(KilledError())
        if down_seconds is None:
            down_seconds = self.chance("restart").choice((0.1, 5.0, 40.0))
        self.simulation.oracle.stopped(self, is_killed=True)
        self.killed_until = max(self.killed_until, self.simulation.at + down_seconds + 2.0)
        self.simulation.after(down_seconds, self._restart)

    def _restart(self) -> None:
        if self.is_dead or self.engine is not None:
            return
        if self.is_frozen:
            self._frozen.append(self._restart)
            return
        self.simulation.log(f"{self.vm_id}: its agent starts")
        self.start()

    def kill(self) -> None:
        if self.engine is not None and not self.is_frozen:
            self.crash()

    def reboot(self, down_seconds: float) -> None:
        """Reboot the machine: its preparation is undone."""
        if self.is_dead or self.is_frozen or self.engine is None:
            return
        self.simulation.log(f"{self.vm_id} reboots, for {down_seconds:.0f} s")
        self.boot += 1
        self.crash("by the reboot", down_seconds=down_seconds)
        self.disturb(down_seconds + 2.0)
        self.simulation.oracle.rebooted(self)

    def die(self) -> None:
        """The VM is gone for good."""
        if self.is_dead:
            return
        self.is_dead = True
        self.simulation.log(f"{self.vm_id} dies")
        self.crash("with its VM")
        self.disturb(_DEAD_SECONDS)
        self.requests = ()
        self.simulation.oracle.died(self)

    def end(self) -> None:
        """Give back what it has opened."""
        self._fleet_thread.end()
        self._connection.close()

    def operator_says(self, action: OperatorAction) -> None:
        """Send a command about one of the VM's events."""
        if self.engine is None or self.is_frozen or not self.engine.workflows:
            return
        workflow = self.chance("operator").choice([*self.engine.workflows.values()])
        name = self.simulation.name_of(workflow.event.id)
        self.simulation.log(f"{self.vm_id}: an operator says of {name}: {action}")
        Store(self._connection, _NO_PATH).add_request(workflow.id, action, "kim", self.now())
        self.turn_soon()

    # --- documents and cycles

    def poll_soon(self) -> None:
        at = self._poll_phase + floor(self.simulation.at - self._poll_phase + 0.001) + _POLL_SECONDS
        if self.engine is not None and (self._poll_at < self.simulation.at or at < self._poll_at):
            self._poll_at = at
            self.after(at - self.simulation.at, lambda: self._poll() if at == self._poll_at else None)

    def _poll(self) -> None:
        assert self.engine is not None
        self._poll_at = -1.0
        body, document = self.simulation.document()
        if body != self._body or self.engine.snapshot.needs_answer:
            self._body = body
            self._mail.append(replace(document, answered=self.monotonic()))
            self.documents = {self.simulation.name_of(event.id): event.resources for event in document.events}
            self.turn_soon()
        self._read_at = self.now()

    def turn_soon(self, seconds: float = 0.0) -> None:
        at = self.simulation.at + seconds
        if self.engine is not None and (self._turn_at < self.simulation.at or at < self._turn_at):
            self._turn_at = at
            self.after(seconds, lambda: self._turn() if at == self._turn_at else None)

    def _turn(self) -> None:
        engine = self.engine
        assert engine is not None
        self._turn_at = -1.0
        mail, self._mail = self._mail, []
        if self._read_at is not None and self._body == self.simulation.document()[0]:
            self._read_at = self.now()  # it polls once a second; what it reads again is left out here
        try:
            for item in mail:
                engine.receive(item)
            if not engine.run_cycle(self._read_at):
                raise BrokenError(f"{self.vm_id} cannot write its state: {engine.store_failure}")
        except KilledError:
            self.crash("in a turn")
            return
        self._look_at_board(engine)
        if engine.snapshot.needs_answer:
            self.poll_soon()
        if engine.wake_at is not None:
            seconds = (engine.wake_at - self.now()).total_seconds()
            self._past_wakes = self._past_wakes + 1 if seconds <= 0.0 else 0
            if self._past_wakes > _MAX_PAST_WAKES:
                raise BrokenError(f"{self.vm_id} turns again and again for {engine.wake_at}, which is past")
            self.turn_soon(max(0.001, seconds))

    def _look_at_board(self, engine: Engine) -> None:
        """Pass on what the oracle must know of this cycle."""
        self._look_at_operators(engine)
        oracle = self.simulation.oracle
        known: dict[str, str] = {}
        for workflow in engine.workflows.values():
            name = known[workflow.id] = self.simulation.name_of(workflow.event.id)
            if workflow.id not in self._known:
                self.appeared_at[name] = self.simulation.at
            self.seen_at.setdefault(name, self.simulation.at)
            if workflow.prepare.state != "idle":
                self._note_begun(workflow.id, name)
        begun = {known[workflow.id] for workflow in engine.workflows.values() if workflow.prepare.state != "idle"}
        for workflow_id, name in self._known.items():
            if workflow_id not in known and name not in begun:
                oracle.closed(self, name)
        self._known = known
        self.seen_at = {name: at for name, at in self.seen_at.items() if name in self.documents}
        oracle.looks(self)

    def _note_begun(self, workflow_id: str, name: str) -> None:
        if workflow_id not in self._begun:
            self._begun.add(workflow_id)
            self.simulation.oracle.begun(self, name)

    def _look_at_operators(self, engine: Engine) -> None:
        for workflow in engine.workflows.values():
            action = workflow.operator_action
            if self._operators.get(workflow.id, "") != action:
                self._operators[workflow.id] = action
                self.simulation.oracle.operator_said(self, self.simulation.name_of(workflow.event.id), action)

    def needed_seconds(self) -> float:
        """How long the preparation may take, as the agent has it."""
        assert self.engine is not None
        settings = self.engine.settings
        return self.engine._hook_runs.seconds(settings.hooks)["drain"] + settings.agent.reserve

    def is_prepared_now(self, name: str) -> bool:
        """Whether that is true of the present appearance of the event, as far as the agent can be asked."""
        return self.engine is None or any(
            self.simulation.name_of(one.event.id) == name and not one.is_over and one.prepare.state == "succeeded"
            for one in self.engine.workflows.values()
        )

    def statuses(self) -> dict[str, FleetEventStatus]:
        """How the events stand that wait for its fleet, as it has last heard.

        Who is ready counts for a VM that is ready itself: one that waits to begin lists less often.
        """
        waiting = {
            request.event: request
            for request in self.requests
            if (request.stage == "requested" and request.needs_slot)
            or (request.stage == "ready" and request.needs_all)
        }
        return {
            event: status if waiting[event].stage == "ready" else replace(status, not_ready=())
            for event, status in self._last.statuses.items()
            if event in waiting
        }

    def has_slot(self, name: str) -> bool:
        """Whether the event may begin, or be approved, by the last list."""
        events = [one.event for one in self.requests if self.simulation.name_of(one.event_id) == name]
        is_old = self.monotonic() - self._last.listed_at > 10.0
        statuses = [self._last.statuses.get(event, FleetEventStatus()) for event in events]
        return not is_old and any(status.has_slot for status in statuses)

    def give(self, life: int, item: Any) -> None:
        """Into the inbox of the agent that asked for it."""
        if life == self.life and self.engine is not None:
            self._mail.append(item)
            self.turn_soon()

    # --- the thread of the fleet

    def _publish(self, requests: tuple[FleetRequest, ...]) -> None:
        if requests == self._published:
            return
        self._published = self.requests = requests
        self._has_news = True
        self.simulation.oracle.requested(self)
        if not self._fleet_thread.is_busy:
            self._sync_in(0.0)

    def _sync_in(self, seconds: float) -> None:
        # Rounded: the same whenever the rest of the pause is asked for.
        self._sync_at = at = ceil((self.simulation.at + seconds) * 1e6) / 1e6
        self.at(at, lambda: self._sync() if at == self._sync_at and not self._fleet_thread.is_busy else None)

    def _sync(self) -> None:
        fleet = self.simulation.settings.fleet
        assert fleet is not None
        self._has_news = False
        requests = self.requests
        if self._client is None:
            self._client = FleetClient(
                Requests(self),
                vm_id=self.vm_id,
                max_events=fleet.max_events,
                random=self.chance("fleet"),
                monotonic=self.monotonic,
                looks_again=self._looks_again,
            )
        client = self._client
        self._fleet_thread.begin(lambda: client.sync(requests))
        self._look_at_fleet_thread()

    def go_on(self, number: int, answer: Any) -> None:
        """The answer to this request has arrived."""
        if number == self._sent and self._fleet_thread.is_busy:
            self._answer = answer
            self._fleet_thread.resume()
            self._look_at_fleet_thread()

    def _look_at_fleet_thread(self) -> None:
        if self._fleet_thread.is_busy:
            return
        failure = self._fleet_thread.failure
        if isinstance(failure, KilledError):
            self.crash("at a request")
        elif failure is not None:
            raise failure
        else:
            self._has_synced()

    def _has_synced(self) -> None:
        client = self._client
        assert client is not None
        update = thread._update(self._last, client)
        if client.error is None and self.unavailable_from is not None:
            self.simulation.oracle.outage_ended(self, self.monotonic() - self.unavailable_from)
        self.unavailable_from = None if client.error is None else client.unavailable_from
        if thread._is_worth_reporting(self._last, update):
            self._mail.append(update)
            self.turn_soon()
        self._last = update
        if client.error is not None:
            self.disturb((client.next_sync_at or 0.0) - self.monotonic() + 1.0)
        if self._has_news:
            self._sync_in(0.0)
        elif client.next_sync_at is not None:
            self._sync_in(max(0.0, client.next_sync_at - self.monotonic()))

    def request(self, sent: Sent, call: Callable[[], Any]) -> Any:
        """Ask the store; only in the strand."""
        self._may_be_killed()
        self._sent += 1
        self.simulation.network.send(self, self._sent, sent, call)
        self._fleet_thread.pause()
        self._may_be_killed()
        if isinstance(self._answer, BackendError):
            self.asked_pause = self._answer.retry_after
            raise self._answer
        return self._answer

    def _may_be_killed(self) -> None:
        if self.simulation.has("kills") and self.chance("kills at requests").random() < _KILL_CHANCE:
            raise KilledError

    # --- what the agent does (called by its executor)

    def hook_course(self, effect: HookCommand) -> tuple[HookOutcome, float]:
        assert isinstance(effect, RunHook)
        return "succeeded", self.chance(f"hook of {effect.stage}").choice((0.5, 2.0, 20.0, 90.0))

    def hook_starts(self, effect: HookCommand, environment: Mapping[str, str]) -> None:
        assert self.engine is not None
        self._look_at_operators(self.engine)
        name = self.simulation.name_of(environment["SCHEDULED_EVENT_ID"])
        self._names[effect.workflow_id] = name
        if effect.stage == "prepare":
            self._note_begun(effect.workflow_id, name)
        self.simulation.oracle.hook_started(self, name, effect.stage)

    def hook_ends(self, effect: HookCommand, outcome: HookOutcome) -> None:
        assert isinstance(effect, RunHook)
        self.simulation.oracle.hook_ended(self, self._names[effect.workflow_id], effect.stage, outcome)

    def post(self, approvals: Sequence[Approve]) -> None:
        """A request to approve, which arrives."""
        assert self.engine is not None
        self._look_at_operators(self.engine)
        life = self.life
        for approve in approvals:
            by_operator = self._operators.get(approve.workflow_id) == "approve"
            self.simulation.approve(self, approve.event_id, by_operator=by_operator)
            answer = ApprovalAnswered(workflow_id=approve.workflow_id)
            self.after(0.05, lambda answer=answer: self.give(life, answer))  # type: ignore[misc]


class Requests:
    """The store as one VM reaches it."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._store = vm.simulation.store

    def list(self) -> list[Record]:
        found: list[Record] = self._vm.request(Sent("list"), self._store.list)
        return found

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        sent = Sent("update" if etag else "create", key, etag, fields)
        found: str | None = self._vm.request(sent, lambda: self._store.put(key, fields, etag))
        return found

    def delete(self, key: str, etag: str) -> bool:
        found: bool = self._vm.request(Sent("delete", key, etag), lambda: self._store.delete(key, etag))
        return found


class CrashingStore(Store):
    """A store in memory; the process may end before or after each transaction."""

    vm: Vm

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # If the clock is set there are more transactions, which must not change by chance what happens.
        may_end = self.vm.simulation.has("kills") and not self.vm.simulation.is_short
        chance = self.vm.chance("transactions").random() if may_end else 1.0
        if chance < _KILL_CHANCE:
            raise KilledError
        with super()._transaction():
            yield
        if chance < 2 * _KILL_CHANCE:
            raise KilledError
