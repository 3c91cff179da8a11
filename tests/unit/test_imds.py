"""Parts of the client of the metadata service that need no socket: pauses after failures, and the endpoint."""

import pytest

from scheduled_events_agent import host
from scheduled_events_agent.http.errors import IMDS_ERROR_KINDS, HttpErrorKind
from scheduled_events_agent.imds.client import EndpointError, ImdsBackoff, ImdsError, resolve_endpoint

PAUSES: dict[HttpErrorKind, list[float]] = {
    "throttled": [2, 4, 8, 16, 16, 16],
    "bad_request": [5, 10, 10, 10, 10, 10],
}


def pauses_after(*errors: HttpErrorKind | ImdsError) -> list[float]:
    backoff = ImdsBackoff()
    return [
        backoff.seconds_after(error if isinstance(error, ImdsError) else ImdsError("GET", kind=error))
        for error in errors
    ]


@pytest.mark.parametrize("kind", IMDS_ERROR_KINDS)
def test_only_an_answer_that_asks_for_it_makes_polling_slower(kind: HttpErrorKind) -> None:
    six: list[HttpErrorKind] = [kind] * 6
    assert pauses_after(*six) == PAUSES.get(kind, [0.0] * 6)


def test_only_failures_of_one_kind_in_a_row_increase_the_pause() -> None:
    fails: list[HttpErrorKind] = ["server_error"] * 10
    limited: list[HttpErrorKind] = ["throttled", "throttled", "timeout", "throttled"]
    assert pauses_after(*fails, *limited)[10:] == [2, 4, 0, 2]
    backoff = ImdsBackoff()
    error = ImdsError("GET", kind="throttled")
    assert [backoff.seconds_after(error), backoff.seconds_after(error)] == [2, 4]
    backoff.reset()
    assert backoff.seconds_after(error) == 2


@pytest.mark.parametrize(("asked", "pause"), [(0, 1), (1, 1), (7, 7), (3600, 16)])
def test_a_429_that_names_a_pause_gets_it_within_1_to_16_s(asked: float, pause: float) -> None:
    error = ImdsError("GET", kind="throttled", retry_after=asked)
    assert pauses_after(error, error, "throttled") == [pause, pause, 8]
    assert pauses_after(ImdsError("GET", kind="server_error", retry_after=asked)) == [0]


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
        "http://999.1.1.1",
        "http://01.1.1.1",
        "http://a..b",
        "http://xn--a",
        "http://xn--9aa",
        f"http://a.{'b' * 64}",
    ],
)
def test_an_invalid_endpoint_is_reported_with_a_valid_one(setting: str) -> None:
    with pytest.raises(EndpointError) as caught:
        resolve_endpoint(setting)

    assert caught.value.kind == "config"
    assert str(caught.value) == (
        "imds.endpoint: expected auto or http://ADDRESS[:PORT] with an IPv4 address or a host name; "
        f'got "{setting}"'
    )


@pytest.mark.parametrize(
    ("option", "endpoint"),
    [
        ("10.0.0.5", "http://10.0.0.5"),
        (None, "http://169.254.169.254"),
        ("168.63.129.16", "http://169.254.169.254"),  # inside a virtual network it is another service
    ],
)
def test_auto_uses_the_address_of_the_dhcp_lease_or_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, option: str | None, endpoint: str
) -> None:
    monkeypatch.setattr(host, "dhcp_option_245", lambda: option)

    assert resolve_endpoint("auto") == endpoint
