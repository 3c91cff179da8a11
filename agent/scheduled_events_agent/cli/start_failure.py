"""Finds out why no agent runs: what a start would read and use, and how the last start of the service ended.

Invariant: it names only what it has found. What this account may not see is passed over.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scheduled_events_agent import host
from scheduled_events_agent.cli.config import find_config, load_policy, load_trusted_policy, policy_file
from scheduled_events_agent.cli.doctor_checks import UNMASK, is_system
from scheduled_events_agent.daemon.fallback import NoFallbackError, find_fallback
from scheduled_events_agent.host import processes
from scheduled_events_agent.host.conflicts import OwnService
from scheduled_events_agent.policy.load import ConfigError
from scheduled_events_agent.status import StartFailure


class PolicyFailure(StartFailure, frozen=True, kw_only=True):
    """The policy keeps every start from working."""


def find_start_failure(
    config: str | None, state_option: str | None, state_dir: Path, *, is_service: bool
) -> StartFailure | None:
    """Why no agent starts; None if no reason is found.

    ``config`` and ``state_option``: --config and --state-dir. ``is_service``: whether a service manager starts it.
    """
    service: OwnService | None = None
    if is_service:
        with suppress(host.HostError):
            service = processes.own_service()
    # Only an agent that is root rejects a policy that others could change.
    load = load_trusted_policy if service is None or is_system(service.account) else load_policy
    if failure := _policy_failure(find_config(config), state_option, load, is_service=is_service):
        return failure
    if service is not None and service.is_masked:
        return StartFailure(reason="its service is masked", detail=UNMASK)
    if risk := _state_risk(state_dir.absolute(), service):
        return StartFailure(reason="it cannot use its state directory", detail=risk)
    if service is not None and service.failure is not None:
        return StartFailure(reason="its service has failed", detail=service.failure.reason)
    return None


def _policy_failure(
    policy: Path | None, state_option: str | None, load: Callable[[Path | None], object], *, is_service: bool
) -> PolicyFailure | None:
    """Why no start uses the policy file; a service may go on with the policy that was accepted last.

    ``load`` reads it, and raises ConfigError.
    """
    try:
        load(policy)
    except ConfigError as error:
        problems = error.problems
        if isinstance(error.__cause__, PermissionError) and not host.is_privileged():
            return None  # the agent's account may be able to read it
        if is_service:
            try:
                find_fallback(policy_file(policy, state_option), error)
            except NoFallbackError as failure:
                problems += failure.problems
            else:
                return None
        return PolicyFailure(
            reason=f"the policy file is rejected: {error.summary}", detail="\n".join(map(str, problems))
        )
    return None


def _state_risk(state_dir: Path, service: OwnService | None) -> str:
    """Why an agent does not use the state directory, as far as this account may see it."""
    risk: str | None = None
    with suppress(host.HostError, OSError):
        risk = host.find_privacy_risk(state_dir)
        if risk is None and service is not None:
            risk = host.find_wrong_owner(state_dir, service.account)
    return f"{state_dir}: {risk}" if risk else ""
