"""In which api-version the document is asked for, and what a refusal of the newest one means. Does no I/O."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.events import RECOMMENDATION, RECOMMENDING_VERSION, ApiVersion, ApiVersionSetting
from scheduled_events_agent.policy import Rule

T = TypeVar("T")

GENERAL_VERSION: ApiVersion = "2020-07-01"
"""The newest one that every VM has."""
_REFUSALS = ("bad_request", "not_found")
# A 404 may also be an outage of a moment, so the second one in a row counts.
_ENOUGH_REFUSALS = 2
_ASK_AGAIN_SECONDS = 24 * 3600.0


class Refusals(msgspec.Struct, frozen=True):
    """How often in a row the newest version was refused, and the general one answered."""

    count: int = 0
    last: float = 0.0
    """When, monotonic."""

    @property
    def are_enough(self) -> bool:
        """Whether the newest version is known to be refused."""
        return self.count >= _ENOUGH_REFUSALS

    def after(self, asked: tuple[ApiVersion, ...], answered: ApiVersion, now: float) -> "Refusals":
        """``answered``: which of the ``versions_to_ask`` was."""
        if len(asked) == 1:
            return self
        return Refusals() if answered == asked[0] else Refusals(self.count + 1, now)


NONE_YET = Refusals()


def versions_to_ask(
    setting: ApiVersionSetting, rules: Iterable[Rule], refusals: Refusals = NONE_YET, now: float = 0.0
) -> tuple[ApiVersion, ...]:
    """What to ask in; the second version only if the first one is refused. ``now`` is monotonic."""
    if setting != "auto":
        return (setting,)
    is_refused = refusals.are_enough and now - refusals.last < _ASK_AGAIN_SECONDS
    if is_refused or not any(RECOMMENDATION in rule.when.type for rule in rules):
        return (GENERAL_VERSION,)
    return RECOMMENDING_VERSION, GENERAL_VERSION


def ask_best(versions: tuple[ApiVersion, ...], ask: Callable[[ApiVersion], T]) -> tuple[T, ApiVersion]:
    """The answer, and in which version. Raises what ``ask`` raised last."""
    for version in versions[:-1]:
        try:
            return ask(version), version
        except AgentError as error:
            if error.kind not in _REFUSALS:
                raise
    return ask(versions[-1]), versions[-1]
