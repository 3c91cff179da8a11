"""The interfaces of the engine: its clock, and the executor that does what was decided."""

import time
from datetime import UTC, datetime
from typing import Protocol

from scheduled_events_agent import host
from scheduled_events_agent.engine.messages import HookKey, HookStart
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.workflow import Approve


class Machine:
    """The machine that the engine runs on."""

    def now(self) -> datetime:
        """The wall clock."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds, on a clock that is never set."""
        return time.monotonic()

    def boot_id(self) -> str:
        """See ``host.boot_id``."""
        return host.boot_id()

    def is_shutting_down(self) -> bool | None:
        """See ``processes.is_shutting_down``."""
        return processes.is_shutting_down()


class Executor(Protocol):
    """Does what was decided. No method blocks or raises; results come back to ``Engine.receive``."""

    def start_hook(
        self,
        effect: HookStart,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        """Run the hook of ``effect``, which the policy may lack (None); HookEnded comes back."""

    def cancel_hook(self, key: HookKey, *, is_urgent: bool) -> None:
        """End the running hook, if there is one; its result says canceled. See ``HookRun.cancel``."""

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        """NotBefore has moved; the deadline is monotonic."""

    def is_running(self, key: HookKey) -> bool:
        """Whether such a hook runs, or has ended and that was not taken yet."""

    def forget_hook(self, effect: HookStart) -> None:
        """The end of this hook has been taken."""

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        """Send all of them in one request; for each of them ApprovalAnswered comes back."""

    def forget_approval(self, workflow_id: str) -> None:
        """The answer to this approval has been taken."""

    def is_busy(self) -> bool:
        """Whether a hook or an approval is under way, or has ended and that was not taken yet."""

    def cancel_all(self, grace_seconds: float) -> None:
        """End every hook within the grace."""
