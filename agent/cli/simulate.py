"""``simulate``: serve a scenario on loopback ports and tell what happens."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from agent.simulator import Happening, Simulator


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``simulate``."""
    parser = commands.add_parser(
        "simulate",
        help="serve a simulated Scheduled Events endpoint",
        description="Serves a scenario as Azure's endpoint would, one loopback port for each VM of it, and "
        "tells what happens. Its time begins with the first request for a document.",
    )
    parser.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="a shipped scenario, or the path of a .yaml file"
    )
    parser.add_argument("--list", action="store_true", help="list the shipped scenarios")
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="N", help="let the scenario's time pass N times as fast"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of the first VM, the others follow (default: free ones)",
    )
    parser.add_argument(
        "--vm", action="append", default=[], metavar="NAME", help="call the first VM this; again for the next one"
    )
    parser.add_argument("--now", action="store_true", help="do not wait for the first request")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write each request as a line of JSON")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(handler=run_simulate)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Serve until the scenario's end or Ctrl-C; returns the exit code."""
    from agent.simulator import Simulator, list_scenarios, load_scenario, rename_vms  # noqa: PLC0415
    from agent.simulator.scenario import DEFAULT_SCENARIO  # noqa: PLC0415

    if arguments.list:
        _print_list(list_scenarios(), arguments.json)
        return 0
    name = arguments.scenario or DEFAULT_SCENARIO
    scenario = rename_vms(load_scenario(name), tuple(arguments.vm))
    simulator = Simulator(
        scenario=scenario,
        speed=arguments.speed,
        port=arguments.port,
        begins_at_first_poll=not arguments.now,
        record_file=arguments.record,
    )
    tell = _JsonTeller() if arguments.json else _TextTeller()
    with contextlib.suppress(KeyboardInterrupt), simulator:
        tell.beginning(simulator, name, waits=not arguments.now)
        for happening in simulator.follow():
            tell.happening(happening)
        tell.end()
    return 0


class _TextTeller:
    """Lines for people."""

    def __init__(self) -> None:
        self._began_at: datetime | None = None

    def beginning(self, simulator: "Simulator", name: str, *, waits: bool) -> None:
        width = max(map(len, simulator.vms))
        for vm in simulator.vms:
            print(f"{vm:{width}}  {simulator.endpoint(vm)}/metadata/scheduledevents")
        pace = "" if simulator.speed == 1 else f", {simulator.speed:g} times as fast"
        when = "begins with the first request" if waits else "begins now"
        print(f"scenario {name} {when}{pace}; Ctrl-C ends it", flush=True)

    def happening(self, happening: "Happening") -> None:
        self._began_at = self._began_at or happening.at
        seconds = (happening.at - self._began_at).total_seconds()
        print(f"{seconds:7.1f}s  {_sentence(happening)}", flush=True)

    def end(self) -> None:
        print("the scenario is at its end", flush=True)


class _JsonTeller:
    """Lines for programs."""

    def beginning(self, simulator: "Simulator", name: str, *, waits: bool) -> None:
        for vm, machine in simulator.vms.items():
            self._print(kind="endpoint", vm=vm, vm_id=machine.id, url=simulator.endpoint(vm))
        self._print(kind="scenario", name=name, speed=simulator.speed, waits=waits)

    def happening(self, happening: "Happening") -> None:
        event = happening.event
        self._print(
            kind=happening.kind,
            at=happening.at,
            vm=happening.vm,
            text=happening.text,
            event=event
            and {
                "id": event.id,
                "type": event.plan.type,
                "status": event.status,
                "source": event.plan.source,
                "vms": event.plan.vms,
                "not_before": event.not_before_at,
                "approved_by": event.approved_by,
                "outcome": event.outcome,
            },
        )

    def end(self) -> None:
        self._print(kind="end")

    def _print(self, **fields: Any) -> None:
        import msgspec  # noqa: PLC0415

        print(msgspec.json.encode(fields).decode(), flush=True)


def _sentence(happening: "Happening") -> str:
    event = happening.event
    if event is None:
        what = {"began": "begins", "fault": "fault", "reset": "reset", "skipped": "skipped"}[happening.kind]
        return "  ".join(part for part in (f"{what:9}", happening.vm, happening.text) if part).rstrip()
    who = f"{event.plan.type} {event.id[:8]}"
    match happening.kind:
        case "scheduled":
            not_before = event.not_before_at.strftime("%a, %d %b %Y %H:%M:%S GMT")
            more = f"{event.plan.source}, for {', '.join(event.plan.vms)}, not before {not_before}"
        case "polled":
            more = f"by {happening.vm} for the first time"
        case "approved":
            more = f"by {happening.vm}"
        case "gone":
            more = event.outcome
        case _:
            more = happening.text
    return f"{happening.kind:9}  {who}  {more}".rstrip()


def _print_list(scenarios: dict[str, str], as_json: bool) -> None:
    if as_json:
        import json  # noqa: PLC0415

        print(json.dumps([{"name": name, "shows": shows} for name, shows in scenarios.items()], indent=2))
        return
    width = max(map(len, scenarios))
    for name, shows in scenarios.items():
        print(f"{name:{width}}  {shows}")
