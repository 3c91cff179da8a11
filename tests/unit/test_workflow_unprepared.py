"""An event that Azure starts before it is prepared as its rule wants; and one of an unknown VM."""

from datetime import time, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from test_workflow import START, Agent, a_rule, an_event, started
from test_workflow_fleet import FULL

from scheduled_events_agent.imds.compare import Gone, Missing, Seen
from scheduled_events_agent.policy import MaintenanceWindow, Rule, When
from scheduled_events_agent.workflow import ClockChanged, FleetView, PolicyChanged, next_wake_at

EVENT = an_event()
DRAIN = a_rule(prepare=("drain",))
LATE = replace(DRAIN, lead=300.0)
FLEET = FleetView(max_events=1, statuses={"a": replace(FULL, workflow_id="a@20260302T120001.000000Z")})


def said(agent: Agent, kind: str = "unprepared") -> list[str]:
    return [line.removeprefix(f"{kind}: ") for line in agent.journal if line.startswith(f"{kind}:")]


def starts(agent: Agent, text: str = "", kind: str = "") -> None:
    """Azure starts the event: this is said of it, once."""
    agent.document(started(EVENT))
    assert said(agent) == ([f"unprepared: {text}"] if text else [])
    unprepared = agent.of().unprepared
    assert (unprepared.kind if unprepared else "") == kind
    agent.document(started(EVENT))
    agent.restart("boot 1", started(EVENT))
    agent.document()
    assert len(said(agent)) == bool(text), "it is said once"


def test_what_is_prepared_or_wants_no_preparation_is_not_said_to_be_unprepared() -> None:
    agent = Agent(DRAIN)
    agent.document(EVENT)
    agent.ends("drain")
    starts(agent)
    for rule in (a_rule(prepare=()), a_rule(prepare=(), recover=(), approve="never")):
        agent = Agent(rule)
        agent.document(EVENT)
        starts(agent)
    agent = Agent()
    agent.document(EVENT)
    starts(agent)


def test_it_waited_for_a_slot() -> None:
    agent = Agent(DRAIN, fleet=FLEET)
    agent.document(EVENT)
    starts(agent, "it waited for a slot (1st in line, behind event 602d9444)", "slot")


def test_it_waited_for_the_answer_of_the_store() -> None:
    agent = Agent(DRAIN, fleet=FleetView(max_events=1))
    agent.document(EVENT)
    starts(agent, "it waited for an answer of the fleet's store", "fleet")


def test_its_time_had_not_come() -> None:
    """As where this VM's clock is behind."""
    agent = Agent(LATE)
    agent.document(EVENT)
    starts(agent, "its time had not come, it was to begin at 2026-03-02 12:10:00 UTC (lead 5m)", "time")


def test_its_window_had_not_opened() -> None:
    """To people, the log and the metric this is a time that had not come."""
    night = MaintenanceWindow(start=time(12, 10), length=60.0)
    agent = Agent(replace(LATE, window="night", lead=60.0), windows={"night": night})
    agent.document(EVENT)
    starts(agent, "its time had not come, it was to begin at 2026-03-02 12:10:00 UTC (window night opens)", "time")


def test_an_answer_that_lacks_the_event_does_not_hide_why() -> None:
    agent = Agent(LATE)
    agent.document(EVENT)
    agent.answer_once()
    starts(agent, "its time had not come, it was to begin at 2026-03-02 12:10:00 UTC (lead 5m)", "time")


def test_a_hook_had_failed() -> None:
    agent = Agent(DRAIN)
    agent.document(EVENT)
    agent.ends("drain", "failed")
    starts(agent, "hook drain: exit code 1", "hook_failed")


def test_a_hook_still_ran() -> None:
    agent = Agent(a_rule())
    agent.document(EVENT)
    agent.ends("drain")
    starts(agent, "preparation was not done, hook checkpoint had not ended", "unfinished")


@pytest.mark.parametrize("hooks", [("drain",), ()])
def test_a_drain_had_not_ended(hooks: tuple[str, ...]) -> None:
    agent = Agent(a_rule(prepare=hooks, drain_for=30.0))
    agent.document(EVENT)
    starts(agent, "preparation was not done, its drain had not ended", "unfinished")


def test_a_drain_that_is_over_when_azure_starts_the_event_is_done() -> None:
    agent = Agent(a_rule(prepare=(), drain_for=30.0, approve="manual", lead=86400.0))
    agent.document(EVENT)
    agent.wait(30)
    starts(agent)


def test_a_last_hook_whose_end_is_known_with_the_start_is_done() -> None:
    agent = Agent(DRAIN)
    agent.document(EVENT)
    workflow = agent.of()
    done = replace(workflow.prepare, current=None, done=("drain",))
    agent.workflows = {workflow.id: replace(workflow, prepare=done)}
    starts(agent)


def test_an_operator_held_it() -> None:
    agent = Agent(a_rule())
    agent.document(EVENT)
    agent.operator("hold")
    agent.ends("drain")
    starts(agent, "an operator held it", "held")


def test_an_operator_was_asked_and_has_not_answered() -> None:
    agent = Agent(replace(LATE, approve="manual"))
    agent.document(EVENT)
    starts(agent, "no operator has approved it", "manual")


def test_the_agent_only_observed() -> None:
    agent = Agent(DRAIN, is_acting=False)
    agent.document(EVENT)
    starts(agent, "the agent only observed", "observes")


def test_its_rule_approves_it_immediately() -> None:
    agent = Agent(replace(DRAIN, approve="immediately"))
    agent.document(EVENT)
    starts(agent, "its rule approves it immediately, and hook drain had not ended", "immediately")


@pytest.mark.parametrize("approve", ["when-prepared", "immediately"])
def test_its_rule_allows_the_failure(approve: Any) -> None:
    agent = Agent(replace(DRAIN, approve=approve, on_failure="approve" if approve == "when-prepared" else "hold"))
    agent.document(EVENT)
    agent.ends("drain", "failed")
    text = "hook drain: exit code 1, which its rule or an operator allowed"
    starts(agent, text, "failure_allowed")


def test_an_operator_allows_the_failure() -> None:
    agent = Agent(DRAIN)
    agent.document(EVENT)
    agent.ends("drain", "failed")
    agent.operator("approve")
    starts(agent, "hook drain: exit code 1, which its rule or an operator allowed", "failure_allowed")


def test_there_was_no_notice() -> None:
    starts(Agent(DRAIN), "it had started when it was first seen", "no_notice")
    starts(Agent(a_rule(prepare=())))
    starts(Agent())


def test_what_was_prepared_before_the_state_was_lost_is_not_known() -> None:
    starts(Agent(DRAIN, is_state_lost=True))


def test_a_recommendation_starts_nothing() -> None:
    agent = Agent(a_rule(when=When(type=("SpotRebalanceRecommendation",))))
    event = an_event(type="SpotRebalanceRecommendation")
    agent.document(event)
    agent.document(started(event))
    assert said(agent) == []


def test_a_rule_that_is_loaded_after_the_start_wanted_nothing_before_it() -> None:
    agent = Agent()
    agent.document(EVENT)
    agent.document(started(EVENT))
    agent.reload(DRAIN)
    assert said(agent) == []


# --- Over a reboot.


@pytest.mark.parametrize("is_seen", [True, False], ids=["start is seen", "start is not seen"])
@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize(
    ("ended", "text"),
    [
        ((("drain", "succeeded"), ("checkpoint", "succeeded")), ""),
        ((("drain", "succeeded"),), "preparation was not done, hook checkpoint had not ended"),
        ((("drain", "failed"),), "hook drain: exit code 1"),
    ],
    ids=["prepared", "half done", "failed"],
)
def test_what_counts_is_how_it_was_when_the_machine_went_down(
    ended: tuple[tuple[str, Any], ...], text: str, restarts: int, *, is_seen: bool
) -> None:
    agent = Agent(a_rule())
    agent.document(EVENT)
    for hook, outcome in ended:
        agent.ends(hook, outcome)
    agent.wait(16 * 60)
    for _ in range(restarts):
        agent.restart("boot 2", document=False)
    agent.document(*([started(EVENT)] if is_seen else []))
    assert said(agent) == ([f"unprepared: {text}"] if text else [])


def test_it_is_prepared_again_after_a_reboot_of_which_the_event_is_not_the_cause() -> None:
    agent = Agent(DRAIN)
    agent.document(EVENT)
    agent.ends("drain")
    assert agent.restart("boot 2", EVENT) == ["A: prepare drain"]
    starts(agent, "preparation was not done, hook drain had not ended", "unfinished")


def test_an_event_that_vanishes_before_its_time_is_not_said_to_have_started() -> None:
    agent = Agent(LATE)
    agent.document(EVENT)
    agent.restart("boot 2", EVENT)
    agent.document()
    assert said(agent) == []


def test_an_event_that_is_canceled_is_not_said_to_have_started() -> None:
    agent = Agent(LATE)
    agent.document(EVENT)
    agent.document()
    assert said(agent) == []


# --- Whose event it is.


def test_its_vm_was_not_known() -> None:
    """It is said when the name is known: until then no rule is known to want anything."""
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.document(started(EVENT))
    assert said(agent) == []
    agent.reload(DRAIN, names=("vm_1",))
    agent.document(started(EVENT))
    assert said(agent) == ["unprepared: nothing said whether it names this VM"]


@pytest.mark.parametrize("names", [(), ("vm_1",)], ids=["no name", "a name that may be another VM's"])
@pytest.mark.parametrize("is_over", [False, True], ids=["pending", "over"])
@pytest.mark.parametrize("boot_id", ["boot 1", "boot 2"], ids=["same boot", "reboot"])
def test_nothing_moved_until_it_was_known_which_vm_this_is(
    names: tuple[str, ...], boot_id: str, *, is_over: bool
) -> None:
    """As where the metadata service has not said that since the boot: no document counts before."""
    agent = Agent(DRAIN, names=names)
    agent.send(Seen(EVENT))
    if boot_id != "boot 1":
        agent.restart(boot_id, document=False)
    if boot_id == "boot 1" or not is_over:  # else the reboot was its start
        agent.send(Seen(started(EVENT)))
    agent.wait(16 * 60)
    if is_over:
        agent.send(Missing(EVENT.key))
        agent.send(Gone(EVENT.key))
    agent.context = replace(agent.context, document_at=agent.context.now)
    agent.reload(DRAIN, names=("vm_1",))
    agent.document(*([] if is_over else [started(EVENT)]))
    assert said(agent) == ["unprepared: nothing said whether it names this VM"]


@pytest.mark.parametrize("rules", [(), (a_rule(prepare=()),)], ids=["no rule", "no hooks"])
def test_a_name_that_comes_late_makes_nothing_unprepared_for_which_no_rule_prepares(rules: tuple[Rule]) -> None:
    agent = Agent(*rules, names=())
    agent.document(EVENT)
    agent.document(started(EVENT))
    agent.reload(*rules, names=("vm_1",))
    assert said(agent) == []
    assert agent.of().unprepared is None


def test_a_name_that_comes_with_the_start() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.context = replace(agent.context, names=("vm_1",))
    starts(agent, "nothing said whether it names this VM", "vm_unknown")


def test_an_event_of_another_vm_is_nothing_to_this_one() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.document(started(EVENT))
    agent.reload(DRAIN, names=("vm_2",))
    assert said(agent) == []


UNKNOWN = "nothing says whether it names this VM: this VM's name is not known; give it as vm.name in the policy, "


def test_an_event_of_an_unknown_vm_is_noted_once_after_ten_seconds() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    due = START + timedelta(seconds=11)
    assert next_wake_at(agent.workflows, agent.context) == due
    agent.tick(9.9)
    assert said(agent, "vm_unknown") == []
    agent.tick(0.1)
    assert said(agent, "vm_unknown") == [f"{UNKNOWN}then reload; Azure starts it at 2026-03-02 12:15:00 UTC"]
    assert next_wake_at(agent.workflows, agent.context) is None
    agent.tick(100)
    agent.restart("boot 1", EVENT)
    agent.reload(DRAIN, names=("vm_1",))
    agent.reload(DRAIN, names=())
    agent.tick(100)
    assert len(said(agent, "vm_unknown")) == 1


def test_a_name_that_comes_in_time_leaves_nothing_to_note() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.tick(9)
    agent.reload(DRAIN, names=("vm_1",))
    agent.tick(10)
    assert said(agent, "vm_unknown") == []


def test_an_event_that_is_over_needs_no_name() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.answer_once()
    agent.tick(20)
    assert said(agent, "vm_unknown") == []
    agent.document()
    assert said(agent, "vm_unknown") == []


def test_a_clock_that_is_set_leaves_the_ten_seconds() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.wait(3600)
    agent.send(ClockChanged(3600.0))
    agent.tick(9)
    assert said(agent, "vm_unknown") == []
    agent.tick(1)
    assert len(said(agent, "vm_unknown")) == 1


def test_an_event_that_names_no_vm_at_all() -> None:
    agent = Agent(DRAIN)
    agent.document(an_event(resources=()))
    agent.tick(10)
    text = (
        "nothing says whether it names this VM: the event names no VM; Azure starts it at 2026-03-02 12:15:00 UTC"
    )
    assert said(agent, "vm_unknown") == [text]


def test_one_that_has_started_is_noted_too() -> None:
    agent = Agent(DRAIN, names=())
    agent.document(started(EVENT))
    agent.tick(10)
    assert said(agent, "vm_unknown") == [f"{UNKNOWN}then reload"]


def test_it_is_noted_before_the_first_document_too() -> None:
    """As on a disk that may be a copy of another VM's."""
    agent = Agent(DRAIN, names=())
    agent.document(EVENT)
    agent.context = replace(agent.context, document_at=None)
    agent.send(PolicyChanged())
    agent.tick(10)
    assert len(said(agent, "vm_unknown")) == 1
