"""The man pages, as packaging makes them from the command line and the types of the policy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scheduled_events_agent.cli.output import READER_GONE
from scheduled_events_agent.daemon import watchdog

ROOT = Path(__file__).resolve().parents[2]
PAGES = [("command", "8"), ("policy", "5")]


def make(page: str) -> str:
    command = [sys.executable, str(ROOT / "packaging/manual.py"), page, "1.2.3", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize(("page", "section"), PAGES)
def test_a_page_can_be_read_at_any_width(tmp_path: Path, page: str, section: str, columns: int) -> None:
    path = tmp_path / f"page.{section}"
    path.write_text(make(page), encoding="utf-8")
    done = subprocess.run(
        ["man", "--warnings", "--local-file", str(path)],
        env={**os.environ, "MANWIDTH": str(columns), "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    title = f"SCHEDULED-EVENTS-AGENT({section})"
    head = next(filter(None, done.stdout.splitlines()))
    assert re.fullmatch(rf"{re.escape(title)} +\S.*\S +{re.escape(title)}", head)
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_both_man_pages_name_the_program_and_its_policy_file() -> None:
    names = [re.findall(r"^\.SH NAME\n(.+?) \\- ", make(page), re.MULTILINE) for page, _ in PAGES]
    assert names == [[r"scheduled\-events\-agent"], [r"scheduled\-events\-agent, policy.yaml"]]


def test_help_is_listed_once() -> None:
    page = make("command")
    assert page.count(r"\fB\-\-help\fR") == 1
    assert page.count(r"\fB\-\-json\fR") > 1


def test_the_page_lists_every_exit_code() -> None:
    _, _, rest = make("command").partition(".SH EXIT STATUS\n")
    section, _, _ = rest.partition("\n.SH ")
    codes = [int(code) for code in re.findall(r"^\.B (\d+)$", section, re.MULTILINE)]
    launcher = (ROOT / "packaging/launcher.sh").read_text(encoding="utf-8")
    (no_python,) = map(int, re.findall(r"^ +exit (\d+)$", launcher, re.MULTILINE))
    assert codes == [0, 1, 2, 3, watchdog.EXIT_CODE, no_python, READER_GONE]
