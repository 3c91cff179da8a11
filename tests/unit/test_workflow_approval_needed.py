"""An event that only an operator can let be approved is noted once, when it becomes so."""

from typing import Any

import pytest
from msgspec.structs import replace
from test_workflow import Agent, a_rule, an_event, started

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.workflow import PolicyChanged, WaitReason

MANUAL = a_rule(approve="manual")
WHY = "an operator must approve it before 2026-03-02 12:15:00 UTC: rule impactful leaves it to an operator"


def noted(agent: Agent) -> list[str]:
    return [line.removeprefix("approval_needed: ") for line in agent.journal if line.startswith("approval_needed")]


def is_needed(agent: Agent) -> bool:
    return agent.of().approval_needed_since is not None


def test_it_is_recorded_once_at_first_sight() -> None:
    agent = Agent(replace(MANUAL, lead=60.0))
    agent.document(an_event())
    since = agent.context.now
    assert noted(agent) == [WHY]
    agent.document(an_event(description="another"))
    agent.restart("boot 1", an_event())
    assert noted(agent) == [WHY]
    assert agent.of().approval_needed_since == since


@pytest.mark.parametrize("action", ["approve", "hold"])
def test_an_operator_action_ends_the_need_and_its_release_records_it_again(action: Any) -> None:
    agent = Agent(replace(MANUAL, prepare=("drain",)))
    agent.document(an_event())
    agent.operator(action)
    assert not is_needed(agent)
    agent.operator("release")
    assert is_needed(agent)
    assert noted(agent) == [WHY, WHY]


def test_it_ends_when_the_event_starts_or_is_gone() -> None:
    agent = Agent(replace(MANUAL, recover=()))
    agent.document(an_event())
    agent.document(started(an_event()))
    assert not is_needed(agent)


def test_an_event_that_one_answer_lacks_still_needs_it() -> None:
    agent = Agent(MANUAL)
    agent.document(an_event())
    agent.answer_once()
    assert is_needed(agent)
    agent.document(an_event())
    assert noted(agent) == [WHY]


AMBIGUOUS = an_event(is_ambiguous=True)


@pytest.mark.parametrize(
    ("rule", "event", "context", "why"),
    [
        (MANUAL, an_event(), {}, "rule impactful leaves it to an operator"),
        (MANUAL, an_event(resources=("vm_0", "vm_1")), {}, "rule impactful leaves it to an operator"),
        (a_rule(), AMBIGUOUS, {}, "the document lists it more than once, with different contents"),
        (a_rule(), an_event(), {"is_state_lost": True}, "the state file was lost"),
        (a_rule(), an_event(), {}, ""),
        (a_rule(approve="never"), an_event(), {}, ""),
        (a_rule(approve="never"), AMBIGUOUS, {}, ""),
        (a_rule(approve="never"), an_event(), {"is_state_lost": True}, ""),
        (a_rule(shared="hold"), an_event(resources=("vm_1", "vm_2")), {"is_state_lost": True}, ""),
        (MANUAL, an_event(id_error="it is no text"), {}, ""),
        (MANUAL, an_event(), {"is_acting": False}, ""),
        (MANUAL, an_event(resources=("vm_2",)), {}, ""),
        (MANUAL, started(an_event()), {}, ""),
        (MANUAL, an_event(type="SpotRebalanceRecommendation"), {}, ""),
    ],
)
def test_an_approval_is_needed_only_in_these_cases(
    rule: Any, event: ScheduledEvent, context: dict[str, Any], why: str
) -> None:
    agent = Agent(rule, **context)
    agent.document(event)
    assert any(one.approval_needed_since for one in agent.workflows.values()) == bool(why)
    assert [text.partition(" UTC: ")[2].partition(", and what")[0] for text in noted(agent)] == [why] * bool(why)


def test_an_event_of_several_vms_waits_for_the_operator_and_is_not_held() -> None:
    agent = Agent(replace(MANUAL, prepare=(), recover=(), lead=86400.0))
    agent.document(an_event(resources=("vm_0", "vm_1")))
    assert noted(agent) == [WHY]
    assert [line for line in agent.journal if line.startswith("held")] == []
    assert agent.of().wait_reason == WaitReason(kind="manual")
    assert agent.operator("approve") == ["A: approve A"]


def test_it_is_recorded_when_the_agent_begins_to_act() -> None:
    agent = Agent(MANUAL, is_acting=False)
    agent.document(an_event())
    assert noted(agent) == []
    agent.context = replace(agent.context, is_acting=True)
    agent.send(PolicyChanged())
    assert noted(agent) == [WHY]
