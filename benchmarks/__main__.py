"""``python -m benchmarks``: measures, then prints the table."""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from agent import __version__
from benchmarks import measures
from benchmarks.measures import Row

# Far more than it takes, on a busy machine too: a run that hangs is not left behind.
_QUICK_LIFE_SECONDS = 600
_LIFE_SECONDS = 3600


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
    machine = _machine()
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

    warm_up, polls = choose(1, 10), choose(2, 60)
    return [
        ("CPU", lambda: measures.measure_cpu(place, warm_up_polls=warm_up, polls=polls)),
        ("CPU of the client", lambda: measures.measure_client(place, warm_up_polls=warm_up, polls=polls)),
        ("memory", lambda: measures.measure_memory(place, polls=choose(300, 3600))),
        ("start", lambda: measures.measure_start(place, runs=choose(1, 10))),
        ("latency", lambda: measures.measure_latency(place, events=choose(2, 100))),
        ("a big document", lambda: measures.measure_big_document(place, runs=choose(2, 20))),
    ]


def _command() -> str:
    return " ".join([os.path.relpath(sys.executable), "-m", "benchmarks", *sys.argv[1:]])


def _machine() -> str:
    if sys.platform == "win32":
        raise NotImplementedError
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"agent {__version__}; load average at the end {load:.1f}"
    )


def _is_met(row: Row) -> bool | None:
    return None if row.target is None else row.agent < row.target


def _table(rows: list[Row]) -> str:
    """Columns wide enough for what is in them, numbers to the right."""
    cells = [("figure", "unit", "n", "agent", "bare loop", "target", "")]
    for row in rows:
        bare = "-" if row.bare is None else f"{row.bare:.2f}"
        target = "-" if row.target is None else f"< {row.target:g}"
        verdict = {True: "met", False: "MISSED", None: ""}[_is_met(row)]
        cells.append((row.figure, row.unit, str(row.samples), f"{row.agent:.2f}", bare, target, verdict))
    widths = [max(len(line[column]) for line in cells) for column in range(7)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column in (0, 1, 6) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


if __name__ == "__main__":
    sys.exit(main())
