"""Two VMs in one event, each with an agent of its own: neither is out of service longer than necessary."""

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from harness import SLOWNESS, Agent, MakeAgent, Simulator

VMS = ("web-1", "web-2")
# The agent, but each VM of an event speaks so many seconds after the one before it.
PROGRAM = """
import importlib, sys
from scheduled_events_agent.cli import main
decide = importlib.import_module("scheduled_events_agent.policy.decide")
decide.APPROVAL_STAGGER_SECONDS = float(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def both() -> Iterator[Simulator]:
    """An endpoint for two VMs."""
    with Simulator(vms=VMS, rate_limit=None) as simulator:
        yield simulator


def test_two_servers_in_one_event_say_when_they_are_drained(both: Simulator, make_agent: MakeAgent) -> None:
    agents = [make_agent(both.endpoint(vm), vm) for vm in VMS]
    for agent in agents:
        rule = {"name": "maintenance", "drain_for": "30s", "prepare": ["stop"], "approve": "when-prepared"}
        stop = agent.hook("stop", timeout="60s")
        agent.write_policy(agent={"listen": "127.0.0.1:0", "reserve": "5s"}, rules=[rule], hooks={"stop": stop})
        agent.start()
    event = both.schedule("Reboot", vms=VMS, notice_seconds=2 * 86400)  # it begins on another day
    begins_at = both.event(event).not_before_at - timedelta(seconds=60 + 30 + 5)
    for agent in agents:
        waits_for = agent.wait_phase(event, "waiting")["waits_for"]
        assert waits_for["kind"] == "time"
        assert waits_for["text"].startswith(f"begins at {begins_at:%Y-%m-%d %H:%M:%S} UTC (in ")
        assert "): it names other VMs too and shared is hold" in waits_for["text"]
        assert agent.is_ready()
        told = agent.run("status", "--state-dir", str(agent.state_dir)).stdout
        assert f"begins at {begins_at:%Y-%m-%d %H:%M:%S} UTC (in " in " ".join(told.split())


@pytest.mark.nightly  # the whole notice
def test_two_servers_in_one_event_do_not_drain_for_the_whole_lead_time(
    both: Simulator, make_agent: MakeAgent
) -> None:
    limit, drain, reserve = 4 + 2 * SLOWNESS, 1.0, 1.0
    needed = timedelta(seconds=limit + drain + reserve)
    agents = [make_agent(both.endpoint(vm), vm) for vm in VMS]
    for agent in agents:
        agent.write_policy(
            agent={"listen": "127.0.0.1:0", "reserve": f"{reserve:g}s"},
            rules=[
                {
                    "name": "maintenance",
                    "drain_for": f"{drain:g}s",
                    "prepare": ["stop"],
                    "recover": ["resume"],
                    "approve": "when-prepared",
                }
            ],
            hooks={"stop": agent.hook("stop", timeout=f"{limit:g}s"), **agent.hooks("resume")},
        )
        agent.start()
    event = both.schedule("Reboot", vms=VMS, notice_seconds=needed.total_seconds() + 20.0, lasts_seconds=2.0)
    not_before = both.event(event).not_before_at
    for agent in agents:
        agent.wait_phase(event, "waiting")
        assert agent.is_ready()
    for agent in agents:
        agent.wait_log("closed", event_id=event)
        (began_at,) = agent.journal_times(kind="preparing")
        assert began_at >= not_before - needed - timedelta(seconds=0.1)
        assert agent.ran() == ["stop", "resume"]
        assert agent.is_ready()
    assert not [request for request in both.requests() if request.method == "POST"]


def test_an_operators_approval_on_one_of_two_servers_begins_there_at_once(
    both: Simulator, make_agent: MakeAgent
) -> None:
    agent = make_agent(both.endpoint("web-2"), "web-2")
    rule = {"name": "maintenance", "prepare": ["stop"], "recover": ["resume"], "approve": "when-prepared"}
    agent.write_policy(rules=[rule], hooks=agent.hooks("stop", "resume"))
    agent.start()
    event = both.schedule("Reboot", vms=VMS, notice_seconds=86400)
    agent.wait_phase(event, "waiting")
    assert "the other VMs" in agent.say("hold", event).stdout
    agent.say("approve", event)
    both.wait_approved(event)
    assert agent.ran()[:1] == ["stop"]


@pytest.mark.parametrize("seconds", [2.0, pytest.param(10.0, marks=pytest.mark.nightly)])
def test_the_second_vm_approves_ten_seconds_later_where_the_first_has_no_agent(
    both: Simulator, make_agent: MakeAgent, seconds: float
) -> None:
    agent: Agent = make_agent(both.endpoint("web-2"), "web-2")
    agent.program = [sys.executable, "-c", PROGRAM, str(seconds)]
    agent.write_policy(rules=[{"name": "user", "when": {"source": "User"}, "approve": "immediately"}])
    agent.start()
    event = both.schedule("Reboot", source="User", vms=VMS, notice_seconds=900)
    both.wait_approved(event)
    (seen_at,) = agent.journal_times(kind="seen")
    (asked_at,) = agent.journal_times(kind="approving")
    assert timedelta(0) <= asked_at - seen_at - timedelta(seconds=seconds) < timedelta(seconds=15)
