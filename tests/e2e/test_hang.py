"""A process that hangs is ended by its own watchdog; one that was paused, or waits for its disk, is not."""

import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import Agent, Simulator

# The agent, but it waits as long as a file is there: its engine between two cycles or in a commit, or its poller.
PROGRAM = """
import os, sys, time
from scheduled_events_agent.cli import main
from scheduled_events_agent.daemon import daemon, watchdog
from scheduled_events_agent.imds.client import ImdsClient
from scheduled_events_agent.store import Store

def delayed(inner, name):
    def outer(*arguments):
        while os.path.exists(name):
            time.sleep(0.05)
        return inner(*arguments)
    return outer

hang = float(sys.argv[1])  # so many seconds without a turn are a hang
daemon._TICK_SECONDS, watchdog._TICK_SECONDS = 0.4 * hang, 0.04 * hang
Store.load_requests = delayed(Store.load_requests, sys.argv[2])
Store._write_journal = delayed(Store._write_journal, sys.argv[3])
ImdsClient.fetch = delayed(ImdsClient.fetch, sys.argv[4])
sys.exit(main(sys.argv[5:]))
"""


@pytest.fixture(params=[2.0, pytest.param(10.0, marks=pytest.mark.nightly)])
def hang_seconds(request: pytest.FixtureRequest) -> float:
    seconds: float = request.param
    return seconds


@pytest.fixture
def agent(agent: Agent, hang_seconds: float) -> Agent:
    """Its engine hangs while its file "hangs" is there, its disk while "disk" is, its poller while "poller" is."""
    places = [str(agent.directory / name) for name in ("hangs", "disk", "poller")]
    agent.program = [sys.executable, "-c", PROGRAM, str(hang_seconds), *places]
    agent.write_policy(
        rules=[{"name": "all", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks=agent.hooks("drain"),
        imds={"request_timeout": "10m"},  # longer than any test: a hang is not found by it
    )
    agent.start()
    return agent


def test_a_hung_agent_exits_with_its_stacks_and_continues_after_a_restart(agent: Agent, sim: Simulator) -> None:
    hangs = Path(agent.directory / "hangs")
    hangs.touch()
    sim.wait_polls(3)  # only the engine hangs
    assert agent.wait_exit() == 70
    (said,) = agent.log("the agent hangs: its process ends, to be started again", level="error", exit_code=70)
    assert any(place.endswith(" in outer") for place in said["stacks"]["MainThread"])
    assert {"MainThread", "poller", "watchdog"} <= said["stacks"].keys()
    hangs.unlink()
    event = sim.schedule("Reboot", notice_seconds=600)
    agent.start()
    sim.wait_approved(event)


def test_an_agent_whose_poller_hangs_ends_before_the_limit_of_its_request(agent: Agent, sim: Simulator) -> None:
    poller = Path(agent.directory / "poller")
    poller.touch()
    assert agent.wait_exit() == 70
    (said,) = agent.log("the agent hangs: its process ends, to be started again", level="error", exit_code=70)
    assert any(place.endswith(" in outer") for place in said["stacks"]["poller"])
    poller.unlink()
    event = sim.schedule("Reboot", notice_seconds=600)
    agent.start()
    sim.wait_approved(event)


def test_an_agent_that_waits_long_for_a_response_does_not_count_as_hung(
    agent: Agent, sim: Simulator, hang_seconds: float
) -> None:
    sim.fault("vm-1", "stall", on="poll", count=1)
    time.sleep(1.5 * hang_seconds)
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert agent.process.poll() is None


def test_an_agent_whose_machine_was_paused_does_not_count_as_hung(
    agent: Agent, sim: Simulator, hang_seconds: float
) -> None:
    process = psutil.Process(agent.process.pid)
    process.suspend()
    time.sleep(1.5 * hang_seconds)
    process.resume()
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert agent.process.poll() is None


def test_an_agent_that_waits_for_its_disk_does_not_count_as_hung(
    agent: Agent, sim: Simulator, hang_seconds: float
) -> None:
    disk = Path(agent.directory / "disk")
    disk.touch()
    event = sim.schedule("Reboot", notice_seconds=600)
    time.sleep(1.5 * hang_seconds)
    assert sim.approvals() == ()
    disk.unlink()
    sim.wait_approved(event)
    assert agent.process.poll() is None
