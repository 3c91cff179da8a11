"""The measures: each runs the agent and the bare loop under the same conditions and returns rows of the table.

The one invariant: both sides meet the same noise; they run at the same time where they hardly use the machine, and
turn about where they do.
"""

import json
import math
import os
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from agent.events import compare, parse_document
from agent.settings import parse_settings
from agent.store import Store
from agent.workflow import Context, proceed
from benchmarks.endpoint import EMPTY_DOCUMENT, Endpoint
from benchmarks.process import Program

_FAST_POLL_SECONDS = 0.005
_POLLS_PER_HOUR = 3600
_SCRAPES_PER_HOUR = 240
_EVENTS_PER_HOUR = 12
_SETTLED_POLLS = 60
_BIG_EVENTS = 1000
_BIG_RESOURCES = 100
_BIG_OWN = 100  # of the events, as many as the agent follows
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
                raise TimeoutError(f"waited in vain until the hook for {event_id} was started")
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


class _Bench:
    """An endpoint for each side, a hook, and a policy for the agent."""

    def __init__(self, place: Path, directory: Path, stack: ExitStack, poll_interval: str) -> None:
        self.directory = directory
        self._cache = place / "cache"
        self.agent = stack.enter_context(Endpoint())
        self.bare = stack.enter_context(Endpoint())
        self.hooks = _Hooks(directory)
        stack.callback(self.hooks.close)
        self.log = directory / "agent.log"
        self.port = _free_port()
        self.policy = directory / "policy.yaml"
        policy = {
            "imds": {"endpoint": self.agent.url, "poll_interval": poll_interval},
            "agent": {"listen": f"127.0.0.1:{self.port}", "log": {"format": "json"}},
            "rules": _RULES,
            "hooks": {"drain": {"run": self.hooks.command}},
        }
        self.policy.write_text(json.dumps(policy))  # JSON is YAML

    def start_agent(self, state: str = "state") -> Program:
        arguments = ["run", "--config", str(self.policy), "--state-dir", str(self.directory / state)]
        return Program(["-m", "agent", *arguments], self.log, self._cache)

    def start_fast_agent(self) -> Program:
        arguments = [str(self.policy), str(self.directory / "state"), str(_FAST_POLL_SECONDS)]
        return Program(["-m", "benchmarks.fast_agent", *arguments], self.log, self._cache)

    def start_bare(self, interval_seconds: float) -> Program:
        arguments = [self.bare.url, str(interval_seconds), *self.hooks.command]
        return Program(["-m", "benchmarks.bare_loop", *arguments], self.directory / "bare.log", self._cache)


# What a user asked for is approved at once; anything else is prepared for with one hook. The big document's events
# name many VMs, hence ``shared``.
_RULES = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately", "shared": "any"},
    {"name": "platform", "prepare": ["drain"], "approve": "when-prepared", "shared": "any"},
]


def measure_cpu(place: Path, *, warm_up_polls: int, polls: int) -> list[Row]:
    """CPU of the whole process for each poll that brings nothing new, at one a second; both at the same time."""
    with _bench(place, "1s") as bench, bench.start_agent() as agent, bench.start_bare(1.0) as bare:
        bench.agent.wait_polls(warm_up_polls, 60.0)

        def read() -> list[tuple[float, int]]:
            return [(agent.cpu_seconds(), bench.agent.polls), (bare.cpu_seconds(), bench.bare.polls)]

        time.sleep(0.5)  # away from the poll
        before = read()
        bench.agent.wait_polls(polls, polls + 60.0)
        time.sleep(0.5)
        after = read()
    agent_ms, bare_ms = (
        1000 * (cpu_then - cpu) / (count_then - count)
        for (cpu, count), (cpu_then, count_then) in zip(before, after, strict=True)
    )
    return [Row("CPU per idle poll, whole process", "ms", agent_ms, bare_ms, 0.5, polls)]


def measure_memory(place: Path, *, polls: int) -> list[Row]:
    """Resident memory before and after many polls, with scrapes and events as an hour may have them."""
    with (
        _bench(place, "1s") as bench,
        bench.start_fast_agent() as agent,
        bench.start_bare(_FAST_POLL_SECONDS) as bare,
    ):

        def happen(event_id: str) -> None:
            for endpoint in (bench.agent, bench.bare):
                endpoint.publish(_document(_event(event_id, "Platform")))
            bench.agent.wait_approved(event_id)
            for endpoint in (bench.agent, bench.bare):
                endpoint.publish(EMPTY_DOCUMENT)
                endpoint.wait_served()

        def scrape() -> None:
            for path in ("/metrics", "/readyz"):
                fetch(f"http://127.0.0.1:{bench.port}{path}")

        bench.agent.wait_polls(_SETTLED_POLLS)
        happen("first")  # what an agent needs for its first event it keeps
        scrape()
        first = Pair(agent.resident_mib(), bare.resident_mib())
        scrape_every, event_every = _POLLS_PER_HOUR // _SCRAPES_PER_HOUR, _POLLS_PER_HOUR // _EVENTS_PER_HOUR
        for done in range(scrape_every, polls + 1, scrape_every):
            bench.agent.wait_polls(scrape_every)
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
    for number in range(runs + 1):
        with _bench(place, "1s") as bench:
            with bench.start_agent(f"state-{number}") as agent:
                agent_seconds.append(bench.agent.wait_first_poll() - agent.executed_at)
            with bench.start_bare(1.0) as bare:
                bare_seconds.append(bench.bare.wait_first_poll() - bare.executed_at)
    medians = (statistics.median(agent_seconds[1:]), statistics.median(bare_seconds[1:]))
    return [Row("exec to first poll, median", "s", *medians, 0.6, runs)]


def measure_latency(place: Path, *, events: int) -> list[Row]:
    """From a served document to the start of the first hook, and to the approval; turn about, event by event."""
    to_hook: list[Pair] = []
    to_approval: list[Pair] = []
    with _bench(place, "250ms") as bench, bench.start_agent(), bench.start_bare(0.25):
        bench.agent.wait_polls(5)
        bench.bare.wait_polls(1)

        def measure(endpoint: Endpoint, event_id: str, source: str) -> float:
            endpoint.wait_served()  # the empty one, so that the event before is known to be over
            endpoint.publish(_document(_event(event_id, source)))
            ended_at = (endpoint.wait_approved if source == "User" else bench.hooks.wait_started)(event_id)
            seconds = ended_at - endpoint.wait_served()
            endpoint.publish(EMPTY_DOCUMENT)
            return 1000 * seconds

        for number in range(events):
            for source, pairs in (("Platform", to_hook), ("User", to_approval)):
                agent_ms = measure(bench.agent, f"agent-{source}-{number}", source)
                pairs.append(Pair(agent_ms, measure(bench.bare, f"bare-{source}-{number}", source)))
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
    body = _document(
        *(
            _event(f"big-{number}", "User", _BIG_RESOURCES, "vm-1" if number >= others else "vm-2")
            for number in range(_BIG_EVENTS)
        )
    )
    # CPU time: whoever else is on the machine does not count.
    parsing = _median_ms(lambda: parse_document(body), runs, time.thread_time)
    loading = _median_ms(lambda: json.loads(body), runs, time.thread_time)
    with TemporaryDirectory(dir=place) as directory:
        store = Store.open(Path(directory), datetime.now(UTC))
        turn = _median_ms(lambda: _take_in(body, store), max(1, runs // 5))
        store.close()
    with _bench(place, "250ms") as bench, bench.start_agent(), bench.start_bare(0.25):
        bench.agent.wait_polls(5)

        def measure(endpoint: Endpoint) -> float:
            endpoint.publish(body)
            approved_at = endpoint.wait_approved(f"big-{_BIG_EVENTS - 1}")
            return 1000 * (approved_at - endpoint.wait_served())

        agent_ms, bare_ms = measure(bench.agent), measure(bench.bare)
    size = f"{len(body) / 2**20:.1f} MiB, 1,000 events x 100 names"
    return [
        Row(f"{size}: parsed (bare: json.loads)", "ms", parsing, loading, 50.0, runs),
        Row("the same: parsed, compared, decided, committed", "ms", turn, None, samples=max(1, runs // 5)),
        Row("the same: served to the approval of all", "ms", agent_ms, bare_ms),
    ]


def fetch(url: str) -> None:
    """Fetch a page, which may say 503: it is not ready."""
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE_SECONDS) as answer:
            answer.read()
    except urllib.error.HTTPError as refusal:
        with refusal:
            refusal.read()
        if refusal.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise


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
def _bench(place: Path, poll_interval: str) -> Iterator[_Bench]:
    with TemporaryDirectory(dir=place) as directory, ExitStack() as stack:
        yield _Bench(place, Path(directory), stack, poll_interval)


def _event(event_id: str, source: str, resources: int = 1, vm: str = "vm-1") -> dict[str, object]:
    not_before = datetime.now(UTC) + timedelta(minutes=15)
    return {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": "Reboot",
        "ResourceType": "VirtualMachine",
        "Resources": [vm, *(f"production-web_{number:06}" for number in range(1, resources))],
        "NotBefore": f"{not_before:%a, %d %b %Y %H:%M:%S} GMT",
        "Description": "Virtual machine is going to be restarted as requested by authorized user.",
        "EventSource": source,
        "DurationInSeconds": -1,
    }


def _document(*events: dict[str, object]) -> bytes:
    return json.dumps({"DocumentIncarnation": 2, "Events": events}).encode()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
