"""``doctor``: would the agent do its work on this machine, and if not, what is to be done?

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
from typing import Literal, NamedTuple, get_args

import msgspec
from msgspec import to_builtins

from agent import __version__, host
from agent.cli import add_config_option, diagnosis
from agent.cli.diagnosis import Finding, count, failure, judge_disk, judge_others, judge_what_runs, ok, warning
from agent.cli.terminal import FIRST_ANSWER_IS_SLOW, Terminal, remark_if_slow
from agent.host import systemd_unit
from agent.host.surroundings import OwnService
from agent.imds import Answer, ImdsClient, ImdsError, resolve_endpoint
from agent.settings import BUILT_IN_NAME, ConfigError, ImdsSettings, Loaded, Settings, find_config, load_policy
from agent.settings.files import check_files, hook_tampering_fault
from agent.status import Status

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# The service answers five requests a second to the whole VM, and an agent beside us makes its own.
_SPACING_SECONDS = 0.5
_AFTER_THROTTLED_SECONDS = 2.0
_PAGE_SECONDS = 5.0
_MAX_PAGE_BYTES = 4096
_MAX_STATUS_BYTES = 8 * 1024 * 1024
_SERVER = "scheduled-events-agent/"
_AS_AGENT = "run this as root, or as the agent's account"
_START = "start it: systemctl start scheduled-events-agent, or scheduled-events-agent service start on Windows"
_UNMASK = (
    "if it is to run: systemctl unmask scheduled-events-agent, then systemctl enable --now scheduled-events-agent"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    parser.description = (
        "Looks at the metadata service, the clock, the policy, hooks, state, service, and at other agents that "
        "approve events, and tells what is to be done. Approves nothing, runs no hook, changes nothing. Exit code "
        "0: no failure; 1: a check failed."
    )
    add_config_option(parser)
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the agent's state directory (overrides the policy file)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> int:
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
    problems: tuple[str, ...] = ()
    is_hidden = False
    try:
        loaded = load_policy(find_config(config, host.default_config_path()))
    except ConfigError as error:
        problems, is_hidden = error.problems, isinstance(error.__cause__, PermissionError)
    # Of an invalid policy nothing is certain, so the rest is seen with what holds without one.
    settings = loaded.settings if loaded is not None else Settings()
    service: OwnService | None = None
    service_fault = ""
    try:
        service = host.own_service()
    except host.HostError as error:
        service_fault = str(error)
    account = service.account if service is not None and service.account != host.account_name() else None

    yield from _look_at_imds(settings)
    for problem in problems:
        if is_hidden:
            yield warning("policy", problem, _AS_AGENT)
        else:
            yield failure("policy", problem, "correct it: the agent does not start with this policy")
    if loaded is not None:
        lines = [str(doubt) for doubt in loaded.warnings]
        for line in lines:
            yield warning("policy", line, "see whether it is meant so")
        if settings.agent.mode == "observe":
            told = f"{loaded.name}: agent.mode is observe, so no hook runs and nothing is approved"
            yield warning("policy", told, "set it to act once what explain and the log say is what is wanted")
        elif not lines:
            yield ok("policy", f"{loaded.name}: valid")
        if account is None or host.is_privileged():
            yield from _look_at_hooks(loaded, account)
            yield from _look_at_files(loaded, account)
        else:
            for check in ("hooks", "files"):
                told = f"the agent runs as {account}, and {host.account_name()} cannot tell what that may do"
                yield warning(check, told, _AS_AGENT)
    chosen = state_option or settings.agent.state_dir
    state_dir = Path(chosen).absolute() if chosen else host.default_state_dir()
    holder, lock_fault = None, ""
    try:
        holder = host.lock_holder(state_dir / "lock")
    except host.HostError as error:
        lock_fault = str(error)
    yield _look_at_state(state_dir, account, is_in_use=holder is not None)
    yield _look_at_disk(state_dir)
    if lock_fault:
        yield warning("agent", lock_fault, "run this as root or administrator")
    else:
        page = _fetch_health(settings.agent.listen) if holder is not None else None
        doubt = _doubt_about_what_runs(loaded, page)
        yield _look_at_agent(state_dir, holder, page, doubt, service)
        yield _look_at_pages(settings.agent.listen, page, is_running=holder is not None)
    yield _look_at_service(service, service_fault)
    yield from judge_others(host.other_approvers(), is_acting=settings.agent.mode == "act")


# --- the metadata service


class _Asker:
    """Asks the service a few questions, at a pace that leaves the limit to the agent."""

    asked_at: "datetime"
    answered_at: "datetime"

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

    def ask(self, what: Literal["document", "instance"], *, has_metadata_header: bool = True) -> Answer:
        """The answer, that to a second try if there were too many requests. Raises ImdsError."""
        answer = self._ask(what, has_metadata_header=has_metadata_header)
        if answer.status == 429:
            self.throttled += 1
            self._pause = _AFTER_THROTTLED_SECONDS
            answer = self._ask(what, has_metadata_header=has_metadata_header)
        return answer

    def _ask(self, what: Literal["document", "instance"], *, has_metadata_header: bool) -> Answer:
        time.sleep(self._pause)
        self._pause = _SPACING_SECONDS
        self.asked_at = datetime.now(UTC)
        answer = self._client.inspect(what, has_metadata_header=has_metadata_header)
        self.answered_at = datetime.now(UTC)
        return answer


def _look_at_imds(settings: Settings) -> Iterator[Finding]:
    endpoint = resolve_endpoint(settings.imds.endpoint)
    variables = [name for name in os.environ if name.lower() in _PROXY_VARIABLES]
    asker = _Asker(endpoint, settings.imds)
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
    yield diagnosis.ok("endpoint", f"{endpoint} answers, in {took * 1000:.0f} ms")
    plain: Answer | None = None
    with contextlib.suppress(ImdsError):  # no answer is a refusal, too
        plain = asker.ask("instance", has_metadata_header=False)
    document: Answer | ImdsError
    try:
        with remark_if_slow(FIRST_ANSWER_IS_SLOW):
            document = asker.ask("document")
    except ImdsError as error:
        document = error
    answers = [instance, plain, document]
    yield diagnosis.judge_directness([one for one in answers if isinstance(one, type(instance))], variables)
    yield diagnosis.judge_header(plain)
    yield diagnosis.judge_name(settings.vm, instance)
    if isinstance(document, ImdsError):
        yield diagnosis.judge_no_answer("events", document)
        refused = False
    else:
        if document.status in (200, 400):
            yield diagnosis.judge_version(document, settings.imds.api_version)
        if document.status not in (400, 429):
            names = diagnosis.names_of(settings.vm, instance)
            yield diagnosis.judge_document(document, names, socket.gethostname())
        refused = document.status == 429
    yield clock
    yield diagnosis.judge_rate(settings.imds.poll_interval, asker.throttled, is_refused=refused)


# --- the policy and what it names


def _look_at_hooks(loaded: Loaded, account: str | None) -> Iterator[Finding]:
    """``account``: the service's, if it is not that of this process."""
    hooks = loaded.settings.hooks
    if not hooks:
        yield ok("hooks", "the policy names none")
        return
    exposed = {hook_tampering_fault(hook) for hook in hooks.values()}
    untold: set[str] = set()
    found = [
        (problem.path, str(problem))
        for problem in check_files(loaded)
        if problem.path.startswith("hooks.") and problem.message not in exposed
    ]
    for name, hook in hooks.items():
        user = hook.user or account
        if hook.user is not None and not _is_system(account or host.account_name()):
            who = account or host.account_name()
            if hook.user != who:
                found.append((f"hooks.{name}.user", f"hooks.{name}.user: {who} cannot run it as {hook.user}"))
                continue
        program = host.find_program(hook.run[0], hook.cwd, hook.env) if hook.run else None
        wanted = [(f"hooks.{name}.run", program), (f"hooks.{name}.cwd", Path(hook.cwd) if hook.cwd else None)]
        for path, file in wanted:
            if file is None or any(known.startswith(f"hooks.{name}.") for known, _ in found):
                continue
            try:
                if fault := host.access_fault(file, "execute", user):
                    found.append((path, f"{path}: {fault}"))
            except host.HostError as error:
                untold.add(str(error))
    units = [hook.unit for hook in hooks.values() if hook.unit is not None]
    if units and account is not None and not _is_system(account):
        found.extend(_without_leave(units))
    for _, text in found:
        yield failure(
            "hooks", text, "put it right: until then the hook fails, and a failed preparation holds its event"
        )
    for text in sorted(untold):
        yield warning("hooks", text, "run this as root, or as the account that runs the hooks")
    if not found and not untold:
        yield ok("hooks", f"{count(len(hooks), 'hook')}: what they name is there, and can be started")


def _without_leave(units: list[str]) -> list[tuple[str, str]]:
    """Units that the agent's account may not start, each with the words for it."""
    unnamed = systemd_unit.unnamed_units(units)
    if unnamed is None:
        return [("", f"{systemd_unit.RULE_FILE} cannot be read: run this as root")]
    way_out = "install-unit --strict writes it anew"
    return [
        ("", f"{name} is not named by the polkit rule {systemd_unit.RULE_FILE}: {way_out}") for name in unnamed
    ]


def _look_at_files(loaded: Loaded, account: str | None) -> Iterator[Finding]:
    faults = []
    if loaded.name != BUILT_IN_NAME:
        faults.append(host.tampering_fault(Path(loaded.name)))
    faults.extend(hook_tampering_fault(hook) for hook in loaded.settings.hooks.values())
    is_refused = _is_system(account) if account is not None else host.is_privileged()
    found = list(dict.fromkeys(fault for fault in faults if fault))
    for fault in found:
        if is_refused:
            yield failure("files", fault, "do so: an agent with all rights does not start with such files")
        else:
            yield warning("files", fault, "do so, or know whom you trust")
    if not found:
        yield ok("files", "nobody else can change the policy or what its hooks run")


def _is_system(account: str) -> bool:
    return account.rpartition("\\")[2].casefold() in ("root", "localsystem", "system")


# --- the state


def _look_at_state(directory: Path, account: str | None, *, is_in_use: bool) -> Finding:
    """``account``: the service's, if it is not that of this process; ``is_in_use``: an agent is at work there."""
    try:
        if not directory.exists():
            return ok("state", f"{directory} is not there yet: the agent makes it when it first starts")
        if not directory.is_dir():
            return failure("state", f"{directory} is no directory", "name another one with agent.state_dir")
        who = account or host.account_name()
        if fault := host.privacy_fault(directory):
            return failure("state", f"{directory}: {fault}", "do so: the agent does not start with it")
        if fault := host.ownership_fault(directory, account):
            if account is None and is_in_use:
                return ok("state", f"{directory} is there, for the agent that is at work in it")
            if account is None:  # whoever it belongs to may be whom the agent runs as
                return warning("state", f"{directory}: {fault}", _AS_AGENT)
            return failure("state", f"{directory}: {fault}", "do so: the agent does not start with it")
        if fault := host.access_fault(directory, "write", account):
            if account is None and not host.is_privileged():
                return warning("state", fault, _AS_AGENT)
            return failure("state", fault, f"make it writable for {who}, or name another one with agent.state_dir")
        if account is None:
            with tempfile.TemporaryFile(dir=directory) as file:  # without a name, where the system can do that
                file.write(b"\0" * 4096)
                file.flush()
        return ok("state", f"{directory} is there, for {who} alone, and writable")
    except host.HostError as error:
        return warning("state", f"{directory}: {error}", _AS_AGENT)
    except OSError as error:
        told = f"{directory}: cannot be written by {host.account_name()}: {error.strerror}"
        if isinstance(error, PermissionError) and not host.is_privileged():
            return warning("state", told, _AS_AGENT)
        return failure("state", told, "make it writable, or name another one with agent.state_dir")


def _look_at_disk(directory: Path) -> Finding:
    try:
        place = next(path for path in (directory, *directory.parents) if path.exists())
        temporary, system = host.temporary_disk(place), host.file_system(place)
        free_bytes = shutil.disk_usage(place).free
    except (OSError, StopIteration) as error:
        return warning("disk", f"{directory}: {error}", _AS_AGENT)
    return judge_disk(
        str(directory), None if temporary is None else str(temporary), system[0] if system else None, free_bytes
    )


# --- the agent itself


class _Page(NamedTuple):
    status: int
    server: str
    text: str


def _address_of(listen: str) -> tuple[str, int]:
    address, _, port = listen.rpartition(":")
    return address.strip("[]"), int(port)


def _fetch_health(listen: str) -> _Page | None:
    """What the agent says of itself at /healthz, with status 0 if it takes too long; None if no agent is there."""
    return None if listen == "off" else _fetch(listen, "/healthz", _MAX_PAGE_BYTES)


def _fetch_status(listen: str) -> Status | None:
    """What the agent says of itself at /status; None if that is not for everybody, or of another version."""
    page = _fetch(listen, "/status", _MAX_STATUS_BYTES)
    try:
        return msgspec.json.decode(page.text, type=Status) if page is not None else None
    except msgspec.MsgspecError:
        return None


def _fetch(listen: str, path: str, most: int) -> _Page | None:
    address, port = _address_of(listen)
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - not to listen on
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=_PAGE_SECONDS)) as connection:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read(most).decode("utf-8", "replace")
            server = answer.headers.get("Server", "")
            is_ours = server.startswith(_SERVER)
            return _Page(answer.status, server, text) if is_ours else None
        except TimeoutError:
            return _Page(0, "", "")
        except (OSError, http.client.HTTPException):
            return None


def _look_at_agent(
    state_dir: Path,
    holder: str | None,
    page: _Page | None,
    doubt: tuple[str, str] | None,
    service: OwnService | None,
) -> Finding:
    """``doubt``: about an agent that is well, with what to do."""
    if holder is None:
        if service is not None and service.is_running:
            return warning(
                "agent",
                f"the service runs (pid {service.pid}), but not with the state directory {state_dir}",
                "name with --config and --state-dir what the service is started with",
            )
        way_out = _UNMASK if service is not None and service.is_masked else _START
        return warning("agent", f"none runs with the state directory {state_dir}", way_out)
    if page is not None and not page.status:
        return warning(
            "agent",
            f"runs (pid {holder}), and its page /healthz does not answer within {_PAGE_SECONDS:g} s: it may hang",
            "see whether it answers scheduled-events-agent status; if not, see its log, and restart it",
        )
    version = page.server.removeprefix(_SERVER).split(" ")[0] if page else ""
    if version and version != __version__:
        return warning(
            "agent",
            f"runs (pid {holder}) in version {version}; installed is {__version__}",
            "restart it: systemctl restart scheduled-events-agent, or on Windows service stop and service start",
        )
    if page is not None and page.status == 503:
        said = " ".join(page.text.split())
        return failure("agent", f"runs (pid {holder}) and is not well: {said}", "see its log, and /status")
    which = f"version {version}" if version else "its version cannot be told"
    runs = f"runs (pid {holder}), {which}"
    return warning("agent", f"{runs}, {doubt[0]}", doubt[1]) if doubt else ok("agent", runs)


def _doubt_about_what_runs(loaded: Loaded | None, page: _Page | None) -> tuple[str, str] | None:
    """Whether the agent does what stands in the policy file, as far as its pages tell that to everybody."""
    if loaded is None or page is None or page.status != 200:
        return None
    status = _fetch_status(loaded.settings.agent.listen)
    if status is None:
        return None
    changed_at = None
    with contextlib.suppress(OSError):  # the built-in policy has no file
        changed_at = datetime.fromtimestamp(Path(loaded.name).stat().st_mtime, UTC)
    is_same = os.path.realpath(loaded.name) == os.path.realpath(status.policy.file)
    return judge_what_runs(
        status,
        is_of_this_file=is_same,
        changed_at=changed_at,
        is_to_act=loaded.settings.agent.mode == "act",
    )


def _look_at_pages(listen: str, page: _Page | None, *, is_running: bool) -> Finding:
    if listen == "off":
        return ok("listen", "off: the agent serves no pages")
    if page is not None and page.status:
        return ok("listen", f"the agent serves its pages on {listen}")
    address, port = _address_of(listen)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as claim:
            host.claim_port(claim)
            claim.bind(place)  # and not listen: nobody can connect
    except OSError as error:
        if is_running:
            return ok(
                "listen", f"{listen} is taken, perhaps by the agent, and no page of it answers in plain HTTP"
            )
        return failure(
            "listen",
            f"{listen} cannot be used: {error.strerror or error}",
            "set agent.listen to a free port of this machine, or to off",
        )
    if is_running and port:
        return warning(
            "listen",
            f"an agent runs, but nobody listens on {listen}",
            "restart the agent if agent.listen was changed since it started; else name its policy with --config",
        )
    return ok("listen", f"{listen} is free")


def _look_at_service(service: OwnService | None, fault: str) -> Finding:
    if fault:
        way_out = (
            "see that whatever supervises the agent here starts it again: a container's runtime, another manager"
        )
        return warning("service", fault, way_out)
    if service is None:
        return warning(
            "service",
            "the agent is not installed as a service: nobody starts it with the machine, or again",
            "install the package, or use install-unit, or service install on Windows",
        )
    enabled = "masked" if service.is_masked else "enabled" if service.is_enabled else "not enabled"
    what = f"installed, {enabled}, {service.state}, runs as {service.account}"
    if not service.is_running:
        return failure("service", what, _UNMASK if service.is_masked else _START)
    if not service.is_enabled:
        way_out = "systemctl enable scheduled-events-agent; on Windows sc config ScheduledEventsAgent start= auto"
        way_out = _UNMASK if service.is_masked else way_out
        return warning("service", f"{what}: after a reboot there will be no agent", way_out)
    if service.is_stale:
        return warning(
            "service", f"{what}; its files have changed since", "systemctl daemon-reload, and restart it"
        )
    return ok("service", what)
