"""What the operator wants: rules, and which of them takes an event.

Owns the vocabulary of the policy file's rules, hooks and windows, and ``decide``. Does no I/O and keeps no
state. The one invariant: what is not clearly allowed is observed and never approved.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, time, timedelta, tzinfo
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from scheduled_events_agent.events import (
    EVENT_TYPES,
    PROMISED_NOTICE_SECONDS,
    RECOMMENDATION,
    Affects,
    EventTypeName,
    ScheduledEvent,
    SourceName,
    StatusName,
)
from scheduled_events_agent.spelling import format_duration, nearest

ApproveMode = Literal["immediately", "when-prepared", "manual", "never"]
FailureMode = Literal["hold", "approve"]
SharedMode = Literal["hold", "first", "any", "all-ready"]
EarlyStartMode = Literal["cancel", "finish"]
RuleAffects = Literal["self", "shared", "others"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

# With ``shared: first``, each VM in Resources waits so much longer than the one before it: that one may be away.
SPEAKING_ORDER_SECONDS = 10.0
# Azure's usual notice: what this VM approves by itself is handled as usual if its window does not come before.
USUAL_NOTICE_SECONDS = 15 * 60.0

DEFAULT_EXPIRE_SECONDS = 3600.0

# How much of a description is searched; the longest that is known has 88 characters. The time of a search grows
# with a power of the length, and nothing can end it.
_MAX_SEARCHED = 256

Duration = Annotated[
    float,
    Meta(description="A duration such as 9s, 5m, 1h30m or 2d.", extra={"kind": "duration"}),
]
"""Seconds; in the policy file a text such as 1h30m."""

ONE_OR_MANY: dict[str, Any] = {"kind": "one-or-many"}
SECRET: dict[str, Any] = {"kind": "secret"}
"""Errors about the policy quote nothing of the value."""
_SECRET_NAMES = re.compile(
    r"secret|token|passw|passphrase|credential|(api|access|account|private|shared|storage)_?key"
    r"|connection_?string|(^|_)(pat|sas|auth)(_|$)",
    re.IGNORECASE,
)
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="Letters, digits, . _ -")]


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a rule: all that are given must hold; of a list, any one."""

    type: Annotated[tuple[EventTypeName, ...], Meta(description="Type of the event.", extra=ONE_OR_MANY)] = ()
    source: Annotated[
        tuple[SourceName, ...],
        Meta(description="Who caused the event (known from api-version 2019-08-01 on).", extra=ONE_OR_MANY),
    ] = ()
    status: Annotated[tuple[StatusName, ...], Meta(description="Status of the event.", extra=ONE_OR_MANY)] = ()
    affects: Annotated[
        tuple[RuleAffects, ...],
        Meta(
            description="self: names this VM, alone or with others; shared: names this VM and others; "
            "others: does not name this VM.",
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
    """One rule of the policy; the first whose conditions hold takes the event."""

    name: Annotated[Name, Meta(description="Name for logs and metrics.")]
    when: Annotated[When, Meta(description="Conditions; without any, every event that names this VM.")] = When()
    prepare: Annotated[
        tuple[Name, ...],
        Meta(description="Hooks to run, in order, before the event; the first failure ends them."),
    ] = ()
    on_start: Annotated[
        tuple[Name, ...], Meta(description="Hooks to run, in order, once the event has started.")
    ] = ()
    recover: Annotated[
        tuple[Name, ...],
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
        EarlyStartMode, Meta(description="What becomes of running prepare hooks when the event starts meanwhile.")
    ] = "cancel"
    lead: Annotated[
        Duration | None,
        Meta(
            description="Do nothing earlier than this long before NotBefore. Default: at once if this VM approves "
            "the event by itself, else as late as the hooks of prepare allow."
        ),
    ] = None
    window: Annotated[
        Name | None,
        Meta(description="Maintenance window in which an event announced long ahead is handled early."),
    ] = None
    expire_after: Annotated[
        Duration,
        Meta(
            gt=0, description="How long a recommendation is prepared for at most; then the hooks of recover run."
        ),
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
        Meta(description="Never run this hook for two events at the same time; the most urgent one is next."),
    ] = False
    required: Annotated[
        bool,
        Meta(description="false: if it fails, preparation or recovery goes on as if it had succeeded."),
    ] = True

    @property
    def limit_seconds(self) -> float:
        """How long it may take, with all its attempts."""
        return self.attempts * self.timeout + (self.attempts - 1) * self.retry_delay


def is_secret_name(name: str) -> bool:
    """Whether the value of a hook's variable of this name is taken for a secret."""
    return _SECRET_NAMES.search(name) is not None


def _timezone_fault(name: str) -> str:
    """Why there is no such time zone here; "" if there is."""
    if name == "UTC":
        return ""  # also where there is no time zone data
    from zoneinfo import ZoneInfo, available_timezones  # noqa: PLC0415  # an agent without windows never needs it

    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        zones = available_timezones()
        guess = nearest(name, zones)
        hint = f'; did you mean "{guess}"?' if guess else ""
        hint = hint if zones else "; this machine has no time zone data: install tzdata"
        return f'expected an IANA time zone such as Europe/Berlin; got "{name}"{hint}'
    return ""


class MaintenanceWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time of the week in which an interruption suits the operator."""

    start: Annotated[time, Meta(description="Wall-clock time of the opening, such as 02:00.")]
    length: Annotated[
        Duration, Meta(gt=0, le=7 * 86400, description="How long the window stays open; at most seven days.")
    ]
    days: Annotated[
        tuple[Day, ...], Meta(description="Days on which it opens. Default: every day.", extra=ONE_OR_MANY)
    ] = _DAYS
    timezone: Annotated[
        str, Meta(description="IANA name such as Europe/Berlin.", extra={"check": _timezone_fault})
    ] = "UTC"

    def opening(self, at: datetime, before: datetime) -> datetime | None:
        """When this window is next open, from ``at`` (if open then) until ``before``; None if not at all.

        Both times are aware; so is the result, in UTC.
        """
        zone = _zone(self.timezone)
        first = at.astimezone(zone).date() - timedelta(days=8)  # a window may be seven days long
        # Every window opens once a week, so that the seventeenth day is later than the next opening.
        for offset in range(17):
            day = first + timedelta(days=offset)
            if _DAYS[day.weekday()] not in self.days:
                continue
            # Through UTC, so that an hour that daylight saving skips or repeats counts as it is lived.
            opens = datetime.combine(day, self.start, tzinfo=zone).astimezone(UTC)
            if at < opens + timedelta(seconds=self.length) and max(opens, at) < before:
                return max(opens, at)
        return None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision rests on besides the rules and the event."""

    names: tuple[str, ...]
    """Names by which Resources may call this VM; empty when none is known yet."""
    noticed_at: datetime
    """When the event was first seen with its present NotBefore."""


class Start(NamedTuple):
    """When an event is handled: prepared for, or approved."""

    at: datetime
    reason: str
    """Why not earlier, as a clause; "" if at once."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done about one event, and why. Kept with the event's workflow."""

    rule: str | None
    """Name of the rule that took the event; None means: observe."""
    reason: str
    affects: Affects
    prepare: tuple[str, ...] = ()
    on_start: tuple[str, ...] = ()
    recover: tuple[str, ...] = ()
    drain_for: float = 0.0
    approve: ApproveMode = "never"
    on_failure: FailureMode = "hold"
    shared: SharedMode = "hold"
    may_speak: bool = False
    """Whether this VM may approve for every VM the event names."""
    speaks_after: float = 0.0
    """How long it leaves that to the VMs listed before it."""
    on_early_start: EarlyStartMode = "cancel"
    lead: float | None = None
    window_name: str | None = None
    window: MaintenanceWindow | None = None
    expire_after: float = DEFAULT_EXPIRE_SECONDS

    @property
    def has_preparation(self) -> bool:
        return bool(self.prepare or self.recover or self.drain_for)

    @property
    def refusal(self) -> str:
        """Why this VM does not approve the event by itself, as a clause; "" if it does."""
        if self.approve == "never":
            return "this VM does not approve it"
        if self.approve == "manual":
            return "an operator must approve it"
        return "" if self.may_speak else f"it names other VMs too and shared is {self.shared}"

    def start(self, event: ScheduledEvent, now: datetime, needed_seconds: float) -> Start:
        """From when the event is handled, never before ``now``.

        What this VM does not approve by itself stays prepared until Azure starts it. So, without a lead, it is
        prepared for no earlier than it must be: ``needed_seconds`` before NotBefore, and in no window.
        """
        at_once = Start(now, "")
        starts_at = event.starts_at
        if starts_at is None:
            return at_once
        is_automatic = not self.refusal
        if self.lead is not None:
            lead = self.lead
            reason = f"lead {format_duration(lead)}"
        elif is_automatic and self.window is not None:
            lead = max(needed_seconds, USUAL_NOTICE_SECONDS)
            reason = f"window {self.window_name} does not open before"
        elif not is_automatic and self.has_preparation and event.type != "Preempt":
            # An eviction, which is not among these, may come sooner than it says.
            lead = needed_seconds
            reason = f"{self.refusal}, and preparation may take {format_duration(lead)}"
        else:
            return at_once
        if (starts_at - now).total_seconds() <= lead:
            return at_once
        latest = starts_at - timedelta(seconds=lead)
        if is_automatic and self.window is not None:
            opening = self.window.opening(now, before=latest)
            if opening == now:
                return at_once
            if opening is not None:
                return Start(opening, f"window {self.window_name} opens")
        return Start(latest, reason)


class PromisedTime(NamedTuple):
    """What the notice that Azure promises for a type leaves to a rule's preparation."""

    type: str
    whole: float
    drain: float
    hooks: float
    """For all hooks of ``prepare`` together."""


def promised_times(rule: Rule, hooks: Mapping[str, Hook], reserve: float) -> Iterator[PromisedTime]:
    """For each type that the rule takes. Hooks that the policy lacks are left out."""
    limits = sum(hooks[name].limit_seconds for name in rule.prepare if name in hooks)
    for type_, notice in PROMISED_NOTICE_SECONDS.items():
        if not rule.when.type or type_ in rule.when.type:
            left = notice if rule.lead is None else min(notice, rule.lead)
            drain = drain_seconds(rule.drain_for, left, limits + reserve if rule.prepare else 0.0)
            yield PromisedTime(type_, left, drain, max(0.0, left - drain - reserve))


def drain_seconds(drain_for: float, left: float, hooks: float) -> float:
    """How long a drain takes if the event may start in ``left`` seconds: at least half of them, if it is cut.

    ``hooks``: how long the hooks after it may take, reserve included; 0 if there are none.
    """
    return max(0.0, min(drain_for, max(left - hooks, left / 2)))


def decide(
    rules: Iterable[Rule], windows: Mapping[str, MaintenanceWindow], event: ScheduledEvent, facts: Facts
) -> Decision:
    """The decision of the first rule that matches, or to observe."""
    affects = event.affects(facts.names)
    for rule in rules:
        if refusal(rule, event, facts) is None:
            return _decision_of(rule, windows, event, affects, facts)
    reasons = {
        "unknown": "this VM's name is not known, or the event names no VM: observe",
        "others": "it does not name this VM and no rule takes it: observe",
    }
    return Decision(rule=None, reason=reasons.get(affects, "no rule takes it: observe"), affects=affects)


def names_recommendations(rules: Iterable[Rule]) -> bool:
    """Whether a rule names the type of recommendations: only then are they followed."""
    return any(RECOMMENDATION in rule.when.type for rule in rules)


def passed_over(
    rules: Iterable[Rule], taken_by: str | None, event: ScheduledEvent, facts: Facts
) -> list[tuple[str, str]]:
    """The rules above the one that takes the event (None: all), each with the reason why it does not."""
    above = takewhile(lambda rule: rule.name != taken_by, rules)
    return [(rule.name, refusal(rule, event, facts) or "") for rule in above]


def refusal(rule: Rule, event: ScheduledEvent, facts: Facts) -> str | None:
    """Why the rule does not take the event, as a phrase; None if it does, unless an earlier one takes it."""
    if event.is_recommendation and RECOMMENDATION not in rule.when.type:
        return f"only a rule whose type names {RECOMMENDATION} takes one"
    return mismatch(rule.when, event, facts)


def mismatch(when: When, event: ScheduledEvent, facts: Facts) -> str | None:
    """Why the conditions do not hold, as a phrase; None if they do."""
    affects = event.affects(facts.names)
    seconds = event.duration_seconds
    if when.type and event.type not in when.type:
        return f"type is {event.type or 'missing'}, not {_either(when.type)}"
    if when.source and event.source not in when.source:
        return f"source is {event.source or 'not known'}, not {_either(when.source)}"
    if when.status and event.status not in when.status:
        return f"status is {event.status or 'missing'}, not {_either(when.status)}"
    if affects not in when.affects and not (affects == "shared" and "self" in when.affects):
        return f"it affects {affects}, not {_either(when.affects)}"
    if when.resource and not any(matches_glob(name, when.resource) for name in event.resources):
        return f"no resource matches {_either(when.resource)}"
    searched = event.description[:_MAX_SEARCHED]
    if when.description and not any(_regex(text).search(searched) for text in when.description):
        return f"the description does not match {_either(when.description)}"
    if when.duration_below is not None and (seconds is None or seconds >= when.duration_below):
        return f"duration is {_seconds(seconds)}, not below {_seconds(when.duration_below)}"
    if when.duration_at_least is not None and (seconds is None or seconds < when.duration_at_least):
        return f"duration is {_seconds(seconds)}, not at least {_seconds(when.duration_at_least)}"
    notice = notice_seconds(event, facts)
    if when.notice_below is not None and notice >= when.notice_below:
        return f"notice was {_seconds(notice)}, not below {_seconds(when.notice_below)}"
    if when.notice_at_least is not None and notice < when.notice_at_least:
        return f"notice was {_seconds(notice)}, not at least {_seconds(when.notice_at_least)}"
    return None


def notice_seconds(event: ScheduledEvent, facts: Facts) -> float:
    """How long before NotBefore the event was first seen with it; 0 if it may start at any moment."""
    if event.not_before is None or event.is_started:
        return 0.0
    return max(0.0, (event.not_before - facts.noticed_at).total_seconds())


def _decision_of(
    rule: Rule, windows: Mapping[str, MaintenanceWindow], event: ScheduledEvent, affects: Affects, facts: Facts
) -> Decision:
    shared = rule.shared or ("first" if rule.approve == "immediately" else "hold")
    approve = rule.approve
    place = event.position(facts.names) or 0
    # What is approved without preparation may be approved by any of its VMs, should those before it be away.
    may_speak = shared in ("any", "all-ready") or (shared == "first" and (place == 0 or approve == "immediately"))
    reason = f"rule {rule.name} takes it: {_summary(rule.when, event, affects)}"
    why_never = _why_not_approved(event, affects)
    if approve != "never" and why_never:
        approve = "never"
        reason = f"{reason}; {why_never}"
    return Decision(
        rule=rule.name,
        reason=reason,
        affects=affects,
        prepare=rule.prepare,
        on_start=rule.on_start,
        recover=rule.recover,
        drain_for=rule.drain_for,
        approve=approve,
        on_failure=rule.on_failure,
        shared=shared,
        may_speak=affects == "self" or (affects == "shared" and may_speak),
        speaks_after=place * SPEAKING_ORDER_SECONDS if affects == "shared" and shared == "first" else 0.0,
        on_early_start=rule.on_early_start,
        lead=rule.lead,
        window_name=rule.window,
        window=windows[rule.window] if rule.window else None,
        expire_after=rule.expire_after,
    )


def _why_not_approved(event: ScheduledEvent, affects: Affects) -> str:
    """Why the agent does not approve the event, whatever its rule says; "" if it may."""
    if affects not in ("self", "shared"):
        return "it does not name this VM, so it is not approved from here"
    if event.type not in EVENT_TYPES:
        return f"{event.type or 'a missing type'} is unknown, so it is not approved"
    if event.approval_fault:
        return event.approval_fault
    if event.is_ambiguous:
        return "the document lists it more than once, with different contents, so only an operator may approve it"
    return ""


def _summary(when: When, event: ScheduledEvent, affects: Affects) -> str:
    """The conditions that were given, with the values that met them."""
    parts = [f"affects {affects}"]
    parts += [f"{name} {getattr(event, name)}" for name in ("type", "source", "status") if getattr(when, name)]
    if when.duration_below is not None or when.duration_at_least is not None:
        parts.append(f"duration {_seconds(event.duration_seconds)}")
    others = ("resource", "description", "notice_below", "notice_at_least")
    return ", ".join([*parts, *(name for name in others if getattr(when, name) not in ((), None))])


def matches_glob(name: str, patterns: Iterable[str]) -> bool:
    """Glob match ignoring case and one leading ``_`` of the name, as names are compared everywhere."""
    low = name.casefold()
    spellings = (low, low.removeprefix("_"))
    return any(fnmatchcase(one, pattern.casefold()) for pattern in patterns for one in spellings)


@lru_cache(maxsize=16)
def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # also where there is no time zone data
    from zoneinfo import ZoneInfo  # noqa: PLC0415  # an agent without windows never needs it

    return ZoneInfo(name)


@lru_cache(maxsize=256)
def _regex(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_duration(seconds)
