"""The types from which the status and the history are made. No output contains one of them."""

from datetime import datetime
from typing import Literal

import msgspec

from scheduled_events_agent.status.status import AgentStatus, JournalRecord
from scheduled_events_agent.workflow import Stage, Workflow


class RunningHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that runs now, or waits for another run of the same hook."""

    workflow_id: str
    """"" for a hook of on_clear."""
    stage: Stage | Literal["on_clear"]
    hook: str
    state: Literal["queued", "running"] = "running"
    since: datetime
    limit_seconds: float | None = None
    """How long after ``since`` it is ended at the latest. None while it waits."""


class Facts(AgentStatus, frozen=True, kw_only=True):
    """The agent at one moment, and its open events as it keeps them."""

    workflows: tuple[Workflow, ...] = ()
    running: tuple[RunningHook, ...] = ()

    def running_for(self, workflow_id: str) -> tuple[RunningHook, ...]:
        """The hooks that run for this event; with "", those of on_clear."""
        return tuple([hook for hook in self.running if hook.workflow_id == workflow_id])


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One event from first sight to its end, or to now, as it is stored."""

    workflow: Workflow
    records: tuple[JournalRecord, ...]
