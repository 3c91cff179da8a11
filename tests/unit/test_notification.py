"""Which notifications a transition gives which target. Pure."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from status_samples import some_facts
from test_recommendations import a_recommendation, advice
from test_workflow import NOTICE, Agent, a_rule, an_event, started

from scheduled_events_agent import RUNBOOK
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.kubernetes.events import event_of
from scheduled_events_agent.notifications import Notification, matches, notifications_of, render
from scheduled_events_agent.policy import Decision, Rule, When
from scheduled_events_agent.policy.settings import NotifyTarget
from scheduled_events_agent.status import CommandOptions, Vm
from scheduled_events_agent.status.messages import notification_title, with_messages
from scheduled_events_agent.workflow import Record, Signal, Transition, Workflow

NOW = datetime(2026, 4, 11, 22, 12, tzinfo=UTC)


def a_workflow(id_: str = "1", *, is_over: bool = False, **event: Any) -> Workflow:
    fields: dict[str, Any] = {"id": "E1", "type": "Reboot", "status": "Scheduled", "resources": ("vm-1",)}
    rest: dict[str, Any] = {
        "id": id_,
        "event": ScheduledEvent(**{**fields, **event}),
        "decision": Decision(rule="r", reason="rule r matches it", affects="self", approve="manual"),
        "is_over": is_over,
        "first_seen_at": NOW,
        "not_before_seen_at": NOW,
        "boot_id": "boot",
    }
    return Workflow(**rest)


def told(workflow: Workflow, *kinds: str) -> list[tuple[str, int | None]]:
    """Notifications of a transition with these records, and the seconds left by them."""
    notes: list[Any] = [Record(kind=kind, text="x") for kind in kinds]  # type: ignore[arg-type] # a name of the test
    step = Transition(workflow=workflow, records=tuple(notes))
    found = notifications_of([step], some_facts())
    return [(notification.kind, notification.seconds_left) for _, notification in found]


def test_only_some_records_become_notifications_and_in_their_order() -> None:
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
    ("on", "when", "is_sent"),
    [
        (("seen",), When(), True),
        (("held",), When(), False),
        (("seen",), When(type=("Reboot",)), True),
        (("seen",), When(type=("Freeze",)), False),
        (("held",), When(type=("Freeze",)), False),
        (("seen",), When(affects=("others",)), False),
    ],
)
def test_a_target_is_notified_of_its_kinds_for_its_events(on: tuple[Any, ...], when: When, is_sent: bool) -> None:
    target = NotifyTarget(name="ops", to="https://hooks.example.com", on=on, when=when)
    step = Transition(workflow=a_workflow(), records=(Record(kind="seen", text="x"),))
    ((_, notification),) = notifications_of([step], some_facts())
    assert matches(target, step, notification, ("vm-1",)) == is_sent


class Told(Agent):
    """Workflows whose transitions are sent to PagerDuty."""

    def __init__(self, *rules: Rule, **context: Any) -> None:
        super().__init__(*rules, **context)
        self.summaries: list[str] = []
        self.history: list[tuple[Transition, Notification]] = []

    def send(self, *signals: Signal) -> list[str]:
        effects = super().send(*signals)
        facts = some_facts(
            at=self.context.now,
            vm=Vm(names=("vm-1",), vm_id=""),
            workflows=tuple(self.workflows.values()),
            command_options=CommandOptions(state="--state-dir /srv/state"),
            command_prefix="sudo ",
        )
        for step, notification in notifications_of([*map(with_messages, self.last.transitions)], facts):
            self.summaries.append(json.loads(render("pagerduty", notification)[1])["payload"]["summary"])
            self.history.append((step, notification))
        return effects

    def told(self, target: NotifyTarget) -> list[str]:
        """The message to the target: its kind, the action, the end of the incident's key, the severity."""
        told = []
        for step, notification in self.history:
            if matches(target, step, notification, self.context.names):
                body = json.loads(render("pagerduty", notification)[1])
                key = body["dedup_key"].removeprefix(step.workflow.id)
                told.append(f"{notification.kind}: {body['event_action']}{key} {body['payload']['severity']}")
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


def test_a_notification_shows_its_event_as_the_last_transition_of_the_moment_leaves_it() -> None:
    agent = Told(a_rule(prepare=("drain",), approve="manual"))
    agent.document(an_event())
    agent.operator("hold")
    agent.operator("approve")
    agent.ends("drain")
    agent.answer()
    events = [(notification.kind, notification.event) for _, notification in agent.history]
    assert [(kind, event.phase, event.waits_for and event.waits_for.kind) for kind, event in events] == [
        ("seen", "waiting", "time"),
        ("approval_needed", "waiting", "time"),
        ("held", "held", "operator"),
        ("preparing", "preparing", None),
        ("prepared", "prepared", None),
        ("approved", "approved", None),
    ]


PAGERDUTY = NotifyTarget(name="oncall", to="https://events.example.com", format="pagerduty")


def test_a_failed_recovery_is_its_own_incident_and_the_start_resolves_earlier_ones() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume", "failed")
    assert agent.history[-1][1].runbook == f"{RUNBOOK}#recovery_failed"
    agent.operator("resolve")
    assert agent.told(PAGERDUTY) == [
        "held: trigger warning",
        "started: resolve info",
        "recovery_failed: trigger/recovery critical",
        "recovered: resolve/recovery info",
    ]
    # Ends of incidents are always sent; see matches.
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
    assert agent.history[-1][1].runbook == f"{RUNBOOK}#approval_needed"
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
    assert agent.history[-1][1].runbook == f"{RUNBOOK}#hook_missing"
    first, second = agent.history[-1][1].commands
    assert first.command == "sudo scheduled-events-agent check"
    assert second.command == "sudo scheduled-events-agent resolve A --state-dir /srv/state"
    assert agent.history[-1][1].deadline is None


@pytest.mark.parametrize("is_held_by_rule", [True, False])
def test_an_event_held_by_a_rule_or_an_operator_pages_no_one(*, is_held_by_rule: bool) -> None:
    approve = "never" if is_held_by_rule else "when-prepared"
    agent = Told(a_rule(approve=approve, prepare=("drain",), lead=NOTICE.total_seconds()))
    agent.document(an_event())
    if not is_held_by_rule:
        agent.operator("hold")
    agent.ends("drain")
    (held,) = [notification for _, notification in agent.history if notification.kind == "held"]
    assert (held.commands, held.runbook) == ((), "")
    assert agent.told(PAGERDUTY) == []


def kubernetes_types(agent: Told) -> dict[str, str]:
    """The type of each event about the node, by its reason."""
    events = [event_of(notification, "node-1", "uid") for _, notification in agent.history]
    return {event["reason"].removeprefix("ScheduledEvent"): event["type"] for event in events}


def test_an_eviction_that_the_policy_lets_come_is_no_warning_to_a_cluster() -> None:
    eviction = an_event(type="Preempt")
    agent = Told(a_rule(approve="never", prepare=("drain",), recover=()))
    agent.document(eviction)
    agent.ends("drain")
    agent.document(started(eviction))
    agent.document()
    types = kubernetes_types(agent)
    assert types == dict.fromkeys(("Seen", "Preparing", "Prepared", "Held", "Started", "Recovered"), "Normal")


def test_a_cluster_is_warned_where_status_says_act() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume", "failed")
    assert [reason for reason, type_ in kubernetes_types(agent).items() if type_ == "Warning"] == [
        "Held",
        "RecoveryFailed",
    ]
    asking = Told(a_rule(prepare=(), recover=(), approve="manual"))
    asking.document(an_event())
    assert kubernetes_types(asking)["ApprovalNeeded"] == "Warning"
    fixed = Told(advice())  # nothing starts by itself: status says FIX
    fixed.document(a_recommendation())
    fixed.ends("drain", "failed", event="R")
    assert [one.severity for _, one in fixed.history if one.kind == "held"] == ["fix"]
    assert kubernetes_types(fixed)["Held"] == "Normal"


def test_a_notification_that_needs_attention_has_a_deadline_and_commands() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    asking = {notification.kind: notification for _, notification in agent.history if notification.commands}
    assert list(asking) == ["held"]
    assert [notification.runbook for _, notification in agent.history if notification.runbook] == [
        f"{RUNBOOK}#prepare_failed"
    ]
    assert asking["held"].deadline == an_event().not_before
    assert [(one.command, one.effect) for one in asking["held"].commands] == [
        ("sudo scheduled-events-agent retry A --state-dir /srv/state", "run drain again, then the rest"),
        ("sudo scheduled-events-agent approve A --state-dir /srv/state", "let Azure start it as it is"),
    ]


def test_details_of_a_reason_beyond_the_title_are_kept() -> None:
    agent = Told(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.document(started(an_event()))
    agent.document()
    agent.ends("resume", "failed")
    agent.operator("resolve")
    held = "hook drain: exit code 1"
    assert agent.summaries[2:] == [
        f"The Reboot of vm-1 is held ({held}; Azure starts it at 2026-03-02 12:15:00 UTC)",
        "The Reboot of vm-1 has started (not approved by us, held; unprepared: hook drain: exit code 1)",
        "vm-1 has not recovered from a Reboot: an operator must act (hook resume: exit code 1)",
        "The Reboot of vm-1 is over: completed (resolved by an operator)",
    ]


def test_a_target_hears_what_azure_started_unprepared_and_why() -> None:
    waiting = Told(a_rule(prepare=("drain",), lead=300.0))
    waiting.document(an_event())
    waiting.document(started(an_event()))
    ((_, notification),) = [one for one in waiting.history if one[1].kind == "started"]
    why = "unprepared: its time had not come, it was to begin at 2026-03-02 12:10:00 UTC (lead 5m)"
    assert notification.reason == f"has started (not approved by us, waiting); {why}"
    assert notification.addition == f"not approved by us, waiting; {why}"


def test_a_target_hears_it_with_the_end_if_no_document_has_shown_the_start() -> None:
    agent = Told(a_rule(prepare=("drain",), recover=()))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.wait(16 * 60)
    agent.restart("boot 2")
    assert agent.summaries[-1] == "The Reboot of vm-1 is over: completed (unprepared: hook drain: exit code 1)"


def test_a_target_hears_it_with_the_name_if_that_comes_late() -> None:
    agent = Told(a_rule(prepare=("drain",)), names=())
    agent.document(an_event())
    agent.document(started(an_event()))
    agent.reload(a_rule(prepare=("drain",)), names=("vm_1",))
    (heard,) = [one.reason for _, one in agent.history if one.kind == "seen" and "names this VM" in one.reason]
    assert heard.endswith("; unprepared: nothing said whether it names this VM")


EVERY = NotifyTarget(name="ops", to="https://hooks.example.com")


@pytest.mark.parametrize(
    ("target", "is_sent"),
    [
        (EVERY, True),
        (PAGERDUTY, True),
        (replace(EVERY, when=When(affects=("others",))), True),
        (replace(EVERY, when=When(type=("Reboot",), notice_at_least=60.0)), True),
        (replace(EVERY, when=When(type=("Freeze",))), False),
        (replace(EVERY, when=When(notice_below=60.0)), False),
        (replace(EVERY, on=("seen",)), False),
    ],
)
def test_a_target_hears_once_of_an_event_of_which_the_vm_is_not_known(
    target: NotifyTarget, *, is_sent: bool
) -> None:
    agent = Told(a_rule(), names=())
    agent.document(an_event())
    assert agent.told(target) == []
    agent.tick(10)
    heard = ["vm_unknown: trigger critical"] if is_sent else []
    assert agent.told(target) == heard
    agent.tick(60)
    assert agent.told(target) == heard
    ((_, notification),) = [one for one in agent.history if one[1].kind == "vm_unknown"]
    assert (notification.event.type, notification.deadline) == ("Reboot", an_event().not_before)
    assert "vm.name" in notification.reason
    assert [one.command for one in notification.commands] == [
        "sudo scheduled-events-agent doctor --state-dir /srv/state"
    ]
    assert notification.runbook == f"{RUNBOOK}#vm_unknown"
    assert notification_title("vm_unknown", notification.event, "") == (
        "A Reboot is pending, and nothing says whether it names this VM"
    )


def test_the_start_of_an_event_of_an_unknown_vm_ends_its_incident() -> None:
    agent = Told(a_rule(), names=())
    agent.document(an_event())
    agent.tick(10)
    agent.document(started(an_event()))
    assert agent.told(PAGERDUTY) == ["vm_unknown: trigger critical", "started: resolve info"]


@pytest.mark.parametrize("event", [started(an_event()), a_recommendation()])
def test_an_event_that_will_not_start_pages_no_one_about_an_unknown_vm(event: ScheduledEvent) -> None:
    agent = Told(advice(), a_rule(), names=())
    agent.document(event)
    agent.tick(10)
    assert "vm_unknown" in [notification.kind for _, notification in agent.history]
    assert not [heard for heard in agent.told(PAGERDUTY) if heard.startswith("vm_unknown")]
    assert kubernetes_types(agent)["VmUnknown"] == "Normal"


def test_an_agent_that_only_observes_pages_no_one_about_an_unknown_vm() -> None:
    workflow = a_workflow()
    step = Transition(workflow=workflow, records=(Record(kind="vm_unknown", text="x"),))
    ((_, notification),) = notifications_of([step], some_facts(mode="observe"))
    assert (notification.deadline, notification.commands, notification.severity) == (None, (), "")
    assert matches(EVERY, step, notification, ())
    assert not matches(PAGERDUTY, step, notification, ())
