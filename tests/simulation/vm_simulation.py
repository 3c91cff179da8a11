"""A simulated machine under a simulated Azure, and in it the real engine on a real state file.

The simulation has the clock, and chooses what goes wrong and when; the oracle knows what is right.

Real are the engine (with the parser, the comparison, the policy and the workflow behind it), its inbox and the
store; simulated are threads, hooks, the network, the machine and its clocks.
"""

import contextlib
import io
import itertools
import queue
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
from machine import Machine, SimulatedExecutor
from msgspec.structs import replace
from oracle import VM, BrokenError, News, Oracle
from simulation import START, Schedule, Simulation

from scheduled_events_agent.daemon.inbox import Command, Inbox
from scheduled_events_agent.engine import (
    Engine,
    HookCommand,
    HookDone,
    MachinePaused,
    NotificationDone,
    RunOnClear,
)
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, EventTypeName, parse_document
from scheduled_events_agent.notifications import Notification
from scheduled_events_agent.policy import Hook, Rule, RuleAffects, When
from scheduled_events_agent.policy.settings import AgentSettings, NotificationKind, NotifyTarget, Settings
from scheduled_events_agent.simulator.azure import Azure, EventType, LogEntry, LogEntryKind, Plan, SimulatedEvent
from scheduled_events_agent.status.actions import unsettled_message
from scheduled_events_agent.store import (
    NO_CHANGES,
    CommitResult,
    MetaKey,
    OutboxItem,
    RememberedChanges,
    RequestAnswer,
    Store,
    StoreError,
)
from scheduled_events_agent.telemetry import log
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import (
    ApprovalAnswered,
    Approve,
    HookOutcome,
    OperatorAction,
    RecordKind,
    RunHook,
    Transition,
    Workflow,
    is_ready,
)

Trouble = Literal[
    "many events", "bad hooks", "deaf service", "lost answers", "kills", "power cuts", "torn writes", "reboots",
    "stops", "full disk", "lost state", "clock jumps", "freezes", "operator", "reloads", "late name", "on clear",
    "slow inbox", "empty answers", "recommendations", "bad receivers", "overlapping rules",
]  # fmt: skip
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)

BUSY_SECONDS = 1500.0
"""Trouble ends here; nothing goes wrong after it."""
_MAX_SECONDS = 40000.0
# Polls and cycles that change nothing are left out, but for one in so many seconds.
_QUIET_SECONDS = 60.0
_VERSION, _PREVIEW = "2020-07-01", "2024-07-09"
_TYPES: tuple[EventType, ...] = ("Freeze", "Reboot", "Redeploy")
_TARGETS = ("chat", "pager")
_NEWS: dict[RecordKind, NotificationKind] = {
    "seen": "seen", "named": "seen", "preparing": "preparing", "prepared": "prepared", "held": "held",
    "approved": "approved", "started": "started", "closed": "recovered", "recovery_failed": "recovery_failed",
    "approval_needed": "approval_needed", "hook_missing": "hook_missing", "vm_unknown": "vm_unknown",
}  # fmt: skip
# Of each two neighbors the rules share hooks, of the first and the last they do not.
_OVERLAPPING: tuple[dict[str, tuple[str, ...]], ...] = (
    {"prepare": ("save",), "recover": ("load",)},
    {"prepare": ("drain", "save"), "recover": ("resume", "load", "go")},
    {"prepare": ("drain",), "recover": ("resume",)},
)
_HOOKS = ("drain", "save", "stop", "load", "resume", "go", "tell")


class PowerCut(BaseException):
    """The process ends here; no code of the agent's may catch it."""


class EndedError(BaseException):
    """The agent has ended while it waited for what comes."""


class CrashingStore(Store):
    """The store on a disk that fails where the simulation wants it to."""

    simulation: "VmSimulation | None" = None

    def commit(
        self,
        steps: Sequence[Transition],
        at: datetime,
        answers: Mapping[int, RequestAnswer] | None = None,
        notifications: Sequence[tuple[str, str]] = (),
        remembered: RememberedChanges = NO_CHANGES,
    ) -> CommitResult:
        if self.simulation is not None:
            self.simulation.commits(steps, at)
        result = super().commit(steps, at, answers, notifications, remembered)
        if self.simulation is not None:
            self.simulation.committed(steps)
        return result

    def set_meta(self, facts: dict[MetaKey, str]) -> None:
        super().set_meta(facts)
        if self.simulation is not None and facts.get("state_lost") == "":
            self.simulation.forget_loss()
        if self.simulation is not None and facts.get("unsettled_loss") == "":
            self.simulation.settle_loss()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        simulation = self.simulation
        if simulation is None:
            with super()._transaction():
                yield
            return
        crash = simulation.next_crash()
        if crash == "before":
            raise PowerCut
        if simulation.is_disk_full:
            with super()._transaction():
                raise sqlite3.OperationalError("database or disk is full")
        before = _contents(self.path) if crash == "torn" else {}
        with super()._transaction():
            yield
        if crash == "torn":
            simulation.tear(before, _contents(self.path))
            raise PowerCut
        if crash == "after":
            simulation.is_cut_after_commit = True


class VmSimulation(Simulation[Trouble], Machine):
    """One machine under Azure."""

    BUSY_SECONDS = BUSY_SECONDS
    MAX_SECONDS = _MAX_SECONDS

    def __init__(self, seed: int, directory: Path, troubles: frozenset[Trouble] | None = None) -> None:
        """``troubles``: exactly these; by default, what chance gives to the seed."""
        ids = itertools.count(1)
        azure = Azure((VM, "vm_2"), new_id=lambda: f"E{next(ids)}")
        super().__init__(seed, TROUBLES, troubles, azure)
        self.oracle = Oracle(self.now)
        self.is_disk_full = False
        self.is_cut_after_commit = False
        self._directory = directory
        self._is_frozen = False
        self._is_going_down = False
        self._is_up = True
        self._is_deaf = False
        self._version = _PREVIEW if "recommendations" in self.troubles else _VERSION
        self._body = ("", b"")
        """The api-version and the text of the last answer."""
        self._was_empty = False
        self._succeeded_at: datetime | None = None
        self._document_at: datetime | None = None
        self._mail = Mail(self)
        self._inbox: Inbox | None = None
        self._is_stopping = False
        self._poll_at = -1.0
        self._wake_at = -1.0
        self._metrics = new_metrics()
        self._bugs_before = self._metrics.bugs._value.get()
        dropped = self._metrics.notifications_dropped
        self._dropped = {name: dropped.labels(name, "removed") for name in _TARGETS}
        self._drops = self._count_drops()
        self._executor = VmExecutor(self)
        self._store: CrashingStore | None = None
        self._document: Any = None
        self._results: list[tuple[HookDone, bool]] = []
        """What the agent has taken and not yet on disk, and whether the hook was required then."""
        self._answers: list[ApprovalAnswered] = []
        self._names: dict[str, str] = {}
        """Workflow id -> event."""
        self._requests: dict[int, tuple[str, str, set[str]]] = {}
        self._words: dict[str, set[str]] = {}
        self._torn: dict[str, bytes] | None = None
        self._is_state_lost = False
        self._has_unsettled_loss = False
        self._has_cleared = False
        """Whether on_clear has succeeded since state was lost."""
        self._was_ready: bool | None = None
        self._transactions = 0
        self._crashes = self._plan_crashes()
        self._scheduled_since: dict[str, float] = {}

    @property
    def event_count(self) -> int:
        """How many events there have been."""
        return len(self._azure.events())

    @property
    def schedule(self) -> Schedule:
        return self

    def is_shutting_down(self) -> bool:
        return self._is_going_down

    # --- the run

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except PowerCut:
            self._crash("the power goes")

    def _close(self) -> None:
        if self._store is not None:
            self._store.simulation = None
            self._store.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _prepare(self) -> None:
        self.log(f"trouble: {', '.join(sorted(self.troubles)) or 'none'}")
        self._settings = self._a_policy()
        self._enforce()
        chance = self.chance("events")
        count = chance.choice((2, 3, 4)) if "many events" in self.troubles else chance.choice((1, 2))
        for number in range(count):
            at = chance.uniform(0.0, 600.0 if number else 30.0)
            self.after(at, partial(self._announce, number))
        if "overlapping rules" in self.troubles:
            chance = self.chance("overlapping rules")
            begin = chance.uniform(0.0, 600.0)
            for number, type_ in enumerate(_TYPES, start=count):
                at = begin + chance.uniform(0.0, 20.0)
                self.after(at, partial(self._overlap, number, type_))
        if "recommendations" in self.troubles:
            chance = self.chance("recommendations")
            for _ in range(chance.randint(1, 2)):
                self.after(chance.uniform(0.0, 600.0), self._recommend)
            self.after(chance.uniform(5.0, BUSY_SECONDS), self._refuse_preview)
        self._boot_up()
        for trouble, what in self._mishaps():
            chance = self.chance(trouble)
            if trouble in self.troubles:
                self.after(chance.uniform(5.0, BUSY_SECONDS - 300.0), what)
        self.after(BUSY_SECONDS, self._end_trouble)

    def _mishaps(self) -> Iterator[tuple[Trouble, Callable[[], None]]]:
        yield "kills", self._kill
        yield "stops", self._stop
        yield "freezes", self._freeze
        yield "clock jumps", self._jump
        yield "reloads", self._reload
        yield "full disk", self._fill_disk
        yield "deaf service", self._go_deaf
        yield "operator", self._speak
        yield "lost state", self._damage
        yield "reboots", self._reboot

    def _end_trouble(self) -> None:
        self.log("--- from here on, nothing goes wrong")
        self._is_deaf = self.is_disk_full = False
        self._crashes = {}
        self._retry_failed()
        self._scheduled_since = {
            event.ids[0]: self.at for event in self._azure.events() if event.status == "Scheduled"
        }

    def _finish(self) -> None:
        if self.engine is None:
            raise BrokenError("the agent is not started again")
        self.oracle.finished(is_ready=is_ready(self.engine.workflows), pending=self.engine.workflows)
        faults = self._metrics.bugs._value.get() - self._bugs_before
        if self._store is not None and self._store.outbox.waiting():
            raise BrokenError("(12) notices that have ended stay in the state file")
        if faults:
            raise BrokenError(f"the engine has met {faults:.0f} bugs of its own")

    # --- Azure

    def _announce(self, number: int) -> None:
        self._schedule(number, None)

    def _overlap(self, number: int, type_: EventType) -> None:
        """An event beside others whose rules share hooks with its own; Azure may soon cancel it."""
        chance = self.chance("overlapping rules")
        event_id = self._schedule(number, type_)
        if chance.random() < 0.3:
            self.after(chance.uniform(1.0, 20.0), lambda: self._cancel(event_id))

    def _schedule(self, number: int, type_: EventType | None) -> str:
        """An event of that type, or of any."""
        chance = self.chance(f"event {number}")
        by_chance = chance.choice(_TYPES)
        plan = Plan(
            type=type_ or by_chance,
            vms=chance.choice(((VM,), (VM,), (VM,), (VM,), (VM, "vm_2"), ("vm_2", VM), ("vm_2",))),
            source=chance.choice(("Platform", "User")),
            notice_seconds=chance.choice((0.0, 5.0, 30.0, 300.0, 900.0, 3000.0)),
            lasts_seconds=chance.choice((0.5, 5.0, 60.0)),
            start_delay_seconds=chance.choice((0.5, 3.0, 20.0)),
            starts_when_approved=chance.random() < 0.8,
            begins_started=chance.random() < 0.1,
            shows_started=chance.random() < 0.8,
            new_id_at_start=chance.random() < 0.2,
            description=f"number {number}",
        )
        event_id = self._azure.schedule(self.epoch(), plan)
        if chance.random() < 0.2:
            self.after(chance.uniform(0.0, plan.notice_seconds or 0.0), lambda: self._cancel(event_id))
        if chance.random() < 0.1:
            self.after(chance.uniform(0.0, 60.0), lambda: self._azure.reset_incarnation(self.epoch()))
        return event_id

    def _recommend(self) -> None:
        """Azure warns of an eviction, which may come or not, and before or after the warning is taken back."""
        chance = self.chance("recommendation")
        lasts = chance.choice((0.5, 20.0, 300.0, 3000.0))
        self._azure.schedule(
            self.epoch(), Plan(type="SpotRebalanceRecommendation", vms=(VM,), lasts_seconds=lasts)
        )
        if chance.random() < 0.7:
            notice, survives = chance.choice((5.0, 30.0, 300.0)), chance.random() < 0.5
            plan = Plan(type="Preempt", vms=(VM,), notice_seconds=notice, lasts_seconds=chance.choice((5.0, 60.0)))
            self.after(chance.choice((0.0, 5.0, 60.0, 400.0)), lambda: self._evict(plan, survives=survives))

    def _evict(self, plan: Plan, *, survives: bool) -> None:
        event_id = self._azure.schedule(self.epoch(), plan)
        if survives:
            self.after((plan.notice_seconds or 0.0) / 2, lambda: self._cancel(event_id))

    def _refuse_preview(self) -> None:
        """For a time documents come in a version that leaves recommendations out."""
        seconds = self.chance("refused preview").choice((2.0, 100.0, 900.0))
        self._version = _VERSION
        self.log(f"api-version {_PREVIEW} is refused for {seconds:g} s")
        self._poll_soon()

        def take() -> None:
            self._version = _PREVIEW
            self.log(f"api-version {_PREVIEW} is taken again")
            self._poll_soon()

        self.after(seconds, take)

    def _cancel(self, event_id: str) -> None:
        self._azure.advance(self.epoch())
        if self._azure.event(event_id).status == "Scheduled":
            self._azure.cancel(self.epoch(), event_id)

    def _on_azure(self, entry: LogEntry) -> None:
        if entry.kind == "polled":
            return
        what = _describe(entry.event) if entry.event else entry.text
        self.log(f"Azure: {entry.kind} {what}")
        if entry.event is not None:
            self._notice(entry.kind, entry.event)

    def _notice(self, kind: LogEntryKind, event: SimulatedEvent) -> None:
        """Do to the machine what Azure's change of the event brings about."""
        if kind in ("started", "gone"):
            since = self._scheduled_since.pop(event.ids[0], None)
            if since is not None and not event.approved_at:
                self._check_neglect(event.ids[0], since, has_started=kind == "started")
        if kind == "started" and VM in event.plan.vms:
            if event.plan.type in ("Reboot", "Redeploy"):
                self.after(self.chance("reboot").uniform(0.0, 3.0), self._reboot)
            else:
                self.after(0.1, self._freeze)
        elif kind == "scheduled":
            self._scheduled_since[event.ids[0]] = self.at
            # Mishaps are worth most while there is something to do.
            for trouble, mishap in self._mishaps():
                chance = self.chance(f"{trouble} beside an event")
                is_due = chance.random() < 0.5
                seconds = chance.expovariate(1 / 20.0)
                if self.has(trouble) and is_due and self.at + seconds < BUSY_SECONDS - 300.0:
                    self.after(seconds, mishap)

    def _check_neglect(self, name: str, since: float, *, has_started: bool) -> None:
        seconds = self.at - max(since, BUSY_SECONDS)
        if seconds > 200.0:
            self.oracle.neglected(name, seconds)
        if has_started and seconds > 700.0 and self.engine is not None and not self._is_frozen:
            self.oracle.unprepared(name)

    # --- the machine

    def _boot_up(self) -> None:
        self._is_up, self._is_going_down = True, False
        self._start_agent()

    def _reboot(self) -> None:
        if not self._is_up or self._is_going_down:
            return
        self.log("the machine goes down")
        chance = self.chance("reboot")
        self._is_going_down = True
        self._executor.end_all(chance)
        self.after(chance.choice((0.0, 0.2, 3.0)), self._power_off)

    def _power_off(self) -> None:
        chance = self.chance("reboot")
        if chance.random() < 0.5 and not self._is_stopping:
            self._stop_agent(may_restart=False)
        else:
            self._crash("the power is off", may_restart=False)
        self._is_up = False
        self.boot += 1
        self.oracle.rebooted()
        self.after(chance.choice((5.0, 60.0, 600.0)), self._boot_up)

    def _freeze(self) -> None:
        if self._is_frozen or not self._is_up:
            return
        seconds = self.chance("freezes").choice((2.0, 9.0, 60.0))
        self.log(f"the machine stands still for {seconds:g} s")
        self._is_frozen = True

        def thaw() -> None:
            self.log("the machine goes on")
            self._is_frozen = False
            self._deliver(MachinePaused(seconds))
            self._poll_soon()

        self.after(seconds, thaw)

    def _jump(self) -> None:
        seconds = self.chance("clock jumps").choice((-3600.0, -30.0, 30.0, 3600.0))
        self.wall_offset += seconds
        self.oracle.clock_set()
        self.log(f"the clock is set by {seconds:+g} s")
        self._poll_soon()

    def _fill_disk(self) -> None:
        seconds = self.chance("full disk").choice((2.0, 20.0, 200.0))
        self.is_disk_full = True
        self.log(f"the disk is full for {seconds:g} s")

        def clear() -> None:
            self.is_disk_full = False
            self.log("the disk has room again")
            self._wake_soon(0.5)

        self.after(seconds, clear)

    # --- the agent's life

    def _start_agent(self) -> None:
        if self.engine is not None or not self._is_up:
            return
        self.life += 1
        directory = self._directory / str(self.life)
        directory.mkdir(parents=True)
        for name, data in (self._torn or {}).items():
            (directory / name).write_bytes(data)
        self._torn = {}
        store = cast("CrashingStore", CrashingStore.open(directory, self.now()))
        store.simulation = self
        self._store = store
        if store.quarantined_path is not None:
            self.log("the state file was damaged and is quarantined")
            self.oracle.lost()
            self._words = {}
            self._is_state_lost = True
            self._has_unsettled_loss = True
            self._has_cleared = False
            self._was_ready = None
        # The power may have gone while the agent wrote that it has decided.
        self._is_state_lost &= bool(store.get_meta("state_lost"))
        is_unsettled_on_disk = store.load_unsettled_loss() is not None
        if self._has_unsettled_loss and not is_unsettled_on_disk:
            self.settle_loss()
        self._has_unsettled_loss = is_unsettled_on_disk
        self._body, self._succeeded_at, self._document_at = ("", b""), None, None
        self._mail, self._document, self._results, self._answers = Mail(self), None, [], []
        self._executor = VmExecutor(self)
        self.log(f"the agent starts, boot {self.boot}")
        try:
            self.engine = Engine(
                self._settings,
                store,
                self._metrics,
                self._executor,
                self,
                put=self._executor.report,
                notify=self._executor.notify,
            )
            self._inbox = Inbox(
                cast("Any", self._mail),
                self.engine,
                self._executor,
                self._handle_command,
                monotonic=self.monotonic,
            )
            self.engine.start()
        except PowerCut:
            self._crash("killed while it started")
            return
        except StoreError as error:
            self.log(f"it cannot start: {error}")
            self._crash("it ends")
            return
        if self._was_ready is not None and is_ready(self.engine.workflows) != self._was_ready:
            raise BrokenError("(9) a restart has made the VM ready, or not ready")
        self._see_readiness()
        self._executor.reconfigure(self._settings.notify)
        self.oracle.has_name = bool(self.engine.identity.name) and self.engine.is_identity_sure
        delay = self.chance("late name").choice((0.1, 5.0, 60.0)) if self.has("late name") else 0.01
        self.after(delay, self._identify(self.life))
        self._poll_soon()

    def _identify(self, life: int) -> Callable[[], None]:
        def answer() -> None:
            if life == self.life:
                self._deliver(Identity(name=VM, vm_id="id-1"))

        return answer

    def forget_loss(self) -> None:
        """By now the agent has decided on what was pending when its state was lost."""
        if self.oracle.is_blind or not self.oracle.has_name:
            raise BrokenError("(7) the agent forgets that its state was lost before it knows what is pending")
        self._is_state_lost = False

    def settle_loss(self) -> None:
        """The agent does not report any more that its state was lost."""
        if not self._has_cleared:
            raise BrokenError("(7) a loss of state counts as settled, and on_clear has not succeeded since")
        self._has_unsettled_loss = False

    def _kill(self) -> None:
        self._crash("kill -9")

    def _crash(self, how: str, *, may_restart: bool = True) -> None:
        """The process is gone; what is on the disk stays."""
        if self._store is None:
            return
        self.log(f"the agent is killed ({how})" if how == "kill -9" else how)
        for ended, _ in self._results:
            self._forget(ended)
        for item in self._mail.items:
            if isinstance(item, HookDone):
                self._forget(item)
        self._executor.close()
        self._end_life(may_restart=may_restart)

    def _forget(self, ended: HookDone) -> None:
        if isinstance(ended.effect, RunHook):
            self.oracle.forgotten(self._event_of(ended.effect), ended.effect.stage, ended.effect.hook)

    def _end_life(self, *, may_restart: bool) -> None:
        assert self._store is not None
        self._see_drops()
        if self._torn:
            self.oracle.lost_counts()
        else:
            self._torn = _contents(self._store.path)
        # A process that was killed closes nothing: what it has left is copied by now.
        self._store.simulation, self.is_cut_after_commit = None, False
        self._store.close()
        shutil.rmtree(self._store.path.parent, ignore_errors=True)
        self._store, self.engine, self._inbox, self._is_stopping = None, None, None, False
        self.oracle.crashed()
        self._was_ready = self._ready_on_disk()
        if may_restart:
            self.after(self.chance("restart").choice((0.1, 5.0, 30.0)), self._start_agent)

    def _ready_on_disk(self) -> bool | None:
        """Readiness by the state file, read as another process would; None if it cannot be read."""
        directory = self._directory / "look"
        directory.mkdir(parents=True)
        try:
            for name, data in (self._torn or {}).items():
                (directory / name).write_bytes(data)
            with contextlib.closing(sqlite3.connect(directory / "state.db")) as connection:
                rows = connection.execute("SELECT body FROM workflow WHERE is_open").fetchall()
            workflows = [msgspec.json.decode(body, type=Workflow) for (body,) in rows]
            return is_ready({workflow.id: workflow for workflow in workflows})
        except sqlite3.DatabaseError:
            return None
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _stop(self) -> None:
        self._stop_agent(may_restart=True)

    def _stop_agent(self, *, may_restart: bool) -> None:
        """A stop in good order: what runs may end first, for a moment."""
        if self.engine is None:
            return
        self.log("the agent gets a command to stop")
        self._deliver(Command("stop"))
        if self._is_stopping:
            return
        self._is_stopping = True
        assert self._inbox is not None
        try:
            if self._inbox.drain(0.0):
                raise BrokenError("(9) the agent does not hear that it is to stop")
            # Work that a failing hook leaves undone is done again: the hook may have been made to fail.
            for ended in [ended for ended in self._results if ended[0].result.outcome != "succeeded"]:
                self._results.remove(ended)
                self._forget(ended[0])
            self._inbox.shutdown(self.chance("stops").choice((0.0, 5.0, 60.0)))
            self._check_stop()
            assert self._store is not None
            self._store.close()
        except EndedError:
            return
        except (StoreError, PowerCut):
            self.is_cut_after_commit = False
        for item in [*(ended for ended, _ in self._results), *self._mail.items]:
            if isinstance(item, HookDone):
                self._forget(item)
        self._executor.close()
        self._end_life(may_restart=may_restart)

    def _check_stop(self) -> None:
        """The agent has stopped, and could write until its end."""
        assert self.engine is not None
        assert self._store is not None
        if self.is_cut_after_commit:
            raise PowerCut
        if self.engine.store_failure:
            return
        lost = [*self._mail.items, *self._results, *self._answers]
        if lost:
            raise BrokenError(f"(9) lost by a stop: {lost}")
        self._read_answers()
        if self._store.load_requests(self.now()):
            raise BrokenError("(9) a stop leaves an operator without an answer")

    def _handle_command(self, command: object) -> None:
        raise BrokenError(f"the simulation gives no such command: {command}")

    def wait_for_mail(self, timeout: float) -> None:
        """Let the simulation go on until something is in the mail; for an agent that waits while it stops."""
        life, until = self.life, self.at + timeout
        while not self._mail.items and self.next_at <= until:
            self.jump()()
            self._watch_azure()
            if self.life != life or self.engine is None:
                raise EndedError
        if not self._mail.items:
            self.at = until

    def _damage(self) -> None:
        """Rot, found at the next start."""
        if self._store is None:
            return
        self._crash("killed, and its state file is damaged")
        assert self._torn is not None
        self._torn = {
            name: b"\x00" * 100 + data[100:] if name == "state.db" else b"" for name, data in self._torn.items()
        }

    def next_crash(self) -> str:
        """How this transaction of the store is to end; "" for well."""
        self._transactions += 1
        return self._crashes.pop(self._transactions, "") if self.at < BUSY_SECONDS else ""

    def tear(self, before: dict[str, bytes], after: dict[str, bytes]) -> None:
        """The power went while the log was being written: a part of what is new is there."""
        self._torn = dict(after)
        old, new = before.get("state.db-wal", b""), after.get("state.db-wal", b"")
        if before["state.db"] != after["state.db"] or len(new) <= len(old):
            return  # a checkpoint, which comes after the log is safe
        chance = self.chance("torn writes")
        cut = chance.randrange(len(old), len(new))
        rest = bytes(len(new) - cut) if chance.random() < 0.5 else b""
        self._torn["state.db-wal"] = new[:cut] + rest

    def _plan_crashes(self) -> dict[int, str]:
        crashes: dict[int, str] = {}
        for trouble, ways in (("power cuts", ("before", "after")), ("torn writes", ("torn",))):
            chance = self.chance(f"{trouble} when")
            plan = {chance.randint(2, 60): chance.choice(ways) for _ in range(chance.randint(1, 4))}
            if trouble in self.troubles:
                crashes |= plan
        return crashes

    # --- the agent's threads

    def _deliver(self, item: Any) -> None:
        if self.engine is None:
            return
        self._mail.items.append(item)
        delay = self.chance("slow inbox").choice((0.0, 0.1, 2.0)) if self.has("slow inbox") else 0.0
        self._wake_soon(delay)

    def _wake_soon(self, delay: float) -> None:
        at = self.at + delay
        if self.engine is not None and (self._wake_at < self.at or at < self._wake_at):
            self._wake_at = at
            life = self.life
            self.after(delay, lambda: self._turn(life, at))

    def _poll_soon(self) -> None:
        at = self.at + self.chance("polls").uniform(0.0, 1.0)
        if self._poll_at <= self.at or at < self._poll_at:
            self._poll_at = at
            self.after(at - self.at, lambda: self._poll(at))

    def _poll(self, at: float) -> None:
        if at != self._poll_at:
            return
        self._poll_at = -1.0
        if self.engine is None:
            return
        if not self._is_deaf and not self._is_frozen:
            self._azure.advance(self.epoch())
            self._azure.mark_served(self.epoch(), VM, self._version)
            body = self._azure.document(self._version)
            is_chosen = self.has("empty answers") and self.chance("empty answers").random() < 0.2
            self._was_empty = is_chosen and not self._was_empty
            if self._was_empty:
                body = b'{"DocumentIncarnation":0,"Events":[]}'
                self.after(0.0, self._poll_soon)
            known = (self._version, body)
            if known != self._body or self.engine.snapshot.needs_answer:
                self._body = known
                document = replace(parse_document(body), has_recommendations=self._version == _PREVIEW)
                self._deliver(replace(document, answered=self.monotonic()))
            else:
                self._wake_soon(0.0)
            self._succeeded_at = self.now()
        if self.engine.workflows or self._azure.next_due < float("inf") or self._is_deaf:
            self._poll_at = later = self.at + _QUIET_SECONDS
            self.after(_QUIET_SECONDS, lambda: self._poll(later))

    def _go_deaf(self) -> None:
        seconds = self.chance("deaf service").choice((3.0, 60.0, 300.0))
        self._is_deaf = True
        self.log(f"the service does not answer for {seconds:g} s")

        def hear() -> None:
            self._is_deaf = False
            self.log("the service answers again")
            self._poll_soon()

        self.after(seconds, hear)

    def _turn(self, life: int, at: float) -> None:
        if life != self.life or at != self._wake_at or self.engine is None or self._is_stopping:
            return
        self._wake_at = -1.0
        if self._is_frozen:
            self._wake_soon(1.0)
            return
        engine = self.engine
        assert self._inbox is not None
        document_at = self._document_at
        try:
            self._inbox.drain(0.0)
            succeeded = engine.run_cycle(document_at)
            self.oracle.turned(may_be_late=not self.oracle.has_name)
            self._see_readiness()
            self._see_loss()
            self._see_drops()
            if succeeded:
                engine.maintain()
            if self.is_cut_after_commit:
                raise PowerCut
        except PowerCut:
            self.is_cut_after_commit = False
            self._crash("the power goes in the middle of a turn")
            return
        self._document_at = self._succeeded_at
        self._read_answers()
        if engine.snapshot.needs_answer:
            self._poll_soon()
        wake_at = engine.wake_at
        if not succeeded:
            if self._document is not None:
                self._check_comparison(self._document)
            self._wake_soon(1.0)
        elif wake_at is not None:
            seconds = (wake_at - self.now()).total_seconds()
            self._wake_soon(max(0.001, seconds))
            if seconds < 5.0:
                self._poll_soon()

    def _see_readiness(self) -> None:
        """Give the oracle the answer of the page /readyz."""
        assert self.engine is not None
        for workflow in self.engine.workflows.values():
            if workflow.is_prepared_for:
                self.oracle.unready(self.name_of(workflow.event.id))
        self.oracle.ready(is_ready=is_ready(self.engine.workflows))

    def _see_loss(self) -> None:
        """What status, page and alerts say of a loss of state is what is on disk."""
        assert self.engine is not None
        if (self.engine.snapshot.state_lost is not None) != self._has_unsettled_loss:
            raise BrokenError(f"(7) a loss of state is unsettled, {self._has_unsettled_loss}, and not reported so")

    def note_taken(self, item: Any) -> None:
        match item:
            case HookDone(effect=RunOnClear(), result=result):
                self.oracle.on_clear_runs -= 1
                assert self.engine is not None
                is_required = self.engine.settings.hooks[result.hook].required
                self._has_cleared |= result.outcome == "succeeded" or not is_required
            case HookDone(result=result) if self._is_stopping and result.outcome != "succeeded":
                self._forget(item)
            case HookDone(effect=RunHook() as effect, result=result):
                if result.outcome not in ("succeeded", "canceled") and self._is_going_down:
                    self.oracle.not_run(self._event_of(effect), effect.stage, effect.hook)
                else:
                    assert self.engine is not None
                    self._results.append((item, self.engine.settings.hooks[effect.hook].required))
            case ApprovalAnswered():
                self._answers.append(item)
            case Identity():
                self.oracle.has_name = True
            case MachinePaused() | Command() | NotificationDone():
                pass
            case _:
                self._document = item
                self.oracle.heard(self.name_of(event.id) for event in item.events)

    def commits(self, steps: Sequence[Transition], at: datetime) -> None:
        """The agent is about to write these."""
        assert self.engine is not None
        news = [
            ((step.workflow.id, _NEWS[note.kind], at), step.workflow.event.type, step.workflow.event.resources)
            for step in steps
            for note in step.records
            if note.kind in _NEWS
        ]
        self.oracle.writes_news(news, is_named=bool(self.engine.names()))

    def committed(self, steps: Sequence[Transition]) -> None:
        """The decisions of the agent are on disk, and none of them is carried out yet."""
        self.oracle.has_written_news()
        for step in steps:
            self._names[step.workflow.id] = self.name_of(step.workflow.event.id)
        if self._document is not None:
            self._check_document(self._document)
            self._document = None
        for step in steps:
            if any(note.kind == "expired" for note in step.records):
                self.oracle.expired(self._names[step.workflow.id])
        for ended, is_required in self._results:
            self._known(ended, is_required=is_required)
        for answer in self._answers:
            self.oracle.answered(self._names[answer.workflow_id], is_confirmed=not answer.error_kind)
        self._results, self._answers = [], []
        self._check_starts(steps)
        # An approval that is on the disk and not on its way is rare, and what it costs if it is forgotten is most.
        if self.has("power cuts") and any(
            isinstance(effect, Approve) for step in steps for effect in step.effects
        ):
            self.is_cut_after_commit |= self.chance("power cuts at an approval").random() < 0.2
        if self.is_cut_after_commit or self.oracle.on_clear_runs:
            # The start is on the disk, and comes never, or only when the on_clear hook has ended.
            starts = [effect for step in steps for effect in step.effects if isinstance(effect, RunHook)]
            for start in starts:
                self.oracle.maybe_started(self._names[start.workflow_id], start.stage, start.hook)
        if self.is_cut_after_commit:
            self.is_cut_after_commit = False
            raise PowerCut

    def _check_starts(self, steps: Sequence[Transition]) -> None:
        for step in steps:
            kinds = [note.kind for note in step.records]
            if "started" not in kinds:
                continue
            name = self._names[step.workflow.id]
            # After the end of another event, the agent may take this one for that event under a new id.
            is_itself = self.name_of(step.workflow.id.partition("@")[0].upper()) == name
            unprepared = step.workflow.unprepared if "unprepared" in kinds else None
            if is_itself:
                self.oracle.shown_start(name, unprepared.kind if unprepared else "")

    def _check_comparison(self, document: Document) -> None:
        """The agent has compared it, and could not write what follows."""
        names = [self.name_of(event.id) for event in document.events]
        self.oracle.compared(names, answered=document.answered, has_recommendations=document.has_recommendations)

    def _check_document(self, document: Document) -> None:
        events = []
        for event in document.events:
            name = self.name_of(event.id)
            facts = (event.type, event.status, event.resources, event.not_before)
            events.append((name, event.id, *facts))
        self.oracle.read(
            events,
            answered=document.answered,
            is_state_lost=self._is_state_lost,
            has_recommendations=document.has_recommendations,
        )

    def _known(self, ended: HookDone, *, is_required: bool) -> None:
        if isinstance(ended.effect, RunHook):
            name, stage, hook = self._event_of(ended.effect), ended.effect.stage, ended.effect.hook
            outcome = ended.result.outcome
            if ended.result.has_run:
                self.oracle.known(name, stage, hook, outcome, is_required=is_required)
            else:
                self.oracle.known_unbegun(name, stage, hook, outcome, is_required=is_required)
            if stage == "prepare" and is_required and outcome not in ("succeeded", "canceled"):
                # An approval from before the failure is void; whether one that is not answered yet was before it
                # is not known.
                words = {"" if word == "approve" else word for word in self._words.get(name, {""})}
                asked = {word for who, word, _ in self._requests.values() if who == name}
                self._words[name] = words | (asked & {"approve"})
                self.oracle.spoke(name, self._words[name])

    def _event_of(self, effect: RunHook) -> str:
        return self._names[effect.workflow_id]

    # --- what the agent does (called by its executor)

    def hook_course(self, effect: HookCommand) -> tuple[HookOutcome, float]:
        chance = self.chance(f"hook {effect.hook}")
        seconds = chance.choice((0.01, 1.0, 10.0))
        if not self.has("bad hooks"):
            return "succeeded", seconds
        outcomes: tuple[HookOutcome, ...] = ("succeeded", "succeeded", "failed", "timed_out")
        return chance.choice(outcomes), chance.choice((0.01, 10.0, 100.0))

    def hook_starts(self, effect: HookCommand, environment: dict[str, str]) -> None:
        name = effect.hook
        if isinstance(effect, RunOnClear):
            self.log(f"on_clear hook {name} starts")
            if self.oracle.runs:
                raise BrokenError(f"on_clear hook {name} starts beside {self.oracle.runs}")
            self.oracle.on_clear_runs += 1
            return
        event = self.name_of(environment["SCHEDULED_EVENT_ID"])
        self.log(f"{event}: {effect.stage} hook {name} starts")
        self.oracle.started(event, effect.stage, name)

    def hook_begins(self, effect: HookCommand) -> None:
        if isinstance(effect, RunHook):
            self.oracle.begun(self._event_of(effect), effect.stage, effect.hook)

    def hook_waits(self, effect: HookCommand, behind: RunHook) -> None:
        if isinstance(effect, RunHook) and effect.stage == "prepare":
            first = (self._event_of(behind), behind.stage)
            self.oracle.waits(self._event_of(effect), effect.hook, behind=first)

    def hook_is_told_to_end(self, effect: HookCommand) -> None:
        if isinstance(effect, RunHook):
            self.oracle.told_to_end(self._event_of(effect), effect.stage)

    def hook_ends(self, effect: HookCommand, outcome: HookOutcome) -> None:
        if isinstance(effect, RunHook):
            self.log(f"{self._event_of(effect)}: {effect.stage} hook {effect.hook} ends: {outcome}")
            self.oracle.ended(self._event_of(effect), effect.stage, effect.hook, outcome)

    def post(self, approvals: Sequence[Approve]) -> None:
        """A request to approve is sent, and it and its answer meet what they meet."""
        pairs = []
        for approve in approvals:
            name = self.name_of(approve.event_id)
            pairs.append((name, approve.event_id))
        self.log(f"the agent approves {', '.join(name for name, _ in pairs)}")
        self.oracle.posted(pairs)
        doubt = self.chance("operator amid an approval")
        if self.has("operator") and doubt.random() < 0.5:
            self.after(doubt.uniform(0.0, 5.0), lambda: self._take_back(pairs[0][0]))
        chance, life = self.chance("approvals"), self.life
        fate = chance.random() if self.has("lost answers") else 1.0
        arrives_after = chance.choice((0.01, 1.0, 4.0))

        def arrive() -> None:
            kind = ""
            if self._is_deaf or fate < 0.2:
                kind = "unreachable"
            elif fate < 0.3:
                kind = "server"
            elif all(self._azure.is_pending(event_id) for _, event_id in pairs):
                for _, event_id in pairs:
                    self._azure.approve(self.epoch(), event_id, VM)
                kind = "timeout" if fate < 0.5 else ""
            else:
                kind = "rejected"
            self.after(chance.choice((0.01, 0.5, 5.0)), lambda: answer(kind))

        def answer(kind: str) -> None:
            if life != self.life or self.engine is None:
                return
            for approve in approvals:
                self.log(f"{self._names[approve.workflow_id]}: the approval is answered: {kind or 'ok'}")
                self._deliver(ApprovalAnswered(workflow_id=approve.workflow_id, error_kind=kind))

        self.after(arrives_after, arrive)

    def give(self, life: int, ended: HookDone) -> None:
        """The end of a hook, into the inbox of the agent that started it."""
        if life == self.life:
            self._deliver(ended)

    def next_notice(self, target: str, after_id: int) -> OutboxItem | None:
        assert self._store is not None
        return self._store.outbox.load_next(target, after_id)

    def notify(self, target: str, notice: OutboxItem, answer: Callable[[bool], None]) -> None:
        """A notification is sent, and may meet a fault. ``answer``: whether it is settled."""
        notification = msgspec.json.decode(notice.body, type=Notification)
        news: News = (notification.event.key, notification.kind, notification.at)
        chance, fate, life = self.chance("receivers"), "", self.life
        if self.has("bad receivers"):
            fate = chance.choice(("", "", "refused", "not sent", "server error", "answer lost"))
        # A request in flight takes its time, also when the agent is dead by then.
        arrives_after = chance.choice((0.01, 1.0, 10.0)) if "bad receivers" in self.troubles else 0.01

        def arrive() -> None:
            # A refusal is counted by the agent, if it still lives.
            if fate in ("", "answer lost") or (fate == "refused" and life == self.life):
                self.log(f"{target} hears that {self._names.get(news[0], news[0])} is {news[1]}: {fate or 'ok'}")
                self.oracle.notified(target, news, is_rejected=fate == "refused")
            answer(fate in ("", "refused"))

        self.after(arrives_after, arrive)

    def end_notice(self, notification_id: int, target: str) -> None:
        # The agent deletes several in one cycle: that saves the simulation cycles, and leaves time for a crash.
        self._mail.items.append(NotificationDone(notification_id, target))
        self._wake_soon(5.0)

    def _count_drops(self) -> dict[str, float]:
        return {name: counter._value.get() for name, counter in self._dropped.items()}

    def _see_drops(self) -> None:
        before, self._drops = self._drops, self._count_drops()
        for name in _TARGETS:
            if count := int(self._drops[name] - before[name]):
                self.log(f"{count} notices of {name} are dropped")
                self.oracle.dropped(name, count)

    # --- policy and operators

    def _a_policy(self) -> Settings:
        chance = self.chance("policy")
        rules = tuple(
            Rule(
                name=f"rule-{type_}",
                when=When(type=(type_,), affects=chance.choice((("self",), ("self",), ("self", "others")))),
                prepare=chance.choice((("drain",), ("drain", "save"), ("stop",), ())),
                recover=chance.choice(((), ("resume",), ("load", "resume"), ("resume", "load"), ("go",))),
                on_start=chance.choice(((), (), ("tell",))),
                approve=chance.choice(("immediately", "when-prepared", "when-prepared", "manual", "never")),
                on_failure=chance.choice(("hold", "approve")),
                on_early_start=chance.choice(("cancel", "finish")),
                shared=chance.choice((None, "hold", "first", "any")),
                drain_for=chance.choice((0.0, 0.0, 30.0)),
                lead=chance.choice((None, None, 60.0)),
            )
            for type_ in _TYPES
        )
        if "overlapping rules" in self.troubles:
            rules = tuple([replace(rule, **overlap) for rule, overlap in zip(rules, _OVERLAPPING, strict=True)])
        if "recommendations" in self.troubles:
            rules += self._spot_rules()
        must, once = self.chance("required hooks"), self.chance("serialized hooks")
        hooks = {
            name: Hook(
                run=("/bin/true",),
                timeout=chance.choice((20.0, 120.0)),
                required=must.random() < 0.7,
                serialize=once.random() < 0.5,
            )
            for name in _HOOKS
        }
        return Settings(
            rules=rules,
            hooks=hooks,
            on_clear=("go",) if "on clear" in self.troubles else (),
            notify=tuple(self._some_targets()),
            agent=AgentSettings(listen="off"),
        )

    def _some_targets(self) -> Iterator[NotifyTarget]:
        chance = self.chance("targets")
        for name in _TARGETS:
            on = chance.choice((NotifyTarget(name="", to="").kinds, (*_NEWS.values(),)))
            types: tuple[EventTypeName, ...] = ("Freeze", "Reboot", "SpotRebalanceRecommendation")
            affects: tuple[RuleAffects, ...] = chance.choice((("self",), ("self", "others")))
            when = When(type=chance.choice(((), (), types)), affects=affects)
            if chance.random() < 0.3:
                yield NotifyTarget(name=name, to="https://example.com/", on=on, when=when)

    def _spot_rules(self) -> tuple[Rule, ...]:
        chance = self.chance("spot rules")
        types: tuple[EventTypeName, ...] = ("SpotRebalanceRecommendation", "Preempt")
        return tuple(
            Rule(
                name=f"rule-{type_}",
                when=When(type=(type_,)),
                prepare=chance.choice((("drain",), ("drain", "save"), ("save",), ("stop",))),
                recover=chance.choice(((), ("resume",), ("load", "resume"), ("go",))),
                approve=chance.choice(("immediately", "when-prepared", "manual", "never")),
                drain_for=chance.choice((0.0, 0.0, 30.0)),
                expire_after=chance.choice((10.0, 60.0, 600.0)),
            )
            for type_ in types
        )

    def _enforce(self) -> None:
        self.oracle.policy(self._settings.rules)
        self.oracle.targets = self._settings.notify
        self.oracle.hooks, self.oracle.reserve = self._settings.hooks, self._settings.agent.reserve

    def _reload(self) -> None:
        if self.engine is None or self._is_frozen:
            return
        if self.chance("reloads").random() < 0.3:
            self.log("a bad policy is refused")
            self.engine.reject_settings("it is bad")
        else:
            self.log("another policy is put in force")
            self._see_drops()
            self._settings = self._a_policy()
            self._enforce()
            self.engine.change_settings(self._settings)
            self._executor.reconfigure(self._settings.notify)
        self._wake_soon(0.0)

    def _speak(self) -> None:
        if self.engine is None or not self.engine.workflows or self._store is None or self.is_disk_full:
            return
        chance = self.chance("operator")
        workflow: Workflow = chance.choice([*self.engine.workflows.values()])
        actions: tuple[OperatorAction, ...] = ("approve", "hold", "release")
        if (workflow.recover if workflow.is_over else workflow.prepare).state == "failed":
            actions = (*actions, "retry", "retry", "resolve")
        self._say(workflow, chance.choice(actions))

    def _take_back(self, name: str) -> None:
        """An operator would rather not have it approved; the approval may be under way."""
        if self.engine is None or self._store is None or self.is_disk_full:
            return
        known = [one for one in self.engine.workflows.values() if self.name_of(one.event.id) == name]
        if known:
            self._say(known[-1], self.chance("operator amid an approval").choice(("hold", "release")))

    def _retry_failed(self) -> None:
        """When nothing goes wrong any more, an operator sees what was not recovered, and has it tried again."""
        if self.engine is not None and self._store is not None:
            for workflow in self.engine.workflows.values():
                if workflow.phase == "recovery_failed":
                    self._say(workflow, "retry")
                    break
        if self.engine is None or self.engine.workflows or self._azure.next_due < float("inf"):
            self.after(_QUIET_SECONDS, self._retry_failed)

    def _say(self, workflow: Workflow, action: OperatorAction) -> None:
        assert self._store is not None
        name = self.name_of(workflow.event.id)
        self.log(f"an operator says of {name}: {action}")
        store = Store.open_client(self._store.path.parent)
        try:
            number = store.add_request(workflow.id, action, "kim", self.now())
        finally:
            store.close()
        before = self._words.setdefault(name, {""})
        word = "" if action == "release" else action
        self._requests[number] = (name, word, set(before))
        if action in ("retry", "resolve"):
            self.oracle.asked(name, action)
        else:
            before.add(word)
            self.oracle.spoke(name, before)
        self._wake_soon(1.0)

    def _read_answers(self) -> None:
        if not self._requests or self._store is None or self.is_disk_full:
            return
        for number, (name, word, before) in [*self._requests.items()]:
            with contextlib.suppress(StoreError):
                answer = self._store.load_answer(number)
                if answer is not None:
                    self.log(f"the operator is answered: {answer.message}")
                    del self._requests[number]
                    if word in ("retry", "resolve"):
                        if answer.succeeded:
                            self.oracle.obeyed(name, word)
                        continue
                    action: OperatorAction = "hold" if word == "hold" else "release"
                    is_rejected = not answer.succeeded and answer.message != unsettled_message(action)
                    if answer.succeeded and (word == "hold" or (word == "" and before == {"approve"})):
                        self.oracle.told(name, word)
                    self._words[name] = before if is_rejected else {word}
                    self.oracle.spoke(name, self._words[name])


class Mail:
    """Stands for the queue of the daemon's inbox."""

    def __init__(self, simulation: VmSimulation) -> None:
        self._simulation = simulation
        self.items: list[Any] = []

    def get(self, timeout: float) -> Any:
        if not self.items:
            self._simulation.wait_for_mail(timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self.items:
            raise queue.Empty
        item = self.items.pop(0)
        self._simulation.note_taken(item)
        return item


class VmExecutor(SimulatedExecutor):
    """The executor of a machine whose policy has targets to notify."""

    def __init__(self, simulation: VmSimulation) -> None:
        super().__init__(simulation)
        self._simulation = simulation
        self._notifier: dict[str, Sender] = {}

    def reconfigure(self, targets: Sequence[NotifyTarget]) -> None:
        """These targets are notified."""
        old, names = self._notifier, [target.name for target in targets]
        self._notifier = {name: old[name] if name in old else Sender(self._simulation, name) for name in names}
        for name in old.keys() - set(names):
            old[name].has_ended = True
        self.notify(is_urgent=True)

    def notify(self, *, is_urgent: bool) -> None:
        for sender in self._notifier.values():
            sender.wake(is_urgent=is_urgent)


class Sender:
    """Stands for the thread of one target."""

    def __init__(self, simulation: VmSimulation, target: str) -> None:
        self.has_ended = False
        self._simulation = simulation
        self.life = simulation.life
        self._target = target
        self._last_id = 0
        self._turn = 0
        self._is_idle = True
        self._is_sending = False

    def wake(self, *, is_urgent: bool) -> None:
        if is_urgent or self._is_idle:
            self._go_on(0.0)

    def _go_on(self, seconds: float) -> None:
        self._turn, self._is_idle = self._turn + 1, False
        turn = self._turn
        self._simulation.after(seconds, lambda: self._send(turn))

    def _send(self, turn: int) -> None:
        if turn != self._turn or self._is_sending or not self._is_alive():
            return
        notice = self._simulation.next_notice(self._target, self._last_id)
        if notice is None:
            self._is_idle = True
            return
        self._is_sending = True
        self._simulation.notify(self._target, notice, lambda is_settled: self._take(notice, is_settled=is_settled))

    def _take(self, notice: OutboxItem, *, is_settled: bool) -> None:
        self._is_sending = False
        if self.life != self._simulation.life or self._simulation.engine is None:
            return
        if is_settled:
            self._last_id = notice.id
            self._simulation.end_notice(notice.id, self._target)
        self._go_on(0.0 if is_settled else self._simulation.chance("receivers").choice((1.0, 20.0, 200.0)))

    def _is_alive(self) -> bool:
        return not self.has_ended and self.life == self._simulation.life and self._simulation.engine is not None


def _describe(event: Any) -> str:
    vms = "" if event.plan.vms == (VM,) else f" of {', '.join(event.plan.vms)}"
    until = (
        f", NotBefore {(event.not_before_at - START).total_seconds():.0f}" if event.status == "Scheduled" else ""
    )
    return f"{event.plan.type} {event.ids[0]}{vms}{until}"


def _contents(path: Path) -> dict[str, bytes]:
    """The files that a power cut leaves: the database and its log."""
    found = {}
    for name in (path.name, f"{path.name}-wal"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = path.with_name(name).read_bytes()
    return found


_METRICS: list[Metrics] = []


def new_metrics() -> Metrics:
    """One for all simulations of this process, since it is slow to make; only the count of bugs is read."""
    if not _METRICS:
        log.set_up("error", "json", stream=io.StringIO())
        _METRICS.append(Metrics(dict))
    return _METRICS[0]
