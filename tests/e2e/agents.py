"""Fixtures for all tests of the real command: agents and simulators that end with their test."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Agent, MakeAgent, Simulator
from time_forms import other_forms


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[MakeAgent]:
    """Makes agents that are ended with the test; what they wrote is shown if it fails."""
    agents: list[Agent] = []

    def make(endpoint: str, name: str = "agent") -> Agent:
        agent = Agent(tmp_path / name, endpoint)
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close()
        sys.stdout.write(
            f"=== {agent.directory.name}\n{''.join(agent.history)}"
        )  # pytest shows it on failure only
    for agent in agents:
        for text in agent.history:
            line = json.loads(text) if text.startswith("{") else {"message": ""}
            sentence = f"{line['message']} {line.get('reason', '')}"
            assert other_forms(sentence, is_kept=True) == [], sentence


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """An endpoint for one VM, vm-1, beside which there is a vm-2."""
    # Without the request limit: tests poll at the fastest pace, and an approval comes on top of it.
    with Simulator(vms=("vm-1",), others=("vm-2",), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agent(sim: Simulator, make_agent: MakeAgent) -> Agent:
    """An agent of vm-1, not started."""
    return make_agent(sim.endpoint())
