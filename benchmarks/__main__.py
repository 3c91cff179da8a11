"""``python -m benchmarks``: measures, then prints the table."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import measures
from benchmarks.measures import Row
from benchmarks.programs import describe_machine

# Far more than it takes, on a busy machine too: a run that hangs is not left behind.
_QUICK_LIFE_SECONDS = 600
_LIFE_SECONDS = 7200


def main() -> int:
    """Print the table; the exit code says nothing about targets."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the agent's speed and size."
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run in seconds; its figures mean little")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("memory and CPU time are read from Linux; run it there")
    signal.alarm(_QUICK_LIFE_SECONDS if arguments.quick else _LIFE_SECONDS)
    began = time.monotonic()
    rows: list[Row] = []
    with TemporaryDirectory(prefix="scheduled-events-bench-") as directory:
        for name, measure in _plan(Path(directory), is_quick=arguments.quick):
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            rows += measure()
    machine = describe_machine()
    took = f"{time.monotonic() - began:.0f} s"
    if arguments.json:
        lines = [{**row._asdict(), "met": _is_met(row)} for row in rows]
        print(json.dumps({"command": _command(), "machine": machine, "rows": lines}, indent=2))
    else:
        print(f"\n$ {_command()}\n{machine}; the run took {took}\n")
        print(_table(rows))
    return 0


def _plan(place: Path, *, is_quick: bool) -> list[tuple[str, Callable[[], list[Row]]]]:
    def choose(quick: int, full: int) -> int:
        return quick if is_quick else full

    windows = choose(1, 5)
    pending = (0, 10) if is_quick else (0, 10, 100, 1000)
    return [
        (
            "idle polls",
            lambda: measures.measure_idle(place, pending=pending, windows=windows, polls=choose(2, 12)),
        ),
        ("pages", lambda: measures.measure_pages(place, windows=windows, pages=choose(1, 5))),
        ("the tail", lambda: measures.measure_tail(place, events=choose(2, 2000))),
        ("start", lambda: measures.measure_start(place, runs=choose(1, 5), past=choose(100, 100_000))),
        ("commands", lambda: measures.measure_commands(place, runs=choose(1, 5))),
        ("memory", lambda: measures.measure_memory(place, polls=choose(300, 3600))),
    ]


def _command() -> str:
    return " ".join([os.path.relpath(sys.executable), "-m", "benchmarks", *sys.argv[1:]])


def _is_met(row: Row) -> bool | None:
    return None if row.target is None else row.agent <= row.target


def _table(rows: list[Row]) -> str:
    """Columns wide enough for what is in them, numbers to the right."""
    cells: list[tuple[str, ...]] = [("figure", "unit", "n", "agent", *measures.LOOPS, "target", "")]
    for row in rows:
        loops = [f"{value:.2f}" for value in row.loops] or ["-"] * len(measures.LOOPS)
        target = "-" if row.target is None else f"<= {row.target:g}"
        verdict = {True: "met", False: "MISSED", None: ""}[_is_met(row)]
        cells.append((row.figure, row.unit, f"{row.samples:,}", f"{row.agent:.2f}", *loops, target, verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[str.rjust, str.ljust][column in (0, 1, 7)] for column in range(len(widths))]
    return "\n".join(
        "  ".join(align(text, width) for align, text, width in zip(aligned, line, widths, strict=True)).rstrip()
        for line in cells
    )


if __name__ == "__main__":
    sys.exit(main())
