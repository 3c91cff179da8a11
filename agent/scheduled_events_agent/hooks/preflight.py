"""Checks a policy against this machine before any hook runs: missing programs, files that others could change.

``check`` prints its findings, ``doctor`` groups them, and an agent that starts logs them.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from scheduled_events_agent import host
from scheduled_events_agent.hooks.command import command_of, program_of_root
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy import Hook, is_secret_name, web_config
from scheduled_events_agent.policy.load import BUILT_IN_NAME, ConfigError, LoadedPolicy
from scheduled_events_agent.policy.settings import (
    AgentSettings,
    FleetCredential,
    Settings,
    files_of_target,
    is_foreign_path,
    is_open,
)
from scheduled_events_agent.policy.typed_yaml import Problem, Severity, in_order

# Endings of files that an interpreter may be given, and interpreters that take any file first.
_SCRIPTS = (".py", ".sh", ".ps1", ".cmd", ".bat", ".pl", ".rb", ".js", ".vbs")
_INTERPRETERS = r"(?i)((ba|da|k|z)?sh|python[0-9.]*|perl|ruby|node|php|pwsh|powershell)(\.exe)?"
_SHEBANG = rb"#![ \t]*([^ \t\r\n]+)"


Use = Literal["code", "exchange", "pages"]
"""Use of a file. code: it decides what runs. exchange: for other servers. pages: for the web server."""


# Hints for files that an agent as root does not use if others could change them.
_ROOT_HINTS: dict[Use, str] = {
    "code": "run that command: an agent that runs as root or LocalSystem does not start before",
    "exchange": "run that command: an agent that runs as root or LocalSystem does not use the file before",
}
_UNTRUSTED = "other accounts could change it, or a file that it names"
_TRUST_HINT = "run that command, unless you trust these accounts"
_STATE_HINT = "name another directory with agent.state_dir"
HOOK_HINT = "correct it: until then the hook fails, and a failed prepare hook holds its event"

FILE_SYSTEMS_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class Finding(NamedTuple):
    """One thing that is wrong with a policy on this machine, or perhaps wrong."""

    subject: Literal["permission", "secret", "state", "web", "hook", "notify", "fleet"]
    key: str
    """Path of the key in the policy; "" for the whole file."""
    severity: Severity
    """Error: this machine does not use the policy."""
    message: str
    hint: str = ""
    """A hint what to do, if it is not in the message."""


class NamedFile(NamedTuple):
    """A file that a policy names, or the policy itself."""

    path: str
    """Path of the key that names the file, as problems show it."""
    file: Path
    user: str | None = None
    """The account that the hook runs as."""


def named_files(loaded: LoadedPolicy, use: Use) -> Iterator[NamedFile]:
    """The files of a policy with this use. Files that a program or a shell line names are not among them."""
    settings = loaded.settings
    if use == "code":
        if loaded.name != BUILT_IN_NAME:
            yield NamedFile("", Path(loaded.name))
        for name, hook in settings.hooks.items():
            for file in _code_files(hook):
                yield NamedFile(f"hooks.{name}.run", file, hook.user)
    elif use == "exchange":
        for index, target in enumerate(settings.notify):
            for key, name in files_of_target(target):
                yield NamedFile(f"notify[{index}].{key}", Path(name))
        credential = settings.fleet.credential if settings.fleet else None
        if isinstance(credential, FleetCredential) and credential.sas_file:
            yield NamedFile("fleet.credential.sas_file", Path(credential.sas_file))
        if settings.kubernetes and settings.kubernetes.kubeconfig:
            yield NamedFile("kubernetes.kubeconfig", Path(settings.kubernetes.kubeconfig))
    elif settings.agent.web_config is not None and settings.agent.listen != "off":
        from scheduled_events_agent.web import tls  # noqa: PLC0415  # 8 ms of OpenSSL

        file = Path(settings.agent.web_config)
        files = [file]
        with suppress(tls.TlsError):
            files += map(Path, web_config.named_files(file, tls.load_web_config(file)).values())
        for named in files:
            yield NamedFile("agent.web_config", named)


def check_machine(loaded: LoadedPolicy, *, is_root: bool) -> Iterator[Finding]:
    """All findings about the policy on this machine: files that others could change, and what hooks lack here.

    ``is_root``: whether the agent runs as root or LocalSystem. Paths of the other operating system are not
    checked: the policy is for another machine then.
    """
    for use in get_args(Use):
        yield from _exposed_files(loaded, use, is_root=is_root)
    yield from _exposed_secrets(loaded)
    yield from _check_state_dir(loaded)
    yield from _check_web_config(loaded.settings.agent)
    yield from _check_hooks(loaded.settings)


class UntrustedPolicyError(ConfigError):
    """This process is root, and other accounts could change the policy or files that it names."""


def require_trusted(loaded: LoadedPolicy, *, is_reload: bool = False) -> LoadedPolicy:
    """The policy, for a process that sends or runs what is in it. Raises UntrustedPolicyError.

    Root rejects a policy that others could change, and one whose hooks they could change. At a reload it also
    rejects exposed files of ``notify``, ``fleet`` and ``kubernetes``; else only what needs such a file fails.
    """
    if not host.is_privileged():
        return loaded
    exposed = [*_exposed_files(loaded, "code", is_root=True)]
    if is_reload:
        exposed += _exposed_files(loaded, "exchange", is_root=True)
    if exposed:
        found = problems(loaded, exposed)
        raise UntrustedPolicyError(found, content=loaded.content, summary=_UNTRUSTED)
    return loaded


def problems(loaded: LoadedPolicy, findings: Iterable[Finding]) -> tuple[Problem, ...]:
    """The findings at their lines of the policy, each once. ``doctor`` alone shows their hints."""
    found: dict[Severity, dict[tuple[str, str], None]] = {"error": {}, "warning": {}}
    for finding in findings:
        found[finding.severity][finding.key, finding.message] = None
    return in_order(
        problem
        for severity, of_severity in found.items()
        for problem in loaded.parsed.to_problems(of_severity, severity=severity)
    )


def _exposed_files(loaded: LoadedPolicy, use: Use, *, is_root: bool) -> Iterator[Finding]:
    """Findings about files with this use that other accounts could change."""
    seen = set[Finding]()  # most often several files are of one directory
    for key, file, user in named_files(loaded, use):
        if is_foreign_path(str(file)):
            continue
        risk = host.find_write_risk(file, user)
        if not risk:
            continue
        if is_root and use in _ROOT_HINTS:
            finding = Finding("permission", key, "error", risk, _ROOT_HINTS[use])
        else:
            finding = Finding("permission", key, "warning", risk, _TRUST_HINT)
        if finding not in seen:
            seen.add(finding)
            yield finding


def _exposed_secrets(loaded: LoadedPolicy) -> Iterator[Finding]:
    """A warning if every account can read secrets in the policy itself: one for all of them."""
    first, *others = _literal_secrets(loaded.settings) or [""]
    risk = host.find_read_risk(Path(loaded.name)) if first else None
    if risk:
        instead = (
            "use {file: ...}" if first.startswith("notify") else "have the hook read it from a file of its own"
        )
        more = f"; so are {', '.join(others)}" if others else ""
        text = f"is a secret, and {risk}, or {instead}{more}"
        yield Finding("secret", first, "warning", text, "do one of the two, unless it is no secret")


def find_hook_write_risk(hook: Hook) -> str | None:
    """Which other account could change what the hook runs, and what to do; None if none is known.

    The program, the one that ``run-as-root`` starts, the interpreters in their first lines, and arguments that are
    programs or scripts are checked if their paths are absolute. Programs that a shell line names, or that another
    program starts, are not checked.
    """
    for file in _code_files(hook):
        risk = host.find_write_risk(file, hook.user)
        if risk:
            return risk
    return None


def _literal_secrets(settings: Settings) -> list[str]:
    """The keys whose values are probably secrets."""
    paths = []
    for index, target in enumerate(settings.notify):
        if isinstance(target.to, str) and target.to:
            paths.append(f"notify[{index}].to")
        for name, value in target.headers.items():
            if isinstance(value, str):
                paths.append(f"notify[{index}].headers.{name}")
    for hook_name, hook in settings.hooks.items():
        paths += [
            f"hooks.{hook_name}.env.{name}" for name, value in hook.env.items() if value and is_secret_name(name)
        ]
    return paths


def is_cleared(directory: Path) -> bool:
    """Whether the system clears the directory, as at a reboot."""
    return any(directory.is_relative_to(place) for place in host.cleared_places())


def find_state_loss(directory: Path) -> str:
    """Why an event takes the state in this directory away; "" if none is known to."""
    if disk := processes.temporary_disk(directory):
        return f"the state directory {directory} is on Azure's temporary disk {disk}, which may be empty after it"
    system = processes.file_system(directory)
    if system is not None and system[0] in FILE_SYSTEMS_IN_MEMORY:
        return f"the state directory {directory} is in memory ({system[0]}), and gone after it"
    if is_cleared(directory):
        return f"the state directory {directory} is in a directory that the system clears, as at a boot"
    return ""


def _check_state_dir(loaded: LoadedPolicy) -> Iterator[Finding]:
    """Why other accounts could reach the state, or the system or Azure could delete it."""
    settings = loaded.settings
    chosen = settings.agent.state_dir
    if chosen and is_foreign_path(chosen):
        return
    state_dir = Path(chosen) if chosen else host.default_state_dir()
    # For a trial, an option may name such a directory.
    if is_cleared(state_dir) and "agent.state_dir" in loaded.parsed.places:
        text = f"{state_dir} is in a directory that the system clears: a reboot may lose the state"
        yield Finding("state", "agent.state_dir", "warning", text, _STATE_HINT)
    if disk := processes.temporary_disk(state_dir):
        text = f"{state_dir} is on Azure's temporary disk {disk}, which may be empty after an event"
        yield Finding("state", "agent.state_dir", "warning", text, _STATE_HINT)
    if risk := host.find_privacy_risk(state_dir):
        text = f"{state_dir} should be for the agent's account alone; {risk}"
        yield Finding("state", "agent.state_dir", "warning", text)
    if risk := host.find_replacement_risk(state_dir):
        yield Finding("state", "agent.state_dir", "warning", risk)


def _check_web_config(agent: AgentSettings) -> Iterator[Finding]:
    """Why the HTTP server would not start, or who else could read its pages."""
    if agent.web_config is None or agent.listen == "off" or is_foreign_path(agent.web_config):
        return
    from scheduled_events_agent.web import tls  # noqa: PLC0415  # 8 ms of OpenSSL

    path = Path(agent.web_config)
    try:
        config = tls.load_web_config(path)
    except tls.TlsError as error:
        for problem in str(error).splitlines():
            text = f"without it no pages are served: {problem}"
            yield Finding("web", "agent.web_config", "warning", text, "correct it, or remove the key")
        return
    for message in web_config.warnings(config, is_open=is_open(agent.listen)):
        yield Finding("web", "agent.web_config", "warning", message, "check that this is intended")
    if risk := host.find_read_risk(Path(web_config.named_files(path, config)["key_file"])):
        yield Finding("web", "agent.web_config", "warning", risk, "run that command")


def _check_hooks(settings: Settings) -> Iterator[Finding]:
    for name, hook in settings.hooks.items():
        for key, error in _hook_errors(hook):
            yield Finding("hook", f"hooks.{name}.{key}", "warning", error, HOOK_HINT)


def _hook_errors(hook: Hook) -> Iterator[tuple[str, str]]:
    """Why this machine cannot run the hook: the hook's key, and the reason."""
    if hook.cwd is not None and not is_foreign_path(hook.cwd) and (error := _cwd_error(hook.cwd)):
        yield "cwd", error
    if run := command_of(hook):
        if error := _program_error(hook, run):
            yield "run", error
    elif error := processes.find_command_error(None, hook.shell, hook.cwd, hook.env):
        yield "shell", error
    if hook.user is not None and not host.has_account(hook.user):
        yield "user", f'this machine has no account "{hook.user}"'


def _cwd_error(directory: str) -> str | None:
    try:
        is_there = stat.S_ISDIR(_mode_of(Path(directory)))
    except PermissionError:
        return f"{directory} is in a directory that this account may not enter"
    return None if is_there else f"{directory} is not a directory on this machine"


def _mode_of(file: Path) -> int:
    """0 if there is no such file. Raises PermissionError, which some versions of ``Path.exists`` do not."""
    try:
        return file.stat().st_mode
    except PermissionError:
        raise
    except (OSError, ValueError):  # ValueError, and some OSErrors: no file can have that name
        return 0


def _program_error(hook: Hook, run: Sequence[str]) -> str | None:
    name = run[0]
    if is_foreign_path(name):
        return None
    file = processes.find_program(name, hook.cwd, hook.env)
    mode: int | None
    try:
        mode = 0 if file is None else _mode_of(file)
    except PermissionError:
        mode = None
    if not mode and re.search(r"\s", name):
        return _command_line_error(name, hook)
    if file is None:
        return f"{name} is not found in PATH"
    if mode is None:
        return f"{file} is in a directory that this account may not enter"
    if mode == 0:
        place = "" if Path(name).is_absolute() else ": the name is relative to cwd (default: /)"
        return f"{file} does not exist{place}"
    if stat.S_ISDIR(mode):
        return f"{file} is a directory"
    if not stat.S_ISREG(mode):
        return f"{file} is not a regular file"
    if not os.access(file, os.X_OK):
        return f"{file} is not executable: chmod +x {file}"
    if (of_root := program_of_root(hook)) and (error := _error_of_root(of_root)):
        return error
    return processes.find_command_error(run, None, hook.cwd, hook.env)


def _error_of_root(program: Path) -> str | None:
    """Why root cannot execute the file, as far as this account may see it."""
    try:
        mode = program.stat().st_mode
    except PermissionError:
        return None
    except OSError:
        return f"{program} does not exist"
    if not stat.S_ISREG(mode):
        return f"{program} is not a regular file"
    return None if mode & 0o111 else f"{program} is not executable: chmod +x {program}"


def _command_line_error(name: str, hook: Hook) -> str:
    """The error for a name with spaces. It shows a program's name at most: the rest may be secret."""
    what = "there is no such program; it has spaces and is not shown here, for it may be secret"
    first = name.split(maxsplit=1)[0]
    program = processes.find_program(first, hook.cwd, hook.env)
    if program is None or not os.path.isfile(program):  # noqa: PTH113 - raises nothing
        return f"{what}: write each argument as an item of its own"
    return f"{what}: write [{first}, ...], each argument an item of its own, or use shell"


def _code_files(hook: Hook) -> Iterator[Path]:
    run = command_of(hook)
    if not run:
        return
    program = processes.find_program(run[0], hook.cwd, hook.env)
    if program is None:
        return
    for code in filter(None, (program, program_of_root(hook))):
        yield code
        with suppress(OSError):
            if code.is_file():  # to open a named pipe would block
                with code.open("rb") as file:
                    if match := re.match(_SHEBANG, file.read(256)):
                        yield Path(os.fsdecode(match[1]))
    takes_any = re.fullmatch(_INTERPRETERS, program.name) is not None
    for argument in run[1:]:
        path = Path(argument)
        with suppress(OSError, ValueError):
            facts = path.stat() if path.is_absolute() else None
            if facts is not None and stat.S_ISREG(facts.st_mode):
                if takes_any or argument.endswith(_SCRIPTS) or facts.st_mode & 0o111:
                    yield path
                takes_any = False
