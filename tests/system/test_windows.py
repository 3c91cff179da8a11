"""The tests that apply to Windows, inside a real Windows Python under Wine."""

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

if sys.platform == "win32":
    pytest.skip("on Windows, the tests themselves run", allow_module_level=True)

from wine_python import CHECKOUT, WinePython, WineUnavailableError, wine_python

pytestmark = pytest.mark.timeout(900)  # the first time, Wine and a Windows Python are fetched

# What Linux's ways are tested by skips itself as a whole on Windows.
_PATTERNS = ("tests/integration/test_hooks*.py", "tests/integration/test_host*.py", "tests/unit/test_*.py")


@pytest.fixture(scope="module")
def python() -> Iterator[WinePython]:
    try:
        with wine_python() as ready:
            yield ready
    except WineUnavailableError as reason:
        pytest.skip(str(reason))


def test_the_agent_runs_on_windows(python: WinePython) -> None:
    done = python.run("-c", "import agent.cli, sys; print(sys.platform, sys.version_info[:2])", timeout=60)
    assert done.stdout.strip() == "win32 (3, 11)"


def test_the_demo_comes_out_right_on_windows(python: WinePython) -> None:
    done = python.run("-m", "agent", "demo", timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "all as it should be" in done.stdout


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_the_tests_pass_on_windows(python: WinePython, pattern: str) -> None:
    files = sorted(str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob(pattern))
    report = python.drive / "report.xml"
    report.unlink(missing_ok=True)
    done = python.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", r"--junitxml=C:\report.xml", *files),
        timeout=600,
    )
    assert report.exists(), done.stdout[-4000:]
    suite = ET.parse(report).getroot().find("testsuite")  # our own file
    assert suite is not None
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert (count["failures"], count["errors"]) == (0, 0), done.stdout[-8000:]
    assert count["tests"] - count["skipped"] >= 2 * len(files), done.stdout[-2000:]
