"""The process may open no more files, start no more processes, have no more memory for a thread.

Nothing of that ends the agent. It reports what it cannot do, counts it as failed, and does it when it can.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest
from fault_injection import AT_ONCE, DRAIN, needs_root, see_through
from harness import Agent, Simulator

if sys.platform == "win32":
    pytest.skip("Windows does not limit what a process may open", allow_module_level=True)


# As a limit of descriptors: what is open stays so, and nothing more can be opened. (With 0 nothing could be waited
# for either.)
NOTHING = 3
# User ids of no account, so that every process with one belongs to the test.
UIDS = count(54321 + 100 * (os.getpid() % 1000))


@contextmanager
def limited(agent: Agent, resource: str, limit: int) -> Iterator[None]:
    """The agent's process may have no more of something (a word of prlimit's); afterwards it may again."""

    def prlimit(*words: str) -> str:
        # As the process's own account: root may not do this to others everywhere.
        uid = str(psutil.Process(agent.process.pid).uids().real)
        account = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"] if os.geteuid() == 0 else []
        command = [*account, "prlimit", f"--pid={agent.process.pid}", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    before = prlimit(f"--{resource}", "--output=SOFT", "--noheadings").strip()
    prlimit(f"--{resource}={limit}:")
    try:
        yield
    finally:
        if agent.is_alive():
            prlimit(f"--{resource}={before}:")


def descriptors(agent: Agent) -> int:
    """One more than the highest number of any: with this limit next to nothing can be opened."""
    return max(int(entry.name) for entry in Path(f"/proc/{agent.process.pid}/fd").iterdir()) + 1


def seconds_of_cpu(agent: Agent) -> float:
    times = psutil.Process(agent.process.pid).cpu_times()
    return float(times.user + times.system)


def test_without_descriptors_the_agent_survives_and_recovers(sim: Simulator, agent: Agent) -> None:
    soon = {**DRAIN, "lead": "30m"}
    agent.write_policy(agent={"healthy_within": "1s"}, rules=[soon], hooks=agent.hooks("drain", "resume"))
    agent.start()
    sim.schedule("Reboot", notice_seconds=7200.0)  # as long as something is pending, a cycle runs each second
    first = sim.schedule("Reboot", start_delay_seconds=0, lasts_seconds=None)
    see_through(sim, agent, first)
    sim.wait_polls(2)
    with limited(agent, "nofile", NOTHING):
        failed = agent.wait_log("polling the metadata service fails", kind="unreachable")
        assert ": Too many open files" in failed["reason"]
        used = seconds_of_cpu(agent)
        agent.get("/healthz", timeout=3.0)  # the system took the descriptor for one client when there were some
        assert agent.get("/healthz", timeout=3.0) == (0, "")
        assert seconds_of_cpu(agent) - used < 1.0  # a client that waits outside does not keep it busy
        second = sim.schedule("Reboot", start_delay_seconds=0, lasts_seconds=None)
        assert agent.is_alive()
    agent.wait_log("polling the metadata service works again")
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy again")
    see_through(sim, agent, second)
    assert agent.ran() == ["drain", "resume"] * 2


def test_an_agent_whose_port_is_taken_survives_without_descriptors(sim: Simulator, agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        agent.write_policy(agent={"listen": address}, rules=[AT_ONCE])
        agent.start(is_awaited=False)
        sim.wait_approved(sim.schedule("Freeze"))  # it has started, and works
        with limited(agent, "nofile", NOTHING):
            hint = "set agent.listen to a free ADDRESS:PORT, or to off"
            reason = f"cannot listen on {address}: Too many open files; {hint}"
            agent.wait_log("the web server cannot be opened; this is tried again", reason=reason)
    agent.wait_log("the web server is listening", listen=address)
    assert agent.is_alive()


def test_a_hook_without_descriptors_has_failed_and_its_event_is_held(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    sim.wait_polls(2)
    for spare in range(2, 22):  # two are enough for a poll at any time, and too few for a hook
        with limited(agent, "nofile", descriptors(agent) + spare):
            event = sim.schedule("Reboot", lasts_seconds=None)
            reason = agent.wait_log("hook finished", event_id=event, hook="drain")["reason"]
            if "succeeded" in reason:
                break
            assert re.fullmatch(r"hook drain: cannot be started.*Too many open files.* \(not_started\)", reason)
            agent.wait_log("held", event_id=event)
        assert sim.approvals() == ()
        sim.cancel(event)
        agent.wait_log("closed", event_id=event)
    assert spare > 2
    sim.wait_approved(event)
    assert agent.log("a bug in the agent") == []


def test_a_hook_that_ends_without_free_descriptors_keeps_its_result(sim: Simulator, agent: Agent) -> None:
    hooks = {"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    sim.wait_polls(2)
    with limited(agent, "nofile", NOTHING):
        agent.let_go("drained")
        agent.wait_hook("drain")
        agent.wait_log("polling the metadata service fails", kind="unreachable")
    finished = agent.wait_log("hook finished", event_id=event)
    assert finished["reason"] == "hook drain: exit code 0 (succeeded)"
    sim.wait_approved(event)


@pytest.fixture
def unprivileged(agent: Agent) -> Agent:
    """The agent, run by an account that has no other process: root's are not counted."""
    uid = str(next(UIDS))
    # Root's permission is needed only to read the interpreter and this checkout, wherever they are.
    needed = "+dac_read_search,+dac_override"
    agent.prefix = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]
    agent.prefix += ["--inh-caps", needed, "--ambient-caps", needed]
    agent.state_dir.mkdir(mode=0o700)
    os.chown(agent.state_dir, int(uid), int(uid))
    return agent


def processes(agent: Agent) -> int:
    """The processes that the system counts for the agent's account: its threads, as long as no hook runs."""
    return psutil.Process(agent.process.pid).num_threads()


@needs_root
def test_a_hook_without_a_process_or_thread_has_failed_and_its_event_is_held(
    sim: Simulator, unprivileged: Agent
) -> None:
    unprivileged.write_policy(rules=[DRAIN], hooks=unprivileged.hooks("drain", "resume"))
    unprivileged.start()
    reasons = set()
    for spare in range(20):
        sim.wait_polls(2)
        with limited(unprivileged, "nproc", processes(unprivileged) + spare):
            event = sim.schedule("Reboot", lasts_seconds=None)
            reason = unprivileged.wait_log("hook finished", event_id=event, hook="drain")["reason"]
            if "succeeded" in reason:
                break
            reasons.add(reason)
            unprivileged.wait_log("held", event_id=event)
        assert sim.approvals() == ()
        sim.cancel(event)
        unprivileged.wait_log("closed", event_id=event)
    # Each of what a hook needs has been the one that was missing.
    why = "can't start new thread"
    assert {reason.partition(": ")[2].removesuffix(" (not_started)") for reason in reasons} == {
        why,
        f"cannot be started: {why}",
        f"cannot be started (Resource temporarily unavailable): {sys.executable}",
        f"cannot be watched: {why}",
    }
    sim.wait_approved(event)
    assert unprivileged.log("a bug in the agent") == []


@needs_root
def test_an_approval_without_a_thread_is_sent_once_there_is_one(sim: Simulator, unprivileged: Agent) -> None:
    unprivileged.write_policy(rules=[AT_ONCE])
    unprivileged.start()
    sim.wait_polls(2)
    with limited(unprivileged, "nproc", 1):
        event = sim.schedule("Reboot", lasts_seconds=None)
        failed = unprivileged.wait_log("approval failed", event_id=event)
        assert failed["reason"] == "approval failed (no_thread), next try in 1s: can't start new thread"
        assert unprivileged.get("/healthz", timeout=3.0)[0] == 200  # what makes pages is there already
        sim.wait_polls(4)
        assert sim.approvals() == ()
    sim.wait_approved(event)
    unprivileged.wait_log("approved", event_id=event)
    assert len(sim.approvals(event)) == 1
    assert unprivileged.metric("approvals_total", outcome="no_thread") >= 1


def test_without_memory_for_a_thread_it_goes_on_and_catches_up_later(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    )
    agent.start()
    sim.wait_polls(2)
    # The stack of a thread is taken in one piece of 8 MiB; what is needed otherwise comes in small ones.
    with limited(agent, "as", psutil.Process(agent.process.pid).memory_info().vms + (4 << 20)):
        running: list[str] = []

        def has_news() -> bool:
            return bool(agent.log("hook finished")) or len(agent.records("start")) > len(running)

        while True:  # until the stacks of threads that have ended are used up
            event = sim.schedule("Reboot", lasts_seconds=None)
            agent.wait_until(has_news, "a hook ran or could not")
            if agent.log("hook finished"):
                break
            running.append(event)
            assert len(running) < 20
        reason = agent.wait_log("hook finished", event_id=event)["reason"]
        assert "not_started" in reason
        agent.wait_log("held", event_id=event)
        sim.wait_polls(4)
        assert sim.approvals() == ()
        assert agent.is_alive()
    agent.let_go("drained")
    for one in running:
        sim.wait_approved(one)
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy")
    assert sim.approvals(event) == ()
