"""Live through many seeds, or tell the story of one.

    python tests/simulation --seeds 10000        seeds 0 to 9999, on all processors
    python tests/simulation --tell 4711          one seed, and every trouble left out that it does not need
    python tests/simulation --fleet --seeds 500  fleets of agents that share a store; with --tell as well
    python tests/simulation --fleet --no-ages    fleets with a store that reports no ages

Exit code 1 if an invariant does not hold; then the shortest story of the first such seed is printed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))  # as pytest has it

from fleet_runs import FleetVerdict, judge_fleet_seeds, shorten_fleet
from runs import Verdict, judge_seeds, shorten

_CHUNK = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: 0)")
    parser.add_argument("--tell", type=int, metavar="SEED", help="tell the story of this one")
    parser.add_argument("--fleet", action="store_true", help="fleets of agents, not one agent")
    parser.add_argument("--no-ages", action="store_true", help="with --fleet: the store tells no ages")
    arguments = parser.parse_args()
    shorten_one: Callable[[int], Verdict | FleetVerdict] = shorten
    judge_some: Callable[[range], tuple[int, Sequence[Verdict | FleetVerdict]]] = judge_seeds
    if arguments.fleet:
        shorten_one = partial(shorten_fleet, has_ages=not arguments.no_ages)
        judge_some = partial(judge_fleet_seeds, has_ages=not arguments.no_ages)
    if arguments.tell is None:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        return _live_through(seeds, judge_some, shorten_one)
    verdict = shorten_one(arguments.tell)
    print(verdict.text())
    return 1 if verdict.broken else 0


def _live_through(
    seeds: range,
    judge_some: Callable[[range], tuple[int, Sequence[Verdict | FleetVerdict]]],
    shorten_one: Callable[[int], Verdict | FleetVerdict],
) -> int:
    began = told = time.monotonic()
    done = 0
    lives = 0
    broken: list[Verdict | FleetVerdict] = []
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for chunk, (events, found) in zip(chunks, pool.map(judge_some, chunks), strict=True):
            done += len(chunk)
            lives += events
            broken += found
            for verdict in found:
                print(f"seed {verdict.seed}: {verdict.broken}", flush=True)
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                print(f"{done} of {len(seeds)} seeds, {len(broken)} broken", flush=True)
    seconds = time.monotonic() - began
    print(f"{done} seeds, {lives} events, {seconds:.0f} s: {len(broken)} broken")
    if not broken:
        return 0
    print(shorten_one(broken[0].seed).text())
    return 1


if __name__ == "__main__":
    sys.exit(main())
