"""What systemd hears from this process, and what it answers."""

import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from agent import host
from agent.host import processes
from agent.host.linux import programs


def test_a_busy_service_manager_is_waited_for_until_it_hears_the_word(
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
            while True:  # until it takes no more
                other.sendto(b"OTHER=1", str(tmp_path / "notify"))
        teller = threading.Thread(target=host.ServiceManager().tell, args=("ready", "up"))
        teller.start()
        teller.join(0.3)  # it has tried
        while (message := listener.recv(4096)) == b"OTHER=1":
            pass
        assert message == b"READY=1\nSTATUS=up"
        teller.join(60.0)


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
        teller = threading.Thread(target=host.ServiceManager().tell, args=("ready", "up"))
        teller.start()
        teller.join(60.0)
        assert not teller.is_alive()


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
        ('echo "${NOTIFY_SOCKET-stopping}"', True),  # or it would speak for this process
    ],
)
def test_the_machine_goes_down_if_systemd_says_so_and_no_answer_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: bool | None
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$*" = is-system-running ] || exit 9\n{answer}\n')
    program.chmod(0o755)
    monkeypatch.setattr(programs, "DEFAULT_PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(programs, "_SHUTDOWN_QUESTION_SECONDS", 1.0)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert processes.is_shutting_down() is expected
