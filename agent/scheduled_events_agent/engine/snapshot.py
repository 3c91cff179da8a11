"""The engine's state for other threads: one frozen value, which is replaced as a whole and never changed.

So a thread that reads it twice may get two different snapshots, but never a part of one.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from scheduled_events_agent.engine.identity import names_of
from scheduled_events_agent.engine.messages import FleetUpdate
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status import JournalRecord, StateLost
from scheduled_events_agent.store import Backlog, Loss
from scheduled_events_agent.workflow import RememberedEvent, Workflows


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state when it last published. It is no copy: the values in it are never changed."""

    settings: Settings
    """The policy in force."""
    cycle_began_at: float
    """When the last cycle began, monotonic."""
    workflows: Workflows
    """The open workflows."""
    identity: Identity
    is_identity_sure: bool
    """False if the identity may be that of another VM whose disk was copied to this one."""
    incarnation: str
    """DocumentIncarnation of the last document that was decided on."""
    other_vm_events: int
    """Number of events in that document that concern only other VMs."""
    lacks_expired: bool
    """Whether that document was the first one that lacked an expired recommendation."""
    has_decided_on_stale: bool
    """Whether that document was too old for an approval."""
    holds: Mapping[str, RememberedEvent]
    """Operators' holds by the event's key, also of events that are not in the document."""
    fleet: FleetUpdate
    fleet_not_ready: tuple[str, ...]
    """The other VMs that events of this VM wait for."""
    waiting: Mapping[str, Backlog]
    """The notifications that wait, by target."""
    losses: Mapping[str, Loss]
    """The notifications that were lost, by target."""
    agent_log: tuple[JournalRecord, ...]
    """The start of this agent, and the last stop of an agent."""
    unclean_starts: tuple[datetime, ...]
    """Starts after a crash; the field of the same name in ``Status``."""
    state_lost: StateLost | None
    """The loss of state, until on_clear or an operator has settled it."""
    bugs: Mapping[str, str]
    """The events that could not be handled in the last decision: the kind of the error, by the event's id."""
    store_failure: str
    """Why the last cycle could do nothing; "" if it did its work."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that documents may use for this VM."""
        return names_of(self.settings.vm, self.identity)

    @property
    def needs_answer(self) -> bool:
        """Whether the next answer is needed even if its text is the same as before.

        It is if the last answer lacked an event that is not over yet, or was too old for an approval.
        """
        has_missing_event = any(workflow.is_missing for workflow in self.workflows.values())
        return has_missing_event or self.lacks_expired or (self.has_decided_on_stale and bool(self.workflows))
