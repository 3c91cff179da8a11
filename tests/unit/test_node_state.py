"""What a node's conditions say of its events, row by row, and what is written for it."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from scheduled_events_agent.imds.document import EVENT_TYPES, Affects, ScheduledEvent
from scheduled_events_agent.kubernetes.conditions import (
    UNCORDONED,
    Condition,
    NodeState,
    WantedCondition,
    changes,
    drain_begins,
    drain_ended,
    node_state,
    withdrawn,
    without_killed_drain,
)
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.workflow import Phase, Workflow

NOW = datetime(2026, 11, 24, 11, 45, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5, microseconds=123456)
ID = "602D9444-D2CD-49C7-8624-8643E7171297"


def a_workflow(
    type_: str = "Reboot",
    *,
    event_id: str = ID,
    affects: Affects = "self",
    minutes: int | None = 15,
    **changed: Any,
) -> Workflow:
    of_event = {key: changed.pop(key) for key in ("status", "source") if key in changed}
    event = ScheduledEvent(
        id=event_id,
        type=type_,
        status=of_event.get("status", "Scheduled"),
        source=of_event.get("source", "Platform"),
        resources=("vm-1",),
        not_before=None if minutes is None else NOW + timedelta(minutes=minutes),
    )
    workflow = Workflow(
        id=f"{event_id}@1",
        event=event,
        decision=Decision(rule="r", reason="", affects=affects, approve="when-prepared"),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot-1",
    )
    return replace(workflow, **changed)


def told(*workflows: Workflow, **options: Any) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    state = node_state(workflows, options.pop("polls", "current"), has_lifecycle=True, **options)
    return {one.type: (one.status, one.reason) for one in state.conditions}


def message(*workflows: Workflow) -> str:
    (condition,) = node_state(workflows, "current").conditions
    return condition.message


NOTHING = {
    "ScheduledEvent": ("False", "NoScheduledEvent"),
    "MaintenancePlanned": ("False", "NoScheduledEvent"),
    "MaintenanceInProgress": ("False", "NoScheduledEvent"),
}
PLANNED = {"MaintenancePlanned": ("True", "ScheduledEvent")}
IN_PROGRESS = {"MaintenanceInProgress": ("True", "ScheduledEvent")}


@pytest.mark.parametrize("type_", EVENT_TYPES)
def test_an_event_of_each_type_is_scheduled_then_started(type_: str) -> None:
    assert told(a_workflow(type_))["ScheduledEvent"] == ("True", f"{type_}Scheduled")
    started = told(a_workflow(type_, status="Started", minutes=None))["ScheduledEvent"]
    is_recommendation = type_ == "SpotRebalanceRecommendation"  # which never starts
    assert started == ("True", f"{type_}Scheduled" if is_recommendation else f"{type_}Started")


ROWS: dict[str, tuple[tuple[Workflow, ...], dict[str, tuple[str, str]]]] = {
    "no event": ((), {}),
    "scheduled": ((a_workflow(),), {"ScheduledEvent": ("True", "RebootScheduled"), **PLANNED}),
    "scheduled, of several VMs": (
        (a_workflow(affects="shared"),), {"ScheduledEvent": ("True", "RebootScheduled"), **PLANNED}
    ),
    "of other VMs": ((a_workflow(affects="others"),), {}),
    "of no known VM": ((a_workflow(affects="unknown"),), {}),
    "started": (
        (a_workflow(status="Started", phase="started", was_started=True),),
        {"ScheduledEvent": ("True", "RebootStarted"), **IN_PROGRESS},
    ),
    "started, then over, recovers": (
        (a_workflow(status="Started", phase="recovering", was_started=True, is_over=True),), IN_PROGRESS
    ),
    "started, then over, not recovered": (
        (a_workflow(status="Started", phase="recovery_failed", was_started=True, is_over=True),), IN_PROGRESS
    ),
    "canceled, recovers": ((a_workflow(phase="recovering", is_over=True),), {}),
    "missing in one document": (
        (a_workflow(missing_since=NOW),), {"ScheduledEvent": ("True", "RebootScheduled"), **PLANNED}
    ),
    "a recommendation": (
        (a_workflow("SpotRebalanceRecommendation"),),
        {"ScheduledEvent": ("True", "SpotRebalanceRecommendationScheduled")},
    ),
    "of no known type": ((a_workflow("Meteor"),), {"ScheduledEvent": ("True", "OtherScheduled"), **PLANNED}),
    "one started, one scheduled sooner": (
        (
            a_workflow(status="Started", minutes=None, was_started=True),
            a_workflow("Freeze", event_id="B"),
        ),
        {"ScheduledEvent": ("True", "FreezeScheduled"), **PLANNED, **IN_PROGRESS},
    ),
    "one over, one scheduled": (
        (a_workflow(phase="recovery_failed", is_over=True), a_workflow("Freeze", event_id="B")),
        {"ScheduledEvent": ("True", "FreezeScheduled"), **PLANNED},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_each_row(row: str) -> None:
    workflows, expected = ROWS[row]
    assert told(*workflows) == {**NOTHING, **expected}


def test_without_polls_the_event_is_unknown_and_before_the_first_nothing_is_told() -> None:
    for workflows in ((), (a_workflow(),)):
        unknown = told(*workflows, polls="overdue")
        assert unknown["ScheduledEvent"] == ("Unknown", "MetadataServiceUnavailable")
        assert told(*workflows, polls="none_yet") == {}
    assert unknown["MaintenancePlanned"] == ("True", "ScheduledEvent"), "what was seen still counts"


def test_each_half_can_be_off() -> None:
    assert [one.type for one in node_state((), "current").conditions] == ["ScheduledEvent"]
    lifecycle = node_state((), "current", has_condition=False, has_lifecycle=True)
    assert [one.type for one in lifecycle.conditions] == ["MaintenancePlanned", "MaintenanceInProgress"]
    assert node_state((a_workflow(),), "current", has_condition=False) == NodeState()


def test_the_message_names_the_first_event_as_status_does() -> None:
    preparing = a_workflow(phase="preparing")
    assert message(preparing) == "Reboot 602D9444 from Platform, not before 2026-11-24 12:00:00 UTC, preparing"
    others = [a_workflow("Freeze", event_id=name, minutes=30) for name in "AB"]
    assert message(*others, preparing).endswith("not before 2026-11-24 12:00:00 UTC, preparing, and 2 more")
    started = a_workflow(status="Started", minutes=None, source="", phase="started")
    assert message(started) == "Reboot 602D9444, started"
    assert message(a_workflow(phase="recovery_failed", is_over=True)) == "Reboot 602D9444 is over: recovery failed"
    assert message() == "nothing is pending"


@pytest.mark.parametrize("phase", sorted(set(get_args(Phase)) - {"closed"}))
def test_no_message_is_longer_than_a_condition_may_be(phase: Phase) -> None:
    for source, is_over in product(("Platform", "x" * 2000), (False, True)):
        assert 0 < len(message(a_workflow("y" * 900, source=source, phase=phase, is_over=is_over))) <= 1024


# What is written.


def found(*conditions: tuple[str, str, str]) -> dict[str, Condition]:
    """Conditions that were written at NOW: type, status, reason."""
    return {
        type_: Condition(type_, status, reason, "m", NOW - timedelta(hours=1), NOW - timedelta(hours=2))
        for type_, status, reason in conditions
    }


def written(old: dict[str, Condition], state: NodeState) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status, one.reason) for one in changes(old, state, LATER)}


def wanted(type_: str, status: Any, reason: str = "ScheduledEvent") -> NodeState:
    return NodeState((WantedCondition(type_, status, reason, "new"),))


def test_what_is_there_already_is_not_written_again() -> None:
    state = node_state((a_workflow(),), "current", has_lifecycle=True)
    first = changes({}, state, NOW)
    assert [one.type for one in first] == ["ScheduledEvent", "MaintenancePlanned"]
    assert changes({one.type: one for one in first}, state, LATER) == ()


def test_times_are_whole_seconds_and_the_transition_is_that_of_the_status() -> None:
    (new,) = changes({}, wanted("ScheduledEvent", "True"), LATER)
    at = LATER.replace(microsecond=0)
    assert (new.last_heartbeat_time, new.last_transition_time) == (at, at)
    old = found(("ScheduledEvent", "True", "RebootScheduled"))
    (same,) = changes(old, wanted("ScheduledEvent", "True", "RebootStarted"), LATER)
    assert (same.last_heartbeat_time, same.last_transition_time) == (at, NOW - timedelta(hours=2))
    (other,) = changes(old, wanted("ScheduledEvent", "False"), LATER)
    assert (other.last_heartbeat_time, other.last_transition_time) == (at, at)


LIFECYCLE = {
    "MaintenancePlanned": "ScheduledEvent",
    "MaintenanceInProgress": "ScheduledEvent",
    "DrainInProgress": "ScheduledEvent",
    "Drained": "DrainCompleted",
}


def lifecycle_cases() -> Iterator[Any]:
    """Who has written it, its status; and what is written if it is to be True, and False."""
    for type_, own in LIFECYCLE.items():
        for name, old, when_true, when_false in (
            ("absent", None, True, False),
            ("ours, True", ("True", own), True, True),
            ("another's, True", ("True", "KubectlDrain"), False, False),
            ("ours, False", ("False", "NoScheduledEvent"), True, False),
            ("another's, False", ("False", "KubectlDrain"), True, False),
            ("Unknown", ("Unknown", "NodeStatusUnknown"), True, False),
        ):
            yield pytest.param(type_, own, old, when_true, when_false, id=f"{type_} {name}")


@pytest.mark.parametrize(("type_", "own", "old", "when_true", "when_false"), [*lifecycle_cases()])
def test_a_lifecycle_condition_of_another_is_left_alone(
    type_: str, own: str, old: tuple[str, str] | None, *, when_true: bool, when_false: bool
) -> None:
    conditions = {} if old is None else found((type_, *old))
    assert bool(written(conditions, wanted(type_, "True", own))) == when_true
    assert bool(written(conditions, wanted(type_, "False", "Over"))) == when_false


def test_what_is_withdrawn_ends_only_what_is_there_and_ours() -> None:
    state = withdrawn(has_condition=False, has_lifecycle=False)
    assert written({}, state) == {}
    there = found(
        ("ScheduledEvent", "Unknown", "MetadataServiceUnavailable"),
        ("MaintenancePlanned", "True", "ScheduledEvent"),
        ("MaintenanceInProgress", "True", "KubectlDrain"),
    )
    assert written(there, state) == {key: NOTHING[key] for key in ("ScheduledEvent", "MaintenancePlanned")}
    over = {one.type: one for one in changes(there, state, LATER)}
    assert changes(over, state, LATER) == ()
    assert withdrawn(has_condition=True, has_lifecycle=True) == NodeState()


def test_a_drain_and_its_end() -> None:
    begins = drain_begins("E1")
    assert written({}, begins) == {"DrainInProgress": ("True", "ScheduledEvent")}
    during = {one.type: one for one in changes({}, begins, NOW)}
    done = {"DrainInProgress": ("False", "DrainEnded"), "Drained": ("True", "DrainCompleted")}
    assert written(during, drain_ended(is_drained=True, event_id="E1")) == done
    failed = written(during, drain_ended(is_drained=False, event_id="E1"))
    assert failed == {"DrainInProgress": ("False", "DrainEnded")}
    killed = found(("DrainInProgress", "True", "ScheduledEvent"), ("Drained", "True", "DrainCompleted"))
    both = {"DrainInProgress": ("False", "DrainEnded"), "Drained": ("False", "NotDrained")}
    assert written(killed, UNCORDONED) == both
    assert written({}, UNCORDONED) == {}


@pytest.mark.parametrize(
    ("minutes", "is_cleared"), [(0, False), (4.9, False), (5, True), (600, True), (-4.9, False), (-5, True)]
)
def test_a_drain_that_was_not_renewed_for_five_minutes_was_killed(minutes: float, *, is_cleared: bool) -> None:
    for reason, is_ours in (("ScheduledEvent", True), ("KubectlDrain", False)):
        drain = found(("DrainInProgress", "True", reason))  # written an hour before NOW
        state = without_killed_drain(NodeState(), drain, NOW + timedelta(minutes=minutes - 60))
        expected = {"DrainInProgress": ("False", "DrainEnded")} if is_cleared and is_ours else {}
        assert written(drain, state) == expected


def test_no_drain_was_killed_where_there_is_none() -> None:
    assert without_killed_drain(NodeState(), {}, NOW) == NodeState()
    ended = found(("DrainInProgress", "False", "DrainEnded"))
    assert written(ended, without_killed_drain(NodeState(), ended, NOW)) == {}
