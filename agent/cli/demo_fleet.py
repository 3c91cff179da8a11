"""``demo fleet``: five agents that act together, shown as it happens, and checked at the end."""

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from agent import AgentError
from agent.cli.demo_stage import Shown, ShownAgent, show_azure
from agent.cli.fleet import FleetStatus, in_words, look
from agent.cli.terminal import Terminal
from agent.fleet.table import connect
from agent.settings import FleetSettings, load_settings
from agent.simulator import Simulator
from agent.simulator.azure import EventType
from agent.simulator.table import SimulatedTable
from agent.status import JournalEntry
from agent.store import Store

_WITHIN_SECONDS = 120.0
_VMS = ("web_0", "web_1", "web_2", "web_3", "web_4")
_DIES = "web_4"
_DRAIN_SECONDS = {"web_2": 4.0, _DIES: 5.0}

_POLICY = """\
fleet:
  group: {group}
  table: {table}
  credential: {{sas_file: {sas_file}}}
  max_events: 1                     # one event of the group at a time
rules:
  - name: impactful
    prepare: [drain]
    recover: [resume]
    approve: when-prepared
    shared: all-ready               # an event of several VMs: approved when all of them are drained
"""

# As in the other demo: one small program, the same on Linux and on Windows.
_HOOK = """\
import sys, time
name, vm, seconds = sys.argv[1:]
if name == "drain":
    print(f"taking {vm} out of the load balancer, which takes {seconds} s", flush=True)
    time.sleep(float(seconds))
else:
    print(f"putting {vm} back", flush=True)
"""


class Event(NamedTuple):
    """One that was announced to some of the VMs."""

    id: str
    type: EventType
    vms: tuple[str, ...]


def play(table: str | None, sas_file: str | None) -> int:
    """The whole demo; returns the exit code. ``table`` and its signature: a real one. Raises AgentError."""
    if (table is None) != (sas_file is None):
        raise AgentError("give both --table and --sas-file, or none of them", kind="usage")
    with tempfile.TemporaryDirectory(prefix="scheduled-events-demo-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        if table is None:
            simulated = stack.enter_context(SimulatedTable())
            table, sas_path = simulated.url, directory / "sas"
            sas_path.touch(mode=0o600)
            sas_path.write_text(SimulatedTable.SAS, encoding="ascii")
        else:
            sas_path = Path(sas_file or "").absolute()
        group = f"demo-{uuid4().hex[:8]}"  # its rows are its own
        policy = _POLICY.format(group=group, table=json.dumps(table), sas_file=json.dumps(str(sas_path)))
        azure = stack.enter_context(Simulator(vms=_VMS))
        return _Demo(directory, azure, policy).play()


class _Demo:
    """Five agents, and what they are asked to do."""

    def __init__(self, directory: Path, azure: Simulator, policy: str) -> None:
        self._directory = directory
        self._azure = azure
        self._policy = policy
        self._shown = Shown()
        configs = {vm: self._write_files(vm) for vm in _VMS}
        self._agents = {
            vm: ShownAgent(config, directory / vm / "state", self._shown, name=vm, hooks=vm)
            for vm, config in configs.items()
        }
        settings = load_settings(configs[_VMS[0]])
        self._fleet: FleetSettings = settings.fleet or FleetSettings(table="")
        self._ledger = connect(self._fleet, azure.endpoint())

    def play(self) -> int:
        print("Starts five real agents against a simulated Azure, all on loopback and in a temporary directory.\n")
        print("The policy of each:\n", flush=True)
        print("".join(f"    {line}\n" for line in self._policy.splitlines()))
        self._status()  # raises if the table cannot be used
        threading.Thread(target=show_azure, args=(self._azure, self._shown), daemon=True).start()
        with contextlib.ExitStack() as stack:
            for agent in self._agents.values():
                stack.enter_context(agent)
            for vm in _VMS:
                self._azure.wait_polls(1, vm, timeout_seconds=_WITHIN_SECONDS)
            first, second = self._play_first_and_second()
            third = self._play_third()
            self._wait_for_free_slot()
            print("\nWhat fleet status says then:\n")
            print(*in_words(self._status(), Terminal.of(sys.stdout)), sep="\n")
            is_free = self._holder() is None
        return self._judge(first, second, third, is_free=is_free)

    def _write_files(self, vm: str) -> Path:
        directory = self._directory / vm
        directory.mkdir()
        hook = directory / "hook.py"
        hook.write_text(_HOOK, encoding="utf-8")
        seconds = str(_DRAIN_SECONDS.get(vm, 1.0))
        hooks = "".join(
            f"  {name}: {{run: {json.dumps([sys.executable, str(hook), name, vm, seconds])}, timeout: 1m}}\n"
            for name in ("drain", "resume")
        )
        config = directory / "policy.yaml"
        config.write_text(
            f"{self._policy}hooks:\n{hooks}imds: {{endpoint: {json.dumps(self._azure.endpoint(vm))}}}\n"
            "agent: {listen: off, log: {format: json}}\n",
            encoding="utf-8",
        )
        return config

    def _play_first_and_second(self) -> tuple[Event, Event]:
        title = "A Reboot of three VMs: approved when the slowest of them is drained"
        first = self._announce(title, "Reboot", _VMS[:3])
        self._wait_for("preparing", first, _VMS[0])
        second = self._announce("Meanwhile a Redeploy of a fourth VM: waits for its turn", "Redeploy", _VMS[3:4])
        self._wait_for("closed", first, *first.vms)
        self._wait_for("closed", second, *second.vms)
        return first, second

    def _play_third(self) -> Event:
        self._wait_for_free_slot()
        third = self._announce("A Reboot of two VMs, and the agent of one of them dies", "Reboot", _VMS[3:])
        self._wait_for("hook output", third, _DIES)
        self._agents[_DIES].kill()
        self._shown.line(_DIES, "its agent is killed")
        self._wait_for("waits", third, _VMS[3])
        self._shown.line(_DIES, "its agent is started again")
        self._agents[_DIES].start()
        self._wait_for("closed", third, *third.vms)
        return third

    def _announce(self, title: str, type_: EventType, vms: tuple[str, ...]) -> Event:
        self._shown.line("", f"\n--- {title}")
        # With less than five minutes' notice it would begin at once, slot or not.
        event_id = self._azure.schedule(
            type_, vms=vms, notice_seconds=900, start_delay_seconds=0.4, lasts_seconds=1.0
        )
        return Event(event_id, type_, vms)

    def _wait_for(self, message: str, event: Event, *vms: str) -> None:
        """If it does not come, the demo goes on, and the end shows what is missing."""
        for vm in vms:
            self._shown.wait_for(vm, message, event.id, _WITHIN_SECONDS)

    def _status(self) -> FleetStatus:
        return look(self._ledger, self._fleet.group or "", self._fleet, datetime.now(UTC))

    def _holder(self) -> str | None:
        """The event that has the slot."""
        return next((slot.event_id for slot in self._status().slots if slot.event_id), None)

    def _wait_for_free_slot(self) -> None:
        limit = time.monotonic() + _WITHIN_SECONDS
        while self._holder() is not None and time.monotonic() < limit:
            time.sleep(0.5)

    def _judge(self, first: Event, second: Event, third: Event, *, is_free: bool) -> int:
        journals = {vm: self._journal(vm) for vm in _VMS}
        approved = {event.id: self._azure.event(event.id).approved_at for event in (first, second, third)}
        facts = {**judge(first, second, third, journals, approved), "the slot is free": is_free}
        print("\nHow it ended:\n")
        for text, is_right in facts.items():
            print(f"{'ok' if is_right else 'WRONG':5}  {text}")
        wrong = sum(not is_right for is_right in facts.values())
        verdict = f"{wrong} of {len(facts)} are not as expected" if wrong else "all as expected"
        print(f"\n{verdict}, in {time.monotonic() - self._shown.began:.0f} seconds")
        return 1 if wrong else 0

    def _journal(self, vm: str) -> list[JournalEntry]:
        with contextlib.closing(Store.look_into(self._directory / vm / "state")) as store:
            return store.load_journal()


def judge(
    first: Event,
    second: Event,
    third: Event,
    journals: Mapping[str, list[JournalEntry]],
    approved: Mapping[str, datetime | None],
) -> dict[str, bool]:
    """Whether what the demo shows holds, by the agents' journals and by when Azure got the approvals."""

    def name(event: Event) -> str:
        return f"{event.type} {event.id[:8]}"

    def entries(kind: str, event: Event) -> list[JournalEntry]:
        mine = [entry for vm in event.vms for entry in journals[vm] if entry.event_id == event.id]
        return [entry for entry in mine if entry.kind == kind]

    def is_approved_by_all(event: Event) -> bool:
        at, prepared = approved[event.id], [entry.at for entry in entries("prepared", event)]
        return at is not None and len(prepared) == len(event.vms) and max(prepared) <= at

    def is_recovered(event: Event) -> bool:
        resumed = [entry.outcome for entry in entries("hook_finished", event) if entry.hook == "resume"]
        count = len(event.vms)
        return resumed == ["succeeded"] * count and len(entries("closed", event)) == count

    began = [entry.at for entry in entries("preparing", second)]
    over = [entry.at for entry in entries("closed", first)]
    return {
        f"{name(first)}  approved when all three were drained": is_approved_by_all(first),
        f"{name(second)}  begun when the first event was over": bool(began and over) and min(began) >= max(over),
        f"{name(third)}  approved when the VM whose agent died was drained": is_approved_by_all(third),
        "all VMs are back in service": all(map(is_recovered, (first, second, third))),
    }
