"""Adds to the status what people see first: what needs a person, one headline, and each event in a few words."""

from collections.abc import Iterator

from msgspec.structs import replace

from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.status.actions import command, offered_actions, quoted, short_ids
from scheduled_events_agent.status.attention import attention, condition, health
from scheduled_events_agent.status.messages import activity, by_urgency, headline
from scheduled_events_agent.status.status import EventSummary, HookStep, Status
from scheduled_events_agent.workflow import Stage, StageStatus, Workflow

_APPROVALS = {
    "immediately": "by itself, at once", "when-prepared": "by itself, when prepared", "manual": "by an operator",
}  # fmt: skip
_OPERATORS = {"": "", "approve": "; an operator has approved it", "hold": "; an operator holds it"}


def with_summaries(status: Status) -> Status:
    """The status with what needs a person, its headline and the summaries of its events."""
    pending = by_urgency(status.pending)
    needs = attention(status)
    status = replace(status, attention=needs)
    short = short_ids([workflow.event.id for workflow in status.pending])
    summaries = tuple(
        EventSummary(
            workflow_id=workflow.id,
            activity=activity(workflow, status.running_for(workflow.id), status.at),
            approval=_approval(status, workflow),
            hooks=tuple(_hooks(status, workflow)),
            commands=tuple(
                command(status.command_options, action, quoted(short[workflow.event.id]))
                for action in offered_actions(status, workflow)
            ),
        )
        for workflow in pending
    )
    return replace(
        status,
        headline=headline(status),
        condition=condition(status),
        health=health(needs),
        summaries=summaries,
    )


def _approval(status: Status, workflow: Workflow) -> str:
    """The state of the approval, as a phrase."""
    approval = workflow.approval
    decision = workflow.decision
    tries = f"{approval.failures} failed so far" if approval.failures else ""
    if approval.state == "confirmed":
        text = "Azure has accepted it"
    elif approval.state == "requested":
        text = f"Azure is being asked; {tries}" if tries else "Azure is being asked"
    elif tries:
        text = f"{tries}; the agent tries again"
    elif workflow.event.is_recommendation:
        text = "none: it would have no effect"
    elif workflow.is_over or workflow.was_started:
        text = "none was given by this VM"
    elif decision.affects == "unknown":
        text = "not before it is known whether it names this VM"
    elif not decision.rule:
        text = "none: the event is only observed"
    else:
        text = _expected_approval(status, workflow)
    return f"{text}{_OPERATORS[workflow.operator_action]}"


def _expected_approval(status: Status, workflow: Workflow) -> str:
    """What is to come of an event that a rule matches, as a phrase."""
    decision = workflow.decision
    if decision.affects == "others":
        return "not by this VM, which it does not name"
    if workflow.operator_action == "approve":
        return "when prepared" if decision.has_preparation else "at once"
    not_before = workflow.event.not_before
    start = "Azure may start it at any moment"
    if not_before is not None and not_before > status.at:
        start = f"Azure starts it at {format_time(not_before, status.at)}"
    if decision.approve == "never":
        return f"never: {start}"
    if workflow.approval_needed_since:
        return _APPROVALS["manual"]
    if workflow.operator_action == "hold" or workflow.phase == "held":
        return f"not by itself: {start}"
    text = _APPROVALS[decision.approve]
    return f"none: the agent only observes; it would be {text}" if status.mode == "observe" else text


def _hooks(status: Status, workflow: Workflow) -> Iterator[HookStep]:
    """The hooks of the event in their order."""
    decision = workflow.decision
    is_over = workflow.is_over
    running = {(hook.stage, hook.hook): hook.state for hook in status.running_for(workflow.id)}
    stages: tuple[tuple[Stage, tuple[str, ...], StageStatus, bool], ...] = (
        ("prepare", decision.prepare, workflow.prepare, is_over or workflow.was_started),
        ("on_start", decision.on_start, workflow.on_start, is_over),
        ("recover", decision.recover, workflow.recover, workflow.phase == "closed"),
    )
    for stage, hooks, stage_status, is_past in stages:
        failed = stage_status.failed_hook or next((hook for hook in hooks if hook not in stage_status.done), None)
        for hook in hooks:
            if (stage, hook) in running or stage_status.current == hook:
                yield HookStep(stage=stage, hook=hook, state=running.get((stage, hook), "running"))
            elif hook in stage_status.done:
                yield HookStep(stage=stage, hook=hook, state="done")
            elif stage_status.state == "failed" and hook == failed:
                yield HookStep(stage=stage, hook=hook, state="failed")
            else:
                yield HookStep(stage=stage, hook=hook, state="not_run" if is_past else "open")
