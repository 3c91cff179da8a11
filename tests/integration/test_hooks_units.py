"""What the shipped prepare hooks do about a unit that systemd is stopping already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from examples import ServiceManager, Unit
from harness import PATIENCE
from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")

UNITS = {
    "haproxy-prepare": ("HAPROXY", "haproxy.service"),
    "rabbitmq-prepare": ("RABBITMQ", "rabbitmq-server.service"),
    "ray-prepare": ("RAY", "ray.service"),
    "redis-prepare": ("REDIS", "redis-server.service"),
}


@pytest.mark.parametrize("then", ["inactive", "activating"])
@pytest.mark.parametrize("hook", UNITS)
def test_a_unit_that_is_stopping_is_waited_for(tmp_path: Path, hook: str, then: str) -> None:
    """As in a run that follows one whose agent was killed in the middle of the stop; or in a restart by others.

    What is stopped in a restart is marked, so that it is started again.
    """
    prefix, unit = UNITS[hook]
    with ServiceManager(tmp_path, {unit: Unit(("true",))}) as manager:
        manager.passing[unit] = ["deactivating"] * 2
        manager.states[unit] = then
        done = subprocess.run(
            [SHIPPED_HOOKS / hook],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", f"{prefix}_MARK": str(tmp_path / "mark")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert manager.passing[unit] == []
    assert (tmp_path / "mark").exists() == (then == "activating")


@pytest.mark.parametrize("hook", UNITS)
def test_a_unit_that_does_not_stop_in_time_fails_the_hook(tmp_path: Path, hook: str) -> None:
    prefix, unit = UNITS[hook]
    with ServiceManager(tmp_path, {unit: Unit(("true",))}) as manager:
        manager.states[unit] = "deactivating"
        done = subprocess.run(
            [SHIPPED_HOOKS / hook],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                f"{prefix}_MARK": str(tmp_path / "mark"),
                "SCHEDULED_EVENT_SECONDS_LEFT": "11",
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (1, f"{hook}: {unit} is still stopping\n")
        assert "stop" not in [call.arguments[0] for call in manager.calls]
