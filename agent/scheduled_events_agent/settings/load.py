"""Loads the policy file.

Owns where the file is found and how it is read. Decides nothing about events.
The one invariant: Settings exist only if every check has passed, so nothing after this checks them again.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.settings.checks import doubts, faults
from scheduled_events_agent.settings.model import AgentSettings, Settings, is_foreign_path
from scheduled_events_agent.typed_yaml import Parsed, Problem, parse, text_at

CONFIG_VARIABLE = "SCHEDULED_EVENTS_AGENT_CONFIG"
BUILT_IN_NAME = "built-in policy"

_MAX_FILE_BYTES = 1024 * 1024
_PART = re.compile(r"(rules|notify)\[\d+\]|(hooks|maintenance_windows)\.[^.]+|\w*")


class ConfigError(AgentError):
    """The policy file cannot be used; ``problems`` has one line for each thing wrong with it.

    ``state_dir``: its agent.state_dir all the same; "" if it has none, None if that cannot be told.
    """

    def __init__(self, problems: tuple[str, ...], state_dir: str | None = None) -> None:
        super().__init__("\n".join(problems), kind="config")
        self.problems = problems
        self.state_dir = state_dir


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that passed every check, and the warnings about them."""

    settings: Settings
    warnings: tuple[Problem, ...]
    parsed: Parsed[Settings]
    content: bytes = b""
    """The file as it was read; empty for the built-in policy."""

    @property
    def hash(self) -> str:
        """SHA-256 of the content, as sha256sum tells it."""
        from hashlib import sha256  # noqa: PLC0415  # 3 ms of OpenSSL, for which only run and check have a use

        return sha256(self.content).hexdigest()

    @property
    def name(self) -> str:
        """How messages call the file."""
        return self.parsed.name


class Inspected(NamedTuple):
    """A policy file and all its errors."""

    loaded: Loaded
    """The whole policy if there are no errors; else its parts that have none."""
    errors: tuple[Problem, ...]

    def is_valid(self, path: str) -> bool:
        """Whether it is the path of the file itself, or in a rule, a hook or another part without an error."""
        if not path:
            return True
        wrong = {_part_of(error.path) for error in self.errors}
        return self.loaded.parsed.draft is not None and _part_of(path) not in wrong


def _part_of(path: str) -> str:
    """The rule, the hook or the section that a path is in."""
    part = _PART.match(path)
    return part[0] if part else path


class PolicyFile:
    """The policy file of an agent, with the options of its command line on top."""

    def __init__(self, path: Path | None, state_dir: str | None = None, *, is_observing: bool = False) -> None:
        """``path``: None for the built-in policy. ``state_dir`` and ``is_observing`` are options of ``run``."""
        self._path = path
        self._options = {"state_dir": state_dir} if state_dir else {}
        if is_observing:
            self._options["mode"] = "observe"
        self.name = str(path.absolute()) if path else BUILT_IN_NAME

    def load(self) -> Loaded:
        """What the file says now. Raises ConfigError."""
        loaded = load_policy(self._path)
        agent = msgspec.structs.replace(loaded.settings.agent, **self._options)
        return msgspec.structs.replace(loaded, settings=msgspec.structs.replace(loaded.settings, agent=agent))


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
        raise ConfigError((f"agent.state_dir: {chosen} is a path of another system",))
    return Path(chosen) if chosen else host.default_state_dir()


def keys_for_next_start(at_start: AgentSettings, now: AgentSettings) -> tuple[str, ...]:
    """The keys that have changed and take effect when the agent starts again."""
    keys = ("listen", "listen_names", "web_config", "state_dir")
    return tuple([f"agent.{key}" for key in keys if getattr(at_start, key) != getattr(now, key)])


def load_settings(path: Path | None) -> Settings:
    """The settings of a policy file, or the built-in ones. Raises ConfigError."""
    return load_policy(path).settings


def load_policy(path: Path | None) -> Loaded:
    """Settings and warnings of a policy file, or the built-in ones. Raises ConfigError."""
    return _without_errors(inspect_policy(path))


def inspect_policy(path: Path | None) -> Inspected:
    """A policy file, or the built-in policy, with all errors. Raises ConfigError if it cannot be read."""
    if path is None:
        return _inspect("", BUILT_IN_NAME, may_change_user=host.may_change_user())
    try:
        text = host.read_small_file(path, _MAX_FILE_BYTES)
    except host.HostError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            way_out = f"without --config and ${CONFIG_VARIABLE} the built-in policy is used"
            raise ConfigError((f"{path}: there is no such file; {way_out}",)) from None
        raise ConfigError((str(error),)) from error.__cause__
    return _inspect(text, str(path), may_change_user=host.may_change_user())


def parse_settings(text: str | bytes, name: str, *, may_change_user: bool | None = None) -> Loaded:
    """Settings and warnings of a policy's text; ``name`` is how problems call it. Raises ConfigError."""
    may_change_user = host.may_change_user() if may_change_user is None else may_change_user
    return _without_errors(_inspect(text, name, may_change_user=may_change_user))


def _without_errors(inspected: Inspected) -> Loaded:
    if inspected.errors:
        state_dir = text_at(inspected.loaded.content, "agent", "state_dir")
        raise ConfigError(tuple(str(error) for error in inspected.errors), state_dir)
    return inspected.loaded


def _inspect(text: str | bytes, name: str, *, may_change_user: bool) -> Inspected:
    parsed = parse(text, Settings, name)
    errors = parsed.problems
    if parsed.draft is not None:
        known = [problem.path for problem in errors]
        all_faults = parsed.gather(faults(parsed.draft, parsed, may_change_user=may_change_user))
        # Where a value was wrong already, what is missing because of it is no news.
        news = [fault for fault in all_faults if not any(path.startswith(fault.path) for path in known)]
        errors = tuple(sorted((*errors, *news), key=lambda problem: problem.line))
    settings = parsed.draft or Settings()
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    inspected = Inspected(Loaded(settings=settings, warnings=(), parsed=parsed, content=content), errors)
    # What an unknown key or a wrong rule would have named is not known.
    is_all_named = all(_part_of(error.path).partition("[")[0] not in ("", "rules", "on_clear") for error in errors)
    findings = doubts(settings, parsed.lines, is_all_named=is_all_named)
    warnings = parsed.gather(finding for finding in findings if inspected.is_valid(finding[0]))
    return inspected._replace(loaded=msgspec.structs.replace(inspected.loaded, warnings=warnings))
