"""A connection to the system's D-Bus, as far as talking to systemd needs it: calls, their answers, and signals.

Owns the socket, its deadlines, and whom to believe; the wire format is jeepney's (its own connections can wait
without end, so they are not used). Knows nothing of systemd or units. What it must keep true: nothing waits longer
than it was told to; an answer is the called service's own (the bus sees to that); and a signal is passed on only
if it comes from the service that was last asked, for others on this machine could send one that looks the same.

Texts, numbers and lists are Python's own; a struct is a tuple, a variant is what it holds, ``ay`` is bytes.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

from jeepney import DBusAddress, HeaderFields, Message, MessageType, Parser, message_bus, new_method_call
from jeepney.auth import BEGIN, AuthenticationError, Authenticator
from jeepney.bus import find_system_bus
from jeepney.low_level import Array, Struct, Variant, parse_signature

from agent.host.linux import HostError

if sys.platform == "win32":
    raise ImportError("agent.host.dbus is for Linux")

_CALL_SECONDS = 10.0
_MAX_MESSAGE = 1 << 27  # the protocol's own limit


class BusError(HostError):
    """The service refused: ``name`` is the error's, such as org.freedesktop.DBus.Error.AccessDenied."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text or name, kind="refused")
        self.name = name


class BusLostError(HostError):
    """There is no bus, or no answer from it; what was asked for last may have been done or not."""


class _BusSilentError(BusLostError):
    """Nothing came in time, or nothing could be sent."""


class Signal(NamedTuple):
    """Something that happened."""

    member: str
    path: str
    values: tuple[Any, ...]


class Bus:
    """A connection, for one thread. Raises BusLostError wherever the bus does not answer in time."""

    def __init__(self, service: str, timeout_seconds: float = _CALL_SECONDS) -> None:
        """``service``: the name of whom ``call`` is for, such as org.freedesktop.systemd1."""
        self._service = service
        self._owner = ""
        self._serial = 0
        self._parser = Parser()
        self._signals: deque[Signal] = deque()
        deadline = time.monotonic() + timeout_seconds
        try:
            address = find_system_bus()
        except (RuntimeError, ValueError):  # of a kind that jeepney does not know, or no address at all
            told = os.environ.get("DBUS_SYSTEM_BUS_ADDRESS")
            wish = "DBUS_SYSTEM_BUS_ADDRESS: expected an address such as unix:path=/run/dbus/system_bus_socket"
            raise BusLostError(f"{wish}, got {told!r}", kind="bus") from None
        path = address.replace("\0", "@")  # one that is no file
        try:
            self._socket = socket.socket(socket.AF_UNIX)
        except OSError as error:  # too many open files
            raise BusLostError(f"cannot connect to the system bus: {error.strerror}", kind="bus") from None
        try:
            self._socket.settimeout(timeout_seconds)
            try:
                self._socket.connect(address)
            except OSError as error:
                raise BusLostError(f"no system bus at {path}: {error.strerror or error}", kind="bus") from None
            try:
                self._authenticate(deadline)
            except AuthenticationError:
                raise BusLostError(f"the bus at {path} refuses uid {os.geteuid()}", kind="bus") from None
            self._ask(message_bus.Hello(), deadline)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; what the service held for it is let go."""
        self._socket.close()

    def add_match(self, rule: str) -> None:
        """Have signals sent to this connection, too."""
        self._ask(message_bus.AddMatch(rule), time.monotonic() + _CALL_SECONDS)

    def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *arguments: Any,
        timeout_seconds: float = _CALL_SECONDS,
    ) -> tuple[Any, ...]:
        """What the service answers. Raises BusError if it refuses.

        Raises BusLostError as well if another process has become the service since the last call: what that one
        promised to tell this connection, it may not know.
        """
        deadline = time.monotonic() + timeout_seconds
        service = DBusAddress(path, self._service, interface)
        answer = self._ask(new_method_call(service, member, signature or None, arguments), deadline)
        sender = answer.header.fields.get(HeaderFields.sender, "")
        if self._owner not in ("", sender):
            raise BusLostError(f"{self._service} was started again", kind="bus")
        self._owner = sender
        return tuple(answer.body)

    def next_signal(self, timeout_seconds: float) -> Signal | None:
        """The next signal of the service, waited for that long; None also when anything else came."""
        if not self._signals and timeout_seconds > 0:
            with suppress(_BusSilentError):
                self._take(time.monotonic() + timeout_seconds)
        return self._signals.popleft() if self._signals else None

    def _authenticate(self, deadline: float) -> None:
        authenticator = Authenticator()
        for data in authenticator:
            self._send(data, deadline)
            authenticator.feed(self._receive(deadline))
        self._send(BEGIN, deadline)

    def _ask(self, call: Message, deadline: float) -> Message:
        """The answer."""
        self._serial += 1
        self._send(call.serialise(self._serial), deadline)
        while True:
            answer = self._take(deadline)
            fields = answer.header.fields
            if fields.get(HeaderFields.reply_serial) != self._serial:
                continue
            if answer.header.message_type == MessageType.method_return:
                return answer
            if answer.header.message_type == MessageType.error:
                break
        name = fields.get(HeaderFields.error_name, "")
        text = next((value for value in answer.body if isinstance(value, str)), "")
        service, bus = call.header.fields[HeaderFields.destination], message_bus.bus_name
        is_of_bus = fields.get(HeaderFields.sender) == bus != service
        if is_of_bus and not name.endswith("AccessDenied"):
            raise BusLostError(f"{service} does not answer: {text}", kind="bus")
        raise BusError(name, text)

    def _take(self, deadline: float) -> Message:
        """The next message; signals are put aside."""
        try:
            while (message := self._parser.get_next_message()) is None:
                size = self._parser.bytes_desired()
                if size > _MAX_MESSAGE:
                    raise BusLostError(f"the system bus sends a message of {size} bytes", kind="bus")
                self._parser.add_data(self._receive(deadline))
            fields = message.header.fields
            message.body = _plain(parse_signature([*f"({fields.get(HeaderFields.signature, '')})"]), message.body)
        except BusLostError:
            raise
        except Exception as error:  # noqa: BLE001 - jeepney has no exception of its own for what it cannot read
            raise BusLostError(f"the system bus sends what is no message: {error!r}", kind="bus") from None
        if message.header.message_type == MessageType.signal and fields.get(HeaderFields.sender) == self._owner:
            member, path = fields.get(HeaderFields.member, ""), fields.get(HeaderFields.path, "")
            self._signals.append(Signal(member, path, message.body))
        return message

    def _send(self, data: bytes, deadline: float) -> None:
        with self._until(deadline):
            self._socket.sendall(data)

    def _receive(self, deadline: float) -> bytes:
        with self._until(deadline):
            data = self._socket.recv(1 << 16)
        if not data:
            raise BusLostError("the system bus is gone: it closed the connection", kind="bus")
        return data

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Whatever is done with the socket ends at the deadline."""
        try:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            yield
        except TimeoutError:
            reason = "the system bus or who was asked did not answer in time"
            raise _BusSilentError(reason, kind="bus") from None
        except OSError as error:
            raise BusLostError(f"the system bus is gone: {error.strerror or error}", kind="bus") from None


def _plain(kind: Any, value: Any) -> Any:
    """The value without the types that jeepney leaves beside what a variant holds; ``kind`` is its own type."""
    if isinstance(kind, Variant):
        signature, held = value
        return _plain(parse_signature([*signature]), held)
    if isinstance(kind, Struct):
        return tuple(map(_plain, kind.fields, value))
    if isinstance(kind, Array) and isinstance(value, list):
        return [_plain(kind.elt_type, item) for item in value]
    if isinstance(kind, Array) and isinstance(value, dict):
        return {key: _plain(kind.elt_type.fields[1], item) for key, item in value.items()}
    return value
