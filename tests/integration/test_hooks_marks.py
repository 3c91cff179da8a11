"""Where the shipped hooks keep what they have stopped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are for Linux", allow_module_level=True)

from hook_machine import CALLS, is_recovery, run_hook
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


MARKING = [
    call for call in CALLS if not is_recovery(call) and call[0] != "slurm-prepare" and "checkpoint" not in call
]
FULL_DISK = ': >"$1"; echo "tee: $1: No space left on device" >&2; exit 1'


@pytest.mark.parametrize("call", MARKING, ids=" ".join)
def test_a_full_disk_leaves_no_empty_mark(tmp_path: Path, call: tuple[str, ...]) -> None:
    state = "active" if call[0] == "training-checkpoint" else "activating"
    done = run_hook(tmp_path, call, state=state, programs={"tee": FULL_DISK})
    assert any("the mark cannot be written" in line for line in done.said)
    assert done.code != 0
    assert [path.name for path in tmp_path.iterdir() if "mark" in path.name or "stopped" in path.name] == []


NO_TIME = """case $2 in
*ActiveEnterTimestamp) echo 'Connection timed out' >&2; exit 1 ;;
*) printf 'LoadState=loaded\\nActiveState=activating\\n' ;;
esac"""


def test_no_mark_is_set_without_the_time_of_the_start(tmp_path: Path) -> None:
    """With another event it would be void, and the service would stay down."""
    done = run_hook(tmp_path, ("service", "stop"), programs={"systemctl": NO_TIME})
    said = f"service: when it was started is not known; no mark was set: {tmp_path}/mark"
    assert (done.code, done.said[-1]) == (1, said)
    assert not (tmp_path / "mark").exists()


def test_a_full_disk_leaves_the_address_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "lowered").symlink_to("/dev/full")
    settings = {"KEEPALIVED_ADDRESS": "192.0.2.1", "KEEPALIVED_FILE": str(tmp_path / "lowered")}
    done = run_hook(tmp_path / "machine", ("haproxy-prepare",), variables=settings)
    said = f"haproxy-prepare: cannot be written: {tmp_path}/lowered; nothing was stopped"
    assert (done.code, done.said[-1]) == (1, said)
    assert not (tmp_path / "lowered").is_symlink()


RECOVER = [call for call in CALLS if is_recovery(call) and call[0] not in ("pgbouncer", "slurm-recover")]


@pytest.mark.parametrize("call", RECOVER, ids=" ".join)
@pytest.mark.parametrize("event", ["A", "B", ""])
def test_until_its_event_is_over_a_stopped_service_is_brought_back(
    tmp_path: Path, call: tuple[str, ...], event: str
) -> None:
    """The mark is of event A, and the unit has been started and stopped since."""
    since = {"LAST_START": "since", **({"SCHEDULED_EVENT_ID": event} if event else {})}
    done = run_hook(tmp_path, call, variables=since)
    assert any(line.startswith("systemctl start") for line in done.calls) == (event == "A")
    assert done.code == (1 if event == "A" else 0)  # no start succeeds on this machine


def test_the_words_say_so() -> None:
    pages = [CHECKOUT / "docs/cookbook/README.md", SHIPPED_HOOKS / "common.sh", SHIPPED_HOOKS / "iis-recover.ps1"]
    for page in (*pages, *(SHIPPED_HOOKS / call[0] for call in RECOVER)):
        text = re.sub(r"\s*\n#?\s*", " ", page.read_text("utf-8"))
        assert re.search("[Uu]ntil the event is over", text), page
        assert "remove the mark" in text or "removes the mark" in text, page
