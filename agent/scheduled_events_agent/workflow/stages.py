"""Stages: runs the hooks of prepare, on_start and recover in order, and handles hooks that events share."""

from itertools import takewhile

from msgspec.structs import replace

from scheduled_events_agent.workflow.model import (
    CancelHook,
    Context,
    HookFinished,
    Record,
    RunHook,
    Stage,
    StageStatus,
    Transition,
    WaitReason,
    Workflow,
    Workflows,
)
from scheduled_events_agent.workflow.timing import is_due, rank_of


def run_next(
    workflow: Workflow, stage: Stage, workflows: Workflows, context: Context
) -> Transition | WaitReason | None:
    """Start the stage's next hook, or end the stage. If neither is due: why it waits, or None."""
    stage_status = workflow.stage_status(stage)
    if stage_status.current is not None:
        return give_way(workflow, stage, workflows, context)
    recoveries = [p for p in other_prepared(workflow, workflows) if p.is_over and p.recover.current is not None]
    if stage == "prepare":
        drain_for = workflow.decision.drain_for
        if workflow.drain_until is not None and not is_due(workflow.drain_until, context.now, drain_for):
            return None
        if any(undoes(peer, workflow) for peer in recoveries):
            return None  # wait until that recovery is canceled: it must not run beside hooks that it would undo
    hook = next_hook(workflow, stage)
    if hook is None:
        return Transition(workflow=workflow.with_stage(stage, replace(stage_status, state="succeeded")))
    if stage != "on_start" and _has_earlier_hook(workflow, workflows):
        return None
    if stage == "recover" and any(peer.recover.current == hook for peer in recoveries):
        return None  # it runs for another event now, once for both
    if stage == "prepare" and _eviction_that_needs(hook, workflow, workflows, context):
        return WaitReason(kind="other_run", detail=hook)
    if not context.is_acting:
        return WaitReason(kind="observes")
    if stage == "recover" and hook not in context.hooks:
        # A prepare hook may fail: the event is held. A recovery that fails unnoticed leaves the VM out of service.
        return WaitReason(kind="lost_hook", detail=hook)
    stage_status = replace(stage_status, state="running", current=hook, run=stage_status.run + 1)
    return Transition(
        workflow=workflow.with_stage(stage, stage_status),
        effects=(
            RunHook(workflow_id=workflow.id, stage=stage, hook=hook, run=stage_status.run, rank=rank_of(workflow)),
        ),
        records=(Record(kind="hook_started", text=f"hook {hook} starts", stage=stage, hook=hook),),
    )


def give_way(workflow: Workflow, stage: Stage, workflows: Workflows, context: Context) -> Transition | None:
    """Cancel a serialized prepare hook if an eviction needs it; it runs again later."""
    stage_status = workflow.stage_status(stage)
    if stage != "prepare" or stage_status.current is None:
        return None
    eviction = _eviction_that_needs(stage_status.current, workflow, workflows, context)
    if eviction is None:
        return None
    return _cancel(
        workflow, stage, f"hook {stage_status.current} gives way to {eviction.event.id}", is_urgent=True
    )


def _eviction_that_needs(hook: str, workflow: Workflow, workflows: Workflows, context: Context) -> Workflow | None:
    """The Preempt whose preparation needs this hook now, if the hook is serialized."""
    if hook not in context.serialized or workflow.event.type == "Preempt":
        return None
    evictions = [other for other in workflows.values() if other.event.type == "Preempt" and not other.is_over]
    return next((one for one in evictions if _has_come_to(one, hook, context)), None)


def is_in_the_way(workflow: Workflow, stage: Stage, workflows: Workflows, context: Context) -> bool:
    """Whether an eviction waits for the end of the hook that runs: it needs it, or is the same event again."""
    hook = workflow.stage_status(stage).current
    if hook is None:
        return False
    has_returned = any(
        other.event.type == "Preempt" and not other.is_over and workflow in _earlier_appearances(other, workflows)
        for other in workflows.values()
    )
    return has_returned or _eviction_that_needs(hook, workflow, workflows, context) is not None


def _has_come_to(workflow: Workflow, hook: str, context: Context) -> bool:
    """Whether the prepare hook runs for this event, or is next and may begin."""
    prepare = workflow.prepare
    if prepare.current is not None:
        return prepare.current == hook and not prepare.is_canceling
    is_on_its_way = workflow.phase == "preparing" and prepare.state == "running" and not workflow.event.is_started
    if not is_on_its_way or workflow.operator_action == "hold" or workflow.is_missing:
        return False
    if next_hook(workflow, "prepare") != hook:
        return False
    until = workflow.drain_until
    return until is None or is_due(until, context.now, workflow.decision.drain_for)


def _has_earlier_hook(workflow: Workflow, workflows: Workflows) -> bool:
    """Whether a hook of an earlier appearance of the same event runs, or has still to end."""
    return any(
        stage_status.current is not None
        for earlier in _earlier_appearances(workflow, workflows)
        for stage_status in earlier.stages
    )


def _earlier_appearances(workflow: Workflow, workflows: Workflows) -> list[Workflow]:
    """The same event's workflows before this one, by their order: the clock may have been set back."""
    appearances = [other for other in workflows.values() if other.event.key == workflow.event.key]
    return list(takewhile(lambda other: other.id != workflow.id, appearances))


def next_hook(workflow: Workflow, stage: Stage) -> str | None:
    """The stage's first hook that is not done."""
    decision = workflow.decision
    hooks = {"prepare": decision.prepare, "on_start": decision.on_start, "recover": decision.recover}[stage]
    return next((hook for hook in hooks if hook not in workflow.stage_status(stage).done), None)


def cancel_stage(workflow: Workflow, stage: Stage, *, is_urgent: bool = False) -> Transition | None:
    """End a running stage: first the hook that runs, then the stage."""
    stage_status = workflow.stage_status(stage)
    if stage_status.current is None:
        is_untouched = stage == "prepare" and is_nothing_done(workflow)
        ended = replace(stage_status, state="idle" if is_untouched else "canceled")
        transition = Transition(workflow=workflow.with_stage(stage, ended))
        return with_void_approval(transition, "preparation was canceled") if stage == "prepare" else transition
    return _cancel(workflow, stage, f"hook {stage_status.current} is canceled", is_urgent=is_urgent)


def _cancel(workflow: Workflow, stage: Stage, text: str, *, is_urgent: bool) -> Transition | None:
    """End the hook that runs. None if it has been asked to end already, and need not end sooner."""
    stage_status = workflow.stage_status(stage)
    if stage_status.is_canceling and (stage_status.is_urgent or not is_urgent):
        return None
    return Transition(
        workflow=workflow.with_stage(stage, replace(stage_status, is_canceling=True, is_urgent=is_urgent)),
        effects=(CancelHook(workflow_id=workflow.id, stage=stage, is_urgent=is_urgent),),
        records=(Record(kind="hook_canceled", text=text, stage=stage, hook=stage_status.current or ""),),
    )


def is_nothing_done(workflow: Workflow) -> bool:
    """Whether no drain and no prepare hook has begun: then nothing needs a recovery.

    A preparation without hooks counts as done.
    """
    if workflow.prepare.state == "idle":
        return True
    return workflow.prepare.run == 0 and workflow.drain_until is None and workflow.decision.prepare != ()


def with_void_approval(transition: Transition, why: str) -> Transition:
    """Take back an operator's approval that Azure has not accepted yet: what it was for has changed since."""
    workflow = transition.workflow
    if workflow.operator_action != "approve" or workflow.approval.state == "confirmed":
        return transition
    record = Record(kind="operator", text=f"the operator's approval is void: {why}")
    return replace(transition, workflow=replace(workflow, operator=None), records=(*transition.records, record))


def with_result(stage_status: StageStatus, signal: HookFinished) -> StageStatus:
    """Apply the result of a hook that was not canceled."""
    tolerated = {hook: text for hook, text in stage_status.tolerated_failures.items() if hook != signal.hook}
    if signal.outcome != "succeeded":
        failure = f"hook {signal.hook}: {signal.detail or signal.outcome}"
        if signal.is_required and signal.stage != "on_start":
            return replace(stage_status, state="failed", failure=failure, failed_hook=signal.hook)
        tolerated[signal.hook] = failure
    if stage_status.failed_hook == signal.hook:
        stage_status = retried(stage_status)
    return replace(stage_status, done=(*stage_status.done, signal.hook), tolerated_failures=tolerated)


def retried(stage_status: StageStatus) -> StageStatus:
    return replace(stage_status, state="running", failure="", failed_hook="")


def other_prepared(workflow: Workflow, workflows: Workflows) -> list[Workflow]:
    """The other events for which something is prepared."""
    return [other for other in workflows.values() if other.id != workflow.id and other.is_prepared_for]


def still_needs_preparation(workflow: Workflow) -> bool:
    """Whether the event is not over yet, or its last prepare hook has not ended yet."""
    return not workflow.is_over or workflow.prepare.current is not None


def is_to_recover(workflow: Workflow, hook: str) -> bool:
    """Whether the hook has still to run, and may run now that the event is over."""
    is_open = hook in workflow.decision.recover and hook not in workflow.recover.done
    return is_open and not still_needs_preparation(workflow)


def undoes(recovering: Workflow, other: Workflow) -> bool:
    """Whether the recover hook that runs or is next must not run while the other event is prepared for.

    It must not if the other rule has a prepare hook of this rule, or this recover hook; or one of those before it,
    since this hook may rely on them, and the other preparation undoes them.
    """
    prepare, recover = recovering.decision.prepare, recovering.decision.recover
    hook = recovering.recover.current or next_hook(recovering, "recover")
    so_far = recover[: recover.index(hook) + 1] if hook is not None else recover
    return not {*prepare, *so_far}.isdisjoint((*other.decision.prepare, *other.decision.recover))


def without_undone_hooks(recovering: Workflow, prepared: Workflow) -> Workflow:
    """The recovery, now that a prepare hook or the drain of another event has begun.

    The recover hooks that the other rule names run again, if they are done: what they had restored is undone.
    """
    recover = recovering.recover
    done = tuple(hook for hook in recover.done if hook not in prepared.decision.recover)
    return replace(recovering, recover=replace(recover, done=done))


def can_start(workflow: Workflow) -> bool:
    """Whether nothing was done yet, and time may let it begin."""
    if workflow.phase == "waiting":
        return True
    is_ready = workflow.phase in ("prepared", "held", "approved")
    return is_ready and workflow.prepare.state == "idle" and workflow.decision.has_preparation


def needs_more_preparation(workflow: Workflow) -> bool:
    """Whether a new decision needs more preparation for an event that was ready, or a failed hook is retried."""
    state = workflow.prepare.state
    return state == "running" or (state == "idle" and workflow.decision.has_preparation)
