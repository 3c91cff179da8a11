"""The main loop of the agent: starts every thread, runs one cycle of the engine after the other, and stops.

It knows nothing about decisions. Invariant: only the thread that calls ``run`` uses the engine. No poll, hook,
approval or client can delay the engine's next cycle.

    engine      reads the inbox, runs a cycle (the thread that calls ``run``; inbox.py)
    poller      fetches, compares bytes, parses            -> inbox     (poller.py)
    hedge       sends requests too, while the poller's own has no answer
    identity    asks for this VM's name and id, until they are known  -> inbox
    approvals   one thread for each request to approve     -> inbox     (executor.py)
    hooks       one thread for each hook that runs         -> inbox
    fleet       reads and writes the fleet's store (fleet.py), if the policy has one -> inbox
    node        keeps the conditions of a Kubernetes node up to date (node.py), if the policy has the section
    notify-...  one thread for each notification target    -> inbox     (notifier.py)
    policy      reads the policy file again, when asked to; looks at it once a minute -> inbox (policy_reader.py)
    pages       opens the web server, and retries until it is open (web/endpoints.py)
    web         answers from the published snapshot
    operators   wakes the engine for a request in the state file
    signals     wakes the engine when a signal has come (cli/run.py)
    watchdog    ends the process if the engine finishes no cycle, or the poller hangs (watchdog.py)
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from scheduled_events_agent import __version__, host
from scheduled_events_agent.daemon.executor import ThreadExecutor
from scheduled_events_agent.daemon.fallback import Fallback
from scheduled_events_agent.daemon.inbox import Command, Inbox, Item, PolicyFileSeen, PolicyReloaded
from scheduled_events_agent.daemon.notifier import Notifier
from scheduled_events_agent.daemon.policy_reader import PolicyReader
from scheduled_events_agent.daemon.poller import IdentityResolver, Poller
from scheduled_events_agent.daemon.service_status import ServiceReporter
from scheduled_events_agent.daemon.status_source import StatusSource
from scheduled_events_agent.daemon.watchdog import Watchdog
from scheduled_events_agent.engine import Engine, Snapshot
from scheduled_events_agent.hooks.run import kill_orphans
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds.client import ImdsClient, connect
from scheduled_events_agent.policy.load import LoadedPolicy, PolicyFile
from scheduled_events_agent.policy.settings import FleetSettings, Settings
from scheduled_events_agent.status import NO_OPTIONS, CommandOptions, to_json
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.web.endpoints import Endpoints
from scheduled_events_agent.web.server import WebServer
from scheduled_events_agent.workflow import FleetRequest

if TYPE_CHECKING:
    from scheduled_events_agent.daemon.fleet import FleetThread
    from scheduled_events_agent.daemon.node import NodeThread
    from scheduled_events_agent.fleet.backend import Backend
    from scheduled_events_agent.kubernetes.conditions import Polls

# Without messages the engine runs a cycle this often, as a sign of life for the watchdog and /healthz.
_TICK_SECONDS = 10.0
# It runs a cycle this often while something is wrong, or operators cannot wake it.
_EARLY_TICK_SECONDS = 1.0
# The first poll waits at most this long for the first answer about this VM's identity.
_IDENTITY_TIMEOUT_SECONDS = 2.0
_START_TICK_SECONDS = 0.1
_COMMIT_RETRY_SECONDS = 1.0
# Time limit for opening the web server at the start, and for closing it at the end.
_WEB_TIMEOUT_SECONDS = 2.0
DEFAULT_STOP_TIMEOUT = 5.0


class Daemon:
    """The agent as a process. Threads and signal handlers may call ``stop``, ``reload`` and ``wake``."""

    def __init__(
        self,
        loaded: LoadedPolicy,
        file: PolicyFile,
        store: Store,
        *,
        fallback: Fallback | None = None,
        command_options: CommandOptions = NO_OPTIONS,
        stop_timeout: float = DEFAULT_STOP_TIMEOUT,
        service: host.ServiceManager | None = None,
        connect_fleet: "Callable[[Settings, FleetSettings, str], Backend] | None" = None,
    ) -> None:
        """``loaded``: the policy in ``file``, or of ``fallback`` if the file was rejected.

        ``command_options``: those of ``Status``.

        ``stop_timeout``: seconds from ``stop`` to the return of ``run``; hooks that run have most of them.

        ``service``: the service manager to report to; by default the program that started this process.

        ``connect_fleet``: opens the fleet's store; by default the one that the policy names.
        """
        self._stop_timeout = stop_timeout
        self._log = get_logger()
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._put = items.put
        self._crash: BaseException | None = None
        self._instance = str(store.path.resolve())
        self._metrics = Metrics(lambda: tuple(self._snapshot().workflows.values()))
        self._notifier = Notifier(store.path.parent, self._put, self._metrics)
        self._executor = ThreadExecutor(
            self._connect, self._put, self._instance, lambda: self._snapshot().settings
        )
        self._engine = Engine(
            loaded.settings,
            store,
            self._metrics,
            self._executor,
            put=self._put,
            notify=self._notifier.notify,
            describe=lambda: to_json(self._status.status()),
            publish_fleet_requests=self._publish_fleet_requests,
            command_options=command_options,
        )
        self._poller = Poller(self._snapshot, self._put, self._metrics, self.wake)
        self._identifier = IdentityResolver(
            self._snapshot, self._put, self._poller.stop_requested, self._poller.guest_proxy
        )
        self._inbox = Inbox(
            items, self._engine, self._executor, self._handle_command, is_sending=self._notifier.is_busy
        )
        self._policy = PolicyReader(file, loaded, self._put, store.path.parent, fallback)
        self._status = StatusSource(
            self._snapshot,
            self._poller,
            self._metrics,
            policy=lambda: self._policy.in_force,
            running=self._executor.running,
            target_failures=self._notifier.failures,
            vm_error=lambda: self._identifier.error,
            kubernetes_failure=lambda: self._node.failure if self._node else None,
            web=lambda: self._endpoints.state(),  # noqa: PLW0108 - there are no pages yet
            state_dir=store.path.parent,
            state_since=store.created_at(),
            command_options=command_options,
        )
        self._endpoints = Endpoints(
            self._snapshot,
            status=self._status.status,
            status_basis=self._status.basis,
            health=self._status.health,
            metrics=self._status.metrics,
            state_dir=store.path.parent,
            stop_requested=self._poller.stop_requested,
        )
        self._reporter = ServiceReporter(
            service or host.ServiceManager(),
            self._snapshot,
            self._poller,
            self._status,
            running=self._executor.running,
            on_ready=self._become_subreaper,
        )
        self._connect_fleet = connect_fleet
        self._fleet: FleetThread | None = None
        self._node: NodeThread | None = None
        self._watchdog = Watchdog(lambda: store.is_writing)
        self._is_stopping = False
        self._store = store
        self._wake_up: host.WakeUp | None = None
        self._recreations = 0
        self._web_thread: threading.Thread | None = None

    def _snapshot(self) -> Snapshot:
        """The state for other threads, which may read nothing else of the engine."""
        return self._engine.snapshot

    @property
    def web(self) -> WebServer | None:
        """The web server while ``run`` runs; None if the policy has it off, or as long as it cannot listen."""
        return self._endpoints.web

    def stop(self) -> None:
        """Have ``run`` return within the stop time-out; at once, or nearly, if it is called again."""
        self._put(Command("stop"))

    def reload(self) -> None:
        """Read the policy file again. If it is bad, it is rejected and the old policy stays in force."""
        self._put(Command("reload"))

    def wake(self) -> None:
        """Have the engine run a cycle."""
        self._put(Command("check_requests"))

    def run(self) -> None:
        """Work until ``stop`` is called. Blocks. Raises the error that ended a thread that must not end."""
        self._start()
        try:
            while self._run_cycle():
                pass
        except BaseException as error:  # noqa: BLE001 - raised when all has been put in order
            self._crash = error
        self._shut_down()
        if self._crash is not None:
            raise self._crash

    # --- start and stop

    def _start(self) -> None:
        settings = self._engine.settings
        self._metrics.set_policy(settings, self._policy.in_force.hash)
        self._engine.start()  # before a client can ask whether this VM is ready for work
        if self._policy.in_force.rejected:
            self._engine.record_rejection(self._policy.in_force.rejected)
        self._start_thread("identity", self._identifier.run)
        self._start_thread("poller", self._poll)
        self._start_thread("hedge", self._poller.run_hedge)
        if settings.agent.listen != "off":
            self._web_thread = self._start_thread("pages", self._endpoints.serve)
            self._endpoints.has_tried.wait(_WEB_TIMEOUT_SECONDS)
        listen = settings.agent.listen if self._web_thread else "off"
        self._log.info(
            "agent started",
            log_id=LogId.AGENT_STARTED,
            version=__version__,
            mode=settings.agent.mode,
            rules=[rule.name for rule in settings.rules],
            endpoint=settings.imds.endpoint,
            vm=self._engine.name() or "not known yet",
            pending=len(self._engine.workflows),
            listen=self.web.address if self.web else listen,
        )
        ended = kill_orphans(self._instance)
        if ended:
            self._log.warning(
                "ended what hooks of an agent that was killed had left running",
                log_id=LogId.HOOK_CUT_SHORT,
                processes=ended,
            )
        self._notifier.reconfigure(settings.notify, settings.kubernetes)
        self._reconfigure_fleet(settings)
        self._reconfigure_node(settings)
        self._start_thread("watchdog", self._watchdog.run)
        self._start_thread("policy", self._policy.run)
        self._start_waiting_for_requests()

    def _start_waiting_for_requests(self) -> None:
        """Start to wait for operators' requests; again when the state directory was created again."""
        if self._wake_up is not None:
            self._wake_up.close()
            self._wake_up = None
        with contextlib.suppress(OSError):  # then the next cycle finds the requests
            self._wake_up = host.WakeUp(self._store.wake_path)
            self._start_thread("operators", partial(self._wait_for_requests, self._wake_up))

    def _wait_for_requests(self, wake_up: host.WakeUp) -> None:
        while wake_up.wait():
            self.wake()

    def _reconfigure_fleet(self, settings: Settings) -> None:
        if self._fleet is not None:
            self._fleet.reconfigure(settings)
        elif settings.fleet is not None:
            # Most agents do not need it.
            from scheduled_events_agent.daemon.fleet import FleetThread, connect, log_request  # noqa: PLC0415

            connect_fleet = self._connect_fleet or partial(connect, on_request=log_request)
            self._fleet = FleetThread(
                self._put, self._metrics, settings, connect_fleet, looks_again=bool(self._engine.workflows)
            )
            self._start_thread("fleet", self._fleet.run)

    def _reconfigure_node(self, settings: Settings) -> None:
        if self._node is not None:
            self._node.reconfigure(settings.kubernetes)
        elif settings.kubernetes is not None:
            from scheduled_events_agent.daemon.node import NodeThread  # noqa: PLC0415  # most agents need it not

            self._node = NodeThread(self._metrics, settings.kubernetes)
            self._start_thread("node", self._node.run)

    def _publish_node(self) -> None:
        if self._node is None:
            return
        polls: Polls = "current" if self._engine.has_document else "none_yet"
        if self._status.polls() == "overdue":
            polls = "overdue"
        self._node.publish(self._engine.workflows, polls)

    def _publish_fleet_requests(self, requests: tuple[FleetRequest, ...]) -> None:
        if self._fleet is not None:
            engine = self._engine
            # Until the identity is sure, it may be that of another VM whose disk was copied to this one.
            vm_id = engine.identity.vm_id if engine.is_identity_sure else ""
            self._fleet.publish(requests, engine.names(), vm_id, engine.identity.group)

    def _connect(self) -> ImdsClient:
        """A client for one request to approve."""
        imds = self._snapshot().settings.imds
        return connect(
            imds.endpoint,
            self._poller.api_version,
            request_timeout=imds.request_timeout,
            guest_proxy=self._poller.guest_proxy,
        )

    def _poll(self) -> None:
        # Best before the first document: whether the state on disk is this VM's, and how Resources name it.
        self._identifier.has_tried.wait(_IDENTITY_TIMEOUT_SECONDS)
        self._poller.run()

    def _start_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - if it died unnoticed, the daemon would only look alive
                get_logger().exception(
                    f"the {name} thread has ended by a bug; the agent stops", log_id=LogId.AGENT_FAILED
                )
                self._crash = error
                self.stop()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _shut_down(self) -> None:
        """Stop in time: running hooks may end by themselves first, then they are ended."""
        self._is_stopping = True
        self._watchdog.stop()  # a stop has a time limit of its own
        self._poller.stop()
        self._policy.stop()
        self._notifier.begin_stop()
        if self._fleet is not None:
            self._fleet.stop()
        if self._node is not None:
            self._node.stop()
        # After a bug a new start helps best, and soon.
        stop_timeout = self._stop_timeout if self._crash is None else min(self._stop_timeout, DEFAULT_STOP_TIMEOUT)
        names = [running.hook for running in self._executor.running()]
        waits_for = f", once these hooks have ended: {', '.join(names)}" if names else ""
        self._reporter.report_stopping(f"Stopping{waits_for}")
        if waits_for:
            self._log.info(f"stopping{waits_for}", log_id=LogId.AGENT_STOPPING, timeout_seconds=stop_timeout)
        try:
            self._inbox.shutdown(stop_timeout)
        except StoreError as error:
            self._log.error(
                "could not write the state file while stopping", log_id=LogId.STATE_LOST, reason=str(error)
            )
        if self._wake_up is not None:
            self._wake_up.close()
        if self._web_thread is not None:
            self._web_thread.join(_WEB_TIMEOUT_SECONDS)
        self._endpoints.close()
        self._log.info("agent stopped", log_id=LogId.AGENT_STOPPED)

    # --- a cycle of the engine

    def _run_cycle(self) -> bool:
        """Receive messages, decide, commit, perform. False when it is time to stop."""
        could_go_on = self._inbox.drain(self._seconds_to_next_cycle())
        document_at = self._poller.succeeded_at  # read first: the inbox has all documents up to then
        may_go_on = self._inbox.drain(0.0)
        self._executor.reap()
        if not (could_go_on and may_go_on):
            return False
        has_worked = self._engine.run_cycle(document_at)
        if self._store.recreations > self._recreations:
            self._recreations = self._store.recreations
            self._start_waiting_for_requests()
        self._reporter.report()
        self._publish_node()
        # This cycle has ended, so engine and store work. A restart also helps against a poller that hangs.
        if self._reporter.reported is not None and not self._poller.stalled_seconds():
            self._watchdog.feed()
            self._reporter.keep_alive()
        if has_worked:
            self._engine.maintain()
        else:
            time.sleep(_COMMIT_RETRY_SECONDS)
        return True

    def _seconds_to_next_cycle(self) -> float:
        if self._reporter.reported is None:
            return _START_TICK_SECONDS
        if self._engine.store_failure:  # the last cycle has waited already
            return 0.0
        needs_early_cycle = (
            self._wake_up is None or self._engine.needs_early_cycle or bool(self._poller.stalled_seconds())
        )
        seconds = min(_TICK_SECONDS, _EARLY_TICK_SECONDS) if needs_early_cycle else _TICK_SECONDS
        until_late = self._status.seconds_until_late()
        if until_late > 0.0:  # then the line for the service manager changes
            seconds = min(seconds, until_late)
        wake_at = self._engine.wake_at
        return min(seconds, (wake_at - datetime.now(UTC)).total_seconds()) if wake_at else seconds

    def _handle_command(self, item: Command | PolicyReloaded | PolicyFileSeen) -> None:
        if self._is_stopping:
            return
        match item:
            case Command(action="check_requests"):
                pass  # the next cycle does it
            case PolicyReloaded():
                self._reload(item)
            case PolicyFileSeen():
                self._policy.see(item)
            case Command(action="reload"):
                self._reporter.report_reloading()
                self._policy.request()

    def _reload(self, read: PolicyReloaded) -> None:
        if read.settings is None:
            self._policy.reject(read)
            self._engine.reject_settings(read.error)
        else:
            self._policy.accept(read, read.settings.agent, self._engine.settings.agent)
            self._metrics.set_policy(read.settings, read.hash)
            self._engine.change_settings(read.settings)
            self._notifier.reconfigure(read.settings.notify, read.settings.kubernetes)
            self._reconfigure_fleet(read.settings)
            self._reconfigure_node(read.settings)
        self._reporter.report_reloaded()

    def _become_subreaper(self) -> None:
        """Done once the agent is ready: it takes 4 ms or more, so the first hook need not wait for it."""
        if self._engine.settings.hooks:
            with contextlib.suppress(OSError, ImportError):  # start_tree reports the error
                processes.become_subreaper()
