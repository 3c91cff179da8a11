"""The agent's log: structlog set up once, and failures logged on change.

It decides how log lines look. It never stops or delays the agent: a line that cannot be written is lost.
Invariant: a failure that repeats is logged when it begins, when its kind changes, once an hour, and when it is
over. In the long run, no line above debug comes more often than once a minute.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TextIO

import msgspec
import structlog

from scheduled_events_agent import host
from scheduled_events_agent.imds.text import printable
from scheduled_events_agent.policy.settings import LogFormat, LogLevel
from scheduled_events_agent.status.actions import SHORT_ID
from scheduled_events_agent.telemetry.log_ids import LogId, log_id_of

Logger = structlog.typing.FilteringBoundLogger

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# Syslog's priorities at the beginning of a line: systemd reads them, for "journalctl -p warning".
_PRIORITIES = {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>"}
JOURNAL_FIELDS = {
    "event_id": "EVENT_ID", "type": "EVENT_TYPE", "rule": "RULE", "phase": "PHASE",
    "hook": "HOOK", "stage": "STAGE",
}  # fmt: skip
"""Names of fields in systemd's journal; any other field has its own name there, in capitals."""
# Fields that JSON lines do not have: the number of the message, and the line as people read it.
_ASIDE = ("log_id", "sentence")
# Fields that are part of MESSAGE's sentence already and do not follow in brackets.
_IN_SENTENCE = (
    "time", "level", "event", "event_id", "type", "rule", "phase", "reason", "problem", "line", "exception",
    "crash_log", *_ASIDE,
)  # fmt: skip
# An entry must fit into a datagram; the kernel's limit is about 200 KiB.
_MAX_JOURNAL_MESSAGE = 32 * 1024
_MAX_JOURNAL_SENTENCE = 4 * 1024
_MAX_JOURNAL_FIELD = 1024
_MAX_JOURNAL_TEXT = 8 * 1024
_JOURNAL_TEXTS = ("reason", "line", "exception", "crash_log")
_REPEAT_SECONDS = 3600.0
_MINUTE = 60.0
# So many lines at once, then one a minute: of each kind of a failure that comes and goes; of one message about one
# event, hook or problem of the policy; of one message about all of them.
_BURST_OF_KIND = 4
_BURST_OF_ONE = 20
_BURST_OF_ALL = 500
_MAX_LIMITS = 5000
# A hook's run has a limit of its own, a thousand lines.
_UNLIMITED = ("hook output",)
_TIMEOUT_SECONDS = 0.1
_MAX_PIECE_BYTES = 4096  # what fits when host.is_writable says that there is room


# With what the log was set up last; empty as long as it was not.
_set_up: dict[str, Any] = {}


def set_up(
    level: LogLevel,
    form: LogFormat,
    *,
    stream: TextIO | None = None,
    on_entry: Callable[[LogId | None, Mapping[str, object]], None] | None = None,
) -> None:
    """Send all logging to ``stream`` (None: standard error).

    ``on_entry`` gets the id of each entry, and its ``time``, ``level``, ``message`` and fields; among them
    ``sentence``, where the entry has one: the line as people read it. It runs on the thread that logs and must not
    block.
    """
    _set_up.clear()
    _set_up.update(level=level, form=form, stream=stream, on_entry=on_entry)
    stream = stream or sys.stderr
    is_terminal = _is(os.isatty, stream)
    processors: list[structlog.typing.Processor] = [
        _limiter(stream),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    if on_entry is not None:
        processors.append(_listener(on_entry))
    if form == "console" or (form == "auto" and is_terminal):
        has_colors = is_terminal and host.has_terminal_colors()
        renderer = structlog.dev.ConsoleRenderer(
            colors=has_colors, pad_event_to=0, sort_keys=False, timestamp_key="time"
        )
        processors += [_without_asides, renderer]
    else:
        render = _Journal(is_for_people=form == "auto") if _is(host.is_journal, stream) else _to_json
        processors += [structlog.processors.format_exc_info, render]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(_safe(stream)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


def change(level: LogLevel, form: LogFormat) -> None:
    """Log with another level or in another form from now on, to where the log was set up."""
    if _set_up and (level, form) != (_set_up["level"], _set_up["form"]):
        set_up(level, form, stream=_set_up["stream"], on_entry=_set_up["on_entry"])


def get_logger() -> Logger:
    """The logger of all the agent's parts."""
    logger: Logger = structlog.get_logger()
    return logger


def is_debugging() -> bool:
    """Whether debug lines are written. If not, callers do not compute what only these lines need."""
    return structlog.is_configured() and get_logger().is_enabled_for(_LEVELS["debug"])


class ChangeLogger:
    """Logs one thing that fails and recovers. For one thread; times are monotonic seconds."""

    def __init__(self, what: str, fails: LogId | None = None, works: LogId | None = None) -> None:
        """``fails`` and ``works`` are the ids of the two messages."""
        self._what = what
        self._fails = fails
        self._works = works
        self._count = 0
        self._began = 0.0
        self._logged_at: dict[str, float] = {}
        """When each kind was last logged since the last recovery."""
        self._kind = ""
        self._limits: dict[str, _RateLimit] = {}

    def failed(self, kind: str, message: str, now: float) -> None:
        """One more failure."""
        if not self._count:
            self._began = now
        self._count += 1
        if now - self._logged_at.get(kind, -_REPEAT_SECONDS) >= _REPEAT_SECONDS and self._may_log(kind, now):
            get_logger().warning(
                f"{self._what} fails", log_id=self._fails, kind=kind, reason=message, failures=self._count
            )
            self._kind = kind
            self._logged_at[kind] = now

    def succeeded(self, now: float) -> None:
        """Report success. It is logged if a failure was logged before."""
        if self._logged_at and self._may_log(self._kind, now):
            seconds = round(now - self._began, 1)
            get_logger().info(
                f"{self._what} works again", log_id=self._works, failures=self._count, after_seconds=seconds
            )
            self._logged_at = {}
            self._count = 0

    def _may_log(self, kind: str, now: float) -> bool:
        return self._limits.setdefault(kind, _RateLimit(_BURST_OF_KIND)).allow(now)


class _RateLimit:
    """A burst of lines at first, then one a minute."""

    def __init__(self, burst: int) -> None:
        self._burst = self._left = float(burst)
        self._at = 0.0
        self.suppressed = 0

    def allow(self, now: float) -> bool:
        """Whether one more line may be logged now."""
        self._left = min(self._burst, self._left + (now - self._at) / _MINUTE)
        self._at = now
        if self._left < 1:
            self.suppressed += 1
            return False
        self._left -= 1
        return True


class _RateLimiter:
    """Drops lines that repeat; the next line of that kind says how many were suppressed."""

    def __init__(self) -> None:
        self._of_all: dict[object, _RateLimit] = {}
        self._of_one: dict[tuple[object, ...], _RateLimit] = {}
        self._lock = threading.Lock()

    def __call__(
        self, _logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        message = event.get("event")
        if message in _UNLIMITED or method == "debug":
            return event
        key = (message, *(event.get(name) for name in ("event_id", "hook", "stage", "problem")))
        now = time.monotonic()
        with self._lock:
            for limits in (self._of_all, self._of_one):
                if len(limits) > _MAX_LIMITS:
                    limits.clear()
            all_ = self._of_all.setdefault(message, _RateLimit(_BURST_OF_ALL))
            one = self._of_one.setdefault(key, _RateLimit(_BURST_OF_ONE))
            if not (one.allow(now) and all_.allow(now)):
                raise structlog.DropEvent
            suppressed = one.suppressed + all_.suppressed
            one.suppressed = 0
            all_.suppressed = 0
        return {**event, "suppressed": suppressed} if suppressed else event


@lru_cache(maxsize=1)
def _limiter(_stream: TextIO | None) -> _RateLimiter:
    """The limit of a stream, kept after another ``set_up``: a reload must not give each line a new burst."""
    return _RateLimiter()


class _SafeStream:
    """A stream that may be closed, full or gone: what cannot be written is lost, and no writer waits long."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_stuck = False
        self._is_cut = False

    def write(self, text: str) -> int:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._write(self._stream, text)
        return len(text)

    def _write(self, stream: TextIO, text: str) -> None:
        # A slow reader is waited for once; then not until it has read again.
        deadline = time.monotonic() + (0.0 if self._is_stuck else _TIMEOUT_SECONDS)
        # A line that was cut off is ended first, so that it does not spoil this one.
        for piece in _pieces(f"\n{text}" if self._is_cut else text):
            self._is_stuck = not _has_room(stream, max(0.0, deadline - time.monotonic()))
            if self._is_stuck:
                return
            stream.write(piece)
            stream.flush()
            self._is_cut = not piece.endswith("\n")

    def flush(self) -> None:
        """Nothing is buffered."""


@lru_cache(maxsize=1)
def _safe(stream: TextIO | None) -> _SafeStream:
    """The wrapper of a stream, kept after another ``set_up``: older loggers must not write between its pieces."""
    return _SafeStream(stream)


def _pieces(text: str) -> list[str]:
    """Parts of the text that fit wherever there is room at all."""
    # A character that the stream's encoding lacks takes up to ten bytes, as in \U0001f600.
    size = _MAX_PIECE_BYTES if text.isascii() else _MAX_PIECE_BYTES // 10
    return [text[start : start + size] for start in range(0, len(text), size)]


def _has_room(stream: TextIO, timeout_seconds: float) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return True  # not a file of the system
    return host.is_writable(descriptor, timeout_seconds)


def _is(what: Callable[[int], bool], stream: TextIO | None) -> bool:
    try:
        return stream is not None and what(stream.fileno())
    except (OSError, ValueError):  # it is closed, or not a file of the system
        return False


def _without_asides(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {name: value for name, value in event.items() if name not in _ASIDE}


def _listener(
    on_entry: Callable[[LogId | None, Mapping[str, object]], None],
) -> structlog.typing.Processor:
    def pass_on(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        fields = structlog.processors.format_exc_info(logger, method, dict(event))
        log_id = log_id_of(fields.get("log_id"), fields["level"])
        sentence = {"sentence": fields["sentence"]} if "sentence" in fields else {}
        with contextlib.suppress(Exception):  # a listener must not stop the agent
            on_entry(log_id, {**_to_entry(fields), **sentence})
        return event

    return pass_on


def _to_entry(event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Time, level and message come first."""
    first = {"time": event.get("time", ""), "level": event.get("level", ""), "message": event.get("event", "")}
    rest = {name: value for name, value in event.items() if name not in ("time", "level", "event", *_ASIDE)}
    return {**first, **rest}


def _to_json(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
    """One line."""
    line = _to_entry(event)
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except UnicodeEncodeError:  # such as a file name with bytes that are not UTF-8
        return json.dumps(line, default=str)


def _to_sentence(event: structlog.typing.EventDict) -> str:
    """The entry as people read it, in one line; the journal has the time and the event's whole id beside it."""
    sentence = str(event.get("sentence", ""))
    if not sentence:
        *_, last_line = str(event.get("exception", "")).splitlines() or [""]
        why = [str(event[name]) for name in ("reason", "problem", "line", "crash_log") if event.get(name)]
        event_id = str(event.get("event_id") or "")
        about = f"{event.get('type') or 'event'} {event_id[:SHORT_ID]}" if event_id else ""
        sentence = ": ".join(filter(None, [about, str(event["event"]), *why, last_line]))
        more = [f"{name} {_to_text(event[name])}" for name in event if name not in _IN_SENTENCE]
        sentence += f" ({'; '.join(more)})" if more else ""
    return printable(sentence)[:_MAX_JOURNAL_SENTENCE]


def _to_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _to_journal_fields(event: structlog.typing.EventDict) -> dict[str, str]:
    """All fields but time and level, which the journal has by itself."""
    fields = {"LOG_MESSAGE": str(event["event"])}
    for key, value in event.items():
        if key not in ("time", "level", "event", *_ASIDE):
            size = _MAX_JOURNAL_TEXT if key in _JOURNAL_TEXTS else _MAX_JOURNAL_FIELD
            fields[JOURNAL_FIELDS.get(key, key.upper())] = "" if value is None else _to_text(value)[:size]
    return fields


class _Journal:
    """Sends entries to systemd's journal with fields, or, if it does not accept them, as JSON with a priority."""

    def __init__(self, *, is_for_people: bool) -> None:
        """``is_for_people``: MESSAGE is a sentence and each fact a field; else MESSAGE is JSON with all facts."""
        self._is_for_people = is_for_people
        self._is_stuck = False

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> str:
        priority = _PRIORITIES.get(event["level"], "<6>")
        log_id = event.get("log_id")
        if self._is_for_people:
            fields = {**_to_journal_fields(event), "MESSAGE": _to_sentence(event)}
        else:
            fields = {name: str(event.get(key) or "")[:_MAX_JOURNAL_FIELD] for key, name in JOURNAL_FIELDS.items()}
            fields["MESSAGE"] = _to_json(logger, method, event)[:_MAX_JOURNAL_MESSAGE]
        fields |= {
            "MESSAGE_ID": log_id.message_id if log_id else "",
            "PRIORITY": priority.strip("<>"),
            "SYSLOG_IDENTIFIER": "scheduled-events-agent",
        }
        fields = {name: value for name, value in fields.items() if value}
        # A slow journal is waited for once, as a stream is.
        if host.send_to_journal(fields, 0.0 if self._is_stuck else _TIMEOUT_SECONDS):
            self._is_stuck = False
            raise structlog.DropEvent
        self._is_stuck = True
        return f"{priority}{_to_json(logger, method, event)}"
