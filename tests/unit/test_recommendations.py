"""The life of a SpotRebalanceRecommendation, alone and beside the Preempt that it warns of."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from test_workflow import START, Agent, a_rule, an_event

from scheduled_events_agent.engine.document_tracker import DocumentTracker
from scheduled_events_agent.imds.compare import Missing
from scheduled_events_agent.imds.document import Document, ScheduledEvent, parse_document
from scheduled_events_agent.policy import Rule, When
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.workflow import ClockChanged, OperatorAction, is_applied, is_ready, next_wake_at

HOUR = 3600.0
NAMES = ("vm_1",)


def a_recommendation(**changes: Any) -> ScheduledEvent:
    return an_event(**{"id": "R", "type": "SpotRebalanceRecommendation", "not_before": None, **changes})


def a_preempt(**changes: Any) -> ScheduledEvent:
    return an_event(**{"id": "P", "type": "Preempt", "not_before": START + timedelta(minutes=5), **changes})


def advice(**changes: Any) -> Rule:
    when = When(type=("SpotRebalanceRecommendation",))
    fields = {"name": "advice", "when": when, "prepare": ("drain",), "recover": ("undrain",), "approve": "never"}
    return a_rule(**{**fields, **changes})


def eviction(**changes: Any) -> Rule:
    return a_rule(
        **{"name": "eviction", "when": When(type=("Preempt",)), "prepare": ("save",), "recover": (), **changes}
    )


def prepared(*rules: Rule, **context: Any) -> Agent:
    """An agent that has prepared for a recommendation."""
    agent = Agent(*(rules or (advice(), eviction())), **context)
    assert agent.document(a_recommendation()) == ["R-RECOMMENDATION: prepare drain"]
    assert agent.ends("drain", event="R") == []
    return agent


@pytest.mark.parametrize("rule", [a_rule(), a_rule(when=When(type=("Preempt", "Reboot")))])
def test_a_rule_without_a_type_does_not_match_it(rule: Rule) -> None:
    agent = Agent(rule)
    assert agent.document(a_recommendation()) == []
    assert (agent.workflows, agent.journal) == ({}, [])


@pytest.mark.parametrize("approve", ["immediately", "when-prepared", "manual", "never"])
def test_it_is_never_approved_whatever_the_rule_or_an_operator_says(approve: str) -> None:
    agent = prepared(advice(approve=approve))
    assert agent.of("R").phase == "prepared"
    assert agent.operator("approve", "R") == []
    assert agent.tick() == []
    assert (agent.of("R").decision.approve, agent.of("R").approval.state) == ("never", "none")
    assert agent.wait_message("R") == "prepared until it is over, at the latest until 2026-03-02 13:00:01 UTC"
    assert not is_ready(agent.workflows)


@pytest.mark.parametrize("status", ["Scheduled", "Started", "Other"])
@pytest.mark.parametrize("minutes", [None, -5, 0.1, 600])
def test_it_begins_at_once_and_no_time_or_status_of_it_ends_its_hooks(status: str, minutes: float | None) -> None:
    agent = Agent(advice(lead=60.0, on_start=("note",)))
    not_before = None if minutes is None else START + timedelta(minutes=minutes)
    event = a_recommendation(status=status, not_before=not_before)
    assert agent.document(event) == ["R-RECOMMENDATION: prepare drain"]
    assert agent.document(event, after=1200) == []
    assert agent.ends("drain", event="R") == []
    assert agent.of("R").phase == "prepared"


def test_it_is_recovered_when_the_document_lacks_it() -> None:
    agent = prepared()
    assert agent.document() == ["R-RECOMMENDATION: recover undrain"]
    assert agent.of("R").outcome == "unknown"
    agent.ends("undrain", event="R")
    assert agent.workflows == {}


def test_it_expires_recovers_and_stays_closed_while_the_document_lists_it() -> None:
    agent = prepared(advice(expire_after=HOUR))
    assert next_wake_at(agent.workflows, agent.context) == START + timedelta(seconds=HOUR + 1)
    assert agent.tick(HOUR - 2) == []
    assert agent.tick(2) == ["R-RECOMMENDATION: recover undrain"]
    assert agent.ends("undrain", event="R") == []
    assert agent.workflows == {}
    assert agent.journal[-1] == "closed: is over: expired"
    told = len(agent.journal)
    for _ in range(3):
        assert agent.document(a_recommendation(description="another"), after=2 * HOUR) == []
        assert agent.restart("boot 2", a_recommendation()) == []
        assert agent.reload(advice(prepare=("drain", "more"))) == []
    assert agent.answer_once() == []
    assert agent.document(a_recommendation()) == []  # one answer lacked it, which says nothing
    assert agent.answer_once() == []
    assert agent.answer_once() == []
    assert (agent.workflows, len(agent.journal)) == ({}, told)
    # Another one is news.
    agent.reload(advice())
    assert agent.document(a_recommendation()) == ["R-RECOMMENDATION: prepare drain"]


def test_a_recommendation_that_expires_during_its_hook_is_canceled_and_recovered() -> None:
    agent = Agent(advice(expire_after=60.0))
    agent.document(a_recommendation())
    assert agent.tick(61) == ["R-RECOMMENDATION: cancel prepare"]
    assert agent.ends("drain", "canceled", event="R") == ["R-RECOMMENDATION: recover undrain"]


def test_a_recommendation_that_expires_while_missing_recovers() -> None:
    """Such as after a change to an api-version that leaves it out."""
    agent = prepared()
    assert agent.send(Missing(a_recommendation().key)) == []
    assert agent.tick(2 * HOUR) == ["R-RECOMMENDATION: recover undrain"]
    agent.ends("undrain", event="R")
    assert is_ready(agent.workflows)


def test_a_recovery_that_failed_after_it_expired_can_be_tried_again_or_resolved() -> None:
    cases: dict[OperatorAction, list[str]] = {"retry": ["R-RECOMMENDATION: recover undrain"], "resolve": []}
    for action, effects in cases.items():
        agent = prepared()
        agent.tick(2 * HOUR)
        agent.ends("undrain", "failed", event="R")
        assert (agent.of("R").phase, is_ready(agent.workflows)) == ("recovery_failed", False)
        assert agent.operator(action, "R") == effects
        assert is_applied(agent.last.transitions[-1].workflow, action)
        if effects:
            agent.ends("undrain", event="R")
        assert agent.workflows == {}
        assert agent.journal[-1].startswith("closed: is over: expired")


def test_a_hold_lets_nothing_begin_and_a_release_does() -> None:
    agent = Agent(advice(drain_for=30.0))
    agent.document(a_recommendation())
    agent.operator("hold", "R")
    assert agent.tick(60) == []
    assert agent.of("R").phase == "held"
    assert agent.operator("release", "R") == ["R-RECOMMENDATION: prepare drain"]


def test_a_failed_hook_leaves_it_held_until_it_is_tried_again() -> None:
    agent = Agent(advice())
    agent.document(a_recommendation())
    agent.ends("drain", "failed", event="R")
    assert (agent.of("R").phase, is_ready(agent.workflows)) == ("held", False)
    assert agent.journal[-1] == "held: held: hook drain: exit code 1"
    assert agent.operator("retry", "R") == ["R-RECOMMENDATION: prepare drain"]


def test_a_changed_clock_does_not_let_it_expire() -> None:
    agent = prepared()
    agent.wait(2 * HOUR)
    assert agent.send(ClockChanged(2 * HOUR)) == []
    assert agent.of("R").phase == "prepared"


def test_it_is_not_recovered_while_an_eviction_is_pending_and_then_is_once() -> None:
    agent = prepared()
    assert agent.document(a_recommendation(), a_preempt()) == ["P: prepare save"]
    assert agent.ends("save", event="P") == ["P: approve P"]
    assert agent.document(a_preempt()) == []
    assert agent.wait_message("R") == "event P still needs it prepared"
    assert agent.restart("boot 1", a_preempt()) == ["P: approve P"]
    assert agent.document() == ["R-RECOMMENDATION: recover undrain"]
    agent.ends("undrain", event="R")
    assert agent.workflows == {}


def test_an_eviction_counts_without_a_rule_and_one_of_another_vm_does_not() -> None:
    agent = prepared(advice(), a_rule(when=When(affects=("others",)), prepare=(), recover=()))
    assert agent.document(a_preempt()) == []
    assert agent.of("R").phase == "recovering"
    assert agent.document(a_preempt(id="Q", resources=("vm_2",))) == ["R-RECOMMENDATION: recover undrain"]


def test_an_eviction_interrupts_the_recovery_which_is_then_repeated() -> None:
    agent = prepared()
    assert agent.document() == ["R-RECOMMENDATION: recover undrain"]
    assert sorted(agent.document(a_preempt())) == ["P: prepare save", "R-RECOMMENDATION: cancel recover"]
    assert agent.ends("undrain", "canceled", event="R") == []
    agent.ends("save", event="P")
    assert agent.document() == ["R-RECOMMENDATION: recover undrain"]


def test_an_eviction_under_the_same_id_is_an_event_of_its_own() -> None:
    agent = prepared()
    assert agent.document(a_preempt(id="R")) == ["R: prepare save"]
    assert len(agent.workflows) == 2
    document = parse_document(
        b'{"Events": [{"EventId": "R", "EventType": "Preempt", "EventStatus": "Scheduled"},'
        b'{"EventId": "R", "EventType": "SpotRebalanceRecommendation", "EventStatus": "Scheduled"}]}'
    )
    assert [event.type for event in document.events] == ["Preempt", "SpotRebalanceRecommendation"]
    assert not any(event.is_ambiguous for event in document.events)


BOTH = (advice(prepare=("drain",)), eviction(prepare=("drain", "save"), recover=("undrain",)))


def test_the_eviction_runs_its_whole_list_of_hooks() -> None:
    agent = prepared(*BOTH)
    assert agent.document(a_recommendation(), a_preempt()) == ["P: prepare drain"]
    assert agent.ends("drain", event="P") == ["P: prepare save"]


def test_a_document_of_an_api_version_without_it_says_nothing_about_it() -> None:
    agent = prepared()
    documents, settings = DocumentTracker(), Settings()
    reboot = an_event(id="B")
    for answered, has_recommendations, found in ((1.0, False, []), (9.0, False, []), (10.0, True, [Missing])):
        document = Document(incarnation="1", events=(), has_recommendations=has_recommendations)
        documents.receive(replace(document, answered=answered), answered, NAMES)
        assert [type(change) for change in documents.compare(agent.workflows, NAMES, settings, ())] == found
        documents.committed(has_errors=False)
    agent.document(a_recommendation(), reboot)
    documents.receive(Document(incarnation="2", events=(reboot,), has_recommendations=False), 20.0, NAMES)
    assert documents.compare(agent.workflows, NAMES, settings, ()) == []


@pytest.mark.parametrize("phase", ["waiting", "held", "preparing", "prepared", "failed"])
def test_it_ends_when_no_rule_names_its_type_any_more(phase: str) -> None:
    agent = lead_to(phase)
    effects = agent.reload(eviction())
    assert effects == end_of(phase, agent)
    assert agent.journal[-1] == "closed: is over: expired"
    assert "expired: has expired: no rule names its type any more" in agent.journal
    assert agent.workflows == {}
    assert agent.reload(advice()) == []
    assert agent.document(a_recommendation()) == []  # it has ended, and is still listed


@pytest.mark.parametrize("phase", ["waiting", "held", "preparing", "prepared", "failed", "recovering"])
def test_an_operator_ends_it_in_any_phase(phase: str) -> None:
    agent = lead_to(phase)
    effects = agent.operator("resolve", "R")
    assert is_applied(agent.last.transitions[0].workflow, "resolve")
    assert effects == end_of(phase, agent)
    assert agent.journal[-1].startswith("closed: is over: ")
    assert agent.workflows == {}


def lead_to(phase: str) -> Agent:
    """An agent that follows a recommendation, and has got so far with it."""
    if phase in ("prepared", "recovering"):
        agent = prepared()
        if phase == "recovering":
            agent.document(a_preempt())  # which it waits for
            agent.ends("save", event="P")
    else:
        agent = Agent(advice(prepare=("drain",)), eviction())
        agent.document(a_recommendation())
    match phase:
        case "waiting":  # such as one that observed
            agent = Agent(advice(), eviction(), is_acting=False)
            agent.document(a_recommendation())
        case "held":
            agent = Agent(advice(drain_for=60.0))
            agent.document(a_recommendation())
            agent.operator("hold", "R")
            agent.tick(60)
        case "failed":
            agent.ends("drain", "failed", event="R")
    assert agent.of("R").phase == ("held" if phase == "failed" else phase)
    return agent


def end_of(phase: str, agent: Agent) -> list[str]:
    """End what was prepared; the hooks end at once."""
    if phase in ("waiting", "recovering"):
        if phase == "recovering":
            agent.document()
        return []
    if phase == "preparing":
        assert agent.ends("drain", "canceled", event="R") == ["R-RECOMMENDATION: recover undrain"]
        agent.ends("undrain", event="R")
        return ["R-RECOMMENDATION: cancel prepare"]
    agent.ends("undrain", event="R")
    return ["R-RECOMMENDATION: recover undrain"]
