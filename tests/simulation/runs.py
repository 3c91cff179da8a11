"""Runs of the simulation: one seed, many, and the shortest that still goes wrong."""

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oracle import BrokenError
from vm_simulation import Trouble, World

from scheduled_events_agent.store import file, store

# A real file, and no waiting for a real disk: nothing here tests that one keeps its promises.
_MEMORY_DISK = Path("/dev/shm")


@dataclass(frozen=True)
class Verdict:
    """How a run went."""

    seed: int
    broken: str
    """The invariant that does not hold; "" if all of them do."""
    story: tuple[str, ...]
    events: int
    """How many there were."""
    troubles: frozenset[Trouble]

    def text(self) -> str:
        """The story and its end, with the command that repeats it."""
        end = f"BROKEN: {self.broken}" if self.broken else "all invariants hold"
        again = f"again: python tests/simulation --tell {self.seed}"
        return "\n".join((*self.story, f"seed {self.seed}: {end}", again))


def judge_seed(seed: int, troubles: frozenset[Trouble] | None = None) -> Verdict:
    """One run; ``troubles`` as for a World."""
    root = _MEMORY_DISK if _MEMORY_DISK.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=root))
    try:
        # A disk is full here when the world says so, and a log that only grows can be torn where it has grown.
        file.RESERVE_BYTES = 0
        vars(store)["RESERVE_BYTES"] = 0
        world = World(seed, directory, troubles)
        try:
            world.run()
            broken = ""
        except BrokenError as error:
            broken = str(error)
        return Verdict(seed, broken, tuple(world.story), world.event_count, world.troubles)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def judge_seeds(seeds: Iterable[int]) -> tuple[int, list[Verdict]]:
    """Many runs: how many events there were, and what went wrong."""
    verdicts = [judge_seed(seed) for seed in seeds]
    return sum(verdict.events for verdict in verdicts), [verdict for verdict in verdicts if verdict.broken]


def shorten(seed: int) -> Verdict:
    """The seed, without every trouble that it goes wrong without as well."""
    verdict = judge_seed(seed)
    for trouble in sorted(verdict.troubles) if verdict.broken else ():
        shorter = judge_seed(seed, verdict.troubles - {trouble})
        if shorter.broken[:3] == verdict.broken[:3]:
            verdict = shorter
    return verdict
