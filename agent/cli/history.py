"""``history``: the journal, told as one timeline for each event.

Owns which events are shown and how a timeline looks. The one invariant: it only reads, and shows what the journal
says in the journal's own words.
"""

import argparse
import heapq
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.cli.operator import add_state_options, find_by_prefix, find_state_dir
from agent.cli.terminal import Style, Terminal, print_json

if TYPE_CHECKING:
    from agent.status import History, JournalEntry
    from agent.workflow import Workflow

_DEFAULT_LIMIT = 20
_HOOK_STYLES: dict[str, Style] = {"succeeded": "green", "failed": "red", "timed_out": "red", "not_started": "red"}
_STYLES: dict[str, Style] = {
    "held": "yellow",
    "blocked": "yellow",
    "recovery_failed": "red",
    "approval_failed": "yellow",
    "approved": "green",
    "operator": "cyan",
    "pause": "yellow",
    "reload_refused": "yellow",
    "state_lost": "red",
}


def add_parsers(commands: Any) -> None:
    """Register ``history``."""
    parser = commands.add_parser(
        "history",
        help="what was done about which event, and how it ended",
        description="Shows the journal: for each event a timeline from first sight to recovery, with the ends of "
        "hooks and the last of their output; and between them what concerns the agent, unless events are chosen.",
    )
    parser.add_argument("--event", metavar="ID", help="only this event: its id, or a beginning that fits only one")
    parser.add_argument(
        "--since",
        metavar="WHEN",
        type=_since,
        help="only what was noted since then: 2d, 1h30m or a time such as 2022-04-11T22:12:00Z",
    )
    parser.add_argument("--rule", metavar="NAME", help="only events that this rule took")
    parser.add_argument("--type", metavar="TYPE", help="only events of this type, such as Reboot")
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        default=_DEFAULT_LIMIT,
        help=f"the latest N events, and as many notes of the agent (default: {_DEFAULT_LIMIT}; 0: all)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: histories, oldest first, each {workflow, entries}, with workflow null for a note of the "
        "agent",
    )
    add_state_options(parser)
    parser.set_defaults(handler=_run_history)


def _run_history(arguments: argparse.Namespace) -> int:
    # As are the imports below: heavy, and --help does not need them.
    from agent.status import History, HistoryItem, Journal  # noqa: PLC0415

    told = _load(arguments)
    if arguments.json:
        histories = [
            HistoryItem(workflow=item.workflow, entries=item.entries)
            if isinstance(item, History)
            else HistoryItem(workflow=None, entries=(item,))
            for item in _merge(told)
        ]
        print_json(Journal(at=datetime.now(UTC), histories=tuple(histories)))
        return 0
    lines = list(_in_words(told, datetime.now(UTC), Terminal.of(sys.stdout)))
    print(*(lines or ["Nothing of that kind is in the journal."]), sep="\n")
    return 0


class _Told(NamedTuple):
    """What is to be shown."""

    histories: "Sequence[History]"
    notes: "Sequence[JournalEntry]"
    """Of the agent, for a place of their own or for one in a timeline; by time."""
    is_chosen: bool
    """Whether only certain events are wanted: then notes have no place of their own."""
    limit: int
    """Of notes with a place of their own; -1: none."""


def _load(arguments: argparse.Namespace) -> _Told:
    from agent.store import Store  # noqa: PLC0415 - as above

    limit = arguments.limit or -1
    store = Store.look_into(find_state_dir(arguments))
    try:
        keys = None
        if arguments.event is not None:
            found = find_by_prefix(arguments.event, store.find_workflows())
            keys = {workflow.event.key for workflow in found}

        def is_wanted(workflow: "Workflow") -> bool:
            return (
                (keys is None or workflow.event.key in keys)
                and (arguments.rule is None or workflow.decision.rule == arguments.rule)
                and (arguments.type is None or workflow.event.type.casefold() == arguments.type.casefold())
            )

        histories = store.load_histories(since=arguments.since, limit=limit, is_wanted=is_wanted)
        is_chosen = not (arguments.event is None and arguments.rule is None and arguments.type is None)
        notes = sorted(store.load_notes(since=arguments.since), key=lambda note: note.at)
        return _Told(histories, notes, is_chosen, limit)
    finally:
        store.close()


def _merge(told: _Told) -> "list[History | JournalEntry]":
    """Events, and notes with a place of their own, oldest first."""
    items: list[tuple[datetime, History | JournalEntry]] = [
        (history.workflow.first_seen_at, history) for history in told.histories
    ]
    if not told.is_chosen:
        placed = {index for history in told.histories for index in _span(history, told.notes)}
        apart = [note for index, note in enumerate(told.notes) if index not in placed]
        items += [(note.at, note) for note in (apart if told.limit < 0 else apart[-told.limit :])]
    return [item for _, item in sorted(items, key=lambda item: item[0])]


def _span(history: "History", notes: "Sequence[JournalEntry]") -> range:
    """Which notes fall into the time of the event, and so have their place in its timeline."""
    begins = bisect_left(notes, history.workflow.first_seen_at, key=lambda note: note.at)
    if not _is_over(history):
        return range(begins, len(notes))
    return range(begins, bisect_right(notes, history.entries[-1].at, key=lambda note: note.at))


def _is_over(history: "History") -> bool:
    # What belonged to another machine was closed by a word of the journal alone.
    return bool(history.entries) and history.entries[-1].kind == "closed"


def _in_words(told: _Told, now: datetime, terminal: Terminal) -> Iterator[str]:
    from agent.status import History, clock  # noqa: PLC0415 - as above

    was_note = True
    for index, item in enumerate(_merge(told)):
        is_note = not isinstance(item, History)
        if index and not (is_note and was_note):
            yield ""
        was_note = is_note
        if isinstance(item, History):
            notes = [told.notes[index] for index in _span(item, told.notes)]
            yield from _timeline(item, notes, now, terminal)
        else:
            style = _STYLES.get(item.kind, "dim")
            text = f"{clock(item.at, now)}  {item.kind.replace('_', ' ')}: {item.text}"
            yield from terminal.line(text, style, indent=4)


def _timeline(
    history: "History", notes: "Iterable[JournalEntry]", now: datetime, terminal: Terminal
) -> Iterator[str]:
    from agent.status import clock, span  # noqa: PLC0415 - as above

    workflow, began = history.workflow, history.workflow.first_seen_at
    event = workflow.event
    if _is_over(history):
        end = history.entries[-1]
        outcome, period = end.text, f"until {clock(end.at, began)}, for {span(began, end.at)}"
    else:
        outcome, period = f"is pending: {workflow.phase}", f"until now, for {span(began, now)}"
    rule = f"rule {workflow.decision.rule}" if workflow.decision.rule else "no rule"
    head = f"{event.type or 'event without a type'} {event.id or '(no id)'} {outcome}"
    yield from terminal.line(head, "bold", indent=4)
    yield from terminal.line(f"  {rule}; seen from {began:%Y-%m-%d %H:%M:%S}Z {period}", "dim", indent=4)
    # What was noted of the event stays in its order, whatever was done to the clock.
    entries = list(heapq.merge(history.entries, notes, key=lambda entry: entry.at))
    yield from _entries(entries, began, terminal)


def _entries(entries: "Sequence[JournalEntry]", began: datetime, terminal: Terminal) -> Iterator[str]:
    from agent.status import clock, span  # noqa: PLC0415 - as above

    stamps = [f"{clock(entry.at, began)}  {f'+{span(began, entry.at)}':>8}" for entry in entries]
    kinds = [entry.kind.replace("_", " ") for entry in entries]
    widths = [max(map(len, column), default=0) for column in (stamps, kinds)]
    for entry, stamp, kind in zip(entries, stamps, kinds, strict=True):
        lead = f"  {stamp:<{widths[0]}}  {kind:<{widths[1]}}  "
        style = _HOOK_STYLES.get(entry.outcome, "") or _STYLES.get(entry.kind, "" if entry.event_id else "dim")
        yield from terminal.line(f"{lead}{entry.text}", style, indent=len(lead))
        for line in entry.detail.splitlines():
            yield from terminal.line(f"{' ' * len(lead)}| {line}", "dim", indent=len(lead) + 2)


def _since(text: str) -> datetime:
    from agent.typed_yaml import parse_duration  # noqa: PLC0415 - as above

    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"expected a duration such as 2d or 1h30m, or a time such as 2022-04-11T22:12:00Z; got {text!r}"
        ) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"expected a number, 0 for all; got {text!r}")
    return int(text)
