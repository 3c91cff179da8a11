"""Live through many seeds, or tell the story of one.

    python tests/simulation --seeds 10000        seeds 0 to 9999, on all processors
    python tests/simulation --tell 4711          one seed, and every trouble left out that it does not need

Exit code 1 if an invariant does not hold; then the shortest story of the first such seed is told.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from runs import Verdict, judge_seeds, shorten

_CHUNK = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: 0)")
    parser.add_argument("--tell", type=int, metavar="SEED", help="tell the story of this one")
    arguments = parser.parse_args()
    if arguments.tell is not None:
        verdict = shorten(arguments.tell)
        print(verdict.text())
        return 1 if verdict.broken else 0
    return _live_through(arguments.first, arguments.first + arguments.seeds)


def _live_through(first: int, last: int) -> int:
    began = told = time.monotonic()
    done, lives, broken = 0, 0, list[Verdict]()
    chunks = [range(start, min(start + _CHUNK, last)) for start in range(first, last, _CHUNK)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for seeds, (events, found) in zip(chunks, pool.map(judge_seeds, chunks), strict=True):
            done, lives, broken = done + len(seeds), lives + events, broken + found
            for verdict in found:
                print(f"seed {verdict.seed}: {verdict.broken}", flush=True)
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                print(f"{done} of {last - first} seeds, {len(broken)} broken", flush=True)
    seconds = time.monotonic() - began
    print(f"{done} seeds, {lives} events, {seconds:.0f} s: {len(broken)} broken")
    if not broken:
        return 0
    print(shorten(broken[0].seed).text())
    return 1


if __name__ == "__main__":
    sys.exit(main())
