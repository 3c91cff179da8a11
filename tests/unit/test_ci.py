"""The workflow for hosted runners, as far as it can be judged without one."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduled_events_agent.policy.load import ConfigError, parse_settings
from scheduled_events_agent.telemetry.log_ids import LogId

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


def test_ci_uses_only_existing_make_targets(workflow: dict[str, Any]) -> None:
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


def test_a_real_windows_gets_the_msi_and_the_service_of_pip(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    assert (jobs["msi"]["needs"], jobs["msi"]["runs-on"]) == ("packages", "windows-latest")
    assert jobs["pip-service"]["runs-on"] == "windows-latest"
    steps = [step for name in ("msi", "pip-service") for step in jobs[name]["steps"] if "run" in step]
    assert {step["shell"] for step in steps} == {"powershell"}  # that of Windows: what hooks and operators have
    scripts = set(re.findall(r"^ *\.\\(\S+\.ps1)", "\n".join(step["run"] for step in steps), re.MULTILINE))
    paths = {script.replace("\\", "/") for script in scripts}
    assert paths == {"packaging/windows/try.ps1", "winservice/install.ps1", "winservice/uninstall.ps1"}
    for path in paths:
        given = re.findall(rf"\\{re.escape(Path(path).name)}(.*)$", FILE.read_text(encoding="utf-8"), re.MULTILINE)
        names = set(re.findall(r" -(\w+)", "\n".join(given)))
        assert names <= set(re.findall(r"^ {4}\[.*\] \$(\w+)", text_of(path), re.MULTILINE)), path


def test_the_policy_of_the_trial_on_windows_is_valid_and_runs_its_scripts() -> None:
    script = text_of("packaging/windows/try.ps1")
    (policy,) = re.findall(r"'my policy.yaml'\) @\"\n(.*?)\n\"@", script, re.DOTALL)
    policy = policy.replace("$work", r"C:\Program Files\Trial of the agent")
    loaded = parse_settings(policy, "policy.yaml", may_change_user=False)
    assert [str(warning) for warning in loaded.warnings] == []
    run = {hook.run[0].rpartition("\\")[2] for hook in loaded.settings.hooks.values() if hook.run}
    assert run == {"drain.ps1", "resume.cmd"}
    assert run <= set(re.findall(r"Join-Path \$work '([\w.]+)'\) @'", script))
    (bad,) = re.findall(r"'bad.yaml'\) '(.*)'", script)
    with pytest.raises(ConfigError) as refused:
        parse_settings(bad, "bad.yaml", may_change_user=False)
    assert 'unknown key "rulez"' in str(refused.value)


def test_the_trial_on_windows_looks_for_the_right_ids_of_the_event_log() -> None:
    script = text_of("packaging/windows/try.ps1")
    (ids,) = re.findall(r"foreach \(\$id in ([\d, ]+)\)", script)
    meanings = {int(log_id): log_id.meaning for log_id in LogId}
    assert [meanings[int(number)] for number in ids.split(", ")] == [
        "A scheduled event was seen.",
        "The agent decided what to do about the event.",
        "A hook succeeded.",
        "A hook failed or ran out of time.",
        "Azure has accepted the approval.",
        "The event is over and what was prepared is recovered.",
    ]
    assert meanings[100] == "The agent started."
