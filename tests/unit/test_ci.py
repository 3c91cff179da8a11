"""The workflows for hosted runners, as far as they can be judged without one."""

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
FILES = sorted(FILE.parent.glob("*.yml"))
# What jobs may do besides reading the sources.
RIGHTS = {
    "renew": {"contents": "write", "pull-requests": "write"},
    "release": {"contents": "write", "id-token": "write", "attestations": "write"},
    "index": {"contents": "read", "id-token": "write"},
    "image": {"contents": "read", "packages": "write", "id-token": "write"},
    "repository": {"contents": "read", "pages": "write", "id-token": "write"},
}


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return loaded


def test_jobs_may_only_read_but_for_those_that_publish_and_every_job_ends() -> None:
    rights = {}
    for path in FILES:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert "uses" in job or 0 < job["timeout-minutes"] <= 90, name
            if "permissions" in job:
                rights[name] = job["permissions"]
    assert rights == RIGHTS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_action_is_pinned_by_commit_with_its_version_beside_it(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        if "./.github/workflows/" not in line:
            assert re.fullmatch(r" +(- )?uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_a_release_runs_only_what_can_be_run_here() -> None:
    for name in ("release.yml", "renew.yml"):
        jobs = yaml.safe_load(text_of(f".github/workflows/{name}"))["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job.get("steps", []) if "run" in step]
        targets = re.findall(r"^(\w+):", text_of("Makefile"), re.MULTILINE)
        assert commands
        for command in commands:
            program, *words = command.removeprefix("python3 ").replace("\\", "/").split()
            if program == "make":
                assert words[0] in targets, command
            else:
                assert (ROOT / program).is_file(), command
            if program == "packaging/publish.sh":
                assert f"\n    {words[0]})\n" in text_of(program), command


def test_nothing_is_published_before_everything_was_tried() -> None:
    jobs = yaml.safe_load(text_of(".github/workflows/release.yml"))["jobs"]
    first = {name for name, job in jobs.items() if not RIGHTS.get(name)}
    assert first == {"check", "suite", "build", "compare", "try-linux", "try-windows", "audit"}
    assert set(jobs["release"]["needs"]) == first - {"build"}
    assert "build" in jobs["compare"]["needs"]
    must = ("check", "suite", "compare", "try-linux", "audit")
    assert [name for name in must if f"needs.{name}.result == 'success'" not in jobs["release"]["if"]] == []
    assert (
        "(needs.try-windows.result == 'success' || needs.check.outputs.prerelease == 'true')"
        in jobs["release"]["if"]
    )
    for name in ("index", "image", "repository"):
        assert "release" in (jobs[name]["needs"], *jobs[name]["needs"]), name
        assert "needs.release.result == 'success'" in jobs[name]["if"], name
    for name in ("image", "repository"):  # a prerelease goes to the release page and the index only
        assert "needs.check.outputs.prerelease == 'false'" in jobs[name]["if"], name
    secrets = re.findall(r"secrets\.(\w+)", text_of(".github/workflows/release.yml"))
    assert secrets == ["SIGNING_KEY"]
    assert jobs["repository"]["environment"]["name"] == "repository"


def test_readme_names_the_systems_that_a_release_is_tried_on() -> None:
    matrix = yaml.safe_load(text_of(".github/workflows/release.yml"))["jobs"]["try-linux"]["strategy"]["matrix"]
    (line,) = (line for line in text_of("README.md").splitlines() if line.startswith("- **Linux:**"))
    promised = line.partition("Each release will be tried on ")[2].partition(" before")[0]
    names = {"debian": "Debian", "ubuntu": "Ubuntu", "almalinux": "AlmaLinux", "core": "Azure Linux"}
    tried: dict[str, list[str]] = {}
    for image in matrix["image"]:
        name, version = image.rpartition("/")[2].split(":")
        tried.setdefault(names[name], []).append(version.removesuffix(".0"))
    texts = [f"{name} {' and '.join(versions)}" for name, versions in tried.items()]
    assert promised == f"{', '.join(texts[:-1])} and {texts[-1]}"


def test_windows_is_a_preview_until_a_hosted_windows_has_passed() -> None:
    """Whoever takes it out of one of the places takes it out of all."""
    places = ("README.md", "docs/windows.md", "packaging/windows/msi.py")
    assert {place: "preview" in text_of(place).casefold() for place in places} == dict.fromkeys(places, True)


def test_what_is_pinned_is_renewed_each_week() -> None:
    (update,) = yaml.safe_load(text_of(".github/dependabot.yml"))["updates"]
    assert (update["package-ecosystem"], update["schedule"]) == ("github-actions", {"interval": "weekly"})
    renew = yaml.safe_load(text_of(".github/workflows/renew.yml"))
    (cron,) = (entry["cron"] for entry in renew[True]["schedule"])  # YAML 1.1 reads the key "on" as true
    assert re.fullmatch(r"\d+ \d+ \* \* \d", cron)
    commands = {step["run"] for job in renew["jobs"].values() for step in job["steps"] if "run" in step}
    assert commands >= {"make audit", "python3 packaging/build.py renew", "python3 packaging/windows/msi.py renew"}


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
