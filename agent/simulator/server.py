"""HTTP/1.1 on one port per VM: reads requests, sends answers, carries faults out.

Owns the sockets and their threads: one that accepts, one for each connection. Decides nothing: what to answer
comes from a ``Responder``. The one invariant: after ``close`` no thread and no socket is left.

Written on sockets instead of http.server, for faults need the bare connection and an idle poll should
cost next to nothing.
"""

import contextlib
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from email.utils import formatdate
from io import BufferedReader, RawIOBase
from ipaddress import ip_address
from itertools import count
from typing import Any, Protocol

from agent.simulator.azure import SimulatorError
from agent.simulator.faults import Fault
from agent.simulator.protocol import Answer, Request

_MAX_LINE = 65536
_MAX_HEADERS = 100
_MAX_BODY = 1024 * 1024
_CHUNK = b" " * 65536
LOOPBACK = "127.0.0.1"
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(;.*)?\r?\n")
_PATIENCE_SECONDS = 0.2  # far more than a thread takes that was woken


class _BadRequestError(Exception):
    """The bytes are not a request that this server understands."""


class Responder(Protocol):
    """Who decides what a request gets. Called from connection threads, several at once."""

    def choose_fault(self, vm: str, request: Request) -> Fault | None:
        """The fault that befalls this request."""

    def answer(self, vm: str, connection: int, request: Request, fault: Fault | None, *, is_heard: bool) -> Answer:
        """What to send; called when it is about to be sent, or (if not ``is_heard``) nobody waits for it."""


class Server:
    """One listening socket per VM."""

    def __init__(
        self,
        vms: Iterable[str],
        responder: Responder,
        first_port: int = 0,
        *,
        bind: str = LOOPBACK,
        request_seconds: float | None = None,
        max_connections: int | None = None,
    ) -> None:
        """``request_seconds``: within this a request must have come, and a connection serves only one.

        ``max_connections``: any further one is closed at once. Faults need neither limit.
        """
        try:
            address = ip_address(bind)
        except ValueError:
            raise SimulatorError(
                f'expected an address of this machine such as 127.0.0.1 or 0.0.0.0; got "{bind}"', kind="usage"
            ) from None
        self.is_open = not address.is_loopback
        """Whether clients on other machines can connect."""
        self.host = str(address)
        """Where a client on this machine connects to."""
        if address.is_unspecified:
            self.host = LOOPBACK if address.version == 4 else "::1"
        if address.version == 6:
            self.host = f"[{self.host}]"
        self.ports: dict[str, int] = {}
        self._request_seconds = request_seconds
        self._max_connections = max_connections
        self._responder = responder
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._listeners: list[socket.socket] = []
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._numbers = count(1)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._acceptor = threading.Thread(target=self._accept, name="simulator-accept", daemon=True)
        try:
            for index, vm in enumerate(vms):
                self._listen(vm, str(address), first_port + index if first_port else 0)
        except BaseException:
            self._close_sockets()
            raise

    def start(self) -> None:
        """Begin to accept; does not block."""
        self._acceptor.start()

    def close(self) -> None:
        """End every connection and wait for the threads."""
        self._closing.set()
        if self._acceptor.is_alive():
            self._wake_sender.send(b"x")
            self._acceptor.join()
        self._close_sockets()
        with self._lock:
            open_connections = dict(self._connections)
            for connection in open_connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection, thread in open_connections.items():
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():  # Windows lets a thread wait in recv until the socket is closed
                with contextlib.suppress(OSError):
                    socket.close(connection.detach())
                thread.join()

    def _listen(self, vm: str, bind: str, port: int) -> None:
        try:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            listener = socket.create_server((bind, port), family=family, backlog=64)
        except (OSError, OverflowError) as error:
            raise SimulatorError(
                f"cannot listen on {bind}:{port} for {vm}: {error}; choose another port, or 0 for a free one",
                kind="usage",
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, vm)
        self.ports[vm] = listener.getsockname()[1]

    def _close_sockets(self) -> None:
        self._selector.close()
        for item in (self._wake_sender, self._wake_receiver, *self._listeners):
            item.close()

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if self._closing.is_set():
                    return
                listener = key.fileobj
                if not isinstance(listener, socket.socket) or listener is self._wake_receiver:
                    continue
                try:
                    connection, _ = listener.accept()
                except OSError:  # the client has gone again
                    continue
                if self._max_connections is not None and len(self._connections) >= self._max_connections:
                    connection.close()
                    continue
                connection.setblocking(True)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                number = next(self._numbers)
                thread = threading.Thread(
                    target=self._serve,
                    args=(connection, key.data, number),
                    name=f"simulator-{key.data}-{number}",
                    daemon=True,
                )
                with self._lock:
                    self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket, vm: str, number: int) -> None:
        try:
            with connection, self._reader(connection) as stream:
                try:
                    while self._serve_one(connection, stream, vm, number) and self._request_seconds is None:
                        pass
                except _BadRequestError as error:
                    text = str(error).encode()
                    connection.sendall(
                        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
                        % (len(text), text)
                    )
                finally:
                    with self._lock:  # before it is closed: close() must not touch a number used again
                        self._connections.pop(connection, None)
        except OSError:  # the client has gone, or close() has cut the connection
            pass

    def _reader(self, connection: socket.socket) -> BufferedReader:
        if self._request_seconds is None:
            return connection.makefile("rb")
        return BufferedReader(_ReadUntil(connection, time.monotonic() + self._request_seconds))

    def _serve_one(self, connection: socket.socket, stream: BufferedReader, vm: str, number: int) -> bool:
        """Serve one request; False if the connection is not to be used again."""
        read = _read_request(connection, stream)
        if read is None:
            return False
        request, keep_alive = read
        fault = self._responder.choose_fault(vm, request)
        kind = fault.kind if fault else ""
        if fault and kind == "slow" and self._closing.wait(fault.delay_seconds):
            return False
        is_heard = kind != "slow" or not _has_gone(connection)
        wire = self._responder.answer(vm, number, request, fault, is_heard=is_heard).wire
        if not is_heard:
            return False
        if fault is None:
            connection.sendall(_dated(wire))
        elif kind == "stall":
            while connection.recv(4096):  # until the client gives up, or close()
                pass
            return False
        elif kind == "reset":
            # Lingering for no time makes close() send a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        elif kind == "drip":
            for index in range(len(wire)):
                connection.sendall(wire[index : index + 1])
                if self._closing.wait(fault.delay_seconds):
                    return False
        elif kind == "half-closed":
            connection.sendall(wire)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):  # the client may still speak
                pass
            return False
        elif kind == "oversized":
            connection.sendall(wire)  # the head only
            for _ in range(fault.size_bytes // len(_CHUNK)):
                connection.sendall(_CHUNK)
            connection.sendall(_CHUNK[: fault.size_bytes % len(_CHUNK)])
        elif kind == "endless":
            connection.sendall(wire)
            while not self._closing.is_set():
                connection.sendall(_CHUNK)
            return False
        else:
            connection.sendall(wire)
            return keep_alive and kind not in ("not-http", "truncated", "bad-chunks")
        return keep_alive


class _ReadUntil(RawIOBase):
    """Reads from a connection until a deadline, also from a client that sends a byte now and then."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        return self._connection.recv_into(buffer)


def _has_gone(connection: socket.socket) -> bool:
    """Whether the client has closed its side; it sends nothing else while it waits for an answer."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK)


def _dated(wire: bytes) -> bytes:
    """The answer with the time in its head."""
    status_line, _, rest = wire.partition(b"\r\n")
    return b"%b\r\nDate: %b\r\n%b" % (status_line, formatdate(usegmt=True).encode(), rest)


def _read_request(connection: socket.socket, stream: BufferedReader) -> tuple[Request, bool] | None:
    """The next request and whether the connection stays open; None at the end of the stream."""
    line = stream.readline(_MAX_LINE)
    if not line:
        return None
    words = line.decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _BadRequestError("not an HTTP/1 request line")
    headers: dict[str, str] = {}
    while (line := stream.readline(_MAX_LINE)) not in (b"\r\n", b"\n"):
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or len(headers) > _MAX_HEADERS:
            raise _BadRequestError("not a header, or too many of them")
        headers[name.strip().lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = _read_body(stream, headers)
    if body is None:
        return None
    keeps = headers.get("connection", "").lower() != "close" and words[2] != "HTTP/1.0"
    return Request(method=words[0], target=words[1], headers=headers, body=body), keeps


def _read_body(stream: BufferedReader, headers: dict[str, str]) -> bytes | None:
    """The body of a request with these headers; None if the stream ends before it does."""
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers:
        if "content-length" in headers or headers["transfer-encoding"].lower() != "chunked":
            raise _BadRequestError("only bodies with a Content-Length, or chunked ones, are understood")
        return _read_chunks(stream)
    if not (length.isascii() and length.isdigit()) or len(length) > len(str(_MAX_BODY)) or int(length) > _MAX_BODY:
        raise _BadRequestError("a Content-Length that cannot be, or is too large")
    body = stream.read(int(length))
    return body if len(body) == int(length) else None


def _read_chunks(stream: BufferedReader) -> bytes | None:
    body = b""
    while line := stream.readline(_MAX_LINE):
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None or len(body) + int(size[1], 16) > _MAX_BODY:
            raise _BadRequestError("not a chunk, or too many of them")
        if not (length := int(size[1], 16)):
            for _ in range(_MAX_HEADERS):  # trailers, and the empty line behind them
                if stream.readline(_MAX_LINE) in (b"\r\n", b"\n", b""):
                    return body
            raise _BadRequestError("too many trailers")
        body += stream.read(length)
        if stream.readline(_MAX_LINE) not in (b"\r\n", b"\n"):
            raise _BadRequestError("a chunk that is not as long as it says")
    return None
