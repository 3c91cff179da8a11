"""A request for the document that has no answer: others go out beside it, and what is late is no news."""

import queue
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_daemon import running

from scheduled_events_agent.daemon import poller as polling
from scheduled_events_agent.daemon.poller import Poller
from scheduled_events_agent.engine import Message, Snapshot
from scheduled_events_agent.imds import client as imds
from scheduled_events_agent.imds.client import ImdsClient, ImdsError
from scheduled_events_agent.imds.document import ApiVersion, Document
from scheduled_events_agent.policy.settings import ImdsSettings, Settings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.telemetry.metrics import Metrics

PATIENCE = 60.0


def document(number: int) -> bytes:
    return b'{"DocumentIncarnation": %d, "Events": []}' % number


class Service:
    """Its first request is answered when the test says so, and with what it says; the others at once."""

    def __init__(self) -> None:
        self.asked = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.is_long: list[bool] = []
        self.clock_skew_seconds: float | None = None
        self.on_wait: Callable[[float], None] = lambda _: None
        self.first_answer: bytes | ImdsError = b""
        self.may_answer = threading.Event()
        self._lock = threading.Lock()

    def connect(
        self,
        _endpoint: str,
        _version: ApiVersion,
        *,
        request_timeout: float,
        first_request_timeout: float = 0.0,
        longest: float,
        on_wait: Callable[[float], None] = lambda _: None,
        **_: object,
    ) -> "Service":
        assert request_timeout < longest
        assert longest == inf  # there is but one version
        self.is_long.append(first_request_timeout > 0)
        if self.asked == 0:
            self.on_wait = on_wait
        return self

    def fetch(self) -> bytes:
        with self._lock:
            self.asked += 1
            number = self.asked
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if number > 1:
                return document(min(number, 3))
            deadline = time.monotonic() + PATIENCE
            while not self.may_answer.wait(0.01):  # as the client does, with a word before each wait
                assert time.monotonic() < deadline
                self.on_wait(0.01)
            if isinstance(self.first_answer, ImdsError):
                raise self.first_answer
            return self.first_answer
        finally:
            with self._lock:
                self.in_flight -= 1


SETTINGS = Settings(imds=ImdsSettings(poll_interval=0.05))


def snapshot() -> Snapshot:
    return cast("Snapshot", SimpleNamespace(settings=SETTINGS, names=(), needs_answer=False))


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("late", [document(1), ImdsError("GET", kind="timeout"), b"<html>"])
def test_a_late_answer_does_not_overwrite_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, late: bytes | ImdsError
) -> None:
    monkeypatch.setattr(polling, "_HEDGE_AFTER_SECONDS", 0.05)
    service, metrics = Service(), Metrics(tuple)
    monkeypatch.setattr(polling, "connect", service.connect)
    service.first_answer = late
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    poller = Poller(snapshot, inbox.put, metrics)
    threads = [threading.Thread(target=work) for work in (poller.run, poller.run_hedge)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: service.asked >= 6, "others go out beside the first one")
        service.may_answer.set()
        asked = service.asked
        wait_until(lambda: service.asked > asked + 3, "the poller goes on")
    finally:
        service.may_answer.set()
        poller.stop()
        for thread in threads:
            thread.join(PATIENCE)
    assert service.most_in_flight == 2
    assert service.is_long[0]
    assert not any(service.is_long[1:])
    documents = []
    while not inbox.empty():
        news = inbox.get_nowait()
        if isinstance(news, Document):
            documents.append(news.incarnation)
    assert documents == ["2", "3"]
    assert poller.error is None


def test_the_answers_of_hedged_requests_show_a_wrong_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_HEDGE_AFTER_SECONDS", 0.05)
    service = Service()
    service.clock_skew_seconds = 600.0
    monkeypatch.setattr(polling, "connect", service.connect)
    poller = Poller(snapshot, lambda _: None, Metrics(tuple))
    threads = [threading.Thread(target=work) for work in (poller.run, poller.run_hedge)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: poller.clock_wrong, "the clock is found wrong")
        assert not service.may_answer.is_set()
        assert service.asked >= 11
    finally:
        service.may_answer.set()
        poller.stop()
        for thread in threads:
            thread.join(PATIENCE)
    assert poller.clock_wrong is not None
    assert poller.clock_wrong.seconds_ahead == 600.0


def test_the_longer_limit_is_for_the_requests_before_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ImdsError("GET", kind="refused")
    answers: list[bytes | ImdsError] = [failure, failure, document(1), failure, document(2)]
    asked: list[bool] = []

    class Client:
        clock_skew_seconds = None

        def __init__(self, *, is_long: bool) -> None:
            self._is_long = is_long

        def fetch(self) -> bytes:
            asked.append(self._is_long)
            answer = answers[len(asked) - 1]
            if isinstance(answer, ImdsError):
                raise answer
            return answer

    def connect(*_: object, first_request_timeout: float, **__: object) -> Client:
        return Client(is_long=first_request_timeout > 0)

    def put(news: Message) -> None:
        if isinstance(news, Document) and news.incarnation == "2":
            poller.stop()

    monkeypatch.setattr(polling, "connect", connect)
    poller = Poller(snapshot, put, Metrics(tuple))
    poller.run()
    # The client of the first answer keeps its longer limit by itself only until then.
    assert asked == [True, True, True, True, False]


@pytest.mark.parametrize("has_run", [True, False], ids=["after a restart", "at the first start"])
def test_a_preempt_is_acted_on_while_the_first_request_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    connect = imds.connect
    is_long: list[bool] = []

    def connecting(endpoint: str, *versions: ApiVersion, **options: Any) -> ImdsClient:
        if threading.current_thread().name == "poller":
            is_long.append(options["first_request_timeout"] > 0)
        return connect(endpoint, *versions, **options)

    with Simulator(vms=("vm-1",)) as azure:
        if has_run:
            with running(tmp_path, azure.endpoint(), request_timeout=60.0) as daemon:
                wait_until(lambda: daemon._poller.succeeded, "the service has answered")
        azure.fault("vm-1", "stall", on="poll", count=1)
        monkeypatch.setattr(polling, "connect", connecting)
        with running(tmp_path, azure.endpoint(), request_timeout=60.0) as daemon:
            azure.wait_until(lambda: not azure.faults(), "the first request has no answer")
            event = azure.schedule("Preempt", notice_seconds=30)
            approved_at = azure.wait_approved(event, timeout_seconds=25).approved_at
            assert approved_at is not None
            assert daemon._poller._sent is not None
            assert daemon._poller._last_number > 1
            assert is_long == [True]
