"""The disk is full, and an operator asks for the status: all that can be read is shown."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_injection import needs_root
from harness import Agent, Simulator

if sys.platform == "win32":
    pytest.skip("file systems are mounted and limited as Linux does it", allow_module_level=True)

from test_disk import fill, mounted


@pytest.fixture
def full_disk(agent: Agent) -> Iterator[Path]:
    """The agent's state directory as a file system of its own, of half a megabyte."""
    with mounted(agent.state_dir, "-t", "tmpfs", "-o", "size=512k,mode=700", "none"):
        yield agent.state_dir


@needs_root
@pytest.mark.parametrize("end", ["runs", "was killed", "has stopped"])
def test_on_a_full_disk_status_works_and_operators_learn_why_a_request_fails(
    sim: Simulator, agent: Agent, full_disk: Path, end: str
) -> None:
    agent.write_policy(rules=[{"name": "by-hand", "approve": "manual"}])
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    if end == "has stopped":
        agent.stop()
    fill(full_disk)
    if end == "was killed":
        agent.kill()
    status = agent.run("status", "--state-dir", str(full_disk))
    assert status.returncode == 3
    problem = (
        rf"The agent \(pid \d+\) cannot be asked: cannot write {full_disk}/state.db: database or disk is full"
        if end == "runs"
        else "No agent runs"
    )
    assert re.match(rf"ACT  {problem}\.", status.stdout)
    assert "\nACT  The Reboot of vm-1 needs an operator's approval. " in status.stdout
    assert "waits: an operator must approve it\n" in status.stdout
    history = agent.run("history", "--state-dir", str(full_disk))
    assert (history.returncode, history.stderr) == (0, "")
    assert f"Reboot {event} is pending: prepared\n" in history.stdout
