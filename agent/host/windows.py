"""Windows behind the seam: paths, the boot's identity, locks, and process trees that can be ended whole.

The functions and signatures are those of ``linux.py``, and nothing else is public. Knows nothing of events,
policy or hooks. The one invariant: no text reaches ``cmd`` in a form that it would read as more than one argument.

A tree is a Job object from which no process can break away, and which ends with its last handle: so with the
agent, however that ends. Windows has no way to ask a program without a window to end: to terminate is to kill.

The module can be imported everywhere, for the tests of its command lines; its functions need Windows.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from agent import AgentError

_MARKER = "SCHEDULED_EVENTS_AGENT_HOOK_RUN"
_PASSED_ON = (
    "ALLUSERSPROFILE",
    "APPDATA",
    "COMMONPROGRAMFILES",
    "COMMONPROGRAMFILES(X86)",
    "COMMONPROGRAMW6432",
    "COMPUTERNAME",
    "COMSPEC",
    "HOMEDRIVE",
    "HOMEPATH",
    "LOCALAPPDATA",
    "NUMBER_OF_PROCESSORS",
    "OS",
    "PATH",
    "PATHEXT",
    "PROCESSOR_ARCHITECTURE",
    "PROGRAMDATA",
    "PROGRAMFILES",
    "PROGRAMFILES(X86)",
    "PROGRAMW6432",
    "PSMODULEPATH",
    "PUBLIC",
    "SYSTEMDRIVE",
    "SYSTEMROOT",
    "TEMP",
    "TMP",
    "USERDOMAIN",
    "USERNAME",
    "USERPROFILE",
    "WINDIR",
)
# A clock that is set right moves the boot's computed time; no machine boots twice within this.
_SAME_BOOT_SECONDS = 120.0
# For the system, administrators and this account; not inherited from the parent, which lets everybody in.
_PRIVATE = "D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)(A;OICI;FA;;;{account})"
# The system itself, administrators, and whoever made a file (which must be one of those).
_SYSTEMS_ACCOUNTS = ("S-1-5-18", "S-1-5-32-544", "S-1-3-0", "S-1-3-4")
_SM_SHUTTINGDOWN = 0x2000
_CREATE_SUSPENDED = 0x4
_CREATE_NO_WINDOW = 0x08000000
_SHARING_VIOLATION = 32
_ALREADY_EXISTS = 183
_SEPARATORS = "\\/"
_INTERFACES = r"SYSTEM\CurrentControlSet\Services\Tcpip\Parameters\Interfaces"
_NEEDS_INTERPRETER = {
    ".py": "python.exe",
    ".pyw": "python.exe",
    ".vbs": "cscript.exe",
    ".js": "cscript.exe",
    ".sh": "bash.exe",
    ".pl": "perl.exe",
}


class HostError(AgentError):
    """The system refused something, or something it was expected to have is missing."""


def default_config_path() -> Path:
    """Where the policy file is looked for when nobody says otherwise."""
    return _program_data() / "policy.yaml"


def default_state_dir() -> Path:
    """Where the state is kept when the policy file does not say otherwise."""
    return _program_data() / "state"


def boot_id() -> str:
    """A text that differs from one start of the system to the next; compare with ``is_same_boot``."""
    import psutil  # noqa: PLC0415 - of no use but here

    return f"boot-time {psutil.boot_time():.0f}"


def is_same_boot(one: str, other: str) -> bool:
    """Whether two values of ``boot_id`` name the same start of the system."""
    try:
        return abs(float(one.removeprefix("boot-time ")) - float(other.removeprefix("boot-time "))) < (
            _SAME_BOOT_SECONDS
        )
    except ValueError:
        return False


def dhcp_option_245() -> str | None:
    """The address in DHCP option 245 of any interface that was told it; None if none was."""
    if sys.platform != "win32":  # for the type checker, which knows winreg only there
        return None
    import winreg  # noqa: PLC0415 - Windows only

    from agent.host import dhcp  # noqa: PLC0415 - read at most once, and mostly never

    now = datetime.now(UTC)
    with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _INTERFACES) as interfaces:
        for index in range(winreg.QueryInfoKey(interfaces)[0]):
            with (
                contextlib.suppress(OSError),
                winreg.OpenKey(interfaces, winreg.EnumKey(interfaces, index)) as interface,
            ):
                value, kind = winreg.QueryValueEx(interface, "DhcpInterfaceOptions")
                if kind == winreg.REG_BINARY and (address := dhcp.parse_windows_options(value or b"", now)):
                    return address
    return None


def create_private_dir(path: Path) -> None:
    """Make the directory, for this account (and the system) alone. Raises HostError if others can use it already.

    What is there already is not changed. Parents that are missing are made as the system makes directories.
    """
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32file  # noqa: PLC0415 - Windows only
    import win32security  # noqa: PLC0415 - Windows only

    way_out = "name another directory with agent.state_dir"
    try:
        account = win32security.ConvertSidToStringSid(_own_sid())
        attributes: Any = pywintypes.SECURITY_ATTRIBUTES()
        attributes.SECURITY_DESCRIPTOR = win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(
            _PRIVATE.format(account=account), win32security.SDDL_REVISION_1
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            win32file.CreateDirectory(str(path), attributes)
        except pywintypes.error as error:
            if error.winerror != _ALREADY_EXISTS:
                raise
        if not path.is_dir():
            fault = f"it is no directory: {way_out}"
        elif others := _others_let_in(path, {*_SYSTEMS_ACCOUNTS, account}):
            fault = f"it is open to {', '.join(others)}: if it is the agent's own, see icacls, else {way_out}"
        else:
            return
    except (OSError, pywintypes.error) as error:
        fault = f"{_reason(error)}: {way_out}"
    raise HostError(f"{path}: expected a directory for this account alone; {fault}", kind="state_dir")


def find_systemctl() -> str:
    """The program that tells the service manager what to do. Raises HostError where there is none."""
    raise HostError(
        "there is no systemd on Windows: a service is set up with Windows' own tooling there, which starts "
        "`scheduled-events-agent run`",
        kind="usage",
    )


def flush_directory(path: Path) -> None:
    """Have what was renamed in the directory survive a power cut; here the file system's journal sees to it."""
    del path


class HeldLock:
    """A lock that ends with ``close`` or with the process, whichever comes first."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def close(self) -> None:
        self._handle.Close()


def hold_lock(path: Path) -> HeldLock:
    """Take the lock that ``path`` stands for. Raises HostError, naming the holder, if another process has it."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32file  # noqa: PLC0415 - Windows only

    try:
        # Others may read who we are; nobody else may open it for writing.
        handle: Any = win32file.CreateFile(
            str(path), win32con.GENERIC_WRITE, win32con.FILE_SHARE_READ, None, win32con.CREATE_ALWAYS, 0, None
        )
    except pywintypes.error as error:
        if error.winerror != _SHARING_VIOLATION:
            raise HostError(f"{path}: cannot be opened for locking; {_reason(error)}", kind="lock") from None
        holder = "unknown"
        with contextlib.suppress(OSError):
            holder = path.read_text(encoding="ascii").strip() or holder
        raise HostError(
            f"{path}: another agent (pid {holder}) is at work here; stop it, or give this one another state_dir",
            kind="locked",
        ) from None
    win32file.WriteFile(handle, b"%d\n" % os.getpid())
    return HeldLock(handle)


def has_terminal_colors() -> bool:
    """Whether terminals show the usual colours without more ado."""
    return False


def is_writable(descriptor: int, patience_seconds: float) -> bool:
    """Whether a line can be written without waiting longer than that; this system has no way to ask."""
    del descriptor, patience_seconds
    return True


def claim_port(listener: socket.socket) -> None:
    """Make ``bind`` take a port that a process that has ended left in TIME_WAIT, and none that is in use."""
    # SO_REUSEADDR would share the port with whoever has it already.
    if sys.platform == "win32":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)


def account_name() -> str:
    """The account that this process runs as; not asked of the environment, which anybody can set."""
    import win32api  # noqa: PLC0415 - Windows only

    return str(win32api.GetUserName())


def can_change_user() -> bool:
    """Whether a hook may run as another account, if the agent itself is allowed to."""
    return False


def has_account(name: str) -> bool:
    """Whether this machine knows the account; never asked here, for a hook cannot run as one."""
    return bool(name)


def can_start_units() -> bool:
    """Whether a hook may be a unit of the service manager."""
    return False


def unit_fault(name: str) -> str | None:
    """Why a hook could not start the unit; never asked here, for a hook cannot be one."""
    del name
    return None


def base_environment(user: str | None) -> dict[str, str]:
    """What a hook that runs as ``user`` (None: as the agent) inherits: nothing that only concerns the agent."""
    del user  # start_tree refuses one
    inherited = {name.upper(): value for name, value in os.environ.items()}
    return {name: inherited[name] for name in _PASSED_ON if name in inherited}


def decode_output(data: bytes) -> str:
    """What a program wrote, as text: UTF-8, else in the code page of the console."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("oem", "replace")


class ProcessTree:
    """A program and everything it started. Made by ``start_tree``; end with ``close``."""

    ending: str | None = None
    """A phrase for how it ended, if its exit code does not tell."""

    def __init__(self, process: "subprocess.Popen[bytes]", job: Any) -> None:
        self._process = process
        self._job = job

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int | None:
        """Block until the program ended. Returns its exit code; elsewhere None if it was lost."""
        return self._process.wait()

    def is_empty(self) -> bool:
        """Whether nothing of the tree runs any more."""
        import win32job  # noqa: PLC0415 - Windows only

        facts = win32job.QueryInformationJobObject(self._job, win32job.JobObjectBasicAccountingInformation)
        return bool(facts["ActiveProcesses"] == 0)

    def terminate(self) -> None:
        """End every process of the tree, for none can be asked to."""
        self.kill()

    def kill(self) -> None:
        """End every process of the tree."""
        import pywintypes  # noqa: PLC0415 - Windows only
        import win32job  # noqa: PLC0415 - Windows only

        with contextlib.suppress(pywintypes.error):
            win32job.TerminateJobObject(self._job, 1)

    def close(self) -> None:
        """Let go of it. The program must have ended."""
        self._process.wait()
        self._job.Close()


def start_tree(
    *,
    run: Sequence[str] | None,
    shell: str | None,
    unit: str | None,
    env: Mapping[str, str],
    cwd: str | None,
    user: str | None,
    stdin: bytes,
    output: int,
    token: str,
) -> ProcessTree:
    """Start the program ``run`` or the command line ``shell``; a ``unit`` is refused.

    What it writes comes out at the descriptor ``output``. ``token`` is a text that no other tree has. Raises
    HostError, its message a phrase, if it cannot be started.
    """
    if unit is not None:
        raise HostError(f"cannot start {unit}: a unit needs systemd, so that it is for Linux only", kind="hook")
    if user is not None:
        raise HostError(f"cannot run as {user}: on Windows a hook runs as the agent's account", kind="hook")
    # Names of variables differ in more than case here; what was given last counts.
    env = {name.upper(): value for name, value in env.items()} | {_MARKER: token}
    command = _shell_command(shell, env) if shell is not None else _program_command(run or (), env)
    directory = cwd or env.get("SYSTEMDRIVE", "C:") + "\\"
    try:
        with tempfile.TemporaryFile() as source:
            source.write(stdin)
            source.seek(0)
            process = subprocess.Popen(
                command,
                stdin=source,
                stdout=output,
                stderr=output,
                env=env,
                cwd=directory,
                creationflags=_CREATE_NO_WINDOW | _CREATE_SUSPENDED,
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise HostError(_why_not_started(run, directory, error), kind="hook") from None
    return ProcessTree(process, _put_into_job(process))


def is_shutting_down() -> bool | None:
    """Whether the machine is on its way down; None if that cannot be told."""
    import win32api  # noqa: PLC0415 - Windows only

    return bool(win32api.GetSystemMetrics(_SM_SHUTTINGDOWN))


def is_journal(descriptor: int) -> bool:
    """Whether what is written there goes to the system's journal; there is none that takes lines."""
    del descriptor
    return False


class ServiceManager:
    """Whoever started this process as a service; on Windows nobody listens yet. For any thread."""

    def tell(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """What the service is at now; ``status`` is one line for people."""

    def tell_status(self, status: str) -> None:
        """One line for people."""

    def keep_alive(self) -> None:
        """To be called as long as this process does its work."""


def reap_orphans() -> None:
    """Release processes that lost their parent and ended; here the system does."""


def end_marked(prefix: str) -> int:
    """End what the trees of a killed agent left running; here the system did, when their jobs' handles closed."""
    del prefix
    return 0


def _shell_command(text: str, env: Mapping[str, str]) -> str:
    """The command line that has ``cmd`` run ``text``."""
    text = text.strip()
    if not text:
        raise HostError("nothing to run", kind="hook")
    if "\n" in text or "\r" in text:
        raise HostError(
            "cmd would run only the first of several lines: join them with && or put them into a .cmd file",
            kind="hook",
        )
    return f'"{_cmd(env)}" /d /s /c "{text}"'


def _program_command(run: Sequence[str], env: Mapping[str, str]) -> str:
    """The command line that runs a program or script with its arguments."""
    if not run or not run[0]:
        raise HostError("nothing to run", kind="hook")
    program = _find_program(run[0], env)
    suffix = os.path.splitext(program)[1].lower()  # noqa: PTH122 - a Windows path, also where this is tested
    if suffix in (".cmd", ".bat"):
        # cmd expands %NAME% even within quotes, ends an argument at a quote, and the line at a line break.
        for argument in (program, *run[1:]):
            if found := set(argument) & set('"%\r\n\0'):
                raise HostError(
                    f"cannot pass {argument!r} safely to a {suffix} file: it contains {min(found)!r}; "
                    "use environment variables (env), or a program or PowerShell script",
                    kind="hook",
                )
        quoted = " ".join(f'"{argument}"' for argument in (program, *run[1:]))
        return f'"{_cmd(env)}" /d /v:off /s /c "{quoted}"'
    if suffix == ".ps1":
        powershell = rf"{_system_root(env)}\System32\WindowsPowerShell\v1.0\powershell.exe"
        options = ("-NoLogo", "-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Bypass", "-File")
        return subprocess.list2cmdline([powershell, *options, program, *run[1:]])
    if suffix in _NEEDS_INTERPRETER:
        raise HostError(
            f"{program} is no program on Windows: name its interpreter first, "
            f"as in run: [{_NEEDS_INTERPRETER[suffix]}, {program}]",
            kind="hook",
        )
    return subprocess.list2cmdline([program, *run[1:]])


def _find_program(name: str, env: Mapping[str, str]) -> str:
    """The file that ``name`` means: as it stands, or from PATH, but never from the current directory."""
    suffixes = env.get("PATHEXT", ".COM;.EXE;.BAT;.CMD").lower().split(";")
    suffixes = ["", *suffixes] if os.path.splitext(name)[1] else [*suffixes, ""]  # noqa: PTH122 - a Windows path
    has_directory = any(mark in name for mark in "\\/:")
    folders = (
        [""] if has_directory else [f"{part.rstrip(_SEPARATORS)}\\" for part in env.get("PATH", "").split(";")]
    )
    for folder in folders:
        for suffix in suffixes:
            if os.path.isfile(f"{folder}{name}{suffix}"):  # noqa: PTH113 - a Windows path
                return os.path.normpath(f"{folder}{name}{suffix}")  # cmd takes a / for the start of an option
    if has_directory:
        if os.path.isdir(name):  # noqa: PTH112 - a Windows path
            raise HostError(f"a directory, not a program: {name}", kind="hook")
        raise HostError(f"no such file: {name}", kind="hook")
    raise HostError(f"no such program on the PATH {env.get('PATH')}: {name}", kind="hook")


def _put_into_job(process: "subprocess.Popen[bytes]") -> Any:
    """Let the suspended process go on as the first member of a job of its own."""
    import psutil  # noqa: PLC0415 - heavy, and of no use before the first hook
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32api  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32job  # noqa: PLC0415 - Windows only

    try:
        job: Any = win32job.CreateJobObject(None, "")  # type: ignore[func-returns-value] # the stub is wrong
        limits = win32job.QueryInformationJobObject(job, win32job.JobObjectExtendedLimitInformation)
        limits["BasicLimitInformation"]["LimitFlags"] = win32job.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
        win32job.SetInformationJobObject(job, win32job.JobObjectExtendedLimitInformation, limits)
        handle: Any = win32api.OpenProcess(win32con.PROCESS_ALL_ACCESS, False, process.pid)
        win32job.AssignProcessToJobObject(job, handle)
        handle.Close()
        psutil.Process(process.pid).resume()
    except (pywintypes.error, psutil.Error, OSError) as error:
        process.kill()
        process.wait()
        raise HostError(f"cannot be put into a job object: {_reason(error)}", kind="hook") from None
    return job


def _why_not_started(run: Sequence[str] | None, cwd: str, error: Exception) -> str:
    if not os.path.isdir(cwd):  # noqa: PTH112 - as given
        return f"no such directory to run in: {cwd}"
    what = f": {run[0]}" if run else ""
    if getattr(error, "winerror", None) == 193:  # ERROR_BAD_EXE_FORMAT
        return f"neither a program nor a .cmd, .bat or .ps1 script{what}"
    return f"cannot be started ({_reason(error)}){what}"


def _others_let_in(path: Path, allowed: set[str]) -> list[str]:
    """The identifiers of accounts that own the directory or may do something in it, and are not ``allowed`` to."""
    import win32security  # noqa: PLC0415 - Windows only

    wanted = win32security.OWNER_SECURITY_INFORMATION | win32security.DACL_SECURITY_INFORMATION
    facts: Any = win32security.GetNamedSecurityInfo(str(path), win32security.SE_FILE_OBJECT, wanted)
    dacl = facts.GetSecurityDescriptorDacl()
    if dacl is None:
        return ["everybody"]
    entries = [dacl.GetAce(index) for index in range(dacl.GetAceCount())]
    # ((type, flags), rights, account); those that only files in the directory will inherit count too.
    found = [entry[-1] for entry in entries if entry[0][0] == win32security.ACCESS_ALLOWED_ACE_TYPE]
    names = {win32security.ConvertSidToStringSid(sid) for sid in (facts.GetSecurityDescriptorOwner(), *found)}
    return sorted(names - allowed)


def _own_sid() -> Any:
    import win32api  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32security  # noqa: PLC0415 - Windows only

    token = win32security.OpenProcessToken(win32api.GetCurrentProcess(), win32con.TOKEN_QUERY)
    return win32security.GetTokenInformation(token, win32security.TokenUser)[0]


def _program_data() -> Path:
    return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData"), "ScheduledEventsAgent")


def _system_root(env: Mapping[str, str]) -> str:
    return env.get("SYSTEMROOT", r"C:\Windows")


def _cmd(env: Mapping[str, str]) -> str:
    return rf"{_system_root(env)}\System32\cmd.exe"


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip()
