"""Maintenance of the state file: keeps it in place, deletes what is too old, keeps room for a full disk."""

from collections.abc import Callable
from datetime import datetime, timedelta
from math import inf

from scheduled_events_agent.engine.protocols import Host
from scheduled_events_agent.engine.reporter import EventReporter
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.telemetry.log import ChangeLogger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics

KEEP_JOURNAL = timedelta(days=90)
TIDY_SECONDS = 60.0


class StoreMaintenance:
    """Maintains the state file before and after a cycle; takes milliseconds."""

    def __init__(self, store: Store, metrics: Metrics, machine: Host, reporter: EventReporter) -> None:
        self._store = store
        self._metrics = metrics
        self._machine = machine
        self._reporter = reporter
        self._next_at = machine.monotonic()
        self.has_more = False
        """Whether there is more to delete."""
        self._failures = ChangeLogger(
            "keeping room in the state file for a full disk", LogId.NO_RESERVE, LogId.RESERVE
        )

    def ensure_in_place(self, now: datetime) -> None:
        """Create the state file again if it was removed or replaced. Raises StoreError if that fails."""
        if loss := self._store.recreate_if_removed():
            self._reporter.report_recreated(loss, now)
            self._next_at = -inf  # the new file has no reserve yet

    def maintain(self, now: float, expire: Callable[[], None] = lambda: None) -> None:
        """Delete what is too old, at most once a minute. Raises StoreError if the file is damaged.

        ``now`` is monotonic. ``expire`` deletes what is too old elsewhere.
        """
        if now < self._next_at:
            return
        self._next_at = now + TIDY_SECONDS
        try:
            self.has_more = self._store.prune(self._machine.now() - KEEP_JOURNAL)
            if self.has_more:
                self._next_at = now
            expire()
            shortage = self._store.ensure_reserve()
            self._metrics.state_reserve.set(self._store.reserve_bytes())
        except StoreError as error:
            self._metrics.store_errors.labels(error.kind).inc()
            if error.kind == "damaged":
                raise
            shortage = str(error)
        if shortage:
            self._failures.failed("shortage", shortage, now)
        else:
            self._failures.succeeded(now)
