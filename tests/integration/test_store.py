"""The state file in its normal life: durable, all or nothing, shared with other processes, brought up to date."""

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import structlog
from metric_values import value_of
from msgspec.structs import replace
from state_file import change, free_disk, leave_pages, query

from scheduled_events_agent import host
from scheduled_events_agent.engine import Engine, Executor, Host, NotificationDone
from scheduled_events_agent.engine.engine import unclean_starts
from scheduled_events_agent.engine.maintenance import StoreMaintenance
from scheduled_events_agent.engine.outbox import Outbox
from scheduled_events_agent.engine.reporter import EventReporter
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Decision, Hook, Rule, When
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.status import AgentRecordKind, CommandOptions, JournalRecord, Vm
from scheduled_events_agent.store import (
    FILE_NAME,
    Backlog,
    CommitResult,
    Loss,
    Request,
    RequestAnswer,
    StatusRequest,
    Store,
    StoreError,
    WithdrawnError,
)
from scheduled_events_agent.store import file as store_file
from scheduled_events_agent.store import store as store_module
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Phase, Record, Transition, Workflow

NOW = datetime(2026, 5, 4, 12, 0, 0, 123456, tzinfo=UTC)
VM = Vm(names=("vm-1",), vm_id="")


def make_workflow(name: str, phase: Phase = "waiting") -> Workflow:
    return Workflow(
        id=name,
        event=ScheduledEvent(id=name.upper(), type="Reboot", status="Scheduled", resources=("vm-1",)),
        decision=Decision(rule="reboots", reason="type is Reboot", affects="self"),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot-1",
        phase=phase,
    )


def make_step(name: str, *texts: str, phase: Phase = "waiting") -> Transition:
    return Transition(
        workflow=make_workflow(name, phase), records=tuple(Record(kind="seen", text=text) for text in texts)
    )


def run_python(program: str, *arguments: str) -> str:
    """Run a program in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path, NOW)
    yield store
    store.close()


@pytest.fixture
def second(store: Store) -> Iterator[Store]:
    """A second store on the same file, as another process opens it."""
    second = Store.open_client(store.path.parent)
    yield second
    second.close()


def test_a_new_file_is_empty_and_nothing_was_quarantined(store: Store) -> None:
    assert store.quarantined_path is None
    assert store.load_workflows() == []
    assert store.load_journal() == []
    assert store.get_meta("state_lost") == ""


def test_a_commit_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path, NOW)
    store.commit([make_step("one", "seen"), make_step("two", "seen")], NOW)
    store.close()
    store = Store.open(tmp_path, NOW)
    assert store.load_workflows() == [make_workflow("one"), make_workflow("two")]
    assert store.quarantined_path is None
    store.close()


def test_a_commit_survives_a_killed_process(tmp_path: Path) -> None:
    program = """
import os, sys
from datetime import UTC, datetime
from pathlib import Path
from test_store import make_step
from scheduled_events_agent.store import Store
Store.open(Path(sys.argv[1]), datetime.now(UTC)).commit([make_step("one", "seen")], datetime.now(UTC))
print("committed", flush=True)
os.kill(os.getpid(), 9)
"""
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, env=paths, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "committed\n", done.stderr
    store = Store.open(tmp_path, NOW)
    assert [workflow.id for workflow in store.load_workflows()] == ["one"]
    store.close()


def test_a_later_version_of_a_workflow_replaces_the_earlier_one_in_place(store: Store) -> None:
    store.commit([make_step("one"), make_step("two")], NOW)
    store.commit([make_step("one", phase="preparing")], NOW)
    store.commit([make_step("three", phase="preparing"), make_step("three", phase="prepared")], NOW)
    assert [(w.id, w.phase) for w in store.load_workflows()] == [
        ("one", "preparing"),
        ("two", "waiting"),
        ("three", "prepared"),
    ]


def test_a_closed_workflow_is_not_loaded_and_its_journal_stays(store: Store) -> None:
    store.commit([make_step("one", "seen")], NOW)
    store.commit([make_step("one", "over", phase="closed")], NOW)
    assert store.load_workflows() == []
    assert [entry.text for entry in store.load_journal()] == ["seen", "over"]


def test_the_journal_is_in_the_order_of_what_happened(store: Store) -> None:
    store.record("agent_started", "version 1", NOW)
    store.commit([make_step("one", "first", "second"), make_step("two", "third")], NOW)
    store.commit([make_step("one", "fourth")], NOW - timedelta(hours=1))  # the clock was set back
    assert [(entry.key, entry.text) for entry in store.load_journal()] == [
        ("", "version 1"),
        ("one", "first"),
        ("one", "second"),
        ("two", "third"),
        ("one", "fourth"),
    ]


def test_a_journal_entry_says_when_which_event_stage_and_hook(store: Store) -> None:
    note = Record(
        kind="hook_finished",
        stage="prepare",
        hook="drain",
        outcome="failed",
        text="drain failed",
        detail="its last words",
    )
    store.commit([Transition(workflow=make_workflow("one"), records=(note,))], NOW)
    assert store.load_journal() == [
        JournalRecord(
            at=NOW,
            key="one",
            event_id="ONE",
            kind="hook_finished",
            stage="prepare",
            hook="drain",
            outcome="failed",
            text="drain failed",
            detail="its last words",
        )
    ]


def test_a_commit_that_fails_in_the_middle_leaves_nothing_behind(store: Store) -> None:
    store.commit([make_step("one", "seen")], NOW)
    leave_pages(store, 0)
    with pytest.raises(StoreError) as caught:
        store.commit([make_step("two", "seen"), make_step("three", "x" * 100_000)], NOW)
    assert str(caught.value) == f"cannot write {store.path}: database or disk is full"
    assert caught.value.kind == "full"
    free_disk(store)
    assert [workflow.id for workflow in store.load_workflows()] == ["one"]
    assert [entry.text for entry in store.load_journal()] == ["seen"]


def test_notifications_are_dropped_if_only_the_transition_has_space(store: Store) -> None:
    leave_pages(store, 4)
    large = ("ops", "x" * 100_000)
    result = store.commit([make_step("one", "seen")], NOW, {}, [large, ("chat", "{}")])
    assert result == CommitResult(dropped=(large, ("chat", "{}")), reason="no_room")
    assert [workflow.id for workflow in store.load_workflows()] == ["one"]
    assert [entry.text for entry in store.load_journal()] == ["seen"]
    assert store.outbox.waiting() == {}


def test_a_transition_without_space_even_without_notifications_is_an_error(store: Store) -> None:
    leave_pages(store, 4)
    with pytest.raises(StoreError) as caught:
        store.commit([make_step("one", *("x" * 8000 for _ in range(20)))], NOW, {}, [("ops", "{}")])
    assert caught.value.kind == "full"
    assert store.load_workflows() == []


def test_a_commit_names_older_notifications_lost_to_the_limit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.store.outbox.MAX_NOTIFICATIONS", 2)
    assert store.commit([make_step("one")], NOW, {}, [("ops", "1"), ("ops", "2"), ("chat", "3")]) == CommitResult()
    result = store.commit([make_step("one")], NOW, {}, [("ops", "4")])
    assert result == CommitResult(dropped=(("ops", "1"),), reason="too_many")


def test_on_a_full_disk_an_event_is_committed_and_lost_notifications_are_counted(store: Store) -> None:
    names = [f"ops-{number}" for number in range(100)]
    settings = Settings(
        rules=(Rule(name="all", prepare=("drain",), approve="when-prepared"),),
        hooks={"drain": Hook(run=("/bin/true",))},
        notify=tuple(NotifyTarget(name=name, to="https://example.com", on=("seen",)) for name in names),
    )
    metrics, executor = Metrics(tuple), mock.create_autospec(Executor, instance=True)
    executor.is_running.return_value = False
    notify = mock.Mock()
    engine = Engine(settings, store, metrics, executor, notify=notify)
    engine.start()
    engine.receive(Identity(name="vm-1", vm_id="id-1"))
    assert engine.run_cycle(None)
    leave_pages(store, 8)
    engine.receive(Document(incarnation="1", events=(make_workflow("one").event,)))
    assert engine.run_cycle(NOW)
    assert [workflow.event.id for workflow in store.load_workflows()] == ["ONE"]
    executor.start_hook.assert_called_once()
    notify.assert_not_called()
    assert store.outbox.waiting() == {}
    assert {value_of(metrics.notifications_dropped.labels(name, "no_room")) for name in names} == {1}
    assert set(engine.outbox.losses) == set(names)
    free_disk(store)
    assert engine.run_cycle(NOW)
    lost = [entry.text for entry in store.load_records(kind="notification_lost")]
    assert lost == [f"{name}: seen of ONE: the disk is full" for name in names]


def test_a_lost_notification_is_counted_until_the_next_one_is_delivered(store: Store) -> None:
    settings = Settings(notify=(NotifyTarget(name="ops", to="https://example.com"),))
    notify = mock.Mock()

    def restarted() -> Outbox:
        return Outbox(store, Metrics(tuple), notify, CommandOptions())

    notifying = restarted()
    steps = [make_step(name, "seen") for name in ("one", "two", "three")]
    store.commit(steps, NOW, {}, notifying.make(steps, {}, NOW, VM, settings))
    with structlog.testing.capture_logs() as log:
        for id_, reason in ((1, "it answers 400"), (2, "too old: it answers 503")):
            notifying.end(NotificationDone(id_, "ops", reason))
            notifying.purge(settings.notify, NOW + timedelta(seconds=id_))
    one, two = (step.workflow.event.id for step in steps[:2])
    reasons = [(entry["log_id"], entry["kind"], entry["event_id"], entry["reason"]) for entry in log]
    assert reasons == [
        (LogId.NOTIFICATIONS_DROPPED, "seen", one, "it answers 400"),
        (LogId.NOTIFICATIONS_DROPPED, "seen", two, "too old: it answers 503"),
    ]
    assert [entry.text for entry in store.load_records(kind="notification_lost")] == [
        f"ops: seen of {one}: it answers 400",
        f"ops: seen of {two}: too old: it answers 503",
    ]
    notifying.end(NotificationDone(1, "ops", "it answers 400"))  # it is no longer there
    notifying.purge(settings.notify, NOW)
    assert store.outbox.waiting()["ops"].count == 1
    loss = Loss(count=2, since=NOW + timedelta(seconds=1), reason="too old: it answers 503")
    assert restarted().losses == {"ops": loss}
    notifying = restarted()
    notifying.end(NotificationDone(3, "ops"))
    notifying.purge(settings.notify, NOW)
    assert notifying.losses == {}
    assert restarted().losses == {}
    assert len(store.load_records(kind="notification_lost")) == 2


def test_what_has_expired_is_recorded_and_needs_no_attention(store: Store) -> None:
    settings = Settings(notify=(NotifyTarget(name="ops", to="https://example.com"),))
    notifying = Outbox(store, Metrics(tuple), mock.Mock(), CommandOptions())
    steps = [make_step("one", "seen")]
    store.commit(steps, NOW, {}, notifying.make(steps, {}, NOW, VM, settings))
    notifying.end(NotificationDone(1, "ops", "expired: an hour old", is_expired=True))
    notifying.purge(settings.notify, NOW)
    assert notifying.losses == {}
    (record,) = store.load_records(kind="notification_lost")
    assert record.text.endswith(": expired: an hour old")


def test_a_target_without_conditions_is_notified_of_recommendations_too(store: Store) -> None:
    settings = Settings(
        notify=(
            NotifyTarget(name="all", to="https://example.com"),
            NotifyTarget(name="reboots", to="https://example.com", when=When(type=("Reboot",))),
        )
    )
    notify = mock.Mock()
    notifying = Outbox(store, Metrics(tuple), notify, CommandOptions())
    step = make_step("one", "seen")
    event = replace(step.workflow.event, type="SpotRebalanceRecommendation")
    step = replace(step, workflow=replace(step.workflow, event=event))
    assert [target for target, _ in notifying.make([step], {}, NOW, VM, settings)] == ["all"]


def test_notifications_are_committed_with_their_transition_or_not_at_all(store: Store) -> None:
    store.commit([make_step("one", "seen")], NOW, None, [("ops", "{}")])
    with pytest.raises(WithdrawnError):
        store.commit(
            [make_step("one", "held")],
            NOW,
            {99: RequestAnswer(succeeded=True, message="no such request")},
            [("ops", "{}")],
        )
    assert store.outbox.waiting() == {"ops": Backlog(count=1, oldest_at=NOW)}
    store.end_notifications([1])
    assert store.outbox.waiting() == {}


def test_after_a_failed_commit_the_next_one_works(store: Store) -> None:
    leave_pages(store, 0)
    with pytest.raises(StoreError):
        store.commit([make_step("one", "x" * 100_000)], NOW)
    free_disk(store)
    store.commit([make_step("one", "x" * 100_000)], NOW)
    assert [workflow.id for workflow in store.load_workflows()] == ["one"]


def test_a_reader_never_sees_half_a_commit(store: Store, second: Store) -> None:
    broken: list[tuple[str, str]] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            workflows = {workflow.id: workflow.phase for workflow in second.load_workflows()}
            if workflows.get("one") != workflows.get("two"):
                broken.append((workflows.get("one", ""), workflows.get("two", "")))

    reader = threading.Thread(target=read)
    reader.start()
    phases: tuple[Phase, ...] = ("waiting", "preparing", "prepared", "approved")
    for number in range(40):
        phase = phases[number % 4]
        store.commit([make_step("one", phase=phase), make_step("two", phase=phase)], NOW)
    is_over.set()
    reader.join()
    assert broken == []


def test_commits_are_synced_to_the_disk(store: Store) -> None:
    assert query(store, "PRAGMA journal_mode") == [("wal",)]
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
def test_only_the_owner_can_read_the_files_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = Store.open(tmp_path, NOW)
        store.commit([make_step("one")], NOW)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(old)
    assert modes == {FILE_NAME: 0o600, f"{FILE_NAME}-wal": 0o600, f"{FILE_NAME}-shm": 0o600}


# --- facts, pruning, disowning


def test_meta_values_are_stored_and_replaced(store: Store) -> None:
    store.set_meta({"vm_name": "vm-1", "vm_id": "id-1"})
    store.set_meta({"vm_name": "vm-2"})
    assert (store.get_meta("vm_name"), store.get_meta("vm_id")) == ("vm-2", "id-1")


def test_pruning_forgets_what_ended_long_ago_and_nothing_that_is_open(store: Store) -> None:
    long_ago = NOW - timedelta(days=100)
    store.commit([make_step("open", "old and open")], long_ago)
    store.commit([make_step("closed", "old and closed", phase="closed")], long_ago)
    store.record("agent_started", "old", long_ago)
    store.commit([make_step("recent", "recent", phase="closed")], NOW)
    store.add_request("open", "hold", "root", long_ago)
    store.prune(NOW - timedelta(days=90))
    assert [workflow.id for workflow in store.load_workflows()] == ["open"]
    assert [entry.text for entry in store.load_journal()] == ["old and open", "recent"]
    assert query(store, "SELECT * FROM request") == []


def test_discarded_workflows_are_closed_with_the_reason_in_the_journal(store: Store) -> None:
    store.commit([make_step("one"), make_step("two")], NOW)
    store.discard_workflows(NOW, "another machine's")
    assert store.load_workflows() == []
    assert [(entry.key, entry.kind, entry.text) for entry in store.load_journal()] == [
        ("one", "closed", "another machine's"),
        ("two", "closed", "another machine's"),
    ]


@pytest.mark.parametrize(
    ("limit", "most", "kept"),
    [("MAX_EVENTS", 20, 20), ("MAX_BYTES", 800_000, 300)],
    ids=["number", "size"],
)
def test_too_many_events_are_pruned_oldest_first_in_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, kept: int
) -> None:
    monkeypatch.setattr(store_module, limit, most)
    store.commit([make_step("open", "seen")], NOW)
    for number in range(400):
        store.commit([make_step(f"event-{number}", "x" * 1000, phase="closed")], NOW)
    portions = 1
    while store.prune(NOW - timedelta(days=90)):
        portions += 1
    assert portions > 1
    left = [workflow.id for workflow in store.find_workflows()]
    assert left == ["open", *(f"event-{number}" for number in range(401 - len(left), 400))]
    assert kept / 2 < len(left) <= kept
    assert len(store.load_journal()) == len(left)
    assert store._size_bytes() <= store_module.MAX_BYTES


def test_a_long_journal_of_one_event_keeps_beginning_and_end(store: Store) -> None:
    for number in range(0, 3000, 100):
        store.commit([make_step("one", *(f"note {n}" for n in range(number, number + 100)))], NOW)
    while store.prune(NOW - timedelta(days=90)):
        pass
    texts = [entry.text for entry in store.load_journal()]
    assert texts == [f"note {number}" for number in (*range(100), *range(2600, 3000))]


def test_the_latest_records_about_the_agent_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RECORDS", 30)
    for number in range(100):
        store.record("machine_paused", f"note {number}", NOW)
    while store.prune(NOW - timedelta(days=90)):
        pass
    assert [entry.text for entry in store.load_records()] == [f"note {number}" for number in range(70, 100)]


def test_the_latest_records_of_each_kind_about_the_agent_are_loaded(store: Store) -> None:
    for number in range(5):
        store.record("machine_paused", f"pause {number}", NOW)
        store.record_all([("reloaded", f"reload {number} {again}", NOW) for again in range(10)])
    store.commit([make_step("one", "note")], NOW)
    texts = [record.text for record in store.load_records(limit=2)]
    assert texts == ["pause 3", "pause 4", "reload 4 8", "reload 4 9"]


def test_long_texts_are_cut_in_the_journal(store: Store) -> None:
    store.commit([make_step("one", "x" * 100_000)], NOW)
    store.record("reload_rejected", "y" * 100_000, NOW)
    assert [len(entry.text) for entry in store.load_journal()] == [8000, 8000]


def test_opening_the_file_reads_nothing_of_closed_workflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path, NOW)
    store.commit([make_step("old", "seen", phase="closed"), make_step("open", "seen")], NOW)
    change(
        store,
        "INSERT INTO workflow SELECT id || value, event_id, 0, updated_at, body FROM workflow,"
        " (WITH RECURSIVE numbers(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM numbers WHERE value < 20000)"
        " SELECT value FROM numbers) WHERE id = 'old'",
    )
    store.close()
    work = count_work(monkeypatch)
    openers: tuple[Callable[[], Store], ...] = (
        lambda: Store.open(tmp_path, NOW),
        lambda: Store.open_client(tmp_path),
    )
    for open_ in openers:
        store = open_()
        assert [workflow.id for workflow in store.load_workflows()] == ["open"]
        assert len(store.find_workflows(limit=20)) == 20
        store.close()
    assert len(work) < 20  # thousands of steps of SQLite's machine


def count_work(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets longer with every thousand steps of SQLite's machine that follow."""
    work: list[None] = []
    connect = sqlite3.connect

    def counting(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_progress_handler(lambda: work.append(None), 1000)
        return connection

    monkeypatch.setattr(sqlite3, "connect", counting)
    return work


# --- a full disk


def test_the_reserve_stays_when_the_file_is_closed(tmp_path: Path) -> None:
    store = Store.open(tmp_path, NOW)
    assert store.ensure_reserve() == ""
    store.close()
    Store.open_client(tmp_path).close()
    Store.open_readonly(tmp_path).close()
    log = tmp_path / f"{FILE_NAME}-wal"
    assert log.stat().st_size >= store_file.RESERVE_BYTES
    store = Store.open(tmp_path, NOW)
    assert store.reserve_bytes() >= store_file.RESERVE_BYTES
    store.commit([make_step("one", "seen")], NOW)
    store.close()
    store = Store.open(tmp_path, NOW)
    assert [workflow.id for workflow in store.load_workflows()] == ["one"]
    store.close()


def test_a_small_reserve_is_filled_up_and_a_large_one_left_alone(store: Store) -> None:
    assert store.ensure_reserve() == ""
    changes = store._connection.total_changes
    assert store.ensure_reserve() == ""
    assert store._connection.total_changes == changes
    for _ in range(30):
        store.record("machine_paused", "x" * 8000, NOW)
        change(store, "INSERT INTO meta VALUES (hex(randomblob(8)), hex(randomblob(50000)))")
    assert store.reserve_bytes() < store_file.RESERVE_BYTES * 3 // 4
    assert store.ensure_reserve() == ""
    assert store.reserve_bytes() >= store_file.RESERVE_BYTES


def test_with_little_disk_space_no_reserve_is_created(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10 * 2**20))
    assert store.ensure_reserve() == (
        f"the disk of {store.path} has 10240 KiB left; of the 4096 KiB that the file keeps for a full disk, "
        "0 KiB are left"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no file that is open")
def test_maintenance_without_its_directory_reports_that_and_continues(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    host.create_private_dir(directory)
    store, metrics = Store.open(directory, NOW), Metrics(tuple)
    upkeep = StoreMaintenance(store, metrics, Host(), EventReporter(store, metrics, CommandOptions()))
    shutil.rmtree(directory)  # a cleaner of directories, or a backup that is restored
    with structlog.testing.capture_logs() as logs:
        upkeep.maintain(time.monotonic() + 1.0)
    store.close()
    assert value_of(metrics.store_errors.labels("write")) == 1
    assert [log["reason"] for log in logs] == [
        f"cannot look at the disk of {store.path}: No such file or directory"
    ]


# --- operators' requests


def test_a_request_of_another_process_is_found_and_its_answer_is_read_there(store: Store) -> None:
    program = """
import sys, time
from datetime import UTC, datetime
from pathlib import Path
from scheduled_events_agent.store import Store
store = Store.open_client(Path(sys.argv[1]))
number = store.add_request("one", "approve", "alice", datetime.now(UTC))
while (answer := store.load_answer(number)) is None:
    time.sleep(0.01)
print(answer.succeeded, answer.message)
"""
    printed: list[str] = []
    asker = threading.Thread(target=lambda: printed.append(run_python(program, str(store.path.parent))))
    asker.start()
    deadline = time.monotonic() + 60
    while not (requests := store.load_requests(datetime.now(UTC))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert requests == [Request(id=requests[0].id, workflow_id="one", action="approve", user="alice")]
    store.answer_request(requests[0].id, RequestAnswer(succeeded=True, message="taken: preparing"))
    asker.join()
    assert printed == ["True taken: preparing\n"]


def test_a_status_request_is_its_own_kind_of_message(store: Store, second: Store) -> None:
    question = second.add_status_request(NOW)
    action = second.add_request("one", "release", "root", NOW)
    assert store.load_requests(NOW) == [
        StatusRequest(id=question),
        Request(id=action, workflow_id="one", action="release", user="root"),
    ]
    store.answer_request(question, RequestAnswer(succeeded=True, message="{}"))
    assert second.withdraw_request(question) == RequestAnswer(succeeded=True, message="{}")
    assert [request.id for request in store.load_requests(NOW)] == [action]


def test_an_answered_request_is_not_found_again(store: Store, second: Store) -> None:
    number = second.add_request("one", "hold", "root", NOW)
    assert [request.id for request in store.load_requests(NOW)] == [number]
    store.answer_request(number, RequestAnswer(succeeded=True, message="taken"))
    second.set_meta({"vm_name": "vm-1"})  # so that the file looks changed
    assert store.load_requests(NOW) == []


def test_a_request_that_was_not_read_in_time_is_void(store: Store, second: Store) -> None:
    second.add_request("one", "approve", "root", NOW - timedelta(seconds=31))
    assert store.load_requests(NOW) == []


def test_a_withdrawn_request_is_not_found(store: Store, second: Store) -> None:
    number = second.add_request("one", "approve", "root", NOW)
    second.withdraw_request(number)
    assert store.load_requests(NOW) == []
    assert second.load_answer(number) is None


# --- schema


def test_a_file_of_an_older_schema_is_migrated_and_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path, NOW)
    store.commit([make_step("one", "seen")], NOW)
    store.close()
    migrations = (*store_file._MIGRATIONS, "ALTER TABLE journal ADD COLUMN host TEXT NOT NULL DEFAULT 'here';")
    monkeypatch.setattr(store_file, "_MIGRATIONS", migrations)
    for _ in range(2):  # the second time there is nothing to do
        store = Store.open(tmp_path, NOW)
        assert store.load_workflows() == [make_workflow("one")]
        assert query(store, "SELECT host, text FROM journal") == [("here", "seen")]
        assert query(store, "PRAGMA user_version") == [(1 + len(migrations),)]
        store.close()
    new = tmp_path / "new"
    new.mkdir()
    with contextlib.closing(Store.open(new, NOW)) as store:
        assert query(store, "SELECT host FROM journal") == []


def test_a_migration_that_fails_in_the_middle_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path, NOW)
    store.commit([make_step("one")], NOW)
    ((pages,),) = query(store, "PRAGMA page_count")
    store.close()
    filling = "CREATE TABLE more (text TEXT); INSERT INTO more VALUES (zeroblob(100000));"
    limited = f"COMMIT; PRAGMA max_page_count = {pages}; BEGIN IMMEDIATE; {filling}"
    with monkeypatch.context() as patch:
        patch.setattr(store_file, "_MIGRATIONS", (*store_file._MIGRATIONS, limited))
        with pytest.raises(StoreError) as caught:
            Store.open(tmp_path, NOW)
    path = tmp_path / FILE_NAME
    assert str(caught.value) == f"cannot open the state file {path}: database or disk is full"
    assert caught.value.kind == "full"
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path is None
    assert store.load_workflows() == [make_workflow("one")]
    store.close()


def test_a_file_of_a_newer_schema_is_rejected_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    Store.open(tmp_path, NOW).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path, NOW)
    assert str(caught.value) == (
        f"{path} was written by a newer version of the agent (schema 99, known {store_file._known_version()}): "
        "install that version again, or move the file away"
    )
    assert caught.value.kind == "newer"
    assert path.read_bytes() == before


def test_a_client_of_an_older_file_does_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(tmp_path, NOW).close()
    monkeypatch.setattr(store_file, "_MIGRATIONS", (*store_file._MIGRATIONS, "CREATE TABLE more (text TEXT);"))
    with pytest.raises(StoreError) as caught:
        Store.open_client(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / FILE_NAME} was written by an older version of the agent (schema 1, known 2): "
        "restart the agent, which brings it up to date"
    )
    store = Store.open(tmp_path, NOW)
    assert query(store, "SELECT * FROM more") == []
    store.close()


def test_a_client_needs_a_file_made_by_an_agent(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open_client(tmp_path)
    assert str(caught.value) == (f"no agent has run with the state directory {tmp_path}: name it with --state-dir")
    assert list(tmp_path.iterdir()) == []


# --- what is no text


def test_bytes_that_are_no_text_are_written_with_marks_and_the_rest_goes_on(store: Store) -> None:
    path = "/etc/p\udcff.yaml"  # as Python reads a byte that is not UTF-8
    note = Record(kind="hook_finished", text=f"{path} failed", hook="drain", outcome="failed", detail=f"at {path}")
    store.commit([Transition(workflow=make_workflow("one"), records=(note,))], NOW)
    store.record("reload_rejected", f"{path}:1: unknown key", NOW)
    number = store.add_request("one", "approve", path, NOW)
    assert [(entry.text, entry.detail) for entry in store.load_journal()] == [
        ("/etc/p?.yaml failed", "at /etc/p?.yaml"),
        ("/etc/p?.yaml:1: unknown key", ""),
    ]
    asked = Request(id=number, workflow_id="one", action="approve", user="/etc/p?.yaml")
    assert store.load_requests(NOW) == [asked]


@pytest.mark.skipif(sys.platform == "win32", reason="paths are text on Windows")
def test_a_directory_whose_name_is_no_text_may_hold_the_file(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"st\xffate")
    place.mkdir()
    store = Store.open(place, NOW)
    store.commit([make_step("one", "seen")], NOW)
    store.close()
    (place / FILE_NAME).write_bytes(b"garbage")
    store = Store.open(place, NOW)
    assert store.get_meta("state_lost") == "file is not a database"
    store.close()


# --- others in the way


def test_a_write_lock_of_another_process_fails_a_commit_in_time_with_a_reason(store: Store) -> None:
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.commit([make_step("one")], NOW)
    assert time.monotonic() - began < 60  # the other one would hold it for ever
    assert str(caught.value) == f"cannot write {store.path}: database is locked"
    other.execute("COMMIT")
    other.close()
    store.commit([make_step("one")], NOW)
    assert [workflow.id for workflow in store.load_workflows()] == ["one"]


def test_a_file_locked_by_another_process_does_not_count_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "_BUSY_AT_START_SECONDS", 2.5)
    Store.open(tmp_path, NOW).close()
    path = tmp_path / FILE_NAME
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path, NOW)
    assert time.monotonic() - began < 60  # the other one would hold it for ever
    reason = "database is locked: another program uses it, a backup perhaps"
    assert str(caught.value) == f"cannot open the state file {path}: {reason}"
    assert caught.value.kind == "locked"
    other.close()
    names = {file.name for file in tmp_path.iterdir()}
    assert names <= {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}  # nothing was quarantined


@pytest.mark.parametrize("kind", ["cifs", "nfs4", "fuse.blobfuse2"])
def test_state_on_a_file_share_whose_locks_fail_is_said_to_need_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(store_file, "_BUSY_AT_START_SECONDS", 2.5)
    monkeypatch.setattr("scheduled_events_agent.host.processes.file_system", lambda _: (kind, tmp_path))
    Store.open(tmp_path, NOW).close()
    path = tmp_path / FILE_NAME
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError) as caught:
            Store.open(tmp_path, NOW)
    reason = f"database is locked: it is on a file share ({kind}), whose locks may fail; state needs a local disk"
    assert str(caught.value) == f"cannot open the state file {path}: {reason}"


@pytest.mark.skipif(sys.platform == "win32", reason="there a lock is an open file")
def test_a_disk_without_locks_is_not_another_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(host.HostError) as caught:
        host.acquire_lock(tmp_path / "lock")
    reason = "cannot be locked (No locks available); state needs a local disk"
    assert str(caught.value) == f"{tmp_path / 'lock'}: {reason}"


def test_a_missing_directory_is_reported_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path / "missing", NOW)
    assert str(caught.value) == (
        f"cannot open the state file {tmp_path / 'missing' / FILE_NAME}: No such file or directory; "
        "run as the agent's user, or set agent.state_dir to a directory that is writable"
    )
    assert caught.value.kind == "unusable"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
@pytest.mark.parametrize("is_there", [False, True])
def test_a_directory_or_file_of_another_user_is_reported_with_a_hint(tmp_path: Path, is_there: bool) -> None:
    place = tmp_path / "state"
    place.mkdir()
    if is_there:
        Store.open(place, NOW).close()
        (place / FILE_NAME).chmod(0o400)
    place.chmod(0o500)
    program = f"""
import os
from datetime import UTC, datetime
from pathlib import Path
from scheduled_events_agent.store import Store, StoreError
if os.getuid() == 0:  # whom no mode keeps out
    os.chown({str(place)!r}, 65534, 65534)
    if {is_there}:
        os.chown({str(place / FILE_NAME)!r}, 65534, 65534)
    for path in Path({str(place)!r}).parents:
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    os.setuid(65534)
try:
    Store.open(Path({str(place)!r}), datetime.now(UTC))
except StoreError as error:
    print(error.kind, error)
"""
    said = run_python(program)
    place.chmod(0o700)
    assert said == (
        f"unusable cannot open the state file {place / FILE_NAME}: Permission denied; "
        "run as the agent's user, or set agent.state_dir to a directory that is writable\n"
    )


def test_an_impossible_state_file_is_reported_to_clients(tmp_path: Path) -> None:
    (tmp_path / "state.db").mkdir()
    with pytest.raises(StoreError, match=r"^cannot open .*state\.db"):
        Store.open_client(tmp_path)


def test_a_reader_of_the_file_does_not_release_the_locks_of_the_agent(store: Store, tmp_path: Path) -> None:
    store.record("machine_paused", "before", NOW)
    Store.open_readonly(tmp_path).close()  # as the status page does, in the agent's own process
    join = "import pathlib, sys; from scheduled_events_agent.store.store import Store; "
    join += "Store.open_client(pathlib.Path(sys.argv[1])).close()"
    run_python(join, str(tmp_path))  # as the command status does
    store.record("machine_paused", "after", NOW)
    look = (
        "import pathlib, sys; from scheduled_events_agent.store.store import Store;"
        "print([note.text for note in Store.open_readonly(pathlib.Path(sys.argv[1])).load_records()])"
    )
    assert run_python(look, str(tmp_path)) == "['before', 'after']\n"


def test_the_log_is_truncated_when_a_long_reader_has_closed(store: Store) -> None:
    log = store.path.with_name("state.db-wal")
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM journal").fetchone()
        while log.stat().st_size < 8 * 2**20:
            store.record("machine_paused", "x" * 60_000, NOW)
    for _ in range(100):  # one to move everything into the file, the next to begin a new log
        store.record("machine_paused", "x" * 60_000, NOW)
    assert log.stat().st_size < 6 * 2**20


def test_starts_after_a_crash_are_counted_though_the_first_crash_was_long_ago(tmp_path: Path) -> None:
    store = Store.open(tmp_path, NOW)
    records: tuple[tuple[int, AgentRecordKind], ...] = (
        (70, "agent_started"),
        (40, "agent_started"),
        (30, "machine_paused"),
        (20, "agent_started"),
    )
    for minutes, kind in records:
        store.record(kind, "it", NOW - timedelta(minutes=minutes), detail="boot")
    notes = store.load_starts_and_stops(NOW - timedelta(hours=1))
    store.close()
    assert [note.at for note in notes] == [NOW - timedelta(minutes=minutes) for minutes in (70, 40, 20)]
    assert unclean_starts(notes, "boot", NOW) == (*(note.at for note in notes[1:]), NOW)
    assert unclean_starts(notes, "another boot", NOW) == ()
    stop = replace(notes[-1], kind="agent_stopped", at=NOW)
    assert unclean_starts([*notes, stop], "boot", NOW) == tuple(note.at for note in notes[1:])
