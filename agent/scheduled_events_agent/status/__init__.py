"""The agent's status and its events: types for JSON, and texts for people.

status.py     types that commands, pages and programs read; docs/json.md describes each field
attention.py  what needs a person
summaries.py  the whole status with its texts for people
history.py    the journal as one list of events and of records about the agent
messages.py   sentences for people, among them the two lines of an event's state: headline and activity
actions.py    the actions that are open to an operator, and their command lines
"""

from scheduled_events_agent.status.status import (
    NO_OPTIONS,
    SCHEMA_VERSION,
    ActivePolicy,
    AgentRecordKind,
    Attention,
    AttentionKind,
    ClockWrong,
    CommandOptions,
    Condition,
    FleetState,
    HeldEvent,
    History,
    HistoryItem,
    Journal,
    JournalRecord,
    KubernetesFailure,
    NotifiedTarget,
    OperatorResult,
    Polls,
    RunningHook,
    StartFailure,
    StateLost,
    Status,
    SuggestedCommand,
    TargetFailure,
    Vm,
    WebConfigRejected,
    WorkflowView,
    to_json,
)

__all__ = [
    "NO_OPTIONS",
    "SCHEMA_VERSION",
    "ActivePolicy",
    "AgentRecordKind",
    "Attention",
    "AttentionKind",
    "ClockWrong",
    "CommandOptions",
    "Condition",
    "FleetState",
    "HeldEvent",
    "History",
    "HistoryItem",
    "Journal",
    "JournalRecord",
    "KubernetesFailure",
    "NotifiedTarget",
    "OperatorResult",
    "Polls",
    "RunningHook",
    "StartFailure",
    "StateLost",
    "Status",
    "SuggestedCommand",
    "TargetFailure",
    "Vm",
    "WebConfigRejected",
    "WorkflowView",
    "to_json",
]  # fmt: skip
