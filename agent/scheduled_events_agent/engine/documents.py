"""Documents: the one that the next turn decides on, the last one before, and what it lacks."""

from math import inf

from msgspec.structs import replace

from scheduled_events_agent.events import Document, Gone, Missing, Seen, compare
from scheduled_events_agent.settings import Settings
from scheduled_events_agent.workflow import Board, known_events

# Share of a poll interval after which an answer counts as another one; the rest is network noise.
_INTERVAL_SHARE = 0.9


class Documents:
    """A document stays new until a commit holds what follows from it."""

    def __init__(self) -> None:
        self.new: Document | None = None
        self.latest: Document | None = None
        """The last one that was decided on."""
        self.others_events = 0
        """How many events of the last document only concern other VMs, and are not followed."""
        self._lacked: dict[str, float] = {}
        """Key of an event that the last answer lacked -> when the first answer lacked it, monotonic."""

    def take(self, document: Document, now: float) -> None:
        """``now`` is monotonic."""
        self.new = replace(document, answered=document.answered or now)
        for event in document.events:
            self._lacked.pop(event.key, None)

    def look_again(self) -> None:
        """Decide on the last document once more, if there is no newer one."""
        self.new = self.new or self.latest

    def committed(self, *, has_faults: bool) -> None:
        """After a fault, each turn compares the same document again."""
        if self.new is not None:
            self.latest = self.new
        self.new = self.latest if has_faults else None

    def compare(self, board: Board, names: tuple[str, ...], settings: Settings) -> list[Seen | Missing | Gone]:
        """What is new. An event is gone when two answers that are a poll interval apart lack it.

        Events that only concern other VMs are counted and not followed, unless a rule may take them.
        """
        document = self.new
        if document is None:
            return []
        known = known_events(board)
        events = document.events
        if not document.has_recommendations:
            # They are not gone: this api-version only leaves them out.
            known = {key: event for key, event in known.items() if not event.is_recommendation}
        if not any("others" in rule.when.affects for rule in settings.rules):
            events = tuple([e for e in events if e.key in known or e.affects(names) != "others"])
        self.others_events = len(document.events) - len(events)
        for key in known.keys() - {event.key for event in events}:
            self._lacked.setdefault(key, document.answered)
        longest_ago = document.answered - _INTERVAL_SHARE * settings.imds.poll_interval
        missing = {
            workflow.event.key: self._lacked.get(workflow.event.key, inf) <= longest_ago
            for workflow in board.values()
            if workflow.is_missing
        }
        return compare(known, replace(document, events=events), missing)
