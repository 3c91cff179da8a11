"""``python -m benchmarks``: measures, prints the table and, of a complete run, writes it onto the page.

The bare loops only poll, compare bytes, and start the hook or post the approval: no policy, no state file, no
metrics. One uses httpx as the agent does, the other the standard library's http.client. The differences are what
the agent and its client cost; the loops also show how noisy the machine was. It runs on Linux.

Invariant: all sides meet the same noise. They poll at the same pace, a third of an interval apart, or take
turns. The agent and each loop have a simulator of their own in the measuring process, which takes all times.
Each figure is the median of at least five windows or runs, so the one in which modules are compiled is not it.

Where the time goes is counted in what does not depend on the load: instructions of the process (valgrind's
cachegrind, in millions; a millisecond of CPU is about four) and resident memory.
"""

import argparse
import gc
import inspect
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from many_agents import open_fleet
from msgspec.structs import replace

from benchmarks.report import HEADER, Row, UnfitError, begin, end, format_row, row, write
from benchmarks.sides import OTHERS, Side, describe_machine, open_sides
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.store import Store
from scheduled_events_agent.workflow import Record, Transition, Workflow

assert sys.platform != "win32"

WINDOWS = {True: 1, False: 5}  # of a quick run, of a full one
OWN = 100  # of the events, as many as the agent follows; the others are of vm-2


def start(sides: Sequence[Side]) -> None:
    """Start all sides; their polls come a third of an interval apart."""
    for side in sides:
        time.sleep(side.interval / 3)
        side.start_polling()


def per_poll(sides: Sequence[Side], seconds: float) -> list[tuple[float, float]]:
    """Measure each side in this time: CPU in ms, and how often a thread went to sleep."""
    before = [side.readings() for side in sides]
    time.sleep(seconds)
    after = [side.readings() for side in sides]
    used = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    return [(cpu / polls, sleeps / polls) for cpu, sleeps, polls in used]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float]]:
    return [(our / their,) for our, their in zip(ours, theirs, strict=True)]


def measure_polls(is_quick: bool) -> Iterator[Row]:
    """A document that does not change, at one poll a second.

    CPU of a poll: user and system time of the process over 12 polls, with the web server, divided by 12. Of the
    events that are pending, at most 100 name this VM, as many as the agent follows.

    Wake-ups a second: how often a thread of the process went to sleep, while nothing is pending.
    """
    of_none: Sequence[float] = ()
    for count in (0, 10) if is_quick else (0, 10, 100, 1000):
        with open_sides(1.0) as sides:
            watch(sides, count, 1)
            start(sides)
            sides[0].simulator.wait_polls(3)  # what is new has been dealt with
            windows = [per_poll(sides, 2.0 if is_quick else 12.0) for _ in range(WINDOWS[is_quick])]
        used = [[cpu for cpu, _ in window] for window in windows]
        of_agent, of_httpx, _ = zip(*used, strict=True)
        yield row(f"CPU of a poll, {count:,} events pending, ms", used)
        if count:
            yield row("the same as a ratio to none", ratios(of_agent, of_none), 2.0)
        else:
            of_none = of_agent
            yield row("the same as a ratio to httpx", ratios(of_agent, of_httpx), 1.3)
            yield row("wake-ups a second", [[sleeps for _, sleeps in window] for window in windows])


def measure_tail(is_quick: bool) -> Iterator[Row]:
    """Event by event, turn about; while the agent learns that one is over, the loops have theirs.

    Served to the first hook, to the approval: 2,000 events of each kind, one after the other, at 20 ms between
    polls; without the wait for the poll, with the commit to disk and, for the hook, the start of a shell. The very
    first hook of the agent's life is among them.

    The maximum is one of 2,000. In 4,500 events on a busy disk, with the processor to itself, four approvals
    took more than 20 ms (23 to 98). Most of that was the commit, which waited for the disk and used 0.7 to 2.1
    ms of CPU; in three of the four that is so much that SQLite must have moved its log into the file, as in one
    commit of seventy. The rest stayed within its usual times: the answer read in at most 11.6 ms, the approval
    posted in at most 6.5, garbage collected in at most 2.1, a thread started in at most 3.3. A program that
    only writes 4 KiB and waits for this disk waited up to 16.8 ms in 2,500 writes.
    """
    with open_sides(0.02) as sides:
        start(sides)
        for act, figure in (("hook", "served to the first hook"), ("approval", "served to the approval")):
            took = []
            for _ in range(2 if is_quick else 2000):
                took.append([side.ms_to(act) for side in sides])
                sides[0].simulator.wait_polls(3)  # a second answer without the event
            yield row(f"{figure}, p50, ms", took)
            yield row(f"{figure}, p99, ms", took, 10.0, 99)
            yield row(f"{figure}, max, ms", took, 30.0, 100)


def measure_start(is_quick: bool) -> Iterator[Row]:
    """From exec to the request for the document; then commands, beside an agent.

    CPU from exec to the first poll: until the request for the document has come; with a new state file, and
    with one of 100,000 past events. It is 873 million instructions, nearly all of them imports. One after the
    other, with what they take at the end of the process: Python 39, httpx 295, structlog 113 (it loads asyncio),
    PyYAML 88, httpcore 77, prometheus-client 46, msgspec 26, psutil 35, the agent's own modules and what else they
    load 153. The packages for Linux take about 4 % less CPU: they start Python with -I -S, and have neither anyio
    nor typing_extensions.
    After a kill or a power cut the agent also checks its state file, which took 350 ms with 100,000 past
    events, before it was cut to the 10,000 that are kept.

    CPU of a command: beside an agent that runs, from start to exit; `python -c pass` is the interpreter alone.
    `status` and `history` are given `--state-dir`, which spares them the policy file. `--help` and `--version`
    have no target. `explain` reads the policy, and asks the metadata service with httpx and the agent through
    its state file. Nearly all of that are imports: `explain --raw`, which asks the service alone, takes 98 % of
    that time.
    """
    count = 100 if is_quick else 100_000
    past = f", {count:,} past events"
    with open_sides(1.0) as sides, open_sides(1.0) as (old, *_):
        new = sides[0]
        write_history(old.state_dir, count)
        starts = []
        for _ in range(WINDOWS[is_quick]):
            shutil.rmtree(new.state_dir, ignore_errors=True)
            starts.append([side.cpu_ms_to_first_poll() for side in (*sides, old)])
        yield row("CPU from exec to the first poll, ms", [used[:3] for used in starts], 200.0)
        yield row(f"CPU from exec to the first poll{past}, ms", [used[3:] for used in starts], 200.0)
        start([new, old])
        document = new.directory / "document.json"
        document.write_text('{"DocumentIncarnation": 1, "Events": []}')
        commands = {word: word for word in ("--help", "--version")}
        for history, agent in (("", new), (past, old)):
            for word in ("status", "history"):
                commands[word + history] = f"{word} --state-dir {agent.state_dir}"
        commands["check"] = f"check --config {new.config}"
        both = f"--config {new.config} --state-dir {new.state_dir}"
        commands["explain"] = f"explain {both}"
        commands["explain DOCUMENT"] = f"explain {document} {both}"
        lines = [[sys.executable, "-c", "pass"], *(new.command(*words.split()) for words in commands.values())]
        runs = [[cpu_of(line, new.environment) for line in lines] for _ in range(WINDOWS[is_quick])]
    of_python, *of_commands = zip(*runs, strict=True)
    used = dict(zip(commands, of_commands, strict=True))
    yield row("CPU of python -c pass, ms", [(value,) for value in of_python])
    for name, values in used.items():
        yield row(f"CPU of {name}, ms", [(value,) for value in values], None if name.startswith("--") else 100.0)


def cpu_of(command: list[str], environment: dict[str, str]) -> float:
    """User and system time of a program, in ms."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return 1000 * (sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before)


def measure_memory(is_quick: bool) -> Iterator[Row]:
    """And the pages, while there is much to show. Whether it grows for ever is for soak.py to find out.

    CPU of a page: of one fetch, the median of 25, while 1,000 events of 100 names each are pending.

    Resident memory, measured once: at one poll a second, after the first event; and after a document of 1,000
    events with 100 names each has come and gone. Of 39 MiB Python takes 8.5, httpx and httpcore 15.7, structlog
    2.9, prometheus-client 1.6, msgspec 1.5, sqlite3 1.1, PyYAML 1.0, psutil 0.9, the agent's own modules 3.5,
    its threads and data the rest. The loop with httpx takes 27. A process that has only loaded the packages
    takes 33.5.
    """
    with open_sides(1.0) as sides:
        agent = sides[0]
        start(sides)
        agent.ms_to("hook")
        first = resident_mib(sides)
        events = watch(sides, 1000, 100)
        agent.wait_until(lambda: len(agent.pending()) == OWN, "the events were pending")
        for page in ("/metrics", "/status", "/"):
            used = []
            for _ in range(5 * WINDOWS[is_quick]):
                time.sleep(0.6)  # longer than clients share an answer
                before = agent.cpu_ms()
                agent.get(page)
                used.append((agent.cpu_ms() - before,))
            yield row(f"CPU of {page}, 1,000 x 100 pending, ms", used, 15.0)
        for side, event in events:
            side.simulator.end(event)
        more = [new - old for new, old in zip(resident_mib(sides), first, strict=True)]
    yield row("resident memory after the first event, MiB", [first], 36.0)
    yield row("more of it when 1,000 x 100 have come and gone, MiB", [more], 8.0)


def resident_mib(sides: Sequence[Side]) -> list[float]:
    """Resident memory of each side, when nothing has happened for a while."""
    for side in [*sides, *sides]:  # a second change of the document gives back what the first one freed
        side.simulator.reset_incarnation()
        side.simulator.wait_polls(5)
    sides[0].get("/metrics")
    return [side.resident_mib() for side in sides]


def measure_fleet(is_quick: bool) -> Iterator[Row]:
    """The agents share a simulated table; the first one has none.

    Requests to the table: what 10 or 100 real agents count for an event that names them all, with `max_events`,
    from its first document until its records are deleted; of five events. The table is a simulated one, over
    HTTP.

    Last of the VMs ready to the approval: in the same events, from the end of the slowest preparation, as the
    hook notes it, to the approval. A hundred agents poll every 4 s here: for one that sees the event after
    another one is ready, that one counts when its record is renewed. (By the rules; it was not measured apart.)

    Resident memory of a fleet: of each agent after five events, and of an agent that had five events without
    `fleet`. For a table in Azure add about 2 MiB: the system's 144 certificates take 1.6, and the token 0.2.
    """
    for count in (1, 10) if is_quick else (1, 10, 100):
        with open_fleet(count, has_table=count > 1) as fleet:
            used = [fleet.measure_event() for _ in range(WINDOWS[is_quick])]
            memory = [(mib,) for mib in fleet.resident_mib()]
        if count > 1:
            yield row(f"requests to the table, an event of {count} VMs", [(requests,) for requests, _ in used])
            yield row(f"last of {count} VMs ready to the approval, ms", [(ms,) for _, ms in used])
        which = f"fleet of {count}" if count > 1 else "no fleet"
        yield row(f"resident memory, {which}, MiB", memory)


def watch(sides: Sequence[Side], count: int, names: int) -> list[tuple[Side, str]]:
    """Announce so many events with so many names each, about which nothing is to be done; returns their ids."""
    vms = [["vm-1" if number < OWN else "vm-2", *OTHERS[1:names]] for number in range(count)]
    return [(side, side.announce("Reboot", names)) for side in sides for names in vms]


def write_history(state_dir: Path, count: int) -> None:
    """A state file with so many events of forty days ago, with three entries each."""
    state_dir.mkdir(mode=0o700)
    at = datetime.now(UTC) - timedelta(days=40)
    event = ScheduledEvent(id="", type="Reboot", status="Scheduled")
    decision = Decision(rule=None, reason="", affects="self")
    seen = Workflow(id="", event=event, first_seen_at=at, not_before_seen_at=at, decision=decision, boot_id="b")
    notes = tuple(Record(kind=kind, text="what happened") for kind in ("seen", "started", "closed"))
    closed = replace(seen, phase="closed", is_over=True)
    past = [replace(closed, id=f"{n}", event=replace(event, id=f"past-{n}")) for n in range(count)]
    with closing(Store.open(state_dir, at)) as store:
        store.commit([Transition(workflow=workflow, records=notes) for workflow in past], at)


PARTS = {
    "polls": measure_polls,
    "tail": measure_tail,
    "start": measure_start,
    "memory": measure_memory,
    "fleet": measure_fleet,
}


def main() -> int:
    """Exits with 1 if a complete run is refused; the targets do not count."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measure the agent's speed and size. A complete run is written into docs/benchmarks.json and"
        " onto its page. It needs a checkout without uncommitted changes and a calm machine.",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run in two minutes; its figures mean little")
    parser.add_argument("--explain", action="store_true", help="say how each figure is measured; measure nothing")
    parser.add_argument("--anyway", action="store_true", help="begin a complete run on a busy machine, too")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these of {', '.join(PARTS)}; not written")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(unknown)}")
    if arguments.explain:
        explain()
        return 0
    if arguments.quick or arguments.parts:
        measure(arguments.parts or list(PARTS), arguments.quick)
        return 0
    try:
        run = begin(arguments.anyway)
        write(end(run, measure(list(PARTS), is_quick=False)))
    except UnfitError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def explain() -> None:
    """Print how this module and each part measure, from their docstrings."""
    print(inspect.cleandoc(__doc__ or ""))
    for name, measure_part in PARTS.items():
        print(f"\n{name}\n\n{textwrap.indent(inspect.getdoc(measure_part) or '', '    ')}")


def measure(parts: Sequence[str], is_quick: bool) -> list[Row]:
    """Measure these parts and print each row as soon as it is known."""
    sys.setswitchinterval(0.0005)  # the simulators share this process
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # for those that wait for it
    gc.disable()  # they remember each request, and to look for garbage in that takes long
    rows = []
    print(f"{describe_machine()}\n\n{HEADER}")
    for name in parts:
        print(f"measure {name} ...", file=sys.stderr, flush=True)
        for new in PARTS[name](is_quick):
            print(format_row(new), flush=True)
            rows.append(new)
    print(f"\n{describe_machine()}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
