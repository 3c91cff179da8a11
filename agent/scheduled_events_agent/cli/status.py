"""``status``: what the agent does now, and why.

Owns the layout for people. Decides nothing: the words come from ``status/messages.py``. The one
invariant: what is said of the agent is its own answer, or else the first line says that it is not.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scheduled_events_agent import __version__, host
from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.operator import ask_agent, command_options, find_agent, find_state_dir, user_name
from scheduled_events_agent.cli.terminal import Row, Style, Terminal, print_json
from scheduled_events_agent.events import Affects, ScheduledEvent
from scheduled_events_agent.spelling import plural
from scheduled_events_agent.status import JournalEntry, LastKnown, ShownWorkflow, Status, Vm
from scheduled_events_agent.status.actions import command, short_ids, words_of_use
from scheduled_events_agent.status.messages import (
    activity,
    as_shown,
    by_urgency,
    clock,
    last_known_activity,
    lasting,
    pending_in_words,
    span,
    time_left,
    verdict,
    waits_for_operator,
)
from scheduled_events_agent.store import Store, StoreError

_NO_AGENT = "no agent runs"
# How many VMs of an event are named; there may be a hundred.
_SHOWN_NAMES = 8
_PHASE_STYLES: dict[str, Style] = {
    "recovery_failed": "red", "held": "yellow", "started": "cyan", "recovering": "cyan", "approved": "green",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``status``."""
    parser.description = (
        "Asks the running agent for its status, and shows each pending event: how long is left, what is done or "
        "waited for, why, and the command to overrule that. If no agent answers, shows what the state file says. "
        "Exit code 0: the agent is healthy; 1: it is not, or none answers."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: what /status answers, or what the state file says if no agent answers",
    )
    add_state_options(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    state_dir = find_state_dir(arguments)
    seen = _look(state_dir)
    if arguments.json:
        print_json(seen)
    else:
        terminal = Terminal.of(sys.stdout)
        if isinstance(seen, Status):
            shown = _status(seen, terminal)
        else:
            shown = _known(seen, terminal, _options(arguments, state_dir))
        print(*shown, sep="\n")
    return 0 if isinstance(seen, Status) and seen.health == "ok" else 1


def _options(arguments: argparse.Namespace, state_dir: Path) -> str:
    """What commands need to find this state file, of which no agent says so itself."""
    from scheduled_events_agent.settings import find_config  # noqa: PLC0415  # 25 ms, most of it PyYAML's

    return command_options(
        arguments.state_dir, find_config(arguments.config, host.default_config_path()), state_dir
    )


def _look(state_dir: Path) -> Status | LastKnown:
    """What the agent says, or else its state file. Raises AgentError if there is neither."""
    pid = find_agent(state_dir)
    answer = _NO_AGENT if pid is None else ask_status(state_dir, pid)
    return answer if isinstance(answer, Status) else _last_known(state_dir, answer)


def ask_status(state_dir: Path, pid: str) -> Status | str:
    """The answer of the agent that runs there, or why there is none."""
    agent = f"the agent (pid {pid})"
    try:
        with closing(Store.join(state_dir)) as store:
            answer = ask_agent(store, "", "status", user_name())
    except StoreError as error:
        return f"{agent} cannot be asked: {error}"
    if answer is None:
        return f"{agent} does not answer"
    try:
        return msgspec.json.decode(answer, type=Status)
    except msgspec.MsgspecError:
        return f"{agent} is of another version than this program ({__version__}): restart it"


def _last_known(state_dir: Path, problem: str) -> LastKnown:
    with closing(Store.look_into(state_dir)) as store:
        return LastKnown(
            at=datetime.now(UTC),
            problem=problem,
            state_file=str(store.path),
            vm=Vm(names=tuple(filter(None, [store.load_fact("vm_name")])), vm_id=store.load_fact("vm_id")),
            notes=tuple(store.load_life()),
            pending=tuple(map(as_shown, store.load_workflows())),
        )


def _status(status: Status, terminal: Terminal) -> Iterator[str]:
    yield from terminal.line(verdict(status), _style(status))
    yield from terminal.rows(_rows(status))
    yield from _cards(status, terminal, status.command_options)


def _style(status: Status) -> Style:
    if status.health != "ok" or any(workflow.phase == "recovery_failed" for workflow in status.pending):
        return "red"
    needs_operator = any(workflow.phase == "held" or waits_for_operator(workflow) for workflow in status.pending)
    is_other_policy = bool(status.policy.refused or status.policy.needs_restart)
    return "yellow" if needs_operator or is_other_policy or not status.vm.names else "green"


def _rows(status: Status) -> Iterator[Row]:
    now = status.at
    policy = status.policy
    for problem in () if status.health == "ok" else status.health:
        yield Row("problem", problem, "red")
    yield Row("vm", _vm(status.vm))
    yield Row("policy", f"{policy.file}, read {_ago(policy.read_at, now)}")
    if policy.refused:
        yield Row("refused", f"the file as it is now: {policy.refused}", "yellow")
    for key in policy.needs_restart:
        yield Row("", f"{key}: needs a restart", "yellow")
    yield _last_poll(status)
    if status.recommendations_failure:
        yield Row("", status.recommendations_failure, "yellow")
    readiness = "ready" if status.ready else "not ready"
    yield Row("agent", f"version {status.version}, since {_ago(status.started_at, now)}; {readiness} (/readyz)")
    for target in status.notify:
        if failure := target.failure:
            text = f"{target.name} has failed since {clock(failure.since, now)}: {failure.reason}"
            yield Row("notify", f"{text}; notices waiting: {target.waiting}", "yellow")
        if target.lost_at:
            lost = f"{target.name}: {plural(target.lost, 'notification')} lost since {clock(target.lost_at, now)}"
            yield Row("notify", f"{lost} ({target.lost_reason})", "yellow")
    if fleet := status.fleet:
        since = f" since {clock(fleet.away_since, now)}" if fleet.away_since else ""
        away = f"; its table cannot be used{since}: {fleet.failure}" if fleet.failure else ""
        awaited = f"; waits for {', '.join(fleet.awaited)}" if fleet.awaited else ""
        yield Row("fleet", f"group {fleet.group or 'not known'}{away}{awaited}", "yellow" if away else "")
    present = {workflow.event.key for workflow in status.pending if not workflow.is_over}
    for held in status.holds:
        if held.event_id not in present:
            yield Row("held", f"{held.event_id}, by {held.user or 'an operator'}; not in the document", "yellow")
    for hook in status.running_for(""):
        yield Row("runs", f"the on_clear hook {hook.hook}, {span(hook.since, now)} so far", "cyan")


def _known(seen: LastKnown, terminal: Terminal, options: str) -> Iterator[str]:
    rows = [
        Row("vm", "".join(seen.vm.names) or "its name is not known"),
        Row("source", f"what follows is what {seen.state_file} says"),
    ]
    rows += [Row("agent", _life(note, seen.at)) for note in seen.notes]
    runs = seen.problem != _NO_AGENT
    if not runs and seen.notes and seen.notes[-1].kind == "agent_started":
        why = "it was killed, the machine went down, or its disk was full"
        rows.append(Row("", f"and did not say that it stopped: {why}", "yellow"))
    look = "scheduled-events-agent doctor looks for what is wrong"
    rows.append(Row("next", look if runs else f"start it; {look}"))
    yield from terminal.line(f"{seen.problem}; when last heard of, {pending_in_words(seen.pending)}", "red")
    yield from terminal.rows(rows)
    yield from _cards(seen, terminal, options)


def _cards(seen: Status | LastKnown, terminal: Terminal, options: str) -> Iterator[str]:
    """``options``: what the commands that are shown need to find the same agent."""
    short = short_ids([workflow.event.id for workflow in seen.pending])
    for workflow in by_urgency(seen.pending):
        short_id = short[workflow.event.id]
        yield ""
        yield from terminal.line(head(workflow.event, short_id, seen.at, is_over=workflow.is_over), "bold")
        yield from terminal.rows(_card(workflow, seen, short_id, options))


def _card(workflow: ShownWorkflow, seen: Status | LastKnown, short_id: str, options: str) -> Iterator[Row]:
    decision = workflow.decision
    style = _PHASE_STYLES.get(workflow.phase, "")
    words: Iterable[str] = ()
    if isinstance(seen, Status):
        running = seen.running_for(workflow.id)
        doing = activity(workflow, running, seen.at)
        words = words_of_use(seen, workflow)
        style = "cyan" if running else style
    else:
        doing = last_known_activity(workflow)
    if decision.rule is None:
        yield Row("now", f"{doing}; {decision.reason}")
    else:
        yield Row("now", doing, style)
        yield Row("rule", decision.reason.removeprefix("rule "))
    stages = (workflow.prepare, workflow.on_start, workflow.recover)
    if failures := [stage.failure for stage in stages if stage.failure]:
        yield Row("failed", "; ".join(failures), "yellow")
        yield Row("output", command("history --event", short_id, options))
    if workflow.operator:
        yield Row("operator", f"an operator has {workflow.operator} it")
    yield from event_rows(workflow.event, decision.affects)
    label = "solve" if workflow.phase == "recovery_failed" else "overrule"
    for word in words:
        yield Row(label, command(word, short_id, options))
        label = ""


def _vm(vm: Vm) -> str:
    names = " or ".join(vm.names) or "its name is not known yet, so the agent takes no event for it"
    return f"{names} (vmId {vm.vm_id})" if vm.vm_id else names


def _last_poll(status: Status) -> Row:
    version = f" (api-version {status.api_version})" if status.api_version else ""
    where = f"{status.endpoint}{version}, document {status.incarnation or '(none yet)'}"
    if status.others_events:
        concern = "concerns" if status.others_events == 1 else "concern"
        where += f", {status.others_events} of its events only {concern} other VMs"
    when = f"succeeded {_ago(status.last_poll_at, status.at)}" if status.last_poll_at else "none has succeeded"
    if status.poll_failure:
        return Row("last poll", f"failed: {status.poll_failure}; {when}; {where}", "yellow")
    return Row("last poll", f"{when}; {where}")


def _life(note: JournalEntry, now: datetime) -> str:
    what = note.kind.removeprefix("agent_")
    text = f": {note.text}" if note.text else ""
    return f"{what} {_ago(note.at, now)}{text}"


def _ago(at: datetime, now: datetime) -> str:
    when = f" ({clock(at, now)})" if (now - at).total_seconds() >= 60 else ""
    return f"{span(at, now)} ago{when}"


def title(event: ScheduledEvent, id_: str) -> str:
    """How lists call the event; ``id_`` may be a beginning of its id."""
    return f"{event.type or 'event without a type'} {id_ or '(no id)'}"


def head(event: ScheduledEvent, id_: str, now: datetime, *, is_over: bool = False) -> str:
    """The event's title, and how long until it may start."""
    if is_over:
        return f"{title(event, id_)}: is over"
    left = time_left(event, now)
    if event.not_before and not event.is_started:
        left += f" ({clock(event.not_before, now)})"
    return f"{title(event, id_)}: {left}"


def event_rows(event: ScheduledEvent, affects: Affects) -> list[Row]:
    """What Azure says of the event, and the VMs that it names."""
    facts = [event.status or "no status", f"from {event.source}" if event.source else "", lasting(event)]
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
    return [Row("event", ", ".join(filter(None, facts))), Row("names", named[affects])]
