"""What the shipped prepare hooks do about a unit that systemd is stopping already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from examples import ServiceManager, Unit
from harness import CHECKOUT, PATIENCE

UNITS = {
    "haproxy-prepare": ("HAPROXY", "haproxy.service"),
    "rabbitmq-prepare": ("RABBITMQ", "rabbitmq-server.service"),
    "ray-prepare": ("RAY", "ray.service"),
    "redis-prepare": ("REDIS", "redis-server.service"),
}


@pytest.mark.parametrize("hook", UNITS)
def test_a_unit_that_is_stopping_is_waited_for(tmp_path: Path, hook: str) -> None:
    """As in a run that follows one whose agent was killed, or whose time was over, in the middle of the stop."""
    prefix, unit = UNITS[hook]
    with ServiceManager(tmp_path, {unit: Unit(("true",))}) as manager:
        manager.states[unit] = "deactivating"
        done = subprocess.run(
            [CHECKOUT / "config/hooks" / hook],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", f"{prefix}_MARK": str(tmp_path / "mark")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert ("stop", unit) in [call.arguments for call in manager.calls]
    assert not (tmp_path / "mark").exists()
