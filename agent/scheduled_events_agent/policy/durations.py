"""Reads and writes durations, times and numbers as people write them, and cuts texts to a length.

Invariant: ``parse_duration`` reads what ``format_duration`` writes.
"""

import re
from datetime import UTC, datetime
from math import ceil

# Keeps NotBefore less a duration inside the calendar.
_MAX_DURATION_SECONDS = 3650 * 86400.0
_NUMBER = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_DURATION = "".join(rf"(?:(?P<{unit}>[0-9]+(?:\.[0-9]+)?){unit}(?![a-z]))?" for unit in _UNITS_MS)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 9s, 1h30m or 500ms. Raises ValueError, which says how to write one."""
    match = re.fullmatch(_DURATION, text) if text else None
    if match is None:
        hint = f": write {text}s if seconds are meant" if re.fullmatch(_NUMBER, text) else ""
        raise ValueError(f"expected a duration such as 9s, 5m, 1h30m or 2d; got {quote(text)}{hint}")
    seconds = sum(float(match[unit] or 0) * size for unit, size in _UNITS_MS.items()) / 1000
    if seconds > _MAX_DURATION_SECONDS:
        raise ValueError(f"expected at most {format_duration(_MAX_DURATION_SECONDS)}; got {quote(text)}")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text that ``parse_duration`` reads as ``seconds``, to the millisecond."""
    left = round(seconds * 1000)
    if 0 < left < 1000:
        return f"{left}ms"
    parts = []
    for unit in ("d", "h", "m"):
        count, left = divmod(left, _UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    if left or not parts:
        parts.append(f"{left / 1000:g}s")
    return "".join(parts)


def format_estimate(seconds: float) -> str:
    """An estimated duration: in whole seconds, rounded up."""
    return format_duration(ceil(seconds))


def parse_time(text: str, *, instead: str = "") -> datetime:
    """A time, in UTC unless the text has an offset. Raises ValueError, which says how to write one.

    ``instead``: what else might be written, for the error.
    """
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"expected {instead}a time such as 2022-04-11T22:12:00Z; got {text!r}") from None


def format_time(at: datetime, now: datetime | None = None) -> str:
    """A time for people, such as 03:28:42 UTC; with its date, unless ``now`` is on the same day.

    Without ``now`` it has the date: for texts that are kept and read later. For programs it is in ISO 8601.
    """
    time = f"{at:%H:%M:%S} UTC"
    return time if now is not None and at.date() == now.date() else f"{at.date()} {time}"


def format_deadline(at: datetime, now: datetime | None) -> str:
    """A time for people, and how long until then if ``now`` is known, such as 03:28:42 UTC (in 14m 3s)."""
    time = format_time(at, now)
    return time if now is None else f"{time}{format_left(at, now)}"


def format_left(at: datetime, now: datetime) -> str:
    """How long until a time, such as " (in 14m 3s)"; "" if it has come."""
    return f" (in {format_elapsed(now, at)})" if at > now else ""


def format_elapsed(earlier: datetime, later: datetime) -> str:
    """The time between, in at most two units, rounded down; 0s if there is none."""
    return format_rounded((later - earlier).total_seconds())


def format_rounded(length: float) -> str:
    """A measured duration in at most two units, rounded down; 0s if it is negative."""
    seconds = max(0, int(length))
    minutes = seconds // 60
    hours = seconds // 3600
    days = seconds // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {seconds % 60}s" if minutes else f"{seconds}s"


def plural(count: int, noun: str) -> str:
    """The count with its noun, such as 1 hook or 2 hooks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quote(text: str) -> str:
    """The beginning of a text in quotes and in one line, for an error."""
    return '"' + shortened(text, 60).replace("\n", "\\n") + '"'


def shortened(text: str, length: int) -> str:
    """The text, cut to at most ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
