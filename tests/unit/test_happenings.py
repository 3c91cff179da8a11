"""Which notifications a transition gives which target; and hooks on the pages. Pure."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from shown import a_status
from test_workflow import NOTICE, Agent, a_rule, an_event, started

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.notifications import Happening, happenings, is_wanted, render
from scheduled_events_agent.policy import Decision, Rule, When
from scheduled_events_agent.policy.settings import NotifyTarget
from scheduled_events_agent.status import CommandOptions, History, JournalEntry, Vm
from scheduled_events_agent.status.messages import as_shown, with_messages
from scheduled_events_agent.web.endpoints import output_of_pending
from scheduled_events_agent.workflow import Note, Signal, Step, Workflow

NOW = datetime(2026, 4, 11, 22, 12, tzinfo=UTC)


def a_workflow(id_: str = "1", *, is_over: bool = False, **event: Any) -> Workflow:
    fields: dict[str, Any] = {"id": "E1", "type": "Reboot", "status": "Scheduled", "resources": ("vm-1",)}
    rest: dict[str, Any] = {
        "id": id_,
        "event": ScheduledEvent(**{**fields, **event}),
        "decision": Decision(rule="r", reason="rule r matches it", affects="self", approve="manual"),
        "is_over": is_over,
        "first_seen_at": NOW,
        "noticed_at": NOW,
        "boot_id": "boot",
    }
    return Workflow(**rest)


def told(workflow: Workflow, *kinds: str) -> list[tuple[str, int | None]]:
    """Notifications of a transition with these records, and the seconds left by them."""
    notes: list[Any] = [Note(kind=kind, text="x") for kind in kinds]  # type: ignore[arg-type] # a name of the test
    step = Step(workflow=workflow, notes=tuple(notes))
    found = happenings([step], a_status())
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
    ((_, happening),) = happenings([step], a_status())
    assert is_wanted(target, step, happening, ("vm-1",)) == is_told


class Told(Agent):
    """Workflows whose transitions are sent to PagerDuty."""

    def __init__(self, *rules: Rule, **context: Any) -> None:
        super().__init__(*rules, **context)
        self.summaries: list[str] = []
        self.happenings: list[tuple[Step, Happening]] = []

    def send(self, *signals: Signal) -> list[str]:
        effects = super().send(*signals)
        status = a_status(
            at=self.context.now,
            vm=Vm(names=("vm-1",), vm_id=""),
            pending=tuple(map(as_shown, self.board.values())),
            command_options=CommandOptions(state="--state-dir /srv/state"),
            command_prefix="sudo ",
        )
        for step, happening in happenings(map(with_messages, self.last.steps), status):
            self.summaries.append(json.loads(render("pagerduty", happening)[1])["payload"]["summary"])
            self.happenings.append((step, happening))
        return effects

    def told(self, target: NotifyTarget) -> list[str]:
        """The message to the target: its kind, the action, the end of the incident's key, the severity."""
        told = []
        for step, happening in self.happenings:
            if is_wanted(target, step, happening, self.context.names):
                body = json.loads(render("pagerduty", happening)[1])
                key = body["dedup_key"].removeprefix(step.workflow.id)
                told.append(f"{happening.what}: {body['event_action']}{key} {body['payload']['severity']}")
        return told


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


PAGERDUTY = NotifyTarget(name="oncall", to="https://events.example.com", body="pagerduty")


def test_a_failed_recovery_is_an_incident_of_its_own_and_the_start_resolves_what_was_before_it() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume", "failed")
    agent.operator("resolve")
    assert agent.told(PAGERDUTY) == [
        "held: trigger warning",
        "started: resolve info",
        "recovery_failed: trigger/recovery critical",
        "recovered: resolve/recovery info",
    ]
    # Ends of incidents are always sent; see is_wanted.
    assert agent.told(replace(PAGERDUTY, on=("recovery_failed",), when=When(status=("Scheduled",)))) == [
        "started: resolve info",
        "recovered: resolve/recovery info",
    ]
    assert agent.told(replace(PAGERDUTY, on=("seen", "preparing"), when=When(type=("Reboot",)))) == [
        "seen: trigger info",
        "preparing: trigger info",
        "started: resolve info",
        "recovered: resolve/recovery info",
    ]


def test_an_event_that_never_starts_is_one_incident() -> None:
    agent = Told(a_rule(prepare=(), recover=(), approve="manual"))
    agent.document(an_event())
    agent.document()
    assert agent.told(PAGERDUTY) == ["approval_needed: trigger warning", "recovered: resolve info"]


def test_a_recovery_that_misses_a_hook_is_critical_too() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    agent.document(started(an_event()))
    agent.context = replace(agent.context, hooks=("drain",))
    agent.document()
    assert agent.told(PAGERDUTY)[-1] == "hook_missing: trigger/recovery critical"
    first, second = agent.happenings[-1][1].commands
    assert first.command == "sudo scheduled-events-agent check"
    assert second.command == "sudo scheduled-events-agent resolve A --state-dir /srv/state"
    assert agent.happenings[-1][1].deadline is None


@pytest.mark.parametrize("is_held_by_rule", [True, False])
def test_what_a_rule_or_an_operator_holds_calls_nobody(*, is_held_by_rule: bool) -> None:
    approve = "never" if is_held_by_rule else "when-prepared"
    agent = Told(a_rule(approve=approve, prepare=("drain",), lead=NOTICE.total_seconds()))
    agent.document(an_event())
    if not is_held_by_rule:
        agent.operator("hold")
    agent.ends("drain")
    (held,) = [happening for _, happening in agent.happenings if happening.what == "held"]
    assert held.commands == ()
    assert agent.told(PAGERDUTY) == []


def test_what_asks_for_a_person_says_until_when_and_what_to_type() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    asking = {happening.what: happening for _, happening in agent.happenings if happening.commands}
    assert list(asking) == ["held"]
    assert asking["held"].deadline == an_event().not_before
    assert [(one.command, one.effect) for one in asking["held"].commands] == [
        ("sudo scheduled-events-agent retry A --state-dir /srv/state", "run drain again, then the rest"),
        ("sudo scheduled-events-agent approve A --state-dir /srv/state", "let Azure start it as it is"),
    ]


def test_what_a_reason_says_more_than_the_title_is_kept() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume", "failed")
    agent.operator("resolve")
    held = "hook drain: exit code 1"
    assert agent.summaries[2:] == [
        f"The Reboot of vm-1 is held (Azure starts it at 12:15:00 UTC: {held})",
        "The Reboot of vm-1 has started (not approved by us, held)",
        "vm-1 has not recovered from a Reboot: an operator must act (hook resume: exit code 1)",
        "The Reboot of vm-1 is over: completed (an operator has repaired its recovery manually)",
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
