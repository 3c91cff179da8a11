"""Linux behind the seam: paths, the boot's identity, locks, and process trees that can be ended whole.

The functions and signatures are those of ``windows.py``, and nothing else is public. Knows nothing of events,
policy or hooks. The one invariant: ``ProcessTree.kill`` never signals a process that was not started, directly
or through others, by the tree it belongs to.

How a tree is kept together: its first process leads a session of its own; this process makes itself the
"child subreaper", so that whatever loses its parent becomes a child of ours and not of init; and every process
carries a marker in its environment. A process that leaves the session, loses its parent and clears its
environment can then only be told from those of other trees when no other tree is alive: so it is ended with
the last of them.
"""

import errno
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

from agent import AgentError

if TYPE_CHECKING:
    from agent.host.surroundings import Approver, OwnService

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

_MARKER = "SCHEDULED_EVENTS_AGENT_HOOK_RUN"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "CREDENTIALS_DIRECTORY")
# Where systemd-networkd, NetworkManager and dhclient (in Debian's and Red Hat's places) keep their leases.
_LEASES = (
    "run/systemd/netif/leases/*",
    "run/NetworkManager/devices/*",
    "var/lib/NetworkManager/*.lease",
    "var/lib/dhcp/*.lease*",
    "var/lib/dhclient/*.lease*",
)
_MAX_LEASE_CHARACTERS = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_SECONDS = 1.0
_MAX_STATUS_CHARACTERS = 1000
_SHUTDOWN_QUESTION_SECONDS = 2.0
_SERVICE_QUESTION_SECONDS = 10.0
_LOCK_PATIENCE_SECONDS = 0.5  # whoever only asks who has a lock may have it for an instant
_SERVICE = "scheduled-events-agent.service"
_TELL_SECONDS = 1.0
_JOURNAL_SOCKET = "/run/systemd/journal/socket"
_TEMPORARY_WARNING = "DATALOSS_WARNING_README.txt"  # Azure puts it into the root of that disk


class HostError(AgentError):
    """The system refused something, or something it was expected to have is missing."""


def default_config_path() -> Path:
    """Where the policy file is looked for when nobody says otherwise."""
    return Path("/etc/scheduled-events-agent/policy.yaml")


def default_state_dir() -> Path:
    """Where the state is kept when the policy file does not say otherwise."""
    return Path("/var/lib/scheduled-events-agent")


def boot_id() -> str:
    """A text that differs from one start of the system to the next; compare with ``is_same_boot``."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError(f"cannot tell which boot this is: {error}", kind="boot_id") from None


def is_same_boot(one: str, other: str) -> bool:
    """Whether two values of ``boot_id`` name the same start of the system."""
    return one == other


def dhcp_option_245() -> str | None:
    """The address in DHCP option 245 of the newest lease that tells it; None if none does."""
    return _option_245_of(Path("/"))


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
    import pwd  # noqa: PLC0415 - Linux only

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


def is_privileged() -> bool:
    """Whether this process may do anything on this machine, and so what it runs may as well."""
    return os.geteuid() == 0


def temporary_disk(path: Path, root: Path = Path("/")) -> Path | None:
    """The root of the temporary disk of this VM that the path is on; None if it is on none that is known.

    Told by the warning that Azure puts into it, by its device, or by who mounted it: see ``surroundings``.
    """
    from agent.host import surroundings  # noqa: PLC0415 - asked at start and reload only

    path = Path(os.path.realpath(path))
    for place in (path, *path.parents):
        if (root / str(place)[1:] / _TEMPORARY_WARNING).exists():
            return place
    mount = surroundings.mount_of(path, root)
    return Path(mount.place) if mount is not None and surroundings.is_temporary(mount, root) else None


def file_system(path: Path, root: Path = Path("/")) -> tuple[str, Path] | None:
    """Kind of the file system that the path is on, and where that is mounted; None if it cannot be told."""
    from agent.host import surroundings  # noqa: PLC0415 - for a diagnosis only

    mount = surroundings.mount_of(Path(os.path.realpath(path)), root)
    return None if mount is None else (mount.kind, Path(mount.place))


def other_approvers(root: Path = Path("/")) -> "list[Approver]":
    """Other programs on this machine that approve events, as far as they are known."""
    from agent.host import surroundings  # noqa: PLC0415 - as above

    return surroundings.linux_approvers(root)


def own_service() -> "OwnService | None":
    """The agent's service as the service manager has it; None if it has none. Raises HostError if none answers."""
    from agent.host import surroundings  # noqa: PLC0415 - as above

    names = ("LoadState", "UnitFileState", "ActiveState", "SubState", "MainPID", "User", "NeedDaemonReload")
    command = [find_systemctl(), "show", _SERVICE, f"--property={','.join(names)}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SERVICE_QUESTION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"systemd cannot be asked: {error}", kind="systemctl") from None
    if done.returncode:
        raise HostError(f"systemd cannot be asked: {' '.join(done.stderr.split())}", kind="systemctl")
    facts = {name: value for name, _, value in (line.partition("=") for line in done.stdout.splitlines())}
    if facts.get("LoadState", "not-found") == "not-found":
        return None
    return surroundings.OwnService(
        is_enabled=facts.get("UnitFileState", "").startswith("enabled"),
        state=f"{facts.get('ActiveState', 'unknown')} ({facts.get('SubState', '')})",
        is_running=facts.get("ActiveState") in ("active", "reloading"),
        pid=int(facts.get("MainPID") or 0),
        account=facts.get("User") or "root",
        is_stale=facts.get("NeedDaemonReload") == "yes",
        is_masked=facts.get("UnitFileState", "").startswith("masked"),
    )


def access_fault(path: Path, purpose: Literal["execute", "write"], user: str | None) -> str | None:
    """Why the account (None: this one) cannot use the file or directory so; None if it can.

    Raises HostError if that cannot be told, or no such account can be.
    """
    if user is not None and user != account_name() and os.geteuid() != 0:
        raise HostError(f"only root can tell what {user} may do", kind="access")
    uid, gid, groups = _identity(user)
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


def find_systemctl() -> str:
    """The program that tells the service manager what to do. Raises HostError where there is none."""
    program = shutil.which("systemctl", path=_DEFAULT_PATH)
    if program is None:
        raise HostError(
            f"found no systemctl on {_DEFAULT_PATH}: this machine is not run by systemd; "
            "have its own service manager supervise `scheduled-events-agent run`",
            kind="systemctl",
        )
    return program


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
    import fcntl  # noqa: PLC0415 - Linux only, as is all of this file

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
    import fcntl  # noqa: PLC0415 - as above

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


def has_terminal_colors() -> bool:
    """Whether terminals show the usual colours without more ado."""
    return True


def is_writable(descriptor: int, patience_seconds: float) -> bool:
    """Whether a line (up to 4 KiB, as a pipe promises) can be written without waiting longer than that."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(patience_seconds * 1000))


def claim_port(listener: socket.socket) -> None:
    """Make ``bind`` take a port that a process that has ended left in TIME_WAIT, and none that is in use."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def account_name() -> str:
    """The account that this process runs as; not asked of the environment, which anybody can set."""
    import pwd  # noqa: PLC0415 - Linux only

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def can_change_user() -> bool:
    """Whether a hook may run as another account, if the agent itself is allowed to."""
    return True


def has_account(name: str) -> bool:
    """Whether this machine knows the account."""
    import pwd  # noqa: PLC0415 - Linux only

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def can_start_units() -> bool:
    """Whether a hook may be a unit of the service manager, if there is one."""
    return True


def unit_fault(name: str) -> str | None:
    """Why a hook could not start the unit; None if nothing is known. Raises HostError if nobody can be asked."""
    from agent.host import units  # noqa: PLC0415 - as in start_tree

    return units.unit_fault(name)


def base_environment(user: str | None) -> dict[str, str]:
    """What a hook that runs as ``user`` (None: as the agent) inherits: nothing that only concerns the agent."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment.update((name, value) for name, value in os.environ.items() if name.startswith("LC_"))
    environment.setdefault("PATH", _DEFAULT_PATH)
    return environment | _account_environment(user)


def find_program(name: str, cwd: str | None, env: Mapping[str, str]) -> Path | None:
    """The file that a hook's program is, whether it is there or not; None for a name that is not on the PATH."""
    if "/" in name:
        return Path(cwd or "/") / name
    found = shutil.which(name, path=env.get("PATH") or base_environment(None).get("PATH"))
    return None if found is None else Path(found)


def decode_output(data: bytes) -> str:
    """What a program wrote, as text."""
    return data.decode("utf-8", "replace")


class ProcessTree:
    """A program and everything it started. Made by ``start_tree``; end with ``close``."""

    ending: str | None = None
    """A phrase for how it ended, if its exit code does not tell."""

    def __init__(self, process: "subprocess.Popen[bytes]", token: str) -> None:
        self._process = process
        self._token = token

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int | None:
        """Block until the program ended. Returns its exit code, less than 0 for a signal, None if it was lost."""
        try:
            # WNOWAIT: it stays a zombie until close(), so that neither its pid nor its group is given away.
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored in this process, or somebody else took the exit code
            return None
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def is_empty(self) -> bool:
        """Whether nothing of the tree runs any more."""
        try:
            program = _read_process(self.pid)
            if program is not None and not program.is_zombie:
                return False
            if _is_subreaper and _reap_orphans() == []:
                return True  # what outlives the program becomes our child, and there is none
            # A zombie counts: what it started in its last moment may have been missed, and is found the next time.
            return self._all_members() == []
        except OSError:  # nothing can be read now: no descriptors, no memory
            return False

    def terminate(self) -> None:
        """Ask every process of the tree to end."""
        for member in self._members():
            _ask_to_end(member.pid)

    def kill(self) -> None:
        """End every process of the tree. Call it again until ``is_empty``: one may just have been forking."""
        members = self._members()
        # A group dies in one go, and no fork escapes from that.
        for group in {self.pid, *(member.group for member in members)} - {os.getpgrp()}:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        for member in members:
            with suppress(OSError):
                os.kill(member.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it. The program must have ended."""
        self._process.wait()
        with _trees_lock:
            _trees.pop(self._token, None)
        reap_orphans()

    def _members(self) -> "list[_Process]":
        try:
            return [process for process in self._all_members() if not process.is_zombie]
        except OSError:  # as in is_empty
            return []

    def _all_members(self) -> "list[_Process]":
        with _trees_lock:
            trees = dict(_trees)
        may_take_strays = trees.keys() <= {self._token}
        return [
            process
            for process, token in _owned_processes(trees)
            if (token == self._token or (token == "" and may_take_strays))
            and not (process.is_zombie and process.pid == self.pid)
        ]


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
    """Start the program ``run``, the command line ``shell`` or the service ``unit``.

    What it writes comes out at the descriptor ``output``, that of a unit only at its end. ``token`` is a text that
    no other tree has. Raises HostError, its message a phrase, if it cannot be started.
    """
    if unit is not None:
        from agent.host import units  # noqa: PLC0415 - it imports this module; and most policies name no unit

        return units.start_unit(unit, env, stdin, output)
    argv = ["/bin/sh", "-c", shell] if shell is not None else list(run or ())
    if not argv or not argv[0]:
        raise HostError("nothing to run", kind="hook")
    uid, gid, groups = _identity(user)
    directory = cwd or "/"
    tree: ProcessTree | None = None
    with _trees_lock:
        _trees[token] = None  # from here on, a stray may be ours and a new child is no orphan
    try:
        _become_subreaper()
        with os.fdopen(os.memfd_create("stdin"), "r+b") as source:
            source.write(stdin)
            source.seek(0)
            process = subprocess.Popen(
                argv,
                stdin=source,
                stdout=output,
                stderr=output,
                env={**env, _MARKER: token},
                cwd=directory,
                user=uid,
                group=gid,
                extra_groups=groups,
                start_new_session=True,
            )
        tree = ProcessTree(process, token)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise HostError(_why_not_started(argv[0], directory, user, env, error), kind="hook") from None
    finally:
        with _trees_lock:
            if tree is None:
                del _trees[token]
            else:
                _trees[token] = tree
    return tree


def command_fault(
    run: Sequence[str] | None, shell: str | None, cwd: str | None, env: Mapping[str, str]
) -> str | None:
    """Why ``start_tree`` would refuse to start the program with its arguments; None: here any can be passed."""
    del run, shell, cwd, env
    return None


def is_shutting_down() -> bool | None:
    """Whether the machine is on its way down; None if that cannot be told. May take two seconds."""
    # What systemctl has to say about itself is nothing for the agent's own unit.
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    try:
        done = subprocess.run(
            [find_systemctl(), "is-system-running"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=_SHUTDOWN_QUESTION_SECONDS,
            check=False,
        )
    except (HostError, OSError, subprocess.SubprocessError):
        return None
    state = done.stdout.strip()
    return None if state in (b"", b"offline", b"unknown") else state == b"stopping"


def is_journal(descriptor: int) -> bool:
    """Whether what is written there goes to the system's journal, which takes priorities such as ``<4>``."""
    try:
        facts = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"


def send_to_journal(fields: Mapping[str, str], patience_seconds: float) -> bool:
    """Write one entry with fields of its own; False if the journal does not take it, in that time."""
    entry = b"".join(_journal_field(name, value.encode("utf-8", "replace")) for name, value in fields.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(patience_seconds)
            sender.sendto(entry, _JOURNAL_SOCKET)
    except OSError:
        return False
    return True


def _journal_field(name: str, value: bytes) -> bytes:
    if b"\n" not in value:
        return name.encode() + b"=" + value + b"\n"
    return name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"


class ServiceManager:
    """Whoever started this process as a service: systemd (see sd_notify(3)), or nobody, who need not be told.

    For any thread. Nothing here fails: a manager that does not listen is its own trouble. Only ``tell`` waits, a
    second at most: a lost word would have a busy one take this process for one that does not start.
    """

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        # Whether keep_alive matters to anybody: silent for too long, this process is killed and started again.
        self._is_watched = is_watched and os.environ.get("WATCHDOG_USEC", "0") != "0"

    def tell(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """What the service is at now; ``status`` is one line for people."""
        words = {
            "ready": "READY=1",
            "reloading": f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}",
            "stopping": "STOPPING=1",
        }
        self._send(f"{words[state]}\n{_status_line(status)}", _TELL_SECONDS)

    def tell_status(self, status: str) -> None:
        """One line for people."""
        self._send(_status_line(status))

    def keep_alive(self) -> None:
        """To be called as long as this process does its work."""
        if self._is_watched:
            self._send("WATCHDOG=1")

    def _send(self, message: str, patience_seconds: float = 0.0) -> None:
        if self._address:
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
            ):
                sender.settimeout(patience_seconds)
                sender.connect(self._address)  # or it could not be waited for
                sender.send(message.encode("utf-8", "replace"))


def _status_line(status: str) -> str:
    # What an event is called comes from the network, and a new line would be a word of its own to systemd.
    return f"STATUS={''.join(c if c.isprintable() else ' ' for c in status)[:_MAX_STATUS_CHARACTERS]}"


def load_all_parts() -> None:
    """Import what else an agent that runs may need of its own: an upgrade replaces its files while it does."""
    from agent.host import dhcp, surroundings, units  # noqa: F401, PLC0415 - see above


def reap_orphans() -> None:
    """Release processes that lost their parent and ended; to be called now and then while trees run."""
    _reap_orphans()


def end_marked(prefix: str) -> int:
    """End what the trees of a killed agent left running; returns how many processes that were.

    These are the trees whose token begins with ``prefix``.
    """
    kill_at = time.monotonic() + _LEFTOVER_GRACE_SECONDS
    give_up_at = kill_at + _LEFTOVER_GRACE_SECONDS
    marked = _marked_processes(prefix)
    found = set(marked)
    for pid in marked:
        _ask_to_end(pid)
    while marked and time.monotonic() < give_up_at:
        if time.monotonic() >= kill_at:
            for pid in marked:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        marked = _marked_processes(prefix)
        found |= marked
    return len(found)


class _Trusted(NamedTuple):
    users: frozenset[int]
    groups: frozenset[int]


def _trusted(user: str | None) -> _Trusted:
    import grp  # noqa: PLC0415 - not on Windows
    import pwd  # noqa: PLC0415 - not on Windows

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


def _account_environment(user: str | None) -> dict[str, str]:
    import pwd  # noqa: PLC0415 - not on Windows

    try:
        entry = pwd.getpwuid(os.geteuid()) if user is None else pwd.getpwnam(user)
    except (KeyError, ValueError):  # an unknown user is refused by start_tree
        return {"HOME": "/"}
    return {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell}


def _identity(user: str | None) -> tuple[int | None, int | None, list[int] | None]:
    if user is None:
        return None, None, None
    import pwd  # noqa: PLC0415 - not on Windows

    try:
        entry = pwd.getpwnam(user)
    except (KeyError, ValueError):
        raise HostError(f"no such user: {user}", kind="hook") from None
    if entry.pw_uid == os.geteuid():
        return None, None, None
    if os.geteuid() != 0:
        raise HostError(f"cannot run as {user}: only an agent that runs as root can", kind="hook")
    return entry.pw_uid, entry.pw_gid, os.getgrouplist(user, entry.pw_gid)


def _why_not_started(program: str, cwd: str, user: str | None, env: Mapping[str, str], error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"cannot be started: {error}"
    if not Path(cwd).is_dir():
        return f"no such directory to run in: {cwd}"
    path = Path(program)
    if isinstance(error, FileNotFoundError):
        if "/" not in program:
            return f"no such program on the PATH {env.get('PATH')}: {program}"
        if path.exists():
            return f"the interpreter in the first line does not exist: {program}"
        return f"no such file: {program}"
    if path.is_dir():
        return f"a directory, not a program: {program}"
    if isinstance(error, PermissionError):
        return f"not executable{f' for {user}' if user else ''}: {program}"
    if error.errno == errno.ENOEXEC:
        return f"neither a program nor a script that begins with #!: {program}"
    return f"cannot be started ({error.strerror}): {program}"


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    session: int
    is_zombie: bool


# A process that has ended, or is hidden from us. Any other error is ours: then nothing is known of any process.
_NOT_TO_BE_SEEN = (FileNotFoundError, ProcessLookupError, PermissionError)

_trees: dict[str, ProcessTree | None] = {}  # by token; None while it is being started
_trees_lock = threading.Lock()
_is_subreaper: bool | None = None  # None: not tried yet


def _become_subreaper() -> None:
    global _is_subreaper  # noqa: PLW0603 - a property of this process
    if _is_subreaper is None:
        import ctypes  # noqa: PLC0415 - of no use before the first hook

        _is_subreaper = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _read_process(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read by the hundred; a Path costs more
            text = file.read()
    except _NOT_TO_BE_SEEN:
        return None
    state, parent, group, session, _ = text[text.rindex(b")") + 2 :].split(b" ", 4)
    return _Process(pid, int(parent), int(group), int(session), state in (b"Z", b"X"))


def _process_table() -> list[_Process]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names are enough
    return [process for pid in pids if (process := _read_process(pid)) is not None]


def _orphans() -> list[_Process]:
    """Our children that we did not start: those outside our session that lead no tree."""
    me, session = os.getpid(), os.getsid(0)
    leaders = {tree.pid for tree in list(_trees.values()) if tree is not None}
    try:
        pids = [
            int(pid)
            for thread in os.listdir("/proc/self/task")  # noqa: PTH208 - names are enough
            for pid in Path(f"/proc/self/task/{thread}/children").read_bytes().split()
        ]
        children = [process for pid in pids if (process := _read_process(pid)) is not None]
    except OSError:  # a kernel without these files, or a thread that just ended
        children = [process for process in _process_table() if process.parent == me]
    return [child for child in children if child.session != session and child.pid not in leaders]


def _reap_orphans() -> list[_Process] | None:
    """Release those that ended; returns those that were there, None if that cannot be told now."""
    with _trees_lock:
        if None in _trees.values():
            return None  # the child that is being started is not yet known, and its exit code is not ours to take
        try:
            orphans = _orphans()
        except OSError:  # nothing can be read now: no descriptors, no memory
            return None
        for process in orphans:
            with suppress(OSError):
                os.waitpid(process.pid, os.WNOHANG)
        return orphans


def _owned_processes(trees: Mapping[str, ProcessTree | None]) -> Iterator[tuple[_Process, str]]:
    """Every process that some tree started, with the tree's token, or "" for a stray that shows no owner."""
    me, session = os.getpid(), os.getsid(0)
    tokens_by_session = {tree.pid: token for token, tree in trees.items() if tree is not None}
    table = _process_table()
    children: dict[int, list[_Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)

    def find_owner(process: _Process) -> str:
        return tokens_by_session.get(process.session) or _owner_in_environment(process.pid, trees)

    found = [(child, find_owner(child)) for child in children.get(me, ()) if child.session != session]
    if not _is_subreaper:  # orphans are no children of ours, and may be anywhere
        found += [(process, owner) for process in table if process.pid != me and (owner := find_owner(process))]
    seen = set()
    while found:
        process, token = found.pop()
        if process.pid in seen:
            continue
        seen.add(process.pid)
        yield process, token
        found.extend((child, token or find_owner(child)) for child in children.get(process.pid, ()))


def _owner_in_environment(pid: int, tokens: Container[str]) -> str:
    token = _token_of(pid)
    return token if token in tokens else ""


def _token_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as above
            environment = b"\0" + file.read()
    except _NOT_TO_BE_SEEN:
        return ""
    _, _, rest = environment.partition(b"\0" + _MARKER.encode() + b"=")
    return os.fsdecode(rest.partition(b"\0")[0])


def _marked_processes(prefix: str) -> set[int]:
    table = _process_table()
    marked = {process.pid for process in table if _token_of(process.pid).startswith(prefix)}
    size = 0
    while size != len(marked):  # their descendants, one generation at a time
        size = len(marked)
        marked |= {process.pid for process in table if process.parent in marked}
    zombies = {process.pid for process in table if process.is_zombie}
    return marked - zombies - {os.getpid()}


def _ask_to_end(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # a stopped process would not hear it


def _option_245_of(root: Path) -> str | None:
    from agent.host import dhcp  # noqa: PLC0415 - read at most once, and mostly never

    texts = []
    for pattern in _LEASES:
        for path in root.glob(pattern):
            with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
                texts.append((os.fstat(file.fileno()).st_mtime, file.read(_MAX_LEASE_CHARACTERS)))
    now = datetime.now(UTC)
    texts.sort(key=itemgetter(0), reverse=True)
    return next((address for _, text in texts if (address := dhcp.parse_lease(text, now))), None)
