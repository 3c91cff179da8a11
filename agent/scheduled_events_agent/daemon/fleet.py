"""The thread that talks to the fleet's store, so that neither polling nor the engine waits for it.

Invariant: it reports every change of an event's status in the fleet, and every failure, to the engine.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from scheduled_events_agent import AgentError
from scheduled_events_agent.daemon.poller import Put
from scheduled_events_agent.engine import FleetUpdate
from scheduled_events_agent.fleet.backend import Backend, BackendError, OnRequest, Record
from scheduled_events_agent.fleet.client import FleetClient
from scheduled_events_agent.imds.client import resolve_endpoint
from scheduled_events_agent.policy.settings import FleetSettings, Settings
from scheduled_events_agent.telemetry.log import ChangeLogger, get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import FleetRequest

if TYPE_CHECKING:
    from scheduled_events_agent.fleet.table import TableBackend
    from scheduled_events_agent.kubernetes.leases import LeaseBackend

Connect = Callable[[Settings, FleetSettings, str], Backend]
"""Opens the store of a group."""
# If there is no store to ask, it is tried again after this time.
_RETRY_SECONDS = 30.0


def connect(
    settings: Settings,
    fleet: FleetSettings,
    group: str,
    on_request: OnRequest = lambda *_: None,
    *,
    partition: str = "fleet",
) -> "TableBackend | LeaseBackend":
    """The store of a group, as the policy names it; sends no request yet. Raises BackendError."""
    if fleet.leases is not None:
        from scheduled_events_agent.kubernetes import leases  # noqa: PLC0415  # few policies need it

        kubeconfig = settings.kubernetes.kubeconfig if settings.kubernetes else None
        return leases.connect(fleet.leases, group, on_request, kubeconfig=kubeconfig, partition=partition)
    from scheduled_events_agent.fleet import table  # noqa: PLC0415  # Leases do not need it

    return table.connect(fleet, group, resolve_endpoint(settings.imds.endpoint), on_request, partition=partition)


class _Input(NamedTuple):
    """The engine's requests. Replaced as a whole, so that the thread never reads half of them."""

    settings: Settings
    requests: tuple[FleetRequest, ...] | None = None
    names: tuple[str, ...] = ()
    vm_id: str = ""
    group: str = ""

    @property
    def store(self) -> tuple[object, ...]:
        """The parts of the policy that say where the records are.

        Not by whom they are written: to leave the group and to come back would free a slot that is in use.
        """
        fleet = self.settings.fleet
        return fleet and (fleet.table, fleet.leases, fleet.group), *self._endpoint

    @property
    def key(self) -> tuple[object, ...]:
        """If this changes, the store is opened again."""
        fleet = self.settings.fleet
        kubernetes = self.settings.kubernetes if fleet and fleet.leases is not None else None
        kubeconfig = kubernetes and kubernetes.kubeconfig
        return fleet, (fleet and fleet.group) or self.group, self.vm_id, kubeconfig, *self._endpoint

    @property
    def _endpoint(self) -> tuple[str, ...]:
        """That of the metadata service, which the credentials for a table are from."""
        fleet = self.settings.fleet
        return () if fleet and fleet.leases is not None else (self.settings.imds.endpoint,)


class FleetThread:
    """Keeps the requests in the fleet's store. All methods but ``run`` are for the engine's thread."""

    def __init__(
        self, put: Put, metrics: Metrics, settings: Settings, connect: Connect, *, looks_again: bool = False
    ) -> None:
        """``looks_again``: an agent before this one may have sent requests that still arrive."""
        self._looks_again = looks_again
        self._put = put
        self._metrics = metrics
        self._connect = connect
        self._input = _Input(settings)
        self._has_changed = threading.Event()
        self._is_stopping = False
        self._failures = ChangeLogger("using the fleet's store", LogId.FLEET_FAILS, LogId.FLEET_WORKS)
        self._warned: dict[LogId, object] = {}
        metrics.add_fleet()

    def reconfigure(self, settings: Settings) -> None:
        """Use another policy."""
        is_same = self._input.settings.fleet == settings.fleet
        self._set(self._input._replace(settings=settings) if is_same else _Input(settings))

    def publish(self, requests: tuple[FleetRequest, ...], names: tuple[str, ...], vm_id: str, group: str) -> None:
        """Set this VM's requests to its fleet. ``group``: from the metadata service; "" if it knows none."""
        self._set(_Input(self._input.settings, requests, names, vm_id, group))

    def _set(self, current: _Input) -> None:
        if current != self._input:
            self._input = current
            self._has_changed.set()

    def stop(self) -> None:
        """End soon; a request that is under way ends by itself."""
        self._is_stopping = True
        self._has_changed.set()

    def run(self) -> None:
        """Blocks until ``stop``."""
        client: FleetClient | None = None
        key: object = None
        store: object = None
        last = FleetUpdate()
        while True:
            self._has_changed.clear()
            if self._is_stopping:
                return
            current = self._input
            settings = current.settings.fleet
            if client is not None and store != current.store:
                self._leave_group(client)
                client = None
            if settings is None or current.requests is None:
                client = key = None
                last = FleetUpdate()
                self._metrics.fleet_not_ready.set(0)
                self._metrics.fleet_unavailable.set(0)
                self._has_changed.wait()
                continue
            if key != current.key:
                client = None
                key = current.key
                store = current.store
                last = FleetUpdate(group=settings.group or current.group, settings=settings)
                self._put(last)
            self._warn_of_members(settings, current.names)
            try:
                if client is None:
                    client = self._open(current, settings)
                failures = client.failures
                client.sync(current.requests)
                if client.error is None or client.failures != failures:
                    self._log_outcome(client.error)
                update = _update(last, client)
                seconds = None if client.next_sync_at is None else client.next_sync_at - time.monotonic()
                self._report_statuses(update, current.requests, current.vm_id)
            except Exception as error:  # noqa: BLE001 - events go on without the store, whatever the error
                client = None
                agent_error = self._as_agent_error(error)
                self._log_outcome(agent_error)
                update = _failed(last, agent_error, time.monotonic())
                seconds = _RETRY_SECONDS
            self._metrics.fleet_unavailable.set(bool(update.error))
            if _is_worth_reporting(last, update):
                self._put(update)
            last = update
            self._has_changed.wait(None if seconds is None else max(0.0, seconds))

    def _open(self, current: _Input, settings: FleetSettings) -> FleetClient:
        group = settings.group or current.group
        if not group:
            raise BackendError(
                "the group is not known: the VM is in no scale set, so set fleet.group", kind="setup"
            )
        if not current.vm_id:
            raise BackendError("the metadata service has not reported the vmId of this VM yet", kind="setup")
        looks_again = self._looks_again
        self._looks_again = True
        backend = self._connect(current.settings, settings, group)
        return FleetClient(
            MeteredBackend(backend, self._metrics),
            vm_id=current.vm_id,
            max_events=settings.max_events,
            random=random.Random(),  # noqa: S311 - so that VMs do not all ask at once
            monotonic=time.monotonic,
            on_wait_ended=lambda what, seconds: self._metrics.fleet_wait_seconds.labels(what).observe(seconds),
            looks_again=looks_again,
        )

    def _leave_group(self, client: FleetClient) -> None:
        """Delete this VM's records, so that the VMs of the group that it leaves do not wait for it."""
        try:
            client.sync(())
        except Exception as error:  # noqa: BLE001 - an error here must not delay the new group
            self._log_outcome(self._as_agent_error(error))

    def _as_agent_error(self, error: Exception) -> AgentError:
        if isinstance(error, AgentError):
            return error
        get_logger().exception("a bug in the agent", log_id=LogId.AGENT_FAILED)
        return AgentError(f"a bug in the agent: {error!r}", kind="bug")

    def _log_outcome(self, error: AgentError | None) -> None:
        if error is None:
            self._failures.succeeded(time.monotonic())
        else:
            self._failures.failed(error.kind, str(error), time.monotonic())

    def _report_statuses(self, update: FleetUpdate, requests: tuple[FleetRequest, ...], vm_id: str) -> None:
        """Report what people must know about the statuses."""
        ready = {request.event for request in requests if request.stage == "ready"}
        not_ready = {name for event in ready & update.statuses.keys() for name in update.statuses[event].not_ready}
        self._metrics.fleet_not_ready.set(len(not_ready))
        self._warn(LogId.FLEET_SAME_NAME, next(iter(update.same_name_warnings(vm_id)), ""))

    def _warn_of_members(self, settings: FleetSettings, names: tuple[str, ...]) -> None:
        self._warn(LogId.FLEET_MEMBERS, settings.members_error(names))

    def _warn(self, log_id: LogId, text: str) -> None:
        """Log an error once while it lasts; "" means that it has ended."""
        if text and self._warned.get(log_id) != text:
            get_logger().error("the fleet is set up wrongly", log_id=log_id, reason=text)
        self._warned[log_id] = text


def _update(last: FleetUpdate, client: FleetClient) -> FleetUpdate:
    update = replace(last, statuses=client.statuses, listed_at=client.listed_at)
    if client.error is not None and client.unavailable_from is not None:
        return _failed(update, client.error, client.unavailable_from)
    return replace(update, error="", unavailable_since=None, unavailable_from=None)


def _failed(last: FleetUpdate, error: AgentError, now: float) -> FleetUpdate:
    if last.unavailable_from is not None:
        return replace(last, error=str(error))
    return replace(last, error=str(error), unavailable_since=datetime.now(UTC), unavailable_from=now)


def _is_worth_reporting(last: FleetUpdate, update: FleetUpdate) -> bool:
    """Whether to report the update. A list that allows something is reported each time: it soon expires."""
    allows = any(status.has_slot or status.is_all_ready for status in update.statuses.values())
    return allows or replace(update, listed_at=last.listed_at) != last


def log_request(method: str, status: int | str, seconds: float) -> None:
    """Log a request to the store, at level debug."""
    get_logger().debug("request to fleet", method=method, status=status, milliseconds=round(seconds * 1000, 1))


class MeteredBackend:
    """Counts requests by operation and result."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics

    def list(self) -> list[Record]:
        with self._counted("list"):
            return self._backend.list()

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        with self._counted("update" if etag else "create"):
            return self._backend.put(key, fields, etag)

    def delete(self, key: str, etag: str) -> bool:
        with self._counted("delete"):
            return self._backend.delete(key, etag)

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        result = "bug"
        try:
            yield
            result = "ok"
        except BackendError as error:
            result = error.kind
            raise
        finally:
            self._metrics.fleet_requests.labels(operation, result).inc()
