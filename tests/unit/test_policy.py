"""Rules and decisions: which rule takes an event, what may be approved, and when it begins."""

from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduled_events_agent.imds.document import EVENT_TYPES, ScheduledEvent
from scheduled_events_agent.policy import (
    Decision,
    MaintenanceWindow,
    MatchContext,
    Rule,
    When,
    decide,
    notice_seconds,
    why_conditions_fail,
)
from scheduled_events_agent.policy.settings import DEFAULT_RULES

NOW = datetime(2022, 4, 11, 22, 0, tzinfo=UTC)
FACTS = MatchContext(names=("web_1",), not_before_seen_at=NOW)


def event(**fields: Any) -> ScheduledEvent:
    defaults: dict[str, Any] = {
        "id": "A1",
        "type": "Reboot",
        "status": "Scheduled",
        "source": "Platform",
        "resources": ("web_1",),
        "not_before": NOW + timedelta(minutes=15),
    }
    return ScheduledEvent(**defaults | fields)


def decided(*rules: Rule, facts: MatchContext = FACTS, **fields: Any) -> Decision:
    return decide(rules, {}, event(**fields), facts)


def test_the_first_rule_that_matches_is_used() -> None:
    decision = decided(Rule(name="a", when=When(type=("Freeze",))), Rule(name="b"), Rule(name="c"))
    assert decision.rule == "b"
    assert decision.reason == "rule b matches it: affects self"


def test_without_a_matching_rule_the_event_is_observed() -> None:
    decision = decided(Rule(name="a", when=When(type=("Freeze",)), approve="immediately"))
    assert decision == Decision(rule=None, reason="no rule matches it: observe", affects="self")


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        (When(type=("Freeze", "Redeploy")), "type is Reboot, not Freeze or Redeploy"),
        (When(source=("User",)), "source is Platform, not User"),
        (When(status=("Started",)), "status is Scheduled, not Started"),
        (When(affects=("shared", "others")), "it affects self, not shared or others"),
        (When(resource=("db_*",)), "no resource matches db_*"),
        (When(description=("^host", "disk")), "the description does not match ^host or disk"),
        (When(duration_below=9.0), "duration is 30s, not below 9s"),
        (When(duration_at_least=31.0), "duration is 30s, not at least 31s"),
        (When(notice_below=900.0), "notice was 15m, not below 15m"),
        (When(notice_at_least=901.0), "notice was 15m, not at least 15m1s"),
    ],
)
def test_a_rule_that_does_not_match_says_why(when: When, reason: str) -> None:
    assert why_conditions_fail(when, event(duration_seconds=30.0), FACTS) == reason


@pytest.mark.parametrize(
    ("when", "fields"),
    [
        (When(type=("Freeze", "Reboot")), {}),
        (When(source=("Platform",)), {}),
        (When(resource=("WEB_*",)), {"resources": ("_web_1",)}),
        (When(resource=("web_?",)), {"resources": ("db_1", "web_1")}),
        (When(description=("maintenance",)), {"description": "Host server is undergoing MAINTENANCE."}),
        (When(duration_below=9.0, duration_at_least=0.0), {"duration_seconds": 0.0}),
        (When(duration_at_least=9.0), {"duration_seconds": 9.0}),
        (When(notice_below=901.0, notice_at_least=900.0), {}),
        (When(notice_below=1.0), {"not_before": None}),
        (When(notice_below=1.0), {"status": "Started"}),
    ],
)
def test_conditions_hold_at_their_limits(when: When, fields: dict[str, Any]) -> None:
    assert why_conditions_fail(when, event(**fields), FACTS) is None


@pytest.mark.parametrize("when", [When(duration_below=9.0), When(duration_at_least=0.0)])
def test_an_unknown_duration_matches_no_duration_condition(when: When) -> None:
    assert (why_conditions_fail(when, event(), FACTS) or "").startswith("duration is unknown, not ")


def test_lead_time_is_measured_from_the_first_sight_of_not_before() -> None:
    facts = MatchContext(names=("web_1",), not_before_seen_at=NOW - timedelta(hours=1))
    assert notice_seconds(event(), facts) == 4500.0
    assert notice_seconds(event(not_before=NOW - timedelta(hours=2)), facts) == 0.0


# --- What may be approved. Rows of the comparison with other tools carry their names.


def test_event_for_another_vm_only_is_observed() -> None:
    decision = decided(Rule(name="a", approve="immediately"), resources=("web_2",))
    assert (decision.rule, decision.approve, decision.can_approve_for_all) == (None, "never", False)
    assert decision.reason == "it does not name this VM and no rule matches it: observe"


def test_a_rule_for_others_never_approves() -> None:
    rule = Rule(name="a", when=When(affects=("others",)), approve="immediately", shared="any")
    decision = decided(rule, resources=("web_2",))
    assert (decision.rule, decision.approve, decision.can_approve_for_all) == ("a", "never", False)
    assert decision.reason == (
        "rule a matches it: affects others; it does not name this VM, so this VM does not approve it"
    )


def test_names_vm1_and_vm10_are_whole_names() -> None:
    facts = MatchContext(names=("vm1",), not_before_seen_at=NOW)
    rule = Rule(name="a", approve="immediately")
    assert decided(rule, facts=facts, resources=("vm10",)).affects == "others"
    assert decided(rule, facts=facts, resources=("_VM1",)).affects == "self"


def test_without_a_name_for_this_vm_nothing_is_approved() -> None:
    facts = MatchContext(names=(), not_before_seen_at=NOW)
    decision = decided(
        Rule(name="a", when=When(affects=("self", "shared", "others")), approve="manual"), facts=facts
    )
    assert (decision.rule, decision.approve) == (None, "never")
    assert decision.reason == "this VM's name is not known: observe"


def test_an_event_that_names_no_vm_is_only_observed() -> None:
    decision = decided(Rule(name="a", approve="immediately"), resources=())
    assert (decision.affects, decision.reason) == ("unknown", "the event names no VM: observe")


def test_an_unknown_type_is_never_approved() -> None:
    decision = decided(Rule(name="a", approve="immediately"), type="Hibernate")
    assert decision.approve == "never"
    assert decision.reason == "rule a matches it: affects self; Hibernate is unknown, so it is not approved"


def test_an_event_that_contradicts_itself_is_prepared_for_and_not_approved() -> None:
    decision = decided(Rule(name="a", prepare=("drain",), approve="immediately"), is_ambiguous=True)
    assert (decision.approve, decision.prepare) == ("never", ("drain",))
    assert decision.reason == (
        "rule a matches it: affects self; the document lists it more than once, with different contents, so only "
        "an operator may approve it"
    )


def test_an_id_that_cannot_be_sent_back_is_never_approved() -> None:
    decision = decided(Rule(name="a", approve="manual"), id_error="it is not a text")
    assert decision.approve == "never"
    assert decision.reason.endswith("its id cannot be sent back exactly (it is not a text)")


def test_an_event_without_an_id_is_never_approved() -> None:
    assert decided(Rule(name="a", approve="manual"), id="").reason == (
        "rule a matches it: affects self; it has no id to approve"
    )


@pytest.mark.parametrize(
    ("approve", "shared", "resources", "can_approve_for_all"),
    [
        ("immediately", None, ("web_1", "web_2"), True),
        ("immediately", None, ("web_2", "web_1"), True),
        ("when-prepared", "first", ("web_2", "web_1"), False),
        ("when-prepared", None, ("web_1", "web_2"), False),
        ("when-prepared", "first", ("WEB_1", "web_2"), True),
        ("when-prepared", "any", ("web_2", "web_1"), True),
        ("manual", "hold", ("web_1", "web_2"), False),
        ("never", "any", ("web_1",), True),
        ("when-prepared", "hold", ("web_1", "_web_1"), True),
    ],
)
def test_an_event_naming_us_and_others_is_approved_per_rule_and_not_by_default(
    approve: Any, shared: Any, resources: tuple[str, ...], can_approve_for_all: bool
) -> None:
    assert (
        decided(Rule(name="a", approve=approve, shared=shared), resources=resources).can_approve_for_all
        is can_approve_for_all
    )


def test_self_matches_events_that_name_others_too_and_shared_only_those() -> None:
    rules = Rule(name="shared", when=When(affects=("shared",))), Rule(name="self")
    assert decided(*rules, resources=("web_1", "web_2")).rule == "shared"
    assert decided(*rules).rule == "self"
    assert decided(rules[1], resources=("web_1", "web_2")).rule == "self"


def test_two_events_for_this_vm_are_each_on_their_own() -> None:
    rules = Rule(name="spot", when=When(type=("Preempt",)), approve="never"), Rule(name="rest", approve="manual")
    assert decided(*rules, type="Preempt", id="A").approve == "never"
    assert decided(*rules, type="Reboot", id="B").approve == "manual"


@pytest.mark.parametrize("name", ["web", "web_1", "a_b_c_000001", "_web_1"])
def test_scale_set_and_plain_vm_names_are_accepted(name: str) -> None:
    facts = MatchContext(names=(name,), not_before_seen_at=NOW)
    assert decided(Rule(name="a"), facts=facts, resources=(name,)).affects == "self"


def test_the_built_in_rules_approve_users_events_and_short_freezes_only() -> None:
    assert decided(*DEFAULT_RULES, source="User").approve == "immediately"
    assert decided(*DEFAULT_RULES, type="Freeze", duration_seconds=5.0).approve == "immediately"
    assert decided(*DEFAULT_RULES, type="Freeze", duration_seconds=9.0).rule is None
    assert decided(*DEFAULT_RULES, type="Freeze").rule is None
    for type_ in EVENT_TYPES:
        assert decided(*DEFAULT_RULES, type=type_).rule is None


# --- When it begins.

NIGHT = MaintenanceWindow(start=time(2), length=4 * 3600.0, days=("sat",), timezone="UTC")
SATURDAY_2AM = datetime(2022, 4, 16, 2, 0, tzinfo=UTC)


def decision(**fields: Any) -> Decision:
    defaults: dict[str, Any] = {"rule": "a", "reason": "", "affects": "self", "approve": "when-prepared"}
    return Decision(**{**defaults, "can_approve_for_all": True, **fields})


def begins_at(
    decision: Decision, event: ScheduledEvent, now: datetime = NOW, needed_seconds: float = 600.0
) -> datetime:
    return decision.start(event, now, needed_seconds).at


def test_without_lead_and_window_handling_begins_at_once() -> None:
    assert begins_at(decision(), event(not_before=NOW + timedelta(days=7)), NOW) == NOW


def test_an_event_days_ahead_waits_for_its_lead() -> None:
    not_before = NOW + timedelta(days=7)
    begins = begins_at(decision(lead=900.0), event(not_before=not_before), NOW)
    assert begins == not_before - timedelta(minutes=15)


@pytest.mark.parametrize("minutes", [15, 5, 0, -60])
def test_an_event_nearer_than_the_lead_begins_at_once(minutes: int) -> None:
    assert begins_at(decision(lead=900.0), event(not_before=NOW + timedelta(minutes=minutes)), NOW) == NOW


def test_an_event_without_not_before_begins_at_once() -> None:
    assert begins_at(decision(lead=900.0, window=NIGHT), event(not_before=None), NOW) == NOW


def test_an_event_days_ahead_begins_when_its_window_opens() -> None:
    far = event(not_before=NOW + timedelta(days=7))
    assert begins_at(decision(window=NIGHT), far, NOW) == SATURDAY_2AM


def test_a_window_that_is_open_now_begins_now() -> None:
    now = SATURDAY_2AM + timedelta(hours=3)
    assert begins_at(decision(window=NIGHT), event(not_before=now + timedelta(days=2)), now) == now


def test_without_an_opening_before_the_lead_the_lead_decides() -> None:
    not_before = SATURDAY_2AM - timedelta(hours=1)
    far = event(not_before=not_before)
    assert begins_at(decision(window=NIGHT), far, NOW) == not_before - timedelta(minutes=15)
    assert begins_at(decision(window=NIGHT, lead=7200.0), far, NOW) == not_before - timedelta(hours=2)


def test_an_event_of_ordinary_lead_time_ignores_the_window() -> None:
    assert begins_at(decision(window=NIGHT), event(not_before=NOW + timedelta(minutes=15)), NOW) == NOW


LATE = [{"can_approve_for_all": False, "affects": "shared"}, {"approve": "never"}, {"approve": "manual"}]


@pytest.mark.parametrize("fields", LATE)
@pytest.mark.parametrize("window", [None, NIGHT])
@pytest.mark.parametrize("minutes", [12, 15, 2 * 1440])
def test_an_event_this_vm_does_not_approve_is_prepared_as_late_as_hooks_allow(
    fields: dict[str, Any], window: MaintenanceWindow | None, minutes: int
) -> None:
    # It would stay prepared until NotBefore: for the whole notice, or from the window on, perhaps for days.
    not_before = NOW + timedelta(minutes=minutes)
    late = decision(prepare=("drain",), window=window, **fields)
    assert begins_at(late, event(not_before=not_before)) == not_before - timedelta(minutes=10)
    assert begins_at(late, event(not_before=not_before), needed_seconds=3 * 86400.0) == NOW


@pytest.mark.parametrize("fields", LATE)
def test_a_lead_overrules_that_preparation_begins_late(fields: dict[str, Any]) -> None:
    not_before = NOW + timedelta(minutes=15)
    late = decision(prepare=("drain",), lead=720.0, **fields)
    assert begins_at(late, event(not_before=not_before)) == not_before - timedelta(minutes=12)


@pytest.mark.parametrize("fields", LATE)
def test_an_eviction_is_prepared_at_once_whether_or_not_this_vm_approves_it(fields: dict[str, Any]) -> None:
    preempt = event(type="Preempt", not_before=NOW + timedelta(minutes=15))
    assert begins_at(decision(prepare=("drain",), **fields), preempt) == NOW


@pytest.mark.parametrize("fields", LATE)
def test_an_event_with_nothing_to_prepare_is_not_put_off(fields: dict[str, Any]) -> None:
    assert begins_at(decision(**fields), event(not_before=NOW + timedelta(days=2))) == NOW


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"can_approve_for_all": False},
            "it names other VMs too and shared is hold, and preparation may take 5m30s",
        ),
        ({"approve": "never"}, "this VM does not approve it, and preparation may take 5m30s"),
        ({"approve": "manual"}, "an operator must approve it, and preparation may take 5m30s"),
        ({"lead": 900.0}, "lead 15m"),
        ({"window": NIGHT, "window_name": "night"}, "window night opens"),
        ({}, ""),
    ],
)
def test_the_reason_says_why_it_does_not_begin_at_once(changes: dict[str, Any], reason: str) -> None:
    far = event(not_before=NOW + timedelta(days=7))
    assert decision(prepare=("drain",), **changes).start(far, NOW, 330.0).reason == reason


def test_an_estimate_is_in_whole_seconds_rounded_up() -> None:
    far = event(not_before=NOW + timedelta(days=7))
    starts = decision(prepare=("drain",), approve="never").start(far, NOW, 17.038)
    assert starts.reason == "this VM does not approve it, and preparation may take 18s"
    assert starts.at == NOW + timedelta(days=7, seconds=-17.038)


def test_a_measured_notice_is_in_whole_seconds_and_agrees_with_its_limit() -> None:
    facts = replace(FACTS, not_before_seen_at=NOW + timedelta(seconds=0.25))
    for when, text in ((When(notice_at_least=900.0), "at least 15m"), (When(notice_below=899.0), "below 14m59s")):
        assert why_conditions_fail(when, event(), facts) == f"notice was 14m59s, not {text}"


def test_with_shared_first_each_vm_waits_for_the_earlier_listed_ones() -> None:
    rule = Rule(name="a", approve="immediately")
    names = ("db_1", "db_2", "web_1", "web_2")
    waits = [decided(rule, resources=(*names[:n], "web_1", *names[n:])).approve_after_seconds for n in (0, 1, 2)]
    assert waits == [0.0, 10.0, 20.0]
    assert (
        decided(Rule(name="a", approve="immediately", shared="any"), resources=names).approve_after_seconds == 0.0
    )


def opening(window: MaintenanceWindow, at: datetime, days: float = 14) -> datetime | None:
    return window.opening(at, at + timedelta(days=days))


def test_a_window_that_closes_is_closed_from_that_moment_on() -> None:
    closes = SATURDAY_2AM + timedelta(hours=4)
    assert opening(NIGHT, closes - timedelta(seconds=1)) == closes - timedelta(seconds=1)
    assert opening(NIGHT, closes) == SATURDAY_2AM + timedelta(days=7)


def test_a_window_does_not_open_at_or_after_the_end_that_was_asked_for() -> None:
    assert NIGHT.opening(NOW, SATURDAY_2AM) is None
    assert NIGHT.opening(NOW, SATURDAY_2AM + timedelta(seconds=1)) == SATURDAY_2AM


def test_a_window_reaches_past_midnight_and_past_the_end_of_the_week() -> None:
    window = MaintenanceWindow(start=time(22), length=6 * 3600.0, days=("sun",))
    monday = datetime(2022, 4, 18, 3, 0, tzinfo=UTC)
    assert opening(window, monday) == monday
    assert opening(window, monday + timedelta(hours=1)) == datetime(2022, 4, 24, 22, 0, tzinfo=UTC)


def test_a_window_of_seven_days_is_always_open() -> None:
    window = MaintenanceWindow(start=time(2), length=7 * 86400.0, days=("sat",))
    for hours in range(0, 24 * 8, 5):
        at = NOW + timedelta(hours=hours)
        assert opening(window, at) == at


def test_a_window_follows_the_clocks_of_its_zone() -> None:
    window = MaintenanceWindow(start=time(2), length=3600.0, timezone="Asia/Kolkata")
    assert opening(window, NOW) == datetime(2022, 4, 12, 20, 30, tzinfo=UTC)


def test_an_hour_that_summer_time_skips_opens_an_hour_later_by_the_clock() -> None:
    window = MaintenanceWindow(start=time(2, 30), length=3600.0, timezone="Europe/Berlin")
    before = datetime(2022, 3, 26, 12, 0, tzinfo=UTC)
    first = opening(window, before)
    assert first == datetime(2022, 3, 27, 1, 30, tzinfo=UTC)  # 03:30 in Berlin
    second = opening(window, datetime(2022, 3, 27, 12, 0, tzinfo=UTC))
    assert second == datetime(2022, 3, 28, 0, 30, tzinfo=UTC)  # 02:30 again


def test_an_hour_repeated_by_winter_time_opens_once_for_its_length() -> None:
    window = MaintenanceWindow(start=time(2, 30), length=3600.0, timezone="Europe/Berlin")
    opens = datetime(2022, 10, 30, 0, 30, tzinfo=UTC)  # 02:30, the first of two
    assert opening(window, datetime(2022, 10, 29, 12, 0, tzinfo=UTC)) == opens
    closes = opens + timedelta(hours=1)  # the second 02:30
    assert opening(window, closes - timedelta(seconds=1)) == closes - timedelta(seconds=1)
    assert opening(window, closes) == datetime(2022, 10, 31, 1, 30, tzinfo=UTC)


# --- Whatever comes.

moments = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001
nows = st.datetimes(datetime(2020, 1, 1), datetime(2060, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
words = st.sampled_from(["", "web_1", "_WEB_1", "web_2", "web_10", "*", "[", "db"]) | st.text(max_size=5)
durations = st.none() | st.floats(0, 3650 * 86400)
events = st.builds(
    ScheduledEvent,
    id=st.sampled_from(["", "A1"]) | st.text(max_size=3),
    type=st.sampled_from([*EVENT_TYPES, "", "Other"]),
    status=st.sampled_from(["Scheduled", "Started", "", "Other"]),
    source=st.sampled_from(["Platform", "User", ""]),
    resources=st.lists(words, max_size=3).map(tuple),
    not_before=st.none() | moments,
    duration_seconds=durations,
    description=st.text(max_size=10),
)
whens = st.builds(
    When,
    type=st.lists(st.sampled_from(EVENT_TYPES), max_size=2).map(tuple),
    affects=st.lists(st.sampled_from(["self", "shared", "others"]), min_size=1, max_size=3).map(tuple),
    resource=st.lists(words, max_size=2).map(tuple),
    duration_below=durations,
    duration_at_least=durations,
    notice_below=durations,
    notice_at_least=durations,
)
rules_ = st.builds(
    Rule,
    name=st.sampled_from(["a", "b"]),
    when=whens,
    approve=st.sampled_from(["immediately", "when-prepared", "manual", "never"]),
    shared=st.sampled_from([None, "hold", "first", "any"]),
    lead=durations,
    window=st.sampled_from([None, "w"]),
)
windows_ = st.builds(
    MaintenanceWindow,
    start=st.times(),
    length=st.floats(1, 7 * 86400),
    days=st.lists(st.sampled_from(["mon", "wed", "sun"]), min_size=1, max_size=3).map(tuple),
    timezone=st.sampled_from(["UTC", "Europe/Berlin", "Pacific/Kiritimati", "America/Los_Angeles"]),
)


@given(st.lists(rules_, max_size=3), windows_, events, st.lists(words, max_size=2), nows)
def test_whatever_comes_a_decision_is_made_and_only_own_events_are_approved(
    rules: list[Rule], window: MaintenanceWindow, event: ScheduledEvent, names: list[str], now: datetime
) -> None:
    facts = MatchContext(names=tuple(names), not_before_seen_at=now)
    decision = decide(rules, {"w": window}, event, facts)
    plain = {name.casefold().removeprefix("_") for name in names}
    is_named = any(resource.casefold().removeprefix("_") in plain for resource in event.resources)
    if decision.approve != "never":
        assert is_named
        assert event.type in EVENT_TYPES
        assert event.id
    if decision.can_approve_for_all:
        assert is_named
    if decision.rule is None:
        assert decision.approve == "never"
        assert not decision.has_preparation
    begins = begins_at(decision, event, now)
    assert begins >= now
    assert event.not_before is None or begins <= max(now, event.not_before)
    assert begins.tzinfo is not None


@given(windows_, nows, st.floats(0, 30))
def test_an_opening_lies_in_the_window_and_never_before_the_time_asked_about(
    window: MaintenanceWindow, at: datetime, days: float
) -> None:
    before = at + timedelta(days=days)
    opens_at = window.opening(at, before)
    if opens_at is None:
        assert days < 8  # every window opens once a week
    else:
        assert at <= opens_at < before
        assert window.opening(opens_at, opens_at + timedelta(seconds=1)) == opens_at
