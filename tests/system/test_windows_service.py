"""The Windows service under Wine's service control manager, against a simulator on this side.

What Wine cannot show, and where it is shown instead. PRESHUTDOWN and SHUTDOWN, which it never sends: tests/unit
calls the handler. Recovery actions, the service's own identifier and its privileges, which it does not keep:
tests/unit has what is asked for. That the SCM sees a process die, for Wine's does not: here, that it dies with a
failure code. A prompt without elevation, for it has no permissions: tests/unit has the messages.
"""

import contextlib
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("it drives a Windows from outside", allow_module_level=True)

from wine_python import WinePython, parse_service, wine_python

from scheduled_events_agent.simulator import Simulator

T = TypeVar("T")

pytestmark = pytest.mark.timeout(900)  # the first time, Wine and a Windows Python are fetched

NAME = "ScheduledEventsAgent"
PATIENCE = 120.0
_KEY = rf"HKLM\SYSTEM\CurrentControlSet\Services\{NAME}"
_UNKNOWN_TO_WINE = (
    "SERVICE_CONFIG_FAILURE_ACTIONS_FLAG",
    "SERVICE_CONFIG_DELAYED_AUTO_START_INFO",
    "SERVICE_CONFIG_SERVICE_SID_INFO",
    "SERVICE_CONFIG_REQUIRED_PRIVILEGES_INFO",
)
_PAUSE = """
import win32service
manager = win32service.OpenSCManager(None, None, win32service.SC_MANAGER_CONNECT)
service = win32service.OpenService(manager, "ScheduledEventsAgent", win32service.SERVICE_ALL_ACCESS)
win32service.ControlService(service, win32service.SERVICE_CONTROL_PAUSE)
"""
# As `sc config ScheduledEventsAgent obj= ACCOUNT` does, which Wine's sc cannot.
_SET_ACCOUNT = """
import sys, win32service
manager = win32service.OpenSCManager(None, None, win32service.SC_MANAGER_CONNECT)
service = win32service.OpenService(manager, "ScheduledEventsAgent", win32service.SERVICE_ALL_ACCESS)
keep = win32service.SERVICE_NO_CHANGE
win32service.ChangeServiceConfig(service, keep, keep, keep, None, None, False, None, sys.argv[1], None, None)
"""
# As a debugger would stop it; all but the youngest thread, which is the watchdog's.
_SUSPEND = """
import ctypes, sys, psutil, win32api, win32process
PROCESS, THREAD = int(sys.argv[1]), 0x1FFFFF
def born(thread):
    handle = ctypes.windll.kernel32.OpenThread(THREAD, False, thread.id)
    times = [ctypes.c_uint64() for _ in range(4)]
    assert ctypes.windll.kernel32.GetThreadTimes(handle, *map(ctypes.byref, times))
    return times[0].value, handle
threads = sorted(map(born, psutil.Process(PROCESS).threads()))
for _, handle in threads[:-1]:
    assert ctypes.windll.kernel32.SuspendThread(handle) != 0xFFFFFFFF
"""
_OPEN = """
import sys, win32api, win32con, win32event, win32process
process = win32api.OpenProcess(win32con.PROCESS_ALL_ACCESS, False, int(sys.argv[1]))
"""
_KILL = "win32process.TerminateProcess(process, 7)\n"
_WAIT = """
assert win32event.WaitForSingleObject(process, 240_000) == win32event.WAIT_OBJECT_0, "it has not ended"
print(win32process.GetExitCodeProcess(process))
"""


class State(NamedTuple):
    """The state of the service, by sc."""

    name: str
    exit_code: int
    own_exit_code: int
    checkpoint: int


class Service:
    """The installed service with a policy and a state of its own."""

    def __init__(self, python: WinePython, name: str, endpoint: str) -> None:
        self.python = python
        self.directory = python.drive / "service tests" / name
        self.folder = rf"C:\service tests\{name}"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.endpoint = endpoint
        self._log = python.drive / "ProgramData" / NAME / "logs" / "agent.log"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0

    @property
    def options(self) -> list[str]:
        return ["--config", rf"{self.folder}\policy.yaml", "--state-dir", rf"{self.folder}\state"]

    def write_policy(self, **sections: Any) -> None:
        policy = {
            "imds": {"endpoint": self.endpoint, "poll_interval": "250ms"},
            "agent": {"listen": "off"},
            **sections,
        }
        (self.directory / "policy.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")

    def waiting_hook(self) -> dict[str, Any]:
        """A hook that makes the file "begun" and waits for the file "go"."""
        code = (
            "import os, time; open('begun', 'w').close()\n"
            "while not os.path.exists('go'): time.sleep(0.05)\n"
            "open('ended', 'w').close()"
        )
        return {"run": [r"C:\py311\python.exe", "-I", "-S", "-c", code], "cwd": self.folder, "timeout": "2m"}

    def command(self, *arguments: str) -> tuple[int, str]:
        done = self.python.run("-m", "scheduled_events_agent", "service", *arguments, timeout=300)
        return done.returncode, done.stdout

    def install(self) -> str:
        code, text = self.command("install", *self.options)
        assert code == 0, text
        return text

    def start(self) -> None:
        assert self.command("start") == (0, "the service runs\n"), self.log_text()

    def stop(self) -> None:
        assert self.command("stop") == (0, "the service has stopped\n"), self.log_text()

    def state(self) -> State | None:
        """None if it is not installed."""
        text = parse_service(self.python.run_program("sc", "query", NAME, timeout=PATIENCE))
        if not text:
            return None

        def number(name: str) -> int:
            found = re.search(rf"{name}\s+: (0x[0-9a-fA-F]+|\d+)", text)
            assert found, text
            return int(found[1], 0)

        found = re.search(r"STATE\s+: \d+\s+(\w+)", text)
        assert found, text
        return State(found[1], number("WIN32_EXIT_CODE"), number("SERVICE_EXIT_CODE"), number("CHECKPOINT"))

    def wait_state(self, name: str, patience: float = PATIENCE) -> State:
        def found() -> State | None:
            state = self.state()
            return state if state and state.name == name else None

        return self.wait_until(found, f"it was {name}", patience)

    def wait_until(self, test: Callable[[], T | None], what: str, patience: float = PATIENCE) -> T:
        deadline = time.monotonic() + patience
        while not (result := test()):
            assert time.monotonic() < deadline, (
                f"gave up waiting until {what}; state {self.state()}\n{self.log_text()}"
            )
            time.sleep(0.1)
        return result

    def pid(self) -> int:
        return int(json.loads(self.command("status", "--json")[1])["pid"])

    def end_of(self, pid: int, script: str) -> int:
        """The exit code of the service's process, which the script has ended or waited for."""
        done = self.python.run("-c", script, str(pid), timeout=300)
        assert done.returncode == 0, f"{done.stdout}\n{self.log_text()}"
        return int(done.stdout)

    def log_text(self) -> str:
        if not self._log.exists():
            return ""
        return self._log.read_bytes()[self._log_start :].decode()

    def log(self, message: str) -> list[dict[str, Any]]:
        """The entries of this test with that message."""
        lines = [json.loads(line) for line in self.log_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["message"] == message]

    def wait_log(self, message: str, count: int = 1) -> dict[str, Any]:
        def enough() -> list[dict[str, Any]]:
            found = self.log(message)
            return found if len(found) >= count else []

        return self.wait_until(enough, f"the log said {message!r}")[count - 1]


@pytest.fixture(scope="module")
def python() -> Iterator[WinePython]:
    with wine_python() as ready:
        yield ready


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1",), rate_limit=None) as azure:
        yield azure


@pytest.fixture
def service(python: WinePython, sim: Simulator, request: pytest.FixtureRequest) -> Iterator[Service]:
    """Installed, with a policy, but not started; stopped and removed at the end."""
    ready = Service(python, str(request.node.name)[:40], sim.endpoint())
    ready.write_policy()
    ready.install()
    try:
        yield ready
    finally:
        (ready.directory / "go").touch()
        code, text = ready.command("remove")
    first, *prepared = text.splitlines()
    assert (code, first) == (0, "the service was removed; policy, state and logs stay")
    assert [line.partition(":")[0].partition(".")[0] for line in prepared] in (
        [],
        ["Prepared and not recovered", "No recover hook is left to run"],
    )
    assert ready.state() is None


def _values(python: WinePython) -> dict[str, str]:
    text = python.run_program("reg", "query", _KEY, timeout=PATIENCE).stdout
    return {name: value.strip() for name, value in re.findall(r"^ +(\w+) +REG_\w+ +(.*)$", text, re.MULTILINE)}


def test_a_repeated_installation_updates_the_service(service: Service) -> None:
    assert _values(service.python) == {
        "DependOnService": r"Tcpip\0Dhcp",
        "Description": "Prepares this virtual machine for Azure Scheduled Events, approves them when it is ready, "
        "and recovers.",
        "DisplayName": "Azure Scheduled Events Agent",
        "ErrorControl": "0x1",
        "ImagePath": r'"C:\py311\python.exe" -I -m scheduled_events_agent service host '
        rf'"--config={service.folder}\policy.yaml" "--state-dir={service.folder}\state"',
        "ObjectName": "LocalSystem",
        "PreshutdownTimeout": "0x15f90",
        "Start": "0x2",
        "Type": "0x10",
    }
    code, text = service.command("install", "--state-dir", r"C:\elsewhere")
    command = r'"C:\py311\python.exe" -I -m scheduled_events_agent service host --state-dir=C:\elsewhere'
    assert code == 0
    assert text.splitlines() == [
        "the service ScheduledEventsAgent was there already, and is up to date now",
        *(f"this system does not know {level}" for level in _UNKNOWN_TO_WINE),
        "account: LocalSystem",
        f"command: {command}",
    ]
    assert _values(service.python)["ImagePath"] == command
    code, text = service.command("status")
    assert code == 1
    assert text.splitlines() == [
        "state      stopped",
        "pid        0",
        "exit code  1077",
        "start      automatic",
        "account    LocalSystem",
        f"command    {command}",
    ]


def test_a_repeated_installation_keeps_the_account(service: Service) -> None:
    account = rf"NT SERVICE\{NAME}"
    done = service.python.run("-c", _SET_ACCOUNT, account, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout
    assert f"account: {account}" in service.install().splitlines()
    assert _values(service.python)["ObjectName"] == account


def test_it_runs_long_before_a_slow_first_answer(service: Service, sim: Simulator) -> None:
    sim.fault(None, "slow", delay_seconds=900.0)
    service.start()
    service.wait_log("agent started")
    assert service.log("polling the metadata service fails") == []
    assert service.log("this VM is known") == [], "it has no answer"
    code, text = service.command("status", "--json")
    status = json.loads(text)
    assert (code, status["state"], status["exit_code"], status["start"]) == (0, "running", 0, "automatic")
    assert service.command("start") == (0, "the service runs already\n")
    service.stop()
    assert service.wait_state("STOPPED") == State("STOPPED", 0, 0, 0)
    assert service.command("stop") == (0, "the service does not run\n")


def test_an_event_is_approved_when_a_cmd_hook_has_drained(service: Service, sim: Simulator) -> None:
    (service.directory / "drain.cmd").write_text(
        '@echo off\r\necho draining for %SCHEDULED_EVENT_TYPE%\r\necho done> "%~dp0drained"\r\n'
    )
    service.write_policy(
        rules=[{"name": "all", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": {"run": [rf"{service.folder}\drain.cmd"]}},
    )
    service.start()
    event = sim.schedule("Reboot", notice_seconds=600)
    sim.wait_approved(event, timeout_seconds=PATIENCE)
    assert (service.directory / "drained").exists()
    assert service.wait_log("hook output")["line"] == "draining for Reboot"


def test_it_cannot_be_paused_but_a_reload_can_have_it_only_observe(service: Service, sim: Simulator) -> None:
    rules = [{"name": "all", "approve": "immediately"}]
    service.write_policy(rules=rules)
    service.start()
    paused = service.python.run("-c", _PAUSE, timeout=PATIENCE)
    assert paused.returncode != 0
    assert "(1052, 'ControlService'" in paused.stdout, "the service control manager refuses it"
    service.write_policy(agent={"listen": "off", "mode": "observe"}, rules=rules)
    assert service.command("reload")[0] == 0
    service.wait_log("the policy file was read again")
    event = sim.schedule("Reboot", notice_seconds=600)
    service.wait_log("seen")
    before = len(sim.requests())
    sim.wait_until(lambda: len(sim.requests()) > before + 4, "it polled on", PATIENCE)
    assert sim.approvals() == ()
    service.write_policy(rules=rules)
    assert service.command("reload")[0] == 0
    sim.wait_approved(event, timeout_seconds=PATIENCE)
    assert service.state() == State("RUNNING", 0, 0, 0)


def test_the_service_is_notified_of_a_reload_only_if_its_policy_is_valid(service: Service) -> None:
    service.start()
    service.write_policy(rules=[{"name": "new", "approve": "never"}])
    policy = rf"{service.folder}\policy.yaml"
    accepted = (0, f"{policy}: valid; the service reads it again\n")
    assert service.command("reload") == accepted
    assert service.wait_log("the policy file was read again")["rules"] == ["new"]
    service.write_policy(rules=[{"name": "new", "approve": "yes!"}])
    code, told = service.command("reload")
    assert code == 2
    assert told.startswith(f"{policy}:7: rules[0].approve: ")
    service.write_policy(rules=[{"name": "newer", "approve": "never"}])
    assert service.command("reload") == accepted
    assert service.wait_log("the policy file was read again", count=2)["rules"] == ["newer"]
    assert service.log("the policy file is rejected; the old policy stays in force") == [], "it got good ones"
    assert service.state() == State("RUNNING", 0, 0, 0)
    service.stop()
    assert service.command("reload") == (
        1,
        "scheduled-events-agent: the service does not run: use `scheduled-events-agent service start`\n",
    )


def test_a_stop_waits_for_a_hook_that_runs(service: Service, sim: Simulator) -> None:
    service.write_policy(
        rules=[{"name": "all", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": service.waiting_hook()},
    )
    service.start()
    sim.schedule("Reboot", notice_seconds=600)
    service.wait_until((service.directory / "begun").exists, "the hook ran")
    ends: list[tuple[int, str]] = []
    stopping = threading.Thread(target=lambda: ends.append(service.command("stop")))
    stopping.start()
    first = service.wait_state("STOP_PENDING")
    service.wait_until(
        lambda: (state := service.state()) and state.checkpoint >= first.checkpoint + 2, "it reported progress"
    )
    assert not (service.directory / "ended").exists()
    (service.directory / "go").touch()
    stopping.join(PATIENCE)
    assert ends == [(0, "the service has stopped\n")]
    assert (service.directory / "ended").exists(), "it was not cut short"
    assert service.state() == State("STOPPED", 0, 0, 0)
    assert sim.approvals() == (), "the next start goes on from here"


def test_a_stop_during_a_slow_start_waits_for_its_end(service: Service) -> None:
    # As on a busy machine: Python alone takes longer than Wine's usual ten seconds.
    slow = service.python.drive / "py311/Lib/site-packages/slow_service.pth"
    slow.write_text("import sys, time; time.sleep(12 * ('host' in sys.orig_argv))\n")
    starting = threading.Thread(target=lambda: service.command("start"))
    try:
        starting.start()
        service.wait_state("START_PENDING")
        service.stop()
    finally:
        starting.join()
        slow.unlink()
    assert service.state() == State("STOPPED", 0, 0, 0)
    assert service.wait_log("agent stopped"), "it was there, and its end was waited for"


def test_a_rejected_policy_stops_it_with_an_exit_code_of_its_own(service: Service) -> None:
    service.write_policy(rules=[{"name": "new", "approve": "yes!"}])
    assert service.command("start") == (
        1,
        "scheduled-events-agent: the service has stopped again with exit code 2; its configuration was rejected: "
        r"see `scheduled-events-agent check`, and C:\ProgramData\ScheduledEventsAgent\logs" + "\n",
    )
    assert service.state() == State("STOPPED", 1066, 2, 0)
    assert "yes!" in service.wait_log("the policy file is rejected; the agent does not start")["reason"]


def test_an_agent_that_is_killed_has_failed_and_its_hooks_end_with_it(service: Service, sim: Simulator) -> None:
    service.write_policy(
        rules=[{"name": "all", "prepare": ["drain"], "approve": "when-prepared"}],
        hooks={"drain": service.waiting_hook()},
    )
    service.start()
    event = sim.schedule("Reboot", notice_seconds=600)
    service.wait_until((service.directory / "begun").exists, "the hook ran")
    assert service.end_of(service.pid(), _OPEN + _KILL + _WAIT) == 7
    (service.directory / "begun").unlink()
    assert not (service.directory / "ended").exists()
    service.start()
    service.wait_until((service.directory / "begun").exists, "the hook ran again")
    (service.directory / "go").touch()
    sim.wait_approved(event, timeout_seconds=PATIENCE)


def test_a_hung_agent_exits_with_a_failure_and_the_next_one_logs_its_stacks(
    service: Service, sim: Simulator
) -> None:
    service.start()
    sim.wait_polls(2, timeout_seconds=PATIENCE)
    began = time.monotonic()
    assert service.end_of(service.pid(), _SUSPEND + _OPEN + _WAIT) == 1
    assert time.monotonic() - began > 40.0, "it was given a minute"
    service.start()
    stacks = service.wait_log("the previous agent process crashed or hung")["crash_log"]
    assert stacks.startswith("Timeout (0:01:00)!")
    assert "agent/scheduled_events_agent/daemon/inbox.py" in stacks.replace("\\", "/")


def test_no_service_is_created_if_administrators_do_not_own_the_data_directory(python: WinePython) -> None:
    service = Service(python, "planted", "http://127.0.0.1:1")
    data = python.drive / "ProgramData" / NAME
    aside = data.with_name(f"{NAME} aside")
    if data.exists():
        data.rename(aside)
    data.touch()  # Wine knows no other owners
    try:
        code, text = service.command("install", *service.options)
    finally:
        data.unlink()
        if aside.exists():
            aside.rename(data)
    place = rf"C:\ProgramData\{NAME}"
    assert (code, text) == (
        1,
        f"scheduled-events-agent: {place}: expected a directory; it is a file or leads elsewhere: remove it\n",
    )
    assert service.state() is None, "or it would start with the machine, and do what is in that directory"


def test_without_a_service_each_command_says_so(python: WinePython) -> None:
    service = Service(python, "none", "http://127.0.0.1:1")
    with contextlib.suppress(FileNotFoundError):
        Path(service.directory).rmdir()
    missing = (
        "scheduled-events-agent: the service is not installed: use `scheduled-events-agent service install`\n"
    )
    assert service.command("start") == (1, missing)
    assert service.command("stop") == (1, missing)
    assert service.command("reload") == (1, missing)
    assert service.command("status") == (1, "state  not installed\n")
    code, text = service.command("status", "--json")
    assert (code, json.loads(text)["state"], json.loads(text)["pid"]) == (1, "not installed", None)
    assert service.command("remove") == (0, "there is no service to remove\n")
    code, text = service.command("host")
    assert code == 2
    assert text == (
        "scheduled-events-agent: only Windows' service control manager can run `service host`: use `service "
        "start`, or `run` to have the agent in the foreground\n"
    )
