"""Types of the policy's rules, hooks and maintenance windows. Pure: does no I/O and keeps no state."""

import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, time, timedelta, tzinfo
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from scheduled_events_agent.imds.document import (
    RECOMMENDATION,
    EventTypeName,
    SourceName,
    StatusName,
)

ApproveMode = Literal["immediately", "when-prepared", "manual", "never"]
FailureMode = Literal["hold", "approve"]
SharedMode = Literal["hold", "first", "any", "all-ready"]
EarlyStartMode = Literal["cancel", "finish"]
RuleAffects = Literal["self", "shared", "others"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_WORKDAYS = "write [mon, tue, wed, thu, fri]"
_WEEKEND = "write [sat, sun]"
_EVERY_DAY = "remove the key: it opens every day then"
_DAY_HINTS = {
    "weekend": _WEEKEND, "weekends": _WEEKEND, "sat-sun": _WEEKEND,
    "weekday": _WORKDAYS, "weekdays": _WORKDAYS, "workday": _WORKDAYS, "workdays": _WORKDAYS, "mon-fri": _WORKDAYS,
    "all": _EVERY_DAY, "any": _EVERY_DAY, "daily": _EVERY_DAY, "*": _EVERY_DAY, "mon-sun": _EVERY_DAY,
    "monday": "write mon", "tuesday": "write tue", "wednesday": "write wed", "thursday": "write thu",
    "friday": "write fri", "saturday": "write sat", "sunday": "write sun",
}  # fmt: skip
_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

DEFAULT_EXPIRE_SECONDS = 3600.0

Duration = Annotated[
    float,
    Meta(description="A duration such as 9s, 5m, 1h30m or 2d.", extra={"kind": "duration"}),
]
"""Seconds; in the policy file a text such as 1h30m."""

# Such as "W. Europe Standard Time" and "UTC-11".
_WINDOWS_TIMEZONE = r".* Standard Time|UTC[+-]\d\d"
# Debian 13 and Ubuntu 24.04 have these names in a package of their own.
_OLD_TIMEZONE = (
    r"(US|Canada|Brazil|Chile|Mexico)/.*|Australia/(ACT|NSW|North|Queensland|South|Tasmania|Victoria|West)"
    r"|Asia/(Calcutta|Dacca|Istanbul|Katmandu|Macao|Rangoon|Saigon|Tel_Aviv|Ulan_Bator)|Europe/(Belfast|Kiev)"
    r"|America/(Buenos_Aires|Cordoba|Fort_Wayne|Indianapolis|Louisville)|Cuba|Egypt|Eire|GB|GB-Eire|Hongkong"
    r"|Iceland|Iran|Israel|Jamaica|Japan|Libya|Navajo|NZ|Poland|Portugal|PRC|ROC|ROK|Singapore|Turkey"
    r"|UCT|Universal|W-SU|Zulu"
)

ONE_OR_MANY: dict[str, Any] = {"kind": "one-or-many"}
SECRET: dict[str, Any] = {"kind": "secret"}
"""Marks a secret: errors about the policy quote nothing of its value."""
_SENSITIVE_NAMES = (
    r"(?i)secret|token|passw|passphrase|credential|(api|access|account|private|shared|storage)_?key"
    r"|connection_?string|(^|_)(pat|sas|auth)(_|$)"
)
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="Letters, digits, . _ -")]

HookName = Annotated[Name, Meta(extra={"hint": "this key names hooks; write a command below hooks"})]


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a rule. All that are given must hold; in a list, any one of its values."""

    type: Annotated[tuple[EventTypeName, ...], Meta(description="Type of the event.", extra=ONE_OR_MANY)] = ()
    source: Annotated[
        tuple[SourceName, ...],
        Meta(description="Who caused the event (known from api-version 2019-08-01 on).", extra=ONE_OR_MANY),
    ] = ()
    status: Annotated[tuple[StatusName, ...], Meta(description="Status of the event.", extra=ONE_OR_MANY)] = ()
    affects: Annotated[
        tuple[RuleAffects, ...],
        Meta(
            description="self: it names this VM, alone or with others; shared: with others; others: it does not.",
            extra=ONE_OR_MANY,
        ),
    ] = ("self",)
    resource: Annotated[
        tuple[str, ...],
        Meta(description="A glob such as web_*; any resource of the event may match.", extra=ONE_OR_MANY),
    ] = ()
    description: Annotated[
        tuple[str, ...],
        Meta(
            description="A regular expression searched in the description's first 256 characters, ignoring case.",
            extra=ONE_OR_MANY,
        ),
    ] = ()
    duration_below: Annotated[
        Duration | None, Meta(gt=0, description="The estimated interruption is known and shorter than this.")
    ] = None
    duration_at_least: Annotated[
        Duration | None, Meta(description="The estimated interruption is known and at least this long.")
    ] = None
    notice_below: Annotated[
        Duration | None, Meta(gt=0, description="When its NotBefore was first seen, it was nearer than this.")
    ] = None
    notice_at_least: Annotated[
        Duration | None, Meta(description="When its NotBefore was first seen, it was at least this far away.")
    ] = None


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of the policy. The first rule whose conditions hold decides about the event."""

    name: Annotated[Name, Meta(description="Name for logs and metrics.")]
    when: Annotated[When, Meta(description="Conditions; without any, every event that names this VM.")] = When()
    prepare: Annotated[
        tuple[HookName, ...],
        Meta(description="Hooks to run, in order, before the event; the first failure ends them."),
    ] = ()
    on_start: Annotated[
        tuple[HookName, ...], Meta(description="Hooks to run, in order, once the event has started.")
    ] = ()
    recover: Annotated[
        tuple[HookName, ...],
        Meta(description="Hooks to run, in order, when an event that was prepared for is over."),
    ] = ()
    drain_for: Annotated[
        Duration, Meta(description="How long /readyz answers 503 before the hooks of prepare run.")
    ] = 0.0
    approve: Annotated[ApproveMode, Meta(description="When to let Azure start the event early.")] = "never"
    on_failure: Annotated[FailureMode, Meta(description="What to do when a hook of prepare failed.")] = "hold"
    shared: Annotated[
        SharedMode | None,
        Meta(
            description="Who approves an event that names other VMs too: hold, this VM does not; first, the "
            "first VM listed (if immediately, each one after it 10s later); any; all-ready, any once all are "
            "prepared (needs fleet). Default: first if immediately, else hold."
        ),
    ] = None
    on_early_start: Annotated[
        EarlyStartMode, Meta(description="What to do with running prepare hooks when the event starts.")
    ] = "cancel"
    lead: Annotated[
        Duration | None,
        Meta(
            description="Do nothing earlier than this long before NotBefore. Default: at once if this VM approves "
            "the event by itself, else as late as hooks allow."
        ),
    ] = None
    window: Annotated[
        Name | None,
        Meta(description="Maintenance window in which an event announced long ahead is handled early."),
    ] = None
    expire_after: Annotated[
        Duration,
        Meta(gt=0, description="How long a recommendation is prepared for at most."),
    ] = DEFAULT_EXPIRE_SECONDS


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program to run. Either ``run`` or ``shell`` is set."""

    run: Annotated[
        tuple[str, ...] | None,
        Meta(description="Program and arguments; no shell is involved.", extra=SECRET),
    ] = None
    shell: Annotated[
        str | None,
        Meta(description="A command line for /bin/sh (Linux) or cmd (Windows).", extra=SECRET),
    ] = None
    timeout: Annotated[Duration, Meta(gt=0, description="Time limit of one attempt.")] = 300.0
    attempts: Annotated[int, Meta(ge=1, le=100, description="How often to try.")] = 1
    retry_delay: Annotated[Duration, Meta(description="Pause between attempts.")] = 1.0
    user: Annotated[str | None, Meta(description="Account to run as (Linux only). Default: the agent's.")] = None
    cwd: Annotated[str | None, Meta(description="Working directory. Default: the root directory.")] = None
    env: Annotated[dict[str, str], Meta(description="Additional environment variables.", extra=SECRET)] = {}
    serialize: Annotated[
        bool,
        Meta(description="Never run this hook for two events at the same time."),
    ] = False
    required: Annotated[
        bool,
        Meta(description="false: if it fails, preparation or recovery goes on as if it had succeeded."),
    ] = True

    @property
    def limit_seconds(self) -> float:
        """How long the hook may take by its time limits, with all its attempts."""
        return self.attempts * self.timeout + (self.attempts - 1) * self.retry_delay


def is_secret_name(name: str) -> bool:
    """Whether the value of a hook's variable with this name counts as a secret."""
    return re.search(_SENSITIVE_NAMES, name) is not None


def _timezone_error(name: str) -> str:
    """Why there is no such time zone here; "" if there is."""
    if name == "UTC":
        return ""  # UTC needs no time zone data
    from zoneinfo import ZoneInfo, available_timezones  # noqa: PLC0415  # an agent without windows never needs it

    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        hint = _timezone_hint(name, available_timezones())
        return f'expected an IANA time zone such as Europe/Berlin; got "{name}"{hint}'
    return ""


def _timezone_hint(name: str, zones: Collection[str]) -> str:
    if re.fullmatch(_WINDOWS_TIMEZONE, name):
        return ", which is a name of Windows"
    if not zones:
        return "; this machine has no time zone data: install tzdata"
    if re.fullmatch(_OLD_TIMEZONE, name):
        return ", which is an old name: use the new one, or install the package tzdata-legacy"
    from scheduled_events_agent.policy.typed_yaml import nearest  # noqa: PLC0415  # with PyYAML

    guess = nearest(name, [zone for zone in zones if "/" in zone])  # EST is not like CEST
    return f'; did you mean "{guess}"?' if guess else ""


class MaintenanceWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time of the week in which the operator accepts an interruption."""

    start: Annotated[time, Meta(description="Wall-clock time of the opening, such as 02:00.")]
    length: Annotated[
        Duration, Meta(gt=0, le=7 * 86400, description="How long the window stays open; at most seven days.")
    ]
    days: Annotated[
        tuple[Annotated[Day, Meta(extra={"hints": _DAY_HINTS})], ...],
        Meta(description="Days on which it opens.", extra=ONE_OR_MANY),
    ] = _DAYS
    timezone: Annotated[
        str, Meta(description="IANA name such as Europe/Berlin.", extra={"check": _timezone_error})
    ] = "UTC"

    def opening(self, at: datetime, before: datetime) -> datetime | None:
        """When this window is next open, from ``at`` (if open then) until ``before``; None if not at all.

        Both times are aware; so is the result, in UTC.
        """
        zone = _zone(self.timezone)
        first = at.astimezone(zone).date() - timedelta(days=8)  # a window may be seven days long
        # Every window opens at least once a week, so the seventeenth day is later than the next opening.
        for offset in range(17):
            day = first + timedelta(days=offset)
            if _DAYS[day.weekday()] not in self.days:
                continue
            # Computed in UTC: an hour that daylight saving skips or repeats then counts as it really passes.
            opens = datetime.combine(day, self.start, tzinfo=zone).astimezone(UTC)
            if at < opens + timedelta(seconds=self.length) and max(opens, at) < before:
                return max(opens, at)
        return None


def names_recommendations(rules: Iterable[Rule]) -> bool:
    """Whether a rule names the type of recommendations. Only then recommendations are followed."""
    return any(RECOMMENDATION in rule.when.type for rule in rules)


def matches_glob(name: str, patterns: Iterable[str]) -> bool:
    """Glob match ignoring case and one leading ``_`` of the name, as names are compared everywhere."""
    low = name.casefold()
    spellings = (low, low.removeprefix("_"))
    return any(fnmatchcase(one, pattern.casefold()) for pattern in patterns for one in spellings)


@lru_cache(maxsize=16)
def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # UTC needs no time zone data
    from zoneinfo import ZoneInfo  # noqa: PLC0415  # an agent without windows never needs it

    return ZoneInfo(name)
