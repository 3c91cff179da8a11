"""The agent's surroundings on Linux: its own service, a shutdown, other programs, disks."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from scheduled_events_agent.host import conflicts, disks
from scheduled_events_agent.host.conflicts import Approver, OwnService, ServiceFailure
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.linux.processes import DEFAULT_PATH

if sys.platform == "win32":
    raise ImportError("scheduled_events_agent.host.linux is for Linux; import scheduled_events_agent.host instead")

_SERVICE = "scheduled-events-agent.service"
_SERVICE_PROPERTIES = (
    "LoadState,UnitFileState,ActiveState,SubState,MainPID,User,NeedDaemonReload,InvocationID,Result"
)
_PROCESSES = Path("/proc")
_CREDENTIALS = Path("/run/credentials")  # where systemd puts those that it has loaded
_SERVICE_QUESTION_SECONDS = 10.0
_SHUTDOWN_QUESTION_SECONDS = 2.0
_MISSING = {
    "systemctl": "this machine does not use systemd",
    "journalctl": "this machine does not use systemd",
    "pkaction": "this machine has no polkit",
}
_FIRST_POLKIT_WITH_RULES = (0, 106)
# Name of a unit; that of a template with its instance.
_UNIT_NAME = r"(?a)[\w:.\\-]+(@(?!\.)[\w:.\\-]+)?"
_TEMPORARY_WARNING = "DATALOSS_WARNING_README.txt"  # Azure puts it into the root of that disk


def other_approvers() -> list[Approver]:
    """Other programs on this machine that approve events, as far as they are known."""
    return conflicts.linux_approvers()


def is_shutting_down() -> bool | None:
    """Whether the machine is shutting down; None if it is not known. May take two seconds."""
    try:
        state = _ask("systemctl", "is-system-running", timeout_seconds=_SHUTDOWN_QUESTION_SECONDS).stdout.strip()
    except HostError:
        return None
    return None if state in ("", "offline", "unknown") else state == "stopping"


def own_service() -> OwnService | None:
    """The agent's service as systemd has it; None if it has none. Raises HostError if systemd does not answer."""
    question = ("show", f"--property={_SERVICE_PROPERTIES}", _SERVICE)
    done = _ask("systemctl", *question, timeout_seconds=_SERVICE_QUESTION_SECONDS)
    unit = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    if done.returncode != 0 or not set(_SERVICE_PROPERTIES.split(",")) <= unit.keys():
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise HostError(f"systemctl cannot report on the agent's service: {message}", kind="systemctl")
    if unit["LoadState"] == "not-found":
        return None
    account = unit["User"] or "root"
    return OwnService(
        is_enabled=unit["UnitFileState"].startswith("enabled"),
        state=f"{unit['ActiveState']} ({unit['SubState']})",
        is_running=unit["ActiveState"] in ("active", "reloading"),
        pid=int(unit["MainPID"]),
        account=account,
        needs_daemon_reload=unit["NeedDaemonReload"] == "yes",
        is_masked=unit["UnitFileState"].startswith("masked"),
        has_credentials=_has_credentials(),
        units_error="" if account == "root" else _polkit_error(),
        is_starting=unit["ActiveState"] == "activating" and unit["MainPID"] != "0",
        failure=_failure_of(unit),
    )


def is_of_own_service(pid: int) -> bool:
    """Whether systemd has started the process for the agent's service. Raises OSError if it has ended."""
    groups = (_PROCESSES / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
    return any(_SERVICE in line.split(":", 2)[-1].split("/") for line in groups.splitlines())


def _failure_of(unit: Mapping[str, str]) -> ServiceFailure | None:
    is_retried = "auto-restart" in unit["SubState"]  # newer versions of systemd tell several such states apart
    if not is_retried and unit["ActiveState"] != "failed":
        return None
    of_run = f"_SYSTEMD_INVOCATION_ID={unit['InvocationID']}"
    question = ("--no-pager", "--quiet", "--output=cat", "--lines=1", of_run)
    reason = "" if unit["Result"] in ("success", "exit-code") else f"systemd calls it {unit['Result']}"
    with suppress(HostError):
        # Python's own last words, such as of a missing module, come by standard error.
        for messages in ("--priority=err", "_TRANSPORT=stdout"):
            answer = _ask("journalctl", *question, messages, timeout_seconds=_SERVICE_QUESTION_SECONDS).stdout
            if line := " ".join(answer.split()):
                return ServiceFailure(line, is_retried)
    return ServiceFailure(reason, is_retried)


def unknown_units(names: Collection[str]) -> set[str]:
    """Which of these units systemd does not know. Raises HostError if it does not answer."""
    # With others, systemctl does not answer at all.
    valid = [name for name in names if re.fullmatch(_UNIT_NAME, name)]
    question = ("show", "--property=Id,LoadState", "--", *valid)
    done = _ask("systemctl", *question, timeout_seconds=_SERVICE_QUESTION_SECONDS)
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise HostError(f"systemctl cannot report on the units: {message}", kind="systemctl")
    units = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in done.stdout.split("\n\n")]
    missing = {unit.get("Id", "") for unit in units if unit.get("LoadState") == "not-found"}
    return {name for name in names if name not in valid or not missing.isdisjoint((name, f"{name}.service"))}


def _has_credentials() -> bool:
    # systemctl does not show LoadCredential= and the like.
    with suppress(OSError):
        return (_CREDENTIALS / _SERVICE).exists()
    return False


def _polkit_error() -> str:
    """Why polkit does not read the rule that lets the account start its hooks; empty if it does."""
    try:
        message = _ask("pkaction", "--version", timeout_seconds=_SERVICE_QUESTION_SECONDS).stdout
    except HostError as error:
        return str(error)
    version = re.search(r"\d+(\.\d+)*", message)
    if version is None or tuple(map(int, version[0].split("."))) >= _FIRST_POLKIT_WITH_RULES:
        return ""
    return f"polkit {version[0]} does not read polkit.rules; 0.106 and newer do"


def _ask(name: str, *words: str, timeout_seconds: float) -> "subprocess.CompletedProcess[str]":
    """Run a program of the system. Raises HostError if it cannot be run, or does not answer in time."""
    # systemctl must not notify systemd in the agent's name.
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    program = shutil.which(name, path=DEFAULT_PATH)
    if program is None:
        raise HostError(f"found no {name} on {DEFAULT_PATH}: {_MISSING[name]}", kind=name)
    try:
        return subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"{name} did not answer within {timeout_seconds:g} s", kind=name) from None
    except OSError as error:
        raise HostError(f"{name} cannot be run: {error.strerror}", kind=name) from None


def temporary_disk(path: Path) -> Path | None:
    """The root of the temporary disk of this VM that the path is on; None if it is on none that is known."""
    path = Path(os.path.realpath(path))
    for place in (path, *path.parents):
        with suppress(OSError):  # a directory that is closed to this account
            if (place / _TEMPORARY_WARNING).exists():
                return place
    mount = disks.mount_of(path)
    return Path(mount.place) if mount is not None and disks.is_temporary(mount) else None


def file_system(path: Path) -> tuple[str, Path] | None:
    """Kind of the file system that the path is on, and where that is mounted; None if it is not known."""
    mount = disks.mount_of(Path(os.path.realpath(path)))
    return None if mount is None else (mount.kind, Path(mount.place))
