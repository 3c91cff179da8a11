"""Requests of operators: which ones are rejected, and the answers to the others."""

from collections.abc import Sequence

from msgspec.structs import replace

from scheduled_events_agent.status.messages import wait_message
from scheduled_events_agent.store import Request, RequestAnswer
from scheduled_events_agent.workflow import (
    ACTION_TEXTS,
    Context,
    OperatorAction,
    OperatorDecision,
    Workflow,
    evaluate_approval_gates,
    is_applied,
    is_unsettled,
)

_CONFIRMED = "Azure has accepted the approval; it cannot be withdrawn"


def why_rejected(request: Request, workflow: Workflow | None, context: Context, why_not_acting: str) -> str:
    """Why the request is rejected; "" if it is not. ``why_not_acting``: "" for an agent that acts."""
    if workflow is None:
        return "the event is not pending any more"
    if request.action in ("retry", "resolve"):
        return _why_no_retry(workflow, request.action, why_not_acting)
    if workflow.is_over:
        return "the event is over"
    match request.action:
        case "hold":
            return _why_no_hold(workflow)
        case "approve":
            return why_not_acting or _why_no_approval(workflow, request.user, context)
        case _:
            return _CONFIRMED if workflow.approval.state == "confirmed" and workflow.operator_action else ""


def has_nothing_to_release(request: Request, workflow: Workflow | None, waiting: Sequence[Request]) -> bool:
    """Whether the request would take back neither a hold nor an approval. ``waiting``: requests before it."""
    if request.action != "release" or workflow is None:
        return False
    if is_unsettled(workflow, "release"):
        return False  # it is not known yet whether the release before this one came in time
    revocable = ("approve", "hold", "release")
    actions = [one.action for one in waiting if one.workflow_id == workflow.id and one.action in revocable]
    last = actions[-1] if actions else workflow.operator_action
    return last in ("", "release")


def _why_no_hold(workflow: Workflow) -> str:
    if workflow.was_started or workflow.event.is_started:
        return "the event has started"
    return _CONFIRMED if workflow.approval.state == "confirmed" else ""


def _why_no_approval(workflow: Workflow, user: str, context: Context) -> str:
    approved = replace(workflow, operator=OperatorDecision(action="approve", user=user, at=context.now))
    result = evaluate_approval_gates(approved, context)
    return wait_message(workflow, result.wait_reason) if result.verdict == "deny" else ""


def _why_no_retry(workflow: Workflow, action: OperatorAction, why_not_acting: str) -> str:
    recover = workflow.recover
    if action == "resolve":
        if workflow.event.is_recommendation and not workflow.is_over:
            return ""
        if not workflow.is_over:
            return "the event is not over; resolve is for a recovery that failed"
        return f"its hook {recover.current} runs" if recover.current else ""
    if why_not_acting:
        return why_not_acting
    if workflow.is_over:
        return "" if recover.state == "failed" else "its recovery has not failed"
    if workflow.was_started or workflow.event.is_started:
        return "the event has started, and preparing for it is too late"
    if workflow.prepare.state != "failed":
        return "no hook of it has failed"
    return "an operator holds it; release it first" if workflow.operator_action == "hold" else ""


def answer_to(request: Request, workflow: Workflow) -> RequestAnswer:
    """The reply to the operator, after the cycle that applied the action."""
    if not is_applied(workflow, request.action):
        if request.action in ("hold", "release") and workflow.approval.state == "confirmed":
            return rejection("Azure has accepted the approval")
        return rejection("the event has just changed, or another operator was faster")
    return RequestAnswer(succeeded=True, message=_success(request, workflow))


def rejection(reason: str) -> RequestAnswer:
    """The reply to a request that is rejected."""
    return RequestAnswer(succeeded=False, message=f"rejected: {reason}")


def _success(request: Request, workflow: Workflow) -> str:
    message = wait_message(workflow, workflow.wait_reason)
    if request.action != "hold":
        reason = f": {message}" if message else ""
        return f"{ACTION_TEXTS[request.action]}: the event is {_state(workflow, 'runs')}{reason}"
    kind = workflow.wait_reason.kind if workflow.wait_reason else ""
    state = f"is {_state(workflow, 'runs to its end')}"
    if workflow.phase == "held" and kind == "prepare_failed":
        state = "stays held because preparation failed"
    elif message and kind != "held":
        state += f": {message}"
    if workflow.decision.affects == "shared":
        state += "; the other VMs that it names may still approve it"
    return f"hold: set; the event {state}"


def _state(workflow: Workflow, runs: str) -> str:
    """The event's phase, hook and approval. ``runs``: the verb for its hook, if one runs."""
    current = next((stage.current for stage in workflow.stages if stage.current), None)
    hook = f", hook {current} {runs}" if current else ""
    is_asked = workflow.approval.state != "none" and not workflow.is_over
    approval = f", approval {workflow.approval.state}" if is_asked else ""
    return f"{workflow.phase.replace('_', ' ')}{hook}{approval}"
