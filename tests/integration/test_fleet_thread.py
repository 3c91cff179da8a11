"""The thread that asks the fleet's table: what log and metrics say of how the table answers."""

import queue
import threading
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta
from typing import Any

from structlog.testing import capture_logs

from scheduled_events_agent.daemon.fleet import FleetThread
from scheduled_events_agent.fleet.ledger import LedgerError, Row
from scheduled_events_agent.fleet.memory import MemoryLedger
from scheduled_events_agent.metrics import Metrics
from scheduled_events_agent.settings import Settings
from scheduled_events_agent.settings.model import FleetSettings
from scheduled_events_agent.workflow import Wish

WISH = Wish(
    event="a",
    workflow="a@1",
    event_id="A",
    resources=("web_1",),
    not_before=datetime.now(UTC) + timedelta(minutes=15),
    own="web_1",
    expected=("web_1",),
    needs_slot=True,
    needs_all=False,
    stage="begin",
)


class FailingLedger(MemoryLedger):
    """Fails in these ways, one after the other, and then works."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = list(kinds)

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        if self.kinds:
            raise LedgerError("it fails", kind=self.kinds.pop(0))
        return super().list_rows(partition, prefix)


def lived(*kinds: str) -> tuple[list[MutableMapping[str, Any]], str]:
    """Log and metrics when a table fails so and then works, of a thread that hears news all the time."""
    ledger, metrics = FailingLedger(*kinds), Metrics(list)
    told: list[Any] = []
    settings = Settings(fleet=FleetSettings(table="https://a.example/abc", max_events=1))
    thread = FleetThread(told.append, metrics, settings, lambda *_: ledger)
    with capture_logs() as entries:
        runner = threading.Thread(target=thread.run)
        runner.start()
        try:
            deadline = time.monotonic() + 60
            while not (told and told[-1].standings.get("a") and told[-1].standings["a"].has_slot):
                assert time.monotonic() < deadline, entries
                thread.wish((WISH,), ("web_1",), "id", "web")
                time.sleep(0.05)
        finally:
            thread.stop()
            runner.join()
    return entries, metrics.expose().decode()


def test_each_kind_of_failure_is_logged_once_and_only_tries_are_counted() -> None:
    entries, metrics = lived("unreachable", "unreachable", "denied")
    assert [(entry["event"], entry.get("kind"), entry["failures"]) for entry in entries] == [
        ("using the fleet's table fails", "unreachable", 1),
        ("using the fleet's table fails", "denied", 3),
        ("using the fleet's table works again", None, 3),
    ]
    for result, count in {"unreachable": 2, "denied": 1}.items():
        series = f'scheduled_events_fleet_requests_total{{operation="list",result="{result}"}} {count}.0'
        assert series in metrics.splitlines()


def test_a_table_that_works_is_counted_and_not_logged() -> None:
    entries, metrics = lived()
    assert entries == []
    assert 'scheduled_events_fleet_requests_total{operation="put_if_unchanged",result="ok"} 1.0' in metrics
    assert 'scheduled_events_fleet_wait_seconds_count{what="slot"} 1.0' in metrics
    assert 'scheduled_events_fleet_wait_seconds_count{what="ready"} 0.0' in metrics
    assert "scheduled_events_fleet_table_away 0.0" in metrics


def test_a_fleet_without_a_group_cannot_use_its_table() -> None:
    metrics, told = Metrics(list), queue.Queue[Any]()
    settings = Settings(fleet=FleetSettings(table="https://a.example/abc"))
    thread = FleetThread(told.put, metrics, settings, lambda *_: MemoryLedger())
    thread.wish((), (), "id", "")
    with capture_logs() as entries:
        runner = threading.Thread(target=thread.run)
        runner.start()
        try:
            assert told.get(timeout=60).failure.startswith("the group is not known")
        finally:
            thread.stop()
            runner.join()
    assert [entry["event"] for entry in entries] == ["using the fleet's table fails"]
    assert "scheduled_events_fleet_table_away 1.0" in metrics.expose().decode()
