"""``status``: shows what the agent does now, and why.

It only has the layout for people: texts come from ``status/messages.py``.
Invariant: if the agent itself did not answer, the first line says so.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
from msgspec.structs import replace

from scheduled_events_agent import __version__, host
from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.operator import as_typed, find_agent, find_state_dir, options_of, wait_for_answer
from scheduled_events_agent.cli.terminal import (
    Cell,
    Row,
    Style,
    Terminal,
    print_error,
    print_json,
    printable,
    warn_if_slow,
)
from scheduled_events_agent.policy.durations import format_deadline, format_elapsed, format_time, plural
from scheduled_events_agent.status import (
    NO_OPTIONS,
    ActivePolicy,
    Attention,
    CommandOptions,
    EventView,
    JournalRecord,
    Status,
    SuggestedCommand,
    Vm,
)
from scheduled_events_agent.status.actions import command, short_ids
from scheduled_events_agent.status.attention import NO_AGENT, exit_code
from scheduled_events_agent.status.events import to_status, with_output
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.status.messages import (
    duration_text,
    hook_time,
    operator_message,
    time_left,
)
from scheduled_events_agent.store import Store, StoreError, notified
from scheduled_events_agent.workflow import Workflow

_AGENT_IS_SLOW = "waits for the agent, which does not answer yet; gives up after twelve seconds"
_RELOAD_TIMEOUT_SECONDS = 15.0
_RELOAD_POLL_SECONDS = 0.1
# How many VMs of an event are named; there may be a hundred.
_SHOWN_NAMES = 8
# Lines of a failed hook's output.
_SHOWN_LINES = 3
_SHOWN_COLUMNS = 200
_INDENT = " " * 5
_PHASE_STYLES: dict[str, Style] = {
    "recovery_failed": "red", "held": "yellow", "started": "cyan", "recovering": "cyan", "approved": "green",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``status``."""
    parser.description = (
        "Asks the running agent for its status. First comes what needs a person, with the commands and the place "
        "of its section in the runbook; then each pending event: how long is left, what is done or waited for, "
        "and why. If no agent answers, shows the state file. Exit code 0: the agent is healthy; 1: it is not, or "
        "none answers; 2: wrong usage; 3: an operator must act on an event, also if no agent runs."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="print JSON: the answer of /status, or the state file if no agent answers",
    )
    form.add_argument(
        "--prepared",
        action="store_true",
        help="for a removal of the agent: print a line of the events that are prepared, and a line of the recover "
        "hooks that will not run without it; nothing if there is none. Only reads the state file",
    )
    add_state_options(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    reports: list[str] = []
    state_dir = find_state_dir(arguments, reports.append)
    if arguments.prepared:
        _report(reports)
        with closing(Store.open_readonly(state_dir)) as store:
            for line in prepared_lines(store.load_workflows()):
                print(printable(line))
        return 0
    status = _load(arguments, state_dir)
    if status.start_failure is None:  # it says the same, and more
        _report(reports)
    if arguments.json:
        print_json(status)
    else:
        terminal = Terminal.of(sys.stdout)
        with suppress(StoreError), closing(Store.open_readonly(state_dir)) as store:
            status = with_output(status, store.load_last_output)
        print(*_status(status, terminal), sep="\n")
    return exit_code(status)


def _report(lines: Sequence[str]) -> None:
    for line in lines:
        print_error(line)


def _with_start_failure(facts: Facts, arguments: argparse.Namespace, state_dir: Path) -> Facts:
    """The facts, with why no agent starts."""
    from scheduled_events_agent.cli.start_failure import PolicyFailure, find_start_failure  # noqa: PLC0415  # psutil, and what a start needs

    is_service = facts.command_options == NO_OPTIONS
    failure = find_start_failure(arguments.config, arguments.state_dir, state_dir, is_service=is_service)
    commands = facts.supervisor_commands
    if isinstance(failure, PolicyFailure):
        check = command(facts.command_options, "check")
        commands = (SuggestedCommand(command=check, effect="show all that is wrong with it"), *commands)
    return replace(facts, start_failure=failure, supervisor_commands=commands)


def _load(arguments: argparse.Namespace, state_dir: Path) -> Status:
    """The agent's status, or else that of its state file, and why no agent starts. Raises StoreError."""
    options = partial(options_of, arguments, state_dir)
    status = _ask_agent(state_dir)
    if isinstance(status, Status):
        return status
    unreadable: StoreError | None = None
    try:
        facts = _without_answer(state_dir, status, options())
    except StoreError as error:
        if status != NO_AGENT:
            raise
        unreadable = error
        facts = _without_state(NO_AGENT, options())
    if status == NO_AGENT:
        facts = _with_start_failure(facts, arguments, state_dir)
    if unreadable is not None and facts.start_failure is None:
        raise unreadable
    return to_status(facts)


def load_status(state_dir: Path, options: Callable[[], CommandOptions]) -> Status:
    """The agent's status, or else that of its state file. Raises StoreError if there is neither.

    ``options``: the command-line options in force, if no agent reports its own.
    """
    status = _ask_agent(state_dir)
    return status if isinstance(status, Status) else to_status(_without_answer(state_dir, status, options()))


def _ask_agent(state_dir: Path) -> Status | str:
    """The agent's status, or why there is none."""
    pid = find_agent(state_dir)
    if pid is None:
        return NO_AGENT
    with warn_if_slow(_AGENT_IS_SLOW):
        return ask_status(state_dir, pid)


def prepared_lines(workflows: Sequence[Workflow]) -> list[str]:
    """Two lines for a removal of the agent: prepared events, and recover hooks that will not run; or none."""
    prepared = [workflow for workflow in workflows if workflow.is_prepared_for]
    if not prepared:
        return []
    short = short_ids([workflow.event.id for workflow in prepared])
    events = [title(workflow.event.type, short[workflow.event.id]) for workflow in prepared]
    # A hook that several events share runs once for all of them.
    hooks = {
        hook: None
        for workflow in prepared
        for hook in workflow.decision.recover
        if hook not in workflow.recover.done
    }
    left = f"Without the agent these recover hooks will not run: {', '.join(hooks)}."
    return [
        f"Prepared and not recovered: {', '.join(events)}.",
        left if hooks else "No recover hook is left to run.",
    ]


def ask_status(state_dir: Path, pid: str) -> Status | str:
    """The answer of the running agent, or why there is none."""
    agent = f"the agent (pid {pid})"
    try:
        with closing(Store.open_client(state_dir)) as store:
            answer = wait_for_answer(store, store.add_status_request(datetime.now(UTC)))
    except StoreError as error:
        return f"{agent} cannot be asked: {error}"
    if answer is None:
        return f"{agent} does not answer"
    try:
        return parse_status(answer.message)
    except msgspec.MsgspecError:
        return f"{agent} is of another version than this program ({__version__}): restart it"


def keys_for_restart(state_dir: Path, hash_: str) -> tuple[str, ...]:
    """The keys of a policy that take effect at the next start, once the agent has read it again.

    ``state_dir`` and ``hash_`` are those of the policy. () also if the agent does not read it in time.
    """
    deadline = time.monotonic() + _RELOAD_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        pid = find_agent(state_dir)
        if pid is None:
            return ("agent.state_dir",)  # the agent that runs has its state elsewhere
        status = ask_status(state_dir, pid)
        if isinstance(status, Status) and status.policy and status.policy.hash == hash_:
            return status.policy.needs_restart
        time.sleep(_RELOAD_POLL_SECONDS)
    return ()


def parse_status(text: str) -> Status:
    """Parse the status of an agent that may be newer. Raises msgspec.MsgspecError.

    Unknown fields are removed first: the stored types in it forbid them.
    """
    known = _known_fields(msgspec.json.decode(text), msgspec.inspect.type_info(Status))
    return msgspec.convert(known, Status)


def _known_fields(value: Any, type_: msgspec.inspect.Type) -> Any:
    match type_:
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            types = {field.encode_name: field.type for field in fields}
            return {name: _known_fields(one, types[name]) for name, one in value.items() if name in types}
        case msgspec.inspect.VarTupleType(item_type=item_type) if isinstance(value, list):
            return [_known_fields(one, item_type) for one in value]
        case msgspec.inspect.UnionType(types=types_):
            for one in types_:
                value = _known_fields(value, one)
    return value


def start_command(options: CommandOptions) -> str:
    """The command that starts the agent: its service, or ``run`` with the options for another policy or state."""
    return host.supervisor_commands().start if options == NO_OPTIONS else command(options, "run")


def _commands_without_answer(options: CommandOptions, *, is_running: bool) -> Iterator[SuggestedCommand]:
    supervisor = host.supervisor_commands()
    is_service = options == NO_OPTIONS
    if not is_running:
        yield SuggestedCommand(command=start_command(options), effect="start it")
    elif is_service:
        yield SuggestedCommand(command=supervisor.status, effect="show whether it runs")
    if is_service:
        yield SuggestedCommand(command=supervisor.log, effect="show the end of its log")
    yield SuggestedCommand(command=command(options, "doctor"), effect="find the problem")


def _without_state(why: str, options: CommandOptions) -> Facts:
    """What is known if there is neither an agent that answers nor a state file that can be read."""
    is_running = why != NO_AGENT
    return Facts(
        at=datetime.now(UTC),
        source="state_file",
        faults=(why,),
        vm=Vm(names=(), vm_id=""),
        command_options=options,
        supervisor_commands=tuple(_commands_without_answer(options, is_running=is_running)),
    )


def _without_answer(state_dir: Path, why: str, options: CommandOptions) -> Facts:
    """What the state file says. Raises StoreError."""
    with closing(Store.open_readonly(state_dir)) as store:
        waiting = store.outbox.waiting()
        losses = store.load_losses()
        return replace(
            _without_state(why, options),
            state_file=str(store.path),
            state_since=store.created_at(),
            state_lost=store.load_unsettled_loss(),
            agent_log=tuple(store.load_last_start_and_stop()),
            vm=Vm(names=tuple(filter(None, [store.get_meta("vm_name")])), vm_id=store.get_meta("vm_id")),
            workflows=tuple(store.load_workflows()),
            notify=tuple([notified(name, waiting.get(name), losses.get(name)) for name in {**waiting, **losses}]),
        )


def _status(status: Status, terminal: Terminal) -> Iterator[str]:
    events = {event.key: event for event in status.events}
    shown: set[str] = set()
    for index, one in enumerate(status.attention):
        yield from [""] if index else []
        output: Sequence[str] = ()
        if one.kind in ("prepare_failed", "recovery_failed"):
            output = _output_of(events[one.key])
            shown.add(one.key)
        yield from _attention(one, output, status.at, terminal)
    if not status.attention:
        is_busy = any(event.affects in ("self", "shared") for event in status.events)
        yield from terminal.line(status.headline, "cyan" if is_busy else "green")
    short = short_ids([event.id for event in status.events])
    for event in status.events:
        yield ""
        yield from terminal.line(head(event, short[event.id], status.at), "bold")
        output = () if event.key in shown else _output_of(event)
        yield from terminal.rows(_format_event(event, status, output))
    yield from [""] if status.attention or status.events else []
    yield from terminal.rows(_rows(status) if status.source == "agent" else _last_known_rows(status))


def _output_of(event: EventView) -> list[str]:
    """The last lines that the last hook that failed wrote."""
    written = next((hook.output for hook in reversed(event.hooks) if hook.failure and hook.output), "")
    lines = [line.rstrip() for line in written.splitlines() if line.strip()]
    return [line[:_SHOWN_COLUMNS] for line in lines[-_SHOWN_LINES:]]


def _attention(one: Attention, lines: Sequence[str], now: datetime, terminal: Terminal) -> Iterator[str]:
    text = _with_time_left(f"{one.severity.upper()}  {one.message} {one.consequence}".rstrip(), one.deadline, now)
    yield from terminal.line(text, "red" if one.severity == "act" else "yellow", indent=len(_INDENT))
    for line in one.detail.splitlines():
        yield from terminal.line(f"{_INDENT}{line}", "dim", indent=len(_INDENT) + 2)
    for line in lines:
        yield from terminal.line(f"{_INDENT}| {line}", indent=len(_INDENT) + 2)
    rows = [(Cell(as_typed(each.command), "bold"), Cell(each.effect, "bold")) for each in one.commands]
    table = [*terminal.table(rows, indent=len(_INDENT))]
    if len(table) == len(rows):
        yield from table
    else:  # it is too wide for the window: each command in a line of its own
        for suggested in one.commands:
            yield from terminal.line(f"{_INDENT}{suggested.effect}:", "dim", indent=len(_INDENT))
            yield from terminal.line(f"{_INDENT}  {as_typed(suggested.command)}", "bold", indent=len(_INDENT) + 4)
    yield from terminal.line(f"{_INDENT}runbook {one.runbook}", "dim", indent=len(_INDENT))


def _with_time_left(text: str, deadline: datetime | None, now: datetime) -> str:
    """The text with the time that is left beside its deadline."""
    if deadline is None or deadline <= now:
        return text
    without, beside = format_time(deadline, now), format_deadline(deadline, now)
    return text.replace(without, beside, 1) if without in text else f"{text} Act before {beside}."


def _rows(status: Status) -> Iterator[Row]:
    now = status.at
    yield Row("vm", _vm(status.vm))
    if status.policy:
        yield from _policy_rows(status.policy, now)
    yield _last_poll(status)
    if status.recommendations_failure:
        yield Row("", status.recommendations_failure, "yellow")
    acts = "acts" if status.mode == "act" else "only observes"
    readiness = "ready" if status.ready else "not ready"
    since = f", since {_ago(status.started_at, now)}" if status.started_at else ""
    yield Row("agent", f"{acts}; {readiness} (/readyz); version {status.version}{since}")
    yield from _state_rows(status)
    for target in status.notify:
        if failure := target.failure:
            text = f"{target.name} has failed since {format_time(failure.since, now)}: {failure.reason}"
            yield Row("notify", f"{text}; notifications waiting: {target.waiting}", "yellow")
        if target.lost_at:
            since = format_time(target.lost_at, now)
            lost = f"{target.name}: {plural(target.lost, 'notification')} lost since {since}"
            yield Row("notify", f"{lost} ({target.lost_reason})", "yellow")
    if fleet := status.fleet:
        since = f" since {format_time(fleet.unavailable_since, now)}" if fleet.unavailable_since else ""
        error = f"; its store cannot be used{since}: {fleet.error}" if fleet.error else ""
        waiting_for = f"; waits for {', '.join(fleet.not_ready)}" if fleet.not_ready else ""
        yield Row("fleet", f"group {fleet.group or 'not known'}{error}{waiting_for}", "yellow" if error else "")
        for warning in fleet.warnings:
            yield Row("fleet", warning, "yellow")
    for held in status.holds:
        if not held.key:
            yield Row("held", f"{held.event_id}, by {held.user or 'an operator'}; not in the document", "yellow")
    for hook in status.on_clear:
        if hook.since:
            limit = (hook.until - hook.since).total_seconds() if hook.until else None
            label = "queued" if hook.state == "queued" else "runs"
            yield Row(label, f"the on_clear hook {hook.hook}, {hook_time(hook.since, limit, now)}", "cyan")


def _state_rows(status: Status) -> Iterator[Row]:
    if status.state_since:
        yield Row("state", f"since {_ago(status.state_since, status.at)}")


def _policy_rows(policy: ActivePolicy, now: datetime) -> Iterator[Row]:
    yield Row("policy", f"{policy.file}, read {_ago(policy.read_at, now)}")
    if policy.changed_at:
        yield Row("", f"changed at {format_time(policy.changed_at, now)}, not loaded: reload")
    for key in policy.needs_restart:
        yield Row("", f"{key}: needs a restart", "yellow")


def _last_known_rows(status: Status) -> Iterator[Row]:
    yield Row("vm", "".join(status.vm.names) or "its name is not known")
    if status.state_file:
        yield Row("source", f"the state file {status.state_file}, as no agent answers")
    yield from _state_rows(status)
    for record in status.agent_log:
        yield Row("agent", _start_or_stop(record, status.at))
    if status.faults == (NO_AGENT,) and status.agent_log and status.agent_log[-1].kind == "agent_started":
        why = "it was killed, the machine went down, or its disk was full"
        yield Row("", f"and did not say that it stopped: {why}", "yellow")
    for target in status.notify:
        yield Row("notify", f"{target.name}: notifications waiting: {target.waiting}")


def _format_event(event: EventView, status: Status, output: Sequence[str]) -> Iterator[Row]:
    if event.rule is None:
        yield Row("now", f"{event.activity}; {event.reason}")
    else:
        is_running = any(hook.state in ("queued", "running") for hook in event.hooks)
        yield Row("now", event.activity, "cyan" if is_running else _PHASE_STYLES.get(event.phase, ""))
        yield Row("reason", event.reason)
    if failures := [hook.failure for hook in event.hooks if hook.failure]:
        yield Row("failed", "; ".join(failures), "yellow")
        for line in output:
            yield Row("", f"| {line}")
    if operator := operator_message(event.operator, status.at):
        yield Row("operator", operator)
    yield from event_rows(event)
    shown = {one.command for needed in status.attention for one in needed.commands}
    label = "overrule"
    for one in event.commands:
        if one.command not in shown:
            yield Row(label, as_typed(one.command))
            label = ""


def _vm(vm: Vm) -> str:
    names = " or ".join(vm.names) or "its name is not known yet: no event can be matched to it"
    return f"{names} (vmId {vm.vm_id})" if vm.vm_id else names


def _last_poll(status: Status) -> Row:
    version = f" (api-version {status.api_version})" if status.api_version else ""
    where = f"{status.endpoint}{version}, document {status.incarnation or '(none yet)'}"
    if status.other_vm_events:
        concern = "concerns" if status.other_vm_events == 1 else "concern"
        where += f", {status.other_vm_events} of its events only {concern} other VMs"
    when = f"succeeded {_ago(status.last_poll_at, status.at)}" if status.last_poll_at else "none has succeeded"
    if status.poll_failure:
        return Row("last poll", f"failed: {status.poll_failure}; {when}; {where}", "yellow")
    return Row("last poll", f"{when}; {where}")


def _start_or_stop(record: JournalRecord, now: datetime) -> str:
    what = "started" if record.kind == "agent_started" else "stopped"
    text = f": {record.text}" if record.text else ""
    return f"{what} {_ago(record.at, now)}{text}"


def _ago(at: datetime, now: datetime) -> str:
    when = f" ({format_time(at, now)})" if (now - at).total_seconds() >= 60 else ""
    return f"{format_elapsed(at, now)} ago{when}"


def title(type_: str, id_: str) -> str:
    """A short title of an event, for lists; ``id_`` may be a beginning of its id."""
    return f"{type_ or 'event without a type'} {id_ or '(no id)'}"


def head(event: EventView, id_: str, now: datetime) -> str:
    """The event's title, and how long until it may start."""
    if event.outcome:
        return f"{title(event.type, id_)}: is over"
    return f"{title(event.type, id_)}: {time_left(event, now)}"


def event_rows(event: EventView) -> list[Row]:
    """Azure's description of the event, and the VMs that it names."""
    facts = [event.status or "no status", f"from {event.source}" if event.source else "", duration_text(event)]
    facts.append(f'"{event.description}"' if event.description else "")
    names = ", ".join(event.resources[:_SHOWN_NAMES]) or "no VM"
    if (more := len(event.resources) - _SHOWN_NAMES) > 0:
        names += f" and {more} more"
    others = "1 other" if len(event.resources) == 2 else f"{len(event.resources) - 1} others"
    named = {
        "self": "this VM only",
        "shared": f"this VM and {others}: {names}",
        "others": f"not this VM: {names}",
        "unknown": f"{names}; nothing says whether this one",
    }
    return [Row("event", ", ".join(filter(None, facts))), Row("names", named[event.affects])]
