"""The fleet's table against a server on loopback that fails in every way: all of it is a BackendError."""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from ports import free_port

from scheduled_events_agent import host
from scheduled_events_agent.cli import check, main
from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.daemon.policy_reader import machine_warnings
from scheduled_events_agent.fleet import backend as fleet_backend
from scheduled_events_agent.fleet import table as table_module
from scheduled_events_agent.fleet.backend import BackendError
from scheduled_events_agent.fleet.credentials import ManagedIdentityCredential, read_sas, sas_warnings
from scheduled_events_agent.fleet.table import TableBackend, connect
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings
from scheduled_events_agent.simulator.table import SimulatedTable

CHECKOUT = Path(__file__).parents[2]
SAS = "sv=2019-02-02&sig=SECRET"
AUDIENCE = "https://storage.azure.com"
NO_IMDS = "http://127.0.0.1:9"
EMPTY_LIST = b'{"value": []}'


def answer(status: str, body: bytes = b"", headers: str = "Content-Type: application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def error(status: str, code: str, headers: str = "Content-Type: application/json") -> bytes:
    body = f'{{"odata.error": {{"code": "{code}", "message": {{"lang": "en-US", "value": "no"}}}}}}'
    return answer(status, body.encode(), headers)


def _is_whole(request: bytes) -> bool:
    head, end, body = request.lower().partition(b"\r\n\r\n")
    length = re.search(rb"content-length: ([0-9]+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


class Server:
    """Answers with ``answers``, and each further request with ``answer``; None: not at all."""

    def __init__(self) -> None:
        self.answer: bytes | None = answer("200 OK", EMPTY_LIST)
        self.answers: list[bytes] = []
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._ended.is_set():
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(60)
            data = b""
            while not _is_whole(data) and (piece := connection.recv(65536)):
                data += piece
            self.requests.append(data)
            wire = self.answers.pop(0) if self.answers else self.answer
            if wire is None:
                self._ended.wait(60)
            else:
                with suppress(OSError):  # it may have left
                    connection.sendall(wire)

    def close(self) -> None:
        self._ended.set()
        socket.create_connection(self._listener.getsockname(), 60).close()
        for thread in self._threads:
            thread.join(60)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def sas_file(tmp_path: Path) -> Path:
    file = tmp_path / "sas"
    file.write_text(f"{SAS}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def table(server: Server, sas_file: Path) -> TableBackend:
    credential = FleetCredential(sas_file=str(sas_file))
    settings = FleetSettings(table=f"{server.url}/devstore/abc", credential=credential)
    return connect(settings, "web", NO_IMDS)


def error_of(table: TableBackend) -> BackendError:
    with pytest.raises(BackendError) as caught:
        table.list()
    assert "sig=" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None), "they have the URL of the request"
    return caught.value


@pytest.mark.parametrize(
    ("wire", "kind", "words"),
    [
        (error("503 Busy", "ServerBusy"), "throttled", "answers 503 (ServerBusy): it is busy"),
        (error("429 Busy", "TooManyRequests"), "throttled", "answers 429 (TooManyRequests)"),
        (error("500 Error", "OperationTimedOut"), "timeout", "answers 500 (OperationTimedOut)"),
        (answer("502 Bad Gateway", b"<html>", "Content-Type: text/html"), "timeout", "answers 502"),
        (error("403 Forbidden", "AuthenticationFailed"), "denied", "the shared access signature in "),
        (error("403 Forbidden", "AuthorizationFailure"), "denied", "the network rules of the storage account"),
        (error("403 Forbidden", "KeyBasedAuthenticationNotPermitted"), "denied", "use the identity of this VM"),
        (error("404 Not Found", "TableNotFound"), "not_found", "there is no table abc: create it, or"),
        (error("409 Conflict", "TableBeingDeleted"), "not_found", "there is no table abc: create it, or"),
        (answer("404 Not Found", b"<html>", "Content-Type: text/html"), "not_found", "no table abc: create it"),
        (error("400 Bad Request", "InvalidInput"), "bad_response", "answers 400 (InvalidInput)"),
        (answer("302 Found", b"", "Location: http://127.0.0.1:1/"), "bad_response", "answers 302"),
        (answer("200 OK", b"<html>", "Content-Type: text/html"), "bad_response", "does not come from a table"),
        (answer("200 OK", b"{"), "bad_response", "does not come from a table"),
        (answer("200 OK", b"[" * 100_000), "bad_response", "does not come from a table"),
        (answer("200 OK", b'{"value": [1]}'), "bad_response", "does not come from a table"),
        (answer("200 OK", b'{"value": {"RowKey": "a"}}'), "bad_response", "does not come from a table"),
        (
            answer("200 OK", b'{"value": [{"RowKey": "a", "RowKey": "b"}]}'),
            "bad_response",
            "does not come from a table",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9000000000\r\n\r\n" + b" " * 9_000_000,
            "bad_response",
            "over 8 MiB",
        ),
        (b"\x00\x01 no HTTP\r\n\r\n", "bad_response", "not a whole HTTP answer"),
        (b"", "unreachable", "the connection was lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "bad_response", "not a whole HTTP answer"),
    ],
)
def test_an_answer_that_is_no_list_is_an_error(
    server: Server, table: TableBackend, wire: bytes, kind: str, words: str
) -> None:
    server.answer = wire
    failed = error_of(table)
    assert (failed.kind, words in str(failed)) == (kind, True), str(failed)
    assert len(server.requests) == 1, "it is not asked again here"


def test_a_throttling_service_sets_the_retry_pause(server: Server, table: TableBackend) -> None:
    server.answer = error("503 Busy", "ServerBusy", "Content-Type: application/json\r\nRetry-After: 7")
    assert error_of(table).retry_after == 7.0
    server.answer = error("503 Busy", "ServerBusy", "Content-Type: application/json\r\nRetry-After: -7")
    assert error_of(table).retry_after == 0.0


@pytest.mark.parametrize("after", ["301", "999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_the_retry_pause_is_at_most_five_minutes(server: Server, table: TableBackend, after: str) -> None:
    server.answer = error("503 Busy", "ServerBusy", f"Content-Type: application/json\r\nRetry-After: {after}")
    assert error_of(table).retry_after == 300.0


def test_a_server_that_says_nothing_is_given_up(
    server: Server, sas_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_EXCHANGE_SECONDS", 0.2)
    server.answer = None
    settings = FleetSettings(table=f"{server.url}/abc", credential=FleetCredential(sas_file=str(sas_file)))
    assert error_of(connect(settings, "web", NO_IMDS)).kind == "timeout"


def listed(*entities: dict[str, object], headers: str = "Content-Type: application/json") -> bytes:
    return answer("200 OK", json.dumps({"value": entities}).encode(), headers)


def entity(key: str, **fields: object) -> dict[str, object]:
    return {"odata.etag": f'W/"{key}"', "PartitionKey": "fleet|web", "RowKey": key, **fields}


def test_only_string_fields_of_a_record_are_read(server: Server, table: TableBackend) -> None:
    number_as_text = {"i@odata.type": "Edm.Int64", "i": "7"}
    server.answer = listed(
        entity("b", n=1, f=0.5, s="x", none=None, **number_as_text),
        entity("a", Timestamp="2026-03-02T12:00:00Z", empty=""),
        {"odata.etag": "3", "RowKey": 7},
        {"odata.etag": "4"},
        {"RowKey": "c"},
        {"odata.etag": "5\r\nX: y", "RowKey": "d"},
        {"odata.etag": "\u20ac", "RowKey": "e"},
    )
    assert [(record.key, record.etag, record.fields) for record in table.list()] == [
        ("b", 'W/"b"', {"s": "x"}),
        ("a", 'W/"a"', {"empty": ""}),
    ]


@pytest.mark.parametrize("fields", [{"vm": "x" * 5000}, {f"field_{number}": "" for number in range(600)}])
def test_contents_that_no_agent_writes_are_not_kept(
    server: Server, table: TableBackend, fields: dict[str, str]
) -> None:
    server.answer = listed(entity("a", state="ready", **fields), entity("b", state="ready", vm="x" * 80))
    assert [set(record.fields) for record in table.list()] == [set(), {"state", "vm"}]


@pytest.mark.parametrize(
    ("timestamp", "date", "age"),
    [
        ("2026-03-02T12:00:00Z", "Mon, 02 Mar 2026 12:01:30 GMT", 90.0),
        ("2026-03-02T12:00:00.2500000Z", "Mon, 02 Mar 2026 12:01:30 GMT", 89.75),
        ("2026-03-02T12:00:00.7500000Z", "Mon, 02 Mar 2026 12:00:00 GMT", 0.0),
        ("2026-03-02T12:00:00Z", None, None),
        ("2026-03-02T12:00:00Z", "soon", None),
        ("2026-03-02T12:00:00Z", "Mon, 02 Mar 2026 12:01:30 -0000", None),
        ("2026-03-02T12:00:00", "Mon, 02 Mar 2026 12:01:30 GMT", None),
        ("soon", "Mon, 02 Mar 2026 12:01:30 GMT", None),
        (7, "Mon, 02 Mar 2026 12:01:30 GMT", None),
        (None, "Mon, 02 Mar 2026 12:01:30 GMT", None),
    ],
)
def test_a_record_is_as_old_as_the_services_clock_says(
    server: Server, table: TableBackend, timestamp: object, date: str | None, age: float | None
) -> None:
    headers = "Content-Type: application/json" if date is None else f"Date: {date}"
    fields = {} if timestamp is None else {"Timestamp": timestamp}
    server.answer = listed(entity("a", **fields), headers=headers)
    assert [record.age for record in table.list()] == [age]


def test_the_clock_of_this_machine_is_compared_with_the_services(server: Server, table: TableBackend) -> None:
    table.list()
    assert table.clock_skew_seconds is None
    server.answer = error("403 Forbidden", "AuthenticationFailed", "Date: Mon, 02 Mar 2026 12:00:00 GMT")
    error_of(table)
    assert table.clock_skew_seconds is not None
    expected = (datetime.now(UTC) - datetime(2026, 3, 2, 12, tzinfo=UTC)).total_seconds()
    assert 0 <= expected - table.clock_skew_seconds < 300


def test_pages_follow_each_other_each_with_its_own_date(server: Server, table: TableBackend) -> None:
    more = "x-ms-continuation-NextPartitionKey: fleet|web\r\nx-ms-continuation-NextRowKey: b&c"
    first = f"Date: Mon, 02 Mar 2026 12:00:10 GMT\r\n{more}"
    server.answers = [
        listed(entity("a", Timestamp="2026-03-02T12:00:00Z"), headers=first),
        listed(entity("b", Timestamp="2026-03-02T12:00:00Z"), headers="Date: Mon, 02 Mar 2026 12:00:20 GMT"),
    ]
    assert [(record.key, record.age) for record in table.list()] == [("a", 10.0), ("b", 20.0)]
    assert len(server.requests) == 2
    query = parse_qs(urlsplit(server.requests[1].split()[1].decode()).query)
    assert (query["NextPartitionKey"], query["NextRowKey"]) == (["fleet|web"], ["b&c"])


MORE = "x-ms-continuation-NextPartitionKey: p\r\nx-ms-continuation-NextRowKey: k"


def test_pages_without_an_end_are_given_up(
    server: Server, table: TableBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_backend, "MAX_RECORDS", 5)
    server.answer = listed(entity("a"), headers=MORE)
    assert "more than 5 records" in str(error_of(table))
    assert len(server.requests) == 6


def test_empty_pages_without_an_end_are_given_up(
    server: Server, table: TableBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_LIST_SECONDS", 0.2)
    server.answer = listed(headers=MORE)
    failed = error_of(table)
    assert (failed.kind, str(failed)) == ("timeout", "no whole list within 0.2 s")


@pytest.mark.parametrize(("count", "is_rejected"), [(2000, False), (2001, True)])
def test_a_group_has_at_most_two_thousand_records(
    server: Server, table: TableBackend, count: int, is_rejected: bool
) -> None:
    server.answer = listed(*(entity(f"{number:04}") for number in range(count)))
    if is_rejected:
        failed = error_of(table)
        assert (failed.kind, str(failed)) == ("bad_response", "more than 2,000 records: fleet|web")
    else:
        assert len(table.list()) == count


def test_ten_thousand_records_of_vms_that_are_gone_keep_no_group_from_going_on(
    server: Server, table: TableBackend
) -> None:
    written = "2026-03-02T12:00:00Z"
    pages = [
        [entity(f"{page}-{number}", Timestamp=written, state="not_ready") for number in range(1000)]
        for page in range(10)
    ]
    date = "Date: Tue, 03 Mar 2026 12:00:01 GMT"
    server.answers = [listed(*page, headers=f"{date}\r\n{MORE}") for page in pages]
    server.answer = listed(entity("young", Timestamp="2026-03-03T12:00:00Z"), headers=date)
    records = table.list()
    assert [record.key for record in records if not record.is_old] == ["young"]
    assert len(records) == 2001
    assert len(server.requests) == 11


def test_a_record_is_created_replaced_and_deleted_as_the_service_wants_it(
    server: Server, table: TableBackend
) -> None:
    server.answer = answer("204 No Content", headers='ETag: W/"1"')
    assert table.put("k|vm_1", {"a": "\u20ac"}, "") == 'W/"1"'
    assert table.put("k|vm_1", {"a": "b"}, 'W/"0"') == 'W/"1"'
    assert table.delete("k|vm_1", 'W/"1"') is True
    create, update, delete = (request.decode().split("\r\n") for request in server.requests)
    record_path = "/devstore/abc(PartitionKey='fleet%7Cweb',RowKey='k%7Cvm_1')"
    assert create[0] == f"POST /devstore/abc?{SAS} HTTP/1.1"
    assert update[0] == f"PUT {record_path}?{SAS} HTTP/1.1"
    assert delete[0] == f"DELETE {record_path}?{SAS} HTTP/1.1"
    conditions = [[line for line in lines if line.startswith("If-")] for lines in (create, update, delete)]
    assert conditions == [[], ['If-Match: W/"0"'], ['If-Match: W/"1"']]
    assert json.loads(create[-1]) == {"PartitionKey": "fleet|web", "RowKey": "k|vm_1", "a": "\u20ac"}
    assert json.loads(update[-1]) == {"a": "b"}
    for lines in (create, update, delete):
        assert {"x-ms-version: 2020-12-06", "Accept: application/json;odata=minimalmetadata"} <= set(lines)


def test_a_quote_in_a_key_of_another_program_is_doubled(server: Server, table: TableBackend) -> None:
    server.answer = answer("204 No Content")
    assert table.delete("o'brien", "1") is True
    assert b",RowKey='o%27%27brien')" in server.requests[0]


def test_a_write_distinguishes_a_changed_record_from_a_missing_one(server: Server, table: TableBackend) -> None:
    for code in ("UpdateConditionNotSatisfied", "ConditionNotMet"):
        server.answer = error("412 Failed", code)
        assert table.put("k", {"a": "b"}, "1") is None
        assert table.delete("k", "1") is False
    server.answer = error("409 Conflict", "EntityAlreadyExists")
    assert table.put("k", {"a": "b"}, "") is None
    server.answer = error("404 Not Found", "ResourceNotFound")
    assert table.put("k", {"a": "b"}, "1") is None
    assert table.delete("k", "1") is True


@pytest.mark.parametrize(
    ("wire", "kind", "words"),
    [
        (error("409 Conflict", "TableBeingDeleted"), "not_found", "answers 409 (TableBeingDeleted): there is no"),
        (error("404 Not Found", "TableNotFound"), "not_found", "there is no table abc"),
        (answer("412 Failed", b"<html>"), "bad_response", "answers 412: not the answer of a table"),
        (answer("200 OK", b"<html>", 'ETag: "1"'), "bad_response", "answers 200: not the answer of a table"),
        (error("503 Busy", "ServerBusy"), "throttled", "it is busy"),
        (b"", "unreachable", "the connection was lost"),
    ],
)
def test_a_write_that_failed_is_an_error(
    server: Server, table: TableBackend, wire: bytes, kind: str, words: str
) -> None:
    server.answer = wire
    writes: tuple[Callable[[], object], ...] = (
        lambda: table.put("k", {"a": "b"}, ""),
        lambda: table.put("k", {"a": "b"}, "1"),
        lambda: table.delete("k", "1"),
    )
    for write in writes:
        with pytest.raises(BackendError) as caught:
            write()
        assert (caught.value.kind, words in str(caught.value)) == (kind, True), str(caught.value)


def test_a_write_without_its_new_etag_is_an_error(server: Server, table: TableBackend) -> None:
    server.answer = answer("204 No Content")
    with pytest.raises(BackendError, match="answers 204 without an ETag"):
        table.put("k", {"a": "b"}, "")
    assert table.delete("k", "1") is True


def test_each_request_is_counted_with_its_answer_or_error(server: Server, sas_file: Path) -> None:
    counted: list[tuple[str, int | str]] = []
    settings = FleetSettings(table=f"{server.url}/abc", credential=FleetCredential(sas_file=str(sas_file)))
    table = connect(settings, "web", NO_IMDS, lambda method, status, _: counted.append((method, status)))
    table.list()
    server.answer = b""
    error_of(table)
    server.answer = error("412 Failed", "UpdateConditionNotSatisfied")
    table.delete("k", "1")
    sas_file.unlink()
    with pytest.raises(BackendError, match="cannot be read"):
        table.list()
    assert counted == [("GET", 200), ("GET", "unreachable"), ("DELETE", 412)]


@pytest.mark.parametrize(
    ("group", "part"), [("Web_1.a", "web_1.a"), ("W\u00e4b", sha256("W\u00e4b".encode()).hexdigest())]
)
def test_a_group_has_a_partition_of_its_own(server: Server, sas_file: Path, group: str, part: str) -> None:
    settings = FleetSettings(table=f"{server.url}/abc", credential=FleetCredential(sas_file=str(sas_file)))
    connect(settings, group, NO_IMDS).list()
    connect(settings, group, NO_IMDS, partition="doctor").list()
    queries = [parse_qs(urlsplit(request.split()[1].decode()).query) for request in server.requests]
    wanted = [f"PartitionKey eq '{name}|{part}'" for name in ("fleet", "doctor")]
    assert [query["$filter"] for query in queries] == [[text] for text in wanted]


def test_the_environments_proxy_is_not_used(
    server: Server, table: TableBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "web", NO_IMDS)
    assert table.list() == []
    assert b"SECRET" in server.requests[0]


def test_the_policys_proxy_is_used(server: Server, sas_file: Path) -> None:
    credential = FleetCredential(sas_file=str(sas_file))
    settings = FleetSettings(table="http://127.0.0.1:9/abc", credential=credential, proxy=server.url)
    assert connect(settings, "web", NO_IMDS).list() == []
    assert server.requests[0].startswith(b"GET http://127.0.0.1:9/abc()?")


def test_a_proxy_of_the_environment_that_cannot_be_used_is_no_request(
    server: Server, sas_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:9")
    credential = FleetCredential(sas_file=str(sas_file))
    settings = FleetSettings(table=f"{server.url}/abc", credential=credential, proxy="environment")
    counted: list[str] = []
    failed = error_of(connect(settings, "web", NO_IMDS, lambda method, *_: counted.append(method)))
    assert (failed.kind, counted, server.requests) == ("setup", [], [])
    assert str(failed) == "the table cannot be asked: proxy: expected http://HOST:PORT"


def test_a_table_without_a_listener_is_unavailable(sas_file: Path) -> None:
    port = free_port()
    settings = FleetSettings(
        table=f"http://127.0.0.1:{port}/abc", credential=FleetCredential(sas_file=str(sas_file))
    )
    failed = error_of(connect(settings, "web", NO_IMDS))
    assert failed.kind == "unreachable"


def test_a_token_is_never_sent_unencrypted() -> None:
    with pytest.raises(BackendError, match="a token is sent over HTTPS only") as caught:
        connect(FleetSettings(table="http://127.0.0.1:10002/abc"), "web", NO_IMDS)
    assert caught.value.kind == "setup"


@pytest.mark.parametrize(
    ("wire", "kind", "words"),
    [
        (answer("400 Bad", b'{"error":"invalid_request","error_description":"Identity not found"}'), "denied",
         "Identity not found"),
        (answer("404 Not Found"), "denied", "this VM has no managed identity, or several: assign one"),
        (answer("403 Forbidden"), "denied", "if it is the VM's Guest Proxy Agent, allow user "),
        (answer("421 Misdirected"), "throttled", "it answers 421"),
        (answer("429 Too Many", b"{}"), "throttled", "it answers 429"),
        (answer("410 Gone", b"{}"), "throttled", "it answers 410"),
        (answer("408 Timeout", b"{}"), "throttled", "it answers 408"),
        (answer("500 Error", b"{}"), "throttled", "it answers 500"),
        (answer("200 OK", b'{"access_token": "a\\nb", "expires_on": "1"}'), "bad_response", "holds no token"),
        (answer("200 OK", b'{"access_token": "a", "expires_on": "Infinity"}'), "bad_response", "holds no token"),
        (answer("200 OK", b'{"access_token": 1, "expires_on": "1"}'), "bad_response", "holds no token"),
        (answer("200 OK", b"[]"), "bad_response", "holds no token"),
        (answer("200 OK", b"[" * 100_000), "bad_response", "holds no token"),
        (b"", "unreachable", "gives no token"),
        (None, "timeout", "gives no token within 0.3 s"),
    ],
)  # fmt: skip
def test_a_token_that_cannot_be_fetched_is_an_error(
    server: Server, wire: bytes | None, kind: str, words: str
) -> None:
    server.answer = wire
    with pytest.raises(BackendError) as caught:
        ManagedIdentityCredential(server.url, None, AUDIENCE, 0.3 if wire is None else 60.0).fetch_token()
    assert (caught.value.kind, words in str(caught.value)) == (kind, True), str(caught.value)


def token(text: str, ends_in: float = 86400.0) -> bytes:
    body = {"access_token": text, "expires_on": f"{time.time() + ends_in:.0f}"}
    return answer("200 OK", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("account", "audience"),
    [
        ("https://acme.table.core.windows.net", "https://storage.azure.com"),
        ("https://acme.table.core.usgovcloudapi.net", "https://storage.azure.us"),
        ("https://acme.table.core.chinacloudapi.cn", "https://storage.azure.cn"),
        ("https://usgovcloudapi.net.example", "https://storage.azure.com"),
    ],
)
def test_a_token_is_for_the_accounts_cloud_whatever_the_server_asks_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, account: str, audience: str
) -> None:
    sent: list[str] = []

    def refuse(*request: Any) -> httpx.Response:
        sent.append(request[3]["Authorization"])
        challenge = "Bearer authorization_uri=https://a.example/t scope=https://vault.azure.net/.default"
        return httpx.Response(401, headers={"WWW-Authenticate": challenge})

    monkeypatch.setattr(table_module, "_exchange", refuse)
    server.answers = [token("OLD"), token("NEW")]
    failed = error_of(connect(FleetSettings(table=f"{account}/abc"), "web", server.url))
    assert (failed.kind, sent) == ("denied", ["Bearer OLD", "Bearer NEW"])
    targets = [urlsplit(request.split()[1].decode()) for request in server.requests]
    assert [target.path for target in targets] == ["/metadata/identity/oauth2/token"] * 2
    assert [parse_qs(target.query)["resource"] for target in targets] == [[audience]] * 2


def test_a_rejected_token_is_replaced_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    done = httpx.Response(200, json={"value": []})
    answers = [httpx.Response(401), done, done]
    monkeypatch.setattr(table_module, "_exchange", lambda *_: answers.pop(0))
    server.answer = token("TOKEN")
    table = connect(FleetSettings(table="https://a.example/abc"), "web", server.url)
    assert (table.list(), table.list()) == ([], [])
    assert len(server.requests) == 2


@pytest.mark.parametrize(("ends_in", "fetched"), [(3600.0, 1), (290.0, 3)])
def test_a_token_is_kept_until_five_minutes_before_its_end(server: Server, ends_in: float, fetched: int) -> None:
    server.answer = token("TOKEN", ends_in)
    credential = ManagedIdentityCredential(server.url, None, AUDIENCE, 60.0)
    assert [credential.fetch_token() for _ in range(3)] == ["TOKEN"] * 3
    assert len(server.requests) == fetched


CLIENT_ID = "b7d5a9f0-6c1e-4a57-9a55-0d4f7b6f0a11"
ROLE = (
    'assign the role "Storage Table Data Contributor" to it, at the scope of the table abc or its storage account'
)
RULES = "the network rules of the storage account do not let this VM in, or "


@pytest.mark.parametrize(
    ("client_id", "code", "way"),
    [
        (None, "AuthorizationPermissionMismatch", f"the identity of this VM may not use it: {ROLE}"),
        (CLIENT_ID, "AuthorizationPermissionMismatch", f"the identity {CLIENT_ID} may not use it: {ROLE}"),
        (None, "AuthorizationFailure", f"{RULES}the identity of this VM may not use it: {ROLE}"),
    ],
)
def test_a_role_that_is_missing_is_named_with_its_scope(
    server: Server, monkeypatch: pytest.MonkeyPatch, client_id: str | None, code: str, way: str
) -> None:
    refusal = httpx.Response(403, json={"odata.error": {"code": code}})
    monkeypatch.setattr(table_module, "_exchange", lambda *_: refusal)
    server.answer = token("TOKEN")
    credential = FleetCredential(client_id=client_id) if client_id else FleetSettings(table="").credential
    failed = error_of(
        connect(FleetSettings(table="https://acme.example/abc", credential=credential), "web", server.url)
    )
    assert (failed.kind, str(failed)) == ("denied", f"https://acme.example answers 403 ({code}): {way}")


@pytest.mark.parametrize("text", ["", "sv=1", "sig=1", "sv=1&sig=1 2", "sv=1\nsig=2", "key"])
def test_an_invalid_signature_is_rejected_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sas"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BackendError, match="does not hold a shared access signature") as caught:
        read_sas(file)
    assert str(caught.value).startswith(f"{file} does not hold")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'"sv=1&sig=SECRET"', "has quotes around the signature: take them out"),
        ("sv=1&sig=SECRET".encode("utf-16"), "write it without a byte order mark"),
        (b"\xef\xbb\xbfsv=1&sig=SECRET", "write it without a byte order mark"),
    ],
)
def test_a_signature_as_a_tool_wrote_it_is_rejected_with_a_hint(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "sas"
    file.write_bytes(content)
    with pytest.raises(BackendError, match=words) as caught:
        read_sas(file)
    assert "SECRET" not in str(caught.value)


def test_a_signature_outside_a_regular_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot be read"):
        read_sas(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("se=2026-03-31T00%3A00Z&sp=raud", []),
        ("se=2026-03-04&sp=raud", ["expires soon, at 2026-03-04 00:00:00 UTC: write a new one into the file"]),
        ("se=2026-03-02T11:59Z", ["has expired, at 2026-03-02 11:59:00 UTC: write a new one into the file"]),
        (
            "se=2026-03-02T11:59%2B02:00",
            ["has expired, at 2026-03-02 09:59:00 UTC: write a new one into the file"],
        ),
        ("se=never&sp=ra", ["does not allow what the agent does: update, delete"]),
        ("si=policy", []),
    ],
)
def test_problems_inside_a_signature_are_reported(tmp_path: Path, fields: str, expected: list[str]) -> None:
    file = tmp_path / "sas"
    file.write_text(f"sv=2020-04-08&{fields}&sig=SECRET", encoding="utf-8")
    told = list(sas_warnings(file, datetime(2026, 3, 2, 12, tzinfo=UTC)))
    assert told == [f"the signature in {file} {words}" for words in expected]


def test_check_warns_of_a_signature_that_expires(sas_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sas_file.write_text("sv=1&se=2020-01-01T00:00Z&sig=SECRET", encoding="utf-8")
    policy = sas_file.with_name("policy.yaml")
    fleet = {"group": "web", "table": "https://a.example/abc", "max_events": 1}
    fleet |= {"credential": {"sas_file": str(sas_file)}}
    policy.write_text(f"rules: []\nfleet: {json.dumps(fleet)}\n", encoding="utf-8")
    assert main(["check", "--config", str(policy)]) == 0
    told = capsys.readouterr().out
    assert "policy.yaml:2: warning: fleet.credential.sas_file: the signature in " in told
    assert "SECRET" not in told


def test_check_rejects_an_unreadable_signature(sas_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def checked(path: Path) -> tuple[int, str]:
        policy = sas_file.with_name("policy.yaml")
        fleet = {"group": "web", "table": "https://a.example/abc", "max_events": 1}
        fleet |= {"credential": {"sas_file": str(path)}}
        policy.write_text(f"rules: []\nfleet: {json.dumps(fleet)}\n", encoding="utf-8")
        return main(["check", "--config", str(policy)]), capsys.readouterr().out

    assert checked(sas_file)[0] == 0
    missing = sas_file.with_name("missing")
    code, told = checked(missing)
    assert code == 2
    reason = "cannot be read: No such file or directory"
    assert f"policy.yaml:2: fleet.credential.sas_file: {missing}: {reason}" in told


def test_an_agent_that_starts_warns_of_an_exposed_signature(
    sas_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "find_read_risk", lambda path: f"{path.name} is open to all")
    policy = sas_file.with_name("policy.yaml")
    credential = json.dumps({"sas_file": str(sas_file)})
    text = f"fleet: {{group: web, table: 'https://a.example/abc', max_events: 1, credential: {credential}}}\n"
    policy.write_text(text, encoding="utf-8")
    told = machine_warnings(load_policy(policy))
    assert [
        problem for problem in told if "fleet.credential.sas_file: sas is open to all" in str(problem)
    ] != [], told


@pytest.fixture
def long_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_ASK_SECONDS", 60.0)


@pytest.mark.usefixtures("long_asking")
@pytest.mark.parametrize(("scale_set", "code"), [("web", 0), ("", 2)])
def test_check_rejects_a_group_that_cannot_be_found(
    scale_set: str,
    code: int,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compute = {"name": "web_1", "vmScaleSetName": scale_set}
    server.answer = answer("200 OK", json.dumps({"compute": compute}).encode())
    policy = tmp_path / "policy.yaml"
    fleet = {"table": "https://a.example/abc", "max_events": 1}
    policy.write_text(
        f"imds: {{endpoint: '{server.url}'}}\nrules: []\nfleet: {json.dumps(fleet)}\n", encoding="utf-8"
    )
    assert main(["check", "--config", str(policy)]) == code
    told = capsys.readouterr().out
    assert (": fleet.group: the key is missing" in told) == (code == 2), told


def test_check_asks_no_group_where_there_is_no_metadata_service(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    table = "{table: 'https://a.example/abc', max_events: 1}"
    policy.write_text(
        f"imds: {{endpoint: 'http://127.0.0.1:{free_port()}'}}\nrules: []\nfleet: {table}\n", encoding="utf-8"
    )
    assert main(["check", "--config", str(policy)]) == 0


_WITH_PACKAGED_MODULES = """
import sys
url, *absent = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent))  # to import one of them is a ModuleNotFoundError
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings
settings = FleetSettings(table=url, credential=FleetCredential(sas_file="sas"))
table = connect(settings, "web", "http://127.0.0.1:9")
table.put("k", {"a": "b"}, "")
(record,) = table.list()
assert table.delete("k", record.etag)
"""


def test_a_table_is_used_without_the_modules_that_the_packages_leave_out(tmp_path: Path) -> None:
    names = "windows/requirements.txt" if sys.platform == "win32" else "requirements.txt"
    pinned = (CHECKOUT / "packaging" / names).read_text(encoding="utf-8")
    brought = set(re.findall(r"^([\w-]+)==", pinned, re.MULTILINE)) | {"scheduled-events-agent"}
    absent = [
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if brought.isdisjoint(re.sub(r"[-_.]+", "-", name).lower() for name in distributions)
    ]
    assert "pytest" in absent
    assert "httpx" not in absent
    (tmp_path / "sas").touch(mode=0o600)
    (tmp_path / "sas").write_text(SimulatedTable.SAS)
    with SimulatedTable() as table:
        done = subprocess.run(
            [sys.executable, "-c", _WITH_PACKAGED_MODULES, table.url, *absent],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT / "agent")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


_WITHOUT_FLEET = """
import os, signal, sys, threading
names = ("scheduled_events_agent.fleet", "scheduled_events_agent.daemon.fleet")
sys.modules.update(dict.fromkeys(names))
from scheduled_events_agent.cli import main
from scheduled_events_agent.simulator import Simulator
with Simulator(vms=("web_1",)) as azure, open("policy.yaml", "w") as policy:
    policy.write("rules: []\\nagent: {listen: off}\\n")
    policy.write(f"imds: {{endpoint: '{azure.endpoint()}', poll_interval: 1s}}\\n")
    policy.close()
    def stop():
        azure.wait_polls(2)
        signal.raise_signal(signal.SIGTERM)
    threading.Thread(target=stop).start()
    sys.exit(main(["run", "--config", "policy.yaml", "--state-dir", "state"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it is stopped with SIGTERM, which Windows does not send")
def test_an_agent_without_a_fleet_runs_without_any_module_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_FLEET],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "agent")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert '"agent stopped"' in done.stderr, done.stderr
