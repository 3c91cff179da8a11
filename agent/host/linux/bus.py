"""A connection to systemd over the system's D-Bus.

jeepney does the protocol. What this file adds: nothing waits longer than its limit, and a signal counts only
if it comes from the process that answers as systemd, for other processes can send one that looks the same.
"""

import socket
import sys
from collections import deque
from typing import Any, Self

from jeepney import DBusAddress, HeaderFields, MatchRule, Message, message_bus, new_method_call
from jeepney.bus import find_system_bus
from jeepney.io.blocking import DBusConnection, prep_socket
from jeepney.wrappers import DBusErrorResponse, unwrap_msg

from agent.host.error import HostError

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

SYSTEMD = "org.freedesktop.systemd1"
MANAGER = f"{SYSTEMD}.Manager"
PROPERTIES = "org.freedesktop.DBus.Properties"
_MANAGER_PATH = "/org/freedesktop/systemd1"
_CALL_SECONDS = 10.0


class BusError(HostError):
    """systemd refused: ``name`` is the error's, such as org.freedesktop.DBus.Error.AccessDenied."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text or name, kind="refused")
        self.name = name


class BusLostError(HostError):
    """There is no bus, or no answer from it; what was asked for last may have been done or not."""


class _Connection(DBusConnection):  # type: ignore[misc]  # jeepney has no types
    def __init__(self, connection: socket.socket) -> None:
        try:
            super().__init__(connection)
        except BaseException:
            self.close()
            raise

    def receive(self, *, timeout: float | None = None) -> Message:
        # Its constructor says Hello without a time limit.
        return super().receive(timeout=_CALL_SECONDS if timeout is None else timeout)


class Bus:
    """A connection, for one thread. Raises BusLostError wherever the bus does not answer in time."""

    def __init__(self, timeout_seconds: float = _CALL_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._owner = ""
        self._signals: deque[Message] = deque()
        try:
            connection = prep_socket(find_system_bus(), timeout=timeout_seconds)
            connection.settimeout(timeout_seconds)
            self._connection = _Connection(connection)
        except Exception as error:  # noqa: BLE001 - jeepney raises anything for an answer that it cannot read
            raise _lost(error) from None
        self._connection.filter(MatchRule(type="signal"), queue=self._signals)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; systemd then releases the units that it holds for this one."""
        self._connection.close()

    def add_match(self, rule: str) -> None:
        """Have signals sent to this connection, too."""
        self._ask(message_bus.AddMatch(rule))

    def manager(self, member: str, signature: str = "", *arguments: Any) -> tuple[Any, ...]:
        """Call a method of systemd's manager."""
        return self.call(_MANAGER_PATH, MANAGER, member, signature, *arguments)

    def properties(self, path: str) -> dict[str, Any]:
        """All properties of a unit, as they were at one moment: no name of an interface means every one."""
        (properties,) = self.call(path, PROPERTIES, "GetAll", "s", "")
        return {name: value for name, (_, value) in properties.items()}

    def call(self, path: str, interface: str, member: str, signature: str, *arguments: Any) -> tuple[Any, ...]:
        """What systemd answers. Raises BusError if it refuses.

        Raises BusLostError as well if another process has become systemd since the last call: what the first one
        promised to report to this connection, the new one does not know.
        """
        address = DBusAddress(path, SYSTEMD, interface)
        answer = self._ask(new_method_call(address, member, signature or None, arguments))
        sender = answer.header.fields.get(HeaderFields.sender, "")
        if self._owner not in ("", sender):
            raise BusLostError("systemd was started again", kind="bus")
        self._owner = sender
        return tuple(answer.body)

    def next_signal(self, timeout_seconds: float) -> tuple[str, tuple[Any, ...]] | None:
        """The name and the values of the next signal, waited for that long; no name if it is not systemd's."""
        try:
            message = self._connection.recv_until_filtered(self._signals, timeout=timeout_seconds)
        except TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001 - as above
            raise _lost(error) from None
        fields = message.header.fields
        is_systemd = fields.get(HeaderFields.sender) == self._owner
        return fields.get(HeaderFields.member, "") if is_systemd else "", tuple(message.body)

    def _ask(self, call: Message) -> Message:
        try:
            answer = self._connection.send_and_get_reply(call, timeout=self._timeout_seconds)
            unwrap_msg(answer)
        except DBusErrorResponse as error:
            text = next((value for value in error.data if isinstance(value, str)), "")
            is_of_bus = answer.header.fields.get(HeaderFields.sender) == message_bus.bus_name
            if is_of_bus and not error.name.endswith("AccessDenied"):
                raise BusLostError(f"systemd does not answer: {text}", kind="bus") from None
            raise BusError(error.name, text) from None
        except Exception as error:  # noqa: BLE001 - as above
            raise _lost(error) from None
        return answer


def _lost(error: Exception) -> BusLostError:
    if isinstance(error, TimeoutError):
        text = "systemd or the system bus did not answer in time"
    else:
        told = error.strerror if isinstance(error, OSError) and error.strerror else error
        text = f"the system bus cannot be used: {told}"
    return BusLostError(text, kind="bus")
