"""SQLite state: workflows, the journal, operators' requests and unsent notifications.

It decides what is written and how much is kept, but nothing about events. Invariant: when ``commit`` returns, the
transitions are on disk (WAL with synchronous=FULL), all of them or none.

A Store is for one thread at a time. The agent opens the file as its owner. Other processes (``approve``, ``hold``,
``status``) open it to add requests, or only to read. The permissions of the file are the authorization.
"""

import contextlib
import itertools
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.status.facts import History
from scheduled_events_agent.status.status import AgentRecordKind, JournalRecord, StateLost
from scheduled_events_agent.store import file
from scheduled_events_agent.store.file import FILE_NAME, RESERVE_BYTES, StoreError
from scheduled_events_agent.store.outbox import Loss, OutboxTable
from scheduled_events_agent.store.presence import OpenFiles
from scheduled_events_agent.workflow import (
    OperatorAction,
    Record,
    RememberedEvent,
    RememberedFact,
    RememberedKey,
    Transition,
    Workflow,
)

_FILLER_BYTES = 64 * 1024
# Limits for closed events, besides their age; the smallest limit counts.
MAX_EVENTS = 10_000
MAX_RECORDS = 10_000
MAX_BYTES = 64 * 1024 * 1024
MAX_EVENT_RECORDS = 500
"""Entries of one event that are kept: the first ones and the latest."""
_FIRST_RECORDS = 100
_MAX_REQUESTS = 100
_MAX_TEXT = 8000
# Number of events deleted at a time, so that the engine does not wait long for the disk.
_PORTION_EVENTS = 50
_PORTION_ROWS = 1000
REQUEST_VALID_SECONDS = 30.0
"""A request that no agent has answered by then is void; the operator's command has reported that."""

_COLUMNS = ("at", "key", "event_id", "kind", "stage", "hook", "outcome", "text", "detail")
_SELECT_RECORDS = "SELECT at, workflow_id, event_id, kind, stage, hook, outcome, text, detail FROM journal "
_SELECT_ANSWER = "SELECT answer FROM request WHERE id = ? AND answer IS NOT NULL"

AgentRecord = tuple[AgentRecordKind, str, datetime]
"""An entry about the agent itself: its kind, text and time."""
MetaKey = Literal[
    "vm_name", "vm_id", "vm_group", "boot_id", "state_lost", "unsettled_loss", "hook_times", "lost_notices",
    "in_use", "created_at",
]  # fmt: skip


class WithdrawnError(Exception):
    """A request was withdrawn before its answer could be written; the operator's command has reported that."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An operator asks the agent to act on an event."""

    id: int
    workflow_id: str
    action: OperatorAction
    user: str


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Another process asks the agent for its status. It is stored without an action."""

    id: int


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent's answer to a request. Stored as it is."""

    succeeded: bool
    message: str
    """The answer for the operator; for the request ``status``, the agent's status as JSON."""


class CommitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The notifications that a commit has dropped."""

    dropped: tuple[tuple[str, str], ...] = ()
    """Target and body of each notification."""
    reason: Literal["", "too_many", "no_room"] = ""
    """too_many: the oldest of targets that had too many; no_room: all new ones, because the disk is full."""


class RememberedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the remembered events by a commit."""

    put: Mapping[RememberedKey, RememberedEvent] = {}
    removed: frozenset[RememberedKey] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.put or self.removed)


NO_CHANGES = RememberedChanges()

# Made here, not at first use: two threads that describe a type to msgspec at the same moment crash the process.
_ANSWER = msgspec.json.Decoder(RequestAnswer)
_LOSSES = msgspec.json.Decoder(dict[str, Loss])
_STATE_LOST = msgspec.json.Decoder(StateLost)


class Store:
    """The state file, open."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        *,
        open_files: OpenFiles | None = None,
        quarantined_path: Path | None = None,
    ) -> None:
        """``open_files``: those of the agent, which owns the file; None for others."""
        self._connection = connection
        self._open_files = open_files
        self._is_damaged = False
        self.path = path
        self.wake_path = path.with_name("wake")
        """Where the agent waits for ``host.wake``, to read a request at once."""
        self.quarantined_path = quarantined_path
        """Where a damaged file was moved to when this one was opened; None if all was well."""
        self.is_writing = False
        """Whether the store's thread waits for the disk; for any thread."""
        self.recreations = 0
        """How often the file was removed or replaced, and created again."""
        self.outbox = OutboxTable(connection, self._transaction, self._reading)

    @classmethod
    def open(
        cls,
        directory: Path,
        now: datetime,
        on_locked: Callable[[StoreError], None] = lambda _: None,
        lock: IO[bytes] | None = None,
    ) -> "Store":
        """Open or create the state file in ``directory``, for the agent; see ``file.open_rw_create``.

        ``lock``: the lock of the directory; the store closes it.
        """
        connection, quarantined_path = file.open_rw_create(directory, now, on_locked)
        path = directory / FILE_NAME
        return cls(connection, path, open_files=OpenFiles(path, lock), quarantined_path=quarantined_path)

    @classmethod
    def open_client(cls, directory: Path) -> "Store":
        """Open the file of an agent that may be running. Raises StoreError, also for a damaged file."""
        path = directory / FILE_NAME
        return cls(file.open_rw(path), path)

    @classmethod
    def open_readonly(cls, directory: Path) -> "Store":
        """Open the file for reading only. Raises StoreError. Damage is found when the damaged part is read."""
        path = directory / FILE_NAME
        return cls(file.open_ro(path), path)

    def close(self) -> None:
        """Close the file; the store cannot be used any more."""
        # If the file was removed, the write-ahead log at the path may belong to another agent.
        is_in_place = self._open_files is not None and not self._open_files.loss()
        has_ended_well = is_in_place and not self._is_damaged and self._checkpoint_for_close()
        file.close(self._connection, self.path)
        if has_ended_well:
            with contextlib.suppress(OSError):
                file.invalidate_wal(self.path)
        if self._open_files is not None:
            self._open_files.close()

    def recreate_if_removed(self) -> str:
        """If file, lock or directory were removed or replaced, create them again from the open file.

        Returns which one was removed or replaced, "" if none was. Raises StoreError if that fails; try it again.
        """
        loss = self._open_files.loss() if self._open_files is not None else ""
        if self._open_files is None or not loss:
            return ""
        self.is_writing = True
        try:
            connection = self._open_files.restore(self._connection)
        except (AgentError, OSError, sqlite3.Error) as error:
            raise StoreError(f"{loss}, and cannot be created again: {error}", kind="removed") from error
        finally:
            self.is_writing = False
        if connection is not self._connection:
            self._connection.close()
            self._connection = self.outbox.connection = connection
        self.recreations += 1
        return loss

    def _checkpoint_for_close(self) -> bool:
        """Move all of the write-ahead log into the file. Returns whether that was possible."""
        try:
            with self._transaction():
                self._connection.execute("DELETE FROM meta WHERE name = 'in_use'")
            is_busy, length, moved = self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        except (StoreError, sqlite3.Error):
            return False
        return not is_busy and length == moved

    def load_workflows(self) -> list[Workflow]:
        """The open workflows, oldest first."""
        with self._reading():
            # With the index named, SQLite does not read all closed workflows for the order.
            rows = self._fetch("SELECT body FROM workflow INDEXED BY workflow_open WHERE is_open ORDER BY rowid")
            return [_to_workflow(body) for (body,) in rows]

    def commit(
        self,
        transitions: Sequence[Transition],
        at: datetime,
        answers: Mapping[int, RequestAnswer] | None = None,
        notifications: Sequence[tuple[str, str]] = (),
        remembered: RememberedChanges = NO_CHANGES,
    ) -> CommitResult:
        """Write workflows, records, answers to operators' requests, notifications and remembered events to disk.

        The records have their texts already. ``notifications``: target and body of each; if the disk is full, all
        else is written without them. Raises StoreError, or WithdrawnError if one of the requests is gone; then
        nothing is written.
        """
        if not (transitions or answers or remembered):
            return CommitResult()
        try:
            lost = self._write_commit(transitions, at, answers or {}, notifications, remembered)
        except StoreError as error:
            if not notifications or error.kind != "full":
                raise
            # Notifications must not take the room that events need.
            self._write_commit(transitions, at, answers or {}, (), remembered)
            return CommitResult(dropped=tuple(notifications), reason="no_room")
        return CommitResult(dropped=tuple(lost), reason="too_many") if lost else CommitResult()

    def _write_commit(
        self,
        transitions: Sequence[Transition],
        at: datetime,
        answers: Mapping[int, RequestAnswer],
        notifications: Sequence[tuple[str, str]],
        remembered: RememberedChanges,
    ) -> list[tuple[str, str]]:
        """Write all in one transaction. Returns the oldest notifications of targets that had too many."""
        latest = {transition.workflow.id: transition.workflow for transition in transitions}
        stamp = _stamp(at)
        rows = [(w.id, w.event.id, w.is_open, stamp, msgspec.json.encode(w).decode()) for w in latest.values()]
        with self._transaction():
            self._connection.executemany(
                "INSERT INTO workflow (id, event_id, is_open, updated_at, body) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET event_id = excluded.event_id, is_open = excluded.is_open,"
                " updated_at = excluded.updated_at, body = excluded.body",
                rows,
            )
            self._write_journal(
                [
                    (stamp, transition.workflow, record)
                    for transition in transitions
                    for record in transition.records
                ]
            )
            self._write_remembered(remembered)
            for request_id, answer in answers.items():
                if not self._write_answer(request_id, answer):
                    raise WithdrawnError
            return self.outbox.add(stamp, notifications)

    def record(self, kind: AgentRecordKind, text: str, at: datetime, detail: str = "") -> None:
        """Put a record about the agent itself into the journal."""
        with self._transaction():
            self._insert_records([(_stamp(at), "", "", kind, "", "", "", text, detail)])

    def record_all(self, records: Iterable[AgentRecord]) -> None:
        """Put entries about the agent itself into the journal."""
        with self._transaction():
            self._write_records(records)

    def _write_records(self, records: Iterable[AgentRecord]) -> None:
        self._insert_records((_stamp(at), "", "", kind, "", "", "", text, "") for kind, text, at in records)

    def load_remembered(self) -> dict[RememberedKey, RememberedEvent]:
        """The remembered events, the oldest first."""
        query = "SELECT fact, event_key, user, at, last_seen_at FROM remembered_event ORDER BY at"
        with self._reading():
            return {
                (msgspec.convert(fact, RememberedFact), key): msgspec.convert(
                    {"user": user, "at": at, "last_seen_at": last_seen_at}, RememberedEvent
                )
                for fact, key, user, at, last_seen_at in self._fetch(query)
            }

    def change_remembered(self, changes: RememberedChanges) -> None:
        """Write changes of the remembered events."""
        with self._transaction():
            self._write_remembered(changes)

    def _write_remembered(self, changes: RememberedChanges) -> None:
        self._connection.executemany(
            "DELETE FROM remembered_event WHERE fact = ? AND event_key = ?", changes.removed
        )
        self._connection.executemany(
            "INSERT OR REPLACE INTO remembered_event (fact, event_key, user, at, last_seen_at)"
            " VALUES (?, ?, ?, ?, ?)",
            [
                (*key, _storable(one.user), _stamp(one.at), _stamp(one.last_seen_at))
                for key, one in changes.put.items()
            ],
        )

    def discard_workflows(self, at: datetime, reason: str) -> None:
        """Close all open workflows without recovery: they belong to another machine."""
        record = Record(kind="closed", text=reason)
        with self._transaction():
            rows = self._fetch("SELECT body FROM workflow WHERE is_open")
            self._write_journal([(_stamp(at), _to_workflow(body), record) for (body,) in rows])
            self._connection.execute("UPDATE workflow SET is_open = 0 WHERE is_open")
            self._connection.execute("DELETE FROM remembered_event")

    def load_journal(self) -> list[JournalRecord]:
        """All entries, oldest first."""
        return self._select_records("ORDER BY id")

    def load_records(
        self, *, kind: str | None = None, since: datetime | None = None, limit: int | None = None
    ) -> list[JournalRecord]:
        """The entries about the agent itself, oldest first; ``limit``: only the latest of each kind."""
        wanted = "workflow_id = '' AND kind = ifnull(?, kind) AND at >= ?"
        latest = "row_number() OVER (PARTITION BY kind ORDER BY id DESC)"
        ranked = f"SELECT id, {latest} AS rank FROM journal WHERE {wanted}"  # noqa: S608 - our own words
        which = f"WHERE id IN (SELECT id FROM ({ranked}) WHERE rank <= ifnull(?, rank)) ORDER BY id"  # noqa: S608
        return self._select_records(which, kind, _stamp(since) if since else "", limit)

    def load_starts_and_stops(self, since: datetime) -> list[JournalRecord]:
        """Starts and stops of the agent, oldest first: those since ``since``, and the last one before it."""
        kinds = "workflow_id = '' AND kind IN ('agent_started', 'agent_stopped')"
        first = f"SELECT ifnull(max(id), 0) FROM journal WHERE {kinds} AND at < ?"  # noqa: S608 - our own words
        return self._select_records(f"WHERE {kinds} AND id >= ({first}) ORDER BY id", _stamp(since))

    def load_last_output(self, workflow_id: str, stage: str, hook: str) -> str:
        """The end of this hook's output in its last run for the event in this stage."""
        which = "workflow_id = ? AND kind = 'hook_finished' AND stage = ? AND hook = ?"
        query = f"SELECT detail FROM journal WHERE {which} ORDER BY id DESC LIMIT 1"  # noqa: S608 - our own words
        with self._reading():
            rows = self._fetch(query, workflow_id, stage, hook)
        return str(rows[0][0]) if rows else ""

    def load_last_start_and_stop(self) -> list[JournalRecord]:
        """The agent's last start and last stop, in the order in which they were written."""
        return self._select_records(
            "WHERE id IN (SELECT max(id) FROM journal WHERE workflow_id = '' AND kind IN (?, ?) GROUP BY kind)"
            " ORDER BY id",
            "agent_started",
            "agent_stopped",
        )

    def find_workflows(
        self, *, since: datetime | None = None, limit: int = -1, is_wanted: Callable[[Workflow], bool] = bool
    ) -> list[Workflow]:
        """The latest workflows that changed since ``since``, open ones too, oldest first.

        Only those that ``is_wanted`` accepts are returned, and count for the limit (-1: none).
        """
        query = "SELECT body FROM workflow WHERE updated_at >= ? ORDER BY rowid DESC"
        with self._reading():
            rows = self._connection.execute(query, (_stamp(since) if since else "",))
            wanted = filter(is_wanted, (_to_workflow(body) for (body,) in rows))
            workflows = list(itertools.islice(wanted, None if limit < 0 else limit))
            rows.close()
        return workflows[::-1]

    def load_histories(
        self, *, since: datetime | None = None, limit: int = -1, is_wanted: Callable[[Workflow], bool] = bool
    ) -> list[History]:
        """The workflows that ``find_workflows`` finds, each with its journal."""
        which = "WHERE workflow_id = ? ORDER BY id"
        return [
            History(workflow=workflow, records=tuple(self._select_records(which, workflow.id)))
            for workflow in self.find_workflows(since=since, limit=limit, is_wanted=is_wanted)
        ]

    def _select_records(self, which: str, *values: str | int | None) -> list[JournalRecord]:
        with self._reading():
            rows = self._fetch(_SELECT_RECORDS + which, *values)
            return [msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), JournalRecord) for row in rows]

    def get_meta(self, name: MetaKey) -> str:
        """A remembered fact; "" if there is none."""
        with self._reading():
            row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def created_at(self) -> datetime | None:
        """Since when there is this state; None if it is not known."""
        text = self.get_meta("created_at")
        return datetime.fromisoformat(text) if text else None

    def set_meta(self, values: dict[MetaKey, str]) -> None:
        """Remember facts, each under its name."""
        with self._transaction():
            self._write_meta(values)

    def _write_meta(self, values: dict[MetaKey, str]) -> None:
        self._connection.executemany(
            "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            list(values.items()),
        )

    def load_unsettled_loss(self) -> StateLost | None:
        """The loss of state that is not settled; the fact ``state_lost`` ends with the first document."""
        text = self.get_meta("unsettled_loss")
        return _STATE_LOST.decode(text) if text else None

    def set_unsettled_loss(self, loss: StateLost | None) -> None:
        """Remember that state was lost; None: that is settled."""
        self.set_meta({"unsettled_loss": msgspec.json.encode(loss).decode() if loss else ""})

    def load_losses(self) -> dict[str, Loss]:
        """The lost notifications of each target."""
        return _LOSSES.decode(self.get_meta("lost_notices") or "{}")

    def end_notifications(
        self,
        ids: Iterable[int],
        records: Iterable[AgentRecord] = (),
        losses: Mapping[str, Loss] | None = None,
    ) -> None:
        """Delete notifications that were delivered or are lost. ``losses``: the new ones of all targets.

        ``records``: entries for the journal, as for ``record_all``.
        """
        with self._transaction():
            self._connection.executemany("DELETE FROM outbox WHERE id = ?", [(one,) for one in ids])
            self._write_records(records)
            if losses is not None:
                self._write_meta({"lost_notices": msgspec.json.encode(losses).decode()})

    def add_request(self, workflow_id: str, action: OperatorAction, user: str, at: datetime) -> int:
        """Ask the running agent to act on an event, and wake it; returns the request's number."""
        return self._add_request(at, workflow_id, action, user)

    def add_status_request(self, at: datetime) -> int:
        """Ask the running agent for its status, and wake it; returns the request's number."""
        return self._add_request(at, "", None, "")

    def _add_request(self, at: datetime, workflow_id: str, action: OperatorAction | None, user: str) -> int:
        """``action``: None for a request for the status."""
        with self._transaction():
            cursor = self._connection.execute(
                "INSERT INTO request (at, workflow_id, action, user) VALUES (?, ?, ?, ?)",
                (_stamp(at), workflow_id, action, _storable(user)),
            )
        host.wake(self.wake_path)
        return cursor.lastrowid or 0

    def load_answer(self, request_id: int) -> RequestAnswer | None:
        """The agent's answer to a request; None if there is none yet."""
        with self._reading():
            return _to_answer(self._fetch(_SELECT_ANSWER, request_id))

    def withdraw_request(self, request_id: int) -> RequestAnswer | None:
        """Delete a request and its answer; returns the answer if there was one already."""
        with self._transaction():
            rows = self._fetch(_SELECT_ANSWER, request_id)
            self._connection.execute("DELETE FROM request WHERE id = ?", (request_id,))
        with self._reading():
            return _to_answer(rows)

    def load_requests(self, now: datetime) -> list[Request | StatusRequest]:
        """Requests that wait for an answer."""
        with self._reading():
            rows = self._fetch(
                "SELECT id, workflow_id, action, user FROM request WHERE answer IS NULL AND at > ? ORDER BY id",
                _stamp(now - timedelta(seconds=REQUEST_VALID_SECONDS)),
            )
        return [
            StatusRequest(id=id_)
            if action is None
            else Request(id=id_, workflow_id=workflow, action=action, user=user)
            for id_, workflow, action, user in rows
        ]

    def answer_request(self, request_id: int, answer: RequestAnswer) -> None:
        """Answer the operator."""
        with self._transaction():
            self._write_answer(request_id, answer)

    def prune(self, before: datetime) -> bool:
        """Delete a portion of what ended before ``before`` or is above a limit. True if there may be more.

        Open workflows stay, and the beginning and the end of their journals.
        """
        stamp = _stamp(before)
        with self._transaction():
            deleted = self._prune_events(stamp)
            deleted += self._connection.execute(
                "DELETE FROM journal WHERE at < ? AND id IN"
                " (SELECT id FROM journal WHERE workflow_id = '' ORDER BY id LIMIT ?)",
                (stamp, _PORTION_ROWS),
            ).rowcount
            deleted += self._prune_records("", MAX_RECORDS, 0)
            for (workflow_id,) in self._fetch("SELECT id FROM workflow WHERE is_open"):
                deleted += self._prune_records(workflow_id, MAX_EVENT_RECORDS, _FIRST_RECORDS)
            self._connection.execute(
                "DELETE FROM request WHERE at < ? OR id < (SELECT max(id) FROM request) - ?",
                (stamp, _MAX_REQUESTS),
            )
        return deleted >= _PORTION_EVENTS

    def _prune_events(self, stamp: str) -> int:
        ((count,),) = self._fetch("SELECT count(*) FROM workflow")
        surplus = max(count - MAX_EVENTS, _PORTION_EVENTS if self._size_bytes() > MAX_BYTES else 0)
        oldest = "SELECT id, updated_at FROM workflow WHERE NOT is_open ORDER BY rowid LIMIT ?"
        over = [
            (workflow_id,)
            for number, (workflow_id, updated_at) in enumerate(self._fetch(oldest, _PORTION_EVENTS))
            if updated_at < stamp or number < surplus
        ]
        self._connection.executemany("DELETE FROM journal WHERE workflow_id = ?", over)
        self._connection.executemany("DELETE FROM workflow WHERE id = ?", over)
        return len(over)

    def _prune_records(self, workflow_id: str, most: int, first: int) -> int:
        """Keep ``most`` entries of a workflow, ``first`` of them the oldest; deletes a portion at a time."""
        ((count,),) = self._fetch("SELECT count(*) FROM journal WHERE workflow_id = ?", workflow_id)
        surplus = min(max(0, count - most), _PORTION_ROWS)
        return self._connection.execute(
            "DELETE FROM journal WHERE id IN"
            " (SELECT id FROM journal WHERE workflow_id = ? ORDER BY id LIMIT ? OFFSET ?)",
            (workflow_id, surplus, first),
        ).rowcount

    def _fetch(self, query: str, *values: str | int | None) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _size_bytes(self, *, is_free: bool = False) -> int:
        """How much of the file is in use, or free."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, page_bytes = (self._fetch(f"PRAGMA {name}")[0][0] for name in names)
        return int((free if is_free else pages - free) * page_bytes)

    def reserve_bytes(self) -> int:
        """Number of bytes that can still be written while the disk is full."""
        log = self.path.with_name(f"{self.path.name}-wal")
        with self._reading():
            try:
                return min(self._size_bytes(is_free=True), log.stat().st_size)
            except OSError:
                return 0

    def ensure_reserve(self) -> str:
        """Fill up the reserve if it has become small. Returns why that is not possible, "" if it is full.

        It needs three times RESERVE_BYTES, 12 MiB, free on the disk.
        """
        left = self.reserve_bytes()
        if left >= RESERVE_BYTES * 3 // 4:
            return ""
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            raise StoreError(f"cannot look at the disk of {self.path}: {error.strerror}", kind="write") from error
        if free < 3 * RESERVE_BYTES:
            return (
                f"the disk of {self.path} has {free >> 10} KiB left; of the {RESERVE_BYTES >> 10} KiB that the "
                f"file keeps for a full disk, {left >> 10} KiB are left"
            )
        filler = [(f"filler {number}", _FILLER_BYTES // 2) for number in range(RESERVE_BYTES // _FILLER_BYTES)]
        forget = "DELETE FROM meta WHERE name LIKE 'filler %'"
        with self._transaction():
            self._connection.execute(forget)
            # Random bytes: some file systems do not store zeros.
            self._connection.executemany("INSERT INTO meta (name, value) VALUES (?, hex(randomblob(?)))", filler)
        with self._transaction():
            self._connection.execute(forget)
        with self._reading():
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return ""

    def _write_answer(self, request_id: int, answer: RequestAnswer) -> bool:
        """Write the answer. Returns whether the request still exists."""
        body = msgspec.json.encode(answer).decode()
        cursor = self._connection.execute("UPDATE request SET answer = ? WHERE id = ?", (body, request_id))
        return cursor.rowcount == 1

    def _write_journal(self, entries: Iterable[tuple[str, Workflow, Record]]) -> None:
        self._insert_records(
            (at, w.id, w.event.id, n.kind, n.stage, n.hook, n.outcome, n.text, n.detail) for at, w, n in entries
        )

    def _insert_records(self, rows: Iterable[tuple[str, ...]]) -> None:
        self._connection.executemany(
            "INSERT INTO journal (at, workflow_id, event_id, kind, stage, hook, outcome, text, detail)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [[_storable(value)[:_MAX_TEXT] for value in row] for row in rows],
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
            raise self._error("write", error) from error
        finally:
            self.is_writing = False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            raise self._error("read", error) from error

    def _error(self, purpose: Literal["read", "write"], error: Exception) -> StoreError:
        kind = file.error_kind(error, purpose)
        self._is_damaged = self._is_damaged or kind == "damaged"
        return StoreError(f"cannot {purpose} {self.path}: {error}", kind=kind)


def _to_workflow(body: str) -> Workflow:
    return file.WORKFLOW_DECODER.decode(body)


def _to_answer(rows: list[tuple[Any, ...]]) -> RequestAnswer | None:
    return _ANSWER.decode(rows[0][0]) if rows else None


def _storable(text: str) -> str:
    """The text with a question mark for each byte that is not UTF-8, such as from a path or the environment."""
    return text.encode("utf-8", "replace").decode()


def _stamp(at: datetime) -> str:
    """The time as text in UTC, so that stamps sort as texts."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")
