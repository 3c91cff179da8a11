"""What must survive: workflows, the journal and operators' requests, in one SQLite file.

Owns the file's schema, its durability and what is done when it is damaged. Decides nothing about events.
The one invariant: when ``commit`` returns, the steps are on the disk (WAL with synchronous=FULL), all of
them or none.

A Store belongs to one thread at a time. The agent opens the file; others (``approve``, ``hold``, ``status``) join
it, or only look into it. Its permissions are the authorization.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from agent import AgentError, host
from agent.status import History, JournalEntry
from agent.workflow import Note, Step, Workflow

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
# What the write-ahead log needs from one checkpoint of SQLite's own to the next.
_MAX_LOG_BYTES = 4 * 1024 * 1024
# A request that no agent has taken up by then is void: whoever made it has been told so.
REQUEST_VALID_SECONDS = 30.0

_SELECT_JOURNAL = "SELECT at, workflow_id, event_id, kind, stage, hook, outcome, text, detail FROM journal"

FactName = Literal["vm_name", "vm_id", "boot_id", "state_lost", "service_answered", "hook_times"]


class StoreError(AgentError):
    """The state file cannot be read or written now. Kinds: unusable, newer, older, write, read, damaged."""


class WithdrawnError(Exception):
    """A request was taken back before its answer could be written: whoever made it has been told so."""


RequestWord = Literal["", "approved", "held", "status"]
"""An operator's word about an event ("" takes it back), or the question how the agent is."""


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
                return cls(_connect(path, is_owner=True), path, aside)
            except _DamagedError as error:
                reason = str(error)
            _begin_successor(path, now, reason)
            aside = _set_aside(path)
            return cls(_connect(path, is_owner=True), path, aside)
        except (OSError, _DamagedError) as error:
            raise StoreError(
                f"{path} is damaged ({reason}) and cannot be set aside ({error}): move it away, then start again",
                kind="unusable",
            ) from error

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
                log = path.with_name(f"{path.name}-wal")
                if log.exists() and log.stat().st_size:
                    raise
                # Even readers share some memory in a file, which a full disk has no room for. Here nobody writes.
                connection = _connect_to_read(path, "mode=ro&immutable=1")
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot read {path}: {error}", kind="read") from error
        return cls(connection, path, None)

    def close(self) -> None:
        """Close the file; the store cannot be used any more."""
        self._connection.close()

    def load_workflows(self) -> list[Workflow]:
        """The open workflows, oldest first."""
        with self._reading():
            rows = self._connection.execute("SELECT body FROM workflow WHERE is_open ORDER BY rowid").fetchall()
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
                (_stamp(at), kind, _clean(text)),
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

    def prune(self, before: datetime) -> None:
        """Forget what ended before that time; open workflows and their journal stay."""
        stamp = _stamp(before)
        with self._transaction():
            self._connection.execute("DELETE FROM workflow WHERE NOT is_open AND updated_at < ?", (stamp,))
            self._connection.execute(
                "DELETE FROM journal WHERE at < ? AND workflow_id NOT IN (SELECT id FROM workflow)", (stamp,)
            )
            self._connection.execute("DELETE FROM request WHERE at < ?", (stamp,))

    def _write_answer(self, request_id: int, answer: str) -> bool:
        """Whether somebody still waits for it."""
        cursor = self._connection.execute("UPDATE request SET answer = ? WHERE id = ?", (answer, request_id))
        return cursor.rowcount == 1

    def _write_journal(self, entries: Iterable[tuple[str, Workflow, Note]]) -> None:
        self._connection.executemany(
            "INSERT INTO journal (at, workflow_id, event_id, kind, stage, hook, outcome, text, detail)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (at, w.id, w.event.id, n.kind, n.stage, n.hook, n.outcome, _clean(n.text), _clean(n.detail))
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
            kind = "damaged" if _is_damage(error) else "write"
            raise StoreError(f"cannot write {self.path}: {error}", kind=kind) from error
        finally:
            self.is_writing = False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
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
    store = Store(_connect(draft, is_owner=True), draft, None)
    try:
        store.save_facts({"state_lost": reason})
    finally:
        store.close()
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
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise StoreError(f"cannot open the state file {path}: {error}", kind="unusable") from error
    try:
        _prepare(connection, path, is_new=is_new, is_owner=is_owner)
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
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
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


def _prepare(connection: sqlite3.Connection, path: Path, *, is_new: bool, is_owner: bool) -> None:
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # What somebody who goes on reading has made it grow to is given back once that is over.
        connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if result != "ok":
            raise _DamagedError(" ".join(result.split()))
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and not is_new:  # cut to nothing, or its write-ahead log is lost
            raise _DamagedError("there is nothing in it")
        _refuse_other_version(path, version, is_owner=is_owner)
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
        for (body,) in connection.execute("SELECT body FROM workflow WHERE is_open"):
            msgspec.json.decode(body, type=Workflow)
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
