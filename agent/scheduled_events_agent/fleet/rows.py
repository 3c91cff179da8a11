"""Rows of the fleet's ledger: their partitions and keys, and what they hold."""

import hashlib
import json
import re
from datetime import UTC, datetime
from itertools import accumulate

from scheduled_events_agent.fleet.ledger import Row
from scheduled_events_agent.workflow import Wish

LONG_AGO = datetime.min.replace(tzinfo=UTC)
# Azure allows 32,768 in one property.
_MOST_CHARACTERS = 30_000


def key_of(text: str) -> str:
    """``text`` as a key, which Azure allows only some characters."""
    low = text.lower()
    is_plain = re.fullmatch(r"[a-z0-9_.-]{1,80}", low) is not None
    return low if is_plain else hashlib.sha256(text.encode(errors="replace")).hexdigest()


def event_key_of(event: str) -> str:
    """The id of an event as a key of 32 hex digits."""
    return hashlib.sha256(event.encode(errors="replace")).hexdigest()[:32]


def partition_of_slots(group: str) -> str:
    """The partition with the rows 000, 001 ..., one for each event that may be prepared for at a time."""
    return f"slot|{key_of(group)}"


def partition_of_vms(group: str) -> str:
    """The partition whose rows tell of each VM how far it is with an event; see ``prefix_of`` for their keys."""
    return f"vm|{key_of(group)}"


def partition_of_doctor(group: str) -> str:
    """Where ``doctor`` tries whether rows can be written."""
    return f"doctor|{key_of(group)}"


def prefix_of(event_key: str) -> str:
    """How the keys of the rows of an event's VMs begin."""
    return f"{event_key}|"


def event_key_in(row: Row) -> str:
    """The event of a row of a VM."""
    return row.key.partition("|")[0]


def time_of(row: Row, name: str) -> datetime:
    """A time in the row; long ago if there is none that can be read."""
    try:
        at = datetime.fromisoformat(row.content.get(name, ""))
    except ValueError:
        return LONG_AGO
    if not 2 <= at.year <= 9998:
        return LONG_AGO  # one cannot reckon with it
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def resources_of(row: Row) -> tuple[str, ...]:
    """The VMs that the row's event names."""
    try:
        names = json.loads(row.content.get("resources", ""))
    except (ValueError, RecursionError):
        return ()
    return tuple([name for name in names if isinstance(name, str)]) if isinstance(names, list) else ()


def content_of(wish: Wish, *, has_resources: bool = True) -> dict[str, str]:
    """What people, and this VM after a restart, must know of the event; all of its VMs if ``has_resources``."""
    content = {"name": wish.event, "id": wish.event_id, "vm": wish.own}
    if not has_resources:
        return content
    resources = wish.resources
    if len(json.dumps(resources)) > _MOST_CHARACTERS:
        lengths = accumulate(len(json.dumps(name)) + 2 for name in (wish.own, *resources))
        fitting = sum(length < _MOST_CHARACTERS for length in lengths)
        resources = (wish.own, *resources)[:fitting]
    return {**content, "resources": json.dumps(resources)}


def is_held(row: Row, now: datetime) -> bool:
    return bool(row.content.get("event")) and time_of(row, "until") > now


def holder_of(row: Row) -> str:
    content = row.content
    return f"event {content.get('id', '')[:8]} of {content.get('vm', '')}, until {time_of(row, 'until'):%H:%MZ}"
