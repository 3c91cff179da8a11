"""``doctor``: would the agent do its work on this machine, and if not, what helps?

Looks at everything; the verdicts are those of ``diagnosis``. The one invariant: it approves nothing, runs no
hook, and leaves the machine as it was.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import to_builtins

from agent import __version__, host
from agent.cli import add_config_option, diagnosis
from agent.cli.diagnosis import AS_AGENT, Finding, Page, count, failure, ok, warning
from agent.cli.terminal import FIRST_ANSWER_IS_SLOW, Terminal, remark_if_slow
from agent.host import systemd_unit
from agent.host.surroundings import OwnService
from agent.imds import Answer, ImdsClient, ImdsError, resolve_endpoint
from agent.policy import Hook
from agent.settings import BUILT_IN_NAME, ConfigError, ImdsSettings, Loaded, Settings, find_config, load_policy
from agent.settings.files import check_files, hook_tampering_fault
from agent.status import Status

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# The service answers five requests a second to the whole VM, and an agent beside us makes its own.
_SPACING_SECONDS = 0.5
_AFTER_THROTTLED_SECONDS = 2.0
_PAGE_SECONDS = 5.0
_MAX_STATUS_BYTES = 8 * 1024 * 1024
_SERVER = "scheduled-events-agent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    parser.description = (
        "Looks at the metadata service, the clock, the policy, hooks, state, service, and at other agents that "
        "approve events, and says what to do. Approves nothing, runs no hook, changes nothing. Exit code "
        "0: no failure; 1: a check failed."
    )
    add_config_option(parser)
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the agent's state directory (overrides the policy file)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    findings: list[Finding] = []

    def examine() -> Iterator[Finding]:
        for finding in _examine(arguments.config, arguments.state_dir):
            findings.append(finding)
            yield finding

    if arguments.json:
        number = Counter(finding.verdict for finding in examine())
        counts = {verdict: number[verdict] for verdict in get_args(diagnosis.Verdict)}
        print(json.dumps({"version": __version__, **counts, "checks": to_builtins(findings)}, indent=2))
    else:
        for line in diagnosis.in_words(examine(), Terminal.of(sys.stdout)):
            print(line, flush=True)
    return 1 if any(finding.verdict == "failure" for finding in findings) else 0


def _examine(config: str | None, state_option: str | None) -> Iterator[Finding]:
    loaded: Loaded | None = None
    policy_error: ConfigError | None = None
    try:
        loaded = load_policy(find_config(config, host.default_config_path()))
    except ConfigError as error:
        policy_error = error
    # Without a valid policy, the rest is looked at with the defaults.
    settings = loaded.settings if loaded is not None else Settings()
    service: OwnService | None = None
    service_fault = ""
    try:
        service = host.own_service()
    except host.HostError as error:
        service_fault = str(error)
    account = service.account if service is not None and service.account != host.account_name() else None

    yield from _look_at_imds(settings)
    if policy_error is not None:
        is_hidden = isinstance(policy_error.__cause__, PermissionError)
        for problem in policy_error.problems:
            if is_hidden:
                yield warning("policy", problem, AS_AGENT)
            else:
                yield failure("policy", problem, "correct it: the agent does not start with this policy")
    if loaded is not None:
        yield from _look_at_policy(loaded, account)
    chosen = state_option or settings.agent.state_dir
    state_dir = Path(chosen).absolute() if chosen else host.default_state_dir()
    yield from _look_at_agent(state_dir, account, settings.agent.listen, loaded, service)
    yield diagnosis.judge_service(service, service_fault)
    yield from diagnosis.judge_others(host.other_approvers(), is_acting=settings.agent.mode == "act")


# --- the metadata service


class _Asker:
    """Asks the service a few questions, slowly: an agent asks too, and the limit is for the whole VM."""

    asked_at: datetime
    answered_at: datetime

    def __init__(self, endpoint: str, imds: ImdsSettings) -> None:
        self._client = ImdsClient(
            endpoint,
            api_version=imds.api_version,
            request_timeout=imds.request_timeout,
            first_request_timeout=imds.first_request_timeout,
        )
        self._pause = 0.0
        self.throttled = 0
        """How many requests were refused for their number."""

    def ask(self, what: Literal["document", "instance"]) -> Answer:
        """The answer; after a refusal for too many requests that to a second try. Raises ImdsError."""
        answer = self._ask(what)
        if answer.status == 429:
            self.throttled += 1
            self._pause = _AFTER_THROTTLED_SECONDS
            answer = self._ask(what)
        return answer

    def _ask(self, what: Literal["document", "instance"]) -> Answer:
        time.sleep(self._pause)
        self._pause = _SPACING_SECONDS
        self.asked_at = datetime.now(UTC)
        answer = self._client.inspect(what)
        self.answered_at = datetime.now(UTC)
        return answer


def _look_at_imds(settings: Settings) -> Iterator[Finding]:
    imds = settings.imds
    endpoint = resolve_endpoint(imds.endpoint)
    asker = _Asker(endpoint, imds)
    try:
        instance = asker.ask("instance")
    except ImdsError as error:
        yield diagnosis.judge_no_answer("endpoint", error)
        return
    took = (asker.answered_at - asker.asked_at).total_seconds()
    clock = diagnosis.judge_clock(instance.headers.get("date"), asker.asked_at, asker.answered_at)
    if end := diagnosis.judge_first_answer(instance):
        yield end
        return
    yield ok("endpoint", f"{endpoint} answers, in {took * 1000:.0f} ms")
    document: Answer | ImdsError
    try:
        with remark_if_slow(FIRST_ANSWER_IS_SLOW):
            document = asker.ask("document")
    except ImdsError as error:
        document = error
    variables = [name for name in os.environ if name.lower() in _PROXY_VARIABLES]
    answers = [instance, document] if isinstance(document, Answer) else [instance]
    yield diagnosis.judge_directness(answers, variables)
    yield diagnosis.judge_name(settings.vm, instance)
    if isinstance(document, ImdsError):
        yield diagnosis.judge_no_answer("events", document)
    elif document.status in (200, 400):
        yield diagnosis.judge_version(document, imds.api_version)
    if isinstance(document, Answer) and document.status not in (400, 429):
        names = diagnosis.names_of(settings.vm, instance)
        yield diagnosis.judge_document(document, names, socket.gethostname())
    yield clock
    is_refused = isinstance(document, Answer) and document.status == 429
    yield diagnosis.judge_rate(imds.poll_interval, asker.throttled, is_refused=is_refused)


# --- the policy and what it names


def _look_at_policy(loaded: Loaded, account: str | None) -> Iterator[Finding]:
    """``account``: the service's, if it is not that of this process; so too below."""
    for doubt in loaded.warnings:
        yield warning("policy", str(doubt), "check that this is intended")
    if loaded.settings.agent.mode == "observe":
        what = f"{loaded.name}: agent.mode is observe, so no hook runs and nothing is approved"
        yield warning("policy", what, "set it to act once explain and the log show what you want")
    elif not loaded.warnings:
        yield ok("policy", f"{loaded.name}: valid")
    if account is None or host.is_privileged():
        yield from _look_at_hooks(loaded, account)
        yield from _look_at_files(loaded, account)
        return
    for check in ("hooks", "files"):
        what = f"the agent runs as {account}, and {host.account_name()} cannot tell what that account may do"
        yield warning(check, what, AS_AGENT)


def _look_at_hooks(loaded: Loaded, account: str | None) -> Iterator[Finding]:
    hooks = loaded.settings.hooks
    if not hooks:
        yield ok("hooks", "the policy names none")
        return
    exposed = {hook_tampering_fault(hook) for hook in hooks.values()}
    found = {
        problem.path: str(problem)
        for problem in check_files(loaded)
        if problem.path.startswith("hooks.") and problem.message not in exposed
    }
    unknown: set[str] = set()
    for name, hook in hooks.items():
        if any(path.startswith(f"hooks.{name}.") for path in found):
            continue
        try:
            if fault := _access_fault(hook, account):
                found[name] = f"hooks.{name}.{fault}"
        except host.HostError as error:
            unknown.add(str(error))
    texts = list(found.values())
    units = [hook.unit for hook in hooks.values() if hook.unit is not None]
    if units and account is not None and not _is_system(account):
        texts.extend(_without_leave(units))
    for text in texts:
        yield failure(
            "hooks", text, "correct it: until then the hook fails, and a failed prepare hook holds its event"
        )
    for text in sorted(unknown):
        yield warning("hooks", text, "run this as root, or as the account that runs the hooks")
    if not texts and not unknown:
        yield ok("hooks", f"{count(len(hooks), 'hook')}: what they name is there, and can be started")


def _access_fault(hook: Hook, account: str | None) -> str | None:
    """Why the account that runs the hook cannot, after the key that is wrong. Raises HostError."""
    who = account or host.account_name()
    if hook.user not in (None, who) and not _is_system(who):
        return f"user: {who} cannot run it as {hook.user}"
    program = host.find_program(hook.run[0], hook.cwd, hook.env) if hook.run else None
    for key, file in (("run", program), ("cwd", Path(hook.cwd) if hook.cwd else None)):
        if file is not None and (fault := host.access_fault(file, "execute", hook.user or account)):
            return f"{key}: {fault}"
    return None


def _without_leave(units: list[str]) -> list[str]:
    """About the units that the agent's account may not start."""
    unnamed = systemd_unit.unnamed_units(units)
    if unnamed is None:
        return [f"{systemd_unit.RULE_FILE} cannot be read: run this as root"]
    where = f"is not named by the polkit rule {systemd_unit.RULE_FILE}: install-unit --strict writes it anew"
    return [f"{name} {where}" for name in unnamed]


def _look_at_files(loaded: Loaded, account: str | None) -> Iterator[Finding]:
    faults = []
    if loaded.name != BUILT_IN_NAME:
        faults.append(host.tampering_fault(Path(loaded.name)))
    faults.extend(hook_tampering_fault(hook) for hook in loaded.settings.hooks.values())
    is_refused = _is_system(account) if account is not None else host.is_privileged()
    found = list(dict.fromkeys(fault for fault in faults if fault))
    for fault in found:
        if is_refused:
            yield failure(
                "files", fault, "do so: an agent that runs as root or LocalSystem does not start with such files"
            )
        else:
            yield warning("files", fault, "do so, unless you trust those who can")
    if not found:
        yield ok("files", "no other account can change the policy or what its hooks run")


def _is_system(account: str) -> bool:
    return account.rpartition("\\")[2].casefold() in ("root", "localsystem", "system")


# --- the state


def _look_at_state(directory: Path, account: str | None, *, is_in_use: bool) -> Finding:
    """``is_in_use``: an agent runs with this directory."""
    if not directory.exists():
        return ok("state", f"{directory} is not there yet: the agent makes it when it first starts")
    if not directory.is_dir():
        return failure("state", f"{directory} is no directory", "name another one with agent.state_dir")
    who = account or host.account_name()
    if fault := host.privacy_fault(directory):
        return failure("state", f"{directory}: {fault}", "do so: the agent does not start with it")
    if fault := host.ownership_fault(directory, account):
        if account is None and is_in_use:
            return ok("state", f"{directory} is there, for the agent that runs with it")
        if account is None:  # the agent may run as the account that owns it
            return warning("state", f"{directory}: {fault}", AS_AGENT)
        return failure("state", f"{directory}: {fault}", "do so: the agent does not start with it")
    if fault := host.access_fault(directory, "write", account):
        if account is None and not host.is_privileged():
            return warning("state", fault, AS_AGENT)
        return failure("state", fault, f"make it writable for {who}, or name another one with agent.state_dir")
    if account is None:
        with tempfile.TemporaryFile(dir=directory) as file:  # without a name, where the system can do that
            file.write(b"\0" * 4096)
            file.flush()
    return ok("state", f"{directory} is there, for {who} alone, and writable")


def _state_finding(directory: Path, account: str | None, *, is_in_use: bool) -> Finding:
    try:
        return _look_at_state(directory, account, is_in_use=is_in_use)
    except host.HostError as error:
        return warning("state", f"{directory}: {error}", AS_AGENT)
    except OSError as error:
        what = f"{directory}: cannot be written by {host.account_name()}: {error.strerror}"
        if isinstance(error, PermissionError) and not host.is_privileged():
            return warning("state", what, AS_AGENT)
        return failure("state", what, "make it writable, or name another one with agent.state_dir")


def _look_at_disk(directory: Path) -> Finding:
    try:
        place = next(path for path in (directory, *directory.parents) if path.exists())
        temporary, system = host.temporary_disk(place), host.file_system(place)
        free_bytes = shutil.disk_usage(place).free
    except (OSError, StopIteration) as error:
        return warning("disk", f"{directory}: {error}", AS_AGENT)
    kind = system[0] if system else None
    return diagnosis.judge_disk(str(directory), None if temporary is None else str(temporary), kind, free_bytes)


# --- the agent itself


def _look_at_agent(
    state_dir: Path, account: str | None, listen: str, loaded: Loaded | None, service: OwnService | None
) -> Iterator[Finding]:
    """The state, its disk, the agent that runs with it, and its pages."""
    holder, lock_fault = None, ""
    try:
        holder = host.lock_holder(state_dir / "lock")
    except host.HostError as error:
        lock_fault = str(error)
    yield _state_finding(state_dir, account, is_in_use=holder is not None)
    yield _look_at_disk(state_dir)
    if lock_fault:
        yield warning("agent", lock_fault, "run this as root or administrator")
        return
    page = _fetch_page(listen) if holder is not None and listen != "off" else None
    if holder is None:
        yield diagnosis.judge_no_agent(state_dir, service)
    else:
        doubt = _doubt_about_policy(loaded, page.status) if loaded and page and page.status else None
        yield diagnosis.judge_agent(holder, page, doubt)
    yield _look_at_pages(listen, page, is_running=holder is not None)


def _fetch_page(listen: str) -> Page | None:
    """What the agent says at /status; None if the pages are not an agent's, or not for all."""
    address, port = _address_of(listen)
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - not to listen on
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=_PAGE_SECONDS)) as connection:
        try:
            connection.request("GET", "/status")
            answer = connection.getresponse()
            body = answer.read(_MAX_STATUS_BYTES)
        except TimeoutError:
            return Page(version="", status=None, late_seconds=_PAGE_SECONDS)
        except (OSError, http.client.HTTPException):
            return None
    name, _, version = answer.headers.get("Server", "").partition("/")
    if name != _SERVER:
        return None
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:  # of another version, or an error page
        status = None
    return Page(version=version.split(" ")[0], status=status)


def _doubt_about_policy(loaded: Loaded, status: Status) -> tuple[str, str] | None:
    """How the agent that runs differs from the policy file, and what to do."""
    changed_at = None
    with contextlib.suppress(OSError):  # the built-in policy has no file
        changed_at = datetime.fromtimestamp(Path(loaded.name).stat().st_mtime, UTC)
    return diagnosis.judge_what_runs(
        status,
        is_of_this_file=os.path.realpath(loaded.name) == os.path.realpath(status.policy.file),
        changed_at=changed_at,
        is_to_act=loaded.settings.agent.mode == "act",
    )


def _look_at_pages(listen: str, page: Page | None, *, is_running: bool) -> Finding:
    if listen == "off":
        return ok("listen", "off: the agent serves no pages")
    if page is not None and not page.late_seconds:
        return ok("listen", f"the agent serves its pages on {listen}")
    address, port = _address_of(listen)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as claim:
            host.claim_port(claim)
            claim.bind(place)  # and not listen: no client can connect
    except OSError as error:
        if is_running:
            return ok(
                "listen", f"{listen} is taken, perhaps by the agent, and answers no plain HTTP request for a page"
            )
        return failure(
            "listen",
            f"{listen} cannot be used: {error.strerror or error}",
            "set agent.listen to a free port of this machine, or to off",
        )
    if is_running and port:
        return warning(
            "listen",
            f"an agent runs, but no program listens on {listen}",
            "restart the agent if agent.listen was changed since it started; else name its policy with --config",
        )
    return ok("listen", f"{listen} is free")


def _address_of(listen: str) -> tuple[str, int]:
    address, _, port = listen.rpartition(":")
    return address.strip("[]"), int(port)
