"""Runs of the simulation: one seed, many, and the shortest that still goes wrong."""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from oracle import BrokenError
from vm_simulation import Trouble, VmSimulation

from scheduled_events_agent.store import file, store

# A real file, and no waiting for a real disk: nothing here tests that one keeps its promises.
_MEMORY_DISK = Path("/dev/shm")


@dataclass(frozen=True)
class RunResult:
    """How a run went."""

    seed: int
    broken: str
    """The invariant that does not hold; "" if all of them do."""
    journal: tuple[str, ...]
    events: int
    """How many there were."""
    troubles: frozenset[Any]
    option: str = ""
    """The option of the command that repeats it, with a blank before it."""

    def text(self) -> str:
        """The journal and its end, with the command that repeats it."""
        end = f"BROKEN: {self.broken}" if self.broken else "all invariants hold"
        again = f"again: python tests/simulation{self.option} --show {self.seed}"
        return "\n".join((*self.journal, f"seed {self.seed}: {end}", again))


class Run(Protocol):
    """One run: of this seed, with exactly these troubles, or with those that chance gives to the seed."""

    def __call__(self, seed: int, troubles: frozenset[Any] | None = None, /) -> RunResult: ...


def run_seed(seed: int, troubles: frozenset[Trouble] | None = None) -> RunResult:
    """The life of one VM."""
    root = _MEMORY_DISK if _MEMORY_DISK.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=root))
    try:
        # The simulation says when a disk is full, and a log that only grows can be torn where it has grown.
        file.RESERVE_BYTES = 0
        vars(store)["RESERVE_BYTES"] = 0
        simulation = VmSimulation(seed, directory, troubles)
        broken = failure_of(simulation.run)
        return RunResult(seed, broken, tuple(simulation.journal), simulation.event_count, simulation.troubles)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def failure_of(run: Callable[[], None]) -> str:
    """What the run breaks; "" if nothing."""
    try:
        run()
    except BrokenError as error:
        return str(error)
    return ""


def run_seeds(run: Run, seeds: Iterable[int]) -> tuple[int, list[RunResult]]:
    """Many runs: how many events there were, and what went wrong."""
    results = [run(seed) for seed in seeds]
    return sum(result.events for result in results), [result for result in results if result.broken]


def shorten(run: Run, seed: int) -> RunResult:
    """The seed, without every trouble that it goes wrong without as well."""
    result = run(seed)
    for trouble in sorted(result.troubles) if result.broken else ():
        shorter = run(seed, result.troubles - {trouble})
        if shorter.broken[:3] == result.broken[:3]:
            result = shorter
    return result
