"""The reason why an event waits is the one that holds now, and one that an operator can change comes first."""

from datetime import timedelta

import pytest
from test_workflow import Agent, a_rule, an_event, wait_text

from scheduled_events_agent.policy import When
from scheduled_events_agent.status.messages import activity

DAY = 86400.0


def shown(agent: Agent) -> str:
    return activity(agent.of(), (), agent.context.now, agent.context.now)


def test_without_its_rule_an_event_that_waited_for_its_time_is_only_observed() -> None:
    agent = Agent(a_rule(approve="manual", lead=60.0))
    agent.document(an_event())
    assert agent.wait_message().startswith("begins at ")
    agent.reload()
    assert (agent.of().wait_reason, agent.wait_message(), shown(agent)) == (None, "", "only observed")


def test_an_event_that_moves_out_of_its_rule_is_only_observed() -> None:
    rule = a_rule(when=When(notice_at_least=600.0), approve="manual", lead=60.0)
    agent = Agent(rule)
    agent.document(an_event())
    assert agent.wait_message().startswith("begins at ")
    agent.document(an_event(not_before=agent.context.now + timedelta(seconds=300)))
    assert (agent.of().wait_reason, shown(agent)) == (None, "only observed")


@pytest.mark.parametrize("phase", ["waiting", "preparing", "prepared", "held", "approved"])
def test_an_agent_that_observes_says_so_in_every_phase_before_the_start(phase: str) -> None:
    agent = Agent(a_rule(approve="manual", lead=DAY), is_acting=phase != "waiting")
    agent.document(an_event())
    if phase != "waiting":
        agent.ends("drain")
    if phase not in ("waiting", "preparing"):
        agent.ends("checkpoint", "failed" if phase == "held" else "succeeded")
    if phase == "approved":
        agent.operator("approve")
        agent.answer()
    agent.reload(*agent.context.rules, is_acting=False)
    assert agent.phase == phase
    assert agent.wait_message().startswith("the agent only observes")
    if phase == "preparing":
        agent.ends("checkpoint")
        assert agent.wait_message() == "the agent only observes"
    agent.reload(*agent.context.rules, is_acting=True)
    assert "observes" not in agent.wait_message()


def test_a_failed_preparation_is_the_reason_though_the_rule_never_approves() -> None:
    agent = Agent(a_rule(prepare=("drain",), approve="never", lead=DAY))
    agent.document(an_event())
    agent.ends("drain", "failed")
    reason = "hook drain: exit code 1"
    assert agent.wait_message() == reason
    assert agent.journal[-1] == f"held: held: {reason}; Azure starts it at 2026-03-02 12:15:00 UTC"
    agent.tick()
    assert agent.journal[-1] == f"held: held: {reason}; Azure starts it at 2026-03-02 12:15:00 UTC"


def test_lost_state_is_reported_before_an_invalid_id_and_before_the_rule() -> None:
    event = an_event(id="", resources=("vm_1",))
    agent = Agent(a_rule(prepare=("drain",), approve="never", lead=DAY), is_state_lost=True)
    agent.document(event)
    agent.ends("drain", event="")
    (workflow,) = agent.workflows.values()
    assert wait_text(workflow) == "the state file was lost, and what was done before is not known"
    agent = Agent(a_rule(prepare=("drain",), approve="never", lead=DAY))
    agent.document(event)
    agent.ends("drain", event="")
    (workflow,) = agent.workflows.values()
    assert wait_text(workflow) == "it has no id to approve"


def test_rule_and_reason_name_the_same_rule_when_a_reload_renames_it() -> None:
    agent = Agent(a_rule(name="old", prepare=("drain",), approve="manual", lead=DAY))
    agent.document(an_event())
    agent.ends("drain")
    agent.reload(a_rule(name="new", prepare=("drain",), approve="never", lead=DAY))
    decision = agent.of().decision
    assert (decision.rule, decision.reason) == ("old", "rule old began it; now rule new matches it: affects self")
    assert agent.wait_message() == f"approve is never ({decision.reason})"
    for _ in range(2):  # it does not grow
        agent.reload(a_rule(name="old", prepare=("drain",), approve="manual", lead=DAY))
        assert agent.of().decision.reason == "rule old matches it: affects self"
        agent.reload()
        assert agent.of().decision.reason == "rule old began it; now no rule matches it: observe"
