"""Makes what people and programs see: the status, and one view of an event that all output shares.

Pure: reads no file and no clock.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.status.actions import command, effect_of, offered_actions, quoted, short_ids
from scheduled_events_agent.status.attention import attention, condition, health
from scheduled_events_agent.status.facts import Facts, RunningHook
from scheduled_events_agent.status.messages import (
    activity,
    by_urgency,
    headline,
    is_ahead,
    is_held,
    shown_reason,
    wait_message,
)
from scheduled_events_agent.status.status import (
    AgentStatus,
    ApprovalView,
    EventView,
    HookState,
    HookView,
    OperatorView,
    Status,
    SuggestedCommand,
    Waits,
    WaitsFor,
)
from scheduled_events_agent.workflow import Stage, StageStatus, WaitKind, WaitReason, Workflow

_APPROVALS = {
    "immediately": "by itself, at once", "when-prepared": "by itself, when prepared", "manual": "by an operator",
}  # fmt: skip
# Of how many events the output is read.
_WITH_OUTPUT = 20
WAITS: dict[WaitKind, Waits] = {
    "time": "time", "too_early": "time", "window": "window", "window_closed": "window",
    "slot": "slot", "approval_slot": "slot", "fleet": "fleet", "same_name": "fleet",
    "staggered": "other_vms", "all_ready": "other_vms", "other_event": "other_event",
    "held": "operator", "manual": "operator", "state_lost": "operator", "prepare_failed": "operator",
    "prepare_canceled": "operator",
    "never": "policy", "shared": "policy", "lost_hook": "policy",
    "would_begin": "mode", "would_run_on_start": "mode", "observes": "mode",
    "other_run": "hook", "unprepared": "hook",
    "missing": "document", "stale": "document", "id": "document",
    "status": "azure", "recommendation": "azure",
    "other_vm": "vm",
}  # fmt: skip
"""What an event waits for, by the reason of its workflow."""


def to_status(facts: Facts) -> Status:
    """What people and programs see of the agent."""
    needs = attention(facts)
    short = short_ids([workflow.event.id for workflow in facts.workflows])
    return Status(
        **{name: getattr(facts, name) for name in AgentStatus.__struct_fields__},
        condition=condition(facts, needs),
        health=health(needs),
        attention=needs,
        headline=headline(facts, needs),
        on_clear=tuple([_running_hook(hook) for hook in facts.running_for("")]),
        events=tuple(
            [event_view(workflow, facts, short[workflow.event.id]) for workflow in by_urgency(facts.workflows)]
        ),
    )


def event_view(workflow: Workflow, facts: AgentStatus, short_id: str = "", *, is_kept: bool = False) -> EventView:
    """The event as people and programs see it.

    ``facts``: of the agent that has the workflow; without its workflows and hooks, those that run have no times.
    ``short_id``: the beginning of the event's id in commands; without it, the whole id.
    ``is_kept``: it is read later, so its texts have the date of each time.
    """
    shown_at = None if is_kept else facts.at
    event, decision = workflow.event, workflow.decision
    running = facts.running_for(workflow.id) if isinstance(facts, Facts) else ()
    return EventView(
        key=workflow.id,
        **azure_facts(event),
        seen_at=workflow.first_seen_at,
        rule=decision.rule,
        reason=decision.reason,
        affects=decision.affects,
        phase=workflow.phase,
        phase_since=workflow.phase_since or workflow.first_seen_at,
        outcome=workflow.outcome,
        ready=not workflow.is_prepared_for,
        approval=ApprovalView(
            wanted=decision.approve,
            state=workflow.approval.state,
            failures=workflow.approval.failures,
            last_error=workflow.approval.failure,
            text=_approval(facts, workflow, shown_at),
        ),
        hooks=tuple(_hooks(workflow, running)),
        waits_for=_waits_for(workflow, running, facts.at, shown_at),
        operator=_operator(workflow),
        activity=activity(workflow, running, facts.at, shown_at),
        commands=tuple(
            [
                SuggestedCommand(
                    command=command(facts.command_options, action, quoted(short_id or event.id)),
                    effect=effect_of(action, workflow),
                )
                for action in offered_actions(facts, workflow)
            ]
        ),
    )


def with_output(status: Status, load_output: Callable[[str, str, str], str]) -> Status:
    """The status with what the hooks of its most urgent events wrote.

    ``load_output`` returns it for an event's key, a stage and a hook.
    """
    events = [
        replace(
            event,
            hooks=tuple(
                [replace(hook, output=load_output(event.key, hook.stage, hook.hook)) for hook in event.hooks]
            ),
        )
        for event in status.events[:_WITH_OUTPUT]
    ]
    return replace(status, events=(*events, *status.events[_WITH_OUTPUT:]))


def azure_facts(event: ScheduledEvent) -> dict[str, Any]:
    """The fields of a view that say what Azure says."""
    return {
        "id": event.id,
        "type": event.type,
        "status": event.status,
        "source": event.source,
        "resources": event.resources,
        "not_before": event.not_before,
        "duration_seconds": event.duration_seconds,
        "description": event.description,
    }


def _waits_for(
    workflow: Workflow, running: tuple[RunningHook, ...], now: datetime, shown_at: datetime | None
) -> WaitsFor | None:
    reason = shown_reason(workflow)
    queued = [hook.hook for hook in running if hook.state == "queued"]
    if reason is None and queued:
        reason = WaitReason(kind="other_run", detail=queued[0])
    text = wait_message(workflow, reason, shown_at)
    if reason is not None:
        # The time of these is no end: since when nothing has answered, and when an acting agent would begin.
        has_end = reason.kind not in ("stale", "would_begin")
        return WaitsFor(kind=WAITS[reason.kind], until=reason.at if has_end else None, text=text)
    if workflow.phase == "recovery_failed":
        return WaitsFor(kind="operator", until=None, text=text)
    until = workflow.drain_until
    if workflow.phase == "preparing" and until is not None and until > now:
        return WaitsFor(kind="drain", until=until, text="/readyz answers 503, so that its work goes elsewhere")
    return None


def _operator(workflow: Workflow) -> OperatorView:
    """What an operator has decided, as long as it counts."""
    operator = workflow.operator
    has_hold_ended = workflow.operator_action == "hold" and not is_held(workflow)
    if operator is None or has_hold_ended:
        return OperatorView()
    return OperatorView(action=operator.action, by=operator.user, at=operator.at)


def _approval(facts: AgentStatus, workflow: Workflow, shown_at: datetime | None) -> str:
    """The state of the approval, as a phrase."""
    approval = workflow.approval
    decision = workflow.decision
    tries = f"{approval.failures} failed so far" if approval.failures else ""
    if approval.state == "confirmed":
        return "Azure has accepted it"
    if approval.state == "requested":
        return f"Azure is being asked; {tries}" if tries else "Azure is being asked"
    if workflow.event.is_recommendation:
        return "none: it would have no effect"
    if not is_ahead(workflow):
        return (
            f"{approval.failures} failed, and none is known to be accepted"
            if tries
            else "none was given by this VM"
        )
    if tries and not (is_held(workflow) or workflow.phase == "held"):
        return f"{tries}; the agent tries again"
    if decision.affects == "unknown":
        return "not before it is known whether it names this VM"
    if not decision.rule:
        return "none: the event is only observed"
    return _expected_approval(facts, workflow, shown_at)


def _expected_approval(facts: AgentStatus, workflow: Workflow, shown_at: datetime | None) -> str:
    """What is to come of an event that a rule matches, as a phrase."""
    decision = workflow.decision
    if decision.affects == "others":
        return "not by this VM, which it does not name"
    if workflow.operator_action == "approve":
        return "when prepared" if decision.has_preparation else "at once"
    not_before = workflow.event.not_before
    start = "Azure may start it at any moment"
    if not_before is not None and not_before > facts.at:
        start = f"Azure starts it at {format_time(not_before, shown_at)}"
    if decision.approve == "never":
        return f"never: {start}"
    if workflow.approval_needed_since:
        return _APPROVALS["manual"]
    if workflow.operator_action == "hold" or workflow.phase == "held":
        return f"not by itself: {start}"
    text = _APPROVALS[decision.approve]
    return f"none: the agent only observes; it would be {text}" if facts.mode == "observe" else text


def _hooks(workflow: Workflow, running: tuple[RunningHook, ...]) -> Iterator[HookView]:
    """The hooks of the event in their order."""
    decision = workflow.decision
    is_over = workflow.is_over
    by_name = {(hook.stage, hook.hook): hook for hook in running}
    stages: tuple[tuple[Stage, tuple[str, ...], StageStatus, bool], ...] = (
        ("prepare", decision.prepare, workflow.prepare, is_over or workflow.was_started),
        ("on_start", decision.on_start, workflow.on_start, is_over),
        ("recover", decision.recover, workflow.recover, workflow.phase == "closed"),
    )
    for stage, hooks, stage_status, is_past in stages:
        # It failed, or is no longer in the policy.
        last = stage_status.failed_hook or next((hook for hook in hooks if hook not in stage_status.done), "")
        for hook in hooks:
            failure = stage_status.tolerated_failures.get(hook, "")
            if hook == stage_status.failed_hook:
                failure = stage_status.failure
            if (stage, hook) in by_name:
                yield _running_hook(by_name[stage, hook], failure)
            else:
                state = _hook_state(hook, stage_status, last, is_past=is_past)
                yield HookView(stage=stage, hook=hook, state=state, failure=failure)


def _hook_state(hook: str, stage_status: StageStatus, last: str, *, is_past: bool) -> HookState:
    """How far a hook is that does not run now. ``last``: the hook with which the stage ended if it has failed."""
    if stage_status.current == hook:
        return "running"  # as far as the state file says
    if hook == last and stage_status.state in ("failed", "resolved"):
        return "failed" if stage_status.state == "failed" else "resolved"
    if hook in stage_status.tolerated_failures:
        return "failed"
    if hook in stage_status.done:
        return "done"
    return "not_run" if is_past or stage_status.state == "canceled" else "open"


def _running_hook(hook: RunningHook, failure: str = "") -> HookView:
    limit = hook.limit_seconds
    return HookView(
        stage=hook.stage,
        hook=hook.hook,
        state=hook.state,
        since=hook.since,
        until=None if limit is None else hook.since + timedelta(seconds=limit),
        failure=failure,
    )
