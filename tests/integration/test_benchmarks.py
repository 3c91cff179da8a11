"""The benchmarks run and print every row; the figures are not judged here."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.sides import Side
from scheduled_events_agent.simulator import Simulator

PAST = "100 past events"
COMMANDS = (
    *("--help", "--version", "status", "history", f"status, {PAST}", f"history, {PAST}"),
    *("check", "explain", "explain DOCUMENT"),
)
ROWS = [
    ("CPU of a poll, 0 events pending, ms", None),
    ("the same as a ratio to httpx", "1.3"),
    ("wake-ups a second", None),
    ("CPU of a poll, 10 events pending, ms", None),
    ("the same as a ratio to none", "2"),
    ("served to the first hook, p50, ms", None),
    ("served to the first hook, p99, ms", "10"),
    ("served to the first hook, max, ms", "30"),
    ("served to the approval, p50, ms", None),
    ("served to the approval, p99, ms", "10"),
    ("served to the approval, max, ms", "30"),
    ("CPU from exec to the first poll, ms", "200"),
    (f"CPU from exec to the first poll, {PAST}, ms", "200"),
    ("CPU of python -c pass, ms", None),
    ("CPU of --help as a ratio to it", "3"),
    *((f"CPU of {command}, ms", "100") for command in COMMANDS),
    *((f"CPU of {page}, 1,000 x 100 pending, ms", "15") for page in ("/metrics", "/status", "/")),
    ("resident memory after the first event, MiB", "36"),
    ("more of it when 1,000 x 100 have come and gone, MiB", "8"),
    ("resident memory, no fleet, MiB", None),
    ("requests to the table, an event of 10 VMs", None),
    ("last of 10 VMs ready to the approval, ms", None),
    ("resident memory, fleet of 10, MiB", None),
]
LINE = re.compile(
    r"(?P<figure>.+?) {2,}(?P<samples>[\d,]+) +(?P<agent>-?[\d.]+)"
    r" +(?P<httpx>-|-?[\d.]+) +(?P<http>-|-?[\d.]+)(?: +<= (?P<target>[\d.]+) +(?:met|MISSED))?"
)

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="CPU time and memory are read from Linux"
)


@on_linux
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_quick_run_prints_every_row() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"Python {sys.version.split()[0]}" in done.stdout.splitlines()[0]
    rows = list(filter(None, map(LINE.fullmatch, done.stdout.splitlines())))
    assert [(row["figure"], row["target"]) for row in rows] == ROWS, done.stdout
    assert all(float(row["agent"]) > 0 for row in rows if not row["figure"].startswith("more of it"))
    beside = [row["figure"] for row in rows if row["httpx"] != "-" and row["http"] != "-"]
    for figure in (
        "CPU of a poll, 10 events pending, ms",
        "served to the approval, p99, ms",
        "resident memory after the first event, MiB",
    ):
        assert figure in beside


@on_linux
def test_a_run_that_is_killed_leaves_no_agent_behind() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stderr is not None
            assert bench.stderr.readline() == "measure polls ...\n"
            programs: list[psutil.Process] = []
            while len(programs) < 3:  # the agent and both loops, beyond the fork
                time.sleep(0.05)
                children = psutil.Process(bench.pid).children()
                programs = [child for child in children if child.cmdline() not in ([], command)]
        finally:
            bench.kill()
    gone, alive = psutil.wait_procs(programs, timeout=60)
    for process in alive:
        process.kill()
    assert (len(gone), alive) == (3, [])


@on_linux
def test_an_agent_that_cannot_start_ends_the_wait_with_its_output(tmp_path: Path) -> None:
    with Simulator() as simulator:
        agent = Side("agent", tmp_path, simulator, 1.0)
        agent.config.write_text("rulez: []", encoding="utf-8")
        try:
            with pytest.raises(RuntimeError, match=r"(?s)exit code 2\n.*rulez"):
                agent.start_polling()
        finally:
            agent.close()
