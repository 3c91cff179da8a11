"""In a real Windows Python under Wine: the demo, and the tests of what differs there; each night all tests."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("on Windows, the tests themselves run", allow_module_level=True)

from wine_python import CHECKOUT, WinePython, run_in_wine, wine_python

# On two processors it has taken eight minutes beside a little other work, and nineteen beside very much.
_SUITE_SECONDS = 2400
pytestmark = pytest.mark.timeout(_SUITE_SECONDS + 300)  # the first time, Wine and a Windows Python are fetched

_SUITE = ("tests/unit", "tests/integration", "tests/e2e")
_PARTS = ("unit/test_windows*", "integration/test_host*", "integration/test_hooks*")
# Tests of whole lives of events, those in which processes, locks, signals and boots take part.
_STORIES = (
    "test_a_platform_reboot_is_drained_approved_started_and_recovered_once",
    "test_a_drain_that_is_not_done_in_time_ends_before_the_event_begins",
    "test_an_event_that_starts_while_the_drain_runs_ends_the_drain",
    "test_an_operator_holds_an_event_and_releases_it",
    "test_after_the_reboot_it_prepared_for_the_machine_is_recovered_once",
    "test_a_second_agent_on_a_state_directory_names_the_first_and_exits",
)
# They wait more than they work; but with more of them, two processors do not keep the times that tests allow.
_WORKERS = 2
# For one test: more than elsewhere, for each start of a process takes its time.
_TEST_SECONDS = 300


@pytest.fixture(scope="module")
def python() -> Iterator[WinePython]:
    with wine_python() as ready:
        yield ready


def test_a_wine_launch_failure_is_retried_and_a_test_failure_is_not(tmp_path: Path) -> None:
    wine = tmp_path / "wine"  # a stand-in, for the real one fails too seldom
    wine.write_text(
        '#!/bin/sh\n[ -e "$1" ] && echo runs || { echo "ShellExecuteEx failed: $2."; : >"$1"; exit 1; }\n'
    )
    wine.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = run_in_wine(str(tmp_path / "first"), "Internal error", environment=environment, timeout=300)
    assert (done.returncode, done.stdout) == (0, "runs\n")
    done = run_in_wine(str(tmp_path / "second"), "File not found", environment=environment, timeout=300)
    assert (done.returncode, done.stdout) == (1, "ShellExecuteEx failed: File not found.\n")


def test_the_agent_runs_on_windows(python: WinePython) -> None:
    done = python.run(
        "-c", "import scheduled_events_agent.cli, sys; print(sys.platform, sys.version_info[:2])", timeout=300
    )
    assert done.stdout.strip() == "win32 (3, 11)"


def test_the_demo_succeeds_on_windows(python: WinePython) -> None:
    done = python.run("-m", "scheduled_events_agent", "demo", timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "all as expected" in done.stdout


def test_the_system_dependent_tests_pass_on_windows(
    python: WinePython, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = sorted(path for part in _PARTS for path in (CHECKOUT / "tests").glob(part))
    files = [path.relative_to(CHECKOUT).as_posix() for path in paths]
    account = run_tests(python, *files, *(f"tests/e2e/test_lifecycle.py::{story}" for story in _STORIES))
    with capsys.disabled():
        print(f"\n{account}")
    assert account.files == {"test_lifecycle", *(path.stem for path in paths)}, (
        "a file is missing from the report, or unknown"
    )
    assert len(account.passed) > account.reasons.total(), "more was skipped than belongs to Linux alone"


@pytest.mark.nightly
def test_every_test_passes_on_windows_or_says_why_it_cannot_run_there(
    python: WinePython, capsys: pytest.CaptureFixture[str]
) -> None:
    account = run_tests(python, *_SUITE)
    with capsys.disabled():
        print(f"\n{account}")
    files = {path.stem for folder in _SUITE for path in (CHECKOUT / folder).glob("test_*.py")}
    assert account.files == files, "a file of tests is missing from the report, or unknown"
    assert len(account.passed) > 5 * account.reasons.total(), "more was skipped than belongs to Linux alone"


def run_tests(python: WinePython, *paths: str) -> "Account":
    """Run tests under Wine; none fails."""
    report = python.drive / "report.xml"
    report.unlink(missing_ok=True)
    done = python.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", r"--junitxml=C:\report.xml"),
        *("--numprocesses", str(_WORKERS), "--dist", "worksteal", "--timeout", str(_TEST_SECONDS), *paths),
        timeout=_SUITE_SECONDS,
    )
    assert report.exists(), done.stdout[-8000:]
    account = Account(report)
    assert account.failed == [], done.stdout[-16000:]
    assert done.returncode == 0, done.stdout[-8000:]
    return account


class Account:
    """The outcome of each test, from the report that pytest wrote."""

    def __init__(self, report: Path) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.reasons: Counter[str] = Counter()
        """The reasons of skipped tests, and how often each came."""
        self.files: set[str] = set()
        suite = ET.parse(report).getroot().find("testsuite")  # our own file
        assert suite is not None
        self.seconds = float(suite.attrib["time"])
        for case in suite.iter("testcase"):
            # A file that was skipped as a whole is a case without a class.
            where, name = case.attrib["classname"], case.attrib["name"]
            self.files.update(part for part in (where or name).split(".") if part.startswith("test_"))
            skipped = case.find("skipped")
            faults = [*case.findall("failure"), *case.findall("error")]
            if faults:
                self.failed.append(f"{where}.{name}: {faults[0].attrib.get('message', '')[:1000]}")
            elif skipped is None:
                self.passed.append(f"{where}.{name}")
            else:
                self.reasons[_reason(where, name, skipped)] += 1

    def __str__(self) -> str:
        total = f"{len(self.passed)} passed, {len(self.failed)} failed, {self.reasons.total()} skipped"
        lines = [f"A Windows Python under Wine: {total}, in {self.seconds:.0f} s", *self.failed]
        return "\n".join(
            [*lines, *(f"{count:5d} skipped: {reason}" for reason, count in self.reasons.most_common())]
        )


def _reason(where: str, name: str, skipped: ET.Element) -> str:
    if where:
        return skipped.attrib["message"]
    _, _, reason = (skipped.text or "").partition("Skipped: ")
    return f"{name}: {reason.rstrip(chr(39) + chr(34) + ')')}"
