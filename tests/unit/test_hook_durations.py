"""How long hooks may take, by what is known of their last runs."""

from typing import Any

import pytest

from scheduled_events_agent.hooks.durations import decode, encode, estimate_seconds, record_run
from scheduled_events_agent.policy import Hook

HOOK = Hook(run=("/bin/drain",), timeout=300.0, attempts=3, retry_delay=10.0)


def known(*seconds: float, hook: Hook = HOOK) -> Any:
    times: Any = {}
    for duration in seconds:
        times = record_run(times, "drain", hook, "succeeded", duration)
    return times


def test_a_hook_of_which_nothing_is_known_may_use_all_its_attempts() -> None:
    assert estimate_seconds({}, "drain", HOOK) == 3 * 300.0 + 2 * 10.0


def test_a_hook_may_take_twice_its_longest_run_and_ten_seconds_more() -> None:
    assert estimate_seconds(known(3.0, 40.0, 20.0), "drain", HOOK) == 90.0


def test_a_hook_may_never_take_more_than_its_limits() -> None:
    assert estimate_seconds(known(800.0), "drain", HOOK) == HOOK.limit_seconds


def test_only_the_last_five_runs_count() -> None:
    assert estimate_seconds(known(200.0, 1.0, 1.0, 1.0, 1.0, 1.0), "drain", HOOK) == 12.0


@pytest.mark.parametrize("outcome", ["failed", "timed_out", "not_started"])
def test_after_a_failure_the_limits_count_again(outcome: Any) -> None:
    times = record_run(known(1.0), "drain", HOOK, outcome, 1.0)
    assert estimate_seconds(times, "drain", HOOK) == HOOK.limit_seconds


def test_a_run_that_was_canceled_says_nothing() -> None:
    assert record_run(known(1.0), "drain", HOOK, "canceled", 0.1) == known(1.0)


def test_another_command_under_the_same_name_is_not_known() -> None:
    other = Hook(run=("/bin/drain", "--slowly"), timeout=300.0)
    assert estimate_seconds(known(1.0), "drain", other) == 300.0
    assert estimate_seconds(record_run(known(1.0), "drain", other, "succeeded", 50.0), "drain", other) == 110.0


def test_known_durations_survive_as_text_and_invalid_ones_are_ignored() -> None:
    assert decode(encode(known(1.0, 2.5))) == known(1.0, 2.5)
    assert [decode(text) for text in ("", "[]", "{", '{"drain": 1}')] == [{}, {}, {}, {}]
