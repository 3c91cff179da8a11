"""Linux files: private directories, locks, and checks which other accounts could change, read or use a file."""

import fcntl
import grp
import os
import pwd
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from scheduled_events_agent.host.error import HostError

if sys.platform == "win32":
    raise ImportError("scheduled_events_agent.host.linux is for Linux; import scheduled_events_agent.host instead")

_LOCK_TIMEOUT_SECONDS = 0.5  # lock_owner may have the lock for an instant


@contextmanager
def private_file(content: bytes) -> Iterator[str]:
    """The path of a file with this content, in memory and of this process alone, while the body runs.

    For a library that reads files only. Raises OSError.
    """
    descriptor = os.memfd_create("private")
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{descriptor}"


def default_config_path() -> Path:
    """The default path of the policy file."""
    return Path("/etc/scheduled-events-agent/policy.yaml")


def default_state_dir() -> Path:
    """The default directory of the state."""
    return Path("/var/lib/scheduled-events-agent")


def cleared_places() -> tuple[Path, ...]:
    """Directories that are emptied at a boot or from time to time."""
    return Path(os.environ.get("TMPDIR") or "/tmp"), Path("/run"), Path("/var/run"), Path("/dev/shm")  # noqa: S108


def create_private_dir(path: Path) -> None:
    """Make the directory, for this account (and root) alone. Raises HostError if others can use it already.

    Root also rejects one that others could replace. What exists is not changed. Missing parents are created, and
    others cannot write to them.
    """
    hint = "name another directory with agent.state_dir"
    risk = find_replacement_risk(path) if is_privileged() else None  # before anything is put into such a place
    try:
        if risk is None:
            _make_with_parents(path)
            risk = find_wrong_owner(path, None) or find_privacy_risk(path)
            if not path.is_dir():
                risk = f"it is no directory: {hint}"
            elif risk is None:
                return
        risk = risk if risk.endswith(hint) else f"{risk}; else {hint}"
    except OSError as error:
        risk = f"{error.strerror or error}: {hint}"
    raise HostError(f"{path}: expected a directory for this account alone; {risk}", kind="state_dir")


def _make_with_parents(path: Path) -> None:
    for parent in reversed(path.absolute().parents):
        if not parent.exists():
            with suppress(FileExistsError):
                parent.mkdir(mode=0o755)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def find_privacy_risk(path: Path) -> str | None:
    """Why others could use files in the directory, and what to do; None if they cannot or it does not exist."""
    with suppress(OSError):
        if path.stat().st_mode & 0o077:
            return f"it is open to others: if it is the agent's own, chmod 700 {path}"
    return None


def find_wrong_owner(path: Path, user: str | None) -> str | None:
    """The owner of the directory if neither the account (None: this one) nor root owns it, and what to do."""
    with suppress(OSError, KeyError):
        owner = path.stat().st_uid
        who = user or account_name()
        if owner not in (0, os.geteuid() if user is None else pwd.getpwnam(user).pw_uid):
            return f"it belongs to uid {owner}: if it is the agent's own, chown -R {who} {path}"
    return None


def find_write_risk(path: Path, user: str | None = None, *, is_own_code: bool = False) -> str | None:
    """Which other accounts could change the file or replace it, and what to do; None if none can.

    Root, this account, ``user`` and the owner of the agent's own code may. If the file is that code
    (``is_own_code``), its owner may not. The file and every directory above it are checked, and the targets of
    symbolic links in the same way.
    """
    risk = _find_risk_on_path(path, _trusted(None, is_own_code=is_own_code))
    if risk and user is not None:  # looking up an account may take long
        with suppress(KeyError, ValueError):  # start_tree rejects an unknown one
            uid = pwd.getpwnam(user).pw_uid
            risk = _find_risk_on_path(path, _trusted(uid, is_own_code=is_own_code))
    return risk


def find_replacement_risk(path: Path) -> str | None:
    """Which other accounts could replace this directory by another one, and what to do; None if none can.

    Its owner may. If it is not there yet, the nearest directory above it counts.
    """
    owner = None
    with suppress(OSError):
        owner = path.stat().st_uid
    trusted = _trusted(owner, is_own_code=False)
    whole = path.absolute()
    for place in (whole, *whole.parents):
        with suppress(OSError):
            place.stat()
            return _find_risk_on_path(place, trusted)
    return None


def find_read_risk(path: Path) -> str | None:
    """Why every account can read the file, and what to do; None if not, or it does not exist.

    A group may read it: Debian's ssl-cert exists for that, and root decides who is in a group.
    """
    with suppress(OSError):
        path = Path(os.path.realpath(path))
        can_reach = all(place.stat().st_mode & stat.S_IXOTH for place in path.parents)
        if can_reach and path.stat().st_mode & stat.S_IROTH:
            return f"{path} can be read by every account: chmod o-r {path}"
    return None


def flush_directory(path: Path) -> None:
    """Make renames in the directory survive a power cut, if its file system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def acquire_lock(path: Path) -> IO[bytes]:
    """Take the lock of this path, until the file is closed or the process ends.

    Raises HostError, naming the owner, if another process has it.
    """
    give_up_at = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    except OSError as error:
        raise HostError(f"{path}: cannot be opened for locking; {error.strerror}", kind="lock") from None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < give_up_at:
                time.sleep(0.01)
                continue
        except OSError as error:
            file.close()
            text = f"{path}: cannot be locked ({error.strerror}); state needs a local disk"
            raise HostError(text, kind="lock") from None
        owner = file.read(20).decode("ascii", "replace").strip() or "unknown"
        file.close()
        raise HostError(
            f"{path}: another agent (pid {owner}) has locked it; stop it, or give this one another state_dir",
            kind="locked",
        )
    with suppress(OSError):  # the disk is full: the owner is then "unknown"
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), b"%d\n" % os.getpid(), 0)
    return file


def lock_owner(path: Path) -> str | None:
    """The pid of the process that has the lock, "unknown" if it left none; None if the lock is free.

    Raises HostError if it is not known. It shares the lock for an instant, which ``acquire_lock`` waits for.
    """
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(20).decode("ascii", "replace").strip() or "unknown"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise HostError(
            f"{path}: cannot tell which process has this lock; {error.strerror}", kind="lock"
        ) from None
    return None


def is_privileged() -> bool:
    """Whether this process, and so each program that it starts, may do anything on this machine."""
    return os.geteuid() == 0


def account_name() -> str:
    """The account that this process runs as, whatever the environment says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def has_account(name: str) -> bool:
    """Whether this machine knows the account."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


class _Trusted(NamedTuple):
    users: frozenset[int]
    groups: frozenset[int]


def _trusted(further: int | None, *, is_own_code: bool) -> _Trusted:
    users = {0, os.geteuid()}
    if not is_own_code:  # its owner can change what the agent does anyway
        users.add(Path(__file__).stat().st_uid)
    if further is not None:
        users.add(further)
    groups = {0}
    for uid in users - {0}:
        with suppress(KeyError):
            entry = pwd.getpwuid(uid)
            if grp.getgrgid(entry.pw_gid).gr_name == entry.pw_name:  # the user's own group
                groups.add(entry.pw_gid)
    return _Trusted(frozenset(users), frozenset(groups))


def _find_risk_on_path(path: Path, trusted: _Trusted) -> str | None:
    try:
        path.stat()
    except OSError:
        return None  # it is not there, or is a circle of links
    try:
        for place, facts in _places(path.absolute()):
            risk = _who_may_change(place, facts, trusted)
            if risk:
                who, hint = risk
                return f"{place} can be changed by {who}, and the agent acts on what it finds there: {hint}"
    except OSError as error:  # it is changing just now
        return f"cannot tell who could change {path} ({error.strerror}): try again"
    return None


def _places(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each file, directory and link on the way to the path, which exists."""
    todo = [path]
    seen = set[Path]()
    while todo:
        path = todo.pop()
        for place in (path, *path.parents):
            if place not in seen:
                seen.add(place)
                facts = place.lstat()
                if stat.S_ISLNK(facts.st_mode):
                    todo.append(place.parent / place.readlink())
                yield place, facts


def _who_may_change(place: Path, facts: os.stat_result, trusted: _Trusted) -> tuple[str, str] | None:
    """Which other accounts could change the file or directory, and the command that prevents it."""
    if facts.st_uid not in trusted.users:
        chown = "chown -h" if stat.S_ISLNK(facts.st_mode) else "chown"
        return f"its owner, uid {facts.st_uid}", f"{chown} root {place}"
    if stat.S_ISLNK(facts.st_mode):
        return None  # it has no mode of its own
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX:
        return None  # only a file's owner can replace it, and each owner is looked at
    if not facts.st_mode & 0o022 or os.statvfs(place).f_flag & os.ST_RDONLY:
        return None
    if facts.st_mode & 0o002:
        return "every account", f"chmod go-w {place}"
    if facts.st_gid not in trusted.groups:
        return f"the group {facts.st_gid}", f"chmod go-w {place}"
    with suppress(OSError):  # a file system without access lists
        if "system.posix_acl_access" in os.listxattr(place):  # the group's bits are its mask then
            return "accounts in its access list", f"setfacl -b {place} && chmod go-w {place}"
    return None
