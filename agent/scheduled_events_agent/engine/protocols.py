"""The interfaces of the engine: its clock, and the executor that does what was decided."""

import time
from datetime import UTC, datetime
from typing import Protocol

from scheduled_events_agent import host
from scheduled_events_agent.engine.messages import HookCommand, HookKey
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.workflow import Approve


class Host:
    """The machine that the engine runs on."""

    def now(self) -> datetime:
        """The wall clock."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds, on a clock that is never set."""
        return time.monotonic()

    def boot_id(self) -> str:
        """Identifies the boot of this machine, as ``host.boot_id`` does."""
        return host.boot_id()

    def is_shutting_down(self) -> bool | None:
        """Whether this machine is shutting down, as ``processes.is_shutting_down`` reports it."""
        return processes.is_shutting_down()


class Executor(Protocol):
    """Carries out decisions. No method blocks or raises; results come back to ``Engine.receive``."""

    def start_hook(
        self,
        effect: HookCommand,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        """Run the hook of ``effect``, which the policy may lack (None); HookDone comes back."""

    def cancel_hook(self, key: HookKey, *, is_urgent: bool) -> None:
        """End the running hook, if any; its result says canceled. ``is_urgent``: see ``HookRun.cancel``."""

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        """NotBefore has moved; the deadline is monotonic."""

    def is_running(self, key: HookKey) -> bool:
        """Whether a hook with this key runs, or has ended and its result was not received yet."""

    def hook_received(self, effect: HookCommand) -> None:
        """Note that the engine has received the result of this hook."""

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        """Send all of them in one request; for each of them ApprovalAnswered comes back."""

    def approval_received(self, workflow_id: str) -> None:
        """Note that the engine has received the answer to this approval."""

    def is_busy(self) -> bool:
        """Whether a hook or an approval is under way, or has ended and its result was not received yet."""

    def cancel_all(self, grace_seconds: float) -> None:
        """End every hook within ``grace_seconds``, by force if necessary."""
