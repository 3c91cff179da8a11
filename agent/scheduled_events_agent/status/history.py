"""The journal as one list of events and of records about the agent, for the command ``history`` and the pages.

Every output lays out this list. The pages show less of a record than the command: every local user can read them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from scheduled_events_agent.status.events import event_view
from scheduled_events_agent.status.facts import Facts, History
from scheduled_events_agent.status.status import HistoryItem, Journal, JournalRecord, Vm

# The pages' text for each kind of record about the agent; None: that of the journal, because /status shows it too.
_PUBLIC_TEXTS: Mapping[str, str | None] = {
    "agent_started": None,
    "agent_stopped": None,
    "machine_paused": None,
    "notification_lost": None,
    "on_clear": "the command history says what its hooks did",  # why one failed may name its program
    "reload_rejected": "the policy file is rejected; the policy that was accepted last stays in force",
    "reloaded": None,
    "state_lost": None,
    "state_recreated": None,
    "state_settled": None,
}


class Placed(NamedTuple):
    """An item of the list, as a timeline shows it."""

    item: History | JournalRecord
    during: Sequence[JournalRecord]
    """The records about the agent from the time of the event."""


def merge(
    histories: Sequence[History],
    agent_records: Iterable[JournalRecord],
    *,
    most_between: int | None = None,
    most_during: int | None = None,
) -> list[History | JournalRecord]:
    """Events, and each record about the agent once, oldest first.

    ``most_between``: the most records from times without one of these events. ``most_during``: the most from the
    time of each event. None: all of them. Of too many, the latest are taken.
    """
    records = sorted(agent_records, key=lambda record: record.at)
    spans = [_span(history, records) for history in histories]
    during = {index for span in spans for index in span}
    between = [index for index in range(len(records)) if index not in during]
    chosen = {index for span in spans for index in _last(span, most_during)}
    chosen.update(_last(between, most_between))
    items: list[tuple[datetime, History | JournalRecord]] = [
        (history.workflow.first_seen_at, history) for history in histories
    ]
    items += [(records[index].at, records[index]) for index in sorted(chosen)]
    return [item for _, item in sorted(items, key=lambda item: item[0])]


def place(items: Sequence[History | JournalRecord]) -> Iterator[Placed]:
    """The list of ``merge`` as timelines: a record from the time of an event is shown with that event only."""
    records = [item for item in items if isinstance(item, JournalRecord)]
    during = {index for item in items if isinstance(item, History) for index in _span(item, records)}
    indexes = count()
    for item in items:
        if isinstance(item, History):
            span = _span(item, records)
            yield Placed(item, records[span.start : span.stop])
        elif next(indexes) not in during:
            yield Placed(item, ())


def is_over(history: History) -> bool:
    """Whether the event has ended."""
    # An event of another machine was closed by a record alone.
    return bool(history.records) and history.records[-1].kind == "closed"


def to_journal(items: Iterable[History | JournalRecord], at: datetime) -> Journal:
    """The list of ``merge`` as JSON has it."""
    facts = Facts(at=at, source="state_file", vm=Vm(names=(), vm_id=""))
    return Journal(
        at=at,
        histories=tuple(
            [
                HistoryItem(event=event_view(item.workflow, facts, is_kept=True), records=item.records)
                if isinstance(item, History)
                else HistoryItem(event=None, records=(item,))
                for item in items
            ]
        ),
    )


def to_public(agent_record: JournalRecord) -> JournalRecord:
    """The record about the agent as every local user may read it. Of a kind that is not known no text is shown."""
    text = _PUBLIC_TEXTS.get(agent_record.kind, "")
    return replace(agent_record, text=agent_record.text if text is None else text, detail="")


def _span(history: History, agent_records: Sequence[JournalRecord]) -> range:
    """The indexes of the records about the agent from the time of the event."""
    begins = bisect_left(agent_records, history.workflow.first_seen_at, key=lambda record: record.at)
    if not is_over(history):
        return range(begins, len(agent_records))
    return range(begins, bisect_right(agent_records, history.records[-1].at, key=lambda record: record.at))


def _last(indexes: Sequence[int], most: int | None) -> Sequence[int]:
    return indexes if most is None else indexes[max(0, len(indexes) - most) :]
