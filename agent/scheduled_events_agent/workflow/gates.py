"""The approval: gates, the request, and its answer.

Each gate answers whether the event may be approved now. All gates are asked, and the strictest answer counts. A
gate that is not sure does not say yes.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from scheduled_events_agent.workflow.model import (
    Context,
    WaitKind,
    Waits,
    Workflow,
)
from scheduled_events_agent.workflow.timing import is_due, start_of, turn_to_approve

HELD = Waits(kind="held")


class Leave(msgspec.Struct, frozen=True):
    """A gate's answer, and why it is not yes."""

    answer: Literal["yes", "not yet", "no"]
    waits: Waits | None = None


YES = Leave("yes")


def _no(kind: WaitKind) -> Leave:
    return Leave("no", Waits(kind=kind))


def _not_yet(kind: WaitKind) -> Leave:
    return Leave("not yet", Waits(kind=kind))


Gates = tuple[Callable[[Workflow, Context], Leave], ...]


def ask_gates(workflow: Workflow, context: Context, gates: Gates) -> Leave:
    """The first of the strictest answers of all gates."""
    answers = [gate(workflow, context) for gate in gates]
    for word in ("no", "not yet"):
        for leave in answers:
            if leave.answer == word:
                return leave
    return YES


def service_gate(workflow: Workflow, context: Context) -> Leave:
    """Only an acting agent may approve, and only a scheduled event of this VM. No operator can overrule this."""
    event = workflow.event
    if workflow.is_over or workflow.was_started or event.status != "Scheduled":
        return _no("status")
    if event.affects(context.names) not in ("self", "shared"):
        return _no("not_ours")
    if workflow.is_missing:
        return _not_yet("missing")
    if not context.is_acting or context.document_at is None:
        return _not_yet("observes")
    return YES


def preparation_gate(workflow: Workflow, _: Context) -> Leave:
    decision = workflow.decision
    prepare = workflow.prepare
    is_overruled = workflow.operator_action == "approve"
    if decision.approve == "immediately" or prepare.state == "succeeded" or not decision.has_preparation:
        return YES
    if prepare.state == "failed":
        is_enough = decision.on_failure == "approve" or is_overruled
        return YES if is_enough else _no("prepare_failed")
    if prepare.state == "canceled":
        return YES if is_overruled else _no("prepare_canceled")
    return _not_yet("unprepared")


def id_gate(workflow: Workflow, _: Context) -> Leave:
    return _no("id") if workflow.event.approval_fault else YES


def rule_gate(workflow: Workflow, _: Context) -> Leave:
    is_never = workflow.decision.approve == "never" and workflow.operator_action != "approve"
    return _no("never") if is_never else YES


def operator_gate(workflow: Workflow, _: Context) -> Leave:
    if workflow.operator_action == "hold":
        return Leave("no", HELD)
    if workflow.decision.approve == "manual" and workflow.operator_action != "approve":
        return _not_yet("manual")
    return YES


def time_gate(workflow: Workflow, _: Context) -> Leave:
    return _not_yet("too_early") if workflow.phase == "waiting" else YES


def speaker_gate(workflow: Workflow, context: Context) -> Leave:
    """An approval counts for every VM that the event names, and not every VM may approve for all of them."""
    decision = workflow.decision
    turn_at = turn_to_approve(workflow)
    if workflow.operator_action == "approve":
        return YES
    if not decision.may_speak:
        return _no("shared")
    if turn_at is not None and not is_due(turn_at, context.now, decision.speaks_after):
        return Leave("not yet", Waits(kind="earlier_vms", at=turn_at))
    return YES


def doubt_gate(workflow: Workflow, _: Context) -> Leave:
    if workflow.is_doubtful and workflow.operator_action != "approve":
        return _no("doubt")
    return YES


def start_gate(workflow: Workflow, context: Context) -> Leave:
    """The time has come that the lead or the window of the event's rule gives."""
    if workflow.operator_action == "approve" or workflow.approval.state == "confirmed":
        return YES
    start = start_of(workflow, context)
    is_early = start.at > context.now
    return Leave("not yet", Waits(kind="time", at=start.at, detail=start.reason)) if is_early else YES


def stale_gate(_: Workflow, context: Context) -> Leave:
    """The event may have been canceled since the service last answered."""
    return Leave("not yet", Waits(kind="stale", at=context.document_at)) if context.is_stale else YES


# Gates that must say yes before this VM calls itself ready. If several say no, the first one is named. First come
# those that forbid this VM ever to approve the event, then those that a person can change, then rule and operator.
OWN_GATES: Gates = (
    service_gate, preparation_gate, doubt_gate, id_gate, rule_gate, operator_gate, time_gate, speaker_gate,
)  # fmt: skip
