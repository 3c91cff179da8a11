"""The demo leaves nothing behind, however it ends; that it works is shown with the packages."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("there are no such signals: closing a console ends all of its processes", allow_module_level=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_ends_its_agent(number: signal.Signals, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "scheduled_events_agent", "demo"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    with demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("--- "):  # the first event: the agent runs
                break
        (agent,) = psutil.Process(demo.pid).children()
        demo.send_signal(number)
        code = demo.wait(60)
    try:
        assert (code, agent.is_running()) == (128 + number, False)
    finally:
        if agent.is_running():
            agent.kill()
    assert list(tmp_path.iterdir()) == []
