"""The agent under other circumstances than those of the end-to-end tests, whose harness is found through here.

So a test module imports from here first. Its fixtures are in stage.py.
"""

import http.client
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from harness import PATIENCE, Agent, Simulator

__all__ = [
    "AT_ONCE",
    "DRAIN",
    "PATIENCE",
    "FaultyAgent",
    "MakeAgent",
    "Simulator",
    "longest_gap_seconds",
    "needs_root",
    "see_through",
]

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


class FaultyAgent(Agent):
    """The agent, with a way to start it under other circumstances."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        super().__init__(directory, endpoint)
        self.prefix: list[str] = []
        """A program and its arguments that sets the stage and then becomes the command itself."""
        self.program = [sys.executable, "-m", "scheduled_events_agent"]
        """What ``run`` is run by."""
        self.address = ""
        """Where its pages are, if its log cannot tell."""

    def command(self, *arguments: str) -> list[str]:
        program = self.program if arguments[:1] == ("run",) else [sys.executable, "-m", "scheduled_events_agent"]
        return [*self.prefix, *program, *arguments]

    def log(self, message: str, **fields: Any) -> list[dict[str, Any]]:
        if self.address and message == "agent started":
            return [{"listen": self.address}]
        return super().log(message, **fields)

    def get(self, path: str, method: str = "GET", timeout: float = PATIENCE) -> tuple[int, str]:
        """As the harness has it; an answer that is cut off with the process is none."""
        try:
            return super().get(path, method, timeout)
        except http.client.HTTPException:
            return 0, ""

    def why_not(self) -> list[str]:
        """Why the process that was started last could not run, as its log says."""
        return [line["reason"] for line in self.log("the agent cannot run", level="error")]

    def is_alive(self) -> bool:
        """Whether the process that was started last still runs."""
        return self._process is not None and self._process.poll() is None


MakeAgent = Callable[..., FaultyAgent]


def see_through(sim: Simulator, agent: FaultyAgent, event: str) -> None:
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
