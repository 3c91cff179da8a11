"""The table of transitions says no more than what happens: lives and stories take each of its arrows."""

import pytest
import test_workflow
import test_workflow_changes
from test_workflow import Agent, a_rule, an_event, started

from agent.workflow import TRANSITIONS, Board, Context, Phase, Progression, Signal, proceed

Arrows = set[tuple[Phase, Phase]]


@pytest.fixture
def arrows(monkeypatch: pytest.MonkeyPatch) -> Arrows:
    """Those that are taken from now on."""
    taken: Arrows = set()

    def record(board: Board, signals: list[Signal], context: Context) -> Progression:
        progression = proceed(board, signals, context)
        phases = {key: workflow.phase for key, workflow in board.items()}
        for step in progression.steps:
            new, old = step.workflow.phase, phases.get(step.workflow.id)
            if old is not None and old != new:
                taken.add((old, new))
            phases[step.workflow.id] = new
        return progression

    for module in (test_workflow, test_workflow_changes):
        monkeypatch.setattr(module, "proceed", record)
    return taken


def test_every_arrow_of_the_table_is_taken_and_no_other_one(arrows: Arrows) -> None:
    for phase in ("prepared", "approved", "started"):
        return_while_paused(phase)
    resolve_a_failed_recovery()
    test_workflow_changes.lives()
    assert arrows == {(phase, to) for phase, following in TRANSITIONS.items() for to in following}


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
    assert agent.phase == phase


def resolve_a_failed_recovery() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.document()
    agent.ends("drain", "canceled")
    agent.ends("resume", "failed")
    assert agent.phase == "recovery_failed"
    agent.operator("resolve")
    assert agent.board == {}
