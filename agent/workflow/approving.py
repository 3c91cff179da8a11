"""The request to approve, and what an agent that only observes would do."""

from msgspec.structs import replace

from agent.workflow.gates import ask_gates
from agent.workflow.model import Approve, Context, Note, Progress, Step, Workflow, show
from agent.workflow.signals import MAX_RETRY_SECONDS
from agent.workflow.times import is_due, start_of


def request_approval(workflow: Workflow, context: Context) -> Step | None:
    """Ask Azure to start the event; None if an earlier try has failed and it is too early for the next one."""
    approval = workflow.approval
    if approval.retry_at is not None and not is_due(approval.retry_at, context.now, MAX_RETRY_SECONDS):
        return None
    document_at, failed_at = context.document_at, approval.failed_at
    if failed_at is not None and document_at is not None and document_at <= failed_at <= context.now:
        return None
    requested = replace(approval, state="requested", retry_at=None)
    is_alone = approval.failures > 0
    return Step(
        workflow=replace(workflow, approval=requested, waits_for=""),
        effects=(Approve(workflow_id=workflow.id, event_id=workflow.event.approval_id, is_alone=is_alone),),
        notes=(Note(kind="approving", text=_reason(workflow)),),
    )


def _reason(workflow: Workflow) -> str:
    if workflow.operator == "approved":
        return "an operator approved it"
    decision = workflow.decision
    if decision.approve == "immediately":
        return f"rule {decision.rule} approves immediately"
    has_failed = workflow.prepare.state == "failed"
    state = "its rule approves despite the failure" if has_failed else "its preparation is done"
    return f"rule {decision.rule}: {state}"


def plan(workflow: Workflow, context: Context) -> str:
    """What an agent that acts would do about an event for which nothing has begun, as a clause."""
    decision = workflow.decision
    start = start_of(workflow, context)
    steps = [f"answer /readyz with 503 for {decision.drain_for:g}s"] if decision.drain_for else []
    steps += [f"run {', '.join(decision.prepare)}"] if decision.prepare else []
    ready = replace(workflow, phase="prepared", prepare=Progress(state="succeeded"))
    leave = ask_gates(ready, replace(context, is_acting=True))
    if leave.answer == "yes":
        approval = "approve it at once" if decision.approve == "immediately" or not steps else "approve it"
        if decision.speaks_after:
            approval += f" ({decision.speaks_after:g}s after the first VM that it names)"
        steps.insert(0 if decision.approve == "immediately" else len(steps), approval)
    elif leave.answer == "not yet":
        steps.append("wait for an operator to approve it")
    else:
        steps.append(f"not approve it ({leave.reason})")
    if decision.on_start:
        steps.append(f"run {', '.join(decision.on_start)} when it has started")
    if decision.recover:
        steps.append(f"run {', '.join(decision.recover)} when it is over")
    when = "now" if start.at <= context.now else f"at {show(start.at)} ({start.reason})"
    return f"{when} {', then '.join(steps)}"
