"""status as a command: what it shows of an agent that answers, of one that does not, and of none."""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from state_file import refuse_writes

from scheduled_events_agent import RUNBOOK, __version__, cli, host
from scheduled_events_agent.cli import completion, doctor_checks, operator, terminal
from scheduled_events_agent.cli.config import load_policy, policy_file
from scheduled_events_agent.daemon.fallback import AcceptedPolicyKeeper
from scheduled_events_agent.host import processes
from scheduled_events_agent.host.conflicts import OwnService, ServiceFailure
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.policy.load import CONFIG_VARIABLE, ConfigError
from scheduled_events_agent.status import (
    ActivePolicy,
    CommandOptions,
    FleetState,
    StateLost,
    Status,
    Vm,
)
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts, RunningHook
from scheduled_events_agent.store import RequestAnswer, Store, StoreError
from scheduled_events_agent.workflow import Record, StageStatus, Transition, WaitReason, Workflow

NOW = datetime(2026, 4, 11, 22, 12, tzinfo=UTC)
POLICY = ActivePolicy(file="policy.yaml", read_at=NOW - timedelta(hours=2))
EVENT = ScheduledEvent(
    id="602D9444-1B2C-4A5D-9E8F-0123456789AB",
    type="Redeploy",
    status="Scheduled",
    source="Platform",
    resources=("web-1",),
    not_before=NOW + timedelta(minutes=14, seconds=12),
    duration_seconds=9,
    description="Host server is undergoing maintenance.",
)
DECISION = Decision(
    rule="impactful",
    reason="rule impactful matches it: type Redeploy",
    affects="self",
    prepare=("drain",),
    approve="when-prepared",
)
PREPARING = Workflow(
    id="602d9444@1",
    event=EVENT,
    decision=DECISION,
    first_seen_at=NOW,
    not_before_seen_at=NOW,
    boot_id="boot",
    phase="preparing",
    prepare=StageStatus(state="running", current="drain", run=1),
)
FACTS = Facts(
    at=NOW,
    version="0.1.0",
    started_at=NOW - timedelta(days=3),
    vm=Vm(names=("web-1",), vm_id="5d1c"),
    mode="act",
    ready=True,
    policy=POLICY,
    rules=("impactful",),
    endpoint="auto",
    last_poll_at=NOW,
    poll_failure="",
    incarnation="7",
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Where an agent has run."""
    directory = tmp_path / "state"
    host.create_private_dir(directory)
    store = Store.open(directory, NOW)
    store.set_meta({"vm_name": "web-1"})
    store.record("agent_started", "version 0.1.0, mode act", datetime.now(UTC) - timedelta(minutes=2))
    store.close()
    return directory


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command line, where there is no policy file; returns exit code, output and errors."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(host, "default_config_path", lambda: tmp_path / "none.yaml")
    monkeypatch.setattr(processes, "own_service", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@contextmanager
def an_agent(state_dir: Path, answer: bytes | None) -> Iterator[None]:
    """A process that holds the lock, as an agent does, and gives this answer to every request."""
    is_over = threading.Event()

    def answer_requests() -> None:
        store = Store.open_client(state_dir)
        while not is_over.wait(0.01):
            for request in store.load_requests(datetime.now(UTC)):
                if answer is not None:
                    store.answer_request(request.id, RequestAnswer(succeeded=True, message=answer.decode()))
        store.close()

    lock = host.acquire_lock(state_dir / "lock")
    thread = threading.Thread(target=answer_requests)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        lock.close()


def answered(state_dir: Path, facts: Facts, run: Run, *options: str) -> tuple[int, str, str]:
    """The output of the command for an agent that answers this."""
    with an_agent(state_dir, msgspec.json.encode(to_status(facts))):
        return run("status", "--state-dir", str(state_dir), *options)


def commit(state_dir: Path, *workflows: Workflow) -> None:
    """As the agent would have done."""
    store = Store.open_client(state_dir)
    store.commit([Transition(workflow=w, records=(Record(kind="seen", text="it"),)) for w in workflows], NOW)
    store.close()


def without_ages(text: str) -> str:
    return re.sub(r"\d+[dm] \d+[hs] ago \([^)]* UTC\)", "AGO", text)


def test_status_of_an_idle_healthy_agent_has_five_lines(state_dir: Path, run: Run) -> None:
    code, out, err = answered(state_dir, FACTS, run)
    assert (code, err) == (0, "")
    assert out == (
        "Nothing is pending\n"
        "  vm         web-1 (vmId 5d1c)\n"
        "  policy     policy.yaml, read 2h 0m ago (20:12:00 UTC)\n"
        "  last poll  succeeded 0s ago; auto, document 7\n"
        "  agent      acts; ready (/readyz); version 0.1.0, since 3d 0h ago (2026-04-08 22:12:00 UTC)\n"
    )


def test_a_command_to_copy_begins_with_sudo_if_that_was_needed_here(
    state_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "kim")
    prefix = host.supervisor_commands().prefix
    stale = msgspec.structs.replace(POLICY, rejected="policy.yaml:3: bad", rejected_at=NOW)
    _, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, policy=stale, workflows=(PREPARING,)), run)
    assert f"\n     {prefix}scheduled-events-agent check  show all" in out
    assert f"\n  overrule  {prefix}scheduled-events-agent hold 602D9444\n" in out
    _, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, policy=stale), run, "--json")
    assert '"command": "scheduled-events-agent check"' in out  # with command_prefix beside it


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        (FleetState(group="web", error="", unavailable_since=None, not_ready=()), "group web"),
        (
            FleetState(group="web", error="", unavailable_since=None, not_ready=("web-2", "web-3")),
            "group web; waits for web-2, web-3",
        ),
        (
            FleetState(group="", error="no route", unavailable_since=NOW - timedelta(seconds=90), not_ready=()),
            "group not known; its store cannot be used since 22:10:30 UTC: no route",
        ),
    ],
)
def test_the_fleet_line_shows_its_wait_reason(state_dir: Path, run: Run, fleet: FleetState, expected: str) -> None:
    code, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, fleet=fleet), run)
    assert (code, out.splitlines()[-1]) == (0, f"  fleet      {expected}")


def test_a_fleet_configuration_error_has_a_line_of_its_own(state_dir: Path, run: Run) -> None:
    warning = "members does not match this VM, web-1: all VMs are waited for"
    fleet = FleetState(group="web", error="", unavailable_since=None, not_ready=(), warnings=(warning,))
    _, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, fleet=fleet), run)
    assert out.splitlines()[-2:] == ["  fleet      group web", f"  fleet      {warning}"]


def test_a_hook_of_on_clear_runs_or_waits_for_another_run_of_it(state_dir: Path, run: Run) -> None:
    running = RunningHook(
        workflow_id="", stage="on_clear", hook="resume", since=NOW - timedelta(seconds=3), limit_seconds=60.0
    )
    queued = replace(running, hook="drain", state="queued", limit_seconds=None)
    _, out, _ = answered(state_dir, replace(FACTS, running=(running, queued)), run)
    assert re.findall(r"^ +(\w+) +the on_clear hook (.*)$", out, re.MULTILINE) == [
        ("runs", "resume, 3s of at most 1m"),
        ("queued", "drain, 3s so far"),
    ]


def test_each_pending_event_has_the_time_left_the_reason_and_a_command(state_dir: Path, run: Run) -> None:
    began = NOW - timedelta(seconds=12)
    hook = RunningHook(workflow_id=PREPARING.id, stage="prepare", hook="drain", since=began, limit_seconds=120.0)
    code, out, _ = answered(
        state_dir,
        msgspec.structs.replace(
            FACTS,
            workflows=(PREPARING,),
            running=(hook,),
            ready=False,
            command_options=CommandOptions(state="--state-dir /its/own"),
        ),
        run,
    )
    assert code == 0
    head, card, rows = out.split("\n\n")
    assert head == "Preparing for a Redeploy"
    assert rows.splitlines()[-1].startswith("  agent      acts; not ready (/readyz); ")
    assert f"{card}\n" == (
        "Redeploy 602D9444: not before 22:26:12 UTC (in 14m 12s)\n"
        "  now       runs the prepare hook drain, 12s of at most 2m\n"
        "  reason    rule impactful matches it: type Redeploy\n"
        '  event     Scheduled, from Platform, for about 9s, "Host server is undergoing maintenance."\n'
        "  names     this VM only\n"
        "  overrule  scheduled-events-agent hold 602D9444 --state-dir /its/own\n"
    )


FAILED = msgspec.structs.replace(
    PREPARING,
    phase="held",
    prepare=StageStatus(state="failed", run=1, failed_hook="drain", failure="hook drain: exit code 3"),
    wait_reason=WaitReason(kind="prepare_failed"),
)
OUTPUT = "one\ntwo\n\nthree \x1b[31mred\x1b[0m\nfour " + "x" * 300


def with_output(state_dir: Path, workflow: Workflow) -> None:
    note = Record(kind="hook_finished", stage="prepare", hook="drain", outcome="failed", detail=OUTPUT)
    store = Store.open_client(state_dir)
    store.commit([Transition(workflow=workflow, records=(note,))], NOW)
    store.close()


def test_an_attention_item_comes_first_with_hook_output_and_command(state_dir: Path, run: Run) -> None:
    with_output(state_dir, FAILED)
    code, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, workflows=(FAILED,)), run)
    assert code == 3
    block, card, _ = out.split("\n\n")
    held = "The Redeploy of web-1 is held: hook drain: exit code 3."
    assert block.splitlines() == [
        f"ACT  {held} Azure starts it at 22:26:12 UTC (in 14m 12s), prepared or not.",
        "     | two",
        "     | three red",
        f"     | four {'x' * 195}",
        "     scheduled-events-agent retry 602D9444    run drain again, then the rest",
        "     scheduled-events-agent approve 602D9444  let Azure start it as it is",
        f"     runbook {RUNBOOK}#prepare_failed",
    ]
    assert "overrule" not in card


@pytest.mark.parametrize("is_needed", [True, False])
def test_the_output_of_a_failed_hook_is_as_bright_as_what_failed(
    state_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch, *, is_needed: bool
) -> None:
    failed = FAILED if is_needed else msgspec.structs.replace(FAILED, phase="approved", wait_reason=None)
    with_output(state_dir, failed)
    monkeypatch.setattr(terminal.Terminal, "of", lambda _: terminal.Terminal(width=None, has_colors=True))
    _, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, workflows=(failed,)), run)
    lines = [line.lstrip() for line in out.splitlines()]
    assert "| two" in lines
    assert "| three red" in lines


def test_hook_output_of_a_harmless_failure_is_shown_with_its_event(state_dir: Path, run: Run) -> None:
    approved = msgspec.structs.replace(FAILED, phase="approved", wait_reason=None)  # by its rule
    with_output(state_dir, approved)
    code, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, workflows=(approved,)), run)
    assert code == 0
    assert re.search(r"\n  failed +hook drain: exit code 3\n +\| two\n +\| three red\n +\| four x", out)


def test_each_attention_item_has_its_block_and_the_worst_comes_first(state_dir: Path, run: Run) -> None:
    policy = msgspec.structs.replace(
        POLICY, rejected="policy.yaml:3: rules: expected a list", rejected_summary="line 3, rules", rejected_at=NOW
    )
    facts = msgspec.structs.replace(FACTS, workflows=(FAILED,), policy=policy)
    _, out, _ = answered(state_dir, facts, run)
    assert [block[:5] for block in out.split("\n\n")[:2]] == ["ACT  ", "FIX  "]
    assert "FIX  The policy file is rejected: line 3, rules. In force" in out
    assert "\n     policy.yaml:3: rules: expected a list\n" in out


def test_without_an_agent_an_open_failed_recovery_is_shown_below(state_dir: Path, run: Run) -> None:
    recover = msgspec.structs.replace(FAILED.prepare, failed_hook="resume", failure="hook resume: no")
    failed = msgspec.structs.replace(
        FAILED, phase="recovery_failed", is_over=True, wait_reason=None, recover=recover
    )
    commit(state_dir, failed)
    code, out, _ = run("status", "--state-dir", str(state_dir))
    assert code == 3
    first, second, *_ = out.split("\n\n")
    assert first.startswith("ACT  No agent runs. ")
    assert f"scheduled-events-agent run --state-dir {state_dir}" in first
    assert second.startswith("ACT  Recovery from the Redeploy of web-1 failed: hook resume: no.\n")
    assert (
        json.loads(run("status", "--state-dir", str(state_dir), "--json")[1])["attention"][1]["severity"] == "act"
    )


def test_without_an_agent_waiting_notifications_are_shown(state_dir: Path, run: Run) -> None:
    store = Store.open_client(state_dir)
    step = Transition(workflow=PREPARING)
    store.commit([step], NOW, {}, [("ops", "{}"), ("ops", "{}"), ("chat", "{}")])
    store.close()
    out = run("status", "--state-dir", str(state_dir))[1]
    assert "  notify  ops: notifications waiting: 2\n" in out
    assert "  notify  chat: notifications waiting: 1\n" in out


def test_shortened_ids_stay_distinct_and_long_name_lists_are_cut(state_dir: Path, run: Run) -> None:
    twin = msgspec.structs.replace(
        EVENT,
        id="602d9444-9999",
        resources=tuple(f"web-{number}" for number in range(1, 101)),
        not_before=NOW + timedelta(hours=1),
    )
    other = msgspec.structs.replace(
        PREPARING,
        id="2",
        event=twin,
        phase="held",
        wait_reason=WaitReason(kind="never"),
        decision=msgspec.structs.replace(DECISION, affects="shared", approve="never"),
    )
    _, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, workflows=(other, PREPARING)), run)
    assert out.splitlines()[0] == "Preparing for a Redeploy, and 1 more"
    assert re.findall("overrule  (.*)", out) == [
        "scheduled-events-agent hold 602D9444-1",
        "scheduled-events-agent approve 602d9444-9",
    ]
    held = "held: approve is never (rule impactful matches it: type Redeploy)"
    assert f"now       {held}; Azure starts it at 23:12:00 UTC\n" in out
    assert "this VM and 99 others: web-1, web-2, web-3, web-4, web-5, web-6, web-7, web-8 and 92 more\n" in out


def test_an_observing_agent_offers_no_operator_action(state_dir: Path, run: Run) -> None:
    _, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, mode="observe", workflows=(PREPARING,)), run)
    assert "  agent      only observes; " in out
    assert "overrule" not in out


def test_errors_come_first_and_the_exit_code_is_1(state_dir: Path, run: Run) -> None:
    ill = msgspec.structs.replace(
        FACTS,
        polls="overdue",
        poll_failure="GET http://imds: timed out",
        poll_failure_summary="timed out",
        last_poll_at=NOW - timedelta(seconds=61),
        policy=msgspec.structs.replace(
            POLICY, rejected="policy.yaml:3: rules: expected a list", rejected_summary="line 3, rules"
        ),
    )
    code, out, _ = answered(state_dir, ill, run)
    assert code == 1
    assert out == (
        "ACT  Azure's metadata service has not answered since 22:10:59 UTC: timed out. No new event is seen.\n"
        "     GET http://imds: timed out\n"
        "     scheduled-events-agent doctor  find the problem\n"
        f"     runbook {RUNBOOK}#unhealthy\n"
        "\n"
        "FIX  The policy file is rejected: line 3, rules. "
        "In force is the policy accepted at 20:12:00 UTC, also after a restart.\n"
        "     policy.yaml:3: rules: expected a list\n"
        "     scheduled-events-agent check  show all that is wrong with it\n"
        f"     runbook {RUNBOOK}#policy_rejected\n"
        "\n"
        "  vm         web-1 (vmId 5d1c)\n"
        "  policy     policy.yaml, read 2h 0m ago (20:12:00 UTC)\n"
        "  last poll  failed: GET http://imds: timed out; succeeded 1m 1s ago (22:10:59 UTC); auto, document 7\n"
        "  agent      acts; ready (/readyz); version 0.1.0, since 3d 0h ago (2026-04-08 22:12:00 UTC)\n"
    )


def test_a_change_that_needs_a_restart_is_named(state_dir: Path, run: Run) -> None:
    late = msgspec.structs.replace(POLICY, needs_restart=("agent.listen_names", "agent.web_config"))
    code, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, policy=late), run)
    assert code == 0
    assert (
        "  policy     policy.yaml, read 2h 0m ago (20:12:00 UTC)\n"
        "             agent.listen_names: needs a restart\n"
        "             agent.web_config: needs a restart\n"
    ) in out


def test_json_is_what_the_agent_answered(state_dir: Path, run: Run) -> None:
    code, out, _ = answered(state_dir, FACTS, run, "--json")
    assert code == 0
    assert msgspec.json.decode(out, type=Status) == to_status(FACTS)


def test_without_an_agent_the_state_file_is_shown(state_dir: Path, run: Run) -> None:
    commit(state_dir, PREPARING)
    code, out, _ = run("status", "--state-dir", str(state_dir))
    assert code == 1
    start = f"scheduled-events-agent run --state-dir {state_dir}"
    doctor = f"scheduled-events-agent doctor --state-dir {state_dir}"
    assert without_ages(out) == (
        "ACT  No agent runs. Until one runs, no event is prepared for, approved or recovered from.\n"
        f"     {start.ljust(len(doctor))}  start it\n"
        f"     {doctor}  find the problem\n"
        f"     runbook {RUNBOOK}#unhealthy\n"
        "\n"
        "Redeploy 602D9444: may start at any moment (2026-04-11 22:26:12 UTC)\n"
        "  now     preparing\n"
        "  reason  rule impactful matches it: type Redeploy\n"
        '  event   Scheduled, from Platform, for about 9s, "Host server is undergoing maintenance."\n'
        "  names   this VM only\n"
        "\n"
        "  vm      web-1\n"
        f"  source  the state file {state_dir / 'state.db'}, as no agent answers\n"
        "  state   since AGO\n"
        "  agent   started AGO: version 0.1.0, mode act\n"
        "          and did not say that it stopped: it was killed, the machine went down, or its disk was full\n"
    )


def test_status_says_since_when_the_state_exists(state_dir: Path, run: Run) -> None:
    """A state file that was removed while no agent ran is no loss to the agent, but an operator can tell."""
    shown = run("status", "--state-dir", str(state_dir))[1]
    assert "state   since " in shown
    assert f"ago ({NOW:%Y-%m-%d %H:%M:%S} UTC)" in shown
    for file in state_dir.iterdir():
        file.unlink()
    Store.open(state_dir, NOW + timedelta(days=1)).close()
    Store.open(state_dir, NOW + timedelta(days=2)).close()  # an agent that starts again keeps it
    status = json.loads(run("status", "--state-dir", str(state_dir), "--json")[1])
    assert datetime.fromisoformat(status["state_since"]) == NOW + timedelta(days=1)
    answer = msgspec.json.encode(to_status(replace(FACTS, state_since=NOW - timedelta(hours=3))))
    with an_agent(state_dir, answer):
        assert "state      since 3h 0m ago (19:12:00 UTC)" in run("status", "--state-dir", str(state_dir))[1]


def test_without_an_agent_json_names_the_problem(state_dir: Path, run: Run) -> None:
    commit(state_dir, PREPARING)
    code, out, _ = run("status", "--state-dir", str(state_dir), "--json")
    told = json.loads(out)
    assert (code, told["health"], told["source"], told["vm"]["names"]) == (
        1,
        ["No agent runs."],
        "state_file",
        ["web-1"],
    )
    assert (told["ready"], told["on_clear"], told["mode"], told["incarnation"]) == (False, [], None, None)
    assert [note["kind"] for note in told["agent_log"]] == ["agent_started"]
    assert [event["phase"] for event in told["events"]] == ["preparing"]


def test_a_wait_reason_is_in_json_as_a_value_and_as_a_message(state_dir: Path, run: Run) -> None:
    waits = WaitReason(kind="time", at=NOW, detail="lead 15m")
    commit(state_dir, msgspec.structs.replace(PREPARING, phase="waiting", wait_reason=waits))
    (event,) = json.loads(run("status", "--state-dir", str(state_dir), "--json")[1])["events"]
    text = f"begins at {NOW:%Y-%m-%d %H:%M:%S} UTC: lead 15m"
    assert event["waits_for"] == {"kind": "time", "until": msgspec.to_builtins(NOW), "text": text}
    histories = json.loads(run("history", "--state-dir", str(state_dir), "--json")[1])["histories"]
    assert [item["event"] for item in histories if item["event"]] == [event]


def test_an_agent_that_does_not_answer_is_named(
    state_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_ANSWER_WITHIN_SECONDS", 0.5)
    monkeypatch.setattr(terminal, "_SLOW_SECONDS", 0.05)
    with an_agent(state_dir, None):
        code, out, err = run("status", "--state-dir", str(state_dir))
    assert code == 1
    assert err == "waits for the agent, which does not answer yet; gives up after twelve seconds\n"
    assert re.match(r"ACT  The agent \(pid \d+\) does not answer\.\n", out)
    assert f"scheduled-events-agent doctor --state-dir {state_dir}" in out
    assert "it was killed" not in out


def test_unknown_fields_of_a_newer_agent_are_ignored(state_dir: Path, run: Run) -> None:
    status = to_status(msgspec.structs.replace(FACTS, workflows=(FAILED,)))
    answer = msgspec.to_builtins(status)
    (event,) = answer["events"]
    parts = (*event["hooks"], *event["commands"], event["waits_for"], event["approval"], event["operator"])
    for one in (answer, answer["vm"], *answer["attention"], event, *parts):
        one["is_new"] = True
    with an_agent(state_dir, msgspec.json.encode(answer)):
        _, out, _ = run("status", "--state-dir", str(state_dir), "--json")
    assert msgspec.json.decode(out, type=Status) == status


@pytest.mark.parametrize("answer", [b'{"version":"9.9.9"}', b"rejected: the event is not pending any more"])
def test_an_agent_of_another_version_is_distinguished_from_one_that_hangs(
    state_dir: Path, run: Run, answer: bytes
) -> None:
    with an_agent(state_dir, answer):
        code, out, _ = run("status", "--state-dir", str(state_dir))
    assert code == 1
    assert f" is of another version than this program ({__version__}): restart it" in out.splitlines()[0]


def test_a_missing_agent_is_reported(run: Run, tmp_path: Path) -> None:
    said = (
        f"scheduled-events-agent: no agent has run with the state directory {tmp_path}: name it with --state-dir\n"
    )
    for command in (("status",), ("history",), ("approve", "602d")):
        assert run(*command, "--state-dir", str(tmp_path)) == (1, "", said)


def test_an_invalid_policy_file_hides_no_agent_in_the_default_directory(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "none.yaml"
    broken.write_text("rules: [\n")
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    with an_agent(state_dir, msgspec.json.encode(to_status(FACTS))):
        code, out, err = run("status")
    assert (code, out.splitlines()[0]) == (0, "Nothing is pending")
    problem = str(err).splitlines(keepends=True)[0]
    assert problem.startswith(f"{broken}:1: ")
    assert err == f"{problem}so this looks in {state_dir}; --state-dir names another\n"
    name_it = f"{problem}so name the state directory with --state-dir\n"
    assert run("status", "--config", str(broken)) == (2, "", name_it)


REJECTED = {
    "unknown key": "rulez: []\n",
    "bad value": "imds: {poll_interval: often}\n",
    "missing hook": "rules: [{name: all, prepare: [drain], approve: when-prepared}]\n",
    "not keys": "hooks: 5\n",
    "required key": "rules: [{approve: never}]\n",
}


@pytest.mark.parametrize("way", ["--config", "variable", "system"])
def test_the_state_directory_of_a_rejected_policy_file_is_used(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    policy = tmp_path / ("none.yaml" if way == "system" else "policy.yaml")
    options = ("--config", str(policy)) if way == "--config" else ()
    if way == "variable":
        monkeypatch.setenv(CONFIG_VARIABLE, str(policy))
    option = "" if way == "system" else f" --config {policy}"
    told = f"{policy} is rejected: scheduled-events-agent check{option} says why\n"
    with an_agent(state_dir, msgspec.json.encode(to_status(FACTS))):
        for fault, text in REJECTED.items():
            policy.write_text(f"{text}agent: {{state_dir: '{state_dir}'}}\n")
            code, out, err = run("status", *options)
            assert (code, out.splitlines()[0], err) == (0, "Nothing is pending", told), fault
            assert run("history", *options)[::2] == (0, told), fault
            if not options:
                assert run("completion", "ids") == (0, "", ""), fault  # in silence: a shell completes just now


def test_completion_gets_the_ids_of_pending_events_from_a_hidden_command(
    state_dir: Path,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completion, "STATUS_URL", "http://127.0.0.1:1/status")
    hostile = msgspec.structs.replace(PREPARING, id="2", event=msgspec.structs.replace(EVENT, id="$(touch x)"))
    commit(state_dir, PREPARING, hostile)
    (tmp_path / "none.yaml").write_text(f"agent: {{state_dir: '{state_dir}'}}\n")
    assert run("completion", "ids") == (0, f"{EVENT.id}\n", "")
    with closing(Store.open(state_dir, NOW)) as store:
        store.set_unsettled_loss(StateLost(at=NOW, reason="file is not a database"))
    assert run("completion", "ids") == (0, f"{EVENT.id}\nstate_lost\n", "")
    (tmp_path / "none.yaml").write_text(f"agent: {{state_dir: '{tmp_path / 'absent'}'}}\n")
    assert run("completion", "ids") == (1, "", "")
    for words in (("completion", "--help"), ("completion", "tcsh"), ("--help",)):
        with pytest.raises(SystemExit):
            run(*words)
        captured = capsys.readouterr()
        assert not re.search(r"\b(ids|events)\b,|'ids'", captured.out + captured.err)
    for word in ("events", "ids"):
        with pytest.raises(SystemExit) as caught:
            run(word)
        assert caught.value.code == 2


@pytest.mark.parametrize("agent", ["", "agent:\n", "agent: {mode: acts}\n", "agent: {state_dir: }\n"])
def test_a_rejected_policy_file_without_a_state_directory_leads_to_the_default(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"rulez: []\n{agent}")
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    with an_agent(state_dir, msgspec.json.encode(to_status(FACTS))):
        assert run("status", "--config", str(policy))[0] == 0


@pytest.mark.parametrize("text", ["- agent\n", "agent: [x]\n", "agent: {state_dir: [/a]}\n", "agent: {\n"])
def test_an_unknown_state_directory_has_to_be_named(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(text)
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    code, out, err = run("status", "--config", str(policy))
    assert (code, out) == (2, "")
    assert err.endswith("\nso name the state directory with --state-dir\n")


REJECTED_AT_START = {
    "a bad value": (
        "rules: [{name: a,\n  approve: yes}]\n",
        "line 2, approve",
        ":2: rules[0].approve: expected",
    ),
    "no YAML": ("rules: [\n", "line 1", ":1: "),
    "several": (
        "rules: [{name: a, prepare: [drain, save], approve: when-prepared}]\n",
        "line 1, prepare[0], and 1 more error",
        ':1: rules[0].prepare[0]: there is no hook "drain"',
    ),
}


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize(("text", "summary", "detail"), REJECTED_AT_START.values(), ids=REJECTED_AT_START)
def test_without_an_agent_a_bad_policy_file_is_named_before_a_start_is_tried(
    state_dir: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    text: str,
    summary: str,
    detail: str,
    has_state: bool,
) -> None:
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir if has_state else tmp_path / "absent")
    policy = tmp_path / "none.yaml"
    policy.write_text(text)
    code, out, err = run("status")
    assert (code, err) == (1, "")
    first, second, third = out.splitlines()[0], out.splitlines()[1], out.partition("scheduled-events-agent")[2]
    assert first == (
        f"ACT  No agent runs: the policy file is rejected: {summary}. "
        "Until one runs, no event is prepared for, approved or recovered from."
    )
    assert second.startswith(f"     {policy}{detail}")
    assert third.startswith(" check ")


def test_without_an_agent_a_policy_file_that_is_missing_is_named(
    state_dir: Path, run: Run, tmp_path: Path
) -> None:
    options = ("--state-dir", str(state_dir), "--config", str(tmp_path / "lost.yaml"))
    assert run("status", *options)[1].startswith(
        "ACT  No agent runs: the policy file is rejected: there is no such file. "
    )


def test_without_an_agent_a_policy_that_others_can_change_is_named(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "is_privileged", lambda: True)
    monkeypatch.setattr(
        host, "find_write_risk", lambda path, _user: f"{path} can be changed by every account: chmod go-w {path}"
    )
    policy = tmp_path / "policy.yaml"
    policy.write_text("{}")
    out = run("status", "--state-dir", str(state_dir), "--config", str(policy))[1]
    risk = f"{policy} can be changed by every account: chmod go-w {policy}"
    rejected = "the policy file is rejected: other accounts could change it, or a file that it names."
    headline, detail, *_ = out.splitlines()
    assert headline.startswith(f"ACT  No agent runs: {rejected} ")
    assert detail == f"     {policy}: {risk}"


def test_a_service_that_would_go_on_with_the_accepted_policy_is_only_started(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    policy = tmp_path / "none.yaml"
    policy.write_text("{}")
    policy.chmod(0o600)
    keeper = AcceptedPolicyKeeper(policy_file(policy), state_dir)
    keeper.accept(load_policy(policy))
    policy.write_text("rulez: []")
    with pytest.raises(ConfigError) as caught:
        load_policy(policy)
    assert keeper.reject(caught.value) == ""
    code, out, err = run("status")
    assert (code, out.splitlines()[1].split("  ")[-1]) == (1, "start it")
    assert out.startswith("ACT  No agent runs. ")
    assert err == f"{policy} is rejected: scheduled-events-agent check says why\n"


A_SERVICE = OwnService(
    is_enabled=True,
    state="failed (failed)",
    is_running=False,
    pid=0,
    account=host.account_name(),
    needs_daemon_reload=False,
)
NEEDS_PYTHON = "scheduled-events-agent: needs Python 3.11, 3.12, 3.13 or 3.14 in /usr/bin; found 3.9"


def test_a_policy_that_only_root_would_reject_is_no_reason_why_a_service_of_another_account_does_not_run(
    state_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    monkeypatch.setattr(host, "is_privileged", lambda: True)
    monkeypatch.setattr(host, "find_write_risk", lambda path, _user=None: f"{path} can be changed by app")
    monkeypatch.setattr(host, "find_wrong_owner", lambda _path, _user: None)
    (tmp_path / "none.yaml").write_text("{}")
    for account, reason in (
        ("app", ""),
        ("root", ": the policy file is rejected: other accounts could change it"),
    ):
        service = A_SERVICE._replace(account=account)
        monkeypatch.setattr(processes, "own_service", lambda service=service: service)
        headline = run("status")[1].splitlines()[0]
        assert headline.startswith(f"ACT  No agent runs{reason}"), account
        assert ("rejected" in headline) == bool(reason)


@pytest.mark.parametrize(
    ("service", "reason", "detail"),
    [
        (
            A_SERVICE._replace(failure=ServiceFailure(NEEDS_PYTHON, is_retried=False)),
            "its service has failed",
            NEEDS_PYTHON,
        ),
        (A_SERVICE._replace(is_masked=True), "its service is masked", doctor_checks.UNMASK),
    ],
)
def test_without_an_agent_the_failure_of_its_service_is_named(
    state_dir: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    *,
    service: OwnService,
    reason: str,
    detail: str,
) -> None:
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    monkeypatch.setattr(processes, "own_service", lambda: service)
    out = run("status")[1]
    assert out.startswith(f"ACT  No agent runs: {reason}. ")
    assert out.splitlines()[1] == f"     {detail}"
    told = json.loads(run("status", "--json")[1])
    assert told["start_failure"] == {"reason": reason, "detail": detail}


def test_a_service_manager_that_does_not_answer_hides_no_status(
    state_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> OwnService:
        raise host.HostError("systemctl cannot report", kind="systemctl")

    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    monkeypatch.setattr(processes, "own_service", fail)
    assert run("status")[1].startswith("ACT  No agent runs. ")


@pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are Linux' own")
def test_without_an_agent_a_state_directory_that_it_would_reject_is_named(
    state_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "default_state_dir", lambda: state_dir)
    monkeypatch.setattr(processes, "own_service", lambda: A_SERVICE)
    monkeypatch.setattr(host, "find_wrong_owner", lambda path, user: f"{path} belongs to uid 12, not to {user}")
    start = "ACT  No agent runs: it cannot use its state directory. "
    out = run("status")[1]
    assert out.startswith(start)
    assert f"     {state_dir}: {state_dir} belongs to uid 12, not to {A_SERVICE.account}\n" in out
    state_dir.chmod(0o755)
    out = run("status", "--state-dir", str(state_dir))[1]
    assert out.startswith(start)
    assert f"chmod 700 {state_dir}\n" in out


def test_without_an_agent_the_commands_lead_to_the_same_agent(state_dir: Path, run: Run, tmp_path: Path) -> None:
    commit(state_dir, FAILED)
    supervisor = host.supervisor_commands()
    for name in ("policy.yaml", "none.yaml"):  # another file, and the system's
        policy = tmp_path / name
        policy.write_text(f"agent: {{state_dir: '{state_dir}'}}\n")
        options = ("--config", str(policy)) if name == "policy.yaml" else ()
        found = json.loads(run("status", *options, "--json")[1])["attention"][0]["commands"]
        shown = f" --state-dir {state_dir} --config {policy}" if options else ""
        starts = (f"scheduled-events-agent run{shown}",) if options else (supervisor.start, supervisor.log)
        assert [one["command"] for one in found] == [*starts, f"scheduled-events-agent doctor{shown}"]


def test_external_texts_never_control_the_terminal(state_dir: Path, run: Run) -> None:
    hostile = "\x1b[2J\x1b]0;evil\x07\u202e"
    event = msgspec.structs.replace(EVENT, description=hostile, type=hostile, resources=(hostile, "web-1"))
    decision = msgspec.structs.replace(DECISION, affects="shared", reason=hostile)
    failed = msgspec.structs.replace(FAILED.prepare, failure=hostile)
    workflow = msgspec.structs.replace(FAILED, event=event, decision=decision, prepare=failed)
    commit(state_dir, workflow)
    facts = msgspec.structs.replace(FACTS, workflows=(workflow,), poll_failure=hostile, faults=(hostile,))
    outputs = [answered(state_dir, facts, run)[1], run("status", "--state-dir", str(state_dir))[1]]
    for out in outputs:
        assert r"\x1b[2J\x1b]0;evil\x07\u202e" in out
        assert [line for line in out.splitlines() if not line.isprintable()] == []


def test_json_is_ascii_and_never_controls_the_terminal(state_dir: Path, run: Run) -> None:
    hostile = "\x9b2J\u202eschön"
    workflow = msgspec.structs.replace(PREPARING, event=msgspec.structs.replace(EVENT, description=hostile))
    commit(state_dir, workflow)
    facts = msgspec.structs.replace(FACTS, workflows=(workflow,))
    outputs = [
        answered(state_dir, facts, run, "--json")[1],
        run("status", "--state-dir", str(state_dir), "--json")[1],
        run("history", "--state-dir", str(state_dir), "--json")[1],
    ]
    for out in outputs:
        assert out.isascii()
        assert r'"\u009b2J\u202esch\u00f6n"' in out
    assert msgspec.json.decode(outputs[0], type=Status) == to_status(facts)


def test_the_last_journal_record_decides_whether_the_agent_stopped(state_dir: Path, run: Run) -> None:
    store = Store.open_client(state_dir)
    store.record("agent_stopped", "nothing is pending", datetime.now(UTC) - timedelta(hours=1))  # it was set back
    store.close()
    shown = run("status", "--state-dir", str(state_dir))[1]
    assert re.findall(r"(started|stopped) .* ago", shown) == ["started", "stopped"]
    assert "did not say" not in run("status", "--state-dir", str(state_dir))[1]


def test_a_request_that_cannot_be_withdrawn_is_not_reported_as_withdrawn(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_ANSWER_WITHIN_SECONDS", 0.1)
    store = Store.open_client(state_dir)
    monkeypatch.setattr(
        "scheduled_events_agent.cli.operator.time.sleep",
        lambda _: refuse_writes(store),
    )
    try:
        with pytest.raises(StoreError) as caught:
            operator.wait_for_answer(store, store.add_request("602d9444@1", "approve", "kim", datetime.now(UTC)))
    finally:
        store.close()
    assert str(caught.value) == (
        f"cannot write {state_dir / 'state.db'}: attempt to write a readonly database, so the request could not "
        "be withdrawn, and the agent may still carry it out within 30 s"
    )


def test_texts_that_the_locale_lacks_are_still_shown(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(
        state_dir,
        msgspec.structs.replace(PREPARING, event=msgspec.structs.replace(EVENT, description="Wartung für 漢")),
    )
    with (tmp_path / "out").open("w", encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        cli.main(["status", "--state-dir", str(state_dir)])
    assert r'"Wartung für \u6f22"' in (tmp_path / "out").read_text(encoding="latin-1")


def test_before_a_removal_it_names_prepared_events_and_recover_hooks_that_will_not_run(
    run: Run, state_dir: Path
) -> None:
    def workflow(id_: str, hooks: tuple[str, ...], **stages: StageStatus) -> Workflow:
        event = msgspec.structs.replace(EVENT, id=id_)
        decision = msgspec.structs.replace(DECISION, recover=hooks)
        idle = {"prepare": StageStatus(), **stages}
        return msgspec.structs.replace(PREPARING, id=f"{id_}@1", event=event, decision=decision, **idle)

    def prepared() -> tuple[int, str, str]:
        return run("status", "--prepared", "--state-dir", str(state_dir))

    done = StageStatus(state="succeeded", done=("drain",), run=1)
    commit(state_dir, workflow("00000000-waits", ("resume",)))
    assert prepared() == (0, "", "")
    commit(state_dir, workflow("11111111-first", (), prepare=done))
    text = "Prepared and not recovered: Redeploy 11111111.\nNo recover hook is left to run.\n"
    assert prepared() == (0, text, "")
    failed = StageStatus(state="failed", done=("uncordon",), failed_hook="resume", run=2)
    commit(
        state_dir,
        workflow("22222222-second", ("uncordon", "resume"), prepare=done, recover=failed),
        workflow("33333333-third", ("resume", "start\nnginx"), prepare=StageStatus(state="canceled", run=1)),
    )
    first, second = prepared()[1].splitlines()
    assert first == "Prepared and not recovered: Redeploy 11111111, Redeploy 22222222, Redeploy 33333333."
    assert second == "Without the agent these recover hooks will not run: resume, start\\nnginx."


def test_a_good_policy_file_that_is_not_loaded_is_a_plain_line(state_dir: Path, run: Run) -> None:
    changed = msgspec.structs.replace(POLICY, changed_at=NOW - timedelta(minutes=8))
    code, out, _ = answered(state_dir, msgspec.structs.replace(FACTS, policy=changed), run)
    assert code == 0
    assert "\n             changed at 22:04:00 UTC, not loaded: reload\n" in out
    assert not re.search(r"^(ACT|FIX)", out, re.MULTILINE)
