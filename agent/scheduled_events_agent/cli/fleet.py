"""``fleet``: shows the state of a group's VMs and events, from the records in the group's store."""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_config_option
from scheduled_events_agent.cli.config import find_config, load_trusted_policy
from scheduled_events_agent.cli.doctor_checks import Finding, failure, ok, warning
from scheduled_events_agent.cli.terminal import Row, Terminal, print_json, printable
from scheduled_events_agent.daemon.fleet import connect
from scheduled_events_agent.fleet.backend import Backend, BackendError, Record, plain_key
from scheduled_events_agent.fleet.credentials import sas_warnings
from scheduled_events_agent.fleet.plan import VmRecord, read_record
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds.client import Identity, ImdsError
from scheduled_events_agent.imds.client import connect as connect_imds
from scheduled_events_agent.policy.durations import format_rounded, format_time
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings, Settings
from scheduled_events_agent.status import SCHEMA_VERSION
from scheduled_events_agent.status.actions import short_ids
from scheduled_events_agent.workflow import ordinal

if TYPE_CHECKING:
    from scheduled_events_agent.fleet.table import TableBackend
    from scheduled_events_agent.kubernetes.leases import LeaseBackend

_SKEW_WARNING_SECONDS = 30.0  # a token or a signature that begins in the future is rejected
_STATES = ("requested", "claimed", "not_ready", "ready")
_KEEPS_SLOT = "a VM that runs the agent keeps its slot"
_UNAVAILABLE = "check fleet.proxy, the account's name in DNS, and the network rules of the storage account"
_ADVICE = {
    "unreachable": _UNAVAILABLE,
    "timeout": _UNAVAILABLE,
    "throttled": "run this again in a minute",
    "denied": "docs/fleet.md has the commands for the role and the signature; a new role counts after minutes",
    "not_found": "docs/fleet.md has the command for the table",
    "bad_response": "check fleet.table, and what else answers there",
    "setup": "correct it: until then the agent cannot use the store",
}
_ADVICE_ON_LEASES = {
    "unreachable": "check the server of the kubeconfig, and whether this machine reaches it",
    "timeout": "check the server of the kubeconfig, and whether this machine reaches it",
    "denied": "docs/fleet.md has the rights that the account needs",
    "not_found": "create the namespace, or correct fleet.leases",
    "bad_response": "check which server the kubeconfig names, and what else answers there",
}


class FleetVm(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a VM for an event."""

    name: str
    state: str
    """requested (wants to begin), claimed (checks whether it may), not_ready (has begun), ready, unknown."""
    slot: str
    """If it began without one: lacked, requested (waits for it to approve), claimed (checks whether it may)."""
    age_seconds: float | None
    """Of its record, by the store's clock."""
    waits_for: str
    """VMs, at most three of them by name."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the group, and its VMs."""

    event_id: str
    has_slot: bool
    """False also if it goes on without one."""
    position: int
    """In the line for a slot, from 1 on; 0: not in it."""
    not_before: datetime | None
    vms: tuple[FleetVm, ...]
    """Those with a record."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``fleet status --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    group: str
    table: str
    """The URL of the table; "" if the fleet has Leases."""
    leases: str
    """The namespace of the Leases; "" if the fleet has a table."""
    slots_taken: int
    """0 without ``max_events``."""
    max_events: int | None
    events: tuple[FleetEvent, ...]
    """With a slot, then waiting for one, in order."""
    warnings: tuple[str, ...]
    clock_skew_seconds: float | None
    """How far this machine's clock is ahead of the store's."""


class FleetRelease(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``fleet release --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    group: str
    event_id: str
    vms: tuple[FleetVm, ...]
    """Those whose records were deleted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fleet``."""
    parser.description = (
        "Asks the store of the policy's fleet, from any VM of the group; the agent need not run. status: which "
        "events have a slot or wait for one, and how far their VMs are. release: deletes the records of an event "
        "whose VMs are all silent, so that the next event begins. A VM that reboots for its event is silent too: "
        "release the event only if the VM does not come back. Exit code 1: the store cannot be used, there is no "
        "such event, or a VM of it is not silent."
    )
    parser.add_argument("action", choices=("status", "release"), metavar="status|release", help="what to do")
    parser.add_argument("event", nargs="?", metavar="EVENT", help="release: the event's full id (status --json)")
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.action == "release") != bool(arguments.event):
        raise AgentError("expected: fleet status, or fleet release EVENT", kind="usage")
    loaded = load_trusted_policy(find_config(arguments.config))
    settings = loaded.settings
    if settings.fleet is None:
        raise AgentError(f"{loaded.name} has no fleet", kind="usage")
    group = settings.fleet.group or _ask_group(settings)
    skew = None
    try:
        backend = connect(settings, settings.fleet, group)
        try:
            _carry_out(arguments, settings, settings.fleet, group, backend)
        finally:
            skew = backend.clock_skew_seconds
    except BackendError as error:
        raise AgentError("; ".join(_explain(error, skew, settings.fleet)), kind=error.kind) from error
    return 0


def _carry_out(
    arguments: argparse.Namespace,
    settings: Settings,
    fleet: FleetSettings,
    group: str,
    backend: "TableBackend | LeaseBackend",
) -> None:
    now = datetime.now(UTC)
    terminal = Terminal.of(sys.stdout)
    if arguments.action == "release":
        event_id, vms = release(backend, arguments.event)
        if arguments.json:
            print_json(FleetRelease(at=now, group=group, event_id=event_id, vms=vms))
        else:
            print(*terminal.line(f"Event {event_id} is released, the records of its VMs are deleted:"), sep="\n")
            print(*terminal.rows(map(_vm_row, vms)), sep="\n")
        return
    events = summarize(backend.list(), fleet.max_events)
    members_error = fleet.members_error(_own_names(settings, fleet))
    status = FleetStatus(
        at=now,
        group=group,
        table=fleet.table or "",
        leases=_namespace(fleet, backend),
        slots_taken=sum(event.has_slot for event in events),
        max_events=fleet.max_events,
        events=events,
        warnings=(members_error,) if members_error else (),
        clock_skew_seconds=backend.clock_skew_seconds,
    )
    if arguments.json:
        print_json(status)
    else:
        print(*format_status(status, terminal), sep="\n")


def _ask_identity(settings: Settings) -> Identity:
    """This VM, as the metadata service knows it. Raises ImdsError."""
    return connect_imds(settings.imds.endpoint, request_timeout=settings.imds.request_timeout).fetch_identity()


def _ask_group(settings: Settings) -> str:
    try:
        group = _ask_identity(settings).group
    except ImdsError as error:
        raise AgentError(f"the group is not known: {error}; name it as fleet.group") from error
    if not group:
        raise AgentError("this VM is in no scale set: name the group as fleet.group")
    return group


def _own_names(settings: Settings, fleet: FleetSettings) -> tuple[str, ...]:
    """The names by which Resources may call this VM; none if they are not known, or do not matter."""
    try:
        own = settings.vm.name or (fleet.members != ("*",) and _ask_identity(settings).name)
    except ImdsError:  # the check of the endpoint reports it
        return ()
    return (own, *settings.vm.aliases) if own else ()


def _explain(error: BackendError, skew: float | None, fleet: FleetSettings) -> tuple[str, str]:
    """The error, and a hint."""
    advice = _ADVICE if fleet.leases is None else _ADVICE | _ADVICE_ON_LEASES
    skew_message = _format_skew(skew)
    if skew_message and error.kind == "denied":
        return f"{error}; {skew_message}", "synchronize the clock, and run this again"
    return "; ".join(filter(None, (str(error), skew_message))), advice[error.kind]


def _namespace(fleet: FleetSettings, backend: "TableBackend | LeaseBackend") -> str:
    """The namespace of the Leases; "" for a table."""
    return "" if fleet.leases is None else cast("LeaseBackend", backend).namespace


def _place(table: str, leases: str) -> str:
    """The store, for people."""
    return table or f"Leases of the namespace {leases}"


def _format_skew(seconds: float | None) -> str:
    """How far the clocks differ; "" if it is little. With a large difference, a token or signature is rejected."""
    if seconds is None or abs(seconds) < _SKEW_WARNING_SECONDS:
        return ""
    which = "ahead of" if seconds > 0 else "behind"
    return f"this clock is {abs(seconds):.0f} s {which} the store's"


# --- status


def summarize(records: Iterable[Record], max_events: int | None) -> tuple[FleetEvent, ...]:
    """The events of a group as its records have them: those that have begun first, then those that wait."""
    events: dict[str, list[VmRecord]] = {}
    for record in records:
        one = read_record(record)
        events.setdefault(one.event, []).append(one)
    begun = _with(events, lambda one: one.has_begun)
    counting = list(dict.fromkeys([*begun, *_with(events, lambda one: one.counts_for_slot)]))
    waiting = [event for event in _with(events, lambda one: one.is_waiting) if event not in counting]
    shown = dict.fromkeys([*counting, *waiting, *_with(events, lambda _: True)])
    lacking = [event for event in begun if not any(one.has_slot for one in events[event])]
    with_slot = [event for event in counting if event not in lacking][: max_events or 0]
    return tuple(
        FleetEvent(
            event_id=events[event][0].event_id,
            has_slot=event in with_slot,
            position=waiting.index(event) + 1 if event in waiting else 0,
            not_before=_not_before(events[event]),
            vms=tuple(_vm(one) for one in events[event]),
        )
        for event in shown
    )


def _with(events: dict[str, list[VmRecord]], counts: Callable[[VmRecord], bool]) -> list[str]:
    """The events that have a record in this state, in the order in which events begin."""
    orders = {event: [one.order for one in ones if counts(one)] for event, ones in events.items()}
    return sorted((event for event in events if orders[event]), key=lambda event: min(orders[event]))


def _not_before(records: list[VmRecord]) -> datetime | None:
    try:
        return datetime.fromisoformat(min(one.order for one in records)[0])
    except ValueError:
        return None  # none of them has one


def _vm(one: VmRecord) -> FleetVm:
    state = one.state if one.state in _STATES else "unknown"
    return FleetVm(name=one.vm, state=state, slot=one.slot, age_seconds=one.record.age, waits_for=one.waits_for)


def format_status(status: FleetStatus, terminal: Terminal) -> Iterator[str]:
    """The lines to show."""
    slots = f": {status.slots_taken} of {status.max_events} slots taken" if status.max_events else ""
    yield from terminal.line(
        f"Group {status.group}, in {_place(status.table, status.leases)}{slots}", "bold", indent=2
    )
    if skew := _format_skew(status.clock_skew_seconds):
        yield from terminal.line(f"{skew[0].upper()}{skew[1:]}.", "yellow")
    for text in status.warnings:
        yield from terminal.line(text, "yellow")
    if status.max_events is None:
        yield from terminal.line("The policy has no max_events: events begin without a slot.")
    short = short_ids(event.event_id for event in status.events)
    for event in status.events:
        yield from terminal.rows([Row(f"event {short[event.event_id]}", _format_event(event, status))])
        yield from terminal.rows(map(_vm_row, event.vms), indent=4)
    if not status.events:
        yield from terminal.rows([Row("events", "none")])


def _format_event(event: FleetEvent, status: FleetStatus) -> str:
    parts = []
    if event.has_slot:
        parts.append("has a slot")
    elif event.position:
        parts.append(f"waits, {ordinal(event.position)} in line")
    elif any(vm.slot in ("requested", "claimed") for vm in event.vms):
        parts.append("waits for a slot to approve")
    elif status.max_events is not None:
        parts.append("without a slot")
    if event.not_before is not None:
        verb = "Azure starts it at" if event.not_before > status.at else "NotBefore was"
        parts.append(f"{verb} {format_time(event.not_before, status.at)}")
    return "; ".join(parts)


def _vm_row(vm: FleetVm) -> Row:
    heard = (
        "not known when it was heard" if vm.age_seconds is None else f"heard {format_rounded(vm.age_seconds)} ago"
    )
    waiting_for = f"; waits for {vm.waits_for}" if vm.waits_for else ""
    return Row(vm.name, f"{vm.state.replace('_', ' ')}, {heard}{waiting_for}")


# --- release


def release(backend: Backend, event_id: str) -> tuple[str, tuple[FleetVm, ...]]:
    """Delete the records of an event whose VMs are all silent. Returns its id, and these VMs.

    Raises AgentError; BackendError if the store cannot be used.
    """
    records = [read_record(record) for record in backend.list()]
    events = {one.event for one in records if one.event_id.casefold() == event_id.casefold()}
    if not events:
        known = ", ".join(sorted({one.event_id for one in records})) or "none"
        raise AgentError(printable(f'no event of the group has the id "{event_id}"; known are: {known}'))
    found = [one for one in records if one.event in events]
    for one in found:
        if one.record.age is None:
            text = f"the store does not tell when {one.vm} was heard"
            raise AgentError(printable(f"{text}: {_KEEPS_SLOT}"))
        if one.is_fresh:
            raise AgentError(printable(f"{one.vm} was heard {format_rounded(one.record.age)} ago: {_KEEPS_SLOT}"))
    deleted: list[str] = []
    for one in found:
        if not backend.delete(one.record.key, one.record.etag):
            done = f"; the records of {', '.join(deleted)} are deleted" if deleted else ""
            raise AgentError(printable(f"{one.vm} was heard at this moment: {_KEEPS_SLOT}{done}"))
        deleted.append(one.vm)
    return found[0].event_id, tuple(_vm(one) for one in found)


# --- doctor


def examine(settings: Settings, fleet: FleetSettings, account: str | None) -> Finding:
    """Whether this VM can use the store: for ``doctor``. Writes a record there and deletes it.

    ``account``: the service's, if it is not this one.
    """
    credential = fleet.credential if isinstance(fleet.credential, FleetCredential) else FleetCredential()
    if credential.sas_file and os.path.lexists(credential.sas_file):
        try:
            if problem := processes.find_access_error(Path(credential.sas_file), "read", account):
                return failure("fleet", problem, "let the account of the service read it")
        except host.HostError as error:
            return warning(
                "fleet", str(error), "run this as root or administrator, or as the account of the service"
            )
    try:
        group = fleet.group or _ask_group(settings)
    except AgentError as error:
        return failure("fleet", str(error), "give all VMs that act together the same fleet.group")
    skew = None
    try:
        backend = connect(settings, fleet, group, partition="doctor")
        try:
            found = _try_rights(backend, plain_key(settings.vm.name or socket.gethostname()))
        finally:
            skew = backend.clock_skew_seconds
    except BackendError as error:
        return failure("fleet", *_explain(error, skew, fleet))
    if problem := fleet.members_error(_own_names(settings, fleet)):
        return failure("fleet", problem, "correct fleet.members")
    if found is None:
        text = "another doctor that runs as this VM writes the same record"
        return warning("fleet", text, "run this again when it has ended")
    if found.age is None:
        text = "the store does not tell when a record was written: no VM counts as ready, or as silent"
        return warning("fleet", text, "keep proxies away that remove the header Date")
    if skew_message := _format_skew(skew):
        return warning("fleet", skew_message, "synchronize the clock")
    if credential.sas_file and (message := "; ".join(sas_warnings(Path(credential.sas_file), datetime.now(UTC)))):
        return warning("fleet", message, "docs/fleet.md has the command for a new one")
    place = _place(fleet.table or "", _namespace(fleet, backend))
    return ok("fleet", f"group {group}: {place} can be read, written and deleted from")


def _try_rights(backend: Backend, key: str) -> Record | None:
    """Create, update, list and delete a record, which is returned as listed; None if it was changed meanwhile."""
    for record in backend.list():
        if record.key == key:
            backend.delete(key, record.etag)  # a doctor that was killed has left it
    etag = backend.put(key, {"by": "doctor"}, "")
    try:
        if etag:
            etag = backend.put(key, {"by": "doctor", "again": "yes"}, etag) or ""
        return next((one for one in backend.list() if (one.key, one.etag) == (key, etag)), None)
    finally:
        if etag:
            backend.delete(key, etag)
