"""Durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduled_events_agent.policy.durations import format_duration, parse_duration, plural


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("500ms", 0.5), ("9s", 9), ("1.5s", 1.5), ("5m", 300), ("1h30m", 5400), ("2d", 172800)],
)
def test_durations_read_and_write_the_same_text(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert format_duration(seconds) == text


@given(st.integers(0, 3650 * 86_400_000))
def test_every_duration_that_is_written_reads_back(milliseconds: int) -> None:
    assert round(parse_duration(format_duration(milliseconds / 1000)) * 1000) == milliseconds


def test_one_is_not_many() -> None:
    assert [plural(count, "hook") for count in (0, 1, 2)] == ["0 hooks", "1 hook", "2 hooks"]


@pytest.mark.parametrize("text", ["", "s", "5", "5 s", "-5s", "5x", "1m1h", "5s5s", "1e3s", "5S", "٣s", "5s\n"])
def test_an_invalid_duration_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected a duration such as 9s, 5m, 1h30m or 2d; got "):
        parse_duration(text)


def test_a_duration_of_centuries_is_rejected() -> None:
    with pytest.raises(ValueError, match=r'^expected at most 3650d; got "99999999d"$'):
        parse_duration("99999999d")
