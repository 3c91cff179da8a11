"""What a node's conditions say of its scheduled events. Pure.

``node_state`` says what they should be, ``changes`` what has to be written for it. Lifecycle conditions are those
of KEP-5683 (alpha), which others may write too. Invariant: a lifecycle condition that is True for another's reason
is left alone, and one that the node does not have is never written as False.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from scheduled_events_agent.imds.document import EVENT_TYPES, ScheduledEvent
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.status.actions import SHORT_ID
from scheduled_events_agent.status.messages import by_urgency, is_for_this_vm, phase_text
from scheduled_events_agent.workflow import Workflow

SCHEDULED_EVENT = "ScheduledEvent"
"""The type of the agent's own condition, and the reason of its lifecycle conditions."""
DRAIN_IN_PROGRESS = "DrainInProgress"
_REASON_OF_TRUE = {
    "MaintenancePlanned": SCHEDULED_EVENT,
    "MaintenanceInProgress": SCHEDULED_EVENT,
    DRAIN_IN_PROGRESS: SCHEDULED_EVENT,
    "Drained": "DrainCompleted",
}
"""The lifecycle conditions, and the reason with which each is the agent's own."""
RENEWAL_SECONDS = 60.0
"""A drain that runs says so this often."""
_KILLED_AFTER = timedelta(minutes=5)
_MAX_MESSAGE = 1024

Polls = Literal["none_yet", "current", "overdue"]
"""Whether documents come; overdue: /healthz says so. Before the first one nothing is known."""
ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """A condition as a node has it."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_heartbeat_time: datetime | None = None
    """When it was last written."""
    last_transition_time: datetime | None = None
    """When its status last changed."""


Conditions = Mapping[str, Condition]
"""The conditions of a node, by their type."""


class WantedCondition(NamedTuple):
    """A condition as it should be."""

    type: str
    status: ConditionStatus
    reason: str
    message: str
    is_renewed: bool = False
    """Whether it is written also if the node has it, with the time of now."""
    is_withdrawn: bool = False
    """Whether it only ends one that the node has."""


class NodeState(NamedTuple):
    """What the agent has to say of its node; of other conditions it says nothing."""

    conditions: tuple[WantedCondition, ...] = ()


def node_state(
    workflows: Iterable[Workflow], polls: Polls, *, has_condition: bool = True, has_lifecycle: bool = False
) -> NodeState:
    """The node's state according to the open workflows. ``has_...``: which conditions are wanted."""
    if polls == "none_yet":
        return NodeState()
    mine = [workflow for workflow in by_urgency(workflows) if is_for_this_vm(workflow)]
    conditions: list[WantedCondition] = []
    if has_condition:
        conditions.append(_scheduled_event(mine, polls))
    if has_lifecycle:
        impactful = [workflow for workflow in mine if not workflow.event.is_recommendation]
        planned = [one for one in impactful if not (one.is_over or one.event.is_started or one.was_started)]
        begun = [one for one in impactful if one.event.is_started or one.was_started]
        conditions += [
            _lifecycle("MaintenancePlanned", planned, "no event is scheduled"),
            _lifecycle("MaintenanceInProgress", begun, "no event has started"),
        ]
    return NodeState(tuple(conditions))


def drain_begins(event_id: str) -> NodeState:
    """The node's state while it is drained. ``event_id``: for people."""
    begun = _drain("True", f"drained for event {event_id}")._replace(is_renewed=True)
    return NodeState((begun, WantedCondition("Drained", "False", "NotDrained", "a drain has begun")))


def drain_ended(*, is_drained: bool, event_id: str) -> NodeState:
    """The node's state when its drain has ended."""
    if not is_drained:
        return NodeState((_drain("False", "the drain has failed"),))
    reason = _REASON_OF_TRUE["Drained"]
    drained = WantedCondition("Drained", "True", reason, f"drained for event {event_id}"[:_MAX_MESSAGE])
    return NodeState((_drain("False", "the drain is done"), drained))


UNCORDONED = NodeState(
    (
        WantedCondition(DRAIN_IN_PROGRESS, "False", "DrainEnded", "what the drain was for is over"),
        WantedCondition("Drained", "False", "NotDrained", "what the drain was for is over"),
    )
)
"""The node's state after ``uncordon``."""


def withdrawn(*, has_condition: bool, has_lifecycle: bool) -> NodeState:
    """The end of conditions that were set before, and are no longer wanted. ``has_...``: which ones are."""
    types = () if has_condition else (SCHEDULED_EVENT,)
    if not has_lifecycle:
        types = (*types, "MaintenancePlanned", "MaintenanceInProgress")
    text = "it is no longer reported"
    return NodeState(
        tuple(WantedCondition(type_, "False", "NoScheduledEvent", text, is_withdrawn=True) for type_ in types)
    )


def without_killed_drain(state: NodeState, found: Conditions, now: datetime) -> NodeState:
    """The state, and that no drain is in progress if none has said so lately: it was killed.

    A drain that does run, and whose clock was set, says it again.
    """
    drain = found.get(DRAIN_IN_PROGRESS)
    if drain is None or drain.last_heartbeat_time is None:
        return state
    if abs(now - drain.last_heartbeat_time) < _KILLED_AFTER:
        return state
    return NodeState((*state.conditions, _drain("False", "the drain was killed")))


def changes(found: Conditions, wanted: NodeState, now: datetime) -> tuple[Condition, ...]:
    """What has to be written so that a node with the conditions ``found`` has those that are wanted."""
    at = now.replace(microsecond=0)  # objects of Kubernetes have whole seconds
    return tuple(_changes(found, wanted, at))


def is_lifecycle(condition: Condition) -> bool:
    """Whether others may write it too."""
    return condition.type in _REASON_OF_TRUE


def _changes(found: Conditions, wanted: NodeState, at: datetime) -> Iterator[Condition]:
    for one in wanted.conditions:
        old = found.get(one.type)
        if one.type in _REASON_OF_TRUE and not _may_write(old, one):
            continue
        if one.is_withdrawn and (old is None or old.status == "False"):
            continue
        is_same = old is not None and (old.status, old.reason, old.message) == one[1:4]
        if is_same and not one.is_renewed:
            continue
        since = None
        if old is not None and old.status == one.status:
            since = old.last_transition_time
        yield Condition(*one[:4], last_heartbeat_time=at, last_transition_time=since or at)


def _may_write(old: Condition | None, wanted: WantedCondition) -> bool:
    """Whether the agent may write a lifecycle condition, and has to."""
    if old is None or old.status != "True":
        return wanted.status == "True"
    return old.reason == _REASON_OF_TRUE[wanted.type]


def _drain(status: Literal["True", "False"], message: str) -> WantedCondition:
    return WantedCondition(
        DRAIN_IN_PROGRESS, status, SCHEDULED_EVENT if status == "True" else "DrainEnded", message[:_MAX_MESSAGE]
    )


def _scheduled_event(mine: list[Workflow], polls: Polls) -> WantedCondition:
    """``mine``: the workflows of this VM, the most urgent first."""
    if polls == "overdue":
        text = "the metadata service does not answer: which events are pending is not known"
        return WantedCondition(SCHEDULED_EVENT, "Unknown", "MetadataServiceUnavailable", text)
    pending = [workflow for workflow in mine if not workflow.is_over]
    if not pending:
        text = f"{_name(mine[0].event)} is over: {phase_text(mine[0])}" if mine else "nothing is pending"
        return WantedCondition(SCHEDULED_EVENT, "False", "NoScheduledEvent", text[:_MAX_MESSAGE])
    event = pending[0].event
    type_ = event.type if event.type in EVENT_TYPES else "Other"
    reason = f"{type_}Started" if event.is_started else f"{type_}Scheduled"
    return WantedCondition(SCHEDULED_EVENT, "True", reason, _message(pending, phase_text(pending[0])))


def _lifecycle(type_: str, workflows: list[Workflow], absence: str) -> WantedCondition:
    if not workflows:
        return WantedCondition(type_, "False", "NoScheduledEvent", absence)
    return WantedCondition(type_, "True", _REASON_OF_TRUE[type_], _message(workflows))


def _message(workflows: list[Workflow], phase: str = "") -> str:
    """The first of the events in one line, and how many more there are."""
    event = workflows[0].event
    not_before = f"not before {format_time(event.not_before)}" if event.not_before else ""
    more = f"and {len(workflows) - 1} more" if len(workflows) > 1 else ""
    origin = f"from {event.source}" if event.source else ""
    first = " ".join(filter(None, [_name(event), origin]))
    rest = ", ".join(filter(None, [not_before, phase, more]))
    return f"{first}, {rest}"[:_MAX_MESSAGE] if rest else first[:_MAX_MESSAGE]


def _name(event: ScheduledEvent) -> str:
    return f"{event.type or 'event'} {event.id[:SHORT_ID]}"
