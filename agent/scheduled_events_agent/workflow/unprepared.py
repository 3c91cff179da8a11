"""Why an event is not prepared as its rule wants, which counts when Azure starts it; and events of unknown VMs."""

from datetime import timedelta

from msgspec.structs import replace

from scheduled_events_agent.workflow.model import (
    Context,
    Record,
    Transition,
    Unprepared,
    UnpreparedKind,
    Workflow,
)
from scheduled_events_agent.workflow.stages import next_hook
from scheduled_events_agent.workflow.timing import is_due

# At a first boot the name often comes with the next try: until then no one is notified.
VM_UNKNOWN_AFTER = timedelta(seconds=10)


def with_reason(workflow: Workflow, context: Context) -> Workflow:
    """The workflow with why it is not prepared now. Where it is not known how things are, the last reason stays.

    Its wait reason is the one that holds now.
    """
    is_ahead = not (workflow.is_over or workflow.was_started or workflow.event.is_started)
    # After a reboot a document must show whether it has started: then what was prepared before counts.
    is_listed = workflow.missing_since is None or is_begun(workflow, context)
    if context.document_at is None or not (is_ahead and is_listed):
        return workflow
    return replace(workflow, unprepared=_why_unprepared(workflow, context))


def of_new(workflow: Workflow, context: Context) -> Unprepared | None:
    """Why an event that is seen for the first time is not prepared: it has started, or the VM is not known."""
    may_be_wanted = wants_preparation(workflow) or workflow.decision.affects == "unknown"
    if workflow.is_history_unknown or not may_be_wanted:
        return None
    if workflow.event.is_started:
        return Unprepared(kind="no_notice")
    # What is listed moves only when it is known which VM this is. Azure may start it before.
    return Unprepared(kind="vm_unknown") if context.document_at is None else None


def with_start_noted(transition: Transition, context: Context) -> Transition:
    """The transition by which it is known that Azure has started the event. A record says if it was not prepared.

    Whether a rule wants it prepared may be known only later, with this VM's name.
    """
    workflow = transition.workflow
    if workflow.decision.affects == "unknown" and workflow.decision.rule is None:
        return transition
    unprepared = None
    if wants_preparation(workflow):
        is_current = is_begun(workflow, context)
        unprepared = _why_unprepared(workflow, context) if is_current else workflow.unprepared
    records = (Record(kind="unprepared"),) if unprepared is not None else ()
    return replace(
        transition,
        workflow=replace(workflow, unprepared=unprepared),
        records=(*transition.records, *records),
    )


def is_begun(workflow: Workflow, context: Context) -> bool:
    """Whether its preparation has begun in this boot: a document of this boot has listed it as Scheduled."""
    return workflow.prepare.state != "idle" and workflow.prepare_boot_id == context.boot_id


def wants_preparation(workflow: Workflow) -> bool:
    """Whether a rule wants something done before Azure starts the event. A recommendation starts nothing."""
    decision = workflow.decision
    return bool(decision.prepare or decision.drain_for) and not workflow.event.is_recommendation


def with_vm_noted(workflow: Workflow, context: Context) -> tuple[Workflow, tuple[Record, ...]]:
    """The workflow, and a record if for ten seconds nothing has said whether the event names this VM."""
    if workflow.decision.affects != "unknown":
        return replace(workflow, vm_unknown_since=None), ()
    since = workflow.vm_unknown_since or context.now
    workflow = replace(workflow, vm_unknown_since=since)
    is_pending = workflow.missing_since is None and not workflow.is_over
    is_long = is_due(since + VM_UNKNOWN_AFTER, context.now, VM_UNKNOWN_AFTER.total_seconds())
    if workflow.is_vm_unknown_noted or not (is_pending and is_long):
        return workflow, ()
    return replace(workflow, is_vm_unknown_noted=True), (Record(kind="vm_unknown"),)


def _why_unprepared(workflow: Workflow, context: Context) -> Unprepared | None:
    decision = workflow.decision
    prepare = workflow.prepare
    if decision.rule is None and decision.affects == "unknown":
        return None if workflow.is_history_unknown else Unprepared(kind="vm_unknown")
    if not wants_preparation(workflow) or prepare.state == "succeeded" or _has_just_ended(workflow, context):
        return None
    if not context.is_acting:
        return Unprepared(kind="observes")
    if workflow.operator_action == "hold":
        return Unprepared(kind="held")
    if prepare.state == "idle":
        return _why_not_begun(workflow)
    is_at_once = decision.approve == "immediately"
    if prepare.state == "failed":
        is_allowed = is_at_once or decision.on_failure == "approve" or workflow.operator_action == "approve"
        return Unprepared(kind="failure_allowed" if is_allowed else "hook_failed", detail=prepare.failure)
    hook = "" if _is_draining(workflow, context) else prepare.current or next_hook(workflow, "prepare") or ""
    return Unprepared(kind="immediately" if is_at_once else "unfinished", detail=hook)


def _has_just_ended(workflow: Workflow, context: Context) -> bool:
    """Whether all of the preparation has ended, and the stage does not say so yet."""
    prepare = workflow.prepare
    is_between = prepare.state == "running" and prepare.current is None
    return is_between and not _is_draining(workflow, context) and next_hook(workflow, "prepare") is None


def _is_draining(workflow: Workflow, context: Context) -> bool:
    until = workflow.drain_until
    return until is not None and not is_due(until, context.now, workflow.decision.drain_for)


def _why_not_begun(workflow: Workflow) -> Unprepared | None:
    reason = workflow.wait_reason
    kinds: dict[str, UnpreparedKind] = {"time": "time", "window": "time", "slot": "slot", "fleet": "fleet"}
    if reason is None or reason.kind not in kinds:
        return workflow.unprepared
    if workflow.decision.approve == "manual" and workflow.approval_needed_since is not None:
        return Unprepared(kind="manual")
    return Unprepared(kind=kinds[reason.kind], at=reason.at, detail=reason.detail)
