"""Fixtures of this folder; a test module gets them by ``pytest_plugins = ["stage"]``.

(Not a conftest.py, for the type checker takes two files of that name for one module.)
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import FaultyAgent, MakeAgent, Simulator


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[MakeAgent]:
    """Makes agents that are ended with the test; what they wrote is shown if it fails."""
    agents: list[FaultyAgent] = []

    def make(endpoint: str, name: str = "agent") -> FaultyAgent:
        agent = FaultyAgent(tmp_path / name, endpoint)
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close()
        sys.stdout.write(
            f"=== {agent.directory.name}\n{''.join(agent.history)}"
        )  # pytest shows it on failure only


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """An endpoint for one VM, vm-1."""
    # Without the request limit: tests poll at the fastest pace, and an approval comes on top of it.
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agent(sim: Simulator, make_agent: MakeAgent) -> FaultyAgent:
    """An agent of vm-1, not started."""
    return make_agent(sim.endpoint())
