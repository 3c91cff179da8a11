"""Plans this VM's writes in the fleet's store, and the statuses of its events there: a pure function of one list.

Each VM writes only its own records. An event has a slot while one of its VMs has a record that is ``claimed``,
``not_ready`` or ``ready``. No slot is released explicitly: a VM that has recovered deletes its record. If two VMs
both write before they list, the later one sees the other, so no lock is needed. All ages are by the store's clock;
clocks of VMs are never compared with each other.

    EVENT|VM    requested    the VM wants to begin
                claimed      the VM wants to begin now, and checks whether it may
                not_ready    the VM has begun: it prepares, is held, the event is under way, or it recovers
                ready        the VM is prepared

A VM that could wait no longer has begun without a slot, and must have one before the event is approved. Its record
is not_ready or ready, and its field ``slot`` says how far it is:

                lacked       only more than a slot would allow the approval
                requested    the VM wants to approve
                claimed      the VM wants to approve now, and checks whether it may
"""

import hashlib
import re
from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from scheduled_events_agent.fleet.backend import Record, plain_key
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.workflow import FleetEventStatus, FleetRequest, some_of

SLOT_SECONDS = 1800.0
"""A record counts for a slot for this long: a VM that reboots for its event is silent and out of service."""
_FRESH_INTERVALS = 3.0
_RENEW_SECONDS = (20.0, 600.0)
_RENEW_AT = 0.8
_MAX_OLD_DELETES = 20
_MAX_VM_NAME = 80
_UNKNOWN_TIME = "~"  # sorts after all times

SlotState = Literal["", "lacked", "requested", "claimed"]
"""The slot of a VM that has begun; "" if it has one."""
_LACKED_STATES: tuple[SlotState, ...] = ("lacked", "requested", "claimed")

# When the next sync is due, in seconds.
_CLAIMED_SECONDS = 1.5
_REQUESTED_SECONDS = 5.0
_READY_SECONDS = 20.0
_READY_SECONDS_PER_RECORD = 0.5
_RENEWALS = 4.0  # list this many times as often while a ready VM has only to renew its record
_ALLOWED_SECONDS = 5.0  # the engine has not acted on it yet
_JOINING_SECONDS = 5.0
_QUIET_SECONDS = 60.0


class Write(NamedTuple):
    """One request to the store."""

    key: str
    etag: str
    """The ETag that the record must have; "" creates it."""
    fields: Mapping[str, str] | None
    """The new contents; None deletes the record."""


class Plan(NamedTuple):
    writes: tuple[Write, ...]
    statuses: Mapping[str, FleetEventStatus]
    """The statuses by event. Only those of requests that wait for something allow anything."""
    next_sync_seconds: float


class VmRecord(NamedTuple):
    """A record that can be read, and the meaning of its age and state."""

    record: Record
    event: str
    """The part of the key for the event."""
    vm_key: str
    """The part of the key for the VM."""
    event_id: str
    vm: str
    vm_id: str
    state: str
    slot: SlotState
    order: tuple[str, str]
    """Events begin in this order: by NotBefore, then by key."""
    renew_seconds: float
    waits_for: str

    @property
    def is_fresh(self) -> bool:
        """Whether the VM has written the record lately; False if the store gives no ages."""
        age = self.record.age
        return age is not None and age <= _FRESH_INTERVALS * self.renew_seconds

    @property
    def counts_for_slot(self) -> bool:
        age = self.record.age
        return self.state in ("claimed", "not_ready", "ready") and (age is None or age <= SLOT_SECONDS)

    @property
    def has_begun(self) -> bool:
        return self.counts_for_slot and self.state != "claimed"

    @property
    def has_slot(self) -> bool:
        return self.has_begun and not self.slot

    @property
    def is_claim(self) -> bool:
        return self.counts_for_slot and "claimed" in (self.state, self.slot)

    @property
    def asks_to_approve(self) -> bool:
        return self.slot == "requested" and self.has_begun and self.is_fresh

    @property
    def is_waiting(self) -> bool:
        return self.state == "requested" and self.is_fresh

    @property
    def may_be_alive(self) -> bool:
        """Whether a VM may still write this record. One whose age is not known may."""
        return self.is_fresh or self.record.age is None


def event_key(event: str) -> str:
    """The part of a record's key that stands for an event: 32 hex digits."""
    return hashlib.sha256(event.encode(errors="replace")).hexdigest()[:32]


def record_key(event: str, vm: str) -> str:
    """The key of a VM's record for an event."""
    return f"{event_key(event)}|{plain_key(vm)}"


def read_record(record: Record) -> VmRecord:
    """Read a record, which any program may have written: unexpected values are made harmless."""
    event, _, vm_key = record.key.partition("|")
    fields = record.fields
    event_id = fields.get("id", "")
    is_id = re.fullmatch(r"[A-Za-z0-9._:-]{1,80}", event_id) is not None
    return VmRecord(
        record=record,
        event=event,
        vm_key=vm_key,
        event_id=event_id if is_id else event[:8],
        vm=clean_text(fields.get("vm", ""))[:_MAX_VM_NAME] or vm_key,
        vm_id=clean_text(fields.get("vm_id", ""))[:_MAX_VM_NAME],
        state=fields.get("state", ""),
        slot=next((slot for slot in _LACKED_STATES if slot == fields.get("slot")), ""),
        order=(_time_in_order(fields.get("not_before", "")), event),
        renew_seconds=_renew_seconds(fields.get("renew_seconds", "")),
        waits_for=clean_text(fields.get("waits_for", "")),
    )


def _time_in_order(text: str) -> str:
    try:
        at = datetime.fromisoformat(text)
        return _time_text(at if at.tzinfo else at.replace(tzinfo=UTC)) or _UNKNOWN_TIME
    except (ValueError, OverflowError):
        return _UNKNOWN_TIME


def _time_text(at: datetime | None) -> str:
    """The time as text in UTC, so that times sort as their texts do."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20) if at else ""


def _renew_seconds(text: str) -> float:
    low, high = _RENEW_SECONDS
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return min(high, max(low, float(text))) if is_number else low


def waits_for_text(names: tuple[str, ...]) -> str:
    """The VMs that a ready VM waits for, as a text."""
    return some_of([name[:_MAX_VM_NAME] for name in names])


def plan(
    records: Iterable[Record],
    requests: Iterable[FleetRequest],
    *,
    vm_id: str,
    confirmed: Mapping[str, str],
    granted: Container[str] = (),
    max_events: int | None,
    listed_at: float,
    listed: int,
) -> Plan:
    """The writes and the statuses that follow from this list of the group's records.

    ``confirmed``: for this VM's records, by key, the ETag of the last write of this process that was answered.
    ``granted``: keys of this VM's claims that a list has lately allowed to begin. The engine may be about to, so
    these claims stay. ``listed_at``: when the list was requested, on the clock of ``FleetRequest.seen_at``.
    ``listed``: number of records of the group, without old ones. If ``records`` has only this VM's records, only
    the writes of requests with stage not_ready or ready count.
    """
    group = _Group(
        records={record.key: read_record(record) for record in records},
        vm_id=vm_id,
        confirmed=confirmed,
        granted=granted,
        max_events=max_events,
        listed_at=listed_at,
        listed=listed,
    )
    requests = tuple(requests)
    writes: list[Write] = []
    statuses: dict[str, FleetEventStatus] = {}
    seconds: list[float] = []
    for request in requests:
        state = group.state_of(request)
        slot = group.slot_of(request)
        statuses[request.event] = group.status_of(request, state, slot)
        interval = group.interval_of(request, state, slot, statuses[request.event])
        write = group.write_of(request, state, slot, interval)
        own = group.own(request)
        if write is not None:
            writes.append(write)
        elif own is not None:
            interval = min(interval, own.renew_seconds)  # it is renewed then
        status = statuses[request.event]
        if status.has_slot or status.is_all_ready:
            interval = _ALLOWED_SECONDS
        elif state == "requested" and group.may_join_soon(request):
            interval = min(interval, _JOINING_SECONDS)
        seconds.append(interval)
    writes += group.deletes({record_key(request.event, request.vm) for request in requests})
    return Plan(tuple(writes), statuses, min(seconds, default=_QUIET_SECONDS))


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one list by their keys, and the other arguments of ``plan``."""

    records: Mapping[str, VmRecord]
    vm_id: str
    confirmed: Mapping[str, str]
    granted: Container[str]
    max_events: int | None
    listed_at: float
    listed: int

    def own(self, request: FleetRequest) -> VmRecord | None:
        """This VM's record for the event; None also if another VM with this name has written it."""
        found = self.records.get(record_key(request.event, request.vm))
        return found if found is not None and found.vm_id == self.vm_id else None

    def _other_of_the_name(self, request: FleetRequest) -> VmRecord | None:
        """The record of another VM that writes under this VM's name; None if there is none."""
        found = self.records.get(record_key(request.event, request.vm))
        is_other = found is not None and found.vm_id != self.vm_id and found.may_be_alive
        return found if is_other else None

    def _is_confirmed(self, own: VmRecord) -> bool:
        """Whether the list was requested after the write of the record, as it is now, was answered."""
        return self.confirmed.get(own.record.key) == own.record.etag

    # --- slots

    def state_of(self, request: FleetRequest) -> str:
        """The state that this VM's record must have."""
        if request.stage != "requested" or not request.needs_slot or self.max_events is None:
            return request.stage
        own = self.own(request)
        is_claimed = own is not None and own.state == "claimed"
        return "claimed" if self._may_claim(request, self.max_events, is_claimed=is_claimed) else "requested"

    def slot_of(self, request: FleetRequest) -> SlotState:
        """The slot that this VM's record must name; "" if it has one, needs none, or has not begun."""
        if not request.lacks_slot or self.max_events is None:
            return ""
        if not self._asks_to_approve(request):
            return "lacked"
        own = self.own(request)
        is_claimed = own is not None and own.slot == "claimed"
        return "claimed" if self._may_claim(request, self.max_events, is_claimed=is_claimed) else "requested"

    def _asks_to_approve(self, request: FleetRequest) -> bool:
        """Whether only a slot keeps an event that lacks one from being approved."""
        return request.lacks_slot and request.needs_slot and not (request.needs_all and self._not_ready(request))

    def _may_claim(self, request: FleetRequest, max_events: int, *, is_claimed: bool) -> bool:
        """Whether to claim a slot, or to keep the claim. Whether there is one, only the next list shows."""
        own = self.own(request)
        if self._has_joined(request) or record_key(request.event, request.vm) in self.granted:
            return True
        others = self._others_with_slot(request)
        if not is_claimed or own is None or not own.counts_for_slot:
            return len(others) + len(self._waiting_before(request)) < max_events
        if len(others) < max_events:
            return True
        begun = [event for event in others if self._must_yield_to(event, request)]
        claims = [one for event in others for one in self._of(event) if self._is_same_claim(one, request)]
        return len(begun) < max_events and not any(one.order < self._order(request) for one in claims)

    def _is_same_claim(self, one: VmRecord, request: FleetRequest) -> bool:
        """Whether both want to begin, or both to approve: then the earlier event keeps its claim.

        A claim to begin yields to all events that have begun.
        """
        return one.counts_for_slot and (one.slot if request.lacks_slot else one.state) == "claimed"

    def _must_yield_to(self, event: str, request: FleetRequest) -> bool:
        """Whether the other event, which counts for a slot, does not yield to a claim of this VM."""
        records = self._of(event)
        if request.lacks_slot and any(one.is_claim for one in records):
            return any(one.has_slot for one in records)
        return any(one.has_begun for one in records)

    def _of(self, event: str) -> list[VmRecord]:
        return [one for one in self.records.values() if one.event == event]

    def _order(self, request: FleetRequest) -> tuple[str, str]:
        return _time_text(request.not_before) or _UNKNOWN_TIME, event_key(request.event)

    def _others_with_slot(self, request: FleetRequest) -> list[str]:
        """The other events that count for a slot, in order."""
        mine = event_key(request.event)
        found = [one for one in self.records.values() if one.counts_for_slot and one.event != mine]
        events = dict.fromkeys(one.event for one in sorted(found, key=lambda one: one.order))
        return [event for event in events if not (request.lacks_slot and self._only_asks(event))]

    def _only_asks(self, event: str) -> bool:
        """Whether the event has begun without a slot, and only a slot keeps it from being approved.

        Of two such events the later one waits for the earlier one, and not the other way round. One whose VMs are
        silent, or whose readiness waits for more, is out of service and counts.
        """
        records = [one for one in self._of(event) if one.counts_for_slot]
        is_asking = any(one.asks_to_approve for one in records)
        return is_asking and not any(one.has_slot or one.is_claim for one in records)

    def _waiting_before(self, request: FleetRequest) -> list[str]:
        """The events that wait for a slot before this one, in order."""
        mine = self._order(request)
        with_slot = {*self._others_with_slot(request), mine[1]}
        found = [
            one
            for one in self.records.values()
            if self._waits_as(one, request) and one.order < mine and one.event not in with_slot
        ]
        return list(dict.fromkeys(one.event for one in sorted(found, key=lambda one: one.order)))

    def _waits_as(self, one: VmRecord, request: FleetRequest) -> bool:
        """Whether it waits for a slot as this VM does: to begin, or to approve."""
        if request.lacks_slot:
            return one.asks_to_approve
        return self._is_waiting(one)

    def _is_waiting(self, one: VmRecord) -> bool:
        """Whether it waits and its VM is alive. This VM is alive, whatever the store's age of its record."""
        return one.is_waiting or (one.state == "requested" and self._is_confirmed(one))

    def _has_joined(self, request: FleetRequest) -> bool:
        """Whether another VM of the event has a slot, which belongs to the event."""
        own = record_key(request.event, request.vm)
        return any(one.has_slot and one.record.key != own for one in self._of(event_key(request.event)))

    def may_join_soon(self, request: FleetRequest) -> bool:
        """Whether the event may have a slot within seconds, however many events are ahead of it.

        That is so if a VM of the event has a claim; also if this VM takes its own claim back, for events that
        claimed in the same moment take theirs back, too. It may be so if this VM's record is not in the list yet:
        the other VMs see the event at about the same time, and the list may be from before their claims.
        """
        key = record_key(request.event, request.vm)
        if key not in self.records and len(request.requested_vms) > 1:
            return True
        return any(record.is_claim and record.may_be_alive for record in self._of(event_key(request.event)))

    # --- what is asked

    def status_of(self, request: FleetRequest, state: str, slot: SlotState) -> FleetEventStatus:
        """The status of the requested event. ``state`` and ``slot``: those that this VM's record must have."""
        other = self._other_of_the_name(request)
        if other is not None:
            return FleetEventStatus(workflow_id=request.workflow_id, other_vm_id=other.vm_id or "unknown")
        own = self.own(request)
        is_written = own is not None and own.state == state and self._is_confirmed(own)
        is_claim = own is not None and own.slot == slot and "claimed" in (state, slot)
        is_to_begin = request.stage == "requested" and request.needs_slot
        waits_for_slot = is_to_begin or self._asks_to_approve(request)
        others = self._others_with_slot(request) if waits_for_slot else []
        waiting = self._waiting_before(request) if waits_for_slot else []
        is_room = self._has_joined(request) or len(others) < (self.max_events or len(others) + 1)
        not_ready = self._not_ready(request) if request.needs_all else ()
        return FleetEventStatus(
            workflow_id=request.workflow_id,
            has_slot=waits_for_slot and is_written and is_claim and is_room,
            is_all_ready=request.needs_all and request.stage == "ready" and is_written and not not_ready,
            position=len(waiting) + 1 if waits_for_slot else 0,
            ahead=tuple(self._event_id(event) for event in (*others, *waiting)),
            requested_vms=request.requested_vms,
            not_ready=not_ready,
        )

    def _event_id(self, event: str) -> str:
        return next(one.event_id for one in self.records.values() if one.event == event)

    def _not_ready(self, request: FleetRequest) -> tuple[str, ...]:
        """The VMs that are not ready, among those that are waited for and those that have begun nevertheless."""
        records = {one.vm_key: one for one in self._of(event_key(request.event))}
        named = {plain_key(name): name for name in request.requested_vms}
        unnamed = {key: one.vm for key, one in records.items() if one.counts_for_slot and key not in named}
        seen_seconds = self.listed_at - request.seen_at
        return tuple(
            name
            for key, name in {**named, **unnamed}.items()
            if key not in records or not _is_ready(records[key], seen_seconds)
        )

    def _awaits_renewal(self, request: FleetRequest) -> bool:
        """Whether a VM's record says ready, but is older than this VM's first sight of the event.

        Such a record counts only after it is renewed.
        """
        seen_seconds = self.listed_at - request.seen_at
        ready = [one for one in self._of(event_key(request.event)) if one.state == "ready" and one.is_fresh]
        return not all(_is_ready(one, seen_seconds) for one in ready)

    # --- what is written

    def interval_of(self, request: FleetRequest, state: str, slot: SlotState, status: FleetEventStatus) -> float:
        """Seconds for which no list or write is needed."""
        if "claimed" in (state, slot) and not status.other_vm_id:
            return _CLAIMED_SECONDS
        due: list[float] = []
        if {"claimed", "requested"} & {state, slot}:
            due.append(_REQUESTED_SECONDS * (1 + len(status.ahead)))
        if state == "ready" and request.needs_all:
            # A long line for a slot to approve must not let a silent VM count as ready for longer.
            seconds = max(_READY_SECONDS, _READY_SECONDS_PER_RECORD * self.listed)
            due.append(seconds / _RENEWALS if self._awaits_renewal(request) else seconds)
        return min(*due, _RENEW_SECONDS[1]) if due else _QUIET_SECONDS

    def write_of(self, request: FleetRequest, state: str, slot: SlotState, interval: float) -> Write | None:
        """The write that is needed; None if the record is as it must be."""
        if self._other_of_the_name(request) is not None:
            return None
        key = record_key(request.event, request.vm)
        found = self.records.get(key)
        fields = {
            "id": request.event_id,
            "vm": request.vm[:_MAX_VM_NAME],
            "vm_id": self.vm_id,
            "state": state,
            "slot": slot,
            "not_before": _time_text(request.not_before),
            "renew_seconds": f"{max(_RENEW_SECONDS[0], interval):.0f}",
            "waits_for": "",
        }
        if found is not None and self.own(request) is not None and self._is_confirmed(found):
            age = found.record.age
            is_due = age is not None and age >= _RENEW_AT * found.renew_seconds
            compared = ("id", "state", "slot", "not_before")
            if not is_due and all(found.record.fields.get(name) == fields[name] for name in compared):
                return None
        return Write(key, found.record.etag if found else "", fields)

    def deletes(self, requested: set[str]) -> list[Write]:
        """Deletes of this VM's records without a request, and of some records of others older than a day."""
        unrequested = [one for one in self.records.values() if one.record.key not in requested]
        mine = [one.record for one in unrequested if one.vm_id == self.vm_id]
        others = [one.record for one in unrequested if one.vm_id != self.vm_id]
        old = [record for record in others if record.is_old]
        return [Write(record.key, record.etag, None) for record in (*mine, *old[:_MAX_OLD_DELETES])]


def _is_ready(one: VmRecord, seen_seconds: float) -> bool:
    """Whether the record says ready, and was written after this VM first saw this appearance of the event.

    An older record may be about an earlier appearance.
    """
    age = one.record.age
    return one.state == "ready" and one.is_fresh and age is not None and age <= seen_seconds
