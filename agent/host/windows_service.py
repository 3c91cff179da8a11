"""The Windows service: what the service control manager (SCM) sees of the agent, and what it is to do about it.

Owns the service's process (states, controls, the watchdog, how it ends) and its installation. Knows nothing of
events, policy or hooks. The one invariant: the SCM hears of a stop without an error only if somebody asked for
it; every other end is a failure, to which the recovery actions apply.

    main thread     the SCM's dispatcher; controls arrive here, and are passed on at once
    service thread  tells of progress while the service starts or stops, and ends the process
    agent thread    the daemon: what it tells its service manager becomes the service's state

The module can be imported everywhere, for the tests of what decides; whatever asks the SCM needs Windows.
"""

import contextlib
import faulthandler
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TextIO

from agent.host import HostError, ServiceManager
from agent.host.windows import default_state_dir
from agent.host.windows_events import directory_fault, register_source, unregister_source
from agent.host.windows_paths import make_data_dirs

NAME = "ScheduledEventsAgent"
DISPLAY_NAME = "Azure Scheduled Events Agent"
DESCRIPTION = (
    "Prepares this virtual machine for Azure Scheduled Events, approves them when it is ready, and recovers."
)
STOP_TIMEOUT = 60.0
"""Seconds from a stop to the end; hooks that run have most of them."""

_OWN_ACCOUNT = rf"NT SERVICE\{NAME}"
_DEPENDENCIES = ("Tcpip", "Dhcp")
# An engine that gives no sign of life for this long hangs, and the process ends: as with systemd's watchdog.
_HANG_SECONDS = 60.0
_STOP_HANG_SECONDS = STOP_TIMEOUT + 15.0
# The SCM gives up on a service whose checkpoint stands still for longer than the hint.
_CHECKPOINT_SECONDS = 2.0
_WAIT_HINT_SECONDS = 10.0
# Above the stop time-out, or the machine goes down while hooks still have their say.
_PRESHUTDOWN_SECONDS = 90.0
_RESTART_AFTER_SECONDS = (5, 30, 60)
_FORGET_FAILURES_SECONDS = 86400
# Every account that runs a service holds these. The first opens files below closed directories, the second shares
# memory between sessions, the third is what WMI, COM and PowerShell's modules ask of who calls them.
_PRIVILEGES = ("SeChangeNotifyPrivilege", "SeCreateGlobalPrivilege", "SeImpersonatePrivilege")
# A hook may shut the machine down, as the last step for one that will be deleted.
_SYSTEM_PRIVILEGES = (*_PRIVILEGES, "SeShutdownPrivilege")
_ACCOUNTS_WITHOUT_PASSWORD = ("nt service\\", "nt authority\\")
_FAILED = 1
_SPECIFIC_ERROR = 1066  # ERROR_SERVICE_SPECIFIC_ERROR: the exit code is the service's own
_OWN_PROCESS = 0x10
_DELETE = 0x10000
_START_PATIENCE_SECONDS = 90.0
_STOP_PATIENCE_SECONDS = STOP_TIMEOUT + 30.0
_POLL_SECONDS = 0.1
_MAX_LEFT_CHARACTERS = 100_000

_ACCESS_DENIED = 5
_DEPENDENCY_FAILED = (1068, 1075)
_NOT_INSTALLED = 1060
_UNKNOWN_LEVEL = 124
_ALREADY_RUNNING = 1056
_CANNOT_ACCEPT = 1061
_NOT_RUNNING = 1062
_NO_CONTROLLER = 1063
_LOGON_FAILED = (1057, 1069)
_MARKED_FOR_DELETE = 1072


class State(IntEnum):
    """Of a service, in the SCM's numbers."""

    STOPPED = 1
    START_PENDING = 2
    STOP_PENDING = 3
    RUNNING = 4
    CONTINUE_PENDING = 5
    PAUSE_PENDING = 6
    PAUSED = 7


class Control(IntEnum):
    """What the SCM passes on, in its numbers."""

    STOP = 0x1
    PAUSE = 0x2
    CONTINUE = 0x3
    INTERROGATE = 0x4
    SHUTDOWN = 0x5
    PARAMCHANGE = 0x6
    PRESHUTDOWN = 0xF


# SERVICE_ACCEPT_: STOP, PAUSE_CONTINUE, SHUTDOWN, PARAMCHANGE, PRESHUTDOWN
_ACCEPTED_WHEN_UP = 0x1 | 0x2 | 0x4 | 0x8 | 0x100
_UP = (State.RUNNING, State.PAUSED)
_PENDING = (State.START_PENDING, State.STOP_PENDING)
_ENDS = (Control.STOP, Control.SHUTDOWN, Control.PRESHUTDOWN)


class Status(NamedTuple):
    """SERVICE_STATUS, in its order."""

    service_type: int
    state: int
    accepted: int
    exit_code: int
    own_exit_code: int
    checkpoint: int
    wait_hint: int
    """Milliseconds."""


class Agent(Protocol):
    """What controls are passed on to; none of these waits."""

    def stop(self) -> None: ...
    def reload(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Service(ServiceManager):
    """The service while it runs. ``control`` is for the dispatcher's thread; the rest is for the agent's."""

    def __init__(
        self,
        set_status: Callable[[Status], None],
        crash_file: TextIO,
        hang_seconds: float = _HANG_SECONDS,
        checkpoint_seconds: float = _CHECKPOINT_SECONDS,
    ) -> None:
        """``crash_file`` takes the stacks of all threads when the agent hangs; it must be a real file."""
        self._set_status = set_status
        self._crash_file = crash_file
        self._hang_seconds = hang_seconds
        self._checkpoint_seconds = checkpoint_seconds
        self._agent: Agent | None = None
        self._lock = threading.Lock()
        self._state = State.START_PENDING
        self._checkpoint = 0

    def run(self, work: "Callable[[Service], int]") -> int:
        """Have ``work`` done in a thread of its own and tell the SCM until it has ended. Returns its exit code.

        ``work`` makes the agent, passes it to ``obey``, runs it, and returns the service's exit code; 1, for any
        failure, if it raises. When this returns, the process has to end at once. Of a failure the SCM is not told
        but by that: a crash always has it recover, a stop with an error perhaps not before the next boot.
        """
        exit_code = _FAILED

        def work_and_tell() -> None:
            nonlocal exit_code
            exit_code = work(self)

        self._move(State.START_PENDING)
        self._expect_life_within(self._hang_seconds)
        worker = threading.Thread(target=work_and_tell, name="agent", daemon=True)
        worker.start()
        while worker.is_alive():
            worker.join(self._checkpoint_seconds)
            self._tell_again(*_PENDING)
        faulthandler.cancel_dump_traceback_later()
        if exit_code != _FAILED:
            self._move(State.STOPPED, exit_code)
        return exit_code

    def obey(self, agent: Agent) -> None:
        """Pass controls on to this agent. To be called before it is run."""
        self._agent = agent

    def control(self, control: int) -> None:
        """Do what the SCM says."""
        if control == Control.INTERROGATE:
            self._tell_again(*_UP, *_PENDING)
        elif self._agent is None:
            return  # nothing is accepted yet
        elif control in _ENDS:
            self._move(State.STOP_PENDING)
            self._agent.stop()
        elif control == Control.PAUSE:
            self._agent.pause()
            self._move(State.PAUSED)
        elif control == Control.CONTINUE:
            self._agent.resume()
            self._move(State.RUNNING)
        elif control == Control.PARAMCHANGE:
            self._agent.reload()

    # --- what the agent tells

    def tell(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """What the service is at now; there is no place for ``status`` but the log, which has it already."""
        del status
        if state == "ready" and self._state == State.START_PENDING:
            self._move(State.RUNNING)
        elif state == "stopping":
            self._move(State.STOP_PENDING)
            self._expect_life_within(max(_STOP_HANG_SECONDS, self._hang_seconds))

    def tell_status(self, status: str) -> None:
        """One line for people, who have the log and /status."""

    def keep_alive(self) -> None:
        """To be called as long as this process does its work: without it, it ends."""
        self._expect_life_within(self._hang_seconds)

    def _expect_life_within(self, seconds: float) -> None:
        # A thread outside of Python's control, so that not even a call that never gives that back escapes it. The
        # process ends with code 1, unannounced: to the SCM that is a crash.
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._crash_file)

    # --- what the SCM is told

    def _move(self, state: State, exit_code: int = 0) -> None:
        with self._lock:
            if self._state == State.STOP_PENDING and state not in (State.STOP_PENDING, State.STOPPED):
                return  # there is no way back
            if self._state == State.STOPPED:
                return  # nor a second end
            self._checkpoint = self._checkpoint if state == self._state else 0
            self._state = state
            self._report(exit_code)

    def _tell_again(self, *states: State) -> None:
        """If it is one of these."""
        with self._lock:
            if self._state in states:
                self._report()

    def _report(self, exit_code: int = 0) -> None:
        is_pending = self._state in _PENDING
        self._checkpoint = self._checkpoint + 1 if is_pending else 0
        self._set_status(
            Status(
                service_type=_OWN_PROCESS,
                state=self._state,
                accepted=_ACCEPTED_WHEN_UP if self._state in _UP else 0,
                exit_code=_SPECIFIC_ERROR if exit_code else 0,
                own_exit_code=exit_code,
                checkpoint=self._checkpoint,
                wait_hint=int(_WAIT_HINT_SECONDS * 1000) if is_pending else 0,
            )
        )


# --- the service's process


def log_dir() -> Path:
    """Where the service keeps its logs."""
    return default_state_dir().parent / "logs"


def open_crash_file(directory: Path) -> tuple[TextIO, str]:
    """The file for what can go nowhere else, and what an earlier process has left in it.

    If it cannot be opened, what would be written there is lost, and the agent works all the same.
    """
    path = directory / "crash.log"
    try:
        if fault := directory_fault(directory):
            raise OSError(fault)
        # Not cut before it has been read: it is the only witness.
        file = path.open("a+", encoding="utf-8", errors="backslashreplace", buffering=1)
        file.seek(0)
        left = file.read(_MAX_LEFT_CHARACTERS).strip()
        file.truncate(0)
    except OSError:
        return Path(os.devnull).open("w", encoding="utf-8"), ""
    return file, left


def host_service(work: Callable[[Service, str], int]) -> None:
    """Be the service's process until the service has stopped, then end it. For ``work`` see ``Service.run``.

    It gets what an earlier process left in the crash file, to which from then on goes what anybody prints. Raises
    HostError if it was not the SCM who started this process.
    """
    _need_windows()
    import pywintypes  # noqa: PLC0415 - Windows only
    import servicemanager  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only
    import win32serviceutil  # noqa: PLC0415 - Windows only

    class Framework(win32serviceutil.ServiceFramework):
        _svc_name_ = NAME
        _svc_display_name_ = DISPLAY_NAME

        def __init__(self, args: Sequence[str]) -> None:
            # There is no standard output in a service.
            crash_file, self._left = open_crash_file(log_dir())
            sys.stdout = sys.stderr = crash_file
            faulthandler.enable(crash_file)
            self._service = Service(lambda status: win32service.SetServiceStatus(self.ssh, status), crash_file)
            super().__init__(args)

        def SvcRun(self) -> None:  # noqa: N802 - the framework's name
            code = self._service.run(lambda service: work(service, self._left))
            # The framework would report another stop, and with its own idea of the exit code.
            os._exit(code)

        def ServiceCtrlHandlerEx(self, control: int, event_type: int, data: object) -> None:  # noqa: N802
            del event_type, data
            self._service.control(control)

    try:
        servicemanager.Initialize()
        servicemanager.PrepareToHostSingle(Framework)
        servicemanager.StartServiceCtrlDispatcher()  # type: ignore[no-untyped-call]
    except pywintypes.error as error:
        if error.winerror != _NO_CONTROLLER:
            raise
        raise HostError(
            "`service host` is for Windows' service control manager alone: use `service start`, or `run` to have "
            "the agent in the foreground",
            kind="usage",
        ) from None


# --- the service as the SCM keeps it


@dataclass(frozen=True)
class Facts:
    """What the SCM knows of the service."""

    state: str
    pid: int
    """0 if it does not run."""
    exit_code: int
    """How it last stopped; its own code, if it gave one."""
    start: str
    account: str
    command: str


def image_path(options: Sequence[str]) -> str:
    """The command line that hosts the service with the Python that runs now. Raises HostError if there is none.

    ``options`` are those of ``service host``.
    """
    base = getattr(sys, "_base_executable", sys.executable) or sys.executable
    site = sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else None
    return _command_line(base if site else sys.executable, site, ["service", "host", *options])


def _command_line(python: str, site: str | None, arguments: Sequence[str]) -> str:
    r"""Quoted for the SCM, which replaces %NAME% by the variable; ``site``: a venv's site-packages.

    A venv's own python.exe only starts the real one, which the SCM would then not take for the service.
    """
    if site is None:
        start = ["-I", "-m", "agent"]
    else:
        program = "import site; site.addsitedir({!r}); from agent.cli import main; raise SystemExit(main())"
        start = ["-I", "-c", program.format(site)]
    for text in (python, *start, *arguments):
        if found := set(text) & set('%"\r\n\0'):
            raise HostError(
                f"{text!r} cannot be part of a service's command line: it contains {min(found)!r}; "
                "use another name or place for it",
                kind="usage",
            )
    # Without quotes, a path with a space would be tried at each of them, and others may put a program there.
    return f'"{python}" {subprocess.list2cmdline([*start, *arguments])}'


def install(options: Sequence[str], account: str | None) -> list[str]:
    """Make the service, or bring the one that is there up to date. Returns what was done, a line each.

    ``account``: None leaves it as it is, which is LocalSystem for a new service.
    """
    _need_windows()
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    command = image_path(options)
    name = _account_name(account)
    _check_command()
    common = (
        win32service.SERVICE_WIN32_OWN_PROCESS,
        win32service.SERVICE_AUTO_START,
        win32service.SERVICE_ERROR_NORMAL,
        command,
        None,
        False,
        _DEPENDENCIES,
    )
    with _manager(win32service.SC_MANAGER_CONNECT | win32service.SC_MANAGER_CREATE_SERVICE) as manager:
        service: Any = None
        used = name or "LocalSystem"
        try:
            service = win32service.OpenService(manager, NAME, win32service.SERVICE_ALL_ACCESS)
        except pywintypes.error as error:
            if error.winerror != _NOT_INSTALLED:
                raise
        else:
            used = name or str(win32service.QueryServiceConfig(service)[7])
        try:
            # Before there is a service that would start with the machine: anybody may have put a directory with a
            # policy there, and then this raises.
            make_data_dirs(None if _is_system(used) else used)
            if service is None:
                access = win32service.SERVICE_ALL_ACCESS
                service = win32service.CreateService(
                    manager, NAME, DISPLAY_NAME, access, *common, name, _password(name)
                )
                done = [f"the service {NAME} was installed"]
            else:
                win32service.ChangeServiceConfig(service, *common, name, _password(name), DISPLAY_NAME)
                done = [f"the service {NAME} was there already, and is up to date now"]
            for level, value in _further_configuration(used):
                try:
                    win32service.ChangeServiceConfig2(service, getattr(win32service, level), value)
                except pywintypes.error as error:
                    if error.winerror != _UNKNOWN_LEVEL:
                        raise
                    done.append(f"this system does not know {level}")
        finally:
            if service is not None:
                win32service.CloseServiceHandle(service)
    register_source()
    return [*done, f"account: {used}", f"command: {command}"]


def _further_configuration(account: str) -> list[tuple[str, Any]]:
    """What CreateService has no place for: the level's name, and its value."""
    actions = {
        "ResetPeriod": _FORGET_FAILURES_SECONDS,
        "RebootMsg": "",
        "Command": "",
        "Actions": [(1, seconds * 1000) for seconds in _RESTART_AFTER_SECONDS],  # SC_ACTION_RESTART
    }
    return [
        ("SERVICE_CONFIG_DESCRIPTION", DESCRIPTION),
        ("SERVICE_CONFIG_FAILURE_ACTIONS", actions),
        ("SERVICE_CONFIG_FAILURE_ACTIONS_FLAG", True),  # for a stop with an error too, not only for a crash
        ("SERVICE_CONFIG_DELAYED_AUTO_START_INFO", False),  # an event may come soon after the boot
        ("SERVICE_CONFIG_SERVICE_SID_INFO", 1),  # SERVICE_SID_TYPE_UNRESTRICTED
        (
            "SERVICE_CONFIG_REQUIRED_PRIVILEGES_INFO",
            list(_SYSTEM_PRIVILEGES if _is_system(account) else _PRIVILEGES),
        ),
        ("SERVICE_CONFIG_PRESHUTDOWN_INFO", int(_PRESHUTDOWN_SECONDS * 1000)),
    ]


def _account_name(account: str | None) -> str | None:
    """As the SCM wants it. Raises HostError for an account that has a password."""
    if account is None:
        return None
    name = account.strip()
    if _is_system(name):
        return "LocalSystem"
    if name.casefold().startswith(_ACCOUNTS_WITHOUT_PASSWORD) or name.endswith("$"):
        return name
    raise HostError(
        f"--account {account}: expected an account without a password, which are {_OWN_ACCOUNT}, a group managed "
        "service account (DOMAIN\\NAME$), NT AUTHORITY\\LocalService or NetworkService, and LocalSystem",
        kind="usage",
    )


def _password(name: str | None) -> str | None:
    """As the SCM wants it for an account that has none: nothing if it looks after it itself, else an empty one."""
    if name is None or name.casefold().startswith("nt service\\") or name.endswith("$"):
        return None
    return ""


def _is_system(account: str) -> bool:
    return account.casefold() in ("localsystem", r".\localsystem", r"nt authority\system")


def _check_command() -> None:
    """Whether the service will find the agent, which an installation for one user alone would prevent."""
    command = _command_line_for_check()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[-1]
        raise HostError(
            f"a service could not start the agent from here: {command} says {reason!r}; install it for all users, "
            "best into a venv below %ProgramFiles%",
            kind="install",
        )


def _command_line_for_check() -> str:
    return image_path([]).removesuffix(" service host") + " --version"


def remove() -> bool:
    """Stop and remove the service. False if there is none."""
    _need_windows()
    import win32service  # noqa: PLC0415 - Windows only

    if query() is None:
        return False
    stop()
    with _service(_DELETE) as service:
        win32service.DeleteService(service)
    unregister_source()
    return True


def start() -> bool:
    """Start the service and wait until it runs. False if it did already. Raises HostError if it stops again."""
    _need_windows()
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    with _service(win32service.SERVICE_START | win32service.SERVICE_QUERY_STATUS) as service:
        try:
            win32service.StartService(service, None)
            was_stopped = True
        except pywintypes.error as error:
            if error.winerror != _ALREADY_RUNNING:
                raise
            was_stopped = False
        state, code = _wait(service, State.START_PENDING, _START_PATIENCE_SECONDS)
    if state in _UP:
        return was_stopped
    if state == State.START_PENDING:
        raise HostError(f"the service has not started within {_START_PATIENCE_SECONDS:.0f}s: see {log_dir()}")
    reason = "its configuration was refused: see `scheduled-events-agent check`, and" if code == 2 else "see"
    raise HostError(f"the service has stopped again with exit code {code}; {reason} {log_dir()}")


def stop() -> bool:
    """Stop the service and wait for its end, which hooks that run delay. False if it did not run."""
    _need_windows()
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    with _service(win32service.SERVICE_STOP | win32service.SERVICE_QUERY_STATUS) as service:
        _wait(service, State.START_PENDING, _START_PATIENCE_SECONDS)  # it cannot be stopped before
        try:
            win32service.ControlService(service, Control.STOP)
        except pywintypes.error as error:
            if error.winerror == _NOT_RUNNING:
                return False
            if error.winerror != _CANNOT_ACCEPT:  # somebody else has told it to
                raise
        state, _ = _wait(service, State.STOP_PENDING, _STOP_PATIENCE_SECONDS)
    if state != State.STOPPED:
        raise HostError(
            f"the service has not stopped within {_STOP_PATIENCE_SECONDS:.0f}s, and is {_state_name(state)}: see "
            f"{log_dir()}"
        )
    return True


def reload() -> None:
    """Have the service read its policy again; what becomes of that is in its journal and its log."""
    _need_windows()
    import win32service  # noqa: PLC0415 - Windows only

    with _service(win32service.SERVICE_PAUSE_CONTINUE) as service:
        win32service.ControlService(service, Control.PARAMCHANGE)


def options_of(command: str) -> dict[str, str]:
    """The options in the command line of a service, as ``install`` writes it; names are without dashes."""
    found = re.findall(r'(?:^| )(?:"--([\w-]+)=([^"]*)"|--([\w-]+)=(\S*))', command)
    return {quoted or plain: in_quotes or value for quoted, in_quotes, plain, value in found}


def query() -> Facts | None:
    """What the SCM knows of the service; None if there is none."""
    _need_windows()
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    starts = {0: "boot", 1: "system", 2: "automatic", 3: "manual", 4: "disabled"}
    with _manager(win32service.SC_MANAGER_CONNECT) as manager:
        access = win32service.SERVICE_QUERY_STATUS | win32service.SERVICE_QUERY_CONFIG
        try:
            service = win32service.OpenService(manager, NAME, access)
        except pywintypes.error as error:
            if error.winerror == _NOT_INSTALLED:
                return None
            raise
        try:
            status: Mapping[str, int] = win32service.QueryServiceStatusEx(service)  # type: ignore[assignment]
            config = win32service.QueryServiceConfig(service)
        finally:
            win32service.CloseServiceHandle(service)
    return Facts(
        state=_state_name(status["CurrentState"]),
        pid=status["ProcessId"],
        exit_code=_own_exit_code(status["Win32ExitCode"], status["ServiceSpecificExitCode"]),
        start=starts.get(config[1], str(config[1])),
        account=str(config[7]),
        command=str(config[3]),
    )


def _wait(service: Any, while_state: State, patience_seconds: float) -> tuple[int, int]:
    """Wait for the end of a state; returns the state then, and the exit code."""
    import win32service  # noqa: PLC0415 - Windows only

    deadline = time.monotonic() + patience_seconds
    while True:
        status: Any = win32service.QueryServiceStatus(service)
        _, state, _, code, own_code, *_ = status
        if state != while_state or time.monotonic() > deadline:
            return state, _own_exit_code(code, own_code)
        time.sleep(_POLL_SECONDS)


def _own_exit_code(code: int, own_code: int) -> int:
    return own_code if code == _SPECIFIC_ERROR else code


def _state_name(state: int) -> str:
    return State(state).name.lower().replace("_", " ")


@contextlib.contextmanager
def _manager(access: int) -> Iterator[Any]:
    """The SCM. Raises HostError in place of whatever it says, also within the block."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    try:
        handle = win32service.OpenSCManager(None, None, access)
        try:
            yield handle
        finally:
            win32service.CloseServiceHandle(handle)
    except pywintypes.error as error:
        raise HostError(_explain(error.winerror, error.strerror), kind="service") from None


@contextlib.contextmanager
def _service(access: int) -> Iterator[Any]:
    """Our service, which must be there."""
    import win32service  # noqa: PLC0415 - Windows only

    with _manager(win32service.SC_MANAGER_CONNECT) as manager:
        handle = win32service.OpenService(manager, NAME, access)
        try:
            yield handle
        finally:
            win32service.CloseServiceHandle(handle)


def _explain(code: int, reason: str) -> str:
    """What the SCM's error means to who runs the command."""
    if code == _ACCESS_DENIED:
        return "access is denied: run it in an elevated prompt (Run as administrator)"
    if code == _NOT_INSTALLED:
        return "the service is not installed: use `scheduled-events-agent service install`"
    if code == _NOT_RUNNING:
        return "the service does not run: use `scheduled-events-agent service start`"
    if code == _CANNOT_ACCEPT:
        return "the service starts or stops just now: try again when `service status` says running"
    if code == _MARKED_FOR_DELETE:
        return "the service is being removed: close whatever shows it, such as the Services window, and try again"
    if code in _LOGON_FAILED:
        return (
            f"the service's account is refused ({reason.strip()}): name another with `service install --account`"
        )
    if code in _DEPENDENCY_FAILED:
        return f"a service that the agent needs ({', '.join(_DEPENDENCIES)}) does not run ({reason.strip()})"
    return f"the service control manager refuses: {reason.strip()} ({code})"


def _need_windows() -> None:
    if sys.platform != "win32":
        raise HostError(
            "`service` is for Windows: here systemd runs the agent, and `install-unit` sets that up where no "
            "package has",
            kind="usage",
        )
