"""A machine with a real systemd as its PID 1, in a container of this one's: root file systems, boots, reboots.

    python tests/system/container.py [SUITE]   boot one, give it a shell, and throw it away afterwards

The root file systems are in .cache/containers: debootstrap makes them once, from the mirror that this machine's
apt uses or UBUNTU_MIRROR names. Files of running machines are in ``_MACHINES``. Invariants: a machine's disk is a
layer of its own in memory, over layers that are not written to. A machine that was closed, or whose owner is dead
when the next one is made, leaves nothing: no process, no mount, no control group, no file.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Self, TypeVar

import apt

if sys.platform == "win32":
    raise ImportError("containers are Linux's")

T = TypeVar("T")

CHECKOUT = Path(__file__).resolve().parents[2]
ROOTS = CHECKOUT / ".cache" / "containers"
PROJECT = "/opt/project"
"""Where every machine sees the checkout, read-only."""
PATIENCE = 120.0
"""Seconds; far more than anything here takes. Only what fails waits for so long."""
_MACHINES = Path("/run/scheduled-events-agent-tests")

_RESTART = 133  # nspawn's exit code when what ran in it wants to be booted again

_PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "libnss-systemd"),
    "polkitd",  # depends on a virtual package, so that libpam-systemd above has to be named
    *("python3", "ca-certificates", "procps", "iproute2"),  # procps: pgrep and pkill
    "nginx",  # something to drain
)
_OLDER_PACKAGES = tuple(name if name != "polkitd" else "policykit-1" for name in _PACKAGES)


class _Suite(NamedTuple):
    packages: tuple[str, ...] = _PACKAGES
    distribution: str = "Debian"
    components: str = "main"
    may_be_missing: bool = False
    """Whether a mirror without it is no fault of this machine."""


_SUITES = {
    "bookworm": _Suite(),
    "trixie": _Suite(),
    "bullseye": _Suite(_OLDER_PACKAGES, may_be_missing=True),
    "jammy": _Suite((*_OLDER_PACKAGES, "python3.11"), "Ubuntu", "main,universe", may_be_missing=True),
}
_RECIPE = r"""
set -eu
# The first three would write the settings of the machine all this runs on; the others take time, or wake up at
# some hour, and a test has no use for them.
systemctl mask systemd-sysctl.service systemd-modules-load.service systemd-binfmt.service \
    proc-sys-fs-binfmt_misc.automount sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount \
    systemd-update-utmp.service systemd-firstboot.service console-getty.service getty@.service \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer \
    systemd-tmpfiles-clean.timer
systemctl disable nginx.service
mkdir -p /var/log/journal  # makes the journal outlive a reboot
: > /etc/machine-id        # every machine gives itself one when it is booted for the first time
rm -f /var/lib/dbus/machine-id
rm -f /var/cache/apt/archives/*.deb
"""


class ContainerError(Exception):
    """Something about a machine went wrong; the message says what was run and what it printed."""


class ContainerUnavailableError(Exception):
    """Machines cannot be had here; the message says why."""


# --- root file systems


def root_file_system(suite: str = "bookworm") -> Path:
    """The root file system of a Debian or Ubuntu, to be read only; made first if need be, in about a minute.

    Several processes may ask at once. Raises ContainerUnavailableError.
    """
    _require_a_place_for_machines()
    recipe = hashlib.sha256(" ".join([*_SUITES[suite].packages, _RECIPE]).encode()).hexdigest()[:12]
    root = ROOTS / f"{suite}-{recipe}"
    ROOTS.mkdir(parents=True, exist_ok=True)
    with (ROOTS / f"{suite}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            mounts = Path("/proc/self/mounts").read_text()
            for old in ROOTS.glob(f"{suite}-*"):  # of another recipe, or half made
                if str(old) not in mounts:
                    shutil.rmtree(old)
            _make_root(suite, root)
    return root


def _make_root(suite: str, root: Path) -> None:
    began = time.monotonic()
    making = root.with_name(f"{root.name}.making")
    wanted = _SUITES[suite]
    mirror = _mirror(wanted.distribution)
    keys = Path(f"/usr/share/keyrings/{wanted.distribution.lower()}-archive-keyring.gpg")
    if not keys.exists():
        raise ContainerUnavailableError(f"packages of {wanted.distribution} cannot be checked: there is no {keys}")
    _progress(f"making {root.name} from {mirror}, which takes a minute or two")
    options = (f"--include={','.join(wanted.packages)}", f"--components={wanted.components}", f"--keyring={keys}")
    command = ("debootstrap", "--variant=minbase", *options, suite, str(making), mirror)
    try:
        # In a mount namespace of its own, so that what it mounts in there does not stay if it is killed.
        _host("unshare", "--mount", *command, timeout=1200)
    except ContainerError as error:
        if wanted.may_be_missing and "Failed getting release file" in str(error):
            raise ContainerUnavailableError(f"{mirror} cannot be reached, or has no {suite}") from None
        raise
    _host("chroot", str(making), "/bin/sh", "-c", _RECIPE, timeout=60)
    making.rename(root)
    _progress(f"made {root.name} in {time.monotonic() - began:.0f} s")


def _mirror(distribution: str) -> str:
    """The one that this machine's apt uses, or that a variable such as UBUNTU_MIRROR names.

    Raises ContainerUnavailableError.
    """
    variable = f"{distribution.upper()}_MIRROR"
    if found := os.environ.get(variable) or apt.mirror(distribution):
        return found
    raise ContainerUnavailableError(
        f"no mirror of {distribution}: {variable} names none, and apt gets nothing of origin {distribution}, "
        "of its own release, component main; see the output of: apt-get indextargets"
    )


def _require_a_place_for_machines() -> None:
    if os.geteuid() != 0:
        raise ContainerUnavailableError("booting a container needs root")
    places = _control_group_roots()
    if not any((place / "cgroup.controllers").exists() for place in places):
        raise ContainerUnavailableError("booting a container needs a cgroup2 file system, and none is mounted")
    for place in places:
        if not os.access(place, os.W_OK):
            raise ContainerUnavailableError(f"booting a container needs control groups, and {place} is read-only")
    apt.need("systemd-nspawn", "systemd-container")
    apt.need("debootstrap")


# --- machines


class Container:
    """One machine: its disk, and what runs of it. A context manager that boots it, and closes it in the end.

    It lies ``on`` a root file system, or on another machine that has been stopped (which can then no more be
    started, and must not be closed while this one lives): what is installed there is here from the start, and
    is left as it is. ``boots=False``: only the disk, on which ``run`` runs single commands.
    The network is this machine's own, so that a server on its loopback can be reached; with ``private_network``
    there is nothing but a loopback of its own.
    """

    def __init__(
        self,
        on: "Path | Container",
        *,
        boots: bool = True,
        private_network: bool = False,
        read_only: Mapping[str, Path] = {},
    ) -> None:
        """``read_only``: where in the machine -> what of this one can be read there, beside the checkout."""
        self.id: str = f"sea-{secrets.token_hex(4)}"
        self.layers: tuple[Path, ...] = (on,) if isinstance(on, Path) else (on._place / "upper", *on.layers)
        """What lies below its own layer, the topmost first."""
        self._below = on
        self._boots = boots
        self._options = [f"--bind-ro={CHECKOUT}:{PROJECT}"]
        self._options += [f"--bind-ro={path}:{inside}" for inside, path in read_only.items()]
        self._options += ["--private-network"] if private_network else []
        self._place: Path = _MACHINES / self.id
        self._root = self._place / "root"
        self._claim: IO[str] | None = None
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0  # its PID 1, as this machine numbers it

    # --- its life

    def __enter__(self) -> Self:
        if isinstance(self._below, Container):
            self._below._seal()
        self._claim = _claim(self.id)
        try:
            _host("mount", "-t", "tmpfs", "-o", "mode=755", self.id, str(self._place))
            for name in ("root", "upper", "work"):
                (self._place / name).mkdir()
            layers = ":".join(map(str, self.layers))
            options = f"lowerdir={layers},upperdir={self._place}/upper,workdir={self._place}/work"
            _host("mount", "-t", "overlay", "-o", options, self.id, str(self._root))
            if len(self.layers) > 1:  # a machine of its own, not the one it lies on
                (self._root / "etc/machine-id").write_text("")
                for journal in (self._root / "var/log/journal").iterdir():
                    shutil.rmtree(journal)
            if self._boots:
                self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def leader(self) -> int:
        """Process id, as this machine numbers it, of the PID 1 that runs now."""
        if self._leader == 0:
            raise ContainerError(f"{self.id} is not running; start it first")
        return self._leader

    def start(self, timeout: float = PATIENCE) -> None:
        """Boot, and wait until everything that belongs to a boot has been started, or has failed to."""
        if self._nspawn is not None:
            raise ContainerError(f"{self.id} is running already")
        self._require_disk()
        self._reset_control_groups()
        address = self._place / "notify"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, self._console_file.open("ab") as console:
            notices.bind(str(address))
            notices.settimeout(0.1)
            self._nspawn = subprocess.Popen(
                self._nspawn_command("--boot", "--notify-ready=yes"),
                env={**_NSPAWN_ENVIRONMENT, "NOTIFY_SOCKET": str(address)},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
            deadline = time.monotonic() + timeout
            is_ready = False
            while not is_ready:
                with contextlib.suppress(TimeoutError):
                    said = dict(line.partition("=")[::2] for line in notices.recv(4096).decode().splitlines())
                    self._leader = int(said.get("X_NSPAWN_LEADER_PID", self._leader))
                    is_ready = said.get("READY") == "1"
                ended = self._nspawn.poll()
                if ended is not None or time.monotonic() > deadline:
                    self.kill()
                    problem = f"was not up within {timeout:g} s" if ended is None else f"ended with {ended}"
                    raise ContainerError(f"{self.id} {problem} when booted; its console:\n{self.console()}")
        self.run("systemctl", "is-system-running", "--wait", check=False, timeout=timeout)

    def stop(self, timeout: float = PATIENCE) -> None:
        """Have it power itself off, every service stopped in its turn; its disk stays."""
        self.run("systemctl", "poweroff", "--no-block")
        self.wait_end(timeout)

    def reboot(self, timeout: float = PATIENCE) -> None:
        """Have it reboot, every service stopped in its turn; returns when it is up again."""
        self.run("systemctl", "reboot", "--no-block")
        self.wait_reboot(timeout)

    def wait_reboot(self, timeout: float = PATIENCE) -> None:
        """Wait until it has ended as one that wants to be booted again, and do so."""
        if not self.wait_end(timeout):
            raise ContainerError(f"{self.id} has powered itself off instead of rebooting:\n{self.console()}")
        self.start()

    def wait_end(self, timeout: float = PATIENCE) -> bool:
        """Wait until it has gone down; returns whether it wants to be booted again."""
        assert self._nspawn is not None, f"{self.id} is not running"
        try:
            code = self._nspawn.wait(timeout)
        except subprocess.TimeoutExpired:
            jobs = self.run("systemctl", "list-jobs", check=False, timeout=5).stdout
            self.kill()
            raise ContainerError(
                f"{self.id} had not gone down after {timeout:g} s, and was killed; "
                f"its jobs:\n{jobs}\nits console:\n{self.console()}"
            ) from None
        self.kill()
        if code not in (0, _RESTART):
            raise ContainerError(f"{self.id} ended with {code}; its console:\n{self.console()}")
        return code == _RESTART

    def kill(self) -> None:
        """End it as a power cut would; its disk stays. Nothing happens to one that does not run."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            # With its PID 1 all its processes end; nspawn sees to the rest, and can but end itself then.
            os.kill(self._leader or self._nspawn.pid, signal.SIGKILL)
            try:
                self._nspawn.wait(5)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        self._nspawn, self._leader = None, 0
        _end_control_groups(self.id)

    def close(self) -> None:
        """End it, and remove its disk."""
        if self._nspawn is not None:
            self.kill()
        _remove(self.id)
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    # --- what one does with it

    def run(
        self,
        *command: str,
        check: bool = True,
        timeout: float = PATIENCE,
        input: str | None = None,  # noqa: A002  # as in subprocess.run
        user: str = "",
        environment: Mapping[str, str] = {},
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end in the machine, as root or another user.

        Raises ContainerError with all it printed if it fails and ``check`` is set, or takes too long.
        """
        settings = {**_ENVIRONMENT, **environment}
        inside = ["env", "-i", *(f"{name}={value}" for name, value in settings.items())]
        if user:
            inside += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        inside += command
        if self._leader:
            outside = ["nsenter", "--target", str(self.leader), "--all", "--", *inside]
        else:
            self._require_disk()
            self._reset_control_groups()
            outside = self._nspawn_command("--as-pid2", "--quiet", "--", *inside)
        try:
            done = subprocess.run(
                outside,
                env=_NSPAWN_ENVIRONMENT,
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            what = f"did not end within {timeout:g} s"
            raise ContainerError(_failure(command, what, _text(error.stdout), _text(error.stderr))) from None
        finally:
            if not self._leader:
                _end_control_groups(self.id)
        if check and done.returncode != 0:
            raise ContainerError(_failure(command, f"ended with {done.returncode}", done.stdout, done.stderr))
        done.args = list(command)
        return done

    def path(self, inside: str) -> Path:
        """Where its file is found from here, those in /run and /tmp too; symlinks lead where they do there."""
        root = Path(f"/proc/{self._leader}/root") if self._leader else self._root
        found: list[str] = []
        todo = list(PurePosixPath(inside.lstrip("/")).parts)
        while todo:
            name = todo.pop(0)
            here = root.joinpath(*found, name)
            if name == "..":
                del found[-1:]
            elif here.is_symlink():
                goal = here.readlink()
                found = [] if goal.is_absolute() else found
                todo = [part for part in goal.parts if part != "/"] + todo
            else:
                found.append(name)
        return root.joinpath(*found)

    def copy_in(self, source: Path, inside: str) -> None:
        """Copy a file or a whole directory to exactly this place, with its modes; root owns the copy."""
        goal = self.path(inside)
        goal.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, goal, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, goal)

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file, its directory first if need be."""
        goal = self.path(inside)
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_text(text, encoding="utf-8")
        goal.chmod(mode)

    def boot_id(self) -> str:
        """The kernel's id of this boot, as a process in the machine reads it."""
        return self.run("cat", "/proc/sys/kernel/random/boot_id").stdout.strip()

    def journal(self, unit: str = "", *, boot: int | None = 0) -> list[dict[str, Any]]:
        """The journal's entries of a unit (what PID 1 says of it included) or of all, the oldest first.

        ``boot``: 0 for this one, -1 for the one before, None for all.
        """
        self.run("journalctl", "--sync")
        which = ["--boot=all" if boot is None else f"--boot={boot}"]
        which += [f"--unit={unit}"] if unit else []
        done = self.run("journalctl", "--quiet", "--output=json", "--all", *which)
        return [_entry(line) for line in done.stdout.splitlines()]

    def console(self) -> str:
        """The end of what was printed on its console, over all its boots."""
        if not self._console_file.exists():
            return ""
        return self._console_file.read_text(errors="replace")[-4000:]

    def wait_for(self, test: Callable[[], T], what: str, timeout: float = PATIENCE) -> T:
        """Wait until ``test`` gives something true, and return it; for what no event tells of."""
        deadline = time.monotonic() + timeout
        while not (result := test()):
            if time.monotonic() > deadline:
                raise ContainerError(f"gave up after {timeout:g} s of waiting until {what}; {self.account()}")
            time.sleep(0.05)
        return result

    def account(self) -> str:
        """A description for the message of a failure: the end of its journal, or of its console."""
        if not self._leader:
            return f"{self.id} is not running; its console:\n{self.console()}"
        tail = self.run("journalctl", "--lines=60", "--no-pager", "--output=short-precise", check=False).stdout
        return f"the last of the journal of {self.id}:\n{tail}"

    # --- how

    @property
    def _console_file(self) -> Path:
        return self._place / "console"

    def _require_disk(self) -> None:
        if not self._root.is_mount():
            raise ContainerError(f"{self.id} has no disk: it was not entered, was closed, or others lie on it")

    def _seal(self) -> None:
        """Write to its layer no more, so that others can lie on it."""
        if self._nspawn is not None:
            raise ContainerError(f"{self.id} is running; stop it before another machine is put on it")
        _unmount(self._root)

    def _reset_control_groups(self) -> None:
        """Control groups to start in, which a container takes for the root of its own."""
        _end_control_groups(self.id)
        for place in _control_groups(self.id):
            place.mkdir()

    def _nspawn_command(self, *options: str) -> list[str]:
        """A command that becomes nspawn; its process id stays the same."""
        groups = " ".join(map(str, _control_groups(self.id)))
        launch = ["unshare", "--mount", "--propagation=private", "/bin/sh", "-euc", _LAUNCH, "sh", self.id, groups]
        fixed = ["--register=no", "--keep-unit", "--console=pipe", "--link-journal=no"]
        fixed += ["--system-call-filter=bpf"]  # without it, systemd cannot enforce IPAddressDeny, and says nothing
        return [*launch, *fixed, f"--directory={self._root}", *self._options, *options]


# No host's systemd is needed: it gets neither the machine nor a request for a scope to put it in. Two things are
# kept out of what nspawn sees, in a mount namespace of its own: where it would leave something behind, for it
# clears that away only if /run is in memory; and the disks of other machines, which it would keep from going.
_LAUNCH = f"""
machine=$1 groups=$2
shift 2
for group in $groups; do echo $$ > "$group/cgroup.procs"; done
mkdir -p /run/systemd/nspawn
mount -t tmpfs "$machine" /run/systemd/nspawn
for other in {_MACHINES}/*/; do
    test "$other" = "{_MACHINES}/$machine/" || umount --recursive --lazy "$other" 2>/dev/null || :
done
exec systemd-nspawn --machine="$machine" "$@"
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_NSPAWN_ENVIRONMENT = {
    **_ENVIRONMENT,
    "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",  # whatever this machine's is
    "SYSTEMD_NSPAWN_LOCK": "0",
}


def _entry(line: str) -> dict[str, Any]:
    """An entry of the journal; it writes what is not printable text as a list of bytes."""
    fields: dict[str, Any] = json.loads(line)
    for name, value in fields.items():
        if isinstance(value, list) and all(isinstance(byte, int) for byte in value):
            fields[name] = bytes(value).decode("utf-8", "replace")
    return fields


# --- what is there of a machine, and its end


def _claim(machine: str) -> IO[str]:
    """Make the place of a machine, after removing those of dead owners. Whose file stays locked is alive."""
    _MACHINES.mkdir(exist_ok=True)
    with (_MACHINES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in _MACHINES.glob("*.claim"):
            # Its owner is alive, or has closed it just now.
            with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open() as theirs:
                fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path.stem)
        (_MACHINES / machine).mkdir()
        ours = (_MACHINES / f"{machine}.claim").open("w")
        fcntl.flock(ours, fcntl.LOCK_EX)
        return ours


def _remove(machine: str) -> None:
    """Remove all there is of a machine, however far it has come."""
    _end_control_groups(machine)
    place = _MACHINES / machine
    for mount in (place / "root", place):
        _unmount(mount)
    with contextlib.suppress(FileNotFoundError):
        place.rmdir()
    (_MACHINES / f"{machine}.claim").unlink(missing_ok=True)


def _unmount(mount: Path) -> None:
    """Unmount it, if it is mounted. Raises ContainerError."""
    deadline = time.monotonic() + PATIENCE
    while mount.is_mount():
        try:
            _host("umount", str(mount))
        except ContainerError:  # a process that has just ended may still hold it
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _end_control_groups(machine: str) -> None:
    """Kill what is left in a machine's control groups, and remove them."""
    for place in _control_groups(machine):
        deadline = time.monotonic() + PATIENCE
        while left := _processes(place):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ContainerError(f"{machine}: processes {left} in {place} do not end when killed")
            time.sleep(0.01)
        for directory, _, _ in os.walk(place, topdown=False):
            Path(directory).rmdir()


def _processes(group: Path) -> list[int]:
    found: list[int] = []
    for directory, _, _ in os.walk(group):
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (Path(directory) / "cgroup.procs").read_text().split())
    return found


def _control_groups(machine: str) -> list[Path]:
    return [place / machine for place in _control_group_roots()]


def _control_group_roots() -> list[Path]:
    """Where the hierarchies are mounted in which systemd keeps its books: version 2, and its own of version 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [
        Path(place)
        for _, place, kind, options, *_ in mounts
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(","))
    ]


# --- running programs here


def _host(*command: str, timeout: float = PATIENCE) -> str:
    """Run a program of this machine; returns what it prints. Raises ContainerError."""
    done = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise ContainerError(_failure(command, f"ended with {done.returncode}", done.stdout, done.stderr))
    return done.stdout


def _failure(command: tuple[str, ...], what: str, stdout: str, stderr: str) -> str:
    return f"{' '.join(command)}\n{what}; its output:\n{stdout[-8000:]}\nits errors:\n{stderr[-8000:]}"


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _progress(text: str) -> None:
    print(f"[containers] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with Container(root_file_system(*sys.argv[1:2])) as _machine:
        print(f"{_machine.id} runs; its PID 1 is process {_machine.leader} here")
        subprocess.run(["nsenter", "--target", str(_machine.leader), "--all", "/bin/bash", "--login"], check=False)
