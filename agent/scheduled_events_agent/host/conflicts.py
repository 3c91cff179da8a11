"""Detects other programs that approve events, and Azure's temporary disk.

Sources that cannot be read are ignored. ``root`` is the root of the file system.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import psutil

from scheduled_events_agent.host.supervisor import UNIT_PLACES

ApproverState = Literal["active", "maybe", "installed"]
"""active: it approves. maybe: it runs, and it is not known whether it approves. installed: it does not run."""

_INTERPRETER = r"(python|bash|sh|ruby|perl)[0-9.]*"
# This program in a command line: as a module, as an installed script, or as the file that packages start.
_OWN_PROGRAM = r"(?is)(.*[\\/])?scheduled[-_]events[-_]agent(\.exe|[\\/](start|__main__)\.py)?"
_PYTHON = r"(?is)(.*[\\/])?pythonw?[0-9.]*(\.exe)?"
_CIB = "var/lib/pacemaker/cib/cib.xml"
_CIB_AGENT = r'\btype="(azure-events(?:-az)?)"'
# Some resource is not to run. Only the cluster knows which one.
_CIB_STOPPED = r'\bname="target-role" value="Stopped"'


class Approver(NamedTuple):
    """Another program that approves events on this machine."""

    name: str
    where: str
    """The evidence: where the program was found."""
    state: ApproverState
    hint: str


class ActingAgent(NamedTuple):
    """Another process of this program that acts on events."""

    pid: int
    command: str


STOP_ONE = "stop one of the two, or start it with --observe"
"""The hint if two programs approve events."""


class ServiceFailure(NamedTuple):
    """How the last run of the agent's service failed."""

    reason: str
    """The last error of that run in the system's log; "" if it is not known."""
    is_retried: bool
    """Whether the manager starts it again."""


class OwnService(NamedTuple):
    """The agent's own service, as the service manager has it."""

    is_enabled: bool
    """Whether it is started with the machine."""
    state: str
    """The state, as the manager calls it."""
    is_running: bool
    pid: int
    """Pid of the main process; 0 if the service does not run."""
    account: str
    """The account that it runs as."""
    needs_daemon_reload: bool
    """Whether the manager has not yet read what its files say."""
    is_masked: bool = False
    """Whether an administrator has forbidden that it is started, as systemd can."""
    has_credentials: bool = False
    """Whether the manager has loaded credentials for it, which take the place of a directory of secrets."""
    units_error: str = ""
    """Why its account cannot start the units of hooks that run as root; empty if it can."""
    is_starting: bool = False
    """Whether its process is there, and has not reported that it is ready."""
    failure: ServiceFailure | None = None
    """None if it has not failed, or that is not known."""


class _KnownApprover(NamedTuple):
    name: str
    program: str
    """The name of the file that runs, or the beginning of its path."""
    services: tuple[str, ...]
    """Names of services, without .service."""
    hint: str


# All of these approve if their configuration says so. (aks-node-termination-handler drains nodes, but approves
# nothing.)
_KNOWN = (
    # Since 8.2.2 it approves each event at once for which /opt/cycle/jetpack/scripts has no script, unless the
    # node's configuration on CycleCloud's server says otherwise.
    _KnownApprover(
        "CycleCloud's jetpack",
        "/opt/cycle/jetpack/",
        ("jetpackd",),
        "set cyclecloud.monitor_scheduled_events = false for this node in CycleCloud, or leave the events to it",
    ),
    _KnownApprover(
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


UNREADABLE = (psutil.Error, OSError)
"""Raised for a process that has ended, or that hides from this account. On Windows psutil lets OSError through."""


def running_processes() -> Iterator[psutil.Process]:
    """Every process. psutil's own iterator would keep an object for each of them for ever."""
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
        except UNREADABLE:
            continue
        yield process


def acting_agents(own_pids: Collection[int], is_own: Callable[[int], bool] | None = None) -> list[ActingAgent]:
    """The agents that run on this machine and act, but for those of these processes.

    ``is_own``: whether another process is one of them too. It is asked at once: the process may end soon after. It
    raises OSError then.
    """
    own_pids = set(own_pids)
    commands: dict[int, list[str]] = {}
    parents: dict[int, int] = {}
    for process in running_processes():
        with suppress(*UNREADABLE):
            words = process.cmdline()
            if is_acting_agent(words):
                if is_own is not None and is_own(process.pid):
                    own_pids.add(process.pid)
                commands[process.pid] = words
                parents[process.pid] = process.ppid()

    def first(pid: int) -> int:
        """The process that a person or the service manager started: a launcher, or the parent of a fork."""
        passed = {pid}
        while parents.get(pid) in commands and parents[pid] not in passed:
            pid = parents[pid]
            passed.add(pid)
        return pid

    own = {first(pid) for pid in own_pids}
    return [ActingAgent(pid, " ".join(commands[pid])) for pid in sorted({*map(first, commands)} - own)]


def is_acting_agent(words: Sequence[str]) -> bool:
    """Whether the command runs an agent of this program, and not only to observe."""
    place = next((index for index, word in enumerate(words) if re.fullmatch(_OWN_PROGRAM, word)), None)
    if place is None:
        return False
    options = words[1:place]
    if place > 0 and not (re.fullmatch(_PYTHON, words[0]) and all(word.startswith("-") for word in options)):
        return False
    arguments = words[place + 1 :]
    runs = list(arguments[:1]) == ["run"] or list(arguments[:2]) == ["service", "host"]
    return runs and not any(len(word) > 2 and "--observe".startswith(word) for word in arguments)


def linux_approvers(root: Path = Path("/")) -> list[Approver]:
    """Other approvers on Linux: in processes, unit files and Pacemaker's configuration."""
    commands = []
    for process in running_processes():
        with suppress(*UNREADABLE):
            commands.append((process.pid, process.cmdline()))
    services = {path.stem for place in UNIT_PLACES for path in (root / place).glob("*.service")}

    def runs(program: str) -> list[int]:
        return [pid for pid, words in commands if words and _is_program(words, program)]

    found = []
    for known in _KNOWN:
        named = services.intersection(known.services)
        if pids := runs(known.program):
            found.append(Approver(known.name, f"process {pids[0]} runs", "maybe", known.hint))
        elif named:
            found.append(Approver(known.name, f"unit {named.pop()}.service is there", "installed", known.hint))
        elif known.program.startswith("/") and (root / known.program[1:]).is_dir():
            found.append(Approver(known.name, f"{known.program} is there", "installed", known.hint))
    # The package resource-agents always brings it; it runs only if the cluster's configuration names it.
    cib = ""
    with suppress(OSError):
        cib = (root / _CIB).read_text(encoding="utf-8", errors="replace")
    if agent := re.search(_CIB_AGENT, cib):
        pids = runs("pacemakerd")
        state: ApproverState = "installed"
        where = f"/{_CIB} names it"
        if pids:
            state = "maybe" if re.search(_CIB_STOPPED, cib) else "active"
            where += f" and process {pids[0]}, pacemakerd, runs"
        # Only the cluster knows which node may leave.
        hint = "keep it, and have this agent only observe (agent.mode: observe)"
        found.append(Approver(f"Pacemaker's {agent[1]}", where, state, hint))
    return found


def windows_approvers(services: Iterable[tuple[str, str, bool]], root: Path) -> list[Approver]:
    """Other approvers on Windows: among ``services`` (name, display name, whether it runs) and directories."""
    found = []
    for name, display, is_running in services:
        where = f"service {name} runs" if is_running else f"service {name} is there"
        if name.casefold() == _SAMPLE_SERVICE or display.casefold() == _SAMPLE_DISPLAY:
            hint = f"stop one of the two: sc.exe stop {name}, and sc.exe config {name} start= disabled"
            found.append(Approver(_SAMPLE, where, "active" if is_running else "installed", hint))
        state: ApproverState = "maybe" if is_running else "installed"
        found += [Approver(one.name, where, state, one.hint) for one in _KNOWN if name.casefold() in one.services]
    jetpack = _KNOWN[0]
    place = root / "cycle" / "jetpack"
    if place.is_dir() and not any(one.name == jetpack.name for one in found):
        found.append(Approver(jetpack.name, f"{place} is there", "installed", jetpack.hint))
    return found


def _is_program(words: list[str], program: str) -> bool:
    """Whether the command runs the program, itself or as a script. Naming it as an argument is not enough."""
    script = words[1:2] if re.fullmatch(_INTERPRETER, PurePosixPath(words[0]).name) else []
    return any(
        word.startswith(program) if program.startswith("/") else PurePosixPath(word).name == program
        for word in [words[0], *script]
    )
