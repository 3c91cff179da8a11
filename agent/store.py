"""What must survive: workflows, the journal and operators' requests, in one SQLite file.

Owns the file's schema, its durability, how much it holds, and what is done when it is damaged. Decides nothing
about events. The one invariant: when ``commit`` returns, the steps are on the disk (WAL with synchronous=FULL),
all of them or none.

The file and its write-ahead log hold a reserve for a full disk: free pages, and a log of full length that is
overwritten in place. So the log is never deleted: when the agent ends well, it is only declared void.

A Store belongs to one thread at a time. The agent opens the file; others (``approve``, ``hold``, ``status``) join
it, or only look into it. Its permissions are the authorization.
"""

import contextlib
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from agent import AgentError, host
from agent.status import History, JournalEntry
from agent.workflow import Note, Step, Word, Workflow

FILE_NAME = "state.db"
# The name of a damaged file that is set aside, with this, is that of a whole file that is about to take its place.
_SUCCESSOR = ".successor"
# Beside a file that is being made: as long as this lies there, it is no loss if there is nothing in the file.
_BEGINNING = ".begun"

# Each entry brings the schema one version further; what is released is never edited, only added to.
_MIGRATIONS = (
    """
    CREATE TABLE workflow (
        id TEXT PRIMARY KEY, event_id TEXT NOT NULL, is_open INTEGER NOT NULL,
        updated_at TEXT NOT NULL, body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX workflow_open ON workflow (is_open) WHERE is_open;
    CREATE TABLE journal (
        id INTEGER PRIMARY KEY, at TEXT NOT NULL, workflow_id TEXT NOT NULL, event_id TEXT NOT NULL,
        kind TEXT NOT NULL, stage TEXT NOT NULL, hook TEXT NOT NULL, outcome TEXT NOT NULL,
        text TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT;
    CREATE INDEX journal_workflow ON journal (workflow_id, id);
    CREATE INDEX journal_at ON journal (at);
    CREATE TABLE request (
        id INTEGER PRIMARY KEY, at TEXT NOT NULL, workflow_id TEXT NOT NULL, word TEXT NOT NULL,
        user TEXT NOT NULL, answer TEXT
    ) STRICT;
    CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    """,
)
# Another process holds the write lock for a few milliseconds at a time. Longer than this is a fault, and the
# engine has other things to do than to wait.
_BUSY_SECONDS = 2.0
# Room for the lives of a hundred events: so much of the file is free, and so long is its write-ahead log. The log
# is moved into the file when half of it is used, so the other half has room for the largest commit.
RESERVE_BYTES = 4 * 1024 * 1024
_CHECKPOINT_PAGES = 512
_FILLER_BYTES = 64 * 1024
# The first bytes of a write-ahead log, but for one that differs between machines.
_LOG_MAGIC = b"\x37\x7f\x06"
# How much is kept of what is over, beside an age: whatever comes first.
MAX_EVENTS = 10_000
MAX_NOTES = 10_000
MAX_BYTES = 64 * 1024 * 1024
# Of one event: so many entries, the first ones and the latest.
MAX_ENTRIES = 500
_FIRST_ENTRIES = 100
_MAX_TEXT = 8000
# Forgotten at a time: the engine has other things to do than to wait for a disk.
_PORTION_EVENTS = 50
_PORTION_ROWS = 1000
# A request that no agent has taken up by then is void: whoever made it has been told so.
REQUEST_VALID_SECONDS = 30.0

_SELECT_JOURNAL = "SELECT at, workflow_id, event_id, kind, stage, hook, outcome, text, detail FROM journal"

FactName = Literal["vm_name", "vm_id", "boot_id", "state_lost", "service_answered", "hook_times", "in_use"]


class StoreError(AgentError):
    """The state file cannot be read or written now. Kinds: unusable, newer, older, write, read, damaged."""


class WithdrawnError(Exception):
    """A request was taken back before its answer could be written: whoever made it has been told so."""


RequestWord = Word | Literal["status"]
"""An operator's word about an event, or the question how the agent is."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks for."""

    id: int
    workflow_id: str
    """"" if it is about the agent."""
    word: RequestWord
    user: str


class Store:
    """The state file, open."""

    def __init__(self, connection: sqlite3.Connection, path: Path, set_aside: Path | None) -> None:
        self._connection = connection
        self._data_version = -1
        self._role: Literal["owner", "guest", "reader"] = "guest"
        self._is_damaged = False
        self.path = path
        self.set_aside = set_aside
        """Where a damaged file was moved to when this one was opened; None if all was well."""
        self.is_writing = False
        """Whether its thread waits for the disk; for any thread."""

    @classmethod
    def open(cls, directory: Path, now: datetime) -> "Store":
        """Open or create the state file in ``directory``.

        A damaged file is set aside, under a name with the time, and a new one begun that remembers that
        state was lost; if that is interrupted, the next ``open`` goes on with it. Raises StoreError if there
        is no way to have a file here at all, or if a newer version of the agent wrote it.
        """
        path = directory / FILE_NAME
        reason = "that was found earlier"
        try:
            aside = _set_aside(path)
            try:
                return cls._open(path, aside)
            except _DamagedError as error:
                reason = str(error)
            _begin_successor(path, now, reason)
            return cls._open(path, _set_aside(path))
        except (OSError, _DamagedError) as error:
            raise StoreError(
                f"{path} is damaged ({reason}) and cannot be set aside ({error}): move it away, then start again",
                kind="unusable",
            ) from error

    @classmethod
    def _open(cls, path: Path, set_aside: Path | None) -> "Store":
        store = cls(_connect(path, is_owner=True), path, set_aside)
        try:
            # So that the next agent knows whether this one ended well.
            store.save_facts({"in_use": "1"})
            # If another process has kept the log of the last agent in use, what is written continues that.
            _declare_log(path, is_valid=True)
        except BaseException as error:
            store._connection.close()
            if isinstance(error, StoreError) and error.kind == "damaged":
                raise _DamagedError(str(error)) from error
            raise
        store._role = "owner"
        return store

    @classmethod
    def join(cls, directory: Path) -> "Store":
        """Open the file of an agent that may be running: nothing is created, migrated or set aside.

        Raises StoreError, also for a damaged file.
        """
        path = directory / FILE_NAME
        try:
            return cls(_connect(path, is_owner=False), path, None)
        except _DamagedError as error:
            raise StoreError(
                f"{path} is damaged ({error}): the agent sets it aside when it is started again", kind="unusable"
            ) from error

    @classmethod
    def look_into(cls, directory: Path) -> "Store":
        """Open the file for reading only; it costs next to nothing and works while the disk is full.

        Raises StoreError. A damaged file is found when what is damaged is read.
        """
        path = directory / FILE_NAME
        _refuse_unreachable(path, is_read_only=True)
        try:
            try:
                connection = _connect_to_read(path, "mode=ro")
            except sqlite3.OperationalError:
                if _has_log(path):
                    raise
                # Even readers share some memory in a file, which a full disk has no room for. Here nobody writes.
                connection = _connect_to_read(path, "mode=ro&immutable=1")
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot read {path}: {error}", kind="read") from error
        store = cls(connection, path, None)
        store._role = "reader"
        return store

    def close(self) -> None:
        """Close the file; the store cannot be used any more."""
        has_ended_well = self._role == "owner" and not self._is_damaged and self._end_well()
        if self._role == "reader":
            self._connection.close()
        else:
            _close(self._connection, self.path)
        if has_ended_well:
            with contextlib.suppress(OSError):
                _declare_log(self.path, is_valid=False)

    def _end_well(self) -> bool:
        """Move all that is in the log into the file; whether that could be done."""
        try:
            with self._transaction():
                self._connection.execute("DELETE FROM fact WHERE name = 'in_use'")
            is_busy, length, moved = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except (StoreError, sqlite3.Error):
            return False
        return not is_busy and length == moved

    def load_workflows(self) -> list[Workflow]:
        """The open workflows, oldest first."""
        with self._reading():
            # Without its index named, the order would have it read all there ever was.
            rows = self._connection.execute(
                "SELECT body FROM workflow INDEXED BY workflow_open WHERE is_open ORDER BY rowid"
            ).fetchall()
            return [msgspec.json.decode(body, type=Workflow) for (body,) in rows]

    def commit(self, steps: Sequence[Step], at: datetime, answers: Mapping[int, str] | None = None) -> None:
        """Put the workflows and what there is to tell of them on disk, and the answers to who asked for that.

        Raises StoreError, or WithdrawnError if one of these requests is no more; then nothing is.
        """
        if not steps and not answers:
            return
        latest = {step.workflow.id: step.workflow for step in steps}
        stamp = _stamp(at)
        with self._transaction():
            self._connection.executemany(
                "INSERT INTO workflow (id, event_id, is_open, updated_at, body) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET event_id = excluded.event_id, is_open = excluded.is_open,"
                " updated_at = excluded.updated_at, body = excluded.body",
                [
                    (w.id, w.event.id, int(w.is_open), stamp, msgspec.json.encode(w).decode())
                    for w in latest.values()
                ],
            )
            self._write_journal([(stamp, step.workflow, note) for step in steps for note in step.notes])
            for request_id, answer in (answers or {}).items():
                if not self._write_answer(request_id, answer):
                    raise WithdrawnError

    def record(self, kind: str, text: str, at: datetime) -> None:
        """Put what concerns the agent and no single event into the journal."""
        with self._transaction():
            self._connection.execute(
                "INSERT INTO journal (at, workflow_id, event_id, kind, stage, hook, outcome, text, detail)"
                " VALUES (?, '', '', ?, '', '', '', ?, '')",
                (_stamp(at), kind, _clean(text)[:_MAX_TEXT]),
            )

    def disown_workflows(self, at: datetime, reason: str) -> None:
        """Close all open workflows without recovery: they belong to another machine."""
        note = Note(kind="closed", text=reason)
        with self._transaction():
            rows = self._connection.execute("SELECT body FROM workflow WHERE is_open").fetchall()
            workflows = [msgspec.json.decode(body, type=Workflow) for (body,) in rows]
            self._write_journal([(_stamp(at), workflow, note) for workflow in workflows])
            self._connection.execute("UPDATE workflow SET is_open = 0 WHERE is_open")

    def load_journal(self) -> list[JournalEntry]:
        """All entries, oldest first."""
        return self._load_entries("ORDER BY id")

    def load_notes(
        self, *, kind: str | None = None, since: datetime | None = None, limit: int = -1
    ) -> list[JournalEntry]:
        """The latest entries that concern the agent and no single event, oldest first."""
        newest_first = "WHERE workflow_id = '' AND kind = ifnull(?, kind) AND at >= ? ORDER BY id DESC LIMIT ?"
        return self._load_entries(newest_first, kind, _stamp(since) if since else "", limit)[::-1]

    def load_life(self) -> list[JournalEntry]:
        """When the agent last started, and last stopped, in the order in which that was written."""
        return self._load_entries(
            "WHERE id IN (SELECT max(id) FROM journal WHERE workflow_id = '' AND kind IN (?, ?) GROUP BY kind)"
            " ORDER BY id",
            "agent_started",
            "agent_stopped",
        )

    def find_workflows(
        self,
        *,
        since: datetime | None = None,
        limit: int = -1,
        is_wanted: Callable[[Workflow], bool] | None = None,
    ) -> list[Workflow]:
        """The latest events of which something was noted since then, pending ones too, oldest first.

        ``is_wanted``: which of them, if not all; those that are not do not count for the limit (-1: none).
        """
        workflows: list[Workflow] = []
        with self._reading():
            rows = self._connection.execute(
                "SELECT body FROM workflow WHERE updated_at >= ? ORDER BY rowid DESC",
                (_stamp(since) if since else "",),
            )
            for (body,) in rows:
                if len(workflows) == limit:
                    break
                workflow = msgspec.json.decode(body, type=Workflow)
                if is_wanted is None or is_wanted(workflow):
                    workflows.append(workflow)
            rows.close()
        return workflows[::-1]

    def load_histories(
        self,
        *,
        since: datetime | None = None,
        limit: int = -1,
        is_wanted: Callable[[Workflow], bool] | None = None,
    ) -> list[History]:
        """What ``find_workflows`` finds, each with its journal."""
        return [
            History(
                workflow=workflow,
                entries=tuple(self._load_entries("WHERE workflow_id = ? ORDER BY id", workflow.id)),
            )
            for workflow in self.find_workflows(since=since, limit=limit, is_wanted=is_wanted)
        ]

    def _load_entries(self, which: str, *values: str | int | None) -> list[JournalEntry]:
        with self._reading():
            rows = self._connection.execute(
                f"{_SELECT_JOURNAL} {which}",
                values,
            ).fetchall()
            return [
                JournalEntry(
                    at=datetime.fromisoformat(at),
                    workflow_id=workflow_id,
                    event_id=event_id,
                    kind=kind,
                    stage=stage,
                    hook=hook,
                    outcome=outcome,
                    text=text,
                    detail=detail,
                )
                for at, workflow_id, event_id, kind, stage, hook, outcome, text, detail in rows
            ]

    def load_fact(self, name: FactName) -> str:
        """A remembered fact; "" if there is none."""
        with self._reading():
            row = self._connection.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def save_facts(self, facts: dict[FactName, str]) -> None:
        """Remember facts, each under its name."""
        with self._transaction():
            self._connection.executemany(
                "INSERT INTO fact (name, value) VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                list(facts.items()),
            )

    def add_request(self, workflow_id: str, word: RequestWord, user: str, at: datetime) -> int:
        """Ask the running agent for something; returns the request's number."""
        with self._transaction():
            cursor = self._connection.execute(
                "INSERT INTO request (at, workflow_id, word, user) VALUES (?, ?, ?, ?)",
                (_stamp(at), workflow_id, word, _clean(user)),
            )
        return cursor.lastrowid or 0

    def load_answer(self, request_id: int) -> str | None:
        """The agent's answer to a request; None as long as there is none."""
        with self._reading():
            row = self._connection.execute("SELECT answer FROM request WHERE id = ?", (request_id,)).fetchone()
        return row[0] if row else None

    def withdraw_request(self, request_id: int) -> str | None:
        """Take back a request; returns the answer if there was one already, which is as well thrown away."""
        with self._transaction():
            row = self._connection.execute("SELECT answer FROM request WHERE id = ?", (request_id,)).fetchone()
            self._connection.execute("DELETE FROM request WHERE id = ?", (request_id,))
        return row[0] if row else None

    def load_requests(self, now: datetime) -> list[Request]:
        """Requests that wait for an answer. Costs a few microseconds while no other process has written."""
        with self._reading():
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            if version == self._data_version:
                return []
            rows = self._connection.execute(
                "SELECT id, workflow_id, word, user FROM request WHERE answer IS NULL AND at > ? ORDER BY id",
                (_stamp(now - timedelta(seconds=REQUEST_VALID_SECONDS)),),
            ).fetchall()
            self._data_version = version
        return [Request(id=id_, workflow_id=workflow, word=word, user=user) for id_, workflow, word, user in rows]

    def answer_request(self, request_id: int, answer: str) -> None:
        """Tell whoever asked what became of it."""
        with self._transaction():
            self._write_answer(request_id, answer)

    def prune(self, before: datetime) -> bool:
        """Forget a portion of what ended before that time, or is more than is kept; True if there may be more.

        Open workflows stay, and of a long journal of one of them its beginning and its end.
        """
        with self._transaction():
            deleted = self._prune_events(_stamp(before))
            deleted += self._connection.execute(
                "DELETE FROM journal WHERE at < ? AND id IN"
                " (SELECT id FROM journal WHERE workflow_id = '' ORDER BY id LIMIT ?)",
                (_stamp(before), _PORTION_ROWS),
            ).rowcount
            deleted += self._prune_entries("", MAX_NOTES, 0)
            for (workflow_id,) in self._fetch("SELECT id FROM workflow WHERE is_open"):
                deleted += self._prune_entries(workflow_id, MAX_ENTRIES, _FIRST_ENTRIES)
            self._connection.execute(
                "DELETE FROM request WHERE at < ? OR id < (SELECT max(id) FROM request) - ?",
                (_stamp(before), _PORTION_ROWS),
            )
        return deleted >= _PORTION_EVENTS

    def _prune_events(self, stamp: str) -> int:
        ((count,),) = self._fetch("SELECT count(*) FROM workflow")
        surplus = count - MAX_EVENTS
        if self._size_bytes() > MAX_BYTES:
            surplus = max(surplus, _PORTION_EVENTS)
        oldest = self._fetch(
            "SELECT id, updated_at FROM workflow WHERE NOT is_open ORDER BY rowid LIMIT ?", _PORTION_EVENTS
        )
        deleted = 0
        for number, (workflow_id, updated_at) in enumerate(oldest):
            if (updated_at < stamp or number < surplus) and deleted < _PORTION_ROWS:
                entries = self._prune_entries(workflow_id, 0, 0)
                if entries < _PORTION_ROWS:
                    self._connection.execute("DELETE FROM workflow WHERE id = ?", (workflow_id,))
                deleted += entries + 1
        return deleted

    def _prune_entries(self, workflow_id: str, most: int, first: int) -> int:
        """Keep so many entries of a workflow, of them so many of the first; a portion at a time."""
        ((count,),) = self._fetch("SELECT count(*) FROM journal WHERE workflow_id = ?", workflow_id)
        if count <= most:
            return 0
        return self._connection.execute(
            "DELETE FROM journal WHERE id IN"
            " (SELECT id FROM journal WHERE workflow_id = ? ORDER BY id LIMIT ? OFFSET ?)",
            (workflow_id, min(count - most, _PORTION_ROWS), first),
        ).rowcount

    def _fetch(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _size_bytes(self, *, is_free: bool = False) -> int:
        """How much of the file is in use, or is not."""
        (pages,), (free,), (page_bytes,) = (
            self._connection.execute(f"PRAGMA {name}").fetchone()
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((free if is_free else pages - free) * page_bytes)

    def reserve_bytes(self) -> int:
        """How much can still be written while the disk is full."""
        log = self.path.with_name(f"{self.path.name}-wal")
        with self._reading():
            try:
                return min(self._size_bytes(is_free=True), log.stat().st_size)
            except OSError:
                return 0

    def keep_reserve(self) -> str:
        """Fill the reserve up again if it has become small. Returns why that cannot be done, "" if all is well."""
        left = self.reserve_bytes()
        if left >= RESERVE_BYTES * 3 // 4:
            return ""
        import shutil  # noqa: PLC0415 - heavy, and rarely needed

        free = shutil.disk_usage(self.path.parent).free
        if free < 3 * RESERVE_BYTES:
            return (
                f"the disk of {self.path} has {free >> 10} KiB left; of the {RESERVE_BYTES >> 10} KiB that the "
                f"file keeps for a full disk, {left >> 10} KiB are left"
            )
        filler = [(f"filler {number}", _FILLER_BYTES // 2) for number in range(RESERVE_BYTES // _FILLER_BYTES)]
        forget = "DELETE FROM fact WHERE name LIKE 'filler %'"
        with self._transaction():
            self._connection.execute(forget)
            # Not zeros, which some file systems do not store.
            self._connection.executemany("INSERT INTO fact (name, value) VALUES (?, hex(randomblob(?)))", filler)
        with self._transaction():
            self._connection.execute(forget)
        with self._reading():
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return ""

    def _write_answer(self, request_id: int, answer: str) -> bool:
        """Whether somebody still waits for it."""
        cursor = self._connection.execute("UPDATE request SET answer = ? WHERE id = ?", (answer, request_id))
        return cursor.rowcount == 1

    def _write_journal(self, entries: Iterable[tuple[str, Workflow, Note]]) -> None:
        self._connection.executemany(
            "INSERT INTO journal (at, workflow_id, event_id, kind, stage, hook, outcome, text, detail)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    at,
                    w.id,
                    w.event.id,
                    n.kind,
                    n.stage,
                    n.hook,
                    n.outcome,
                    _clean(n.text)[:_MAX_TEXT],
                    _clean(n.detail)[:_MAX_TEXT],
                )
                for at, w, n in entries
            ],
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self.is_writing = True
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            # Whoever took requests up and could not keep them reads them again: they may be withdrawn by then.
            self._data_version = -1
            self._is_damaged = self._is_damaged or _is_damage(error)
            kind = "damaged" if _is_damage(error) else "write"
            raise StoreError(f"cannot write {self.path}: {error}", kind=kind) from error
        finally:
            self.is_writing = False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            self._is_damaged = self._is_damaged or _is_damage(error)
            kind = "damaged" if _is_damage(error) else "read"
            raise StoreError(f"cannot read {self.path}: {error}", kind=kind) from error


def _is_damage(error: Exception) -> bool:
    """Whether SQLite has found the file to be none of its own; unlike a lack of room, that does not pass."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _DamagedError(Exception):
    """The file is there and is not what this agent wrote."""


def _begin_successor(path: Path, now: datetime, reason: str) -> None:
    """Make the file that is to follow a damaged one. Once it has its name, ``_set_aside`` does the rest."""
    draft = path.with_name(f"{FILE_NAME}.new")
    for part in _parts(draft):
        part.unlink(missing_ok=True)
    with contextlib.closing(_connect(draft, is_owner=True)) as connection:
        Store(connection, draft, None).save_facts({"state_lost": reason})
    draft.replace(path.with_name(f"{FILE_NAME}.damaged-{now:%Y%m%dT%H%M%SZ}{_SUCCESSOR}"))
    host.flush_directory(path.parent)


def _set_aside(path: Path) -> Path | None:
    """If a damaged file has a successor, have that take its place. Returns where the damaged one is then."""
    successor = next(path.parent.glob(f"{FILE_NAME}.damaged-*{_SUCCESSOR}"), None)
    if successor is None:
        return None
    aside = successor.with_suffix("")
    # The log goes first: it must never lie beside a file that it does not belong to.
    for old, kept in reversed(list(zip(_parts(path), _parts(aside), strict=True))):
        with contextlib.suppress(FileNotFoundError):
            old.replace(kept)
    successor.replace(path)
    host.flush_directory(path.parent)
    return aside


def _parts(path: Path) -> list[Path]:
    """The files of a database: itself, and what SQLite keeps beside it."""
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]


def _has_log(path: Path) -> bool:
    """Whether there is a write-ahead log that counts beside the file: who was at work last did not end well."""
    try:
        with path.with_name(f"{path.name}-wal").open("rb") as log:
            return log.read(len(_LOG_MAGIC)) not in (b"", _inverted(_LOG_MAGIC))
    except FileNotFoundError:
        return False


def _declare_log(path: Path, *, is_valid: bool) -> None:
    """Have the write-ahead log count, or not. What does not count stays, for its room, but is not taken for news.

    Otherwise it would come back over a file that an administrator has put in the place of this one.
    """
    with path.with_name(f"{path.name}-wal").open("r+b") as log:
        magic = log.read(4)
        if magic.startswith(_inverted(_LOG_MAGIC) if is_valid else _LOG_MAGIC):
            log.seek(0)
            log.write(_inverted(magic))
            log.flush()
            os.fsync(log.fileno())


def _inverted(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)


def _configure(connection: sqlite3.Connection) -> sqlite3.Connection:
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
    return connection


def _close(connection: sqlite3.Connection, path: Path) -> None:
    """Close, and leave the write-ahead log where it is: another program could take its room."""
    if sys.version_info >= (3, 12):
        connection.close()
        return
    # The last connection to close removes the log, unless it may only read.
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(sqlite3.Error, StoreError):
            stack.enter_context(contextlib.closing(_connect_to_read(path, "mode=ro")))
        connection.close()


def _connect(path: Path, *, is_owner: bool) -> sqlite3.Connection:
    beginning = path.with_name(path.name + _BEGINNING)
    if not is_owner:
        _refuse_unreachable(path, is_read_only=False)
    try:
        is_new = is_owner and _create(path, beginning)
        if is_owner:  # and so the first of this process to open it: to close a file gives up its locks
            os.close(os.open(path, os.O_RDWR))  # SQLite's own message would not say why not
    except OSError as error:
        raise StoreError(
            f"cannot open the state file {path}: {error.strerror or error}; "
            "run as the agent's user, or set agent.state_dir to a directory that is writable",
            kind="unusable",
        ) from error
    try:
        was_left_open = _has_log(path)
        connection = _configure(
            sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        )
    except (OSError, sqlite3.OperationalError) as error:
        raise StoreError(f"cannot open the state file {path}: {error}", kind="unusable") from error
    try:
        if is_owner:
            _prepare(connection, path, is_new=is_new, was_left_open=was_left_open)
        else:
            with _opening(path):
                _refuse_other_version(path, _set_up(connection), is_owner=False)
        if is_new:
            beginning.unlink()
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_unreachable(path: Path, *, is_read_only: bool) -> None:
    """For who does not own the file: raises StoreError, which says more than SQLite would.

    A file that can be opened is not opened here: on Linux, to close one gives up every lock that this process has
    on it, those of the agent's own connection too. Whoever closes it next then takes the agent's log for nobody's,
    and removes it.
    """
    try:
        if not os.access(path, os.R_OK if is_read_only else os.R_OK | os.W_OK):
            os.close(os.open(path, os.O_RDONLY if is_read_only else os.O_RDWR))  # fails, and says why
    except FileNotFoundError as error:
        raise StoreError(
            f"no agent has run with the state directory {path.parent}: name it with --state-dir", kind="unusable"
        ) from error
    except OSError as error:
        way_out = (
            ": the state is for the agent's account alone; run this as that or as root (sudo), "
            "on Windows in an elevated prompt"
            if isinstance(error, PermissionError)
            else ""
        )
        raise StoreError(f"cannot open {path}: {error.strerror or error}{way_out}", kind="unusable") from error


def _connect_to_read(path: Path, options: str) -> sqlite3.Connection:
    connection = _configure(
        sqlite3.connect(
            f"{path.absolute().as_uri()}?{options}",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
    )
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        _refuse_other_version(path, version, is_owner=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path, beginning: Path) -> bool:
    """Whether nothing was ever in the file: it was not there before, or whoever made it was killed over that.

    Created by hand for its mode: SQLite would follow the umask.
    """
    if not path.exists():
        beginning.touch(0o600)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return beginning.exists()


def _set_up(connection: sqlite3.Connection) -> int:
    """Set how the file is written; returns the version of its schema."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    # What another process that goes on reading has made it grow to is given back once that is over.
    connection.execute(f"PRAGMA journal_size_limit = {RESERVE_BYTES}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    # What is forgotten is not written over, and nothing is written elsewhere: the disk may be full.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("PRAGMA temp_store = MEMORY")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _prepare(connection: sqlite3.Connection, path: Path, *, is_new: bool, was_left_open: bool) -> None:
    with _opening(path):
        version = _set_up(connection)
        if version == 0 and not is_new:  # cut to nothing, or its write-ahead log is lost
            raise _DamagedError("there is nothing in it")
        _refuse_other_version(path, version, is_owner=True)
        # That takes its time, so only if the last agent did not end well.
        if was_left_open or (
            version and connection.execute("SELECT 1 FROM fact WHERE name = 'in_use'").fetchone()
        ):
            (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if result != "ok":
                raise _DamagedError(" ".join(result.split()))
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
        for (body,) in connection.execute("SELECT body FROM workflow WHERE is_open"):
            msgspec.json.decode(body, type=Workflow)


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except msgspec.MsgspecError as error:
        raise _DamagedError(f"a workflow in it cannot be read: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        # Busy, disk full, no permission are not the file's fault; that our SQL does not fit it is.
        if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
            raise StoreError(f"cannot open the state file {path}: {error}", kind="unusable") from error
        raise _DamagedError(str(error)) from error


def _refuse_other_version(path: Path, version: int, *, is_owner: bool) -> None:
    if version > len(_MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer version of the agent (schema {version}, "
            f"known {len(_MIGRATIONS)}): install that version again, or move the file away",
            kind="newer",
        )
    if version < len(_MIGRATIONS) and not is_owner:
        raise StoreError(
            f"{path} was written by an older version of the agent (schema {version}, "
            f"known {len(_MIGRATIONS)}): restart the agent, which brings it up to date",
            kind="older",
        )


def _clean(text: str) -> str:
    """With a mark in place of what is no text: bytes in a path, or in the environment, that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _stamp(at: datetime) -> str:
    """UTC, so that stamps sort as texts."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")
