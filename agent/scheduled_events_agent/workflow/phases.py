"""Phases: one function for each phase. It makes the transition that is due, or returns the reason why none is.

The phase drives: a function looks only at what belongs to its phase, and leaves it by one of the
``ALLOWED_TRANSITIONS``. What leads away from anywhere is in ``_interrupt``.
"""

from collections.abc import Callable

from msgspec.structs import replace

from scheduled_events_agent.policy.durations import format_duration
from scheduled_events_agent.workflow import recommendations
from scheduled_events_agent.workflow.approval import request_approval, would_begin
from scheduled_events_agent.workflow.fleet import (
    Exemption,
    approval_slot_gate,
    counts_for_slots,
    exemption_message,
    fleet_gate,
    has_slot,
    slot_exemption,
    slot_gate,
)
from scheduled_events_agent.workflow.gates import (
    HELD,
    LOCAL_APPROVAL_GATES,
    GateResult,
    Gates,
    evaluate_gates,
    schedule_gate,
    stale_gate,
)
from scheduled_events_agent.workflow.model import (
    Context,
    Phase,
    Record,
    StageStatus,
    Transition,
    WaitReason,
    Workflow,
    Workflows,
)
from scheduled_events_agent.workflow.stages import (
    can_start,
    cancel_stage,
    give_way,
    is_in_the_way,
    is_nothing_done,
    needs_more_preparation,
    next_hook,
    other_prepared,
    run_next,
    still_needs_preparation,
    undoes,
)
from scheduled_events_agent.workflow.timing import drain_deadline
from scheduled_events_agent.workflow.unprepared import with_start_noted

PhaseFunction = Callable[[Workflow, Workflows, Context], Transition | WaitReason | None]
"""Returns the transition that is due. If none is: the reason why the workflow waits.

Without a transition and without a reason, a hook, a drain, an approval or Azure is at work.
"""

APPROVAL_GATES: Gates = (*LOCAL_APPROVAL_GATES, fleet_gate, stale_gate, approval_slot_gate)
PREPARE_GATES: Gates = (schedule_gate, slot_gate)


def evaluate_approval_gates(workflow: Workflow, context: Context) -> GateResult:
    """Whether the event may be approved now."""
    return evaluate_gates(workflow, context, APPROVAL_GATES)


def gate_results(workflow: Workflow, context: Context) -> dict[str, GateResult]:
    """The answer of each gate that matters for the event's next transition, by the gate's name."""
    gates: Gates = PREPARE_GATES if workflow.phase == "waiting" else ()
    if workflow.phase in ("waiting", "preparing", "prepared", "held") and not workflow.event.is_recommendation:
        gates += APPROVAL_GATES
    return {gate.__name__.removesuffix("_gate"): gate(workflow, context) for gate in gates}


def next_transition(workflow: Workflow, workflows: Workflows, context: Context) -> Transition | WaitReason | None:
    """Make the transition that is due, or return the reason why the workflow waits; see ``PhaseFunction``."""
    next_move = _interrupt(workflow, context) or _PHASES[workflow.phase]
    return next_move(workflow, workflows, context)


def _interrupt(workflow: Workflow, context: Context) -> PhaseFunction | None:
    """The function that moves the workflow instead of its phase's own function; None if there is none."""
    if context.document_at is None:
        return _stay
    if recommendations.why_ended(workflow, context):
        return _expire
    if workflow.is_missing:
        return _wait_while_missing
    if workflow.phase in ("recovering", "recovery_failed", "closed"):
        return None
    if workflow.is_over:
        return _over
    if workflow.phase == "started":
        return None
    return _start if workflow.event.is_started else _interrupt_before_start(workflow, context)


def _interrupt_before_start(workflow: Workflow, context: Context) -> PhaseFunction | None:
    """In the phases waiting, preparing, prepared, held and approved."""
    if not context.is_acting:
        return _observe
    is_reset = is_reset_by_reboot(workflow, context)
    if workflow.operator_action == "hold" and (is_reset or starts_next(workflow)):
        return _apply_hold
    return _prepare_again if is_reset else None


# --- Reasons to leave a phase.


def _stay(workflow: Workflow, _workflows: Workflows, _context: Context) -> WaitReason | None:
    """Nothing moves before the first document."""
    return workflow.wait_reason


def _expire(workflow: Workflow, _: Workflows, context: Context) -> Transition:
    return recommendations.end(workflow, recommendations.why_ended(workflow, context))


def _wait_while_missing(workflow: Workflow, workflows: Workflows, context: Context) -> Transition | WaitReason:
    """Wait for the next document, which shows whether the event is over. An eviction may need the running hook."""
    return give_way(workflow, "prepare", workflows, context) or WaitReason(kind="missing")


def _observe(workflow: Workflow, _: Workflows, context: Context) -> WaitReason | None:
    """Do nothing, and return what would be done."""
    if not can_start(workflow):
        return WaitReason(kind="observes")
    return would_begin(workflow, context) if _is_wanted(workflow) else None


def _apply_hold(workflow: Workflow, _workflows: Workflows, _context: Context) -> Transition | WaitReason | None:
    """Begin nothing. An approval that Azure has accepted cannot be held."""
    if workflow.approval.state == "confirmed":
        return _enter(workflow, "approved") if workflow.phase in ("prepared", "held") else None
    return HELD if workflow.phase == "held" else _hold(workflow, HELD)


def _prepare_again(workflow: Workflow, _: Workflows, context: Context) -> Transition:
    """Prepare again from the drain and the first hook on: a reboot has undone what was prepared."""
    drain_until = None
    if workflow.decision.drain_for:
        drain_until = drain_deadline(workflow.decision, workflow.event, context)
    begun = replace(workflow, prepare_boot_id=context.boot_id, drain_until=drain_until)
    return _enter(begun, "preparing", Record(kind="preparing", text="prepares again: the VM was restarted"))


# --- Before the event starts.


def _waiting(workflow: Workflow, _: Workflows, context: Context) -> Transition | WaitReason | None:
    return _begin_when_due(workflow, context)


def _is_wanted(workflow: Workflow) -> bool:
    """Whether a rule or an operator wants something done before the event starts."""
    decision = workflow.decision
    is_wanted_by_rule = decision.rule is not None and (decision.has_preparation or decision.approve != "never")
    return is_wanted_by_rule or workflow.operator_action == "approve"


def _begin_when_due(workflow: Workflow, context: Context) -> Transition | WaitReason | None:
    if not _is_wanted(workflow):
        return None
    decision = workflow.decision
    result = evaluate_gates(workflow, context, PREPARE_GATES)
    if result.verdict != "allow":
        return result.wait_reason
    exemption = _begins_without_slot_for(workflow, context)
    is_early = schedule_gate(replace(workflow, operator=None), context).verdict != "allow"
    workflow = replace(
        workflow, handling_since=context.now, was_begun_early=is_early, lacks_slot=exemption == "late"
    )
    if not decision.has_preparation:
        return _enter(workflow, "prepared", Record(kind="prepared", text="there is nothing to prepare"))
    drain_until = drain_deadline(decision, workflow.event, context) if decision.drain_for else None
    drained = f"not ready for {format_duration(decision.drain_for)}" if decision.drain_for else ""
    steps = ", ".join(filter(None, [drained, *decision.prepare])) or "nothing to run"
    why = exemption_message(exemption, context)
    text = f"it begins without a slot of the fleet: {why}"
    records = (Record(kind="without_slot", text=text, detail=exemption),) if exemption else ()
    workflow = replace(
        workflow, prepare=StageStatus(state="running"), prepare_boot_id=context.boot_id, drain_until=drain_until
    )
    return _enter(workflow, "preparing", Record(kind="preparing", text=f"preparation begins: {steps}"), *records)


def _begins_without_slot_for(workflow: Workflow, context: Context) -> Exemption:
    """Why its event, which begins now, has no slot; "" if it has one, or needs none."""
    is_counted = counts_for_slots(workflow, context) and not has_slot(workflow, context)
    return slot_exemption(workflow, context) if is_counted else ""


def _preparing(workflow: Workflow, workflows: Workflows, context: Context) -> Transition | WaitReason | None:
    if workflow.prepare.state != "running":
        return _end_preparation(workflow)
    transition = run_next(workflow, "prepare", workflows, context)
    if (
        transition is None
        and workflow.approval.state == "none"
        and evaluate_approval_gates(workflow, context).verdict == "allow"
    ):
        return request_approval(workflow, context)  # by ``approve: immediately``
    return transition


def _end_preparation(workflow: Workflow) -> Transition:
    prepare = workflow.prepare
    if prepare.state == "succeeded":
        return _enter(workflow, "prepared", Record(kind="prepared", text="preparation is done", addition=""))
    is_approved = workflow.approval.state == "confirmed"
    if is_approved or (prepare.state == "failed" and workflow.decision.on_failure == "approve"):
        why = "Azure has accepted the approval already" if is_approved else "the rule goes on anyway"
        text = f"preparation {prepare.state} ({prepare.failure}), and {why}"
        return _enter(workflow, "prepared", Record(kind="prepared", text=text))
    return _hold(workflow, _why_unprepared(workflow))


def _why_unprepared(workflow: Workflow) -> WaitReason:
    return WaitReason(kind="prepare_failed" if workflow.prepare.state == "failed" else "prepare_canceled")


def _prepared_or_held(workflow: Workflow, _: Workflows, context: Context) -> Transition | WaitReason | None:
    return _prepare_more(workflow, context) if needs_more_preparation(workflow) else _approve(workflow, context)


def _approved(workflow: Workflow, _: Workflows, context: Context) -> Transition | WaitReason | None:
    return _prepare_more(workflow, context) if needs_more_preparation(workflow) else None


def _prepare_more(workflow: Workflow, context: Context) -> Transition | WaitReason | None:
    """In the phases prepared, held and approved."""
    if workflow.prepare.state == "idle":
        return _begin_when_due(workflow, context)
    hooks = ", ".join(hook for hook in workflow.decision.prepare if hook not in workflow.prepare.done)
    more = hooks or "not ready for longer"
    return _enter(workflow, "preparing", Record(kind="preparing", text=f"preparation goes on: {more}"))


def _approve(workflow: Workflow, context: Context) -> Transition | WaitReason | None:
    """In the phases prepared and held."""
    if workflow.event.is_recommendation:
        return _stay_prepared(workflow)
    if workflow.approval.state == "confirmed":
        return _enter(workflow, "approved")
    result = evaluate_approval_gates(workflow, context)
    is_held = workflow.phase == "held"
    if result.verdict == "deny" and not is_held:
        return _hold(workflow, result.wait_reason)
    if result.verdict != "deny" and is_held:
        return _enter(workflow, "prepared")
    if workflow.approval.state == "requested":
        return result.wait_reason if is_held else None
    return request_approval(workflow, context) if result.verdict == "allow" else result.wait_reason


def _stay_prepared(workflow: Workflow) -> Transition | WaitReason:
    """Stay prepared until the recommendation is over; it is not approved."""
    if workflow.prepare.state in ("failed", "canceled"):
        return _why_unprepared(workflow)
    if workflow.phase == "held":
        return _enter(workflow, "prepared")
    return WaitReason(kind="recommendation", at=recommendations.expires_at(workflow))


def is_reset_by_reboot(workflow: Workflow, context: Context) -> bool:
    """Whether the preparation of an earlier boot has still to begin anew."""
    return workflow.prepare.state == "running" and workflow.prepare_boot_id != context.boot_id


def starts_next(workflow: Workflow) -> bool:
    """Whether a drain or a prepare hook begins next, when its time has come."""
    prepare = workflow.prepare
    is_between = prepare.state == "running" and prepare.current is None
    return can_start(workflow) or (is_between and next_hook(workflow, "prepare") is not None)


# --- After Azure has started it.


def _start(workflow: Workflow, _workflows: Workflows, context: Context) -> Transition:
    how = "approved" if workflow.approval.state == "confirmed" else f"not approved by us, {workflow.phase}"
    record = Record(kind="started", text=f"has started ({how})", addition=how)
    return with_start_noted(_enter(replace(workflow, was_started=True), "started", record), context)


def _started(workflow: Workflow, workflows: Workflows, context: Context) -> Transition | WaitReason | None:
    if not workflow.event.is_started:
        # The document shows it as scheduled again: it cannot start twice. An eviction may need the running hook.
        return give_way(workflow, "prepare", workflows, context)
    if workflow.prepare.state == "running":
        # A reboot has undone what was prepared. A hold from before the start still counts.
        is_of_this_boot = workflow.prepare_boot_id == context.boot_id
        may_finish = workflow.decision.on_early_start == "finish" and is_of_this_boot
        if may_finish and not (workflow.operator_action == "hold" and starts_next(workflow)):
            transition = run_next(workflow, "prepare", workflows, context)
        else:
            is_urgent = is_in_the_way(workflow, "prepare", workflows, context)
            transition = cancel_stage(workflow, "prepare", is_urgent=is_urgent)
        if transition is not None:
            return transition
    if workflow.on_start.state == "running":
        return run_next(workflow, "on_start", workflows, context)
    if workflow.on_start.state != "idle" or not workflow.decision.on_start:
        return None
    if context.is_acting:
        begun = replace(workflow, on_start=StageStatus(state="running"))
        return run_next(begun, "on_start", workflows, context)
    return WaitReason(kind="would_run_on_start")


# --- When it is over.


def _over(workflow: Workflow, workflows: Workflows, context: Context) -> Transition | None:
    if workflow.prepare.state == "running":
        is_urgent = is_in_the_way(workflow, "prepare", workflows, context)
        return cancel_stage(workflow, "prepare", is_urgent=is_urgent)
    if workflow.on_start.state == "running":
        is_urgent = is_in_the_way(workflow, "on_start", workflows, context)
        return cancel_stage(workflow, "on_start", is_urgent=is_urgent)
    if is_nothing_done(workflow):
        has_started = workflow.was_started or workflow.event.is_started
        if not (workflow.is_history_unknown and has_started and workflow.decision.recover):
            return _close(workflow)
        if not workflow.was_started:
            record = Record(kind="started", text="had started, before this VM's name was known")
            return _enter(replace(workflow, was_started=True), "started", record)
        # An unneeded recovery does little harm; a forgotten one leaves the VM out of service.
        workflow = replace(workflow, prepare=StageStatus(state="canceled", run=1))
    if workflow.recover.state == "resolved":
        return _close(workflow)
    return _recover(workflow, "begins" if workflow.recover.state == "idle" else "goes on")


def _recover(workflow: Workflow, how: str) -> Transition:
    recover = workflow.recover
    hooks = ", ".join(hook for hook in workflow.decision.recover if hook not in recover.done) or "nothing to run"
    record = Record(kind="recovering", text=f"recovery {how}: {hooks}")
    return _enter(replace(workflow, recover=replace(recover, state="running")), "recovering", record)


def _recovering(workflow: Workflow, workflows: Workflows, context: Context) -> Transition | WaitReason | None:
    recover = workflow.recover
    if recover.state == "resolved":
        return _close(workflow)
    if recover.state == "failed":
        text = f"recovery failed ({recover.failure}): retry or resolve it"
        record = Record(kind="recovery_failed", text=text, addition=recover.failure)
        return _enter(workflow, "recovery_failed", record)
    if recover.current is None and next_hook(workflow, "recover") is None:
        return _close(replace(workflow, recover=replace(recover, state="succeeded")))
    needed_by = _dependents(workflow, workflows)
    if not needed_by:
        return run_next(workflow, "recover", workflows, context)
    if recover.current is not None:
        is_urgent = any(peer.event.type == "Preempt" for peer in needed_by)
        return cancel_stage(workflow, "recover", is_urgent=is_urgent)
    return WaitReason(kind="other_event", detail=needed_by[0].event.id)


def _recovery_failed(workflow: Workflow, _workflows: Workflows, _context: Context) -> Transition | None:
    match workflow.recover.state:
        case "resolved":
            return _close(workflow)
        case "failed":
            return None
        case _:
            return _recover(workflow, "goes on")


def _closed(_workflow: Workflow, _workflows: Workflows, _context: Context) -> None:
    """Nothing is due any more."""


def _dependents(workflow: Workflow, workflows: Workflows) -> list[Workflow]:
    """The other events that still need what the next recover hook would undo."""
    peers = other_prepared(workflow, workflows)
    needed_by = [peer for peer in peers if still_needs_preparation(peer) and undoes(workflow, peer)]
    if workflow.event.is_recommendation:
        # The eviction that the recommendation warned of: this VM gets no new work before that eviction.
        resources = workflow.event.resources
        preempts = [w for w in workflows.values() if w.event.type == "Preempt" and not w.is_over]
        needed_by += [w for w in preempts if w not in needed_by and w.event.affects(resources) != "others"]
    return needed_by


def _close(workflow: Workflow) -> Transition:
    repaired = "resolved by an operator" if workflow.recover.state == "resolved" else ""
    text = ", ".join(filter(None, [f"is over: {workflow.outcome}", repaired]))
    record = Record(kind="closed", text=text, addition=repaired)
    return _enter(replace(workflow, wait_reason=None), "closed", record)


def _hold(workflow: Workflow, reason: WaitReason | None) -> Transition:
    return _enter(replace(workflow, wait_reason=reason), "held", Record(kind="held", wait_reason=reason))


def _enter(workflow: Workflow, phase: Phase, *records: Record) -> Transition:
    return Transition(workflow=replace(workflow, phase=phase), records=records)


_PHASES: dict[Phase, PhaseFunction] = {
    "waiting": _waiting,
    "preparing": _preparing,
    "prepared": _prepared_or_held,
    "held": _prepared_or_held,
    "approved": _approved,
    "started": _started,
    "recovering": _recovering,
    "recovery_failed": _recovery_failed,
    "closed": _closed,
}
