"""Windows processes: hooks as process trees that can be ended whole.

Invariant: ``cmd`` never gets a text that it would read as more than one argument.

A tree is a Job object, which no process in it can leave. Its program is started suspended and runs only once it is
in the job. A job ends with its last handle, and so with the agent. A program without a window cannot be asked to
end: to terminate is to kill.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from scheduled_events_agent.host.conflicts import UNREADABLE, running_processes
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows.files import reason_of

if sys.platform == "win32" or TYPE_CHECKING:
    import msvcrt

    import pywintypes
    import win32api
    import win32con
    import win32file
    import win32job
    import win32pipe

_MARKER = "SCHEDULED_EVENTS_AGENT_HOOK_RUN"
_PASSED_ON = (
    "ALLUSERSPROFILE", "APPDATA", "COMMONPROGRAMFILES", "COMMONPROGRAMFILES(X86)", "COMMONPROGRAMW6432",
    "COMPUTERNAME", "COMSPEC", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "NUMBER_OF_PROCESSORS", "OS", "PATH",
    "KUBERNETES_NODE", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT",
    "PATHEXT", "PROCESSOR_ARCHITECTURE", "PROGRAMDATA", "PROGRAMFILES", "PROGRAMFILES(X86)", "PROGRAMW6432",
    "PSMODULEPATH", "PUBLIC", "SYSTEMDRIVE", "SYSTEMROOT", "TEMP", "TMP", "USERDOMAIN", "USERNAME",
    "USERPROFILE", "WINDIR",
)  # fmt: skip
_CREATE_SUSPENDED = 0x4
_CREATE_NO_WINDOW = 0x8000000
_BAD_EXE_FORMAT = 193
_SEPARATORS = "\\/"
# To the system, the size of a pipe's buffer is a suggestion.
_PIPE_RESERVE_BYTES = 4096
_NEEDS_INTERPRETER = {
    ".py": "python.exe",
    ".pyw": "python.exe",
    ".vbs": "cscript.exe",
    ".js": "cscript.exe",
    ".sh": "bash.exe",
    ".pl": "perl.exe",
}
# Quotes, signs that cmd expands, and characters that end a line or are no text.
_UNSAFE_FOR_CMD = frozenset('"%') | {chr(code) for code in range(32) if chr(code) != "\t"}


class ProcessTree:
    """A program and everything it started. Made by ``start_tree``; end with ``close``."""

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
        facts = win32job.QueryInformationJobObject(self._job, win32job.JobObjectBasicAccountingInformation)
        return bool(facts["ActiveProcesses"] == 0)

    def terminate(self) -> None:
        """End every process of the tree: none of them can be asked to end."""
        self.kill()

    def kill(self) -> None:
        """End every process of the tree."""
        with contextlib.suppress(pywintypes.error):
            win32job.TerminateJobObject(self._job, 1)

    def close(self) -> None:
        """Wait for the program's end and release it, and end what else is left of the tree."""
        self.wait()
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
    env = _upper(env) | {_MARKER: token}
    directory = cwd or _system_drive(env)
    command = _shell_command(shell, env) if shell is not None else _program_command(run or (), env, directory)
    job = _new_job()
    try:
        with _open_pipe_of(stdin) as source:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=directory,
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                creationflags=_CREATE_NO_WINDOW | _CREATE_SUSPENDED,
            )
        _let_run_in(job, process)
    except (OSError, ValueError, pywintypes.error, psutil.Error) as error:
        job.Close()
        raise HostError(_why_not_started(run, directory, error), kind="hook") from None
    return ProcessTree(process, job)


def _open_pipe_of(data: bytes) -> FileIO:
    """The reading end of a pipe that holds all of the data. Raises pywintypes.error.

    A pipe needs no disk: a hook starts on a full disk too.
    """
    reader: Any
    writer: Any
    size = len(data) + _PIPE_RESERVE_BYTES
    reader, writer = win32pipe.CreatePipe(None, size)  # type: ignore[arg-type] # the stub is wrong
    try:
        win32file.WriteFile(writer, data)  # does not wait for a reader: the buffer is large enough
    finally:
        writer.Close()
    handle = reader.Detach()
    return FileIO(msvcrt.open_osfhandle(handle, os.O_RDONLY))  # type: ignore[attr-defined,unused-ignore] # Linux


def _new_job() -> Any:
    """A new job. It ends with its last handle, so with this process at the latest."""
    try:
        job: Any = win32job.CreateJobObject(None, "")  # type: ignore[func-returns-value] # the stub is wrong
        limits = win32job.QueryInformationJobObject(job, win32job.JobObjectExtendedLimitInformation)
        limits["BasicLimitInformation"]["LimitFlags"] = win32job.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
        win32job.SetInformationJobObject(job, win32job.JobObjectExtendedLimitInformation, limits)
    except pywintypes.error as error:
        raise HostError(f"a job object cannot be made: {reason_of(error)}", kind="hook") from None
    return job


def _let_run_in(job: Any, process: "subprocess.Popen[bytes]") -> None:
    """Put the suspended program into the job and let it run. Raises pywintypes.error or psutil.Error."""
    try:
        rights = win32con.PROCESS_SET_QUOTA | win32con.PROCESS_TERMINATE
        handle: Any = win32api.OpenProcess(rights, False, process.pid)
        win32job.AssignProcessToJobObject(job, handle)
        handle.Close()
        psutil.Process(process.pid).resume()
    except BaseException:
        process.kill()
        process.wait()
        raise


def find_command_error(
    run: Sequence[str] | None, shell: str | None, cwd: str | None, env: Mapping[str, str]
) -> str | None:
    """Why ``start_tree`` would reject the program with its arguments; None if it would not."""
    env = base_environment(None) | _upper(env)
    try:
        if shell is not None:
            _shell_command(shell, env)
        elif run is not None:
            _program_command(run, env, cwd or _system_drive(env))
    except HostError as error:
        return str(error)
    return None


def base_environment(user: str | None) -> dict[str, str]:
    """The environment for a hook that runs as ``user`` (None: as the agent), without the agent's own variables."""
    del user  # start_tree rejects one
    inherited = _upper(os.environ)
    return {name: inherited[name] for name in _PASSED_ON if name in inherited}


def find_program(name: str, cwd: str | None, env: Mapping[str, str]) -> Path | None:
    """The file that a hook's program is, whether it is there or not; None for a name that is not on the PATH."""
    env = base_environment(None) | _upper(env)
    directory = cwd or _system_drive(env)
    try:
        return Path(_find_program(name, env, directory))
    except HostError:
        return Path(directory, name) if any(mark in name for mark in "\\/:") else None


def decode_output(data: bytes) -> str:
    """Output of a program, or a piece of it, as text: UTF-8, else in the console's code page."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("oem", "replace")


def become_subreaper() -> None:
    """Do nothing: a job keeps a tree together."""


def reap_zombies() -> None:
    """Do nothing: the system releases processes that have ended."""


def kill_leftovers(prefix: str) -> int:
    """End the programs that a killed agent had started and not yet put into a job; returns their number.

    Such a program is still suspended. These are the trees whose token begins with ``prefix``.
    """
    found = [process for process in running_processes() if _token_of(process).startswith(prefix)]
    for process in found:
        with contextlib.suppress(*UNREADABLE):
            process.kill()
    return len(found)


def _token_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(_MARKER, "")
    except UNREADABLE:
        return ""


def _upper(env: Mapping[str, str]) -> dict[str, str]:
    """The variables, each name once whatever its case, as Windows has them; the last value counts."""
    return {name.upper(): value for name, value in env.items()}


def _system_drive(env: Mapping[str, str]) -> str:
    return env.get("SYSTEMDRIVE", "C:") + "\\"


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
        return _batch_command([program, *run[1:]], suffix, env)
    if suffix == ".ps1":
        powershell = rf"{_system_root(env)}\System32\WindowsPowerShell\v1.0\powershell.exe"
        options = ("-NoLogo", "-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Bypass", "-File")
        return subprocess.list2cmdline([powershell, *options, program, *run[1:]])
    launcher = rf"{_system_root(env)}\py.exe"  # which Python brings if it is installed for all users
    if suffix in (".py", ".pyw") and os.path.isfile(launcher):  # noqa: PTH113 - a Windows path
        return subprocess.list2cmdline([launcher, program, *run[1:]])
    if suffix in _NEEDS_INTERPRETER:
        raise HostError(
            f"{program} is no program on Windows: name its interpreter first, "
            f"as in run: [{_NEEDS_INTERPRETER[suffix]}, {program}]",
            kind="hook",
        )
    return subprocess.list2cmdline([program, *run[1:]])


def _batch_command(words: Sequence[str], suffix: str, env: Mapping[str, str]) -> str:
    # cmd expands %NAME% even within quotes, ends an argument at a quote, and the line at a line break.
    for index, word in enumerate(words):
        if found := set(word) & _UNSAFE_FOR_CMD:
            what = f"argument {index}" if index else f"the path {word!r}"  # an argument may be secret
            raise HostError(
                f"cannot pass {what} safely to a {suffix} file: it contains {min(found)!r}; "
                "use environment variables (env), or a program or PowerShell script",
                kind="hook",
            )
    quoted = " ".join(f'"{word}"' for word in words)
    return f'"{_cmd(env)}" /d /v:off /s /c "{quoted}"'


def _find_program(name: str, env: Mapping[str, str], directory: str) -> str:
    """The file that ``name`` means: as it stands, or from PATH, but never from the current directory."""
    name = name.rstrip(" .")  # as the system does: to it, "x.cmd." is a .cmd file
    suffixes = env.get("PATHEXT", ".COM;.EXE;.BAT;.CMD").lower().split(";")
    suffixes = ["", *suffixes] if os.path.splitext(name)[1] else [*suffixes, ""]  # noqa: PTH122 - a Windows path
    has_directory = any(mark in name for mark in "\\/:")
    if has_directory:
        name = os.path.join(directory, name)  # noqa: PTH118 - a Windows path
    # A relative one on the PATH, such as the empty one, would be in the agent's current directory.
    parts = [part.strip('"') for part in env.get("PATH", "").split(";")]
    parts = [part for part in parts if part[1:2] == ":" or part.startswith("\\\\")]
    folders = [""] if has_directory else [f"{part.rstrip(_SEPARATORS)}\\" for part in parts]
    for folder in folders:
        for suffix in suffixes:
            if os.path.isfile(f"{folder}{name}{suffix}"):  # noqa: PTH113 - a Windows path
                return os.path.normpath(f"{folder}{name}{suffix}")  # cmd reads a / as the start of an option
    if has_directory:
        if os.path.isdir(name):  # noqa: PTH112 - a Windows path
            raise HostError(f"a directory, not a program: {name}", kind="hook")
        raise HostError(f"no such file: {name}", kind="hook")
    raise HostError(f"no such program on the PATH {env.get('PATH')}: {name}", kind="hook")


def _why_not_started(run: Sequence[str] | None, cwd: str, error: Exception) -> str:
    if not os.path.isdir(cwd):  # noqa: PTH112 - as given
        return f"no such directory to run in: {cwd}"
    what = f": {run[0]}" if run else ""
    if getattr(error, "winerror", None) == _BAD_EXE_FORMAT:
        return f"neither a program nor a .cmd, .bat or .ps1 script{what}"
    return f"cannot be started ({reason_of(error)}){what}"


def _system_root(env: Mapping[str, str]) -> str:
    return env.get("SYSTEMROOT", r"C:\Windows")


def _cmd(env: Mapping[str, str]) -> str:
    return rf"{_system_root(env)}\System32\cmd.exe"
