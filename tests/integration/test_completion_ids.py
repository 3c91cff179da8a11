"""The ids that completion offers to an account that may not read the state: those of the pages, or none."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from scheduled_events_agent.cli import completion, main
from scheduled_events_agent.policy.load import CONFIG_VARIABLE
from scheduled_events_agent.policy.settings import AgentSettings

PENDING = ["602D9444-AAAA", "7A11-B"]
TIMEOUT = completion._STATUS_TIMEOUT_SECONDS


class Pages:
    """A server in the place of an agent's pages; ``answer`` writes the answer to a request."""

    def __init__(self) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda _: None
        self.paths: list[str] = []
        self.ended = Event()
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages.paths.append(self.path)
                pages.answer(self)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def serve(self, content: object, *, status: int = 200) -> None:
        """Answer each request with this JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()

        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(status)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)

        self.answer = answer


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    """Pages at the default address, and a state that this account cannot read."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"agent: {{state_dir: '{(tmp_path / 'absent').as_posix()}'}}\n", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(policy))
    pages = Pages()
    monkeypatch.setattr(completion, "_STATUS_TIMEOUT_SECONDS", 60.0)  # a busy machine is slow
    monkeypatch.setattr(completion, "STATUS_URL", f"http://127.0.0.1:{pages.server.server_port}/status")
    thread = Thread(target=pages.server.serve_forever)
    thread.start()
    yield pages
    pages.ended.set()
    pages.server.shutdown()
    thread.join()
    pages.server.server_close()


def ids(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["completion", "ids"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


def status(*event_ids: str, **more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "events": [{"id": event_id, "phase": "waiting"} for event_id in event_ids],
        **more,
    }


def test_the_pages_are_asked_where_an_agent_serves_them_by_default() -> None:
    assert f"http://{AgentSettings().listen}/status" == completion.STATUS_URL


def test_ids_come_from_the_pages_if_the_state_cannot_be_read(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.serve(status(*PENDING, PENDING[0]))
    assert ids(capsys) == (0, PENDING)
    pages.serve(status(state_lost={"at": "2026-03-04T03:11:42Z", "reason": "gone"}))
    assert ids(capsys) == (0, ["state_lost"])
    pages.serve(status(state_lost=None))
    assert ids(capsys) == (0, [])
    assert set(pages.paths) == {"/status"}


def test_an_id_of_the_pages_that_a_shell_could_read_as_something_else_is_left_out(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.serve(status("$(touch x)", "a b", "7A11-B\n", "`id`", "*", "7A11-B"))
    assert ids(capsys) == (0, ["7A11-B"])


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"<html>", 200),
        (b"", 200),
        ({"events": None}, 200),
        ({"events": [{"id": 1}]}, 200),
        ([], 200),
        (status(*PENDING), 503),
        (status(*PENDING), 302),
        (b"[" * 100_000, 200),
        (json.dumps(status(*PENDING)).encode() + b" " * completion._MAX_STATUS_BYTES, 200),
    ],
    ids=["html", "nothing", "null", "numbers", "list", "503", "302", "nested", "too long"],
)
def test_a_wrong_answer_of_the_pages_is_no_error(
    pages: Pages, content: object, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.serve(content, status=code)
    assert ids(capsys) == (1, [])


def test_pages_that_do_not_answer_are_not_waited_for(
    pages: Pages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_STATUS_TIMEOUT_SECONDS", TIMEOUT)
    waits: list[float] = []

    def wait(_: BaseHTTPRequestHandler) -> None:
        began = time.monotonic()
        pages.ended.wait(60)
        waits.append(time.monotonic() - began)

    pages.answer = wait
    assert ids(capsys) == (1, [])
    assert waits == []  # the command has ended before the server answers

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(600):
            try:
                request.wfile.write(b" ")
            except OSError:
                return
            if pages.ended.wait(0.05):
                return
        waits.append(30.0)

    pages.answer = drip
    assert ids(capsys) == (1, [])
    assert waits == []
    monkeypatch.setattr(completion, "STATUS_URL", "http://127.0.0.1:1/status")
    assert ids(capsys) == (1, [])


def test_no_proxy_is_asked_for_the_pages(
    pages: Pages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    pages.serve(status(*PENDING))
    assert ids(capsys) == (0, PENDING)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can become another account")
def test_an_account_that_may_not_read_the_state_gets_the_ids_of_the_pages(pages: Pages, tmp_path: Path) -> None:
    policy = Path(os.environ[CONFIG_VARIABLE])
    policy.chmod(0o600)
    (tmp_path / "absent").mkdir(mode=0o700)
    pages.serve(status(*PENDING))
    program = (
        "import os, sys\n"
        "from scheduled_events_agent import cli\n"
        "from scheduled_events_agent.cli import completion\n"
        "import httpx, yaml, scheduled_events_agent.http.transport, scheduled_events_agent.policy.load\n"
        "import encodings.idna, scheduled_events_agent.cli.config\n"
        f"completion.STATUS_URL = {completion.STATUS_URL!r}\n"
        "completion._STATUS_TIMEOUT_SECONDS = 60.0\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(cli.main(['completion', 'ids']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, PENDING, "")
