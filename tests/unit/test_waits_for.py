"""What an event waits for, in a user's words: each inner reason has one, and each one occurs."""

from collections.abc import Callable
from datetime import time, timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from status_samples import a_workflow, some_facts
from test_recommendations import prepared as prepared_for_recommendation
from test_workflow import START, Agent, a_rule, an_event, shared_event
from test_workflow_fleet import FULL

from scheduled_events_agent.policy import MaintenanceWindow, Rule, When
from scheduled_events_agent.status.events import WAITS, event_view
from scheduled_events_agent.status.status import Waits, WaitsFor
from scheduled_events_agent.workflow import FleetView, StageStatus, WaitKind, WaitReason

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


def test_each_reason_of_the_state_machine_is_in_the_table() -> None:
    assert {*WAITS} == {*get_args(WaitKind)}
    assert {*get_args(Waits)} == {*WAITS.values(), "drain"}  # the state machine gives no reason for a drain
    assert {*get_args(Waits)} == {*STORIES}


@pytest.mark.parametrize("kind", STORIES)
def test_each_kind_occurs(kind: Waits) -> None:
    agent = STORIES[kind]()
    workflow = next(iter(agent.workflows.values()))
    waits_for = event_view(workflow, some_facts(at=agent.context.now)).waits_for
    assert waits_for is not None
    assert waits_for.kind == kind
    assert waits_for.until is None or waits_for.until > agent.context.now
    assert waits_for.text


@pytest.mark.parametrize("kind", get_args(WaitKind))
def test_an_event_waits_for_what_the_table_has(kind: WaitKind) -> None:
    facts = some_facts()
    reason = WaitReason(kind=kind, at=facts.at + timedelta(minutes=1), detail="it")
    failed = StageStatus(state="failed", failure="hook drain: exit code 3")
    workflow = a_workflow(
        {"id_error": "it is no text"}, {"on_start": ("tell",)}, prepare=failed, wait_reason=reason
    )
    waits_for = event_view(workflow, facts).waits_for
    assert waits_for is not None
    assert waits_for.kind == WAITS[kind]
    assert waits_for.text


def test_a_recovery_that_failed_waits_for_an_operator() -> None:
    failed = StageStatus(state="failed", failure="hook resume: exit code 3", failed_hook="resume")
    workflow = a_workflow(phase="recovery_failed", is_over=True, recover=failed)
    assert event_view(workflow, some_facts()).waits_for == WaitsFor(
        kind="operator", until=None, text="hook resume: exit code 3"
    )


def test_an_old_answer_has_no_time_until_when_it_stays_old() -> None:
    agent = reads(DRAIN, stale_after=10.0)
    agent.wait(11)
    agent.ends("drain")
    waits_for = event_view(agent.of(), some_facts(at=agent.context.now)).waits_for
    assert waits_for is not None
    assert (waits_for.kind, waits_for.until) == ("document", None)
    assert waits_for.text.startswith("the metadata service has not answered since ")


def test_an_event_that_goes_on_waits_for_nothing() -> None:
    agent = reads(DRAIN)
    assert event_view(agent.of(), some_facts(at=agent.context.now)).waits_for is None
