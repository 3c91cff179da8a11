"""Code that blocks, in a simulation whose clock jumps."""

import threading
from collections.abc import Callable


class KilledError(BaseException):
    """The process ends here; no code of the agent's may catch it."""


class SteppedThread:
    """A thread that runs only while the simulation waits for it, so that each run is the same.

    It does one thing after the other.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """What the last thing has raised."""
        self.is_busy = False
        self._what: Callable[[], None] | None = None
        self._to_raise: BaseException | None = None
        self._may_run, self._has_paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, what: Callable[[], None]) -> None:
        """Do this, until it pauses or is over."""
        self._what, self.failure, self.is_busy = what, None, True
        self.resume()

    def resume(self, error: BaseException | None = None) -> None:
        """Let it go on until it pauses or is over; ``error``: it raises this there."""
        self._to_raise = error
        self._may_run.release()
        self._has_paused.acquire()

    def end(self) -> None:
        """End the thread."""
        if self.is_busy:
            self.resume(KilledError())
        self._what = None
        self._may_run.release()
        self._thread.join()

    def pause(self) -> None:
        """For the code in it: wait until the simulation lets it go on."""
        self._has_paused.release()
        self._may_run.acquire()
        if self._to_raise is not None:
            raise self._to_raise

    def _run(self) -> None:
        self._may_run.acquire()
        while self._what is not None:
            try:
                self._what()
            except BaseException as error:  # noqa: BLE001 - the simulation checks it
                self.failure = error
            self.is_busy = False
            self._has_paused.release()
            self._may_run.acquire()
