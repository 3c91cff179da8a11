"""Keeps the document of the next cycle and the last one before it, and tracks which events are missing."""

from collections.abc import Collection

from msgspec.structs import replace

from scheduled_events_agent.imds.compare import Gone, Missing, Seen, compare, rename_fingerprint
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import MatchContext, decide
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.workflow import Workflow, Workflows, known_events

# An answer counts as another one after this share of a poll interval; the rest allows for network delays.
_INTERVAL_SHARE = 0.9


class DocumentTracker:
    """The documents. One stays new until its consequences are committed."""

    def __init__(self) -> None:
        self.new: Document | None = None
        self.latest: Document | None = None
        """The last document that was decided on."""
        self.other_vm_events = 0
        """Number of events in the last document that concern only other VMs, and are not followed."""
        self.unlisted: tuple[str, ...] = ()
        """Expired recommendations that two answers have lacked by now."""
        self.lacks_expired = False
        """Whether the last answer was the first one that lacked an expired recommendation."""
        self._departed: set[str] = set()
        """Keys of events that the last answer listed, but no longer for this VM."""
        self._missing_since: dict[str, float] = {}
        """Key of an event that the last answer lacked -> when the first answer lacked it, monotonic."""

    def receive(self, document: Document, now: float, names: tuple[str, ...]) -> None:
        """``now`` is monotonic; ``names``: the names that documents may use for this VM."""
        self.new = replace(document, answered=document.answered or now)
        for event in document.events:
            if event.key not in self._departed or event.affects(names) != "others":
                self._missing_since.pop(event.key, None)

    def recheck(self) -> None:
        """Have the next cycle decide on the last document again, if there is no newer one."""
        self.new = self.new or self.latest

    def committed(self, *, has_errors: bool) -> None:
        """The document is done with. After a bug, each cycle compares the same document again."""
        if self.new is not None:
            self.latest = self.new
        self.new = self.latest if has_errors else None

    def compare(
        self, workflows: Workflows, names: tuple[str, ...], settings: Settings, expired: Collection[str]
    ) -> list[Seen | Missing | Gone]:
        """The changes as signals. An event is gone when two answers that are a poll interval apart lack it.

        Events that concern only other VMs are counted and not followed, unless a rule may match them. An event
        that has not started and no longer names this VM counts as missing for this VM.

        ``expired``: see ``Remembered``.
        """
        document = self.new
        self.unlisted = ()
        if document is None:
            return []
        known = known_events(workflows)
        events = document.events
        forgettable: set[str] = set()
        if document.has_recommendations:
            forgettable = set(expired) - {event.key for event in events}
        else:  # Recommendations are not gone: documents of this api-version only omit them.
            known = {key: event for key, event in known.items() if not event.is_recommendation}
        followed = {one.event.key: one for one in workflows.values() if not one.is_over}
        departed = self._departed = {
            key
            for key, event in ((event.key, event) for event in events)
            if key in followed and _has_left(event, followed[key], names, settings)
        }
        if not any("others" in rule.when.affects for rule in settings.rules):
            alike = {rename_fingerprint(one) for one in known.values()}
            events = tuple([e for e in events if e.affects(names) != "others" or _is_one_of(e, known, alike)])
        events = tuple([event for event in events if event.key not in departed])
        self.other_vm_events = len(document.events) - len(events)
        listed = {event.key for event in events}
        lacked = (known.keys() - listed) | forgettable
        for key in lacked:
            self._missing_since.setdefault(key, document.answered)
        for key in listed:
            self._missing_since.pop(key, None)
        longest_ago = document.answered - _INTERVAL_SHARE * settings.imds.poll_interval
        twice = {key for key in lacked if self._missing_since[key] <= longest_ago}
        self.unlisted = tuple(forgettable & twice)
        self.lacks_expired = bool(forgettable - twice)
        missing = {one.event.key: one.event.key in twice for one in workflows.values() if one.is_missing}
        ended = {**document.ended, **{key: "Canceled" for key in departed if missing.get(key)}}
        found = compare(known, replace(document, events=events, ended=ended), missing)
        return [replace(one, names_others=True) if _is_of(one, departed) else one for one in found]


def _has_left(event: ScheduledEvent, followed: Workflow, names: tuple[str, ...], settings: Settings) -> bool:
    """Whether the event named this VM, has not started, and now names other VMs that no rule is for."""
    if followed.was_started or followed.event.is_started or event.status != "Scheduled":
        return False
    if followed.event.affects(names) not in ("self", "shared") or event.affects(names) != "others":
        return False
    facts = MatchContext(names=names, not_before_seen_at=followed.not_before_seen_at)
    return decide(settings.rules, settings.maintenance_windows, event, facts).rule is None


def _is_one_of(event: ScheduledEvent, known: Collection[str], alike: Collection[object]) -> bool:
    """Whether the event is followed already, perhaps under the id that it had before it started."""
    return event.key in known or (event.is_started and rename_fingerprint(event) in alike)


def _is_of(found: Seen | Missing | Gone, keys: Collection[str]) -> bool:
    return isinstance(found, Missing | Gone) and found.key in keys
