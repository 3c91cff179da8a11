"""The seam to the system: paths, boot, locks, private directories, on whichever system this is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent import host

_HOLD = """
import sys
from pathlib import Path
from agent import host
lock = host.hold_lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def _start_holder(path: Path) -> "subprocess.Popen[str]":
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_agent_on_the_same_state_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _start_holder(path) as holder:
        with pytest.raises(host.HostError) as caught:
            host.hold_lock(path)
        holder.kill()
    assert caught.value.kind == "locked"
    assert str(caught.value) == (
        f"{path}: another agent (pid {holder.pid}) is at work here; stop it, or give this one another state_dir"
    )


def test_the_lock_of_an_agent_that_was_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _start_holder(path) as holder:
        holder.kill()
    lock = host.hold_lock(path)
    lock.close()
    host.hold_lock(path).close()


def test_a_lock_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "lock"
    with pytest.raises(host.HostError) as caught:
        host.hold_lock(path)
    assert caught.value.kind == "lock"
    assert str(caught.value).startswith(f"{path}: cannot be opened for locking; ")


def test_the_boot_is_the_same_as_long_as_nobody_restarts() -> None:
    assert host.is_same_boot(host.boot_id(), host.boot_id())
    assert not host.is_same_boot(host.boot_id(), "")


def test_a_private_directory_is_made_with_its_parents_and_may_exist(tmp_path: Path) -> None:
    path = tmp_path / "var" / "state"
    for _ in range(2):
        host.create_private_dir(path)
        assert path.is_dir()
    (path / "file").write_text("x")
    assert (path / "file").read_text() == "x"


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_a_private_directory_is_closed_to_others_even_if_it_was_open(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(0o755)
    host.create_private_dir(path)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_a_private_directory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("in the way")
    with pytest.raises(host.HostError) as caught:
        host.create_private_dir(path)
    assert caught.value.kind == "state_dir"
    assert str(caught.value).startswith(f"{path}: expected a directory for this account alone; ")


def test_the_files_of_the_agent_are_where_the_system_keeps_such_files() -> None:
    if sys.platform == "win32":
        data = Path(os.environ["PROGRAMDATA"], "ScheduledEventsAgent")
        assert (host.default_config_path(), host.default_state_dir()) == (data / "policy.yaml", data / "state")
    else:
        assert host.default_config_path() == Path("/etc/scheduled-events-agent/policy.yaml")
        assert host.default_state_dir() == Path("/var/lib/scheduled-events-agent")
