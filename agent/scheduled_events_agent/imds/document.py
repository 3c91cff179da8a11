"""The Scheduled Events document as frozen values; the parser handles every known quirk of its text.

Pure: does no I/O, and knows neither the policy nor the time. Invariant: an unreadable document is an error, never
an empty list, because an event that is missing counts as over.
"""

import codecs
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.imds.text import (
    MAX_TEXT,
    DocumentError,
    clean_name,
    clean_text,
    excerpt,
    parse_json,
    shown,
)

ApiVersion = Literal[
    "2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01", "2024-07-09"
]
ApiVersionSetting = Literal["auto", ApiVersion]
EventTypeName = Literal["SpotRebalanceRecommendation", "Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
StatusName = Literal["Scheduled", "Started"]
SourceName = Literal["Platform", "User"]
Affects = Literal["self", "shared", "others", "unknown"]

EVENT_TYPES: tuple[str, ...] = get_args(EventTypeName)
"""The event types, in the order of their severity."""
RECOMMENDATION: EventTypeName = "SpotRebalanceRecommendation"
REBALANCE_VERSION: ApiVersion = "2024-07-09"
"""The first api-version whose documents have recommendations; versions compare as texts."""

PROMISED_NOTICE_SECONDS: dict[str, float] = {
    "Freeze": 900.0, "Reboot": 900.0, "Redeploy": 600.0, "Terminate": 300.0, "Preempt": 30.0,
}  # fmt: skip
"""How long before its start Azure announces an event at the latest."""
# Longest id that is shown whole; of a longer one the beginning and a hash are shown. Azure's have 36 characters.
_MAX_SHOWN_ID = 128
_MARKED_ID = r"~[0-9a-f]{12}$"
# Far more events than the service sends, but few enough to be read quickly and with little memory.
MAX_EVENTS = 2000
MAX_OWN_EVENTS = 100
# A year. Real interruptions take seconds to minutes; a longer value is no estimate.
_LONGEST_DURATION_SECONDS = 31_536_000.0
# Event Grid has these two statuses; the endpoint was never seen to send them. Both mean that the event is over.
_FINAL_STATUSES = ("Completed", "Canceled")
_CANONICAL = {
    word.casefold(): word for word in (*EVENT_TYPES, "Scheduled", "Started", *_FINAL_STATUSES, "Platform", "User")
}

RESTARTING_TYPES = ("Reboot", "Redeploy")
"""The types of events that restart the VM, which is there afterwards."""
# The forms that are known, each to its end. What is left out reads as UTC; the weekday is often wrong.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_HOUR, _SIXTIETH = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_RFC_1123 = (
    rf"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), )?([0-9]{{1,2}}) ({'|'.join(_MONTHS)}) ([0-9]{{4}})"
    rf" ({_HOUR}:{_SIXTIETH}:{_SIXTIETH})(?: (?:GMT|UTC|([+-]{_HOUR})({_SIXTIETH})))?"
)
_ISO_8601 = (
    rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[T ]{_HOUR}:{_SIXTIETH}(?::{_SIXTIETH}(?:\.[0-9]{{1,9}})?)?"
    rf"(?:Z|[+-]{_HOUR}:?{_SIXTIETH})?"
)
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"


class ScheduledEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of a document. Names are the service's; texts are trimmed and printable."""

    id: str  # for people and hooks; compare by ``key``
    """EventId, printable."""
    type: str  # one of EVENT_TYPES in their spelling, else the text received
    status: str
    source: str = ""  # "" before api-version 2019-08-01
    """Platform or User."""
    resources: tuple[str, ...] = ()
    not_before: datetime | None = None  # None: blank, missing, unreadable
    """None: it may start now."""
    duration_seconds: float | None = None  # None: -1 or missing
    """Azure's estimate."""
    description: str = ""
    resource_type: str = ""
    received_id: str = ""
    """If ``id`` is only a printable copy."""
    id_error: str = ""  # as a clause
    """Why the id cannot be sent back exactly."""
    is_ambiguous: bool = False
    """The id is listed twice, with different contents."""

    @property
    def approval_id(self) -> str:
        """The id that an approval sends back, exactly as received; "" if that is not possible."""
        return "" if self.id_error else self.received_id or self.id

    @property
    def approval_error(self) -> str:
        """Why an approval of the event would not count, as a clause; "" if it would."""
        if self.is_recommendation:
            return "an approval of a recommendation has no effect"
        if not self.id:
            return "it has no id to approve"
        return f"its id cannot be sent back exactly ({self.id_error})" if self.id_error else ""

    @property
    def key(self) -> str:
        """Identity of the event: its id without regard to case."""
        # An event without an id can be followed but never approved.
        key = self.id.casefold() or "-".join(["no-id", self.type, *self.resources]).casefold()
        # An eviction with the id of its recommendation counts as a separate event.
        return f"{key}-recommendation" if self.is_recommendation else key

    @property
    def is_recommendation(self) -> bool:
        """Whether it only warns that a Spot VM may be evicted soon; the eviction is a separate event."""
        return self.type == RECOMMENDATION

    @property
    def is_started(self) -> bool:
        return self.status == "Started" and not self.is_recommendation

    @property
    def starts_at(self) -> datetime | None:
        """Until when there is time to prepare; None if it may start now, or never starts."""
        return None if self.is_recommendation else self.not_before

    @property
    def is_final(self) -> bool:
        return self.status in _FINAL_STATUSES

    def affects(self, names: Iterable[str]) -> Affects:
        """Whether the event names only the VM with one of ``names``, others too, or only others (if known)."""
        mine = normalized_names(names)
        if not mine or not self.resources:
            return "unknown"
        found = set()
        for resource in self.resources:
            found.add(normalized_name(resource) in mine)
            if len(found) == 2:  # no need to look at the rest; there may be a hundred
                return "shared"
        return "self" if True in found else "others"

    def position(self, names: Iterable[str]) -> int | None:
        """Number of Resources listed before the VM with one of ``names``; None if it is not listed."""
        mine = normalized_names(names)
        return next((i for i, resource in enumerate(self.resources) if normalized_name(resource) in mine), None)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The document that one successful request returned."""

    incarnation: str
    """DocumentIncarnation, for logs and for approvals in 2017-03-01. It is used for no decision. "" if missing."""
    events: tuple[ScheduledEvent, ...]
    """Events that are pending or under way, in document order, one per key."""
    ended: dict[str, str] = {}
    """Key and status of the events that are listed as over."""
    has_recommendations: bool = True
    """Whether the document can list recommendations; those of older api-versions cannot."""
    answered: float = 0.0
    """When it was received, on the monotonic clock."""


def parse_document(body: bytes, *, is_saved: bool = False) -> Document:
    """Read an answer of the endpoint. Raises DocumentError, whose text says what was found instead.

    ``is_saved``: it is from a file, which PowerShell may have written. PowerShell 5.1 joins Resources to one text.
    """
    data = _decode(body)
    if not isinstance(data, dict) or not isinstance(data.get("Events"), list):
        raise DocumentError(f'expected an object with a list "Events"; got {excerpt(body)}')
    if len(data["Events"]) > MAX_EVENTS:
        raise DocumentError(f"{len(data['Events'])} events; at most {MAX_EVENTS} are read", kind="too_many")
    duplicates: dict[str, list[ScheduledEvent]] = {}
    for index, item in enumerate(data["Events"]):
        event = _to_event(item, f"Events[{index}]", is_saved=is_saved)
        duplicates.setdefault(event.key, []).append(event)
    incarnation = data.get("DocumentIncarnation")
    merged = [_merge(events) for events in duplicates.values()]
    return Document(
        incarnation="" if incarnation is None else clean_text(incarnation),
        events=tuple([event for event in merged if not event.is_final]),
        ended={event.key: event.status for event in merged if event.is_final},
    )


def check_limits(document: Document, names: Iterable[str]) -> None:
    """Raises DocumentError if implausibly many events may concern the VM with one of ``names``."""
    names = tuple(names)
    count = sum(event.affects(names) != "others" for event in document.events)
    if count > MAX_OWN_EVENTS:
        what = "name this VM" if names else "may concern this VM, whose name is not known: set vm.name"
        raise DocumentError(f"{count} events {what}; at most {MAX_OWN_EVENTS} are followed", kind="too_many")


def parse_event(body: bytes) -> ScheduledEvent:
    """Read one bare event object from a file, as logs and articles quote them. Raises DocumentError."""
    data = _decode(body)
    if not isinstance(data, dict) or "EventType" not in data:
        raise DocumentError(f'expected an object with "EventType"; got {excerpt(body)}')
    return _to_event(data, "event", is_saved=True)


def to_azure_json(event: ScheduledEvent) -> bytes:
    """The event as an object in Azure's names, as hooks get it on standard input."""
    seconds: float | int = -1 if event.duration_seconds is None else event.duration_seconds
    if isinstance(seconds, float) and seconds.is_integer():
        seconds = int(seconds)
    fields: dict[str, Any] = {
        "EventId": event.id,
        "EventStatus": event.status,
        "EventType": event.type,
        "ResourceType": event.resource_type,
        "Resources": event.resources,
        "NotBefore": "" if event.not_before is None else event.not_before.isoformat().replace("+00:00", "Z"),
        "Description": event.description,
        "EventSource": event.source,
        "DurationInSeconds": seconds,
    }
    return msgspec.json.encode(fields)


def _merge(duplicates: list[ScheduledEvent]) -> ScheduledEvent:
    """Merge entries with the same id into one event: an approval of the id counts for all their resources.

    If the entries contradict each other, the merged event has the values that leave the least time to prepare.
    """
    first = duplicates[0]
    if len(duplicates) == 1:
        return first
    resources = first.resources
    if first.id:  # without an id the resources are the key, and the key must stay
        known = set(resources)
        more = dict.fromkeys(resource for twin in duplicates[1:] for resource in twin.resources)
        resources += tuple([resource for resource in more if resource not in known])
    if len({replace(twin, id="", received_id="", resources=(), resource_type="") for twin in duplicates}) > 1:
        first = replace(
            min(duplicates, key=_urgency), id=first.id, received_id=first.received_id, is_ambiguous=True
        )
        times = [twin.not_before for twin in duplicates if not twin.is_final]
        if first.not_before is not None and None in times:
            first = replace(first, not_before=None)  # blank means that it may start now
    return replace(first, resources=resources)


def _urgency(event: ScheduledEvent) -> tuple[object, ...]:
    """Sort key: events that have not started before those that have; then NotBefore, severity and length."""
    severity = EVENT_TYPES.index(event.type) if event.type in EVENT_TYPES else -1
    not_before = event.not_before.timestamp() if event.not_before else float("-inf")
    seconds = float("inf") if event.duration_seconds is None else event.duration_seconds
    return event.is_final, event.is_started, not_before, -severity, -seconds, event.source, event.description


def _decode(body: bytes) -> Any:
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:2]:
        raise DocumentError("not JSON (it is UTF-16; expected UTF-8, in PowerShell Out-File -Encoding utf8)")
    try:
        return parse_json(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise DocumentError(f"not JSON ({error}): {excerpt(body)}") from error


def _to_event(item: Any, where: str, *, is_saved: bool = False) -> ScheduledEvent:
    if not isinstance(item, dict):
        # Skipping the entry could make a known event look as if it were over.
        raise DocumentError(f"{where}: expected an object; got {shown(item)}")
    get = item.get
    shown_id, received_id, id_error = _identify(get("EventId"))
    return ScheduledEvent(
        id=shown_id,
        received_id=received_id,
        id_error=id_error,
        type=_word(get("EventType")),
        # 46-minimal in tests/payloads: no status at all. Only a plain "Scheduled" may be approved.
        status=_word(get("EventStatus")),
        source=_word(get("EventSource")),
        resources=_names(get("Resources"), is_saved=is_saved),
        not_before=parse_not_before(get("NotBefore")),
        duration_seconds=_duration(get("DurationInSeconds")),
        description=clean_text(get("Description")),
        resource_type=clean_text(get("ResourceType")),
    )


def _identify(value: Any) -> tuple[str, str, str]:
    """An id for people, the id as received where that is another, and why it cannot be sent back."""
    shown = clean_text(value)
    if not shown:
        return "", "", ""
    if not isinstance(value, str):
        return shown, "", "it is not a text"
    if value == shown and len(value) <= _MAX_SHOWN_ID and not re.search(_MARKED_ID, value):
        return value, "", ""
    from hashlib import sha256  # noqa: PLC0415  # 3 ms of OpenSSL, and Azure's ids need none of it

    # Ids that differ only in characters that are not shown must not become one event.
    mark = sha256(value.casefold().encode()).hexdigest()[:12]
    shown = f"{shown[: _MAX_SHOWN_ID - 13].rstrip()}~{mark}"
    if len(value) > MAX_TEXT:
        return shown, "", f"it is longer than {MAX_TEXT} characters"
    return shown, value, ""


def _word(value: Any) -> str:
    text = clean_name(value.strip() if isinstance(value, str) else value)
    return _CANONICAL.get(text.casefold(), text)


def _names(value: Any, *, is_saved: bool) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split() if is_saved else [value]
    if not isinstance(value, list):
        return ()
    return tuple([clean_name(name) for name in value])


def _duration(value: Any) -> float | None:
    seconds = float(value) if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip()) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    return float(seconds) if 0 <= seconds <= _LONGEST_DURATION_SECONDS else None


def parse_not_before(value: Any) -> datetime | None:
    """The time in one of the known forms; None for any other text, for a rest may change its meaning."""
    text = value.strip() if isinstance(value, str) else ""
    if parts := re.fullmatch(_RFC_1123, text, re.ASCII | re.IGNORECASE):
        day, month, year, clock, hours, minutes = parts.groups()
        offset = f"{hours}:{minutes}" if hours else "Z"
        text = f"{year}-{_MONTHS.index(month.title()) + 1:02}-{day:>02}T{clock}{offset}"
    if not re.fullmatch(_ISO_8601, text):
        return None
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def normalized_names(names: Iterable[str]) -> set[str]:
    # A name we do not know must not match a resource that is blank.
    return {normalized_name(name) for name in names} - {""}


def normalized_name(name: str) -> str:
    """A VM's name for comparison; old api-versions and Azure Batch put one ``_`` before it."""
    return name.casefold().removeprefix("_")
