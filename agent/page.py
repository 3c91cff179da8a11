"""The status page: HTML for people, from values.

Owns what the page at / looks like. Reads nothing, knows no clock, and must not need a script. The one invariant:
every text from outside (Azure, hooks, the policy file) is escaped.
"""

from collections.abc import Iterable
from html import escape

from agent.status import History, JournalEntry, Status, activity, time_left


def render_page(
    status: Status, recent: Iterable[History] = (), pauses: Iterable[JournalEntry] = (), *, unread: str = ""
) -> str:
    """The whole document. ``unread``: why ``recent`` and ``pauses`` could not be read, if so."""
    del recent, pauses
    cards = "".join(
        f"<li>{escape(w.event.type)} {escape(w.event.id)}: {escape(time_left(w.event, status.at))}; "
        f"{escape(activity(w, status.running_for(w.id), status.at))}</li>"
        for w in status.pending
    )
    return f"<!doctype html><title>scheduled-events-agent</title><ul>{cards}</ul>{escape(unread)}"
