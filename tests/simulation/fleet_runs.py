"""Runs of the fleet's simulation: one seed, many, and the shortest that still goes wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

from fleet_world import FleetTrouble, FleetWorld
from judge import BrokenError

_LARGE = 200
_EACH = 50
"""Of so many seeds one has a large fleet."""


@dataclass(frozen=True)
class FleetVerdict:
    """How a run went."""

    seed: int
    broken: str
    """What does not hold; "" if all does."""
    story: tuple[str, ...]
    events: int
    troubles: frozenset[FleetTrouble]
    requests: int
    """To the ledger."""

    def text(self) -> str:
        """The story and its end, with the way to hear it again."""
        end = f"BROKEN: {self.broken}" if self.broken else "all holds"
        again = f"again: python tests/simulation --fleet --tell {self.seed}"
        return "\n".join((*self.story, f"seed {self.seed}: {end}", again))


def judge_fleet_seed(seed: int, troubles: frozenset[FleetTrouble] | None = None) -> FleetVerdict:
    """One run; ``troubles`` as for a FleetWorld."""
    world = FleetWorld(seed, troubles, size=_LARGE if seed % _EACH == _EACH - 1 else None)
    try:
        world.run()
        broken = ""
    except BrokenError as error:
        broken = str(error)
    story = tuple(world.story)
    return FleetVerdict(seed, broken, story, len(world.judge.lives), world.troubles, world.ledger.calls)


def judge_fleet_seeds(seeds: Iterable[int]) -> tuple[int, list[FleetVerdict]]:
    """Many runs: how many events there were, and what went wrong."""
    verdicts = [judge_fleet_seed(seed) for seed in seeds]
    return sum(verdict.events for verdict in verdicts), [verdict for verdict in verdicts if verdict.broken]


def shorten_fleet(seed: int) -> FleetVerdict:
    """The seed, without every trouble that it goes wrong without as well."""
    verdict = judge_fleet_seed(seed)
    for trouble in sorted(verdict.troubles) if verdict.broken else ():
        shorter = judge_fleet_seed(seed, verdict.troubles - {trouble})
        if shorter.broken[:3] == verdict.broken[:3]:
            verdict = shorter
    return verdict
