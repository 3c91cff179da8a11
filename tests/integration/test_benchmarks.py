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

from benchmarks.agents import fetch

ROWS = [
    ("CPU per idle poll, whole process", "ms", 2.0),
    ("CPU per paced poll, client alone (bare: httpx.Client)", "ms", None),
    ("the same as a ratio", "x", 1.5),
    ("resident memory after the first event", "MiB", None),
    ("resident memory 300 polls later", "MiB", 40.0),
    ("growth between the two", "MiB", 1.0),
    ("exec to first poll, median", "s", 0.6),
    ("served to start of the first hook, p50", "ms", None),
    ("served to start of the first hook, p99", "ms", 25.0),
    ("served to arrival of the approval, p50", "ms", None),
    ("served to arrival of the approval, p99", "ms", 25.0),
    ("2.7 MiB, 1,000 events x 100 names: parsed (bare: json.loads)", "ms", 50.0),
    ("the same: parsed, compared, decided, committed", "ms", None),
    ("the same: served to the approval of all", "ms", None),
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
    assert all(row["agent"] >= 0 for row in result["rows"] if "growth" not in row["figure"])
    assert result["command"].endswith("-m benchmarks --quick --json")
    assert f"Python {sys.version.split()[0]}" in result["machine"]


@on_linux
def test_a_run_that_is_killed_leaves_no_agent_behind() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stderr is not None
            assert bench.stderr.readline() == "measuring CPU ...\n"
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
