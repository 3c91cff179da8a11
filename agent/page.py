"""What the status page says of the agent and its pending events, in words.

Adds them to a Status, so that /status has them too. Knows no HTML (see web/status.js), reads nothing and knows no
clock.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from agent.status import EventSummary, HookStep, Status, activity, by_urgency, command, short_ids, words_of_use
from agent.workflow import Progress, Stage, Workflow

_APPROVALS = {
    "immediately": "wanted at once", "when-prepared": "wanted when prepared",
    "manual": "wanted when an operator says so", "never": "not from here",
}  # fmt: skip
_OPERATORS = {"": "", "approved": " An operator has approved it.", "held": " An operator holds it."}


def with_words(status: Status) -> Status:
    """The same status, with its headline and the summaries of its events."""
    headline, tone = _headline(status)
    if status.health != "ok":
        headline, tone = f"Not healthy. {headline}", "bad"
    short = short_ids([workflow.event.id for workflow in status.pending])
    summaries = tuple(
        EventSummary(
            workflow_id=workflow.id,
            activity=activity(workflow, status.running_for(workflow.id), status.at),
            approval=_approval(workflow),
            hooks=tuple(_hooks(status, workflow)),
            commands=tuple(
                command(word, short[workflow.event.id], status.command_options)
                for word in words_of_use(status, workflow)
            ),
        )
        for workflow in by_urgency(status.pending)
    )
    return replace(status, headline=headline, tone=tone, summaries=summaries)


def _headline(status: Status) -> tuple[str, str]:
    """How things are with the events, and the tone of that."""
    pending = by_urgency(status.pending)
    failed = [workflow for workflow in pending if workflow.phase == "recovery_failed"]
    held = [workflow for workflow in pending if workflow.phase == "held"]
    ours = [workflow for workflow in pending if workflow.decision.affects in ("self", "shared")]
    if failed:
        more = f", and from {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"Recovery from a {failed[0].event.type} failed{more}: {failed[0].waits_for}", "bad"
    if held:
        more = f", and {len(held) - 1} more" if len(held) > 1 else ""
        reason = f": {held[0].waits_for}" if held[0].waits_for else ""
        return f"{held[0].event.type or 'An event'} is held{more}{reason}", "bad"
    if ours:
        more = f", and {len(pending) - 1} more" if len(pending) > 1 else ""
        return f"{_course(ours[0])}{more}", "busy"
    if pending:
        return f"{len(pending)} event{'s' if len(pending) > 1 else ''} pending, none for this VM", "good"
    if status.last_poll_at is None:
        return "Azure has not answered yet", "busy"
    if status.poll_failure:
        return "Nothing was pending at the last good poll", "busy"
    return "Nothing is pending", "good"


def _course(workflow: Workflow) -> str:
    """What becomes of an event of this VM."""
    name = workflow.event.type or "event"
    if workflow.is_gone and workflow.phase not in ("recovering", "recovery_failed"):
        return f"{name} is over"
    return {
        "waiting": f"{name} is pending",
        "preparing": f"Preparing for a {name}",
        "prepared": f"Prepared for a {name}, which is not approved yet",
        "approved": f"{name} is approved and may start",
        "started": f"{name} is under way",
        "recovering": f"Recovering from a {name}",
    }.get(workflow.phase, f"{name}: {workflow.phase}")


def _approval(workflow: Workflow) -> str:
    """How far the approval is."""
    approval, decision = workflow.approval, workflow.decision
    tries = f"{approval.failures} failed so far" if approval.failures else ""
    if approval.state == "confirmed":
        text = "Azure has taken it"
    elif approval.state == "requested":
        text = f"Azure is being asked{f'; {tries}' if tries else ''}"
    elif tries:
        text = f"{tries}; the agent tries again"
    elif workflow.is_gone or workflow.was_started:
        text = "none was given from here"
    elif not decision.rule:
        text = "none: the event is only observed"
    else:
        text = _APPROVALS[decision.approve]
    return f"{text}.{_OPERATORS[workflow.operator]}"


def _hooks(status: Status, workflow: Workflow) -> Iterator[HookStep]:
    """The hooks of the event in their order."""
    decision, is_over = workflow.decision, workflow.is_gone
    running = {(hook.stage, hook.hook) for hook in status.running_for(workflow.id)}
    stages: tuple[tuple[Stage, tuple[str, ...], Progress, bool], ...] = (
        ("prepare", decision.prepare, workflow.prepare, is_over or workflow.was_started),
        ("on_start", decision.on_start, workflow.on_start, is_over),
        ("recover", decision.recover, workflow.recover, workflow.phase == "closed"),
    )
    for stage, hooks, progress, is_past in stages:
        failed = progress.failed_hook or next((hook for hook in hooks if hook not in progress.done), None)
        for hook in hooks:
            if (stage, hook) in running or progress.current == hook:
                yield HookStep(stage=stage, hook=hook, state="running")
            elif hook in progress.done:
                yield HookStep(stage=stage, hook=hook, state="done")
            elif progress.state == "failed" and hook == failed:
                yield HookStep(stage=stage, hook=hook, state="failed")
            else:
                yield HookStep(stage=stage, hook=hook, state="not_run" if is_past else "open")
