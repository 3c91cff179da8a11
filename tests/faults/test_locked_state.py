"""Another process holds the write lock of the state file, at each kind of commit and for different times.

Each notification arrives, in its order, and the hook that waits for the commit begins soon after the lock.
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, get_args

import pytest
from harness import Agent, MakeAgent, Simulator
from receiver import Receiver

pytestmark = pytest.mark.timeout(900)

RULE = {"name": "all", "prepare": ["drain", "check"], "recover": ["resume"], "approve": "when-prepared"}
Commit = Literal["seen", "hook finished", "approving", "approved", "started", "gone", "closed"]
WHATS = ["seen", "preparing", "prepared", "approved", "started", "recovered"]
# Lives at a time: they mostly wait.
AT_A_TIME = 4
# From the end of the lock to the first line of the hook that waited: mostly, and on a machine with other work.
BEGINS_WITHIN_SECONDS = (2.0, 10.0)


@dataclass
class Life:
    """The life of an event, with a lock at one kind of commit."""

    sim: Simulator
    agent: Agent
    locked_at: Commit
    seconds: float
    unlocked: float = field(default=0.0, init=False)
    """When the lock ended, monotonic."""

    @contextlib.contextmanager
    def lock(self, commit: Commit) -> Iterator[None]:
        """Have the lock from before what leads to this commit until some time after it."""
        if commit != self.locked_at:
            yield
            return
        path = self.agent.state_dir / "state.db"
        with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            time.sleep(self.seconds)
            other.execute("ROLLBACK")
            self.unlocked = time.monotonic()

    def live(self) -> float | None:
        """To the end; returns how long after the lock the hook began that had to wait for it, None if none did."""
        sim, agent = self.sim, self.agent
        agent.start()
        with self.lock("seen"):
            event = sim.schedule("Reboot", start_delay_seconds=600, lasts_seconds=None)
        drain = agent.wait_hook("drain", "start")
        with self.lock("hook finished"):
            agent.let_go("drained")
        check = agent.wait_hook("check", "start")
        if self.locked_at == "approved":
            sim.fault(None, "slow", on="approve", delay_seconds=3.0)
        with self.lock("approving"):
            agent.let_go("checked")
        agent.wait_log("approving", event_id=event)
        with self.lock("approved"):
            sim.wait_approved(event)
            sim.wait_until(lambda: sim.approvals(event), "the approval was answered")
        agent.wait_log("approved", event_id=event)
        with self.lock("started"):
            sim.start_event(event)
        agent.wait_log("started", event_id=event)
        with self.lock("gone"):
            sim.end(event)
        resume = agent.wait_hook("resume", "start")
        with self.lock("closed"):
            agent.let_go("resumed")
        agent.wait_log("closed", event_id=event)
        began = {"seen": drain, "hook finished": check, "gone": resume}.get(self.locked_at)
        return began["monotonic"] - self.unlocked if began else None


def try_lock(make_agent: MakeAgent, commit: Commit, seconds: float) -> tuple[float | None, bool]:
    """Live such a life. Returns how late a hook began, and whether a commit has failed."""
    where = f"locked for {seconds} s at {commit}"
    with Simulator(vms=("vm-1",), rate_limit=None) as sim, Receiver() as receiver:
        agent = make_agent(sim.endpoint(), where.replace(" ", "-"))
        hooks = {
            "drain": agent.hook("drain", until="drained"),
            "check": agent.hook("check", until="checked"),
            "resume": agent.hook("resume", until="resumed"),
        }
        target = {"name": "ops", "to": receiver.url, "on": WHATS}
        agent.write_policy(rules=[RULE], hooks=hooks, notify=[target])
        late = Life(sim, agent, commit, seconds).live()

        def taken() -> list[str]:
            return list({body["id"]: body["data"]["kind"] for body in receiver.taken}.values())

        agent.wait_until(lambda: len(taken()) >= len(WHATS), f"all notifications had arrived, {where}")
        assert taken() == WHATS, where
        assert agent.metric("notifications_dropped_total") == 0, where
        assert agent.ran() == ["drain", "check", "resume"], where
        assert len(sim.approvals()) == 1, where
        has_failed = agent.metric("store_errors_total", kind="locked") > 0
        agent.kill()
        return late, has_failed


@pytest.mark.parametrize(
    "lengths",
    [[3.5], pytest.param([0.5 * number for number in range(1, 13)], marks=pytest.mark.nightly)],
    ids=["one-length", "all-lengths"],
)
def test_a_lock_loses_no_notification_and_delays_no_hook(make_agent: MakeAgent, lengths: list[float]) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        lives = [
            pool.submit(try_lock, make_agent, commit, seconds)
            for seconds in lengths
            for commit in get_args(Commit)
        ]
        results = [life.result() for life in lives]
    late = sorted(seconds for seconds, _ in results if seconds is not None)
    assert late[len(late) // 2] < BEGINS_WITHIN_SECONDS[0], late
    assert late[-1] < BEGINS_WITHIN_SECONDS[1], late
    # A commit waits two seconds for the lock; so the longer ones were met.
    assert sum(has_failed for _, has_failed in results) >= len(results) / 2
