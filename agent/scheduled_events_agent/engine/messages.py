"""What the engine works with: its machine, the executor of its decisions, and the messages it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Literal, Protocol

from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document
from scheduled_events_agent.policy.settings import FleetSettings
from scheduled_events_agent.workflow import ApprovalAnswered, FleetEventStatus, HookOutcome, Rank, RunHook

HookKey = tuple[str, str]
"""Workflow and stage: what a workflow runs one hook of at a time."""
ON_CLEAR: HookKey = ("", "on_clear")
"""Under which the hooks of on_clear run, which are of no workflow."""


@dataclass(frozen=True)
class RunOnClear:
    """Start a hook of on_clear; its result comes back as HookEnded."""

    hook: str
    workflow_id: str = ""
    stage: Literal["on_clear"] = "on_clear"
    rank: Rank = (9, 0.0, 0.0)


HookStart = RunHook | RunOnClear


@dataclass(frozen=True)
class Paused:
    """The machine stood still."""

    seconds: float


@dataclass(frozen=True)
class HookEnded:
    """A hook has ended."""

    effect: HookStart
    result: HookResult


@dataclass(frozen=True)
class NoticeEnded:
    """A notice was delivered, or is lost."""

    id: int
    target: str
    lost: str = ""
    """Why it is lost; "" if it was delivered."""


@dataclass(frozen=True)
class FleetUpdate:
    """How the events of this VM stand with its fleet."""

    group: str = ""
    error: str = ""
    """Why the store cannot be used; "" if it can."""
    unavailable_since: datetime | None = None
    unavailable_from: float | None = None
    """The same moment, monotonic."""
    statuses: Mapping[str, FleetEventStatus] = field(default_factory=dict)
    listed_at: float = -inf
    """When the list was sent that they come from, monotonic."""
    settings: FleetSettings | None = None
    """With which the store was asked."""

    def same_name_warnings(self, vm_id: str) -> tuple[str, ...]:
        """One for each other VM that goes by the name of this one, which has ``vm_id``."""
        others = {status.other_vm_id for status in self.statuses.values()} - {""}
        return tuple(
            f"another VM uses the name of this one: vmId {other}, this one has {vm_id}" for other in sorted(others)
        )


Message = Document | Identity | ApprovalAnswered | HookEnded | Paused | NoticeEnded | FleetUpdate


class Notify(Protocol):
    """Has new notices sent, which are in the state file. Waits for nothing."""

    def __call__(self, *, is_urgent: bool) -> None:
        """For each of them NoticeEnded comes back. ``is_urgent``: a target that failed is tried again now."""


def key_of(effect: HookStart) -> HookKey:
    """What the hook is known by while it runs."""
    return effect.workflow_id, effect.stage


def without_run(hook: str, outcome: HookOutcome, detail: str) -> HookResult:
    """The result of a hook that was never started."""
    return HookResult(
        hook=hook, outcome=outcome, exit_code=None, attempts=0, duration_seconds=0.0, tail="", detail=detail
    )
