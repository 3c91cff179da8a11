"""Fleets of whole engines that share one store, lived through and checked from the outside.

A few lives here; ``python tests/simulation --fleet`` lives thousands. Each bug that the protocol is there to
prevent is planted once, and must be found.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from fleet_machines import Requests, Vm
from fleet_runs import run_fleet_seed
from fleet_simulation import FLEET_TROUBLES, FleetTrouble
from memory_backend import MemoryStore
from msgspec.structs import replace
from mutants import break_workflow
from simulation import given_troubles

from scheduled_events_agent.fleet import client, plan
from scheduled_events_agent.fleet.backend import Record
from scheduled_events_agent.fleet.plan import SlotState, VmRecord
from scheduled_events_agent.workflow import Context, FleetEventStatus, FleetRequest, Workflow
from scheduled_events_agent.workflow.fleet import counts_for_slots, needs_slot_to_approve, requested_vms

WORKFLOW = "scheduled_events_agent.workflow"
GROUP = plan._Group
REAL_STATUS = GROUP.status_of
REAL_WRITE = GROUP.write_of
REAL_NOT_READY = GROUP._not_ready
REAL_READ = plan.read_record
REAL_LIST = Requests.list
REAL_START = Vm.start
REAL_NEEDS_SLOT_TO_APPROVE = needs_slot_to_approve


def test_a_fleet_keeps_its_rules_under_every_trouble() -> None:
    checked: Counter[int] = Counter()
    events = 0
    for seed in range(25):
        result = run_fleet_seed(seed)
        assert not result.broken, result.text()
        checked += result.checked
        events += result.events
    assert events > 80
    assert set(checked) >= {1, 2, 3, 4, 5, 7, 8, 9, 11}


def test_every_rule_is_checked_without_many_troubles() -> None:
    checked: Counter[int] = Counter()
    for seed in range(20):
        result = run_fleet_seed(seed, frozenset({"kills"}))
        assert not result.broken, result.text()
        checked += result.checked
    assert set(checked) == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}


@pytest.mark.nightly
def test_two_hundred_vms_keep_the_rules() -> None:
    result = run_fleet_seed(199, frozenset({"lost"}))
    assert not result.broken, result.text()
    assert "200 VMs" in result.journal[0]


def test_a_fleet_keeps_the_rules_with_a_backend_without_ages() -> None:
    for seed in range(10):
        result = run_fleet_seed(seed, has_ages=False)
        assert not result.broken, result.text()


def test_a_seed_of_a_fleet_always_gives_the_same_run() -> None:
    one = run_fleet_seed(11)
    assert one == run_fleet_seed(11)
    assert len(one.journal) > 20


def test_every_trouble_of_a_fleet_is_simulated() -> None:
    given = (given_troubles(seed, FLEET_TROUBLES) for seed in range(30))
    assert frozenset[str]().union(*given) == set(FLEET_TROUBLES)


# --- Each bug planted on purpose.


def _begin_on_any_list(self: Any, request: FleetRequest, state: str, slot: SlotState) -> FleetEventStatus:
    """Also on the list from before its claim."""
    status = REAL_STATUS(self, request, state, slot)
    is_room = len(self._others_with_slot(request)) < (self.max_events or 1)
    has_slot = request.stage == "requested" and request.needs_slot and state == "claimed" and is_room
    return replace(status, has_slot=status.has_slot or has_slot)


def _has_begun(self: VmRecord) -> bool:
    age = self.record.age
    return self.state in ("not_ready", "ready") and (age is None or age <= plan.SLOT_SECONDS)


def _was_ready_once(one: VmRecord, seen_seconds: float) -> bool:
    age = one.record.age
    return one.state == "ready" and age is not None and age <= seen_seconds


def _was_ready_before(one: VmRecord, seen_seconds: float) -> bool:
    del seen_seconds
    return one.state == "ready" and one.is_fresh


def _put_always(self: MemoryStore, key: str, fields: Mapping[str, str], etag: str) -> str:
    del etag
    new = f"etag-{next(self._etags)}"
    self._records[key] = (new, self._clock(), dict(fields))
    return new


def _leave_unconfirmed(self: Any, request: FleetRequest, state: str, slot: SlotState, interval: float) -> Any:
    own = self.own(request)
    is_left = own is not None and own.state == state and not self._is_confirmed(own)
    return None if is_left else REAL_WRITE(self, request, state, slot, interval)


def _await_all_but_the_last(workflow: Workflow, context: Context) -> list[str]:
    return requested_vms(workflow, context)[:-1]


def _await_members_only(self: Any, request: FleetRequest) -> tuple[str, ...]:
    return tuple(name for name in REAL_NOT_READY(self, request) if name in request.requested_vms)


def _list_by_own_clock(self: Requests) -> list[Record]:
    offset = self._vm.wall_offset
    return [one._replace(age=max(0.0, (one.age or 0.0) + offset)) for one in REAL_LIST(self)]


def _read_in_order_of_arrival(record: Record) -> VmRecord:
    found = REAL_READ(record)
    return found._replace(order=(_arrival(found.event_id), found.event))


def _order_of_arrival(self: Any, request: FleetRequest) -> tuple[str, str]:
    del self
    return _arrival(request.event_id), plan.event_key(request.event)


def _arrival(event_id: str) -> str:
    return event_id[1:].zfill(6)


def _never_join_soon(self: Any, request: FleetRequest) -> bool:
    del self, request
    return False


def _never(*_: Any) -> bool:
    return False


def _waits_with_a_slot_too(workflow: Workflow, context: Context) -> bool:
    return counts_for_slots(workflow, context)


def _waits_for_a_store_only(workflow: Workflow, context: Context) -> bool:
    assert context.fleet is not None
    return REAL_NEEDS_SLOT_TO_APPROVE(workflow, context) and not context.fleet.error


def _list_at_once(self: Vm) -> None:
    REAL_START(self)
    if self.engine is not None:
        self._publish(())


@dataclass(frozen=True)
class Plant:
    """Something done wrong, and the beginning of what the oracle says to it."""

    faults: tuple[tuple[Any, str, Any], ...]
    """Where, the name of what is replaced, and by what."""
    found: str
    troubles: str
    """Those that bring it up."""
    first: int = 0
    """The first seed to live: no earlier one shows it."""


PLANTS = {
    "begins on the list from before its claim": Plant(
        ((GROUP, "status_of", _begin_on_any_list), (client, "_MAX_ROUNDS", 1)), "(1)", "late"
    ),
    "counts confirmed claims only": Plant(
        ((VmRecord, "counts_for_slot", property(_has_begun)),), "(1)", "late", first=37
    ),
    "ready does not expire": Plant(((plan, "_is_ready", _was_ready_once),), "(2)", "reboots, dead VMs", first=32),
    "ready from before this appearance counts": Plant(
        ((plan, "_is_ready", _was_ready_before),), "(2)", "back again, cut off, reboots", first=40
    ),
    "a slot lasts a minute": Plant(((plan, "SLOT_SECONDS", 60.0),), "(1)", "reboots, cut off"),
    "a slot does not lapse": Plant(((plan, "SLOT_SECONDS", 1e9),), "(5)", "dead VMs"),
    "writes without a condition": Plant(
        ((MemoryStore, "put", _put_always),), "(", "late, doubled, holds, reboots", first=282
    ),
    "leaves an unconfirmed record": Plant(((GROUP, "write_of", _leave_unconfirmed),), "(", "kills"),
    "awaits all but the last": Plant(((WORKFLOW, "requested_vms", _await_all_but_the_last),), "(2)", ""),
    "members overrules a record": Plant(((GROUP, "_not_ready", _await_members_only),), "(2)", "", first=12),
    "ages by the VM's own clock": Plant(((Requests, "list", _list_by_own_clock),), "(", "wrong clocks"),
    "begins in order of arrival": Plant(
        ((plan, "read_record", _read_in_order_of_arrival), (GROUP, "_order", _order_of_arrival)),
        "(6)",
        "",
        first=37,
    ),
    "gives slots right after an outage": Plant(((client, "_RENEWAL_SECONDS", 0.0),), "(1)", "unavailable"),
    "joins the slot of its event late": Plant(
        ((GROUP, "may_join_soon", _never_join_soon),), "(5)", "", first=800023
    ),
    "approves what began late at once": Plant(((WORKFLOW, "lacks_slot", _never),), "(11)", ""),
    "two that wait to be approved wait for each other": Plant(((GROUP, "_only_asks", _never),), "(7)", ""),
    "what began without a slot is one": Plant(((VmRecord, "has_slot", VmRecord.has_begun),), "(11)", ""),
    "what began with a slot waits to be approved": Plant(
        ((WORKFLOW, "lacks_slot", _waits_with_a_slot_too),), "(7)", "", first=39
    ),
    "approves what began late without the store": Plant(
        ((WORKFLOW, "needs_slot_to_approve", _waits_for_a_store_only),), "(11)", "unavailable"
    ),
    "lists at once": Plant(((Vm, "start", _list_at_once),), "(1)", "kills", first=451),
}


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for where, name, fault in plant.faults:
            if where is WORKFLOW:
                break_workflow(patch, name, fault)
            else:
                patch.setattr(where, name, fault)
        yield


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_the_oracle_finds_a_planted_bug(plant: Plant) -> None:
    troubles = cast("frozenset[FleetTrouble]", frozenset(filter(None, plant.troubles.split(", "))))
    with planted(plant):
        results = (run_fleet_seed(seed, troubles) for seed in range(plant.first, plant.first + 300))
        found = next((result for result in results if result.broken.startswith(plant.found)), None)
    assert found is not None
    print(found.text())
