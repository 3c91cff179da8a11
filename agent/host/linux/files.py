"""Linux files: private directories, locks, and who else could change, read or use a file.

Knows nothing of events, policy or hooks.
"""

import fcntl
import grp
import os
import pwd
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, NamedTuple

from agent.host import surroundings
from agent.host.error import HostError
from agent.host.linux.process import identity_of

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

__all__ = [
    "HeldLock",
    "access_fault",
    "account_name",
    "can_change_user",
    "create_private_dir",
    "default_config_path",
    "default_state_dir",
    "exposure_fault",
    "file_system",
    "flush_directory",
    "has_account",
    "hold_lock",
    "is_privileged",
    "lock_holder",
    "ownership_fault",
    "privacy_fault",
    "tampering_fault",
    "temporary_disk",
]

_LOCK_PATIENCE_SECONDS = 0.5  # whoever only asks who has a lock may have it for an instant
_TEMPORARY_WARNING = "DATALOSS_WARNING_README.txt"  # Azure puts it into the root of that disk


def default_config_path() -> Path:
    """Where the policy file is looked for when nobody says otherwise."""
    return Path("/etc/scheduled-events-agent/policy.yaml")


def default_state_dir() -> Path:
    """Where the state is kept when the policy file does not say otherwise."""
    return Path("/var/lib/scheduled-events-agent")


def create_private_dir(path: Path) -> None:
    """Make the directory, for this account (and root) alone. Raises HostError if others can use it already.

    What is there already is not changed. Parents that are missing are made so that nobody else can write them.
    """
    way_out = "name another directory with agent.state_dir"
    try:
        for parent in reversed(path.absolute().parents):
            if not parent.exists():
                with suppress(FileExistsError):
                    parent.mkdir(mode=0o755)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        facts = path.stat()
        if not stat.S_ISDIR(facts.st_mode):
            fault = f"it is no directory: {way_out}"
        elif facts.st_uid not in (0, os.geteuid()):
            fault = f"it belongs to uid {facts.st_uid}: {way_out}"
        elif facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            fault = f"its mode is {mode:04o}: if it is the agent's own, chmod 700 {path}, else {way_out}"
        else:
            return
    except OSError as error:
        fault = f"{error.strerror or error}: {way_out}"
    raise HostError(f"{path}: expected a directory for this account alone; {fault}", kind="state_dir")


def privacy_fault(path: Path) -> str | None:
    """Why others could use what is in the directory, and the way out; None if they cannot or it is not there."""
    with suppress(OSError):
        if path.stat().st_mode & 0o077:
            return f"it is open to others: if it is the agent's own, chmod 700 {path}"
    return None


def ownership_fault(path: Path, user: str | None) -> str | None:
    """Whose the directory is, if not the account's (None: this one) or root's, and the way out."""
    with suppress(OSError, KeyError):
        owner, who = path.stat().st_uid, user or account_name()
        if owner not in (0, os.geteuid() if user is None else pwd.getpwnam(user).pw_uid):
            return f"it belongs to uid {owner}: if it is the agent's own, chown -R {who} {path}"
    return None


def tampering_fault(path: Path, user: str | None = None) -> str | None:
    """Who could change the file, or put another in its place, and should not, and the way out; None if nobody.

    Root, this account, ``user`` and whoever owns the agent's own code may. Looked at are the file, every directory
    above it, and the same of what symbolic links lead to.
    """
    try:
        path.stat()
    except OSError:
        return None  # what is not there, or leads round in a circle, is nobody's danger
    trusted = _trusted(None)
    try:
        for place, facts in _places(path.absolute()):
            fault = _who_may_change(place, facts, trusted)
            if fault and user is not None:  # asking for an account may take long, and is mostly not needed
                trusted, user = _trusted(user), None
                fault = _who_may_change(place, facts, trusted)
            if fault:
                who, way_out = fault
                return f"{place} can be changed by {who}, and the agent acts on what it finds there: {way_out}"
    except OSError as error:  # somebody is at work there
        return f"nobody can tell who could change {path} ({error.strerror}): try again when it is left alone"
    return None


def exposure_fault(path: Path) -> str | None:
    """That everybody can read the file, and the way out; None if not, or it is not there.

    That a group can is in order: Debian's ssl-cert is there for just that, and who is in one was decided by root.
    """
    with suppress(OSError):
        path = Path(os.path.realpath(path))
        can_reach = all(place.stat().st_mode & stat.S_IXOTH for place in path.parents)
        if can_reach and path.stat().st_mode & stat.S_IROTH:
            return f"{path} can be read by everybody: chmod o-r {path}"
    return None


def access_fault(path: Path, purpose: Literal["execute", "write"], user: str | None) -> str | None:
    """Why the account (None: this one) cannot use the file or directory so; None if it can.

    Raises HostError if that cannot be told, or no such account can be.
    """
    if user is not None and user != account_name() and os.geteuid() != 0:
        raise HostError(f"only root can tell what {user} may do", kind="access")
    uid, gid, groups = identity_of(user)
    places = [*reversed(path.absolute().parents), path.absolute()]
    for place in places:
        wanted = [("-x", os.X_OK)] if place != path.absolute() or purpose == "execute" else [("-w", os.W_OK)]
        if purpose == "write" and place == path.absolute() and place.is_dir():
            wanted.append(("-x", os.X_OK))
        for option, mode in wanted:
            if uid is None:
                may = os.access(place, mode)
            else:  # by who may be asked, for it knows access lists and how the file system is mounted
                try:
                    may = not subprocess.run(
                        ["/usr/bin/test", option, str(place)],
                        user=uid,
                        group=gid,
                        extra_groups=groups,
                        env={},
                        cwd="/",
                        check=False,
                    ).returncode
                except (OSError, subprocess.SubprocessError) as error:
                    raise HostError(f"cannot ask as {user}: {error}", kind="access") from None
            if not may:
                who = user or account_name()
                if place != path.absolute():
                    return f"{who} cannot pass through {place}"
                return f"{who} cannot {purpose} {path}"
    return None


def temporary_disk(path: Path, root: Path = Path("/")) -> Path | None:
    """The root of the temporary disk of this VM that the path is on; None if it is on none that is known.

    Told by the warning that Azure puts into it, by its device, or by who mounted it: see ``surroundings``.
    """
    path = Path(os.path.realpath(path))
    for place in (path, *path.parents):
        if (root / str(place)[1:] / _TEMPORARY_WARNING).exists():
            return place
    mount = surroundings.mount_of(path, root)
    return Path(mount.place) if mount is not None and surroundings.is_temporary(mount, root) else None


def file_system(path: Path, root: Path = Path("/")) -> tuple[str, Path] | None:
    """Kind of the file system that the path is on, and where that is mounted; None if it cannot be told."""
    mount = surroundings.mount_of(Path(os.path.realpath(path)), root)
    return None if mount is None else (mount.kind, Path(mount.place))


def flush_directory(path: Path) -> None:
    """Have what was renamed in the directory survive a power cut, if its file system can promise that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class HeldLock:
    """A lock that ends with ``close`` or with the process, whichever comes first."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()


def hold_lock(path: Path) -> HeldLock:
    """Take the lock that ``path`` stands for. Raises HostError, naming the holder, if another process has it."""
    patience_ends = time.monotonic() + _LOCK_PATIENCE_SECONDS
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    except OSError as error:
        raise HostError(f"{path}: cannot be opened for locking; {error.strerror}", kind="lock") from None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() < patience_ends:
                time.sleep(0.01)
                continue
        holder = file.read(20).decode("ascii", "replace").strip() or "unknown"
        file.close()
        raise HostError(
            f"{path}: another agent (pid {holder}) is at work here; stop it, or give this one another state_dir",
            kind="locked",
        )
    with suppress(OSError):  # a full disk takes no number: the next one is then told of an unknown holder
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), b"%d\n" % os.getpid(), 0)
    return HeldLock(file)


def lock_holder(path: Path) -> str | None:
    """The pid of the process that has the lock, "unknown" if it left none; None if nobody has it.

    Raises HostError if that cannot be told. Shares the lock for an instant, which ``hold_lock`` sits out. (Who has
    it stands in /proc as well, but not for who looks from another container.)
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
        raise HostError(f"{path}: who has this lock cannot be told; {error.strerror}", kind="lock") from None
    return None


def is_privileged() -> bool:
    """Whether this process may do anything on this machine, and so what it runs may as well."""
    return os.geteuid() == 0


def account_name() -> str:
    """The account that this process runs as; not asked of the environment, which anybody can set."""
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


def can_change_user() -> bool:
    """Whether a hook may run as another account, if the agent itself is allowed to."""
    return True


class _Trusted(NamedTuple):
    users: frozenset[int]
    groups: frozenset[int]


def _trusted(user: str | None) -> _Trusted:
    # Who owns the agent's own code decides what it does, whatever we refuse: nothing is lost by trusting them.
    users = {0, os.geteuid(), Path(__file__).stat().st_uid}
    if user is not None:
        with suppress(KeyError, ValueError):  # start_tree refuses an unknown one
            users.add(pwd.getpwnam(user).pw_uid)
    groups = {0}
    for uid in users - {0}:
        with suppress(KeyError):
            entry = pwd.getpwuid(uid)
            if grp.getgrgid(entry.pw_gid).gr_name == entry.pw_name:  # a group of one's own, and of nobody else
                groups.add(entry.pw_gid)
    return _Trusted(frozenset(users), frozenset(groups))


def _places(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Whatever somebody would have to change to have the path, which exists, mean something else."""
    todo, seen = [path], set[Path]()
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
    """Who could, and the command that ends it."""
    if facts.st_uid not in trusted.users:
        return (
            f"its owner, uid {facts.st_uid}",
            f"chown {'-h ' if stat.S_ISLNK(facts.st_mode) else ''}root {place}",
        )
    if stat.S_ISLNK(facts.st_mode):
        return None  # it has no mode of its own
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX:
        return None  # only its owner can put something else in a file's place, and each file's owner is looked at
    if not facts.st_mode & 0o022 or os.statvfs(place).f_flag & os.ST_RDONLY:
        return None
    if facts.st_mode & 0o002:
        return "everybody", f"chmod go-w {place}"
    if facts.st_gid not in trusted.groups:
        return f"the group {facts.st_gid}", f"chmod go-w {place}"
    with suppress(OSError):  # a file system without access lists
        if "system.posix_acl_access" in os.listxattr(place):  # whose mask is what the group's bits then show
            return "accounts in its access list", f"setfacl -b {place} && chmod go-w {place}"
    return None
