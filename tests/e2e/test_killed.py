"""Killed at any moment: after each restart the agent reaches the state it would have reached without."""

import random
import time
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from harness import Agent, Simulator

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("seed", "rounds"), [(20260101, 3), pytest.param(20260102, 40, marks=pytest.mark.nightly)]
)
def test_an_agent_killed_at_random_moments_approves_in_time_and_recovers_once(
    sim: Simulator, agent: Agent, seed: int, rounds: int
) -> None:
    dice = random.Random(seed)
    agent.write_policy(
        rules=[{"name": "all", "prepare": ["one", "two"], "recover": ["resume"], "approve": "when-prepared"}],
        hooks={name: agent.hook(name, seconds=0.08) for name in ("one", "two", "resume")},
    )
    agent.start()
    for number in range(rounds):
        is_canceled = dice.random() < 0.25
        event = sim.schedule("Reboot", start_delay_seconds=0.1, lasts_seconds=0.3)
        kills = []
        for _ in range(dice.choice((1, 1, 2, 3))):
            time.sleep(dice.uniform(0.0, 1.2))  # the moment is what is being tried
            began = datetime.now(UTC)
            agent.kill()
            kills.append((began, datetime.now(UTC)))
            if is_canceled and sim.event(event).status == "Scheduled":
                sim.cancel(event)
            agent.start(is_awaited=False)
        sim.wait_gone(event)
        agent.wait_until(lambda: agent.log("this VM is known") or agent.log("agent started"), "it was started")
        agent.wait_until(lambda: is_over(agent, event), f"round {number} was over")  # noqa: B023
        agent.wait_until(agent.is_ready, "it was ready again")
        assert agent.pending() == {}
        check(sim, agent, event, kills)
    assert len(agent.journal()) > rounds


def is_over(agent: Agent, event: str) -> bool:
    """Nothing is pending, and if the event was ever seen its life is at its end."""
    status, _ = agent.get("/status")
    if status != 200 or agent.status()["last_poll_at"] is None:
        return False
    kinds = [kind for kind, event_id in agent.journal("kind", "event_id") if event_id == event]
    return agent.pending() == {} and ("closed" in kinds or not kinds)


def check(sim: Simulator, agent: Agent, event: str, kills: list[tuple[datetime, datetime]]) -> None:
    """Check from outside what must hold for an event that is over."""
    starts = [note for note in agent.records("start") if note["given"]["ID"] == event]
    pids = {note["pid"] for note in starts}
    ends = [note for note in agent.records("end") if note["pid"] in pids]
    journal = [
        (datetime.fromisoformat(at), kind, hook)
        for at, kind, hook, event_id in agent.journal("at", "kind", "hook", "event_id")
        if event_id == event
    ]
    kinds = [kind for _, kind, _ in journal]
    assert kinds.count("closed") <= 1

    approvals = [request.monotonic for request in sim.approvals(event)]
    if approvals:  # the clock of Windows stands still for up to 16 ms
        assert min(times(ends, "one")) <= min(times(starts, "two"))
        assert min(times(ends, "two")) <= min(approvals)
    approved_at = [at for at, kind, _ in journal if kind == "approving"]
    assert is_each_repetition_due_to_a_kill(approved_at, kills)
    assert len(approvals) <= len(approved_at)
    assert kinds.count("approved") <= 1

    for hook in ("one", "two", "resume"):
        started_at = [at for at, kind, name in journal if (kind, name) == ("hook_started", hook)]
        assert is_each_repetition_due_to_a_kill(started_at, kills), hook
        assert len(times(starts, hook)) <= len(started_at)
        assert [(kind, name) for _, kind, name in journal].count(("hook_finished", hook)) <= 1
    if "preparing" in kinds:
        assert times(ends, "resume"), "prepared and never recovered"
    else:
        assert not times(starts, "resume"), "recovered what was never prepared"


def is_each_repetition_due_to_a_kill(done_at: list[datetime], kills: list[tuple[datetime, datetime]]) -> bool:
    """Whether nothing was done twice but what a kill had hit in between."""
    return all(
        any(first <= killed and began <= again for began, killed in kills) for first, again in pairwise(done_at)
    )


def times(notes: list[dict[str, Any]], hook: str) -> list[float]:
    return [note["monotonic"] for note in notes if note["hook"] == hook]
