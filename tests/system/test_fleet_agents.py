"""Several agents of one group on one simulator and one real table: none approves, and none begins, out of turn."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from azurite import Azurite, running_azurite  # noqa: F401 - a fixture
from harness import Agent, Simulator

VMS = ("web_0", "web_1", "web_2")


@pytest.fixture
def azure() -> Iterator[Simulator]:
    with Simulator(vms=VMS, rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agents(azurite: Azurite, azure: Simulator, tmp_path: Path) -> Iterator[list[Agent]]:
    """One for each VM, started, whose hook waits for ``let_go``."""
    table = azurite.create_table()
    with ExitStack() as stack:
        started = [stack.enter_context(closing(Agent(tmp_path / vm, azure.endpoint(vm)))) for vm in VMS]
        for agent in started:
            _start(agent, table)
        yield started
        for agent in started:  # pytest shows it on failure only
            sys.stdout.write(f"=== {agent.directory.name}\n{''.join(agent.history)}")


def _start(agent: Agent, table: str) -> None:
    rule = {"name": "impactful", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
    agent.write_policy(
        rules=[{**rule, "shared": "all-ready"}],
        hooks={"drain": agent.hook("drain", until="go"), **agent.hooks("resume")},
        fleet={"group": "web", "table": table, "max_events": 1},
    )
    agent.start()


def _wait_for_words(agent: Agent, event: str, words: str) -> None:
    agent.wait_until(lambda: words in agent.wait_text(event), f"it reported: {words}")


def test_an_event_of_three_vms_is_approved_once_all_are_prepared(azure: Simulator, agents: list[Agent]) -> None:
    event = azure.schedule("Reboot", vms=VMS, notice_seconds=900, lasts_seconds=1.0)
    for agent in agents:
        agent.wait_phase(event, "preparing")
    for agent in agents[:2]:
        agent.let_go("go")
        agent.wait_phase(event, "prepared")
    first = agents[0]
    _wait_for_words(first, event, "waits for web_2 to be ready")
    assert first.status()["fleet"] == {
        "group": "web",
        "error": "",
        "unavailable_since": None,
        "not_ready": ["web_2"],
        "warnings": [],
    }
    assert "waits for web_2" in " ".join(first.run("status", "--state-dir", str(first.state_dir)).stdout.split())
    assert azure.event(event).status == "Scheduled"
    agents[2].let_go("go")
    for agent in agents:
        agent.wait_log("closed", event_id=event)
        assert agent.ran() == ["drain", "resume"]
    first.wait_until(lambda: first.metric("fleet_wait_seconds_count", what="ready"), "it counted")
    assert first.metric("fleet_requests_total", operation="create", result="ok") > 0


def test_of_two_events_the_second_begins_when_the_first_has_recovered(
    azure: Simulator, agents: list[Agent]
) -> None:
    first = azure.schedule("Reboot", vms=VMS[:1], notice_seconds=900, lasts_seconds=1.0)
    agents[0].wait_phase(first, "preparing")
    second = azure.schedule("Reboot", vms=VMS[1:2], notice_seconds=900, lasts_seconds=1.0)
    _wait_for_words(agents[1], second, f"waits for a slot: 1st in line, behind event {first[:8]}; begins")
    assert agents[1].ran() == []
    agents[1].let_go("go")
    agents[0].let_go("go")
    for agent, event in zip(agents, (first, second), strict=False):
        agent.wait_log("closed", event_id=event)
    (recovered,) = agents[0].journal_times(kind="closed")
    (began,) = agents[1].journal_times(kind="preparing")
    assert recovered < began


def test_while_the_table_is_unavailable_nothing_is_approved_and_then_it_is(
    azure: Simulator, agents: list[Agent], azurite: Azurite
) -> None:
    event = azure.schedule("Reboot", vms=VMS, notice_seconds=900, lasts_seconds=1.0)
    for agent in agents:
        agent.wait_phase(event, "preparing")
    with azurite.stopped():
        for agent in agents:
            agent.let_go("go")
            agent.wait_phase(event, "prepared")
            _wait_for_words(agent, event, "the store cannot be used")
            assert agent.status()["fleet"]["error"]
        assert azure.event(event).status == "Scheduled"
    for agent in agents:
        agent.wait_log("closed", event_id=event)
        assert agent.ran() == ["drain", "resume"]


def test_an_agent_that_is_killed_while_it_waits_goes_on(azure: Simulator, agents: list[Agent]) -> None:
    event = azure.schedule("Reboot", vms=VMS, notice_seconds=900, lasts_seconds=1.0)
    for agent in agents[:2]:
        agent.let_go("go")
        agent.wait_phase(event, "prepared")
    agents[0].kill()
    agents[2].wait_phase(event, "preparing")
    agents[0].start()
    agents[2].let_go("go")
    for agent in agents:
        agent.wait_log("closed", event_id=event)
        assert agent.ran() == ["drain", "resume"]
