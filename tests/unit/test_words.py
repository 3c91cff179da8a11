"""What the agent is at, in words: the same for the terminal, the page and the service manager."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from scheduled_events_agent.events import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.status import PolicyInForce, RunningHook, ShownWorkflow, Status, Vm
from scheduled_events_agent.status.actions import overruling, short_ids
from scheduled_events_agent.status.messages import (
    activity,
    by_urgency,
    clock,
    last_known_activity,
    lasting,
    pending_in_words,
    span,
    time_left,
    verdict,
    wait_in_words,
)
from scheduled_events_agent.workflow import Approval, Progress, Waits
from scheduled_events_agent.workflow.model import WaitKind

NOW = datetime(2026, 4, 11, 22, 12, tzinfo=UTC)


def a_workflow(
    event: Mapping[str, Any] | None = None, decision: Mapping[str, Any] | None = None, **fields: Any
) -> ShownWorkflow:
    """An event that is ours, and that a rule takes which prepares and then approves."""
    event_fields: dict[str, Any] = {
        "id": "602D9444",
        "type": "Reboot",
        "status": "Scheduled",
        "not_before": NOW + timedelta(minutes=14, seconds=12),
    }
    decided: dict[str, Any] = {
        "rule": "impactful",
        "reason": "rule impactful takes it: type Reboot",
        "affects": "self",
        "approve": "when-prepared",
        "prepare": ("drain",),
    }
    found = ScheduledEvent(**{**event_fields, **(event or {})})
    rest: dict[str, Any] = {
        "id": f"{found.key}@1",
        "event": found,
        "decision": Decision(**{**decided, **(decision or {})}),
        "first_seen_at": NOW,
        "noticed_at": NOW,
        "boot_id": "boot",
    }
    return ShownWorkflow(**{**rest, **fields})


def a_status(**fields: Any) -> Status:
    """A healthy agent with nothing to do."""
    healthy: dict[str, Any] = {
        "at": NOW,
        "version": "0.1.0",
        "started_at": NOW,
        "vm": Vm(names=("web-1",), vm_id="id"),
        "mode": "act",
        "ready": True,
        "health": "ok",
        "policy": PolicyInForce(file="policy.yaml", read_at=NOW),
        "rules": (),
        "endpoint": "auto",
        "last_poll_at": NOW,
        "poll_failure": "",
        "incarnation": "1",
        "running": (),
        "pending": (),
    }
    return Status(**{**healthy, **fields})


OBSERVED = {"rule": None, "reason": "no rule takes it: observe", "approve": "never", "prepare": ()}
MANUAL = {"approve": "manual", "prepare": ()}
UNRECOVERED = a_workflow(
    event={"id": "failed"}, phase="recovery_failed", is_over=True, waits_for="hook resume: exit code 3"
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "healthy; acts; nothing is pending"),
        ({"mode": "observe"}, "healthy; only observes; nothing is pending"),
        ({"health": ("it hangs",), "pending": (a_workflow(),)}, "NOT HEALTHY; acts; 1 event is pending"),
        ({"pending": (UNRECOVERED,)}, "RECOVERY FAILED; healthy; acts; 1 event is pending (1 not recovered)"),
        (
            {"vm": Vm(names=(), vm_id=""), "policy": PolicyInForce(file="p", read_at=NOW, refused="p:1: bad")},
            "healthy; acts; nothing is pending; the name of this VM is not known; the policy file is refused",
        ),
    ],
)
def test_the_verdict_says_how_the_agent_is_and_what_it_may_do(fields: dict[str, Any], said: str) -> None:
    assert verdict(a_status(**fields)) == said


def test_what_is_pending_is_counted_with_what_may_need_somebody() -> None:
    pending = [
        a_workflow(phase="held", waits_for="preparation failed"),
        a_workflow(decision=MANUAL, phase="prepared"),
        a_workflow(decision=MANUAL, phase="prepared", operator="approved"),
        a_workflow(phase="started", event={"status": "Started"}),
        a_workflow(phase="recovering", is_over=True),
        a_workflow(decision={**OBSERVED, "affects": "others"}),
    ]
    assert pending_in_words(pending) == (
        "6 events are pending (1 held, 1 started, 1 recovering, 1 waiting for an operator, 1 of other VMs)"
    )


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        (a_workflow(phase="preparing"), ("hold",)),
        (a_workflow(phase="waiting", waits_for="its time comes later"), ("hold", "approve")),
        (a_workflow(phase="held"), ("approve",)),
        (a_workflow(decision=MANUAL, phase="prepared"), ("approve",)),
        (a_workflow(decision=OBSERVED), ("approve",)),
        (a_workflow(phase="held", operator="held"), ("release", "approve")),
        (a_workflow(phase="preparing", operator="approved"), ("release", "hold")),
        (a_workflow(phase="approved", approval=Approval(state="confirmed")), ()),
        (a_workflow(phase="started", event={"status": "Started"}), ()),
        (a_workflow(phase="recovering", is_over=True), ()),
        (UNRECOVERED, ("retry", "resolve")),
        (a_workflow(phase="held", prepare=Progress(state="failed")), ("retry", "approve")),
        (a_workflow(decision={"approve": "manual"}), ("hold", "approve")),
        (a_workflow(decision={**OBSERVED, "affects": "others"}), ()),
        (a_workflow(decision={**OBSERVED, "affects": "unknown"}), ()),
        (a_workflow(event={"id": "", "resources": ("web-1",)}), ()),
    ],
)
def test_only_words_that_would_change_something_are_offered(
    workflow: ShownWorkflow, words: tuple[str, ...]
) -> None:
    assert overruling(workflow) == words


def test_what_concerns_this_vm_and_may_start_soonest_comes_first() -> None:
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
        (a_workflow(phase="waiting", waits_for="its time comes at 1"), "waits: its time comes at 1"),
        (a_workflow(phase="held", waits_for="it failed"), "held, Azure starts it at NotBefore: it failed"),
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
def test_what_is_done_about_an_event_is_one_sentence(workflow: ShownWorkflow, said: str) -> None:
    assert activity(workflow, (), NOW) == said


@pytest.mark.parametrize("kind", get_args(WaitKind))
def test_every_reason_to_wait_has_words(kind: WaitKind) -> None:
    workflow = a_workflow(event={"id_fault": "it is not a text"}, decision={"on_start": ("tell",)})
    said = wait_in_words(workflow, Waits(kind=kind, at=NOW, detail="it"))
    assert len(said) > 10
    assert wait_in_words(workflow, None) == ""


def test_a_hook_that_runs_is_told_with_its_time_so_far() -> None:
    hook = RunningHook(workflow_id="1", stage="prepare", hook="drain", since=NOW - timedelta(seconds=72))
    waits = replace(hook, state="queued")
    assert activity(a_workflow(phase="preparing"), [hook], NOW) == "runs the prepare hook drain, 1m 12s so far"
    assert activity(a_workflow(phase="preparing"), [waits], NOW) == "waits for another run of hook drain"


def test_of_an_agent_that_does_not_answer_only_the_past_is_told() -> None:
    preparing = a_workflow(phase="preparing", prepare=Progress(state="running", current="drain", run=1))
    assert last_known_activity(preparing) == "was preparing; had begun the prepare hook drain"
    asked = a_workflow(phase="held", waits_for="it failed", approval=Approval(state="requested"))
    assert last_known_activity(asked) == "was held; approval requested; waited: it failed"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0s"), (59.9, "59s"), (61, "1m 1s"), (3600, "1h 0m"), (90061, "1d 1h"), (8 * 86400, "8d 0h")],
)
def test_a_span_has_two_units_at_most(seconds: float, said: str) -> None:
    assert span(NOW, NOW + timedelta(seconds=seconds)) == said


def test_the_time_left_is_that_until_the_event_may_start() -> None:
    assert time_left(a_workflow().event, NOW) == "not before 14m 12s from now"
    assert time_left(a_workflow(event={"not_before": None}).event, NOW) == "may start at any moment"
    assert time_left(a_workflow(event={"not_before": NOW}).event, NOW) == "may start at any moment"
    assert time_left(a_workflow(event={"status": "Started"}).event, NOW) == "has started"


def test_the_duration_is_told_as_the_estimate_that_it_is() -> None:
    said = [lasting(a_workflow(event={"duration_seconds": seconds}).event) for seconds in (None, 0.0, 9.0)]
    assert said == ["for an unknown time", "without an interruption", "for about 9s"]


def test_a_time_of_another_day_has_its_date() -> None:
    assert clock(NOW, NOW) == "22:12:00Z"
    assert clock(NOW + timedelta(hours=3), NOW) == "2026-04-12 01:12:00Z"
