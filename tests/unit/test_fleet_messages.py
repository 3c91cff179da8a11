"""Display of a VM of a fleet: which VMs it waits for, and whether its store answers."""

from datetime import UTC, datetime
from random import Random

from memory_backend import MemoryBackend, MemoryStore
from msgspec.structs import replace

from scheduled_events_agent.fleet.client import FleetClient
from scheduled_events_agent.workflow import FleetRequest

WANTS = FleetRequest(
    event="e",
    workflow_id="e@1",
    event_id="E",
    not_before=datetime(2026, 3, 2, 9, 0, tzinfo=UTC),
    vm="web_0",
    stage="requested",
    needs_slot=True,
    lacks_slot=False,
    needs_all=False,
    requested_vms=("web_0",),
    seen_at=0.0,
)


class Vm:
    """With a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.fault = ""
        self.backend = MemoryBackend(MemoryStore(lambda: self.now), lambda _: self.fault)
        self.client = FleetClient(
            self.backend,
            vm_id="id",
            max_events=1,
            random=Random(1),
            monotonic=lambda: self.now,
        )


def test_the_backend_is_available_again_only_after_a_response() -> None:
    vm = Vm()
    vm.client.sync([])
    vm.fault = "unavailable"
    vm.client.sync([WANTS])
    for _ in range(10):  # the event is gone, and nothing more is asked of the fleet
        assert vm.client.error is not None
        assert vm.client.unavailable_from == 100.0
        assert vm.client.next_sync_at is not None
        vm.now = vm.client.next_sync_at
        vm.client.sync([])
    vm.fault = ""
    vm.now += 60.0
    vm.client.sync([])
    assert vm.client.error is None
    assert vm.client.next_sync_at is None


def test_a_vm_that_becomes_ready_does_not_wait_for_itself() -> None:
    vm = Vm()
    shared = replace(WANTS, needs_all=True, requested_vms=("web_0", "web_1"))
    for stage in ("requested", "not_ready", "ready"):
        vm.client.sync([replace(shared, stage=stage)])
    (record,) = vm.backend.store.list()
    assert (record.fields["state"], record.fields["waits_for"]) == ("ready", "web_1")
