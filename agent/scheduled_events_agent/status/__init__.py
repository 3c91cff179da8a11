"""What there is to see: the agent and its events as values, and the words for them.

status.py     the types that commands, pages and programs read; docs/json.md says what each field is
attention.py  what needs a person
messages.py   sentences for people: terminal, page, log, service manager
actions.py    the commands with which an operator overrules the agent
"""

from scheduled_events_agent.status.status import (
    SCHEMA_VERSION,
    CurrentEvent,
    CurrentEvents,
    EventSummary,
    FleetState,
    HeldEvent,
    History,
    HistoryItem,
    HookStep,
    Journal,
    JournalEntry,
    LastKnown,
    NotifiedTarget,
    OperatorAnswer,
    OperatorWord,
    PolicyInForce,
    RunningHook,
    ShownWorkflow,
    Status,
    TargetFailure,
    Vm,
)

__all__ = [
    "SCHEMA_VERSION", "CurrentEvent", "CurrentEvents", "EventSummary", "FleetState", "HeldEvent", "History",
    "HistoryItem", "HookStep", "Journal", "JournalEntry", "LastKnown", "NotifiedTarget", "OperatorAnswer",
    "OperatorWord", "PolicyInForce", "RunningHook", "ShownWorkflow", "Status", "TargetFailure", "Vm",
]  # fmt: skip
