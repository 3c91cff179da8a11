"""When a recommendation is over: it may be listed for hours, or disappear between two documents."""

from datetime import datetime, timedelta

from msgspec.structs import replace

from scheduled_events_agent.policy import names_recommendations
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.workflow.model import Context, Record, Transition, Workflow
from scheduled_events_agent.workflow.timing import is_due


def expires_at(workflow: Workflow) -> datetime | None:
    """When a recommendation counts as over, if the document still lists it then; None for other events."""
    if workflow.is_over or not workflow.event.is_recommendation:
        return None
    since = workflow.handling_since or workflow.first_seen_at
    return since + timedelta(seconds=workflow.decision.expire_after)


def why_ended(workflow: Workflow, context: Context) -> str:
    """Why a recommendation is over now, as a clause; "" if it is not, or is another event."""
    expiry = expires_at(workflow)
    if expiry is None:
        return ""
    if is_due(expiry, context.now, workflow.decision.expire_after):
        if workflow.handling_since is None:
            return f"it has been known since {format_time(workflow.first_seen_at)}"
        return f"it was prepared for since {format_time(workflow.handling_since)}"
    return "" if names_recommendations(context.rules) else "no rule names its type any more"


def end(workflow: Workflow, why: str) -> Transition:
    """End the recommendation, even if documents still list it."""
    ended = replace(workflow, is_over=True, missing_since=None, outcome="expired")
    return Transition(workflow=ended, records=(Record(kind="expired", text=f"has expired: {why}"),))
