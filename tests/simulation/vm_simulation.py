"""A simulated machine under a simulated Azure, and in it the real engine on a real state file.

The world has the clock, and chooses what goes wrong and when; the judge knows what is right. One seed makes one
world, always the same one. Every kind of trouble draws from a chance of its own: it can be left out without
changing the others. Nothing here waits: the clock jumps to the time of the next change.

Real are the engine (with the parser, the comparison, the policy and the workflow behind it), its inbox and the
store; simulated are threads, hooks, the network, the machine and its clocks.
"""

import contextlib
import heapq
import io
import itertools
import queue
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
from msgspec.structs import replace
from oracle import VM, BrokenError, Judge, News

from scheduled_events_agent.daemon.inbox import Command, Inbox
from scheduled_events_agent.engine import (
    Engine,
    HookCommand,
    HookDone,
    HookKey,
    Host,
    MachinePaused,
    NotificationDone,
    RunOnClear,
    hook_key,
    not_run_result,
)
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, EventTypeName, parse_document
from scheduled_events_agent.notifications import Notification
from scheduled_events_agent.policy import Hook, Rule, RuleAffects, When
from scheduled_events_agent.policy.settings import AgentSettings, NotificationKind, NotifyTarget, Settings
from scheduled_events_agent.simulator.azure import Azure, EventType, LogEntryKind, Plan, SimulatedEvent
from scheduled_events_agent.status.actions import UNSETTLED_HOLD
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
    "slow inbox", "empty answers", "recommendations", "bad receivers",
]  # fmt: skip
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
BUSY_SECONDS = 1500.0
"""Trouble ends here; what follows is a fair world."""
_LIMIT_SECONDS = 40000.0
# Polls and cycles that change nothing are left out, but for one in so many seconds.
_QUIET_SECONDS = 60.0
_VERSION, _PREVIEW = "2020-07-01", "2024-07-09"
_TYPES: tuple[EventType, ...] = ("Freeze", "Reboot", "Redeploy")
_TARGETS = ("chat", "pager")
_NEWS: dict[RecordKind, NotificationKind] = {
    "seen": "seen", "preparing": "preparing", "prepared": "prepared", "held": "held", "approved": "approved",
    "started": "started", "closed": "recovered", "recovery_failed": "recovery_failed",
    "approval_needed": "approval_needed", "hook_missing": "hook_missing",
}  # fmt: skip
# The longest time that a run in the way of an eviction may take to end, and a little more.
_URGENT_SECONDS = 1.5
_HOOKS = ("drain", "save", "stop", "load", "resume", "go", "tell")


class PowerCut(BaseException):
    """The process ends here; no code of the agent's may catch it."""


class EndedError(BaseException):
    """The agent has ended while it waited for what comes."""


class CrashingStore(Store):
    """The store on a disk that fails where the world wants it to."""

    world: "World | None" = None

    def commit(
        self,
        steps: Sequence[Transition],
        at: datetime,
        answers: Mapping[int, RequestAnswer] | None = None,
        notifications: Sequence[tuple[str, str]] = (),
        remembered: RememberedChanges = NO_CHANGES,
    ) -> CommitResult:
        if self.world is not None:
            self.world.commits(steps, at)
        result = super().commit(steps, at, answers, notifications, remembered)
        if self.world is not None:
            self.world.committed(steps)
        return result

    def set_meta(self, facts: dict[MetaKey, str]) -> None:
        super().set_meta(facts)
        if self.world is not None and facts.get("state_lost") == "":
            self.world.forget_loss()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        world = self.world
        if world is None:
            with super()._transaction():
                yield
            return
        crash = world.next_crash()
        if crash == "before":
            raise PowerCut
        if world.is_disk_full:
            with super()._transaction():
                raise sqlite3.OperationalError("database or disk is full")
        before = _contents(self.path) if crash == "torn" else {}
        with super()._transaction():
            yield
        if crash == "torn":
            world.tear(before, _contents(self.path))
            raise PowerCut
        if crash == "after":
            world.is_cut_after_commit = True


class World(Host):
    """One run. ``story`` tells what happened, a line for each thing."""

    def __init__(self, seed: int, directory: Path, troubles: frozenset[Trouble] | None = None) -> None:
        """``troubles``: exactly these; by default, what chance gives to the seed."""
        self.seed = seed
        self._chances: dict[str, random.Random] = {}
        self.story: list[str] = []
        self.judge = Judge(self.now)
        given = (trouble for trouble in TROUBLES if self.chance(f"has {trouble}").random() < 0.3)
        self.troubles = frozenset(given) if troubles is None else troubles
        self.is_disk_full = False
        self.is_cut_after_commit = False
        self.engine: Engine | None = None
        self._directory = directory
        self._at = 0.0
        self._wall_offset = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._azure = Azure((VM, "vm_2"), new_id=self._new_id)
        self._azure_told = 0
        self._boot = 0
        self._life = 0
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
        self._has_turn = False
        self._poll_at = -1.0
        self._wake_at = -1.0
        self._metrics = new_metrics()
        dropped = self._metrics.notifications_dropped
        self._dropped = {name: dropped.labels(name, "removed") for name in _TARGETS}
        self._drops = self._count_drops()
        self._executor = Executor(self)
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
        self._was_ready: bool | None = None
        self._transactions = 0
        self._crashes = self._plan_crashes()
        self._scheduled_since: dict[str, float] = {}

    @property
    def event_count(self) -> int:
        """How many events there have been."""
        return len(self._azure.events())

    # --- chance and time

    def chance(self, what: str) -> random.Random:
        """The chance that decides on this, and on nothing else."""
        if what not in self._chances:
            self._chances[what] = random.Random(f"{self.seed}/{what}")
        return self._chances[what]

    def has(self, trouble: Trouble) -> bool:
        """Whether there is this trouble, now."""
        return trouble in self.troubles and self._at < BUSY_SECONDS

    def now(self) -> datetime:
        """The VM's wall clock."""
        return START + timedelta(seconds=self._at + self._wall_offset)

    def monotonic(self) -> float:
        return 1000.0 + self._at

    def boot_id(self) -> str:
        return f"boot {self._boot}"

    def is_shutting_down(self) -> bool:
        return self._is_going_down

    def tell(self, text: str) -> None:
        """One more line of the story."""
        self.story.append(f"{self._at:9.2f}  {text}")

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._at + seconds, next(self._order), what))

    # --- the run

    def run(self) -> None:
        """Live it. Raises BrokenError, or whatever the agent raises, with the story."""
        try:
            self._prepare()
            while self._queue:
                at, _, what = heapq.heappop(self._queue)
                if at > _LIMIT_SECONDS:
                    raise BrokenError("(9) the world does not come to rest")
                self._at = max(self._at, at)
                try:
                    what()
                except PowerCut:
                    self._crash("the power goes")
                self._watch_azure()
            self._finish()
        except BrokenError:
            raise
        except Exception as error:
            raise BrokenError(f"the agent raises {type(error).__name__}: {error}") from error
        finally:
            if self._store is not None:
                self._store.world = None
                self._store.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _prepare(self) -> None:
        self.tell(f"trouble: {', '.join(sorted(self.troubles)) or 'none'}")
        self._settings = self._a_policy()
        self._enforce()
        chance = self.chance("events")
        count = chance.choice((2, 3, 4)) if "many events" in self.troubles else chance.choice((1, 2))
        for number in range(count):
            at = chance.uniform(0.0, 600.0 if number else 30.0)
            self.after(at, lambda number=number: self._announce(number))  # type: ignore[misc]
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
        self.tell("--- from here on, the world is fair")
        self._is_deaf = self.is_disk_full = False
        self._crashes = {}
        self._retry_failed()
        self._scheduled_since = {
            event.ids[0]: self._at for event in self._azure.events() if event.status == "Scheduled"
        }

    def _finish(self) -> None:
        if self.engine is None:
            raise BrokenError("the agent is not started again")
        self.judge.finished(is_ready=is_ready(self.engine.workflows), pending=self.engine.workflows)
        faults = self._metrics.bugs._value.get()
        if self._store is not None and self._store.outbox.waiting():
            raise BrokenError("(12) notices that have ended stay in the state file")
        if faults:
            raise BrokenError(f"the engine has met {faults:.0f} bugs of its own")

    # --- Azure

    def _new_id(self) -> str:
        return f"E{next(self._order)}"

    def _epoch(self) -> float:
        return START.timestamp() + self._at

    def _announce(self, number: int) -> None:
        chance = self.chance(f"event {number}")
        type_ = chance.choice(_TYPES)
        plan = Plan(
            type=type_,
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
        event_id = self._azure.schedule(self._epoch(), plan)
        if chance.random() < 0.2:
            self.after(chance.uniform(0.0, plan.notice_seconds or 0.0), lambda: self._cancel(event_id))
        if chance.random() < 0.1:
            self.after(chance.uniform(0.0, 60.0), lambda: self._azure.reset_incarnation(self._epoch()))

    def _recommend(self) -> None:
        """Azure warns of an eviction, which may come or not, and before or after the warning is taken back."""
        chance = self.chance("recommendation")
        lasts = chance.choice((0.5, 20.0, 300.0, 3000.0))
        self._azure.schedule(
            self._epoch(), Plan(type="SpotRebalanceRecommendation", vms=(VM,), lasts_seconds=lasts)
        )
        if chance.random() < 0.7:
            notice, survives = chance.choice((5.0, 30.0, 300.0)), chance.random() < 0.5
            plan = Plan(type="Preempt", vms=(VM,), notice_seconds=notice, lasts_seconds=chance.choice((5.0, 60.0)))
            self.after(chance.choice((0.0, 5.0, 60.0, 400.0)), lambda: self._evict(plan, survives=survives))

    def _evict(self, plan: Plan, *, survives: bool) -> None:
        event_id = self._azure.schedule(self._epoch(), plan)
        if survives:
            self.after((plan.notice_seconds or 0.0) / 2, lambda: self._cancel(event_id))

    def _refuse_preview(self) -> None:
        """For a time documents come in a version that leaves recommendations out."""
        seconds = self.chance("refused preview").choice((2.0, 100.0, 900.0))
        self._version = _VERSION
        self.tell(f"api-version {_PREVIEW} is refused for {seconds:g} s")
        self._poll_soon()

        def take() -> None:
            self._version = _PREVIEW
            self.tell(f"api-version {_PREVIEW} is taken again")
            self._poll_soon()

        self.after(seconds, take)

    def _cancel(self, event_id: str) -> None:
        self._azure.advance(self._epoch())
        if self._azure.event(event_id).status == "Scheduled":
            self._azure.cancel(self._epoch(), event_id)

    def _watch_azure(self) -> None:
        """See to it that what Azure does is noticed, by the machine and by the next poll."""
        self._azure.advance(self._epoch())
        told = len(self._azure.history)
        for notification in self._azure.history[self._azure_told :]:
            if notification.kind == "polled":
                continue
            event = notification.event
            what = _describe(event) if event else notification.text
            self.tell(f"Azure: {notification.kind} {what}")
            if event is not None:
                self._notice(notification.kind, event)
        if told > self._azure_told:
            self._azure_told = told
            self._poll_soon()
            if self._azure.next_due < float("inf"):
                self.after(max(0.0, self._azure.next_due - self._epoch()) + 1e-6, lambda: None)

    def _notice(self, kind: LogEntryKind, event: SimulatedEvent) -> None:
        """Do to the machine what Azure's change of the event brings about."""
        if kind in ("started", "gone"):
            since = self._scheduled_since.pop(event.ids[0], None)
            if since is not None and not event.approved_at:
                self._judge_neglect(event.ids[0], since, has_started=kind == "started")
        if kind == "started" and VM in event.plan.vms:
            if event.plan.type in ("Reboot", "Redeploy"):
                self.after(self.chance("reboot").uniform(0.0, 3.0), self._reboot)
            else:
                self.after(0.1, self._freeze)
        elif kind == "scheduled":
            self._scheduled_since[event.ids[0]] = self._at
            # Mishaps are worth most while there is something to do.
            for trouble, mishap in self._mishaps():
                chance = self.chance(f"{trouble} beside an event")
                is_due = chance.random() < 0.5
                seconds = chance.expovariate(1 / 20.0)
                if self.has(trouble) and is_due and self._at + seconds < BUSY_SECONDS - 300.0:
                    self.after(seconds, mishap)

    def _judge_neglect(self, name: str, since: float, *, has_started: bool) -> None:
        seconds = self._at - max(since, BUSY_SECONDS)
        if seconds > 200.0:
            self.judge.neglected(name, seconds)
        if has_started and seconds > 700.0 and self.engine is not None and not self._is_frozen:
            self.judge.unprepared(name)

    # --- the machine

    def _boot_up(self) -> None:
        self._is_up, self._is_going_down = True, False
        self._start_agent()

    def _reboot(self) -> None:
        if not self._is_up or self._is_going_down:
            return
        self.tell("the machine goes down")
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
        self._boot += 1
        self.judge.rebooted()
        self.after(chance.choice((5.0, 60.0, 600.0)), self._boot_up)

    def _freeze(self) -> None:
        if self._is_frozen or not self._is_up:
            return
        seconds = self.chance("freezes").choice((2.0, 9.0, 60.0))
        self.tell(f"the machine stands still for {seconds:g} s")
        self._is_frozen = True

        def thaw() -> None:
            self.tell("the machine goes on")
            self._is_frozen = False
            self._deliver(MachinePaused(seconds))
            self._poll_soon()

        self.after(seconds, thaw)

    def _jump(self) -> None:
        seconds = self.chance("clock jumps").choice((-3600.0, -30.0, 30.0, 3600.0))
        self._wall_offset += seconds
        self.judge.clock_set()
        self.tell(f"the clock is set by {seconds:+g} s")
        self._poll_soon()

    def _fill_disk(self) -> None:
        seconds = self.chance("full disk").choice((2.0, 20.0, 200.0))
        self.is_disk_full = True
        self.tell(f"the disk is full for {seconds:g} s")

        def clear() -> None:
            self.is_disk_full = False
            self.tell("the disk has room again")
            self._wake_soon(0.5)

        self.after(seconds, clear)

    # --- the agent's life

    def _start_agent(self) -> None:
        if self.engine is not None or not self._is_up:
            return
        self._life += 1
        directory = self._directory / str(self._life)
        directory.mkdir(parents=True)
        for name, data in (self._torn or {}).items():
            (directory / name).write_bytes(data)
        self._torn = {}
        store = cast("CrashingStore", CrashingStore.open(directory, self.now()))
        store.world = self
        self._store = store
        if store.quarantined_path is not None:
            self.tell("the state file was damaged and is quarantined")
            self.judge.lost()
            self._words = {}
            self._is_state_lost = True
            self._was_ready = None
        # The power may have gone while the agent wrote that it has decided.
        self._is_state_lost &= bool(store.get_meta("state_lost"))
        self._body, self._succeeded_at, self._document_at = ("", b""), None, None
        self._mail, self._document, self._results, self._answers = Mail(self), None, [], []
        self._executor = Executor(self)
        self.tell(f"the agent starts, boot {self._boot}")
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
            self.tell(f"it cannot start: {error}")
            self._crash("it ends")
            return
        if self._was_ready is not None and is_ready(self.engine.workflows) != self._was_ready:
            raise BrokenError("(9) a restart has made the VM ready, or not ready")
        self._see_readiness()
        self._executor.reconfigure(self._settings.notify)
        self.judge.has_name = bool(self.engine.identity.name) and self.engine.is_identity_sure
        delay = self.chance("late name").choice((0.1, 5.0, 60.0)) if self.has("late name") else 0.01
        self.after(delay, self._identify(self._life))
        self._poll_soon()

    def _identify(self, life: int) -> Callable[[], None]:
        def answer() -> None:
            if life == self._life:
                self._deliver(Identity(name=VM, vm_id="id-1"))

        return answer

    def forget_loss(self) -> None:
        """By now the agent has decided on what was pending when its state was lost."""
        if self.judge.is_blind or not self.judge.has_name:
            raise BrokenError("(7) the agent forgets that its state was lost before it knows what is pending")
        self._is_state_lost = False

    def _kill(self) -> None:
        self._crash("kill -9")

    def _crash(self, how: str, *, may_restart: bool = True) -> None:
        """The process is gone; what is on the disk stays."""
        if self._store is None:
            return
        self.tell(f"the agent is killed ({how})" if how == "kill -9" else how)
        for ended, _ in self._results:
            self._forget(ended)
        for item in self._mail.items:
            if isinstance(item, HookDone):
                self._forget(item)
        self._executor.close()
        self._end_life(may_restart=may_restart)

    def _forget(self, ended: HookDone) -> None:
        if isinstance(ended.effect, RunHook):
            self.judge.forgotten(self._event_of(ended.effect), ended.effect.stage, ended.effect.hook)

    def _end_life(self, *, may_restart: bool) -> None:
        assert self._store is not None
        self._see_drops()
        if self._torn:
            self.judge.lost_counts()
        else:
            self._torn = _contents(self._store.path)
        # A process that was killed closes nothing: what it has left is copied by now.
        self._store.world, self.is_cut_after_commit = None, False
        self._store.close()
        shutil.rmtree(self._store.path.parent, ignore_errors=True)
        self._store, self.engine, self._inbox, self._is_stopping = None, None, None, False
        self.judge.crashed()
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
        self.tell("the agent gets a command to stop")
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
            self._judge_stop()
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

    def _judge_stop(self) -> None:
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
        raise BrokenError(f"the world gives no such command: {command}")

    def wait_for_mail(self, timeout: float) -> None:
        """Let the world go on until something is in the mail; for an agent that waits while it stops."""
        life, until = self._life, self._at + timeout
        while not self._mail.items and self._queue and self._queue[0][0] <= until:
            at, _, what = heapq.heappop(self._queue)
            self._at = max(self._at, at)
            what()
            self._watch_azure()
            if self._life != life or self.engine is None:
                raise EndedError
        if not self._mail.items:
            self._at = until

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
        return self._crashes.pop(self._transactions, "") if self._at < BUSY_SECONDS else ""

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
        at = self._at + delay
        if self.engine is not None and (self._wake_at < self._at or at < self._wake_at):
            self._wake_at = at
            life = self._life
            self.after(delay, lambda: self._turn(life, at))

    def _poll_soon(self) -> None:
        at = self._at + self.chance("polls").uniform(0.0, 1.0)
        if self._poll_at <= self._at or at < self._poll_at:
            self._poll_at = at
            self.after(at - self._at, lambda: self._poll(at))

    def _poll(self, at: float) -> None:
        if at != self._poll_at:
            return
        self._poll_at = -1.0
        if self.engine is None:
            return
        if not self._is_deaf and not self._is_frozen:
            self._azure.advance(self._epoch())
            self._azure.mark_served(self._epoch(), VM, self._version)
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
            self._poll_at = later = self._at + _QUIET_SECONDS
            self.after(_QUIET_SECONDS, lambda: self._poll(later))

    def _go_deaf(self) -> None:
        seconds = self.chance("deaf service").choice((3.0, 60.0, 300.0))
        self._is_deaf = True
        self.tell(f"the service does not answer for {seconds:g} s")

        def hear() -> None:
            self._is_deaf = False
            self.tell("the service answers again")
            self._poll_soon()

        self.after(seconds, hear)

    def _turn(self, life: int, at: float) -> None:
        if life != self._life or at != self._wake_at or self.engine is None or self._is_stopping:
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
            self.judge.turned(may_be_late=not self.judge.has_name)
            self._see_readiness()
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
                self._judge_comparison(self._document)
            self._wake_soon(1.0)
        elif wake_at is not None:
            seconds = (wake_at - self.now()).total_seconds()
            self._wake_soon(max(0.001, seconds))
            if seconds < 5.0:
                self._poll_soon()

    def _see_readiness(self) -> None:
        """Give the judge the answer of the page /readyz."""
        assert self.engine is not None
        for workflow in self.engine.workflows.values():
            if workflow.is_prepared_for:
                self.judge.unready(self._azure.event(workflow.event.id).ids[0])
        self.judge.ready(is_ready=is_ready(self.engine.workflows))

    def note_taken(self, item: Any) -> None:
        match item:
            case HookDone(effect=RunOnClear()):
                self.judge.on_clear_runs -= 1
            case HookDone(result=result) if self._is_stopping and result.outcome != "succeeded":
                self._forget(item)
            case HookDone(effect=RunHook() as effect, result=result):
                if result.outcome not in ("succeeded", "canceled") and self._is_going_down:
                    self.judge.not_run(self._event_of(effect), effect.stage, effect.hook)
                else:
                    assert self.engine is not None
                    self._results.append((item, self.engine.settings.hooks[effect.hook].required))
            case ApprovalAnswered():
                self._answers.append(item)
            case Identity():
                self.judge.has_name = True
            case MachinePaused() | Command() | NotificationDone():
                pass
            case _:
                self._document = item
                self.judge.heard(self._azure.event(event.id).ids[0] for event in item.events)

    def commits(self, steps: Sequence[Transition], at: datetime) -> None:
        """The agent is about to write these."""
        self.judge.writes_news(
            ((step.workflow.id, _NEWS[note.kind], at), step.workflow.event.type, step.workflow.event.resources)
            for step in steps
            for note in step.records
            if note.kind in _NEWS
        )

    def committed(self, steps: Sequence[Transition]) -> None:
        """The decisions of the agent are on disk, and none of them is carried out yet."""
        self.judge.has_written_news()
        for step in steps:
            self._names[step.workflow.id] = self._azure.event(step.workflow.event.id).ids[0]
        if self._document is not None:
            self._judge_document(self._document)
            self._document = None
        for step in steps:
            if any(note.kind == "expired" for note in step.records):
                self.judge.expired(self._names[step.workflow.id])
        for ended, is_required in self._results:
            self._known(ended, is_required=is_required)
        for answer in self._answers:
            self.judge.answered(self._names[answer.workflow_id], is_confirmed=not answer.error_kind)
        self._results, self._answers = [], []
        # An approval that is on the disk and not on its way is rare, and what it costs if it is forgotten is most.
        if self.has("power cuts") and any(
            isinstance(effect, Approve) for step in steps for effect in step.effects
        ):
            self.is_cut_after_commit |= self.chance("power cuts at an approval").random() < 0.2
        if self.is_cut_after_commit or self.judge.on_clear_runs:
            # The start is on the disk, and comes never, or only when the on_clear hook has ended.
            starts = [effect for step in steps for effect in step.effects if isinstance(effect, RunHook)]
            for start in starts:
                self.judge.maybe_started(self._names[start.workflow_id], start.stage, start.hook)
        if self.is_cut_after_commit:
            self.is_cut_after_commit = False
            raise PowerCut

    def _judge_comparison(self, document: Document) -> None:
        """The agent has compared it, and could not write what follows."""
        names = [self._azure.event(event.id).ids[0] for event in document.events]
        self.judge.compared(names, answered=document.answered, has_recommendations=document.has_recommendations)

    def _judge_document(self, document: Document) -> None:
        events = []
        for event in document.events:
            name = self._azure.event(event.id).ids[0]
            facts = (event.type, event.status, event.resources, event.not_before)
            events.append((name, event.id, *facts))
        self.judge.read(
            events,
            answered=document.answered,
            is_state_lost=self._is_state_lost,
            has_recommendations=document.has_recommendations,
        )

    def _known(self, ended: HookDone, *, is_required: bool) -> None:
        if isinstance(ended.effect, RunHook):
            name, stage, hook = self._event_of(ended.effect), ended.effect.stage, ended.effect.hook
            outcome = ended.result.outcome
            self.judge.known(name, stage, hook, outcome, is_required=is_required)
            if stage == "prepare" and is_required and outcome not in ("succeeded", "canceled"):
                # An approval from before the failure is void; whether one that is not answered yet was before it
                # is not known.
                words = {"" if word == "approve" else word for word in self._words.get(name, {""})}
                asked = {word for who, word, _ in self._requests.values() if who == name}
                self._words[name] = words | (asked & {"approve"})
                self.judge.spoke(name, self._words[name])

    def _event_of(self, effect: RunHook) -> str:
        return self._names[effect.workflow_id]

    # --- what the agent does (called by its executor)

    def hook_starts(self, effect: HookCommand, environment: dict[str, str]) -> None:
        name = effect.hook
        if isinstance(effect, RunOnClear):
            self.tell(f"on_clear hook {name} starts")
            if self.judge.runs:
                raise BrokenError(f"on_clear hook {name} starts beside {self.judge.runs}")
            self.judge.on_clear_runs += 1
            return
        event = self._azure.event(environment["SCHEDULED_EVENT_ID"]).ids[0]
        self.tell(f"{event}: {effect.stage} hook {name} starts")
        self.judge.started(event, effect.stage, name)

    def hook_waits(self, effect: HookCommand, behind: RunHook) -> None:
        if isinstance(effect, RunHook) and effect.stage == "prepare":
            first = (self._event_of(behind), behind.stage)
            self.judge.waits(self._event_of(effect), effect.hook, behind=first)

    def hook_is_told_to_end(self, effect: HookCommand) -> None:
        if isinstance(effect, RunHook):
            self.judge.told_to_end(self._event_of(effect), effect.stage)

    def hook_ends(self, effect: HookCommand, outcome: HookOutcome) -> None:
        if isinstance(effect, RunHook):
            self.tell(f"{self._event_of(effect)}: {effect.stage} hook {effect.hook} ends: {outcome}")
            self.judge.ended(self._event_of(effect), effect.stage, effect.hook, outcome)

    def post(self, approvals: Sequence[Approve]) -> None:
        """A request to approve is sent, and it and its answer meet what they meet."""
        pairs = []
        for approve in approvals:
            name = self._azure.event(approve.event_id).ids[0]
            pairs.append((name, approve.event_id))
        self.tell(f"the agent approves {', '.join(name for name, _ in pairs)}")
        self.judge.posted(pairs)
        chance, life = self.chance("approvals"), self._life
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
                    self._azure.approve(self._epoch(), event_id, VM)
                kind = "timeout" if fate < 0.5 else ""
            else:
                kind = "rejected"
            self.after(chance.choice((0.01, 0.5, 5.0)), lambda: answer(kind))

        def answer(kind: str) -> None:
            if life != self._life or self.engine is None:
                return
            for approve in approvals:
                self.tell(f"{self._names[approve.workflow_id]}: the approval is answered: {kind or 'ok'}")
                self._deliver(ApprovalAnswered(workflow_id=approve.workflow_id, error_kind=kind))

        self.after(arrives_after, arrive)

    def give(self, life: int, ended: HookDone) -> None:
        """The end of a hook, into the inbox of the agent that started it."""
        if life == self._life:
            self._deliver(ended)

    def next_notice(self, target: str, after_id: int) -> OutboxItem | None:
        assert self._store is not None
        return self._store.outbox.load_next(target, after_id)

    def notify(self, target: str, notice: OutboxItem, answer: Callable[[bool], None]) -> None:
        """A notification is sent, and may meet a fault. ``answer``: whether it is settled."""
        notification = msgspec.json.decode(notice.body, type=Notification)
        news: News = (notification.workflow_id, notification.kind, notification.at)
        chance, fate, life = self.chance("receivers"), "", self._life
        if self.has("bad receivers"):
            fate = chance.choice(("", "", "refused", "not sent", "server error", "answer lost"))
        # A request in flight takes its time, also when the agent is dead by then.
        arrives_after = chance.choice((0.01, 1.0, 10.0)) if "bad receivers" in self.troubles else 0.01

        def arrive() -> None:
            # A refusal is counted by the agent, if it still lives.
            if fate in ("", "answer lost") or (fate == "refused" and life == self._life):
                self.tell(f"{target} hears that {self._names.get(news[0], news[0])} is {news[1]}: {fate or 'ok'}")
                self.judge.notified(target, news, is_rejected=fate == "refused")
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
                self.tell(f"{count} notices of {name} are dropped")
                self.judge.dropped(name, count)

    @property
    def life(self) -> int:
        return self._life

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
        self.judge.policy(self._settings.rules)
        self.judge.targets = self._settings.notify
        self.judge.hooks, self.judge.reserve = self._settings.hooks, self._settings.agent.reserve

    def _reload(self) -> None:
        if self.engine is None or self._is_frozen:
            return
        if self.chance("reloads").random() < 0.3:
            self.tell("a bad policy is refused")
            self.engine.reject_settings("it is bad")
        else:
            self.tell("another policy is put in force")
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

    def _retry_failed(self) -> None:
        """In a fair world an operator sees what was not recovered, and has it tried again."""
        if self.engine is not None and self._store is not None:
            for workflow in self.engine.workflows.values():
                if workflow.phase == "recovery_failed":
                    self._say(workflow, "retry")
                    break
        if self.engine is None or self.engine.workflows or self._azure.next_due < float("inf"):
            self.after(_QUIET_SECONDS, self._retry_failed)

    def _say(self, workflow: Workflow, action: OperatorAction) -> None:
        assert self._store is not None
        name = self._azure.event(workflow.event.id).ids[0]
        self.tell(f"an operator says of {name}: {action}")
        store = Store.open_client(self._store.path.parent)
        try:
            number = store.add_request(workflow.id, action, "kim", self.now())
        finally:
            store.close()
        before = self._words.setdefault(name, {""})
        word = "" if action == "release" else action
        self._requests[number] = (name, word, set(before))
        if action in ("retry", "resolve"):
            self.judge.asked(name, action)
        else:
            before.add(word)
            self.judge.spoke(name, before)
        self._wake_soon(1.0)

    def _read_answers(self) -> None:
        if not self._requests or self._store is None or self.is_disk_full:
            return
        for number, (name, word, before) in [*self._requests.items()]:
            with contextlib.suppress(StoreError):
                answer = self._store.load_answer(number)
                if answer is not None:
                    self.tell(f"the operator is answered: {answer.message}")
                    del self._requests[number]
                    if word in ("retry", "resolve"):
                        if answer.succeeded:
                            self.judge.obeyed(name, word)
                        continue
                    is_rejected = not answer.succeeded and answer.message != UNSETTLED_HOLD
                    self._words[name] = before if is_rejected else {word}
                    self.judge.spoke(name, self._words[name])


class Mail:
    """Stands for the queue of the daemon's inbox."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.items: list[Any] = []

    def get(self, timeout: float) -> Any:
        if not self.items:
            self._world.wait_for_mail(timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self.items:
            raise queue.Empty
        item = self.items.pop(0)
        self._world.note_taken(item)
        return item


class Executor:
    """The engine's executor: hooks that take the time and end the way that chance gives them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._life = world.life
        self._runs: dict[HookKey, HookCommand] = {}
        self._unanswered: set[str] = set()
        self._live: set[HookKey] = set()
        self._numbers: dict[HookKey, int] = {}
        self._count = itertools.count()
        self._notifier: dict[str, Sender] = {}
        self._once: dict[str, HookKey] = {}
        """By the hook's name: the run that goes on, of those that must not overlap."""
        self._waiting: dict[HookKey, Callable[[], None]] = {}
        """What begins the runs that wait for their turn."""
        self._patient: set[HookKey] = set()
        """Runs that were asked to end, and may take their time."""

    def reconfigure(self, targets: Sequence[NotifyTarget]) -> None:
        """These targets are notified."""
        old, names = self._notifier, [target.name for target in targets]
        self._notifier = {name: old[name] if name in old else Sender(self._world, name) for name in names}
        for name in old.keys() - set(names):
            old[name].has_ended = True
        self.notify(is_urgent=True)

    def start_hook(
        self,
        effect: HookCommand,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        del stdin, event_id
        world, key = self._world, hook_key(effect)
        world.hook_starts(effect, environment)
        self._runs[key] = effect
        self._live.add(key)
        number = self._numbers[key] = next(self._count)
        assert hook is not None
        begin = partial(self._begin, effect, hook, number, deadline)
        if hook.serialize and effect.hook in self._once:
            self._waiting[key] = begin
            world.after(_URGENT_SECONDS, lambda: self._expect_turn(effect, number))
            return
        if hook.serialize:
            self._once[effect.hook] = key
        begin()

    def _expect_turn(self, effect: HookCommand, number: int) -> None:
        """A second after it has begun to wait."""
        key = hook_key(effect)
        if self._numbers[key] != number or key not in self._waiting or self._life != self._world.life:
            return
        if effect.hook in self._once:
            first = self._once[effect.hook]
            behind = self._runs[first]
            if first not in self._patient and isinstance(behind, RunHook):
                self._world.hook_waits(effect, behind)

    def _take_turns(self, name: str) -> None:
        """The run that went on has ended: the most urgent one of those that wait begins."""
        self._once.pop(name, None)
        waiting = [key for key in self._waiting if self._runs[key].hook == name]
        if waiting:
            key = self._once[name] = min(waiting, key=lambda key: self._runs[key].rank)
            self._waiting.pop(key)()

    def _begin(self, effect: HookCommand, hook: Hook, number: int, deadline: float | None) -> None:
        world, key = self._world, hook_key(effect)
        limit = hook.timeout if deadline is None else min(hook.timeout, max(0.0, deadline - world.monotonic()))
        chance = world.chance(f"hook {effect.hook}")
        seconds = chance.choice((0.01, 1.0, 10.0))
        outcome: HookOutcome = "succeeded"
        if world.has("bad hooks"):
            outcome = chance.choice(("succeeded", "succeeded", "failed", "timed_out"))
            seconds = chance.choice((0.01, 10.0, 100.0))
        if outcome == "timed_out" or seconds > limit:
            outcome, seconds = "timed_out", limit
        world.after(seconds, lambda: self._end(key, number, outcome))

    def cancel_hook(self, key: HookKey, *, is_urgent: bool = False) -> None:
        grace_seconds = 1.0 if is_urgent else 5.0
        if key in self._live:
            self._world.hook_is_told_to_end(self._runs[key])
            if key in self._waiting:
                number = self._numbers[key]
                self._world.after(0.0, lambda: self._end(key, number, "canceled"))
                return
            if not is_urgent:
                self._patient.add(key)
            chance, number = self._world.chance("cancel"), self._numbers[key]
            # It may have been about to end anyway.
            outcome: HookOutcome = "succeeded" if chance.random() < 0.2 else "canceled"
            seconds = min(grace_seconds, chance.choice((0.0, 1.0, 5.0)))
            self._world.after(seconds, lambda: self._end(key, number, outcome))

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        if key in self._live and deadline is not None:
            number = self._numbers[key]
            left = max(0.0, deadline - self._world.monotonic())
            self._world.after(left, lambda: self._end(key, number, "timed_out"))

    def is_running(self, key: HookKey) -> bool:
        return key in self._runs

    def hook_received(self, effect: HookCommand) -> None:
        self._runs.pop(hook_key(effect), None)

    def report(self, message: HookDone) -> None:
        self._world.give(self._life, message)

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        del incarnation
        self._unanswered |= {approve.workflow_id for approve in approvals}
        self._world.post(approvals)

    def notify(self, *, is_urgent: bool) -> None:
        for sender in self._notifier.values():
            sender.wake(is_urgent=is_urgent)

    def approval_received(self, workflow_id: str) -> None:
        self._unanswered.discard(workflow_id)

    def is_busy(self) -> bool:
        return bool(self._runs or self._unanswered)

    def cancel_all(self, grace_seconds: float) -> None:
        del grace_seconds
        for key in sorted(self._live):
            self.cancel_hook(key)

    def end_all(self, chance: random.Random) -> None:
        """The machine goes down and ends what runs."""
        for key in sorted(self._live):
            number = self._numbers[key]
            if chance.random() < 0.5:
                self._world.after(0.0, lambda key=key, number=number: self._end(key, number, "failed"))  # type: ignore[misc]

    def close(self) -> None:
        """All of them are ended with the agent."""
        self._live.clear()
        self._waiting.clear()

    def _end(self, key: HookKey, number: int, outcome: HookOutcome) -> None:
        if key not in self._live or self._numbers[key] != number or self._life != self._world.life:
            return
        self._live.discard(key)
        self._patient.discard(key)
        self._waiting.pop(key, None)
        effect = self._runs[key]
        if self._once.get(effect.hook) == key:
            self._take_turns(effect.hook)
        self._world.hook_ends(effect, outcome)
        self._world.give(self._life, HookDone(effect, not_run_result(effect.hook, outcome, outcome)))


class Sender:
    """Stands for the thread of one target."""

    def __init__(self, world: World, target: str) -> None:
        self.has_ended = False
        self._world = world
        self._life = world.life
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
        self._world.after(seconds, lambda: self._send(turn))

    def _send(self, turn: int) -> None:
        if turn != self._turn or self._is_sending or not self._is_alive():
            return
        notice = self._world.next_notice(self._target, self._last_id)
        if notice is None:
            self._is_idle = True
            return
        self._is_sending = True
        self._world.notify(self._target, notice, lambda is_settled: self._take(notice, is_settled=is_settled))

    def _take(self, notice: OutboxItem, *, is_settled: bool) -> None:
        self._is_sending = False
        if self._life != self._world.life or self._world.engine is None:
            return
        if is_settled:
            self._last_id = notice.id
            self._world.end_notice(notice.id, self._target)
        self._go_on(0.0 if is_settled else self._world.chance("receivers").choice((1.0, 20.0, 200.0)))

    def _is_alive(self) -> bool:
        return not self.has_ended and self._life == self._world.life and self._world.engine is not None


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
    """One for all worlds of this process, since it is slow to make; only the count of bugs is read."""
    if not _METRICS:
        log.set_up("error", "json", stream=io.StringIO())
        _METRICS.append(Metrics(dict))
    return _METRICS[0]
