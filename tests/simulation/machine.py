"""A simulated machine, as the engine and its executor see it. Hooks take no time but that of the simulation."""

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from math import inf

from msgspec.structs import replace
from simulation import START, Schedule

from scheduled_events_agent.engine import Engine, HookCommand, HookDone, HookKey, Host, hook_key, not_run_result
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.workflow import Approve, HookOutcome, RunHook

# The longest time that a run in the way of an eviction may take to end, and a little more.
_URGENT_SECONDS = 1.5


class Machine(Host, ABC):
    """One machine with its agent. What the agent does arrives here."""

    engine: Engine | None = None
    """None while the agent does not run."""
    life = 0
    """How often the agent has been started, or has ended."""
    boot = 0
    wall_offset = 0.0
    """How wrong the wall clock is, in seconds."""

    @property
    @abstractmethod
    def schedule(self) -> Schedule: ...

    def now(self) -> datetime:
        return START + timedelta(seconds=self.schedule.at + self.wall_offset)

    def monotonic(self) -> float:
        return 1000.0 + self.schedule.at

    def boot_id(self) -> str:
        return f"boot {self.boot}"

    @abstractmethod
    def chance(self, what: str) -> random.Random:
        """The chance that decides on this on this machine."""

    @abstractmethod
    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call it in so many seconds."""

    @abstractmethod
    def hook_course(self, effect: HookCommand) -> tuple[HookOutcome, float]:
        """How the hook will end, and after how many seconds, unless its time is up before."""

    @abstractmethod
    def hook_starts(self, effect: HookCommand, environment: dict[str, str]) -> None:
        """The hook starts, or waits for another run of it."""

    def hook_begins(self, effect: HookCommand) -> None:
        """The program of the hook is started."""

    def hook_waits(self, effect: HookCommand, behind: RunHook) -> None:
        """The hook has waited for a second for its turn, although the other run was to end at once."""

    def hook_is_told_to_end(self, effect: HookCommand) -> None: ...

    @abstractmethod
    def hook_ends(self, effect: HookCommand, outcome: HookOutcome) -> None: ...

    @abstractmethod
    def post(self, approvals: Sequence[Approve]) -> None:
        """Send a request to approve."""

    @abstractmethod
    def give(self, life: int, item: HookDone) -> None:
        """Put it into the inbox of the agent of this life."""


class SimulatedExecutor:
    """The engine's executor: hooks that take the time and end the way that chance gives them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._life = machine.life
        self._runs: dict[HookKey, HookCommand] = {}
        self._unanswered: set[str] = set()
        self._live: set[HookKey] = set()
        self._numbers: dict[HookKey, int] = {}
        self._count = itertools.count()
        self._once: dict[str, HookKey] = {}
        """By the hook's name: the run that goes on, of those that must not overlap."""
        self._waiting: dict[HookKey, Callable[[], None]] = {}
        """What begins the runs that wait for their turn."""
        self._begun: set[HookKey] = set()
        """Runs whose program was started."""
        self._patient: set[HookKey] = set()
        """Runs that were asked to end, and may take their time."""

    def start_hook(
        self,
        effect: HookCommand,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        del stdin, event_id
        key = hook_key(effect)
        self._machine.hook_starts(effect, environment)
        self._runs[key] = effect
        self._live.add(key)
        number = self._numbers[key] = next(self._count)
        assert hook is not None
        begin = partial(self._begin, effect, hook, number, deadline)
        if hook.serialize and effect.hook in self._once:
            self._waiting[key] = begin
            self._machine.after(_URGENT_SECONDS, lambda: self._expect_turn(effect, number))
            return
        if hook.serialize:
            self._once[effect.hook] = key
        begin()

    def _expect_turn(self, effect: HookCommand, number: int) -> None:
        """A second after it has begun to wait."""
        key = hook_key(effect)
        if self._numbers[key] != number or key not in self._waiting or self._life != self._machine.life:
            return
        if effect.hook in self._once:
            first = self._once[effect.hook]
            behind = self._runs[first]
            if first not in self._patient and isinstance(behind, RunHook):
                self._machine.hook_waits(effect, behind)

    def _take_turns(self, name: str) -> None:
        """The run that went on has ended: the most urgent one of those that wait begins."""
        self._once.pop(name, None)
        waiting = [key for key in self._waiting if self._runs[key].hook == name]
        if waiting:
            key = self._once[name] = min(waiting, key=lambda key: self._runs[key].rank)
            self._waiting.pop(key)()

    def _begin(self, effect: HookCommand, hook: Hook, number: int, deadline: float | None) -> None:
        key = hook_key(effect)
        left = inf if deadline is None else deadline - self._machine.monotonic()
        if left <= 0.0:
            self._machine.after(0.0, lambda: self._end(key, number, "not_started"))
            return
        self._begun.add(key)
        self._machine.hook_begins(effect)
        outcome, seconds = self._machine.hook_course(effect)
        limit = min(hook.timeout, left)
        if outcome == "timed_out" or seconds > limit:
            outcome, seconds = "timed_out", limit
        self._machine.after(seconds, lambda: self._end(key, number, outcome))

    def cancel_hook(self, key: HookKey, *, is_urgent: bool = False) -> None:
        grace_seconds = 1.0 if is_urgent else 5.0
        if key in self._live:
            self._machine.hook_is_told_to_end(self._runs[key])
            if key in self._waiting:
                number = self._numbers[key]
                self._machine.after(0.0, lambda: self._end(key, number, "canceled"))
                return
            if is_urgent:
                self._patient.discard(key)
            else:
                self._patient.add(key)
            chance, number = self._machine.chance("cancel"), self._numbers[key]
            # It may have been about to end anyway.
            outcome: HookOutcome = "succeeded" if chance.random() < 0.2 else "canceled"
            seconds = min(grace_seconds, chance.choice((0.0, 1.0, 5.0)))
            self._machine.after(seconds, lambda: self._end(key, number, outcome))

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        if key in self._live and deadline is not None:
            number = self._numbers[key]
            left = max(0.0, deadline - self._machine.monotonic())
            self._machine.after(left, lambda: self._end(key, number, "timed_out"))

    def is_running(self, key: HookKey) -> bool:
        return key in self._runs

    def hook_received(self, effect: HookCommand) -> None:
        self._runs.pop(hook_key(effect), None)

    def report(self, message: HookDone) -> None:
        self._machine.give(self._life, message)

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        del incarnation
        self._unanswered |= {approve.workflow_id for approve in approvals}
        self._machine.post(approvals)

    def notify(self, *, is_urgent: bool) -> None:
        """Nothing: the machine has no targets."""

    def approval_received(self, workflow_id: str) -> None:
        self._unanswered.discard(workflow_id)

    def is_busy(self) -> bool:
        return bool(self._runs or self._unanswered)

    def cancel_all(self, grace_seconds: float) -> None:
        del grace_seconds
        for key in sorted(self._live):
            self.cancel_hook(key)

    def end_all(self, chance: random.Random) -> None:
        """The machine goes down and ends what runs."""
        for key in sorted(self._live):
            number = self._numbers[key]
            if chance.random() < 0.5:
                self._machine.after(0.0, lambda key=key, number=number: self._end(key, number, "failed"))  # type: ignore[misc]

    def close(self) -> None:
        """All of them are ended with the agent."""
        self._live.clear()
        self._waiting.clear()

    def _end(self, key: HookKey, number: int, outcome: HookOutcome) -> None:
        if key not in self._live or self._numbers[key] != number or self._life != self._machine.life:
            return
        self._live.discard(key)
        self._patient.discard(key)
        self._waiting.pop(key, None)
        has_run = key in self._begun
        self._begun.discard(key)
        if outcome == "timed_out" and not has_run:
            outcome = "not_started"
        effect = self._runs[key]
        if self._once.get(effect.hook) == key:
            self._take_turns(effect.hook)
        self._machine.hook_ends(effect, outcome)
        result = replace(not_run_result(effect.hook, outcome, outcome), has_run=has_run)
        self._machine.give(self._life, HookDone(effect, result))
