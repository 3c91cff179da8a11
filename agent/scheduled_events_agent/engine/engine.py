"""A cycle of the engine: receive messages, decide, commit, perform, publish.

For one thread. Other threads read the published ``snapshot``. Workflows and settings are replaced, never changed.
So the snapshot need not copy them.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from math import inf

from msgspec.structs import replace

from scheduled_events_agent import __version__, host
from scheduled_events_agent.engine.debugging import DebugReporter
from scheduled_events_agent.engine.document_tracker import DocumentTracker
from scheduled_events_agent.engine.fleet import FleetState
from scheduled_events_agent.engine.hook_runs import HookRuns, is_aborted_by_stop, with_needed_hooks
from scheduled_events_agent.engine.identity import load_identity, names_of, save_identity
from scheduled_events_agent.engine.maintenance import StoreMaintenance
from scheduled_events_agent.engine.messages import (
    FleetUpdate,
    HookDone,
    MachinePaused,
    Message,
    NotificationDone,
    Notify,
    RunOnClear,
)
from scheduled_events_agent.engine.operator_requests import (
    answer_to,
    has_nothing_to_release,
    rejection,
    why_rejected,
)
from scheduled_events_agent.engine.outbox import Outbox
from scheduled_events_agent.engine.protocols import Executor, Host
from scheduled_events_agent.engine.remembered import Remembered, changes_by_transitions
from scheduled_events_agent.engine.reporter import EventReporter
from scheduled_events_agent.engine.snapshot import Snapshot
from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status import NO_OPTIONS, CommandOptions, JournalRecord, StateLost, Vm
from scheduled_events_agent.status.actions import STATE_LOST, unsettled_message
from scheduled_events_agent.status.attention import CRASHED_WITHIN
from scheduled_events_agent.status.messages import pending_message, with_messages
from scheduled_events_agent.store import Request, RequestAnswer, StatusRequest, Store, StoreError, WithdrawnError
from scheduled_events_agent.telemetry.log import ChangeLogger, get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    CancelHook,
    ClockChanged,
    Context,
    FleetRequest,
    OperatorCommand,
    PolicyChanged,
    Result,
    RunHook,
    Signal,
    Transition,
    UpdateHookDeadline,
    Workflows,
    advance,
    is_ready,
    is_unsettled,
    next_wake_at,
)

# The clock was set if it and the monotonic clock differ by more than this since the last cycle.
_CLOCK_SET_SECONDS = 1.0
# Nothing is approved if the service's last answer is older than this, and than two poll intervals.
_STALE_SECONDS = 30.0
# Without news, and before the computed time, all is decided again after this time, to be safe.
_DECIDE_SECONDS = 60.0


def unclean_starts(records: Iterable[JournalRecord], boot_id: str, now: datetime) -> tuple[datetime, ...]:
    """Starts of an agent in this boot, up to ``now``, before which the previous agent had not stopped."""
    found: list[datetime] = []
    is_running = False
    for record in records:
        if record.kind == "agent_started":
            is_of_this_boot = host.is_same_boot(record.detail, boot_id)
            found += [record.at] if is_running and is_of_this_boot else []
            is_running = is_of_this_boot
        elif record.kind == "agent_stopped":
            is_running = False
    return (*found, now) if is_running else tuple(found)


class Engine:
    """Keeps what the agent knows about events, and acts on it. ``receive`` messages, then ``run_cycle``."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        executor: Executor,
        machine: Host | None = None,
        *,
        put: Callable[[HookDone], None] = lambda _: None,
        notify: Notify = lambda *, is_urgent: None,  # noqa: ARG005
        describe: Callable[[], bytes] = bytes,
        publish_fleet_requests: Callable[[tuple[FleetRequest, ...]], None] = lambda _: None,
        command_options: CommandOptions = NO_OPTIONS,
    ) -> None:
        """``put`` makes a message come back to ``receive`` soon. ``notify`` has new notifications sent.

        ``describe`` returns a ``Status`` as JSON, for a command that asks through the store.

        ``publish_fleet_requests`` is called after each commit with this VM's requests to its fleet; FleetUpdate
        comes back.
        """
        self._machine = machine or Host()
        self._describe = describe
        self.fleet = FleetState(publish_fleet_requests)
        self._store = store
        self._metrics = metrics
        self._executor = executor
        self._log = get_logger()
        self.settings = settings
        """The policy in force."""
        self.workflows: Workflows = {}
        """The open workflows."""
        self.boot_id = self._machine.boot_id()
        self.identity = load_identity(store)
        """This VM's identity, as far as it is known."""
        self.agent_log: tuple[JournalRecord, ...] = ()
        """The start of this agent, and the last stop of an agent."""
        self.unclean_starts: tuple[datetime, ...] = ()
        """Starts after a crash; the field of the same name in ``Status``."""
        self._is_stopping = False
        self.store_failure = ""
        """Why the last cycle could do nothing; "" if it did its work."""
        self.bugs: Mapping[str, str] = {}
        """The events that could not be handled in the last decision: the kind of the error, by the event's id."""
        self.cycle_began_at = self._machine.monotonic()
        """When the last cycle began."""
        self.wake_at: datetime | None = None
        """The next time at which something may be due without a message."""
        self._decided_at = -inf
        self._has_decided_on_stale = False
        self._clock_offset = self._machine.now().timestamp() - self.cycle_began_at
        self._new_identity: Identity | None = None
        # The disk may have been copied to another VM. That VM then has another boot id.
        self.is_identity_sure = host.is_same_boot(store.get_meta("boot_id"), self.boot_id)
        self._is_state_lost = bool(store.get_meta("state_lost"))
        """Whether no document was decided on since state was lost."""
        self._unsettled_loss = store.load_unsettled_loss()
        """The loss of state, until on_clear or an operator has settled it."""
        self._has_cleared = False
        """Whether on_clear has succeeded, and it is not written yet that this settles the loss."""
        # Input of the next cycle that no commit has stored yet.
        self.documents = DocumentTracker()
        self._signals: list[Signal] = []
        self._requests: list[Request] = []
        self._unsettled: dict[int, Request] = {}
        """Holds and releases in force, answered when it is known whether Azure accepts the approval under way."""
        self._document_at: datetime | None = None
        self._store_failures = ChangeLogger("writing the state file", LogId.STATE_NOT_WRITTEN, LogId.STATE_WRITTEN)
        self._reporter = EventReporter(store, metrics, command_options)
        self._debug_reporter = DebugReporter(self._reporter.is_logged)
        self._hook_runs = HookRuns(store, executor, self._machine, self._reporter, put)
        self.outbox = Outbox(store, metrics, notify, command_options)
        self.remembered = Remembered(store)
        self._maintenance = StoreMaintenance(store, metrics, self._machine, self._reporter)
        self.snapshot = self._make_snapshot()
        """The state for other threads, which may read nothing else of the engine."""

    def start(self) -> None:
        """Go on where the last agent ended. Call it once, first. Raises StoreError."""
        workflows = self._store.load_workflows()
        # A boot id that is a rounded time may vary a little within one boot.
        known = [boot_id for workflow in workflows for boot_id in (workflow.boot_id, workflow.prepare_boot_id)]
        self.boot_id = next((one for one in known if host.is_same_boot(one, self.boot_id)), self.boot_id)
        self.workflows = {workflow.id: workflow for workflow in workflows}
        self._reporter.mute([workflow.id for workflow in workflows])
        now = self._machine.now()
        if self._store.quarantined_path is not None:
            self._log.error(
                "the state file was damaged and has been quarantined; what was done before is not known, so "
                "no event that is pending now will be approved unless an operator does",
                log_id=LogId.STATE_LOST,
                quarantined_path=str(self._store.quarantined_path),
            )
            self._store.record("state_lost", f"the damaged state file is now {self._store.quarantined_path}", now)
            self._metrics.store_errors.labels("damaged").inc()
        self.unclean_starts = unclean_starts(
            self._store.load_starts_and_stops(now - CRASHED_WITHIN), self.boot_id, now
        )
        what = f"version {__version__}, mode {self.settings.agent.mode}"
        self._store.record("agent_started", what, now, detail=self.boot_id)
        self.agent_log = tuple(self._store.load_last_start_and_stop())
        self._count_settings()
        for workflow in workflows:
            self._metrics.count_unprepared(workflow)  # the event's reboot may have come before a scrape
        if workflows:
            # The policy may be another one than the last agent had.
            self._signals += [AgentRestarted(), PolicyChanged()]
        self._publish()

    def receive(self, message: Message) -> None:
        """Queue a message for the next cycle."""
        match message:
            case Document():
                self.documents.receive(message, self._machine.monotonic(), self.names())
            case Identity():
                self._new_identity = message
            case ApprovalAnswered():
                self._executor.approval_received(message.workflow_id)
                if message.error_kind:
                    self._metrics.approvals.labels(message.error_kind).inc()
                self._signals.append(message)
            case HookDone(effect=effect, result=result):
                self._executor.hook_received(effect)
                self._metrics.record_hook(result.hook, effect.stage, result.outcome, result.duration_seconds)
                if isinstance(effect, RunOnClear):
                    self._end_on_clear_hook(result)
                else:
                    hook = self.settings.hooks.get(effect.hook)
                    signal = self._hook_runs.to_signal(effect, result, hook)
                    if signal is not None and not (self._is_stopping and is_aborted_by_stop(signal)):
                        self._signals.append(signal)
            case NotificationDone():
                self.outbox.end(message)
            case FleetUpdate():
                self.fleet.update(message)
            case MachinePaused(seconds=seconds):
                self._reporter.report_pause(seconds, self._machine.now())

    def run_cycle(self, document_at: datetime | None) -> bool:
        """Decide, commit, perform. False if the state file could not be written: then nothing was done.

        Raises StoreError if the file is damaged: the next start of the agent quarantines it.

        ``document_at``: when a document was last read; everything that was read until then has been received.
        """
        self.cycle_began_at = self._machine.monotonic()
        self._publish()  # the age of the snapshot then shows if this cycle hangs
        try:
            return self._run_cycle(document_at)
        finally:
            self._publish()

    def _run_cycle(self, document_at: datetime | None) -> bool:
        now = self._machine.now()
        self._detect_clock_step(now)
        try:
            self._maintenance.ensure_in_place(now)
            self._update_identity(now)
            self._receive_requests(now)
            if self._has_cleared:
                self._settle_loss("on_clear has succeeded", now)
            has_document = bool(self.documents.new or self.documents.latest) and not self._is_stopping
            if has_document and (self.is_identity_sure or self.settings.vm.name):
                self._document_at = document_at or now
            if self._hook_runs.cut_short and not self._is_stopping and self._machine.is_shutting_down() is False:
                self._hook_runs.resume()
            self._decide_commit_perform(now)
            if not self._is_stopping:
                self._hook_runs.run_delayed(self.workflows, self.settings, self.name(), now)
            self._answer_unsettled()
            self._after_first_document(now)
            self._hook_runs.save_times()
            self.outbox.purge(self.settings.notify, now)
            self._reporter.flush()
        except StoreError as error:
            self.store_failure = str(error)
            self._publish()  # before it is logged
            # Nothing was done. The next cycle decides on the same messages again.
            self._metrics.store_errors.labels(error.kind).inc()
            self._store_failures.failed(error.kind, str(error), self.cycle_began_at)
            if error.kind == "damaged":
                raise
            self._forget_requests()
            return False
        self._store_failures.succeeded(self.cycle_began_at)
        self.store_failure = ""
        return True

    def _publish(self) -> None:
        self.snapshot = self._make_snapshot()

    def _make_snapshot(self) -> Snapshot:
        return Snapshot(
            settings=self.settings,
            cycle_began_at=self.cycle_began_at,
            workflows=self.workflows,
            identity=self.identity,
            is_identity_sure=self.is_identity_sure,
            incarnation=self._incarnation(),
            other_vm_events=self.documents.other_vm_events,
            lacks_expired=self.documents.lacks_expired,
            has_decided_on_stale=self._has_decided_on_stale,
            holds=self.remembered.holds,
            fleet=self.fleet.last_update,
            fleet_not_ready=self.fleet.not_ready,
            waiting=self.outbox.waiting,
            losses=self.outbox.losses,
            agent_log=self.agent_log,
            unclean_starts=self.unclean_starts,
            state_lost=self._unsettled_loss,
            bugs=self.bugs,
            store_failure=self.store_failure,
        )

    def maintain(self) -> None:
        """Delete what is too old, and keep room for a full disk. Raises StoreError if the file is damaged."""
        self._maintenance.maintain(self.cycle_began_at, self._maintain_remembered)

    def _maintain_remembered(self) -> None:
        latest = self.documents.latest
        if latest is not None:
            listed = {event.key for event in latest.events}
            self.remembered.maintain(self._machine.now(), self.workflows.values(), listed)

    @property
    def has_document(self) -> bool:
        """Whether a document was read since the start, and it is known whose events are this VM's."""
        return self._document_at is not None

    @property
    def needs_early_cycle(self) -> bool:
        """Whether the next cycle should come soon: to try again, or since the clock of ``wake_at`` may be set."""
        has_unwritten = self._reporter.has_unwritten
        is_behind = bool(self.documents.new or self._hook_runs.cut_short or has_unwritten)
        return is_behind or self._maintenance.has_more or self.wake_at is not None

    def begin_stop(self) -> None:
        """From now on a cycle stores what was received and begins nothing; the next start continues."""
        self._is_stopping = True
        self._document_at = None  # without a document no workflow moves
        self._signals = [signal for signal in self._signals if not is_aborted_by_stop(signal)]

    def finish(self) -> None:
        """Store what was received last. Raises StoreError."""
        self.run_cycle(None)
        for request in self._unsettled.values():
            answer = RequestAnswer(succeeded=False, message=unsettled_message(request.action))
            self._store.answer_request(request.id, answer)
        self._store.record("agent_stopped", pending_message(self.workflows.values()), self._machine.now())

    # --- policy

    def change_settings(self, settings: Settings) -> None:
        """Put another policy in force."""
        now = self._machine.now()
        self.settings = with_needed_hooks(self.settings, settings, self.workflows)
        self._publish()
        rules = [rule.name for rule in settings.rules]
        self._log.info("the policy file was read again", log_id=LogId.POLICY_RELOADED, rules=rules)
        self._reporter.record("reloaded", f"rules: {', '.join(rules)}", now)
        self._count_settings()
        self._reconsider()

    def reject_settings(self, reason: str) -> None:
        """Report that the new policy cannot be used: the old one stays in force."""
        self._log.error(
            "the policy file is rejected; the old policy stays in force",
            log_id=LogId.POLICY_REJECTED,
            reason=reason,
        )
        self.record_rejection(reason)

    def record_rejection(self, reason: str) -> None:
        """Record that the policy file cannot be used: another policy is in force."""
        self._metrics.reload_ok.set(0)
        self._reporter.record("reload_rejected", reason, self._machine.now())

    def is_acting(self) -> bool:
        """Whether it runs hooks and approves."""
        return self.settings.agent.mode == "act"

    def _count_settings(self) -> None:
        self._metrics.is_acting.set(self.is_acting())
        self._metrics.reload_ok.set(1)
        self._metrics.reloaded_at.set_to_current_time()

    def _reconsider(self) -> None:
        """Decide anew, also on events that did not concern this VM."""
        self._signals.append(PolicyChanged())
        self.documents.recheck()

    # --- a cycle

    def _context(self, now: datetime, document_at: datetime | None) -> Context:
        settings = self.settings
        return Context(
            now=now,
            names=self.names(),
            rules=settings.rules,
            windows=settings.maintenance_windows,
            hooks=settings.hooks,
            hook_seconds=self._hook_runs.seconds(settings.hooks),
            serialized=frozenset(name for name, hook in settings.hooks.items() if hook.serialize),
            reserve=settings.agent.reserve,
            boot_id=self.boot_id,
            is_acting=self.is_acting(),
            document_at=document_at,
            stale_after=max(_STALE_SECONDS, 2.0 * settings.imds.poll_interval),
            is_state_lost=self._is_state_lost,
            # As old as ``now``: else what becomes due between two contexts of a cycle would wake nothing.
            fleet=self.fleet.view(settings, self.names(), self.cycle_began_at),
            holds=self.remembered.holds,
            expired=self.remembered.expired,
        )

    def _detect_clock_step(self, now: datetime) -> None:
        before = self._clock_offset
        self._clock_offset = now.timestamp() - self.cycle_began_at
        seconds = self._clock_offset - before
        if abs(seconds) > _CLOCK_SET_SECONDS and self.workflows:
            self._signals.append(ClockChanged(seconds))

    def _decide_commit_perform(self, now: datetime) -> None:
        has_input = bool(self._signals or self.fleet.has_new_update) or self.documents.new is not None
        is_due = self.wake_at is not None and self.wake_at <= now
        if not (
            has_input or (self.workflows and (is_due or self.cycle_began_at - self._decided_at > _DECIDE_SECONDS))
        ):
            return
        found = self.documents.compare(self.workflows, self.names(), self.settings, self.remembered.expired)
        signals = [*self._signals, *found]
        self._metrics.other_vm_events.set(self.documents.other_vm_events)
        context = self._context(now, self._document_at)
        self._has_decided_on_stale = context.is_stale
        result = advance(self.workflows, signals, context)
        try:
            answers = self._answers(result)
            transitions = tuple(
                [with_messages(transition) for transition in result.transitions if not transition.is_small]
            )
            changes = changes_by_transitions(
                self.remembered.known, signals, transitions, self.documents.unlisted, now
            )
            vm = Vm(names=self.names(), vm_id=self.identity.vm_id)
            notifications = self.outbox.make(transitions, result.workflows, now, vm, self.settings)
            committed = self._store.commit(transitions, now, answers, notifications, changes)
        except WithdrawnError:
            self._forget_requests()
            self._receive_requests(now)
            self._decide_commit_perform(now)
            return
        # The decision is on disk, and nothing of it is done yet.
        self._unsettled |= {request.id: request for request in self._requests if request.id not in answers}
        self._requests = []
        self.outbox.committed(notifications, committed, now)
        self.remembered.committed(changes)
        self.documents.committed(has_errors=bool(result.errors))
        self.workflows = result.workflows
        self._signals = []
        self._publish()  # before it is logged, and before a hook runs that may ask for the status
        self._reporter.report_transitions(transitions, now)
        self._reporter.prune_muted(self.workflows)
        bugs: dict[str, str] = {}
        for workflow_id, bug in result.errors:
            self._reporter.report_bug(workflow_id, bug, self.cycle_began_at)
            workflow = self.workflows.get(workflow_id)
            bugs[workflow.event.id if workflow else workflow_id] = type(bug).__name__
        self.bugs = bugs
        self.outbox.perform(result.transitions)
        self._perform(result.transitions, now)
        self._debug_reporter.report(result.transitions, self.workflows, context)
        self._decided_at = self.cycle_began_at
        context = self._context(now, self._document_at)
        self.wake_at = next_wake_at(self.workflows, context)
        self.fleet.committed(self.workflows, context, self.cycle_began_at)

    def _perform(self, transitions: Iterable[Transition], now: datetime) -> None:
        together: list[Approve] = []
        for transition in transitions:
            for effect in transition.effects:
                match effect:
                    case RunHook():
                        self._hook_runs.run(transition.workflow, effect, self.settings, self.name(), now)
                    case CancelHook():
                        self._hook_runs.cancel(effect)
                    case UpdateHookDeadline(workflow_id=workflow_id):
                        reserve = self.settings.agent.reserve
                        deadline = self._hook_runs.deadline(transition.workflow, "prepare", reserve, now)
                        self._executor.set_deadline((workflow_id, "prepare"), deadline)
                    case Approve(is_alone=True):
                        self._executor.approve([effect], self._incarnation())
                    case Approve():
                        together.append(effect)
        if together:
            self._executor.approve(together, self._incarnation())

    def _incarnation(self) -> str:
        """DocumentIncarnation of the last document that was decided on."""
        return self.documents.latest.incarnation if self.documents.latest else ""

    def _after_first_document(self, now: datetime) -> None:
        """Do what is due once, after the agent has first decided about the pending events."""
        if self._document_at is None or not (self.names() or not self.workflows):
            return
        if self._is_state_lost:
            self._store.set_meta({"state_lost": ""})
            self._is_state_lost = False
        has_missing_event = any(workflow.is_missing for workflow in self.workflows.values())
        if self._hook_runs.awaits_clear and not has_missing_event:
            # A rule may also prepare for an event of another VM, or run a hook for it.
            has_hook = any(stage.current for workflow in self.workflows.values() for stage in workflow.stages)
            are_others = all(workflow.decision.affects == "others" for workflow in self.workflows.values())
            is_clear = are_others and is_ready(self.workflows) and not has_hook
            may_run = is_clear and self.is_acting() and not self._is_stopping
            self._hook_runs.decide_on_clear(self.settings, self.name(), now, is_clear=may_run)

    def _end_on_clear_hook(self, result: HookResult) -> None:
        now = self._machine.now()
        hook = self.settings.hooks.get(result.hook)
        is_required = hook is None or hook.required
        self._has_cleared |= self._hook_runs.end_on_clear(result, now, is_required=is_required)
        if not self._is_stopping:
            self._hook_runs.run_delayed(self.workflows, self.settings, self.name(), now)
            self._hook_runs.run_on_clear(self.settings, self.name())

    # --- operators and identity

    def _receive_requests(self, now: datetime) -> None:
        for loaded in self._store.load_requests(now):
            if isinstance(loaded, StatusRequest):
                status = RequestAnswer(succeeded=True, message=self._describe().decode())
                self._store.answer_request(loaded.id, status)
                continue
            if loaded.action == "resolve" and loaded.workflow_id == STATE_LOST:
                self._store.answer_request(loaded.id, self._resolve_loss(loaded, now))
                continue
            request = self._for_present_event(loaded)
            if request.id in self._unsettled:
                continue
            workflow = self.workflows.get(request.workflow_id)
            if workflow is None and request.workflow_id in self.remembered.holds:
                self._store.answer_request(request.id, self._release_of_absent(request))
                continue
            context = self._context(now, self._document_at)
            if why := why_rejected(request, workflow, context, self._inactive_reason()):
                self._store.answer_request(request.id, rejection(why))
            elif has_nothing_to_release(request, workflow, self._requests):
                nothing = RequestAnswer(succeeded=True, message="nothing to release")
                self._store.answer_request(request.id, nothing)
            else:
                self._requests.append(request)
                self._signals.append(
                    OperatorCommand(workflow_id=request.workflow_id, action=request.action, user=request.user)
                )

    def _resolve_loss(self, request: Request, now: datetime) -> RequestAnswer:
        """Carry out a request that names no event, but the loss of state."""
        if self._unsettled_loss is None:
            return RequestAnswer(succeeded=True, message="nothing to resolve: no loss of state is open")
        self._settle_loss(f"resolved by {request.user}", now)
        return RequestAnswer(succeeded=True, message="resolved: this VM counts as recovered from what was lost")

    def _settle_loss(self, reason: str, now: datetime) -> None:
        if self._unsettled_loss is not None:
            self._store.set_unsettled_loss(None)
            self._unsettled_loss = None
            self._log.info("the loss of state is settled", log_id=LogId.STATE_SETTLED, reason=reason)
            self._reporter.record("state_settled", reason, now)
        self._has_cleared = False

    def _for_present_event(self, request: Request) -> Request:
        """The request. If it names a remembered hold and the event has come back, it is made to name the event."""
        if request.workflow_id not in self.remembered.holds:
            return request
        present = [workflow for workflow in self.workflows.values() if workflow.event.key == request.workflow_id]
        return next((replace(request, workflow_id=one.id) for one in present if not one.is_over), request)

    def _release_of_absent(self, request: Request) -> RequestAnswer:
        """Carry out a request for the hold of an event that is not pending; it names the event's key."""
        has_expired = request.workflow_id in self.remembered.expired
        state = "the recommendation has expired" if has_expired else "the event is not in the document"
        if request.action != "release":
            return rejection(f"{state}; its hold can be released")
        self.remembered.release(request.workflow_id)
        return RequestAnswer(succeeded=True, message=f"released; {state}")

    def _inactive_reason(self) -> str:
        return "" if self.is_acting() else "the agent only observes (agent.mode, --observe)"

    def _answers(self, result: Result) -> dict[int, RequestAnswer]:
        workflows = result.workflows | {
            transition.workflow.id: transition.workflow for transition in result.transitions
        }
        decided = [(request, workflows[request.workflow_id]) for request in self._requests]
        return {
            request.id: answer_to(request, workflow)
            for request, workflow in decided
            if not is_unsettled(workflow, request.action)
        }

    def _answer_unsettled(self) -> None:
        """Answer holds and releases, once the result of the approval that was under way is known."""
        for request in list(self._unsettled.values()):
            workflow = self.workflows.get(request.workflow_id)
            if workflow is not None and is_unsettled(workflow, request.action):
                continue
            result = answer_to(request, workflow) if workflow is not None else rejection("the event is over")
            self._store.answer_request(request.id, result)
            del self._unsettled[request.id]

    def _forget_requests(self) -> None:
        """Drop the requests. They are read again, except those that operators withdraw meanwhile."""
        self._signals = [signal for signal in self._signals if not isinstance(signal, OperatorCommand)]
        self._requests = []

    def _update_identity(self, now: datetime) -> None:
        identity = self._new_identity
        known = self.identity
        if identity is None:
            return
        learned = identity.merged_with(known)
        if known.vm_id and identity.vm_id and known.vm_id.casefold() != identity.vm_id.casefold():
            learned = identity
            both = f"the state file is of VM {known.vm_id}, and this VM is {identity.vm_id}"
            text = f"{both}: the agent ignores it"
            self._unsettled_loss = self._loss_of_foreign(both, now)
            # First: if the agent ends in between, the next one finds again what was prepared.
            self._store.set_unsettled_loss(self._unsettled_loss)
            self._store.discard_workflows(now, text)
            self.remembered.forget()
            self.workflows = {}
            self.documents.recheck()
            self._log.warning(text, log_id=LogId.OTHER_VM)
        if learned != known or not self.is_identity_sure:
            save_identity(self._store, learned, self.boot_id)
            self._log.info("this VM is known", log_id=LogId.VM_KNOWN, vm=learned.name, vm_id=learned.vm_id)
            self._reconsider()
        self.identity = learned
        self._new_identity = None
        self.is_identity_sure = True
        self._publish()

    def _loss_of_foreign(self, reason: str, now: datetime) -> StateLost | None:
        """The loss of another VM's state, if something was prepared in it: this disk may be as that VM's was.

        An image may have a state inside. So this never calls an operator, as a loss of this VM's own state does.
        """
        is_prepared = any(workflow.is_prepared_for for workflow in self.workflows.values())
        known = self._unsettled_loss
        was_shown = known is not None and (known.is_foreign or bool(self.settings.recover_hooks))
        return StateLost(at=now, reason=reason, is_foreign=True) if is_prepared or was_shown else None

    def names(self) -> tuple[str, ...]:
        """The names that documents may use for this VM."""
        return names_of(self.settings.vm, self.identity)

    def name(self) -> str:
        """The name of this VM that hooks get; "" if it is not known."""
        return next(iter(self.names()), "")
