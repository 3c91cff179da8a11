"""Operators' holds, remembered beyond the appearance of an event for which they were given.

An event may vanish and come back under its id: a hold counts until it is released, or until a day after the event
was last in a document. Pure but for ``Holds``, which keeps what the state file has.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from msgspec.structs import replace

from scheduled_events_agent.store import HoldChanges, Store
from scheduled_events_agent.workflow import OperatorSpoke, RememberedHold, Signal, Step, Workflow

REMEMBERED = timedelta(days=1)
"""So long after its event was last in a document, a hold counts."""


class Holds:
    """What is remembered, by the event's key. For the engine's thread; ``known`` is replaced, never changed."""

    def __init__(self, store: Store) -> None:
        """Raises StoreError."""
        self._store = store
        self.known: Mapping[str, RememberedHold] = store.load_holds()

    def committed(self, changes: HoldChanges) -> None:
        """The changes are on the disk."""
        if not (changes.put or changes.removed):
            return
        kept = {key: hold for key, hold in self.known.items() if key not in changes.removed}
        self.known = {**kept, **changes.put}

    def release(self, key: str) -> None:
        """Forget the hold of an event that is not in the document. Raises StoreError."""
        self._store.forget_holds([key])
        self.committed(HoldChanges(removed=frozenset({key})))

    def expire(self, now: datetime, workflows: Iterable[Workflow]) -> None:
        """Forget what is a day old, but for events that are pending. Raises StoreError."""
        pending = {workflow.event.key for workflow in workflows}
        expired = {key for key, hold in self.known.items() if now - hold.last_seen_at > REMEMBERED}
        old = expired - pending
        if old:
            self._store.forget_holds(old)
            self.committed(HoldChanges(removed=frozenset(old)))

    def forget(self) -> None:
        """They were another VM's; the state file has none of them any more."""
        self.known = {}


def hold_changes(
    known: Mapping[str, RememberedHold], signals: Iterable[Signal], steps: Iterable[Step], now: datetime
) -> HoldChanges:
    """What these steps change in what is remembered; it is committed with them."""
    users = {one.workflow_id: one.user for one in signals if isinstance(one, OperatorSpoke) and one.word == "held"}
    put: dict[str, RememberedHold] = {}
    removed: set[str] = set()
    for workflow in {step.workflow.id: step.workflow for step in steps}.values():
        key = workflow.event.key
        hold = known.get(key)
        if workflow.is_gone:
            continue
        has_started = workflow.was_started or workflow.event.is_started
        if workflow.operator != "held" or has_started:
            removed |= {key} & known.keys()
            continue
        seen_at = workflow.missing_since or now
        if hold is None or workflow.id in users:
            put[key] = RememberedHold(user=users.get(workflow.id, ""), at=now, last_seen_at=seen_at)
        elif seen_at != hold.last_seen_at:
            put[key] = replace(hold, last_seen_at=seen_at)
    return HoldChanges(put=put, removed=frozenset(removed))
