"""The ledger in Table Storage against a server on loopback that fails in every way: all of it is a LedgerError."""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from azure.core.rest import HttpRequest
from ports import free_port

from scheduled_events_agent import host
from scheduled_events_agent.cli import check, main, run
from scheduled_events_agent.fleet import table_ledger
from scheduled_events_agent.fleet.identity import VmCredential
from scheduled_events_agent.fleet.ledger import LedgerError
from scheduled_events_agent.fleet.table import connect, read_sas, sas_doubts
from scheduled_events_agent.fleet.table_ledger import TableLedger
from scheduled_events_agent.fleet.table_transport import TableTransport
from scheduled_events_agent.settings import load_policy
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings
from scheduled_events_agent.simulator.table import SimulatedTable

CHECKOUT = Path(__file__).parents[2]
SAS = "sv=2019-02-02&sig=SECRET"
AUDIENCE = "https://storage.azure.com"
EMPTY_LIST = b'{"value": []}'


def answer(status: str, body: bytes = b"", headers: str = "Content-Type: application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def error(status: str, code: str, headers: str = "Content-Type: application/json") -> bytes:
    body = f'{{"odata.error": {{"code": "{code}", "message": {{"lang": "en-US", "value": "no"}}}}}}'
    return answer(status, body.encode(), headers)


class Server:
    """Answers every request with the same bytes; None: not at all."""

    def __init__(self) -> None:
        self.answer: bytes | None = answer("200 OK", EMPTY_LIST)
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
            while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
                data += piece
            self.requests.append(data)
            if self.answer is None:
                self._ended.wait(60)
            else:
                with suppress(OSError):  # it may have left
                    connection.sendall(self.answer)

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
def table(server: Server, sas_file: Path) -> TableLedger:
    credential = FleetCredential(sas_file=str(sas_file))
    settings = FleetSettings(table=f"{server.url}/devstore/abc", credential=credential)
    return connect(settings, "http://127.0.0.1:9")


def fault_of(table: TableLedger) -> LedgerError:
    with pytest.raises(LedgerError) as caught:
        table.list_rows("p")
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
        (error("404 Not Found", "TableNotFound"), "missing", "there is no table abc: create it, or"),
        (answer("404 Not Found", b"<html>", "Content-Type: text/html"), "missing", "no table abc: create it"),
        (error("400 Bad Request", "InvalidInput"), "bad_answer", "answers 400 (InvalidInput)"),
        (answer("302 Found", b"", "Location: http://127.0.0.1:1/"), "bad_answer", "answers 302"),
        (answer("200 OK", b"<html>", "Content-Type: text/html"), "bad_answer", "is not one of a table"),
        (answer("200 OK", b"{"), "bad_answer", "not the answer of a table"),
        (answer("200 OK", b"[" * 100_000), "bad_answer", "is not one of a table"),
        (answer("200 OK", b'{"value": [1]}'), "bad_answer", "is not one of a table"),
        (answer("200 OK", b'{"value": [{"Timestamp": "soon"}]}'), "bad_answer", "is not one of a table"),
        (answer("200 OK", b'{"value": [{"a@odata.type": "Edm.Int64", "a": "x"}]}'), "bad_answer", "not one of"),
        (answer("200 OK", b'{"value": [{"a@odata.type": "Edm.Int64", "a": 1e999}]}'), "bad_answer", "not one of"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9000000000\r\n\r\n" + b" " * 9_000_000, "bad_answer", "over 8 MiB"),
        (b"\x00\x01 no HTTP\r\n\r\n", "bad_answer", "not a whole HTTP answer"),
        (b"", "unreachable", "the connection was lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "bad_answer", "not a whole HTTP answer"),
    ],
)
def test_an_answer_that_is_no_list_is_an_error(
    server: Server, table: TableLedger, wire: bytes, kind: str, words: str
) -> None:
    server.answer = wire
    fault = fault_of(table)
    assert (fault.kind, words in str(fault)) == (kind, True), str(fault)
    assert len(server.requests) == 1, "it is not asked again here"


def test_a_busy_service_says_how_long_to_leave_it_alone(server: Server, table: TableLedger) -> None:
    server.answer = error("503 Busy", "ServerBusy", "Content-Type: application/json\r\nRetry-After: 7")
    assert fault_of(table).retry_after == 7.0
    server.answer = error("503 Busy", "ServerBusy", "Content-Type: application/json\r\nRetry-After: -7")
    assert fault_of(table).retry_after == 0.0


@pytest.mark.parametrize("after", ["301", "999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_busy_service_is_left_alone_for_five_minutes_at_most(
    server: Server, table: TableLedger, after: str
) -> None:
    server.answer = error("503 Busy", "ServerBusy", f"Content-Type: application/json\r\nRetry-After: {after}")
    assert fault_of(table).retry_after == 300.0


def test_a_server_that_says_nothing_is_given_up(
    server: Server, sas_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_ledger, "_EXCHANGE_SECONDS", 0.2)
    server.answer = None
    settings = FleetSettings(table=f"{server.url}/abc", credential=FleetCredential(sas_file=str(sas_file)))
    assert fault_of(connect(settings, "http://127.0.0.1:9")).kind == "timeout"


def test_of_a_row_only_its_texts_count(server: Server, table: TableLedger) -> None:
    server.answer = answer(
        "200 OK",
        b'{"value": [{"odata.etag": "1", "PartitionKey": "p", "RowKey": "b", "n": 1, "f": 0.5, "s": "x"},'
        b'{"odata.etag": "2", "PartitionKey": "p", "RowKey": "a"}, {"odata.etag": "3", "RowKey": 7},'
        b'{"odata.etag": "4"}, {"RowKey": "c"}]}',
    )
    assert [(row.key, row.content, row.version) for row in table.list_rows("p")] == [
        ("a", {}, "2"),
        ("b", {"s": "x"}, "1"),
    ]


def test_pages_without_an_end_are_given_up(
    server: Server, table: TableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_ledger, "_MAX_ROWS", 5)
    next_page = "x-ms-continuation-NextPartitionKey: p\r\nx-ms-continuation-NextRowKey: k"
    more = f"Content-Type: application/json\r\n{next_page}"
    server.answer = answer("200 OK", b'{"value": [{"odata.etag": "1", "RowKey": "a"}]}', more)
    assert "more than 5 rows" in str(fault_of(table))
    assert len(server.requests) == 6


def test_a_page_with_more_rows_than_are_read_is_not_cut(
    server: Server, table: TableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_ledger, "_MAX_ROWS", 2)
    rows = ",".join(f'{{"odata.etag": "1", "RowKey": "{key}"}}' for key in "abc")
    server.answer = answer("200 OK", f'{{"value": [{rows}]}}'.encode())
    assert "more than 2 rows" in str(fault_of(table))


def test_a_write_tells_apart_what_changed_and_what_failed(server: Server, table: TableLedger) -> None:
    for wire in (
        error("409 Conflict", "EntityAlreadyExists"),
        error("412 Failed", "UpdateConditionNotSatisfied"),
        error("404 Not Found", "ResourceNotFound"),
    ):
        server.answer = wire
        assert table.put_if_unchanged("p", "k", {"a": "b"}, "1") is False
    server.answer = error("409 Conflict", "TableBeingDeleted")
    with pytest.raises(LedgerError, match="TableBeingDeleted"):
        table.put_if_unchanged("p", "k", {"a": "b"}, "")
    server.answer = answer("204 No Content")
    assert table.put_if_unchanged("p", "k", {"a": "b"}, "1") is True


def test_the_environments_proxy_is_not_used(
    server: Server, table: TableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert table.list_rows("p") == []
    assert b"SECRET" in server.requests[0]


def test_the_policys_proxy_is_used(server: Server, sas_file: Path) -> None:
    credential = FleetCredential(sas_file=str(sas_file))
    settings = FleetSettings(table="http://127.0.0.1:9/abc", credential=credential, proxy=server.url)
    assert connect(settings, "http://127.0.0.1:9").list_rows("p") == []
    assert server.requests[0].startswith(b"GET http://127.0.0.1:9/abc()?")


def test_a_table_that_nothing_listens_for_is_away(sas_file: Path) -> None:
    port = free_port()
    settings = FleetSettings(
        table=f"http://127.0.0.1:{port}/abc", credential=FleetCredential(sas_file=str(sas_file))
    )
    fault = fault_of(connect(settings, "http://127.0.0.1:9"))
    assert fault.kind == "unreachable"


def test_a_token_is_never_sent_unencrypted() -> None:
    with pytest.raises(LedgerError, match="only supported with HTTPS") as caught:
        connect(FleetSettings(table="http://127.0.0.1:10002/abc"), "http://127.0.0.1:9")
    assert caught.value.kind == "setup"


@pytest.mark.parametrize(
    ("wire", "kind", "words"),
    [
        (answer("400 Bad", b'{"error":"invalid_request","error_description":"Identity not found"}'), "denied",
         "Identity not found"),
        (answer("404 Not Found"), "denied", "this VM has no managed identity, or several: assign one"),
        (answer("429 Too Many", b"{}"), "throttled", "it answers 429"),
        (answer("410 Gone", b"{}"), "throttled", "it answers 410"),
        (answer("408 Timeout", b"{}"), "throttled", "it answers 408"),
        (answer("500 Error", b"{}"), "throttled", "it answers 500"),
        (answer("200 OK", b'{"access_token": "a\\nb", "expires_on": "1"}'), "bad_answer", "holds no token"),
        (answer("200 OK", b'{"access_token": "a", "expires_on": "Infinity"}'), "bad_answer", "holds no token"),
        (answer("200 OK", b'{"access_token": 1, "expires_on": "1"}'), "bad_answer", "holds no token"),
        (answer("200 OK", b"[]"), "bad_answer", "holds no token"),
        (answer("200 OK", b"[" * 100_000), "bad_answer", "holds no token"),
        (b"", "unreachable", "gives no token"),
        (None, "timeout", "gives no token within 0.3 s"),
    ],
)  # fmt: skip
def test_a_token_that_cannot_be_had_is_an_error(server: Server, wire: bytes | None, kind: str, words: str) -> None:
    server.answer = wire
    with pytest.raises(LedgerError) as caught:
        VmCredential(server.url, None, AUDIENCE, 0.3 if wire is None else 60.0).get_token(f"{AUDIENCE}/.default")
    assert (caught.value.kind, words in str(caught.value)) == (kind, True), str(caught.value)


CHALLENGE = "Bearer authorization_uri=https://login.microsoftonline.com/t/oauth2/authorize resource_id="


@pytest.mark.parametrize(
    ("challenge", "kind", "tokens"),
    [
        (f"{CHALLENGE}https://management.azure.com", "denied", 1),
        ("Bearer authorization_uri=https://a.example/t scope=https://vault.azure.net/.default", "denied", 1),
        (f"{CHALLENGE}{AUDIENCE}/", "denied", 2),
        ("Bearer", "bad_answer", 1),
        ("Bearer x", "denied", 1),
    ],
)
def test_no_challenge_gets_a_token_for_another_service(
    server: Server, monkeypatch: pytest.MonkeyPatch, challenge: str, kind: str, tokens: int
) -> None:
    sent: list[str] = []

    def refuse(_self: object, _client: object, request: HttpRequest, _url: object) -> httpx.Response:
        sent.append(request.headers["Authorization"])
        return httpx.Response(401, headers={"WWW-Authenticate": challenge})

    monkeypatch.setattr(TableTransport, "_exchange", refuse)
    server.answer = answer("200 OK", b'{"access_token": "TOKEN", "expires_on": "9999999999"}')
    fault = fault_of(connect(FleetSettings(table="https://a.example/abc"), server.url))
    assert fault.kind == kind, str(fault)
    resource = b"resource=https%3A%2F%2Fstorage.azure.com "
    assert [resource in request.replace(b"&", b" ") for request in server.requests] == [True] * tokens
    assert sent == ["Bearer TOKEN"] * tokens


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
    monkeypatch.setattr(TableTransport, "_exchange", lambda *_: refusal)
    server.answer = answer("200 OK", b'{"access_token": "TOKEN", "expires_on": "9999999999"}')
    credential = FleetCredential(client_id=client_id) if client_id else FleetSettings(table="").credential
    fault = fault_of(connect(FleetSettings(table="https://acme.example/abc", credential=credential), server.url))
    assert (fault.kind, str(fault)) == ("denied", f"https://acme.example answers 403 ({code}): {way}")


@pytest.mark.parametrize("text", ["", "sv=1", "sig=1", "sv=1&sig=1 2", "sv=1\nsig=2", "key"])
def test_what_is_no_signature_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sas"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LedgerError, match="does not hold a shared access signature") as caught:
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
def test_a_signature_as_a_tool_wrote_it_is_refused_with_the_way_out(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "sas"
    file.write_bytes(content)
    with pytest.raises(LedgerError, match=words) as caught:
        read_sas(file)
    assert "SECRET" not in str(caught.value)


def test_a_signature_in_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be read"):
        read_sas(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("se=2026-03-31T00%3A00Z&sp=raud", []),
        ("se=2026-03-04&sp=raud", ["expires soon, at 2026-03-04T00:00:00Z: write a new one into the file"]),
        ("se=2026-03-02T11:59Z", ["has expired, at 2026-03-02T11:59:00Z: write a new one into the file"]),
        ("se=never&sp=ra", ["does not allow what the agent does: update, delete"]),
        ("si=policy", []),
    ],
)
def test_what_a_signature_says_against_itself_is_told(tmp_path: Path, fields: str, expected: list[str]) -> None:
    file = tmp_path / "sas"
    file.write_text(f"sv=2020-04-08&{fields}&sig=SECRET", encoding="utf-8")
    told = list(sas_doubts(file, datetime(2026, 3, 2, 12, tzinfo=UTC)))
    assert told == [f"the signature in {file} {words}" for words in expected]


def test_check_warns_of_a_signature_that_expires(sas_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sas_file.write_text("sv=1&se=2020-01-01T00:00Z&sig=SECRET", encoding="utf-8")
    policy = sas_file.with_name("policy.yaml")
    fleet = {"group": "web", "table": "https://a.example/abc", "max_events": 1}
    fleet |= {"credential": {"sas_file": str(sas_file)}}
    policy.write_text(f"rules: []\nfleet: {json.dumps(fleet)}\n", encoding="utf-8")
    assert main(["check", "--config", str(policy)]) == 0
    told = capsys.readouterr().out
    assert "policy.yaml:2: fleet.credential.sas_file: the signature in " in told
    assert "SECRET" not in told


def test_check_refuses_a_signature_that_cannot_be_read(sas_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setattr(host, "exposure_fault", lambda path: f"{path.name} is open to all")
    policy = sas_file.with_name("policy.yaml")
    credential = json.dumps({"sas_file": str(sas_file)})
    text = f"fleet: {{group: web, table: 'https://a.example/abc', max_events: 1, credential: {credential}}}\n"
    policy.write_text(text, encoding="utf-8")
    told = [str(problem) for problem in run._look_at_machine(load_policy(policy))]
    assert [text for text in told if "fleet.credential.sas_file: sas is open to all" in text] != [], told


@pytest.fixture
def long_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_ASK_SECONDS", 60.0)


@pytest.mark.usefixtures("long_asking")
@pytest.mark.parametrize(("scale_set", "code"), [("web", 0), ("", 2)])
def test_check_refuses_a_group_that_cannot_be_found(
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


def test_without_the_package_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "scheduled_events_agent.fleet.table_ledger")
    monkeypatch.setitem(sys.modules, "azure.data.tables", None)
    with pytest.raises(LedgerError, match=r"pip install 'scheduled-events-agent\[fleet\]'") as caught:
        connect(FleetSettings(table="https://a.example/abc"), "http://127.0.0.1:9")
    assert caught.value.kind == "setup"


_WITH_PACKAGED_MODULES = """
import sys
url, *absent = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent))  # to import one of them is a ModuleNotFoundError
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings
table = connect(FleetSettings(table=url, credential=FleetCredential(sas_file="sas")), "http://127.0.0.1:9")
table.put("p", "k", {"a": "b"})
(row,) = table.list_rows("p")
assert table.put_if_unchanged("p", "k", None, row.version)
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
    assert "requests" in absent
    assert "azure" not in absent
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
names = ("azure", "scheduled_events_agent.fleet", "scheduled_events_agent.daemon.fleet")
sys.modules.update(dict.fromkeys(names))
from scheduled_events_agent.cli import main
from scheduled_events_agent.simulator import Simulator
with Simulator(vms=("web_1",)) as azure, open("policy.yaml", "w") as policy:
    policy.write(f"rules: []\\nimds: {{endpoint: '{azure.endpoint()}'}}\\nagent: {{listen: off}}\\n")
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
