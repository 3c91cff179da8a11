"""The Event Log and the log file of an agent that runs as a Windows service.

Both get entries from ``telemetry.log``. Neither makes the agent wait or raises in it: what cannot be written is
lost. Ids are below 65536 and carry no severity. So the agent's own message file has a text for them, and that of
the .NET Framework (any id, only the entry's text) as well.
"""

import contextlib
import io
import queue
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from scheduled_events_agent.host import create_private_dir, find_write_risk
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows.permissions import SERVICE

if sys.platform == "win32" or TYPE_CHECKING:
    import win32evtlogutil

LOG_FILE = "agent.log"
MAX_LOG_BYTES = 10_000_000
LOG_FILES = 5
# One string of an entry may have 31,839 characters. They are counted as UTF-16 has them: a few letters are two.
_MAX_TEXT_CHARACTERS = 30_000
_MAX_ID_CHARACTERS = 200
_MAX_WAITING = 1000
_CLOSE_SECONDS = 2.0
_NO_FIELDS = {
    "time",
    "level",
    "message",
    "sentence",
    "reason",
    "line",
}  # a line is what a hook wrote, which may be secret
# The Event Log's viewer would put other strings in place of these.
_INSERTION = r"%(?=[%\d])"
_TYPES = {"debug": 4, "info": 4, "warning": 2, "error": 1}


def text_of(entry: Mapping[str, object]) -> str:
    """The text for the viewer: the sentence, or message and reason; then a line for each other field."""
    reason = entry.get("reason")
    first = f"{entry.get('message')}: {reason}" if reason else str(entry.get("message"))
    if "line" not in entry:
        first = str(entry.get("sentence") or first)
    fields = [(name, value) for name, value in entry.items() if name not in _NO_FIELDS]
    lines = [f"{name}: {_shown(value)}" for name, value in fields if value not in (None, "")]
    text = "\n\n".join([first, "\n".join(lines)]) if lines else first
    return _cut(_safe(text).replace("\n", "\r\n"), _MAX_TEXT_CHARACTERS)


def _shown(value: object) -> str:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return ", ".join(map(str, value)) if is_list else str(value)  # type: ignore[call-overload]


def _cut(text: str, size: int) -> str:
    return text.encode("utf-16-le")[: 2 * size].decode("utf-16-le", "ignore")


def _safe(text: str) -> str:
    return re.sub(_INSERTION, "% ", text.replace("\0", " ")).encode("utf-8", "replace").decode()


class EventLog:
    """Writes log entries to the Event Log, on a thread of its own. For any thread; end it with ``close``."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, int, list[str]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="event-log", daemon=True)
        with contextlib.suppress(RuntimeError):  # no memory for a thread
            self._thread.start()

    def report(self, log_id: int | None, entry: Mapping[str, object]) -> None:
        """Have an entry (``time``, ``level``, ``message`` and fields) written; without an id, it is left out."""
        if log_id is not None:
            event_id = _cut(_safe(str(entry.get("event_id", ""))), _MAX_ID_CHARACTERS)
            with contextlib.suppress(queue.Full):
                kind = _TYPES[str(entry["level"])]
                self._queue.put_nowait((int(log_id), kind, [text_of(entry), event_id]))

    def close(self) -> None:
        """Wait two seconds at most until what was reported is written."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            log_id, kind, strings = item
            with contextlib.suppress(Exception):  # the log file has it
                win32evtlogutil.ReportEvent(SERVICE, log_id, eventType=kind, strings=strings)


def find_log_dir_risk(directory: Path) -> str | None:
    """Why no log file is written to the directory; None if it can be. A missing directory is created as private.

    Accounts that could change it could make the agent, which may write anywhere, write to another file.
    """
    try:
        if not directory.exists():
            create_private_dir(directory)
    except (OSError, HostError) as error:
        return str(error)
    return find_write_risk(directory)


def open_log_file(directory: Path) -> TextIO:
    """The log file in ``directory``, which is created as private if it is missing. For any thread; never raises.

    While the file cannot be written, a write to it raises OSError, and its text is lost.
    """
    return cast("TextIO", _LogFile(directory))


class _LogFile(io.TextIOBase):
    """A file of text, written at once, that is renamed at 10 MB; four older ones are kept. For any thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG_FILE
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._is_in_line = False

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            try:
                self._open_with_room(len(data)).write(data)
            except OSError:
                self._close_file()  # the next line tries again
                raise
            self._is_in_line = not text.endswith("\n")
        return len(text)

    def close(self) -> None:
        with self._lock:
            self._close_file()
        super().close()

    def _open_with_room(self, size: int) -> io.FileIO:
        file = self._file or self._open()
        used = file.tell()
        if used and used + size > MAX_LOG_BYTES and not self._is_in_line:
            self._close_file()
            with contextlib.suppress(OSError):  # a reader may have opened a file so that it cannot be renamed
                # Each line tries again then. To move files beyond a gap would lose one more at each try.
                last = LOG_FILES - 1
                gap = next((number for number in range(1, last) if not self._older(number).exists()), last)
                for number in range(gap, 0, -1):
                    self._older(number - 1).replace(self._older(number))
            file = self._open()
            if file.tell() > 2 * MAX_LOG_BYTES:
                file.truncate(file.seek(0))
        return file

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{LOG_FILE}.{number}") if number else self._path

    def _open(self) -> io.FileIO:
        if risk := find_log_dir_risk(self._path.parent):
            raise OSError(risk)
        self._file = io.FileIO(self._path, "ab")
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
