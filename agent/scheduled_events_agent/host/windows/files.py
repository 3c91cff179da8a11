"""Windows files: paths, private directories, locks, and which other accounts could change or read a file."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows import permissions

if sys.platform == "win32" or TYPE_CHECKING:
    import msvcrt
    import winreg

    import pywintypes
    import win32api
    import win32con
    import win32file

_LOCK_TIMEOUT_SECONDS = 0.5  # a process that looks for the holder may have it for an instant
_SHARING_VIOLATION = 32
_NOT_FOUND = (2, 3)  # the file, a directory above it
_TEMPORARY_LABEL = "Temporary Storage"  # Azure gives it to that disk, and puts the file into it
_TEMPORARY_WARNING = "DATALOSS_WARNING_README.txt"
_PROFILES = r"SOFTWARE\Microsoft\Windows NT\CurrentVersion\ProfileList"


@contextlib.contextmanager
def private_file(content: bytes) -> Iterator[str]:
    """The path of a file with this content, in a directory of this account alone, while the body runs.

    For a library that reads files only. Raises OSError.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "private")
        file.write_bytes(content)
        yield str(file)


def default_config_path() -> Path:
    """The default path of the policy file."""
    return data_dir() / "policy.yaml"


def default_state_dir() -> Path:
    """The default directory of the state."""
    return data_dir() / "state"


def data_dir() -> Path:
    """The agent's data directory."""
    # %ProgramData% is set from this value. Any user can set the variable for the programs that they start.
    found = registry_value(_PROFILES, "ProgramData")
    parent = win32api.ExpandEnvironmentStrings(str(found)) if found else r"C:\ProgramData"
    return Path(parent, permissions.SERVICE)


def log_dir() -> Path:
    """The directory of the service's logs."""
    return data_dir() / "logs"


def registry_value(key: str, name: str) -> object:
    """A value below HKEY_LOCAL_MACHINE; None if there is none."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as handle:
            return winreg.QueryValueEx(handle, name)[0]
    return None


def cleared_places() -> tuple[Path, ...]:
    """Directories that are emptied at a boot or from time to time."""
    places = [os.environ.get(name) for name in ("TEMP", "TMP")]
    return tuple([Path(place) for place in places if place])


def create_private_dir(path: Path) -> None:
    """Make the directory, for this account (and the system) alone. Raises HostError if others can use it already.

    An administrator also rejects one that others could replace. What exists is not changed. Azure's temporary disk
    is rejected. Missing parents get the system's default access lists; only the agent's own data directory is
    private too.
    """
    hint = "name another directory with agent.state_dir"
    risk: str | None
    try:
        if disk := temporary_disk(path):
            risk = f"{disk} is Azure's temporary disk, which may be empty after an event: {hint}"
        else:
            permissions.make_private_dir(path, data_dir())
            if not path.is_dir():
                risk = f"it is no directory: {hint}"
            else:
                risk = _openness(path)
                if risk is None and is_privileged():
                    risk = find_replacement_risk(path)
    except OSError as error:
        risk = f"{reason_of(error)}: {hint}"
    if risk is not None:
        raise HostError(f"{path}: expected a directory for this account alone; {risk}", kind="state_dir")


def find_privacy_risk(path: Path) -> str | None:
    """Why others could use files in the directory, and what to do; None if they cannot or it does not exist."""
    with contextlib.suppress(OSError):
        return _openness(path)
    return None


def find_wrong_owner(path: Path, user: str | None) -> str | None:
    """None: on Windows ``find_privacy_risk`` names a wrong owner."""
    del path, user
    return None


def find_write_risk(path: Path, user: str | None = None, *, is_own_code: bool = False) -> str | None:
    """The accounts that could change or replace the file and should not, and what to do; None if there are none.

    The system, administrators, this account and the service's may. Accounts that can change the agent's own code
    may too, unless the file is that code (``is_own_code``).
    The file, its directory (also for adding files) and every directory above are checked, also for the targets of
    links. Directories above a directory are checked only for replacing what is in them.
    """
    del user  # start_tree rejects one
    with contextlib.suppress(OSError):
        path.stat()
        for place, others in permissions.accounts_that_may_write(path, is_own_code=is_own_code):
            return (
                f"{place} can be changed by {', '.join(others)}, and the agent acts on what it finds there: "
                f"{permissions.repair_command(place, others)}"
            )
    return None


def find_replacement_risk(path: Path) -> str | None:
    """The accounts that could replace this directory by another one, and what to do; None if none can.

    Adding files beside it does no harm. A directory that does not exist yet is not judged: it gets its own list.
    """
    return find_write_risk(path)


def find_read_risk(path: Path) -> str | None:
    """Why every user of this machine can read the file, and what to do; None if not, or it does not exist.

    Other accounts and groups that an administrator has named may read it.
    """
    with contextlib.suppress(OSError):
        if groups := [account for account in permissions.readers(path) if account in permissions.EVERYONE_GROUPS]:
            whom = " ".join(f"*{account}" for account in groups)
            return (
                f"{path} can be read by {', '.join(groups)}: "
                f'icacls "{path}" /inheritance:d, then icacls "{path}" /remove:g {whom}'
            )
    return None


def is_privileged() -> bool:
    """Whether this process, and so each program that it starts, may do anything on this machine."""
    return permissions.is_administrator()


def temporary_disk(path: Path) -> Path | None:
    """The root of this VM's temporary disk if the path is on it, else None."""
    path = path.absolute()
    label, _ = _volume(path)
    if label == _TEMPORARY_LABEL:
        return Path(path.anchor)
    return next((place for place in (path, *path.parents) if (place / _TEMPORARY_WARNING).exists()), None)


def file_system(path: Path) -> tuple[str, Path] | None:
    """Kind of the file system that the path is on, and its root; None if it is not known."""
    _, kind = _volume(path)
    return (kind, Path(path.absolute().anchor)) if kind else None


def _volume(path: Path) -> tuple[str, str]:
    """Label and file system of the volume that the path is on; empty if the system does not say."""
    anchor = path.absolute().anchor.rstrip("\\/")
    with contextlib.suppress(pywintypes.error):
        facts = win32api.GetVolumeInformation(f"{anchor}\\")
        return str(facts[0]), str(facts[4])
    return "", ""


def find_access_error(path: Path, purpose: Literal["read", "execute", "write"], user: str | None) -> str | None:
    """Why this account cannot use the file or directory so; None if it can.

    Raises HostError for another account: its rights are not known.
    """
    name = "" if user is None else user.rpartition("\\")[2].casefold()
    is_like_us = name in ("", account_name().casefold()) or (name in ("localsystem", "system") and is_privileged())
    if not is_like_us:
        raise HostError(f"cannot tell what {user} may do: run this as that account", kind="access")
    if os.access(path, {"read": os.R_OK, "execute": os.X_OK, "write": os.W_OK}[purpose]):
        return None
    return f"{account_name()} cannot {purpose} {path}"


def account_name() -> str:
    """The account that this process runs as; not from the environment, which any user can set."""
    return str(win32api.GetUserName())


def has_account(name: str) -> bool:
    """Whether this machine has the account; the answer has no use here, as no hook can run as another."""
    return bool(name)


def flush_directory(path: Path) -> None:
    """Do nothing: the file system's journal keeps renames in the directory."""
    del path


def acquire_lock(path: Path) -> IO[bytes]:
    """Take the lock that ``path`` stands for, until the file is closed or the process ends.

    Raises HostError, naming the owner, if another process has it.
    """
    give_up_at = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            # Others may read the pid in it, and no other process may open it for writing.
            handle = _open_locked(path, win32con.GENERIC_WRITE, win32con.CREATE_ALWAYS)
            break
        except pywintypes.error as error:
            if error.winerror != _SHARING_VIOLATION:
                raise HostError(f"{path}: cannot be opened for locking; {reason_of(error)}", kind="lock") from None
        if time.monotonic() >= give_up_at:
            raise HostError(
                f"{path}: another agent (pid {_pid_in(path)}) has locked it; stop it, or give this one another "
                "state_dir",
                kind="locked",
            )
        time.sleep(0.01)
    descriptor = msvcrt.open_osfhandle(handle.Detach(), os.O_NOINHERIT)  # type: ignore[attr-defined,unused-ignore] # Linux
    file = FileIO(descriptor, "wb")
    with contextlib.suppress(OSError):  # on a full disk the owner remains unknown
        file.write(b"%d\n" % os.getpid())
    return file


def lock_owner(path: Path) -> str | None:
    """The pid of the process that has the lock, "unknown" if it left none; None if no process has it.

    Raises HostError if it is not known. Has the file open for an instant, and ``acquire_lock`` waits for that.
    """
    try:
        _open_locked(path, win32con.GENERIC_READ, win32con.OPEN_EXISTING).Close()
    except pywintypes.error as error:
        if error.winerror in _NOT_FOUND:
            return None
        if error.winerror == _SHARING_VIOLATION:
            return _pid_in(path)
        reason = reason_of(error)
        raise HostError(f"{path}: cannot tell which process has this lock; {reason}", kind="lock") from None
    return None


def _open_locked(path: Path, access: int, disposition: int) -> Any:
    return win32file.CreateFile(str(path), access, win32con.FILE_SHARE_READ, None, disposition, 0, None)


def _pid_in(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii").strip() or "unknown"
    return "unknown"


def _openness(path: Path) -> str | None:
    others = permissions.readers(path)
    if not others:
        return None
    command = permissions.repair_command(path, others)
    return (
        f"it is open to {', '.join(others)}: if it is the agent's own, {command}; "
        "else name another directory with agent.state_dir"
    )


def reason_of(error: Exception) -> str:
    """The message of the system for its own error, or for one of pywin32."""
    return str(getattr(error, "strerror", None) or error).strip()
