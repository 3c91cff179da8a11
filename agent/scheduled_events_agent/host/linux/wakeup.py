"""Wakes the agent from another process, through a named pipe in the agent's private directory.

The pipe carries only the wake-up. Invariant: a process that may not use the directory cannot wake the agent.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform == "win32":
    raise ImportError("scheduled_events_agent.host.linux is for Linux; import scheduled_events_agent.host instead")


class WakeUp:
    """Waits for ``wake`` with the same path. One thread waits; any may close."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, for one where the file system has no pipes."""
        path.unlink(missing_ok=True)  # an earlier agent's, perhaps of another account
        os.mkfifo(path, 0o600)
        # With this end open for writing too, a read waits although no other process has the pipe open.
        self._pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._is_closed = False

    def wait(self) -> bool:
        """Block until another process wakes this one; False after ``close``."""
        os.read(self._pipe, 4096)
        if self._is_closed:
            os.close(self._pipe)
        return not self._is_closed

    def close(self) -> None:
        """End the wait. Call it once."""
        self._is_closed = True
        os.write(self._pipe, b"\n")


def wake(path: Path) -> None:
    """Wake the agent that waits there, if there is one. Never waits."""
    with suppress(OSError):
        # Root must not write through a link that the agent's account has put there.
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(pipe, b"\n")
        finally:
            os.close(pipe)
