"""Reads a small file of settings or secrets, and never waits.

A plain open of a named pipe would wait until another process writes into the pipe.
"""

import os
import stat
import sys
from pathlib import Path

from scheduled_events_agent.host.error import HostError

if sys.platform == "win32":
    from scheduled_events_agent.host.windows.files import find_write_risk, is_privileged
else:
    from scheduled_events_agent.host.linux.files import find_write_risk, is_privileged

_NOT_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)  # Windows has none, and needs none


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. Raises HostError, which names the file and says why it cannot be used.

    The error's summary is the reason alone.
    """
    try:
        with open(path, "rb", opener=_open) as file:  # a path's own open takes no opener
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(max_bytes + 1) if is_regular else b""
    except (OSError, ValueError) as error:  # ValueError: no path at all
        reason = getattr(error, "strerror", None) or error
        raise _file_error(path, f"cannot be read: {reason}") from error
    if not is_regular:
        raise _file_error(path, "is not a regular file")
    if len(content) > max_bytes:
        raise _file_error(path, f"expected at most {max_bytes // 1024} KiB; it is larger")
    return content


def _file_error(path: Path, reason: str) -> HostError:
    return HostError(f"{path}: {reason}", kind="file", summary=reason)


def read_trusted_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file, which a process that is root reads only if no other account could change it.

    Raises HostError, which names the file and says why it cannot be used.
    """
    if is_privileged() and (risk := find_write_risk(path)):
        raise HostError(risk, kind="file")
    return read_small_file(path, max_bytes)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | _NOT_BLOCKING)
