"""check and explain as commands, with files, standard input and a live endpoint."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog.testing
from problems import as_lines

from scheduled_events_agent import AgentError, cli, host
from scheduled_events_agent.cli import terminal
from scheduled_events_agent.cli.config import find_config, load_policy, policy_file
from scheduled_events_agent.cli.run import open_daemon
from scheduled_events_agent.daemon import policy_reader
from scheduled_events_agent.hooks.durations import encode, record_run
from scheduled_events_agent.hooks.preflight import HOOK_HINT
from scheduled_events_agent.policy.durations import format_duration
from scheduled_events_agent.policy.load import CONFIG_VARIABLE, ConfigError
from scheduled_events_agent.simulator import list_scenarios, load_scenario
from scheduled_events_agent.store import Store

ROOT = Path(__file__).parents[2]
PAYLOADS = ROOT / "tests/payloads"
POLICY = """\
rules:
  - {name: user-initiated, when: {source: User}, approve: immediately}
  - {name: short-freeze, when: {type: Freeze, duration_below: 9s}, approve: immediately}
  - name: impactful
    when: {type: [Freeze, Reboot, Redeploy, Terminate, Preempt]}
    lead: 15m
    drain_for: 5s
    prepare: [drain, checkpoint]
    recover: [resume]
    approve: when-prepared
hooks:
  drain: {shell: drain}
  checkpoint: {shell: checkpoint}
  resume: {shell: resume}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command line; returns exit code, output and errors."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return str(path)


def test_check_of_a_valid_policy_summarizes_it(run: Run, policy: str) -> None:
    assert run("check", "--config", policy) == (
        0,
        f"""\
{policy}: valid

The first rule that matches an event applies:

user-initiated
  when     Any event from User
  approve  at once

short-freeze
  when     Freeze lasting less than 9s
  approve  at once

impactful
  when         Freeze, Reboot, Redeploy, Terminate or Preempt
  begins       15m before NotBefore
  prepare      not ready for 5s, then run drain, checkpoint; a Redeploy leaves them 9m50s, a Terminate 4m50s, \
a Preempt 20s
  approve      when prepared; a failed hook holds it
  recover      once it is over: run resume
  several VMs  begins 15m before NotBefore; not approved

Any other event is only observed: logged and counted.
If an event names other VMs too, a rule that approves when prepared does not approve it, and begins as late as \
its hooks allow; one that approves at once does so for all of them, 10s later for each VM listed before this one.

The agent asks http://169.254.169.254 every 1s (api-version 2020-07-01); serves its pages on 127.0.0.1:9769.
""",
        "",
    )


LATE = """\
rules:
  - {name: alone, prepare: [drain], drain_for: 15s, recover: [drain], approve: when-prepared}
  - {name: asked, when: {affects: others}, prepare: [drain], recover: [drain], approve: manual}
hooks:
  drain: {run: [/bin/true], timeout: 1m, attempts: 2, retry_delay: 10s}
"""


def test_check_and_explain_say_when_preparation_begins_and_why(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"agent: {{state_dir: '{tmp_path.as_posix()}'}}\n{LATE}", encoding="utf-8")
    _, out, _ = run("check", "--config", str(path))
    told = " ".join(out.split())
    late = "2m15s before NotBefore, or later if its hooks are known to be quicker"
    assert "when Any event begins at once prepare not ready for 15s, then run drain; a Preempt leaves them" in told
    assert (
        f"that names only other VMs begins {late}; a Preempt at once prepare run drain; a Preempt leaves them 25s "
        "approve when" in told
    )
    payload = "33-docs-seed000-freeze-duration-minus1.json"
    rows = explain(run, str(path), payload, "--vm", "westno_1")
    why = "it names other VMs too and shared is hold, and preparation may take "
    assert f"begins at 22:24:28 UTC ({why}2m30s) prepare not ready for 15s, then run drain" in " ".join(
        rows.split()
    )
    store = Store.open(tmp_path, datetime.now(UTC))
    hook = load_policy(path).settings.hooks["drain"]
    store.set_meta({"hook_times": encode(record_run({}, "drain", hook, "succeeded", 20.0))})
    store.close()
    rows = explain(run, str(path), payload, "--vm", "westno_1")
    assert f"begins at 22:25:48 UTC ({why}1m10s) prepare not ready for 15s, then run drain" in " ".join(
        rows.split()
    )


PLANS = (
    "approve: never",
    "approve: manual",
    "approve: when-prepared",
    "approve: immediately",
    "approve: when-prepared, shared: first",
    "approve: when-prepared, shared: any",
    "approve: immediately, shared: hold",
)
STEPS = (
    "prepare: [drain], recover: []",
    "drain_for: 90s",
    "drain_for: 15s, prepare: [drain, drain2], recover: []",
    "",
)
TIMES = ("", "lead: 20m", "window: night")
TYPES = ("Freeze", "Reboot", "Redeploy", "Terminate", "Preempt")


class Case(NamedTuple):
    """An event, the rule's ``affects``, and the row of check that is about such events."""

    affects: str
    resources: list[str]
    label: str


CASES = {
    "this VM": Case("self", ["vm-1"], "begins"),
    "shared": Case("shared", ["vm-1", "vm-2"], "begins"),
    "several VMs": Case("self", ["vm-2", "vm-1"], "several VMs"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("keys", [", ".join(filter(None, parts)) for parts in product(PLANS, STEPS, TIMES)])
def test_check_says_the_same_of_the_begin_as_explain(run: Run, tmp_path: Path, case: Case, keys: str) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text(
        f"agent: {{state_dir: '{tmp_path.as_posix()}/none'}}\n"
        f"rules: [{{name: a, when: {{affects: {case.affects}}}, {keys}}}]\n"
        "hooks: {drain: {shell: 'true', timeout: 1m}, drain2: {shell: 'true', timeout: 11m, attempts: 2}}\n"
        "maintenance_windows: {night: {start: 02:00, length: 1h, days: sat}}\n"
    )
    _, out, _ = run("check", "--no-files", str(policy))
    rows = re.findall(f"^  {case.label} +(.*)$", out, re.MULTILINE)
    if case.label == "several VMs":  # without such a row, a sentence below the rules covers it
        rows = [row.rpartition("begins ")[2].removesuffix("; not approved") for row in rows if "begins " in row]
        if not rows:
            return
    for type_ in TYPES:
        begins_at = _explained_begin(run, tmp_path, type_, case.resources)
        if not rows:
            assert begins_at in (None, NOON)
            continue
        said = _said_of(type_, rows[0].removeprefix("in window night, or "))
        assert begins_at is not None
        if begins_at == NOON:
            assert said == "at once"
        else:
            before = (NOON + timedelta(hours=2) - begins_at).total_seconds()
            assert said.partition(", or later")[0] == f"{format_duration(before)} before NotBefore"


NOON = datetime(2022, 4, 11, 12, tzinfo=UTC)


def _explained_begin(run: Run, tmp_path: Path, type_: str, resources: list[str]) -> datetime | None:
    event = {"EventId": "1", "EventType": type_, "EventStatus": "Scheduled", "Resources": resources}
    event["NotBefore"] = "2022-04-11T14:00:00Z"
    (tmp_path / "event.json").write_text(json.dumps(event))
    words = ("--config", str(tmp_path / "p.yaml"), "--vm", "vm-1", "--at", "2022-04-11T12:00:00Z", "--json")
    _, out, _ = run("explain", str(tmp_path / "event.json"), *words)
    begins_at = json.loads(out)["events"][0]["plan"]["begins_at"]
    return datetime.fromisoformat(begins_at) if begins_at else None


def _said_of(type_: str, row: str) -> str:
    """What a row of check says of events of this type."""
    usual, *others = row.split("; ")
    for other in others:
        found = re.fullmatch(r"a ([A-Z][a-z]+(?:(?:, | or )[A-Z][a-z]+)*) (.*)", other)
        assert found is not None
        if type_ in found[1]:
            return found[2]
    return usual


SEVERAL = (
    "rules: [{{name: a, when: {{type: Reboot}}, prepare: [x], recover: [], {}}}]\nhooks: {{x: {{run: [x]}}}}\n"
)
LATE_ROW = "begins 5m5s before NotBefore, or later if its hooks are known to be quicker; not approved"


@pytest.mark.parametrize(
    ("keys", "row", "has_sentence"),
    [
        ("approve: when-prepared", None, True),
        ("approve: when-prepared, lead: 10m", "begins 10m before NotBefore; not approved", True),
        ("approve: when-prepared, shared: hold", LATE_ROW, False),
        (
            "approve: when-prepared, shared: first",
            f"approved if this VM is the first of them; else {LATE_ROW}",
            False,
        ),
        ("approve: when-prepared, shared: any", "approved for all of them", False),
        ("approve: immediately", None, True),
        ("approve: immediately, shared: first", "the first VM approves it, each one after it 10s later", False),
        ("approve: immediately, shared: hold", LATE_ROW, False),
        ("approve: never", None, False),
        ("approve: never, shared: hold", None, False),
    ],
)
def test_check_shows_the_difference_for_events_of_several_vms(
    run: Run, tmp_path: Path, keys: str, row: str | None, *, has_sentence: bool
) -> None:
    (tmp_path / "p.yaml").write_text(SEVERAL.format(keys))
    _, out, _ = run("check", "--no-files", "p.yaml")
    rows = [line.split(maxsplit=2)[2] for line in out.splitlines() if line.startswith("  several VMs")]
    assert rows == ([row] if row else [])
    assert ("If an event names other VMs too" in out) == has_sentence


def test_check_names_only_types_that_reach_the_rule(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "rules:\n"
        "  - {name: eviction, when: {type: Preempt}, prepare: [save], approve: never}\n"
        "  - {name: rest, prepare: [save], recover: [], approve: when-prepared}\n"
        "  - {name: far, when: {affects: others, type: [Freeze, Preempt]}, drain_for: 1m, approve: manual}\n"
        "hooks: {save: {shell: 'true', timeout: 2m}}\n"
    )
    _, out, _ = run("check", "--no-files", "p.yaml")
    told = " ".join(out.split())
    assert "eviction when Preempt begins at once prepare run save; a Preempt leaves them 25s approve never" in told
    assert "rest when Any event begins at once prepare run save approve when prepared" in told
    assert (
        "far when Freeze or Preempt that names only other VMs begins 1m5s before NotBefore; a Preempt at once"
        in told
    )


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ("{name: a, when: {type: Reboot}}", "Any other event is only observed: logged and counted."),
        ("{name: a}", "An event that names other VMs only is only observed: logged and counted."),
        (
            "{name: a, when: {source: User}}, {name: b}",
            "An event that names other VMs only is only observed: logged",
        ),
        ("{name: a, when: {affects: others}}", "Any other event is only observed: logged and counted."),
        ("{name: a, when: {affects: [self, others]}}", ""),
        ("{name: a}, {name: b, when: {affects: others}}", ""),
        (
            "{name: a}, {name: b, when: {affects: others, source: User}}",
            "An event that names other VMs only is only",
        ),
        (
            "{name: a, when: {type: SpotRebalanceRecommendation, source: User}}, {name: b}",
            "Any other event is only observed: logged and counted.",
        ),
        (
            "{name: a, when: {type: SpotRebalanceRecommendation}}, {name: b}",
            "An event that names other VMs only is only observed: logged and counted.",
        ),
        (
            "{name: a, when: {type: SpotRebalanceRecommendation}}, {name: b, when: {affects: [self, others]}}",
            "An event that names other VMs only is only observed: logged and counted.",
        ),
    ],
)
def test_check_says_which_events_are_left_to_observe(run: Run, tmp_path: Path, rules: str, sentence: str) -> None:
    (tmp_path / "p.yaml").write_text(f"rules: [{rules}]\n")
    _, out, _ = run("check", "--no-files", "p.yaml")
    found = re.findall(r"^.*is only observed: .*$", out, re.MULTILINE)
    assert [line.startswith(sentence) for line in found] == ([True] if sentence else [])


def test_check_shows_the_address_that_auto_is_now(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "dhcp_option_245", lambda: "10.1.2.3")
    (tmp_path / "p.yaml").write_text("imds: {endpoint: auto}\n")
    _, out, _ = run("check", "--no-files", "p.yaml")
    assert "The agent asks http://10.1.2.3 (endpoint auto, as this machine finds it now) every 1s" in out


def test_no_line_of_check_is_longer_than_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = terminal.Terminal(width=60, has_colors=False)
    monkeypatch.setattr(terminal.Terminal, "of", lambda _: narrow)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("rules: [{name: a, aprove: never}]\nhooks: {x: {run: [x, '&&', y]}}\n")
    for policy in (*(ROOT / "config/examples").glob("*.yaml"), ROOT / "config/policy.yaml", wrong):
        _, out, _ = run("check", str(policy))
        assert max(len(line) for line in out.splitlines()) <= 60


@pytest.mark.parametrize(
    ("text", "what"), [("# nothing\n", "is empty"), ("agent: {mode: observe}\n", "names no rules")]
)
def test_check_says_that_a_file_without_rules_leaves_the_built_in_ones(
    run: Run, tmp_path: Path, text: str, what: str
) -> None:
    (tmp_path / "p.yaml").write_text(text)
    code, out, _ = run("check", "--config", "p.yaml")
    assert code == 0
    assert f"\nThe file {what}: the built-in rules are in force.\n" in out


def test_check_without_a_file_checks_the_built_in_policy(run: Run) -> None:
    code, out, _ = run("check")
    assert code == 0
    assert out.startswith("built-in policy: valid\n\nThe first rule")


def test_check_of_an_invalid_policy_reports_every_error_and_exits_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("rules:\n  - {name: a, aprove: never}\nhooks: {x: {}}\n")
    problems = [
        'p.yaml:2: rules[0]: unknown key "aprove"; did you mean "approve"?',
        (
            "p.yaml:3: hooks.x: expected either run (a program and its arguments) or shell (a command line); "
            "got none"
        ),
    ]
    assert run("check", "--config", "p.yaml") == (2, "\n".join([*problems, "not valid: 2 errors\n"]), "")
    code, out, _ = run("check", "--config", "p.yaml", "--json")
    assert code == 2
    of_both = {"file": "p.yaml", "severity": "error"}
    assert {**json.loads(out), "at": None} == {
        "schema_version": 1,
        "at": None,
        "file": "p.yaml",
        "hash": sha256((tmp_path / "p.yaml").read_bytes()).hexdigest(),
        "valid": False,
        "errors": [
            {
                **of_both,
                "line": 2,
                "column": 15,
                "path": "rules[0]",
                "message": 'unknown key "aprove"',
                "hint": 'did you mean "approve"?',
            },
            {
                **of_both,
                "line": 3,
                "column": 9,
                "path": "hooks.x",
                "message": problems[1].removeprefix("p.yaml:3: hooks.x: "),
                "hint": "",
            },
        ],
        "warnings": [],
    }


@pytest.mark.skipif(sys.platform == "win32", reason="has no execute permission")
def test_check_warns_of_what_hooks_need_and_this_machine_lacks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "good").write_text("#!/bin/sh\n")
    (tmp_path / "good").chmod(0o755)
    text = f"""\
on_clear: [a, b, c, d, e, f, g, h, i, j, k]
hooks:
  a: {{run: [{tmp_path}/absent]}}
  b: {{run: [{tmp_path}/plain]}}
  c: {{run: [{tmp_path}]}}
  d: {{run: [no-such-program-anywhere]}}
  e: {{run: [sh], user: no-such-account}}
  f: {{shell: x, cwd: {tmp_path}/absent}}
  g: {{run: [./good], cwd: {tmp_path}}}
  h: {{run: ['/bin/sh -c SECRET']}}
  i: {{run: ['no-such-program SECRET']}}
  j: {{run: [~/drain.sh]}}
  k: {{run: [hooks/drain], cwd: {tmp_path}}}
"""
    (tmp_path / "p.yaml").write_text(text)
    code, out, _ = run("check", "--config", "p.yaml", "--json")
    each = "write [/bin/sh, ...], each argument an item of its own, or use shell"
    relative = "the name is relative to cwd (default: /)"
    hidden = "there is no such program; it has spaces and is not shown here, for it may be secret"
    assert code == 0
    told = json.loads(out)
    assert (told["valid"], told["errors"]) == (True, [])
    assert {warning["hint"] for warning in told["warnings"]} == {HOOK_HINT}
    lines = run("check", "--config", "p.yaml")[1].splitlines()
    assert [line for line in lines if ": warning: " in line] == [
        f"p.yaml:{warning['line']}: warning: {warning['path']}: {warning['message']}"
        for warning in told["warnings"]
    ]
    assert [
        f"p.yaml:{warning['line']}: {warning['path']}: {warning['message']}" for warning in told["warnings"]
    ] == [
        f"p.yaml:3: hooks.a.run: {tmp_path}/absent does not exist",
        f"p.yaml:4: hooks.b.run: {tmp_path}/plain is not executable: chmod +x {tmp_path}/plain",
        f"p.yaml:5: hooks.c.run: {tmp_path} is a directory",
        "p.yaml:6: hooks.d.run: no-such-program-anywhere is not found in PATH",
        'p.yaml:7: hooks.e.user: this machine has no account "no-such-account"',
        f"p.yaml:8: hooks.f.cwd: {tmp_path}/absent is not a directory on this machine",
        f"p.yaml:10: hooks.h.run: {hidden}: {each}",
        f"p.yaml:11: hooks.i.run: {hidden}: write each argument as an item of its own",
        f"p.yaml:12: hooks.j.run: /~/drain.sh does not exist: {relative}",
        f"p.yaml:13: hooks.k.run: {tmp_path}/hooks/drain does not exist: {relative}",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="has no execute permission")
@pytest.mark.parametrize("is_root", [True, False])
def test_check_reports_all_errors_and_warnings_in_one_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_root: bool
) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "open").write_text("#!/bin/sh\n")
    (tmp_path / "open").chmod(0o777)
    text = f"""\
rules:
  - {{name: a, prepare: [b], recover: [c, e], approve: immediately}}
  - {{name: b, aprove: never, prepare: [d], approve: immediately}}
hooks:
  b: {{run: [{tmp_path}/open]}}
  c: {{run: [{tmp_path}/plain]}}
  d: {{run: [{tmp_path}]}}
  e: {{run: [{tmp_path}/plain], attempts: 0}}
  unused: {{shell: x}}
"""
    (tmp_path / "p.yaml").write_text(text)
    monkeypatch.setattr("scheduled_events_agent.host.is_privileged", lambda: is_root)
    exposed = (
        f"p.yaml:5: hooks.b.run: {tmp_path}/open can be changed by every account, and the agent acts on what it "
        f"finds there: chmod go-w {tmp_path}/open"
    )
    problems = [
        'p.yaml:3: rules[1]: unknown key "aprove"; did you mean "approve"?',
        *([exposed] if is_root else []),
        "p.yaml:8: hooks.e.attempts: expected at least 1; got 0",
    ]
    code, out, _ = run("check", "--config", "p.yaml", "--json")
    told = json.loads(out)
    assert (code, told["valid"]) == (2, False)
    assert [problem.partition("; did you mean")[0] for problem in problems] == as_lines(
        told["errors"], has_hints=False
    )
    warnings = told["warnings"]
    assert [(warning["line"], warning["column"], warning["path"]) for warning in warnings] == [
        (2, 46, "rules[0].approve"),
        *([] if is_root else [(5, 7, "hooks.b.run")]),
        (6, 7, "hooks.c.run"),
        (7, 7, "hooks.d.run"),
    ]
    code, out, _ = run("check", "--config", "p.yaml")
    *lines, last = out.splitlines()
    assert (code, last) == (2, f"not valid: {len(problems)} errors, {len(warnings)} warnings")
    assert sorted([*problems, *as_lines(warnings, has_hints=False)]) == sorted(lines)
    assert [line[:9] for line in lines] == [f"p.yaml:{line}:" for line in range(2, 9) if line != 4]


@pytest.mark.parametrize(
    ("on_unavailable", "slots"),
    [
        ("wait", "events wait for a slot until their latest begin, and then for Azure to start them, and "),
        ("begin", "events begin and are approved without a slot after a minute, and "),
    ],
)
def test_check_shows_the_effect_of_an_unavailable_table(
    run: Run, tmp_path: Path, on_unavailable: str, slots: str
) -> None:
    policy = tmp_path / "p.yaml"
    table = "https://a.example/abc"
    keys = f"group: web, table: '{table}', max_events: 2, on_unavailable: {on_unavailable}, members: [db_*]"
    policy.write_text(f"fleet: {{{keys}}}\nvm: {{name: web_0}}\n")
    code, out, _ = run("check", "--no-files", "--config", str(policy))
    assert code == 0
    assert f"It acts with the VMs of group web through {table}, 2 events at a time.\n" in out
    unavailable = "what names several VMs is not approved."
    assert f"While the store is unavailable, {slots}{unavailable}\n" in out
    assert f"{policy}:1: warning: fleet.members: members does not match this VM, web_0" in out
    policy.write_text(f"fleet: {{group: web, table: '{table}', on_unavailable: {on_unavailable}}}\n")
    _, out, _ = run("check", "--no-files", "--config", str(policy))
    assert f"While the store is unavailable, {unavailable}\n" in out


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_check_without_files_looks_at_the_policy_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.host.is_privileged", lambda: True)
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "agent: {web_config: /absent, state_dir: /run/x}\n"
        "imds: {endpoint: 'http://127.0.0.1:1'}\n"
        "fleet: {table: 'https://a.example/abc', max_events: 1, credential: {sas_file: /absent}}\n"
        "notify: [{name: a, to: {file: /absent}, ca_file: /absent}]\n"
        "on_clear: [a]\n"
        "hooks: {a: {run: [/absent], user: no-such-account, cwd: /absent}}\n"
    )
    policy.chmod(0o666)
    code, out, _ = run("check", "--no-files", "--strict", "--json", "--config", str(policy))
    told = json.loads(out)
    assert (code, told["valid"], told["errors"], told["warnings"]) == (0, True, [], [])
    code, out, _ = run("check", "--json", "--config", str(policy))
    told = json.loads(out)
    assert code == 2
    assert [problem["path"] for problem in (*told["errors"], *told["warnings"]) if problem["path"]] == [
        "fleet.credential.sas_file",
        "agent.state_dir",
        "agent.web_config",
        "notify[0]",
        "hooks.a.cwd",
        "hooks.a.run",
        "hooks.a.user",
    ]


def test_check_names_file_and_line_of_an_unknown_field_of_a_template(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "message.json"
    template.write_text('{"text": "${title}",\n "kind": "${what}"}')
    path = tmp_path / "policy.yaml"
    path.write_text(f"notify:\n  - name: ops\n    to: https://example.com/hook\n    format: '{template}'\n")

    _, out, _ = run("check", "--json", str(path))

    (warning,) = [one for one in json.loads(out)["warnings"] if "${what}" in one["message"]]
    assert (warning["file"], warning["line"], warning["column"], warning["path"]) == (str(path), 2, 5, "notify[0]")
    unknown = f"format: {template}:2: there is no field ${{what}}; known are: id, kind, title"
    assert warning["message"].startswith(unknown)


def test_strict_check_treats_a_warning_as_an_error(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("hooks: {a: {run: [x]}, b: {run: [x]}}\n")
    options = ("--no-files", "--config", str(policy))
    assert run("check", *options)[0] == 0
    code, out, _ = run("check", "--strict", *options)
    *warnings, last = out.splitlines()
    assert (code, len(warnings), last) == (2, 2, "not valid: 0 errors, 2 warnings (--strict)")
    code, out, _ = run("check", "--strict", "--json", *options)
    told = json.loads(out)
    assert (code, told["valid"], told["errors"], len(told["warnings"])) == (2, False, [], 2)


def test_paths_of_the_other_system_are_not_checked(run: Run, tmp_path: Path) -> None:
    place = "/absent/" if sys.platform == "win32" else "C:\\absent\\"
    policy = tmp_path / "p.yaml"
    policy.write_text(
        f"""\
agent: {{web_config: '{place}web.yml', state_dir: '{place}state'}}
fleet: {{group: g, table: 'https://a.example/abc', max_events: 1, credential: {{sas_file: '{place}sas'}}}}
notify: [{{name: a, to: {{file: '{place}url'}}, format: '{place}body', ca_file: '{place}ca'}}]
on_clear: [a]
hooks: {{a: {{run: ['{place}a.ps1'], cwd: '{place}'}}}}
"""
    )
    policy.chmod(0o600)
    code, out, _ = run("check", "--json", "--config", str(policy))
    told = json.loads(out)
    assert (code, told["errors"], told["warnings"]) == (0, [], [])
    code, _, err = run("status", "--config", str(policy))
    assert (code, err.splitlines()[0]) == (2, f"agent.state_dir: {place}state is a path of another system")


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_check_of_invalid_yaml_still_reports_who_could_change_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.host.is_privileged", lambda: False)
    policy = tmp_path / "p.yaml"
    policy.write_text("rules: [")
    policy.chmod(0o666)
    code, out, _ = run("check", "--config", str(policy), "--json")
    told = json.loads(out)
    assert (code, len(told["errors"])) == (2, 1)
    (warning,) = told["warnings"]
    assert (warning["line"], warning["column"], warning["path"]) == (None, None, "")
    assert warning["message"].startswith(f"{policy} can be changed by every account")
    (error,) = told["errors"]
    assert (error["file"], error["line"], error["column"], error["path"]) == (str(policy), 1, 9, "")
    lines = run("check", "--config", str(policy))[1].splitlines()
    assert lines[0].startswith(f"{policy}: warning: {policy} can be changed by every account")


def test_check_prints_the_schema(run: Run) -> None:
    assert run("check", "--schema") == (0, (ROOT / "config/policy.schema.json").read_text(), "")


def test_the_file_is_the_given_one_else_the_environments_else_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system.yaml"
    monkeypatch.setattr(host, "default_config_path", lambda: system)
    monkeypatch.setenv(CONFIG_VARIABLE, "from-environment.yaml")
    assert find_config("given.yaml") == Path("given.yaml")
    assert find_config(None) == Path("from-environment.yaml")
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    assert find_config(None) is None
    system.write_text("")
    assert find_config(None) == system


@pytest.mark.parametrize("name", ["absent.yaml", "absent/policy.yaml"])
def test_a_file_that_was_asked_for_must_exist(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    way_out = "without --config and $SCHEDULED_EVENTS_AGENT_CONFIG the built-in policy is used"
    assert str(caught.value) == f"{path}: there is no such file; {way_out}"


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path)
    reason = "Is a directory" if os.name == "posix" else "Permission denied"
    assert str(caught.value) == f"{tmp_path}: cannot be read: {reason}"


def test_a_file_of_unreasonable_size_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match=r"p\.yaml: expected at most 1024 KiB; it is larger$"):
        load_policy(tmp_path / "p.yaml")


# --- explain

WITH = ("--config", "p.yaml")


def explain(run: Run, policy: str, payload: str, *arguments: str) -> str:
    file = str(PAYLOADS / payload)
    code, out, err = run("explain", file, "--config", policy, "--at", "2022-04-11T22:10:00Z", *arguments)
    assert (code, err) == (0, "")
    return out


def test_explain_reads_what_powershell_5_1_has_saved(run: Run, policy: str, tmp_path: Path) -> None:
    """ConvertTo-Json joins the list Resources, and Out-File writes UTF-16 unless it is told not to."""
    event = {"EventId": "A", "EventType": "Reboot", "EventStatus": "Scheduled", "Resources": "vm-1 vm-2"}
    text = json.dumps({"DocumentIncarnation": 1, "Events": [event]})
    saved = tmp_path / "saved.json"
    for content in (text, json.dumps(event)):
        saved.write_text(content, encoding="utf-8-sig")
        code, out, err = run("explain", str(saved), "--config", policy, "--vm", "vm-2")
        assert (code, err) == (0, "")
        assert "affects shared" in out
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        saved.write_text(text, encoding=encoding)
        message = "not JSON (it is UTF-16; expected UTF-8, in PowerShell Out-File -Encoding utf8)"
        assert run("explain", str(saved), "--config", policy) == (
            1,
            "",
            f"scheduled-events-agent: {saved}: {message}\n",
        )


def test_explain_shows_the_rule_the_reasons_the_plan_and_the_approval(run: Run, policy: str) -> None:
    payload = "33-docs-seed000-freeze-duration-minus1.json"
    assert explain(run, policy, payload, "--vm", "westno_1") == (
        """\
rehearsal: no agent was asked
This VM: westno_1. Time: 2022-04-11 22:10:00 UTC. Document: 2.

Freeze C7061BAC-AFDC-4513-B24B-AA5F13A16123: not before 22:26:58 UTC (in 16m 58s)
  event    Scheduled, from Platform, for an unknown time, \
"Virtual machine is being paused because of a memory-preserving Live Migration operation."
  names    this VM and 1 other: WestNO_0, WestNO_1
  rule     not user-initiated: source is Platform, not User
           not short-freeze: duration is unknown, not below 9s
           rule impactful matches it: affects shared, type Freeze
  begins   at 22:11:58 UTC (lead 15m)
  prepare  not ready for 5s, then run drain, checkpoint, until 22:26:53 UTC at the latest
  approve  not approved: it names several VMs (WestNO_0, WestNO_1) and shared is hold
  recover  once it is over: run resume
"""
    )


@pytest.mark.parametrize(
    ("payload", "approval"),
    [
        ("02-reboot-user-scheduled.json", "at once"),
        ("04-freeze-started-duration6-a.json", "not approved: only a scheduled event"),
        (
            "08-freeze-scheduled-short-notice.json",
            "as soon as its 2 hooks have succeeded; a failed hook holds it",
        ),
        (
            "15-preempt-spot-vm.json",
            (
                "as soon as its 2 hooks have succeeded, at 2022-08-09 16:52:37 UTC at the earliest; "
                "a failed hook holds it"
            ),
        ),
        ("28-docs-flow-2-freeze-scheduled.json", "at once"),
        ("34-docs-maintenance-iso8601-bare-event.json", "not approved: it has no id to approve"),
    ],
)
def test_explain_shows_whether_and_when_an_event_would_be_approved(
    run: Run, policy: str, payload: str, approval: str
) -> None:
    (event,) = json.loads(explain(run, policy, payload, "--json"))["events"]
    assert event["plan"]["approval"]["text"].startswith(approval)


SPOT = """\
rules:
  - name: advice
    when: {type: [SpotRebalanceRecommendation, Preempt]}
    prepare: [drain]
    recover: [drain]
    approve: when-prepared
    expire_after: 30m
  - {name: rest, prepare: [drain], recover: [drain], approve: when-prepared}
hooks:
  drain: {run: [/bin/true]}
"""


@pytest.mark.parametrize("rules", [SPOT, SPOT.replace("SpotRebalanceRecommendation, ", "")])
def test_check_and_explain_say_what_becomes_of_a_recommendation(run: Run, tmp_path: Path, rules: str) -> None:
    policy, event = tmp_path / "p.yaml", tmp_path / "event.json"
    policy.write_text(f"agent: {{state_dir: '{tmp_path.as_posix()}'}}\n{rules}", encoding="utf-8")
    event.write_text(
        '{"EventId": "R", "EventType": "SpotRebalanceRecommendation", "EventStatus": "Scheduled", '
        '"Resources": ["vm_1"], "NotBefore": "Mon, 11 Apr 2022 23:26:58 GMT"}',
        encoding="utf-8",
    )
    told = " ".join(run("check", "--config", str(policy))[1].split())
    explained = " ".join(run("explain", str(event), "--config", str(policy), "--vm", "vm_1")[1].split())
    if rules != SPOT:
        assert "(api-version 2020-07-01)" in told
        assert "not rest: only a rule whose type names SpotRebalanceRecommendation matches it" in explained
        assert "no rule matches it: observe" in explained
        return
    assert "(api-version 2024-07-09, else 2020-07-01)" in told
    assert "a failed hook holds it; a recommendation is not approved" in told
    assert "recover once it is over (a recommendation after 30m): run drain" in told
    assert "rule advice matches it: affects self, type SpotRebalanceRecommendation; " in explained
    assert "begins now prepare run drain" in explained
    assert "recover once it is over, at the latest after 30m: run drain" in explained
    assert "not approved: an approval of a recommendation has no effect" in explained


@pytest.mark.parametrize(
    ("notice_seconds", "prepare", "approval"),
    [
        (
            40,
            "not ready for 20s (50s, cut for the notice), then run drain, until 22:10:35 UTC at the latest",
            "22:10:20 UTC",
        ),
        (
            30,
            "not ready for 15s (50s, cut for the notice), then run drain, until 22:10:25 UTC at the latest",
            "22:10:15 UTC",
        ),
        (7200, "not ready for 50s, then run drain, until 2022-04-12 00:09:55 UTC at the latest", "22:10:50 UTC"),
        (None, "not ready for 50s, then run drain", "22:10:50 UTC"),
    ],
)
def test_explain_shows_the_shortened_drain_and_the_time_for_hooks(
    run: Run, tmp_path: Path, notice_seconds: int | None, prepare: str, approval: str
) -> None:
    (tmp_path / "p.yaml").write_text(
        f"agent: {{state_dir: '{tmp_path.as_posix()}'}}\n"
        "rules: [{name: all, drain_for: 50s, prepare: [drain], recover: [drain], approve: when-prepared}]\n"
        "hooks: {drain: {run: [/bin/true], timeout: 30m, attempts: 3}}\n"
    )
    not_before = ""
    if notice_seconds is not None:
        at = datetime(2022, 4, 11, 22, 10, tzinfo=UTC) + timedelta(seconds=notice_seconds)
        not_before = f"{at:%a, %d %b %Y %H:%M:%S GMT}"
    event = {"EventId": "A", "EventType": "Preempt", "EventStatus": "Scheduled", "Resources": ["a"]}
    (tmp_path / "event.json").write_text(json.dumps({**event, "NotBefore": not_before}))
    code, out, _ = run("explain", "event.json", "--config", "p.yaml", "--at", "2022-04-11T22:10:00Z")
    assert code == 0
    assert f"  prepare  {prepare}\n" in out
    assert f"  approve  as soon as hook drain has succeeded, at {approval} at the earliest; " in out


def test_explain_says_that_an_event_needs_a_slot_of_its_fleet(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "fleet: {group: web, table: 'https://a.table.core.windows.net/events', max_events: 1}\n"
        "rules: [{name: all, prepare: [drain], recover: [], approve: when-prepared}]\n"
        "hooks: {drain: {run: [/bin/true]}}\n"
    )
    assert "  begins   now, once the fleet has a slot for it\n" in run("explain", "platform-reboot", *WITH)[1]
    assert "  begins   now\n" in run("explain", "spot-eviction", *WITH)[1]  # too urgent for that


def test_explain_as_json_has_the_content_of_the_text(run: Run, policy: str) -> None:
    report = json.loads(explain(run, policy, "15-preempt-spot-vm.json", "--json"))
    (event,) = report.pop("events")
    assert report == {
        "schema_version": 1,
        "at": "2022-04-11T22:10:00Z",
        "source": "file",
        "received_at": None,
        "incarnation": "1",
        "vm": {"names": ["vm-spot"], "vm_id": ""},
        "mode": "act",
    }
    plan = event.pop("plan")
    hooks = event.pop("hooks")
    assert [(hook["stage"], hook["hook"], hook["state"]) for hook in hooks] == [
        ("prepare", "drain", "open"),
        ("prepare", "checkpoint", "open"),
        ("recover", "resume", "open"),
    ]
    assert event == {
        "key": "",
        "id": "C1BF8322-4CBF-4FC4-9C45-B40CF3106D0E",
        "type": "Preempt",
        "status": "Scheduled",
        "source": "Platform",
        "resources": ["vm-spot"],
        "not_before": "2022-08-09T17:07:32Z",
        "duration_seconds": None,
        "description": "",
        "seen_at": "2022-04-11T22:10:00Z",
        "rule": "impactful",
        "reason": "rule impactful matches it: affects self, type Preempt",
        "affects": "self",
        "phase": "waiting",
        "phase_since": "2022-04-11T22:10:00Z",
        "outcome": "",
        "ready": True,
        "approval": {
            "wanted": "when-prepared",
            "state": "none",
            "failures": 0,
            "last_error": "",
            "text": "by itself, when prepared",
        },
        "waits_for": None,
        "operator": {"action": "", "by": "", "at": None},
        "activity": "rehearsed as if it were seen now",
        "commands": [],
    }
    assert plan == {
        "rejected_rules": [
            {"rule": "user-initiated", "reason": "source is Platform, not User"},
            {"rule": "short-freeze", "reason": "type is Preempt, not Freeze"},
        ],
        "at": "2022-04-11T22:10:00Z",
        "begins_at": "2022-08-09T16:52:32Z",
        "begins_reason": "lead 15m",
        "needs_slot": False,
        "drain_seconds": 5.0,
        "prepare": ["drain", "checkpoint"],
        "hooks_until": "2022-08-09T17:07:27Z",
        "approval": {
            "verdict": "allow",
            "at": "2022-08-09T16:52:37Z",
            "text": "as soon as its 2 hooks have succeeded, at 2022-08-09 16:52:37 UTC at the earliest; "
            "a failed hook holds it",
        },
        "on_start": [],
        "recover": ["resume"],
    }


@pytest.mark.parametrize("path", sorted(PAYLOADS.glob("*.json")), ids=lambda path: path.name[:2])
def test_explain_of_every_captured_document_reads_or_says_why_not(run: Run, policy: str, path: Path) -> None:
    code, out, err = run("explain", str(path), "--config", policy)
    if code == 0:
        assert out.startswith("rehearsal: no agent was asked\nThis VM: ")
        assert err == ""
    else:
        assert (code, out) == (1, "")
        assert err.startswith(f"scheduled-events-agent: {path}: ")


def test_explain_reads_standard_input(run: Run, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (PAYLOADS / "27-docs-flow-1-empty.json").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body)))
    code, out, _ = run("explain", "-", "--config", policy, "--vm", "a", "--at", "2022-04-11T22:10:00")
    assert code == 0
    assert out == (
        "rehearsal: no agent was asked\n"
        "This VM: a. Time: 2022-04-11 22:10:00 UTC. Document: 1.\n"
        "The document lists no event.\n"
    )


def test_explain_says_when_the_agent_only_observes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("agent: {mode: observe}\nvm: {name: a, aliases: [b]}")
    out = explain(run, "p.yaml", "27-docs-flow-1-empty.json")
    assert out == (
        "rehearsal: no agent was asked\n"
        "This VM: a, also known as b. Time: 2022-04-11 22:10:00 UTC. Document: 1.\n"
        "The agent's mode is observe: nothing of what follows would be done.\n"
        "The document lists no event.\n"
    )


AT = ("--at", "2026-01-05T12:00:00Z")
SCENARIO = """\
vms: [web_0, web_1]
timeline:
  - {at: 2s, event: {name: restart, type: Reboot, source: User, vms: web_0, notice: 10m}}
  - {at: 3s, fault: {kind: stall}}
  - {at: 1m, cancel: restart}
  - {at: 2h, event: {type: Freeze, vms: [web_0, web_1], notice: 20m, duration: 30s, id: A}}
"""


def test_explain_of_a_scenario_shows_each_event_at_the_time_when_it_is_announced(
    run: Run, policy: str, tmp_path: Path
) -> None:
    path = tmp_path / "with blank.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    expected = """\
rehearsal: no agent was asked
This VM: web_0. Time: 2026-01-05 12:00:00 UTC.

Reboot 00000000-0000-0000-0000-000000000001: not before 12:10:02 UTC (in 10m 0s)
  time     12:00:02 UTC, 2s after the scenario began
  event    Scheduled, from User, for an unknown time, \
"Virtual machine is going to be restarted as requested by authorized user."
  names    this VM only
  rule     rule user-initiated matches it: affects self, source User
  approve  at once

Freeze A: not before 14:20:00 UTC (in 20m 0s)
  time     14:00:00 UTC, 2h after the scenario began
  event    Scheduled, from Platform, for about 30s, \
"Virtual machine is being paused because of a memory-preserving Live Migration operation."
  names    this VM and 1 other: web_0, web_1
  rule     not user-initiated: source is Platform, not User
           not short-freeze: duration is 30s, not below 9s
           rule impactful matches it: affects shared, type Freeze
  begins   at 14:05:00 UTC (lead 15m)
  prepare  not ready for 5s, then run drain, checkpoint, until 14:19:55 UTC at the latest
  approve  not approved: it names several VMs (web_0, web_1) and shared is hold
  recover  once it is over: run resume
"""
    assert run("explain", str(path), "--config", policy, *AT) == (0, expected, "")
    assert run("explain", "with blank.yaml", "--config", policy, *AT) == (0, expected, "")


@pytest.mark.parametrize("name", list_scenarios())
def test_explain_knows_every_shipped_scenario_and_says_the_same_each_time(
    run: Run, policy: str, name: str
) -> None:
    code, out, err = run("explain", name, "--config", policy, "--json", *AT)
    assert (code, err) == (0, "")
    assert run("explain", name, "--config", policy, "--json", *AT)[1] == out
    report = json.loads(out)
    assert (report["source"], report["received_at"], report["at"]) == ("scenario", None, "2026-01-05T12:00:00Z")
    scenario = load_scenario(name)
    assert report["vm"]["names"] == [scenario.vms[0]]
    began_at = datetime(2026, 1, 5, 12, tzinfo=UTC)
    planned = [
        (began_at + timedelta(seconds=step.at), step.event.type) for step in scenario.timeline if step.event
    ]
    found = [(datetime.fromisoformat(one["plan"]["at"]), one["type"]) for one in report["events"]]
    assert found == sorted(planned)


def test_explain_says_that_the_agent_does_not_ask_for_recommendations(run: Run, tmp_path: Path) -> None:
    note = "the agent does not ask Azure for recommendations: no rule names SpotRebalanceRecommendation"
    file = tmp_path / "policy.yaml"
    for types, is_noted in (("Preempt", True), ("SpotRebalanceRecommendation", False)):
        file.write_text(f"rules: [{{name: spot, when: {{type: {types}}}, approve: never}}]\n")
        _, printed, _ = run("explain", "rebalance-eviction", "--config", str(file))
        assert (note in printed.splitlines()) == is_noted


def test_explain_of_a_scenario_begins_now_without_a_time(run: Run, policy: str) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    report = json.loads(run("explain", "spot-eviction", "--config", policy, "--json")[1])
    at = datetime.fromisoformat(report["at"])
    assert before <= at <= datetime.now(UTC)
    assert at.microsecond == 0
    assert datetime.fromisoformat(report["events"][0]["plan"]["at"]) == at + timedelta(seconds=2)


def test_a_file_that_is_called_like_a_scenario_is_a_document(run: Run, policy: str, tmp_path: Path) -> None:
    def source() -> str:
        found: str = json.loads(run("explain", "spot-eviction", "--config", policy, "--json")[1])["source"]
        return found

    file = tmp_path / "spot-eviction"
    file.mkdir()
    assert source() == "scenario"
    file.rmdir()
    file.write_bytes((PAYLOADS / "02-reboot-user-scheduled.json").read_bytes())
    assert source() == "file"


@pytest.mark.parametrize(
    ("words", "names", "affects"),
    [
        ("", ["web_0"], ["self", "others"]),
        ("--vm WEB_1", ["WEB_1"], ["others", "self"]),
        ("--vm db_0", ["db_0"], ["others", "others"]),
        ("--vm mine", ["mine"], ["self", "others"]),
        ("--config named.yaml", ["web_1", "x"], ["others", "self"]),
        ("--config named.yaml --vm web_0", ["web_0", "x"], ["self", "others"]),
    ],
)
def test_explain_of_a_scenario_is_for_its_first_vm_or_the_one_that_is_named(
    run: Run, tmp_path: Path, words: str, names: list[str], affects: list[str]
) -> None:
    (tmp_path / "s.yaml").write_text(
        """\
vms: [web_0, web_1]
others: [db_0]
timeline:
  - {at: 0s, event: {type: Reboot, vms: web_0}}
  - {at: 1s, event: {type: Reboot, vms: web_1}}
"""
    )
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "named.yaml").write_text("vm: {name: web_1, aliases: [x]}")
    report = json.loads(run("explain", "s.yaml", "--json", "--config", "empty.yaml", *words.split())[1])
    assert report["vm"]["names"] == names
    assert [event["affects"] for event in report["events"]] == affects


@pytest.mark.parametrize(
    ("version", "expected"),
    [("auto", ["User", "User"]), ("2019-04-01", ["", ""]), ("2017-08-01", [""])],
)
def test_explain_of_a_scenario_shows_what_the_api_version_of_the_policy_has(
    run: Run, tmp_path: Path, version: str, expected: list[str]
) -> None:
    (tmp_path / "s.yaml").write_text(
        "timeline: [{at: 1s, event: {type: Reboot, source: User}}, {at: 2s, event: {type: Preempt, source: User}}]"
    )
    (tmp_path / "p.yaml").write_text(f"imds: {{api_version: {version}}}")
    report = json.loads(run("explain", "s.yaml", "--config", "p.yaml", "--json")[1])
    assert [event["source"] for event in report["events"]] == expected


@pytest.mark.parametrize(
    ("argument", "text", "error"),
    [
        (
            "spot-evicton",
            "",
            (
                "scheduled-events-agent: spot-evicton: there is no such file, and no scenario is called "
                '"spot-evicton": perhaps "spot-eviction" is meant; a scenario of your own is given by its path, '
                "ending in .yaml"
            ),
        ),
        (
            "absent.yaml",
            "",
            "scheduled-events-agent: scenario absent.yaml: cannot be read: No such file or directory",
        ),
        ("absent.json", "", "scheduled-events-agent: absent.json: cannot be read: No such file or directory"),
        ("x" * 300, "", f"scheduled-events-agent: {'x' * 300}: cannot be read: File name too long"),
        (
            "s.yml",
            "timeline: [{at: 1s, fault: {kind: stall}}]",
            "scheduled-events-agent: s.yml: the scenario announces no event",
        ),
        (
            "s.yaml",
            "timeline: [{at: 1s, event: {type: Preempt}}]\n# with imds.api_version 2017-03-01",
            "scheduled-events-agent: s.yaml: the scenario announces no event in api-version 2017-03-01",
        ),
        (
            "s.yaml",
            "rules: []",
            (
                's.yaml:1: unknown key "rules"; known here: vms, others, vm_ids, scale_set, incarnation, '
                "incarnation_step, timeline, ends\n"
                "s.yaml: a .yaml file is read as a scenario; a policy is given with --config"
            ),
        ),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="the system's own texts are those of Linux")
def test_explain_says_what_is_wrong_with_a_scenario(
    run: Run, tmp_path: Path, argument: str, text: str, error: str
) -> None:
    if text:
        (tmp_path / argument).write_text(text)
    (tmp_path / "p.yaml").write_text("imds: {api_version: 2017-03-01}" if "2017-03-01" in text else "")
    assert run("explain", argument, "--config", "p.yaml") == (2, "", f"{error}\n")


def test_the_suffix_of_a_scenario_is_that_of_yaml_in_any_case(run: Run, policy: str, tmp_path: Path) -> None:
    for name in ("a.YAML", "b.Yml", "c.yaml"):
        path = tmp_path / name
        path.write_text("timeline: [{at: 1s, event: {type: Reboot}}]")
        for argument in (name, str(path)):
            code, out, _ = run("explain", argument, "--config", policy)
            assert (code, out.count("Reboot 0000")) == (0, 1)


@pytest.mark.parametrize("place", ["/srv/", "D:\\\\"])
def test_explain_of_a_scenario_is_the_same_on_every_machine(
    run: Run, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "kim")
    policy = tmp_path / "p.yaml"
    policy.write_text(f'agent: {{state_dir: "{place}state"}}\nrules: [{{name: all, approve: manual}}]')
    code, out, err = run("explain", "spot-eviction", "--config", str(policy), *AT)
    assert (code, err) == (0, "")
    assert out.endswith(
        "approve  when an operator approves it: "
        "scheduled-events-agent approve 00000000-0000-0000-0000-000000000001\n"
    )


def test_explain_of_a_scenario_counts_on_the_time_that_hooks_took_here(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        f"agent: {{state_dir: '{tmp_path.as_posix()}'}}\n"
        "rules: [{name: all, prepare: [drain], recover: [drain], approve: manual}]\n"
        "hooks: {drain: {run: [/bin/true], timeout: 2m}}\n"
    )

    def begins_at() -> str:
        (event,) = json.loads(run("explain", "platform-reboot", "--config", str(path), "--json", *AT)[1])["events"]
        found: str = event["plan"]["begins_at"]
        return found

    by_its_limit = begins_at()
    store = Store.open(tmp_path, datetime.now(UTC))
    hook = load_policy(path).settings.hooks["drain"]
    store.set_meta({"hook_times": encode(record_run({}, "drain", hook, "succeeded", 20.0))})
    store.close()
    assert "2026-01-05T12:10:00Z" < by_its_limit < begins_at() < "2026-01-05T12:15:00Z"


@pytest.mark.skipif(os.name != "posix" or shutil.which("git") is None, reason="needs sh and git")
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_the_pipeline_of_the_reference_fails_on_plans_that_are_not_those_of_the_policy(
    tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (pipeline,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/policy.md").read_text("utf-8"), re.DOTALL)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "agent"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }

    def sh(script: str) -> tuple[int, str]:
        done = subprocess.run(
            [shell, "-ec", script],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    commit = "git -c user.name=a -c user.email=a@example.com commit --quiet -m change"
    (tmp_path / "policy.yaml").write_text(POLICY)
    code, out = sh(f"git init --quiet\n{pipeline}")
    assert code != 0, out  # there is no commit at all
    assert sh(f"git add policy.yaml && {commit} -- policy.yaml") == (0, "")
    for _ in range(2):
        code, out = sh(pipeline)
        assert (code, out.count("new file mode")) == (1, 4), out
    assert sh("git add plans")[0] == 0
    assert sh(pipeline)[0] == 1  # they are not committed yet
    plans = {path.name for path in (tmp_path / "plans").iterdir()}
    assert plans == {f"{name}.txt" for name in ("platform-reboot", "user-reboot", "freeze", "spot-eviction")}
    assert sh(commit)[0] == 0
    code, out = sh(pipeline)
    assert code == 0, out

    (tmp_path / "policy.yaml").write_text(POLICY.replace("approve: when-prepared", "approve: manual"))
    code, out = sh(pipeline)
    assert code == 1
    assert "-  approve  as soon as its 2 hooks have succeeded, " in out
    assert "+  approve  when an operator approves it: " in out
    (tmp_path / "policy.yaml").write_text(POLICY.replace("when-prepared", "x"))
    assert sh(pipeline)[0] == 2


@pytest.mark.parametrize("time", ["1969-12-31T23:59:59Z", "2900-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_a_time_beyond_the_calendar_is_wrong_usage(
    run: Run, policy: str, capsys: pytest.CaptureFixture[str], time: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("explain", "spot-eviction", "--config", policy, "--at", time)
    assert caught.value.code == 2
    assert f"--at: expected a year from 1970 to 2899; got '{time}'" in capsys.readouterr().err


@pytest.mark.parametrize("time", ["1970-01-01T00:00:00Z", "2899-12-31T23:59:59Z"])
def test_the_longest_scenario_fits_into_the_calendar(run: Run, policy: str, tmp_path: Path, time: str) -> None:
    event = "{type: Reboot, notice: 3650d, lasts: 3650d}"
    (tmp_path / "s.yaml").write_text(f"timeline: [{{at: 0s, event: {event}}}, {{at: 3650d, event: {event}}}]")
    code, out, err = run("explain", "s.yaml", "--config", policy, "--at", time)
    assert (code, err) == (0, "")
    assert out.count("Reboot 0000") == 2


def test_explain_of_a_missing_file_is_wrong_usage(run: Run) -> None:
    error = "scheduled-events-agent: absent.json: cannot be read: No such file or directory\n"
    assert run("explain", "absent.json") == (2, "", error)


def test_explain_with_a_faulty_policy_is_wrong_configuration(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("x: 1")
    code, out, err = run("explain", "--config", "p.yaml")
    assert (code, out) == (2, "")
    assert err.startswith('p.yaml:1: unknown key "x"; known here: vm, imds')


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A metadata service with one event for this VM."""
    document = (PAYLOADS / "02-reboot-user-scheduled.json").read_bytes()
    instance = json.dumps({"compute": {"name": "flatcar-vm1", "vmId": "1"}}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = document if self.path.startswith("/metadata/scheduledevents?") else instance
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_explain_without_a_document_asks_the_metadata_service(run: Run, tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "p.yaml").write_text(f"imds: {{endpoint: '{endpoint}'}}")
    code, out, _ = run("explain", "--config", "p.yaml", "--at", "2021-07-22T04:36:08Z")
    assert code == 0
    assert out == (
        """\
rehearsal: no agent was asked
This VM: flatcar-vm1. Time: 2021-07-22 04:36:08 UTC. Document: 2.

Reboot 4CAEA225-A741-474D-A72E-428C86FCD853: not before 04:50:17 UTC (in 14m 9s)
  event    Scheduled, from User, for an unknown time
  names    this VM only
  rule     rule user-initiated matches it: affects self, source User
  approve  at once
"""
    )


def test_explain_without_a_metadata_service_fails_with_its_reason(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("imds: {endpoint: 'http://127.0.0.1:1'}")
    code, out, err = run("explain", "--config", "p.yaml")
    assert (code, out) == (1, "")
    assert err.startswith("scheduled-events-agent: GET http://127.0.0.1:1/metadata/scheduledevents")


def test_start_and_reload_do_not_wait_for_local_policy_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{name: all}]\n", encoding="utf-8")
    may_answer = threading.Event()
    was_allowed = []

    def look_up_accounts(*_: Any, **__: Any) -> tuple[()]:
        was_allowed.append(may_answer.wait(10.0))
        return ()

    monkeypatch.setattr(policy_reader, "check_machine", look_up_accounts)
    file = policy_file(path)
    try:
        policy_reader.check_in_background(file.load())
        policy_reader.check_in_background(file.load())
    finally:
        may_answer.set()
        _await_policy_checks()
    assert was_allowed == [True, True]


def test_an_agent_that_cannot_start_leaves_no_policy_check_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.yaml").write_text("rules: [{name: all}]\n", encoding="utf-8")
    (tmp_path / "state").touch()
    checked: list[Any] = []

    def note(loaded: Any) -> list[str]:
        checked.append(loaded)
        return []

    monkeypatch.setattr(policy_reader, "machine_warnings", note)
    with (
        pytest.raises(AgentError, match="it is no directory"),
        open_daemon(
            config=str(tmp_path / "policy.yaml"),
            state_dir=str(tmp_path / "state"),
            is_observing=True,
            stop_timeout=1.0,
            set_up_log=lambda *_: None,
        ),
    ):
        pass
    _await_policy_checks()
    assert checked == []


def test_a_check_that_fails_by_a_bug_is_a_line_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that Python prints itself would tear a line of the log apart."""
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{name: all}]\n", encoding="utf-8")

    def fail(*_: Any, **__: Any) -> tuple[()]:
        raise KeyError("a bug")

    monkeypatch.setattr(policy_reader, "check_machine", fail)
    with structlog.testing.capture_logs() as entries:
        policy_reader.check_in_background(policy_file(path).load())
        _await_policy_checks()
    assert ("error", "a bug in the agent") in [(entry["log_level"], entry["event"]) for entry in entries]


def _await_policy_checks() -> None:
    for thread in threading.enumerate():
        if thread.name == "policy-check":
            thread.join()
