"""Reads the policy file: at the start, and again on request, on a thread that nothing waits for."""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from msgspec.structs import replace

from scheduled_events_agent import host
from scheduled_events_agent.daemon.background import run_in_background
from scheduled_events_agent.daemon.inbox import PolicyReloaded
from scheduled_events_agent.hooks.preflight import check_machine, problems, require_trusted
from scheduled_events_agent.notifications import warnings as notification_warnings
from scheduled_events_agent.policy.load import LoadedPolicy, PolicyFile, keys_for_next_start
from scheduled_events_agent.policy.settings import AgentSettings, LogFormat, LogLevel
from scheduled_events_agent.status import ActivePolicy
from scheduled_events_agent.telemetry import log
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId


def read_policy(
    file: PolicyFile, set_up_log: Callable[[LogLevel, LogFormat], None], *, is_start: bool = False
) -> LoadedPolicy:
    """Load the file. Its log settings apply at once, and the log has the warnings about it.

    Raises ConfigError, also if others could change what the agent would run.
    """
    loaded = require_trusted(file.load(), is_reload=not is_start)
    settings = loaded.settings.agent.log
    set_up_log(settings.level, settings.format)
    _warn(map(str, loaded.warnings))
    return loaded


def check_in_background(loaded: LoadedPolicy) -> None:
    """Log the warnings about this machine. Looking up accounts may take minutes: no start or reload waits for it.

    The thread may load certificates. If the process ended at that moment, OpenSSL's own clean-up would crash it.
    """
    run_in_background(lambda: _warn(machine_warnings(loaded)), "policy-check")


class PolicyReader:
    """Reads the policy file on request.

    ``request``, ``stop`` and ``in_force`` are for any thread, ``accept`` and ``reject`` for the engine's.
    """

    def __init__(self, file: PolicyFile, loaded: LoadedPolicy, put: Callable[[PolicyReloaded], None]) -> None:
        """``loaded``: the policy with which the agent starts."""
        self.file = file
        self._put = put
        self._agent_at_start = loaded.settings.agent
        self._is_requested = threading.Event()
        self._is_stopping = False
        self.in_force = ActivePolicy(file=file.name, read_at=datetime.now(UTC), hash=loaded.hash)
        """Replaced, never changed."""

    def request(self) -> None:
        """Have the file read again."""
        self._is_requested.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._is_requested.set()

    def run(self) -> None:
        """Read the file on request; a result from before the last request does not count."""
        while self._is_requested.wait() and not self._is_stopping:
            self._is_requested.clear()
            try:
                loaded = read_policy(self.file, log.change)
                check_in_background(loaded)
                read = PolicyReloaded(loaded.settings, loaded.hash)
            except Exception as error:  # noqa: BLE001 - whatever the error, the old policy is still good
                read = PolicyReloaded(None, error=str(error))
            if not self._is_requested.is_set():
                self._put(read)

    def accept(self, new: AgentSettings, hash_: str, before: AgentSettings) -> None:
        """Note that the new policy is in force now, in place of ``before``."""
        late = keys_for_next_start(self._agent_at_start, new)
        if late and keys_for_next_start(before, new):
            text = "the policy file has changes that need a restart of the agent"
            get_logger().warning(text, log_id=LogId.POLICY_WARNING, keys=late)
        self.in_force = replace(
            self.in_force,
            read_at=datetime.now(UTC),
            hash=hash_,
            rejected="",
            rejected_at=None,
            needs_restart=late,
        )

    def reject(self, reason: str) -> None:
        """Note that the new policy is rejected: the previous one stays in force."""
        rejected_at = self.in_force.rejected_at or datetime.now(UTC)
        self.in_force = replace(self.in_force, rejected=reason, rejected_at=rejected_at)


def machine_warnings(loaded: LoadedPolicy) -> list[str]:
    """Warnings about files, programs and accounts on this machine that the policy names."""
    of_machine = problems(loaded, check_machine(loaded, is_root=host.is_privileged()))
    findings = [*notification_warnings(loaded.settings.notify)]
    if loaded.settings.fleet and loaded.settings.fleet.table:
        from scheduled_events_agent.fleet import table  # noqa: PLC0415  # most policies have none

        findings += table.warnings(loaded.settings.fleet)
    return [str(problem) for problem in (*of_machine, *loaded.parsed.to_problems(findings))]


def _warn(texts: Iterable[str]) -> None:
    for problem in texts:
        get_logger().warning("the policy file has a warning", log_id=LogId.POLICY_WARNING, problem=problem)
