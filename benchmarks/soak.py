"""``python -m benchmarks.soak --minutes N``: the agent at a hundred times its pace, and whether it grows.

Every half second there is an event, of one kind after the other: hooks run, fail and are canceled, an operator
approves. The endpoint has faults, pages are fetched, and the policy is reloaded, also a broken one. The journal is
kept for a sixth of the run. The run fails if something is left over at the end, or grows by more than it may, by a
line fitted to the second half. By then the memory was seen to have met all kinds of trouble, and to be flat.

On 2026-11-23, beside other work, ``--minutes 50 --interval 0.0018`` were 979,976 polls, 8,944 of them failed, and
4,316 hooks: memory was between 52.4 and 53.9 MiB in the second half, nothing grew, and nothing was left over.
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
from typing import Any

import psutil

from benchmarks.sides import Side, describe_machine, open_sides
from scheduled_events_agent.simulator import Simulator, SimulatorError
from scheduled_events_agent.store import FILE_NAME

TURN_SECONDS = 0.5
REFUSED = "the policy file is rejected; the old policy stays in force"
IN_STATE_FILE = """SELECT (page_count - freelist_count) * page_size / 1024.0,
    (SELECT count(*) FROM workflow), (SELECT count(*) FROM journal)
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""

SCRIPTS = {"quick": "echo prepared", "slow": "sleep 3", "fails": "echo no; exit 3", "undo": "cat"}
HOOKS = {name: {"run": ["/bin/sh", "-c", script]} for name, script in SCRIPTS.items()}
IMDS = {"request_timeout": "250ms", "first_request_timeout": "250ms"}
PREPARED = {"recover": ["undo"], "approve": "when-prepared"}
RULES: list[dict[str, Any]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately"},
    {"name": "manual", "when": {"type": "Preempt"}, **PREPARED, "prepare": ["quick"], "approve": "manual"},
    {"name": "fails", "when": {"type": "Terminate"}, **PREPARED, "prepare": ["fails"]},
    {"name": "slow", "when": {"type": "Redeploy"}, **PREPARED, "prepare": ["slow"]},
    {"name": "rest", **PREPARED, "prepare": ["quick"]},
]
# An event that has not started after two turns is canceled; the operator approves a Preempt after one.
STORIES: list[dict[str, Any]] = [
    {"type_": "Reboot", "source": "User"},
    {"type_": "Preempt"},
    {"type_": "Reboot"},
    {"type_": "Freeze", "begins_started": True},
    {"type_": "Redeploy"},
    {"type_": "Terminate"},
    {"type_": "Reboot", "vms": ["vm-1", "vm-2"]},
    {"type_": "Reboot", "source": "User", "new_id_at_start": True},
]
# Real seconds; at a hundredfold pace half a second is most of a minute.
TIMES: dict[str, Any] = {"notice_seconds": 900, "start_delay_seconds": 0.05, "lasts_seconds": 0.3}
# Faults that add no pause of their own, so that the load stays steady; 429 and 400 ask for one.
FAULTS: Sequence[Any] = ("reset", "truncated", "stall", "html", "empty", "endless", "redirect")
# By how much each measure may grow, and what is too much even if it does not.
LIMITS = {
    # An answer that is too large is read up to 8 MiB, and the allocator keeps some of that for a while.
    "resident memory, MiB": (2.0, 80.0),
    "file descriptors": (1.0, math.inf),
    "threads": (1.0, math.inf),
    # It grows by 4 MiB at a time, to keep room for a full disk; what is in use must not.
    "state file with its write-ahead log, MiB": (4.0, 32.0),
    # Fewer events come while the machine is busy, so what is kept of each counts.
    "state file in use for each event, KiB": (2.0, math.inf),
    "rows of the journal for each event": (2.0, math.inf),
    "events kept of those that came meanwhile, %": (10.0, math.inf),
}
ROW = "{:<45}{:>10}{:>10}{:>10}{:>10}  {}"


def judge(samples: Sequence[Sequence[float]]) -> list[Sequence[str]]:
    """A row for each of ``LIMITS``, by a fitted line; its last cell says "flat", "GREW" or "TOO MUCH".

    The samples were taken at equal distances.
    """
    rows: list[Sequence[str]] = []
    for (what, (may_grow, may_reach)), values in zip(LIMITS.items(), zip(*samples, strict=True), strict=True):
        growth = statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)
        verdict = "flat"
        if growth > may_grow:
            verdict = "GREW"
        elif max(values) > may_reach:
            verdict = "TOO MUCH"
        numbers = f"{min(values):,.1f}", f"{max(values):,.1f}", f"{growth:+,.1f}", f"{may_grow:g}"
        rows.append((what, *numbers, verdict))
    return rows


def run(agent: Side, turns: int) -> list[tuple[float, ...]]:
    """Until the time is over and all events are; returns a sample of each turn."""
    simulator = agent.simulator
    events = list[str]()
    samples = []
    agent.write_policy(imds=IMDS, rules=RULES, hooks=HOOKS)
    agent.start()
    began = time.monotonic()
    for turn in range(turns):
        time.sleep(max(0.0, began + turn * TURN_SECONDS - time.monotonic()))
        if turn % len(STORIES) == 2:
            agent.say("approve", events[-1])
        cancel(simulator, events[-2:-1])
        events.append(simulator.schedule(**TIMES, **STORIES[turn % len(STORIES)]))
        if turn % 2:
            simulator.fault(None, FAULTS[turn // 2 % len(FAULTS)], on="poll", count=3)
        if turn % 6 == 5:
            agent.write_policy(imds=IMDS, rules="broken" if turn % 18 == 5 else RULES, hooks=HOOKS)
            agent.reload()
        agent.get(("/metrics", "/readyz", "/status", "/history")[turn % 4])
        samples.append(sample(agent, turns))
    cancel(simulator, events[-2:])
    agent.wait_until(lambda: not agent.pending(), "all events are over")
    return samples


def cancel(simulator: Simulator, events: Sequence[str]) -> None:
    for event in events:
        with contextlib.suppress(SimulatorError):  # it has started, or is over
            simulator.cancel(event)


def sample(agent: Side, turns: int) -> tuple[float, ...]:
    """Measure the values that ``LIMITS`` bounds."""
    process = psutil.Process(agent.process.pid)
    with contextlib.closing(sqlite3.connect(agent.state_dir / FILE_NAME, timeout=10)) as connection:
        in_use, events, rows = connection.execute(IN_STATE_FILE).fetchone()
    return (
        agent.resident_mib(),
        len(list(Path(f"/proc/{process.pid}/fd").iterdir())),
        process.num_threads(),
        sum(file.stat().st_size for file in agent.state_dir.glob(f"{FILE_NAME}*")) / 2**20,
        in_use / max(1, events),
        rows / max(1, events),
        100 * events / (turns / 6),
    )


def account(agent: Side) -> tuple[dict[str, float], dict[str, float]]:
    """Count what must be gone at the end, and what must have happened."""
    metric = agent.metric
    told = [line for line in agent.history if '"level":"error"' in line and REFUSED not in line]
    print(*told, sep="", end="", file=sys.stderr)
    return {
        "events not closed": metric("events_total") - metric("closed_total"),
        "bugs met": metric("bugs_total"),
        "failures of the state file": metric("store_errors_total"),
        "errors in the log": len(told),
    }, {
        "polls": metric("polls_total"),
        "polls that failed": metric("polls_total") - metric("polls_total", outcome="ok"),
        "approvals": metric("approvals_total", outcome="confirmed"),
        "approvals by the operator": metric("approval_delay_seconds_count", rule="manual"),
        "hooks": metric("hook_runs_total"),
        "hooks that failed": metric("hook_failures_total"),
        "policies refused": len(agent.log(REFUSED)),
    }


def main() -> int:
    """Run it and print the tables; 1 if something grew, or was left over."""
    parser = argparse.ArgumentParser("python -m benchmarks.soak", description="See whether the agent grows.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it runs (default: 60)")
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between polls (default: 0.01)")
    arguments = parser.parse_args()
    turns = round(60 * arguments.minutes / TURN_SECONDS)
    with open_sides(arguments.interval, ("agent",), keep_days=arguments.minutes / 1440 / 6) as (agent,):
        rows = judge(run(agent, turns)[turns // 2 :])
        left_over, happened = account(agent)
    print(f"{describe_machine()}\n")
    print(ROW.format("over the second half", "least", "most", "growth", "at most", ""))
    print(*(ROW.format(*row) for row in rows), sep="\n")
    for title, numbers in (("left over at the end", left_over), ("what happened", happened)):
        print(f"\n{title}", *(f"{what:<45}{number:>10,g}" for what, number in numbers.items()), sep="\n")
    return 1 if any(left_over.values()) or any(row[-1] != "flat" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
