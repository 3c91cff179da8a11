"""The state file: its schema; creates, opens, migrates and closes it, and quarantines it if it is damaged.

Invariant: after a loss of state the agent never starts as if it were new.

The file and its write-ahead log hold a reserve for a full disk: free pages, and a log of full length that is
overwritten in place. So the log is never deleted. When the agent stops normally, the log is only made void.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.status.status import StateLost
from scheduled_events_agent.workflow import Workflow

FILE_NAME = "state.db"
# A file whose name has this ending says why the state is lost; the damaged file gets that name without the ending.
_QUARANTINE_MARKER = ".lost"
# This file exists beside a state file that is being created: until it is gone, an empty state file is no loss.
_CREATING_MARKER = ".begun"

# Version 1 of the schema.
_SCHEMA = """
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
        id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, workflow_id TEXT NOT NULL, action TEXT,
        user TEXT NOT NULL, answer TEXT
    ) STRICT;
    CREATE TABLE remembered_event (
        fact TEXT NOT NULL, event_key TEXT NOT NULL, user TEXT NOT NULL, at TEXT NOT NULL,
        last_seen_at TEXT NOT NULL, PRIMARY KEY (fact, event_key)
    ) STRICT;
    CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT, target TEXT NOT NULL, at TEXT NOT NULL, body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX outbox_target ON outbox (target, id);
"""
# Each entry brings the schema one version further. Released entries are never edited; new ones are added.
_MIGRATIONS: tuple[str, ...] = ()
# Another process holds the write lock for a few milliseconds at a time; longer is an error.
_BUSY_SECONDS = 2.0
# An agent that starts can wait longer. This is less than TimeoutStartSec= of the unit.
_BUSY_AT_START_SECONDS = 20.0
RESERVE_BYTES = 4 * 1024 * 1024
"""The reserve, enough for a hundred events: so much of the file is free, and so long is its write-ahead log."""
# The log is moved into the file when half of it is used, so the other half has room for the largest commit.
_CHECKPOINT_PAGES = 512
WORKFLOW_DECODER = msgspec.json.Decoder(Workflow)
_CACHE_KIB = 256  # SQLite's default takes 2 MiB of memory, for rows that the agent reads once


class StoreError(AgentError):
    """The state file cannot be read or written now.

    Kinds: locked (by another program), full (the disk), read, write, damaged, removed (removed or replaced, and it
    cannot be created again); on opening also unusable, newer, older.
    """


class _DamagedError(Exception):
    """The file exists, but it is not as this agent wrote it."""


def open_rw_create(
    directory: Path, now: datetime, on_locked: Callable[[StoreError], None]
) -> tuple[sqlite3.Connection, Path | None]:
    """Open or create the state file for the agent. Also returns the path to which a damaged file was moved.

    If another program has locked the file, this waits up to 20 seconds; ``on_locked`` is called after two.

    The file that replaces a damaged one remembers that state was lost. If that is interrupted, the next call
    continues it. Raises StoreError if no file can be used here, or if a newer version of the agent wrote it.
    """
    path = directory / FILE_NAME
    reason = "that was found earlier"
    try:
        aside = _quarantine(path)
        try:
            return _open(path, now, on_locked), aside
        except _DamagedError as error:
            reason = str(error)
        lost = _quarantine_marker(path, now)
        lost.write_text(reason, encoding="utf-8")
        lost.chmod(0o600)
        host.flush_directory(directory)
        aside = _quarantine(path)
        return _open(path, now, on_locked), aside
    except (OSError, sqlite3.Error, _DamagedError) as error:
        raise StoreError(
            f"{path} is damaged ({reason}) and cannot be quarantined ({error}): move it away, then start again",
            kind="unusable",
        ) from error


def open_rw(path: Path) -> sqlite3.Connection:
    """Open the file of an agent that may be running. Creates and migrates nothing. Raises StoreError."""
    _check_reachable(path, os.R_OK | os.W_OK)

    def prepare(connection: sqlite3.Connection) -> None:
        _check_version(path, _set_up(connection), is_owner=False)

    try:
        with _opening(path):
            return _connect(path, "mode=rw", prepare)
    except _DamagedError as error:
        raise StoreError(
            f"{path} is damaged ({error}): the agent quarantines it when it is started again", kind="unusable"
        ) from error


def open_ro(path: Path) -> sqlite3.Connection:
    """Open the file for reading only. Raises StoreError."""
    _check_reachable(path, os.R_OK)

    def check(connection: sqlite3.Connection) -> None:
        _check_version(path, _version_of(connection), is_owner=False)

    try:
        return _connect(path, "mode=ro", check)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}", kind="read") from error


def copy_open(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """Write a copy of the database of ``connection`` to the path, and open it as the agent does.

    The connection's own file may be removed. A file at the path is overwritten. Raises OSError or sqlite3.Error.
    """
    copy = path.with_name(f"{path.name}.copy")
    try:
        copy.unlink(missing_ok=True)
        os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as target:
            target.execute("PRAGMA synchronous = FULL")
            connection.backup(target)
        # The log of another file must not be applied to this one.
        for suffix in ("-shm", "-wal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        copy.replace(path)
    finally:
        copy.unlink(missing_ok=True)
    host.flush_directory(path.parent)
    host.flush_directory(path.parent.parent)
    return _connect(path, "mode=rw", _set_up)


def close(connection: sqlite3.Connection, path: Path) -> None:
    """Close the file. The write-ahead log stays in place: else another program could take its room on the disk."""
    # The last connection to close removes the log, unless it may only read.
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(sqlite3.Error):
            stack.enter_context(contextlib.closing(_connect(path, "mode=ro", _version_of)))
        connection.close()


def invalidate_wal(path: Path) -> None:
    """Make the write-ahead log void, but keep its room. All its content must be in the file already.

    A valid log would be applied to a backup that an administrator puts in the place of the file.
    """
    with path.with_name(f"{path.name}-wal").open("r+b") as log:
        log.write(bytes(4))  # where SQLite looks for a magic number
        log.flush()
        os.fsync(log.fileno())


def error_kind(error: Exception, otherwise: Literal["read", "write", "unusable"]) -> str:
    """The kind of StoreError for an error of SQLite. Unlike the others, ``damaged`` does not pass by itself."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_IOERR_WRITE:  # a used-up quota causes this, and a disk that cannot write
        return "full"
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "locked"
        case sqlite3.SQLITE_FULL:
            return "full"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "damaged"
    return otherwise


def _quarantine(path: Path) -> Path | None:
    """If the state is known to be lost, move the damaged file away. Returns its new path."""
    lost = _load_loss(path)
    if lost is None:
        return None
    aside = lost.with_suffix("")
    if not aside.exists():
        # The log goes first: it must never lie beside a file that it does not belong to.
        for suffix in ("-shm", "-wal", ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
        host.flush_directory(path.parent)
    return aside


def _quarantine_marker(path: Path, now: datetime) -> Path:
    """The file that is to say why the state is lost. No earlier damaged file has its name, less the ending."""
    while (aside := path.with_name(f"{FILE_NAME}.damaged-{now:%Y%m%dT%H%M%SZ}")).exists():
        now += timedelta(seconds=1)
    return aside.with_name(aside.name + _QUARANTINE_MARKER)


def _load_loss(path: Path) -> Path | None:
    return next(path.parent.glob(f"{FILE_NAME}.damaged-*{_QUARANTINE_MARKER}"), None)


def _open(path: Path, now: datetime, on_locked: Callable[[StoreError], None]) -> sqlite3.Connection:
    beginning = path.with_name(path.name + _CREATING_MARKER)
    try:
        if not path.exists():
            beginning.touch(0o600)
        # SQLite would follow the umask, and would not say why the file cannot be opened.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        lost = _load_loss(path)
    except OSError as error:
        raise StoreError(
            f"cannot open the state file {path}: {error.strerror or error}; "
            "run as the agent's user, or set agent.state_dir to a directory that is writable",
            kind="unusable",
        ) from error

    def prepare(connection: sqlite3.Connection) -> None:
        version = _set_up(connection)
        if version == 0 and not beginning.exists():  # cut to nothing, or its write-ahead log is lost
            raise _DamagedError("there is nothing in it")
        _check_version(path, version, is_owner=True)
        # Checking takes time, so it is done only if the last agent did not stop normally.
        in_use = "SELECT 1 FROM meta WHERE name = 'in_use'"
        if version and connection.execute(in_use).fetchone():
            (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if result != "ok":
                raise _DamagedError(" ".join(result.split()))
        _migrate(connection, version)
        for (body,) in connection.execute("SELECT body FROM workflow WHERE is_open"):
            WORKFLOW_DECODER.decode(body)
        connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('in_use', '1')")
        created_at = now.isoformat(timespec="seconds")
        connection.execute("INSERT OR IGNORE INTO meta (name, value) VALUES ('created_at', ?)", (created_at,))
        if lost:
            reason = lost.read_text(encoding="utf-8") or "the reason was not kept"
            lasting = msgspec.json.encode(StateLost(at=now, reason=reason)).decode()
            connection.execute(
                "INSERT OR REPLACE INTO meta (name, value) VALUES ('state_lost', ?), ('unsettled_loss', ?)",
                (reason, lasting),
            )
            lost.unlink()
        beginning.unlink(missing_ok=True)

    try:
        with _opening(path):
            return _connect(path, "mode=rw", prepare)
    except StoreError as error:
        if error.kind != "locked":
            raise
        on_locked(error)
    with _opening(path):
        connection = _connect(path, "mode=rw", prepare, _BUSY_AT_START_SECONDS - _BUSY_SECONDS)
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")
        return connection


def _connect(
    path: Path,
    options: str,
    prepare: Callable[[sqlite3.Connection], object],
    busy_seconds: float = _BUSY_SECONDS,
) -> sqlite3.Connection:
    """Open the file; closes it again if ``prepare`` fails. Raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: sqlite3.Connection) -> int:
    """Set how SQLite writes the file. Returns the version of its schema."""
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    # A long reader makes the log grow; afterwards it shrinks to this.
    connection.execute(f"PRAGMA journal_size_limit = {RESERVE_BYTES}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    # On a full disk nothing else may need room.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("PRAGMA temp_store = MEMORY")
    return _version_of(connection)


def _version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _known_version() -> int:
    return 1 + len(_MIGRATIONS)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """Migrate the schema from ``version`` (0: an empty file) to the newest one."""
    scripts = (_SCHEMA, *_MIGRATIONS)
    for number, script in enumerate(scripts[version:], start=version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")


def _check_reachable(path: Path, access: int) -> None:
    """Raises StoreError if the file cannot be opened, with more details than SQLite gives.

    A file that can be opened is not opened here: on Linux, closing it would give up all locks of this process on
    it, and the next process to close it would remove the agent's log.
    """
    try:
        if not os.access(path, access):
            os.close(os.open(path, os.O_RDWR if access & os.W_OK else os.O_RDONLY))  # fails, and says why
    except FileNotFoundError as error:
        if _load_loss(path):
            raise _being_created(path) from error
        raise StoreError(
            f"no agent has run with the state directory {path.parent}: name it with --state-dir", kind="unusable"
        ) from error
    except OSError as error:
        hint = (
            ": only root and the agent's account may; use sudo, or on Windows an elevated prompt"
            if isinstance(error, PermissionError)
            else ""
        )
        raise StoreError(f"cannot open {path}: {error.strerror or error}{hint}", kind="unusable") from error


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except msgspec.MsgspecError as error:
        raise _DamagedError(f"a workflow in it cannot be read: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        # Busy, disk full and no permission do not mean that the file is damaged; SQL that does not fit it does.
        if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
            kind = error_kind(error, "unusable")
            hint = ": another program uses it, a backup perhaps" if kind == "locked" else ""
            if share := _share_of(path):
                hint = f": it is on a file share ({share}), whose locks may fail; state needs a local disk"
            raise StoreError(f"cannot open the state file {path}: {error}{hint}", kind=kind) from error
        raise _DamagedError(str(error)) from error


def _being_created(path: Path) -> StoreError:
    return StoreError(f"the agent creates {path} at this moment: try again in a few seconds", kind="older")


def _share_of(path: Path) -> str:
    """The kind of the file share that the path is on; "" if it is on none that is known."""
    from scheduled_events_agent.host import disks, processes  # noqa: PLC0415  # psutil, for an error only

    system = processes.file_system(path)
    return system[0] if system and disks.is_share(system[0]) else ""


def _check_version(path: Path, version: int, *, is_owner: bool) -> None:
    if version == 0 and not is_owner:
        raise _being_created(path)
    if version > _known_version():
        raise StoreError(
            f"{path} was written by a newer version of the agent (schema {version}, "
            f"known {_known_version()}): install that version again, or move the file away",
            kind="newer",
        )
    if version < _known_version() and not is_owner:
        raise StoreError(
            f"{path} was written by an older version of the agent (schema {version}, "
            f"known {_known_version()}): restart the agent, which brings it up to date",
            kind="older",
        )
