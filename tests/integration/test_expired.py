"""A recommendation that is over and still listed does not begin again, also over a restart of the agent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace
from test_holds import HOURS, Agent

from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Rule, When

WARNING = ScheduledEvent(
    id="R", type="SpotRebalanceRecommendation", status="Scheduled", source="Platform", resources=("vm-1",)
)
KEY = "r-recommendation"
EXPIRED, HOLD = ("expired", KEY), ("hold", KEY)


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Agent]:
    """The agent has prepared for it."""
    agent = Agent(tmp_path)
    when = When(type=("SpotRebalanceRecommendation",))
    rule = Rule(name="all", when=when, prepare=("drain",), recover=("resume",), expire_after=HOURS)
    agent.settings = replace(agent.settings, rules=(rule,))
    agent.restart()
    agent.read(WARNING)
    agent.end("drain")
    yield agent
    agent.store.close()


@pytest.fixture
def agent(prepared: Agent) -> Agent:
    """It has expired, and is recovered from."""
    expire(prepared, "time")
    assert list(prepared.store.load_remembered()) == [EXPIRED]
    return prepared


def expire(agent: Agent, why: Literal["time", "rules"]) -> None:
    if why == "time":
        agent.machine.wait(HOURS)
    else:
        other = replace(agent.settings.rules[0], when=When(type=("Freeze",)))
        agent.engine.change_settings(replace(agent.settings, rules=(other,)))
    agent.read(WARNING)
    agent.end("resume")
    assert agent.engine.workflows == {}
    agent.engine.change_settings(agent.settings)
    agent.executor.start_hook.reset_mock()


def test_it_does_not_begin_again_while_it_is_listed(agent: Agent) -> None:
    for day in range(3):
        for _ in range(30):
            agent.machine.wait(HOURS)
            agent.read(replace(WARNING, description=f"day {day}"))
            agent.engine.maintain()
        agent.restart()
        agent.read(WARNING)
    assert (agent.started, agent.engine.workflows) == ([], {})
    assert list(agent.store.load_remembered()) == [EXPIRED]


def test_two_documents_without_the_event_forget_it(agent: Agent) -> None:
    agent.read()
    assert agent.engine.snapshot.needs_answer
    agent.read(WARNING)
    assert not agent.engine.snapshot.needs_answer
    agent.read()
    agent.read()
    assert not agent.engine.snapshot.needs_answer
    assert (agent.started, agent.store.load_remembered()) == ([], {})
    agent.restart()
    agent.read(WARNING)
    assert agent.started == ["drain"]


def test_a_document_that_cannot_list_it_is_ignored(agent: Agent) -> None:
    def read_general_version() -> None:
        agent.machine.wait(1.0)
        answered = agent.machine.seconds
        agent.engine.receive(Document(incarnation="", events=(), has_recommendations=False, answered=answered))
        assert agent.engine.run_cycle(agent.machine.now())
        agent.engine.maintain()

    for _ in range(20):
        read_general_version()
        agent.machine.wait(HOURS)
    assert list(agent.store.load_remembered()) == [EXPIRED]
    agent.read(WARNING)
    assert agent.started == []
    agent.engine.maintain()
    for _ in range(23):
        agent.machine.wait(HOURS)
        read_general_version()
    assert list(agent.store.load_remembered()) == [EXPIRED]
    agent.machine.wait(HOURS)
    read_general_version()
    assert agent.store.load_remembered() == {}  # a day after it was last listed


def test_a_start_without_a_document_forgets_nothing(agent: Agent) -> None:
    agent.machine.wait(48 * HOURS)
    agent.restart()
    agent.engine.maintain()
    assert agent.engine.run_cycle(None)
    agent.engine.maintain()
    agent.read(WARNING)
    assert (agent.started, list(agent.store.load_remembered())) == ([], [EXPIRED])


def test_an_operator_ends_one_that_is_prepared(agent: Agent) -> None:
    agent.read()
    agent.read()
    agent.read(WARNING)
    agent.end("drain")
    assert (agent.ask("resolve") or "").startswith("resolved: the event is recovering, hook resume runs")
    agent.end("resume")
    assert agent.engine.workflows == {}
    agent.read(WARNING)
    assert agent.started == ["drain", "resume"]


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("why", ["time", "rules"])
def test_a_hold_counts_when_the_recommendation_has_expired_and_comes_back(
    prepared: Agent, why: Literal["time", "rules"], *, is_restarted: bool
) -> None:
    prepared.ask("hold")
    expire(prepared, why)
    if is_restarted:
        prepared.restart()
    prepared.read(WARNING)
    assert set(prepared.store.load_remembered()) == {HOLD, EXPIRED}
    prepared.read()
    prepared.read()
    assert set(prepared.store.load_remembered()) == {HOLD}
    prepared.read(WARNING)
    assert (prepared.started, prepared.operator_action) == ([], "hold")
    prepared.ask("release")
    assert (prepared.started, prepared.store.load_remembered()) == (["drain"], {})


def test_a_hold_of_an_expired_recommendation_lasts_a_day_longer_than_documents_list_it(prepared: Agent) -> None:
    prepared.ask("hold")
    expire(prepared, "time")
    for _ in range(30):
        prepared.machine.wait(HOURS)
        prepared.read(WARNING)
        prepared.engine.maintain()
    prepared.read()
    prepared.read()
    prepared.machine.wait(22 * HOURS)
    prepared.read()
    prepared.engine.maintain()
    assert set(prepared.store.load_remembered()) == {HOLD}
    prepared.machine.wait(3 * HOURS)
    prepared.read()
    prepared.engine.maintain()
    assert prepared.store.load_remembered() == {}


def test_a_hold_of_an_expired_recommendation_can_be_released(prepared: Agent) -> None:
    prepared.ask("hold")
    expire(prepared, "time")
    assert prepared.ask("approve", KEY) == "rejected: the recommendation has expired; its hold can be released"
    assert prepared.ask("release", KEY) == "released; the recommendation has expired"
    prepared.read(WARNING)
    assert (prepared.started, list(prepared.store.load_remembered())) == ([], [EXPIRED])
    prepared.read()
    prepared.read()
    prepared.read(WARNING)
    assert prepared.started == ["drain"]


def test_an_operator_who_ends_a_recommendation_ends_its_hold(prepared: Agent) -> None:
    prepared.ask("hold")
    prepared.ask("resolve")
    prepared.end("resume")
    assert list(prepared.store.load_remembered()) == [EXPIRED]
    prepared.read()
    prepared.read()
    prepared.read(WARNING)
    assert prepared.started == ["drain", "resume", "drain"]
