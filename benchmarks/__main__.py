"""``python -m benchmarks``: measures, then prints the table.

The invariant: all sides meet the same noise. They poll a third of an interval apart, or take turns.
"""

import argparse
import math
import os
import resource
import shutil
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
from benchmarks.sides import PATIENCE_SECONDS, Service, Side, compile_all, describe_machine, print_table

assert sys.platform != "win32"

SIDES = ("agent", "httpx", "http.client")
FAST_SECONDS = 0.02  # between two polls where there are thousands of events to go through
PAGES = ("/metrics", "/status", "/")
KINDS = {"hook": ("Redeploy", "Platform"), "approval": ("Reboot", "User")}
WINDOWS = {True: 1, False: 5}  # of a quick run, of a full one
OWN = 100  # of the events, as many as the agent follows; the others are of another VM


class Row(NamedTuple):
    """One line of the table."""

    figure: str
    samples: Sequence[Sequence[float]]
    """In each the agent's and, if they have one, those of the bare loops."""
    target: float | None = None
    """What the agent's figure may be at most."""
    share: int = 50
    """The percentile that is shown: the smallest value that this share of all does not exceed."""

    def cells(self) -> Sequence[str]:
        last = max(0, math.ceil(len(self.samples) * self.share / 100) - 1)
        figures = [sorted(column)[last] for column in zip(*self.samples, strict=True)]
        shown = [f"{value:.2f}" for value in figures] + ["-"] * (len(SIDES) - len(figures))
        target, verdict = "", ""
        if self.target is not None:
            target, verdict = f"<= {self.target:g}", "met" if figures[0] <= self.target else "MISSED"
        return self.figure, f"{len(self.samples):,}", *shown, target, verdict


class Bench:
    """The sides, in the order of ``SIDES``; their hook says when it was started."""

    def __init__(self, stack: ExitStack, directory: Path, interval: float) -> None:
        self.news = threading.Condition()
        self.hook_at: dict[str, float] = {}
        fifo = directory / "started"
        os.mkfifo(fifo)
        threading.Thread(target=self._read, args=(fifo,), daemon=True).start()
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
            side.wait_polls(2)

    def announce(self, *events: dict[str, Any]) -> None:
        for side in self.sides:
            side.service.announce(*events)

    def use(self, seconds: float) -> list[list[float]]:
        """Of each side: by how much its readings go up in this time."""
        before = [side.readings() for side in self.sides]
        time.sleep(seconds)
        after = [side.readings() for side in self.sides]
        return [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]

    def resident_mib(self) -> list[float]:
        """Of each side, when nothing has happened for a while."""
        for side in self.sides * 2:  # a second change of the document gives back what the first one freed
            side.service.announce()
            side.wait_polls(5)
        self.agent.get("/metrics")
        return [side.resident_mib() for side in self.sides]

    def _read(self, fifo: Path) -> None:
        # For both, so that neither end ever waits for the other.
        with open(os.open(fifo, os.O_RDWR), encoding="ascii") as lines:  # noqa: PTH123 - it is a descriptor
            for line in lines:
                with self.news:
                    self.hook_at[line.strip()] = time.monotonic()
                    self.news.notify_all()


@contextmanager
def open_bench(interval: float) -> Iterator[Bench]:
    with TemporaryDirectory(prefix="scheduled-events-bench-") as directory, ExitStack() as stack:
        yield Bench(stack, Path(directory), interval)


def measure_polls(is_quick: bool) -> Iterator[Row]:
    """A document that does not change, at one poll a second."""
    of_none: list[list[float]] = []
    for count in (0, 10) if is_quick else (0, 10, 100, 1000):
        with open_bench(1.0) as bench:
            bench.announce(*watched(count, 1))
            bench.start()
            bench.agent.wait_polls(3)  # what is new has been dealt with
            readings = [bench.use(2.0 if is_quick else 12.0) for _ in range(WINDOWS[is_quick])]
        used = [[cpu / polls for cpu, _, polls in window] for window in readings]
        yield Row(f"CPU of a poll, {count:,} events pending, ms", used)
        if count:
            ratios = [(some[0] / none[0],) for some, none in zip(used, of_none, strict=True)]
            yield Row("the same as a ratio to none", ratios, 2.0)
        else:
            of_none = used
            yield Row("the same as a ratio to httpx", [(agent / httpx,) for agent, httpx, _ in used], 1.3)
            yield Row("wake-ups a second", [[slept / polls for _, slept, polls in window] for window in readings])


def measure_tail(is_quick: bool) -> Iterator[Row]:
    """Event by event, turn about; while the agent learns that one is over, the loops have theirs."""
    with open_bench(FAST_SECONDS) as bench:
        bench.start()
        for kind, figure in (("hook", "served to the first hook"), ("approval", "served to the approval")):
            took = []
            for number in range(2 if is_quick else 2000):
                took.append([1000 * seconds_to(bench, side, kind, number) for side in bench.sides])
                bench.agent.wait_polls(3)  # a second answer without the event
            yield Row(f"{figure}, p50, ms", took)
            yield Row(f"{figure}, p99, ms", took, 10.0, 99)
            yield Row(f"{figure}, max, ms", took, 30.0, 100)


def measure_start(is_quick: bool) -> Iterator[Row]:
    """From exec to the request for the document; then commands, beside an agent."""
    count = 100 if is_quick else 100_000
    past = f", {count:,} past events"
    with open_bench(1.0) as new, open_bench(1.0) as old:
        write_history(old.agent.state_dir, count)
        starts = []
        for _ in range(WINDOWS[is_quick]):
            shutil.rmtree(new.agent.state_dir, ignore_errors=True)
            starts.append([side.cpu_ms_to_first_poll() for side in (*new.sides, old.agent)])
        yield Row("CPU from exec to the first poll, ms", [used[:3] for used in starts], 200.0)
        yield Row(f"CPU from exec to the first poll{past}, ms", [used[3:] for used in starts], 200.0)
        document = new.agent.directory / "document.json"
        document.write_bytes(new.agent.service.body)
        commands = {"python -c pass": [sys.executable, "-c", "pass"]}
        for history, agent in (("", new.agent), (past, old.agent)):
            agent.start()
            for words in ("status", "history"):
                commands[words + history] = agent.command(words, "--state-dir", str(agent.state_dir))
        for words in ("--help", "--version"):
            commands[words] = new.agent.command(words)
        for words in ("check", "events", "explain DOCUMENT"):
            arguments = words.replace("DOCUMENT", str(document)).split()
            commands[words] = new.agent.command(*arguments, "--config", str(new.agent.config))
        runs = [[cpu_of(command, new.agent) for command in commands.values()] for _ in range(WINDOWS[is_quick])]
    used = dict(zip(commands, zip(*runs, strict=True), strict=True))
    pythons = used.pop("python -c pass")
    yield Row("CPU of python -c pass, ms", [(value,) for value in pythons])
    ratios = [(ours / python,) for ours, python in zip(used["--help"], pythons, strict=True)]
    yield Row("CPU of --help as a ratio to it", ratios, 3.0)
    for name, values in used.items():
        yield Row(f"CPU of {name}, ms", [(value,) for value in values], 100.0)


def measure_memory(is_quick: bool) -> Iterator[Row]:
    """And the pages, while there is much to show. Whether it grows for ever is for soak.py to find out."""
    with open_bench(1.0) as bench:
        bench.start()
        seconds_to(bench, bench.agent, "hook", 0)
        first = bench.resident_mib()
        bench.announce(*watched(1000, 100))
        bench.agent.wait_until(lambda: len(bench.agent.pending()) == OWN, "the events were pending")
        for page in PAGES:
            used = []
            for _ in range(5 * WINDOWS[is_quick]):
                time.sleep(0.6)  # longer than clients share an answer
                before = bench.agent.cpu_ms()
                bench.agent.get(page)
                used.append((bench.agent.cpu_ms() - before,))
            yield Row(f"CPU of {page}, 1,000 x 100 pending, ms", used, 15.0)
        back = bench.resident_mib()
    more = [new - old for old, new in zip(first, back, strict=True)]
    yield Row("resident memory after the first event, MiB", [first], 36.0)
    yield Row("more of it when 1,000 x 100 have come and gone, MiB", [more], 8.0)


def seconds_to(bench: Bench, side: Side, kind: str, number: int) -> float:
    """From the document with an event to the start of its hook or to its approval; then the event is gone."""
    id_, service = f"{kind}-{number}-{side.endpoint}", side.service
    done_at = bench.hook_at if kind == "hook" else service.approved_at
    # What the agent approves too late would be refused.
    awaited = [done_at, service.approved_at] if side is bench.agent else [done_at]
    service.announce(event(id_, *KINDS[kind]))
    side.wait(lambda: all(id_ in times for times in awaited), f"{id_} was acted on")
    seconds = done_at[id_] - service.served_at
    service.announce()
    return seconds


def cpu_of(command: list[str], agent: Side) -> float:
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    environment = {**os.environ, **agent.environment}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE_SECONDS)
    return 1000 * (sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before)


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
    """A state file with so many events of forty days ago, with three entries each."""
    state_dir.mkdir(mode=0o700)
    at = datetime.now(UTC) - timedelta(days=40)
    past = ScheduledEvent(id="", type="Reboot", status="Scheduled")
    decision = Decision(rule=None, reason="", affects="self")
    made: dict[str, Any] = {"decision": decision, "boot_id": "b", "phase": "closed", "is_gone": True}
    notes = tuple(Note(kind=kind, text="what happened") for kind in ("seen", "started", "closed"))
    events = [replace(past, id=f"past-{number}") for number in range(count)]
    closed = [Workflow(id=e.id, event=e, first_seen_at=at, noticed_at=at, **made) for e in events]
    with closing(Store.open(state_dir, at)) as store:
        store.commit([Step(workflow=workflow, notes=notes) for workflow in closed], at)


PARTS = {
    "polls": measure_polls,
    "tail": measure_tail,
    "start": measure_start,
    "memory": measure_memory,
}


def main() -> int:
    """Print the table; the exit code says nothing about targets."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the agent's speed and size."
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run in two minutes; its figures mean little")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(unknown)}")
    sys.setswitchinterval(0.0005)  # the services share this process
    began = time.monotonic()
    rows: list[Row] = []
    compile_all()
    for name in arguments.parts or PARTS:
        print(f"measure {name} ...", file=sys.stderr, flush=True)
        rows += PARTS[name](arguments.quick)
    print(f"{describe_machine()}; the run took {time.monotonic() - began:.0f} s\n")
    print_table(("figure", "n", *SIDES, "target", ""), *(row.cells() for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
