"""The edge to the metadata service, on real sockets against a server that does exactly as the test says."""

import gzip
import json
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import __version__
from agent.events import DocumentError, parse_document
from agent.imds import Identity, ImdsClient, ImdsError, ImdsErrorKind, _Answer, _AnswerError

PAYLOADS = Path(__file__).parent.parent / "payloads"
MISSING_HEADER = (
    '400 Bad Request: { "error": "Bad request. Required metadata header not specified" }; check imds.api_version'
)
BAD_API_VERSION = (
    '400 Bad Request: { "error": "Bad request. api-version is invalid or was not specified in the request. '
    'For more information refer to aka.ms/azureimds", '
    '"newest-versions": [ "2025-04-07", "2024-07-17", "2024-03-15" ] }; check imds.api_version'
)
DOCUMENT = b'{"DocumentIncarnation": 1, "Events": []}'
PATH = "/metadata/scheduledevents?api-version=2020-07-01"
LIMIT = 0.3
# Far more than any of these exchanges may take, and far less than a wait without a limit.
PATIENCE = 20.0


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
            if self._server.is_over.wait(0.005):
                return
            self.send(data[index : index + 1])

    def flood(self, data: bytes) -> None:
        while not self._server.is_over.is_set():
            self.send(data)

    def stall(self) -> None:
        self._server.is_over.wait()

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


@contextmanager
def client_of(server: Server | str, **options: Any) -> Iterator[ImdsClient]:
    endpoint = server if isinstance(server, str) else server.endpoint
    defaults = {"api_version": "2020-07-01", "request_timeout": 30.0, "first_request_timeout": 0.0}
    client = ImdsClient(endpoint, **{**defaults, **options})
    try:
        yield client
    finally:
        client.close()


def error_of(call: Callable[[], object]) -> ImdsError:
    started_at = time.monotonic()
    with pytest.raises(ImdsError) as caught:
        call()
    assert time.monotonic() - started_at < PATIENCE
    return caught.value


def assert_fails(server: Server, kind: ImdsErrorKind, message: str, **options: Any) -> None:
    with client_of(server, **options) as client:
        error = error_of(client.fetch)
    assert (error.kind, str(error)) == (kind, f"GET {server.endpoint}{PATH}: {message}")


# --- what is sent --------------------------------------------------------------------------------------------


def test_the_document_is_fetched_with_the_metadata_header_and_nothing_that_the_service_rejects(
    serve: Serve,
) -> None:
    server = serve(always(answer()))

    with client_of(server) as client:
        assert client.fetch() == DOCUMENT

    ((head, body),) = server.requests
    assert body == b""
    assert head.split("\r\n") == [
        f"GET {PATH} HTTP/1.1",
        f"Host: {server.endpoint.removeprefix('http://')}",
        "Metadata: true",
        f"User-Agent: scheduled-events-agent/{__version__}",
    ]


def test_the_connection_is_kept_from_request_to_request(serve: Serve) -> None:
    server = serve(always(answer()))

    with client_of(server) as client:
        for _ in range(5):
            client.fetch()
        client.approve(["a"], "1")

    assert (server.connections, len(server.requests)) == (1, 6)


def test_no_proxy_of_the_environment_is_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server, proxy = serve(always(answer())), serve(always(answer(b"proxy")))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.endpoint)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    with client_of(server) as client:
        assert client.fetch() == DOCUMENT
        client.approve(["a"], "1")
        client.fetch_identity()

    assert (proxy.connections, len(server.requests)) == (0, 3)


@pytest.mark.parametrize(
    ("payload", "api_version"),
    [("50-request-approve-single.json", "2020-07-01"), ("51-request-approve-2017-03-01.json", "2017-03-01")],
)
def test_an_approval_has_the_documented_body(serve: Serve, payload: str, api_version: str) -> None:
    server = serve(always(answer(b"")))

    with client_of(server, api_version=api_version) as client:
        client.approve(["f020ba2e-3bc0-4c40-a10b-86575a9eabd5"], "5")

    ((head, body),) = server.requests
    assert json.loads(body) == json.loads((PAYLOADS / payload).read_bytes())
    assert head.split("\r\n")[0] == f"POST /metadata/scheduledevents?api-version={api_version} HTTP/1.1"
    assert "Metadata: true" in head.split("\r\n")
    assert "Content-Type: application/json" in head.split("\r\n")


def test_several_events_are_approved_in_one_request(serve: Serve) -> None:
    server = serve(always(answer(b"")))

    with client_of(server) as client:
        client.approve(["A-1", "b-2"], "5")

    ((_, body),) = server.requests
    assert json.loads(body) == {"StartRequests": [{"EventId": "A-1"}, {"EventId": "b-2"}]}


@pytest.mark.parametrize(
    ("status", "kind"), [("400 Bad Request", "bad_request"), ("404 Not Found", "not_found"), ("410 Gone", "gone")]
)
def test_a_refused_approval_is_told_with_its_answer(serve: Serve, status: str, kind: ImdsErrorKind) -> None:
    server = serve(always(answer(b'{"error": "no such event"}', status)))

    with client_of(server) as client:
        error = error_of(lambda: client.approve(["a"], "1"))

    assert error.kind == kind
    assert str(error) == f'POST {server.endpoint}{PATH}: {status}: {{"error": "no such event"}}'


@pytest.mark.parametrize("body", [b"", b"  \r\n", b"{}", b'{"error": null}'])
def test_an_empty_body_or_a_json_object_confirms_an_approval(serve: Serve, body: bytes) -> None:
    server = serve(always(answer(body)))

    with client_of(server) as client:
        client.approve(["a"], "1")

    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [b"<html>Please sign in</html>", b"[]", b'"ok"', b"null", b"OK", b'{"a":1,"a":2}']
)
def test_nothing_else_confirms_an_approval(serve: Serve, body: bytes) -> None:
    server = serve(always(answer(body)))

    with client_of(server) as client:
        error = error_of(lambda: client.approve(["a"], "1"))

    assert error.kind == "unconfirmed"
    what = f"200, but neither an empty body nor a JSON object: {body.decode()}"
    assert str(error) == f"POST {server.endpoint}{PATH}: {what}"


@pytest.mark.parametrize("api_version", ["2020-07-01", "2017-03-01"])
@pytest.mark.parametrize("event_id", [" a ", "a\r\n\x00\u202eb", "é\U0001f600", "x" * 4096, '"\\/'])
def test_an_id_is_sent_back_exactly_as_it_came(serve: Serve, event_id: str, api_version: str) -> None:
    server = serve(always(answer(b"")))
    document = json.dumps({"DocumentIncarnation": 5, "Events": [{"EventId": event_id, "EventType": "Freeze"}]})
    (event,) = parse_document(document.encode()).events

    with client_of(server, api_version=api_version) as client:
        client.approve([event.approval_id], "5")

    ((_, body),) = server.requests
    assert json.loads(body)["StartRequests"] == [{"EventId": event_id}]


@pytest.mark.parametrize(("field", "asked"), [("7", 7.0), ("0", 0.0), ("soon", None), ("-1", None), ("", None)])
def test_the_pause_that_a_429_asks_for_is_read(serve: Serve, field: str, asked: float | None) -> None:
    server = serve(always(answer(b"{}", "429 Too Many Requests", f"Retry-After: {field}")))

    with client_of(server) as client:
        error = error_of(client.fetch)

    assert (error.kind, error.retry_after) == ("throttled", asked)


# --- who am I ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "identity"),
    [
        (
            {"compute": {"name": "vmss_7", "vmId": "02aab8a4"}, "network": {}},
            Identity(name="vmss_7", vm_id="02aab8a4"),
        ),
        ({"compute": {"name": "vm", "vmId": None}}, Identity(name="vm", vm_id="")),
        (
            {"compute": {"name": " vm\n\x1b[31m\u202e1 ", "vmId": "x" * 100_000}},
            Identity(name="vm  [31m 1", vm_id="x" * 4096),
        ),
        ({"compute": {}}, Identity(name="", vm_id="")),
        ({"compute": None}, Identity(name="", vm_id="")),
        ({}, Identity(name="", vm_id="")),
    ],
)
def test_the_identity_is_read_from_the_instance_document(
    serve: Serve, document: object, identity: Identity
) -> None:
    server = serve(always(answer(json.dumps(document).encode())))

    with client_of(server) as client:
        assert client.fetch_identity() == identity

    assert server.requests[0][0].startswith(
        "GET /metadata/instance?api-version=2021-12-13&format=json HTTP/1.1\r\n"
    )


@pytest.mark.parametrize(
    ("body", "got"), [(b"", "nothing"), (b"<html>", "<html>"), (b"[]", "[]"), (b"[" * 400, "[" * 300 + "...")]
)
def test_an_instance_document_that_is_none_is_malformed(serve: Serve, body: bytes, got: str) -> None:
    server = serve(always(answer(body)))

    with client_of(server) as client:
        error = error_of(client.fetch_identity)

    assert error.kind == "malformed"
    assert str(error) == (
        f"GET {server.endpoint}/metadata/instance?api-version=2021-12-13&format=json: "
        f"expected a JSON object; got {got}"
    )


# --- answers that are not a document -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            "400 Bad Request",
            "48-imds-400-missing-metadata-header.json",
            "bad_request",
            MISSING_HEADER,
        ),
        (
            "400 Bad Request",
            "47-imds-400-bad-api-version.json",
            "bad_request",
            BAD_API_VERSION,
        ),
        ("401 Unauthorized", b"", "unexpected_status", "401 Unauthorized"),
        ("404 Not Found", b'{"error": "gone"}', "not_found", '404 Not Found: {"error": "gone"}'),
        ("410 Gone", b"", "gone", "410 Gone"),
        ("429 Slow Down", b"one\r\n\0two", "throttled", "429 Too Many Requests: one \N{REPLACEMENT CHARACTER}two"),
        ("500 Oops", b'{"Events": []}', "server_error", '500 Internal Server Error: {"Events": []}'),
        ("503 x", b"", "server_error", "503 Service Unavailable"),
        ("599 x", b"", "server_error", "599 (unknown status)"),
        ("201 Created", DOCUMENT, "unexpected_status", f"201 Created: {DOCUMENT.decode()}"),
        ("204 No Content", b"", "unexpected_status", "204 No Content"),
        ("304 Not Modified", b"", "redirect", None),
    ],
)
def test_every_other_status_is_an_error_that_quotes_its_body(
    serve: Serve, status: str, body: bytes | str, kind: ImdsErrorKind, message: str | None
) -> None:
    content = (PAYLOADS / body).read_bytes() if isinstance(body, str) else body
    message = message or "304 Not Modified; something other than the metadata service answers: check imds.endpoint"

    assert_fails(serve(always(answer(content, status))), kind, message)


def test_an_empty_body_means_not_ready_yet_and_the_next_request_succeeds(serve: Serve) -> None:
    empty = (PAYLOADS / "49-empty-body-200.txt").read_bytes()

    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer(empty))
        peer.request()
        peer.send(answer())

    server = serve(play)
    with client_of(server) as client:
        error = error_of(client.fetch)
        assert client.fetch() == DOCUMENT

    assert error.kind == "empty"
    assert str(error) == (
        f"GET {server.endpoint}{PATH}: 200 with an empty body; "
        "the service is still switching scheduled events on for this VM"
    )


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


def test_a_throttled_request_leaves_the_connection_usable(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer(b"{}", "429 Too Many Requests"))
        peer.request()
        peer.send(answer())

    server = serve(play)
    with client_of(server) as client:
        assert error_of(client.fetch).kind == "throttled"
        assert client.fetch() == DOCUMENT
    assert server.connections == 1


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
    ],
    ids=["length", "terse", "twice", "chunk", "chunks"],
)
@pytest.mark.parametrize("way", ["at once", "drop by drop"])
def test_every_form_of_answer_is_read_however_it_arrives(serve: Serve, reply: bytes, way: str) -> None:
    def play(peer: Peer) -> None:
        while peer.request():
            peer.send(reply) if way == "at once" else peer.drip(reply)

    server = serve(play)
    with client_of(server) as client:
        assert client.fetch() == DOCUMENT
        if way == "at once":
            assert client.fetch() == DOCUMENT
            assert server.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        answer(DOCUMENT, "200 OK", "Connection: close"),
        b"HTTP/1.1 200 OK\r\n\r\n" + DOCUMENT,
        b"HTTP/1.0 200 OK\r\n\r\n" + DOCUMENT,
        answer().replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["close", "no-length", "1.0", "1.0-length"],
)
def test_a_connection_that_ends_with_its_answer_is_not_used_again(serve: Serve, reply: bytes) -> None:
    server = serve(once(reply))

    with client_of(server) as client:
        assert [client.fetch(), client.fetch()] == [DOCUMENT, DOCUMENT]

    assert server.connections == 2


def test_an_old_server_may_keep_the_connection_if_it_says_so(serve: Serve) -> None:
    server = serve(always(answer(DOCUMENT, "200 OK", "Connection: Keep-Alive").replace(b"HTTP/1.1", b"HTTP/1.0")))

    with client_of(server) as client:
        assert [client.fetch(), client.fetch()] == [DOCUMENT, DOCUMENT]

    assert server.connections == 1


def test_a_document_of_several_mebibytes_arrives_whole(serve: Serve) -> None:
    body = b'{"Events": [], "x": "' + b"x" * (5 * 1024 * 1024) + b'"}'
    server = serve(always(answer(body)))

    with client_of(server) as client:
        assert client.fetch() == body


# --- answers that are none -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"hello\r\n\r\n", "not an HTTP answer: hello"),
        (b"\r\n\r\n", "not an HTTP answer: "),
        (b"HTTP/2 200\r\n\r\n", "not an HTTP answer: HTTP/2 200"),
        (b"HTTP/1.1 20\r\n\r\n", "not an HTTP answer: HTTP/1.1 20"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "not a header: nonsense"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "not a Content-Length: -1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\n", "not a Content-Length: 1e3"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999\r\n\r\n", "not a Content-Length: 9999999999999"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "not a Content-Length: 2"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "unknown Transfer-Encoding: gzip"),
        (CHUNKED + b"xyz\r\n", "not a chunk: xyz"),
        (CHUNKED + b"-1\r\n", "not a chunk: -1"),
        (CHUNKED + b"\r\n", "not a chunk: "),
        (CHUNKED + b"9" * 2000, f"not a chunk: {'9' * 300}..."),
        (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", "a chunk is longer than announced"),
        (answer() + b"}", f"the answer is longer than announced: {DOCUMENT.decode()}"),
        (
            answer().replace(b" 40\r\n", b" 39\r\n"),
            f"the answer is longer than announced: {DOCUMENT[:-1].decode()}",
        ),
        (answer()[:-1], "the connection was closed in the middle of the answer"),
        (answer()[:20], "the connection was closed in the middle of the answer"),
        (CHUNKED + b"28\r\n" + DOCUMENT + b"\r\n", "the connection was closed in the middle of the answer"),
        (CHUNKED + b"28\r\n" + DOCUMENT[:20], "the connection was closed in the middle of the answer"),
    ],
)
def test_an_answer_whose_end_is_in_doubt_is_malformed(serve: Serve, reply: bytes, message: str) -> None:
    assert_fails(serve(once(reply)), "malformed", message)


def test_an_interim_answer_is_not_taken_for_the_document(serve: Serve) -> None:
    assert_fails(serve(once(b"HTTP/1.1 100 Continue\r\n\r\n" + answer())), "unexpected_status", "100 Continue")


@pytest.mark.parametrize(
    ("head", "filler", "message"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, "the body is over 8 MiB"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8388609\r\n\r\n", b"x" * 65536, "the body is over 8 MiB"),
        (CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", "the body is over 8 MiB"),
        (CHUNKED + b"ffffffff\r\n", b"x" * 65536, "the body is over 8 MiB"),
        (CHUNKED + b"0\r\n", b"X: y\r\n" * 1000, "the tail of the answer is over 32 KiB"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000, "the head of the answer is over 32 KiB"),
        (b"", b"x" * 65536, "the head of the answer is over 32 KiB"),
    ],
    ids=["until-close", "length", "chunks", "chunk", "trailers", "headers", "line"],
)
def test_an_answer_without_end_is_given_up_when_it_is_too_large(
    serve: Serve, head: bytes, filler: bytes, message: str
) -> None:
    server = serve(once(head, then=lambda peer: peer.flood(filler)))

    assert_fails(server, "too_large", message)


@pytest.mark.parametrize(
    ("head", "filler", "most"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n", b"x" * 65536, 1),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, 24),
        (CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", 24),
    ],
    ids=["announced", "until-close", "chunks"],
)
def test_a_gigabyte_takes_a_bounded_part_of_memory(serve: Serve, head: bytes, filler: bytes, most: int) -> None:
    server = serve(once(head, then=lambda peer: peer.flood(filler)))
    with client_of(server) as client:
        error_of(client.fetch)  # imports, buffers
        tracemalloc.start()
        try:
            error = error_of(client.fetch)
            peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()

    assert str(error) == f"GET {server.endpoint}{PATH}: the body is over 8 MiB"
    assert peak_mib < most


def test_what_came_packed_though_nobody_asked_is_never_unpacked(serve: Serve) -> None:
    packed = gzip.compress(DOCUMENT + b" " * 2**26)
    server = serve(always(answer(packed, "200 OK", "Content-Encoding: gzip")))
    with client_of(server) as client:
        assert client.fetch() == packed
    assert "encoding" not in server.requests[0][0].lower()
    with pytest.raises(DocumentError):
        parse_document(packed)


def test_half_an_answer_on_a_connection_closed_in_that_direction_only_is_no_answer(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer()[:-10])
        peer.half_close()
        peer.stall()

    server = serve(play, always(answer()))
    with client_of(server) as client:
        error = error_of(client.fetch)
        assert client.fetch() == DOCUMENT
    message = "the connection was closed in the middle of the answer"
    assert (error.kind, str(error)) == ("malformed", f"GET {server.endpoint}{PATH}: {message}")


RIGHT = [answer(), CHUNKED + b"28\r\n" + DOCUMENT + b"\r\n0\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n" + DOCUMENT]


@settings(deadline=None)
@given(st.sampled_from(RIGHT), st.integers(0, 120), st.integers(0, 20), st.binary(max_size=20))
def test_any_bytes_are_an_answer_or_an_error_of_a_known_kind(
    reply: bytes, start: int, cut: int, put: bytes
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(reply[:start] + put + reply[start + cut :])
        with suppress(_AnswerError, ConnectionError):
            status, body, _ = _Answer(ours, time.monotonic() + PATIENCE).read()
            assert 100 <= status <= 999
            assert isinstance(body, bytes)


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


def test_the_first_answer_may_take_longer_and_later_ones_may_not(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        while peer.request():
            if not peer._server.is_over.wait(0.25):
                peer.send(answer())

    server = serve(play)
    with client_of(server, request_timeout=0.1, first_request_timeout=30.0) as client:
        assert client.fetch() == DOCUMENT
        error = error_of(client.fetch)

    assert str(error) == f"GET {server.endpoint}{PATH}: no whole answer within 0.1 s"


def test_an_empty_first_answer_does_not_use_up_the_longer_limit(serve: Serve) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer(b""))
        peer.request()
        if not peer._server.is_over.wait(0.25):
            peer.send(answer())

    with client_of(serve(play), request_timeout=0.1, first_request_timeout=30.0) as client:
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
        with client_of(endpoint, request_timeout=LIMIT, first_request_timeout=60.0) as client:
            error = error_of(client.fetch)
        for waiting in queue:
            waiting.close()

    assert (error.kind, str(error)) == ("timeout", f"GET {endpoint}{PATH}: no connection within 0.3 s")


# --- connections that go -------------------------------------------------------------------------------------


def test_nobody_at_the_port_is_refused_and_later_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with client_of(endpoint) as client:
        error = error_of(client.fetch)

    assert error.kind == "refused"
    assert str(error) == (
        f"GET {endpoint}{PATH}: connection refused; check imds.endpoint, and that this machine is an Azure VM"
    )


def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    with client_of("http://no-such-host.invalid") as client:
        error = error_of(client.fetch)

    assert error.kind == "unreachable"
    assert str(error).startswith(f"GET http://no-such-host.invalid{PATH}: ")


@pytest.mark.parametrize("end", [lambda _: None, Peer.reset], ids=["closed", "reset"])
def test_a_connection_dropped_while_idle_is_replaced_silently(serve: Serve, end: Script) -> None:
    server = serve(once(answer(), then=end), always(answer()))

    with client_of(server) as client:
        assert client.fetch() == DOCUMENT
        wait_until_dropped(client)
        client.approve(["a"], "1")

    assert (server.connections, [head[:4] for head, _ in server.requests]) == (2, ["GET ", "POST"])


@pytest.mark.parametrize("end", [lambda _: None, Peer.reset], ids=["closed", "reset"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_connection_dropped_instead_of_an_answer_is_replaced_once(
    serve: Serve, end: Script, method: str
) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer())
        peer.request()
        end(peer)

    server = serve(play, always(answer()))
    with client_of(server) as client:
        client.fetch()
        client.fetch() if method == "GET" else client.approve(["a"], "1")

    assert (server.connections, [head.split()[0] for head, _ in server.requests]) == (2, ["GET", method, method])


@pytest.mark.parametrize("end", [lambda _: None, Peer.reset], ids=["closed", "reset"])
def test_a_new_connection_that_gives_no_answer_is_an_error_and_not_tried_again(serve: Serve, end: Script) -> None:
    def play(peer: Peer) -> None:
        peer.request()
        end(peer)

    server = serve(play)
    assert_fails(
        server,
        "unreachable",
        "the connection was closed without an answer; check imds.endpoint, and the route and firewall to it",
    )
    assert server.connections == 1


def test_what_a_server_sends_unasked_is_never_taken_for_an_answer(serve: Serve) -> None:
    stray_is_sent = threading.Event()

    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer())
        peer.send(answer(b'{"stale": 1}'))
        stray_is_sent.set()
        peer.stall()

    server = serve(play, always(answer(b'{"fresh": 1}')))
    with client_of(server) as client:
        try:
            client.fetch()
        except ImdsError as error:  # both may arrive together
            assert error.kind == "malformed"  # noqa: PT017
        assert stray_is_sent.wait(PATIENCE)
        assert client.fetch() == b'{"fresh": 1}'


def test_what_is_left_of_a_late_answer_is_never_taken_for_the_next_one(serve: Serve) -> None:
    gave_up = threading.Event()

    def late(peer: Peer) -> None:
        peer.request()
        gave_up.wait(PATIENCE)
        peer.send(answer(b'{"late": 1}'))
        peer.stall()

    server = serve(late, always(answer()))
    with client_of(server, request_timeout=LIMIT) as client:
        assert error_of(client.fetch).kind == "timeout"
        gave_up.set()
        assert client.fetch() == DOCUMENT


def test_every_failure_leaves_the_client_usable(serve: Serve) -> None:
    failures = [b"junk\r\n\r\n", answer()[:-1], answer(b"", "500 x"), CHUNKED + b"zz\r\n"]
    server = serve(*[once(reply) for reply in failures], always(answer()))

    with client_of(server) as client:
        kinds = [error_of(client.fetch).kind for _ in failures]
        assert client.fetch() == DOCUMENT

    assert kinds == ["malformed", "malformed", "server_error", "malformed"]


def test_closing_from_another_thread_ends_a_request_under_way(serve: Serve) -> None:
    is_asked = threading.Event()

    def play(peer: Peer) -> None:
        peer.request()
        is_asked.set()
        peer.stall()

    server = serve(play)
    with client_of(server) as client:

        def close_when_asked() -> None:
            is_asked.wait(PATIENCE)
            client.close()

        closer = threading.Thread(target=close_when_asked)
        closer.start()
        error = error_of(client.fetch)
        closer.join()
        later = error_of(client.fetch)

    message = "the client is closed; check imds.endpoint, and the route and firewall to it"
    assert str(error) == str(later) == f"GET {server.endpoint}{PATH}: {message}"
    assert error.kind == later.kind == "unreachable"


def wait_until_dropped(client: ImdsClient) -> None:
    connection = client._connection._socket
    assert connection is not None
    connection.settimeout(PATIENCE)
    with suppress(ConnectionError):
        assert connection.recv(1, socket.MSG_PEEK) == b""
