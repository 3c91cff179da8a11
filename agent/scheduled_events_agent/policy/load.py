"""A policy file's text -> frozen Settings, with every error at once and its line. Pure.

Invariant: Settings exist only if every check has passed. Nothing after this checks them again.
"""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.policy import checks
from scheduled_events_agent.policy.durations import plural
from scheduled_events_agent.policy.settings import KUBERNETES_FORMAT, AgentSettings, NotifyTarget, Settings
from scheduled_events_agent.policy.typed_yaml import Parsed, Problem, in_order, parse, text_at

CONFIG_VARIABLE = "SCHEDULED_EVENTS_AGENT_CONFIG"
BUILT_IN_NAME = "built-in policy"

_EVENT_TARGET = NotifyTarget(name="kubernetes", format=KUBERNETES_FORMAT)
_PART = r"(rules|notify)\[\d+\]|(hooks|maintenance_windows)\.[^.]+|\w*"
_COMMENT = r"(?m)(^|(?<=\s))#.*"
_MODE = r"""(?<![\w-])mode["']?[ \t]*:[ \t]*["']?([^\s"',}]*)"""
_OBSERVE = r"(?i)(?<![\w-])observe(?![\w-])"
_STATE_DIR = r"""(?m)^[^#\n]*\bstate_dir["']?[ \t]*:[ \t]*(?:"([^"\n]*)"|'([^'\n]*)'|([^\s,}#]+))"""


class ConfigError(AgentError):
    """The policy file cannot be used; ``problems`` has each thing wrong with it.

    ``state_dir``: the agent.state_dir in it; "" if it has none, None if that is not known.

    ``content``: the file as it was read; None if it could not be read. ``is_missing``: there is no such file.
    """

    def __init__(
        self,
        problems: tuple[Problem, ...],
        state_dir: str | None = None,
        *,
        content: bytes | None = None,
        is_missing: bool = False,
        summary: str = "",
    ) -> None:
        super().__init__("\n".join(map(str, problems)), kind="config", summary=summary or str(problems[0]))
        self.problems = problems
        self.state_dir = state_dir
        self.content = content
        self.is_missing = is_missing


class LoadedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that passed every check, and the warnings about them."""

    settings: Settings
    warnings: tuple[Problem, ...]
    parsed: Parsed[Settings]
    content: bytes = b""
    """The file as it was read; empty for the built-in policy."""

    @property
    def hash(self) -> str:
        """SHA-256 of the content, as sha256sum prints it."""
        return hash_of(self.content)

    @property
    def name(self) -> str:
        """How messages call the file."""
        return self.parsed.name


def hash_of(content: bytes) -> str:
    """SHA-256, as sha256sum prints it."""
    from hashlib import sha256  # noqa: PLC0415  # 3 ms of OpenSSL, for which only run and check have a use

    return sha256(content).hexdigest()


class InspectedPolicy(NamedTuple):
    """A policy file and all its errors."""

    loaded: LoadedPolicy
    """The whole policy if there are no errors; else its parts that have none."""
    errors: tuple[Problem, ...]

    def is_valid(self, path: str) -> bool:
        """Whether it is the path of the file itself, or in a rule, a hook or another part without an error."""
        if not path:
            return True
        wrong = {_part_of(error.path) for error in self.errors}
        return self.loaded.parsed.partial_value is not None and _part_of(path) not in wrong


def _part_of(path: str) -> str:
    """The rule, the hook or the section that a path is in."""
    part = re.match(_PART, path)
    return part[0] if part else path


class FileStamp(NamedTuple):
    """Differs if a file has changed."""

    modified_ns: int = 0
    changed_ns: int = 0
    """Also of its owner and mode, which decide who can read it. On Windows: when it was created."""
    size: int = 0
    inode: int = 0
    error: str = ""
    """Why the file cannot be found."""

    @property
    def modified_at(self) -> datetime:
        """When the file was changed."""
        return datetime.fromtimestamp(self.modified_ns // 10**9, UTC)


class PolicyFile:
    """The policy file of an agent, with the options of its command line on top."""

    def __init__(
        self,
        name: str,
        read: Callable[[], bytes],
        *,
        state_dir: str | None = None,
        listen: str | None = None,
        is_observing: bool = False,
        may_change_user: bool = True,
        stamp: Callable[[], FileStamp | None] = lambda: None,
    ) -> None:
        """``name``: how people know it. ``read``: its content now; raises ConfigError.

        ``state_dir``, ``listen`` and ``is_observing`` are options of ``run``. ``may_change_user``: see
        ``parse_settings``. ``stamp``: that of the file now; None for the built-in policy.
        """
        self.name = name
        self.stamp = stamp
        self._read = read
        self._options = {"state_dir": state_dir} if state_dir else {}
        if listen:
            self._options["listen"] = listen
        if is_observing:
            self._options["mode"] = "observe"
        self._may_change_user = may_change_user

    @property
    def state_dir(self) -> str | None:
        """The option --state-dir."""
        return self._options.get("state_dir")

    def load(self) -> LoadedPolicy:
        """Load the file. Raises ConfigError."""
        return self.parse(self._read())

    def parse(self, content: bytes, *, is_observing: bool = False) -> LoadedPolicy:
        """The policy if the file had this content. Raises ConfigError.

        ``is_observing``: it only observes, as with the option of that name.
        """
        loaded = parse_settings(content, self.name, may_change_user=self._may_change_user)
        options = {**self._options, "mode": "observe"} if is_observing else self._options
        agent = msgspec.structs.replace(loaded.settings.agent, **options)
        settings = msgspec.structs.replace(loaded.settings, agent=agent)
        warnings = loaded.warnings
        if agent.listen != loaded.settings.agent.listen:  # one of them is about that
            findings = checks.warnings(settings, loaded.parsed.places, is_all_named=True)
            warnings = loaded.parsed.to_problems(findings, severity="warning")
        return msgspec.structs.replace(loaded, settings=settings, warnings=warnings)


def keys_for_next_start(at_start: AgentSettings, now: AgentSettings) -> tuple[str, ...]:
    """The keys that have changed and take effect when the agent starts again."""
    keys = ("listen", "listen_names", "web_config", "state_dir")
    return tuple([f"agent.{key}" for key in keys if getattr(at_start, key) != getattr(now, key)])


def parse_settings(text: str | bytes, name: str, *, may_change_user: bool = True) -> LoadedPolicy:
    """Settings and warnings of a policy's text. Raises ConfigError.

    ``name``: how problems call it. ``may_change_user``: whether this machine can run hooks as another user.
    """
    return without_errors(inspect_settings(text, name, may_change_user=may_change_user))


def without_errors(inspected: InspectedPolicy) -> LoadedPolicy:
    """Settings and warnings. Raises ConfigError if there is any error."""
    if inspected.errors:
        state_dir = text_at(inspected.loaded.content, "agent", "state_dir")
        content = inspected.loaded.content
        raise ConfigError(inspected.errors, state_dir, content=content, summary=_summary(inspected.errors))
    return inspected.loaded


def _summary(errors: Sequence[Problem]) -> str:
    """Where the errors are."""
    more = len(errors) - 1
    return f"{errors[0].place}, and {plural(more, 'more error')}" if more else errors[0].place


def inspect_settings(text: str | bytes, name: str, *, may_change_user: bool) -> InspectedPolicy:
    """A policy's text with all its errors; see ``parse_settings``."""
    parsed = parse(text, Settings, name)
    errors = parsed.problems
    if parsed.partial_value is not None:
        known = [problem.path for problem in errors]
        found = parsed.to_problems(checks.errors(parsed.partial_value, parsed, may_change_user=may_change_user))
        # If a value is wrong, what is missing because of it is not reported.
        further = [error for error in found if not any(path.startswith(error.path) for path in known)]
        errors = in_order((*errors, *further))
    settings = parsed.partial_value or Settings()
    if settings.lacks_event_target:
        settings = msgspec.structs.replace(settings, notify=(*settings.notify, _EVENT_TARGET))
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    inspected = InspectedPolicy(
        LoadedPolicy(settings=settings, warnings=(), parsed=parsed, content=content), errors
    )
    # It is not known what an unknown key or a rule with an error was meant to name.
    is_all_named = all(_part_of(error.path).partition("[")[0] not in ("", "rules", "on_clear") for error in errors)
    findings = checks.warnings(settings, parsed.places, is_all_named=is_all_named)
    of_valid = (finding for finding in findings if inspected.is_valid(finding[0]))
    warnings = parsed.to_problems(of_valid, severity="warning")
    return inspected._replace(loaded=msgspec.structs.replace(inspected.loaded, warnings=warnings))


def may_want_to_observe(content: bytes) -> bool:
    """Whether a policy with errors is perhaps meant to observe. It may be no YAML, and its keys misplaced.

    A key ``mode`` anywhere decides; if there is none, the word ``observe`` does.
    """
    text = re.sub(_COMMENT, "", _as_text(content))
    modes = re.findall(_MODE, text)
    if modes:
        return any(mode != "act" for mode in modes)
    return re.search(_OBSERVE, text) is not None


def state_dir_in(content: bytes) -> str:
    """The agent.state_dir in a policy, as far as it can be found; "" if it has none. It may be no YAML."""
    known = text_at(content, "agent", "state_dir")
    if known is not None:
        return known
    match = re.search(_STATE_DIR, _as_text(content))
    return next(filter(None, match.groups()), "") if match else ""


def _as_text(content: bytes) -> str:
    """A text that may have another encoding: without the zeros of UTF-16."""
    return content.replace(b"\0", b"").decode(errors="replace")
