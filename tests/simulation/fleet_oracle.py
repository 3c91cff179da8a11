"""Rules that must hold in a fleet, checked from outside: by hooks, approvals, and the contents of the store.

(1) At most so many events as the limit are under way that began with a slot, and have a VM heard of within 30 min.
    After an outage of 15 min a VM gets no slot for 90 s and the pause that the store asked for.
(2) An event is approved only when all VMs that it waits for are prepared.
(3) Evictions and terminations begin within a second of being seen.
(4) Each event begins by its latest begin.
(5) With room it begins soon; behind a VM that died with a slot, 31 minutes after its last write.
(6) Of two events that wait the one with the earlier NotBefore begins first.
(7) What all are ready for is approved soon.
(8) What was prepared for is recovered from; then no record is left but of VMs that died, and nothing is asked.
(9) Clocks change nothing (see ``fleet_runs``).
(10) After a kill and a start, own records are the same within 25 s, and statuses soon after.
(11) What began late, without a slot, is approved only by a list in which fewer other events than the limit have a
    slot or have begun; those do not count that only wait to be approved, and start later.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Literal

from oracle import BrokenError

from scheduled_events_agent.fleet.plan import event_key
from scheduled_events_agent.policy import matches_glob

if TYPE_CHECKING:
    from fleet_machines import Sent, Vm
    from fleet_simulation import FleetSimulation

# A client that was cut off looks again 125 s after its first list, and once more if it then deleted a record.
_REST_SECONDS = 2 * 125.0 + 60.0
_SLOT_SECONDS = 1800.0
_STATUS_SECONDS = 10.0
"""So old a list may be by which an event begins, or is approved."""
_DATE_SECONDS = 1.0
"""Ages come out shorter by up to this: a Date has whole seconds."""
_COUNTED = ("claimed", "not_ready", "ready")
_URGENT = ("Preempt", "Terminate")
_LEAST_LEAD = 300.0
_ROUND_TRIP = 0.11
_TICK = 10.0
_STATUS_AGAIN_SECONDS = 27.0
"""The others renew their records within 20 s of the start, and this VM lists within 5 s of that."""
_DAY = 86400.0
_LONG_OUTAGE_SECONDS = 900.0
_NO_SLOT_SECONDS = 90.0
_SOON_SECONDS = 7.0
"""A VM asks every 5 s at least where its event may have a slot soon; the rest is for requests."""

State = Literal["", "preparing", "prepared", "not prepared", "recovering"]


@dataclass
class Work:
    """The work of one VM for one event."""

    state: State = ""
    has_begun: bool = False
    """And is not recovered."""
    is_late: bool | None = False
    """It could wait no longer, and began without a slot. None: not known, for its agent was killed meanwhile."""
    has_run: bool = False
    """A hook has run for it."""
    undone_at: float = -inf
    """When a recovery of the VM last ended."""
    operator_action: str = ""
    since: float = 0.0
    """When it last came into its state."""
    ceased_at: float = -inf
    """When it last ceased to be ready."""
    changed_at: float = inf
    """When a write was first answered since then."""
    heard_at: float = -inf
    """When the last write had its effect that was answered."""
    recycle_began_at: float = -inf
    """When it was heard of again, after its record counted no more."""
    ready_written_at: float = -inf
    """When ``ready`` last came into the store."""
    ready_answered_at: float = -inf
    renew_seconds: float = 20.0

    @property
    def is_ready(self) -> bool:
        return self.state == "prepared" and self.operator_action != "hold"


@dataclass
class Kept:
    """One record, as the store has it."""

    vm_id: str
    state: str
    written_at: float
    renew_seconds: float
    made_at: float
    slot: str
    slot_since: float
    begun_at: float
    """Since when it says that its VM has begun; infinite if it does not."""
    claimed_at: float = inf
    """Since when it is claimed, or was."""

    def counts(self, at: float, *, has_ages: bool, margin_seconds: float = _DATE_SECONDS) -> bool:
        """Whether it may count for a slot; for ever if the store tells no ages. It must without a margin."""
        is_young = at - self.written_at <= _SLOT_SECONDS + margin_seconds
        return self.state in _COUNTED and (is_young or not has_ages)


@dataclass
class Life:
    """One event."""

    name: str
    announced_at: float
    works: dict[str, Work] = field(default_factory=dict)
    """By vmId."""
    records: dict[str, Kept] = field(default_factory=dict)
    """By the VM's part of the key."""
    is_approved: bool = False
    is_without_slot: bool = False
    """One of its VMs has begun without a slot, and rightly so, and not all have recovered since."""
    has_late_slot: bool = False
    """One of its VMs has approved it with a slot that it got late."""
    over_at: float = 0.0


class FleetOracle:
    """Raises BrokenError."""

    def __init__(self, simulation: "FleetSimulation") -> None:
        self._simulation = simulation
        self.lives: dict[str, Life] = {}
        self.checked: Counter[int] = Counter()
        """How often each invariant was looked at."""
        self._by_key: dict[str, Life] = {}
        self._looks: dict[tuple[str, str], float] = {}
        self._room_since: dict[str, float] = {}
        self._late_room_since: dict[str, float] = {}
        self._no_slot_until: dict[str, float] = {}
        """By vmId: until when it gets no slot, for records may have lapsed in an outage."""
        self._has_tick = False
        self._changed_at = 0.0
        """When something last happened that may change what records and statuses say."""
        self._last_effect_at = 0.0
        self._recovered_at = 0.0

    # --- what happens

    def announced(self, name: str) -> None:
        life = self.lives[name] = Life(name, announced_at=self._simulation.at)
        self._by_key[event_key(name.casefold())] = life
        self.changed(name)

    def changed(self, name: str) -> None:
        """Azure names more VMs, or the event was hidden, or is in the document again."""
        del name
        self._changed_at = self._simulation.at
        if not self._has_tick:
            self._has_tick = True
            self._simulation.after(_TICK, self._tick)

    def over(self, name: str) -> None:
        """It is no longer in the document."""
        self.lives[name].over_at = self._changed_at = self._simulation.at

    def hook_started(self, vm: "Vm", name: str, stage: str) -> None:
        simulation = self._simulation
        work = self._work(name, vm)
        simulation.log(f"{vm.vm_id}: {stage} hook for {name} starts")
        self._changed_at = simulation.at
        if stage == "prepare":
            if not work.has_begun:
                self.begun(vm, name)
            work.has_run = True
            self._enter(work, "preparing")
            return
        # It also undoes what was prepared for other events that are over, or left out for a while.
        for _, other in self._undone_by_recovery(vm, name):
            self._enter(other, "recovering")

    def hook_ended(self, vm: "Vm", name: str, stage: str, outcome: str) -> None:
        simulation = self._simulation
        work = self._work(name, vm)
        simulation.log(f"{vm.vm_id}: {stage} hook for {name} ends: {outcome}")
        self._changed_at = simulation.at
        if stage == "prepare":
            self._enter(work, "prepared" if outcome == "succeeded" else "not prepared")
            self._look_at_readiness(name)
        elif outcome == "succeeded":
            for life, other in self._undone_by_recovery(vm, name):
                self._recovered(life, other)
            for life in self.lives.values():
                if vm.vm_id in life.works:
                    life.works[vm.vm_id].undone_at = simulation.at
            self.looks(vm)

    def _undone_by_recovery(self, vm: "Vm", name: str) -> list[tuple[Life, Work]]:
        simulation = self._simulation
        return [
            (life, life.works[vm.vm_id])
            for life in self.lives.values()
            if vm.vm_id in life.works
            and life.works[vm.vm_id].has_begun
            and (life.name == name or simulation.is_over(life.name) or simulation.is_hidden(life.name))
        ]

    def _recovered(self, life: Life, work: Work) -> None:
        self._enter(work, "")
        work.has_begun = work.has_run = work.is_late = False
        life.is_without_slot &= any(other.has_begun for other in life.works.values())
        life.has_late_slot &= life.is_without_slot
        self._recovered_at = self._simulation.at

    def closed(self, vm: "Vm", name: str) -> None:
        """The agent has done with the event: nothing was done, or one recovery counted for several events."""
        work = self._work(name, vm)
        if work.has_begun and (not work.has_run or work.undone_at > work.since):
            self._recovered(self.lives[name], work)

    def operator_said(self, vm: "Vm", name: str, action: str) -> None:
        """The agent has taken it in."""
        work = self._work(name, vm)
        if work.is_ready and action == "hold":
            self._cease(work)
        work.operator_action = action
        work.since = self._changed_at = self._simulation.at
        self._look_at_readiness(name)

    def stopped(self, vm: "Vm", *, is_killed: bool = False) -> None:
        """It stands still, or its agent is killed."""
        if not is_killed:
            self._changed_at = self._simulation.at
            return
        for life in self.lives.values():
            work = life.works.get(vm.vm_id)
            if work is not None and work.state == "preparing":
                self._enter(work, "not prepared")
        self._look_at_kill(vm)

    def rebooted(self, vm: "Vm") -> None:
        """Note that the VM rebooted: its preparation is undone."""
        for life in self.lives.values():
            work = life.works.get(vm.vm_id)
            if work is not None and work.state == "prepared":
                self._enter(work, "not prepared")
        self._changed_at = self._simulation.at

    def died(self, vm: "Vm") -> None:
        self.rebooted(vm)

    def _enter(self, work: Work, state: State) -> None:
        if work.is_ready and state != "prepared":
            self._cease(work)
        work.state = state
        work.since = self._simulation.at

    def _cease(self, work: Work) -> None:
        work.ceased_at = self._simulation.at
        work.changed_at = inf

    def _work(self, name: str, vm: "Vm") -> Work:
        return self.lives[name].works.setdefault(vm.vm_id, Work())

    # --- the store

    def key_in_words(self, key: str) -> str:
        event, _, vm = key.partition("|")
        life = self._by_key.get(event)
        name = life.name if life else event
        return f"{name}|{vm}"

    def written(self, vm: "Vm", sent: "Sent") -> None:
        """It has its effect."""
        simulation = self._simulation
        event, _, vm_key = sent.key.partition("|")
        life = self._by_key[event]
        found = life.records.get(vm_key)
        self._last_effect_at = simulation.at
        if sent.fields is None:
            if found is not None:
                self._changed_at = simulation.at
                simulation.log(f"{vm.vm_id} deletes {self.key_in_words(sent.key)}")
                del life.records[vm_key]
            return
        state = sent.fields["state"]
        if found is not None and found.vm_id != vm.vm_id:
            self.released(sent.key)
            found = None
        if found is None or (found.state, found.slot) != (state, sent.fields["slot"]):
            self._changed_at = simulation.at
            slot = f", slot {sent.fields['slot']}" if sent.fields["slot"] else ""
            simulation.log(f"{vm.vm_id} writes {self.key_in_words(sent.key)}: {state}{slot}")
        slot = sent.fields["slot"]
        begun_at = inf
        if state in ("not_ready", "ready"):
            begun_at = min(found.begun_at if found else inf, simulation.at)
        kept = life.records[vm_key] = Kept(
            vm_id=vm.vm_id,
            state=state,
            slot=slot,
            slot_since=found.slot_since if found and found.slot == slot else simulation.at,
            begun_at=begun_at,
            written_at=simulation.at,
            renew_seconds=float(sent.fields["renew_seconds"]),
            made_at=found.made_at if found else simulation.at,
            claimed_at=found.claimed_at if found and found.state == "claimed" else simulation.at,
        )
        work = self._work(life.name, vm)
        if state == "ready":
            work.ready_written_at = simulation.at
            work.renew_seconds = kept.renew_seconds

    def answered(self, vm: "Vm", sent: "Sent", written_at: float) -> None:
        """A write that had its effect then is answered."""
        event, _, _ = sent.key.partition("|")
        work = self._work(self._by_key[event].name, vm)
        if work.ceased_at > -inf and written_at >= work.ceased_at:
            is_ready = sent.fields is not None and sent.fields["state"] == "ready"
            work.changed_at = min(work.changed_at, inf if is_ready else self._simulation.at)
        if sent.fields is None:
            return
        if work.has_begun and written_at - work.heard_at > _SLOT_SECONDS:
            work.recycle_began_at = self._simulation.at
        work.heard_at = written_at
        if sent.fields["state"] == "ready":
            work.ready_answered_at = self._simulation.at

    def released(self, key: str) -> None:
        """The record was deleted, or another VM has it now: until its VM is heard of again it counts no more."""
        event, _, vm_key = key.partition("|")
        found = self._by_key[event].records.pop(vm_key, None)
        self._changed_at = self._simulation.at
        if found is not None:
            work = self._by_key[event].works.get(found.vm_id)
            if work is not None:
                work.heard_at = -inf

    # --- trouble

    def _trouble_until(self, vms: "Iterable[Vm]") -> float:
        return max((max(vm.disturbed_until, vm.killed_until) for vm in vms), default=0.0)

    def outage_ended(self, vm: "Vm", seconds: float) -> None:
        """The VM reaches the store again, after so long; the list that did was sent a moment ago."""
        until_list = seconds - (self._simulation.at - vm.listed_at)
        if until_list >= _LONG_OUTAGE_SECONDS:
            self._no_slot_until[vm.vm_id] = vm.listed_at + _NO_SLOT_SECONDS + vm.asked_pause

    def _no_slots_until(self, vms: "Iterable[Vm]") -> float:
        return max((self._no_slot_until.get(vm.vm_id, -inf) for vm in vms), default=-inf)

    def _has_twin(self, name: str) -> bool:
        """Whether two VMs have a name that the event has."""
        return any(len(self._simulation.named(one)) > 1 for one in self._simulation.resources(name))

    # --- (1), (6) an event begins

    def begun(self, vm: "Vm", name: str) -> None:
        """Called for each VM, and each appearance of the event; nothing but its lateness if it is known."""
        simulation = self._simulation
        life = self.lives[name]
        work = self._work(name, vm)
        work.is_late = self._begins_late(vm, name)
        if work.has_begun:
            return
        self._changed_at = simulation.at
        has_slot = self._is_under_way(life)
        work.has_begun = True
        is_without_slot = self._may_begin_without_slot(vm, name)
        life.is_without_slot |= is_without_slot
        how = " without a slot" if is_without_slot else ""
        simulation.log(f"{vm.vm_id} begins {name}{how}")
        self.checked[3 if simulation.type_of(name) in _URGENT else 4] += 1
        if self._limit is None or is_without_slot or has_slot:
            return
        if self._no_slots_until([vm]) > simulation.at:
            raise BrokenError(f"(1) {vm.vm_id} begins {name} with a slot soon after an outage")
        # It must have been heard of: its claim was listed a few seconds ago at most.
        work.heard_at = max(work.heard_at, simulation.at - _STATUS_SECONDS)
        self._look_at_slots()
        if not any(other.has_begun for other in life.works.values() if other is not work):
            self._look_at_order(vm, life)

    def _may_begin_without_slot(self, vm: "Vm", name: str) -> bool:
        simulation = self._simulation
        fleet = simulation.settings.fleet
        assert fleet is not None
        is_away = vm.unavailable_from is not None and vm.monotonic() - vm.unavailable_from >= 59.0
        return (
            simulation.type_of(name) in _URGENT
            or self._work(name, vm).operator_action == "approve"
            or self._latest_begin(vm, name) <= simulation.at + 0.01
            or (fleet.on_unavailable == "begin" and is_away)
        )

    def _begins_late(self, vm: "Vm", name: str) -> bool | None:
        simulation = self._simulation
        is_exempt = simulation.type_of(name) in _URGENT or self._work(name, vm).operator_action == "approve"
        if self._limit is None or is_exempt or vm.has_slot(name):
            return False
        if self._latest_begin(vm, name) > simulation.at + 0.01:
            return False
        own = [one for one in self.lives[name].records.values() if one.vm_id == vm.vm_id]
        return None if any(one.state in _COUNTED for one in own) else True

    def _latest_begin(self, vm: "Vm", name: str) -> float:
        """By the VM's own clock."""
        return self._simulation.not_before(name) - max(_LEAST_LEAD, vm.needed_seconds()) - vm.wall_offset

    @property
    def _limit(self) -> int | None:
        fleet = self._simulation.settings.fleet
        assert fleet is not None
        return fleet.max_events

    def _is_under_way(self, life: Life) -> bool:
        at = self._simulation.at
        works = [work for work in life.works.values() if work.has_begun]
        if life.is_without_slot and not life.has_late_slot:
            return False
        return any(
            at - work.heard_at <= _SLOT_SECONDS and at - work.recycle_began_at > _STATUS_SECONDS for work in works
        )

    def _order(self, name: str) -> tuple[float, str]:
        return self._simulation.not_before(name), event_key(name.casefold())

    def _look_at_order(self, vm: "Vm", life: Life) -> None:
        """(6) It has begun; none that waits should have been before it."""
        simulation = self._simulation
        own = next((one for one in life.records.values() if one.vm_id == vm.vm_id), None)
        if own is None or self._limit is None or not self._simulation.has_ages:
            return
        for other in self.lives.values():
            # One that is under way on another VM has its slot.
            if other is life or self._is_under_way(other) or not self._is_waiting(other):
                continue
            known_at = min((one.made_at for one in other.records.values()), default=inf)
            is_calm = self._trouble_until(simulation.vms.values()) <= other.announced_at
            if not is_calm or self._has_twin(other.name) or self._has_twin(life.name):
                continue
            self.checked[6] += 1
            is_later = (
                self._order(other.name) < self._order(life.name) and known_at <= own.claimed_at - _ROUND_TRIP
            )
            if is_later and len(self._busy(other)) >= self._limit:
                raise BrokenError(f"(6) {life.name} begins before {other.name}, which waits and starts earlier")

    def _is_waiting(self, life: Life) -> bool:
        """Whether it waits for a slot."""
        simulation = self._simulation
        is_visible = simulation.is_scheduled(life.name) and not simulation.is_hidden(life.name)
        return is_visible and any(self._waits(vm, life.name) for vm in simulation.alive())

    def _waits(self, vm: "Vm", name: str) -> bool:
        return any(
            request.stage == "requested"
            and request.needs_slot
            and self._simulation.name_of(request.event_id) == name
            for request in vm.requests
        )

    def _busy(self, life: Life) -> list[Life]:
        """The other events that have a slot, or rightly one."""
        at = self._simulation.at
        vms = self._simulation.vms
        return [
            other
            for other in self.lives.values()
            if other is not life
            and (
                (
                    not self._is_given_up(other)
                    and any(work.has_begun and not vms[vm_id].is_dead for vm_id, work in other.works.items())
                )
                or any(one.counts(at, has_ages=self._simulation.has_ages) for one in other.records.values())
            )
        ]

    def _is_given_up(self, life: Life) -> bool:
        """Whether its VMs delete their records, for they will be gone: it has started, and takes them away."""
        simulation = self._simulation
        return simulation.type_of(life.name) in _URGENT and not simulation.is_scheduled(life.name)

    # --- (3), (4) it must begin

    def looks(self, vm: "Vm") -> None:
        """The agent has decided, or may do so again."""
        for name in vm.seen_at:
            self._look_at_begin(vm, name)

    def _look_at_begin(self, vm: "Vm", name: str) -> None:
        simulation = self._simulation
        due = self._begin_due(vm, name)
        if due is None:
            return
        key = vm.vm_id, name
        if simulation.at >= due:
            number = 3 if simulation.type_of(name) in _URGENT else 4
            raise BrokenError(f"({number}) {vm.vm_id} does not begin for {name}")
        if not simulation.at < self._looks.get(key, -1.0) <= due:
            self._looks[key] = due
            simulation.after(due - simulation.at, lambda: self._look_at_begin(vm, name))

    def _begin_due(self, vm: "Vm", name: str) -> float | None:
        """When it must have begun; None: it need not, or has."""
        simulation = self._simulation
        work = self._work(name, vm)
        is_named = vm.name in vm.documents.get(name, ()) and name in vm.seen_at
        is_open = is_named and simulation.is_scheduled(name) and not simulation.is_hidden(name)
        if vm.is_frozen or vm.engine is None or not is_open or work.has_begun or work.operator_action == "hold":
            return None
        since = max(vm.seen_at[name], vm.up_since, work.since)
        if simulation.type_of(name) in _URGENT:
            return since + 1.0 + 1e-6
        return max(self._latest_begin(vm, name), since, vm.clock_set_at) + 2.0

    # --- (5) with room it begins soon

    def requested(self, vm: "Vm") -> None:
        """The VM asks its fleet for something new."""
        simulation = self._simulation
        at = simulation.at
        for request in vm.requests:
            if request.stage == "requested" and request.needs_slot:
                name = simulation.name_of(request.event_id)
                if self._has_room(self.lives[name]) and self._trouble_until(simulation.vms.values()) < at:
                    id_ = request.workflow_id
                    simulation.after(_SOON_SECONDS, partial(self._look_at_wait, vm, name, id_, at))

    def _look_at_wait(self, vm: "Vm", name: str, workflow_id: str, since: float) -> None:
        if self._trouble_until(self._simulation.vms.values()) >= since or self._has_twin(name):
            return
        if self._no_slots_until([vm]) >= since:
            return
        self.checked[5] += 1
        is_same = any(one.workflow_id == workflow_id for one in vm.requests) and self._waits(vm, name)
        if is_same and self._is_waiting(self.lives[name]) and self._has_room(self.lives[name]):
            raise BrokenError(f"(5) {vm.vm_id} waits for {name}, and there is room since {since:.0f}")

    def _has_room(self, life: Life) -> bool:
        limit = self._limit
        busy = self._busy(life)
        before = [
            other
            for other in self.lives.values()
            if other is not life
            and other not in busy
            and self._order(other.name) < self._order(life.name)
            and (self._is_waiting(other) or any(one.state == "requested" for one in other.records.values()))
        ]
        return limit is None or len(busy) + len(before) < limit

    def _tick(self) -> None:
        self._has_tick = False
        simulation = self._simulation
        open_ = [life for life in self.lives.values() if not simulation.is_over(life.name)]
        for life in open_:
            self._look_for_room(life, len(open_))
            self._look_for_slot_to_approve(life, len(open_))
            self._look_at_readiness(life.name)
        if open_:
            self._has_tick = True
            simulation.after(_TICK, self._tick)

    def _look_for_room(self, life: Life, others: int) -> None:
        simulation = self._simulation
        is_calm = self._trouble_until(simulation.vms.values()) < simulation.at and not self._has_twin(life.name)
        waiting = (vm for vm in simulation.alive() if self._waits(vm, life.name))
        is_calm &= self._no_slots_until(waiting) < simulation.at
        if not (is_calm and self._is_waiting(life) and self._has_room(life) and simulation.has_ages):
            self._room_since.pop(life.name, None)
            return
        since = self._room_since.setdefault(life.name, simulation.at)
        self.checked[5] += 1
        if simulation.at - since > 5.0 * (1 + others) + 10.0:
            raise BrokenError(f"(5) {life.name} waits, and there is room since {since:.0f}")

    # --- (2), (7) approvals

    def approved(self, vm: "Vm", name: str, *, by_operator: bool) -> None:
        simulation = self._simulation
        life = self.lives[name]
        how = ", as an operator has said" if by_operator else ""
        simulation.log(f"{vm.vm_id} approves {name}{how}")
        self._changed_at = simulation.at
        life.is_approved = True
        if by_operator:
            return
        self._look_at_slot_to_approve(vm, life)
        self.checked[2] += 1
        resources = vm.documents.get(name, (vm.name,))
        if not self._work(name, vm).is_ready:
            raise BrokenError(f"(2) {vm.vm_id} approves {name} and is not prepared")
        if len(resources) == 1:
            return
        appeared_at = vm.appeared_at.get(name, 0.0)
        missing = []
        requested_vms = self._awaited(vm, resources)
        for one in requested_vms:
            works = [life.works.get(other.vm_id, Work()) for other in simulation.named(one)]
            if not any(work.is_ready or self._may_seem_ready(work, vm, appeared_at) for work in works):
                missing.append(one)
        for kept in life.records.values():
            other = simulation.vms[kept.vm_id]
            work = life.works.get(kept.vm_id, Work())
            must_count = kept.counts(simulation.at, has_ages=simulation.has_ages, margin_seconds=0.0)
            is_known = must_count and kept.made_at < max(vm.listed_at, simulation.at - _STATUS_SECONDS)
            is_ready = work.is_ready or self._may_seem_ready(work, vm, appeared_at)
            if is_known and other.name not in requested_vms and not is_ready:
                missing.append(other.name)
        if missing:
            raise BrokenError(f"(2) {vm.vm_id} approves {name} before {', '.join(missing)} prepared")

    def _look_at_slot_to_approve(self, vm: "Vm", life: Life) -> None:
        """(11) Called when it approves."""
        simulation = self._simulation
        at = simulation.at
        work = self._work(life.name, vm)
        fleet = simulation.settings.fleet
        assert fleet is not None
        is_away = vm.unavailable_from is not None and vm.monotonic() - vm.unavailable_from >= 59.0
        if not work.is_late or self._limit is None or (fleet.on_unavailable == "begin" and is_away):
            return
        self.checked[11] += 1
        if at - vm.listed_at > _STATUS_SECONDS + _ROUND_TRIP:
            raise BrokenError(f"(11) {vm.vm_id} approves {life.name}, and knows nothing of the others")
        if self._no_slots_until([vm]) > at:
            raise BrokenError(f"(11) {vm.vm_id} approves {life.name} soon after an outage")
        if self._has_slot_elsewhere(vm, life):
            return
        before = [
            other.name for other in self.lives.values() if other is not life and self._goes_before(other, life)
        ]
        if len(before) >= self._limit:
            raise BrokenError(f"(11) {vm.vm_id} approves {life.name} while {', '.join(before)} are out of service")
        life.has_late_slot = True
        self._look_at_slots()

    def _look_at_slots(self) -> None:
        """(1) No more events than the limit have a slot."""
        self.checked[1] += 1
        busy = [one.name for one in self.lives.values() if self._is_under_way(one)]
        if self._limit is not None and len(busy) > self._limit:
            raise BrokenError(f"(1) {', '.join(busy)} are under way at a time")

    def _has_slot_elsewhere(self, vm: "Vm", life: Life) -> bool:
        """Whether another VM of the event has begun, and not late: the slot belongs to the event."""
        others = [work for vm_id, work in life.works.items() if vm_id != vm.vm_id and work.has_begun]
        return life.has_late_slot or not all(work.is_late for work in others)

    def _goes_before(self, other: Life, life: Life) -> bool:
        """Whether the VMs of ``life`` know that the other event has begun, and must wait for it."""
        at = self._simulation.at
        known_since = at - _STATUS_SECONDS - _ROUND_TRIP
        has_ages = self._simulation.has_ages
        records = [one for one in other.records.values() if one.counts(at, has_ages=has_ages, margin_seconds=0.0)]
        if not any(one.begun_at < known_since for one in records):
            return False
        may_ask = any(one.slot == "requested" or one.slot_since > known_since for one in records)
        return not (may_ask and self._order(other.name) > self._order(life.name))

    def _awaited(self, vm: "Vm", resources: Iterable[str]) -> list[str]:
        fleet = self._simulation.settings.fleet
        assert fleet is not None
        members = fleet.members if matches_glob(vm.name, fleet.members) else ("*",)
        return [one for one in resources if one == vm.name or matches_glob(one, members)]

    def _may_seem_ready(self, work: Work, vm: "Vm", appeared_at: float) -> bool:
        """Whether it has ceased to be ready a short while ago, and could not say so yet.

        A late request may have said ``ready`` after that; and what was said before the event appeared to the VM
        that approves is about another appearance.
        """
        at = self._simulation.at
        seen_until = max(vm.listed_at, at - _STATUS_SECONDS)
        last = max(work.ceased_at, work.ready_written_at)
        is_recent = at - last <= 3.0 * work.renew_seconds + _STATUS_SECONDS + _DATE_SECONDS
        is_of_this = work.ready_written_at >= appeared_at - _DATE_SECONDS
        return work.ceased_at > -inf and is_recent and is_of_this and work.changed_at >= seen_until

    def _look_at_readiness(self, name: str) -> None:
        """(7) Call it when a VM is ready; looks again when the approval is due."""
        simulation = self._simulation
        life = self.lives[name]
        is_open = simulation.is_scheduled(name) and not simulation.is_hidden(name) and not life.is_approved
        due = self._approval_due(life) if is_open and simulation.has_ages and not self._has_twin(name) else None
        if due is None or due >= simulation.not_before(name) or self._may_wait_to_approve(life):
            return
        self.checked[7] += 1
        if simulation.at >= due:
            raise BrokenError(f"(7) {name} is not approved, though all are ready")
        simulation.after(due - simulation.at + 0.001, lambda: self._look_at_readiness(name))

    def _may_wait_to_approve(self, life: Life) -> bool:
        """Whether it may be that none of its VMs has a slot, though they have begun."""
        works = [work for work in life.works.values() if work.has_begun]
        is_late = any(work.is_late is not False for work in works)
        return is_late and all(work.is_late is not False for work in works)

    def _look_for_slot_to_approve(self, life: Life, others: int) -> None:
        """(7) What all are ready for, and only lacks a slot, is approved soon if there is room."""
        simulation = self._simulation
        is_open = (
            simulation.is_scheduled(life.name) and not simulation.is_hidden(life.name) and not life.is_approved
        )
        vms = simulation.alive()
        is_calm = max(self._trouble_until(simulation.vms.values()), self._no_slots_until(vms)) < simulation.at
        due = self._approval_due(life) if is_open and is_calm and simulation.has_ages else None
        is_late = all(work.is_late for work in life.works.values() if work.has_begun)
        is_waiting = due is not None and due <= simulation.at and is_late and not self._has_twin(life.name)
        before = [
            other
            for other in self._busy(life)
            if not (self._only_asks(other) and self._order(other.name) > self._order(life.name))
        ]
        if not is_waiting or self._limit is None or len(before) >= self._limit:
            self._late_room_since.pop(life.name, None)
            return
        since = self._late_room_since.setdefault(life.name, simulation.at)
        self.checked[7] += 1
        if simulation.at - since > 5.0 * (1 + others) + 10.0:
            raise BrokenError(f"(7) {life.name} waits for a slot to approve, and there is room since {since:.0f}")

    def _only_asks(self, life: Life) -> bool:
        counting = [
            one
            for one in life.records.values()
            if one.counts(self._simulation.at, has_ages=self._simulation.has_ages)
        ]
        return any(one.slot == "requested" for one in counting) and all(
            one.slot in ("lacked", "requested") for one in counting
        )

    def _approval_due(self, life: Life) -> float | None:
        """None: not all are ready."""
        simulation = self._simulation
        fleet = simulation.settings.fleet
        assert fleet is not None
        resources = simulation.resources(life.name)
        vms = [vm for one in resources for vm in simulation.named(one)]
        is_known = len(vms) == len(resources) or fleet.members == ("vm_*",)
        works = {vm.vm_id: life.works.get(vm.vm_id, Work()) for vm in vms}
        # An event that is back is prepared for again, also where the hook of before has ended well.
        is_ready = all(works[vm.vm_id].is_ready and vm.is_prepared_now(life.name) for vm in vms)
        if not (vms and is_known and is_ready) or any(vm.is_dead for vm in vms):
            return None
        last = max(vms, key=lambda vm: works[vm.vm_id].since)
        last_at = works[last.vm_id].since
        trouble_until = max(vm.disturbed_until for vm in vms)
        # The others approve if the agent of the last one dies once it has said that it is ready.
        has_said = works[last.vm_id].ready_answered_at > last_at and len(vms) > 1
        for vm in vms:
            if vm is not last or not has_said:
                trouble_until = max(trouble_until, vm.killed_until)
        slow = max(25.0, 0.5 * len(life.records) + 5.0)
        seen_at = max(vm.seen_at.get(life.name, simulation.at) for vm in vms)
        if trouble_until > life.announced_at:
            return max(last_at, trouble_until, seen_at) + slow + 5.0
        # The time of a Lease's write has whole seconds too. What was written within one of them after the event
        # was seen may count as older than that, until it is renewed.
        margin = _DATE_SECONDS if simulation.in_leases else 0.0
        is_quick = (
            seen_at + margin < min(work.since for work in works.values()) and not last.killed_until > last_at
        )
        return last_at + 3.0 if is_quick else max(last_at, seen_at) + slow

    # --- (10) a kill and a start

    def _look_at_kill(self, vm: "Vm") -> None:
        simulation = self._simulation
        killed_at = simulation.at
        others = [other for other in simulation.vms.values() if other is not vm]
        is_calm = max(vm.disturbed_until, self._trouble_until(others)) < killed_at - 60.0
        is_calm &= vm.killed_until < killed_at - 30.0
        # Earlier statements of a silent VM lapse by their age alone.
        kept = [one for life in self.lives.values() for one in life.records.values()]
        is_calm &= all(killed_at - one.written_at <= 2.0 * one.renew_seconds for one in kept)
        if self._changed_at > killed_at - 30.0 or not is_calm or vm.is_dead:
            return
        records = self._own_records(vm)
        statuses = vm.statuses()

        def look(seconds: float) -> None:
            is_calm = max(vm.disturbed_until, self._trouble_until(others)) < killed_at - 60.0
            if self._changed_at > killed_at or not is_calm or vm.is_dead:
                return
            if vm.engine is None or simulation.at < vm.up_since + seconds:
                simulation.after(1.0, lambda: look(seconds))
                return
            self.checked[10] += 1
            if self._own_records(vm) != records:
                raise BrokenError(f"(10) {vm.vm_id} was killed: {records} is now {self._own_records(vm)}")
            if seconds == _STATUS_AGAIN_SECONDS and vm.statuses() != statuses:
                raise BrokenError(f"(10) {vm.vm_id} was killed: {statuses} is now {vm.statuses()}")

        for seconds in (25.0, _STATUS_AGAIN_SECONDS):
            simulation.after(seconds, lambda seconds=seconds: look(seconds))  # type: ignore[misc]

    def _own_records(self, vm: "Vm") -> list[tuple[str, str]]:
        return sorted(
            (life.name, one.state)
            for life in self.lives.values()
            for one in life.records.values()
            if one.vm_id == vm.vm_id
        )

    # --- (8) the end

    def look_at_rest(self) -> None:
        """Long after the last event, and before a new one."""
        simulation = self._simulation
        over_at = max((life.over_at for life in self.lives.values()), default=0.0)
        rest_at = max(over_at, self._recovered_at, self._trouble_until(simulation.vms.values())) + _REST_SECONDS
        for life in self.lives.values():
            for vm_id, work in life.works.items():
                if work.has_begun and not simulation.vms[vm_id].is_dead:
                    raise BrokenError(f"(8) {vm_id} has not recovered from {life.name}")
        self.checked[8] += 1
        self._look_for_records(may_be_dead=True)
        if self._last_effect_at > rest_at:
            raise BrokenError(f"(8) something is written at {self._last_effect_at:.0f}, after {rest_at:.0f}")
        late = [at for at, _, _ in simulation.network.log if at > rest_at]
        if late:
            raise BrokenError(f"(8) {len(late)} requests after {rest_at:.0f}, the first at {late[0]:.0f}")

    def _look_for_records(self, *, may_be_dead: bool) -> None:
        for life in self.lives.values():
            for vm_key, one in life.records.items():
                if not (may_be_dead and self._simulation.vms[one.vm_id].is_dead):
                    raise BrokenError(f"(8) the record {life.name}|{vm_key}: {one.state} is left")

    def finished(self) -> None:
        """After the event of another day."""
        simulation = self._simulation
        for life in self.lives.values():
            for vm_id, work in life.works.items():
                if work.has_begun and not simulation.vms[vm_id].is_dead:
                    raise BrokenError(f"(8) {vm_id} has not recovered from {life.name}")
        has_list = any(sent.kind == "list" for at, _, sent in simulation.network.log if at > _DAY)
        self._look_for_records(may_be_dead=not (simulation.has_ages and has_list))
