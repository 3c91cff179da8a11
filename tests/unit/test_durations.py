"""Durations as people write them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduled_events_agent.policy.durations import (
    format_deadline,
    format_duration,
    format_elapsed,
    format_estimate,
    format_time,
    parse_duration,
    plural,
)

NOW = datetime(2026, 11, 28, 23, 28, 42, 999_999, tzinfo=UTC)


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


@pytest.mark.parametrize(
    ("at", "now", "text"),
    [
        (NOW, NOW, "23:28:42 UTC"),
        (NOW, NOW - timedelta(hours=23), "23:28:42 UTC"),
        (NOW, NOW + timedelta(hours=1), "2026-11-28 23:28:42 UTC"),
        (NOW, None, "2026-11-28 23:28:42 UTC"),
        (NOW.replace(year=26), None, "0026-11-28 23:28:42 UTC"),
    ],
)
def test_a_time_has_its_date_unless_it_is_known_to_be_of_today(
    at: datetime, now: datetime | None, text: str
) -> None:
    assert format_time(at, now) == text


def test_the_time_that_is_left_stands_beside_a_deadline() -> None:
    assert format_deadline(NOW, NOW - timedelta(minutes=14, seconds=3)) == "23:28:42 UTC (in 14m 3s)"
    assert format_deadline(NOW + timedelta(hours=1), NOW) == "2026-11-29 00:28:42 UTC (in 1h 0m)"
    assert format_deadline(NOW, NOW) == "23:28:42 UTC"
    assert format_deadline(NOW, None) == "2026-11-28 23:28:42 UTC"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59.9, "59s"), (61, "1m 1s"), (3600, "1h 0m"), (90061, "1d 1h"), (8 * 86400, "8d 0h")],
)
def test_an_elapsed_time_has_two_units_at_most(seconds: float, text: str) -> None:
    assert format_elapsed(NOW, NOW + timedelta(seconds=seconds)) == text


def test_an_estimate_is_rounded_up_to_whole_seconds() -> None:
    assert [format_estimate(seconds) for seconds in (0.0, 0.2, 17.038, 90.0)] == ["0s", "1s", "18s", "1m30s"]


def test_one_is_not_many() -> None:
    assert [plural(count, "hook") for count in (0, 1, 2)] == ["0 hooks", "1 hook", "2 hooks"]


@pytest.mark.parametrize("text", ["", "s", "5", "5 s", "-5s", "5x", "1m1h", "5s5s", "1e3s", "5S", "٣s", "5s\n"])
def test_an_invalid_duration_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected a duration such as 9s, 5m, 1h30m or 2d; got "):
        parse_duration(text)


def test_a_duration_of_centuries_is_rejected() -> None:
    with pytest.raises(ValueError, match=r'^expected at most 3650d; got "99999999d"$'):
        parse_duration("99999999d")
