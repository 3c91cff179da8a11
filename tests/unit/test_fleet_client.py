"""One VM's side of the fleet on a store in memory, with a clock that the test moves."""

import ast
import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any, TypeVar

import pytest
from memory_backend import MemoryStore
from msgspec.structs import replace

from scheduled_events_agent.fleet import client as client_module
from scheduled_events_agent.fleet import plan as plan_module
from scheduled_events_agent.fleet.backend import BackendError, Record
from scheduled_events_agent.fleet.client import FleetClient
from scheduled_events_agent.workflow import FleetEventStatus, FleetRequest

T = TypeVar("T")
START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
BOTH = ("web_0", "web_1")
LATE: dict[str, Any] = {"stage": "not_ready", "needs_slot": True, "lacks_slot": True}


class Group:
    """A store, and the time that all of its VMs have."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = MemoryStore(lambda: self.now)

    def states(self) -> list[str]:
        return sorted(f"{one.fields['id']} {one.fields['vm']} {one.fields['state']}" for one in self.store.list())

    def run(self, seconds: float, *vms: "Vm") -> None:
        """Each VM asks when it wants to."""
        end = self.now + seconds
        while True:
            due = [(vm.client.next_sync_at, index) for index, vm in enumerate(vms)]
            at, index = min(((at, index) for at, index in due if at is not None), default=(end, 0))
            if at >= end:
                break
            self.now = max(self.now, at)
            vms[index].client.sync(vms[index].requests.values())
        self.now = end


class Way:
    """A VM's way to the store. ``faults``, of its next calls:

    "" nothing; unavailable: it has no effect; no table: that is gone; lost: it has its effect, and the answer is
    lost; late: the answer is lost, and it has its effect when the test says so; doubled: it has its effect now,
    and then once more.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.faults: list[str] = []
        self.retry_after = 0.0
        self.calls: list[str] = []
        self.later: list[Callable[[], object]] = []
        self.before: Callable[[str], None] = lambda _: None

    def list(self) -> list[Record]:
        return self._call("list", self.store.list)

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        return self._call("update" if etag else "create", partial(self.store.put, key, fields, etag))

    def delete(self, key: str, etag: str) -> bool:
        return self._call("delete", partial(self.store.delete, key, etag))

    def _call(self, name: str, call: Callable[[], T]) -> T:
        self.calls.append(name)
        self.before(name)
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("late", "doubled"):
            self.later.append(call)
        if fault == "no table":
            raise BackendError("there is no table", kind="not_found")
        if fault in ("late", "unavailable"):
            raise BackendError("no answer", kind="timeout", retry_after=self.retry_after)
        answer = call()
        if fault == "lost":
            raise BackendError("no answer", kind="timeout")
        return answer


class Vm:
    def __init__(self, group: Group, name: str = "web_0", vm_id: str = "", max_events: int | None = 1) -> None:
        self.group = group
        self.name = name
        self.requests: dict[str, FleetRequest] = {}
        self.waited: list[tuple[str, float]] = []
        self._options: dict[str, Any] = {"vm_id": vm_id or f"id-{name}", "max_events": max_events}
        self.restart()

    def restart(self, seed: str = "") -> None:
        self.way = Way(self.group.store)
        self.client = FleetClient(
            self.way,
            random=Random(seed or self.name),
            monotonic=lambda: self.group.now,
            on_wait_ended=lambda what, seconds: self.waited.append((what, seconds)),
            **self._options,
        )

    def started(self) -> "Vm":
        """It has asked once, without requests."""
        self.client.sync(())
        self.way.calls.clear()
        return self

    def want(self, stage: str, event: str = "a", names: tuple[str, ...] = (), **changes: Any) -> FleetEventStatus:
        """The request of an event changes, and the client is asked at once."""
        fields: dict[str, Any] = {
            "event": event,
            "workflow_id": f"{event}@1",
            "event_id": event,
            "not_before": START + timedelta(minutes=15),
            "vm": self.name,
            "stage": stage,
            "needs_slot": stage == "requested" and self._options["max_events"] is not None,
            "lacks_slot": False,
            "needs_all": len(names) > 1,
            "requested_vms": names or (self.name,),
            "seen_at": 0.0,
        }
        self.requests[event] = FleetRequest(**{**fields, **changes})
        return self.sync(event)

    def end(self, event: str = "a") -> None:
        del self.requests[event]
        self.sync()

    def sync(self, event: str = "a") -> FleetEventStatus:
        self.client.sync(self.requests.values())
        return self.client.statuses.get(event, FleetEventStatus())

    def take_calls(self) -> list[str]:
        calls = list(self.way.calls)
        self.way.calls.clear()
        return calls


# --- what it asks, and when


def test_at_the_start_it_lists_once_and_is_silent() -> None:
    group = Group()
    vm = Vm(group)
    vm.client.sync(())
    assert vm.take_calls() == ["list"]
    assert vm.client.next_sync_at is None


def test_nothing_is_written_or_deleted_before_the_first_list() -> None:
    group = Group()
    before = Vm(group).started()
    before.want("not_ready")
    before.want("not_ready", "b")
    vm = Vm(group)
    vm.way.faults = ["unavailable"]
    vm.want("not_ready")
    assert vm.take_calls() == ["list"]
    group.run(5.0, vm)
    assert vm.take_calls() == ["list", "update", "delete"]
    assert group.states() == ["a web_0 not_ready"]


def test_an_event_without_a_wait_costs_six_requests() -> None:
    group = Group()
    vm = Vm(group).started()
    assert vm.want("requested").has_slot
    assert vm.take_calls() == ["list", "create", "list"]
    vm.want("not_ready")
    assert vm.take_calls() == ["update"]
    vm.end()
    assert vm.take_calls() == ["delete"]
    group.run(124.0, vm)
    assert vm.take_calls() == []
    group.run(86_400.0, vm)
    assert vm.take_calls() == ["list"]
    assert vm.client.next_sync_at is None


def test_a_vm_that_waits_for_no_other_writes_once_a_minute_without_a_list() -> None:
    group = Group()
    vm = Vm(group).started()
    vm.want("not_ready")
    vm.take_calls()
    group.run(3600.0, vm)
    assert set(vm.way.calls) == {"update"}
    assert 58 <= len(vm.way.calls) <= 60
    (record,) = group.store.list()
    assert record.age is not None
    assert record.age <= 60.0


def test_ready_is_written_before_the_list_that_counts() -> None:
    group = Group()
    vms = [Vm(group, name, max_events=None).started() for name in BOTH]
    assert not vms[0].want("ready", names=BOTH).is_all_ready
    assert vms[1].want("ready", names=BOTH).is_all_ready
    assert vms[1].take_calls()[-2:] == ["create", "list"]
    group.run(20.0, vms[0])
    assert vms[0].client.statuses["a"].is_all_ready


def test_a_vm_that_starts_and_is_ready_learns_at_once_that_all_are() -> None:
    group = Group()
    Vm(group, "web_1", max_events=None).started().want("ready", names=BOTH)
    vm = Vm(group, max_events=None)
    assert vm.want("ready", names=BOTH).is_all_ready
    assert vm.take_calls() == ["list", "create", "list"]


def test_while_it_may_act_it_lists_every_5_s() -> None:
    group = Group()
    vm = Vm(group).started()
    vm.want("requested")
    assert vm.client.next_sync_at is not None
    assert 4.0 <= vm.client.next_sync_at - group.now <= 5.0


def test_vms_do_not_ask_all_at_once() -> None:
    group = Group()
    Vm(group, "first").started().want("requested", "b")
    seconds = set()
    for number in range(50):
        vm = Vm(group, f"web_{number}").started()
        vm.want("requested")
        seconds.add((vm.client.next_sync_at or 0.0) - group.now)
        vm.end()
    assert 8.0 <= min(seconds) < 8.5
    assert 9.5 < max(seconds) <= 10.0
    assert len(seconds) > 40


def test_old_records_make_no_pause_longer() -> None:
    group = Group()
    for number in range(500):
        group.store.put(f"{number}|gone", {"vm_id": "gone"}, "")
    group.now += 90_000.0
    vm = Vm(group).started()
    vm.want("ready", names=BOTH)
    client: Any = vm.client
    assert client.next_sync_at - group.now <= 20.0


def test_a_slow_list_counts_from_when_it_was_sent() -> None:
    group = Group()
    vm = Vm(group).started()

    def is_slow(_: str) -> None:
        group.now += 7.0

    vm.way.before = is_slow
    assert vm.want("requested").has_slot
    assert vm.client.listed_at == 1000.0 + 14.0
    assert group.now == 1000.0 + 21.0


def test_it_lists_four_times_at_most() -> None:
    group = Group()
    vm = Vm(group).started()
    vm.want("not_ready")
    vm.take_calls()

    def write_first(call: str) -> None:
        """Another program is always faster."""
        if call == "update":
            (record,) = group.store.list()
            group.store.put(record.key, record.fields, record.etag)

    vm.way.before = write_first
    assert not vm.want("ready", names=BOTH).is_all_ready
    assert vm.way.calls.count("list") == 4
    assert vm.client.error is None
    vm.way.before = lambda _: None
    group.run(20.0, vm)
    assert group.states() == ["a web_0 ready"]


def test_twenty_old_records_of_others_are_deleted_at_the_end_of_a_sync() -> None:
    group = Group()
    other = Vm(group, "web_1").started()
    for number in range(50):
        other.want("ready", f"old {number}")
    group.now += 86_401.0
    vm = Vm(group)
    assert vm.want("requested").has_slot
    assert vm.take_calls() == ["list", "create", "list", *["delete"] * 20]
    assert len(group.states()) == 31


def test_two_events_that_both_need_the_only_slot_are_one_after_the_other() -> None:
    group = Group()
    vms = [Vm(group, name).started() for name in BOTH]
    vms[1].want("requested", "b", not_before=START)
    assert not vms[0].want("requested", "a").has_slot
    vms[1].want("not_ready", "b")
    group.run(300.0, *vms)
    assert group.states() == ["a web_0 requested", "b web_1 not_ready"]
    vms[1].end("b")
    group.run(10.0, vms[0])
    assert vms[0].client.statuses["a"].has_slot


def test_of_two_claims_at_one_moment_one_begins() -> None:
    group = Group()
    vms = [Vm(group, name).started() for name in BOTH]

    def claim_too(call: str) -> None:
        if call == "create":
            vms[0].way.before = lambda _: None
            vms[1].want("requested", "b", not_before=START)

    vms[0].way.before = claim_too
    assert not vms[0].want("requested", "a").has_slot
    group.run(2.0, vms[1])
    assert vms[1].client.statuses["b"].has_slot


@pytest.mark.parametrize(
    ("seed", "asked"), [*[(seed, 0.0) for seed in range(6)], *[(seed, 200.0) for seed in (0, 44, 58)]]
)
def test_after_a_long_outage_no_vm_takes_a_slot_before_its_owner_has_renewed_it(seed: int, asked: float) -> None:
    group = Group()
    owner, waiting = vms = [Vm(group, name) for name in BOTH]
    for number, vm in enumerate(vms):
        vm.restart(f"{seed} {number}")
        vm.started()
    in_two_days = START + timedelta(days=2)
    owner.want("not_ready", "a", not_before=in_two_days)
    waiting.want("requested", "b", not_before=in_two_days)
    for vm in vms:
        vm.way.faults = ["unavailable"] * 1000
        vm.way.retry_after = asked
    group.run(2400.0, *vms)
    assert waiting.client.error is not None
    for vm in vms:
        vm.way.faults = []
    for _ in range(120 + 3 * int(asked)):
        group.run(1.0, *vms)
        assert not waiting.client.statuses["b"].has_slot
    owner.end("a")
    group.run(10.0, waiting)
    assert waiting.client.statuses["b"].has_slot


@pytest.mark.parametrize("next_fault", ["", "unavailable"])
@pytest.mark.parametrize("seed", range(6))
def test_a_table_that_is_made_anew_gives_no_slot_before_its_owner_has_written_it_again(
    seed: int, next_fault: str
) -> None:
    """``next_fault``: the role for the new table, say, may come later."""
    group = Group()
    owner, waiting = vms = [Vm(group, name) for name in BOTH]
    for number, vm in enumerate(vms):
        vm.restart(f"{seed} {number}")
        vm.started()
    owner.want("not_ready", "a")
    waiting.want("requested", "b")
    group.run(100.0 + 10 * seed, *vms)
    for vm in vms:
        vm.way.faults = ["no table"] * 1000
    group.run(45.0, *vms)
    for record in group.store.list():
        group.store.delete(record.key, record.etag)
    for vm in vms:
        vm.way.faults = [next_fault] * 1000
    group.run(60.0 if next_fault else 0.0, *vms)
    for vm in vms:
        vm.way.faults = []
    for _ in range(120):
        group.run(1.0, *vms)
        assert not waiting.client.statuses["b"].has_slot


@pytest.mark.parametrize("wanted", [{"stage": "requested"}, LATE], ids=["to begin", "to approve"])
def test_after_a_long_outage_a_silent_vm_keeps_its_slot_for_90_s_more(wanted: dict[str, Any]) -> None:
    group = Group()
    dead, waiting = (Vm(group, name).started() for name in BOTH)
    dead.want("not_ready", "a")
    waiting.want(event="b", **wanted)
    waiting.way.faults = ["unavailable"] * 1000
    group.run(2400.0, waiting)
    waiting.way.faults = []
    group.run(90.0, waiting)
    assert not waiting.client.statuses["b"].has_slot
    group.run(35.0, waiting)
    assert waiting.client.statuses["b"].has_slot


# --- a slot to approve


def test_of_two_that_began_late_the_earlier_one_has_the_slot_first() -> None:
    group = Group()
    earlier, later = (Vm(group, name).started() for name in BOTH)
    earlier.want("not_ready", "a", lacks_slot=True)  # it still prepares
    later.want(event="b", not_before=START + timedelta(minutes=15), **LATE)
    assert not later.client.statuses["b"].has_slot
    earlier.want(event="a", not_before=START + timedelta(minutes=10), **LATE)
    group.run(30.0, earlier, later)
    assert earlier.client.statuses["a"].has_slot
    assert not later.client.statuses["b"].has_slot
    assert later.client.statuses["b"].ahead == ("a",)
    earlier.want("not_ready", "a")
    group.run(60.0, earlier, later)
    assert not later.client.statuses["b"].has_slot
    earlier.end("a")
    group.run(30.0, later)
    assert later.client.statuses["b"].has_slot


def test_one_that_began_late_and_does_not_ask_counts() -> None:
    group = Group()
    held, asking = (Vm(group, name).started() for name in BOTH)
    held.want("not_ready", "a", lacks_slot=True, not_before=START + timedelta(minutes=20))
    asking.want(event="b", **LATE)
    group.run(60.0, held, asking)
    assert not asking.client.statuses["b"].has_slot


def test_no_vm_joins_an_event_that_began_without_a_slot() -> None:
    group = Group()
    busy, *vms = (Vm(group, name).started() for name in ("web_0", "web_1", "web_2"))
    busy.want("not_ready", "a")
    vms[0].want(event="b", **LATE)
    vms[1].want(event="b", **LATE)
    group.run(60.0, *vms)
    assert not any(vm.client.statuses["b"].has_slot for vm in vms)
    busy.end("a")
    group.run(60.0, *vms)
    assert all(vm.client.statuses["b"].has_slot for vm in vms)


# --- statuses


def test_a_status_loses_its_permission_when_the_stage_changes() -> None:
    group = Group()
    vms = [Vm(group, name).started() for name in BOTH]
    assert vms[0].want("requested", names=BOTH).has_slot
    vms[0].way.faults = ["unavailable"] * 3
    assert not vms[0].want("not_ready", names=BOTH).has_slot
    group.run(5.0, vms[0])
    vms[0].way.faults = []
    group.run(60.0, vms[0])
    vms[1].want("ready", names=BOTH)
    assert vms[0].want("ready", names=BOTH).is_all_ready
    vms[0].way.faults = ["unavailable"]
    assert not vms[0].want("not_ready", names=BOTH).is_all_ready
    vms[0].end()
    assert vms[0].client.statuses == {}


def test_a_failure_keeps_the_age_of_the_list_before_it() -> None:
    group = Group()
    vm = Vm(group).started()
    assert vm.want("requested").has_slot
    vm.way.faults = ["unavailable"]
    group.now += 5.0
    assert vm.sync().has_slot
    assert vm.client.listed_at == group.now - 5.0  # and the engine heeds it for 10 s


# --- failures


def pauses(vm: Vm, times: int) -> list[float]:
    """While nothing can be reached."""
    found = []
    for _ in range(times):
        vm.way.faults = ["unavailable"]
        vm.sync()
        assert vm.client.next_sync_at is not None
        found.append(vm.client.next_sync_at - vm.group.now)
        vm.group.now = vm.client.next_sync_at
    return found


def test_after_failures_the_pause_grows_to_half_a_minute() -> None:
    found = pauses(Vm(Group()), 8)
    for pause, most in zip(found, (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0), strict=True):
        assert most / 2 <= pause <= most
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("asked", "least"), [(60.0, 60.0), (300.0, 300.0), (86_400.0, 300.0)])
def test_the_backend_may_ask_for_a_pause_of_five_minutes(asked: float, least: float) -> None:
    vm = Vm(Group())
    vm.way.retry_after = asked
    (pause,) = pauses(vm, 1)
    assert least <= pause <= min(1.1 * least, 300.0)  # not all VMs at once


def test_nothing_is_sent_during_a_pause() -> None:
    vm = Vm(Group())
    vm.way.faults = ["unavailable"]
    vm.sync()
    at = vm.client.next_sync_at
    vm.want("not_ready")
    assert vm.way.calls == ["list"]
    assert vm.client.next_sync_at == at


def test_it_reports_since_when_the_backend_is_unavailable() -> None:
    group = Group()
    vm = Vm(group)
    pauses(vm, 3)
    assert vm.client.failures == 3
    assert vm.client.error is not None
    assert vm.client.error.kind == "timeout"
    assert vm.client.unavailable_from == 1000.0
    vm.sync()
    client: Any = vm.client
    assert (client.failures, client.error, client.unavailable_from) == (0, None, None)


# --- requests that are lost, late or doubled


def settle(vm: Vm, seconds: float = 300.0) -> None:
    """Requests that are under way arrive, and the VM asks as it wants to."""
    for call in vm.way.later:
        call()
    vm.group.run(seconds, vm)


def test_a_write_whose_answer_was_lost_is_written_again() -> None:
    group = Group()
    vm = Vm(group).started()
    vm.way.faults = ["", "lost"]
    assert not vm.want("requested").has_slot
    group.run(1.1, vm)
    assert vm.client.statuses["a"].has_slot
    assert vm.take_calls() == ["list", "create", "list", "update", "list"]


def test_a_late_ready_does_not_undo_a_hold() -> None:
    group = Group()
    vms = [Vm(group, name, max_events=None).started() for name in BOTH]
    vms[0].want("not_ready", names=BOTH)
    vms[0].way.faults = ["late"]
    vms[0].want("ready", names=BOTH)
    vms[0].want("not_ready", names=BOTH)
    group.run(5.0, vms[0])
    settle(vms[0], 5.0)
    assert group.states() == ["a web_0 not_ready"]
    assert vms[1].want("ready", names=BOTH).not_ready == ("web_0",)


def test_a_late_ready_is_written_over_when_it_comes_first() -> None:
    group = Group()
    vm = Vm(group, max_events=None).started()
    vm.want("not_ready", names=BOTH)
    vm.way.faults = ["late"]
    vm.want("ready", names=BOTH)
    vm.requests.clear()
    vm.want("not_ready", names=BOTH)
    settle(vm)
    assert group.states() == ["a web_0 not_ready"]


@pytest.mark.parametrize("fault", ["late", "doubled", "lost"])
def test_records_of_late_requests_are_deleted(fault: str) -> None:
    """Also a create that comes once more after the record was deleted."""
    group = Group()
    vm = Vm(group).started()
    vm.way.faults = [fault]
    vm.want("not_ready")
    vm.end()
    group.run(30.0, vm)
    assert group.states() == []
    for call in vm.way.later:
        call()
    assert bool(group.states()) == (fault != "lost")
    group.run(300.0, vm)
    assert group.states() == []
    assert vm.client.next_sync_at is None


def test_a_rejected_create_that_arrives_later_is_deleted() -> None:
    """It found the record of another VM of this name, which is gone when it comes again."""
    group = Group()
    other = Vm(group, "web_0", "id-0").started()
    vm = Vm(group, "web_0", "id-1").started()
    other.want("not_ready")
    vm.way.faults = ["doubled"]
    vm.want("not_ready")
    vm.end()
    other.end()
    (call,) = vm.way.later
    call()
    assert group.states() == ["a web_0 not_ready"]
    group.run(300.0, vm)
    assert group.states() == []
    assert vm.client.next_sync_at is None


def test_a_late_delete_keeps_the_record_of_an_event_that_reappeared() -> None:
    group = Group()
    vm = Vm(group).started()
    vm.want("not_ready")
    vm.way.faults = ["late"]
    vm.end()
    vm.want("not_ready", workflow_id="a@2")
    group.run(5.0, vm)
    settle(vm)
    assert group.states() == ["a web_0 not_ready"]


@pytest.mark.parametrize("stage", ["not_ready", "ready"])
def test_an_own_record_that_is_gone_is_written_again(stage: str) -> None:
    group = Group()
    vm = Vm(group).started()
    vm.want(stage, names=BOTH)
    (record,) = group.store.list()
    group.store.delete(record.key, record.etag)
    group.run(61.0, vm)
    assert group.states() == [f"a web_0 {stage}"]


# --- waits


def test_each_wait_is_reported_once_when_it_ends() -> None:
    group = Group()
    first, vm = Vm(group, "first").started(), Vm(group).started()
    first.want("requested", "b")
    first.want("not_ready", "b")
    vm.want("requested", names=BOTH)
    group.run(100.0, vm)
    first.end("b")
    group.run(20.0, vm)
    vm.want("not_ready", names=BOTH)
    ((what, seconds),) = vm.waited
    assert what == "slot"
    assert 100.0 <= seconds <= 111.0
    vm.want("ready", names=BOTH)
    group.run(50.0, vm)
    Vm(group, "web_1").started().want("ready", names=BOTH)
    group.run(60.0, vm)
    assert [what for what, _ in vm.waited] == ["slot", "ready"]
    assert 50.0 <= vm.waited[1][1] <= 70.0


def test_a_wait_of_a_removed_event_is_not_reported_as_ended() -> None:
    group = Group()
    vm = Vm(group).started()
    Vm(group, "first").started().want("not_ready", "b")
    vm.want("requested")
    vm.end()
    assert vm.waited == []


def test_a_ready_vm_names_the_vms_that_are_not_ready() -> None:
    group = Group()
    names = tuple(f"web_{number}" for number in range(6))
    vm = Vm(group, max_events=None).started()
    vm.want("not_ready", names=names)
    vm.want("ready", names=names)
    group.run(60.0, vm)
    (record,) = group.store.list()
    assert record.fields["waits_for"] == "web_1, web_2, web_3 and 2 more"


# --- restarts, clocks, names


def test_after_a_restart_records_and_statuses_are_the_same_within_25_s() -> None:
    group = Group()
    vms = [Vm(group, f"web_{number}", max_events=2).started() for number in range(5)]
    for vm in vms[:2]:
        vm.want("ready", names=BOTH)
    vms[2].want("requested", "b")
    vms[3].want("requested", "c", not_before=START)
    vms[4].want("not_ready", "d")
    group.run(90.0, *vms)
    states = group.states()
    statuses = [vm.client.statuses for vm in vms]
    assert statuses[1]["a"].is_all_ready
    assert statuses[2]["b"].position == 2
    for vm in vms:
        vm.restart()
        vm.requests = {event: replace(one, seen_at=group.now) for event, one in vm.requests.items()}
        vm.client.sync(vm.requests.values())
    group.run(25.0, *vms)
    assert group.states() == states
    assert [vm.client.statuses for vm in vms[:4]] == statuses[:4]  # of the last one nothing is asked


def test_two_vms_of_one_name_leave_each_other_alone() -> None:
    group = Group()
    vms = [Vm(group, "web_0", f"id-{number}").started() for number in range(2)]
    vms[0].want("requested")
    status = vms[1].want("requested")
    assert status.other_vm_id == "id-0"
    assert not status.has_slot
    vms[1].take_calls()
    group.run(600.0, *vms)
    assert len(vms[1].way.calls) <= 16 * 10  # as much as the first in line
    (record,) = group.store.list()
    assert record.fields["vm_id"] == "id-0"
    assert vms[1].client.statuses["a"].other_vm_id == "id-0"


def test_a_vm_that_has_died_leaves_its_name_to_the_one_that_replaces_it() -> None:
    group = Group()
    vms = [Vm(group, "web_0", f"id-{number}").started() for number in range(2)]
    vms[0].want("requested")
    vms[1].want("requested")
    group.run(70.0, vms[1])
    (record,) = group.store.list()
    assert record.fields["vm_id"] == "id-1"
    assert vms[1].client.statuses["a"].has_slot


@pytest.mark.parametrize("module", [client_module, plan_module])
def test_no_wall_clock_is_read(module: Any) -> None:
    tree = ast.parse(inspect.getsource(module))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    imported = {name.name for node in imports for name in node.names}
    assert not names & {"now", "utcnow", "today", "time", "time_ns", "monotonic", "perf_counter"}
    assert not imported & {"time", "date"}


def test_a_claim_that_was_allowed_to_begin_ignores_a_late_one() -> None:
    """The engine acts on a list for ten seconds, and its disk may be slow."""
    group = Group()
    first, late = Vm(group, "web_0").started(), Vm(group, "web_1").started()

    def while_the_claim_hangs(call: str) -> None:
        if call == "create":
            late.way.before = lambda _: None
            group.now += 1.0
            assert first.want("requested", "a").has_slot
            group.now += 4.0

    late.way.before = while_the_claim_hangs
    earlier = START + timedelta(minutes=5)
    assert not late.want("requested", "b", not_before=earlier).has_slot
    group.now += 1.0
    first.client.sync(first.requests.values())
    assert group.states() == ["a web_0 claimed", "b web_1 claimed"]
    assert not late.want("requested", "b", not_before=earlier).has_slot
    first.want("not_ready", "a")
    assert not late.want("requested", "b", not_before=earlier).has_slot
    first.end()
    assert late.want("requested", "b", not_before=earlier).has_slot


def test_an_unused_claim_is_given_up_after_a_minute() -> None:
    group = Group()
    first, late = Vm(group, "web_0").started(), Vm(group, "web_1").started()
    assert first.want("requested", "a").has_slot
    earlier = START + timedelta(minutes=5)
    late.way.faults = ["", "", "unavailable"]
    late.want("requested", "b", not_before=earlier)
    group.now += 70.0
    late.client.sync(late.requests.values())
    assert group.states() == ["a web_0 claimed", "b web_1 requested"]


def test_late_records_of_an_earlier_client_are_found() -> None:
    group = Group()
    vm = Vm(group)
    vm.way.faults = ["", "late"]
    vm.client.sync(())
    vm.want("not_ready")
    (create,) = vm.way.later
    client = FleetClient(
        Way(group.store),
        vm_id="id-web_0",
        max_events=1,
        random=Random(1),
        monotonic=lambda: group.now,
        looks_again=True,
    )
    client.sync(())
    create()
    assert group.states() == ["a web_0 not_ready"]
    assert client.next_sync_at is not None
    group.now = client.next_sync_at
    client.sync(())
    assert group.states() == []
