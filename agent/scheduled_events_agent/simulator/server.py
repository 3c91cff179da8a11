"""HTTP/1.1 on one port per VM: reads requests, sends answers, and applies faults to the connection.

Each port and each connection has a thread. A ``Responder`` decides the answer.
Invariant: after ``close`` no thread and no socket is left.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from itertools import count
from typing import Any, cast

from scheduled_events_agent import host
from scheduled_events_agent.simulator.azure import SimulatorError
from scheduled_events_agent.simulator.faults import Fault
from scheduled_events_agent.simulator.protocol import Answer, Request, make_answer

LOOPBACK = "127.0.0.1"
_MAX_LINE = 65536
_MAX_BODY = 1024 * 1024
_BLANKS = b" " * 65536
_BACKLOG = 128
_TIMEOUT_SECONDS = 0.2  # far more than a thread takes that was woken
# Lingering for no time makes close() send a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class Connection(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, connection: socket.socket, server: "Server", name: str, number: int) -> None:
        """Serves requests until the connection ends. ``number``: counted from 1."""
        self._server = server
        self._name = name
        self._number = number
        super().__init__(connection, ("", 0), cast("Any", server))

    def handle_one_request(self) -> None:
        """Read a request and answer it; called by the base class until ``close_connection`` is set."""
        self.raw_requestline = self.rfile.readline(_MAX_LINE)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            body = self._read_body(headers)
        except ValueError:
            self.send_error(400, "expected a body with its Content-Length, or in chunks, of at most 1 MiB")
            self.close_connection = True
            return
        request = Request(method=self.command, target=self.path, headers=headers, body=body)
        answer, fault = self._server.respond(self._name, self._number, request)
        self._send(answer.wire, fault)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Reject a request that is not HTTP; the base class calls this too."""
        text = (message or "").encode()
        headers = (("Connection", "close"),)
        self.connection.sendall(make_answer(code, text, content_type="text/plain", headers=headers).wire)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
        """Log nothing: the simulator has its own record of requests."""

    def _send(self, wire: bytes, fault: Fault | None) -> None:
        connection = self.connection
        closing = self._server.closing
        match fault and fault.kind:
            case "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            case "stall":
                while connection.recv(4096):  # until the client gives up, or close()
                    pass
            case "drip" if fault is not None:
                for index in range(len(wire)):
                    connection.sendall(wire[index : index + 1])
                    if closing.wait(fault.delay_seconds):
                        break
            case "endless":
                connection.sendall(wire)
                while not closing.is_set():
                    connection.sendall(_BLANKS)
            case _:
                status_line, _, rest = wire.partition(b"\r\n")
                connection.sendall(b"%b\r\n%b%b" % (status_line, _date_header(fault), rest))
        if fault is not None and fault.kind in ("reset", "stall", "endless", "truncated"):
            self.close_connection = True

    def _read_body(self, headers: dict[str, str]) -> bytes:
        """The body of a request with these headers; raises ValueError if that is not how a body is sent."""
        if "transfer-encoding" not in headers:
            return self.rfile.read(_size(headers.get("content-length", "0"), 10))
        body = b""
        while size := _size(self.rfile.readline(_MAX_LINE).partition(b";")[0], 16):
            _size(str(len(body) + size), 10)
            body += self.rfile.read(size)
            self.rfile.readline(_MAX_LINE)
        while self.rfile.readline(_MAX_LINE).strip():  # trailers
            pass
        return body


def _date_header(fault: Fault | None) -> bytes:
    """The line with the Date; empty if the fault leaves it out."""
    now = time.time()
    match fault and fault.kind:
        case "undated":
            return b""
        case "clock_ahead" if fault is not None:
            now += fault.clock_seconds
        case "clock_behind" if fault is not None:
            now -= fault.clock_seconds
    return b"Date: %b\r\n" % formatdate(now, usegmt=True).encode()


Responder = Callable[[str, int, Request], tuple[Answer, Fault | None]]
"""Returns the answer for a client of a VM, and the fault in sending it. Called from several threads."""


class Server:
    """One listening socket per VM."""

    def __init__(
        self, names: Iterable[str], respond: Responder, first_port: int = 0, *, bind: str = LOOPBACK
    ) -> None:
        """Listens at once, but accepts from ``start`` on. ``first_port`` 0: free ones."""
        try:
            address = ip_address(bind)
        except ValueError:
            raise SimulatorError(
                f'expected an address of this machine such as 127.0.0.1 or 0.0.0.0; got "{bind}"', kind="usage"
            ) from None
        self.is_open = not address.is_loopback
        """Whether clients on other machines can connect."""
        self.respond = respond
        self.closing = threading.Event()
        self._host = str(address)
        if address.is_unspecified:
            self._host = LOOPBACK if address.version == 4 else "::1"
        self.ports: dict[str, int] = {}
        self._address = str(address)
        self._listeners: dict[str, socket.socket] = {}
        self._acceptors: dict[str, threading.Thread] = {}
        self._refused: frozenset[str] = frozenset()
        self._is_started = False
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._numbers = count(1)
        try:
            for index, name in enumerate(names):
                listener = _bind(name, self._address, first_port + index if first_port else 0)
                self._listeners[name] = listener
                listener.listen(_BACKLOG)
                self.ports[name] = listener.getsockname()[1]
        except SimulatorError:
            self.close()
            raise

    def url(self, name: str) -> str:
        """The address that a client on this machine connects to."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.ports[name]}"

    def start(self) -> None:
        """Begin to accept; does not block."""
        self._is_started = True
        for name in self.ports.keys() - self._refused:
            self._start_to_accept(name)

    def refuse(self, names: Collection[str]) -> None:
        """Refuse new connections to the ports of these VMs, and to no others. For one thread at a time."""
        before, self._refused = self._refused, frozenset(names)
        for name in self._refused - before:
            self._stop_to_accept(name)
            self._listeners[name].close()
            # A socket that does not listen keeps the port, and its connections are refused.
            self._listeners[name] = _bind(name, self._address, self.ports[name])
        for name in before - self._refused:
            self._listeners[name].listen(_BACKLOG)
            if self._is_started:
                self._start_to_accept(name)

    def close(self) -> None:
        """End every connection and wait for the threads."""
        self.closing.set()
        for name in list(self._acceptors):
            self._stop_to_accept(name)
        for listener in self._listeners.values():
            listener.close()
        with self._lock:
            open_connections = dict(self._connections)
            for connection in open_connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection, thread in open_connections.items():
            thread.join(_TIMEOUT_SECONDS)
            if thread.is_alive():  # Windows lets a thread wait in recv until the socket is closed
                with contextlib.suppress(OSError):
                    socket.close(connection.detach())
                thread.join()

    def _start_to_accept(self, name: str) -> None:
        thread = threading.Thread(target=self._accept, args=(name, self._listeners[name]), daemon=True)
        thread.start()
        self._acceptors[name] = thread

    def _stop_to_accept(self, name: str) -> None:
        """Wait for the end of the thread that accepts, if there is one: ``close`` or ``refuse`` wants it."""
        acceptor = self._acceptors.pop(name, None)
        if acceptor is not None:
            with contextlib.suppress(OSError):  # wakes the thread that waits in accept()
                socket.create_connection((self._host, self.ports[name]), _TIMEOUT_SECONDS).close()
            acceptor.join()

    def _accept(self, name: str, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the client has gone again
                continue
            if self.closing.is_set() or name in self._refused:
                connection.close()
                return
            thread = threading.Thread(
                target=self._serve, args=(connection, name, next(self._numbers)), daemon=True
            )
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket, name: str, number: int) -> None:
        with contextlib.suppress(OSError), connection:  # the client has gone, or close() has cut the connection
            try:
                Connection(connection, self, name, number)
            finally:
                with self._lock:  # before it is closed: close() must not touch a number used again
                    self._connections.pop(connection, None)


def _bind(name: str, bind: str, port: int) -> socket.socket:
    """A socket at this address that does not listen yet."""
    bound = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET)
    try:
        host.claim_port(bound)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((bind, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise SimulatorError(
            f"cannot listen on {bind}:{port} for {name}: {error}; choose another port, or 0 for a free one",
            kind="usage",
        ) from error
    return bound


def _size(text: str | bytes, base: int) -> int:
    size = int(text, base)
    if not 0 <= size <= _MAX_BODY:
        raise ValueError(size)
    return size
