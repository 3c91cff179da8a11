"""Text for people about the agent's state: the same for the terminal, the page and the service manager."""

from datetime import timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from status_samples import APPROVED_BY_KIM, HELD_BY_KIM, NOW, a_workflow, some_facts

from scheduled_events_agent.status import EventView
from scheduled_events_agent.status.actions import available_actions, short_ids
from scheduled_events_agent.status.events import event_view
from scheduled_events_agent.status.facts import RunningHook
from scheduled_events_agent.status.messages import (
    activity,
    by_urgency,
    duration_text,
    operator_message,
    pending_message,
    time_left,
    wait_message,
    with_messages,
)
from scheduled_events_agent.workflow import (
    Approval,
    Record,
    StageStatus,
    Transition,
    WaitKind,
    WaitReason,
    Workflow,
)

OBSERVED = {"rule": None, "reason": "no rule matches it: observe", "approve": "never", "prepare": ()}
MANUAL = {"approve": "manual", "prepare": ()}
UNRECOVERED = a_workflow(
    event={"id": "failed"},
    phase="recovery_failed",
    is_over=True,
    recover=StageStatus(state="failed", failure="hook resume: exit code 3", failed_hook="resume"),
)
FAILED: dict[str, Any] = {
    "phase": "held",
    "prepare": StageStatus(failure="it failed"),
    "wait_reason": WaitReason(kind="prepare_failed"),
}


def view(event: dict[str, Any] | None = None) -> EventView:
    return event_view(a_workflow(event), some_facts())


def test_pending_events_are_counted_with_those_that_may_need_attention() -> None:
    pending = [
        a_workflow(**FAILED),
        a_workflow(decision=MANUAL, phase="prepared"),
        a_workflow(decision=MANUAL, phase="prepared", operator=APPROVED_BY_KIM),
        a_workflow(phase="started", event={"status": "Started"}),
        a_workflow(phase="recovering", is_over=True),
        a_workflow(decision={**OBSERVED, "affects": "others"}),
    ]
    assert pending_message(pending) == ("6 events are pending (1 held, 1 started, 1 recovering, 1 of other VMs)")


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        (a_workflow(phase="preparing"), ("hold",)),
        (a_workflow(phase="waiting", wait_reason=WaitReason(kind="too_early")), ("hold", "approve")),
        (a_workflow(phase="held"), ("approve",)),
        (a_workflow(decision=MANUAL, phase="prepared", approval_needed_since=NOW), ("approve", "hold")),
        (a_workflow(decision=OBSERVED), ("approve",)),
        (a_workflow(phase="held", operator=HELD_BY_KIM), ("release", "approve")),
        (a_workflow(phase="preparing", operator=APPROVED_BY_KIM), ("release", "hold")),
        (a_workflow(phase="approved", approval=Approval(state="confirmed")), ()),
        (a_workflow(phase="started", event={"status": "Started"}), ()),
        (a_workflow(phase="recovering", is_over=True), ()),
        (UNRECOVERED, ("retry", "resolve")),
        (a_workflow(phase="held", prepare=StageStatus(state="failed")), ("retry", "approve")),
        (a_workflow(decision={"approve": "manual"}), ("hold", "approve")),
        (a_workflow(decision={**OBSERVED, "affects": "others"}), ()),
        (a_workflow(decision={**OBSERVED, "affects": "unknown"}), ()),
        (a_workflow(event={"id": "", "resources": ("web-1",)}), ()),
    ],
)
def test_only_effective_operator_actions_are_offered(workflow: Workflow, words: tuple[str, ...]) -> None:
    assert available_actions(workflow) == words


def test_the_soonest_events_of_this_vm_come_first() -> None:
    others = a_workflow(event={"id": "others", "not_before": NOW}, decision={**OBSERVED, "affects": "others"})
    over = a_workflow(event={"id": "over", "not_before": NOW}, is_over=True, phase="recovering")
    started = a_workflow(event={"id": "started", "status": "Started", "not_before": None}, phase="started")
    late = a_workflow(event={"id": "late", "not_before": NOW + timedelta(days=7)})
    at_once = a_workflow(event={"id": "at once", "not_before": None})
    ordered = by_urgency([others, over, started, late, at_once, UNRECOVERED])
    assert [workflow.event.id for workflow in ordered] == [
        "failed",
        "at once",
        "late",
        "started",
        "over",
        "others",
    ]


def test_ids_are_shortened_to_what_fits_no_other_whatever_the_case() -> None:
    ids = ["602D9444-1B2C", "602d9444-9999", "C7061BAC-AFDC", "abc", "C7061bac-afdc-4513"]
    assert short_ids(ids) == {
        "602D9444-1B2C": "602D9444-1",
        "602d9444-9999": "602d9444-9",
        "C7061BAC-AFDC": "C7061BAC-AFDC",
        "abc": "abc",
        "C7061bac-afdc-4513": "C7061bac-afdc-",
    }


def test_the_same_id_twice_is_one_event() -> None:
    assert short_ids(["602D9444-1B2C", "602d9444-1b2c"]) == {
        "602D9444-1B2C": "602D9444",
        "602d9444-1b2c": "602d9444",
    }


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        (a_workflow(decision=OBSERVED), "only observed"),
        (a_workflow(phase="waiting", wait_reason=WaitReason(kind="too_early")), "waits: its time has not come"),
        (
            a_workflow(
                phase="waiting",
                wait_reason=WaitReason(kind="time", at=NOW + timedelta(seconds=230), detail="lead 15m"),
            ),
            "waits: begins at 22:15:50 UTC (in 3m 50s): lead 15m",
        ),
        (a_workflow(**FAILED), "held: it failed; Azure starts it at 22:26:12 UTC"),
        (
            a_workflow({"not_before": NOW + timedelta(hours=3)}, **FAILED),
            "held: it failed; Azure starts it at 2026-04-12 01:12:00 UTC",
        ),
        (
            a_workflow({"not_before": None}, **FAILED),
            "held: it failed; Azure may start it at any moment",
        ),
        (
            a_workflow(phase="preparing", drain_until=NOW + timedelta(seconds=30)),
            "drains for 30s more (/readyz answers 503)",
        ),
        (a_workflow(phase="prepared", approval=Approval(state="requested")), "asks Azure to start it"),
        (a_workflow(phase="prepared", approval=Approval(failures=1)), "asks Azure to start it; 1 try failed"),
        (
            a_workflow(phase="prepared", approval=Approval(state="requested", failures=2)),
            "asks Azure to start it; 2 tries failed",
        ),
        (a_workflow(phase="approved"), "approved; the event is Azure's to start"),
        (a_workflow(phase="started"), "under way"),
        (a_workflow(phase="closed", outcome="completed"), "over: completed"),
    ],
)
def test_the_state_of_an_event_is_one_sentence(workflow: Workflow, said: str) -> None:
    assert activity(workflow, (), NOW, NOW) == said


@pytest.mark.parametrize("kind", get_args(WaitKind))
def test_every_wait_reason_has_a_message(kind: WaitKind) -> None:
    failed = StageStatus(state="failed", failure="hook drain: exit code 3")
    workflow = a_workflow({"id_error": "it is not a text"}, {"on_start": ("tell",)}, prepare=failed)
    said = wait_message(workflow, WaitReason(kind=kind, at=NOW, detail="it"))
    assert len(said) > 10
    assert wait_message(workflow, None) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"operator": HELD_BY_KIM}, "held by kim since 22:12:00 UTC"),
        ({"operator": APPROVED_BY_KIM}, "approved by kim at 22:12:00 UTC"),
        ({"operator": replace(HELD_BY_KIM, user="")}, "held by an operator since 22:12:00 UTC"),
        (
            {"operator": replace(APPROVED_BY_KIM, at=NOW - timedelta(days=1))},
            "approved by kim at 2026-04-10 22:12:00 UTC",
        ),
        # A hold ends when the event starts, and if it is over; an approval goes on.
        ({"operator": HELD_BY_KIM, "phase": "started", "was_started": True}, ""),
        ({"operator": HELD_BY_KIM, "phase": "recovering", "is_over": True, "outcome": "canceled"}, ""),
        (
            {"operator": APPROVED_BY_KIM, "phase": "started", "was_started": True},
            "approved by kim at 22:12:00 UTC",
        ),
    ],
)
def test_an_operators_decision_is_said_with_its_time_as_long_as_it_counts(
    changes: dict[str, Any], said: str
) -> None:
    assert operator_message(event_view(a_workflow(**changes), some_facts()).operator, NOW) == said


def test_a_running_hook_is_shown_with_its_time_so_far() -> None:
    hook = RunningHook(workflow_id="1", stage="prepare", hook="drain", since=NOW - timedelta(seconds=72))
    waits = replace(hook, state="queued")
    limited = replace(hook, limit_seconds=120.0)
    assert activity(a_workflow(), [limited], NOW, NOW) == "runs the prepare hook drain, 1m 12s of at most 2m"
    cut = replace(hook, limit_seconds=73.4)
    assert activity(a_workflow(), [cut], NOW, NOW) == "runs the prepare hook drain, 1m 12s of at most 1m 13s"
    assert (
        activity(a_workflow(phase="preparing"), [hook], NOW, NOW) == "runs the prepare hook drain, 1m 12s so far"
    )
    assert activity(a_workflow(phase="preparing"), [waits], NOW, NOW) == "waits for another run of hook drain"


def test_the_time_left_is_that_until_the_event_may_start() -> None:
    assert time_left(view(), NOW) == "not before 22:26:12 UTC (in 14m 12s)"
    assert time_left(view({"not_before": None}), NOW) == "may start at any moment"
    assert time_left(view({"not_before": NOW}), NOW) == "may start at any moment (22:12:00 UTC)"
    assert time_left(view({"status": "Started"}), NOW) == "has started"


def test_the_duration_is_shown_as_an_estimate() -> None:
    said = [duration_text(view({"duration_seconds": seconds})) for seconds in (None, 0.0, 8.4, 300.0)]
    assert said == ["for an unknown time", "without an interruption", "for about 9s", "for about 5m"]


LONG = {"id": "602D9444-D2CD-49C7-8624-8643E7171297", "source": "Platform", "duration_seconds": 9.0}


@pytest.mark.parametrize(
    ("workflow", "note", "line"),
    [
        (
            a_workflow(LONG),
            Record(kind="seen", text="Reboot Scheduled, and much more"),
            "Reboot 602D9444: seen, Scheduled, from Platform, not before 2026-04-11 22:26:12 UTC, about 9s long",
        ),
        (
            a_workflow({"type": "", "status": "", "not_before": None}),
            Record(kind="seen", text="an event without a type"),
            "event 602D9444: seen, no status",
        ),
        (
            a_workflow(LONG),
            Record(kind="waiting", wait_reason=WaitReason(kind="manual")),
            "Reboot 602D9444: waits: an operator must approve it",
        ),
        (
            a_workflow(LONG),
            Record(kind="waiting", wait_reason=WaitReason(kind="all_ready", detail="web-2")),
            "Reboot 602D9444: waits for web-2",
        ),
        (
            a_workflow(LONG, prepare=StageStatus(state="failed", failure="hook drain: exit code 3")),
            Record(kind="held", wait_reason=WaitReason(kind="prepare_failed")),
            "Reboot 602D9444: held: hook drain: exit code 3; Azure starts it at 2026-04-11 22:26:12 UTC",
        ),
        (
            a_workflow(LONG),
            Record(kind="approving", text="rule impactful: its preparation is done"),
            "Reboot 602D9444: asks Azure to start it (rule impactful: its preparation is done)",
        ),
        (a_workflow(LONG), Record(kind="approved", text="x"), "Reboot 602D9444: approved (rule impactful)"),
        (
            a_workflow(LONG, operator=APPROVED_BY_KIM),
            Record(kind="approved", text="x"),
            "Reboot 602D9444: approved (an operator)",
        ),
        (
            a_workflow(LONG),
            Record(kind="closed", text="is over: completed"),
            "Reboot 602D9444: is over: completed",
        ),
    ],
)
def test_a_log_line_describes_the_event_and_the_change(workflow: Workflow, note: Record, line: str) -> None:
    (finished,) = with_messages(Transition(workflow=workflow, records=(note,))).records
    assert finished.log_line == line


@pytest.mark.parametrize("kind", get_args(WaitKind))
def test_a_log_line_states_the_wait_once(kind: WaitKind) -> None:
    waits = WaitReason(kind=kind, at=NOW, detail="x")
    workflow = a_workflow(event={"id_error": "x"}, prepare=StageStatus(failure="x"), wait_reason=waits)
    (finished,) = with_messages(
        Transition(workflow=workflow, records=(Record(kind="waiting", wait_reason=waits),))
    ).records
    for said in (finished.log_line, activity(workflow, (), NOW, NOW)):
        assert said.count("waits") == 1
