"""A connection to systemd over the system's D-Bus.

jeepney does the protocol. What this file adds: nothing waits longer than its limit, and everything comes from one
systemd: other processes can send signals that look like its own.
"""

import socket
import sys
from collections import deque
from typing import Any

from jeepney import DBusAddress, HeaderFields, MatchRule, Message, message_bus, new_method_call
from jeepney.bus import find_system_bus
from jeepney.io.blocking import DBusConnection, prep_socket
from jeepney.wrappers import DBusErrorResponse, unwrap_msg

from agent.host.error import HostError

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

_SYSTEMD = "org.freedesktop.systemd1"
_MANAGER = f"{_SYSTEMD}.Manager"
_MANAGER_PATH = "/org/freedesktop/systemd1"
_CALL_SECONDS = 10.0


class BusError(HostError):
    """systemd refused: ``refusal`` is its error, such as org.freedesktop.DBus.Error.AccessDenied.

    Or it cannot be asked: ``refusal`` is empty, and what was asked for last may have been done or not.
    """

    def __init__(self, text: str, refusal: str = "") -> None:
        super().__init__(text, kind="bus")
        self.refusal = refusal


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
    """A connection, for one thread. Raises BusError wherever there is no answer in time."""

    def __init__(self, timeout_seconds: float = _CALL_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._systemd = _SYSTEMD
        self._job_signals: deque[Message] = deque()
        try:
            connection = prep_socket(find_system_bus(), timeout=timeout_seconds)
            connection.settimeout(timeout_seconds)
            self._connection = _Connection(connection)
        except Exception as error:  # noqa: BLE001 - jeepney raises anything for an answer that it cannot read
            raise _lost(error) from None

    def close(self) -> None:
        """End the connection; systemd then releases the units that it holds for this one."""
        self._connection.close()

    def manager(self, member: str, signature: str = "", *arguments: Any) -> tuple[Any, ...]:
        """Call a method of systemd's manager. Raises BusError."""
        return self._call(_MANAGER_PATH, _MANAGER, member, signature, *arguments)

    def unit(self, name: str) -> dict[str, Any]:
        """All properties of a unit, as they were at one moment. Raises BusError."""
        (path,) = self.manager("LoadUnit", "s", name)
        # No name of an interface means every one.
        (properties,) = self._call(path, "org.freedesktop.DBus.Properties", "GetAll", "s", "")
        return {name: value for name, (_, value) in properties.items()}

    def watch_jobs(self) -> None:
        """Have systemd tell this connection of each job that ends. Raises BusError."""
        self.manager("Subscribe")
        rule = MatchRule(type="signal", sender=self._systemd, interface=_MANAGER, member="JobRemoved")
        self._ask(message_bus.AddMatch(rule))
        self._connection.filter(rule, queue=self._job_signals)

    def ended_jobs(self, timeout_seconds: float) -> list[tuple[str, str, str]]:
        """Path, unit and result of each job that has ended; waits that long if there is none. Raises BusError."""
        try:
            signals = [self._connection.recv_until_filtered(self._job_signals, timeout=timeout_seconds)]
        except TimeoutError:
            return []
        except Exception as error:  # noqa: BLE001 - as above
            raise _lost(error) from None
        signals += self._job_signals
        self._job_signals.clear()
        return [(path, unit, result) for _, path, unit, result in (signal.body for signal in signals)]

    def _call(self, path: str, interface: str, member: str, signature: str, *arguments: Any) -> tuple[Any, ...]:
        address = DBusAddress(path, self._systemd, interface)
        answer = self._ask(new_method_call(address, member, signature or None, arguments))
        # Only the process that answered first is asked again: another one does not know what it has promised.
        self._systemd = answer.header.fields[HeaderFields.sender]
        return tuple(answer.body)

    def _ask(self, call: Message) -> Message:
        try:
            answer = self._connection.send_and_get_reply(call, timeout=self._timeout_seconds)
            unwrap_msg(answer)
        except DBusErrorResponse as error:
            text = next((value for value in error.data if isinstance(value, str)), error.name)
            is_of_bus = answer.header.fields.get(HeaderFields.sender) == message_bus.bus_name
            if is_of_bus and not error.name.endswith("AccessDenied"):
                raise BusError(f"systemd does not answer: {text}") from None
            raise BusError(text, error.name) from None
        except Exception as error:  # noqa: BLE001 - as above
            raise _lost(error) from None
        return answer


def _lost(error: Exception) -> BusError:
    if isinstance(error, TimeoutError | BlockingIOError):  # jeepney's socket says the latter with no time left
        return BusError("systemd or the system bus did not answer in time")
    told = error.strerror if isinstance(error, OSError) and error.strerror else error
    return BusError(f"the system bus cannot be used: {told}")
