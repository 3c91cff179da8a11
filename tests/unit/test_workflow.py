"""The life of an event, one behaviour at a time; test_workflow_walk.py tries all orders of things."""

import importlib
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from scheduled_events_agent.engine.document_tracker import DocumentTracker
from scheduled_events_agent.engine.remembered import changes_by_transitions, with_changes
from scheduled_events_agent.imds.compare import Gone, compare
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import MaintenanceWindow, Rule, When
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status.messages import record_message, wait_message
from scheduled_events_agent.workflow import (
    ALLOWED_TRANSITIONS,
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    CancelHook,
    ClockChanged,
    Context,
    Effect,
    HookFinished,
    HookOutcome,
    OperatorAction,
    OperatorCommand,
    PolicyChanged,
    RememberedEvent,
    RememberedKey,
    Result,
    RunHook,
    Signal,
    Stage,
    Transition,
    UpdateHookDeadline,
    WaitReason,
    Workflow,
    advance,
    approval,
    evaluate_approval_gates,
    hook_deadline_at,
    is_ready,
    known_events,
    next_wake_at,
    phases,
)

advance_module = importlib.import_module("scheduled_events_agent.workflow.advance")

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)  # a Monday
NOTICE = timedelta(minutes=15)


def an_event(**changes: Any) -> ScheduledEvent:
    fields: dict[str, Any] = {
        "id": "A",
        "type": "Reboot",
        "status": "Scheduled",
        "source": "Platform",
        "resources": ("vm_1",),
        "not_before": START + NOTICE,
    }
    return ScheduledEvent(**{**fields, **changes})


def started(event: ScheduledEvent) -> ScheduledEvent:
    return replace(event, status="Started", not_before=None)


def a_rule(**changes: Any) -> Rule:
    fields: dict[str, Any] = {
        "name": "impactful",
        "prepare": ("drain", "checkpoint"),
        "recover": ("resume",),
        "approve": "when-prepared",
    }
    return Rule(**{**fields, **changes})


class EveryHook:
    """A policy in which there is every hook that anybody may name."""

    def __contains__(self, _: object) -> bool:
        return True


class Agent:
    """The loop around the workflows without threads, disk and clock; methods return the effects, in words."""

    def __init__(self, *rules: Rule, **context: Any) -> None:
        self.context = Context(
            now=START,
            names=("vm_1",),
            rules=rules,
            windows={},
            hooks=EveryHook(),
            hook_seconds=dict.fromkeys(("drain", "checkpoint"), 300.0),
            boot_id="boot 1",
            document_at=None,
        )
        self.context = replace(self.context, **context)
        self.workflows: dict[str, Workflow] = {}
        self.last: Result = Result(workflows={}, transitions=(), errors=())
        self.journal: list[str] = []
        self.may_fail = False
        self.documents = DocumentTracker()
        self.remembered: dict[RememberedKey, RememberedEvent] = {}

    @property
    def expired(self) -> list[str]:
        return [key for fact, key in self.remembered if fact == "expired"]

    def send(self, *signals: Signal) -> list[str]:
        context = self.context
        self.last = advance(self.workflows, signals, context)
        if not self.may_fail:
            assert self.last.errors == ()
        self.workflows = self.last.workflows
        unlisted = self.documents.unlisted
        changes = changes_by_transitions(self.remembered, signals, self.last.transitions, unlisted, context.now)
        self.remembered = with_changes(self.remembered, changes)
        holds = {key: one for (fact, key), one in self.remembered.items() if fact == "hold"}
        self.context = replace(context, holds=holds, expired=self.expired)
        told = ((step.workflow, note) for step in self.last.transitions for note in step.records)
        self.journal += [f"{note.kind}: {record_message(workflow, note)}" for workflow, note in told]
        return [in_words(effect) for step in self.last.transitions for effect in step.effects]

    def document(self, *events: ScheduledEvent, after: float = 1) -> list[str]:
        """A document is read, ``after`` so many seconds; once more if it lacks an event."""
        effects = self.answer_once(*events, after=after)
        if any(workflow.is_missing for workflow in self.workflows.values()):
            effects += self.answer_once(*events)
        return effects

    def answer_once(self, *events: ScheduledEvent, after: float = 1) -> list[str]:
        """A document is read; an event that it lacks is gone if the one before lacked it too."""
        self.wait(after)
        context = self.context = replace(self.context, document_at=self.context.now)
        document = Document(incarnation="1", events=events)
        self.documents.receive(document, context.now.timestamp(), context.names)
        settings = Settings(rules=context.rules, maintenance_windows={**context.windows})
        found = self.documents.compare(self.workflows, context.names, settings, self.expired)
        self.documents.committed(has_errors=False)
        return self.send(*found)

    def ends(
        self,
        hook: str,
        outcome: HookOutcome = "succeeded",
        event: str = "A",
        after: float = 1,
        *,
        has_run: bool = True,
    ) -> list[str]:
        """The hook in flight for ``event`` ends."""
        self.wait(after)
        for workflow in self.all_of(event):
            for stage in stages():
                progress = getattr(workflow, stage)
                if progress.current == hook:
                    detail = "exit code 1" if outcome == "failed" else ""
                    return self.send(
                        HookFinished(
                            workflow_id=workflow.id,
                            stage=stage,
                            hook=hook,
                            run=progress.run,
                            outcome=outcome,
                            detail=detail,
                            has_run=has_run,
                        )
                    )
        raise AssertionError(f"hook {hook} is not in flight for {event}")

    def answer(self, error_kind: str = "", event: str = "A") -> list[str]:
        return self.send(
            ApprovalAnswered(
                workflow_id=self.of(event).id, error_kind=error_kind, detail=error_kind and "went wrong"
            )
        )

    def operator(self, action: OperatorAction, event: str = "A") -> list[str]:
        return self.send(OperatorCommand(workflow_id=self.of(event).id, action=action, user="kim"))

    def tick(self, seconds: float | timedelta = 1) -> list[str]:
        self.wait(seconds.total_seconds() if isinstance(seconds, timedelta) else seconds)
        return self.send()

    def restart(self, boot_id: str = "boot 1", *events: ScheduledEvent, document: bool = True) -> list[str]:
        """The agent dies and comes back with what is on disk; then, normally, a document is read."""
        stored = msgspec.json.encode(list(self.workflows.values()))
        self.workflows = {workflow.id: workflow for workflow in msgspec.json.decode(stored, type=list[Workflow])}
        self.context = replace(self.context, boot_id=boot_id, document_at=None)
        self.documents = DocumentTracker()
        assert self.send(AgentRestarted()) == []
        return self.document(*events) if document else []

    def reload(self, *rules: Rule, **context: Any) -> list[str]:
        self.context = replace(self.context, rules=rules, **context)
        return self.send(PolicyChanged())

    def wait(self, seconds: float) -> None:
        self.context = replace(self.context, now=self.context.now + timedelta(seconds=seconds))

    def all_of(self, event: str) -> list[Workflow]:
        return [workflow for workflow in self.workflows.values() if workflow.event.id == event]

    def of(self, event: str = "A") -> Workflow:
        (workflow,) = self.all_of(event)
        return workflow

    def wait_message(self, event: str = "A") -> str:
        return wait_text(self.of(event))

    @property
    def phase(self) -> str:
        return self.of().phase


def wait_text(workflow: Workflow) -> str:
    """Why the event waits, as a person reads it."""
    return wait_message(workflow, workflow.wait_reason)


def stages() -> Iterator[Stage]:
    yield from ("prepare", "on_start", "recover")


def in_words(effect: Effect) -> str:
    event = effect.workflow_id.split("@")[0].upper()
    match effect:
        case RunHook(stage=stage, hook=hook):
            return f"{event}: {stage} {hook}"
        case CancelHook(stage=stage):
            return f"{event}: cancel {stage}"
        case UpdateHookDeadline():
            return f"{event}: move deadline"
        case Approve(event_id=event_id, is_alone=is_alone):
            return f"{event}: approve {event_id}" + (" alone" if is_alone else "")


# --- From first sight to the end.


def test_an_event_is_prepared_for_approved_and_recovered() -> None:
    agent, event = Agent(a_rule()), an_event()
    assert agent.document(event) == ["A: prepare drain"]
    assert not is_ready(agent.workflows)
    assert agent.ends("drain") == ["A: prepare checkpoint"]
    assert agent.ends("checkpoint") == ["A: approve A"]
    assert agent.phase == "prepared"
    assert agent.answer() == []
    assert agent.phase == "approved"
    assert agent.document(started(event)) == []
    assert agent.phase == "started"
    assert agent.document() == ["A: recover resume"]
    assert not is_ready(agent.workflows)
    assert agent.ends("resume") == []
    assert agent.workflows == {}
    assert is_ready(agent.workflows)
    assert agent.journal == [
        "seen: Reboot Scheduled, from Platform, for vm_1, not before 2026-03-02 12:15:00 UTC (in 14m 59s)",
        "decided: rule impactful matches it: affects self",
        "preparing: preparation begins: drain, checkpoint",
        "hook_started: hook drain starts",
        "hook_finished: hook drain: succeeded",
        "hook_started: hook checkpoint starts",
        "hook_finished: hook checkpoint: succeeded",
        "prepared: preparation is done",
        "approving: rule impactful: its preparation is done",
        "approved: Azure has accepted the approval",
        "changed: status Scheduled -> Started",
        "started: has started (approved)",
        "missing: is not in the document; over, if the next answer lacks it too",
        "gone: is no longer in the document (completed)",
        "recovering: recovery begins: resume",
        "hook_started: hook resume starts",
        "hook_finished: hook resume: succeeded",
        "closed: is over: completed",
    ]


def test_an_event_without_hooks_is_approved_at_once_and_closed_when_it_is_over() -> None:
    agent, event = Agent(Rule(name="user", approve="immediately")), an_event()
    assert agent.document(event) == ["A: approve A"]
    assert is_ready(agent.workflows)
    agent.answer()
    agent.document(started(event))
    assert agent.document() == []
    assert agent.workflows == {}


def test_immediate_approval_does_not_wait_for_the_hooks_it_has() -> None:
    agent = Agent(a_rule(approve="immediately"))
    assert agent.document(an_event()) == ["A: prepare drain", "A: approve A"]
    agent.answer()
    assert agent.phase == "preparing"
    assert agent.ends("drain") == ["A: prepare checkpoint"]
    assert agent.ends("checkpoint") == []
    assert agent.phase == "approved"


def test_a_manual_rule_prepares_and_waits_for_an_operator() -> None:
    agent = Agent(a_rule(lead=900.0, approve="manual", prepare=("drain",)))
    agent.document(an_event())
    assert agent.ends("drain") == []
    assert (agent.phase, agent.wait_message()) == ("prepared", "an operator must approve it")
    assert agent.operator("approve") == ["A: approve A"]
    assert agent.journal[-1] == "approving: an operator approved it"


def test_a_rule_that_never_approves_prepares_and_leaves_the_rest_to_not_before() -> None:
    agent = Agent(a_rule(lead=900.0, approve="never", prepare=("drain",)))
    agent.document(an_event())
    assert agent.ends("drain") == []
    assert agent.phase == "held"
    assert agent.journal[-1] == (
        "held: held: approve is never (rule impactful matches it: affects self); "
        "Azure starts it at 2026-03-02 12:15:00 UTC"
    )
    assert agent.document() == ["A: recover resume"]


def test_an_event_without_a_matching_rule_is_only_observed() -> None:
    agent = Agent(a_rule(when=When(type=("Freeze",))))
    assert agent.document(an_event()) == []
    assert (agent.phase, is_ready(agent.workflows)) == ("waiting", True)
    assert agent.document(started(an_event())) == []
    assert agent.document() == []
    assert agent.workflows == {}


def test_a_rule_with_nothing_but_recovery_still_recovers() -> None:
    agent = Agent(a_rule(prepare=()))
    assert agent.document(an_event()) == ["A: approve A"]
    assert not is_ready(agent.workflows)
    agent.answer()
    assert agent.document() == ["A: recover resume"]


# --- Failing preparation.


@pytest.mark.parametrize("outcome", ["failed", "timed_out", "not_started", "canceled"])
def test_an_event_whose_preparation_fails_is_held(outcome: HookOutcome) -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    assert agent.ends("drain", outcome) == []
    assert agent.phase == "held"
    assert agent.tick(3600) == []


def test_a_held_event_says_which_hook_failed_and_how() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain", "failed")
    assert agent.journal[-2:] == [
        "hook_finished: hook drain: exit code 1 (failed)",
        "held: held: hook drain: exit code 1; Azure starts it at 2026-03-02 12:15:00 UTC",
    ]


def test_a_rule_may_approve_in_spite_of_a_failure() -> None:
    agent = Agent(a_rule(on_failure="approve"))
    agent.document(an_event())
    assert agent.ends("drain", "timed_out") == ["A: approve A"]
    assert agent.journal[-2:] == [
        "prepared: preparation failed (hook drain: timed_out), and the rule goes on anyway",
        "approving: rule impactful: its rule approves despite the failure",
    ]


def test_a_failed_preparation_is_recovered_as_well() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain", "failed")
    assert agent.document() == ["A: recover resume"]


# --- Events that name other VMs.


def shared_event(**changes: Any) -> ScheduledEvent:
    return an_event(**{"resources": ("vm_0", "vm_1"), **changes})


def test_a_shared_event_is_prepared_for_and_held_by_default() -> None:
    agent = Agent(a_rule(lead=900.0, prepare=("drain",)))
    assert agent.document(shared_event()) == ["A: prepare drain"]
    assert agent.ends("drain") == []
    assert (agent.phase, agent.wait_message()) == (
        "held",
        "it names several VMs (vm_0, vm_1) and shared is hold",
    )


def test_only_the_first_vm_of_a_shared_event_approves_where_the_rule_says_first() -> None:
    rule = Rule(name="user", approve="immediately", shared="first")
    assert Agent(rule).document(shared_event()) == []
    assert Agent(rule).document(shared_event(resources=("VM_1", "vm_0"))) == ["A: approve A"]


def test_the_second_vm_approves_when_the_first_one_has_not() -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    assert agent.document(shared_event()) == []
    turn = agent.context.now + timedelta(seconds=10)
    assert agent.wait_message() == f"VMs listed before this one may approve it until {turn:%Y-%m-%d %H:%M:%S UTC}"
    assert next_wake_at(agent.workflows, agent.context) == turn
    assert agent.tick(9) == []
    assert agent.tick(1) == ["A: approve A"]


def test_the_second_vm_does_not_approve_what_the_first_one_has_started() -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    agent.document(shared_event())
    assert agent.document(started(shared_event()), after=9) == []
    assert agent.tick(60) == []


def test_the_second_vm_counts_from_the_approval_time_of_the_first_one() -> None:
    agent = Agent(Rule(name="user", approve="immediately", lead=600.0))
    agent.document(shared_event())
    assert agent.tick(299) == []
    assert agent.tick(9) == []
    assert agent.tick(1) == ["A: approve A"]


def test_the_stagger_of_the_second_vm_survives_restarts_and_clock_changes() -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    agent.document(shared_event())
    agent.wait(3600)
    assert agent.send(ClockChanged(3600)) == []
    assert agent.restart("boot 1", shared_event()) == []
    agent.wait(-7200)
    assert agent.document(shared_event()) == ["A: approve A"]


def test_an_event_that_other_vms_must_approve_is_prepared_as_late_as_hooks_allow() -> None:
    agent = Agent(a_rule(drain_for=60.0), reserve=5.0)
    assert agent.document(shared_event()) == []
    assert agent.wait_message() == (
        "begins at 2026-03-02 12:03:55 UTC: "
        "it names other VMs too and shared is hold, and preparation may take 11m5s"
    )
    assert is_ready(agent.workflows)
    assert agent.restart("boot 1", shared_event()) == []
    assert agent.reload(a_rule(drain_for=61.0)) == []
    assert agent.tick(START + timedelta(minutes=3, seconds=53) - agent.context.now) == []
    assert agent.tick(1) == []
    assert not is_ready(agent.workflows)
    # The drain is not cut short either: the hooks have what they need after it.
    assert agent.of().drain_until == START + timedelta(minutes=4, seconds=55)


def test_an_operators_approval_begins_at_once_what_would_be_prepared_for_late() -> None:
    agent = Agent(a_rule(approve="manual", prepare=("drain",)))
    assert agent.document(an_event()) == []
    assert agent.wait_message().startswith("begins at 2026-03-02 12:10:00 UTC: an operator must approve it, ")
    assert agent.operator("approve") == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]


def test_any_vm_of_a_shared_event_approves_where_the_rule_says_any() -> None:
    assert Agent(Rule(name="user", approve="immediately", shared="any")).document(shared_event()) == [
        "A: approve A"
    ]


def test_an_event_of_another_vm_is_never_approved_not_even_by_an_operator() -> None:
    agent = Agent(
        a_rule(lead=900.0, when=When(affects=("others",)), prepare=("tell",), approve="immediately", shared="any")
    )
    assert agent.document(an_event(resources=("vm_10",))) == ["A: prepare tell"]
    assert agent.ends("tell") == []
    assert agent.operator("approve") == []
    assert (agent.phase, agent.wait_message()) == ("held", "it does not name this VM")


def test_a_name_learned_later_brings_the_event_under_its_rule() -> None:
    agent = Agent(a_rule(), names=())
    assert agent.document(an_event()) == []
    assert agent.reload(a_rule(), names=("vm_1",)) == ["A: prepare drain"]


def test_a_name_learned_when_the_event_has_started_brings_its_on_start_hooks() -> None:
    agent = Agent(a_rule(on_start=("tell",)), names=())
    assert agent.document(started(an_event())) == []
    assert agent.reload(a_rule(on_start=("tell",)), names=("vm_1",)) == ["A: on_start tell"]


# --- Time: lead, window, drain, NotBefore.


def test_an_event_announced_days_ahead_waits_until_its_lead() -> None:
    agent = Agent(a_rule(lead=900.0))
    not_before = START + timedelta(days=7)
    assert agent.document(an_event(not_before=not_before)) == []
    assert (agent.phase, is_ready(agent.workflows)) == ("waiting", True)
    assert agent.wait_message() == "begins at 2026-03-09 11:45:00 UTC: lead 15m"
    assert next_wake_at(agent.workflows, agent.context) == not_before - timedelta(minutes=15)
    agent.context = replace(agent.context, now=not_before - timedelta(seconds=901))
    assert agent.tick(0) == []
    assert agent.tick(1) == ["A: prepare drain"]


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ({"lead": 900.0}, "time"),
        ({"lead": 900.0, "window": "night"}, "window"),  # the window opens before the lead
        ({"lead": 4 * 86400.0, "window": "night"}, "time"),  # the lead comes before the window
        ({"lead": 900.0, "window": "night", "approve": "manual"}, "time"),  # an operator needs no window
        ({"approve": "manual"}, "time"),
    ],
)
def test_only_an_event_that_begins_when_a_window_opens_waits_for_that(rule: dict[str, Any], kind: str) -> None:
    night = MaintenanceWindow(start=time(2, 0), length=7200.0, days=("fri",))
    agent = Agent(a_rule(**rule), windows={"night": night})
    agent.document(an_event(not_before=START + timedelta(days=7)))
    assert wait_kind(agent) == kind


def wait_kind(agent: Agent) -> str:
    reason = agent.of().wait_reason
    return reason.kind if reason else ""


def test_an_operator_approval_skips_the_lead() -> None:
    agent = Agent(a_rule(lead=900.0, prepare=("drain",)))
    agent.document(an_event(not_before=START + timedelta(days=7)))
    assert agent.operator("approve") == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]


@pytest.mark.parametrize("approve", ["immediately", "when-prepared"])
def test_what_an_approval_began_early_waits_for_the_lead_once_it_is_released(approve: Any) -> None:
    agent = Agent(a_rule(lead=900.0, approve=approve, prepare=(), drain_for=30.0))
    not_before = START + timedelta(days=7)
    event = an_event(not_before=not_before)
    agent.document(event)
    agent.operator("approve")
    agent.answer("timeout")
    assert agent.operator("release") == []
    assert agent.document(event, after=60) == []
    assert (agent.phase, agent.wait_message()) == ("prepared", "its time has not come")
    assert wait_kind(agent) == "too_early"
    begins_at = not_before - timedelta(minutes=15)
    assert next_wake_at(agent.workflows, agent.context) == begins_at
    agent.context = replace(agent.context, now=begins_at, document_at=begins_at)
    assert agent.tick(0)[0].startswith("A: approve A")


def test_what_an_approval_began_early_waits_for_its_window_once_it_is_released() -> None:
    night = MaintenanceWindow(start=time(2, 0), length=7200.0)
    agent = Agent(a_rule(window="night", prepare=("drain",)), windows={"night": night})
    event = an_event(not_before=START + timedelta(days=7))
    agent.document(event)
    agent.operator("approve")
    agent.ends("drain")
    agent.answer("timeout")
    agent.operator("release")
    assert agent.document(event, after=60) == []
    assert (agent.phase, agent.wait_message()) == ("prepared", "its time has not come")
    opening = datetime(2026, 3, 3, 2, 0, tzinfo=UTC)
    assert agent.of().wait_reason == WaitReason(kind="window_closed", at=opening)
    agent.context = replace(agent.context, now=opening, document_at=opening)
    assert agent.tick(0) == ["A: approve A alone"]


def test_a_failure_voids_an_early_approval_and_the_rule_waits_for_its_lead() -> None:
    agent = Agent(a_rule(lead=900.0, prepare=("drain",), on_failure="approve"))
    agent.document(an_event(not_before=START + timedelta(days=7)))
    agent.operator("approve")
    assert agent.ends("drain", "failed") == []
    assert agent.wait_message() == "its time has not come"
    assert agent.operator("approve") == ["A: approve A"]


def test_an_immediate_rule_with_a_lead_does_not_approve_before_its_time() -> None:
    agent = Agent(Rule(name="early", approve="immediately", lead=900.0))
    assert agent.document(an_event(not_before=START + timedelta(hours=1))) == []
    assert agent.tick(3600 - 901 - 1) == []
    assert agent.tick(1) == ["A: approve A"]


def test_an_event_announced_long_ahead_is_handled_in_the_maintenance_window() -> None:
    night = MaintenanceWindow(start=time(2, 0), length=7200.0)
    agent = Agent(a_rule(window="night", prepare=("drain",)), windows={"night": night})
    assert agent.document(an_event(not_before=START + timedelta(days=3))) == []
    opening = datetime(2026, 3, 3, 2, 0, tzinfo=UTC)
    assert agent.of().wait_reason == WaitReason(kind="window", at=opening, detail="window night opens")
    assert agent.wait_message() == "begins at 2026-03-03 02:00:00 UTC: window night opens"
    assert next_wake_at(agent.workflows, agent.context) == opening
    agent.context = replace(agent.context, now=opening)
    assert agent.tick(0) == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]
    restored = Agent()
    restored.workflows = agent.workflows
    restored.restart(document=False)
    assert restored.of().decision.window == night


def test_an_event_before_the_next_window_is_handled_at_its_usual_lead_time() -> None:
    night = MaintenanceWindow(start=time(2, 0), length=7200.0)
    agent = Agent(a_rule(window="night"), windows={"night": night})
    assert agent.document(an_event(not_before=START + timedelta(hours=2))) == []
    assert agent.wait_message() == "begins at 2026-03-02 13:45:00 UTC: window night does not open before"
    assert wait_kind(agent) == "time"  # it waits for no window
    assert agent.tick(7200 - 901) == ["A: prepare drain"]


def test_the_vm_is_not_ready_for_the_time_of_the_drain_before_its_hooks_run() -> None:
    agent = Agent(a_rule(drain_for=30.0, prepare=("stop",)))
    assert agent.document(an_event()) == []
    assert (agent.phase, is_ready(agent.workflows)) == ("preparing", False)
    assert next_wake_at(agent.workflows, agent.context) == agent.context.now + timedelta(seconds=30)
    assert agent.tick(29) == []
    assert agent.tick(1) == ["A: prepare stop"]
    assert agent.ends("stop") == ["A: approve A"]


def test_a_drain_alone_is_a_preparation_and_ends_with_the_event() -> None:
    agent = Agent(Rule(name="drain", drain_for=30.0, approve="when-prepared"))
    agent.document(an_event())
    assert agent.tick(30) == ["A: approve A"]
    agent.answer()
    assert not is_ready(agent.workflows)
    agent.document()
    assert is_ready(agent.workflows)


def test_with_a_short_lead_time_the_drain_leaves_half_of_it_to_the_hooks() -> None:
    agent = Agent(a_rule(drain_for=300.0))
    agent.document(an_event(not_before=START + timedelta(seconds=31)))
    assert agent.of().drain_until == START + timedelta(seconds=16)
    without_hooks = Agent(Rule(name="drain", drain_for=300.0, approve="when-prepared"))
    without_hooks.document(an_event(not_before=START + timedelta(seconds=31)))
    assert without_hooks.of().drain_until == START + timedelta(seconds=31)


@pytest.mark.parametrize("not_before", [START, datetime(1, 1, 1, tzinfo=UTC)])
def test_an_event_that_may_start_now_is_not_drained_for_but_prepared(not_before: datetime) -> None:
    assert Agent(a_rule(drain_for=300.0)).document(an_event(not_before=not_before)) == ["A: prepare drain"]


def test_a_drain_is_cut_short_when_not_before_comes_nearer() -> None:
    agent = Agent(a_rule(drain_for=300.0))
    agent.document(an_event())
    assert agent.document(an_event(not_before=START + timedelta(seconds=22))) == []
    assert agent.tick(9) == []
    assert agent.tick(1) == ["A: prepare drain"]


def test_a_drain_is_not_prolonged_when_not_before_goes_away() -> None:
    agent = Agent(a_rule(drain_for=300.0))
    agent.document(an_event())
    until = agent.of().drain_until
    agent.document(an_event(not_before=START + timedelta(days=1)))
    assert agent.of().drain_until == until


def test_a_clock_set_back_neither_prolongs_a_drain_nor_delays_an_approval() -> None:
    agent = Agent(a_rule(drain_for=30.0, prepare=()))
    agent.document(an_event())
    agent.wait(-7200)
    assert agent.tick() == []  # how old the document is, is not known
    assert agent.document(an_event()) == ["A: approve A"]
    agent.answer("server")
    agent.wait(-7200)
    assert agent.document(an_event()) == ["A: approve A alone"]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_neither_shortens_nor_prolongs_a_drain(jump: float) -> None:
    agent = Agent(a_rule(prepare=("drain", "checkpoint"), drain_for=600.0))
    agent.document(an_event(not_before=START + timedelta(hours=9)))
    agent.wait(200 + jump)
    assert agent.send(ClockChanged(jump)) == []
    assert agent.tick(399) == []
    assert agent.tick(2) == ["A: prepare drain"]
    agent.wait(jump)
    assert agent.send(ClockChanged(jump)) == ["A: move deadline"]
    assert agent.ends("drain") == ["A: prepare checkpoint"]


def test_a_clock_set_forward_leaves_the_hooks_their_share_of_the_time() -> None:
    agent = Agent(a_rule(drain_for=600.0))
    agent.document(an_event(not_before=START + timedelta(seconds=3600)))
    agent.wait(3400)
    assert agent.send(ClockChanged(3400)) == []
    assert next_wake_at(agent.workflows, agent.context) == agent.context.now + timedelta(seconds=99.5)


@pytest.mark.parametrize("is_acting", [True, False])
def test_a_not_before_at_the_beginning_of_the_calendar_breaks_nothing(*, is_acting: bool) -> None:
    agent = Agent(a_rule(prepare=(), recover=(), approve="never"), is_acting=is_acting)
    agent.document(an_event(not_before=datetime.min.replace(tzinfo=UTC)))
    assert agent.phase == "waiting"
    assert next_wake_at(agent.workflows, agent.context) is None


def test_a_hook_in_flight_gets_a_new_deadline_when_not_before_moves() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    later = an_event(not_before=START + timedelta(minutes=5))
    assert agent.document(later) == ["A: move deadline"]
    assert agent.journal[-1] == "changed: not_before 2026-03-02 12:15:00 UTC -> 2026-03-02 12:05:00 UTC"
    agent.ends("drain", "failed")
    assert agent.document(an_event()) == []


@pytest.mark.parametrize(
    ("rule", "days", "early"),
    [
        (a_rule(lead=900.0, approve="never"), 2, timedelta(days=2, minutes=-15)),
        (a_rule(approve="never"), 2, timedelta(days=2, minutes=-10)),
        (a_rule(lead=900.0, approve="manual"), 2, timedelta(days=2, minutes=-15)),
        (a_rule(lead=3 * 86400.0, approve="never"), 2, None),
    ],
)
def test_what_is_prepared_when_not_before_moves_away_knows_when_it_would_begin(
    rule: Rule, days: int, early: timedelta | None
) -> None:
    agent = Agent(rule)
    agent.document(an_event(not_before=START + timedelta(minutes=9)))
    agent.ends("drain")
    agent.ends("checkpoint")
    assert agent.of().early_until is None
    moved = an_event(not_before=START + timedelta(days=days))
    agent.document(moved)
    assert agent.of().early_until == (START + early if early else None)
    agent.document(an_event(not_before=START + timedelta(minutes=9)))
    assert agent.of().early_until is None


def test_an_event_that_is_not_prepared_is_not_early() -> None:
    agent = Agent(a_rule(lead=900.0))
    agent.document(an_event(not_before=START + timedelta(days=2)))
    assert agent.of().phase == "waiting"
    assert agent.of().early_until is None


def test_an_event_that_an_approval_has_begun_is_early_once_the_approval_is_released() -> None:
    agent = Agent(a_rule(lead=900.0))
    agent.document(an_event(not_before=START + timedelta(days=2)))
    agent.operator("approve")
    agent.operator("release")
    assert agent.of().early_until == START + timedelta(days=2, minutes=-15)
    agent.document(started(an_event()))
    assert agent.of().early_until is None


def test_not_before_moved_towards_a_waiting_event_wakes_it() -> None:
    agent = Agent(a_rule(lead=900.0))
    agent.document(an_event(not_before=START + timedelta(days=7)))
    assert agent.document(an_event()) == ["A: prepare drain"]


# --- Started and gone, in every phase.


def test_preparation_is_canceled_when_the_event_starts() -> None:
    agent, event = Agent(a_rule()), an_event()
    agent.document(event)
    assert agent.document(started(event)) == ["A: cancel prepare"]
    assert agent.document(started(event)) == []
    assert agent.ends("drain", "canceled") == []
    assert agent.of().prepare.state == "canceled"
    assert agent.document() == ["A: recover resume"]


def test_a_hook_that_succeeds_after_its_cancellation_is_the_last_one() -> None:
    agent, event = Agent(a_rule()), an_event()
    agent.document(event)
    agent.document(started(event))
    assert agent.ends("drain") == []
    assert agent.of().prepare.state == "canceled"


def test_preparation_finishes_after_an_early_start_if_the_rule_says_so() -> None:
    agent, event = Agent(a_rule(on_early_start="finish")), an_event()
    agent.document(event)
    # The hook that runs is no longer bounded by a NotBefore that has come.
    assert agent.document(started(event)) == ["A: move deadline"]
    assert hook_deadline_at(agent.of(), "prepare", 5.0, START) is None
    assert agent.ends("drain") == ["A: prepare checkpoint"]
    assert agent.ends("checkpoint") == []
    assert agent.document() == ["A: recover resume"]


def test_an_event_that_starts_before_its_time_is_not_prepared_for() -> None:
    agent, event = Agent(a_rule(lead=900.0)), an_event(not_before=START + timedelta(days=7))
    agent.document(event)
    assert agent.document(started(event)) == []
    assert agent.document() == []
    assert agent.workflows == {}


def test_an_event_first_seen_started_gets_its_on_start_hooks_and_nothing_else() -> None:
    agent, event = Agent(a_rule(on_start=("tell", "log"))), started(an_event())
    assert agent.document(event) == ["A: on_start tell"]
    assert is_ready(agent.workflows)
    assert agent.ends("tell", "failed") == ["A: on_start log"]
    assert agent.ends("log") == []
    assert agent.operator("approve") == []
    assert agent.document() == []
    assert agent.workflows == {}
    assert agent.journal[-1] == "closed: is over: completed"


def test_on_start_hooks_run_when_a_prepared_event_starts() -> None:
    agent, event = Agent(a_rule(prepare=("drain",), on_start=("tell",))), an_event()
    agent.document(event)
    agent.ends("drain")
    assert agent.document(started(event)) == ["A: on_start tell"]
    assert agent.document() == ["A: cancel on_start"]
    assert agent.ends("tell", "canceled") == ["A: recover resume"]


def test_a_rule_for_started_events_matches_one_that_had_no_rule_before() -> None:
    rule = Rule(name="late", when=When(status=("Started",)), on_start=("tell",))
    agent, event = Agent(rule), an_event()
    assert agent.document(event) == []
    assert agent.document(started(event)) == ["A: on_start tell"]


def test_an_event_that_vanishes_is_recovered_after_its_prepare_hook_has_ended() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    assert agent.document() == ["A: cancel prepare"]
    assert agent.ends("drain", "canceled") == ["A: recover resume"]
    agent.ends("resume")
    assert agent.workflows == {}


def test_a_drain_is_over_when_its_event_vanishes() -> None:
    agent = Agent(a_rule(drain_for=60.0, recover=()))
    agent.document(an_event())
    agent.document()
    assert agent.workflows == {}


@pytest.mark.parametrize(
    ("approval", "after", "outcome"),
    [
        ("none", 1, "canceled"),
        ("none", 901, "unknown"),
        ("confirmed", 1, "unknown"),
        ("requested", 1, "unknown"),
        ("failed", 1, "unknown"),
        ("restarted", 1, "unknown"),
    ],
)
def test_an_event_gone_unstarted_was_canceled_only_if_it_could_not_start(
    approval: str, after: float, outcome: str
) -> None:
    agent = Agent(Rule(name="any", approve="manual" if approval == "none" else "immediately"))
    agent.document(an_event())
    if approval in ("confirmed", "failed"):
        agent.answer("timeout" if approval == "failed" else "")
    if approval == "restarted":
        agent.restart(document=False)
    agent.document(after=after)
    assert agent.journal[-2:] == [
        f"gone: is no longer in the document ({outcome})",
        f"closed: is over: {outcome}",
    ]


def test_an_event_that_goes_back_to_scheduled_is_not_prepared_for_again() -> None:
    agent, event = Agent(a_rule()), an_event()
    agent.document(event)
    agent.document(started(event))
    agent.ends("drain", "canceled")
    assert agent.document(event) == []
    assert agent.operator("approve") == []
    assert agent.document() == ["A: recover resume"]


def test_an_event_that_goes_back_to_scheduled_makes_way_for_an_eviction() -> None:
    rule = a_rule(prepare=("drain",), on_early_start="finish")
    agent, event, preempt = Agent(rule, serialized=("drain",)), an_event(), an_event(id="P", type="Preempt")
    agent.document(event)
    agent.document(started(event))
    agent.document(event)
    assert agent.document(event, preempt) == ["A: cancel prepare", "P: prepare drain"]


def test_an_event_renamed_at_its_start_is_the_same_event() -> None:
    agent, event = Agent(a_rule(prepare=("drain",))), an_event()
    agent.document(event)
    agent.ends("drain")
    agent.answer()
    assert agent.document(started(replace(event, id="B"))) == []
    assert len(agent.workflows) == 1
    assert "renamed: goes on under the id B (was A)" in agent.journal
    assert agent.document() == ["A: recover resume"]


def test_an_event_renamed_after_its_start_is_recovered_from_at_its_end() -> None:
    agent, event = Agent(a_rule(prepare=("drain",))), an_event()
    agent.document(event)
    agent.ends("drain")
    agent.document(started(event))
    assert agent.document(started(replace(event, id="B"))) == []
    assert agent.document(started(replace(event, id="C"))) == []
    assert len(agent.workflows) == 1
    assert agent.document() == ["A: recover resume"]


def test_an_event_that_one_answer_lacks_is_not_over() -> None:
    agent, event = Agent(a_rule()), an_event()
    agent.document(event)
    agent.ends("drain")
    assert agent.answer_once() == []
    assert agent.ends("checkpoint") == []  # the hook that ran went on; no approval follows
    assert not is_ready(agent.workflows)
    assert evaluate_approval_gates(agent.of(), agent.context).verdict == "wait"
    assert agent.operator("approve") == []
    assert agent.answer_once(event) == ["A: approve A"]
    assert agent.of().outcome == ""
    assert "changed: is in the document again" in agent.journal


def test_a_missing_event_has_no_new_hook_of_any_stage() -> None:
    agent = Agent(a_rule(prepare=("drain", "save"), on_start=("tell", "log"), recover=("resume",)))
    agent.document(an_event())
    agent.answer_once()
    assert agent.ends("drain") == []
    assert agent.answer_once(an_event()) == ["A: prepare save"]
    agent.document(started(an_event()))
    agent.ends("save", "canceled")
    agent.answer_once()
    assert agent.ends("tell") == []
    assert agent.answer_once(started(an_event())) == ["A: on_start log"]
    agent.ends("log")
    assert agent.document() == ["A: recover resume"]


def test_a_restart_counts_the_answers_anew_and_keeps_the_first_absence() -> None:
    agent = Agent(a_rule(prepare=("drain",), approve="never", lead=3600.0))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer_once()
    first = agent.of().missing_since
    agent.restart(document=False)
    assert agent.answer_once(after=NOTICE.total_seconds() + 60) == []
    assert agent.of().missing_since == first
    assert agent.answer_once() == ["A: recover resume"]
    assert agent.of().outcome == "canceled"  # NotBefore had not come when it was first missing


@pytest.mark.parametrize(("status", "outcome"), [("Completed", "completed"), ("Canceled", "canceled")])
def test_an_event_that_the_document_calls_over_is_gone_at_once(status: str, outcome: str) -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.context = replace(agent.context, document_at=agent.context.now)
    assert agent.send(Gone("a", status)) == ["A: recover resume"]
    assert agent.of().outcome == outcome


def test_an_event_that_is_back_before_its_recovery_began_is_the_same() -> None:
    agent = Agent(a_rule(prepare=("drain",)), hooks=("drain",))
    event = an_event()
    agent.document(event)
    agent.ends("drain")
    agent.answer()
    agent.document(started(event))
    before = agent.of()
    assert agent.document() == []  # the recover hook is not in the policy
    assert agent.phase == "recovering"
    assert agent.answer_once(started(event)) == []
    assert agent.of() == replace(before, phase_since=agent.context.now)
    agent.context = replace(agent.context, hooks=("drain", "resume"))
    assert agent.document() == ["A: recover resume"]


def an_approved_event_that_is_back(**rule: Any) -> tuple[Agent, list[str]]:
    """A was approved and over, and is back: B had kept it from being recovered. Also what is done then."""
    other = When(type=("Freeze",))
    agent = Agent(
        a_rule(name="other", when=other, prepare=("drain",), approve="never"), a_rule(prepare=("drain",), **rule)
    )
    freeze = an_event(id="B", type="Freeze")
    agent.document(an_event(), freeze)
    agent.tick(timedelta(minutes=10))
    agent.ends("drain")
    agent.operator("approve")
    agent.answer()
    assert agent.phase == "approved"
    assert agent.document(freeze) == []
    assert agent.phase == "recovering"
    return agent, agent.answer_once(an_event(), freeze)


def test_an_approved_event_that_is_back_before_its_recovery_is_approved_again() -> None:
    agent, effects = an_approved_event_that_is_back()
    assert effects == ["A: approve A"]
    agent.answer()
    assert agent.phase == "approved"


def test_an_approved_event_that_is_back_passes_the_gates_anew() -> None:
    agent, effects = an_approved_event_that_is_back(approve="manual")
    assert effects == []
    assert agent.phase == "prepared"
    assert "operator: the operator's approval is void: two answers lacked the event" in agent.journal
    assert agent.operator("approve") == ["A: approve A"]


def test_an_approved_event_that_one_answer_lacked_is_not_approved_again() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    agent.answer_once()
    assert agent.answer_once(an_event()) == []
    assert agent.phase == "approved"


def an_event_that_is_back_amid_its_approval() -> Agent:
    agent = Agent(a_rule(prepare=("drain",)), hooks=("drain",))
    agent.document(an_event())
    assert agent.ends("drain") == ["A: approve A"]
    agent.document()
    assert agent.answer_once(an_event()) == []
    return agent


@pytest.mark.parametrize("error_kind", ["", "server"])
def test_the_answer_to_an_approval_of_an_earlier_appearance_counts_for_nothing(error_kind: str) -> None:
    agent = an_event_that_is_back_amid_its_approval()
    assert agent.answer(error_kind) == ["A: approve A"]
    assert agent.phase == "prepared"
    assert agent.answer("server") == []
    assert agent.phase == "prepared"
    assert agent.answer_once(an_event(), after=10) == ["A: approve A alone"]
    agent.answer()
    assert agent.phase == "approved"


def test_a_hold_amid_an_approval_of_an_earlier_appearance_comes_in_time() -> None:
    agent = an_event_that_is_back_amid_its_approval()
    agent.operator("hold")
    assert agent.answer() == []
    assert (agent.phase, agent.of().operator_action) == ("held", "hold")


def test_a_restart_sends_an_approval_anew_whose_event_was_away_meanwhile() -> None:
    agent = an_event_that_is_back_amid_its_approval()
    assert agent.restart("boot 1", an_event()) == ["A: approve A"]
    agent.answer()
    assert agent.phase == "approved"


def test_an_approved_event_that_is_back_as_started_was_approved() -> None:
    agent = Agent(a_rule(prepare=("drain",)), hooks=("drain",))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    agent.document()
    assert agent.answer_once(started(an_event())) == []
    assert agent.journal[-1] == "started: has started (approved)"


def test_a_reappearing_event_is_prepared_again_after_its_recovery() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    assert agent.document() == ["A: recover resume"]
    assert agent.document(an_event()) == ["A: cancel recover"]
    assert agent.ends("resume", "canceled") == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]
    assert agent.document() == ["A: recover resume"]
    agent.ends("resume")
    assert agent.workflows == {}


def test_the_end_of_an_old_appearance_does_not_hide_the_new_one() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    agent.document(an_event())
    old, _new = agent.all_of("A")
    # In one go: the old appearance moves, and the document says something about the new one.
    changed = an_event(description="changed")
    finished = HookFinished(workflow_id=old.id, stage="recover", hook="resume", run=1, outcome="canceled")
    agent.send(finished, *compare(known_events(agent.workflows), Document(incarnation="2", events=(changed,))))
    assert [workflow.event.description for workflow in agent.all_of("A")] == ["", "changed"]


# --- A new decision.


def test_a_change_that_brings_another_rule_is_decided_anew() -> None:
    rules = (Rule(name="short", when=When(duration_below=9.0), approve="immediately"), a_rule())
    agent = Agent(*rules)
    agent.document(an_event())
    assert agent.document(an_event(duration_seconds=5.0)) == ["A: approve A"]
    assert agent.of().decision.prepare == ("drain", "checkpoint")


def test_a_changed_text_without_other_changes_records_no_decision() -> None:
    agent = Agent(a_rule(lead=60.0))
    agent.document(an_event())
    agent.document(an_event(description="Virtual machine is being rebooted"))
    assert agent.journal[-1] == 'changed: description "" -> Virtual machine is being rebooted'


def test_an_event_that_now_names_others_is_no_longer_approved() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.document(shared_event())
    assert agent.ends("drain") == []
    assert agent.phase == "held"


def test_a_reload_that_forbids_approval_takes_effect_at_once() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.reload(a_rule(prepare=("drain",), approve="never"))
    assert agent.ends("drain") == []
    assert agent.phase == "held"
    assert agent.reload(a_rule(prepare=("drain",))) == ["A: approve A"]


def test_a_preparation_is_recovered_by_the_rule_that_made_it() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    assert agent.reload() == []
    assert agent.ends("drain") == []
    waits_for = "approve is never (rule impactful began it; now no rule matches it: observe)"
    assert (agent.phase, agent.wait_message()) == ("held", waits_for)
    assert agent.document() == ["A: recover resume"]


def test_a_hook_that_the_new_rule_wants_besides_runs_before_the_approval() -> None:
    escalated = a_rule(name="worse", prepare=("drain", "save"), recover=("load",))
    agent = Agent(a_rule(when=When(type=("Freeze",)), prepare=("drain",)), escalated)
    agent.document(an_event(type="Freeze"))
    agent.document(an_event(type="Reboot"))
    assert agent.ends("drain") == ["A: prepare save"]
    assert agent.ends("save") == ["A: approve A"]
    agent.answer()
    assert agent.document() == ["A: recover resume"]
    assert agent.ends("resume") == ["A: recover load"]


def test_an_additional_hook_of_a_new_rule_runs_after_preparation() -> None:
    agent = Agent(a_rule(lead=900.0, approve="manual", prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    assert agent.reload(a_rule(prepare=("drain", "save"))) == ["A: prepare save"]
    assert "preparing: preparation goes on: save" in agent.journal
    assert agent.ends("save") == ["A: approve A"]


def test_the_drain_of_a_new_rule_comes_before_its_hooks_and_the_approval() -> None:
    agent = Agent(
        a_rule(name="freeze", when=When(type=("Freeze",)), prepare=("drain",)),
        a_rule(prepare=("drain", "save"), drain_for=60.0),
    )
    agent.document(an_event(type="Freeze"))
    assert agent.ends("drain", after=10) == ["A: approve A"]
    agent.answer("timeout")
    assert agent.document(an_event()) == []
    assert agent.tick(48) == []  # not ready for 59 seconds
    assert agent.tick() == ["A: prepare save"]
    assert agent.ends("save") == ["A: approve A alone"]


def test_a_longer_drain_of_a_new_policy_delays_the_approval() -> None:
    agent = Agent(a_rule(prepare=(), drain_for=30.0, approve="manual", lead=900.0))
    agent.document(an_event())
    agent.tick(30)
    assert agent.phase == "prepared"
    assert agent.reload(a_rule(prepare=(), drain_for=60.0)) == []
    assert agent.journal[-1] == "preparing: preparation goes on: not ready for longer"
    assert agent.tick(29) == []
    assert agent.tick() == ["A: approve A"]


def test_a_longer_drain_of_a_new_policy_never_ends_one_earlier_that_a_reboot_has_begun_anew() -> None:
    agent = Agent(a_rule(prepare=(), drain_for=60.0))
    agent.document(an_event())
    agent.tick(40)
    assert agent.restart("boot 2", an_event()) == []
    until = agent.of().drain_until
    assert agent.reload(a_rule(prepare=(), drain_for=70.0)) == []
    assert agent.of().drain_until == until


def test_an_approved_event_that_gets_worse_is_prepared_for_not_approved_again() -> None:
    short = Rule(name="short", when=When(type=("Freeze",)), approve="immediately")
    agent = Agent(short, a_rule(prepare=("drain",), lead=60.0))
    freeze = an_event(type="Freeze")
    assert agent.document(freeze) == ["A: approve A"]
    agent.answer()
    assert agent.document(replace(freeze, type="Redeploy")) == ["A: prepare drain"]
    assert agent.ends("drain") == []
    assert agent.phase == "approved"
    assert agent.document() == ["A: recover resume"]


def test_an_approved_event_is_not_called_held_when_preparing_for_more_fails() -> None:
    short = Rule(name="short", when=When(type=("Freeze",)), approve="immediately")
    agent = Agent(short, a_rule(prepare=("drain",)))
    agent.document(an_event(type="Freeze"))
    agent.answer()
    agent.document(an_event(type="Redeploy"))
    assert agent.ends("drain", "failed") == []
    assert agent.phase == "approved"
    assert not [note for note in agent.journal if note.startswith("held")]
    assert (
        "prepared: preparation failed (hook drain: exit code 1), and Azure has accepted the approval already"
        in agent.journal
    )


def test_a_confirmed_approval_in_progress_skips_the_lead() -> None:
    short = Rule(name="short", when=When(type=("Freeze",)), approve="immediately")
    agent = Agent(short, a_rule(prepare=("drain",), lead=60.0))
    assert agent.document(an_event(type="Freeze")) == ["A: approve A"]
    assert agent.document(an_event(type="Redeploy")) == []
    assert agent.answer() == ["A: prepare drain"]


def test_an_additional_hook_of_a_new_rule_runs_after_approval() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    assert agent.phase == "approved"
    assert agent.reload(a_rule(prepare=("drain", "save"))) == ["A: prepare save"]
    assert agent.ends("save") == []
    assert agent.phase == "approved"


@pytest.mark.parametrize("has_restarted", [False, True])
def test_a_hook_that_the_policy_has_lost_does_not_stop_those_of_the_new_rule(
    has_restarted: bool,
) -> None:
    agent = Agent(a_rule(prepare=("drain", "checkpoint")))
    agent.document(an_event())
    if has_restarted:
        agent.ends("drain")
        agent.restart(document=False)
    rule, hooks = a_rule(prepare=("drain", "save")), ("drain", "save", "resume")
    effects = agent.reload(rule, hooks=hooks)
    assert agent.journal[-1] == "decided: rule impactful matches it: affects self; no hook any more: checkpoint"
    effects += agent.document(an_event()) if has_restarted else agent.ends("drain")
    assert effects == ["A: prepare save"]
    assert agent.ends("save") == ["A: approve A"]


def test_a_hook_that_runs_while_the_policy_loses_it_still_has_to_succeed() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    assert agent.reload(a_rule(prepare=("save",)), hooks=("save", "resume")) == []
    assert agent.ends("drain", "failed") == []
    assert agent.phase == "held"


def test_preparation_begins_when_a_new_decision_requires_it() -> None:
    agent = Agent(Rule(name="ask", approve="manual"))
    agent.document(an_event())
    assert agent.phase == "prepared"
    assert agent.reload(a_rule(prepare=("drain",))) == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]


def test_a_reload_does_not_touch_an_event_that_is_over() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    assert agent.reload() == []
    assert agent.of().decision.recover == ("resume",)


# --- Two events.


def test_a_recovery_waits_for_a_hook_that_the_policy_lacks_until_it_is_restored() -> None:
    agent = Agent(a_rule(prepare=("drain",), recover=("resume",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.context = replace(agent.context, hooks=())
    assert agent.document() == []
    assert agent.journal[-1] == "hook_missing: hook resume is not in the policy any more: put it back"
    assert agent.restart() == []
    assert not is_ready(agent.workflows)
    agent.context = replace(agent.context, hooks=("resume",))
    assert agent.send(PolicyChanged()) == ["A: recover resume"]
    assert agent.ends("resume") == []
    assert agent.workflows == {}


def test_a_promised_recovery_is_kept_when_a_new_policy_adds_a_preparation() -> None:
    agent = Agent(a_rule(lead=900.0, prepare=(), recover=("resume",), approve="never"))
    agent.document(an_event())
    assert not is_ready(agent.workflows)
    agent.context = replace(agent.context, document_at=None)  # it restarts under the new policy
    agent.reload(a_rule(prepare=("drain",), recover=("resume",), approve="never"))
    agent.context = replace(agent.context, document_at=agent.context.now)
    assert agent.document() == ["A: recover resume"]


def test_of_many_events_that_end_one_by_one_each_records_its_wait_once() -> None:
    agent = Agent(a_rule(prepare=("drain",), recover=("resume",)))
    events = [an_event(id=f"E{number}") for number in range(20)]
    agent.document(*events)
    for event in events:
        agent.ends("drain", event=event.id)
    for number in range(1, 20):
        agent.document(*events[number:])
    waits = [line for line in agent.journal if line.startswith("waiting: ") and "still needs it" in line]
    assert len(waits) == 19
    assert {wait_text(w) for w in agent.workflows.values() if w.is_over} == {"event E19 still needs it prepared"}


def test_a_long_changed_value_is_cut_in_the_record() -> None:
    agent = Agent()
    agent.document(an_event(description="x" * 4000, resources=("vm_1", *("y" * 900 for _ in range(100)))))
    agent.document(an_event(description="z" * 4000))
    (changed,) = [line for line in agent.journal if line.startswith("changed: ")]
    assert f"description {'x' * 200} (cut) -> {'z' * 200} (cut)" in changed
    assert len(changed) < 1000


def test_recovery_waits_for_the_last_event_and_each_hook_runs_once() -> None:
    agent = Agent(a_rule(prepare=("drain",), recover=("resume", "tell")))
    one, other = an_event(), an_event(id="B", type="Redeploy")
    assert agent.document(one, other) == ["A: prepare drain", "B: prepare drain"]
    agent.ends("drain")
    agent.ends("drain", event="B")
    agent.answer()
    assert agent.document(other) == []
    assert agent.journal[-1] == "waiting: event B still needs it prepared"
    assert agent.document() == ["A: recover resume"]
    assert agent.ends("resume") == ["A: recover tell"]
    assert not is_ready(agent.workflows)
    assert agent.ends("tell") == []
    assert agent.workflows == {}


def test_recovery_does_not_wait_for_an_event_that_shares_no_hook() -> None:
    agent = Agent(
        a_rule(name="quick", when=When(type=("Freeze",)), prepare=("pause",), recover=("go",)),
        a_rule(prepare=("drain",)),
    )
    agent.document(an_event(), an_event(id="B", type="Freeze"))
    agent.ends("drain")
    agent.ends("pause", event="B")
    assert agent.document(an_event(id="B", type="Freeze")) == ["A: recover resume"]


def test_recovery_does_not_wait_for_an_event_that_nothing_is_prepared_for() -> None:
    agent = Agent(a_rule(prepare=("drain",), lead=3600.0))
    far = an_event(id="B", not_before=START + timedelta(days=7))
    agent.document(an_event(), far)
    agent.ends("drain")
    assert agent.document(far) == ["A: recover resume"]


def test_recovery_waits_until_the_last_hook_of_another_canceled_event_has_ended() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event(), an_event(id="B"))
    agent.ends("drain")
    assert agent.document() == ["B: cancel prepare"]
    assert agent.ends("drain", "canceled", event="B") == ["A: recover resume"]
    assert agent.ends("resume") == []
    assert agent.workflows == {}


def test_a_recovery_is_cut_short_by_another_event_and_done_once_for_both_later() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    assert agent.document() == ["A: recover resume"]
    assert agent.document(an_event(id="B")) == ["A: cancel recover"]
    assert agent.ends("resume", "canceled") == ["B: prepare drain"]
    assert agent.ends("drain", event="B") == ["B: approve B"]
    assert agent.document() == ["A: recover resume"]
    agent.ends("resume")
    assert agent.workflows == {}


def while_the_second_of_two_hooks_recovers(**short: Any) -> Agent:
    """A is over, ``uncordon`` has run for it, ``resume`` runs; a Freeze has a rule with these ``short`` values."""
    agent = Agent(
        a_rule(name="short", when=When(type=("Freeze",)), **short),
        a_rule(prepare=("drain",), recover=("uncordon", "resume")),
    )
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    assert agent.ends("uncordon") == ["A: recover resume"]
    return agent


def test_a_recover_hook_runs_again_after_an_event_whose_rule_names_it() -> None:
    agent = while_the_second_of_two_hooks_recovers(prepare=("drain",), recover=("uncordon",))
    assert agent.document(an_event(id="B", type="Freeze")) == ["A: cancel recover"]
    assert agent.ends("resume", "canceled") == ["B: prepare drain"]
    agent.ends("drain", event="B")
    assert agent.document() == ["A: recover uncordon"]
    assert agent.ends("uncordon") == ["A: recover resume"]
    agent.ends("resume")
    assert agent.workflows == {}


@pytest.mark.parametrize("recover", [(), ("resume",), ("uncheck",)])
def test_a_recover_hook_does_not_run_again_after_an_event_whose_rule_does_not_name_it(
    recover: tuple[str, ...],
) -> None:
    agent = while_the_second_of_two_hooks_recovers(prepare=("drain",), recover=recover)
    assert agent.document(an_event(id="B", type="Freeze")) == ["A: cancel recover"]
    assert agent.ends("resume", "canceled") == ["B: prepare drain"]
    agent.ends("drain", event="B")
    assert "A: recover resume" in agent.document()
    agent.ends("resume")
    assert agent.all_of("A") == []


def test_a_hook_that_only_waited_undoes_nothing_that_was_recovered() -> None:
    agent = while_the_second_of_two_hooks_recovers(prepare=("drain",), recover=("uncordon",))
    agent.document(an_event(id="B", type="Freeze"))
    assert agent.ends("resume", "canceled") == ["B: prepare drain"]
    assert agent.document() == ["B: cancel prepare"]
    assert agent.ends("drain", "canceled", event="B", has_run=False) == ["A: recover resume"]


def test_a_drain_alone_undoes_the_recover_hooks_of_its_rule() -> None:
    agent = while_the_second_of_two_hooks_recovers(prepare=(), drain_for=60.0, recover=("uncordon",))
    assert agent.document(an_event(id="B", type="Freeze")) == ["A: cancel recover"]
    agent.ends("resume", "canceled")
    agent.tick(61)
    assert agent.document() == ["A: recover uncordon"]
    assert agent.ends("uncordon") == ["A: recover resume"]


def test_a_drain_that_a_new_policy_begins_undoes_the_recover_hooks_of_its_rule() -> None:
    agent = while_the_second_of_two_hooks_recovers(prepare=("drain",), recover=("uncordon",))
    freeze = an_event(id="B", type="Freeze")
    assert agent.document(freeze) == ["A: cancel recover"]
    short, *rules = agent.context.rules
    agent.reload(replace(short, drain_for=60.0), *rules)
    assert agent.document() == ["B: recover uncordon"]
    assert agent.ends("resume", "canceled") == []
    assert agent.ends("uncordon", event="B") == ["A: recover resume"]


def test_a_hook_that_the_agent_did_not_see_end_undoes_what_was_recovered() -> None:
    agent = while_the_second_of_two_hooks_recovers(prepare=("drain",), recover=("uncordon",))
    agent.document(an_event(id="B", type="Freeze"))
    assert agent.ends("resume", "canceled") == ["B: prepare drain"]
    assert agent.restart("boot 2") == ["A: recover uncordon"]


def test_a_recover_hook_waits_for_an_event_whose_rule_names_a_hook_before_it() -> None:
    """``resume`` may rely on ``uncordon``, which the other preparation undoes."""
    agent = while_the_second_of_two_hooks_recovers(prepare=("pause",), recover=("uncordon",))
    assert agent.document(an_event(id="B", type="Freeze")) == ["A: cancel recover"]
    assert agent.ends("resume", "canceled") == ["B: prepare pause"]
    agent.ends("pause", event="B")
    assert agent.document() == ["A: recover uncordon"]


def test_a_recover_hook_does_not_wait_for_an_event_whose_rule_names_only_a_later_one() -> None:
    freezes = a_rule(name="short", when=When(type=("Freeze",)), prepare=("pause",), recover=("resume",))
    agent = Agent(freezes, a_rule(prepare=("drain",), recover=("uncordon", "resume")))
    freeze = an_event(id="B", type="Freeze")
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    assert agent.document(freeze) == ["B: prepare pause"]
    assert agent.ends("uncordon") == []
    assert agent.wait_message() == "event B still needs it prepared"
    agent.ends("pause", event="B")
    assert agent.document() == ["A: recover resume"]


def test_each_recover_hook_of_three_events_whose_rules_overlap_runs_once() -> None:
    both = {"prepare": ("drain", "checkpoint"), "recover": ("resume", "uncheck")}
    agent = Agent(
        a_rule(name="both", when=When(type=("Redeploy",)), **both),
        a_rule(name="short", when=When(type=("Freeze",)), prepare=("checkpoint",), recover=("uncheck",)),
        a_rule(prepare=("drain",), recover=("resume",)),
    )
    freeze = an_event(id="C", type="Freeze")
    agent.document(an_event(), an_event(id="B", type="Redeploy"), freeze)
    agent.ends("drain")
    agent.ends("drain", event="B")
    agent.ends("checkpoint", event="B")
    assert agent.ends("checkpoint", event="C") == ["C: approve C"]
    assert agent.document(freeze) == ["A: recover resume"]
    assert agent.ends("resume") == []
    assert agent.wait_message("B") == "event C still needs it prepared"
    assert agent.restart("boot 1", freeze) == ["C: approve C"]
    assert agent.document() == ["B: recover uncheck"]
    assert agent.ends("uncheck", event="B") == []
    assert agent.workflows == {}


def test_an_event_goes_on_as_it_was_while_a_hook_runs_that_its_rule_does_not_name() -> None:
    """``load`` of A does not undo what was prepared for B."""
    agent = Agent(
        a_rule(name="b", when=When(type=("Freeze",)), prepare=("pause",), recover=("resume",)),
        a_rule(name="c", when=When(type=("Redeploy",)), prepare=("pause",), recover=()),
        a_rule(prepare=("drain",), recover=("load", "resume")),
    )
    freeze, redeploy = an_event(id="B", type="Freeze"), an_event(id="C", type="Redeploy")
    agent.document(an_event(), freeze, redeploy)
    agent.ends("drain")
    agent.ends("pause", event="B")
    agent.ends("pause", event="C")
    assert agent.document(redeploy) == ["A: recover load"]
    assert "B: prepare pause" not in agent.document(freeze, redeploy)
    assert agent.of("B").phase != "recovering"


def test_a_recovery_is_not_started_when_another_event_begins_in_the_same_moment() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    assert agent.document() == ["A: recover resume"]
    assert agent.restart("boot 2", an_event(id="B")) == ["B: prepare drain"]
    assert [wait_text(w) for w in agent.all_of("A")] == ["event B still needs it prepared"]
    agent.ends("drain", event="B")
    assert agent.document() == ["A: recover resume"]


def test_an_agent_that_acts_again_prepares_before_it_recovers() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.reload(*agent.context.rules, is_acting=False)
    assert agent.document() == []
    assert agent.document(an_event(id="B")) == []
    assert agent.reload(*agent.context.rules, is_acting=True) == ["B: prepare drain"]


def test_a_recovery_whose_last_hook_succeeds_after_its_cancellation_is_over() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    assert agent.document(an_event(id="B")) == ["A: cancel recover"]
    assert agent.ends("resume") == ["B: prepare drain"]
    assert agent.all_of("A") == []


def test_an_event_that_is_over_before_its_first_hook_ran_has_nothing_to_recover() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    agent.document(an_event(id="B"))
    assert agent.document() == []
    assert agent.all_of("B") == []
    assert agent.ends("resume", "canceled") == ["A: recover resume"]


@pytest.mark.parametrize("outcome", ["canceled", "not_started", "succeeded"])
def test_an_event_whose_only_hook_ended_before_its_program_was_started_has_nothing_to_recover(
    outcome: HookOutcome,
) -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    if outcome == "canceled":
        assert agent.document() == ["A: cancel prepare"]
    agent.ends("drain", outcome, has_run=outcome == "succeeded")
    assert agent.document() == (["A: recover resume"] if outcome == "succeeded" else [])
    assert (agent.workflows == {}) == (outcome != "succeeded")


def test_a_hook_that_ended_before_its_program_was_started_leaves_the_one_before_it_to_recover() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain")
    assert agent.document() == ["A: cancel prepare"]
    assert agent.ends("checkpoint", "canceled", has_run=False) == ["A: recover resume"]


@pytest.mark.parametrize("boot", ["boot 1", "boot 2"])
def test_a_drain_is_recovered_though_the_hook_after_it_ended_before_its_program_was_started(boot: str) -> None:
    agent = Agent(a_rule(prepare=("drain",), drain_for=30.0))
    agent.document(an_event())
    assert agent.tick(31) == ["A: prepare drain"]
    agent.ends("drain", "not_started", has_run=False)
    assert agent.phase == "held"
    agent.restart(boot, an_event())
    agent.document()
    agent.document()
    assert [w.recover.current for w in agent.workflows.values()] == ["resume"]


@pytest.mark.parametrize("boot", ["boot 1", "boot 2"])
def test_an_agent_that_was_killed_while_a_hook_waited_recovers(boot: str) -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    assert agent.restart(boot) == ["A: recover resume"]


def test_a_hook_that_gave_way_before_its_program_was_started_runs_later() -> None:
    spot = a_rule(name="spot", when=When(type=("Preempt",)), prepare=("drain",), recover=())
    agent = Agent(spot, a_rule(prepare=("drain",)), serialized=("drain",))
    agent.document(an_event())
    preempt = an_event(id="P", type="Preempt")
    assert agent.document(an_event(), preempt) == ["A: cancel prepare", "P: prepare drain"]
    assert agent.ends("drain", "canceled", has_run=False) == []
    assert "A: prepare drain" in agent.ends("drain", event="P")
    agent.ends("drain")
    assert agent.document(preempt) == []
    assert agent.document() == ["A: recover resume"]


def test_an_eviction_that_comes_back_makes_the_end_of_its_own_old_hook_urgent() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    preempt = an_event(type="Preempt")
    agent.document(preempt)
    assert agent.document() == ["A: cancel prepare"]
    assert urgency(agent) == [False]
    assert agent.document(preempt) == ["A: cancel prepare"]
    assert urgency(agent) == [True]
    assert agent.document(replace(preempt, description="changed")) == []
    assert agent.ends("drain", "canceled") == ["A: prepare drain"]


def test_an_event_that_comes_back_leaves_its_own_old_hook_the_usual_time() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    assert agent.document() == ["A: cancel prepare"]
    assert agent.document(an_event()) == []


def test_an_eviction_makes_the_end_of_a_recovery_urgent_that_is_canceled_already() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    assert agent.document() == ["A: recover resume"]
    other, preempt = an_event(id="B"), an_event(id="P", type="Preempt")
    assert agent.document(other) == ["A: cancel recover"]
    assert urgency(agent) == [False]
    assert agent.document(other, preempt) == ["A: cancel recover"]
    assert urgency(agent) == [True]


@pytest.mark.parametrize("is_over", [True, False])
def test_an_eviction_makes_the_end_of_a_serialized_hook_urgent_that_is_canceled_already(*, is_over: bool) -> None:
    agent = Agent(a_rule(prepare=("drain",)), serialized=("drain",))
    agent.document(an_event())
    left = () if is_over else (started(an_event()),)
    assert agent.document(*left) == ["A: cancel prepare"]
    assert urgency(agent) == [False]
    assert sorted(agent.document(*left, an_event(id="P", type="Preempt"))) == [
        "A: cancel prepare",
        "P: prepare drain",
    ]
    assert urgency(agent) == [True]


def urgency(agent: Agent) -> list[bool]:
    """Whether each of the last cancellations is urgent."""
    effects = [effect for transition in agent.last.transitions for effect in transition.effects]
    return [effect.is_urgent for effect in effects if isinstance(effect, CancelHook)]


def test_two_recoveries_with_the_same_hooks_run_each_once_in_their_order() -> None:
    agent = Agent(
        a_rule(name="other", when=When(type=("Freeze",)), prepare=("drain",), recover=("tell", "resume")),
        a_rule(prepare=("drain",), recover=("resume", "tell")),
    )
    agent.document(an_event(), an_event(id="B", type="Freeze"))
    agent.ends("drain")
    agent.ends("drain", event="B")
    assert agent.document() == ["A: recover resume", "B: recover tell"]
    assert agent.ends("resume") == []
    assert agent.ends("tell", event="B") == []
    assert agent.workflows == {}
    assert "hook_finished: hook resume: has run for another event, once for both" in agent.journal


def test_a_more_urgent_event_is_prepared_for_beside_a_long_preparation() -> None:
    agent = Agent(
        a_rule(name="spot", when=When(type=("Preempt",)), prepare=("save",), recover=()),
        a_rule(prepare=("drain",)),
    )
    agent.document(an_event())
    assert agent.document(an_event(), an_event(id="B", type="Preempt")) == ["B: prepare save"]
    assert agent.ends("save", event="B") == ["B: approve B"]


# --- Approval.


def prepared_agent() -> Agent:
    agent = Agent(Rule(name="user", approve="immediately"))
    assert agent.document(an_event()) == ["A: approve A"]
    return agent


def test_a_failed_approval_is_repeated_with_growing_pauses() -> None:
    agent, event = prepared_agent(), an_event()
    pauses = []
    for _ in range(7):
        agent.answer("server")
        asked_at = agent.context.now
        while agent.document(event) == []:
            pass
        pauses.append((agent.context.now - asked_at).total_seconds())
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert agent.journal[-2:] == [
        "approval_failed: approval failed (server), next try in 30s: went wrong",
        "approving: rule user approves immediately",
    ]
    agent.answer()
    assert agent.phase == "approved"
    assert agent.tick(3600) == []


def test_a_throttled_approval_is_repeated_after_the_pauses_of_the_service() -> None:
    agent, event = prepared_agent(), an_event()
    pauses = []
    for _ in range(6):
        agent.answer("throttled")
        asked_at = agent.context.now
        while agent.document(event) == []:
            pass
        pauses.append((agent.context.now - asked_at).total_seconds())
    assert pauses == [2, 4, 8, 16, 30, 30]


def test_a_failed_approval_is_repeated_only_after_a_fresh_document() -> None:
    agent = prepared_agent()
    agent.answer("timeout")
    assert next_wake_at(agent.workflows, agent.context) == agent.context.now + timedelta(seconds=1)
    assert agent.tick(60) == []
    assert agent.document(an_event()) == ["A: approve A alone"]


def test_an_event_that_started_after_a_failed_approval_is_not_approved_again() -> None:
    agent = prepared_agent()
    agent.answer("timeout")
    assert agent.document(started(an_event()), after=60) == []


def test_a_failed_approval_is_repeated_alone_from_then_on() -> None:
    agent = prepared_agent()
    agent.answer("bad_request")
    assert agent.document(an_event()) == ["A: approve A alone"]
    agent.answer("server")
    assert agent.document(an_event(), after=2) == ["A: approve A alone"]


def test_an_approval_in_flight_is_not_sent_twice() -> None:
    agent = prepared_agent()
    assert agent.tick(60) == []
    assert agent.document(an_event(description="changed")) == []


def test_an_unexpected_approval_answer_is_ignored() -> None:
    agent = prepared_agent()
    agent.answer()
    before = agent.workflows
    assert agent.answer("server") == []
    assert agent.workflows == before


# --- The operator.


def test_an_operator_action_for_an_unknown_event_is_ignored() -> None:
    assert Agent(a_rule()).send(OperatorCommand(workflow_id="nobody", action="approve", user="kim")) == []


def test_an_operator_approves_an_event_without_a_matching_rule() -> None:
    agent = Agent()
    agent.document(an_event())
    assert agent.operator("approve") == ["A: approve A"]
    assert "operator: approved by kim" in agent.journal


def test_an_operator_approval_during_preparation_lets_it_finish_first() -> None:
    agent = Agent(a_rule(lead=900.0, approve="manual", prepare=("drain",)))
    agent.document(an_event())
    assert agent.operator("approve") == []
    assert agent.ends("drain") == ["A: approve A"]


def test_an_operator_approves_a_held_event() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain", "failed")
    assert agent.operator("approve") == ["A: approve A"]


def test_an_operator_approves_for_other_vms() -> None:
    agent = Agent(a_rule(lead=900.0, prepare=("drain",)))
    agent.document(shared_event())
    agent.ends("drain")
    assert agent.operator("approve") == ["A: approve A"]


def test_an_operator_approval_ignores_the_spelling_of_vm_names() -> None:
    agent = Agent(a_rule(approve="manual", prepare=("drain",)))
    agent.document(an_event(resources=("vm_1", "vm_2")))
    agent.operator("approve")
    agent.document(an_event(resources=("VM_1", "_vm_2")))
    assert agent.ends("drain") == ["A: approve A"]


@pytest.mark.parametrize("change", [{"type": "Redeploy"}, {"resources": ("vm_1", "vm_2")}], ids=["type", "VMs"])
def test_an_operators_approval_is_void_when_the_event_changes_before_it_is_sent(
    change: dict[str, Any],
) -> None:
    agent = Agent(a_rule(approve="manual", prepare=("drain",)))
    agent.document(an_event())
    agent.operator("approve")
    agent.document(an_event(**change))
    assert agent.ends("drain") == []
    void = "operator: the operator's approval is void: it was for another type, or for fewer VMs"
    assert void in agent.journal
    assert agent.operator("approve") == ["A: approve A"]
    agent.answer()
    agent.document(an_event(type="Freeze"))
    assert agent.journal.count(void) == 1


@pytest.mark.parametrize("change", [{"not_before": START}, {"resources": ("vm_1",)}, {"description": "soon"}])
def test_an_operators_approval_holds_for_another_time_or_fewer_vms(
    change: dict[str, Any],
) -> None:
    agent = Agent(a_rule(approve="manual", prepare=("drain",), shared="any"))
    agent.document(shared_event())
    agent.operator("approve")
    agent.document(replace(shared_event(), **change))
    assert agent.ends("drain") == ["A: approve A"]


def test_an_operator_holds_an_event_whose_approval_failed() -> None:
    agent = prepared_agent()
    agent.answer("server")
    agent.operator("hold")
    assert agent.document(an_event(), after=60) == []
    assert agent.phase == "held"
    assert agent.operator("release") == ["A: approve A alone"]


def test_a_hold_cannot_withdraw_an_approval_that_azure_has_accepted() -> None:
    agent = prepared_agent()
    agent.operator("hold")
    assert agent.phase == "held"
    assert agent.answer() == []
    assert agent.phase == "approved"


@pytest.mark.parametrize("action", ["approve", "hold", "release"])
def test_an_operator_changes_nothing_once_the_event_has_started_or_is_over(action: OperatorAction) -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    agent.document(started(an_event()))
    assert agent.operator(action) == []
    agent.document()
    assert agent.operator(action) == []
    agent.ends("resume")
    assert agent.workflows == {}


# --- The state was lost.


@pytest.mark.parametrize("kind", ["LiveMigration", ""])
def test_an_event_of_unknown_type_is_prepared_for_but_not_approved(kind: str) -> None:
    agent = Agent(a_rule(lead=900.0, prepare=("drain",)))
    assert agent.document(an_event(type=kind)) == ["A: prepare drain"]
    assert agent.ends("drain") == []
    assert agent.phase == "held"
    assert agent.operator("approve") == ["A: approve A"]


@pytest.mark.parametrize("status", ["", "Paused"])
def test_an_event_of_another_status_is_not_approved_even_by_an_operator(status: str) -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    assert agent.document(an_event(status=status)) == []
    assert agent.operator("approve") == []
    assert agent.wait_message() == (
        f"only a scheduled event can be approved, and its status is {status or 'missing'}"
    )
    assert agent.document(an_event()) == ["A: approve A"]


def test_an_event_without_an_id_is_not_approved_even_by_an_operator() -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    assert agent.document(an_event(id="")) == []
    assert agent.operator("approve", event="") == []
    assert agent.wait_message("") == "it has no id to approve"


def test_an_id_that_cannot_be_sent_back_is_not_approved_even_by_an_operator() -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    assert agent.document(an_event(id_error="it is not a text")) == []
    assert agent.operator("approve") == []
    assert agent.wait_message() == "its id cannot be sent back exactly (it is not a text)"


def test_a_contradictory_event_is_prepared_and_left_to_an_operator() -> None:
    agent = Agent(a_rule(lead=900.0, prepare=("drain",), recover=("resume",)))
    event = an_event(is_ambiguous=True)
    assert agent.document(event) == ["A: prepare drain"]
    assert agent.ends("drain") == []
    assert agent.of().phase == "held"
    assert "only an operator may approve it" in agent.wait_message()
    assert agent.operator("approve") == ["A: approve A"]


def test_an_operators_approval_is_void_when_the_document_contradicts_itself() -> None:
    agent = Agent(a_rule(approve="manual", prepare=("drain",)))
    agent.document(an_event())
    agent.operator("approve")
    agent.document(an_event(is_ambiguous=True))
    assert agent.ends("drain") == []
    assert "operator: the operator's approval is void: the document contradicts itself now" in agent.journal


def test_an_approval_sends_back_the_received_id() -> None:
    agent = Agent(Rule(name="user", approve="immediately"))
    assert agent.document(an_event(received_id="a\n")) == ["A: approve a\n"]


def test_events_found_after_a_lost_state_are_not_approved_without_an_operator() -> None:
    agent = Agent(a_rule(prepare=("drain",)), is_state_lost=True)
    assert agent.document(an_event()) == ["A: prepare drain"]
    assert agent.ends("drain") == []
    assert agent.wait_message() == "the state file was lost, and what was done before is not known"
    agent.context = replace(agent.context, is_state_lost=False)
    assert agent.document(an_event(), an_event(id="B")) == ["B: prepare drain"]
    assert agent.restart("boot 1", an_event(), an_event(id="B")) == ["B: prepare drain"]
    assert agent.ends("drain", event="B") == ["B: approve B"]
    assert agent.operator("approve") == ["A: approve A"]


def test_an_event_found_started_after_the_state_was_lost_is_recovered_from() -> None:
    agent, event = Agent(a_rule(prepare=("drain",), recover=("resume",)), is_state_lost=True), an_event()
    assert agent.document(started(event)) == []
    assert agent.document() == ["A: recover resume"]
    assert not is_ready(agent.workflows)
    assert agent.ends("resume") == []
    assert agent.workflows == {}


def test_an_event_is_recovered_if_it_ends_before_the_name_is_known() -> None:
    agent = Agent(a_rule(prepare=("drain",), recover=("resume",)), is_state_lost=True)
    names, agent.context = agent.context.names, replace(agent.context, names=())
    assert agent.document(started(an_event())) == []
    agent.context = replace(agent.context, names=names)
    assert agent.send(PolicyChanged(), Gone("a")) == ["A: recover resume"]


def test_an_event_first_seen_started_is_not_recovered_if_the_state_is_whole() -> None:
    agent, event = Agent(a_rule(prepare=("drain",), recover=("resume",))), an_event()
    assert agent.document(started(event)) == []
    assert agent.document() == []
    assert agent.workflows == {}


def test_an_observing_agent_runs_nothing_and_approves_nothing() -> None:
    agent, event = Agent(a_rule(on_start=("tell",)), is_acting=False), an_event()
    assert agent.document(event) == []
    assert agent.operator("approve") == []
    assert evaluate_approval_gates(agent.of(), agent.context).verdict == "wait"
    assert is_ready(agent.workflows)
    assert agent.document(started(event)) == []
    assert agent.document() == []
    assert agent.workflows == {}


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ({}, "now run drain, then approve it, then run resume when it is over"),
        ({"prepare": (), "recover": (), "approve": "immediately"}, "now approve it at once"),
        (
            {"recover": (), "drain_for": 60.0, "approve": "immediately", "on_start": ("tell",)},
            (
                "now approve it at once, then answer /readyz with 503 for 1m, then run drain, "
                "then run tell when it has started"
            ),
        ),
        (
            {"recover": (), "approve": "manual"},
            (
                "begin at 2026-03-02 12:10:00 UTC: an operator must approve it, and preparation may take 5m; "
                "it would run drain, then wait for an operator to approve it"
            ),
        ),
        (
            {"recover": (), "approve": "never", "lead": 900.0},
            "now run drain, then not approve it (approve is never (rule impactful matches it: affects self))",
        ),
        (
            {"recover": (), "drain_for": 14 * 86400.0, "approve": "immediately"},
            "now approve it at once, then answer /readyz with 503 for 14d, then run drain",
        ),
        (
            {"recover": (), "lead": 60.0},
            "begin at 2026-03-02 12:14:00 UTC: lead 1m; it would run drain, then approve it",
        ),
    ],
)
def test_an_observing_agent_records_its_planned_actions(rule: dict[str, Any], plan: str) -> None:
    agent = Agent(a_rule(**{"prepare": ("drain",), **rule}), is_acting=False)
    agent.document(an_event())
    assert agent.wait_message() == f"the agent only observes; it would {plan}"
    agent.tick()
    assert [line for line in agent.journal if line.startswith("waiting")] == [f"waiting: {agent.wait_message()}"]


def test_an_observing_agent_records_its_new_plan_when_the_policy_changes() -> None:
    agent = Agent(a_rule(prepare=("drain",)), is_acting=False)
    agent.document(an_event())
    agent.journal.clear()
    agent.reload(a_rule(prepare=("drain", "save")), is_acting=False)
    plan = "it would now run drain, save, then approve it, then run resume when it is over"
    assert agent.journal[1:] == [f"waiting: the agent only observes; {plan}"]
    agent.reload(a_rule(prepare=("drain", "save")), is_acting=False)
    assert len(agent.journal) == 2


def test_an_observing_agent_records_its_start_time_and_its_plan_after_the_start() -> None:
    agent, event = Agent(a_rule(lead=60.0, recover=(), on_start=("tell",)), is_acting=False), an_event()
    agent.document(event)
    agent.tick(14 * 60)
    assert "it would now run drain" in agent.wait_message()
    agent.document(started(event))
    assert agent.wait_message() == "the agent only observes; it would now run tell"


@pytest.mark.parametrize("early_start", ["cancel", "finish"])
def test_an_agent_set_to_observe_during_an_event_starts_no_hook_and_recovers_later(early_start: Any) -> None:
    agent, event = Agent(a_rule(on_early_start=early_start)), an_event()
    agent.document(event)
    agent.reload(*agent.context.rules, is_acting=False)
    agent.ends("drain")
    assert agent.document(started(event)) == []
    assert agent.document() == []
    assert (agent.phase, agent.wait_message()) == ("recovering", "the agent only observes")
    assert not is_ready(agent.workflows)
    assert agent.reload(*agent.context.rules, is_acting=True) == ["A: recover resume"]


# --- Restarts.


def test_nothing_acts_after_a_restart_before_the_first_document() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain")
    agent.restart(document=False)
    assert agent.tick(60) == []
    assert agent.operator("approve") == []
    assert agent.reload(a_rule(approve="immediately")) == []
    assert not is_ready(agent.workflows)
    assert agent.document(an_event()) == ["A: prepare checkpoint", "A: approve A"]


def test_after_a_restart_the_hook_in_flight_runs_again_and_those_before_do_not() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain")
    assert agent.restart("boot 1", an_event()) == ["A: prepare checkpoint"]
    assert agent.journal[-2:] == [
        "restarted: the agent restarted (the same boot) in phase preparing",
        "hook_started: hook checkpoint starts",
    ]
    assert agent.ends("checkpoint") == ["A: approve A"]


def test_the_late_end_of_a_hook_that_ran_before_the_restart_is_ignored() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    late = HookFinished(workflow_id=agent.of().id, stage="prepare", hook="drain", run=1, outcome="failed")
    agent.restart(document=False)
    assert agent.send(late) == []
    assert agent.document(an_event()) == ["A: prepare drain"]
    assert agent.send(late) == []
    assert agent.ends("drain") == ["A: approve A"]


def test_an_approval_without_an_answer_is_sent_again_after_a_restart() -> None:
    agent = prepared_agent()
    assert agent.restart("boot 1", an_event()) == ["A: approve A"]


def test_a_confirmed_approval_is_not_sent_again_after_a_restart() -> None:
    agent = prepared_agent()
    agent.answer()
    assert agent.restart("boot 1", an_event()) == []
    assert agent.phase == "approved"


def test_a_held_event_is_still_held_after_a_restart() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.ends("drain", "failed")
    assert agent.restart("boot 1", an_event()) == []
    assert agent.phase == "held"


def test_an_operator_action_survives_a_restart() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.operator("hold")
    assert agent.restart("boot 1", an_event()) == []
    assert agent.phase == "held"


def test_after_its_own_reboot_the_agent_neither_prepares_again_nor_approves() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    assert agent.restart("boot 2", started(an_event())) == []
    assert agent.document() == ["A: recover resume"]


def test_an_event_that_is_over_after_its_reboot_is_recovered_as_completed() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.ends("drain")
    agent.answer()
    assert agent.restart("boot 2") == ["A: recover resume"]
    assert agent.of().outcome == "completed"
    assert "restarted: the agent restarted (after a reboot) in phase approved" in agent.journal


def test_a_preparation_cut_by_a_reboot_ends_once_the_event_has_started() -> None:
    agent = Agent(a_rule(on_early_start="finish"))
    agent.document(an_event())
    assert agent.restart("boot 2", started(an_event())) == []
    assert agent.of().prepare.state == "canceled"
    assert agent.document() == ["A: recover resume"]


def test_a_preparation_that_may_finish_does_so_after_a_restart_of_the_agent_alone() -> None:
    agent = Agent(a_rule(on_early_start="finish"))
    agent.document(an_event())
    assert agent.restart("boot 1", started(an_event())) == ["A: prepare drain"]


def test_a_cancellation_survives_a_restart() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    agent.document(started(an_event()))
    assert agent.restart("boot 1", started(an_event())) == []
    assert agent.of().prepare.state == "canceled"


def test_an_interrupted_recovery_goes_on_after_a_restart() -> None:
    agent = Agent(a_rule(prepare=("drain",), recover=("resume", "tell")))
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    agent.ends("resume")
    assert agent.restart("boot 2") == ["A: recover tell"]
    agent.ends("tell")
    assert agent.workflows == {}


def test_a_waiting_event_still_waits_after_a_restart() -> None:
    agent = Agent(a_rule(lead=60.0))
    agent.document(an_event())
    assert agent.restart("boot 1", an_event()) == []
    assert agent.phase == "waiting"


def test_a_drain_is_not_begun_again_by_a_restart() -> None:
    agent = Agent(a_rule(drain_for=30.0))
    agent.document(an_event())
    until = agent.of().drain_until
    agent.restart("boot 1", an_event())
    assert agent.of().drain_until == until


def test_on_start_hooks_that_were_interrupted_run_again() -> None:
    agent, event = Agent(a_rule(on_start=("tell",))), started(an_event())
    agent.document(event)
    assert agent.restart("boot 1", event) == ["A: on_start tell"]


# --- Everything else.


def test_a_bug_in_one_workflow_leaves_it_where_it_was_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.may_fail = True
    agent.document(an_event(), an_event(id="B"))
    real = phases._end_preparation

    def broken(workflow: Workflow) -> Transition:
        if workflow.event.id == "A":
            raise ZeroDivisionError("a bug")
        return real(workflow)

    monkeypatch.setattr(phases, "_end_preparation", broken)
    assert agent.ends("drain") == []
    ((workflow_id, fault),) = agent.last.errors
    assert (workflow_id, str(fault)) == (agent.of("A").id, "a bug")
    assert agent.ends("drain", event="B") == ["B: approve B"]
    monkeypatch.undo()
    assert agent.tick() == ["A: approve A"]


def test_a_transition_that_is_not_allowed_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOWED_TRANSITIONS, "waiting", frozenset({"closed"}))
    agent = Agent(a_rule())
    agent.may_fail = True
    assert agent.document(an_event()) == []
    ((_, fault),) = agent.last.errors
    assert str(fault) == "waiting -> preparing is not an allowed transition"
    assert agent.phase == "waiting"


@pytest.mark.parametrize("approve", ["never", "manual", "when-prepared"])
def test_an_approval_that_the_gates_do_not_allow_is_a_bug_and_is_not_sent(
    approve: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(workflow: Workflow, _: Any, context: Context) -> Transition | None:
        return approval.request_approval(workflow, context) if workflow.event.id == "A" else None

    agent = Agent(a_rule(approve=approve, prepare=("drain",), lead=3600.0))
    agent.may_fail = True
    agent.document(an_event(), an_event(id="B"))
    before = agent.of("A")
    monkeypatch.setitem(phases._PHASES, "preparing", hasty)
    assert agent.tick() == []
    ((workflow_id, bug),) = agent.last.errors
    assert (workflow_id, agent.of("A")) == (before.id, before)
    assert str(bug) == "it was to be approved although its gates do not allow that"
    monkeypatch.undo()
    agent.ends("drain")
    assert agent.last.errors == ()


def test_a_recovery_without_a_preparation_is_a_bug_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(a_rule(lead=60.0))
    agent.may_fail = True
    agent.document(an_event())
    agent.operator("hold")
    assert (agent.phase, agent.of().prepare.state) == ("held", "idle")
    monkeypatch.setattr(phases, "_over", lambda workflow, *_: phases._recover(workflow, "begins"))
    assert agent.document() == []
    ((workflow_id, bug),) = agent.last.errors
    assert workflow_id == agent.of().id
    assert str(bug) == "it was to be recovered from although nothing was prepared for it"


def test_an_endless_loop_of_transitions_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def restless(workflow: Workflow, *_: Any) -> Transition:
        return Transition(workflow=replace(workflow, handling_since=(workflow.handling_since or START) + NOTICE))

    monkeypatch.setattr(advance_module, "next_transition", restless)
    agent = Agent(a_rule())
    agent.may_fail = True
    agent.document(an_event())
    ((_, fault),) = agent.last.errors
    assert str(fault) == "workflows do not stop moving: ['a@20260302T120001.000000Z']"


@pytest.mark.parametrize(
    ("left", "expected"),
    [(900, 895), (7, 2), (6, 6), (2, 2), (1, None), (0, None), (-100, None)],
)
def test_prepare_hooks_end_before_not_before_less_the_reserve(left: int, expected: int | None) -> None:
    agent = Agent(a_rule())
    agent.document(an_event(not_before=START + timedelta(seconds=left)), after=0)
    deadline_at = hook_deadline_at(agent.of(), "prepare", 5.0, START)
    assert deadline_at == (None if expected is None else START + timedelta(seconds=expected))


def test_only_prepare_hooks_of_an_event_with_a_time_have_a_deadline() -> None:
    agent = Agent(a_rule())
    agent.document(an_event())
    assert hook_deadline_at(agent.of(), "recover", 5.0, START) is None
    assert hook_deadline_at(agent.of(), "on_start", 5.0, START) is None
    for not_before in (None, datetime(1, 1, 1, tzinfo=UTC)):
        agent.document(an_event(not_before=not_before))
        assert hook_deadline_at(agent.of(), "prepare", 5.0, START) is None


def test_time_wakes_no_workflow_that_waits_for_another_reason() -> None:
    agent = Agent(a_rule())
    assert next_wake_at({}, agent.context) is None
    agent.document(an_event())
    assert next_wake_at(agent.workflows, agent.context) is None


def test_a_thousand_events_of_other_vms_cost_one_check_each(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = 0
    real = phases.next_transition

    def counted(*arguments: Any) -> Transition | WaitReason | None:
        nonlocal moves
        moves += 1
        return real(*arguments)

    monkeypatch.setattr(advance_module, "next_transition", counted)
    # The second rule takes none of them, but has them followed.
    agent = Agent(a_rule(), a_rule(name="others", when=When(affects=("others",), type=("Freeze",))))
    foreign = tuple(an_event(id=f"F{number}", resources=(f"vm_{number + 2}",)) for number in range(1000))
    assert agent.document(*foreign) == []
    assert moves == 1000
    assert agent.document(*foreign, an_event()) == ["A: prepare drain"]
    assert moves <= 1000 + 4 * 1001
