"""Writes of a VM after it has read its group's records: one rule at a time, and what holds for any list.

What must hold for any list is not asked of the code: ages, slots and readiness are computed here once more,
from the records as they are.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace as changed

from scheduled_events_agent.fleet import backend as backend_module
from scheduled_events_agent.fleet import plan as module
from scheduled_events_agent.fleet.backend import Record, plain_key
from scheduled_events_agent.fleet.plan import Plan, SlotState, Write, plan, record_key, waits_for_text
from scheduled_events_agent.workflow import FleetEventStatus, FleetRequest

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
NOW = 200_000.0
DAY = 86_400.0
OWN = "id-web_0"


def minutes(number: float) -> datetime:
    return START + timedelta(minutes=number)


def text_of(at: datetime | None) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}" if at else ""


def record(event: str, vm: str, state: str, age: float | None = 1.0, **fields: str) -> Record:
    said = {
        "id": f"id-{event}",
        "vm": vm,
        "vm_id": f"id-{vm}",
        "state": state,
        "not_before": text_of(minutes(15)),
        "renew_seconds": "20",
        "slot": "",
        "waits_for": "",
    }
    key = record_key(event, vm)
    return Record(key, f"etag {key}", age, {**said, **fields})


def request(stage: str = "requested", event: str = "a", **changes: Any) -> FleetRequest:
    fields: dict[str, Any] = {
        "event": event,
        "workflow_id": f"{event}@1",
        "event_id": f"id-{event}",
        "not_before": minutes(15),
        "vm": "web_0",
        "stage": stage,
        "needs_slot": stage == "requested",
        "lacks_slot": False,
        "needs_all": False,
        "requested_vms": ("web_0",),
        "seen_at": NOW - 1000.0,
    }
    return FleetRequest(**{**fields, **changes})


def ask(
    records: Iterable[Record],
    *requests: FleetRequest,
    max_events: int | None = 1,
    confirmed: Mapping[str, str] | None = None,
) -> Plan:
    """All own records are confirmed unless ``confirmed`` says which ones are."""
    records = tuple(records)
    own = {one.key: one.etag for one in records if one.fields.get("vm_id") == OWN}
    return plan(
        records,
        requests,
        vm_id=OWN,
        confirmed=own if confirmed is None else confirmed,
        max_events=max_events,
        listed_at=NOW,
        listed=len(records),
    )


def state_written(*records: Record, max_events: int = 1, **changes: Any) -> str:
    """The record written for the event "a", which wants to begin; "" if none is written."""
    writes = ask(records, request(**changes), max_events=max_events).writes
    return next((write.fields["state"] for write in writes if write.fields is not None), "")


def has_slot(*records: Record, max_events: int = 1) -> bool:
    return ask(records, request(), max_events=max_events).statuses["a"].has_slot


# --- the record


def test_a_record_says_how_far_this_vm_is_with_the_event() -> None:
    (write,) = ask([], request("not_ready")).writes
    assert write == Write(
        record_key("a", "web_0"),
        "",
        {
            "id": "id-a",
            "vm": "web_0",
            "vm_id": OWN,
            "state": "not_ready",
            "not_before": "2026-03-02T08:15:00Z",
            "renew_seconds": "60",
            "slot": "",
            "waits_for": "",
        },
    )


def test_a_key_is_the_hash_of_the_event_and_the_name_of_the_vm_or_its_hash() -> None:
    event, _, vm = record_key("a", "Web_0").partition("|")
    assert len(event) == 32
    assert int(event, 16)
    assert vm == "web_0"
    assert len(record_key("a", "wéb|0").partition("|")[2]) == 64


def test_without_not_before_the_record_has_none() -> None:
    (write,) = ask([], request("not_ready", not_before=None)).writes
    assert write.fields is not None
    assert write.fields["not_before"] == ""


def test_a_record_is_below_1_kib_whatever_names_there_are() -> None:
    (write,) = ask([], request("ready", event_id="i" * 128, vm="v" * 5000, needs_all=True)).writes
    assert write.fields is not None
    waits_for = waits_for_text(tuple(f"{number}{'w' * 5000}" for number in range(100)))
    assert sum(map(len, [*write.fields, *write.fields.values()])) + len(waits_for) < 1024


def test_it_names_three_of_the_vms_it_waits_for_and_how_many_more() -> None:
    assert waits_for_text(()) == ""
    assert waits_for_text(("a", "b", "c")) == "a, b, c"
    assert waits_for_text(("a", "b", "c", "d", "e")) == "a, b, c and 2 more"


# --- ages


@pytest.mark.parametrize(
    ("age", "renew_seconds", "counts"),
    [
        (60.0, "20", True),
        (61.0, "20", False),
        (60.0, "1", True),
        (300.0, "100", True),
        (1800.0, "9999", True),
        (1801.0, "9999", False),
        (60.0, "often", True),
        (61.0, "-30", False),
        (None, "20", False),
    ],
)
def test_a_record_is_fresh_for_three_of_its_intervals(age: float | None, renew_seconds: str, counts: bool) -> None:
    waiting = record("b", "web_1", "requested", age, not_before=text_of(minutes(1)), renew_seconds=renew_seconds)
    assert state_written(waiting) == ("requested" if counts else "claimed")


@pytest.mark.parametrize("state", ["claimed", "not_ready", "ready"])
@pytest.mark.parametrize(("age", "counts"), [(0.0, True), (1800.0, True), (1801.0, False), (None, True)])
def test_an_event_has_a_slot_for_half_an_hour_after_its_last_record(
    state: str, age: float | None, counts: bool
) -> None:
    assert state_written(record("b", "web_1", state, age)) == ("requested" if counts else "claimed")


@pytest.mark.parametrize("state", ["requested", "released", "READY", ""])
def test_other_states_have_no_slot(state: str) -> None:
    assert state_written(record("b", "web_1", state, not_before=text_of(minutes(30)))) == "claimed"


# --- a slot


@pytest.mark.parametrize("stage", ["not_ready", "ready"])
def test_a_begun_event_writes_its_state_unconditionally(stage: str) -> None:
    others = [record(event, "web_1", "not_ready") for event in "bcd"]
    assert state_written(*others, stage=stage) == stage


def test_it_claims_if_there_is_room() -> None:
    assert state_written() == "claimed"
    assert state_written(record("b", "web_1", "not_ready")) == "requested"
    assert state_written(record("b", "web_1", "not_ready"), max_events=2) == "claimed"


def test_the_event_that_azure_starts_first_claims_first() -> None:
    def other(number: float) -> Record:
        return record("b", "web_1", "requested", not_before=text_of(minutes(number)))

    assert state_written(other(14)) == "requested"
    assert state_written(other(16)) == "claimed"
    assert state_written(other(14), not_before=None) == "requested"
    assert state_written(record("b", "web_1", "requested", not_before="")) == "claimed"


def test_of_two_events_of_one_time_the_lower_key_claims_first() -> None:
    def claims(mine: str, other: str) -> bool:
        writes = ask([record(other, "web_1", "requested")], request(event=mine)).writes
        return any(write.fields is not None and write.fields["state"] == "claimed" for write in writes)

    assert sorted([claims("a", "b"), claims("b", "a")]) == [False, True]


def test_waiting_events_and_events_with_a_slot_both_count() -> None:
    records = [
        record("b", "web_1", "not_ready"),
        record("c", "web_2", "requested", not_before=text_of(minutes(1))),
    ]
    assert state_written(*records, max_events=2) == "requested"
    assert state_written(*records, max_events=3) == "claimed"


def test_an_event_of_many_vms_has_one_slot() -> None:
    records = [record("b", f"web_{number}", "not_ready") for number in range(1, 9)]
    assert state_written(*records, max_events=2) == "claimed"


def test_a_vm_joins_an_event_that_has_begun() -> None:
    full = [record("b", "web_1", "not_ready"), record("a", "web_2", "ready")]
    assert state_written(*full) == "claimed"
    assert has_slot(*full, record("a", "web_0", "claimed"))


def test_a_claim_of_another_vm_is_nothing_to_join() -> None:
    full = [record("b", "web_1", "not_ready"), record("a", "web_2", "claimed")]
    assert state_written(*full) == "requested"


def test_it_begins_when_the_list_shows_its_confirmed_claim() -> None:
    claim = record("a", "web_0", "claimed")
    assert has_slot(claim)
    assert not has_slot()
    assert not ask([claim], request(), confirmed={}).statuses["a"].has_slot
    assert not ask([claim], request(), confirmed={claim.key: "an older one"}).statuses["a"].has_slot


def test_a_claim_steps_back_behind_events_that_have_begun() -> None:
    claim = record("a", "web_0", "claimed")
    assert state_written(claim, record("b", "web_1", "ready")) == "requested"


def test_of_two_claims_the_one_that_comes_before_stays() -> None:
    claim = record("a", "web_0", "claimed")
    before = record("b", "web_1", "claimed", not_before=text_of(minutes(14)))
    after = record("b", "web_1", "claimed", not_before=text_of(minutes(16)))
    assert state_written(claim, before) == "requested"
    assert state_written(claim, after) == ""
    assert not has_slot(claim, after)  # the other one steps back first
    assert has_slot(claim, after, max_events=2)


def test_an_expired_claim_is_requested_again() -> None:
    claim = record("a", "web_0", "claimed", 1801.0)
    assert state_written(claim, record("b", "web_1", "claimed", not_before=text_of(minutes(30)))) == "requested"


@pytest.mark.parametrize("age", [1.0, None])
def test_two_events_of_one_vm_do_not_step_back_for_each_other_for_ever(age: float | None) -> None:
    """Without ages nothing is known to wait but what this VM has written itself."""
    first = record("b", "web_1", "claimed", age, not_before=text_of(minutes(1)))
    waiting = [record(event, "web_0", "requested", age) for event in "ac"]
    found = ask([first, *waiting], request(event="a"), request(event="c"), max_events=2)
    assert [write.fields["state"] for write in found.writes if write.fields] == ["claimed"]


def test_it_lists_the_events_ahead() -> None:
    records = [
        record("b", "web_1", "not_ready", not_before=text_of(minutes(30))),
        record("c", "web_2", "requested", not_before=text_of(minutes(2))),
        record("d", "web_3", "requested", not_before=text_of(minutes(1))),
        record("e", "web_4", "requested", not_before=text_of(minutes(40))),
    ]
    status = ask(records, request()).statuses["a"]
    assert (status.workflow_id, status.position, status.ahead) == ("a@1", 3, ("id-b", "id-d", "id-c"))


# --- what is written and deleted


def test_an_own_record_is_written_if_it_says_something_else() -> None:
    listed = record("a", "web_0", "not_ready")
    assert ask([listed], request("not_ready")).writes == ()
    for other in (request("ready"), request("not_ready", not_before=minutes(20))):
        (write,) = ask([listed], other).writes
        assert (write.key, write.etag) == (listed.key, listed.etag)


def test_an_own_record_that_is_not_confirmed_is_written() -> None:
    listed = record("a", "web_0", "not_ready")
    for confirmed in ({}, {listed.key: "an older one"}):
        (write,) = ask([listed], request("not_ready"), confirmed=confirmed).writes
        assert (write.key, write.etag) == (listed.key, listed.etag)


@pytest.mark.parametrize(("age", "is_due"), [(15.9, False), (16.0, True), (None, False)])
def test_an_own_record_is_written_again_after_four_fifths_of_its_interval(age: float | None, is_due: bool) -> None:
    assert bool(ask([record("a", "web_0", "not_ready", age)], request("not_ready")).writes) == is_due


def test_an_own_record_without_a_request_is_deleted() -> None:
    left, other = record("a", "web_0", "ready"), record("a", "web_1", "ready")
    assert ask([left, other], confirmed={}).writes == (Write(left.key, left.etag, None),)


def test_twenty_records_older_than_a_day_are_deleted_in_a_sync() -> None:
    young = [record("b", "web_1", "ready", DAY), record("c", "web_1", "ready", None)]
    old = [record(f"old {number}", "web_1", "ready", DAY + 1) for number in range(30)]
    writes = ask([*young, *old]).writes
    assert writes == tuple(Write(one.key, one.etag, None) for one in old[:20])


def test_two_vms_of_one_name_leave_each_other_alone() -> None:
    other = record("a", "web_0", "claimed", vm_id="id-of-another")
    found = ask([other], request())
    assert found.writes == ()
    assert found.statuses["a"] == FleetEventStatus(workflow_id="a@1", other_vm_id="id-of-another")
    assert found.next_sync_seconds == 5.0


def test_the_record_of_a_silent_vm_of_the_same_name_is_replaced() -> None:
    other = record("a", "web_0", "not_ready", 61.0, vm_id="id-of-another")
    (write,) = ask([other], request()).writes
    assert (write.key, write.etag) == (other.key, other.etag)
    assert ask([replace_age(other, None)], request()).writes == ()  # it may be alive


def replace_age(one: Record, age: float | None) -> Record:
    return one._replace(age=age)


# --- all ready


def ready_request(*others: str, seen_seconds: float = 1000.0) -> FleetRequest:
    return request("ready", needs_all=True, requested_vms=("web_0", *others), seen_at=NOW - seen_seconds)


def not_ready(
    *others: Record, requested_vms: tuple[str, ...] = ("web_1",), seen_seconds: float = 1000.0
) -> list[str]:
    asked = ready_request(*requested_vms, seen_seconds=seen_seconds)
    status = ask([record("a", "web_0", "ready"), *others], asked).statuses["a"]
    assert status.is_all_ready == (not status.not_ready)
    return list(status.not_ready)


def test_all_are_ready_when_each_expected_vm_is() -> None:
    assert not_ready(record("a", "web_1", "ready")) == []
    assert not_ready(record("a", "web_1", "not_ready")) == ["web_1"]
    assert not_ready(record("b", "web_1", "ready")) == ["web_1"]
    assert not_ready() == ["web_1"]


def test_ready_expires() -> None:
    assert not_ready(record("a", "web_1", "ready", 60.0)) == []
    assert not_ready(record("a", "web_1", "ready", 61.0)) == ["web_1"]
    assert not_ready(record("a", "web_1", "ready", None)) == ["web_1"]


def test_ready_from_before_this_appearance_does_not_count() -> None:
    assert not_ready(record("a", "web_1", "ready", 10.0), seen_seconds=10.0) == []
    assert not_ready(record("a", "web_1", "ready", 10.0), seen_seconds=9.0) == ["web_1"]


@pytest.mark.parametrize("state", ["claimed", "not_ready"])
def test_a_vm_that_has_begun_is_expected_though_it_is_not_named(state: str) -> None:
    assert not_ready(record("a", "wbe_1", state), requested_vms=()) == ["wbe_1"]


def test_a_vm_that_is_not_named_and_has_not_begun_is_not_expected() -> None:
    assert not_ready(record("a", "web_1", "requested"), requested_vms=()) == []
    assert not_ready(record("a", "web_1", "not_ready", 1801.0), requested_vms=()) == []


def test_this_vm_must_be_ready_by_the_list_too() -> None:
    other = record("a", "web_1", "ready")
    own = record("a", "web_0", "ready")
    assert not ask([other], ready_request("web_1")).statuses["a"].is_all_ready
    assert not ask([own, other], ready_request("web_1"), confirmed={}).statuses["a"].is_all_ready


def test_names_are_compared_as_keys_are() -> None:
    assert not_ready(record("a", "Web 1", "ready"), requested_vms=("web 1",)) == [
        "web 1"
    ]  # plain names are lower case
    assert not_ready(record("a", "web 1", "ready"), requested_vms=("web 1",)) == []


# --- when to ask again


@pytest.mark.parametrize(
    ("records", "asked", "seconds"),
    [
        ([], (), 60.0),
        ([record("b", "web_1", "claimed"), record("a", "web_0", "claimed")], request(not_before=minutes(9)), 1.5),
        ([record("b", "web_1", "ready")], request(), 10.0),
        ([record(f"e{number}", "web_1", "ready") for number in range(300)], request(), 600.0),
        ([record("a", f"web_{number}", "ready") for number in range(1, 9)], ready_request("web_9"), 20.0),
        ([record("a", f"web_{number}", "ready") for number in range(1, 101)], ready_request("web_0"), 50.0),
        ([], request("not_ready"), 60.0),
        ([], request("ready"), 60.0),
    ],
)
def test_the_next_sync_depends_on_the_state(
    records: list[Record], asked: FleetRequest | tuple[()], seconds: float
) -> None:
    requests = (asked,) if isinstance(asked, FleetRequest) else ()
    found = ask(records, *requests)
    assert found.next_sync_seconds == seconds
    for write in found.writes:
        assert write.fields is not None
        assert write.fields["renew_seconds"] == f"{max(20.0, seconds):.0f}"


def test_while_it_may_act_it_lists_every_5_s() -> None:
    assert ask([record("a", "web_0", "claimed")], request()).next_sync_seconds == 5.0
    both = [record("a", "web_0", "ready"), record("a", "web_1", "ready")]
    assert ask(both, ready_request("web_1")).next_sync_seconds == 5.0


TWO_AHEAD = [record("b", "web_8", "ready"), record("c", "web_9", "ready")]


@pytest.mark.parametrize(
    ("records", "seconds"),
    [
        ([record("a", "web_0", "requested"), record("a", "web_1", "requested")], 15.0),
        ([record("a", "web_0", "requested"), record("a", "web_1", "claimed")], 5.0),
        ([record("a", "web_0", "requested"), record("a", "web_1", "claimed", age=None)], 5.0),
        ([record("a", "web_0", "requested"), record("a", "web_1", "claimed", age=61.0)], 15.0),
        ([], 5.0),  # the others of the event may not have been there either
    ],
)
def test_a_vm_asks_every_5_s_while_another_vm_of_its_event_may_get_a_slot(
    records: list[Record], seconds: float
) -> None:
    both = request(requested_vms=("web_0", "web_1"), not_before=minutes(99))
    found = ask([*TWO_AHEAD, *records], both)
    assert sorted(found.statuses["a"].ahead) == ["id-b", "id-c"]
    assert found.next_sync_seconds == seconds
    assert ask(TWO_AHEAD, request(not_before=minutes(99))).next_sync_seconds == 15.0


def test_a_vm_that_takes_back_its_claim_asks_again_after_5_s() -> None:
    """Others that claimed in the same moment take theirs back, too: there may be room at once."""
    found = ask([*TWO_AHEAD, record("a", "web_0", "claimed")], request(not_before=minutes(99)))
    (write,) = found.writes
    assert write.fields is not None
    assert (write.fields["state"], found.next_sync_seconds) == ("requested", 5.0)


def test_a_ready_vm_renews_its_record_as_often_far_behind_in_the_line_for_a_slot() -> None:
    """Else it would count as ready for minutes after it can no longer say that it is not."""
    ahead = [record(f"e{number}", "web_8", "not_ready") for number in range(20)]
    both = [record("a", "web_0", "ready", slot="lacked"), record("a", "web_1", "ready", slot="lacked")]
    asked = request("ready", needs_slot=True, lacks_slot=True, needs_all=True, requested_vms=("web_0", "web_1"))
    (write,) = ask([*ahead, *both], asked).writes
    assert write.fields is not None
    assert (write.fields["slot"], write.fields["renew_seconds"]) == ("requested", "20")


def test_it_asks_more_often_while_a_ready_vm_has_only_to_write_again() -> None:
    """Its record is from before this VM has seen the event: that is so after a restart."""
    both = [record("a", "web_0", "ready"), record("a", "web_1", "ready", age=9.0)]
    seen = ready_request("web_1", seen_seconds=5.0)
    assert not ask(both, seen).statuses["a"].is_all_ready
    assert ask(both, seen).next_sync_seconds == 5.0
    assert ask([both[0], record("a", "web_1", "ready", age=61.0)], seen).next_sync_seconds == 20.0


def test_a_record_is_written_again_by_the_interval_that_it_names() -> None:
    assert (
        ask([record("a", "web_0", "not_ready", renew_seconds="20")], request("not_ready")).next_sync_seconds == 20
    )


# --- what holds for any list


@dataclass(frozen=True)
class Said:
    """A record as the rules read it, from the record alone."""

    record: Record
    event: str
    vm_key: str

    @property
    def state(self) -> str:
        return self.record.fields.get("state", "")

    @property
    def is_own(self) -> bool:
        return self.record.fields.get("vm_id") == OWN

    @property
    def is_fresh(self) -> bool:
        try:
            interval = min(600, max(20, int(self.record.fields.get("renew_seconds", ""))))
        except ValueError:
            interval = 20
        return self.record.age is not None and self.record.age <= 3 * interval

    @property
    def has_slot(self) -> bool:
        return self.state in ("claimed", "not_ready", "ready") and (self.record.age or 0.0) <= 30 * 60

    @property
    def has_begun(self) -> bool:
        return self.has_slot and self.state != "claimed"

    @property
    def slot(self) -> str:
        found = self.record.fields.get("slot", "")
        return found if found in SLOTS else ""

    @property
    def is_claim(self) -> bool:
        return self.has_slot and (self.state == "claimed" or self.slot == "claimed")

    @property
    def asks_to_approve(self) -> bool:
        return self.has_slot and self.slot == "requested" and self.is_fresh

    @property
    def waits(self) -> bool:
        return self.state == "requested" and self.is_fresh

    @property
    def order(self) -> tuple[datetime, str]:
        return TIMES.get(self.record.fields.get("not_before", ""), datetime.max.replace(tzinfo=UTC)), self.event


@dataclass(frozen=True)
class Case:
    """A list, and what this VM asks and knows."""

    records: tuple[Record, ...]
    requests: tuple[FleetRequest, ...]
    confirmed: Mapping[str, str]
    max_events: int | None

    def plan(self) -> Plan:
        return ask(self.records, *self.requests, max_events=self.max_events, confirmed=self.confirmed)

    def said(self) -> list[Said]:
        return [Said(one, *one.key.partition("|")[::2]) for one in self.records]

    def own(self, asked: FleetRequest) -> Said | None:
        return next((one for one in self.said() if one.record.key == hook_key(asked)), None)

    def is_taken(self, asked: FleetRequest) -> bool:
        """Another VM that may be alive has the name of this one."""
        own = self.own(asked)
        return own is not None and not own.is_own and (own.is_fresh or own.record.age is None)

    def with_slot(self, asked: FleetRequest) -> set[str]:
        """The other events that count for a slot."""
        events = {one.event for one in self.said() if one.has_slot} - {event_of(asked)}
        return {event for event in events if not (asked.lacks_slot and self.only_asks(event))}

    def only_asks(self, event: str) -> bool:
        """It has begun without a slot, and waits for one alone."""
        counting = [one for one in self.said() if one.event == event and one.has_slot]
        is_asking = any(one.asks_to_approve for one in counting)
        return is_asking and all(one.has_begun and one.slot in ("lacked", "requested") for one in counting)

    def begun(self, asked: FleetRequest) -> set[str]:
        """The other events that do not give way to a claim."""
        counting = [one for one in self.said() if one.event in self.with_slot(asked) and one.has_slot]
        claims = {one.event for one in counting if one.is_claim} if asked.lacks_slot else set()
        return {one.event for one in counting if one.has_begun and not (one.slot and one.event in claims)}

    def waiting_before(self, asked: FleetRequest) -> set[str]:
        mine = (asked.not_before or datetime.max.replace(tzinfo=UTC), event_of(asked))
        waiting = [one for one in self.said() if (one.asks_to_approve if asked.lacks_slot else one.waits)]
        return {one.event for one in waiting if one.order < mine} - {event_of(asked)}

    def has_joined(self, asked: FleetRequest) -> bool:
        others = [one for one in self.said() if one.event == event_of(asked) and one.record.key != hook_key(asked)]
        return any(one.has_begun and not one.slot for one in others)

    def has_room(self, asked: FleetRequest) -> bool:
        return len(self.with_slot(asked)) < self.limit

    @property
    def limit(self) -> float:
        return self.max_events or float("inf")

    def has_confirmed(self, asked: FleetRequest, state: str) -> bool:
        own = self.own(asked)
        if own is None or not own.is_own or own.state != state:
            return False
        return self.confirmed.get(own.record.key) == own.record.etag

    def are_all_ready(self, asked: FleetRequest) -> bool:
        of_event = {one.vm_key: one for one in self.said() if one.event == event_of(asked)}
        requested_vms = {plain_key(name) for name in asked.requested_vms}
        requested_vms |= {vm for vm, one in of_event.items() if one.has_slot}
        ready = {
            vm
            for vm, one in of_event.items()
            if one.state == "ready" and one.is_fresh and (one.record.age or 0.0) <= NOW - asked.seen_at
        }
        return requested_vms <= ready

    def after(self, writes: Iterable[Write]) -> "Case":
        """The store has carried them out; no time has passed."""
        records = {one.key: one for one in self.records}
        confirmed = dict(self.confirmed)
        has_ages = any(one.age is not None for one in self.records)
        for write in writes:
            confirmed.pop(write.key, None)
            if write.fields is None:
                del records[write.key]
            else:
                etag = f"{write.etag}+"
                records[write.key] = Record(write.key, etag, 0.0 if has_ages else None, write.fields)
                confirmed[write.key] = etag
        return replace(self, records=tuple(records.values()), confirmed=confirmed)

    def without_ages(self) -> "Case":
        return replace(self, records=tuple(replace_age(one, None) for one in self.records))


def hook_key(asked: FleetRequest) -> str:
    return record_key(asked.event, asked.vm)


def event_of(asked: FleetRequest) -> str:
    return hook_key(asked).partition("|")[0]


TIMES = {text_of(minutes(number)): minutes(number) for number in range(0, 60, 10)}
AGES = (0.0, 1.0, 10.0, 16.0, 60.0, 61.0, 180.0, 600.0, 1799.0, 1800.0, 1801.0, DAY, DAY + 1, 1e9, None)
GARBAGE = ("", " ", "ready ", "x" * 100_000, "\x00|\n", "🐌", "9" * 5000, "-1", "null", "2026-13-45T99:00:00Z")
EVENTS = "abcdef"
STATES = ("requested", "claimed", "not_ready", "ready")
SLOTS = ("lacked", "requested", "claimed")
VMS = ("web_0", "web_1", "web_2", "wéb 3")


def a_case(random: Random) -> Case:
    max_events = random.choice((1, 1, 2, 3, 5, None))
    requests = tuple(_some_request(random, event, max_events) for event in EVENTS if random.random() < 0.4)
    records = {one.key: one for one in _some_records(random)}
    for asked in requests:
        if random.random() < 0.5:  # as this VM has left it
            state = "claimed" if asked.stage == "requested" else asked.stage
            slot = random.choice(SLOTS) if asked.lacks_slot else ""
            own = record(asked.event, asked.vm, state, random.choice(AGES[:4]), vm_id=OWN, slot=slot)
            records[own.key] = own
    mine = [one for one in records.values() if one.fields.get("vm_id") == OWN]
    confirmed = {hook_key(asked): "gone" for asked in requests if random.random() < 0.05}
    for one in mine:
        if random.random() < 0.9:
            confirmed[one.key] = one.etag if random.random() < 0.9 else "an older one"
    return Case(tuple(random.sample(list(records.values()), len(records))), requests, confirmed, max_events)


def _some_records(random: Random) -> Iterator[Record]:
    share = random.choice((0.1, 0.3, 0.6))
    states = random.choice((STATES, STATES, ("ready",), ("requested",)))
    for event in EVENTS:
        for vm in VMS:
            if random.random() < share:
                yield _some_record(random, event, vm, random.choice(states))
    if random.random() < 0.3:
        key = random.choice(("", "|", "no-bar", record_key("a", "x")[:32], record_key("b", "web_1") + "|more"))
        yield _some_record(random, "a", "web_1", random.choice(STATES))._replace(key=key, etag=f"etag {key}")
    if random.random() < 0.05:
        yield from (record(f"old {number}", "web_1", "ready", DAY + 1) for number in range(random.randrange(30)))


def _some_record(random: Random, event: str, vm: str, state: str) -> Record:
    age = random.choice(AGES[:4]) if random.random() < 0.5 else random.choice(AGES)
    found = record(
        event,
        vm,
        state,
        age,
        not_before=random.choice(("", *TIMES)),
        renew_seconds=random.choice(("20", "20", "60", "150", "600", "5000")),
        slot=random.choice(("", "", *SLOTS)) if state in ("not_ready", "ready") else "",
        vm_id=random.choice((f"id-{vm}", f"id-{vm}", f"id-{vm}", "id-of-another")),
    )
    if random.random() < 0.1:
        found = found._replace(fields={**found.fields, random.choice(list(found.fields)): random.choice(GARBAGE)})
    if random.random() < 0.05:
        left = random.sample(sorted(found.fields), random.randrange(len(found.fields)))
        found = found._replace(fields={name: found.fields[name] for name in left})
    return found


def _some_request(random: Random, event: str, max_events: int | None) -> FleetRequest:
    own = random.choice((*["web_0"] * 9, "wéb 0"))
    stage = random.choice(("requested", "requested", "not_ready", "ready"))
    lacks_slot = stage != "requested" and max_events is not None and random.random() < 0.5
    return request(
        stage,
        event,
        vm=own,
        not_before=random.choice((None, *TIMES.values())),
        needs_slot=max_events is not None and (stage == "requested" or lacks_slot) and random.random() < 0.9,
        lacks_slot=lacks_slot,
        needs_all=random.random() < 0.5,
        requested_vms=(own, *(name for name in VMS[1:] if random.random() < 0.3)),
        seen_at=NOW - random.choice((0.0, 5.0, 10.0, 30.0, 100.0, 1000.0, 1e5)),
    )


def faults(case: Case) -> Iterator[str]:
    """Descriptions of the rules that do not hold for the case."""
    found = case.plan()
    if found != deepcopy(case).plan():
        yield "the same input gives another output"
    yield from _faults_of_writes(case, found)
    for asked in case.requests:
        yield from _faults_of_status(case, asked, found.statuses[asked.event])
    yield from _faults_without_ages(case, found)
    rounds = 1
    while any(write.fields is not None or _is_own(case, write.key) for write in found.writes):
        case = case.after(found.writes)
        found = case.plan()
        rounds += 1
        if rounds > 4:
            yield "it does not settle within 4 rounds"
            return
    yield from _faults_once_settled(case, found)


def _is_own(case: Case, key: str) -> bool:
    return any(one.is_own for one in case.said() if one.record.key == key)


def _faults_of_writes(case: Case, found: Plan) -> Iterator[str]:
    listed = {one.record.key: one for one in case.said()}
    requests = {hook_key(asked): asked for asked in case.requests}
    old = [key for key, _, fields in found.writes if fields is None and not listed[key].is_own]
    if len(old) > 20:
        yield "more than 20 old records are deleted"
    for key, etag, fields in found.writes:
        before = listed.get(key)
        if etag != (before.record.etag if before else ""):
            yield "a write without the condition that nothing has changed"
        if fields is None:
            if key in requests or (key in old and (listed[key].record.age or 0.0) <= DAY):
                yield "a record is deleted that must stay"
        elif key not in requests or case.is_taken(requests[key]):
            yield "a record of another VM is written"
        elif "claimed" in (fields["state"], fields["slot"]) and not _may_claim(case, requests[key]):
            yield "a claim where there is no room"
        elif bool(fields["slot"]) != requests[key].lacks_slot:
            yield "a record does not say whether it lacks a slot"


def _may_claim(case: Case, asked: FleetRequest) -> bool:
    own = case.own(asked)
    has_claim = own is not None and own.is_own and own.is_claim
    if has_claim or case.has_joined(asked):
        return True
    return len(case.with_slot(asked) | case.waiting_before(asked)) < case.limit


def _faults_of_status(case: Case, asked: FleetRequest, status: FleetEventStatus) -> Iterator[str]:
    if status.has_slot:
        state = "claimed" if asked.stage == "requested" else asked.stage
        own = case.own(asked)
        is_claim = own is not None and "claimed" in (own.state, own.slot)
        if not (asked.needs_slot and is_claim and case.has_confirmed(asked, state)):
            yield "an event may begin without a confirmed claim in the list"
        if asked.lacks_slot and asked.needs_all and not case.are_all_ready(asked):
            yield "a slot to approve before all are ready"
        if not (case.has_joined(asked) or case.has_room(asked)):
            yield "an event may begin while as many others have a slot as may have one"
    if status.is_all_ready:
        if asked.stage != "ready" or not case.has_confirmed(asked, "ready"):
            yield "all are ready but this VM is not known to be"
        if not case.are_all_ready(asked):
            yield "all are ready but one is not"


def _faults_without_ages(case: Case, found: Plan) -> Iterator[str]:
    other = case.without_ages().plan()
    for asked in case.requests:
        with_ages, without = found.statuses[asked.event], other.statuses[asked.event]
        if without.is_all_ready and not with_ages.is_all_ready:
            yield "without ages more VMs are ready"
        if without.other_vm_id:
            continue
        if not set(with_ages.not_ready) <= set(without.not_ready):
            yield "without ages more VMs are ready"
        if without.position and len(without.ahead) < len(case.with_slot(asked)):
            yield "without ages fewer slots are taken"


def _faults_once_settled(case: Case, found: Plan) -> Iterator[str]:
    keys = {hook_key(asked) for asked in case.requests}
    if any(one.is_own and one.record.key not in keys for one in case.said()):
        yield "a record stays without a request"
    for asked in case.requests:
        if case.is_taken(asked):
            continue
        own, status = case.own(asked), found.statuses[asked.event]
        allowed = ("requested", "claimed") if asked.stage == "requested" else (asked.stage,)
        if own is None or own.state not in allowed or case.confirmed.get(own.record.key) != own.record.etag:
            yield "the record does not say how far the VM is"
        elif bool(own.slot) != asked.lacks_slot:
            yield "the record does not say whether it lacks a slot"
        elif asked.needs_slot and (asked.stage == "requested" or own.slot != "lacked"):
            yield from _faults_in_line(case, asked, own, status)
        elif asked.needs_slot and not asked.needs_all:
            yield "it does not ask for the slot to approve"
        elif asked.stage == "ready" and asked.needs_all and status.is_all_ready != case.are_all_ready(asked):
            yield "all are ready and it does not count"


def _faults_in_line(case: Case, asked: FleetRequest, own: Said, status: FleetEventStatus) -> Iterator[str]:
    with_slot, waiting = case.with_slot(asked), case.waiting_before(asked)
    if not status.has_slot and (case.has_joined(asked) or len(with_slot | waiting) < case.limit):
        yield "an event waits though there is room"
    if own.is_claim and not status.has_slot:
        others = [one for one in case.said() if one.event in with_slot and one.is_claim]
        claims = [one for one in others if (one.slot == "claimed") == asked.lacks_slot]
        if len(case.begun(asked)) >= case.limit or any(one.order < own.order for one in claims):
            yield "a claim does not step back"


CASES = range(1000)  # each planted fault shows in one of them


def first_fault(seeds: range = CASES, only: str = "") -> str:
    """``only``: how the fault begins that is looked for."""
    for seed in seeds:
        for fault in faults(a_case(Random(seed))):
            if fault.startswith(only):
                return f"{fault}: case {seed}"
    return ""


@pytest.mark.parametrize("seeds", [CASES, pytest.param(range(1000, 100_000), marks=pytest.mark.nightly)])
def test_no_list_breaks_a_rule(seeds: range) -> None:
    assert first_fault(seeds) == ""


@pytest.mark.parametrize("name", ["id", "vm", "vm_id", "not_before", "renew_seconds", "waits_for"])
@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_text_of_another_program_is_truncated(name: str, text: str) -> None:
    good = [record(event, "web_1", "ready") for event in "ab"]
    records = [Record(text, text, 0.0, {}), *(one._replace(fields={**one.fields, name: text}) for one in good)]
    status = ask(records, request(event="c")).statuses["c"]
    assert len(status.ahead) == 2
    assert all(len(one) <= 80 for one in status.ahead)


# --- faults that the properties must find


def begins_at_once(self: Any, asked: FleetRequest, state: str, slot: SlotState) -> FleetEventStatus:
    has_slot = asked.stage == "requested" and state == "claimed"
    return changed(REAL_STATUS(self, asked, state, slot), has_slot=has_slot)


def approves_at_once(self: Any, asked: FleetRequest, state: str, slot: SlotState) -> FleetEventStatus:
    status = REAL_STATUS(self, asked, state, slot)
    return changed(status, has_slot=status.has_slot or slot == "claimed")


def writes_always(self: Any, asked: FleetRequest, state: str, slot: SlotState, interval: float) -> Write | None:
    write = REAL_WRITE(self, asked, state, slot, interval)
    return write and write._replace(etag="")


def awaits_those_that_are_named(self: Any, asked: FleetRequest) -> tuple[str, ...]:
    return tuple(name for name in REAL_NOT_READY(self, asked) if name in asked.requested_vms)


def counts_what_has_begun(one: module.VmRecord) -> bool:
    age = one.record.age
    return one.state in ("not_ready", "ready") and (age is None or age <= module.SLOT_SECONDS)


def claims_for_ever(self: Any, asked: FleetRequest) -> str:
    own = self.own(asked)
    return own.state if own is not None and own.state == "claimed" else REAL_STATE(self, asked)


Group = module._Group
REAL_STATUS, REAL_WRITE, REAL_NOT_READY, REAL_STATE = (
    Group.status_of,
    Group.write_of,
    Group._not_ready,
    Group.state_of,
)
REAL_READY = module._is_ready
PLANTS: dict[str, tuple[Any, str, Any, str]] = {
    "begins on the list from before its claim": (Group, "status_of", begins_at_once, "an event may begin without"),
    "takes any own record for its last write": (
        Group,
        "_is_confirmed",
        lambda *_: True,
        "an event may begin without",
    ),
    "counts what has begun only": (
        module.VmRecord,
        "counts_for_slot",
        property(counts_what_has_begun),
        "an event may begin while",
    ),
    "approves on the list from before its claim": (
        Group,
        "status_of",
        approves_at_once,
        "an event may begin without",
    ),
    "two that ask wait for each other": (Group, "_only_asks", lambda *_: False, "an event waits though"),
    "what lacks a slot has one": (
        module.VmRecord,
        "has_slot",
        module.VmRecord.has_begun,
        "an event may begin while",
    ),
    "asks before all are ready": (
        Group,
        "_asks_to_approve",
        lambda _, asked: asked.lacks_slot and asked.needs_slot,
        "a slot to approve before",
    ),
    "a slot lasts a minute": (module, "SLOT_SECONDS", 60.0, "an event may begin while"),
    "a slot does not lapse": (module, "SLOT_SECONDS", float("inf"), "an event waits though"),
    "begins in order of arrival": (Group, "_waiting_before", lambda *_: [], "a claim where"),
    "a claim stays for ever": (Group, "state_of", claims_for_ever, "a claim does not step back"),
    "ready does not expire": (
        module,
        "_is_ready",
        lambda one, seen: one.state == "ready" and (one.record.age or 0.0) <= seen,
        "all are ready but one",
    ),
    "ready from before this appearance counts": (
        module,
        "_is_ready",
        lambda one, _: one.state == "ready" and one.is_fresh,
        "all are ready but one",
    ),
    "members overrule a record": (Group, "_not_ready", awaits_those_that_are_named, "all are ready but one"),
    "ready without an age counts": (
        module,
        "_is_ready",
        lambda one, seen: one.state == "ready" and (one.record.age is None or REAL_READY(one, seen)),
        "without ages more",
    ),
    "deletes records of an hour": (backend_module, "_OLD_SECONDS", 3600.0, "a record is deleted"),
    "writes over another VM of its name": (
        Group,
        "_other_of_the_name",
        lambda *_: None,
        "a record of another VM is written",
    ),
    "writes without a condition": (Group, "write_of", writes_always, "a write without the condition"),
    "writes always": (module, "_RENEW_AT", 0.0, "it does not settle"),
    "deletes nothing": (Group, "deletes", lambda *_: [], "a record stays"),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_a_planted_fault_is_found(plant: tuple[Any, str, Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, found = plant
    monkeypatch.setattr(where, name, wrong)
    assert first_fault(only=found) != ""
