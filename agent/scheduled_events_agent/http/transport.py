"""HTTP with limits: httpx transports for services that are not trusted.

It sets one deadline for a whole exchange, however slowly bytes arrive, and limits the size of an answer.
Invariant: each request has its own connection, so bytes that are left on one are never read as the next answer.
"""

import ipaddress
import logging
import os
import selectors
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import lru_cache
from time import monotonic
from typing import Any

import httpcore
import httpx

from scheduled_events_agent import AgentError, __version__
from scheduled_events_agent.http.errors import TooLargeError

# httpx logs whole URLs, which may hold secrets.
logging.getLogger("httpx").setLevel(logging.WARNING)

HEADERS = {
    "User-Agent": f"scheduled-events-agent/{__version__}",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
"""Headers of every request."""

# httpx would unpack a small answer into a huge one, send cookies back, which may grow, and fail on an odd address.
_DROPPED_HEADERS = (b"content-encoding", b"set-cookie", b"location")
_MAX_HEAD_BYTES = 256 * 1024  # with all interim answers
_MAX_PARTS = 20_000  # chunks, or reads; each costs about 10 us
_TOO_MANY_PARTS = f"the answer comes in more than {_MAX_PARTS:,} parts"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_RESOLVE_SECONDS = 30.0
_SLICE_SECONDS = 1.0


class SetupError(AgentError):
    """A setting of a connection cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="setup")


@lru_cache(maxsize=4)  # reading the system's certificates takes a tenth of a second
def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """A context that trusts the certificates of the file, or of the system. Raises SetupError."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "no certificates in PEM form"
        raise SetupError(f"ca_file: {ca_file} cannot be used: {reason}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def proxy_for(setting: str | None, url: httpx.URL) -> httpx.Proxy | None:
    """The proxy for a URL; the setting may be ``environment``. Raises SetupError."""
    proxy = _proxy_of_environment(url) if setting == "environment" else setting
    if not proxy:
        return None
    try:
        found = httpx.Proxy(proxy)
    except (httpx.InvalidURL, ValueError):
        found = None
    if found is None or found.url.scheme != "http" or not 0 < (found.url.port or 1) < 65536:
        raise SetupError("proxy: expected http://HOST:PORT")
    return found


def _proxy_of_environment(url: httpx.URL) -> str | None:
    """The proxy of HTTPS_PROXY or HTTP_PROXY, unless an entry of NO_PROXY is about this host."""
    variables = {name.lower(): value for name, value in os.environ.items()}
    for entry in variables.get("no_proxy", "").split(","):
        if _is_about(entry.strip().lower(), url):
            return None
    return variables.get(f"{url.scheme}_proxy")


def _is_about(entry: str, url: httpx.URL) -> bool:
    """Whether the entry of NO_PROXY means the host of the URL; docs/notifications.md has the forms."""
    if entry == "*":
        return True
    network = _network(entry)
    if network is None:  # it may end with a port; checked second, as an IPv6 address may look like that
        place, _, port = entry.rpartition(":")
        if place and port.isdecimal():
            if int(port) != (url.port or _DEFAULT_PORTS[url.scheme]):
                return False
            entry = place
        network = _network(entry.removeprefix("[").removesuffix("]"))
    name = url.host.lower()
    address = _network(name)
    if network is not None and address is not None:
        return address.network_address in network
    if network is not None or address is not None:
        return False
    domain = entry.removeprefix("*.").removeprefix(".")
    return bool(domain) and (name == domain or name.endswith(f".{domain}"))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network, or the one of a single address; None if it is a name."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


class BoundedTransport(httpx.BaseTransport):
    """For ``httpx.Client``: HTTP/1.1 or HTTPS, directly or through an HTTP proxy. For any thread.

    Keeps nothing between requests. The client's ``read`` time-out, in seconds, bounds the whole exchange, and its
    ``connect`` time-out bounds the connecting. The system resolves host names, in its own time. Raises
    httpx.TransportError; httpx.ProxyError if the proxy refuses. The extension ``headers`` of a response has all
    headers, including those that httpx must not see. The extension ``sni_hostname`` of a request is the name in
    the server's certificate, if that is not the host.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        ssl_context: ssl.SSLContext | None = None,
        proxy: httpx.Proxy | None = None,
        on_progress: Callable[[float], None] | None = None,
        family: socket.AddressFamily = socket.AF_UNSPEC,
        is_cut: bool = False,
    ) -> None:
        """``max_bytes``: the limit of an answer. ``ssl_context``: for HTTPS; by default that of the system.

        ``on_progress`` is called before each wait with the seconds that it may take.

        ``family``: the family of the addresses to connect to; by default any.

        ``is_cut``: a body that is too long, or does not end in time, is no error; its beginning is kept.
        """
        self._max_bytes = max_bytes
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._on_progress = on_progress or (lambda _: None)
        self._family = family
        self._is_cut = is_cut

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = request.url
        url = httpcore.URL(scheme=asked.raw_scheme, host=asked.raw_host, port=asked.port, target=asked.raw_path)
        content = httpcore.Request(request.method, url, headers=request.headers.raw, content=request.read())
        stream = _BoundedStream(
            self._max_bytes, request.extensions["timeout"], self._on_progress, self._family, is_cut=self._is_cut
        )
        if self._proxy:
            return self._handle_by_proxy(self._proxy, content, stream)
        host = asked.raw_host.decode()
        stream.connect(host, asked.port or _DEFAULT_PORTS[asked.scheme])
        with closing(stream):
            if asked.scheme == "https":
                name = request.extensions.get("sni_hostname", host)
                stream.start_tls(self._ssl_context or tls_context(None), name)
            return _exchange(httpcore.HTTP11Connection(url.origin, stream), content, stream)

    def _handle_by_proxy(
        self, proxy: httpx.Proxy, content: httpcore.Request, stream: "_BoundedStream"
    ) -> httpx.Response:
        pool = httpcore.HTTPProxy(
            str(proxy.url),
            proxy_auth=proxy.raw_auth,
            ssl_context=self._ssl_context,
            network_backend=_Backend(stream),
        )
        with closing(pool):
            try:
                return _exchange(pool, content, stream)
            except httpx.ConnectError as error:
                raise error from stream.error  # the pool has removed it
            except httpcore.ProxyError as error:
                raise httpx.ProxyError(str(error)) from error


def _exchange(
    connection: httpcore.ConnectionInterface | httpcore.ConnectionPool,
    request: httpcore.Request,
    stream: "_BoundedStream",
) -> httpx.Response:
    body = bytearray()
    try:
        answer = connection.handle_request(request)
        stream.is_in_head = False
        for part in _parts_of(answer):
            body += part
    except httpcore.ProtocolError as error:
        raise httpx.RemoteProtocolError(str(error)) from error
    except (TooLargeError, httpx.ReadTimeout):
        if stream.is_in_head or not stream.is_cut:
            raise
    headers = [(name, value) for name, value in answer.headers if name.lower() not in _DROPPED_HEADERS]
    extensions = {"headers": httpx.Headers(answer.headers)}
    return httpx.Response(answer.status, headers=headers, content=bytes(body), extensions=extensions)


def _parts_of(answer: httpcore.Response) -> Iterator[bytes]:
    for number, part in enumerate(answer.iter_stream()):
        if number == _MAX_PARTS:
            raise TooLargeError(_TOO_MANY_PARTS)
        yield part


class _Backend(httpcore.NetworkBackend):
    """Connects the one stream of an exchange."""

    def __init__(self, stream: "_BoundedStream") -> None:
        self._stream = stream

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: object = None,
    ) -> httpcore.NetworkStream:
        del timeout, local_address, socket_options  # the deadline is stricter; none are set
        self._stream.connect(host, port)
        return self._stream


class _BoundedStream(httpcore.NetworkStream):
    """A connection whose waits all end at its deadline, and which gives a bounded number of bytes.

    While ``is_in_head``, that number is small, because h11 itself reads any number of interim answers.
    """

    def __init__(
        self,
        max_bytes: int,
        timeouts: Mapping[str, float],
        on_progress: Callable[[float], None],
        family: socket.AddressFamily,
        *,
        is_cut: bool,
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = timeouts["read"]
        self._connect_seconds = timeouts["connect"]
        self._deadline = monotonic() + self._seconds
        self._on_progress = on_progress
        self._family = family
        self._received_bytes = self._reads = 0
        self.is_in_head = True
        self.is_cut = is_cut
        self.error: OSError | None = None
        """Why there is no connection: the error of the system."""

    def _seconds_left(self) -> float:
        left = self._deadline - monotonic()
        if left <= 0:
            raise httpx.ReadTimeout(f"no whole answer within {self._seconds:g} s")
        return left

    def connect(self, host: str, port: int) -> None:
        """Connect to the first address that answers; all addresses share the time."""
        limit = self._connect_seconds
        try:
            self._on_progress(_RESOLVE_SECONDS)
            found = socket.getaddrinfo(host, port, self._family, socket.SOCK_STREAM)
            limit = min(limit, self._seconds_left())
            self._socket = _connect_to_first(found, limit, self._on_progress)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {limit:.3g} s") from error
        except OSError as error:
            self.error = error
            raise httpx.ConnectError(error.strerror or str(error)) from error
        except UnicodeError as error:
            raise httpx.ConnectError(f"{host} cannot be looked up") from error

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        del timeout
        try:
            self._socket.settimeout(max(0.001, self._deadline - monotonic()))
            self._socket = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no TLS handshake within {self._seconds:g} s") from error
        except OSError as error:  # ssl.SSLError is one
            self.error = error
            if isinstance(error, ssl.SSLError):
                tls_context.cache_clear()  # the certificates may have changed
            raise httpx.ConnectError("the TLS handshake failed") from error
        return self

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        del timeout  # the deadline is stricter
        if self.is_in_head:
            limit, what = _MAX_HEAD_BYTES, f"the head of the answer is over {_MAX_HEAD_BYTES // 1024} KiB"
        else:
            limit, what = self._max_bytes, f"the answer is over {self._max_bytes / 1024**2:g} MiB"
        if self._received_bytes >= limit:
            raise TooLargeError(what)
        data = self._receive(min(max_bytes, limit - self._received_bytes))
        if not data and not self._received_bytes:
            raise httpx.ReadError("the connection was closed without an answer")
        self._received_bytes += len(data)
        self._reads += 1
        if self._reads > _MAX_PARTS:
            raise TooLargeError(_TOO_MANY_PARTS)
        return data

    def _receive(self, max_bytes: int) -> bytes:
        while True:
            seconds = min(self._seconds_left(), _SLICE_SECONDS)
            self._on_progress(seconds)
            self._socket.settimeout(seconds)
            try:
                return self._socket.recv(max_bytes)
            except TimeoutError:
                continue
            except OSError as error:
                raise httpx.ReadError(error.strerror or str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        del timeout
        self._socket.settimeout(self._seconds_left())
        try:
            self._socket.sendall(buffer)
        except TimeoutError as error:
            raise httpx.WriteTimeout("the request could not be sent in time") from error
        except OSError as error:  # httpcore reads what the server may have answered before it closed
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        del info


def _connect_to_first(found: list[Any], limit: float, on_progress: Callable[[float], None]) -> socket.socket:
    """A connection to the first of the addresses that answers. Raises OSError for the last one."""
    deadline = monotonic() + limit
    *earlier, last = found
    for number, (family, _, _, _, address) in enumerate(earlier):
        now = monotonic()
        share = (deadline - now) / (len(found) - number)
        with suppress(OSError):
            return _open(family, address, now + share, on_progress)
    return _open(last[0], last[4], deadline, on_progress)


def _open(
    family: socket.AddressFamily, address: tuple[Any, ...], deadline: float, on_progress: Callable[[float], None]
) -> socket.socket:
    connection = socket.socket(family)
    try:
        connection.settimeout(_slice_before(deadline, on_progress))
        try:
            connection.connect(address)
        except TimeoutError:
            connection.settimeout(0.0)  # it goes on connecting
            with selectors.DefaultSelector() as waiting:
                waiting.register(connection, selectors.EVENT_WRITE)
                while not waiting.select(_slice_before(deadline, on_progress)):
                    pass
            if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code)) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _slice_before(deadline: float, on_progress: Callable[[float], None]) -> float:
    """How long to wait at a time. Announces the wait to ``on_progress``. Raises TimeoutError."""
    seconds = min(deadline - monotonic(), _SLICE_SECONDS)
    if seconds <= 0:
        raise TimeoutError
    on_progress(seconds)
    return seconds
