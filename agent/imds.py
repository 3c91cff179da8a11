"""The edge to the metadata service: fetch the document, post approvals, ask for this VM's name.

Owns the wire (one kept connection, one deadline for a whole exchange, no proxy, no redirect, bounded answers)
and the pause after each kind of failure. Reads no document and decides nothing. The one invariant: what is
returned is the whole body of an answer with status 200; everything else is an ImdsError, and in time.
"""

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from time import monotonic
from typing import Any, Literal, get_args

import msgspec

from agent import AgentError, __version__, host
from agent.events import DocumentError, clean_text, parse_json
from agent.settings import parse_endpoint

ImdsErrorKind = Literal[
    "timeout",
    "refused",
    "unreachable",
    "bad_request",
    "not_found",
    "gone",
    "throttled",
    "server_error",
    "redirect",
    "too_large",
    "empty",
    "malformed",
    "unexpected_status",
    "unconfirmed",
]
IMDS_ERROR_KINDS: tuple[ImdsErrorKind, ...] = get_args(ImdsErrorKind)

DEFAULT_ENDPOINT = "http://169.254.169.254"
# What DHCP option 245 holds inside a virtual network: another service of the host, without scheduled events.
_WIRE_SERVER = "168.63.129.16"
# The instance document has versions of its own, and only the whole document is the same in all of them.
_INSTANCE_PATH = "/metadata/instance?api-version=2021-12-13&format=json"

_MAX_BODY_BYTES = 8 * 1024 * 1024  # 1,000 events with 100 resources each are 3 MiB
_MAX_HEAD_BYTES = 32 * 1024
_MAX_LINE_BYTES = 1024
_RECEIVE_BYTES = 64 * 1024
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?", re.DOTALL)
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?", re.DOTALL)

_KIND_OF_STATUS: dict[int, ImdsErrorKind] = {
    400: "bad_request",
    404: "not_found",
    410: "gone",
    429: "throttled",
}
_WAY_OUT: dict[ImdsErrorKind, str] = {
    "refused": "; check imds.endpoint, and that this machine is an Azure VM",
    "unreachable": "; check imds.endpoint, and the route and firewall to it",
    "bad_request": "; check imds.api_version",
    "redirect": "; something other than the metadata service answers: check imds.endpoint",
    "empty": "; the service is still switching scheduled events on for this VM",
}

# Polling goes on at its own pace, whatever fails, and so notices within one interval that the service is back: a
# Spot VM has 30 s of notice, and a pause that had grown meanwhile would eat them up. A poll for each interval is
# what the service bears on a good day. Two answers ask for more (Microsoft's page "Azure Instance Metadata
# Service"): 429 wants 2, 4, 8, 16; and 400 says that the request is wrong, which one quick second look may
# disprove, since a single wrong answer should not cost much notice.
_BACKOFF_SECONDS: dict[str, tuple[float, ...]] = {
    "throttled": (2.0, 4.0, 8.0, 16.0),
    "bad_request": (5.0, 10.0),
}
# What a 429 asks for by Retry-After is done within these bounds: a Preempt has 30 s of notice.
_RETRY_AFTER_SECONDS = (1.0, 16.0)


class ImdsError(AgentError):
    """The metadata service gave no usable answer. That says nothing about any event."""

    kind: ImdsErrorKind

    def __init__(self, message: str, *, kind: ImdsErrorKind, retry_after: float | None = None) -> None:
        """``retry_after``: seconds for which the service asks to be left alone."""
        super().__init__(message, kind=kind)
        self.retry_after = retry_after


class EndpointError(AgentError):
    """A setting that names no endpoint."""

    def __init__(self, setting: str) -> None:
        super().__init__(
            "imds.endpoint: expected auto or http://ADDRESS[:PORT] with an IPv4 address or a host name; "
            f'got "{setting}"',
            kind="config",
        )


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this VM is; "" where the service did not say."""

    name: str
    """As Resources call it, which need not be the host name."""
    vm_id: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of whatever status, for a diagnosis."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    fault: ImdsError | None
    """What a client says of it; None for status 200."""


def resolve_endpoint(setting: str) -> str:
    """The endpoint that ``imds.endpoint`` means. ``auto`` reads DHCP leases. Raises EndpointError."""
    if setting != "auto":
        _parse_endpoint(setting)
        return setting.rstrip("/")
    address = host.dhcp_option_245()
    return DEFAULT_ENDPOINT if address in (None, _WIRE_SERVER) else f"http://{address}"


def parse_identity(body: bytes) -> Identity | None:
    """Who the instance document says that this VM is; None if it is no JSON object."""
    document = _parse_object(body)
    if document is None:
        return None
    compute = document.get("compute")
    known: dict[str, Any] = compute if isinstance(compute, dict) else {}
    name, vm_id = known.get("name"), known.get("vmId")
    return Identity(
        name=clean_text(name) if isinstance(name, str) else "",
        vm_id=clean_text(vm_id) if isinstance(vm_id, str) else "",
    )


def _parse_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(body)
    except (ValueError, RecursionError, DocumentError):
        return None
    return value if isinstance(value, dict) else None


class Backoff:
    """How long to wait at least after a failure; 0: no longer than ever. Counts failures of one kind in a row."""

    def __init__(self) -> None:
        self._kind = ""
        self._count = 0

    def seconds_after(self, error: AgentError) -> float:
        """To be called once for each failure."""
        self._count = self._count + 1 if error.kind == self._kind else 1
        self._kind = error.kind
        if isinstance(error, ImdsError) and error.kind == "throttled" and error.retry_after is not None:
            return min(max(error.retry_after, _RETRY_AFTER_SECONDS[0]), _RETRY_AFTER_SECONDS[1])
        steps = _BACKOFF_SECONDS.get(error.kind, (0.0,))
        return steps[min(self._count, len(steps)) - 1]

    def reset(self) -> None:
        """A request has succeeded."""
        self._count = 0


class ImdsClient:
    """The requests of the protocol. Not thread-safe: one client per thread; ``close`` may come from any."""

    def __init__(
        self, endpoint: str, *, api_version: str, request_timeout: float, first_request_timeout: float
    ) -> None:
        name, port = _parse_endpoint(endpoint)
        authority = name if port == 80 else f"{name}:{port}"
        self._base = f"http://{authority}"
        self._fields = (
            f"Host: {authority}\r\nMetadata: true\r\nUser-Agent: scheduled-events-agent/{__version__}\r\n"
        )
        self._path = f"/metadata/scheduledevents?api-version={api_version}"
        self._fetch_request = self._to_get(self._path)
        self._echoes_incarnation = api_version == "2017-03-01"
        self._request_timeout = request_timeout
        self._fetch_timeout = max(request_timeout, first_request_timeout)
        self._connection = _Connection(name, port, request_timeout)

    @property
    def fetch_timeout(self) -> float:
        """Seconds that the next ``fetch`` may take, once the endpoint's name is resolved."""
        return self._fetch_timeout

    def fetch(self) -> bytes:
        """The scheduled events document as it came. Raises ImdsError."""
        body = self._request("GET", self._path, self._fetch_request, self._fetch_timeout)
        if not body:
            raise self._error("GET", self._path, "200 with an empty body", "empty")
        self._fetch_timeout = self._request_timeout
        return body

    def approve(self, ids: Sequence[str], incarnation: str) -> None:
        """Ask Azure to start the events ``ids`` now. Harmless to repeat. Raises ImdsError."""
        content: dict[str, object] = {"StartRequests": [{"EventId": event_id} for event_id in ids]}
        if self._echoes_incarnation:
            content["DocumentIncarnation"] = incarnation
        body = msgspec.json.encode(content)
        head = (
            f"POST {self._path} HTTP/1.1\r\n{self._fields}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        answer = self._request("POST", self._path, head.encode() + body, self._request_timeout)
        if answer.strip() and _parse_object(answer) is None:  # such as the page of a captive portal
            what = f"200, but neither an empty body nor a JSON object: {_excerpt(answer)}"
            raise self._error("POST", self._path, what, "unconfirmed")

    def fetch_identity(self) -> Identity:
        """This VM's name and id. Raises ImdsError."""
        body = self._request("GET", _INSTANCE_PATH, self._to_get(_INSTANCE_PATH), self._request_timeout)
        identity = parse_identity(body)
        if identity is None:
            what = f"expected a JSON object; got {_excerpt(body) or 'nothing'}"
            raise self._error("GET", _INSTANCE_PATH, what, "malformed")
        return identity

    def inspect(self, what: Literal["document", "instance"], *, has_metadata_header: bool = True) -> Answer:
        """Whatever is answered, with its headers. Raises ImdsError if that is no whole answer in time."""
        is_document = what == "document"
        path = self._path if is_document else _INSTANCE_PATH
        request = self._to_get(path)
        if not has_metadata_header:
            request = request.replace(b"Metadata: true\r\n", b"")
        timeout = self._fetch_timeout if is_document else self._request_timeout
        status, body = self._exchange("GET", path, request, timeout)
        return Answer(
            status=status,
            headers=self._headers(),
            body=body,
            fault=None if status == 200 else self._refusal("GET", path, status, body),
        )

    def close(self) -> None:
        """Give the connection up for good; a request that waits in another thread ends with an error."""
        self._connection.close()

    def _to_get(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\n{self._fields}\r\n".encode()

    def _request(self, method: str, path: str, request: bytes, timeout: float) -> bytes:
        """The body of an answer with status 200. Whatever else happens is told with the request it happened to."""
        status, body = self._exchange(method, path, request, timeout)
        if status == 200:
            return body
        raise self._refusal(method, path, status, body)

    def _refusal(self, method: str, path: str, status: int, body: bytes) -> ImdsError:
        what = f"{status} {_phrase(status)}"
        error = self._error(method, path, f"{what}: {_excerpt(body)}" if body else what, _kind_of(status))
        retry_after = self._headers().get("retry-after", "")
        if re.fullmatch(r"[0-9]{1,9}", retry_after):  # the form with a date is not read
            error.retry_after = float(retry_after)
        return error

    def _headers(self) -> dict[str, str]:
        """Of the last answer, names in lower case."""
        lines = (line.decode("latin-1").partition(":") for line in self._connection.header_lines)
        return {name.lower(): value.strip() for name, _, value in lines}

    def _exchange(self, method: str, path: str, request: bytes, timeout: float) -> tuple[int, bytes]:
        """Status and body of an answer."""
        kind: ImdsErrorKind
        try:
            return self._connection.exchange(request, monotonic() + timeout)
        except _AnswerError as error:
            kind, what = error.kind, str(error)
        except TimeoutError:
            kind, what = "timeout", f"no whole answer within {timeout:g} s"
        except ConnectionRefusedError:
            kind, what = "refused", "connection refused"
        except OSError as error:
            kind, what = "unreachable", error.strerror or str(error)
        raise self._error(method, path, what, kind)

    def _error(self, method: str, path: str, what: str, kind: ImdsErrorKind) -> ImdsError:
        # An approval that is refused says more about the event than about the version.
        way_out = "" if method == "POST" and kind == "bad_request" else _WAY_OUT.get(kind, "")
        return ImdsError(f"{method} {self._base}{path}: {what}{way_out}", kind=kind)


class _AnswerError(Exception):
    """What came back is not an answer we can take."""

    def __init__(self, what: str, kind: ImdsErrorKind = "malformed") -> None:
        super().__init__(what)
        self.kind = kind


class _NoAnswerError(ConnectionError):
    """The connection ended before the first byte of an answer."""


class _Connection:
    """One kept HTTP/1.1 connection. Every wait in it ends at the deadline of the exchange.

    Written on the socket itself for the sake of idling: at one request a second each costs 0.25 ms of CPU here;
    with the standard library's http.client and the same deadline it is 0.46, with httpcore 0.71, with httpx 0.95,
    and the whole agent should stay below 0.5.
    """

    def __init__(self, name: str, port: int, connect_timeout: float) -> None:
        self._address = (name, port)
        # Only the answer may take long the first time; a service that does not even connect is away.
        self._connect_timeout = connect_timeout
        self.header_lines: Sequence[bytes] = ()
        """Of the last answer."""
        self._socket: socket.socket | None = None
        self._is_closed = False

    def exchange(self, request: bytes, deadline: float) -> tuple[int, bytes]:
        """Send ``request``; returns status and body. Raises OSError (TimeoutError, ...) or _AnswerError."""
        try:
            if self._socket is not None:
                if _is_idle(self._socket):
                    try:
                        return self._send_and_receive(self._socket, request, deadline)
                    except _NoAnswerError:
                        pass  # the server gave the idle connection up in this very moment: not a failure
                self._disconnect()
            return self._send_and_receive(self._connect(deadline), request, deadline)
        except BaseException as error:
            self._disconnect()  # what is left of the answer must never be taken for the next one
            if self._is_closed and isinstance(error, Exception):
                raise OSError("the client is closed") from error
            raise

    def close(self) -> None:
        self._is_closed = True
        self._disconnect()

    def _connect(self, deadline: float) -> socket.socket:
        # A host name is resolved by the system, in its own time; an address, as Azure's, never waits for that.
        self._socket = connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if self._is_closed:
            raise OSError("the client is closed")
        limit = min(_seconds_left(deadline), self._connect_timeout)
        connecting.settimeout(limit)
        try:
            connecting.connect(self._address)
        except TimeoutError as error:
            raise _AnswerError(f"no connection within {limit:.3g} s", "timeout") from error
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connecting

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in recv; close alone does not
            connection.close()

    def _send_and_receive(self, connection: socket.socket, request: bytes, deadline: float) -> tuple[int, bytes]:
        connection.settimeout(_seconds_left(deadline))
        try:
            connection.sendall(request)
        except ConnectionError as error:
            raise _NoAnswerError("the connection was closed without an answer") from error
        answer = _Answer(connection, deadline)
        status, body, may_continue = answer.read()
        self.header_lines = answer.header_lines
        if not may_continue:
            self._disconnect()
        return status, body


class _Answer:
    """Reads one HTTP/1.x answer, strictly: where its end is in doubt it is an error, not a shorter answer."""

    __slots__ = ("_buffer", "_connection", "_deadline", "header_lines")

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._buffer = bytearray()

    def read(self) -> tuple[int, bytes, bool]:
        """Status, body, and whether the connection may be used again."""
        first, *lines = self._read_head().split(b"\r\n")
        self.header_lines = lines
        match = _STATUS_LINE.fullmatch(first)
        if match is None:
            raise _AnswerError(f"not an HTTP answer: {_excerpt(first)}")
        is_http_1_0, status = match[1] == b"0", int(match[2])
        length: bytes | None = None
        coding = connection = b""
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise _AnswerError(f"not a header: {_excerpt(line)}")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                if not value.isdigit() or len(value) > 12 or length not in (None, value):
                    raise _AnswerError(f"not a Content-Length: {_excerpt(value)}")
                length = value
            elif name == b"transfer-encoding":
                coding = value.lower()
            elif name == b"connection":
                connection = value.lower()
        may_continue = b"keep-alive" in connection if is_http_1_0 else b"close" not in connection
        if status < 200:
            body, may_continue = b"", False  # nothing was asked that an interim answer could belong to
        elif status in (204, 304):
            body = b""
        elif coding:
            if coding != b"chunked":
                raise _AnswerError(f"unknown Transfer-Encoding: {_excerpt(coding)}")
            body = self._read_chunks()
        elif length is not None:
            body = self._read_exactly(_bounded(int(length)))
        else:
            body, may_continue = self._read_to_the_end(), False
        if self._buffer and may_continue:
            raise _AnswerError(f"the answer is longer than announced: {_excerpt(body)}")
        return status, body, may_continue

    def _receive(self) -> bool:
        """Wait for more; False if the server has closed."""
        self._connection.settimeout(_seconds_left(self._deadline))
        received = self._connection.recv(_RECEIVE_BYTES)
        self._buffer += received
        return bool(received)

    def _require_more(self) -> None:
        if not self._receive():
            raise _AnswerError("the connection was closed in the middle of the answer")

    def _read_head(self) -> bytes:
        buffer = self._buffer
        try:
            is_open = self._receive()
        except ConnectionError as error:
            raise _NoAnswerError("the connection was closed without an answer") from error
        if not is_open:
            raise _NoAnswerError("the connection was closed without an answer")
        start = 0
        while (end := buffer.find(b"\r\n\r\n", start)) < 0:
            if len(buffer) > _MAX_HEAD_BYTES:
                raise _AnswerError(f"the head of the answer is over {_MAX_HEAD_BYTES // 1024} KiB", "too_large")
            start = max(0, len(buffer) - 3)
            self._require_more()
        head = bytes(buffer[:end])
        del buffer[: end + 4]
        return head

    def _read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._require_more()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise _AnswerError(f"not a chunk: {_excerpt(self._buffer)}")
            self._require_more()
        return self._read_exactly(end + 2)[:-2]

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            match = _CHUNK_SIZE.fullmatch(line := self._read_line())
            if match is None:
                raise _AnswerError(f"not a chunk: {_excerpt(line)}")
            size = int(match[1], 16)
            if size == 0:
                break
            _bounded(len(body) + size)
            body += self._read_exactly(size)
            if self._read_exactly(2) != b"\r\n":
                raise _AnswerError("a chunk is longer than announced")
        trailer_bytes = 0
        while line := self._read_line():
            trailer_bytes += len(line)
            if trailer_bytes > _MAX_HEAD_BYTES:
                raise _AnswerError(f"the tail of the answer is over {_MAX_HEAD_BYTES // 1024} KiB", "too_large")
        return bytes(body)

    def _read_to_the_end(self) -> bytes:
        while self._receive():
            _bounded(len(self._buffer))
        return self._read_exactly(len(self._buffer))


def _is_idle(connection: socket.socket) -> bool:
    """Whether a kept connection is open and silent: a stray answer would be taken for the next one's."""
    connection.settimeout(0)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _seconds_left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _bounded(body_bytes: int) -> int:
    if body_bytes > _MAX_BODY_BYTES:
        raise _AnswerError(f"the body is over {_MAX_BODY_BYTES // 1024**2} MiB", "too_large")
    return body_bytes


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    address = parse_endpoint(endpoint)
    if address is None:
        raise EndpointError(endpoint)
    return address


def _kind_of(status: int) -> ImdsErrorKind:
    if 300 <= status < 400:
        return "redirect"
    return "server_error" if status >= 500 else _KIND_OF_STATUS.get(status, "unexpected_status")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "(unknown status)"


def _excerpt(data: bytes | bytearray) -> str:
    """The beginning of ``data`` as one printable line."""
    text = " ".join(bytes(data[:300]).decode("utf-8", "replace").split())
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return f"{shown}..." if len(data) > 300 else shown
