"""Whether this VM's clock is wrong: by how much, found after ten answers and forgotten after ten."""

import itertools
import random

import pytest

from scheduled_events_agent.imds.clock import ANSWERS, ClockTracker
from scheduled_events_agent.status.messages import clock_difference


def after(*answers: float) -> list[float]:
    """What is known after each of the answers."""
    tracker = ClockTracker()
    known = []
    for seconds in answers:
        tracker.compare(seconds)
        known.append(tracker.seconds_ahead)
    return known


def last(*answers: float) -> float:
    return after(*answers)[-1]


@pytest.mark.parametrize("seconds", [120.0, -120.0, 600.0, -86400.0])
def test_ten_answers_in_a_row_show_that_the_clock_is_wrong(seconds: float) -> None:
    assert after(*[seconds] * 10) == [0.0] * 9 + [seconds]


@pytest.mark.parametrize("seconds", [0.0, 59.0, 60.0, 119.9, -119.9])
def test_less_than_two_minutes_are_no_wrong_clock(seconds: float) -> None:
    assert set(after(*[seconds] * 50)) == {0.0}


@pytest.mark.parametrize("other", [0.0, 90.0, -90.0])
def test_one_other_answer_begins_the_row_anew(other: float) -> None:
    assert last(*[600.0] * 9, other, *[600.0] * 9) == 0.0
    assert last(*[600.0] * 9, other, *[600.0] * 10) == 600.0


def test_ten_answers_in_a_row_below_a_minute_show_that_it_is_right_again() -> None:
    assert after(*[600.0] * 10, *[59.9, -59.9] * 5)[9:] == [600.0] * 10 + [0.0]
    assert last(*[600.0] * 10, *[0.0] * 9, 60.0, *[0.0] * 9) == 600.0
    assert last(*[600.0] * 10, *[90.0] * 50) == 600.0  # neither wrong enough nor right


def test_after_it_was_right_it_is_found_wrong_again() -> None:
    assert last(*[600.0] * 10, *[0.0] * 10, *[600.0] * 9) == 0.0
    assert last(*[600.0] * 10, *[0.0] * 10, *[600.0] * 10) == 600.0


def test_the_difference_is_that_of_first_sight_however_the_answers_vary() -> None:
    around = [600.0 + 29.0 * random.Random(1).uniform(-1, 1) for _ in range(200)]
    assert set(after(*around)) == {0.0, around[9]}
    assert last(*[600.0] * 10, *itertools.islice(itertools.cycle([600.0, 900.0]), 100)) == 600.0


def test_a_clock_that_is_set_to_another_wrong_time_is_followed() -> None:
    assert after(*[600.0] * 10, *[-300.0] * 10)[9:] == [600.0] * 10 + [-300.0]
    assert after(*[600.0] * 10, *[660.0] * 10)[9:] == [600.0] * 10 + [660.0]
    assert last(*[600.0] * 10, *[659.0] * 100) == 600.0


def test_it_changes_rarely_and_only_to_what_ten_answers_agree_on() -> None:
    choose = random.Random(47)
    for _ in range(200):
        answers = [choose.choice([0.0, 59.0, 90.0, 120.0, 600.0, -600.0]) for _ in range(100)]
        answers = [one for one in answers for _ in range(choose.choice([1, 9, 10, 11]))]
        known = after(*answers)
        for index in range(1, len(answers)):
            if known[index] == known[index - 1]:
                continue
            row = answers[max(0, index - ANSWERS + 1) : index + 1]
            assert len(row) == ANSWERS
            if known[index]:
                assert min(map(abs, row)) >= 120.0
                assert known[index] in row
            else:
                assert max(map(abs, row)) < 60.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.0, "2 seconds ahead of Azure's"),
        (-119.4, "119 seconds behind Azure's"),
        (120.0, "2 minutes ahead of Azure's"),
        (-599.2, "10 minutes behind Azure's"),
        (7199.0, "120 minutes ahead of Azure's"),
        (-7200.0, "2 hours behind Azure's"),
        (3.0 * 86400.0, "3 days ahead of Azure's"),
    ],
)
def test_the_difference_in_words(seconds: float, text: str) -> None:
    assert clock_difference(seconds) == text
