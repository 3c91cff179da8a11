"""The agent's outputs are closed, full, or their reader has gone. Its work is the same."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_injection import DRAIN, longest_gap_seconds
from harness import Agent, Simulator
from ports import free_port

if sys.platform == "win32":
    pytest.skip("descriptors are redirected as a shell of Unix does it", allow_module_level=True)


# Becomes the command whose standard error is a socket, like the journal's, without a reader at its other end.
GONE_JOURNAL = """
import os, socket, sys
ours, theirs = socket.socketpair()
os.dup2(ours.fileno(), 2)
facts = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{facts.st_dev}:{facts.st_ino}"
theirs.close()
os.execv(sys.argv[1], sys.argv[1:])
"""


def redirected(how: str) -> list[str]:
    return ["/bin/sh", "-c", f'exec "$@" {how}', "sh"]


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[int]:
    """A named pipe that the test has open at both ends, without waiting at either."""
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def check_life(sim: Simulator, agent: Agent, then: Callable[[], object] = lambda: None) -> None:
    """An event goes its whole way, and the agent ends as it should; ``then`` happens when it has polled."""
    agent.address = f"127.0.0.1:{free_port()}"
    agent.write_policy(agent={"listen": agent.address}, rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start(is_awaited=False)
    sim.wait_polls(2)
    then()
    event = sim.schedule("Reboot", start_delay_seconds=0, lasts_seconds=None)
    sim.wait_approved(event)
    agent.wait_phase(event, "started")
    sim.end(event)
    agent.wait_hook("resume")
    agent.wait_until(lambda: agent.pending() == {}, "it was closed")
    assert agent.get("/healthz") == (200, "ok\n")
    agent.stop()
    assert agent.ran() == ["drain", "resume"]
    assert len(sim.approvals(event)) == 1
    # The output of hooks is read and kept nevertheless.
    tails = [row for row in agent.journal("hook", "detail") if all(row)]
    assert tails == [("drain", "drain works\n"), ("resume", "resume works\n")]
    assert longest_gap_seconds(sim) < 60


@pytest.mark.parametrize("how", ["2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_an_agent_with_closed_or_full_outputs_keeps_working(how: str, sim: Simulator, agent: Agent) -> None:
    agent.prefix = redirected(how)
    check_life(sim, agent)


def test_an_agent_whose_log_reader_has_exited_keeps_working(sim: Simulator, agent: Agent, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    agent.prefix = redirected(f"2>{tmp_path / 'log'}")
    check_life(sim, agent, lambda: os.close(reader))


def test_an_agent_whose_log_pipe_is_never_read_keeps_working(
    sim: Simulator, agent: Agent, pipe: int, tmp_path: Path
) -> None:
    agent.prefix = redirected(f"2>{tmp_path / 'pipe'}")
    with contextlib.suppress(BlockingIOError):
        while os.write(pipe, b"." * 512):
            pass
    check_life(sim, agent)
    assert set(os.read(pipe, 1 << 20)) == {ord(".")}  # it was full to the end


def test_an_agent_without_the_journal_keeps_working(sim: Simulator, agent: Agent) -> None:
    agent.prefix = [sys.executable, "-c", GONE_JOURNAL]
    check_life(sim, agent)
