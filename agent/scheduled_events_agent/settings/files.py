"""What this machine says about a policy: programs it lacks, files that others could change."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scheduled_events_agent import host
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.settings import BUILT_IN_NAME, ConfigError, Loaded, state_dir_of
from scheduled_events_agent.settings.checks import Finding
from scheduled_events_agent.settings.model import AgentSettings, Settings, is_open
from scheduled_events_agent.typed_yaml import Problem

# Endings of files that an interpreter may be given, and interpreters that take any file first.
_SCRIPTS = (".py", ".sh", ".ps1", ".cmd", ".bat", ".pl", ".rb", ".js", ".vbs")
_INTERPRETERS = re.compile(
    r"((ba|da|k|z)?sh|python[0-9.]*|perl|ruby|node|php|pwsh|powershell)(\.exe)?", re.IGNORECASE
)
_SHEBANG = re.compile(rb"#![ \t]*([^ \t\r\n]+)")


def check_files(loaded: Loaded) -> tuple[Problem, ...]:
    """Warnings about what hooks name and this machine lacks or refuses, and of files that others could change."""
    exposed = _exposed(loaded.settings, None if loaded.name == BUILT_IN_NAME else Path(loaded.name))
    return loaded.parsed.gather([*exposed, *_web_doubts(loaded.settings.agent), *_missing(loaded.settings)])


def refuse_exposed(loaded: Loaded) -> None:
    """Raise ConfigError if this process is root and others could change the policy file or what its hooks run.

    An ordinary user is only warned, by ``check_files``.
    """
    if not host.is_privileged():
        return
    fault = None if loaded.name == BUILT_IN_NAME else host.tampering_fault(Path(loaded.name))
    findings = [("", fault)] if fault else []
    for name, hook in loaded.settings.hooks.items():
        if fault := hook_tampering_fault(hook):
            findings.append((f"hooks.{name}.run", fault))
    if findings:
        raise ConfigError(tuple(str(problem) for problem in loaded.parsed.gather(findings)))


def hook_tampering_fault(hook: Hook) -> str | None:
    """Which other account could change what the hook runs, and the way out; None if none is known.

    Looked at are the program, the interpreter in its first line, and arguments that are programs or scripts, if
    their paths are absolute. What a shell line names, or a program starts in its turn, is not.
    """
    for file in _code_files(hook):
        fault = host.tampering_fault(file, hook.user)
        if fault:
            return fault
    return None


def _exposed(settings: Settings, policy: Path | None) -> Iterator[Finding]:
    """Where the policy and the state are not safe from others, or from Azure."""
    if policy is not None and (fault := host.tampering_fault(policy)):
        yield "", fault
    state_dir = state_dir_of(settings)
    if disk := processes.temporary_disk(state_dir):
        yield (
            "agent.state_dir",
            f"{state_dir} is on Azure's temporary disk {disk}, which may be empty after an event",
        )
    if fault := host.privacy_fault(state_dir):
        yield "agent.state_dir", f"{state_dir} should be for the agent's account alone; {fault}"


def _web_doubts(agent: AgentSettings) -> Iterator[Finding]:
    """Why the pages would not be shown, or to too many."""
    if agent.web_config is None or agent.listen == "off":
        return
    from scheduled_events_agent.web.tls import TlsError, doubts, load_web_config, named_files  # noqa: PLC0415  # 8 ms of OpenSSL

    path = Path(agent.web_config)
    faults = {host.tampering_fault(path): None}
    try:
        web_config = load_web_config(path)
    except TlsError as error:
        for problem in str(error).splitlines():
            yield "agent.web_config", f"without it the pages are not shown: {problem}"
    else:
        files = named_files(path, web_config)
        faults |= {host.tampering_fault(file): None for file in files.values()}
        if "key_file" in files:
            faults[host.exposure_fault(files["key_file"])] = None
        for doubt in doubts(web_config, is_open=is_open(agent.listen)):
            yield "agent.web_config", doubt
    for fault in filter(None, faults):  # each once: most often they are of one directory
        yield "agent.web_config", fault


def _missing(settings: Settings) -> Iterator[Finding]:
    for name, hook in settings.hooks.items():
        path = f"hooks.{name}"
        if hook.cwd is not None and not Path(hook.cwd).is_dir():
            yield f"{path}.cwd", f"{hook.cwd} is not a directory on this machine"
        if hook.run:
            fault = _program_fault(hook) or processes.command_fault(hook.run, None, hook.cwd, hook.env)
            fault = fault or hook_tampering_fault(hook)
            if fault:
                yield f"{path}.run", fault
        elif fault := processes.command_fault(None, hook.shell, hook.cwd, hook.env):
            yield f"{path}.shell", fault
        if hook.user is not None and not host.has_account(hook.user):
            yield f"{path}.user", f'this machine has no account "{hook.user}"'


def _program_fault(hook: Hook) -> str | None:
    name = hook.run[0] if hook.run else ""
    file = processes.find_program(name, hook.cwd, hook.env)
    if (file is None or not file.exists()) and re.search(r"\s", name):
        what = "there is no such program; it has spaces and is not shown here, for it may be secret"
        return f"{what}: write each argument as an item of its own"
    if file is None:
        return f"{name} is not found in PATH"
    if file.is_dir():
        return f"{file} is a directory"
    if not file.exists():
        return f"{file} does not exist"
    if not file.is_file():
        return f"{file} is not a regular file"
    return None if os.access(file, os.X_OK) else f"{file} is not executable: chmod +x {file}"


def _code_files(hook: Hook) -> Iterator[Path]:
    if not hook.run:
        return
    program = processes.find_program(hook.run[0], hook.cwd, hook.env)
    if program is None:
        return
    yield program
    if program.is_file():  # to open a named pipe would block
        with suppress(OSError), program.open("rb") as file:
            if match := _SHEBANG.match(file.read(256)):
                yield Path(os.fsdecode(match[1]))
    takes_any = _INTERPRETERS.fullmatch(program.name) is not None
    for argument in hook.run[1:]:
        path = Path(argument)
        with suppress(OSError, ValueError):
            facts = path.stat() if path.is_absolute() else None
            if facts is not None and stat.S_ISREG(facts.st_mode):
                if takes_any or argument.endswith(_SCRIPTS) or facts.st_mode & 0o111:
                    yield path
                takes_any = False
