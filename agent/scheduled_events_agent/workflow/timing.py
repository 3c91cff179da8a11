"""Times of a workflow: when it begins, how long it drains, when its hooks must have ended."""

from datetime import datetime, timedelta

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision, StartTime, drain_seconds
from scheduled_events_agent.workflow.model import Context, Rank, Stage, Workflow

_URGENT_TYPES = {"Preempt": 0, "Terminate": 1}


def is_due(at: datetime, now: datetime, longest_seconds: float) -> bool:
    """Whether ``at`` has come, or is farther away than it can be."""
    if at <= now:
        return True
    return at > now + timedelta(seconds=longest_seconds)  # the clock was set back


def start_of(workflow: Workflow, context: Context) -> StartTime:
    """When the handling of the event begins, and why not earlier."""
    return workflow.decision.start(workflow.event, context.now, needed_seconds(workflow.decision, context))


def early_until(workflow: Workflow, context: Context) -> datetime | None:
    """When the event would begin, if it is prepared already; None if it is not too early for that.

    NotBefore may have moved since, or an operator may have begun the event and then released it.
    """
    is_ahead = not (workflow.is_over or workflow.was_started or workflow.event.is_started)
    if not (is_ahead and workflow.is_prepared_for):
        return None
    start_at = start_of(workflow, context).at
    return start_at if start_at > context.now else None


def needed_seconds(decision: Decision, context: Context) -> float:
    """How long before NotBefore the preparation must begin so that no hook is cut short."""
    hooks = sum(context.hook_seconds.get(hook, 0.0) for hook in decision.prepare)
    return decision.drain_for + hooks + context.reserve


def drain_deadline(decision: Decision, event: ScheduledEvent, context: Context) -> datetime:
    """When a drain that begins now ends. With little notice it is cut, to half of that notice at least."""
    drain = decision.drain_for
    if event.starts_at is not None:
        left = (event.starts_at - context.now).total_seconds()
        hooks = needed_seconds(decision, context) - drain if decision.prepare else 0.0
        drain = drain_seconds(drain, left, hooks)
    return context.now + timedelta(seconds=drain)


def rank_of(workflow: Workflow) -> Rank:
    """How urgent its hooks are: evictions first, then terminations, then by NotBefore, then by first sight."""
    event = workflow.event
    kind = 3 if workflow.is_over else _URGENT_TYPES.get(event.type, 2)
    not_before = event.not_before.timestamp() if event.not_before else 0.0
    return kind, not_before, workflow.first_seen_at.timestamp()


def approval_turn_at(workflow: Workflow) -> datetime | None:
    """When this VM approves even if the VMs listed before it have not; None if it need not wait for them."""
    seconds = workflow.decision.approve_after_seconds
    return workflow.handling_since + timedelta(seconds=seconds) if seconds and workflow.handling_since else None


def hook_deadline_at(workflow: Workflow, stage: Stage, reserve_seconds: float, now: datetime) -> datetime | None:
    """When a hook that starts now must have ended; None if only its own time limit counts.

    Prepare hooks end ``reserve_seconds`` before NotBefore. If that is less than a second away, they have until
    NotBefore; after it the event may start at any moment, and they are tried anyway.
    """
    not_before = workflow.event.starts_at
    if stage != "prepare" or not_before is None:
        return None
    for seconds in (reserve_seconds, 0.0):
        left = not_before - now - timedelta(seconds=seconds)  # a NotBefore may be the first moment of a datetime
        if left > timedelta(seconds=1):
            return now + left
    return None
