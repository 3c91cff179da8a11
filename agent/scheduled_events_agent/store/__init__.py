"""The state that survives: workflows, journal, requests, unsent notifications, in one SQLite file; and a policy.

store.py            open, load, commit
file.py             the file: made, opened, upgraded, quarantined if it is damaged
outbox.py           notifications that are not delivered yet
presence.py         whether the file is still in its place
accepted_policy.py  the policy that was accepted last, in a file of its own
"""

from scheduled_events_agent.store.file import FILE_NAME, RESERVE_BYTES, StoreError
from scheduled_events_agent.store.outbox import Backlog, Loss, OutboxItem, OutboxTable, notified
from scheduled_events_agent.store.presence import LOCK_NAME
from scheduled_events_agent.store.store import (
    MAX_EVENT_RECORDS,
    NO_CHANGES,
    REQUEST_VALID_SECONDS,
    AgentRecord,
    CommitResult,
    MetaKey,
    RememberedChanges,
    Request,
    RequestAnswer,
    StatusRequest,
    Store,
    WithdrawnError,
)

__all__ = [
    "FILE_NAME",
    "LOCK_NAME",
    "MAX_EVENT_RECORDS",
    "NO_CHANGES",
    "REQUEST_VALID_SECONDS",
    "RESERVE_BYTES",
    "AgentRecord",
    "Backlog",
    "CommitResult",
    "Loss",
    "MetaKey",
    "OutboxItem",
    "OutboxTable",
    "RememberedChanges",
    "Request",
    "RequestAnswer",
    "StatusRequest",
    "Store",
    "StoreError",
    "WithdrawnError",
    "notified",
]  # fmt: skip
