"""The agent's status and its events: types for JSON, and texts for people.

status.py     types that commands, pages and programs read; docs/json.md describes each field
facts.py      what these are made from: no output has them
events.py     makes the status from the facts, and the one view of an event
attention.py  what needs a person
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
    EventView,
    FleetState,
    HeldEvent,
    HistoryItem,
    HookView,
    Journal,
    JournalRecord,
    KubernetesFailure,
    NotifiedTarget,
    OperatorResult,
    Polls,
    StartFailure,
    StateLost,
    Status,
    SuggestedCommand,
    TargetFailure,
    Vm,
    WebConfigRejected,
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
    "EventView",
    "FleetState",
    "HeldEvent",
    "HistoryItem",
    "HookView",
    "Journal",
    "JournalRecord",
    "KubernetesFailure",
    "NotifiedTarget",
    "OperatorResult",
    "Polls",
    "StartFailure",
    "StateLost",
    "Status",
    "SuggestedCommand",
    "TargetFailure",
    "Vm",
    "WebConfigRejected",
    "to_json",
]  # fmt: skip
