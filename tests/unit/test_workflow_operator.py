"""Who holds or has approved an event, and since when: it stays what it is until it is released or void."""

from datetime import timedelta

import pytest
from msgspec.structs import replace
from test_workflow import START, Agent, a_rule, an_event, started

from scheduled_events_agent.workflow import ClockChanged, OperatorAction, OperatorCommand, OperatorDecision

MANUAL = a_rule(prepare=("drain",), approve="manual", lead=900.0)
FIRST_AT = START + timedelta(seconds=1)
KIM_HOLDS = OperatorDecision(action="hold", user="kim", at=FIRST_AT)
KIM_APPROVES = OperatorDecision(action="approve", user="kim", at=FIRST_AT)


def prepared(rule: str = "manual") -> Agent:
    agent = Agent(replace(MANUAL, approve=rule))
    agent.document(an_event())
    agent.ends("drain", after=0)
    return agent


def acts(agent: Agent, action: OperatorAction, user: str, after: float = 0) -> None:
    agent.wait(after)
    agent.send(OperatorCommand(workflow_id=agent.of().id, action=action, user=user))


@pytest.mark.parametrize("decision", [KIM_HOLDS, KIM_APPROVES])
def test_it_is_known_which_operator_has_decided_and_when(decision: OperatorDecision) -> None:
    agent = prepared()
    assert (agent.of().operator, agent.of().operator_action) == (None, "")
    acts(agent, decision.action, "kim")
    assert (agent.of().operator, agent.of().operator_action) == (decision, decision.action)


@pytest.mark.parametrize("decision", [KIM_HOLDS, KIM_APPROVES])
def test_the_same_command_again_leaves_who_was_first_and_since_when(decision: OperatorDecision) -> None:
    agent = prepared()
    acts(agent, decision.action, "kim")
    remembered = agent.remembered
    acts(agent, decision.action, "lee", after=60)
    assert agent.of().operator == decision
    assert {key: (one.user, one.at) for key, one in agent.remembered.items()} == {
        key: (one.user, one.at) for key, one in remembered.items()
    }
    assert [line for line in agent.journal if line.startswith("operator")][-1].endswith("by lee")


def test_another_command_is_another_decision() -> None:
    agent = prepared()
    acts(agent, "hold", "kim")
    acts(agent, "release", "lee", after=1)
    assert agent.of().operator is None
    acts(agent, "hold", "lee", after=1)
    assert agent.of().operator == OperatorDecision(action="hold", user="lee", at=agent.context.now)
    acts(agent, "approve", "max", after=1)
    assert agent.of().operator == OperatorDecision(action="approve", user="max", at=agent.context.now)


@pytest.mark.parametrize("decision", [KIM_HOLDS, KIM_APPROVES])
def test_a_decision_stays_over_a_restart_a_reload_a_missing_answer_and_a_changed_clock(
    decision: OperatorDecision,
) -> None:
    agent = prepared()
    acts(agent, decision.action, "kim")
    agent.restart("boot 1", an_event())
    agent.reload(replace(MANUAL, name="other"))
    agent.answer_once()
    agent.answer_once(an_event())
    agent.wait(3600)
    agent.send(ClockChanged(3600))
    assert agent.of().operator == decision


def test_a_decision_stays_when_the_event_goes_on_under_another_id() -> None:
    agent = prepared()
    acts(agent, "approve", "kim")
    agent.answer()
    agent.document(started(replace(an_event(), id="B")))
    assert agent.of("B").operator == KIM_APPROVES


def test_a_hold_of_an_event_that_comes_back_after_its_recovery_is_that_of_before() -> None:
    agent = prepared()
    acts(agent, "hold", "kim")
    agent.document()
    agent.ends("resume")
    assert agent.workflows == {}
    agent.document(an_event(), after=3600)
    assert agent.of().operator == KIM_HOLDS


def test_a_hold_of_an_event_that_comes_back_before_its_recovery_is_that_of_before() -> None:
    agent, other = prepared(), an_event(id="B")
    acts(agent, "hold", "kim")
    agent.document(an_event(), other)
    agent.ends("drain", event="B")
    agent.document(other)
    assert (agent.of().is_over, agent.of().operator) == (True, KIM_HOLDS)
    agent.document(an_event(), other, after=3600)
    assert (agent.of().is_over, agent.of().operator) == (False, KIM_HOLDS)


@pytest.mark.parametrize("action", ["hold", "release"])
def test_an_approval_that_was_taken_back_too_late_is_still_that_of_its_operator(action: OperatorAction) -> None:
    agent = prepared()
    acts(agent, "approve", "kim")
    acts(agent, action, "lee", after=1)
    agent.answer()
    assert (agent.phase, agent.of().operator) == ("approved", KIM_APPROVES)


def test_a_hold_that_comes_too_late_for_the_approval_of_a_rule_is_none() -> None:
    agent = prepared("when-prepared")
    acts(agent, "hold", "kim")
    agent.answer()
    assert (agent.phase, agent.of().operator) == ("approved", None)


def test_an_operator_without_a_name_is_an_operator_all_the_same() -> None:
    agent = prepared()
    acts(agent, "hold", "")
    assert agent.of().operator == replace(KIM_HOLDS, user="")
