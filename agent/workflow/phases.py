"""Phases: one function for each, which makes the next step that is due.

The phase drives: a function looks only at what belongs to its phase, and leaves it along an arrow of
``TRANSITIONS``. From almost anywhere two things lead on: the event has started, and the event is over.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from agent.workflow.approving import plan, request_approval
from agent.workflow.gates import HELD, ask_gates
from agent.workflow.model import Context, Note, Phase, Progress, Step, Workflow, show
from agent.workflow.stages import (
    cut_short,
    next_hook,
    prepared_peers,
    run_next,
    share_hooks,
    still_needs_preparation,
    wait,
)
from agent.workflow.times import drain_end, start_of

Workflows = Mapping[str, Workflow]

_STILL_NEEDS_IT = " still needs it prepared"


def move(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    """The next step that is due; None if the workflow waits for a signal or for time."""
    if workflow.is_missing or context.document_at is None:
        return None
    match workflow.phase:
        case "recovering":
            return _recovering(workflow, workflows, context)
        case "recovery_failed":
            return _recovery_failed(workflow, workflows)
        case "closed":
            return None
        case _ if workflow.is_gone:
            return _over(workflow)
        case "started":
            return _started(workflow, workflows, context)
        case _ if workflow.event.is_started:
            return _start(workflow)
        case "waiting":
            return _waiting(workflow, context)
        case "preparing":
            return _preparing(workflow, workflows, context)
        case _ if has_more_to_prepare(workflow):
            return _prepare_more(workflow, context)
        case "prepared":
            return _prepared(workflow, context)
        case "held":
            return _held(workflow, context)
        case "approved":
            return None


# --- Before the event starts.


def _waiting(workflow: Workflow, context: Context) -> Step | None:
    if workflow.operator == "held" and context.is_acting:
        return _hold(workflow, HELD)
    return _begin_when_due(workflow, context)


def _begin_when_due(workflow: Workflow, context: Context) -> Step | None:
    decision, is_approved = workflow.decision, workflow.operator == "approved"
    is_wanted = decision.rule is not None and (decision.has_preparation or decision.approve != "never")
    if not (is_wanted or is_approved):
        return None
    if not context.is_acting:
        return wait(workflow, f"the agent only observes; it would {plan(workflow, context)}")
    start = start_of(workflow, context)
    if start.at > context.now and not is_approved and workflow.approval.state != "confirmed":
        return wait(workflow, f"begins at {show(start.at)}: {start.reason}")
    workflow = replace(workflow, begun_at=context.now)
    if not decision.has_preparation:
        return _enter(workflow, "prepared", Note(kind="prepared", text="there is nothing to prepare"))
    drain_until = drain_end(decision, workflow.event, context) if decision.drain_for else None
    drained = f"not ready for {decision.drain_for:g}s" if decision.drain_for else ""
    steps = ", ".join(filter(None, [drained, *decision.prepare])) or "nothing to run"
    workflow = replace(workflow, prepare=Progress(state="running"), drain_until=drain_until)
    return _enter(workflow, "preparing", Note(kind="preparing", text=f"preparation begins: {steps}"))


def _preparing(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    if not context.is_acting:
        return None
    if workflow.prepare.state != "running":
        return _end_preparation(workflow)
    if workflow.operator == "held" and is_to_begin(workflow):
        return None if workflow.approval.state == "confirmed" else _hold(workflow, HELD)
    step = run_next(workflow, "prepare", workflows, context)
    if step is None and workflow.approval.state == "none" and ask_gates(workflow, context).answer == "yes":
        return request_approval(workflow, context)  # by ``approve: immediately``
    return step


def _end_preparation(workflow: Workflow) -> Step:
    prepare = workflow.prepare
    if prepare.state == "succeeded":
        return _enter(workflow, "prepared", Note(kind="prepared", text="preparation is done"))
    text = f"preparation {prepare.state} ({prepare.failure})"
    is_approved = workflow.approval.state == "confirmed"
    if is_approved or (prepare.state == "failed" and workflow.decision.on_failure == "approve"):
        why = "Azure has taken the approval already" if is_approved else "the rule goes on all the same"
        return _enter(workflow, "prepared", Note(kind="prepared", text=f"{text}, and {why}"))
    return _hold(workflow, text)


def has_more_to_prepare(workflow: Workflow) -> bool:
    """Whether a new decision wants something prepared for an event that was ready, or a failed hook is retried."""
    state = workflow.prepare.state
    return state == "running" or (state == "idle" and workflow.decision.has_preparation)


def _prepare_more(workflow: Workflow, context: Context) -> Step | None:
    """In the phases prepared, held and approved."""
    if workflow.operator == "held" and context.is_acting and is_to_begin(workflow):
        if workflow.approval.state == "confirmed":
            return None if workflow.phase == "approved" else _enter(workflow, "approved")
        return wait(workflow, HELD) if workflow.phase == "held" else _hold(workflow, HELD)
    if workflow.prepare.state == "idle":
        return _begin_when_due(workflow, context)
    if not context.is_acting:
        return None
    hooks = ", ".join(hook for hook in workflow.decision.prepare if hook not in workflow.prepare.done)
    return _enter(workflow, "preparing", Note(kind="preparing", text=f"preparation goes on: {hooks}"))


def _prepared(workflow: Workflow, context: Context) -> Step | None:
    if not context.is_acting:
        return None
    if workflow.approval.state == "confirmed":
        return _enter(workflow, "approved")
    leave = ask_gates(workflow, context)
    if leave.answer == "no":
        return _hold(workflow, leave.reason)
    if workflow.approval.state == "requested":
        return None
    return request_approval(workflow, context) if leave.answer == "yes" else wait(workflow, leave.reason)


def _held(workflow: Workflow, context: Context) -> Step | None:
    if not context.is_acting:
        return None
    if workflow.approval.state == "confirmed":
        return _enter(workflow, "approved")
    leave = ask_gates(workflow, context)
    if leave.answer != "no":
        return _enter(workflow, "prepared")
    return wait(workflow, leave.reason) if workflow.approval.state == "none" else None


def may_begin(workflow: Workflow) -> bool:
    """Whether nothing was done yet, and time may let it begin."""
    if workflow.phase == "waiting":
        return True
    is_ready = workflow.phase in ("prepared", "held", "approved")
    return is_ready and workflow.prepare.state == "idle" and workflow.decision.has_preparation


def is_to_begin(workflow: Workflow) -> bool:
    """Whether a drain or a prepare hook begins next, when its time has come."""
    prepare = workflow.prepare
    is_between = prepare.state == "running" and prepare.current is None
    return may_begin(workflow) or (is_between and next_hook(workflow, "prepare") is not None)


# --- While Azure is at it.


def _start(workflow: Workflow) -> Step:
    how = "approved" if workflow.approval.state == "confirmed" else f"not approved by us, {workflow.phase}"
    note = Note(kind="started", text=f"has started ({how})")
    return _enter(replace(workflow, was_started=True), "started", note)


def _started(workflow: Workflow, workflows: Workflows, context: Context) -> Step | None:
    if not workflow.event.is_started:
        return None  # the document shows it as scheduled again: it cannot start twice
    if workflow.prepare.state == "running":
        # After a reboot nothing is prepared any more. What an operator held before the start does not begin now.
        may_finish = workflow.decision.on_early_start == "finish" and workflow.boot_id == context.boot_id
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
        return None  # what that waits for is noted already; two reasons would alternate for ever
    hooks = ", ".join(workflow.decision.on_start)
    return wait(workflow, f"the agent only observes; it would now run {hooks}")


# --- When it is over.


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
        # To recover what was not prepared does little harm; what is forgotten stays out of service for ever.
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
        return _enter(replace(workflow, waits_for=recover.failure), "recovery_failed", note)
    if recover.current is None and next_hook(workflow, "recover") is None:
        return _close(replace(workflow, recover=replace(recover, state="succeeded")))
    needed_by = _needed_by(workflow, workflows)
    if not needed_by:
        return run_next(workflow, "recover", workflows, context)
    if recover.current is not None:
        return cut_short(workflow, "recover")
    afresh = _without_what_is_undone(workflow, needed_by)
    reason = f"event {needed_by[0].event.id}{_STILL_NEEDS_IT}"
    if workflow.waits_for.endswith(_STILL_NEEDS_IT) and workflow.waits_for != reason:
        # Many events may end one by one: only the first of them is told.
        return Step(workflow=replace(afresh, waits_for=reason))
    return wait(afresh, reason) or (None if afresh is workflow else Step(workflow=afresh))


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
    """The other events that still need prepared what this one's recovery would undo."""
    peers = prepared_peers(workflow, workflows)
    return [peer for peer in peers if still_needs_preparation(peer) and share_hooks(peer, workflow)]


def _without_what_is_undone(workflow: Workflow, needed_by: list[Workflow]) -> Workflow:
    """What was recovered and is prepared again for another event has to be recovered again: all of it."""
    recover = workflow.recover
    is_undone = recover.done and any(peer.prepare.run > 0 for peer in needed_by)
    return replace(workflow, recover=replace(recover, done=())) if is_undone else workflow


def _close(workflow: Workflow) -> Step:
    by_hand = ", an operator has put its recovery right by hand" if workflow.recover.state == "resolved" else ""
    return _enter(workflow, "closed", Note(kind="closed", text=f"is over: {workflow.outcome}{by_hand}"))


def _hold(workflow: Workflow, reason: str) -> Step:
    note = Note(kind="held", text=f"held, Azure starts it at NotBefore: {reason}")
    return _enter(replace(workflow, waits_for=reason), "held", note)


def _enter(workflow: Workflow, phase: Phase, *notes: Note) -> Step:
    """The step into another phase. What the workflow waits for in it is found there, or was told by the caller."""
    waits_for = workflow.waits_for if phase in ("held", "recovery_failed") else ""
    return Step(workflow=replace(workflow, phase=phase, waits_for=waits_for), notes=notes)
