"""A fleet of VMs under a simulated Azure, with one store: whole engines, and the real client and ``plan``.

The simulation has the clock, and chooses what goes wrong and when; the oracle knows what is right. While a request
of one VM is under way, all others go on.
"""

import itertools
import json
import random
from collections.abc import Callable
from typing import Any, Literal, get_args

from fleet_machines import Sent, Vm
from fleet_oracle import FleetOracle
from lease_store import LeaseStore
from memory_backend import MemoryStore
from msgspec.structs import replace
from simulation import START, Simulation
from vm_simulation import new_metrics as new_vm_metrics

from scheduled_events_agent.fleet.backend import BackendError
from scheduled_events_agent.fleet.plan import read_record
from scheduled_events_agent.imds.document import Document, parse_document
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import AgentSettings, FleetSettings, Settings
from scheduled_events_agent.simulator.azure import Azure, EventType, LogEntry, Plan
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import OperatorAction

FleetTrouble = Literal[
    # requests
    "lost", "late", "doubled", "refused", "cut off", "unavailable",
    # agents and VMs
    "kills", "pauses", "dead VMs", "reboots", "one name", "wrong clocks", "set clocks",
    # events
    "back again", "cancels", "renames", "growth",
    # operators
    "holds", "releases",
]  # fmt: skip
FLEET_TROUBLES: tuple[FleetTrouble, ...] = get_args(FleetTrouble)
CLOCKS: frozenset[FleetTrouble] = frozenset({"wrong clocks", "set clocks"})
MAX_CLOCK_SECONDS = 3600
"""So wrong a wall clock is at most."""
BUSY_SECONDS = 2400.0
"""Trouble ends here; the dead stay dead."""
_DAY = 86400.0
_MAX_NEEDED_SECONDS = 610.0
"""Hooks begin so long before NotBefore at the latest."""
_VERSION = "2020-07-01"


class FleetSimulation(Simulation[FleetTrouble]):
    """Some VMs, with one store for all."""

    BUSY_SECONDS = BUSY_SECONDS
    MAX_SECONDS = 2 * _DAY

    def __init__(
        self,
        seed: int,
        troubles: frozenset[FleetTrouble] | None = None,
        *,
        size: int | None = None,
        has_ages: bool = True,
        is_short: bool = False,
        in_leases: bool = False,
    ) -> None:
        """``size``: how many VMs. ``in_leases``: their records are Leases of a Kubernetes cluster.

        ``is_short``: it ends before an event reaches its latest begin, whatever the clocks say.
        """
        names = [f"vm_{number}" for number in range(size or random.Random(f"{seed}/size").randint(2, 9))]
        ids = itertools.count(1)
        super().__init__(seed, FLEET_TROUBLES, troubles, Azure((*names, "db_0"), new_id=lambda: f"E{next(ids)}"))
        self.has_ages = has_ages
        self.is_short = is_short
        self.in_leases = in_leases
        self.metrics = new_metrics()
        self.settings = self._a_policy()
        store = LeaseStore if in_leases else MemoryStore
        self.store: MemoryStore | LeaseStore = store(lambda: self.at, has_ages=has_ages)
        self.network = Network(self)
        self._hidden: set[str] = set()
        self._document: tuple[bytes, Document] | None = None
        self.oracle = FleetOracle(self)
        vms = [(f"id-{name}", name) for name in names]
        if "one name" in self.troubles:
            vms.append(("id-twin", self.chance("one name").choice(names)))
        self.vms = {vm_id: Vm(self, vm_id, name) for vm_id, name in vms}

    def named(self, name: str) -> list[Vm]:
        """The VMs that Azure calls so."""
        return [vm for vm in self.vms.values() if vm.name == name]

    def alive(self) -> list[Vm]:
        return [vm for vm in self.vms.values() if not vm.is_dead]

    # --- the run

    def _finish(self) -> None:
        self.oracle.finished()

    def _close(self) -> None:
        for vm in self.vms.values():
            vm.end()

    def _prepare(self) -> None:
        fleet = self.settings.fleet
        assert fleet is not None
        self.log(f"{len(self.vms)} VMs, max_events {fleet.max_events}, on_unavailable {fleet.on_unavailable}")
        self.log(f"members {' '.join(fleet.members)}, trouble: {', '.join(sorted(self.troubles)) or 'none'}")
        for vm in self.vms.values():
            self.after(self.chance("starts").uniform(0.0, 1.0), vm.start)
        chance = self.chance("events")
        # Most is to be seen where events come together.
        spread = chance.choice((0.5, 30.0, 300.0, 900.0))
        first = chance.uniform(0.0, 60.0)
        for number in range(chance.randint(2, 6)):
            at = first + chance.uniform(0.0, spread if number else 0.0)
            self.after(at, lambda number=number: self._announce(number))  # type: ignore[misc]
        self._plan_trouble()
        self.after(1.2 * _DAY, self.oracle.look_at_rest)
        # Records of dead VMs are deleted by their age when a later event comes.
        self.after(1.5 * _DAY, self._announce_last)

    def _plan_trouble(self) -> None:
        chance = self.chance("wrong clocks")
        most = MAX_CLOCK_SECONDS
        if "wrong clocks" in self.troubles:
            for vm in self.vms.values():
                vm.wall_offset = chance.choice((0, -most, most, chance.randint(-most, most)))
        mishaps: list[tuple[FleetTrouble, int, Callable[[], None]]] = [
            ("cut off", 2, self._cut_off),
            ("unavailable", 1, self._lose_store),
            ("kills", 3, lambda: self._one("kills").kill()),
            ("pauses", 3, self._pause),
            ("dead VMs", 1, self._lose_vms),
            ("reboots", 2, self._reboot),
            ("set clocks", 3, self._set_clock),
            ("holds", 4, self._operate),
            ("releases", 6, self._release),
        ]
        for trouble, count, what in mishaps:
            chance = self.chance(f"when {trouble}")
            for _ in range(count if trouble in self.troubles else 0):
                self.after(chance.uniform(5.0, BUSY_SECONDS if trouble == "releases" else 1200.0), what)

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
            hooks={
                "drain": Hook(run=("/bin/true",), timeout=chance.choice((120.0, 600.0))),
                "resume": Hook(run=("/bin/true",), timeout=600.0),
            },
            fleet=FleetSettings(
                group="web",
                table="https://account.table.core.windows.net/events",
                max_events=chance.choice((1, 1, 1, 2, 3, None)),
                on_unavailable=chance.choice(("wait", "wait", "wait", "begin")),
                members=chance.choice((("*",), ("*",), ("vm_*",), ("vm_[0-4]",))),
            ),
            agent=AgentSettings(listen="off"),
        )

    # --- Azure

    def document(self) -> tuple[bytes, Document]:
        """The document that all VMs read now: the same objects until something changes."""
        self._azure.advance(self.epoch())
        body = self._azure.document(_VERSION)
        if self._hidden:
            document = json.loads(body)
            shown = [event for event in document["Events"] if self.name_of(event["EventId"]) not in self._hidden]
            document["Events"] = shown
            document["DocumentIncarnation"] += 1000
            body = json.dumps(document).encode()
        if self._document is None or self._document[0] != body:
            self._document = body, parse_document(body)
        return self._document

    def type_of(self, name: str) -> EventType:
        return self._azure.event(name).plan.type

    def resources(self, name: str) -> tuple[str, ...]:
        return self._azure.event(name).plan.vms

    def not_before(self, name: str) -> float:
        return self._azure.event(name).not_before_at.timestamp() - START.timestamp()

    def is_scheduled(self, name: str) -> bool:
        return self._azure.event(name).status == "Scheduled"

    def is_over(self, name: str) -> bool:
        return self._azure.event(name).status == "Gone"

    def is_hidden(self, name: str) -> bool:
        return name in self._hidden

    def _announce(self, number: int) -> None:
        chance = self.chance(f"event {number}")
        names = sorted({vm.name for vm in self.alive()})
        vms = chance.sample(names, min(len(names), chance.choice((1, 1, 2, 3, 5))))
        if chance.random() < 0.2 and self.settings.fleet and "*" not in self.settings.fleet.members:
            vms.append("db_0")
        type_: EventType = chance.choice(("Freeze", "Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"))
        notice = chance.choice((200.0, 400.0, 900.0, 3600.0, 6000.0))
        if self.is_short:
            type_ = "Freeze" if type_ in ("Preempt", "Terminate") else type_
            notice = chance.choice((6500.0, 7000.0, 8000.0))
        elif type_ == "Preempt":
            notice = 30.0
        if type_ in ("Preempt", "Terminate"):
            vms = vms[: chance.choice((1, 1, 2))] if len(names) > 3 else []
        if vms:
            self._schedule(
                Plan(
                    type=type_,
                    vms=tuple(vms),
                    notice_seconds=notice,
                    lasts_seconds=chance.choice((2.0, 30.0)),
                    start_delay_seconds=1.0,
                    new_id_at_start="renames" in self.troubles and chance.random() < 0.6,
                ),
                chance,
            )

    def _schedule(self, plan: Plan, chance: random.Random) -> None:
        name = self._azure.schedule(self.epoch(), plan)
        self.oracle.announced(name)
        notice = plan.notice_seconds or 0.0
        if self.is_short:
            latest_begin = self.not_before(name) - _MAX_NEEDED_SECONDS - MAX_CLOCK_SECONDS
            self.stops_at = min(self.stops_at, latest_begin)
        if self.has("growth") and chance.random() < 0.7:
            self.after(chance.uniform(1.0, min(notice, 300.0)), lambda: self._grow(name, chance))
        if self.has("cancels") and chance.random() < 0.3:
            self.after(chance.uniform(30.0, min(notice, BUSY_SECONDS)), lambda: self._cancel(name))
        if self.has("back again") and chance.random() < 0.6:
            self.after(chance.uniform(5.0, min(notice / 2, 120.0)), lambda: self._hide(name, chance))
        self._plan_mishaps_beside(plan)

    def _plan_mishaps_beside(self, plan: Plan) -> None:
        """Mishaps are worth most while there is something to do."""
        for vm in (vm for name in plan.vms for vm in self.named(name)):
            self._plan_mishaps_of(vm)

    def _plan_mishaps_of(self, vm: Vm) -> None:
        chance = vm.chance("mishaps beside an event")
        seconds = [chance.expovariate(1 / 20.0) for _ in range(4)]
        if self.has("kills") and chance.random() < 0.3:
            self.after(seconds[0], vm.kill)
        if self.has("holds") and chance.random() < 0.3:
            self.after(seconds[1], lambda: self._operate(vm))
        if self.has("pauses") and chance.random() < 0.3:
            self.after(seconds[2], lambda: vm.freeze(chance.uniform(5.0, 300.0)))
        if self.has("reboots") and chance.random() < 0.2:
            self.after(3.0 * seconds[3], lambda: vm.reboot(60.0))

    def _announce_last(self) -> None:
        """When all is long over."""
        alive = tuple(sorted({vm.name for vm in self.alive()}))
        if alive:
            self._schedule(Plan(type="Freeze", vms=alive, notice_seconds=900.0), self.chance("last event"))

    def _grow(self, name: str, chance: random.Random) -> None:
        event = self._azure.event(name)
        others = sorted({vm.name for vm in self.alive()} - set(event.plan.vms))
        if event.status != "Scheduled" or event.approved_at or not others:
            return
        more = chance.choice(others)
        plan = replace(event.plan, vms=(*event.plan.vms, more))
        self._azure._keep(name.casefold(), replace(event, plan=plan))
        self._azure._document_changed()
        self.log(f"Azure: {name} names {more} as well")
        self.oracle.changed(name)
        self._poll_soon()

    def _cancel(self, name: str) -> None:
        if self.is_scheduled(name):
            self._azure.cancel(self.epoch(), name)

    def _hide(self, name: str, chance: random.Random) -> None:
        """The event is not in the document for a while."""
        if not self.is_scheduled(name):
            return
        seconds = chance.choice((5.0, 20.0, 120.0))
        self.log(f"Azure: {name} is left out for {seconds:.0f} s")
        self._hidden.add(name)
        self.oracle.changed(name)
        self._poll_soon()

        def show() -> None:
            self.log(f"Azure: {name} is back")
            self._hidden.discard(name)
            self.oracle.changed(name)
            self._poll_soon()
            if self.has("back again") and chance.random() < 0.5:
                self.after(chance.uniform(2.0, 60.0), lambda: self._hide(name, chance))

        self.after(seconds, show)

    def approve(self, vm: Vm, event_id: str, *, by_operator: bool) -> None:
        self.oracle.approved(vm, self.name_of(event_id), by_operator=by_operator)
        if self._azure.is_pending(event_id):
            self._azure.approve(self.epoch(), event_id, vm.name)

    def _on_azure(self, entry: LogEntry) -> None:
        event = entry.event
        if event is None:
            return
        name = event.ids[0]
        until = f" until {self.not_before(name):.0f}" if entry.kind == "scheduled" else ""
        self.log(f"Azure: {entry.kind} {event.plan.type} {name} of {', '.join(event.plan.vms)}{until}")
        if entry.kind == "started":
            self._strike(name)
        elif entry.kind == "gone":
            self.oracle.over(name)

    def _strike(self, name: str) -> None:
        """Do what Azure does to the VMs of an event that starts."""
        type_ = self.type_of(name)
        for vm in (vm for one in self.resources(name) for vm in self.named(one)):
            chance = vm.chance("what events do")
            if type_ in ("Preempt", "Terminate"):
                self.after(3.0, vm.die)
            elif type_ == "Freeze":
                self.after(0.5, lambda vm=vm, chance=chance: vm.freeze(chance.choice((1.0, 5.0, 30.0))))  # type: ignore[misc]
            else:
                self.after(0.5, lambda vm=vm, chance=chance: vm.reboot(chance.choice((20.0, 60.0, 300.0))))  # type: ignore[misc]

    def _poll_soon(self) -> None:
        for vm in self.vms.values():
            vm.poll_soon()

    # --- what goes wrong

    def _one(self, trouble: str) -> Vm:
        return self.chance(trouble).choice([*self.vms.values()])

    def _pause(self) -> None:
        self._one("pauses").freeze(self.chance("pauses").uniform(5.0, 300.0))

    def _reboot(self) -> None:
        self._one("reboots").reboot(self.chance("reboots").choice((5.0, 60.0, 600.0)))

    def _set_clock(self) -> None:
        offset = self.chance("set clocks").randint(-MAX_CLOCK_SECONDS, MAX_CLOCK_SECONDS)
        self._one("set clocks").set_clock(offset)

    def _operate(self, vm: Vm | None = None) -> None:
        actions: tuple[OperatorAction, ...] = ("hold", "hold", "release", "approve")
        (vm or self._one("holds")).operator_says(self.chance("holds").choice(actions))

    def _cut_off(self) -> None:
        chance = self.chance("cut off")
        self.network.lose([self._one("cut off")], chance.uniform(30.0, 900.0))

    def _lose_store(self) -> None:
        self.network.lose([*self.vms.values()], self.chance("unavailable").choice((60.0, 400.0, 3000.0)))

    def _lose_vms(self) -> None:
        """All VMs of one event, or one VM."""
        chance = self.chance("dead VMs")
        begun = [life.name for life in self.oracle.lives.values() if any(w.has_begun for w in life.works.values())]
        names: Any = self.resources(chance.choice(begun)) if begun else [chance.choice([*self.vms.values()]).name]
        lost = [vm for name in names for vm in self.named(name)]
        if chance.random() < 0.3:
            lost = lost[:1]
        if len(self.alive()) - len(lost) >= 2:
            for vm in lost:
                vm.die()

    def _release(self) -> None:
        """An operator deletes the records of an event whose VMs are all silent."""
        records = self.store.list()
        by_event: dict[str, list[Any]] = {}
        for record in records:
            by_event.setdefault(record.key.partition("|")[0], []).append(record)
        silent = [found for found in by_event.values() if not any(read_record(one).may_be_alive for one in found)]
        if silent:
            for record in self.chance("releases").choice(silent):
                self.log(f"fleet release deletes {self.oracle.key_in_words(record.key)}")
                self.store.delete(record.key, record.etag)
                self.oracle.released(record.key)


class Network:
    """Delays and faults of requests on their way to the store and back."""

    def __init__(self, simulation: FleetSimulation) -> None:
        self._simulation = simulation
        self._lost_until: dict[str, float] = {}
        self.log: list[tuple[float, str, Sent]] = []
        """All requests, as they were sent."""

    def lose(self, vms: list[Vm], seconds: float) -> None:
        """The VMs are cut off from the store."""
        simulation = self._simulation
        simulation.log(f"{', '.join(vm.vm_id for vm in vms)} cut off from the store for {seconds:.0f} s")
        for vm in vms:
            self._lost_until[vm.vm_id] = max(self._lost_until.get(vm.vm_id, 0.0), simulation.at + seconds)
            vm.disturb(seconds + 35.0)

    def send(self, vm: Vm, number: int, sent: Sent, call: Callable[[], Any]) -> None:
        """``go_on`` of the VM gets the answer."""
        simulation = self._simulation
        self.log.append((simulation.at, vm.vm_id, sent))
        chance = vm.chance("requests")
        there = chance.uniform(0.002, 0.05)
        back = chance.uniform(0.002, 0.05)
        timeout = 30.0
        if self._lost_until.get(vm.vm_id, 0.0) > simulation.at:
            seconds = chance.choice((0.01, 0.01, timeout))
            self._fail(vm, number, seconds, "unreachable")
            return
        if simulation.has("refused") and chance.random() < 0.06:
            retry_after = chance.choice((0.0, 0.0, 5.0, 60.0, 300.0))
            vm.disturb(1.1 * retry_after + 35.0)
            self._fail(vm, number, there + back, "throttled", retry_after)
            return
        if simulation.has("lost") and chance.random() < 0.06:
            vm.disturb(timeout + 35.0)
            if chance.random() < 0.5:
                self._fail(vm, number, timeout, "timeout")
                return
            back = timeout * 2
        if simulation.has("late") and chance.random() < 0.1:
            there = chance.uniform(0.1, chance.choice((3.0, 60.0)))
            vm.disturb(there + 200.0)
        if there + back > timeout:
            self._fail(vm, number, timeout, "timeout")
        sent_at = simulation.at
        life = vm.life

        def arrive() -> None:
            answer = self._take_effect(vm, sent, call)
            arrived_at = simulation.at
            if there + back <= timeout and life == vm.life:
                vm.after(back, lambda: self._answer(vm, number, sent, answer, (sent_at, arrived_at)))

        simulation.after(there, arrive)
        if sent.kind != "list" and simulation.has("doubled") and chance.random() < 0.1:
            again = there + chance.uniform(0.0, 30.0)
            vm.disturb(again + 200.0)
            simulation.after(again, lambda: self._take_effect(vm, sent, call))

    def _fail(self, vm: Vm, number: int, seconds: float, kind: Any, retry_after: float = 0.0) -> None:
        error = BackendError(f"the store: {kind}", kind=kind, retry_after=retry_after)
        vm.after(seconds, lambda: vm.go_on(number, error))

    def _take_effect(self, vm: Vm, sent: Sent, call: Callable[[], Any]) -> Any:
        answer = call()
        if sent.kind != "list" and answer:
            self._simulation.oracle.written(vm, sent)
        return answer

    def _answer(self, vm: Vm, number: int, sent: Sent, answer: Any, times: tuple[float, float]) -> None:
        """``times``: when it was sent, and had its effect."""
        if sent.kind == "list":
            vm.listed_at = times[0]
        elif answer:
            self._simulation.oracle.answered(vm, sent, times[1])
        vm.go_on(number, answer)


_METRICS: list[Metrics] = []


def new_metrics() -> Metrics:
    """One for all simulations of this process."""
    if not _METRICS:
        _METRICS.append(new_vm_metrics())
        _METRICS[0].add_fleet()
    return _METRICS[0]
