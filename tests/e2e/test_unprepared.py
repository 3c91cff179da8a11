"""An event that Azure starts before it is prepared, and one of which the VM is not known, with a real agent."""

import pytest
from harness import Agent, Simulator
from receiver import Receiver

LATE = {"name": "late", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared", "lead": "1m"}
WHY = "unprepared: its time had not come, it was to begin at "


def test_what_azure_starts_unprepared_is_said_everywhere_and_counted_over_a_restart(
    agent: Agent, sim: Simulator
) -> None:
    with Receiver() as receiver:
        agent.write_policy(
            rules=[LATE],
            hooks=agent.hooks("drain", "resume"),
            notify=[{"name": "ops", "to": receiver.url, "on": ["started"]}],
        )
        agent.start()
        assert agent.metric("unprepared_total", reason="time") == 0
        event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
        agent.wait_phase(event, "waiting")
        sim.start_event(event)
        agent.wait_phase(event, "started")
        agent.wait_metric(1, "unprepared_total", reason="time")
        agent.wait_until(lambda: receiver.taken, "it was notified")
        assert WHY in receiver.taken[0]["data"]["reason"]
    status = agent.status()
    assert WHY in status["events"][0]["activity"]
    assert status["headline"].startswith("Reboot is under way, unprepared: ")
    unprepared = agent.stored()[event].unprepared
    assert unprepared is not None
    assert unprepared.kind == "time"
    history = agent.run("history", "--state-dir", str(agent.state_dir)).stdout
    assert WHY in history
    line = agent.wait_log("unprepared")
    assert line["level"] == "warning"
    agent.kill()
    agent.start()
    agent.wait_metric(1, "unprepared_total", reason="time")
    assert sum(kind == "unprepared" for (kind,) in agent.journal("kind")) == 1


@pytest.mark.parametrize("is_over", [False, True], ids=["started", "over"])
def test_it_is_said_of_an_event_that_azure_starts_while_the_name_is_not_known(
    agent: Agent, sim: Simulator, *, is_over: bool
) -> None:
    agent.write_policy(rules=[LATE], hooks=agent.hooks("drain", "resume"))
    sim.fault(None, "status", on="instance")
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
    agent.wait_until(agent.pending, "it is pending")
    sim.start_event(event)
    agent.wait_until(lambda: agent.pending()[event]["status"] == "Started", "it has started")
    if is_over:
        sim.end(event)
        agent.wait_until(lambda: agent.pending()[event]["outcome"], "it is over")
        agent.kill()
        agent.start()
    assert agent.metric("unprepared_total", reason="vm_unknown") == 0
    sim.clear_faults()
    agent.wait_metric(1, "unprepared_total", reason="vm_unknown")
    assert agent.wait_log("unprepared")["reason"] == "unprepared: nothing said whether it names this VM"


def test_a_target_is_notified_once_of_an_event_while_the_name_is_not_known(agent: Agent, sim: Simulator) -> None:
    with Receiver() as receiver:
        agent.write_policy(
            rules=[LATE],
            hooks=agent.hooks("drain", "resume"),
            notify=[{"name": "ops", "to": receiver.url}],
        )
        sim.fault(None, "status", on="instance")
        agent.start()
        event = sim.schedule("Preempt", notice_seconds=600)
        agent.wait_until(lambda: receiver.taken, "it was notified")
        data = receiver.taken[0]["data"]
        assert (data["kind"], data["event"]["type"]) == ("vm_unknown", "Preempt")
        assert data["deadline"] is not None
        assert "vm.name" in data["reason"]
        (command,) = [one["command"] for one in data["commands"]]
        assert "scheduled-events-agent doctor" in command
        sim.clear_faults()
        agent.wait_phase(event, "waiting")
        agent.wait_until(lambda: len(receiver.taken) > 1, "the event was announced")
        assert [body["data"]["kind"] for body in receiver.taken] == ["vm_unknown", "seen"]
