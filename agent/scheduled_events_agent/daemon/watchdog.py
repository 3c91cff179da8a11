"""Ends this process when it hangs, so that the service manager starts it again.

The service managers' own watchdogs remain, with a longer limit: they cannot distinguish a hang from a machine that
was paused. This one counts its own ticks, which stop in a pause. Invariant: it waits for nothing that a hang may
block.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import islice
from types import FrameType

from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId

EXIT_CODE = 70
"""Exit code of a process that hung."""
# Together these are less than 30 seconds from the last cycle to the end of the process.
_TICK_SECONDS = 1.0
_HANG_TICKS = 25
# Longer than the engine is idle: while it works, only its cycles wake this thread.
_IDLE_TICKS = 12
_NOTIFY_TIMEOUT_SECONDS = 2.0
_MAX_FRAMES = 20


class Watchdog:
    """Ends the process after 25 ticks without a finished cycle."""

    def __init__(self, waits_for_disk: Callable[[], bool]) -> None:
        """While ``waits_for_disk`` is true, no tick counts: a restart would wait for the slow disk, too."""
        self._waits_for_disk = waits_for_disk
        self._ticks = 0
        self._is_fed = threading.Event()
        self._is_stopped = False

    def feed(self) -> None:
        """Note that a cycle has ended."""
        self._is_fed.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._is_fed.set()

    def run(self) -> None:
        wait_ticks = _IDLE_TICKS
        while not self._is_stopped:
            if self._is_fed.wait(wait_ticks * _TICK_SECONDS):
                self._is_fed.clear()
                self._ticks = 0
                wait_ticks = _IDLE_TICKS
                continue
            if not self._waits_for_disk():
                self._ticks += wait_ticks
            if self._ticks >= _HANG_TICKS:
                self._end()
            wait_ticks = 1

    def _end(self) -> None:
        # The log itself may hang.
        logger_thread = threading.Thread(target=self._log_stacks, name="watchdog-log", daemon=True)
        with contextlib.suppress(RuntimeError):  # no memory for a thread
            logger_thread.start()
            logger_thread.join(_NOTIFY_TIMEOUT_SECONDS)
        os._exit(EXIT_CODE)

    def _log_stacks(self) -> None:
        # faulthandler is not used: it makes all threads wait for a reader of standard error.
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {names.get(ident, str(ident)): _places(frame) for ident, frame in sys._current_frames().items()}  # noqa: SLF001
        get_logger().error(
            "the agent hangs: its process ends, to be started again",
            log_id=LogId.AGENT_FAILED,
            seconds_without_a_turn=round(self._ticks * _TICK_SECONDS),
            exit_code=EXIT_CODE,
            stacks=stacks,
        )


def _places(frame: FrameType) -> list[str]:
    """The calls in which a thread is, the innermost first."""
    calls = islice(traceback.walk_stack(frame), _MAX_FRAMES)
    return [f"{call.f_code.co_filename}:{line} in {call.f_code.co_name}" for call, line in calls]
