"""TLS and client certificates over real sockets, with certificates made for the purpose."""

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_daemon import running

from scheduled_events_agent import host
from scheduled_events_agent.hooks import preflight
from scheduled_events_agent.policy.load import LoadedPolicy, parse_settings
from scheduled_events_agent.policy.settings import AgentSettings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.web import server as web
from scheduled_events_agent.web import tls
from scheduled_events_agent.web.server import Response, WebServer
from scheduled_events_agent.web.tls import Tls, TlsError, load_web_config

PAGES = {
    "/metrics": lambda: Response(HTTPStatus.OK, b"# metrics\n"),
    "/readyz": lambda: Response(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready: Reboot A is preparing\n"),
    "/big": lambda: Response(HTTPStatus.OK, b"x" * 3_000_000),
}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities: a server's, clients', and the server's again as it is after a renewal."""
    place = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=place, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (place / "server.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    (place / "client.ext").write_text("extendedKeyUsage=clientAuth\n")
    for authority in ("ca", "other-ca"):
        openssl("req", "-x509", *new_key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-days", "2",
                "-subj", f"/CN={authority}", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    for name, authority, kind in (
        ("server", "ca", "server"),
        ("renewed", "ca", "server"),
        ("client", "ca", "client"),
        ("stranger", "other-ca", "client"),
    ):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                "-CAcreateserial", "-days", "2", "-extfile", f"{kind}.ext", "-out", f"{name}.pem")  # fmt: skip
    openssl("ec", "-in", "server.key", "-out", "locked.key", "-aes128", "-passout", "pass:x")
    return place


@pytest.fixture
def place(certificates: Path, tmp_path: Path) -> Path:
    """A directory with copies, for each test to change."""
    return Path(shutil.copytree(certificates, tmp_path / "etc"))


def write(place: Path, text: str) -> Path:
    file = place / "web.yml"
    file.write_text(text)
    return file


TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
CLIENTS = "  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
USERS = "basic_auth_users: {ada: x}\n"


@contextmanager
def serving(file: Path, tell: Callable[[str], None] = lambda _: None) -> Iterator[WebServer]:
    server = WebServer("127.0.0.1:0", PAGES, tls=Tls(file, tell))
    try:
        yield server
    finally:
        server.close()


def tls_context(place: Path, client: str = "", newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(place / "ca.pem"))
    if client:
        context.load_cert_chain(place / f"{client}.pem", place / f"{client}.key")
    if newest:
        context.maximum_version = newest
    return context


def ask(server: WebServer, path: str = "/metrics", context: ssl.SSLContext | None = None) -> tuple[int, str]:
    connection: http.client.HTTPConnection
    if context:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def serial_number(server: WebServer, place: Path) -> str:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain,
        tls_context(place).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate: dict[str, Any] | None = connection.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def wait_until(test: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- TLS


@needs_openssl
def test_large_responses_are_served_over_tls(place: Path) -> None:
    with serving(write(place, TLS)) as server:
        assert ask(server, context=tls_context(place)) == (200, "# metrics\n")
        assert len(ask(server, "/big", tls_context(place))[1]) == 3_000_000


@needs_openssl
def test_old_tls_is_rejected_and_a_newer_version_can_be_required(place: Path) -> None:
    only_12 = ssl.TLSVersion.TLSv1_2
    with serving(write(place, TLS)) as server:
        assert ask(server, context=tls_context(place, newest=only_12))[0] == 200
    with serving(write(place, f"{TLS}  min_version: TLS13\n")) as server:
        assert ask(server, context=tls_context(place))[0] == 200
        with pytest.raises(ssl.SSLError):
            ask(server, context=tls_context(place, newest=only_12))


@needs_openssl
def test_plain_http_to_the_tls_port_is_reported(place: Path) -> None:
    with serving(write(place, TLS)) as server:
        assert ask(server) == (400, "this port speaks TLS: ask with https://\n")


@needs_openssl
@pytest.mark.parametrize("beginning", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_client_that_stops_in_its_handshake_is_disconnected(
    place: Path, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 1.5)
    with serving(write(place, TLS)) as server:
        mute = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        mute.sendall(beginning)
        wait_until(lambda: server._clients)
        assert ask(server, context=tls_context(place))[0] == 200
        with mute, suppress(ConnectionResetError):  # let go with bytes of it unread
            assert mute.recv(100) == b""
        wait_until(lambda: not server._clients)


@needs_openssl
def test_many_unfinished_handshakes_keep_no_client_out(place: Path) -> None:
    with serving(write(place, TLS)) as server:
        crowd = [
            socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(web._MAX_CLIENTS * 2)
        ]
        for client in crowd:
            client.sendall(b"\x16\x03\x01")
        assert ask(server, context=tls_context(place))[0] == 200
        for client in crowd:
            client.close()


@needs_openssl
def test_only_clients_with_a_certificate_of_the_authority_get_in(place: Path) -> None:
    with serving(write(place, TLS + CLIENTS)) as server:
        assert ask(server, context=tls_context(place, "client")) == (200, "# metrics\n")
        for client in ("", "stranger"):
            with pytest.raises(OSError):  # noqa: PT011 - the alert, or a reset connection, comes late or early
                ask(server, "/readyz", tls_context(place, client))
        assert ask(server, context=tls_context(place, "client"))[0] == 200


@needs_openssl
def test_an_optional_client_certificate_is_verified_if_sent(place: Path) -> None:
    text = CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    with serving(write(place, TLS + text)) as server:
        assert ask(server, context=tls_context(place))[0] == 200
        assert ask(server, context=tls_context(place, "client"))[0] == 200
        with pytest.raises(OSError):  # noqa: PT011 - as above
            ask(server, context=tls_context(place, "stranger"))


@needs_openssl
def test_a_renewed_certificate_is_used_without_a_restart_once_its_key_is_there(place: Path) -> None:
    told: list[str] = []
    with serving(write(place, TLS), told.append) as server:
        first = serial_number(server, place)
        (place / "renewed.pem").replace(place / "server.pem")  # its key is late
        wait_until(lambda: ask(server, context=tls_context(place))[0] == 200 and told)
        assert told == [
            (
                f"{place / 'web.yml'}:3: tls_server_config.key_file: {place / 'server.key'} is not the key of "
                f"{place / 'server.pem'}"
            )
        ]
        assert serial_number(server, place) == first
        (place / "renewed.key").replace(place / "server.key")
        wait_until(lambda: serial_number(server, place) != first)
        assert told[1:] == [""]


@needs_openssl
def test_an_invalid_tls_file_keeps_the_previous_one_active(place: Path) -> None:
    told: list[str] = []
    file = write(place, TLS + CLIENTS)
    with serving(file, told.append) as server:
        for text, reason in (("", "the key "), (USERS, "basic_auth_users: the agent checks no passwords")):
            write(place, text)
            wait_until(lambda: ask(server, context=tls_context(place, "client"))[0] == 200 and told)
            assert reason in told.pop()
        file.unlink()
        wait_until(lambda: ask(server, context=tls_context(place, "client"))[0] == 200 and told)
        assert told.pop() == f"{file}: cannot be read: No such file or directory"
        with pytest.raises(OSError):  # noqa: PT011 - as above
            ask(server, context=tls_context(place))
        write(place, TLS)
        wait_until(lambda: ask(server, context=tls_context(place, "client"))[0] == 200 and "" in told)
        assert ask(server, context=tls_context(place))[0] == 200


@needs_openssl
def test_many_connections_check_the_tls_files_rarely(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(place, TLS)
    now, looks = [1000.0], list[float]()
    look = tls._fingerprints

    def counted(files: tuple[Path, ...]) -> tuple[object, ...]:
        looks.append(now[0])
        return look(files)

    monkeypatch.setattr(tls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tls, "_fingerprints", counted)
    current = Tls(file, lambda _: None)
    for at in (1000.0, 1000.5, 1001.0, 1001.5, 1002.0):
        now[0] = at
        for _ in range(100):
            current.context()
    assert looks == [1000.0, 1001.0, 1002.0]


# --- the file


def problems(file: Path) -> list[str]:
    with pytest.raises(TlsError) as caught:
        load_web_config(file)
    return [line.replace(str(file.parent), "DIR").replace("\\", "/") for line in str(caught.value).splitlines()]


@needs_openssl
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tls_server_config:\n  cert_file: server.pem\n",
            ['DIR/web.yml:2: tls_server_config: the key "key_file" is missing'],
        ),
        (
            "tls_server_config: {cert_file: server.pem, key_file: none.key}",
            ["DIR/web.yml:1: tls_server_config.key_file: DIR/none.key: cannot be read: No such file or directory"],
        ),
        (
            'tls_server_config: {cert_file: "server.pem\\0", key_file: server.key}',
            ["DIR/web.yml:1: tls_server_config.cert_file: the character U+0000 cannot be part of it: remove it"],
        ),
        (
            f"{TLS}  client_ca_file: ca.pem\n",
            [
                (
                    "DIR/web.yml:1: tls_server_config: client_auth_type and client_ca_file go together: "
                    "client_auth_type is missing"
                )
            ],
        ),
        (
            f"{TLS}  client_auth_type: RequireAnyClientCert\n",
            [
                (
                    "DIR/web.yml:4: tls_server_config.client_auth_type: expected one of NoClientCert, "
                    'VerifyClientCertIfGiven, RequireAndVerifyClientCert; got "RequireAnyClientCert"; '
                    'did you mean "RequireAndVerifyClientCert"?'
                )
            ],
        ),
        (
            f"{TLS}  cipher_suites: [A]\nhttp_server_config:\n  http2: true\ntls: {{}}\n",
            [
                (
                    'DIR/web.yml:4: tls_server_config: unknown key "cipher_suites"; known here: cert_file, '
                    "key_file, client_auth_type, client_ca_file, min_version"
                ),
                'DIR/web.yml:5: unknown key "http_server_config"; did you mean "tls_server_config"?',
                "DIR/web.yml:7: unknown key (not shown here, for it may be secret); known here: tls_server_config",
            ],
        ),
        (
            f"{TLS}basic_auth_users:\n  ada: x\n",
            [
                (
                    "DIR/web.yml:4: basic_auth_users: the agent checks no passwords: ask for client certificates "
                    "(client_auth_type: RequireAndVerifyClientCert), or have a reverse proxy ask for passwords"
                )
            ],
        ),
        ("", ['DIR/web.yml:1: the key "tls_server_config" is missing']),
    ],
)
def test_an_error_in_the_access_file_is_reported_with_its_line(
    place: Path, text: str, expected: list[str]
) -> None:
    assert problems(write(place, text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "root:*:20785:0:99999:7:::\n",
        "correct-horse: *:20785:0:99999:7:::\n",
        "{correct-horse: 1, correct-horse: 2, *correct: 3}\n",
        "correct-horse: 1\ncorrect-horse: 2\n",
        "tls_server_config: {correct-horse: battery}\n",
        "tls_server_config: correct-horse\n",
        "!correct-horse {}\n",
        "!correct-horse\n",
        "- correct-horse\n",
        "correct-horse battery\n\tstaple\n",
        "[correct-horse\n",
        "&correct-horse\n*correct-horse2\n",
        "? {correct-horse: battery}\n",
    ],
)
def test_nothing_of_a_file_that_is_named_by_mistake_is_quoted(place: Path, text: str) -> None:
    shown = problems(write(place, text))
    assert shown
    assert not re.search("root|correct|horse|battery|staple|20785", "\n".join(shown))


def test_an_impossible_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="cannot be read: embedded null"):
        load_web_config(tmp_path / "a\0b")


@needs_openssl
@pytest.mark.parametrize("key", ["server.pem", "ca.key", "locked.key"])
def test_an_invalid_foreign_or_encrypted_key_is_rejected(place: Path, key: str) -> None:
    (line,) = problems(write(place, TLS.replace("server.key", key)))
    assert line.startswith(
        ("DIR/web.yml:2: tls_server_config.cert_file: ", "DIR/web.yml:3: tls_server_config.key_file")
    )


@needs_openssl
def test_the_documented_access_file_works_unchanged(place: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "web.md").read_text(encoding="utf-8")
    (text,) = [
        block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "tls_server_config" in block
    ]
    with serving(write(place, text)) as server:
        assert ask(server, context=tls_context(place))[0] == 200
    with serving(write(place, text.replace("# client_", "client_"))) as server:
        assert ask(server, context=tls_context(place, "client"))[0] == 200
    for block in re.findall(r"```yaml\n(agent:.*?)```", page, re.DOTALL):
        assert parse_settings(block, "docs/web.md").warnings == ()


# --- what ``check`` says


def lines_of_web_config(loaded: LoadedPolicy) -> list[str]:
    found = preflight.problems(loaded, preflight.check_machine(loaded, is_root=host.is_privileged()))
    return [problem.text for problem in found if problem.path == "agent.web_config"]


@needs_openssl
@pytest.mark.parametrize(
    ("listen", "text", "expected"),
    [
        ("'[::1]:9769'", TLS, []),
        ("127.8.9.1:9769", TLS, []),
        ("0.0.0.0:9769", TLS + CLIENTS, []),
        ("0.0.0.0:9769", TLS, ["every client that reaches the pages may read them: ask for client certificates"]),
        ("off", "nonsense", []),
        ("127.0.0.1:9769", "", [('without it no pages are served: DIR/web.yml:1: the key "tls_server_config" '
                                "is missing")]),
    ],
)  # fmt: skip
def test_check_reports_endpoints_that_are_open_to_others(
    place: Path, listen: str, text: str, expected: list[str]
) -> None:
    file = write(place, text)
    loaded = parse_settings(f"agent:\n  listen: {listen}\n  web_config: '{file}'\n", "p")
    assert loaded.warnings == ()
    found = [line.partition("agent.web_config: ") for line in lines_of_web_config(loaded)]
    messages = [message.replace(str(place), "DIR").replace("\\", "/") for _, _, message in found]
    # (Whether others could change or read the files depends on where the tests run.)
    assert [text for text in messages if not re.search("could change|can be (changed|read) by", text)] == expected
    assert {place for place, _, _ in found} <= {"p:3: "}


@needs_openssl
@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's; Windows' lists have tests of their own")
def test_check_reports_accounts_that_could_change_the_access_file(place: Path) -> None:
    file = write(place, TLS + CLIENTS)
    loaded = parse_settings(f"agent:\n  web_config: '{file}'\n", "p")
    (place / "ca.pem").chmod(0o666)
    (text,) = [line for line in lines_of_web_config(loaded) if "ca.pem can be changed by" in line]
    assert text.startswith(f"p:2: agent.web_config: {place / 'ca.pem'} can be changed by every account, ")
    place.chmod(0o777)
    found = [line for line in lines_of_web_config(loaded) if f"{place} can be changed by" in line]
    assert len(found) == 1  # though four files are in it


@pytest.fixture
def shared_place(certificates: Path) -> Iterator[Path]:
    """A directory with copies that every account can pass through, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="web-access-") as name:
        place = Path(shutil.copytree(certificates, Path(name) / "etc"))
        for directory in (place, place.parent):
            directory.chmod(0o755)
        yield place


def exposures(file: Path) -> list[str]:
    loaded = parse_settings(f"agent:\n  web_config: '{file}'\n", "p")
    return [line for line in lines_of_web_config(loaded) if "can be read by" in line]


@needs_openssl
@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_check_reports_a_key_that_every_account_can_read(shared_place: Path) -> None:
    file, key = write(shared_place, TLS), shared_place / "server.key"
    key.chmod(0o644)
    (shared_place / "server.pem").chmod(0o644)  # which is public
    told = f"p:2: agent.web_config: {key} can be read by every account: chmod o-r {key}"
    assert exposures(file) == [told]
    (shared_place / "link.key").symlink_to("server.key")
    link = write(shared_place, TLS.replace("server.key", "link.key"))
    assert exposures(link) == [told]
    key.chmod(0o640)  # a group that root has made for it, such as ssl-cert
    assert exposures(file) == []


@needs_openssl
@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_a_key_that_no_other_account_can_reach_may_have_any_mode(shared_place: Path) -> None:
    file = write(shared_place, TLS)
    (shared_place / "server.key").chmod(0o644)
    assert exposures(file) != []
    shared_place.chmod(0o710)  # as Debian's /etc/ssl/private
    assert exposures(file) == []
    assert host.find_read_risk(shared_place / "missing.key") is None


@pytest.mark.skipif(sys.platform != "win32", reason="access lists are Windows'")
@pytest.mark.parametrize(
    ("others", "is_exposed"),
    [("", False), ("(A;;FR;;;BU)", True), ("(A;;FR;;;WD)", True), ("(A;;FR;;;S-1-5-21-1-2-3-1001)", False)],
)
def test_on_windows_the_access_list_shows_whether_every_account_can_read_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: str, is_exposed: bool
) -> None:
    import win32security

    from scheduled_events_agent.host.windows import permissions

    # Wine takes lists and keeps none: so one is given instead.
    descriptor = win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(
        f"O:BAD:P(A;;FA;;;SY){others}", win32security.SDDL_REVISION_1
    )
    monkeypatch.setattr(permissions, "_descriptor", lambda _: descriptor)
    key = tmp_path / "server.key"
    fault = host.find_read_risk(key)
    assert (fault is not None) == is_exposed
    assert fault is None or fault.startswith(f"{key} can be read by S-1-")


@pytest.mark.parametrize("listen", ["0.0.0.0:9769", "'[::]:9769'", "10.1.2.3:9769", "vm.example.com:9769"])
def test_check_reports_that_without_an_access_file_the_endpoints_are_open_to_all(listen: str) -> None:
    (warning,) = parse_settings(f"agent:\n  listen: {listen}\n", "p").warnings
    text = "every client that reaches this address may read the pages: name a file with TLS as web_config"
    assert str(warning) == f"p:2: warning: agent.listen: {text}"


@needs_openssl
def test_a_rejected_certificate_is_an_attention_item_until_a_valid_one_is_there(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_POLL_SECONDS", 0.0)
    settings = AgentSettings(listen="127.0.0.1:0", web_config=str(write(place, TLS)))
    tls_context = ssl.create_default_context(cafile=str(place / "ca.pem"))
    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path / "state", azure.endpoint(), agent=settings) as daemon,
    ):
        wait_until(lambda: daemon.web)

        def kinds() -> list[str]:
            assert daemon.web is not None
            connection = http.client.HTTPSConnection("127.0.0.1", daemon.web.port, timeout=60, context=tls_context)
            connection.request("GET", "/status")
            status = json.loads(connection.getresponse().read())
            connection.close()
            return [one["kind"] for one in status["attention"]]

        assert kinds() == []
        good = (place / "server.pem").read_bytes()
        (place / "server.pem").write_text("no certificate")
        wait_until(lambda: kinds() == ["web_config_rejected"])
        (place / "server.pem").write_bytes(good)
        wait_until(lambda: kinds() == [])
