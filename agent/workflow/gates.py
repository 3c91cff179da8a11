"""Gates: each answers whether the event may be approved now.

All of them are asked, and the strictest answer counts. When in doubt a gate does not say yes.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from agent.workflow.model import Context, Workflow, show
from agent.workflow.times import is_due, turn_to_approve

HELD = "an operator holds it"


class Leave(msgspec.Struct, frozen=True):
    """A gate's answer."""

    answer: Literal["yes", "not yet", "no"]
    reason: str = ""


YES = Leave("yes")


def ask_gates(workflow: Workflow, context: Context) -> Leave:
    """The strictest answer of all gates."""
    answers = [gate(workflow, context) for gate in GATES]
    for word in ("no", "not yet"):
        for leave in answers:
            if leave.answer == word:
                return leave
    return YES


def service_gate(workflow: Workflow, context: Context) -> Leave:
    """What no operator can overrule: an acting agent may approve only a scheduled event of this VM."""
    event = workflow.event
    if workflow.is_gone or workflow.was_started or event.status != "Scheduled":
        status = event.status or "missing"
        return Leave("no", f"only a scheduled event can be approved, and its status is {status}")
    if event.affects(context.names) not in ("self", "shared"):
        return Leave("no", "it does not name this VM")
    if workflow.is_missing:
        return Leave("not yet", "it is not in the last document")
    if event.approval_fault:
        return Leave("no", event.approval_fault)
    if not context.is_acting or context.document_at is None:
        return Leave("not yet", "the agent only observes")
    return YES


def rule_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    decision, prepare = workflow.decision, workflow.prepare
    is_overruled = workflow.operator == "approved"
    if decision.approve == "never" and not is_overruled:
        return Leave("no", f"approve is never ({decision.reason})" if decision.rule else decision.reason)
    if decision.approve == "immediately" or prepare.state == "succeeded" or not decision.has_preparation:
        return YES
    if prepare.state == "failed":
        is_enough = decision.on_failure == "approve" or is_overruled
        return YES if is_enough else Leave("no", f"preparation failed ({prepare.failure})")
    if prepare.state == "canceled":
        return YES if is_overruled else Leave("no", "preparation was canceled")
    return Leave("not yet", "preparation is not done")


def operator_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    if workflow.operator == "held":
        return Leave("no", HELD)
    if workflow.decision.approve == "manual" and workflow.operator != "approved":
        return Leave("not yet", "an operator must approve it")
    return YES


def time_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    return Leave("not yet", "its time has not come") if workflow.phase == "waiting" else YES


def speaker_gate(workflow: Workflow, context: Context) -> Leave:
    """An approval covers every VM that the event names; not every VM may approve for all."""
    decision, turn_at = workflow.decision, turn_to_approve(workflow)
    if workflow.operator == "approved":
        return YES
    if not decision.may_speak:
        others = ", ".join(workflow.event.resources[:3])
        return Leave("no", f"it names other VMs too ({others}) and shared is {decision.shared}")
    if turn_at is not None and not is_due(turn_at, context.now, decision.speaks_after):
        return Leave("not yet", f"VMs listed before this one may approve it until {show(turn_at)}")
    return YES


def doubt_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    if workflow.is_doubtful and workflow.operator != "approved":
        return Leave("no", "the state file was lost, and what was done before is not known")
    return YES


GATES: tuple[Callable[[Workflow, Context], Leave], ...] = (
    service_gate, rule_gate, operator_gate, time_gate, speaker_gate, doubt_gate,
)  # fmt: skip
