"""The engine: takes in what has come, decides, commits, has it done.

Owns the board of open workflows and everything about them that outlives a turn; decides nothing about events
itself (``workflow`` does) and waits for nothing: it starts no thread, opens no connection and reads no clock but
that of its ``Machine``. The one invariant: what was decided is on disk before any of it is done, and what could
not be put on disk is decided on again.

For one thread. The board and the settings are replaced, never changed, so that others may read them at any time.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from msgspec.structs import replace

from agent import __version__, hook_times, host
from agent.events import Document, Gone, Missing, Seen, compare, refuse_too_many, to_azure_json
from agent.hooks import HookResult, hook_environment
from agent.imds import Identity
from agent.log import FailureLog, get_logger
from agent.log_ids import LogId
from agent.metrics import Metrics
from agent.policy import Hook
from agent.settings import Settings
from agent.store import Request, Store, StoreError, WithdrawnError
from agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    Board,
    CancelHook,
    ClockSet,
    Context,
    HookFinished,
    HookOutcome,
    MoveDeadline,
    Note,
    OperatorSpoke,
    Progression,
    Reconsider,
    RunHook,
    Signal,
    Stage,
    Step,
    Word,
    Workflow,
    ask_gates,
    has_obeyed,
    hook_deadline_at,
    is_ready,
    known_events,
    next_wake_at,
    proceed,
)

# So much more or less than on the monotonic clock has passed on the wall clock if somebody has set it.
_CLOCK_SET_SECONDS = 1.0
# Two answers are a poll interval apart if so much of it is between them; the rest is the network's noise.
_INTERVAL_SHARE = 0.9
_KEEP_JOURNAL = timedelta(days=90)
_MAX_NAMES = 50
# After a day without a request the service switches Scheduled Events off for the VM.
_SERVICE_KNOWN = timedelta(hours=24)
_REMEMBER_ANSWER = timedelta(hours=1)
# Of more new events than this at once, the log tells of the first few.
_MAX_TOLD_AT_ONCE = 10
_TOLD_OF_MANY = 3
_TIDY_SECONDS = 60.0
_LOUD_NOTES = ("held", "blocked", "approval_failed", "recovery_failed")
# An operator must act on these: the log tells them of every event.
_NEVER_LEFT_OUT = ("blocked", "recovery_failed")

HookKey = tuple[str, str]
"""Workflow and stage: what a workflow runs one hook of at a time."""


@dataclass(frozen=True)
class Paused:
    """The machine stood still."""

    seconds: float


@dataclass(frozen=True)
class HookEnded:
    """A hook has ended: of a workflow, or (``effect`` is None) of on_clear."""

    effect: RunHook | None
    result: HookResult


News = Document | Identity | ApprovalAnswered | HookEnded | Paused


class Machine:
    """The machine that the engine runs on."""

    def now(self) -> datetime:
        """The wall clock."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds, on a clock that nobody sets."""
        return time.monotonic()

    def boot_id(self) -> str:
        """See ``host.boot_id``."""
        return host.boot_id()

    def is_shutting_down(self) -> bool | None:
        """See ``host.is_shutting_down``."""
        return host.is_shutting_down()


class Hands(Protocol):
    """Who does what was decided. No method blocks or raises; what becomes of it comes back to ``Engine.take``."""

    def start_hook(
        self,
        effect: RunHook | None,
        name: str,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        """Run a hook, for ``effect`` or (None) for on_clear; HookEnded comes back."""

    def cancel_hook(self, key: HookKey | None) -> None:
        """Have the hook in flight ended, if there is one; its result says canceled."""

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        """NotBefore has moved; the deadline is monotonic."""

    def is_running(self, key: HookKey | None) -> bool:
        """Whether such a hook runs, or has ended and that was not taken yet."""

    def forget_hook(self, effect: RunHook | None) -> None:
        """The end of this hook has been taken."""

    def report(self, news: HookEnded) -> None:
        """Give this back to ``Engine.take``, soon."""

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        """Send all of them in one request; for each of them ApprovalAnswered comes back."""

    def forget_approval(self, workflow_id: str) -> None:
        """The answer to this approval has been taken."""

    def is_busy(self) -> bool:
        """Whether a hook or an approval is under way, or has ended and that was not taken yet."""

    def cancel_all(self, grace_seconds: float) -> None:
        """Have every hook ended within the grace."""


class Engine:
    """What the agent knows and does about events. ``take`` what has come, then ``turn``."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        hands: Hands,
        machine: Machine | None = None,
        *,
        describe: Callable[[], bytes] = bytes,
    ) -> None:
        """``describe``: the answer to whoever asks through the store how the agent is, a ``Status`` as JSON."""
        self._machine = machine or Machine()
        self._describe = describe
        self._store = store
        self._metrics = metrics
        self._hands = hands
        self._log = get_logger()
        self.settings = settings
        """The policy in force."""
        self.board: Board = {}
        """The open workflows."""
        self.boot_id = self._machine.boot_id()
        self.identity = Identity(name=store.load_fact("vm_name"), vm_id=store.load_fact("vm_id"))
        """Who this VM is, as far as that is known."""
        self.is_paused = False
        self._is_stopping = False
        self.store_failure = ""
        """Why the last turn could do nothing; "" if it could."""
        self.turned_at = self._machine.monotonic()
        """When the last turn began."""
        self._clock_offset = self._machine.now().timestamp() - self.turned_at
        self._new_identity: Identity | None = None
        # A disk may have been copied to another VM, which is always another boot.
        self.others_events = 0
        """How many events of the last document only concern other VMs, and are not followed."""
        self._untold: set[str] = set()  # workflows that the log leaves out
        self._is_identity_sure = host.is_same_boot(store.load_fact("boot_id"), self.boot_id)
        self._answer_remembered_at: datetime | None = None
        self._is_state_lost = bool(store.load_fact("state_lost"))
        # What the next turn has to take in: a document, and signals, that no commit has held yet.
        self._document: Document | None = None
        # Events that the last answer lacked, and when the first one did, monotonic.
        self._lacked: dict[str, float] = {}
        self._signals: list[Signal] = []
        self._requests: list[Request] = []
        self._document_at: datetime | None = None
        # Hooks of on_clear that are still to run; None until it is known whether anything is pending.
        self._on_clear: list[str] | None = None
        # Hooks of events that wait for the end of an on_clear hook: what that does, they may undo. And those that
        # failed while the machine went down, if it stays up after all.
        self._delayed: list[RunHook] = []
        self._latest: Document | None = None
        self._tidy_deadline = self.turned_at
        self._store_failures = FailureLog("writing the state file", LogId.STATE_NOT_WRITTEN, LogId.STATE_WRITTEN)
        self._hook_times = hook_times.decode(store.load_fact("hook_times"))
        self._are_hook_times_saved = True
        self._hook_seconds: dict[str, float] = {}
        self._expect_hooks()
        self._reserve_failures = FailureLog(
            "keeping room in the state file for a full disk", LogId.NO_RESERVE, LogId.RESERVE
        )
        self._faults = FailureLog("handling an event", LogId.EVENT_FAULT)

    def start(self) -> None:
        """Go on where the last agent ended. To be called once, first. Raises StoreError."""
        workflows = self._store.load_workflows()
        # A boot id that is a rounded time may come out a little different within one boot.
        self.boot_id = next(
            (w.boot_id for w in workflows if host.is_same_boot(w.boot_id, self.boot_id)), self.boot_id
        )
        self.board = {workflow.id: workflow for workflow in workflows}
        self._leave_out([workflow.id for workflow in workflows])
        now = self._machine.now()
        if self._store.set_aside is not None:
            self._log.error(
                "the state file was damaged and has been set aside; what was done before is not known, so "
                "no event that is pending now will be approved unless an operator does",
                log_id=LogId.STATE_LOST,
                set_aside=str(self._store.set_aside),
            )
            self._store.record("state_lost", f"the damaged state file is now {self._store.set_aside}", now)
        self._store.record("agent_started", f"version {__version__}, mode {self.settings.agent.mode}", now)
        self._count_settings()
        if workflows:
            # The policy may be another one than the last agent had.
            self._signals += [AgentRestarted(), Reconsider()]

    def take(self, news: News) -> None:
        """Note down what has come; the next turn decides on it."""
        match news:
            case Document():
                self._document = replace(news, answered=news.answered or self._machine.monotonic())
                for event in news.events:
                    self._lacked.pop(event.key, None)
            case Identity():
                self._new_identity = news
            case ApprovalAnswered():
                self._hands.forget_approval(news.workflow_id)
                if news.error_kind:
                    self._metrics.approvals.labels(news.error_kind).inc()
                self._signals.append(news)
            case HookEnded(effect=effect, result=result):
                self._hands.forget_hook(effect)
                stage = effect.stage if effect else "on_clear"
                self._metrics.record_hook(result.hook, stage, result.outcome, result.duration_seconds)
                if effect is None:
                    self._end_on_clear_hook(result)
                else:
                    self._learn_hook_time(effect, result)
                    self._take_result(effect, result)
            case Paused(seconds=seconds):
                self._tell_pause(seconds)

    def turn(self, document_at: datetime | None) -> bool:
        """Decide, commit, perform. False if the state file could not be written: then nothing was done.

        Raises StoreError if the file is damaged: the agent is to be started again, which sets it aside.

        ``document_at``: when a document was last read; everything that was read until then has been taken.
        """
        self.turned_at = self._machine.monotonic()
        now = self._machine.now()
        self._look_at_clock(now)
        try:
            self._learn_identity(now)
            self._take_requests(now)
            has_document = bool(self._document or self._latest) and not self._is_stopping
            if has_document and (self._is_identity_sure or self.settings.vm.name):
                self._document_at = document_at or now
            if self._delayed and not self._hands.is_running(None) and self._machine.is_shutting_down() is False:
                self._run_delayed(now)
            self._decide_and_do(now)
            self._greet_first_document(now)
            self._save_hook_times()
            self._remember_answer(document_at)
        except StoreError as error:
            self.store_failure = str(error)
            # Nothing was done. What was taken in waits, and is decided on again.
            self._metrics.store_errors.labels(error.kind).inc()
            self._store_failures.failed(error.kind, str(error), self.turned_at)
            if error.kind == "damaged":
                raise  # only a start sets the file aside
            self._forget_requests()
            return False
        self._store_failures.succeeded(self.turned_at)
        self.store_failure = ""
        return True

    def tidy(self) -> None:
        """Forget what is too old or too much, and keep room for a full disk. For after a turn; takes milliseconds.

        Raises StoreError if the file is damaged.
        """
        if self.turned_at < self._tidy_deadline:
            return
        self._tidy_deadline = self.turned_at + _TIDY_SECONDS
        try:
            if self._store.prune(self._machine.now() - _KEEP_JOURNAL):
                self._tidy_deadline = self.turned_at  # there is more
            shortage = self._store.keep_reserve()
            self._metrics.state_reserve.set(self._store.reserve_bytes())
        except StoreError as error:
            self._metrics.store_errors.labels(error.kind).inc()
            if error.kind == "damaged":
                raise
            shortage = str(error)
        if shortage:
            self._reserve_failures.failed("shortage", shortage, self.turned_at)
        else:
            self._reserve_failures.succeeded(self.turned_at)

    def next_wake_at(self) -> datetime | None:
        """When time alone will next let something happen."""
        return next_wake_at(self.board, self._context(self._machine.now(), self._document_at))

    def begin_stop(self) -> None:
        """From now on a turn keeps what has come and begins nothing: what follows is left to the next start."""
        self._is_stopping = True
        self._document_at = None  # without a document nothing moves
        self._signals = [signal for signal in self._signals if not _is_cut_short(signal)]

    def finish(self) -> None:
        """Keep what has come last. Raises StoreError."""
        self.turn(None)
        self._store.record("agent_stopped", f"pending: {len(self.board)}", self._machine.now())

    # --- policy

    def change_settings(self, settings: Settings) -> None:
        """Put another policy in force."""
        now, old = self._machine.now(), self.settings
        self.settings = replace(settings, hooks={**self._hooks_still_needed(settings), **settings.hooks})
        for name in ("listen", "state_dir"):
            if getattr(old.agent, name) != getattr(settings.agent, name):
                self._log.warning(
                    f"agent.{name} takes effect at the next start of the agent", log_id=LogId.POLICY_WARNING
                )
        rules = rule_names(settings)
        self._log.info("the policy file was read again", log_id=LogId.POLICY_RELOADED, rules=rules)
        self.record("reloaded", f"rules: {', '.join(rules)}", now)
        self._count_settings()
        self._expect_hooks()
        self._reconsider()

    def refuse_settings(self, reason: str) -> None:
        """Another policy was offered that cannot be used: the old one stays."""
        self._metrics.reload_ok.set(0)
        self._log.error(
            "the policy file is refused; the old policy stays in force",
            log_id=LogId.POLICY_REFUSED,
            reason=reason,
        )
        self.record("reload_refused", reason, self._machine.now())

    def _hooks_still_needed(self, settings: Settings) -> dict[str, Hook]:
        """Hooks that the new policy lacks, and by which what has begun under the old one goes on or is undone."""
        decisions = [workflow.decision for workflow in self.board.values()]
        names = {name for decision in decisions for name in (*decision.on_start, *decision.recover)}
        hooks = {
            name: self.settings.hooks[name] for name in names & self.settings.hooks.keys() - settings.hooks.keys()
        }
        if hooks:
            self._log.warning(
                "hooks that pending events still need are kept until the next start",
                log_id=LogId.POLICY_WARNING,
                hooks=[*hooks],
            )
        return hooks

    def is_acting(self) -> bool:
        """Whether it runs hooks and approves."""
        return self.settings.agent.mode == "act" and not self.is_paused

    def set_paused(self, *, is_paused: bool) -> None:
        """Go on watching, but begin nothing and approve nothing; or act again."""
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        text = "paused: it watches, and does nothing" if is_paused else "acts again"
        self._log.warning(text, log_id=LogId.PAUSED_OR_RESUMED)
        self.record("paused" if is_paused else "resumed", text, self._machine.now())
        self._metrics.is_acting.set(self.is_acting())
        self._signals.append(Reconsider())

    def _count_settings(self) -> None:
        self._metrics.is_acting.set(self.is_acting())
        self._metrics.reload_ok.set(1)
        self._metrics.reloaded_at.set_to_current_time()

    def _reconsider(self) -> None:
        """Decide anew, also on events that were none of this VM's."""
        self._signals.append(Reconsider())
        self._document = self._document or self._latest

    # --- a turn

    def _context(self, now: datetime, document_at: datetime | None) -> Context:
        settings = self.settings
        return Context(
            now=now,
            names=self.names(),
            rules=settings.rules,
            windows=settings.maintenance_windows,
            hooks=settings.hooks,
            hook_seconds=self._hook_seconds,
            reserve=settings.agent.reserve,
            boot_id=self.boot_id,
            is_acting=self.is_acting(),
            document_at=document_at,
            is_state_lost=self._is_state_lost,
        )

    def _look_at_clock(self, now: datetime) -> None:
        before, self._clock_offset = self._clock_offset, now.timestamp() - self.turned_at
        seconds = self._clock_offset - before
        if abs(seconds) > _CLOCK_SET_SECONDS and self.board:
            self._signals.append(ClockSet(seconds))

    def _decide_and_do(self, now: datetime) -> None:
        if not self.board and not self._signals and self._document is None:
            return
        signals = [*self._signals, *self._look_at_document()]
        progression = proceed(self.board, signals, self._context(now, self._document_at))
        try:
            self._store.commit(progression.steps, now, self._answers(progression))
        except WithdrawnError:
            self._forget_requests()
            self._take_requests(now)
            self._decide_and_do(now)
            return
        self._requests = []
        if self._document is not None:
            self._latest = self._document
        # What a bug kept from being taken in is compared again, at each turn, until it is.
        self._document = self._latest if progression.faults else None
        self.board, self._signals = progression.board, []
        self._leave_out([s.workflow.id for s in progression.steps if any(n.kind == "seen" for n in s.notes)])
        for step in progression.steps:
            for note in step.notes:
                self._tell(step.workflow, note, now)
        self._untold &= self.board.keys()
        for workflow_id, fault in progression.faults:
            self._tell_fault(workflow_id, fault)
        self._perform(progression.steps, now)

    def _look_at_document(self) -> list[Seen | Missing | Gone]:
        """What is new in it. An event is gone when two answers lack it that are a poll interval apart.

        Events that only concern other VMs are counted and no more, unless a rule may take them.
        """
        document = self._document
        if document is None:
            return []
        known, names = known_events(self.board), self.names()
        events = document.events
        if not any("others" in rule.when.affects for rule in self.settings.rules):
            events = tuple([e for e in events if e.key in known or e.affects(names) != "others"])
        self.others_events = len(document.events) - len(events)
        self._metrics.others_events.set(self.others_events)
        for key in known.keys() - {event.key for event in events}:
            self._lacked.setdefault(key, document.answered)
        apart = _INTERVAL_SHARE * self.settings.imds.poll_interval
        missing = {
            workflow.event.key: document.answered - self._lacked.get(workflow.event.key, document.answered)
            >= apart
            for workflow in self.board.values()
            if workflow.is_missing
        }
        return compare(known, replace(document, events=events), missing)

    def lacks_event(self) -> bool:
        """Whether the last answer lacked an event that is not over yet: the next one counts. For any thread."""
        return any(workflow.is_missing for workflow in self.board.values())

    def check(self, document: Document) -> None:
        """Raises DocumentError if it has more events of this VM than can be real. For any thread."""
        refuse_too_many(document, self.names())

    def _perform(self, steps: Iterable[Step], now: datetime) -> None:
        together: list[Approve] = []
        for step in steps:
            for effect in step.effects:
                match effect:
                    case RunHook():
                        self._run_hook(step.workflow, effect, now)
                    case CancelHook(workflow_id=workflow_id, stage=stage):
                        self._cancel_hook((workflow_id, stage))
                    case MoveDeadline(workflow_id=workflow_id):
                        deadline = self._deadline(step.workflow, "prepare", now)
                        self._hands.set_deadline((workflow_id, "prepare"), deadline)
                    case Approve(is_alone=True):
                        self._hands.approve([effect], self.incarnation())
                    case Approve():
                        together.append(effect)
        if together:
            self._hands.approve(together, self.incarnation())

    def incarnation(self) -> str:
        """Of the last document that was decided on."""
        return self._latest.incarnation if self._latest else ""

    def _run_hook(self, workflow: Workflow, effect: RunHook, now: datetime) -> None:
        if self._hands.is_running(None):
            self._on_clear = []
            self._hands.cancel_hook(None)
            self._delayed.append(effect)
            return
        event = workflow.event
        not_before = None if workflow.is_gone else event.not_before
        seconds_left = (not_before - now).total_seconds() if not_before else None
        environment = hook_environment(
            event,
            stage=effect.stage,
            rule=workflow.decision.rule,
            vm=self.name(),
            outcome=workflow.outcome,
            seconds_left=seconds_left,
        )
        self._hands.start_hook(
            effect,
            effect.hook,
            self.settings.hooks.get(effect.hook),
            environment=environment,
            stdin=to_azure_json(event),
            deadline=self._deadline(workflow, effect.stage, now),
            event_id=event.id,
        )

    def _cancel_hook(self, key: HookKey) -> None:
        for effect in [effect for effect in self._delayed if key_of(effect) == key]:
            self._delayed.remove(effect)
            result = without_run(effect.hook, "canceled", "canceled before it started")
            self._hands.report(HookEnded(effect, result))
        self._hands.cancel_hook(key)

    def _deadline(self, workflow: Workflow, stage: Stage, now: datetime) -> float | None:
        deadline_at = hook_deadline_at(workflow, stage, self.settings.agent.reserve, now)
        return None if deadline_at is None else self._machine.monotonic() + (deadline_at - now).total_seconds()

    def _take_result(self, effect: RunHook, result: HookResult) -> None:
        # A hook that was canceled is not wanted any more, whatever the machine does.
        if result.outcome not in ("succeeded", "canceled") and self._machine.is_shutting_down():
            # Services and their hooks are stopped in no order that we know of, some before the agent is told.
            text = "the machine goes down: this hook counts as not run, and runs again at the next start"
            self._log.warning(
                text,
                log_id=LogId.HOOK_CUT_SHORT,
                event_id=effect.workflow_id,
                hook=effect.hook,
                reason=result.detail,
            )
            self._delayed.append(effect)
            return
        signal = self._to_signal(effect, result)
        if not (self._is_stopping and _is_cut_short(signal)):
            self._signals.append(signal)

    def _learn_hook_time(self, effect: RunHook, result: HookResult) -> None:
        hook = self.settings.hooks.get(effect.hook)
        if effect.stage == "prepare" and hook is not None and result.attempts:
            self._hook_times = hook_times.with_run(
                self._hook_times, effect.hook, hook, result.outcome, result.duration_seconds
            )
            self._are_hook_times_saved = False
            self._expect_hooks()

    def _expect_hooks(self) -> None:
        self._hook_seconds = {
            name: hook_times.may_take_seconds(self._hook_times, name, hook)
            for name, hook in self.settings.hooks.items()
        }

    def _save_hook_times(self) -> None:
        if not self._are_hook_times_saved:
            self._store.save_facts({"hook_times": hook_times.encode(self._hook_times)})
            self._are_hook_times_saved = True

    def _to_signal(self, effect: RunHook, result: HookResult) -> HookFinished:
        attempts = f" after {result.attempts} attempts" if result.attempts > 1 else ""
        hook = self.settings.hooks.get(effect.hook)
        return HookFinished(
            workflow_id=effect.workflow_id,
            stage=effect.stage,
            hook=effect.hook,
            run=effect.run,
            outcome=result.outcome,
            is_required=hook is None or hook.required,
            detail=f"{result.detail}{attempts}",
            tail=result.tail,
        )

    def _run_delayed(self, now: datetime) -> None:
        if self._is_stopping:
            return
        delayed, self._delayed = self._delayed, []
        for effect in delayed:
            workflow = self.board.get(effect.workflow_id)  # None if it has turned out to be another VM's
            if workflow is not None and workflow.is_missing:
                self._delayed.append(effect)
            elif workflow is not None:
                self._log.info(
                    "a hook that had to wait starts now",
                    log_id=LogId.HOOK_DELAYED,
                    event_id=effect.workflow_id,
                    hook=effect.hook,
                )
                self._run_hook(workflow, effect, now)

    # --- the service

    def has_service_answered(self) -> bool:
        """Whether it has answered this VM lately, so that Scheduled Events are switched on."""
        boot_id, _, stamp = self._store.load_fact("service_answered").rpartition(" ")
        if not stamp or not host.is_same_boot(boot_id, self.boot_id):
            return False
        age = self._machine.now() - datetime.fromisoformat(stamp)
        return timedelta(0) <= age < _SERVICE_KNOWN

    def _remember_answer(self, at: datetime | None) -> None:
        """Now and then: that is enough to know it after a restart."""
        before = self._answer_remembered_at
        if at is None or (before is not None and abs(at - before) < _REMEMBER_ANSWER):
            return
        self._answer_remembered_at = at
        self._store.save_facts({"service_answered": f"{self.boot_id} {at.isoformat()}"})

    # --- on_clear

    def _greet_first_document(self, now: datetime) -> None:
        """What is done once, when the agent has first decided on what is pending."""
        if self._document_at is None or not (self.names() or not self.board):
            return
        if self._is_state_lost:
            self._store.save_facts({"state_lost": ""})
            self._is_state_lost = False
        if self._on_clear is None and not self.lacks_event():
            # A rule may have something prepared for an event of another VM, too.
            is_clear = is_ready(self.board) and all(w.decision.affects == "others" for w in self.board.values())
            may_run = is_clear and self.is_acting()
            self._on_clear = list(self.settings.on_clear) if may_run else []
            if self._on_clear:
                self.record("on_clear", f"nothing is pending: {', '.join(self._on_clear)}", now)
                self._start_on_clear_hook()

    def _start_on_clear_hook(self) -> None:
        if not self._on_clear or self._is_stopping:
            return
        hook = self._on_clear.pop(0)
        environment = {"SCHEDULED_EVENT_STAGE": "on_clear", "SCHEDULED_EVENT_VM": self.name()}
        self._hands.start_hook(None, hook, self.settings.hooks.get(hook), environment=environment)

    def _end_on_clear_hook(self, result: HookResult) -> None:
        has_succeeded = result.outcome == "succeeded"
        tell = self._log.info if has_succeeded else self._log.warning
        log_id = LogId.HOOK_SUCCEEDED if has_succeeded else LogId.HOOK_FAILED
        tell("on_clear hook ended", log_id=log_id, hook=result.hook, outcome=result.outcome, reason=result.detail)
        self.record("on_clear", f"hook {result.hook}: {result.detail} ({result.outcome})", self._machine.now())
        self._run_delayed(self._machine.now())
        self._start_on_clear_hook()

    # --- operators and identity

    def _take_requests(self, now: datetime) -> None:
        for request in self._store.load_requests(now):
            if request.word == "status":
                self._store.answer_request(request.id, self._describe().decode())
            elif refusal := self._refusal(request, now):
                self._store.answer_request(request.id, f"refused: {refusal}")
            else:
                self._requests.append(request)
                word = OperatorSpoke(workflow_id=request.workflow_id, word=request.word, user=request.user)
                self._signals.append(word)

    def _refusal(self, request: Request, now: datetime) -> str:
        """Why not even an operator can have that; "" if one can."""
        workflow = self.board.get(request.workflow_id)
        if workflow is None:
            return "the event is not pending any more"
        match request.word:
            case "retry" | "resolve":
                return self._refusal_of_retry(workflow, request.word)
            case _ if workflow.is_gone:
                return "the event is over"
            case "held" if workflow.was_started or workflow.event.is_started:
                return "the event has started"
            case "held" if workflow.approval.state == "confirmed":
                return "Azure has taken the approval, and nobody can take that back"
            case "approved" if not self.is_acting():
                return self._why_not_acting()
            case "approved":
                approved = replace(workflow, operator="approved")
                leave = ask_gates(approved, self._context(now, self._document_at))
                return leave.reason if leave.answer == "no" else ""
            case _:
                return ""

    def _refusal_of_retry(self, workflow: Workflow, word: Word) -> str:
        """Why a failed stage cannot be run again, or be taken for put right; "" if it can."""
        recover = workflow.recover
        if word == "resolve":
            if not workflow.is_gone:
                return "the event is not over; resolve is for a recovery that failed"
            return f"its hook {recover.current} runs" if recover.current else ""
        if not self.is_acting():
            return self._why_not_acting()
        if workflow.is_gone:
            return "" if recover.state == "failed" else "its recovery has not failed"
        if workflow.was_started or workflow.event.is_started:
            return "the event has started, and preparing for it is too late"
        if workflow.prepare.state != "failed":
            return "nothing of it has failed"
        return "an operator holds it; release it first" if workflow.operator == "held" else ""

    def _why_not_acting(self) -> str:
        if self.settings.agent.mode == "observe":
            return "the agent only observes (agent.mode, --observe)"
        return "the agent's service is paused; have it continue"

    def _answers(self, progression: Progression) -> dict[int, str]:
        """What is said to whom of those whose words were taken in."""
        workflows = progression.board | {step.workflow.id: step.workflow for step in progression.steps}
        answers = {}
        for request in self._requests:
            workflow = workflows[request.workflow_id]
            if not has_obeyed(workflow, request.word):
                answers[request.id] = (
                    "refused: the event has changed, or another operator has spoken, in this moment"
                )
                continue
            current = next((stage.current for stage in workflow.stages if stage.current), None)
            hook = f", hook {current} {'is let end' if request.word == 'held' else 'runs'}" if current else ""
            is_asked = workflow.approval.state != "none" and not workflow.is_gone
            approval = f", approval {workflow.approval.state}" if is_asked else ""
            reason = f": {workflow.waits_for}" if workflow.waits_for else ""
            if request.word == "held" and workflow.decision.affects == "shared":
                reason += "; the other VMs that it names may approve it all the same"
            phase = workflow.phase.replace("_", " ")
            answers[request.id] = f"{request.word or 'released'}: the event is {phase}{hook}{approval}{reason}"
        return answers

    def _forget_requests(self) -> None:
        """What operators said is read again, unless they have withdrawn it by then: so they were told."""
        self._signals = [signal for signal in self._signals if not isinstance(signal, OperatorSpoke)]
        self._requests = []

    def _learn_identity(self, now: datetime) -> None:
        identity, known = self._new_identity, self.identity
        if identity is None:
            return
        if known.vm_id and identity.vm_id and known.vm_id.casefold() != identity.vm_id.casefold():
            text = (
                f"the state is that of VM {known.vm_id}, and this is {identity.vm_id}: nothing of it is acted on"
            )
            self._store.disown_workflows(now, text)
            self.board, self._document = {}, self._document or self._latest
            self._log.warning(text, log_id=LogId.OTHER_VM)
        learned = Identity(name=identity.name or known.name, vm_id=identity.vm_id or known.vm_id)
        if learned != known or not self._is_identity_sure:
            self._store.save_facts({"vm_name": learned.name, "vm_id": learned.vm_id, "boot_id": self.boot_id})
            self._log.info("this VM is known", log_id=LogId.VM_KNOWN, vm=learned.name, vm_id=learned.vm_id)
            self._reconsider()
        self.identity, self._new_identity, self._is_identity_sure = learned, None, True

    def names(self) -> tuple[str, ...]:
        """What documents may call this VM."""
        vm = self.settings.vm
        return tuple(name for name in (vm.name or self.identity.name, *vm.aliases) if name)

    def name(self) -> str:
        """What hooks are told; "" if nobody knows."""
        return next(iter(self.names()), "")

    # --- telling

    def _tell(self, workflow: Workflow, note: Note, now: datetime) -> None:
        event = workflow.event
        is_bad = note.kind in _LOUD_NOTES or (note.kind == "hook_finished" and note.outcome != "succeeded")
        fields = {
            "event_id": event.id,
            "type": event.type,
            "rule": workflow.decision.rule,
            "phase": workflow.phase,
        }
        if note.hook:
            fields |= {"hook": note.hook, "stage": note.stage}
        level = "warning" if is_bad else "info"
        ended = LogId.HOOK_FAILED if is_bad else LogId.HOOK_SUCCEEDED
        log_id = ended if note.kind == "hook_finished" else LogId[note.kind.upper()]
        if workflow.id not in self._untold or note.kind in _NEVER_LEFT_OUT:
            getattr(self._log, level)(note.kind.replace("_", " "), log_id=log_id, reason=note.text, **fields)
        self._metrics.record_note(workflow, note, now.timestamp())

    def _leave_out(self, workflow_ids: list[str]) -> None:
        """Of very many events at once the log tells of a few; the journal and the metrics have all of them."""
        if len(workflow_ids) > _MAX_TOLD_AT_ONCE:
            self._untold.update(workflow_ids[_TOLD_OF_MANY:])
            text = "very many events at once: the log tells of the first ones, the command history of all"
            self._log.warning(text, log_id=LogId.MANY_EVENTS, events=len(workflow_ids), told=_TOLD_OF_MANY)

    def _tell_pause(self, seconds: float) -> None:
        self._metrics.pause_seconds.observe(seconds)
        self._metrics.last_pause_seconds.set(seconds)
        self._log.warning("this machine stood still", log_id=LogId.MACHINE_PAUSED, seconds=round(seconds, 1))
        self.record("pause", f"stood still for {seconds:.1f}s", self._machine.now())

    def _tell_fault(self, workflow_id: str, fault: Exception) -> None:
        self._metrics.faults.inc()
        self._faults.failed(type(fault).__name__, f"{workflow_id}: {fault!r}", self.turned_at)

    def record(self, kind: str, text: str, now: datetime) -> None:
        """Into the journal if that can be written; the log has it in any case."""
        try:
            self._store.record(kind, text, now)
        except StoreError as error:
            self._metrics.store_errors.labels(error.kind).inc()


def rule_names(settings: Settings) -> list[str]:
    """For the log, which thousands would flood."""
    names = [rule.name for rule in settings.rules[:_MAX_NAMES]]
    more = len(settings.rules) - len(names)
    return [*names, f"and {more} more"] if more else names


def key_of(effect: RunHook | None) -> HookKey | None:
    """What the hook is known by while it runs."""
    return (effect.workflow_id, effect.stage) if effect else None


def _is_cut_short(signal: Signal) -> bool:
    """Whether a hook ended badly, and may have been made to, if the agent or its machine is told to stop as well.

    That is no failure: the hook is left open, and runs again after the restart.
    """
    return isinstance(signal, HookFinished) and signal.outcome != "succeeded"


def without_run(hook: str, outcome: HookOutcome, detail: str) -> HookResult:
    """The result of a hook that was never started."""
    return HookResult(
        hook=hook, outcome=outcome, exit_code=None, attempts=0, duration_seconds=0.0, tail="", detail=detail
    )
