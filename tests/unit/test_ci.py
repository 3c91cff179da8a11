"""The workflow for hosted runners, as far as it can be judged without one."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / ".github" / "workflows" / "ci.yml"


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return loaded


def test_it_may_only_read_and_every_job_ends(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "permissions" not in job, name
        assert 0 < job["timeout-minutes"] <= 90, name


def test_every_action_is_pinned_by_commit_with_its_version_beside_it() -> None:
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(r" +- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_the_tests_run_on_both_systems_with_every_python_that_is_promised(workflow: dict[str, Any]) -> None:
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    classifiers = tomllib.loads(text_of("pyproject.toml"))["project"]["classifiers"]
    versions = [text.rpartition(" ")[2] for text in classifiers if "Python :: 3." in text]
    assert matrix == {"os": ["ubuntu-latest", "windows-latest"], "python": versions}


def test_what_it_makes_can_be_made(workflow: dict[str, Any]) -> None:
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    wanted = set(re.findall(r"^ *make (\w+)$", "\n".join(steps), re.MULTILINE))
    assert wanted == {"system", "packages", "msi"}
    assert wanted <= set(re.findall(r"^(\w+):", text_of("Makefile"), re.MULTILINE))


def test_the_commands_of_the_makefile_are_those_of_the_runners_without_make(workflow: dict[str, Any]) -> None:
    commands = {step.get("run") for step in workflow["jobs"]["test"]["steps"]}
    recipes = re.findall(r"^(?:demo|test|lint): .*\n((?:\t.*\n)+)", text_of("Makefile"), re.MULTILINE)
    assert len(recipes) == 3
    for line in "".join(recipes).splitlines():
        assert line.strip().removeprefix("$(BIN)/") in commands
