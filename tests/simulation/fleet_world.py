"""A fleet of VMs under a simulated Azure, with one ledger that fails: whole engines, and the real protocol.

Owns the clock, what goes wrong and when; ``fleet_judge`` knows what is right. One seed makes one world, always the
same one. While a request of one VM is under way, all others go on.
"""

import heapq
import itertools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import world as alone
from fleet_judge import LATEST_BEGIN, FleetJudge
from fleet_machines import Vm
from judge import BrokenError
from msgspec.structs import replace

from scheduled_events_agent.fleet.ledger import Row
from scheduled_events_agent.fleet.memory import MemoryLedger
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.settings import AgentSettings, FleetSettings, Settings
from scheduled_events_agent.simulator.azure import Azure, Plan

FleetTrouble = Literal[
    "kills", "away", "cut off", "slow", "lost answers", "stale lists", "dead VMs", "growth", "bad hooks",
    "empty answers", "back again", "missed gaps", "canceled",
]  # fmt: skip
FLEET_TROUBLES: tuple[FleetTrouble, ...] = get_args(FleetTrouble)
BUSY_SECONDS = 2400.0
"""Trouble ends here; the dead stay dead."""
_DAY = 86400.0
_STALE_SECONDS = 5.0
_MOST_AT_A_TIME = 10_000
_VERSION = "2020-07-01"


class LaggingLedger(MemoryLedger):
    """A stale list is some seconds old, which is more than a ledger may do to the protocol.

    All but one rule hold all the same, for here no VM takes back within these seconds what it has said: two that
    are back and do not see each other leave their slot until it expires.
    """

    def __init__(self, fault: Callable[[str], str]) -> None:
        super().__init__(fault)
        self._history: dict[str, list[tuple[float, dict[str, Row]]]] = {}
        self.at = 0.0

    def lag(self, partition: str, since: float) -> bool:
        """The next stale list shows what there was then. False: that is what there is."""
        history = self._history.get(partition, [])
        before = [rows for at, rows in history if at <= since]
        self._before[partition] = before[-1] if before else {}
        return bool(history) and history[-1][0] > since

    def _write(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        super()._write(partition, key, content)
        self._history.setdefault(partition, []).append((self.at, self._partitions[partition]))


class FleetWorld:
    """One run. ``story`` tells what happened, a line for each thing."""

    def __init__(
        self, seed: int, troubles: frozenset[FleetTrouble] | None = None, size: int | None = None
    ) -> None:
        """``troubles``: exactly these; by default, what chance gives to the seed. ``size``: how many VMs."""
        self.seed, self.at = seed, 0.0
        self._chances: dict[str, random.Random] = {}
        self.story: list[str] = []
        given = (trouble for trouble in FLEET_TROUBLES if self.chance(f"has {trouble}").random() < 0.3)
        self.troubles = frozenset(given) if troubles is None else troubles
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.metrics = alone._metrics()
        self.settings = self._a_policy()
        self.ledger = LaggingLedger(self._fault)
        self.asking: Vm | None = None
        """Whose request arrives."""
        self.asked = "", ""
        """The partition that it is about, and how the keys begin."""
        self.is_slow = False
        self._faults: set[str] = set()
        self._cut_off: set[str] = set()
        names = [f"vm_{number}" for number in range(size or self.chance("size").randint(5, 12))]
        self._azure = Azure((*names, "db_0"), new_id=lambda: f"E{next(self._order)}")
        self._azure_told = 0
        self._hidden: set[str] = set()
        self._document: tuple[int, bytes] = (-1, b"")
        self.judge = FleetJudge(self)
        self.vms = {name: Vm(self, name) for name in names}

    # --- chance and time

    def chance(self, what: str) -> random.Random:
        """The chance that decides on this, and on nothing else."""
        if what not in self._chances:
            self._chances[what] = random.Random(f"{self.seed}/{what}")
        return self._chances[what]

    def has(self, trouble: FleetTrouble) -> bool:
        """Whether there is this trouble, now."""
        return trouble in self.troubles and self.at < BUSY_SECONDS

    def epoch(self) -> float:
        return alone.START.timestamp() + self.at

    def tell(self, text: str) -> None:
        self.story.append(f"{self.at:9.2f}  {text}")

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.at + seconds, next(self._order), what))

    # --- the run

    def run(self) -> None:
        """Live it. Raises BrokenError."""
        try:
            self._prepare()
            steps = 0
            while self._queue:
                at, _, what = heapq.heappop(self._queue)
                steps = steps + 1 if at <= self.at else 0
                if at > 2 * _DAY or steps > _MOST_AT_A_TIME:
                    raise BrokenError("the world does not come to rest")
                self.at = max(self.at, at)
                what()
                self._watch_azure()
            self.judge.finished(self.ledger.rows())
        except BrokenError:
            raise
        except Exception as error:
            raise BrokenError(f"the agent raises {type(error).__name__}: {error}") from error
        finally:
            for vm in self.vms.values():
                vm.end()

    def _prepare(self) -> None:
        fleet = self.settings.fleet
        assert fleet is not None
        self.tell(f"{len(self.vms)} VMs, max_events {fleet.max_events}, when_away {fleet.when_away}")
        self.tell(f"trouble: {', '.join(sorted(self.troubles)) or 'none'}")
        for vm in self.vms.values():
            self.after(self.chance("starts").uniform(0.0, 1.0), vm.start)
        chance = self.chance("events")
        for number in range(chance.randint(2, 5)):
            at = chance.uniform(0.0, 900.0 if number else 60.0)
            self.after(at, lambda number=number: self._announce(number))  # type: ignore[misc]
        for trouble in ("away", "cut off", "slow", "lost answers", "stale lists"):
            for _ in range(2) if trouble in self.troubles else ():
                self.after(chance.uniform(5.0, 1200.0), lambda trouble=trouble: self._fail(trouble))  # type: ignore[misc]
        if "kills" in self.troubles:
            for _ in range(3):
                self.after(chance.uniform(5.0, BUSY_SECONDS), self._kill)
        if "dead VMs" in self.troubles:
            self.after(chance.uniform(5.0, 600.0), self._lose_vms)
        # Rows are deleted by their age when a later event ends.
        self.after(1.2 * _DAY, self._announce_last)

    def _a_policy(self) -> Settings:
        chance = self.chance("policy")
        return Settings(
            rules=(
                Rule(
                    name="all",
                    prepare=("drain",),
                    recover=("resume",),
                    approve="when-prepared",
                    shared="all-ready",
                ),
            ),
            hooks={name: Hook(run=("/bin/true",), timeout=600.0) for name in ("drain", "resume")},
            fleet=FleetSettings(
                group="web",
                table="https://account.table.core.windows.net/events",
                max_events=chance.choice((1, 1, 1, 2, 3, None)),
                when_away=chance.choice(("hold", "hold", "hold", "proceed")),
                expect=chance.choice((("*",), ("vm_*",))),
            ),
            agent=AgentSettings(listen="off"),
        )

    # --- Azure

    def document(self) -> bytes:
        self._azure.advance(self.epoch())
        if not self._hidden:
            return self._azure.document(_VERSION)
        document = json.loads(self._azure.document(_VERSION))
        document["Events"] = [event for event in document["Events"] if event["EventId"] not in self._hidden]
        document["DocumentIncarnation"] += 1000
        return json.dumps(document).encode()

    def name_of(self, event_id: str) -> str:
        return self._azure.event(event_id).ids[0]

    def resources(self, name: str) -> tuple[str, ...]:
        return self._azure.event(name).plan.vms

    def not_before(self, name: str) -> float:
        return self._azure.event(name).not_before_at.timestamp() - alone.START.timestamp()

    def is_scheduled(self, name: str) -> bool:
        return self._azure.event(name).status == "Scheduled"

    def is_over(self, name: str) -> bool:
        return self._azure.event(name).status == "Gone"

    def is_hidden(self, name: str) -> bool:
        return name in self._hidden

    def _announce(self, number: int) -> None:
        chance, fleet = self.chance(f"event {number}"), self.settings.fleet
        assert fleet is not None
        alive = [name for name, vm in self.vms.items() if not vm.is_dead]
        vms = chance.sample(alive, min(len(alive), chance.choice((1, 2, 3, 5))))
        if chance.random() < 0.2 and fleet.expect != ("*",):
            vms.append("db_0")
        self._schedule(
            Plan(
                type=chance.choice(("Freeze", "Reboot", "Redeploy")),
                vms=tuple(vms),
                notice_seconds=chance.choice((200.0, 400.0, 900.0, 3600.0, 6000.0)),
                lasts_seconds=chance.choice((2.0, 30.0)),
                start_delay_seconds=1.0,
                new_id_at_start=chance.random() < 0.3,
            ),
            chance,
        )

    def _schedule(self, plan: Plan, chance: random.Random) -> None:
        name = self._azure.schedule(self.epoch(), plan)
        self.judge.announced(name)
        notice = plan.notice_seconds or 0.0
        if self.has("growth") and chance.random() < 0.7:
            self.after(chance.uniform(1.0, min(notice, 300.0)), lambda: self._grow(name, chance))
        if self.has("canceled") and chance.random() < 0.3:
            self.after(chance.uniform(30.0, notice), lambda: self._cancel(name))
        if self.has("back again") and chance.random() < 0.6:
            self.after(chance.uniform(5.0, min(notice / 2, 120.0)), lambda: self._hide(name, chance))
        if self.has("kills"):
            for vm in plan.vms:
                if chance.random() < 0.4 and vm in self.vms:
                    self.after(chance.expovariate(1 / 20.0), self.vms[vm].kill)

    def _announce_last(self) -> None:
        """When all is long over."""
        alive = tuple(name for name, vm in self.vms.items() if not vm.is_dead)
        self._schedule(Plan(type="Freeze", vms=alive, notice_seconds=900.0), self.chance("last event"))

    def _grow(self, name: str, chance: random.Random) -> None:
        event = self._azure.event(name)
        others = [vm for vm, one in self.vms.items() if vm not in event.plan.vms and not one.is_dead]
        if event.status != "Scheduled" or event.approved_at or not others:
            return
        more = chance.choice(others)
        plan = replace(event.plan, vms=(*event.plan.vms, more))
        self._azure._keep(name.casefold(), replace(event, plan=plan))
        self._azure._document_changed()
        self.tell(f"Azure: {name} names {more} as well")
        self.judge.changed(name)
        self._poll_all()

    def _cancel(self, name: str) -> None:
        if self.is_scheduled(name):
            self._azure.cancel(self.epoch(), name)

    def _hide(self, name: str, chance: random.Random) -> None:
        """The event is not in the document for a while."""
        seconds = chance.choice((20.0, 120.0))
        if not self.is_scheduled(name) or self.at + seconds + LATEST_BEGIN > self.not_before(name):
            return
        self.tell(f"Azure: {name} is left out for {seconds:.0f} s")
        self._hidden.add(name)
        if self.has("missed gaps"):
            missing = self.chance("missed gaps").choice([*self.vms.values()])
            self.tell(f"{missing.name} does not poll meanwhile")
            missing.miss_polls(seconds)
        self.judge.changed(name)
        self._poll_all()

        def show() -> None:
            self.tell(f"Azure: {name} is back")
            self._hidden.discard(name)
            self.judge.changed(name)
            self._poll_all()

        self.after(seconds, show)

    def approve(self, vm: Vm, event_id: str) -> None:
        self.judge.posted(vm, self.name_of(event_id))
        if self._azure.is_pending(event_id):
            self._azure.approve(self.epoch(), event_id, vm.name)

    def _watch_azure(self) -> None:
        self._azure.advance(self.epoch())
        told = len(self._azure.history)
        if told == self._azure_told:
            return
        for happening in self._azure.history[self._azure_told :]:
            event = happening.event
            if event is not None:
                plan = event.plan
                until = f" until {self.not_before(event.id):.0f}" if happening.kind == "scheduled" else ""
                self.tell(f"Azure: {happening.kind} {event.ids[0]} of {', '.join(plan.vms)}{until}")
        self._azure_told = told
        self._poll_all()
        if self._azure.next_due < float("inf"):
            self.after(max(0.0, self._azure.next_due - self.epoch()) + 1e-6, lambda: None)

    def _poll_all(self) -> None:
        for vm in self.vms.values():
            vm.poll_soon()

    # --- what goes wrong

    def _kill(self) -> None:
        self.chance("kills").choice([*self.vms.values()]).kill()

    def _lose_vms(self) -> None:
        """All VMs of one event, or one VM."""
        chance = self.chance("dead VMs")
        begun = [life for life in self.judge.lives.values() if any(w.has_begun for w in life.works.values())]
        names: Any = self.resources(chance.choice(begun).name) if begun else [chance.choice([*self.vms])]
        alive = [vm for vm in self.vms.values() if not vm.is_dead]
        lost = [self.vms[name] for name in names if name in self.vms]
        if chance.random() < 0.3:
            lost = lost[:1]
        if len(alive) - len(lost) >= 2:
            for vm in lost:
                vm.die()

    def _fail(self, trouble: str) -> None:
        """The ledger fails, in its own way and for a while."""
        chance = self.chance(trouble)
        seconds = chance.choice((10.0, 60.0, 400.0))
        who = {chance.choice([*self.vms])} if trouble == "cut off" else set()
        self.tell(f"ledger: {trouble} {''.join(who)} for {seconds:.0f} s")
        self._faults.add(trouble)
        self._cut_off |= who
        self.is_slow |= trouble == "slow"

        def mend() -> None:
            self.tell(f"ledger: not {trouble} any more")
            self._faults.discard(trouble)
            self._cut_off -= who
            self.is_slow &= trouble != "slow"

        self.after(seconds, mend)

    def _fault(self, call: str) -> str:
        fault, vm, chance = "", self.asking, self.chance("faults")
        self.ledger.at = self.at
        if "away" in self._faults or (vm is not None and vm.name in self._cut_off):
            fault = "away"
        elif "lost answers" in self._faults and chance.random() < 0.2:
            fault = "lost"
        elif "stale lists" in self._faults and call == "list_rows" and chance.random() < 0.3:
            since = self.at - chance.uniform(0.0, _STALE_SECONDS)
            fault = "stale" if self.ledger.lag(self.asked[0], since) else ""
            self.judge.lagged(*self.asked)
        if fault and vm is not None:
            vm.disturbed_at = max(vm.disturbed_at, self.at)
        return fault
