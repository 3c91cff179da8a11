"""``advance``: applies the signals to the open workflows, then moves every workflow as far as it goes."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.imds.compare import Gone, Missing, Seen
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.workflow.approval import why_approval_needed
from scheduled_events_agent.workflow.fleet import counts_for_slots, latest_begin, unavailable_at
from scheduled_events_agent.workflow.model import (
    ALLOWED_TRANSITIONS,
    ApprovalAnswered,
    Approve,
    Context,
    HookFinished,
    OperatorAction,
    OperatorCommand,
    Record,
    RecordKind,
    RunHook,
    Signal,
    Transition,
    WaitKind,
    WaitReason,
    Workflow,
    WorkflowError,
    Workflows,
)
from scheduled_events_agent.workflow.phases import evaluate_approval_gates, next_transition
from scheduled_events_agent.workflow.recommendations import expires_at
from scheduled_events_agent.workflow.signals import apply_signal, can_resume, waiting_for_hook
from scheduled_events_agent.workflow.stages import can_start, is_nothing_done, undoes, without_undone_hooks
from scheduled_events_agent.workflow.timing import approval_turn_at, early_until, start_of
from scheduled_events_agent.workflow.unprepared import VM_UNKNOWN_AFTER, with_reason, with_vm_noted

# An approval that waits for a later document checks this often whether there is one.
_LATER_DOCUMENT = timedelta(seconds=1)
# These reasons are not written to the journal: the answer of the fleet's store, or of the service, comes soon.
_NOT_RECORDED: tuple[WaitKind, ...] = ("fleet", "missing")
# Of each of these kinds only the first is written: its details change with each VM, or with each event that ends.
_RECORDED_ONCE: tuple[WaitKind, ...] = ("slot", "approval_slot", "all_ready", "other_event")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``advance``."""

    workflows: dict[str, Workflow]
    """The open workflows as they are now. Closed ones are left out."""
    transitions: tuple[Transition, ...]
    """All transitions, in the order in which they were made."""
    errors: tuple[tuple[str, Exception], ...]
    """Bugs that were met, each with the id of its workflow, or of its event if that is new.

    That workflow stays where it was; the others went on.
    """


def advance(workflows: Workflows, signals: Iterable[Signal], context: Context) -> Result:
    """Apply ``signals``, then move every workflow as far as it goes."""
    reducer = _Reducer(workflows, context)
    for signal in signals:
        for key in reducer.targets(signal):
            name = signal.event.id if isinstance(signal, Seen) and not key else key
            reducer.apply_safely(name, apply_signal, reducer.workflows.get(key), signal, context)
    reducer.advance_all()
    open_ = {key: workflow for key, workflow in reducer.workflows.items() if workflow.is_open}
    return Result(workflows=open_, transitions=tuple(reducer.transitions), errors=tuple(reducer.errors.items()))


class _Reducer:
    """One call of ``advance``: the workflows as they change, and the transitions that changed them."""

    def __init__(self, workflows: Workflows, context: Context) -> None:
        self.workflows = dict(workflows)
        self.transitions: list[Transition] = []
        self.errors: dict[str, Exception] = {}
        self._context = context
        # Workflow ids by the event's key. No document has an event twice.
        self._present = {w.event.key: w.id for w in workflows.values() if not w.is_over}
        self._gone = {w.event.key: w.id for w in workflows.values() if w.is_over and w.missing_since is not None}

    def targets(self, signal: Signal) -> list[str]:
        """The workflows that the signal is for; "" stands for a new one."""
        match signal:
            case Seen(event, renamed_from):
                gone = self._gone.get(event.key, "")
                returns = gone if gone and can_resume(self.workflows[gone], event) else ""
                return [self._present.get(renamed_from or event.key, returns)]
            case Missing(key) | Gone(key):
                return [self._present[key]] if key in self._present else []
            case HookFinished():
                return waiting_for_hook(signal, self.workflows)
            case ApprovalAnswered() | OperatorCommand():
                return [signal.workflow_id] if signal.workflow_id in self.workflows else []
            case _:
                return list(self.workflows)

    def advance_all(self) -> None:
        """Move workflows until none moves any more: they wait for each other.

        Events that are not over move first, and evictions before the others: what they begin may keep other
        workflows from beginning.
        """

        def order(key: str) -> tuple[bool, bool]:
            workflow = self.workflows[key]
            return workflow.is_over, workflow.event.type != "Preempt"

        moving = sorted(self.workflows, key=order)
        for _ in range(1000):
            before = len(self.transitions)
            reasons = {}
            for key in moving:
                if key not in self.errors:
                    reasons[key] = self.apply_safely(
                        key, next_transition, self.workflows[key], self.workflows, self._context
                    )
            if len(self.transitions) == before:
                for key, reason in reasons.items():
                    self.apply_safely(key, explain, self.workflows[key], reason, self._context)
                return
        self.errors[""] = WorkflowError(f"workflows do not stop moving: {moving}", kind="bug")

    def apply_safely(
        self, key: str, find_transition: Callable[..., Transition | WaitReason | None], *arguments: object
    ) -> WaitReason | None:
        """Make the transition, or return why there is none. A bug in one event must not stop the other events."""
        try:
            found = find_transition(*arguments)
            if not isinstance(found, Transition):
                return found
            self._apply(found)
        except Exception as error:  # noqa: BLE001 - a bug in one event must not stop the others
            self.errors[key] = error
        return None

    def _apply(self, transition: Transition) -> None:
        new = transition.workflow
        old = self.workflows.get(transition.workflow.id)
        if old is not None and new.phase != old.phase and new.phase not in ALLOWED_TRANSITIONS[old.phase]:
            raise WorkflowError(f"{old.phase} -> {new.phase} is not an allowed transition", kind="bug")
        if breach := _breach(old or new, transition, self._context):
            raise WorkflowError(breach, kind="bug")
        if old is not None and new.phase != old.phase:
            new = replace(new, phase_since=self._context.now)
            transition = replace(transition, workflow=new)
        if old != new or transition.effects or transition.records:
            self.transitions.append(transition)
            self.workflows[new.id] = new
        if old is None and new.event.key in self._gone:
            # Only the last appearance of an event may go on if it comes back.
            followed = self.workflows[self._gone[new.event.key]]
            self._apply(Transition(workflow=replace(followed, missing_since=None)))
        if any(isinstance(effect, RunHook) and effect.stage == "recover" for effect in transition.effects):
            for peer in list(self.workflows.values()):
                if peer.is_over and undoes(new, peer):
                    self._apply(Transition(workflow=replace(peer, is_reverted=True)))
        if old is not None and _has_begun_to_prepare(old, new):
            for peer in list(self.workflows.values()):
                self._apply(Transition(workflow=without_undone_hooks(peer, new)))


def _has_begun_to_prepare(old: Workflow, new: Workflow) -> bool:
    """Whether a drain begins, or a prepare hook is over that had begun, or may have: a restart has cut it off."""
    begins_drain = old.drain_until is None and new.drain_until is not None
    ends_hook = old.prepare.current is not None and new.prepare.current is None
    return begins_drain or (ends_hook and new.prepare.run >= old.prepare.run)


def _breach(before: Workflow, transition: Transition, context: Context) -> str:
    """The effect that the workflow before the transition does not allow, as a sentence; "" if there is none."""
    for effect in transition.effects:
        if isinstance(effect, Approve) and evaluate_approval_gates(before, context).verdict != "allow":
            return "it was to be approved although its gates do not allow that"
        is_recovery = isinstance(effect, RunHook) and effect.stage == "recover"
        if is_recovery and is_nothing_done(before):
            return "it was to be recovered from although nothing was prepared for it"
    return ""


def explain(workflow: Workflow, reason: WaitReason | None, context: Context) -> Transition | None:
    """Note why the workflow waits now, and what an operator must know of it; a new reason gets a record."""
    if not workflow.is_open:
        return None
    records = (
        []
        if reason is None or not _is_worth_recording(workflow.wait_reason, reason)
        else [Record(kind=_kind(reason), wait_reason=reason)]
    )
    needed_since = workflow.approval_needed_since
    why_needed = why_approval_needed(workflow, context)
    if why_needed and needed_since is None:
        records.append(Record(kind="approval_needed", text=why_needed))
    needed_since = (needed_since or context.now) if why_needed else None
    explained, vm_records = with_vm_noted(
        replace(
            workflow,
            wait_reason=reason,
            approval_needed_since=needed_since,
            early_until=early_until(workflow, context),
        ),
        context,
    )
    explained = with_reason(explained, context)
    return Transition(workflow=explained, records=(*records, *vm_records)) if explained != workflow else None


def _is_worth_recording(before: WaitReason | None, now: WaitReason) -> bool:
    is_same_kind = before is not None and before.kind == now.kind
    return before != now and now.kind not in _NOT_RECORDED and not (is_same_kind and now.kind in _RECORDED_ONCE)


def _kind(reason: WaitReason) -> RecordKind:
    return "hook_missing" if reason.kind == "lost_hook" else "waiting"


def known_events(workflows: Workflows) -> dict[str, ScheduledEvent]:
    """The events that are not over, by key; the next document is compared with them."""
    return {workflow.event.key: workflow.event for workflow in workflows.values() if not workflow.is_over}


def is_applied(workflow: Workflow, action: OperatorAction) -> bool:
    """Whether an operator's action has taken effect; a change that came with it may have made it void."""
    match action:
        case "retry":
            stage = workflow.recover if workflow.is_over else workflow.prepare
            return workflow.is_open and stage.state != "failed"
        case "resolve":
            return workflow.recover.state == "resolved" or workflow.outcome == "expired"
        case "release":
            return workflow.operator_action == ""
        case "approve" | "hold":
            return workflow.operator_action == action


def is_unsettled(workflow: Workflow, action: OperatorAction) -> bool:
    """Whether the action takes back an approval that is under way: Azure's answer shows whether it was in time."""
    approval = workflow.approval
    takes_back = action == "hold" or (action == "release" and approval.taken_back is not None)
    return takes_back and approval.state == "requested" and is_applied(workflow, action)


def is_ready(workflows: Workflows) -> bool:
    """Whether this VM is ready for work: nothing is prepared for, and all recovery is done."""
    return not any(workflow.is_prepared_for for workflow in workflows.values())


def next_wake_at(workflows: Workflows, context: Context) -> datetime | None:
    """The next time at which a workflow may move without a signal."""
    times = []
    if workflows and (lost_at := unavailable_at(context)):
        times.append(lost_at)
    for workflow in workflows.values():
        prepare = workflow.prepare
        approval = workflow.approval
        if workflow.drain_until and prepare.state == "running" and prepare.current is None:
            times.append(workflow.drain_until)
        if approval.state == "none" and approval.retry_at:
            times.append(approval.retry_at)
            if context.document_at and approval.failed_at and context.document_at <= approval.failed_at:
                times.append(context.now + _LATER_DOCUMENT)
        if approval.state == "none" and (approve_at := approval_turn_at(workflow)):
            times.append(approve_at)
        if workflow.was_begun_early and approval.state == "none":
            times.append(start_of(workflow, context).at)
        if can_start(workflow) and workflow.decision.rule and not workflow.is_over:
            times.append(start_of(workflow, context).at)
            latest = latest_begin(workflow, context)
            if latest is not None and counts_for_slots(workflow, context):
                times.append(latest)
        if expiry := expires_at(workflow):
            times.append(expiry)
        if workflow.vm_unknown_since and not workflow.is_vm_unknown_noted:
            times.append(workflow.vm_unknown_since + VM_UNKNOWN_AFTER)
    return min((time for time in times if time > context.now), default=None)
