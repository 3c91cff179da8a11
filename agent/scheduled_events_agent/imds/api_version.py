"""Chooses the api-version; falls back to an older one if the newest one fails. Does no I/O."""

from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.imds.document import (
    REBALANCE_VERSION,
    RECOMMENDATION,
    ApiVersion,
    ApiVersionSetting,
)

T = TypeVar("T")

BASELINE_VERSION: ApiVersion = "2020-07-01"
"""The newest api-version that every VM has."""
PREVIEW_TIMEOUT_SECONDS = 2.0
"""Time limit for the newest version: events are more important than recommendations."""
# 400 is documented; OpenShift's termination handler expects 404 from a VM without the preview.
_REJECTION_KINDS = ("bad_request", "not_found")
# One failure may be an outage of a moment, so the second one in a row counts.
_ENOUGH_FAILURES = 2
_RETRY_SECONDS = 600.0
_RETRY_AFTER_REJECTION_SECONDS = 24 * 3600.0


class FallbackResult(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The result of ``fetch_with_fallback``."""

    content: T
    version: ApiVersion
    """The api-version of the answer."""
    error: AgentError | None = None
    """Why the newest version failed, if that was asked for and failed."""


class VersionFallback(msgspec.Struct, frozen=True):
    """How often in a row the newest version failed while the general one was answered."""

    count: int = 0
    last: float = 0.0
    """When it failed last, monotonic."""
    reason: str = ""
    """How the service failed to answer, as a phrase."""
    is_rejected: bool = False
    """Whether each of these failures says that the service does not know the version."""

    @property
    def is_settled(self) -> bool:
        """Whether only the general version is asked for now."""
        return self.count >= _ENOUGH_FAILURES

    @property
    def ask_again_seconds(self) -> float:
        """How long after the last failure the newest version is asked for again."""
        return _RETRY_AFTER_REJECTION_SECONDS if self.is_rejected else _RETRY_SECONDS

    @property
    def failure(self) -> str:
        """Why recommendations are not available; "" if they are, as far as is known."""
        return not_available(self.reason) if self.is_settled else ""

    def after(self, asked: tuple[ApiVersion, ...], error: AgentError | None, now: float) -> "VersionFallback":
        """The state after a cycle that asked for ``asked`` and was answered. ``error``: the newest version's."""
        if len(asked) == 1:
            return self
        if error is None:
            return VersionFallback()
        is_rejected = error.kind in _REJECTION_KINDS and (self.is_rejected or self.count == 0)
        return VersionFallback(self.count + 1, now, reason_of(error), is_rejected)


NO_FALLBACK = VersionFallback()


def not_available(reason: str) -> str:
    """The text of log, status and doctor if the newest version fails for this reason."""
    return f"{RECOMMENDATION} events are not available: api-version {REBALANCE_VERSION} {reason}"


def reason_of(error: AgentError) -> str:
    """The service's failure to answer in a version, as a phrase without a subject."""
    status = getattr(error, "status", None)
    if status is not None:
        return f"answers {status}"
    return "does not answer in time" if error.kind == "timeout" else f"gives no usable answer ({error.kind})"


def candidate_versions(
    setting: ApiVersionSetting,
    *,
    has_recommendations: bool,
    fallback: VersionFallback = NO_FALLBACK,
    now: float = 0.0,
) -> tuple[ApiVersion, ...]:
    """The versions to ask in; the second version only if the first one fails.

    ``has_recommendations``: whether documents must list them. ``now`` is monotonic.
    """
    if setting != "auto":
        return (setting,)
    is_resting = fallback.is_settled and now - fallback.last < fallback.ask_again_seconds
    if is_resting or not has_recommendations:
        return (BASELINE_VERSION,)
    return REBALANCE_VERSION, BASELINE_VERSION


def fetch_with_fallback(
    versions: tuple[ApiVersion, ...], ask: Callable[[ApiVersion, float], T]
) -> FallbackResult[T]:
    """The first version's answer, or that of the last one in the same cycle. Raises what ``ask`` raised last.

    ``ask`` gets the version, and how many seconds it may take (inf: as usual). A service that throttles is not
    asked twice.
    """
    newest, general = versions[0], versions[-1]
    if newest == general:
        return FallbackResult(content=ask(general, inf), version=general)
    try:
        return FallbackResult(content=ask(newest, PREVIEW_TIMEOUT_SECONDS), version=newest)
    except AgentError as error:
        if error.kind == "throttled":
            raise
        failure = error
    return FallbackResult(content=ask(general, inf), version=general, error=failure)
