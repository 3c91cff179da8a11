"""Signs of life for the service manager: only while engine, store and poller make progress."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_daemon import get, running

from scheduled_events_agent.daemon import daemon, status_source
from scheduled_events_agent.daemon import poller as polling
from scheduled_events_agent.imds.client import ImdsClient, ImdsError
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.store import Store

if sys.platform == "win32":
    pytest.skip("Windows has no watchdog for services", allow_module_level=True)


@contextmanager
def watched(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], bool]]:
    """A service manager that watches; gives a question: was there a heartbeat within so many seconds?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(directory / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        monkeypatch.setattr(daemon, "_TICK_SECONDS", 0.1)

        def is_alive(seconds: float) -> bool:
            listener.setblocking(False)  # what has come until now is old news
            with suppress(BlockingIOError):
                while True:
                    listener.recv(65536)
            deadline = time.monotonic() + seconds
            while (left := deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                with suppress(TimeoutError):
                    if listener.recv(65536) == b"WATCHDOG=1":
                        return True
            return False

        yield is_alive


def test_a_hung_store_sends_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, may_go_on = threading.Event(), threading.Event()

    def load_requests(*_: object) -> list[object]:
        hangs.set()
        may_go_on.wait(60.0)
        return []

    with (
        watched(tmp_path, monkeypatch) as is_alive,
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path, azure.endpoint()),
    ):
        assert is_alive(60.0)
        monkeypatch.setattr(Store, "load_requests", load_requests)
        assert hangs.wait(60.0)
        assert not is_alive(1.0)
        may_go_on.set()
        assert is_alive(60.0)


def test_a_hung_poller_stops_the_heartbeat_and_is_named_by_the_health_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, may_go_on = threading.Event(), threading.Event()

    def fetch(_: object) -> bytes:
        hangs.set()
        may_go_on.wait(60.0)
        raise ImdsError("gone on", kind="timeout")

    monkeypatch.setattr(polling, "_SLACK_SECONDS", 0.5)
    monkeypatch.setattr(status_source, "_STALL_SECONDS", 0.1)
    with (
        watched(tmp_path, monkeypatch) as is_alive,
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path, azure.endpoint()) as daemon,
    ):
        monkeypatch.setattr(ImdsClient, "fetch", fetch)
        assert hangs.wait(60.0)
        deadline = time.monotonic() + 60.0
        while is_alive(1.0):
            assert time.monotonic() < deadline
        assert "The poller has sent no heartbeat for more than 0.1s.\n" in get(daemon, "/healthz")[1]
        monkeypatch.undo()
        may_go_on.set()
        azure.wait_until(lambda: get(daemon, "/healthz") == (200, "ok\n"), "it was healthy again")
