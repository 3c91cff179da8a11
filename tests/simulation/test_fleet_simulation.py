"""Fleets of whole engines that share one failing ledger, lived through and judged from the outside.

A few lives here; ``python tests/simulation --fleet`` lives thousands. Each bug that the protocol is there to
prevent is planted once, and must be found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from fleet_runs import judge_fleet_seed, judge_fleet_seeds
from fleet_world import FLEET_TROUBLES, FleetTrouble, FleetWorld
from msgspec.structs import replace
from mutants import break_workflow

from scheduled_events_agent.fleet import protocol
from scheduled_events_agent.fleet.ledger import Row
from scheduled_events_agent.fleet.protocol import Fleet
from scheduled_events_agent.workflow import Context, Workflow
from scheduled_events_agent.workflow.fleet import awaited

WORKFLOW = "scheduled_events_agent.workflow"
REAL_MIND, REAL_GATHER, REAL_NAMES = Fleet._mind_slot, Fleet._gather, Fleet._ready_names


def test_a_fleet_keeps_its_rules_in_trouble() -> None:
    events, broken = judge_fleet_seeds(range(20))
    assert [verdict.text() for verdict in broken] == []
    assert events > 50


def test_two_hundred_vms_keep_them_as_well() -> None:
    verdict = judge_fleet_seed(49)
    assert not verdict.broken, verdict.text()
    assert "200 VMs" in verdict.story[0]


def test_a_seed_of_a_fleet_has_one_story() -> None:
    one, other = judge_fleet_seed(11), judge_fleet_seed(11)
    assert one == other
    assert len(one.story) > 20


def test_every_trouble_of_a_fleet_comes_up() -> None:
    assert frozenset[str]().union(*(FleetWorld(seed).troubles for seed in range(30))) == set(FLEET_TROUBLES)


def _mind_slot_of_this_vm(self: Fleet, event: Any, now: datetime) -> None:
    """The slot is the VM's, not the event's."""
    wish = event.wish
    event.wish = replace(wish, event=f"{wish.event} {wish.own}")
    try:
        REAL_MIND(self, event, now)
    finally:
        event.wish = wish


def _list_before_write(self: Fleet, event: Any, now: datetime) -> None:
    if event.row == "ready":
        REAL_GATHER(self, event, now)
        return
    listed = REAL_NAMES(self, event)
    self._ready_names = lambda event: listed | {event.wish.own}  # type: ignore[method-assign]
    try:
        REAL_GATHER(self, event, now)
    finally:
        del self._ready_names


def _remember_ready(self: Fleet, event: Any) -> frozenset[str]:
    """Who was ready once counts for ever."""
    known: dict[str, frozenset[str]] = self.__dict__.setdefault("known", {})
    known[event.key] = known.get(event.key, frozenset()) | REAL_NAMES(self, event)
    return known[event.key]


def _is_taken(row: Row, now: datetime) -> bool:
    del now
    return bool(row.content.get("event"))


def _await_first_ones(workflow: Workflow, context: Context) -> list[str]:
    return awaited(workflow, context)[:-1]


@dataclass(frozen=True)
class Plant:
    """One thing done wrong, and the beginning of what the judge says to it."""

    where: Any
    fault: dict[str, Any]
    found: str
    troubles: frozenset[FleetTrouble] | None = None
    """Those in which it comes up, where it seldom does."""
    first: int = 0
    """The seed to begin with."""


PLANTS = {
    "a slot for each VM": Plant(Fleet, {"_mind_slot": _mind_slot_of_this_vm}, "(4)"),
    "lists before it writes": Plant(Fleet, {"_gather": _list_before_write}, "(3)", first=11),
    "the first two never look again": Plant(
        protocol, {"_LOOK_SECONDS": (1e6, 1e6)}, "(3)", frozenset({"stale lists", "slow"})
    ),
    "the others never look again": Plant(
        protocol, {"_LOOK_RARELY_SECONDS": 1e6}, "(3)", frozenset({"back again", "missed gaps"})
    ),
    "a slot does not expire": Plant(protocol, {"is_held": _is_taken}, "(4)", frozenset({"dead VMs"})),
    "approves with those who were ready once": Plant(
        Fleet, {"_ready_names": _remember_ready}, "(1)", frozenset({"back again"})
    ),
    "awaits all but the last": Plant(WORKFLOW, {"awaited": _await_first_ones}, "(1)"),
    "the first one back frees the slot": Plant(Fleet, {"_are_all_back": lambda *_: True}, "(2)", first=3),
    "no VM frees the slot": Plant(Fleet, {"_free": lambda *_: True}, "(4)"),
    "forgets what it owes at a restart": Plant(Fleet, {"_look_back": lambda *_: None}, "(", frozenset({"kills"})),
}


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, fault in plant.fault.items():
            if plant.where is WORKFLOW:
                break_workflow(patch, name, fault)
            else:
                patch.setattr(plant.where, name, fault)
        yield


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_the_judge_finds_a_planted_bug(plant: Plant) -> None:
    with planted(plant):
        verdicts = (judge_fleet_seed(seed, plant.troubles) for seed in range(plant.first, plant.first + 100))
        found = next((verdict for verdict in verdicts if verdict.broken.startswith(plant.found)), None)
    assert found is not None
    print(found.text())
