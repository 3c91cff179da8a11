"""Reads the policy file: at the start, and on a thread that nothing waits for, again on request.

Once a minute it looks whether the file has changed without a reload, and whether the agent would come back after a
restart: the next start may be the reboot of an event.
"""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from scheduled_events_agent import host
from scheduled_events_agent.daemon.background import run_in_background
from scheduled_events_agent.daemon.fallback import (
    AcceptedPolicyKeeper,
    Fallback,
    NoFallbackError,
    directory_of,
    find_fallback,
)
from scheduled_events_agent.daemon.inbox import PolicyFileSeen, PolicyReloaded
from scheduled_events_agent.hooks.preflight import check_machine, find_state_loss, problems, require_trusted
from scheduled_events_agent.notifications import warnings as notification_warnings
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.policy.load import (
    ConfigError,
    FileStamp,
    LoadedPolicy,
    PolicyFile,
    keys_for_next_start,
)
from scheduled_events_agent.policy.settings import AgentSettings, LogFormat, LogLevel
from scheduled_events_agent.policy.typed_yaml import Problem
from scheduled_events_agent.status import ActivePolicy
from scheduled_events_agent.telemetry import log
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId

LOOK_SECONDS = 60.0
"""The time between two looks at the file."""


def read_policy(
    file: PolicyFile, set_up_log: Callable[[LogLevel, LogFormat], None], *, is_start: bool = False
) -> LoadedPolicy:
    """Load the file. Its log settings apply at once, and the log has the warnings about it.

    Raises ConfigError, also if others could change what the agent would run.
    """
    loaded = require_trusted(file.load(), is_reload=not is_start)
    settings = loaded.settings.agent.log
    set_up_log(settings.level, settings.format)
    _warn(loaded.warnings)
    return loaded


def read_fallback(
    file: PolicyFile, error: ConfigError, set_up_log: Callable[[LogLevel, LogFormat], None]
) -> Fallback:
    """The policy that was accepted last, for a start whose file is rejected by ``error``. Its log settings apply.

    Raises ConfigError if the agent must not start with it.
    """
    try:
        fallback = find_fallback(file, error)
    except NoFallbackError as failure:
        raise ConfigError((*error.problems, *failure.problems), error.state_dir) from error.__cause__
    settings = fallback.loaded.settings.agent.log
    set_up_log(settings.level, settings.format)
    accepted_at = format_time(fallback.accepted.accepted_at)
    get_logger().error(
        f"the policy file is rejected; in force is the policy accepted at {accepted_at}",
        log_id=LogId.POLICY_REJECTED,
        reason=str(error),
    )
    _warn(fallback.loaded.warnings)
    return fallback


def check_in_background(loaded: LoadedPolicy) -> None:
    """Log the warnings about this machine. Looking up accounts may take minutes: no start or reload waits for it.

    The thread may load certificates. If the process ended at that moment, OpenSSL's own clean-up would crash it.
    """
    run_in_background(lambda: _warn(machine_warnings(loaded)), "policy-check")


class PolicyReader:
    """Reads the policy file on request, and looks at it once a minute.

    ``request``, ``stop`` and ``in_force`` are for any thread, ``accept``, ``reject`` and ``see`` for the engine's.
    """

    def __init__(
        self,
        file: PolicyFile,
        loaded: LoadedPolicy,
        put: Callable[[PolicyReloaded | PolicyFileSeen], None],
        directory: Path,
        fallback: Fallback | None = None,
    ) -> None:
        """``loaded``: the policy with which the agent starts. ``directory``: that of the state.

        ``fallback``: where ``loaded`` comes from, if the file was rejected.
        """
        self.file = file
        self._loaded = loaded
        self._put = put
        self._directory = directory.absolute()
        self._fallback = fallback
        self._keeper = AcceptedPolicyKeeper(file, directory)
        self._agent_at_start = loaded.settings.agent
        self._is_requested = threading.Event()
        self._is_stopping = False
        self._result: LoadedPolicy | ConfigError = loaded
        """The result of the last reading of the file."""
        self._result_stamp: FileStamp | None = None
        self._last_stamp: FileStamp | None = None
        """The stamp of the file at the last look."""
        self._seen = PolicyFileSeen()
        """The state of the file that the engine knows."""
        self.in_force = ActivePolicy(file=file.name, read_at=datetime.now(UTC), hash=loaded.hash)
        """Replaced, never changed."""
        if fallback is not None:
            self._result = fallback.error
            self._seen = PolicyFileSeen(error=str(fallback.error), summary=fallback.error.summary)
            self.in_force = replace(self.in_force, read_at=fallback.accepted.accepted_at)
            self._note(self._seen)

    def request(self) -> None:
        """Have the file read again."""
        self._is_requested.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._is_requested.set()

    def run(self) -> None:
        """Keep the policy of the start; then read the file on request, and look at it once a minute."""
        self.keep()
        self._try_to_look()
        while not self._is_stopping:
            if not self._is_requested.wait(LOOK_SECONDS):
                self._try_to_look()
            elif not self._is_stopping:
                self._is_requested.clear()
                self._read()

    def keep(self) -> None:
        """Keep the policy of the start for the next one."""
        if self._fallback is None:
            self._keeper.accept(self._loaded)
        else:
            self._keeper.go_on_with(self._fallback)

    def _read(self) -> None:
        """Read the file; a result from before the last request does not count."""
        result: LoadedPolicy | ConfigError
        try:
            result = read_policy(self.file, log.change)
            check_in_background(result)
        except ConfigError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - whatever the error, the old policy is still good
            result = ConfigError((Problem(file="", message=str(error)),))
        if self._is_requested.is_set():
            return
        self._result = result
        self._result_stamp = self._last_stamp = None
        if isinstance(result, ConfigError):
            self._seen = self._rejected(result)
            read = PolicyReloaded(
                None,
                error=str(result),
                summary=result.summary,
                next_start_failure=self._seen.next_start_failure,
            )
            self._put(read)
            return
        self._loaded = result
        self._seen = PolicyFileSeen(next_start_failure=self._find_state_failure())
        read = PolicyReloaded(result.settings, result.hash, next_start_failure=self._seen.next_start_failure)
        self._put(read)
        self._keeper.accept(result)

    def _try_to_look(self) -> None:
        try:
            self.look()
        except Exception as error:  # noqa: BLE001 - whatever the error, such as of the disk, events go on
            text = "the policy file and the state directory cannot be looked at"
            get_logger().warning(text, log_id=LogId.POLICY_WARNING, reason=str(error))

    def look(self) -> None:
        """See whether the file has changed, and whether the agent would come back after a restart."""
        self._keeper.write_if_missing()
        stamp = self.file.stamp()
        is_settled = stamp == self._last_stamp  # else an editor may be at it
        self._last_stamp = stamp
        if stamp != self._result_stamp and is_settled:
            result = self._load()
            if self.file.stamp() == stamp:
                self._result = result
                self._result_stamp = stamp
        seen = self._judge(self._result)
        if seen != self._seen:
            self._seen = seen
            self._put(seen)

    def _load(self) -> LoadedPolicy | ConfigError:
        try:
            return self.file.load()
        except ConfigError as error:
            return error

    def _judge(self, result: LoadedPolicy | ConfigError) -> PolicyFileSeen:
        if isinstance(result, ConfigError):
            return self._rejected(result)
        in_force = self._loaded
        # A policy from before a start may only observe because of the file that was rejected then.
        is_other = result.content != in_force.content or result.settings.agent.mode != in_force.settings.agent.mode
        try:
            require_trusted(result, is_reload=is_other)
        except ConfigError as error:
            return self._rejected(error)
        changed_at = None
        if is_other and self._result_stamp is not None:
            changed_at = self._result_stamp.modified_at
        return PolicyFileSeen(changed_at=changed_at, next_start_failure=self._find_state_failure())

    def _rejected(self, error: ConfigError) -> PolicyFileSeen:
        failure = self._keeper.reject(error) or self._find_state_failure()
        return PolicyFileSeen(error=str(error), summary=error.summary, next_start_failure=failure)

    def _find_state_failure(self) -> str:
        """Why the next start could not use the state, or would find none; "" if no reason is known."""
        try:
            if self._directory.is_dir():
                host.create_private_dir(self._directory)
        except host.HostError as error:
            return str(error)
        directory = directory_of(self._loaded.settings.agent.state_dir)
        is_trial = self.file.state_dir is not None  # the option may name such a directory then
        if is_trial or directory != self._directory:
            return ""
        return find_state_loss(directory)

    def accept(self, read: PolicyReloaded, new: AgentSettings, before: AgentSettings) -> None:
        """Note that the policy with these settings is in force now, in place of ``before``."""
        late = keys_for_next_start(self._agent_at_start, new)
        if late and keys_for_next_start(before, new):
            text = "the policy file has changes that need a restart of the agent"
            get_logger().warning(text, log_id=LogId.POLICY_WARNING, keys=late)
        self.in_force = ActivePolicy(
            file=self.in_force.file,
            read_at=datetime.now(UTC),
            hash=read.hash,
            next_start_failure=read.next_start_failure,
            needs_restart=late,
        )

    def reject(self, read: PolicyReloaded) -> None:
        """Note that the file is rejected: the previous policy stays in force."""
        seen = PolicyFileSeen(error=read.error, summary=read.summary, next_start_failure=read.next_start_failure)
        self._note(seen)

    def see(self, seen: PolicyFileSeen) -> None:
        """Note what the file is now, without a reload."""
        if seen.error and seen.error != self.in_force.rejected:
            text = "the policy file has changed and is rejected; the old policy stays in force"
            get_logger().error(text, log_id=LogId.POLICY_REJECTED, reason=seen.error)
        self._note(seen)

    def _note(self, seen: PolicyFileSeen) -> None:
        since = self.in_force.rejected_at or datetime.now(UTC)
        self.in_force = replace(
            self.in_force,
            rejected=seen.error,
            rejected_summary=seen.summary,
            rejected_at=since if seen.error else None,
            changed_at=seen.changed_at,
            next_start_failure=seen.next_start_failure,
        )


def machine_warnings(loaded: LoadedPolicy) -> list[Problem]:
    """Warnings about files, programs and accounts on this machine that the policy names."""
    of_machine = problems(loaded, check_machine(loaded, is_root=host.is_privileged()))
    findings = [*notification_warnings(loaded.settings.notify)]
    if loaded.settings.fleet and loaded.settings.fleet.table:
        from scheduled_events_agent.fleet import table  # noqa: PLC0415  # most policies have none

        findings += table.warnings(loaded.settings.fleet)
    return [*of_machine, *loaded.parsed.to_problems(findings, severity="warning")]


def _warn(problems: Iterable[Problem]) -> None:
    for problem in problems:
        get_logger().warning("the policy file has a warning", log_id=LogId.POLICY_WARNING, problem=str(problem))
