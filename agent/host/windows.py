"""Windows behind the seam: paths, the boot's identity, locks, and process trees that can be ended whole.

The functions and signatures are those of ``linux.py``, and nothing else is public. Knows nothing of events,
policy or hooks. The one invariant: no text reaches ``cmd`` in a form that it would read as more than one argument.

A tree is a Job object that its program is born into, from which no process can break away, and which ends with
its last handle: so with the agent, however and whenever that ends. Windows has no way to ask a program without a
window to end: to terminate is to kill.

The module can be imported everywhere, for the tests of its command lines; its functions need Windows.
"""

import codecs
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from agent.host.error import HostError
from agent.host.surroundings import Approver, OwnService

__all__ = [
    "HeldLock",
    "ProcessTree",
    "ServiceManager",
    "access_fault",
    "account_name",
    "base_environment",
    "boot_id",
    "can_change_user",
    "can_start_units",
    "claim_port",
    "command_fault",
    "create_private_dir",
    "decode_output",
    "default_config_path",
    "default_state_dir",
    "dhcp_option_245",
    "end_marked",
    "exposure_fault",
    "file_system",
    "find_program",
    "find_systemctl",
    "flush_directory",
    "has_account",
    "has_terminal_colors",
    "hold_lock",
    "is_journal",
    "is_privileged",
    "is_same_boot",
    "is_shutting_down",
    "is_writable",
    "lock_holder",
    "other_approvers",
    "own_service",
    "ownership_fault",
    "privacy_fault",
    "reap_orphans",
    "send_to_journal",
    "start_tree",
    "start_unit",
    "tampering_fault",
    "temporary_disk",
    "unit_fault",
]

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
_LOCK_PATIENCE_SECONDS = 0.5  # whoever only asks who has a lock may have it for an instant
_SM_SHUTTINGDOWN = 0x2000
_SHARING_VIOLATION = 32
_NOT_FOUND = (2, 3)  # the file, a directory above it
_SEPARATORS = "\\/"
# Everybody, who sits at the machine, who has logged in, users, guests.
_CROWDS = frozenset({"S-1-1-0", "S-1-5-4", "S-1-5-11", "S-1-5-32-545", "S-1-5-32-546"})
_TEMPORARY_LABEL = "Temporary Storage"
_TEMPORARY_WARNING = "DATALOSS_WARNING_README.txt"
_INTERFACES = r"SYSTEM\CurrentControlSet\Services\Tcpip\Parameters\Interfaces"
_PROFILES = r"SOFTWARE\Microsoft\Windows NT\CurrentVersion\ProfileList"
_NEEDS_INTERPRETER = {
    ".py": "python.exe",
    ".pyw": "python.exe",
    ".vbs": "cscript.exe",
    ".js": "cscript.exe",
    ".sh": "bash.exe",
    ".pl": "perl.exe",
}
# Quotes, what is expanded, and what ends a line or is no text at all.
_UNSAFE_FOR_CMD = frozenset('"%') | {chr(code) for code in range(32) if chr(code) != "\t"}
_BY_ASSOCIATION = (".py", ".pyw")
_CLASSES = r"SOFTWARE\Classes"
_PLACE = re.compile(r'"%[1Ll]"|%[1Ll]|%\*')
# What a system starts in cmd by itself, whatever the arguments are.
_BATCH = re.compile(r"\.(bat|cmd)\b", re.IGNORECASE)


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

    What is there already is not changed, and Azure's temporary disk is refused. Parents that are missing are made
    as the system makes directories; only the agent's own data directory is private too.
    """
    from agent.host import windows_paths  # noqa: PLC0415 - it imports this module

    way_out = "name another directory with agent.state_dir"
    fault: str | None
    try:
        if disk := temporary_disk(path):
            fault = f"{disk} is Azure's temporary disk, which may be empty after an event: {way_out}"
        else:
            windows_paths.make_private_dir(path)
            is_dir = path.is_dir()
            fault = _openness(path, windows_paths.readers(path)) if is_dir else f"it is no directory: {way_out}"
    except OSError as error:
        fault = f"{_reason(error)}: {way_out}"
    if fault is not None:
        raise HostError(f"{path}: expected a directory for this account alone; {fault}", kind="state_dir")


def privacy_fault(path: Path) -> str | None:
    """Why others could use what is in the directory, and the way out; None if they cannot or it is not there."""
    from agent.host import windows_paths  # noqa: PLC0415 - it imports this module

    try:
        return _openness(path, windows_paths.readers(path))
    except OSError:
        return None


def ownership_fault(path: Path, user: str | None) -> str | None:
    """Whose the directory is, if not the account's, and the way out; here ``privacy_fault`` tells that."""
    del path, user
    return None


def tampering_fault(path: Path, user: str | None = None) -> str | None:
    """Who could change the file, or put another in its place, and should not, and the way out; None if nobody.

    The system, administrators, this account, the service's and whoever can change the agent's own code may. Looked
    at are the file, its directory, in which nobody else should add anything either, and every directory above,
    also of what links lead to.
    """
    from agent.host import windows_paths  # noqa: PLC0415 - it imports this module

    del user  # start_tree refuses one
    try:
        path.stat()
    except OSError:
        return None  # what is not there is nobody's danger
    # Who decides what the agent does, whatever it refuses: nothing is lost by trusting them.
    masters = windows_paths.writers_of_our_code()
    for place, rights in windows_paths.places(path):
        with contextlib.suppress(OSError):
            if others := sorted(set(windows_paths.writers(place, rights)) - masters):
                return (
                    f"{place} can be changed by {', '.join(others)}, and the agent acts on what it finds there: "
                    f"{windows_paths.way_out(place, others)}"
                )
    return None


def exposure_fault(path: Path) -> str | None:
    """That everybody who has an account here can read the file, and the way out; None if not, or it is not there.

    That another account or group of its own can is in order: an administrator has named it.
    """
    from agent.host import windows_paths  # noqa: PLC0415 - it imports this module

    with contextlib.suppress(OSError):
        if crowds := [who for who in windows_paths.readers(path) if who in _CROWDS]:
            whom = " ".join(f"*{who}" for who in crowds)
            return (
                f"{path} can be read by {', '.join(crowds)}: "
                f'icacls "{path}" /inheritance:d, then icacls "{path}" /remove:g {whom}'
            )
    return None


def is_privileged() -> bool:
    """Whether this process may do anything on this machine, and so what it runs may as well."""
    from agent.host import windows_paths  # noqa: PLC0415 - it imports this module

    return windows_paths.is_administrator()


def temporary_disk(path: Path, root: Path = Path("/")) -> Path | None:
    """The root of the temporary disk of this VM that the path is on; None if it is on none.

    Azure gives that disk a label of its own, and puts a warning into it, which somebody may have removed. ``root``
    is Linux's.
    """
    del root
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32api  # noqa: PLC0415 - Windows only

    path = path.absolute()
    with contextlib.suppress(pywintypes.error):
        root = Path(path.anchor)
        if win32api.GetVolumeInformation(f"{str(root).rstrip(_SEPARATORS)}\\")[0] == _TEMPORARY_LABEL:
            return root
    return next((place for place in (path, *path.parents) if (place / _TEMPORARY_WARNING).exists()), None)


def file_system(path: Path, root: Path = Path("/")) -> tuple[str, Path] | None:
    """Kind of the file system that the path is on, and its root; None if it cannot be told."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32api  # noqa: PLC0415 - Windows only

    del root
    place = path.absolute().anchor
    with contextlib.suppress(pywintypes.error):
        return str(win32api.GetVolumeInformation(f"{place.rstrip(_SEPARATORS)}\\")[4]), Path(place)
    return None


def other_approvers(root: Path = Path("/")) -> list[Approver]:
    """Other programs on this machine that approve events, as far as they are known."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32service  # noqa: PLC0415 - Windows only

    from agent.host import surroundings  # noqa: PLC0415 - for a diagnosis only

    services = []
    with contextlib.suppress(pywintypes.error):
        manager = win32service.OpenSCManager(None, None, win32service.SC_MANAGER_ENUMERATE_SERVICE)
        try:
            for name, display, status in win32service.EnumServicesStatus(
                manager, win32service.SERVICE_WIN32, win32service.SERVICE_STATE_ALL
            ):
                services.append((str(name), str(display), status[1] != win32service.SERVICE_STOPPED))
        finally:
            win32service.CloseServiceHandle(manager)
    if root == Path("/"):
        root = Path(f"{os.environ.get('SYSTEMDRIVE', 'C:')}\\")
    return surroundings.windows_approvers(services, root)


def own_service() -> OwnService | None:
    """The agent's service as the service manager has it; None if it has none. Raises HostError if none answers."""
    from agent.host import surroundings, windows_service  # noqa: PLC0415 - it imports this module

    facts = windows_service.query()
    if facts is None:
        return None
    return surroundings.OwnService(
        is_enabled=facts.start == "automatic",
        state=facts.state,
        is_running=facts.state in ("running", "paused"),
        pid=facts.pid,
        account=facts.account,
        is_stale=False,
    )


def access_fault(path: Path, purpose: Literal["execute", "write"], user: str | None) -> str | None:
    """Why this account cannot use the file or directory so; None if it can.

    Raises HostError if that cannot be told, as for any other account.
    """
    name = "" if user is None else user.rpartition("\\")[2].casefold()
    is_like_us = name in ("", account_name().casefold()) or (name in ("localsystem", "system") and is_privileged())
    if not is_like_us:
        raise HostError(f"what {user} may do cannot be told: run this as that account", kind="access")
    if os.access(path, os.X_OK if purpose == "execute" else os.W_OK):
        return None
    return f"{account_name()} cannot {purpose} {path}"


def find_systemctl() -> str:
    """The program that tells the service manager what to do. Raises HostError where there is none."""
    raise HostError(
        "there is no systemd on Windows: use `scheduled-events-agent service install`",
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

    patience_ends = time.monotonic() + _LOCK_PATIENCE_SECONDS
    while True:
        try:
            # Others may read who we are; nobody else may open it for writing.
            handle: Any = win32file.CreateFile(
                str(path), win32con.GENERIC_WRITE, win32con.FILE_SHARE_READ, None, win32con.CREATE_ALWAYS, 0, None
            )
            break
        except pywintypes.error as error:
            if error.winerror != _SHARING_VIOLATION:
                raise HostError(f"{path}: cannot be opened for locking; {_reason(error)}", kind="lock") from None
            if time.monotonic() < patience_ends:
                time.sleep(0.01)
                continue
        holder = "unknown"
        with contextlib.suppress(OSError):
            holder = path.read_text(encoding="ascii").strip() or holder
        raise HostError(
            f"{path}: another agent (pid {holder}) is at work here; stop it, or give this one another state_dir",
            kind="locked",
        )
    with contextlib.suppress(pywintypes.error):  # a full disk takes no number: the next one is told of an unknown
        win32file.WriteFile(handle, b"%d\n" % os.getpid())
    return HeldLock(handle)


def lock_holder(path: Path) -> str | None:
    """The pid of the process that has the lock, "unknown" if it left none; None if nobody has it.

    Raises HostError if that cannot be told. Has the file open for an instant, which ``hold_lock`` sits out.
    """
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32con  # noqa: PLC0415 - Windows only
    import win32file  # noqa: PLC0415 - Windows only

    try:
        handle: Any = win32file.CreateFile(
            str(path), win32con.GENERIC_READ, win32con.FILE_SHARE_READ, None, win32con.OPEN_EXISTING, 0, None
        )
    except pywintypes.error as error:
        if error.winerror in _NOT_FOUND:
            return None
        if error.winerror != _SHARING_VIOLATION:
            raise HostError(f"{path}: who has this lock cannot be told; {_reason(error)}", kind="lock") from None
        with contextlib.suppress(OSError):
            return path.read_text(encoding="ascii").strip() or "unknown"
        return "unknown"
    handle.Close()
    return None


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


def find_program(name: str, cwd: str | None, env: Mapping[str, str]) -> Path | None:
    """The file that a hook's program is, whether it is there or not; None for a name that is not on the PATH."""
    env = {name.upper(): value for name, value in {**base_environment(None), **env}.items()}
    directory = cwd or env.get("SYSTEMDRIVE", "C:") + "\\"
    try:
        return Path(_find_program(name, env, directory))
    except HostError:
        return Path(directory, name) if any(mark in name for mark in "\\/:") else None


def decode_output(data: bytes) -> str:
    """What a program wrote, or a piece of it, as text: UTF-8, UTF-16, else a code page of this system.

    Which of the two code pages, that of consoles or that of windows, is a guess from the letters that come out.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "ignore").removesuffix("\r")
    if data.count(0) * 4 >= len(data) or data[:1] == b"\0" or b"\r\0\n" in data or data.endswith(b"\r\0"):
        return _decode_wide(data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _likelier(data.decode("oem", "replace"), data.decode("mbcs", "replace"))


def _decode_wide(data: bytes) -> str:
    """Little-endian UTF-16 that was cut at the byte of a line feed, or anywhere."""
    if data[::2].count(0) > data[1::2].count(0):
        data = data[1:]
    return data.decode("utf-16-le", "ignore").removesuffix("\r")


def _likelier(one: str, other: str) -> str:
    """The text with more letters in places where letters stand; the first if there is nothing between them."""
    return other if _letters(other) > _letters(one) else one


def _letters(text: str) -> int:
    """Letters outside ASCII, but capitals within words."""
    pairs = zip(f" {text}", text, strict=False)
    return sum(
        character > "\x7f"
        and (character.islower() or character.isupper())
        and character.isalpha()
        and not (character.isupper() and before.islower())
        and unicodedata.category(character) != "Lm"
        for before, character in pairs
    )


class ProcessTree:
    """A program and everything it started. Made by ``start_tree``; end with ``close``."""

    ending: str | None = None
    """A phrase for how it ended, if its exit code does not tell."""

    def __init__(self, process: Any, pid: int, job: Any) -> None:
        self._process = process
        self._pid = pid
        self._job = job

    @property
    def pid(self) -> int:
        return self._pid

    def wait(self) -> int | None:
        """Block until the program ended. Returns its exit code; elsewhere None if it was lost."""
        import win32event  # noqa: PLC0415 - Windows only
        import win32process  # noqa: PLC0415 - Windows only

        win32event.WaitForSingleObject(self._process, win32event.INFINITE)
        return win32process.GetExitCodeProcess(self._process) & 0xFFFFFFFF

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
        self.wait()
        self._process.Close()
        self._job.Close()


def start_tree(
    *,
    run: Sequence[str] | None,
    shell: str | None,
    env: Mapping[str, str],
    cwd: str | None,
    user: str | None,
    stdin: bytes,
    output: int,
    token: str,
) -> ProcessTree:
    """Start the program ``run`` or the command line ``shell``; it writes to the descriptor ``output``.

    ``token`` is a text that no other tree has. Raises HostError, its message a phrase, if it cannot be started.
    """
    if user is not None:
        raise HostError(f"cannot run as {user}: on Windows a hook runs as the agent's account", kind="hook")
    from agent.host.windows_process import start_in_job  # noqa: PLC0415 - of no use before the first hook

    # Names of variables differ in more than case here; what was given last counts.
    env = {name.upper(): value for name, value in env.items()} | {_MARKER: token}
    directory = cwd or env.get("SYSTEMDRIVE", "C:") + "\\"
    command = _shell_command(shell, env) if shell is not None else _program_command(run or (), env, directory)
    job = _new_job()
    try:
        with tempfile.TemporaryFile() as source:
            source.write(stdin)
            source.seek(0)
            process, pid = start_in_job(
                command,
                env=env,
                cwd=directory,
                stdin=_handle_of(source.fileno()),
                output=_handle_of(output),
                job=job,
            )
    except (OSError, ValueError) as error:
        job.Close()
        raise HostError(_why_not_started(run, directory, error), kind="hook") from None
    return ProcessTree(process, pid, job)


def start_unit(name: str, env: Mapping[str, str], stdin: bytes, output: int) -> ProcessTree:
    """Refused: units are systemd's. Raises HostError, its message a phrase."""
    del env, stdin, output
    raise HostError(f"cannot start {name}: a unit needs systemd, so it is for Linux only", kind="hook")


def command_fault(
    run: Sequence[str] | None, shell: str | None, cwd: str | None, env: Mapping[str, str]
) -> str | None:
    """Why ``start_tree`` would refuse to start the program with its arguments; None if it would not."""
    env = {name.upper(): value for name, value in {**base_environment(None), **env}.items()}
    directory = cwd or env.get("SYSTEMDRIVE", "C:") + "\\"
    try:
        if shell is not None:
            _shell_command(shell, env)
        elif run is not None:
            _program_command(run, env, directory)
    except HostError as error:
        return str(error)
    return None


def is_shutting_down() -> bool | None:
    """Whether the machine is on its way down; None if that cannot be told."""
    import win32api  # noqa: PLC0415 - Windows only

    return bool(win32api.GetSystemMetrics(_SM_SHUTTINGDOWN))


def is_journal(descriptor: int) -> bool:
    """Whether what is written there goes to the system's journal; there is none that takes lines."""
    del descriptor
    return False


def send_to_journal(fields: Mapping[str, str], patience_seconds: float) -> bool:
    """Write one entry with fields of its own to the system's journal: there is none that takes them."""
    del fields, patience_seconds
    return False


class ServiceManager:
    """Whoever started this process as a service: nobody. For a service, ``windows_service`` has another."""

    def tell(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """What the service is at now; ``status`` is one line for people."""

    def tell_status(self, status: str) -> None:
        """One line for people."""

    def keep_alive(self) -> None:
        """To be called as long as this process does its work."""


def reap_orphans() -> None:
    """Release processes that lost their parent and ended; here the system does."""


def end_marked(prefix: str) -> int:
    """End what the trees of a killed agent left running: here nothing, for jobs end with their last handle."""
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


def _program_command(run: Sequence[str], env: Mapping[str, str], directory: str = "") -> str:
    """The command line that runs a program or script with its arguments; a relative path is in the directory."""
    if not run or not run[0]:
        raise HostError("nothing to run", kind="hook")
    program = _find_program(run[0], env, directory)
    suffix = os.path.splitext(program)[1].lower()  # noqa: PTH122 - a Windows path, also where this is tested
    if suffix in (".cmd", ".bat"):
        # cmd expands %NAME% even within quotes, ends an argument at a quote, and the line at a line break.
        for index, argument in enumerate((program, *run[1:])):
            if found := set(argument) & _UNSAFE_FOR_CMD:
                what = f"argument {index}" if index else f"the path {program!r}"  # an argument may be secret
                raise HostError(
                    f"cannot pass {what} safely to a {suffix} file: it contains {min(found)!r}; "
                    "use environment variables (env), or a program or PowerShell script",
                    kind="hook",
                )
        quoted = " ".join(f'"{argument}"' for argument in (program, *run[1:]))
        return f'"{_cmd(env)}" /d /v:off /s /c "{quoted}"'
    if suffix == ".ps1":
        powershell = rf"{_system_root(env)}\System32\WindowsPowerShell\v1.0\powershell.exe"
        options = ("-NoLogo", "-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Bypass", "-File")
        return subprocess.list2cmdline([powershell, *options, program, *run[1:]])
    if suffix in _BY_ASSOCIATION and (template := _association(suffix)):
        return _fill(template, program, run[1:])
    if suffix in _NEEDS_INTERPRETER:
        raise HostError(
            f"{program} is no program on Windows: name its interpreter first, "
            f"as in run: [{_NEEDS_INTERPRETER[suffix]}, {program}]",
            kind="hook",
        )
    return subprocess.list2cmdline([program, *run[1:]])


def _openness(path: Path, others: Sequence[str]) -> str | None:
    from agent.host import windows_paths  # noqa: PLC0415 - it imports this module

    if not others:
        return None
    return (
        f"it is open to {', '.join(others)}: if it is the agent's own, {windows_paths.way_out(path, others)}; "
        "else name another directory with agent.state_dir"
    )


def _association(suffix: str) -> str | None:
    """The command line by which this machine (not one of its users) opens such files, with places to fill."""
    if sys.platform != "win32":  # for the type checker, which knows winreg only there
        return None
    import winreg  # noqa: PLC0415 - Windows only

    with contextlib.suppress(OSError):
        kind = winreg.QueryValue(winreg.HKEY_LOCAL_MACHINE, rf"{_CLASSES}\{suffix}")
        template = winreg.QueryValue(winreg.HKEY_LOCAL_MACHINE, rf"{_CLASSES}\{kind}\shell\open\command")
        template = winreg.ExpandEnvironmentStrings(template)
        return None if _BATCH.search(template) else template or None
    return None


def _fill(template: str, program: str, arguments: Sequence[str]) -> str:
    """The template of an association with the program's path and arguments in their places."""
    quoted = subprocess.list2cmdline(arguments)
    parts = {"1": f'"{program}"', "*": quoted}
    line = _PLACE.sub(lambda place: parts["*" if "*" in place[0] else "1"], template)
    return line.strip() if "%*" in template else f"{line} {quoted}".strip()


def _find_program(name: str, env: Mapping[str, str], directory: str) -> str:
    """The file that ``name`` means: as it stands, or from PATH, but never from the current directory."""
    name = name.rstrip(" .")  # as the system does, which would take "x.cmd." for a .cmd file
    suffixes = env.get("PATHEXT", ".COM;.EXE;.BAT;.CMD").lower().split(";")
    suffixes = ["", *suffixes] if os.path.splitext(name)[1] else [*suffixes, ""]  # noqa: PTH122 - a Windows path
    has_directory = any(mark in name for mark in "\\/:")
    if has_directory:
        name = os.path.join(directory, name)  # noqa: PTH118 - a Windows path
    # A relative one on the PATH, such as the empty one, would be wherever the agent happens to be.
    parts = [part.strip('"') for part in env.get("PATH", "").split(";")]
    parts = [part for part in parts if part[1:2] == ":" or part.startswith("\\\\")]
    folders = [""] if has_directory else [f"{part.rstrip(_SEPARATORS)}\\" for part in parts]
    for folder in folders:
        for suffix in suffixes:
            if os.path.isfile(f"{folder}{name}{suffix}"):  # noqa: PTH113 - a Windows path
                return os.path.normpath(f"{folder}{name}{suffix}")  # cmd takes a / for the start of an option
    if has_directory:
        if os.path.isdir(name):  # noqa: PTH112 - a Windows path
            raise HostError(f"a directory, not a program: {name}", kind="hook")
        raise HostError(f"no such file: {name}", kind="hook")
    raise HostError(f"no such program on the PATH {env.get('PATH')}: {name}", kind="hook")


def _new_job() -> Any:
    """A job that ends with its last handle, so with this process at the latest."""
    import pywintypes  # noqa: PLC0415 - Windows only
    import win32job  # noqa: PLC0415 - Windows only

    try:
        job: Any = win32job.CreateJobObject(None, "")  # type: ignore[func-returns-value] # the stub is wrong
        limits = win32job.QueryInformationJobObject(job, win32job.JobObjectExtendedLimitInformation)
        limits["BasicLimitInformation"]["LimitFlags"] = win32job.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
        win32job.SetInformationJobObject(job, win32job.JobObjectExtendedLimitInformation, limits)
    except pywintypes.error as error:
        raise HostError(f"a job object cannot be made: {_reason(error)}", kind="hook") from None
    return job


def _handle_of(descriptor: int) -> int:
    if sys.platform != "win32":  # for the type checker, which knows msvcrt only there
        return descriptor
    import msvcrt  # noqa: PLC0415 - Windows only

    return msvcrt.get_osfhandle(descriptor)


def _why_not_started(run: Sequence[str] | None, cwd: str, error: Exception) -> str:
    if not os.path.isdir(cwd):  # noqa: PTH112 - as given
        return f"no such directory to run in: {cwd}"
    what = f": {run[0]}" if run else ""
    if getattr(error, "winerror", None) == 193:  # ERROR_BAD_EXE_FORMAT
        return f"neither a program nor a .cmd, .bat or .ps1 script{what}"
    return f"cannot be started ({_reason(error)}){what}"


def _program_data() -> Path:
    name = "ScheduledEventsAgent"
    if sys.platform == "win32":  # for the type checker, which knows winreg only there
        import winreg  # noqa: PLC0415 - Windows only

        # Where the variable comes from, which anybody can set for the programs that they start.
        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _PROFILES) as key:
            found, _ = winreg.QueryValueEx(key, "ProgramData")
            return Path(winreg.ExpandEnvironmentStrings(found), name)
    return Path(r"C:\ProgramData", name)


def _system_root(env: Mapping[str, str]) -> str:
    return env.get("SYSTEMROOT", r"C:\Windows")


def _cmd(env: Mapping[str, str]) -> str:
    return rf"{_system_root(env)}\System32\cmd.exe"


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip()
