"""``explain``: which rule takes each event, why, and what would happen when.

Owns the words for plans. The one invariant: a plan is not computed here but rehearsed with the agent's own state
machine, so that what ``explain`` says is what ``run`` does.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_config_option
from scheduled_events_agent.cli.plan import Plan, plan_rows
from scheduled_events_agent.cli.status import event_rows, head
from scheduled_events_agent.cli.terminal import Row, Terminal, print_json
from scheduled_events_agent.events import (
    Document,
    DocumentError,
    ScheduledEvent,
    Seen,
    parse_document,
    parse_event,
    plain_names,
)
from scheduled_events_agent.hook_times import KnownTimes, decode, may_take_seconds
from scheduled_events_agent.policy import Decision, Facts, decide, passed_over
from scheduled_events_agent.settings import Settings, find_config, load_settings, state_dir_of
from scheduled_events_agent.spelling import format_duration, parse_time
from scheduled_events_agent.status import SCHEMA_VERSION, Vm
from scheduled_events_agent.status.messages import clock, wait_in_words
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.workflow import (
    ApprovalAnswered,
    Approve,
    Context,
    Fleet,
    HookFinished,
    RunHook,
    Signal,
    Standing,
    Workflow,
    ask_gates,
    needed_seconds,
    needs_all,
    needs_slot,
    next_wake_at,
    proceed,
    workflow_id,
)


class PassedOver(msgspec.Struct, frozen=True, kw_only=True):
    """A rule above the one that took the event, and why it did not match."""

    rule: str
    reason: str


class ExpectedApproval(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the event would be approved."""

    answer: Literal["yes", "operator", "no"]
    at: datetime | None
    """When at the earliest; None unless ``answer`` is yes."""
    text: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What would be done about one event if every hook succeeded at once, and why."""

    event: ScheduledEvent
    decision: Decision
    passed_over: tuple[PassedOver, ...]
    begins_at: datetime | None
    """When preparation or approval would begin; None if neither would."""
    begins_reason: str
    """Why not at once; "" if at once."""
    needs_slot: bool
    """Whether it also waits for a slot of the fleet."""
    expected_approval: ExpectedApproval


class Explanations(msgspec.Struct, frozen=True, kw_only=True):
    """What ``explain --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    """The time that was assumed."""
    vm: Vm
    mode: Literal["act", "observe"]
    events: tuple[Explanation, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``explain``."""
    parser.description = "Tells what would be done about the events of a document, and why."
    parser.add_argument(
        "document",
        nargs="?",
        metavar="DOCUMENT",
        help="a file with a document or a single event; - for standard input (default: ask the metadata service)",
    )
    add_config_option(parser)
    parser.add_argument("--vm", metavar="NAME", help="this VM's name in Resources (default: vm.name, or ask)")
    parser.add_argument(
        "--at",
        metavar="TIME",
        type=_time,
        help="as if it were this time, such as 2022-04-11T22:12:00Z (default: now)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _time(text: str) -> datetime:
    try:
        return parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Life(NamedTuple):
    """How an event would go if every hook succeeded at once, until it would start."""

    workflow: Workflow
    context: Context
    """At its end."""
    begins_at: datetime | None
    approved_at: datetime | None


def _rehearse(event: ScheduledEvent, context: Context) -> _Life:
    begins_at = approved_at = None
    workflow = _not_followed(event, context)
    board: dict[str, Workflow] = {}
    signals: list[Signal] = [Seen(event)]
    while signals:
        progression = proceed(board, signals, context)
        for _, fault in progression.faults:
            raise fault
        board = progression.board
        workflow = next((one for one in board.values() if not one.is_over), workflow)
        signals = []
        for step in progression.steps:
            if begins_at is None and step.workflow.phase in ("preparing", "prepared"):
                begins_at = context.now
            for effect in step.effects:
                if isinstance(effect, RunHook):
                    signals.append(
                        HookFinished(
                            workflow_id=effect.workflow_id,
                            stage=effect.stage,
                            hook=effect.hook,
                            run=effect.run,
                            outcome="succeeded",
                        )
                    )
                elif isinstance(effect, Approve):
                    approved_at = context.now
                    signals.append(ApprovalAnswered(workflow_id=effect.workflow_id))
        wake_at = next_wake_at(board, context)
        if not signals and wake_at is not None:
            context = replace(context, now=wake_at, document_at=wake_at)
            signals = [Seen(event)]
    return _Life(workflow, context, begins_at, approved_at)


def _not_followed(event: ScheduledEvent, context: Context) -> Workflow:
    """What there is to say of a recommendation whose type no rule names."""
    now = context.now
    decision = decide(context.rules, context.windows, event, Facts(names=context.names, noticed_at=now))
    return Workflow(id="", event=event, decision=decision, first_seen_at=now, noticed_at=now, boot_id="")


def explain_event(
    settings: Settings, event: ScheduledEvent, names: tuple[str, ...], now: datetime, known_times: KnownTimes
) -> Explanation:
    """What would be done about an event that is first seen ``now``.

    ``known_times``: of earlier runs of the hooks; without them, their time limits count.
    """
    hooks = settings.hooks
    context = Context(
        now=now,
        names=names,
        rules=settings.rules,
        windows=settings.maintenance_windows,
        hooks=hooks,
        hook_seconds={name: may_take_seconds(known_times, name, hook) for name, hook in hooks.items()},
        reserve=settings.agent.reserve,
        boot_id="",
        document_at=now,
        fleet=_willing_fleet(settings, event, now),
    )
    life = _rehearse(event, context)
    decision = life.workflow.decision
    start = decision.start(event, now, needed_seconds(decision, life.context))
    facts = Facts(names=names, noticed_at=now)
    return Explanation(
        event=event,
        decision=decision,
        passed_over=tuple(
            PassedOver(rule=rule, reason=reason)
            for rule, reason in passed_over(settings.rules, decision.rule, event, facts)
        ),
        begins_at=life.begins_at,
        begins_reason=start.reason if life.begins_at is not None else "",
        needs_slot=life.context.fleet is not None and needs_slot(life.workflow, life.context.fleet),
        expected_approval=_approval(life, now),
    )


def _willing_fleet(settings: Settings, event: ScheduledEvent, now: datetime) -> Fleet | None:
    """A fleet that has a slot for the event, and in which all VMs are ready."""
    fleet = settings.fleet
    if fleet is None:
        return None
    ready = frozenset(plain_names(event.resources))
    standing = Standing(workflow=workflow_id(event.key, now), has_slot=True, ready=ready)
    return Fleet(max_events=fleet.max_events, expect=fleet.expect, standings={event.key: standing})


def _approval(life: _Life, now: datetime) -> ExpectedApproval:
    event = life.workflow.event
    decision = life.workflow.decision
    approved_at = life.approved_at
    if approved_at is not None:
        when = "at once" if approved_at == now else f"at {clock(approved_at, now)} at the earliest"
        if decision.approve == "when-prepared" and decision.prepare:
            count = len(decision.prepare)
            hooks = f"hook {decision.prepare[0]} has" if count == 1 else f"its {count} hooks have"
            text = f"approved as soon as {hooks} succeeded"
            text += "" if approved_at == now else f", {when}"
            text += ", and once the other VMs are ready" if needs_all(life.workflow) else ""
            fails = "a failed hook holds it" if decision.on_failure == "hold" else "even if a hook fails"
            return ExpectedApproval(answer="yes", at=approved_at, text=f"{text}; {fails}")
        return ExpectedApproval(answer="yes", at=approved_at, text=f"approved {when}")
    leave = ask_gates(life.workflow, life.context)
    if leave.answer == "not yet" and decision.approve == "manual":
        text = f"approved when an operator says so: scheduled-events-agent approve {event.id}"
        return ExpectedApproval(answer="operator", at=None, text=text)
    text = f"not approved: {wait_in_words(life.workflow, leave.waits)}"
    return ExpectedApproval(answer="no", at=None, text=text)


def _run(arguments: argparse.Namespace) -> int:
    settings = load_settings(find_config(arguments.config, host.default_config_path()))
    now = arguments.at or datetime.now(UTC).replace(microsecond=0)
    name = arguments.vm or settings.vm.name or ""
    hint = ""
    if arguments.document is None:
        from scheduled_events_agent.cli.events import fetch_document  # noqa: PLC0415  # httpx: half of this command's start

        document, client = fetch_document(settings)
        name = name or client.fetch_identity().name
    else:
        document = _read(arguments.document)
        if not name and (name := next((event.resources[0] for event in document.events if event.resources), "")):
            hint = " (the first in Resources; use --vm NAME for another)"
    names = tuple(filter(None, (name, *settings.vm.aliases)))
    known_times = _load_known_times(settings)
    explanations = [explain_event(settings, event, names, now, known_times) for event in document.events]
    if arguments.json:
        vm = Vm(names=names, vm_id="")
        mode = settings.agent.mode
        print_json(Explanations(at=now, vm=vm, mode=mode, events=tuple(explanations)))
        return 0
    print(f"This VM: {', also known as '.join(names) or 'not known'}{hint}. Time: {now:%Y-%m-%d %H:%M:%S}Z.")
    if settings.agent.mode == "observe":
        print("The agent's mode is observe: nothing of what follows would be done.")
    if not explanations:
        print("No event is pending.")
    terminal = Terminal.of(sys.stdout)
    for explanation in explanations:
        event = explanation.event
        print("", *terminal.line(head(event, event.id, now), "bold"), sep="\n")
        print(*terminal.rows(_rows(explanation, now)), sep="\n")
    return 0


def _load_known_times(settings: Settings) -> KnownTimes:
    """What the agent of this machine knows of its hooks; nothing if that cannot be read."""
    try:
        with closing(Store.look_into(state_dir_of(settings))) as store:
            return decode(store.load_fact("hook_times"))
    except StoreError:
        return {}


def _read(argument: str) -> Document:
    name = "standard input" if argument == "-" else argument
    try:
        body = sys.stdin.buffer.read() if argument == "-" else Path(argument).read_bytes()
    except OSError as error:
        raise AgentError(f"{name}: cannot be read: {error.strerror}", kind="usage") from error
    try:
        return parse_document(body)
    except DocumentError as error:
        try:
            return Document(incarnation="", events=(parse_event(body),))
        except DocumentError:
            raise AgentError(f"{name}: {error}", kind="document") from error


def _rows(explanation: Explanation, now: datetime) -> Iterator[Row]:
    event = explanation.event
    decision = explanation.decision
    begins_at = explanation.begins_at
    yield from event_rows(event, decision.affects)
    label = "rule"
    for passed in explanation.passed_over:
        yield Row(label, f"not {passed.rule}: {passed.reason}")
        label = ""
    yield Row(label, decision.reason)
    begins = ""
    if begins_at is not None and (decision.has_preparation or begins_at != now):
        begins = "now"
        if begins_at != now:
            begins = f"at {clock(begins_at, now)} ({explanation.begins_reason})"
        begins += ", once the fleet has a slot for it" if explanation.needs_slot else ""
    end = "once it is over"
    if event.is_recommendation:
        end += f", at the latest after {format_duration(decision.expire_after)}"
    yield from plan_rows(
        Plan(
            begins=begins,
            drain_for=decision.drain_for if begins_at is not None else 0.0,
            prepare=decision.prepare if begins_at is not None else (),
            on_start=decision.on_start,
            on_start_when="now, as it has started" if event.is_started else "once it has started",
            approve=explanation.expected_approval.text.removeprefix("approved "),
            recover=() if event.is_started else decision.recover,
            recover_when=end,
        )
    )
