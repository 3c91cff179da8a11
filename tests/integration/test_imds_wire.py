"""The edge to the metadata service, on real sockets against a server that does exactly as the test says."""

import gc
import gzip
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Self

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ports import free_port

from scheduled_events_agent import __version__
from scheduled_events_agent.http import transport
from scheduled_events_agent.http.errors import IMDS_ERROR_KINDS, HttpErrorKind
from scheduled_events_agent.http.transport import BoundedTransport
from scheduled_events_agent.imds.client import ImdsClient, ImdsError
from scheduled_events_agent.imds.document import parse_document
from scheduled_events_agent.imds.text import DocumentError

DOCUMENT = b'{"DocumentIncarnation": 1, "Events": []}'
PATH = "/metadata/scheduledevents?api-version=2020-07-01"
LIMIT = 0.3
# Far more than any of these exchanges may take, and far less than a wait without a limit.
PATIENCE = 60.0


def answer(body: bytes = DOCUMENT, status: str = "200 OK", *fields: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields])
    return head.encode() + b"\r\n\r\n" + body


class Peer:
    """The server's side of one connection."""

    def __init__(self, server: "Server", connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._buffer = b""

    def request(self) -> bool:
        """Read one request; False if the client closed instead."""
        while b"\r\n\r\n" not in self._buffer:
            if not self._receive():
                return False
        head, _, rest = self._buffer.partition(b"\r\n\r\n")
        _, has_body, length = head.lower().partition(b"content-length: ")
        size = int(length.split(b"\r\n")[0]) if has_body else 0
        while len(rest) < size:
            self._receive()
            rest = self._buffer.partition(b"\r\n\r\n")[2]
        self._buffer = rest[size:]
        self._server.requests.append((head.decode(), rest[:size]))
        return True

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def drip(self, data: bytes) -> None:
        for index in range(len(data)):
            if self.wait_for_end(0.005):
                return
            self.send(data[index : index + 1])

    def flood(self, data: bytes) -> None:
        while not self._server.is_over.is_set():
            self.send(data)

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """Whether the test is over."""
        return self._server.is_over.wait(seconds)

    def stall(self) -> None:
        self.wait_for_end()

    def half_close(self) -> None:
        self._connection.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._connection.close()

    def _receive(self) -> bool:
        data = self._connection.recv(65536)
        self._buffer += data
        return bool(data)


Script = Callable[[Peer], None]


class Server:
    """Plays one script per connection, in order; the last one again for every further connection."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self.is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self.is_over.is_set():
                connection.close()
                return
            script = self._scripts[min(self.connections, len(self._scripts) - 1)]
            self.connections += 1
            thread = threading.Thread(target=self._play, args=(script, connection))
            self._threads.append(thread)
            thread.start()

    def _play(self, script: Script, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            with suppress(OSError):  # the client went away: what it made of that is for the test to say
                script(Peer(self, connection))

    def close(self) -> None:
        self.is_over.set()
        socket.create_connection(self._listener.getsockname()).close()  # wakes accept
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()


def always(reply: bytes) -> Script:
    """Every request of the connection gets ``reply``."""

    def play(peer: Peer) -> None:
        while peer.request():
            peer.send(reply)

    return play


def once(reply: bytes, then: Callable[[Peer], None] = lambda _: None) -> Script:
    """The first request gets ``reply``; ``then`` happens, and the connection is closed."""

    def play(peer: Peer) -> None:
        if peer.request():
            peer.send(reply)
            then(peer)

    return play


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*scripts: Script) -> Server:
        servers.append(Server(*scripts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def client_of(server: Server | str, **options: Any) -> ImdsClient:
    endpoint = server if isinstance(server, str) else server.endpoint
    defaults = {"api_version": "2020-07-01", "request_timeout": 200.0, "first_request_timeout": 0.0}
    return ImdsClient(endpoint, **{**defaults, **options})


def error_of(call: Callable[[], object]) -> ImdsError:
    started_at = time.monotonic()
    with pytest.raises(ImdsError) as caught:
        call()
    assert time.monotonic() - started_at < PATIENCE
    return caught.value


def assert_fails(server: Server, kind: HttpErrorKind, message: str = "", **options: Any) -> None:
    error = error_of(client_of(server, **options).fetch)
    assert error.kind == kind
    assert str(error).startswith(f"GET {server.endpoint}{PATH}: {message}")


# --- what is sent --------------------------------------------------------------------------------------------


def test_the_document_is_fetched_with_the_metadata_header(serve: Serve) -> None:
    server = serve(always(answer()))

    client = client_of(server)
    assert client.fetch() == DOCUMENT

    ((head, body),) = server.requests
    assert body == b""
    first, *fields = head.split("\r\n")
    assert first == f"GET {PATH} HTTP/1.1"
    assert sorted(fields) == [
        "Accept-Encoding: identity",
        "Accept: */*",
        "Connection: close",
        f"Host: {server.endpoint.removeprefix('http://')}",
        "Metadata: true",
        f"User-Agent: scheduled-events-agent/{__version__}",
    ]


def test_no_proxy_of_the_environment_is_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server, proxy = serve(always(answer())), serve(always(answer(b"proxy")))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.endpoint)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    client = client_of(server)
    assert client.fetch() == DOCUMENT
    client.approve(["a"], "1")
    client.fetch_identity()

    assert (proxy.connections, len(server.requests)) == (0, 3)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect"])
def test_a_redirect_is_not_followed(serve: Serve, status: str) -> None:
    other = serve(always(answer()))
    server = serve(always(answer(b"", status, f"Location: {other.endpoint}/metadata/scheduledevents")))

    assert_fails(
        server,
        "redirect",
        f"{status}; something other than the metadata service answers: check imds.endpoint",
    )
    assert other.connections == 0


@pytest.mark.parametrize(
    "location",
    ["portal.example:8080/login", "about:blank", "javascript:alert(1)", "//xn--/", "login:%s", "http://[", "\xff"],
)
def test_a_redirect_to_an_odd_address_is_a_redirect_as_any_other(serve: Serve, location: str) -> None:
    server = serve(always(answer(b"", "302 Found", f"Location: {location}")))
    assert_fails(server, "redirect", "302 Found; ")
    assert client_of(server).probe("document").headers["location"] == location


def test_no_cookie_is_sent_back_and_no_connection_is_used_twice(serve: Serve) -> None:
    server = serve(always(answer(DOCUMENT, "200 OK", "Set-Cookie: a=b", "Connection: keep-alive")))
    client = client_of(server)
    assert [client.fetch(), client.fetch()] == [DOCUMENT, DOCUMENT]
    assert server.connections == 2
    assert not any("cookie" in head.lower() for head, _ in server.requests)


# --- forms of a right answer ---------------------------------------------------------------------------------

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        answer(),
        b"HTTP/1.1 200\r\ncontent-length:40\r\n\r\n" + DOCUMENT,
        b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\nContent-Length: 40\r\nX: a:b\r\nY:\r\n\r\n" + DOCUMENT,
        CHUNKED + b"28\r\n" + DOCUMENT + b"\r\n0\r\n\r\n",
        CHUNKED + b"A;x=1\r\n" + DOCUMENT[:10] + b"\r\n1e \r\n" + DOCUMENT[10:] + b"\r\n000\r\nTrailer: x\r\n\r\n",
        answer(DOCUMENT, "200 OK", "Connection: close"),
        b"HTTP/1.1 200 OK\r\n\r\n" + DOCUMENT,
        b"HTTP/1.0 200 OK\r\n\r\n" + DOCUMENT,
        answer().replace(b"HTTP/1.1", b"HTTP/1.0"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(),
    ],
    ids=["length", "terse", "twice", "chunk", "chunks", "close", "no-length", "1.0", "1.0-length", "interim"],
)
@pytest.mark.parametrize("way", ["at once", "drop by drop"])
def test_every_form_of_answer_is_read_however_it_arrives(serve: Serve, reply: bytes, way: str) -> None:
    def play(peer: Peer) -> None:
        if peer.request():
            peer.send(reply) if way == "at once" else peer.drip(reply)

    assert client_of(serve(play)).fetch() == DOCUMENT


def test_a_document_of_several_mebibytes_arrives_whole(serve: Serve) -> None:
    body = b'{"Events": [], "x": "' + b"x" * (5 * 1024 * 1024) + b'"}'
    server = serve(always(answer(body)))

    client = client_of(server)
    assert client.fetch() == body


# --- answers that are none -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"hello\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20\r\n\r\n",
        b"HTTP/1.1 099 No\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"9" * 2000,
        CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
        answer()[:-1],
        answer()[:20],
        CHUNKED + b"28\r\n" + DOCUMENT + b"\r\n",
        CHUNKED + b"28\r\n" + DOCUMENT[:20],
    ],
)
def test_an_invalid_or_incomplete_response_is_malformed(serve: Serve, reply: bytes) -> None:
    assert_fails(serve(once(reply)), "malformed", "not a whole HTTP answer: ")


@pytest.mark.parametrize("reply", [answer() + b"}", answer().replace(b" 40\r\n", b" 39\r\n")])
def test_bytes_after_a_response_are_ignored(serve: Serve, reply: bytes) -> None:
    server = serve(once(reply), always(answer(b"{}")))
    client = client_of(server)
    assert client.fetch() == DOCUMENT[: 40 if b" 40\r\n" in reply else 39]
    assert client.fetch() == b"{}"


@pytest.mark.parametrize(
    ("head", "filler", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, "too_large"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8388609\r\n\r\n", b"x" * 65536, "too_large"),
        (CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", "too_large"),
        (CHUNKED + b"ffffffff\r\n", b"x" * 65536, "too_large"),
        (b"", b"HTTP/1.1 100 Continue\r\nX: " + b"x" * 65536 + b"\r\n\r\n", "too_large"),
        # These are given up earlier, by the parser.
        (CHUNKED + b"0\r\n", b"X: y\r\n" * 1000, "malformed"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000, "malformed"),
        (b"", b"x" * 65536, "malformed"),
    ],
    ids=["until-close", "length", "chunks", "chunk", "interim", "trailers", "headers", "line"],
)
def test_an_answer_without_end_is_given_up_when_it_is_too_large(
    serve: Serve, head: bytes, filler: bytes, kind: HttpErrorKind
) -> None:
    assert_fails(serve(once(head, then=lambda peer: peer.flood(filler))), kind)


def chunks(body: bytes, size: int) -> bytes:
    parts = (body[start : start + size] for start in range(0, len(body), size))
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


PAGE = b'{"Events": []}'.ljust(20_000)
INTERIM = b"HTTP/1.1 103 \r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "body"),
    [(chunks(PAGE, 1), PAGE), (INTERIM * 4000 + answer(), DOCUMENT), (chunks(PAGE * 400, 1000), PAGE * 400)],
    ids=["chunks of 1 byte", "interim answers", "8 MB in chunks"],
)
def test_an_answer_in_many_parts_is_read(serve: Serve, reply: bytes, body: bytes) -> None:
    assert client_of(serve(once(reply))).fetch() == body


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (chunks(PAGE + b" ", 1), "the answer comes in more than 20,000 parts"),
        (chunks(PAGE * 10, 1), "the answer comes in more than 20,000 parts"),
        (INTERIM * 20_000 + answer(), "the head of the answer is over 256 KiB"),
        (INTERIM * 400_000 + answer(), "the head of the answer is over 256 KiB"),
    ],
    ids=["a chunk too many", "chunks", "interim answers", "8 MB of interim answers"],
)
def test_an_answer_in_very_many_parts_is_too_large(serve: Serve, reply: bytes, message: str) -> None:
    assert_fails(serve(once(reply)), "too_large", message)


class Dripping:
    """A connection that gives one byte at a time, without end, and counts them."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self.reads = 0

    def recv(self, _: int) -> bytes:
        self.reads += 1
        return self._head[self.reads - 1 : self.reads] or b"x"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses at once what is over the backlog")
@pytest.mark.parametrize("has_room_again", [True, False])
def test_a_service_that_is_slow_to_connect_is_waited_for_in_slices(
    monkeypatch: pytest.MonkeyPatch, has_room_again: bool
) -> None:
    monkeypatch.setattr(transport, "_SLICE_SECONDS", 0.05)
    waits: list[float] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        stack.enter_context(socket.create_connection(listener.getsockname()))  # takes the only place

        def serve() -> None:
            listener.accept()[0].close()
            with listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answer())

        def on_wait(seconds: float) -> None:
            waits.append(seconds)
            if has_room_again and len(waits) == 5:
                thread = threading.Thread(target=serve, daemon=True)
                thread.start()
                stack.callback(thread.join, PATIENCE)

        client = ImdsClient(
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            api_version="2020-07-01",
            request_timeout=60.0 if has_room_again else LIMIT,
            first_request_timeout=0.0,
            on_wait=on_wait,
        )
        if has_room_again:
            assert client.fetch() == DOCUMENT
        else:
            assert error_of(client.fetch).kind == "timeout"
        assert len(waits) > 2
        assert max(waits[1:]) <= 0.05  # but for the name


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "], ids=["body", "head"])
def test_an_answer_byte_by_byte_is_too_large(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    connection = Dripping(head)
    monkeypatch.setattr(socket, "socket", lambda _: connection)
    error = error_of(client_of("http://127.0.0.1").fetch)
    assert (error.kind, connection.reads) == ("too_large", 20_001)
    assert str(error).endswith(": the answer comes in more than 20,000 parts")


@pytest.mark.parametrize(
    ("head", "filler"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n", b"x" * 65536),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        (CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    ],
    ids=["announced", "until-close", "chunks"],
)
def test_a_gigabyte_uses_a_bounded_amount_of_memory(serve: Serve, head: bytes, filler: bytes) -> None:
    client = client_of(serve(once(head, then=lambda peer: peer.flood(filler))))
    error_of(client.fetch)  # imports, buffers
    tracemalloc.start()
    try:
        error = error_of(client.fetch)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()

    assert error.kind == "too_large"
    assert peak_mib < 24


def test_an_answer_leaves_memory_without_the_garbage_collector(serve: Serve) -> None:
    client = client_of(serve(always(answer())))
    gc.collect()
    gc.disable()
    try:
        assert client.fetch() == DOCUMENT
        left = sum(isinstance(one, httpx.Response) for one in gc.get_objects())
    finally:
        gc.enable()
    assert left == 0


def test_a_compressed_response_is_never_decompressed(serve: Serve) -> None:
    packed = gzip.compress(DOCUMENT + b" " * 2**26)
    server = serve(always(answer(packed, "200 OK", "Content-Encoding: gzip")))
    assert client_of(server).fetch() == packed
    with pytest.raises(DocumentError):
        parse_document(packed)


def test_half_a_response_on_a_half_closed_connection_is_no_response(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer()[:-10])
        peer.half_close()
        peer.stall()

    client = client_of(serve(play, always(answer())))
    assert error_of(client.fetch).kind == "malformed"
    assert client.fetch() == DOCUMENT


RIGHT = [
    answer(),
    answer(b"", "302 Found", "Location: http://127.0.0.1/?q=%20#x"),
    CHUNKED + b"28\r\n" + DOCUMENT + b"\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n" + DOCUMENT,
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from(RIGHT), st.integers(0, 120), st.integers(0, 20), st.binary(max_size=20))
def test_any_bytes_are_an_answer_or_an_error_of_a_known_kind(
    serve: Serve, reply: bytes, start: int, cut: int, put: bytes
) -> None:
    server = serve(once(reply[:start] + put + reply[start + cut :]))
    try:
        answered = client_of(server).probe("document")
    except ImdsError as error:
        assert error.kind in IMDS_ERROR_KINDS  # noqa: PT017
    else:
        assert 100 <= answered.status <= 999


@pytest.mark.parametrize("name", ["a..b", "b" * 64], ids=["empty label", "long label"])
def test_a_name_that_cannot_be_resolved_is_a_connect_error(name: str) -> None:
    client = httpx.Client(transport=BoundedTransport(1024), trust_env=False)
    with pytest.raises(httpx.ConnectError, match=f"^{name} cannot be looked up$"):
        client.get(f"http://{name}/")


# --- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beginning",
    [b"", b"HTTP/1.1 200 OK\r\n", answer()[:-1], CHUNKED, CHUNKED + b"28\r\n" + DOCUMENT + b"\r\n"],
    ids=["nothing", "head", "body", "chunked", "last-chunk"],
)
def test_a_server_that_stalls_is_given_up_at_the_time_limit(serve: Serve, beginning: bytes) -> None:
    server = serve(once(beginning, then=Peer.stall))

    assert_fails(server, "timeout", "no whole answer within 0.3 s", request_timeout=LIMIT)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000,
        answer(DOCUMENT + b" " * 1000),
        CHUNKED + b"1\r\n \r\n" * 1000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 1000,
    ],
    ids=["head", "body", "chunks", "until-close"],
)
def test_the_limit_is_for_the_whole_exchange_and_drops_do_not_stretch_it(serve: Serve, reply: bytes) -> None:
    server = serve(once(b"", then=lambda peer: peer.drip(reply)))

    assert_fails(server, "timeout", "no whole answer within 0.3 s", request_timeout=LIMIT)


def test_only_the_first_response_may_take_longer(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        while peer.request():
            if not peer.wait_for_end(1.5):
                peer.send(answer())

    server = serve(play)
    client = client_of(server, request_timeout=0.1, first_request_timeout=200.0)
    assert client.fetch() == DOCUMENT
    error = error_of(client.fetch)

    assert str(error) == f"GET {server.endpoint}{PATH}: no whole answer within 0.1 s"


def test_an_empty_first_answer_does_not_use_up_the_longer_limit(serve: Serve) -> None:
    def late(peer: Peer) -> None:
        peer.request()
        if not peer.wait_for_end(0.25):
            peer.send(answer())

    client = client_of(serve(once(answer(b"")), late), request_timeout=0.1, first_request_timeout=200.0)
    assert error_of(client.fetch).kind == "empty"
    assert client.fetch() == DOCUMENT


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses when the queue is full")
def test_connecting_never_takes_longer_than_an_ordinary_request() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        queue = []
        for _ in range(4):  # fill the queue of a listener that never accepts
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
            queue.append(waiting)
        endpoint = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = client_of(endpoint, request_timeout=LIMIT, first_request_timeout=200.0)
        error = error_of(client.fetch)
        for waiting in queue:
            waiting.close()

    assert (error.kind, str(error)) == ("timeout", f"GET {endpoint}{PATH}: no connection within 0.3 s")


# --- connections that go -------------------------------------------------------------------------------------


def test_a_closed_port_is_refused_and_found_once_it_listens() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    client = client_of(endpoint)
    error = error_of(client.fetch)

    assert error.kind == "refused"
    assert str(error) == (
        f"GET {endpoint}{PATH}: connection refused; check imds.endpoint, and that this machine is an Azure VM"
    )


def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    client = client_of("http://no-such-host.invalid")
    error = error_of(client.fetch)

    assert error.kind == "unreachable"
    assert str(error).startswith(f"GET http://no-such-host.invalid{PATH}: ")


@pytest.mark.parametrize("end", [lambda _: None, Peer.reset], ids=["closed", "reset"])
def test_a_connection_that_gives_no_answer_is_an_error_and_not_tried_again(serve: Serve, end: Script) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        end(peer)

    server = serve(play)
    assert_fails(server, "unreachable")
    assert server.connections == 1


def test_an_unsolicited_response_is_never_used(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer() + answer(b'{"stale": 1}'))
        peer.stall()

    client = client_of(serve(play, always(answer(b'{"fresh": 1}'))))
    assert [client.fetch(), client.fetch()] == [DOCUMENT, b'{"fresh": 1}']


def test_the_rest_of_a_late_response_is_never_used_as_the_next_one(serve: Serve) -> None:
    gave_up = threading.Event()

    def late(peer: Peer) -> None:
        peer.request()
        gave_up.wait(PATIENCE)
        peer.send(answer(b'{"late": 1}'))
        peer.stall()

    server = serve(late, always(answer()))
    client = client_of(server, request_timeout=LIMIT)
    assert error_of(client.fetch).kind == "timeout"
    gave_up.set()
    assert client.fetch() == DOCUMENT


def test_every_failure_leaves_the_client_usable(serve: Serve) -> None:
    failures = [b"junk\r\n\r\n", answer()[:-1], answer(b"", "500 x"), CHUNKED + b"zz\r\n"]
    server = serve(*[once(reply) for reply in failures], always(answer()))

    client = client_of(server)
    kinds = [error_of(client.fetch).kind for _ in failures]
    assert client.fetch() == DOCUMENT

    assert kinds == ["malformed", "malformed", "server_error", "malformed"]
