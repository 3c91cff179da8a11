"""What surrounds the agent on Linux: shutting down, other programs, disks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from agent.host import surroundings
from agent.host.error import HostError
from agent.host.linux.process import DEFAULT_PATH
from agent.host.surroundings import Approver

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

_SHUTDOWN_QUESTION_SECONDS = 2.0
_TEMPORARY_WARNING = "DATALOSS_WARNING_README.txt"  # Azure puts it into the root of that disk


def other_approvers() -> list[Approver]:
    """Other programs on this machine that approve events, as far as they are known."""
    return surroundings.linux_approvers()


def find_systemctl() -> str:
    """The program that controls the service manager. Raises HostError where there is none."""
    program = shutil.which("systemctl", path=DEFAULT_PATH)
    if program is None:
        raise HostError(
            f"found no systemctl on {DEFAULT_PATH}: this machine does not use systemd; "
            "have its own service manager supervise `scheduled-events-agent run`",
            kind="systemctl",
        )
    return program


def is_shutting_down() -> bool | None:
    """Whether the machine is shutting down; None if it is not known. May take two seconds."""
    # systemctl must not notify systemd in the agent's name.
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


def temporary_disk(path: Path) -> Path | None:
    """The root of the temporary disk of this VM that the path is on; None if it is on none that is known."""
    path = Path(os.path.realpath(path))
    for place in (path, *path.parents):
        if (place / _TEMPORARY_WARNING).exists():
            return place
    mount = surroundings.mount_of(path)
    return Path(mount.place) if mount is not None and surroundings.is_temporary(mount) else None


def file_system(path: Path) -> tuple[str, Path] | None:
    """Kind of the file system that the path is on, and where that is mounted; None if it is not known."""
    mount = surroundings.mount_of(Path(os.path.realpath(path)))
    return None if mount is None else (mount.kind, Path(mount.place))
