"""The agent cannot be sure which VM it is, what was done, or what its policy still has."""

import contextlib
import os
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from harness import Agent, MakeAgent, Simulator

from scheduled_events_agent.simulator import VirtualMachine

DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
AT_ONCE = {"name": "all", "approve": "immediately"}

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


def pretend_reboot(agent: Agent) -> None:
    """Let the state file look as if it were from another boot."""
    with contextlib.closing(sqlite3.connect(agent.state_dir / "state.db")) as state, state:
        state.execute("UPDATE meta SET value = 'the boot before' WHERE name = 'boot_id'")


def is_alive(pid: int) -> bool:
    # A zombie whose parent has not collected it yet has nothing left but its number.
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2][:3]
    return False


# --- Who it is


def test_after_a_reboot_a_remembered_name_counts_only_when_it_is_confirmed(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    agent.wait_log("this VM is known")
    agent.kill()
    pretend_reboot(agent)
    sim.fault("vm-1", "status", on="instance", status=500)
    event = sim.schedule("Reboot")
    agent.start()
    assert agent.wait_log("asking for this VM's name fails")["kind"] == "server_error"
    agent.wait_log("seen", event_id=event)
    sim.wait_polls(3)
    assert sim.approvals() == ()
    problem = "The metadata service has not said since the boot which VM this is: /metadata/instance: 500 "
    agent.wait_until(lambda: agent.get("/healthz")[1].startswith(problem), "it was unhealthy")
    sim.clear_faults()
    sim.wait_approved(event)
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy again")


def test_within_one_boot_the_remembered_name_is_good_enough(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    agent.wait_log("this VM is known")
    agent.kill()
    sim.fault("vm-1", "status", on="instance", status=500)
    event = sim.schedule("Reboot")
    agent.start()
    sim.wait_approved(event)


def test_on_a_copied_disk_the_agent_handles_the_events_of_its_own_vm(
    make_agent: MakeAgent,
) -> None:
    with Simulator(vms=(VirtualMachine(name="vm-1", vm_id="the-first"),), rate_limit=None) as first:
        agent = make_agent(first.endpoint())
        agent.write_policy(rules=[AT_ONCE])
        agent.start()
        agent.wait_log("this VM is known")
        agent.kill()
    with Simulator(vms=(VirtualMachine(name="vm-2", vm_id="the-second"),), rate_limit=None) as second:
        # The document comes first: under the remembered name the event is another VM's.
        second.fault(None, "status", on="instance", status=500)
        event = second.schedule("Reboot")
        agent.endpoint = second.endpoint()
        agent.write_policy(rules=[AT_ONCE])
        agent.start()
        agent.wait_until(lambda: agent.status()["other_vm_events"] == 1, "the event was counted as another VM's")
        second.clear_faults()
        second.wait_approved(event)


# --- What was done


@needs_posix
def test_hooks_that_are_stopped_together_with_the_agent_have_not_failed(sim: Simulator, agent: Agent) -> None:
    resume = agent.hook("resume", until="resumed")
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("drain"), "resume": resume})
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None, start_delay_seconds=0)
    agent.wait_log("started", event_id=event)
    sim.end(event)
    agent.wait_hook("resume", "start")
    agent.process.send_signal(signal.SIGTERM)
    os.kill(agent.records("start")[-1]["pid"], signal.SIGTERM)  # as a service manager does that ends them all
    assert agent.wait_exit() == 0
    agent.start()
    agent.wait_hook("resume", "start", count=2)
    assert not agent.is_ready()
    agent.let_go("resumed")
    assert agent.wait_log("closed", event_id=event)["reason"] == "is over: completed"


@needs_posix
def test_on_clear_hooks_of_a_killed_agent_are_ended_first(agent: Agent) -> None:
    agent.write_policy(hooks={"uncordon": agent.hook("uncordon", until="done")}, on_clear=["uncordon"])
    agent.start()
    agent.wait_hook("uncordon", "start")
    agent.kill()
    agent.start()
    agent.wait_hook("uncordon", "start", count=2)
    first, second = (note["pid"] for note in agent.records("start"))
    assert (is_alive(first), is_alive(second)) == (False, True)
    assert agent.log("ended what hooks of an agent that was killed had left running")


@needs_posix
def test_an_on_clear_hook_that_does_not_want_to_end_ends_with_the_agent(agent: Agent) -> None:
    uncordon = agent.hook("uncordon", until="done", ignores_sigterm=True)
    agent.write_policy(hooks={"uncordon": uncordon}, on_clear=["uncordon"])
    agent.start()
    agent.wait_hook("uncordon", "start")
    assert agent.stop() < 30.0  # the hook would never end
    assert not is_alive(agent.records("start")[0]["pid"])


def test_on_clear_gives_way_to_an_event_and_goes_on_after_it(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[DRAIN],
        hooks={**agent.hooks("drain", "resume", "greet"), "uncordon": agent.hook("uncordon", until="done")},
        on_clear=["uncordon", "greet"],
    )
    agent.start()
    agent.wait_hook("uncordon", "start")
    event = sim.schedule("Reboot", lasts_seconds=0.5)
    agent.wait_log("closed", event_id=event)
    agent.wait_hook("uncordon", "start", count=2)
    agent.let_go("done")
    agent.wait_hook("greet", "end")
    started_hooks = [note["hook"] for note in agent.records("start")]
    assert started_hooks == ["uncordon", "drain", "resume", "uncordon", "greet"]
    ended, started = agent.wait_log("on_clear hook ended"), agent.wait_log("hook output", hook="drain")
    assert ended["outcome"] == "canceled"
    assert ended["time"] < started["time"]


# --- What its policy still knows


@needs_posix
def test_an_event_is_recovered_although_the_policy_has_lost_its_hook(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_approved(event)
    agent.write_policy(rules=[{**DRAIN, "recover": ["undrain"]}], hooks=agent.hooks("drain", "undrain"))
    agent.reload()
    kept = agent.wait_log("hooks that pending events still need are kept until the next start")
    assert kept["hooks"] == ["resume"]
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]


@needs_posix
def test_a_hook_that_is_repaired_while_it_is_tried_again_and_again_succeeds(sim: Simulator, agent: Agent) -> None:
    """Nothing else would help: until the last attempt has failed, the recovery has not."""

    def write_policy(exit_code: int) -> None:
        resume = agent.hook("resume", exit_code=exit_code, attempts=100, retry_delay="1s")
        agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("drain"), "resume": resume})

    write_policy(3)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=0.5)
    agent.wait_hook("resume", count=2)
    write_policy(0)
    agent.reload()
    agent.wait_log("closed", event_id=event)
    assert agent.is_ready()


@needs_posix
def test_once_the_agent_only_observes_no_attempt_and_no_waiting_run_begins(sim: Simulator, agent: Agent) -> None:
    def write_policy(mode: str) -> None:
        drain = agent.hook("drain", seconds=0.3, exit_code=3, attempts=100, retry_delay="1ms", serialize=True)
        agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": drain}, agent={"mode": mode})

    write_policy("act")
    agent.start()
    sim.schedule("Reboot")
    sim.schedule("Redeploy")  # its drain waits for its turn
    agent.wait_hook("drain", count=2)
    write_policy("observe")
    agent.reload()
    agent.wait_log("the policy file was read again")
    ran = len(agent.ran())
    sim.wait_polls(12)
    assert len(agent.ran()) <= ran + 1  # one that had begun need not have noted it yet
    write_policy("act")
    agent.reload()
    agent.wait_hook("drain", "start", count=ran + 2)


@needs_posix
def test_a_recovery_whose_hook_is_missing_after_a_restart_waits_for_it(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_approved(event)
    agent.kill()
    agent.write_policy(rules=[], hooks={})
    agent.start()
    sim.end(event)
    blocked = agent.wait_log("hook missing", event_id=event)
    assert blocked["level"] == "warning"
    assert "hook resume" in blocked["reason"]
    assert not agent.is_ready()
    agent.write_policy(rules=[], hooks=agent.hooks("resume"))
    agent.reload()
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]
    assert agent.is_ready()
