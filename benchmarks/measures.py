"""The measures: each runs the agent and the bare loop under the same conditions and returns rows of the table.

The one invariant: both sides meet the same noise; they run at the same time where they hardly use the machine, and
turn about where they do.
"""

import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from agent.events import compare, parse_document
from agent.settings import parse_settings
from agent.simulator import RequestRecord, Simulator
from agent.simulator.recording import Origin, Recorded, Recording
from agent.store import Store
from agent.workflow import Context, proceed
from benchmarks.agents import Agent
from benchmarks.process import Program

_FAST_POLL_SECONDS = 0.005
_POLLS_PER_HOUR = 3600
_SCRAPES_PER_HOUR = 240
_EVENTS_PER_HOUR = 12
_SETTLED_POLLS = 60
_BIG_EVENTS = 1000
_BIG_RESOURCES = 100
_BIG_OWN = 100  # of the events, as many as the agent follows
_BIG_AFTER = timedelta(seconds=1.5)  # so that the client has settled
_PATIENCE_SECONDS = 60.0


class Row(NamedTuple):
    """One line of the table."""

    figure: str
    unit: str
    agent: float
    bare: float | None
    target: float | None = None
    """What the agent's figure must be below."""
    samples: int = 1


class Pair(NamedTuple):
    """One thing measured on both sides."""

    agent: float
    bare: float


class _Hooks:
    """A hook that says which event it was started for, and when the word came. ``command`` is the hook."""

    def __init__(self, directory: Path) -> None:
        fifo = directory / "started"
        if sys.platform != "win32":
            os.mkfifo(fifo)
        # A shell's own echo into a pipe: no program is started beside the shell. Opened for reading and writing,
        # so that neither end ever waits for the other.
        self.command = ("/bin/sh", "-c", f'echo "$SCHEDULED_EVENT_ID" > {fifo}')
        self._pipe = os.open(fifo, os.O_RDWR)
        self._changed = threading.Condition()
        self._started_at: dict[str, float] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def wait_started(self, event_id: str) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: event_id in self._started_at, _PATIENCE_SECONDS):
                raise TimeoutError(f"the hook for {event_id} was not started within {_PATIENCE_SECONDS:g} s")
            return self._started_at[event_id]

    def close(self) -> None:
        os.write(self._pipe, b"\n")

    def _read(self) -> None:
        while lines := os.read(self._pipe, 4096).decode().splitlines():
            now = time.monotonic()
            if "" in lines:
                os.close(self._pipe)
                return
            with self._changed:
                for event_id in lines:
                    self._started_at.setdefault(event_id, now)
                self._changed.notify_all()


class _Azure(Simulator):
    """The metadata service for one side. Times are ``time.monotonic``, never kinder to the client than the truth.

    A document counts as served before its first byte is sent, an approval as arrived after it was read.
    """

    def __init__(self, recording: Recording | None = None) -> None:
        super().__init__(
            () if recording else ("vm-1",),
            scenario=recording,
            rate_limit=None,
            begins_at_first_poll=True,
            linger_seconds=math.inf,
        )

    def announce(self, event_id: str, source: str) -> None:
        self.schedule(
            "Reboot",
            id_=event_id,
            source="User" if source == "User" else "Platform",
            start_delay_seconds=3600,
            lasts_seconds=None,
        )

    def wait_polled(self, incarnation: int = 0) -> float:
        """Wait for the first poll that got this incarnation; returns when."""

        def found() -> RequestRecord | None:
            polls = (record for record in self.requests() if record.method == "GET" and "events" in record.path)
            return next((record for record in polls if record.incarnation >= incarnation), None)

        record = self.wait_until(found, f"incarnation {incarnation} was polled", _PATIENCE_SECONDS)
        assert record is not None  # wait_until returns what is true, which its type cannot say
        return record.monotonic

    def wait_approval(self, event_id: str) -> float:
        """Wait for an approval of the event; returns when it arrived."""

        def found() -> RequestRecord | None:
            return next((record for record in self.approvals() if event_id in record.accepted), None)

        record = self.wait_until(found, f"{event_id} was approved", _PATIENCE_SECONDS)
        assert record is not None
        return record.monotonic


class _Bench:
    """A service for each side, a hook, and an agent."""

    def __init__(
        self, place: Path, directory: Path, stack: ExitStack, poll_interval: str, recording: Recording | None
    ) -> None:
        self.directory = directory
        self.cache = place / "cache"
        self.agent_azure = stack.enter_context(_Azure(recording))
        self.bare_azure = stack.enter_context(_Azure(recording))
        self.hooks = _Hooks(directory)
        stack.callback(self.hooks.close)
        imds = {"endpoint": self.agent_azure.endpoint(), "poll_interval": poll_interval}
        self.agent = Agent(directory, self.cache, imds, _RULES, {"drain": {"run": self.hooks.command}})

    def start_bare(self, interval_seconds: float) -> Program:
        arguments = [self.bare_azure.endpoint(), str(interval_seconds), *self.hooks.command]
        return Program(["-m", "benchmarks.bare_loop", *arguments], self.directory / "bare.log", self.cache)

    def start_client(self, kind: str, azure: _Azure) -> Program:
        arguments = [kind, azure.endpoint(), "1.0"]
        return Program(["-m", "benchmarks.paced_client", *arguments], self.directory / f"{kind}.log", self.cache)


# What a user asked for is approved at once; anything else is prepared for with one hook. The big document's events
# name many VMs, hence ``shared``.
_RULES: list[dict[str, object]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately", "shared": "any"},
    {"name": "platform", "prepare": ["drain"], "approve": "when-prepared", "shared": "any"},
]


def measure_cpu(place: Path, *, warm_up_polls: int, polls: int) -> list[Row]:
    """CPU of the whole process for each poll that brings nothing new, at one a second; both at the same time."""
    with _bench(place, "1s") as bench, bench.agent.start() as agent, bench.start_bare(1.0) as bare:
        used = _cpu_per_poll(bench, agent, bare, warm_up_polls, polls)
    return [Row("CPU per idle poll, whole process", "ms", *used, 2.0, polls)]


def measure_client(place: Path, *, warm_up_polls: int, polls: int) -> list[Row]:
    """The same of the agent's client alone, beside a client as httpx has it."""
    with (
        _bench(place, "1s") as bench,
        bench.start_client("agent", bench.agent_azure) as agent,
        bench.start_client("httpx", bench.bare_azure) as bare,
    ):
        used = _cpu_per_poll(bench, agent, bare, warm_up_polls, polls)
    return [
        Row("CPU per paced poll, client alone (bare: httpx.Client)", "ms", *used, samples=polls),
        Row("the same as a ratio", "x", used.agent / used.bare, 1.0, 1.5, polls),
    ]


def _cpu_per_poll(bench: _Bench, agent: Program, bare: Program, warm_up_polls: int, polls: int) -> Pair:
    """Milliseconds, at one poll a second."""
    sides = ((agent, bench.agent_azure), (bare, bench.bare_azure))

    def read(count: int) -> list[tuple[float, int]]:
        bench.agent_azure.wait_polls(count, timeout_seconds=count + _PATIENCE_SECONDS)
        time.sleep(0.5)  # away from the poll
        return [(program.cpu_seconds(), azure.polls()) for program, azure in sides]

    before, after = read(warm_up_polls), read(polls)
    return Pair(
        *(
            1000 * (cpu_then - cpu) / (count_then - count)
            for (cpu, count), (cpu_then, count_then) in zip(before, after, strict=True)
        )
    )


def measure_memory(place: Path, *, polls: int) -> list[Row]:
    """Resident memory before and after many polls, with scrapes and events as an hour may have them."""
    with (
        _bench(place, "1s") as bench,
        bench.agent.start_fast(_FAST_POLL_SECONDS) as agent,
        bench.start_bare(_FAST_POLL_SECONDS) as bare,
    ):
        both = (bench.agent_azure, bench.bare_azure)

        def happen(event_id: str) -> None:
            for azure in both:
                azure.announce(event_id, "Platform")
            bench.agent_azure.wait_approval(event_id)
            for azure in both:
                azure.end(event_id)
                azure.wait_polls(1)

        def scrape() -> None:
            for path in ("/metrics", "/readyz"):
                bench.agent.get(path)

        bench.agent_azure.wait_polls(_SETTLED_POLLS)
        happen("first")  # what an agent needs for its first event it keeps
        scrape()
        first = Pair(agent.resident_mib(), bare.resident_mib())
        scrape_every, event_every = _POLLS_PER_HOUR // _SCRAPES_PER_HOUR, _POLLS_PER_HOUR // _EVENTS_PER_HOUR
        for done in range(scrape_every, polls + 1, scrape_every):
            bench.agent_azure.wait_polls(scrape_every)
            scrape()
            if done % event_every == 0:
                happen(f"after-{done}")
        last = Pair(agent.resident_mib(), bare.resident_mib())
    return [
        Row("resident memory after the first event", "MiB", *first),
        Row(f"resident memory {polls} polls later", "MiB", *last, 40.0),
        Row("growth between the two", "MiB", last.agent - first.agent, last.bare - first.bare, 1.0),
    ]


def measure_start(place: Path, *, runs: int) -> list[Row]:
    """From exec to the arrival of the first request for the document; turn about, after one run not counted."""
    agent_seconds, bare_seconds = [], []
    for _ in range(runs + 1):
        with _bench(place, "1s") as bench:
            with bench.agent.start() as agent:
                agent_seconds.append(bench.agent_azure.wait_polled() - agent.executed_at)
            with bench.start_bare(1.0) as bare:
                bare_seconds.append(bench.bare_azure.wait_polled() - bare.executed_at)
    medians = (statistics.median(agent_seconds[1:]), statistics.median(bare_seconds[1:]))
    return [Row("exec to first poll, median", "s", *medians, 0.6, runs)]


def measure_latency(place: Path, *, events: int) -> list[Row]:
    """From a served document to the start of the first hook, and to the approval; turn about, event by event."""
    to_hook: list[Pair] = []
    to_approval: list[Pair] = []
    with _bench(place, "250ms") as bench, bench.agent.start(), bench.start_bare(0.25):
        bench.agent_azure.wait_polls(5)
        bench.bare_azure.wait_polls(1)

        def measure(azure: _Azure, event_id: str, source: str) -> float:
            azure.announce(event_id, source)
            ended_at = (azure.wait_approval if source == "User" else bench.hooks.wait_started)(event_id)
            seconds = ended_at - azure.wait_polled(azure.incarnation)
            if azure is bench.agent_azure:
                azure.wait_approval(event_id)  # what it approved too late would be refused
            azure.end(event_id)
            azure.wait_polls(1)  # so that the event is known to be over
            return 1000 * seconds

        for number in range(events):
            for source, pairs in (("Platform", to_hook), ("User", to_approval)):
                agent_ms = measure(bench.agent_azure, f"agent-{source}-{number}", source)
                pairs.append(Pair(agent_ms, measure(bench.bare_azure, f"bare-{source}-{number}", source)))
    rows = []
    for what, pairs in (("start of the first hook", to_hook), ("arrival of the approval", to_approval)):
        for share, target in ((50, None), (99, 25.0)):
            agent_ms = _percentile([pair.agent for pair in pairs], share)
            bare_ms = _percentile([pair.bare for pair in pairs], share)
            rows.append(Row(f"served to {what}, p{share}", "ms", agent_ms, bare_ms, target, events))
    return rows


def measure_big_document(place: Path, *, runs: int) -> list[Row]:
    """One document of 1,000 events with 100 resources each: parsed, taken in, its own approved by the process.

    A tenth of the events name this VM, as many as the agent follows.
    """
    others = _BIG_EVENTS - _BIG_OWN
    document = {
        "DocumentIncarnation": 2,
        "Events": [
            _event(f"big-{number}", "vm-1" if number >= others else "vm-2") for number in range(_BIG_EVENTS)
        ],
    }
    body = json.dumps(document).encode()
    # CPU time: other programs on the machine do not count.
    parsing = _median_ms(lambda: parse_document(body), runs, time.thread_time)
    loading = _median_ms(lambda: json.loads(body), runs, time.thread_time)
    with TemporaryDirectory(dir=place) as directory:
        store = Store.open(Path(directory), datetime.now(UTC))
        turn = _median_ms(lambda: _take_in(body, store), max(1, runs // 5))
        store.close()
    began = datetime.now(UTC)
    empty = Recorded(at=began, document={"DocumentIncarnation": 1, "Events": []})
    recording = Recording(
        origin=Origin(vm="vm-1"), documents=(empty, Recorded(at=began + _BIG_AFTER, document=document))
    )

    def measure(azure: _Azure) -> float:
        served_at = azure.wait_polled(incarnation=2)
        return 1000 * (azure.wait_approval(f"big-{_BIG_EVENTS - 1}") - served_at)

    with _bench(place, "250ms", recording) as bench:
        with bench.agent.start():
            agent_ms = measure(bench.agent_azure)
        with bench.start_bare(0.25):
            bare_ms = measure(bench.bare_azure)
    size = f"{len(body) / 2**20:.1f} MiB, 1,000 events x 100 names"
    return [
        Row(f"{size}: parsed (bare: json.loads)", "ms", parsing, loading, 50.0, runs),
        Row("the same: parsed, compared, decided, committed", "ms", turn, None, samples=max(1, runs // 5)),
        Row("the same: served to the approval of all", "ms", agent_ms, bare_ms),
    ]


def _take_in(body: bytes, store: Store) -> None:
    """What the engine does between a document and its effects, for a board without events."""
    now = datetime.now(UTC)
    settings = parse_settings(
        json.dumps({"rules": _RULES, "hooks": {"drain": {"run": ["/bin/true"]}}}), ""
    ).settings
    context = Context(
        now=now,
        names=("vm-1",),
        rules=settings.rules,
        windows={},
        hooks=settings.hooks,
        boot_id="bench",
        document_at=now,
    )
    store.commit(proceed({}, compare({}, parse_document(body)), context).steps, now)


def _median_ms(work: Callable[[], object], runs: int, clock: Callable[[], float] = time.perf_counter) -> float:
    seconds = []
    for _ in range(runs):
        began = clock()
        work()
        seconds.append(clock() - began)
    return 1000 * statistics.median(seconds)


def _percentile(values: list[float], share: int) -> float:
    """The smallest value that this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


@contextmanager
def _bench(place: Path, poll_interval: str, recording: Recording | None = None) -> Iterator[_Bench]:
    with TemporaryDirectory(dir=place) as directory, ExitStack() as stack:
        yield _Bench(place, Path(directory), stack, poll_interval, recording)


def _event(event_id: str, vm: str) -> dict[str, object]:
    not_before = datetime.now(UTC) + timedelta(minutes=15)
    return {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": "Reboot",
        "ResourceType": "VirtualMachine",
        "Resources": [vm, *(f"production-web_{number:06}" for number in range(1, _BIG_RESOURCES))],
        "NotBefore": f"{not_before:%a, %d %b %Y %H:%M:%S} GMT",
        "Description": "Virtual machine is going to be restarted as requested by authorized user.",
        "EventSource": "User",
        "DurationInSeconds": -1,
    }
