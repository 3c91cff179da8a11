"""The engine's inbox: other threads put into it what has come, the engine's thread takes it in.

The one invariant: what has come before the agent has stopped is on disk then: how a hook and an approval ended,
who this VM is, what the document said, what operators asked for.
"""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agent.daemon.reloading import PolicyRead
from agent.engine import Engine, Hands, News
from agent.log import FailureLog
from agent.log_ids import LogId
from agent.store import StoreError

# While the agent stops, operators are answered this often.
_TICK_SECONDS = 1.0
# Hooks that run have the time limit of a stop to end by themselves, less this much to be ended in and as much for
# the state file and the log.
_GRACE_SECONDS = 1.5


@dataclass(frozen=True)
class Command:
    """What the daemon is asked for from outside."""

    word: Literal["stop", "reload", "pause", "resume"]


Item = News | Command | PolicyRead


class Inbox:
    """For the engine's thread; other threads know the queue only."""

    def __init__(
        self,
        items: "queue.SimpleQueue[Item]",
        engine: Engine,
        hands: Hands,
        obey: Callable[[Command | PolicyRead], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``obey``: does what a command says, ``stop`` excepted, and takes the policy that was read."""
        self._items = items
        self._engine = engine
        self._hands = hands
        self._obey = obey
        self._monotonic = monotonic
        self._failures = FailureLog(
            "keeping what comes while the agent stops", LogId.STATE_NOT_WRITTEN, LogId.STATE_WRITTEN
        )

    def take(self, timeout: float) -> bool:
        """Wait up to ``timeout`` for something, take in all there is; False if the agent is to stop."""
        is_to_stop = False
        try:
            item = self._items.get(timeout=max(0.0, timeout))
            while True:
                if isinstance(item, Command) and item.word == "stop":
                    is_to_stop = True
                elif isinstance(item, Command | PolicyRead):
                    self._obey(item)
                else:
                    self._engine.take(item)
                item = self._items.get_nowait()
        except queue.Empty:
            return not is_to_stop

    def finish(self, seconds: float) -> None:
        """Stop within so many seconds and keep all that comes: hooks may end by themselves, then they are ended.

        Approvals may be answered meanwhile. Raises StoreError.
        """
        self._engine.begin_stop()
        self._collect(seconds - 2 * _GRACE_SECONDS)
        self._hands.cancel_all(_GRACE_SECONDS)
        self._collect(_GRACE_SECONDS + 0.5)
        self.take(0.0)
        self._engine.finish()

    def _collect(self, seconds: float) -> None:
        """Keep what comes, until nothing is under way, the time is up or the agent is told to stop once more."""
        deadline = self._monotonic() + seconds
        while self._hands.is_busy() and (left := deadline - self._monotonic()) > 0:
            try:
                if not self.take(min(left, _TICK_SECONDS)):
                    return
                self._engine.turn(None)
            except StoreError:
                pass  # the engine tells of it, and finish tries again
            except Exception as error:  # noqa: BLE001 - a bug must not keep the hooks from being ended
                self._failures.failed("bug", repr(error), self._monotonic())
