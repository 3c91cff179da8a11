"""Words that are no command line: what is printed helps."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from scheduled_events_agent import cli, host
from scheduled_events_agent.policy.load import CONFIG_VARIABLE
from scheduled_events_agent.store import Store


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines on standard error of a command line that is wrong usage."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        ("chek", "[-h] [--version]", "there is no command chek; did you mean check?"),
        ("zzzzzz", "[-h] [--version]", "there is no command zzzzzz; --help lists them"),
        ("check --strct", "check [-h]", "check: error: unknown option: --strct; did you mean --strict?"),
        ("check --confg=x", "check [-h]", "check: error: unknown option: --confg=x; did you mean --config?"),
        ("status --zzzzzz", "status [-h]", "status: error: unknown option: --zzzzzz"),
        ("check a b", "check [-h]", "check: error: unexpected argument: b"),
        ("fleet release E --slto", "fleet [-h]", "fleet: error: unknown option: --slto"),
        ("notify test --jsn", "notify [-h]", "unknown option: --jsn; did you mean --json?"),
        ("--vrsion status", "[-h] [--version]", "unknown option: --vrsion; did you mean --version?"),
    ],
)
def test_wrong_usage_prints_the_usage_of_its_command_and_a_guess(
    capsys: pytest.CaptureFixture[str], words: str, usage: str, message: str
) -> None:
    lines = refused(capsys, *words.split())
    assert lines[0].startswith(f"usage: scheduled-events-agent {usage}")
    assert message in lines[-1]


HOSTILE = "\x1b[31m\x1b]0;title\x07\x9b2J"


@pytest.mark.parametrize(
    "words",
    [
        *((action, HOSTILE) for action in ("approve", "hold", "release", "retry", "resolve")),
        ("hold", "1", "--state-dir", HOSTILE),
        (HOSTILE,),
        (f"--{HOSTILE}", "status"),
        ("status", HOSTILE),
        ("history", "--since", HOSTILE),
        ("check", HOSTILE),
        ("check", "--config", HOSTILE),
        ("explain", HOSTILE),
        ("explain", f"{HOSTILE}.yaml"),
        ("explain", "--at", HOSTILE),
        ("run", "--listen", HOSTILE),
        ("run", "--stop-timeout", HOSTILE),
        ("notify", "test", HOSTILE),
        ("notify", HOSTILE),
        ("kubernetes", "drain", "--kubeconfig", HOSTILE),
        ("simulate", HOSTILE),
        ("simulate", "--check", HOSTILE),
        ("simulate", "--record", HOSTILE),
        ("completion", HOSTILE),
    ],
    ids=lambda words: " ".join(words).replace(HOSTILE, "HOSTILE"),
)
def test_an_argument_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"agent: {{state_dir: '{tmp_path / 'state'}'}}\nnotify: [{{name: ops, to: 'http://x/'}}]\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(policy))
    (tmp_path / "state").mkdir(mode=0o700)
    Store.open(tmp_path / "state", datetime.now(UTC)).close()
    try:
        code: object = cli.main(words)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code not in (0, None)
    assert "title" in out + err
    assert all(line.isprintable() for line in (out + err).split("\n"))


@pytest.mark.parametrize(
    "words",
    [
        ("check", ""),
        ("check", "--config", ""),
        ("run", "--config="),
        ("run", "--state-dir", ""),
        ("status", "--state-dir="),
    ],
)
def test_an_empty_path_does_not_stand_for_the_default(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert refused(capsys, *words)[-1].endswith(": expected a path; got an empty text")


def test_the_file_to_check_is_an_argument_or_an_option_but_not_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    policy = tmp_path / "policy.yaml"
    policy.write_text("agent: {mode: observe}\n", encoding="utf-8")
    assert cli.main(["check", str(policy)]) == 0
    as_argument = capsys.readouterr().out
    assert as_argument.startswith(f"{policy}: valid\n")
    assert cli.main(["check", "--config", str(policy)]) == 0
    assert capsys.readouterr().out == as_argument
    assert cli.main(["check", str(policy), "--config", str(policy)]) == 2
    assert capsys.readouterr().err == "scheduled-events-agent: FILE and --config are the same: give one of them\n"


@pytest.mark.parametrize("has_service_command", [True, False])
def test_the_help_lists_what_people_use_on_this_system(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, has_service_command: bool
) -> None:
    monkeypatch.setattr(host, "has_service_command", lambda: has_service_command)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert "check" in listed
    assert ("service" in listed) == has_service_command
    with pytest.raises(SystemExit):
        cli.main(["service", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("    install ") for line in lines)
    assert not any(line.startswith("    host") for line in lines)


@pytest.mark.skipif(host.has_service_command(), reason="there it is for real")
def test_a_hidden_command_explains_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["service", "host"]) != 0
    assert "for Windows" in capsys.readouterr().err
