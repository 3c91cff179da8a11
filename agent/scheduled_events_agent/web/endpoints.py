"""The web server, and its answer at each path.

It calls functions for the contents, and changes nothing. Invariant: clients cause a bounded amount of work,
however many and however slow they are, and none of it is done by the engine.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.engine import Snapshot
from scheduled_events_agent.status import (
    Journal,
    JournalRecord,
    Status,
    WebConfigRejected,
    to_json,
)
from scheduled_events_agent.status.events import with_output
from scheduled_events_agent.status.facts import History
from scheduled_events_agent.status.history import merge, to_journal, to_public
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.web.server import Response, WebError, WebServer
from scheduled_events_agent.web.static import FILES
from scheduled_events_agent.web.tls import Tls, TlsError

# /history shows this many events and records of each kind about the agent, and records of each event. The page
# shows one of these less.
_RECENT = 20
_MAX_RECORDS = 41
# The journal is read at most once in this time, and a client waits this long for a disk that hangs.
_PAGE_SECONDS = 1.0
_PAGE_TIMEOUT_SECONDS = 1.0
# Metrics and /status are built at most once in this time: clients that ask together share one answer.
_METRICS_SECONDS = 0.1
_STATUS_SECONDS = 0.5
# Longer JSON is read only by programs, and is not indented.
_READABLE_BYTES = 256 * 1024
# The agent starts without its pages if their port is taken.
_WEB_RETRY_SECONDS = 3.0


class WebState(NamedTuple):
    """The state of the web server, for the status."""

    failure: str
    """Why the web server that the policy asks for is not open; "" if it is."""
    config_rejected: WebConfigRejected | None


class Endpoints:
    """The endpoints of the agent, and their web server. For any thread."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        status: Callable[[], Status],
        status_basis: Callable[[], object],
        health: Callable[[], Literal["ok"] | tuple[str, ...]],
        metrics: Callable[[], bytes],
        state_dir: Path,
        stop_requested: threading.Event,
    ) -> None:
        """``status_basis`` returns another value when a new status must be shown at once.

        ``stop_requested``: when it is set, ``serve`` tries no longer.
        """
        self._snapshot = snapshot
        self._status = status
        self._status_basis = status_basis
        self._health = health
        self._metrics = metrics
        self._state_dir = state_dir
        self._stop_requested = stop_requested
        self._web_config_rejected: WebConfigRejected | None = None
        self._log = get_logger()
        self.web: WebServer | None = None
        """The web server while there is one; None as long as it cannot listen."""
        self.tls: Tls | None = None
        """None if there is no agent.web_config, or it could not be read yet."""
        self.failure = ""
        """Why the web server is not open; "" if it is."""
        self.has_tried = threading.Event()
        """Set when the first attempt to open it has ended."""

    def state(self) -> WebState:
        return WebState(self.failure, self._web_config_rejected)

    def serve(self) -> None:
        """Open the web server, and try until that works. Blocks until then, or until the agent stops."""
        agent = self._snapshot().settings.agent
        while not self._stop_requested.is_set():
            failure = ""
            try:
                if agent.web_config and not self.tls:
                    self.tls = Tls(Path(agent.web_config), self._report_tls)
                self.web = WebServer(agent.listen, self._handlers(), tls=self.tls, names=agent.listen_names)
            except (TlsError, WebError) as error:
                failure = str(error)
            if failure and failure != self.failure:
                text = "the web server cannot be opened; this is tried again"
                self._log.error(text, log_id=LogId.PAGES_FAILED, reason=failure)
            elif self.web and self.failure:
                self._log.info("the web server is listening", log_id=LogId.PAGES_WORK, listen=self.web.address)
            self.failure = failure
            self.has_tried.set()
            if self.web:
                return
            self._stop_requested.wait(_WEB_RETRY_SECONDS)

    def _report_tls(self, failure: str) -> None:
        self._web_config_rejected = WebConfigRejected(reason=failure, since=datetime.now(UTC)) if failure else None
        if failure:
            text = "agent.web_config is rejected; its previous content is in force"
            self._log.error(text, log_id=LogId.PAGES_FAILED, reason=failure)
        else:
            self._log.info("the current agent.web_config is in force", log_id=LogId.PAGES_WORK)

    def close(self) -> None:
        """Stop serving."""
        if self.web is not None:
            self.web.close()

    def _handlers(self) -> dict[str, Callable[[], Response]]:
        return {
            **FILES,
            "/healthz": self._health_page,
            "/readyz": self._ready_page,
            "/metrics": _CachedResponse(self._metrics_page, _METRICS_SECONDS),
            "/status": _CachedResponse(self._status_page, _STATUS_SECONDS, self._status_basis),
            "/history": _CachedResponse(self._history_page, _PAGE_SECONDS),
        }

    def _health_page(self) -> Response:
        problems = self._health()
        if problems != "ok":
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, ("\n".join(problems) + "\n").encode(errors="replace"))
        return Response(HTTPStatus.OK, b"ok\n")

    def _ready_page(self) -> Response:
        busy = [workflow for workflow in self._snapshot().workflows.values() if workflow.is_prepared_for]
        if not busy:
            return Response(HTTPStatus.OK, b"ready\n")
        lines = [f"not ready: {w.event.type} {w.event.id} is {w.phase.replace('_', ' ')}\n" for w in busy]
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, "".join(lines).encode())

    def _metrics_page(self) -> Response:
        return Response(HTTPStatus.OK, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")

    def _status_page(self) -> Response:
        status = self._status()
        if self._snapshot().settings.agent.show_hook_output:
            with suppress(StoreError), closing(Store.open_readonly(self._state_dir)) as store:
                status = with_output(status, store.load_last_output)
        return _json_page(status)

    def _history_page(self) -> Response:
        try:
            recent, agent_records = self._load_recent()
        except StoreError as error:
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(errors="replace"))
        histories = [replace(history, records=self._shown(history.records)) for history in recent]
        return _json_page(to_journal(merge(histories, map(to_public, agent_records)), datetime.now(UTC)))

    def _shown(self, records: Sequence[JournalRecord]) -> tuple[JournalRecord, ...]:
        """The last records, with hooks' output only where the policy shows it."""
        if self._snapshot().settings.agent.show_hook_output:
            return tuple(records[-_MAX_RECORDS:])
        return tuple(replace(record, detail="") for record in records[-_MAX_RECORDS:])

    def _load_recent(self) -> tuple[Sequence[History], Sequence[JournalRecord]]:
        """The latest events, and records about the agent. Raises StoreError."""
        with closing(Store.open_readonly(self._state_dir)) as store:
            return store.load_histories(limit=_RECENT), store.load_records(limit=_RECENT)


def _json_page(answer: Status | Journal) -> Response:
    body = to_json(answer)
    if len(body) < _READABLE_BYTES:
        body = msgspec.json.format(body)
    return Response(HTTPStatus.OK, body + b"\n", "application/json")


class _CachedResponse:
    """A response that costs some work; built once for all clients within ``seconds``. For any thread."""

    def __init__(self, make: Callable[[], Response], seconds: float, basis: Callable[[], object] = tuple) -> None:
        """``basis``: the data of the response; when it has changed, the response is built again at once."""
        self._make = make
        self._seconds = seconds
        self._basis = basis
        self._shown: object = None
        self._making = threading.Lock()
        self._made_at = -inf
        self._page = Response(
            HTTPStatus.SERVICE_UNAVAILABLE, b"this takes long to read; try again, or ask for /status\n"
        )

    def __call__(self) -> Response:
        # Another client's thread may be building it now. If that hangs, the last response is used.
        if self._making.acquire(timeout=_PAGE_TIMEOUT_SECONDS):
            try:
                basis = self._basis()
                if time.monotonic() - self._made_at >= self._seconds or basis != self._shown:
                    self._page = self._make()
                    self._made_at = time.monotonic()
                    self._shown = basis
            finally:
                self._making.release()
        return self._page
