"""Completions of the command line: in a real bash and fish; zsh and PowerShell as far as a grammar can judge."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import apt
import pytest
from packaging.requirements import Requirement
from test_grammar import faults

from scheduled_events_agent.cli import main
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.policy.load import CONFIG_VARIABLE
from scheduled_events_agent.simulator.scenario import list_scenarios
from scheduled_events_agent.store import Store
from scheduled_events_agent.workflow import Transition, Workflow

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "packaging/tools.txt"
NAME = "scheduled-events-agent"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
__all__ = ["faults"]  # the fixture


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Files with the output of ``completion SHELL`` where shtab is installed beside the agent."""
    place = tmp_path_factory.mktemp("completion")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "install",
        "--target",
        str(place),
    ]
    subprocess.run([*pip, "--requirement", str(TOOLS), "--no-deps"], check=True, timeout=300)

    def made(shell: str) -> Path:
        program = f"import sys; sys.path.insert(0, {str(place)!r}); "
        program += "from scheduled_events_agent.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "completion", shell]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        script = place / f"_{NAME}.{shell}"
        script.write_text(done.stdout)
        return script

    return made


def complete_in_bash(script: Path, directory: Path, *words: str, config: str = "") -> list[str]:
    line = f"source {script}; COMP_WORDS=({NAME} {' '.join(map(repr, words))}); COMP_CWORD={len(words)}; "
    line += f'$(complete -p {NAME} | sed "s/.*-F \\([^ ]*\\).*/\\1/"); printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**ENVIRONMENT, CONFIG_VARIABLE: config},
    )
    return [word.strip() for word in done.stdout.split()]


def test_bash_completes_commands_options_and_files(scripts: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").touch()
    (tmp_path / "state").mkdir()
    script = scripts("bash")
    assert complete_in_bash(script, tmp_path, "stat") == ["status"]
    assert complete_in_bash(script, tmp_path, "status", "--js") == ["--json"]
    assert complete_in_bash(script, tmp_path, "completion", "pow") == ["powershell"]
    assert complete_in_bash(script, tmp_path, "check", "--config", "pol") == ["policy.yaml"]
    assert complete_in_bash(script, tmp_path, "explain", "pol") == ["policy.yaml"]
    assert complete_in_bash(script, tmp_path, "history", "--state-dir", "") == ["state"]


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_bash_completes_scenarios_and_files(scripts: Callable[[str], Path], tmp_path: Path, command: str) -> None:
    (tmp_path / "platform.json").touch()
    script = scripts("bash")
    assert complete_in_bash(script, tmp_path, command, "platform") == ["platform-reboot", "platform.json"]
    assert set(list_scenarios()) < set(complete_in_bash(script, tmp_path, command, ""))


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_fish_completes_scenarios_and_files(scripts: Callable[[str], Path], tmp_path: Path, command: str) -> None:
    (tmp_path / "platform.json").touch()
    script = scripts("fish")
    apt.need("fish")
    line = f"source {script}; complete -C '{NAME} {command} platform'"
    done = subprocess.run(
        ["fish", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert (words, done.stderr) == (["platform-reboot", "platform.json"], "")


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_zsh_completes_scenarios_and_files(scripts: Callable[[str], Path], tmp_path: Path, command: str) -> None:
    (tmp_path / "platform.json").touch()
    apt.need("zsh")
    functions = tmp_path / "functions"
    functions.mkdir()
    shutil.copy(scripts("zsh"), functions / f"_{NAME}")
    setup = f"PS1=; fpath=({functions} $fpath); autoload -U compinit; compinit -u -D; cd {tmp_path}; "
    # The second key lists what the first one could not decide. Reading blocks until the words are there.
    program = (
        "zmodload zsh/zpty; zpty shell zsh -f -i\n"
        f"zpty -w shell {shlex.quote(setup + 'print is-$((1 + 1))-ready')}\n"
        "zpty -r shell output '*is-2-ready*'\n"
        f"zpty -w -n shell $'{NAME} {command} platf\\t\\t'\n"
        "zpty -r shell output '*platform-reboot*platform.json*' && print found\n"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == "found\n"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The policy of an agent with two pending events, one of whose ids is a command of a shell."""
    now = datetime.now(UTC)
    (tmp_path / "state").mkdir(mode=0o700)
    store = Store.open(tmp_path / "state", now)
    steps = []
    for event_id in ("602D9444-AAAA", "7A11-B", "$(touch${IFS}owned)"):
        event = ScheduledEvent(id=event_id, type="Reboot", status="Scheduled")
        decision = Decision(rule=None, reason="", affects="self")
        workflow = Workflow(
            id=event_id, event=event, decision=decision, first_seen_at=now, not_before_seen_at=now, boot_id="b"
        )
        steps.append(Transition(workflow=workflow))
    store.commit(steps, now)
    store.close()
    file = tmp_path / "policy.yaml"
    file.write_text(f"agent: {{state_dir: {tmp_path / 'state'}}}\n")
    return file


def test_bash_completes_ids_of_pending_events_and_runs_none_of_them(
    scripts: Callable[[str], Path], policy: Path
) -> None:
    script, place = scripts("bash"), policy.parent
    for words in (("approve",), ("history", "--event")):
        assert complete_in_bash(script, place, *words, "602", config=str(policy)) == ["602D9444-AAAA"]
    offered = complete_in_bash(script, place, "hold", "", config=str(policy))
    assert {"602D9444-AAAA", "7A11-B"} <= set(offered)
    assert not any("touch" in word for word in offered)
    assert complete_in_bash(script, place, "hold", "602D9444-AAAA", config="nowhere") == []
    assert not (place / "owned").exists()


def test_fish_completes_ids_of_pending_events(scripts: Callable[[str], Path], policy: Path) -> None:
    script = scripts("fish")
    apt.need("fish")
    done = subprocess.run(
        ["fish", "-c", f"source {script}; complete -C '{NAME} approve '"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**ENVIRONMENT, CONFIG_VARIABLE: str(policy)},
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["602D9444-AAAA", "7A11-B"]


def test_zsh_and_powershell_run_the_command_that_lists_ids(scripts: Callable[[str], Path]) -> None:
    for shell in ("zsh", "powershell"):
        assert "scheduled-events-agent completion ids" in scripts(shell).read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_without_its_extra_an_installation_by_pip_says_how_to_get_it(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)  # as if it were not installed
    assert main(["completion", shell]) == 1
    assert "pip install 'scheduled-events-agent[completion]'" in capsys.readouterr().err


def test_the_extra_brings_what_the_tests_and_the_packages_have_tried() -> None:
    (pinned,) = re.findall(r"^shtab==(\S+)", TOOLS.read_text(), re.MULTILINE)
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "completion"
    ]
    wanted = Requirement(extra)
    assert wanted.name == "shtab"
    assert pinned in wanted.specifier


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_parse_their_completion_script(scripts: Callable[[str], Path], shell: str) -> None:
    script = scripts(shell)
    apt.need(shell)
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in script.read_text() for word in ("status", "history", "json", "since"))


def test_the_script_for_powershell_is_well_formed(
    scripts: Callable[[str], Path], faults: Callable[[str], list[str]]
) -> None:
    script = scripts("powershell").read_text()
    assert faults(script) == []
    assert script.isascii()
    assert all(word in script for word in ("status", "approve", "history", "--state-dir"))
