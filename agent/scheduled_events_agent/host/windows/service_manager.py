"""The agent's service as the service control manager (SCM) keeps it: install, remove, start, stop, reload, query.

Can be imported everywhere, for the tests of what it decides; the functions that ask the SCM need Windows.
"""

import contextlib
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scheduled_events_agent.host.conflicts import OwnService, ServiceFailure
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows.files import data_dir, log_dir
from scheduled_events_agent.host.windows.permissions import SERVICE, is_system, make_data_dirs

if sys.platform == "win32" or TYPE_CHECKING:
    import pywintypes
    import win32evtlogutil
    import win32service

NAME = SERVICE
DISPLAY_NAME = "Azure Scheduled Events Agent"
DESCRIPTION = (
    "Prepares this virtual machine for Azure Scheduled Events, approves them when it is ready, and recovers."
)
STOP_TIMEOUT = 60.0
"""Seconds from a stop to the end; hooks that run have most of them."""

_DEPENDENCIES = ("Tcpip", "Dhcp")
# Above the stop time-out, or the machine goes down while hooks still run.
_PRESHUTDOWN_SECONDS = 90.0
_RESTART_AFTER_SECONDS = (5, 30, 60)
_FORGET_FAILURES_SECONDS = 86400
# Every account that runs a service holds these. The first opens files below closed directories, the second shares
# memory between sessions, the third is what WMI, COM and PowerShell's modules ask of their callers.
_PRIVILEGES = ("SeChangeNotifyPrivilege", "SeCreateGlobalPrivilege", "SeImpersonatePrivilege")
# A hook may shut the machine down, as the last step for one that will be deleted.
_SYSTEM_PRIVILEGES = (*_PRIVILEGES, "SeShutdownPrivilege")
# Shipped with every Windows Server since 2012; pywin32's own message files know a few ids only, and not these.
_FRAMEWORK_MESSAGES = r"%SystemRoot%\Microsoft.NET\Framework64\v4.0.30319\EventLogMessages.dll"
_START_TIMEOUT_SECONDS = 90.0
_STOP_TIMEOUT_SECONDS = STOP_TIMEOUT + 30.0
_REMOVE_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.1
# SERVICE_... rights, and DELETE: an account may have been given some of them only.
_QUERY = 0x5
_START = 0x10
_STOP = 0x20
_CHANGE_PARAMETERS = 0x40  # SERVICE_PAUSE_CONTINUE is for this control as well
_DELETE = 0x10000
_ALL_ACCESS = 0xF01FF
_STATES = ("", "stopped", "start pending", "stop pending", "running")
_STARTS = ("boot", "system", "automatic", "manual", "disabled")

_SPECIFIC_ERROR = 1066  # ERROR_SERVICE_SPECIFIC_ERROR: the exit code is the service's own
_UNKNOWN_LEVEL = 124
_NOT_INSTALLED = 1060
_ALREADY_RUNNING = 1056
_CANNOT_ACCEPT = 1061
_NOT_RUNNING = 1062
_NEVER_STARTED = 1077
_HINTS = {
    5: "access is denied: run it in an elevated prompt (Run as administrator)",
    _NOT_INSTALLED: "the service is not installed: use `scheduled-events-agent service install`",
    _NOT_RUNNING: "the service does not run: use `scheduled-events-agent service start`",
    _CANNOT_ACCEPT: "the service is starting or stopping: try again when `service status` says running",
}


@dataclass(frozen=True)
class Facts:
    """The state of the service, as the SCM reports it."""

    state: str
    pid: int
    """Pid of the process; 0 if the service does not run."""
    exit_code: int
    """Exit code of the last run."""
    start: str
    account: str
    command: str


def own_service() -> OwnService | None:
    """The agent's service as the service manager has it; None if it has none. Raises HostError if none answers."""
    facts = query()
    if facts is None:
        return None
    # Whether the SCM starts it again is not known: it does not after a stop in between.
    has_failed = facts.state == "stopped" and facts.exit_code not in (0, _NEVER_STARTED)
    return OwnService(
        is_enabled=facts.start == "automatic",
        state=facts.state,
        is_running=facts.state == "running",
        pid=facts.pid,
        account=facts.account,
        needs_daemon_reload=False,
        is_starting=facts.state == "start pending",
        failure=ServiceFailure("", is_retried=False) if has_failed else None,
    )


def is_of_own_service(pid: int) -> bool:
    """Whether the service manager has started the process for the agent's service, as far as it is known."""
    with contextlib.suppress(HostError):
        facts = query()
        return facts is not None and facts.pid == pid
    return False


def query() -> Facts | None:
    """The state of the service, as the SCM reports it; None if there is none."""
    try:
        with _service(_QUERY) as service:
            status: Mapping[str, int] = win32service.QueryServiceStatusEx(service)  # type: ignore[assignment]
            config = win32service.QueryServiceConfig(service)
    except HostError as error:
        if error.kind == "not_installed":
            return None
        raise
    return Facts(
        state=_STATES[status["CurrentState"]],
        pid=status["ProcessId"],
        exit_code=_own_exit_code(status["Win32ExitCode"], status["ServiceSpecificExitCode"]),
        start=_STARTS[config[1]],
        account=str(config[7]),
        command=str(config[3]),
    )


def install(options: Sequence[str]) -> list[str]:
    """Make the service, or bring the one that is there up to date. Returns what was done, a line each.

    A new service runs as LocalSystem; the account of one that is there stays.
    """
    need_windows()
    command = image_path(options)
    _check_command()
    facts = query()
    account = facts.account if facts else "LocalSystem"
    with _manager(win32service.SC_MANAGER_CREATE_SERVICE):
        pass  # without this right, as in a prompt that is not elevated, the directories would be the user's
    # Before there is a service that would start with the machine: any user may have put a directory with a policy
    # there, and then this raises.
    make_data_dirs(data_dir(), None if is_system(account) else account)
    common = (
        win32service.SERVICE_WIN32_OWN_PROCESS,
        win32service.SERVICE_AUTO_START,
        win32service.SERVICE_ERROR_NORMAL,
        command,
        None,
        False,
        _DEPENDENCIES,
        None,  # the account: LocalSystem for a new service, and no change for another
        None,
    )
    if facts is None:
        with _manager(win32service.SC_MANAGER_CREATE_SERVICE) as manager:
            service = win32service.CreateService(manager, NAME, DISPLAY_NAME, _ALL_ACCESS, *common)
            win32service.CloseServiceHandle(service)
        done = [f"the service {NAME} was installed"]
    else:
        done = [f"the service {NAME} was there already, and is up to date now"]
    with _service(_ALL_ACCESS) as service:
        if facts is not None:
            win32service.ChangeServiceConfig(service, *common, DISPLAY_NAME)
        for level, value in _further_configuration(account):
            try:
                win32service.ChangeServiceConfig2(service, getattr(win32service, level), value)
            except pywintypes.error as error:
                if error.winerror != _UNKNOWN_LEVEL:
                    raise
                done.append(f"this system does not know {level}")
    register_source()
    return [*done, f"account: {account}", f"command: {command}"]


def remove() -> bool:
    """Stop and remove the service. False if there is none."""
    if query() is None:
        return False
    stop()
    with _service(_DELETE) as service:
        win32service.DeleteService(service)
    # Its process may take a moment to end; until then, an installation would be rejected.
    deadline = time.monotonic() + _REMOVE_TIMEOUT_SECONDS
    while query() is not None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    unregister_source()
    return True


def start() -> bool:
    """Start the service and wait until it runs. False if it did already. Raises HostError if it stops again."""
    with _service(_START | _QUERY) as service:
        # Until then the SCM says that it runs already.
        state, _ = _wait(service, "stop pending", _STOP_TIMEOUT_SECONDS)
        if state == "stop pending":
            raise HostError(f"the service has not stopped within {_STOP_TIMEOUT_SECONDS:.0f}s: see {log_dir()}")
        try:
            win32service.StartService(service, None)
            was_stopped = True
        except pywintypes.error as error:
            if error.winerror != _ALREADY_RUNNING:
                raise
            was_stopped = False
        state, code = _wait(service, "start pending", _START_TIMEOUT_SECONDS)
    if state == "running":
        return was_stopped
    if state == "start pending":
        raise HostError(f"the service has not started within {_START_TIMEOUT_SECONDS:.0f}s: see {log_dir()}")
    reason = "its configuration was rejected: see `scheduled-events-agent check`, and" if code == 2 else "see"
    raise HostError(f"the service has stopped again with exit code {code}; {reason} {log_dir()}")


def stop() -> bool:
    """Stop the service and wait for its end, which hooks that run delay. False if it did not run."""
    with _service(_STOP | _QUERY) as service:
        _wait(service, "start pending", _START_TIMEOUT_SECONDS)  # it cannot be stopped before
        try:
            win32service.ControlService(service, win32service.SERVICE_CONTROL_STOP)
        except pywintypes.error as error:
            if error.winerror == _NOT_RUNNING:
                return False
            if error.winerror != _CANNOT_ACCEPT:  # it is stopping already
                raise
        state, _ = _wait(service, "stop pending", _STOP_TIMEOUT_SECONDS)
    if state != "stopped":
        raise HostError(
            f"the service has not stopped within {_STOP_TIMEOUT_SECONDS:.0f}s, and is {state}: see {log_dir()}"
        )
    return True


def reload() -> None:
    """Tell the service to read its policy again; the result is in its journal and its log."""
    with _service(_CHANGE_PARAMETERS) as service:
        win32service.ControlService(service, win32service.SERVICE_CONTROL_PARAMCHANGE)


def register_source(message_file: str = _FRAMEWORK_MESSAGES) -> None:
    """Have the viewer show our entries' text. Needs the rights of an administrator; may be called again.

    ``message_file`` has the texts of the ids; the viewer expands %NAME% in it.
    """
    win32evtlogutil.AddSourceToRegistry(NAME, message_file)


def unregister_source() -> None:
    """Undo ``register_source``; entries that were written stay."""
    win32evtlogutil.RemoveSourceFromRegistry(NAME)


def image_path(options: Sequence[str]) -> str:
    """The command line that hosts the service with the Python that runs now. Raises HostError if there is none.

    ``options`` are those of ``service host``.
    """
    base = getattr(sys, "_base_executable", sys.executable) or sys.executable
    site = sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else None
    return _command_line(base if site else sys.executable, site, ["service", "host", *options])


def options_of(command: str) -> dict[str, str]:
    """The options in the command line of a service, as ``install`` writes it; names are without dashes."""
    found = re.findall(r'(?:^| )(?:"--([\w-]+)=([^"]*)"|--([\w-]+)=(\S*))', command)
    return {quoted or plain: in_quotes or value for quoted, in_quotes, plain, value in found}


def host_options() -> dict[str, str]:
    """The options of the installed service. Raises HostError if there is none."""
    with _service(_QUERY) as service:
        return options_of(str(win32service.QueryServiceConfig(service)[3]))


def need_windows() -> None:
    """Raises HostError on another system."""
    if sys.platform != "win32":
        raise HostError(
            "`service` is for Windows: here systemd runs the agent, as docs/install-other.md says where no "
            "package does it",
            kind="usage",
        )


def _command_line(python: str, site: str | None, arguments: Sequence[str]) -> str:
    r"""Quoted for the SCM, which replaces %NAME% by the variable; ``site``: a venv's site-packages.

    A venv's own python.exe only starts the real one, and the SCM would not accept that process as the service.
    """
    if site is None:
        start = ["-I", "-m", "scheduled_events_agent"]
    else:
        program = (
            "import site; site.addsitedir({!r}); "
            "from scheduled_events_agent.cli import main; raise SystemExit(main())"
        )
        start = ["-I", "-c", program.format(site)]
    for text in (python, *start, *arguments):
        if found := set(text) & set('%"\r\n\0'):
            raise HostError(
                f"{text!r} cannot be part of a service's command line: it contains {min(found)!r}; "
                "use another name or place for it",
                kind="usage",
            )
    # Without quotes, a path with a space would be tried at each of them, and another user may put a program there.
    return f'"{python}" {subprocess.list2cmdline([*start, *arguments])}'


def _check_command() -> None:
    """Raise HostError if the service would not find the agent, as after an installation for one user alone."""
    command = image_path([]).removesuffix(" service host") + " --version"
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[-1]
        raise HostError(
            f"a service could not start the agent from here: {command} says {reason!r}; install it for all users, "
            "best into a venv below %ProgramFiles%",
            kind="install",
        )


def _further_configuration(account: str) -> list[tuple[str, Any]]:
    """Settings of the service that CreateService cannot set: the name of each level, and its value."""
    actions = {
        "ResetPeriod": _FORGET_FAILURES_SECONDS,
        "RebootMsg": "",
        "Command": "",
        "Actions": [(1, seconds * 1000) for seconds in _RESTART_AFTER_SECONDS],  # SC_ACTION_RESTART
    }
    privileges = _SYSTEM_PRIVILEGES if is_system(account) else _PRIVILEGES
    return [
        ("SERVICE_CONFIG_DESCRIPTION", DESCRIPTION),
        ("SERVICE_CONFIG_FAILURE_ACTIONS", actions),
        ("SERVICE_CONFIG_FAILURE_ACTIONS_FLAG", True),  # for a stop with an error too, not only for a crash
        ("SERVICE_CONFIG_DELAYED_AUTO_START_INFO", False),  # an event may come soon after the boot
        ("SERVICE_CONFIG_SERVICE_SID_INFO", 1),  # SERVICE_SID_TYPE_UNRESTRICTED
        ("SERVICE_CONFIG_REQUIRED_PRIVILEGES_INFO", list(privileges)),
        ("SERVICE_CONFIG_PRESHUTDOWN_INFO", int(_PRESHUTDOWN_SECONDS * 1000)),
    ]


def _wait(service: Any, while_state: str, timeout_seconds: float) -> tuple[str, int]:
    """Wait for the end of a state; returns the state then, and the exit code."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        status: Any = win32service.QueryServiceStatus(service)
        state = _STATES[status[1]]
        if state != while_state or time.monotonic() > deadline:
            return state, _own_exit_code(status[3], status[4])
        time.sleep(_POLL_SECONDS)


def _own_exit_code(code: int, own_code: int) -> int:
    return own_code if code == _SPECIFIC_ERROR else code


@contextlib.contextmanager
def _manager(access: int) -> Iterator[Any]:
    """A handle of the SCM. Raises HostError in place of the SCM's errors, also within the block."""
    try:
        handle = win32service.OpenSCManager(None, None, access)
        try:
            yield handle
        finally:
            win32service.CloseServiceHandle(handle)
    except pywintypes.error as error:
        kind = "not_installed" if error.winerror == _NOT_INSTALLED else "service"
        raise HostError(_explain(error.winerror, error.strerror), kind=kind) from None


@contextlib.contextmanager
def _service(rights: int) -> Iterator[Any]:
    """Our service, which must be there, with these rights."""
    need_windows()
    with _manager(win32service.SC_MANAGER_CONNECT) as manager:
        handle = win32service.OpenService(manager, NAME, rights)
        try:
            yield handle
        finally:
            win32service.CloseServiceHandle(handle)


def _explain(code: int, reason: str) -> str:
    """The message for an error of the SCM."""
    return _HINTS.get(code) or f"the service control manager reports an error: {reason.strip()} ({code})"
