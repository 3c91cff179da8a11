"""A real agent behind what Azure's Guest Proxy Agent does: it says so, and loses and invents no approval."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import Agent, Simulator

from scheduled_events_agent import host
from scheduled_events_agent.imds.guest_proxy import caller
from scheduled_events_agent.simulator.faults import FaultKind, FaultScope

FAILED_POLLS = 3
POLLING = "polling the metadata service fails"
ASKING = "asking for this VM's name fails"
STATUS_OF_IT = host.guest_proxy_command()


def denial_of(path: str) -> str:
    # A test runs with this very executable.
    user, program = caller()
    return f"the VM's Guest Proxy Agent denies it: allow user {user}, program {program}, path {path} in its rules"


class Row(NamedTuple):
    """What the proxy does, and the sentence about it."""

    kind: FaultKind
    on: FaultScope
    sentence: str
    check: str = "endpoint"
    """The check of doctor that has the sentence."""


LOST = f"the VM's Guest Proxy Agent has lost the record of this connection; if it stays: {STATUS_OF_IT}"
EVENTS, INSTANCE = "/metadata/scheduledevents", "/metadata/instance"
ROWS = {
    "denied events": Row("denied", "events", denial_of(EVENTS), check="events"),
    "421": Row("misdirected", "any", LOST),
    "500": Row(
        "no_rules",
        "any",
        f"the VM's Guest Proxy Agent has no rules yet, or does not reach the host: {STATUS_OF_IT}",
    ),
    "refused": Row(
        "refused", "any", f"Azure's proxy does not listen (127.0.0.1:3080): {STATUS_OF_IT}; or this process"
    ),
    "hang": Row("stall", "any", "no whole answer within 1 s"),
}


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1",), rate_limit=None) as sim:
        yield sim


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator) -> Iterator[Agent]:
    with Agent(tmp_path / "agent", sim.endpoint()) as agent:
        write_policy(agent)
        yield agent


def write_policy(agent: Agent, **imds: str) -> None:
    agent.write_policy(
        imds=imds,
        rules=[{"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}],
        hooks={"drain": agent.hook("drain", until="drained"), "resume": agent.hook("resume")},
    )


def failed_polls(agent: Agent) -> float:
    return sum(value for labels, value in agent.metrics().get("polls_total", ()) if labels["outcome"] != "ok")


def wait_failures(agent: Agent) -> None:
    failures = failed_polls(agent) + FAILED_POLLS
    agent.wait_until(lambda: failed_polls(agent) >= failures, f"{FAILED_POLLS} polls had failed")


def denied_requests(sim: Simulator) -> list[str]:
    return [request.path for request in sim.requests() if request.status == 403]


def printed_by(agent: Agent, *command: str) -> str:
    return agent.run(*command, "--config", str(agent.config), "--state-dir", str(agent.state_dir)).stdout


def wait_logged(agent: Agent, message: str, sentence: str) -> None:
    agent.wait_until(
        lambda: any(sentence in line["reason"] for line in agent.log(message)), f"{sentence} was logged"
    )


def line_of(agent: Agent, check: str) -> str:
    lines = printed_by(agent, "doctor").splitlines()
    return next(line for line in lines if line.split()[1:2] == [check])


def check_life_ends_well(sim: Simulator, agent: Agent, event: str) -> None:
    """The event is prepared for once, approved once, and recovered from."""
    agent.let_go("drained")
    sim.wait_approved(event)
    sim.wait_gone(event)
    agent.wait_hook("resume")
    assert agent.ran() == ["drain", "resume"]
    assert [approved for request in sim.approvals() for approved in request.approved] == [event]


def test_a_proxy_that_allows_is_seen_and_changes_nothing(sim: Simulator, agent: Agent) -> None:
    sim.fault("vm-1", "proxied")
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=1)
    found = line_of(agent, "proxy")
    assert found.startswith("ok ")
    sign = "Azure's Guest Proxy Agent is there (an answer had its header)"
    assert f"{sign}: a rule names this agent as user {caller().user}, " in found
    assert (
        f"executable {caller().program}, process {Path(caller().program).name}, for the paths {EVENTS}," in found
    )
    assert agent.status()["guest_proxy"] is True
    check_life_ends_well(sim, agent, event)
    assert [line for line in agent.lines if "Guest Proxy Agent" in str(line)] == []


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_the_proxy_does_is_said_and_no_approval_is_lost(sim: Simulator, agent: Agent, row: Row) -> None:
    if row.kind == "stall":
        write_policy(agent, request_timeout="1s", first_request_timeout="1s")
    sim.fault("vm-1", "proxied", on="poll", count=1)
    agent.start()
    sim.fault("vm-1", row.kind, on=row.on)
    event = sim.schedule("Reboot", lasts_seconds=1)
    wait_failures(agent)

    wait_logged(agent, POLLING, row.sentence)
    agent.wait_until(lambda: row.sentence in printed_by(agent, "status"), "status said why")
    agent.wait_until(lambda: row.sentence in line_of(agent, row.check), "doctor said why")
    assert "Azure's Guest Proxy Agent is there" in line_of(agent, "proxy")
    assert agent.ran() == []
    assert sim.approvals() == ()

    sim.clear_faults()
    check_life_ends_well(sim, agent, event)


def test_a_lost_record_of_one_connection_is_said_and_passes(sim: Simulator, agent: Agent) -> None:
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=1)
    sim.fault("vm-1", "misdirected", on="poll", count=1)
    wait_logged(agent, POLLING, LOST)
    agent.wait_log("polling the metadata service works again")
    check_life_ends_well(sim, agent, event)


@pytest.mark.parametrize("on", ["any", "instance"])
def test_a_start_that_is_denied_goes_on_when_it_is_allowed(sim: Simulator, agent: Agent, on: FaultScope) -> None:
    sim.fault("vm-1", "proxied", on="poll", count=1)
    sim.fault("vm-1", "denied", on=on)
    agent.start(is_awaited=False)
    event = sim.schedule("Reboot", lasts_seconds=1)
    agent.wait_log("agent started")
    sim.wait_until(lambda: len(denied_requests(sim)) > FAILED_POLLS, "it was denied often")
    denied = EVENTS if on == "any" else INSTANCE
    wait_logged(agent, POLLING if on == "any" else ASKING, "Guest Proxy Agent")
    agent.wait_until(lambda: denial_of(denied) in printed_by(agent, "status"), "status said why")
    agent.wait_until(lambda: denial_of(INSTANCE) in line_of(agent, "endpoint"), "doctor said why")
    assert agent.ran() == []
    assert sim.approvals() == ()

    sim.clear_faults()
    check_life_ends_well(sim, agent, event)


def test_a_denial_amid_the_preparation_costs_nothing(sim: Simulator, agent: Agent) -> None:
    sim.fault("vm-1", "proxied", on="poll", count=1)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=1)
    agent.wait_hook("drain", "start")
    sim.fault("vm-1", "denied")
    wait_failures(agent)
    agent.let_go("drained")
    agent.wait_hook("drain")
    assert sim.approvals() == ()

    sim.clear_faults()
    check_life_ends_well(sim, agent, event)


def test_a_denial_amid_the_approval_is_said_and_costs_nothing(sim: Simulator, agent: Agent) -> None:
    sim.fault("vm-1", "proxied", on="poll", count=1)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=1)
    sim.fault("vm-1", "denied", on="approve")
    agent.let_go("drained")
    agent.wait_until(lambda: agent.metric("approvals_total", outcome="denied") >= 1, "an approval was denied")
    assert denial_of(EVENTS) in agent.pending()[event]["approval"]["last_error"]
    assert sim.approvals() == ()

    sim.clear_faults()
    check_life_ends_well(sim, agent, event)
