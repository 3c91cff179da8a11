"""A damaged state file is quarantined whole and reported. It never prevents a start, and is never half trusted."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from scheduled_events_agent import host
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.store import FILE_NAME, Store, StoreError
from scheduled_events_agent.store import file as store_file
from scheduled_events_agent.workflow import Record, Transition, Workflow

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
ASIDE = f"{FILE_NAME}.damaged-20260504T120000Z"
PAGE = 4096


def make_step(name: str) -> Transition:
    workflow = Workflow(
        id=name,
        event=ScheduledEvent(id=name.upper(), type="Reboot", status="Scheduled", resources=("vm-1",)),
        decision=Decision(rule="reboots", reason="type is Reboot", affects="self"),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot-1",
    )
    return Transition(workflow=workflow, records=(Record(kind="seen", text="x" * 200),))


STEPS = [make_step(f"event-{number}") for number in range(40)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with many open workflows and a journal, of an agent that did not end well."""
    place = tmp_path_factory.mktemp("good")
    store = Store.open(place, NOW)
    for step in STEPS:
        store.commit([step], NOW)
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = (place / FILE_NAME).read_bytes()
    store.close()
    return content


def assert_starts_anew(place: Path, damaged: bytes) -> str:
    """The damaged file is kept under another name; a new one works and remembers. Returns what it remembers."""
    store = Store.open(place, NOW)
    assert store.quarantined_path == place / ASIDE
    if len(damaged) >= 512:  # SQLite takes less for an empty file and makes it a database at once
        assert (place / ASIDE).read_bytes() == damaged
    assert store.load_workflows() == []
    reason = store.get_meta("state_lost")
    assert reason
    store.commit([STEPS[0]], NOW)
    store.close()
    again = Store.open(place, NOW)
    assert again.quarantined_path is None
    assert again.load_workflows() == [STEPS[0].workflow]
    assert again.get_meta("state_lost") == reason
    again.close()
    for file in place.iterdir():
        file.unlink()
    return reason


def test_a_file_truncated_anywhere_is_quarantined(tmp_path: Path, good: bytes) -> None:
    lengths = [0, 1, 15, 16, 99, 100, PAGE - 1, PAGE, PAGE + 1, len(good) - PAGE, len(good) - 1]
    lengths += random.Random(4).sample(range(len(good)), 15)
    for length in lengths:
        (tmp_path / FILE_NAME).write_bytes(good[:length])
        assert assert_starts_anew(tmp_path, good[:length]), length


def test_a_file_with_one_page_overwritten_is_quarantined(tmp_path: Path, good: bytes) -> None:
    chance = random.Random(5)
    places = range(0, len(good), PAGE)
    for start in chance.sample(places, min(12, len(places))):
        for filling in (bytes(PAGE), b"\xff" * PAGE, chance.randbytes(PAGE)):
            damaged = good[:start] + filling + good[start + PAGE :]
            (tmp_path / FILE_NAME).write_bytes(damaged)
            assert_starts_anew(tmp_path, damaged)


def test_single_flipped_bits_never_prevent_the_start(tmp_path: Path, good: bytes) -> None:
    chance = random.Random(6)
    for _ in range(60):
        position = chance.randrange(len(good))
        damaged = bytearray(good)
        damaged[position] ^= 1 << chance.randrange(8)
        (tmp_path / FILE_NAME).write_bytes(damaged)
        store = Store.open(tmp_path, NOW)
        store.load_workflows()
        store.commit([make_step("new")], NOW)
        store.close()
        for file in tmp_path.iterdir():
            file.unlink()


@pytest.mark.parametrize(
    "text", [b"garbage", b"\0" * 10_000, b"SQLite format 3\0" + b"\xaa" * 5000, b"<html>sign in</html>"]
)
def test_a_foreign_file_is_quarantined(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(text)
    assert_starts_anew(tmp_path, text)


def test_an_empty_file_is_a_loss_and_not_a_new_state(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"")
    assert assert_starts_anew(tmp_path, b"") == "there is nothing in it"


def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that is asked of SQLite from now on."""
    asked: list[str] = []
    connect = sqlite3.connect

    def listening(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(asked.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", listening)
    return asked


CHECK = "PRAGMA integrity_check(1)"


def test_the_whole_file_is_checked_after_an_unclean_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_store(tmp_path)
    asked = statements(monkeypatch)
    Store.open_client(tmp_path).close()
    Store.open_readonly(tmp_path).close()
    assert CHECK not in asked  # that is the agent's to do
    Store.open(tmp_path, NOW).close()
    assert asked.count(CHECK) == 1
    Store.open(tmp_path, NOW).close()
    assert asked.count(CHECK) == 1


def test_the_whole_file_is_checked_after_a_kill_even_if_its_log_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_store(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        assert other.execute("SELECT count(*) FROM workflow").fetchone() == (3,)
    assert not (tmp_path / f"{FILE_NAME}-wal").exists()
    asked = statements(monkeypatch)
    store = Store.open(tmp_path, NOW)
    assert asked.count(CHECK) == 1
    assert len(store.load_workflows()) == 3
    store.close()


def test_a_stop_over_damage_is_an_unclean_end(tmp_path: Path, good: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(good)
    Store.open(tmp_path, NOW).close()
    content = (tmp_path / FILE_NAME).read_bytes()
    page_at = content.index(b"x" * 200) // PAGE * PAGE  # of the journal
    (tmp_path / FILE_NAME).write_bytes(content[:page_at] + b"\xff" * PAGE + content[page_at + PAGE :])
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path is None  # it has not been met yet
    with pytest.raises(StoreError) as caught:
        store.load_journal()
    assert caught.value.kind == "damaged"
    store.close()
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path == tmp_path / ASIDE
    store.close()


def test_a_kept_log_is_not_applied_to_a_backup_that_was_restored(tmp_path: Path) -> None:
    store = Store.open(tmp_path, NOW)
    store.commit(STEPS[:1], NOW)
    store.close()
    backup = (tmp_path / FILE_NAME).read_bytes()
    store = Store.open(tmp_path, NOW)
    store.commit(STEPS, NOW)
    store.close()
    (tmp_path / FILE_NAME).write_bytes(backup)
    store = Store.open(tmp_path, NOW)
    assert (store.quarantined_path, store.load_workflows()) == (None, [STEPS[0].workflow])
    store.close()


def test_a_log_kept_in_use_by_another_process_counts_when_the_agent_restarts(tmp_path: Path) -> None:
    place, after = tmp_path / "state", tmp_path / "after a loss of power"
    place.mkdir()
    after.mkdir()
    store = Store.open(place, NOW)
    store.commit(STEPS[:1], NOW)
    with closing(sqlite3.connect(place / FILE_NAME, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM workflow").fetchone() == (1,)
        store.close()
        commit_and_die(place)
        for name in (FILE_NAME, f"{FILE_NAME}-wal"):
            (after / name).write_bytes((place / name).read_bytes())
    store = Store.open(after, NOW)
    assert len(store.load_workflows()) == 3
    store.close()


def spoil(place: Path, statement: str) -> None:
    connection = sqlite3.connect(place / FILE_NAME)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE workflow SET body = '{' WHERE id = 'event-7'", "a workflow in it cannot be read: "),
        (
            """UPDATE workflow SET body = '{"id": "event-7"}' WHERE id = 'event-7'""",
            "a workflow in it cannot be read: Object missing required field `event`",
        ),
        (
            "UPDATE workflow SET body = replace(body, '\"waiting\"', '\"dancing\"') WHERE id = 'event-7'",
            "a workflow in it cannot be read: Invalid enum value 'dancing' - at `$.phase`",
        ),
        (
            "UPDATE workflow SET body = replace(body, '\"prepare\":{', '\"preparation\":{') WHERE id = 'event-7'",
            "a workflow in it cannot be read: Object contains unknown field `preparation`",
        ),
        (
            "UPDATE workflow SET body = CAST(x'ff' AS TEXT) WHERE id = 'event-7'",
            "Could not decode to UTF-8 column",
        ),
        ("DROP TABLE workflow", "no such table: workflow"),
        ("PRAGMA user_version = 0", "there is nothing in it"),
    ],
)
def test_a_workflow_that_cannot_be_read_quarantines_the_whole_file(
    tmp_path: Path, good: bytes, statement: str, reason: str
) -> None:
    (tmp_path / FILE_NAME).write_bytes(good)
    spoil(tmp_path, statement)
    damaged = (tmp_path / FILE_NAME).read_bytes()
    # SQLite marks the file as write-ahead logged when it is opened; nothing else may change.
    store = Store.open(tmp_path, NOW)
    aside = (tmp_path / ASIDE).read_bytes()
    assert aside[100:] == damaged[100:]
    assert store.get_meta("state_lost").startswith(reason)
    assert store.load_workflows() == []
    store.close()


def test_a_closed_workflow_that_cannot_be_read_is_ignored(tmp_path: Path, good: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(good)
    spoil(tmp_path, "UPDATE workflow SET body = '{', is_open = 0 WHERE id = 'event-7'")
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path is None
    assert len(store.load_workflows()) == len(STEPS) - 1
    store.close()


def test_a_row_that_its_index_lacks_is_damage(tmp_path: Path, good: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(good)
    # Through the index alone the workflow would be lost silently.
    spoil(tmp_path, "CREATE TABLE other (number INTEGER)")
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(
        "UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema WHERE name = 'other')"
        " WHERE name = 'other' OR name = 'workflow_open'"
    )
    connection.commit()
    connection.close()
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path == tmp_path / ASIDE
    store.close()


def killed_store(place: Path) -> None:
    """A state file whose process was killed: what it holds is in the write-ahead log."""
    commit_and_die(place)
    assert (place / f"{FILE_NAME}-wal").stat().st_size > 0


def commit_and_die(place: Path) -> None:
    program = f"""
import os, sys
from datetime import UTC, datetime
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store_damage import STEPS
from scheduled_events_agent.store import Store
store = Store.open(Path({str(place)!r}), datetime.now(UTC))
store.commit(STEPS[:3], datetime.now(UTC))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)


def cut_wal(place: Path) -> None:
    wal = place / f"{FILE_NAME}-wal"
    wal.write_bytes(wal.read_bytes()[:10])


def garble_wal(place: Path) -> None:
    wal = place / f"{FILE_NAME}-wal"
    wal.write_bytes(random.Random(7).randbytes(wal.stat().st_size))


@pytest.mark.parametrize(
    "harm",
    [cut_wal, garble_wal, lambda place: (place / f"{FILE_NAME}-wal").unlink()],
    ids=["cut", "garbled", "gone"],
)
def test_a_file_whose_log_was_lost_before_the_open_is_quarantined(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    killed_store(tmp_path)
    harm(tmp_path)
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path == tmp_path / ASIDE
    assert store.get_meta("state_lost") == "there is nothing in it"
    store.close()


def test_no_part_of_a_damaged_file_stays_beside_the_new_one(tmp_path: Path) -> None:
    killed_store(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"garbage" * 1000)
    garble_wal(tmp_path)
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path == tmp_path / ASIDE
    assert store.load_workflows() == []
    store.close()
    assert {file.name for file in tmp_path.iterdir()} >= {FILE_NAME, ASIDE}
    assert (tmp_path / f"{FILE_NAME}-wal").stat().st_size < 100_000  # its own, not the garbage
    again = Store.open(tmp_path, NOW)
    assert again.quarantined_path is None
    again.close()


def test_a_damaged_file_whose_content_is_in_its_log_is_restored_from_it(tmp_path: Path) -> None:
    killed_store(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"garbage" * 1000)
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path is None
    assert store.load_workflows() == [step.workflow for step in STEPS[:3]]
    store.close()


def test_a_lost_index_of_the_log_is_made_anew(tmp_path: Path) -> None:
    killed_store(tmp_path)
    (tmp_path / f"{FILE_NAME}-shm").unlink()
    store = Store.open(tmp_path, NOW)
    assert store.quarantined_path is None
    assert store.load_workflows() == [step.workflow for step in STEPS[:3]]
    store.close()


class Killed(BaseException):
    """The process ends here."""


def count_steps(monkeypatch: pytest.MonkeyPatch, killed_at: int, opened: list[sqlite3.Connection]) -> list[str]:
    """Have the process end before its nth step that changes what is on disk; the list of steps fills up.

    What it had open then, which the end of a process would close, goes into ``opened``.
    """
    steps: list[str] = []

    def step(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def take(*arguments: Any, **options: Any) -> Any:
            if len(steps) == killed_at:
                raise Killed
            steps.append(name)
            result = act(*arguments, **options)
            if isinstance(result, sqlite3.Connection):
                opened.append(result)
            return result

        return take

    for owner, name in (
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "write_text"),
        (os, "open"),
        (sqlite3, "connect"),
        (Store, "close"),
        (host, "flush_directory"),
    ):
        monkeypatch.setattr(owner, name, step(name, getattr(owner, name)))
    return steps


def damage_log(place: Path) -> sqlite3.Connection:
    """A state file that is good but old by itself: what makes it unreadable is in its log.

    Another process has it open, such as a backup: so the log stays a file of its own.
    """
    store = Store.open(place, NOW)
    store.commit(STEPS[:3], NOW)
    store.close()
    other = sqlite3.connect(place / FILE_NAME, isolation_level=None)
    other.execute("UPDATE workflow SET body = '{' WHERE id = 'event-1'")
    assert (place / f"{FILE_NAME}-wal").stat().st_size > 0
    return other


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not move what another process has open")
def test_a_loss_is_remembered_after_any_interruption_of_its_handling(tmp_path: Path) -> None:
    for killed_at in range(100):
        place = tmp_path / str(killed_at)
        place.mkdir()
        other = damage_log(place)
        damaged = [(place / f"{FILE_NAME}{suffix}").read_bytes() for suffix in ("", "-wal")]
        first: Store | None = None
        opened: list[sqlite3.Connection] = []
        with pytest.MonkeyPatch.context() as monkeypatch, suppress(Killed):
            steps = count_steps(monkeypatch, killed_at, opened)
            first = Store.open(place, NOW)
        if first is not None:
            first.close()
        where = f"killed after {steps}"
        store = Store.open(place, NOW)
        assert store.get_meta("state_lost").startswith("a workflow in it cannot be read: "), where
        assert store.load_workflows() == [], where
        store.commit([STEPS[0]], NOW)
        store.close()
        other.close()
        assert [(place / f"{ASIDE}{suffix}").read_bytes() for suffix in ("", "-wal")] == damaged, where
        again = Store.open(place, NOW)
        assert (again.quarantined_path, again.load_workflows()) == (None, [STEPS[0].workflow]), where
        again.close()
        names = {file.name for file in place.iterdir()}
        parts = {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}
        assert names - {ASIDE, f"{ASIDE}-wal", f"{ASIDE}-shm"} == parts, where
        for connection in opened:
            connection.close()
        if first is not None:
            break
    assert {"connect", "open", "replace", "flush_directory"} <= set(steps)
    assert 10 < len(steps) < 100


def test_after_an_interrupted_replacement_the_damaged_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"garbage" * 1000)

    def fail(_: Path) -> None:
        raise Killed

    monkeypatch.setattr(host, "flush_directory", fail)
    with pytest.raises(Killed):
        Store.open(tmp_path, NOW)
    monkeypatch.undo()
    store = Store.open(tmp_path, NOW + timedelta(hours=1))
    assert store.quarantined_path == tmp_path / ASIDE
    assert (tmp_path / ASIDE).read_bytes() == b"garbage" * 1000
    assert store.get_meta("state_lost") == "file is not a database"
    store.close()


def test_a_damaged_file_that_cannot_be_moved_is_reported_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"garbage")
    replace = Path.replace

    def refuse(old: Path, new: Path) -> Path:
        if old == path:
            raise PermissionError(13, "Permission denied")
        return replace(old, new)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path, NOW)
    assert str(caught.value) == (
        f"{path} is damaged (file is not a database) and cannot be quarantined ([Errno 13] Permission denied): "
        "move it away, then start again"
    )
    assert caught.value.kind == "unusable"


def test_a_client_of_a_damaged_file_leaves_it_to_the_agent(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"garbage")
    with pytest.raises(StoreError) as caught:
        Store.open_client(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / FILE_NAME} is damaged (file is not a database): "
        "the agent quarantines it when it is started again"
    )
    assert (tmp_path / FILE_NAME).read_bytes() == b"garbage"


def test_a_client_is_told_that_the_file_is_being_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client comes while the agent replaces a damaged file."""
    path = tmp_path / FILE_NAME
    path.write_bytes(b"garbage")
    told = []

    def look_at_it(connection: sqlite3.Connection, version: int) -> None:
        with pytest.raises(StoreError) as caught:
            Store.open_readonly(tmp_path)
        told.append(str(caught.value))
        migrate(connection, version)

    def look_for_it(lost: Path) -> Path | None:
        aside = quarantine(lost)
        if aside is not None:
            with pytest.raises(StoreError) as caught:
                Store.open_readonly(tmp_path)
            told.append(str(caught.value))
        return aside

    migrate, quarantine = store_file._migrate, store_file._quarantine
    monkeypatch.setattr(store_file, "_migrate", look_at_it)
    monkeypatch.setattr(store_file, "_quarantine", look_for_it)
    Store.open(tmp_path, NOW).close()
    assert told == 2 * [f"the agent creates {path} at this moment: try again in a few seconds"]


def test_damage_met_while_reading_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path, NOW)
    store.commit([STEPS[0]], NOW)
    other = sqlite3.connect(tmp_path / FILE_NAME)
    other.execute("UPDATE journal SET at = 'yesterday'")
    other.execute("UPDATE workflow SET body = '{'")
    other.commit()
    other.close()
    with pytest.raises(StoreError) as journal:
        store.load_journal()
    with pytest.raises(StoreError) as workflows:
        store.load_workflows()
    store.close()
    path = tmp_path / FILE_NAME
    assert str(journal.value) == f"cannot read {path}: Invalid RFC3339 encoded datetime - at `$.at`"
    assert str(workflows.value) == f"cannot read {path}: Input data was truncated"
    assert (journal.value.kind, workflows.value.kind) == ("read", "read")
