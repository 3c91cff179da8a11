"""A time for people has one form, in what the commands print of each shipped policy and of a full state file."""

import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from time_forms import other_forms

from scheduled_events_agent import cli, host
from scheduled_events_agent.store import FILE_NAME

ROOT = Path(__file__).parents[2]
STATE = ROOT / "tests/fixtures/state-1.sql"
POLICIES = [ROOT / "config/policy.yaml", *sorted((ROOT / "config/examples").glob("*.yaml"))]
SCENARIOS = sorted((ROOT / "agent/scheduled_events_agent/simulator/scenarios").glob("*.yaml"))

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command; returns what it prints, whatever its exit code."""

    def run_command(*arguments: object) -> str:
        cli.main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        return f"{out}{err}"

    return run_command


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """The state of an agent that ended in the middle of many events."""
    directory = tmp_path / "state"
    host.create_private_dir(directory)
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        connection.executescript(STATE.read_text(encoding="utf-8"))
    return directory


def test_status_of_a_state_file(run: Run, state_dir: Path) -> None:
    shown = run("status", "--state-dir", state_dir)
    assert " UTC" in shown
    assert other_forms(shown) == []


def test_history_has_the_day_and_utc_above_the_times_of_its_rows(run: Run, state_dir: Path) -> None:
    day = ""
    lines = run("history", "--state-dir", state_dir, "--limit", "0").splitlines()
    for line in lines:
        if heading := re.fullmatch(r"  (\d{4}-\d\d-\d\d) UTC", line):
            day = heading[1]
            continue
        if not line.startswith("  "):
            day = ""
        row = re.match(r"  \d\d:\d\d:\d\d  +\+", line)
        assert day or row is None, line
        assert other_forms(line[row.end() :] if row else line, is_kept=True) == [], line
    assert sum(re.fullmatch(r"  \d{4}-\d\d-\d\d UTC", line) is not None for line in lines) > 10


@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.stem)
def test_check_and_explain(run: Run, policy: Path) -> None:
    if policy.stem.startswith("windows") != (sys.platform == "win32"):
        pytest.skip("its hooks are of the other system")
    assert other_forms(run("check", policy)) == []
    for scenario in SCENARIOS:
        shown = run("explain", scenario.stem, "--config", policy)
        assert " UTC" in shown
        assert other_forms(shown) == [], shown
