"""Linux as a system: messages to systemd, the id of the boot, the journal, the DHCP leases."""

import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Literal

from scheduled_events_agent.host import dhcp
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.supervisor import UNIT_PLACES, SupervisorCommands

if sys.platform == "win32":
    raise ImportError("scheduled_events_agent.host.linux is for Linux; import scheduled_events_agent.host instead")

# Where systemd-networkd, NetworkManager and dhclient (in Debian's and Red Hat's places) keep their leases.
_LEASES = (
    "run/systemd/netif/leases/*",
    "run/NetworkManager/devices/*",
    "var/lib/NetworkManager/*.lease",
    "var/lib/dhcp/*.lease*",
    "var/lib/dhclient/*.lease*",
)
_GUEST_PROXY = "azure-proxy-agent"
_MAX_LEASE_CHARACTERS = 1 << 20
_MAX_STATUS_CHARACTERS = 1000
_NOTIFY_TIMEOUT_SECONDS = 1.0
_JOURNAL_SOCKET = "/run/systemd/journal/socket"


def boot_id() -> str:
    """A text that differs from one start of the system to the next; compare with ``is_same_boot``."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError(f"cannot tell which boot this is: {error}", kind="boot_id") from None


def kubelet_boot_id() -> str:
    """This start of the system as a kubelet reports it for its node. Raises HostError."""
    return boot_id()


def is_same_boot(one: str, other: str) -> bool:
    """Whether two values of ``boot_id`` name the same start of the system."""
    return one == other


def dhcp_option_245() -> str | None:
    """The address in DHCP option 245 of the newest lease that has it; None if none has."""
    return _option_245_of(Path("/"))


def has_guest_proxy() -> bool:
    """Whether Azure's Guest Proxy Agent is installed: its unit is there. A container does not see it."""
    return _has_unit(Path("/"), _GUEST_PROXY)


def guest_proxy_command() -> str:
    """Shows whether the Guest Proxy Agent runs."""
    return f"systemctl status {_GUEST_PROXY}"


def supervisor_commands() -> SupervisorCommands:
    """For systemd."""
    unit = "scheduled-events-agent"
    return SupervisorCommands(
        prefix="sudo ",
        status=f"systemctl status {unit}",
        start=f"sudo systemctl start {unit}",
        restart=f"sudo systemctl restart {unit}",
        reload=f"sudo systemctl reload {unit}",
        enable=f"sudo systemctl enable {unit}",
        log=f"sudo journalctl -u {unit} -n 50",
    )


def clock_command() -> str:
    """The command that shows whether something sets this machine's clock."""
    return "timedatectl"


def may_change_user() -> bool:
    """Whether hooks may run as another account than the agent."""
    return True


def has_service_command() -> bool:
    """Whether the command ``service`` controls the agent's service; else the system's own tools do."""
    return False


def is_journal(descriptor: int) -> bool:
    """Whether the stream goes to the system's journal, which accepts priorities such as ``<4>``."""
    try:
        facts = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"


def send_to_journal(fields: Mapping[str, str], timeout_seconds: float) -> bool:
    """Write one entry with fields of its own; False if the journal does not accept it in that time."""
    entry = b""
    for name, text in fields.items():
        value = text.encode("utf-8", "replace")
        entry += name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(timeout_seconds)
            sender.sendto(entry, _JOURNAL_SOCKET)
    except OSError:
        return False
    return True


class ServiceManager:
    """systemd, if it started this process (see sd_notify(3)); otherwise nothing is sent.

    For any thread. Nothing here fails. Only ``notify`` waits for a busy systemd, a second at most: if systemd
    missed that message, it would take this process for one that does not start.
    """

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        # Then systemd kills and restarts a process that does not call keep_alive for too long.
        self._is_watched = is_watched and os.environ.get("WATCHDOG_USEC", "0") != "0"

    def notify(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """The state of the service; ``status`` is one line for people."""
        words = {
            "ready": "READY=1",
            "reloading": f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}",
            "stopping": "STOPPING=1",
        }
        self._send(f"{words[state]}\n{_status_line(status)}", _NOTIFY_TIMEOUT_SECONDS)

    def notify_status(self, status: str) -> None:
        """One line for people."""
        self._send(_status_line(status))

    def keep_alive(self) -> None:
        """To be called as long as this process does its work."""
        if self._is_watched:
            self._send("WATCHDOG=1")

    def _send(self, message: str, timeout_seconds: float = 0.0) -> None:
        if self._address:
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
            ):
                sender.settimeout(timeout_seconds)
                sender.connect(self._address)  # sendto() would not wait
                sender.send(message.encode("utf-8", "replace"))


def _status_line(status: str) -> str:
    # The names of events come from the network, and systemd would read a new line as another message.
    line = "".join(c if c.isprintable() else " " for c in status)
    return f"STATUS={line[:_MAX_STATUS_CHARACTERS]}"


def is_writable(descriptor: int, timeout_seconds: float) -> bool:
    """Whether a line (up to 4 KiB, as a pipe promises) can be written without waiting longer than that."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(timeout_seconds * 1000))


def claim_port(listener: socket.socket) -> None:
    """Make ``bind`` take a port that a process that has ended left in TIME_WAIT, and none that is in use."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _has_unit(root: Path, name: str) -> bool:
    return any((root / place / f"{name}.service").exists() for place in UNIT_PLACES)


def _option_245_of(root: Path) -> str | None:
    texts = []
    for path in (path for pattern in _LEASES for path in root.glob(pattern)):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            texts.append((os.fstat(file.fileno()).st_mtime, file.read(_MAX_LEASE_CHARACTERS)))
    newest_first = sorted(texts, key=itemgetter(0), reverse=True)
    for _, text in newest_first:
        address = dhcp.parse_lease(text)
        if address:
            return address
    return None
