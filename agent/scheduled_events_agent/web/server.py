"""The agent's web server: a few pages, each a function that returns a finished answer.

The server accepts only GET and HEAD. Each client has a thread, and limits of time and size for its request. When
all places are taken, the next client gets the place of the one that has had it the longest.
Invariant: a client can change nothing, and can delay neither the agent nor other clients.
"""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from socketserver import ThreadingTCPServer
from typing import Any, TypeVar

import msgspec

from scheduled_events_agent import AgentError, __version__, host
from scheduled_events_agent.web.tls import Tls

_MAX_CLIENTS = 128
# Some more clients may wait for a place, or end after they have lost theirs.
_MAX_THREADS = 2 * _MAX_CLIENTS
# A client keeps its place for at least this long.
_MIN_SLOT_SECONDS = 0.1
# A thread looks this often whether its client still has a place. (Not every system wakes it.)
_POLL_SECONDS = 0.1
# Time limit from the start of a connection to the end of its request, TLS included; and for reading the answer.
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 15.0
_MAX_REQUEST_BYTES = 16 * 1024
_ACCEPT_RETRY_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
# Paths that load balancers request. They cannot choose their Host header.
_PROBES = ("/healthz", "/readyz")
_TLS_GREETING = b"\x16"


class Response(msgspec.Struct, frozen=True):
    """An answer that is ready to be sent."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}
    """Further ones."""


Routes = Mapping[str, Callable[[], Response]]


T = TypeVar("T")


class _ConnectionSlot(msgspec.Struct):
    """A client's place: its connection, and since when the client has the place."""

    connection: socket.socket
    since: float


class WebError(AgentError):
    """The server cannot listen."""


def _listen_error(listen: str, error: Exception) -> WebError:
    reason = getattr(error, "strerror", None) or error
    hint = "set agent.listen to a free ADDRESS:PORT, or to off"
    return WebError(f"cannot listen on {listen}: {reason}; {hint}", kind="listen")


# Not HTTPServer: that asks the name service for this host's name, which may hang.
class WebServer(ThreadingTCPServer):
    """Serves ``pages`` on ADDRESS:PORT from threads of its own until ``close``."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, listen: str, pages: Routes, *, tls: Tls | None = None, names: Iterable[str] = ()) -> None:
        """``names``: what a browser may call this server besides its address and the machine's own name.

        Blocks while the system looks up ADDRESS, if that is a name. Raises WebError.
        """
        self._name, _, port = listen.rpartition(":")
        address = self._name.strip("[]")
        self._pages = pages
        self._tls = tls
        self._is_closed = False
        self._clients: dict[int, _ConnectionSlot] = {}
        """The place of each client's thread, oldest first."""
        self._clients_lock = threading.Lock()
        self._free_threads = threading.Semaphore(_MAX_THREADS)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, int(port)), _Handler, bind_and_activate=False)
        except OSError as error:  # no free descriptor, or a kernel without IPv6
            raise _listen_error(listen, error) from error
        try:
            host.claim_port(self.socket)
            self.server_bind()
            self.server_activate()
            is_private = ip_address(str(self.server_address[0])).is_loopback
            own_names = {"localhost", socket.gethostname().lower(), address.lower(), *map(str.lower, names)}
            self._own_names = own_names if is_private else None
            self._thread = threading.Thread(target=self._serve, name="web", daemon=True)
            self._thread.start()
        except (OSError, OverflowError, RuntimeError) as error:  # RuntimeError: no memory for a thread
            self.server_close()
            raise _listen_error(listen, error) from error

    @property
    def port(self) -> int:
        """The port, also when it was given as 0."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """ADDRESS:PORT as it was given, with the real port."""
        return f"{self._name}:{self.port}"

    def close(self) -> None:
        """Stop serving; returns when the socket is closed."""
        self._is_closed = True
        _interrupt(self.socket)  # wakes accept on Linux; closing does on Windows
        self.server_close()
        self._free_threads.release()
        self._thread.join(_CLOSE_SECONDS)
        with self._clients_lock:
            for slot in self._clients.values():
                _interrupt(slot.connection)
            self._clients.clear()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self.get_request()
            except OSError:
                time.sleep(_ACCEPT_RETRY_SECONDS)  # no file descriptor is free: asking again at once would spin
                continue
            self._free_threads.acquire()
            try:
                self.process_request(connection, address)
            except RuntimeError:  # no memory for a thread: this one serves the client
                self.process_request_thread(connection, address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a client, in its own thread."""
        try:
            super().finish_request(request, client_address)
        finally:
            with self._clients_lock:
                self._clients.pop(threading.get_ident(), None)
            self._free_threads.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: most clients that fail have only disconnected."""

    def acquire_slot(self, connection: socket.socket, deadline: float) -> None:
        """Give this thread's client a place. Blocks until there is one. Raises OSError after the deadline."""
        while True:
            with self._clients_lock:
                now = time.monotonic()
                if len(self._clients) < _MAX_CLIENTS:
                    self._clients[threading.get_ident()] = _ConnectionSlot(connection, now)
                    return
                thread, oldest = next(iter(self._clients.items()))
                wait = oldest.since + _MIN_SLOT_SECONDS - now
                if wait <= 0:
                    del self._clients[thread]
                    _interrupt(oldest.connection)
                    continue
            time.sleep(min(wait, _seconds_to(deadline)))

    def read_with_deadline(self, action: Callable[[], T], connection: socket.socket, deadline: float) -> T:
        """Run ``action``, which waits for the client. Raises OSError when the client's time or place is lost."""
        while True:
            connection.settimeout(min(_POLL_SECONDS, _seconds_to(deadline)))
            try:
                return action()
            except TimeoutError:
                if threading.get_ident() not in self._clients:
                    raise

    def start_tls(self, connection: socket.socket, deadline: float) -> socket.socket:
        """The connection, under TLS if that is configured. Blocks. Raises OSError if the client speaks no TLS."""
        if self._tls is None:
            return connection
        first = self.read_with_deadline(lambda: connection.recv(1, socket.MSG_PEEK), connection, deadline)
        if first not in (b"", _TLS_GREETING):
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\nthis port speaks TLS: ask with https://\n")
            connection.recv(_MAX_REQUEST_BYTES)  # see _Handler.finish
            raise ConnectionError("plain HTTP")
        secured = self._tls.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._clients_lock:
            if slot := self._clients.get(threading.get_ident()):
                slot.connection = secured
        try:
            self.read_with_deadline(secured.do_handshake, secured, deadline)
        except BaseException:
            secured.close()
            raise
        return secured

    def dispatch(self, path: str, names: Iterable[str]) -> Response:
        """The answer to a request for ``path`` with these Host headers. May take as long as the page does."""
        is_unknown_host = not all(map(self._is_host_allowed, names))
        if is_unknown_host and path not in _PROBES:
            hint = "use its address, or add the name to agent.listen_names"
            text = f"the Host header is not a name of this server: {hint}\n"
            return Response(HTTPStatus.MISDIRECTED_REQUEST, text.encode())
        make = self._pages.get(path)
        if make is None:
            text = f"no such page; there are: {' '.join(sorted(self._pages))}\n"
            return Response(HTTPStatus.NOT_FOUND, text.encode())
        try:
            page = make()
        except Exception as error:  # noqa: BLE001 - the client should see it
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, f"a bug in the agent: {error!r}\n".encode())
        if is_unknown_host:  # it gets yes or no, without details
            return Response(page.status, b"yes\n" if page.status == HTTPStatus.OK else b"no\n")
        return page

    def _is_host_allowed(self, name: str) -> bool:
        """Whether a request with this Host header is meant for this server.

        Only requests to a loopback address are compared. Their pages are for this machine alone, and a web page
        from elsewhere can have its own name lead a browser here (DNS rebinding).
        """
        if self._own_names is None:
            return True
        name = name.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
        if name in self._own_names or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    """One connection: one request and its answer."""

    server: WebServer
    default_request_version = "HTTP/1.0"
    request_version = default_request_version
    requestline = command = ""

    def setup(self) -> None:
        deadline = time.monotonic() + _REQUEST_SECONDS
        self.server.acquire_slot(self.request, deadline)
        self.request = self.server.start_tls(self.request, deadline)
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.server, self.connection, deadline))

    def handle(self) -> None:
        try:
            super().handle()
        except _TooLargeError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
            # Bytes that are left unread would make the system reset the connection, and the answer be lost.
            self.connection.settimeout(0)
            socket.socket.recv(self.connection, _MAX_REQUEST_BYTES)
        self.connection.close()

    def version_string(self) -> str:
        """The text of the Server header."""
        return f"scheduled-events-agent/{__version__}"

    def do_GET(self) -> None:
        if self.headers.defects:  # a line that is no header may hide one
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        self._send(self.server.dispatch(self.path.partition("?")[0], self.headers.get_all("Host", [])))

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject the request with a short text that repeats nothing the client sent."""
        del message, explain
        if code == HTTPStatus.NOT_IMPLEMENTED:
            text = b"only GET and HEAD: nothing can be changed here\n"
            self._send(Response(HTTPStatus.METHOD_NOT_ALLOWED, text, headers={"Allow": "GET, HEAD"}))
        else:
            status = HTTPStatus(code)
            self._send(Response(status, f"{status.phrase}\n".encode()))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Log nothing: the agent's log is about events."""

    def _send(self, page: Response) -> None:
        self.connection.settimeout(_ANSWER_SECONDS)
        self.close_connection = True
        self.send_response(page.status)
        headers = {
            "Content-Type": page.content_type,
            "Content-Length": str(len(page.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **page.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)


class _TooLargeError(Exception):
    """The request is larger than any that this server answers."""


class _Request(io.RawIOBase):
    """The bytes that a client sends, within a total of time and size."""

    def __init__(self, server: WebServer, connection: socket.socket, deadline: float) -> None:
        self._server = server
        self._connection = connection
        self._deadline = deadline
        self._bytes_left = _MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._bytes_left <= 0:
            raise _TooLargeError
        connection = self._connection
        count = self._server.read_with_deadline(lambda: connection.recv_into(buffer), connection, self._deadline)
        self._bytes_left -= count
        return count


def _seconds_to(deadline: float) -> float:
    """The seconds left, always above 0. Raises TimeoutError."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _interrupt(connection: socket.socket) -> None:
    """End another thread's wait on this connection."""
    with suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
