"""The states in which no event could be acted on, and those that only look so, on all surfaces that show them."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from status_samples import NOW, a_workflow, some_facts
from test_attention import NEEDED

from scheduled_events_agent.cli.doctor import check_running_agent
from scheduled_events_agent.status import ClockWrong, Condition, Vm
from scheduled_events_agent.status.attention import exit_code
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.workflow import StageStatus, WaitReason

DENIED = "/metadata/instance: 403 Forbidden"
NAMELESS: dict[str, Any] = {
    "vm": Vm(names=(), vm_id=""),
    "vm_failure": f"GET {DENIED}",
    "vm_failure_summary": DENIED,
}
UNANSWERED: dict[str, Any] = {"last_poll_at": None, "polls": "late", "poll_failure_summary": "403 Forbidden"}
UNMATCHED = a_workflow(
    event={"type": "Preempt", "not_before": NOW + timedelta(seconds=30)},
    decision={"rule": None, "affects": "unknown", "prepare": (), "approve": "never"},
)
OF_OLD_NAME = a_workflow(
    event={"resources": ("web-1",)},
    decision={"affects": "others"},
    named_as="web-1",
    phase="held",
    prepare=StageStatus(state="succeeded", done=("drain",), run=1),
    wait_reason=WaitReason(kind="other_vm"),
)

DRAINED_EARLY = a_workflow(
    event={"not_before": NOW + timedelta(days=2)},
    decision={"approve": "never"},
    phase="held",
    prepare=StageStatus(state="succeeded", done=("drain",), run=1),
    wait_reason=WaitReason(kind="never"),
    early_until=NOW + timedelta(hours=47, minutes=45),
)


class Shown(NamedTuple):
    """What the surfaces show of a state."""

    condition: Condition
    exit_code: int
    is_healthy: bool
    """Whether /healthz answers 200."""
    headline: str
    kinds: tuple[str, ...] = ()
    """Of what needs a person."""


def after(minutes: float, **changes: Any) -> Facts:
    """An agent that started so many minutes ago."""
    return some_facts(started_at=NOW - timedelta(minutes=minutes), **changes)


STATES: dict[str, tuple[Facts, Shown]] = {
    "nothing is pending": (after(60), Shown("good", 0, True, "Nothing is pending")),
    "an event is pending": (after(60, workflows=(a_workflow(),)), Shown("busy", 0, True, "Reboot is pending")),
    "an agent only observes": (
        after(60, mode="observe"),
        Shown("good", 0, True, "Nothing is pending; the agent only observes"),
    ),
    "there is no rule": (
        after(60, rules=()),
        Shown("good", 0, True, "Nothing is pending; the agent only observes"),
    ),
    "an agent only observes an event": (
        after(60, mode="observe", workflows=(a_workflow(),)),
        Shown("busy", 0, True, "Reboot is pending; the agent only observes"),
    ),
    "an agent only observes an event that is prepared": (
        after(60, mode="observe", workflows=(a_workflow(phase="held", wait_reason=WaitReason(kind="observes")),)),
        Shown("busy", 0, True, "Reboot is held: the agent only observes"),
    ),
    "an event has moved away after its drain": (
        after(60, workflows=(DRAINED_EARLY,)),
        Shown(
            "fix",
            0,
            True,
            "web-1 is out of service until 2026-04-13 22:12:00 UTC: earlier than its lead.",
            ("out_of_service",),
        ),
    ),
    "the name is not known, an event is pending": (
        after(0, **NAMELESS, workflows=(UNMATCHED,)),
        Shown(
            "act",
            3,
            False,
            f"It is not known whether the Preempt is of this VM, for its name is not known: {DENIED}.",
            ("vm_unknown",),
        ),
    ),
    "the name is not known yet": (
        after(4.9, **NAMELESS),
        Shown("unknown", 0, True, f"The name of this VM is not known yet: {DENIED}"),
    ),
    "the name is not known after five minutes": (
        after(5, **NAMELESS),
        Shown("act", 1, False, f"The name of this VM is not known: {DENIED}.", ("vm_unknown",)),
    ),
    "an observing agent does not know the name, an event is pending": (
        after(0, **NAMELESS, mode="observe", workflows=(UNMATCHED,)),
        Shown("unknown", 0, True, f"The name of this VM is not known yet: {DENIED}"),
    ),
    "an event names no VM": (
        after(60, workflows=(UNMATCHED,)),
        Shown("unknown", 0, True, "1 event pending, and nothing says whether for this VM"),
    ),
    "the disk may be a copy": (
        after(2.9, vm_confirmed=False, vm_failure_summary=DENIED),
        Shown("unknown", 0, True, f"The metadata service has not said yet which VM this is: {DENIED}"),
    ),
    "the disk may be a copy, after three minutes": (
        after(3, vm_confirmed=False),
        Shown(
            "act", 1, False, "The metadata service has not said since the boot which VM this is.", ("vm_unknown",)
        ),
    ),
    "the disk may be a copy, and an event is pending": (
        after(0.2, vm_confirmed=False, workflows=(a_workflow(),)),
        Shown(
            "act", 3, False, "The metadata service has not said since the boot which VM this is.", ("vm_unknown",)
        ),
    ),
    "no answer has ever come": (
        after(0, **UNANSWERED),
        Shown("unknown", 0, True, "Azure's metadata service has not answered yet: 403 Forbidden"),
    ),
    "no answer and no name": (
        after(60, **NAMELESS, **UNANSWERED | {"polls": "overdue"}),
        Shown(
            "act",
            1,
            False,
            "Azure's metadata service has not answered since the agent started at 21:12:00 UTC: 403 Forbidden.",
            ("unhealthy",),
        ),
    ),
    "one poll failed": (after(60, poll_failure_summary="timed out"), Shown("good", 0, True, "Nothing is pending")),
    "polls fail": (
        after(60, polls="late", poll_failure_summary="timed out", last_poll_at=NOW - timedelta(seconds=10)),
        Shown("unknown", 0, True, "Azure's metadata service has not answered since 22:11:50 UTC: timed out"),
    ),
    "polls hang": (
        after(60, polls="late", last_poll_at=NOW - timedelta(seconds=10)),
        Shown("unknown", 0, True, "Azure's metadata service has not answered since 22:11:50 UTC"),
    ),
    "polls fail beside an event": (
        after(60, polls="late", poll_failure_summary="timed out", workflows=(a_workflow(),)),
        Shown("busy", 0, True, "Reboot is pending"),
    ),
    "polls have failed for long": (
        after(60, polls="overdue", poll_failure_summary="timed out", last_poll_at=NOW - timedelta(minutes=3)),
        Shown(
            "act",
            1,
            False,
            "Azure's metadata service has not answered since 22:09:00 UTC: timed out.",
            ("unhealthy",),
        ),
    ),
    "the name became another VM's while it is prepared": (
        after(60, vm=Vm(names=("web-2",), vm_id="id"), workflows=(OF_OLD_NAME,), ready=False),
        Shown(
            "act",
            3,
            False,
            "This VM is prepared for the Reboot of web-1, and its name is web-2 now.",
            ("vm_changed",),
        ),
    ),
    "the clock is wrong": (
        after(60, clock_wrong=ClockWrong(seconds_ahead=600.0, since=NOW, command="timedatectl")),
        Shown("fix", 0, True, "The clock of this VM is 10 minutes ahead of Azure's.", ("clock_wrong",)),
    ),
    "the state file cannot be written": (
        after(60, faults=("its disk is full",), faults_since=NOW),
        Shown("act", 1, False, "Its disk is full.", ("unhealthy",)),
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_each_state_is_shown_alike_on_all_surfaces(state: str) -> None:
    facts, expected = STATES[state]
    status = to_status(facts)
    kinds = tuple(one.kind for one in status.attention)
    found = Shown(status.condition, exit_code(status), status.health == "ok", status.headline, kinds)
    assert found == expected


ON_THE_PAGE = {
    "nothing is pending": "nothing is pending",
    "nothing is pending, and the agent only observes": "an agent only observes",
    "an event is pending": "an event is pending",
    "polls have failed for ten seconds": "polls fail",
    "polls have failed for `healthy_within`": "polls have failed for long",
    "no answer has ever come": "no answer has ever come",
    "no answer has come for `healthy_within`": "no answer and no name",
    "the VM's name is not known": "the name is not known yet",
    "the VM's name is not known after five minutes": "the name is not known after five minutes",
    "the VM's name is not known, and an event is pending": "the name is not known, an event is pending",
    "a reload has changed the VM's name while it was prepared": "vm_changed",
    "the service has not said since the boot which VM this is": "the disk may be a copy",
    "the same after three minutes": "the disk may be a copy, after three minutes",
    "the same after ten seconds, and an event is pending": "the disk may be a copy, and an event is pending",
    "the state file cannot be written": "the state file cannot be written",
    "an operator must act on an event": "prepare_failed",
    "the state was lost, and a rule recovers": "state_lost",
    "a fault must be repaired today": "web_config_rejected",
}
SIGNS: dict[Condition, str] = {"good": "✓", "busy": "▸", "unknown": "?", "fix": "!", "act": "✕"}


def test_the_page_has_what_each_state_shows() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (\d) \| (\d+) \| (\S) \|$", page, re.MULTILINE)
    assert [row for row, *_ in rows] == [*ON_THE_PAGE]
    for row, *expected in rows:
        name = ON_THE_PAGE[row]
        status = to_status(STATES[name][0] if name in STATES else NEEDED[name][0])
        code, health = exit_code(status), 200 if status.health == "ok" else 503
        assert [str(code), str(health), SIGNS[status.condition]] == expected, row


@pytest.mark.parametrize("state", STATES)
def test_doctor_calls_an_agent_ok_only_if_nothing_needs_a_person_and_it_could_act(state: str) -> None:
    status = to_status(STATES[state][0])
    found = check_running_agent("17", status, None)
    is_ok = status.condition in ("good", "busy")
    assert (found.state == "ok") == is_ok
    assert is_ok or status.headline.rstrip(".") in found.message


def test_an_unknown_name_beside_an_event_says_until_when_and_what_to_type() -> None:
    (found,) = to_status(STATES["the name is not known, an event is pending"][0]).attention
    assert (found.event_id, found.deadline) == (UNMATCHED.event.id, UNMATCHED.event.not_before)
    assert found.consequence == "Azure starts it at 22:12:30 UTC, prepared or not."
    assert [(one.command, one.effect) for one in found.commands] == [
        ("scheduled-events-agent doctor", "find the problem"),
        ("scheduled-events-agent check", "edit policy.yaml: vm.name: this VM's name in Azure, then reload"),
    ]
