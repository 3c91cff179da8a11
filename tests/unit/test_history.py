"""The journal as one list, and what of a record about the agent every local user may read."""

from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.status import AgentRecordKind, JournalRecord
from scheduled_events_agent.status.facts import History
from scheduled_events_agent.status.history import _PUBLIC_TEXTS, merge, place, to_journal, to_public
from scheduled_events_agent.workflow import Workflow

BEGAN = datetime(2026, 3, 4, 3, 0, tzinfo=UTC)


def a_record(minutes: float, kind: str, text: str = "", *, key: str = "", detail: str = "") -> JournalRecord:
    return JournalRecord(
        at=BEGAN + timedelta(minutes=minutes),
        key=key,
        event_id=key,
        kind=kind,
        stage="",
        hook="",
        outcome="",
        text=text,
        detail=detail,
    )


def a_history(id_: str, begins: float, ends: float | None = None) -> History:
    at = BEGAN + timedelta(minutes=begins)
    workflow = Workflow(
        id=id_,
        event=ScheduledEvent(id=id_, type="Reboot", status="Scheduled", resources=("web-1",)),
        decision=Decision(rule="r", reason="rule r matches it", affects="self"),
        first_seen_at=at,
        not_before_seen_at=at,
        boot_id="boot",
    )
    records = [a_record(begins, "seen", key=id_)]
    if ends is not None:
        records.append(a_record(ends, "closed", key=id_))
    return History(workflow=workflow, records=tuple(records))


def names(items: list[History | JournalRecord]) -> list[str]:
    return [item.workflow.id if isinstance(item, History) else item.text for item in items]


def reloads(*minutes: float) -> list[JournalRecord]:
    return [a_record(at, "reloaded", f"{at:g}") for at in minutes]


def test_each_record_is_there_once_and_the_oldest_item_is_first() -> None:
    histories = [a_history("past", 10, 20), a_history("within", 15, 18), a_history("open", 40)]
    items = merge(histories, reloads(50, 5, 10, 16, 20, 21, 45))
    assert names(items) == ["5", "past", "10", "within", "16", "20", "21", "open", "45", "50"]
    placed = [(names([one.item])[0], [record.text for record in one.during]) for one in place(items)]
    assert placed == [
        ("5", []),
        ("past", ["10", "16", "20"]),
        ("within", ["16"]),
        ("21", []),
        ("open", ["45", "50"]),
    ]
    journal = to_journal(items, BEGAN)
    assert [item.event.key if item.event else item.records[0].text for item in journal.histories] == names(items)


@pytest.mark.parametrize(
    ("most_between", "most_during", "expected"),
    [
        (None, None, ["1", "2", "past", "11", "12", "30", "open", "41", "42"]),
        (0, None, ["past", "11", "12", "open", "41", "42"]),
        (2, None, ["2", "past", "11", "12", "30", "open", "41", "42"]),
        (None, 1, ["1", "2", "past", "12", "30", "open", "42"]),
        (1, 0, ["past", "30", "open"]),
    ],
)
def test_each_event_and_the_times_between_keep_the_latest_records(
    most_between: int | None, most_during: int | None, expected: list[str]
) -> None:
    histories = [a_history("past", 10, 20), a_history("open", 40)]
    records = reloads(1, 2, 11, 12, 30, 41, 42)
    assert names(merge(histories, records, most_between=most_between, most_during=most_during)) == expected


def test_it_is_decided_for_each_kind_of_record_about_the_agent_what_every_local_user_may_read() -> None:
    assert set(_PUBLIC_TEXTS) == set(get_args(AgentRecordKind))
    assert list(_PUBLIC_TEXTS) == sorted(_PUBLIC_TEXTS)


@pytest.mark.parametrize("kind", [*get_args(AgentRecordKind), "of_another_version"])
def test_the_pages_show_of_a_record_about_the_agent_what_the_status_shows(kind: str) -> None:
    shown = to_public(a_record(0, kind, "p.yaml:1: hooks.x.run: curl SECRET", detail="the boot"))
    assert (shown.at, shown.kind, shown.detail) == (BEGAN, kind, "")
    assert ("SECRET" in shown.text) is (kind not in ("of_another_version", "on_clear", "reload_rejected"))
