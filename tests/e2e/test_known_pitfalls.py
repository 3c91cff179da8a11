"""Mistakes of other tools for Scheduled Events that this agent does not make: one test for each."""

import contextlib
import json
import math
import re
import socket
import sqlite3
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import SLOWNESS, Agent, Endpoint, MakeAgent, Simulator, approved_ids, document
from ports import free_port

from scheduled_events_agent.simulator import RequestRecord, Scenario

AT_ONCE = {"name": "at-once", "approve": "immediately"}
DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
BY_HAND = {**DRAIN, "approve": "manual", "lead": "30d"}

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a process that can be made to stand still")


def posts(sim: Simulator) -> list[RequestRecord]:
    return [request for request in sim.requests() if request.method == "POST"]


def wait_some_polls(sim: Simulator) -> None:
    """Time enough to do what must not be done."""
    sim.wait_polls(4)


def polls(sim: Simulator) -> list[RequestRecord]:
    events = "/metadata/scheduledevents"
    return [request for request in sim.requests() if request.method == "GET" and request.path.startswith(events)]


def longest_gap_seconds(sim: Simulator, since: float, until: float) -> float:
    """The longest time without a poll within this part of the monotonic clock."""
    times = [request.monotonic for request in polls(sim)]
    marks = [since, *(at for at in times if since < at < until), until]
    return max(later - earlier for earlier, later in pairwise(marks))


# --- Approving


def test_a_drain_that_fails_is_not_followed_by_an_approval_and_the_log_says_so(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", exit_code=3)})
    agent.start()
    event = sim.schedule("Reboot")
    held = agent.wait_log("held", event_id=event)
    assert held["level"] == "warning"
    assert held["reason"].partition("; Azure starts it at ")[0] == "held: hook drain: exit code 3"
    wait_some_polls(sim)
    assert posts(sim) == []
    assert agent.pending()[event]["phase"] == "held"


def test_two_events_for_this_vm_are_handled_independently(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[{**AT_ONCE, "when": {"source": "User"}}, DRAIN],
        hooks={**agent.hooks("resume"), "drain": agent.hook("drain", exit_code=1)},
    )
    agent.start()
    near = sim.schedule("Redeploy", notice_seconds=300)
    agent.wait_log("held", event_id=near)
    far = sim.schedule("Reboot", source="User", notice_seconds=900, lasts_seconds=None)
    sim.wait_approved(far)
    wait_some_polls(sim)
    assert approved_ids(posts(sim)) == [far]
    assert agent.pending()[near]["phase"] == "held"


def test_an_event_for_another_vm_is_observed(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[{**AT_ONCE, "when": {"affects": ["self", "others"]}}])
    agent.start()
    event = sim.schedule("Reboot", vms=["vm-2"])
    decided = agent.wait_log("decided", event_id=event)
    assert "does not name this VM" in decided["reason"]
    wait_some_polls(sim)
    assert posts(sim) == []
    assert agent.is_ready()


def test_an_event_that_names_others_too_is_approved_by_the_first_vm_of_it(make_agent: MakeAgent) -> None:
    with Simulator(vms=("vm-1", "vm-2"), rate_limit=None) as sim:
        agents = [make_agent(sim.endpoint(vm), vm) for vm in ("vm-1", "vm-2")]
        for agent in agents:
            agent.write_policy(rules=[AT_ONCE])
            agent.start(is_awaited=False)
        # It does not start before the slower of the two has seen it.
        event = sim.schedule("Reboot", vms=["vm-2", "vm-1"], start_delay_seconds=600.0, lasts_seconds=None)
        agents[0].wait_log("waiting", event_id=event)
        waits_for = agents[0].pending()[event]["waits_for"]
        assert waits_for["kind"] == "other_vms"
        assert waits_for["text"].startswith("VMs listed before this one may approve it until ")
        sim.wait_approved(event)
        agents[1].wait_log("approved", event_id=event)


def test_an_event_that_names_other_vms_is_prepared_and_not_approved_by_default(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[{**DRAIN, "lead": "30d"}], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", vms=["vm-1", "vm-2"])
    held = agent.wait_log("held", event_id=event)
    assert "it names several VMs (vm-1, vm-2) and shared is hold" in held["reason"]
    wait_some_polls(sim)
    assert agent.ran() == ["drain"]
    assert posts(sim) == []


def test_an_event_that_has_started_is_not_approved(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    event = sim.schedule("Freeze", begins_started=True, lasts_seconds=None)
    agent.wait_log("started", event_id=event)
    wait_some_polls(sim)
    assert posts(sim) == []


def test_the_name_vm1_does_not_match_vm10(make_agent: MakeAgent) -> None:
    with Simulator(vms=("vm1",), others=("vm10",), rate_limit=None) as sim:
        agent = make_agent(sim.endpoint())
        agent.write_policy(rules=[AT_ONCE])
        agent.start()
        others, own = sim.schedule("Reboot", vms=["vm10"]), sim.schedule("Reboot", vms=["vm1"])
        sim.wait_approved(own)
        agent.wait_until(lambda: agent.status()["other_vm_events"] == 1, "the other VM's event was counted")
        assert others not in agent.pending()
        wait_some_polls(sim)
        assert approved_ids(posts(sim)) == [own]


def test_the_vm_is_identified_by_its_azure_name_and_not_its_host_name(make_agent: MakeAgent) -> None:
    name = socket.gethostname() + "_0"
    with Simulator(vms=(name,), others=(socket.gethostname(),), rate_limit=None) as sim:
        agent = make_agent(sim.endpoint())
        agent.write_policy(rules=[AT_ONCE])
        agent.start()
        others = sim.schedule("Reboot", vms=[socket.gethostname()])
        own = sim.schedule("Reboot", vms=[name])
        sim.wait_approved(own)
        agent.wait_until(lambda: agent.status()["other_vm_events"] == 1, "the other VM's event was counted")
        assert others not in agent.pending()
        assert approved_ids(posts(sim)) == [own]


def test_an_approval_that_gets_a_500_is_sent_again_and_confirmed_once(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    sim.fault("vm-1", "status", on="approve", status=500, count=1)
    event = sim.schedule("Reboot", start_delay_seconds=1.0, lasts_seconds=None)
    failed = agent.wait_log("approval failed", event_id=event)
    assert failed["reason"].startswith("approval failed (server_error), next try in 1s: POST ")
    agent.wait_log("approved", event_id=event)
    sim.wait_started(event)
    wait_some_polls(sim)
    assert [request.status for request in posts(sim)] == [500, 200]
    assert agent.metric("approvals_total", outcome="confirmed") == 1
    assert agent.metric("approvals_total", outcome="server_error") == 1


def test_an_approval_that_took_effect_despite_a_500_completes(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    sim.fault("vm-1", "status", on="approve", status=500, count=1, request_is_processed=True)
    event = sim.schedule("Reboot", start_delay_seconds=0.2, lasts_seconds=None)
    agent.wait_log("started", event_id=event)
    sim.end(event)
    closed = agent.wait_log("closed", event_id=event)
    assert closed["reason"] == "is over: completed"
    assert [request.status for request in posts(sim)] == [500]


# --- Polling


@pytest.mark.parametrize("status", [404, 500, pytest.param(400, marks=pytest.mark.nightly)])
def test_an_error_with_a_json_body_is_a_failed_poll_and_nothing_is_recovered(
    sim: Simulator, agent: Agent, status: int
) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot")
    agent.wait_log("prepared", event_id=event)
    sim.fault("vm-1", "status", on="poll", status=status, count=1)
    agent.wait_log("polling the metadata service fails")
    assert agent.wait_log("polling the metadata service works again")["failures"] == 1
    failed, again = next(pair for pair in pairwise(polls(sim)) if pair[0].fault)
    assert again.monotonic - failed.monotonic < 8  # soon, and not as after further failures
    assert agent.ran() == ["drain"]
    assert agent.pending()[event]["phase"] == "prepared"
    assert not agent.is_ready()


def test_an_empty_answer_means_not_ready_yet(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    sim.fault("vm-1", "empty", on="poll", count=1)
    agent.start(is_awaited=False)
    failed = agent.wait_log("polling the metadata service fails")
    assert failed["kind"] == "empty"
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_approved(event)


def test_while_imds_is_unavailable_the_agent_reports_it_and_later_continues(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        imds={"request_timeout": f"{1500 + 1000 * SLOWNESS:.0f}ms"},
        agent={"healthy_within": "1s"},
        rules=[BY_HAND],
        hooks=agent.hooks("drain", "resume"),
    )
    agent.start()
    event = sim.schedule("Reboot")
    agent.wait_log("prepared", event_id=event)
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy")
    sim.fault("vm-1", "stall", on="poll", count=1)
    sim.fault("vm-1", "reset", on="poll", count=1)
    status, text = agent.wait_until(
        lambda: (page := agent.get("/healthz"))[0] == 503 and page, "it was unhealthy"
    ) or (0, "")
    assert status == 503
    assert text.startswith("Azure's metadata service has not answered since ")
    back = agent.wait_log("polling the metadata service works again")
    kinds = [line["kind"] for line in agent.log("polling the metadata service fails")]
    assert back["failures"] == len(kinds)
    if SLOWNESS:  # with the longer time limit, a request beside the one that stalls is answered before or after it
        assert kinds in (["unreachable"], ["unreachable", "timeout"])
    else:
        assert kinds == ["timeout", "unreachable"]
        assert back["after_seconds"] >= 0.2  # an interval of 250 ms, as the log rounds it
    agent.wait_until(
        lambda: [agent.metric("polls_total", outcome=kind) for kind in ("timeout", "unreachable")] == [1, 1],
        "each fault was counted once",
    )
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy again")
    assert agent.pending()[event]["phase"] == "prepared"
    assert agent.ran() == ["drain"]


def test_a_page_of_a_captive_portal_does_not_confirm_an_approval(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    sim.fault("vm-1", "html", on="approve", count=1)
    event = sim.schedule("Reboot", lasts_seconds=None)
    failed = agent.wait_log("approval failed", event_id=event)
    assert failed["reason"].startswith("approval failed (unconfirmed), next try in 1s: POST ")
    sim.wait_approved(event)
    agent.wait_log("approved", event_id=event)
    assert agent.metric("approvals_total", outcome="unconfirmed") == 1


def test_an_agent_that_starts_before_the_service_waits_for_it(
    make_agent: MakeAgent,
) -> None:
    port = free_port()
    agent = make_agent(f"http://127.0.0.1:{port}")
    agent.write_policy(rules=[AT_ONCE])
    agent.start(is_awaited=False)
    failed = agent.wait_log("polling the metadata service fails")
    assert failed["kind"] == "refused"
    agent.wait_log("agent started")
    assert agent.get("/readyz")[0] == 200
    with Simulator(vms=("vm-1",), port=port, rate_limit=None) as sim:
        event = sim.schedule("Preempt", lasts_seconds=None)
        sim.wait_approved(event)


def test_after_a_restart_an_event_is_seen_although_the_first_request_times_out(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    agent.kill()
    before = len(polls(sim))
    sim.fault("vm-1", "stall", on="poll", count=1)
    event = sim.schedule("Preempt", lasts_seconds=None)
    agent.start(is_awaited=False)
    sim.wait_approved(event)
    first, second = polls(sim)[before:][:2]
    assert (first.fault, first.status, second.status) == ("stall", 0, 200)
    assert agent.metric("polls_total", outcome="timeout") == 0  # the first one still waits
    (seen_at,) = agent.journal_times(kind="seen", event_id=event)
    assert (seen_at - first.at).total_seconds() < 5.0 + SLOWNESS


def test_an_unknown_vm_name_is_requested_again_soon(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    sim.fault("vm-1", "status", on="instance", status=500, count=2)
    event = sim.schedule("Preempt", lasts_seconds=None)
    agent.start(is_awaited=False)
    agent.wait_log("asking for this VM's name fails")
    sim.wait_approved(event)
    assert agent.wait_log("asking for this VM's name works again")["failures"] == 2
    asked = [request.monotonic for request in sim.requests() if request.path.startswith("/metadata/instance")]
    assert len(asked) == 3
    assert asked[-1] - asked[0] < 60


def test_a_decreasing_incarnation_hides_no_event(make_agent: MakeAgent) -> None:
    with Simulator(scenario=Scenario(incarnation=40), rate_limit=None, shutdown_delay_seconds=math.inf) as sim:
        agent = make_agent(sim.endpoint())
        agent.write_policy(rules=[AT_ONCE])
        agent.start()
        before = sim.schedule("Reboot", lasts_seconds=0.4, start_delay_seconds=0.1)
        sim.wait_gone(before)
        sim.reset_incarnation(1)
        sim.wait_polls(1)
        after = sim.schedule("Reboot", lasts_seconds=None)
        sim.wait_approved(after)
        assert sim.approvals(after)[0].incarnation == 2


def test_documents_with_missing_extra_and_null_fields_are_understood(
    make_agent: MakeAgent,
) -> None:
    bare = {"EventId": "a-1", "EventStatus": "Scheduled", "EventType": "Reboot", "Resources": ["vm-1"]}
    soon = datetime.now(UTC) + timedelta(minutes=10)
    events: list[dict[str, Any]] = [
        bare,
        {**bare, "EventId": "B-2", "NotBefore": None, "Description": None, "DurationInSeconds": None},
        {
            **bare,
            "EventId": "c-3",
            "NotBefore": f"{soon:%Y-%m-%dT%H:%M:%SZ}",
            "Colour": "blue",
            "More": {"x": [1]},
        },
        {**bare, "EventId": "d-4", "NotBefore": f"{soon:%a, %d %b %Y %H:%M:%S GMT}", "EventSource": "Platform"},
        {**bare, "EventId": "e-5", "NotBefore": "tomorrow, perhaps", "Resources": ["_VM-1"]},
        {"EventId": "f-6"},
    ]
    with Endpoint() as endpoint:
        agent = make_agent(endpoint.url)
        agent.write_policy(rules=[AT_ONCE])
        endpoint.body = b"\xef\xbb\xbf" + document(*events)
        agent.start()
        agent.wait_log("approved", count=5)
        assert endpoint.approved == [["a-1", "B-2", "c-3", "d-4", "e-5"]]  # together in one request
        assert agent.metric("pending_not_before_timestamp_seconds", event_id="c-3") == int(soon.timestamp())
        assert agent.metric("pending_not_before_timestamp_seconds", event_id="d-4") == int(soon.timestamp())


@pytest.mark.parametrize(
    ("name", "api_version"),
    [
        ("web_0", "2020-07-01"),
        ("plain", "2020-07-01"),
        ("set_a_b_ab12cd34", "2020-07-01"),
        ("web_1", "2017-03-01"),
    ],
)
def test_the_names_of_scale_sets_and_of_plain_vms_are_understood(
    make_agent: MakeAgent, name: str, api_version: str
) -> None:
    with Simulator(vms=(name,), rate_limit=None) as sim:
        agent = make_agent(sim.endpoint())
        agent.write_policy(imds={"api_version": api_version}, rules=[AT_ONCE])
        agent.start()
        sim.wait_approved(sim.schedule("Reboot", lasts_seconds=None))


def test_a_proxy_in_the_environment_is_never_used(sim: Simulator, agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        agent.environment = {**dict.fromkeys(names, address), "no_proxy": "", "NO_PROXY": ""}
        agent.write_policy(rules=[AT_ONCE])
        agent.start()
        sim.wait_approved(sim.schedule("Reboot", lasts_seconds=None))
        agent.kill()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_an_eviction_in_ten_seconds_is_prepared_at_the_default_poll_interval(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        imds={"endpoint": sim.endpoint(), "poll_interval": "1s"},
        rules=[{"name": "spot", "when": {"type": "Preempt"}, "prepare": ["save"], "approve": "when-prepared"}],
        hooks={"save": agent.hook("save", seconds=0.5)},
    )
    agent.start()
    event = sim.schedule("Preempt", notice_seconds=10, lasts_seconds=None)
    approved = sim.wait_approved(event)
    assert agent.ran() == ["save"]
    assert approved.approved_at is not None
    assert approved.not_before_at - approved.approved_at > timedelta(seconds=1)


def test_an_event_days_ahead_is_not_prepared_for_now(sim: Simulator, agent: Agent) -> None:
    opening = datetime.now(UTC) + timedelta(hours=5)
    window = {"start": f"{opening:%H:%M}", "length": "1h"}
    agent.write_policy(
        rules=[
            {**DRAIN, "name": "windowed", "when": {"type": "Redeploy"}, "window": "night"},
            {**DRAIN, "name": "led", "lead": "15m"},
        ],
        hooks=agent.hooks("drain", "resume"),
        maintenance_windows={"night": window},
    )
    agent.start()
    led = sim.schedule("Reboot", notice_seconds=3 * 86400)
    windowed = sim.schedule("Redeploy", notice_seconds=3 * 86400)
    agent.wait_log("seen", count=2)
    wait_some_polls(sim)
    pending = agent.pending()
    assert [pending[event]["phase"] for event in (led, windowed)] == ["waiting", "waiting"]
    begins_at = sim.event(led).not_before_at - timedelta(minutes=15)
    waits_for = pending[led]["waits_for"]
    assert waits_for["kind"] == "time"
    assert datetime.fromisoformat(waits_for["until"]) == begins_at
    assert re.fullmatch(r"begins at [-0-9]+ [:0-9]+ UTC \(in 2d 23h\): lead 15m", waits_for["text"])
    waits_for = pending[windowed]["waits_for"]
    assert waits_for["kind"] == "window"
    assert datetime.fromisoformat(waits_for["until"]) == opening.replace(second=0, microsecond=0)
    assert re.fullmatch(r"begins at .*[:0-9]+ UTC \(in 4h 5\dm\): window night opens", waits_for["text"])
    assert agent.is_ready()
    assert agent.ran() == []
    assert posts(sim) == []


# --- Hooks, recovery and restarts


# The longer the limit, the more clearly a pause in the polling differs from a slow machine.
@pytest.mark.parametrize("limit", [3.0, pytest.param(6.0, marks=pytest.mark.nightly)])
def test_a_hook_that_hangs_is_killed_at_its_limit_and_polling_never_stops(
    sim: Simulator, agent: Agent, limit: float
) -> None:
    hang = agent.hook("drain", until="never", timeout=f"{limit:g}s")
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": hang})
    agent.start()
    event = sim.schedule("Reboot")
    began = agent.wait_hook("drain", "start")["monotonic"]
    held = agent.wait_log("held", event_id=event)
    ended = time.monotonic()
    failure = rf"hook drain: killed after [\d.]+s; its time limit is {limit:g}s"
    assert re.fullmatch(f"held: {failure}", held["reason"].partition("; Azure starts it at ")[0])
    # The agent's own times: the hook itself notes its start when it has started.
    (started_at,) = agent.journal_times(kind="hook_started")
    (held_at,) = agent.journal_times(kind="held")
    assert timedelta(0) < held_at - started_at - timedelta(seconds=limit) < timedelta(seconds=15)
    assert longest_gap_seconds(sim, began, ended) < limit - 0.5
    assert agent.records("end") == []
    assert agent.metric("hook_duration_seconds_count", hook="drain", outcome="timed_out") == 1


def test_a_preempt_event_is_handled_before_a_long_drain_ends(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[
            {"name": "spot", "when": {"type": "Preempt"}, "prepare": ["save"], "approve": "when-prepared"},
            DRAIN,
        ],
        hooks={**agent.hooks("resume", "save"), "drain": agent.hook("drain", until="drained")},
    )
    agent.start()
    reboot = sim.schedule("Reboot")
    agent.wait_hook("drain", "start")
    preempt = sim.schedule("Preempt", notice_seconds=30, lasts_seconds=None)
    sim.wait_approved(preempt)
    # Each in the very cycle in which the agent received it.
    assert agent.commits(preempt)[:2] == [
        ["seen", "decided", "preparing", "hook_started"],
        ["hook_finished", "prepared", "approving"],
    ]
    assert agent.ran() == ["drain", "save"]
    assert agent.pending()[reboot]["phase"] == "preparing"


def test_a_restart_in_the_middle_of_an_event_goes_on_where_it_was(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[{"name": "three", "prepare": ["one", "two", "three"], "approve": "when-prepared"}],
        hooks={**agent.hooks("one", "three"), "two": agent.hook("two", until="go-on")},
    )
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    first = agent.wait_hook("two", "start")
    agent.kill()
    agent.start()
    second = agent.wait_hook("two", "start", count=2)
    assert first["given"] == {**second["given"], "SECONDS_LEFT": first["given"]["SECONDS_LEFT"]}
    agent.let_go("go-on")
    sim.wait_approved(event)
    assert agent.ran() == ["one", "two", "two", "three"]
    assert first["pid"] not in [note["pid"] for note in agent.records("end")]
    assert "(the same boot)" in agent.wait_log("restarted", event_id=event)["reason"]


def test_a_truncated_state_file_is_quarantined_and_blocks_approvals(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", until="drained")}
    )
    agent.start()
    event = sim.schedule("Reboot")
    agent.wait_hook("drain", "start")
    agent.kill()
    truncate_state(agent)
    agent.start()
    agent.let_go("drained")
    agent.wait_log("held", event_id=event)
    waits_for = agent.pending()[event]["waits_for"]
    assert waits_for["kind"] == "operator"
    assert waits_for["text"] == "the state file was lost, and what was done before is not known"
    assert ("state_lost",) in agent.journal("kind")
    (alarm,) = (line for line in agent.lines if "quarantined_path" in line)
    assert alarm["level"] == "error"
    assert Path(alarm["quarantined_path"]).stat().st_size > 0
    agent.kill()
    agent.start()  # once more: an event that is not approved for that reason stays so
    wait_some_polls(sim)
    assert posts(sim) == []
    sim.cancel(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran()[-1] == "resume"
    later = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_approved(later)


def test_after_a_lost_state_file_on_clear_undoes_forgotten_preparations(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"), on_clear=["resume"])
    agent.start()
    assert agent.wait_hook("resume")["hook"] == "resume"  # nothing was pending at the first start either
    event = sim.schedule("Reboot")
    agent.wait_log("prepared", event_id=event)
    agent.kill()
    truncate_state(agent)
    sim.cancel(event)
    agent.start()
    agent.wait_hook("resume", count=2)
    assert agent.ran() == ["resume", "drain", "resume"]


def truncate_state(agent: Agent) -> None:
    """Leave the first half of the state file."""
    path = agent.state_dir / "state.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)


def test_a_canceled_event_is_recovered_from(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Redeploy")
    agent.wait_log("prepared", event_id=event)
    assert not agent.is_ready()
    sim.cancel(event)
    closed = agent.wait_log("closed", event_id=event)
    assert closed["reason"] == "is over: canceled"
    assert agent.ran() == ["drain", "resume"]
    assert agent.records("start")[-1]["given"]["OUTCOME"] == "canceled"
    assert agent.is_ready()


def test_a_freeze_that_was_not_approved_is_recovered_from_when_it_is_over(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[{**DRAIN, "approve": "never", "lead": "20m"}], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Freeze", lasts_seconds=None)
    agent.wait_hook("drain")
    sim.start_event(event)
    agent.wait_log("started", event_id=event)
    wait_some_polls(sim)
    assert agent.ran() == ["drain"]
    sim.end(event)
    closed = agent.wait_log("closed", event_id=event)
    assert closed["reason"] == "is over: completed"
    assert agent.ran() == ["drain", "resume"]
    assert posts(sim) == []


def test_a_hook_shared_by_two_events_is_recovered_after_the_last(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    first, second = sim.schedule("Reboot"), sim.schedule("Redeploy")
    agent.wait_log("prepared", event_id=first)
    agent.wait_log("prepared", event_id=second)
    sim.cancel(first)
    agent.wait_log("waiting", event_id=first, reason=f"event {second} still needs it prepared")
    wait_some_polls(sim)
    assert "resume" not in agent.ran()
    assert not agent.is_ready()
    sim.cancel(second)
    agent.wait_log("closed", event_id=first)
    agent.wait_log("closed", event_id=second)
    assert agent.ran().count("resume") == 1
    assert agent.is_ready()


def test_with_observe_neither_hooks_nor_approvals_happen(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[{**AT_ONCE, "when": {"source": "User"}}, DRAIN],
        hooks=agent.hooks("drain", "resume"),
        on_clear=["resume"],
    )
    agent.start("--observe")
    user, platform = sim.schedule("Reboot", source="User"), sim.schedule("Redeploy")
    assert agent.wait_log("decided", event_id=user)["rule"] == "at-once"
    assert agent.wait_log("decided", event_id=platform)["rule"] == "drain"
    wait_some_polls(sim)
    sim.start_event(platform)
    agent.wait_log("started", event_id=platform)
    sim.end(platform)
    agent.wait_log("closed", event_id=platform)
    refused = agent.say("approve", user)
    assert refused.returncode == 1
    assert "only observes" in refused.stdout
    assert agent.ran() == []
    assert posts(sim) == []
    assert agent.is_ready()
    assert agent.metric("acting") == 0


# --- What it shows


def test_the_environment_of_a_hook_is_shown_nowhere(sim: Simulator, agent: Agent) -> None:
    secret = "correct-horse-battery-staple"
    agent.write_policy(
        rules=[DRAIN],
        hooks={**agent.hooks("resume"), "drain": agent.hook("drain", env={"PASSWORD": secret})},
        agent={"log": {"level": "debug"}},
    )
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=0.5)
    agent.wait_log("prepared", event_id=event)
    pages = [agent.get(page)[1] for page in ("/status", "/metrics", "/readyz", "/healthz")]
    agent.wait_log("closed", event_id=event)
    everything = "".join([*agent.history, *pages, *(" ".join(row) for row in agent.journal("text", "detail"))])
    assert "drain" in everything
    assert secret not in everything


def test_labels_are_closed_sets_and_only_pending_events_have_ids(
    make_agent: MakeAgent,
) -> None:
    odd = {
        "EventId": "the-id",
        "EventStatus": "Scheduled",
        "EventType": "Meteorite",
        "EventSource": "Sky",
        "Resources": ["vm-1", "vm-other"],
        "Description": "boom",
    }
    known = {**odd, "EventType": "Reboot", "EventId": "the-other-id", "EventSource": "Platform"}
    with Endpoint() as endpoint:
        agent = make_agent(endpoint.url)
        agent.write_policy(rules=[{**DRAIN, "shared": "any"}], hooks=agent.hooks("drain", "resume"))
        agent.start()
        endpoint.body = document(odd, known)
        agent.wait_log("approved")
        assert {labels["event_id"] for labels in pending_labels(agent)} == {"the-id", "the-other-id"}
        check_labels(agent)
        endpoint.body = document()
        agent.wait_log("closed", count=2)
        assert pending_labels(agent) == []
        check_labels(agent)
        agent.wait_metric(1, "events_total", type="other", source="unknown", affects="shared")
        agent.wait_metric(1, "closed_total", type="Reboot")


def pending_labels(agent: Agent) -> list[dict[str, str]]:
    return [labels for labels, _ in agent.metrics().get("pending_not_before_timestamp_seconds", [])]


def check_labels(agent: Agent) -> None:
    for name, series in agent.metrics().items():
        if name != "pending_not_before_timestamp_seconds":
            words = {word for labels, _ in series for word in labels.values()}
            assert words.isdisjoint({"the-id", "the-other-id", "Meteorite", "Sky", "vm-1", "vm-other", "boom"}), (
                name
            )


@needs_posix
def test_a_pause_of_the_machine_is_in_log_metric_and_journal(agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    began = time.monotonic()
    agent.freeze()
    frozen_at = time.monotonic()
    assert agent.get("/healthz", timeout=1.0)[0] == 0  # no thread answers ok for a loop that hangs
    assert agent.get("/healthz", timeout=1.0)[0] == 0
    lasted = time.monotonic() - frozen_at
    agent.thaw()
    measured = agent.wait_log("this machine was paused")
    told_after = time.monotonic() - began
    assert measured["level"] == "warning"
    assert lasted - 0.5 < measured["seconds"] < told_after + 0.1
    assert agent.metric("pause_seconds_count") == 1
    assert agent.metric("last_pause_seconds") == pytest.approx(measured["seconds"], abs=0.1)
    agent.wait_until(
        lambda: ("machine_paused", f"was paused for {measured['seconds']}s") in agent.journal("kind", "text"), ""
    )
    agent.wait_until(lambda: agent.get("/healthz")[0] == 200, "it was healthy again")


@pytest.mark.nightly  # as long as a writer waits for another; tests/integration/test_state_locked.py is shorter
def test_an_unwritable_state_file_delays_every_action(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[AT_ONCE])
    agent.start()
    with contextlib.closing(sqlite3.connect(agent.state_dir / "state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        event = sim.schedule("Reboot", lasts_seconds=None)
        failed = agent.wait_log("writing the state file fails")
        assert failed["kind"] == "locked"
        assert posts(sim) == []
        assert agent.metric("store_errors_total", kind="locked") >= 1
        assert agent.get("/healthz")[0] == 503
        other.execute("ROLLBACK")
    sim.wait_approved(event)
    assert agent.wait_log("writing the state file works again")["failures"] >= 1
    agent.wait_until(lambda: agent.get("/healthz")[0] == 200, "it was healthy again")


@pytest.mark.parametrize("path", ["/", "/status", "/drain", "/metrics"])
def test_no_request_to_the_web_server_changes_anything(path: str, sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot")
    agent.wait_log("prepared", event_id=event)
    before = json.dumps(agent.pending())
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert agent.get(path, method)[0] in (405, 501), method
    wait_some_polls(sim)
    assert json.dumps(agent.pending()) == before
    assert agent.ran() == ["drain"]
    assert posts(sim) == []
