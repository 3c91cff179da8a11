"""Which policy a start goes on with if the policy file is rejected: the one that was accepted last, or none.

Invariant: it only observes where the file may want that, and runs nothing that other accounts could change.
"""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.hooks.preflight import require_trusted
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.policy.load import (
    BUILT_IN_NAME,
    ConfigError,
    LoadedPolicy,
    PolicyFile,
    hash_of,
    may_want_to_observe,
    state_dir_in,
)
from scheduled_events_agent.policy.settings import is_foreign_path
from scheduled_events_agent.policy.typed_yaml import Problem
from scheduled_events_agent.store.accepted_policy import (
    FILE_NAME,
    AcceptedPolicy,
    RejectedFile,
    load_accepted,
    remove_accepted,
    save_accepted,
)
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId


class Fallback(NamedTuple):
    """The accepted policy, in place of the rejected file."""

    loaded: LoadedPolicy
    accepted: AcceptedPolicy
    error: ConfigError
    """Why the file is rejected."""


class NoFallbackError(AgentError):
    """A start with the rejected file fails."""

    def __init__(self, reason: str, problems: tuple[Problem, ...] = ()) -> None:
        """``problems``: what else is wrong, beside the file."""
        super().__init__(reason, kind="config")
        self.problems = problems


class AcceptedPolicyKeeper:
    """Keeps the policy in force in the state directory. For one thread."""

    def __init__(self, file: PolicyFile, directory: Path) -> None:
        self._file = file
        self._directory = directory
        self._accepted: AcceptedPolicy | None = None
        self._is_written = False
        self._failure = ""

    def accept(self, loaded: LoadedPolicy) -> None:
        """Keep a policy that is in force from now on."""
        self._accepted = AcceptedPolicy(
            path=self._file.name,
            state_dir=str(self._directory.absolute()),
            accepted_at=datetime.now(UTC),
            boot_id=_boot_id(),
            hash=loaded.hash,
            text=loaded.content.decode(),
        )
        self._write()
        if self._failure:
            self._remove_other_than(loaded.hash)

    def go_on_with(self, fallback: Fallback) -> None:
        """Keep the policy that the agent has started with: from now on another bad file is a new one."""
        rejected = _rejected_file(fallback.error)
        self._accepted = replace(fallback.accepted, boot_id=_boot_id(), rejected=rejected)
        self._write()

    def reject(self, error: ConfigError) -> str:
        """Remember that the file is rejected. Returns why the next start would fail; "" if it would not."""
        rejected = _rejected_file(error)
        if self._accepted is not None and self._accepted.rejected != rejected:
            self._accepted = replace(self._accepted, rejected=rejected)
            self._write()
        try:
            find_fallback(self._file, error)
        except NoFallbackError as failure:
            return self._failure or str(failure)
        return ""

    def write_if_missing(self) -> None:
        """Write it again if it could not be written, or was removed."""
        if not (self._is_written and (self._directory / FILE_NAME).exists()):
            self._write()

    def _write(self) -> None:
        before = self._failure
        try:
            if self._accepted is None or self._file.name == BUILT_IN_NAME:
                remove_accepted(self._directory)
            else:
                save_accepted(self._directory, self._accepted)
        except OSError as error:
            self._failure = f"no copy of the policy in force can be written: {error.strerror or error}"
        else:
            self._failure = ""
        self._is_written = not self._failure
        if self._failure and self._failure != before:
            get_logger().warning(
                "the policy in force cannot be kept for the next start",
                log_id=LogId.POLICY_WARNING,
                reason=self._failure,
            )

    def _remove_other_than(self, hash_: str) -> None:
        """Remove the copy of an older policy, which may act where the one in force only observes."""
        with suppress(OSError, host.HostError):
            kept = load_accepted(self._directory)
            if kept is not None and kept.hash != hash_:
                remove_accepted(self._directory)


def _boot_id() -> str:
    """The id of this boot; "" if it is not known."""
    try:
        return host.boot_id()
    except host.HostError:
        return ""


def _rejected_file(error: ConfigError) -> RejectedFile:
    """The state of the file that ``error`` rejects."""
    return RejectedFile(hash="" if error.content is None else hash_of(error.content), reason=str(error))


def find_fallback(file: PolicyFile, error: ConfigError) -> Fallback:
    """The policy for a start whose file was rejected by ``error``. Raises NoFallbackError."""
    directory = _state_dir(file, error)
    accepted = _load(file, directory)
    if not _is_known(accepted, _rejected_file(error)):
        raise NoFallbackError("the file was changed in this boot, and no running agent has rejected it yet")
    if error.content is None and (risk := _directory_risk(file)):
        raise NoFallbackError(risk, (Problem(file="", message=risk),))
    since = format_time(accepted.accepted_at)
    try:
        is_observing = error.content is not None and may_want_to_observe(error.content)
        loaded = file.parse(accepted.text.encode(), is_observing=is_observing)
        require_trusted(loaded)  # also the file itself
    except ConfigError as other:
        first = other.problems[0]
        problems = tuple(
            Problem(file="", message=f"the policy accepted at {since}: {problem}") for problem in other.problems
        )
        raise NoFallbackError(f"the policy accepted at {since} cannot be used: {first}", problems) from other
    chosen = loaded.settings.agent.state_dir
    if directory_of(chosen) != directory:
        raise NoFallbackError(f"the policy accepted at {since} has another agent.state_dir")
    return Fallback(loaded, accepted, error)


def _state_dir(file: PolicyFile, error: ConfigError) -> Path:
    """The state directory of a start with this file. Raises NoFallbackError if no copy can count there."""
    if error.is_missing:
        raise NoFallbackError("there is no policy file")
    chosen = file.state_dir or ("" if error.content is None else state_dir_in(error.content))
    if chosen and not file.state_dir and is_foreign_path(chosen):
        raise NoFallbackError("agent.state_dir is a path of another system")
    return directory_of(chosen)


def directory_of(chosen: str | None) -> Path:
    """The state directory of an agent with this agent.state_dir."""
    return Path(chosen or host.default_state_dir()).absolute()


def _load(file: PolicyFile, directory: Path) -> AcceptedPolicy:
    try:
        accepted = load_accepted(directory)
    except host.HostError as error:
        raise NoFallbackError(str(error), (Problem(file="", message=str(error)),)) from error
    is_own = (
        accepted is not None
        and accepted.path == file.name
        and Path(accepted.state_dir) == directory
        and accepted.hash == hash_of(accepted.text.encode())
    )
    if accepted is None or not is_own:
        raise NoFallbackError(f"{directory} has no copy of an accepted policy of this path")
    return accepted


def _is_known(accepted: AcceptedPolicy, rejected: RejectedFile) -> bool:
    """Whether the file is no deployment of this moment: it was rejected before, or lay there at the boot."""
    known = accepted.rejected
    if known is not None and known.hash == rejected.hash and (rejected.hash or known.reason == rejected.reason):
        return True
    boot = _boot_id()
    return bool(boot) and not host.is_same_boot(accepted.boot_id, boot)


def _directory_risk(file: PolicyFile) -> str | None:
    """The risk of the directory of a file that cannot be read; None if no other account can replace it."""
    return host.find_write_risk(Path(file.name).parent) if host.is_privileged() else None
