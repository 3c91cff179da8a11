"""The machines that the other tests of this folder stand on: they boot, reboot, and leave nothing behind."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("containers are Linux's", allow_module_level=True)

import fcntl

import container as container_module
from container import PROJECT, Container, ContainerError

from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines"]
pytestmark = pytest.mark.timeout(900)  # the first time, a Debian is fetched

# Says 1 if the address answers a poll as the metadata service does.
_POLL = """
import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Metadata": "true"})
print(json.load(urllib.request.urlopen(request, timeout=60))["DocumentIncarnation"])
"""


@pytest.fixture(scope="module")
def prepared(debian: Path) -> Iterator[Container]:
    """A stopped machine with something on its disk, for others to lie on."""
    with Container(debian) as machine:
        machine.write("/etc/prepared", "once\n")
        machine.run("systemctl", "enable", "nginx.service")
        machine.stop()
        yield machine


@pytest.mark.parametrize(("suite", "python", "systemd"), [("debian", "3.11", "252"), ("debian_13", "3.13", "257")])
def test_a_machine_boots_with_nothing_failed(
    request: pytest.FixtureRequest, suite: str, python: str, systemd: str
) -> None:
    with Container(request.getfixturevalue(suite)) as machine:
        assert machine.run("systemctl", "is-system-running").stdout == "running\n"
        assert machine.run("systemctl", "list-units", "--failed", "--no-legend").stdout == ""
        assert machine.run("cat", "/proc/1/comm").stdout == "systemd\n"
        assert machine.run("python3", "--version").stdout.startswith(f"Python {python}.")
        assert machine.run("systemctl", "--version").stdout.startswith(f"systemd {systemd} ")
        assert machine.run("systemctl", "is-enabled", "nginx.service", check=False).stdout == "disabled\n"


def test_a_reboot_is_a_new_boot_of_the_same_disk(container: Container) -> None:
    container.write("/var/lib/kept", "written before the reboot\n")
    container.write("/run/lost", "")
    container.write("/tmp/lost", "")
    machine_id = container.run("cat", "/etc/machine-id").stdout
    before = container.boot_id()
    container.reboot()
    assert container.path("/var/lib/kept").read_text() == "written before the reboot\n"
    assert not container.path("/run/lost").exists()
    assert not container.path("/tmp/lost").exists()
    assert container.run("cat", "/etc/machine-id").stdout == machine_id
    assert container.boot_id() != before
    assert container.run("systemctl", "is-system-running").stdout == "running\n"


def test_the_disk_survives_a_power_cut(container: Container) -> None:
    container.write("/var/lib/kept", "written before the power cut\n")
    before = container.boot_id()
    container.kill()
    assert container.path("/var/lib/kept").read_text() == "written before the power cut\n"
    container.start()
    assert container.path("/var/lib/kept").read_text() == "written before the power cut\n"
    assert container.boot_id() != before


def test_the_journal_of_every_boot_can_be_read(container: Container) -> None:
    container.write(
        "/etc/systemd/system/speaking.service",
        "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo I run in boot $(cat /var/lib/boot)'\n",
    )
    for boot in ("one", "two"):
        container.write("/var/lib/boot", f"{boot}\n")
        container.run("systemctl", "start", "speaking.service")
        if boot == "one":
            container.reboot()

    def said(boot: int | None) -> list[str]:
        return [
            entry["MESSAGE"]
            for entry in container.journal("speaking.service", boot=boot)
            if entry["SYSLOG_IDENTIFIER"] != "systemd"
        ]

    assert said(0) == ["I run in boot two"]
    assert said(-1) == ["I run in boot one"]
    assert said(None) == ["I run in boot one", "I run in boot two"]


def test_a_server_on_loopback_is_reached_unless_the_network_is_private(debian: Path) -> None:
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        address = f"{simulator.endpoint()}/metadata/scheduledevents?api-version=2020-07-01"
        with Container(debian) as machine:
            assert machine.run("python3", "-c", _POLL, address).stdout == "1\n"
        with Container(debian, private_network=True) as machine:
            refused = machine.run("python3", "-c", _POLL, address, check=False)
            assert "Connection refused" in refused.stderr


def test_the_checkout_and_named_directories_are_read_only(debian: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from this side\n")
    with Container(debian, read_only={"/opt/more": tmp_path}) as machine:
        assert "scheduled-events-agent" in machine.run("cat", f"{PROJECT}/pyproject.toml").stdout
        assert machine.run("cat", "/opt/more/file").stdout == "from this side\n"
        for place in (PROJECT, "/opt/more"):
            refused = machine.run("touch", f"{place}/file", check=False)
            assert refused.stderr == f"touch: cannot touch '{place}/file': Read-only file system\n"


def test_machines_on_a_prepared_one_see_its_files_and_leave_them_unchanged(prepared: Container) -> None:
    with Container(prepared) as one, Container(prepared, private_network=True) as other:
        ids = {machine.run("cat", "/etc/machine-id").stdout for machine in (one, other)}
        assert len(ids) == 2  # machines of their own
        for machine in (one, other):
            assert machine.path("/etc/prepared").read_text() == "once\n"
            assert machine.run("systemctl", "is-active", "nginx.service").stdout == "active\n"
            assert machine.run("journalctl", "--list-boots", "--no-pager").stdout.count(" UTC") == 2  # of one boot
        one.run("rm", "/etc/prepared")
        assert other.path("/etc/prepared").read_text() == "once\n"
    with Container(prepared, boots=False) as machine:
        assert machine.path("/etc/prepared").read_text() == "once\n"


def test_a_base_machine_is_stopped_permanently(container: Container) -> None:
    with pytest.raises(ContainerError, match="is running; stop it before another machine is put on it"):
        Container(container).__enter__()
    container.stop()
    with Container(container, boots=False):
        pass
    with pytest.raises(ContainerError, match="has no disk: it was not entered, was closed, or others lie on it"):
        container.start()


def test_systemd_can_enforce_its_bpf_restrictions(container: Container) -> None:
    send = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9)); print('sent')"
    for rules, goal in (((), "sent"), (("any",), ""), (("10.0.0.0/8",), "sent")):
        properties = [f"--property=IPAddressDeny={rule}" for rule in rules]
        command = ["systemd-run", "--quiet", "--wait", "--pipe", *properties, "python3", "-c", send]
        assert container.run(*command, check=False).stdout.strip() == goal, rules


def test_without_a_boot_commands_run_one_by_one_on_the_disk(debian_13: Path) -> None:
    with Container(debian_13, boots=False) as machine:
        done = machine.run("sh", "-c", "cat - > /etc/written; cat /proc/1/comm; echo heard >&2", input="by cat\n")
        assert (done.stdout, done.stderr) == ("(sd-stubinit)\n", "heard\n")
        assert machine.path("/etc/written").read_text() == "by cat\n"


def test_a_command_has_a_clean_environment_and_the_user_that_is_asked_for(container: Container) -> None:
    done = container.run("sh", "-c", "id -un; env | sort", user="www-data", environment={"LANG": "C"})
    assert done.stdout.splitlines() == [
        *(
            "www-data",
            "HOME=/root",
            "LANG=C",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PWD=/",
        ),
    ]


def test_a_command_that_fails_or_hangs_is_reported_with_its_output(container: Container) -> None:
    with pytest.raises(ContainerError) as failed:
        container.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert str(failed.value) == (
        "sh -c echo out; echo err >&2; exit 3\nended with 3; its output:\nout\n\nits errors:\nerr\n"
    )
    with pytest.raises(ContainerError) as hung:
        container.run("sh", "-c", "echo out; sleep 600", timeout=5)
    assert str(hung.value) == (
        "sh -c echo out; sleep 600\ndid not end within 5 s; its output:\nout\n\nits errors:\n"
    )


def test_files_and_directories_are_copied_in_as_they_are(container: Container, tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    script = tmp_path / "hooks" / "drain"
    script.write_text("#!/bin/sh\necho drained\n")
    script.chmod(0o755)
    container.copy_in(tmp_path / "hooks", "/etc/hooks")
    container.copy_in(script, "/usr/local/bin/drain")
    assert container.run("/etc/hooks/drain").stdout == "drained\n"
    assert container.run("drain").stdout == "drained\n"


def test_a_path_is_resolved_inside_the_machine(container: Container) -> None:
    container.run("ln", "-s", "/var/run/../run/goal", "/etc/link")  # /var/run is an absolute link to /run
    container.write("/etc/link", "written\n")
    assert container.run("cat", "/run/goal").stdout == "written\n"
    assert not Path("/run/goal").exists()


def test_a_wait_that_times_out_is_reported_with_the_journal(container: Container) -> None:
    assert container.wait_for(lambda: container.run("true").returncode == 0, "true is true") is True
    container.run("systemd-cat", "--identifier=test", "echo", "said before the end")
    container.run("journalctl", "--sync")
    with pytest.raises(ContainerError) as vain:
        container.wait_for(lambda: False, "pigs fly", timeout=0.1)
    beginning, _, lines = str(vain.value).partition("\n")
    assert (
        beginning == f"gave up after 0.1 s of waiting until pigs fly; the last of the journal of {container.id}:"
    )
    assert re.search(r" test\[\d+\]: said before the end\n", lines)


@pytest.mark.parametrize("way", ["stopped", "closed while it runs", "never up"])
def test_a_closed_machine_leaves_nothing_behind(debian: Path, way: str) -> None:
    machine = Container(debian, boots=way != "never up")
    with machine:
        if way == "never up":
            machine.path("/usr/lib/systemd/systemd").unlink()
            with pytest.raises(ContainerError, match=rf"{machine.id} ended with 1 when booted; its console:\n"):
                machine.start()
        else:
            machine.run("systemd-run", "--unit=busy", "sleep", "1000")
            assert _traces(machine.id) != []
        if way == "stopped":
            machine.stop()
            assert [trace for trace in _traces(machine.id) if not trace.startswith(("mount", "file"))] == []
    assert _traces(machine.id) == []


def test_the_next_machine_removes_the_leftovers_of_a_killed_owner(debian: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from container import Container\n"
        "with Container(Path(sys.argv[2])) as machine: print(machine.id, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent), str(debian)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        orphan = owner.stdout.readline().strip()
        with Container(debian, boots=False):
            assert any(trace.startswith("process") for trace in _traces(orphan))  # alive: left alone
        with no_machine_is_made():  # by another test, which would clear it away before it is looked at
            owner.kill()
            owner.wait()
            assert any(trace.startswith("process") for trace in _traces(orphan))
    with Container(debian, boots=False):
        assert _traces(orphan) == []


@contextmanager
def no_machine_is_made() -> Iterator[None]:
    with (container_module._MACHINES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _traces(machine: str) -> list[str]:
    """All that can be seen of a machine from outside."""
    found = [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if machine in line]
    for top in ("/run", "/tmp", "/sys/fs/cgroup"):
        for directory, names, files in os.walk(top):
            found += [f"file {directory}/{name}" for name in (*names, *files) if name.startswith(machine)]
            names[:] = [name for name in names if not name.startswith(machine)]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "State:\tZ" in (process / "status").read_text():
                continue  # has ended; to notice is its parent's business
            seen = (process / "cgroup").read_text() + (process / "cmdline").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if machine in seen:
            found.append(f"process {process.name}")
    return found
