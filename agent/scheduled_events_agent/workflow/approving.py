"""The approval: gates, the request, and its answer.

Each gate answers whether the event may be approved now. All are asked, and the strictest answer counts. When in
doubt a gate does not say yes.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.workflow.model import (
    Approval,
    ApprovalAnswered,
    Approve,
    Context,
    Note,
    Progress,
    Step,
    WaitKind,
    Waits,
    Workflow,
)
from scheduled_events_agent.workflow.times import is_due, start_of, turn_to_approve

# A failed approval is repeated after 1, 2, 4, ... seconds (2, 4, 8, ... after a 429), at most this many.
_MAX_RETRY_SECONDS = 30.0
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
    """What no operator can overrule: an acting agent may approve only a scheduled event of this VM."""
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
    """An approval covers every VM that the event names; not every VM may approve for all."""
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
    """Lead and window: its time has come."""
    if workflow.operator_action == "approve" or workflow.approval.state == "confirmed":
        return YES
    start = start_of(workflow, context)
    is_early = start.at > context.now
    return Leave("not yet", Waits(kind="time", at=start.at, detail=start.reason)) if is_early else YES


def stale_gate(_: Workflow, context: Context) -> Leave:
    """The event may have been canceled since the service last answered."""
    return Leave("not yet", Waits(kind="stale", at=context.document_at)) if context.is_stale else YES


# What must say yes before this VM calls itself ready. Of several that say no the first is named: that this VM can
# never approve the event, then what can be put right, then what a rule or an operator wants.
OWN_GATES: Gates = (
    service_gate, preparation_gate, doubt_gate, id_gate, rule_gate, operator_gate, time_gate, speaker_gate,
)  # fmt: skip


def request_approval(workflow: Workflow, context: Context) -> Step | None:
    """Ask Azure to start the event; None if an earlier try has failed and it is too early for the next one."""
    approval = workflow.approval
    if approval.retry_at is not None and not is_due(approval.retry_at, context.now, _MAX_RETRY_SECONDS):
        return None
    document_at = context.document_at
    failed_at = approval.failed_at
    if failed_at is not None and document_at is not None and document_at <= failed_at <= context.now:
        return None
    requested = replace(approval, state="requested", retry_at=None)
    is_alone = approval.failures > 0
    return Step(
        workflow=replace(workflow, approval=requested),
        effects=(Approve(workflow_id=workflow.id, event_id=workflow.event.approval_id, is_alone=is_alone),),
        notes=(Note(kind="approving", text=_reason(workflow)),),
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
    """Why only an operator can let this agent approve the event, as a clause; "" if that is not so."""
    event = workflow.event
    decision = workflow.decision
    is_ahead = event.status == "Scheduled" and not (workflow.is_over or workflow.was_started)
    if not (is_ahead and context.is_acting) or workflow.operator_action or workflow.approval.state == "confirmed":
        return ""
    if event.approval_fault or decision.rule is None or decision.affects not in ("self", "shared"):
        return ""
    if decision.approve == "manual":
        return f"rule {decision.rule} leaves it to an operator"
    if event.is_ambiguous and _would_approve(decision.rule, context):
        return "the document lists it more than once, with different contents"
    if workflow.is_doubtful and decision.approve != "never" and decision.may_speak:
        return "the state file was lost, and what was done before is not known"
    return ""


def _would_approve(rule_name: str, context: Context) -> bool:
    return any(rule.name == rule_name and rule.approve != "never" for rule in context.rules)


def would_begin(workflow: Workflow, context: Context) -> Waits:
    """What an agent that acts would do about an event for which nothing has begun."""
    start = start_of(workflow, context)
    ready = replace(workflow, phase="prepared", prepare=Progress(state="succeeded"))
    leave = ask_gates(ready, replace(context, is_acting=True), OWN_GATES)
    at = start.at if start.at > context.now else None
    return Waits(
        kind="would_begin",
        at=at,
        detail=start.reason if at else "",
        approval=leave.waits.kind if leave.waits else None,
    )


def take_answer(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Step | None:
    if workflow.approval.state != "requested":
        return None
    if not signal.error_kind:
        notes = [Note(kind="approved", text="Azure has taken the approval", addition="")]
        action = workflow.operator_action
        if action == "hold":  # while the approval was on its way
            action = ""
            notes.append(Note(kind="operator", text="the operator's hold is void: Azure has taken the approval"))
        confirmed = replace(workflow, approval=Approval(state="confirmed"), operator_action=action)
        return Step(workflow=confirmed, notes=tuple(notes))
    failures = workflow.approval.failures + 1
    # The service's limit is about a second: after a 429 the first pause is longer.
    exponent = failures if signal.error_kind == "throttled" else failures - 1
    delay = min(_MAX_RETRY_SECONDS, 2.0 ** min(exponent, 10))
    retry_at = context.now + timedelta(seconds=delay)
    since = workflow.approval.failing_since or context.now
    approval = Approval(failures=failures, failing_since=since, retry_at=retry_at, failed_at=context.now)
    text = f"approval failed ({signal.error_kind}), next try in {delay:g}s: {signal.detail}"
    note = Note(kind="approval_failed", text=text)
    return Step(workflow=replace(workflow, approval=approval), notes=(note,))
