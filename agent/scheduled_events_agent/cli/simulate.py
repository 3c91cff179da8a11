"""``simulate``: serves a scenario or a recording on loopback ports; records a real endpoint."""

import argparse
import contextlib
import math
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import exit_code
from scheduled_events_agent.cli.terminal import Cell, Terminal, print_json, printable
from scheduled_events_agent.policy.durations import format_time, parse_duration, plural
from scheduled_events_agent.policy.typed_yaml import Problem
from scheduled_events_agent.simulator import (
    Scenario,
    SimulatedEvent,
    Simulator,
    SimulatorError,
    list_scenarios,
    load_scenario,
    rename_vms,
)
from scheduled_events_agent.simulator.azure import LogEntryKind
from scheduled_events_agent.simulator.control import Control
from scheduled_events_agent.simulator.recorder import REAL_ENDPOINT, record
from scheduled_events_agent.simulator.recording import SUFFIX, Recording, load_recording, rename_vm
from scheduled_events_agent.simulator.scenario import DEFAULT_SCENARIO, ScenarioError
from scheduled_events_agent.simulator.table import SimulatedTable
from scheduled_events_agent.status import NO_OPTIONS, SCHEMA_VERSION
from scheduled_events_agent.status.actions import command, quoted

_SHUTDOWN_DELAY_SECONDS = 3.0  # in which clients can still see that the last event is gone


class ListedScenario(msgspec.Struct, frozen=True, kw_only=True):
    """A shipped scenario."""

    name: str
    shows: str


class ScenarioList(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``simulate --list --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    scenarios: tuple[ListedScenario, ...]


class ScenarioCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``simulate --check --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    valid: bool
    errors: tuple[Problem, ...] = ()
    """In the order of the file."""
    steps: int | None = None
    """Of a scenario."""
    documents: int | None = None
    """Of a recording."""
    vms: tuple[str, ...] = ()


class SimulatorEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One of the first lines of ``simulate --json``: where something is served."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    kind: Literal["endpoint", "control", "table"]
    vm: str = ""
    vm_id: str = ""
    url: str


class SimulatorStart(msgspec.Struct, frozen=True, kw_only=True):
    """The line of ``simulate --json`` after those: what is simulated."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    kind: Literal["scenario"] = "scenario"
    name: str
    speed: float
    waits: bool
    """For the first request."""


class ShownSimulatedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated event as it is at that time."""

    id: str
    type: str
    status: str
    """Scheduled, Started, Gone."""
    source: str
    vms: tuple[str, ...]
    not_before: datetime
    approved_by: str
    """A VM or the portal."""
    outcome: str


class SimulatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Each further line of ``simulate --json``: what happens."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    """When it happened."""
    kind: LogEntryKind | Literal["end"]
    """end: the last line."""
    vm: str = ""
    """Whose request it was."""
    text: str = ""
    event: ShownSimulatedEvent | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``simulate``."""
    parser.description = (
        "Serves a scenario, or a recording of a real endpoint, as Azure's endpoint would, one loopback port for "
        "each VM of it, and prints what happens. Its time begins with the first request for a document."
    )
    _add_simulation_options(parser)
    recording = parser.add_argument_group("to record a real endpoint, and simulate nothing")
    recording.add_argument(
        "--record", type=Path, metavar="FILE", help="write its documents to a new FILE.jsonl until Ctrl-C"
    )
    recording.add_argument(
        "--from", dest="from_", metavar="URL", help="the endpoint (default: http://169.254.169.254)"
    )
    recording.add_argument("--for", dest="for_", metavar="DURATION", help="stop by itself after this, such as 2h")
    parser.set_defaults(handler=_run)


def _add_simulation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help="a shipped scenario, or the path of a .yaml file, or of a recording (.jsonl); "
        "default: platform-reboot, or with --control none",
    )
    parser.add_argument("--list", action="store_true", help="list the shipped scenarios")
    parser.add_argument(
        "--check", action="store_true", help="only check whether SCENARIO is valid; if not, exit with 2"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="N",
        help="let the scenario's time pass N times as fast (0.1 to 1000000); "
        "NotBefore stays right by the real clock",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of the first VM, the others follow (default: free ones)",
    )
    parser.add_argument(
        "--control",
        type=int,
        metavar="PORT",
        help="a port to schedule events manually: a page, and JSON (0: a free one); "
        "the simulator then ends with Ctrl-C only",
    )
    parser.add_argument(
        "--table",
        type=int,
        metavar="PORT",
        help="a port of a table for the policy's fleet, for agents on this machine; it accepts any signature "
        "(0: a free one; the simulator then ends with Ctrl-C only)",
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen on this address of the machine, 0.0.0.0 for all of them as in a container "
        "(default: 127.0.0.1, which other machines cannot reach)",
    )
    parser.add_argument(
        "--vm", action="append", default=[], metavar="NAME", help="call the first VM this; again for the next one"
    )
    parser.add_argument("--now", action="store_true", help="do not wait for the first request")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="write each request as a line of JSON")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def _run(arguments: argparse.Namespace) -> int:
    for name in arguments.vm:
        if not re.fullmatch(r"\S{1,128}", name):  # as in scenario files
            raise AgentError(f'--vm: expected a name without blanks; got "{name}"', kind="usage")
    if arguments.record:
        return _record(arguments)
    if arguments.from_ or arguments.for_:
        raise AgentError("--from and --for say what to record: name a file with --record", kind="usage")
    if arguments.list:
        _print_list(list_scenarios(), arguments.json)
        return 0
    if arguments.check:
        return _check(arguments.scenario, as_json=arguments.json)
    name = arguments.scenario or (None if arguments.control is not None else DEFAULT_SCENARIO)
    simulator = Simulator(
        scenario=_load(name, tuple(arguments.vm)) if name else None,
        vms=() if name else tuple(arguments.vm),
        speed=arguments.speed,
        port=arguments.port,
        bind=arguments.bind,
        begins_at_first_poll=not arguments.now,
        shutdown_delay_seconds=_SHUTDOWN_DELAY_SECONDS
        if arguments.control is None and arguments.table is None
        else math.inf,
        requests_file=arguments.requests,
    )
    with contextlib.suppress(KeyboardInterrupt), simulator, contextlib.ExitStack() as stack:
        more: dict[Literal["control", "table"], str] = {}
        if arguments.control is not None:
            more["control"] = stack.enter_context(Control(simulator, arguments.control, bind=arguments.bind)).url
        if arguments.table is not None:
            more["table"] = stack.enter_context(SimulatedTable(arguments.table, bind=arguments.bind)).url
        _warn_if_open(simulator, has_control="control" in more)
        endpoints = _endpoints(simulator, more)
        start = SimulatorStart(
            at=datetime.now(UTC), name=name or "", speed=simulator.speed, waits=not arguments.now
        )
        records = _records(simulator)
        if arguments.json:
            for line in chain(endpoints, [start], records):
                print_json(line, is_line=True)
        else:
            for text in _format_records(endpoints, start, records, Terminal.of(sys.stdout)):
                print(text, flush=True)
    return 0


def _warn_if_open(simulator: Simulator, *, has_control: bool) -> None:
    if simulator.is_open:
        more = "; through the control port they can schedule events and faults" if has_control else ""
        print(
            f"warning: clients on other machines can read and approve the simulated events{more}", file=sys.stderr
        )


def _load(name: str, vms: tuple[str, ...]) -> Scenario | Recording:
    if not name.endswith(SUFFIX):
        try:
            return rename_vms(load_scenario(name), vms)
        except ScenarioError as error:
            if not any(problem.message == 'unknown key "rules"' for problem in error.problems):
                raise
            text = "this is a policy; run and explain take it with --config"
            raise ScenarioError((*error.problems, Problem(file=name, message=text))) from error
    if len(vms) > 1:
        raise AgentError(f"--vm: a recording has 1 VM; got {len(vms)} names", kind="usage")
    recording = load_recording(name)
    return rename_vm(recording, vms[0]) if vms else recording


def _check(name: str | None, *, as_json: bool) -> int:
    if name is None:
        raise AgentError("--check: expected SCENARIO, the file to look at; got none", kind="usage")
    now = datetime.now(UTC)
    try:
        found = _load(name, ())
    except SimulatorError as error:
        if not as_json:
            raise
        problems: tuple[Problem, ...] = (Problem(file="", message=str(error)),)
        if isinstance(error, ScenarioError):
            problems = error.problems
        print_json(ScenarioCheck(at=now, valid=False, errors=problems))
        return exit_code(error)
    if isinstance(found, Scenario):
        counted = plural(len(found.timeline), "step")
        check = ScenarioCheck(at=now, valid=True, steps=len(found.timeline), vms=tuple(found.vms))
    else:
        counted = plural(len(found.documents), "document")
        check = ScenarioCheck(at=now, valid=True, documents=len(found.documents), vms=(found.origin.vm,))
    if as_json:
        print_json(check)
    else:
        print(printable(f"{name}: valid, with {counted} for {', '.join(check.vms)}"))
    return 0


def _record(arguments: argparse.Namespace) -> int:
    """Record the documents of a real endpoint, until Ctrl-C or the end of ``--for``."""
    if arguments.record.suffix != SUFFIX:
        raise AgentError(f"--record: expected a file that ends in {SUFFIX}; got {arguments.record}", kind="usage")
    stop_requested = threading.Event()
    if arguments.for_:
        try:
            seconds = parse_duration(arguments.for_)
        except ValueError as error:
            raise AgentError(f"--for: {error}", kind="usage") from None
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop_requested.set)
        timer.daemon = True
        timer.start()
    endpoint = arguments.from_ or REAL_ENDPOINT
    print(printable(f"records {endpoint} to {arguments.record}; Ctrl-C ends it"), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        record(
            endpoint,
            arguments.record,
            stop_requested,
            lambda at, text: print(f"{format_time(at)}  {printable(text)}", flush=True),
        )
    if arguments.record.read_bytes().count(b"\n") < 2:  # the first line says whose documents they are
        arguments.record.unlink()
        raise AgentError(f"{endpoint} has given nothing to record")
    print(f"recorded; play it with: {command(NO_OPTIONS, 'simulate', quoted(str(arguments.record)))}", flush=True)
    return 0


def _endpoints(simulator: Simulator, more: dict[Literal["control", "table"], str]) -> list[SimulatorEndpoint]:
    now = datetime.now(UTC)
    endpoints = [
        SimulatorEndpoint(at=now, kind="endpoint", vm=vm, vm_id=machine.id, url=simulator.endpoint(vm))
        for vm, machine in simulator.vms.items()
    ]
    return [*endpoints, *(SimulatorEndpoint(at=now, kind=kind, url=url) for kind, url in more.items())]


def _records(simulator: Simulator) -> Iterator[SimulatorRecord]:
    """The events of the simulator as they happen. The last line says that the scenario is finished."""
    for entry in simulator.stream():
        event = _event_of(entry.event) if entry.event else None
        yield SimulatorRecord(at=entry.at, kind=entry.kind, vm=entry.vm, text=entry.text, event=event)
    yield SimulatorRecord(at=datetime.now(UTC), kind="end")


def _event_of(event: SimulatedEvent) -> ShownSimulatedEvent:
    return ShownSimulatedEvent(
        id=event.id,
        type=event.plan.type,
        status=event.status,
        source=event.plan.source,
        vms=event.plan.vms,
        not_before=event.not_before_at,
        approved_by=event.approved_by,
        outcome=event.outcome,
    )


def _format_records(
    endpoints: Iterable[SimulatorEndpoint],
    start: SimulatorStart,
    records: Iterable[SimulatorRecord],
    terminal: Terminal,
) -> Iterator[str]:
    yield from terminal.table([_endpoint_row(endpoint) for endpoint in endpoints])
    pace = "" if start.speed == 1 else f", {start.speed:g} times as fast"
    when = "begins with the first request" if start.waits else "begins now"
    what = f"scenario {start.name} {when}" if start.name else "no scenario: use the control port"
    yield from terminal.line(f"{what}{pace}; Ctrl-C ends it")
    yield from terminal.table(_rows(records), widest=("99999.9s", "scheduled"), right=(0,))
    yield "the scenario is finished"


def _endpoint_row(endpoint: SimulatorEndpoint) -> tuple[Cell, Cell]:
    if endpoint.kind == "endpoint":
        return Cell(endpoint.vm), Cell(f"{endpoint.url}/metadata/scheduledevents")
    return Cell(endpoint.kind), Cell(endpoint.url)


def _rows(records: Iterable[SimulatorRecord]) -> Iterator[tuple[Cell, ...]]:
    began_at: datetime | None = None
    for one in records:
        if one.kind == "end":
            return
        began_at = began_at or one.at
        seconds = (one.at - began_at).total_seconds()
        what = {"began": "begins", "behaved": "behaves"}.get(one.kind, one.kind)
        yield Cell(f"{seconds:.1f}s"), Cell(what), Cell(_text_of(one))


def _text_of(record: SimulatorRecord) -> str:
    event = record.event
    if event is None:
        return "  ".join(part for part in (record.vm, record.text) if part)
    match record.kind:
        case "scheduled":
            not_before = format_time(event.not_before, record.at)
            more = f"{event.source}, for {', '.join(event.vms)}, not before {not_before}"
        case "polled":
            more = f"by {record.vm} for the first time"
        case "approved":
            more = f"by {record.vm}" + (f", {record.text}" if record.text else "")
        case "gone":
            more = event.outcome
        case _:
            more = record.text
    return f"{event.type} {event.id[:8]}  {more}".rstrip()


def _print_list(scenarios: dict[str, str], as_json: bool) -> None:
    if as_json:
        listed = tuple([ListedScenario(name=name, shows=shows) for name, shows in scenarios.items()])
        print_json(ScenarioList(at=datetime.now(UTC), scenarios=listed))
        return
    rows = [(Cell(name), Cell(shows)) for name, shows in scenarios.items()]
    print(*Terminal.of(sys.stdout).table(rows), sep="\n")
