"""The fleet's protocol, one behaviour at a time, on a ledger in memory and a clock that the test moves."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from scheduled_events_agent.fleet.ledger import LedgerError, Row
from scheduled_events_agent.fleet.memory import MemoryLedger
from scheduled_events_agent.fleet.protocol import Fleet
from scheduled_events_agent.fleet.rows import event_key_of, key_of, resources_of, time_of
from scheduled_events_agent.workflow import Standing, Wish

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class Vm:
    """One VM: its protocol, and what its workflow wishes."""

    def __init__(self, name: str, ledger: MemoryLedger, max_events: int | None = 1, **options: Any) -> None:
        self.name = name
        self._options = {"max_events": max_events, "expect": ("*",), **options}
        self._ledger = ledger
        self.wishes: dict[str, Wish] = {}
        self.waited: list[tuple[str, float]] = []
        self.restart()

    def restart(self) -> None:
        self.fleet = Fleet(
            self._ledger,
            group="web",
            vm_id=f"id-{self.name}",
            random=Random(self.name),
            waited=lambda what, seconds: self.waited.append((what, seconds)),
            **self._options,
        )

    def wish(self, stage: str, event: str = "a", names: tuple[str, ...] = (), **changes: Any) -> None:
        fields: dict[str, Any] = {
            "event": event,
            "workflow": f"{event}@1",
            "event_id": event.upper(),
            "resources": names or (self.name,),
            "not_before": START + 15 * MINUTE,
            "own": self.name,
            "expected": names or (self.name,),
            "needs_slot": self._options["max_events"] is not None,
            "needs_all": len(names) > 1,
            "stage": stage,
        }
        self.wishes[event] = Wish(**{**fields, **changes})

    def end(self, event: str = "a") -> None:
        del self.wishes[event]

    def visit(self, now: datetime = START) -> dict[str, Standing]:
        return self.fleet.visit(self.wishes.values(), (self.name,), now)

    def standing(self, now: datetime = START, event: str = "a") -> Standing:
        return self.visit(now)[event]


def slots(ledger: MemoryLedger) -> list[str]:
    return [row.content["event"] for row in sorted(ledger.rows().get("slot|web", []))]


def a_fault(*faults: str, call: str = "") -> Callable[[str], str]:
    """These faults for the next calls (of that name), then none."""
    left = list(faults)
    return lambda name: left.pop(0) if left and call in ("", name) else ""


A, B, C = map(event_key_of, "abc")


# --- leave to begin


def test_an_event_takes_the_lowest_free_slot() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger, max_events=3)
    vm.wish("begin")
    assert vm.standing().has_slot
    assert slots(ledger) == [A]
    assert ledger.rows()["slot|web"][0].key == "000"


def test_the_slot_belongs_to_the_event_not_to_the_vm() -> None:
    ledger = MemoryLedger()
    names = tuple(f"web_{number}" for number in range(5))
    vms = [Vm(name, ledger) for name in names]
    for vm in vms:
        vm.wish("begin", names=names)
    assert all(vm.standing().has_slot for vm in vms)
    assert slots(ledger) == [A]


def test_a_further_event_waits_and_says_for_which() -> None:
    ledger = MemoryLedger()
    first, second = Vm("web_1", ledger), Vm("web_2", ledger)
    first.wish("begin", event_id="602D9444-D2CD-49C7-8624-8643E7171297")
    second.wish("begin", "b")
    assert first.standing().has_slot
    standing = second.standing(event="b")
    assert not standing.has_slot
    assert standing.holder == "event 602D9444 of web_1, until 08:30Z"


def test_it_asks_again_after_5_to_15_seconds() -> None:
    ledger = MemoryLedger()
    first = Vm("web_1", ledger)
    first.wish("begin")
    first.visit()
    pauses = set()
    for number in range(50):
        vm = Vm(f"other_{number}", ledger)
        vm.wish("begin", "b")
        vm.visit()
        at = vm.fleet.next_at(START)
        assert at is not None
        pauses.add(at - START)
    assert timedelta(seconds=5) <= min(pauses) < timedelta(seconds=7)
    assert timedelta(seconds=13) < max(pauses) <= timedelta(seconds=15)


def test_each_vm_goes_by_its_own_limit() -> None:
    ledger = MemoryLedger()
    vms = [Vm(f"web_{number}", ledger, max_events=limit) for number, limit in enumerate((1, 1, 2))]
    for vm in vms:
        vm.wish("begin", vm.name)
        vm.visit()
    assert [vm.standing(event=vm.name).has_slot for vm in vms] == [True, False, True]


def test_without_events_it_asks_twice_when_it_starts_and_then_never() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    for hours in range(48):
        vm.visit(START + timedelta(hours=hours))
        assert vm.fleet.next_at(START + timedelta(hours=hours)) is None
    assert ledger.calls == 2


def test_between_two_tries_it_asks_nothing() -> None:
    ledger = MemoryLedger()
    first, second = Vm("web_1", ledger), Vm("web_2", ledger)
    first.wish("begin")
    second.wish("begin", "b")
    first.visit()
    second.visit()
    calls = ledger.calls
    second.visit(START + timedelta(seconds=1))
    first.visit(START + timedelta(seconds=1))
    assert ledger.calls == calls


def test_a_slot_whose_write_had_no_answer_counts_as_held() -> None:
    ledger = MemoryLedger(a_fault("lost", call="put_if_unchanged"))
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    assert not vm.standing().has_slot
    assert vm.fleet.failure == "the answer was lost"
    assert vm.standing(START + MINUTE).has_slot
    assert vm.fleet.failure == ""
    assert slots(ledger) == [A]


def test_of_two_slots_of_one_event_the_lower_stays() -> None:
    ledger = MemoryLedger()
    until = (START + MINUTE).isoformat()
    for key in ("000", "002"):
        ledger.put("slot|web", key, {"event": A, "until": until})
    vm = Vm("web_1", ledger, max_events=3)
    vm.wish("begin")
    assert vm.standing().has_slot
    assert slots(ledger) == [A, ""]


def test_vms_that_list_stale_rows_take_no_slot_twice() -> None:
    chance = Random(7)
    ledger = MemoryLedger(lambda call: "stale" if call == "list_rows" and chance.random() < 0.5 else "")
    vms = [Vm(f"web_{number}", ledger, max_events=2) for number in range(6)]
    for index, vm in enumerate(vms):
        vm.wish("begin", f"event-{index}")
    for second in range(0, 100, 20):
        for vm in vms:
            vm.visit(START + timedelta(seconds=second))
    held = [vm for vm in vms if any(standing.has_slot for standing in vm.visit(START + 2 * MINUTE).values())]
    assert len(held) == 2


def test_there_are_never_more_slots_than_the_limit() -> None:
    ledger = MemoryLedger()
    vms = [Vm(f"web_{number}", ledger, max_events=3) for number in range(10)]
    for index, vm in enumerate(vms):
        vm.wish("begin", f"event-{index}")
        vm.visit()
    assert len(slots(ledger)) == 3


def test_a_lower_limit_counts_the_slots_above_it_too() -> None:
    ledger = MemoryLedger()
    many = Vm("web_1", ledger, max_events=3)
    for event in "abc":
        many.wish("begin", event)
    many.visit()
    few = Vm("web_2", ledger, max_events=1)
    few.wish("begin", "d")
    many.end("a")
    many.visit()
    assert slots(ledger) == ["", B, C]
    assert not few.standing(event="d").has_slot


# --- readiness


def test_it_writes_that_it_is_ready_before_it_looks() -> None:
    calls: list[str] = []

    def listen(call: str) -> str:
        calls.append(call)
        return ""

    vm = Vm("web_1", MemoryLedger(listen), max_events=None)
    vm.wish("idle", names=("web_1", "web_2"))
    vm.visit()
    calls.clear()
    vm.wish("ready", names=("web_1", "web_2"))
    vm.visit()
    assert calls.index("put") < calls.index("list_rows")


def test_the_last_to_write_sees_all() -> None:
    ledger = MemoryLedger()
    names = tuple(f"web_{number}" for number in range(5))
    vms = [Vm(name, ledger, max_events=None) for name in names]
    for vm in vms:
        vm.wish("ready", names=names)
    seen = [vm.standing().ready for vm in vms]
    assert seen[-1] == frozenset(names)
    assert not any(ready >= frozenset(names) for ready in seen[:-1])


def test_the_first_two_look_again_every_5_s_and_the_others_rarely() -> None:
    ledger = MemoryLedger()
    names = tuple(f"web_{number}" for number in range(5))
    vms = [Vm(name, ledger, max_events=None) for name in names]
    for vm in vms[:-1]:
        vm.wish("ready", names=names)
        vm.visit()
    times = [vm.fleet.next_at(START) for vm in vms[:-1]]
    seconds = [(at - START).total_seconds() for at in times if at]
    assert all(4 <= one <= 6 for one in seconds[:2])
    assert len(seconds) == 4
    assert all(65 <= one <= 130 for one in seconds[2:])


def test_one_that_dies_between_write_and_look_stops_nothing() -> None:
    names = ("web_0", "web_1", "web_2")
    ledger = MemoryLedger()
    vms = [Vm(name, ledger, max_events=None) for name in names]
    for vm in vms[:-1]:
        vm.wish("ready", names=names)
        vm.visit()
    vms[-1].visit()
    vms[-1].wish("ready", names=names)
    ledger.fault = a_fault("away", call="list_rows")
    assert vms[-1].standing().ready == frozenset()
    later = START + timedelta(seconds=6)
    assert vms[0].standing(later).ready == frozenset(names)
    assert vms[1].standing(later).ready == frozenset(names)


def test_resources_that_grow_are_looked_at_again() -> None:
    ledger = MemoryLedger()
    vms = [Vm(f"web_{number}", ledger, max_events=None) for number in range(4)]
    names = tuple(vm.name for vm in vms)
    for vm in vms[:3]:
        vm.wish("ready", names=names[:3])
        vm.visit()
    vms[3].wish("ready", names=names)
    vms[3].visit()
    vms[2].wish("ready", names=names)
    assert vms[2].standing().ready == frozenset(names)


def test_a_readiness_that_is_withdrawn_is_written_over() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger, max_events=None), Vm("web_2", ledger, max_events=None)
    one.wish("ready", names=names)
    one.visit()
    one.wish("busy", names=names)
    assert one.standing().ready == frozenset()
    other.wish("ready", names=names)
    assert other.standing().ready == {"web_2"}


def two_that_are_ready(ledger: MemoryLedger, count: int = 2) -> list[Vm]:
    names = tuple(f"web_{number}" for number in range(1, count + 1))
    vms = [Vm(name, ledger, max_events=None) for name in names]
    for vm in vms:
        vm.wish("ready", names=names)
        vm.visit()
    return vms


def test_until_the_approval_is_taken_every_vm_looks_whether_another_has_withdrawn() -> None:
    ledger = MemoryLedger()
    vms = two_that_are_ready(ledger, 3)
    last = vms[-1]
    assert last.standing().ready == {"web_1", "web_2", "web_3"}
    vms[1].wish("busy", names=("web_1", "web_2", "web_3"))
    vms[1].visit()
    at = last.fleet.next_at(START)
    assert at is not None
    assert last.standing(at).ready == {"web_1", "web_3"}


def test_its_own_row_that_another_has_deleted_is_written_again() -> None:
    ledger = MemoryLedger()
    vm = two_that_are_ready(ledger)[0]
    ledger.put("vm|web", f"{A}|web_1", None)
    now = START
    for _ in range(2):
        now = vm.fleet.next_at(now) or now
        vm.visit(now)
    assert [row.key for row in ledger.list_rows("vm|web")] == [f"{A}|web_1", f"{A}|web_2"]


def test_an_event_that_comes_back_begins_anew() -> None:
    ledger = MemoryLedger()
    one, other = two_that_are_ready(ledger)
    one.wish("ready", names=("web_1", "web_2"))
    other.wishes["a"] = replace(other.wishes["a"], workflow="a@2", stage="busy")
    assert other.standing() == Standing(workflow="a@2")
    assert one.standing(START + MINUTE).ready == {"web_1"}


def test_a_vm_that_was_ready_before_the_event_was_gone_does_not_count() -> None:
    ledger = MemoryLedger()
    one, other = two_that_are_ready(ledger)  # and then the first one cannot reach the ledger
    names = ("web_1", "web_2")
    other.wish("gone", names=names)
    other.visit(START + MINUTE)
    other.end()
    other.visit(START + 2 * MINUTE)
    other.wish("ready", names=names, workflow="a@2")
    assert other.standing(START + 3 * MINUTE).ready == {"web_2"}
    other.restart()
    other.wish("ready", names=names, workflow="a@2")
    assert other.standing(START + 4 * MINUTE).ready == {"web_2"}
    one.wish("ready", names=names, workflow="a@2")
    assert one.standing(START + 5 * MINUTE).ready == {"web_1", "web_2"}


def test_it_does_not_count_either_for_a_vm_that_had_not_begun() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger, max_events=None), Vm("web_2", ledger, max_events=None)
    one.wish("ready", names=names)
    one.visit()  # and then it cannot reach the ledger
    other.wish("idle", names=names)
    other.visit()
    other.end()
    other.visit(START + MINUTE)
    other.wish("ready", names=names, workflow="a@2")
    assert other.standing(START + 2 * MINUTE).ready == {"web_2"}


def test_it_does_not_count_either_for_a_vm_that_restarts_while_the_event_is_gone() -> None:
    ledger = MemoryLedger()
    other = two_that_are_ready(ledger)[1]
    names = ("web_1", "web_2")
    other.restart()
    other.wish("gone", names=names)
    other.visit(START + MINUTE)
    other.wish("ready", names=names, workflow="a@2")
    assert other.standing(START + 2 * MINUTE).ready == {"web_2"}


def test_a_clock_that_was_ahead_when_the_event_was_gone_stops_nothing() -> None:
    ledger = MemoryLedger()
    one, other = two_that_are_ready(ledger)
    names = ("web_1", "web_2")
    for stage, now, workflow in (("gone", START + 60 * MINUTE, "a@1"), ("ready", START + MINUTE, "a@2")):
        other.wish(stage, names=names, workflow=workflow)
        other.visit(now)
    one.wish("ready", names=names, workflow="a@2")
    assert one.standing(START + 2 * MINUTE).ready == {"web_1", "web_2"}


def test_a_vm_that_has_not_seen_the_event_gone_says_again_that_it_is_ready() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = two_that_are_ready(ledger)
    other.wish("gone", names=names)
    other.visit(START + MINUTE)
    other.wish("ready", names=names, workflow="a@2")
    assert other.standing(START + 2 * MINUTE).ready == {"web_2"}
    assert one.standing(START + 2 * MINUTE).ready == {"web_2"}
    assert one.standing(START + 3 * MINUTE).ready == {"web_1", "web_2"}


def test_it_says_so_within_two_minutes_also_if_it_is_not_one_of_the_first_two() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2", "web_3")
    *others, last = [Vm(name, ledger, max_events=None) for name in names]
    last.wish("ready", names=names)
    last.visit()
    for vm in others:
        vm.wish("busy", names=names)
        vm.visit()
        vm.wish("gone", names=names)
        vm.visit(START + timedelta(seconds=10))
        vm.wish("ready", names=names, workflow="a@2")
        vm.visit(START + timedelta(seconds=20))
    last.visit(START + timedelta(seconds=130))
    last.visit(START + timedelta(seconds=131))
    assert others[0].standing(START + timedelta(seconds=132)).ready == frozenset(names)


def test_a_slot_that_is_not_needed_any_more_is_not_asked_for() -> None:
    ledger = MemoryLedger()
    first, second = Vm("web_1", ledger), Vm("web_2", ledger)
    first.wish("begin")
    first.visit()
    second.wish("begin", "b")
    second.visit()
    for vm, event in ((first, "a"), (second, "b")):
        vm.wish("busy", event, needs_slot=False)
        vm.visit(START + MINUTE)
        assert vm.fleet.next_at(START + MINUTE) is None
    first.end()
    first.visit(START + MINUTE)
    assert slots(ledger) == [""]


def test_a_failed_write_counts_as_not_ready() -> None:
    ledger = MemoryLedger(a_fault("away", call="put"))
    vm = Vm("web_1", ledger, max_events=None)
    vm.wish("ready", names=("web_1", "web_2"))
    assert vm.standing().ready == frozenset()
    assert vm.standing(START + MINUTE).ready == {"web_1"}


def test_after_a_restart_it_is_not_ready_until_it_says_so_again() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger, max_events=None), Vm("web_2", ledger, max_events=None)
    one.wish("ready", names=names)
    one.visit()
    one.restart()
    one.wish("busy", names=names)
    one.visit()
    other.wish("ready", names=names)
    assert other.standing().ready == {"web_2"}


def test_it_counts_the_vms_that_it_waits_for() -> None:
    vm = Vm("web_1", MemoryLedger(), max_events=None)
    vm.wish("ready", names=("web_1", "web_2", "web_3"))
    vm.visit()
    assert vm.fleet.awaited() == 2


def test_a_hundred_vms_need_two_requests_each_and_a_few_more() -> None:
    ledger = MemoryLedger()
    names = tuple(f"web_{number}" for number in range(100))
    vms = [Vm(name, ledger, max_events=None) for name in names]
    for vm in vms:
        vm.visit()  # both of its looks back
    calls = ledger.calls
    for vm in vms:
        vm.wish("ready", names=names)
        vm.visit()
    assert ledger.calls - calls == 200


# --- the end


def test_an_event_of_one_vm_frees_its_slot_at_its_end() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.end()
    vm.visit()
    assert slots(ledger) == [""]
    assert ledger.rows().keys() == {"slot|web"}


def test_the_last_that_is_back_frees_the_slot_and_clears_away() -> None:
    ledger = MemoryLedger()
    names = tuple(f"web_{number}" for number in range(3))
    vms = [Vm(name, ledger) for name in names]
    for stage in ("begin", "ready", "away"):
        for vm in vms:
            vm.wish(stage, names=names)
            vm.visit()
    for vm in vms[:-1]:
        vm.end()
        vm.visit()
        assert slots(ledger) == [A]
    vms[-1].end()
    vms[-1].visit()
    assert slots(ledger) == [""]
    assert ledger.rows().keys() == {"slot|web"}


def test_of_two_that_are_last_the_one_that_frees_the_slot_clears_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger()
    deleted: list[str] = []
    put_if_unchanged = ledger.put_if_unchanged

    def put(partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        deleted.extend([key] if content is None else [])
        return put_if_unchanged(partition, key, content, version)

    def overtake(call: str) -> str:
        """When the first one has seen that both are back, before it looks for the slot."""
        calls.append(call)
        if calls == ["put", "list_rows", "list_rows"]:
            other.visit(START + MINUTE)
        return ""

    monkeypatch.setattr(ledger, "put_if_unchanged", put)
    one, other = (Vm(name, ledger) for name in ("web_1", "web_2"))
    for stage in ("begin", "ready", "away"):
        for vm in (one, other):
            vm.wish(stage, names=("web_1", "web_2"))
            vm.visit()
    one.end()
    other.end()
    ledger.fault = a_fault("away", call="list_rows")
    other.visit()
    calls: list[str] = []
    ledger.fault = overtake
    one.visit(START + MINUTE)
    assert sorted(deleted) == [f"{A}|web_1", f"{A}|web_2"]
    assert (slots(ledger), [*ledger.rows()]) == ([""], ["slot|web"])


def test_a_vm_that_never_began_comes_back_too() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger), Vm("web_2", ledger)
    one.wish("begin", names=names)
    other.wish("idle", names=names)
    for vm in (one, other):
        vm.visit()
        vm.end()
        vm.visit()
    assert slots(ledger) == [""]


def test_it_goes_back_as_long_as_that_was_not_written() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.end()
    ledger.fault = lambda _: "away"
    now = START
    for _ in range(10):
        vm.visit(now)
        now = vm.fleet.next_at(now) or now
    ledger.fault = lambda _: ""
    vm.visit(now)
    assert slots(ledger) == [""]


def test_an_event_that_is_held_before_it_begins_gives_its_slot_back() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.wish("idle")
    assert vm.visit() == {}
    assert slots(ledger) == [""]
    vm.wish("begin")
    assert vm.standing().has_slot


def test_a_vm_that_lives_keeps_its_slot() -> None:
    ledger = MemoryLedger()
    vm, other = Vm("web_1", ledger), Vm("web_2", ledger)
    vm.wish("begin")
    vm.visit()
    vm.wish("away")
    other.wish("begin", "b", not_before=START + 10 * 60 * MINUTE)
    now = START
    while now < START + 5 * 60 * MINUTE:
        assert vm.standing(now).has_slot
        assert not other.standing(now, "b").has_slot
        now += MINUTE
    assert ledger.calls < 60 * 5 * 2 * 2


def test_the_slot_of_a_dead_vm_is_free_after_30_minutes() -> None:
    ledger = MemoryLedger()
    dead, other = Vm("web_1", ledger), Vm("web_2", ledger)
    dead.wish("begin")
    dead.visit()
    other.wish("begin", "b", not_before=START + 10 * 60 * MINUTE)
    assert not other.standing(START + 29 * MINUTE, "b").has_slot
    assert other.standing(START + 31 * MINUTE, "b").has_slot
    assert slots(ledger) == [B]


def test_rows_of_old_events_are_deleted_by_age() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    dead, vm = Vm("web_1", ledger), Vm("web_3", ledger)
    dead.wish("ready", names=names)
    dead.visit()
    for days, rows in ((0, {"vm|web", "slot|web"}), (2, {"slot|web"})):
        now = START + timedelta(days=days)
        vm.wish("begin", "b", not_before=now + MINUTE)
        vm.visit(now)
        vm.end("b")
        vm.visit(now)
        assert ledger.rows().keys() == rows


def is_found_by_a_later_event(ledger: MemoryLedger) -> bool:
    """Two days later, another VM has an event, and deletes what is left."""
    vm, now = Vm("web_9", ledger), START + timedelta(days=2)
    vm.wish("begin", "later", not_before=now + MINUTE)
    vm.visit(now)
    vm.end("later")
    vm.visit(now)
    return ledger.rows().keys() == {"slot|web"}


@pytest.mark.parametrize("meets", range(1, 8))
@pytest.mark.parametrize("dies", range(1, 8))
def test_a_row_that_is_written_while_another_vm_deletes_is_found(meets: int, dies: int) -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger), Vm("web_2", ledger)
    for stage in ("begin", "ready", "away"):
        for vm in (one, other):
            vm.wish(stage, names=names)
            vm.visit()
    for vm in (one, other):
        vm.end()
    one.visit()
    one.restart()
    calls = 0

    def fault(_: str) -> str:
        nonlocal calls
        calls += 1
        if calls == meets:
            ledger.fault = lambda _: ""
            other.visit()
            ledger.fault = fault
        return "lost" if calls == dies else ""

    ledger.fault = fault
    one.visit()  # the restarted one writes again that it is back, and dies
    ledger.fault = lambda _: ""
    other.visit()
    assert is_found_by_a_later_event(ledger)


def test_a_row_of_an_event_that_came_back_is_found_when_its_vms_have_died() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    vms = [Vm(name, ledger, max_events=None) for name in names]
    for vm in vms:
        vm.wish("begin", names=names)
        vm.visit()
        vm.end()
    for vm in vms:
        vm.visit()
    assert ledger.rows() == {}
    vms[0].wish("begin", names=names, workflow="a@2")
    vms[0].visit()
    ((row,),) = ledger.rows().values()
    assert row.content["state"] == "held"
    assert is_found_by_a_later_event(ledger)


def test_a_row_that_its_vm_has_written_again_is_not_deleted() -> None:
    ledger = MemoryLedger()
    one, other = two_that_are_ready(ledger)
    ledger.fault = lambda call: "away" if call == "put_if_unchanged" else ""
    for vm in (one, other):
        vm.end()
        vm.visit()
    one.wish("ready", names=("web_1", "web_2"), workflow="a@2")
    one.visit()
    ledger.fault = lambda _: ""
    other.visit(START + 10 * MINUTE)
    (row,) = ledger.list_rows("vm|web")
    assert (row.content["vm"], row.content["state"]) == ("web_1", "ready")


def test_after_a_restart_it_pays_what_it_owes() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.restart()
    vm.end()
    vm.visit()
    assert slots(ledger) == [""]


def test_a_row_that_it_writes_when_all_others_are_done_is_found_by_its_age() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger), Vm("web_2", ledger)
    for vm in (one, other):
        vm.wish("begin", names=names)
        vm.visit()
        vm.end()
    ledger.fault = a_fault("lost", call="put")
    one.visit()  # its row was written, and the answer was lost
    ledger.fault = lambda _: ""
    other.visit()
    assert ledger.rows().keys() == {"slot|web"}
    one.visit(START + MINUTE)
    assert ledger.rows().keys() == {"slot|web", "vm|web"}


def test_after_a_restart_it_leaves_the_slot_to_a_vm_that_joined_and_is_not_back() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, joined = Vm("web_1", ledger), Vm("web_2", ledger)
    one.wish("ready")
    one.visit()
    joined.wish("ready", names=names)
    joined.visit()
    one.restart()
    one.end()
    one.visit()
    assert slots(ledger) == [A]
    joined.end()
    joined.visit()
    assert slots(ledger) == [""]


def test_a_restart_in_the_middle_of_an_event_keeps_its_slot() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.restart()
    vm.wish("busy")
    assert vm.standing().has_slot
    assert slots(ledger) == [A]


def test_an_event_that_comes_again_does_not_count_as_back() -> None:
    ledger = MemoryLedger()
    names = ("web_1", "web_2")
    one, other = Vm("web_1", ledger), Vm("web_2", ledger)
    for vm in (one, other):
        vm.wish("begin", names=names)
        vm.visit()
    one.end()
    one.visit()
    one.wish("begin", names=names)
    one.visit()
    other.end()
    other.visit()
    assert slots(ledger) == [A]


def test_a_slot_that_is_written_meanwhile_is_freed_at_the_next_try() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.visit()  # it has looked back: no row of its own can be left from before
    vm.wish("begin")
    vm.visit()
    (row,) = ledger.rows()["slot|web"]
    ledger.put("slot|web", row.key, row.content)
    vm.end()
    ledger.fault = a_fault("stale", call="list_rows")
    vm.visit()
    assert slots(ledger) == [A]
    at = vm.fleet.next_at(START)
    assert at is not None
    vm.visit(at)
    assert slots(ledger) == [""]


def test_after_a_restart_an_event_that_is_not_begun_gives_its_slot_back() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.restart()
    vm.wish("idle")
    vm.visit()
    assert slots(ledger) == [""]


def test_without_a_name_it_does_not_look_back_yet() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.restart()
    vm.end()
    vm.fleet.visit((), (), START)
    vm.visit()
    assert slots(ledger) == [""]


def test_rows_that_cannot_be_deleted_stop_nothing_else() -> None:
    class Undeletable(MemoryLedger):
        def put(self, partition: str, key: str, content: Any) -> None:
            if content is None:
                raise LedgerError("may not delete", kind="denied")
            super().put(partition, key, content)

    vm = Vm("web_1", Undeletable())
    vm.wish("begin")
    vm.visit()
    vm.end()
    vm.wish("begin", "b")
    vm.visit(START + MINUTE)
    assert vm.fleet.failure == ""
    assert vm.standing(START + 2 * MINUTE, "b").has_slot


def test_the_rows_of_a_large_event_are_deleted_a_few_at_a_time() -> None:
    ledger = MemoryLedger()
    for number in range(100):
        ledger.put("vm|web", f"{A}|web_{number}", {"state": "back", "vm": f"web_{number}"})
    vm = Vm("web_0", ledger)
    vm.wish("away", names=tuple(f"web_{number}" for number in range(100)))
    vm.visit()
    vm.end()
    vm.visit()
    assert len(ledger.rows()["vm|web"]) == 80


def test_a_slot_names_each_vm_that_begins_for_it() -> None:
    ledger = MemoryLedger()
    one, joined = Vm("web_1", ledger), Vm("web_2", ledger)
    one.wish("begin")
    one.visit()
    joined.wish("begin", names=("web_1", "web_2"))
    assert joined.standing().has_slot
    (row,) = ledger.rows()["slot|web"]
    assert resources_of(row) == ("web_1", "web_2")


def test_a_vm_alone_leaves_the_slot_to_one_that_joined_without_its_knowledge() -> None:
    ledger = MemoryLedger()
    one, joined = Vm("web_1", ledger), Vm("web_2", ledger)
    one.visit()  # it has looked back: no row of its own can be left from before
    one.wish("begin")
    one.visit()
    joined.wish("begin", names=("web_1", "web_2"))
    joined.visit()
    one.end()
    one.visit()
    assert slots(ledger) == [A]
    at = one.fleet.next_at(START)
    assert at is not None
    one.visit(at)
    assert slots(ledger) == [A]
    joined.end()
    joined.visit(at)
    assert slots(ledger) == [""]


def test_a_slot_freed_by_hand_is_asked_for_again() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    ledger.put("slot|web", "000", {"event": ""})
    vm.wish("busy")
    later = START + 31 * MINUTE
    assert vm.standing(later).has_slot
    assert slots(ledger) == [A]


@pytest.mark.parametrize(("vms", "max_events", "requests"), [(1, 1, 6), (100, None, 504), (100, 1, 607)])
def test_what_an_event_costs_from_its_slot_to_its_end(vms: int, max_events: int | None, requests: int) -> None:
    ledger = MemoryLedger()
    names = tuple(f"web_{number}" for number in range(vms))
    fleet = [Vm(name, ledger, max_events=max_events) for name in names]
    for vm in fleet:
        vm.visit()  # both of its looks back
    calls = ledger.calls
    for stage in ("begin", "busy", "ready", "away"):
        for vm in fleet:
            vm.wish(stage, names=names)
            vm.visit()
    now = START
    for vm in fleet:
        vm.end()
        vm.visit()
    while at := fleet[-1].fleet.next_at(now):
        now = at
        fleet[-1].visit(now)
    assert ledger.rows().keys() <= {"slot|web"}
    assert ledger.calls - calls == requests


# --- a ledger that is away


def test_pauses_grow_to_half_a_minute_and_differ() -> None:
    ledger = MemoryLedger(lambda _: "away")
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    now, pauses = START, []
    for _ in range(12):
        vm.visit(now)
        at = vm.fleet.next_at(now)
        assert at is not None
        pauses.append((at - now).total_seconds())
        now = at
    assert pauses[0] <= 1
    assert all(15 <= pause <= 30 for pause in pauses[-4:])
    assert len(set(pauses[-4:])) == 4
    assert vm.fleet.away_since == START


def test_it_leaves_the_ledger_alone_as_long_as_that_asks() -> None:
    class Busy(MemoryLedger):
        def list_rows(self, *_: str) -> list[Row]:
            raise LedgerError("busy", kind="throttled", retry_after=100.0)

    vm = Vm("web_1", Busy())
    vm.wish("begin")
    vm.visit()
    at = vm.fleet.next_at(START)
    assert at is not None
    assert 100 <= (at - START).total_seconds() <= 150


def test_it_leaves_it_alone_for_5_minutes_at_most_whatever_it_asks() -> None:
    class Busy(MemoryLedger):
        def list_rows(self, *_: str) -> list[Row]:
            raise LedgerError("busy", kind="throttled", retry_after=2.5e11)

    vm = Vm("web_1", Busy())
    vm.wish("begin")
    vm.visit()
    at = vm.fleet.next_at(START)
    assert at is not None
    assert at <= START + 7.5 * MINUTE


def test_a_clock_that_is_set_back_does_not_stop_it() -> None:
    ledger = MemoryLedger()
    first, second = Vm("web_1", ledger), Vm("web_2", ledger)
    first.wish("begin")
    second.wish("begin", "b", not_before=START + 60 * MINUTE)
    first.visit()
    second.visit()
    first.end()
    first.visit()
    ledger.fault = a_fault("away")
    second.visit(START + MINUTE)
    assert second.standing(START - 60 * MINUTE, "b").has_slot
    assert second.fleet.failure == ""


def test_what_was_known_stays_known_while_it_is_away() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    ledger.fault = lambda _: "away"
    assert vm.standing(START + 40 * MINUTE).has_slot


def test_nobody_is_known_to_be_ready_while_it_is_away() -> None:
    ledger = MemoryLedger()
    vms = two_that_are_ready(ledger)
    ledger.fault = a_fault("away")
    assert vms[1].standing(START + MINUTE).ready == frozenset()
    assert vms[1].standing(START + 2 * MINUTE).ready == {"web_1", "web_2"}


def test_it_tells_how_long_an_event_has_waited() -> None:
    ledger = MemoryLedger()
    first, second = Vm("web_1", ledger), Vm("web_2", ledger)
    first.wish("begin")
    first.visit()
    second.wish("begin", "b")
    second.visit()
    first.end()
    first.visit()
    second.visit(START + MINUTE)
    second.visit(START + 2 * MINUTE)
    assert second.waited == [("slot", 60.0)]


def test_it_tells_how_long_a_vm_has_waited_for_one_that_approves() -> None:
    ledger, names = MemoryLedger(), ("web_1", "web_2", "web_3")
    first, second, third = (Vm(name, ledger, max_events=None) for name in names)
    for vm, seconds in ((third, 0), (first, 10), (second, 30)):
        vm.wish("ready", names=names)
        vm.visit(START + timedelta(seconds=seconds))
    for vm in (third, first, second):
        vm.wish("away", names=names)
        vm.visit(START + timedelta(seconds=40))
    assert [vm.waited for vm in (third, first, second)] == [[("ready", 40.0)], [("ready", 30.0)], [("ready", 0.0)]]


# --- rows


@pytest.mark.parametrize(
    ("text", "key"), [("Web_1", "web_1"), ("a.b-c", "a.b-c"), ("", None), ("a/b", None), ("x" * 81, None)]
)
def test_keys_have_only_what_azure_allows(text: str, key: str | None) -> None:
    assert key_of(text) == (key or key_of(text))
    assert len(key_of(text)) == (len(key) if key else 64)
    assert len(event_key_of(text)) == 32


def test_rows_that_others_have_spoilt_count_as_free() -> None:
    row = Row("000", {"event": "x", "until": "tomorrow", "resources": "[1"}, "1")
    assert time_of(row, "until") < START
    assert resources_of(row) == ()
    assert resources_of(replace_content(row, resources=json.dumps(["web_1", 2]))) == ("web_1",)
    ledger = MemoryLedger()
    ledger.put("slot|web", "000", row.content)
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    assert vm.standing().has_slot


@pytest.mark.parametrize("until", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", ""])
def test_a_time_that_nothing_can_be_added_to_is_long_ago(until: str) -> None:
    assert time_of(Row("000", {"until": until}, "1"), "until") < START


def test_more_names_than_a_row_can_hold_are_cut() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish(
        "begin", names=tuple(f"virtual-machine-number_{number}" for number in range(2000)), expected=("web_1",)
    )
    vm.visit()
    (row,) = ledger.rows()["slot|web"]
    assert len(row.content["resources"]) <= 30_000
    assert "web_1" in resources_of(row)


def replace_content(row: Row, **content: str) -> Row:
    return row._replace(content={**row.content, **content})


def test_a_wish_of_an_event_under_a_new_id_keeps_its_rows() -> None:
    ledger = MemoryLedger()
    vm = Vm("web_1", ledger)
    vm.wish("begin")
    vm.visit()
    vm.wishes["a"] = replace(vm.wishes["a"], event_id="NEW")
    assert vm.standing(START + MINUTE).has_slot
    assert slots(ledger) == [A]
