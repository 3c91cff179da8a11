"""The frame of a simulation: a clock that jumps, chance by seed, a simulated Azure, and the journal of the run.

One seed makes one run, always the same one. Every kind of trouble draws from a chance of its own, so that it can
be left out without changing the others. Nothing waits: the clock jumps to the time of the next callback.
"""

import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Generic, TypeVar

from oracle import BrokenError

from scheduled_events_agent.simulator.azure import Azure, LogEntry

Trouble = TypeVar("Trouble", bound=str)

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
_MAX_AT_A_TIME = 10_000
"""Callbacks at one moment. More of them go in a circle."""


class Schedule:
    """Callbacks and when they are due, on a clock that jumps from one to the next."""

    def __init__(self) -> None:
        self.at = 0.0
        """Seconds since the start."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call it in so many seconds."""
        self.do_at(self.at + seconds, callback)

    def do_at(self, at: float, callback: Callable[[], None]) -> None:
        """Call it at this time."""
        heapq.heappush(self._queue, (at, next(self._order), callback))

    @property
    def next_at(self) -> float:
        """When the next callback is due; infinite if there is none."""
        return self._queue[0][0] if self._queue else inf

    def jump(self) -> Callable[[], None]:
        """Set the clock to the time of the next callback, and return it."""
        at, _, callback = heapq.heappop(self._queue)
        self.at = max(self.at, at)
        return callback


def given_troubles(seed: int, all_troubles: Sequence[Trouble]) -> frozenset[Trouble]:
    """The troubles that chance gives to the seed."""
    return frozenset(one for one in all_troubles if random.Random(f"{seed}/has {one}").random() < 0.3)


class Simulation(Schedule, ABC, Generic[Trouble]):
    """One run. ``journal`` says what happened, a line for each thing."""

    BUSY_SECONDS: float
    """Trouble ends here."""
    MAX_SECONDS: float
    """Until then nothing may be left to happen."""

    def __init__(
        self, seed: int, all_troubles: Sequence[Trouble], troubles: frozenset[Trouble] | None, azure: Azure
    ) -> None:
        """``troubles``: exactly these; by default, what chance gives to the seed."""
        super().__init__()
        self.seed = seed
        self.journal: list[str] = []
        self.stops_at = inf
        """The run ends here, without the checks of its end."""
        self._chances: dict[str, random.Random] = {}
        self.troubles = given_troubles(seed, all_troubles) if troubles is None else troubles
        self._azure = azure
        self._azure_seen = 0

    # --- chance and time

    def chance(self, what: str) -> random.Random:
        """The chance that decides on this, and on nothing else."""
        if what not in self._chances:
            self._chances[what] = random.Random(f"{self.seed}/{what}")
        return self._chances[what]

    def has(self, trouble: Trouble) -> bool:
        """Whether there is this trouble, now."""
        return trouble in self.troubles and self.at < self.BUSY_SECONDS

    def epoch(self) -> float:
        """The true time, in seconds since 1970."""
        return START.timestamp() + self.at

    def log(self, text: str) -> None:
        """Add a line to the journal."""
        self.journal.append(f"{self.at:9.2f}  {text}")

    # --- the run

    def run(self) -> None:
        """Live it. Raises BrokenError, also for whatever the agent raises."""
        try:
            self._prepare()
            at_once = 0
            while self.next_at <= self.stops_at and self.next_at < inf:
                at_once = at_once + 1 if self.next_at <= self.at else 0
                if self.next_at > self.MAX_SECONDS or at_once > _MAX_AT_A_TIME:
                    raise BrokenError("(9) the simulation does not come to rest")
                self.call_next()
            if self.next_at == inf:
                self._finish()
        except BrokenError:
            raise
        except Exception as error:
            raise BrokenError(f"the agent raises {type(error).__name__}: {error}") from error
        finally:
            self._close()

    def call_next(self) -> None:
        """Jump to the next callback and call it; then Azure does what is due."""
        self._call(self.jump())
        self._watch_azure()

    def _call(self, callback: Callable[[], None]) -> None:
        callback()

    @abstractmethod
    def _prepare(self) -> None:
        """Plan what happens by itself."""

    @abstractmethod
    def _finish(self) -> None:
        """Check what must hold when nothing more happens."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what the run has opened."""

    # --- Azure

    def name_of(self, event_id: str) -> str:
        """The first id that the event had: Azure may rename it."""
        return self._azure.event(event_id).ids[0]

    def _watch_azure(self) -> None:
        self._azure.advance(self.epoch())
        new = self._azure.history[self._azure_seen :]
        if not new:
            return
        self._azure_seen += len(new)
        for entry in new:
            self._on_azure(entry)
        self._poll_soon()
        if self._azure.next_due < inf:
            self.after(max(0.0, self._azure.next_due - self.epoch()) + 1e-6, lambda: None)

    @abstractmethod
    def _on_azure(self, entry: LogEntry) -> None:
        """Do to the VMs what Azure's action brings about, and log it."""

    @abstractmethod
    def _poll_soon(self) -> None:
        """Have every agent poll within a second."""
