"""``python -m benchmarks``: measures, then prints the table.

The invariant: all sides meet the same noise. They poll a third of an interval apart, or take turns.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec.structs import replace

from agent.events import ScheduledEvent
from agent.policy import Decision
from agent.store import Store
from agent.workflow import Note, Step, Workflow
from benchmarks.sides import Service, Side, cpu_ms, describe_machine

SIDES = ("agent", "httpx", "http.client")
FAST_SECONDS = 0.02  # between two polls where there are thousands of events to go through
LIFE_SECONDS = 7200  # far more than it takes: a run that hangs is not left behind
PAGES = ("/metrics", "/status", "/")
KINDS = {"hook": ("Redeploy", "Platform"), "approval": ("Reboot", "User")}
COMMANDS = ("--help", "--version", "status", "history", "check", "events", "explain DOCUMENT")
OF_HISTORY = ("status", "history")  # what a large history could slow down
OWN = 100  # of the events, as many as the agent follows; the others are of another VM


class Row(NamedTuple):
    """One line of the table."""

    figure: str
    unit: str
    series: str
    target: float | None = None
    """What the agent's figure may be at most."""
    share: int = 50
    """The percentile that is shown."""
    over: tuple[str, int] | None = None
    """Series and side that the agent's figure is divided by."""


def rows(pending: tuple[int, ...], past: int, polls: int) -> list[Row]:
    table = [
        Row("CPU of a poll, 0 events pending", "ms", "poll 0"),
        Row("the same as a ratio to httpx", "x", "poll 0", 1.3, over=("poll 0", 1)),
        Row("wake-ups a second", "", "wake-ups 0"),
    ]
    for count in pending[1:]:
        table.append(Row(f"CPU of a poll, {count:,} events pending", "ms", f"poll {count}"))
        table.append(Row("the same as a ratio to none", "x", f"poll {count}", 2.0, over=("poll 0", 0)))
    table += [Row(f"CPU of {page}, 1,000 x 100 pending", "ms", page, 15.0) for page in PAGES]
    for figure, series in (("served to the first hook", "hook"), ("served to the approval", "approval")):
        for name, share, target in (("p50", 50, None), ("p99", 99, 10.0), ("max", 100, 30.0)):
            table.append(Row(f"{figure}, {name}", "ms", series, target, share))
    for name, share in (("p99", 99), ("max", 100)):
        table.append(Row(f"4 KiB written to the disk meanwhile, {name}", "ms", "disk", None, share))
    for history in ("", f", {past:,} past events"):
        table.append(Row(f"CPU from exec to the first poll{history}", "ms", f"start{history}", 200.0))
    table.append(Row("CPU of python -c pass", "ms", "python"))
    table.append(Row("CPU of --help as a ratio to it", "x", "--help", 3.0, over=("python", 0)))
    names = [*COMMANDS, *(f"{name}, {past:,} past events" for name in OF_HISTORY)]
    table += [Row(f"CPU of {name}", "ms", name, 100.0) for name in names]
    return [
        *table,
        Row("resident memory after the first event", "MiB", "memory", 36.0),
        Row("more of it when 1,000 x 100 have come and gone", "MiB", "memory, back", 8.0),
        Row(f"growth over {polls:,} polls after that", "MiB", "memory, growth", 1.0),
    ]


class Bench:
    """The sides, in the order of ``SIDES``; their hook says when it was started."""

    def __init__(self, stack: ExitStack, directory: Path, interval: float) -> None:
        self.news = threading.Condition()
        self.hook_at: dict[str, float] = {}
        fifo = directory / "started"
        if sys.platform != "win32":
            os.mkfifo(fifo)
        pipe = os.open(fifo, os.O_RDWR)  # for both, so that neither end ever waits for the other
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()
        stack.callback(os.write, pipe, b"end\n")
        # A shell's own echo into a pipe: no program is started beside the shell.
        hook = ["/bin/sh", "-c", f'echo "$SCHEDULED_EVENT_ID" > {fifo}']
        services = [stack.enter_context(Service(self.news)) for _ in SIDES]
        made = zip(SIDES, services, strict=True)
        self.sides = [Side(kind, directory / kind, service, interval, hook) for kind, service in made]
        self.agent = self.sides[0]
        for side in self.sides:
            stack.callback(side.close)

    def start(self) -> None:
        """Start all, so that their polls come a third of an interval apart."""
        for side in self.sides:
            time.sleep(side.interval / 3)
            side.start(is_awaited=False)
            side.service.wait_polls(2)

    def announce(self, *events: dict[str, Any]) -> None:
        for side in self.sides:
            side.service.announce(*events)

    def wait_many(self) -> None:
        """Until the agent follows what there is to follow of a thousand events."""
        self.agent.wait_until(lambda: len(self.agent.pending()) == OWN, "the events were pending")

    def _read(self, pipe: int) -> None:
        while (lines := os.read(pipe, 4096).decode().splitlines()) != ["end"]:
            with self.news:
                self.hook_at |= dict.fromkeys(lines, time.monotonic())
                self.news.notify_all()
        os.close(pipe)


@contextmanager
def open_bench(interval: float) -> Iterator[Bench]:
    with TemporaryDirectory(prefix="scheduled-events-bench-") as directory, ExitStack() as stack:
        yield Bench(stack, Path(directory), interval)


class Measures:
    """``samples``: of each series its windows or samples; in each the agent's, then those of the bare loops."""

    def __init__(self, *, is_quick: bool) -> None:
        self.is_quick = is_quick
        self.windows = self.choose(1, 5)
        self.pending = (0, 10) if is_quick else (0, 10, 100, 1000)
        self.past, self.polls = self.choose(100, 100_000), self.choose(300, 3600)
        self.samples: dict[str, list[list[float]]] = {}

    def choose(self, quick: int, full: int) -> int:
        return quick if self.is_quick else full

    def add(self, series: str, *values: float) -> None:
        self.samples.setdefault(series, []).append([*values])

    def measure_polls(self) -> None:
        """A document that does not change, at one poll a second."""
        for count in self.pending:
            with open_bench(1.0) as bench:
                bench.announce(*watched(count, 1))
                bench.start()
                bench.agent.service.wait_polls(3)  # what is new has been dealt with
                for _ in range(self.windows):
                    before = [side.readings() for side in bench.sides]
                    time.sleep(self.choose(2, 12))
                    pairs = list(zip(before, [side.readings() for side in bench.sides], strict=True))
                    self.add(f"poll {count}", *((new[0] - old[0]) / (new[2] - old[2]) for old, new in pairs))
                    self.add(f"wake-ups {count}", *((new[1] - old[1]) / (new[2] - old[2]) for old, new in pairs))

    def measure_pages(self) -> None:
        """With hardly a poll meanwhile."""
        with open_bench(30.0) as bench:
            bench.announce(*watched(1000, 100))
            bench.agent.start()
            bench.wait_many()
            for page in PAGES * self.windows:
                before = bench.agent.cpu_ms()
                for _ in range(self.windows):
                    time.sleep(0.6)  # longer than clients share an answer
                    bench.agent.get(page)
                self.add(page, (bench.agent.cpu_ms() - before) / self.windows)

    def measure_tail(self) -> None:
        """Event by event, turn about; while the agent learns that one is over, the loops have theirs."""
        with open_bench(FAST_SECONDS) as bench, (bench.agent.directory / "written").open("wb") as file:
            bench.start()
            for series in KINDS:
                for number in range(self.choose(2, 2000)):
                    took = [seconds_to(bench, side, series, number) for side in bench.sides]
                    self.add(series, *(1000 * seconds for seconds in took))
                    began = time.monotonic()
                    file.write(os.urandom(4096))
                    file.flush()
                    os.fsync(file.fileno())
                    self.add("disk", 1000 * (time.monotonic() - began))
                    bench.agent.service.wait_polls(3)  # a second answer without the event

    def measure_start_and_commands(self) -> None:
        """From exec to the request for the document; then commands, beside an agent. The first run compiles."""
        past = f", {self.past:,} past events"
        with open_bench(1.0) as new, open_bench(1.0) as old:
            write_history(old.agent.state_dir, self.past)
            for run in range(self.windows + 1):
                shutil.rmtree(new.agent.state_dir, ignore_errors=True)
                used = [side.cpu_ms_to_first_poll() for side in (*new.sides, old.agent)]
                if run:
                    self.add("start", *used[:3])
                    self.add(f"start{past}", used[3])
            commands = {"python": [sys.executable, "-c", "pass"]}
            document = new.agent.directory / "document.json"
            document.write_bytes(new.agent.service.body)
            for history, agent, names in (("", new.agent, COMMANDS), (past, old.agent, OF_HISTORY)):
                agent.start()
                state, config = f"--state-dir {agent.state_dir}", f"--config {agent.config}"
                options = dict.fromkeys(OF_HISTORY, state) | dict.fromkeys(COMMANDS[4:], config)
                for name in names:
                    words = f"{name} {options.get(name, '')}".replace("DOCUMENT", str(document)).split()
                    commands[f"{name}{history}"] = agent.command(*words)
            for run in range(self.windows + 1):
                for name, command in commands.items():
                    cpu = cpu_of(command, new.agent.environment)
                    if run:
                        self.add(name, cpu)

    def measure_memory(self) -> None:
        """At a fast pace, with a scrape and an event now and then."""
        with open_bench(FAST_SECONDS) as bench:
            bench.start()

            def settled() -> list[float]:
                bench.announce()
                for side in bench.sides:
                    side.service.wait_polls(60)
                bench.agent.get("/metrics")
                return [side.resident_mib() for side in bench.sides]

            seconds_to(bench, bench.agent, "hook", 0)
            first = settled()
            bench.announce(*watched(1000, 100))
            bench.wait_many()
            back = settled()
            for number in range(self.polls // 300):
                bench.announce(event(f"later-{number}", "Reboot", "User"))
                bench.agent.service.wait_polls(240)
                last = settled()
        self.add("memory", *first)
        self.add("memory, back", *(b - f for f, b in zip(first, back, strict=True)))
        self.add("memory, growth", *(e - b for b, e in zip(back, last, strict=True)))

    def percentiles(self, series: str, share: int) -> list[float]:
        """Of each side, the smallest value that this share of all does not exceed."""
        columns = map(sorted, zip(*self.samples[series], strict=True))
        return [column[max(0, math.ceil(len(column) * share / 100) - 1)] for column in columns]

    def line(self, row: Row) -> str:
        """The agent's figure, and those of the loops if they have one."""
        figures = self.percentiles(row.series, row.share)
        if row.over is not None:
            figures = [figures[0] / self.percentiles(row.over[0], 50)[row.over[1]]]
        cells = [f"{value:.2f}" for value in figures] + ["-"] * (len(SIDES) - len(figures))
        if row.target is not None:
            cells += [f"<= {row.target:g}", "met" if figures[0] <= row.target else "MISSED"]
        return formatted(row.figure, row.unit, f"{len(self.samples[row.series]):,}", *cells)


def formatted(figure: str, *cells: str) -> str:
    widths = (5, 6, 8, 8, 12, 8, 7)
    return (f"{figure:<52}" + "".join(f"{c:>{width}}" for c, width in zip(cells, widths, strict=False))).rstrip()


def seconds_to(bench: Bench, side: Side, series: str, number: int) -> float:
    """From the document with an event to the start of its hook or to its approval; then the event is gone."""
    id_, service = f"{series}-{number}-{side.endpoint}", side.service
    done_at = bench.hook_at if series == "hook" else service.approved_at
    # What the agent approves too late would be refused.
    awaited = [done_at, service.approved_at] if side is bench.agent else [done_at]
    service.announce(event(id_, *KINDS[series]))
    service.wait(lambda: all(id_ in times for times in awaited), f"{id_} was acted on")
    seconds = done_at[id_] - service.served_at
    service.announce()
    return seconds


def cpu_of(command: list[str], environment: dict[str, str]) -> float:
    if sys.platform == "win32":
        raise NotImplementedError
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # so that its clock can still be read
    used = cpu_ms(process.pid)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return used


def event(event_id: str, type_: str, source: str, names: Sequence[str] = ("vm-1",)) -> dict[str, Any]:
    return {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": type_,
        "ResourceType": "VirtualMachine",
        "Resources": names,
        "NotBefore": f"{datetime.now(UTC) + timedelta(days=1):%a, %d %b %Y %H:%M:%S} GMT",
        "Description": "Virtual machine is going to be restarted as requested by authorized user.",
        "EventSource": source,
        "DurationInSeconds": -1,
    }


def watched(count: int, names: int) -> list[dict[str, Any]]:
    """So many events with so many names each, about which nothing is to be done."""
    others = [f"production-web_{number:06}" for number in range(1, names)]
    first = ["vm-1"] * min(count, OWN) + ["vm-2"] * (count - OWN)
    return [event(f"watched-{n}", "Reboot", "Platform", [vm, *others]) for n, vm in enumerate(first)]


def write_history(state_dir: Path, count: int) -> None:
    """A state file with so many events of the last eighty days, with three entries each."""
    state_dir.mkdir(mode=0o700)
    now = datetime.now(UTC)
    past = ScheduledEvent(id="", type="Reboot", status="Scheduled")
    decision = Decision(rule=None, reason="", affects="self")
    made: dict[str, Any] = {"decision": decision, "boot_id": "b", "phase": "closed", "is_gone": True}
    notes = tuple(Note(kind=kind, text="what happened") for kind in ("seen", "started", "closed"))
    portion = min(count, 1000)
    with closing(Store.open(state_dir, now)) as store:
        for first in range(0, count, portion):
            at = now - timedelta(days=80) * (1 - first / count)
            names = [f"past-{number}" for number in range(first, first + portion)]
            events = {name: replace(past, id=name) for name in names}
            closed = [Workflow(id=n, event=e, first_seen_at=at, noticed_at=at, **made) for n, e in events.items()]
            store.commit([Step(workflow=workflow, notes=notes) for workflow in closed], at)


PARTS = {
    "polls": Measures.measure_polls,
    "pages": Measures.measure_pages,
    "tail": Measures.measure_tail,
    "start": Measures.measure_start_and_commands,
    "memory": Measures.measure_memory,
}


def main() -> int:
    """Print the table; the exit code says nothing about targets."""
    if sys.platform == "win32":
        raise NotImplementedError
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the agent's speed and size."
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run in two minutes; its figures mean little")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(unknown)}")
    measures = Measures(is_quick=arguments.quick)
    signal.alarm(LIFE_SECONDS)
    sys.setswitchinterval(0.0005)  # the services share this process
    began = time.monotonic()
    for name in arguments.parts or PARTS:
        print(f"measure {name} ...", file=sys.stderr, flush=True)
        PARTS[name](measures)
    print(f"{describe_machine()}; the run took {time.monotonic() - began:.0f} s\n")
    print(formatted("figure", "unit", "n", *SIDES, "target"))
    for row in rows(measures.pending, measures.past, measures.polls):
        if row.series in measures.samples:
            print(measures.line(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
