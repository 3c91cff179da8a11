"""The seam to the system: paths, boot, locks, private directories, on whichever system this is."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduled_events_agent import host
from scheduled_events_agent.host import processes

_HOLD = """
import sys
from pathlib import Path
from scheduled_events_agent import host
lock = host.acquire_lock(Path(sys.argv[1]))
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


def test_a_second_agent_on_the_same_state_is_rejected_and_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _start_holder(path) as holder:
        with pytest.raises(host.HostError) as caught:
            host.acquire_lock(path)
        holder.kill()
    assert caught.value.kind == "locked"
    assert str(caught.value) == (
        f"{path}: another agent (pid {holder.pid}) has locked it; stop it, or give this one another state_dir"
    )


def test_the_lock_of_an_agent_that_was_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _start_holder(path) as holder:
        holder.kill()
    lock = host.acquire_lock(path)
    lock.close()
    host.acquire_lock(path).close()


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root makes namespaces of processes")
def test_the_holder_of_a_lock_is_seen_from_another_container(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ask = "from pathlib import Path; from scheduled_events_agent import host; "
    ask += f"print(host.lock_owner(Path({str(path)!r})))"
    with _start_holder(path) as holder:
        apart = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", ask]
        said = subprocess.run(apart, capture_output=True, text=True, check=True).stdout
        holder.kill()
    assert said == f"{holder.pid}\n"


def _start_asking(path: Path) -> Callable[[], Any]:
    """Hold the lock like a process that only asks who has it; returns what ends that."""
    if sys.platform == "win32":
        import win32con
        import win32file

        handle: Any = win32file.CreateFile(
            str(path), win32con.GENERIC_READ, win32con.FILE_SHARE_READ, None, win32con.OPEN_ALWAYS, 0, None
        )
        close: Callable[[], Any] = handle.Close
        return close
    import fcntl

    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file.close


def test_an_agent_starts_although_its_lock_is_read_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    stop_asking = _start_asking(path)
    monkeypatch.setattr("time.sleep", lambda _: stop_asking())
    host.acquire_lock(path).close()


def test_a_lock_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "lock"
    with pytest.raises(host.HostError) as caught:
        host.acquire_lock(path)
    assert caught.value.kind == "lock"
    assert str(caught.value).startswith(f"{path}: cannot be opened for locking; ")


def test_the_boot_id_changes_only_with_a_restart() -> None:
    assert host.is_same_boot(host.boot_id(), host.boot_id())
    assert not host.is_same_boot(host.boot_id(), "")


def test_a_private_directory_is_made_with_its_parents_and_may_exist(tmp_path: Path) -> None:
    path = tmp_path / "var" / "state"
    for _ in range(2):
        host.create_private_dir(path)
        assert path.is_dir()
    (path / "file").write_text("x")
    assert (path / "file").read_text() == "x"


def _error_for_status(path: Path) -> str:
    with pytest.raises(host.HostError) as caught:
        host.create_private_dir(path)
    assert caught.value.kind == "state_dir"
    return str(caught.value).removeprefix(f"{path}: expected a directory for this account alone; ")


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_a_private_directory_is_closed_to_others_and_its_new_parents_are_not(tmp_path: Path) -> None:
    path = tmp_path / "var" / "lib" / "state"
    usual = tmp_path / "usual"
    usual.mkdir()
    host.create_private_dir(path)
    modes = [place.stat().st_mode & 0o7777 for place in (path, path.parent, path.parent.parent)]
    assert modes == [0o700, usual.stat().st_mode & 0o7777, usual.stat().st_mode & 0o7777]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o750, 0o701])
def test_a_directory_that_others_can_use_is_rejected_and_left_unchanged(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    assert _error_for_status(path) == (
        f"it is open to others: if it is the agent's own, chmod 700 {path}; "
        "else name another directory with agent.state_dir"
    )
    assert path.stat().st_mode & 0o7777 == mode


def test_a_directory_of_another_account_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "win32":
        pytest.skip("users with numbers are Linux's")
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    owner = path.stat().st_uid
    assert _error_for_status(path) == (
        f"it belongs to uid {owner}: if it is the agent's own, chown -R {host.account_name()} {path}; "
        "else name another directory with agent.state_dir"
    )


@pytest.mark.skipif(sys.platform != "win32", reason="lists of who may do what are Windows'")
def test_a_directory_with_an_access_list_is_rejected_and_left_unchanged(tmp_path: Path) -> None:
    import win32security

    path = tmp_path / "state"
    path.mkdir()
    everybody = win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(
        "D:P(A;OICI;FA;;;SY)(A;OICI;FR;;;WD)", win32security.SDDL_REVISION_1
    ).GetSecurityDescriptorDacl()
    wanted = win32security.DACL_SECURITY_INFORMATION
    kind = win32security.SE_FILE_OBJECT
    win32security.SetNamedSecurityInfo(str(path), kind, wanted, None, None, everybody, None)
    for _ in range(2):
        assert _error_for_status(path) == (
            "it is open to S-1-1-0: if it is the agent's own, "
            f'icacls "{path}" /inheritance:r /grant:r "*S-1-5-18:(OI)(CI)F" "*S-1-5-32-544:(OI)(CI)F" '
            f'/remove:g *S-1-1-0; if the owner is still another, icacls "{path}" /setowner *S-1-5-32-544; '
            "else name another directory with agent.state_dir"
        )


def test_a_file_in_place_of_a_private_directory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("in the way")
    assert _error_for_status(path) == "it is no directory: name another directory with agent.state_dir"


def test_a_file_in_place_of_the_parent_of_a_private_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("in the way")
    assert _error_for_status(tmp_path / "var" / "state").endswith(": name another directory with agent.state_dir")


def _say_who_asks(**environment: str) -> str:
    code = "from scheduled_events_agent.cli.operator import user_name; print(user_name())"
    names = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "somebody-else")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SUDO_USER": "", **names, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.rstrip("\n")


def test_an_operator_is_named_by_the_account_and_not_by_the_environment() -> None:
    account = psutil.Process().username().rpartition("\\")[2]
    assert host.account_name() == account
    assert _say_who_asks() == account
    assert _say_who_asks(SUDO_USER="alice") == f"{account} (sudo: alice)"
    assert _say_who_asks(SUDO_USER="two\nlines") == account


@pytest.mark.skipif(sys.platform == "win32", reason="users with numbers are Linux's")
def test_an_account_without_a_name_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert host.account_name() == "uid 4000000000"


def test_the_files_of_the_agent_are_where_the_system_keeps_such_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # not the places that each test has of its own
    if sys.platform == "win32":
        data = Path(os.environ["PROGRAMDATA"], "ScheduledEventsAgent")
        assert (host.default_config_path(), host.default_state_dir()) == (data / "policy.yaml", data / "state")
    else:
        assert host.default_config_path() == Path("/etc/scheduled-events-agent/policy.yaml")
        assert host.default_state_dir() == Path("/var/lib/scheduled-events-agent")


def test_the_temporary_disk_is_recognized_by_the_warning_file_of_azure(tmp_path: Path) -> None:
    assert processes.temporary_disk(tmp_path / "var" / "state") is None
    (tmp_path / "DATALOSS_WARNING_README.txt").touch()
    assert processes.temporary_disk(tmp_path / "var" / "state") == tmp_path


@pytest.mark.skipif(sys.platform != "win32", reason="on Linux it is a warning of check")
def test_a_state_directory_on_the_temporary_disk_is_rejected_and_not_created(tmp_path: Path) -> None:
    (tmp_path / "DATALOSS_WARNING_README.txt").touch()
    assert _error_for_status(tmp_path / "state") == (
        f"{tmp_path} is Azure's temporary disk, which may be empty after an event: "
        "name another directory with agent.state_dir"
    )
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("mode", "who"), [(0o666, "every account"), (0o664, "the group 65534"), (0o644, None)])
def test_a_file_that_others_could_change_is_reported_with_a_hint(
    tmp_path: Path, mode: int, who: str | None
) -> None:
    if sys.platform == "win32":
        pytest.skip("modes are Linux's")
    path = tmp_path / "hook"
    path.touch()
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to a group that it is not in")
    os.chown(path, -1, 65534)
    path.chmod(mode)
    fault = f"{path} can be changed by {who}, and the agent acts on what it finds there: chmod go-w {path}"
    assert host.find_write_risk(path) == (fault if who else None)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_a_directory_in_which_others_could_replace_a_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "hook"
    path.touch()
    tmp_path.chmod(0o777)
    assert host.find_write_risk(path) == (
        f"{tmp_path} can be changed by every account, and the agent acts on what it finds there: "
        f"chmod go-w {tmp_path}"
    )
    tmp_path.chmod(0o1777)  # as /tmp: only a file's owner can
    assert host.find_write_risk(path) is None


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_a_directory_that_others_could_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert host.find_privacy_risk(path) is None
    path.mkdir(mode=0o700)
    assert host.find_privacy_risk(path) is None
    path.chmod(0o750)
    assert host.find_privacy_risk(path) == (f"it is open to others: if it is the agent's own, chmod 700 {path}")
