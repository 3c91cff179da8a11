"""Results of ``fleet status``, ``fleet release`` and ``doctor`` for a group's records."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from memory_backend import MemoryBackend, MemoryStore

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import fleet as command
from scheduled_events_agent.cli import main
from scheduled_events_agent.cli.fleet import FleetStatus, examine, format_status, release, summarize
from scheduled_events_agent.cli.terminal import Terminal
from scheduled_events_agent.fleet.backend import BackendError, Record
from scheduled_events_agent.fleet.plan import record_key
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings, Settings

NOW = datetime(2026, 3, 2, 8, 30, tzinfo=UTC)
ONE, OTHER, THIRD = (f"{start}-d2cd-49c7-8624-8643e7171297" for start in ("602d9444", "77aa01c2", "8f22b0c1"))
TABLE = "https://a.table.core.windows.net/scheduledevents"


def record(event: str, vm: str, state: str, age: float | None = 4.0, **more: str) -> Record:
    fields = {"id": event, "vm": vm, "vm_id": f"id-{vm}", "state": state, "not_before": "2026-03-02T08:40:00Z"}
    return Record(record_key(event, vm), "etag", age, {**fields, "renew_seconds": "60", "waits_for": "", **more})


def status(*records: Record, max_events: int | None = 1, **more: Any) -> FleetStatus:
    events = summarize(records, max_events)
    taken = sum(event.has_slot for event in events)
    fields = {"leases": "", "warnings": (), "clock_skew_seconds": None, **more}
    return FleetStatus(
        at=NOW, group="web", table=TABLE, slots_taken=taken, max_events=max_events, events=events, **fields
    )


def shown(*records: Record, width: int | None = None, **more: Any) -> list[str]:
    return [*format_status(status(*records, **more), Terminal(width=width, has_colors=False))]


def test_slots_the_queue_and_the_vms_of_each_event_are_shown() -> None:
    records = [
        record(OTHER, "web_5", "requested", 3.0, not_before="2026-03-02T08:55:00Z"),
        record(ONE, "web_0", "ready", waits_for="web_1, web_2"),
        record(ONE, "web_2", "not_ready", 12.0),
    ]
    lines = [
        f"Group web, in {TABLE}: 1 of 1 slots taken",
        "  event 602d9444  has a slot; Azure starts it at 08:40:00 UTC",
        "    web_0  ready, heard 4s ago; waits for web_1, web_2",
        "    web_2  not ready, heard 12s ago",
        "  event 77aa01c2  waits, 1st in line; Azure starts it at 08:55:00 UTC",
        "    web_5  requested, heard 3s ago",
    ]
    assert shown(*records) == lines
    assert shown(*records, width=80) == [lines[0].removesuffix(" taken"), "  taken", *lines[1:]]


def test_the_same_is_printed_as_json() -> None:
    built = json.loads(msgspec.json.encode(status(record(ONE, "web_0", "ready", waits_for="web_1"))))
    del built["at"], built["schema_version"]
    assert built == {
        "group": "web",
        "table": TABLE,
        "leases": "",
        "slots_taken": 1,
        "max_events": 1,
        "events": [
            {
                "event_id": ONE,
                "has_slot": True,
                "position": 0,
                "not_before": "2026-03-02T08:40:00Z",
                "vms": [{"name": "web_0", "state": "ready", "slot": "", "age_seconds": 4.0, "waits_for": "web_1"}],
            }
        ],
        "warnings": [],
        "clock_skew_seconds": None,
    }


def headings(*records: Record, max_events: int | None = 1) -> list[tuple[str, bool, int]]:
    return [(one.event_id, one.has_slot, one.position) for one in summarize(records, max_events)]


def test_more_events_than_the_limit_are_without_a_slot_the_last_in_order() -> None:
    later = "2026-03-02T08:50:00Z"
    records = [record(OTHER, "web_1", "ready", not_before=later), record(ONE, "web_0", "not_ready")]
    assert headings(*records) == [(ONE, True, 0), (OTHER, False, 0)]
    assert shown(*records)[0].endswith(": 1 of 1 slots taken")
    assert shown(*records)[3] == "  event 77aa01c2  without a slot; Azure starts it at 08:50:00 UTC"
    assert headings(*records, max_events=2) == [(ONE, True, 0), (OTHER, True, 0)]
    claims = [record(ONE, "web_0", "claimed"), record(OTHER, "web_1", "not_ready", not_before=later)]
    assert headings(*claims) == [(OTHER, True, 0), (ONE, False, 0)], "one that has begun keeps its slot"


def test_an_event_that_began_without_a_slot_takes_none_and_may_wait_for_one() -> None:
    records = [
        record(ONE, "web_0", "not_ready", slot="lacked"),
        record(OTHER, "web_1", "ready", slot="requested", not_before="2026-03-02T08:50:00Z"),
        record(THIRD, "web_2", "not_ready", not_before="2026-03-02T09:00:00Z"),
    ]
    assert headings(*records) == [(ONE, False, 0), (OTHER, False, 0), (THIRD, True, 0)]
    lines = shown(*records)
    assert lines[1] == "  event 602d9444  without a slot; Azure starts it at 08:40:00 UTC"
    assert lines[3] == "  event 77aa01c2  waits for a slot to approve; Azure starts it at 08:50:00 UTC"
    assert [vm.slot for event in summarize(records, 1) for vm in event.vms] == ["lacked", "requested", ""]
    both = summarize([record(ONE, "web_0", "ready", slot="lacked"), record(ONE, "web_1", "ready")], 1)
    assert both[0].has_slot, "the slot belongs to the event"


def test_events_wait_in_the_order_in_which_they_begin() -> None:
    records = [
        record(ONE, "web_0", "requested", not_before="2026-03-02T09:00:00Z"),
        record(OTHER, "web_1", "requested", not_before="2026-03-02T08:50:00+00:00"),
        record(THIRD, "web_2", "not_ready", not_before=""),
    ]
    assert headings(*records) == [(THIRD, True, 0), (OTHER, False, 1), (ONE, False, 2)]


def test_an_event_of_silent_vms_has_no_slot_and_does_not_wait() -> None:
    records = [
        record(ONE, "web_0", "ready", 1801.0),
        record(OTHER, "web_1", "requested", 3 * 3600.0, not_before=""),
    ]
    assert headings(*records) == [(ONE, False, 0), (OTHER, False, 0)]
    assert shown(*records)[2::2] == ["    web_0  ready, heard 30m 1s ago", "    web_1  requested, heard 3h 0m ago"]
    assert headings(record(ONE, "web_0", "ready", 1800.0)) == [(ONE, True, 0)]


def test_a_backend_without_ages_keeps_slots() -> None:
    records = [record(ONE, "web_0", "ready", None), record(OTHER, "web_1", "requested", None)]
    assert headings(*records) == [(ONE, True, 0), (OTHER, False, 0)]
    assert shown(*records)[2] == "    web_0  ready, not known when it was heard"


def test_a_not_before_that_is_over_or_unknown_is_not_announced() -> None:
    assert shown(record(ONE, "web_0", "ready", not_before="2026-03-02T08:29:00Z"))[1] == (
        "  event 602d9444  has a slot; NotBefore was 08:29:00 UTC"
    )
    assert shown(record(ONE, "web_0", "ready", not_before=""))[1] == "  event 602d9444  has a slot"


def test_a_group_without_records_or_limit_is_shown() -> None:
    assert shown() == [f"Group web, in {TABLE}: 0 of 1 slots taken", "  events  none"]
    assert shown(record(ONE, "web_0", "ready"), max_events=None)[:3] == [
        f"Group web, in {TABLE}",
        "The policy has no max_events: events begin without a slot.",
        "  event 602d9444  Azure starts it at 08:40:00 UTC",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(40.0, "ahead of"), (-40.0, "behind"), (20.0, ""), (None, "")])
def test_a_clock_that_differs_is_shown(seconds: float | None, text: str) -> None:
    expected = [f"This clock is 40 s {text} the store's."] if text else []
    assert shown(clock_skew_seconds=seconds)[1:-1] == expected


def test_foreign_records_are_ignored() -> None:
    records = [
        Record("\x1b[31m", "1", 0.0, {}),
        Record("x|y", "2", 0.0, {"id": "\x1b[31mred", "vm": "\x1b[31m", "state": "\x1b[31m"}),
        record(ONE, "web_0", "odd", waits_for="\x1b[31m"),
        record(OTHER, "web_1", "odd", not_before="soon"),
    ]
    assert [one.has_slot for one in summarize(records, 1)] == [False] * 4
    assert {vm.state for event in summarize(records, 1) for vm in event.vms} == {"unknown"}
    assert all("\x1b" not in line for line in shown(*records))


# --- release


class Clock:
    """The store's, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(clock: Clock, *, has_ages: bool = True) -> MemoryStore:
    """With two silent VMs of one event, and a third one that waits."""
    store = MemoryStore(clock, has_ages=has_ages)
    for one in (record(ONE, "web_0", "ready"), record(ONE, "web_1", "not_ready")):
        store.put(one.key, one.fields, "")
    clock.now += 181.0
    waiting = record(OTHER, "web_5", "requested")
    store.put(waiting.key, waiting.fields, "")
    return store


def states(store: MemoryStore) -> list[tuple[str, str]]:
    return sorted((one.fields["vm"], one.fields["state"]) for one in store.list())


def test_the_records_of_an_event_whose_vms_are_silent_are_deleted() -> None:
    store = filled(Clock())
    event_id, vms = release(MemoryBackend(store), ONE.upper())
    assert event_id == ONE
    assert sorted((vm.name, vm.state, vm.age_seconds) for vm in vms) == [
        ("web_0", "ready", 181.0),
        ("web_1", "not_ready", 181.0),
    ]
    assert states(store) == [("web_5", "requested")]


def test_an_event_is_released_by_its_full_id_only() -> None:
    store = filled(Clock())
    with pytest.raises(AgentError, match=f'^no event .* has the id "602d9444"; known are: {ONE}, {OTHER}$'):
        release(MemoryBackend(store), ONE[:8])
    assert len(store.list()) == 3


def test_an_event_with_a_recent_record_is_not_released() -> None:
    clock = Clock()
    store = filled(clock)
    alive = record(ONE, "web_3", "ready")
    store.put(alive.key, alive.fields, "")
    clock.now += 12.0
    with pytest.raises(AgentError, match=r"^web_3 was heard 12s ago: a VM that runs the agent keeps its slot$"):
        release(MemoryBackend(store), ONE)
    assert len(store.list()) == 4


def test_a_record_without_an_age_counts_as_recent() -> None:
    store = filled(Clock(), has_ages=False)
    with pytest.raises(AgentError, match=r"^the store does not tell when web_[01] was heard: a VM that runs"):
        release(MemoryBackend(store), ONE)
    assert len(store.list()) == 3


def test_a_record_that_was_written_meanwhile_is_not_deleted() -> None:
    store = filled(Clock())
    listed = store.list()
    for one in listed:
        store.put(one.key, one.fields, one.etag)

    class Late(MemoryBackend):
        def list(self) -> list[Record]:
            return listed

    with pytest.raises(AgentError, match=r"^web_[01] was heard at this moment: a VM that runs the agent"):
        release(Late(store), ONE)
    assert len(store.list()) == 3


# --- the commands, and doctor


class Table(MemoryBackend):
    """In place of the table."""

    def __init__(self, store: MemoryStore | None = None, fault: Callable[[str], str] = lambda _: "") -> None:
        super().__init__(store or MemoryStore(lambda: 0.0), fault)
        self.clock_skew_seconds: float | None = 0.0
        self.refused = ""
        self.given: Mapping[str, str] = {}

    def list(self) -> list[Record]:
        self._refuse("list")
        return super().list()

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        self._refuse("update" if etag else "create")
        return super().put(key, fields, etag)

    def delete(self, key: str, etag: str) -> bool:
        self._refuse("delete")
        return super().delete(key, etag)

    def _refuse(self, operation: str) -> None:
        if operation == self.refused:
            raise BackendError(f"no {operation}", kind="denied")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Table], Table]:
    def use(table: Table) -> Table:
        def connect(_: Settings, __: FleetSettings, group: str, *, partition: str = "fleet") -> Table:
            table.given = {"group": group, "partition": partition}
            return table

        monkeypatch.setattr(command, "connect", connect)
        return table

    return use


def policy_file(tmp_path: Path, more: str = "") -> str:
    policy = tmp_path / "policy.yaml"
    fleet = f"fleet: {{group: web, table: '{TABLE}', max_events: 1{more}}}\n"
    policy.write_text(f"vm: {{name: web_3}}\n{fleet}", encoding="utf-8")
    return str(policy)


def test_status_and_release_ask_the_group(
    tmp_path: Path, use: Callable[[Table], Table], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    table = use(Table(filled(clock)))
    options = ["--config", policy_file(tmp_path, ", members: 'db_*'")]
    assert main(["fleet", "status", *options]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"Group web, in {TABLE}: 1 of 1 slots taken",
        "members does not match this VM, web_3: all VMs are waited for",
    ]
    assert table.given == {"group": "web", "partition": "fleet"}
    assert main(["fleet", "status", "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["warnings"] == ["members does not match this VM, web_3: all VMs are waited for"]
    assert answer["clock_skew_seconds"] == 0.0
    assert main(["fleet", "release", OTHER, *options]) == 1
    assert "web_5 was heard 0s ago" in capsys.readouterr().err
    clock.now += 200.0
    assert main(["fleet", "release", ONE, *options]) == 0
    told, *vms = capsys.readouterr().out.splitlines()
    assert told == f"Event {ONE} is released, the records of its VMs are deleted:"
    assert sorted(vms) == ["  web_0  ready, heard 6m 21s ago", "  web_1  not ready, heard 6m 21s ago"]
    assert main(["fleet", "release", OTHER, "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["event_id"], answer["vms"][0]["name"], answer["vms"][0]["age_seconds"]) == (
        OTHER,
        "web_5",
        200.0,
    )


def test_a_table_that_rejects_the_clock_is_reported(
    tmp_path: Path, use: Callable[[Table], Table], capsys: pytest.CaptureFixture[str]
) -> None:
    table = use(Table())
    table.refused = "list"
    table.clock_skew_seconds = 600.0
    for words in (["status"], ["release", ONE]):
        assert main(["fleet", *words, "--config", policy_file(tmp_path)]) == 1
        why = "this clock is 600 s ahead of the store's; synchronize the clock, and run this again"
        assert capsys.readouterr().err == f"scheduled-events-agent: no list; {why}\n"


def test_a_policy_without_a_fleet_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules: []\n", encoding="utf-8")
    assert main(["fleet", "status", "--config", str(policy)]) == 2
    assert capsys.readouterr().err == f"scheduled-events-agent: {policy} has no fleet\n"


def settings(more: str = "max_events: 2") -> Settings:
    return parse_settings(f"vm: {{name: web_3}}\nfleet: {{group: web, table: '{TABLE}', {more}}}", "p").settings


def examined(more: str = "max_events: 2") -> tuple[str, str]:
    given = settings(more)
    assert given.fleet is not None
    finding = examine(given, given.fleet, None)
    return finding.state, finding.message


@pytest.mark.parametrize("refused", ["list", "create", "update"])
def test_doctor_tries_each_right_and_leaves_no_record(use: Callable[[Table], Table], refused: str) -> None:
    table = use(Table())
    assert examined() == ("ok", f"group web: {TABLE} can be read, written and deleted from")
    assert table.given == {"group": "web", "partition": "doctor"}
    assert set(table.calls) == {"list", "put", "delete"}
    table.refused = refused
    assert examined() == ("error", f"no {refused}")
    assert table.store.list() == []


def test_doctor_needs_the_right_to_delete(use: Callable[[Table], Table]) -> None:
    table = use(Table())
    table.refused = "delete"
    assert examined() == ("error", "no delete")


def test_doctor_deletes_the_records_of_another_one(use: Callable[[Table], Table]) -> None:
    table = use(Table())
    table.store.put("web_3", {"by": "doctor"}, "")
    assert examined()[0] == "ok"
    assert table.store.list() == []


def test_doctor_detects_another_one_at_the_same_moment(use: Callable[[Table], Table]) -> None:
    class Busy(Table):
        def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
            return None if etag else super().put(key, fields, etag)

    use(Busy())
    assert examined() == ("warning", "another doctor that runs as this VM writes the same record")


def test_doctor_reports_a_clock_that_differs(use: Callable[[Table], Table]) -> None:
    table = use(Table())
    table.clock_skew_seconds = -40.0
    assert examined() == ("warning", "this clock is 40 s behind the store's")
    table.refused = "update"
    assert examined() == ("error", "no update; this clock is 40 s behind the store's")


def test_doctor_reports_a_table_without_ages(use: Callable[[Table], Table]) -> None:
    use(Table(MemoryStore(lambda: 0.0, has_ages=False)))
    state, text = examined()
    assert (state, text.partition(":")[0]) == ("warning", "the store does not tell when a record was written")


def test_doctor_reports_members_that_do_not_match_this_vm(use: Callable[[Table], Table]) -> None:
    use(Table())
    assert examined("max_events: 2, members: [db_*, web_*]")[0] == "ok"
    fault = "members does not match this VM, web_3: all VMs are waited for"
    assert examined("max_events: 2, members: [db_*]") == ("error", fault)


def test_doctor_warns_of_a_signature_that_expires(tmp_path: Path, use: Callable[[Table], Table]) -> None:
    file = tmp_path / "sas"
    file.write_text("sv=1&se=2026-01-01T00:00Z&sig=1", encoding="utf-8")
    use(Table())
    state, text = examined(f"credential: {{sas_file: '{file}'}}")
    assert state == "warning"
    assert f"the signature in {file} has expired" in text


def test_doctor_looks_at_the_signature_as_the_services_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(path: Path, purpose: str, user: str | None) -> str:
        return f"{user} cannot {purpose} {path.name}"

    monkeypatch.setattr(processes, "find_access_error", told)
    (tmp_path / "sas").write_text("sv=1&sig=2")
    fleet = FleetSettings(group="web", table=TABLE, credential=FleetCredential(sas_file=str(tmp_path / "sas")))
    finding = examine(Settings(), fleet, "agent")
    assert (finding.state, finding.message) == ("error", "agent cannot read sas")


def test_the_metrics_page_lists_each_kind_of_request_failure() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("- `result`: "))
    told = re.sub(r" \(.*?\)", "", line).removeprefix("- `result`: ok, or why it failed: ").split(", ")
    assert sorted(told) == sorted([*command._ADVICE, "bug"])
