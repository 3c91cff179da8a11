"""The request to approve an event, its answer, and why only an operator may approve it."""

from datetime import timedelta

from msgspec.structs import replace

from scheduled_events_agent.workflow.fleet import has_slot, why_only_operator
from scheduled_events_agent.workflow.gates import LOCAL_APPROVAL_GATES, evaluate_gates
from scheduled_events_agent.workflow.model import (
    Approval,
    ApprovalAnswered,
    Approve,
    Context,
    Record,
    StageStatus,
    Transition,
    WaitReason,
    Workflow,
)
from scheduled_events_agent.workflow.timing import is_due, start_of

# A failed approval is repeated after 1, 2, 4, ... seconds (2, 4, 8, ... after a 429), but after this many at most.
_MAX_RETRY_SECONDS = 30.0


def request_approval(workflow: Workflow, context: Context) -> Transition | None:
    """Ask Azure to start the event; None if an earlier try has failed and it is too early for the next one."""
    approval = workflow.approval
    if approval.retry_at is not None and not is_due(approval.retry_at, context.now, _MAX_RETRY_SECONDS):
        return None
    document_at = context.document_at
    failed_at = approval.failed_at
    if failed_at is not None and document_at is not None and document_at <= failed_at <= context.now:
        return None
    requested = replace(approval, state="requested", retry_at=None)
    lacks_slot = workflow.lacks_slot and not has_slot(workflow, context)
    is_alone = approval.failures > 0
    return Transition(
        workflow=replace(workflow, approval=requested, lacks_slot=lacks_slot),
        effects=(Approve(workflow_id=workflow.id, event_id=workflow.event.approval_id, is_alone=is_alone),),
        records=(Record(kind="approving", text=_reason(workflow)),),
    )


def _reason(workflow: Workflow) -> str:
    if workflow.operator_action == "approve":
        return "an operator approved it"
    decision = workflow.decision
    if decision.approve == "immediately":
        return f"rule {decision.rule} approves immediately"
    has_failed = workflow.prepare.state == "failed"
    state = "its rule approves despite the failure" if has_failed else "its preparation is done"
    return f"rule {decision.rule}: {state}"


def why_approval_needed(workflow: Workflow, context: Context) -> str:
    """Why this agent approves the event only if an operator approves it, as a clause; "" if that is not so."""
    event = workflow.event
    decision = workflow.decision
    is_ahead = event.status == "Scheduled" and not (workflow.is_over or workflow.was_started)
    if not (is_ahead and context.is_acting) or workflow.operator_action or workflow.approval.state == "confirmed":
        return ""
    if event.approval_error or decision.rule is None or decision.affects not in ("self", "shared"):
        return ""
    if decision.approve == "manual":
        return f"rule {decision.rule} leaves it to an operator"
    if event.is_ambiguous and _would_approve(decision.rule, context):
        return "the document lists it more than once, with different contents"
    if workflow.is_history_unknown and decision.approve != "never" and decision.can_approve_for_all:
        return "the state file was lost, and what was done before is not known"
    return why_only_operator(workflow, context)


def _would_approve(rule_name: str, context: Context) -> bool:
    return any(rule.name == rule_name and rule.approve != "never" for rule in context.rules)


def would_begin(workflow: Workflow, context: Context) -> WaitReason:
    """The reason that shows what an acting agent would do about an event for which nothing has begun."""
    start = start_of(workflow, context)
    ready = replace(workflow, phase="prepared", prepare=StageStatus(state="succeeded"))
    result = evaluate_gates(ready, replace(context, is_acting=True), LOCAL_APPROVAL_GATES)
    at = start.at if start.at > context.now else None
    return WaitReason(
        kind="would_begin",
        at=at,
        detail=start.reason if at else "",
        approval=result.wait_reason.kind if result.wait_reason else None,
    )


def apply_approval_answer(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Transition | None:
    if workflow.approval.state != "requested":
        return None
    if workflow.approval.is_outlived:
        return Transition(workflow=replace(workflow, approval=Approval()))
    if not signal.error_kind:
        records = [Record(kind="approved", text="Azure has accepted the approval", addition="")]
        action = workflow.operator_action
        operator = workflow.operator
        taken_back = workflow.approval.taken_back
        if action == "hold" or (taken_back is not None and action == ""):  # it came after the approval was sent
            text = f"the operator's {action or 'release'} is void: Azure has accepted the approval"
            records.append(Record(kind="operator", text=text))
            operator = taken_back
        confirmed = replace(workflow, approval=Approval(state="confirmed"), operator=operator)
        return Transition(workflow=confirmed, records=tuple(records))
    failures = workflow.approval.failures + 1
    # The service's limit is about a second: after a 429 the first pause is longer.
    exponent = failures if signal.error_kind == "throttled" else failures - 1
    delay = min(_MAX_RETRY_SECONDS, 2.0 ** min(exponent, 10))
    retry_at = context.now + timedelta(seconds=delay)
    since = workflow.approval.failing_since or context.now
    approval = Approval(
        failures=failures, failing_since=since, failure=signal.detail, retry_at=retry_at, failed_at=context.now
    )
    text = f"approval failed ({signal.error_kind}), next try in {delay:g}s: {signal.detail}"
    record = Record(kind="approval_failed", text=text)
    return Transition(workflow=replace(workflow, approval=approval), records=(record,))
