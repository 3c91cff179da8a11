from datetime import UTC, datetime

import pytest

from scheduled_events_agent.hooks import run as hooks
from scheduled_events_agent.hooks.run import attempt_environment, hook_environment
from scheduled_events_agent.imds.document import ScheduledEvent

_EVENT = ScheduledEvent(
    id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    type="Freeze",
    status="Scheduled",
    source="Platform",
    resources=("WestNO_0", "WestNO_1"),
    not_before=datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC),
    duration_seconds=9.0,
    description="Host server is undergoing maintenance.",
)


def test_a_hook_gets_the_event_and_its_place_in_it_as_variables() -> None:
    variables = hook_environment(
        _EVENT, stage="prepare", rule="impactful", vm="WestNO_0", outcome="", seconds_left=299.9
    )
    assert variables == {
        "SCHEDULED_EVENT_ID": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "SCHEDULED_EVENT_TYPE": "Freeze",
        "SCHEDULED_EVENT_STATUS": "Scheduled",
        "SCHEDULED_EVENT_SOURCE": "Platform",
        "SCHEDULED_EVENT_NOT_BEFORE": "2022-04-11T22:26:58Z",
        "SCHEDULED_EVENT_SECONDS_LEFT": "299",
        "SCHEDULED_EVENT_DURATION_SECONDS": "9",
        "SCHEDULED_EVENT_DESCRIPTION": "Host server is undergoing maintenance.",
        "SCHEDULED_EVENT_RESOURCES": "WestNO_0,WestNO_1",
        "SCHEDULED_EVENT_STAGE": "prepare",
        "SCHEDULED_EVENT_RULE": "impactful",
        "SCHEDULED_EVENT_VM": "WestNO_0",
        "SCHEDULED_EVENT_OUTCOME": "",
    }


def test_unknown_values_are_empty_or_minus_one() -> None:
    event = ScheduledEvent(id="A", type="Reboot", status="Started")
    variables = hook_environment(event, stage="recover", rule=None, vm="", outcome="completed", seconds_left=None)
    assert {name: value for name, value in variables.items() if value} == {
        "SCHEDULED_EVENT_ID": "A",
        "SCHEDULED_EVENT_TYPE": "Reboot",
        "SCHEDULED_EVENT_STATUS": "Started",
        "SCHEDULED_EVENT_DURATION_SECONDS": "-1",
        "SCHEDULED_EVENT_STAGE": "recover",
        "SCHEDULED_EVENT_OUTCOME": "completed",
    }
    assert len(variables) == 13


def test_time_that_is_over_is_no_seconds_left() -> None:
    variables = hook_environment(_EVENT, stage="prepare", rule="r", vm="v", outcome="", seconds_left=-3.0)
    assert variables["SCHEDULED_EVENT_SECONDS_LEFT"] == "0"


@pytest.mark.parametrize(("seconds", "text"), [(119.9, "119"), (60.0, "60"), (0.9, "0"), (-3.0, "0")])
def test_an_attempt_gets_whole_seconds(seconds: float, text: str) -> None:
    assert attempt_environment(seconds) == {"SCHEDULED_EVENT_TIMEOUT_SECONDS": text}


def test_variables_are_bounded_and_hold_no_nul() -> None:
    event = ScheduledEvent(
        id="A\0B" + "x" * 100_000,
        type="Reboot",
        status="Scheduled",
        resources=tuple(f"machine_{number}" for number in range(10_000)),
        description="d" * 100_000,
    )
    variables = hook_environment(event, stage="prepare", rule="r", vm="v", outcome="", seconds_left=1)
    assert variables["SCHEDULED_EVENT_ID"].startswith("ABx")
    assert max(map(len, variables.values())) <= 8192
    assert variables["SCHEDULED_EVENT_RESOURCES"].split(",")[-1] in event.resources
    assert sum(len(name) + len(value) + 2 for name, value in variables.items()) < 32_767  # all that Windows takes


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (0xC0000005, "exit code 3221225477 (0xc0000005)"),
        (-999, "ended by signal 999"),
        (None, "its exit code was lost"),
    ],
)
def test_the_end_of_a_program_has_a_message(exit_code: int | None, text: str) -> None:
    assert hooks._describe_exit(exit_code) == text
