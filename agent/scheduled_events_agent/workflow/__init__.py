"""The pure state machine of one event, from first sight to recovery.

Decides when hooks run, when to approve and when to recover. Does no I/O, reads no clock, keeps no state.
``advance`` gets the open workflows and signals, and returns the workflows as they are now, with the transitions
that led to them. The caller writes the transitions to disk and then performs their effects. Invariant: a
transition follows from what is in the workflow. So after a crash at any moment the same workflow makes the same
transition.

    model.py      the values: a workflow, its phases, signals, effects, transitions
    advance.py    advance: applies the signals, then moves every workflow as far as it goes
    signals.py    what each signal changes in a workflow
    phases.py     what is due in each phase, or why nothing is
    stages.py     the hooks of a stage, in order; hooks that events share
    gates.py      gates: whether an event may be approved, or begin, now
    approval.py   the request to approve, its answer, and why only an operator may approve
    fleet.py      what this VM requests of its fleet, and the gates that wait for its answer
    timing.py     begin, drain, deadline of a hook; how urgent its event is
    unprepared.py why an event is not prepared when Azure starts it; events of which the VM is not known
    recommendations.py  when one is over, whatever documents list
"""

from scheduled_events_agent.workflow.advance import (
    Result,
    advance,
    is_applied,
    is_ready,
    is_unsettled,
    known_events,
    next_wake_at,
)
from scheduled_events_agent.workflow.fleet import (
    FleetRequest,
    fleet_requests,
    needs_all,
    needs_slot,
    needs_slot_to_approve,
    not_ready_others,
    ordinal,
    some_of,
    workflow_id,
)
from scheduled_events_agent.workflow.gates import GateResult
from scheduled_events_agent.workflow.model import (
    ACTION_TEXTS,
    ALLOWED_TRANSITIONS,
    AgentRestarted,
    Approval,
    ApprovalAnswered,
    Approve,
    CancelHook,
    ClockChanged,
    Context,
    Effect,
    FleetEventStatus,
    FleetView,
    HookFinished,
    HookOutcome,
    OperatorAction,
    OperatorCommand,
    OperatorDecision,
    Outcome,
    Phase,
    PolicyChanged,
    Rank,
    Record,
    RecordKind,
    RememberedEvent,
    RememberedFact,
    RememberedKey,
    RunHook,
    Signal,
    Stage,
    StageStatus,
    Transition,
    Unprepared,
    UnpreparedKind,
    UpdateHookDeadline,
    WaitKind,
    WaitReason,
    Workflow,
    Workflows,
)
from scheduled_events_agent.workflow.phases import evaluate_approval_gates, gate_results
from scheduled_events_agent.workflow.timing import hook_deadline_at, needed_seconds

__all__ = [
    "ACTION_TEXTS",
    "ALLOWED_TRANSITIONS",
    "AgentRestarted",
    "Approval",
    "ApprovalAnswered",
    "Approve",
    "CancelHook",
    "ClockChanged",
    "Context",
    "Effect",
    "FleetEventStatus",
    "FleetRequest",
    "FleetView",
    "GateResult",
    "HookFinished",
    "HookOutcome",
    "OperatorAction",
    "OperatorCommand",
    "OperatorDecision",
    "Outcome",
    "Phase",
    "PolicyChanged",
    "Rank",
    "Record",
    "RecordKind",
    "RememberedEvent",
    "RememberedFact",
    "RememberedKey",
    "Result",
    "RunHook",
    "Signal",
    "Stage",
    "StageStatus",
    "Transition",
    "Unprepared",
    "UnpreparedKind",
    "UpdateHookDeadline",
    "WaitKind",
    "WaitReason",
    "Workflow",
    "Workflows",
    "advance",
    "evaluate_approval_gates",
    "fleet_requests",
    "gate_results",
    "hook_deadline_at",
    "is_applied",
    "is_ready",
    "is_unsettled",
    "known_events",
    "needed_seconds",
    "needs_all",
    "needs_slot",
    "needs_slot_to_approve",
    "next_wake_at",
    "not_ready_others",
    "ordinal",
    "some_of",
    "workflow_id",
]  # fmt: skip
