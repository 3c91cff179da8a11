"""The thread that asks the fleet's store, and its reports of the store's answers to log, metrics and engine."""

import queue
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from memory_backend import MemoryBackend, MemoryStore
from msgspec.structs import replace
from structlog.testing import capture_logs

from scheduled_events_agent.daemon.fleet import FleetThread
from scheduled_events_agent.engine import FleetUpdate
from scheduled_events_agent.fleet import client
from scheduled_events_agent.fleet.backend import BackendError, ErrorKind, Record
from scheduled_events_agent.fleet.client import FleetClient
from scheduled_events_agent.policy.settings import FleetSettings, KubernetesSettings, Settings
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import FleetRequest

REQUEST = FleetRequest(
    event="a",
    workflow_id="a@1",
    event_id="A",
    not_before=datetime.now(UTC) + timedelta(minutes=15),
    vm="web_1",
    stage="requested",
    needs_slot=True,
    lacks_slot=False,
    needs_all=False,
    requested_vms=("web_1",),
    seen_at=0.0,
)
SETTINGS = Settings(fleet=FleetSettings(table="https://a.example/abc", max_events=1))


class FailingBackend(MemoryBackend):
    """Fails in these ways, one after the other, and then works."""

    def __init__(self, *kinds: ErrorKind) -> None:
        super().__init__(MemoryStore(time.monotonic))
        self.kinds = [*kinds]

    def list(self) -> list[Record]:
        if self.kinds:
            raise BackendError("it fails", kind=self.kinds.pop(0))
        return super().list()


@contextmanager
def running(thread: FleetThread) -> Iterator[list[MutableMapping[str, Any]]]:
    """The log while the thread runs."""
    with capture_logs() as entries:
        runner = threading.Thread(target=thread.run)
        runner.start()
        try:
            yield entries
        finally:
            thread.stop()
            runner.join()


def until(updates: "queue.Queue[Any]", is_wanted: Any) -> FleetUpdate:
    deadline = time.monotonic() + 60
    while True:
        update: FleetUpdate = updates.get(timeout=max(0.1, deadline - time.monotonic()))
        if is_wanted(update):
            return update


def has_slot(update: FleetUpdate) -> bool:
    return "a" in update.statuses and update.statuses["a"].has_slot


def lived(*kinds: ErrorKind) -> tuple[list[MutableMapping[str, Any]], str]:
    """Log and metrics when a store fails so and then works, until the event may begin."""
    metrics, updates = Metrics(list), queue.Queue[Any]()
    backend = FailingBackend(*kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_BACKOFF_SECONDS", (0.1, 1.0))
        thread = FleetThread(updates.put_nowait, metrics, SETTINGS, lambda *_: backend)
        with running(thread) as entries:
            thread.publish((REQUEST,), ("web_1",), "id", "web")
            until(updates, has_slot)
    return entries, metrics.expose().decode()


def test_each_kind_of_failure_is_logged_once_and_only_tries_are_counted() -> None:
    entries, metrics = lived("unreachable", "unreachable", "denied")
    assert [(entry["event"], entry.get("kind"), entry["failures"]) for entry in entries] == [
        ("using the fleet's store fails", "unreachable", 1),
        ("using the fleet's store fails", "denied", 3),
        ("using the fleet's store works again", None, 3),
    ]
    for result, count in {"unreachable": 2, "denied": 1}.items():
        series = f'scheduled_events_fleet_requests_total{{operation="list",result="{result}"}} {count}.0'
        assert series in metrics.splitlines()


def test_a_working_backend_is_counted_and_not_logged() -> None:
    entries, metrics = lived()
    assert entries == []
    assert 'scheduled_events_fleet_requests_total{operation="create",result="ok"} 1.0' in metrics
    assert 'scheduled_events_fleet_requests_total{operation="list",result="ok"} 2.0' in metrics
    assert 'scheduled_events_fleet_wait_seconds_count{what="slot"} 0.0' in metrics, "it did not wait"
    assert "scheduled_events_fleet_unavailable 0.0" in metrics


def test_nothing_is_sent_before_the_first_requests() -> None:
    backend = FailingBackend()
    updates = queue.Queue[Any]()
    thread = FleetThread(updates.put_nowait, Metrics(list), SETTINGS, lambda *_: backend)
    with running(thread):
        thread.reconfigure(SETTINGS)
        time.sleep(0.2)
        assert backend.calls == []
        thread.publish((), ("web_1",), "id", "web")
        deadline = time.monotonic() + 60
        while not backend.calls:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert backend.calls == ["list"]


def test_an_unchanged_request_does_not_wake_it_again(monkeypatch: Any) -> None:
    syncs: list[object] = []
    real = FleetClient.sync

    def sync(self: FleetClient, requests: Any) -> None:
        syncs.append(requests)
        real(self, requests)

    monkeypatch.setattr(FleetClient, "sync", sync)
    updates = queue.Queue[Any]()
    thread = FleetThread(updates.put_nowait, Metrics(list), SETTINGS, lambda *_: FailingBackend())
    with running(thread):
        thread.publish((), ("web_1",), "id", "web")
        until(updates, lambda update: not update.error)
        for _ in range(100):
            thread.publish((), ("web_1",), "id", "web")
        thread.publish((REQUEST,), ("web_1",), "id", "web")
        until(updates, has_slot)
    assert len(syncs) == 2


def test_a_fleet_without_a_group_or_a_vm_id_cannot_use_its_backend() -> None:
    metrics, updates = Metrics(list), queue.Queue[Any]()
    thread = FleetThread(updates.put_nowait, metrics, SETTINGS, lambda *_: FailingBackend())
    with running(thread) as entries:
        thread.publish((), (), "id", "")
        assert until(updates, lambda update: update.error).error.startswith("the group is not known")
        assert "scheduled_events_fleet_unavailable 1.0" in metrics.expose().decode()
        thread.publish((), (), "", "web")
        text = "the metadata service has not reported the vmId of this VM yet"
        update = until(updates, lambda update: update.error == text)
        assert update.unavailable_since is not None
        thread.publish((REQUEST,), ("web_1",), "id", "web")
        until(updates, has_slot)
    assert [entry["event"] for entry in entries] == [
        "using the fleet's store fails", "using the fleet's store works again"
    ]  # fmt: skip


def test_a_configuration_error_is_logged_once() -> None:
    store = MemoryStore(time.monotonic)
    first, second = queue.Queue[Any](), queue.Queue[Any]()
    settings = Settings(fleet=FleetSettings(table="https://a.example/abc", max_events=1, members=("wbe_*",)))
    one = FleetThread(first.put_nowait, Metrics(list), settings, lambda *_: MemoryBackend(store))
    with running(one):
        one.publish((REQUEST,), ("web_1",), "id", "web")
        until(first, has_slot)
    two = FleetThread(second.put_nowait, Metrics(list), settings, lambda *_: MemoryBackend(store))
    with running(two) as entries:
        two.publish((REQUEST,), ("web_1",), "id-2", "web")
        update = until(second, lambda update: "a" in update.statuses)
        assert update.statuses["a"].other_vm_id == "id"
        two.publish((replace(REQUEST, seen_at=1.0),), ("web_1",), "id-2", "web")
        time.sleep(0.2)
    assert [(int(entry["log_id"]), entry["reason"], entry["log_level"]) for entry in entries] == [
        (343, "members does not match this VM, web_1: all VMs are waited for", "error"),
        (342, "another VM uses the name of this one: vmId id, this one has id-2", "error"),
    ]


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(fleet=FleetSettings(table="https://a.example/abc", group="other", max_events=1))],
    ids=["no fleet", "another group"],
)
def test_a_vm_that_leaves_a_group_deletes_its_records_there(settings: Settings) -> None:
    stores = {"web": MemoryStore(time.monotonic), "other": MemoryStore(time.monotonic)}
    updates = queue.Queue[Any]()

    def connect(_: Settings, __: FleetSettings, group: str) -> MemoryBackend:
        return MemoryBackend(stores[group])

    thread = FleetThread(updates.put_nowait, Metrics(list), SETTINGS, connect)
    with running(thread):
        thread.publish((REQUEST,), ("web_1",), "id", "web")
        until(updates, has_slot)
        assert stores["web"].list()
        thread.reconfigure(settings)
        deadline = time.monotonic() + 60
        while stores["web"].list():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("fleet", "opened"),
    [
        (FleetSettings(leases="events", max_events=1), 2),
        (FleetSettings(table="https://a.example/abc", max_events=1), 1),
    ],
    ids=["Leases", "table"],
)
def test_another_kubeconfig_does_not_free_the_slot(fleet: FleetSettings, opened: int) -> None:
    store = MemoryStore(time.monotonic)
    updates = queue.Queue[Any]()
    seen = []

    class Watched(MemoryBackend):
        def delete(self, key: str, etag: str) -> bool:
            raise AssertionError(f"it has deleted {key} of {etag}")

    def connect(settings: Settings, *_: object) -> MemoryBackend:
        seen.append(settings.kubernetes)
        return Watched(store)

    thread = FleetThread(updates.put_nowait, Metrics(list), Settings(fleet=fleet), connect)
    with running(thread) as entries:
        thread.publish((replace(REQUEST, stage="not_ready"),), ("web_1",), "id", "web")
        until(updates, lambda _: bool(store.list()))
        thread.reconfigure(Settings(fleet=fleet, kubernetes=KubernetesSettings(kubeconfig="/other")))
        deadline = time.monotonic() + 60
        while len(seen) < opened:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
    assert len(seen) == opened
    assert store.list()
    assert entries == []


def test_another_limit_does_not_free_the_slot() -> None:
    store = MemoryStore(time.monotonic)
    updates = queue.Queue[Any]()
    thread = FleetThread(updates.put_nowait, Metrics(list), SETTINGS, lambda *_: MemoryBackend(store))
    with running(thread):
        thread.publish((replace(REQUEST, stage="not_ready"),), ("web_1",), "id", "web")
        until(updates, lambda _: bool(store.list()))
        etags = {record.key: record.etag for record in store.list()}
        fleet = FleetSettings(table="https://a.example/abc", max_events=2)
        thread.reconfigure(Settings(fleet=fleet))
        thread.publish((replace(REQUEST, stage="not_ready"),), ("web_1",), "id", "web")
        until(updates, lambda update: update.settings == fleet)
        deadline = time.monotonic() + 60
        while [record.etag for record in store.list()] == [*etags.values()]:
            assert store.list(), "it was deleted"
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_bug_while_it_leaves_a_group_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(time.monotonic)
    updates = queue.Queue[Any]()
    other = FleetSettings(table="https://a.example/abc", group="other", max_events=1)
    thread = FleetThread(updates.put_nowait, Metrics(list), SETTINGS, lambda *_: MemoryBackend(store))
    with running(thread) as entries:
        thread.publish((REQUEST,), ("web_1",), "id", "web")
        until(updates, has_slot)
        monkeypatch.delattr(MemoryStore, "delete")
        thread.reconfigure(Settings(fleet=other))
        thread.publish((REQUEST,), ("web_1",), "id", "web")
        until(updates, lambda update: update.settings == other and has_slot(update))
    assert "a bug in the agent" in [entry["event"] for entry in entries]
