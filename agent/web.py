"""The agent's web server: a handful of pages that others have prepared.

Owns the sockets and HTTP. Reads nothing of the engine: each page is a function that returns a finished
answer from published values. The one invariant: nothing that a client does can change anything, or keep the
agent from its work, or other clients from their pages: only GET and HEAD, bounded requests, each with a time
limit, a few connections at a time, of which the most demanding address gives one up when another comes.
"""

import contextlib
import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from agent import AgentError, __version__, host
from agent.access import Access, TooManyError

# A scrape and a probe at a time is what there is; a fleet of slow clients waits outside.
_MAX_CONNECTIONS = 16
# From a client's coming to the end of its request; handshake included.
_TIMEOUT_SECONDS = 5.0
# For taking the answer. Who takes it so slowly is in nobody's way, for others take the place when they need it.
_SEND_SECONDS = 15.0
# For so long a client has its place for itself, time enough to say what it wants.
_UNDISTURBED_SECONDS = 0.1
_REFUSED_SECONDS = 0.1
# More than the longest line that the library takes; of everything that a client says together.
_MAX_REQUEST_BYTES = 80 * 1024
_PIECE_BYTES = 16 * 1024
# What a load balancer asks for, which can neither have a password nor choose its Host header.
_PROBES = ("/healthz", "/readyz")
_TLS_GREETING = b"\x16"


HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Page:
    """A finished answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further ones."""


Pages = Mapping[str, Callable[[], Page]]


class WebError(AgentError):
    """The server cannot listen."""


class WebServer:
    """Serves ``pages`` on ADDRESS:PORT from threads of its own until it is closed."""

    def __init__(
        self, listen: str, pages: Pages, *, access: Access | None = None, names: Iterable[str] = ()
    ) -> None:
        """``names``: what a browser may call this server besides its address and the machine's own name.

        Blocks while the system looks up ADDRESS, if that is a name.
        """
        self._listen = listen
        address, _, port = listen.rpartition(":")
        address = address.strip("[]")
        server_class = _Server6 if ":" in address else _Server
        try:
            self._server = server_class((address, int(port)), pages, access, {address, *names})
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WebError(
                f"cannot listen on {listen}: {reason}; set agent.listen to a free ADDRESS:PORT, or to off",
                kind="listen",
            ) from error
        self._thread = threading.Thread(target=self._serve, name="web", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no memory for a thread
            self._server.server_close()
            raise WebError(f"cannot listen on {listen}: {error}", kind="listen") from error

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
        self._server.places.close()
        # A connection ends the wait for one. Not every system can connect to "all addresses".
        address, port = self._server.socket.getsockname()[:2]
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - not to listen on
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=1.0).close()
        self._thread.join(timeout=_TIMEOUT_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        # Not serve_forever: it wakes twice a second for ever, to look whether it should stop.
        while not self._server.places.is_closed:
            self._server.handle_request()


class _Place:
    """One connection of a client, and whether it is the client's turn."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.since = time.monotonic()
        self.is_clients_turn = True
        self.is_lost = False

    def lose(self) -> None:
        """End the connection, for its own thread to notice."""
        with contextlib.suppress(OSError):
            # Not the method of a TLS socket, which is for the thread that uses it.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)
            self.is_lost = True


class _Places:
    """Who has a place. When there is none for a newcomer, whoever has the most and says the least loses one."""

    def __init__(self) -> None:
        self._taken: dict[socket.socket, _Place] = {}
        self._changed = threading.Condition()
        self.is_closed = False

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def take(self, connection: socket.socket, address: str) -> _Place | None:
        """A place as soon as there is one, which may take a while; None if there is none for too long."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        with self._changed:
            while len(self._taken) >= _MAX_CONNECTIONS and not self.is_closed:
                self._make_room(address)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, _UNDISTURBED_SECONDS))
            if self.is_closed:
                return None
            place = self._taken[connection] = _Place(connection, address)
            return place

    def of(self, connection: socket.socket) -> _Place:
        return self._taken[connection]

    def leave(self, connection: socket.socket) -> None:
        with self._changed:
            self._taken.pop(connection, None)
            self._changed.notify_all()

    def _make_room(self, newcomer: str) -> None:
        counts = Counter(place.address for place in self._taken.values())
        if any(place.is_lost and place.is_clients_turn for place in self._taken.values()):
            return  # it leaves any moment
        until = time.monotonic() - _UNDISTURBED_SECONDS
        idle = [place for place in self._taken.values() if place.is_clients_turn and place.since <= until]
        # Nobody takes the place of somebody who has no more than himself.
        idle = [one for one in idle if one.address == newcomer or counts[one.address] > counts[newcomer]]
        if idle:
            max(idle, key=lambda place: (counts[place.address], -place.since)).lose()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # who finds this queue full tries again after a second

    def __init__(
        self, address: tuple[str, int], pages: Pages, access: Access | None, names: Iterable[str]
    ) -> None:
        self.places = _Places()
        self.pages = pages
        self.access = access
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, names)}
        super().__init__(address, _Handler)
        self._is_private = ip_address(self.server_address[0]).is_loopback  # type: ignore[arg-type]

    def answers_to(self, name: str) -> bool:
        """Whether a request with this Host header is meant for this server.

        Only those asked of a loopback address are compared: pages there are for this machine alone, and a browser
        on it can be led here by a name that belongs to somebody else.
        """
        if not self._is_private:
            return True
        name = name.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

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
        if self.places.take(request, _origin(client_address[0])) is None:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.places.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.leave(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        place = self.places.of(request)
        tls = self.access.tls() if self.access else None
        if tls is None:
            _Handler(place, client_address, self)
            return
        deadline = place.since + _TIMEOUT_SECONDS
        request.settimeout(_left(deadline))
        if request.recv(1, socket.MSG_PEEK) != _TLS_GREETING:
            text = b"this port speaks TLS: ask with https://\n"
            request.sendall(b"HTTP/1.0 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
            return
        place.connection = tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        try:
            place.connection.settimeout(_left(deadline))
            place.connection.do_handshake()
            _Handler(place, client_address, self)
        finally:
            self.shutdown_request(place.connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _origin(address: str) -> str:
    """What counts as one client: of IPv6, the network, for each host has as many addresses as it likes."""
    ip = ip_address(address)
    if ip.version == 4:
        return address
    return str(ip.ipv4_mapped or ip.packed[:8].hex())


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


class _UntilDeadline(socket.SocketIO):
    """Reads a whole request in one time limit, also from a client that sends a byte now and then."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        super().__init__(connection, "r")
        self._connection = connection
        self._deadline = deadline
        self._bytes_left = _MAX_REQUEST_BYTES

    def readinto(self, buffer: Any) -> int | None:
        if self._bytes_left <= 0:
            raise LineTooLong("request")
        self._connection.settimeout(_left(self._deadline))
        count = super().readinto(buffer)
        self._bytes_left -= count or 0
        return count


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def __init__(self, place: _Place, client_address: Any, server: _Server) -> None:
        self._place = place
        super().__init__(place.connection, client_address, server)

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, self._place.since + _TIMEOUT_SECONDS))

    def do_GET(self) -> None:  # the library's name
        if self._place.is_lost:
            return  # what it said may have been cut short by that
        self._place.is_clients_turn = False
        try:
            page = self._page()
        except Exception as error:  # noqa: BLE001 - whoever asks should hear of it
            page = Page(HTTPStatus.INTERNAL_SERVER_ERROR, f"a bug in the agent: {error!r}\n".encode())
        self._place.is_clients_turn = True
        self._answer(page)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def _page(self) -> Page:
        path = self.path.partition("?")[0]
        refusal = self._refusal()
        if refusal is not None and path not in _PROBES:
            return refusal
        make = self.server.pages.get(path)
        if make is None:
            return Page(
                HTTPStatus.NOT_FOUND, f"no such page; there are: {' '.join(sorted(self.server.pages))}\n".encode()
            )
        page = make()
        if refusal is not None:  # a stranger learns yes or no
            return Page(page.status, b"yes\n" if page.status == HTTPStatus.OK else b"no\n")
        return page

    def _refusal(self) -> Page | None:
        """Why this client may not have a page; None if it may."""
        if not all(map(self.server.answers_to, self.headers.get_all("Host", []))):
            text = (
                "asked by a name that is not this server's: use its address, or add the name to agent.listen_names"
            )
            return Page(HTTPStatus.MISDIRECTED_REQUEST, f"{text}\n".encode())
        access = self.server.access
        try:
            if access is None or access.admits(self.headers.get("Authorization", ""), self._place.address):
                return None
        except TooManyError as error:
            return Page(HTTPStatus.TOO_MANY_REQUESTS, f"{error}\n".encode(), headers={"Retry-After": "5"})
        challenge = 'Basic realm="scheduled-events-agent", charset="UTF-8"'
        return Page(
            HTTPStatus.UNAUTHORIZED, b"a name and a password are needed\n", headers={"WWW-Authenticate": challenge}
        )

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The library's refusals, in few words and none of the client's own."""
        del message, explain
        if code == HTTPStatus.NOT_IMPLEMENTED:  # it has no do_POST and the like
            text = b"only GET and HEAD: nothing can be changed here\n"
            self._answer(Page(HTTPStatus.METHOD_NOT_ALLOWED, text, headers={"Allow": "GET, HEAD"}))
            return
        status = HTTPStatus(code)
        self._answer(Page(status, f"{status.phrase}\n".encode()))

    def _answer(self, page: Page) -> None:
        deadline = time.monotonic() + _SEND_SECONDS
        self.connection.settimeout(_SEND_SECONDS)
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(page.body), _PIECE_BYTES):  # over TLS, the limit is one of each piece
            self.connection.settimeout(_left(deadline))
            self.wfile.write(page.body[start : start + _PIECE_BYTES])

    def version_string(self) -> str:
        return f"scheduled-events-agent/{__version__}"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Probes come every few seconds; they are not logged."""
