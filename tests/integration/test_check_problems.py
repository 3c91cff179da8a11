"""The errors and warnings of ``check``: lines for problem matchers, and objects for programs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduled_events_agent.cli import main
from scheduled_events_agent.cli.config import policy_file
from scheduled_events_agent.daemon.policy_reader import read_policy
from scheduled_events_agent.policy.load import CONFIG_VARIABLE
from scheduled_events_agent.policy.typed_yaml import Problem

ROOT = Path(__file__).resolve().parents[2]
POLICY = """\
rules:
  - name: a
    prepare: [drain]
    recover: []
    approve: immediately
  - name: b
    approve: yes
hooks:
  drain: {run: [/absent]}
"""
WAITS = "does not wait for the hooks of prepare: write when-prepared if it should"


def pattern_of_the_reference() -> dict[str, Any]:
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/policy.md").read_text("utf-8"), re.DOTALL)
    (matcher,) = json.loads(text)["problemMatcher"]
    (pattern,) = matcher["pattern"]
    return {**pattern, "default": matcher["severity"]}


def matched(lines: str) -> list[tuple[str, int, str, str]]:
    """File, line, severity and message of each line that the problem matcher of the reference recognizes."""
    pattern = pattern_of_the_reference()
    found = filter(None, (re.match(pattern["regexp"], line) for line in lines.splitlines()))
    return [
        (
            match[pattern["file"]],
            int(match[pattern["line"]]),
            match[pattern["severity"]] or pattern["default"],
            match[pattern["message"]],
        )
        for match in found
    ]


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", *words])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def objects(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    told = json.loads(check(capsys, "--json", *words)[1])
    return told["errors"], told["warnings"]


@pytest.mark.parametrize(
    "file", ["policy.yaml", "/etc/a b/policy.yaml", r"C:\policies\policy.yaml", "D:policy.yaml"]
)
@pytest.mark.parametrize(
    ("severity", "line", "expected"),
    [
        ("error", 7, "FILE:7: rules[2].approve: is wrong"),
        ("warning", 7, "FILE:7: warning: rules[2].approve: is wrong"),
        ("error", None, "FILE: rules[2].approve: is wrong"),
        ("warning", None, "FILE: warning: rules[2].approve: is wrong"),
    ],
)
def test_a_line_is_written_as_compilers_write_it(
    file: str, severity: Any, line: int | None, expected: str
) -> None:
    problem = Problem(file=file, line=line, path="rules[2].approve", severity=severity, message="is wrong")
    assert str(problem) == expected.replace("FILE", file)
    found = [(file, line, severity, "rules[2].approve: is wrong")]
    assert matched(str(problem)) == (found if line is not None else [])


def test_the_problem_matcher_of_the_reference_recognizes_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    code, out = check(capsys, str(policy))
    assert code == 2
    assert [(file, line, severity) for file, line, severity, _ in matched(out)] == [
        (str(policy), 5, "warning"),
        (str(policy), 7, "error"),
        (str(policy), 9, "warning"),
    ]
    assert [message.partition(": ")[0] for *_, message in matched(out)] == [
        "rules[0].approve",
        "rules[1].approve",
        "hooks.drain.run",
    ]


def test_the_problem_matcher_of_the_reference_recognizes_nothing_in_a_valid_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for policy in (ROOT / "config/policy.yaml", *sorted((ROOT / "config/examples").glob("*.yaml"))):
        code, out = check(capsys, "--no-files", str(policy))
        assert (code, matched(out)) == (0, []), policy


def test_json_has_the_place_of_each_error_and_warning_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    errors, warnings = objects(capsys, str(policy))
    assert errors == [
        {
            "file": str(policy),
            "line": 7,
            "column": 14,
            "path": "rules[1].approve",
            "severity": "error",
            "message": 'expected one of immediately, when-prepared, manual, never; got "yes"',
            "hint": "",
        }
    ]
    assert [(one["file"], one["severity"]) for one in warnings] == [(str(policy), "warning")] * 2
    assert [(one["line"], one["column"], one["path"]) for one in warnings] == [
        (5, 5, "rules[0].approve"),
        (9, 11, "hooks.drain.run"),
    ]
    assert warnings[1]["message"] == "/absent does not exist"
    assert warnings[1]["hint"].startswith("correct it: until then the hook fails")


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("rules: [", 1, 9),
        ("rules:\n  - name: a\n   approve: b\n", 3, 4),
        ("rules:\n\t- name: a\n", 2, 1),
        ("vm: {name: ä\x00}\n", 1, 13),
        ("vm:\n  name: @a\n", 2, 9),
        ("- a\n", 1, 1),
    ],
)
def test_json_has_the_place_of_an_error_in_what_is_no_policy(
    text: str, line: int, column: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(text, encoding="utf-8")
    (error,), _ = objects(capsys, "--no-files", str(policy))
    assert (error["file"], error["line"], error["column"], error["path"]) == (str(policy), line, column, "")


def test_json_has_the_place_of_a_byte_that_is_not_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_bytes(b"vm:\n  name: \xc3\xa4\xff\n")
    (error,), _ = objects(capsys, "--no-files", str(policy))
    assert (error["line"], error["column"]) == (2, 10)


def test_json_names_the_file_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.yaml")
    told = json.loads(check(capsys, "--json", missing)[1])
    assert (told["file"], told["hash"], told["valid"], told["warnings"]) == (missing, "", False, [])
    assert told["errors"] == [
        {
            "file": missing,
            "line": None,
            "column": None,
            "path": "",
            "severity": "error",
            "message": "there is no such file",
            "hint": f"without --config and ${CONFIG_VARIABLE} the built-in policy is used",
        }
    ]
    assert (
        check(capsys, missing)[1].splitlines()[0]
        == f"{missing}: there is no such file; {told['errors'][0]['hint']}"
    )


def test_json_has_the_key_that_names_a_wrong_web_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = tmp_path / "web.yml"
    web.write_text("tls_server_config: {cert_file: a, key_file: b, min_version: TLS9}\n", encoding="utf-8")
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"agent:\n  web_config: '{web}'\n", encoding="utf-8")
    _, warnings = objects(capsys, str(policy))
    (warning,) = [one for one in warnings if "no pages" in one["message"]]
    assert (warning["file"], warning["line"], warning["column"]) == (str(policy), 2, 3)
    assert (warning["path"], warning["hint"]) == ("agent.web_config", "correct it, or remove the key")
    assert f"{web}:1: tls_server_config.min_version: expected one of TLS12, TLS13" in warning["message"]


def test_a_scenario_is_checked_as_a_policy_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "mine.yaml"
    scenario.write_text("vms: [a]\ntimelime: []\n", encoding="utf-8")
    assert main(["simulate", "--check", "--json", str(scenario)]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["file"], error["line"], error["column"]) == (str(scenario), 2, 1)
    assert (error["message"], error["hint"]) == ('unknown key "timelime"', 'did you mean "timeline"?')
    recording = tmp_path / "mine.jsonl"
    recording.write_text("{}\n", encoding="utf-8")
    assert main(["simulate", "--check", "--json", str(recording)]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["file"], error["line"], error["column"]) == (str(recording), 1, None)


def test_a_start_logs_warnings_as_check_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("approve: yes", "approve: never"), encoding="utf-8")
    with capture_logs() as logged:
        read_policy(policy_file(policy), lambda *_: None, is_start=True)
    printed = [line for line in check(capsys, "--no-files", str(policy))[1].splitlines() if ": warning: " in line]
    assert printed[0] == f"{policy}:5: warning: rules[0].approve: {WAITS}"
    assert [line["problem"] for line in logged] == printed
