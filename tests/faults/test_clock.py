"""The clock is set, the machine sleeps, the process is stopped for a while.

The wall clock is that of libfaketime, which changes it under the running process; the monotonic one stays the
system's, as it does when a clock is set. A sleep of the machine is then a stop, for the monotonic clock does not
count it, after which the wall clock has gone on by an hour.
"""

import sys
import time
from pathlib import Path

import pytest
from false_clock import Clock, false_clock_library  # noqa: F401 - a fixture
from fault_injection import DRAIN, longest_gap_seconds, see_through
from harness import Agent, Simulator

if sys.platform == "win32":
    pytest.skip("neither a false clock nor signals to stop and continue are there", allow_module_level=True)


HOUR = 3600


@pytest.fixture
def clock(agent: Agent, library: Path) -> Clock:
    clock = Clock(agent.directory, library)
    agent.environment |= clock.environment
    return clock


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
def test_a_clock_step_of_an_hour_disturbs_no_running_hook_and_no_wait(
    jump: int, sim: Simulator, agent: Agent, clock: Clock
) -> None:
    hooks = {"drain": agent.hook("drain", until="drained", timeout="10m"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    # Three hours of notice: so that an hour more or less does not make it begin.
    event = sim.schedule("Reboot", notice_seconds=3 * HOUR, start_delay_seconds=0, lasts_seconds=None)
    agent.wait_hook("drain", "start")
    began = time.monotonic()
    clock.set(jump)
    sim.wait_polls(8)
    assert agent.get("/healthz") == (200, "ok\n")
    assert agent.pending()[event]["phase"] == "preparing"
    sim.fault(None, "status", on="approve", status=500, count=1)
    agent.let_go("drained")
    assert "next try in 1s" in agent.wait_log("approval failed")["reason"]
    clock.set(0 if jump > 0 else 2 * jump)  # once more, backwards: what was to be tried again is not put off
    see_through(sim, agent, event)
    assert agent.ran() == ["drain", "resume"]
    assert len(sim.approvals(event)) == 1
    assert longest_gap_seconds(sim, began) < 60
    # Nor is the hour taken for a pause; a busy machine may have made a short one.
    assert [line for line in agent.log("this machine was paused") if line["seconds"] > 60] == []
    kinds = [kind for (kind,) in agent.journal("kind")]
    assert kinds.index("preparing") < kinds.index("approved") < kinds.index("closed")


def test_a_clock_that_is_set_wrong_is_reported_until_it_is_set_right(
    sim: Simulator, agent: Agent, clock: Clock
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    sim.wait_polls(12)
    assert agent.status()["attention"] == []
    clock.set(600)
    ahead = "The clock of this VM is 10 minutes ahead of Azure's."
    agent.wait_until(lambda: agent.status()["headline"] == ahead, "it is ahead")
    clock.set(-HOUR)
    behind = "The clock of this VM is 60 minutes behind Azure's."
    agent.wait_until(lambda: agent.status()["headline"] == behind, "it is behind")
    clock.set(0)
    agent.wait_until(lambda: agent.status()["attention"] == [], "the clock is right again")


def test_a_clock_step_changes_the_decision_on_an_event_once(sim: Simulator, agent: Agent, clock: Clock) -> None:
    agent.write_policy(rules=[{**DRAIN, "lead": "15m"}], hooks=agent.hooks("drain", "resume"))
    clock.set(-HOUR)
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=1000, lasts_seconds=None)
    assert agent.wait_phase(event, "waiting")["waits_for"]["text"].startswith("begins at ")
    sim.wait_polls(4)
    assert agent.ran() == []
    clock.set(0)  # 1000 s are still more than a lead of 15 minutes
    sim.wait_polls(4)
    assert agent.ran() == []
    clock.set(HOUR // 2)
    agent.wait_hook("drain")
    clock.set(-HOUR)
    sim.wait_polls(8)
    assert agent.ran() == ["drain"]


def test_after_an_hour_of_sleep_the_agent_polls_at_once_and_runs_due_actions(
    sim: Simulator, agent: Agent, clock: Clock
) -> None:
    # A stop within a poll is no pause, and on a busy machine the fastest pace leaves no time between two.
    agent.write_policy(
        imds={"poll_interval": "3s"}, rules=[{**DRAIN, "lead": "15m"}], hooks=agent.hooks("drain", "resume")
    )
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=HOUR + 600, start_delay_seconds=0, lasts_seconds=None)
    agent.wait_phase(event, "waiting")
    agent.freeze()
    time.sleep(4.5)  # later than the next poll by more than what is taken for the scheduler's noise
    clock.set(HOUR)
    woken = time.monotonic()
    agent.thaw()
    agent.wait_hook("drain")
    sim.wait_approved(event)
    first = min(one.monotonic for one in sim.requests() if one.monotonic > woken)
    assert first - woken < 60
    assert agent.wait_log("this machine was paused")["seconds"] < 60  # by the clock that does not count a sleep


def test_an_agent_stopped_during_an_event_recovers_once_when_resumed(sim: Simulator, agent: Agent) -> None:
    # Five seconds stand for a minute. What a stop does to the agent, it does from the first second on: threads are
    # late by it. Of the limits between the two only /healthz reports (healthy_within, and the 15 s in which the
    # engine should have run a cycle): the one is set low enough to pass here, the other is checked in each cycle.
    agent.write_policy(agent={"healthy_within": "3s"}, rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Freeze", start_delay_seconds=0.2, lasts_seconds=1.0)
    sim.wait_approved(event)
    agent.freeze()
    began = time.monotonic()
    sim.wait_gone(event)
    time.sleep(max(0.0, began + 5 - time.monotonic()))
    agent.thaw()
    agent.wait_log("closed", event_id=event)
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy")
    agent.wait_until(agent.is_ready, "it was ready")
    assert agent.ran() == ["drain", "resume"]
    assert len(sim.approvals(event)) == 1
    assert agent.wait_log("this machine was paused")["seconds"] > 4


def test_a_hook_that_ended_in_time_while_the_agent_was_stopped_has_succeeded(sim: Simulator, agent: Agent) -> None:
    hooks = {"drain": agent.hook("drain", until="drained", timeout="2s"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    agent.freeze()
    agent.let_go("drained")
    agent.wait_hook("drain")
    time.sleep(2.5)  # its limit has long passed when the agent comes to see its end
    agent.thaw()
    assert agent.wait_log("hook finished")["reason"] == "hook drain: exit code 0 (succeeded)"
    sim.wait_approved(event)


def test_a_hook_that_did_not_end_in_time_while_the_agent_was_stopped_is_ended(
    sim: Simulator, agent: Agent
) -> None:
    hooks = {"drain": agent.hook("drain", until="never", timeout="2s"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    agent.freeze()
    time.sleep(3)
    agent.thaw()
    assert "its time limit is 2s" in agent.wait_log("hook finished")["reason"]
    agent.wait_log("held", event_id=event)
