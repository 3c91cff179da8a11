"""What else is on this machine that the agent should know of: others that approve events, disks that do not last.

Owns the signs by which these are told. Reads files below a root, so that it can be tried on any tree; asks no
service manager, and decides nothing. The one invariant: what cannot be read is not there.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

Life = Literal["active", "maybe", "installed"]
"""active: it approves; maybe: it runs, and whether it approves cannot be seen; installed: it does not run."""

_UNIT_PLACES = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_INTERPRETER = re.compile(r"(python|bash|sh|ruby|perl)[0-9.]*")
_CIB = "var/lib/pacemaker/cib/cib.xml"
_CIB_AGENT = re.compile(r'\btype="(azure-events(?:-az)?)"')
# Some resource is not to run; which one, only the cluster tells.
_CIB_STOPPED = re.compile(r'\bname="target-role" value="Stopped"')
_MAX_FILE_BYTES = 4 * 1024 * 1024


class Approver(NamedTuple):
    """Another program that approves events on this machine."""

    name: str
    where: str
    """By what it was found."""
    life: Life
    way_out: str


class OwnService(NamedTuple):
    """The agent's own service, as the service manager has it."""

    is_enabled: bool
    """Whether it is started with the machine."""
    state: str
    """In the manager's word."""
    is_running: bool
    pid: int
    """0 if it does not run."""
    account: str
    """Whom it runs as."""
    is_stale: bool
    """Whether the manager has not yet read what its files say."""
    is_masked: bool = False
    """Whether somebody has forbidden that it is started, as systemd can."""


class _Known(NamedTuple):
    name: str
    program: str
    """The name of the file that runs, or the beginning of its path."""
    services: tuple[str, ...]
    """Names of services, without .service."""
    way_out: str


# All of these approve if their configuration says so. (aks-node-termination-handler, which drains a node as well,
# sends no approval in any of its sources.)
_KNOWN = (
    # Since 8.2.2 it approves each event at once for which /opt/cycle/jetpack/scripts has no script, unless the
    # configuration of the node says otherwise; that stands on CycleCloud's server (the page "Use scheduled events"
    # of its manual). Paths and services: the page "Jetpack".
    _Known(
        "CycleCloud's jetpack",
        "/opt/cycle/jetpack/",
        ("jetpackd",),
        "set cyclecloud.monitor_scheduled_events = false for this node in CycleCloud, or leave the events to it",
    ),
    # The name of its program is in its Makefile and Dockerfile, the option, off by default, in its config/opts.go.
    _Known(
        "webdevops' azure-scheduledevents-manager",
        "azure-scheduledevents-manager",
        ("azure-scheduledevents-manager",),
        "take --azure.approve-scheduledevent (AZURE_APPROVE_SCHEDULEDEVENT) from it, or stop one of the two",
    ),
)
# Microsoft's sample for Windows, SchService.ps1, installs itself under its file's name and this display name.
_SAMPLE_SERVICE = "schservice"
_SAMPLE_DISPLAY = "azurescheduledevents"
_SAMPLE = "Azure's sample service SchService"


class Mount(NamedTuple):
    """Where a path's file system is."""

    place: str
    kind: str
    source: str


def linux_approvers(root: Path) -> list[Approver]:
    """Those of Linux: in processes, unit files and Pacemaker's configuration."""
    commands = list(_commands(root))
    units = list(_unit_files(root))
    found = []
    for known in _KNOWN:
        runs = [pid for pid, words in commands if _is_program(words, known.program)]
        named = [path for path in units if path.stem in known.services]
        if runs:
            found.append(Approver(known.name, f"process {runs[0]} runs", "maybe", known.way_out))
        elif named:
            found.append(Approver(known.name, f"unit {named[0].name} is there", "installed", known.way_out))
        elif known.program.startswith("/") and (root / known.program[1:]).is_dir():
            found.append(Approver(known.name, f"{known.program} is there", "installed", known.way_out))
    # Installed with many others by the package resource-agents; only who is in the cluster's configuration runs.
    cib = _text(root / _CIB)
    if agent := _CIB_AGENT.search(cib):
        life: Life = "maybe" if _CIB_STOPPED.search(cib) else "active"
        runs = [pid for pid, words in commands if _is_program(words, "pacemakerd")]
        found.append(
            Approver(
                f"Pacemaker's {agent[1]}",
                f"/{_CIB} names it" + (f" and process {runs[0]}, pacemakerd, runs" if runs else ""),
                life if runs else "installed",
                "have this agent only observe (agent.mode: observe), or take the resource out of the cluster",
            )
        )
    return found


def windows_approvers(services: Iterable[tuple[str, str, bool]], root: Path) -> list[Approver]:
    """Those of Windows: among ``services`` (name, display name, whether it runs) and directories."""
    found = []
    for name, display, is_running in services:
        way_out = f"stop one of the two: sc stop {name}, and sc config {name} start= disabled"
        if name.casefold() == _SAMPLE_SERVICE or display.casefold() == _SAMPLE_DISPLAY:
            life: Life = "active" if is_running else "installed"
            found.append(Approver(_SAMPLE, _service_in_words(name, is_running), life, way_out))
        for known in _KNOWN:
            if name.casefold() in known.services:
                life = "maybe" if is_running else "installed"
                found.append(Approver(known.name, _service_in_words(name, is_running), life, known.way_out))
    jetpack = _KNOWN[0]
    if (root / "cycle" / "jetpack").is_dir() and not any(one.name == jetpack.name for one in found):
        place = root / "cycle" / "jetpack"
        found.append(Approver(jetpack.name, f"{place} is there", "installed", jetpack.way_out))
    return found


def mount_of(path: Path, root: Path) -> Mount | None:
    """The file system that the path, or what there is of it, is on; None if that cannot be told."""
    best: Mount | None = None
    for line in _text(root / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields, more = front.split(" "), back.split(" ")
        if len(fields) < 5 or len(more) < 2:
            continue
        place = _unescaped(fields[4])
        if path.is_relative_to(place) and (best is None or len(place) >= len(best.place)):
            best = Mount(place, more[0], _unescaped(more[1]))  # a later mount hides an earlier one
    return best


def is_temporary(mount: Mount, root: Path) -> bool:
    """Whether it is Azure's temporary disk, which comes empty after a redeployment."""
    if mount.place == "/" or not mount.source.startswith("/dev/"):
        return False
    return bool(_disks_below(Path(mount.source).name, root) & _temporary_devices(root)) or _is_configured(
        mount, root
    )


def _temporary_devices(root: Path) -> set[str]:
    """Names of devices, such as sdb1, by the links that udev makes for cloud-init, waagent or azure-vm-utils."""
    links = [
        *root.glob("dev/disk/cloud/azure_resource*"),
        *root.glob("dev/disk/azure/resource*"),
        *root.glob("dev/disk/azure/local/*/*"),
        *root.glob("dev/disk/by-label/Temporary*Storage"),
    ]
    names = set()
    for link in links:
        with suppress(OSError):
            names.add(PurePosixPath(os.readlink(link)).name)  # noqa: PTH115 - Path.readlink differs on Windows
    return names


def _disks_below(device: str, root: Path) -> set[str]:
    """The device, and what a RAID or encrypted one is made of."""
    found, todo = set[str](), [device]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(place.name for place in root.glob(f"sys/class/block/{name}/slaves/*"))
    return found


def _is_configured(mount: Mount, root: Path) -> bool:
    """Whether waagent, or cloud-init's line in fstab, says that the temporary disk is mounted there."""
    for line in _text(root / "etc/fstab").splitlines():
        source, place, _, options, *_ = [*line.split(), "", "", "", ""]
        by_cloud_init = "comment=cloudconfig" in options or "x-systemd.requires=cloud-init" in options
        if place == mount.place and not line.startswith("#"):
            # It also mounts data disks so, wherever the image's user wanted them.
            return "azure_resource" in source or (by_cloud_init and place in ("/mnt", "/mnt/resource"))
    settings = {
        name.strip(): value.strip()
        for name, equals, value in (
            line.partition("=") for line in _text(root / "etc/waagent.conf").splitlines() if line[:1] != "#"
        )
        if equals
    }
    # It mounts the disk by itself, so what fstab mounts there instead is another one.
    return settings.get("ResourceDisk.Format", "").lower() == "y" and (
        mount.place == settings.get("ResourceDisk.MountPoint", "/mnt/resource")
    )


def _commands(root: Path) -> Iterator[tuple[int, list[str]]]:
    for place in sorted(root.glob("proc/[0-9]*")):
        with suppress(OSError, ValueError):
            words = os.fsdecode((place / "cmdline").read_bytes()).split("\0")
            if words[0]:
                yield int(place.name), words


def _is_program(words: list[str], program: str) -> bool:
    """Whether the command runs it, itself or as a script; not whether it only names it."""
    script = words[1:2] if _INTERPRETER.fullmatch(PurePosixPath(words[0]).name) else []
    for word in [words[0], *script]:
        if word.startswith(program) if program.startswith("/") else PurePosixPath(word).name == program:
            return True
    return False


def _unit_files(root: Path) -> Iterator[Path]:
    for place in _UNIT_PLACES:
        yield from sorted((root / place).glob("*.service"))


def _service_in_words(name: str, is_running: bool) -> str:
    return f"service {name} {'runs' if is_running else 'is there'}"


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return os.fsdecode(file.read(_MAX_FILE_BYTES))
    except OSError:
        return ""
