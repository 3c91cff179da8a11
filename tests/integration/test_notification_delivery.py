"""Notifications: their formats, and one exchange with a service that may do anything."""

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import jsonschema
import msgspec
import notification_schema
import pytest
import respx
from msgspec.structs import replace
from ports import free_port
from receiver import Receiver, read_request
from test_state_fixture import PREPARED_EVENT, STARTED_EVENT

from scheduled_events_agent import __version__
from scheduled_events_agent.http.errors import TooLargeError
from scheduled_events_agent.http.transport import BoundedTransport, proxy_for
from scheduled_events_agent.notifications import SAMPLE, FormatError, NotificationError, deliver, render, warnings
from scheduled_events_agent.policy.settings import NotificationKind, NotifyTarget, SecretFile
from scheduled_events_agent.status import EventView, SuggestedCommand

ROOT = Path(__file__).parents[2]
URL = "https://hooks.example.com/T0/secret-path?sig=secret-query"
TARGET = NotifyTarget(name="ops", to=URL)


@pytest.fixture
def service() -> Iterator[respx.MockRouter]:
    with respx.mock(using="httpx") as router:
        yield router


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        yield one


def failure(target: NotifyTarget) -> NotificationError:
    with pytest.raises(NotificationError) as caught:
        deliver(target, SAMPLE)
    error = caught.value
    told = [str(error), error.answer, repr(error), repr(error.__cause__)]
    assert not any("secret" in text for text in told)
    return error


# --- the request


def test_a_notification_is_posted_with_the_headers_of_its_target(
    service: respx.MockRouter, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("Bearer secret-token\n")
    route = service.post(URL).respond(202, text="thanks for Bearer secret-token at " + URL)
    target = replace(TARGET, headers={"Authorization": SecretFile(file=str(token)), "X-Team": "ops"})
    delivered = deliver(target, SAMPLE)
    assert (delivered.status, delivered.answer) == (202, "thanks for *** at ***")
    sent = route.calls.last.request
    assert sent.headers["authorization"] == "Bearer secret-token"
    assert sent.headers["x-team"] == "ops"
    assert sent.headers["content-type"] == "application/cloudevents+json"
    assert sent.headers["user-agent"] == f"scheduled-events-agent/{__version__}"
    token.write_text("Bearer secret-new")
    deliver(target, SAMPLE)
    assert route.calls.last.request.headers["authorization"] == "Bearer secret-new"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, "redirect"), (302, "redirect"), (304, "redirect"), (307, "redirect"), (308, "redirect"),
        (400, "rejected"), (413, "rejected"), (414, "rejected"), (415, "rejected"), (422, "rejected"),
        (431, "rejected"), (401, "denied"), (402, "denied"), (403, "denied"), (407, "denied"),
        (404, "not_found"), (405, "not_found"), (410, "not_found"), (408, "timeout"), (429, "throttled"),
        (406, "unexpected_status"), (409, "unexpected_status"), (411, "unexpected_status"),
        (412, "unexpected_status"), (416, "unexpected_status"), (417, "unexpected_status"),
        (421, "unexpected_status"), (423, "unexpected_status"), (425, "unexpected_status"),
        (426, "unexpected_status"), (451, "unexpected_status"), (499, "unexpected_status"),
        (500, "server_error"), (503, "server_error"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_success_is_an_error(service: respx.MockRouter, status: int, kind: str) -> None:
    service.post(URL).respond(status, headers={"Retry-After": "7", "Location": "https://secret.example.com/"})
    error = failure(TARGET)
    assert (error.kind, str(error), error.retry_after) == (kind, f"it answers {status}", 7.0)
    assert service.calls.call_count == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (httpx.ReadTimeout("secret"), "timeout"), (httpx.ConnectError("secret"), "unreachable"),
        (httpx.ReadError("secret"), "unreachable"), (httpx.RemoteProtocolError("secret"), "malformed"),
        (httpx.ProxyError("407 secret"), "proxy"), (httpx.LocalProtocolError("secret"), "malformed"),
        (TooLargeError("the head of the answer is over 256 KiB"), "malformed"),
    ],
)  # fmt: skip
def test_no_text_of_the_library_gets_into_an_error(service: respx.MockRouter, fault: Exception, kind: str) -> None:
    service.post(URL).mock(side_effect=fault)
    assert failure(TARGET).kind == kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": SecretFile(file="/nowhere/file")}, f"to: {Path('/nowhere/file')}: cannot be read: "),
        ({"to": "ftp://secret.example.com/"}, "to: expected a URL such as https://example.com/hook"),
        ({"to": "https://example.com:secret/"}, "to: expected a URL such as https://example.com/hook"),
        ({"proxy": "https://secret:3128"}, "proxy: expected http://HOST:PORT"),
        ({"ca_file": "/nowhere/ca.pem"}, f"ca_file: {Path('/nowhere/ca.pem')}: cannot be read: "),
        ({"format": "/nowhere/body.json"}, f"format: {Path('/nowhere/body.json')}: cannot be read: "),
    ],
)
def test_an_unusable_target_is_reported_without_the_secret(changes: dict[str, Any], message: str) -> None:
    error = failure(msgspec.structs.replace(TARGET, **changes))
    assert error.kind == "setup"
    assert str(error).startswith(message)


def test_a_token_of_two_lines_is_no_header(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\r\nX-Evil: 1")
    error = failure(replace(TARGET, headers={"Authorization": SecretFile(file=str(file))}))
    assert str(error) == f"headers.Authorization: {file} is not one line of plain text"


def test_check_reports_problems_of_a_target_on_this_machine(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"a": 1,\n "b": ${b}}')
    targets = [TARGET, replace(TARGET, format=str(body))]
    fields = "id, kind, title, reason, time, vm, vm_id, rule, mode, outcome, event_id, type, status, source, "
    fields += "description, resources, not_before, deadline, commands, runbook, seconds_left, duration_seconds"
    assert [*warnings(targets)] == [
        ("notify[1]", f"format: {body}:2: there is no field ${{b}}; known are: {fields}")
    ]


# --- real sockets


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("closes at once", "unreachable"), ("resets", "unreachable"), ("closes without an answer", "unreachable"),
        ("half an answer", "malformed"), ("garbage", "malformed"), ("says nothing", "timeout"),
        ("a byte a second", "timeout"), ("503", "server_error"), ("302", "redirect"),
    ],
)  # fmt: skip
def test_a_service_that_fails_is_given_up_in_time(receiver: Receiver, way: str, kind: str) -> None:
    receiver.behave = lambda: way
    assert failure(NotifyTarget(name="ops", to=receiver.url, timeout=2.0)).kind == kind
    assert receiver.attempts == 1


@pytest.mark.parametrize(("way", "answer"), [("200 without end", "more more more "), ("201 and stalls", "more")])
def test_the_status_decides_however_long_the_answer_is(receiver: Receiver, way: str, answer: str) -> None:
    target = NotifyTarget(name="ops", to=receiver.url, timeout=2.0)
    receiver.behave = lambda: way
    delivered = deliver(target, SAMPLE)
    assert delivered.status == int(way[:3])
    assert delivered.answer.startswith(answer)


@pytest.mark.parametrize(
    ("status", "kind"), [("400", "rejected"), ("403", "denied"), ("307", "redirect"), ("503", "server_error")]
)
@pytest.mark.parametrize("rest", ["without end", "and stalls"])
def test_the_status_decides_for_any_length_of_an_error_response(
    receiver: Receiver, status: str, kind: str, rest: str
) -> None:
    receiver.behave = lambda: f"{status} {rest}"
    assert failure(NotifyTarget(name="ops", to=receiver.url, timeout=2.0)).kind == kind


def test_of_a_long_answer_64_kib_are_read(receiver: Receiver) -> None:
    receiver.behave = lambda: "200 without end"
    with httpx.Client(transport=BoundedTransport(65536, is_cut=True)) as client:
        assert 0 < len(client.post(receiver.url, json={}).content) < 65536


def test_a_port_without_a_service_refuses() -> None:
    port = free_port()
    error = failure(replace(TARGET, to=f"http://127.0.0.1:{port}/secret"))
    assert (error.kind, str(error)) == ("refused", "connection refused")


MASKED = {
    "a word of a header": ({"headers": {"Authorization": "Bearer long-token-1"}}, "unknown token long-token-1"),
    "a value in a header": ({"headers": {"X-Auth": "key=long-token-1; v=2"}}, "unknown key long-token-1"),
    "Basic in a header": (
        {"headers": {"Authorization": "Basic " + b64encode(b"ops:long-token-1").decode()}},
        "wrong password long-token-1",
    ),
    "a value of the query": ({"to": f"{URL}&key=long-token-1"}, "signed with long-token-1"),
    "a value of the query, decoded": ({"to": f"{URL}&key=long%2Btoken%2F1"}, "signed with long+token/1"),
    "a query without names": ({"to": "https://example.com/?long-token-1"}, "signed with long-token-1"),
    "a part of the path": ({"to": "https://example.com/T0/long-token-1"}, "no_service: long-token-1"),
    "the password of the URL": ({"to": "https://ops:long-token-1@example.com/"}, "wrong: long-token-1"),
    "the user of the URL in base64": (
        {"to": "https://ops:word@example.com/"},
        f"Authorization: Basic {b64encode(b'ops:word').decode()}",
    ),
    "the proxy's password": ({"proxy": "http://ops:long-token-1@127.0.0.1:1"}, "wrong: long-token-1"),
    "the proxy's password in base64": (
        {"proxy": "http://ops:word@127.0.0.1:1"},
        f"Proxy-Authorization: Basic {b64encode(b'ops:word').decode()}",
    ),
}


@pytest.mark.parametrize(("changes", "answer"), MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("status", [200, 403])
def test_parts_of_secrets_are_masked(
    service: respx.MockRouter, changes: dict[str, Any], answer: str, status: int
) -> None:
    target = replace(TARGET, **changes)
    service.post(str(target.to)).respond(status, text=answer)
    shown = deliver(target, SAMPLE).answer if status == 200 else failure(target).answer
    before, _, _ = answer.rpartition(" ")
    assert shown == f"{before} ***"


def test_a_secret_is_masked_before_the_answer_is_cut(service: respx.MockRouter) -> None:
    target = replace(TARGET, headers={"X-Key": "long-token-1" * 10})
    for before in range(100, 230):
        service.post(URL).respond(200, text=f"{'x' * before} {'long-token-1' * 10} {'y' * 300}")
        assert "long" not in deliver(target, SAMPLE).answer


def test_words_of_http_and_short_words_are_no_secrets(service: respx.MockRouter) -> None:
    headers = {"Authorization": "Bearer long-token-1 ab", "Accept": "application/json"}
    answer = "expected Authorization: Bearer ab, and application/json in UTF-8"
    service.post(URL).respond(200, text=answer)
    assert deliver(replace(TARGET, headers=headers), SAMPLE).answer == answer


def test_only_the_proxy_of_the_target_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    target = NotifyTarget(name="ops", to=receiver.url)
    assert deliver(target, SAMPLE).status == 202
    by_proxy = replace(target, to="http://nowhere.invalid/", proxy=f"http://127.0.0.1:{receiver.port}")
    assert deliver(by_proxy, SAMPLE).status == 202
    assert failure(replace(target, proxy="environment")).kind == "refused"
    monkeypatch.setenv("NO_PROXY", "example.com, 127.0.0.1")
    assert deliver(replace(target, proxy="environment"), SAMPLE).status == 202


HOOKS = "https://hooks.example.com/"


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_proxy_used"),
    [
        ("", HOOKS, True),
        ("*", HOOKS, False),
        ("localhost, *", HOOKS, False),
        ("*", "https://[fd00::7]/", False),
        # one wildcard is not every host
        ("*.example.org", HOOKS, True),
        ("localhost,*.example.org,", HOOKS, True),
        ("**", HOOKS, True),
        ("*:443", HOOKS, True),
        # the name, and what is below it
        ("example.com", HOOKS, False),
        (" example.org , .example.com", HOOKS, False),
        ("*.example.com", HOOKS, False),
        (".example.com", "https://example.com/", False),
        ("*.example.com", "https://example.com/", False),
        ("hooks.example.com", HOOKS, False),
        ("other.example.com", HOOKS, True),
        ("ample.com", HOOKS, True),
        ("*ample.com", HOOKS, True),
        (".,*.,:443", HOOKS, True),
        # in any case
        ("Example.COM", HOOKS, False),
        ("*.example.com", "https://HOOKS.Example.Com/", False),
        # with a port
        ("example.com:443", HOOKS, False),
        ("example.com:80", HOOKS, True),
        ("*.example.com:8443", HOOKS, True),
        ("*.example.com:8443", "https://hooks.example.com:8443/", False),
        (".example.com:443", "https://hooks.example.com:8443/", True),
        ("example.com", "https://hooks.example.com:8443/", False),
        ("example.com:x", HOOKS, True),
        # addresses and networks
        ("10.1.2.3", "https://10.1.2.3/", False),
        ("10.1.2.4", "https://10.1.2.3/", True),
        ("10.1.2.3:443", "https://10.1.2.3/", False),
        ("10.1.2.3:80", "https://10.1.2.3/", True),
        ("10.1.0.0/16", "https://10.1.2.3/", False),
        ("10.1.9.9/16", "https://10.1.2.3/", False),
        ("10.2.0.0/16", "https://10.1.2.3/", True),
        ("10.1.0.0/99", "https://10.1.2.3/", True),
        ("0.0.0.0/0", HOOKS, True),
        ("0.0.0.0/0", "https://[fd00::7]/", True),
        ("2.3", "https://10.1.2.3/", True),
        ("fd00::7", "https://[fd00::7]/", False),
        ("FD00:0::7", "https://[fd00::7]/", False),
        ("[fd00::7]", "https://[fd00::7]/", False),
        ("[fd00::7]:443", "https://[fd00::7]/", False),
        ("[fd00::7]:80", "https://[fd00::7]/", True),
        ("fd00::/8", "https://[fd00::7]/", False),
        ("fe80::/10", "https://[fd00::7]/", True),
    ],
)
def test_no_proxy_names_hosts_domains_addresses_and_networks(
    no_proxy: str, url: str, is_proxy_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_for("environment", httpx.URL(url)) is not None) == is_proxy_used


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@needs_openssl
def test_tls_is_verified_also_through_a_proxy(tmp_path: Path) -> None:
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", "key.pem", "-out", "cert.pem", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*new, *files], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with TlsServer(context) as server, Tunnel() as tunnel:
        target = NotifyTarget(name="ops", to=f"https://localhost:{server.port}/secret")
        error = failure(target)
        assert (error.kind, str(error)) == ("tls", "its certificate is not trusted: self-signed certificate")
        tls_context = replace(target, ca_file=str(tmp_path / "cert.pem"))
        assert deliver(tls_context, SAMPLE).status == 202
        assert (
            deliver(replace(tls_context, proxy=f"http://user:word@127.0.0.1:{tunnel.port}"), SAMPLE).status == 202
        )
        assert tunnel.heads[0].startswith(f"CONNECT localhost:{server.port} HTTP/1.1\r\n")
        assert "Proxy-Authorization: Basic dXNlcjp3b3Jk" in tunnel.heads[0]
        other_name = replace(tls_context, to=f"https://127.0.0.1:{server.port}/secret")
        assert failure(other_name).kind == "tls"
        tunnel.refuses = True
        error = failure(replace(tls_context, proxy=f"http://127.0.0.1:{tunnel.port}"))
        assert (error.kind, str(error)) == ("proxy", "the proxy answers 407")


class Listener:
    """A port; each connection is served in a thread."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Any:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        socket.create_connection(("127.0.0.1", self.port), 10).close()
        for thread in self._threads:
            thread.join(30)
        self._socket.close()

    _is_over = False

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            if self._is_over:
                connection.close()
                return
            connection.settimeout(30)
            self._start(self._guard, connection)

    def _guard(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client may have gone
            self.serve(connection)

    def serve(self, connection: socket.socket) -> None:
        raise NotImplementedError


class TlsServer(Listener):
    """Answers 202 over TLS."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context

    def serve(self, connection: socket.socket) -> None:
        with self._context.wrap_socket(connection, server_side=True) as secure:
            read_request(secure)
            secure.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


class Tunnel(Listener):
    """A proxy that knows CONNECT."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[str] = []

    def serve(self, connection: socket.socket) -> None:
        head = connection.recv(65536).decode()
        self.heads.append(head)
        if self.refuses:
            connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        port = int(head.split()[1].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 30) as onward:
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._start(self._pump, onward, connection)
            self._pump(connection, onward)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other direction has ended
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


# --- the bodies

EVIL = replace(
    SAMPLE.event, id='E"1', type="Reboot", not_before=None, description='a "quote" <!channel> \\ & ${vm}'
)
OVER = replace(SAMPLE.event, outcome="completed")


def body_of(form: str, **changes: Any) -> Any:
    content_type, body = render(form, replace(SAMPLE, **changes), "key")
    assert content_type == ("application/cloudevents+json" if form == "cloudevents" else "application/json")
    return json.loads(body)


def test_a_cloud_event_has_the_data_that_the_documented_schema_says() -> None:
    assert "](notification.schema.json)" in (ROOT / "docs/notifications.md").read_text(encoding="utf-8")
    schema = json.loads(notification_schema.FILE.read_text(encoding="utf-8"))
    event = body_of("cloudevents", vm_id="7a1f")
    jsonschema.validate(event["data"], schema)
    assert schema["required"] == [*event["data"]]
    assert schema["required"] == [*schema["properties"]]
    assert schema["properties"]["kind"]["enum"] == [*get_args(NotificationKind), "test"]
    assert msgspec.convert(event["data"].pop("event"), EventView) == SAMPLE.event
    assert {key: value for key, value in event.items() if key != "data"} == {
        "specversion": "1.0",
        "id": SAMPLE.id,
        "source": "/azure/vm/7a1f",
        "type": "io.scheduled-events-agent.test",
        "time": "2026-01-01T12:00:00Z",
        "datacontenttype": "application/json",
        "subject": SAMPLE.event.id,
    }


def test_the_documented_schema_of_an_event_is_that_of_its_type() -> None:
    schema = json.loads(notification_schema.FILE.read_text(encoding="utf-8"))
    of_event = schema["properties"]["event"]
    assert of_event == notification_schema.event_schema()  # if not: python tests/fixtures/notification_schema.py
    for shown in (PREPARED_EVENT, STARTED_EVENT):  # with what the sample has not
        data = body_of("cloudevents", event=shown)["data"]
        jsonschema.validate(data, schema)
        assert [*data["event"]] == of_event["required"]


def test_an_event_without_an_id_is_no_subject() -> None:
    assert "subject" not in body_of("cloudevents", event=replace(SAMPLE.event, id=""))


ASKED: dict[str, Any] = {
    "kind": "held",
    "reason": "held: preparation failed; Azure starts it at NotBefore",
    "addition": "preparation failed; Azure starts it at NotBefore",
    "deadline": SAMPLE.event.not_before,
    "commands": (
        SuggestedCommand(
            command="sudo scheduled-events-agent retry A123", effect="run drain again, then the rest"
        ),
        SuggestedCommand(command="sudo scheduled-events-agent approve A123", effect="let Azure start it as it is"),
    ),
    "runbook": "https://example.com/runbook.md#prepare_failed",
}


def test_operator_commands_are_in_every_format(tmp_path: Path) -> None:
    retry, approve = (one.command for one in ASKED["commands"])
    lines = body_of("slack", **ASKED)["text"].splitlines()
    assert lines[-3:-1] == [
        f"`{retry}`: run drain again, then the rest",
        f"`{approve}`: let Azure start it as it is",
    ]
    assert {"VM: vm-1", "Act before: 2026-01-01 12:15:00 UTC", "Time left: 15m 0s"} < {*lines}
    facts = body_of("teams", **ASKED)["attachments"][0]["content"]["body"][2]["facts"]
    assert facts[-2:] == [
        {"title": "run drain again, then the rest", "value": retry},
        {"title": "let Azure start it as it is", "value": approve},
    ]
    assert {"title": "Act before", "value": "2026-01-01 12:15:00 UTC"} in facts
    expected = [
        {"command": retry, "effect": "run drain again, then the rest"},
        {"command": approve, "effect": "let Azure start it as it is"},
    ]
    for data in (
        body_of("cloudevents", **ASKED)["data"],
        body_of("pagerduty", **ASKED)["payload"]["custom_details"],
    ):
        assert data["commands"] == expected
        assert (data["vm"]["name"], data["deadline"]) == ("vm-1", "2026-01-01T12:15:00Z")
    file = tmp_path / "body.json"
    file.write_text('{"type": "${commands}", "until": "${deadline}"}')
    assert body_of(str(file), **ASKED) == {"type": f"{retry}\n{approve}", "until": "2026-01-01T12:15:00+00:00"}


@pytest.mark.parametrize("form", ["slack", "teams"])
def test_people_learn_that_the_agent_only_observes(form: str) -> None:
    expected = "observe: no hook runs, and nothing is approved"
    assert expected in json.dumps(body_of(form, mode="observe"))
    assert expected not in json.dumps(body_of(form))


@pytest.mark.parametrize(
    ("seconds_left", "expected"),
    [(61, "1m 1s"), (0, "none: it may start at any moment"), (-5, "none: it may start at any moment")],
)
def test_people_learn_that_no_time_is_left(seconds_left: int, expected: str) -> None:
    assert f"Time left: {expected}" in body_of("slack", seconds_left=seconds_left)["text"].splitlines()
    facts = body_of("teams", seconds_left=seconds_left)["attachments"][0]["content"]["body"][2]["facts"]
    assert {"title": "Time left", "value": expected} in facts


def test_the_runbook_is_in_every_format_and_only_if_an_operator_must_act(tmp_path: Path) -> None:
    url = ASKED["runbook"]
    file = tmp_path / "body.json"
    file.write_text('{"see": "${runbook}"}')
    assert body_of("cloudevents", **ASKED)["data"]["runbook"] == url
    assert body_of(str(file), **ASKED) == {"see": url}
    assert body_of("slack", **ASKED)["text"].splitlines()[-1] == f"<{url}|Runbook>"
    card = body_of("teams", **ASKED)["attachments"][0]["content"]
    assert card["actions"] == [{"type": "Action.OpenUrl", "title": "Runbook", "url": url}]
    assert body_of("pagerduty", **ASKED)["links"] == [{"href": url, "text": "Runbook"}]

    assert body_of("cloudevents")["data"]["runbook"] == ""
    assert body_of(str(file)) == {"see": ""}
    for format_ in ("slack", "teams", "pagerduty"):
        assert not re.search("runbook.md|actions|links", json.dumps(body_of(format_))), format_


def test_a_runbook_on_the_machine_is_named_in_every_format_and_is_no_link(tmp_path: Path) -> None:
    path = r"C:\Program Files\Agent\runbook.md#prepare_failed"
    asked = ASKED | {"runbook": path}
    file = tmp_path / "body.json"
    file.write_text('{"see": "${runbook}"}')
    assert body_of("cloudevents", **asked)["data"]["runbook"] == path
    assert body_of(str(file), **asked) == {"see": path}
    assert body_of("slack", **asked)["text"].splitlines()[-1] == f"Runbook: `{path}`"
    card = body_of("teams", **asked)["attachments"][0]["content"]
    assert card["body"][-1]["facts"][-1] == {"title": "Runbook", "value": path}
    assert "actions" not in card
    pagerduty = body_of("pagerduty", **asked)
    assert pagerduty["payload"]["custom_details"]["runbook"] == path
    assert "links" not in pagerduty


def test_slack_gets_a_text_that_cannot_mention_anyone() -> None:
    body = body_of("slack", kind="held", event=EVIL)
    assert list(body) == ["text"]
    assert body["text"].startswith("*The Reboot of vm-1 is held*\n")
    assert "&lt;!channel&gt; \\ &amp; ${vm}" in body["text"]
    lines = body_of("slack", kind="recovered", event=OVER, addition="")["text"].splitlines()
    assert lines[:2] == ["*The Freeze of vm-1 is over: completed*", f"Event: {SAMPLE.event.id}"]


def test_teams_gets_an_adaptive_card() -> None:
    body = body_of("teams", kind="started", addition="approved")
    (attachment,) = body["attachments"]
    card = attachment["content"]
    assert body["type"] == "message"
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert card["body"][0]["text"] == "The Freeze of vm-1 has started"
    assert card["body"][1]["text"] == "approved"
    assert {"title": "Event", "value": SAMPLE.event.id} in card["body"][2]["facts"]
    card = body_of("teams", kind="prepared", addition="")["attachments"][0]["content"]
    assert [block["type"] for block in card["body"]] == ["TextBlock", "FactSet"]


@pytest.mark.parametrize(
    ("what", "action", "severity"),
    [
        ("seen", "trigger", "info"), ("approval_needed", "trigger", "warning"), ("held", "trigger", "warning"),
        ("recovery_failed", "trigger", "critical"), ("hook_missing", "trigger", "critical"),
        ("started", "resolve", "info"), ("recovered", "resolve", "info"),
    ],
)  # fmt: skip
def test_pagerduty_gets_separate_incidents_for_before_and_after_the_start(
    what: Any, action: str, severity: str
) -> None:
    for has_started, key in ((False, "test"), (True, "test" if what == "started" else "test/recovery")):
        body = body_of("pagerduty", kind=what, event=OVER, has_started=has_started)
        assert (body["routing_key"], body["dedup_key"], body["event_action"]) == ("key", key, action)
        assert body["payload"]["severity"] == severity
        assert body["payload"]["source"] == "vm-1"


def test_a_long_key_keeps_the_two_incidents_apart() -> None:
    event = replace(SAMPLE.event, key="x" * 400)
    for has_started, end in ((False, "x"), (True, "/recovery")):
        key = body_of("pagerduty", kind="seen", event=event, has_started=has_started)["dedup_key"]
        assert len(key) == 255
        assert key.endswith(end)


def test_the_key_of_pagerduty_is_in_the_body_and_in_no_header(service: respx.MockRouter) -> None:
    route = service.post(URL).respond(202)
    deliver(replace(TARGET, format="pagerduty", headers={"X-Routing-Key": "k" * 32}), SAMPLE)
    sent = route.calls.last.request
    assert "x-routing-key" not in sent.headers
    assert json.loads(sent.content)["routing_key"] == "k" * 32


def test_a_template_gets_values_and_no_code(tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text(
        '{"text": "${title}: ${description}",\n "id": "${event_id}", "left": ${seconds_left}, "$": "$"}'
    )
    assert body_of(str(file), kind="seen", event=EVIL, seconds_left=None) == {
        "text": f"Azure announces a Reboot of vm-1: {EVIL.description}",
        "id": EVIL.id,
        "left": None,
        "$": "$",
    }


def test_a_template_may_name_every_field(tmp_path: Path) -> None:
    known = {
        "id": "n-1",
        "kind": "seen",
        "title": "Azure announces a Freeze of vm-1",
        "reason": 'an operator sends a "test"',
        "time": "2026-01-01T12:00:00+00:00",
        "vm": "vm-1",
        "vm_id": "5d1c",
        "rule": "impactful",
        "mode": "act",
        "outcome": "completed",
        "event_id": "A123BC45-1234-5678-AB90-ABCDEF123456",
        "type": "Freeze",
        "status": "Scheduled",
        "source": "Platform",
        "description": "A test, no event.",
        "resources": "vm-1, vm-2",
        "not_before": "2026-01-01T12:15:00+00:00",
        "deadline": "2026-01-01T12:15:00+00:00",
        "commands": "retry A123",
        "runbook": "https://example.com/runbook.md#prepare_failed",
        "seconds_left": 900,
        "duration_seconds": 5,
    }
    numbers = ("seconds_left", "duration_seconds")
    places = [f'"{name}": ' + (f"${{{name}}}" if name in numbers else f'"${{{name}}}"') for name in known]
    file = tmp_path / "body.json"
    file.write_text("{" + ", ".join(places) + "}")
    event = replace(OVER, rule="impactful", resources=("vm-1", "vm-2"))
    given: dict[str, Any] = {
        "id": "n-1",
        "kind": "seen",
        "vm_id": "5d1c",
        "deadline": SAMPLE.event.not_before,
        "commands": (SuggestedCommand(command="retry A123", effect="run it again"),),
        "runbook": "https://example.com/runbook.md#prepare_failed",
    }
    assert body_of(str(file), event=event, **given) == known
    assert body_of(str(file), event=replace(event, rule=None), **given) == known | {"rule": ""}
    file.write_text('{"a": ${none}}')
    with pytest.raises(FormatError, match=f"known are: {', '.join([*known][:20])}"):  # none is missing above
        render(str(file), SAMPLE)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ('{"a": "${titel}"}', "1: there is no field ${titel}; known are: id, kind, title"),
        (
            "[" * 20_000 + "1" + "]" * 20_000,
            "1: not JSON once its placeholders are filled in: maximum recursion depth",
        ),
        ('{\n"a": ${title}}', "2: not JSON once its placeholders are filled in: Expecting value"),
        ('{"a": "${vm.__class__}"}', "1: there is no field ${vm.__class__}"),
    ],
)
def test_an_unusable_template_is_reported_with_its_line(tmp_path: Path, template: str, fault: str) -> None:
    file = tmp_path / "body.json"
    file.write_text(template)
    with pytest.raises(FormatError) as caught:
        render(str(file), SAMPLE)
    assert str(caught.value).startswith(f"{file}:{fault}")
