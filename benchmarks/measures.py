"""The measures: each returns rows of the table, with the agent and two bare loops under the same conditions.

The invariant: all sides meet the same noise. They poll a third of an interval apart, or take turns.
"""

import json
import math
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from agent.events import ScheduledEvent
from agent.policy import Decision
from agent.store import FILE_NAME, Store
from agent.workflow import Workflow
from benchmarks.programs import Agent, Program, environment
from benchmarks.service import Service

LOOPS = ("httpx", "http.client")
_FAST_SECONDS = 0.02  # between two polls where there are thousands of events to go through
_OWN = 100  # of the events, as many as the agent follows; the others are of another VM
# What a user asked for is approved at once, a redeployment is prepared for with a hook, anything else is watched.
_RULES: list[dict[str, object]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately", "shared": "any"},
    {"name": "drain", "when": {"type": "Redeploy"}, "prepare": ["drain"], "approve": "when-prepared"},
    {"name": "watch", "approve": "never"},
]


class Row(NamedTuple):
    """One line of the table."""

    figure: str
    unit: str
    samples: int
    agent: float
    loops: tuple[float, ...] = ()
    """Those of the bare loops, in the order of ``LOOPS``; none where a loop has nothing like it."""
    target: float | None = None
    """What the agent's figure may be at most."""


class Bench:
    """The agent and the loops, each with a service of its own, and a hook that says when it was started."""

    def __init__(self, stack: ExitStack, place: Path, directory: Path, interval: float) -> None:
        self._stack, self._place, self._directory, self._interval = stack, place, directory, interval
        self._news = threading.Condition()
        self.services = [stack.enter_context(Service(self._news)) for _ in range(1 + len(LOOPS))]
        self.programs: list[Program] = []
        self.hook_at: dict[str, float] = {}
        fifo = directory / "started"
        if sys.platform != "win32":
            os.mkfifo(fifo)
        # A shell's own echo into a pipe: no program is started beside the shell.
        self._hook = ["/bin/sh", "-c", f'echo "$SCHEDULED_EVENT_ID" > {fifo}']
        self._pipe = os.open(fifo, os.O_RDWR)  # for both, so that neither end ever waits for the other
        threading.Thread(target=self._read, daemon=True).start()
        stack.callback(os.write, self._pipe, b"\n")
        # The policy allows no faster pace; start_fast does.
        imds = {"endpoint": self.services[0].endpoint, "poll_interval": f"{max(0.25, interval):g}s"}
        hooks = {"drain": {"run": self._hook}}
        self.agent = Agent(directory, place / "cache", imds, _RULES, hooks)

    def announce(self, *events: dict[str, object]) -> None:
        for service in self.services:
            service.announce(*events)

    def start(self) -> None:
        """Start all, so that their polls come a third of an interval apart."""
        self._enter(self.start_agent())
        self.services[0].wait_polls(2)
        for kind, service in zip(LOOPS, self.services[1:], strict=True):
            time.sleep(self._interval / 3)
            self._enter(self.start_loop(kind, service))
            service.wait_polls(1)

    def _enter(self, program: Program) -> None:
        self.programs.append(self._stack.enter_context(program))

    def start_agent(self) -> Program:
        return self.agent.start_fast(self._interval) if self._interval < 0.25 else self.agent.start()

    def start_loop(self, kind: str, service: Service) -> Program:
        arguments = ["-m", "benchmarks.bare_loop", kind, service.endpoint, str(self._interval), *self._hook]
        return Program(arguments, self._directory / f"{kind}.log", self._place / "cache")

    def per_poll(self, read: Callable[[Program], float], polls: int) -> list[float]:
        """By how much this reading of each program grows over a poll."""

        def readings() -> list[tuple[float, int]]:
            sides = zip(self.programs, self.services, strict=True)
            return [(read(program), service.polls) for program, service in sides]

        before = readings()
        time.sleep(polls * self._interval)
        pairs = zip(before, readings(), strict=True)
        return [(then - value) / max(1, count_then - count) for (value, count), (then, count_then) in pairs]

    def _read(self) -> None:
        while lines := os.read(self._pipe, 4096).decode().splitlines():
            now = time.monotonic()
            if "" in lines:
                os.close(self._pipe)
                return
            with self._news:
                self.hook_at |= dict.fromkeys(lines, now)
                self._news.notify_all()


@contextmanager
def _bench(place: Path, interval: float) -> Iterator[Bench]:
    with TemporaryDirectory(dir=place) as directory, ExitStack() as stack:
        yield Bench(stack, place, Path(directory), interval)


def measure_idle(place: Path, *, pending: Sequence[int], windows: int, polls: int) -> list[Row]:
    """CPU of a poll of a document that does not change, at one a second, and how often the process wakes up."""
    rows: list[Row] = []
    for count in pending:
        with _bench(place, 1.0) as bench:
            bench.announce(*_watched(count, 1))
            bench.start()
            bench.services[0].wait_polls(3)  # what is new has been dealt with
            used = [bench.per_poll(Program.cpu_seconds, polls) for _ in range(windows)]
            figures = [1000 * value for value in _medians(used)]
            rows.append(_row(f"CPU of a poll, {count:,} events pending", "ms", windows, figures))
            if count == pending[0]:
                rows.append(Row("the same as a ratio to httpx", "x", windows, figures[0] / figures[1], (), 1.3))
                woken = [bench.per_poll(Program.wake_ups, polls) for _ in range(windows)]
                rows.append(_row("wake-ups a second", "", windows, _medians(woken)))
            else:
                ratio = figures[0] / rows[0].agent
                rows.append(Row("the same as a ratio to none", "x", windows, ratio, (), 2.0))
    return rows


def measure_pages(place: Path, *, windows: int, pages: int) -> list[Row]:
    """CPU for each page with 1,000 events of 100 names; there is hardly a poll meanwhile."""
    rows = []
    with _bench(place, 30.0) as bench:
        bench.announce(*_watched(1000, 100))
        with bench.start_agent() as agent:
            bench.services[0].wait_polls(1)
            while len(json.loads(bench.agent.get("/status"))["pending"]) < _OWN:
                time.sleep(0.1)
            for path in ("/metrics", "/status", "/"):
                used = []
                for _ in range(windows):
                    before = agent.cpu_seconds()
                    for _ in range(pages):
                        time.sleep(0.6)  # longer than clients share an answer
                        bench.agent.get(path)
                    used.append(1000 * (agent.cpu_seconds() - before) / pages)
                figure = f"CPU of {path}, 1,000 x 100 pending"
                rows.append(Row(figure, "ms", windows, statistics.median(used), (), 15.0))
    return rows


def measure_tail(place: Path, *, events: int) -> list[Row]:
    """From a served document to the start of the first hook, and to the approval; event by event, turn about."""
    rows = []
    with _bench(place, _FAST_SECONDS) as bench:
        bench.start()
        for what, kind, source in (("the first hook", "Redeploy", "Platform"), ("the approval", "Reboot", "User")):
            took: list[list[float]] = [[] for _ in bench.services]
            for number in range(events):
                for service, seconds in zip(bench.services, took, strict=True):
                    event_id = f"{source}-{number}-{id(service)}"
                    done_at = service.approved_at if source == "User" else bench.hook_at
                    service.announce(_event(event_id, kind, source))
                    service.wait_for(event_id, done_at)
                    if service is bench.services[0]:  # what it approved too late would be refused
                        service.wait_for(event_id, service.approved_at)
                    seconds.append(1000 * (done_at[event_id] - service.served_at))
                    service.announce()
                    # So that the event is known to be over, which takes the agent a second answer without it.
                    service.wait_polls(3 if service is bench.services[0] else 1)
            for name, share in (("p50", 50), ("p99", 99), ("max", 100)):
                target = {"p50": None, "p99": 10.0, "max": 30.0}[name]
                figures = [_percentile(seconds, share) for seconds in took]
                rows.append(_row(f"served to {what}, {name}", "ms", events, figures, target))
    return rows


def measure_start(place: Path, *, runs: int, past: int) -> list[Row]:
    """CPU from exec to the first request for the document; turn about, after a run that is not counted."""
    used: list[list[float]] = []
    with _bench(place, 1.0) as bench, _bench(place, 1.0) as old:
        _write_history(old.agent.state_dir, past)
        for _ in range(runs + 1):
            agents = [(one.start_agent, one.services[0]) for one in (bench, old)]
            loops = [
                (lambda kind=kind, service=service: bench.start_loop(kind, service), service)
                for kind, service in zip(LOOPS, bench.services[1:], strict=True)
            ]
            used.append([_cpu_to_first_poll(start, service) for start, service in (*agents, *loops)])
    empty, large, *others = _medians(used[1:])
    what = "CPU from exec to the first poll"
    return [
        Row(f"{what}, no history", "ms", runs, empty, tuple(others), 200.0),
        Row(f"{what}, {past:,} past events", "ms", runs, large, (), 200.0),
    ]


def _cpu_to_first_poll(start: Callable[[], Program], service: Service) -> float:
    service.may_answer.clear()
    with start() as program:
        service.wait_polls(1)
        used = 1000 * program.cpu_seconds()
        service.may_answer.set()
    return used


def measure_commands(place: Path, *, runs: int) -> list[Row]:
    """CPU of each command beside a running agent, and how often that is what Python itself needs; turn about."""
    with _bench(place, 1.0) as bench, bench.start_agent():
        bench.services[0].wait_polls(2)
        commands = {"python -c pass": ["-c", "pass"]} | {
            name: ["-m", "agent", name, *bench.agent.options(name)]
            for name in ("--help", "--version", "status", "check", "history")
        }

        def run(arguments: list[str]) -> float:
            if sys.platform == "win32":
                raise NotImplementedError
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, *arguments],
                env=environment(place / "cache"),
                check=True,
                stdout=subprocess.DEVNULL,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

        used = _medians([[run(arguments) for arguments in commands.values()] for _ in range(runs + 1)][1:])
    rows = [
        Row(f"CPU of {name}", "ms", runs, value, (), 100.0) for name, value in zip(commands, used, strict=True)
    ]
    ratio = Row("the same of --help as a ratio to python -c pass", "x", runs, used[1] / used[0], (), 3.0)
    return [rows[0]._replace(target=None), rows[1], ratio, *rows[2:]]


def measure_memory(place: Path, *, polls: int) -> list[Row]:
    """Resident memory at a fast pace: after the first event, after a very large document, and after many polls."""
    with _bench(place, _FAST_SECONDS) as bench:
        bench.start()

        def settled() -> list[float]:
            bench.announce()
            for service in bench.services:
                service.wait_polls(60)
            bench.agent.get("/metrics")
            return [program.resident_mib() for program in bench.programs]

        bench.announce(_event("first", "Redeploy", "Platform"))
        bench.services[0].wait_for("first", bench.services[0].approved_at)
        first = settled()
        bench.announce(*_watched(1000, 100))
        while len(json.loads(bench.agent.get("/status"))["pending"]) < _OWN:
            time.sleep(0.1)
        back = settled()
        for number in range(polls // 300):
            bench.announce(_event(f"later-{number}", "Reboot", "User"))
            bench.services[0].wait_polls(240)
            last = settled()
    growth = [then - before for before, then in zip(back, last, strict=True)]
    return [
        _row("resident memory after the first event", "MiB", 1, first, 36.0),
        _row(
            "more of it when 1,000 x 100 have come and gone",
            "MiB",
            1,
            [b - f for f, b in zip(first, back, strict=True)],
            8.0,
        ),
        _row(f"growth over {polls:,} polls after that", "MiB", 1, growth, 1.0),
    ]


def _row(figure: str, unit: str, samples: int, figures: Sequence[float], target: float | None = None) -> Row:
    return Row(figure, unit, samples, figures[0], tuple(figures[1:]), target)


def _medians(windows: Sequence[Sequence[float]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*windows, strict=True)]


def _percentile(values: list[float], share: int) -> float:
    """The smallest value that this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def _event(event_id: str, kind: str, source: str, names: Sequence[str] = ("vm-1",)) -> dict[str, Any]:
    return {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": names,
        "NotBefore": f"{datetime.now(UTC) + timedelta(days=1):%a, %d %b %Y %H:%M:%S} GMT",
        "Description": "Virtual machine is going to be restarted as requested by authorized user.",
        "EventSource": source,
        "DurationInSeconds": -1,
    }


def _watched(count: int, names: int) -> list[dict[str, Any]]:
    """So many events with so many names each, about which nothing is to be done."""
    others = [f"production-web_{number:06}" for number in range(1, names)]
    first = ["vm-1"] * min(count, _OWN) + ["vm-2"] * (count - _OWN)
    return [_event(f"watched-{n}", "Reboot", "Platform", [vm, *others]) for n, vm in enumerate(first)]


def _write_history(state_dir: Path, count: int) -> None:
    """A state file with so many events of the last eighty days, with three entries each."""
    state_dir.mkdir(mode=0o700)
    now = datetime.now(UTC)
    Store.open(state_dir, now).close()
    event = ScheduledEvent(id="e", type="Reboot", status="Scheduled")
    decision = Decision(rule=None, reason="", affects="self")
    one = Workflow(
        id="w",
        event=event,
        decision=decision,
        first_seen_at=now,
        noticed_at=now,
        boot_id="b",
        phase="closed",
        is_gone=True,
    )
    body = msgspec.json.encode(one).decode()
    at = [(now - timedelta(days=80 * n / count)).isoformat(timespec="microseconds") for n in range(count, 0, -1)]
    with sqlite3.connect(state_dir / FILE_NAME) as database:
        database.executemany(
            "INSERT INTO workflow (id, event_id, is_open, updated_at, body) VALUES (?, ?, 0, ?, ?)",
            ((f"w{n}", f"e{n}", at[n], body) for n in range(count)),
        )
        database.executemany(
            "INSERT INTO journal (at, workflow_id, event_id, kind, stage, hook, outcome, text, detail) "
            "VALUES (?, ?, ?, ?, '', '', '', 'what happened', '')",
            ((at[n], f"w{n}", f"e{n}", kind) for n in range(count) for kind in ("seen", "started", "closed")),
        )
    database.close()
