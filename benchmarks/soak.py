"""``python -m benchmarks.soak --minutes N``: the real agent at a hundred times its pace, and whether it grows.

Two agents poll the simulator in this process every 10 ms instead of every second. Events of all kinds live at a
steady rate; hooks run, fail and are canceled; operators approve; the endpoint has faults; the policy is reloaded,
also a broken one; pages are scraped; another program reads the state file for a while. The second agent is killed
now and then and started again. The journal is kept for a sixth of the run.

The run fails if something is left over at the end, or grows by more than it may, by a line fitted to the samples
of its second half. By then the memory was seen to have met all kinds of trouble, and to be flat.
"""

import argparse
import contextlib
import heapq
import itertools
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

import psutil

from agent.simulator import Simulator, SimulatorError
from agent.store import FILE_NAME, Store
from benchmarks.sides import PacedAgent, describe_machine

POLL_SECONDS = 0.01
LIFE_SECONDS = 0.5  # between two events for the first VM
QUIET_SECONDS = 4.0  # in which the last events end
SAMPLE_SECONDS = 30.0  # longer than it takes to go through all faults twice
REFUSED = "the policy file is refused; the old policy stays in force"
IN_USE = """SELECT (page_count - freelist_count) * page_size / 1024.0
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""
VMS = ("vm-1", "vm-2")

HOOKS: dict[str, dict[str, Any]] = {
    "quick": {"run": ["/bin/sh", "-c", "echo prepared"]},
    "slow": {"run": ["/bin/sleep", "0.3"]},
    "fails": {"run": ["/bin/sh", "-c", "echo no; exit 3"]},
    "undo": {"run": ["/bin/sh", "-c", "cat"]},
}
PREPARED = {"recover": ["undo"], "approve": "when-prepared"}
RULES: list[dict[str, Any]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately"},
    {"name": "manual", "when": {"type": "Preempt"}, **PREPARED, "prepare": ["quick"], "approve": "manual"},
    {"name": "fails", "when": {"type": "Terminate"}, **PREPARED, "prepare": ["fails"]},
    {"name": "slow", "when": {"type": "Redeploy"}, **PREPARED, "prepare": ["slow"]},
    {"name": "rest", **PREPARED, "prepare": ["quick"]},
]
# Type, fields of the plan, and after how many seconds the event is canceled; an operator approves a Preempt.
STORIES: Sequence[tuple[str, dict[str, Any], float | None]] = (
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
FAULTS: Sequence[dict[str, Any]] = (
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
    # It grows by up to 4 MiB at a time, to keep room for a full disk; what is in use must not.
    "state file": Allowance("KiB", 0.0, bound=16 * 1024.0),
    # Fewer events come while the machine is busy, so what is kept of each counts.
    "state file in use for each event": Allowance("KiB", 1.0, 0.1),
    # Its size is what it once needed: SQLite goes back to its beginning, and does not shorten it.
    "write-ahead log of it": Allowance("KiB", 0.0, bound=16 * 1024.0),
    "rows of the journal for each event": Allowance("", 1.0, 0.1),
    "events kept of those that came meanwhile": Allowance("%", 0.0, bound=110.0),
    "state file in use for each event, agent that is killed": Allowance("KiB", 1.0, 0.1),
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
            allowed, is_met = f"at most {allowance.bound:,g} in all", max(values) <= allowance.bound
        else:
            most = allowance.absolute + allowance.relative * statistics.fmean(values)
            allowed, is_met = f"growth of {most:,.1f}", growth <= most
        verdicts.append(Verdict(what, allowance.unit, min(values), max(values), growth, allowed, is_met))
    return verdicts


class Soak:
    """The run: what happens when."""

    def __init__(self, directory: Path, simulator: Simulator, seconds: float) -> None:
        self.simulator = simulator
        self.agents = [PacedAgent(directory / vm, simulator.endpoint(vm), POLL_SECONDS, seconds / 6) for vm in VMS]
        self.steady, self.killed = self.agents
        for agent in self.agents:
            agent.imds |= {"request_timeout": "250ms", "first_request_timeout": "250ms"}
            agent.write_policy(imds=agent.imds, rules=RULES, hooks=HOOKS)
            agent.start(is_awaited=False)
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._seconds = seconds
        self._readings: list[tuple[float, int, int]] = []  # memory, files, threads since the last sample
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._stories, self._faults = itertools.cycle(STORIES), itertools.cycle(FAULTS)
        self._variants = itertools.cycle(("broken", "46s", "45s"))

    def run(self) -> None:
        """Until the time is over and all events are."""
        for vm in VMS:
            self.simulator.wait_polls(5, vm)
        self._began = time.monotonic()
        ends = self._began + self._seconds
        # Over before the next one comes: what shares a hook is recovered when the last of them is gone.
        second_vms: Callable[[], object] = lambda: self._live("Redeploy", vms=["vm-2"])  # noqa: E731
        for seconds, what, action, until in (
            (LIFE_SECONDS, "events announced", self._next_story, -QUIET_SECONDS),
            (4 * LIFE_SECONDS, "events announced", second_vms, -QUIET_SECONDS),
            (1.0, "faults of the endpoint, of three polls each", self._fault, -QUIET_SECONDS),
            (0.2, "pages fetched", self._scrape, 0.0),
            (10.0, "reloads, a third of them of a broken policy", self._reload, -QUIET_SECONDS),
            (20.0, "transactions of 2 s held open by others", self._hold_reader, -QUIET_SECONDS),
            (15.0, "kills of the second agent", self._kill, -QUIET_SECONDS),
            (min(SAMPLE_SECONDS, self._seconds / 30), "samples", self._sample, -QUIET_SECONDS),
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
        self._later(QUIET_SECONDS - 1, lambda: self._unless_over(self.simulator.end, event))
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

    def _kill(self) -> None:
        self.killed.kill()
        self.killed.start(is_awaited=False)

    def _scrape(self) -> None:
        if sys.platform == "win32":
            raise NotImplementedError
        process = psutil.Process(self.steady.process.pid)
        self._readings.append((self.steady.resident_mib(), process.num_fds(), process.num_threads()))
        self.steady.get(("/metrics", "/readyz", "/status", "/history")[len(self._readings) % 4])

    def _reload(self) -> None:
        variant = next(self._variants)
        hooks = {name: {**hook, "timeout": variant} for name, hook in HOOKS.items()}
        rules = "broken" if variant == "broken" else RULES
        self.steady.write_policy(imds=self.steady.imds, rules=rules, hooks=hooks)
        self.steady.reload()

    def _hold_reader(self) -> None:
        """Until it is closed no page of the write-ahead log behind it is used again."""
        connection = sqlite3.connect(self.steady.state_dir / FILE_NAME, isolation_level=None)
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM journal").fetchone()
        self._later(2.0, connection.close)

    def _sample(self) -> None:
        memory, files, threads = zip(*self._readings, strict=True)
        kept, kept_by_killed = (max(1, self._query(a, "SELECT count(*) FROM workflow")) for a in self.agents)
        most = self._seconds / 6 * (1 / LIFE_SECONDS + 1 / (4 * LIFE_SECONDS))  # that come in so long a time
        path = self.steady.state_dir / FILE_NAME
        values = {
            "resident memory between faults": min(memory),
            "resident memory in the worst moment": max(memory),
            "file descriptors": min(files),  # the least counts: those of hooks come and go
            "threads": min(threads),
            "state file": path.stat().st_size / 1024,
            "state file in use for each event": self._query(self.steady, IN_USE) / kept,
            "write-ahead log of it": path.with_name(f"{FILE_NAME}-wal").stat().st_size / 1024,
            "rows of the journal for each event": self._query(self.steady, "SELECT count(*) FROM journal") / kept,
            "events kept of those that came meanwhile": 100 * kept / most,
            "state file in use for each event, agent that is killed": self._query(self.killed, IN_USE)
            / kept_by_killed,
        }
        del self._readings[:-1]
        self.samples.append(Sample(time.monotonic() - self._began, values))
        shown = ", ".join(f"{what} {value:,.1f}" for what, value in values.items())
        print(f"{self.samples[-1].at:7.1f} s: {shown}", file=sys.stderr, flush=True)

    def _query(self, agent: PacedAgent, text: str) -> Any:
        with contextlib.closing(sqlite3.connect(agent.state_dir / FILE_NAME, timeout=10)) as connection:
            return connection.execute(text).fetchone()[0]

    def left_over(self) -> dict[str, float]:
        """What must not be there at the end, by name."""
        steady, killed = self.agents
        with contextlib.suppress(AssertionError):
            killed.wait_until(lambda: killed.get("/status")[0] == 200, "the second agent has started again")
            steady.wait_until(lambda: not self._pending(), "all events are over")
        self.counts["polls of the first agent"] = int(steady.metric("polls_total"))
        self.counts["events it saw"] = int(steady.metric("events_total"))
        self.counts["hooks it ran"] = int(steady.metric("hook_duration_seconds_count"))
        told = [line for agent in self.agents for line in agent.history if '"level":"error"' in line]
        errors = [line for line in told if REFUSED not in line]
        print(*errors, sep="", end="", file=sys.stderr)
        return {
            "events pending": self._pending(),
            "events seen and not closed": steady.metric("events_total") - steady.metric("closed_total"),
            "bugs met": steady.metric("faults_total") + killed.metric("faults_total"),
            "failures of the state file": steady.metric("store_errors_total"),
            "errors in the logs": len(errors),
        }

    def _pending(self) -> int:
        return sum(len(agent.pending()) for agent in self.agents)


def main() -> int:
    """Run it and print the tables; 1 if something grew, or was left over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="See whether the agent grows.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it runs (default: 60)")
    seconds = 60 * parser.parse_args().minutes
    with (
        TemporaryDirectory(prefix="scheduled-events-soak-") as directory,
        Simulator(vms=VMS, others=("vm-9",), rate_limit=None) as simulator,
    ):
        soak = Soak(Path(directory), simulator, seconds)
        try:
            soak.run()
            left_over = soak.left_over()
        finally:
            for agent in soak.agents:
                agent.close()
    verdicts = judge([sample for sample in soak.samples if sample.at > seconds / 2])
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
