"""How many requests the ledger of a large fleet gets: the real protocol on thousands of VMs, without faults.

Each VM has a small model of the agent's workflow. Twelve hours: in the first a maintenance with an event for each
VM reaches all of them within a minute, in the fourth one with an event for each group; each hour one event names
five VMs of each group. Nothing is throttled: what is counted is what the VMs ask.

And a hundred VMs of one event that are ready within a second, with a table that refuses lists over its target.
"""

import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from world import START

from scheduled_events_agent.fleet.ledger import LedgerError, Row
from scheduled_events_agent.fleet.memory import MemoryLedger
from scheduled_events_agent.fleet.protocol import Fleet
from scheduled_events_agent.fleet.rows import is_held
from scheduled_events_agent.workflow import Standing, Wish
from scheduled_events_agent.workflow.wishes import WishStage

HOURS = 12
_NOTICE = 900.0
_LATEST_BEGIN = 300.0
_LASTS = 10.0
# How long hooks take, on each VM another time.
_HOOKS = (20.0, 40.0)
_TARGET_ROWS = 2000
"""Of a partition in a second, as Azure documents it."""


class Load(NamedTuple):
    """Of some hours. ``partition``: in the busiest one; ``rows``: a list counts as many as it gives."""

    name: str
    vms: int
    requests: int
    busy_seconds: int
    worst: int
    mean: float
    """Of the seconds with requests."""
    high: int
    """99.9 % of those have no more."""
    partition_worst: int
    partition_rows_worst: int

    def text(self) -> str:
        return (
            f"{self.name}: {self.requests} requests of {self.vms} VMs in {self.busy_seconds} s; "
            f"a second: mean {self.mean:.0f}, 99.9th percentile {self.high}, worst {self.worst}; "
            f"in the busiest partition: worst {self.partition_worst} requests, {self.partition_rows_worst} rows"
        )


class CountedLedger:
    """Counts by second and partition; refuses lists once a partition has given ``most_rows`` in a second."""

    def __init__(self, world: "LoadWorld", most_rows: float) -> None:
        self.ledger = MemoryLedger()
        self.refused = 0
        self._world = world
        self._most_rows = most_rows
        self.per_second: Counter[int] = Counter()
        self.per_partition: Counter[tuple[int, str]] = Counter()
        self.rows_per_partition: Counter[tuple[int, str]] = Counter()

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        self._count(partition, 1)
        self.ledger.put(partition, key, content)

    def put_if_unchanged(self, partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        self._count(partition, 1)
        return self.ledger.put_if_unchanged(partition, key, content, version)

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        if self.rows_per_partition[int(self._world.at), partition] >= self._most_rows:
            self._count(partition, 0)
            self.refused += 1
            raise LedgerError("busy", kind="throttled")
        rows = self.ledger.list_rows(partition, prefix)
        self._count(partition, max(1, len(rows)))
        return rows

    def _count(self, partition: str, rows: int) -> None:
        second = int(self._world.at)
        self.per_second[second] += 1
        self.per_partition[second, partition] += 1
        self.rows_per_partition[second, partition] += rows

    def load(self, name: str, first: float, last: float) -> Load:
        """Of the seconds from first to last."""
        busy = sorted(count for second, count in self.per_second.items() if first <= second < last)

        def worst(counter: Counter[tuple[int, str]]) -> int:
            return max((count for (second, _), count in counter.items() if first <= second < last), default=0)

        return Load(
            name=name,
            vms=len(self._world.vms),
            requests=sum(busy),
            busy_seconds=len(busy),
            worst=busy[-1],
            mean=sum(busy) / len(busy),
            high=busy[int(len(busy) * 0.999)],
            partition_worst=worst(self.per_partition),
            partition_rows_worst=worst(self.rows_per_partition),
        )


@dataclass
class Event:
    """One event; all of its VMs approve it together."""

    name: str
    vms: tuple[str, ...]
    not_before: float
    stages: dict[str, WishStage] = field(default_factory=dict)
    """Of VMs that have not recovered."""
    without_slot: int = 0
    ready_at: float = 0.0
    """When the last VM was ready."""
    has_started: bool = False


class Vm:
    """A VM with the real protocol and a model of the workflow."""

    def __init__(self, world: "LoadWorld", name: str, group: str) -> None:
        self.name = name
        self.events: dict[str, Event] = {}
        self._world = world
        self._standings: dict[str, Standing] = {}
        self._visit_at = -1.0
        self._fleet = Fleet(
            world.ledger,
            group=group,
            vm_id=name,
            max_events=1,
            expect=("*",),
            random=random.Random(f"{name} asks"),
        )

    def wake(self, seconds: float = 0.0) -> None:
        world = self._world
        self._visit_at = at = world.at + seconds
        world.after(seconds, lambda: self._visit() if at == self._visit_at else None)

    def _visit(self) -> None:
        now = START + timedelta(seconds=self._world.at)
        while True:
            self._standings = self._fleet.visit(self._wishes(), (self.name,), now)
            if not self._act():
                break
        at = self._fleet.next_at(now)
        if at is not None:
            self.wake(max(0.001, (at - now).total_seconds()))

    def _wishes(self) -> Iterator[Wish]:
        for event in self.events.values():
            yield Wish(
                event=event.name,
                workflow=event.name,
                event_id=event.name,
                resources=event.vms,
                not_before=START + timedelta(seconds=event.not_before),
                own=self.name,
                expected=event.vms,
                needs_slot=True,
                needs_all=len(event.vms) > 1,
                stage=event.stages[self.name],
            )

    def _act(self) -> bool:
        """What the workflow would do; whether that changes what it wishes."""
        world, has_moved = self._world, False
        for event in self.events.values():
            standing, stage = self._standings.get(event.name, Standing()), event.stages[self.name]
            is_late = world.at >= event.not_before - _LATEST_BEGIN
            if stage == "begin" and (standing.has_slot or is_late):
                has_moved = True
                event.without_slot += not standing.has_slot
                event.stages[self.name] = "busy"
                world.after(world.hook_seconds(), lambda event=event: self._become(event, "ready"))  # type: ignore[misc]
            if stage == "ready" and (len(event.vms) == 1 or standing.ready.issuperset(event.vms)):
                world.start(event)
        return has_moved

    def see(self, event: Event) -> None:
        event.stages[self.name] = "begin"
        self.events[event.name] = event
        self.wake()
        self._world.after(max(0.0, event.not_before - _LATEST_BEGIN - self._world.at) + 0.001, self.wake)

    def _become(self, event: Event, stage: WishStage) -> None:
        event.stages[self.name] = stage
        event.ready_at = self._world.at if stage == "ready" else event.ready_at
        self.wake()

    def recover(self, event: Event) -> None:
        self._become(event, "away")
        self._world.after(self._world.hook_seconds(), lambda: self._end(event))

    def _end(self, event: Event) -> None:
        del self.events[event.name], event.stages[self.name]
        self.wake()


class LoadWorld:
    """So many VMs in so many groups."""

    def __init__(
        self,
        vms: int,
        groups: int,
        hooks: tuple[float, float] = _HOOKS,
        most_rows: float = math.inf,
        seed: str = "load",
    ) -> None:
        self.at = 0.0
        self.events: list[Event] = []
        self.ledger = CountedLedger(self, most_rows)
        self._hooks = hooks
        self._chance = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.groups = [[f"vm_{number}" for number in range(start, vms, groups)] for start in range(groups)]
        self.vms = {
            name: Vm(self, name, f"group-{number}") for number, names in enumerate(self.groups) for name in names
        }

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.at + seconds, next(self._order), what))

    def run(self) -> list[Load]:
        """Live it; the load of the two maintenances, and of all."""
        hour = 3600.0
        self.after(hour, lambda: self._maintain([(name,) for names in self.groups for name in names]))
        self.after(4 * hour, lambda: self._maintain([tuple(names) for names in self.groups]))
        for number in range(HOURS):
            self.after(number * hour + 1800.0, self._routine)
        while self._queue and self._queue[0][0] < HOURS * hour:
            self.at, _, what = heapq.heappop(self._queue)
            what()
        return [
            self.ledger.load("an event for each VM, within a minute", hour, hour + 1800.0),
            self.ledger.load("an event for each group, within a minute", 4 * hour, 4 * hour + 1800.0),
            self.ledger.load("twelve hours", 0.0, HOURS * hour),
        ]

    def hook_seconds(self) -> float:
        return self._chance.uniform(*self._hooks)

    def run_second(self) -> tuple[float, int]:
        """One event of all VMs; how long after the last one was ready it starts, and how many rows are listed."""
        for vm in self.vms.values():
            vm.wake()  # it looks back
        self.after(10.0, lambda: self._announce(tuple(self.vms)))
        while not (self.events and self.events[0].has_started):
            self.at, _, what = heapq.heappop(self._queue)
            what()
        since = self.events[0].ready_at - 1.0
        rows = sum(rows for (second, _), rows in self.ledger.rows_per_partition.items() if second >= int(since))
        return self.at - self.events[0].ready_at, rows

    def held_slots(self) -> int:
        now: datetime = START + timedelta(seconds=self.at)
        partitions = self.ledger.ledger.rows()
        slots = [rows for name, rows in partitions.items() if name.startswith("slot|")]
        return sum(is_held(row, now) for rows in slots for row in rows)

    def _maintain(self, events: list[tuple[str, ...]]) -> None:
        for vms in events:
            self.after(self._chance.uniform(0.0, 60.0), lambda vms=vms: self._announce(vms))  # type: ignore[misc]

    def _routine(self) -> None:
        for names in self.groups:
            vms = tuple(self._chance.sample(names, min(5, len(names))))
            self.after(self._chance.uniform(0.0, 600.0), lambda vms=vms: self._announce(vms))  # type: ignore[misc]

    def _announce(self, vms: tuple[str, ...]) -> None:
        event = Event(f"e{next(self._order)}", vms, self.at + _NOTICE)
        self.events.append(event)
        for name in vms:
            vm = self.vms[name]
            self.after(self._chance.uniform(0.0, 1.0), lambda vm=vm: vm.see(event))  # type: ignore[misc]
        self.after(_NOTICE, lambda: self.start(event))

    def start(self, event: Event) -> None:
        """Azure starts it, once."""
        if event.has_started:
            return
        event.has_started = True
        for name in event.vms:
            vm = self.vms[name]
            seconds = 1.0 + _LASTS + self._chance.uniform(0.0, 1.0)
            self.after(seconds, lambda vm=vm: vm.recover(event))  # type: ignore[misc]


def tell_second() -> None:
    """A hundred VMs, all ready within a second."""
    for most_rows in (math.inf, _TARGET_ROWS):
        worlds = [
            LoadWorld(100, 1, hooks=(20.0, 20.0), most_rows=most_rows, seed=f"second {number}")
            for number in range(10)
        ]
        waits, rows = zip(*(world.run_second() for world in worlds), strict=True)
        refused = max(world.ledger.refused for world in worlds)
        limit = f"at most {most_rows:g} rows" if refused else "no limit"
        told = (
            f"{max(rows)} rows listed, {refused} lists refused, approved up to {max(waits):.1f} s after the last"
        )
        print(f"100 VMs ready within a second, {limit}: {told}")


def tell_load(vms: int, groups: int) -> LoadWorld:
    """Live it, and print the figures."""
    began = time.monotonic()
    world = LoadWorld(vms, groups)
    for load in world.run():
        print(load.text())
    alone = sum(event.without_slot for event in world.events)
    print(f"{len(world.events)} events, {alone} begun without a slot, {world.held_slots()} slots held at the end")
    print(f"{vms} VMs in {groups} groups, {HOURS} simulated hours in {time.monotonic() - began:.0f} s")
    return world
