"""Behaviour that all HTTP clients share: the kinds of their errors, and how a connection is made."""

import socket
import sys
from contextlib import ExitStack
from typing import get_args

import httpx
import pytest
from ports import free_port
from receiver import Receiver

from scheduled_events_agent.http.errors import (
    IMDS_ERROR_KINDS,
    NOTIFICATION_ERROR_KINDS,
    HttpErrorKind,
    HttpFailure,
    TooLargeError,
    classify,
    error_for_status,
)
from scheduled_events_agent.http.transport import BoundedTransport


def not_connected(cause: Exception) -> httpx.ConnectError:
    error = httpx.ConnectError("secret")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (httpx.ConnectTimeout("secret"), "timeout", "no whole answer in time"),
        (httpx.ReadTimeout("secret"), "timeout", "no whole answer in time"),
        (httpx.ConnectError("secret"), "unreachable", "it cannot be reached"),
        (not_connected(ConnectionRefusedError(111, "secret")), "refused", "connection refused"),
        (not_connected(OSError(113, "No route to host")), "unreachable", "No route to host"),
        (not_connected(UnicodeError("secret")), "unreachable", "it cannot be reached"),
        (httpx.ProxyError("407 secret"), "proxy", "the proxy answers 407"),
        (httpx.ProxyError("secret"), "proxy", "the proxy answers with an error"),
        (TooLargeError("the answer is over 1 MiB"), "too_large", "the answer is over 1 MiB"),
        (httpx.ReadError("secret"), "unreachable", "the connection was lost"),
        (httpx.RemoteProtocolError("secret"), "malformed", "not a whole HTTP answer"),
        (httpx.InvalidURL("secret"), "malformed", "not a whole HTTP answer"),
        (ValueError("secret"), "malformed", "not a whole HTTP answer"),
    ],
)  # fmt: skip
def test_each_exception_has_a_kind_and_a_message_without_its_text(
    error: Exception, kind: HttpErrorKind, message: str
) -> None:
    assert classify(error) == HttpFailure(kind, message)


def test_a_status_is_of_the_kind_that_its_service_means_or_of_the_usual_one() -> None:
    own: dict[int, HttpErrorKind] = {400: "rejected", 503: "throttled"}
    usual: dict[int, HttpErrorKind] = {
        301: "redirect",
        404: "not_found",
        418: "unexpected_status",
        429: "throttled",
        500: "server_error",
    }
    for status, kind in {**usual, **own}.items():
        response = httpx.Response(status, headers={"Retry-After": "7"})
        assert error_for_status(response, own) == HttpFailure(kind, f"it answers {status}", 7.0)
    assert error_for_status(httpx.Response(400), {}).kind == "unexpected_status"


def test_each_kind_is_one_of_a_client() -> None:
    assert {*IMDS_ERROR_KINDS, *NOTIFICATION_ERROR_KINDS} == set(get_args(HttpErrorKind))


def status_from(*addresses: tuple[str, int]) -> int:
    """The status of an answer to a request to a name with these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    transport = BoundedTransport(65536)
    with (
        pytest.MonkeyPatch.context() as patch,
        httpx.Client(transport=transport, trust_env=False, timeout=6.0) as client,
    ):
        patch.setattr(socket, "getaddrinfo", lambda *_: found)
        return client.post("http://name.invalid/", json={}).status_code


def test_an_address_that_refuses_is_not_the_last() -> None:
    with Receiver() as receiver:
        alive = ("127.0.0.1", receiver.port)
        assert status_from(("127.0.0.1", free_port()), alive) == 202
        with pytest.raises(httpx.ConnectError) as raised:
            status_from(("127.0.0.1", free_port()), ("127.0.0.1", free_port()))
    assert classify(raised.value).kind == "refused"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses at once what is over the backlog")
def test_an_address_that_does_not_answer_leaves_time_for_the_next() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        stack.enter_context(socket.create_connection(listener.getsockname()))  # takes the only place
        receiver = stack.enter_context(Receiver())
        assert status_from(listener.getsockname(), ("127.0.0.1", receiver.port)) == 202
