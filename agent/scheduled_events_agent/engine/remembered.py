"""Remembers facts longer than an event is listed: operators' holds, and recommendations that are over.

An event may vanish and come back under its id. A hold counts until it is released, or until a day after the event
was last in a document. A recommendation may be listed long after it has expired, and must not begin again. One
that has expired may be held as well.
All is pure except ``Remembered``, which keeps the contents of the state file.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from datetime import datetime, timedelta
from typing import get_args

from msgspec.structs import replace

from scheduled_events_agent.imds.compare import Seen
from scheduled_events_agent.store import RememberedChanges, Store
from scheduled_events_agent.workflow import (
    OperatorCommand,
    RememberedEvent,
    RememberedFact,
    RememberedKey,
    Signal,
    Transition,
    Workflow,
)

_REMEMBERED = timedelta(days=1)
# If an event without an open workflow is still listed, that is written only once in this time.
_SEEN_AGAIN = timedelta(hours=1)
_FACTS: tuple[RememberedFact, ...] = get_args(RememberedFact)


class Remembered:
    """The remembered events. For the engine's thread; ``known`` is replaced, never changed."""

    def __init__(self, store: Store) -> None:
        """Raises StoreError."""
        self._store = store
        self.known: Mapping[RememberedKey, RememberedEvent] = store.load_remembered()

    @property
    def holds(self) -> dict[str, RememberedEvent]:
        """Operators' holds by the event's key, also those of events that are not in the document."""
        return {key: one for (fact, key), one in self.known.items() if fact == "hold"}

    @property
    def expired(self) -> frozenset[str]:
        """Keys of the recommendations that are over, though documents may list them."""
        return frozenset(key for fact, key in self.known if fact == "expired")

    def committed(self, changes: RememberedChanges) -> None:
        """Take over the changes, which are on disk."""
        if changes:
            self.known = with_changes(self.known, changes)

    def release(self, key: str) -> None:
        """Forget the hold of an event that is not pending. Raises StoreError."""
        self._change(RememberedChanges(removed=frozenset({("hold", key)})))

    def maintain(self, now: datetime, pending: Iterable[Workflow], listed: Collection[str]) -> None:
        """Forget events that were last seen a day ago. Raises StoreError.

        ``listed``: keys of the last document's events.
        """
        self._change(changes_by_time(self.known, now, {one.event.key for one in pending}, listed))

    def _change(self, changes: RememberedChanges) -> None:
        if changes:
            self._store.change_remembered(changes)
            self.committed(changes)

    def forget(self) -> None:
        """Forget everything: it was another VM's, and has been deleted from the state file."""
        self.known = {}


def with_changes(
    known: Mapping[RememberedKey, RememberedEvent], changes: RememberedChanges
) -> dict[RememberedKey, RememberedEvent]:
    """The remembered events after the changes."""
    kept = {key: one for key, one in known.items() if key not in changes.removed}
    return {**kept, **changes.put}


def changes_by_time(
    known: Mapping[RememberedKey, RememberedEvent],
    now: datetime,
    pending: Collection[str],
    listed: Collection[str],
) -> RememberedChanges:
    """The changes that are due by now: an event is forgotten a day after it was last seen."""
    put: dict[RememberedKey, RememberedEvent] = {}
    removed: set[RememberedKey] = set()
    for (fact, key), one in known.items():
        unseen = now - one.last_seen_at
        if key in listed and unseen > _SEEN_AGAIN:
            put[fact, key] = replace(one, last_seen_at=now)
        elif key not in pending and key not in listed and unseen > _REMEMBERED:
            removed.add((fact, key))
    return RememberedChanges(put=put, removed=frozenset(removed))


def changes_by_transitions(
    known: Mapping[RememberedKey, RememberedEvent],
    signals: Iterable[Signal],
    transitions: Iterable[Transition],
    unlisted: Iterable[str],
    now: datetime,
) -> RememberedChanges:
    """The changes by these transitions, to be committed with them.

    ``unlisted``: keys of expired recommendations that two answers lack.
    """
    signals = list(signals)
    transitions = list(transitions)
    expired = {
        transition.workflow.id: transition.workflow.event.key
        for transition in transitions
        if _has_expired(transition)
    }
    put, removed = _changes_of_holds(known, signals, transitions, expired, now)
    removed |= {("expired", key) for key in unlisted}
    # Only an event that has started goes on under another id, and a hold ends with the start.
    renamed = [
        signal.renamed_from for signal in signals if isinstance(signal, Seen) and signal.renamed_from is not None
    ]
    removed |= {(fact, key) for fact in _FACTS for key in renamed}
    for key in expired.values():
        put["expired", key] = RememberedEvent(at=now, last_seen_at=now)
    return RememberedChanges(put=put, removed=frozenset(removed & known.keys() - put.keys()))


def _has_expired(transition: Transition) -> bool:
    return any(record.kind == "expired" for record in transition.records)


def _changes_of_holds(
    known: Mapping[RememberedKey, RememberedEvent],
    signals: Iterable[Signal],
    transitions: Iterable[Transition],
    expired: Container[str],
    now: datetime,
) -> tuple[dict[RememberedKey, RememberedEvent], set[RememberedKey]]:
    """``expired``: ids of the workflows that have expired by these transitions."""
    held_now = {one.workflow_id for one in signals if isinstance(one, OperatorCommand) and one.action == "hold"}
    put: dict[RememberedKey, RememberedEvent] = {}
    removed: set[RememberedKey] = set()
    for workflow in {transition.workflow.id: transition.workflow for transition in transitions}.values():
        key: RememberedKey = ("hold", workflow.event.key)
        if workflow.is_over and workflow.id not in held_now and workflow.id not in expired:
            continue
        operator = workflow.operator
        has_started = workflow.was_started or workflow.event.is_started
        if operator is None or operator.action != "hold" or has_started:
            removed.add(key)
            continue
        seen_at = workflow.missing_since or now
        hold = RememberedEvent(user=operator.user, at=operator.at, last_seen_at=seen_at)
        if hold != known.get(key):
            put[key] = hold
    return put, removed
