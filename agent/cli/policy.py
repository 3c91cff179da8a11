"""``check`` and ``explain``: is the policy file right, and what would be done about which event.

Owns the words in which policies and plans are told to people. The one invariant: a plan is not computed here
but rehearsed with the agent's own state machine, so that what ``explain`` says is what ``run`` does.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Literal

import msgspec

from agent import AgentError
from agent.cli import add_config_option
from agent.cli.run import refuse_exposed
from agent.cli.terminal import FIRST_ANSWER_IS_SLOW, print_json, remark_if_slow
from agent.events import Document, DocumentError, ScheduledEvent, Seen, parse_document, parse_event
from agent.hook_times import KnownTimes, decode, may_take_seconds
from agent.policy import Decision, Facts, Rule, When, mismatch
from agent.settings import (
    BUILT_IN_NAME,
    ConfigError,
    Loaded,
    Settings,
    find_config,
    load_policy,
)
from agent.settings.files import check_files
from agent.settings.schema import policy_schema
from agent.status import SCHEMA_VERSION, Vm
from agent.typed_yaml import format_duration
from agent.workflow import (
    ApprovalAnswered,
    Approve,
    Context,
    HookFinished,
    RunHook,
    Signal,
    Workflow,
    ask_gates,
    needed_seconds,
    next_wake_at,
    proceed,
)

_MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
_WIDTH = 110


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``check`` and ``explain``."""
    check = commands.add_parser(
        "check",
        help="is the policy file right?",
        description="Checks the policy file and tells what it says. Exit code 0: valid; 2: not valid.",
    )
    add_config_option(check)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--schema", action="store_true", help="print the JSON schema of policy files, for editors")
    check.set_defaults(handler=_run_check)

    explain = commands.add_parser(
        "explain",
        help="which rule takes each event, why, and what would happen when",
        description="Tells what would be done about the events of a document, and why.",
    )
    explain.add_argument(
        "document",
        nargs="?",
        metavar="DOCUMENT",
        help="a file with a document or a single event; - for standard input (default: ask the metadata service)",
    )
    add_config_option(explain)
    explain.add_argument("--vm", metavar="NAME", help="this VM's name in Resources (default: vm.name, or ask)")
    explain.add_argument(
        "--at",
        metavar="TIME",
        type=_parse_time,
        help="as if it were this time, such as 2022-04-11T22:12:00Z (default: now)",
    )
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(handler=_run_explain)


# --- What would happen, as values.


class PassedOver(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that stands above the one that took the event, and why it did not."""

    rule: str
    reason: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Something that would happen, and when at the earliest."""

    at: datetime
    text: str


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
    moments: tuple[Moment, ...]
    expected_approval: ExpectedApproval


class Explanations(msgspec.Struct, frozen=True, kw_only=True):
    """What ``explain --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    """The time that was assumed."""
    vm: Vm
    mode: Literal["act", "observe"]
    events: tuple[Explanation, ...]


def explain_event(
    settings: Settings,
    event: ScheduledEvent,
    names: tuple[str, ...],
    now: datetime,
    known_times: KnownTimes | None = None,
) -> Explanation:
    """Rehearse the life of an event that is first seen ``now``, until it would start.

    ``known_times``: of earlier runs of the hooks; without them, their time limits count.
    """
    context = Context(
        now=now,
        names=names,
        rules=settings.rules,
        windows=settings.maintenance_windows,
        hooks=settings.hooks,
        hook_seconds={
            name: may_take_seconds(known_times or {}, name, hook) for name, hook in settings.hooks.items()
        },
        reserve=settings.agent.reserve,
        boot_id="",
        document_at=now,
    )
    board: dict[str, Workflow] = {}
    signals: list[Signal] = [Seen(event)]
    moments: list[Moment] = []
    begins_at = approved_at = None
    while signals:
        progression = proceed(board, signals, context)
        for _, fault in progression.faults:
            raise fault
        board, signals = progression.board, []
        for step in progression.steps:
            moments.extend(
                Moment(at=context.now, text=note.text)
                for note in step.notes
                if note.kind not in ("seen", "decided", "hook_finished", "approved")
            )
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
            context = msgspec.structs.replace(context, now=wake_at, document_at=wake_at)
            signals = [Seen(event)]
    workflow = next(iter(board.values()))
    decision = workflow.decision
    facts = Facts(names=names, noticed_at=now)
    start = decision.start(event, now, needed_seconds(decision, context))
    return Explanation(
        event=event,
        decision=decision,
        passed_over=tuple(_passed_over(settings.rules, decision, event, facts)),
        begins_at=begins_at,
        begins_reason=start.reason if begins_at is not None else "",
        moments=tuple(moments),
        expected_approval=_approval(workflow, context, approved_at, now),
    )


def _passed_over(
    rules: Iterable[Rule], decision: Decision, event: ScheduledEvent, facts: Facts
) -> Iterable[PassedOver]:
    for rule in rules:
        if rule.name == decision.rule:
            return
        yield PassedOver(rule=rule.name, reason=mismatch(rule.when, event, facts) or "")


def _approval(
    workflow: Workflow, context: Context, approved_at: datetime | None, now: datetime
) -> ExpectedApproval:
    event, decision = workflow.event, workflow.decision
    if approved_at is not None:
        when = "at once" if approved_at == now else f"at {_clock(approved_at, now)} at the earliest"
        if decision.approve == "when-prepared" and decision.prepare:
            count = len(decision.prepare)
            hooks = f"hook {decision.prepare[0]} has" if count == 1 else f"its {count} hooks have"
            text = f"approved as soon as {hooks} succeeded"
            text += "" if approved_at == now else f", {when}"
            fails = "a failed hook holds it" if decision.on_failure == "hold" else "even if a hook fails"
            return ExpectedApproval(answer="yes", at=approved_at, text=f"{text}; {fails}")
        return ExpectedApproval(answer="yes", at=approved_at, text=f"approved {when}")
    leave = ask_gates(workflow, context)
    if leave.answer == "not yet" and decision.approve == "manual":
        text = f"approved when an operator says so: scheduled-events-agent approve {event.id}"
        return ExpectedApproval(answer="operator", at=None, text=text)
    text = f"not approved: {leave.reason}"
    if event.status == "Scheduled":
        text += "; it may start at any moment"
        if event.not_before is not None and event.not_before > now:
            text = f"not approved: {leave.reason}; Azure starts it at {_clock(event.not_before, now)}"
    return ExpectedApproval(answer="no", at=None, text=text)


# --- check


def _run_check(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        print(json.dumps(policy_schema(), indent=2))
        return 0
    try:
        loaded = _load(arguments.config)
        refuse_exposed(loaded)
    except ConfigError as error:
        if arguments.json:
            print(json.dumps({"valid": False, "problems": error.problems, "warnings": []}, indent=2))
        else:
            count = len(error.problems)
            print(*error.problems, f"not valid: {count} problem{'s' if count > 1 else ''}", sep="\n")
        return 2
    warnings = [str(warning) for warning in (*loaded.warnings, *check_files(loaded))]
    if arguments.json:
        print(
            json.dumps(
                {"file": loaded.name, "hash": loaded.hash, "valid": True, "problems": [], "warnings": warnings},
                indent=2,
            )
        )
        return 0
    print(f"{loaded.name}: valid")
    for warning in warnings:
        print(f"warning: {warning}")
    print()
    print(_policy_in_words(loaded))
    return 0


def _policy_in_words(loaded: Loaded) -> str:
    settings = loaded.settings
    lines = ["The first rule that matches takes the event:"]
    if loaded.name != BUILT_IN_NAME and "rules" not in loaded.parsed.lines:
        what = "names no rules" if loaded.parsed.lines else "is empty"
        lines.insert(0, f"The file {what}: the built-in rules are in force.")
    rows = [
        (rule.name, f"{_when_in_words(rule.when)}: {_rule_in_words(rule, settings)}") for rule in settings.rules
    ]
    lines.extend(_table([*rows, ("(none)", "observed: logged and counted, nothing more")]))
    imds, agent = settings.imds, settings.agent
    poll = f"asks {imds.endpoint} every {format_duration(imds.poll_interval)} (api-version {imds.api_version})"
    listen = "serves no pages" if agent.listen == "off" else f"serves its pages on {agent.listen}"
    mode = "" if agent.mode == "act" else "; mode observe: runs no hooks and approves nothing"
    clear = f"; runs {', '.join(settings.on_clear)} at start if nothing is pending" if settings.on_clear else ""
    return "\n".join([*lines, "", fill(f"The agent {poll}; {listen}{clear}{mode}.", _WIDTH)])


def _when_in_words(when: When) -> str:
    parts = []
    if when.type or when.status:
        parts.append(" ".join(filter(None, (_either(when.status), _either(when.type) or "events"))))
    else:
        parts.append("Any event")
    if when.source:
        parts.append(f"from {_either(when.source)}")
    if when.affects != ("self",):
        named = {"self": "this VM", "shared": "this VM and others", "others": "only other VMs"}
        parts.append(f"that names {_either(named[word] for word in when.affects)}")
    if when.resource:
        parts.append(f"with a resource like {_either(when.resource)}")
    if when.description:
        parts.append(f"described as {_either(when.description)}")
    for kind, words in (("duration", "lasting"), ("notice", "announced")):
        below, at_least = getattr(when, f"{kind}_below"), getattr(when, f"{kind}_at_least")
        limits = [f"at least {format_duration(at_least)}"] if at_least is not None else []
        limits += [f"less than {format_duration(below)}"] if below is not None else []
        if limits:
            parts.append(f"{words} {' and '.join(limits)}{' ahead' if kind == 'notice' else ''}")
    return " ".join(parts)


def _rule_in_words(rule: Rule, settings: Settings) -> str:
    begin = []
    is_approved = rule.approve in ("immediately", "when-prepared")
    if rule.window is not None and is_approved:
        begin.append(f"in window {rule.window}, or")
    if rule.lead is not None:
        begin.append(f"from {format_duration(rule.lead)} before NotBefore")
    elif rule.window is not None and is_approved:
        begin.append("shortly before NotBefore")
    elif not is_approved and (rule.prepare or rule.drain_for):
        begin.append(_late_in_words(rule, settings))
    parts = []
    if rule.drain_for:
        parts.append(f"not ready for {format_duration(rule.drain_for)}")
    if rule.prepare:
        parts.append(f"run {', '.join(rule.prepare)}")
    approve = {
        "immediately": "approve at once",
        "when-prepared": "approve" if parts else "approve at once",
        "manual": "wait for an operator to approve",
        "never": "do not approve",
    }[rule.approve]
    if rule.prepare and rule.approve == "when-prepared" and rule.on_failure == "approve":
        approve += " (even if a hook fails)"
    parts.append(approve)
    words = f"{' '.join(begin)}, {', then '.join(parts)}" if begin else ", then ".join(parts)
    if rule.on_start:
        words += f"; once started run {', '.join(rule.on_start)}"
    if rule.recover:
        words += f"; afterwards run {', '.join(rule.recover)}"
    return words + _sharing_in_words(rule, settings)


def _late_in_words(rule: Rule, settings: Settings) -> str:
    if rule.when.type == ("Preempt",):
        return "at once"
    hooks = sum(settings.hooks[name].limit_seconds for name in rule.prepare)
    needed = format_duration(rule.drain_for + hooks + settings.agent.reserve)
    return f"as late as its hooks allow ({needed} before NotBefore, or later if they are known to be quicker)"


def _sharing_in_words(rule: Rule, settings: Settings) -> str:
    """What is different if the event names other VMs too."""
    mode = rule.shared or ("first" if rule.approve == "immediately" else "hold")
    is_approved = rule.approve in ("immediately", "when-prepared")
    if not is_approved or mode == "any" or not {"self", "shared"} & set(rule.when.affects):
        return ""
    if rule.approve == "immediately" and mode == "first":
        return ""
    unless = ", unless it names this VM first" if mode == "first" else ""
    is_late = rule.lead is None and (rule.prepare or rule.drain_for)
    late = f" prepare {_late_in_words(rule, settings)} and" if is_late else ""
    return f"; if it names other VMs too,{late} do not approve{unless}"


# --- explain


def _run_explain(arguments: argparse.Namespace) -> int:
    settings = _load(arguments.config).settings
    now = arguments.at or datetime.now(UTC).replace(microsecond=0)
    if arguments.document is None:
        document, name = _fetch(settings, arguments.vm)
        assumed = ""
    else:
        document = _read(arguments.document)
        name = arguments.vm or settings.vm.name or ""
        assumed = "" if name else _first_resource(document)
    names = tuple(filter(None, (name or assumed, *settings.vm.aliases)))
    known_times = _load_known_times(settings)
    explanations = [explain_event(settings, event, names, now, known_times) for event in document.events]
    if arguments.json:
        vm, mode = Vm(names=names, vm_id=""), settings.agent.mode
        print_json(Explanations(at=now, vm=vm, mode=mode, events=tuple(explanations)))
        return 0
    who = ", also known as ".join(names) or "not known"
    hint = " (the first in Resources; use --vm NAME for another)" if assumed else ""
    print(f"This VM: {who}{hint}. Time: {now:%Y-%m-%d %H:%M:%S}Z.")
    if settings.agent.mode == "observe":
        print("The agent's mode is observe: nothing of what follows would be done.")
    if not explanations:
        print("No event is pending.")
    for explanation in explanations:
        print()
        print("\n".join(_explanation_in_words(explanation, now)))
    return 0


def _load_known_times(settings: Settings) -> KnownTimes:
    """What the agent of this machine knows of its hooks; nothing if that cannot be read."""
    from agent import host  # noqa: PLC0415  # so that --help stays quick
    from agent.store import Store, StoreError  # noqa: PLC0415

    directory = settings.agent.state_dir
    try:
        store = Store.look_into(Path(directory) if directory else host.default_state_dir())
    except StoreError:
        return {}
    try:
        return decode(store.load_fact("hook_times"))
    except StoreError:
        return {}
    finally:
        store.close()


def _fetch(settings: Settings, vm: str | None) -> tuple[Document, str]:
    from agent.imds import ImdsClient, resolve_endpoint  # noqa: PLC0415  # not needed for files

    imds = settings.imds
    client = ImdsClient(
        resolve_endpoint(imds.endpoint),
        api_version=imds.api_version,
        request_timeout=imds.request_timeout,
        first_request_timeout=imds.first_request_timeout,
    )
    try:
        with remark_if_slow(FIRST_ANSWER_IS_SLOW):
            document = parse_document(client.fetch())
        return document, vm or settings.vm.name or client.fetch_identity().name
    finally:
        client.close()


def _read(argument: str) -> Document:
    try:
        if argument == "-":
            body = sys.stdin.buffer.read(_MAX_DOCUMENT_BYTES + 1)
        else:
            with Path(argument).open("rb") as file:
                body = file.read(_MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise AgentError(f"{argument}: cannot be read: {error.strerror}", kind="usage") from error
    name = "standard input" if argument == "-" else argument
    if len(body) > _MAX_DOCUMENT_BYTES:
        raise AgentError(f"{name}: expected at most {_MAX_DOCUMENT_BYTES >> 20} MiB; it is larger", kind="usage")
    try:
        return parse_document(body)
    except DocumentError as error:
        try:
            return Document(incarnation="", events=(parse_event(body),))
        except DocumentError:
            raise AgentError(f"{name}: {error}", kind="document") from error


def _first_resource(document: Document) -> str:
    return next((event.resources[0] for event in document.events if event.resources), "")


def _explanation_in_words(explanation: Explanation, now: datetime) -> list[str]:
    event, decision = explanation.event, explanation.decision
    source = f", from {event.source}" if event.source else ""
    head = f"{event.type or 'Event without a type'} {event.id or '(no id)'}"
    head += f", {event.status or 'no status'}{source}"
    rows = [("names", f"{_some(event.resources) or 'no VM'} ({_affects_in_words(explanation)})")]
    if event.not_before is not None:
        seconds = (event.not_before - now).total_seconds()
        ahead = f"in {format_duration(seconds)}" if seconds > 0 else "it may start at any moment"
        rows.append(("NotBefore", f"{_clock(event.not_before, now)} ({ahead})"))
    elif not event.is_started:
        rows.append(("NotBefore", "not given: it may start at any moment"))
    if event.duration_seconds is not None:
        rows.append(("lasts", f"about {format_duration(event.duration_seconds)}"))
    if event.description:
        rows.append(("says", event.description))
    rows.extend(
        ("rule" if not index else "", f"not {passed.rule}: {passed.reason}")
        for index, passed in enumerate(explanation.passed_over)
    )
    rows.append(("" if explanation.passed_over else "rule", decision.reason))
    rows.extend(_plan_rows(explanation, now))
    rows.append(("approval", explanation.expected_approval.text))
    return [head, *_table(rows)]


def _plan_rows(explanation: Explanation, now: datetime) -> Iterable[tuple[str, str]]:
    event, decision, begins_at = explanation.event, explanation.decision, explanation.begins_at
    if begins_at is not None and decision.has_preparation:
        when = "now" if begins_at == now else f"at {_clock(begins_at, now)}"
        when += f" ({explanation.begins_reason})" if begins_at != now else ""
        parts = [f"not ready for {format_duration(decision.drain_for)}"] if decision.drain_for else []
        parts += [f"run {', '.join(decision.prepare)}"] if decision.prepare else []
        yield "prepare", f"{when}: {', then '.join(parts) or 'nothing to run'}"
    elif begins_at is not None and begins_at != now:
        yield "waits", f"until {_clock(begins_at, now)} ({explanation.begins_reason})"
    if decision.on_start:
        when = "now, for it has started" if event.is_started else "once it has started"
        yield "on start", f"{when}: run {', '.join(decision.on_start)}"
    if decision.recover and not event.is_started:
        yield "recover", f"once it is over: run {', '.join(decision.recover)}"


def _affects_in_words(explanation: Explanation) -> str:
    return {
        "self": "this VM only",
        "shared": "this VM and others",
        "others": "not this VM",
        "unknown": "nothing says whether this VM",
    }[explanation.decision.affects]


def _load(argument: str | None) -> Loaded:
    from agent import host  # noqa: PLC0415  # so that --help stays quick

    return load_policy(find_config(argument, host.default_config_path()))


def _parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a time such as 2022-04-11T22:12:00Z; got {text!r}") from None
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def _clock(at: datetime, now: datetime) -> str:
    """Time of day, with the date if it is another one."""
    return f"{at:%H:%M:%S}Z" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}Z"


def _either(words: Iterable[str]) -> str:
    *first, last = [*words] or [""]
    return f"{', '.join(first)} or {last}" if first else last


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns, the second one wrapped."""
    rows = list(rows)
    width = max(len(first) for first, _ in rows) + 2
    return [
        fill(
            second,
            max(_WIDTH, width + 40),
            initial_indent=f"  {first:<{width}}",
            subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for first, second in rows
    ]
