"""What there is to see: the agent and its events as values, and the words for them.

status.py     the types that commands, pages and programs read; docs/json.md says what each field is
attention.py  what needs a person
summaries.py  the headline, and each event in a few words
messages.py   sentences for people: terminal, page, log, service manager
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
    OperatorWord,
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
    "NotifiedTarget", "OperatorAnswer", "OperatorWord", "PolicyInForce", "RunningHook", "ShownWorkflow",
    "Status", "SuggestedCommand", "TargetFailure", "Vm", "WebConfigRejected",
]  # fmt: skip
