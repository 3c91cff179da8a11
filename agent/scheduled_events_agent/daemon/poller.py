"""Polls the metadata service for the document, asks it for this VM's name, and puts both into the engine's inbox.

Invariant: the poller waits only for the service, and a request without an answer does not delay the next one.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec.structs import replace

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.engine import MachinePaused, Message, Snapshot
from scheduled_events_agent.imds.api_version import (
    BASELINE_VERSION,
    FallbackResult,
    VersionFallback,
    candidate_versions,
    fetch_with_fallback,
)
from scheduled_events_agent.imds.client import ImdsBackoff, ImdsClient, ImdsError, connect
from scheduled_events_agent.imds.clock import ClockTracker
from scheduled_events_agent.imds.document import (
    REBALANCE_VERSION,
    RECOMMENDATION,
    ApiVersion,
    Document,
    check_limits,
    parse_document,
)
from scheduled_events_agent.imds.guest_proxy import GuestProxy
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy import names_recommendations
from scheduled_events_agent.policy.settings import ImdsSettings
from scheduled_events_agent.status import ClockWrong
from scheduled_events_agent.status.actions import SHORT_ID
from scheduled_events_agent.status.messages import clock_difference, clock_effect
from scheduled_events_agent.telemetry.log import ChangeLogger, get_logger, is_debugging
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics

# A tick that is late by more than this is a pause of the machine, not the scheduler's noise.
_PAUSE_SECONDS = 1.0
# Without a name nothing is done, so the next request comes soon; later if the service answered without a name.
_IDENTITY_RETRY_SECONDS = 1.0
_NO_NAME_RETRY_SECONDS = 10.0
# After this long without an answer, hedged requests are sent beside the first one: one in each interval, and one
# at a time. That is far below the service's limit of five a second.
_HEDGE_AFTER_SECONDS = 2.0
# Longest time between two heartbeats without a wait: enough for a big document, short enough for the watchdog.
_SLACK_SECONDS = 1.0
# At level debug the log has at most this many events of a document.
_MAX_EVENTS_LOGGED = 20

Put = Callable[[Message], None]
"""Puts a message into the engine's inbox; from any thread, never waits."""


class _Answer(NamedTuple):
    body: bytes
    clock_skew_seconds: float | None


class Poller:
    """Fetches the document at the policy's pace."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        put: Put,
        metrics: Metrics,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_failure`` is called when another ``error`` has come, or it has gone."""
        self._on_failure = on_failure
        self._snapshot = snapshot
        self._put = put
        self._metrics = metrics
        self._good_polls = metrics.polls.labels("ok")  # looking it up at every poll would cost CPU
        self._backoff = ImdsBackoff()
        self._failure_log = ChangeLogger("polling the metadata service", LogId.POLLING_FAILS, LogId.POLLING_WORKS)
        # Guards the fields that two threads share. Requests are numbered in the order in which they are sent.
        self._lock = threading.Lock()
        self._last_number = 0
        self._newest_answered = 0
        self._body = b""
        self._document: Document | None = None
        self.api_version: ApiVersion = BASELINE_VERSION
        """The api-version in which documents are answered, and approvals are sent."""
        self._fallback = VersionFallback()
        self._client: ImdsClient | None = None
        self._client_version: ApiVersion = BASELINE_VERSION
        self._imds: ImdsSettings | None = None
        self._sent: float | None = None  # since when the poller waits for an answer
        self.stop_requested = threading.Event()
        self.succeeded: float | None = None
        """When a poll last succeeded, monotonic."""
        self.succeeded_at: datetime | None = None
        self.error: ImdsError | DocumentError | None = None
        """Why the last poll failed."""
        self.guest_proxy = GuestProxy()
        """What answers have shown of Azure's proxy, for every client of this process."""
        self.clock_wrong: ClockWrong | None = None
        """By how much this VM's clock is wrong according to the answers; None if it is not."""
        self._clock = ClockTracker()
        self.has_tried = False
        """Whether the first poll has ended, in success or failure."""
        self._expected_back: float | None = None
        self._needs_hedge = threading.Event()

    def stalled_seconds(self) -> float:
        """For how long a heartbeat of the loop has been due; 0 if it is on time."""
        if self._expected_back is None or self.stop_requested.is_set():
            return 0.0
        return max(0.0, time.monotonic() - self._expected_back)

    def stop(self) -> None:
        self.stop_requested.set()
        self._needs_hedge.set()

    def _heartbeat(self, seconds: float) -> None:
        """Heartbeat; the next one is due in ``seconds``."""
        now = time.monotonic()
        self._expected_back = now + seconds + _SLACK_SECONDS
        if self._sent is not None and now - self._sent >= _HEDGE_AFTER_SECONDS / 4:
            self._needs_hedge.set()

    def run(self) -> None:
        while not self.stop_requested.is_set():
            self._sent = began = time.monotonic()
            self._heartbeat(0.0)
            delay = self._poll(self._connect)
            self._sent = None
            due = max(time.monotonic(), began + delay)  # missed ticks are dropped, and not done later
            self._heartbeat(due - time.monotonic())
            self.stop_requested.wait(due - time.monotonic())
            late = time.monotonic() - due
            if late > _PAUSE_SECONDS:
                self._put(MachinePaused(late))

    def _connect(self, version: ApiVersion, timeout: float) -> ImdsClient:
        """A client for the endpoint of the policy; after a failure, ``auto`` reads the DHCP lease again."""
        imds = self._snapshot().settings.imds
        is_other = imds is not self._imds or version != self._client_version
        if self._client is None or self.error is not None or is_other:
            self._client = connect(
                imds.endpoint,
                version,
                request_timeout=imds.request_timeout,
                first_request_timeout=imds.first_request_timeout if self.succeeded is None else 0.0,
                longest=timeout,
                on_wait=self._heartbeat,
                guest_proxy=self.guest_proxy,
            )
            self._imds = imds
            self._client_version = version
        return self._client

    def run_hedge(self) -> None:
        """Send hedged requests while the poller's own request has no answer."""
        while self._needs_hedge.wait() and not self.stop_requested.is_set():
            self._needs_hedge.clear()
            due = (self._sent or 0.0) + _HEDGE_AFTER_SECONDS
            while not self.stop_requested.wait(max(0.0, due - time.monotonic())):
                sent = self._sent
                began = time.monotonic()
                if sent is None or began - sent < _HEDGE_AFTER_SECONDS:
                    break
                due = began + self._poll(self._connect_hedge)

    def _connect_hedge(self, version: ApiVersion, timeout: float) -> ImdsClient:
        imds = self._snapshot().settings.imds
        return connect(
            imds.endpoint,
            version,
            request_timeout=imds.request_timeout,
            longest=timeout,
            guest_proxy=self.guest_proxy,
        )

    def _poll(self, load_client: Callable[[ApiVersion, float], ImdsClient]) -> float:
        """Send one request and handle the answer; returns the seconds from its beginning to the next one."""
        with self._lock:
            self._last_number += 1
            number = self._last_number
            began = time.monotonic()
        settings = self._snapshot().settings
        delay = settings.imds.poll_interval
        versions = candidate_versions(
            settings.imds.api_version,
            has_recommendations=names_recommendations(settings.rules),
            fallback=self._fallback,
            now=began,
        )
        try:
            answer = fetch_with_fallback(versions, lambda version, timeout: _fetch(load_client(version, timeout)))
            with self._lock:
                self._compare_clock(answer.content.clock_skew_seconds)
                # The answer to a later request may have come first.
                if number > self._newest_answered:
                    self._handle_document(answer.content.body, answer.version, began)
                    self._negotiate_version(versions, answer)
                    self._newest_answered = number
                    self._succeed(began)
        except (AgentError, OSError) as raised:
            error = request_error(raised)
            with self._lock:
                self._metrics.polls.labels(error.kind).inc()
                if number > self._newest_answered:
                    delay = max(delay, self._fail(error))
        self.has_tried = True
        return delay

    def _handle_document(self, body: bytes, version: ApiVersion, began: float) -> None:
        if self._document is None or body != self._body or version != self.api_version:
            has_recommendations = version >= REBALANCE_VERSION
            document = replace(parse_document(body), has_recommendations=has_recommendations)
            check_limits(document, self._snapshot().names)
            self._log_change(document, version, time.monotonic() - began)
            self._document = document
            self._metrics.documents.inc()
            self._body = body
        elif not self._snapshot().needs_answer:
            return
        self._put(replace(self._document, answered=time.monotonic()))

    def _log_change(self, document: Document, version: ApiVersion, seconds: float) -> None:
        if is_debugging():
            before = self._document.incarnation if self._document else ""
            events = [f"{event.type} {event.id[:SHORT_ID]} {event.status}" for event in document.events]
            get_logger().debug(
                "another document",
                incarnation=document.incarnation,
                incarnation_before=before,
                api_version=version,
                events=events[:_MAX_EVENTS_LOGGED],
                count=len(events),
                milliseconds=round(seconds * 1000, 1),
            )

    @property
    def recommendations_failure(self) -> str:
        """Why a rule's SpotRebalanceRecommendation events are not available; "" if they are. For any thread."""
        settings = self._snapshot().settings
        is_wanted = settings.imds.api_version == "auto" and names_recommendations(settings.rules)
        return self._fallback.failure if is_wanted else ""

    def _negotiate_version(self, asked: tuple[ApiVersion, ...], answer: FallbackResult[_Answer]) -> None:
        before = self._fallback
        self._fallback = before.after(asked, answer.error, time.monotonic())
        self.api_version = answer.version
        if self._fallback.failure and not before.failure:
            seconds = self._fallback.ask_again_seconds
            get_logger().warning(
                self._fallback.failure,
                log_id=LogId.API_VERSION,
                api_version=answer.version,
                ask_again_seconds=seconds,
            )
        elif before.failure and not self._fallback.failure:
            text = f"{RECOMMENDATION} events are available again"
            get_logger().info(text, log_id=LogId.API_VERSION, api_version=answer.version)

    def _compare_clock(self, skew_seconds: float | None) -> None:
        """Find out from one more answer whether this VM's clock is wrong. Without a Date it says nothing."""
        if skew_seconds is None:
            return
        before = self._clock.seconds_ahead
        self._clock.compare(skew_seconds)
        seconds = self._clock.seconds_ahead
        if seconds == before:
            return
        if seconds:
            since = self.clock_wrong.since if self.clock_wrong else datetime.now(UTC)
            self.clock_wrong = ClockWrong(seconds_ahead=seconds, since=since, command=host.clock_command())
            text = f"the clock of this VM is {clock_difference(seconds)}: {clock_effect(seconds)}"
            get_logger().warning(text, log_id=LogId.CLOCK, seconds_ahead=round(seconds))
        else:
            self.clock_wrong = None
            get_logger().info("the clock of this VM is right again", log_id=LogId.CLOCK)

    def _succeed(self, began: float) -> None:
        now = time.monotonic()
        self._good_polls.inc()
        self._metrics.poll_seconds.observe(now - began)
        self._failure_log.succeeded(now)
        self._backoff.reset()
        self._set_error(None)
        self.succeeded = now
        self.succeeded_at = datetime.now(UTC)

    def _set_error(self, error: ImdsError | DocumentError | None) -> None:
        before, self.error = self.error, error
        if str(error) != str(before):
            self._on_failure()

    def _fail(self, error: ImdsError | DocumentError) -> float:
        """Log the failure; returns how long to wait."""
        self._set_error(error)
        self._failure_log.failed(error.kind, str(error), time.monotonic())
        return self._backoff.seconds_after(error)


def _fetch(client: ImdsClient) -> _Answer:
    body = client.fetch()
    return _Answer(body, client.clock_skew_seconds)


class IdentityResolver:
    """Asks the service for this VM's name until it is known: without it no event can be matched to this VM."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        put: Put,
        stop_requested: threading.Event,
        guest_proxy: GuestProxy | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._put = put
        self._stop_requested = stop_requested
        self._guest_proxy = guest_proxy or GuestProxy()
        self.has_tried = threading.Event()
        self.error: AgentError | None = None
        """Why the last request did not bring the name; None if it did, or none has ended yet."""

    def run(self) -> None:
        failure_log = ChangeLogger("asking for this VM's name", LogId.VM_UNKNOWN, LogId.VM_KNOWN)
        backoff = ImdsBackoff()
        while True:
            try:
                imds = self._snapshot().settings.imds
                client = connect(
                    imds.endpoint, request_timeout=imds.request_timeout, guest_proxy=self._guest_proxy
                )
                identity = client.fetch_identity()
                self._put(identity)
                if identity.name:
                    self.error = None
                    failure_log.succeeded(time.monotonic())
                    return
                self.error = AgentError("the service does not report it; set vm.name", kind="no_name")
                failure_log.failed(self.error.kind, str(self.error), time.monotonic())
                delay = _NO_NAME_RETRY_SECONDS
            except (AgentError, OSError) as raised:
                self.error = error = request_error(raised)
                delay = max(_IDENTITY_RETRY_SECONDS, backoff.seconds_after(error))
                failure_log.failed(error.kind, str(error), time.monotonic())
            finally:
                self.has_tried.set()
            if self._stop_requested.wait(delay):
                return


def request_error(error: AgentError | OSError) -> ImdsError | DocumentError:
    """``error`` itself, or an ImdsError if the endpoint could not be determined."""
    return error if isinstance(error, ImdsError | DocumentError) else ImdsError(str(error), kind="unreachable")
