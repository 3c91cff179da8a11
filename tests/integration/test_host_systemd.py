"""Messages from this process to systemd, and systemd's answers."""

import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from scheduled_events_agent import host
from scheduled_events_agent.host import processes
from scheduled_events_agent.host.conflicts import OwnService
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.linux import system as programs


def test_a_busy_service_manager_is_retried_until_it_receives_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5.0)
        other.setblocking(False)
        with suppress(BlockingIOError):
            while True:  # until it accepts no more
                other.sendto(b"OTHER=1", str(tmp_path / "notify"))
        notifying = threading.Thread(target=host.ServiceManager().notify, args=("ready", "up"))
        notifying.start()
        notifying.join(0.3)  # it has tried
        while (message := listener.recv(4096)) == b"OTHER=1":
            pass
        assert message == b"READY=1\nSTATUS=up"
        notifying.join(60.0)


def test_a_service_manager_that_never_listens_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    other.sendto(b"OTHER=1", str(tmp_path / "notify"))
        notifying = threading.Thread(target=host.ServiceManager().notify, args=("ready", "up"))
        notifying.start()
        notifying.join(60.0)
        assert not notifying.is_alive()


def put_program(place: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str = "systemctl") -> None:
    """Have this script answer for systemd, or for polkit."""
    program = place / name
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setattr(programs, "DEFAULT_PATH", f"{place}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo stopping; exit 1", True),
        ("echo running", False),
        ("echo degraded; exit 1", False),
        ("echo starting; exit 1", False),
        ("echo offline; exit 1", None),  # nor can the bus be reached
        ("exit 1", None),
        ("exec sleep 30", None),
        ('echo "${NOTIFY_SOCKET-stopping}"', True),  # or its messages would count as this process's
    ],
)
def test_a_shutdown_is_known_only_from_an_answer_of_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: bool | None
) -> None:
    put_program(tmp_path, monkeypatch, f'[ "$*" = is-system-running ] || exit 9\n{answer}\n')
    monkeypatch.setattr(programs, "_SHUTDOWN_QUESTION_SECONDS", 1.0)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert processes.is_shutting_down() is expected


RUNNING = {
    "LoadState": "loaded", "UnitFileState": "enabled", "ActiveState": "active", "SubState": "running",
    "MainPID": "17", "User": "root", "NeedDaemonReload": "no", "InvocationID": "0a1b", "Result": "exit-code",
}  # fmt: skip


@pytest.mark.parametrize(
    ("differing", "expected"),
    [
        ({}, OwnService(True, "active (running)", True, 17, "root", False)),
        ({"User": ""}, OwnService(True, "active (running)", True, 17, "root", False)),
        ({"User": "agent"}, OwnService(True, "active (running)", True, 17, "agent", False)),
        ({"ActiveState": "reloading"}, OwnService(True, "reloading (running)", True, 17, "root", False)),
        ({"UnitFileState": "enabled-runtime"}, OwnService(True, "active (running)", True, 17, "root", False)),
        ({"UnitFileState": "disabled"}, OwnService(False, "active (running)", True, 17, "root", False)),
        ({"NeedDaemonReload": "yes"}, OwnService(True, "active (running)", True, 17, "root", True)),
        (
            {"UnitFileState": "masked", "ActiveState": "inactive", "SubState": "dead", "MainPID": "0"},
            OwnService(False, "inactive (dead)", False, 0, "root", False, is_masked=True),
        ),
        ({"LoadState": "not-found", "UnitFileState": "", "ActiveState": "inactive", "MainPID": "0"}, None),
        (
            {"ActiveState": "activating", "SubState": "start"},
            OwnService(True, "activating (start)", False, 17, "root", False, is_starting=True),
        ),
    ],
)
def test_the_agents_own_service_is_as_systemctl_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differing: dict[str, str], expected: OwnService | None
) -> None:
    shown = "".join(f"{name}={value}\n" for name, value in (RUNNING | differing).items())
    asked = f"show --property={','.join(RUNNING)} scheduled-events-agent.service"
    put_program(tmp_path, monkeypatch, f"[ \"$*\" = '{asked}' ] || exit 9\ncat <<'END'\n{shown}END\n")
    assert processes.own_service() == expected


AUTO_RESTART = {"ActiveState": "activating", "SubState": "auto-restart", "MainPID": "0"}
FAILED = {"ActiveState": "failed", "SubState": "failed", "MainPID": "0"}


@pytest.mark.parametrize(
    ("differing", "journal", "failure"),
    [
        (AUTO_RESTART, "--priority=err) echo 'the agent   cannot run' ;;", ("the agent cannot run", True)),
        (AUTO_RESTART, "_TRANSPORT=stdout) echo 'No module named x' ;;", ("No module named x", True)),
        (FAILED, "--priority=err) echo 'no such file' ;;", ("no such file", False)),
        ({**FAILED, "Result": "watchdog"}, "", ("systemd calls it watchdog", False)),
        (AUTO_RESTART, "", ("", True)),
        ({**AUTO_RESTART, "SubState": "auto-restart-queued"}, "", ("", True)),
    ],
)
def test_the_failure_of_the_service_has_the_last_error_of_its_last_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    differing: dict[str, str],
    journal: str,
    failure: tuple[str, bool],
) -> None:
    shown = "".join(f"{name}={value}\n" for name, value in (RUNNING | differing).items())
    put_program(tmp_path, monkeypatch, f"cat <<'END'\n{shown}END\n")
    put_program(
        tmp_path,
        monkeypatch,
        f'[ "$5" = _SYSTEMD_INVOCATION_ID=0a1b ] || exit 9\ncase "$6" in\n{journal}\n*) exit 1 ;;\nesac\n',
        "journalctl",
    )
    service = processes.own_service()
    assert service is not None
    assert (service.is_running, service.is_starting, service.failure) == (False, False, failure)


def test_a_failure_is_known_without_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "".join(f"{name}={value}\n" for name, value in (RUNNING | AUTO_RESTART).items())
    put_program(tmp_path, monkeypatch, f"while read -r line; do echo \"$line\"; done <<'END'\n{shown}END\n")
    monkeypatch.setattr(programs, "DEFAULT_PATH", str(tmp_path))
    service = processes.own_service()
    assert service is not None
    assert service.failure == ("", True)


@pytest.mark.parametrize(
    ("groups", "is_own"),
    [
        ("0::/system.slice/scheduled-events-agent.service\n", True),
        ("0::/system.slice/scheduled-events-agent.service/payload\n", True),
        ("12:pids:/a\n1:name=systemd:/system.slice/scheduled-events-agent.service\n0::/\n", True),
        ("0::/system.slice/scheduled-events-agent-hook@drain.service\n", False),
        ("0::/user.slice/user-0.slice/session-1.scope\n", False),
        ("0::/\n", False),
        ("", False),
    ],
)
def test_the_control_group_says_whether_a_process_is_of_the_own_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, *, is_own: bool
) -> None:
    monkeypatch.setattr(programs, "_PROCESSES", tmp_path)
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "cgroup").write_text(groups)
    assert processes.is_of_own_service(17) == is_own
    with pytest.raises(FileNotFoundError):
        processes.is_of_own_service(18)


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("0.105", "polkit 0.105 does not read polkit.rules; 0.106 and newer do"),
        ("0.106", ""),
        ("0.120", ""),
        ("121", ""),
        ("nonsense", ""),
        (None, "found no pkaction on PATH: this machine has no polkit"),
    ],
)
def test_an_account_without_privileges_starts_units_if_polkit_reads_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, fault: str
) -> None:
    for user, expected in (("agent", fault), ("root", "")):
        shown = "".join(f"{name}={value}\n" for name, value in (RUNNING | {"User": user}).items())
        put_program(tmp_path, monkeypatch, f"cat <<'END'\n{shown}END\n")
        monkeypatch.setattr(programs, "DEFAULT_PATH", str(tmp_path))
        if version is not None:
            put_program(
                tmp_path, monkeypatch, f'[ "$*" = --version ] && echo pkaction version {version}\n', "pkaction"
            )
        service = processes.own_service()
        assert service is not None
        assert service.units_error.replace(str(tmp_path), "PATH") == expected


def test_credentials_that_systemd_has_loaded_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "".join(f"{name}={value}\n" for name, value in RUNNING.items())
    put_program(tmp_path, monkeypatch, f"cat <<'END'\n{shown}END\n")
    monkeypatch.setattr(programs, "_CREDENTIALS", tmp_path)
    for has_credentials in (False, True):
        service = processes.own_service()
        assert service is not None
        assert service.has_credentials == has_credentials
        (tmp_path / "scheduled-events-agent.service").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no bus >&2; echo here >&2; exit 1", "systemctl cannot report on the agent's service: no bus here"),
        ("exit 3", "systemctl cannot report on the agent's service: exit code 3"),
        ("echo LoadState=loaded", "systemctl cannot report on the agent's service: exit code 0"),
        ("exec sleep 30", "systemctl did not answer within 0.5 s"),
    ],
)
def test_the_reason_for_an_unknown_systemd_state_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    put_program(tmp_path, monkeypatch, script)
    monkeypatch.setattr(programs, "_SERVICE_QUESTION_SECONDS", 0.5)
    with pytest.raises(HostError) as caught:
        processes.own_service()
    assert str(caught.value) == told


def test_a_missing_systemctl_is_reported_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "DEFAULT_PATH", str(tmp_path))
    with pytest.raises(HostError, match=f"^found no systemctl on {tmp_path}: "):
        processes.own_service()
    assert processes.is_shutting_down() is None


def test_units_that_systemd_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"a.service": "loaded", "b.service": "not-found", "c.d.service": "not-found"}
    shown = "\n".join(f"Id={name}\nLoadState={state}\n" for name, state in states.items())
    asked = "show --property=Id,LoadState -- a.service b c.d"
    put_program(tmp_path, monkeypatch, f"[ \"$*\" = '{asked}' ] || exit 9\ncat <<'END'\n{shown}END\n")
    assert processes.unknown_units(["a.service", "b", "c.d", "d@.service", "*"]) == {"b", "c.d", "d@.service", "*"}
    put_program(tmp_path, monkeypatch, "echo Failed to connect to bus >&2; exit 1\n")
    with pytest.raises(HostError, match="systemctl cannot report on the units: Failed to connect to bus"):
        processes.unknown_units(["a.service"])
