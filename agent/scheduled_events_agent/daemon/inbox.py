"""The engine's inbox: other threads put items into it, the engine's thread takes them out.

Invariant: when the agent has stopped, all that came before is on disk: results of hooks and approvals, this VM's
name, the document, operators' requests.
"""

import queue
import time
from collections.abc import Callable
from datetime import datetime
from typing import Literal

import msgspec

from scheduled_events_agent.engine import Engine, Executor, Message
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.store import StoreError
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId

# How often operators are answered while the agent stops.
_TICK_SECONDS = 1.0
# A stop reserves this part of its time limit for ending hooks, and as much for the state file and the log.
_GRACE_SECONDS = 1.5


class Command(msgspec.Struct, frozen=True):
    """A command from a signal or the service manager.

    ``check_requests``: there may be a request, or another status.
    """

    action: Literal["stop", "reload", "check_requests"]


class PolicyReloaded(msgspec.Struct, frozen=True):
    """The policy file was read again."""

    settings: Settings | None
    """None if the file was rejected."""
    hash: str = ""
    error: str = ""
    summary: str = ""
    """``error`` in a few words."""
    next_start_failure: str = ""
    """Why the agent would not come back after a restart."""


class PolicyFileSeen(msgspec.Struct, frozen=True):
    """The policy file as it is now, without a reload."""

    error: str = ""
    """Why it is rejected."""
    summary: str = ""
    """``error`` in a few words."""
    changed_at: datetime | None = None
    """When it was changed; None if it is rejected or in force."""
    next_start_failure: str = ""
    """Why the agent would not come back after a restart."""


Item = Message | Command | PolicyReloaded | PolicyFileSeen


class Inbox:
    """The engine's inbox. For the engine's thread; other threads only have the queue."""

    def __init__(
        self,
        items: "queue.SimpleQueue[Item]",
        engine: Engine,
        executor: Executor,
        handle: Callable[[Command | PolicyReloaded | PolicyFileSeen], None],
        *,
        is_sending: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``handle`` carries out every command but ``stop``, and receives what was read of the policy file.

        ``is_sending``: whether a stop should still wait for notifications.
        """
        self._items = items
        self._engine = engine
        self._executor = executor
        self._handle = handle
        self._is_sending = is_sending
        self._monotonic = monotonic

    def drain(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for an item, then take all items. False if one of them is a stop."""
        is_to_stop = False
        try:
            item = self._items.get(timeout=max(0.0, timeout))
            while True:
                if isinstance(item, Command) and item.action == "stop":
                    is_to_stop = True
                elif isinstance(item, Command | PolicyReloaded | PolicyFileSeen):
                    self._handle(item)
                else:
                    self._engine.receive(item)
                item = self._items.get_nowait()
        except queue.Empty:
            return not is_to_stop

    def shutdown(self, seconds: float) -> None:
        """Stop within ``seconds``: wait for hooks and approvals, then end the hooks. Keeps all that comes.

        Raises StoreError.
        """
        self._engine.begin_stop()
        self._drain_until_idle(seconds - 2 * _GRACE_SECONDS)
        self._executor.cancel_all(_GRACE_SECONDS)
        self._drain_until_idle(_GRACE_SECONDS + 0.5)
        self.drain(0.0)
        self._engine.finish()

    def _drain_until_idle(self, seconds: float) -> None:
        """Take items until nothing is under way, the time is up, or a second stop comes."""
        deadline = self._monotonic() + seconds
        while (self._executor.is_busy() or self._is_sending()) and (left := deadline - self._monotonic()) > 0:
            try:
                if not self.drain(min(left, _TICK_SECONDS)):
                    return
                self._engine.run_cycle(None)
            except StoreError:
                pass  # the engine logs it, and finish tries again
            except Exception:  # noqa: BLE001 - hooks must be ended despite a bug
                get_logger().exception("a bug in the agent", log_id=LogId.AGENT_FAILED)
