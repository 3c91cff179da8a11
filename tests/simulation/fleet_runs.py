"""Runs of the fleet's simulation: one seed, many, and the shortest that still goes wrong."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fleet_machines import Sent
from fleet_simulation import CLOCKS, FleetTrouble, FleetWorld
from oracle import BrokenError

_LARGE = 200
_LARGE_EVERY = 200
"""One seed in so many has a large fleet."""
_CLOCKS_EVERY = 10
"""One seed in so many runs with right clocks and with wrong ones, and must go the same way."""


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
    """To the store."""
    judged: Counter[int]
    """How often each invariant was looked at."""

    def text(self) -> str:
        """The story and its end, with the command that repeats it."""
        end = f"BROKEN: {self.broken}" if self.broken else "all holds"
        again = f"again: python tests/simulation --fleet --tell {self.seed}"
        return "\n".join((*self.story, f"seed {self.seed}: {end}", again))


def judge_fleet_seed(
    seed: int, troubles: frozenset[FleetTrouble] | None = None, *, has_ages: bool = True
) -> FleetVerdict:
    """One run; ``troubles`` and ``has_ages`` as for a FleetWorld."""
    if seed % _CLOCKS_EVERY == _CLOCKS_EVERY - 2 and has_ages:
        return _judge_clocks(seed, troubles)
    size = _LARGE if seed % _LARGE_EVERY == _LARGE_EVERY - 1 else None
    return _live(FleetWorld(seed, troubles, size=size, has_ages=has_ages))


def _live(world: FleetWorld, broken: str = "") -> FleetVerdict:
    try:
        world.run()
    except BrokenError as error:
        broken = str(error)
    return FleetVerdict(
        seed=world.seed,
        broken=broken,
        story=tuple(world.story),
        events=len(world.judge.lives),
        troubles=world.troubles,
        requests=len(world.network.log),
        judged=world.judge.judged,
    )


def _judge_clocks(seed: int, troubles: frozenset[FleetTrouble] | None) -> FleetVerdict:
    """(9) The requests are the same whatever the clocks say, as long as no event reaches its latest begin."""
    given = FleetWorld(seed).troubles if troubles is None else troubles
    given -= {"one name"}  # one of the two waits until its latest begin
    right = FleetWorld(seed, given - CLOCKS, is_short=True)
    wrong = FleetWorld(seed, given | CLOCKS, is_short=True)
    verdict = _live(right)
    if not verdict.broken:
        verdict = _live(wrong)
    verdict.judged[9] += 1
    logs = [[one for one in world.network.log if one[0] < right.stops_at] for world in (right, wrong)]
    apart = (pair for pair in zip(*logs, strict=False) if not _is_same(*pair))
    first = next(apart, None if len(logs[0]) == len(logs[1]) else "one has more")
    if verdict.broken or first is None:
        return verdict
    return FleetVerdict(**{**vars(verdict), "broken": f"(9) clocks change a request: {first}"})


def _is_same(one: tuple[float, str, Sent], other: tuple[float, str, Sent]) -> bool:
    """Datetimes have whole microseconds, so that times differ by some."""
    return one[1:] == other[1:] and abs(one[0] - other[0]) < 0.001


def judge_fleet_seeds(seeds: Iterable[int], *, has_ages: bool = True) -> tuple[int, list[FleetVerdict]]:
    """Many runs: how many events there were, and what went wrong."""
    verdicts = [judge_fleet_seed(seed, has_ages=has_ages) for seed in seeds]
    return sum(verdict.events for verdict in verdicts), [verdict for verdict in verdicts if verdict.broken]


def shorten_fleet(seed: int, *, has_ages: bool = True) -> FleetVerdict:
    """The seed, without every trouble that it goes wrong without as well."""
    verdict = judge_fleet_seed(seed, has_ages=has_ages)
    for trouble in sorted(verdict.troubles) if verdict.broken else ():
        shorter = judge_fleet_seed(seed, verdict.troubles - {trouble}, has_ages=has_ages)
        if shorter.broken[:3] == verdict.broken[:3]:
            verdict = shorter
    return verdict
