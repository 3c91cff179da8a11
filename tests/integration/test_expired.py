"""A recommendation that is over and still listed does not begin again, also over a restart of the agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_holds import HOURS, Agent

from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Rule, When

WARNING = ScheduledEvent(
    id="R", type="SpotRebalanceRecommendation", status="Scheduled", source="Platform", resources=("vm-1",)
)
KEY = "r-recommendation"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    when = When(type=("SpotRebalanceRecommendation",))
    rule = Rule(name="all", when=when, prepare=("drain",), recover=("resume",), expire_after=HOURS)
    agent.settings = replace(agent.settings, rules=(rule,))
    agent.restart()
    agent.read(WARNING)
    agent.end("drain")
    agent.machine.wait(HOURS)
    agent.read(WARNING)
    agent.end("resume")
    assert agent.engine.workflows == {}
    assert [one.reason for one in agent.store.load_remembered().values()] == ["expired"]
    agent.executor.start_hook.reset_mock()
    yield agent
    agent.store.close()


def test_it_does_not_begin_again_while_it_is_listed(agent: Agent) -> None:
    for day in range(3):
        for _ in range(30):
            agent.machine.wait(HOURS)
            agent.read(replace(WARNING, description=f"day {day}"))
            agent.engine.maintain()
        agent.restart()
        agent.read(WARNING)
    assert (agent.started, agent.engine.workflows) == ([], {})
    assert list(agent.store.load_remembered()) == [KEY]


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
    assert list(agent.store.load_remembered()) == [KEY]
    agent.read(WARNING)
    assert agent.started == []
    agent.engine.maintain()
    for _ in range(23):
        agent.machine.wait(HOURS)
        read_general_version()
    assert list(agent.store.load_remembered()) == [KEY]
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
    assert (agent.started, list(agent.store.load_remembered())) == ([], [KEY])


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
