"""``python -m benchmarks.soak --minutes N``: the real agent at a hundred times its pace, and whether it grows.

Two agents poll the simulator in this process every 10 ms instead of every second. Events of all kinds live at a
steady rate; hooks run, fail and are canceled; operators approve; the endpoint has faults; the policy is reloaded,
also a broken one; pages are scraped; another program reads the state file for a while. The second agent is killed
now and then and started again. The journal is kept for a sixth of the run.

The run fails if something is left over at the end, or grows by more than it may, by a line fitted to the samples
after the first third of the run. Linux only.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import re
import sqlite3
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from agent.simulator import Simulator, SimulatorError
from agent.store import FILE_NAME, Store
from benchmarks.programs import Agent, describe_machine

_POLL_SECONDS = 0.01
_LIFE_SECONDS = 0.5  # between two events for the first VM
_QUIET_SECONDS = 4.0  # in which the last events end
_SAMPLE_SECONDS = 30.0  # longer than it takes to go through all faults twice
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
# Type, fields of the plan, and after how many seconds the event is canceled; an operator approves a Preempt.
_STORIES: Sequence[tuple[str, dict[str, Any], float | None]] = (
    ("Reboot", {"source": "User"}, None),
    ("Preempt", {"lasts_seconds": 0.6}, None),
    ("Reboot", {}, None),
    ("Freeze", {"begins_started": True}, None),
    ("Redeploy", {}, 0.15),
    ("Terminate", {}, 0.6),
    ("Reboot", {"vms": ["vm-9"]}, 0.5),
    ("Reboot", {"vms": ["vm-1", "vm-2"]}, 0.5),
    ("Reboot", {"source": "User", "new_id_at_start": True}, None),
)
# Those that pass without a pause of their own, so that the load stays steady; 429 and 400 ask for one.
_FAULTS: Sequence[dict[str, Any]] = (
    *({"kind": kind} for kind in ("reset", "truncated", "stall", "html", "empty", "endless", "redirect")),
    *({"kind": "status", "status": status} for status in (500, 404)),
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
    "state file, agent that is killed": Allowance("KiB", 64.0, 0.1),
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


class _Agent(Agent):
    """One agent, and the process that runs now."""

    def __init__(self, directory: Path, vm: str, endpoint: str, keep_seconds: float) -> None:
        (directory / vm).mkdir()
        imds = {"endpoint": endpoint, "request_timeout": "250ms", "first_request_timeout": "250ms"}
        super().__init__(directory / vm, directory / "cache", imds, _RULES, _HOOKS)
        self._keep_seconds = keep_seconds
        self.errors = 0
        """Lines of its logs that told of one, but for the policies that were meant to be refused."""
        self.program = self.start_fast(_POLL_SECONDS, keep_seconds)

    def restart(self) -> None:
        """As after a power cut."""
        self.program.kill()
        self.count_errors()
        self.program = self.start_fast(_POLL_SECONDS, self._keep_seconds)

    def count_errors(self) -> None:
        lines = self.log.read_text("utf-8").splitlines()
        told = [line for line in lines if '"level":"error"' in line and _REFUSED not in line]
        print(*told, sep="\n", end="\n" * bool(told), file=sys.stderr)
        self.errors += len(told)

    def metrics(self) -> Counter[str]:
        """Sums of the series of each name."""
        sums: Counter[str] = Counter()
        for name, value in _SERIES.findall(self.get("/metrics")):
            sums[name] += float(value)  # type: ignore[assignment]
        return sums

    def query(self, text: str) -> Any:
        with contextlib.closing(sqlite3.connect(self.state_dir / FILE_NAME, timeout=10)) as connection:
            return connection.execute(text).fetchone()[0]

    def kib(self, suffix: str = "") -> float:
        path = self.state_dir / f"{FILE_NAME}{suffix}"
        return path.stat().st_size / 1024 if path.exists() else 0.0


class _Soak:
    """The run: what happens when."""

    def __init__(self, directory: Path, simulator: Simulator, seconds: float) -> None:
        self.simulator = simulator
        self.steady, self.killed = (
            _Agent(directory, vm, simulator.endpoint(vm), seconds / 6) for vm in ("vm-1", "vm-2")
        )
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._seconds = seconds
        self._readings: list[tuple[float, int, int]] = []  # memory, files, threads since the last sample
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._stories, self._faults = itertools.cycle(_STORIES), itertools.cycle(_FAULTS)
        self._variants = itertools.cycle(("broken", "46s", "45s"))

    def run(self) -> None:
        """Until the time is over and all events are."""
        simulator = self.simulator
        for vm in ("vm-1", "vm-2"):
            simulator.wait_polls(5, vm)
        self._began = time.monotonic()
        ends = self._began + self._seconds
        # Over before the next one comes: what shares a hook is recovered when the last of them is gone.
        second_vms: Callable[[], object] = lambda: self._live("Redeploy", vms=["vm-2"])  # noqa: E731
        for seconds, what, action, until in (
            (_LIFE_SECONDS, "events announced", self._next_story, -_QUIET_SECONDS),
            (4 * _LIFE_SECONDS, "events announced", second_vms, -_QUIET_SECONDS),
            (1.0, "faults of the endpoint, of three polls each", self._fault, -_QUIET_SECONDS),
            (0.2, "pages fetched", self._scrape, 0.0),
            (10.0, "reloads, a third of them of a broken policy", self._reload, -_QUIET_SECONDS),
            (20.0, "transactions of 2 s held open by others", self._hold_reader, -_QUIET_SECONDS),
            (15.0, "kills of the second agent", self.killed.restart, -_QUIET_SECONDS),
            (min(_SAMPLE_SECONDS, self._seconds / 30), "samples", self._sample, -_QUIET_SECONDS),
        ):
            self._every(min(seconds, self._seconds / 6), what, action, ends + until)
        while self._agenda:
            due, _, action = heapq.heappop(self._agenda)
            time.sleep(max(0.0, due - time.monotonic()))
            action()

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._numbers), action))

    def _every(self, seconds: float, what: str, action: Callable[[], object], until: float) -> None:
        def again() -> None:
            began = time.monotonic()
            action()
            self.counts[what] += 1
            if began + seconds < until:
                self._later(began + seconds - time.monotonic(), again)

        self._later(seconds, again)

    # Times are real seconds; at a hundredfold pace half a second is most of a minute.

    def _live(self, type_: Any, **plan: Any) -> str:
        times = {"notice_seconds": 900, "start_delay_seconds": 0.05, "lasts_seconds": 0.3}
        event = self.simulator.schedule(type_, **{"vms": ["vm-1"], **times, **plan})
        self._later(_QUIET_SECONDS - 1, lambda: self._unless_over(self.simulator.end, event))
        return event

    def _unless_over(self, action: Callable[[str], None], event: str) -> None:
        with contextlib.suppress(SimulatorError):
            action(event)

    def _next_story(self) -> None:
        type_, plan, canceled_after = next(self._stories)
        event = self._live(type_, **plan)
        if canceled_after is not None:
            self._later(canceled_after, lambda: self._unless_over(self.simulator.cancel, event))
        if type_ == "Preempt":
            self._later(0.4, lambda: self._approve(event))

    def _approve(self, event_id: str, attempts: int = 10) -> None:
        """As the command ``approve`` does, as soon as the agent knows the event."""
        with contextlib.closing(Store.join(self.steady.state_dir)) as store:
            for workflow in store.load_workflows():
                if workflow.event.id == event_id:
                    store.add_request(workflow.id, "approved", "soak", datetime.now(UTC))
                    self.counts["approvals by an operator"] += 1
                    return
        if attempts > 1:
            self._later(0.2, lambda: self._approve(event_id, attempts - 1))

    def _fault(self) -> None:
        self.simulator.fault(None, **next(self._faults), on="poll", count=3)

    def _scrape(self) -> None:
        program = self.steady.program
        self._readings.append((program.resident_mib(), program.open_files(), program.threads()))
        with contextlib.suppress(OSError):  # it may be busy
            self.steady.get(("/metrics", "/readyz", "/status", "/history")[len(self._readings) % 4])

    def _reload(self) -> None:
        variant = next(self._variants)
        hooks = {name: {**hook, "timeout": variant} for name, hook in _HOOKS.items()}
        self.steady.write_policy(**({"rules": "broken"} if variant == "broken" else {"hooks": hooks}))
        self.steady.program.hang_up()

    def _hold_reader(self) -> None:
        """Until it is closed no page of the write-ahead log behind it is used again."""
        connection = sqlite3.connect(self.steady.state_dir / FILE_NAME, isolation_level=None)
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM journal").fetchone()
        self._later(2.0, connection.close)

    def _sample(self) -> None:
        steady = self.steady
        memory, files, threads = zip(*self._readings, strict=True)
        values = {
            "resident memory between faults": min(memory),
            "resident memory in the worst moment": max(memory),
            "file descriptors": min(files),  # the least counts: those of hooks come and go
            "threads": min(threads),
            "state file": steady.kib(),
            "write-ahead log of it": steady.kib("-wal"),
            "rows of the journal": steady.query("SELECT count(*) FROM journal"),
            "rows of workflows": steady.query("SELECT count(*) FROM workflow"),
            "state file, agent that is killed": self.killed.kib(),
        }
        del self._readings[:-1]
        self.samples.append(Sample(time.monotonic() - self._began, values))
        shown = ", ".join(f"{what} {value:,.1f}" for what, value in values.items())
        print(f"{self.samples[-1].at:7.1f} s: {shown}", file=sys.stderr, flush=True)

    def left_over(self) -> dict[str, float]:
        """What must not be there at the end, by name."""
        agents = (self.steady, self.killed)
        deadline = time.monotonic() + 60
        while (pending := self._pending(agents)) and time.monotonic() < deadline:
            time.sleep(0.2)
        metrics = self.steady.metrics()
        self.counts["polls of the first agent"] = int(metrics["polls_total"])
        self.counts["events it saw"] = int(metrics["events_total"])
        self.counts["hooks it ran"] = int(metrics["hook_duration_seconds_count"])
        for agent in agents:
            agent.count_errors()
        return {
            "events pending": pending,
            "events seen and not closed": metrics["events_total"] - metrics["closed_total"],
            "bugs met": metrics["faults_total"] + self.killed.metrics()["faults_total"],
            "failures of the state file": metrics["store_errors_total"],
            "errors in the logs": sum(agent.errors for agent in agents),
        }

    def _pending(self, agents: Sequence[_Agent]) -> int:
        return sum(len(json.loads(agent.get("/status"))["pending"]) for agent in agents)


def main() -> int:
    """Run it and print the tables; 1 if something grew, or was left over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="See whether the agent grows.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it runs (default: 60)")
    seconds = 60 * parser.parse_args().minutes
    with (
        TemporaryDirectory(prefix="scheduled-events-soak-") as directory,
        Simulator(vms=("vm-1", "vm-2"), others=("vm-9",), rate_limit=None) as simulator,
    ):
        soak = _Soak(Path(directory), simulator, seconds)
        with soak.steady.program:
            try:
                soak.run()
                left_over = soak.left_over()
            finally:
                soak.killed.program.kill()
    verdicts = judge([sample for sample in soak.samples if sample.at > seconds / 3])
    print(f"{describe_machine()}\n")
    print("| | least | most | growth by a fitted line | allowed | |\n|---|---:|---:|---:|---|---|")
    for what, unit, least, most, growth, allowed, is_met in verdicts:
        name, verdict = f"{what}, {unit}" if unit else what, "flat" if is_met else "**GREW**"
        print(f"| {name} | {least:,.1f} | {most:,.1f} | {growth:+,.1f} | {allowed} | {verdict} |")
    for title, numbers in (("left over at the end", left_over), ("what happened", soak.counts)):
        print(f"\n| {title} | |\n|---|---:|")
        print(*(f"| {what} | {count:,g} |" for what, count in numbers.items()), sep="\n")
    return 0 if all(verdict.is_met for verdict in verdicts) and not any(left_over.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
