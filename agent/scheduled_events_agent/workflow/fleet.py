"""What VMs of a group agree on: how many events they prepare for at a time, and that all of them are ready."""

from datetime import datetime, timedelta

from scheduled_events_agent.events import plain_name, plain_names
from scheduled_events_agent.policy import matches_glob
from scheduled_events_agent.workflow.model import Context, Fleet, Standing, Waits, Workflow

# Azure starts the event anyway: from then on it is prepared for without a slot.
LATEST_BEGIN = timedelta(minutes=5)
# The table may be away for this long before ``when_away: proceed`` counts: a lost answer is not yet a failure.
PATIENCE = timedelta(minutes=1)
_MOST_NAMED = 3


def workflow_id(key: str, first_seen_at: datetime) -> str:
    """Unique to this appearance of the event with this key."""
    return f"{key}@{first_seen_at:%Y%m%dT%H%M%S.%fZ}"


def fleet_key(workflow: Workflow) -> str:
    """What all VMs know the event by: the key under which it was first seen, also if its id has changed."""
    return workflow.id.rpartition("@")[0]


def needs_slot(workflow: Workflow, fleet: Fleet) -> bool:
    decision = workflow.decision
    names_us = decision.affects in ("self", "shared") and not workflow.event.is_recommendation
    return fleet.max_events is not None and names_us and decision.has_preparation


def needs_all(workflow: Workflow) -> bool:
    return workflow.decision.shared == "all-ready" and workflow.decision.affects == "shared"


def expected(workflow: Workflow, context: Context) -> list[str]:
    """Plain names of the VMs whose readiness counts, each once, in the order of Resources."""
    expect = context.fleet.expect if context.fleet else ("*",)
    mine = plain_names(context.names)
    resources = [name for name in workflow.event.resources if plain_name(name)]
    counted = [name for name in resources if matches_glob(name, expect) or plain_name(name) in mine]
    first = own_name(workflow, context)
    return list(dict.fromkeys(first if plain_name(name) in mine else plain_name(name) for name in counted))


def own_name(workflow: Workflow, context: Context) -> str:
    """What Resources call this VM, plain; "" if they do not name it."""
    mine = plain_names(context.names)
    return next((name for name in map(plain_name, workflow.event.resources) if name in mine), "")


def awaited(workflow: Workflow, context: Context) -> list[str]:
    """Plain names of the VMs that are not known to be ready now. This one too, until the table has its row."""
    fleet = context.fleet
    ready = _standing(workflow, fleet).ready if fleet and not fleet.failure else frozenset()
    return [name for name in expected(workflow, context) if name not in ready]


def awaited_others(workflow: Workflow, context: Context) -> list[str]:
    """Plain names of the other VMs that are not known to be ready now."""
    own = own_name(workflow, context)
    return [name for name in awaited(workflow, context) if name != own]


def slot_wait(workflow: Workflow, context: Context) -> Waits | None:
    """Why the event must not begin yet; None if it may."""
    fleet = context.fleet
    if fleet is None or not needs_slot(workflow, fleet) or _standing(workflow, fleet).has_slot:
        return None
    latest = latest_begin(workflow)
    if latest is None or latest <= context.now or may_proceed(fleet, context.now):
        return None
    failure = f"the table cannot be used ({fleet.failure})" if fleet.failure else ""
    detail = _standing(workflow, fleet).holder or failure
    begins_at = min(latest, proceeds_alone_at(fleet) or latest)
    return Waits(kind="slot" if detail else "table", at=begins_at, detail=detail)


def without_slot(workflow: Workflow, context: Context) -> str:
    """Why it begins although it has no slot, as a phrase; "" if it has one, or needs none."""
    fleet = context.fleet
    if fleet is None or not needs_slot(workflow, fleet) or _standing(workflow, fleet).has_slot:
        return ""
    if workflow.operator == "approved":
        why = "an operator has approved it"
    elif may_proceed(fleet, context.now):
        why = f"the table cannot be used ({fleet.failure})"
    else:
        why = "Azure may start it within 5 minutes"
    return f"it begins without a slot of the fleet: {why}"


def latest_begin(workflow: Workflow) -> datetime | None:
    """Until when it waits for a slot; None: not at all."""
    starts_at = workflow.event.starts_at
    return starts_at - LATEST_BEGIN if starts_at else None


def ready_wait(workflow: Workflow, context: Context) -> Waits | None:
    """Why it must not be approved yet for the sake of other VMs; None if it may."""
    if workflow.operator == "approved" or not needs_all(workflow):
        return None
    fleet = context.fleet
    if fleet is not None and may_proceed(fleet, context.now):
        return None
    names = awaited(workflow, context)
    if not names:
        return None
    if fleet is not None and not fleet.failure and own_name(workflow, context) in names:
        return Waits(kind="table")
    names = awaited_others(workflow, context) or names
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    failure = f"; the table cannot be used ({fleet.failure})" if fleet and fleet.failure else ""
    return Waits(kind="all_ready", detail=f"{', '.join(names[:_MOST_NAMED])}{more} to be ready{failure}")


def may_proceed(fleet: Fleet, now: datetime) -> bool:
    """Whether the table has been away for so long that this VM acts alone."""
    proceeds_at = proceeds_alone_at(fleet)
    return proceeds_at is not None and proceeds_at <= now


def proceeds_alone_at(fleet: Fleet) -> datetime | None:
    if fleet.when_away == "hold" or fleet.away_since is None:
        return None
    return fleet.away_since + PATIENCE


def _standing(workflow: Workflow, fleet: Fleet) -> Standing:
    standing = fleet.standings.get(fleet_key(workflow), Standing())
    return standing if standing.workflow == workflow.id else Standing()
