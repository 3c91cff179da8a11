"""``history``: shows the journal, as one timeline for each event.

It only reads, and shows the texts of the journal unchanged.
"""

import argparse
import heapq
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter

from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.operator import find_by_prefix, find_state_dir
from scheduled_events_agent.cli.status import title
from scheduled_events_agent.cli.terminal import Cell, Style, Terminal, print_json
from scheduled_events_agent.policy.durations import format_elapsed, format_time, parse_duration, parse_time
from scheduled_events_agent.status import JournalRecord
from scheduled_events_agent.status.facts import History
from scheduled_events_agent.status.history import is_over, merge, place, to_journal
from scheduled_events_agent.store import MAX_EVENT_RECORDS, Store

_DEFAULT_LIMIT = 20
_HOOK_STYLES: dict[str, Style] = {"succeeded": "green", "failed": "red", "timed_out": "red", "not_started": "red"}
_STYLES: dict[str, Style] = {
    "held": "yellow",
    "hook_missing": "red",
    "approval_needed": "yellow",
    "without_slot": "yellow",
    "unprepared": "yellow",
    "vm_unknown": "red",
    "recovery_failed": "red",
    "approval_failed": "yellow",
    "approved": "green",
    "operator": "cyan",
    "machine_paused": "yellow",
    "reload_rejected": "yellow",
    "state_lost": "red",
    "state_recreated": "red",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``history``."""
    parser.description = (
        "Shows the journal: for each event a timeline from first sight to recovery, with the ends of hooks and "
        "the last of their output. A change that says nothing new for this VM, such as another description or a "
        "NotBefore moved by less than a minute, is recorded once a minute. Records about the agent are in the "
        "timelines of the events during which they were made, and between these unless an event is chosen."
    )
    parser.add_argument("--event", metavar="ID", help="only this event: its id, or a beginning that fits only one")
    parser.add_argument(
        "--since",
        metavar="WHEN",
        type=_since,
        help="only what was recorded since then: 2d, 1h30m or a time such as 2022-04-11T22:12:00Z",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        default=_DEFAULT_LIMIT,
        help=f"the latest N events, as many records about the agent between them, and up to {MAX_EVENT_RECORDS} "
        f"during each (default: {_DEFAULT_LIMIT}; 0: all)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: histories, oldest first, each {event, records}, with event null for each record "
        "about the agent",
    )
    add_state_options(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    items = _load(arguments)
    if arguments.json:
        print_json(to_journal(items, datetime.now(UTC)))
        return 0
    lines = list(_format_journal(items, datetime.now(UTC), Terminal.of(sys.stdout)))
    print(*(lines or ["The journal has no matching entries."]), sep="\n")
    return 0


def _load(arguments: argparse.Namespace) -> list[History | JournalRecord]:
    limit = arguments.limit or None
    is_chosen = arguments.event is not None
    with closing(Store.open_readonly(find_state_dir(arguments))) as store:
        key: str | None = None
        if is_chosen:
            key = find_by_prefix(arguments.event, store.find_workflows())[0].event.key
        histories = store.load_histories(
            since=arguments.since, limit=limit or -1, is_wanted=lambda one: key is None or one.event.key == key
        )
        agent_records = store.load_records(since=arguments.since)
    return merge(
        histories,
        agent_records,
        most_between=0 if is_chosen else limit,
        most_during=limit and MAX_EVENT_RECORDS,
    )


def _format_journal(items: Sequence[History | JournalRecord], now: datetime, terminal: Terminal) -> Iterator[str]:
    was_agent_record = True
    for index, (item, agent_records) in enumerate(place(items)):
        is_agent_record = not isinstance(item, History)
        if index and not (is_agent_record and was_agent_record):
            yield ""
        was_agent_record = is_agent_record
        if isinstance(item, History):
            yield from _timeline(item, agent_records, now, terminal)
        else:
            style = _STYLES.get(item.kind, "dim")
            first, *more = _lines(item)
            text = f"{format_time(item.at)}  {item.kind.replace('_', ' ')}: {first}"
            for line in (text, *[f"    {line}" for line in more]):
                yield from terminal.line(line, style, indent=4)


def _timeline(
    history: History, agent_records: Iterable[JournalRecord], now: datetime, terminal: Terminal
) -> Iterator[str]:
    workflow = history.workflow
    began = history.workflow.first_seen_at
    event = workflow.event
    if is_over(history):
        end = history.records[-1]
        outcome = end.text
        period = f"until {format_time(end.at)}, for {format_elapsed(began, end.at)}"
    else:
        outcome = f"is pending: {workflow.phase.replace('_', ' ')}"
        period = f"until now, for {format_elapsed(began, now)}"
    rule = f"rule {workflow.decision.rule}" if workflow.decision.rule else "no rule"
    yield from terminal.line(f"{title(event.type, event.id)} {outcome}", "bold", indent=4)
    yield from terminal.line(f"  {rule}; seen from {format_time(began)} {period}", "dim", indent=4)
    # Records of the event keep their order, even if the clock was changed.
    records = list(heapq.merge(history.records, agent_records, key=lambda record: record.at))
    rows = [(record.at.date(), row) for record in records for row in _record_rows(record, began)]
    widest = [max([row[column].text for _, row in rows], key=len, default="") for column in range(3)]
    for day, rows_of_day in groupby(rows, key=itemgetter(0)):
        yield from terminal.line(f"  {day} UTC", "dim")
        yield from terminal.table([row for _, row in rows_of_day], indent=2, widest=widest, right=(1,))


def _lines(record: JournalRecord) -> list[str]:
    """The text of a record. About an event it is one line: a description from Azure must not look like more."""
    return [record.text] if record.event_id else record.text.splitlines() or [""]


def _record_rows(record: JournalRecord, began: datetime) -> Iterator[tuple[Cell, ...]]:
    style = _HOOK_STYLES.get(record.outcome, "") or _STYLES.get(record.kind, "" if record.event_id else "dim")
    first, *more = _lines(record)
    texts = (
        f"{record.at:%H:%M:%S}",  # its day, and that it is UTC, stand above
        f"+{format_elapsed(began, record.at)}",
        record.kind.replace("_", " "),
        first,
    )
    yield tuple([Cell(text, style) for text in texts])
    for line in more:
        yield Cell(""), Cell(""), Cell(""), Cell(line, style)
    has_failed = _HOOK_STYLES.get(record.outcome) == "red"
    # The detail of a start is the id of the boot.
    for line in record.detail.splitlines() if record.kind != "agent_started" else ():
        yield Cell(""), Cell(""), Cell(""), Cell(f"| {line}", "" if has_failed else "dim", indent=2)


def _since(text: str) -> datetime:
    with suppress(ValueError):
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    try:
        return parse_time(text, instead="a duration such as 2d or 1h30m, or ")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"expected a number, 0 for all; got {text!r}")
    return int(text)
