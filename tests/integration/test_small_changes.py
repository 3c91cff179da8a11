"""An event whose text changes with each answer is not written to the disk with each answer."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace
from test_engine import START
from test_holds import EVENT, Agent

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Rule, When
from scheduled_events_agent.store import Store
from scheduled_events_agent.workflow import Workflow


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.store.close()


def test_six_hundred_descriptions_are_eleven_records_and_the_rule_sees_each(agent: Agent) -> None:
    late = Rule(name="late", when=When(description=("number 300",)), prepare=("drain",), lead=10 * 86400.0)
    agent.settings = replace(agent.settings, rules=(late,))
    agent.restart()
    with mock.patch.object(Store, "commit", autospec=True, side_effect=Store.commit) as commits:
        for number in range(1, 601):
            description = "number 300, and so on" if number >= 300 else f"number {number}"
            agent.read(replace(EVENT, description=f"{description} {'x' * (number % 7)}"))
            assert agent.started == ([] if number < 300 else ["drain"])
            (workflow,) = agent.engine.workflows.values()
            assert workflow.event.description.startswith(description)
    written = [call for call in commits.call_args_list if call.args[1]]
    changed = [entry for entry in agent.store.load_journal() if entry.kind == "changed"]
    assert len(changed) <= 11
    assert len(written) <= 11 + 2  # it is seen, and the rule matches it
    assert any("number 300" in entry.text for entry in changed)


@pytest.mark.parametrize(
    "changes",
    [
        {"description": "another"},
        {"duration_seconds": 7.0},
        {"source": "User"},
        {"resources": ("vm-1", "vm-2")},
        {"not_before": START + timedelta(days=9, seconds=59)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_small_change_counts_and_is_noted_once_a_minute(agent: Agent, changes: dict[str, object]) -> None:
    base = replace(EVENT, resources=("vm-1", "vm-3")) if "resources" in changes else EVENT
    other = replace(base, **changes)
    agent.settings = replace(agent.settings, rules=(replace(agent.settings.rules[0], shared="any"),))
    agent.restart()
    agent.read(base)
    agent.read(other)
    not_before_seen_at = workflow_of(agent).not_before_seen_at
    assert kinds(agent, other) == ["seen", "decided", "preparing", "hook_started", "changed"]
    for _ in range(20):
        agent.read(base)
        agent.read(other)
    assert kinds(agent, other).count("changed") == 1
    agent.machine.wait(60.0)
    agent.read(base)
    assert kinds(agent, base).count("changed") == 2
    assert workflow_of(agent).not_before_seen_at == not_before_seen_at


@pytest.mark.parametrize(
    "changes",
    [
        {"resources": ("vm-1", "vm-2")},
        {"not_before": START + timedelta(days=9, seconds=60)},
        {"not_before": None},
        {"status": "Started"},
        {"type": "Redeploy"},
    ],
)
def test_a_change_that_says_something_else_is_noted_each_time(agent: Agent, changes: dict[str, object]) -> None:
    agent.read(EVENT)
    agent.read(replace(EVENT, **changes))
    agent.read(EVENT)
    assert kinds(agent, EVENT).count("changed") == 2


def test_an_unwritten_update_is_read_again_after_a_restart(agent: Agent) -> None:
    agent.read(EVENT)
    agent.read(replace(EVENT, description="one"))
    agent.read(replace(EVENT, description="two"))
    agent.restart()
    assert workflow_of(agent).event.description == "one"
    agent.read(replace(EVENT, description="two"))
    assert workflow_of(agent).event.description == "two"


def kinds(agent: Agent, event: ScheduledEvent) -> list[str]:
    assert workflow_of(agent).event == event
    return [entry.kind for entry in agent.store.load_journal() if entry.event_id == event.id]


def workflow_of(agent: Agent) -> Workflow:
    (workflow,) = agent.engine.workflows.values()
    return workflow
