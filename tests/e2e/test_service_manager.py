"""Messages of the agent to the service manager that started it, over the socket that systemd would give it."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE, Agent, Simulator

if sys.platform == "win32":
    pytest.skip("systemd is Linux's; Windows has a service manager of its own", allow_module_level=True)


class Systemd:
    """Listens as systemd does."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(0.2)
        self.messages: list[tuple[float, list[str]]] = []
        """When it was heard, and its lines."""
        self._is_open = True
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while self._is_open:
            try:
                message = self._socket.recv(65536).decode()
            except TimeoutError:
                continue
            with self._news:
                self.messages.append((time.monotonic(), message.split("\n")))
                self._news.notify_all()

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._socket.close()

    def wait(self, test: Callable[[list[str]], bool], count: int = 1, timeout: float = PATIENCE) -> list[str]:
        """Wait for the ``count``-th message of this kind."""

        def found() -> list[list[str]]:
            return [lines for _, lines in self.messages if test(lines)]

        with self._news:
            self._news.wait_for(lambda: len(found()) >= count, timeout)
            assert len(found()) >= count, f"gave up waiting; heard: {self.messages}"
            return found()[count - 1]

    def wait_word(self, word: str, count: int = 1, timeout: float = PATIENCE) -> list[str]:
        return self.wait(lambda lines: word in lines, count, timeout)

    def wait_status(self, pattern: str) -> list[str]:
        return self.wait(lambda lines: any(re.fullmatch(f"STATUS={pattern}", line) for line in lines))


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    listener = Systemd(str(tmp_path / "notify"))
    yield listener
    listener.close()


@pytest.fixture
def service(agent: Agent, systemd: Systemd) -> Agent:
    """The agent, as systemd would start it, watched."""
    agent.environment = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "60000000"}
    agent.write_policy()
    return agent


def test_it_is_ready_when_the_first_poll_has_been_tried(service: Agent, systemd: Systemd) -> None:
    service.start()
    assert systemd.wait_word("READY=1")[1:] == ["STATUS=Nothing is pending"]
    systemd.wait_word("WATCHDOG=1")


def test_an_abstract_socket_is_found_as_well(service: Agent) -> None:
    listener = Systemd(f"@agent-test-{os.urandom(6).hex()}")
    try:
        service.environment["NOTIFY_SOCKET"] = listener.address
        service.start()
        assert listener.wait_word("READY=1")[1:] == ["STATUS=Nothing is pending"]
    finally:
        listener.close()


def test_it_is_ready_long_before_a_slow_first_answer(service: Agent, sim: Simulator, systemd: Systemd) -> None:
    sim.fault(None, "slow", delay_seconds=600.0)
    began = time.monotonic()
    service.start(is_awaited=False)
    systemd.wait_word("READY=1")
    systemd.wait_word("WATCHDOG=1")
    assert systemd.messages[0][0] - began < PATIENCE
    assert service.log("polling the metadata service fails") == []


def test_it_is_ready_although_the_first_poll_failed_and_says_so(
    service: Agent, sim: Simulator, systemd: Systemd
) -> None:
    sim.fault(None, "status", status=500)
    service.start(is_awaited=False)
    assert systemd.wait_word("READY=1")[1:] == [
        "STATUS=Azure's metadata service has not answered yet: 500 Internal Server Error"
    ]
    sim.clear_faults()
    systemd.wait_status("Nothing is pending")


def test_a_policy_that_is_rejected_at_the_start_is_never_ready(service: Agent, systemd: Systemd) -> None:
    service.write_policy(rules=[{"name": "all", "approve": "yes"}])
    service.start(is_awaited=False)
    assert service.wait_exit() == 2
    assert systemd.messages == []


def test_the_status_is_the_headline_with_the_hooks_that_run_before_it(
    service: Agent, sim: Simulator, systemd: Systemd
) -> None:
    service.write_policy(
        rules=[{"name": "reboots", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": service.hook("drain", until="drained")},
    )
    service.start()
    sim.schedule("Reboot", notice_seconds=600)
    systemd.wait_status("runs hook drain; Preparing for a Reboot")
    shown = service.run("status", "--state-dir", str(service.state_dir)).stdout
    assert shown.splitlines()[0] == "Preparing for a Reboot"
    assert service.status()["headline"] == "Preparing for a Reboot"
    service.let_go("drained")
    systemd.wait_status("Reboot is approved and may start")


def test_the_status_names_a_running_hook_before_an_attention_item(
    service: Agent, sim: Simulator, systemd: Systemd
) -> None:
    manual = {"name": "redeploys", "when": {"type": "Redeploy"}, "approve": "manual"}
    service.write_policy(
        rules=[manual, {"name": "reboots", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": service.hook("drain", until="drained")},
    )
    service.start()
    sim.schedule("Redeploy", notice_seconds=600)
    systemd.wait_status(r"The Redeploy of vm-1 needs an operator's approval\.")
    sim.schedule("Reboot", notice_seconds=600)
    systemd.wait_status(r"runs hook drain; The Redeploy of vm-1 needs an operator's approval\.")
    service.let_go("drained")


def test_a_reload_is_notified_from_start_to_end(service: Agent, systemd: Systemd) -> None:
    service.start()
    systemd.wait_word("READY=1")
    service.reload()
    began = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    lines = systemd.wait_word("RELOADING=1")
    told = int(lines[1].removeprefix("MONOTONIC_USEC="))
    assert abs(told - began) < 10_000_000
    assert systemd.wait_word("READY=1", count=2)[1:] == ["STATUS=Nothing is pending"]
    words = [lines[0] for _, lines in systemd.messages if lines[0] in ("READY=1", "RELOADING=1")]
    assert words == ["READY=1", "RELOADING=1", "READY=1"]


def test_a_rejected_policy_stays_in_the_status_until_a_valid_one_is_read(service: Agent, systemd: Systemd) -> None:
    service.start()
    systemd.wait_word("READY=1")
    service.write_policy(rules=[{"name": "all", "approve": "yes"}])
    service.reload()
    (refused,) = systemd.wait_word("READY=1", count=2)[1:]
    assert refused.startswith("STATUS=The policy file is rejected: ")
    service.write_policy()
    service.reload()
    assert systemd.wait_word("READY=1", count=3)[1:] == ["STATUS=Nothing is pending"]


def test_the_status_reports_the_stop_and_its_wait_reason(service: Agent, sim: Simulator, systemd: Systemd) -> None:
    service.write_policy(
        rules=[{"name": "reboots", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": service.hook("drain", until="drained")},
    )
    service.start("--stop-timeout", "60s")
    sim.schedule("Reboot", notice_seconds=600)
    systemd.wait_status("runs hook drain; Preparing for a Reboot")
    service.process.terminate()
    assert systemd.wait_word("STOPPING=1")[1:] == ["STATUS=Stopping, once these hooks have ended: drain"]
    time.sleep(3.0)  # longer than the default would give the hook
    service.let_go("drained")
    assert service.wait_exit() == 0
    service.start("--stop-timeout", "60s")
    service.wait_log("approved")
    assert len(service.log("hook output")) == 0  # its success was kept: it is not run a second time


def test_a_second_signal_ends_the_waiting_for_hooks(service: Agent, sim: Simulator, systemd: Systemd) -> None:
    service.write_policy(
        rules=[{"name": "reboots", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": service.hook("drain", until="never")},
    )
    service.start("--stop-timeout", "60s")
    sim.schedule("Reboot", notice_seconds=600)
    systemd.wait_status("runs hook drain; Preparing for a Reboot")
    service.process.terminate()
    systemd.wait_word("STOPPING=1")
    assert service.stop() < 40


def test_text_from_the_network_never_reaches_systemd_as_a_command(
    service: Agent, sim: Simulator, systemd: Systemd
) -> None:
    service.start()
    systemd.wait_word("READY=1")
    type_: Any = "Reboot\nWATCHDOG_USEC=1\nSTOPPING=1"
    sim.schedule(type_, notice_seconds=600)
    lines = systemd.wait(lambda lines: any("WATCHDOG_USEC=1" in line for line in lines))
    assert len(lines) == 1
    hidden = "\N{REPLACEMENT CHARACTER}"
    assert lines[0].startswith(f"STATUS=Reboot{hidden}WATCHDOG_USEC=1{hidden}STOPPING=1")


def test_an_agent_without_a_watchdog_sends_no_pings(service: Agent, systemd: Systemd) -> None:
    service.environment["WATCHDOG_PID"] = "1"
    service.start()
    service.write_policy()
    service.reload()
    systemd.wait_word("READY=1", count=2)
    assert ["WATCHDOG=1"] not in [lines for _, lines in systemd.messages]


def test_a_hook_sees_the_credentials_directory_and_not_the_socket(
    service: Agent, sim: Simulator, tmp_path: Path, systemd: Systemd
) -> None:
    service.environment["CREDENTIALS_DIRECTORY"] = str(tmp_path)
    service.write_policy(
        rules=[{"name": "reboots", "prepare": ["show"], "approve": "when-prepared"}],
        hooks={"show": {"shell": "env | grep -E '^(NOTIFY|WATCHDOG|CREDENTIALS|JOURNAL)'"}},
    )
    service.start()
    sim.schedule("Reboot", notice_seconds=600)
    service.wait_log("hook finished")
    lines = [line["line"] for line in service.log("hook output")]
    assert lines == [f"CREDENTIALS_DIRECTORY={tmp_path}"]
    systemd.wait_word("READY=1")
