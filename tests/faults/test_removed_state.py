"""The state directory, or the files in it, are removed or replaced under an agent that has prepared an event.

It creates them again from what it has open, and goes on. Where it cannot, nothing is begun and nothing approved.
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_injection import DRAIN, needs_root
from harness import Agent, MakeAgent, Simulator

if sys.platform == "win32":
    pytest.skip("Windows neither removes nor replaces a file that is open", allow_module_level=True)

from test_disk import run

RULES = [
    {"name": "at-once", "when": {"type": "Freeze"}, "approve": "immediately"},
    DRAIN | {"approve": "manual", "lead": "1h"},
]


def remove_directory(state: Path) -> None:
    shutil.rmtree(state)


def remove_files(state: Path) -> None:
    for path in state.glob("state.db*"):
        path.unlink()


def replace_file(state: Path) -> None:
    """A backup of some time ago is put back."""
    backup = state.with_name("backup")
    remove_files(state)
    for path in backup.iterdir():
        shutil.copy(path, state)


def back_up(state: Path) -> None:
    shutil.copytree(state, state.with_name("backup"), ignore=shutil.ignore_patterns("wake", "lock"))


def prepare(sim: Simulator, agent: Agent) -> str:
    """Start the agent, and have it prepare an event that an operator must approve."""
    agent.write_policy(rules=RULES, hooks=agent.hooks("drain", "resume"))
    agent.start()
    back_up(agent.state_dir)
    event = sim.schedule("Reboot", start_delay_seconds=600, lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    return event


def wait_recreated(agent: Agent) -> None:
    told = agent.wait_log(
        "the state file was removed or replaced and has been created again; nothing that was in it is lost"
    )
    assert told["level"] == "error"
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy")
    agent.wait_until(lambda: agent.journal_times(kind="state_recreated"), "the journal said so")


@pytest.mark.parametrize("lose", [remove_directory, remove_files, replace_file])
def test_the_agent_goes_on_and_after_a_kill_recovers_once(
    sim: Simulator, agent: Agent, make_agent: MakeAgent, lose: Callable[[Path], None]
) -> None:
    event = prepare(sim, agent)
    lose(agent.state_dir)
    wait_recreated(agent)
    other = make_agent(sim.endpoint(), "other")  # the lock is there again: a second agent is rejected
    other.write_policy(rules=RULES, hooks=other.hooks("drain", "resume"))
    other.state_dir = agent.state_dir
    other.start(is_awaited=False)
    assert other.wait_exit() == 1
    (why,) = other.why_not()
    assert f"another agent (pid {agent.process.pid})" in why
    agent.kill()
    sim.end(event)
    agent.start()
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]
    assert len(agent.journal_times(kind="prepared")) == 1  # what was written before is there too
    assert ("state_lost",) not in agent.journal("kind")


@pytest.mark.parametrize("lose", [remove_directory, remove_files, replace_file])
def test_operators_reach_the_agent_and_the_event_is_approved(
    sim: Simulator, agent: Agent, lose: Callable[[Path], None]
) -> None:
    event = prepare(sim, agent)
    lose(agent.state_dir)
    wait_recreated(agent)
    agent.wait_until((agent.state_dir / "wake").is_fifo, "operators could wake it")
    said = agent.say("approve", event)
    assert (said.returncode, said.stderr) == (0, "")
    sim.wait_approved(event)
    agent.wait_metric(1, "store_errors_total", kind="removed")
    sim.start_event(event)
    agent.wait_log("started", event_id=event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]
    assert len(sim.approvals(event)) == 1
    agent.stop()
    agent.start()
    assert not agent.pending()
    assert agent.ran() == ["drain", "resume"]


def check_begins_nothing(sim: Simulator, agent: Agent, why: str) -> None:
    """It says why, tries again and again, and does nothing about an event that it would approve at once."""
    agent.wait_until(lambda: why in agent.get("/healthz")[1], "/healthz said why")
    assert agent.get("/healthz")[0] == 503
    event = sim.schedule("Freeze", lasts_seconds=None)
    failures = agent.metric("store_errors_total", kind="removed")
    agent.wait_until(
        lambda: agent.metric("store_errors_total", kind="removed") >= failures + 3, "it tried again", 60
    )
    sim.wait_polls(4)
    assert sim.approvals(event) == ()
    assert event not in agent.pending()
    assert agent.ran() == ["drain"]
    assert agent.is_alive()
    assert len(agent.log("writing the state file fails")) == 1


def test_while_another_agent_has_the_new_directory_nothing_is_begun(
    sim: Simulator, agent: Agent, make_agent: MakeAgent
) -> None:
    prepare(sim, agent)
    with Simulator(vms=("vm-1",), rate_limit=None) as elsewhere:
        other = make_agent(elsewhere.endpoint(), "other")
        other.write_policy(rules=RULES, hooks=other.hooks("drain", "resume"))
        other.state_dir = agent.state_dir
        agent.freeze()
        shutil.rmtree(agent.state_dir)
        other.start()
        agent.thaw()
        check_begins_nothing(sim, agent, f"another agent (pid {other.process.pid})")
        other.kill()
    wait_recreated(agent)


@pytest.fixture
def disk(agent: Agent) -> Iterator[Path]:
    """The agent's state directory as a file system of its own, which can be mounted again; where else it is."""
    place = agent.directory / "disk"
    with contextlib.ExitStack() as stack:
        for path, options in (
            (place, ["-t", "tmpfs", "-o", "size=32m,mode=700", "none"]),
            (agent.state_dir, ["--bind", str(place)]),
        ):
            path.mkdir(mode=0o700, exist_ok=True)
            run("mount", *options, str(path))
            stack.callback(subprocess.run, ["umount", "--lazy", str(path)], check=False)
        yield place


@needs_root
def test_without_its_file_system_nothing_is_begun(sim: Simulator, agent: Agent, disk: Path) -> None:
    event = prepare(sim, agent)
    run("umount", "--lazy", str(agent.state_dir))
    check_begins_nothing(sim, agent, "is on another device than before")
    assert list(agent.state_dir.iterdir()) == []
    run("mount", "--bind", str(disk), str(agent.state_dir))
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy again")
    assert agent.say("approve", event).returncode == 0
    sim.wait_approved(event)
    assert not agent.journal_times(kind="state_recreated")
