"""``python -m benchmarks.soak --minutes N``: the real agent at a hundred times its pace, and whether it grows.

Two agents, as processes, poll the simulator in this process every 10 ms instead of every second, and their
engines turn as often. Events of all kinds live at a steady rate; hooks run, fail and are canceled; operators
approve; the endpoint has faults; the policy is reloaded, also a broken one; pages are scraped; another program
reads the state file for a while. The second agent is killed now and then and started again. The journal is kept
for a sixth of the run, and pruned a ninetieth of that apart: the proportion of 90 days and once a day.

The run fails if something is left over at the end, or grows by more than it may, by a line fitted to the samples
after the first third of the run. Linux only.
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
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent import AgentError, __version__
from agent.simulator import Simulator, SimulatorError
from agent.simulator.faults import FaultKind
from agent.store import FILE_NAME, Store
from benchmarks.agents import Agent
from benchmarks.growth import Sample, Verdict, judge

_POLL_SECONDS = 0.01
_LIFE_SECONDS = 0.5  # between two events for the first VM
_QUIET_SECONDS = 4.0  # in which the last events end
_SAMPLE_SECONDS = 30.0  # longer than it takes to go through all faults twice
_WARM_UP = 1 / 3
_KEEP = 1 / 6
_REFUSED = "the policy file is refused; the old policy stays in force"
_SERIES = re.compile(r"^scheduled_events_(\w+?)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

_HOOKS: dict[str, dict[str, Any]] = {
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
    ("endless", {}),
    ("redirect", {}),
)


class _Agent(Agent):
    """One agent, and the process that runs now."""

    def __init__(self, directory: Path, vm: str, endpoint: str, keep_seconds: float) -> None:
        (directory / vm).mkdir()
        imds = {"endpoint": endpoint, "request_timeout": "250ms", "first_request_timeout": "250ms"}
        super().__init__(directory / vm, directory / "cache", imds, _RULES, _HOOKS)
        self._variants = itertools.cycle(["broken", "46s", "45s"])
        self._keep_seconds = keep_seconds
        self.program = self.start_fast(_POLL_SECONDS, keep_seconds)

    def restart(self) -> None:
        """As after a power cut."""
        self.program.kill()
        self.program = self.start_fast(_POLL_SECONDS, self._keep_seconds)

    def reload(self) -> None:
        """Let it read the next variant of its policy."""
        variant = next(self._variants)
        hooks = {name: {**hook, "timeout": variant} for name, hook in _HOOKS.items()}
        if variant == "broken":
            self.write_policy(rules="broken")
        else:
            self.write_policy(hooks=hooks)
        self.program.hang_up()

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
            with contextlib.suppress(OSError):
                if self.metrics()["documents_total"]:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the agent has not polled within a minute; {self.log} has its log")

    def approve(self, event_id: str) -> bool:
        """Do as the command ``approve`` does; False if the agent does not know the event (yet)."""
        with contextlib.closing(Store.join(self.state_dir)) as store:
            for workflow in store.load_workflows():
                if workflow.event.id == event_id:
                    store.add_request(workflow.id, "approved", "soak", datetime.now(UTC))
                    return True
        return False

    def read_journal(self) -> int:
        with contextlib.closing(Store.join(self.state_dir)) as store:
            return len(store.load_journal())

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


class _Soak:
    """The run: what happens when."""

    def __init__(self, directory: Path, simulator: Simulator, seconds: float) -> None:
        keep = seconds * _KEEP
        self.simulator = simulator
        self.steady, self.killed = (_Agent(directory, vm, simulator.endpoint(vm), keep) for vm in ("vm-1", "vm-2"))
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._seconds = seconds
        # Since the last sample. Of files and threads the least counts: those of hooks come and go.
        self._memory: list[float] = []
        self._files: list[int] = []
        self._threads: list[int] = []
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
        self._measure()
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

    def _measure(self) -> None:
        program = self.steady.program
        self._memory.append(program.resident_mib())
        self._files.append(program.open_files())
        self._threads.append(program.threads())

    def _scrape(self) -> None:
        self._measure()
        with contextlib.suppress(OSError):  # it may be busy
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
        steady = self.steady
        rows = steady.rows()
        values = {
            "resident memory between faults": min(self._memory),
            "resident memory in the worst moment": max(self._memory),
            "file descriptors": min(self._files),
            "threads": min(self._threads),
            "state file": steady.kib(),
            "write-ahead log of it": steady.kib("-wal"),
            "rows of the journal": rows["journal"],
            "rows of workflows": rows["workflow"],
            "rows of requests": rows["request"],
            "state file, agent that is killed": self.killed.kib(),
            "write-ahead log of that": self.killed.kib("-wal"),
        }
        for measured in (self._memory, self._files, self._threads):
            measured.clear()
        self._measure()
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
