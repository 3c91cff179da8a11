"""Limits of how much a fleet asks of its store."""

import fleet_load
import pytest
from fleet_load import LoadSimulation

MINUTE = 60.0
LATENCY = (0.02, 0.2)


def a_fleet(vms: int, latency: tuple[float, float] = (0.0, 0.0)) -> LoadSimulation:
    """Its agents have started; what that cost does not count."""
    fleet = LoadSimulation(vms, latency=latency)
    fleet.start_agents()
    fleet.requests.clear()
    fleet.listed = 0
    return fleet


def a_minute(fleet: LoadSimulation, vm: str) -> float:
    """How many requests a VM sends, on average over some hours."""
    hours = 3
    before = fleet.requests[vm]
    fleet.run(fleet.at + hours * 60 * MINUTE)
    return (fleet.requests[vm] - before) / hours / 60


def test_the_start_of_an_agent_costs_one_request() -> None:
    fleet = LoadSimulation(3)
    fleet.start_agents()
    fleet.run()
    assert fleet.requests == dict.fromkeys(fleet.vms, 1)


def test_an_event_of_one_vm_costs_7_requests_and_one_a_minute() -> None:
    for minutes in (0, 25, 600):
        fleet = a_fleet(1)
        fleet.announce("vm_0", prepare=(5.0, 5.0), lasts=(minutes * MINUTE, minutes * MINUTE), recover=(5.0, 5.0))
        fleet.run()
        assert fleet.requests.total() <= 7 + minutes
        assert fleet.store.list() == []


def test_the_first_vm_in_the_queue_sends_16_requests_a_minute() -> None:
    fleet = a_fleet(2)
    fleet.announce("vm_0", notice=1e5, lasts=(1e5, 1e5))
    fleet.run(fleet.at + MINUTE)
    event = fleet.announce("vm_1", notice=1e5)
    fleet.run(fleet.at + MINUTE)
    assert 5 < a_minute(fleet, "vm_1") <= 16
    assert not event.handling_since


@pytest.mark.parametrize(("vms", "most"), [(("vm_1",), 16), (("vm_1", "vm_2"), 20)])
def test_a_wait_for_a_slot_to_approve_costs_16_requests_a_minute_and_20_where_all_are_ready(
    vms: tuple[str, ...], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_load, "LATEST_BEGIN_SECONDS", 1e5)
    fleet = a_fleet(3)
    fleet.announce("vm_0", notice=2e5, lasts=(1e5, 1e5))
    fleet.run(fleet.at + MINUTE)
    late = fleet.announce(*vms, notice=1e5)
    fleet.run(fleet.at + 2 * MINUTE)
    assert late.without_slot == set(vms)
    assert 5 < a_minute(fleet, "vm_1") <= most
    assert not late.has_started


def test_a_ready_vm_that_waits_for_others_sends_7_requests_a_minute() -> None:
    fleet = a_fleet(2)
    event = fleet.announce("vm_0", "vm_1", notice=1e5, silent=("vm_1",))
    fleet.run(fleet.at + 2 * MINUTE)
    assert 5 < a_minute(fleet, "vm_0") <= 7
    assert not event.has_started


def test_an_event_of_ten_vms_costs_100_requests_and_one_a_minute_for_each() -> None:
    for latency in ((0.0, 0.0), LATENCY):
        fleet = a_fleet(10, latency)
        event = fleet.announce(*fleet.vms, prepare=(20.0, 20.0), lasts=(600.0, 600.0), recover=(5.0, 5.0))
        fleet.run(20.0 + 5.0)
        assert event.has_started  # all of them were ready within a second, and approved it
        fleet.run()
        assert fleet.requests.total() <= 100 + 10 * 10
        assert fleet.store.list() == []


def test_a_hundred_events_waiting_for_one_slot_cost_30_requests_for_each_vm() -> None:
    for latency in ((0.0, 0.0), LATENCY):
        fleet = a_fleet(100, latency)
        events = [fleet.announce(name) for name in fleet.vms]
        fleet.run(600.0)
        assert fleet.listed / 600 < 200
        fleet.run()
        assert fleet.requests.total() <= 30 * 100
        assert 1 < sum(not event.without_slot for event in events) < 100
        assert fleet.store.list() == []


@pytest.mark.parametrize("vms", [50, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_month_of_a_thousand_vms_costs_250000_requests(vms: int) -> None:
    """Each has an event of 25 minutes, and waits ten minutes for that of the VM before it."""
    fleet = a_fleet(vms)
    for name in fleet.vms:
        event = fleet.announce(
            name,
            notice=40 * MINUTE,
            prepare=(30.0, 30.0),
            lasts=(23 * MINUTE, 23 * MINUTE),
            recover=(90.0, 90.0),
        )
        fleet.run(event.announced_at + 11 * MINUTE)
        assert name == "vm_0" or event.handling_since[name] > event.announced_at + 10 * MINUTE
        fleet.run(event.handling_since[name] + 15 * MINUTE)
    fleet.run()
    assert fleet.requests.total() / vms < 250_000 / 1000
