"""Linux processes: hooks as process trees that can be ended whole.

Invariant: ``ProcessTree.kill`` only signals processes that this tree started, directly or through others.

These signs show the tree of a process: its first process leads a session of its own. This process is the "child
subreaper", so a process that loses its parent becomes our child and not init's. Every process carries a marker in
its environment. A process that leaves the session, loses its parent and clears its environment has none of these
signs. It is ended with the last tree that is alive.
"""

import codecs
import errno
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from scheduled_events_agent.host.conflicts import UNREADABLE, running_processes
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.linux.files import account_name

if sys.platform == "win32":
    raise ImportError("scheduled_events_agent.host.linux is for Linux; import scheduled_events_agent.host instead")

_MARKER = "SCHEDULED_EVENTS_AGENT_HOOK_RUN"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The last ones lead ``kubernetes drain`` to the API server and to its own node.
_PASSED_ON = (
    "PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "CREDENTIALS_DIRECTORY",
    "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBERNETES_NODE",
)  # fmt: skip
# Where hooks find their secrets, unless systemd has loaded credentials for the agent and says where these are.
_CREDENTIALS = "/etc/scheduled-events-agent/credentials"
_PR_SET_CHILD_SUBREAPER = 36
_ELF = b"\x7fELF"
_MACHINES = {3: "x86", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V"}
_RUNS_TOO = {62: 3, 183: 40}  # of 32 bits
_FIRST_LINE_BYTES = 256  # what the kernel reads of it
_LEFTOVER_GRACE_SECONDS = 1.0
# Where very many processes starve this one, a single look takes longer than the grace.
_LEFTOVER_KILLS = 3

_trees: "dict[str, ProcessTree | None]" = {}  # by token; None while it is being started
_trees_lock = threading.Lock()


class ProcessTree:
    """A program and everything it started. Made by ``start_tree``; end with ``close``."""

    def __init__(self, process: "subprocess.Popen[bytes]", token: str) -> None:
        self._process = process
        self._token = token

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int | None:
        """Block until the program ended. Returns its exit code, less than 0 for a signal, None if it was lost."""
        try:
            # WNOWAIT: it stays a zombie until close(), so that neither its pid nor its group is reused.
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # this process ignores SIGCHLD, or other code took the exit code
            return None
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def is_empty(self) -> bool:
        """Whether nothing of the tree runs any more."""
        try:
            if not _is_zombie(psutil.Process(self.pid)):
                return False
        except psutil.Error:  # it is gone
            pass
        except OSError:  # no descriptor is free: nothing can be read now
            return False
        reap_zombies()
        # A zombie counts: what it started in its last moment may have been missed, and is found the next time.
        members = self._members()
        return members is not None and not members

    def terminate(self) -> None:
        """Send SIGTERM to every process of the tree."""
        for member in self._members() or ():
            _terminate(member)

    def kill(self) -> None:
        """End every process of the tree. Call it again until ``is_empty``: one may just have been forking."""
        running = [member for member in self._members() or () if not _is_zombie(member)]
        # A group dies in one go, and no fork escapes from that.
        groups = {self.pid}
        for member in running:
            with suppress(ProcessLookupError):
                groups.add(os.getpgid(member.pid))
        for group in groups - {os.getpgrp()}:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        for member in running:
            with suppress(psutil.Error):
                member.kill()

    def close(self) -> None:
        """Release the tree. The program must have ended."""
        self._process.wait()
        with _trees_lock:
            _trees.pop(self._token, None)
        reap_zombies()

    def _members(self) -> list[psutil.Process] | None:
        """The tree's processes without its first one if that has ended; None if they cannot be read now."""
        with _trees_lock:
            trees = dict(_trees)
        counts_unattributed = trees.keys() <= {self._token}
        try:
            return [
                process
                for process, token in _owned_processes(trees)
                if (token == self._token or (token == "" and counts_unattributed))
                and not (process.pid == self.pid and _is_zombie(process))
            ]
        except OSError:  # no descriptor is free
            return None


def become_subreaper() -> None:
    """Become the parent of processes that lose theirs. If it is called early, the first tree starts faster."""
    import ctypes  # noqa: PLC0415 - of no use without hooks

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
    argv = ["/bin/sh", "-c", shell] if shell is not None else list(run or ())
    if not argv or not argv[0]:
        raise HostError("nothing to run", kind="hook")
    uid, gid, groups = identity_of(user)
    directory = cwd or "/"
    tree: ProcessTree | None = None
    with _trees_lock:
        _trees[token] = None  # from here on a stray may be ours, and a new child is no orphan
    try:
        become_subreaper()
        with os.fdopen(os.memfd_create("stdin"), "r+b") as source:
            source.write(stdin)
            source.seek(0)
            process = subprocess.Popen(
                [_to_bytes(word) for word in argv],
                stdin=source,
                stdout=output,
                stderr=output,
                env={_to_bytes(name): _to_bytes(value) for name, value in {**env, _MARKER: token}.items()},
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


def _to_bytes(text: str) -> bytes:
    """The text in UTF-8. What has no bytes is replaced: it is no reason not to start a hook."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def reap_zombies() -> None:
    """Release processes that lost their parent and ended. Costs a system call where none has; for any thread."""
    with _trees_lock, suppress(OSError):  # no child at all, or no descriptor is free
        if None in _trees.values():
            return  # the child that is being started is not known yet, and its exit code is not ours to take
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        session = os.getsid(0)
        leaders = {tree.pid for tree in _trees.values() if tree is not None}
        for child in _own_children(recursive=False):
            with suppress(ProcessLookupError):
                if child.pid not in leaders and os.getsid(child.pid) != session:
                    os.waitpid(child.pid, os.WNOHANG)


def kill_leftovers(prefix: str) -> int:
    """End the processes that the trees of a killed agent left running; returns their number.

    These are the trees whose token begins with ``prefix``.
    """
    kill_at = time.monotonic() + _LEFTOVER_GRACE_SECONDS
    found: set[psutil.Process] = set()
    kills = 0
    while leftovers := find_leftovers(prefix):
        if kills >= _LEFTOVER_KILLS and time.monotonic() >= kill_at + _LEFTOVER_GRACE_SECONDS:
            break
        for process in leftovers - found:
            _terminate(process)
        found |= leftovers
        if time.monotonic() >= kill_at:
            kills += 1
            for process in leftovers:
                with suppress(psutil.Error):
                    process.kill()
        psutil.wait_procs(leftovers, timeout=0.05)
    return len(found)


def find_leftovers(prefix: str) -> set[psutil.Process]:
    """The processes that run and carry a token that begins with ``prefix``, and their descendants."""
    leftovers = {process for process in running_processes() if _token_of(process).startswith(prefix)}
    for process in list(leftovers):
        with suppress(*UNREADABLE):
            leftovers.update(process.children(recursive=True))
    return {process for process in leftovers if process.pid != os.getpid() and not _is_zombie(process)}


def base_environment(user: str | None) -> dict[str, str]:
    """The environment for a hook that runs as ``user`` (None: as the agent), without the agent's own variables."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment.update((name, value) for name, value in os.environ.items() if name.startswith("LC_"))
    environment.setdefault("PATH", DEFAULT_PATH)
    environment.setdefault("CREDENTIALS_DIRECTORY", _CREDENTIALS)
    try:
        entry = pwd.getpwuid(os.geteuid()) if user is None else pwd.getpwnam(user)
    except (KeyError, ValueError):  # start_tree rejects an unknown user
        return environment | {"HOME": "/"}
    account = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell}
    return environment | account


def find_program(name: str, cwd: str | None, env: Mapping[str, str]) -> Path | None:
    """The file that a hook's program is, whether it is there or not; None for a name that is not on the PATH."""
    if "/" in name:
        return Path(cwd or "/") / name
    found = shutil.which(name, path=env.get("PATH") or base_environment(None).get("PATH"))
    return None if found is None else Path(found)


def find_command_error(
    run: Sequence[str] | None, shell: str | None, cwd: str | None, env: Mapping[str, str]
) -> str | None:
    """Why ``start_tree`` could not start the program, as far as its first line shows; None if it could."""
    del shell
    program = find_program(run[0], cwd, env) if run else None
    try:
        if program is None or not program.is_file():  # to open a named pipe would block
            return None
        with program.open("rb") as file:
            head = file.read(_FIRST_LINE_BYTES)
    except OSError:  # it need not be readable to be a program
        return None
    error = _first_line_error(head, cwd, env)
    return f"{program}: {error}" if error else None


def _first_line_error(head: bytes, cwd: str | None, env: Mapping[str, str]) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"#\0", b"\0#")):
        return "it is UTF-16: save it as UTF-8"
    if head.startswith(_ELF):
        return _machine_error(head)
    if b"\0" in head:
        return "" if head.strip(b"\0") else "there is nothing in it but NUL bytes: write it again"
    line = head.partition(b"\n")[0]
    words = os.fsdecode(line.removeprefix(b"#!")).split()
    if not line.startswith(b"#!") or not words:
        return "it has no first line #!: name the interpreter in run"
    if b"\r" in line:
        return "its first line ends with a carriage return: save it with Unix line ends"
    interpreter = Path(cwd or "/") / words[0]
    try:
        if not interpreter.exists():
            return f"its interpreter {words[0]} does not exist"
    except PermissionError:
        return f"its interpreter {words[0]} is in a directory that this account may not enter"
    arguments = words[2:] if words[1:2] == ["-S"] else words[1:]
    if interpreter.name != "env" or not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        return ""
    if find_program(arguments[0], cwd, env) is None:
        return f"its interpreter {arguments[0]} is not found in PATH"
    return ""


def _machine_error(head: bytes) -> str:
    """Why this machine cannot run the ELF program that begins so; "" if it can."""
    with Path("/proc/self/exe").open("rb") as file:
        own = _machine_of(file.read(_FIRST_LINE_BYTES))
    machine = _machine_of(head)
    if machine in (0, own, _RUNS_TOO.get(own)):
        return ""
    its, ours = (_MACHINES.get(number, f"machine {number}") for number in (machine, own))
    return f"it is a program for {its}, and this machine has {ours}"


def _machine_of(head: bytes) -> int:
    """For which kind of processor the ELF program is: e_machine."""
    return int.from_bytes(head[18:20], "big" if head[5:6] == b"\2" else "little")


def decode_output(data: bytes) -> str:
    """Output of a program, as text."""
    return data.decode("utf-8", "replace")


def identity_of(user: str | None) -> tuple[int | None, int | None, list[int] | None]:
    """Uid, gid and groups to run as; all None for those of this process. Raises HostError if it cannot."""
    if user is None:
        return None, None, None
    try:
        entry = pwd.getpwnam(user)
    except (KeyError, ValueError):
        raise HostError(f"no such user: {user}", kind="hook") from None
    if entry.pw_uid == os.geteuid():
        return None, None, None
    if os.geteuid() != 0:
        raise HostError(f"cannot run as {user}: only an agent that runs as root can", kind="hook")
    return entry.pw_uid, entry.pw_gid, os.getgrouplist(user, entry.pw_gid)


def find_access_error(path: Path, purpose: Literal["read", "execute", "write"], user: str | None) -> str | None:
    """Why the account (None: this one) cannot use the file or directory so; None if it can.

    Raises HostError if it is not known, or there is no such account.
    """
    who = user or account_name()
    if who != account_name() and os.geteuid() != 0:
        raise HostError(f"only root can tell what {who} may do", kind="access")
    path = path.absolute()
    for place in reversed(path.parents):
        if not _may(place, "x", user):
            return f"{who} cannot pass through {place}"
    wanted = "wx" if purpose == "write" and path.is_dir() else {"read": "r", "execute": "x", "write": "w"}[purpose]
    return None if all(_may(path, right, user) for right in wanted) else f"{who} cannot {purpose} {path}"


def _may(path: Path, right: str, user: str | None) -> bool:
    uid, gid, groups = identity_of(user)
    if uid is None:
        return os.access(path, {"r": os.R_OK, "x": os.X_OK, "w": os.W_OK}[right])
    # Ask as that account: access lists and mount options also decide.
    question = ["/usr/bin/test", f"-{right}", str(path)]
    try:
        asked = subprocess.run(question, user=uid, group=gid, extra_groups=groups, env={}, cwd="/", check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"cannot ask as {user}: {error}", kind="access") from None
    return asked.returncode == 0


def _why_not_started(program: str, cwd: str, user: str | None, env: Mapping[str, str], error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"cannot be started: {error}"
    is_denied = isinstance(error, PermissionError)
    # Python may name the directory also if it could not change to the account.
    if is_denied and error.filename == cwd and not os.access(cwd, os.X_OK, effective_ids=True):
        return f"this account may not enter the directory to run in: {cwd}"
    if not os.path.isdir(cwd):  # noqa: PTH112 - raises nothing
        return f"no such directory to run in: {cwd}"
    if isinstance(error, FileNotFoundError):
        if "/" not in program:
            return f"no such program on the PATH {env.get('PATH')}: {program}"
        if os.path.exists(program):  # noqa: PTH110 - raises nothing
            return f"the interpreter in the first line does not exist: {program}"
        return f"no such file: {program}"
    if os.path.isdir(program):  # noqa: PTH112 - raises nothing
        return f"a directory, not a program: {program}"
    if is_denied:
        what = f"not executable for {user}" if user else "not executable"
        return f"{what}: {program}"
    if error.errno == errno.ENOEXEC:
        return f"neither a program nor a script that begins with #!: {program}"
    return f"cannot be started ({error.strerror}): {program}"


def _owned_processes(trees: Mapping[str, ProcessTree | None]) -> list[tuple[psutil.Process, str]]:
    """Every process that a tree started, with the tree's token, or "" for a stray that shows no owner."""
    me = os.getpid()
    session = os.getsid(0)
    tokens_by_session = {tree.pid: token for token, tree in trees.items() if tree is not None}
    owners: dict[int, str | None] = {}  # None for our own children that are no hooks, and for theirs
    owned = []
    for process in _own_children(recursive=True):
        try:
            parent = process.ppid()
            own_session = os.getsid(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
        inherited: str | None = ""
        if parent != me:
            inherited = owners.get(parent, "")
        elif own_session == session:
            inherited = None
        if inherited == "":
            token = _token_of(process)
            inherited = tokens_by_session.get(own_session) or (token if token in trees else "")
        owners[process.pid] = inherited
        if inherited is not None:
            owned.append((process, inherited))
    return owned


def _own_children(*, recursive: bool) -> list[psutil.Process]:
    """The children of this process; ``recursive``: and theirs, each after its parent."""
    me = psutil.Process()
    try:
        return me.children(recursive=recursive)
    except (psutil.AccessDenied, PermissionError):
        # /proc has processes of other accounts that cannot be read (hidepid=1), and psutil gives up at the first.
        by_parent: dict[int, list[psutil.Process]] = {}
        for process in running_processes():
            with suppress(*UNREADABLE):
                by_parent.setdefault(process.ppid(), []).append(process)
    found = by_parent.pop(me.pid, [])
    if recursive:
        for process in found:
            found += by_parent.pop(process.pid, [])
    return found


def _token_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(_MARKER, "")
    except UNREADABLE:
        return ""


def _is_zombie(process: psutil.Process) -> bool:
    """Whether the process has ended; it may be a zombie that is not released yet."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _terminate(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.terminate()
        process.resume()  # a stopped process would not see the signal
