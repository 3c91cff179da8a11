"""The hooks of ``on_clear``, which run in order when the agent starts and nothing is pending."""

from datetime import datetime

from agent.engine.parts import ON_CLEAR, Hands, RunOnClear
from agent.engine.telling import Teller
from agent.hooks import HookResult
from agent.log import get_logger
from agent.log_ids import LogId
from agent.settings import Settings


class OnClear:
    """Not more than one of them runs, and none beside a hook of an event."""

    def __init__(self, hands: Hands, teller: Teller) -> None:
        self._hands = hands
        self._teller = teller
        self._log = get_logger()
        self._to_run: list[str] = []
        self.is_decided = False
        """Whether it is known if anything was pending at the start."""

    def decide(self, settings: Settings, vm: str, now: datetime, *, is_clear: bool) -> None:
        """Begin, or never do."""
        self.is_decided = True
        if is_clear and settings.on_clear:
            self._to_run = list(settings.on_clear)
            self._teller.record("on_clear", f"nothing is pending: {', '.join(self._to_run)}", now)
            self.start_next(settings, vm)

    def start_next(self, settings: Settings, vm: str) -> None:
        if self._to_run:
            hook = self._to_run.pop(0)
            environment = {"SCHEDULED_EVENT_STAGE": "on_clear", "SCHEDULED_EVENT_VM": vm}
            self._hands.start_hook(RunOnClear(hook), settings.hooks.get(hook), environment=environment)

    def is_running(self) -> bool:
        return self._hands.is_running(ON_CLEAR)

    def cancel(self) -> None:
        """Stop the hook that runs, and start no other."""
        self._to_run = []
        self._hands.cancel_hook(ON_CLEAR)

    def tell_end(self, result: HookResult, now: datetime) -> None:
        has_succeeded = result.outcome == "succeeded"
        tell = self._log.info if has_succeeded else self._log.warning
        log_id = LogId.HOOK_SUCCEEDED if has_succeeded else LogId.HOOK_FAILED
        tell("on_clear hook ended", log_id=log_id, hook=result.hook, outcome=result.outcome, reason=result.detail)
        self._teller.record("on_clear", f"hook {result.hook}: {result.detail} ({result.outcome})", now)
