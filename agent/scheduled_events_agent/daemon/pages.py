"""What the web server answers at each path, and the server itself.

Reads what the engine, the poller and the executor publish, and changes nothing. The one invariant: clients cost a
bounded amount of work, however many and however slow they are, and none of it is the engine's.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from math import inf
from pathlib import Path

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import __version__, host
from scheduled_events_agent.daemon.polling import Poller
from scheduled_events_agent.daemon.threads import Threads
from scheduled_events_agent.engine import Engine
from scheduled_events_agent.log import get_logger
from scheduled_events_agent.log_ids import LogId
from scheduled_events_agent.metrics import Metrics
from scheduled_events_agent.status import (
    NO_OPTIONS,
    Attention,
    CommandOptions,
    FleetState,
    HeldEvent,
    History,
    HistoryItem,
    Journal,
    JournalEntry,
    NotifiedTarget,
    PolicyInForce,
    ShownWorkflow,
    Status,
    SuggestedCommand,
    Vm,
    WebConfigRejected,
)
from scheduled_events_agent.status.attention import attention
from scheduled_events_agent.status.messages import as_shown, headline, utc
from scheduled_events_agent.status.summaries import with_words
from scheduled_events_agent.store import FILE_NAME, Store, StoreError, notified
from scheduled_events_agent.web.files import FILES
from scheduled_events_agent.web.server import Page, WebError, WebServer
from scheduled_events_agent.web.tls import Tls, TlsError
from scheduled_events_agent.workflow import Board, Workflow, is_ready

# An engine that has not turned for this long hangs. (It rests ten seconds, and waits two for a slow disk.)
_STALL_SECONDS = 20.0
_MAX_BUGS = 5  # that are named
# What /history shows: this many events and pauses, and entries of each event. The page shows one entry less.
_RECENT = 20
_ENTRIES = 41
# The journal is read once in this time at most, and a client waits this long for a disk that hangs.
_PAGE_SECONDS = 1.0
_PAGE_PATIENCE_SECONDS = 1.0
# Metrics and /status are made once in this time at most: clients that ask together share one answer.
_METRICS_SECONDS = 0.1
_STATUS_SECONDS = 0.5
# Longer JSON is for programs alone, and not indented.
_READABLE_BYTES = 256 * 1024
# The agent starts without its pages if their port is taken.
_WEB_RETRY_SECONDS = 3.0


class Pages:
    """The pages and their server. For any thread."""

    def __init__(
        self,
        engine: Engine,
        poller: Poller,
        executor: Threads,
        metrics: Metrics,
        *,
        state_dir: Path,
        policy: PolicyInForce,
        command_options: CommandOptions = NO_OPTIONS,
    ) -> None:
        """``command_options``: see ``Status``."""
        self._engine = engine
        self._poller = poller
        self._executor = executor
        self._metrics = metrics
        self._state_dir = state_dir
        self.policy = policy
        self._command_options = command_options
        self._unhealthy_since: datetime | None = None
        self._web_config_rejected: WebConfigRejected | None = None
        self._worded: tuple[Board, tuple[ShownWorkflow, ...]] = ({}, ())
        self._log = get_logger()
        self._started = time.monotonic()
        self._started_at = datetime.now(UTC)
        self.web: WebServer | None = None
        """The web server while there is one; None as long as it cannot listen."""
        self.tls: Tls | None = None
        """None if there is no agent.web_config, or it could not be read yet."""
        self.failure = ""
        """Why the web server that the policy asks for is not there."""
        self.has_tried = threading.Event()
        """Set when the first attempt to open it has ended."""

    def serve(self) -> None:
        """Open the web server, and try until that works. Blocks until then, or until the agent stops."""
        agent = self._engine.settings.agent
        while not self._poller.stop_requested.is_set():
            failure = ""
            try:
                if agent.web_config and not self.tls:
                    self.tls = Tls(Path(agent.web_config), self._tell_tls)
                self.web = WebServer(agent.listen, self._makers(), tls=self.tls, names=agent.listen_names)
            except (TlsError, WebError) as error:
                failure = str(error)
            if failure and failure != self.failure:
                text = "the pages cannot be shown; this is tried again"
                self._log.error(text, log_id=LogId.PAGES_FAILED, reason=failure)
            elif self.web and self.failure:
                self._log.info("the pages are shown now", log_id=LogId.PAGES_WORK, listen=self.web.address)
            self.failure = failure
            self.has_tried.set()
            if self.web:
                return
            self._poller.stop_requested.wait(_WEB_RETRY_SECONDS)

    def _tell_tls(self, refused: str) -> None:
        self._web_config_rejected = WebConfigRejected(reason=refused, since=datetime.now(UTC)) if refused else None
        if refused:
            text = "agent.web_config was refused, what it said before is in force"
            self._log.error(text, log_id=LogId.PAGES_FAILED, reason=refused)
        else:
            self._log.info("agent.web_config is in force as it is now", log_id=LogId.PAGES_WORK)

    def close(self) -> None:
        """Stop serving."""
        if self.web is not None:
            self.web.close()

    def _makers(self) -> dict[str, Callable[[], Page]]:
        return {
            **FILES,
            "/healthz": self._health_page,
            "/readyz": self._ready_page,
            "/metrics": _Shared(self._metrics_page, _METRICS_SECONDS),
            "/status": _Shared(self._status_page, _STATUS_SECONDS, self._snapshot),
            "/history": _Shared(self._history_page, _PAGE_SECONDS),
        }

    def _health_problems(self) -> list[str]:
        now = time.monotonic()
        problems = []
        if now - self._engine.turned_at > _STALL_SECONDS:
            problems.append(f"the engine has not turned for {now - self._engine.turned_at:.0f}s")
        if failure := self._engine.store_failure:
            problems.append(f"nothing can be done until the state file can be written: {failure}")
        for event_id, kind in list(self._engine.bugs.items())[:_MAX_BUGS]:
            what = f"event {event_id}" if event_id else "what is pending"
            problems.append(f"{what} cannot be handled: a bug in the agent ({kind}); see the log")
        if (overdue := self._poller.overdue_seconds()) > _STALL_SECONDS:
            problems.append(f"the poller has given no sign of life for {overdue:.0f}s")
        if self._lacks_poll():
            since = self._poller.succeeded_at or self._started_at
            why = self._poller.failure or "it hangs"
            problems.append(f"no poll has succeeded since {utc(since)}: {why}")
        if self.failure:  # for the command status, which asks through the state file
            problems.append(f"the pages are not shown: {self.failure}")
        return problems

    def _lacks_poll(self) -> bool:
        """Whether the last poll that succeeded is so long ago that the agent is unhealthy."""
        since_poll = time.monotonic() - (self._poller.succeeded or self._started)
        return since_poll > self._engine.settings.agent.healthy_within

    def _health_page(self) -> Page:
        problems = self._health_problems()
        if problems:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, ("\n".join(problems) + "\n").encode())
        return Page(HTTPStatus.OK, b"ok\n")

    def _ready_page(self) -> Page:
        busy = [workflow for workflow in self._engine.board.values() if workflow.is_prepared_for]
        if not busy:
            return Page(HTTPStatus.OK, b"ready\n")
        lines = [f"not ready: {w.event.type} {w.event.id} is {w.phase.replace('_', ' ')}\n" for w in busy]
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, "".join(lines).encode())

    def _metrics_page(self) -> Page:
        self._metrics.is_ready.set(is_ready(self._engine.board))
        self._metrics.set_attention(self.attention())
        if self._poller.succeeded_at is not None:
            self._metrics.last_poll_at.set(self._poller.succeeded_at.timestamp())
        return Page(HTTPStatus.OK, self._metrics.expose(), "text/plain; version=0.0.4; charset=utf-8")

    def _snapshot(self) -> object:
        """What a status shows, apart from the time."""
        engine = self._engine
        poller = self._poller
        at_work = (
            self._executor.running(),
            engine.names(),
            self.failure,
            self._web_config_rejected,
            engine.notifying.losses,
            engine.fleet.last_update,
            engine.fleet.not_ready,
            engine.remembered.known,
            engine.bugs,
        )
        return (engine.board, engine.settings, self.policy, poller.succeeded_at, poller.failure, *at_work)

    def _status_page(self) -> Page:
        status = self.status()
        if self._engine.settings.agent.show_hook_output:
            with suppress(StoreError):
                status = replace(status, hook_output=output_of_pending(self._load_recent()[0], status.pending))
        return _json_page(status)

    def _history_page(self) -> Page:
        try:
            recent, pauses = self._load_recent()
        except StoreError as error:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(errors="replace"))
        events = [HistoryItem(workflow=as_shown(one.workflow), entries=self._shown(one.entries)) for one in recent]
        notes = [HistoryItem(workflow=None, entries=(pause,)) for pause in pauses]
        items = sorted(
            (*events, *notes),
            key=lambda item: item.workflow.first_seen_at if item.workflow else item.entries[0].at,
        )
        return _json_page(Journal(at=datetime.now(UTC), histories=tuple(items)))

    def _shown(self, entries: Sequence[JournalEntry]) -> tuple[JournalEntry, ...]:
        """The last entries, with hooks' output only where the policy shows it."""
        if self._engine.settings.agent.show_hook_output:
            return tuple(entries[-_ENTRIES:])
        return tuple(replace(entry, detail="") for entry in entries[-_ENTRIES:])

    def _load_recent(self) -> tuple[Sequence[History], Sequence[JournalEntry]]:
        """The latest events and pauses. Raises StoreError."""
        with closing(Store.look_into(self._state_dir)) as store:
            return store.load_histories(limit=_RECENT), store.load_notes(kind="pause", limit=_RECENT)

    def status(self) -> Status:
        """How the agent is now, in words too. For any thread."""
        return with_words(self._facts())

    def headline(self) -> str:
        """How the agent is now, in one line. For any thread."""
        facts = self._facts()
        return headline(replace(facts, attention=attention(facts)))

    def attention(self) -> tuple[Attention, ...]:
        """What needs a person now. For any thread."""
        return attention(self._facts())

    def _facts(self) -> Status:
        engine = self._engine
        now = datetime.now(UTC)
        supervisor = host.supervisor_commands()
        problems = self._health_problems()
        unhealthy_since = (self._unhealthy_since or now) if problems else None
        self._unhealthy_since = unhealthy_since
        return Status(
            at=now,
            state_file=str(self._state_dir / FILE_NAME),
            agent_log=engine.agent_log,
            unclean_starts=engine.unclean_starts,
            version=__version__,
            started_at=self._started_at,
            vm=Vm(names=engine.names(), vm_id=engine.identity.vm_id),
            mode=engine.settings.agent.mode,
            ready=is_ready(engine.board),
            health=tuple(problems) if problems else "ok",
            unhealthy_since=unhealthy_since,
            web_config_rejected=self._web_config_rejected,
            policy=self.policy,
            rules=tuple([rule.name for rule in engine.settings.rules]),
            endpoint=engine.settings.imds.endpoint,
            api_version=self._poller.api_version,
            recommendations_failure=self._poller.recommendations_failure,
            last_poll_at=self._poller.succeeded_at,
            poll_failure=self._poller.failure,
            incarnation=engine.incarnation(),
            others_events=engine.documents.others_events,
            holds=tuple(
                [
                    HeldEvent(event_id=key, user=hold.user, at=hold.at, last_seen_at=hold.last_seen_at)
                    for key, hold in engine.remembered.holds.items()
                ]
            ),
            running=self._executor.running(),
            pending=self._pending(),
            command_options=self._command_options,
            command_prefix=supervisor.prefix,
            supervisor_commands=(
                SuggestedCommand(command=supervisor.status, effect="tell whether it runs"),
                SuggestedCommand(command=supervisor.log, effect="show the end of its log"),
            ),
            notify=tuple(self._notified()),
            fleet=self._fleet(),
        )

    def _fleet(self) -> FleetState | None:
        settings = self._engine.settings.fleet
        update = self._engine.fleet.last_update
        if settings is None:
            return None
        same_name = update.same_name_warnings(self._engine.identity.vm_id)
        return FleetState(
            group=settings.group or update.group,
            error=update.error,
            unavailable_since=update.unavailable_since,
            not_ready=self._engine.fleet.not_ready,
            warnings=tuple(filter(None, (settings.members_fault(self._engine.names()), *same_name))),
        )

    def _notified(self) -> Iterator[NotifiedTarget]:
        waiting = self._engine.notifying.waiting
        failures = self._executor.notify_failures()
        losses = self._engine.notifying.losses
        for target in self._engine.settings.notify:
            shown = notified(target.name, waiting.get(target.name), losses.get(target.name))
            yield replace(shown, failure=failures.get(target.name))

    def _pending(self) -> tuple[ShownWorkflow, ...]:
        """Put into words once for each board, which is never changed."""
        board = self._engine.board
        known, shown = self._worded
        if known is not board:
            shown = tuple(map(as_shown, board.values()))
            self._worded = (board, shown)
        return shown


def output_of_pending(recent: Iterable[History], pending: Iterable[Workflow]) -> tuple[JournalEntry, ...]:
    """The entries with what hooks of pending events wrote."""
    open_ids = {workflow.id for workflow in pending}
    entries = [entry for history in recent if history.workflow.id in open_ids for entry in history.entries]
    return tuple([entry for entry in entries if entry.hook and entry.detail])


def _json_page(answer: Status | Journal) -> Page:
    body = msgspec.json.encode(answer)
    if len(body) < _READABLE_BYTES:
        body = msgspec.json.format(body)
    return Page(HTTPStatus.OK, body + b"\n", "application/json")


class _Shared:
    """A page that takes some work, made once for all clients within ``seconds``. For any thread."""

    def __init__(self, make: Callable[[], Page], seconds: float, snapshot: Callable[[], object] = tuple) -> None:
        """``snapshot``: what the page shows; when that has changed, the page is made anew at once."""
        self._make = make
        self._seconds = seconds
        self._snapshot = snapshot
        self._shown: object = None
        self._making = threading.Lock()
        self._made_at = -inf
        self._page = Page(
            HTTPStatus.SERVICE_UNAVAILABLE, b"this takes long to read; try again, or ask for /status\n"
        )

    def __call__(self) -> Page:
        # Another client's thread may be making it just now. If that hangs, the last one must do.
        if self._making.acquire(timeout=_PAGE_PATIENCE_SECONDS):
            try:
                snapshot = self._snapshot()
                if time.monotonic() - self._made_at >= self._seconds or snapshot != self._shown:
                    self._page = self._make()
                    self._made_at = time.monotonic()
                    self._shown = snapshot
            finally:
                self._making.release()
        return self._page
