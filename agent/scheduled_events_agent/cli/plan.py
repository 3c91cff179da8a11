"""The plan for an event, in rows: of a rule for ``check``, with the times of an event for ``explain``."""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from scheduled_events_agent.cli.terminal import Row
from scheduled_events_agent.policy.durations import format_duration


class Plan(NamedTuple):
    """The steps; an empty one has no row."""

    begins: str
    drain_for: float
    prepare: tuple[str, ...]
    approve: str
    drain_seconds: float | None = None
    """How long the drain takes, if the notice is known."""
    until: str = ""
    """When the hooks of ``prepare`` must have ended."""
    on_start: tuple[str, ...] = ()
    recover: tuple[str, ...] = ()
    limits: str = ""
    """The time that the notice leaves for the hooks of ``prepare``."""
    on_start_when: str = "once it has started"
    recover_when: str = "once it is over"
    several_vms: str = ""
    """The difference for events that name other VMs too."""


def plan_rows(plan: Plan) -> Iterator[Row]:
    """The rows, in the order of what happens."""
    steps = [f"not ready for {_format_drain(plan)}"] if plan.drain_for else []
    if plan.prepare:
        until = f", until {plan.until} at the latest" if plan.until else ""
        steps.append(f"run {', '.join(plan.prepare)}{until}")
    prepare = ", then ".join(steps)
    texts = {
        "begins": plan.begins,
        "prepare": f"{prepare}; {plan.limits}" if plan.limits else prepare,
        "on start": f"{plan.on_start_when}: run {', '.join(plan.on_start)}" if plan.on_start else "",
        "approve": plan.approve,
        "recover": f"{plan.recover_when}: run {', '.join(plan.recover)}" if plan.recover else "",
        "several VMs": plan.several_vms,
    }
    for label, text in texts.items():
        if text:
            yield Row(label, text)


def _format_drain(plan: Plan) -> str:
    whole = format_duration(plan.drain_for)
    seconds = plan.drain_for if plan.drain_seconds is None else ceil(plan.drain_seconds)
    return whole if seconds >= plan.drain_for else f"{format_duration(seconds)} ({whole}, cut for the notice)"
