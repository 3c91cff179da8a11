"""The loop and its threads: polls, lets the pure modules decide, commits, then has it done.

Owns every thread, the inbox and the board of workflows; decides nothing about events. The one invariant:
only the engine's thread changes the board, what it decides is on disk before any of it is done, and nothing
that others wait for (a poll, a hook, an approval, a client) can keep it from its next turn.

    engine      takes the inbox, proceeds, commits, performs (the thread that calls ``run``)
    poller      fetches, compares bytes, parses            -> inbox
    identity    asks who this VM is, until it is known     -> inbox
    approvals   one thread for each request to approve     -> inbox
    hooks       one thread for each hook that runs         -> inbox
    web         answers from the published board
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Literal

import msgspec
from msgspec.structs import replace

from agent import __version__, host
from agent.config import ImdsSettings, Settings
from agent.events import Document, DocumentError, compare, parse_document, to_azure_json
from agent.hooks import HookResult, HookRun, end_leftovers, hook_environment
from agent.imds import Identity, ImdsClient, ImdsError, backoff_seconds, resolve_endpoint
from agent.log import FailureLog, Logger, get_logger
from agent.metrics import Metrics
from agent.policy import Hook
from agent.store import Request, Store, StoreError
from agent.web import Page, WebServer
from agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    Board,
    CancelHook,
    Context,
    HookFinished,
    HookOutcome,
    MoveDeadline,
    Note,
    OperatorSpoke,
    Reconsider,
    RunHook,
    Signal,
    Stage,
    Step,
    Workflow,
    ask_gates,
    hook_deadline_at,
    is_ready,
    known_events,
    next_wake_at,
    proceed,
)

# The engine's own pace: how soon an operator's word is taken up, and how often /healthz hears of it.
_TICK_SECONDS = 1.0
# The same while nothing is pending, and so nobody has anything to say.
_IDLE_TICK_SECONDS = 5.0
# A loop that has not turned for this long hangs; a slow disk alone is given two seconds by the store.
_STALL_SECONDS = 15.0
# A tick later than asked for by more than this is a pause of the machine, not the scheduler's noise.
_PAUSE_SECONDS = 1.0
# On stop, running hooks may end by themselves first; of the time that is left, this is for them after they were
# told to, and as much for the state file and the log.
_STOP_GRACE_SECONDS = 1.5
_MAX_IDENTITY_RETRY_SECONDS = 10.0
# The first poll waits this long for the first answer to who this VM is, and no longer.
_IDENTITY_PATIENCE_SECONDS = 2.0
# The service manager hears that the agent is ready when the first poll has been tried, or takes longer than this.
_READY_PATIENCE_SECONDS = 2.0
_START_TICK_SECONDS = 0.1
# What a poll may take beside its time limit: resolving a name that the policy gives, on a bad day.
_RESOLVE_SECONDS = 30.0
_COMMIT_RETRY_SECONDS = 1.0
DEFAULT_STOP_TIMEOUT = 5.0
_KEEP_JOURNAL = timedelta(days=90)
_PRUNE_SECONDS = 86400.0
_LOUD_NOTES = ("held", "blocked", "approval_failed")


@dataclass(frozen=True)
class _Paused:
    """The machine stood still."""

    seconds: float


@dataclass(frozen=True)
class _HookEnded:
    """A hook has ended: of a workflow, or (``effect`` is None) of on_clear."""

    effect: RunHook | None
    result: HookResult


@dataclass(frozen=True)
class _Command:
    """Somebody wants the daemon to stop or to read its policy again."""

    word: Literal["stop", "reload", "pause", "resume"]


_Item = Document | Identity | ApprovalAnswered | _HookEnded | _Paused | _Command
_Put = Callable[[_Item], None]


class Daemon:
    """The agent as a process. ``stop`` and ``reload`` may be called from any thread and from signal handlers."""

    def __init__(
        self,
        settings: Settings,
        load_settings: Callable[[], Settings],
        store: Store,
        *,
        stop_timeout: float = DEFAULT_STOP_TIMEOUT,
        service: host.ServiceManager | None = None,
    ) -> None:
        """``stop_timeout``: seconds from ``stop`` to the return of ``run``; hooks that run have most of them.

        ``service``: who is told how the agent is; by default whoever started this process.
        """
        self._settings = settings
        self._stop_timeout = stop_timeout
        self._load_settings = load_settings
        self._store = store
        self._log = get_logger()
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._board: Board = {}  # replaced whole after each commit, never changed: others may read it at any time
        self._metrics = Metrics(self._load_pending)
        self._crash: BaseException | None = None
        self._boot_id = host.boot_id()
        self._new_identity: Identity | None = None
        self._identity = Identity(name=store.load_fact("vm_name"), vm_id=store.load_fact("vm_id"))
        # A disk may have been copied to another VM, which is always another boot.
        self._is_identity_sure = host.is_same_boot(store.load_fact("boot_id"), self._boot_id)
        self._is_state_lost = bool(store.load_fact("state_lost"))
        endpoint = _Endpoint(lambda: self._settings.imds)
        self._poller = _Poller(endpoint, self._inbox.put, self._metrics)
        self._identifier = _Identifier(endpoint, self._inbox.put, self._poller.stop_requested)
        self._approver = _Approver(endpoint, self._inbox.put)
        self._instance = str(store.path.resolve())
        self._hooks = _HookThreads(self._inbox.put, self._instance)
        # What the next turn has to take in: a document, and signals, that no commit has held yet.
        self._document: Document | None = None
        self._signals: list[Signal] = []
        self._requests: list[Request] = []
        self._document_at: datetime | None = None
        # Hooks of on_clear that are still to run; None until it is known whether anything is pending.
        self._on_clear: list[str] | None = None
        # Hooks of events that wait for the end of an on_clear hook: what that does, they may undo. And those that
        # failed while the machine went down, if it stays up after all.
        self._delayed: list[RunHook] = []
        self._latest: Document | None = None
        self._turned_at = time.monotonic()
        self._started_at = self._turned_at
        self._store_failures = FailureLog("writing the state file")
        self._store_failure = ""
        self._fault_logs: dict[str, FailureLog] = {}
        self._service = service or host.ServiceManager()
        self._is_paused = False
        self._told_status: str | None = None  # None until it has been told that the agent is ready
        self._refusal_of_policy = ""
        self.web: WebServer | None = None
        """The web server while ``run`` runs; None if the policy has it off."""

    def _load_pending(self) -> Iterable[Workflow]:
        return self._board.values()

    def stop(self) -> None:
        """Have ``run`` return within the stop time-out; at once, or nearly, if it is called again."""
        self._inbox.put(_Command("stop"))

    def reload(self) -> None:
        """Read the policy file again; a bad one is refused, and the old one stays in force."""
        self._inbox.put(_Command("reload"))

    def pause(self) -> None:
        """Go on watching, but begin nothing and approve nothing until ``resume``; a hook that runs is let end."""
        self._inbox.put(_Command("pause"))

    def resume(self) -> None:
        """Act again."""
        self._inbox.put(_Command("resume"))

    def run(self) -> None:
        """Work until ``stop`` is called. Blocks. Raises what ended a thread that must not end."""
        self._start()
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - raised when all has been put in order
            self._crash = error
        self._shut_down()
        if self._crash is not None:
            raise self._crash

    # --- start and stop

    def _start(self) -> None:
        settings, now = self._settings, datetime.now(UTC)
        workflows = self._store.load_workflows()
        # A boot id that is a rounded time may come out a little different within one boot.
        self._boot_id = next(
            (w.boot_id for w in workflows if host.is_same_boot(w.boot_id, self._boot_id)), self._boot_id
        )
        self._board = {workflow.id: workflow for workflow in workflows}
        if settings.agent.listen != "off":
            self.web = WebServer(settings.agent.listen, self._pages())
        self._log.info(
            "agent started",
            version=__version__,
            mode=settings.agent.mode,
            rules=[rule.name for rule in settings.rules],
            endpoint=settings.imds.endpoint,
            vm=self._identity.name or "not known yet",
            pending=len(workflows),
            listen=self.web.address if self.web else "off",
        )
        if self._store.set_aside is not None:
            self._log.error(
                "the state file was damaged and has been set aside; what was done before is not known, so "
                "no event that is pending now will be approved unless an operator does",
                set_aside=str(self._store.set_aside),
            )
            self._store.record("state_lost", f"the damaged state file is now {self._store.set_aside}", now)
        self._store.record("agent_started", f"version {__version__}, mode {settings.agent.mode}", now)
        self._count_settings()
        ended = end_leftovers(self._instance)
        if ended:
            self._log.warning("ended what hooks of an agent that was killed had left running", processes=ended)
        if workflows:
            self._signals.append(AgentRestarted())
        self._pruned = time.monotonic() - _PRUNE_SECONDS
        self._start_thread("identity", self._identifier.run)
        self._start_thread("poller", self._poll)

    def _poll(self) -> None:
        # Whose the state on disk is, and what Resources call this VM, is best known before the first document.
        self._identifier.has_tried.wait(_IDENTITY_PATIENCE_SECONDS)
        self._poller.run()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - dying unseen, it would leave a daemon that only looks alive
                get_logger().exception(f"the {name} thread has ended by a bug; the agent stops")
                self._crash = error
                self.stop()

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _shut_down(self) -> None:
        """Stop in time: running hooks may end by themselves first, then are made to."""
        self._poller.stop()
        # What has a bug is best started anew, and soon.
        stop_timeout = self._stop_timeout if self._crash is None else min(self._stop_timeout, DEFAULT_STOP_TIMEOUT)
        names = self._hooks.names()
        waits_for = f", once these hooks have ended: {', '.join(names)}" if names else ""
        self._service.tell("stopping", f"Stopping{waits_for}")
        if waits_for:
            self._log.info(f"stopping{waits_for}", patience_seconds=stop_timeout)
        ended = self._collect_hooks(time.monotonic() + stop_timeout - 2 * _STOP_GRACE_SECONDS)
        self._hooks.cancel_all(_STOP_GRACE_SECONDS)
        self._collect_hooks(time.monotonic() + _STOP_GRACE_SECONDS + 0.5)
        try:
            signals = [*self._signals, *(_to_signal(item.effect, item.result) for item in ended if item.effect)]
            signals = [signal for signal in signals if not _is_cut_short(signal)]
            # Without a document nothing moves: results are kept; what follows from them is left to the next start.
            progression = proceed(self._board, signals, self._context(datetime.now(UTC), document_at=None))
            self._store.commit(progression.steps, datetime.now(UTC))
            self._store.record("agent_stopped", f"pending: {len(progression.board)}", datetime.now(UTC))
        except StoreError as error:
            self._log.error("could not write the state file while stopping", reason=str(error))
        if self.web is not None:
            self.web.close()
        self._log.info("agent stopped")

    def _collect_hooks(self, deadline: float) -> list[_HookEnded]:
        """Results of hooks that end until the deadline, or until somebody is tired of waiting."""
        ended: list[_HookEnded] = []
        while self._hooks.are_running() and time.monotonic() < deadline:
            try:
                item = self._inbox.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                break
            if item == _Command("stop"):
                break
            if isinstance(item, _HookEnded):
                self._hooks.forget(item.effect)
                ended.append(item)
        return ended

    # --- a turn of the engine

    def _turn(self) -> bool:
        """Take what has come, decide, commit, perform. False when it is time to stop."""
        document_at = self._poller.succeeded_at  # before the inbox is emptied: nothing later is in it
        timeout = self._seconds_to_next_turn()
        may_go_on = True
        for item in self._take_items(timeout):
            may_go_on = self._take(item) and may_go_on
        self._turned_at = time.monotonic()
        self._hooks.reap()
        now = datetime.now(UTC)
        if not may_go_on:
            return False
        try:
            self._learn_identity(now)
            self._take_requests(now)
            if (self._document or self._latest) and (self._is_identity_sure or self._settings.vm.name):
                self._document_at = document_at or now
            if self._delayed and not self._hooks.is_running(None) and host.is_shutting_down() is False:
                self._log.info("the machine stays up after all: the hooks that counted as not run start again")
                self._run_delayed(now)
            self._decide_and_do(now)
            self._greet_first_document(now)
            self._prune(now)
            self._store_failures.succeeded(self._turned_at)
            self._store_failure = ""
        except StoreError as error:
            self._store_failure = str(error)
            # Nothing was done. What was taken in waits, and is decided on again.
            self._metrics.store_errors.labels(error.kind).inc()
            self._store_failures.failed(error.kind, str(error), self._turned_at)
            time.sleep(_COMMIT_RETRY_SECONDS)
        self._tell_service()
        return True

    def _seconds_to_next_turn(self) -> float:
        if self._told_status is None:
            return _START_TICK_SECONDS
        if not self._board:
            return _IDLE_TICK_SECONDS
        now = datetime.now(UTC)
        wake_at = next_wake_at(self._board, self._context(now, self._document_at))
        return min(_TICK_SECONDS, (wake_at - now).total_seconds()) if wake_at else _TICK_SECONDS

    def _take_items(self, timeout: float) -> list[_Item]:
        items: list[_Item] = []
        try:
            items.append(self._inbox.get(timeout=max(0.0, timeout)))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items

    def _take(self, item: _Item) -> bool:
        match item:
            case Document():
                self._document = item
            case Identity():
                self._new_identity = item
            case ApprovalAnswered():
                if item.error_kind:
                    self._metrics.approvals.labels(item.error_kind).inc()
                self._signals.append(item)
            case _HookEnded(effect=effect, result=result):
                self._hooks.forget(effect)
                stage = effect.stage if effect else "on_clear"
                seconds = self._metrics.hook_seconds.labels(result.hook, stage, result.outcome)
                seconds.observe(result.duration_seconds)
                if effect is None:
                    self._end_on_clear_hook(result)
                else:
                    self._take_result(effect, result)
            case _Paused(seconds=seconds):
                self._tell_pause(seconds)
            case _Command(word="reload"):
                self._reload()
            case _Command(word="pause" | "resume" as word):
                self._set_paused(is_paused=word == "pause")
            case _Command(word="stop"):
                return False
        return True

    def _take_result(self, effect: RunHook, result: HookResult) -> None:
        # A hook that was canceled is not wanted any more, whatever the machine does.
        if result.outcome not in ("succeeded", "canceled") and host.is_shutting_down():
            # Services and their hooks are stopped in no order that we know of, some before the agent is told.
            text = "the machine goes down: this hook counts as not run, and runs again at the next start"
            self._log.warning(text, event_id=effect.workflow_id, hook=effect.hook, reason=result.detail)
            self._delayed.append(effect)
            return
        self._signals.append(_to_signal(effect, result))

    def _run_delayed(self, now: datetime) -> None:
        delayed, self._delayed = self._delayed, []
        for effect in delayed:
            if effect.workflow_id in self._board:  # or it has turned out to be another VM's
                self._run_hook(self._board[effect.workflow_id], effect, now)

    def _context(self, now: datetime, document_at: datetime | None) -> Context:
        settings = self._settings
        return Context(
            now=now,
            names=self._names(),
            rules=settings.rules,
            windows=settings.maintenance_windows,
            hooks=settings.hooks,
            boot_id=self._boot_id,
            is_acting=self._is_acting(),
            document_at=document_at,
            is_state_lost=self._is_state_lost,
        )

    def _is_acting(self) -> bool:
        return self._settings.agent.mode == "act" and not self._is_paused

    def _set_paused(self, *, is_paused: bool) -> None:
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        text = "paused: it watches, and does nothing" if is_paused else "acts again"
        self._log.warning(text)
        self._record("paused" if is_paused else "resumed", text, datetime.now(UTC))
        self._metrics.is_acting.set(self._is_acting())
        self._signals.append(Reconsider())

    def _names(self) -> tuple[str, ...]:
        vm = self._settings.vm
        return tuple(name for name in (vm.name or self._identity.name, *vm.aliases) if name)

    def _name(self) -> str:
        """What hooks are told; "" if nobody knows."""
        return next(iter(self._names()), "")

    def _decide_and_do(self, now: datetime) -> None:
        if not self._board and not self._signals and self._document is None:
            return
        seen = compare(known_events(self._board), self._document) if self._document is not None else []
        progression = proceed(self._board, [*self._signals, *seen], self._context(now, self._document_at))
        self._store.commit(progression.steps, now)
        if self._document is not None:
            self._latest = self._document
        # What a bug kept from being taken in is compared again, at each turn, until it is.
        self._document = self._latest if progression.faults else None
        self._board, self._signals = progression.board, []
        for step in progression.steps:
            for note in step.notes:
                self._tell(step.workflow, note, now)
        for workflow_id, fault in progression.faults:
            self._tell_fault(workflow_id, fault)
        self._perform(progression.steps, now)
        self._answer_requests({step.workflow.id: step.workflow for step in progression.steps})

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
                        self._hooks.set_deadline((workflow_id, "prepare"), deadline)
                    case Approve(is_alone=True):
                        self._approver.start([effect], self._incarnation())
                    case Approve():
                        together.append(effect)
        if together:
            self._approver.start(together, self._incarnation())

    def _incarnation(self) -> str:
        return self._latest.incarnation if self._latest else ""

    def _run_hook(self, workflow: Workflow, effect: RunHook, now: datetime) -> None:
        if self._hooks.is_running(None):
            self._on_clear = []
            self._hooks.cancel(None)
            self._delayed.append(effect)
            return
        event = workflow.event
        seconds_left = (event.not_before - now).total_seconds() if event.not_before else None
        environment = hook_environment(
            event,
            stage=effect.stage,
            rule=workflow.decision.rule,
            vm=self._name(),
            outcome=workflow.outcome,
            seconds_left=seconds_left,
        )
        self._hooks.start(
            effect,
            effect.hook,
            self._settings.hooks.get(effect.hook),
            environment=environment,
            stdin=to_azure_json(event),
            deadline=self._deadline(workflow, effect.stage, now),
            event_id=event.id,
        )

    def _cancel_hook(self, key: "_HookKey") -> None:
        for effect in [effect for effect in self._delayed if _key_of(effect) == key]:
            self._delayed.remove(effect)
            result = _without_run(effect.hook, "canceled", "canceled before it started")
            self._inbox.put(_HookEnded(effect, result))
        self._hooks.cancel(key)

    def _deadline(self, workflow: Workflow, stage: Stage, now: datetime) -> float | None:
        deadline_at = hook_deadline_at(workflow, stage, self._settings.agent.reserve, now)
        return None if deadline_at is None else time.monotonic() + (deadline_at - now).total_seconds()

    def _greet_first_document(self, now: datetime) -> None:
        """What is done once, when the agent has first decided on what is pending."""
        if self._document_at is None or not (self._names() or not self._board):
            return
        if self._is_state_lost:
            self._store.save_facts({"state_lost": ""})
            self._is_state_lost = False
        if self._on_clear is None:
            is_clear = all(workflow.decision.affects == "others" for workflow in self._board.values())
            may_run = is_clear and self._is_acting()
            self._on_clear = list(self._settings.on_clear) if may_run else []
            if self._on_clear:
                self._record("on_clear", f"nothing is pending: {', '.join(self._on_clear)}", now)
                self._start_on_clear_hook()

    def _start_on_clear_hook(self) -> None:
        if not self._on_clear:
            return
        hook = self._on_clear.pop(0)
        environment = {"SCHEDULED_EVENT_STAGE": "on_clear", "SCHEDULED_EVENT_VM": self._name()}
        self._hooks.start(None, hook, self._settings.hooks.get(hook), environment=environment)

    def _end_on_clear_hook(self, result: HookResult) -> None:
        tell = self._log.info if result.outcome == "succeeded" else self._log.warning
        tell("on_clear hook ended", hook=result.hook, outcome=result.outcome, reason=result.detail)
        self._record("on_clear", f"hook {result.hook}: {result.detail} ({result.outcome})", datetime.now(UTC))
        self._run_delayed(datetime.now(UTC))
        self._start_on_clear_hook()

    def _prune(self, now: datetime) -> None:
        if self._turned_at - self._pruned >= _PRUNE_SECONDS:
            self._pruned = self._turned_at
            self._store.prune(now - _KEEP_JOURNAL)

    # --- the service manager

    def _tell_service(self) -> None:
        status = self._describe()
        if self._told_status is None:
            if not (self._poller.has_tried or self._turned_at - self._started_at > _READY_PATIENCE_SECONDS):
                return
            self._service.tell("ready", status)
        elif status != self._told_status:
            self._service.tell_status(status)
        self._told_status = status
        # This turn has come to its end, so engine and store do; a poller that hangs is cured by a restart as well.
        if not self._poller.hangs_for():
            self._service.keep_alive()

    def _describe(self) -> str:
        """What the agent is at, in one line, which only changes when that does."""
        parts = []
        if self._settings.agent.mode == "observe":
            parts.append("only observes")
        if self._is_paused:
            parts.append("is paused: watches, and does nothing")
        if self._store_failure:
            parts.append(f"cannot write the state file ({self._store_failure})")
        if self._poller.failure:
            parts.append(f"polling fails ({self._poller.failure})")
        if self._refusal_of_policy:
            parts.append("the policy file was refused, the one from before is in force")
        parts += [_describe_workflow(workflow) for workflow in self._board.values()] or ["nothing is pending"]
        return "; ".join(parts)

    # --- operators, identity, policy

    def _take_requests(self, now: datetime) -> None:
        for request in self._store.load_requests(now):
            if request.workflow_id not in self._board:
                self._store.answer_request(request.id, "refused: the event is not pending any more")
            elif request.word == "approved" and self._settings.agent.mode == "observe":
                self._store.answer_request(request.id, "refused: the agent only observes (agent.mode, --observe)")
            elif request.word == "approved" and self._is_paused:
                self._store.answer_request(request.id, "refused: the agent's service is paused; have it continue")
            elif request.word == "approved" and (refusal := self._refusal(self._board[request.workflow_id], now)):
                self._store.answer_request(request.id, f"refused: {refusal}")
            else:
                self._requests.append(request)
                word = OperatorSpoke(workflow_id=request.workflow_id, word=request.word, user=request.user)
                self._signals.append(word)

    def _refusal(self, workflow: Workflow, now: datetime) -> str:
        """Why not even an operator can have the event approved; "" if one can."""
        approved = replace(workflow, operator="approved")
        leave = ask_gates(approved, self._context(now, self._document_at))
        return leave.reason if leave.answer == "no" else ""

    def _answer_requests(self, changed: dict[str, Workflow]) -> None:
        requests, self._requests = self._requests, []
        for request in requests:
            workflow = changed.get(request.workflow_id) or self._board.get(request.workflow_id)
            if workflow is None:
                continue
            approval = f", approval {workflow.approval.state}" if workflow.approval.state != "none" else ""
            waits_for = f", for {workflow.waits_for}" if workflow.waits_for else ""
            answer = f"{request.word or 'released'}: the event is {workflow.phase}{approval}{waits_for}"
            self._store.answer_request(request.id, answer)

    def _learn_identity(self, now: datetime) -> None:
        identity, known = self._new_identity, self._identity
        if identity is None:
            return
        if known.vm_id and identity.vm_id and known.vm_id.casefold() != identity.vm_id.casefold():
            text = (
                f"the state is that of VM {known.vm_id}, and this is {identity.vm_id}: nothing of it is acted on"
            )
            self._store.disown_workflows(now, text)
            self._board, self._document = {}, self._document or self._latest
            self._log.warning(text)
        learned = Identity(name=identity.name or known.name, vm_id=identity.vm_id or known.vm_id)
        if learned != known or not self._is_identity_sure:
            self._store.save_facts({"vm_name": learned.name, "vm_id": learned.vm_id, "boot_id": self._boot_id})
            self._log.info("this VM is known", vm=learned.name, vm_id=learned.vm_id)
            self._signals.append(Reconsider())
        self._identity, self._new_identity, self._is_identity_sure = learned, None, True

    def _reload(self) -> None:
        self._service.tell("reloading", "reads the policy file again")
        self._read_policy()
        self._service.tell("ready", self._describe())
        self._told_status = self._describe()

    def _read_policy(self) -> None:
        now = datetime.now(UTC)
        try:
            settings = self._load_settings()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the old policy is still good
            self._metrics.reload_ok.set(0)
            self._log.error("the policy file is refused; the old policy stays in force", reason=str(error))
            self._record("reload_refused", str(error), now)
            self._refusal_of_policy = str(error)
            return
        self._refusal_of_policy = ""
        old = self._settings
        self._settings = replace(settings, hooks={**self._hooks_still_needed(settings), **settings.hooks})
        for name in ("listen", "state_dir"):
            if getattr(old.agent, name) != getattr(settings.agent, name):
                self._log.warning(f"agent.{name} takes effect at the next start of the agent")
        self._log.info("the policy file was read again", rules=[rule.name for rule in settings.rules])
        self._record("reloaded", f"rules: {', '.join(rule.name for rule in settings.rules)}", now)
        self._count_settings()
        self._signals.append(Reconsider())

    def _hooks_still_needed(self, settings: Settings) -> dict[str, Hook]:
        """Hooks that the new policy lacks and that what has begun under the old one is to be undone with."""
        names = {name for workflow in self._board.values() for name in workflow.decision.recover}
        hooks = {
            name: self._settings.hooks[name]
            for name in names & self._settings.hooks.keys() - settings.hooks.keys()
        }
        if hooks:
            self._log.warning("hooks that pending events still need are kept until the next start", hooks=[*hooks])
        return hooks

    def _count_settings(self) -> None:
        self._metrics.is_acting.set(self._is_acting())
        self._metrics.reload_ok.set(1)
        self._metrics.reloaded_at.set_to_current_time()

    # --- telling

    def _tell(self, workflow: Workflow, note: Note, now: datetime) -> None:
        event = workflow.event
        is_bad = note.kind in _LOUD_NOTES or (note.kind == "closed" and bool(workflow.recover.failure))
        is_bad = is_bad or (note.kind == "hook_finished" and note.outcome != "succeeded")
        fields = {
            "event_id": event.id,
            "type": event.type,
            "rule": workflow.decision.rule,
            "phase": workflow.phase,
        }
        if note.hook:
            fields |= {"hook": note.hook, "stage": note.stage}
        level = "warning" if is_bad else "info"
        getattr(self._log, level)(note.kind.replace("_", " "), reason=note.text, **fields)
        self._metrics.record_note(workflow, note, now.timestamp())

    def _tell_pause(self, seconds: float) -> None:
        self._metrics.pause_seconds.observe(seconds)
        self._metrics.last_pause_seconds.set(seconds)
        self._log.warning("this machine stood still", seconds=round(seconds, 1))
        self._record("pause", f"stood still for {seconds:.1f}s", datetime.now(UTC))

    def _tell_fault(self, workflow_id: str, fault: Exception) -> None:
        self._metrics.faults.inc()
        log = self._fault_logs.setdefault(workflow_id, FailureLog(f"handling event {workflow_id}"))
        log.failed(type(fault).__name__, repr(fault), self._turned_at)

    def _record(self, kind: str, text: str, now: datetime) -> None:
        """Into the journal if that can be written; the log has it in any case."""
        try:
            self._store.record(kind, text, now)
        except StoreError as error:
            self._metrics.store_errors.labels(error.kind).inc()

    # --- pages

    def _pages(self) -> dict[str, Callable[[], Page]]:
        return {
            "/healthz": self._health_page,
            "/readyz": self._ready_page,
            "/metrics": self._metrics_page,
            "/status": self._status_page,
        }

    def _health_problems(self) -> list[str]:
        now = time.monotonic()
        problems = []
        if now - self._turned_at > _STALL_SECONDS:
            problems.append(f"the engine has not turned for {now - self._turned_at:.0f}s")
        if self._store_failure:
            problems.append(f"nothing can be done until the state file can be written: {self._store_failure}")
        if hangs_for := self._poller.hangs_for():
            problems.append(f"a poll should have ended {hangs_for:.0f}s ago")
        since_poll = now - (self._poller.succeeded or self._started_at)
        if since_poll > self._settings.agent.healthy_within:
            problems.append(f"no poll has succeeded for {since_poll:.0f}s: {self._poller.failure or 'it hangs'}")
        return problems

    def _health_page(self) -> Page:
        problems = self._health_problems()
        if problems:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, ("\n".join(problems) + "\n").encode())
        return Page(HTTPStatus.OK, b"ok\n")

    def _ready_page(self) -> Page:
        busy = [workflow for workflow in self._board.values() if workflow.is_prepared_for]
        if not busy:
            return Page(HTTPStatus.OK, b"ready\n")
        lines = [f"not ready: {w.event.type} {w.event.id} is {w.phase}\n" for w in busy]
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, "".join(lines).encode())

    def _metrics_page(self) -> Page:
        self._metrics.is_ready.set(is_ready(self._board))
        if self._poller.succeeded_at is not None:
            self._metrics.last_poll_at.set(self._poller.succeeded_at.timestamp())
        return Page(HTTPStatus.OK, self._metrics.expose(), "text/plain; version=0.0.4; charset=utf-8")

    def _status_page(self) -> Page:
        status = {
            "version": __version__,
            "vm": {"names": self._names(), "vm_id": self._identity.vm_id},
            "mode": self._settings.agent.mode,
            "ready": is_ready(self._board),
            "health": self._health_problems() or "ok",
            "rules": [rule.name for rule in self._settings.rules],
            "last_poll_at": self._poller.succeeded_at,
            "poll_failure": self._poller.failure,
            "incarnation": self._incarnation(),
            "pending": list(self._board.values()),
        }
        return Page(HTTPStatus.OK, msgspec.json.format(msgspec.json.encode(status)) + b"\n", "application/json")


class _Endpoint:
    """Where the service is, the same for all who talk to it. For any thread."""

    def __init__(self, load_settings: Callable[[], ImdsSettings]) -> None:
        self._load_settings = load_settings
        self._imds = load_settings()
        self._url = resolve_endpoint(self._imds.endpoint)

    def look_again(self, *, has_failed: bool) -> bool:
        """Follow the policy, and after a failure the lease that names the endpoint; True if there is news."""
        imds = self._load_settings()
        is_stale = imds != self._imds or (has_failed and imds.endpoint == "auto")
        url = resolve_endpoint(imds.endpoint) if is_stale else self._url
        has_changed = (imds, url) != (self._imds, self._url)
        self._imds, self._url = imds, url
        return has_changed

    @property
    def poll_interval(self) -> float:
        """Seconds."""
        return self._imds.poll_interval

    def connect(self) -> ImdsClient:
        """A client of one's own."""
        return ImdsClient(
            self._url,
            api_version=self._imds.api_version,
            request_timeout=self._imds.request_timeout,
            first_request_timeout=self._imds.first_request_timeout,
        )


class _Poller:
    """Fetches the document at the policy's pace. Never waits for anything but the service."""

    def __init__(self, endpoint: _Endpoint, put: _Put, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._put = put
        self._metrics = metrics
        self._good_polls = metrics.polls.labels("ok")  # looked up once: this is done every second, for ever
        self._failures = 0
        self._failure_log = FailureLog("polling the metadata service")
        self.stop_requested = threading.Event()
        self.succeeded: float | None = None
        """When a poll last succeeded, monotonic."""
        self.succeeded_at: datetime | None = None
        self.failure = ""
        """Why the last poll failed; "" if it did not."""
        self.has_tried = False
        """Whether the first poll has ended, in whatever way."""
        self._expected_back: float | None = None

    def hangs_for(self) -> float:
        """For how many seconds the loop is overdue; 0 if it is not."""
        if self._expected_back is None or self.stop_requested.is_set():
            return 0.0
        return max(0.0, time.monotonic() - self._expected_back)

    def stop(self) -> None:
        self.stop_requested.set()

    def run(self) -> None:
        client = self._endpoint.connect()
        body = b""
        while not self.stop_requested.is_set():
            if self._endpoint.look_again(has_failed=bool(self.failure)):
                client.close()
                client, body = self._endpoint.connect(), b""
            began = time.monotonic()
            self._expected_back = began + _RESOLVE_SECONDS + client.fetch_timeout
            delay = self._endpoint.poll_interval
            try:
                new_body = client.fetch()
                if new_body != body:
                    self._put(parse_document(new_body))
                    self._metrics.documents.inc()
                    body = new_body
                self._succeed(began)
            except (ImdsError, DocumentError) as error:
                delay = max(delay, self._fail(error))
            self.has_tried = True
            due = max(time.monotonic(), began + delay)  # missed ticks are dropped, not made up for
            self._expected_back = due + _RESOLVE_SECONDS
            self.stop_requested.wait(due - time.monotonic())
            late = time.monotonic() - due
            if late > _PAUSE_SECONDS:
                self._put(_Paused(late))
        client.close()

    def _succeed(self, began: float) -> None:
        now = time.monotonic()
        self._good_polls.inc()
        self._metrics.poll_seconds.observe(now - began)
        self._failure_log.succeeded(now)
        self._failures, self.failure = 0, ""
        self.succeeded, self.succeeded_at = now, datetime.now(UTC)

    def _fail(self, error: ImdsError | DocumentError) -> float:
        """Count and tell; returns how long to wait."""
        self._failures += 1
        self.failure = str(error)
        self._metrics.polls.labels(error.kind).inc()
        self._failure_log.failed(error.kind, str(error), time.monotonic())
        return backoff_seconds(error.kind if isinstance(error, ImdsError) else "malformed", self._failures)


class _Identifier:
    """Asks the service who this VM is, until it says so; without a name no event can be told to be ours."""

    def __init__(self, endpoint: _Endpoint, put: _Put, stop_requested: threading.Event) -> None:
        self._endpoint = endpoint
        self._put = put
        self._stop_requested = stop_requested
        self.has_tried = threading.Event()

    def run(self) -> None:
        failure_log = FailureLog("asking for this VM's name")
        delay = 1.0
        while True:
            client = self._endpoint.connect()
            try:
                identity = client.fetch_identity()
                self._put(identity)
                if identity.name:
                    failure_log.succeeded(time.monotonic())
                    return
                failure_log.failed("no_name", "the service does not tell it; set vm.name", time.monotonic())
            except ImdsError as error:
                failure_log.failed(error.kind, str(error), time.monotonic())
            finally:
                client.close()
                self.has_tried.set()
            if self._stop_requested.wait(delay):
                return
            delay = min(2 * delay, _MAX_IDENTITY_RETRY_SECONDS)


class _Approver:
    """Posts approvals, each request in a thread of its own: one without an answer must not hold up another."""

    def __init__(self, endpoint: _Endpoint, put: _Put) -> None:
        self._endpoint = endpoint
        self._put = put

    def start(self, approvals: list[Approve], incarnation: str) -> None:
        """Send all of them in one request; each is answered through the inbox."""

        def work() -> None:
            client = self._endpoint.connect()
            try:
                client.approve([approve.event_id for approve in approvals], incarnation)
                self._answer(approvals, "", "")
            except ImdsError as error:
                self._answer(approvals, error.kind, str(error))
            except BaseException as error:  # noqa: BLE001 - or the workflows would wait for an answer for ever
                get_logger().exception("a bug in the agent")
                self._answer(approvals, "bug", repr(error))
            finally:
                client.close()

        try:
            threading.Thread(target=work, name="approval", daemon=True).start()
        except RuntimeError as error:  # no memory for a thread
            self._answer(approvals, "no_thread", str(error))

    def _answer(self, approvals: list[Approve], kind: str, detail: str) -> None:
        for approve in approvals:
            self._put(ApprovalAnswered(workflow_id=approve.workflow_id, error_kind=kind, detail=detail))


_HookKey = tuple[str, str]
"""Workflow and stage: what a workflow runs one hook of at a time."""


class _HookThreads:
    """The hooks that run now, each in a thread of its own. For the engine's thread."""

    def __init__(self, put: _Put, instance: str) -> None:
        self._put = put
        self._instance = instance
        self._runs: dict[_HookKey | None, HookRun] = {}
        self._have_run = False

    def start(
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
        """Run a hook, for ``effect`` or (None) for on_clear; its end comes through the inbox. Never raises."""
        if hook is None:
            result = _without_run(name, "not_started", "there is no such hook in the policy any more")
            self._put(_HookEnded(effect, result))
            return
        log = get_logger().bind(hook=name, stage=environment["SCHEDULED_EVENT_STAGE"], event_id=event_id)
        run = HookRun(
            name,
            hook,
            environment=environment,
            stdin=stdin,
            deadline=deadline,
            on_line=partial(_log_output, log),
            instance=self._instance,
        )

        def work() -> None:
            try:
                result = run.run()
            except BaseException as error:  # or the workflow would wait for its hook for ever
                log.exception("a bug in the agent")
                result = _without_run(name, "not_started", f"a bug in the agent: {error!r}")
            self._put(_HookEnded(effect, result))

        self._runs[_key_of(effect)], self._have_run = run, True
        try:
            threading.Thread(target=work, name=f"hook-{name}", daemon=True).start()
        except RuntimeError as error:  # no memory for a thread
            self._put(_HookEnded(effect, _without_run(name, "not_started", str(error))))

    def cancel(self, key: _HookKey | None) -> None:
        """Have the hook in flight ended, if there is one; its result says canceled."""
        if key in self._runs:
            self._runs[key].cancel()

    def set_deadline(self, key: _HookKey, deadline: float | None) -> None:
        """NotBefore has moved."""
        if key in self._runs:
            self._runs[key].set_deadline(deadline)

    def forget(self, effect: RunHook | None) -> None:
        """The end of this hook has been taken from the inbox."""
        self._runs.pop(_key_of(effect), None)

    def is_running(self, key: _HookKey | None) -> bool:
        return key in self._runs

    def reap(self) -> None:
        """Release what hooks left behind and what has ended since: a process that dies may leave others to us."""
        if self._have_run:
            host.reap_orphans()

    def are_running(self) -> bool:
        return bool(self._runs)

    def names(self) -> list[str]:
        """Of the hooks that run."""
        return [run.name for run in self._runs.values()]

    def cancel_all(self, grace_seconds: float) -> None:
        """End everything within the grace."""
        for run in self._runs.values():
            run.cancel()
            run.set_deadline(time.monotonic() + grace_seconds)


def _key_of(effect: RunHook | None) -> _HookKey | None:
    return (effect.workflow_id, effect.stage) if effect else None


def _describe_workflow(workflow: Workflow) -> str:
    event = workflow.event
    rule = f"rule {workflow.decision.rule}" if workflow.decision.rule else "no rule"
    not_before = f", not before {event.not_before:%Y-%m-%dT%H:%M:%SZ}" if event.not_before else ""
    waits_for = f", waits for {workflow.waits_for}" if workflow.waits_for else ""
    return f"{event.type} {event.id} ({rule}{not_before}): {workflow.phase}{waits_for}"


def _to_signal(effect: RunHook, result: HookResult) -> HookFinished:
    attempts = f" after {result.attempts} attempts" if result.attempts > 1 else ""
    return HookFinished(
        workflow_id=effect.workflow_id,
        stage=effect.stage,
        hook=effect.hook,
        run=effect.run,
        outcome=result.outcome,
        detail=f"{result.detail}{attempts}",
        tail=result.tail,
    )


def _is_cut_short(signal: Signal) -> bool:
    """Whether a hook ended badly, and may have been made to, if the agent or its machine is told to stop as well.

    That is no failure: the hook is left open, and runs again after the restart.
    """
    return isinstance(signal, HookFinished) and signal.outcome != "succeeded"


def _without_run(hook: str, outcome: HookOutcome, detail: str) -> HookResult:
    return HookResult(
        hook=hook, outcome=outcome, exit_code=None, attempts=0, duration_seconds=0.0, tail="", detail=detail
    )


def _log_output(log: Logger, line: str) -> None:
    log.info("hook output", line=line)
