"""Wakes the agent from another process, which creates a file in the agent's private directory and removes it.

The file carries only the wake-up. Invariant: a process that may not use the directory cannot wake the agent.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.platform == "win32" or TYPE_CHECKING:
    import pywintypes
    import win32api
    import win32con
    import win32event


class WakeUp:
    """Waits for ``wake`` with the same path. One thread waits; any may close."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        try:
            self._changes: Any = win32api.FindFirstChangeNotification(
                str(path.parent), False, win32con.FILE_NOTIFY_CHANGE_FILE_NAME
            )
            self._closed = win32event.CreateEvent(None, True, False, None)
        except pywintypes.error as error:
            raise OSError(error.strerror) from None

    def wait(self) -> bool:
        """Block until another process wakes this one; False after ``close``."""
        events = [self._closed, self._changes]
        if win32event.WaitForMultipleObjects(events, False, win32event.INFINITE) == win32event.WAIT_OBJECT_0:
            win32api.FindCloseChangeNotification(self._changes)
            return False
        win32api.FindNextChangeNotification(self._changes)
        return True

    def close(self) -> None:
        """End the wait. Call it once."""
        win32event.SetEvent(self._closed)


def wake(path: Path) -> None:
    """Wake the agent that waits there, if there is one. Never waits."""
    with suppress(OSError):
        path.touch()
        path.unlink(missing_ok=True)
