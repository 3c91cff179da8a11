"""Live through many seeds, or print the journal of one.

    python tests/simulation --seeds 10000        seeds that the commit gives, on all processors
    python tests/simulation --first 0            other seeds
    python tests/simulation --show 4711          one seed, and every trouble left out that it does not need
    python tests/simulation --fleet --seeds 500  fleets of agents that share a store; with --show as well
    python tests/simulation --fleet --no-ages    fleets with a store that reports no ages
    python tests/simulation --fleet --leases     fleets whose records are Leases

The seeds that have ever failed are lived each time. Exit code 1 if an invariant does not hold; then the shortest
journal of the first such seed is printed.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[1] / folder) for folder in ("fixtures", "e2e", "kube_api")
]  # as pytest has

from fleet_runs import run_fleet_seed
from runs import Run, RunResult, run_seed, run_seeds, shorten
from seeds import FAILED_FLEET_SEEDS, FAILED_SEEDS, current_commit, first_seed

_CHUNK = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    parser.add_argument("--first", type=int, metavar="SEED", help="the first one (default: the commit gives it)")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the journal of this one")
    parser.add_argument("--fleet", action="store_true", help="fleets of agents, not one agent")
    parser.add_argument("--no-ages", action="store_true", help="with --fleet: the store reports no ages")
    parser.add_argument("--leases", action="store_true", help="with --fleet: the records are Leases")
    arguments = parser.parse_args()
    run_fleet: Run = partial(run_fleet_seed, has_ages=not arguments.no_ages, in_leases=arguments.leases)
    run = run_fleet if arguments.fleet else run_seed
    if arguments.show is None:
        first = first_seed(current_commit()) if arguments.first is None else arguments.first
        failed = FAILED_FLEET_SEEDS if arguments.fleet else FAILED_SEEDS
        last = first + arguments.seeds - 1
        print(f"seeds {first} to {last} (again: --first {first}) and {len(failed)} that have failed", flush=True)
        return _live_through([*failed, *range(first, first + arguments.seeds)], run)
    result = shorten(run, arguments.show)
    print(result.text())
    return 1 if result.broken else 0


def _live_through(seeds: Sequence[int], run: Run) -> int:
    began = reported_at = time.monotonic()
    done = 0
    lives = 0
    broken: list[RunResult] = []
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for chunk, (events, found) in zip(chunks, pool.map(partial(run_seeds, run), chunks), strict=True):
            done += len(chunk)
            lives += events
            broken += found
            for result in found:
                print(f"seed {result.seed}: {result.broken}", flush=True)
            if time.monotonic() - reported_at > 10.0:
                reported_at = time.monotonic()
                print(f"{done} of {len(seeds)} seeds, {len(broken)} broken", flush=True)
    seconds = time.monotonic() - began
    print(f"{done} seeds, {lives} events, {seconds:.0f} s: {len(broken)} broken")
    if not broken:
        return 0
    print(shorten(run, broken[0].seed).text())
    return 1


if __name__ == "__main__":
    sys.exit(main())
