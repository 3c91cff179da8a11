"""What ``fleet status`` and ``fleet release`` make of a group's rows."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import fleet as command
from scheduled_events_agent.cli import main
from scheduled_events_agent.cli.fleet import examine, in_words, look, release
from scheduled_events_agent.cli.terminal import Terminal
from scheduled_events_agent.fleet.ledger import LedgerError, Row
from scheduled_events_agent.fleet.memory import MemoryLedger
from scheduled_events_agent.fleet.rows import event_key_of
from scheduled_events_agent.host import processes
from scheduled_events_agent.settings import Settings, parse_settings
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
ONE, OTHER = "602D9444-D2CD-49C7-8624-8643E7171297", "602D9445-0000-49C7-8624-8643E7171297"
PLAIN = Terminal(width=None, has_colors=False)


def settings(more: str = "max_events: 2") -> FleetSettings:
    fleet = parse_settings(f"fleet: {{table: 'https://a.example/abc', {more}}}", "policy.yaml").settings.fleet
    assert fleet is not None
    return fleet


def take(ledger: MemoryLedger, slot: str, event_id: str, minutes: int = 40, vm: str = "web_3") -> None:
    until = (NOW + timedelta(minutes=minutes)).isoformat()
    ledger.put("slot|web", slot, {"event": event_key_of(event_id), "id": event_id, "vm": vm, "until": until})


def test_slots_and_vms_of_an_event_are_told() -> None:
    ledger, key = MemoryLedger(), event_key_of(ONE)
    take(ledger, "000", ONE)
    take(ledger, "001", OTHER, minutes=-1)
    resources = json.dumps(["_web_1", "web_2", "web_3", "db_1"])
    for vm, state in {"web_1": "ready", "web_2": "held"}.items():
        ledger.put("vm|web", f"{key}|{vm}", {"id": ONE, "state": state, "vm": vm, "resources": resources})
    shown = look(ledger, "web", settings("max_events: 2, expect: 'web_*'"), NOW)
    assert list(in_words(shown, PLAIN)) == [
        "Group web, in https://a.example/abc",
        "  slot 000        event 602D9444 of web_3, until 12:40:00Z",
        "  slot 001        free",
        "  event 602D9444  ready: web_1; not ready: web_2; awaited: web_3",
    ]
    (event,) = shown.events
    assert (event.ready, event.held, event.back, event.awaited) == (("web_1",), ("web_2",), (), ("web_3",))


def test_a_group_without_rows_or_limit_is_told() -> None:
    shown = look(MemoryLedger(), "Web", settings("expect: '*'"), NOW)
    assert list(in_words(shown, PLAIN))[1:] == [
        "The policy has no max_events: events begin without a slot.",
        "  events  none",
    ]


@pytest.mark.parametrize(("seconds", "told"), [(40.0, "ahead of"), (-40.0, "behind"), (20.0, ""), (None, "")])
def test_a_clock_that_differs_is_told(seconds: float | None, told: str) -> None:
    shown = look(MemoryLedger(), "web", settings(), NOW)
    lines = [*in_words(replace(shown, clock_skew_seconds=seconds), PLAIN)]
    expected = (
        [f"This clock is 40 s {told} the table's: slots may last longer or shorter than shown."] if told else []
    )
    assert lines[1:-3] == expected


class SkewedLedger(MemoryLedger):
    """Told apart from a table by its clock; may refuse to write over a row."""

    clock_skew_seconds = 0.0
    is_refusing = False

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        if self.fault("list_rows") == "refused":
            raise LedgerError("refused", kind="denied")
        return super().list_rows(partition, prefix)

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        if self.is_refusing and content is not None:
            raise LedgerError("no update", kind="denied")
        super().put(partition, key, content)


POLICY = parse_settings(
    "vm: {name: web_3}\nfleet: {group: web, table: 'https://a.example/abc', max_events: 1}", "p"
)


def examined(ledger: SkewedLedger, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(command, "connect", lambda *_: ledger)
    fleet = POLICY.settings.fleet
    assert fleet is not None
    finding = examine(POLICY.settings, fleet, None)
    assert ledger.list_rows("doctor|web") == [], "it leaves no row"
    return finding.state, finding.finding


def test_doctor_tries_each_right_and_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = SkewedLedger()
    assert examined(ledger, monkeypatch)[0] == "ok"
    ledger.put("doctor|web", "web_3", {"by": "doctor"})
    assert examined(ledger, monkeypatch) == ("warning", "another doctor that ran as this VM left its row")
    ledger.clock_skew_seconds = -40.0
    assert examined(ledger, monkeypatch) == ("warning", "this clock is 40 s behind the table's")
    ledger.is_refusing = True
    assert examined(ledger, monkeypatch) == ("failure", "no update; this clock is 40 s behind the table's")


def test_a_table_that_refuses_because_of_the_clock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = SkewedLedger(lambda _: "refused")
    ledger.clock_skew_seconds = 600.0
    monkeypatch.setattr(command, "connect", lambda *_: ledger)
    policy = tmp_path / "policy.yaml"
    policy.write_text("fleet: {group: web, table: 'https://a.example/abc', max_events: 1}\n", encoding="utf-8")
    for words in (["status"], ["release", "602d"]):
        assert main(["fleet", *words, "--config", str(policy)]) == 1
        why = "this clock is 600 s ahead of the table's; synchronize the clock, and run this again"
        assert capsys.readouterr().err == f"scheduled-events-agent: refused; {why}\n"


def test_doctor_warns_if_the_others_do_not_wait_for_this_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "connect", lambda *_: SkewedLedger())
    assert examine(POLICY.settings, settings("group: web, expect: [db_*, web_*]"), None).state == "ok"
    finding = examine(POLICY.settings, settings("group: web, expect: [db_*]"), None)
    assert (finding.state, finding.finding) == (
        "warning",
        "expect does not match this VM, web_3: the others approve before it is prepared",
    )


def test_doctor_warns_of_a_signature_that_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sas"
    file.write_text("sv=1&se=2026-01-01T00:00Z&sig=1", encoding="utf-8")
    monkeypatch.setattr(command, "connect", lambda *_: SkewedLedger())
    fleet = settings(f"group: web, credential: {{sas_file: '{file}'}}")
    finding = examine(POLICY.settings, fleet, None)
    assert finding.state == "warning"
    assert f"the signature in {file} has expired" in finding.finding


def test_doctor_looks_at_the_signature_as_the_services_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(path: Path, purpose: str, user: str | None) -> str:
        return f"{user} cannot {purpose} {path.name}"

    monkeypatch.setattr(processes, "access_fault", told)
    (tmp_path / "sas").write_text("sv=1&sig=2")
    fleet = FleetSettings(
        group="web", table="https://a.example/abc", credential=FleetCredential(sas_file=str(tmp_path / "sas"))
    )
    finding = examine(Settings(), fleet, "agent")
    assert (finding.state, finding.finding) == ("failure", "agent cannot read sas")


def test_rows_that_are_no_rows_of_an_agent_do_no_harm() -> None:
    ledger = MemoryLedger()
    ledger.put("slot|web", "000", {"event": "x", "until": "2999-01-01"})
    ledger.put("slot|web", "\x1b[31m", {"event": "\x1b[31m", "until": "soon"})
    ledger.put("vm|web", "y", {"resources": "{", "id": "\x1b[31mred"})
    ledger.put("vm|web", "y|z", {"state": "odd"})
    shown = look(ledger, "web", settings(), NOW)
    assert [slot.event_id for slot in shown.slots] == ["x", ""]
    assert all("\x1b" not in line for line in in_words(shown, PLAIN))


def test_the_slot_of_an_event_is_freed_by_the_beginning_of_its_id() -> None:
    ledger = MemoryLedger()
    take(ledger, "000", ONE)
    take(ledger, "001", OTHER)
    with pytest.raises(AgentError, match='2 events with a slot begin with "602d944"'):
        release(ledger, "web", "602d944", NOW)
    assert release(ledger, "web", "602d9444", NOW) == (ONE, ("000",))
    assert [slot.event_id for slot in look(ledger, "web", settings(), NOW).slots] == ["", OTHER]
    with pytest.raises(AgentError, match=f'no event with a slot begins with "602d9444"; events with one: {OTHER}'):
        release(ledger, "web", "602d9444", NOW)


def test_the_slot_of_vms_that_are_out_of_service_needs_the_full_id() -> None:
    ledger, key = MemoryLedger(), event_key_of(ONE)
    take(ledger, "000", ONE)
    for vm, state in {"web_1": "ready", "web_2": "held", "web_3": "back"}.items():
        ledger.put("vm|web", f"{key}|{vm}", {"state": state, "vm": vm})
    with pytest.raises(AgentError, match=f"^web_1, web_2 may be out of service .*give the full id: {ONE}$"):
        release(ledger, "web", ONE[:8], NOW)
    assert look(ledger, "web", settings(), NOW).slots[0].event_id == ONE
    assert release(ledger, "web", ONE.lower(), NOW) == (ONE, ("000",))


def test_a_slot_that_has_changed_meanwhile_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger()
    take(ledger, "000", ONE)
    rows = ledger.list_rows("slot|web")
    take(ledger, "000", OTHER)
    monkeypatch.setattr(ledger, "list_rows", lambda _: rows)
    with pytest.raises(AgentError, match="slot 000 has changed meanwhile"):
        release(ledger, "web", ONE, NOW)
    monkeypatch.undo()
    assert look(ledger, "web", settings(), NOW).slots[0].event_id == OTHER


def test_the_page_about_metrics_has_each_way_in_which_a_request_fails() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("- `result`: "))
    told = re.sub(r" \(.*?\)", "", line).removeprefix("- `result`: ok, or why it failed: ").split(", ")
    assert sorted(told) == sorted([*command._ADVICE, "bug"])


def test_a_policy_without_a_fleet_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules: []\n", encoding="utf-8")
    assert main(["fleet", "status", "--config", str(policy)]) == 2
    assert capsys.readouterr().err == f"scheduled-events-agent: {policy} has no fleet\n"
