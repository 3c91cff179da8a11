"""A time for people has one form, in all texts of the agent. Pure.

``tests/integration/test_cli_times.py`` has the commands; each agent of an end-to-end test shows its log.
"""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, get_args

import pytest
import test_workflow_walk
from msgspec.structs import replace
from status_samples import a_workflow, some_facts
from test_attention import NEEDED
from test_workflow_walk import OTHER, SHARED, Script, a_rule, walk
from time_forms import other_forms

from scheduled_events_agent.cli.status import _status
from scheduled_events_agent.cli.terminal import Terminal
from scheduled_events_agent.kubernetes.conditions import node_state
from scheduled_events_agent.kubernetes.events import event_of
from scheduled_events_agent.notifications import Notification, notifications_of, render
from scheduled_events_agent.status import AttentionKind, EventView
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.status.messages import with_messages
from scheduled_events_agent.workflow import (
    Context,
    Record,
    Result,
    Transition,
    Unprepared,
    UnpreparedKind,
    WaitKind,
    WaitReason,
    Workflow,
    advance,
)

NOW = datetime(2026, 4, 11, 22, 12, 0, 250_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Azure starts it at 03:28:42 UTC (in 14m 3s)", []),
        ("seen 2026-11-28 03:28:42 UTC", []),
        ("since 03:28:42Z", ["03:28:42Z"]),
        ("since 2026-11-28 03:28:42Z", ["03:28:42Z"]),
        ("since 2026-11-28T03:28:42Z", ["03:28:42Z"]),
        ("changed at 14:02", ["14:02"]),
        ("not before Sat, 28 Nov 2026 03:28:42 GMT", ["03:28:42"]),
        ("preparation may take 17.038s", ["17.038s"]),
        ("not ready for 1.2096e+06s", ["1.2096e+06s"]),
        ("begins at 03:28:42 UTC (in 14m 3s): lead 15m", []),
        ("begins at 03:28:42 UTC (in 14m 3s) (lead 15m)", ["(in 14m 3s) (lead 15m)"]),
        ("http://127.0.0.1:9769 in version 0.1.0, was paused for 6.2s", []),
    ],
)
def test_another_form_is_found(text: str, found: list[str]) -> None:
    assert [one.rstrip(",") for one in other_forms(text)] == found


def test_a_text_that_is_kept_has_the_date_of_each_time() -> None:
    assert other_forms("Azure starts it at 03:28:42 UTC", is_kept=True) == ["03:28:42"]
    assert other_forms("Azure starts it at 2026-11-28 03:28:42 UTC", is_kept=True) == []


def test_a_text_that_is_read_at_once_has_no_date_of_today() -> None:
    text = "since 2026-11-28 03:28:42 UTC"
    assert other_forms(text, today=date(2026, 11, 28)) == ["2026-11-28 03:28:42 UTC"]
    assert other_forms(text, today=date(2026, 11, 29)) == []


def shown_texts(facts: Facts) -> Iterator[str]:
    """Texts about these facts that are read at once."""
    shown = to_status(facts)
    yield shown.headline
    for event in shown.events:
        yield from event_texts(event)
    yield from _status(shown, Terminal(width=None, has_colors=False))


def kept_texts(transition: Transition, facts: Facts) -> Iterator[str]:
    """The journal, the log, notifications in each form, and what a cluster keeps."""
    told = with_messages(transition)
    for record in told.records:
        yield f"{record.text} {record.log_line} {record.addition}"
    for _, notification in notifications_of([told], facts):
        yield from notification_texts(notification)


def notification_texts(notification: Notification) -> Iterator[str]:
    yield json.loads(render("slack", notification)[1])["text"]
    yield from strings(json.loads(render("teams", notification)[1]))
    yield json.loads(render("pagerduty", notification)[1])["payload"]["summary"]
    yield event_of(notification, "node", "uid")["message"]
    yield from event_texts(notification.event)


def event_texts(event: EventView) -> Iterator[str]:
    yield from (event.activity, event.approval.text)
    if event.waits_for is not None:
        yield event.waits_for.text


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


@pytest.mark.parametrize(
    "script",
    [
        Script({"A": a_rule(approve="manual")}, appearances=1, has_operator=True, depth=4),
        Script({"A": a_rule(approve="never", drain_for=30.0)}, crashes=1, has_operator=True, depth=3),
        Script({"A": a_rule()}, appearances=1, may_flap=True, depth=4, resources=SHARED),
        Script({"A": a_rule(approve="immediately")}, appearances=1, resources=SHARED, depth=4),
        Script({"A": a_rule()}, has_operator=True, resources=OTHER, appearances=1, depth=3),
        Script({"R": a_rule("R")}, has_operator=True, appearances=1, depth=4),
    ],
    ids=["manual", "never", "shared", "staggered", "another VM", "recommendation"],
)
def test_every_text_of_a_life_has_the_form(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def checked_advance(workflows: Any, signals: Any, context: Context) -> Result:
        result = advance(workflows, signals, context)
        workflows = tuple(result.workflows.values())
        facts = some_facts(at=context.now, workflows=workflows)
        kept = {text for step in result.transitions for text in kept_texts(step, facts)}
        kept |= {one.message for one in node_state(workflows, "current", has_lifecycle=True).conditions}
        for text in kept - seen:
            assert other_forms(text, is_kept=True) == [], text
        for text in shown_texts(facts):
            assert other_forms(text, today=facts.at.date()) == [], text
        seen.update(kept)
        return result

    monkeypatch.setattr(test_workflow_walk, "advance", checked_advance)
    assert walk(script) > 10
    assert any(" UTC" in text for text in seen)


@pytest.mark.parametrize("at", [NOW + timedelta(minutes=3), NOW + timedelta(days=2), None])
@pytest.mark.parametrize("kind", get_args(WaitKind))
def test_every_reason_to_wait_has_the_form(kind: WaitKind, at: datetime | None) -> None:
    for phase in ("waiting", "prepared") if at else ("waiting", "prepared", "held"):  # a hold waits for no time
        waiting: Workflow = a_workflow(phase=phase, wait_reason=WaitReason(kind=kind, at=at, detail="lead 15m"))
        record = Record(kind="held" if phase == "held" else "waiting", wait_reason=waiting.wait_reason)
        facts = some_facts(at=NOW, workflows=(waiting,))
        for text in kept_texts(Transition(workflow=waiting, records=(record,)), facts):
            assert other_forms(text, is_kept=True) == [], text
        for later in (facts, replace(facts, at=NOW + timedelta(days=1))):
            for text in shown_texts(later):
                assert other_forms(text, today=later.at.date()) == [], text


@pytest.mark.parametrize("kind", get_args(UnpreparedKind))
def test_every_reason_for_an_unprepared_start_has_the_form(kind: UnpreparedKind) -> None:
    unprepared = Unprepared(kind=kind, at=NOW + timedelta(minutes=3), detail="lead 5m")
    started = a_workflow(phase="started", was_started=True, unprepared=unprepared)
    facts = some_facts(at=NOW, workflows=(started,))
    record = Record(kind="unprepared")
    for text in kept_texts(Transition(workflow=started, records=(record,)), facts):
        assert other_forms(text, is_kept=True) == [], text
    for text in shown_texts(facts):
        assert other_forms(text, today=NOW.date()) == [], text


@pytest.mark.parametrize("kind", get_args(AttentionKind))
def test_every_need_of_a_person_has_the_form(kind: AttentionKind) -> None:
    facts = NEEDED[kind][0]
    for at in (facts.at, facts.at + timedelta(minutes=20), facts.at + timedelta(days=1)):
        for text in shown_texts(replace(facts, at=at)):
            assert other_forms(text, today=at.date()) == [], text


def test_the_time_left_until_a_deadline_is_said_once_in_a_line() -> None:
    for facts, *_ in NEEDED.values():
        for line in shown_texts(facts):
            assert line.count("(in ") <= 1, line
            assert " left)" not in line, line
    held, restart = ("\n".join(shown_texts(NEEDED[kind][0])) for kind in ("prepare_failed", "restart_unsafe"))
    assert "Azure starts it at 22:26:12 UTC (in 14m 12s), prepared or not.\n" in held
    assert "What was prepared is not recovered. Act before 22:26:12 UTC (in 14m 12s).\n" in restart
