"""What tests of the agent under other circumstances than those of the end-to-end tests have in common."""

import os
import sys
from itertools import pairwise
from typing import Any

import pytest
from harness import Agent, Simulator

AT_ONCE: dict[str, Any] = {"name": "at-once", "approve": "immediately"}
DRAIN: dict[str, Any] = {
    "name": "drain",
    "prepare": ["drain"],
    "recover": ["resume"],
    "approve": "when-prepared",
}
needs_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="only root on Linux can do this to a process"
)


def see_through(sim: Simulator, agent: Agent, event: str) -> None:
    """From the approval of an event to its end, and to that of the agent's work on it."""
    sim.wait_approved(event)
    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)


def longest_gap_seconds(sim: Simulator, since: float = 0.0) -> float:
    """The longest time between two polls (after ``since``, on the monotonic clock)."""
    polls = [one for one in sim.requests() if one.method == "GET" and "scheduledevents" in one.path]
    times = [one.monotonic for one in polls if one.monotonic >= since]
    return max(later - earlier for earlier, later in pairwise(times))
