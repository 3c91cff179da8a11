"""One event under load, in three ways: nothing is done about it, a naive hook stops the service, the agent acts.

A ``Recipe`` is one such run of a set-up. The frame owns the order in which things happen, endpoint and agent; the
recipe owns the service, its load, and what an event does to the machine.
"""

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("system", "e2e", "fixtures", ".."))

from harness import PATIENCE, Agent, Simulator

from scheduled_events_agent.simulator.azure import EventType

Way = Literal["nothing", "naive stop hook", "agent"]
WAYS: tuple[Way, ...] = get_args(Way)
CALM_SECONDS = 5.0
"""How long the load runs before the event is announced, and after everything is as it was."""

UNREAD_NOTICE_SECONDS = 5.0
"""How long before the event it is announced in the run without the recipe, where no hook uses that time."""


@dataclass(frozen=True)
class Outcome:
    """The result of the load: how many of all its requests (or jobs) failed.

    ``outage_seconds``: the longest time without a success. ``lost``: what had succeeded, and was gone afterwards.
    """

    failed: int
    total: int
    outage_seconds: float | None = None
    lost: int | None = None


class Recipe(ABC):
    """One run, in one way. The methods are called once each, in the order in which they stand here."""

    title: ClassVar[str]
    page: ClassVar[str]
    """With the table of all recipes of a file; from the root of the checkout."""
    case: ClassVar[str] = ""
    """What is at the head of its rows in the table, if the page has several recipes."""
    load: ClassVar[str]
    """In words."""
    columns: ClassVar[tuple[str, ...]] = ("requests failed",)
    """The heads for ``failed``, then for ``outage_seconds`` and ``lost`` if the outcome has them.

    They are the same for all recipes of a page.
    """
    event: ClassVar[EventType] = "Reboot"
    notice_seconds: ClassVar[float] = 60.0
    down_seconds: ClassVar[float] = 10.0
    counts_notice: ClassVar[bool] = False
    """Whether the outcome grows with the time until the event, so that this has to be the same in each way."""
    is_awaited: ClassVar[bool] = False
    """Whether the host waits for other VMs, so that the event starts at NotBefore in spite of the approval."""

    def __init__(self, place: Path, way: Way) -> None:
        self.place = place
        self.way = way
        self.ends = contextlib.ExitStack()
        """What ``close`` ends, the latest first; a recipe adds each thing as it starts it."""

    @abstractmethod
    def start(self) -> None:
        """Install what is missing, and start the service."""

    @abstractmethod
    def versions(self) -> str:
        """Versions of the programs that run."""

    @abstractmethod
    def write_policy(self, agent: Agent) -> None:
        """Write the shipped policy for this set-up; in the agent's way only."""

    @abstractmethod
    def start_load(self) -> None:
        """Start the load, and wait until the service answers it."""

    @abstractmethod
    def stop_service(self) -> None:
        """Stop the service as a naive hook does as soon as it sees the event."""

    @abstractmethod
    def go_down(self) -> None:
        """Do to the machine what the event does: a power cut, or a pause if it is a Freeze."""

    @abstractmethod
    def come_back(self) -> None:
        """Start what starts with the machine (with the one that replaces it, if it was evicted)."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the service is as it was before, or for as long as is fair."""

    @abstractmethod
    def finish(self) -> Outcome:
        """End the load, and count."""

    def close(self) -> None:
        """End everything that runs, however far the run came."""
        self.ends.close()


def run(recipe: Recipe) -> tuple[str, Outcome]:
    """Run it to its end; returns the versions of the programs, and what the load saw."""
    with contextlib.ExitStack() as stack:
        sim = stack.enter_context(Simulator(vms=("vm-1",), rate_limit=None))
        stack.callback(recipe.close)
        agent = Agent(recipe.place / "agent", sim.endpoint())
        stack.callback(agent.close)
        recipe.start()
        if recipe.way == "agent":
            recipe.write_policy(agent)
            agent.start()
        recipe.start_load()
        time.sleep(CALM_SECONDS)
        _have_event(recipe, sim, agent)
        recipe.settle()
        time.sleep(CALM_SECONDS)
        return recipe.versions(), recipe.finish()


def _have_event(recipe: Recipe, sim: Simulator, agent: Agent) -> None:
    """Announce the event, let it happen, and end it; the agent goes down and comes back with its machine."""
    is_read = recipe.way != "nothing" or recipe.counts_notice
    event = sim.schedule(
        recipe.event,
        notice_seconds=recipe.notice_seconds if is_read else UNREAD_NOTICE_SECONDS,
        lasts_seconds=None,
        starts_when_approved=not recipe.is_awaited,
    )
    if recipe.way == "naive stop hook":
        recipe.stop_service()
        sim.approve(event)
    sim.wait_started(event, recipe.notice_seconds + PATIENCE)
    is_agents = recipe.way == "agent"
    is_frozen = recipe.event == "Freeze"
    if is_agents and is_frozen:
        agent.freeze()
    elif is_agents:
        agent.kill()
    recipe.go_down()
    time.sleep(recipe.down_seconds)
    recipe.come_back()
    is_back = is_agents and recipe.event not in ("Preempt", "Terminate")  # of those, the VM is gone for good
    if is_back and is_frozen:
        agent.thaw()
    elif is_back:
        agent.forget_boot()
        agent.start()
    sim.end(event)
    if is_back:
        agent.wait_log("closed", timeout=PATIENCE + recipe.notice_seconds, event_id=event)


def table(columns: tuple[str, ...], cases: Mapping[str, Mapping[Way, Outcome]]) -> str:
    """For a page, in Markdown: a row for each way of each case. A single case is not named."""
    heads = ["", *columns]
    if len(cases) > 1:
        heads.insert(0, "")
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for case, outcomes in cases.items():
        for number, (way, outcome) in enumerate(outcomes.items()):
            cells = [way, f"{outcome.failed:,} of {outcome.total:,}"]
            if outcome.outage_seconds is not None:
                cells.append(f"{outcome.outage_seconds:.1f} s")
            if outcome.lost is not None:
                cells.append(f"{outcome.lost:,}")
            if len(cases) > 1:
                cells.insert(0, case if number == 0 else "")
            lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
