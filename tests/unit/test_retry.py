"""The growing pause after failures, which all clients share."""

from random import Random

import pytest

from scheduled_events_agent.http.retry import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(2.0, 15.0)
    assert [backoff.next_delay() for _ in range(5)] == [2.0, 4.0, 8.0, 15.0, 15.0]
    backoff.reset()
    assert backoff.next_delay() == 2.0


@pytest.mark.parametrize(("asked", "pause"), [(None, 2.0), (-5.0, 2.0), (1.0, 2.0), (7.0, 7.0), (1e9, 60.0)])
def test_a_service_may_ask_for_a_longer_pause_within_bounds(asked: float | None, pause: float) -> None:
    backoff = Backoff(2.0, 15.0, longest_retry_after=60.0)
    assert backoff.next_delay(asked) == pause
    assert backoff.next_delay() == 4.0  # which does not change the pauses after it


def test_jitter_makes_pauses_shorter_and_those_asked_for_longer() -> None:
    for seed in range(100):
        backoff = Backoff(8.0, 8.0, Random(seed))
        assert 4.0 <= backoff.next_delay() <= 8.0
        assert 100.0 <= backoff.next_delay(100.0) <= 110.0
        assert 290.0 <= backoff.next_delay(290.0) <= 300.0
        assert backoff.next_delay(1e9) == 300.0
    for asked in (None, 100.0):
        one, other = Backoff(8.0, 8.0, Random(1)), Backoff(8.0, 8.0, Random(2))
        assert one.next_delay(asked) != other.next_delay(asked)
