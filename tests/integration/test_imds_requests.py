"""Requests to the metadata service, and how each status and body is understood; no socket is opened."""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from scheduled_events_agent.http.errors import HttpErrorKind
from scheduled_events_agent.imds.client import Identity, ImdsClient, ImdsError
from scheduled_events_agent.imds.document import parse_document
from scheduled_events_agent.imds.guest_proxy import caller

PAYLOADS = Path(__file__).parent.parent / "payloads"
ENDPOINT = "http://127.0.0.1:8080"
DOCUMENTS = f"{ENDPOINT}/metadata/scheduledevents"
URL = f"{DOCUMENTS}?api-version=2020-07-01"
INSTANCE = f"{ENDPOINT}/metadata/instance?api-version=2021-12-13&format=json"
DOCUMENT = b'{"DocumentIncarnation": 1, "Events": []}'
MISSING_HEADER = (
    '400 Bad Request: { "error": "Bad request. Required metadata header not specified" }; check imds.api_version'
)
BAD_API_VERSION = (
    '400 Bad Request: { "error": "Bad request. api-version is invalid or was not specified in the request. '
    'For more information refer to aka.ms/azureimds", '
    '"newest-versions": [ "2025-04-07", "2024-07-17", "2024-03-15" ] }; check imds.api_version'
)
DENIED = (
    f"; a proxy denies it; if it is the VM's Guest Proxy Agent, allow user {caller().user}, "
    f"program {caller().program}, path /metadata/scheduledevents in its rules (docs/metadata-proxy.md)"
)
SOMETHING_ELSE = "; something other than the metadata service answers: check imds.endpoint"


@pytest.fixture
def service() -> Iterator[respx.MockRouter]:
    with respx.mock(using="httpx") as router:
        yield router


def client_of(api_version: str = "2020-07-01") -> ImdsClient:
    return ImdsClient(ENDPOINT, api_version=api_version, request_timeout=10.0, first_request_timeout=120.0)


def error_of(call: Any, *arguments: Any) -> ImdsError:
    with pytest.raises(ImdsError) as caught:
        call(*arguments)
    return caught.value


def skew_after(service: respx.MockRouter, status: int = 200, **headers: str) -> float | None:
    """What a client knows of its clock after an answer about nothing of it, and then this one."""
    route = service.get(DOCUMENTS)
    client = client_of()
    route.respond(content=DOCUMENT, headers={"Date": format_datetime(datetime.now(UTC), usegmt=True)})
    client.fetch()
    assert client.clock_skew_seconds == pytest.approx(0.0, abs=60.0)
    route.respond(status, content=DOCUMENT, headers=headers)
    with contextlib.suppress(ImdsError):
        client.fetch()
    return client.clock_skew_seconds


@pytest.mark.parametrize("minutes", [-20, 20])
def test_the_date_of_a_document_shows_how_wrong_this_clock_is(service: respx.MockRouter, minutes: int) -> None:
    date = format_datetime(datetime.now(UTC) - timedelta(minutes=minutes), usegmt=True)
    assert skew_after(service, Date=date) == pytest.approx(60.0 * minutes, abs=60.0)


@pytest.mark.parametrize("date", ["", "soon", "2026-11-28T13:00:00Z", "Sat, 28 Nov 2026 13:00:00 +0100", "1764"])
def test_an_answer_without_a_usable_date_tells_nothing_of_the_clock(service: respx.MockRouter, date: str) -> None:
    assert skew_after(service, Date=date) is None
    assert skew_after(service) is None


@pytest.mark.parametrize("status", [400, 403, 410, 421, 429, 500, 503])
def test_an_error_says_nothing_about_the_clock(service: respx.MockRouter, status: int) -> None:
    """A proxy on this VM dates what it answers itself by this clock."""
    date = format_datetime(datetime.now(UTC), usegmt=True)
    assert skew_after(service, status, Date=date) is None


# --- the document --------------------------------------------------------------------------------------------


def test_the_document_is_asked_for_with_the_metadata_header(service: respx.MockRouter) -> None:
    route = service.get(DOCUMENTS, params={"api-version": "2020-07-01"}, headers={"Metadata": "true"})
    route.respond(content=DOCUMENT)

    assert client_of().fetch() == DOCUMENT


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            400,
            "48-imds-400-missing-metadata-header.json",
            "bad_request",
            MISSING_HEADER,
        ),
        (
            400,
            "47-imds-400-bad-api-version.json",
            "bad_request",
            BAD_API_VERSION,
        ),
        (401, b"", "denied", f"401 Unauthorized{DENIED}"),
        (403, b"", "denied", f"403 Forbidden{DENIED}"),
        (404, b'{"error": "gone"}', "not_found", '404 Not Found: {"error": "gone"}'),
        (410, b"", "gone", "410 Gone"),
        (429, b"one\r\n\0two", "throttled", "429 Too Many Requests: one \N{REPLACEMENT CHARACTER}two"),
        (500, b'{"Events": []}', "server_error", '500 Internal Server Error: {"Events": []}'),
        (503, b"", "server_error", "503 Service Unavailable"),
        (599, b"", "server_error", "599 (unknown status)"),
        (201, DOCUMENT, "unexpected_status", f"201 Created: {DOCUMENT.decode()}"),
        (204, b"", "unexpected_status", "204 No Content"),
        (302, b"", "redirect", f"302 Found{SOMETHING_ELSE}"),
        (304, b"", "redirect", f"304 Not Modified{SOMETHING_ELSE}"),
    ],
)
def test_every_other_status_is_an_error_that_quotes_its_body(
    service: respx.MockRouter, status: int, body: bytes | str, kind: HttpErrorKind, message: str
) -> None:
    content = (PAYLOADS / body).read_bytes() if isinstance(body, str) else body
    service.get(URL).respond(status, content=content)

    error = error_of(client_of().fetch)
    assert (error.kind, str(error)) == (kind, f"GET {URL}: {message}")


def test_an_empty_body_means_not_ready_yet_and_the_next_request_succeeds(service: respx.MockRouter) -> None:
    empty = (PAYLOADS / "49-empty-body-200.txt").read_bytes()
    service.get(URL).side_effect = [httpx.Response(200, content=empty), httpx.Response(200, content=DOCUMENT)]
    client = client_of()

    error = error_of(client.fetch)
    assert error.kind == "empty"
    assert str(error) == (
        f"GET {URL}: 200 with an empty body; the service is still switching scheduled events on for this VM"
    )
    assert client.fetch() == DOCUMENT


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (httpx.ConnectTimeout("no connection within 10 s"), "timeout"),
        (httpx.ReadTimeout("no whole answer within 10 s"), "timeout"),
        (httpx.WriteTimeout("the request could not be sent in time"), "timeout"),
        (httpx.ConnectError("No route to host"), "unreachable"),
        (httpx.ReadError("Connection reset by peer"), "unreachable"),
        (httpx.RemoteProtocolError("illegal status line"), "malformed"),
    ],
)
def test_every_transport_error_has_a_kind(
    service: respx.MockRouter, fault: httpx.TransportError, kind: HttpErrorKind
) -> None:
    service.get(URL).side_effect = fault

    error = error_of(client_of().fetch)
    assert error.kind == kind
    assert str(fault) in str(error)


@pytest.mark.parametrize(("field", "asked"), [("7", 7.0), ("0", 0.0), ("soon", None), ("-1", None), ("", None)])
def test_the_pause_that_a_429_asks_for_is_read(service: respx.MockRouter, field: str, asked: float | None) -> None:
    service.get(URL).respond(429, headers={"Retry-After": field})

    error = error_of(client_of().fetch)
    assert (error.kind, error.retry_after) == ("throttled", asked)


def test_the_pause_that_a_429_asks_for_may_be_a_date(service: respx.MockRouter) -> None:
    until = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    service.get(URL).respond(429, headers={"Retry-After": until})

    retry_after = error_of(client_of().fetch).retry_after
    assert retry_after is not None
    assert 3000 < retry_after <= 3600


# --- approvals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "api_version"),
    [("50-request-approve-single.json", "2020-07-01"), ("51-request-approve-2017-03-01.json", "2017-03-01")],
)
def test_an_approval_has_the_documented_body(service: respx.MockRouter, payload: str, api_version: str) -> None:
    route = service.post(
        DOCUMENTS,
        params={"api-version": api_version},
        headers={"Metadata": "true", "Content-Type": "application/json"},
    ).respond()

    client_of(api_version).approve(["f020ba2e-3bc0-4c40-a10b-86575a9eabd5"], "5")

    assert json.loads(route.calls.last.request.content) == json.loads((PAYLOADS / payload).read_bytes())


def test_several_events_are_approved_in_one_request(service: respx.MockRouter) -> None:
    route = service.post(URL).respond()

    client_of().approve(["A-1", "b-2"], "5")

    assert json.loads(route.calls.last.request.content) == {
        "StartRequests": [{"EventId": "A-1"}, {"EventId": "b-2"}]
    }


@pytest.mark.parametrize(
    ("status", "kind"), [("400 Bad Request", "bad_request"), ("404 Not Found", "not_found"), ("410 Gone", "gone")]
)
def test_a_rejected_approval_is_reported_with_its_response(
    service: respx.MockRouter, status: str, kind: HttpErrorKind
) -> None:
    service.post(URL).respond(int(status[:3]), content=b'{"error": "no such event"}')

    error = error_of(client_of().approve, ["a"], "1")
    assert (error.kind, str(error)) == (kind, f'POST {URL}: {status}: {{"error": "no such event"}}')


@pytest.mark.parametrize("body", [b"", b"  \r\n", b"{}", b'{"error": null}'])
def test_an_empty_body_or_a_json_object_confirms_an_approval(service: respx.MockRouter, body: bytes) -> None:
    route = service.post(URL).respond(content=body)

    client_of().approve(["a"], "1")

    assert route.call_count == 1


@pytest.mark.parametrize(
    "body", [b"<html>Please sign in</html>", b"[]", b'"ok"', b"null", b"OK", b'{"a":1,"a":2}']
)
def test_nothing_else_confirms_an_approval(service: respx.MockRouter, body: bytes) -> None:
    service.post(URL).respond(content=body)

    error = error_of(client_of().approve, ["a"], "1")
    what = f"200, but neither an empty body nor a JSON object: {body.decode()}"
    assert (error.kind, str(error)) == ("unconfirmed", f"POST {URL}: {what}")


@pytest.mark.parametrize("api_version", ["2020-07-01", "2017-03-01"])
@pytest.mark.parametrize("event_id", [" a ", "a\r\n\x00\u202eb", "é\U0001f600", "x" * 4096, '"\\/'])
def test_an_id_is_sent_back_unchanged(service: respx.MockRouter, event_id: str, api_version: str) -> None:
    route = service.post(DOCUMENTS, params={"api-version": api_version}).respond()
    document = json.dumps({"DocumentIncarnation": 5, "Events": [{"EventId": event_id, "EventType": "Freeze"}]})
    (event,) = parse_document(document.encode()).events

    client_of(api_version).approve([event.approval_id], "5")

    assert json.loads(route.calls.last.request.content)["StartRequests"] == [{"EventId": event_id}]


# --- this VM -------------------------------------------------------------------------------------------------


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
            Identity(name=" vm\ufffd\ufffd[31m\ufffd1 ", vm_id="x" * 4095 + "\ufffd"),
        ),
        ({"compute": {"name": "\u200b", "vmId": " "}}, Identity(name="", vm_id="")),
        ({"compute": {}}, Identity(name="", vm_id="")),
        ({"compute": None}, Identity(name="", vm_id="")),
        ({}, Identity(name="", vm_id="")),
    ],
)
def test_the_identity_is_read_from_the_instance_document(
    service: respx.MockRouter, document: object, identity: Identity
) -> None:
    service.get(INSTANCE).respond(json=document)

    assert client_of().fetch_identity() == identity


@pytest.mark.parametrize(
    ("body", "got"), [(b"", "nothing"), (b"<html>", "<html>"), (b"[]", "[]"), (b"[" * 400, "[" * 220 + "...")]
)
def test_an_invalid_instance_document_is_malformed(service: respx.MockRouter, body: bytes, got: str) -> None:
    service.get(INSTANCE).respond(content=body)

    error = error_of(client_of().fetch_identity)
    assert (error.kind, str(error)) == ("malformed", f"GET {INSTANCE}: expected a JSON object; got {got}")


def test_a_diagnosis_gets_an_answer_of_any_status(service: respx.MockRouter) -> None:
    service.get(INSTANCE).respond(400, headers={"Server": "IMDS"}, content=b"no")

    answer = client_of().probe("instance")

    assert (answer.status, answer.headers["server"], answer.body) == (400, "IMDS", b"no")
    assert answer.error is not None
    assert answer.error.kind == "bad_request"
