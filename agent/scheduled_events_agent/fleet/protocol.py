"""The fleet's protocol, as rows of the ledger: which events may begin, who is ready, and what frees the slots.

Owns what this VM knows of the ledger and when it asks again. Starts no thread and reads no clock; ``visit`` blocks
for its requests. The one invariant: this VM calls all others ready only after its own row was written, and begins
for a slot only that the ledger has for the event. Nothing is stored here: a restart reads the ledger again.

    slot|GROUP    000, 001 ...    which event may be prepared for; free: event ""
    vm|GROUP      EVENT|VM        ready, held (not ready), back (recovered)

All rows of a group are in these two partitions, so each is found, and deleted when it is old.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Literal

from msgspec.structs import replace

from scheduled_events_agent.events import plain_name
from scheduled_events_agent.fleet.ledger import Ledger, LedgerError, Row
from scheduled_events_agent.fleet.rows import (
    LONG_AGO,
    content_of,
    event_key_of,
    holder_of,
    is_held,
    key_of,
    partition_of_slots,
    partition_of_vms,
    prefix_of,
    resources_of,
    time_of,
)
from scheduled_events_agent.policy import matches_glob
from scheduled_events_agent.workflow import Standing, Wish

__all__ = ["SLOT_LASTS", "Fleet"]

SLOT_LASTS = timedelta(minutes=30)
"""After it was taken or extended: then a slot whose VMs are all dead is free."""
_EXTEND_BEFORE = timedelta(minutes=15)
_KEEP_ROWS = timedelta(days=1)
_ASK_SECONDS = (5.0, 15.0)
_LOOK_SECONDS = (4.0, 6.0)
_LOOK_RARELY_SECONDS = 60.0
"""And as many more as VMs are expected, so that lists of many rows are rare. At most twice that."""
_MAX_PAUSE_SECONDS = 30.0
_WATCHERS = 2
"""So many of the first named look again and again, should others die between writing and looking."""
_SLOT_TRIES = 3
_OLD_AT_ONCE = 100
_DELETES_AT_ONCE = 20
_CLEAR_AGAIN = timedelta(minutes=5)
_MAX_RETRY_AFTER_SECONDS = 300.0

Waited = Literal["slot", "ready"]


@dataclass
class _Event:
    """What this VM knows of one event in the ledger."""

    wish: Wish
    row: Literal["", "unknown", "ready", "held", "back"] = ""
    """Of this VM, as it was last written."""
    has_slot: bool = False
    holder: str = ""
    ready: frozenset[str] = frozenset()
    looked_for: tuple[str, ...] | None = None
    """Whom the last look was for."""
    is_touched: bool = False
    """Whether rows of this VM may have to be put back."""
    gone_at: datetime = LONG_AGO
    """When this VM last saw it gone. If it comes back, what VMs said before does not count."""
    ended_at: datetime | None = None
    """When it was no longer wished for."""
    ask_at: datetime | None = None
    """When to ask for a slot, or to extend the one it has."""
    look_at: datetime | None = None
    back_at: datetime | None = None
    """When to try again to put its rows back."""
    waits_since: dict[Waited, datetime] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return event_key_of(self.wish.event)

    @property
    def is_watcher(self) -> bool:
        return self.wish.own in self.wish.expected[:_WATCHERS]

    def forget_ready(self) -> None:
        """What the others have said may not be true any more."""
        self.ready = frozenset()
        self.looked_for = None
        self.look_at = None

    def begin_again(self) -> None:
        """The event is over, and has come back."""
        self.forget_ready()
        self.has_slot = False
        self.holder = ""
        self.ask_at = None
        self.gone_at = max(self.gone_at, self.ended_at or LONG_AGO)
        self.row = "unknown" if self.row else ""
        self.waits_since.clear()


class Fleet:
    """What this VM asks of the ledger. For one thread."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        group: str,
        vm_id: str,
        max_events: int | None,
        expect: tuple[str, ...],
        random: Random,
        waited: Callable[[Waited, float], None] = lambda _, __: None,
    ) -> None:
        """``waited`` hears for how many seconds an event has waited for its slot, or for the other VMs."""
        self._ledger = ledger
        self._slots = partition_of_slots(group)
        self._vms = partition_of_vms(group)
        self._vm_id = vm_id
        self._max_events = max_events
        self._expect = expect
        self._random = random
        self._waited = waited
        self._events: dict[str, _Event] = {}
        self._has_looked_back = False
        self.failures = 0
        """How many visits in a row have failed."""
        self._visited_at = datetime.min.replace(tzinfo=UTC)
        self._to_delete: dict[str, str] = {}
        """Rows of VMs whose events have ended: their keys, with their versions."""
        self._clear_at: datetime | None = None
        self._pause_until: datetime | None = None
        self.failure = ""
        """Why the ledger cannot be used; "" if it can."""
        self.failure_kind = ""
        """The last one's; see LedgerError."""
        self.away_since: datetime | None = None

    def visit(self, wishes: Iterable[Wish], own_names: tuple[str, ...], now: datetime) -> dict[str, Standing]:
        """Do what is due; how the wishes stand then. Never raises LedgerError, see ``failure``."""
        self._take(wishes, now)
        self._look_at_clock(now)
        if self._pause_until is None or self._pause_until <= now:
            try:
                if not self._has_looked_back:
                    self._look_back(own_names)
                # Open events first: VMs wait for these rows.
                for event in sorted(self._events.values(), key=lambda event: event.wish.stage == "idle"):
                    self._attend(event, now)
                self.failures = 0
                self._pause_until = None
                self.failure = ""
                self.away_since = None
                self._clear_away(now)
            except LedgerError as error:
                self._leave_alone(error, now)
        return {
            name: Standing(
                workflow=event.wish.workflow, has_slot=event.has_slot, holder=event.holder, ready=event.ready
            )
            for name, event in self._events.items()
            if event.wish.stage != "idle"
        }

    def next_at(self, now: datetime) -> datetime | None:
        """When the next visit is due without news; None: never."""
        if self._pause_until is not None:
            return self._pause_until
        events = self._events.values()
        times = [at for one in events for at in (one.ask_at, one.look_at, one.back_at) if at]
        if self._to_delete and self._clear_at:
            times.append(self._clear_at)
        return max(now, min(times)) if times else None

    def awaited(self) -> int:
        """How many VMs are not known to be ready for events that this VM is ready for."""
        mine = [event for event in self._events.values() if event.wish.stage == "ready" and event.wish.needs_all]
        return sum(len(set(event.wish.expected) - event.ready) for event in mine)

    def _look_at_clock(self, now: datetime) -> None:
        """A clock that was set back must not put off what is due."""
        if now < self._visited_at:
            self._pause_until = self._clear_at = None
            self.away_since = self.away_since and now
            for event in self._events.values():
                event.ask_at = event.ask_at and now
                event.look_at = event.look_at and now
                event.back_at = event.back_at and now
                event.gone_at = min(event.gone_at, now)
        self._visited_at = now

    def _take(self, wishes: Iterable[Wish], now: datetime) -> None:
        by_event = {wish.event: wish for wish in wishes}
        for name, wish in by_event.items():
            known = self._events.get(name)
            if known is None:
                # After a restart this VM may have written something that is not true any more.
                is_new = self._has_looked_back
                self._events[name] = _Event(wish, row="" if is_new else "unknown", is_touched=not is_new)
            elif known.wish.workflow != wish.workflow:
                known.begin_again()
            event = self._events[name]
            if wish.stage == "gone" and (known is None or known.wish.stage != "gone"):
                event.gone_at = now
            event.wish = wish
            event.ended_at = None
        for name in self._events.keys() - by_event.keys():
            event = self._events[name]
            is_shared = len(event.wish.expected) > 1
            event.is_touched = event.is_touched or (is_shared and event.row != "back")
            event.wish = replace(event.wish, stage="idle")
            event.ended_at = event.ended_at or now

    def _leave_alone(self, error: LedgerError, now: datetime) -> None:
        """A growing pause, and not the same for all VMs, so that they do not come back together."""
        self.failures += 1
        pause = min(_MAX_PAUSE_SECONDS, 2.0 ** min(self.failures - 1, 10)) * self._random.uniform(0.5, 1.0)
        asked = min(error.retry_after, _MAX_RETRY_AFTER_SECONDS) * self._random.uniform(1.0, 1.5)
        self._pause_until = now + timedelta(seconds=max(pause, asked))
        self.failure = str(error)
        self.failure_kind = error.kind
        self.away_since = self.away_since or now
        for event in self._events.values():
            event.forget_ready()

    def _attend(self, event: _Event, now: datetime) -> None:
        wish = event.wish
        if wish.stage == "idle":
            event.ask_at = event.look_at = None
            event.waits_since.clear()
            if event.is_touched and (event.back_at is None or event.back_at <= now):
                self._put_back(event, now)
            if event.ended_at is not None and now > event.ended_at + _KEEP_ROWS:
                del self._events[wish.event]
            return
        event.is_touched = True
        event.back_at = None
        if wish.stage in ("begin", "busy", "gone") and event.row in ("ready", "back", "unknown"):
            event.forget_ready()
            self._write(event, "held", now)
        if wish.needs_slot:
            self._mind_slot(event, now)
        else:
            event.ask_at = None
        if wish.stage == "ready" and wish.needs_all:
            self._gather(event, now)
        else:
            if wish.stage == "away":  # another VM has approved it, or Azure has started it
                self._has_waited("ready", event, now)
            event.forget_ready()
            event.waits_since.pop("ready", None)

    def _write(self, event: _Event, state: Literal["ready", "held", "back"], now: datetime) -> None:
        wish = event.wish
        event.row = "unknown"  # until the answer has come
        until = max(wish.not_before or now, now) + _KEEP_ROWS
        times = {"at": now.isoformat(), "until": until.isoformat(), "gone_at": event.gone_at.isoformat()}
        told = {"state": state, "vm_id": self._vm_id, **times}
        content = {**content_of(wish, has_resources=event.is_watcher), **told}
        self._ledger.put(self._vms, prefix_of(event.key) + key_of(wish.own), content)
        event.row = state

    def _rows_of(self, event: _Event) -> list[Row]:
        return self._ledger.list_rows(self._vms, prefix_of(event.key))

    # --- readiness

    def _gather(self, event: _Event, now: datetime) -> None:
        """Write that this VM is ready, then look who else is: the last one to write sees all."""
        wish = event.wish
        event.waits_since.setdefault("ready", now)
        if event.row != "ready" or event.looked_for not in (None, wish.expected):
            self._write(event, "ready", now)
            event.looked_for = None
        is_due = event.look_at is not None and event.look_at <= now
        if event.looked_for != wish.expected or is_due:
            event.ready = self._ready_names(event)
            event.looked_for = wish.expected
            if wish.own not in event.ready:
                event.row = "unknown"  # another VM has deleted it, or saw the event gone since
            # Until its approval is taken: a VM that was ready may be held.
            must_look = event.is_watcher or event.row != "ready" or event.ready.issuperset(wish.expected)
            # The others have to write again if they have not seen that the event was gone.
            rarely = _LOOK_RARELY_SECONDS + len(wish.expected)
            event.look_at = self._later(_LOOK_SECONDS if must_look else (rarely, 2 * rarely), now)
        if event.ready.issuperset(wish.expected):
            self._has_waited("ready", event, now)

    def _ready_names(self, event: _Event) -> frozenset[str]:
        """A VM that cannot reach the ledger may still seem ready for an event that was gone meanwhile."""
        rows = self._rows_of(event)
        gone_at = max((time_of(row, "gone_at") for row in rows), default=LONG_AGO)
        return _names_in([row for row in rows if time_of(row, "at") >= gone_at], "ready")

    # --- slots

    def _mind_slot(self, event: _Event, now: datetime) -> None:
        if not event.has_slot:
            event.waits_since.setdefault("slot", now)
        if event.ask_at is None or event.ask_at <= now:
            self._ask_for_slot(event, now)

    def _ask_for_slot(self, event: _Event, now: datetime) -> None:
        """VMs of one event start with the same row, and meet there. A VM that lives and is not back extends it."""
        event.ask_at = None  # a failed visit asks again
        for _ in range(_SLOT_TRIES):
            rows = self._ledger.list_rows(self._slots)
            if self._has_row(event, rows, now):
                return
            held = {row.key: row for row in rows if is_held(row, now)}
            mine = [key for key, row in held.items() if row.content["event"] == event.key]
            free = [key for key in map("{:03}".format, range(self._max_events or 0)) if key not in held]
            if not mine and len(held) >= (self._max_events or 0):
                first = min(held.values(), key=lambda row: time_of(row, "until"), default=None)
                event.holder = holder_of(first) if first else ""
                break
            versions = {row.key: row.version for row in rows}
            key = (mine or free)[0]
            times = {"until": (now + SLOT_LASTS).isoformat(), "at": now.isoformat()}
            content = {**content_of(event.wish), "event": event.key, **times}
            self._ledger.put_if_unchanged(self._slots, key, content, versions.get(key, ""))
        event.ask_at = self._later(_ASK_SECONDS, now)

    def _has_row(self, event: _Event, rows: list[Row], now: datetime) -> bool:
        """Whether a slot is the event's, for long enough, and names this VM: until then another VM may free it.

        Of two the lower one stays: VMs of one event may take two at once.
        """
        mine = [row for row in rows if row.content.get("event") == event.key and is_held(row, now)]
        for row in mine[1:]:
            self._free(row)
        event.has_slot = bool(mine) and event.wish.own in map(plain_name, resources_of(mine[0]))
        if not event.has_slot or time_of(mine[0], "until") - now < _EXTEND_BEFORE:
            return False
        event.holder = ""
        event.ask_at = self._later((0, 60), time_of(mine[0], "until") - _EXTEND_BEFORE)
        self._has_waited("slot", event, now)
        return True

    def _free(self, row: Row) -> bool:
        return self._ledger.put_if_unchanged(self._slots, row.key, {"event": ""}, row.version)

    # --- the end

    def _put_back(self, event: _Event, now: datetime) -> None:
        """This VM has done with the event. The last one that is back frees the slot and clears away."""
        wish = event.wish
        had_slot = event.has_slot
        slots = list[Row]()
        event.has_slot = False
        event.holder = ""
        event.back_at = None
        event.forget_ready()
        # After a restart it is not sure: the rows may be from before others joined.
        is_alone = set(wish.expected) <= {wish.own} and event.row == ""
        if not is_alone and event.row != "back":
            self._write(event, "back", now)
        rows = [] if is_alone else self._rows_of(event)
        is_last = self._are_all_back(event, rows, wish.expected)
        if is_last:
            slots = [row for row in self._ledger.list_rows(self._slots) if row.content.get("event") == event.key]
            # A VM that has joined may not have written a row yet.
            is_last = all(
                self._are_all_back(event, rows, self._counted(resources_of(row), wish.own)) for row in slots
            )
            has_changed = is_last and not all(self._free(row) for row in slots)
            if has_changed or (is_alone and not is_last):
                event.row = event.row or "unknown"
                event.back_at = self._later(_ASK_SECONDS, now)
                return
        if is_last and (slots or not had_slot):  # else the VM that has freed the slot deletes the rows
            self._to_delete.update({row.key: row.version for row in rows})
        if is_last or event.is_watcher:
            self._find_old(now)
        event.is_touched = False

    def _are_all_back(self, event: _Event, rows: list[Row], expected: Iterable[str]) -> bool:
        """Whether every other VM of the event is back.

        Those count too that have joined since this VM, which may have been restarted, last heard of the event.
        """
        own = event.wish.own
        others = [row for row in rows if plain_name(row.content.get("vm", "")) != own]
        back = _names_in(others, "back")
        return len(back) == len(others) and back.union((own,)).issuperset(expected)

    def _find_old(self, now: datetime) -> None:
        """Rows of events whose VMs did not all come back."""
        old = [row for row in self._ledger.list_rows(self._vms) if time_of(row, "until") < now]
        self._to_delete.update({row.key: row.version for row in old[:_OLD_AT_ONCE]})

    def _clear_away(self, now: datetime) -> None:
        """Delete some rows that have not changed since: for their VMs the event may have come back.

        No VM waits for that, so a failure does not count; it is tried again later.
        """
        if not self._to_delete or (self._clear_at is not None and now < self._clear_at):
            return
        self._clear_at = now + _CLEAR_AGAIN
        with contextlib.suppress(LedgerError):
            for key in [*self._to_delete][:_DELETES_AT_ONCE]:
                self._ledger.put_if_unchanged(self._vms, key, None, self._to_delete[key])
                del self._to_delete[key]
            self._clear_at = now + timedelta(seconds=1) if self._to_delete else None

    def _look_back(self, own_names: tuple[str, ...]) -> None:
        """After a restart: what this VM still owes for events that ended while it was away."""
        mine = {plain_name(name) for name in own_names}
        if not mine:
            return  # not known yet
        # Slots first: they name all VMs of their events.
        for row in [*self._ledger.list_rows(self._slots), *self._ledger.list_rows(self._vms)]:
            name = row.content.get("name", "")
            resources = resources_of(row) or (row.content.get("vm", ""),)
            own = next((plain_name(one) for one in resources if plain_name(one) in mine), "")
            if not own or not row.content.get("id"):
                continue
            if name in self._events:
                known = self._events[name]
                known.gone_at = max(known.gone_at, time_of(row, "gone_at"))
                continue
            wish = Wish(
                event=name,
                workflow="",
                event_id=row.content["id"],
                resources=resources,
                not_before=None,
                own=own,
                expected=self._counted(resources, own),
                needs_slot=True,
                needs_all=True,
                stage="idle",
            )
            self._events[name] = _Event(wish, row="unknown", is_touched=True)
        self._has_looked_back = True

    def _counted(self, resources: tuple[str, ...], own: str) -> tuple[str, ...]:
        """The plain names of those whose readiness counts."""
        counted = [one for one in resources if plain_name(one) == own or matches_glob(one, self._expect)]
        return tuple(map(plain_name, counted))

    def _later(self, seconds: tuple[float, float], now: datetime) -> datetime:
        return now + timedelta(seconds=self._random.uniform(*seconds))

    def _has_waited(self, what: Waited, event: _Event, now: datetime) -> None:
        since = event.waits_since.get(what)
        if since is not None and since <= now:
            self._waited(what, (now - since).total_seconds())
            event.waits_since[what] = datetime.max.replace(tzinfo=UTC)  # told once


def _names_in(rows: list[Row], state: str) -> frozenset[str]:
    """The plain names of the VMs whose rows say so."""
    return frozenset(plain_name(row.content.get("vm", "")) for row in rows if row.content.get("state") == state)
