"""Runs of the fleet's simulation."""

from collections import Counter
from dataclasses import dataclass, replace

from fleet_machines import Sent
from fleet_simulation import CLOCKS, FLEET_TROUBLES, FleetSimulation, FleetTrouble
from runs import RunResult, failure_of
from simulation import given_troubles

_LARGE = 200
_LARGE_EVERY = 200
"""One seed in so many has a large fleet."""
_CLOCKS_EVERY = 10
"""One seed in so many runs with right clocks and with wrong ones, and must go the same way."""


@dataclass(frozen=True, kw_only=True)
class FleetRunResult(RunResult):
    """How a run of a fleet went."""

    requests: int
    """To the store."""
    checked: Counter[int]
    """How often each invariant was looked at."""


def run_fleet_seed(
    seed: int,
    troubles: frozenset[FleetTrouble] | None = None,
    *,
    has_ages: bool = True,
    in_leases: bool = False,
) -> FleetRunResult:
    """One run; ``troubles``, ``has_ages`` and ``in_leases`` as for a FleetSimulation."""
    if seed % _CLOCKS_EVERY == _CLOCKS_EVERY - 2 and has_ages:
        return _check_clocks(seed, troubles, in_leases=in_leases)
    size = _LARGE if seed % _LARGE_EVERY == _LARGE_EVERY - 1 else None
    return _live(FleetSimulation(seed, troubles, size=size, has_ages=has_ages, in_leases=in_leases))


def _live(simulation: FleetSimulation) -> FleetRunResult:
    broken = failure_of(simulation.run)
    options = {"--fleet": True, "--no-ages": not simulation.has_ages, "--leases": simulation.in_leases}
    return FleetRunResult(
        seed=simulation.seed,
        broken=broken,
        journal=tuple(simulation.journal),
        events=len(simulation.oracle.lives),
        troubles=simulation.troubles,
        option="".join(f" {option}" for option, is_given in options.items() if is_given),
        requests=len(simulation.network.log),
        checked=simulation.oracle.checked,
    )


def _check_clocks(seed: int, troubles: frozenset[FleetTrouble] | None, *, in_leases: bool) -> FleetRunResult:
    """(9) The requests are the same whatever the clocks say, as long as no event reaches its latest begin."""
    given = given_troubles(seed, FLEET_TROUBLES) if troubles is None else troubles
    given -= {"one name"}  # one of the two waits until its latest begin
    right = FleetSimulation(seed, given - CLOCKS, is_short=True, in_leases=in_leases)
    result = _live(right)
    if result.broken:
        return result
    wrong = FleetSimulation(seed, given | CLOCKS, is_short=True, in_leases=in_leases)
    result = _live(wrong)
    result.checked[9] += 1
    logs = [[one for one in simulation.network.log if one[0] < right.stops_at] for simulation in (right, wrong)]
    apart = (pair for pair in zip(*logs, strict=False) if not _is_same(*pair))
    first = next(apart, None if len(logs[0]) == len(logs[1]) else "one has more")
    if result.broken or first is None:
        return result
    return replace(result, broken=f"(9) clocks change a request: {first}")


def _is_same(one: tuple[float, str, Sent], other: tuple[float, str, Sent]) -> bool:
    """Datetimes have whole microseconds, so that times differ by some."""
    return one[1:] == other[1:] and abs(one[0] - other[0]) < 0.001
