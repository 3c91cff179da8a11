"""Commands of an operator: status, explain, history, approve, hold and release against a real agent."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from harness import CHECKOUT, PATIENCE, Agent, Endpoint, Simulator, document

from scheduled_events_agent import host
from scheduled_events_agent.status import OperatorResult
from scheduled_events_agent.store import Store
from scheduled_events_agent.workflow import OperatorAction

DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
BY_HAND = {"name": "by-hand", "approve": "manual"}
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"
# As root in a directory that only root can pass through, so that everything is loaded before.
AS_NOBODY = """\
import os, sys
import difflib, pwd, yaml
from scheduled_events_agent import cli, host, status, store
from scheduled_events_agent.cli import check, config
cli.build_parser()
os.setgroups([]), os.setgid(65534), os.setuid(65534)
sys.exit(cli.main(sys.argv[1:]))
"""

needs_root = pytest.mark.skipif(
    sys.platform == "win32" or host.account_name() != "root", reason="only root can become nobody"
)
needs_terminal = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals as POSIX has them")


def ask(agent: Agent, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return agent.run(*arguments, "--state-dir", str(agent.state_dir), "--config", str(agent.config))


def in_terminal(agent: Agent, *arguments: str, columns: int) -> tuple[int, str]:
    """Exit code and output of a command in a window of this width."""
    if sys.platform == "win32":
        raise NotImplementedError
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    process = subprocess.Popen(
        agent.command(*arguments, "--state-dir", str(agent.state_dir), "--config", str(agent.config)),
        cwd=CHECKOUT,
        env={**environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - nothing else runs in the child
    )
    os.close(theirs)
    output = b""
    try:
        while True:
            output += os.read(ours, 65536)
    except OSError:  # it has ended
        return process.wait(PATIENCE), output.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        process.kill()
        process.wait()


@pytest.fixture
def endpoint_agent(make_agent: Callable[..., Agent]) -> Any:
    """An endpoint of which every byte is ours, and its agent."""
    with Endpoint() as endpoint:
        yield endpoint, make_agent(endpoint.url)


def test_many_readers_of_the_state_file_lose_nothing(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    events = []
    for _ in range(3):
        assert agent.get("/")[0] == 200
        assert ask(agent, "status").stdout.startswith("Nothing is pending\n")
        events.append(sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=0.3))
        sim.wait_gone(events[-1])
        agent.wait_until(lambda: not agent.pending(), "it was over")
        assert ("closed", events[-1]) in agent.journal("kind", "event_id")
    agent.kill()
    agent.start()
    histories = json.loads(ask(agent, "history", "--json").stdout)["histories"]
    lives = [one["event"] for one in histories if one["event"]]
    assert {life["id"]: life["phase"] for life in lives} == dict.fromkeys(events, "closed")


def test_an_operator_action_takes_effect_within_two_seconds_with_the_name(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND])
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    store = Store.open_client(agent.state_dir)
    (workflow,) = store.load_workflows()
    seconds = []
    try:
        actions: tuple[OperatorAction, ...] = ("hold", "release")
        for count, action in enumerate(actions * 3, start=1):
            asked_at = datetime.now(UTC)
            request = store.add_request(workflow.id, action, "kim", asked_at)
            agent.wait_until(partial(store.load_answer, request), "the agent had answered")
            times = agent.journal_times(kind="operator")
            assert len(times) == count
            seconds.append((times[-1] - asked_at).total_seconds())
    finally:
        store.close()
    # By the journal's own stamps. A machine under load may be late once, and is not each time.
    assert sorted(seconds)[2] < 2.0, f"from the request to the journal: {seconds}"
    assert agent.say("approve", event[:8].lower()).returncode == 0
    said = agent.journal("kind", "text")
    assert ("operator", "held by kim") in said
    assert ("operator", "released by kim") in said
    spoken = [text for kind, text in said if kind == "operator"][-1]
    assert re.fullmatch(rf"approved by {re.escape(host.account_name())}( \(sudo: .+\))?", spoken)
    sim.wait_approved(event)


def test_a_failed_recovery_keeps_the_vm_out_of_service_until_solved(sim: Simulator, agent: Agent) -> None:
    def told(word: str, event: str) -> tuple[bool, str]:
        said = ask(agent, word, event, "--json")
        answer = msgspec.json.decode(said.stdout, type=OperatorResult)
        assert (said.returncode, answer.command, answer.event_id) == (0, word, event)
        return answer.succeeded, answer.message

    agent.write_policy(
        rules=[DRAIN | {"approve": "manual"}],
        hooks={**agent.hooks("drain"), "resume": agent.hook("resume", exit_code=3)},
    )
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_phase(event, "waiting")
    assert told("hold", event)[0]
    assert told("release", event)[0]
    assert told("approve", event)[0]
    agent.wait_phase(event, "started")
    sim.end(event)
    agent.wait_phase(event, "recovery_failed")
    assert agent.get("/readyz")[0] == 503
    assert told("retry", event)[0]
    agent.wait_until(lambda: agent.ran().count("resume") == 2, "it was tried again")
    agent.wait_phase(event, "recovery_failed")
    assert agent.get("/readyz")[0] == 503
    assert told("resolve", event)[0]
    agent.wait_until(lambda: agent.get("/readyz")[0] == 200, "it was ready")
    assert event not in agent.pending()


def test_an_event_that_azure_has_accepted_is_not_reported_as_held(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND])
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None, starts_when_approved=False)
    agent.wait_log("prepared", event_id=event)
    said = ask(agent, "approve", event, "--json")
    told = msgspec.json.decode(said.stdout, type=OperatorResult)
    assert (said.returncode, told.succeeded, told.command, told.event_id) == (0, True, "approve", event)
    assert told.message.startswith("approved: ")
    assert told.key == agent.pending()[event]["key"]
    agent.wait_phase(event, "approved")
    said = ask(agent, "hold", event, "--json")
    told = msgspec.json.decode(said.stdout, type=OperatorResult)
    assert (said.returncode, told.succeeded, told.message[:9]) == (1, False, "rejected:")
    said = ask(agent, "hold", "no-such-id", "--json")
    told = msgspec.json.decode(said.stdout, type=OperatorResult)
    assert (said.returncode, told.succeeded, told.event_id) == (1, False, "")
    assert told.message.startswith('no pending event id begins with "no-such-id"')
    said = agent.say("hold", event)
    assert said.returncode == 1
    assert "cannot be withdrawn" in said.stdout
    sim.start_event(event)
    agent.wait_phase(event, "started")
    assert agent.say("hold", event).stdout == "rejected: the event has started\n"
    assert agent.journal_times(kind="operator", text=f"held by {host.account_name()}") == []


def test_a_hold_of_an_event_that_has_vanished_can_be_released(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[{**BY_HAND, "lead": "1h"}])
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
    agent.wait_log("prepared", event_id=event)
    assert ask(agent, "hold", event).returncode == 0
    sim.cancel(event)
    agent.wait_log("closed", event_id=event)
    (held,) = agent.status()["holds"]
    assert (held["event_id"], held["user"]) == (event.casefold(), host.account_name())
    assert (
        f"held       {event.casefold()}, by {host.account_name()}; not in the document"
        in ask(agent, "status").stdout
    )
    told = ask(agent, "approve", event)
    assert told.returncode == 1
    assert told.stderr.endswith("; an operator's hold of it is remembered, release ends that\n")
    done = ask(agent, "release", event[:8])
    assert (done.returncode, done.stdout) == (0, "released; the event is not in the document\n")
    assert agent.status()["holds"] == []


def schedule_for_slow_approval(sim: Simulator, agent: Agent, approve: str, *, is_taken: bool) -> str:
    """Start the agent with an event whose approval Azure takes after 2 s, or never answers. Returns its id."""
    agent.write_policy(imds={"request_timeout": "3s"}, rules=[{"name": "all", "approve": approve}])
    if is_taken:
        sim.fault(None, "slow", on="approve", delay_seconds=2)
    else:
        sim.fault(None, "stall", on="approve", count=1)
    agent.start()
    return sim.schedule("Reboot", source="User", start_delay_seconds=600, lasts_seconds=None)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_hold_during_an_approval_is_answered_after_the_approval(
    sim: Simulator, agent: Agent, *, is_taken: bool
) -> None:
    event = schedule_for_slow_approval(sim, agent, "immediately", is_taken=is_taken)
    agent.wait_log("approving", event_id=event)
    done = ask(agent, "hold", event)
    if is_taken:
        assert (done.returncode, done.stdout) == (1, "rejected: Azure has accepted the approval\n")
        assert agent.pending()[event]["operator"]["action"] == ""
        assert agent.pending()[event]["phase"] == "approved"
    else:
        assert (done.returncode, done.stdout) == (0, "hold: set; the event is held\n")
        sim.wait_polls(8)
        assert sim.approvals(event) == ()
        assert agent.pending()[event]["phase"] == "held"


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_release_of_an_approval_under_way_says_what_became_of_it(
    sim: Simulator, agent: Agent, *, is_taken: bool
) -> None:
    event = schedule_for_slow_approval(sim, agent, "manual", is_taken=is_taken)
    agent.wait_phase(event, "prepared")
    assert ask(agent, "approve", event).returncode == 0
    done = ask(agent, "release", event)
    if is_taken:
        assert (done.returncode, done.stdout) == (1, "rejected: Azure has accepted the approval\n")
        found = agent.pending()[event]
        assert (found["phase"], found["operator"]["action"]) == ("approved", "approve")
    else:
        assert (done.returncode, done.stdout.partition(":")[0]) == (0, "released")
        sim.wait_polls(8)
        assert sim.approvals(event) == ()
        assert agent.pending()[event]["operator"]["action"] == ""


def test_status_shows_the_running_hook_and_a_command_that_works(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", until="drained")}
    )
    agent.start()
    idle = ask(agent, "status")
    assert (idle.returncode, idle.stdout.splitlines()[0]) == (0, "Nothing is pending")
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    busy = ask(agent, "status")
    assert busy.returncode == 0
    assert busy.stdout.splitlines()[0] == "Preparing for a Reboot"
    assert re.search(r"^  now +runs the prepare hook drain, \d+s of at most \d+m$", busy.stdout, re.MULTILINE)
    command = re.findall(r"^  overrule +scheduled-events-agent (.*)$", busy.stdout, re.MULTILINE)
    place = f"--state-dir {agent.state_dir}"
    assert command == [f"hold {event[:8]} {place}"]
    (shown,) = agent.status()["events"]
    assert [one["command"] for one in shown["commands"]] == [
        f"scheduled-events-agent hold {event[:8]} --state-dir {agent.state_dir}"
    ]
    assert agent.run(*command[0].split()).returncode == 0
    agent.let_go("drained")
    agent.wait_phase(event, "held")
    held = ask(agent, "status").stdout
    assert held.splitlines()[0] == "Reboot is held: an operator holds it"
    assert re.search(r"^  now       held: an operator holds it; Azure starts it at .* UTC$", held, re.MULTILINE)
    assert re.search(r"^  operator  held by \S+ since [-\d: ]+ UTC$", held, re.MULTILINE)
    assert f"  overrule  scheduled-events-agent release {event[:8]} {place}\n" in held
    in_json = json.loads(ask(agent, "status", "--json").stdout)["events"]
    assert without_remainders(in_json) == without_remainders([*agent.pending().values()])
    agent.kill()
    dead = ask(agent, "status")
    assert dead.returncode == 1
    assert dead.stdout.startswith("ACT  No agent runs. ")
    assert "did not say that it stopped" in dead.stdout


def without_remainders(events: list[dict[str, Any]]) -> str:
    """The events without the time that is left, which is less a moment later."""
    return re.sub(r" \(in [0-9dhms ]+\)", "", json.dumps(events))


REJECTED: dict[str, dict[str, Any]] = {
    "unknown key": {"rulez": []},
    "bad value": {"imds": {"poll_interval": "often"}},
    "missing hook": {"hooks": {}},
}


def test_a_rejected_policy_file_changes_the_exit_code_of_no_command(sim: Simulator, agent: Agent) -> None:
    good: dict[str, Any] = {
        "rules": [{**DRAIN, "approve": "manual"}],
        "hooks": agent.hooks("drain", "resume"),
        "agent": {"state_dir": str(agent.state_dir)},
    }
    agent.write_policy(**good)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_phase(event, "waiting")
    words = ("hold", "release", "retry", "resolve")
    commands = [["status"], ["status", "--json"], ["history"], *([word, event] for word in words)]

    def codes() -> list[int]:
        return [agent.run(*command, "--config", str(agent.config)).returncode for command in commands]

    expected = codes()
    assert expected[:2] == [3, 3]
    assert set(expected[2:]) == {0, 1}
    for name, fault in REJECTED.items():
        agent.write_policy(**{**good, **fault})
        assert codes() == expected, name
        assert agent.run("check", "--config", str(agent.config)).returncode == 2, name
    approved = agent.run("approve", event, "--config", str(agent.config))
    assert (approved.returncode, approved.stderr.count("\n")) == (0, 1)
    assert approved.stderr.startswith(f"{agent.config} is rejected: ")


def test_an_observing_agent_shows_everywhere_its_planned_actions(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start("--observe")
    event = sim.schedule("Reboot", lasts_seconds=None)
    told = agent.wait_log("waiting", event_id=event)["reason"]
    assert told.startswith("the agent only observes; it would now run drain, then approve it, ")
    for shown in (ask(agent, "status").stdout, agent.get("/status")[1], ask(agent, "history").stdout):
        assert told in shown
        assert f"scheduled-events-agent hold {event[:8]}" not in shown
    assert agent.ran() == []


def test_hook_output_is_limited_to_the_command_line_unless_the_policy_allows_it(
    sim: Simulator, agent: Agent
) -> None:
    rules, hooks = [{**DRAIN, "recover": []}], {"drain": {"shell": "echo db-password: hunter2"}}
    agent.write_policy(rules=rules, hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None, starts_when_approved=False)
    agent.wait_phase(event, "approved")
    for page in ("/", "/status", "/history", "/metrics", "/readyz", "/healthz"):
        assert "hunter2" not in agent.get(page)[1], page
    assert "hunter2" not in ask(agent, "status", "--json").stdout
    assert "| db-password: hunter2" in ask(agent, "history").stdout
    agent.kill()
    agent.write_policy(rules=rules, hooks=hooks, agent={"show_hook_output": True})
    agent.start()
    agent.wait_phase(event, "approved")
    assert "db-password: hunter2" in agent.get("/history")[1]
    (hook,) = agent.pending()[event]["hooks"]
    assert (hook["hook"], hook["state"], hook["output"].strip()) == ("drain", "done", "db-password: hunter2")


def test_explain_shows_the_agents_plan_for_each_event_of_the_document(
    endpoint_agent: tuple[Endpoint, Agent],
) -> None:
    endpoint, agent = endpoint_agent
    agent.write_policy(rules=[{**BY_HAND, "shared": "any"}])
    agent.start()
    not_before = datetime.now(UTC) + timedelta(hours=2, minutes=30)
    endpoint.body = document(
        {
            "EventId": "AAAA1111-0000",
            "EventStatus": "Scheduled",
            "EventType": "Freeze",
            "Resources": [*(f"vm-{number}" for number in range(100, 1, -1)), "VM-1"],
            "NotBefore": f"{not_before:%a, %d %b %Y %H:%M:%S GMT}",
            "EventSource": "Platform",
            "DurationInSeconds": 9,
            "Description": "Host server is undergoing maintenance.",
        },
        {"EventId": "BBBB2222-0000", "EventStatus": "Started", "EventType": "Reboot", "Resources": ["vm-2"]},
        incarnation=7,
    )
    agent.wait_log("waiting", event_id="AAAA1111-0000")
    polls = endpoint.polls
    shown = ask(agent, "explain")
    assert (shown.returncode, shown.stderr) == (0, "")
    text = re.sub(r"(Time: |first seen |not before )[-\d :]+ UTC", r"\1THEN", shown.stdout)
    assert re.sub(r"2h \d+m", "2h 30m", text) == (
        "This VM: vm-1. Time: THEN. Document: 7.\n"
        "\n"
        "Freeze AAAA1111-0000: not before THEN (in 2h 30m)\n"
        '  event    Scheduled, from Platform, for about 9s, "Host server is undergoing maintenance."\n'
        "  names    this VM and 99 others: vm-100, vm-99, vm-98, vm-97, vm-96, vm-95, vm-94, vm-93 and 92 more\n"
        "  rule     rule by-hand matches it: affects shared\n"
        "  agent    waits: an operator must approve it; first seen THEN\n"
        "  approve  when an operator approves it: scheduled-events-agent approve AAAA1111-0000 "
        f"--state-dir {agent.state_dir}\n"
        "\n"
        "Reboot BBBB2222-0000: has started\n"
        "  event    Started, for an unknown time\n"
        "  names    not this VM: vm-2\n"
        "  rule     not by-hand: it affects others, not self\n"
        "           it does not name this VM and no rule matches it: observe\n"
        "  agent    only counts it: it names other VMs only\n"
        "  approve  not approved: only a scheduled event can be approved, and its status is Started\n"
    )
    assert endpoint.polls > polls
    told = json.loads(ask(agent, "explain", "--json").stdout)
    assert (told["source"], told["incarnation"], told["vm"]["names"]) == ("endpoint", "7", ["vm-1"])
    assert datetime.fromisoformat(told["received_at"]) > not_before - timedelta(hours=2, minutes=30)
    ours, others = told["events"]
    assert (ours["rule"], ours["waits_for"]["kind"], ours["waits_for"]["text"]) == (
        "by-hand",
        "operator",
        "an operator must approve it",
    )
    assert (others["affects"], others["key"]) == ("others", "")


def test_explain_agrees_with_the_agent_that_saw_the_event_earlier(endpoint_agent: tuple[Endpoint, Agent]) -> None:
    endpoint, agent = endpoint_agent
    rules = [{"name": "short-notice", "when": {"notice_below": "6m"}}, DRAIN]
    agent.write_policy(rules=rules, hooks={"drain": agent.hook("drain", until="go"), **agent.hooks("resume")})
    agent.start()
    not_before = datetime.now(UTC) + timedelta(minutes=6, seconds=4)
    endpoint.body = document(
        {
            "EventId": "A",
            "EventStatus": "Scheduled",
            "EventType": "Reboot",
            "Resources": ["vm-1"],
            "NotBefore": f"{not_before:%a, %d %b %Y %H:%M:%S GMT}",
        }
    )
    agent.wait_phase("A", "preparing")
    agent.wait_until(lambda: datetime.now(UTC) > not_before - timedelta(minutes=6), "its notice was short")
    shown = ask(agent, "explain").stdout
    assert "  rule     not short-notice: notice was 6m" in shown
    assert "           rule drain matches it: affects self\n" in shown
    assert re.search(r"  agent +runs the prepare hook drain, \d+s of at most [^;]+; first seen ", shown)
    assert re.search(r"  prepare  run drain, until [-\d: ]+ UTC at the latest\n", shown)
    assert "  approve  as soon as hook drain has succeeded; a failed hook holds it\n" in shown
    assert "  begins " not in shown
    rehearsed = ask(agent, "explain", "--vm", "vm-1").stdout
    assert rehearsed.startswith("rehearsal: no agent was asked\n")
    assert "rule short-notice matches it" in rehearsed
    assert "  agent" not in rehearsed
    assert agent.say("hold", "A").returncode == 0
    agent.let_go("go")
    agent.wait_phase("A", "held")
    shown = ask(agent, "explain").stdout
    assert re.search(r"; held by \S+ since [-\d: ]+ UTC; first seen ", shown)
    assert "  approve  not approved: an operator holds it\n" in shown
    assert "  prepare " not in shown


def test_explain_goes_on_from_where_the_agent_is(sim: Simulator, agent: Agent) -> None:
    hooks = agent.hooks("drain", "resume")
    agent.write_policy(rules=[{**DRAIN, "drain_for": "30m"}], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=7200, lasts_seconds=None, starts_when_approved=False)
    agent.wait_phase(event, "preparing")
    shown = ask(agent, "explain").stdout
    assert re.search(r"  agent +drains for (29|30)m.* more \(/readyz answers 503\); first seen ", shown)
    assert re.search(r"  prepare  run drain, until .* UTC at the latest\n  approve  as soon as hook drain", shown)
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    shown = ask(agent, "explain").stdout
    assert "The agent has another policy in force than this file says now: what it has decided counts.\n" in shown
    assert "  approve  as soon as hook drain has succeeded, at " in shown
    agent.kill()
    agent.state_dir = agent.state_dir.with_name("fresh")
    agent.start()
    agent.wait_phase(event, "approved")
    shown = ask(agent, "explain").stdout
    assert "  approve  already\n  recover  once it is over: run resume\n" in shown
    assert "  prepare " not in shown


def test_explain_shows_what_is_over_and_not_recovered(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("drain"), "resume": agent.hook("resume", exit_code=1)})
    agent.start()
    event = sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=0.3)
    agent.wait_phase(event, "recovery_failed")
    _, *shown = ask(agent, "explain").stdout.splitlines()
    doing = "recovery failed, an operator must retry or resolve it: hook resume: exit code 1"
    assert shown[:2] == ["The document lists no event.", f"Reboot {event} is over; the agent: {doing}"]
    options = f"{event} --state-dir {agent.state_dir}"
    done = "only when you have done manually what resume does"
    assert shown[2:] == [
        f"  retry    run resume again, then the rest: scheduled-events-agent retry {options}",
        f"  resolve  {done}: scheduled-events-agent resolve {options}",
    ]


def test_explain_of_a_held_event_offers_what_status_offers(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", exit_code=1)})
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=7200)
    agent.wait_phase(event, "held")
    shown = ask(agent, "explain").stdout
    options = f"{event} --state-dir {agent.state_dir}\n"
    assert f"  retry    run drain again, then the rest: scheduled-events-agent retry {options}" in shown
    assert f"  approve  let Azure start it as it is: scheduled-events-agent approve {options}" in shown
    agent.kill()
    assert "  retry  " not in ask(agent, "explain").stdout


def test_explain_does_not_guess_the_name_that_its_agent_does_not_know(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    sim.fault("vm-1", "status", on="instance", status=404)
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.start()
    agent.wait_log("decided", event_id=event)
    shown = ask(agent, "explain").stdout
    assert shown.startswith("This VM: not known. ")
    assert f"  rule     not {DRAIN['name']}: nothing says whether it names this VM\n" in shown
    assert "  approve  not approved: nothing says whether it names this VM\n" in shown


def test_explain_needs_only_one_of_agent_and_endpoint(endpoint_agent: tuple[Endpoint, Agent]) -> None:
    endpoint, agent = endpoint_agent
    agent.write_policy(rules=[BY_HAND])
    endpoint.body = document(
        {"EventId": "A", "EventStatus": "Scheduled", "EventType": "Reboot", "Resources": ["vm-1"]}
    )
    alone = "no agent runs; this is what an agent started now would do"
    shown = ask(agent, "explain")
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, alone)
    assert "  agent " not in shown.stdout
    agent.start()
    agent.wait_log("waiting", event_id="A")
    endpoint.status = 500
    shown = ask(agent, "explain")
    first, *_, approve = shown.stdout.splitlines()
    assert shown.returncode == 0
    assert first.startswith("the metadata service gives no document: GET ")
    assert first.endswith("; these are the events that the agent knows")
    assert approve.startswith("  approve  when an operator approves it: ")
    told = json.loads(ask(agent, "explain", "--json").stdout)
    assert (told["source"], [one["phase"] for one in told["events"]]) == ("agent", ["prepared"])
    assert told["received_at"] is not None
    agent.kill()
    failed = ask(agent, "explain")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("scheduled-events-agent: GET ")
    assert failed.stderr.endswith("; and no agent runs\n")
    endpoint.status = 200
    left = ask(agent, "explain").stdout
    assert left.splitlines()[0] == alone
    assert "  agent    when it last ran: waits: an operator must approve it; first seen " in left


def test_explain_does_not_take_an_outage_for_an_empty_document(endpoint_agent: tuple[Endpoint, Agent]) -> None:
    endpoint, agent = endpoint_agent
    agent.write_policy()
    agent.start()
    endpoint.status = 500
    *_, last = ask(agent, "explain").stdout.splitlines()
    assert re.fullmatch(r"The agent knows no event: its last successful poll was at [-\d: ]+ UTC\.", last)


def test_explain_raw_prints_the_document_unchanged(endpoint_agent: tuple[Endpoint, Agent]) -> None:
    endpoint, agent = endpoint_agent
    agent.write_policy()
    endpoint.body = b'\xef\xbb\xbf{"DocumentIncarnation": 1,\r\n"Events": [],}'
    done = subprocess.run(
        agent.command("explain", "--raw", "--config", str(agent.config)),
        cwd=CHECKOUT,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, endpoint.body, b"")
    both = ask(agent, "explain", "--raw", "-")
    assert (both.returncode, both.stdout) == (2, "")


def test_beside_an_agent_explain_does_not_wait_minutes_for_a_service_that_hangs(
    sim: Simulator, agent: Agent
) -> None:
    imds = {"request_timeout": "1s", "first_request_timeout": "2m"}
    agent.write_policy(imds=imds)
    agent.start()
    agent.wait_log("this VM is known")
    sim.fault("vm-1", "stall", on="poll")
    began = time.monotonic()
    asked = ask(agent, "explain")
    assert asked.returncode == 0
    assert asked.stdout.splitlines()[0].endswith(
        ": no whole answer within 1 s; these are the events that the agent knows"
    )
    assert time.monotonic() - began < PATIENCE / 2


def test_external_text_never_controls_the_terminal(endpoint_agent: tuple[Endpoint, Agent]) -> None:
    endpoint, agent = endpoint_agent
    hook = f"import sys; sys.stdout.reconfigure(encoding='utf-8'); print({HOSTILE!r} * 3); sys.exit(3)"
    agent.write_policy(
        rules=[DRAIN], hooks={"drain": {"run": [sys.executable, "-c", hook]}, **agent.hooks("resume")}
    )
    endpoint.body = document(
        {
            "EventId": f"AAAA{HOSTILE}",
            "EventStatus": "Scheduled",
            "EventType": f"Re{HOSTILE}",
            "Resources": ["vm-1", f"vm{HOSTILE}"],
            "NotBefore": HOSTILE,
            "Description": HOSTILE * 5,
        },
        {
            "EventId": "BBBB",
            "EventStatus": "Scheduled",
            "EventType": "Reboot",
            "Resources": ["vm-1"],
            "Description": HOSTILE,
        },
    )
    agent.start()
    agent.wait_log("held", event_id="BBBB")
    for command in ("status", "explain", "history"):
        plain = ask(agent, command)
        expected = 3 if command == "status" else 0  # an operator must act
        assert plain.returncode == expected
        assert [line for line in plain.stdout.splitlines() if not line.isprintable()] == []
        if sys.platform != "win32":
            code, shown = in_terminal(agent, command, columns=80)
            assert code == expected
            assert "owned" in shown
            rest = re.sub(r"\x1b\[[0-9;]*m", "", shown)
            assert [line for line in rest.splitlines() if not line.isprintable()] == []


@needs_terminal
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_in_a_terminal_no_line_is_wider_than_it(sim: Simulator, agent: Agent, columns: int) -> None:
    agent.write_policy(rules=[BY_HAND])
    agent.start()
    both_vms = ["vm-1", "vm-2"]
    for number in range(6):
        sim.schedule(
            "Reboot", id_=f"AAAA111{number}-1B2C-4A5D-9E8F-0123456789AB", vms=both_vms, description="Words " * 40
        )
    agent.wait_log("prepared", count=6)
    for command in ("status", "explain", "history"):
        code, shown = in_terminal(agent, command, columns=columns)
        assert code == (3 if command == "status" else 0)  # an operator must act
        assert "\x1b[1" in shown
        lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
        assert max(map(len, lines)) <= columns


@needs_root
@pytest.mark.parametrize("command", [("status",), ("history",), ("approve", "aaaa")])
def test_an_account_that_may_not_read_the_state_learns_which_account_may(
    agent: Agent, command: tuple[str, ...]
) -> None:
    agent.write_policy(rules=[BY_HAND])
    agent.start()
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *command, "--state-dir", str(agent.state_dir)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"scheduled-events-agent: cannot open {agent.state_dir / 'state.db'}: Permission denied: "
        "only root and the agent's account may; use sudo, or on Windows an elevated prompt\n"
    )


@needs_root
def test_an_account_that_may_not_read_the_policy_learns_what_to_do(agent: Agent) -> None:
    agent.write_policy(rules=[BY_HAND])
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "check", str(agent.config)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    reason = "cannot be read: Permission denied; use sudo"
    assert (done.returncode, done.stdout) == (2, f"{agent.config}: {reason}\nnot valid: 1 error\n")
