"""What other threads see of the engine: one frozen value, which is replaced as a whole and never changed.

So a thread that reads it twice in a row may get two of them, but never half of one.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from scheduled_events_agent.engine.identity import names_of
from scheduled_events_agent.engine.messages import FleetUpdate
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status import JournalEntry
from scheduled_events_agent.store import Loss, Waiting
from scheduled_events_agent.workflow import Board, RememberedEvent


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as it was when it last published: it copies nothing, since what it holds is never changed."""

    settings: Settings
    """The policy in force."""
    cycle_began_at: float
    """When the last cycle began, monotonic."""
    workflows: Board
    """The open ones."""
    identity: Identity
    is_identity_sure: bool
    """Whether the identity is not perhaps that of the VM whose disk this one has got as a copy."""
    incarnation: str
    """DocumentIncarnation of the last document that was decided on."""
    other_vm_events: int
    """How many events of that document only concern other VMs."""
    lacks_expired: bool
    """Whether that document was the first one that lacked a recommendation that had expired."""
    has_decided_on_stale: bool
    """Whether it was too old to approve an event by it."""
    remembered: Mapping[str, RememberedEvent]
    """What outlives the appearance of an event, by its key."""
    fleet: FleetUpdate
    fleet_not_ready: tuple[str, ...]
    """The other VMs that events of this VM wait for."""
    waiting: Mapping[str, Waiting]
    """The notifications that wait, by target."""
    losses: Mapping[str, Loss]
    """The notifications that were lost, by target."""
    agent_log: tuple[JournalEntry, ...]
    """The start of this agent, and how the one before ended."""
    unclean_starts: tuple[datetime, ...]
    """See ``Status``."""
    bugs: Mapping[str, str]
    """The events that could not be handled when last decided on: by id, the kind of the error."""
    store_failure: str
    """Why the last cycle could do nothing; "" if it could."""

    @property
    def names(self) -> tuple[str, ...]:
        """What documents may call this VM."""
        return names_of(self.settings.vm, self.identity)

    @property
    def needs_answer(self) -> bool:
        """Whether the next answer counts though it is that of before.

        The last one lacked an event that is not over yet, or it was too old to approve an event by it.
        """
        lacks_event = any(workflow.is_missing for workflow in self.workflows.values())
        return lacks_event or self.lacks_expired or (self.has_decided_on_stale and bool(self.workflows))
