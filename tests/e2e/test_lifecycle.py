"""The agent's main stories from beginning to end, as an operator would tell them."""

import sys
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest
from harness import Agent, MakeAgent, Simulator, approved_ids

from scheduled_events_agent.simulator import VirtualMachine

DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
BY_HAND = {**DRAIN, "name": "by-hand", "approve": "manual", "lead": "30d"}
USER = {"name": "user-initiated", "when": {"source": "User"}, "approve": "immediately"}

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGHUP or a SIGTERM that can be caught")


# --- The life of an event


def test_a_restart_that_a_user_asked_for_is_approved_at_once(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[USER, DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", source="User", lasts_seconds=None)
    sim.wait_approved(event)
    # In the very cycle in which the agent received it.
    assert agent.commits(event)[0] == ["seen", "decided", "prepared", "approving"]
    agent.wait_log("started", event_id=event)
    sim.end(event)
    closed = agent.wait_log("closed", event_id=event)
    assert (closed["rule"], closed["reason"]) == ("user-initiated", "is over: completed")
    assert agent.ran() == []
    assert agent.is_ready()


def test_a_platform_reboot_is_drained_approved_started_and_recovered_once(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[USER, {**DRAIN, "prepare": ["drain", "save"], "on_start": ["note"]}],
        hooks=agent.hooks("drain", "save", "resume", "note"),
    )
    agent.start()
    event = sim.schedule("Reboot", duration_seconds=30, lasts_seconds=None, start_delay_seconds=0.2)
    agent.wait_log("hook finished", event_id=event, hook="note")
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.is_ready()

    starts = agent.records("start")
    assert [note["hook"] for note in starts] == ["drain", "save", "note", "resume"]
    assert len(agent.records("end")) == 4
    happened = sim.event(event)
    first, last = starts[0]["given"], starts[-1]["given"]
    assert 800 <= int(first.pop("SECONDS_LEFT")) <= 901  # of 900, on a machine with far too much to do
    assert first == {
        "ID": event,
        "TYPE": "Reboot",
        "STATUS": "Scheduled",
        "SOURCE": "Platform",
        "NOT_BEFORE": f"{happened.not_before_at:%Y-%m-%dT%H:%M:%SZ}",
        "DURATION_SECONDS": "30",
        "DESCRIPTION": "Host server is undergoing maintenance.",
        "RESOURCES": "vm-1",
        "STAGE": "prepare",
        "RULE": "drain",
        "VM": "vm-1",
        "OUTCOME": "",
        "TIMEOUT_SECONDS": "300",
    }
    assert [note["given"]["STAGE"] for note in starts] == ["prepare", "prepare", "on_start", "recover"]
    assert (last["STATUS"], last["OUTCOME"], last["NOT_BEFORE"]) == ("Started", "completed", "")
    assert starts[0]["event"]["EventId"] == event
    assert starts[0]["event"]["DurationInSeconds"] == 30
    assert agent.log("hook output", hook="drain", line="drain works")

    assert approved_ids(sim.requests()) == [event]
    saved = next(note for note in agent.records("end") if note["hook"] == "save")
    assert sim.approvals(event)[0].monotonic >= saved["monotonic"]  # the clock of Windows is a coarse one
    assert [kind for (kind,) in agent.journal("kind")] == [
        "agent_started",
        *("seen", "decided", "preparing", "hook_started", "hook_finished", "hook_started", "hook_finished"),
        *("prepared", "approving", "approved", "changed", "started", "hook_started", "hook_finished"),
        *("missing", "gone", "recovering", "hook_started", "hook_finished", "closed"),
    ]


def test_before_a_spot_eviction_the_work_is_saved_and_then_it_is_approved(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[{"name": "spot", "when": {"type": "Preempt"}, "prepare": ["save"], "approve": "when-prepared"}],
        hooks={"save": agent.hook("save", seconds=0.3, timeout="20s")},
    )
    agent.start()
    event = sim.schedule("Preempt", notice_seconds=30, start_delay_seconds=0.2, lasts_seconds=None)
    sim.wait_approved(event)
    assert sim.approvals(event)[0].monotonic >= agent.wait_hook("save")["monotonic"]
    assert 10 <= int(agent.records("start")[0]["given"]["SECONDS_LEFT"]) <= 31
    agent.wait_log("started", event_id=event)


def test_a_drain_that_is_not_done_in_time_ends_before_the_event_begins(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[DRAIN],
        hooks={**agent.hooks("resume"), "drain": agent.hook("drain", until="never")},
        agent={"reserve": "16s"},
    )
    agent.start()
    event = sim.schedule("Preempt", notice_seconds=20, lasts_seconds=0.5)
    held = agent.wait_log("held", event_id=event)
    # Without the reserve, it would end when a tenth of the notice is left.
    assert datetime.now(UTC) <= sim.event(event).not_before_at - timedelta(seconds=3)
    assert "no time was left" in held["reason"]
    sim.start_event(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]


def test_an_event_first_seen_started_runs_only_its_start_hooks(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[{**DRAIN, "on_start": ["alert"]}], hooks=agent.hooks("drain", "resume", "alert"))
    agent.start()
    event = sim.schedule("Redeploy", begins_started=True, lasts_seconds=None)
    started = agent.wait_log("started", event_id=event)
    assert started["reason"] == "has started (not approved by us, waiting)"
    agent.wait_hook("alert")
    sim.end(event)
    closed = agent.wait_log("closed", event_id=event)
    assert closed["reason"] == "is over: completed"
    assert agent.ran() == ["alert"]
    assert approved_ids(sim.requests()) == []


def test_an_event_that_starts_while_the_drain_runs_ends_the_drain(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", until="never")})
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    sim.start_event(event)
    agent.wait_log("started", event_id=event)
    agent.wait_log("hook canceled", event_id=event, count=2)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]
    assert [note["hook"] for note in agent.records("end")] == ["resume"]
    assert approved_ids(sim.requests()) == []


def test_an_event_that_goes_on_under_another_id_stays_the_same_event(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", new_id_at_start=True, lasts_seconds=None)
    renamed = agent.wait_log("renamed")
    assert renamed["reason"] == f"goes on under the id {sim.event(event).id} (was {event})"
    sim.end(event)
    agent.wait_log("closed", event_id=sim.event(event).id)
    assert agent.ran() == ["drain", "resume"]


def test_an_unseen_start_ends_in_recovery(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Freeze", shows_started=False)
    closed = agent.wait_log("closed", event_id=event)
    assert closed["reason"] == "is over: unknown"
    assert agent.ran() == ["drain", "resume"]


def test_an_event_whose_reboot_took_the_agent_down_is_recovered_from_after_it(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None, start_delay_seconds=0.1)
    agent.wait_log("started", event_id=event)
    agent.kill()
    sim.end(event)
    agent.start()
    closed = agent.wait_log("closed", event_id=event)
    assert closed["reason"] == "is over: completed"
    assert agent.ran() == ["drain", "resume"]


def test_when_nothing_is_pending_at_the_start_on_clear_runs(agent: Agent) -> None:
    agent.write_policy(hooks=agent.hooks("uncordon", "greet"), on_clear=["uncordon", "greet"])
    agent.start()
    agent.wait_log("on_clear hook ended", hook="greet", outcome="succeeded")
    assert agent.ran() == ["uncordon", "greet"]
    assert agent.records("start")[0]["given"] == {"STAGE": "on_clear", "VM": "vm-1", "TIMEOUT_SECONDS": "300"}
    assert agent.records("start")[0]["event"] is None
    assert ("on_clear", "nothing is pending: uncordon, greet") in agent.journal("kind", "text")


def test_when_something_is_pending_at_the_start_on_clear_does_not_run(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume", "uncordon"), on_clear=["uncordon"])
    event = sim.schedule("Reboot")
    agent.start()
    agent.wait_log("prepared", event_id=event)
    sim.wait_polls(2)
    assert agent.ran() == ["drain"]


def test_readyz_answers_503_from_preparation_to_the_end_of_the_recovery(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[{**DRAIN, "drain_for": "1s"}],
        hooks={name: agent.hook(name, until=f"{name} is done") for name in ("drain", "resume")},
    )
    agent.start()
    assert agent.get("/readyz") == (200, "ready\n")
    event = sim.schedule("Reboot", lasts_seconds=None, start_delay_seconds=0.2)
    agent.wait_log("preparing", event_id=event)
    assert agent.get("/readyz") == (503, f"not ready: Reboot {event} is preparing\n")
    agent.wait_hook("drain", "start")
    (unready_at,) = agent.journal_times(kind="preparing")
    (drained_at,) = agent.journal_times(kind="hook_started", hook="drain")
    assert drained_at - unready_at >= timedelta(seconds=1)
    assert not agent.is_ready()
    agent.let_go("drain is done")
    agent.wait_log("started", event_id=event)
    assert agent.get("/readyz") == (503, f"not ready: Reboot {event} is started\n")
    sim.end(event)
    agent.wait_hook("resume", "start")
    assert agent.get("/readyz") == (503, f"not ready: Reboot {event} is recovering\n")
    assert agent.metric("ready") == 0
    agent.let_go("resume is done")
    agent.wait_log("closed", event_id=event)
    assert agent.get("/readyz") == (200, "ready\n")
    assert agent.metric("ready") == 1


# --- Operators


def test_an_operator_approves_an_event_that_waits_for_approval(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    said = agent.say("approve", event)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("approved: ")
    sim.wait_approved(event)
    assert agent.wait_log("operator", event_id=event)["reason"].startswith("approved by ")
    assert agent.wait_log("approving", event_id=event)["reason"] == "an operator approved it"


def test_an_operator_may_give_the_beginning_of_an_id(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    one = sim.schedule("Reboot", id_="AAAA1111-0000", lasts_seconds=None)
    two = sim.schedule("Freeze", id_="AAAA2222-0000", lasts_seconds=None)
    for event in (one, two):
        agent.wait_log("prepared", event_id=event)
    ambiguous = agent.say("approve", "aaaa")
    assert (ambiguous.returncode, ambiguous.stdout) == (1, "")
    assert ambiguous.stderr == (
        'scheduled-events-agent: "aaaa" matches 2 pending events; give more of the id:\n'
        "  AAAA1111-0000  Reboot  prepared\n"
        "  AAAA2222-0000  Freeze  prepared\n"
    )
    unknown = agent.say("approve", "bbbb")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith(
        'scheduled-events-agent: no pending event id begins with "bbbb"; pending are:\n  AAAA1111-0000  Reboot'
    )
    assert agent.say("approve", "aaaa2").returncode == 0
    sim.wait_approved(two)
    assert approved_ids(sim.requests()) == [two]


def test_without_a_running_agent_an_operator_action_is_withdrawn(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    agent.kill()
    said = agent.say("approve", event)
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == (
        "scheduled-events-agent: no agent runs with the state directory "
        f"{agent.state_dir}: start the agent first\n"
    )
    agent.start()
    sim.wait_polls(3)
    assert approved_ids(sim.requests()) == []


def test_an_operator_holds_an_event_and_releases_it(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", until="drained")}
    )
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    assert agent.say("hold", event).stdout.startswith("hold: set; ")
    agent.let_go("drained")
    held = agent.wait_log("held", event_id=event)
    assert held["reason"].partition("; Azure starts it at ")[0] == "held: an operator holds it"
    agent.kill()
    agent.start()  # a word once given outlasts the agent
    sim.wait_polls(3)
    assert approved_ids(sim.requests()) == []
    assert agent.say("release", event).stdout.startswith("released: ")
    sim.wait_approved(event)
    assert agent.ran() == ["drain"]


def test_an_operator_starts_an_event_days_ahead_now(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[{**DRAIN, "lead": "15m"}], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Redeploy", notice_seconds=5 * 86400, lasts_seconds=None)
    agent.wait_phase(event, "waiting")
    sim.wait_polls(2)
    assert agent.ran() == []
    assert agent.say("approve", event).returncode == 0
    sim.wait_approved(event)
    assert agent.ran() == ["drain"]


def test_an_approval_that_is_impossible_is_rejected_with_the_reason(sim: Simulator, agent: Agent) -> None:
    watch = {"name": "watch", "when": {"affects": "others"}}
    agent.write_policy(rules=[BY_HAND, watch], hooks=agent.hooks("drain", "resume"))
    agent.start()
    others = sim.schedule("Reboot", vms=["vm-2"])
    started = sim.schedule("Freeze", begins_started=True, lasts_seconds=None)
    agent.wait_log("started", event_id=started)
    for event, reason in (
        (others, "it does not name this VM"),
        (started, "its status is Started"),
    ):
        said = agent.say("approve", event)
        assert said.returncode == 1
        assert said.stdout.startswith("rejected: ")
        assert reason in said.stdout
    assert agent.ran() == []
    assert approved_ids(sim.requests()) == []


# --- The policy


@needs_posix
def test_a_valid_policy_takes_effect_at_once_for_pending_events(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.reload()
    assert agent.wait_log("the policy file was read again")["rules"] == ["drain"]
    sim.wait_approved(event)
    agent.wait_metric(1, "config_last_reload_successful")
    assert agent.ran() == ["drain"]
    policy_hash = sha256(agent.config.read_bytes()).hexdigest()
    assert agent.metrics()["policy_info"] == [({"hash": policy_hash}, 1.0)]
    assert agent.status()["policy"]["hash"] == policy_hash


@needs_posix
def test_an_invalid_policy_is_rejected_and_the_old_one_stays_active(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    agent.config.write_text("rules:\n  - name: bad\n    approve: yes\n    prepar: [drain]\n", encoding="utf-8")
    agent.reload()
    refused = agent.wait_log("the policy file is rejected; the old policy stays in force")
    assert refused["level"] == "error"
    places = [line.split(": ")[:2] for line in refused["reason"].splitlines()]
    assert places == [[f"{agent.config}:3", "rules[0].approve"], [f"{agent.config}:4", "rules[0]"]]
    assert agent.metric("config_last_reload_successful") == 0
    sim.wait_approved(sim.schedule("Reboot", lasts_seconds=None))
    assert agent.ran() == ["drain"]
    entry = ("reload_rejected", refused["reason"])
    agent.wait_until(lambda: entry in agent.journal("kind", "text"), "the refusal was in the journal")
    agent.write_policy(rules=[USER])
    agent.reload()
    agent.wait_log("the policy file was read again")
    agent.wait_metric(1, "config_last_reload_successful")


def test_a_policy_with_errors_ends_the_command_with_all_of_them(agent: Agent) -> None:
    agent.config.write_text(
        "agent:\n  mode: dry-run\nrules:\n  - name: one\n    lead: soon\n    prepar: [drain]\n", encoding="utf-8"
    )
    agent.start(is_awaited=False)
    assert agent.wait_exit() == 2
    told = agent.log("the agent cannot run", level="error", kind="config")
    assert [line["reason"].split(": ")[:2] for line in told] == [
        [f"{agent.config}:2", "agent.mode"],
        [f"{agent.config}:5", "rules[0].lead"],
        [f"{agent.config}:6", "rules[0]"],
    ]
    assert len(agent.history) == len(told) + 2  # and nothing that is no line of the log
    assert not (agent.state_dir / "state.db").exists()


def test_without_a_policy_file_of_that_name_the_command_says_so(agent: Agent) -> None:
    agent.start(is_awaited=False)
    assert agent.wait_exit() == 2
    (told,) = agent.log("the agent cannot run", level="error", kind="config")
    assert told["reason"].startswith(f"{agent.config}: there is no such file")


# --- Stopping and starting


@needs_posix
def test_a_stop_with_a_hung_hook_is_in_time_and_the_hook_runs_again(sim: Simulator, agent: Agent) -> None:
    drain = agent.hook("drain", until="drained", ignores_sigterm=True)
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": drain})
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    assert agent.stop() < 30.0  # the hook would never end; test_inbox.py has the exact limit
    (stopping,) = agent.log("stopping, once these hooks have ended: drain", level="info")
    assert stopping["timeout_seconds"] == 5.0
    assert agent.records("end") == []
    agent.start()
    agent.wait_hook("drain", "start", count=2)
    agent.let_go("drained")
    sim.wait_approved(event)
    assert [note["pid"] for note in agent.records("end")] == [agent.records("start")[1]["pid"]]


@needs_posix
def test_a_hook_that_ends_soon_after_the_stop_signal_still_counts(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", seconds=1.0)})
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    agent.stop()
    assert len(agent.records("end")) == 1
    assert approved_ids(sim.requests()) == []
    agent.start()
    sim.wait_approved(event)
    assert agent.ran() == ["drain"]


@needs_posix
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_idle_agent_stops_at_once(agent: Agent, *, is_interrupted: bool) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    if is_interrupted:
        agent.interrupt()
        assert agent.wait_exit() == 0
    else:
        agent.stop()
    assert agent.log("agent stopped")
    assert [kind for (kind,) in agent.journal("kind")] == ["agent_started", "agent_stopped"]


@pytest.mark.parametrize("is_over", [False, True])
def test_after_the_reboot_it_prepared_for_the_machine_is_recovered_once(
    sim: Simulator, agent: Agent, *, is_over: bool
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None, start_delay_seconds=0)
    sim.wait_approved(event)
    agent.wait_log("approved")
    agent.kill()
    agent.forget_boot()
    if is_over:
        sim.end(event)
    agent.start()
    assert "after a reboot" in agent.wait_log("restarted")["reason"]
    if not is_over:
        agent.wait_phase(event, "started")
        assert agent.ran() == ["drain"]
        sim.end(event)
    assert agent.wait_log("closed")["reason"] == "is over: completed"
    assert agent.ran() == ["drain", "resume"]
    agent.wait_until(agent.is_ready, "it was ready")
    assert len(sim.approvals(event)) == 1


def test_a_second_agent_on_a_state_directory_names_the_first_and_exits(
    agent: Agent, make_agent: MakeAgent
) -> None:
    second = make_agent(agent.endpoint, "second")
    second.state_dir = agent.state_dir
    for one in (agent, second):
        one.write_policy(rules=[USER])
    agent.start()
    second.start(is_awaited=False)
    assert second.wait_exit() == 1
    said = second.wait_log("the agent cannot run")["reason"]
    assert str(agent.process.pid) in said
    assert str(agent.state_dir / "lock") in said
    assert agent.get("/healthz")[0] == 200


def test_the_state_of_another_vm_is_not_acted_on(make_agent: MakeAgent) -> None:
    with Simulator(vms=(VirtualMachine(name="vm-1", vm_id="the-first"),), rate_limit=None) as first:
        agent = make_agent(first.endpoint())
        agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
        agent.start()
        event = first.schedule("Reboot")
        agent.wait_log("prepared", event_id=event)
        agent.kill()
    with Simulator(vms=(VirtualMachine(name="vm-2", vm_id="the-second"),), rate_limit=None) as second:
        agent.endpoint = second.endpoint()
        agent.write_policy(rules=[BY_HAND], hooks=agent.hooks("drain", "resume"))
        agent.start()
        text = "the state file is of VM the-first, and this VM is the-second: the agent ignores it"
        assert agent.wait_log(text)["level"] == "warning"
        second.wait_polls(3)
        assert agent.ran() == ["drain"]
        assert agent.pending() == {}
        assert agent.is_ready()
        assert ("closed", text) in agent.journal("kind", "text")
        own = second.schedule("Reboot")
        agent.wait_log("prepared", event_id=own)
