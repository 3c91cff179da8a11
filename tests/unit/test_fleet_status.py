"""What ``fleet status`` and ``fleet release`` make of a group's rows."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from agent import AgentError
from agent.cli.fleet import in_words, look, release
from agent.cli.terminal import Terminal
from agent.fleet.memory import MemoryLedger
from agent.fleet.protocol import event_key_of
from agent.settings import parse_settings
from agent.settings.model import FleetSettings

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
    ledger.put("event|web", key, {"id": ONE, "resources": resources, "at": NOW.isoformat()})
    for vm, state in {"web_1": "ready", "web_2": "held"}.items():
        ledger.put(f"ready|{key}", vm, {"state": state, "vm": vm})
    shown = look(ledger, "web", settings("max_events: 2, expect: 'web_*'"), NOW)
    assert list(in_words(shown, PLAIN)) == [
        "Group web, in https://a.example/abc",
        "  slot 000        event 602D9444 of web_3, until 12:40:00Z",
        "  slot 001        free",
        "  event 602D9444  ready: web_1; not ready: web_2; unknown: web_3",
    ]
    (event,) = shown.events
    assert (event.ready, event.held, event.back, event.awaited) == (("web_1",), ("web_2",), (), ("web_3",))


def test_a_group_without_rows_or_limit_is_told() -> None:
    shown = look(MemoryLedger(), "Web", settings("expect: '*'"), NOW)
    assert list(in_words(shown, PLAIN))[1:] == [
        "The policy has no max_events: events begin without a slot.",
        "  events  none",
    ]


def test_rows_that_are_no_rows_of_an_agent_do_no_harm() -> None:
    ledger = MemoryLedger()
    ledger.put("slot|web", "000", {"event": "x", "until": "2999-01-01"})
    ledger.put("slot|web", "\x1b[31m", {"event": "\x1b[31m", "until": "soon"})
    ledger.put("event|web", "y", {"resources": "{", "id": "\x1b[31mred"})
    ledger.put("ready|y", "z", {"state": "odd"})
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
