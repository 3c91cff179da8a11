"""The one view of an event that all output shares, through the lives of events."""

from datetime import datetime, timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from status_samples import APPROVED_BY_KIM, HELD_BY_KIM, NOW, a_workflow, some_facts
from test_recommendations import a_recommendation, advice
from test_workflow import NOTICE, START, Agent, a_rule, an_event, started

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Rule, When
from scheduled_events_agent.status import CommandOptions, EventView, HookView, JournalRecord, SuggestedCommand, Vm
from scheduled_events_agent.status.events import WAITS, event_view, to_status, with_output
from scheduled_events_agent.status.facts import Facts, History, RunningHook
from scheduled_events_agent.status.history import to_journal
from scheduled_events_agent.status.messages import wait_message
from scheduled_events_agent.status.status import ApprovalView, OperatorView, Waits, WaitsFor
from scheduled_events_agent.workflow import (
    HookFinished,
    Signal,
    Stage,
    StageStatus,
    WaitKind,
    WaitReason,
    Workflow,
    is_ready,
)

SECOND = timedelta(seconds=1)
RULE = a_rule(on_start=("announce",))


class Shown(Agent):
    """Workflows whose events are shown after each move."""

    def facts(self, **changes: Any) -> Facts:
        mode = "act" if self.context.is_acting else "observe"
        vm = Vm(names=self.context.names, vm_id="id")
        workflows = tuple(self.workflows.values())
        return some_facts(**{"at": self.context.now, "mode": mode, "vm": vm, "workflows": workflows, **changes})

    def send(self, *signals: Signal) -> list[str]:
        effects = super().send(*signals)
        events = to_status(self.facts()).events
        assert sorted(event.key for event in events) == sorted(self.workflows)
        assert is_ready(self.workflows) == all(event.ready for event in events)
        return effects

    def view(self, event: str = "A", **changes: Any) -> EventView:
        (found,) = [view for view in to_status(self.facts(**changes)).events if view.id == event]
        return found

    def last_view(self) -> EventView:
        """The event that has just been closed."""
        (closed,) = [step.workflow for step in self.last.transitions if step.workflow.phase == "closed"]
        return event_view(closed, self.facts())

    def running(self, hook: str, **fields: Any) -> RunningHook:
        given = {"workflow_id": self.of().id, "stage": "prepare", "hook": hook, "since": self.context.now}
        return RunningHook(**{**given, **fields})


def an_agent(rule: Rule = RULE, event: ScheduledEvent | None = None, **context: Any) -> Shown:
    """It has seen an event."""
    agent = Shown(rule, **context)
    agent.document(event or an_event())
    return agent


def prepared(rule: Rule = RULE) -> Shown:
    agent = an_agent(rule)
    for hook in rule.prepare:
        agent.ends(hook)
    return agent


def hooks(view: EventView) -> list[str]:
    return [f"{hook.hook} {hook.state}" for hook in view.hooks]


def failures(view: EventView) -> list[str]:
    return [hook.failure for hook in view.hooks if hook.failure]


def commands(view: EventView) -> list[str]:
    return [one.command.removeprefix("scheduled-events-agent ") for one in view.commands]


# --- before it begins


def test_an_event_at_first_sight_says_what_azure_says_and_what_is_to_come() -> None:
    event = an_event(resources=("vm_1", "vm_2"), duration_seconds=9.0, description="Host maintenance.")
    agent = an_agent(a_rule(on_start=("announce",), approve="manual", lead=600.0), event)
    seen_at = START + SECOND
    begins_at = START + timedelta(minutes=5)
    text = "begins at 12:05:00 UTC (in 4m 59s): lead 10m"
    assert agent.view() == EventView(
        key="a@20260302T120001.000000Z",
        id="A",
        type="Reboot",
        status="Scheduled",
        source="Platform",
        resources=("vm_1", "vm_2"),
        not_before=START + NOTICE,
        duration_seconds=9.0,
        description="Host maintenance.",
        seen_at=seen_at,
        rule="impactful",
        reason="rule impactful matches it: affects shared",
        affects="shared",
        phase="waiting",
        phase_since=seen_at,
        outcome="",
        ready=True,
        approval=ApprovalView(wanted="manual", state="none", failures=0, last_error="", text="by an operator"),
        hooks=(
            HookView(stage="prepare", hook="drain", state="open"),
            HookView(stage="prepare", hook="checkpoint", state="open"),
            HookView(stage="on_start", hook="announce", state="open"),
            HookView(stage="recover", hook="resume", state="open"),
        ),
        waits_for=WaitsFor(kind="time", until=begins_at, text=text),
        operator=OperatorView(action="", by="", at=None),
        activity=f"waits: {text}",
        commands=(
            SuggestedCommand(
                command="scheduled-events-agent approve A",
                effect="let Azure start it when it is prepared, on all 2 VMs that it names",
            ),
            SuggestedCommand(command="scheduled-events-agent hold A", effect="do not approve it"),
        ),
    )


def test_the_phase_has_lasted_since_the_event_was_first_seen_if_it_has_never_changed() -> None:
    view = event_view(a_workflow(first_seen_at=NOW - SECOND, phase_since=None), some_facts())
    assert (view.phase, view.phase_since, view.seen_at) == ("waiting", NOW - SECOND, NOW - SECOND)
    held = event_view(a_workflow(first_seen_at=NOW - SECOND, phase="held", phase_since=NOW), some_facts())
    assert (held.phase_since, held.seen_at) == (NOW, NOW - SECOND)


def test_an_event_that_no_rule_matches_is_only_observed() -> None:
    view = an_agent(a_rule(when=When(type=("Freeze",)))).view()
    assert (view.rule, view.reason) == (None, "no rule matches it: observe")
    assert (view.approval.wanted, view.approval.text) == ("never", "none: the event is only observed")
    assert (view.hooks, view.waits_for, view.activity, view.ready) == ((), None, "only observed", True)


def test_an_event_of_another_vm_is_not_approved_and_no_command_changes_that() -> None:
    rule = a_rule(when=When(affects=("others",)), prepare=("drain",), lead=NOTICE.total_seconds())
    agent = an_agent(rule, an_event(resources=("vm_2",)))
    view = agent.view()
    assert (view.affects, view.rule, view.resources) == ("others", "impactful", ("vm_2",))
    assert (view.phase, view.ready, view.commands) == ("preparing", False, ())
    agent.ends("drain")
    view = agent.view()
    assert view.waits_for == WaitsFor(kind="vm", until=None, text="it does not name this VM")
    assert (view.approval.text, view.commands) == ("not by this VM, which it does not name", ())


def test_an_event_is_shown_though_nothing_says_whether_it_names_this_vm() -> None:
    view = an_agent(names=()).view()
    assert (view.affects, view.rule, view.ready, view.commands) == ("unknown", None, True, ())
    assert view.approval.text == "not before it is known whether it names this VM"
    assert view.waits_for == WaitsFor(kind="vm", until=None, text="nothing says whether it names this VM")
    assert view.activity == "waits: nothing says whether it names this VM"


def test_an_agent_that_only_observes_says_what_it_would_do() -> None:
    agent = an_agent(is_acting=False)
    view = agent.view()
    plan = "run drain, checkpoint, then approve it, then run announce when it has started"
    text = f"the agent only observes; it would now {plan}, then run resume when it is over"
    assert view.waits_for == WaitsFor(kind="mode", until=None, text=text)
    assert (view.activity, view.ready) == (f"waits: {text}", True)
    assert view.approval.wanted == "when-prepared"
    assert view.approval.text == "none: the agent only observes; it would be by itself, when prepared"
    assert hooks(view) == ["drain open", "checkpoint open", "announce open", "resume open"]
    assert view.commands == ()


# --- while it is prepared for


def test_a_drain_says_until_when_and_is_over_when_the_hooks_run() -> None:
    agent = an_agent(a_rule(drain_for=30.0))
    view = agent.view()
    assert (view.phase, view.phase_since, view.ready) == ("preparing", START + SECOND, False)
    assert view.waits_for is not None
    assert (view.waits_for.kind, view.waits_for.until) == ("drain", START + 31 * SECOND)
    assert view.activity == "drains for 30s more (/readyz answers 503)"
    assert hooks(view) == ["drain open", "checkpoint open", "resume open"]
    agent.tick(30)
    view = agent.view()
    assert (view.phase, view.waits_for, view.ready) == ("preparing", None, False)
    assert hooks(view) == ["drain running", "checkpoint open", "resume open"]


def test_a_hook_that_runs_says_since_when_and_until_when() -> None:
    agent = an_agent()
    since = agent.context.now
    agent.wait(72)
    limited = agent.running("drain", since=since, limit_seconds=120.0)
    view = agent.view(running=(limited,))
    assert view.hooks[0] == HookView(
        stage="prepare", hook="drain", state="running", since=since, until=since + timedelta(minutes=2)
    )
    assert view.hooks[1] == HookView(stage="prepare", hook="checkpoint", state="open")
    assert view.activity == "runs the prepare hook drain, 1m 12s of at most 2m"
    (first, *_) = agent.view(running=(replace(limited, limit_seconds=None),)).hooks
    assert (first.state, first.since, first.until) == ("running", since, None)


def test_a_hook_that_waits_for_another_run_of_itself_is_queued() -> None:
    agent = an_agent()
    since = agent.context.now
    view = agent.view(running=(agent.running("drain", state="queued"),))
    assert view.hooks[0] == HookView(stage="prepare", hook="drain", state="queued", since=since)
    text = "waits for another run of hook drain"
    assert view.activity == text
    assert view.waits_for == WaitsFor(kind="hook", until=None, text=text)


def test_without_an_agent_that_answers_it_is_known_which_hook_ran_and_no_command_is_offered() -> None:
    view = an_agent().view(source="state_file", mode=None)
    assert view.hooks[0] == HookView(stage="prepare", hook="drain", state="running")
    assert (view.activity, view.commands) == ("preparing", ())


def test_the_run_of_a_hook_is_shown_with_its_own_event_and_stage() -> None:
    agent = an_agent(a_rule(prepare=("tell",), on_start=("tell",), recover=("tell",)))
    agent.document(an_event(), an_event(id="B"))
    of_a = agent.running("tell", limit_seconds=60.0)
    of_no_event = agent.running("tell", workflow_id="", stage="on_clear", since=START, limit_seconds=5.0)
    given: dict[str, Any] = {"running": (of_a, of_no_event)}
    assert [hook.until for hook in agent.view(**given).hooks] == [agent.context.now + 60 * SECOND, None, None]
    assert [(hook.state, hook.until) for hook in agent.view("B", **given).hooks] == [
        ("running", None), ("open", None), ("open", None),
    ]  # fmt: skip
    agent.ends("tell")
    agent.answer()
    agent.document(started(an_event()))
    at_start = agent.running("tell", stage="on_start", limit_seconds=30.0)
    assert [(hook.state, hook.until) for hook in agent.view(running=(at_start,)).hooks] == [
        ("done", None), ("running", agent.context.now + 30 * SECOND), ("open", None),
    ]  # fmt: skip
    status = to_status(agent.facts(**given))
    assert status.on_clear == (
        HookView(stage="on_clear", hook="tell", state="running", since=START, until=START + 5 * SECOND),
    )


def test_a_failed_preparation_names_the_hook_until_it_is_tried_again() -> None:
    agent = an_agent()
    agent.ends("drain")
    agent.ends("checkpoint", "failed")
    view = agent.view()
    assert (view.phase, view.phase_since, view.ready) == ("held", agent.context.now, False)
    assert hooks(view) == ["drain done", "checkpoint failed", "announce open", "resume open"]
    assert failures(view) == ["hook checkpoint: exit code 1"]
    assert view.waits_for == WaitsFor(kind="operator", until=None, text="hook checkpoint: exit code 1")
    assert view.activity.startswith("held: hook checkpoint: exit code 1; Azure starts it at 12:15:00 UTC")
    assert view.approval.text == "not by itself: Azure starts it at 12:15:00 UTC"
    assert [(one.command.split()[1], one.effect) for one in view.commands] == [
        ("retry", "run checkpoint again, then the rest"),
        ("approve", "let Azure start it as it is"),
    ]
    agent.operator("retry")
    view = agent.view()
    assert hooks(view) == ["drain done", "checkpoint running", "announce open", "resume open"]
    assert (view.phase, failures(view), view.waits_for) == ("preparing", [], None)


def fails_unrequired(agent: Shown, stage: Stage, hook: str) -> None:
    progress = agent.of().stage_status(stage)
    assert progress.current == hook
    agent.send(
        HookFinished(
            workflow_id=agent.of().id,
            stage=stage,
            hook=hook,
            run=progress.run,
            outcome="timed_out",
            is_required=False,
        )
    )


def test_a_hook_that_failed_and_is_not_required_is_no_hook_that_is_done() -> None:
    agent = an_agent()
    fails_unrequired(agent, "prepare", "drain")
    view = agent.view()
    assert hooks(view) == ["drain failed", "checkpoint running", "announce open", "resume open"]
    assert failures(view) == ["hook drain: timed_out"]
    agent.ends("checkpoint")
    view = agent.view()
    assert (view.phase, view.approval.state) == ("prepared", "requested")
    assert hooks(view) == ["drain failed", "checkpoint done", "announce open", "resume open"]
    assert failures(view) == ["hook drain: timed_out"]


def test_a_failure_that_ends_the_stage_stands_beside_one_that_does_not() -> None:
    agent = an_agent()
    fails_unrequired(agent, "prepare", "drain")
    agent.ends("checkpoint", "failed")
    view = agent.view()
    assert hooks(view) == ["drain failed", "checkpoint failed", "announce open", "resume open"]
    assert failures(view) == ["hook drain: timed_out", "hook checkpoint: exit code 1"]
    assert commands(view) == ["retry A", "approve A"]
    assert view.commands[0].effect == "run checkpoint again, then the rest"


def test_each_hook_that_failed_at_the_start_of_the_event_is_shown_as_failed() -> None:
    agent = an_agent(a_rule(prepare=(), on_start=("announce", "tell", "note")), started(an_event()))
    agent.ends("announce", "failed")
    agent.ends("tell", "failed")
    agent.ends("note")
    view = agent.view()
    assert hooks(view) == ["announce failed", "tell failed", "note done", "resume open"]
    assert failures(view) == ["hook announce: exit code 1", "hook tell: exit code 1"]


# --- the approval, and the operator


def test_the_approval_goes_from_asked_for_to_accepted() -> None:
    agent = prepared()
    view = agent.view()
    assert (view.phase, view.waits_for, view.activity) == ("prepared", None, "asks Azure to start it")
    assert view.approval == ApprovalView(
        wanted="when-prepared", state="requested", failures=0, last_error="", text="Azure is being asked"
    )
    agent.answer("server")
    failing = agent.view()
    assert failing.approval == ApprovalView(
        wanted="when-prepared",
        state="none",
        failures=1,
        last_error="went wrong",
        text="1 failed so far; the agent tries again",
    )
    assert failing.activity == "asks Azure to start it; 1 try failed"
    agent.document(an_event(), after=60)
    agent.answer()
    view = agent.view()
    assert (view.phase, view.activity) == ("approved", "approved; the event is Azure's to start")
    assert view.approval == ApprovalView(
        wanted="when-prepared", state="confirmed", failures=0, last_error="", text="Azure has accepted it"
    )
    assert (view.ready, view.commands) == (False, ())


def test_an_approval_that_failed_is_tried_again_only_before_the_event_starts_and_while_it_is_not_held() -> None:
    agent = prepared()
    agent.answer("server")
    agent.operator("hold")
    view = agent.view()
    assert view.approval.text == "not by itself: Azure starts it at 12:15:00 UTC"
    assert (view.approval.failures, view.approval.last_error) == (1, "went wrong")
    agent.operator("release")
    assert agent.view().approval.text == "1 failed so far; the agent tries again"
    agent.document()
    view = agent.view()
    assert (view.phase, view.approval.text) == ("recovering", "1 failed, and none is known to be accepted")
    assert event_view(agent.of(), agent.facts()).activity == "recovering"


def test_a_hold_of_an_event_whose_approval_is_under_way_is_the_reason_why_it_waits() -> None:
    agent = prepared()
    agent.operator("hold")
    for _ in range(2):
        view = agent.view()
        assert (view.phase, view.approval.state) == ("held", "requested")
        assert view.waits_for == WaitsFor(kind="operator", until=None, text="an operator holds it")
        assert view.activity == "held: an operator holds it; Azure starts it at 12:15:00 UTC"
        assert to_status(agent.facts()).headline == "Reboot is held: an operator holds it"
        agent.tick(0)
    assert [line for line in agent.journal if "an operator holds it" in line] == [
        "held: held: an operator holds it; Azure starts it at 2026-03-02 12:15:00 UTC"
    ]


def test_an_operators_decision_says_who_made_it_and_when_until_it_is_taken_back() -> None:
    agent = an_agent(a_rule(prepare=(), approve="manual", lead=3600.0))
    view = agent.view()
    assert view.waits_for == WaitsFor(kind="operator", until=None, text="an operator must approve it")
    assert commands(view) == ["approve A", "hold A"]
    agent.tick(10)
    agent.operator("hold")
    held_at = agent.context.now
    agent.tick(10)
    view = agent.view()
    assert view.operator == OperatorView(action="hold", by="kim", at=held_at)
    assert view.waits_for == WaitsFor(kind="operator", until=None, text="an operator holds it")
    assert view.approval.text == "not by itself: Azure starts it at 12:15:00 UTC"
    assert commands(view) == ["release A", "approve A"]
    agent.operator("release")
    assert agent.view().operator == OperatorView()
    agent.tick(10)
    agent.operator("approve")
    view = agent.view()
    assert view.operator == OperatorView(action="approve", by="kim", at=agent.context.now)
    assert view.approval.text == "Azure is being asked"


def test_a_hold_counts_until_the_event_starts_and_an_approval_to_the_end() -> None:
    has_started: dict[str, Any] = {"event": {"status": "Started"}, "phase": "started", "was_started": True}
    over: dict[str, Any] = {"phase": "recovering", "is_over": True}
    for fields in (has_started, over):
        held = event_view(a_workflow(**fields, operator=HELD_BY_KIM), some_facts())
        assert (held.operator, held.commands) == (OperatorView(), ())
        approved = event_view(a_workflow(**fields, operator=APPROVED_BY_KIM), some_facts())
        assert (approved.operator.action, approved.operator.by, approved.commands) == ("approve", "kim", ())


# --- after its start


def test_a_hook_that_fails_when_the_event_starts_is_shown_as_failed() -> None:
    agent = prepared()
    agent.answer()
    agent.document(started(an_event()))
    view = agent.view()
    assert (view.phase, view.phase_since, view.status) == ("started", agent.context.now, "Started")
    assert (view.not_before, view.activity, view.commands) == (None, "under way", ())
    assert hooks(view) == ["drain done", "checkpoint done", "announce running", "resume open"]
    agent.ends("announce", "failed")
    view = agent.view()
    assert hooks(view) == ["drain done", "checkpoint done", "announce failed", "resume open"]
    assert failures(view) == ["hook announce: exit code 1"]
    assert (view.ready, view.outcome) == (False, "")


def test_hooks_whose_time_has_passed_have_not_run() -> None:
    agent = an_agent(a_rule(on_start=("announce",), lead=60.0))
    agent.document(started(an_event()))
    view = agent.view()
    assert hooks(view) == ["drain not_run", "checkpoint not_run", "announce running", "resume open"]
    assert view.activity == (
        "under way; unprepared: its time had not come, it was to begin at 12:14:00 UTC (lead 1m)"
    )
    assert view.approval.text == "none was given by this VM"
    agent = an_agent()
    agent.ends("drain")
    agent.document()
    assert hooks(agent.view())[1] == "checkpoint running"  # it is being ended
    agent.ends("checkpoint", "canceled")
    view = agent.view()
    assert (view.phase, view.outcome) == ("recovering", "canceled")
    assert hooks(view) == ["drain done", "checkpoint not_run", "announce not_run", "resume running"]


def test_a_stage_that_was_canceled_does_not_go_on() -> None:
    rule = a_rule(prepare=(), on_start=("announce", "tell"))
    agent = an_agent(rule, started(an_event()))
    workflow = agent.of()
    canceled = replace(workflow, on_start=StageStatus(state="canceled", run=1))
    assert workflow.phase == "started"
    assert hooks(event_view(canceled, agent.facts())) == ["announce not_run", "tell not_run", "resume open"]


def test_the_vm_is_ready_again_when_recovery_is_done() -> None:
    agent = prepared(a_rule(recover=("load", "resume")))
    agent.answer()
    agent.document(started(an_event()))
    agent.document()
    view = agent.view()
    assert (view.phase, view.outcome, view.ready) == ("recovering", "completed", False)
    assert hooks(view) == ["drain done", "checkpoint done", "load running", "resume open"]
    agent.ends("load")
    assert hooks(agent.view())[2:] == ["load done", "resume running"]
    agent.ends("resume")
    view = agent.last_view()
    assert (view.phase, view.phase_since, view.outcome) == ("closed", agent.context.now, "completed")
    assert (view.ready, view.waits_for, view.activity, view.commands) == (True, None, "over: completed", ())
    assert hooks(view) == ["drain done", "checkpoint done", "load done", "resume done"]
    assert to_status(agent.facts()).events == ()


def unrecovered() -> Shown:
    agent = prepared(a_rule(prepare=("drain",), recover=("load", "resume")))
    agent.document()
    agent.ends("load", "failed")
    return agent


def test_a_failed_recovery_waits_for_an_operator() -> None:
    view = unrecovered().view()
    assert (view.phase, view.outcome, view.ready) == ("recovery_failed", "unknown", False)
    assert view.waits_for == WaitsFor(kind="operator", until=None, text="hook load: exit code 1")
    assert view.activity == "recovery failed, an operator must retry or resolve it: hook load: exit code 1"
    assert hooks(view) == ["drain done", "load failed", "resume open"]
    assert failures(view) == ["hook load: exit code 1"]
    assert [(one.command.split()[1], one.effect) for one in view.commands] == [
        ("retry", "run load again, then the rest"),
        ("resolve", "only when you have done manually what load does"),
    ]
    assert commands(unrecovered().view(mode="observe")) == ["resolve A"]


def test_what_an_operator_has_repaired_is_resolved_and_what_comes_after_it_has_not_run() -> None:
    agent = unrecovered()
    agent.operator("resolve")
    view = agent.last_view()
    assert hooks(view) == ["drain done", "load resolved", "resume not_run"]
    assert failures(view) == ["hook load: exit code 1"]
    assert (view.ready, view.waits_for, view.activity) == (True, None, "over: unknown")


def test_a_recovery_that_is_tried_again_has_failed_no_longer() -> None:
    agent = unrecovered()
    agent.operator("retry")
    view = agent.view()
    assert (view.phase, view.waits_for, failures(view)) == ("recovering", None, [])
    assert hooks(view) == ["drain done", "load running", "resume open"]
    agent.ends("load")
    agent.ends("resume")
    assert hooks(agent.last_view()) == ["drain done", "load done", "resume done"]


def test_a_recovery_without_its_hook_waits_for_the_policy() -> None:
    agent = prepared()
    agent.reload(RULE, hooks=("drain", "checkpoint", "announce"))
    agent.document()
    view = agent.view()
    text = "hook resume is not in the policy any more: put it back"
    assert view.waits_for == WaitsFor(kind="policy", until=None, text=text)
    assert (view.phase, view.ready, commands(view)) == ("recovering", False, ["resolve A"])


def test_a_recommendation_is_prepared_for_until_it_expires() -> None:
    agent = an_agent(advice(), a_recommendation())
    agent.ends("drain", event="R")
    view = agent.view("R")
    expires_at = START + SECOND + timedelta(hours=1)
    assert view.waits_for is not None
    assert (view.waits_for.kind, view.waits_for.until) == ("azure", expires_at)
    assert view.approval == ApprovalView(
        wanted="never", state="none", failures=0, last_error="", text="none: it would have no effect"
    )
    assert (view.type, view.not_before, view.ready) == ("SpotRebalanceRecommendation", None, False)
    assert commands(view) == ["resolve R"]
    agent.tick(3600)
    agent.ends("undrain", event="R")
    view = agent.last_view()
    assert (view.outcome, view.activity, view.ready) == ("expired", "over: expired", True)


# --- what it waits for

EXPECTED: dict[Waits, set[WaitKind]] = {
    "time": {"time", "too_early"},
    "window": {"window", "window_closed"},
    "slot": {"slot", "approval_slot"},
    "fleet": {"fleet", "same_name"},
    "other_vms": {"staggered", "all_ready"},
    "other_event": {"other_event"},
    "operator": {"held", "manual", "state_lost", "prepare_failed", "prepare_canceled"},
    "policy": {"never", "shared", "lost_hook"},
    "mode": {"would_begin", "would_run_on_start", "observes"},
    "hook": {"other_run", "unprepared"},
    "document": {"missing", "stale", "id"},
    "azure": {"status", "recommendation"},
    "vm": {"other_vm"},
}


def test_each_reason_to_wait_has_a_kind_and_each_kind_a_reason() -> None:
    assert {reason: kind for kind, reasons in EXPECTED.items() for reason in reasons} == WAITS
    assert set(WAITS) == set(get_args(WaitKind))
    assert {*EXPECTED, "drain"} == set(get_args(Waits))


def waiting(kind: WaitKind, at: datetime | None = None) -> Workflow:
    reason = WaitReason(kind=kind, at=at, detail="it")
    return a_workflow({"id_error": "it is not a text"}, {"on_start": ("tell",)}, wait_reason=reason)


@pytest.mark.parametrize("reason", get_args(WaitKind))
def test_an_event_says_in_a_word_and_in_a_sentence_what_it_waits_for(reason: WaitKind) -> None:
    workflow = waiting(reason)
    view = event_view(workflow, some_facts())
    text = wait_message(workflow, workflow.wait_reason, NOW)
    assert view.waits_for == WaitsFor(kind=WAITS[reason], until=None, text=text)


@pytest.mark.parametrize("reason", get_args(WaitKind))
def test_the_end_of_the_wait_is_no_time_at_which_nothing_ends(reason: WaitKind) -> None:
    at = NOW + timedelta(minutes=3)
    found = event_view(waiting(reason, at), some_facts()).waits_for
    assert found is not None
    assert found.until == (None if reason in ("stale", "would_begin") else at)


# --- wherever it is shown


def test_a_command_has_the_options_of_its_agent_and_the_beginning_of_the_id_that_fits_no_other() -> None:
    options = CommandOptions(state="--state-dir /my/state")
    one, two = a_workflow({"id": "602D9444-A1"}), a_workflow({"id": "602D9444-B2"})
    facts = some_facts(workflows=(one, two), command_options=options)
    assert [commands(event)[0] for event in to_status(facts).events] == [
        "hold 602D9444-A --state-dir /my/state",
        "hold 602D9444-B --state-dir /my/state",
    ]
    assert commands(event_view(one, facts))[0] == "hold 602D9444-A1 --state-dir /my/state"
    assert commands(event_view(a_workflow({"id": "a b"}), some_facts()))[0] == "hold 'a b'"


def test_the_history_shows_an_event_that_is_over_as_the_agent_did() -> None:
    agent = prepared()
    agent.answer()
    agent.document(started(an_event()))
    agent.ends("announce")
    agent.document()
    agent.ends("resume")
    (closed,) = [step.workflow for step in agent.last.transitions if step.workflow.phase == "closed"]
    record = JournalRecord(
        at=START, key=closed.id, event_id="A", kind="closed", stage="", hook="", outcome="", text="x", detail=""
    )
    about_agent = replace(record, key="", event_id="", kind="agent_started")
    histories = to_journal([about_agent, History(workflow=closed, records=(record,))], NOW).histories
    assert [(item.event, item.records) for item in histories] == [
        (None, (about_agent,)),
        (agent.last_view(), (record,)),
    ]


def test_the_output_of_hooks_is_read_for_the_most_urgent_events() -> None:
    later = [a_workflow({"id": f"E{n}", "not_before": NOW + n * SECOND}) for n in range(1, 26)]
    failed = StageStatus(state="failed", failed_hook="drain", failure="hook drain: exit code 1")
    later[0] = replace(later[0], prepare=failed)
    status = to_status(some_facts(workflows=tuple(reversed(later))))
    wrote = {("e1@1", "prepare", "drain"): "drained", ("e25@1", "prepare", "drain"): "drained late"}
    asked: list[tuple[str, str, str]] = []

    def load_output(key: str, stage: str, hook: str) -> str:
        asked.append((key, stage, hook))
        return wrote.get((key, stage, hook), "")

    found = with_output(status, load_output)
    assert asked == [(f"e{n}@1", "prepare", "drain") for n in range(1, 21)]
    assert [event.key for event in found.events] == [f"e{n}@1" for n in range(1, 26)]
    first, *rest = found.events
    (hook,) = first.hooks
    assert hook == replace(status.events[0].hooks[0], output="drained")
    assert first == replace(status.events[0], hooks=first.hooks)
    assert tuple(rest) == status.events[1:]
    assert replace(found, events=()) == replace(status, events=())
