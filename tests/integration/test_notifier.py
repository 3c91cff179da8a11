"""Each notification of a state file arrives at least once and in order, whatever the service does."""

import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import structlog
from metric_values import value_of
from msgspec.structs import replace
from receiver import WAYS_TO_FAIL, Receiver, wait_until

from scheduled_events_agent.daemon import notifier as module
from scheduled_events_agent.daemon.notifier import Notifier, new_backoff
from scheduled_events_agent.engine import NotificationDone
from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.notifications import SAMPLE
from scheduled_events_agent.policy.settings import NotifyTarget, SecretFile
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.store.outbox import MAX_NOTIFICATIONS
from scheduled_events_agent.telemetry.metrics import Metrics

NOW = datetime.now(UTC)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path, NOW)
    yield store
    store.close()


def put(
    store: Store, count: int, target: str = "ops", at: datetime = NOW, first: int = 0
) -> list[tuple[str, str]]:
    bodies = [msgspec.json.encode(replace(SAMPLE, id=str(first + number))).decode() for number in range(count)]
    with store._transaction():
        return store.outbox.add(at.isoformat(), [(target, body) for body in bodies])


class Run:
    """Notifier, and what they report."""

    def __init__(self, store: Store, *targets: NotifyTarget) -> None:
        self.reports: queue.SimpleQueue[NotificationDone] = queue.SimpleQueue()
        self.metrics = Metrics(tuple)
        self.notifier = Notifier(store.path.parent, self.reports.put, self.metrics)
        self.targets = targets

    def ended(self) -> list[int]:
        found = []
        while not self.reports.empty():
            found.append(self.reports.get().id)
        return found

    def dropped(self, reason: str, target: str = "ops") -> float:
        return value_of(self.metrics.notifications_dropped.labels(target, reason))


@contextmanager
def sending(store: Store, *targets: NotifyTarget) -> Iterator[Run]:
    run = Run(store, *targets)
    run.notifier.reconfigure(targets)
    try:
        yield run
    finally:
        run.notifier.reconfigure(())
        wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("notify-")], "they ended")


def to(receiver: Receiver, name: str = "ops", timeout: float = 5.0) -> NotifyTarget:
    return NotifyTarget(name=name, to=receiver.url, timeout=timeout)


def ids(receiver: Receiver) -> list[int]:
    return [int(body["id"]) for body in receiver.taken]


def in_order(found: list[int]) -> list[int]:
    """Without the repetitions of at-least-once."""
    return list(dict.fromkeys(found))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "next_delay", lambda *_: 0.01)


@pytest.mark.usefixtures("quick")
def test_all_arrive_in_order_at_a_service_that_fails_half_the_time(store: Store) -> None:
    dice = random.Random(20261122)

    def behave() -> str:
        return dice.choice(WAYS_TO_FAIL) if dice.random() < 0.45 else "ok"

    put(store, 40)
    with Receiver(behave) as receiver, sending(store, to(receiver, timeout=0.5)) as run:
        wait_until(lambda: run.reports.qsize() == 40, "all were reported")
        assert in_order(ids(receiver)) == [*range(40)]
        assert run.ended() == [*range(1, 41)]
        assert receiver.attempts > 40
        assert run.notifier.failures() == {}


def test_a_reported_notification_is_not_sent_again_before_the_engine_forgets_it(store: Store) -> None:
    put(store, 3)
    with Receiver() as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: run.reports.qsize() == 3, "all were reported")
        put(store, 1, first=3)
        run.notifier.notify(is_urgent=False)
        wait_until(lambda: run.reports.qsize() == 4, "the next was reported")
        assert ids(receiver) == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["says nothing", "a byte a second", "closes at once"])
def test_a_dead_target_delays_no_other(store: Store, way: str) -> None:
    put(store, 5, "dead")
    put(store, 5, "alive")
    with (
        Receiver(lambda: way) as dead,
        Receiver() as alive,
        sending(store, to(dead, "dead", timeout=2.0), to(alive, "alive")),
    ):
        wait_until(lambda: ids(alive) == [*range(5)], "the other had all")
        assert ids(dead) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", ["400", "422"])
def test_a_rejected_notification_is_counted_and_the_next_one_is_sent(store: Store, way: str) -> None:
    answers = iter([way, "ok"])
    put(store, 2)
    with (
        structlog.testing.capture_logs() as log,
        Receiver(lambda: next(answers)) as receiver,
        sending(store, to(receiver)) as run,
    ):
        wait_until(lambda: run.reports.qsize() == 2, "both were reported")
        assert (ids(receiver), run.dropped("refused")) == ([1], 1)
        assert run.reports.get() == NotificationDone(1, "ops", f"it answers {way}")
        assert run.reports.get() == NotificationDone(2, "ops")
    reasons = [entry.get("reason") for entry in log if entry["log_level"] == "warning"]
    assert reasons == [f"it answers {way}"]
    assert not any("secret" in str(entry) for entry in log)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", ["302", "401", "402", "403", "404", "405", "407", "409", "410", "425", "451"])
def test_a_notification_is_retried_after_a_response_that_is_not_about_its_body(store: Store, way: str) -> None:
    answers = iter([way, way, "ok", "ok"])
    put(store, 2)
    with Receiver(lambda: next(answers)) as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: run.reports.qsize() == 2, "both were reported")
        assert (ids(receiver), run.dropped("refused"), run.dropped("too_old")) == ([0, 1], 0, 0)


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_notifications_held_back_by_an_old_token_arrive_in_order_with_a_new_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_reloaded: bool
) -> None:
    pauses: list[float] = []

    next_delay = Backoff.next_delay

    def pause(backoff: Backoff, retry_after: float | None) -> float:
        pauses.append(next_delay(backoff, retry_after))
        return 3600.0 if is_reloaded else 0.01

    monkeypatch.setattr(Backoff, "next_delay", pause)
    token = tmp_path / "token"
    token.write_text("Bearer old")
    put(store, 3)

    with Receiver() as receiver:
        receiver.token = "Bearer new"
        secret = SecretFile(file=str(token))
        target = NotifyTarget(name="ops", to=receiver.url, headers={"Authorization": secret})
        with sending(store, target) as run:
            wait_until(lambda: len(pauses) == 1 if is_reloaded else len(pauses) > 20, "the old one was denied")
            assert run.notifier.failures()["ops"].reason == "it answers 401"
            token.write_text("Bearer new")
            if is_reloaded:
                run.notifier.reconfigure([target])
            wait_until(lambda: run.reports.qsize() == 3, "all were reported")
            assert run.notifier.failures() == {}
    answers = [(answer, body["id"]) for answer, _, body in receiver.posts]
    assert set(answers[:-3]) == {("401", "0")}
    assert answers[-3:] == [("ok", "0"), ("ok", "1"), ("ok", "2")]
    assert {body["time"] for _, _, body in receiver.posts} == {"2026-01-01T12:00:00Z"}
    assert max(pauses) <= 300.0
    assert not is_reloaded or len(pauses) == 1


@pytest.mark.usefixtures("quick")
def test_a_notification_that_expired_while_the_machine_was_off_is_still_tried(store: Store) -> None:
    answers = iter(["503", "closes at once", "ok"])
    put(store, 1, at=NOW - timedelta(days=2))
    with Receiver(lambda: next(answers)) as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: run.reports.qsize() == 1, "it was reported")
        assert (ids(receiver), run.dropped("too_old")) == ([0], 0)


@pytest.mark.usefixtures("quick")
def test_a_sender_survives_a_bug(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    open_readonly, failures = Store.open_readonly, iter([MemoryError()])

    def fail_once(state_dir: Path) -> Store:
        for error in failures:
            raise error
        return open_readonly(state_dir)

    monkeypatch.setattr(Store, "open_readonly", fail_once)
    put(store, 1)
    with Receiver() as receiver, sending(store, to(receiver)):
        wait_until(lambda: ids(receiver) == [0], "it was delivered")


def test_a_stop_does_not_wait_for_a_sender_that_has_nothing_to_send(store: Store) -> None:
    with Receiver() as receiver, sending(store, to(receiver)) as run:
        put(store, 1)
        run.notifier.notify(is_urgent=False)
        wait_until(lambda: run.reports.qsize() == 1, "it was reported")
        wait_until(lambda: not any(s.is_busy() for s in run.notifier._workers.values()), "it waits for news")
        run.notifier.begin_stop()
        assert not run.notifier.is_busy()


@pytest.mark.usefixtures("quick")
def test_a_notification_is_dropped_after_a_day_but_tried_at_least_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OLD_SECONDS", 0.0)
    answers = iter(["503", "ok", "ok"])
    put(store, 2, at=NOW - timedelta(days=2))
    put(store, 1, first=2)
    with Receiver(lambda: next(answers)) as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: run.reports.qsize() == 3, "all were reported")
        assert (ids(receiver), run.dropped("too_old")) == ([1, 2], 1)


@pytest.mark.usefixtures("quick")
def test_a_failure_is_over_when_nothing_waits_any_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    open_readonly, failures = Store.open_readonly, iter([StoreError("the disk fails", kind="read")])

    def fails_once(directory: Path) -> Store:
        for error in failures:
            raise error
        return open_readonly(directory)

    monkeypatch.setattr(Store, "open_readonly", fails_once)
    with Receiver(lambda: "400") as receiver, sending(store, to(receiver)) as run:
        worker = run.notifier._workers["ops"]
        wait_until(lambda: worker._is_idle, "it waits for news")
        assert run.notifier.failures() == {}
        put(store, 1)
        run.notifier.notify(is_urgent=False)
        wait_until(lambda: run.reports.qsize() == 1 and worker._is_idle, "it was given up")
        assert run.notifier.failures() == {}


def test_only_an_urgent_notification_ends_the_pause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    next_delay = Backoff.next_delay

    def long_pause(backoff: Backoff, _: float | None) -> float:
        pauses.append(next_delay(backoff))
        return 3600.0

    monkeypatch.setattr(Backoff, "next_delay", long_pause)
    answers = iter(["503", "429", "ok", "ok"])
    put(store, 1)
    with Receiver(lambda: next(answers)) as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: len(pauses) == 1, "it paused")
        failure = run.notifier.failures()["ops"]
        assert failure.reason == "it answers 503"
        put(store, 1, first=1)
        run.notifier.notify(is_urgent=False)
        run.notifier.notify(is_urgent=True)
        wait_until(lambda: len(pauses) == 2, "it tried once and paused anew")
        assert max(pauses) <= 1.0
        assert run.notifier.failures()["ops"].since == failure.since
        run.notifier.notify(is_urgent=True)
        wait_until(lambda: ids(receiver) == [0, 1], "both arrived")


def test_a_stop_tries_once_more_and_waits_for_no_dead_target(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next_delay", lambda *_: 3600.0)
    monkeypatch.setattr(module, "_STOP_SECONDS", 60.0)
    answers = iter(["503", "ok", "ok", "503"])
    put(store, 4)
    with Receiver(lambda: next(answers)) as receiver, sending(store, to(receiver)) as run:
        wait_until(run.notifier.failures, "it failed")
        assert not run.notifier.is_busy()
        run.notifier.begin_stop()
        wait_until(lambda: not run.notifier.is_busy(), "the stop need not wait")
        wait_until(lambda: receiver.attempts == 4, "it had tried")
        assert ids(receiver) == [0, 1]


def test_a_target_removed_from_the_policy_gets_no_more_notifications(store: Store) -> None:
    with Receiver() as receiver, sending(store, to(receiver)) as run:
        run.notifier.reconfigure(())
        put(store, 1)
        run.notifier.notify(is_urgent=True)
        run.notifier.reconfigure([to(receiver, "other")])
        put(store, 1, "other", first=1)
        run.notifier.notify(is_urgent=False)
        wait_until(lambda: ids(receiver) == [1], "the other target was notified")


def test_the_failures_of_an_old_target_do_not_count_for_its_successor(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    next_delay = Backoff.next_delay

    def long_pause(backoff: Backoff, _: float | None) -> float:
        pauses.append(next_delay(backoff))
        return 3600.0

    monkeypatch.setattr(Backoff, "next_delay", long_pause)
    answers = iter(["503", "ok"])
    put(store, 1, at=NOW - timedelta(days=2))
    with Receiver(lambda: "503") as old, Receiver(lambda: next(answers)) as new, sending(store, to(old)) as run:
        wait_until(lambda: len(pauses) == 1, "the old service refused it")
        run.notifier._workers["ops"]._failing_since = time.monotonic() - 3600
        run.notifier.reconfigure([to(new)])
        wait_until(lambda: len(pauses) == 2, "the new service refused it once")
        run.notifier.notify(is_urgent=True)
        wait_until(lambda: ids(new) == [0], "it arrived")


def test_a_late_rejection_by_an_old_target_is_sent_to_its_successor(store: Store) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def refuse_late() -> str:
        is_asked.set()
        may_answer.wait(60)
        return "400"

    put(store, 1)
    with Receiver(refuse_late) as old, Receiver() as new, sending(store, to(old, timeout=60)) as run:
        assert is_asked.wait(60)
        run.notifier.reconfigure([to(new)])
        may_answer.set()
        wait_until(lambda: ids(new) == [0], "it arrived")
        assert run.dropped("refused") == 0


def test_retry_pauses_grow_and_follow_retry_after() -> None:
    backoff = new_backoff()
    pauses = [backoff.next_delay() for _ in range(10_000)]
    for failures, longest in ((1, 1), (2, 2), (5, 16), (9, 256), (10, 300), (10_000, 300)):
        assert longest / 2 <= pauses[failures - 1] <= longest
    assert 600.0 <= new_backoff().next_delay(600.0) <= 660.0
    assert new_backoff().next_delay(600.0) != new_backoff().next_delay(600.0)  # machines do not come back together
    assert new_backoff().next_delay(1e9) == 3600.0


def test_ten_thousand_notifications_for_a_dead_target_keep_the_latest_thousand(store: Store) -> None:
    lost = 0
    for first in range(0, 10_000, 500):
        lost += len(put(store, 500, first=first))
    put(store, 1, "other")
    assert lost == 9000
    waiting = store.outbox.waiting()
    assert {name: one.count for name, one in waiting.items()} == {"ops": MAX_NOTIFICATIONS, "other": 1}
    with Receiver() as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: run.reports.qsize() == MAX_NOTIFICATIONS, "all that was kept was reported")
        assert ids(receiver) == [*range(9000, 10_000)]


def test_a_notification_that_hits_a_bug_stops_no_thread(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(module, "deliver", deliver)
    put(store, 1)
    with Receiver() as receiver, sending(store, to(receiver)) as run:
        wait_until(run.notifier.failures, "it failed")
        assert run.notifier.failures()["ops"].reason == "a bug in the agent: KeyError"
        assert [thread.name for thread in threading.enumerate() if thread.name == "notify-ops"]


def test_a_notification_of_another_version_does_not_keep_the_next_one_waiting(store: Store) -> None:
    body = msgspec.json.decode(msgspec.json.encode(SAMPLE))
    with store._transaction():
        store.outbox.add(NOW.isoformat(), [("ops", msgspec.json.encode({**body, "added": "later"}).decode())])
    put(store, 1, first=7)
    with Receiver() as receiver, sending(store, to(receiver)) as run:
        wait_until(lambda: run.reports.qsize() == 2, "both were reported")
        assert ids(receiver) == [7]
        assert run.reports.get().lost == "an agent of another version has stored it"
        assert run.dropped("refused") == 1
