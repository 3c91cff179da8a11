"""``python -m benchmarks.soak --minutes N``: the agent at a hundred times its pace, and whether it grows.

It polls the simulator in this process every 10 ms instead of every second. Every half second there is an event,
of one kind after the other: hooks run, fail and are canceled, an operator approves. The endpoint has faults, pages
are fetched, and the policy is reloaded, also a broken one. The journal is kept for a sixth of the run.

The run fails if something is left over at the end, or grows by more than it may, by a line fitted to the second
half. By then the memory was seen to have met all kinds of trouble, and to be flat.
"""

import argparse
import contextlib
import math
import sqlite3
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from agent.simulator import Simulator, SimulatorError
from agent.store import FILE_NAME
from benchmarks.sides import PacedAgent, compile_all, describe_machine, print_table

POLL_SECONDS = 0.01
TURN_SECONDS = 0.5
RELOAD_TURNS = 6
REFUSED = "the policy file is refused; the old policy stays in force"
IN_STATE_FILE = """SELECT (page_count - freelist_count) * page_size / 1024.0,
    (SELECT count(*) FROM workflow), (SELECT count(*) FROM journal)
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""

HOOKS = {"quick": "echo prepared", "slow": "sleep 3", "fails": "echo no; exit 3", "undo": "cat"}
PREPARED = {"recover": ["undo"], "approve": "when-prepared"}
RULES: list[dict[str, Any]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately"},
    {"name": "manual", "when": {"type": "Preempt"}, **PREPARED, "prepare": ["quick"], "approve": "manual"},
    {"name": "fails", "when": {"type": "Terminate"}, **PREPARED, "prepare": ["fails"]},
    {"name": "slow", "when": {"type": "Redeploy"}, **PREPARED, "prepare": ["slow"]},
    {"name": "rest", **PREPARED, "prepare": ["quick"]},
]
# Type and plan. What has not started after two turns is canceled; the operator approves a Preempt after one.
STORIES: Sequence[tuple[Any, dict[str, Any]]] = (
    ("Reboot", {"source": "User"}),
    ("Preempt", {}),
    ("Reboot", {}),
    ("Freeze", {"begins_started": True}),
    ("Redeploy", {}),
    ("Terminate", {}),
    ("Reboot", {"vms": ["vm-1", "vm-9"]}),
    ("Reboot", {"source": "User", "new_id_at_start": True}),
)
# Those that pass without a pause of their own, so that the load stays steady; 429 and 400 ask for one.
FAULTS: Sequence[Any] = ("reset", "truncated", "stall", "html", "empty", "endless", "redirect")
# By how much each measure may grow.
MAY_GROW = {
    # An answer that is too large is read up to 8 MiB, and the allocator keeps some of that for a while.
    "resident memory, MiB": 2.0,
    "file descriptors": 1.0,
    "threads": 1.0,
    # It grows by 4 MiB at a time, to keep room for a full disk; what is in use must not.
    "state file with its write-ahead log, MiB": 4.0,
    # Fewer events come while the machine is busy, so what is kept of each counts.
    "state file in use for each event, KiB": 2.0,
    "rows of the journal for each event": 2.0,
    "events kept of those that came meanwhile, %": 10.0,
}

# What is too much even if it does not grow.
MAY_REACH = {"resident memory, MiB": 80.0, "state file with its write-ahead log, MiB": 32.0}


def judge(samples: Sequence[Sequence[float]]) -> list[Sequence[str]]:
    """The rows of the table, by a fitted line; the last cell of each says "flat", "GREW" or "TOO MUCH".

    The samples were taken at equal distances; each has the values of ``MAY_GROW``.
    """
    rows: list[Sequence[str]] = []
    for (what, allowed), values in zip(MAY_GROW.items(), zip(*samples, strict=True), strict=True):
        growth = statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)
        numbers = f"{min(values):,.1f}", f"{max(values):,.1f}", f"{growth:+,.1f}", f"{allowed:g}"
        is_much = max(values) > MAY_REACH.get(what, math.inf)
        rows.append((what, *numbers, "GREW" if growth > allowed else "TOO MUCH" if is_much else "flat"))
    return rows


class Soak:
    """The run: what happens when."""

    def __init__(self, directory: Path, simulator: Simulator, seconds: float) -> None:
        self.simulator, self.turns = simulator, round(seconds / TURN_SECONDS)
        self.agent = PacedAgent(directory, simulator.endpoint(), POLL_SECONDS, seconds / 6)
        self.agent.imds |= {"request_timeout": "250ms", "first_request_timeout": "250ms"}
        self.samples: list[tuple[float, ...]] = []

    def run(self) -> None:
        """Until the time is over and all events are."""
        self._write_policy(RULES)
        self.agent.start()
        began = time.monotonic()
        events: list[str] = []
        for turn in range(self.turns):
            time.sleep(max(0.0, began + turn * TURN_SECONDS - time.monotonic()))
            if turn % len(STORIES) == 2:
                self.agent.say("approve", events[-1])
            for event in events[-2:-1]:
                self._cancel(event)
            events.append(self._announce(*STORIES[turn % len(STORIES)]))
            if turn % 2:
                self.simulator.fault(None, FAULTS[turn // 2 % len(FAULTS)], on="poll", count=3)
            if turn % RELOAD_TURNS == 5:
                self._write_policy("broken" if turn // RELOAD_TURNS % 3 == 0 else RULES)
                self.agent.reload()
            self.agent.get(("/metrics", "/readyz", "/status", "/history")[turn % 4])
            self.samples.append(self._sample())
        for event in events[-2:]:
            self._cancel(event)
        self.agent.wait_until(lambda: not self.agent.pending(), "all events are over")

    def _announce(self, type_: Any, plan: dict[str, Any]) -> str:
        """Times are real seconds; at a hundredfold pace half a second is most of a minute."""
        times = {"notice_seconds": 900, "start_delay_seconds": 0.05, "lasts_seconds": 0.3}
        return self.simulator.schedule(type_, **{"vms": ["vm-1"], **times, **plan})

    def _cancel(self, event: str) -> None:
        with contextlib.suppress(SimulatorError):  # it has started, or is over
            self.simulator.cancel(event)

    def _write_policy(self, rules: Any) -> None:
        hooks = {name: {"run": ["/bin/sh", "-c", script]} for name, script in HOOKS.items()}
        self.agent.write_policy(imds=self.agent.imds, rules=rules, hooks=hooks)

    def _sample(self) -> tuple[float, ...]:
        process = psutil.Process(self.agent.process.pid)
        with contextlib.closing(sqlite3.connect(self.agent.state_dir / FILE_NAME, timeout=10)) as connection:
            in_use, events, rows = connection.execute(IN_STATE_FILE).fetchone()
        files = self.agent.state_dir.glob(f"{FILE_NAME}*")
        return (
            self.agent.resident_mib(),
            len(list(Path(f"/proc/{process.pid}/fd").iterdir())),
            process.num_threads(),
            sum(file.stat().st_size for file in files) / 2**20,
            in_use / max(1, events),
            rows / max(1, events),
            100 * events / (self.turns / 6),
        )

    def account(self) -> tuple[dict[str, float], dict[str, float]]:
        """What must not be left over at the end, and what must have happened."""
        metric, refused = self.agent.metric, self.agent.log(REFUSED)
        told = [line for line in self.agent.history if '"level":"error"' in line and REFUSED not in line]
        print(*told, sep="", end="", file=sys.stderr)
        return {
            "events not closed": metric("events_total") - metric("closed_total"),
            "bugs met": metric("faults_total"),
            "failures of the state file": metric("store_errors_total"),
            "errors in the log": len(told),
        }, {
            "polls": metric("polls_total"),
            "polls that failed": metric("polls_total") - metric("polls_total", outcome="ok"),
            "approvals": metric("approvals_total", outcome="confirmed"),
            "approvals by the operator": metric("approval_delay_seconds_count", rule="manual"),
            "hooks": metric("hook_runs_total"),
            "hooks that failed": metric("hook_failures_total"),
            "policies refused": len(refused),
        }


def main() -> int:
    """Run it and print the tables; 1 if something grew, or was left over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="See whether the agent grows.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it runs (default: 60)")
    seconds = 60 * parser.parse_args().minutes
    compile_all()
    with (
        TemporaryDirectory(prefix="scheduled-events-soak-") as directory,
        Simulator(others=("vm-9",), rate_limit=None) as simulator,
    ):
        soak = Soak(Path(directory), simulator, seconds)
        with contextlib.closing(soak.agent):
            soak.run()
            left_over, happened = soak.account()
    rows = judge(soak.samples[soak.turns // 2 :])
    print(f"{describe_machine()}\n")
    print_table(("over the second half", "least", "most", "growth", "at most", ""), *rows)
    for title, numbers in (("left over at the end", left_over), ("what happened", happened)):
        print()
        print_table((title, ""), *((what, f"{number:,g}") for what, number in numbers.items()))
    return 1 if any(left_over.values()) or any(row[-1] != "flat" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
