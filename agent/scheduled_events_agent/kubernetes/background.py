"""Requests on threads of their own: the main thread only waits for their results, which a signal can end.

A thread that looks up a host name or waits for an answer cannot be interrupted.
"""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from scheduled_events_agent.kubernetes.client import ApiError

_SLICE_SECONDS = 0.5  # on Windows no signal ends a wait


class InterruptedDrainError(Exception):
    """``interrupt`` was called."""


class Background:
    """Runs functions, and hands out what they return, or the ApiError that they raise, as they end."""

    def __init__(self) -> None:
        # Its put may be called by a signal's handler at any time.
        self._done: SimpleQueue[tuple[Any, Any]] = SimpleQueue()

    def start(self, key: Any, function: Callable[[], Any]) -> None:
        """Run the function on a new thread, which does not keep the process alive."""

        def run() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed out or raised by ``wait``
                result = error
            self._done.put((key, result))

        threading.Thread(target=run, name="kubernetes", daemon=True).start()

    def interrupt(self) -> None:
        """Make ``wait`` raise InterruptedDrainError. For handlers of signals."""
        self._done.put((None, InterruptedDrainError()))

    def wait(self, seconds: float = float("inf")) -> tuple[Any, Any]:
        """The key and the result of a function that has ended. After the seconds ``queue.Empty`` is raised."""
        until = time.monotonic() + seconds
        while True:
            try:
                key, result = self._done.get(timeout=max(0.0, min(_SLICE_SECONDS, until - time.monotonic())))
            except Empty:
                if time.monotonic() >= until:
                    raise
                continue
            if isinstance(result, BaseException) and not isinstance(result, ApiError):
                raise result
            return key, result

    def sleep(self, seconds: float) -> None:
        """Wait, while no function runs."""
        try:
            self.wait(seconds)
        except Empty:
            return
