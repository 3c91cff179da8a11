"""``doctor``: checks whether the agent can do its work on this machine, and says what to do.

Invariant: it approves nothing, runs no hook, and changes nothing on the machine.
"""

import argparse
import os
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
from msgspec.structs import replace

import scheduled_events_agent
from scheduled_events_agent import RUNBOOK, __version__, host, notifications
from scheduled_events_agent.cli import add_state_options, doctor_checks
from scheduled_events_agent.cli.config import find_config, load_trusted_policy, state_dir_of
from scheduled_events_agent.cli.doctor_checks import (
    UNMASK,
    Finding,
    command_in,
    failure,
    hidden,
    ok,
    skipped,
    waiting,
    warning,
)
from scheduled_events_agent.cli.operator import as_typed, options_in_force
from scheduled_events_agent.cli.status import ask_status, start_command
from scheduled_events_agent.cli.terminal import FIRST_ANSWER_IS_SLOW, Terminal, print_json, warn_if_slow
from scheduled_events_agent.hooks import preflight
from scheduled_events_agent.hooks.command import command_of
from scheduled_events_agent.host import conflicts, processes
from scheduled_events_agent.host.conflicts import ActingAgent, OwnService
from scheduled_events_agent.imds.api_version import candidate_versions, fetch_with_fallback
from scheduled_events_agent.imds.client import ImdsError, RawResponse, connect, parse_identity, resolve_endpoint
from scheduled_events_agent.imds.document import ApiVersion
from scheduled_events_agent.imds.guest_proxy import Caller, GuestProxy, caller
from scheduled_events_agent.policy import Hook, names_recommendations
from scheduled_events_agent.policy.durations import format_time, plural
from scheduled_events_agent.policy.load import ConfigError, LoadedPolicy
from scheduled_events_agent.policy.settings import (
    NotifyTarget,
    Settings,
    VmSettings,
    files_of_target,
    is_drain_command,
    is_foreign_path,
    is_started_as_root,
)
from scheduled_events_agent.status import NO_OPTIONS, SCHEMA_VERSION, CommandOptions, Status
from scheduled_events_agent.status.actions import STATE_LOST, command, quoted
from scheduled_events_agent.status.attention import is_inability, kind_of_loss, loss_message
from scheduled_events_agent.store import LOCK_NAME, Store, StoreError

# The service answers five requests a second to the whole VM, and an agent beside us makes its own.
_SPACING_SECONDS = 0.5

# Checks of what the metadata service answers.
_NEED_AN_ANSWER = ("vm-name", "version", "events", "clock")

_AS_AGENT = "run this as root or administrator, or as the agent's account"
_UNTRUSTED = "run that command: until then, root uses nothing of this policy"
_CORRECT = "correct it: an agent starts with the policy that it has accepted before, or not at all"
_DO_SO = "run that command: the agent does not start before"
_RESTART = f"restart it: {host.supervisor_commands().restart}"
_RELOAD = f"have it read again: {host.supervisor_commands().reload}; status says whether it was accepted"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``doctor --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    version: str
    ok: int
    """``ok`` to ``skipped``: number of checks with this state."""
    warning: int
    error: int
    skipped: int
    checks: tuple[Finding, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    parser.description = (
        "Looks at the metadata service, the clock, the policy, hooks, notifications, a Kubernetes cluster, state, "
        "service, and at other agents that approve events, and says what to do. Approves nothing, runs no hook, "
        "changes nothing on this machine; with a fleet it writes a record to its store and deletes it. Exit code "
        "0: no error; 1: an error was found."
    )
    add_state_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    findings: list[Finding] = []

    def examine() -> Iterator[Finding]:
        for finding in _examine(arguments.config, arguments.state_dir):
            findings.append(finding)
            yield finding

    if arguments.json:
        number = Counter(finding.state for finding in examine())
        print_json(
            Diagnosis(
                at=datetime.now(UTC),
                version=__version__,
                ok=number["ok"],
                warning=number["warning"],
                error=number["error"],
                skipped=number["skipped"],
                checks=tuple(findings),
            )
        )
    else:
        for line in doctor_checks.format_findings(examine(), Terminal.of(sys.stdout)):
            print(line, flush=True)
    return 1 if any(finding.state == "error" for finding in findings) else 0


def _examine(config: str | None, state_option: str | None) -> Iterator[Finding]:
    path = find_config(config)
    loaded: LoadedPolicy | None = None
    policy_error: ConfigError | None = None
    try:
        loaded = load_trusted_policy(path)
    except ConfigError as error:
        policy_error = error
    # Without a valid policy, the other checks use the running agent's settings, or else the defaults.
    settings = loaded.settings if loaded is not None else Settings()
    if policy_error is not None and policy_error.state_dir:
        settings = replace(settings, agent=replace(settings.agent, state_dir=policy_error.state_dir))
    state_dir = state_dir_of(settings, state_option).absolute()
    agent = _find_agent(state_dir)
    if isinstance(agent.status, Status):
        settings = _as_the_agent_uses(settings, agent.status, has_policy=loaded is not None)
    service: OwnService | None = None
    service_error = ""
    try:
        service = processes.own_service()
    except host.HostError as error:
        service_error = str(error)
    account = service.account if service is not None and service.account != host.account_name() else None

    yield from _check_imds(settings, agent.status, _caller_of(agent, service))
    options = agent.options(options_in_force(state_option, path, state_dir))
    if policy_error is not None:
        yield from _policy_failures(policy_error)
    if loaded is not None:
        yield from _check_policy(loaded, service, account)
        yield _check_fleet(settings, account)
        yield from _check_kubernetes(loaded.settings, account)
        yield from _check_notifications(loaded, agent.status, account, options)
    if _may_read(state_dir):
        yield _check_state(state_dir, account, is_in_use=agent.pid is not None)
        yield from _check_state_lost(state_dir, options)
        yield _check_disk(state_dir)
        yield _check_agent(state_dir, agent, service, loaded, options)
    else:
        yield from (hidden(check, host.account_name()) for check in ("state", "disk", "agent"))
    problem = str(policy_error.problems[0]) if policy_error is not None else ""
    yield doctor_checks.check_service(service, service_error, problem)
    yield from doctor_checks.check_other_agents(
        processes.other_approvers(), _other_agents(agent), is_acting=settings.agent.mode == "act"
    )


class _Agent(NamedTuple):
    """The agent that runs with a state directory, if there is one."""

    pid: str | None = None
    status: Status | str = ""
    """The agent's status, or why it did not answer."""
    lock_error: str = ""
    """Why it is not known whether an agent runs."""

    def options(self, in_force: CommandOptions) -> CommandOptions:
        """The agent's own command-line options, if it answers."""
        return self.status.command_options if isinstance(self.status, Status) else in_force


def _find_agent(state_dir: Path) -> _Agent:
    try:
        pid = host.lock_owner(state_dir / LOCK_NAME)
    except host.HostError as error:
        return _Agent(lock_error=str(error))
    if pid is None:
        return _Agent()
    with warn_if_slow("waits for the agent, which does not answer"):
        return _Agent(pid, ask_status(state_dir, pid))


def _as_the_agent_uses(settings: Settings, status: Status, *, has_policy: bool) -> Settings:
    """The settings with the endpoint that the agent asks; without a valid policy, also who it is and its mode."""
    settings = replace(settings, imds=replace(settings.imds, endpoint=status.endpoint))
    if has_policy:
        return settings
    names = status.vm.names
    vm = VmSettings(name=names[0] if names else None, aliases=names[1:])
    return replace(settings, vm=vm, agent=replace(settings.agent, mode=status.mode))


def _caller_of(agent: _Agent, service: OwnService | None) -> Caller:
    """The agent, as a rule of Azure's Guest Proxy Agent names it: the one that runs, or else will run."""
    if agent.pid and agent.pid.isdecimal():
        return caller(int(agent.pid))
    own = caller()
    if service is None:
        return own
    account = service.account.rpartition("\\")[2]
    return own._replace(user="SYSTEM" if account.casefold() == "localsystem" else account)


def _paths_asked(settings: Settings) -> list[str]:
    """The paths of the metadata service that the agent needs."""
    paths = ["/metadata/scheduledevents", "/metadata/instance"]
    fleet = settings.fleet
    if fleet is not None and fleet.table is not None:
        credential = fleet.credential
        if credential == "managed-identity" or credential.sas_file is None:
            paths.append("/metadata/identity")
    return paths


def _check_imds(settings: Settings, status: Status | str, agent: Caller) -> Iterator[Finding]:
    """``status``: of the agent that runs, if it answers. ``agent``: its process."""
    endpoint = resolve_endpoint(settings.imds.endpoint)
    imds = settings.imds
    is_polling = isinstance(status, Status) and status.last_poll_at is not None and not status.poll_failure
    guest_proxy = GuestProxy(has_answered=isinstance(status, Status) and status.guest_proxy)
    versions = candidate_versions(imds.api_version, has_recommendations=names_recommendations(settings.rules))

    def fetch(version: ApiVersion, longest: float) -> RawResponse:
        time.sleep(_SPACING_SECONDS)
        client = connect(
            endpoint,
            version,
            request_timeout=imds.request_timeout,
            first_request_timeout=imds.first_request_timeout,
            longest=longest,
            guest_proxy=guest_proxy,
        )
        answer = client.probe("document")
        if answer.error is not None and version != versions[-1]:
            raise answer.error
        return answer

    def check_proxy(*answers: RawResponse) -> Finding:
        other = doctor_checks.check_no_proxy(answers)
        if other.state != "ok":
            return other
        evidence = guest_proxy.evidence(httpx.URL(endpoint))
        is_denied = any(answer.error is not None and answer.error.is_of_guest_proxy for answer in answers)
        return doctor_checks.check_guest_proxy(agent, _paths_asked(settings), evidence, is_denied=is_denied)

    asked_at = datetime.now(UTC)
    try:
        client = connect(endpoint, request_timeout=imds.request_timeout, guest_proxy=guest_proxy)
        instance = client.probe("instance")
    except ImdsError as error:
        yield doctor_checks.check_unreachable("endpoint", error)
        if guest_proxy.evidence(httpx.URL(endpoint)):
            yield check_proxy()
        else:
            yield from waiting(["proxy"], "endpoint")
        yield from waiting(_NEED_AN_ANSWER, "endpoint")
        return
    answered_at = datetime.now(UTC)
    direct = check_proxy(instance)
    is_of_service = direct.state != "error"
    if instance.error is not None and is_of_service:  # there is no point in asking for more
        is_denied = instance.error.kind == "denied"
        if is_denied and is_polling and agent.user != host.account_name():
            yield doctor_checks.check_denied_here(host.account_name(), agent)
        else:
            yield doctor_checks.check_unreachable("endpoint", instance.error)
        yield direct
        yield from waiting(_NEED_AN_ANSWER, "endpoint")
        return
    yield ok("endpoint", f"{endpoint} answers, in {(answered_at - asked_at).total_seconds() * 1000:.0f} ms")
    if instance.error is not None or doctor_checks.is_html(instance):
        yield direct
        yield from waiting(_NEED_AN_ANSWER, "proxy")
        return
    identity = parse_identity(instance.body)
    reported = identity.name if identity is not None else ""
    names = tuple(filter(None, (settings.vm.name or reported, *settings.vm.aliases)))
    try:
        with warn_if_slow(FIRST_ANSWER_IS_SLOW):
            best = fetch_with_fallback(versions, fetch)
    except ImdsError as error:
        version = skipped("version", "waits for the check events")
        events = doctor_checks.check_unreachable("events", error)
    else:
        document = best.content
        version = doctor_checks.check_version(best)
        direct = check_proxy(instance, document)
        events = doctor_checks.check_document(document, names, socket.gethostname())
    yield direct
    yield doctor_checks.check_vm_name(settings.vm, reported)
    yield version
    yield events
    yield doctor_checks.check_clock(instance.headers.get("date"), asked_at, answered_at)


# --- the policy and what it names


def _policy_failures(error: ConfigError) -> Iterator[Finding]:
    """Why the policy cannot be used, and the checks that are not made because of it."""
    if isinstance(error, preflight.UntrustedPolicyError):
        for problem in error.problems:
            yield failure("permissions", problem.text, _UNTRUSTED)
        yield from waiting(("policy", "hooks", "secrets", "fleet", "kubernetes", "notifications"), "permissions")
        return
    denied = error.__cause__
    if isinstance(denied, PermissionError):
        yield warning("policy", f"{denied.filename}: cannot be read: {denied.strerror}", _AS_AGENT)
    else:
        for problem in error.problems:
            yield failure("policy", problem.text, _CORRECT)
    yield from waiting(("hooks", "secrets", "permissions", "fleet", "kubernetes", "notifications"), "policy")


def _check_policy(loaded: LoadedPolicy, service: OwnService | None, account: str | None) -> Iterator[Finding]:
    """Warnings about the policy. ``account``: the service's account, if this process runs as another one."""
    may_read = account is None or host.is_privileged()
    found = tuple(preflight.check_machine(loaded, is_root=_is_root(account))) if may_read else ()
    of_pages = [finding for finding in found if finding.subject == "web"]
    for problem in loaded.warnings:
        yield warning("policy", problem.text, "check that this is intended")
    for finding in of_pages:
        yield warning("policy", _line_of(loaded, finding), finding.hint)
    if loaded.settings.agent.mode == "observe":
        what = f"{loaded.name}: agent.mode is observe, so no hook runs and nothing is approved"
        yield warning("policy", what, "set it to act when explain and the log show what you want")
    elif not loaded.warnings and not of_pages:
        yield ok("policy", f"{loaded.name}: valid")
    yield from _check_units(loaded)
    if may_read:
        units_error = service.units_error if service is not None else ""
        yield from _check_hooks(loaded, found, account, units_error=units_error)
        yield from _check_secrets(account, is_loaded=service is not None and service.has_credentials)
        is_root_service = service is not None and doctor_checks.is_system(service.account)
        yield from _check_permissions(loaded, found, is_root_service=is_root_service)
        return
    yield from (hidden(check, host.account_name()) for check in ("hooks", "secrets", "permissions"))


def _line_of(loaded: LoadedPolicy, finding: preflight.Finding) -> str:
    """The finding with the line of the policy file that it is about."""
    return loaded.parsed.problem(finding.key, finding.message).text


def _check_hooks(
    loaded: LoadedPolicy, findings: Sequence[preflight.Finding], account: str | None, *, units_error: str
) -> Iterator[Finding]:
    """``units_error``: why run-as-root cannot start a hook's unit."""
    hooks = loaded.settings.hooks
    if not hooks:
        yield ok("hooks", "the policy names no hook")
        return
    found = {finding.key: _line_of(loaded, finding) for finding in findings if finding.subject == "hook"}
    unknown: set[str] = set()
    for name, hook in hooks.items():
        if units_error and is_started_as_root(hook):
            found[name] = f"hooks.{name}.run: run-as-root cannot start the hook: {units_error}"
        if any(path.startswith(f"hooks.{name}.") for path in found):
            continue
        try:
            if problem := _access_error(hook, account):
                found[name] = f"hooks.{name}.{problem}"
        except host.HostError as error:
            unknown.add(str(error))
    for text in found.values():
        yield failure("hooks", text, preflight.HOOK_HINT)
    for text in sorted(unknown):
        yield warning("hooks", text, "run this as root or administrator, or as the account that runs the hooks")
    if not found and not unknown:
        yield ok("hooks", f"{plural(len(hooks), 'hook')}: all programs exist and can be started")


def _check_units(loaded: LoadedPolicy) -> Iterator[Finding]:
    """The units that hooks stop and start. The shipped hooks have their names in ``env``."""
    named = {
        f"hooks.{name}.env.{key}": unit
        for name, hook in loaded.settings.hooks.items()
        for key, unit in hook.env.items()
        if key.endswith("_UNIT") and unit
    }
    if not named:
        return
    try:
        unknown = processes.unknown_units(set(named.values()))
    except host.HostError as error:
        yield skipped("hooks", f"whether the units of hooks exist cannot be checked: {error}")
        return
    errors = [(path, f"systemd does not know {unit}") for path, unit in named.items() if unit in unknown]
    seen = set[tuple[int | None, str]]()  # an alias stands where its anchor does
    for problem in loaded.parsed.to_problems(errors):
        if (problem.line, problem.message) not in seen:
            seen.add((problem.line, problem.message))
            yield warning(
                "hooks", problem.text, "write the name that systemctl list-unit-files has: the hook fails else"
            )


def _access_error(hook: Hook, account: str | None) -> str | None:
    """Why the account that runs the hook cannot, after the key that is wrong. Raises HostError."""
    who = account or host.account_name()
    if hook.user not in (None, who) and not doctor_checks.is_system(who):
        return f"user: {who} cannot run it as {hook.user}"
    if hook.run and is_foreign_path(hook.run[0]):
        return f"run: {hook.run[0]} is a path of another system"
    run = command_of(hook)
    program = processes.find_program(run[0], hook.cwd, hook.env) if run else None
    for key, file in (("run", program), ("cwd", Path(hook.cwd) if hook.cwd else None)):
        if file is not None and (problem := processes.find_access_error(file, "execute", hook.user or account)):
            return f"{key}: {problem}"
    return None


def _check_secrets(account: str | None, *, is_loaded: bool) -> Iterator[Finding]:
    """Whether hooks can read their secrets. ``is_loaded``: the service manager has loaded them for the service."""
    directory = processes.base_environment(None).get("CREDENTIALS_DIRECTORY")
    if is_loaded:
        yield ok("secrets", "systemd has loaded credentials for the service")
        return
    files: list[Path] = []
    errors = set[str]()
    try:
        if directory is None or not Path(directory).is_dir():
            yield ok("secrets", "there is no directory of secrets for hooks")
            return
        if problem := processes.find_access_error(Path(directory), "read", account):
            errors.add(problem)
        else:
            files = [path for path in Path(directory).iterdir() if path.is_file()]
        errors.update(filter(None, (processes.find_access_error(path, "read", account) for path in files)))
    except PermissionError:
        yield hidden("secrets", host.account_name())
        return
    except (host.HostError, OSError) as error:
        yield warning("secrets", f"{directory}: {error}", _AS_AGENT)
        return
    for problem in sorted(errors):
        advice = "if a hook needs it: chgrp scheduled-events-agent, and chmod 640 (the directory: chmod 750)"
        yield warning("secrets", problem, advice)
    if not errors:
        yield ok("secrets", f"hooks can read {plural(len(files), 'file')} in {directory}")


def _check_permissions(
    loaded: LoadedPolicy, findings: Sequence[preflight.Finding], *, is_root_service: bool
) -> Iterator[Finding]:
    exposed: dict[str, preflight.Finding] = {}
    for finding in findings:
        if finding.subject == "permission":  # of one file at several places, the first is the worst
            exposed.setdefault(finding.message, finding)
    for message, finding in exposed.items():
        finding_of = failure if finding.severity == "error" else warning
        yield finding_of("permissions", message, finding.hint)
    secrets = [finding for finding in findings if finding.subject == "secret"]
    for finding in secrets:
        yield warning("permissions", _line_of(loaded, finding), finding.hint)
    own = _own_code_risk() if is_root_service else None
    if own is not None:
        advice = (
            "install the agent where only root or administrators can write: who changes its code is one of them"
        )
        yield failure("permissions", own, advice)
    elif not exposed and not secrets:
        what = "the policy or the files that it names"
        if is_root_service:
            what = "the policy, the files that it names, or the agent's own code"
        yield ok("permissions", f"no other account can change {what}")


def _check_notifications(
    loaded: LoadedPolicy, status: Status | str, account: str | None, options: CommandOptions
) -> Iterator[Finding]:
    """Whether notifications work.

    ``account``: the service's account, if this process runs as another one.
    ``status``: the agent's status, if it answers.
    """
    targets = loaded.settings.notify
    known_targets = status.notify if isinstance(status, Status) else ()
    unusable: list[tuple[str, str]] = []
    if account is None or host.is_privileged():
        for target in targets:
            unusable += [(target.name, text) for text in _target_errors(target, account)]
    elif targets:
        yield hidden("notifications", host.account_name())
        return
    yield from doctor_checks.check_notifications(
        [target.name for target in targets],
        unusable,
        known_targets,
        lambda name: as_typed(command(options, "notify", "test", quoted(name))),
        datetime.now(UTC),
    )


def _target_errors(target: NotifyTarget, account: str | None) -> Iterator[str]:
    """Why the account cannot use the target; each reason once."""
    yield from dict.fromkeys(problem for _, problem in notifications.warnings([target]))
    if account is None:
        return
    for key, name in files_of_target(target):
        file = Path(name)
        try:
            if file.exists() and (problem := processes.find_access_error(file, "read", account)):
                yield f"{key}: {problem}"
        except (host.HostError, OSError) as error:
            yield f"{key}: {error}"


def _own_code_risk() -> str | None:
    """Which account could change the agent's code, and what to do. One is enough: there may be hundreds."""
    # All files and directories: byte code is code, too.
    code = {Path(sys.argv[0]), Path(sys.executable), *Path(scheduled_events_agent.__file__).parent.rglob("*")}
    for module in tuple(sys.modules.values()):
        files = getattr(module, "__file__", None), getattr(module, "__cached__", None)
        code.update(Path(file) for file in files if file is not None)
    for path in sorted(code):
        problem = host.find_write_risk(path, is_own_code=True)
        if problem is not None:
            return problem
    return None


def _is_root(account: str | None) -> bool:
    """Whether the agent, with this account or that of this process, is root or LocalSystem."""
    return doctor_checks.is_system(account) if account is not None else host.is_privileged()


def _check_fleet(settings: Settings, account: str | None) -> Finding:
    if settings.fleet is None:
        return ok("fleet", "the policy names no fleet")
    from scheduled_events_agent.cli import fleet  # noqa: PLC0415  # most policies have none

    time.sleep(_SPACING_SECONDS)
    return fleet.examine(settings, settings.fleet, account)


def _check_kubernetes(settings: Settings, account: str | None) -> Iterator[Finding]:
    if not settings.uses_kubernetes and not any(map(is_drain_command, settings.hooks.values())):
        yield ok("kubernetes", "the policy uses no cluster")
        return
    from scheduled_events_agent.cli import doctor_kubernetes  # noqa: PLC0415  # most policies have none

    yield from doctor_kubernetes.examine(settings, account)


# --- the state and the agent


def _may_read(directory: Path) -> bool:
    """Whether this account may look into the directory. True if the directory does not exist."""
    try:
        with os.scandir(directory):
            return True
    except PermissionError:
        return host.is_privileged()
    except OSError:
        return True


def _check_state(directory: Path, account: str | None, *, is_in_use: bool) -> Finding:
    """Whether the state directory can be used. ``is_in_use``: an agent runs with it."""
    who = account or host.account_name()
    is_unknown = account is None and not host.is_privileged()
    try:
        if problem := host.find_replacement_risk(directory):
            finding_of = failure if _is_root(account) else warning
            return finding_of("state", problem, "run that command, or name another directory with agent.state_dir")
        if not directory.exists():
            return ok("state", f"{directory} is not there yet: the agent makes it when it first starts")
        if not directory.is_dir():
            return failure("state", f"{directory} is not a directory", "name another one with agent.state_dir")
        if problem := host.find_privacy_risk(directory):
            return failure("state", f"{directory}: {problem}", _DO_SO)
        if problem := host.find_wrong_owner(directory, account):
            if account is None and is_in_use:
                return ok("state", f"{directory} is there, for the agent that runs with it")
            if account is None:  # the agent may run as the account that owns it
                return warning("state", f"{directory}: {problem}", _AS_AGENT)
            return failure("state", f"{directory}: {problem}", _DO_SO)
        if problem := processes.find_access_error(directory, "write", account):
            if is_unknown:
                return warning("state", problem, _AS_AGENT)
            return failure(
                "state", problem, f"make it writable for {who}, or name another one with agent.state_dir"
            )
    except (host.HostError, OSError) as error:
        if not host.is_privileged():
            return hidden("state", host.account_name())
        return warning("state", f"{directory}: {error}", _AS_AGENT)
    return ok("state", f"{directory} is there, for {who} alone, and writable{_state_since(directory)}")


def _state_since(directory: Path) -> str:
    """When the state file was created; "" if that cannot be read."""
    with suppress(StoreError), closing(Store.open_readonly(directory)) as store:
        if since := store.created_at():
            return f"; state since {format_time(since, datetime.now(UTC))}"
    return ""


def _check_state_lost(directory: Path, options: CommandOptions) -> Iterator[Finding]:
    """A loss of state that is not settled, whatever the policy says now."""
    with suppress(StoreError), closing(Store.open_readonly(directory)) as store:
        if loss := store.load_unsettled_loss():
            resolve = as_typed(command(options, "resolve", STATE_LOST))
            hint = f"when this machine is in service: {resolve}; runbook {RUNBOOK}#{kind_of_loss(loss)}"
            yield warning("state", loss_message(loss, datetime.now(UTC)), hint, command=resolve)


def _check_disk(directory: Path) -> Finding:
    try:
        place = next(path for path in (directory, *directory.parents) if path.exists())
        temporary = processes.temporary_disk(place)
        system = processes.file_system(place)
        free_bytes = shutil.disk_usage(place).free
    except (OSError, StopIteration) as error:
        return warning("disk", f"{directory}: {error}", _AS_AGENT)
    kind = system[0] if system else None
    return doctor_checks.check_disk(
        str(directory),
        None if temporary is None else str(temporary),
        kind,
        free_bytes,
        is_cleared=preflight.is_cleared(directory),
    )


def _check_agent(
    state_dir: Path,
    agent: _Agent,
    service: OwnService | None,
    loaded: LoadedPolicy | None,
    options: CommandOptions,
) -> Finding:
    if agent.lock_error and not host.is_privileged():
        return hidden("agent", host.account_name())
    if agent.lock_error:
        return warning("agent", agent.lock_error, "check the disk of the state directory")
    if agent.pid is None:
        return _check_absent_agent(state_dir, service, options)
    return check_running_agent(agent.pid, agent.status, loaded)


def _other_agents(agent: _Agent) -> list[ActingAgent]:
    """The acting agents, except the one that is checked: that of the state directory, else the service."""
    pids = {int(agent.pid)} if agent.pid and agent.pid.isdecimal() else set[int]()
    try:
        is_service = all(map(processes.is_of_own_service, pids))
    except OSError:  # it has just ended, as a service that fails at each start does
        is_service = True
    return conflicts.acting_agents(pids, processes.is_of_own_service if is_service else None)


def _check_absent_agent(state_dir: Path, service: OwnService | None, options: CommandOptions) -> Finding:
    if service is not None and service.is_running:
        return warning(
            "agent",
            f"the service runs (pid {service.pid}), but not with the state directory {state_dir}",
            "name with --config and --state-dir what the service is started with",
        )
    start = start_command(options)
    hint = f"start it: {start}"
    if options == NO_OPTIONS and service is not None:
        if service.is_masked:
            hint = UNMASK
            start = command_in(UNMASK)
        elif service.is_starting or service.failure is not None:
            hint = "see the check service"
            start = ""
    return warning("agent", f"no agent runs with the state directory {state_dir}", hint, command=start)


def check_running_agent(pid: str, status: Status | str, loaded: LoadedPolicy | None) -> Finding:
    """Whether the agent that runs is well, and does what the policy file says."""
    if isinstance(status, str):
        return warning("agent", status, "see the checks state and disk, and its log; if it stays, restart it")
    runs = f"runs (pid {pid}), version {status.version}"
    show_status = as_typed(command(status.command_options, "status"))
    look = f"see {show_status}"
    if status.health != "ok":
        problems = " ".join(status.health)
        worst = next(filter(is_inability, status.attention))
        return failure(
            "agent",
            f"{runs}, and is not healthy: {problems}",
            f"{look}, and its log; runbook {worst.runbook}",
            command=show_status,
        )
    needs = [
        warning("agent", f"{runs}: {one.message}", f"{look}; runbook {one.runbook}", command=show_status)
        for one in status.attention
    ]
    if status.condition == "act":
        return needs[0]
    if status.condition == "unknown":
        return warning("agent", f"{runs}: {status.headline}", "see the check endpoint; if it stays, its log")
    warnings = [(status.version != __version__, f"{__version__} is installed", _RESTART)]
    policy = status.policy
    read_at = format_time(policy.read_at, status.at) if policy is not None else ""
    if policy is not None and policy.rejected:
        in_force = f"with the policy accepted at {read_at}: its file as it is now is rejected"
        warnings.append((True, in_force, f"correct it; then {_RELOAD}"))
    elif loaded is not None and policy is not None:
        is_other = os.path.realpath(loaded.name) != os.path.realpath(policy.file)
        looked = f"with the policy {policy.file}, and these checks looked at another"
        read = f"with the policy as it was read at {read_at}; its file has changed since"
        observes = status.mode == "observe" and loaded.settings.agent.mode == "act"
        warnings += [
            (is_other, looked, "name that one with --config, or restart the agent"),
            (policy.hash != loaded.hash, read, _RELOAD),
            (observes, "and only observes: no hook runs and nothing is approved", "start it without --observe"),
        ]
    supervisor = host.supervisor_commands()
    for is_so, problem, advice in warnings:
        if is_so:
            command_line = next((line for line in (supervisor.reload, supervisor.restart) if line in advice), "")
            return warning("agent", f"{runs}, {problem}", advice, command=command_line)
    return needs[0] if needs else ok("agent", runs)
