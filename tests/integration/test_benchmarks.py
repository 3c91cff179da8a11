"""The benchmarks run and print every row; the figures are not judged here."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest

from benchmarks.programs import fetch

ROWS = [
    ("CPU of a poll, 0 events pending", "ms", None),
    ("the same as a ratio to httpx", "x", 1.3),
    ("wake-ups a second", "", None),
    ("CPU of a poll, 10 events pending", "ms", None),
    ("the same as a ratio to none", "x", 2.0),
    *((f"CPU of {page}, 1,000 x 100 pending", "ms", 15.0) for page in ("/metrics", "/status", "/")),
    ("served to the first hook, p50", "ms", None),
    ("served to the first hook, p99", "ms", 10.0),
    ("served to the first hook, max", "ms", 30.0),
    ("served to the approval, p50", "ms", None),
    ("served to the approval, p99", "ms", 10.0),
    ("served to the approval, max", "ms", 30.0),
    ("CPU from exec to the first poll, no history", "ms", 200.0),
    ("CPU from exec to the first poll, 100 past events", "ms", 200.0),
    ("CPU of python -c pass", "ms", None),
    ("CPU of --help", "ms", 100.0),
    ("the same of --help as a ratio to python -c pass", "x", 3.0),
    *((f"CPU of {command}", "ms", 100.0) for command in ("--version", "status", "check", "history")),
    ("resident memory after the first event", "MiB", 36.0),
    ("more of it when 1,000 x 100 have come and gone", "MiB", 8.0),
    ("growth over 300 polls after that", "MiB", 1.0),
]


on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="CPU time and memory are read from Linux"
)


@on_linux
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_quick_run_prints_every_row() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["figure"], row["unit"], row["target"]) for row in result["rows"]] == ROWS
    by_difference = ("growth", "more of it")
    assert all(row["agent"] > 0 for row in result["rows"] if not row["figure"].startswith(by_difference))
    assert {len(row["loops"]) for row in result["rows"]} == {0, 2}
    assert result["command"].endswith("-m benchmarks --quick --json")
    assert f"Python {sys.version.split()[0]}" in result["machine"]


@on_linux
def test_a_run_that_is_killed_leaves_no_agent_behind() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stderr is not None
            assert bench.stderr.readline() == "measuring idle polls ...\n"
            programs: list[psutil.Process] = []
            while len(programs) < 2:  # the agent and the loop
                programs = psutil.Process(bench.pid).children()
        finally:
            bench.kill()
    gone, alive = psutil.wait_procs(programs, timeout=60)
    for process in alive:
        process.kill()
    assert (len(gone), alive) == (2, [])


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A page that answers with the status of the test's parameter."""
    status: int = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/readyz"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("url", "is_survived"), [(503, True), (500, False)], indirect=["url"])
def test_a_page_that_is_not_ready_does_not_end_the_run(url: str, is_survived: bool) -> None:
    with contextlib.nullcontext() if is_survived else pytest.raises(HTTPError):
        fetch(url)
