"""Services that are notified of events: what an agent as a process tells them, killed, restarted and reloaded."""

import json
import random
import re
import sys
import time
from typing import Any

import pytest
from harness import Agent, Simulator
from receiver import WAYS_TO_FAIL, Receiver

pytestmark = pytest.mark.timeout(600)
ALL = ["seen", "preparing", "prepared", "held", "approved", "started", "recovered", "recovery_failed"]


def target(receiver: Receiver, name: str = "ops", **keys: Any) -> dict[str, Any]:
    return {"name": name, "to": receiver.url, "timeout": "2s", **keys}


def told(receiver: Receiver, event: str) -> list[str]:
    """The notifications of the event that the service has accepted, without repetitions."""
    bodies = {body["id"]: body for body in receiver.taken if body.get("subject") == event}
    return [body["data"]["kind"] for body in bodies.values()]


def rules(agent: Agent, **hook: Any) -> dict[str, Any]:
    return {
        "rules": [{"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}],
        "hooks": {"drain": agent.hook("drain", **hook), **agent.hooks("resume")},
    }


def test_a_target_is_notified_of_an_event_from_announcement_to_end(sim: Simulator, agent: Agent) -> None:
    with Receiver() as receiver, Receiver() as evictions:
        only_evictions = target(evictions, "evictions", when={"type": "Preempt"})
        agent.write_policy(notify=[target(receiver, on=ALL), only_evictions], **rules(agent))
        agent.start()
        event = sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=None)
        agent.wait_log("started", event_id=event)
        sim.end(event)
        agent.wait_until(lambda: "recovered" in told(receiver, event), "it heard of the end")
        assert told(receiver, event) == ["seen", "preparing", "prepared", "approved", "started", "recovered"]
        agent.wait_metric(6, "notifications_sent_total", target="ops")
        agent.wait_metric(0, "notifications_waiting", target="ops")
        first = receiver.taken[0]
        status = agent.status()
        assert first["source"] == f"/azure/vm/{status['vm']['vm_id']}"
        assert first["data"]["vm"] == {"name": "vm-1", "id": status["vm"]["vm_id"]}
        assert (first["data"]["event"]["rule"], first["data"]["mode"]) == ("all", "act")
        assert first["data"]["event"]["id"] == event
        assert first["data"]["seconds_left"] > 0
        assert receiver.taken[-1]["data"]["event"]["outcome"] == "completed"
        assert evictions.attempts == 0
        assert "secret" not in "".join(agent.history)


def test_an_event_from_before_the_name_is_announced_when_the_name_comes(sim: Simulator, agent: Agent) -> None:
    with Receiver() as receiver:
        sim.fault("vm-1", "status", on="instance", status=500)
        agent.write_policy(notify=[target(receiver, on=ALL)], rules=[{"name": "all", "approve": "never"}])
        event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
        agent.start()
        agent.wait_log("asking for this VM's name fails")
        agent.wait_log("seen", event_id=event)
        sim.wait_polls(2)
        assert receiver.attempts == 0
        sim.clear_faults()
        agent.wait_log("named", event_id=event)
        agent.wait_until(lambda: "seen" in told(receiver, event), "it heard of the event")
        sim.start_event(event)
        agent.wait_until(lambda: "started" in told(receiver, event), "it heard of the start")
        assert [kind for kind in told(receiver, event) if kind in ("seen", "started")] == ["seen", "started"]


def test_a_failed_recovery_calls_again_and_says_what_to_type(sim: Simulator, agent: Agent) -> None:
    with Receiver() as receiver, Receiver() as pagerduty:
        oncall = target(pagerduty, "oncall", format="pagerduty", headers={"X-Routing-Key": "key"})
        rule = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
        hooks = {name: agent.hook(name, exit_code=3) for name in ("drain", "resume")}
        agent.write_policy(notify=[target(receiver), oncall], rules=[rule], hooks=hooks)
        agent.start()
        event = sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=None)
        agent.wait_until(lambda: "held" in told(receiver, event), "it heard that the event is held")
        shown = agent.status()
        (need,) = shown["attention"]
        assert agent.say("approve", event).returncode == 0
        agent.wait_log("started", event_id=event)
        sim.end(event)
        agent.wait_until(lambda: "recovery_failed" in told(receiver, event), "it heard of the failure")
        assert agent.say("resolve", event).returncode == 0
        agent.wait_until(lambda: len(pagerduty.taken) == 4, "the incidents were ended")
        held = next(body["data"] for body in receiver.taken if body["data"]["kind"] == "held")
        assert [one["command"].removeprefix(shown["command_prefix"]) for one in held["commands"]] == [
            one["command"] for one in need["commands"][:2]
        ]
        assert f"retry {event[:8]} --state-dir" in held["commands"][0]["command"]
        assert held["deadline"] == need["deadline"]
        key = pagerduty.taken[0]["dedup_key"]
        assert [
            (body["event_action"], body["dedup_key"], body["payload"]["severity"]) for body in pagerduty.taken
        ] == [
            ("trigger", key, "warning"),
            ("resolve", key, "info"),
            ("trigger", f"{key}/recovery", "critical"),
            ("resolve", f"{key}/recovery", "info"),
        ]


def test_an_agent_that_only_observes_notifies_too(sim: Simulator, agent: Agent) -> None:
    with Receiver() as receiver:
        agent.write_policy(agent={"mode": "observe"}, notify=[target(receiver, on=ALL)], **rules(agent))
        agent.start()
        event = sim.schedule("Freeze", notice_seconds=1, start_delay_seconds=0.1, lasts_seconds=None)
        agent.wait_log("started", event_id=event)
        sim.end(event)
        agent.wait_until(lambda: "recovered" in told(receiver, event), "it heard of the end")
        assert told(receiver, event) == ["seen", "started", "recovered"]
        assert {body["data"]["mode"] for body in receiver.taken} == {"observe"}


@pytest.mark.nightly
def test_an_agent_killed_at_random_moments_loses_no_notification(sim: Simulator, agent: Agent) -> None:
    dice = random.Random(20261122)

    def behave() -> str:
        return dice.choice(WAYS_TO_FAIL) if dice.random() < 0.45 else "ok"

    with Receiver(behave) as receiver:
        agent.write_policy(notify=[target(receiver, on=ALL, timeout="500ms")], **rules(agent))
        agent.start()
        events = []
        for _ in range(4):
            events.append(sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=0.3))
            time.sleep(dice.uniform(0.0, 1.5))  # the moment is what is being tried
            agent.kill()
            agent.start(is_awaited=False)
            sim.wait_gone(events[-1])
        for event in events:
            agent.wait_until(lambda event=event: "recovered" in told(receiver, event), "it heard of the end")  # type: ignore[misc]
        for event in events:
            # The journal is written in the same transaction: what it has, the service has heard of, in that order.
            words = {"closed": "recovered"}
            kinds = [words.get(kind, kind) for kind, of in agent.journal("kind", "event_id") if of == event]
            assert told(receiver, event) == [kind for kind in kinds if kind in ALL]
        assert "secret" not in "".join(agent.history)


@pytest.mark.skipif(sys.platform == "win32", reason="it is stopped by SIGTERM")
def test_notifications_from_before_a_reboot_are_sent_after_the_target_returns(
    sim: Simulator, agent: Agent
) -> None:
    with Receiver(lambda: "503") as receiver:
        agent.write_policy(notify=[target(receiver)], **rules(agent))
        agent.start()
        event = sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=None)
        agent.wait_log("started", event_id=event)
        agent.wait_log("notifying ops fails")
        agent.stop()
        sim.end(event)
        receiver.behave = lambda: "ok"
        agent.start()
        agent.wait_until(lambda: "recovered" in told(receiver, event), "it heard of the end")
        assert told(receiver, event) == ["seen", "started", "recovered"]


@pytest.mark.skipif(sys.platform == "win32", reason="the policy is read again after SIGHUP")
def test_a_reload_adds_and_removes_targets(sim: Simulator, agent: Agent) -> None:
    with Receiver(lambda: "503") as away, Receiver() as here:
        agent.write_policy(notify=[target(away, "away")])
        agent.start()
        event = sim.schedule("Freeze", notice_seconds=600)
        agent.wait_until(lambda: agent.metric("notifications_waiting", target="away"), "a notice waited")
        agent.wait_log("notifying away fails")
        agent.wait_until(lambda: agent.status()["notify"][0]["failure"], "/status showed it")
        shown = agent.run("status", "--state-dir", str(agent.state_dir)).stdout
        failing = r"notify +away has failed since [0-9: -]+ UTC: it answers 503; notifications waiting: 1\n"
        assert re.search(failing, shown), shown
        agent.write_policy(notify=[target(here, "here")])
        agent.reload()
        agent.wait_log("notifications are dropped", target="away", count=1)
        agent.wait_until(lambda: "notifications_waiting" in agent.metrics(), "there are targets")
        assert [labels for labels, _ in agent.metrics()["notifications_waiting"]] == [{"target": "here"}]
        sim.cancel(event)
        agent.wait_until(lambda: told(here, event) == ["recovered"], "the new target heard of it")


def test_a_lost_notification_is_shown_until_one_is_delivered_even_after_a_restart(
    sim: Simulator, agent: Agent
) -> None:
    with Receiver(lambda: "400") as receiver:
        agent.write_policy(notify=[target(receiver, on=["seen", "recovered"])])
        agent.start()
        event = sim.schedule("Freeze", notice_seconds=600)
        agent.wait_until(lambda: agent.status()["notify"][0]["lost"] == 1, "/status showed it")
        before = agent.status()["notify"][0]
        assert before["lost_reason"] == "it answers 400"
        agent.wait_log("a notification is lost", target="ops", kind="seen", event_id=event)
        agent.kill()
        agent.start()
        after = agent.status()["notify"][0]
        assert (after["lost"], after["lost_at"]) == (1, before["lost_at"])
        options = ("--state-dir", str(agent.state_dir))
        for shown in (
            agent.run("history", *options).stdout,
            agent.run("history", "--json", *options).stdout,
            agent.get("/history")[1],
        ):
            assert f"ops: seen of {event}: it answers 400" in shown
        status = " ".join(agent.run("status", "--state-dir", str(agent.state_dir)).stdout.split())
        assert re.search(r"notify ops: 1 notification lost since [0-9: -]+ UTC \(it answers 400\)", status)
        receiver.behave = lambda: "ok"
        sim.cancel(event)
        agent.wait_until(lambda: agent.status()["notify"][0]["lost"] == 0, "the next one was delivered")
        assert agent.status()["notify"][0]["lost_at"] is None


def test_doctor_names_targets_that_are_unusable_or_reject_notifications(sim: Simulator, agent: Agent) -> None:
    def warned() -> list[str]:
        options = ("--config", str(agent.config), "--state-dir", str(agent.state_dir))
        checks = json.loads(agent.run("doctor", "--json", *options).stdout)["checks"]
        found = [check for check in checks if check["check"] == "notifications"]
        assert {check["state"] for check in found} == {"warning"}
        assert all(f"notify test {check['message'].partition(':')[0]}" in check["hint"] for check in found)
        return [check["message"] for check in found]

    with Receiver(lambda: "401") as denying:
        no_secret = str(agent.directory / "no-secret")
        missing = {"name": "missing", "to": {"file": no_secret}}
        agent.write_policy(notify=[missing, target(denying, "denying")])
        (without_agent,) = warned()
        assert without_agent.startswith(f"missing: to: {no_secret}: cannot be read")
        agent.start()
        sim.schedule("Freeze", notice_seconds=600)
        for name in ("missing", "denying"):
            agent.wait_log(f"notifying {name} fails")
        unusable, failing, denied = warned()
        assert unusable == without_agent
        assert re.match(r"missing: has failed since [0-9: -]+ UTC: to: ", failing)
        assert re.fullmatch(r"denying: has failed since [0-9: -]+ UTC: it answers 401", denied)


def test_a_test_notification_is_sent_without_an_agent_and_its_response_is_shown(agent: Agent) -> None:
    with Receiver() as good, Receiver(lambda: "400") as bad:
        agent.write_policy(vm={"name": "vm-7"}, notify=[target(good, "good"), target(bad, "bad", format="slack")])
        done = agent.run("notify", "test", "good", "--config", str(agent.config))
        assert (done.returncode, done.stdout) == (0, "good: delivered, it answers 202: ok\n")
        assert good.taken[0]["type"] == "io.scheduled-events-agent.test"
        assert good.taken[0]["data"]["vm"]["name"] == "vm-7"
        done = agent.run("notify", "test", "--json", "--config", str(agent.config))
        assert done.returncode == 1
        answer = json.loads(done.stdout)
        assert [tuple(one.values()) for one in answer["targets"]] == [
            ("good", True, 202, "", "ok"),
            ("bad", False, None, "it answers 400", '{"error": "no"}'),
        ]
        done = agent.run("notify", "test", "other", "--config", str(agent.config))
        assert done.returncode == 2
        oncall = target(good, "oncall", format="pagerduty", headers={"X-Routing-Key": "key"})
        agent.write_policy(notify=[oncall])
        assert agent.run("notify", "test", "--config", str(agent.config)).returncode == 0
        trigger, resolve = good.taken[-2:]
        assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
        assert trigger["dedup_key"] == resolve["dedup_key"]
        agent.write_policy()
        assert agent.run("notify", "test", "--config", str(agent.config)).returncode == 2
        assert "secret" not in "".join(agent.history)
