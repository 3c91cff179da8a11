"""The fleet's backend in Leases does what the one in memory does, step by step and in the whole fleet.

The backend is the real one; the API server is the stand-in, without sockets. A few steps and lives here;
``python tests/simulation --fleet --leases`` lives thousands.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest
from fleet_runs import run_fleet_seed
from fleet_simulation import FleetTrouble
from lease_store import LeaseStore
from memory_backend import MemoryStore

from scheduled_events_agent.kubernetes import leases

_KEYS = [f"{event}|vm_{number}" for event in "ab" for number in range(4)]
_UNKNOWN = ("etag-0", "9d7a231c-345a-4a1a-82c8-a116945e7604 1")
_CREATE = ("", "")

Etags = tuple[str, str]
"""Of one write: in memory, and of the Lease."""


class Lockstep:
    """Takes the same random steps with both stores, and compares what they answer."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._at = 1000.0
        self._memory = MemoryStore(lambda: self._at)
        self._leases = LeaseStore(lambda: self._at)
        self._known: defaultdict[str, list[Etags]] = defaultdict(list)
        """By key, the ETags of all writes that were answered, the last one at the end."""
        self._late: list[Callable[[], None]] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        """How often each kind of step had each outcome."""

    def step(self) -> None:
        """One step, and then a list."""
        self._at += self._random.choice((0.0, 0.001, 0.4, 1.0, 7.3, 100.0))
        if self._late and self._random.random() < 0.15:
            self._late.pop(self._random.randrange(len(self._late)))()
        else:
            self._write()
        self._compare_lists()

    def _write(self) -> None:
        """A new write; some arrive late, and some twice."""
        key = self._random.choice(_KEYS)
        etags = self._some_etags(key)
        fields = {"vm": key.partition("|")[2], "state": self._random.choice(("requested", "ready"))}
        if self._random.random() < 0.35 and etags != _CREATE:
            write = partial(self._delete, key, etags)
        else:
            write = partial(self._put, key, fields, etags)
        if self._random.random() < 0.2:
            self._late.append(write)
        if self._random.random() < 0.9:
            write()

    def _some_etags(self, key: str) -> Etags:
        known = self._known[key]
        chance = self._random.random()
        if not known or chance < 0.25:
            return _CREATE
        if chance < 0.75:
            return known[-1]
        if chance < 0.9:
            return self._random.choice(known)
        others = [etags for other in _KEYS if other != key for etags in self._known[other]]
        return self._random.choice([_UNKNOWN, *others])

    def _put(self, key: str, fields: dict[str, str], etags: Etags) -> None:
        in_memory = self._memory.put(key, fields, etags[0])
        as_lease = self._leases.put(key, fields, etags[1])
        what = "update" if etags[0] else "create"
        assert (in_memory is None) == (as_lease is None), f"{what} {key} {etags}: {in_memory}, {as_lease}"
        outcome = "denied" if in_memory is None else "done"
        self.counts[f"{what} {outcome}"] += 1
        if in_memory is not None and as_lease is not None:
            self._known[key].append((in_memory, as_lease))

    def _delete(self, key: str, etags: Etags) -> None:
        was_there = any(record.key == key for record in self._memory.list())
        in_memory = self._memory.delete(key, etags[0])
        as_lease = self._leases.delete(key, etags[1])
        assert in_memory == as_lease, f"delete {key} {etags}: {in_memory}, {as_lease}"
        if not was_there:
            self.counts["delete gone"] += 1
        else:
            self.counts["delete done" if in_memory else "delete denied"] += 1

    def _compare_lists(self) -> None:
        in_memory = {record.key: record for record in self._memory.list()}
        as_leases = {record.key: record for record in self._leases.list()}
        assert in_memory.keys() == as_leases.keys()
        for key, record in in_memory.items():
            lease = as_leases[key]
            assert lease.fields == record.fields
            assert (record.etag, lease.etag) == self._known[key][-1]
            assert lease.age is not None
            assert record.age is not None
            assert lease.age == int(lease.age)
            assert record.age <= lease.age < record.age + 1.0  # the time of its write has whole seconds too
        self.counts["listed"] += len(in_memory)


def walked(seed: int, steps: int) -> Lockstep:
    walk = Lockstep(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "_LEASES_PER_PAGE", 3)
        for _ in range(steps):
            walk.step()
    return walk


def check_walk(walk: Lockstep, least: int) -> None:
    """Each kind of step was taken so often, with each outcome that it can have."""
    outcomes = [f"{what} {outcome}" for what in ("create", "update", "delete") for outcome in ("done", "denied")]
    assert {name: walk.counts[name] for name in (*outcomes, "delete gone") if walk.counts[name] < least} == {}


def test_leases_answer_as_memory_does() -> None:
    check_walk(walked(1, 800), 5)


@pytest.mark.nightly
def test_leases_answer_as_memory_does_for_ten_thousand_steps() -> None:
    check_walk(walked(2, 10_000), 100)


def _without_uid(etag: str) -> dict[str, str]:
    return {"resourceVersion": etag.partition(" ")[2]}


def _without_version(etag: str) -> dict[str, str]:
    return {"uid": etag.partition(" ")[0]}


@pytest.mark.parametrize("preconditions", [_without_uid, _without_version], ids=["version only", "uid only"])
def test_half_an_etag_is_found_out(
    preconditions: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_preconditions", preconditions)
    with pytest.raises(AssertionError, match=r"update|delete"):
        walked(1, 800)


def test_a_fleet_in_leases_keeps_its_rules() -> None:
    for seed in range(4):
        result = run_fleet_seed(seed, in_leases=True)
        assert not result.broken, result.text()


@pytest.mark.nightly
def test_a_fleet_in_leases_keeps_its_rules_with_the_seeds_of_one_in_memory() -> None:
    for seed in range(25):
        result = run_fleet_seed(seed, in_leases=True)
        assert not result.broken, result.text()
    for seed in range(10):
        result = run_fleet_seed(seed, has_ages=False, in_leases=True)
        assert not result.broken, result.text()


def test_the_oracle_finds_writes_without_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LeaseStore.put

    def put_always(self: LeaseStore, key: str, fields: dict[str, str], etag: str) -> str | None:
        del etag
        current = {record.key: record.etag for record in self.list()}
        return real(self, key, fields, current.get(key, ""))

    monkeypatch.setattr(LeaseStore, "put", put_always)
    troubles = frozenset[FleetTrouble]({"late", "doubled", "holds", "reboots"})
    results = (run_fleet_seed(seed, troubles, in_leases=True) for seed in range(282, 582))
    assert any(result.broken for result in results)
