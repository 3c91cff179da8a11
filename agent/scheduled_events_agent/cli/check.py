"""``check``: checks the policy file, and shows what its rules do."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_config_option, given_path
from scheduled_events_agent.cli.config import find_config, inspect_policy, load_trusted_policy
from scheduled_events_agent.cli.plan import Plan, plan_rows
from scheduled_events_agent.cli.terminal import Row, Terminal, print_json
from scheduled_events_agent.hooks.preflight import Finding, check_machine, problems
from scheduled_events_agent.imds.api_version import candidate_versions
from scheduled_events_agent.imds.document import RECOMMENDATION, ScheduledEvent
from scheduled_events_agent.policy import (
    MatchContext,
    Rule,
    When,
    decide,
    names_recommendations,
    promised_times,
)
from scheduled_events_agent.policy.checks import may_be_observed, reached_types
from scheduled_events_agent.policy.durations import format_duration, format_estimate, plural
from scheduled_events_agent.policy.load import BUILT_IN_NAME, ConfigError, LoadedPolicy
from scheduled_events_agent.policy.schema import policy_schema
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.policy.typed_yaml import Problem, in_order
from scheduled_events_agent.status import SCHEMA_VERSION

_SEVERAL_VMS = (
    "If an event names other VMs too, a rule that approves when prepared does not approve it, and begins as late "
    "as its hooks allow; one that approves at once does so for all of them, 10s later for each VM listed before "
    "this one."
)
# Names of VMs in the events that tell what a rule does.
_THIS_VM = "this-vm"
_OTHER_VM = "other-vm"
# For the metadata service, which other machines than VMs in Azure lack.
_ASK_SECONDS = 2.0


class PolicyCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``check --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    file: str
    hash: str
    """SHA-256; "" if the file cannot be read."""
    valid: bool
    """Whether the exit code is 0."""
    errors: tuple[Problem, ...]
    """In the order of the file."""
    warnings: tuple[Problem, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``check``."""
    parser.description = "Checks the policy file and shows what its rules do. Exit code 0: valid; 2: not valid."
    parser.add_argument(
        "file", nargs="?", metavar="FILE", type=given_path, help="the policy file; the same as --config FILE"
    )
    add_config_option(parser)
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors: exit code 2")
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="check only the policy file: no hook, secret, certificate, account or permission",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of policy files, for editors")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        print_json(policy_schema())
        return 0
    if arguments.file is not None and arguments.config is not None:
        raise AgentError("FILE and --config are the same: give one of them", kind="usage")
    report = _examine(arguments.file or arguments.config, is_alone=arguments.no_files)
    loaded = report.loaded
    is_valid = not report.errors and not (arguments.strict and report.warnings)
    if arguments.json:
        print_json(
            PolicyCheck(
                at=datetime.now(UTC),
                file=report.file,
                hash=loaded.hash if loaded else "",
                valid=is_valid,
                errors=tuple(map(report.with_hint, report.errors)),
                warnings=tuple(map(report.with_hint, report.warnings)),
            )
        )
        return 0 if is_valid else 2
    terminal = Terminal.of(sys.stdout)
    if loaded and is_valid:
        print(*terminal.line(f"{loaded.name}: valid"), sep="\n")
    for problem in in_order((*report.errors, *report.warnings)):
        print(*terminal.line(str(problem), indent=2), sep="\n")
    if loaded and is_valid:
        print("", *_format_policy(loaded, terminal), sep="\n")
        return 0
    counts = [plural(len(report.errors), "error")]
    counts += [plural(len(report.warnings), "warning")] if report.warnings else []
    reason = "" if report.errors else " (--strict)"
    print(f"not valid: {', '.join(counts)}{reason}")
    return 2


class _Report(NamedTuple):
    """The errors and warnings of a policy file."""

    file: str
    loaded: LoadedPolicy | None
    """None if the file cannot be read."""
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Those among the errors and warnings that are about this machine."""

    def with_hint(self, problem: Problem) -> Problem:
        """The problem with the hint that its line, which is long enough, does not have."""
        for finding in self.findings:
            if (finding.key, finding.message) == (problem.path, problem.message):
                return replace(problem, hint=finding.hint)
        return problem


def _examine(config: str | None, *, is_alone: bool) -> _Report:
    """Check a policy file. ``is_alone``: check nothing but the file itself."""
    path = find_config(config)
    try:
        inspected = inspect_policy(path)
    except ConfigError as error:
        return _Report(str(path), None, error.problems)
    loaded = inspected.loaded
    findings: tuple[Finding, ...] = ()
    if not is_alone:
        findings = tuple(finding for finding in _find_problems(loaded) if inspected.is_valid(finding.key))
    found = in_order((*inspected.errors, *loaded.warnings, *problems(loaded, findings)))
    return _Report(
        loaded.name,
        loaded,
        tuple(problem for problem in found if problem.severity == "error"),
        tuple(problem for problem in found if problem.severity == "warning"),
        findings,
    )


def load_checked(config: str | None) -> LoadedPolicy:
    """The policy of an agent with this option --config. Raises ConfigError if it is not valid."""
    loaded = load_trusted_policy(find_config(config), is_reload=True)
    if errors := problems(loaded, _fleet_errors(loaded.settings)):
        raise ConfigError(errors)
    return loaded


def _find_problems(loaded: LoadedPolicy) -> Iterator[Finding]:
    """Findings about the policy, from this machine, the targets of notifications and the fleet's store."""
    settings = loaded.settings
    yield from check_machine(loaded, is_root=host.is_privileged())
    yield from _fleet_errors(settings)
    if settings.notify:
        from scheduled_events_agent.notifications import warnings  # noqa: PLC0415  # with httpx, half of this command's start

        for key, message in warnings(settings.notify):
            yield Finding("notify", key, "warning", message)
    if settings.fleet and settings.fleet.table:
        from scheduled_events_agent.fleet import table  # noqa: PLC0415  # most policies have none

        for key, message in table.warnings(settings.fleet):
            yield Finding("fleet", key, "warning", message)


def _fleet_errors(settings: Settings) -> Iterator[Finding]:
    """Why an agent of this machine cannot act with its fleet."""
    fleet = settings.fleet
    if fleet is None:
        return
    if fleet.table:
        from scheduled_events_agent.fleet import table  # noqa: PLC0415  # most policies have none

        for key, message in table.errors(fleet):
            yield Finding("fleet", key, "error", message)
    if not fleet.group and _is_without_group(settings):
        text = "the key is missing, and this VM is in no scale set that could be the group: add it"
        yield Finding("fleet", "fleet.group", "error", text)


def _is_without_group(settings: Settings) -> bool:
    """Whether the metadata service says that this VM is in no scale set; False if it does not answer."""
    from scheduled_events_agent.imds import client  # noqa: PLC0415  # with httpx, half of this command's start

    endpoint = settings.imds.endpoint
    timeout = min(_ASK_SECONDS, settings.imds.request_timeout)
    try:
        return not client.connect(endpoint, request_timeout=timeout).fetch_identity().group
    except client.ImdsError:
        return False  # not on the VM that the policy is for


def _format_policy(loaded: LoadedPolicy, terminal: Terminal) -> Iterator[str]:
    settings = loaded.settings
    if loaded.name != BUILT_IN_NAME and "rules" not in loaded.parsed.places:
        what = "names no rules" if loaded.parsed.places else "is empty"
        yield f"The file {what}: the built-in rules are in force."
    yield "The first rule that matches an event applies:"
    for rule, reached in reached_types(settings.rules):
        yield ""
        yield from terminal.line(rule.name, "bold")
        when = Row("when", _format_conditions(rule.when))
        yield from terminal.rows([when, *plan_rows(_plan_of(rule, reached, settings))])
    yield ""
    observed = may_be_observed(settings.rules)
    if observed:
        which = "Any other event" if "self" in observed else "An event that names other VMs only"
        yield from terminal.line(f"{which} is only observed: logged and counted.")
    if any(rule.shared is None and _may_approve_for_others(rule) for rule in settings.rules):
        yield from terminal.line(_SEVERAL_VMS)
    imds = settings.imds
    agent = settings.agent
    versions = ", else ".join(
        candidate_versions(imds.api_version, has_recommendations=names_recommendations(settings.rules))
    )
    every = f"every {format_duration(imds.poll_interval)} (api-version {versions})"
    poll = f"asks {_format_endpoint(imds.endpoint)} {every}"
    listen = "serves no pages" if agent.listen == "off" else f"serves its pages on {agent.listen}"
    mode = "" if agent.mode == "act" else "; mode observe: runs no hooks and approves nothing"
    clear = f"; runs {', '.join(settings.on_clear)} at start if nothing is pending" if settings.on_clear else ""
    yield ""
    yield from terminal.line(f"The agent {poll}; {listen}{clear}{mode}.")
    for target in settings.notify:
        words = f"{_format_conditions(target.when)}: when {_join_or(target.kinds).replace('_', ' ')}"
        yield from terminal.line(f"It notifies {target.name} (format {target.format}). {words}.")
    if fleet := settings.fleet:
        namespace = f"the namespace {fleet.leases}" if fleet.leases else "its pod's namespace"
        store = fleet.table or f"Leases of {namespace}"
        limit = f", {plural(fleet.max_events, 'event')} at a time" if fleet.max_events else ""
        group = f"group {fleet.group}" if fleet.group else "its scale set"
        yield from terminal.line(f"It acts with the VMs of {group} through {store}{limit}.")
        waits = "events wait for a slot until their latest begin, and then for Azure to start them"
        begins = "events begin and are approved without a slot after a minute"
        slots = waits if fleet.on_unavailable == "wait" else begins
        slots = f"{slots}, and " if fleet.max_events else ""
        yield from terminal.line(f"While the store is unavailable, {slots}what names several VMs is not approved.")


def _format_endpoint(setting: str) -> str:
    if setting != "auto":
        return setting
    from scheduled_events_agent.imds import client  # noqa: PLC0415  # with httpx, half of this command's start

    return f"{client.resolve_endpoint(setting)} (endpoint auto, as this machine finds it now)"


def _format_conditions(when: When) -> str:
    parts = []
    if when.type or when.status:
        parts.append(" ".join(filter(None, (_join_or(when.status), _join_or(when.type) or "events"))))
    else:
        parts.append("Any event")
    if when.source:
        parts.append(f"from {_join_or(when.source)}")
    if when.affects != ("self",):
        named = {"self": "this VM", "shared": "this VM and others", "others": "only other VMs"}
        parts.append(f"that names {_join_or(named[word] for word in when.affects)}")
    if when.resource:
        parts.append(f"with a resource like {_join_or(when.resource)}")
    if when.description:
        parts.append(f"described as {_join_or(when.description)}")
    for kind, words in (("duration", "lasting"), ("notice", "announced")):
        below = getattr(when, f"{kind}_below")
        at_least = getattr(when, f"{kind}_at_least")
        limits = [f"at least {format_duration(at_least)}"] if at_least is not None else []
        limits += [f"less than {format_duration(below)}"] if below is not None else []
        if limits:
            ahead = " ahead" if kind == "notice" else ""
            parts.append(f"{words} {' and '.join(limits)}{ahead}")
    return " ".join(parts)


def _plan_of(rule: Rule, reached: tuple[str, ...], settings: Settings) -> Plan:
    """The plan of a rule. ``reached``: the types of events that it may match."""
    is_prepared = bool(rule.prepare or rule.drain_for)
    takes_recommendations = RECOMMENDATION in rule.when.type
    approve = {
        "immediately": "at once",
        "when-prepared": "when prepared" if is_prepared else "at once",
        "manual": "when an operator approves it",
        "never": "never",
    }[rule.approve]
    if rule.prepare and rule.approve == "when-prepared":
        approve += ", even if a hook fails" if rule.on_failure == "approve" else "; a failed hook holds it"
    if rule.when.type == (RECOMMENDATION,):
        approve = "never: a recommendation is not approved"
    elif takes_recommendations and rule.approve != "never":
        approve += "; a recommendation is not approved"
    over = f" (a recommendation after {format_duration(rule.expire_after)})" if takes_recommendations else ""
    is_timed = rule.approve != "never" and (rule.lead is not None or rule.window is not None)
    return Plan(
        begins=_format_begin(rule, reached, settings, _resources_of(rule)) if is_prepared or is_timed else "",
        drain_for=rule.drain_for,
        prepare=rule.prepare,
        limits=_format_limits(rule, reached, settings),
        on_start=rule.on_start,
        approve=approve,
        recover=rule.recover,
        recover_when=f"once it is over{over}",
        several_vms=_format_several_vms(rule, reached, settings),
    )


def _resources_of(rule: Rule) -> tuple[str, ...]:
    """The resources of an event that the rule is about."""
    if "self" in rule.when.affects:
        return (_THIS_VM,)
    return (_THIS_VM, _OTHER_VM) if "shared" in rule.when.affects else (_OTHER_VM,)


def _format_begin(rule: Rule, types: tuple[str, ...], settings: Settings, resources: tuple[str, ...]) -> str:
    """When the preparation for such an event begins, and for which types it does at another time."""
    types_by_text: dict[str, list[str]] = {}
    for type_ in types:
        text = _format_begin_of_type(rule, type_, settings, resources)
        types_by_text.setdefault(text, []).append(type_)
    if not types_by_text:
        return ""
    usual = max(types_by_text, key=lambda text: len(types_by_text[text]))
    others = [f"a {_join_or(types)} {text}" for text, types in types_by_text.items() if text != usual]
    return "; ".join([usual, *others])


def _format_begin_of_type(rule: Rule, type_: str, settings: Settings, resources: tuple[str, ...]) -> str:
    now = datetime.now(UTC)
    event = ScheduledEvent(
        id="1", type=type_, status="Scheduled", resources=resources, not_before=now + timedelta(days=30)
    )
    rule = replace(rule, when=When(type=rule.when.type, affects=("self", "others")))  # as if its conditions held
    facts = MatchContext(names=(_THIS_VM,), not_before_seen_at=now)
    decision = decide([rule], settings.maintenance_windows, event, facts)
    without_hooks = rule.drain_for + settings.agent.reserve
    hooks = sum(settings.hooks[name].limit_seconds for name in rule.prepare)
    latest = decision.latest_begin(event, without_hooks + hooks)
    if latest is None:
        return "at once"
    opens = f"in window {rule.window}, or " if decision.begins_in_window else ""
    is_by_hooks = latest != decision.latest_begin(event, without_hooks)
    quicker = ", or later if its hooks are known to be quicker" if is_by_hooks else ""
    return f"{opens}{format_estimate(latest.seconds)} before NotBefore{quicker}"


def _format_limits(rule: Rule, reached: tuple[str, ...], settings: Settings) -> str:
    """The time that Azure's promised notice leaves for the hooks of ``prepare``; "" if that is enough."""
    limits = sum(settings.hooks[name].limit_seconds for name in rule.prepare)
    types_by_time: dict[float, list[str]] = {}
    for time in promised_times(rule, reached, settings.hooks, settings.agent.reserve):
        if time.hooks < limits:
            types_by_time.setdefault(time.hooks, []).append(time.type)
    parts: list[str] = []
    for left, types in types_by_time.items():
        verb = "" if parts else "leaves them "
        parts.append(f"a {_join_or(types)} {verb}{format_duration(int(left))}")
    return ", ".join(parts)


def _may_approve_for_others(rule: Rule) -> bool:
    """Whether the rule approves by itself, and matches events that name this VM and others."""
    return rule.approve in ("immediately", "when-prepared") and bool({"self", "shared"} & set(rule.when.affects))


def _format_several_vms(rule: Rule, reached: tuple[str, ...], settings: Settings) -> str:
    """The difference for events that name other VMs too; "" if the sentence for all rules covers it."""
    if not _may_approve_for_others(rule):
        return ""
    is_prepared = bool(rule.prepare or rule.drain_for)
    begins = _format_begin(rule, reached, settings, (_OTHER_VM, _THIS_VM)) if is_prepared else ""
    late = f"begins {begins}; not approved" if begins else "not approved"
    if rule.shared == "any":
        return "approved for all of them"
    if rule.shared == "all-ready":
        return "approved once all of them are prepared"
    if rule.shared == "hold":
        return late
    if rule.approve == "immediately":
        return "" if rule.shared is None else "the first VM approves it, each one after it 10s later"
    if rule.shared == "first":
        return f"approved if this VM is the first of them; else {late}"
    differs = is_prepared and (rule.lead is not None or "at once" in begins)
    return late if differs else ""


def _join_or(words: Iterable[str]) -> str:
    *first, last = [*words] or [""]
    return f"{', '.join(first)} or {last}" if first else last
