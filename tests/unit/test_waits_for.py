"""What an event waits for, in a user's words: each of these kinds occurs."""

from collections.abc import Callable
from datetime import time, timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from status_samples import some_facts
from test_recommendations import prepared as prepared_for_recommendation
from test_workflow import START, Agent, a_rule, an_event, shared_event
from test_workflow_fleet import FULL

from scheduled_events_agent.policy import MaintenanceWindow, Rule, When
from scheduled_events_agent.status.events import event_view
from scheduled_events_agent.status.status import Waits
from scheduled_events_agent.workflow import FleetView

DRAIN = a_rule(prepare=("drain",))
LATER = an_event(not_before=START + timedelta(days=7))


def reads(*rules: Rule, event: Any = None, **context: Any) -> Agent:
    agent = Agent(*rules, **context)
    agent.document(event or an_event())
    return agent


def in_a_window() -> Agent:
    night = MaintenanceWindow(start=time(2), length=7200.0)
    return reads(replace(DRAIN, window="night"), event=LATER, windows={"night": night})


def behind_another_event() -> Agent:
    event = "a@20260302T120001.000000Z"
    return reads(DRAIN, fleet=FleetView(max_events=1, statuses={"a": replace(FULL, workflow_id=event)}))


def over_before_another_event() -> Agent:
    agent, other = reads(DRAIN), an_event(id="B")
    agent.ends("drain")
    agent.document(an_event(), other)
    agent.ends("drain", event="B")
    agent.document(other)
    return agent


def prepared(approve: Any) -> Agent:
    agent = reads(replace(DRAIN, approve=approve, lead=86400.0))
    agent.ends("drain")
    return agent


def beside_an_eviction() -> Agent:
    eviction = a_rule(name="eviction", when=When(type=("Preempt",)), prepare=("drain",), approve="never")
    agent = Agent(eviction, DRAIN, serialized=("drain",))
    agent.document(an_event(), an_event(id="P", type="Preempt"))
    return agent


def missing_once() -> Agent:
    agent = reads(DRAIN)
    agent.answer_once()
    return agent


def of_another_vm() -> Agent:
    others = a_rule(when=When(affects=("others",)), prepare=("drain",), lead=86400.0)
    agent = reads(others, event=an_event(resources=("vm_2",)))
    agent.ends("drain")
    return agent


STORIES: dict[Waits, Callable[[], Agent]] = {
    "time": lambda: reads(replace(DRAIN, lead=60.0)),
    "window": in_a_window,
    "drain": lambda: reads(replace(DRAIN, drain_for=30.0)),
    "slot": behind_another_event,
    "fleet": lambda: reads(DRAIN, fleet=FleetView(max_events=1)),
    "other_vms": lambda: reads(Rule(name="user", approve="immediately"), event=shared_event()),
    "other_event": over_before_another_event,
    "operator": lambda: prepared("manual"),
    "policy": lambda: prepared("never"),
    "mode": lambda: reads(DRAIN, is_acting=False),
    "hook": beside_an_eviction,
    "document": missing_once,
    "azure": prepared_for_recommendation,
    "vm": of_another_vm,
}


def test_there_is_a_story_for_each_kind() -> None:
    assert {*STORIES} == {*get_args(Waits)}


@pytest.mark.parametrize("kind", STORIES)
def test_each_kind_occurs(kind: Waits) -> None:
    agent = STORIES[kind]()
    workflow = next(iter(agent.workflows.values()))
    waits_for = event_view(workflow, some_facts(at=agent.context.now)).waits_for
    assert waits_for is not None
    assert waits_for.kind == kind
    assert waits_for.until is None or waits_for.until > agent.context.now
    assert waits_for.text


def test_an_event_that_goes_on_waits_for_nothing() -> None:
    agent = reads(DRAIN)
    assert event_view(agent.of(), some_facts(at=agent.context.now)).waits_for is None
