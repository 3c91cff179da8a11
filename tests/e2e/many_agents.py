"""Many agents with one simulator, as processes, and what their hooks have noted."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import psutil
from harness import Agent, Simulator, installed_environment

from scheduled_events_agent.fleet.backend import Backend
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings
from scheduled_events_agent.simulator.table import SimulatedTable

GROUP = "web"
NOTICE_SECONDS = 3000


class HookRun(NamedTuple):
    """As the hook noted it; times are monotonic, the same for all processes."""

    event: str
    hook: str
    began: float
    ended: float
    """math.inf: it did not end, for it was killed or still runs."""


class Fleet:
    """The agents by VM, in one group; a context manager, which starts them."""

    def __init__(self, directory: Path, azure: Simulator, store: Backend | None, **fleet: Any) -> None:
        """``store``: their table, asked from here; None: they share nothing. ``fleet``: of their policy."""
        self.azure = azure
        self.vms = tuple(azure.vms)
        self.random = Random(len(self.vms))
        self.patience = 120.0 + 5 * len(self.vms)
        self.agents = {vm: Agent(directory / vm, azure.endpoint(vm)) for vm in self.vms}
        self._store = store
        self._stack = ExitStack()
        rule = {"recover": ["resume"], "approve": "when-prepared", **({"shared": "all-ready"} if store else {})}
        sections: dict[str, Any] = {"fleet": {"group": GROUP, **fleet}} if store else {}
        for agent in self.agents.values():
            agent.environment = installed_environment()
            agent.write_policy(
                # All that wait together use a fraction of one processor.
                imds={"poll_interval": f"{max(0.5, len(self.vms) / 25):g}s"},
                rules=[
                    {"name": "waiting", "when": {"type": "Redeploy"}, "prepare": ["drain_when_told"], **rule},
                    {"name": "impactful", "prepare": ["drain"], **rule},
                ],
                hooks={
                    "drain": agent.hook("drain", seconds=self.random.uniform(0.1, 2.0)),
                    "drain_when_told": agent.hook("drain_when_told", until="go"),
                    "resume": agent.hook("resume", seconds=self.random.uniform(0.1, 0.5)),
                },
                **sections,
            )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            starters = stack.enter_context(ThreadPoolExecutor(3))  # an agent ends with the thread that started it
            for agent in self.agents.values():
                stack.enter_context(closing(agent))
            list(starters.map(Agent.start, self.agents.values()))  # a few at a time, so that each is soon ready
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def schedule(self, vms: Sequence[str], type_: Any = "Reboot", notice_seconds: int = NOTICE_SECONDS) -> str:
        for vm in vms:
            (self.agents[vm].directory / "go").unlink(missing_ok=True)
        return self.azure.schedule(
            type_, vms=tuple(vms), notice_seconds=notice_seconds, start_delay_seconds=0.2, lasts_seconds=0.5
        )

    def let_go(self, vms: Iterable[str]) -> None:
        for vm in vms:
            self.agents[vm].let_go("go")

    def runs(self, vm: str, event: str = "") -> list[HookRun]:
        """Runs of hooks for one event, or for all, oldest first."""
        notes = self.agents[vm].records()
        ended = {note["pid"]: note["monotonic"] for note in notes if note["what"] == "end"}
        runs = [
            HookRun(note["given"]["ID"], note["hook"], note["monotonic"], ended.get(note["pid"], math.inf))
            for note in notes
            if note["what"] == "start"
        ]
        return [run for run in runs if event in ("", run.event)]

    def is_drained(self, vm: str, event: str) -> bool:
        runs = self.runs(vm, event)
        return bool(runs) and runs[-1].hook != "resume" and runs[-1].ended < math.inf

    def back_at(self, vm: str, event: str) -> float:
        """When it had recovered from the event, or from several with one hook; math.inf: it has not."""
        runs = self.runs(vm)
        last = max((run.began for run in runs if run.event == event and run.hook != "resume"), default=math.inf)
        return min((run.ended for run in runs if run.hook == "resume" and run.began > last), default=math.inf)

    def has_begun(self, event: str) -> bool:
        return any(self.runs(vm, event) for vm in self.azure.event(event).plan.vms)

    def wait(self, test: Callable[[], object], what: str, vms: Iterable[str] = ()) -> None:
        """Wait for ``test``; if it does not come true, fail with the last log lines of the agents of ``vms``."""
        deadline = time.monotonic() + self.patience
        while not test():
            last = [f"=== {vm}\n{''.join(self.agents[vm].history[-20:])}" for vm in vms]
            assert time.monotonic() < deadline, f"gave up waiting until {what}\n{''.join(last)}"
            time.sleep(0.1 + len(self.vms) / 200)

    def wait_each(self, test: Callable[[str], object], vms: Iterable[str], what: str) -> None:
        for vm in vms:
            self.wait(partial(test, vm), f"{vm} {what}", (vm,))

    def wait_over(self, events: Iterable[str]) -> None:
        for event in events:
            vms = self.azure.event(event).plan.vms
            self.wait(partial(self._is_gone, event), f"{event} was gone", vms[:3])
            self.wait_each(partial(self._is_back, event), vms, f"was back after {event}")
        if self._store:
            self.wait(self._are_records_deleted, "all records were deleted", self.vms[:3])

    def _is_gone(self, event: str) -> bool:
        return self.azure.event(event).status == "Gone"

    def _is_back(self, event: str, vm: str) -> bool:
        return self.back_at(vm, event) < math.inf

    def resident_mib(self) -> list[float]:
        """Resident memory of each agent."""
        processes = [psutil.Process(agent.process.pid) for agent in self.agents.values()]
        return [process.memory_info().rss / 2**20 for process in processes]

    def measure_event(self) -> tuple[float, float]:
        """For an event of all VMs: requests until its records are deleted; milliseconds from the last VM ready.

        Each VM looks once more two minutes later.
        """
        before = self._requests()
        event = self.schedule(self.vms)
        self.wait_over([event])
        ready_at = max(run.ended for vm in self.vms for run in self.runs(vm, event) if run.hook == "drain")
        return self._requests() - before, 1000 * (self.azure.approvals(event)[0].monotonic - ready_at)

    def _requests(self) -> float:
        return sum(agent.metric("fleet_requests_total") for agent in self.agents.values())

    def _are_records_deleted(self) -> bool:
        assert self._store
        return not self._store.list()


@contextmanager
def open_fleet(count: int, *, has_table: bool = True) -> Iterator[Fleet]:
    """Run this number of agents, with a simulated table over HTTP."""
    vms = [f"web_{number}" for number in range(count)]
    with TemporaryDirectory() as name, SimulatedTable() as table, Simulator(vms=vms, rate_limit=None) as azure:
        sas_file = Path(name) / "sas"
        sas_file.touch(mode=0o600)
        sas_file.write_text(SimulatedTable.SAS)
        settings = FleetSettings(table=table.url, credential=FleetCredential(sas_file=str(sas_file)))
        store = connect(settings, GROUP, azure.endpoint()) if has_table else None
        section = {"table": table.url, "credential": {"sas_file": str(sas_file)}, "max_events": 1}
        with Fleet(Path(name), azure, store, **section) as fleet:
            yield fleet
