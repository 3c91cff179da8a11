"""``status`` and ``events``: what the agent does now and why, and what Azure says now.

Owns the layout of both for people. Decides nothing: what is said comes from ``agent.status``. The one invariant:
what is said of the agent was said by the agent itself, or else the first line says that it was not.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import __version__
from agent.cli.operator import add_state_options, ask_agent, find_agent, find_state_dir, user_name
from agent.cli.terminal import FIRST_ANSWER_IS_SLOW, Row, Style, Terminal, View, print_json, remark_if_slow, watch

if TYPE_CHECKING:
    from agent.events import Document, ScheduledEvent
    from agent.status import CurrentEvents, JournalEntry, LastKnown, Status
    from agent.workflow import Workflow

_NO_AGENT = "no agent runs"
# Names of VMs that are shown of an event; there may be a hundred.
_SHOWN_NAMES = 8


def add_parsers(commands: Any) -> None:
    """Register ``status`` and ``events``."""
    status = commands.add_parser(
        "status",
        help="what the agent does now, and why",
        description="Asks the running agent how it is, and shows each pending event: how long is left, what is "
        "done or waited for, why, and the command to overrule that. If no agent answers, shows what the state "
        "file says. Exit code 0: the agent is healthy; 1: it is not, or none answers.",
    )
    _add_form(status, "print JSON: what /status answers, or what the state file says if no agent answers")
    add_state_options(status)
    status.set_defaults(handler=_run_status)

    events = commands.add_parser(
        "events",
        help="what Azure says now, readable",
        description="Asks the metadata service for the document and shows its events; beside each, what the agent "
        "makes of it if its state file can be read.",
    )
    events.add_argument(
        "--vm", metavar="NAME", help="this VM's name in Resources (default: as the agent knows it)"
    )
    _add_form(events, "print JSON")
    add_state_options(events)
    events.set_defaults(handler=_run_events)


def _add_form(parser: argparse.ArgumentParser, json_help: str) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help=json_help)
    form.add_argument(
        "--watch", action="store_true", help="look again each second; away from a terminal, print what changes"
    )


# --- status


def _run_status(arguments: argparse.Namespace) -> int:
    from agent.status import Status, quoted  # noqa: PLC0415 - as are the imports below: heavy, and --help does not need them

    state_dir = find_state_dir(arguments)
    options = " ".join(
        f"--{name} {quoted(value)}"
        for name, value in (("state-dir", arguments.state_dir), ("config", arguments.config))
        if value
    )
    if arguments.watch:
        watch(lambda terminal: _view_status(_look(state_dir), terminal, options))
        return 0
    seen = _look(state_dir)
    if arguments.json:
        print_json(seen)
    else:
        print(*_view_status(seen, Terminal.of(sys.stdout), options).lines, sep="\n")
    return 0 if isinstance(seen, Status) and seen.health == "ok" else 1


def _look(state_dir: Path) -> "Status | LastKnown":
    """What the agent says, or else its state file. Raises AgentError if there is neither."""
    pid = find_agent(state_dir)
    answer, problem = _ask(state_dir, pid) if pid is not None else (None, _NO_AGENT)
    return answer or _last_known(state_dir, problem)


def _ask(state_dir: Path, pid: str) -> "tuple[Status | None, str]":
    import msgspec  # noqa: PLC0415 - as above

    from agent.status import Status  # noqa: PLC0415
    from agent.store import Store, StoreError  # noqa: PLC0415

    class OtherVersion(msgspec.Struct):
        version: str

    agent = f"the agent (pid {pid})"
    try:
        store = Store.join(state_dir)
        try:
            answer = ask_agent(store, "", "status", user_name())
        finally:
            store.close()
    except StoreError as error:
        return None, f"{agent} cannot be asked: {error}"
    if answer is None:
        return None, f"{agent} does not answer"
    try:
        return msgspec.json.decode(answer, type=Status), ""
    except msgspec.MsgspecError:
        try:
            version = msgspec.json.decode(answer, type=OtherVersion).version
        except msgspec.MsgspecError:
            version = "unknown"
        way_out = "is the agent to be restarted after an upgrade?"
        return None, f"{agent} is of version {version}, and this program of {__version__}: {way_out}"


def _last_known(state_dir: Path, problem: str) -> "LastKnown":
    from agent.status import LastKnown, Vm  # noqa: PLC0415 - as above
    from agent.store import Store  # noqa: PLC0415

    store = Store.look_into(state_dir)
    try:
        return LastKnown(
            at=datetime.now(UTC),
            problem=problem,
            state_file=str(store.path),
            vm=Vm(names=tuple(filter(None, [store.load_fact("vm_name")])), vm_id=store.load_fact("vm_id")),
            notes=tuple(store.load_life()),
            pending=tuple(store.load_workflows()),
        )
    finally:
        store.close()


def _view_status(seen: "Status | LastKnown", terminal: Terminal, options: str) -> View:
    """``options``: what the commands that are shown need besides, to find the same agent."""
    from agent.status import Status  # noqa: PLC0415 - as above

    if isinstance(seen, Status):
        return _view_answer(seen, terminal, options)
    return _view_last_known(seen, terminal, options)


def _view_answer(status: "Status", terminal: Terminal, options: str) -> View:
    from agent.status import activity, by_urgency, short_ids, span, verdict, waits_for_operator, words_of_use  # noqa: PLC0415 - as above

    now, policy = status.at, status.policy
    problems = () if status.health == "ok" else status.health
    needs_somebody = policy.refused or any(
        workflow.phase == "held" or waits_for_operator(workflow) for workflow in status.pending
    )
    is_unrecovered = any(workflow.phase == "recovery_failed" for workflow in status.pending)
    style: Style = (
        "red" if problems or is_unrecovered else "yellow" if needs_somebody or not status.vm.names else "green"
    )
    rows = [Row("problem", problem, "red") for problem in problems]
    rows.append(Row("vm", _who(status)))
    rows.append(Row("policy", f"{policy.file}, read {_ago(policy.read_at, now)}"))
    if policy.refused:
        rows.append(Row("refused", f"the file as it is by now: {policy.refused}", "yellow"))
    rows.append(_last_poll(status))
    since = f"since {_ago(status.started_at, now)}"
    rows.append(
        Row("agent", f"version {status.version}, {since}; {'ready' if status.ready else 'not ready'} (/readyz)")
    )
    rows += [
        Row("runs", f"the on_clear hook {hook.hook}, {span(hook.since, now)} so far", "cyan")
        for hook in status.running_for("")
    ]
    lines = [*terminal.line(verdict(status), style), *terminal.rows(rows)]
    short = short_ids([workflow.event.id for workflow in status.pending])
    for workflow in by_urgency(status.pending):
        running = status.running_for(workflow.id)
        card = _card(
            workflow,
            terminal,
            at=now,
            short_id=short[workflow.event.id],
            doing=activity(workflow, running, now),
            is_busy=bool(running),
            overruling=words_of_use(status, workflow),
            options=options,
        )
        lines += ["", *card]
    essence = (
        bool(problems),
        status.version,
        status.started_at,
        status.vm,
        (status.mode, status.is_paused, status.ready),
        policy,
        status.poll_failure,
        status.running,
        status.pending,
    )
    return View(lines, essence)


def _view_last_known(seen: "LastKnown", terminal: Terminal, options: str) -> View:
    from agent.status import by_urgency, last_known_activity, pending_in_words, short_ids  # noqa: PLC0415 - as above

    rows = [
        Row("vm", "".join(seen.vm.names) or "its name is not known"),
        Row("source", f"what follows is what {seen.state_file} says"),
    ]
    rows += [Row("agent", _life(note, seen.at)) for note in seen.notes]
    runs = seen.problem != _NO_AGENT
    if not runs and seen.notes and seen.notes[-1].kind == "agent_started":
        why = "it was killed, the machine went down, or its disk was full"
        rows.append(Row("", f"and did not say that it stopped: {why}", "yellow"))
    rows.append(
        Row("next", f"{'' if runs else 'start it; '}scheduled-events-agent doctor looks for what is wrong")
    )
    lines = terminal.line(f"{seen.problem}; when last heard of, {pending_in_words(seen.pending)}", "red")
    lines += terminal.rows(rows)
    short = short_ids([workflow.event.id for workflow in seen.pending])
    for workflow in by_urgency(seen.pending):
        short_id, doing = short[workflow.event.id], last_known_activity(workflow)
        lines += ["", *_card(workflow, terminal, at=seen.at, short_id=short_id, doing=doing, options=options)]
    return View(lines, (seen.problem, seen.notes, seen.pending))


def _card(
    workflow: "Workflow",
    terminal: Terminal,
    *,
    at: datetime,
    short_id: str,
    doing: str,
    is_busy: bool = False,
    overruling: Iterable[str] = (),
    options: str,
) -> Iterator[str]:
    from agent.status import command  # noqa: PLC0415 - as above

    event, decision = workflow.event, workflow.decision
    styles: dict[str, Style] = {
        "recovery_failed": "red", "held": "yellow", "started": "cyan", "recovering": "cyan", "approved": "green",
    }  # fmt: skip
    style: Style = "cyan" if is_busy else styles.get(workflow.phase, "")
    yield from terminal.line(f"{_name(event, short_id)}: {_when(event, at, is_gone=workflow.is_gone)}", "bold")
    if decision.rule is None:
        rows = [Row("now", f"{doing}; {decision.reason}")]
    else:
        rows = [Row("now", doing, style), Row("rule", decision.reason.removeprefix("rule "))]
    stages = (workflow.prepare, workflow.on_start, workflow.recover)
    if failures := [stage.failure for stage in stages if stage.failure]:
        rows.append(Row("failed", "; ".join(failures), "yellow"))
        rows.append(Row("output", command("history --event", short_id, options)))
    if workflow.operator:
        rows.append(Row("operator", f"an operator has {workflow.operator} it"))
    rows.append(Row("event", _facts(event)))
    rows.append(Row("names", _names(event, decision.affects)))
    commands = [command(word, short_id, options) for word in overruling]
    label = "solve" if workflow.phase == "recovery_failed" else "overrule"
    rows += [Row("" if index else label, line) for index, line in enumerate(commands)]
    yield from terminal.rows(rows)


def _who(status: "Status") -> str:
    names = " or ".join(status.vm.names) or "its name is not known yet, so no event is taken for its own"
    return f"{names} (vmId {status.vm.vm_id})" if status.vm.vm_id else names


def _last_poll(status: "Status") -> Row:
    where = f"{status.endpoint}, document {status.incarnation or '(none yet)'}"
    if status.others_events:
        where += f", {status.others_events} of its events only concern other VMs"
    when = f"succeeded {_ago(status.last_poll_at, status.at)}" if status.last_poll_at else "none has succeeded"
    if status.poll_failure:
        return Row("last poll", f"failed: {status.poll_failure}; {when}; {where}", "yellow")
    return Row("last poll", f"{when}; {where}")


def _life(note: "JournalEntry", now: datetime) -> str:
    what = note.kind.removeprefix("agent_")
    return f"{what} {_ago(note.at, now)}{f': {note.text}' if note.text else ''}"


def _name(event: "ScheduledEvent", id_: str) -> str:
    return f"{event.type or 'event without a type'} {id_ or '(no id)'}"


def _when(event: "ScheduledEvent", now: datetime, *, is_gone: bool = False) -> str:
    from agent.status import clock, time_left  # noqa: PLC0415 - as above

    if is_gone:
        return "is over"
    left = time_left(event, now)
    return f"{left} ({clock(event.not_before, now)})" if event.not_before and not event.is_started else left


def _facts(event: "ScheduledEvent") -> str:
    from agent.status import lasting  # noqa: PLC0415 - as above

    parts = [event.status or "no status", f"from {event.source}" if event.source else "", lasting(event)]
    parts.append(f'"{event.description}"' if event.description else "")
    return ", ".join(filter(None, parts))


def _names(event: "ScheduledEvent", affects: str, ours: tuple[str, ...] = ()) -> str:
    """Whom it names, ourselves first (marked, if ``ours`` says which they are)."""
    names = sorted(event.resources, key=lambda name: name not in ours)
    shown = [f"{name} (this VM)" if name in ours else name for name in names[:_SHOWN_NAMES]]
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    listed = ", ".join(shown) + more
    match affects:
        case "self":
            return "this VM only" if not ours else listed
        case "shared":
            others = "1 other" if len(names) == 2 else f"{len(names) - 1} others"
            return f"this VM and {others}: {listed}" if not ours else listed
        case "others":
            return f"not this VM: {listed}"
        case _:
            return f"{listed or 'no VM'}; nothing says whether this one"


def _ago(at: datetime, now: datetime) -> str:
    from agent.status import clock, span  # noqa: PLC0415 - as above

    return (
        f"{span(at, now)} ago ({clock(at, now)})" if (now - at).total_seconds() >= 60 else f"{span(at, now)} ago"
    )


# --- events


def _run_events(arguments: argparse.Namespace) -> int:
    source = _Source(arguments)
    try:
        if arguments.watch:
            watch(lambda terminal: _view_events(source, terminal))
        elif arguments.json:
            print_json(_current_events(source))
        else:
            print(*_view_events(source, Terminal.of(sys.stdout)).lines, sep="\n")
    finally:
        source.close()
    return 0


class _Source:
    """Where events come from: the service for what there is, the agent's state file for what is made of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from agent import host  # noqa: PLC0415 - as above
        from agent.imds import ImdsClient, resolve_endpoint  # noqa: PLC0415
        from agent.settings import find_config, load_settings  # noqa: PLC0415

        settings = load_settings(find_config(arguments.config, host.default_config_path()))
        directory = arguments.state_dir or settings.agent.state_dir
        self._state_dir = Path(directory) if directory else host.default_state_dir()
        self._name = arguments.vm or settings.vm.name or ""
        self._aliases = settings.vm.aliases
        self.vm_id = ""
        """As the agent knows it; "" if it does not."""
        self._has_agent = self.agent_runs()
        imds = settings.imds
        self.endpoint = resolve_endpoint(imds.endpoint)
        self._client = ImdsClient(
            self.endpoint,
            api_version=imds.api_version,
            request_timeout=imds.request_timeout,
            # The very first answer may take minutes; an agent that runs has asked for it.
            first_request_timeout=0 if self._has_agent else imds.first_request_timeout,
        )

    def fetch(self) -> "Document":
        """One request. Raises AgentError."""
        from agent.events import parse_document  # noqa: PLC0415 - as above

        with nullcontext() if self._has_agent else remark_if_slow(FIRST_ANSWER_IS_SLOW):
            return parse_document(self._client.fetch())

    def load_workflows(self) -> "tuple[dict[str, Workflow], str]":
        """What the agent makes of the events, by key; and why that is not known, if so."""
        from agent.store import Store, StoreError  # noqa: PLC0415 - as above

        try:
            store = Store.look_into(self._state_dir)
            try:
                self._name = self._name or store.load_fact("vm_name")
                self.vm_id = store.load_fact("vm_id")
                return {w.event.key: w for w in store.load_workflows() if not w.is_gone}, ""
            finally:
                store.close()
        except StoreError as error:
            return {}, str(error)

    def agent_runs(self) -> bool:
        """Whether an agent is at work, as far as that can be told."""
        return find_agent(self._state_dir) is not None

    def names(self) -> tuple[str, ...]:
        """What Resources may call this VM; asked of the service (once) if neither policy nor state file knows."""
        self._name = self._name or self._client.fetch_identity().name
        return tuple(filter(None, (self._name, *self._aliases)))

    def close(self) -> None:
        self._client.close()


def _view_events(source: _Source, terminal: Terminal) -> View:
    from agent.status import activity, last_known_activity, lasting  # noqa: PLC0415 - as above

    now = datetime.now(UTC)
    document = source.fetch()
    workflows, trouble = source.load_workflows()
    runs = source.agent_runs()
    names = source.names()
    count = len(document.events)
    events = "no event" if not count else "1 event" if count == 1 else f"{count} events"
    who = " or ".join(names) or "a VM whose name is not known"
    lines = terminal.line(f"{events} in document {document.incarnation or '(no number)'}, seen from {who}", "bold")
    if trouble and count:
        lines += terminal.line(f"What the agent makes of them is not known: {trouble}", "dim")
    elif not runs:
        lines += terminal.line("No agent runs: what is told of it is what it wrote last", "red")
    for event in document.events:
        workflow = workflows.get(event.key)
        rows = [
            Row("status", f"{event.status or 'none'}{f', from {event.source}' if event.source else ''}"),
            Row("start", _when(event, now)),
            Row("lasts", lasting(event)),
            Row("names", _names(event, event.affects(names), _ours(event, names))),
            Row("says", f'"{event.description}"' if event.description else "nothing"),
        ]
        if workflow is not None:
            rule = f"rule {workflow.decision.rule}" if workflow.decision.rule else "no rule takes it"
            doing = activity(workflow, (), now) if runs else last_known_activity(workflow)
            rows.append(Row("agent", f"{rule}; {doing}", "cyan" if runs else ""))
        elif names and event.affects(names) == "others":
            rows.append(Row("agent", "counts it and no more: it only concerns other VMs"))
        elif not trouble:
            rows.append(Row("agent", "has not seen it (yet)" if runs else "had not seen it", "yellow"))
        lines += ["", *terminal.line(_name(event, event.id), "bold"), *terminal.rows(rows)]
    return View(lines, (document, names, tuple(workflows.values()), trouble, runs))


def _current_events(source: _Source) -> "CurrentEvents":
    from agent.status import CurrentEvent, CurrentEvents, Vm  # noqa: PLC0415 - as above

    document = source.fetch()
    workflows, trouble = source.load_workflows()
    names = source.names()
    return CurrentEvents(
        at=datetime.now(UTC),
        vm=Vm(names=names, vm_id=source.vm_id),
        incarnation=document.incarnation,
        agent_runs=source.agent_runs(),
        problem=trouble,
        events=tuple(
            CurrentEvent(event=event, affects=event.affects(names), workflow=workflows.get(event.key))
            for event in document.events
        ),
    )


def _ours(event: "ScheduledEvent", names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the event's resources that are this VM."""
    from msgspec.structs import replace  # noqa: PLC0415 - as above

    return tuple(name for name in event.resources if replace(event, resources=(name,)).affects(names) == "self")
