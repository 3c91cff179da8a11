"""The web server over real sockets: what it serves, what it rejects, and which clients it does not wait for."""

import http.client
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import Any

import pytest

from scheduled_events_agent import __version__
from scheduled_events_agent.web import server as web
from scheduled_events_agent.web.server import Response, Routes, WebError, WebServer

STRANGE_NAME = (
    "the Host header is not a name of this server: use its address, or add the name to agent.listen_names\n"
)
NOT_FOUND = "no such page; there are: /healthz /metrics /slow\n"


class Slow:
    """A page that answers when the test lets it."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.may_answer = threading.Event()

    def __call__(self) -> Response:
        self.entered.release()
        assert self.may_answer.wait(120.0)
        return Response(HTTPStatus.OK, b"slow\n")


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def server(slow: Slow) -> Iterator[WebServer]:
    pages: Routes = {
        "/healthz": lambda: Response(HTTPStatus.SERVICE_UNAVAILABLE, b"no poll has succeeded\n"),
        "/metrics": lambda: Response(HTTPStatus.OK, b"# metrics\n", "text/plain; version=0.0.4; charset=utf-8"),
        "/slow": slow,
    }
    server = WebServer("127.0.0.1:0", pages)
    yield server
    slow.may_answer.set()
    server.close()


def ask(server: WebServer, method: str, path: str, **options: Any) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, **options)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def say(server: WebServer, text: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes as they are; all that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(text)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        try:
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass  # it closed with some of our bytes unread
        return b"".join(parts)


def test_a_response_has_status_type_and_length(server: WebServer) -> None:
    answer, body = ask(server, "GET", "/metrics")
    assert (answer.status, body) == (200, "# metrics\n")
    headers = dict(answer.getheaders())
    del headers["Date"]
    assert headers == {
        "Server": f"scheduled-events-agent/{__version__}",
        "Content-Type": "text/plain; version=0.0.4; charset=utf-8",
        "Content-Length": "10",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }


def test_an_endpoint_may_return_an_error_status(server: WebServer) -> None:
    answer, body = ask(server, "GET", "/healthz")
    assert (answer.status, body) == (503, "no poll has succeeded\n")


def test_a_query_does_not_matter(server: WebServer) -> None:
    answer, body = ask(server, "GET", "/metrics?name[]=up")
    assert (answer.status, body) == (200, "# metrics\n")


def test_head_has_the_headers_and_no_body(server: WebServer) -> None:
    answer, body = ask(server, "HEAD", "/metrics")
    assert (answer.status, answer.getheader("Content-Length"), body) == (200, "10", "")


@pytest.mark.parametrize("path", ["/", "/nothing", "/metrics/", "/../etc/passwd", "/%2e%2e"])
def test_any_other_path_lists_the_existing_endpoints(server: WebServer, path: str) -> None:
    answer, body = ask(server, "GET", path)
    assert (answer.status, body) == (404, NOT_FOUND)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_read_methods_are_allowed(server: WebServer, method: str) -> None:
    answer, body = ask(server, method, "/metrics", body=b"x")
    assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")
    assert body == "only GET and HEAD: nothing can be changed here\n"


def test_a_slow_endpoint_does_not_block_another_one(server: WebServer, slow: Slow) -> None:
    waiting = threading.Thread(target=ask, args=(server, "GET", "/slow"))
    waiting.start()
    assert slow.entered.acquire(timeout=60)
    answer, _ = ask(server, "GET", "/metrics")
    assert answer.status == 200
    slow.may_answer.set()
    waiting.join()


def test_a_client_that_sends_half_a_request_does_not_block_another_one(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 600.0)
    with ExitStack() as stack:
        for text in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"):
            mute = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            mute.sendall(text)
        began = time.monotonic()
        answer, _ = ask(server, "GET", "/metrics")
        assert answer.status == 200
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("text", [b"", b"x"], ids=["nothing", "a byte now and then"])
def test_a_client_that_never_completes_its_request_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 0.5)
    server = WebServer("127.0.0.1:0", {})
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        while time.monotonic() - began < 60:
            try:
                connection.sendall(text)
                if connection.recv(100) == b"":
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
    assert 0.4 < time.monotonic() - began < 60
    server.close()


def test_a_client_that_closes_its_side_after_asking_gets_its_answer(server: WebServer) -> None:
    answer = say(server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", half_close=True)
    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n# metrics\n")


def test_a_client_that_disconnects_during_the_response_is_ignored(
    server: WebServer, slow: Slow, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # reset at close
            connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert slow.entered.acquire(timeout=60)
    slow.may_answer.set()
    answer, _ = ask(server, "GET", "/metrics")
    assert answer.status == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 431 "),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", b"HTTP/1.0 431 "),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
        (b"nonsense\r\n\r\n", b""),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b""),  # a TLS greeting
        (b"GET /metrics HTTP/9.9\r\n\r\n", b""),
    ],
)
def test_oversized_or_invalid_requests_are_rejected_and_the_server_continues(
    server: WebServer, text: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = say(server, text)
    if status:
        assert answer.startswith(status) or answer == b""  # it may be reset while we still send
    assert b"200" not in answer[:20]
    assert ask(server, "GET", "/metrics")[0].status == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\n\n", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nX:" + b" \t" * 7000 + b"\r\n\r\n", 200),
        (b"GET http://localhost/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET //metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics\x00 HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics x HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost : evil.example\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nnonsense\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: y\rHost: evil.example\r\n\r\n", 421),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n evil.example\r\n\r\n", 421),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"BREW /metrics HTTP/1.1\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\n\r\n", 405),
    ],
)
def test_a_request_is_read_exactly_or_rejected_with_one_response(
    server: WebServer, text: bytes, status: int
) -> None:
    answer = say(server, text)
    assert answer.startswith(b"HTTP/1.0 %d " % status)
    assert answer.count(b"HTTP/1.0") == 1
    assert b"\r\nX-Content-Type-Options: nosniff\r\n" in answer


def test_it_listens_on_ipv6_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = WebServer("[::1]:0", {"/x": lambda: Response(HTTPStatus.OK, b"x\n")})
    try:
        connection = http.client.HTTPConnection("::1", server.port, timeout=10)
        connection.request("GET", "/x")
        assert connection.getresponse().read() == b"x\n"
        connection.close()
    finally:
        server.close()


def what_the_system_says_of(address: tuple[str, int]) -> str:
    """Why nothing can be bound there, in the system's own words."""
    with socket.socket() as probe:
        try:
            probe.bind(address)
        except OSError as error:
            return str(error.strerror)
    pytest.fail(f"{address} can be bound")


def test_a_port_in_use_is_reported_with_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        reason = what_the_system_says_of(("127.0.0.1", port))
        with pytest.raises(WebError) as caught:
            WebServer(f"127.0.0.1:{port}", {})
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: {reason}; set agent.listen to a free ADDRESS:PORT, or to off"
    )
    assert caught.value.kind == "listen"


def test_a_foreign_address_is_reported_with_a_hint() -> None:
    reason = what_the_system_says_of(("192.0.2.1", 9769))
    with pytest.raises(WebError) as caught:
        WebServer("192.0.2.1:9769", {})
    assert str(caught.value) == (
        f"cannot listen on 192.0.2.1:9769: {reason}; set agent.listen to a free ADDRESS:PORT, or to off"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit for descriptors")
def test_a_socket_that_the_system_refuses_is_reported_as_well() -> None:
    """As where the kernel has no IPv6 and the address is [::1]."""
    if sys.platform != "win32":
        import resource

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(WebError, match=r"^cannot listen on 127\.0\.0\.1:0: Too many open files; "):
                WebServer("127.0.0.1:0", {})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_close_is_prompt_and_leaves_neither_a_thread_nor_the_port() -> None:
    before = set(threading.enumerate())
    server = WebServer("127.0.0.1:0", {"/x": lambda: Response(HTTPStatus.OK, b"x\n")})
    port = server.port
    assert ask(server, "GET", "/x")[1] == "x\n"
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 60
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    WebServer(f"127.0.0.1:{port}", {}).close()


def test_close_does_not_wait_for_clients_that_hang() -> None:
    slow = Slow()
    server = WebServer("127.0.0.1:0", {"/slow": slow})
    with ExitStack() as stack:
        # All places are taken, and one more waits outside.
        for _ in range(8 + 1):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(8):
            assert slow.entered.acquire(timeout=60)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 60  # they would never have been answered
        slow.may_answer.set()


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]"])
def test_closing_a_server_on_every_address_works_as_well(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    connect = socket.create_connection

    def connect_as_windows(to: tuple[str, int], timeout: float) -> socket.socket:
        if to[0] in ("0.0.0.0", "::"):
            raise OSError(10049, "The requested address is not valid in its context")
        return connect(to, timeout)

    monkeypatch.setattr(socket, "create_connection", connect_as_windows)
    before = set(threading.enumerate())
    try:
        server = WebServer(f"{address}:0", {})
    except WebError:
        pytest.skip("this machine has no IPv6")
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 60
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= before


def come(server: WebServer, source: str) -> socket.socket:
    """A client that comes from another address, and says nothing yet."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=(source, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 at once")
def test_one_address_that_occupies_every_slot_slowly_blocks_no_other_one(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 60.0)
    with ExitStack() as stack:
        crowd = [stack.enter_context(come(server, "127.0.0.66")) for _ in range(web._MAX_CLIENTS)]
        for client in crowd:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        # The last place is cleared for the next client.
        wait_until(lambda: len(server._clients) >= web._MAX_CLIENTS - 1)
        began = time.monotonic()
        for _ in range(5):
            with come(server, "127.0.0.1") as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.0 200 ")
        # The first had to wait for one of the crowd to have been there for a moment; none for a time limit.
        assert time.monotonic() - began < 60


def test_an_active_client_is_served_beside_many_silent_ones(server: WebServer) -> None:
    with ExitStack() as stack:
        for _ in range(2 * web._MAX_CLIENTS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(b"GET /met")
        assert ask(server, "GET", "/metrics")[0].status == 200


def test_a_thousand_mute_connections_do_not_keep_a_probe_waiting(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 600.0)
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        assert ask(server, "GET", "/healthz")[0].status == 503
        assert len(server._clients) <= web._MAX_CLIENTS
    # A second where nothing else runs; waiting for the first time limit takes ten minutes.
    assert time.monotonic() - began < 300


def test_there_are_at_most_so_many_threads_however_many_clients_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_MAX_CLIENTS", 4)
    monkeypatch.setattr(web, "_MAX_THREADS", 8)
    before = set(threading.enumerate())
    server = WebServer("127.0.0.1:0", {"/x": lambda: Response(HTTPStatus.OK, b"x\n")})
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)).sendall(b"GET /")
            assert len(set(threading.enumerate()) - before) <= 1 + 8
        assert ask(server, "GET", "/x")[1] == "x\n"
    server.close()


def test_without_a_thread_every_client_gets_503(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert [ask(server, "GET", "/healthz")[0].status for _ in range(3)] == [503] * 3


def test_probes_are_answered_while_two_hundred_clients_send_a_byte_a_second(server: WebServer) -> None:
    is_over = threading.Event()

    def drip(clients: list[socket.socket]) -> None:
        while not is_over.wait(1.0):
            for number, client in enumerate(clients):
                try:
                    client.sendall(b"x")
                except OSError:
                    client.close()
                    clients[number] = socket.create_connection(("127.0.0.1", server.port), timeout=60)
                    clients[number].sendall(b"GET /metrics HTTP/1.1\r\nX: ")

    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(200)]
    crowd = threading.Thread(target=drip, args=(clients,))
    crowd.start()
    try:
        took = []
        for _ in range(20):
            began = time.monotonic()
            assert ask(server, "GET", "/healthz")[0].status == 503
            took.append(time.monotonic() - began)
            time.sleep(0.1)  # between two probes
        assert statistics.median(took) < 1.0, took
    finally:
        is_over.set()
        crowd.join()
        for client in clients:
            client.close()


@pytest.mark.nightly
def test_connections_that_come_again_at_once_do_not_keep_a_probe_waiting(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_MAX_CLIENTS", 16)
    is_over = threading.Event()

    def come_again() -> None:
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(b"GET /met")
                client.recv(1)

    crowd = [threading.Thread(target=come_again) for _ in range(60)]
    for thread in crowd:
        thread.start()
    try:
        wait_until(lambda: len(server._clients) == web._MAX_CLIENTS)
        assert [ask(server, "GET", "/healthz")[0].status for _ in range(10)] == [503] * 10
    finally:
        is_over.set()
        server.close()
        for thread in crowd:
            thread.join()


def test_a_client_that_reads_its_response_slowly_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_ANSWER_SECONDS", 1.0)
    server = WebServer("127.0.0.1:0", {"/big": lambda: Response(HTTPStatus.OK, b"x" * 64 * 1024 * 1024)})
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        wait_until(lambda: server._clients)
        wait_until(lambda: not server._clients)  # though a byte now and then is taken
    server.close()


def wait_until(test: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9769", 200),
        ("10.1.2.3", 200),  # a proxy may pass on the address that it was asked at
        ("[::1]:9769", 200),
        ("[::1]", 200),
        ("localhost", 200),
        ("LocalHost.:9769", 200),
        ("vm.localhost", 200),
        (socket.gethostname(), 200),
        ("status.example.com", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:9769", 421),
        ("", 421),
        ("[evil.example]", 421),
        ("127.0.0.1@evil.example", 421),
    ],
)
def test_a_browser_with_an_untrusted_host_name_gets_nothing(host: str, status: int) -> None:
    server = WebServer(
        "127.0.0.1:0", {"/status": lambda: Response(HTTPStatus.OK, b"{}")}, names=("Status.example.com",)
    )
    try:
        answer, body = ask(server, "GET", "/status", headers={"Host": host})
        assert answer.status == status
        assert body == ("{}" if status == 200 else STRANGE_NAME)
    finally:
        server.close()


def test_a_probe_with_an_untrusted_host_name_gets_only_the_status(server: WebServer) -> None:
    answer, body = ask(server, "GET", "/healthz", headers={"Host": "evil.example"})
    assert (answer.status, body) == (503, "no\n")


def test_one_untrusted_host_name_among_others_is_enough(server: WebServer) -> None:
    told = say(server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert told.startswith(b"HTTP/1.0 421 ")


def test_a_server_on_a_public_address_accepts_any_host_name() -> None:
    server = WebServer("0.0.0.0:0", {"/status": lambda: Response(HTTPStatus.OK, b"{}")})
    try:
        assert ask(server, "GET", "/status", headers={"Host": "vm.example.com"})[0].status == 200
    finally:
        server.close()


def test_a_bug_in_an_endpoint_is_reported_to_the_client() -> None:
    def page() -> Response:
        raise RuntimeError("a bug")

    server = WebServer("127.0.0.1:0", {"/x": page})
    try:
        answer, body = ask(server, "GET", "/x")
        assert (answer.status, body) == (500, "a bug in the agent: RuntimeError('a bug')\n")
    finally:
        server.close()
