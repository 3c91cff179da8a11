"""Compares a document with the events that are known: seen, missing, gone, renamed. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from scheduled_events_agent.imds.document import Document, ScheduledEvent


class Missing(msgspec.Struct, frozen=True):
    """One answer lacks the event that was known by ``key``. The next answer shows whether it is over."""

    key: str
    names_others: bool = False
    """The event is listed, but no longer names this VM."""


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
    """The event is listed, but no longer names this VM."""


def compare(
    known: Mapping[str, ScheduledEvent],
    document: Document,
    missing: Mapping[str, bool] = MappingProxyType({}),
) -> list[Seen | Missing | Gone]:
    """The differences between ``document`` and the ``known`` events (by key).

    ``missing``: known events that earlier answers lacked; the value says whether the event is gone if this answer
    lacks it too.

    Microsoft's mock server gives events new ids, when they start and later. If an event is missing, and one with
    the same type, source, resources and description first appears as Started, it is the same event, renamed.
    """
    present = {event.key: event for event in document.events}
    absent = {key: event for key, event in known.items() if key not in present}
    renamable: dict[tuple[object, ...], list[str]] = {}
    # If several look the same, one that has not started yet is more likely to have started now.
    for key, event in sorted(absent.items(), key=lambda item: item[1].is_started):
        if key not in document.ended:
            renamable.setdefault(rename_fingerprint(event), []).append(key)
    changes: list[Seen | Missing | Gone] = []
    for key, event in present.items():
        if key not in known:
            old_keys = renamable.get(rename_fingerprint(event)) if event.is_started else None
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


def rename_fingerprint(event: ScheduledEvent) -> tuple[object, ...]:
    """The fields that stay the same when Microsoft's mock server gives an event a new id."""
    return event.type, event.source, event.resources, event.description
