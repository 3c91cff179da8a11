"""Compares a document with the events that are known: seen, missing, gone, renamed. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from scheduled_events_agent.imds.document import Document, ScheduledEvent


class Missing(msgspec.Struct, frozen=True):
    """One answer lacks the event that was known by ``key``; whether it is over, the next one tells."""

    key: str
    names_others: bool = False
    """It is listed, but no longer for this VM."""


class Seen(msgspec.Struct, frozen=True):
    """The event is in the document: for the first time, changed, or (if ``renamed_from``) under a new id."""

    event: ScheduledEvent
    renamed_from: str | None = None


class Gone(msgspec.Struct, frozen=True):
    """The event that was known by ``key`` is over."""

    key: str
    status: str = ""
    """Completed or Canceled if the document says so."""
    names_others: bool = False
    """It is listed, but no longer for this VM."""


def compare(
    known: Mapping[str, ScheduledEvent],
    document: Document,
    missing: Mapping[str, bool] = MappingProxyType({}),
) -> list[Seen | Missing | Gone]:
    """What ``document`` says that differs from the ``known`` events (by key).

    ``missing``: those of them that the answers before lacked, and whether it is gone if this one lacks it too.

    Microsoft's mock server gives events new ids, when they start and later: an event that is missing when one with
    the same type, source, resources and description first appears as Started is the same one, renamed.
    """
    present = {event.key: event for event in document.events}
    absent = {key: event for key, event in known.items() if key not in present}
    renamable: dict[tuple[object, ...], list[str]] = {}
    # Of several that are alike, one that is yet to start is the likelier one to have started now.
    for key, event in sorted(absent.items(), key=lambda item: item[1].is_started):
        if key not in document.ended:
            renamable.setdefault(likeness(event), []).append(key)
    changes: list[Seen | Missing | Gone] = []
    for key, event in present.items():
        if key not in known:
            old_keys = renamable.get(likeness(event)) if event.is_started else None
            if old_keys:
                old_key = old_keys.pop(0)
                del absent[old_key]
                changes.append(Seen(event, old_key))
            else:
                changes.append(Seen(event))
        elif known[key] != event or key in missing:
            changes.append(Seen(event))
    for key in absent:
        if key in document.ended or missing.get(key):
            changes.append(Gone(key, document.ended.get(key, "")))
        elif key not in missing:
            changes.append(Missing(key))
    return changes


def likeness(event: ScheduledEvent) -> tuple[object, ...]:
    """What stays when an event gets a new id, as the mock server of Microsoft gives it."""
    return event.type, event.source, event.resources, event.description
