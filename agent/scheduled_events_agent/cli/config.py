"""Where the policy file and the state are, and how the policy file is read from the disk."""

import os
from functools import partial
from pathlib import Path

from scheduled_events_agent import host
from scheduled_events_agent.policy.load import (
    BUILT_IN_NAME,
    CONFIG_VARIABLE,
    ConfigError,
    FileStamp,
    InspectedPolicy,
    LoadedPolicy,
    PolicyFile,
    inspect_settings,
    without_errors,
)
from scheduled_events_agent.policy.settings import Settings, is_foreign_path
from scheduled_events_agent.policy.typed_yaml import Problem

_MAX_FILE_BYTES = 1024 * 1024


def find_config(argument: str | None) -> Path | None:
    """The policy file to use: --config, else the environment's, else the system's if there is one."""
    system_path = host.default_config_path()
    chosen = argument or os.environ.get(CONFIG_VARIABLE)
    if chosen:
        return Path(chosen)
    try:
        system_path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return system_path  # it is there but out of reach: reading it will say so
    return system_path


def state_dir_of(settings: Settings, option: str | None = None) -> Path:
    """Where an agent with these settings, and this option --state-dir, keeps its state. Raises ConfigError."""
    chosen = option or settings.agent.state_dir
    if not option and chosen and is_foreign_path(chosen):
        text = f"{chosen} is a path of another system"
        raise ConfigError((Problem(file="", path="agent.state_dir", message=text),))
    return Path(chosen) if chosen else host.default_state_dir()


def load_policy(path: Path | None) -> LoadedPolicy:
    """Settings and warnings of a policy file; of the built-in policy if it is None. Raises ConfigError."""
    return without_errors(inspect_policy(path))


def load_trusted_policy(path: Path | None, *, is_reload: bool = False) -> LoadedPolicy:
    """The policy for a command that sends or runs what is in it. Raises ConfigError; see ``require_trusted``."""
    from scheduled_events_agent.hooks.preflight import require_trusted  # noqa: PLC0415  # most commands only read it

    return require_trusted(load_policy(path), is_reload=is_reload)


def inspect_policy(path: Path | None) -> InspectedPolicy:
    """A policy file, or the built-in policy, with all errors. Raises ConfigError if it cannot be read."""
    name = BUILT_IN_NAME if path is None else str(path)
    return inspect_settings(_read(path), name, may_change_user=host.may_change_user())


def policy_file(
    path: Path | None, state_dir: str | None = None, *, listen: str | None = None, is_observing: bool = False
) -> PolicyFile:
    """The policy file of an agent, which it reads again at a reload; the built-in policy if ``path`` is None.

    ``state_dir``, ``listen`` and ``is_observing`` are options of ``run``.
    """
    return PolicyFile(
        str(path.absolute()) if path else BUILT_IN_NAME,
        partial(_read, path),
        state_dir=state_dir,
        listen=listen,
        is_observing=is_observing,
        may_change_user=host.may_change_user(),
        stamp=partial(_stamp, path),
    )


def _stamp(path: Path | None) -> FileStamp | None:
    """The stamp of the file that the path leads to; None without a path."""
    if path is None:
        return None
    try:
        facts = path.stat()
    except OSError as error:
        return FileStamp(error=str(error))
    return FileStamp(facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino)


def _read(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return host.read_small_file(path, _MAX_FILE_BYTES)
    except host.HostError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            hint = f"without --config and ${CONFIG_VARIABLE} the built-in policy is used"
            problem = Problem(file=str(path), message="there is no such file", hint=hint)
            raise ConfigError((problem,), is_missing=True, summary=problem.message) from None
        # On Windows, which has no prefix, a folder is denied too.
        prefix = host.supervisor_commands().prefix if isinstance(error.__cause__, PermissionError) else ""
        problem = Problem(file=str(path), message=error.summary, hint=f"use {prefix.strip()}" if prefix else "")
        raise ConfigError((problem,), summary="it cannot be read") from error.__cause__
