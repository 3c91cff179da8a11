"""How many requests the store of a fleet gets: the real client and plan on simulated time, without faults.

Each VM has a small model of the agent's workflow: it begins when it may, or at its latest begin; its hooks take a
while; it approves when all VMs of the event are ready, and if it began late, with a slot; the event lasts; it
recovers. Where requests take time, each sync has a thread of its own, of which one runs at a time: VMs then write
between the requests of others.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from typing import Any

from memory_backend import MemoryStore
from msgspec.structs import replace
from simulation import Schedule
from stepped_thread import SteppedThread

from scheduled_events_agent.fleet.backend import Record
from scheduled_events_agent.fleet.client import FleetClient
from scheduled_events_agent.workflow import FleetRequest

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
LATEST_BEGIN_SECONDS = 300.0
_SEES_STARTED = (1.0, 2.0)
Seconds = tuple[float, float]
"""From, to; drawn again each time."""


@dataclass
class Event:
    """All of its VMs approve it together, or none does and Azure starts it at NotBefore."""

    name: str
    vms: tuple[str, ...]
    announced_at: float
    not_before: float
    prepare: Seconds
    lasts: Seconds
    recover: Seconds
    silent: tuple[str, ...] = ()
    """VMs without an agent."""
    has_started: bool = False
    handling_since: dict[str, float] = field(default_factory=dict)
    without_slot: set[str] = field(default_factory=set)


class LoadSimulation(Schedule):
    """One group, its store, and what will happen. ``latency``: how long each request takes."""

    def __init__(self, vms: int, *, latency: Seconds = (0.0, 0.0), max_events: int = 1) -> None:
        super().__init__()
        self.latency = latency
        self.max_events = max_events
        self.store = MemoryStore(lambda: self.at)
        self.chance = random.Random("load")
        self.requests: Counter[str] = Counter()
        """By VM."""
        self.listed = 0
        """How many records the lists gave."""
        self.events: list[Event] = []
        self.vms = {name: LoadVm(self, name) for name in (f"vm_{number}" for number in range(vms))}

    def run(self, until: float = inf) -> None:
        """Without ``until``: until nothing more happens."""
        while self.next_at <= until and self.next_at < inf:
            self.jump()()
        if until != inf:
            self.at = until

    def start_agents(self) -> None:
        for vm in self.vms.values():
            vm.sync()
        self.run(self.at + 1.0)

    def announce(
        self,
        *vms: str,
        notice: float = 900.0,
        seen: Seconds = (0.0, 1.0),
        prepare: Seconds = (20.0, 40.0),
        lasts: Seconds = (10.0, 12.0),
        recover: Seconds = (20.0, 40.0),
        silent: tuple[str, ...] = (),
    ) -> Event:
        """``seen``: how long until each VM sees it."""
        event = Event(
            name=f"event-{len(self.events)}",
            vms=vms,
            announced_at=self.at,
            not_before=self.at + notice,
            prepare=prepare,
            lasts=lasts,
            recover=recover,
            silent=silent,
        )
        self.events.append(event)
        for name in vms:
            if name not in silent:
                self.after(self.chance.uniform(*seen), partial(self.vms[name].see, event))
        self.after(notice, partial(self.start, event))
        return event

    def start(self, event: Event) -> None:
        """Azure starts it, once."""
        if event.has_started:
            return
        event.has_started = True
        for name in event.vms:
            if name not in event.silent:
                self.after(self.chance.uniform(*_SEES_STARTED), partial(self.vms[name].see_started, event))
                self.after(self.chance.uniform(*event.lasts), partial(self.vms[name].recover, event))


class LoadVm:
    """A VM with a real client. Counts its requests."""

    def __init__(self, simulation: LoadSimulation, name: str) -> None:
        self.name = name
        self._simulation = simulation
        self._requests: dict[str, FleetRequest] = {}
        self._events: dict[str, Event] = {}
        self._client = FleetClient(
            self,
            vm_id=f"id-{name}",
            max_events=simulation.max_events,
            random=random.Random(name),
            monotonic=lambda: simulation.at,
        )
        self._thread: SteppedThread | None = None
        self._is_syncing = False
        self._has_news = False
        self._woken = 0

    # --- the store, as the client sees it

    def list(self) -> list[Record]:
        self._spend()
        found = self._simulation.store.list()
        self._simulation.listed += len(found)
        return found

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        self._spend()
        return self._simulation.store.put(key, fields, etag)

    def delete(self, key: str, etag: str) -> bool:
        self._spend()
        return self._simulation.store.delete(key, etag)

    def _spend(self) -> None:
        self._simulation.requests[self.name] += 1
        if self._thread is not None:
            self._simulation.after(self._simulation.chance.uniform(*self._simulation.latency), self._resume)
            self._thread.pause()

    # --- the fleet's thread

    def sync(self) -> None:
        """Now, or as soon as the sync that is under way has ended."""
        self._has_news = True
        if self._is_syncing:
            return
        self._is_syncing = True
        if self._simulation.latency[1]:
            self._thread = self._thread or SteppedThread()
            self._thread.begin(self._sync)
            self._raise_failure()
        else:
            self._sync()

    def _resume(self) -> None:
        assert self._thread is not None
        self._thread.resume()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._thread is not None and self._thread.failure is not None:
            raise self._thread.failure

    def _sync(self) -> None:
        while self._has_news:
            self._has_news = False
            self._client.sync(self._requests.values())
            self._act()
        self._is_syncing = False
        self._woken += 1
        at = self._client.next_sync_at
        if at is not None:
            self._simulation.after(max(0.0, at - self._simulation.at), partial(self._wake, self._woken))

    def _wake(self, woken: int) -> None:
        if woken == self._woken:
            self.sync()

    # --- the workflow

    def _act(self) -> None:
        for name, request in list(self._requests.items()):
            status = self._client.statuses.get(name)
            if status is None or status.workflow_id != request.workflow_id:
                continue
            event = self._events[name]
            if status.has_slot and request.stage == "requested":
                self._begin(event)
            is_ready = status.is_all_ready or (len(event.vms) == 1 and request.lacks_slot)
            if is_ready and (status.has_slot or not request.lacks_slot):
                self._approve(event)

    def see(self, event: Event) -> None:
        simulation = self._simulation
        self._events[event.name] = event
        self._requests[event.name] = FleetRequest(
            event=event.name,
            workflow_id=event.name,
            event_id=event.name,
            not_before=START + timedelta(seconds=event.not_before),
            vm=self.name,
            stage="requested",
            needs_slot=True,
            lacks_slot=False,
            needs_all=len(event.vms) > 1,
            requested_vms=event.vms,
            seen_at=simulation.at,
        )
        simulation.after(event.not_before - LATEST_BEGIN_SECONDS - simulation.at, partial(self._begin_late, event))
        self.sync()

    def _begin_late(self, event: Event) -> None:
        if self.name not in event.handling_since:
            event.without_slot.add(self.name)
            self._begin(event)

    def _begin(self, event: Event) -> None:
        if self.name in event.handling_since:
            return
        event.handling_since[self.name] = self._simulation.at
        lacks_slot = self.name in event.without_slot
        self._become(event, stage="not_ready", needs_slot=False, lacks_slot=lacks_slot)
        self._simulation.after(self._simulation.chance.uniform(*event.prepare), partial(self._end_prepare, event))

    def _end_prepare(self, event: Event) -> None:
        lacks_slot = self.name in event.without_slot
        if event.has_started:
            return
        if len(event.vms) > 1:
            self._become(event, stage="ready", needs_slot=lacks_slot)
        elif lacks_slot:
            self._become(event, needs_slot=True)
        else:
            self._simulation.start(event)

    def _approve(self, event: Event) -> None:
        self.see_started(event)
        self._simulation.start(event)

    def see_started(self, event: Event) -> None:
        self._become(event, stage="not_ready", needs_slot=False)

    def recover(self, event: Event) -> None:
        self._simulation.after(self._simulation.chance.uniform(*event.recover), partial(self._end, event))

    def _end(self, event: Event) -> None:
        del self._requests[event.name], self._events[event.name]
        self.sync()

    def _become(self, event: Event, **changes: Any) -> None:
        before = self._requests[event.name]
        request = self._requests[event.name] = replace(before, **changes)
        if request != before:
            self.sync()
