"""The benchmarks run, print every row and record a complete run; the figures are not judged here."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.report import PAGE, RECORD, SIDES, Row, Run, render, section_of
from benchmarks.sides import Side
from scheduled_events_agent.simulator import Simulator

CHECKOUT = Path(__file__).resolve().parents[2]


def rows_of(events: Sequence[str], past: str, vms: Sequence[int]) -> list[tuple[str, float | None]]:
    """Figure and target of each row, when so many events are pending or past, and for fleets of so many VMs."""
    commands = ("status", "history", f"status, {past}", f"history, {past}", "check", "explain", "explain DOCUMENT")
    fleets = [
        (figure, None)
        for count in vms
        for figure in (
            f"requests to the table, an event of {count} VMs",
            f"last of {count} VMs ready to the approval, ms",
            f"resident memory, fleet of {count}, MiB",
        )
    ]
    polls = [
        row
        for count in events
        for row in ((f"CPU of a poll, {count} events pending, ms", None), ("the same as a ratio to none", 2.0))
    ]
    return [
        ("CPU of a poll, 0 events pending, ms", None),
        ("the same as a ratio to httpx", 1.3),
        ("wake-ups a second", None),
        *polls,
        ("served to the first hook, p50, ms", None),
        ("served to the first hook, p99, ms", 10.0),
        ("served to the first hook, max, ms", 30.0),
        ("served to the approval, p50, ms", None),
        ("served to the approval, p99, ms", 10.0),
        ("served to the approval, max, ms", 30.0),
        ("CPU from exec to the first poll, ms", 200.0),
        (f"CPU from exec to the first poll, {past}, ms", 200.0),
        ("CPU of python -c pass, ms", None),
        ("CPU of --help, ms", None),
        ("CPU of --version, ms", None),
        *((f"CPU of {command}, ms", 100.0) for command in commands),
        *((f"CPU of {page}, 1,000 x 100 pending, ms", 15.0) for page in ("/metrics", "/status", "/")),
        ("resident memory after the first event, MiB", 36.0),
        ("more of it when 1,000 x 100 have come and gone, MiB", 8.0),
        ("resident memory, no fleet, MiB", None),
        *fleets,
    ]


LINE = re.compile(
    r"(?P<figure>.+?) {2,}(?P<samples>[\d,]+) +(?P<agent>-?[\d.]+)"
    r" +(?P<httpx>-|-?[\d.]+) +(?P<http>-|-?[\d.]+)(?: +<= (?P<target>[\d.]+) (?P<verdict>met|MISSED))?"
)


def rows_in(text: str) -> list[Row]:
    """The rows of a table, read back; the verdicts agree with them."""
    rows = []
    for found in filter(None, map(LINE.fullmatch, text.splitlines())):
        cells = dict(zip(SIDES, (found["agent"], found["httpx"], found["http"]), strict=True))
        values = {side: float(cell) for side, cell in cells.items() if cell != "-"}
        target = float(found["target"]) if found["target"] else None
        if target is not None:
            assert found["verdict"] == ("met" if values["agent"] <= target else "MISSED"), found[0]
        rows.append(Row(found["figure"], int(found["samples"].replace(",", "")), values, target))
    return rows


def figures_and_targets(rows: Sequence[Row]) -> list[tuple[str, float | None]]:
    return [(row.figure, row.target) for row in rows]


on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="CPU time and memory are read from Linux"
)


@on_linux
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_quick_run_prints_every_row() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"Python {sys.version.split()[0]}" in done.stdout.splitlines()[0]
    rows = rows_in(done.stdout)
    assert figures_and_targets(rows) == rows_of(("10",), "100 past events", (10,)), done.stdout
    assert all(row.values["agent"] > 0 for row in rows if not row.figure.startswith("more of it"))
    beside = [row.figure for row in rows if len(row.values) == len(SIDES)]
    for figure in (
        "CPU of a poll, 10 events pending, ms",
        "served to the approval, p99, ms",
        "resident memory after the first event, MiB",
    ):
        assert figure in beside


@on_linux
def test_the_explanation_says_how_each_kind_of_figure_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks", "--explain"]
    shown = subprocess.check_output(command, cwd=CHECKOUT, text=True, timeout=60)
    kinds = (
        "cpu of a poll:", "wake-ups a second:", "served to the first hook, to the approval:",
        "cpu from exec to the first poll:", "cpu of a command:", "cpu of a page:", "resident memory,",
        "requests to the table:", "last of the vms ready to the approval:", "resident memory of a fleet:",
    )  # fmt: skip
    assert [kind for kind in kinds if kind not in shown.lower()] == []
    assert re.findall(r"^\w+$", shown, re.MULTILINE) == ["polls", "tail", "start", "memory", "fleet"]


@on_linux
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_the_drain_is_measured_beside_kubectl() -> None:
    command = [sys.executable, "-m", "benchmarks.drain", "--pods", "3", "--runs", "1"]
    shown = subprocess.check_output(command, cwd=CHECKOUT, text=True, timeout=300)
    rows = [re.split(r" {2,}", line) for line in shown.splitlines()]
    assert [row[0] for row in rows] == [
        "figure",
        "time, 3 pods, s",
        "requests, 3 pods",
        "peak of memory, 3 pods, MiB",
    ]
    assert all(float(value) > 0 for row in rows[1:] for value in row[1:])


def test_the_page_and_the_json_have_the_same_complete_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    run = msgspec.json.decode(RECORD.read_bytes(), type=Run)
    assert section_of(page) == render(run)
    assert rows_in(page) == run.rows
    assert figures_and_targets(run.rows) == rows_of(("10", "100", "1,000"), "100,000 past events", (10, 100))
    for fact in (run.commit, f"{run.load_before:.2f} before", f"{run.load_after:.2f} after", f"{run.cores} cores"):
        assert fact in page
    for fact in (run.kernel, f"Python {run.python}", *map(" ".join, run.libraries.items())):
        assert fact in page
    assert {"httpx", "msgspec", "SQLite"} < run.libraries.keys()


BENCH = """
import pathlib, sys
import psutil
from benchmarks import __main__ as bench
from benchmarks.report import row

def measure(is_quick):
    yield row("CPU of a poll, 0 events pending, ms", [(float(value), 1.0, 0.5)])
    if while_it_runs:
        pathlib.Path(while_it_runs).touch()

load, value, while_it_runs = (sys.argv.pop(1) for _ in range(3))
psutil.getloadavg = lambda: (float(load), 0.0, 0.0)
bench.PARTS = {"polls": measure}
sys.exit(bench.main())
"""


class Bench:
    """A repository with the benchmarks, in which they measure nothing and find the load that they are told."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        for folder in ("agent", "benchmarks", "tests/e2e"):
            shutil.copytree(CHECKOUT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in (".gitignore", "docs/benchmarks.md", "packaging/requirements.txt"):
            (checkout / file).parent.mkdir(exist_ok=True)
            shutil.copy(CHECKOUT / file, checkout / file)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        own = ("user.name=bench", "user.email=bench@example.com", "commit.gpgsign=false")
        options = [word for setting in own for word in ("-c", setting)]
        return subprocess.check_output(["git", *options, *arguments], cwd=self.checkout, text=True).rstrip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "All of it")

    def run(
        self,
        *arguments: str,
        load: float = 0.0,
        value: float = 1.5,
        while_it_runs: str = "",
        agent: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """``while_it_runs``: a file that appears meanwhile. ``agent``: the folder of another agent."""
        return subprocess.run(
            [sys.executable, "-c", BENCH, str(load), str(value), while_it_runs, *arguments],
            cwd=self.checkout,
            env={**os.environ, "PYTHONPATH": str(agent or self.checkout / "agent")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def changes(self) -> list[str]:
        return sorted(line[3:] for line in self.git("status", "--porcelain").splitlines())

    def record(self) -> Run:
        return msgspec.json.decode((self.checkout / "docs/benchmarks.json").read_bytes(), type=Run)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    return Bench(tmp_path)


def test_the_front_page_says_how_much_the_agent_takes() -> None:
    run = json.loads((CHECKOUT / "docs/benchmarks.json").read_text(encoding="utf-8"))
    figures = {row["figure"]: row["values"]["agent"] for row in run["rows"]}
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    ((memory, part),) = re.findall(r"takes (\d+) MiB of memory and ([\d.]+) % of a core", readme)
    assert float(memory) == pytest.approx(figures["resident memory after the first event, MiB"], rel=0.1)
    assert 10.0 * float(part) == pytest.approx(figures["CPU of a poll, 0 events pending, ms"], rel=0.2)


@on_linux
def test_a_complete_run_replaces_the_one_before(bench: Bench) -> None:
    page = bench.checkout / "docs/benchmarks.md"
    before = page.read_text(encoding="utf-8")
    for value in (1.5, 2.5):
        done = bench.run(value=value)
        assert done.returncode == 0, done.stderr
        assert bench.changes() == ["docs/benchmarks.json", "docs/benchmarks.md"]
        run = bench.record()
        figure = "CPU of a poll, 0 events pending, ms"
        assert run.rows == [Row(figure, 1, {"agent": value, "httpx": 1.0, "http.client": 0.5}, None)]
        assert run.commit == bench.git("rev-parse", "HEAD")
        assert (run.python, run.cores) == (platform.python_version(), os.cpu_count())
        assert platform.release() in run.kernel
        assert run.libraries["httpx"] == metadata.version("httpx")
        after = page.read_text(encoding="utf-8")
        assert rows_in(after) == run.rows
        assert after.replace(render(run), "") == before.replace(section_of(before), "")
        bench.commit()


@on_linux
def test_a_complete_run_refuses_uncommitted_changes(bench: Bench) -> None:
    (bench.checkout / "new.py").touch()
    (bench.checkout / "agent/scheduled_events_agent/py.typed").write_text("changed", encoding="utf-8")
    for anyway in ((), ("--anyway",)):
        done = bench.run(*anyway)
        assert (done.returncode, done.stdout) == (1, "")
        assert "new.py" in done.stderr
        assert "agent/scheduled_events_agent/py.typed" in done.stderr


@on_linux
def test_a_complete_run_on_a_busy_machine_has_to_be_asked_for(bench: Bench) -> None:
    half = 0.5 * (os.cpu_count() or 1)
    done = bench.run(load=half + 0.01)
    assert (done.returncode, done.stdout) == (1, "")
    assert "above 0.5 for each" in done.stderr
    assert bench.changes() == []
    assert bench.run("--anyway", load=half + 0.01).returncode == 0
    assert (bench.record().load_before, bench.record().load_after) == (half + 0.01, half + 0.01)
    page = bench.checkout / "docs/benchmarks.md"
    assert "The machine was busy" in page.read_text(encoding="utf-8")
    bench.commit()
    assert bench.run(load=half).returncode == 0
    assert "The machine was busy" not in page.read_text(encoding="utf-8")


@on_linux
def test_a_run_in_which_the_checkout_changes_is_not_written(bench: Bench) -> None:
    done = bench.run(while_it_runs="agent/new.py")
    assert done.returncode == 1
    assert "agent/new.py" in done.stderr
    assert bench.changes() == ["agent/new.py"]


@on_linux
def test_make_begins_a_complete_run() -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for arguments, command in (((), "-m benchmarks"), (("ANYWAY=1",), "-m benchmarks --anyway")):
        commands = subprocess.check_output(
            ["make", "--no-print-directory", "--dry-run", "bench", *arguments], cwd=CHECKOUT, text=True
        )
        assert commands.splitlines()[-1].strip().endswith(command)


@on_linux
@pytest.mark.parametrize("argument", ["polls", "--quick"])
def test_a_run_of_a_part_or_a_quick_one_is_printed_only(bench: Bench, argument: str) -> None:
    (bench.checkout / "new.py").touch()  # and needs no commit
    done = bench.run(argument, load=99.0)
    assert done.returncode == 0, done.stderr
    assert len(rows_in(done.stdout)) == 1
    assert bench.changes() == ["new.py"]


@on_linux
def test_a_complete_run_refuses_an_agent_of_another_checkout(bench: Bench) -> None:
    done = bench.run(agent=CHECKOUT / "agent")
    assert (done.returncode, done.stdout) == (1, "")
    assert str(CHECKOUT / "agent") in done.stderr


@on_linux
def test_a_run_that_is_killed_leaves_no_agent_behind() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    with subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stderr is not None
            assert bench.stderr.readline() == "measure polls ...\n"
            programs: list[psutil.Process] = []
            while len(programs) < 3:  # the agent and both loops, beyond the fork
                time.sleep(0.05)
                children = psutil.Process(bench.pid).children()
                programs = [child for child in children if child.cmdline() not in ([], command)]
        finally:
            bench.kill()
    gone, alive = psutil.wait_procs(programs, timeout=60)
    for process in alive:
        process.kill()
    assert (len(gone), alive) == (3, [])


@on_linux
def test_an_agent_that_cannot_start_ends_the_wait_with_its_output(tmp_path: Path) -> None:
    with Simulator() as simulator:
        agent = Side("agent", tmp_path, simulator, 1.0)
        agent.config.write_text("rulez: []", encoding="utf-8")
        try:
            with pytest.raises(RuntimeError, match=r"(?s)exit code 2\n.*rulez"):
                agent.start_polling()
        finally:
            agent.close()
