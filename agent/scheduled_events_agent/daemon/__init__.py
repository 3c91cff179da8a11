"""The agent as a process: waits for what comes, has the engine turn, and tells the service manager how it is.

Owns the inbox and starts every thread; knows nothing of what is decided. The one invariant: only the engine's
thread touches the engine, and nothing that others wait for (a poll, a hook, an approval, a client) can keep it
from its next turn.

    engine      takes the inbox, turns (the thread that calls ``run``; inbox.py)
    poller      fetches, compares bytes, parses            -> inbox     (polling.py)
    relief      does the same while the poller's request has no answer
    identity    asks who this VM is, until it is known     -> inbox
    approvals   one thread for each request to approve     -> inbox     (threads.py)
    hooks       one thread for each hook that runs         -> inbox
    fleet       asks the table of the VMs that act together (fleet.py), if the policy has one -> inbox
    notify-...  one thread for each target of notices    -> inbox     (senders.py)
    policy      reads the policy file again, when asked to -> inbox
    pages       opens the web server, until it is open (pages.py)
    web         answers from the published board
    operators   wakes the engine for a request in the state file
    watchdog    ends the process if the engine finishes no turn, or the poller hangs (watchdog.py)
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import __version__, host
from scheduled_events_agent.daemon.inbox import Command, Inbox, Item, PolicyRead
from scheduled_events_agent.daemon.pages import Pages
from scheduled_events_agent.daemon.polling import Identifier, Poller
from scheduled_events_agent.daemon.senders import Senders
from scheduled_events_agent.daemon.threads import Threads
from scheduled_events_agent.daemon.watchdog import Watchdog
from scheduled_events_agent.engine import Engine
from scheduled_events_agent.hooks import end_leftovers
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds import ImdsClient, connect
from scheduled_events_agent.log import get_logger
from scheduled_events_agent.log_ids import LogId
from scheduled_events_agent.metrics import Metrics
from scheduled_events_agent.settings import FleetSettings, Settings, keys_for_next_start
from scheduled_events_agent.status import NO_OPTIONS, CommandOptions, PolicyInForce
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.web.server import WebServer
from scheduled_events_agent.workflow import FleetRequest

if TYPE_CHECKING:
    from scheduled_events_agent.daemon.fleet import FleetThread
    from scheduled_events_agent.fleet.backend import Backend

# The engine's own pace: how often the watchdog and /healthz hear of it while nothing comes.
_TICK_SECONDS = 10.0
# The same while something is not as it should be, or operators cannot wake it.
_RESTLESS_TICK_SECONDS = 1.0
# The first poll waits this long for the first answer to who this VM is, and no longer.
_IDENTITY_PATIENCE_SECONDS = 2.0
# The service manager hears that the agent is ready when the first poll has been tried, or takes longer than this.
_READY_PATIENCE_SECONDS = 2.0
_START_TICK_SECONDS = 0.1
_COMMIT_RETRY_SECONDS = 1.0
# For the web server to be there at the start, and gone at the end.
_WEB_PATIENCE_SECONDS = 2.0
DEFAULT_STOP_TIMEOUT = 5.0


class PolicySource(Protocol):
    """Where the policy comes from."""

    name: str
    """How people know it, for the status."""
    hash: str
    """Of what was loaded last."""

    def load(self) -> Settings:
        """Read it again. Raises ConfigError."""


class Daemon:
    """The agent as a process. ``stop`` and ``reload`` may be called from any thread and from signal handlers."""

    def __init__(
        self,
        settings: Settings,
        policy: PolicySource,
        store: Store,
        *,
        command_options: CommandOptions = NO_OPTIONS,
        stop_timeout: float = DEFAULT_STOP_TIMEOUT,
        service: host.ServiceManager | None = None,
        connect_fleet: "Callable[[FleetSettings, str, str], Backend] | None" = None,
    ) -> None:
        """``settings``: what ``policy`` has loaded. ``command_options``: see ``Status``.

        ``stop_timeout``: seconds from ``stop`` to the return of ``run``; hooks that run have most of them.

        ``service``: what is told how the agent is; by default the program that started this process.

        ``connect_fleet``: opens the fleet's store; by default Azure's table.
        """
        self._stop_timeout = stop_timeout
        self._log = get_logger()
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._put = items.put
        self._crash: BaseException | None = None
        self._instance = str(store.path.resolve())
        self._metrics = Metrics(lambda: tuple(self._engine.board.values()))
        self._senders = Senders(store.path.parent, self._put, self._metrics)
        self._executor = Threads(self._connect, self._put, self._instance, self._senders)
        self._engine = Engine(
            settings,
            store,
            self._metrics,
            self._executor,
            describe=lambda: msgspec.json.encode(self._pages.status()),
            publish_fleet_requests=self._publish_fleet_requests,
            command_options=command_options,
        )
        self._poller = Poller(self._engine, self._put, self._metrics, partial(self._put, Command("look")))
        self._identifier = Identifier(self._engine, self._put, self._poller.stop_requested)
        self._inbox = Inbox(items, self._engine, self._executor, self._obey)
        self._started = time.monotonic()
        self._policy = policy
        self._agent_at_start = settings.agent
        self._reload_requested = threading.Event()
        self._pages = Pages(
            self._engine,
            self._poller,
            self._executor,
            self._metrics,
            state_dir=store.path.parent,
            policy=PolicyInForce(file=policy.name, read_at=datetime.now(UTC), hash=policy.hash),
            command_options=command_options,
        )
        self._service = service or host.ServiceManager()
        self._connect_fleet = connect_fleet
        self._fleet: FleetThread | None = None
        self._watchdog = Watchdog(lambda: store.is_writing)
        self._is_stopping = False
        self._store = store
        self._wake_up: host.WakeUp | None = None
        self._recreations = 0
        self._told_status: str | None = None  # None until it has been told that the agent is ready
        self._web_thread: threading.Thread | None = None

    @property
    def web(self) -> WebServer | None:
        """The web server while ``run`` runs; None if the policy has it off, or as long as it cannot listen."""
        return self._pages.web

    def stop(self) -> None:
        """Have ``run`` return within the stop time-out; at once, or nearly, if it is called again."""
        self._put(Command("stop"))

    def reload(self) -> None:
        """Read the policy file again; a bad one is refused, and the old one stays in force."""
        self._put(Command("reload"))

    def run(self) -> None:
        """Work until ``stop`` is called. Blocks. Raises what ended a thread that must not end."""
        self._start()
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - raised when all has been put in order
            self._crash = error
        self._shut_down()
        if self._crash is not None:
            raise self._crash

    # --- start and stop

    def _start(self) -> None:
        settings = self._engine.settings
        self._metrics.set_policy(settings, self._policy.hash)
        self._engine.start()  # before anybody can ask whether this VM is ready for work
        self._start_thread("identity", self._identifier.run)
        self._start_thread("poller", self._poll)
        self._start_thread("relief", self._poller.run_relief)
        if settings.agent.listen != "off":
            self._web_thread = self._start_thread("pages", self._pages.serve)
            self._pages.has_tried.wait(_WEB_PATIENCE_SECONDS)
        listen = settings.agent.listen if self._web_thread else "off"
        self._log.info(
            "agent started",
            log_id=LogId.AGENT_STARTED,
            version=__version__,
            mode=settings.agent.mode,
            rules=[rule.name for rule in settings.rules],
            endpoint=settings.imds.endpoint,
            vm=self._engine.name() or "not known yet",
            pending=len(self._engine.board),
            listen=self.web.address if self.web else listen,
        )
        ended = end_leftovers(self._instance)
        if ended:
            self._log.warning(
                "ended what hooks of an agent that was killed had left running",
                log_id=LogId.HOOK_CUT_SHORT,
                processes=ended,
            )
        self._senders.reconfigure(settings.notify)
        self._use_fleet(settings)
        self._start_thread("watchdog", self._watchdog.run)
        self._start_thread("policy", self._read_policies)
        self._start_hearing()

    def _start_hearing(self) -> None:
        """Also again, when the state directory was made anew."""
        if self._wake_up is not None:
            self._wake_up.close()
            self._wake_up = None
        with contextlib.suppress(OSError):  # requests are then found at the next turn
            self._wake_up = host.WakeUp(self._store.wake_path)
            self._start_thread("operators", partial(self._hear_operators, self._wake_up))

    def _hear_operators(self, wake_up: host.WakeUp) -> None:
        while wake_up.wait():
            self._put(Command("look"))

    def _use_fleet(self, settings: Settings) -> None:
        if self._fleet is not None:
            self._fleet.reconfigure(settings)
        elif settings.fleet is not None:
            # Most agents do not need it.
            from scheduled_events_agent.daemon.fleet import FleetThread, log_request  # noqa: PLC0415
            from scheduled_events_agent.fleet.table import connect as connect_table  # noqa: PLC0415

            connect_fleet = self._connect_fleet or partial(connect_table, on_request=log_request)
            self._fleet = FleetThread(
                self._put, self._metrics, settings, connect_fleet, looks_again=bool(self._engine.board)
            )
            self._start_thread("fleet", self._fleet.run)

    def _publish_fleet_requests(self, requests: tuple[FleetRequest, ...]) -> None:
        if self._fleet is not None:
            engine = self._engine
            # Before it is sure, it may be that of the VM whose disk this one has got as a copy.
            vm_id = engine.identity.vm_id if engine.is_identity_sure else ""
            self._fleet.publish(requests, engine.names(), vm_id, engine.identity.group)

    def _connect(self) -> ImdsClient:
        """For one approval."""
        return connect(self._engine.settings.imds, self._poller.api_version)

    def _poll(self) -> None:
        # Whose the state on disk is, and what Resources call this VM, is best known before the first document.
        self._identifier.has_tried.wait(_IDENTITY_PATIENCE_SECONDS)
        self._poller.run()

    def _start_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - dying unseen, it would leave a daemon that only looks alive
                get_logger().exception(
                    f"the {name} thread has ended by a bug; the agent stops", log_id=LogId.AGENT_FAILED
                )
                self._crash = error
                self.stop()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _shut_down(self) -> None:
        """Stop in time: running hooks may end by themselves first, then are made to."""
        self._is_stopping = True
        self._watchdog.stop()  # a stop has a time limit of its own
        self._poller.stop()
        self._reload_requested.set()  # to end its thread
        self._senders.begin_stop()
        if self._fleet is not None:
            self._fleet.stop()
        # What has a bug is best started anew, and soon.
        stop_timeout = self._stop_timeout if self._crash is None else min(self._stop_timeout, DEFAULT_STOP_TIMEOUT)
        names = [running.hook for running in self._executor.running()]
        waits_for = f", once these hooks have ended: {', '.join(names)}" if names else ""
        self._service.tell("stopping", f"Stopping{waits_for}")
        if waits_for:
            self._log.info(f"stopping{waits_for}", log_id=LogId.AGENT_STOPPING, patience_seconds=stop_timeout)
        try:
            self._inbox.finish(stop_timeout)
        except StoreError as error:
            self._log.error(
                "could not write the state file while stopping", log_id=LogId.STATE_LOST, reason=str(error)
            )
        if self._wake_up is not None:
            self._wake_up.close()
        if self._web_thread is not None:
            self._web_thread.join(_WEB_PATIENCE_SECONDS)
        self._pages.close()
        self._log.info("agent stopped", log_id=LogId.AGENT_STOPPED)

    # --- a turn of the engine

    def _turn(self) -> bool:
        """Take what has come, decide, commit, perform. False when it is time to stop."""
        could_go_on = self._inbox.take(self._seconds_to_next_turn())
        document_at = self._poller.succeeded_at  # before the inbox is emptied: nothing later is in it
        may_go_on = self._inbox.take(0.0)
        self._executor.reap()
        if not (could_go_on and may_go_on):
            return False
        has_worked = self._engine.turn(document_at)
        if self._store.recreations > self._recreations:
            self._recreations = self._store.recreations
            self._start_hearing()
        self._tell_service()
        if has_worked:
            self._engine.tidy()
        else:
            time.sleep(_COMMIT_RETRY_SECONDS)
        return True

    def _seconds_to_next_turn(self) -> float:
        if self._told_status is None:
            return _START_TICK_SECONDS
        if self._engine.store_failure:  # the last turn has waited already
            return 0.0
        is_restless = self._wake_up is None or self._engine.is_restless or bool(self._poller.overdue_seconds())
        seconds = min(_TICK_SECONDS, _RESTLESS_TICK_SECONDS) if is_restless else _TICK_SECONDS
        wake_at = self._engine.wake_at
        return min(seconds, (wake_at - datetime.now(UTC)).total_seconds()) if wake_at else seconds

    def _obey(self, item: Command | PolicyRead) -> None:
        if self._is_stopping:
            return
        match item:
            case Command(word="look"):
                pass  # the turn that follows does
            case PolicyRead():
                self._enforce(item)
            case Command(word="reload"):
                self._service.tell("reloading", self._describe())
                self._reload_requested.set()

    # --- the service manager

    def _tell_service(self) -> None:
        status = self._describe()
        if self._told_status is None:
            if not (self._poller.has_tried or self._engine.turned_at - self._started > _READY_PATIENCE_SECONDS):
                return
            self._service.tell("ready", status)
            if self._engine.settings.hooks:
                with contextlib.suppress(OSError, ImportError):  # start_tree will tell
                    processes.adopt_orphans()  # 4 ms and more, which the first hook need not wait for then
        elif status != self._told_status:
            self._service.tell_status(status)
        self._told_status = status
        # This turn has come to its end, so engine and store do; a poller that hangs is cured by a restart as well.
        if not self._poller.overdue_seconds():
            self._watchdog.feed()
            self._service.keep_alive()

    def _describe(self) -> str:
        """What the agent is at, in one line, which only changes when that does."""
        parts = []
        if hooks := [one.hook for one in self._executor.running() if one.state == "running"]:
            # That the line begins with "runs hook" is a contract: packaging/restart.sh reads it of the agent that
            # it replaces, whatever its version, and restarts the service when no hook runs.
            noun = "hook" if len(hooks) == 1 else "hooks"
            parts.append(f"runs {noun} {', '.join(hooks)}")
        return "; ".join([*parts, self._pages.headline()])

    # --- policy

    def _read_policies(self) -> None:
        """Read the policy file when it is asked for; what was read before the last request does not count."""
        while self._reload_requested.wait() and not self._is_stopping:
            self._reload_requested.clear()
            try:
                read = PolicyRead(self._policy.load(), self._policy.hash)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the old policy is still good
                read = PolicyRead(None, refused=str(error))
            if not self._reload_requested.is_set():
                self._put(read)

    def _enforce(self, read: PolicyRead) -> None:
        if read.settings is None:
            refused_at = self._pages.policy.refused_at or datetime.now(UTC)
            self._pages.policy = replace(self._pages.policy, refused=read.refused, refused_at=refused_at)
            self._engine.refuse_settings(read.refused)
        else:
            late = keys_for_next_start(self._agent_at_start, read.settings.agent)
            if late and keys_for_next_start(self._engine.settings.agent, read.settings.agent):
                text = "the policy file has changes that need a restart of the agent"
                self._log.warning(text, log_id=LogId.POLICY_WARNING, keys=late)
            self._pages.policy = replace(
                self._pages.policy,
                read_at=datetime.now(UTC),
                hash=read.hash,
                refused="",
                refused_at=None,
                needs_restart=late,
            )
            self._metrics.set_policy(read.settings, read.hash)
            self._engine.change_settings(read.settings)
            self._senders.reconfigure(read.settings.notify)
            self._use_fleet(read.settings)
        self._told_status = self._describe()
        self._service.tell("ready", self._told_status)
