"""The loop and its threads: waits for what comes, has the engine turn, and tells the world how the agent is.

Owns every thread and the inbox; knows nothing of what is decided. The one invariant: only the engine's thread
touches the engine, and nothing that others wait for (a poll, a hook, an approval, a client) can keep it from its
next turn.

    engine      takes the inbox, turns (the thread that calls ``run``)
    poller      fetches, compares bytes, parses            -> inbox
    identity    asks who this VM is, until it is known     -> inbox
    approvals   one thread for each request to approve     -> inbox
    hooks       one thread for each hook that runs         -> inbox
    pages       opens the web server, until it is open; then follows agent.web_config, if there is one
    web         answers from the published board
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from agent import __version__, host
from agent.access import Access, AccessError
from agent.config import BUILT_IN_NAME, ImdsSettings, Settings
from agent.engine import Engine, HookEnded, HookKey, News, Paused, key_of, without_run
from agent.events import DocumentError, parse_document
from agent.hooks import HookRun, end_leftovers
from agent.imds import ImdsClient, ImdsError, backoff_seconds, resolve_endpoint
from agent.log import FailureLog, Logger, get_logger
from agent.metrics import Metrics
from agent.page import HEADERS, render_page
from agent.policy import Hook
from agent.status import PolicyInForce, RunningHook, Status, Vm, summarize
from agent.store import Store, StoreError
from agent.web import HTML, Page, WebError, WebServer
from agent.workflow import ApprovalAnswered, Approve, RunHook, Workflow, is_ready

# The engine's own pace: how soon an operator is answered, and how often /healthz hears of it.
_TICK_SECONDS = 1.0
# A loop that has not turned for this long hangs; a slow disk alone is given two seconds by the store.
_STALL_SECONDS = 15.0
# A tick later than asked for by more than this is a pause of the machine, not the scheduler's noise.
_PAUSE_SECONDS = 1.0
# On stop, running hooks may end by themselves first; of the time that is left, this is for them after they were
# told to, and as much for the state file and the log.
_STOP_GRACE_SECONDS = 1.5
# Who this VM is, is asked again as soon as the document is, for without that nothing is done; of a service that
# has answered, and does not know, less often.
_IDENTITY_RETRY_SECONDS = 1.0
_NO_NAME_RETRY_SECONDS = 10.0
# The first poll waits this long for the first answer to who this VM is, and no longer.
_IDENTITY_PATIENCE_SECONDS = 2.0
# The service manager hears that the agent is ready when the first poll has been tried, or takes longer than this.
_READY_PATIENCE_SECONDS = 2.0
_START_TICK_SECONDS = 0.1
# What a poll may take beside its time limit: resolving a name that the policy gives, on a bad day.
_RESOLVE_SECONDS = 30.0
_COMMIT_RETRY_SECONDS = 1.0
# Events, and pauses, that the status page shows.
_RECENT = 20
# The page is made this often at most, however many ask for it, and a disk that hangs is waited for this long.
_PAGE_SECONDS = 1.0
_PAGE_PATIENCE_SECONDS = 1.0
# The metrics cost a millisecond, which a crowd could make use of.
_METRICS_SECONDS = 0.1
# The agent starts without its pages if their port is taken; for the first attempt it waits, but not for long.
_WEB_RETRY_SECONDS = 3.0
_WEB_PATIENCE_SECONDS = 2.0
# How soon a changed agent.web_config or a renewed certificate is in force.
_ACCESS_LOOK_SECONDS = 1.0
DEFAULT_STOP_TIMEOUT = 5.0


@dataclass(frozen=True)
class _Command:
    """Somebody wants the daemon to stop or to read its policy again."""

    word: Literal["stop", "reload", "pause", "resume"]


_Item = News | _Command
_Put = Callable[[_Item], None]


class Daemon:
    """The agent as a process. ``stop`` and ``reload`` may be called from any thread and from signal handlers."""

    def __init__(
        self,
        settings: Settings,
        load_settings: Callable[[], Settings],
        store: Store,
        *,
        policy_name: str = BUILT_IN_NAME,
        stop_timeout: float = DEFAULT_STOP_TIMEOUT,
        service: host.ServiceManager | None = None,
    ) -> None:
        """``policy_name``: how people know the policy, for the status.

        ``stop_timeout``: seconds from ``stop`` to the return of ``run``; hooks that run have most of them.

        ``service``: who is told how the agent is; by default whoever started this process.
        """
        self._stop_timeout = stop_timeout
        self._load_settings = load_settings
        self._log = get_logger()
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._crash: BaseException | None = None
        self._metrics = Metrics(self._load_pending)
        endpoint = _Endpoint(lambda: self._engine.settings.imds, settings.imds)
        self._poller = _Poller(endpoint, self._inbox.put, self._metrics)
        self._identifier = _Identifier(endpoint, self._inbox.put, self._poller.stop_requested)
        self._instance = str(store.path.resolve())
        self._hands = _Threads(endpoint, self._inbox.put, self._instance)
        self._engine = Engine(settings, store, self._metrics, self._hands, describe=self._describe_as_json)
        self._state_dir = store.path.parent
        self._started = time.monotonic()
        self._started_at = datetime.now(UTC)
        self._policy = PolicyInForce(file=policy_name, read_at=self._started_at)
        self._service = service or host.ServiceManager()
        self._told_status: str | None = None  # None until it has been told that the agent is ready
        self._access: Access | None = None
        self._web_failure = ""  # why there is no web server, though there should be
        self._web_tried = threading.Event()
        self._web_opener: threading.Thread | None = None
        self.web: WebServer | None = None
        """The web server while ``run`` runs; None if the policy has it off, or as long as it cannot listen."""

    def _load_pending(self) -> Iterable[Workflow]:
        return self._engine.board.values()

    def stop(self) -> None:
        """Have ``run`` return within the stop time-out; at once, or nearly, if it is called again."""
        self._inbox.put(_Command("stop"))

    def reload(self) -> None:
        """Read the policy file again; a bad one is refused, and the old one stays in force."""
        self._inbox.put(_Command("reload"))

    def pause(self) -> None:
        """Go on watching, but begin nothing and approve nothing until ``resume``; a hook that runs is let end."""
        self._inbox.put(_Command("pause"))

    def resume(self) -> None:
        """Act again."""
        self._inbox.put(_Command("resume"))

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
        if settings.agent.listen != "off":
            self._web_opener = self._start_thread("pages", self._open_web)
            self._web_tried.wait(_WEB_PATIENCE_SECONDS)
        self._engine.start()
        self._log.info(
            "agent started",
            version=__version__,
            mode=settings.agent.mode,
            rules=[rule.name for rule in settings.rules],
            endpoint=settings.imds.endpoint,
            vm=self._engine.identity.name or "not known yet",
            pending=len(self._engine.board),
            listen=self.web.address if self.web else settings.agent.listen if self._web_opener else "off",
        )
        ended = end_leftovers(self._instance)
        if ended:
            self._log.warning("ended what hooks of an agent that was killed had left running", processes=ended)
        self._start_thread("identity", self._identifier.run)
        self._start_thread("poller", self._poll)

    def _poll(self) -> None:
        # Whose the state on disk is, and what Resources call this VM, is best known before the first document.
        self._identifier.has_tried.wait(_IDENTITY_PATIENCE_SECONDS)
        self._poller.run()

    def _open_web(self) -> None:
        """Have the pages served, sooner or later: without them the machine is protected all the same."""
        agent = self._engine.settings.agent
        while not self._poller.stop_requested.is_set():
            try:
                if agent.web_config and not self._access:
                    self._access = Access(Path(agent.web_config), self._tell_access)
                web = WebServer(agent.listen, self._pages(), access=self._access, names=agent.listen_names)
            except (AccessError, WebError) as error:
                if str(error) != self._web_failure:
                    self._log.error("the pages cannot be shown; this is tried again", reason=str(error))
                self._web_failure = str(error)
            else:
                self.web = web
                if self._web_failure:
                    self._log.info("the pages are shown now", listen=web.address)
                self._web_failure = ""
                self._web_tried.set()
                break
            self._web_tried.set()
            self._poller.stop_requested.wait(_WEB_RETRY_SECONDS)
        while self._access and not self._poller.stop_requested.wait(_ACCESS_LOOK_SECONDS):
            self._access.look()

    def _tell_access(self, refused: str) -> None:
        if refused:
            self._log.error("agent.web_config was refused, what it said before is in force", reason=refused)
        else:
            self._log.info("agent.web_config is in force as it is now")

    def _start_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - dying unseen, it would leave a daemon that only looks alive
                get_logger().exception(f"the {name} thread has ended by a bug; the agent stops")
                self._crash = error
                self.stop()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _shut_down(self) -> None:
        """Stop in time: running hooks may end by themselves first, then are made to."""
        self._poller.stop()
        # What has a bug is best started anew, and soon.
        stop_timeout = self._stop_timeout if self._crash is None else min(self._stop_timeout, DEFAULT_STOP_TIMEOUT)
        names = [running.hook for running in self._hands.running()]
        waits_for = f", once these hooks have ended: {', '.join(names)}" if names else ""
        self._service.tell("stopping", f"Stopping{waits_for}")
        if waits_for:
            self._log.info(f"stopping{waits_for}", patience_seconds=stop_timeout)
        ended = self._collect_hooks(time.monotonic() + stop_timeout - 2 * _STOP_GRACE_SECONDS)
        self._hands.cancel_all(_STOP_GRACE_SECONDS)
        self._collect_hooks(time.monotonic() + _STOP_GRACE_SECONDS + 0.5)
        try:
            self._engine.finish(ended)
        except StoreError as error:
            self._log.error("could not write the state file while stopping", reason=str(error))
        if self._web_opener is not None:
            self._web_opener.join(_WEB_PATIENCE_SECONDS)
        if self.web is not None:
            self.web.close()
        self._log.info("agent stopped")

    def _collect_hooks(self, deadline: float) -> list[HookEnded]:
        """Results of hooks that end until the deadline, or until somebody is tired of waiting."""
        ended: list[HookEnded] = []
        while self._hands.are_running() and time.monotonic() < deadline:
            try:
                item = self._inbox.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                break
            if item == _Command("stop"):
                break
            if isinstance(item, HookEnded):
                self._hands.forget_hook(item.effect)
                ended.append(item)
        return ended

    # --- a turn of the engine

    def _turn(self) -> bool:
        """Take what has come, decide, commit, perform. False when it is time to stop."""
        document_at = self._poller.succeeded_at  # before the inbox is emptied: nothing later is in it
        timeout = self._seconds_to_next_turn()
        may_go_on = True
        for item in self._take_items(timeout):
            may_go_on = self._take(item) and may_go_on
        self._hands.reap()
        if not may_go_on:
            return False
        if not self._engine.turn(document_at):
            time.sleep(_COMMIT_RETRY_SECONDS)
        self._tell_service()
        return True

    def _seconds_to_next_turn(self) -> float:
        if self._told_status is None:
            return _START_TICK_SECONDS
        if not self._engine.board:
            return 2 * _TICK_SECONDS  # a turn is cheap, to wake up for it is not
        wake_at = self._engine.next_wake_at()
        return min(_TICK_SECONDS, (wake_at - datetime.now(UTC)).total_seconds()) if wake_at else _TICK_SECONDS

    def _take_items(self, timeout: float) -> list[_Item]:
        items: list[_Item] = []
        try:
            items.append(self._inbox.get(timeout=max(0.0, timeout)))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            return items

    def _take(self, item: _Item) -> bool:
        match item:
            case _Command(word="reload"):
                self._reload()
            case _Command(word="pause" | "resume" as word):
                self._engine.set_paused(is_paused=word == "pause")
            case _Command():
                return False
            case _:
                self._engine.take(item)
        return True

    # --- the service manager

    def _tell_service(self) -> None:
        status = self._describe()
        if self._told_status is None:
            if not (self._poller.has_tried or self._engine.turned_at - self._started > _READY_PATIENCE_SECONDS):
                return
            self._service.tell("ready", status)
        elif status != self._told_status:
            self._service.tell_status(status)
        self._told_status = status
        # This turn has come to its end, so engine and store do; a poller that hangs is cured by a restart as well.
        if not self._poller.hangs_for():
            self._service.keep_alive()

    def _describe(self) -> str:
        """What the agent is at, in one line, which only changes when that does."""
        parts = []
        if self._engine.settings.agent.mode == "observe":
            parts.append("only observes")
        if self._engine.is_paused:
            parts.append("is paused: watches, and does nothing")
        if self._engine.store_failure:
            parts.append(f"cannot write the state file ({self._engine.store_failure})")
        if self._poller.failure:
            parts.append(f"polling fails ({self._poller.failure})")
        if self._policy.refused:
            parts.append("the policy file was refused, the one from before is in force")
        if self._web_failure:
            parts.append(f"its pages are not shown ({self._web_failure})")
        if self._access and self._access.refused:
            parts.append("agent.web_config was refused, what it said before is in force")
        pending = [summarize(workflow) for workflow in self._engine.board.values()]
        parts += pending or ["nothing is pending"]
        return "; ".join(parts)

    # --- policy

    def _reload(self) -> None:
        self._service.tell("reloading", "reads the policy file again")
        self._read_policy()
        self._service.tell("ready", self._describe())
        self._told_status = self._describe()

    def _read_policy(self) -> None:
        try:
            settings = self._load_settings()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the old policy is still good
            self._policy = replace(self._policy, refused=str(error))
            self._engine.refuse_settings(str(error))
            return
        self._policy = replace(self._policy, read_at=datetime.now(UTC), refused="")
        self._engine.change_settings(settings)

    # --- pages

    def _pages(self) -> dict[str, Callable[[], Page]]:
        return {
            "/": _Shared(self._human_page, _PAGE_SECONDS),
            "/healthz": self._health_page,
            "/readyz": self._ready_page,
            "/metrics": _Shared(self._metrics_page, _METRICS_SECONDS),
            "/status": self._status_page,
        }

    def _health_problems(self) -> list[str]:
        now = time.monotonic()
        problems = []
        if now - self._engine.turned_at > _STALL_SECONDS:
            problems.append(f"the engine has not turned for {now - self._engine.turned_at:.0f}s")
        if failure := self._engine.store_failure:
            problems.append(f"nothing can be done until the state file can be written: {failure}")
        if hangs_for := self._poller.hangs_for():
            problems.append(f"a poll should have ended {hangs_for:.0f}s ago")
        since_poll = now - (self._poller.succeeded or self._started)
        if since_poll > self._engine.settings.agent.healthy_within:
            problems.append(f"no poll has succeeded for {since_poll:.0f}s: {self._poller.failure or 'it hangs'}")
        if self._web_failure:  # to be read by ``status``, which asks through the state file
            problems.append(f"the pages are not shown: {self._web_failure}")
        return problems

    def _health_page(self) -> Page:
        problems = self._health_problems()
        if problems:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, ("\n".join(problems) + "\n").encode())
        return Page(HTTPStatus.OK, b"ok\n")

    def _ready_page(self) -> Page:
        busy = [workflow for workflow in self._engine.board.values() if workflow.is_prepared_for]
        if not busy:
            return Page(HTTPStatus.OK, b"ready\n")
        lines = [f"not ready: {w.event.type} {w.event.id} is {w.phase}\n" for w in busy]
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, "".join(lines).encode())

    def _metrics_page(self) -> Page:
        self._metrics.is_ready.set(is_ready(self._engine.board))
        if self._poller.succeeded_at is not None:
            self._metrics.last_poll_at.set(self._poller.succeeded_at.timestamp())
        return Page(HTTPStatus.OK, self._metrics.expose(), "text/plain; version=0.0.4; charset=utf-8")

    def _status_page(self) -> Page:
        return Page(HTTPStatus.OK, msgspec.json.format(self._describe_as_json()) + b"\n", "application/json")

    def _human_page(self) -> Page:
        status = self._status()
        try:
            store = Store.look_into(self._state_dir)
            try:
                recent = store.load_histories(limit=_RECENT)
                pauses = store.load_notes(kind="pause", limit=_RECENT)
            finally:
                store.close()
            text = render_page(status, recent, pauses)
        except StoreError as error:
            text = render_page(status, unread=str(error))
        # Text from a hook may be no text in UTF-8's sense.
        return Page(HTTPStatus.OK, text.encode("utf-8", "replace"), HTML, HEADERS)

    def _status(self) -> Status:
        """How the agent is now. For any thread."""
        engine = self._engine
        problems = self._health_problems()
        return Status(
            at=datetime.now(UTC),
            version=__version__,
            started_at=self._started_at,
            vm=Vm(names=engine.names(), vm_id=engine.identity.vm_id),
            mode=engine.settings.agent.mode,
            is_paused=engine.is_paused,
            ready=is_ready(engine.board),
            health=tuple(problems) if problems else "ok",
            policy=self._policy,
            rules=tuple([rule.name for rule in engine.settings.rules]),
            endpoint=engine.settings.imds.endpoint,
            last_poll_at=self._poller.succeeded_at,
            poll_failure=self._poller.failure,
            incarnation=engine.incarnation(),
            running=self._hands.running(),
            pending=tuple(engine.board.values()),
        )

    def _describe_as_json(self) -> bytes:
        return msgspec.json.encode(self._status())


class _Shared:
    """A page that takes some work, made once for all who ask within ``seconds``. For any thread."""

    def __init__(self, make: Callable[[], Page], seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._making = threading.Lock()
        self._began = inf
        self._made: tuple[float, Page] | None = None

    def __call__(self) -> Page:
        if page := self._fresh():
            return page
        # While somebody else makes it, it is soon there; of a disk that hangs, one who waits is enough.
        hangs = time.monotonic() - self._began > _PAGE_PATIENCE_SECONDS
        if self._making.acquire(timeout=0.0 if hangs else _PAGE_PATIENCE_SECONDS):
            try:
                if page := self._fresh():
                    return page
                self._began = time.monotonic()
                page = self._make()
                self._made = (time.monotonic(), page)
                return page
            finally:
                self._began = inf
                self._making.release()
        if self._made:
            return self._made[1]
        return Page(
            HTTPStatus.SERVICE_UNAVAILABLE, b"the page takes long to make; try again, or ask for /status\n"
        )

    def _fresh(self) -> Page | None:
        made = self._made
        return made[1] if made and time.monotonic() - made[0] < self._seconds else None


class _Endpoint:
    """Where the service is, the same for all who talk to it. For any thread."""

    def __init__(self, load_settings: Callable[[], ImdsSettings], imds: ImdsSettings) -> None:
        self._load_settings = load_settings
        self._imds = imds
        self._url = resolve_endpoint(self._imds.endpoint)

    def look_again(self, *, has_failed: bool) -> bool:
        """Follow the policy, and after a failure the lease that names the endpoint; True if there is news."""
        imds = self._load_settings()
        is_stale = imds != self._imds or (has_failed and imds.endpoint == "auto")
        url = resolve_endpoint(imds.endpoint) if is_stale else self._url
        has_changed = (imds, url) != (self._imds, self._url)
        self._imds, self._url = imds, url
        return has_changed

    @property
    def poll_interval(self) -> float:
        """Seconds."""
        return self._imds.poll_interval

    def connect(self) -> ImdsClient:
        """A client of one's own."""
        return ImdsClient(
            self._url,
            api_version=self._imds.api_version,
            request_timeout=self._imds.request_timeout,
            first_request_timeout=self._imds.first_request_timeout,
        )


class _Poller:
    """Fetches the document at the policy's pace. Never waits for anything but the service."""

    def __init__(self, endpoint: _Endpoint, put: _Put, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._put = put
        self._metrics = metrics
        self._good_polls = metrics.polls.labels("ok")  # looked up once: this is done every second, for ever
        self._failures = 0
        self._failure_log = FailureLog("polling the metadata service")
        self.stop_requested = threading.Event()
        self.succeeded: float | None = None
        """When a poll last succeeded, monotonic."""
        self.succeeded_at: datetime | None = None
        self.failure = ""
        """Why the last poll failed; "" if it did not."""
        self.has_tried = False
        """Whether the first poll has ended, in whatever way."""
        self._expected_back: float | None = None

    def hangs_for(self) -> float:
        """For how many seconds the loop is overdue; 0 if it is not."""
        if self._expected_back is None or self.stop_requested.is_set():
            return 0.0
        return max(0.0, time.monotonic() - self._expected_back)

    def stop(self) -> None:
        self.stop_requested.set()

    def run(self) -> None:
        client = self._endpoint.connect()
        body = b""
        while not self.stop_requested.is_set():
            if self._endpoint.look_again(has_failed=bool(self.failure)):
                client.close()
                client, body = self._endpoint.connect(), b""
            began = time.monotonic()
            self._expected_back = began + _RESOLVE_SECONDS + client.fetch_timeout
            delay = self._endpoint.poll_interval
            try:
                new_body = client.fetch()
                if new_body != body:
                    self._put(parse_document(new_body))
                    self._metrics.documents.inc()
                    body = new_body
                self._succeed(began)
            except (ImdsError, DocumentError) as error:
                delay = max(delay, self._fail(error))
            self.has_tried = True
            due = max(time.monotonic(), began + delay)  # missed ticks are dropped, not made up for
            self._expected_back = due + _RESOLVE_SECONDS
            self.stop_requested.wait(due - time.monotonic())
            late = time.monotonic() - due
            if late > _PAUSE_SECONDS:
                self._put(Paused(late))
        client.close()

    def _succeed(self, began: float) -> None:
        now = time.monotonic()
        self._good_polls.inc()
        self._metrics.poll_seconds.observe(now - began)
        self._failure_log.succeeded(now)
        self._failures, self.failure = 0, ""
        self.succeeded, self.succeeded_at = now, datetime.now(UTC)

    def _fail(self, error: ImdsError | DocumentError) -> float:
        """Count and tell; returns how long to wait."""
        self._failures += 1
        self.failure = str(error)
        self._metrics.polls.labels(error.kind).inc()
        self._failure_log.failed(error.kind, str(error), time.monotonic())
        return backoff_seconds(error.kind if isinstance(error, ImdsError) else "malformed", self._failures)


class _Identifier:
    """Asks the service who this VM is, until it says so; without a name no event can be told to be ours."""

    def __init__(self, endpoint: _Endpoint, put: _Put, stop_requested: threading.Event) -> None:
        self._endpoint = endpoint
        self._put = put
        self._stop_requested = stop_requested
        self.has_tried = threading.Event()

    def run(self) -> None:
        failure_log = FailureLog("asking for this VM's name")
        failures = 0
        while True:
            client = self._endpoint.connect()
            try:
                identity = client.fetch_identity()
                self._put(identity)
                if identity.name:
                    failure_log.succeeded(time.monotonic())
                    return
                failure_log.failed("no_name", "the service does not tell it; set vm.name", time.monotonic())
                delay = _NO_NAME_RETRY_SECONDS
            except ImdsError as error:
                failures += 1
                delay = max(_IDENTITY_RETRY_SECONDS, backoff_seconds(error.kind, failures))
                failure_log.failed(error.kind, str(error), time.monotonic())
            finally:
                client.close()
                self.has_tried.set()
            if self._stop_requested.wait(delay):
                return


class _Threads:
    """The engine's hands: each hook has a thread of its own, and so has each request to approve.

    One that has no answer must not hold up another. For the engine's thread.
    """

    def __init__(self, endpoint: _Endpoint, put: _Put, instance: str) -> None:
        self._endpoint = endpoint
        self._put = put
        self._instance = instance
        self._runs: dict[HookKey | None, tuple[HookRun, RunningHook]] = {}
        self._have_run = False

    def start_hook(
        self,
        effect: RunHook | None,
        name: str,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        """Run a hook, for ``effect`` or (None) for on_clear; its end comes through the inbox. Never raises."""
        if hook is None:
            result = without_run(name, "not_started", "there is no such hook in the policy any more")
            self._put(HookEnded(effect, result))
            return
        log = get_logger().bind(hook=name, stage=environment["SCHEDULED_EVENT_STAGE"], event_id=event_id)
        run = HookRun(
            name,
            hook,
            environment=environment,
            stdin=stdin,
            deadline=deadline,
            on_line=partial(_log_output, log),
            instance=self._instance,
        )

        def work() -> None:
            try:
                result = run.run()
            except BaseException as error:  # or the workflow would wait for its hook for ever
                log.exception("a bug in the agent")
                result = without_run(name, "not_started", f"a bug in the agent: {error!r}")
            self._put(HookEnded(effect, result))

        started = RunningHook(
            workflow_id=effect.workflow_id if effect else "",
            stage=effect.stage if effect else "on_clear",
            hook=name,
            since=datetime.now(UTC),
        )
        self._runs[key_of(effect)], self._have_run = (run, started), True
        try:
            threading.Thread(target=work, name=f"hook-{name}", daemon=True).start()
        except RuntimeError as error:  # no memory for a thread
            self._put(HookEnded(effect, without_run(name, "not_started", str(error))))

    def cancel_hook(self, key: HookKey | None) -> None:
        """Have the hook in flight ended, if there is one; its result says canceled."""
        if key in self._runs:
            self._runs[key][0].cancel()

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        """NotBefore has moved."""
        if key in self._runs:
            self._runs[key][0].set_deadline(deadline)

    def forget_hook(self, effect: RunHook | None) -> None:
        """The end of this hook has been taken from the inbox."""
        self._runs.pop(key_of(effect), None)

    def is_running(self, key: HookKey | None) -> bool:
        return key in self._runs

    def reap(self) -> None:
        """Release what hooks left behind and what has ended since: a process that dies may leave others to us."""
        if self._have_run:
            host.reap_orphans()

    def are_running(self) -> bool:
        return bool(self._runs)

    def running(self) -> tuple[RunningHook, ...]:
        """The hooks that run, for any thread."""
        return tuple([started for _, started in list(self._runs.values())])

    def cancel_all(self, grace_seconds: float) -> None:
        """End everything within the grace."""
        for run, _ in self._runs.values():
            run.cancel()
            run.set_deadline(time.monotonic() + grace_seconds)

    def report(self, news: HookEnded) -> None:
        """Into the inbox."""
        self._put(news)

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        """Send all of them in one request; each is answered through the inbox."""

        def work() -> None:
            client = self._endpoint.connect()
            try:
                client.approve([approve.event_id for approve in approvals], incarnation)
                self._answer(approvals, "", "")
            except ImdsError as error:
                self._answer(approvals, error.kind, str(error))
            except BaseException as error:  # noqa: BLE001 - or the workflows would wait for an answer for ever
                get_logger().exception("a bug in the agent")
                self._answer(approvals, "bug", repr(error))
            finally:
                client.close()

        try:
            threading.Thread(target=work, name="approval", daemon=True).start()
        except RuntimeError as error:  # no memory for a thread
            self._answer(approvals, "no_thread", str(error))

    def _answer(self, approvals: list[Approve], kind: str, detail: str) -> None:
        for approve in approvals:
            self._put(ApprovalAnswered(workflow_id=approve.workflow_id, error_kind=kind, detail=detail))


def _log_output(log: Logger, line: str) -> None:
    log.info("hook output", line=line)
