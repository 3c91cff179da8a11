"""Where the shipped hooks keep what they have stopped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are for Linux", allow_module_level=True)

from hook_shells import CHECKOUT, SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")
AGENTS = "/var/lib/scheduled-events-agent"


def test_no_hook_of_root_writes_into_a_directory_of_the_agents_account() -> None:
    """The account of an agent that uses run-as-root could have root write through a link in its own directory."""
    unit = (CHECKOUT / "systemd/scheduled-events-agent-hook@.service").read_text("utf-8")
    (name,) = re.findall(r"^StateDirectory=(.+)$", unit, re.MULTILINE)
    assert f"/var/lib/{name}" != AGENTS
    assert f"rm -rf /etc/scheduled-events-agent {AGENTS} /var/lib/{name} " in (
        CHECKOUT / "packaging/deb/postrm"
    ).read_text("utf-8")
    named = {
        (hook.name, line)
        for hook in SHIPPED_HOOKS.iterdir()
        for line in hook.read_text("utf-8").splitlines()
        if AGENTS in line and not line.startswith(("#", "    CI_RUNNER_MARK")) and hook.suffix != ".md"
    }
    assert named == {
        ("common.sh", f"state_dir=${{STATE_DIRECTORY:-{AGENTS}}}"),
        ("ci-runner-api", f'    state_dir = (os.environ.get("STATE_DIRECTORY") or "{AGENTS}").split(":")[0]'),
    }


def test_a_mark_is_in_the_directory_that_systemd_names(tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f"#!/bin/sh\ncase $1 in stop) touch {tmp_path}/stopped; exit ;; esac\n"
        f"if [ -e {tmp_path}/stopped ]; then state=inactive; else state=active; fi\n"
        'printf "LoadState=loaded\\nActiveState=%s\\n" "$state"\n'
    )
    systemctl.chmod(0o755)
    done = subprocess.run(
        [SHIPPED_HOOKS / "service", "stop"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SERVICE_UNIT": "web.service",
            "STATE_DIRECTORY": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "web.service.stopped-by-agent").exists()
