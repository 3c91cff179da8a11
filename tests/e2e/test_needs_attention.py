"""States that need a person: status, exit code, metrics, log and notifications of a real agent say the same."""

import json
from datetime import datetime
from typing import Any

import pytest
from harness import Agent, Simulator
from receiver import Receiver

from scheduled_events_agent.status.messages import clock_effect

KIND = "attention"
DEADLINE = "attention_deadline_timestamp_seconds"
MANUAL = {"name": "by-hand", "approve": "manual"}
DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}


def asked(agent: Agent, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command status."""
    done = agent.run(
        "status", "--json", "--config", str(agent.config), "--state-dir", str(agent.state_dir), *options
    )
    return done.returncode, json.loads(done.stdout)


def kinds(status: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in status["attention"]]


def wait_kind(agent: Agent, kind: str) -> dict[str, Any]:
    """Wait until it is there, and the same for all who ask; returns it."""
    agent.wait_until(lambda: kind in kinds(agent.status()), f"{kind} was reported")
    code, told = asked(agent)
    found: dict[str, Any] = next(one for one in told["attention"] if one["kind"] == kind)
    assert code == (3 if found["severity"] == "act" and found["event_id"] else 0)
    agent.wait_metric(1.0, KIND, kind=kind)
    return found


def wait_none(agent: Agent, kind: str) -> None:
    agent.wait_until(lambda: kinds(agent.status()) == [], "nothing needs a person any more")
    assert asked(agent)[0] == 0
    agent.wait_metric(0.0, KIND, kind=kind)


def test_an_event_that_waits_for_an_operator_is_notified_once_to_every_target(
    agent: Agent, sim: Simulator
) -> None:
    with Receiver() as receiver:
        notify = [{"name": "ops", "to": receiver.url, "on": ["approval_needed"]}]
        agent.write_policy(rules=[MANUAL], notify=notify)
        agent.start()
        event = sim.schedule("Reboot", notice_seconds=600)
        found = wait_kind(agent, "approval_needed")
        assert found["commands"][0]["command"].startswith(f"scheduled-events-agent approve {event[:8]}")
        assert found["message"] == "The Reboot of vm-1 needs an operator's approval."
        agent.wait_until(lambda: receiver.taken, "it was notified")
        line = agent.wait_log("approval needed")
        assert line["level"] == "warning"
        assert line["command"].startswith(f"scheduled-events-agent approve {event}")
        (entry,) = [text for kind, text in agent.journal("kind", "text") if kind == "approval_needed"]
        assert entry.startswith("an operator must approve it before ")
        agent.kill()
        agent.start()
        wait_kind(agent, "approval_needed")
        assert agent.say("approve", event).returncode == 0
        wait_none(agent, "approval_needed")
        told = [body["type"].rpartition(".")[2] for body in receiver.taken]
        assert told == ["approval_needed"]
    assert sum(kind == "approval_needed" for (kind,) in agent.journal("kind")) == 1


def test_an_event_whose_preparation_failed_and_then_its_recovery(agent: Agent, sim: Simulator) -> None:
    agent.write_policy(
        rules=[DRAIN],
        hooks={"drain": agent.hook("drain", exit_code=7), "resume": agent.hook("resume", exit_code=1)},
    )
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=600)
    found = wait_kind(agent, "prepare_failed")
    deadline = datetime.fromisoformat(found["deadline"]).timestamp()
    assert agent.metric(DEADLINE, kind="prepare_failed") == pytest.approx(deadline, abs=1)
    sim.cancel(event)
    found = wait_kind(agent, "recovery_failed")
    assert found["deadline"] is None
    assert agent.metrics().get(DEADLINE, []) == []
    agent.stop()
    code, told = asked(agent)
    assert (code, kinds(told), told["source"]) == (3, ["unhealthy", "recovery_failed"], "state_file")


def test_a_policy_file_that_is_rejected(agent: Agent) -> None:
    agent.write_policy(rules=[MANUAL])
    agent.start()
    agent.write_policy(rulez=[])
    agent.reload()
    found = wait_kind(agent, "policy_rejected")
    assert found["severity"] == "fix"
    assert f"check --config {agent.config}" in found["commands"][0]["command"]
    agent.write_policy(rules=[MANUAL])
    agent.reload()
    wait_none(agent, "policy_rejected")


def test_a_vm_that_is_drained_long_before_its_time_until_an_operator_approves(
    agent: Agent, sim: Simulator
) -> None:
    policy: dict[str, Any] = {"hooks": agent.hooks("drain", "resume")}
    rule = {**DRAIN, "approve": "never"}
    agent.write_policy(**policy, rules=[{**rule, "lead": "1h"}])
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=3600)
    agent.wait_hook("drain")
    agent.wait_phase(event, "held")
    assert kinds(agent.status()) == []
    agent.write_policy(**policy, rules=[{**rule, "lead": "1m"}])
    agent.reload()
    found = wait_kind(agent, "out_of_service")
    assert (found["severity"], found["event_id"], found["deadline"]) == ("fix", event, None)
    assert found["message"].endswith(": earlier than its lead.")
    assert agent.status()["headline"] == found["message"]
    assert agent.get("/healthz")[0] == 200
    assert not agent.is_ready()
    assert agent.say("hold", event).returncode == 0
    wait_none(agent, "out_of_service")
    assert agent.say("release", event).returncode == 0
    wait_kind(agent, "out_of_service")
    assert agent.say("approve", event).returncode == 0
    sim.wait_gone(event)
    agent.wait_hook("resume")
    wait_none(agent, "out_of_service")


def test_an_event_stays_prepared_if_the_agent_stops_acting(agent: Agent, sim: Simulator) -> None:
    policy: dict[str, Any] = {
        "rules": [{**DRAIN, "approve": "never", "lead": "1h"}],
        "hooks": agent.hooks("drain", "resume"),
    }
    agent.write_policy(**policy)
    agent.start()
    event = sim.schedule("Freeze", notice_seconds=600)
    agent.wait_hook("drain")
    agent.write_policy(**policy, agent={"mode": "observe"})
    agent.reload()
    agent.wait_until(lambda: agent.status()["mode"] == "observe", "it observes")
    sim.cancel(event)
    wait_kind(agent, "not_acting")
    agent.write_policy(**policy)
    agent.reload()
    wait_none(agent, "not_acting")
    assert agent.ran() == ["drain", "resume"]


def test_a_vm_whose_name_is_changed_while_it_is_prepared(agent: Agent, sim: Simulator) -> None:
    policy: dict[str, Any] = {
        "rules": [{**DRAIN, "approve": "manual", "lead": "2h"}],
        "hooks": agent.hooks("drain", "resume"),
    }
    agent.write_policy(**policy)
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=3600)
    agent.wait_phase(event, "prepared")
    agent.write_policy(**policy, vm={"name": "vm-9"})
    agent.reload()
    found = wait_kind(agent, "vm_changed")
    assert found["message"] == "This VM is prepared for the Reboot of vm-1, and its name is vm-9 now."
    assert (found["severity"], found["event_id"]) == ("act", event)
    assert "vm-1" in found["commands"][0]["effect"]
    assert agent.status()["headline"] == found["message"]
    assert agent.get("/healthz")[0] == 503
    sim.wait_polls(24)
    assert kinds(agent.status()) == ["vm_changed"]
    assert agent.wait_text(event) == "it names vm-1, which is no name of this VM any more"
    assert agent.say("approve", event).returncode == 1
    agent.stop()
    agent.start()
    wait_kind(agent, "vm_changed")
    agent.write_policy(**policy, vm={"name": "vm-9", "aliases": ["VM-1"]})
    agent.reload()
    wait_kind(agent, "approval_needed")
    assert kinds(agent.status()) == ["approval_needed"]
    agent.wait_metric(0.0, KIND, kind="vm_changed")
    agent.write_policy(**policy, vm={"name": "vm-9"})
    agent.reload()
    wait_kind(agent, "vm_changed")
    sim.cancel(event)
    wait_none(agent, "vm_changed")
    assert agent.ran() == ["drain", "resume"]
    assert agent.get("/healthz") == (200, "ok\n")
    assert sim.approvals(event) == ()


def test_a_clock_that_is_behind_and_then_right(agent: Agent, sim: Simulator) -> None:
    agent.write_policy()
    sim.fault(None, "clock_ahead", clock_seconds=100.0)
    agent.start()
    sim.wait_polls(15)
    assert kinds(agent.status()) == []
    sim.clear_faults()
    sim.fault(None, "clock_ahead", clock_seconds=600.0)
    found = wait_kind(agent, "clock_wrong")
    assert (found["severity"], found["message"]) == ("fix", "The clock of this VM is 10 minutes behind Azure's.")
    assert agent.get("/healthz") == (200, "ok\n")
    assert agent.is_ready()
    line = agent.wait_log(f"the clock of this VM is 10 minutes behind Azure's: {clock_effect(-600.0)}")
    assert (line["level"], line["seconds_ahead"]) in (("warning", -600), ("warning", -599))
    sim.clear_faults()
    sim.fault(None, "undated")
    sim.wait_polls(15)
    assert kinds(agent.status()) == ["clock_wrong"]
    assert agent.status()["attention"] == [found]
    sim.clear_faults()
    sim.fault(None, "clock_behind", clock_seconds=3.0 * 3600.0)
    told = "The clock of this VM is 3 hours ahead of Azure's."
    agent.wait_until(lambda: agent.status()["headline"] == told, "it says how the clock is wrong now")
    sim.clear_faults()
    wait_none(agent, "clock_wrong")
    agent.wait_log("the clock of this VM is right again")


def test_an_agent_that_ends_by_itself_again_and_again_says_so(agent: Agent) -> None:
    agent.write_policy()
    agent.start()
    for _ in range(3):
        agent.kill()
        agent.start()
    wait_kind(agent, "agent_restarts")
    agent.kill()
    agent.forget_boot()
    agent.start()
    assert "agent_restarts" not in kinds(agent.status())


@pytest.mark.nightly
def test_approvals_that_fail_and_then_do_not(agent: Agent, sim: Simulator) -> None:
    agent.write_policy(rules=[{"name": "all", "approve": "immediately"}])
    agent.start()
    sim.fault(None, "status", status=500, on="approve")
    sim.schedule("Reboot", notice_seconds=600)
    found = wait_kind(agent, "approval_failing")
    assert "tries have failed" in found["message"]
    sim.clear_faults()
    wait_none(agent, "approval_failing")
