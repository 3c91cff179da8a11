"""Rows of the fleet's ledger: their keys, and what they hold."""

import hashlib
import json
import re
from datetime import UTC, datetime
from itertools import accumulate

from agent.fleet.ledger import Row
from agent.workflow import Wish

# Azure allows 32,768 in one property.
_MOST_CHARACTERS = 30_000


def key_of(text: str) -> str:
    """``text`` as a key, which Azure allows only some characters."""
    low = text.lower()
    is_plain = re.fullmatch(r"[a-z0-9_.-]{1,80}", low) is not None
    return low if is_plain else hashlib.sha256(text.encode(errors="replace")).hexdigest()


def event_key_of(event: str) -> str:
    """The same for an event: always 32 hex digits."""
    return hashlib.sha256(event.encode(errors="replace")).hexdigest()[:32]


def time_of(row: Row, name: str) -> datetime:
    """A time in the row; long ago if there is none that can be read."""
    long_ago = datetime.min.replace(tzinfo=UTC)
    try:
        at = datetime.fromisoformat(row.content.get(name, ""))
    except ValueError:
        return long_ago
    if not 2 <= at.year <= 9998:
        return long_ago  # one cannot reckon with it
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def resources_of(row: Row) -> tuple[str, ...]:
    """The VMs that the row's event names."""
    try:
        names = json.loads(row.content.get("resources", ""))
    except (ValueError, RecursionError):
        return ()
    return tuple([name for name in names if isinstance(name, str)]) if isinstance(names, list) else ()


def content_of(wish: Wish) -> dict[str, str]:
    """What people, and this VM after a restart, must know of the event."""
    resources = wish.resources
    if len(json.dumps(resources)) > _MOST_CHARACTERS:
        lengths = accumulate(len(json.dumps(name)) + 2 for name in (wish.own, *resources))
        fitting = sum(length < _MOST_CHARACTERS for length in lengths)
        resources = (wish.own, *resources)[:fitting]
    return {"name": wish.event, "id": wish.event_id, "vm": wish.own, "resources": json.dumps(resources)}


def is_held(row: Row, now: datetime) -> bool:
    return bool(row.content.get("event")) and time_of(row, "until") > now


def holder_of(row: Row) -> str:
    content = row.content
    return f"event {content.get('id', '')[:8]} of {content.get('vm', '')}, until {time_of(row, 'until'):%H:%M}"
