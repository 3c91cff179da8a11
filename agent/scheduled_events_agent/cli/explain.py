"""``explain``: shows which rule matches each event, why, and what happens when.

Invariant: a plan is not computed here. The agent's own state machine is rehearsed, from the event's present
state in the agent. So ``explain`` shows what ``run`` does.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.config import find_config, load_policy, state_dir_of
from scheduled_events_agent.cli.operator import as_typed, find_agent, options_of
from scheduled_events_agent.cli.plan import Plan, plan_rows
from scheduled_events_agent.cli.status import event_rows, head, load_status, title
from scheduled_events_agent.cli.terminal import FIRST_ANSWER_IS_SLOW, Row, Terminal, print_json, warn_if_slow
from scheduled_events_agent.hooks.durations import KnownTimes, decode, estimate_seconds
from scheduled_events_agent.imds.api_version import candidate_versions, fetch_with_fallback
from scheduled_events_agent.imds.compare import Seen
from scheduled_events_agent.imds.document import (
    REBALANCE_VERSION,
    RECOMMENDATION,
    ApiVersion,
    Document,
    ScheduledEvent,
    normalized_names,
    parse_document,
    parse_event,
)
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy import Decision, MatchContext, decide, names_recommendations, rejected_rules
from scheduled_events_agent.policy.durations import format_duration, format_estimate, format_time, parse_time
from scheduled_events_agent.policy.load import ConfigError, LoadedPolicy
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status import NO_OPTIONS, SCHEMA_VERSION, CommandOptions, EventView, Status, Vm
from scheduled_events_agent.status.actions import command, effect_of, offered_actions, quoted
from scheduled_events_agent.status.attention import NO_AGENT
from scheduled_events_agent.status.events import azure_facts, event_view
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.status.messages import operator_message, wait_message
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    Context,
    FleetEventStatus,
    FleetView,
    HookFinished,
    RunHook,
    Signal,
    Stage,
    Workflow,
    advance,
    evaluate_approval_gates,
    hook_deadline_at,
    needed_seconds,
    needs_all,
    needs_slot,
    needs_slot_to_approve,
    next_wake_at,
    workflow_id,
)

if TYPE_CHECKING:
    from scheduled_events_agent.imds.client import ImdsClient

_STAGES: tuple[Stage, ...] = ("prepare", "on_start", "recover")
# Within these years, a scenario's times are dates on every system.
_YEARS = range(1970, 2900)
_REHEARSAL = "rehearsal: no agent was asked"
_NOT_ASKED_FOR = "the agent does not ask Azure for recommendations: no rule names SpotRebalanceRecommendation"


class RejectedRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule above the one that matched the event, and why it did not match."""

    rule: str
    reason: str


class ExpectedApproval(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the event would be approved."""

    verdict: Literal["allow", "manual", "deny"]
    at: datetime | None
    """At the earliest; None also if it is approved already."""
    text: str
    """When, or why not."""


class EventPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would come if every hook succeeded at once, and why."""

    at: datetime
    """The assumed time; of a scenario, when it announces the event."""
    rejected_rules: tuple[RejectedRule, ...]
    """Empty if the policy in force is not the file's."""
    begins_at: datetime | None
    """When preparation or approval begins or began; None if neither does."""
    begins_reason: str
    """Why not at once; "" also if it has begun."""
    needs_slot: bool
    """Of the fleet."""
    drain_seconds: float
    """``drain_for`` as cut for the notice; 0 if that has begun."""
    prepare: tuple[str, ...]
    """Those that run now or later."""
    hooks_until: datetime | None
    """None: only their own time limits count."""
    approval: ExpectedApproval
    on_start: tuple[str, ...]
    """Those that run once it has started."""
    recover: tuple[str, ...]
    """Those that run once it is over."""


class ExplainedEvent(EventView, frozen=True, kw_only=True):
    """An event as the agent has it, and what would come. ``activity`` says if it does not have it."""

    plan: EventPlan


class Explanations(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``explain --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    """The assumed time; of a scenario, its beginning."""
    source: Literal["endpoint", "agent", "file", "scenario"]
    """agent: the endpoint does not answer."""
    received_at: datetime | None
    """From the metadata service."""
    incarnation: str
    vm: Vm
    mode: Literal["act", "observe"]
    events: tuple[ExplainedEvent, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``explain``."""
    parser.description = (
        "Shows what is done about the events of a document or a scenario, and why. Without DOCUMENT it asks the "
        "metadata service and the agent, and shows what this agent does. With DOCUMENT, --vm or --at it asks no "
        "agent, and shows what an agent would do that sees the events for the first time. Exit code 1: neither "
        "answers."
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "document",
        nargs="?",
        metavar="DOCUMENT",
        help="a file with a document or a single event, - for standard input; or a scenario: a .yaml file, or the "
        "name of a shipped one, as simulate --list shows them (default: ask the metadata service)",
    )
    either.add_argument("--raw", action="store_true", help="print only the metadata service's answer, unchanged")
    parser.add_argument(
        "--vm",
        metavar="NAME",
        help="this VM's name in Resources; if a scenario has no such VM, its first one gets the name (default: "
        "vm.name; else ask, or the scenario's first VM)",
    )
    parser.add_argument(
        "--at",
        metavar="TIME",
        type=_time,
        help="assume this time, such as 2022-04-11T22:12:00Z; a scenario begins then (default: now)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_state_options(parser)
    parser.set_defaults(handler=_run)


def _time(text: str) -> datetime:
    try:
        time = parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if time.year not in _YEARS:
        raise argparse.ArgumentTypeError(f"expected a year from {_YEARS[0]} to {_YEARS[-1]}; got {text!r}")
    return time


# --- one event


class _Forecast:
    """A rehearsal of an event until it would start, in which every hook succeeds at once."""

    def __init__(self, event: ScheduledEvent, known: Workflow | None, context: Context) -> None:
        """``known``: the agent's workflow of the event; None if it is first seen now."""
        self.workflow = known if known is not None else _not_followed(event, context)
        self.context = context
        self.begins_at = known.handling_since if known is not None else None
        self.needs_slot = False
        """Whether it must have a slot to begin."""
        self.needs_slot_to_approve = known is not None and needs_slot_to_approve(known, context)
        self.approved_at: datetime | None = None
        self.drain_seconds = 0.0
        self.prepare: list[str] = []
        self.hooks_until: datetime | None = None

    def simulate(self, signals: list[Signal], workflows: dict[str, Workflow]) -> None:
        """Continue from these workflows. ``context`` is then that of the end."""
        while True:
            result = advance(workflows, signals, self.context)
            for _, error in result.errors:
                raise error
            workflows = result.workflows
            now = self.context.now
            signals = []
            for transition in result.transitions:
                self._follow(transition.workflow)
                for effect in transition.effects:
                    if isinstance(effect, RunHook):
                        signals.append(self.run(transition.workflow, effect.stage, effect.hook, effect.run))
                    elif isinstance(effect, Approve):
                        self.approved_at = now
                        signals.append(ApprovalAnswered(workflow_id=effect.workflow_id))
            self.workflow = next((one for one in workflows.values() if not one.is_over), self.workflow)
            if signals:
                continue
            wake_at = next_wake_at(workflows, self.context)
            if wake_at is None:
                return
            self.context = replace(self.context, now=wake_at, document_at=wake_at)

    def _follow(self, workflow: Workflow) -> None:
        now = self.context.now
        if self.begins_at is None and workflow.phase in ("preparing", "prepared"):
            self.begins_at = now
            self.needs_slot = needs_slot(workflow, self.context)
        until = workflow.drain_until
        if until is not None and until != self.workflow.drain_until and not self.drain_seconds:
            self.drain_seconds = (until - now).total_seconds()

    def run(self, workflow: Workflow, stage: Stage, hook: str, run: int) -> HookFinished:
        """Let the hook succeed at once."""
        if stage == "prepare":
            self.prepare.append(hook)
            self.hooks_until = hook_deadline_at(workflow, stage, self.context.reserve, self.context.now)
        return HookFinished(workflow_id=workflow.id, stage=stage, hook=hook, run=run, outcome="succeeded")


def _not_followed(event: ScheduledEvent, context: Context) -> Workflow:
    """The explanation of a recommendation whose type no rule names."""
    now = context.now
    decision = decide(
        context.rules, context.windows, event, MatchContext(names=context.names, not_before_seen_at=now)
    )
    return Workflow(id="", event=event, decision=decision, first_seen_at=now, not_before_seen_at=now, boot_id="")


class _Assumed(NamedTuple):
    """The assumptions for all events."""

    settings: Settings
    names: tuple[str, ...]
    now: datetime
    known_times: KnownTimes
    """Durations of earlier runs of the hooks; without them, their time limits count."""
    options: CommandOptions
    has_agent: bool = False
    """Whether the agent runs and its decisions count. If not, an agent would start with the state file."""
    is_same_policy: bool = True
    """Whether the policy that the agent has in force is the one of ``settings``."""


class _Explanation(NamedTuple):
    """One event with its plan, and what its rows are made from."""

    explained: ExplainedEvent
    event: ScheduledEvent
    known: Workflow | None
    """The agent's workflow of it; None if it has none, or was not asked."""
    decision: Decision


def _explain(found: "_FoundEvent", assumed: _Assumed) -> _Explanation:
    event, known = found.event, found.workflow
    context = _context(event, known, assumed)
    forecast = _Forecast(event, known, context)
    if known is None or not known.is_over:
        forecast.simulate(
            _first_signals(forecast, event, known, assumed), {} if known is None else {known.id: known}
        )
    decision = forecast.workflow.decision
    now = assumed.now
    is_begun = known is not None and known.handling_since is not None
    start = decision.start(event, now, needed_seconds(decision, forecast.context))
    facts = MatchContext(names=assumed.names, not_before_seen_at=forecast.workflow.not_before_seen_at)
    above = rejected_rules(assumed.settings.rules, decision.rule, event, facts) if assumed.is_same_policy else []
    plan = EventPlan(
        at=now,
        rejected_rules=tuple([RejectedRule(rule=rule, reason=reason) for rule, reason in above]),
        begins_at=forecast.begins_at,
        begins_reason=start.reason if forecast.begins_at is not None and not is_begun else "",
        needs_slot=forecast.needs_slot,
        drain_seconds=forecast.drain_seconds,
        prepare=tuple(forecast.prepare),
        hooks_until=forecast.hooks_until,
        approval=_approval(forecast, assumed),
        on_start=_hooks_on_start(known, decision),
        recover=_hooks_to_recover(event, known, decision),
    )
    view = found.view or _first_sight(event, context, assumed)
    view = replace(
        view, **azure_facts(event), rule=decision.rule, reason=decision.reason, affects=decision.affects
    )
    explained = ExplainedEvent(**{name: getattr(view, name) for name in EventView.__struct_fields__}, plan=plan)
    return _Explanation(explained, event, known, decision)


def _first_sight(event: ScheduledEvent, context: Context, assumed: _Assumed) -> EventView:
    """The event as an agent has it that sees it now."""
    facts = Facts(at=assumed.now, source="state_file", vm=Vm(names=assumed.names, vm_id=""))
    activity = "the agent has not seen it yet" if assumed.has_agent else "rehearsed as if it were seen now"
    return replace(event_view(_not_followed(event, context), facts), activity=activity)


def _hooks_on_start(known: Workflow | None, decision: Decision) -> tuple[str, ...]:
    if known is not None and (known.is_over or known.on_start.state not in ("idle", "running")):
        return ()
    return decision.on_start


def _hooks_to_recover(event: ScheduledEvent, known: Workflow | None, decision: Decision) -> tuple[str, ...]:
    is_prepared = not event.is_started
    if known is not None and (known.is_over or event.is_started):
        is_prepared = known.is_prepared_for
    return decision.recover if is_prepared else ()


def _context(event: ScheduledEvent, known: Workflow | None, assumed: _Assumed) -> Context:
    settings = assumed.settings
    hooks = settings.hooks
    boot_id = ""
    if known is not None:
        boot_id = host.boot_id()
        of_event = (known.prepare_boot_id, known.boot_id)
        boot_id = next((one for one in of_event if one and host.is_same_boot(one, boot_id)), boot_id)
    return Context(
        now=assumed.now,
        names=assumed.names,
        rules=settings.rules,
        windows=settings.maintenance_windows,
        hooks=hooks,
        hook_seconds={name: estimate_seconds(assumed.known_times, name, hook) for name, hook in hooks.items()},
        reserve=settings.agent.reserve,
        boot_id=boot_id,
        document_at=assumed.now,
        fleet=_permissive_fleet(
            settings, event, workflow_id(event.key, assumed.now) if known is None else known.id
        ),
    )


def _first_signals(
    forecast: _Forecast, event: ScheduledEvent, known: Workflow | None, assumed: _Assumed
) -> list[Signal]:
    """The signals since the agent's last status. Hooks and requests that are under way end now."""
    if known is None:
        return [Seen(event)]
    if not assumed.has_agent:
        return [AgentRestarted(), Seen(event)]
    signals: list[Signal] = [] if event == known.event else [Seen(event)]
    for stage in _STAGES:
        stage_status = known.stage_status(stage)
        if stage_status.current is not None:
            signals.append(forecast.run(known, stage, stage_status.current, stage_status.run))
    if known.approval.state == "requested":
        forecast.approved_at = assumed.now
        signals.append(ApprovalAnswered(workflow_id=known.id))
    return signals


def _permissive_fleet(settings: Settings, event: ScheduledEvent, workflow: str) -> FleetView | None:
    """A fleet that has a slot for the event, and in which all VMs are ready."""
    fleet = settings.fleet
    if fleet is None:
        return None
    names = tuple(normalized_names(event.resources))
    status = FleetEventStatus(workflow_id=workflow, has_slot=True, is_all_ready=True, requested_vms=names)
    return FleetView(max_events=fleet.max_events, members=fleet.members, statuses={event.key: status})


def _approval(forecast: _Forecast, assumed: _Assumed) -> ExpectedApproval:
    workflow = forecast.workflow
    event = workflow.event
    decision = workflow.decision
    approved_at = forecast.approved_at
    if approved_at is not None:
        is_now = approved_at == assumed.now
        when = "at once" if is_now else f"at {format_time(approved_at, assumed.now)} at the earliest"
        slot = ", once the fleet has a slot for it" if forecast.needs_slot_to_approve else ""
        if decision.approve == "when-prepared" and forecast.prepare:
            count = len(forecast.prepare)
            hooks = f"hook {forecast.prepare[0]} has" if count == 1 else f"its {count} hooks have"
            text = f"as soon as {hooks} succeeded"
            text += "" if is_now else f", {when}"
            text += ", and once the other VMs are ready" if needs_all(workflow) else ""
            text += slot
            fails = "a failed hook holds it" if decision.on_failure == "hold" else "even if a hook fails"
            return ExpectedApproval(verdict="allow", at=approved_at, text=f"{text}; {fails}")
        return ExpectedApproval(verdict="allow", at=approved_at, text=f"{when}{slot}")
    if workflow.approval.state == "confirmed":
        return ExpectedApproval(verdict="allow", at=None, text="already")
    if workflow.is_over:
        return ExpectedApproval(verdict="deny", at=None, text="not approved: it is over")
    result = evaluate_approval_gates(workflow, forecast.context)
    if result.verdict == "wait" and decision.approve == "manual":
        line = command(assumed.options, "approve", quoted(event.id))
        if assumed.has_agent:  # a rehearsal may be kept, and says the same for all
            line = as_typed(line)
        return ExpectedApproval(verdict="manual", at=None, text=f"when an operator approves it: {line}")
    text = f"not approved: {wait_message(workflow, result.wait_reason)}"
    return ExpectedApproval(verdict="deny", at=None, text=text)


# --- what is asked


class _FoundEvent(NamedTuple):
    """An event, and when it is explained."""

    event: ScheduledEvent
    at: datetime
    """The time to assume."""
    workflow: Workflow | None = None
    """The agent's workflow of it."""
    view: EventView | None = None
    """The same as the agent shows it."""


class _Found(NamedTuple):
    """The events, and where they are from."""

    at: datetime
    """The time to assume."""
    events: tuple[_FoundEvent, ...]
    source: Literal["endpoint", "agent", "file", "scenario"]
    received_at: datetime | None
    incarnation: str
    name: str
    """This VM's name; "" if it is not known."""
    lines: tuple[str, ...] = ()
    """Lines that are shown first."""
    workflows: Mapping[str, Workflow] = {}
    """The agent's open workflows by their id."""


def fetch_document(settings: Settings, *, is_first: bool) -> tuple[bytes, "ImdsClient"]:
    """Azure's present document, in the best api-version, and the client that asked for it. Raises AgentError.

    ``is_first``: this may be the first request on this VM. Then the answer may take minutes.
    """
    from scheduled_events_agent.imds.client import ImdsClient, connect  # noqa: PLC0415  # httpx: half of this command's start

    imds = settings.imds
    versions = candidate_versions(imds.api_version, has_recommendations=names_recommendations(settings.rules))

    def fetch(version: ApiVersion, longest: float) -> tuple[bytes, ImdsClient]:
        client = connect(
            imds.endpoint,
            version,
            request_timeout=imds.request_timeout,
            first_request_timeout=imds.first_request_timeout if is_first else 0.0,
            longest=longest,
        )
        return client.fetch(), client

    with warn_if_slow(FIRST_ANSWER_IS_SLOW):
        return fetch_with_fallback(versions, fetch).content


def _load_file(arguments: argparse.Namespace, settings: Settings, state_dir: Path) -> _Found:
    """The events of a document. No agent is asked about them. Raises AgentError."""
    name: str = arguments.vm or settings.vm.name or ""
    if arguments.document is not None:
        document = _read(arguments.document)
        source: Literal["endpoint", "file"] = "file"
        received_at = None
    else:
        body, client = fetch_document(settings, is_first=find_agent(state_dir) is None)
        document = parse_document(body)
        source = "endpoint"
        received_at = datetime.now(UTC)
        name = name or client.fetch_identity().name
    at = arguments.at or datetime.now(UTC)
    events = tuple([_FoundEvent(event, at) for event in document.events])
    return _Found(at, events, source, received_at, document.incarnation, name, (_REHEARSAL,))


def _is_scenario(argument: str) -> bool:
    """Whether DOCUMENT is a scenario: a .yaml file, or a name that no file here has."""
    if _has_yaml(argument):
        return True
    try:
        is_file = Path(argument).exists() and not Path(argument).is_dir()
    except OSError:  # a folder that this account may not search
        is_file = False
    return not is_file and re.fullmatch(r"\w[\w-]{0,99}", argument) is not None


def _has_yaml(path: str) -> bool:
    return Path(path).suffix.lower() in (".yaml", ".yml")


def _load_scenario(arguments: argparse.Namespace, settings: Settings) -> _Found:
    """The events that a scenario announces, each at its time. Raises AgentError."""
    from scheduled_events_agent.simulator import SimulatorError, load_scenario, rename_vms  # noqa: PLC0415  # 30 ms
    from scheduled_events_agent.simulator.service import announcements  # noqa: PLC0415  # as above

    argument: str = arguments.document
    try:
        scenario = load_scenario(argument)
    except SimulatorError as error:
        if error.kind == "config":
            hint = f"{argument}: a .yaml file is read as a scenario; a policy is given with --config"
            raise AgentError(f"{error}\n{hint}", kind="config") from error
        if _has_yaml(argument):
            raise
        raise AgentError(f"{argument}: there is no such file, and {error}", kind=error.kind) from error
    name = arguments.vm or settings.vm.name or scenario.vms[0]
    if normalized_names([name]).isdisjoint(normalized_names([*scenario.vms, *scenario.others])):
        scenario = rename_vms(scenario, (name,))
    version = settings.imds.api_version
    began_at = (arguments.at or datetime.now(UTC)).replace(microsecond=0)
    announced = announcements(scenario, began_at.timestamp(), REBALANCE_VERSION if version == "auto" else version)
    events = tuple([_FoundEvent(parse_event(body), at) for at, body in announced])
    if not events:
        seen = "" if version == "auto" else f" in api-version {version}"
        raise AgentError(f"{argument}: the scenario announces no event{seen}", kind="usage")
    is_asked_for = version != "auto" or names_recommendations(settings.rules)
    has_unseen = not is_asked_for and any(found.event.type == RECOMMENDATION for found in events)
    notes = (_REHEARSAL, _NOT_ASKED_FOR) if has_unseen else (_REHEARSAL,)
    return _Found(began_at, events, "scenario", None, "", name, notes)


class _AskedAgent(NamedTuple):
    """What the agent says of its events, and what its state file says."""

    status: Status | None = None
    """Its answer, or what its state file says; None if that cannot be read."""
    workflows: Mapping[str, Workflow] = {}
    """Those that are open by their id."""
    absence: str = ""
    """Why it does not answer, or why its state file cannot be read; "" if neither is so."""


def _ask_agent(state_dir: Path, options: CommandOptions) -> _AskedAgent:
    try:
        status = load_status(state_dir, lambda: options)
        with closing(Store.open_readonly(state_dir)) as store:
            workflows = {workflow.id: workflow for workflow in store.load_workflows()}
    except StoreError as error:
        return _AskedAgent(absence=NO_AGENT if find_agent(state_dir) is None else str(error))
    return _AskedAgent(status, workflows, "" if status.source == "agent" else status.faults[0])


def _ask_both(settings: Settings, asked: _AskedAgent) -> _Found:
    """The events of the endpoint with the agent's state of them, or else the agent's events. Raises AgentError."""
    status, workflows, absence = asked
    if status is not None and status.endpoint is not None:
        settings = replace(settings, imds=replace(settings.imds, endpoint=status.endpoint))
    name = settings.vm.name or ""
    if status is not None and status.vm.names:
        name = status.vm.names[0]
    views = status.events if status is not None else ()
    known = [(workflows[view.key], view) for view in views if view.key in workflows]
    try:
        body, client = fetch_document(settings, is_first=absence == NO_AGENT)
        document = parse_document(body)
        received_at = datetime.now(UTC)
        if not name and absence:  # an agent that runs asks for it itself, and acts on no event until it knows it
            name = client.fetch_identity().name
    except AgentError as error:
        if absence or status is None:
            raise AgentError(f"{error}; and {absence}", kind=error.kind) from error
        line = f"the metadata service gives no document: {error}; these are the events that the agent knows"
        now = datetime.now(UTC)
        events = tuple([_FoundEvent(workflow.event, now, workflow, view) for workflow, view in known])
        return _Found(
            now, events, "agent", status.last_poll_at, status.incarnation or "", name, (line,), workflows
        )
    lines = (f"{absence}; this is what an agent started now would do",) if absence else ()
    now = datetime.now(UTC)
    listed = {workflow.event.key: (workflow, view) for workflow, view in known if not workflow.is_over}
    events = tuple([_FoundEvent(event, now, *listed.get(event.key, ())) for event in document.events])
    return _Found(now, events, "endpoint", received_at, document.incarnation, name, lines, workflows)


def _run(arguments: argparse.Namespace) -> int:
    loaded = load_policy(find_config(arguments.config))
    settings = loaded.settings
    if arguments.document is not None and _is_scenario(arguments.document):
        # No agent has these events, so a command that names one is shown without the paths of this machine.
        return _show(arguments, loaded, _load_scenario(arguments, settings), None, NO_OPTIONS)
    state_dir = state_dir_of(settings, arguments.state_dir)
    if arguments.raw:
        body, _ = fetch_document(settings, is_first=find_agent(state_dir) is None)
        sys.stdout.buffer.write(body)
        return 0
    options = options_of(arguments, state_dir)
    status: Status | None = None
    if arguments.document is not None or arguments.vm or arguments.at:
        found = _load_file(arguments, settings, state_dir)
    else:
        asked = _ask_agent(state_dir, options)
        status = asked.status
        found = _ask_both(settings, asked)
    return _show(arguments, loaded, found, status, options)


def _show(
    arguments: argparse.Namespace,
    loaded: LoadedPolicy,
    found: _Found,
    status: Status | None,
    options: CommandOptions,
) -> int:
    assumed = _assume(arguments, loaded, found, status, options)
    explanations = [_explain(one, assumed._replace(now=one.at)) for one in found.events]
    mode = status.mode if status is not None and status.mode is not None else loaded.settings.agent.mode
    if arguments.json:
        print_json(
            Explanations(
                at=assumed.now,
                source=found.source,
                received_at=found.received_at,
                incarnation=found.incarnation,
                vm=Vm(names=assumed.names, vm_id=status.vm.vm_id if status is not None else ""),
                mode=mode,
                events=tuple([explanation.explained for explanation in explanations]),
            )
        )
        return 0
    terminal = Terminal.of(sys.stdout)
    for line in (*found.lines, *_headings(found, assumed, mode)):
        print(*terminal.line(line), sep="\n")
    if status is not None and found.source == "endpoint":
        for line in _past_events(status, found.workflows, terminal):
            print(line)
    for explanation in explanations:
        event = explanation.explained
        print("", *terminal.line(head(event, event.id, event.plan.at), "bold"), sep="\n")
        print(*terminal.rows(_rows(explanation, status, assumed)), sep="\n")
    return 0


def _assume(
    arguments: argparse.Namespace,
    loaded: LoadedPolicy,
    found: _Found,
    status: Status | None,
    options: CommandOptions,
) -> _Assumed:
    settings = loaded.settings
    name = found.name or next((one.event.resources[0] for one in found.events if one.event.resources), "")
    names = tuple(filter(None, (name, *settings.vm.aliases)))
    has_agent = status is not None and status.source == "agent"
    is_same_policy = True
    if status is not None and has_agent:
        names = status.vm.names  # also if it does not know any: then it acts on no event
        options = status.command_options
        is_same_policy = status.policy is None or status.policy.hash == loaded.hash
    return _Assumed(
        settings=settings,
        names=names,
        now=found.at,
        known_times=_load_known_times(settings, arguments.state_dir),
        options=options,
        has_agent=has_agent,
        is_same_policy=is_same_policy,
    )


def _load_known_times(settings: Settings, state_option: str | None) -> KnownTimes:
    """Times of hooks that the agent of this machine has stored; nothing if they cannot be read."""
    try:
        with closing(Store.open_readonly(state_dir_of(settings, state_option))) as store:
            return decode(store.get_meta("hook_times"))
    except (ConfigError, StoreError):  # a policy of the other system can be explained too
        return {}


def _read(argument: str) -> Document:
    name = "standard input" if argument == "-" else argument
    try:
        body = sys.stdin.buffer.read() if argument == "-" else Path(argument).read_bytes()
    except OSError as error:
        raise AgentError(f"{name}: cannot be read: {error.strerror}", kind="usage") from error
    try:
        return parse_document(body, is_saved=True)
    except DocumentError as error:
        try:
            return Document(incarnation="", events=(parse_event(body),))
        except DocumentError:
            raise AgentError(f"{name}: {error}", kind="document") from error


# --- what is shown


def _headings(found: _Found, assumed: _Assumed, mode: str) -> Iterator[str]:
    names = ", also known as ".join(assumed.names) or "not known"
    hint = "" if found.name or not assumed.names else " (the first in Resources; use --vm NAME for another)"
    number = f" Document: {found.incarnation}." if found.incarnation else ""
    yield f"This VM: {names}{hint}. Time: {format_time(assumed.now)}.{number}"
    if mode == "observe":
        yield "The agent's mode is observe: nothing of what follows would be done."
    if not assumed.is_same_policy:
        yield "The agent has another policy in force than this file says now: what it has decided counts."
    if not found.events and found.source == "agent":
        polled = "no poll has succeeded"
        if found.received_at is not None:
            polled = f"its last successful poll was at {format_time(found.received_at, found.at)}"
        yield f"The agent knows no event: {polled}."
    elif not found.events:
        yield "The document lists no event."


def _past_events(status: Status, workflows: Mapping[str, Workflow], terminal: Terminal) -> Iterator[str]:
    """The agent's work on events that are over, which the document does not list."""
    for event in status.events:
        if event.outcome:
            yield from terminal.line(
                f"{title(event.type, event.id)} is over; the agent: {event.activity}", indent=2
            )
            if event.key in workflows:
                yield from terminal.rows(_offers(workflows[event.key], status))


def _agent_row(explanation: _Explanation, status: Status) -> Row:
    """The row about the agent's state of the event."""
    event = explanation.explained
    workflow = explanation.known
    now = event.plan.at
    has_agent = status.source == "agent"
    if workflow is None and event.affects == "others" and event.rule is None:
        return Row("agent", "only counts it: it names other VMs only")
    if workflow is None:
        return Row("agent", "has not seen it yet" if has_agent else "had not seen it", "yellow")
    seen = f"first seen {format_time(event.seen_at, now)}"
    if workflow.not_before_seen_at != event.seen_at:
        seen += f", with this NotBefore {format_time(workflow.not_before_seen_at, now)}"
    text = "; ".join(filter(None, [event.activity, operator_message(event.operator, now), seen]))
    return Row("agent", text, "cyan") if has_agent else Row("agent", f"when it last ran: {text}")


def _rows(explanation: _Explanation, status: Status | None, assumed: _Assumed) -> Iterator[Row]:
    event = explanation.explained
    now = event.plan.at
    if now != assumed.now:
        seconds = (now - assumed.now).total_seconds()
        yield Row("time", f"{format_time(now, assumed.now)}, {format_estimate(seconds)} after the scenario began")
    yield from event_rows(event)
    label = "rule"
    for passed in event.plan.rejected_rules:
        yield Row(label, f"not {passed.rule}: {passed.reason}")
        label = ""
    yield Row(label, event.reason)
    if status is not None:
        yield _agent_row(explanation, status)
    yield from plan_rows(_plan_of(explanation))
    if status is not None and explanation.known is not None:
        yield from _offers(explanation.known, status)


def _offers(workflow: Workflow, status: Status) -> Iterator[Row]:
    """The commands by which an operator decides about an event that waits for one, or for its start."""
    if workflow.phase in ("held", "recovery_failed"):
        for action in offered_actions(status, workflow):
            line = as_typed(command(status.command_options, action, quoted(workflow.event.id)))
            yield Row(action, f"{effect_of(action, workflow)}: {line}")


def _plan_of(explanation: _Explanation) -> Plan:
    event = explanation.event
    decision = explanation.decision
    plan = explanation.explained.plan
    end = "once it is over"
    if explanation.known is not None and explanation.known.is_over:
        end = "now, as it is over"
    elif event.is_recommendation:
        end += f", at the latest after {format_duration(decision.expire_after)}"
    return Plan(
        begins=_beginning(explanation),
        drain_for=decision.drain_for if plan.drain_seconds else 0.0,
        drain_seconds=plan.drain_seconds,
        prepare=plan.prepare,
        until=format_time(plan.hooks_until, plan.at) if plan.hooks_until is not None else "",
        on_start=plan.on_start,
        on_start_when="now, as it has started" if event.is_started else "once it has started",
        approve=plan.approval.text,
        recover=plan.recover,
        recover_when=end,
    )


def _beginning(explanation: _Explanation) -> str:
    plan = explanation.explained.plan
    begins_at = plan.begins_at
    is_begun = explanation.known is not None and explanation.known.handling_since is not None
    if begins_at is None or is_begun or not (explanation.decision.has_preparation or begins_at != plan.at):
        return ""
    begins = "now"
    if begins_at != plan.at:
        begins = f"at {format_time(begins_at, plan.at)} ({plan.begins_reason})"
    return begins + (", once the fleet has a slot for it" if plan.needs_slot else "")
