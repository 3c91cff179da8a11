"""Decides from the answers of the metadata service whether this VM's clock is wrong. Pure: reads no clock.

Only minutes count: they spoil lead, windows and the end of hooks. One answer proves nothing, as it may have been
under way while the clock was set.
"""

from collections import deque

WRONG_SECONDS = 120.0
"""The clock is wrong after ``ANSWERS`` answers in a row that differ from it by so much."""
RIGHT_SECONDS = 60.0
"""It is right again after ``ANSWERS`` answers in a row that differ from it by less than this."""
ANSWERS = 10


class ClockTracker:
    """Whether the clock is wrong, and by how much. One thread at a time."""

    def __init__(self) -> None:
        self.seconds_ahead = 0.0
        """How far the clock was ahead of Azure's when it was found wrong; negative: behind; 0: it is not wrong.

        It follows the clock only by whole minutes, so that texts do not flicker.
        """
        self._right_answers = 0
        self._wrong_by: deque[float] = deque(maxlen=ANSWERS)

    def compare(self, seconds_ahead: float) -> None:
        """One more answer. ``seconds_ahead``: how far the clock is ahead of its Date at least."""
        self._right_answers = self._right_answers + 1 if abs(seconds_ahead) < RIGHT_SECONDS else 0
        if abs(seconds_ahead) >= WRONG_SECONDS:
            self._wrong_by.append(seconds_ahead)
        else:
            self._wrong_by.clear()
        if self._right_answers == ANSWERS:
            self.seconds_ahead = 0.0
        elif len(self._wrong_by) == ANSWERS and min(map(self._distance, self._wrong_by)) >= RIGHT_SECONDS:
            self.seconds_ahead = self._wrong_by[-1]

    def _distance(self, seconds_ahead: float) -> float:
        """How far this is from what was found before."""
        return abs(seconds_ahead - self.seconds_ahead)
