"""``python -m benchmarks.soak --minutes N``: the real agent at a hundred times its pace, and whether it grows.

Two agents, as processes, poll the simulator in this process every 10 ms instead of every second, and their
engines turn as often. Events of all kinds live at a steady rate; hooks run, fail and are canceled; operators
approve; the endpoint has faults; the policy is reloaded, also a broken one; pages are scraped; somebody reads the
state file for a while. The second agent is killed now and then and started again. The journal is kept for a sixth
of the run, and pruned a ninetieth of that apart: the proportion of 90 days and once a day.

The one invariant: what grows by more than it may, by a line fitted to the samples after the first third of the
run, or is left over at the end, fails the run. Linux only.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import os
import platform
import re
import sqlite3
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from agent import AgentError, __version__
from agent.simulator import Simulator, SimulatorError
from agent.simulator.faults import FaultKind
from agent.store import FILE_NAME, Store
from benchmarks.process import Program

_POLL_SECONDS = 0.01
_LIFE_SECONDS = 0.5  # between two events for the first VM
_QUIET_SECONDS = 4.0  # in which the last events end
_SAMPLE_SECONDS = 30.0  # longer than it takes to go through all faults twice
_WARM_UP = 1 / 3
_KEEP = 1 / 6
_REFUSED = "the policy file is refused; the old policy stays in force"
_SERIES = re.compile(r"^scheduled_events_(\w+?)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

_HOOKS = {
    "quick": {"run": ["/bin/sh", "-c", "echo prepared"]},
    "slow": {"run": ["/bin/sleep", "0.3"]},
    "fails": {"run": ["/bin/sh", "-c", "echo no; exit 3"]},
    "undo": {"run": ["/bin/sh", "-c", "cat"]},
}
_PREPARED = {"recover": ["undo"], "approve": "when-prepared"}
_RULES: list[dict[str, Any]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately"},
    {"name": "manual", "when": {"type": "Preempt"}, **_PREPARED, "prepare": ["quick"], "approve": "manual"},
    {"name": "fails", "when": {"type": "Terminate"}, **_PREPARED, "prepare": ["fails"]},
    {"name": "slow", "when": {"type": "Redeploy"}, **_PREPARED, "prepare": ["slow"]},
    {"name": "rest", **_PREPARED, "prepare": ["quick"]},
]
# Those that pass without a pause of their own, so that the load stays steady; 429 and 400 ask for one.
_FAULTS: Sequence[tuple[FaultKind, dict[str, Any]]] = (
    ("status", {"status": 500}),
    ("reset", {}),
    ("truncated", {}),
    ("stall", {}),
    ("html", {}),
    ("empty", {}),
    ("status", {"status": 404}),
    ("bad-chunks", {}),
    ("endless", {}),
    ("gzip-bomb", {"size_bytes": 2**20}),
    ("redirect", {}),
    ("half-closed", {}),
    ("oversized", {"size_bytes": 2**24}),
    ("not-http", {}),
)


class Allowance(NamedTuple):
    """How much of something may come over the run; by the line, or (``bound``) at any time in all."""

    unit: str
    absolute: float
    relative: float = 0.0
    bound: float | None = None


ALLOWED = {
    # An answer that is too large is read up to 8 MiB, and the allocator keeps some of that for a while.
    "resident memory between faults": Allowance("MiB", 2.0),
    "resident memory in the worst moment": Allowance("MiB", 0.0, bound=80.0),
    "file descriptors": Allowance("", 1.0),
    "threads": Allowance("", 1.0),
    "state file": Allowance("KiB", 64.0, 0.1),
    # Its size is what it once needed: SQLite goes back to its beginning, and does not shorten it.
    "write-ahead log of it": Allowance("KiB", 0.0, bound=16 * 1024.0),
    "rows of the journal": Allowance("", 50.0, 0.1),
    "rows of workflows": Allowance("", 10.0, 0.1),
    "rows of requests": Allowance("", 10.0, 0.1),
    "state file, agent that is killed": Allowance("KiB", 64.0, 0.1),
    "write-ahead log of that": Allowance("KiB", 0.0, bound=16 * 1024.0),
}


class Sample(NamedTuple):
    """What was measured at one time."""

    at: float
    values: dict[str, float]


class Verdict(NamedTuple):
    """One row of the table."""

    what: str
    unit: str
    least: float
    most: float
    growth: float
    allowed: str
    is_met: bool


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Fit a line to each measure and say whether it is flat enough. Needs two samples at least."""
    verdicts = []
    span = samples[-1].at - samples[0].at
    for what, allowance in ALLOWED.items():
        values = [sample.values[what] for sample in samples]
        growth = statistics.linear_regression([sample.at for sample in samples], values).slope * span
        if allowance.bound is not None:
            allowed, is_met = f"at most {allowance.bound:,.0f} in all", max(values) <= allowance.bound
        else:
            most = allowance.absolute + allowance.relative * statistics.fmean(values)
            allowed, is_met = f"growth of {most:,.1f}", growth <= most
        verdicts.append(Verdict(what, allowance.unit, min(values), max(values), growth, allowed, is_met))
    return verdicts


class _Agent:
    """One agent: its files, and the process that runs now."""

    def __init__(self, directory: Path, vm: str, endpoint: str, keep_seconds: float) -> None:
        self.directory = directory / vm
        self.directory.mkdir()
        self.state_dir = self.directory / "state"
        self.policy = self.directory / "policy.yaml"
        self.log = self.directory / "log"
        self._cache = directory / "cache"
        self._endpoint = endpoint
        self._keep_seconds = keep_seconds
        self._variants = itertools.cycle(["45s", "broken", "46s"])
        self._known_address = ""
        self._started_in_log = 0  # where in the log the lines of the process that runs now begin
        self.write_policy()
        self.program = self.start()

    def start(self) -> Program:
        arguments = [str(self.policy), str(self.state_dir), str(_POLL_SECONDS), str(self._keep_seconds)]
        self._known_address = ""
        self._started_in_log = self.log.stat().st_size if self.log.exists() else 0
        self.program = Program(["-m", "benchmarks.fast_agent", *arguments], self.log, self._cache)
        return self.program

    def restart(self) -> None:
        """As after a power cut."""
        self.program.kill()
        self.start()

    def write_policy(self) -> None:
        """The next variant of it."""
        variant = next(self._variants)
        policy = {
            "imds": {"endpoint": self._endpoint, "request_timeout": "250ms", "first_request_timeout": "250ms"},
            "agent": {"listen": "127.0.0.1:0", "log": {"format": "json"}},
            "rules": "broken" if variant == "broken" else _RULES,
            "hooks": {name: {**hook, "timeout": variant} for name, hook in _HOOKS.items()},
        }
        self.policy.write_text(json.dumps(policy), encoding="utf-8")  # JSON is YAML

    def reload(self) -> None:
        self.write_policy()
        self.program.hang_up()

    def get(self, page: str) -> str:
        with urllib.request.urlopen(f"http://{self._address()}{page}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> Counter[str]:
        """Sums of the series of each name."""
        sums: Counter[str] = Counter()
        for name, value in _SERIES.findall(self.get("/metrics")):
            sums[name] += float(value)  # type: ignore[assignment]
        return sums

    def wait_polling(self) -> None:
        """Until it has read a document."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, StopIteration):
                if self.metrics()["documents_total"]:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the agent has not polled within a minute; {self.log} has its log")

    def approve(self, event_id: str) -> bool:
        """Do as the command ``approve`` does; False if the agent does not know the event (yet)."""
        store = Store.join(self.state_dir)
        try:
            for workflow in store.load_workflows():
                if workflow.event.id == event_id:
                    store.add_request(workflow.id, "approved", "soak", datetime.now(UTC))
                    return True
        finally:
            store.close()
        return False

    def read_journal(self) -> int:
        store = Store.join(self.state_dir)
        try:
            return len(store.load_journal())
        finally:
            store.close()

    def hold_reader(self) -> sqlite3.Connection:
        """Read, and go on reading: until this is closed no page of the write-ahead log behind it is used again."""
        connection = sqlite3.connect(self.state_dir / FILE_NAME, isolation_level=None)
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM journal").fetchone()
        return connection

    def rows(self) -> dict[str, float]:
        connection = sqlite3.connect(self.state_dir / FILE_NAME, timeout=10)
        with contextlib.closing(connection):
            return {
                table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("journal", "workflow", "request")
            }

    def kib(self, suffix: str = "") -> float:
        path = self.state_dir / f"{FILE_NAME}{suffix}"
        return path.stat().st_size / 1024 if path.exists() else 0.0

    def errors(self) -> int:
        """Lines of its log that tell of an error, but for the policies that were meant to be refused."""
        count = 0
        with self.log.open(encoding="utf-8") as lines:
            for line in lines:
                if '"level":"error"' in line and _REFUSED not in line:
                    print(line, end="", file=sys.stderr)
                    count += 1
        return count

    def _address(self) -> str:
        if not self._known_address:
            with self.log.open("rb") as log:
                log.seek(self._started_in_log)
                line = next(line for line in log if b'"message":"agent started"' in line)
            self._known_address = json.loads(line)["listen"]
        return self._known_address


class _Soak:
    """The run: what happens when."""

    def __init__(self, directory: Path, simulator: Simulator, seconds: float) -> None:
        keep = seconds * _KEEP
        self.simulator = simulator
        self.steady, self.killed = (_Agent(directory, vm, simulator.endpoint(vm), keep) for vm in ("vm-1", "vm-2"))
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._seconds = seconds
        self._memory: list[float] = []  # since the last sample
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._began = 0.0
        self._faults = itertools.cycle(_FAULTS)
        self._pages = itertools.cycle(["/metrics", "/readyz", "/status", "/"])
        self._stories = itertools.cycle(
            [
                self._user_reboot,
                self._platform_reboot,
                self._freeze_that_has_begun,
                self._canceled_while_preparing,
                self._hook_fails,
                self._operator_approves,
                self._for_another,
                self._for_both,
                self._renamed,
                self._lost_answer,
            ]
        )

    def run(self) -> None:
        """Until the time is over and all events are."""
        for agent in (self.steady, self.killed):
            agent.wait_polling()
        self._memory.append(self.steady.program.resident_mib())
        self._began = time.monotonic()
        ends = self._began + self._seconds
        last_lives = ends - _QUIET_SECONDS

        def every(seconds: float, action: Callable[[], object], until: float = last_lives) -> None:
            self._every(min(seconds, self._seconds / 6), action, until=until)

        every(_LIFE_SECONDS, self._next_story)
        every(4 * _LIFE_SECONDS, self._second_vms_event)
        every(1.0, self._fault)
        every(0.2, self._scrape, ends)
        every(10.0, self._reload)
        every(5.0, self._read_journal)
        every(20.0, self._hold_reader)
        every(15.0, self._kill)
        self._every(min(_SAMPLE_SECONDS, self._seconds / 30), self._sample, until=last_lives)
        while self._agenda:
            due, _, action = heapq.heappop(self._agenda)
            time.sleep(max(0.0, due - time.monotonic()))
            action()

    def _at(self, due: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (due, next(self._numbers), action))

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        self._at(time.monotonic() + seconds, action)

    def _every(self, seconds: float, action: Callable[[], object], *, until: float) -> None:
        def again() -> None:
            began = time.monotonic()
            action()
            if began + seconds < until:
                self._at(began + seconds, again)

        self._later(seconds, again)

    # Lives of events. Times are real seconds; at a hundredfold pace half a second is most of a minute.

    def _live(self, type_: Any, *, vms: Sequence[str] = ("vm-1",), lasts: float | None = 0.3, **more: Any) -> str:
        event = self.simulator.schedule(
            type_, vms=vms, notice_seconds=900, start_delay_seconds=0.05, lasts_seconds=lasts, **more
        )
        self.counts["events announced"] += 1
        self._later(_QUIET_SECONDS - 1, lambda: self._unless_over(self.simulator.end, event))
        return event

    def _unless_over(self, action: Callable[[str], None], event: str) -> None:
        with contextlib.suppress(SimulatorError):
            action(event)

    def _cancel(self, event: str, after: float) -> None:
        self._later(after, lambda: self._unless_over(self.simulator.cancel, event))

    def _next_story(self) -> None:
        next(self._stories)()

    def _user_reboot(self) -> None:
        self._live("Reboot", source="User")

    def _platform_reboot(self) -> None:
        self._live("Reboot")

    def _freeze_that_has_begun(self) -> None:
        self._live("Freeze", begins_started=True)

    def _canceled_while_preparing(self) -> None:
        self._cancel(self._live("Redeploy"), 0.15)

    def _hook_fails(self) -> None:
        self._cancel(self._live("Terminate"), 0.6)

    def _operator_approves(self) -> None:
        event = self._live("Preempt")

        def approve() -> None:
            if self.steady.approve(event):
                self.counts["approvals by an operator"] += 1

        self._later(0.4, approve)

    def _for_another(self) -> None:
        self._cancel(self._live("Reboot", vms=["vm-9"]), 0.5)

    def _for_both(self) -> None:
        self._cancel(self._live("Reboot", vms=["vm-1", "vm-2"]), 0.5)

    def _renamed(self) -> None:
        self._live("Reboot", source="User", new_id_at_start=True)

    def _lost_answer(self) -> None:
        self.simulator.fault("vm-1", "reset", on="approve", count=1, takes_effect=True)
        self._live("Freeze")

    def _second_vms_event(self) -> None:
        # Over before the next one comes: what shares a hook is recovered when the last of them is gone.
        self._live("Redeploy", vms=["vm-2"])

    # What else happens

    def _fault(self) -> None:
        kind, options = next(self._faults)
        self.simulator.fault(None, kind, on="poll", count=3, **options)
        self.counts["faults of the endpoint, of three polls each"] += 1

    def _scrape(self) -> None:
        self._memory.append(self.steady.program.resident_mib())
        with contextlib.suppress(OSError):  # 503: not ready
            self.steady.get(next(self._pages))
        self.counts["pages fetched"] += 1

    def _reload(self) -> None:
        self.steady.reload()
        self.counts["reloads, a third of them of a broken policy"] += 1

    def _read_journal(self) -> None:
        with contextlib.suppress(AgentError):
            self.killed.read_journal()
            self.steady.read_journal()
        self.counts["readings of the journal by others"] += 1

    def _hold_reader(self) -> None:
        self._later(2.0, self.steady.hold_reader().close)
        self.counts["transactions of 2 s held open by others"] += 1

    def _kill(self) -> None:
        self.killed.restart()
        self.counts["kills of the second agent"] += 1

    def _sample(self) -> None:
        steady, program = self.steady, self.steady.program
        files, threads = [], []
        for _ in range(5):  # hooks come and go; what stays is the least
            files.append(program.open_files())
            threads.append(program.threads())
            time.sleep(0.02)
        rows = steady.rows()
        values = {
            "resident memory between faults": min(self._memory),
            "resident memory in the worst moment": max(self._memory),
            "file descriptors": min(files),
            "threads": min(threads),
            "state file": steady.kib(),
            "write-ahead log of it": steady.kib("-wal"),
            "rows of the journal": rows["journal"],
            "rows of workflows": rows["workflow"],
            "rows of requests": rows["request"],
            "state file, agent that is killed": self.killed.kib(),
            "write-ahead log of that": self.killed.kib("-wal"),
        }
        self._memory = [program.resident_mib()]
        at = time.monotonic() - self._began
        self.samples.append(Sample(at, values))
        shown = ", ".join(f"{what} {value:,.1f}" for what, value in values.items())
        print(f"{at:7.1f} s: {shown}", file=sys.stderr, flush=True)

    def left_over(self) -> dict[str, float]:
        """What must not be there at the end, by name."""
        found: dict[str, float] = {}
        deadline = time.monotonic() + 30
        while (pending := self._pending()) and time.monotonic() < deadline:
            time.sleep(0.2)
        found["events pending"] = pending
        metrics = self.steady.metrics()
        self.counts["polls of the first agent"] = int(metrics["polls_total"])
        self.counts["events it saw"] = int(metrics["events_total"])
        self.counts["hooks it ran"] = int(metrics["hook_duration_seconds_count"])
        found["events seen and not closed"] = metrics["events_total"] - metrics["closed_total"]
        found["bugs met"] = metrics["faults_total"] + self.killed.metrics()["faults_total"]
        found["failures of the state file"] = metrics["store_errors_total"]
        found["errors in the logs"] = self.steady.errors() + self.killed.errors()
        return found

    def _pending(self) -> int:
        return sum(len(json.loads(agent.get("/status"))["pending"]) for agent in (self.steady, self.killed))


def main() -> int:
    """Run it and print the table; 1 if something grew, or was left over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="See whether the agent grows.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it runs (default: 60)")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        parser.error("memory and file descriptors are read from Linux; run it there")
    with (
        TemporaryDirectory(prefix="scheduled-events-soak-") as directory,
        Simulator(vms=("vm-1", "vm-2"), others=("vm-9",), rate_limit=None) as simulator,
    ):
        soak = _Soak(Path(directory), simulator, 60 * arguments.minutes)
        with soak.steady.program:
            try:
                soak.run()
                left_over = soak.left_over()
                cpu = soak.steady.program.cpu_seconds()
            finally:
                soak.killed.program.kill()
    warm = [sample for sample in soak.samples if sample.at > 60 * arguments.minutes * _WARM_UP]
    verdicts = judge(warm)
    machine = (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"agent {__version__}; {datetime.now(UTC):%Y-%m-%d}; load average at the end {os.getloadavg()[0]:.1f}"
    )
    print(f"```\n$ {os.path.relpath(sys.executable)} -m benchmarks.soak --minutes {arguments.minutes:g}")
    print(f"{machine}\n```\n\n{_tables(verdicts, left_over, soak.counts, cpu)}")
    return 0 if all(verdict.is_met for verdict in verdicts) and not any(left_over.values()) else 1


def _tables(
    verdicts: Iterable[Verdict], left_over: dict[str, float], counts: Counter[str], cpu_seconds: float
) -> str:
    """Markdown."""
    polls = counts["polls of the first agent"]
    lines = ["| | least | most | growth by a fitted line | allowed | |", "|---|---:|---:|---:|---|---|"]
    for row in verdicts:
        what = f"{row.what}, {row.unit}" if row.unit else row.what
        verdict = "flat" if row.is_met else "**GREW**"
        lines.append(
            f"| {what} | {row.least:,.1f} | {row.most:,.1f} | {row.growth:+,.1f} | {row.allowed} | {verdict} |"
        )
    lines += ["", "| left over at the end | |", "|---|---:|"]
    lines += [f"| {what} | {value:g} |" for what, value in left_over.items()]
    lines += ["", "| what happened | |", "|---|---:|"]
    lines += [f"| {what} | {count:,} |" for what, count in sorted(counts.items())]
    lines += [f"| hours that so many polls take at one a second | {polls / 3600:.1f} |"]
    lines += [f"| CPU of the first agent, seconds | {cpu_seconds:.0f} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
