"""The table of transitions says no more than what happens: lives and stories take each of its arrows."""

import importlib
from typing import Any, get_args

import pytest
import test_workflow
import test_workflow_changes
from msgspec.structs import replace
from test_workflow import Agent, a_rule, an_event, started

from scheduled_events_agent.policy import When
from scheduled_events_agent.workflow import (
    ALLOWED_TRANSITIONS,
    Context,
    Phase,
    Result,
    Signal,
    Transition,
    Workflow,
    Workflows,
    advance,
)

advance_module = importlib.import_module("scheduled_events_agent.workflow.advance")

Arrows = set[tuple[Phase, Phase]]


@pytest.fixture
def arrows(monkeypatch: pytest.MonkeyPatch) -> Arrows:
    """Transitions that are made from now on."""
    taken: Arrows = set()

    def record(workflows: Workflows, signals: list[Signal], context: Context) -> Result:
        progression = advance(workflows, signals, context)
        phases = {key: workflow.phase for key, workflow in workflows.items()}
        for step in progression.transitions:
            new, old = step.workflow.phase, phases.get(step.workflow.id)
            if old is not None and old != new:
                taken.add((old, new))
            phases[step.workflow.id] = new
        return progression

    for module in (test_workflow, test_workflow_changes):
        monkeypatch.setattr(module, "advance", record)
    return taken


def test_every_allowed_transition_happens_and_no_other_one(arrows: Arrows) -> None:
    for phase in ("prepared", "approved", "started"):
        return_while_paused(phase)
    resolve_a_failed_recovery()
    expire_at_every_point()
    test_workflow_changes.lives()
    assert arrows == {(phase, to) for phase, following in ALLOWED_TRANSITIONS.items() for to in following}


@pytest.mark.parametrize("to", get_args(Phase))
@pytest.mark.parametrize("phase", ALLOWED_TRANSITIONS)
def test_a_transition_outside_the_table_is_rejected(
    phase: Phase, to: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(a_rule())
    agent.may_fail = True
    agent.document(an_event())
    workflow = replace(agent.of(), phase=phase)
    agent.workflows = {workflow.id: workflow}

    def go(workflow: Workflow, *_: Any) -> Transition | None:
        return Transition(workflow=replace(workflow, phase=to)) if workflow.phase == phase else None

    monkeypatch.setattr(advance_module, "next_transition", go)
    agent.tick()
    is_allowed = to == phase or to in ALLOWED_TRANSITIONS[phase]
    assert (agent.last.errors == ()) is is_allowed
    assert [step.workflow.phase for step in agent.last.transitions] == ([to] if is_allowed and to != phase else [])


def return_while_paused(phase: str) -> None:
    """An event is back after its end, before a hook has run to recover from it."""
    agent, event = Agent(a_rule(prepare=("drain",))), an_event()
    agent.document(event)
    agent.ends("drain")
    if phase != "prepared":
        agent.answer()
    if phase == "started":
        event = started(event)
        agent.document(event)
    assert agent.phase == phase
    agent.reload(*agent.context.rules, is_acting=False)
    agent.document()
    assert agent.phase == "recovering"
    agent.document(event)
    assert agent.phase == ("prepared" if phase == "approved" else phase)


def resolve_a_failed_recovery() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.document()
    agent.ends("drain", "canceled")
    agent.ends("resume", "failed")
    assert agent.phase == "recovery_failed"
    agent.operator("resolve")
    assert agent.workflows == {}


def expire_at_every_point() -> None:
    """The document goes on listing a recommendation that has expired."""
    rule = a_rule(when=When(type=("SpotRebalanceRecommendation",)), prepare=("drain",), expire_after=60.0)
    event = an_event(type="SpotRebalanceRecommendation")
    for outcome in ("succeeded", "failed"):
        agent = Agent(rule)
        agent.document(event)
        agent.ends("drain")
        agent.tick(61)
        agent.ends("resume", outcome)
        if outcome == "failed":
            agent.operator("resolve")
        assert agent.workflows == {}
    agent = Agent(rule)
    agent.document(event)
    agent.ends("drain")
    agent.document()
    agent.document(an_event(id="B", type="SpotRebalanceRecommendation"))
    assert agent.of("B").phase == "preparing"  # it waits for the end of the hook that would undo its own
    agent.tick(61)
    assert agent.all_of("B") == []
