"""Windows as a system: the id of the boot, DHCP options, a shutdown, other programs that approve events."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from scheduled_events_agent.host import conflicts, dhcp
from scheduled_events_agent.host.conflicts import Approver
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.supervisor import SupervisorCommands
from scheduled_events_agent.host.windows.files import registry_value

if sys.platform == "win32" or TYPE_CHECKING:
    import winreg

    import win32api

# A clock that is set right moves the boot's computed time; no machine boots twice within this.
_SAME_BOOT_SECONDS = 120.0
_SM_SHUTTINGDOWN = 0x2000
service_shutdown: threading.Event | None = None
"""Whether the SCM has reported a shutdown to this process's service; None in the foreground."""
_GUEST_PROXY = "GuestProxyAgent"
_PREFETCH = r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters"
_INTERFACES = r"SYSTEM\CurrentControlSet\Services\Tcpip\Parameters\Interfaces"


def boot_id() -> str:
    """A text that differs from one start of the system to the next; compare with ``is_same_boot``."""
    return f"boot-time {psutil.boot_time():.0f}"


def kubelet_boot_id() -> str:
    """This start of the system as a kubelet reports it for its node: a number of starts. Raises HostError."""
    value = registry_value(_PREFETCH, "BootId")
    if not isinstance(value, int):
        raise HostError("cannot tell which boot this is: the registry has no BootId", kind="boot_id")
    return str(value)


def is_same_boot(one: str, other: str) -> bool:
    """Whether two values of ``boot_id`` name the same start of the system."""
    try:
        return abs(float(one.removeprefix("boot-time ")) - float(other.removeprefix("boot-time "))) < (
            _SAME_BOOT_SECONDS
        )
    except ValueError:
        return False


def dhcp_option_245() -> str | None:
    """The address in DHCP option 245 of any interface that has it; None if none has."""
    for name in _subkeys(_INTERFACES):
        value = registry_value(rf"{_INTERFACES}\{name}", "DhcpInterfaceOptions")
        if isinstance(value, bytes) and (address := dhcp.parse_windows_options(value)):
            return address
    return None


def has_guest_proxy() -> bool:
    """Whether Azure's Guest Proxy Agent is installed: its service is there."""
    return registry_value(rf"SYSTEM\CurrentControlSet\Services\{_GUEST_PROXY}", "ImagePath") is not None


def guest_proxy_command() -> str:
    """Shows whether the Guest Proxy Agent runs."""
    return f"sc.exe query {_GUEST_PROXY}"


def _subkeys(key: str) -> list[str]:
    names: list[str] = []
    if sys.platform == "win32":
        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as handle:
            names.extend(winreg.EnumKey(handle, index) for index in range(winreg.QueryInfoKey(handle)[0]))
    return names


def unknown_units(names: Collection[str]) -> set[str]:  # noqa: ARG001
    """No unit: only systemd has such units."""
    return set()


def other_approvers() -> list[Approver]:
    """Other programs on this machine that approve events, as far as they are known."""
    services: list[tuple[str, str, bool]] = []
    if sys.platform == "win32":  # the only system for which psutil has the function
        with contextlib.suppress(OSError):
            for service in psutil.win_service_iter():
                with contextlib.suppress(psutil.Error, OSError):  # it was removed, or may not be asked
                    is_running = service.status() != "stopped"
                    services.append((service.name(), service.display_name() or "", is_running))
    return conflicts.windows_approvers(services, Path(f"{os.environ.get('SYSTEMDRIVE', 'C:')}\\"))


def is_shutting_down() -> bool | None:
    """Whether the machine is on its way down; None if it is not known."""
    if service_shutdown is not None:
        return service_shutdown.is_set()
    # This is about the session of this process. That of services ends last of all, long after their hooks failed.
    return bool(win32api.GetSystemMetrics(_SM_SHUTTINGDOWN))


def claim_port(listener: socket.socket) -> None:
    """Make ``bind`` take a port that a process that has ended left in TIME_WAIT, and none that is in use."""
    if sys.platform == "win32":  # where SO_REUSEADDR would share the port with the process that has it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)


def is_writable(descriptor: int, timeout_seconds: float) -> bool:
    """Whether a line can be written without waiting longer than that; this system has no way to ask."""
    del descriptor, timeout_seconds
    return True


def supervisor_commands() -> SupervisorCommands:
    """The commands for the service control manager, in an elevated PowerShell."""
    return SupervisorCommands(
        prefix="",
        status="scheduled-events-agent service status",
        start="scheduled-events-agent service start",
        restart="Restart-Service ScheduledEventsAgent",
        reload="scheduled-events-agent service reload",
        enable="sc.exe config ScheduledEventsAgent start= auto",
        log=r'Get-Content -Tail 50 "$env:ProgramData\ScheduledEventsAgent\logs\agent.log"',
    )


def clock_command() -> str:
    """The command that shows whether something sets this machine's clock."""
    return "w32tm /query /status"


def may_change_user() -> bool:
    """Whether hooks may run as another account than the agent."""
    return False


def has_service_command() -> bool:
    """Whether the command ``service`` controls the agent's service; else the system's own tools do."""
    return True


def is_journal(descriptor: int) -> bool:
    """False: Windows has no journal that accepts lines."""
    del descriptor
    return False


def send_to_journal(fields: Mapping[str, str], timeout_seconds: float) -> bool:
    """False: Windows has no journal that accepts entries with fields of their own."""
    del fields, timeout_seconds
    return False


class ServiceManager:
    """The service manager of a process that is not a service: there is none to inform."""

    def notify(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """Ignore the state of the service: there is no manager to report it to."""

    def notify_status(self, status: str) -> None:
        """One line for people."""

    def keep_alive(self) -> None:
        """To be called as long as this process does its work."""
