"""A VM of a simulated fleet: the real engine on a store in memory, and the real protocol on the world's ledger.

Simulated are its threads, hooks, the network and the process, which may be killed between any two requests and
any two transactions.
"""

import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import world as alone
from fleet_strands import KilledError, Strand
from judge import BrokenError
from msgspec.structs import replace

from scheduled_events_agent.engine import Engine, FleetTold, HookStart, Machine, key_of
from scheduled_events_agent.events import parse_document
from scheduled_events_agent.fleet.ledger import LedgerError, Row
from scheduled_events_agent.fleet.protocol import Fleet
from scheduled_events_agent.imds import Identity
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.store import Store, file
from scheduled_events_agent.workflow import ApprovalAnswered, Approve, HookOutcome, RunHook, Wish

if TYPE_CHECKING:
    from fleet_world import FleetWorld

T = TypeVar("T")
_VERSION = "2020-07-01"
_POLL_SECONDS = 1.0
_MOST_PAST_WAKES = 100
_EMPTY = b'{"DocumentIncarnation":0,"Events":[]}'
_MAX_WAIT_SECONDS = 60.0
_LOOKS_WITHIN = 150.0
"""So soon a VM that missed a gap learns of it from the ledger."""


class Vm(Machine):
    """One VM. ``engine`` is None while its agent does not run."""

    def __init__(self, world: "FleetWorld", name: str) -> None:
        self.world, self.name = world, name
        self.is_dead = False
        self.disturbed_at = 0.0
        """When something last went wrong for it, other than with its hooks."""
        self.failed_at = -1e9
        """When a request of it last failed."""
        self.documents: dict[str, tuple[str, ...]] = {}
        """Resources of the events, as it has last read them."""
        self._polls_again_at = 0.0
        self.seen_at: dict[str, float] = {}
        """Since when it knows of an event."""
        self.life = 0
        self.engine: Engine | None = None
        self.executor = Hooks(cast("alone.World", self))
        self._strand = Strand()
        self._names: dict[str, str] = {}
        """Workflow id -> event."""
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        file._migrate(self._connection, 0)

    # --- the machine

    def now(self) -> datetime:
        return alone.START + timedelta(seconds=self.world.at)

    def monotonic(self) -> float:
        return 1000.0 + self.world.at

    def boot_id(self) -> str:
        return "boot 0"

    def is_shutting_down(self) -> bool:
        return False

    def chance(self, what: str) -> random.Random:
        return self.world.chance(f"{self.name}: {what}")

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do it then, if the agent lives so long."""
        life = self.life
        self.world.after(seconds, lambda: what() if life == self.life and self.engine is not None else None)

    # --- the agent's life

    def start(self) -> None:
        """Nothing of the fleet is stored: it comes from the ledger again."""
        if self.is_dead or self.engine is not None:
            return
        self._mail: list[Any] = [Identity(name=self.name, vm_id=self.name, group="web")]
        self._body, self._was_empty = b"", False
        self._read_at: datetime | None = None
        self._wishes: tuple[Wish, ...] | None = None
        self._fleet: Fleet | None = None
        self._has_news = False
        self._told: FleetTold | None = None
        self._turn_at = self._poll_at = self._visit_at = -1.0
        self._past_wakes = 0
        store = CrashingStore(self._connection, Path(self.name))
        store.vm = self
        self.executor = Hooks(cast("alone.World", self))
        try:
            self.engine = Engine(
                self.world.settings, store, self.world.metrics, self.executor, self, wish=self._take_wishes
            )
            self.engine.start()
        except KilledError:
            self.crash("while it started")
            return
        self.poll_soon()

    def crash(self, how: str = "", *, may_restart: bool = True) -> None:
        """Kill -9."""
        self.world.tell(f"{self.name}: its agent is killed {how}".rstrip())
        self.disturbed_at = self.world.at
        self.executor.close()
        self.life += 1
        self.engine = None
        if self._strand.is_busy:
            self._strand.resume(KilledError())
        self.world.judge.killed(self)
        if may_restart and not self.is_dead:
            self.world.after(self.chance("restart").choice((0.1, 5.0, 40.0)), self._restart)

    def _restart(self) -> None:
        if not self.is_dead and self.engine is None:
            self.world.tell(f"{self.name}: its agent starts")
            self.disturbed_at = self.world.at
            self.start()

    def kill(self) -> None:
        if self.engine is not None:
            self.crash()

    def die(self) -> None:
        """The VM is gone for good."""
        if self.is_dead:
            return
        self.is_dead = True
        self.world.tell(f"{self.name} dies")
        self.crash("with its VM")
        self.world.judge.died(self)

    def end(self) -> None:
        """The world ends."""
        self._strand.end()
        self._connection.close()

    # --- documents and turns

    def poll_soon(self) -> None:
        at = self.world.at + self.chance("polls").uniform(0.0, _POLL_SECONDS)
        if self.engine is not None and (self._poll_at < self.world.at or at < self._poll_at):
            self._poll_at = at
            self.after(at - self.world.at, lambda: self._poll() if at == self._poll_at else None)

    def miss_polls(self, seconds: float) -> None:
        """What is in the document meanwhile it does not see."""
        self._polls_again_at = self.world.at + seconds
        self.disturbed_at = max(self.disturbed_at, self._polls_again_at + _LOOKS_WITHIN)

    def _poll(self) -> None:
        assert self.engine is not None
        world, self._poll_at = self.world, -1.0
        if world.at < self._polls_again_at:
            self.after(self._polls_again_at - world.at, self.poll_soon)
            return
        body = world.document()
        is_chosen = world.has("empty answers") and self.chance("empty answers").random() < 0.1
        self._was_empty = is_chosen and not self._was_empty
        if self._was_empty:
            body = _EMPTY
            self.disturbed_at = world.at
            self.after(0.0, self.poll_soon)
        if body != self._body or self.engine.needs_answer():
            self._body = body
            document = replace(parse_document(body), answered=self.monotonic())
            self._mail.append(document)
            self.documents = {world.name_of(event.id): event.resources for event in document.events}
            for name, resources in self.documents.items():
                if self.name in resources:
                    self.seen_at.setdefault(name, world.at)
            self.turn_soon()
        self._read_at = self.now()

    def turn_soon(self, seconds: float = 0.0) -> None:
        at = self.world.at + seconds
        if self.engine is not None and (self._turn_at < self.world.at or at < self._turn_at):
            self._turn_at = at
            self.after(seconds, lambda: self._turn() if at == self._turn_at else None)

    def _turn(self) -> None:
        engine, self._turn_at = self.engine, -1.0
        assert engine is not None
        mail, self._mail = self._mail, []
        try:
            for item in mail:
                engine.take(item)
            if not engine.turn(self._read_at):
                raise BrokenError(f"{self.name} cannot write its state: {engine.store_failure}")
        except KilledError:
            self.crash("in a turn")
            return
        if engine.needs_answer():
            self.after(1.0, self.poll_soon)
        if engine.wake_at is not None:
            seconds = (engine.wake_at - self.now()).total_seconds()
            self._past_wakes = self._past_wakes + 1 if seconds <= 0.0 else 0
            if self._past_wakes > _MOST_PAST_WAKES:
                raise BrokenError(f"(7) {self.name} turns again and again for {engine.wake_at}, which is past")
            self.turn_soon(max(0.001, seconds))

    def give(self, life: int, item: Any) -> None:
        """Into the inbox of the agent that asked for it."""
        if life == self.life and self.engine is not None:
            self._mail.append(item)
            self.turn_soon()

    # --- the thread of the fleet

    def _take_wishes(self, wishes: tuple[Wish, ...]) -> None:
        self._wishes, self._has_news = wishes, True
        if not self._strand.is_busy:
            self._visit_in(0.0)

    def _visit_in(self, seconds: float) -> None:
        self._visit_at = at = self.world.at + seconds
        self.after(seconds, lambda: self._visit() if at == self._visit_at and not self._strand.is_busy else None)

    def _visit(self) -> None:
        assert self._wishes is not None
        wishes, self._has_news = self._wishes, False
        settings = self.world.settings.fleet
        assert settings is not None
        if self._fleet is None:
            self._fleet = Fleet(
                Requests(self),
                group="web",
                vm_id=self.name,
                max_events=settings.max_events,
                expect=settings.expect,
                random=self.chance("fleet"),
            )
        fleet, now = self._fleet, self.now()

        def visit() -> None:
            standings = fleet.visit(wishes, (self.name,), now)
            told = FleetTold("web", fleet.failure, fleet.away_since, standings, settings)
            at = fleet.next_at(now)
            self._has_visited(told, at)

        self._strand.begin(visit)
        self._look_at_strand()

    def _go_on(self) -> None:
        """The request has arrived, or its answer."""
        self._strand.resume()
        self._look_at_strand()

    def _look_at_strand(self) -> None:
        failure = None if self._strand.is_busy else self._strand.failure
        if isinstance(failure, KilledError):
            self.crash("at a request")
        elif failure is not None:
            raise failure

    def _has_visited(self, told: FleetTold, at: datetime | None) -> None:
        if told != self._told:
            self._told = told
            self._mail.append(told)
            self.turn_soon()
        if self._has_news:
            self._visit_in(0.0)
        elif at is not None:
            self._visit_in(min(max(0.0, (at - self.now()).total_seconds()), _MAX_WAIT_SECONDS))

    def request(self, partition: str, call: Callable[[], T], prefix: str = "") -> T:
        """A request meets what it meets on its way there and back; only in the strand."""
        self._travel()
        self.world.asking, self.world.asked = self, (partition, prefix)
        try:
            answer = call()
        except LedgerError:
            self.failed_at = self.world.at
            self._travel()
            raise
        self._travel()
        return answer

    def _travel(self) -> None:
        chance, world = self.chance("requests"), self.world
        seconds = chance.uniform(0.002, 0.05)
        if world.is_slow and chance.random() < 0.3:
            seconds = chance.uniform(0.0, 8.0)
            self.disturbed_at = max(self.disturbed_at, world.at + seconds)
        self.after(seconds, self._go_on)
        self._strand.pause()
        if world.has("kills") and chance.random() < 0.004:
            raise KilledError

    # --- what the agent does (called by its executor)

    def hook_starts(self, effect: HookStart, environment: Mapping[str, str]) -> None:
        name = self.world.name_of(environment["SCHEDULED_EVENT_ID"])
        self._names[effect.workflow_id] = name
        self.world.judge.started(self, name, effect.stage)

    def hook_ends(self, effect: HookStart, outcome: HookOutcome) -> None:
        assert isinstance(effect, RunHook)
        self.world.judge.ended(self, self._names[effect.workflow_id], effect.stage, outcome)

    def hook_is_told_to_end(self, effect: HookStart) -> None:
        del effect

    def post(self, approvals: Sequence[Approve]) -> None:
        """A request to approve, which arrives."""
        life = self.life
        for approve in approvals:
            self.world.approve(self, approve.event_id)
            answer = ApprovalAnswered(workflow_id=approve.workflow_id)
            self.after(0.05, lambda answer=answer: self.give(life, answer))  # type: ignore[misc]


class Requests:
    """The ledger as one VM reaches it."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._ledger = vm.world.ledger

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        self._vm.request(partition, lambda: self._ledger.put(partition, key, content))

    def put_if_unchanged(self, partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        return self._vm.request(partition, lambda: self._ledger.put_if_unchanged(partition, key, content, version))

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        return self._vm.request(partition, lambda: self._ledger.list_rows(partition, prefix), prefix)


class CrashingStore(Store):
    """A store in memory; the process may end before or after each transaction."""

    vm: Vm

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        chance = self.vm.chance("transactions").random() if self.vm.world.has("kills") else 1.0
        if chance < 0.004:
            raise KilledError
        with super()._transaction():
            yield
        if chance < 0.008:
            raise KilledError


class Hooks(alone.Executor):
    """Hooks that take as long as chance has it, on each VM another time."""

    def start_hook(
        self,
        effect: HookStart,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        del hook, stdin, event_id
        vm, key = cast("Vm", self._world), key_of(effect)
        vm.hook_starts(effect, environment)
        self._runs[key] = effect
        self._live.add(key)
        number = self._numbers[key] = next(self._count)
        chance = vm.chance(f"hook of {effect.stage}")
        seconds, outcome = chance.choice((0.5, 2.0, 20.0, 90.0)), "succeeded"
        if effect.stage == "prepare" and vm.world.has("bad hooks") and chance.random() < 0.1:
            outcome = "failed"
        left = max(0.0, deadline - vm.monotonic()) if deadline is not None else seconds
        if seconds > left:
            seconds, outcome = left, "timed_out"
        vm.after(seconds, lambda: self._end(key, number, cast("HookOutcome", outcome)))
