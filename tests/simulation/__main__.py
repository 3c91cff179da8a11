"""Live through many seeds, or tell the story of one.

    python tests/simulation --seeds 10000        seeds 0 to 9999, on all processors
    python tests/simulation --tell 4711          one seed, and every trouble left out that it does not need
    python tests/simulation --fleet --seeds 500  fleets of agents that share a ledger; with --tell as well

Exit code 1 if an invariant does not hold; then the shortest story of the first such seed is told.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from fleet_runs import FleetVerdict, judge_fleet_seeds, shorten_fleet
from runs import Verdict, judge_seeds, shorten

_CHUNK, _FLEET_CHUNK = 100, 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: 0)")
    parser.add_argument("--tell", type=int, metavar="SEED", help="tell the story of this one")
    parser.add_argument("--fleet", action="store_true", help="fleets of agents, not one agent")
    arguments = parser.parse_args()
    if arguments.tell is not None:
        verdict = (shorten_fleet if arguments.fleet else shorten)(arguments.tell)
        print(verdict.text())
        return 1 if verdict.broken else 0
    return _live_through(arguments.first, arguments.first + arguments.seeds, is_fleet=arguments.fleet)


def _live_through(first: int, last: int, *, is_fleet: bool) -> int:
    began = told = time.monotonic()
    done, lives, broken = 0, 0, list[Verdict | FleetVerdict]()
    size = _FLEET_CHUNK if is_fleet else _CHUNK
    chunks = [range(start, min(start + size, last)) for start in range(first, last, size)]
    results: Iterable[tuple[int, Sequence[Verdict | FleetVerdict]]]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(judge_fleet_seeds, chunks) if is_fleet else pool.map(judge_seeds, chunks)
        for seeds, (events, found) in zip(chunks, results, strict=True):
            done, lives, broken = done + len(seeds), lives + events, [*broken, *found]
            for verdict in found:
                print(f"seed {verdict.seed}: {verdict.broken}", flush=True)
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                print(f"{done} of {last - first} seeds, {len(broken)} broken", flush=True)
    seconds = time.monotonic() - began
    print(f"{done} seeds, {lives} events, {seconds:.0f} s: {len(broken)} broken")
    if not broken:
        return 0
    print((shorten_fleet if is_fleet else shorten)(broken[0].seed).text())
    return 1


if __name__ == "__main__":
    sys.exit(main())
