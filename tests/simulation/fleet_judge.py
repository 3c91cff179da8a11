"""What must hold in a fleet, judged from outside: by hooks, approvals, and what the ledger holds.

(1) An event is approved only when all of its VMs that count are prepared.
(2) No more events than the limit are prepared for at a time, but for those begun at the latest time, or alone.
(3) What all are prepared for is approved soon.
(4) An event for which a slot is free begins soon; with or without a slot, at the latest time.
(5) What was prepared for is recovered from.
(6) In the end no slot is held, and no row is left.
(7) No agent turns for ever.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from judge import BrokenError

from scheduled_events_agent.fleet.ledger import Row
from scheduled_events_agent.fleet.protocol import SLOT_LASTS
from scheduled_events_agent.fleet.rows import event_key_of, partition_of_slots, prefix_of, time_of
from scheduled_events_agent.policy import matches_glob

if TYPE_CHECKING:
    from fleet_machines import Vm
    from fleet_world import FleetWorld

LATEST_BEGIN = 300.0
SOON = 60.0
"""A VM whose request fails waits for up to 30 s, and for a slot asks every 15 s."""
AT_ONCE = 3.0
"""If nothing has gone wrong: a few requests, and less than the first two VMs wait to look again."""
_TICK = 10.0

State = Literal["", "preparing", "prepared", "not prepared", "recovering"]


@dataclass
class Work:
    """Of one VM for one event."""

    state: State = ""
    has_begun: bool = False
    """And is not recovered."""
    may_exceed: bool = False
    """It has begun without a slot, and rightly so."""
    since: float = 0.0


@dataclass
class Life:
    """One event."""

    name: str
    announced_at: float
    changed_at: float
    works: dict[str, Work] = field(default_factory=dict)
    touched_at: float = 0.0
    """When a VM last began, recovered or died."""
    is_posted: bool = False
    lagged_at: float = 0.0
    """When a list of its VMs was last stale."""


class FleetJudge:
    """Raises BrokenError."""

    def __init__(self, world: "FleetWorld") -> None:
        self._world = world
        self.lives: dict[str, Life] = {}
        self._has_tick = False

    def announced(self, name: str) -> None:
        at = self._world.at
        self.lives[name] = Life(name, announced_at=at, changed_at=at, touched_at=at)
        self._tick_later()

    def changed(self, name: str) -> None:
        """Azure names more VMs, or the event was hidden, or is in the document again."""
        self.lives[name].changed_at = self._world.at

    def lagged(self, partition: str, prefix: str) -> None:
        """A stale list was given."""
        del partition
        for life in self.lives.values():
            if prefix == prefix_of(event_key_of(life.name.casefold())):
                life.lagged_at = self._world.at

    # --- what the VMs do

    def started(self, vm: "Vm", name: str, stage: str) -> None:
        world, work = self._world, self._work(name, vm)
        world.tell(f"{vm.name}: {stage} hook for {name} starts")
        work.since = world.at
        if stage == "recover":
            work.state = "recovering"
            # It also undoes what was prepared for an event that is left out for a while.
            for life in self.lives.values():
                other = life.works.get(vm.name)
                if other is not None and other.has_begun and world.is_hidden(life.name):
                    other.state = "recovering"
            return
        work.state = "preparing"
        if not work.has_begun:
            fleet = world.settings.fleet
            assert fleet is not None
            is_late = world.not_before(name) - LATEST_BEGIN <= world.at + 0.01
            is_alone = fleet.when_away == "proceed" and world.at - vm.failed_at < SOON
            work.has_begun, work.may_exceed = True, is_late or is_alone
            self.lives[name].touched_at = world.at
            self._count()

    def ended(self, vm: "Vm", name: str, stage: str, outcome: str) -> None:
        world, work = self._world, self._work(name, vm)
        world.tell(f"{vm.name}: {stage} hook for {name} ends: {outcome}")
        work.since = world.at
        if stage == "prepare":
            work.state = "prepared" if outcome == "succeeded" else "not prepared"
            self._look_at_readiness(name)
        elif outcome == "succeeded":
            # One recovery counts for all events that are over.
            for life in self.lives.values():
                work = life.works.get(vm.name, Work())
                if work.has_begun and (
                    life.name == name or world.is_over(life.name) or world.is_hidden(life.name)
                ):
                    work.state, work.has_begun, work.since = "", False, world.at
                    life.touched_at = world.at

    def posted(self, vm: "Vm", name: str) -> None:
        world, life, fleet = self._world, self.lives[name], self._world.settings.fleet
        world.tell(f"{vm.name} approves {name}")
        assert fleet is not None
        expected = self._expected(vm.documents[name], vm.name)
        if fleet.when_away == "proceed" and world.at - vm.failed_at < SOON:
            expected = [vm.name]
        missing = [one for one in expected if life.works.get(one, Work()).state != "prepared"]
        if missing:
            raise BrokenError(f"(1) {vm.name} approves {name} before {', '.join(missing)} prepared")
        life.is_posted = True

    def killed(self, vm: "Vm") -> None:
        for life in self.lives.values():
            work = life.works.get(vm.name)
            if work is not None and work.state == "preparing":
                work.state = "not prepared"

    def died(self, vm: "Vm") -> None:
        for life in self.lives.values():
            if vm.name in self._world.resources(life.name):
                life.touched_at = self._world.at

    def _work(self, name: str, vm: "Vm") -> Work:
        return self.lives[name].works.setdefault(vm.name, Work())

    def _expected(self, resources: tuple[str, ...], own: str = "") -> list[str]:
        fleet = self._world.settings.fleet
        assert fleet is not None
        return [name for name in resources if name == own or matches_glob(name, fleet.expect)]

    # --- the limit

    def _count(self) -> None:
        limit = self._limit()
        busy = [life.name for life in self.lives.values() if self._is_out(life)]
        if limit is not None and len(busy) > limit:
            raise BrokenError(f"(2) {', '.join(busy)} are out at a time")

    def _is_out(self, life: Life) -> bool:
        return any(
            work.has_begun and not work.may_exceed and not self._world.vms[name].is_dead
            for name, work in life.works.items()
        )

    def _limit(self) -> int | None:
        fleet = self._world.settings.fleet
        assert fleet is not None
        return fleet.max_events

    def _may_hold_until(self, life: Life) -> float:
        """How long it may have a slot."""
        vms = self._world.vms
        working = [name for name, work in life.works.items() if work.has_begun and not vms[name].is_dead]
        if working:
            return float("inf")
        has_dead = any(vms[name].is_dead for name in self._world.resources(life.name) if name in vms)
        # Two that are back and have not seen each other leave it as well.
        is_left = has_dead or life.lagged_at > life.touched_at - SOON
        return life.touched_at + (SLOT_LASTS.total_seconds() if is_left else 0.0)

    # --- what must come soon

    def _look_at_readiness(self, name: str) -> None:
        """Call it when a VM is prepared; looks again when the approval is due."""
        world, life = self._world, self.lives[name]
        resources = world.resources(name)
        expected = self._expected(resources)
        vms = [world.vms[one] for one in resources if one in world.vms]
        works = [life.works.get(one, Work()) for one in expected]
        is_ready = all(work.state == "prepared" for work in works)
        if life.is_posted or world.is_hidden(name) or not is_ready or any(vm.is_dead for vm in vms):
            return
        trouble = max([vm.disturbed_at for vm in vms if vm.name in expected], default=0.0)
        since = max(*(work.since for work in works), life.changed_at + 1.0)
        due = since + AT_ONCE
        if trouble + SOON > life.announced_at:
            due = max(since, trouble) + SOON
        if due >= world.not_before(name):
            return
        if world.at >= due:
            raise BrokenError(f"(3) {name} is not approved, though all are prepared since {since:.0f}")
        world.after(due - world.at + 0.001, lambda: self._look_at_readiness(name))

    def _tick_later(self) -> None:
        if not self._has_tick:
            self._has_tick = True
            self._world.after(_TICK, self._tick)

    def _tick(self) -> None:
        self._has_tick = False
        world = self._world
        scheduled = [life for life in self.lives.values() if world.is_scheduled(life.name)]
        for life in scheduled:
            if not world.is_hidden(life.name):
                self._look_for_waiting(life)
                self._look_at_readiness(life.name)
        if scheduled:
            self._tick_later()

    def _look_for_waiting(self, life: Life) -> None:
        world, limit = self._world, self._limit()
        latest = world.not_before(life.name) - LATEST_BEGIN
        resources = world.resources(life.name)
        if any(world.vms[name].is_dead for name in resources if name in world.vms):
            return
        trouble = max(vm.disturbed_at for vm in world.vms.values() if not vm.is_dead)
        others = [other for other in self.lives.values() if other is not life]
        holding = [other.name for other in others if self._may_hold_until(other) + SOON > world.at]
        has_slot = any(work.has_begun and not work.may_exceed for work in life.works.values())
        for name in resources:
            vm, work = world.vms.get(name), life.works.get(name, Work())
            if vm is None or work.has_begun or vm.seen_at.get(life.name) is None:
                continue
            since = max(vm.seen_at[life.name], life.changed_at + 1.0, work.since, vm.disturbed_at)
            if world.at > max(since, latest) + SOON:
                raise BrokenError(f"(4) {name} does not begin for {life.name}, which may start any time")
            is_free = limit is None or has_slot or len(holding) < limit
            # It may have become free by what has just happened.
            since = max(since, trouble, life.touched_at)
            if is_free and world.at > since + SOON:
                raise BrokenError(f"(4) {name} waits for {life.name}, and only {holding} may hold slots")

    # --- the end

    def finished(self, rows: dict[str, list[Row]]) -> None:
        world = self._world
        for life in self.lives.values():
            for name, work in life.works.items():
                if work.has_begun and not world.vms[name].is_dead:
                    raise BrokenError(f"(5) {name} has not recovered from {life.name}")
        for partition, found in rows.items():
            for row in found:
                if partition != partition_of_slots("web"):
                    raise BrokenError(f"(6) row {partition} {row.key} is left")
                if row.content.get("event") and time_of(row, "until").timestamp() > world.epoch():
                    raise BrokenError(f"(6) slot {row.key} is held by {row.content}")
