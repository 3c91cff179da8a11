"""Sends notifications: one thread for each target, so that none delays another and no event waits for any.

Invariant: a notification stays in the state file until it was delivered, or given up and counted. So it arrives at
least once, and the notifications of one target arrive in their order.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.engine import NotificationDone
from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.notifications import Deliver, NotificationError, decode_notification, deliver
from scheduled_events_agent.policy.settings import KUBERNETES_FORMAT, KubernetesSettings, NotifyTarget
from scheduled_events_agent.status import TargetFailure
from scheduled_events_agent.store import OutboxItem, Store, StoreError
from scheduled_events_agent.telemetry.log import ChangeLogger, get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics

GIVE_UP_AFTER = timedelta(days=1)
# A cluster keeps its events for an hour.
_EVENT_EXPIRES_AFTER = timedelta(hours=1)
# A notification that became too old while the machine was off is still tried for this long.
_OLD_SECONDS = 300.0
# How long a stop waits for the last tries.
_STOP_SECONDS = 3.0

Report = Callable[[NotificationDone], None]


def new_backoff() -> Backoff:
    """Pauses of 1, 2, 4 ... 300 s, or as the service asks, up to an hour."""
    return Backoff(1.0, 300.0, Random(), longest_retry_after=3600.0)  # noqa: S311


class Notifier:
    """The threads of all targets. ``failures`` is for any thread, the rest for the engine's."""

    def __init__(self, state_dir: Path, report: Report, metrics: Metrics) -> None:
        self._state_dir = state_dir
        self._report = report
        self._metrics = metrics
        self._workers: dict[str, _TargetWorker] = {}
        self._kubernetes: KubernetesSettings | None = None
        self._stop_deadline: float | None = None

    def reconfigure(self, targets: Iterable[NotifyTarget], kubernetes: KubernetesSettings | None = None) -> None:
        """Send the notifications that wait for these targets; other targets get none any more.

        ``kubernetes``: the cluster of the targets whose format it is.
        """
        is_same_cluster = kubernetes == self._kubernetes
        self._kubernetes = kubernetes
        old = dict(self._workers)
        workers = {}
        for target in targets:
            worker = old.pop(target.name, None) or _TargetWorker(
                target, _sender(target, kubernetes), self._state_dir, self._report, self._metrics
            )
            is_same = is_same_cluster or target.format != KUBERNETES_FORMAT
            if worker.target != target or not is_same:
                worker.update(target, _sender(target, kubernetes))
            workers[target.name] = worker
        self._workers = workers
        for worker in old.values():
            worker.end()
        self.notify(is_urgent=True)

    def notify(self, *, is_urgent: bool) -> None:
        """Send the new notifications. ``is_urgent``: retry targets that failed now."""
        for worker in self._workers.values():
            worker.wake(is_urgent=is_urgent)

    def begin_stop(self) -> None:
        """Try to send the waiting notifications once more, for a short time."""
        self._stop_deadline = time.monotonic() + _STOP_SECONDS
        for worker in self._workers.values():
            worker.begin_stop(self._stop_deadline)

    def is_busy(self) -> bool:
        """Whether a stop should still wait."""
        deadline = self._stop_deadline
        is_in_time = deadline is not None and time.monotonic() < deadline
        return is_in_time and any(worker.is_busy() for worker in self._workers.values())

    def failures(self) -> dict[str, TargetFailure]:
        """Why targets do not accept notifications now, by target."""
        return {name: worker.failure for name, worker in self._workers.items() if worker.failure}


def _sender(target: NotifyTarget, kubernetes: KubernetesSettings | None) -> Deliver:
    """What sends the target's notifications."""
    if target.format != KUBERNETES_FORMAT:
        return deliver
    from scheduled_events_agent.kubernetes.events import EventSender  # noqa: PLC0415  # most policies have none

    return EventSender(kubernetes).deliver


class _TargetWorker:
    """The thread of one target."""

    def __init__(
        self, target: NotifyTarget, send: Deliver, state_dir: Path, report: Report, metrics: Metrics
    ) -> None:
        self.target = target
        """Replaced when the policy is read again."""
        self._send = send
        self.failure: TargetFailure | None = None
        self._name = target.name
        self._state_dir = state_dir
        self._report = report
        self._metrics = metrics
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._stop_deadline: float | None = None
        self._wake = threading.Event()
        self._retry_now = threading.Event()
        self._is_idle = False
        self._failing_since: float | None = None
        self._log = ChangeLogger(f"notifying {target.name}", LogId.NOTIFICATIONS_FAIL, LogId.NOTIFICATIONS_WORK)

    def wake(self, *, is_urgent: bool) -> None:
        self._wake.set()
        if is_urgent:
            self._retry_now.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"notify-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no memory for a thread; the next notification tries again
                return
            self._thread = thread

    def update(self, target: NotifyTarget, send: Deliver) -> None:
        # The failures of the old service say nothing about the new one.
        self.target = target
        self._send = send
        self.failure = None
        self._failing_since = None

    def end(self) -> None:
        self._has_ended = True
        self.wake(is_urgent=True)

    def begin_stop(self, deadline: float) -> None:
        self._stop_deadline = deadline
        if self.is_busy():
            self.wake(is_urgent=True)

    def is_busy(self) -> bool:
        """Whether a notification waits or may have come."""
        is_idle = self._is_idle and not self._wake.is_set()
        return self._thread is not None and self._thread.is_alive() and not is_idle

    def _run(self) -> None:
        last_id = 0
        backoff = new_backoff()
        while not (self._has_ended or self._seconds_left() < 0):
            # Cleared before the state file is read, so that no later notification is overlooked.
            self._wake.clear()
            self._retry_now.clear()
            is_stopping = self._stop_deadline is not None
            error: NotificationError | None = None
            try:
                item = self._load(last_id)
                if self._has_ended:  # a notification that has come since is not for this target
                    return
                if item is None:
                    if is_stopping:
                        return
                    # What has failed is lost, or the state file can be read again: nothing fails now.
                    self.failure = self._failing_since = None
                    self._is_idle = True
                    self._wake.wait()
                    self._is_idle = False
                    continue
                lost = self._why_expired(item)
                is_expired = bool(lost)
                error = None if lost else self._try(item)
                if error is not None:
                    lost = self._why_lost(item, error)
                if error is None or lost:
                    self._report(NotificationDone(item.id, self._name, lost, is_expired=is_expired))
                    last_id = item.id
                    backoff.reset()
                    continue
            except StoreError as raised:
                self._fail("store", str(raised))
            except Exception as raised:  # noqa: BLE001 - a thread that ends would never send again
                self._fail("bug", f"a bug in the agent: {type(raised).__name__}")
            if is_stopping:
                return
            if self._retry_now.wait(backoff.next_delay(error.retry_after if error else None)):
                backoff.reset()

    def _seconds_left(self) -> float:
        """Seconds until the stop waits no longer."""
        return math.inf if self._stop_deadline is None else self._stop_deadline - time.monotonic()

    def _load(self, last_id: int) -> OutboxItem | None:
        with closing(Store.open_readonly(self._state_dir)) as store:
            return store.outbox.load_next(self._name, last_id)

    def _try(self, item: OutboxItem) -> NotificationError | None:
        target = self.target
        timeout = max(0.1, min(target.timeout, self._seconds_left()))
        began = time.monotonic()
        about: dict[str, str] = {}
        try:
            notification = decode_notification(item.body)
            about = {"event_id": notification.event.id, "type": notification.event.type, "kind": notification.kind}
            delivered = self._send(replace(target, timeout=timeout), notification)
        except NotificationError as error:
            failed = error
        except msgspec.MsgspecError:  # it would be the same the next time, and the next ones would wait
            failed = NotificationError("an agent of another version has stored it", kind="rejected")
        except Exception as error:  # noqa: BLE001 - it must not affect events; its text may hold a secret
            failed = NotificationError(f"a bug in the agent: {type(error).__name__}", kind="bug")
        else:
            self.failure = self._failing_since = None
            self._log.succeeded(time.monotonic())
            self._metrics.notifications_sent.labels(self._name).inc()
            self._log_request(about, delivered.status, began)
            return None
        self._log_request(about, failed.status or failed.kind, began)
        self._metrics.notification_failures.labels(self._name, failed.kind).inc()
        if self.target is not target:  # replaced meanwhile: try the new target before giving up
            return NotificationError(str(failed), kind="unreachable")
        self._fail(failed.kind, str(failed))
        return failed

    def _log_request(self, about: dict[str, str], status: int | str, began: float) -> None:
        milliseconds = round((time.monotonic() - began) * 1000, 1)
        get_logger().debug(
            "request to notification target",
            **about,
            target=self._name,
            status=status,
            milliseconds=milliseconds,
        )

    def _why_expired(self, item: OutboxItem) -> str:
        """Why the notification is not sent at all; "" if it is."""
        is_event = self.target.format == KUBERNETES_FORMAT
        if not is_event or datetime.now(UTC) - item.at < _EVENT_EXPIRES_AFTER:
            return ""
        self._metrics.notifications_dropped.labels(self._name, "too_old").inc()
        return "expired: a cluster keeps an event for an hour"

    def _why_lost(self, item: OutboxItem, error: NotificationError) -> str:
        """Why the notification is not sent again; "" if it is."""
        if error.kind == "rejected":
            self._metrics.notifications_dropped.labels(self._name, "refused").inc()
            return str(error)
        is_old = datetime.now(UTC) - item.at >= GIVE_UP_AFTER
        failing_since = self._failing_since or time.monotonic()
        if is_old and time.monotonic() - failing_since >= _OLD_SECONDS:
            self._metrics.notifications_dropped.labels(self._name, "too_old").inc()
            return f"too old: {error}"
        return ""

    def _fail(self, kind: str, reason: str) -> None:
        since = self.failure.since if self.failure else datetime.now(UTC)
        self.failure = TargetFailure(since=since, reason=reason)
        self._failing_since = self._failing_since or time.monotonic()
        self._log.failed(kind, reason, time.monotonic())
