"""The thread that talks to the fleet's table, so that neither polling nor the engine waits for it.

The one invariant: the engine hears of every change in how its events stand with the fleet, and of every failure.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from scheduled_events_agent import AgentError
from scheduled_events_agent.daemon.polling import Put
from scheduled_events_agent.engine import FleetTold
from scheduled_events_agent.fleet.ledger import Ledger, LedgerError, Row
from scheduled_events_agent.fleet.protocol import Fleet
from scheduled_events_agent.imds import resolve_endpoint
from scheduled_events_agent.log import FailureLog, get_logger
from scheduled_events_agent.log_ids import LogId
from scheduled_events_agent.metrics import Metrics
from scheduled_events_agent.settings import FleetSettings, Settings
from scheduled_events_agent.workflow import Wish

Connect = Callable[[FleetSettings, str], Ledger]
# How often it is tried again if there is no table to ask.
_RETRY_SECONDS = 30.0
# A clock that is set must not put off what is due.
_MAX_WAIT_SECONDS = 60.0


class _Wanted(NamedTuple):
    """What the engine wants; replaced as a whole, so that the thread never reads half of it."""

    settings: Settings
    wishes: tuple[Wish, ...] | None = None
    names: tuple[str, ...] = ()
    vm_id: str = ""
    group: str = ""


class FleetThread:
    """For the engine's thread, apart from ``run``."""

    def __init__(self, put: Put, metrics: Metrics, settings: Settings, connect: Connect) -> None:
        self._put = put
        self._metrics = metrics
        self._connect = connect
        self._wanted = _Wanted(settings)
        self._news = threading.Event()
        self._is_stopping = False
        self._failures = FailureLog("using the fleet's table", LogId.FLEET_FAILS, LogId.FLEET_WORKS)
        metrics.add_fleet()

    def use(self, settings: Settings) -> None:
        """Another policy is in force."""
        before = self._wanted
        is_same = before.settings.fleet == settings.fleet
        self._wanted = before._replace(settings=settings) if is_same else _Wanted(settings)
        self._news.set()

    def wish(self, wishes: tuple[Wish, ...], names: tuple[str, ...], vm_id: str, group: str) -> None:
        """What this VM wants now. ``group``: as the metadata service knows it; "" if it does not."""
        self._wanted = _Wanted(self._wanted.settings, wishes, names, vm_id, group)
        self._news.set()

    def stop(self) -> None:
        """End soon; nothing more is written."""
        self._is_stopping = True
        self._news.set()

    def run(self) -> None:
        """Blocks until ``stop``."""
        fleet: Fleet | None = None
        used: object = None
        told: FleetTold | None = None
        while not self._is_stopping:
            self._news.clear()
            wanted = self._wanted
            settings = wanted.settings.fleet
            wishes = wanted.wishes
            if settings is None or wishes is None:
                fleet = used = told = None
                self._metrics.fleet_awaited.set(0)
                self._metrics.fleet_away.set(0)
                self._news.wait()
                continue
            group = settings.group or wanted.group
            now = datetime.now(UTC)
            if used != (settings, group, wanted.vm_id, wanted.settings.imds.endpoint):
                fleet = None
                told = None
                used = (settings, group, wanted.vm_id, wanted.settings.imds.endpoint)
            seconds = _RETRY_SECONDS
            try:
                if fleet is None:
                    fleet = self._open(wanted, settings, group)
                before = fleet.failures
                standings = fleet.visit(wishes, wanted.names, now)
                if not fleet.failure or fleet.failures != before:
                    self._tell_log(fleet.failure, fleet.failure_kind)
                at = fleet.next_at(now)
                seconds = (at - datetime.now(UTC)).total_seconds() if at else _MAX_WAIT_SECONDS
                new = FleetTold(group, fleet.failure, fleet.away_since, standings, settings)
                self._metrics.fleet_awaited.set(fleet.awaited())
            except Exception as error:  # noqa: BLE001 - events go on without the table, whatever is wrong with it
                reason = str(error) if isinstance(error, AgentError) else f"a bug in the agent: {error!r}"
                if not isinstance(error, AgentError):
                    get_logger().exception("a bug in the agent", log_id=LogId.AGENT_FAILED)
                since = told.away_since if told and told.away_since else now
                new = FleetTold(group, reason, min(since, now), told.standings if told else {}, settings)
                self._tell_log(reason, error.kind if isinstance(error, AgentError) else "bug")
            self._metrics.fleet_away.set(bool(new.failure))
            if new != told:
                told = new
                self._put(new)
            self._news.wait(min(max(0.0, seconds), _MAX_WAIT_SECONDS))

    def _open(self, wanted: _Wanted, settings: FleetSettings, group: str) -> Fleet:
        if not group:
            raise AgentError("the group is not known: the VM is in no scale set, so set fleet.group", kind="fleet")
        ledger = self._connect(settings, resolve_endpoint(wanted.settings.imds.endpoint))
        return Fleet(
            CountingLedger(ledger, self._metrics),
            group=group,
            vm_id=wanted.vm_id,
            max_events=settings.max_events,
            expect=settings.expect,
            random=random.Random(),  # noqa: S311 - so that VMs do not all ask at once
            waited=lambda what, seconds: self._metrics.fleet_wait_seconds.labels(what).observe(seconds),
        )

    def _tell_log(self, failure: str, kind: str) -> None:
        if failure:
            self._failures.failed(kind, failure, time.monotonic())
        else:
            self._failures.succeeded(time.monotonic())


def tell_request(method: str, status: int | str, seconds: float) -> None:
    """Tell the log of a request to the table, at level debug."""
    get_logger().debug("request to fleet", method=method, status=status, milliseconds=round(seconds * 1000, 1))


class CountingLedger:
    """Counts requests by operation and result."""

    def __init__(self, ledger: Ledger, metrics: Metrics) -> None:
        self._ledger = ledger
        self._metrics = metrics

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        with self._counted("put" if content is not None else "delete"):
            self._ledger.put(partition, key, content)

    def put_if_unchanged(self, partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        with self._counted("put_if_unchanged" if content is not None else "delete"):
            return self._ledger.put_if_unchanged(partition, key, content, version)

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        with self._counted("list"):
            return self._ledger.list_rows(partition, prefix)

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        result = "bug"
        try:
            yield
            result = "ok"
        except LedgerError as error:
            result = error.kind
            raise
        finally:
            self._metrics.fleet_requests.labels(operation, result).inc()
