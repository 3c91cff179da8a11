"""The fleet's protocol, as rows of the ledger: which events may begin, who is ready, and what frees the slots.

Owns what this VM knows of the ledger and when it asks again. Starts no thread and reads no clock; ``visit`` blocks
for its requests. The one invariant: this VM calls all others ready only after its own row was written, and begins
for a slot only that the ledger has for the event. Nothing is stored here: a restart reads the ledger again.

    slot|GROUP    000, 001 ...    which event may be prepared for; free: event ""
    ready|EVENT   VM              ready, held (not ready), back (recovered)
    event|GROUP   EVENT           the index: what there is, for people and after a restart
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Literal

from msgspec.structs import replace

from agent.events import plain_name
from agent.fleet.ledger import Ledger, LedgerError, Row
from agent.fleet.rows import content_of, event_key_of, holder_of, is_held, key_of, resources_of, time_of
from agent.policy import matches_glob
from agent.workflow import Standing, Wish

__all__ = ["SLOT_LASTS", "Fleet", "event_key_of", "key_of", "resources_of", "time_of"]

SLOT_LASTS = timedelta(minutes=30)
"""After it was taken or extended: then a slot whose VMs are all dead is free."""
_EXTEND_BEFORE = timedelta(minutes=15)
_KEEP_ROWS = timedelta(days=1)
_ASK_SECONDS = (5.0, 15.0)
_LOOK_SECONDS = (4.0, 6.0)
_MAX_PAUSE_SECONDS = 30.0
_WATCHERS = 2
"""So many of the first named look again and again, should others die between writing and looking."""
_SLOT_TRIES = 3
_OLD_AT_ONCE = 10
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
    slot_until: datetime | None = None
    holder: str = ""
    ready: frozenset[str] = frozenset()
    looked_for: tuple[str, ...] | None = None
    """Whom the last look was for."""
    indexed: tuple[tuple[str, ...], datetime | None] | None = None
    """The resources and NotBefore of the index row that this VM has written."""
    is_touched: bool = False
    """Whether rows of this VM may have to be put back."""
    ended_at: datetime | None = None
    """When it was no longer wished for."""
    ask_at: datetime | None = None
    look_at: datetime | None = None
    extend_at: datetime | None = None
    back_at: datetime | None = None
    """When to try again to put its rows back."""
    waits_since: dict[Waited, datetime] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return event_key_of(self.wish.event)

    def forget_ready(self) -> None:
        """What the others have said may not be true any more."""
        self.ready, self.looked_for, self.look_at = frozenset(), None, None

    def begin_again(self) -> None:
        """The event is over, and has come back."""
        self.forget_ready()
        self.has_slot, self.holder, self.ask_at = False, "", None
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
        self._slots = f"slot|{key_of(group)}"
        self._index = f"event|{key_of(group)}"
        self._vm_id = vm_id
        self._max_events = max_events
        self._expect = expect
        self._random = random
        self._waited = waited
        self._events: dict[str, _Event] = {}
        self._has_looked_back = False
        self._failures = 0
        self._visited_at = datetime.min.replace(tzinfo=UTC)
        self._to_delete: dict[str, str] = {}
        """Events that have ended, with the key of this VM's row; "" if all rows of the event are old."""
        self._clear_at: datetime | None = None
        self._pause_until: datetime | None = None
        self.failure = ""
        """Why the ledger cannot be used; "" if it can."""
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
                self._failures, self._pause_until, self.failure, self.away_since = 0, None, "", None
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
        times = [at for one in events for at in (one.ask_at, one.look_at, one.extend_at, one.back_at) if at]
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
                event.ask_at, event.look_at = event.ask_at and now, event.look_at and now
                event.extend_at, event.back_at = event.extend_at and now, event.back_at and now
        self._visited_at = now

    def _take(self, wishes: Iterable[Wish], now: datetime) -> None:
        by_event = {wish.event: wish for wish in wishes}
        for name, wish in by_event.items():
            if name not in self._events:
                # After a restart this VM may have written something that is not true any more.
                is_new = self._has_looked_back
                self._events[name] = _Event(wish, row="" if is_new else "unknown", is_touched=not is_new)
            elif self._events[name].wish.workflow != wish.workflow:
                self._events[name].begin_again()
            self._events[name].wish, self._events[name].ended_at = wish, None
        for name in self._events.keys() - by_event.keys():
            event = self._events[name]
            is_shared = len(event.wish.expected) > 1
            event.is_touched = event.is_touched or (is_shared and event.row != "back")
            event.wish, event.ended_at = replace(event.wish, stage="idle"), event.ended_at or now

    def _leave_alone(self, error: LedgerError, now: datetime) -> None:
        """A growing pause, and not the same for all VMs, so that they do not come back together."""
        self._failures += 1
        pause = min(_MAX_PAUSE_SECONDS, 2.0 ** min(self._failures - 1, 10)) * self._random.uniform(0.5, 1.0)
        asked = min(error.retry_after, _MAX_RETRY_AFTER_SECONDS) * self._random.uniform(1.0, 1.5)
        self._pause_until = now + timedelta(seconds=max(pause, asked))
        self.failure, self.away_since = str(error), self.away_since or now
        for event in self._events.values():
            event.forget_ready()

    def _attend(self, event: _Event, now: datetime) -> None:
        wish = event.wish
        if wish.stage == "idle":
            event.ask_at = event.look_at = event.extend_at = None
            event.waits_since.clear()
            if event.is_touched and (event.back_at is None or event.back_at <= now):
                self._put_back(event, now)
            if event.ended_at is not None and now > event.ended_at + _KEEP_ROWS:
                del self._events[wish.event]
            return
        event.is_touched, event.back_at = True, None
        self._to_delete.pop(event.key, None)
        if event.indexed not in (None, (wish.resources, wish.not_before)):
            self._index_event(event, now)  # it would be deleted too early, or a VM that joined not be known
        if wish.stage in ("begin", "busy") and event.row in ("ready", "back", "unknown"):
            event.forget_ready()
            self._write(event, "held", now)
        if wish.needs_slot:
            self._mind_slot(event, now)
        else:
            event.ask_at = event.extend_at = None
        if wish.stage == "ready" and wish.needs_all:
            self._gather(event, now)
        else:
            event.forget_ready()
            event.waits_since.pop("ready", None)

    def _write(self, event: _Event, state: Literal["ready", "held", "back"], now: datetime) -> None:
        wish = event.wish
        event.row = "unknown"  # until the answer has come
        content = {"state": state, "vm": wish.own, "vm_id": self._vm_id, "at": now.isoformat()}
        self._ledger.put(f"ready|{event.key}", key_of(wish.own), content)
        event.row = state

    # --- readiness

    def _gather(self, event: _Event, now: datetime) -> None:
        """Write that this VM is ready, then look who else is: the last one to write sees all."""
        wish = event.wish
        event.waits_since.setdefault("ready", now)
        if event.row != "ready":
            self._write(event, "ready", now)
            event.looked_for = None
        is_watcher = wish.own in wish.expected[:_WATCHERS]
        if is_watcher and event.indexed is None:
            self._index_event(event, now)
        is_due = event.look_at is not None and event.look_at <= now
        if event.looked_for != wish.expected or is_due:
            event.ready = self._ready_names(event)
            event.looked_for = wish.expected
            if wish.own not in event.ready:
                event.row = "unknown"  # another VM has deleted it
            # Until its approval is taken: a VM that was ready may be held.
            must_look = is_watcher or event.row != "ready" or event.ready.issuperset(wish.expected)
            event.look_at = self._later(_LOOK_SECONDS, now) if must_look else None
        if event.ready.issuperset(wish.expected):
            self._has_waited("ready", event, now)

    def _ready_names(self, event: _Event) -> frozenset[str]:
        rows = self._ledger.list_rows(f"ready|{event.key}")
        contents = [row.content for row in rows if row.content.get("state") == "ready"]
        return frozenset(plain_name(content.get("vm", "")) for content in contents)

    # --- slots

    def _mind_slot(self, event: _Event, now: datetime) -> None:
        if event.has_slot:
            if event.extend_at is not None and event.extend_at <= now:
                self._extend(event, now)
        else:
            event.waits_since.setdefault("slot", now)
            if event.ask_at is None or event.ask_at <= now:
                self._ask_for_slot(event, now)

    def _ask_for_slot(self, event: _Event, now: datetime) -> None:
        """VMs of one event start with the same row, and meet there."""
        event.ask_at = None  # a failed visit asks again
        for _ in range(_SLOT_TRIES):
            rows = self._ledger.list_rows(self._slots)
            if self._has_row(event, rows, now):
                return
            held = [row for row in rows if is_held(row, now)]
            limit = self._max_events or 0
            taken = {row.key for row in held}
            if len(held) >= limit:
                first = min(held, key=lambda row: time_of(row, "until"), default=None)
                event.holder = holder_of(first) if first else ""
                break
            versions = {row.key: row.version for row in rows}
            key = next(key for key in map("{:03}".format, range(limit)) if key not in taken)
            if event.indexed is None:
                self._index_event(event, now)  # first, so that the slot is found again
            self._put_slot(event, key, versions.get(key, ""), now)
        event.ask_at = self._later(_ASK_SECONDS, now)

    def _has_row(self, event: _Event, rows: list[Row], now: datetime) -> bool:
        """Whether a slot is the event's. Of two the lower one stays: VMs of one event may take two at once."""
        mine = [row for row in rows if row.content.get("event") == event.key and is_held(row, now)]
        for row in mine[1:]:
            self._free(row)
        event.has_slot = bool(mine)
        if mine:
            event.slot_until, event.holder, event.ask_at = time_of(mine[0], "until"), "", None
            event.extend_at = self._later((0, 60), event.slot_until - _EXTEND_BEFORE)
            self._has_waited("slot", event, now)
        return event.has_slot

    def _put_slot(self, event: _Event, key: str, version: str, now: datetime) -> bool:
        times = {"until": (now + SLOT_LASTS).isoformat(), "at": now.isoformat()}
        content = {**content_of(event.wish), "event": event.key, **times}
        return self._ledger.put_if_unchanged(self._slots, key, content, version)

    def _extend(self, event: _Event, now: datetime) -> None:
        """A VM that lives and is not back keeps the slot."""
        rows = self._ledger.list_rows(self._slots)
        if not self._has_row(event, rows, now):
            event.extend_at = None
            return self._ask_for_slot(event, now)
        if event.slot_until is not None and event.slot_until - now < _EXTEND_BEFORE:
            row = next(row for row in rows if row.content.get("event") == event.key and is_held(row, now))
            self._put_slot(event, row.key, row.version, now)  # a lost race: another VM did it
            event.extend_at = now + SLOT_LASTS - _EXTEND_BEFORE
        return None

    def _free(self, row: Row) -> bool:
        return self._ledger.put_if_unchanged(self._slots, row.key, {"event": ""}, row.version)

    # --- the end

    def _put_back(self, event: _Event, now: datetime) -> None:
        """This VM has done with the event. The last one that is back frees the slot and clears away."""
        wish = event.wish
        event.has_slot, event.holder, event.back_at = False, "", None
        event.forget_ready()
        # After a restart it is not sure: the rows may be from before others joined.
        is_alone = set(wish.expected) <= {wish.own} and event.row == ""
        if not is_alone and event.row != "back":
            if event.row == "unknown" or (event.row == "" and event.indexed is None):
                self._index_event(event, now)  # without it, its row would not be found when it is old
            self._write(event, "back", now)
        is_last = is_alone or self._are_all_back(event)
        if is_last:
            slots = [row for row in self._ledger.list_rows(self._slots) if row.content.get("event") == event.key]
            if not all(self._free(row) for row in slots):
                event.back_at = self._later(_ASK_SECONDS, now)  # another VM has written it meanwhile
                return
            self._to_delete[event.key] = key_of(wish.own)
        if is_last or wish.own in wish.expected[:_WATCHERS]:
            self._find_old(now)
        event.is_touched, event.indexed = False, None

    def _are_all_back(self, event: _Event) -> bool:
        """Also those that have joined since this VM, which may have been restarted, last heard of the event."""
        wish, rows = event.wish, self._ledger.list_rows(f"ready|{event.key}")
        others = [row for row in rows if row.key != key_of(wish.own)]
        back = {plain_name(row.content.get("vm", "")) for row in others if row.content.get("state") == "back"}
        return len(back) == len(others) and {*back, wish.own}.issuperset(wish.expected)

    def _find_old(self, now: datetime) -> None:
        """Events whose VMs did not all come back."""
        rows = self._ledger.list_rows(self._index)
        old = [row.key for row in rows if time_of(row, "at") < now - _KEEP_ROWS]
        for key in old[:_OLD_AT_ONCE]:
            self._to_delete.setdefault(key, "")

    def _clear_away(self, now: datetime) -> None:
        """Delete some rows. No VM waits for that, so a failure does not count; it is tried again later."""
        if not self._to_delete or (self._clear_at is not None and now < self._clear_at):
            return
        self._clear_at = now + _CLEAR_AGAIN
        left = _DELETES_AT_ONCE
        with contextlib.suppress(LedgerError):
            while self._to_delete and left > 0:
                left -= self._delete_some(*next(iter(self._to_delete.items())), left)
            self._clear_at = now + timedelta(seconds=1) if self._to_delete else None

    def _delete_some(self, key: str, own: str, most: int) -> int:
        """Rows of VMs for which the event has come back stay. The index row last: until then it is found again."""
        rows = self._ledger.list_rows(f"ready|{key}")
        ended = [row for row in rows if not own or row.key == own or row.content.get("state") == "back"]
        names = [row.key for row in ended[:most]]
        if own and own not in names and len(ended) <= most:
            names.append(own)  # the list may be older than its row
        for name in names:
            self._ledger.put(f"ready|{key}", name, None)
        if len(ended) <= most:
            if len(ended) == len(rows):
                self._ledger.put(self._index, key, None)
            del self._to_delete[key]
        return len(ended[:most]) + 1

    def _index_event(self, event: _Event, now: datetime) -> None:
        content = {**content_of(event.wish), "at": _end_of(event.wish, now).isoformat()}
        self._ledger.put(self._index, event.key, content)
        event.indexed = event.wish.resources, event.wish.not_before

    def _look_back(self, own_names: tuple[str, ...]) -> None:
        """After a restart: what this VM still owes for events that ended while it was away."""
        mine = {plain_name(name) for name in own_names}
        if not mine:
            return  # not known yet
        for row in [*self._ledger.list_rows(self._index), *self._ledger.list_rows(self._slots)]:
            name, resources = row.content.get("name", ""), resources_of(row)
            own = next((plain_name(one) for one in resources if plain_name(one) in mine), "")
            if not own or name in self._events or not row.content.get("id"):
                continue
            counted = [one for one in resources if plain_name(one) in mine or matches_glob(one, self._expect)]
            wish = Wish(
                event=name,
                workflow="",
                event_id=row.content["id"],
                resources=resources,
                not_before=None,
                own=own,
                expected=tuple(map(plain_name, counted)),
                needs_slot=True,
                needs_all=True,
                stage="idle",
            )
            self._events[name] = _Event(wish, row="unknown", is_touched=True)
        self._has_looked_back = True

    def _later(self, seconds: tuple[float, float], now: datetime) -> datetime:
        return now + timedelta(seconds=self._random.uniform(*seconds))

    def _has_waited(self, what: Waited, event: _Event, now: datetime) -> None:
        since = event.waits_since.get(what)
        if since is not None and since <= now:
            self._waited(what, (now - since).total_seconds())
            event.waits_since[what] = datetime.max.replace(tzinfo=UTC)  # told once


def _end_of(wish: Wish, now: datetime) -> datetime:
    return max(wish.not_before or now, now)
