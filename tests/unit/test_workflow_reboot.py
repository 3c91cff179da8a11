"""A reboot amid preparation: what was prepared counts as undone. And what else begins or counts once only."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from test_workflow import START, Agent, a_rule, an_event, started

from scheduled_events_agent.policy import Rule
from scheduled_events_agent.workflow import CancelHook, ClockChanged, next_wake_at

EVENT = an_event()
FIRST = ["A: prepare drain"]


def drained(agent: Agent) -> None:
    assert agent.tick(30) == FIRST


def in_hook_1(agent: Agent) -> None:
    assert agent.of().prepare.current == "drain"


def in_hook_2(agent: Agent) -> None:
    assert agent.ends("drain") == ["A: prepare checkpoint"]


def failed(agent: Agent) -> None:
    in_hook_2(agent)
    agent.ends("checkpoint", "failed")
    assert agent.phase == "held"


def prepared(agent: Agent) -> None:
    in_hook_2(agent)
    agent.ends("checkpoint")


def refused(agent: Agent) -> None:
    prepared(agent)
    agent.answer("server")
    assert agent.of().approval.failures == 1


def confirmed(agent: Agent) -> None:
    prepared(agent)
    agent.answer()
    assert agent.phase == "approved"


def approved_by_operator(agent: Agent) -> None:
    prepared(agent)
    assert agent.operator("approve") == ["A: approve A"]


# Where the machine is restarted: how it got there, by which rule, and what runs again in the same boot.
WHERE: dict[str, tuple[Callable[[Agent], None], Rule, list[str]]] = {
    "in hook 1": (in_hook_1, a_rule(), ["A: prepare drain"]),
    "in hook 2": (in_hook_2, a_rule(), ["A: prepare checkpoint"]),
    "failed": (failed, a_rule(), []),
    "prepared, the approval without an answer": (prepared, a_rule(), ["A: approve A"]),
    "prepared, the approval refused": (refused, a_rule(), ["A: approve A alone"]),
    "prepared, an operator must approve": (prepared, a_rule(approve="manual", lead=3600.0), []),
    "approved by an operator, without an answer": (
        approved_by_operator,
        a_rule(approve="manual", lead=3600.0),
        ["A: approve A"],
    ),
    "never approved": (prepared, a_rule(approve="never", lead=3600.0), []),
    "approved": (confirmed, a_rule(), []),
}


def an_agent(where: str, **changes: Any) -> Agent:
    lead_to, rule, _ = WHERE[where]
    agent = Agent(Rule(**{**{name: getattr(rule, name) for name in rule.__struct_fields__}, **changes}))
    agent.document(EVENT)
    lead_to(agent)
    agent.journal.clear()
    return agent


@pytest.mark.parametrize("where", WHERE)
def test_after_a_reboot_a_scheduled_event_is_prepared_for_from_its_first_hook(where: str) -> None:
    agent = an_agent(where)
    was_confirmed = agent.of().approval.state == "confirmed"
    assert agent.restart("boot 2", EVENT, document=False) == []
    assert agent.of().prepare.done == ()
    assert agent.document(EVENT, after=40) == FIRST
    assert "preparing: prepares again: the VM was restarted" in agent.journal
    assert agent.ends("drain") == ["A: prepare checkpoint"]
    effects = agent.ends("checkpoint")
    if was_confirmed:
        assert effects == []
        assert agent.phase == "approved"
    elif agent.of().decision.approve == "when-prepared" or agent.of().operator_action == "approve":
        assert [effect.removesuffix(" alone") for effect in effects] == ["A: approve A"]
    else:
        assert effects == []
        assert agent.phase == ("held" if agent.of().decision.approve == "never" else "prepared")
    assert agent.document(started(EVENT)) == []
    assert agent.document() == ["A: recover resume"]


@pytest.mark.parametrize("where", WHERE)
def test_a_second_restart_in_the_same_boot_repeats_only_the_interrupted_hook(where: str) -> None:
    agent = an_agent(where)
    assert agent.restart("boot 2", EVENT) == FIRST
    assert agent.ends("drain") == ["A: prepare checkpoint"]
    assert agent.restart("boot 2", EVENT) == ["A: prepare checkpoint"]


@pytest.mark.parametrize("where", WHERE)
def test_a_restart_in_the_same_boot_repeats_nothing_but_the_hook_that_was_cut(where: str) -> None:
    agent = an_agent(where)
    assert agent.restart("boot 1", EVENT, document=False) == []
    assert agent.document(EVENT, after=40) == WHERE[where][2]


@pytest.mark.parametrize("on_early_start", ["cancel", "finish"])
@pytest.mark.parametrize("where", WHERE)
def test_after_a_reboot_an_event_that_has_started_is_not_prepared_for(where: str, on_early_start: str) -> None:
    agent = an_agent(where, on_early_start=on_early_start)
    assert agent.restart("boot 2", started(EVENT)) == []
    assert agent.document() == ["A: recover resume"]
    assert agent.ends("resume") == []
    assert agent.workflows == {}


@pytest.mark.parametrize("where", WHERE)
def test_after_a_reboot_an_event_that_is_gone_is_recovered_from_once(where: str) -> None:
    agent = an_agent(where)
    assert agent.restart("boot 2") == ["A: recover resume"]
    assert agent.of().outcome == "completed"
    assert agent.ends("resume") == []
    assert agent.workflows == {}


@pytest.mark.parametrize("where", WHERE)
def test_an_operators_hold_stops_what_a_reboot_has_undone(where: str) -> None:
    agent = an_agent(where)
    if agent.of().approval.state != "confirmed":
        agent.operator("hold")
        assert agent.restart("boot 2", EVENT) == []
        assert agent.phase == "held"
        assert agent.operator("release") == FIRST


def test_a_drain_is_begun_anew_after_a_reboot() -> None:
    agent = Agent(a_rule(drain_for=20.0))
    agent.document(EVENT)
    agent.wait(6)
    assert agent.restart("boot 2", EVENT) == []
    assert agent.of().drain_until == agent.context.now + timedelta(seconds=20)
    assert next_wake_at(agent.workflows, agent.context) == agent.of().drain_until
    assert agent.tick(19) == []
    assert agent.tick(1) == FIRST


def test_a_drain_alone_is_begun_anew_too_unless_an_operator_holds_it() -> None:
    for is_held in (False, True):
        agent = Agent(a_rule(prepare=(), drain_for=20.0))
        agent.document(EVENT)
        agent.tick(21)
        if is_held:
            agent.operator("hold")
        assert agent.restart("boot 2", EVENT) == []
        assert agent.phase == ("held" if is_held else "preparing")
        assert agent.tick(21) == ([] if is_held else ["A: approve A"])


def test_an_observed_event_is_not_prepared_again() -> None:
    agent = an_agent("in hook 2")
    agent.reload(*agent.context.rules, is_acting=False)
    assert agent.restart("boot 2", EVENT) == []
    assert agent.reload(*agent.context.rules, is_acting=True) == FIRST


# --- what counts once


@pytest.mark.parametrize("on_failure", ["hold", "approve"])
def test_an_approval_before_a_failure_is_void(on_failure: str) -> None:
    agent = Agent(a_rule(approve="manual", lead=3600.0, on_failure=on_failure))
    agent.document(EVENT)
    assert agent.operator("approve") == []
    assert agent.ends("drain", "failed") == []
    assert "operator: the operator's approval is void: hook drain failed" in agent.journal
    assert agent.of().operator_action == ""
    assert agent.phase == ("held" if on_failure == "hold" else "prepared")
    assert agent.operator("approve") == ["A: approve A"]


def test_an_approval_that_began_it_early_is_void_after_a_failure_too() -> None:
    agent = Agent(a_rule(lead=60.0))
    agent.document(EVENT)
    assert agent.operator("approve") == FIRST
    assert agent.ends("drain", "failed") == []
    assert agent.phase == "held"


def test_without_a_failure_an_earlier_approval_counts() -> None:
    agent = Agent(a_rule(approve="manual", lead=3600.0))
    agent.document(EVENT)
    agent.operator("approve")
    agent.ends("drain")
    assert agent.ends("checkpoint") == ["A: approve A"]


@pytest.mark.parametrize("after", [1, -3600])
def test_no_hook_begins_beside_one_of_an_earlier_appearance(after: float) -> None:
    """``after``: the seconds by the wall clock, which may be set back, until the event returns."""
    agent = Agent(a_rule(recover=()))
    assert agent.document(EVENT) == FIRST
    assert agent.document() == ["A: cancel prepare"]
    assert agent.document(EVENT, after=after) == []  # the hook ignores SIGTERM
    (first, second) = agent.all_of("A")
    assert (first.prepare.current, second.prepare.current) == ("drain", None)
    assert agent.ends("drain", "canceled") == FIRST


def test_an_event_that_is_scheduled_again_after_its_start_is_another_one() -> None:
    agent = Agent(a_rule())
    agent.document(an_event(id="B", type="Freeze", not_before=START + timedelta(days=1)))
    agent.ends("drain", event="B")
    agent.ends("checkpoint", event="B")
    agent.answer(event="B")
    other = an_event(id="B", type="Freeze", not_before=START + timedelta(days=1))
    agent.document(EVENT, other)
    agent.ends("drain")
    agent.ends("checkpoint")
    agent.document(started(EVENT), other)
    assert agent.document(other) == []  # B still needs what would be undone
    assert agent.phase == "recovering"
    again = an_event(type="Redeploy")
    assert agent.document(again, other) == FIRST
    assert {workflow.phase for workflow in agent.all_of("A")} == {"recovering", "preparing"}


def test_an_event_that_is_listed_without_a_gap_does_not_start_twice() -> None:
    agent = Agent(a_rule())
    agent.document(EVENT)
    agent.ends("drain")
    agent.ends("checkpoint")
    agent.document(started(EVENT))
    assert agent.document(EVENT) == []
    assert agent.phase == "started"
    assert len(agent.workflows) == 1


@pytest.mark.parametrize("seconds", [25.0, -15.0])
def test_a_clock_that_is_set_moves_the_deadline_of_a_hook_that_runs(seconds: float) -> None:
    agent = Agent(a_rule())
    agent.document(EVENT)
    agent.wait(1 + seconds)
    assert agent.send(ClockChanged(seconds)) == ["A: move deadline"]
    agent.ends("drain")
    agent.ends("checkpoint")
    assert agent.send(ClockChanged(seconds)) == []


@pytest.mark.parametrize(("type_", "is_urgent"), [("Preempt", True), ("Redeploy", False)])
def test_an_eviction_leaves_no_time_to_a_recovery_that_delays_it(type_: Any, is_urgent: bool) -> None:
    agent = Agent(a_rule())
    agent.document(EVENT)
    agent.ends("drain")
    agent.ends("checkpoint")
    assert agent.document() == ["A: recover resume"]
    assert agent.document(an_event(id="B", type=type_)) == ["A: cancel recover"]
    cancels = [
        effect for step in agent.last.transitions for effect in step.effects if isinstance(effect, CancelHook)
    ]
    assert [cancel.is_urgent for cancel in cancels] == [is_urgent]
    assert agent.ends("resume", "canceled") == ["B: prepare drain"]


def test_a_preparation_that_had_only_waited_is_not_recovered_after_a_reboot() -> None:
    preempt = an_event(id="P", type="Preempt", not_before=START + timedelta(minutes=5))
    agent = Agent(a_rule(prepare=("drain",)), serialized=frozenset({"drain"}))
    assert agent.document(preempt, EVENT) == ["P: prepare drain"]
    assert agent.wait_message() == "waits for another run of hook drain"
    assert "A: recover resume" not in agent.restart("boot 2", preempt)
    assert agent.all_of("A") == []


def test_after_a_reboot_a_reappearing_event_is_prepared_from_its_first_hook() -> None:
    """Its recovery waited for another event, so that it was as prepared as before, but for the reboot."""
    other = an_event(id="B")
    agent = Agent(a_rule(prepare=("drain",), approve="manual", lead=3600.0))
    agent.document(EVENT, other, after=30)
    agent.ends("drain", event="A")
    agent.ends("drain", event="B")
    agent.document(other)
    assert agent.of("A").phase == "recovering"
    assert agent.restart("boot 2", other) == ["B: prepare drain"]
    assert "A: prepare drain" in agent.document(EVENT, other)
    assert agent.of("A").phase == "preparing"
