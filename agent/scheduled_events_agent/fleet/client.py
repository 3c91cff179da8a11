"""The client of a fleet on one VM: lists the store, does the writes of ``plan``, and schedules the next sync.

It keeps the ETags of its own writes, the pauses after failures, and how long events have waited. It starts no
thread and reads no wall clock; ``sync`` blocks for its requests. Nothing is stored: a restart costs one write.
Invariant: a status comes only from a list that was requested after the write of the own record was answered.
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Literal

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.fleet.backend import Backend, BackendError, Record
from scheduled_events_agent.fleet.plan import SLOT_SECONDS, Plan, Write, plan, record_key, waits_for_text
from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.workflow import FleetEventStatus, FleetRequest

WaitName = Literal["slot", "ready"]

_MAX_ROUNDS = 4
_SHORTEN_TO = 0.8
"""Each list is requested up to a fifth earlier, at random, so that the VMs do not all ask together."""
_LATE_SECONDS = 125.0
"""A write that raised, or one that was sent twice, may take effect up to two minutes later."""
_GRANTED_SECONDS = 60.0
"""Time that the engine may take to store that an event begins, counted from the list that allowed it."""
_BACKOFF_SECONDS = (1.0, 30.0)
"""The first pause after failures, and the longest."""
_LONG_OUTAGE_SECONDS = SLOT_SECONDS / 2
"""If the store was unavailable for longer, records may have lapsed whose VMs still have begun."""
_RENEWAL_SECONDS = 90.0
"""By then after an outage, each VM has renewed its records: once a minute, or after a pause of 30 s at most.

If the store has asked for a pause, so much later.
"""


class _Confirmed(msgspec.Struct, frozen=True):
    """A record of this VM as this process has written it."""

    etag: str
    fields: Mapping[str, str]
    written_at: float

    def record(self, key: str, now: float) -> Record:
        return Record(key, self.etag, now - self.written_at, self.fields)


class FleetClient:
    """The client of one group. For one thread."""

    def __init__(
        self,
        backend: Backend,
        *,
        vm_id: str,
        max_events: int | None,
        random: Random,
        monotonic: Callable[[], float],
        on_wait_ended: Callable[[WaitName, float], None] = lambda *_: None,
        looks_again: bool = False,
    ) -> None:
        """``on_wait_ended`` gets the seconds that an event has waited for its slot, or for the other VMs.

        ``looks_again``: requests of an earlier client of this VM may still arrive.
        """
        self._backend = backend
        self._vm_id = vm_id
        self._max_events = max_events
        self._random = random
        self._monotonic = monotonic
        self._on_wait_ended = on_wait_ended
        self._confirmed: dict[str, _Confirmed] = {}
        self._events: dict[str, str] = {}
        """The requested events by the keys of their own records."""
        self._listed = 0
        """How many records the last list had, without old ones."""
        self._must_list = True
        """Whether the store's records of this VM are not known."""
        self._granted_at: dict[str, float] = {}
        """When a list last allowed an event to begin, by the key of this VM's claim."""
        self._relist_at = monotonic() + _LATE_SECONDS if looks_again else None
        """When to look for records that late requests have left."""
        self._backoff = Backoff(*_BACKOFF_SECONDS, random)
        self._retry_at = 0.0
        self._waiting_since: dict[tuple[str, WaitName], float] = {}
        self.statuses: Mapping[str, FleetEventStatus] = {}
        """The statuses by event, according to the last list."""
        self.listed_at = float("-inf")
        """When that list was sent, monotonic."""
        self.next_sync_at: float | None = None
        """When the next sync is due, monotonic; None: not before the requests change."""
        self.failures = 0
        """Number of syncs in a row that have failed."""
        self.error: BackendError | None = None
        """Why the store cannot be used; None if it can."""
        self.unavailable_from: float | None = None
        """Since when the store is unavailable, monotonic; None if it is available."""
        self._was_missing = False
        """Whether there was no store since then: a new one has none of the records."""
        self._renewed_at = float("-inf")
        """When the records of all VMs are renewed after they may have been lost, monotonic."""

    def sync(self, requests: Iterable[FleetRequest]) -> None:
        """Do the writes and lists that are due. Never raises BackendError; sets ``error`` instead."""
        requests = tuple(requests)
        self._events = {record_key(request.event, request.vm): request.event for request in requests}
        waiting = {request.event: _waits_for_others(request) for request in requests}
        self.statuses = {
            event: status if waiting[event] else replace(status, has_slot=False, is_all_ready=False)
            for event, status in self.statuses.items()
            if event in waiting
        }
        if self._monotonic() >= self._retry_at:
            try:
                self._sync(requests)
            except BackendError as error:
                self._back_off(error)
            else:
                self._backoff.reset()
                self.failures = 0
                self.error = None
                self.unavailable_from = None
                self._was_missing = False
        self._observe_waits(requests)

    def _sync(self, requests: tuple[FleetRequest, ...]) -> None:
        seconds = self._write_known(requests)
        must_list = self._must_list or self.error is not None  # only an answer shows that it is available again
        has_waiting = any(_waits_for_others(request) for request in requests)
        if must_list or has_waiting or self._is_late_due(self._monotonic()):
            seconds = self._list_and_write(requests) * self._random.uniform(_SHORTEN_TO, 1.0)
        now = self._monotonic()
        due = [self._relist_at] if self._relist_at is not None else []
        if requests or self._must_list:
            due.append(now + seconds)
        self.next_sync_at = min(due, default=None)

    def _is_late_due(self, now: float) -> bool:
        return self._relist_at is not None and self._relist_at <= now

    def _write_known(self, requests: tuple[FleetRequest, ...]) -> float:
        """Do the writes that do not depend on other VMs, without a list."""
        if self._must_list:
            return 0.0
        now = self._monotonic()
        settled = [request for request in requests if request.stage != "requested" and not request.needs_slot]
        waiting = {record_key(request.event, request.vm) for request in requests if request not in settled}
        known = [one.record(key, now) for key, one in self._confirmed.items() if key not in waiting]
        found = self._plan(known, settled, now)
        self._carry_out(found.writes)
        return found.next_sync_seconds

    def _list_and_write(self, requests: tuple[FleetRequest, ...]) -> float:
        """List and write until a list shows the writes; the last list counts. Returns the next sync's time."""
        for _ in range(_MAX_ROUNDS):
            sent_at = self._monotonic()
            records = self._backend.list()
            if self._is_late_due(sent_at):
                self._relist_at = None
            self._listed = sum(not record.is_old for record in records)
            found = self._plan(records, requests, sent_at)
            if seconds := self._seconds_to_renewal(sent_at):
                self._renewed_at = sent_at + seconds
            self.statuses = found.statuses
            if sent_at < self._renewed_at:
                self.statuses = {key: replace(one, has_slot=False) for key, one in found.statuses.items()}
            self._remember_granted(sent_at)
            self.listed_at = sent_at
            self._must_list = False
            if not self._carry_out(found.writes):
                break
        return found.next_sync_seconds

    def _seconds_to_renewal(self, now: float) -> float:
        """In how many seconds each VM has renewed its records; 0 if none can be missing.

        Records of VMs that have begun may have lapsed in an outage, or gone with a deleted table.
        """
        if self.error is None or self.unavailable_from is None:
            return 0.0
        is_long = now - self.unavailable_from >= _LONG_OUTAGE_SECONDS
        if not self._was_missing and not is_long:
            return 0.0
        return _RENEWAL_SECONDS + self.error.retry_after

    def _remember_granted(self, now: float) -> None:
        """Note which events a list has allowed to begin. The engine may be about to begin: these claims stay."""
        granted = {key: now for key, event in self._events.items() if self.statuses[event].has_slot}
        self._granted_at = {key: at for key, at in self._granted_at.items() if key in self._events} | granted

    def _plan(self, records: list[Record], requests: Iterable[FleetRequest], listed_at: float) -> Plan:
        return plan(
            records,
            requests,
            vm_id=self._vm_id,
            confirmed={key: one.etag for key, one in self._confirmed.items()},
            granted={key for key, at in self._granted_at.items() if listed_at - at < _GRANTED_SECONDS},
            max_events=self._max_events,
            listed_at=listed_at,
            listed=self._listed,
        )

    def _carry_out(self, writes: Iterable[Write]) -> bool:
        """Do the writes. Returns whether another list must show their results."""
        must_list = False
        for write in writes:
            is_own = write.fields is not None or write.key in self._confirmed
            if must_list and not is_own:
                continue  # writes that others wait for come first; the next list shows this one again
            succeeded = self._write(write)
            is_claim = write.fields is not None and _is_claim(write.fields)
            if is_own and not succeeded:
                self._must_list = True
            must_list = must_list or is_claim or (is_own and not succeeded)
        return must_list

    def _write(self, write: Write) -> bool:
        """Do one write. Returns False if the record was changed meanwhile."""
        self._confirmed.pop(write.key, None)
        try:
            if write.fields is None:
                return self._backend.delete(write.key, write.etag)
            fields = {**write.fields, "waits_for": self._waits_for(write)}
            etag = self._backend.put(write.key, fields, write.etag)
        except BackendError:
            self._must_list = True  # whether it was written is not known
            raise
        finally:
            self._relist_at = self._monotonic() + _LATE_SECONDS
        if etag is None:
            return False
        self._confirmed[write.key] = _Confirmed(etag, fields, self._monotonic())
        return True

    def _waits_for(self, write: Write) -> str:
        """The VMs that a ready VM waits for, as a text for people who look at the fleet."""
        event = self._events.get(write.key, "")
        if write.fields is None or write.fields["state"] != "ready" or event not in self.statuses:
            return ""
        own = write.fields["vm"]  # not ready in the last list, which was before this write
        return waits_for_text(tuple(name for name in self.statuses[event].not_ready if name != own))

    def _back_off(self, error: BackendError) -> None:
        """Make a growing pause. It differs between VMs, so that they do not all come back together."""
        now = self._monotonic()
        self.failures += 1
        self._retry_at = self.next_sync_at = now + self._backoff.next_delay(error.retry_after)
        self.error = error
        self._was_missing = self._was_missing or error.kind == "not_found"
        if self.unavailable_from is None:
            self.unavailable_from = now

    def _observe_waits(self, requests: tuple[FleetRequest, ...]) -> None:
        """Note when events begin and end to wait. An event that is no longer requested has not ended its wait."""
        now = self._monotonic()
        known = {request.workflow_id for request in requests}
        self._waiting_since = {key: at for key, at in self._waiting_since.items() if key[0] in known}
        for request in requests:
            status = self.statuses.get(request.event, FleetEventStatus())
            waits_now: dict[WaitName, bool] = {
                "slot": request.needs_slot and not status.has_slot,
                "ready": request.stage == "ready" and request.needs_all and not status.is_all_ready,
            }
            for what, is_waiting in waits_now.items():
                key = (request.workflow_id, what)
                if is_waiting:
                    self._waiting_since.setdefault(key, now)
                elif key in self._waiting_since:
                    self._on_wait_ended(what, now - self._waiting_since.pop(key))


def _is_claim(fields: Mapping[str, str]) -> bool:
    """Whether a list after this write may allow something."""
    return fields["state"] in ("claimed", "ready") or fields["slot"] == "claimed"


def _waits_for_others(request: FleetRequest) -> bool:
    return request.needs_slot or (request.stage == "ready" and request.needs_all)
