"""How the simulated endpoint misbehaves, seen by a bare http.client."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from scheduled_events_agent.http.errors import parse_date
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.simulator.faults import Fault, FaultKind

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
INSTANCE = "/metadata/instance?api-version=2021-12-13"
METADATA = {"Metadata": "true"}


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1", "vm-2"), rate_limit=None) as simulator:
        yield simulator


def ask(
    simulator: Simulator,
    path: str = EVENTS,
    *,
    vm: str = "",
    method: str = "GET",
    body: str | None = None,
    timeout_seconds: float = 10.0,
) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own."""
    connection = http.client.HTTPConnection(
        simulator.endpoint(vm).removeprefix("http://"), timeout=timeout_seconds
    )
    try:
        connection.request(method, path, body=body, headers=METADATA)
        response = connection.getresponse()
        try:
            return response.status, response.read()
        finally:
            response.close()
    finally:
        connection.close()


def approval_of(event_id: str) -> str:
    return json.dumps({"StartRequests": [{"EventId": event_id}]})


EMPTY_DOCUMENT = (200, b'{"DocumentIncarnation":1,"Events":[]}')


@pytest.mark.parametrize("status", [400, 403, 404, 410, 429, 500, 503])
def test_an_error_status_has_a_json_body(simulator: Simulator, status: int) -> None:
    simulator.fault("vm-1", "status", status=status, count=1)
    answer, body = ask(simulator)

    assert answer == status
    assert list(json.loads(body)) == ["error"]
    assert ask(simulator) == EMPTY_DOCUMENT


def test_a_fault_affects_the_requested_number_of_requests(simulator: Simulator) -> None:
    simulator.fault("vm-1", "empty", count=2)

    assert [ask(simulator)[1] for _ in range(3)] == [b"", b"", EMPTY_DOCUMENT[1]]
    assert [record.fault for record in simulator.requests()] == ["empty", "empty", ""]


def test_a_fault_can_reject_one_api_version(simulator: Simulator) -> None:
    simulator.fault("vm-1", "status", status=404, api_version="2024-07-09")
    newest = EVENTS.replace("2020-07-01", "2024-07-09")

    assert [ask(simulator, path)[0] for path in (newest, EVENTS, newest, INSTANCE)] == [404, 200, 404, 200]
    simulator.clear_faults()
    assert ask(simulator, newest) == EMPTY_DOCUMENT


def test_a_fault_lasts_for_its_duration(simulator: Simulator) -> None:
    began = time.monotonic()
    simulator.fault("vm-1", "empty", seconds=0.3)
    while ask(simulator)[1] == b"":
        assert time.monotonic() - began < 60
    assert time.monotonic() - began >= 0.3


def test_a_fault_can_be_cleared(simulator: Simulator) -> None:
    simulator.fault(None, "empty")
    assert [ask(simulator, vm=vm)[1] for vm in ("vm-1", "vm-2")] == [b"", b""]

    simulator.clear_faults("vm-1")
    assert [ask(simulator, vm=vm)[1] for vm in ("vm-1", "vm-2")] == [EMPTY_DOCUMENT[1], b""]


def test_a_fault_affects_only_its_vm_and_its_kind_of_request(simulator: Simulator) -> None:
    simulator.fault("vm-1", "status", status=500, on="approve")
    event_id = simulator.schedule("Reboot")

    assert ask(simulator)[0] == 200
    assert ask(simulator, INSTANCE)[0] == 200
    assert ask(simulator, method="POST", body=approval_of(event_id))[0] == 500
    assert simulator.event(event_id).approved_at is None
    assert ask(simulator, method="POST", body=approval_of(event_id), vm="vm-2")[0] == 200


def test_an_approval_can_take_effect_although_its_response_is_lost(simulator: Simulator) -> None:
    event_id = simulator.schedule("Reboot")
    simulator.fault("vm-1", "reset", on="approve", count=1, request_is_processed=True)

    with pytest.raises(ConnectionError):
        ask(simulator, method="POST", body=approval_of(event_id))
    assert simulator.wait_approved(event_id).approved_by == "vm-1"
    assert [(record.status, record.approved) for record in simulator.requests()] == [(0, (event_id,))]


def test_a_slow_answer_is_the_right_one_as_of_when_it_is_sent(simulator: Simulator) -> None:
    simulator.fault("vm-1", "slow", count=1, delay_seconds=0.3)
    simulator.schedule("Reboot", notice_seconds=60, lasts_seconds=None)
    began = time.monotonic()
    status, body = ask(simulator)

    assert time.monotonic() - began >= 0.3
    assert (status, len(json.loads(body)["Events"])) == (200, 1)


@pytest.mark.parametrize(("kind", "seconds"), [("clock_ahead", 300.0), ("clock_behind", -300.0)])
def test_an_answer_can_have_the_date_of_a_wrong_clock(
    simulator: Simulator, kind: FaultKind, seconds: float
) -> None:
    simulator.fault("vm-1", kind, count=1, clock_seconds=300.0)
    before = datetime.now(UTC).replace(microsecond=0)
    date = date_of(simulator)
    assert date is not None
    assert before <= date - timedelta(seconds=seconds) <= datetime.now(UTC)
    assert ask(simulator) == EMPTY_DOCUMENT


def test_an_answer_can_have_no_date(simulator: Simulator) -> None:
    simulator.fault("vm-1", "undated", count=1)
    assert date_of(simulator) is None
    assert date_of(simulator) is not None


def date_of(simulator: Simulator) -> datetime | None:
    """The Date of a whole answer that has the right document."""
    answer = httpx.get(f"{simulator.endpoint()}{EVENTS}", headers=METADATA, trust_env=False)
    assert (answer.status_code, answer.content) == EMPTY_DOCUMENT
    return parse_date(answer.headers.get("date", ""))


def test_a_stalled_request_is_read_and_never_answered(simulator: Simulator) -> None:
    simulator.fault("vm-1", "stall", count=1)

    with pytest.raises(TimeoutError):
        ask(simulator, timeout_seconds=0.2)
    assert [(record.status, record.fault) for record in simulator.requests()] == [(0, "stall")]


def test_closing_does_not_wait_for_slow_or_stalled_responses() -> None:
    with Simulator() as simulator, socket.socket() as slow, socket.socket() as stalled:
        simulator.fault("vm-1", "stall", count=1)
        simulator.fault("vm-1", "slow", count=1, delay_seconds=600)
        port = int(simulator.endpoint().rpartition(":")[2])
        for connection in (stalled, slow):
            connection.connect(("127.0.0.1", port))
            connection.sendall(f"GET {EVENTS} HTTP/1.1\r\nMetadata: true\r\n\r\n".encode())
        simulator.wait_until(simulator.requests, "a request was answered")
        began = time.monotonic()
        simulator.close()
        assert time.monotonic() - began < 60  # a tenth of the delay


def test_a_connection_can_be_reset(simulator: Simulator) -> None:
    simulator.fault("vm-1", "reset", count=1)
    with pytest.raises(ConnectionResetError):
        ask(simulator)


def test_a_redirect_names_a_path_that_identifies_its_followers(simulator: Simulator) -> None:
    simulator.fault("vm-1", "redirect", count=1)
    connection = http.client.HTTPConnection(simulator.endpoint().removeprefix("http://"), timeout=60)
    connection.request("GET", EVENTS, headers=METADATA)
    response = connection.getresponse()
    response.read()
    connection.close()

    assert (response.status, response.headers["Location"]) == (302, f"{simulator.endpoint()}/redirected")


def test_a_web_page_and_garbage_come_with_status_200(simulator: Simulator) -> None:
    simulator.fault("vm-1", "html", count=1)
    simulator.fault("vm-1", "garbage", count=1)
    page, garbage = ask(simulator), ask(simulator)

    assert page[0] == 200
    assert page[1].startswith(b"<!DOCTYPE html>")
    assert garbage[0] == 200
    with pytest.raises(ValueError, match="codec can't decode"):
        json.loads(garbage[1])


def test_a_body_can_end_in_the_middle(simulator: Simulator) -> None:
    simulator.schedule("Reboot")
    simulator.fault("vm-1", "truncated", count=1)
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(simulator)
    assert caught.value.partial.startswith(b'{"DocumentIncarnation":2,"Events":[{"EventId":')


def test_an_endless_body_goes_on_until_the_client_has_enough(simulator: Simulator) -> None:
    simulator.fault("vm-1", "endless", count=1)
    connection = http.client.HTTPConnection(simulator.endpoint().removeprefix("http://"), timeout=60)
    connection.request("GET", EVENTS, headers=METADATA)
    response = connection.getresponse()

    assert response.headers.get("Content-Length") is None
    assert len(response.read(5_000_000)) == 5_000_000
    response.close()
    connection.close()


def test_an_answer_can_come_a_byte_at_a_time(simulator: Simulator) -> None:
    simulator.fault("vm-1", "drip", count=1, delay_seconds=0.001)
    began = time.monotonic()

    assert ask(simulator) == EMPTY_DOCUMENT
    assert time.monotonic() - began > 0.1


@pytest.mark.parametrize(("kind", "status"), [("denied", 403), ("misdirected", 421), ("no_rules", 500)])
def test_azures_proxy_answers_without_a_body_and_closes(
    simulator: Simulator, kind: FaultKind, status: int
) -> None:
    simulator.fault("vm-1", kind, count=1)
    answer = httpx.get(f"{simulator.endpoint()}{EVENTS}", headers=METADATA, trust_env=False)

    assert (answer.status_code, answer.content, answer.headers["Connection"]) == (status, b"", "close")
    assert ask(simulator) == EMPTY_DOCUMENT


def test_a_rule_of_azures_proxy_is_about_a_path(simulator: Simulator) -> None:
    event_id = simulator.schedule("Reboot")
    simulator.fault("vm-1", "denied", on="events")
    answers = [ask(simulator)[0], ask(simulator, method="POST", body=approval_of(event_id))[0]]
    assert (answers, ask(simulator, INSTANCE)[0]) == ([403, 403], 200)
    assert simulator.event(event_id).approved_at is None

    simulator.clear_faults()
    simulator.fault("vm-1", "denied", on="instance")
    assert (ask(simulator)[0], ask(simulator, INSTANCE)[0]) == (200, 403)


def test_an_answer_can_have_the_header_of_azures_proxy(simulator: Simulator) -> None:
    simulator.fault("vm-1", "proxied", count=1)
    url = f"{simulator.endpoint()}{EVENTS}"
    first, second = [httpx.get(url, headers=METADATA, trust_env=False) for _ in range(2)]

    assert [first.content, second.content] == [EMPTY_DOCUMENT[1], EMPTY_DOCUMENT[1]]
    assert "x-ms-azure-host-authorization" in first.headers
    assert "x-ms-azure-host-authorization" not in second.headers
    assert simulator.polls() == 2


def test_a_port_can_refuse_connections_and_accept_them_again(simulator: Simulator) -> None:
    for _ in range(2):
        simulator.fault("vm-1", "refused")
        with pytest.raises(ConnectionRefusedError):
            ask(simulator)
        assert ask(simulator, vm="vm-2") == EMPTY_DOCUMENT
        simulator.clear_faults()
        assert ask(simulator) == EMPTY_DOCUMENT


def test_a_port_that_refuses_accepts_again_when_its_time_is_over(simulator: Simulator) -> None:
    began = time.monotonic()
    simulator.fault("vm-1", "refused", seconds=0.3)
    while True:
        assert time.monotonic() - began < 60
        try:
            ask(simulator)
        except ConnectionRefusedError:
            continue
        break
    assert time.monotonic() - began >= 0.3


def test_a_port_can_refuse_from_the_start_and_be_closed_so() -> None:
    simulator = Simulator()
    simulator.fault(None, "refused")
    with simulator, pytest.raises(ConnectionRefusedError):
        ask(simulator)
    with pytest.raises(ConnectionRefusedError):
        ask(simulator)


def test_a_refused_connection_brings_no_request_to_choose() -> None:
    with pytest.raises(ValueError, match="refused has no on, api_version or count"):
        Fault(kind="refused", on="poll")


def test_more_than_five_requests_a_second_to_one_vm_are_throttled() -> None:
    now = [1_782_648_000.0]
    with Simulator(vms=("vm-1", "vm-2"), clock=lambda: now[0]) as simulator:
        statuses = [ask(simulator, path)[0] for path in [EVENTS, INSTANCE, "/nowhere"] * 3]
        assert statuses == [200, 200, 404, 200, 200, 429, 429, 429, 429]
        assert ask(simulator, vm="vm-2")[0] == 200

        now[0] += 0.9
        assert ask(simulator)[0] == 429
        now[0] += 0.1
        assert [ask(simulator)[0] for _ in range(6)] == [200, 200, 200, 200, 200, 429]
