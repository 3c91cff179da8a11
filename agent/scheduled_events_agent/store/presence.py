"""Checks whether the agent's open files are still those at their paths, and creates them again if not.

Programs that clean directories, and restored backups, remove or replace files of a running agent. Open files can
still be read then, so nothing is lost while the agent runs. On Windows an open file can be neither removed nor
replaced.
"""

import sqlite3
from pathlib import Path
from typing import IO

from scheduled_events_agent import host
from scheduled_events_agent.store import file
from scheduled_events_agent.store.file import StoreError

LOCK_NAME = "lock"


class OpenFiles:
    """The state file that the agent has open, and the lock of its directory."""

    def __init__(self, path: Path, lock: IO[bytes] | None) -> None:
        """``path``: that of the open state file. ``lock``: is closed together with this object."""
        self._path = path.absolute()
        self._lock = lock
        self._lock_path = self._path.with_name(LOCK_NAME)
        self._device = _device_of(self._path.parent)
        locked = [] if lock is None else [self._lock_path]
        self._ids = {path: _file_id(path) for path in (self._path, *locked)}

    def close(self) -> None:
        """Release the directory for other agents."""
        if self._lock is not None:
            self._lock.close()

    def loss(self) -> str:
        """Which file or directory was removed or replaced; "" if none was."""
        if _file_id(self._path.parent) is None:
            return f"{self._path.parent} was removed"
        return "; ".join(_what_became_of(path) for path in self._ids if self._is_lost(path))

    def restore(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        """Create again what was lost: directory, lock, and the file from the connection.

        Returns the connection to use from now on. Raises AgentError, OSError or sqlite3.Error; then call it again.
        """
        directory = self._path.parent
        if _device_of(directory) != self._device:
            raise StoreError(
                f"{directory} is on another device than before: mount its file system again", kind="removed"
            )
        host.create_private_dir(directory)
        if self._lock is not None and self._is_lost(self._lock_path):
            lock = host.acquire_lock(self._lock_path)
            self._lock.close()
            self._lock = lock
            self._ids[self._lock_path] = _file_id(self._lock_path)
        if self._is_lost(self._path):
            connection = file.copy_open(connection, self._path)
            self._ids[self._path] = _file_id(self._path)
        return connection

    def _is_lost(self, path: Path) -> bool:
        known = self._ids[path]
        return known is None or _file_id(path) != known


def _what_became_of(path: Path) -> str:
    return f"{path} was removed" if _file_id(path) is None else f"{path} was replaced"


def _file_id(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no file. An open file keeps its inode, so no other file gets it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _device_of(directory: Path) -> int:
    """The device that the directory is on, or would be on."""
    place = next(place for place in (directory, *directory.parents) if place.exists())
    return place.stat().st_dev
