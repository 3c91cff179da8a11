"""The decision about an event: the first rule that matches, with the reason. Pure.

Invariant: an event that no rule clearly allows to approve is never approved.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec

from scheduled_events_agent.imds.document import (
    EVENT_TYPES,
    PROMISED_NOTICE_SECONDS,
    RECOMMENDATION,
    Affects,
    ScheduledEvent,
)
from scheduled_events_agent.policy.durations import format_duration, format_estimate
from scheduled_events_agent.policy.rules import (
    DEFAULT_EXPIRE_SECONDS,
    ApproveMode,
    EarlyStartMode,
    FailureMode,
    Hook,
    MaintenanceWindow,
    Rule,
    SharedMode,
    When,
    matches_glob,
)

# With ``shared: first``, each VM in Resources waits this much longer than the one before it, which may be down.
APPROVAL_STAGGER_SECONDS = 10.0
# Azure's usual notice. An event that this VM approves by itself is handled this early if no window opens before.
USUAL_NOTICE_SECONDS = 15 * 60.0

# Only this much of a description is searched; the longest known one has 88 characters. The time of a search grows
# with a power of the length, and a search cannot be ended.
_MAX_SEARCHED = 256


class MatchContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision depends on besides the rules and the event."""

    names: tuple[str, ...]
    """Names by which Resources may call this VM; empty when none is known yet."""
    not_before_seen_at: datetime
    """When the event was first seen with its present NotBefore."""


class StartTime(NamedTuple):
    """The time from which an event is handled: prepared for, or approved."""

    at: datetime
    reason: str
    """Why not earlier, as a clause; "" if at once."""
    kind: Literal["time", "window"] = "time"
    """window: a maintenance window opens then."""


class LatestBegin(NamedTuple):
    """How long before NotBefore an event is handled at the latest."""

    seconds: float
    reason: str
    """Why not earlier, as a clause."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The actions for one event, and the reason. Stored with the event's workflow."""

    rule: str | None
    """None: the event is only observed."""
    reason: str
    affects: Affects
    prepare: tuple[str, ...] = ()
    on_start: tuple[str, ...] = ()
    recover: tuple[str, ...] = ()
    drain_for: float = 0.0
    approve: ApproveMode = "never"
    on_failure: FailureMode = "hold"
    shared: SharedMode = "hold"
    can_approve_for_all: bool = False
    approve_after_seconds: float = 0.0
    """How long this VM leaves the approval to those listed before it."""
    on_early_start: EarlyStartMode = "cancel"
    lead: float | None = None
    window_name: str | None = None
    window: MaintenanceWindow | None = None
    expire_after: float = DEFAULT_EXPIRE_SECONDS

    @property
    def has_preparation(self) -> bool:
        return bool(self.prepare or self.recover or self.drain_for)

    @property
    def why_not_automatic(self) -> str:
        """Why this VM does not approve the event by itself, as a clause; "" if it does."""
        if self.approve == "never":
            return "this VM does not approve it"
        if self.approve == "manual":
            return "an operator must approve it"
        return "" if self.can_approve_for_all else f"it names other VMs too and shared is {self.shared}"

    def start(self, event: ScheduledEvent, now: datetime, needed_seconds: float) -> StartTime:
        """From when the event is handled, never before ``now``.

        A window that opens before the latest begin makes it earlier.
        """
        at_once = StartTime(now, "")
        latest = self.latest_begin(event, needed_seconds)
        starts_at = event.starts_at
        if latest is None or starts_at is None or (starts_at - now).total_seconds() <= latest.seconds:
            return at_once
        latest_at = starts_at - timedelta(seconds=latest.seconds)
        if self.begins_in_window and self.window is not None:
            opening = self.window.opening(now, before=latest_at)
            if opening == now:
                return at_once
            if opening is not None:
                return StartTime(opening, f"window {self.window_name} opens", "window")
        return StartTime(latest_at, latest.reason)

    @property
    def begins_in_window(self) -> bool:
        """Whether an open maintenance window makes the handling begin."""
        return self.window is not None and not self.why_not_automatic

    def latest_begin(self, event: ScheduledEvent, needed_seconds: float) -> LatestBegin | None:
        """How long before NotBefore the event is handled at the latest; None: at once, whenever that is.

        If this VM does not approve the event by itself, it stays prepared until Azure starts the event. So,
        without a lead, it prepares as late as possible: ``needed_seconds`` before NotBefore, and in no window.
        """
        if event.starts_at is None:
            return None
        if self.lead is not None:
            return LatestBegin(self.lead, f"lead {format_duration(self.lead)}")
        if self.begins_in_window:
            seconds = max(needed_seconds, USUAL_NOTICE_SECONDS)
            return LatestBegin(seconds, f"window {self.window_name} does not open before")
        # Evictions are excluded here: one may come sooner than its NotBefore.
        if self.why_not_automatic and self.has_preparation and event.type != "Preempt":
            may_take = f"preparation may take {format_estimate(needed_seconds)}"
            return LatestBegin(needed_seconds, f"{self.why_not_automatic}, and {may_take}")
        return None


class PromisedTime(NamedTuple):
    """The time for a rule's preparation within the notice that Azure promises for a type."""

    type: str
    whole: float
    drain: float
    hooks: float
    """Seconds for all hooks of ``prepare`` together."""


def promised_times(
    rule: Rule, types: Container[str], hooks: Mapping[str, Hook], reserve: float
) -> Iterator[PromisedTime]:
    """The promised time for each of the types. Hooks that the policy lacks are not counted."""
    limits = sum(hooks[name].limit_seconds for name in rule.prepare if name in hooks)
    for type_, notice in PROMISED_NOTICE_SECONDS.items():
        if type_ in types:
            left = notice if rule.lead is None else min(notice, rule.lead)
            drain = drain_seconds(rule.drain_for, left, limits + reserve if rule.prepare else 0.0)
            yield PromisedTime(type_, left, drain, max(0.0, left - drain - reserve))


def drain_seconds(drain_for: float, left: float, hooks: float) -> float:
    """How long a drain takes if the event may start in ``left`` seconds. A drain that is cut gets at least half.

    ``hooks``: how long the hooks after the drain may take, reserve included; 0 if there are none.
    """
    return max(0.0, min(drain_for, max(left - hooks, left / 2)))


def decide(
    rules: Iterable[Rule], windows: Mapping[str, MaintenanceWindow], event: ScheduledEvent, facts: MatchContext
) -> Decision:
    """The decision of the first rule that matches, or to observe."""
    affects = event.affects(facts.names)
    for rule in rules:
        if why_not_matched(rule, event, facts) is None:
            return _decision_of(rule, windows, event, affects, facts)
    unknown = "the event names no VM" if facts.names else "this VM's name is not known"
    reasons = {
        "unknown": f"{unknown}: observe",
        "others": "it does not name this VM and no rule matches it: observe",
    }
    return Decision(rule=None, reason=reasons.get(affects, "no rule matches it: observe"), affects=affects)


def rejected_rules(
    rules: Iterable[Rule], taken_by: str | None, event: ScheduledEvent, facts: MatchContext
) -> list[tuple[str, str]]:
    """The rules above the one that matches the event (None: all), each with the reason why it does not match."""
    above = takewhile(lambda rule: rule.name != taken_by, rules)
    return [(rule.name, why_not_matched(rule, event, facts) or "") for rule in above]


def why_not_matched(rule: Rule, event: ScheduledEvent, facts: MatchContext) -> str | None:
    """Why the rule does not match the event, as a phrase; None if it matches. Earlier rules are not considered."""
    if event.is_recommendation and RECOMMENDATION not in rule.when.type:
        return f"only a rule whose type names {RECOMMENDATION} matches it"
    return why_conditions_fail(rule.when, event, facts)


def why_conditions_fail(when: When, event: ScheduledEvent, facts: MatchContext) -> str | None:
    """Why the conditions do not hold, as a phrase; None if they do."""
    affects = event.affects(facts.names)
    if failed := _why_kind_fails(when, event):
        return failed
    if affects == "unknown":
        return "nothing says whether it names this VM"
    if affects not in when.affects and not (affects == "shared" and "self" in when.affects):
        return f"it affects {affects}, not {_either(when.affects)}"
    return _why_facts_fail(when, event, facts)


def why_event_fails(when: When, event: ScheduledEvent, facts: MatchContext) -> str | None:
    """Why the conditions do not hold, without ``affects``: whose event it is may not be known."""
    return _why_kind_fails(when, event) or _why_facts_fail(when, event, facts)


def _why_kind_fails(when: When, event: ScheduledEvent) -> str | None:
    if when.type and event.type not in when.type:
        return f"type is {event.type or 'missing'}, not {_either(when.type)}"
    if when.source and event.source not in when.source:
        return f"source is {event.source or 'not known'}, not {_either(when.source)}"
    if when.status and event.status not in when.status:
        return f"status is {event.status or 'missing'}, not {_either(when.status)}"
    return None


def _why_facts_fail(when: When, event: ScheduledEvent, facts: MatchContext) -> str | None:
    seconds = event.duration_seconds
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
    whole_notice = format_duration(int(notice))
    if when.notice_below is not None and notice >= when.notice_below:
        return f"notice was {whole_notice}, not below {_seconds(when.notice_below)}"
    if when.notice_at_least is not None and notice < when.notice_at_least:
        return f"notice was {whole_notice}, not at least {_seconds(when.notice_at_least)}"
    return None


def notice_seconds(event: ScheduledEvent, facts: MatchContext) -> float:
    """How long before NotBefore the event was first seen with it; 0 if it may start at any moment."""
    if event.not_before is None or event.is_started:
        return 0.0
    return max(0.0, (event.not_before - facts.not_before_seen_at).total_seconds())


def _decision_of(
    rule: Rule,
    windows: Mapping[str, MaintenanceWindow],
    event: ScheduledEvent,
    affects: Affects,
    facts: MatchContext,
) -> Decision:
    shared = rule.shared or ("first" if rule.approve == "immediately" else "hold")
    approve = rule.approve
    place = event.position(facts.names) or 0
    # With approve: immediately, any VM of the event may approve it, in case the VMs before it are down.
    can_approve_for_all = shared in ("any", "all-ready") or (
        shared == "first" and (place == 0 or approve == "immediately")
    )
    reason = f"rule {rule.name} matches it: {_summary(rule.when, event, affects)}"
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
        can_approve_for_all=affects == "self" or (affects == "shared" and can_approve_for_all),
        approve_after_seconds=place * APPROVAL_STAGGER_SECONDS
        if affects == "shared" and shared == "first"
        else 0.0,
        on_early_start=rule.on_early_start,
        lead=rule.lead,
        window_name=rule.window,
        window=windows[rule.window] if rule.window else None,
        expire_after=rule.expire_after,
    )


def _why_not_approved(event: ScheduledEvent, affects: Affects) -> str:
    """Why the agent does not approve the event, even if its rule allows it; "" if it may."""
    if affects not in ("self", "shared"):
        return "it does not name this VM, so this VM does not approve it"
    if event.type not in EVENT_TYPES:
        return f"{event.type or 'a missing type'} is unknown, so it is not approved"
    if event.approval_error:
        return event.approval_error
    if event.is_ambiguous:
        return "the document lists it more than once, with different contents, so only an operator may approve it"
    return ""


def _summary(when: When, event: ScheduledEvent, affects: Affects) -> str:
    """The conditions of the rule, with the values of the event that met them."""
    parts = [f"affects {affects}"]
    parts += [f"{name} {getattr(event, name)}" for name in ("type", "source", "status") if getattr(when, name)]
    if when.duration_below is not None or when.duration_at_least is not None:
        parts.append(f"duration {_seconds(event.duration_seconds)}")
    others = ("resource", "description", "notice_below", "notice_at_least")
    return ", ".join([*parts, *(name for name in others if getattr(when, name) not in ((), None))])


@lru_cache(maxsize=256)
def _regex(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_duration(seconds)
