"""The oracle itself, where a clock or a retry makes it hard to say what is right."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from oracle import VM, BrokenError, Oracle
from simulation import START

from scheduled_events_agent.imds.document import EventTypeName
from scheduled_events_agent.policy import Hook, Rule, When
from scheduled_events_agent.workflow import HookOutcome

NOT_BEFORE = START + timedelta(hours=1)
OURS = Rule(name="reboots", when=When(type=("Reboot",)), prepare=("drain",), approve="when-prepared")
MANUAL = Rule(name="reboots", when=When(type=("Reboot",)), prepare=("drain",), approve="manual")
WITH_LEAD = Rule(name="reboots", when=When(type=("Reboot",)), prepare=("drain",), lead=60.0)


def an_oracle(*rules: Rule, now: Callable[[], datetime]) -> Oracle:
    oracle = Oracle(now)
    oracle.hooks = {name: Hook(run=("/bin/true",), timeout=20.0) for name in ("drain", "load", "resume")}
    oracle.reserve, oracle.has_name = 5.0, True
    oracle.policy(rules)
    return oracle


def read(oracle: Oracle, *events: tuple[str, str, str], at: float, vms: tuple[str, ...] = (VM,)) -> None:
    """A document with these events (name, type, status)."""
    facts = [(name, name, type_, status, vms, NOT_BEFORE) for name, type_, status in events]
    oracle.read(facts, answered=at, is_state_lost=False)


@pytest.mark.parametrize(
    ("rule", "seconds_behind", "is_excused"),
    [
        (MANUAL, 3600.0, True),
        (MANUAL, 6.0, True),
        (MANUAL, 4.0, False),
        (MANUAL, -3600.0, False),
        (WITH_LEAD, 61.0, True),
        (WITH_LEAD, 59.0, False),
        (OURS, 3600.0, False),
    ],
)
def test_only_a_clock_that_is_behind_excuses_an_unprepared_start(
    rule: Rule, seconds_behind: float, *, is_excused: bool
) -> None:
    now = START
    oracle = an_oracle(rule, now=lambda: now)
    read(oracle, ("E1", "Reboot", "Scheduled"), at=0.0)
    now = NOT_BEFORE - timedelta(seconds=seconds_behind)
    if is_excused:
        oracle.unprepared("E1")
    else:
        with pytest.raises(BrokenError, match="not prepared for"):
            oracle.unprepared("E1")


def test_only_an_operator_may_approve_before_the_stagger_ends() -> None:
    rule = Rule(name="reboots", when=When(type=("Reboot",)), approve="immediately")
    oracle = an_oracle(rule, now=lambda: START)
    read(oracle, ("E1", "Reboot", "Scheduled"), at=0.0, vms=("vm_2", VM))
    with pytest.raises(BrokenError, match="the turn of this VM"):
        oracle.posted([("E1", "E1")])
    oracle.spoke("E1", {"", "approve"})
    oracle.posted([("E1", "E1")])


def a_failed_recovery(type_of_other: EventTypeName, *, is_reloaded: bool = False) -> Oracle:
    """E1: ``resume`` has succeeded and ``load`` has failed. E2 has been prepared for since, and is over.

    ``is_reloaded``: between the first document and the preparation for E1; then its rule is not certain.
    """
    reboots = Rule(
        name="reboots",
        when=When(type=("Reboot",)),
        prepare=("drain",),
        recover=("resume", "load"),
        approve="when-prepared",
    )
    freezes = Rule(name="freezes", when=When(type=("Freeze",)), prepare=("stop",), approve="when-prepared")
    oracle = an_oracle(reboots, freezes, now=lambda: START)
    read(oracle, ("E1", "Reboot", "Scheduled"), at=0.0)
    if is_reloaded:
        oracle.policy((reboots, freezes))
    lived(oracle, "E1", "prepare", "drain")
    read(oracle, at=10.0)
    read(oracle, at=20.0)
    lived(oracle, "E1", "recover", "resume")
    lived(oracle, "E1", "recover", "load", is_success=False)
    read(oracle, ("E2", type_of_other, "Scheduled"), at=30.0)
    lived(oracle, "E2", "prepare", "drain" if type_of_other == "Reboot" else "stop")
    read(oracle, at=40.0)
    read(oracle, at=50.0)
    if type_of_other == "Reboot":
        lived(oracle, "E2", "recover", "resume", is_success=False)
    oracle.asked("E1", "retry")
    return oracle


def lived(oracle: Oracle, event: str, stage: str, hook: str, *, is_success: bool = True) -> None:
    """The hook starts, ends, and its end is on disk."""
    outcome: HookOutcome = "succeeded" if is_success else "failed"
    oracle.started(event, stage, hook)
    oracle.ended(event, stage, hook, outcome)
    oracle.known(event, stage, hook, outcome, is_required=True)


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_a_retry_recovers_anew_what_was_prepared_again_since(*, is_reloaded: bool) -> None:
    oracle = a_failed_recovery("Reboot", is_reloaded=is_reloaded)
    lived(oracle, "E1", "recover", "resume")
    lived(oracle, "E1", "recover", "load")


def test_a_retry_leaves_alone_what_stayed_recovered() -> None:
    oracle = a_failed_recovery("Freeze")
    with pytest.raises(BrokenError, match="nothing asks for"):
        oracle.started("E1", "recover", "resume")
