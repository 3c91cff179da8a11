"""The agent's web server: a handful of pages that others have prepared.

Owns the sockets and HTTP. Reads nothing of the engine: each page is a function that returns a finished
answer from published values. The one invariant: nothing that a client does can change anything, or keep the
agent from its work, or other clients from their pages: only GET and HEAD, bounded requests, each with a time
limit. One thread talks with all clients and waits for none of them, so who says nothing costs a place among many,
and loses it when others come. Pages are made by a few more threads, for whoever has asked completely.
"""

import re
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import ip_address
from math import inf
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from agent import AgentError, __version__, host
from agent.access import Access, TooManyError

if TYPE_CHECKING:
    import ssl

# Connections at a time. A scrape and a probe is what there is; all others are there to be kept from harm.
_MAX_CLIENTS = 128
# Whoever has not come to the system's notice yet waits here; who finds this queue full tries again after a second.
_MAX_OUTSIDE = 1024
# Threads that make pages: some wait for the disk, or for a password's turn. They are there from the beginning, for
# to start one takes longer than most pages do, and of a crowd's requests there are thousands a second.
_MAKERS = 8
# Answers that are being taken slowly: each may be the whole status page, as it was at its own second.
_MAX_TAKING = 16
# From a client's coming to the end of its request; handshake included.
_TIMEOUT_SECONDS = 5.0
# For taking the answer. Who takes it so slowly is in nobody's way, for others take the place when they need it.
_SEND_SECONDS = 15.0
# For so long a client has its place for itself, and for so many rounds in which it could have been heard.
_UNDISTURBED_SECONDS = 0.05
_UNDISTURBED_ROUNDS = 4
_NO_ROOM_SECONDS = 0.01
_REFUSED_SECONDS = 0.1
# How late a time limit may be noticed.
_LOOK_SECONDS = 0.1
_AT_ONCE = 64
_MAX_REQUEST_BYTES = 16 * 1024
_MAX_HEADERS = 100
_PIECE_BYTES = 64 * 1024
# What a load balancer asks for, which can neither have a password nor choose its Host header.
_PROBES = ("/healthz", "/readyz")
_TLS_GREETING = b"\x16"
_WORD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIRST_LINE = re.compile(rf"({_WORD.pattern}) ([!-~\x80-\xff]+) HTTP/([0-9])\.[0-9]")
_END = re.compile(rb"\r?\n\r?\n")

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
        try:
            self._listener = _open(address, int(port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WebError(
                f"cannot listen on {listen}: {reason}; set agent.listen to a free ADDRESS:PORT, or to off",
                kind="listen",
            ) from error
        bound_to, self._port = self._listener.getsockname()[:2]
        is_private = ip_address(bound_to).is_loopback
        own_names = {"localhost", socket.gethostname().lower(), address.lower(), *map(str.lower, names)}
        self._desk = _Desk(pages, access, own_names if is_private else None)
        self._access = access
        self._clients: set[_Client] = set()
        self._counts: Counter[str] = Counter()
        self._asked: SimpleQueue[tuple[_Client, _Request] | None] = SimpleQueue()
        self._made: deque[tuple[_Client, _Request, Page]] = deque()
        self._round = 0
        self._looked = time.monotonic()
        self._receives_at: float | None = None  # None: it does now
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="web", daemon=True)
        try:
            for _ in range(_MAKERS):
                threading.Thread(target=self._make_pages, name="page", daemon=True).start()
            self._thread.start()
        except RuntimeError as error:  # no memory for a thread
            self._end()
            raise WebError(f"cannot listen on {listen}: {error}", kind="listen") from error

    @property
    def port(self) -> int:
        """The port, also when it was given as 0."""
        return int(self._port)

    @property
    def address(self) -> str:
        """ADDRESS:PORT as it was given, with the real port."""
        return f"{self._listen.rpartition(':')[0]}:{self.port}"

    def close(self) -> None:
        """Stop serving; returns when the socket is closed."""
        self._is_closed = True
        self._ring()
        self._thread.join(timeout=_TIMEOUT_SECONDS)

    # --- the one thread

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - whatever it was, the pages are to go on; but not to spin
                time.sleep(_REFUSED_SECONDS)
        self._end()

    def _turn(self) -> None:
        ready = [key for key, _ in self._selector.select(self._patience())]
        self._round += 1
        for key in ready:
            if isinstance(key.data, _Client):
                self._go_on(key.data)
            elif key.fileobj is self._bell:
                with suppress(OSError):
                    self._bell.recv(_PIECE_BYTES)
        while self._made:
            self._give(*self._made.popleft())
        self._let_the_late_go()
        # After all others, so that nobody loses a place for a newcomer before having been heard.
        if any(key.fileobj is self._listener for key in ready):
            self._receive()

    def _patience(self) -> float | None:
        if self._receives_at is not None:
            return max(0.0, self._receives_at - time.monotonic())
        return _LOOK_SECONDS if self._clients else None  # a server without clients sleeps

    def _ring(self) -> None:
        """Have the thread look what there is to do. For any thread."""
        with suppress(OSError):  # it is full of that, or all is over
            self._ringer.send(b"!")

    def _end(self) -> None:
        for client in list(self._clients):
            self._let_go(client)
        self._selector.close()
        for end in (self._listener, self._bell, self._ringer):
            end.close()
        for _ in range(_MAKERS):
            self._asked.put(None)

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._clients) >= _MAX_CLIENTS and not self._make_room(self._clients):
                self._receive_later(_NO_ROOM_SECONDS)
                return
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:
                # Most likely no file descriptor is free. The client still waits; asking again at once would spin.
                self._receive_later(_REFUSED_SECONDS)
                return
            client = _Client(connection, _origin(address[0]), self._access.tls if self._access else None)
            client.round = self._round
            self._clients.add(client)
            self._counts[client.address] += 1
            self._go_on(client)

    def _receive_later(self, seconds: float) -> None:
        self._receives_at = time.monotonic() + seconds
        self._selector.unregister(self._listener)

    def _make_room(self, among: "set[_Client] | list[_Client]") -> bool:
        """Whether there is a place: of those with the most, who has kept us waiting longest loses one."""
        most = max(self._counts[client.address] for client in among)
        latest = time.monotonic() - _UNDISTURBED_SECONDS
        idle = [
            client
            for client in among
            if client.stage != "waits"
            and client.since < latest
            and client.round < self._round - _UNDISTURBED_ROUNDS
            and self._counts[client.address] == most
        ]
        if idle:
            self._let_go(min(idle, key=lambda client: client.since))
        return bool(idle)

    def _let_the_late_go(self) -> None:
        now = time.monotonic()
        if self._receives_at is not None and now >= self._receives_at:
            self._receives_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for client in [client for client in self._clients if client.deadline <= now]:
            self._let_go(client)

    def _go_on(self, client: "_Client") -> None:
        """Whatever of listening and sending is possible without waiting."""
        if client not in self._clients:
            return  # it has just lost its place
        try:
            if client.stage == "asks":
                request = client.listen()
                self._await(client, 0)
                client.stage, client.deadline = "waits", inf
                if isinstance(request, Page):
                    self._give(client, None, request)
                else:
                    self._asked.put((client, request))
            else:
                client.send()
                self._let_go(client)
        except client.later as error:
            self._await(client, client.awaits(error))
        except Exception:  # noqa: BLE001 - a client that goes away in the middle is no news
            self._let_go(client)

    def _await(self, client: "_Client", events: int) -> None:
        if events == client.awaited:
            return
        if not client.awaited:
            self._selector.register(client.number, events, client)
        elif not events:
            self._selector.unregister(client.number)
        else:
            self._selector.modify(client.number, events, client)
        client.awaited = events

    def _let_go(self, client: "_Client") -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._counts[client.address] -= 1
            if not self._counts[client.address]:
                del self._counts[client.address]
            self._await(client, 0)
            client.close()

    # --- pages

    def _make_pages(self) -> None:
        """Make what is asked for until there is no more to come; each of the makers' threads does."""
        while (asked := self._asked.get()) is not None:
            client, request = asked
            try:
                page = self._desk.page(request, client.address)
            except Exception as error:  # noqa: BLE001 - whoever asks should hear of it
                page = Page(HTTPStatus.INTERNAL_SERVER_ERROR, f"a bug in the agent: {error!r}\n".encode())
            self._made.append((client, request, page))
            self._ring()
            del asked, client, request, page  # who waits keeps nobody's page

    def _give(self, client: "_Client", request: "_Request | None", page: Page) -> None:
        client.stage, client.since, client.round = "takes", time.monotonic(), self._round
        client.deadline = client.since + _SEND_SECONDS
        client.left = [memoryview(_head(page))]
        if page.body and (request is None or request.method != "HEAD"):
            client.left.append(memoryview(page.body))
        self._go_on(client)
        taking = [one for one in self._clients if one.stage == "takes"]
        if len(taking) > _MAX_TAKING:
            self._make_room(taking)


class _Client:
    """One connection: asks, waits for its answer, and takes it. Never blocks."""

    def __init__(self, connection: socket.socket, address: str, tls: "ssl.SSLContext | None") -> None:
        self.stage: Literal["asks", "waits", "takes"] = "asks"
        self.address = address
        self.since = time.monotonic()
        """Since when it is the client's turn."""
        self.round = 0
        """In which round it came to be that."""
        self.deadline = self.since + _TIMEOUT_SECONDS
        self.number = connection.fileno()
        self.awaited = 0
        """What the selector looks for."""
        self.left: list[memoryview] = []
        """Of the answer."""
        self.later: tuple[type[OSError], ...] = (BlockingIOError,)
        """What ``listen`` and ``send`` raise when there is no more to be done just now."""
        self._connection = connection
        connection.setblocking(False)
        self._tls = tls
        self._handshake: Callable[[], None] | None = None
        self._said = bytearray()

    def awaits(self, error: OSError) -> int:
        """What the selector is to look for after ``later``."""
        wants_room = self.stage == "takes" or type(error).__name__ == "SSLWantWriteError"
        return selectors.EVENT_WRITE if wants_room else selectors.EVENT_READ

    def listen(self) -> "_Request | Page":
        """What the client wants, as soon as it has said it, or a refusal."""
        if self._tls is not None:
            greeting = self._connection.recv(1, socket.MSG_PEEK)
            if greeting and greeting != _TLS_GREETING:
                return Page(HTTPStatus.BAD_REQUEST, b"this port speaks TLS: ask with https://\n")
            self._begin_tls(self._tls)
        if self._handshake is not None:
            self._handshake()
            self._handshake = None
        while len(self._said) <= _MAX_REQUEST_BYTES:
            piece = self._connection.recv(_MAX_REQUEST_BYTES + 1 - len(self._said))
            if not piece:
                raise ConnectionResetError
            known = len(self._said)
            self._said += piece
            if end := _END.search(self._said, max(0, known - 3)):
                if self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise ConnectionResetError  # it has gone since, and wants no page
                return _parse(self._said[: end.start()].decode("latin-1"))
        is_in_first_line = b"\n" not in self._said
        return _refusal(
            HTTPStatus.REQUEST_URI_TOO_LONG if is_in_first_line else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        )

    def _begin_tls(self, tls: "ssl.SSLContext") -> None:
        import ssl  # noqa: PLC0415 - most agents speak plain HTTP

        self._tls = None
        self.later = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
        wrapped = tls.wrap_socket(self._connection, server_side=True, do_handshake_on_connect=False)
        self._connection, self._handshake = wrapped, wrapped.do_handshake

    def send(self) -> None:
        """Return when all is sent. Of much, only a piece at a time, for others are waiting."""
        while self.left:
            sent = self._connection.send(self.left[0][:_PIECE_BYTES])
            self.left[0] = self.left[0][sent:]
            if not self.left[0]:
                self.left.pop(0)
            elif sent == _PIECE_BYTES:
                raise BlockingIOError

    def close(self) -> None:
        with suppress(OSError):
            if not self.left and self.stage == "takes":
                self._connection.shutdown(socket.SHUT_WR)
                # What is there unread would have the system reset the connection, and the answer be lost.
                self._connection.recv(_PIECE_BYTES)
        self._connection.close()


# --- HTTP


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, list[str]]
    """By their names in lower case."""


def _parse(text: str) -> _Request | Page:
    first, *lines = text.replace("\r\n", "\n").split("\n")
    match = _FIRST_LINE.fullmatch(first)
    if match is None:
        return _refusal(HTTPStatus.BAD_REQUEST)
    method, target, version = match.groups()
    if version != "1":
        return _refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if method not in ("GET", "HEAD"):
        said = b"only GET and HEAD: nothing can be changed here\n"
        return Page(HTTPStatus.METHOD_NOT_ALLOWED, said, headers={"Allow": "GET, HEAD"})
    if len(lines) > _MAX_HEADERS:
        return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    headers: dict[str, list[str]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _WORD.fullmatch(name):
            return _refusal(HTTPStatus.BAD_REQUEST)
        headers.setdefault(name.lower(), []).append(value.strip(" \t"))
    return _Request(method, target.partition("?")[0], headers)


def _refusal(status: HTTPStatus) -> Page:
    """In few words, and none of the client's own."""
    return Page(status, f"{status.phrase}\n".encode())


def _head(page: Page) -> bytes:
    headers = {
        "Server": f"scheduled-events-agent/{__version__}",
        "Date": formatdate(usegmt=True),
        "Content-Type": page.content_type,
        "Content-Length": str(len(page.body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **page.headers,
    }
    lines = [
        f"HTTP/1.0 {page.status} {page.status.phrase}",
        *(f"{name}: {text}" for name, text in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass(frozen=True)
class _Desk:
    """Where requests are answered. For any thread."""

    pages: Pages
    access: Access | None
    names: set[str] | None
    """By which the server may be asked besides addresses; None: by any."""

    def page(self, request: _Request, address: str) -> Page:
        """May take as long as the page does, or the check of a password."""
        refusal = self._refusal(request, address)
        if refusal is not None and request.path not in _PROBES:
            return refusal
        make = self.pages.get(request.path)
        if make is None:
            text = f"no such page; there are: {' '.join(sorted(self.pages))}\n"
            return Page(HTTPStatus.NOT_FOUND, text.encode())
        page = make()
        if refusal is not None:  # a stranger learns yes or no
            return Page(page.status, b"yes\n" if page.status == HTTPStatus.OK else b"no\n")
        return page

    def _refusal(self, request: _Request, address: str) -> Page | None:
        """Why this client may not have a page; None if it may."""
        if not all(map(self._answers_to, request.headers.get("host", []))):
            text = (
                "asked by a name that is not this server's: use its address, or add the name to agent.listen_names"
            )
            return Page(HTTPStatus.MISDIRECTED_REQUEST, f"{text}\n".encode())
        try:
            given = request.headers.get("authorization", [""])
            if self.access is None or self.access.admits(given[0], address):
                return None
        except TooManyError as error:
            return Page(HTTPStatus.TOO_MANY_REQUESTS, f"{error}\n".encode(), headers={"Retry-After": "5"})
        challenge = 'Basic realm="scheduled-events-agent", charset="UTF-8"'
        return Page(
            HTTPStatus.UNAUTHORIZED, b"a name and a password are needed\n", headers={"WWW-Authenticate": challenge}
        )

    def _answers_to(self, name: str) -> bool:
        """Whether a request with this Host header is meant for this server.

        Only those asked of a loopback address are compared: pages there are for this machine alone, and a browser
        on it can be led here by a name that belongs to somebody else.
        """
        if self.names is None:
            return True
        name = name.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
        if name in self.names or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _open(address: str, port: int) -> socket.socket:
    """A socket that listens. Not the library's: that asks the name service for the host's name, which may hang."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        host.claim_port(listener)
        # Bounds what the system keeps for each client: requests are small, and answers can be sent in pieces.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MAX_REQUEST_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIECE_BYTES)
        listener.bind((address, port))
        listener.listen(_MAX_OUTSIDE)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _origin(address: str) -> str:
    """What counts as one client: of IPv6 and of 127.0.0.0/8, a host has as many addresses as it likes."""
    ip = ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return "this machine"
    return str(ip) if ip.version == 4 else ip.packed[:8].hex()
