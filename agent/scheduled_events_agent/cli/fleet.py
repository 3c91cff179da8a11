"""``fleet``: the slots and the readiness of the group's VMs, as its table has them."""

import argparse
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_config_option
from scheduled_events_agent.cli.diagnosis import Finding, failure, ok, warning
from scheduled_events_agent.cli.terminal import Row, Terminal, print_json, printable
from scheduled_events_agent.events import plain_name
from scheduled_events_agent.fleet.ledger import Ledger, LedgerError
from scheduled_events_agent.fleet.ledger import Row as LedgerRow
from scheduled_events_agent.fleet.rows import (
    event_key_in,
    is_held,
    key_of,
    partition_of_doctor,
    partition_of_slots,
    partition_of_vms,
    prefix_of,
    resources_of,
    time_of,
)
from scheduled_events_agent.fleet.table import connect, sas_doubts
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds import ImdsError, resolve_endpoint
from scheduled_events_agent.imds import connect as connect_imds
from scheduled_events_agent.policy import matches_glob
from scheduled_events_agent.settings import Settings, find_config, load_policy
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings
from scheduled_events_agent.status import SCHEMA_VERSION
from scheduled_events_agent.status.messages import clock

if TYPE_CHECKING:
    from scheduled_events_agent.fleet.table_ledger import TableLedger

_ID_SHOWN = 8
_SKEW_WARNING_SECONDS = 30.0  # slots are taken for half an hour
_AWAY = "check fleet.proxy, the look-up of the account's name, and the network rules of the storage account"
_ADVICE = {
    "unreachable": _AWAY,
    "timeout": _AWAY,
    "throttled": "run this again in a minute",
    "denied": "docs/fleet.md has the commands for the role and the signature; a new role counts after minutes",
    "missing": "docs/fleet.md has the command for the table",
    "bad_answer": "check fleet.table, and what else answers there",
    "setup": "correct it: until then the agent acts as if the table were away",
}


class FleetSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the group: one event at a time may be prepared for in it."""

    slot: str
    event_id: str
    """"" if it is free."""
    vm: str
    """That took it for the event."""
    until: datetime | None


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """How far the VMs of an event are."""

    event_id: str
    resources: tuple[str, ...]
    ready: tuple[str, ...]
    held: tuple[str, ...]
    back: tuple[str, ...]
    awaited: tuple[str, ...]
    """VMs that count and have not told anything."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What ``fleet status --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    group: str
    table: str
    max_events: int | None
    slots: tuple[FleetSlot, ...]
    events: tuple[FleetEvent, ...]
    clock_skew_seconds: float | None = None
    """How far this machine's clock is ahead of the table's; None if the table did not tell the time."""


class FleetRelease(msgspec.Struct, frozen=True, kw_only=True):
    """What ``fleet release --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    group: str
    event_id: str
    slots: tuple[str, ...]
    """That are free now."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fleet``."""
    parser.description = (
        "Asks the table of the policy's fleet, from any VM of the group; the agent need not run. status: which "
        "events have a slot, and which VMs are ready. release: frees the slot of an event whose VMs are all gone, "
        "so that the next event begins; while VMs say that they are out of service for it, give its full id. "
        "Exit code 1: the table cannot be used, or there is no such slot."
    )
    parser.add_argument("word", choices=("status", "release"), metavar="status|release", help="what to do")
    parser.add_argument("event", nargs="?", metavar="EVENT", help="release: the event's id, or its beginning")
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.word == "release") != bool(arguments.event):
        raise AgentError("expected: fleet status, or fleet release EVENT", kind="usage")
    loaded = load_policy(find_config(arguments.config, host.default_config_path()))
    settings = loaded.settings
    if settings.fleet is None:
        raise AgentError(f"{loaded.name} has no fleet", kind="usage")
    group = settings.fleet.group or _ask_group(settings)
    skew = None
    try:
        ledger = connect(settings.fleet, resolve_endpoint(settings.imds.endpoint))
        try:
            return _carry_out(arguments, settings.fleet, group, ledger)
        finally:
            skew = ledger.clock_skew_seconds
    except LedgerError as error:
        raise AgentError("; ".join(_explain(error, skew)), kind=error.kind) from error


def _carry_out(arguments: argparse.Namespace, fleet: FleetSettings, group: str, ledger: "TableLedger") -> int:
    now = datetime.now(UTC)
    if arguments.word == "release":
        event_id, slots = release(ledger, group, arguments.event, now)
        if arguments.json:
            print_json(FleetRelease(at=now, group=group, event_id=event_id, slots=slots))
        else:
            words = "slot" if len(slots) == 1 else "slots"
            print(printable(f"{words} {', '.join(slots)} of group {group} free: event {event_id} had it"))
        return 0
    status = look(ledger, group, fleet, now)
    status = msgspec.structs.replace(status, clock_skew_seconds=ledger.clock_skew_seconds)
    if arguments.json:
        print_json(status)
    else:
        print(*in_words(status, Terminal.of(sys.stdout)), sep="\n")
    return 0


def _ask_group(settings: Settings) -> str:
    try:
        group = connect_imds(settings.imds).fetch_identity().group
    except ImdsError as error:
        raise AgentError(f"the group is not known: {error}; name it as fleet.group") from error
    if not group:
        raise AgentError("this VM is in no scale set: name the group as fleet.group")
    return group


def examine(settings: Settings, fleet: FleetSettings, account: str | None) -> Finding:
    """Whether this VM can use the table: for ``doctor``. Writes a row there and deletes it.

    ``account``: the service's, if it is not this one.
    """
    given = fleet.credential if isinstance(fleet.credential, FleetCredential) else FleetCredential()
    if given.sas_file and os.path.lexists(given.sas_file):
        try:
            if fault := processes.access_fault(Path(given.sas_file), "read", account):
                return failure("fleet", fault, "let the account of the service read it")
        except host.HostError as error:
            return warning("fleet", str(error), "run this as root, or as the account of the service")
    try:
        group = fleet.group or _ask_group(settings)
    except AgentError as error:
        return failure("fleet", str(error), "give all VMs that act together the same fleet.group")
    partition = partition_of_doctor(group)
    key = key_of(settings.vm.name or socket.gethostname())
    skew = None
    try:
        ledger = connect(fleet, resolve_endpoint(settings.imds.endpoint))
        try:
            is_new = ledger.put_if_unchanged(partition, key, {"by": "doctor"}, "")
            ledger.put(partition, key, {"by": "doctor", "again": "yes"})
        finally:
            skew = ledger.clock_skew_seconds
            ledger.put(partition, key, None)
        ledger.list_rows(partition_of_slots(group))
    except LedgerError as error:
        return failure("fleet", *_explain(error, skew))
    if not is_new:
        return warning(
            "fleet", "another doctor that ran as this VM left its row", "run this again: the row is gone"
        )
    if told := _skew_in_words(skew):
        return warning("fleet", told, "synchronize the clock")
    if given.sas_file and (doubt := "; ".join(sas_doubts(Path(given.sas_file), datetime.now(UTC)))):
        return warning("fleet", doubt, "docs/fleet.md has the command for a new one")
    if (names := _own_names(settings, fleet)) and not any(matches_glob(name, fleet.expect) for name in names):
        text = f"expect does not match this VM, {names[0]}: the others approve before it is prepared"
        return warning("fleet", text, "correct fleet.expect, unless that is meant")
    return ok("fleet", f"group {group}: {fleet.table} can be read, written and deleted from")


def _own_names(settings: Settings, fleet: FleetSettings) -> tuple[str, ...]:
    """What Resources may call this VM; nothing if it is not known, or does not matter."""
    try:
        own = settings.vm.name or (fleet.expect != ("*",) and connect_imds(settings.imds).fetch_identity().name)
    except ImdsError:  # the check of the endpoint tells of it
        return ()
    return (own, *settings.vm.aliases) if own else ()


def _explain(error: LedgerError, skew: float | None) -> tuple[str, str]:
    """What is wrong, and the way out."""
    told = _skew_in_words(skew)
    if told and error.kind == "denied":
        return f"{error}; {told}", "synchronize the clock, and run this again"
    return "; ".join(filter(None, (str(error), told))), _ADVICE[error.kind]


def _skew_in_words(seconds: float | None) -> str:
    """How far the clocks differ, for which a token or a signature may be refused; "" if they are near enough."""
    if seconds is None or abs(seconds) < _SKEW_WARNING_SECONDS:
        return ""
    which = "ahead of" if seconds > 0 else "behind"
    return f"this clock is {abs(seconds):.0f} s {which} the table's"


def look(ledger: Ledger, group: str, fleet: FleetSettings, now: datetime) -> FleetStatus:
    """What the table has of a group. Raises LedgerError."""
    taken = _taken(ledger, group, now)
    names = {*(f"{number:03}" for number in range(fleet.max_events or 0)), *(row.key for row in taken)}
    slots = {key: FleetSlot(slot=key, event_id="", vm="", until=None) for key in names}
    slots |= {row.key: _slot(row) for row in taken}
    rows: dict[str, list[LedgerRow]] = {}
    for row in taken:
        rows.setdefault(row.content["event"], []).append(row)
    for row in ledger.list_rows(partition_of_vms(group)):
        rows.setdefault(event_key_in(row), []).append(row)
    events = [_event(key, rows[key], fleet.expect) for key in rows]
    return FleetStatus(
        at=now,
        group=group,
        table=fleet.table,
        max_events=fleet.max_events,
        slots=tuple([slots[key] for key in sorted(slots)]),
        events=tuple(events),
    )


def release(ledger: Ledger, group: str, prefix: str, now: datetime) -> tuple[str, tuple[str, ...]]:
    """Free the slots of the one event whose id begins so; its id, and the slots. Raises AgentError."""
    folded = prefix.casefold()
    taken = _taken(ledger, group, now)
    found = [row for row in taken if _slot(row).event_id.casefold().startswith(folded)]
    ids = {_slot(row).event_id for row in found}
    if len(ids) != 1:
        has = ", ".join(sorted({_slot(row).event_id for row in taken})) or "none"
        how_many = f"{len(ids)} events with a slot begin" if ids else "no event with a slot begins"
        raise AgentError(printable(f'{how_many} with "{prefix}"; events with one: {has}'))
    event_id = ids.pop()
    if folded != event_id.casefold() and (vms := _out_of_service(ledger, group, found)):
        give = f"to free it all the same, give the full id: {event_id}"
        raise AgentError(printable(f"{', '.join(vms)} may be out of service for this event; {give}"))
    for row in found:
        if not ledger.put_if_unchanged(partition_of_slots(group), row.key, {"event": ""}, row.version):
            raise AgentError(f"slot {row.key} has changed meanwhile: look at fleet status, and try again")
    return event_id, tuple(row.key for row in found)


def _out_of_service(ledger: Ledger, group: str, slots: list[LedgerRow]) -> list[str]:
    """The VMs that say they prepare for the events of these slots, or are ready, and not that they are back."""
    partition = partition_of_vms(group)
    keys = {slot.content["event"] for slot in slots}
    told = [row.content for key in keys for row in ledger.list_rows(partition, prefix_of(key))]
    return sorted({one.get("vm", "") for one in told if one.get("state") in ("ready", "held")})


def in_words(status: FleetStatus, terminal: Terminal) -> Iterator[str]:
    """The lines to show."""
    yield from terminal.line(f"Group {status.group}, in {status.table}", "bold")
    if skew := _skew_in_words(status.clock_skew_seconds):
        yield f"{skew[0].upper()}{skew[1:]}: slots may last longer or shorter than shown."
    if status.max_events is None:
        yield "The policy has no max_events: events begin without a slot."
    rows = []
    for slot in status.slots:
        until = clock(slot.until, status.at) if slot.until else "unknown"
        text = f"event {slot.event_id[:_ID_SHOWN]} of {slot.vm}, until {until}" if slot.event_id else "free"
        rows.append(Row(f"slot {slot.slot}", text))
    for event in status.events:
        states = {"ready": event.ready, "not ready": event.held, "back": event.back, "awaited": event.awaited}
        told = [f"{state}: {', '.join(names)}" for state, names in states.items() if names]
        rows.append(Row(f"event {event.event_id[:_ID_SHOWN]}", "; ".join(told) or "no VM of it counts"))
    if not status.events:
        rows.append(Row("events", "none"))
    yield from terminal.rows(rows)


def _taken(ledger: Ledger, group: str, now: datetime) -> list[LedgerRow]:
    return [row for row in ledger.list_rows(partition_of_slots(group)) if is_held(row, now)]


def _slot(row: LedgerRow) -> FleetSlot:
    content = row.content
    event_id = content.get("id") or content["event"]
    return FleetSlot(slot=row.key, event_id=event_id, vm=content.get("vm", ""), until=time_of(row, "until"))


def _event(key: str, rows: list[LedgerRow], expect: tuple[str, ...]) -> FleetEvent:
    """``rows``: of its slots, which have no state, and of its VMs."""
    states: dict[str, list[str]] = {"ready": [], "held": [], "back": []}
    for row in rows:
        states.get(row.content.get("state", ""), []).append(row.content.get("vm", ""))
    known = {plain_name(name) for names in states.values() for name in names}
    resources = tuple(dict.fromkeys([name for row in rows for name in resources_of(row)]))
    return FleetEvent(
        event_id=next(filter(None, (row.content.get("id") for row in rows)), key),
        resources=resources,
        ready=tuple(states["ready"]),
        held=tuple(states["held"]),
        back=tuple(states["back"]),
        awaited=tuple(
            [name for name in resources if matches_glob(name, expect) and plain_name(name) not in known]
        ),
    )
