"""The time limits of config/hooks/common.sh."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

if sys.platform != "linux":
    pytest.skip("the hooks in sh are for Linux", allow_module_level=True)

from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")
COMMON = SHIPPED_HOOKS / "common.sh"


def time_left(arguments: str, variables: Mapping[str, str], *, asked_after_seconds: int = 0) -> int:
    given = {f"SCHEDULED_EVENT_{name}": value for name, value in variables.items()}
    # Without a sleep: the hook has begun as much earlier.
    script = f'set -eu; . "{COMMON}"; began=$((began - {asked_after_seconds})); time_left {arguments}'
    environment = {"PATH": os.environ["PATH"], **given}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "variables", "seconds"),
    [
        ("60", {}, 60),
        ("60", {"TIMEOUT_SECONDS": "", "SECONDS_LEFT": ""}, 60),
        ("60", {"TIMEOUT_SECONDS": "300"}, 60),
        ("600", {"TIMEOUT_SECONDS": "300"}, 300),
        ("600", {"SECONDS_LEFT": "300"}, 290),
        ("600 6", {"SECONDS_LEFT": "300"}, 294),
        ("600", {"TIMEOUT_SECONDS": "280", "SECONDS_LEFT": "300"}, 280),
        ("600", {"TIMEOUT_SECONDS": "295", "SECONDS_LEFT": "300"}, 290),
        ("600", {"TIMEOUT_SECONDS": "0"}, 0),
        ("600", {"SECONDS_LEFT": "4"}, 0),
    ],
)
def test_a_hook_may_take_the_smallest_of_its_limits(
    arguments: str, variables: dict[str, str], seconds: int
) -> None:
    assert seconds - 2 <= time_left(arguments, variables) <= seconds  # sh itself takes its time


def test_what_the_hook_has_taken_already_counts() -> None:
    assert 78 <= time_left("600", {"TIMEOUT_SECONDS": "100"}, asked_after_seconds=20) <= 80
    assert 68 <= time_left("600", {"SECONDS_LEFT": "100"}, asked_after_seconds=20) <= 70
