"""Fleets of whole engines that share one store, lived through and judged from the outside.

A few lives here; ``python tests/simulation --fleet`` lives thousands. Each bug that the protocol is there to
prevent is planted once, and must be found.
"""

from fleet_runs import judge_fleet_seed


def test_a_seed_of_a_fleet_has_one_story() -> None:
    one = judge_fleet_seed(11)
    assert one == judge_fleet_seed(11)
    assert len(one.story) > 20


def test_a_fleet_without_trouble_keeps_its_rules() -> None:
    for seed in range(5):
        verdict = judge_fleet_seed(seed, frozenset())
        assert not verdict.broken, verdict.text()
