"""What the agent is started with by others: a locale, variables, blocked signals, the part of PID 1."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Windows has neither these locales nor these signals", allow_module_level=True)

import psutil
from harness import PATIENCE, Agent, Simulator

TEXT = "Müller 日本"
# Notes a variable, the event's description and the directory, as bytes.
NOTE = "env | grep -a -e ^GREETING= -e ^SCHEDULED_EVENT_DESCRIPTION= >>'{notes}'; pwd >>'{notes}'"


def test_a_hook_gets_utf_8_whatever_the_locale(sim: Simulator, agent: Agent, tmp_path: Path) -> None:
    directory = tmp_path / TEXT
    directory.mkdir()
    notes = directory / "notes"
    program = directory / "hook"
    program.write_text(f"#!/bin/sh\n{NOTE.format(notes=notes)}\n", encoding="utf-8")
    program.chmod(0o755)
    agent.environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    agent.write_policy(
        rules=[{"name": "all", "prepare": ["run", "shell"], "approve": "when-prepared"}],
        hooks={
            "run": {"run": [str(program)], "cwd": str(directory), "env": {"GREETING": TEXT}},
            "shell": {"shell": NOTE.format(notes=notes), "cwd": "/", "env": {"GREETING": TEXT}},
        },
    )
    agent.start()
    sim.wait_approved(sim.schedule("Reboot", description=TEXT))
    lines = notes.read_text("utf-8").splitlines()
    assert sorted(lines) == sorted(
        [*2 * [f"GREETING={TEXT}", f"SCHEDULED_EVENT_DESCRIPTION={TEXT}"], str(directory), "/"]
    )


def test_variables_of_another_prometheus_client_are_of_no_effect(agent: Agent, tmp_path: Path) -> None:
    agent.environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "prometheus_multiproc_dir": str(tmp_path)}
    agent.write_policy()
    agent.start()
    assert agent.metric("agent_info") == 1
    assert list(tmp_path.glob("*.db")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_whose_parent_has_blocked_a_signal_can_be_ended_by_it(
    agent: Agent, number: signal.Signals
) -> None:
    block = f"import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])"
    agent.prefix = [sys.executable, "-ISc", f"{block}; os.execv(sys.argv[1], sys.argv[1:])"]
    agent.write_policy()
    agent.start()
    agent.process.send_signal(number)
    assert agent.wait_exit() == 0


def test_as_pid_1_the_agent_releases_orphans_although_no_hook_has_run(agent: Agent) -> None:
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, timeout=PATIENCE, check=False).returncode != 0:
        pytest.skip("this account may not make a namespace for processes")
    # As what `kubectl exec` starts: in a session of its own, and its parent ends before it does.
    orphan = "setsid sh -c 'sh -c \"sleep 0.1; echo orphan\" &' & "
    agent.prefix = [*alone, "sh", "-c", f'{orphan} exec "$@"', "sh"]
    agent.write_policy()
    agent.start()
    (first,) = psutil.Process(agent.process.pid).children()
    agent.wait_until(lambda: not first.children(), "the orphan was released")
    first.send_signal(signal.SIGTERM)
    assert agent.wait_exit() == 0
