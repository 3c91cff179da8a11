"""Gates: each answers whether an event may be approved, or begin, now; those of the fleet are in ``fleet.py``.

All gates are asked, and the strictest answer counts. A gate that is not sure does not allow it.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from scheduled_events_agent.workflow.model import (
    Context,
    WaitKind,
    WaitReason,
    Workflow,
)
from scheduled_events_agent.workflow.timing import approval_turn_at, is_due, start_of

HELD = WaitReason(kind="held")


class GateResult(msgspec.Struct, frozen=True):
    """A gate's answer, and why it is not allow."""

    verdict: Literal["allow", "wait", "deny"]
    wait_reason: WaitReason | None = None


ALLOW = GateResult("allow")


def _deny(kind: WaitKind) -> GateResult:
    return GateResult("deny", WaitReason(kind=kind))


def _wait(kind: WaitKind) -> GateResult:
    return GateResult("wait", WaitReason(kind=kind))


Gates = tuple[Callable[[Workflow, Context], GateResult], ...]


def evaluate_gates(workflow: Workflow, context: Context, gates: Gates) -> GateResult:
    """The first of the strictest answers of all gates."""
    results = [gate(workflow, context) for gate in gates]
    for verdict in ("deny", "wait"):
        for result in results:
            if result.verdict == verdict:
                return result
    return ALLOW


def eligibility_gate(workflow: Workflow, context: Context) -> GateResult:
    """Only an acting agent may approve, and only a scheduled event of this VM. No operator can overrule this."""
    event = workflow.event
    if workflow.is_over or workflow.was_started or event.status != "Scheduled":
        return _deny("status")
    if event.affects(context.names) not in ("self", "shared"):
        return _deny("other_vm")
    if workflow.is_missing:
        return _wait("missing")
    if not context.is_acting or context.document_at is None:
        return _wait("observes")
    return ALLOW


def preparation_gate(workflow: Workflow, _: Context) -> GateResult:
    decision = workflow.decision
    prepare = workflow.prepare
    is_overruled = workflow.operator_action == "approve"
    if decision.approve == "immediately" or prepare.state == "succeeded" or not decision.has_preparation:
        return ALLOW
    if prepare.state == "failed":
        is_enough = decision.on_failure == "approve" or is_overruled
        return ALLOW if is_enough else _deny("prepare_failed")
    if prepare.state == "canceled":
        return ALLOW if is_overruled else _deny("prepare_canceled")
    return _wait("unprepared")


def id_gate(workflow: Workflow, _: Context) -> GateResult:
    return _deny("id") if workflow.event.approval_error else ALLOW


def rule_gate(workflow: Workflow, _: Context) -> GateResult:
    is_never = workflow.decision.approve == "never" and workflow.operator_action != "approve"
    return _deny("never") if is_never else ALLOW


def operator_gate(workflow: Workflow, _: Context) -> GateResult:
    if workflow.operator_action == "hold":
        return GateResult("deny", HELD)
    if workflow.decision.approve == "manual" and workflow.operator_action != "approve":
        return _wait("manual")
    return ALLOW


def not_started_gate(workflow: Workflow, context: Context) -> GateResult:
    """Its time has come; or an operator's approval, which still counts, has begun it before."""
    if workflow.phase == "waiting":
        return _wait("too_early")
    in_time = schedule_gate(workflow, context) if workflow.was_begun_early else ALLOW
    if in_time.wait_reason is None:
        return ALLOW
    kind: WaitKind = "window_closed" if in_time.wait_reason.kind == "window" else "too_early"
    return GateResult("wait", WaitReason(kind=kind, at=in_time.wait_reason.at))


def shared_event_gate(workflow: Workflow, context: Context) -> GateResult:
    """An approval counts for every VM that the event names, and not every VM may approve for all of them."""
    decision = workflow.decision
    approve_at = approval_turn_at(workflow)
    if workflow.operator_action == "approve" or decision.approve == "manual":
        return ALLOW  # an operator decides for all of them
    if not decision.can_approve_for_all:
        return _deny("shared")
    if approve_at is not None and not is_due(approve_at, context.now, decision.approve_after_seconds):
        return GateResult("wait", WaitReason(kind="staggered", at=approve_at))
    return ALLOW


def state_loss_gate(workflow: Workflow, _: Context) -> GateResult:
    if workflow.is_history_unknown and workflow.operator_action != "approve":
        return _deny("state_lost")
    return ALLOW


def schedule_gate(workflow: Workflow, context: Context) -> GateResult:
    """The time has come that the lead or the window of the event's rule gives."""
    if workflow.operator_action == "approve" or workflow.approval.state == "confirmed":
        return ALLOW
    start = start_of(workflow, context)
    is_early = start.at > context.now
    return GateResult("wait", WaitReason(kind=start.kind, at=start.at, detail=start.reason)) if is_early else ALLOW


def stale_gate(_: Workflow, context: Context) -> GateResult:
    """The event may have been canceled since the service last answered."""
    return GateResult("wait", WaitReason(kind="stale", at=context.document_at)) if context.is_stale else ALLOW


# Gates that must allow it before this VM calls itself ready. If several deny it, the first is named. First come
# those that forbid this VM ever to approve the event, then those that a person can change, then rule and operator.
LOCAL_APPROVAL_GATES: Gates = (
    eligibility_gate, preparation_gate, state_loss_gate, id_gate, rule_gate, operator_gate, not_started_gate,
    shared_event_gate,
)  # fmt: skip
