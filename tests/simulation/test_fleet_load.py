"""Limits of how much a fleet asks of its store."""

import pytest
from fleet_load import LoadWorld

MINUTE = 60.0
LATENCY = (0.02, 0.2)


def a_world(vms: int, latency: tuple[float, float] = (0.0, 0.0)) -> LoadWorld:
    """Its agents have started; what that cost does not count."""
    world = LoadWorld(vms, latency=latency)
    world.start_agents()
    world.requests.clear()
    world.listed = 0
    return world


def a_minute(world: LoadWorld, vm: str) -> float:
    """How many requests a VM sends, on average over some hours."""
    hours = 3
    before = world.requests[vm]
    world.run(world.now + hours * 60 * MINUTE)
    return (world.requests[vm] - before) / hours / 60


def test_the_start_of_an_agent_costs_one_request() -> None:
    world = LoadWorld(3)
    world.start_agents()
    world.run()
    assert world.requests == dict.fromkeys(world.vms, 1)


def test_an_event_of_one_vm_costs_7_requests_and_one_a_minute() -> None:
    for minutes in (0, 25, 600):
        world = a_world(1)
        world.announce("vm_0", prepare=(5.0, 5.0), lasts=(minutes * MINUTE, minutes * MINUTE), recover=(5.0, 5.0))
        world.run()
        assert world.requests.total() <= 7 + minutes
        assert world.store.list() == []


def test_the_first_vm_in_the_queue_sends_16_requests_a_minute() -> None:
    world = a_world(2)
    world.announce("vm_0", notice=1e5, lasts=(1e5, 1e5))
    world.run(world.now + MINUTE)
    event = world.announce("vm_1", notice=1e5)
    world.run(world.now + MINUTE)
    assert 5 < a_minute(world, "vm_1") <= 16
    assert not event.handling_since


def test_a_ready_vm_that_waits_for_others_sends_7_requests_a_minute() -> None:
    world = a_world(2)
    event = world.announce("vm_0", "vm_1", notice=1e5, silent=("vm_1",))
    world.run(world.now + 2 * MINUTE)
    assert 5 < a_minute(world, "vm_0") <= 7
    assert not event.has_started


def test_an_event_of_ten_vms_costs_100_requests_and_one_a_minute_for_each() -> None:
    for latency in ((0.0, 0.0), LATENCY):
        world = a_world(10, latency)
        event = world.announce(*world.vms, prepare=(20.0, 20.0), lasts=(600.0, 600.0), recover=(5.0, 5.0))
        world.run(20.0 + 5.0)
        assert event.has_started  # all of them were ready within a second, and approved it
        world.run()
        assert world.requests.total() <= 100 + 10 * 10
        assert world.store.list() == []


def test_a_hundred_events_waiting_for_one_slot_cost_30_requests_for_each_vm() -> None:
    for latency in ((0.0, 0.0), LATENCY):
        world = a_world(100, latency)
        events = [world.announce(name) for name in world.vms]
        world.run(600.0)
        assert world.listed / 600 < 200
        world.run()
        assert world.requests.total() <= 30 * 100
        assert 1 < sum(not event.without_slot for event in events) < 100
        assert world.store.list() == []


@pytest.mark.parametrize("vms", [50, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_month_of_a_thousand_vms_costs_250000_requests(vms: int) -> None:
    """Each has an event of 25 minutes, and waits ten minutes for that of the VM before it."""
    world = a_world(vms)
    for name in world.vms:
        event = world.announce(
            name,
            notice=40 * MINUTE,
            prepare=(30.0, 30.0),
            lasts=(23 * MINUTE, 23 * MINUTE),
            recover=(90.0, 90.0),
        )
        world.run(event.announced_at + 11 * MINUTE)
        assert name == "vm_0" or event.handling_since[name] > event.announced_at + 10 * MINUTE
        world.run(event.handling_since[name] + 15 * MINUTE)
    world.run()
    assert world.requests.total() / vms < 250_000 / 1000
