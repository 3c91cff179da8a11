"""The man pages, as packaging makes them from the command line and the types of the policy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.cli.output import READER_GONE
from scheduled_events_agent.daemon import watchdog
from scheduled_events_agent.policy.load import parse_settings

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


def section(title: str) -> str:
    """The section of the page on the command, up to the next one."""
    _, _, rest = make("command").partition(f".SH {title}\n")
    return rest.partition("\n.SH ")[0]


def test_the_page_lists_every_exit_code() -> None:
    codes = [int(code) for code in re.findall(r"^\.B (\d+)$", section("EXIT STATUS"), re.MULTILINE)]
    launcher = (ROOT / "packaging/launcher.sh").read_text(encoding="utf-8")
    (no_python,) = map(int, re.findall(r"^ +exit (\d+)$", launcher, re.MULTILINE))
    assert codes == [0, 1, 2, 3, watchdog.EXIT_CODE, no_python, READER_GONE]


def test_the_examples_check_simulate_and_approve_with_commands_that_are_valid() -> None:
    text = section("EXAMPLES").replace(r"\-", "-")
    lines = re.findall(r"^(?:sudo )?scheduled-events-agent (.+)$", text, re.MULTILINE)
    for line in lines:
        build_parser().parse_args(line.split())  # exits, and so fails, on what it does not know
    assert [line.split()[0] for line in lines] == [
        "check", "explain", "simulate", "run", "status", "approve", "history"
    ]  # fmt: skip
    policy = "\n".join(re.findall(r"^(?:imds|agent): .+$", text, re.MULTILINE))
    settings = parse_settings(policy, "try.yaml").settings
    assert f"--port {settings.imds.endpoint.rpartition(':')[2]} " in text
    assert settings.agent.state_dir is not None


def test_the_page_names_every_document_with_its_title() -> None:
    named = re.findall(r"^\.I (\S+\.md)\n(.+)$", section("SEE ALSO").replace(r"\-", "-"), re.MULTILINE)
    docs = ROOT / "docs"
    assert [name for name, _ in named] == [*sorted(path.name for path in docs.glob("*.md")), "cookbook/README.md"]
    for name, title in named:
        assert (docs / name).read_text(encoding="utf-8").startswith(f"# {title}\n")
    assert r".I /usr/share/doc/scheduled\-events\-agent/policy.md" in make("policy")
