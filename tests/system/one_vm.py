"""Fixtures of tests of examples; a test module gets them by ``pytest_plugins = ["one_vm"]``, or has its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Agent, Simulator


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """The endpoint of one VM."""
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator) -> Iterator[Agent]:
    """An agent for it, not started."""
    with Agent(tmp_path / "agent", sim.endpoint()) as one:
        yield one
