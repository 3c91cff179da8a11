"""Estimates how long hooks take: their time limits, or less if their last runs are known.

It keeps the durations of earlier runs. Does no I/O. Invariant: a hook whose runs are not known to be shorter
counts with its time limits.
"""

from collections.abc import Mapping

import msgspec

from scheduled_events_agent.policy import Hook
from scheduled_events_agent.workflow import HookOutcome

_KEEP = 5
# A hook may take this many times as long as the longest remembered run, and this many seconds more.
_FACTOR = 2.0
_MARGIN_SECONDS = 10.0


class HookTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last successful runs of one hook in ``prepare``."""

    command: str
    """A digest of the command: another command may take another time."""
    seconds: tuple[float, ...]


KnownTimes = Mapping[str, HookTimes]
"""The value for each hook, by its name."""
# Made here, not at first use: two threads that describe a type to msgspec at the same moment crash the process.
_DECODER = msgspec.json.Decoder(dict[str, HookTimes])


def record_run(
    known: KnownTimes, name: str, hook: Hook, outcome: HookOutcome, seconds: float
) -> dict[str, HookTimes]:
    """The known times after one more run."""
    command = _digest(hook)
    before = known.get(name)
    others = {key: times for key, times in known.items() if key != name}
    if outcome == "canceled":
        return dict(known)
    if outcome != "succeeded":
        return others  # it may be as slow again
    kept = before.seconds if before is not None and before.command == command else ()
    return {**others, name: HookTimes(command=command, seconds=(*kept, round(seconds, 3))[-_KEEP:])}


def estimate_seconds(known: KnownTimes, name: str, hook: Hook) -> float:
    """How long the hook may take according to its last runs, with all its attempts."""
    times = known.get(name)
    if times is None or not times.seconds or times.command != _digest(hook):
        return hook.limit_seconds
    return min(hook.limit_seconds, _FACTOR * max(times.seconds) + _MARGIN_SECONDS)


def encode(known: KnownTimes) -> str:
    """The known times as a text for the state file."""
    return msgspec.json.encode(known).decode()


def decode(text: str) -> dict[str, HookTimes]:
    """The known times from a text of ``encode``; none if it cannot be read."""
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError:
        return {}


def _digest(hook: Hook) -> str:
    from hashlib import sha256  # noqa: PLC0415  # 3 ms of OpenSSL, for which only earlier runs have a use

    what = (hook.run, hook.shell, hook.user, hook.cwd)
    return sha256(msgspec.json.encode(what)).hexdigest()[:16]
