"""What the agent tells its log: structlog set up once, and failures told on change.

Owns the form of log lines. Must never be the reason why the agent stops: a log that cannot be written to
is given up on silently. The one invariant: a failure that repeats is told when it begins, when its kind
changes, once an hour, and when it is over.
"""

import contextlib
import sys
from typing import Literal, TextIO

import msgspec
import structlog

Logger = structlog.typing.FilteringBoundLogger

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_REPEAT_SECONDS = 3600.0


def set_up(level: Literal["debug", "info", "warning", "error"], form: Literal["auto", "json", "console"]) -> None:
    """Send all logging to standard error. May be called again, to change the level."""
    is_console = form == "console" or (form == "auto" and sys.stderr is not None and sys.stderr.isatty())
    renderer = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, sort_keys=False)
        if is_console
        else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    if not is_console:
        processors += [structlog.processors.format_exc_info, structlog.processors.EventRenamer("message")]
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(_Patient(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """The logger of all the agent's parts."""
    logger: Logger = structlog.get_logger()
    return logger


class FailureLog:
    """Tells of one thing that fails and recovers. For one thread; times are monotonic seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._kind = ""
        self._count = 0
        self._began = 0.0
        self._told = 0.0

    def failed(self, kind: str, message: str, now: float) -> None:
        """One more failure."""
        if not self._count:
            self._began = now
        self._count += 1
        if kind != self._kind or now - self._told >= _REPEAT_SECONDS:
            get_logger().warning(f"{self._what} fails", kind=kind, reason=message, failures=self._count)
            self._kind, self._told = kind, now

    def succeeded(self, now: float) -> None:
        """It works; tells so if it did not before."""
        if self._count:
            seconds = round(now - self._began, 1)
            get_logger().info(f"{self._what} works again", failures=self._count, after_seconds=seconds)
            self._kind, self._count = "", 0


class _Patient:
    """A stream that may be closed, full or gone without hurting who writes to it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()


def _to_json(event: dict[str, object], **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
