"""The Event Log and the log file of an agent that runs as a Windows service, where nobody sees standard error.

Owns the event ids, the registration of the source and the rotation of the log file. Decides nothing about what is
logged: entries come from ``agent.log``. The one invariant: neither an Event Log that is away nor a disk that is
full keeps the agent waiting or raises in it; what cannot be written is lost.

Ids never change their meaning. They are below 65536 and carry no severity of their own, so that both the agent's
own message file and the one of the .NET Framework (any id, only the text) have words for them.
"""

import contextlib
import io
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, cast

from agent.host import HostError, create_private_dir, tampering_fault

SOURCE = "ScheduledEventsAgent"
REGISTRY_KEY = rf"SYSTEM\CurrentControlSet\Services\EventLog\Application\{SOURCE}"
TYPES_SUPPORTED = 7  # errors, warnings, information
LOG_FILE = "agent.log"
MAX_LOG_BYTES = 10_000_000
LOG_FILES = 5
# Shipped with every Windows Server since 2012; pywin32's own message files know a few ids only, and not these.
_FRAMEWORK_MESSAGES = r"%SystemRoot%\Microsoft.NET\Framework64\v4.0.30319\EventLogMessages.dll"
# One string of an entry may have 31,839 characters, and a text of so many leaves little room for another. They are
# counted as UTF-16 has them: a few letters are two.
_MAX_TEXT_CHARACTERS = 30_000
_MAX_ID_CHARACTERS = 200
_MAX_WAITING = 1000
_CLOSE_SECONDS = 2.0
_BROKEN_SECONDS = 5.0
_NO_FIELDS = {"time", "level", "message", "reason", "line"}  # a line is what a hook wrote, which may be secret
# The Event Log's viewer would put other strings in place of these.
_INSERTION = re.compile(r"%(?=[%\d])")

Level = Literal["info", "warning", "error"]


class Kind(NamedTuple):
    """One event id. ``messages`` are those of the log, with * for what changes from entry to entry."""

    id: int
    level: Level
    meaning: str
    messages: tuple[str, ...]


KINDS = (
    Kind(100, "info", "The agent started.", ("agent started",)),
    Kind(101, "info", "The agent stopped.", ("agent stopped",)),
    Kind(102, "info", "The agent stops, once the hooks that run have ended or their time is up.", ("stopping*",)),
    Kind(
        103,
        "error",
        "The agent failed; the service's recovery actions start it again.",
        (
            "the * thread has ended by a bug; the agent stops",
            "a bug in the agent",
            "the agent failed",
            "the agent cannot run",
            "the agent before this one crashed or hung",
            "the agent hangs: its process ends, to be started again",
        ),
    ),
    Kind(
        110,
        "error",
        "The policy file was refused: mend it and reload, or start, again.",
        (
            "the policy file is refused; the old policy stays in force",
            "the policy file is refused; the agent does not start",
        ),
    ),
    Kind(111, "info", "The policy file was read again.", ("the policy file was read again",)),
    Kind(
        112,
        "warning",
        "Something about the policy or the files it names deserves a look.",
        (
            "the policy file deserves a look",
            "agent.* takes effect at the next start of the agent",
            "hooks that pending events still need are kept until the next start",
        ),
    ),
    Kind(
        113,
        "warning",
        "The log file is not written, because others could change its directory.",
        ("the log file is not written",),
    ),
    Kind(
        114,
        "error",
        "The pages cannot be shown, or a change of agent.web_config was refused.",
        (
            "the pages cannot be shown; this is tried again",
            "agent.web_config was refused, what it said before is in force",
        ),
    ),
    Kind(
        115,
        "info",
        "The pages are shown, or agent.web_config is in force as it is now.",
        ("the pages are shown now", "agent.web_config is in force as it is now"),
    ),
    Kind(
        120,
        "warning",
        "The service was paused, or continues.",
        ("paused: it watches, and does nothing", "acts again"),
    ),
    Kind(200, "info", "A scheduled event was seen.", ("seen",)),
    Kind(201, "info", "It was decided what to do about the event.", ("decided",)),
    Kind(202, "info", "The event changed.", ("changed", "renamed", "missing")),
    Kind(203, "info", "The event started.", ("started",)),
    Kind(204, "info", "The event is no longer in the document.", ("gone",)),
    Kind(
        205,
        "warning",
        "Very many events were seen at once: the log tells of the first ones.",
        ("very many events at once: the log tells of the first ones, the command history of all",),
    ),
    Kind(210, "info", "Preparation goes on, waits or is done.", ("preparing", "prepared", "waits")),
    Kind(220, "info", "A hook starts.", ("hook started",)),
    Kind(221, "info", "A hook succeeded.", ("hook finished", "on_clear hook ended")),
    Kind(222, "warning", "A hook failed or ran out of time.", ("hook finished", "on_clear hook ended")),
    Kind(223, "info", "A hook was told to end.", ("hook canceled",)),
    Kind(
        224,
        "warning",
        "A hook was cut short and runs again, or what an earlier agent's hooks left was ended.",
        (
            "the machine goes down: this hook counts as not run, and runs again at the next start",
            "ended what hooks of an agent that was killed had left running",
        ),
    ),
    Kind(
        225,
        "info",
        "A hook that had to wait or was cut short starts now.",
        ("a hook that had to wait starts now",),
    ),
    Kind(230, "info", "The approval is sent.", ("approving",)),
    Kind(231, "info", "Azure has taken the approval.", ("approved",)),
    Kind(232, "warning", "An approval failed; it is sent again.", ("approval failed",)),
    Kind(240, "warning", "The event is held: Azure waits until NotBefore and goes ahead.", ("held",)),
    Kind(241, "warning", "The event is blocked until somebody acts.", ("blocked",)),
    Kind(242, "info", "An operator spoke.", ("operator",)),
    Kind(250, "info", "Recovery begins.", ("recovering",)),
    Kind(251, "info", "The event is over and what was prepared is recovered.", ("closed",)),
    Kind(252, "warning", "The event is over, but recovery failed: retry or resolve it.", ("recovery failed",)),
    Kind(260, "info", "The agent restarted while the event was pending.", ("restarted",)),
    Kind(300, "warning", "The metadata service does not answer.", ("polling the metadata service fails",)),
    Kind(301, "info", "The metadata service answers again.", ("polling the metadata service works again",)),
    Kind(302, "warning", "This VM's name is not known yet.", ("asking for this VM's name fails",)),
    Kind(303, "info", "This VM is known.", ("asking for this VM's name works again", "this VM is known")),
    Kind(304, "warning", "The state belongs to another VM and is not acted on.", ("the state is that of VM *",)),
    Kind(
        310,
        "warning",
        "The state file cannot be written: nothing is done until it can.",
        ("writing the state file fails", "keeping what comes while the agent stops fails"),
    ),
    Kind(
        311,
        "info",
        "The state file can be written again.",
        ("writing the state file works again", "keeping what comes while the agent stops works again"),
    ),
    Kind(
        312,
        "error",
        "The state file is damaged, or was not written at the end.",
        ("the state file was damaged and has been set aside; *", "could not write the state file while stopping"),
    ),
    Kind(
        313,
        "warning",
        "The disk is nearly full: the state file cannot keep its reserve.",
        ("keeping room in the state file for a full disk fails",),
    ),
    Kind(
        314,
        "info",
        "The state file has its reserve for a full disk again.",
        ("keeping room in the state file for a full disk works again",),
    ),
    Kind(
        320,
        "warning",
        "An event could not be handled: a bug, which concerns this event only.",
        ("handling an event fails",),
    ),
    Kind(400, "warning", "The machine stood still; the pause was measured.", ("this machine stood still",)),
    Kind(998, "warning", "Any other warning.", ("*",)),
    Kind(999, "error", "Any other error.", ("*",)),
)
_TYPES = {"info": 4, "warning": 2, "error": 1}


def _pattern(kind: Kind) -> "re.Pattern[str]":
    return re.compile("|".join(re.escape(message).replace(r"\*", ".*") for message in kind.messages), re.DOTALL)


_PATTERNS = tuple((kind, _pattern(kind)) for kind in KINDS)


def kind_of(entry: Mapping[str, object]) -> Kind | None:
    """The kind of a log entry; None if it is only for the log file."""
    level, message = entry.get("level"), str(entry.get("message"))
    found = (kind for kind, pattern in _PATTERNS if kind.level == level and pattern.fullmatch(message))
    return next(found, None)


def text_of(entry: Mapping[str, object]) -> str:
    """What the viewer shows of a log entry: the message and its reason, then a line for each other field."""
    reason = entry.get("reason")
    first = f"{entry.get('message')}: {reason}" if reason else str(entry.get("message"))
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
    return _INSERTION.sub("% ", text.replace("\0", " ")).encode("utf-8", "replace").decode()


class EventLog:
    """Passes log entries on to the Event Log, on a thread of its own. For any thread; end it with ``close``."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Kind, list[str]] | None] = queue.Queue(_MAX_WAITING)
        self._handle: Any = None
        self._thread = threading.Thread(target=self._work, name="event-log", daemon=True)
        with contextlib.suppress(RuntimeError):  # no memory for a thread
            self._thread.start()

    def report(self, entry: Mapping[str, object]) -> None:
        """Have an entry of the log (``time``, ``level``, ``message`` and fields) written, if it is of any kind."""
        kind = kind_of(entry)
        if kind is not None:
            with contextlib.suppress(queue.Full):
                event_id = _cut(_safe(str(entry.get("event_id", ""))), _MAX_ID_CHARACTERS)
                self._queue.put_nowait((kind, [text_of(entry), event_id]))

    def close(self) -> None:
        """Wait two seconds at most until what was reported is written."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            # One that was restarted wants a new handle. Whatever else is wrong is no trouble of the agent's.
            if not self._has_written(*item):
                self._has_written(*item)

    def _has_written(self, kind: Kind, strings: list[str]) -> bool:
        try:
            import win32evtlog  # noqa: PLC0415 - Windows only

            if self._handle is None:
                self._handle = win32evtlog.RegisterEventSource(None, SOURCE)
            win32evtlog.ReportEvent(self._handle, _TYPES[kind.level], 0, kind.id, None, strings, None)
        except Exception:  # noqa: BLE001 - as said above
            self._handle = None
            return False
        return True


def register_source(message_file: str = _FRAMEWORK_MESSAGES) -> None:
    """Have the viewer show our entries' text. Raises HostError without the rights of an administrator.

    ``message_file``: with texts for the ids; %NAME% is expanded by who reads it. May be called again.
    """
    if sys.platform != "win32":  # for the type checker, which knows winreg only there
        return
    import winreg  # noqa: PLC0415 - Windows only

    try:
        with winreg.CreateKeyEx(winreg.HKEY_LOCAL_MACHINE, REGISTRY_KEY, 0, winreg.KEY_SET_VALUE) as key:
            winreg.SetValueEx(key, "EventMessageFile", 0, winreg.REG_EXPAND_SZ, message_file)
            winreg.SetValueEx(key, "TypesSupported", 0, winreg.REG_DWORD, TYPES_SUPPORTED)
    except OSError as error:
        raise HostError(_refused("registered", error), kind="event_log") from None


def unregister_source() -> None:
    """Undo ``register_source``; entries that were written stay. Raises HostError as that does."""
    if sys.platform != "win32":  # as above
        return
    import winreg  # noqa: PLC0415 - Windows only

    try:
        winreg.DeleteKey(winreg.HKEY_LOCAL_MACHINE, REGISTRY_KEY)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostError(_refused("removed", error), kind="event_log") from None


def _refused(what: str, error: OSError) -> str:
    return (
        rf"HKLM\{REGISTRY_KEY}: the Event Log source cannot be {what}: {error.strerror or error}; "
        "run this from a prompt that was opened with Run as administrator"
    )


def messages_source() -> str:
    """The texts of all ids, as the message compiler (mc, windmc) reads them; %1 is what ``text_of`` gives."""
    lines = ["MessageIdTypedef=DWORD", "LanguageNames=(English=0x409:MSG00409)", ""]
    for kind in KINDS:
        lines += [f"MessageId={kind.id}", "Language=English", "%1%n%n" + kind.meaning, ".", ""]
    return "\r\n".join(lines)


def open_log_file(directory: Path) -> TextIO:
    """The log file in ``directory``, which is made private if it is missing. For any thread; never raises.

    What is written to it raises OSError while the file cannot be written, and is lost.
    """
    return cast("TextIO", _LogFile(directory))


def directory_fault(directory: Path) -> str | None:
    """Why nothing is written to the directory, which is made private if it is missing; None if all is well.

    Who could change it could have the agent, which may write anywhere, write to another file.
    """
    try:
        if not directory.exists():
            create_private_dir(directory)
    except (OSError, HostError) as error:
        return str(error)
    return tampering_fault(directory)


class _LogFile(io.TextIOBase):
    """A file of text, written at once, that is set aside at 10 MB; four older ones are kept. For any thread.

    Others may read and rename it. One that could not be written is opened again every few seconds.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG_FILE
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._size = 0
        self._is_in_line = False
        self._broken_until = 0.0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            try:
                self._make_room(len(data))
                self._write(data)
            except OSError as error:
                self._let_go()
                if time.monotonic() >= self._broken_until:
                    self._broken_until = time.monotonic() + _BROKEN_SECONDS
                raise OSError(str(error)) from None
        return len(text)

    def close(self) -> None:
        with self._lock:
            self._let_go()
        super().close()

    def _make_room(self, size: int) -> None:
        """Have an open file with room for so many bytes."""
        if self._descriptor is None:
            if time.monotonic() < self._broken_until:
                raise OSError("it could not be written a moment ago")
            self._open()
        if self._size + size > MAX_LOG_BYTES and self._size and not self._is_in_line:
            self._let_go()
            # Who has the file open in a way that forbids renaming it will let go of it; but not for ever.
            with contextlib.suppress(OSError):
                for number in range(LOG_FILES - 1, 0, -1):
                    older = self._older(number)
                    newer = self._older(number - 1) if number > 1 else self._path
                    if newer.exists():
                        newer.replace(older)
            self._open()
            if self._size > 2 * MAX_LOG_BYTES and self._descriptor is not None:
                os.ftruncate(self._descriptor, 0)
                self._size = 0

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{LOG_FILE}.{number}")

    def _open(self) -> None:
        if fault := directory_fault(self._path.parent):
            raise OSError(fault)
        self._descriptor = _open_shared(self._path)
        self._size = os.fstat(self._descriptor).st_size

    def _write(self, data: bytes) -> None:
        while data and self._descriptor is not None:
            written = os.write(self._descriptor, data)
            self._size += written
            self._is_in_line = data[written - 1 : written] != b"\n"
            data = data[written:]

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _open_shared(path: Path) -> int:
    """A descriptor that appends, and keeps nobody from reading, renaming or deleting the file."""
    if sys.platform != "win32":
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    import msvcrt  # noqa: PLC0415 - Windows only

    import pywintypes  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32file  # noqa: PLC0415 - Windows only

    share = win32con.FILE_SHARE_READ | win32con.FILE_SHARE_WRITE | win32con.FILE_SHARE_DELETE
    try:
        handle: Any = win32file.CreateFile(
            str(path),
            win32con.GENERIC_WRITE,
            share,
            None,
            win32con.OPEN_ALWAYS,
            win32con.FILE_ATTRIBUTE_NORMAL,
            None,
        )
    except pywintypes.error as error:
        raise OSError(f"{path}: {error.strerror}") from None
    return msvcrt.open_osfhandle(handle.Detach(), os.O_APPEND)
