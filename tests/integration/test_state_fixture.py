"""A state file of an earlier agent: everything in it is read as it was written, and each event goes on.

``tests/fixtures/state-1.sql`` is that file. ``tests/fixtures/write_state.py`` has written it from the values here.
A rename over all files changes the values here, but not the file. So, without a migration, these tests fail.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import cast, get_args

import pytest
from msgspec.structs import replace
from test_engine import Clocks

from scheduled_events_agent.engine import Engine, Executor, HookDone, not_run_result
from scheduled_events_agent.hooks import durations
from scheduled_events_agent.hooks.durations import HookTimes
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.notifications import Notification, decode_notification
from scheduled_events_agent.policy import Decision, Hook, MaintenanceWindow, Rule, When
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.status import EventView, HookView, JournalRecord, StateLost, SuggestedCommand
from scheduled_events_agent.status.status import ApprovalView, OperatorView, WaitsFor
from scheduled_events_agent.store import FILE_NAME, Loss, MetaKey, Request, RequestAnswer, StatusRequest, Store
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import (
    ApprovalAnswered,
    Approve,
    OperatorDecision,
    RememberedEvent,
    RememberedKey,
    RunHook,
    StageStatus,
    Unprepared,
    UnpreparedKind,
    WaitReason,
    Workflow,
)
from scheduled_events_agent.workflow.model import Approval

FIXTURE = Path(__file__).parents[1] / "fixtures" / "state-1.sql"

SEEN_AT = datetime(2026, 3, 2, 12, 0, 0, 250000, tzinfo=UTC)
MIDWAY = datetime(2026, 3, 2, 12, 5, tzinfo=UTC)
ENDED_AT = datetime(2026, 3, 2, 12, 10, tzinfo=UTC)
"""When the agent that wrote the file ended."""
NOT_BEFORE = datetime(2026, 3, 2, 12, 30, tzinfo=UTC)
GOES_ON_AT = datetime(2026, 3, 2, 12, 20, tzinfo=UTC)
"""When the next agent starts: the one event that waited for its time need not wait any more."""
BOOT = "boot-time 1772450000.0"

# --- What is in the file.

EVENT = ScheduledEvent(
    id="",
    type="Reboot",
    status="Scheduled",
    source="Platform",
    resources=("vm-1",),
    not_before=NOT_BEFORE,
    duration_seconds=9.0,
    description="host maintenance",
    resource_type="VirtualMachine",
)
BY_RULE = Decision(
    rule="impactful",
    reason="rule impactful matches it: affects self, type Reboot",
    affects="self",
    prepare=("drain", "checkpoint"),
    on_start=("announce",),
    recover=("resume", "load"),
    approve="when-prepared",
    can_approve_for_all=True,
    lead=900.0,
)
BY_OPERATOR = Decision(
    rule="by-operator",
    reason="rule by-operator matches it: affects self, type Redeploy",
    affects="self",
    prepare=("drain", "checkpoint"),
    recover=("resume", "load"),
    drain_for=30.0,
    approve="manual",
    can_approve_for_all=True,
)
AT_NIGHT = Decision(
    rule="at-night",
    reason="rule at-night matches it: affects self, type Freeze",
    affects="self",
    prepare=("drain", "checkpoint"),
    recover=("resume", "load"),
    approve="when-prepared",
    can_approve_for_all=True,
    window_name="nights",
    window=MaintenanceWindow(start=time(2), length=14400.0, days=("sat", "sun"), timezone="Europe/Berlin"),
)
OF_RECOMMENDATION = Decision(
    rule="rebalance",
    reason="rule rebalance matches it: affects self, type SpotRebalanceRecommendation",
    affects="self",
    prepare=("drain", "checkpoint"),
    recover=("resume", "load"),
    can_approve_for_all=True,
    expire_after=7200.0,
)
DONE = StageStatus(state="succeeded", done=("drain", "checkpoint"), run=2)

WAITING = Workflow(
    id="waiting@20260302T120000.250000Z",
    event=replace(EVENT, id="WAITING", received_id="WAITING\u200b", not_before=NOT_BEFORE),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=MIDWAY,
    change_noted_at=MIDWAY,
    boot_id=BOOT,
    wait_reason=WaitReason(kind="time", at=NOT_BEFORE - timedelta(minutes=15), detail="lead 15m"),
)
WAITING_FOR_NIGHT = Workflow(
    id="night@20260302T120000.250000Z",
    event=replace(EVENT, id="NIGHT", type="Freeze", not_before=datetime(2026, 3, 9, 12, 0, tzinfo=UTC)),
    decision=AT_NIGHT,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    wait_reason=WaitReason(kind="window", at=datetime(2026, 3, 7, 1, 0, tzinfo=UTC), detail="window nights opens"),
    unprepared=Unprepared(kind="time", at=datetime(2026, 3, 7, 1, 0, tzinfo=UTC), detail="window nights opens"),
    vm_unknown_since=MIDWAY,
    is_vm_unknown_noted=True,
)
PREPARING = Workflow(
    id="preparing@20260302T120000.250000Z",
    event=replace(EVENT, id="PREPARING"),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="preparing",
    phase_since=MIDWAY,
    prepare=StageStatus(state="running", done=("drain",), current="checkpoint", run=2),
    handling_since=MIDWAY,
)
PREPARED = Workflow(
    id="prepared@20260302T120000.250000Z",
    event=replace(EVENT, id="PREPARED", type="Redeploy", source="User", duration_seconds=None),
    decision=BY_OPERATOR,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="prepared",
    phase_since=MIDWAY,
    prepare=DONE,
    drain_until=MIDWAY + timedelta(seconds=30),
    approval_needed_since=MIDWAY,
    handling_since=MIDWAY,
    wait_reason=WaitReason(kind="manual"),
)
HELD = Workflow(
    id="held@20260302T120000.250000Z",
    event=replace(EVENT, id="HELD"),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="held",
    phase_since=MIDWAY,
    prepare=StageStatus(
        state="failed",
        done=("drain",),
        run=2,
        failure="hook checkpoint: exit code 1",
        failed_hook="checkpoint",
        tolerated_failures={"drain": "hook drain: exit code 3"},
    ),
    handling_since=MIDWAY,
    wait_reason=WaitReason(kind="prepare_failed"),
    unprepared=Unprepared(kind="hook_failed", detail="hook checkpoint: exit code 1"),
)
HELD_BY_OPERATOR = Workflow(
    id="held-by-operator@20260302T120000.250000Z",
    event=replace(EVENT, id="HELD-BY-OPERATOR"),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="held",
    phase_since=MIDWAY,
    prepare=DONE,
    operator=OperatorDecision(action="hold", user="lee", at=MIDWAY),
    early_until=MIDWAY + timedelta(days=2),
    handling_since=MIDWAY,
    wait_reason=WaitReason(kind="held"),
)
HISTORY_UNKNOWN = Workflow(
    id="history-unknown@20260302T120000.250000Z",
    event=replace(EVENT, id="HISTORY-UNKNOWN"),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="held",
    phase_since=MIDWAY,
    prepare=DONE,
    is_history_unknown=True,
    handling_since=MIDWAY,
    wait_reason=WaitReason(kind="state_lost"),
)
APPROVAL_SENT = Workflow(
    id="approval-sent@20260302T120000.250000Z",
    event=replace(EVENT, id="APPROVAL-SENT"),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="prepared",
    phase_since=MIDWAY,
    prepare=DONE,
    approval=Approval(
        state="requested",
        taken_back=OperatorDecision(action="approve", user="kim", at=MIDWAY),
        failures=1,
        failing_since=MIDWAY,
        failure="the connection was reset",
        failed_at=MIDWAY + timedelta(seconds=1),
    ),
    handling_since=MIDWAY,
)
APPROVED = Workflow(
    id="approved@20260302T120000.250000Z",
    event=replace(EVENT, id="APPROVED", type="Redeploy"),
    decision=BY_OPERATOR,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="approved",
    phase_since=MIDWAY,
    prepare=DONE,
    approval=Approval(state="confirmed"),
    operator=OperatorDecision(action="approve", user="kim", at=MIDWAY),
    handling_since=MIDWAY,
)
STARTED = Workflow(
    id="started@20260302T120000.250000Z",
    event=replace(EVENT, id="STARTED", status="Started", not_before=None),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=MIDWAY,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="started",
    phase_since=MIDWAY,
    prepare=DONE,
    on_start=StageStatus(state="running", current="announce", run=1),
    approval=Approval(state="confirmed"),
    was_started=True,
    handling_since=MIDWAY,
)
RECOVERING = Workflow(
    id="recovering@20260302T120000.250000Z",
    event=replace(EVENT, id="RECOVERING"),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="recovering",
    phase_since=ENDED_AT,
    prepare=StageStatus(state="canceled", done=("drain",), run=2),
    recover=StageStatus(state="running", current="resume", run=1),
    missing_since=MIDWAY,
    is_over=True,
    is_reverted=True,
    handling_since=MIDWAY,
    outcome="canceled",
)
HALF_RECOVERED = Workflow(
    id="half-recovered@20260302T120000.250000Z",
    event=replace(EVENT, id="HALF-RECOVERED", status="Started", not_before=None),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=MIDWAY,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="recovering",
    phase_since=ENDED_AT,
    prepare=DONE,
    on_start=StageStatus(state="succeeded", done=("announce",), run=1),
    recover=StageStatus(state="running", done=("resume",), current="load", run=2),
    approval=Approval(state="confirmed"),
    missing_since=MIDWAY,
    is_over=True,
    is_reverted=True,
    was_started=True,
    handling_since=MIDWAY,
    outcome="completed",
)
RECOVERY_FAILED = Workflow(
    id="recovery-failed@20260302T120000.250000Z",
    event=replace(EVENT, id="RECOVERY-FAILED", status="Started", not_before=None),
    decision=BY_RULE,
    first_seen_at=SEEN_AT,
    not_before_seen_at=MIDWAY,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="recovery_failed",
    phase_since=ENDED_AT,
    prepare=DONE,
    recover=StageStatus(
        state="failed", done=("resume",), run=2, failure="hook load: exit code 1", failed_hook="load"
    ),
    approval=Approval(state="confirmed"),
    missing_since=MIDWAY,
    is_over=True,
    is_reverted=True,
    was_started=True,
    handling_since=MIDWAY,
    outcome="completed",
)
RECOMMENDATION = Workflow(
    id="recommendation-recommendation@20260302T120000.250000Z",
    event=replace(
        EVENT, id="RECOMMENDATION", type="SpotRebalanceRecommendation", not_before=None, duration_seconds=None
    ),
    decision=OF_RECOMMENDATION,
    first_seen_at=SEEN_AT,
    not_before_seen_at=SEEN_AT,
    boot_id=BOOT,
    prepare_boot_id=BOOT,
    phase="prepared",
    phase_since=MIDWAY,
    prepare=DONE,
    handling_since=MIDWAY,
    wait_reason=WaitReason(kind="recommendation", at=MIDWAY + timedelta(hours=2)),
)
OPEN = (
    WAITING, WAITING_FOR_NIGHT, PREPARING, PREPARED, HELD, HELD_BY_OPERATOR, HISTORY_UNKNOWN, APPROVAL_SENT,
    APPROVED, STARTED, RECOVERING, HALF_RECOVERED, RECOVERY_FAILED, RECOMMENDATION,
)  # fmt: skip

CLOSED = Workflow(
    id="closed@20260301T120000.000000Z",
    event=replace(EVENT, id="CLOSED", resources=("vm-2", "vm-1")),
    decision=replace(BY_RULE, affects="shared", shared="any", approve_after_seconds=10.0),
    first_seen_at=SEEN_AT - timedelta(days=1),
    not_before_seen_at=SEEN_AT - timedelta(days=1),
    boot_id="boot-time 1772360000.0",
    prepare_boot_id=BOOT,
    phase="closed",
    phase_since=MIDWAY,
    prepare=DONE,
    on_start=StageStatus(state="canceled", run=1, is_canceling=True, is_urgent=True),
    recover=StageStatus(state="resolved", failure="hook resume: exit code 1", failed_hook="resume", run=1),
    approval=Approval(failures=3, failing_since=MIDWAY, retry_at=ENDED_AT, failed_at=ENDED_AT),
    missing_since=MIDWAY,
    is_over=True,
    outcome="unknown",
)


UNPREPARED_KINDS = get_args(UnpreparedKind)


def closed_for(number: int, wait_reason: WaitReason, **decision: str) -> Workflow:
    """One more closed event: these have the values that no event above has."""
    id_error = "it is not a text" if number % 2 else ""
    return replace(
        CLOSED,
        id=f"closed-{number}@20260301T120000.000000Z",
        event=replace(EVENT, id=f"CLOSED-{number}", id_error=id_error, is_ambiguous=not id_error),
        decision=replace(CLOSED.decision, **decision),
        wait_reason=wait_reason,
        unprepared=Unprepared(kind=UNPREPARED_KINDS[number % len(UNPREPARED_KINDS)]),
        outcome="expired",
    )


MORE_CLOSED = (
    closed_for(1, WaitReason(kind="would_begin", at=NOT_BEFORE, approval="never"), approve="immediately"),
    closed_for(2, WaitReason(kind="would_run_on_start"), affects="others", shared="first"),
    closed_for(3, WaitReason(kind="observes"), affects="unknown", shared="all-ready"),
    closed_for(4, WaitReason(kind="slot", at=NOT_BEFORE, detail="event X has it")),
    closed_for(5, WaitReason(kind="fleet"), on_failure="approve", on_early_start="finish"),
    closed_for(6, WaitReason(kind="same_name", detail="id-2")),
    closed_for(7, WaitReason(kind="other_run", detail="drain")),
    closed_for(8, WaitReason(kind="status")),
    closed_for(9, WaitReason(kind="other_vm")),
    closed_for(10, WaitReason(kind="missing")),
    closed_for(11, WaitReason(kind="id")),
    closed_for(12, WaitReason(kind="never")),
    closed_for(13, WaitReason(kind="unprepared")),
    closed_for(14, WaitReason(kind="prepare_canceled")),
    closed_for(15, WaitReason(kind="too_early")),
    closed_for(16, WaitReason(kind="shared")),
    closed_for(17, WaitReason(kind="staggered", at=NOT_BEFORE)),
    closed_for(18, WaitReason(kind="all_ready", detail="vm-2")),
    closed_for(19, WaitReason(kind="stale", at=NOT_BEFORE)),
    closed_for(20, WaitReason(kind="other_event", detail="X")),
    closed_for(21, WaitReason(kind="lost_hook", detail="resume")),
    closed_for(22, WaitReason(kind="approval_slot", at=NOT_BEFORE, detail="1st in line")),
    closed_for(23, WaitReason(kind="window_closed", at=NOT_BEFORE)),
)
WORKFLOWS = (CLOSED, *MORE_CLOSED, *OPEN)


def event_record(
    kind: str, text: str, *, stage: str = "", hook: str = "", outcome: str = "", detail: str = ""
) -> JournalRecord:
    workflow = HALF_RECOVERED
    return JournalRecord(
        at=MIDWAY,
        key=workflow.id,
        event_id=workflow.event.id,
        kind=kind,
        stage=stage,
        hook=hook,
        outcome=outcome,
        text=text,
        detail=detail,
    )


def agent_record(kind: str, text: str, *, detail: str = "", at: datetime = MIDWAY) -> JournalRecord:
    return JournalRecord(
        at=at, key="", event_id="", kind=kind, stage="", hook="", outcome="", text=text, detail=detail
    )


JOURNAL = [
    agent_record("agent_started", "version 1.0.0, mode act", detail=BOOT, at=SEEN_AT),
    agent_record("state_lost", "the damaged state file is now /state/state.db.damaged-20260302T115900Z"),
    agent_record("state_recreated", "the state file was removed; created again, nothing is lost"),
    agent_record("on_clear", "nothing is pending: announce"),
    agent_record("reloaded", "rules: impactful, by-operator, at-night, rebalance"),
    agent_record("reload_rejected", "policy.yaml:3: rules: expected a list; got a text"),
    agent_record("machine_paused", "was paused for 8.2s"),
    agent_record("notification_lost", "pager: seen of LOST: too many waited"),
    event_record("seen", "Reboot Scheduled, from Platform, for vm-1"),
    event_record("named", "names this VM: Reboot Scheduled, from Platform, for vm-1"),
    event_record("decided", BY_RULE.reason),
    event_record("changed", "status Scheduled -> Started"),
    event_record("renamed", "goes on under the id HALF-RECOVERED (was OLD)"),
    event_record("waiting", "begins at 2026-03-02 12:15:00 UTC: lead 15m"),
    event_record("without_slot", "it begins without a slot of the fleet: it starts soon", detail="soon"),
    event_record("preparing", "preparation begins: drain, checkpoint"),
    event_record("hook_started", "hook drain starts", stage="prepare", hook="drain"),
    event_record("hook_canceled", "hook drain is canceled", stage="prepare", hook="drain"),
    event_record(
        "hook_finished", "hook drain: exit code 0 (succeeded)",
        stage="prepare", hook="drain", outcome="succeeded", detail="drained: \u00e4 'quoted' text\nof two lines",
    ),
    event_record("prepared", "preparation is done"),
    event_record("held", "held: an operator holds it; Azure starts it at 2026-03-02 12:30:00 UTC"),
    event_record("operator", "released by kim"),
    event_record("approval_needed", "an operator must approve it before 2026-03-02 12:30:00 UTC: rule night"),
    event_record("vm_unknown", "nothing says whether it names this VM: the event names no VM"),
    event_record("approving", "preparation is done"),
    event_record("approval_failed", "approval failed (timeout), next try in 1s: no answer"),
    event_record("approved", "Azure has accepted the approval"),
    event_record("started", "has started (approved)"),
    event_record("unprepared", "unprepared: hook drain: exit code 1"),
    event_record("restarted", "the agent restarted (the same boot) in phase started"),
    event_record("missing", "is not in the document; over, if the next answer lacks it too"),
    event_record("gone", "is no longer in the document (completed)"),
    event_record("expired", "has expired: it was prepared for since 2026-03-02 12:05:00 UTC"),
    event_record("recovering", "recovery begins: resume, load"),
    event_record("hook_missing", "hook load is not in the policy any more: put it back"),
    event_record("recovery_failed", "recovery failed: hook load: exit code 1"),
    event_record("closed", "is closed: completed"),
    agent_record("agent_stopped", "1 event is pending", at=ENDED_AT),
]  # fmt: skip
PREPARED_EVENT = EventView(
    key=PREPARED.id,
    id="PREPARED",
    type="Redeploy",
    status="Scheduled",
    source="User",
    resources=("vm-1",),
    not_before=NOT_BEFORE,
    duration_seconds=None,
    description="host maintenance",
    seen_at=SEEN_AT,
    rule="by-operator",
    reason=BY_OPERATOR.reason,
    affects="self",
    phase="prepared",
    phase_since=MIDWAY,
    outcome="",
    ready=False,
    approval=ApprovalView(wanted="manual", state="none", failures=0, last_error="", text="by an operator"),
    hooks=(
        HookView(stage="prepare", hook="drain", state="done"),
        HookView(stage="prepare", hook="checkpoint", state="failed", failure="exit code 1", output="no space"),
        HookView(stage="recover", hook="resume", state="open"),
    ),
    waits_for=WaitsFor(kind="operator", until=NOT_BEFORE, text="an operator must approve it"),
    operator=OperatorView(),
    activity="prepared: an operator must approve it; Azure starts it at 12:30:00 UTC",
    commands=(SuggestedCommand(command="scheduled-events-agent hold PREPARED", effect="not approve it"),),
)
STARTED_EVENT = EventView(
    key=STARTED.id,
    id="STARTED",
    type="Reboot",
    status="Started",
    source="Platform",
    resources=("vm-1",),
    not_before=None,
    duration_seconds=9.0,
    description="host maintenance",
    seen_at=SEEN_AT,
    rule=None,
    reason="no rule matches it",
    affects="self",
    phase="started",
    phase_since=MIDWAY,
    outcome="completed",
    ready=True,
    approval=ApprovalView(
        wanted="when-prepared", state="confirmed", failures=2, last_error="timed out", text="Azure has accepted it"
    ),
    hooks=(HookView(stage="on_start", hook="announce", state="running", since=MIDWAY, until=NOT_BEFORE),),
    waits_for=None,
    operator=OperatorView(action="approve", by="kim", at=MIDWAY),
    activity="runs the on_start hook announce",
    commands=(),
)
FIRST_NOTIFICATION = Notification(
    id="0123456789abcdef0123456789abcdef",
    kind="approval_needed",
    at=MIDWAY,
    vm="vm-1",
    vm_id="id-1",
    mode="act",
    reason="an operator must approve it before 2026-03-02 12:30:00 UTC: the rule says so",
    addition="the rule says so",
    seconds_left=1500,
    deadline=NOT_BEFORE,
    commands=(SuggestedCommand(command="scheduled-events-agent approve PREPARED", effect="Azure may start it"),),
    runbook="https://example.com/runbook.md#approval_needed",
    severity="act",
    has_started=False,
    event=PREPARED_EVENT,
)
SECOND_NOTIFICATION = Notification(
    id="fedcba9876543210fedcba9876543210",
    kind="started",
    at=ENDED_AT,
    vm="vm-1",
    vm_id="id-1",
    mode="observe",
    reason="has started (approved)",
    addition="approved",
    seconds_left=None,
    has_started=True,
    event=STARTED_EVENT,
)
META: dict[MetaKey, str] = {
    "vm_name": "vm-1", "vm_id": "id-1", "vm_group": "group-1", "boot_id": BOOT,
    "state_lost": "a workflow in it cannot be read", "in_use": "1",
    "created_at": SEEN_AT.isoformat(timespec="seconds"),
}  # fmt: skip
STATE_LOST = StateLost(at=SEEN_AT, reason="a workflow in it cannot be read")
HOOK_TIMES = {"drain": HookTimes(command="0123456789abcdef", seconds=(12.5, 13.0))}
LOSSES = {"pager": Loss(count=2, since=MIDWAY, reason="too many waited")}
REMEMBERED: dict[RememberedKey, RememberedEvent] = {
    ("hold", "vanished"): RememberedEvent(user="kim", at=SEEN_AT, last_seen_at=MIDWAY),
    ("hold", "held-by-operator"): RememberedEvent(user="lee", at=MIDWAY, last_seen_at=MIDWAY),
    ("hold", "listed-recommendation"): RememberedEvent(user="kim", at=MIDWAY, last_seen_at=ENDED_AT),
    ("expired", "listed-recommendation"): RememberedEvent(at=ENDED_AT, last_seen_at=ENDED_AT),
}
ANSWER = RequestAnswer(succeeded=True, message="approved: the event is prepared, approval requested")
ASKED_AT = GOES_ON_AT - timedelta(seconds=5)
"""An operator asked while no agent ran; the request is still valid when the next one starts."""
ANSWERED, ASKED, ASKED_FOR_STATUS = 1, 2, 3


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A state directory with the file in it."""
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.executescript(FIXTURE.read_text(encoding="utf-8"))
    return tmp_path


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    store = Store.open(directory, GOES_ON_AT)
    yield store
    store.close()


@pytest.mark.parametrize("number", range(len(WORKFLOWS)), ids=[one.event.id for one in WORKFLOWS])
def test_each_workflow_is_read_as_it_was_written(store: Store, number: int) -> None:
    assert store.find_workflows()[number] == WORKFLOWS[number]


def test_the_open_workflows_are_loaded(store: Store) -> None:
    assert store.quarantined_path is None
    assert store.load_workflows() == [*OPEN]


def test_the_journal_is_read_as_it_was_written(store: Store) -> None:
    assert store.load_journal() == JOURNAL
    assert store.load_last_start_and_stop() == [JOURNAL[0], JOURNAL[-1]]
    assert (
        store.load_last_output(HALF_RECOVERED.id, "prepare", "drain")
        == "drained: \u00e4 'quoted' text\nof two lines"
    )


def test_unsent_notifications_are_read_in_their_order(store: Store) -> None:
    first = store.outbox.load_next("pager", 0)
    assert first is not None
    assert (first.at, decode_notification(first.body)) == (MIDWAY, FIRST_NOTIFICATION)
    second = store.outbox.load_next("pager", first.id)
    assert second is not None
    assert (second.at, decode_notification(second.body)) == (ENDED_AT, SECOND_NOTIFICATION)
    assert store.outbox.load_next("pager", second.id) is None


def test_what_the_agent_remembers_is_read_as_it_was_written(store: Store) -> None:
    assert {name: store.get_meta(name) for name in META} == META
    assert durations.decode(store.get_meta("hook_times")) == HOOK_TIMES
    assert store.load_unsettled_loss() == STATE_LOST
    assert store.load_losses() == LOSSES
    assert store.load_remembered() == REMEMBERED


def test_requests_are_read_as_they_were_written(store: Store) -> None:
    assert store.load_answer(ANSWERED) == ANSWER
    assert store.load_requests(GOES_ON_AT) == [
        Request(id=ASKED, workflow_id=RECOVERY_FAILED.id, action="retry", user="kim"),
        StatusRequest(id=ASKED_FOR_STATUS),
    ]


@pytest.mark.parametrize("name", ["not_before_seen_at", "approval"])
def test_a_renamed_field_of_an_open_workflow_is_not_lost_silently(directory: Path, name: str) -> None:
    """One of them is required, and the other has a default value."""
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        changed = connection.execute(
            "UPDATE workflow SET body = replace(body, ?, ?) WHERE id = ?",
            (f'"{name}":', f'"new_{name}":', PREPARING.id),
        )
        assert changed.rowcount == 1
        connection.commit()
    store = Store.open(directory, GOES_ON_AT)
    assert store.quarantined_path is not None
    store.close()


# --- The next agent goes on with it.

HOOKS = {name: Hook(run=("/bin/true",)) for name in ("drain", "checkpoint", "announce", "resume", "load")}
SETTINGS = Settings(
    hooks=HOOKS,
    notify=(NotifyTarget(name="pager", to="http://127.0.0.1:9/"),),
    maintenance_windows={"nights": cast("MaintenanceWindow", AT_NIGHT.window)},
    rules=(
        Rule(
            name="impactful", when=When(type=("Reboot",)), approve="when-prepared", lead=900.0,
            prepare=("drain", "checkpoint"), on_start=("announce",), recover=("resume", "load"),
        ),
        Rule(
            name="by-operator", when=When(type=("Redeploy",)), approve="manual", drain_for=30.0,
            prepare=("drain", "checkpoint"), recover=("resume", "load"),
        ),
        Rule(
            name="at-night", when=When(type=("Freeze",)), approve="when-prepared", window="nights",
            prepare=("drain", "checkpoint"), recover=("resume", "load"),
        ),
        Rule(
            name="rebalance", when=When(type=("SpotRebalanceRecommendation",)), expire_after=7200.0,
            prepare=("drain", "checkpoint"), recover=("resume", "load"),
        ),
    ),
)  # fmt: skip


class Machine(Clocks):
    """The machine on which the file was written, in the same boot."""

    def boot_id(self) -> str:
        return BOOT


class Performed:
    """An executor whose hooks succeed at once, and whose approvals Azure accepts."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.results: list[HookDone | ApprovalAnswered] = []

    def start_hook(self, effect: RunHook, *_: object, **__: object) -> None:
        self.actions.append(f"{effect.stage} {effect.hook}")
        result = replace(not_run_result(effect.hook, "succeeded", "exit code 0"), attempts=1, has_run=True)
        self.results.append(HookDone(effect, result))

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        del incarnation
        self.actions += [f"approve {one.event_id}" for one in approvals]
        self.results += [ApprovalAnswered(workflow_id=one.workflow_id) for one in approvals]

    def hook_received(self, effect: object) -> None:
        pass

    def approval_received(self, workflow_id: str) -> None:
        pass

    def is_running(self, key: object) -> bool:
        del key
        return False


class NextAgent:
    """The agent that starts with the file. ``workflows``: the open ones that stay in it; all if none is given."""

    def __init__(self, directory: Path, *workflows: Workflow) -> None:
        if workflows:
            with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as connection:
                kept = ", ".join(f"'{one.id}'" for one in workflows)
                connection.execute(f"DELETE FROM workflow WHERE is_open AND id NOT IN ({kept})")
                connection.commit()
        self.store = Store.open(directory, GOES_ON_AT)
        self.machine = Machine()
        self.machine.wall = GOES_ON_AT
        self.executor = Performed()
        self.engine = Engine(SETTINGS, self.store, Metrics(tuple), cast("Executor", self.executor), self.machine)
        self.engine.start()
        self.engine.receive(Identity(name="vm-1", vm_id="id-1", group="group-1"))

    def document(self, *events: ScheduledEvent) -> list[str]:
        """A document is read, and all that follows from it is done. Returns what was done."""
        self.engine.receive(Document(incarnation="1", events=events))
        while True:
            assert self.engine.run_cycle(self.machine.wait(2.0))
            if not self.executor.results:
                break
            results, self.executor.results = self.executor.results, []
            for result in results:
                self.engine.receive(result)
        actions, self.executor.actions = self.executor.actions, []
        return actions


@contextlib.contextmanager
def next_agent(directory: Path, *workflows: Workflow) -> Iterator[NextAgent]:
    agent = NextAgent(directory, *workflows)
    try:
        yield agent
    finally:
        agent.store.close()


RECOVERS = ["recover resume", "recover load"]
# By workflow: what is done while the event is listed, and what when it is over.
GOES_ON: tuple[tuple[Workflow, list[str], list[str]], ...] = (
    (WAITING, ["prepare drain", "prepare checkpoint", "approve WAITING\u200b"], RECOVERS),
    (WAITING_FOR_NIGHT, [], []),
    (PREPARING, ["prepare checkpoint", "approve PREPARING"], RECOVERS),
    (PREPARED, [], RECOVERS),
    (HELD, [], RECOVERS),
    (HELD_BY_OPERATOR, [], RECOVERS),
    (HISTORY_UNKNOWN, [], RECOVERS),
    (APPROVAL_SENT, ["approve APPROVAL-SENT"], RECOVERS),
    (APPROVED, [], RECOVERS),
    (STARTED, ["on_start announce"], RECOVERS),
    (RECOVERING, [], RECOVERS),
    (HALF_RECOVERED, [], ["recover load"]),
    (RECOVERY_FAILED, [], ["recover load"]),  # an operator has asked for it
    (RECOMMENDATION, [], RECOVERS),
)


@pytest.mark.parametrize(
    ("workflow", "while_listed", "when_over"), GOES_ON, ids=[workflow.event.id for workflow, *_ in GOES_ON]
)
def test_each_open_event_goes_on_to_its_end(
    directory: Path, workflow: Workflow, while_listed: list[str], when_over: list[str]
) -> None:
    with next_agent(directory, workflow) as agent:
        if not workflow.is_over:
            assert agent.document(workflow.event) == while_listed
            assert agent.document(workflow.event) == []
        assert agent.document() + agent.document() + agent.document() == when_over
        assert agent.engine.workflows == {}


def test_all_open_events_go_on_side_by_side(directory: Path) -> None:
    listed = [workflow.event for workflow in OPEN if not workflow.is_over]
    with next_agent(directory) as agent:
        actions = agent.document(*listed) + agent.document(*listed)
        assert sorted(actions) == sorted(action for _, actions, _ in GOES_ON for action in actions)
        assert [one for _ in range(3) for one in agent.document()] == RECOVERS  # once for all of them
        assert agent.engine.bugs == {}
        assert agent.engine.workflows == {}


def test_notifications_of_both_agents_are_in_order(directory: Path) -> None:
    with next_agent(directory, PREPARING) as agent:
        agent.document(PREPARING.event)
        assert agent.document() + agent.document() + agent.document() == RECOVERS
        item, bodies = agent.store.outbox.load_next("pager", 0), []
        while item is not None:
            bodies.append(decode_notification(item.body))
            item = agent.store.outbox.load_next("pager", item.id)
    assert bodies[:2] == [FIRST_NOTIFICATION, SECOND_NOTIFICATION]
    assert [(one.kind, one.event.id) for one in bodies[2:]] == [("recovered", "PREPARING")]


def test_a_remembered_hold_counts_when_its_event_is_back(directory: Path) -> None:
    event = replace(EVENT, id="VANISHED")
    with next_agent(directory, WAITING_FOR_NIGHT) as agent:
        assert agent.document(event, WAITING_FOR_NIGHT.event) == []
        (hold,) = [one for one in agent.engine.workflows.values() if one.event == event]
        assert (hold.phase, hold.operator_action) == ("held", "hold")


def test_a_recommendation_that_has_expired_does_not_begin_again(directory: Path) -> None:
    event = replace(RECOMMENDATION.event, id="LISTED")
    with next_agent(directory, WAITING_FOR_NIGHT) as agent:
        assert agent.document(event, WAITING_FOR_NIGHT.event) == []
        assert [one.id for one in agent.engine.workflows.values()] == [WAITING_FOR_NIGHT.id]


def test_an_operator_request_from_before_the_start_is_applied(directory: Path) -> None:
    with next_agent(directory, RECOVERY_FAILED) as agent:
        assert agent.document() == ["recover load"]
        answer = agent.store.load_answer(ASKED)
        assert answer is not None
        assert answer.succeeded
