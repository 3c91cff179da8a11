"""Reports of the service to the SCM, and the states that it keeps; the SCM itself is under tests/system."""

import contextlib
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

import scheduled_events_agent
from scheduled_events_agent.cli import build_parser, doctor_checks, main
from scheduled_events_agent.engine import Host
from scheduled_events_agent.engine.hook_runs import HookRuns
from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.host import processes
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows import service_manager as windows_service
from scheduled_events_agent.host.windows import system
from scheduled_events_agent.host.windows.service_process import Control, Service, State, Status, open_crash_log
from scheduled_events_agent.store import Store
from scheduled_events_agent.workflow import RunHook

UP = 0x1 | 0x4 | 0x8 | 0x100  # stop, shutdown, parameter change, preshutdown; not pause and continue
START_PENDING = Status(0x10, State.START_PENDING, 0, 0, 0, 1, 10_000)
STOP_PENDING = Status(0x10, State.STOP_PENDING, 0, 0, 0, 1, 10_000)
RUNNING = Status(0x10, State.RUNNING, UP, 0, 0, 0, 0)
STOPPED = Status(0x10, State.STOPPED, 0, 0, 0, 0, 0)
PATIENCE = 10.0


class Agent:
    """Notes its commands, and runs until it is stopped and may end."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.stop_requested = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def run(self, service: Service) -> None:
        service.notify("ready", "nothing is pending")
        assert self.stop_requested.wait(PATIENCE)
        service.notify("stopping", "Stopping")
        assert self.may_end.wait(PATIENCE)

    def stop(self) -> None:
        self.heard.append("stop")
        self.stop_requested.set()

    def reload(self) -> None:
        self.heard.append("reload")


class Manager:
    """The SCM: accepts the states that the service reports, and waits for it."""

    def __init__(self, crash_file: TextIO, work: Callable[[Service], int]) -> None:
        self.told: list[Status] = []
        self._news = threading.Condition()
        self.service = Service(self._take, crash_file, checkpoint_seconds=0.02)
        self.exit_code: int | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run)

    def _take(self, status: Status) -> None:
        with self._news:
            self.told.append(status)
            self._news.notify_all()

    def _run(self) -> None:
        self.exit_code = self.service.run(self._work)

    def start(self) -> None:
        self._thread.start()

    def wait(self, test: Callable[[Status], bool]) -> Status:
        with self._news:
            assert self._news.wait_for(lambda: any(map(test, self.told)), PATIENCE), self.told
            return next(filter(test, self.told))

    def wait_end(self) -> int | None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.exit_code

    def states(self) -> list[Status]:
        """The states that the service reported, without the signs of progress."""
        return [status for status in self.told if status.checkpoint <= 1]


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that becomes a service remains one; that of the tests does not."""
    monkeypatch.setattr(system, "service_shutdown", None)


@pytest.fixture
def crash_file(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "crash.log").open("w", encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def running(crash_file: TextIO) -> Iterator[tuple[Manager, Agent]]:
    """A service whose agent is ready; stopped at the end if it still runs."""
    agent = Agent()

    def work(service: Service) -> int:
        service.attach(agent.stop, agent.reload)
        agent.run(service)
        return 0

    manager = Manager(crash_file, work)
    manager.start()
    manager.wait(lambda status: status == RUNNING)
    try:
        yield manager, agent
    finally:
        agent.may_end.set()
        agent.stop_requested.set()
        manager.wait_end()


def test_it_reports_progress_until_the_agent_is_ready_and_accepts_no_command_before(crash_file: TextIO) -> None:
    may_be_ready, agent = threading.Event(), Agent()

    def work(service: Service) -> int:
        service.attach(agent.stop, agent.reload)
        assert may_be_ready.wait(PATIENCE)
        agent.run(service)
        return 0

    manager = Manager(crash_file, work)
    manager.start()
    manager.wait(lambda status: status.checkpoint == 3)
    assert [status._replace(checkpoint=1) for status in manager.told] == [START_PENDING] * len(manager.told)
    checkpoints = [status.checkpoint for status in manager.told]
    assert checkpoints == sorted(set(checkpoints)), "each is higher than the one before"
    may_be_ready.set()
    manager.wait(lambda status: status == RUNNING)
    agent.stop()
    assert manager.wait_end() == 0


# Wine never sends the latter two; Windows does when the machine goes down, and each means that it waits for us.
@pytest.mark.parametrize("control", [Control.STOP, Control.SHUTDOWN, Control.PRESHUTDOWN])
def test_it_stops_after_the_hooks_and_reports_progress_until_then(crash_file: TextIO, control: Control) -> None:
    with running(crash_file) as (manager, agent):
        agent.may_end.clear()
        manager.service.control(control)
        manager.wait(lambda status: status.state == State.STOP_PENDING and status.checkpoint == 4)
        assert agent.heard == ["stop"]
        agent.may_end.set()
        assert manager.wait_end() == 0
    assert manager.states() == [START_PENDING, RUNNING, STOP_PENDING, STOPPED]


def test_a_changed_parameter_is_a_reload_during_which_it_runs(crash_file: TextIO) -> None:
    with running(crash_file) as (manager, agent):
        manager.service.control(Control.PARAMCHANGE)
        manager.service.notify("reloading", "reads the policy file again")
        manager.service.notify("ready", "nothing is pending")
        manager.service.control(Control.INTERROGATE)
        assert agent.heard == ["reload"]
    assert manager.states()[1:] == [RUNNING, RUNNING, STOP_PENDING, STOPPED]


@pytest.mark.parametrize(
    ("control", "is_delayed"),
    [(Control.STOP, False), (Control.SHUTDOWN, True), (Control.PRESHUTDOWN, True)],
)
def test_a_failed_hook_is_deferred_at_a_shutdown_and_fails_at_a_service_stop(
    crash_file: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: Control, is_delayed: bool
) -> None:
    monkeypatch.setattr(processes, "is_shutting_down", system.is_shutting_down)
    drain = RunHook(workflow_id="w-1", stage="prepare", hook="drain", run=1)
    failure = HookResult(
        hook="drain",
        outcome="failed",
        exit_code=1,
        attempts=1,
        duration_seconds=1.0,
        tail="",
        detail="exit code 1",
    )
    unused: Any = None
    with (
        running(crash_file) as (manager, _),
        contextlib.closing(Store.open(tmp_path, datetime.now(UTC))) as store,
    ):
        hook_runs = HookRuns(store, unused, Host(), unused, unused)
        assert system.is_shutting_down() is False
        manager.service.control(control)
        finished = hook_runs.to_signal(drain, failure, None)
    assert (finished is None, hook_runs.cut_short == [drain]) == (is_delayed, is_delayed)


def test_a_stopping_service_cannot_be_restarted(crash_file: TextIO) -> None:
    with running(crash_file) as (manager, agent):
        agent.may_end.clear()
        manager.service.control(Control.STOP)
        manager.service.notify("ready", "nothing is pending")
    manager.service.control(Control.STOP)
    manager.service.control(Control.INTERROGATE)
    assert manager.states() == [START_PENDING, RUNNING, STOP_PENDING, STOPPED]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # which is what is meant
def test_an_agent_that_ends_by_a_bug_is_a_failure(crash_file: TextIO) -> None:
    def work(_service: Service) -> int:
        raise RuntimeError("a bug")

    manager = Manager(crash_file, work)
    manager.start()
    assert manager.wait_end() == 1
    assert {status.state for status in manager.told} == {State.START_PENDING}, "its end is a crash to the SCM"


def test_a_rejected_policy_has_an_exit_code_of_its_own(crash_file: TextIO) -> None:
    manager = Manager(crash_file, lambda _service: 2)
    manager.start()
    assert manager.wait_end() == 2
    assert manager.told[-1] == STOPPED._replace(exit_code=1066, own_exit_code=2)


_LIVING = """
import sys, time
from scheduled_events_agent.host.windows.service_process import Service

def hang_in_a_call():
    time.sleep(60)

def work(service):
    for word in sys.argv[2:]:
        if word == "ready":
            service.notify("ready", "")
        elif word == "alive":
            time.sleep(0.4)
            service.keep_alive()
        elif word == "hang":
            hang_in_a_call()
    return 0

with open(sys.argv[1], "w") as file:
    sys.exit(Service(lambda status: None, file, hang_seconds=1.0).run(work))
"""


def _live(crash_path: Path, *words: str) -> int:
    command = [sys.executable, "-c", _LIVING, str(crash_path), *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode


@pytest.mark.parametrize("words", [["hang"], ["ready", "hang"], ["ready", "alive", "hang"]])
def test_an_agent_that_hangs_ends_with_a_failure_and_leaves_its_stacks(tmp_path: Path, words: list[str]) -> None:
    assert _live(tmp_path / "crash.log", *words) == 1
    left = (tmp_path / "crash.log").read_text()
    assert left.startswith("Timeout (0:00:01)!\nThread ")
    assert "in hang_in_a_call" in left
    assert "in run" in left, "the other threads are there too"


def test_an_agent_that_sends_heartbeats_is_not_ended(tmp_path: Path) -> None:
    assert _live(tmp_path / "crash.log", "ready", *["alive"] * 4) == 0
    assert (tmp_path / "crash.log").read_text() == ""


def test_the_log_of_a_crashed_agent_is_found_once_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "crash.log").write_text("Timeout (0:01:00)!\nThread 1\n")
    file, left = open_crash_log(tmp_path)
    assert left == "Timeout (0:01:00)!\nThread 1"
    print("new", file=file)
    file.close()
    file, left = open_crash_log(tmp_path)
    file.close()
    assert left == "new"
    file, left = open_crash_log(tmp_path)
    file.close()
    assert left == ""


def test_a_crash_log_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "crash.log").write_text("first" + "x" * 1_000_000)
    file, left = open_crash_log(tmp_path)
    with file:
        assert (len(left), left[:6]) == (100_000, "firstx")
    assert (tmp_path / "crash.log").read_text() == ""


def test_an_unusable_crash_log_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "crash.log").mkdir()
    file, left = open_crash_log(tmp_path)
    with file:
        print("lost", file=file)
    assert left == ""


# --- what the SCM keeps


def test_the_command_is_quoted_however_the_paths_are() -> None:
    command = windows_service._command_line(
        r"C:\Program Files\agent\python.exe",
        None,
        ["service", "host", r"--config=C:\my policies\p.yaml", "--state-dir=C:\\state dir\\"],
    )
    assert command == (
        r'"C:\Program Files\agent\python.exe" -I -m scheduled_events_agent service host'
        ' "--config=C:\\my policies\\p.yaml" "--state-dir=C:\\state dir\\\\"'
    )


@pytest.mark.parametrize("config", [r"C:\my policies\p.yaml", r"C:\p.yaml"])
def test_the_options_are_read_from_the_command_as_they_were_put_there(config: str) -> None:
    command = windows_service._command_line(r"C:\py\python.exe", None, [f"--config={config}", r"--state-dir=D:\s"])
    assert windows_service.options_of(command) == {"config": config, "state-dir": r"D:\s"}
    assert windows_service.options_of(windows_service.image_path([])) == {}


def test_the_service_is_asked_to_reload_if_its_own_policy_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, told = tmp_path / "policy.yaml", list[str]()
    monkeypatch.setattr(windows_service, "host_options", lambda: {"config": str(policy)})
    monkeypatch.setattr(windows_service, "reload", lambda: told.append("reload"))
    monkeypatch.setattr("scheduled_events_agent.cli.status.keys_for_restart", lambda *_: ("agent.listen",))
    policy.write_text("rulez: []\n")
    assert main(["service", "reload"]) == 2
    assert f'{policy}:1: unknown key "rulez"' in capsys.readouterr().err
    assert told == []
    policy.write_text("rules: []\n")
    assert main(["service", "reload"]) == 0
    assert capsys.readouterr().out == (
        f"{policy}: valid; the service reads it again\nagent.listen: needs a restart\n"
    )
    assert told == ["reload"]


def test_an_installation_without_the_right_to_it_makes_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def reject(_: int) -> None:
        raise HostError(windows_service._explain(5, "Access is denied."), kind="service")

    monkeypatch.setattr(
        windows_service, "win32service", SimpleNamespace(SC_MANAGER_CREATE_SERVICE=2), raising=False
    )
    monkeypatch.setattr(windows_service, "need_windows", lambda: None)
    monkeypatch.setattr(windows_service, "_check_command", lambda: None)
    monkeypatch.setattr(windows_service, "query", lambda: None)
    monkeypatch.setattr(windows_service, "_manager", reject)
    monkeypatch.setattr(windows_service, "make_data_dirs", lambda *paths: made.extend(paths))
    with pytest.raises(HostError, match="run it in an elevated prompt"):
        windows_service.install([])
    assert made == []


def test_a_service_that_is_still_stopping_is_started_when_it_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class RejectionError(Exception):
        winerror = 1056  # the SCM's answer until the service has stopped

    states = [State.STOP_PENDING, State.STOP_PENDING, State.STOPPED]

    def query(_: object) -> tuple[int, int, int, int, int]:
        return 0x10, states.pop(0) if len(states) > 1 else states[0], 0, 0, 0

    def start(*_: object) -> None:
        if states != [State.STOPPED]:
            raise RejectionError
        states[:] = [State.START_PENDING, State.RUNNING]

    scm = SimpleNamespace(QueryServiceStatus=query, StartService=start)
    monkeypatch.setattr(windows_service, "win32service", scm, raising=False)
    monkeypatch.setattr(windows_service, "pywintypes", SimpleNamespace(error=RejectionError), raising=False)
    monkeypatch.setattr(windows_service, "_service", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(windows_service, "_POLL_SECONDS", 0.0)
    assert windows_service.start()
    states[:] = [State.STOP_PENDING]
    monkeypatch.setattr(windows_service, "_STOP_TIMEOUT_SECONDS", 0.0)
    with pytest.raises(HostError, match="has not stopped within 0s"):
        windows_service.start()


def test_a_program_is_quoted_even_without_need() -> None:
    assert (
        windows_service._command_line(r"C:\py\python.exe", None, ["x"])
        == r'"C:\py\python.exe" -I -m scheduled_events_agent x'
    )


@pytest.mark.parametrize(("path", "mark"), [(r"C:\%TEMP%\p.yaml", "%"), ('C:\\a"b', '"'), ("C:\\a\nb", "\n")])
def test_an_argument_that_the_scm_would_misread_is_rejected(path: str, mark: str) -> None:
    with pytest.raises(HostError) as caught:
        windows_service._command_line(r"C:\py\python.exe", None, [path])
    assert caught.value.kind == "usage"
    assert str(caught.value) == (
        f"{path!r} cannot be part of a service's command line: it contains {mark!r}; "
        "use another name or place for it"
    )


def test_from_a_venv_the_real_python_is_started_and_finds_the_agent() -> None:
    base = str(getattr(sys, "_base_executable", sys.executable))
    command = windows_service._command_line(base, sysconfig.get_path("purelib"), ["--version"])
    done = subprocess.run(
        command if sys.platform == "win32" else shlex.split(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("scheduled-events-agent "), done.stderr


def test_it_is_restarted_after_5_30_and_60_seconds_also_after_an_error() -> None:
    settings = dict(windows_service._further_configuration("LocalSystem"))
    assert settings["SERVICE_CONFIG_FAILURE_ACTIONS"] == {
        "ResetPeriod": 86400,
        "RebootMsg": "",
        "Command": "",
        "Actions": [(1, 5000), (1, 30000), (1, 60000)],
    }
    assert settings["SERVICE_CONFIG_FAILURE_ACTIONS_FLAG"] is True


def test_it_starts_with_the_machine_has_its_own_sid_and_time_to_stop() -> None:
    settings = dict(windows_service._further_configuration("LocalSystem"))
    assert settings["SERVICE_CONFIG_DELAYED_AUTO_START_INFO"] is False
    assert settings["SERVICE_CONFIG_SERVICE_SID_INFO"] == 1
    assert settings["SERVICE_CONFIG_PRESHUTDOWN_INFO"] == 90_000
    assert windows_service.STOP_TIMEOUT * 1000 < 90_000


@pytest.mark.parametrize(
    ("account", "privileges"),
    [
        (
            "LocalSystem",
            [
                "SeChangeNotifyPrivilege",
                "SeCreateGlobalPrivilege",
                "SeImpersonatePrivilege",
                "SeShutdownPrivilege",
            ],
        ),
        (
            r"NT SERVICE\ScheduledEventsAgent",
            ["SeChangeNotifyPrivilege", "SeCreateGlobalPrivilege", "SeImpersonatePrivilege"],
        ),
    ],
)
def test_it_keeps_few_privileges(account: str, privileges: list[str]) -> None:
    settings = dict(windows_service._further_configuration(account))
    assert settings["SERVICE_CONFIG_REQUIRED_PRIVILEGES_INFO"] == privileges


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (5, "access is denied: run it in an elevated prompt (Run as administrator)"),
        (1060, "the service is not installed: use `scheduled-events-agent service install`"),
        (1062, "the service does not run: use `scheduled-events-agent service start`"),
        (1061, "the service is starting or stopping: try again when `service status` says running"),
        (9, "the service control manager reports an error: Why. (9)"),
    ],
)
def test_a_rejection_by_the_scm_is_reported_with_a_hint(code: int, text: str) -> None:
    assert windows_service._explain(code, "Why. ") == text


@pytest.mark.skipif(sys.platform == "win32", reason="it is there on Windows, where tests/system/ shows it")
@pytest.mark.parametrize("action", ["install", "remove", "start", "stop", "status", "reload"])
def test_on_linux_it_names_systemd(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", action]) == 2
    assert capsys.readouterr().err == (
        "scheduled-events-agent: `service` is for Windows: here systemd runs the agent, as docs/install-other.md "
        "says where no package does it\n"
    )


@pytest.mark.parametrize("name", ["install.ps1", "uninstall.ps1"])
def test_the_command_accepts_the_arguments_of_the_scripts(name: str) -> None:
    script = Path(__file__).resolve().parents[2] / "winservice" / name
    calls = re.findall(r"@\(('-I', '-m', [^)]+)\)", script.read_text(encoding="utf-8"))
    assert any("'service'" in call for call in calls)
    for call in calls:
        words = [word.strip("' ") for word in call.split(",")]
        if words[2] in ("pip", "venv"):
            continue
        assert words[2] == scheduled_events_agent.__name__
        assert build_parser().parse_args(words[3:]).handler is not None


def test_the_help_explains_that_windows_starts_the_service_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["service", "host", "--help"])
    text = capsys.readouterr().out
    assert "Run as the service (for Windows' service control manager only)." in " ".join(text.split())


@pytest.mark.parametrize(
    ("state", "exit_code", "hint"),
    [
        ("stopped", 2, f"it failed: p.yaml:3: wrong; correct that, then {doctor_checks.START}"),
        ("stopped", 0, doctor_checks.START),
        ("stopped", 1077, doctor_checks.START),  # it was never started
        ("start pending", 0, "it is starting: run this again in half a minute"),
    ],
)
def test_doctor_knows_a_service_that_failed_and_one_that_starts(
    monkeypatch: pytest.MonkeyPatch, state: str, exit_code: int, hint: str
) -> None:
    facts = windows_service.Facts(state, 0, exit_code, "automatic", "LocalSystem", "agent service host")
    monkeypatch.setattr(windows_service, "query", lambda: facts)
    found = doctor_checks.check_service(windows_service.own_service(), "", "p.yaml:3: wrong")
    assert found.hint == hint
