"""What there is to see: the agent and its events as values, and the words for them.

status.py     the types that commands, pages and programs read; docs/json.md says what each field is
attention.py  what needs a person
summaries.py  the whole status as people are shown it
messages.py   sentences for people, among them the two lines of an event's state: headline and activity
actions.py    the commands with which an operator overrules the agent
"""

from scheduled_events_agent.status.status import (
    NO_OPTIONS,
    SCHEMA_VERSION,
    Attention,
    AttentionKind,
    CommandOptions,
    EventSummary,
    FleetState,
    HeldEvent,
    History,
    HistoryItem,
    HookStep,
    Journal,
    JournalEntry,
    NotifiedTarget,
    OperatorAnswer,
    PolicyInForce,
    RunningHook,
    ShownWorkflow,
    Status,
    SuggestedCommand,
    TargetFailure,
    Vm,
    WebConfigRejected,
)

__all__ = [
    "NO_OPTIONS", "SCHEMA_VERSION", "Attention", "AttentionKind", "CommandOptions", "EventSummary",
    "FleetState", "HeldEvent", "History", "HistoryItem", "HookStep", "Journal", "JournalEntry",
    "NotifiedTarget", "OperatorAnswer", "PolicyInForce", "RunningHook", "ShownWorkflow",
    "Status", "SuggestedCommand", "TargetFailure", "Vm", "WebConfigRejected",
]  # fmt: skip
