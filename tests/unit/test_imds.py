"""What of the edge to the metadata service needs no socket: pauses after failures, and the endpoint."""

import pytest

from agent import AgentError, host
from agent.imds import (
    IMDS_ERROR_KINDS,
    EndpointError,
    ImdsClient,
    ImdsErrorKind,
    backoff_seconds,
    resolve_endpoint,
)

PAUSES: dict[ImdsErrorKind, list[float]] = {
    "throttled": [2, 4, 8, 16, 16, 16],
    "bad_request": [5, 10, 10, 10, 10, 10],
}


@pytest.mark.parametrize("kind", IMDS_ERROR_KINDS)
def test_only_an_answer_that_asks_for_it_makes_polling_slower(kind: ImdsErrorKind) -> None:
    pauses = PAUSES.get(kind, [0.0] * 6)
    assert [backoff_seconds(kind, failures) for failures in range(1, 7)] == pauses
    assert backoff_seconds(kind, 10**9) == pauses[-1]


@pytest.mark.parametrize(
    ("setting", "endpoint"),
    [
        ("http://169.254.169.254", "http://169.254.169.254"),
        ("http://169.254.169.254/", "http://169.254.169.254"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://localhost:1", "http://localhost:1"),
        ("http://imds.example:65535/", "http://imds.example:65535"),
    ],
)
def test_an_endpoint_that_is_set_is_used(setting: str, endpoint: str) -> None:
    assert resolve_endpoint(setting) == endpoint


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "Auto",
        "169.254.169.254",
        "https://169.254.169.254",
        "ftp://169.254.169.254",
        "http://",
        "http://:80",
        "http://a:0",
        "http://a:65536",
        "http://a:b",
        "http://a/metadata",
        "http://a?x",
        "http://user@a",
        "http://[::1]",
        "http://a b",
        "http://a\r\nX: y",
        "http://-a",
        "http://a\n",
    ],
)
def test_what_is_no_endpoint_is_told_with_what_would_be(setting: str) -> None:
    with pytest.raises(EndpointError) as caught:
        resolve_endpoint(setting)

    assert caught.value.kind == "config"
    assert str(caught.value) == (
        "imds.endpoint: expected auto or http://ADDRESS[:PORT] with an IPv4 address or a host name; "
        f'got "{setting}"'
    )


def test_the_client_refuses_what_is_no_endpoint() -> None:
    with pytest.raises(AgentError, match=r'got "auto"$'):
        ImdsClient("auto", api_version="2020-07-01", request_timeout=1.0, first_request_timeout=1.0)


@pytest.mark.parametrize(
    ("option", "endpoint"),
    [
        ("10.0.0.5", "http://10.0.0.5"),
        (None, "http://169.254.169.254"),
        ("168.63.129.16", "http://169.254.169.254"),  # inside a virtual network it is another service
    ],
)
def test_auto_takes_the_address_of_the_dhcp_lease_and_else_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, option: str | None, endpoint: str
) -> None:
    monkeypatch.setattr(host, "dhcp_option_245", lambda: option)

    assert resolve_endpoint("auto") == endpoint
