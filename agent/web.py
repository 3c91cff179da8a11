"""The agent's web server: a handful of pages that others have prepared.

Owns the sockets and HTTP. Reads nothing of the engine: each page is a function that returns a finished
answer from published values. The one invariant: nothing that a client does can change anything, or keep the
agent from its work: only GET and HEAD, bounded requests, a few connections at a time, each with a time limit.
"""

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent import AgentError, __version__, host

# A scrape and a probe at a time is what there is; a fleet of slow clients waits outside.
_MAX_CONNECTIONS = 16
_TIMEOUT_SECONDS = 5.0
_REFUSED_SECONDS = 0.1


HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Page:
    """A finished answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]


class WebError(AgentError):
    """The server cannot listen."""


class WebServer:
    """Serves ``pages`` on ADDRESS:PORT from threads of its own until it is closed."""

    def __init__(self, listen: str, pages: Pages) -> None:
        self._listen = listen
        address, _, port = listen.rpartition(":")
        address = address.strip("[]")
        server_class = _Server6 if ":" in address else _Server
        try:
            self._server = server_class((address, int(port)), _handler_for(pages))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WebError(
                f"cannot listen on {listen}: {reason}; set agent.listen to a free ADDRESS:PORT, or to off",
                kind="listen",
            ) from error
        self._thread = threading.Thread(target=self._serve, name="web", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port, also when it was given as 0."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """ADDRESS:PORT as it was given, with the real port."""
        return f"{self._listen.rpartition(':')[0]}:{self.port}"

    def close(self) -> None:
        """Stop serving; returns when the socket is closed."""
        self._server.stop_admitting()
        # A connection ends the wait for one. Not every system can connect to "all addresses".
        address, port = self._server.socket.getsockname()[:2]
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - not to listen on
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=1.0).close()
        self._thread.join(timeout=_TIMEOUT_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        # Not serve_forever: it wakes twice a second for ever, to look whether it should stop.
        while not self._server.is_closing:
            self._server.handle_request()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # who finds this queue full tries again after a second

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.Semaphore(_MAX_CONNECTIONS)
        self.is_closing = False
        super().__init__(address, handler)

    def stop_admitting(self) -> None:
        self.is_closing = True
        self._slots.release()  # ends the wait of a client for whom there was no place

    def server_bind(self) -> None:
        # Not the parent's: it asks the name service for the host's name, which may hang for long.
        host.claim_port(self.socket)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # Most likely no file descriptor is free. The client still waits; asking again at once would only spin.
            time.sleep(_REFUSED_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(timeout=_TIMEOUT_SECONDS) or self.is_closing:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no news."""


class _UntilDeadline(socket.SocketIO):
    """Reads a whole request in one time limit, also from a client that sends a byte now and then."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self._connection = connection
        self._deadline = time.monotonic() + _TIMEOUT_SECONDS

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            return super().readinto(buffer)
        finally:
            self._connection.settimeout(_TIMEOUT_SECONDS)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler_for(pages: Pages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_SECONDS

        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_UntilDeadline(self.connection))

        def do_GET(self) -> None:  # the library's name
            path = self.path.partition("?")[0]
            page = pages.get(path)
            if page is None:
                known = " ".join(sorted(pages))
                self._answer(Page(HTTPStatus.NOT_FOUND, f"no such page; there are: {known}\n".encode()))
                return
            self._answer(page())

        do_HEAD = do_GET  # noqa: N815 - the library's name

        def _answer(self, page: Page) -> None:
            self.send_response(page.status)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(page.body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page.body)

        def version_string(self) -> str:
            return f"scheduled-events-agent/{__version__}"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Probes come every few seconds; they are not logged."""

    return Handler
