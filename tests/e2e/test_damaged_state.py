"""A state file that is damaged while its VM is prepared: what a real agent, its commands and pages say."""

import json
import re
import sys
from typing import Any

import pytest
from harness import Agent, MakeAgent, Simulator

from scheduled_events_agent.simulator import VirtualMachine

DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "manual", "lead": "30d"}
WITHOUT_RECOVER = {**DRAIN, "recover": []}

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


def asked(agent: Agent) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and attention of the command status."""
    done = agent.run("status", "--json", "--config", str(agent.config), "--state-dir", str(agent.state_dir))
    return done.returncode, json.loads(done.stdout)["attention"]


def wait_kinds(agent: Agent, *kinds: str) -> None:
    agent.wait_until(lambda: [one["kind"] for one in agent.status()["attention"]] == [*kinds], f"{kinds} is all")


def doctor_states(agent: Agent) -> list[dict[str, Any]]:
    """The findings of the check ``state``."""
    done = agent.run("doctor", "--json", "--config", str(agent.config), "--state-dir", str(agent.state_dir))
    findings: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return [one for one in findings if one["check"] == "state"]


def damage(agent: Agent) -> None:
    """End the agent, and leave no database of its state file."""
    agent.kill()
    for path in agent.state_dir.glob("state.db-*"):
        path.unlink()
    (agent.state_dir / "state.db").write_bytes(b"no database " * 1000)


def lose(agent: Agent, sim: Simulator, **policy: Any) -> None:
    """Prepare the VM for an event, damage the state file, and let the event end. No agent runs then."""
    agent.write_policy(**{"rules": [DRAIN], "hooks": agent.hooks("drain", "resume"), **policy})
    agent.start()
    event = sim.schedule("Reboot")
    agent.wait_log("prepared", event_id=event)
    damage(agent)
    sim.cancel(event)


def expect_loss(agent: Agent, *, quarantined: float) -> None:
    """All surfaces show the loss. ``quarantined``: how often this process has found damage."""
    wait_kinds(agent, "state_lost")
    code, (found,) = asked(agent)
    assert (code, found["severity"]) == (3, "act")
    assert re.fullmatch(r"The state file was damaged at .+ UTC: file is not a database\.", found["message"])
    assert "the recover hooks (resume) have run is not known" in found["consequence"]
    assert agent.status()["headline"] == found["message"]
    assert agent.is_ready()
    assert agent.get("/healthz")[0] == 200
    agent.wait_metric(1.0, "attention", kind="state_lost")
    assert agent.metric("store_errors_total", kind="damaged") == quarantined
    (warned,) = [one for one in doctor_states(agent) if one["state"] == "warning"]
    assert "resolve state_lost" in warned["hint"]
    assert warned["hint"].endswith("runbook.md#state_lost")


def test_a_state_lost_while_the_vm_was_prepared_needs_an_operator_until_it_is_resolved(
    sim: Simulator, agent: Agent
) -> None:
    lose(agent, sim)
    agent.start()
    expect_loss(agent, quarantined=1.0)
    agent.kill()
    (absence, loss) = asked(agent)[1]
    assert (absence["kind"], loss["kind"], loss["commands"]) == ("unhealthy", "state_lost", [])
    agent.start()
    expect_loss(agent, quarantined=0.0)
    assert agent.ran() == ["drain"]
    line = asked(agent)[1][0]["commands"][0]["command"]
    done = agent.run(*line.split()[1:], "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["succeeded"], answer["event_id"]) == (0, True, "")
    assert asked(agent) == (0, [])
    agent.wait_metric(0.0, "attention", kind="state_lost")
    assert [one["state"] for one in doctor_states(agent)] == ["ok"]
    assert ("state_settled",) in agent.journal("kind")
    again = agent.say("resolve", "state_lost")
    assert (again.returncode, again.stdout) == (0, "nothing to resolve: no loss of state is open\n")
    agent.kill()
    agent.start()
    assert asked(agent) == (0, [])


def test_on_clear_that_fails_leaves_it_and_on_clear_that_succeeds_ends_it(sim: Simulator, agent: Agent) -> None:
    hooks = {**agent.hooks("drain", "resume"), "undo": agent.hook("undo", exit_code=1)}
    lose(agent, sim, hooks=hooks, on_clear=["undo"])
    agent.start()
    agent.wait_log("on_clear hook ended", outcome="failed")
    code, (found,) = asked(agent)
    assert (code, found["kind"]) == (3, "state_lost")
    assert "runs on_clear (undo), which settles this" in found["consequence"]
    agent.stop()
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume", "undo"), on_clear=["undo"])
    agent.start()
    agent.wait_log("on_clear hook ended", outcome="succeeded")
    wait_kinds(agent)
    assert asked(agent)[0] == 0


@needs_posix
def test_a_reload_decides_whether_anything_may_be_left_to_recover(sim: Simulator, agent: Agent) -> None:
    hooks = agent.hooks("drain", "resume", "undo")
    lose(agent, sim, hooks=hooks)
    agent.start()
    wait_kinds(agent, "state_lost")
    agent.write_policy(rules=[WITHOUT_RECOVER], hooks=hooks)
    agent.reload()
    wait_kinds(agent)
    assert asked(agent)[0] == 0
    assert [one["state"] for one in doctor_states(agent)] == ["ok", "warning"]
    agent.write_policy(rules=[DRAIN], hooks=hooks, on_clear=["undo"])
    agent.reload()
    wait_kinds(agent, "state_lost")
    assert "on_clear (undo)" in asked(agent)[1][0]["consequence"]
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.reload()
    agent.wait_until(lambda: "on_clear" not in asked(agent)[1][0]["consequence"], "on_clear is gone")
    assert asked(agent)[0] == 3


def test_an_agent_that_observes_says_it_too_and_accepts_the_word(sim: Simulator, agent: Agent) -> None:
    lose(agent, sim)
    agent.start("--observe")
    wait_kinds(agent, "state_lost")
    assert asked(agent)[0] == 3
    assert agent.say("resolve", "state_lost").returncode == 0
    assert asked(agent) == (0, [])


@needs_posix
def test_a_disk_copied_from_a_prepared_vm_is_to_be_looked_at(make_agent: MakeAgent) -> None:
    with Simulator(vms=(VirtualMachine(name="vm-1", vm_id="the-first"),), rate_limit=None) as first:
        agent = make_agent(first.endpoint())
        agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
        agent.start()
        event = first.schedule("Reboot")
        agent.wait_log("prepared", event_id=event)
        agent.kill()
        agent.forget_boot()
    with Simulator(vms=(VirtualMachine(name="vm-2", vm_id="the-second"),), rate_limit=None) as second:
        agent.endpoint = second.endpoint()
        agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
        for _ in range(2):
            agent.start()
            wait_kinds(agent, "foreign_state")
            code, (found,) = asked(agent)
            assert (code, found["severity"]) == (0, "fix")
            text = "the state file is of VM the-first, and this VM is the-second"
            assert found["message"] == f"This disk may be prepared for an event of another VM: {text}."
            agent.wait_metric(1.0, "attention", kind="foreign_state")
            assert [one["state"] for one in doctor_states(agent)] == ["ok", "warning"]
            agent.stop()
        agent.start()
        assert agent.say("resolve", "state_lost").returncode == 0
        assert asked(agent) == (0, [])
