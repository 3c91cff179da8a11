"""The messages that the engine receives, and the keys and results of the hooks that they are about."""

from collections.abc import Mapping
from datetime import datetime
from math import inf
from typing import Literal, Protocol

import msgspec

from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document
from scheduled_events_agent.policy.settings import FleetSettings
from scheduled_events_agent.workflow import ApprovalAnswered, FleetEventStatus, HookOutcome, Rank, RunHook

HookKey = tuple[str, str]
"""Workflow and stage. Only one hook runs at a time for each key."""
ON_CLEAR: HookKey = ("", "on_clear")
"""The key of the hooks of on_clear, which belong to no workflow."""


class RunOnClear(msgspec.Struct, frozen=True):
    """Start a hook of on_clear; its result comes back as HookDone."""

    hook: str
    workflow_id: str = ""
    stage: Literal["on_clear"] = "on_clear"
    rank: Rank = (9, 0.0, 0.0)


HookCommand = RunHook | RunOnClear


class MachinePaused(msgspec.Struct, frozen=True):
    """The machine was paused."""

    seconds: float


class HookDone(msgspec.Struct, frozen=True):
    """A hook has ended."""

    effect: HookCommand
    result: HookResult


class NotificationDone(msgspec.Struct, frozen=True):
    """A notification was delivered, or is lost."""

    id: int
    target: str
    lost: str = ""
    """Why it is lost; "" if it was delivered."""
    is_expired: bool = False
    """It is lost as it should be: no one misses it so late."""


class FleetUpdate(msgspec.Struct, frozen=True):
    """The state of this VM's events in its fleet."""

    group: str = ""
    error: str = ""
    """Why the store cannot be used; "" if it can."""
    unavailable_since: datetime | None = None
    unavailable_from: float | None = None
    """Since when the store cannot be used, monotonic."""
    statuses: Mapping[str, FleetEventStatus] = {}
    listed_at: float = -inf
    """When the list behind the statuses was sent, monotonic."""
    settings: FleetSettings | None = None
    """The settings with which the store was asked."""

    def same_name_warnings(self, vm_id: str) -> tuple[str, ...]:
        """One warning for each other VM that uses this VM's name. ``vm_id``: that of this VM."""
        others = {status.other_vm_id for status in self.statuses.values()} - {""}
        return tuple(
            f"another VM uses the name of this one: vmId {other}, this one has {vm_id}" for other in sorted(others)
        )


Message = Document | Identity | ApprovalAnswered | HookDone | MachinePaused | NotificationDone | FleetUpdate


class Notify(Protocol):
    """Has the new notifications in the state file sent. Waits for nothing."""

    def __call__(self, *, is_urgent: bool) -> None:
        """For each notification NotificationDone comes back. ``is_urgent``: retry a target that failed now."""


def hook_key(effect: HookCommand) -> HookKey:
    """The key of the hook while it runs."""
    return effect.workflow_id, effect.stage


def not_run_result(hook: str, outcome: HookOutcome, detail: str) -> HookResult:
    """The result of a hook that was never started."""
    return HookResult(
        hook=hook,
        outcome=outcome,
        exit_code=None,
        attempts=0,
        duration_seconds=0.0,
        tail="",
        detail=detail,
        has_run=False,
    )
