"""TLS, client certificates and passwords over real sockets, with certificates made for the purpose."""

import base64
import http.client
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agent import access, host, web
from agent.access import Access, AccessError, load_web_config
from agent.settings import parse_settings
from agent.settings.files import check_files
from agent.web import Page, WebServer

PAGES = {
    "/metrics": lambda: Page(HTTPStatus.OK, b"# metrics\n"),
    "/readyz": lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready: Reboot A is preparing\n"),
    "/big": lambda: Page(HTTPStatus.OK, b"x" * 3_000_000),
}
# Of "secret", at the lowest cost.
ADA = "$2y$04$xnhoPzvIyMJAOuaa/.TddONXemnD.SORiTdQlZLn8JdDpKgjaqJtS"
needs_bcrypt = pytest.mark.skipif(find_spec("bcrypt") is None, reason="passwords need bcrypt, which is optional")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two authorities: a server's, and clients'; and the server's again, as it is after a renewal."""
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
USERS = f"basic_auth_users:\n  ada: {ADA}\n"


@contextmanager
def serving(file: Path, tell: Callable[[str], None] = lambda _: None) -> Iterator[WebServer]:
    door = Access(file, tell)
    server = WebServer("127.0.0.1:0", PAGES, access=door)
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(0.05):
            door.look()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        thread.join()
        server.close()


def trusting(place: Path, client: str = "", newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(place / "ca.pem"))
    if client:
        context.load_cert_chain(place / f"{client}.pem", place / f"{client}.key")
    if newest:
        context.maximum_version = newest
    return context


def ask(
    server: WebServer, path: str = "/metrics", context: ssl.SSLContext | None = None, credentials: str = ""
) -> tuple[int, str]:
    connection: http.client.HTTPConnection
    if context:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"} if credentials else {}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def serial_number(server: WebServer, place: Path) -> str:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain,
        trusting(place).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
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
def test_pages_come_over_tls_also_large_ones(place: Path) -> None:
    with serving(write(place, TLS)) as server:
        assert ask(server, context=trusting(place)) == (200, "# metrics\n")
        assert len(ask(server, "/big", trusting(place))[1]) == 3_000_000


@needs_bcrypt
@needs_openssl
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_gets_a_page_over_tls_with_a_certificate_and_a_password(place: Path) -> None:
    with serving(write(place, TLS + CLIENTS + USERS)) as server:
        client = ["--cacert", "ca.pem", "--cert", "client.pem", "--key", "client.key", "--user", "ada:secret"]
        url = f"https://localhost:{server.port}/metrics"
        done = subprocess.run(["curl", "-sS", *client, url], cwd=place, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("# metrics\n", "")


@needs_openssl
def test_old_tls_is_refused_and_newer_if_the_file_says_so(place: Path) -> None:
    only_12 = ssl.TLSVersion.TLSv1_2
    with serving(write(place, TLS)) as server:
        assert ask(server, context=trusting(place, newest=only_12))[0] == 200
    with serving(write(place, f"{TLS}  min_version: TLS13\n")) as server:
        assert ask(server, context=trusting(place))[0] == 200
        with pytest.raises(ssl.SSLError):
            ask(server, context=trusting(place, newest=only_12))


@needs_openssl
def test_plain_http_to_the_port_is_told_so(place: Path) -> None:
    with serving(write(place, TLS)) as server:
        assert ask(server) == (400, "this port speaks TLS: ask with https://\n")


@needs_openssl
@pytest.mark.parametrize("beginning", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_who_stops_in_the_middle_of_a_handshake_holds_up_nobody_and_is_let_go(
    place: Path, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_TIMEOUT_SECONDS", 1.5)
    with serving(write(place, TLS)) as server:
        mute = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        mute.sendall(beginning)
        wait_until(lambda: server._clients)
        assert ask(server, context=trusting(place))[0] == 200
        with mute, suppress(ConnectionResetError):  # let go with bytes of it unread
            assert mute.recv(100) == b""
        wait_until(lambda: not server._clients)


@needs_openssl
def test_a_crowd_that_never_ends_its_handshake_keeps_nobody_out(place: Path) -> None:
    with serving(write(place, TLS)) as server:
        crowd = [
            socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(web._MAX_CLIENTS * 2)
        ]
        for client in crowd:
            client.sendall(b"\x16\x03\x01")
        assert ask(server, context=trusting(place))[0] == 200
        for client in crowd:
            client.close()


@needs_openssl
def test_only_clients_with_a_certificate_of_the_authority_get_in(place: Path) -> None:
    with serving(write(place, TLS + CLIENTS)) as server:
        assert ask(server, context=trusting(place, "client")) == (200, "# metrics\n")
        for client in ("", "stranger"):
            with pytest.raises(OSError):  # noqa: PT011 - the alert, or a reset connection, comes late or early
                ask(server, "/readyz", trusting(place, client))
        assert ask(server, context=trusting(place, "client"))[0] == 200


@needs_openssl
def test_a_certificate_that_may_be_given_is_looked_at_if_it_is(place: Path) -> None:
    text = CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    with serving(write(place, TLS + text)) as server:
        assert ask(server, context=trusting(place))[0] == 200
        assert ask(server, context=trusting(place, "client"))[0] == 200
        with pytest.raises(OSError):  # noqa: PT011 - as above
            ask(server, context=trusting(place, "stranger"))


@needs_openssl
def test_a_renewed_certificate_is_used_without_a_restart_and_one_without_its_key_is_not(place: Path) -> None:
    told: list[str] = []
    with serving(write(place, TLS), told.append) as server:
        first = serial_number(server, place)
        (place / "renewed.pem").replace(place / "server.pem")  # its key is late
        wait_until(lambda: ask(server, context=trusting(place))[0] == 200 and told)
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


@needs_bcrypt
@needs_openssl
def test_what_can_no_longer_be_read_leaves_the_doors_as_they_were(place: Path) -> None:
    told: list[str] = []
    file = write(place, TLS + USERS)
    with serving(file, told.append) as server:
        assert ask(server, context=trusting(place), credentials="ada:secret")[0] == 200
        file.unlink()
        wait_until(lambda: ask(server, context=trusting(place), credentials="ada:secret")[0] == 200 and told)
        assert told == [f"{file}: cannot be read: No such file or directory"]
        assert ask(server, context=trusting(place))[0] == 401
        write(place, TLS)
        wait_until(lambda: ask(server, context=trusting(place))[0] == 200)


# --- passwords


@needs_bcrypt
def test_pages_need_a_name_and_its_password_and_probes_do_not(tmp_path: Path) -> None:
    with serving(write(tmp_path, USERS)) as server:
        assert ask(server, credentials="ada:secret") == (200, "# metrics\n")
        assert ask(server, "/readyz", credentials="ada:secret")[1] == "not ready: Reboot A is preparing\n"
        assert ask(server) == (401, "a name and a password are needed\n")
        assert ask(server, "/nothing")[0] == 401
        assert ask(server, "/readyz") == (503, "no\n")  # a load balancer cannot have one


@needs_bcrypt
def test_who_has_no_password_is_told_how_to_give_one(tmp_path: Path) -> None:
    with serving(write(tmp_path, USERS)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("HEAD", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 401
        assert answer.getheader("WWW-Authenticate") == 'Basic realm="scheduled-events-agent", charset="UTF-8"'
        connection.close()


@needs_bcrypt
@pytest.mark.parametrize(
    "credentials",
    [
        "ada:Secret",
        "ada:",
        "ada:secret ",
        "Ada:secret",
        "eve:secret",
        ":",
        "ada",
        "ada:se\0cret",
        "ada:" + "x" * 5000,
    ],
)
def test_a_wrong_name_or_password_is_refused(tmp_path: Path, credentials: str) -> None:
    with serving(write(tmp_path, USERS)) as server:
        assert ask(server, credentials=credentials)[0] == 401


@needs_bcrypt
@pytest.mark.parametrize(
    "header", ["Basic", "Basic =", "Basic %%%", "Bearer YWRhOnNlY3JldA==", "Basic /w==", "x" * 999]
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: str) -> None:
    assert not Access(write(tmp_path, USERS), lambda _: None).admits(header, "127.0.0.1")


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


@needs_bcrypt
def test_a_password_that_was_right_once_costs_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bcrypt

    checks: list[bytes] = []
    check = bcrypt.checkpw

    def counting(password: bytes, hashed: bytes) -> bool:
        checks.append(password)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counting)
    door = Access(write(tmp_path, USERS), lambda _: None)
    assert [door.admits(basic("ada:secret"), "10.0.0.1") for _ in range(50)] == [True] * 50
    assert checks == [b"secret"]
    assert not door.admits(basic("ada:guess"), "10.0.0.1")
    assert door.admits(basic("ada:secret"), "10.0.0.1")
    assert checks == [b"secret", b"guess"]


@needs_openssl
@needs_bcrypt
def test_a_renewed_certificate_makes_nobody_unknown_and_a_changed_password_does(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bcrypt

    checks: list[bytes] = []
    check = bcrypt.checkpw

    def counting(password: bytes, hashed: bytes) -> bool:
        checks.append(hashed)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counting)
    door = Access(write(place, TLS + USERS), lambda _: None)
    context = door.tls
    assert door.admits(basic("ada:secret"), "10.0.0.1")
    (place / "renewed.key").replace(place / "server.key")
    (place / "renewed.pem").replace(place / "server.pem")
    door.look()
    assert door.tls is not context
    assert door.admits(basic("ada:secret"), "10.0.0.1")
    assert checks == [ADA.encode()]
    changed = bcrypt.hashpw(b"changed", bcrypt.gensalt(4))
    write(place, f"{TLS}basic_auth_users:\n  ada: {changed.decode()}\n")
    door.look()
    assert not door.admits(basic("ada:secret"), "10.0.0.1")
    assert door.admits(basic("ada:changed"), "10.0.0.1")


@needs_bcrypt
def test_guessing_is_slow_costs_little_and_keeps_no_known_client_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bcrypt

    began, may_end = threading.Semaphore(0), threading.Event()

    def slow(_password: bytes, _hashed: bytes) -> bool:
        began.release()
        assert may_end.wait(30)
        return False

    door = Access(write(tmp_path, USERS), lambda _: None)
    assert door.admits(basic("ada:secret"), "10.0.0.1")
    monkeypatch.setattr(access, "_MAX_REST_SECONDS", 0.1)
    monkeypatch.setattr(bcrypt, "checkpw", slow)
    addresses = [f"10.0.0.{number}" for number in range(2, 2 + access._MAX_WAITING)]
    guesses = [threading.Thread(target=door.admits, args=(basic("ada:x"), address)) for address in addresses]
    for thread in guesses:
        thread.start()
    assert began.acquire(timeout=30)
    passwords = door._in_force.passwords
    assert passwords is not None
    wait_until(lambda: len(passwords._waiting) == access._MAX_WAITING)
    assert not began.acquire(timeout=0.2)  # one at a time
    for address in (addresses[0], "10.0.0.99"):
        with pytest.raises(access.TooManyError):
            door.admits(basic("ada:y"), address)
    assert door.admits(basic("ada:secret"), "10.0.0.1")
    may_end.set()
    for thread in guesses:
        thread.join()


@needs_bcrypt
def test_who_guesses_faster_than_is_checked_is_told_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> bool:
        raise access.TooManyError("other passwords are being checked; try again in a few seconds", kind="busy")

    monkeypatch.setattr(Access, "admits", busy)
    with serving(write(tmp_path, USERS)) as server:
        assert ask(server) == (429, "other passwords are being checked; try again in a few seconds\n")
        assert ask(server, "/readyz") == (503, "no\n")


# --- the file


def problems(file: Path) -> list[str]:
    with pytest.raises(AccessError) as caught:
        load_web_config(file)
    return [line.replace(str(file.parent), "DIR").replace("\\", "/") for line in str(caught.value).splitlines()]


@needs_bcrypt
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
            ["DIR/web.yml:1: tls_server_config.key_file: DIR/none.key cannot be read: No such file or directory"],
        ),
        (
            'tls_server_config: {cert_file: "server.pem\\0", key_file: server.key}',
            ["DIR/web.yml:1: tls_server_config.cert_file: DIR/server.pem\0 cannot be read: embedded null byte"],
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
                    'VerifyClientCertIfGiven, RequireAndVerifyClientCert; got "RequireAnyClientCert"'
                )
            ],
        ),
        (
            f"{TLS}  cipher_suites: [A]\nhttp_server_config:\n  http2: true\nbasic_auth_user: {{}}\n",
            [
                (
                    "DIR/web.yml:4: tls_server_config.cipher_suites: "
                    "this part of the convention is not known here: remove it"
                ),
                "DIR/web.yml:5: http_server_config: this part of the convention is not known here: remove it",
                'DIR/web.yml:7: unknown key "basic_auth_user"; did you mean "basic_auth_users"?',
            ],
        ),
        (
            "basic_auth_users: {ada: plain-text-password}",
            [
                (
                    "DIR/web.yml:1: basic_auth_users.ada: "
                    'expected a bcrypt hash ("htpasswd -nBC 10 NAME" makes one); got something else'
                )
            ],
        ),
        (
            f"basic_auth_users:\n  ada: {ADA.replace('$04$', '$31$')}\n",
            [
                (
                    "DIR/web.yml:2: basic_auth_users.ada: "
                    "expected a cost of 4 to 14, for each check doubles with it; got 31"
                )
            ],
        ),
        (
            "basic_auth_users: ada:secret",
            [
                (
                    "DIR/web.yml:1: basic_auth_users: "
                    "expected keys with values; got a text, not shown here for it may be secret"
                )
            ],
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_line(place: Path, text: str, expected: list[str]) -> None:
    assert problems(write(place, text)) == expected


def test_a_path_that_can_be_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="cannot be read: embedded null"):
        load_web_config(tmp_path / "a\0b")


@needs_bcrypt
def test_a_hash_that_can_be_of_no_password_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    for last, is_right in (("u", True), ("v", False), ("O", True), ("0", False)):
        file.write_text(f"basic_auth_users: {{ada: {ADA[:28]}{last}{ADA[29:]}}}")
        if is_right:
            assert Access(file, lambda _: None).admits(basic("ada:wrong"), "here") is False
        else:
            assert "expected a bcrypt hash" in problems(file)[0]


@needs_openssl
@pytest.mark.parametrize("key", ["server.pem", "ca.key", "locked.key"])
def test_a_key_that_is_none_not_the_right_one_or_locked_is_refused_without_asking_anybody(
    place: Path, key: str
) -> None:
    (line,) = problems(write(place, TLS.replace("server.key", key)))
    assert line.startswith(
        ("DIR/web.yml:2: tls_server_config.cert_file: ", "DIR/web.yml:3: tls_server_config.key_file")
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "basic_auth_users: {}\n"])
def test_a_file_that_asks_for_nothing_opens_no_door(tmp_path: Path, text: str) -> None:
    (line,) = problems(write(tmp_path, text))
    assert line == (
        "DIR/web.yml: expected tls_server_config or basic_auth_users, got neither: "
        "remove agent.web_config if the pages are to be open"
    )


@needs_bcrypt
def test_a_file_that_is_being_written_leaves_the_doors_as_they_were(tmp_path: Path) -> None:
    told: list[str] = []
    with serving(write(tmp_path, USERS), told.append) as server:
        write(tmp_path, "")
        wait_until(lambda: ask(server)[0] == 401 and told)
        assert ask(server, credentials="ada:secret")[0] == 200


@needs_bcrypt
@needs_openssl
def test_the_file_of_the_documentation_can_be_used_as_it_is(place: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "web.md").read_text(encoding="utf-8")
    (text,) = [
        block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "tls_server_config" in block
    ]
    with serving(write(place, text)) as server:
        assert ask(server, context=trusting(place))[0] == 401
    with serving(write(place, text.replace("# client_", "client_"))) as server:
        assert ask(server, context=trusting(place, "client"))[0] == 401
    for block in re.findall(r"```yaml\n(agent:.*?)```", page, re.DOTALL):
        assert parse_settings(block, "docs/web.md").warnings == ()


def test_where_bcrypt_cannot_be_loaded_passwords_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    assert problems(write(tmp_path, USERS)) == [
        (
            "DIR/web.yml:1: basic_auth_users: bcrypt, which checks passwords, cannot be loaded "
            "(import of bcrypt halted; None in sys.modules): "
            "ask for client certificates instead, or have a proxy ask for passwords"
        )
    ]


# --- what ``check`` says


@needs_bcrypt
@needs_openssl
@pytest.mark.parametrize(
    ("listen", "text", "expected"),
    [
        ("127.0.0.1:9769", USERS, []),
        ("'[::1]:9769'", USERS, []),
        ("127.8.9.1:9769", TLS, []),
        ("0.0.0.0:9769", TLS + USERS, []),
        ("0.0.0.0:9769", TLS + CLIENTS, []),
        ("0.0.0.0:9769", TLS, [("whoever reaches the pages may read them: add basic_auth_users, or ask for client "
                               "certificates")]),
        ("0.0.0.0:9769", USERS, [("passwords would travel as everybody on the way can read them: add "
                                 "tls_server_config")]),
        ("off", "nonsense", []),
        ("127.0.0.1:9769", "x: 1", [('without it the pages are not shown: DIR/web.yml:1: unknown key "x"; known '
                                    "here: tls_server_config, basic_auth_users")]),
    ],
)  # fmt: skip
def test_check_tells_when_the_pages_are_open_to_others(
    place: Path, listen: str, text: str, expected: list[str]
) -> None:
    file = write(place, text)
    loaded = parse_settings(f"agent:\n  listen: {listen}\n  web_config: '{file}'\n", "p")
    assert loaded.warnings == ()
    found = [problem for problem in check_files(loaded) if problem.path == "agent.web_config"]
    messages = [problem.message.replace(str(place), "DIR").replace("\\", "/") for problem in found]
    # (Whether others could change or read the files depends on where the tests run.)
    assert [text for text in messages if not re.search("could change|can be (changed|read) by", text)] == expected
    assert {problem.line for problem in found} <= {3}


@needs_openssl
@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's; Windows' lists have tests of their own")
def test_check_tells_who_could_let_themselves_in(place: Path) -> None:
    file = write(place, TLS + CLIENTS)
    loaded = parse_settings(f"agent:\n  web_config: '{file}'\n", "p")
    (place / "ca.pem").chmod(0o666)
    (text,) = [str(problem) for problem in check_files(loaded) if "ca.pem can be changed by" in str(problem)]
    assert text.startswith(f"p:2: agent.web_config: {place / 'ca.pem'} can be changed by everybody, ")
    place.chmod(0o777)
    found = [str(problem) for problem in check_files(loaded) if f"{place} can be changed by" in str(problem)]
    assert len(found) == 1  # though four files are in it


@pytest.fixture
def shared_place(certificates: Path) -> Iterator[Path]:
    """A directory with copies that everybody can pass through, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="web-access-") as name:
        place = Path(shutil.copytree(certificates, Path(name) / "etc"))
        for directory in (place, place.parent):
            directory.chmod(0o755)
        yield place


def exposures(file: Path) -> list[str]:
    loaded = parse_settings(f"agent:\n  web_config: '{file}'\n", "p")
    return [str(problem) for problem in check_files(loaded) if "can be read by" in str(problem)]


@needs_openssl
@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_check_tells_that_everybody_can_read_the_key(shared_place: Path) -> None:
    file, key = write(shared_place, TLS), shared_place / "server.key"
    key.chmod(0o644)
    (shared_place / "server.pem").chmod(0o644)  # which is for everybody
    told = f"p:2: agent.web_config: {key} can be read by everybody: chmod o-r {key}"
    assert exposures(file) == [told]
    (shared_place / "link.key").symlink_to("server.key")
    link = write(shared_place, TLS.replace("server.key", "link.key"))
    assert exposures(link) == [told]
    key.chmod(0o640)  # a group that root has made for it, such as ssl-cert
    assert exposures(file) == []


@needs_openssl
@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_a_key_that_nobody_else_can_get_at_may_have_any_mode(shared_place: Path) -> None:
    file = write(shared_place, TLS)
    (shared_place / "server.key").chmod(0o644)
    assert exposures(file) != []
    shared_place.chmod(0o710)  # as Debian's /etc/ssl/private
    assert exposures(file) == []
    assert host.exposure_fault(shared_place / "missing.key") is None


@pytest.mark.skipif(sys.platform != "win32", reason="access lists are Windows'")
@pytest.mark.parametrize(
    ("others", "is_told"),
    [("", False), ("(A;;FR;;;BU)", True), ("(A;;FR;;;WD)", True), ("(A;;FR;;;S-1-5-21-1-2-3-1001)", False)],
)
def test_on_windows_its_list_tells_whether_everybody_can_read_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: str, is_told: bool
) -> None:
    import win32security

    from agent.host import windows_paths

    # Wine takes lists and keeps none: so one is given instead.
    descriptor = win32security.ConvertStringSecurityDescriptorToSecurityDescriptor(
        f"O:BAD:P(A;;FA;;;SY){others}", win32security.SDDL_REVISION_1
    )
    monkeypatch.setattr(windows_paths, "_descriptor", lambda _: descriptor)
    key = tmp_path / "server.key"
    fault = host.exposure_fault(key)
    assert (fault is not None) == is_told
    assert fault is None or fault.startswith(f"{key} can be read by S-1-")


@needs_openssl
def test_whatever_is_wrong_while_a_file_is_read_leaves_the_doors_as_they_were(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    file = write(place, TLS)
    door = Access(file, told.append)
    context = door.tls

    def parse(_path: Path) -> object:
        raise RecursionError("too deep")

    monkeypatch.setattr(access, "_parse", parse)
    door.look()
    door.look()
    assert door.tls is context
    assert told == [f"{file}: a bug in the agent: RecursionError('too deep')"]


@pytest.mark.parametrize("listen", ["0.0.0.0:9769", "'[::]:9769'", "10.1.2.3:9769", "vm.example.com:9769"])
def test_check_tells_that_the_pages_are_open_to_all_without_such_a_file(listen: str) -> None:
    (warning,) = parse_settings(f"agent:\n  listen: {listen}\n", "p").warnings
    text = "whoever reaches this address may read the pages: name a file with TLS and passwords as web_config"
    assert str(warning) == f"p:2: agent.listen: {text}"
