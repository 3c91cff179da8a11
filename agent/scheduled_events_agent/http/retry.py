"""How long to leave a service alone after a failure."""

from random import Random


class Backoff:
    """The pause after each failure in a row: the first one, then twice as long each time, up to the longest.

    For one thread. Reads no clock.
    """

    def __init__(
        self,
        first_seconds: float,
        longest_seconds: float,
        jitter: Random | None = None,
        *,
        longest_retry_after: float = 300.0,
    ) -> None:
        """``jitter`` makes pauses shorter by up to half, so that not all machines come back together.

        A pause that the service asks for is never shorter, and with ``jitter`` up to a tenth longer.
        ``longest_retry_after``: the longest of these, in seconds, whatever the service asks for.
        """
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._jitter = jitter
        self._longest_retry_after = longest_retry_after
        self._delay = first_seconds

    def next_delay(self, retry_after: float | None = None) -> float:
        """Seconds to wait after one more failure. ``retry_after``: what the service asks for, if it does."""
        delay = self._delay
        self._delay = min(2 * delay, self._longest_seconds)
        asked = retry_after or 0.0
        if self._jitter is not None:
            delay *= self._jitter.uniform(0.5, 1.0)
            asked *= self._jitter.uniform(1.0, 1.1)
        return max(delay, min(asked, self._longest_retry_after))

    def reset(self) -> None:
        """A request has succeeded."""
        self._delay = self._first_seconds
