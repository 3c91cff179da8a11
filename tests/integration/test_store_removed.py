"""The state file is removed or replaced while it is open: the store goes on with a copy of what it has open."""

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
import structlog
from metric_values import value_of

from scheduled_events_agent import host
from scheduled_events_agent.engine import Engine, Executor
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Decision, Hook, Rule
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.store import FILE_NAME, LOCK_NAME, RESERVE_BYTES, Store, StoreError
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Record, Transition, Workflow

if sys.platform == "win32":
    pytest.skip("Windows neither removes nor replaces a file that is open", allow_module_level=True)

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
SETTINGS = Settings(
    rules=(Rule(name="all", prepare=("drain",), recover=("resume",), approve="when-prepared"),),
    hooks={name: Hook(run=("/bin/true",)) for name in ("drain", "resume")},
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "state"
    host.create_private_dir(place)
    return place


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    lock = host.acquire_lock(directory / LOCK_NAME)
    with contextlib.closing(Store.open(directory, NOW, lock=lock)) as store:
        yield store


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def remove_files(directory: Path) -> None:
    for path in directory.glob(f"{FILE_NAME}*"):
        path.unlink()


def replace_file(directory: Path) -> None:
    """By what it was some time ago, with the log of then."""
    for path in directory.glob(f"{FILE_NAME}*"):
        old = Path(shutil.copy(path, directory / "old"))
        old.replace(path)


LOSSES = [remove_directory, remove_files, replace_file]


def make_step(name: str) -> Transition:
    workflow = Workflow(
        id=name,
        event=ScheduledEvent(id=name, type="Reboot", status="Scheduled", resources=("vm-1",)),
        decision=Decision(rule="all", reason="type is Reboot", affects="self"),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot-1",
    )
    return Transition(workflow=workflow, records=(Record(kind="seen", text=name),))


def ids(store: Store) -> list[str]:
    return [workflow.id for workflow in store.load_workflows()]


@pytest.mark.parametrize("lose", LOSSES)
def test_the_content_of_the_removed_file_is_in_the_new_one(
    store: Store, directory: Path, lose: Callable[[Path], None]
) -> None:
    store.commit([make_step("one")], NOW, notifications=[("ops", "body")])
    store.set_meta({"hook_times": "all of them"})
    assert store.recreate_if_removed() == ""
    lose(directory)
    store.commit([make_step("two")], NOW)
    assert str(directory) in store.recreate_if_removed()
    assert store.recreate_if_removed() == ""
    assert store.recreations == 1
    store.commit([make_step("three")], NOW)
    with contextlib.closing(Store.open_readonly(directory)) as other:
        assert ids(other) == ["one", "two", "three"]
        assert other.get_meta("hook_times") == "all of them"
        assert other.outbox.waiting()["ops"].count == 1
    request = None
    with contextlib.closing(Store.open_client(directory)) as other:
        request = other.add_request("one", "hold", "kim", NOW)
    assert [one.id for one in store.load_requests(NOW)] == [request]
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {path.name for path in directory.iterdir()} >= {FILE_NAME, f"{FILE_NAME}-wal", LOCK_NAME}
    assert not list(directory.glob("*.copy*"))


@pytest.mark.parametrize("lose", LOSSES)
def test_after_a_kill_all_that_was_committed_is_there(directory: Path, lose: Callable[[Path], None]) -> None:
    code = f"""
import os, sys
from test_store_removed import *
store = Store.open(Path({str(directory)!r}), NOW)
store.commit([make_step("one")], NOW)
{lose.__name__}(Path({str(directory)!r}))
assert store.recreate_if_removed()
store.commit([make_step("two")], NOW)
os.kill(os.getpid(), 9)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -9
    with contextlib.closing(Store.open(directory, NOW)) as store:
        assert ids(store) == ["one", "two"]
        assert store.quarantined_path is None
        assert store.get_meta("state_lost") == ""


def test_the_new_file_gets_its_reserve(store: Store, directory: Path) -> None:
    assert store.ensure_reserve() == ""
    shutil.rmtree(directory)
    assert store.recreate_if_removed()
    assert store.ensure_reserve() == ""
    assert store.reserve_bytes() >= RESERVE_BYTES


def test_the_log_of_a_replaced_file_is_not_applied(store: Store, directory: Path) -> None:
    store.commit([make_step("one")], NOW)
    remove_files(directory)
    with contextlib.closing(Store.open(directory, NOW)) as other:
        other.commit([make_step("other")], NOW)
        assert "was replaced" in store.recreate_if_removed()
        store.commit([make_step("two")], NOW)
        other.commit([make_step("more")], NOW)
    store.commit([make_step("three")], NOW)
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as reader:
        assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert reader.execute("SELECT id FROM workflow ORDER BY rowid").fetchall() == [
            ("one",),
            ("two",),
            ("three",),
        ]  # and nothing of the other


def test_a_removed_lock_is_acquired_again(store: Store, directory: Path) -> None:
    (directory / LOCK_NAME).unlink()
    assert store.recreate_if_removed() == f"{directory / LOCK_NAME} was removed"
    with pytest.raises(host.HostError, match="has locked it"):
        host.acquire_lock(directory / LOCK_NAME)
    store.close()
    host.acquire_lock(directory / LOCK_NAME).close()


def test_while_another_agent_has_the_new_lock_its_files_are_left_alone(store: Store, directory: Path) -> None:
    store.commit([make_step("one")], NOW)
    shutil.rmtree(directory)
    host.create_private_dir(directory)
    lock = host.acquire_lock(directory / LOCK_NAME)
    with contextlib.closing(Store.open(directory, NOW, lock=lock)) as other:
        other.commit([make_step("other")], NOW)
        for _ in range(2):
            with pytest.raises(StoreError, match="another agent") as caught:
                store.recreate_if_removed()
            assert caught.value.kind == "removed"
        log = (directory / f"{FILE_NAME}-wal").read_bytes()
        store.close()
        assert (directory / f"{FILE_NAME}-wal").read_bytes() == log
        assert ids(other) == ["other"]


def test_a_failed_try_is_repeated(store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit([make_step("one")], NOW)
    shutil.rmtree(directory)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(StoreError, match=r"was removed, and cannot be created again: .*No space left"):
            store.recreate_if_removed()
    assert [path.name for path in directory.iterdir()] == [LOCK_NAME]
    assert store.recreate_if_removed()
    assert ids(store) == ["one"]


def test_an_engine_begins_nothing_until_the_file_is_in_its_place(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, metrics = mock.create_autospec(Executor, instance=True), Metrics(tuple)
    executor.is_running.return_value = False
    engine = Engine(SETTINGS, store, metrics, executor)
    engine.start()
    engine.receive(Identity(name="vm-1", vm_id="id-1"))
    event = ScheduledEvent(id="E1", type="Reboot", status="Scheduled", resources=("vm-1",))
    engine.receive(Document(incarnation="1", events=(event,)))
    shutil.rmtree(directory)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(host, "create_private_dir", mock.Mock(side_effect=OSError(30, "Read-only file system")))
        assert not engine.run_cycle(NOW)
        assert not engine.run_cycle(NOW)
    executor.start_hook.assert_not_called()
    assert "Read-only file system" in engine.store_failure
    assert value_of(metrics.store_errors.labels("removed")) == 2
    with structlog.testing.capture_logs() as logs:
        assert engine.run_cycle(NOW)
        assert engine.run_cycle(NOW)
    engine.maintain()
    executor.start_hook.assert_called_once()
    assert engine.store_failure == ""
    assert value_of(metrics.store_errors.labels("removed")) == 3
    assert [log["reason"] for log in logs if log["log_level"] == "error"] == [f"{directory} was removed"]
    records = [entry.text for entry in store.load_records(kind="state_recreated")]
    assert records == [f"{directory} was removed; created again, nothing is lost"]
    assert store.reserve_bytes() >= RESERVE_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_the_file_is_not_recreated_on_another_device(store: Store, directory: Path) -> None:
    store.commit([make_step("one")], NOW)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "none", directory], check=False)
    if done.returncode:
        pytest.skip("mounting is not possible here")
    try:
        with pytest.raises(StoreError, match="is on another device than before"):
            store.recreate_if_removed()
        assert list(directory.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
    assert store.recreate_if_removed() == ""
