"""history as a command: timelines from a journal that the store itself has written."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from scheduled_events_agent import cli, host
from scheduled_events_agent.cli.terminal import Terminal
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.policy.load import CONFIG_VARIABLE
from scheduled_events_agent.status import JournalRecord
from scheduled_events_agent.store import MAX_EVENT_RECORDS, Store
from scheduled_events_agent.workflow import Phase, Record, RecordKind, Transition, Workflow

BEGAN = datetime.now(UTC).replace(hour=10, minute=0, second=0, microsecond=0) - timedelta(days=2)
DAY = f"{BEGAN:%Y-%m-%d}"
HALF_A_DAY_LATER = f"{int((datetime.now(UTC) - BEGAN).total_seconds() // 3600) - 12}h"
REBOOT = Workflow(
    id="602d9444-aaaa@1",
    event=ScheduledEvent(id="602D9444-AAAA", type="Reboot", status="Scheduled", resources=("web-1",)),
    decision=Decision(rule="impactful", reason="rule impactful matches it", affects="self", prepare=("drain",)),
    first_seen_at=BEGAN,
    not_before_seen_at=BEGAN,
    boot_id="boot",
)
FREEZE = replace(
    REBOOT,
    id="602d9444-bbbb@1",
    event=replace(REBOOT.event, id="602D9444-BBBB", type="Freeze"),
    decision=replace(REBOOT.decision, rule="short-freeze"),
    first_seen_at=BEGAN + timedelta(days=1),
)

# The records about the agent, by the time of day; those at ten are from the time of the reboot.
ALL = ["09:00:00", "10:01:10", "10:01:20", "10:01:30", "12:00:00", "13:00:00"]

Run = Callable[..., tuple[int, str, str]]


def note(kind: RecordKind, text: str, *, outcome: str = "", detail: str = "") -> Record:
    return Record(kind=kind, text=text, outcome=outcome, detail=detail)


def commit(store: Store, workflow: Workflow, seconds: float, phase: Phase, *notes: Record) -> None:
    step = Transition(workflow=replace(workflow, phase=phase), records=notes)
    store.commit([step], workflow.first_seen_at + timedelta(seconds=seconds))


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A reboot of two days ago with a pause in it, and a freeze of yesterday that is pending."""
    directory = tmp_path / "state"
    host.create_private_dir(directory)
    store = Store.open(directory, BEGAN)
    store.record("agent_started", "version 0.1.0, mode act", BEGAN - timedelta(hours=1), detail="the boot's id")
    commit(
        store,
        REBOOT,
        0,
        "preparing",
        note("seen", "Reboot Scheduled"),
        note("decided", "rule impactful matches it"),
    )
    failed = note(
        "hook_finished", "hook drain: exit code 3", outcome="failed", detail="one\n\x1b[2J\x1b]0;two\x07"
    )
    commit(
        store,
        REBOOT,
        61,
        "held",
        failed,
        note("held", "held: exit code 3; Azure starts it at 2026-03-02 10:20:00 UTC"),
    )
    store.record("machine_paused", "was paused for 6.2s", BEGAN + timedelta(seconds=70))
    commit(store, REBOOT, 3700, "closed", note("closed", "is over: completed"))
    store.record("reload_rejected", "p.yaml:1: one\np.yaml:2: two", BEGAN + timedelta(seconds=80))
    store.record("agent_started", "version 0.1.0, mode act", BEGAN + timedelta(seconds=90), detail="the boot's id")
    store.record("reloaded", "rules: impactful", BEGAN + timedelta(hours=2))
    store.record("reload_rejected", "p.yaml:1: one\np.yaml:2: two", BEGAN + timedelta(hours=3))
    commit(store, FREEZE, 0, "held", note("seen", "Freeze Scheduled"))
    store.close()
    return directory


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, state_dir: Path
) -> Run:
    """The command, where there is no policy file; returns exit code, output and errors."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(host, "default_config_path", lambda: tmp_path / "none.yaml")

    def run_command(*options: str) -> tuple[int, str, str]:
        code = cli.main(["history", "--state-dir", str(state_dir), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def test_history_shows_an_event_from_first_sight_to_end_with_hook_output(run: Run) -> None:
    code, out, err = run("--event", "602d9444-a")
    assert (code, err) == (0, "")
    assert out == (
        "Reboot 602D9444-AAAA is over: completed\n"
        f"  rule impactful; seen from {DAY} 10:00:00 UTC until {DAY} 11:01:40 UTC, for 1h 1m\n"
        f"  {DAY} UTC\n"
        "  10:00:00      +0s  seen             Reboot Scheduled\n"
        "  10:00:00      +0s  decided          rule impactful matches it\n"
        "  10:01:01   +1m 1s  hook finished    hook drain: exit code 3\n"
        "                                      | one\n"
        "                                      | \\x1b[2J\\x1b]0;two\\x07\n"
        "  10:01:01   +1m 1s  held             held: exit code 3; Azure starts it at 2026-03-02 10:20:00 UTC\n"
        "  10:01:10  +1m 10s  machine paused   was paused for 6.2s\n"
        "  10:01:20  +1m 20s  reload rejected  p.yaml:1: one\n"
        "                                      p.yaml:2: two\n"
        "  10:01:30  +1m 30s  agent started    version 0.1.0, mode act\n"
        "  11:01:40   +1h 1m  closed           is over: completed\n"
    )


def test_the_output_of_a_failed_hook_is_as_bright_as_its_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "of", lambda _: Terminal(width=None, has_colors=True))
    _, out, _ = run("--event", "602d9444-a")
    assert "| one" in [line.lstrip() for line in out.splitlines()]


def test_history_interleaves_agent_records_by_time(run: Run) -> None:
    lines = run()[1].splitlines()
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert heads == [
        f"{DAY} 09:00:00 UTC  agent started: version 0.1.0, mode act",
        "Reboot 602D9444-AAAA is over: completed",
        f"{DAY} 12:00:00 UTC  reloaded: rules: impactful",
        f"{DAY} 13:00:00 UTC  reload rejected: p.yaml:1: one",
        "Freeze 602D9444-BBBB is pending: held",
    ]
    assert lines[lines.index(heads[3]) + 1] == "    p.yaml:2: two"
    assert sum("was paused for" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--since", HALF_A_DAY_LATER], ["602D9444-BBBB"]),
        (["--since", f"{DAY}T11:00:00Z"], ["602D9444-AAAA", "602D9444-BBBB"]),
        (["--since", f"{DAY}T12:00:00+00:00"], ["602D9444-BBBB"]),
        (["--limit", "1"], ["602D9444-BBBB"]),
        (["--limit", "0"], ["602D9444-AAAA", "602D9444-BBBB"]),
        (["--event", "602D9444-AAAA"], ["602D9444-AAAA"]),
    ],
)
def test_events_are_chosen(run: Run, options: list[str], expected: list[str]) -> None:
    array = json.loads(run(*options, "--json")[1])["histories"]
    assert [item["event"]["id"] for item in array if item["event"]] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ALL),
        (["--limit", "0"], ALL),
        (["--limit", "1"], ["13:00:00"]),  # the reboot is none of the shown events
        (["--since", HALF_A_DAY_LATER], []),
        (["--since", f"{DAY}T10:01:15Z"], ALL[2:]),
        (["--event", "602d9444-a"], ALL[1:4]),
        (["--event", "602d9444-b"], []),
    ],
)
def test_text_and_json_have_the_same_records_of_the_journal(
    run: Run, state_dir: Path, options: list[str], expected: list[str]
) -> None:
    with closing(Store.open_readonly(state_dir)) as store:
        journal = [record for record in store.load_records() if f"{record.at:%H:%M:%S}" in expected]
    journal.sort(key=lambda record: record.at)
    items = json.loads(run(*options, "--json")[1])["histories"]
    agent_records = [item["records"] for item in items if item["event"] is None]
    assert [msgspec.convert(record, JournalRecord) for (record,) in agent_records] == journal
    kinds = "agent started|machine paused|reload rejected|reloaded"
    shown = re.findall(rf"(\d\d:\d\d:\d\d)\D[^:\n]*?  ({kinds})\b", run(*options)[1])
    assert shown == [(f"{record.at:%H:%M:%S}", record.kind.replace("_", " ")) for record in journal]


def test_an_event_with_very_many_records_about_the_agent_shows_the_latest(run: Run, state_dir: Path) -> None:
    began = FREEZE.first_seen_at + timedelta(seconds=1)
    texts = [f"rules: {number:04}" for number in range(MAX_EVENT_RECORDS + 100)]
    with closing(Store.open_client(state_dir)) as store:
        store.record_all([("reloaded", text, began) for text in texts])
    for chosen in ("", "--event 602d9444-b", "--limit 1"):
        for form in ("", "--json"):
            assert re.findall(r"rules: \d+", run(*chosen.split(), *form.split())[1]) == texts[100:]
            everything = run(*chosen.split(), *form.split(), "--limit", "0")[1]
            assert re.findall(r"rules: \d+", everything) == texts


def test_a_record_about_the_agent_during_two_events_is_once_in_the_json(run: Run, state_dir: Path) -> None:
    at = BEGAN + timedelta(minutes=5)
    second = replace(FREEZE, first_seen_at=at - timedelta(seconds=1))
    with closing(Store.open_client(state_dir)) as store:
        commit(store, second, 0, "held", note("seen", "Freeze Scheduled"))
        store.record("machine_paused", "was paused for 7.1s", at)
    out = run("--json")[1]
    assert out.count("was paused for 7.1s") == 1
    lines = run()[1].splitlines()
    assert sum("was paused for 7.1s" in line for line in lines) == 2  # it concerns both timelines


def test_json_is_a_list_of_events_with_their_entries_and_of_notes(run: Run) -> None:
    first, reboot, paused, *_ = json.loads(run("--json")[1])["histories"]
    assert (first["event"], [entry["kind"] for entry in first["records"]]) == (None, ["agent_started"])
    assert (paused["event"], [entry["kind"] for entry in paused["records"]]) == (None, ["machine_paused"])
    assert reboot["event"]["rule"] == "impactful"
    assert [entry["kind"] for entry in reboot["records"]] == [
        "seen", "decided", "hook_finished", "held", "closed",
    ]  # fmt: skip
    assert reboot["records"][2]["detail"] == "one\n\x1b[2J\x1b]0;two\x07"


def test_a_clock_that_was_set_back_changes_no_order(run: Run, state_dir: Path) -> None:
    store = Store.open_client(state_dir)
    commit(store, FREEZE, 60, "recovering", note("recovering", "recovers"))
    commit(store, FREEZE, 10, "closed", note("closed", "is over: completed"))
    store.close()
    lines = run("--event", "602d9444-b")[1].splitlines()[3:]
    assert [re.split(r"  +", line)[-2] for line in lines] == ["seen", "recovering", "closed"]


def test_history_shows_pauses_inside_the_timeline(run: Run, state_dir: Path) -> None:
    store = Store.open_client(state_dir)
    store.record("machine_paused", "was paused for 7.1s", FREEZE.first_seen_at + timedelta(seconds=5))
    store.close()
    lines = run("--event", "602d9444-b")[1].splitlines()
    assert lines[-1] == "  10:00:05  +5s  machine paused  was paused for 7.1s"


def test_an_exact_id_is_chosen_over_a_prefix(run: Run, state_dir: Path) -> None:
    store = Store.open_client(state_dir)
    event = replace(FREEZE.event, id="602D9444-AAAA-1")
    commit(store, replace(FREEZE, id="longer", event=event), 0, "held", note("seen", "Freeze Scheduled"))
    store.close()
    array = json.loads(run("--event", "602d9444-aaaa", "--json")[1])["histories"]
    assert [item["event"]["id"] for item in array if item["event"]] == ["602D9444-AAAA"]


def test_an_empty_result_is_reported(run: Run) -> None:
    assert run("--since", "2999-01-01") == (0, "The journal has no matching entries.\n", "")


def test_a_prefix_that_fits_two_events_or_none_is_answered_with_a_list(run: Run) -> None:
    code, out, err = run("--event", "602D")
    assert (code, out) == (1, "")
    assert err == (
        'scheduled-events-agent: "602D" matches 2 events; give more of the id:\n'
        "  602D9444-AAAA  Reboot  closed\n"
        "  602D9444-BBBB  Freeze  held\n"
    )
    assert run("--event", "7")[2] == (
        'scheduled-events-agent: no event id begins with "7"; known are:\n'
        "  602D9444-AAAA  Reboot  closed\n"
        "  602D9444-BBBB  Freeze  held\n"
    )


def test_history_closes_events_of_another_machine_by_their_journal(run: Run, state_dir: Path) -> None:
    store = Store.open_client(state_dir)
    store.discard_workflows(BEGAN + timedelta(days=1, hours=1), "the state is that of another VM")
    store.close()
    assert run("--event", "602d9444-b")[1].startswith("Freeze 602D9444-BBBB the state is that of another VM\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--since", "yesterday"],
            "expected a duration such as 2d or 1h30m, or a time such as 2022-04-11T22:12:00Z",
        ),
        (
            ["--since", "0001-01-01T00:00:00+14:00"],
            "expected a duration such as 2d or 1h30m, or a time such as 2022-04-11T22:12:00Z",
        ),
        (["--limit", "-1"], "expected a number, 0 for all; got '-1'"),
    ],
)
def test_a_wrong_choice_is_explained(
    run: Run, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*options)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
