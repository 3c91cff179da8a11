"""The least that a client takes for the metadata service, with the times at which things passed by.

Owns one listening socket and a thread for each connection. Times are ``time.monotonic``, which all processes
of a Linux machine share. The one invariant: a time is never kinder to the client than the truth: a document
counts as served before its last bytes are handed to the system, a request as arrived when it was read whole.
"""

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

_PATIENCE_SECONDS = 60.0
_EVENT_ID = re.compile(r'"EventId"\s*:\s*"([^"]*)"')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_INSTANCE = b'{"compute": {"name": "vm-1", "vmId": "00000000-0000-0000-0000-000000000001"}}'
EMPTY_DOCUMENT = b'{"DocumentIncarnation": 1, "Events": []}'


class Endpoint:
    """Serves one document until ``publish`` replaces it; a context manager."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._document = EMPTY_DOCUMENT
        self._polls = 0
        self._first_poll_at = 0.0
        self._served_at = 0.0
        self._approved_at: dict[str, float] = {}
        self._connections: list[socket.socket] = []
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def polls(self) -> int:
        """How many documents have been served."""
        return self._polls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def publish(self, document: bytes) -> None:
        """Serve this document from the next poll on."""
        with self._changed:
            self._document, self._served_at = document, 0.0

    def wait_served(self) -> float:
        """Wait until the document has been served; returns when it first was."""
        with self._changed:
            self._wait(lambda: self._served_at > 0.0, "the document was polled")
            return self._served_at

    def wait_polls(self, count: int, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait for ``count`` more polls."""
        with self._changed:
            goal = self._polls + count
            self._wait(lambda: self._polls >= goal, f"{count} more polls came", patience_seconds)

    def wait_first_poll(self) -> float:
        """Wait for the first poll of all; returns when it arrived."""
        with self._changed:
            self._wait(lambda: self._first_poll_at > 0.0, "the first poll came")
            return self._first_poll_at

    def wait_approved(self, event_id: str) -> float:
        """Wait for an approval of the event; returns when it arrived."""
        with self._changed:
            self._wait(lambda: event_id in self._approved_at, f"{event_id} was approved")
            return self._approved_at[event_id]

    def _wait(self, test: Callable[[], bool], what: str, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        if not self._changed.wait_for(test, patience_seconds):
            raise TimeoutError(f"waited {patience_seconds:g}s in vain until {what}")

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := _read_request(connection):
                self._answer(connection, request, time.monotonic())

    def _answer(self, connection: socket.socket, request: bytes, arrived_at: float) -> None:
        if request.startswith(b"POST "):
            ids = _EVENT_ID.findall(request.partition(b"\r\n\r\n")[2].decode())
            with self._changed:
                for event_id in ids:
                    self._approved_at.setdefault(event_id, arrived_at)
                self._changed.notify_all()
            connection.sendall(_head(b""))
        elif b"/metadata/instance" in request.partition(b"\r\n")[0]:
            connection.sendall(_head(_INSTANCE) + _INSTANCE)
        else:
            document = self._document
            answer = memoryview(_head(document) + document)
            connection.sendall(answer[:-1024])
            served_at = time.monotonic()
            connection.sendall(answer[-1024:])
            with self._changed:
                self._polls += 1
                self._first_poll_at = self._first_poll_at or arrived_at
                if document is self._document:
                    self._served_at = self._served_at or served_at
                self._changed.notify_all()


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b""
        data += more
    length = _LENGTH.search(data)
    body_start = data.index(b"\r\n\r\n") + 4
    missing = (int(length[1]) if length else 0) - (len(data) - body_start)
    parts = [data]
    while missing > 0:
        more = connection.recv(65536)
        if not more:
            return b""
        parts.append(more)
        missing -= len(more)
    return b"".join(parts)


def _head(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
