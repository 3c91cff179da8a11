"""The command lives other worlds with each commit, and those that have ever failed."""

import subprocess
import sys
from pathlib import Path

from runs import run_seed
from seeds import FAILED_FLEET_SEEDS, FAILED_SEEDS, current_commit, first_seed


def lived(*options: str) -> str:
    command = [sys.executable, str(Path(__file__).parent), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_commit_has_seeds_of_its_own() -> None:
    assert first_seed("790db657c0a1") == 0x790DB65
    assert first_seed("") == 0


def test_the_command_names_its_seeds_and_lives_those_that_have_failed() -> None:
    first = first_seed(current_commit())
    failed = len(FAILED_FLEET_SEEDS)
    output = lived("--fleet", "--seeds", "1")
    assert f"seeds {first} to {first} (again: --first {first}) and {failed} that have failed" in output
    assert f"\n{failed + 1} seeds, " in output
    assert "seeds 5 to 6 (again: --first 5)" in lived("--first", "5", "--seeds", "2")


def test_the_lives_that_have_failed_keep_the_rules() -> None:
    results = [*map(run_seed, FAILED_SEEDS)]
    assert [result.text() for result in results if result.broken] == []
