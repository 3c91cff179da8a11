"""Phases: one function for each, which makes the next step that is due.

The phase drives: a function looks only at what belongs to its phase, and leaves it along an arrow of
``TRANSITIONS``. From almost anywhere two things lead on: the event has started, and the event is over.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from scheduled_events_agent.workflow.approving import BEGIN_GATES, HELD, ask_gates, request_approval, would_begin
from scheduled_events_agent.workflow.fleet import without_slot
from scheduled_events_agent.workflow.model import Context, Note, Phase, Progress, Step, Waits, Workflow, show
from scheduled_events_agent.workflow.stages import (
    cut_short,
    next_hook,
    prepared_peers,
    run_next,
    share_hooks,
    still_needs_preparation,
    wait,
)
from scheduled_events_agent.workflow.times import drain_end, expires_at, is_due

Workflows = Mapping[str, Workflow]


def move(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    """The next step that is due; None if the workflow waits for a signal or for time."""
    if context.document_at is None:
        return None
    expiry = expires_at(workflow)
    if expiry is not None and is_due(expiry, context.now, workflow.decision.expire_after):
        return _expire(workflow)
    if workflow.is_missing and not workflow.is_expired:
        return None
    match workflow.phase:
        case "recovering":
            return _recovering(workflow, workflows, context)
        case "recovery_failed":
            return _recovery_failed(workflow, workflows)
        case "closed":
            return None
    if workflow.is_over:
        return _over(workflow)
    if workflow.phase == "started":
        return _started(workflow, workflows, context)
    if workflow.event.is_started:
        return _start(workflow)
    return _before_start(workflow, workflows, context)


# --- Before the event starts.


def _before_start(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    """In the phases waiting, preparing, prepared, held and approved."""
    is_reset = is_reset_by_reboot(workflow, context)
    if context.is_acting and workflow.operator == "held" and (is_reset or is_to_begin(workflow)):
        return _obey_hold(workflow)
    if is_reset:
        return _prepare_again(workflow, context)
    if workflow.phase == "waiting":
        return _begin_when_due(workflow, context)
    if workflow.phase == "preparing":
        return _preparing(workflow, workflows, context)
    if has_more_to_prepare(workflow):
        return _prepare_more(workflow, context)
    if workflow.phase == "approved":
        return None
    return _approve(workflow, context)


def _obey_hold(workflow: Workflow) -> Step | None:
    """Begin nothing. An approval that Azure has taken cannot be held."""
    if workflow.approval.state == "confirmed":
        return _enter(workflow, "approved") if workflow.phase in ("prepared", "held") else None
    return wait(workflow, HELD) if workflow.phase == "held" else _hold(workflow, HELD)


def _begin_when_due(workflow: Workflow, context: Context) -> Step | None:
    decision = workflow.decision
    is_approved = workflow.operator == "approved"
    is_wanted = decision.rule is not None and (decision.has_preparation or decision.approve != "never")
    if not (is_wanted or is_approved):
        return None
    if not context.is_acting:
        return wait(workflow, would_begin(workflow, context))
    leave = ask_gates(workflow, context, BEGIN_GATES)
    if leave.answer != "yes":
        return wait(workflow, leave.waits)
    alone = without_slot(workflow, context)
    notes = (Note(kind="blocked", text=alone),) if alone else ()
    workflow = replace(workflow, begun_at=context.now)
    if not decision.has_preparation:
        return _enter(workflow, "prepared", Note(kind="prepared", text="there is nothing to prepare"))
    drain_until = drain_end(decision, workflow.event, context) if decision.drain_for else None
    drained = f"not ready for {decision.drain_for:g}s" if decision.drain_for else ""
    steps = ", ".join(filter(None, [drained, *decision.prepare])) or "nothing to run"
    workflow = replace(
        workflow, prepare=Progress(state="running"), prepare_boot_id=context.boot_id, drain_until=drain_until
    )
    return _enter(workflow, "preparing", Note(kind="preparing", text=f"preparation begins: {steps}"), *notes)


def _prepare_again(workflow: Workflow, context: Context) -> Step | None:
    """From the drain and the first hook on: a reboot has undone what was prepared."""
    if not context.is_acting:
        return None
    drain_until = None
    if workflow.decision.drain_for:
        drain_until = drain_end(workflow.decision, workflow.event, context)
    begun = replace(workflow, prepare_boot_id=context.boot_id, drain_until=drain_until)
    return _enter(begun, "preparing", Note(kind="preparing", text="prepares again: the VM was restarted"))


def _preparing(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    if not context.is_acting:
        return None
    if workflow.prepare.state != "running":
        return _end_preparation(workflow)
    step = run_next(workflow, "prepare", workflows, context)
    if step is None and workflow.approval.state == "none" and ask_gates(workflow, context).answer == "yes":
        return request_approval(workflow, context)  # by ``approve: immediately``
    return step


def _end_preparation(workflow: Workflow) -> Step:
    prepare = workflow.prepare
    if prepare.state == "succeeded":
        return _enter(workflow, "prepared", Note(kind="prepared", text="preparation is done"))
    is_approved = workflow.approval.state == "confirmed"
    if is_approved or (prepare.state == "failed" and workflow.decision.on_failure == "approve"):
        why = "Azure has taken the approval already" if is_approved else "the rule goes on anyway"
        text = f"preparation {prepare.state} ({prepare.failure}), and {why}"
        return _enter(workflow, "prepared", Note(kind="prepared", text=text))
    return _hold(workflow, Waits(kind="prepare_failed" if prepare.state == "failed" else "prepare_canceled"))


def has_more_to_prepare(workflow: Workflow) -> bool:
    """Whether a new decision needs more preparation for an event that was ready, or a failed hook is retried."""
    state = workflow.prepare.state
    return state == "running" or (state == "idle" and workflow.decision.has_preparation)


def _prepare_more(workflow: Workflow, context: Context) -> Step | None:
    """In the phases prepared, held and approved."""
    if workflow.prepare.state == "idle":
        return _begin_when_due(workflow, context)
    if not context.is_acting:
        return None
    hooks = ", ".join(hook for hook in workflow.decision.prepare if hook not in workflow.prepare.done)
    return _enter(workflow, "preparing", Note(kind="preparing", text=f"preparation goes on: {hooks}"))


def _approve(workflow: Workflow, context: Context) -> Step | None:
    """In the phases prepared and held."""
    if not context.is_acting:
        return None
    if workflow.event.is_recommendation:
        return _stay_prepared(workflow)
    if workflow.approval.state == "confirmed":
        return _enter(workflow, "approved")
    leave = ask_gates(workflow, context)
    is_held = workflow.phase == "held"
    if leave.answer == "no" and not is_held:
        return _hold(workflow, leave.waits)
    if leave.answer != "no" and is_held:
        return _enter(workflow, "prepared")
    if workflow.approval.state == "requested":
        return None
    return request_approval(workflow, context) if leave.answer == "yes" else wait(workflow, leave.waits)


def _stay_prepared(workflow: Workflow) -> Step | None:
    """Until the recommendation is over; it is not approved."""
    if workflow.phase == "prepared":
        return wait(workflow, Waits(kind="recommendation", at=expires_at(workflow)))
    return None if workflow.prepare.state in ("failed", "canceled") else _enter(workflow, "prepared")


def may_begin(workflow: Workflow) -> bool:
    """Whether nothing was done yet, and time may let it begin."""
    if workflow.phase == "waiting":
        return True
    is_ready = workflow.phase in ("prepared", "held", "approved")
    return is_ready and workflow.prepare.state == "idle" and workflow.decision.has_preparation


def is_reset_by_reboot(workflow: Workflow, context: Context) -> bool:
    """Whether the preparation of an earlier boot has still to begin anew."""
    return workflow.prepare.state == "running" and workflow.prepare_boot_id != context.boot_id


def is_to_begin(workflow: Workflow) -> bool:
    """Whether a drain or a prepare hook begins next, when its time has come."""
    prepare = workflow.prepare
    is_between = prepare.state == "running" and prepare.current is None
    return may_begin(workflow) or (is_between and next_hook(workflow, "prepare") is not None)


# --- After Azure has started it.


def _start(workflow: Workflow) -> Step:
    how = "approved" if workflow.approval.state == "confirmed" else f"not approved by us, {workflow.phase}"
    note = Note(kind="started", text=f"has started ({how})")
    return _enter(replace(workflow, was_started=True), "started", note)


def _started(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    if not workflow.event.is_started:
        return None  # the document shows it as scheduled again: it cannot start twice
    if workflow.prepare.state == "running":
        # A reboot has undone what was prepared. A hold from before the start still counts.
        is_of_this_boot = workflow.prepare_boot_id == context.boot_id
        may_finish = workflow.decision.on_early_start == "finish" and is_of_this_boot
        if may_finish and not (workflow.operator == "held" and is_to_begin(workflow)):
            step = run_next(workflow, "prepare", workflows, context)
        else:
            step = cut_short(workflow, "prepare")
        if step is not None:
            return step
    if workflow.on_start.state == "running":
        return run_next(workflow, "on_start", workflows, context)
    if workflow.on_start.state != "idle" or not workflow.decision.on_start:
        return None
    if context.is_acting:
        begun = replace(workflow, on_start=Progress(state="running"))
        return run_next(begun, "on_start", workflows, context)
    if workflow.prepare.state == "running":
        return None  # its reason is noted already; two reasons would alternate for ever
    return wait(workflow, Waits(kind="would_run_on_start"))


# --- When it is over.


def _expire(workflow: Workflow) -> Step:
    text = f"has expired: it was prepared for since {show(workflow.begun_at)}"
    if workflow.prepare.state == "idle":
        text = f"has expired: it has been known since {show(workflow.first_seen_at)}"
    expired = replace(workflow, is_expired=True, outcome="expired")
    return Step(workflow=expired, notes=(Note(kind="expired", text=text),))


def _over(workflow: Workflow) -> Step | None:
    if workflow.prepare.state == "running":
        return cut_short(workflow, "prepare")
    if workflow.on_start.state == "running":
        return cut_short(workflow, "on_start")
    if workflow.prepare.state == "idle":
        has_started = workflow.was_started or workflow.event.is_started
        if not (workflow.is_doubtful and has_started and workflow.decision.recover):
            return _close(workflow)
        if not workflow.was_started:
            note = Note(kind="started", text="had started, before this VM's name was known")
            return _enter(replace(workflow, was_started=True), "started", note)
        # An unneeded recovery does little harm; a forgotten one leaves the VM out of service.
        workflow = replace(workflow, prepare=Progress(state="canceled"))
    if workflow.recover.state == "resolved":
        return _close(workflow)
    return _recover(workflow, "begins" if workflow.recover.state == "idle" else "goes on")


def _recover(workflow: Workflow, how: str) -> Step:
    recover = workflow.recover
    hooks = ", ".join(hook for hook in workflow.decision.recover if hook not in recover.done) or "nothing to run"
    note = Note(kind="recovering", text=f"recovery {how}: {hooks}")
    return _enter(replace(workflow, recover=replace(recover, state="running")), "recovering", note)


def _recovering(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    recover = workflow.recover
    if recover.state == "resolved":
        return _close(workflow)
    if recover.state == "failed":
        note = Note(kind="recovery_failed", text=f"recovery failed ({recover.failure}): retry or resolve it")
        return _enter(workflow, "recovery_failed", note)
    if recover.current is None and next_hook(workflow, "recover") is None:
        return _close(replace(workflow, recover=replace(recover, state="succeeded")))
    needed_by = _needed_by(workflow, workflows)
    if not needed_by:
        return run_next(workflow, "recover", workflows, context)
    if recover.current is not None:
        is_urgent = any(peer.event.type == "Preempt" for peer in needed_by)
        return cut_short(workflow, "recover", is_urgent=is_urgent)
    afresh = _without_what_is_undone(workflow, needed_by)
    waits = Waits(kind="other_event", detail=needed_by[0].event.id)
    if workflow.waits and workflow.waits.kind == waits.kind:
        # Many events may end one by one: only the first of them is noted.
        afresh = replace(afresh, waits=waits)
        return None if afresh == workflow else Step(workflow=afresh)
    return wait(afresh, waits)


def _recovery_failed(workflow: Workflow, workflows: Workflows) -> Step | None:
    match workflow.recover.state:
        case "resolved":
            return _close(workflow)
        case "failed":
            afresh = _without_what_is_undone(workflow, _needed_by(workflow, workflows))
            return None if afresh is workflow else Step(workflow=afresh)
        case _:
            return _recover(workflow, "goes on")


def _needed_by(workflow: Workflow, workflows: Workflows) -> list[Workflow]:
    """The other events that still need what this recovery would undo."""
    peers = prepared_peers(workflow, workflows)
    needed_by = [peer for peer in peers if still_needs_preparation(peer) and share_hooks(peer, workflow)]
    if workflow.event.is_recommendation:
        # The eviction that it warned of: this VM takes no new work before that.
        resources = workflow.event.resources
        preempts = [w for w in workflows.values() if w.event.type == "Preempt" and not w.is_gone]
        needed_by += [w for w in preempts if w not in needed_by and w.event.affects(resources) != "others"]
    return needed_by


def _without_what_is_undone(workflow: Workflow, needed_by: list[Workflow]) -> Workflow:
    """If another event has prepared again what was recovered, all of it must be recovered again."""
    if not workflow.recover.done:
        return workflow
    is_undone = any(peer.prepare.run > 0 and share_hooks(peer, workflow) for peer in needed_by)
    return replace(workflow, recover=replace(workflow.recover, done=())) if is_undone else workflow


def _close(workflow: Workflow) -> Step | None:
    if not workflow.is_gone:
        return _rest(workflow)
    by_hand = ", an operator has put its recovery right by hand" if workflow.recover.state == "resolved" else ""
    return _enter(workflow, "closed", Note(kind="closed", text=f"is over: {workflow.outcome}{by_hand}"))


def _rest(workflow: Workflow) -> Step | None:
    """Do nothing more about an expired recommendation until the document lacks it: it must not begin again."""
    if workflow.phase == "waiting":
        return wait(workflow, Waits(kind="expired"))
    return _enter(replace(workflow, prepare=Progress(), drain_until=None), "waiting")


def _hold(workflow: Workflow, waits: Waits | None) -> Step:
    return _enter(replace(workflow, waits=waits), "held", Note(kind="held", waits=waits))


def _enter(workflow: Workflow, phase: Phase, *notes: Note) -> Step:
    """The step into another phase. Only a held workflow keeps its reason; other phases find their own."""
    waits = workflow.waits if phase == "held" else None
    return Step(workflow=replace(workflow, phase=phase, waits=waits), notes=notes)
