"""Another process has the number of one that is gone, or wants to work on the same state."""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_injection import DRAIN, needs_root, see_through
from harness import Agent, MakeAgent, Simulator

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@contextlib.contextmanager
def stranger(pid: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process without an owner that has this number, which another process had before."""
    for _ in range(200):
        LAST_PID.write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "300"], start_new_session=True)
        if process.pid == pid:
            break
        process.kill()  # another process was faster
        process.wait()
    else:
        pytest.skip(f"the system does not give the number {pid} again")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def heir() -> Iterator[None]:
    """Make orphaned processes children of this process, whatever the machine's first process does with them."""
    libc, subreaper = ctypes.CDLL(None), 36
    libc.prctl(subreaper, 1)
    yield
    libc.prctl(subreaper, 0)


@needs_root
@pytest.mark.usefixtures("heir")
@pytest.mark.skipif(not LAST_PID.exists(), reason="the kernel does not let a test choose the next number")
def test_a_process_that_reused_the_pid_of_a_hook_is_not_killed(sim: Simulator, agent: Agent) -> None:
    hooks = {"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", start_delay_seconds=0, lasts_seconds=None)
    pid = agent.wait_hook("drain", "start")["pid"]
    agent.kill()
    agent.let_go("drained")
    agent.wait_hook("drain")  # it ends while no agent is there
    os.waitpid(pid, 0)
    with stranger(pid) as process:
        agent.start()
        agent.wait_hook("drain", count=2)
        see_through(sim, agent, event)
        agent.stop()
        assert process.poll() is None
    assert agent.log("ended what hooks of an agent that was killed had left running") == []
    assert agent.ran() == ["drain", "drain", "resume"]


def test_a_lock_that_names_a_process_that_is_no_agent_does_not_stop_a_start(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    agent.kill()
    lock = agent.state_dir / "lock"
    lock.write_bytes(b"%d\n" % os.getpid())  # who has the number now that the killed one had
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.start()
    sim.wait_approved(event)
    if sys.platform != "win32":  # on Windows no other process can read what is locked
        assert lock.read_text() == f"{agent.process.pid}\n"


def test_a_second_agent_on_the_same_state_exits_and_changes_nothing(
    sim: Simulator, agent: Agent, make_agent: MakeAgent
) -> None:
    hooks = {"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    hook = agent.wait_hook("drain", "start")
    before = agent.journal()
    second = make_agent(sim.endpoint(), "second")
    second.state_dir = agent.state_dir
    second.write_policy(rules=[DRAIN], hooks=hooks)
    second.start(is_awaited=False)
    assert second.wait_exit() == 1
    (why,) = second.why_not()
    assert f"another agent (pid {agent.process.pid}) has locked it" in why
    assert agent.journal() == before
    assert agent.pending()[event]["phase"] == "preparing"
    agent.let_go("drained")
    assert agent.wait_hook("drain")["pid"] == hook["pid"]
    sim.wait_approved(event)
    assert agent.ran() == ["drain"]
