"""What the agent tells its log: structlog set up once, and failures told on change.

Owns the form of log lines. Must never be the reason why the agent stops: a log that cannot be written to
is given up on silently. The one invariant: a failure that repeats is told when it begins, when it is of another
kind, once an hour, and when it is over; and no line comes more often than once a minute in the long run.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal, TextIO

import msgspec
import structlog

from agent import host
from agent.log_ids import LogId, log_id_of

Logger = structlog.typing.FilteringBoundLogger

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# Of syslog, as the journal of systemd reads them at the beginning of a line: "journalctl -p warning" finds them.
_PRIORITIES = {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>"}
JOURNAL_FIELDS = {
    "event_id": "EVENT_ID", "type": "EVENT_TYPE", "rule": "RULE", "phase": "PHASE",
    "hook": "HOOK", "stage": "STAGE",
}  # fmt: skip
"""Names of an entry's fields in the journal of systemd."""
# An entry must fit into a datagram, of which the kernel takes about 200 KiB.
_MAX_JOURNAL_MESSAGE = 32 * 1024
_MAX_JOURNAL_FIELD = 1024
_REPEAT_SECONDS = 3600.0
_MINUTE = 60.0
# So many lines come at once, then one a minute: of a failure that comes and goes, for each kind; of one message
# about one event or hook; of one message about all of them.
_FIRST_CHANGES = 4
_FIRST_OF_ONE = 20
_FIRST_OF_ALL = 500
_MAX_REMEMBERED = 5000
# A hook's run writes a thousand of them at most.
_UNBOUNDED = ("hook output",)
_PATIENCE_SECONDS = 0.1
_MAX_PIECE_BYTES = 4096  # what host.is_writable speaks for


def set_up(
    level: Literal["debug", "info", "warning", "error"],
    form: Literal["auto", "json", "console"],
    *,
    stream: TextIO | None = None,
    on_entry: Callable[[LogId | None, Mapping[str, object]], None] | None = None,
) -> None:
    """Send all logging to ``stream`` (None: standard error). May be called again, to change the level.

    ``on_entry`` gets the id of each entry, and its ``time``, ``level``, ``message`` and fields. It runs on the
    thread that logs and must not block.
    """
    stream = stream or sys.stderr
    is_terminal = _is_terminal(stream)
    processors: list[structlog.typing.Processor] = [
        _Flood(),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    if on_entry is not None:
        processors.append(_passing_on(on_entry))
    if form == "console" or (form == "auto" and is_terminal):
        has_colors = is_terminal and host.has_terminal_colors()
        renderer = structlog.dev.ConsoleRenderer(
            colors=has_colors, pad_event_to=0, sort_keys=False, timestamp_key="time"
        )
        processors += [_without_log_id, renderer]
    else:
        render = [_Journal()] if _is_journal(stream) else [_without_log_id, _to_json]
        processors += [structlog.processors.format_exc_info, *render]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(_patient(stream)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """The logger of all the agent's parts."""
    logger: Logger = structlog.get_logger()
    return logger


class FailureLog:
    """Tells of one thing that fails and recovers. For one thread; times are monotonic seconds."""

    def __init__(self, what: str, fails: LogId | None = None, works: LogId | None = None) -> None:
        """``fails`` and ``works`` are the ids of the two messages."""
        self._what = what
        self._fails, self._works = fails, works
        self._count = 0
        self._began = 0.0
        self._told: dict[str, float] = {}
        """When each kind was last told since the last recovery that was told."""
        self._kind = ""
        self._allowances: dict[str, _Allowance] = {}

    def failed(self, kind: str, message: str, now: float) -> None:
        """One more failure."""
        if not self._count:
            self._began = now
        self._count += 1
        if now - self._told.get(kind, -_REPEAT_SECONDS) >= _REPEAT_SECONDS and self._may_tell(kind, now):
            get_logger().warning(
                f"{self._what} fails", log_id=self._fails, kind=kind, reason=message, failures=self._count
            )
            self._kind, self._told[kind] = kind, now

    def succeeded(self, now: float) -> None:
        """It works; tells so if it was told that it did not."""
        if self._told and self._may_tell(self._kind, now):
            seconds = round(now - self._began, 1)
            get_logger().info(
                f"{self._what} works again", log_id=self._works, failures=self._count, after_seconds=seconds
            )
            self._told, self._count = {}, 0

    def _may_tell(self, kind: str, now: float) -> bool:
        return self._allowances.setdefault(kind, _Allowance(_FIRST_CHANGES)).take(now)


class _Allowance:
    """So many lines at first, then one a minute."""

    def __init__(self, lines: int) -> None:
        self._most = self._left = float(lines)
        self._at = 0.0
        self.left_out = 0

    def take(self, now: float) -> bool:
        """Whether one more line may be told now."""
        self._left = min(self._most, self._left + (now - self._at) / _MINUTE)
        self._at = now
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        return True


class _Flood:
    """Holds back lines that repeat: what is told again says how many like it were left out."""

    def __init__(self) -> None:
        self._of_all: dict[object, _Allowance] = {}
        self._of_one: dict[tuple[object, ...], _Allowance] = {}
        self._lock = threading.Lock()

    def __call__(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        message = event.get("event")
        if message in _UNBOUNDED:
            return event
        of_one = (message, *(event.get(name) for name in ("event_id", "hook", "stage")))
        now = time.monotonic()
        with self._lock:
            for remembered in (self._of_all, self._of_one):
                if len(remembered) > _MAX_REMEMBERED:
                    remembered.clear()
            all_ = self._of_all.setdefault(message, _Allowance(_FIRST_OF_ALL))
            one = self._of_one.setdefault(of_one, _Allowance(_FIRST_OF_ONE))
            if not (one.take(now) and all_.take(now)):
                raise structlog.DropEvent
            left_out, one.left_out, all_.left_out = one.left_out + all_.left_out, 0, 0
        return {**event, "left_out": left_out} if left_out else event


class _Patient:
    """A stream that may be closed, full or gone without hurting who writes to it: what it cannot take is lost."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_stuck = False
        self._is_cut = False

    def write(self, text: str) -> int:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                # Who reads may be slow for a moment, but is not waited for a second time.
                deadline = time.monotonic() + (0.0 if self._is_stuck else _PATIENCE_SECONDS)
                # A line whose rest was lost is ended first, so that it does not spoil this one.
                for piece in _pieces(f"\n{text}" if self._is_cut else text):
                    self._is_stuck = not _has_room(self._stream, max(0.0, deadline - time.monotonic()))
                    if self._is_stuck:
                        break
                    self._stream.write(piece)
                    self._stream.flush()
                    self._is_cut = not piece.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


@lru_cache(maxsize=1)
def _patient(stream: TextIO | None) -> _Patient:
    """One for the stream, also after another ``set_up``: loggers from before it write there too, in their turn."""
    return _Patient(stream)


def _pieces(text: str) -> list[str]:
    """The text in parts that are written without waiting wherever there is room at all."""
    # Where the stream's encoding lacks a character, it takes up to ten bytes, as in \U0001f600.
    size = _MAX_PIECE_BYTES if text.isascii() else _MAX_PIECE_BYTES // 10
    return [text[start : start + size] for start in range(0, len(text), size)]


def _has_room(stream: TextIO, patience_seconds: float) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return True  # no file of the system's
    return host.is_writable(descriptor, patience_seconds)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):  # it is closed
        return False


def _is_journal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and host.is_journal(stream.fileno())
    except (OSError, ValueError):
        return False


def _without_log_id(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    event.pop("log_id", None)
    return event


def _passing_on(
    on_entry: Callable[[LogId | None, Mapping[str, object]], None],
) -> structlog.typing.Processor:
    def pass_on(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        fields = structlog.processors.format_exc_info(logger, method, dict(event))
        log_id = log_id_of(fields.pop("log_id", None), fields["level"])
        with contextlib.suppress(Exception):  # nobody who listens is a reason to stop
            on_entry(log_id, _to_entry(fields))
        return event

    return pass_on


def _to_entry(event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What every entry has first."""
    first = {"time": event.pop("time", ""), "level": event.pop("level", ""), "message": event.pop("event", "")}
    return {**first, **event}


def _to_json(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
    """One line."""
    line = _to_entry(event)
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except UnicodeEncodeError:  # a file's name that is no text
        return json.dumps(line, default=str)


class _Journal:
    """Writes entries to the journal of systemd with fields of their own, or else as lines with a priority."""

    def __init__(self) -> None:
        self._is_stuck = False

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> str:
        priority = _PRIORITIES.get(event["level"], "<6>")
        fields = {
            name: str(event[key])[:_MAX_JOURNAL_FIELD] for key, name in JOURNAL_FIELDS.items() if event.get(key)
        }
        log_id = event.pop("log_id", None)
        if log_id and log_id.message_id:
            fields["MESSAGE_ID"] = log_id.message_id
        line = _to_json(logger, method, event)
        fields |= {
            "MESSAGE": line[:_MAX_JOURNAL_MESSAGE],
            "PRIORITY": priority.strip("<>"),
            "SYSLOG_IDENTIFIER": "scheduled-events-agent",
        }
        # Who is slow is waited for once, as with a stream.
        if host.send_to_journal(fields, 0.0 if self._is_stuck else _PATIENCE_SECONDS):
            self._is_stuck = False
            raise structlog.DropEvent
        self._is_stuck = True
        return f"{priority}{line}"
