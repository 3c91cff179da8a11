"""The judge itself, where a clock or a retry makes it hard to say what is right."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from oracle import VM, BrokenError, Judge
from vm_simulation import START

from scheduled_events_agent.imds.document import EventTypeName
from scheduled_events_agent.policy import Hook, Rule, When
from scheduled_events_agent.workflow import HookOutcome

NOT_BEFORE = START + timedelta(hours=1)
OURS = Rule(name="reboots", when=When(type=("Reboot",)), prepare=("drain",), approve="when-prepared")
MANUAL = Rule(name="reboots", when=When(type=("Reboot",)), prepare=("drain",), approve="manual")
WITH_LEAD = Rule(name="reboots", when=When(type=("Reboot",)), prepare=("drain",), lead=60.0)


def a_judge(*rules: Rule, now: Callable[[], datetime]) -> Judge:
    judge = Judge(now)
    judge.hooks = {name: Hook(run=("/bin/true",), timeout=20.0) for name in ("drain", "load", "resume")}
    judge.reserve, judge.has_name = 5.0, True
    judge.policy(rules)
    return judge


def read(judge: Judge, *events: tuple[str, str, str], at: float, vms: tuple[str, ...] = (VM,)) -> None:
    """A document with these events (name, type, status)."""
    facts = [(name, name, type_, status, vms, NOT_BEFORE) for name, type_, status in events]
    judge.read(facts, answered=at, is_state_lost=False)


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
    judge = a_judge(rule, now=lambda: now)
    read(judge, ("E1", "Reboot", "Scheduled"), at=0.0)
    now = NOT_BEFORE - timedelta(seconds=seconds_behind)
    if is_excused:
        judge.unprepared("E1")
    else:
        with pytest.raises(BrokenError, match="not prepared for"):
            judge.unprepared("E1")


def test_only_an_operator_may_approve_before_the_stagger_ends() -> None:
    rule = Rule(name="reboots", when=When(type=("Reboot",)), approve="immediately")
    judge = a_judge(rule, now=lambda: START)
    read(judge, ("E1", "Reboot", "Scheduled"), at=0.0, vms=("vm_2", VM))
    with pytest.raises(BrokenError, match="the turn of this VM"):
        judge.posted([("E1", "E1")])
    judge.spoke("E1", {"", "approve"})
    judge.posted([("E1", "E1")])


def a_failed_recovery(type_of_other: EventTypeName, *, is_reloaded: bool = False) -> Judge:
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
    judge = a_judge(reboots, freezes, now=lambda: START)
    read(judge, ("E1", "Reboot", "Scheduled"), at=0.0)
    if is_reloaded:
        judge.policy((reboots, freezes))
    lived(judge, "E1", "prepare", "drain")
    read(judge, at=10.0)
    read(judge, at=20.0)
    lived(judge, "E1", "recover", "resume")
    lived(judge, "E1", "recover", "load", is_success=False)
    read(judge, ("E2", type_of_other, "Scheduled"), at=30.0)
    lived(judge, "E2", "prepare", "drain" if type_of_other == "Reboot" else "stop")
    read(judge, at=40.0)
    read(judge, at=50.0)
    if type_of_other == "Reboot":
        lived(judge, "E2", "recover", "resume", is_success=False)
    judge.asked("E1", "retry")
    return judge


def lived(judge: Judge, event: str, stage: str, hook: str, *, is_success: bool = True) -> None:
    """The hook starts, ends, and its end is on disk."""
    outcome: HookOutcome = "succeeded" if is_success else "failed"
    judge.started(event, stage, hook)
    judge.ended(event, stage, hook, outcome)
    judge.known(event, stage, hook, outcome, is_required=True)


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_a_retry_recovers_anew_what_was_prepared_again_since(*, is_reloaded: bool) -> None:
    judge = a_failed_recovery("Reboot", is_reloaded=is_reloaded)
    lived(judge, "E1", "recover", "resume")
    lived(judge, "E1", "recover", "load")


def test_a_retry_leaves_alone_what_stayed_recovered() -> None:
    judge = a_failed_recovery("Freeze")
    with pytest.raises(BrokenError, match="nothing asks for"):
        judge.started("E1", "recover", "resume")
