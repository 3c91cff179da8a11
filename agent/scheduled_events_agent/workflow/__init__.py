"""What happens next: the life of one event, from first sight to recovery, as a pure state machine.

Decides when hooks run, when to approve and when to recover. Does no I/O, reads no clock, keeps no state.
``proceed`` takes the board of open workflows and signals, and returns the new board with the steps that led to it;
the caller writes the steps to disk and then performs their effects. The one invariant: a step follows from what is
in the workflow, so that after a crash at any moment the same workflow leads to the same next step.

    model.py      the values: a workflow, its phases and their arrows, signals, effects, steps
    advance.py    proceed: takes signals in, then moves every workflow as far as it goes
    signals.py    what each signal changes in a workflow
    phases.py     what is due in each phase, or why nothing is
    stages.py     the hooks of a stage, in order; hooks that events share
    gates.py      gates: whether an event may be approved, or begin, now
    approval.py   the request to approve, its answer, and why only an operator may approve
    fleet.py      what this VM requests of its fleet, and the gates that wait for its answer
    timing.py     begin, drain, deadline of a hook; how urgent its event is
    recommendations.py  when one is over, whatever documents list
"""

from scheduled_events_agent.workflow.advance import (
    Progression,
    has_obeyed,
    is_ready,
    known_events,
    next_wake_at,
    proceed,
)
from scheduled_events_agent.workflow.fleet import (
    FleetRequest,
    fleet_requests,
    needs_all,
    needs_slot,
    not_ready_others,
    ordinal,
    some_of,
    workflow_id,
)
from scheduled_events_agent.workflow.gates import Leave
from scheduled_events_agent.workflow.model import (
    ACTION_TEXTS,
    TRANSITIONS,
    AgentRestarted,
    Approval,
    ApprovalAnswered,
    Approve,
    Board,
    CancelHook,
    ClockSet,
    Context,
    Effect,
    FleetEventStatus,
    FleetView,
    HookFinished,
    HookOutcome,
    MoveDeadline,
    Note,
    NoteKind,
    OperatorAction,
    OperatorCommand,
    Outcome,
    Phase,
    Progress,
    Rank,
    Reconsider,
    RememberedEvent,
    RunHook,
    Signal,
    Stage,
    Step,
    WaitKind,
    Waits,
    Workflow,
)
from scheduled_events_agent.workflow.phases import ask_approval_gates, gate_answers
from scheduled_events_agent.workflow.timing import hook_deadline_at, needed_seconds

__all__ = [
    "ACTION_TEXTS", "TRANSITIONS", "AgentRestarted", "Approval", "ApprovalAnswered", "Approve", "Board",
    "CancelHook", "ClockSet", "Context", "Effect", "FleetEventStatus", "FleetRequest", "FleetView",
    "HookFinished", "HookOutcome", "Leave", "MoveDeadline", "Note", "NoteKind", "OperatorAction",
    "OperatorCommand", "Outcome", "Phase", "Progress", "Progression", "Rank", "Reconsider", "RememberedEvent",
    "RunHook", "Signal", "Stage", "Step", "WaitKind", "Waits", "Workflow", "ask_approval_gates",
    "fleet_requests", "gate_answers", "has_obeyed", "hook_deadline_at", "is_ready", "known_events",
    "needed_seconds", "needs_all", "needs_slot", "next_wake_at", "not_ready_others", "ordinal", "proceed",
    "some_of", "workflow_id",
]  # fmt: skip
