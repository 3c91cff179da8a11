"""The state file while another program has it: what waits, what is kept, and whose answer an answer is."""

import contextlib
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
from metric_values import value_of
from state_file import do_not_wait_for_locks, leave_pages, locked
from test_daemon import running

from scheduled_events_agent.daemon import daemon as daemon_module
from scheduled_events_agent.engine import Engine, Executor
from scheduled_events_agent.engine.reporter import EventReporter
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.status import CommandOptions
from scheduled_events_agent.store import FILE_NAME, Request, RequestAnswer, Store, StoreError, WithdrawnError, file
from scheduled_events_agent.telemetry.metrics import Metrics

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
EVENT = ScheduledEvent(id="E1", type="Reboot", status="Scheduled", resources=("vm-1",))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store.open(tmp_path, NOW)) as store:
        do_not_wait_for_locks(store)
        yield store


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY, "locked"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "locked"),
        (sqlite3.SQLITE_LOCKED, "locked"),
        (sqlite3.SQLITE_FULL, "full"),
        (sqlite3.SQLITE_IOERR_WRITE, "full"),
        (sqlite3.SQLITE_IOERR_READ, "write"),
        (sqlite3.SQLITE_READONLY, "write"),
        (sqlite3.SQLITE_CORRUPT, "damaged"),
        (sqlite3.SQLITE_NOTADB, "damaged"),
    ],
)
def test_an_error_of_sqlite_has_the_kind_of_its_cause(code: int, kind: str) -> None:
    error = sqlite3.OperationalError("it says no")
    error.sqlite_errorcode = code  # as SQLite's own errors have it
    assert file.error_kind(error, "write") == kind


def test_a_locked_file_and_a_full_disk_are_distinguished(store: Store) -> None:
    with locked(store.path.parent), pytest.raises(StoreError) as of_lock:
        store.record("machine_paused", "one", NOW)
    leave_pages(store, 0)
    with pytest.raises(StoreError) as of_room:
        store.record_all([("machine_paused", "x" * 8000, NOW)] * 2000)
    assert (of_lock.value.kind, of_room.value.kind) == ("locked", "full")


def test_a_lock_loses_no_notification_and_begins_nothing(store: Store) -> None:
    settings = Settings(
        rules=(Rule(name="all", prepare=("drain",), approve="when-prepared"),),
        hooks={"drain": Hook(run=("/bin/true",))},
        notify=(NotifyTarget(name="ops", to="https://example.com", on=("seen", "preparing")),),
    )
    executor, metrics = mock.create_autospec(Executor, instance=True), Metrics(tuple)
    executor.is_running.return_value = False
    engine = Engine(settings, store, metrics, executor)
    engine.start()
    engine.receive(Identity(name="vm-1", vm_id="id-1"))
    engine.receive(Document(incarnation="1", events=(EVENT,)))
    with locked(store.path.parent):
        assert not engine.run_cycle(NOW)
        assert not engine.run_cycle(NOW)
    executor.start_hook.assert_not_called()
    assert store.outbox.waiting() == {}
    assert value_of(metrics.store_errors.labels("locked")) == 2
    assert engine.run_cycle(NOW)
    executor.start_hook.assert_called_once()
    assert store.outbox.waiting()["ops"].count == 2
    assert value_of(metrics.notifications_dropped.labels("ops", "no_room")) == 0


def test_after_a_failure_the_next_try_waits_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TICK_SECONDS", "_EARLY_TICK_SECONDS"):
        monkeypatch.setattr(daemon_module, name, 20.0)  # less than the watchdog's time limit
    monkeypatch.setattr(daemon_module, "_COMMIT_RETRY_SECONDS", 0.01)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        azure.wait_until(lambda: daemon._reporter.reported is not None, "it has said that it is ready", 60.0)
        do_not_wait_for_locks(daemon._store)
        with locked(tmp_path):
            event = azure.schedule("Reboot")
            errors = daemon._metrics.store_errors.labels("locked")
            azure.wait_until(lambda: value_of(errors) >= 5, "it has tried five times", 50.0)
        azure.wait_approved(event, timeout_seconds=60.0)


def test_records_about_the_agent_are_kept_until_the_lock_ends(store: Store) -> None:
    engine = Engine(Settings(), store, Metrics(tuple), mock.create_autospec(Executor, instance=True))
    engine.start()
    with locked(store.path.parent):
        engine.change_settings(Settings(rules=(Rule(name="new", approve="never"),)))
        engine.reject_settings("line 3 is wrong")
    assert engine.needs_early_cycle  # so it does not wait for an event
    assert engine.run_cycle(None)
    kinds = [(entry.kind, entry.text) for entry in store.load_records()]
    assert kinds[-2:] == [("reloaded", "rules: new"), ("reload_rejected", "line 3 is wrong")]
    assert not engine.needs_early_cycle


def test_of_very_many_records_the_latest_are_kept(store: Store) -> None:
    teller = EventReporter(store, Metrics(tuple), CommandOptions())
    with locked(store.path.parent):
        for number in range(150):
            teller.record("machine_paused", str(number), NOW)
    teller.flush()
    assert [entry.text for entry in store.load_records()] == [str(number) for number in range(50, 150)]


def test_an_agent_that_starts_waits_for_a_lock(tmp_path: Path) -> None:
    Store.open(tmp_path, NOW).close()
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    reported: list[StoreError] = []

    def let_go(error: StoreError) -> None:  # called after two seconds: the agent waits on
        reported.append(error)
        threading.Timer(0.5, other.execute, ["ROLLBACK"]).start()

    with contextlib.closing(Store.open(tmp_path, NOW, let_go)) as store:
        store.record("machine_paused", "it works", NOW)
        assert store._connection.execute("PRAGMA busy_timeout").fetchone() == (2000,)
    other.close()
    assert [error.kind for error in reported] == ["locked"]


def test_a_lock_that_stays_ends_the_start_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_BUSY_SECONDS", 0.1)
    monkeypatch.setattr(file, "_BUSY_AT_START_SECONDS", 0.3)
    Store.open(tmp_path, NOW).close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked: another program uses it") as caught:
            Store.open(tmp_path, NOW)
    assert caught.value.kind == "locked"


def test_the_started_agent_logs_once_that_it_waits_for_a_lock(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    Store.open(state, NOW).close()
    policy = tmp_path / "policy.yaml"
    policy.write_text("imds: {endpoint: 'http://127.0.0.1:9'}\nagent: {listen: 'off', log: {format: json}}\n")
    options = ["--config", str(policy), "--state-dir", str(state)]
    with contextlib.closing(sqlite3.connect(state / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        agent = subprocess.Popen(
            [sys.executable, "-m", "scheduled_events_agent", "run", *options],
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        assert agent.stderr is not None
        line = agent.stderr.readline()
        while "waits up to 20 s" not in line:
            assert line != "", "it ended"
            line = agent.stderr.readline()
        assert "database is locked" in line
        other.execute("ROLLBACK")
    while "agent started" not in (line := agent.stderr.readline()):
        assert line != "", "it ended"
        assert "waits up to" not in line
    agent.kill()
    agent.communicate()


# --- operators' requests


def test_the_number_of_a_request_is_never_used_again(store: Store, tmp_path: Path) -> None:
    with (
        contextlib.closing(Store.open_client(tmp_path)) as first,
        contextlib.closing(Store.open_client(tmp_path)) as second,
    ):
        one = first.add_request("A", "hold", "kim", NOW)
        assert [request.id for request in store.load_requests(NOW)] == [one]
        first.withdraw_request(one)
        two = second.add_request("B", "hold", "lee", NOW)
        with pytest.raises(WithdrawnError):
            store.commit([], NOW, {one: RequestAnswer(succeeded=True, message="held: the event is held")})
        assert second.load_answer(two) is None


@pytest.mark.parametrize("seed", range(200))
def test_an_answer_reaches_the_request_for_which_it_was_made(store: Store, tmp_path: Path, seed: int) -> None:
    """Two clients, one of them interrupted, beside an agent that loads requests and answers them later."""
    dice, known = random.Random(seed), dict[int, RequestAnswer]()
    asked: dict[str, int] = {}
    with contextlib.closing(Store.open_client(tmp_path)) as client:
        for _ in range(30):
            who = dice.choice("AB")
            match dice.choice(["ask", "interrupt", "load", "commit"]):
                case "ask" if who not in asked:
                    asked[who] = client.add_request(who, "hold", who, NOW)
                case "interrupt" if who == "A" and who in asked:
                    client.withdraw_request(asked.pop(who))
                case "load":
                    known = {
                        request.id: RequestAnswer(succeeded=True, message=request.workflow_id)
                        for request in store.load_requests(NOW)
                        if isinstance(request, Request)
                    }
                case "commit" if known:
                    with contextlib.suppress(WithdrawnError):
                        store.commit([], NOW, known)
                    known = {}
            for name, number in asked.items():
                assert client.load_answer(number) in (None, RequestAnswer(succeeded=True, message=name))
            for name in [name for name, number in asked.items() if client.load_answer(number)]:
                client.withdraw_request(asked.pop(name))
