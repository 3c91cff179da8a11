"""The engine: receives, decides, commits, performs.

Owns the open workflows and all that outlives a cycle. Decides nothing about events (``workflow`` does) and
waits for nothing: it starts no thread, opens no connection and reads no clock but that of its ``Host``. The one
invariant: what was decided is on disk before any of it is done; what could not be written is decided again.

    engine.py     a cycle: receive, decide, commit, perform, publish
    snapshot.py   what other threads see of the engine
    document_tracker.py  the document to decide on, and what is missing in it
    remembered.py what outlives an event: operators' holds, recommendations that are over
    messages.py   what comes in, and what comes back
    protocols.py  the clock, and the interface of the executor
    operator_requests.py  what operators may have, and their answers
    hook_runs.py  hooks of events, how long they take; the hooks that run at the start if nothing is pending
    reporter.py    log, metrics and journal
    debugging.py  what only a log at level debug has of decisions
    outbox.py     notifications, until they are delivered
    identity.py   who this VM is, remembered
    fleet.py      what the fleet's thread last said, and what is requested of it
    maintenance.py     the state file: in its place, without old entries, with room for a full disk
"""

from scheduled_events_agent.engine.engine import Engine
from scheduled_events_agent.engine.messages import (
    FleetUpdate,
    HookCommand,
    HookDone,
    HookKey,
    MachinePaused,
    Message,
    NotificationDone,
    RunOnClear,
    hook_key,
    not_run_result,
)
from scheduled_events_agent.engine.protocols import Executor, Host
from scheduled_events_agent.engine.snapshot import Snapshot

__all__ = [
    "Engine",
    "Executor",
    "FleetUpdate",
    "HookCommand",
    "HookDone",
    "HookKey",
    "Host",
    "MachinePaused",
    "Message",
    "NotificationDone",
    "RunOnClear",
    "Snapshot",
    "hook_key",
    "not_run_result",
]  # fmt: skip
