"""The poller through hours of trouble, which pass in a moment: its clock moves only while it waits or asks.

How each kind of trouble looks on the wire is the matter of test_imds_wire.py; that a real agent goes through all
of them with an event pending, of test_endpoint_faults.py.
"""

import queue
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
import structlog
from metric_values import value_of
from msgspec.structs import replace

from scheduled_events_agent.daemon import poller as module
from scheduled_events_agent.daemon.executor import ThreadExecutor
from scheduled_events_agent.daemon.poller import IdentityResolver, Poller
from scheduled_events_agent.engine import Message, Snapshot
from scheduled_events_agent.http.errors import IMDS_ERROR_KINDS, HttpErrorKind
from scheduled_events_agent.imds.client import EndpointError, Identity, ImdsClient, ImdsError
from scheduled_events_agent.imds.document import ApiVersion, Document
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy import Rule, When
from scheduled_events_agent.policy.settings import ImdsSettings, Settings
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import ApprovalAnswered, Approve

HOUR = 3600.0
DOCUMENT = (
    b'{"DocumentIncarnation": 1, "Events": [{"EventId": "a", "EventType": "Reboot", "Resources": ["vm-1"]}]}'
)
ASK_FOR_MORE: tuple[HttpErrorKind, ...] = ("throttled", "bad_request")
TIME_LIMIT = 10.0

Answer = bytes | ImdsError | DocumentError


class Clock:
    """The daemon's time module and the event that stops its poller, in one."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ends = float("inf")

    def monotonic(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.now >= self.ends

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.is_set()


class Service:
    """The metadata service, and what the engine publishes, as the poller meets them."""

    def __init__(
        self, clock: Clock, poll_interval: float, answer: Callable[[float], tuple[float, Answer]]
    ) -> None:
        """``answer``: what happens at a time since the start."""
        self.settings = Settings(imds=ImdsSettings(poll_interval=poll_interval))
        self.asked: list[float] = []
        self._clock = clock
        self._began = clock.now
        self._answer = answer

    names: tuple[str, ...] = ()
    clock_skew_seconds: float | None = None

    @property
    def needs_answer(self) -> bool:
        return False

    def connect(self, _endpoint: str, version: ApiVersion = "2020-07-01", **_: object) -> "Service":
        self.version = version
        return self

    def fetch(self) -> bytes:
        self.asked.append(self._clock.now - self._began)
        lasts, answer = self._answer(self.asked[-1])
        self._clock.now += lasts
        if isinstance(answer, bytes):
            return answer
        raise answer


class Run:
    """The actions of a poller between the beginning and the end."""

    def __init__(
        self,
        poll_interval: float,
        lasts: float,
        answer: Callable[[float], tuple[float, Answer]],
        kind: type[Service] = Service,
    ) -> None:
        self.clock = Clock()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.metrics = Metrics(tuple)
        self.service = kind(self.clock, poll_interval, answer)
        poller = Poller(lambda: cast("Snapshot", self.service), self.inbox.put, self.metrics)
        poller.stop_requested = cast("Any", self.clock)
        self.clock.ends = self.clock.now + lasts
        with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as log:
            patch.setattr(module, "time", self.clock)
            patch.setattr(module, "connect", self.service.connect)
            poller.run()
        self.log = [line for line in log if line["log_level"] != "debug"]

    def polls(self, outcome: str) -> float:
        return value_of(self.metrics.polls.labels(outcome))

    def messages(self, *names: str) -> list[tuple[object, ...]]:
        return [tuple(line[name] for name in names if name in line) for line in self.log]


def failing(kind: HttpErrorKind, until: float, lasts: float = 0.0) -> Callable[[float], tuple[float, Answer]]:
    """Fails until then, each time after so many seconds; after that it answers at once."""
    error = ImdsError(f"GET: {kind}", kind=kind)
    return lambda now: (lasts, error) if now < until else (0.0, DOCUMENT)


@pytest.fixture(scope="module")
def ten_hours_of_500() -> Run:
    return Run(1.0, 10 * HOUR + 60.5, failing("server_error", 10 * HOUR))


def test_ten_hours_of_500_are_polled_every_second_and_recover_in_one(ten_hours_of_500: Run) -> None:
    assert ten_hours_of_500.service.asked == [float(second) for second in range(36_061)]
    assert (ten_hours_of_500.polls("server_error"), ten_hours_of_500.polls("ok")) == (36_000, 61)


def test_ten_hours_of_500_are_logged_once_an_hour_and_at_the_end(ten_hours_of_500: Run) -> None:
    hourly = [
        ("polling the metadata service fails", "server_error", "GET: server_error", hour * 3600 + 1)
        for hour in range(10)
    ]
    over = ("polling the metadata service works again", 36_000, 36_000.0)
    fields = ("event", "kind", "reason", "failures", "after_seconds")
    assert ten_hours_of_500.messages(*fields) == [*hourly, over]


def test_ten_hours_of_500_reach_the_engine_only_as_one_final_document(ten_hours_of_500: Run) -> None:
    assert isinstance(document := ten_hours_of_500.inbox.get_nowait(), Document)
    assert [event.id for event in document.events] == ["a"]
    assert ten_hours_of_500.inbox.empty()


def test_hours_of_500_leave_nothing_behind_in_memory() -> None:
    blocks: dict[float, int] = {}
    error = ImdsError("GET: 500", kind="server_error")

    def answer(now: float) -> tuple[float, Answer]:
        if now % HOUR == 0.0:
            service.asked.clear()
            blocks[now] = sys.getallocatedblocks()
        return 0.0, error.with_traceback(None)

    clock = Clock()
    service = Service(clock, 1.0, answer)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    poller = Poller(lambda: cast("Snapshot", service), inbox.put, Metrics(tuple))
    poller.stop_requested = cast("Any", clock)
    clock.ends = clock.now + 10.5 * HOUR
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs():
        patch.setattr(module, "time", clock)
        patch.setattr(module, "connect", service.connect)
        poller.run()
    assert len(blocks) == 11
    assert inbox.empty()
    # One object kept for each failure would be 32,400 of them; what is left are the log lines of the test itself.
    assert blocks[10 * HOUR] - blocks[HOUR] < 1000


@pytest.mark.parametrize("poll_interval", [0.25, 1.0, 30.0])
@pytest.mark.parametrize("kind", [kind for kind in IMDS_ERROR_KINDS if kind not in ASK_FOR_MORE])
def test_polling_recovers_within_one_interval_after_any_fault(kind: HttpErrorKind, poll_interval: float) -> None:
    over = 100.3 * poll_interval
    run = Run(poll_interval, over + 3 * poll_interval, failing(kind, over))

    back = next(asked for asked in run.service.asked if asked >= over)
    assert back - over < poll_interval
    assert {later - earlier for earlier, later in pairwise(run.service.asked)} == {poll_interval}
    assert run.polls(kind) == 101
    assert run.polls("ok") >= 2


def test_polling_recovers_within_one_interval_after_invalid_documents() -> None:
    page = b"<html><body>Please sign in</body></html>"
    run = Run(1.0, 103.5, lambda now: (0.0, page if now < 100.5 else DOCUMENT))

    assert run.service.asked == [float(second) for second in range(104)]
    assert (run.polls("document"), run.polls("ok")) == (101, 3)


def test_a_request_that_was_given_up_is_followed_by_the_next_at_once() -> None:
    run = Run(1.0, 105.5, failing("timeout", 95.0, lasts=TIME_LIMIT))

    given_up = [10.0 * number for number in range(10)]
    assert run.service.asked == [*given_up, *(100.0 + number for number in range(6))]
    assert run.log[-1]["after_seconds"] == 90.0


@pytest.mark.parametrize(
    ("kind", "pauses"),
    [("throttled", [2.0, 4.0, 8.0, 16.0, 16.0]), ("bad_request", [5.0, 10.0, 10.0, 10.0, 10.0])],
)
def test_polling_slows_down_as_asked_until_the_first_good_answer(kind: HttpErrorKind, pauses: list[float]) -> None:
    run = Run(1.0, 10 * HOUR + 60.0, failing(kind, 10 * HOUR))

    gaps = [later - earlier for earlier, later in pairwise(run.service.asked)]
    assert gaps[:5] == pauses
    failures = int(run.polls(kind))
    assert set(gaps[5:failures]) == {pauses[-1]}
    assert set(gaps[failures:]) == {1.0}
    assert failures <= 10 * HOUR / pauses[-1] + 3


def test_a_storm_of_429_never_makes_polling_faster_than_the_interval() -> None:
    error = ImdsError("GET: 429", kind="throttled")
    run = Run(1.0, HOUR, lambda now: (0.0, DOCUMENT if int(now) % 5 == 0 else error))

    gaps = [later - earlier for earlier, later in pairwise(run.service.asked)]
    assert min(gaps) == 1.0
    assert max(gaps) <= 16.0
    assert run.polls("throttled") + run.polls("ok") == len(run.service.asked)


def test_errors_of_changing_kinds_are_logged_at_each_change_and_are_one_outage() -> None:
    kinds: Mapping[int, HttpErrorKind] = {0: "refused", 1: "refused", 2: "timeout", 3: "gone", 4: "gone"}
    run = Run(1.0, 6.5, lambda now: (0.0, ImdsError("GET", kind=kinds[int(now)]) if now < 5 else DOCUMENT))

    assert run.messages("kind", "failures") == [("refused", 1), ("timeout", 3), ("gone", 4), (5,)]


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("server_error", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), ("throttled", [0.0, 2.0, 6.0, 14.0])],
)
def test_the_name_is_asked_every_second_and_less_often_if_it_is_not_known(
    kind: HttpErrorKind, asked: list[float]
) -> None:
    clock = Clock()
    began, over = clock.now, asked[-1]

    class Instance(Service):
        def fetch_identity(self) -> Identity:
            self.asked.append(clock.now - began)
            failures.append(str(resolver.error or ""))
            if self.asked[-1] < over:
                raise ImdsError("GET", kind=kind)
            return Identity(name="vm-1" if self.asked[-1] > over else "", vm_id="")

    service = Instance(clock, 1.0, lambda _: (0.0, DOCUMENT))
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    resolver = IdentityResolver(lambda: cast("Snapshot", service), inbox.put, cast("Any", clock))
    failures: list[str] = []
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as log:
        patch.setattr(module, "time", clock)
        patch.setattr(module, "connect", service.connect)
        resolver.run()
    assert service.asked == [*asked, asked[-1] + 10.0]
    assert failures == ["", *["GET"] * (len(asked) - 1), "the service does not report it; set vm.name"]
    assert resolver.error is None
    assert [line.get("kind") for line in log] == [kind, "no_name", None]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), EndpointError("http://[")])
def test_an_unknown_endpoint_fails_the_poll_and_polling_continues(error: Exception) -> None:
    failures = [error, error]

    class Unknown(Service):
        def connect(self, _endpoint: str, version: ApiVersion = "2020-07-01", **options: object) -> Service:
            if failures:
                raise failures.pop()
            return super().connect(_endpoint, version, **options)

    run = Run(1.0, 5.5, lambda _: (0.0, DOCUMENT), Unknown)
    assert run.service.asked == [2.0, 3.0, 4.0, 5.0]
    assert (run.polls("unreachable"), run.polls("ok")) == (2, 4)
    assert run.messages("kind", "reason") == [("unreachable", str(error)), ()]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), EndpointError("http://[")])
def test_an_approval_with_an_unknown_endpoint_fails_and_is_no_bug(error: Exception) -> None:
    def connect() -> ImdsClient:
        raise error

    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    with structlog.testing.capture_logs() as log:
        executor = ThreadExecutor(connect, inbox.put, "", Settings)
        executor.approve([Approve(workflow_id="A", event_id="A", is_alone=False)], "1")
        answer = inbox.get(timeout=60)
    assert answer == ApprovalAnswered(workflow_id="A", error_kind="unreachable", detail=str(error))
    assert log == []


class Preview(Service):
    """A service that rejects the newest api-version for a time, and accepts it after that."""

    refused_until = 0.0
    kind: HttpErrorKind = "not_found"

    def __init__(self, clock: Clock, *rest: Any) -> None:
        super().__init__(clock, *rest)
        rule = Rule(name="advice", when=When(type=("SpotRebalanceRecommendation",)))
        self.settings = replace(self.settings, rules=(rule,))
        self.versions: list[tuple[str, float]] = []

    def fetch(self) -> bytes:
        self.versions.append((self.version, self._clock.now - self._began))
        if self.version == "2024-07-09" and self._clock.now - self._began < self.refused_until:
            raise ImdsError("GET: refused", kind=self.kind)
        return super().fetch()


@pytest.mark.parametrize("refusal", ["not_found", "bad_request"])
def test_a_rejected_version_is_no_outage_and_is_tried_again_in_a_day(refusal: HttpErrorKind) -> None:
    kind = type("Refusing", (Preview,), {"refused_until": 25 * HOUR, "kind": refusal})
    run = Run(60.0, 49 * HOUR, lambda _: (0.0, DOCUMENT), kind)

    newest = [at for version, at in cast("Preview", run.service).versions if version == "2024-07-09"]
    assert newest[:3] == [0.0, 60.0, 24 * HOUR + 60.0]
    assert newest[3:] == [48 * HOUR + 60.0 + 60.0 * minute for minute in range(59)]
    assert run.service.asked == [60.0 * minute for minute in range(49 * 60)]
    assert (run.polls("ok"), run.polls(refusal)) == (49 * 60, 0)
    assert run.messages("log_level", "api_version") == [("warning", "2020-07-01"), ("info", "2024-07-09")]
    documents = [run.inbox.get_nowait() for _ in range(run.inbox.qsize())]
    assert [cast("Document", document).has_recommendations for document in documents] == [False, True]


def test_a_single_rejected_version_counts_as_a_short_outage() -> None:
    run = Run(1.0, 9.5, lambda _: (0.0, DOCUMENT), type("Briefly", (Preview,), {"refused_until": 0.5}))
    versions = [version for version, _ in cast("Preview", run.service).versions]
    assert versions == ["2024-07-09", "2020-07-01", *["2024-07-09"] * 9]
    assert run.log == []


def test_an_unchanged_response_is_forwarded_only_if_the_engine_needs_one() -> None:
    kind = type("Needing", (Service,), {"needs_answer": property(lambda self: len(self.asked) > 3)})
    for service, documents in ((Service, 1), (kind, 4)):
        run = Run(1.0, 5.5, lambda _: (0.0, DOCUMENT), service)
        assert run.inbox.qsize() == documents


@pytest.mark.parametrize("failure", ["timeout", "server_error", "gone", "unreachable"])
def test_a_newest_version_that_fails_is_skipped_for_ten_minutes(failure: HttpErrorKind) -> None:
    kind = type("Failing", (Preview,), {"refused_until": HOUR, "kind": failure})
    run = Run(60.0, HOUR + 1300.0, lambda _: (0.0, DOCUMENT), kind)
    newest = [at for version, at in cast("Preview", run.service).versions if version == "2024-07-09"]
    assert newest[:4] == [0.0, 60.0, 660.0, 1260.0]
    assert newest[-1] > HOUR + 1200.0  # it is asked for in each poll again
    assert run.polls(failure) == 0
    assert run.messages("log_level", "api_version") == [("warning", "2020-07-01"), ("info", "2024-07-09")]


def test_a_throttled_request_fails_the_poll_and_is_not_sent_in_another_version() -> None:
    kind = type("Failing", (Preview,), {"refused_until": 0.5, "kind": "throttled"})
    run = Run(1.0, 5.5, lambda _: (0.0, DOCUMENT), kind)
    assert {version for version, _ in cast("Preview", run.service).versions} == {"2024-07-09"}
    assert run.polls("throttled") == 1


def test_if_both_versions_are_rejected_the_poll_fails() -> None:
    kind = type("Refusing", (Preview,), {"refused_until": HOUR})
    run = Run(1.0, 5.5, failing("not_found", HOUR), kind)
    assert (run.polls("ok"), run.polls("not_found")) == (0, 6)
    assert [version for version, _ in cast("Preview", run.service).versions] == ["2024-07-09", "2020-07-01"] * 6
