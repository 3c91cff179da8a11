"""Answers of the simulated endpoint as a bare http.client sees them."""

import base64
import http.client
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from scheduled_events_agent.simulator import Simulator, SimulatorError, VirtualMachine
from scheduled_events_agent.simulator.azure import EVENTS_VERSIONS
from scheduled_events_agent.simulator.protocol import INSTANCE_VERSIONS

PAYLOADS = Path(__file__).parent.parent / "payloads"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
METADATA = {"Metadata": "true"}


class Client:
    """A client on one connection to one VM's port."""

    def __init__(self, simulator: Simulator, vm: str = "") -> None:
        self._connection = http.client.HTTPConnection(simulator.endpoint(vm).removeprefix("http://"), timeout=60)

    def ask(
        self,
        path: str = EVENTS,
        *,
        method: str = "GET",
        body: str | None = None,
        headers: dict[str, str] = METADATA,
    ) -> tuple[int, Any]:
        """Status and body, as JSON if it is some."""
        self._connection.request(method, path, body=body, headers=headers)
        response = self._connection.getresponse()
        text = response.read()
        is_json = "json" in response.headers.get("Content-Type", "")
        return response.status, json.loads(text) if is_json else text

    def events(self, version: str = "2020-07-01") -> list[dict[str, Any]]:
        status, document = self.ask(f"/metadata/scheduledevents?api-version={version}")
        assert status == 200
        events: list[dict[str, Any]] = document["Events"]
        return events

    def approve(self, *ids: str, version: str = "2020-07-01", **more: Any) -> tuple[int, Any]:
        body = json.dumps({**more, "StartRequests": [{"EventId": event_id} for event_id in ids]})
        return self.ask(f"/metadata/scheduledevents?api-version={version}", method="POST", body=body)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1", "vm-2"), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def client(simulator: Simulator) -> Iterator[Client]:
    client = Client(simulator)
    yield client
    client.close()


# Requests that the service rejects


def test_a_request_without_the_metadata_header_gets_the_real_error(client: Client) -> None:
    expected = json.loads((PAYLOADS / "48-imds-400-missing-metadata-header.json").read_text())
    assert client.ask(headers={}) == (400, expected)
    assert client.ask(headers={"Metadata": "false"}) == (400, expected)
    assert client.ask("/metadata/instance?api-version=2021-12-13", headers={}) == (400, expected)


def test_the_value_of_the_metadata_header_may_be_in_any_case(client: Client) -> None:
    assert client.ask(headers={"metadata": "True"})[0] == 200


@pytest.mark.parametrize("query", ["", "?api-version=", "?api-version=2021-12-13", "?api-version={latest}"])
def test_an_unknown_api_version_is_rejected_as_by_azure_with_the_known_ones(client: Client, query: str) -> None:
    expected = json.loads((PAYLOADS / "47-imds-400-bad-api-version.json").read_text())
    expected["newest-versions"] = ["2024-07-09", "2020-07-01", "2019-08-01"]
    assert client.ask(f"/metadata/scheduledevents{query}") == (400, expected)


@pytest.mark.parametrize("query", ["", "?api-version=2020-07-01"])
def test_an_unknown_api_version_of_the_instance_gets_the_real_error(client: Client, query: str) -> None:
    expected = json.loads((PAYLOADS / "47-imds-400-bad-api-version.json").read_text())
    assert client.ask(f"/metadata/instance{query}") == (400, expected)


def test_a_forwarded_request_is_rejected(client: Client) -> None:
    status, body = client.ask(headers={**METADATA, "X-Forwarded-For": "10.0.0.1"})
    assert (status, body) == (400, {"error": "Bad request. Requests must not carry an X-Forwarded-For header"})


def test_the_service_lists_its_versions_to_a_client_that_names_none(client: Client) -> None:
    status, answer = client.ask("/metadata/versions")
    assert (status, list(answer)) == (200, ["apiVersions"])
    assert answer["apiVersions"] == sorted({*EVENTS_VERSIONS, *INSTANCE_VERSIONS})
    assert client.ask("/metadata/versions", headers={})[0] == 400
    assert client.ask("/metadata/versions", method="POST", body="{}")[0] == 405


def test_other_paths_and_methods_do_not_exist(client: Client) -> None:
    assert client.ask("/metadata/attested/document") == (404, {"error": "Not Found"})
    assert client.ask(method="PUT", body="{}") == (405, {"error": "Method Not Allowed"})


def test_a_vm_gets_tokens_for_its_own_identity_alone(client: Client) -> None:
    path = "/metadata/identity/oauth2/token?api-version=2018-02-01"
    resource = f"{path}&resource=https%3A%2F%2Fstorage.azure.com"
    status, token = client.ask(resource)
    assert (status, token["resource"], token["token_type"]) == (200, "https://storage.azure.com", "Bearer")
    claims = json.loads(base64.urlsafe_b64decode(token["access_token"].split(".")[1] + "=="))
    assert (claims["aud"], str(claims["exp"])) == (token["resource"], token["expires_on"])
    assert client.ask(f"{resource}&client_id={token['client_id']}")[0] == 200
    other = "00000000-0000-0000-0000-000000000001"
    refused = {"error": "invalid_request", "error_description": "Identity not found"}
    assert client.ask(f"{resource}&client_id={other}") == (400, refused)
    assert client.ask(path)[0] == 400
    assert client.ask("/metadata/identity/oauth2/token?resource=x")[0] == 400
    assert client.ask(resource, headers={})[0] == 400
    assert client.ask(resource, method="POST", body="{}")[0] == 405


def test_invalid_http_is_rejected(simulator: Simulator) -> None:
    connection = http.client.HTTPConnection(simulator.endpoint().removeprefix("http://"), timeout=60)
    connection.connect()
    connection.sock.sendall(b"nonsense\r\n\r\n")
    with connection.sock.makefile("rb") as stream:
        assert stream.readline() == b"HTTP/1.1 400 Bad Request\r\n"
        assert stream.read().endswith(b"Bad request syntax ('nonsense')")
    connection.close()


# Documents


def test_the_first_document_is_that_of_azure(client: Client) -> None:
    assert client.ask() == (200, json.loads((PAYLOADS / "01-empty-first-document.json").read_text()))


def test_a_users_reboot_matches_a_real_one_on_azure(simulator: Simulator, client: Client) -> None:
    captured = json.loads((PAYLOADS / "12-reboot-user-no-duration.json").read_text())["Events"][0]
    simulator.schedule("Reboot", source="User")
    event = client.events("2019-08-01")[0]

    assert list(event) == list(captured)
    different = {"EventId", "NotBefore", "Resources"}
    assert {key: event[key] for key in event.keys() - different} == {
        key: captured[key] for key in captured.keys() - different
    }


def test_ids_are_upper_case_guids_and_dates_are_rfc_1123(simulator: Simulator, client: Client) -> None:
    simulator.schedule("Reboot")
    event = client.events()[0]

    assert re.fullmatch(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", event["EventId"])
    assert re.fullmatch(
        r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", event["NotBefore"]
    )


def test_all_vms_of_a_set_see_the_events_of_all(simulator: Simulator, client: Client) -> None:
    simulator.schedule("Reboot", vms=["vm-2"])
    simulator.schedule("Freeze", vms=["vm-1", "vm-2"])
    other = Client(simulator, "vm-2")

    assert client.ask() == other.ask()
    assert [event["Resources"] for event in client.events()] == [["vm-2"], ["vm-1", "vm-2"]]
    other.close()


def test_old_versions_show_less(simulator: Simulator, client: Client) -> None:
    simulator.schedule("Preempt")
    simulator.schedule("Terminate")
    simulator.schedule("Freeze")

    shown = {
        version: [(event["EventType"], event["Resources"][0], len(event)) for event in client.events(version)]
        for version in ("2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01")
    }
    assert shown == {
        "2017-03-01": [("Freeze", "_vm-1", 6)],
        "2017-08-01": [("Freeze", "vm-1", 6)],
        "2017-11-01": [("Preempt", "vm-1", 6), ("Freeze", "vm-1", 6)],
        "2019-01-01": [("Preempt", "vm-1", 6), ("Terminate", "vm-1", 6), ("Freeze", "vm-1", 6)],
        "2019-04-01": [("Preempt", "vm-1", 7), ("Terminate", "vm-1", 7), ("Freeze", "vm-1", 7)],
        "2019-08-01": [("Preempt", "vm-1", 8), ("Terminate", "vm-1", 8), ("Freeze", "vm-1", 8)],
    }


def test_not_before_is_right_in_real_time_at_any_speed() -> None:
    with Simulator(speed=60) as simulator:
        event = simulator.schedule("Reboot", notice_seconds=15 * 60)
        client = Client(simulator)
        not_before_at = parsedate_to_datetime(client.events()[0]["NotBefore"])
        assert 14 < (not_before_at - simulator.event(event).scheduled_at).total_seconds() <= 16
        client.close()


def test_a_started_event_has_a_blank_not_before(simulator: Simulator, client: Client) -> None:
    event_id = simulator.schedule("Redeploy", begins_started=True)
    event = client.events()[0]

    assert (event["EventId"], event["EventStatus"], event["NotBefore"]) == (event_id, "Started", "")


# The instance


def test_the_instance_endpoint_returns_only_strings() -> None:
    machine = VirtualMachine(name="web_0", vm_id="5c08b38e-4d57-4c23-ac45-aca61037f084", scale_set="web")
    with Simulator(vms=(machine,)) as simulator:
        client = Client(simulator)
        status, instance = client.ask("/metadata/instance?api-version=2021-12-13")
        compute = client.ask("/metadata/instance/compute?api-version=2021-12-13")[1]
        client.close()

    assert status == 200
    assert instance["compute"] == compute
    assert (compute["name"], compute["vmId"]) == ("web_0", "5c08b38e-4d57-4c23-ac45-aca61037f084")
    assert compute["vmScaleSetName"] == "web"
    assert {type(value) for key, value in compute.items() if key not in ("osProfile", "tagsList")} == {str}
    assert compute["osProfile"]["computerName"] == "web0000000"


def test_a_single_value_of_the_instance_is_text(client: Client) -> None:
    path = "/metadata/instance/compute/name?api-version=2021-12-13"
    assert client.ask(f"{path}&format=text") == (200, b"vm-1")
    assert client.ask(path)[0] == 400
    assert client.ask("/metadata/instance/compute/shoesize?api-version=2021-12-13&format=text")[0] == 404


def test_each_vm_has_its_own_lasting_id(simulator: Simulator) -> None:
    first, again, other = simulator.vms["vm-1"].id, VirtualMachine(name="vm-1").id, simulator.vms["vm-2"].id
    assert first == again
    assert first != other


# Approvals


def test_an_approval_gets_200_without_a_body_and_starts_the_event(simulator: Simulator, client: Client) -> None:
    event_id = simulator.schedule("Reboot", start_delay_seconds=0.05, lasts_seconds=0.05)

    assert client.approve(event_id) == (200, b"")
    assert simulator.wait_started(event_id).approved_by == "vm-1"
    assert simulator.wait_gone(event_id).outcome == "completed"
    assert client.events() == []


def test_several_ids_can_be_approved_at_once(simulator: Simulator, client: Client) -> None:
    ids = [
        simulator.schedule("Reboot", start_delay_seconds=0),
        simulator.schedule("Freeze", start_delay_seconds=0),
    ]

    assert client.approve(*ids)[0] == 200
    assert [event["EventStatus"] for event in client.events()] == ["Started", "Started"]
    assert [record.approved for record in simulator.approvals()] == [tuple(ids)]


def test_an_approval_counts_for_all_vms_of_the_event_and_may_be_repeated(
    simulator: Simulator, client: Client
) -> None:
    event_id = simulator.schedule("Reboot", vms=["vm-1", "vm-2"], start_delay_seconds=60)
    other = Client(simulator, "vm-2")

    assert other.approve(event_id.lower())[0] == 200
    assert client.approve(event_id)[0] == 200
    assert simulator.event(event_id).approved_by == "vm-2"
    assert [record.vm for record in simulator.approvals(event_id)] == ["vm-2", "vm-1"]
    other.close()


def test_an_unknown_id_is_rejected_and_nothing_of_that_request_is_approved(
    simulator: Simulator, client: Client
) -> None:
    event_id = simulator.schedule("Reboot")

    assert client.approve(event_id, "nonsense") == (400, {"error": "Bad request. There is no event nonsense"})
    assert simulator.event(event_id).approved_at is None
    assert simulator.approvals() == ()


def test_the_id_of_an_event_that_is_gone_is_rejected(simulator: Simulator, client: Client) -> None:
    event_id = simulator.schedule("Reboot")
    simulator.cancel(event_id)

    assert client.approve(event_id) == (400, {"error": f"Bad request. There is no event {event_id}"})


def test_after_a_change_of_id_only_the_new_one_is_known(simulator: Simulator, client: Client) -> None:
    old_id = simulator.schedule("Reboot", new_id_at_start=True)
    simulator.start_event(old_id)
    new_id = client.events()[0]["EventId"]

    assert new_id != old_id
    assert client.approve(old_id)[0] == 400
    assert client.approve(new_id)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"StartRequests": []}',
        '{"StartRequests": [{}]}',
        '{"StartRequests": [{"EventId": 1}]}',
    ],
)
def test_an_invalid_approval_is_rejected(client: Client, body: str) -> None:
    status, answer = client.ask(method="POST", body=body)
    assert status == 400
    assert answer["error"].startswith("Bad request. ")


def test_the_first_preview_wants_the_incarnation_as_a_number_or_a_string(
    simulator: Simulator, client: Client
) -> None:
    refusal = (400, {"error": "Bad request. DocumentIncarnation must be given"})
    for given in ({}, {"DocumentIncarnation": None}, {"DocumentIncarnation": True}):
        event_id = simulator.schedule("Reboot")
        assert client.approve(event_id, version="2017-03-01", **given) == refusal
    for number in (2, "2"):
        event_id = simulator.schedule("Reboot")
        assert client.approve(event_id, version="2017-03-01", DocumentIncarnation=number) == (200, b"")
        assert simulator.event(event_id).approved_by == "vm-1"


def test_an_approval_without_an_effect_is_accepted_and_not_recorded_as_one(
    simulator: Simulator, client: Client
) -> None:
    pending, started = simulator.schedule("Reboot", start_delay_seconds=60), simulator.schedule("Freeze")
    simulator.start_event(started)
    for ids in ((pending, started), (pending,)):
        assert client.approve(*ids) == (200, b"")

    first, second = simulator.approvals()
    assert (first.accepted, first.approved) == ((pending, started), (pending,))
    assert (second.accepted, second.approved) == ((pending,), ())


def test_an_approval_may_come_in_chunks(simulator: Simulator) -> None:
    event_id = simulator.schedule("Reboot")
    body = json.dumps({"StartRequests": [{"EventId": event_id}]}).encode()
    connection = http.client.HTTPConnection(simulator.endpoint().removeprefix("http://"), timeout=60)
    for _ in range(2):  # the connection is good for another request
        connection.request("POST", EVENTS, iter([body[:9], body[9:]]), METADATA, encode_chunked=True)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
    connection.close()
    assert [record.body for record in simulator.requests()] == [body.decode()] * 2
    assert simulator.event(event_id).approved_by == "vm-1"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Transfer-Encoding: gzip", b"\r\n"),
        ("Transfer-Encoding: chunked", b"-1\r\n"),
        ("Transfer-Encoding: chunked", b"100001\r\n"),
        ("Transfer-Encoding: chunked", b"80000\r\n" + b" " * 0x80000 + b"\r\n80001\r\n"),
        ("Content-Length: -1", b""),
        ("Content-Length: 1048577", b""),
        ("Content-Length: ten", b""),
    ],
)
def test_a_body_of_no_length_or_a_huge_one_is_rejected(simulator: Simulator, headers: str, body: bytes) -> None:
    address = ("127.0.0.1", int(simulator.endpoint().rpartition(":")[2]))
    with socket.create_connection(address, timeout=60) as connection, connection.makefile("rb") as stream:
        connection.sendall(f"POST {EVENTS} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
        answer = stream.read()
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b"expected a body with its Content-Length, or in chunks, of at most 1 MiB")


# The connection


def test_a_connection_is_kept_alive_and_an_unchanged_document_is_the_same_bytes(
    simulator: Simulator, client: Client
) -> None:
    simulator.schedule("Reboot")
    assert client.ask() == client.ask()
    client.approve("nonsense")
    client.ask()
    other = Client(simulator)
    other.ask()
    other.close()

    assert [record.connection for record in simulator.requests()] == [1, 1, 1, 1, 2]


def test_a_client_may_ask_for_the_connection_to_be_closed(simulator: Simulator) -> None:
    connection = http.client.HTTPConnection(simulator.endpoint().removeprefix("http://"), timeout=60)
    connection.connect()
    with connection.sock.makefile("rb") as stream:
        connection.sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert stream.read().startswith(b"HTTP/1.1 400 Bad Request\r\n")
    connection.close()


def test_nothing_is_left_behind_when_clients_are_still_connected() -> None:
    before = set(threading.enumerate())
    with Simulator(vms=("vm-1", "vm-2")) as simulator:
        clients = [Client(simulator, vm) for vm in ("vm-1", "vm-2", "vm-2")]
        for client in clients:
            client.ask()
    left = set(threading.enumerate()) - before
    for client in clients:
        client.close()
    assert left == set()


def test_the_ports_of_several_vms_follow_the_first_one() -> None:
    with Simulator() as probe:
        port = int(probe.endpoint().rpartition(":")[2])
    with Simulator(port=port) as simulator:
        assert simulator.endpoint() == f"http://127.0.0.1:{port}"
        with pytest.raises(SimulatorError) as caught:
            Simulator(port=port)
    assert str(caught.value).startswith(f"cannot listen on 127.0.0.1:{port} for vm-1: ")


def test_it_listens_on_the_address_that_is_given() -> None:
    bind = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # elsewhere 127.0.0.1 may be all of loopback
    with Simulator(bind=bind) as simulator:
        assert (simulator.is_open, simulator.endpoint().rpartition(":")[0]) == (False, f"http://{bind}")
        client = Client(simulator)
        assert client.ask()[0] == 200
        client.close()
    with pytest.raises(SimulatorError) as caught:
        Simulator(bind="localhost")
    assert str(caught.value) == (
        'expected an address of this machine such as 127.0.0.1 or 0.0.0.0; got "localhost"'
    )


# The record


def test_every_request_is_recorded_with_its_response(simulator: Simulator, client: Client) -> None:
    event_id = simulator.schedule("Reboot")
    began, began_at = time.monotonic(), datetime.now(UTC)
    client.ask()
    client.approve(event_id)
    client.ask("/nowhere")
    poll, approval, wrong = simulator.requests("vm-1")

    assert (poll.vm, poll.method, poll.path, poll.status, poll.fault) == ("vm-1", "GET", EVENTS, 200, "")
    assert poll.headers["metadata"] == "true"
    assert (approval.method, approval.status, approval.approved) == ("POST", 200, (event_id,))
    assert json.loads(approval.body) == {"StartRequests": [{"EventId": event_id}]}
    assert (wrong.path, wrong.status) == ("/nowhere", 404)
    assert began <= poll.monotonic <= approval.monotonic <= wrong.monotonic <= time.monotonic()
    assert began_at <= poll.at <= datetime.now(UTC)
    assert simulator.requests() == (poll, approval, wrong)
    assert simulator.requests("vm-2") == ()


def test_requests_can_be_written_to_a_file_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with Simulator(requests_file=path) as simulator:
        client = Client(simulator)
        event_id = simulator.schedule("Reboot")
        client.ask()
        client.approve(event_id)
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # while it is running
        client.close()

    assert [(line["vm"], line["method"], line["status"], line["approved"]) for line in lines] == [
        ("vm-1", "GET", 200, []),
        ("vm-1", "POST", 200, [event_id]),
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no file that is always full")
def test_requests_are_answered_though_they_cannot_be_written() -> None:
    with Simulator(requests_file=Path("/dev/full")) as simulator:
        client = Client(simulator)
        assert [client.ask()[0] for _ in range(2)] == [200, 200]
        client.close()
        written = [entry.text for entry in simulator.history() if entry.kind == "skipped"]
    assert written == ["requests are no longer written: No space left on device"]


def test_a_request_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError) as caught:
        Simulator(requests_file=tmp_path)
    assert str(caught.value).startswith(f"cannot write requests to {tmp_path}: ")
