"""What of an event is told to which targets, and what of its hooks the pages show: pure."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from test_workflow import Agent, a_rule, an_event, started

from scheduled_events_agent.daemon.pages import output_of_pending
from scheduled_events_agent.events import ScheduledEvent
from scheduled_events_agent.notices import happenings, is_wanted, render
from scheduled_events_agent.policy import Decision, Rule, When
from scheduled_events_agent.settings import NotifyTarget
from scheduled_events_agent.status import History, JournalEntry
from scheduled_events_agent.workflow import Note, Signal, Step, Workflow

NOW = datetime(2026, 4, 11, 22, 12, tzinfo=UTC)


def a_workflow(id_: str = "1", *, is_over: bool = False, **event: Any) -> Workflow:
    fields: dict[str, Any] = {"id": "E1", "type": "Reboot", "status": "Scheduled", "resources": ("vm-1",)}
    rest: dict[str, Any] = {
        "id": id_,
        "event": ScheduledEvent(**{**fields, **event}),
        "decision": Decision(rule="r", reason="rule r takes it", affects="self", approve="manual"),
        "is_over": is_over,
        "first_seen_at": NOW,
        "noticed_at": NOW,
        "boot_id": "boot",
    }
    return Workflow(**rest)


def told(workflow: Workflow, *kinds: str) -> list[tuple[str, int | None]]:
    """What is told of a step with these notes, and how many seconds are left by it."""
    notes: list[Any] = [Note(kind=kind, text="x") for kind in kinds]  # type: ignore[arg-type] # a name of the test
    step = Step(workflow=workflow, notes=tuple(notes))
    found = happenings([step], NOW, names=("vm-1", "vm_1"), vm_id="id", mode="act")
    return [(happening.what, happening.seconds_left) for _, happening in found]


def test_only_some_notes_are_told_of_and_in_their_order() -> None:
    kinds = ("seen", "changed", "preparing", "hook_finished", "prepared", "closed")
    assert [what for what, _ in told(a_workflow(), *kinds)] == ["seen", "preparing", "prepared", "recovered"]


@pytest.mark.parametrize(
    ("event", "seconds"),
    [
        ({"not_before": NOW + timedelta(seconds=90.7)}, 90),
        ({"not_before": NOW - timedelta(seconds=5)}, -5),
        ({"not_before": None}, None),
        ({"not_before": NOW + timedelta(seconds=90), "status": "Started"}, None),
        ({"not_before": NOW + timedelta(seconds=90), "is_over": True}, None),
    ],
)
def test_seconds_are_left_until_the_event_begins_or_is_over(event: dict[str, Any], seconds: int | None) -> None:
    assert told(a_workflow(**event), "seen") == [("seen", seconds)]


@pytest.mark.parametrize(
    ("on", "when", "is_told"),
    [
        (("seen",), When(), True),
        (("held",), When(), False),
        (("seen",), When(type=("Reboot",)), True),
        (("seen",), When(type=("Freeze",)), False),
        (("held",), When(type=("Freeze",)), False),
        (("seen",), When(affects=("others",)), False),
    ],
)
def test_a_target_hears_of_what_it_names_of_events_that_it_names(
    on: tuple[Any, ...], when: When, is_told: bool
) -> None:
    target = NotifyTarget(name="ops", to="https://hooks.example.com", on=on, when=when)
    step = Step(workflow=a_workflow(), notes=(Note(kind="seen", text="x"),))
    ((_, happening),) = happenings([step], NOW, names=("vm-1",), vm_id="id", mode="act")
    assert is_wanted(target, step, happening, ("vm-1",)) == is_told


class Told(Agent):
    """Workflows whose steps are told to PagerDuty."""

    def __init__(self, *rules: Rule) -> None:
        super().__init__(*rules)
        self.summaries: list[str] = []

    def send(self, *signals: Signal) -> list[str]:
        effects = super().send(*signals)
        now = self.context.now
        for _, happening in happenings(self.last.steps, now, names=("vm-1",), vm_id="", mode="act"):
            self.summaries.append(json.loads(render("pagerduty", happening)[1])["payload"]["summary"])
        return effects


def test_a_summary_adds_the_reason_only_where_it_says_more_than_the_title() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume")
    assert agent.summaries[1:] == [
        "Preparing vm-1 for a Reboot (preparation begins: drain)",
        "vm-1 is prepared for a Reboot",
        "The Reboot of vm-1 is approved and may start",
        "The Reboot of vm-1 has started (approved)",
        "The Reboot of vm-1 is over: completed",
    ]


def test_what_a_reason_says_more_than_the_title_is_kept() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume", "failed")
    agent.operator("resolve")
    failed = "recovery failed (hook resume: exit code 1): retry or resolve it"
    held = "hook drain: exit code 1"
    assert agent.summaries[2:] == [
        f"The Reboot of vm-1 is held (Azure starts it at 12:15:00 UTC: {held})",
        "The Reboot of vm-1 has started (not approved by us, held)",
        f"vm-1 has not recovered from a Reboot: an operator must act ({failed})",
        "The Reboot of vm-1 is over: completed (an operator has put its recovery right by hand)",
    ]


def an_entry(workflow_id: str, hook: str, detail: str) -> JournalEntry:
    fields = {"event_id": "E1", "kind": "hook_finished", "stage": "prepare", "outcome": "succeeded", "text": "x"}
    return JournalEntry(at=NOW, workflow_id=workflow_id, hook=hook, detail=detail, **fields)


def test_output_is_shown_of_hooks_of_pending_events_that_wrote_something() -> None:
    pending, over = a_workflow("1"), a_workflow("2")
    drain = an_entry("1", "drain", "drained")
    mine = (an_entry("1", "", "no hook"), drain, an_entry("1", "checkpoint", ""))
    recent = [
        History(workflow=over, entries=(an_entry("2", "drain", "long ago"),)),
        History(workflow=pending, entries=mine),
    ]
    assert output_of_pending(recent, [pending]) == (drain,)
    assert output_of_pending(recent, []) == ()
