"""``check``: is the policy file right, and what does it say?"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.api_version import versions_to_ask
from scheduled_events_agent.cli import add_config_option
from scheduled_events_agent.cli.terminal import Row, Terminal, print_json
from scheduled_events_agent.events import RECOMMENDATION
from scheduled_events_agent.policy import Rule, When
from scheduled_events_agent.settings import (
    BUILT_IN_NAME,
    ConfigError,
    Loaded,
    Settings,
    find_config,
    inspect_policy,
    load_policy,
)
from scheduled_events_agent.settings.checks import Finding
from scheduled_events_agent.settings.files import file_doubts, refused_files
from scheduled_events_agent.settings.schema import policy_schema
from scheduled_events_agent.spelling import format_duration, plural
from scheduled_events_agent.typed_yaml import Problem

# For the metadata service, which other machines than VMs in Azure lack.
_ASK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``check``."""
    parser.description = "Checks the policy file and tells what it says. Exit code 0: valid; 2: not valid."
    parser.add_argument("file", nargs="?", metavar="FILE", help="the policy file; the same as --config FILE")
    add_config_option(parser)
    parser.add_argument("--strict", action="store_true", help="take warnings for errors: exit code 2")
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="look at nothing but the policy file: at no hook, secret, certificate, account or permission",
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
        about = {"file": loaded.name, "hash": loaded.hash} if loaded else {}
        print_json({**about, "valid": is_valid, "problems": report.errors, "warnings": report.warnings})
        return 0 if is_valid else 2
    terminal = Terminal.of(sys.stdout)
    if loaded and is_valid:
        print(*terminal.line(f"{loaded.name}: valid"), sep="\n")
    for line in report.lines:
        print(*terminal.line(line, indent=2), sep="\n")
    if loaded and is_valid:
        print("", *_policy_in_words(loaded, terminal), sep="\n")
        return 0
    counts = [plural(len(report.errors), "error")]
    counts += [plural(len(report.warnings), "warning")] if report.warnings else []
    reason = "" if report.errors else " (--strict)"
    print(f"not valid: {', '.join(counts)}{reason}")
    return 2


class _Report(NamedTuple):
    """What is wrong with a policy file."""

    loaded: Loaded | None
    """None if the file cannot be read."""
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    """Both, for people, in the order of the file."""


def _examine(config: str | None, *, is_alone: bool) -> _Report:
    """``is_alone``: look at nothing but the policy file."""
    try:
        inspected = inspect_policy(find_config(config, host.default_config_path()))
    except ConfigError as error:
        return _Report(None, error.problems, (), error.problems)
    loaded = inspected.loaded
    refused: list[Finding] = []
    doubts: list[Finding] = []
    if not is_alone:
        refused += dict.fromkeys(inspected.in_valid_parts(_refused(loaded)))
        doubts += inspected.in_valid_parts((*file_doubts(loaded), *_target_doubts(loaded.settings)))
    errors = (*inspected.errors, *loaded.parsed.gather(refused))
    warnings = (*loaded.warnings, *loaded.parsed.gather(doubt for doubt in doubts if doubt not in refused))
    by_line = [(error.line, str(error)) for error in errors]
    by_line += [(warning.line, f"warning: {warning}") for warning in warnings]
    return _Report(
        loaded,
        _in_order(errors),
        _in_order(warnings),
        tuple(text for _, text in sorted(by_line, key=lambda line: line[0])),
    )


def _in_order(problems: tuple[Problem, ...]) -> tuple[str, ...]:
    return tuple(str(problem) for problem in sorted(problems, key=lambda problem: problem.line))


def load_checked(config: str | None) -> Loaded:
    """The policy of an agent with this option --config. Raises ConfigError if it is not valid."""
    loaded = load_policy(find_config(config, host.default_config_path()))
    if errors := loaded.parsed.gather(_refused(loaded)):
        raise ConfigError(tuple(map(str, errors)))
    return loaded


def _refused(loaded: Loaded) -> Iterator[Finding]:
    """Why this machine does not use the policy."""
    yield from refused_files(loaded)
    fleet = loaded.settings.fleet
    if fleet is None:
        return
    from scheduled_events_agent.fleet import table  # noqa: PLC0415  # most policies have none

    yield from table.faults(fleet)
    if not fleet.group:
        yield from _group_faults(loaded.settings)


def _group_faults(settings: Settings) -> Iterator[Finding]:
    from scheduled_events_agent import imds  # noqa: PLC0415  # with httpx, half of this command's start

    brief = replace(settings.imds, request_timeout=min(_ASK_SECONDS, settings.imds.request_timeout))
    try:
        group = imds.connect(brief).fetch_identity().group
    except imds.ImdsError:
        return  # not on the VM that the policy is for
    if not group:
        yield "fleet.group", "the key is missing, and this VM is in no scale set that could be the group: add it"


def _target_doubts(settings: Settings) -> Iterator[Finding]:
    """Warnings about services that are to be notified, and about the fleet's table."""
    if settings.notify:
        from scheduled_events_agent.notices import doubts  # noqa: PLC0415  # with httpx, half of this command's start

        yield from doubts(settings.notify)
    if settings.fleet:
        from scheduled_events_agent.fleet import table  # noqa: PLC0415  # as above

        yield from table.doubts(settings.fleet)


def _policy_in_words(loaded: Loaded, terminal: Terminal) -> Iterator[str]:
    settings = loaded.settings
    if loaded.name != BUILT_IN_NAME and "rules" not in loaded.parsed.lines:
        what = "names no rules" if loaded.parsed.lines else "is empty"
        yield f"The file {what}: the built-in rules are in force."
    yield "The first rule that matches takes the event:"
    rows = [
        Row(rule.name, f"{_when_in_words(rule.when)}: {_rule_in_words(rule, settings)}") for rule in settings.rules
    ]
    yield from terminal.rows([*rows, Row("(none)", "observed: logged and counted, nothing more")])
    imds = settings.imds
    agent = settings.agent
    versions = ", else ".join(versions_to_ask(imds.api_version, settings.rules))
    poll = f"asks {imds.endpoint} every {format_duration(imds.poll_interval)} (api-version {versions})"
    listen = "serves no pages" if agent.listen == "off" else f"serves its pages on {agent.listen}"
    mode = "" if agent.mode == "act" else "; mode observe: runs no hooks and approves nothing"
    clear = f"; runs {', '.join(settings.on_clear)} at start if nothing is pending" if settings.on_clear else ""
    yield ""
    yield from terminal.line(f"The agent {poll}; {listen}{clear}{mode}.")
    for target in settings.notify:
        words = f"{_when_in_words(target.when)}: when {_either(target.on).replace('_', ' ')}"
        yield from terminal.line(f"It notifies {target.name} (body {target.body}). {words}.")
    if fleet := settings.fleet:
        limit = f", {plural(fleet.max_events, 'event')} at a time" if fleet.max_events else ""
        away = "holds events" if fleet.when_away == "hold" else "proceeds alone"
        group = f"group {fleet.group}" if fleet.group else "its scale set"
        words = f"It acts with the VMs of {group} through {fleet.table}{limit}; without the table it {away}."
        yield from terminal.line(words)


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
        below = getattr(when, f"{kind}_below")
        at_least = getattr(when, f"{kind}_at_least")
        limits = [f"at least {format_duration(at_least)}"] if at_least is not None else []
        limits += [f"less than {format_duration(below)}"] if below is not None else []
        if limits:
            ahead = " ahead" if kind == "notice" else ""
            parts.append(f"{words} {' and '.join(limits)}{ahead}")
    return " ".join(parts)


def _rule_in_words(rule: Rule, settings: Settings) -> str:
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
    if rule.when.type != (RECOMMENDATION,):
        parts.append(approve)
    begin = _beginning_in_words(rule, settings)
    words = f"{begin}, {', then '.join(parts)}" if begin else ", then ".join(parts)
    if rule.on_start:
        words += f"; once started run {', '.join(rule.on_start)}"
    if rule.recover:
        words += f"; afterwards run {', '.join(rule.recover)}"
    if RECOMMENDATION in rule.when.type:
        words += f"; a recommendation is not approved, and over after {format_duration(rule.expire_after)}"
    return words + _sharing_in_words(rule, settings)


def _beginning_in_words(rule: Rule, settings: Settings) -> str:
    """When the rule has an event begun; "" if as soon as it is known."""
    if rule.when.type == (RECOMMENDATION,):
        return "at once"
    is_approved = rule.approve in ("immediately", "when-prepared")
    begin = []
    if rule.window is not None and is_approved:
        begin.append(f"in window {rule.window}, or")
    if rule.lead is not None:
        begin.append(f"from {format_duration(rule.lead)} before NotBefore")
    elif rule.window is not None and is_approved:
        begin.append("shortly before NotBefore")
    elif not is_approved and (rule.prepare or rule.drain_for):
        begin.append(_late_in_words(rule, settings))
    return " ".join(begin)


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
    if mode == "all-ready":
        return "; if it names other VMs too, not before all of them are prepared"
    if rule.approve == "immediately" and mode == "first":
        return ""
    unless = ", unless it names this VM first" if mode == "first" else ""
    is_late = rule.lead is None and bool(rule.prepare or rule.drain_for)
    late = f" prepare {_late_in_words(rule, settings)} and" if is_late else ""
    return f"; if it names other VMs too,{late} do not approve{unless}"


def _either(words: Iterable[str]) -> str:
    *first, last = [*words] or [""]
    return f"{', '.join(first)} or {last}" if first else last
