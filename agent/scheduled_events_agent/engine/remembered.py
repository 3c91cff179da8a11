"""Remembers decisions longer than an event is listed: operators' holds, and recommendations that are over.

An event may vanish and come back under its id. A hold counts until it is released, or until a day after the event
was last in a document. A recommendation may be listed long after it has expired, and must not begin again.
All is pure except ``Remembered``, which keeps the contents of the state file.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from msgspec.structs import replace

from scheduled_events_agent.imds.compare import Seen
from scheduled_events_agent.store import RememberedChanges, Store
from scheduled_events_agent.workflow import OperatorCommand, RememberedEvent, Signal, Transition, Workflow

_REMEMBERED = timedelta(days=1)
# If a recommendation is still listed, that is written only once in this time.
_SEEN_AGAIN = timedelta(hours=1)


class Remembered:
    """The remembered events by their keys. For the engine's thread; ``known`` is replaced, never changed."""

    def __init__(self, store: Store) -> None:
        """Raises StoreError."""
        self._store = store
        self.known: Mapping[str, RememberedEvent] = store.load_remembered()

    @property
    def holds(self) -> dict[str, RememberedEvent]:
        """Operators' holds, also those of events that are not in the document."""
        return {key: one for key, one in self.known.items() if one.reason == "hold"}

    @property
    def expired(self) -> frozenset[str]:
        """The recommendations that are over, though documents may list them."""
        return frozenset(key for key, one in self.known.items() if one.reason == "expired")

    def committed(self, changes: RememberedChanges) -> None:
        """Take over the changes, which are on disk."""
        if changes:
            kept = {key: one for key, one in self.known.items() if key not in changes.removed}
            self.known = {**kept, **changes.put}

    def release(self, key: str) -> None:
        """Forget the hold of an event that is not in the document. Raises StoreError."""
        self._change(RememberedChanges(removed=frozenset({key})))

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


def changes_by_time(
    known: Mapping[str, RememberedEvent], now: datetime, pending: Collection[str], listed: Collection[str]
) -> RememberedChanges:
    """The changes that are due by now: an event is forgotten a day after it was last seen."""
    old = {key for key, one in known.items() if now - one.last_seen_at > _REMEMBERED}
    seen_again = {
        key: replace(one, last_seen_at=now)
        for key, one in known.items()
        if one.reason == "expired" and key in listed and now - one.last_seen_at > _SEEN_AGAIN
    }
    return RememberedChanges(put=seen_again, removed=frozenset(old.difference(pending, listed)))


def changes_by_transitions(
    known: Mapping[str, RememberedEvent],
    signals: Iterable[Signal],
    transitions: Iterable[Transition],
    unlisted: Iterable[str],
    now: datetime,
) -> RememberedChanges:
    """The changes by these transitions, to be committed with them. ``unlisted``: keys that two answers lack."""
    signals = list(signals)
    transitions = list(transitions)
    put, removed = _changes_of_holds(known, signals, transitions, now)
    removed |= known.keys() & set(unlisted)
    # Only an event that has started goes on under another id, and a hold ends with the start.
    removed |= known.keys() & {one.renamed_from for one in signals if isinstance(one, Seen)}
    for transition in transitions:
        if any(record.kind == "expired" for record in transition.records):
            put[transition.workflow.event.key] = RememberedEvent(reason="expired", at=now, last_seen_at=now)
    return RememberedChanges(put=put, removed=frozenset(removed - put.keys()))


def _changes_of_holds(
    known: Mapping[str, RememberedEvent],
    signals: Iterable[Signal],
    transitions: Iterable[Transition],
    now: datetime,
) -> tuple[dict[str, RememberedEvent], set[str]]:
    users = {
        one.workflow_id: one.user for one in signals if isinstance(one, OperatorCommand) and one.action == "hold"
    }
    put: dict[str, RememberedEvent] = {}
    removed: set[str] = set()
    for workflow in {transition.workflow.id: transition.workflow for transition in transitions}.values():
        key = workflow.event.key
        hold = known.get(key)
        if workflow.is_over and workflow.id not in users:
            continue
        has_started = workflow.was_started or workflow.event.is_started
        if workflow.operator_action != "hold" or has_started:
            removed |= {key} & known.keys()
            continue
        seen_at = workflow.missing_since or now
        if hold is None or workflow.id in users:
            user = users.get(workflow.id, "")
            put[key] = RememberedEvent(reason="hold", user=user, at=now, last_seen_at=seen_at)
        elif seen_at != hold.last_seen_at:
            put[key] = replace(hold, last_seen_at=seen_at)
    return put, removed
