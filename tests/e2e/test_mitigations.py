"""Five states of docs/runbook.md: made, diagnosed and mitigated as the page says, until the metric is back.

Each command is one of the section's; a test fails if the page does not have it any more.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Agent, Simulator
from ports import free_port
from runbook_page import codes, part

if sys.platform == "win32":
    pytest.skip("a reload is a signal here, as systemd sends it", allow_module_level=True)

RULE = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
STATUS = "sudo scheduled-events-agent status"
OUTPUT = "| the disk is away"
RELOAD = "sudo systemctl reload scheduled-events-agent"
LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


def follow(
    agent: Agent, section: str, step: str, command: str, event: str = ""
) -> subprocess.CompletedProcess[str]:
    """Carry out a command of the page for this agent; ``event`` stands for ID."""
    assert command in codes(part(section, step)), f"{step} of {section} has no {command}"
    words = [event[:8] if word == "ID" else word for word in shlex.split(command.removeprefix("sudo "))]
    if words[0] == "scheduled-events-agent":
        state = [] if words[1] == "check" else ["--state-dir", str(agent.state_dir)]
        return agent.run(*words[1:], "--config", str(agent.config), *state)
    words = [word.replace("/var/lib/scheduled-events-agent", str(agent.state_dir)) for word in words]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def reload(agent: Agent, section: str) -> None:
    """Have the agent read its policy again, as the page says."""
    assert RELOAD in codes(part(section, "Mitigation"))
    agent.reload()


def look(agent: Agent, section: str, command: str, line: str = "", event: str = "") -> str:
    """Carry out a command of the diagnosis; its output, which has the ``line`` that the page says to look for."""
    assert not line or line in codes(part(section, "Diagnosis"))
    output = follow(agent, section, "Diagnosis", command, event).stdout
    assert line in output
    return output


def wait_resolved(agent: Agent, kind: str) -> None:
    """Wait until nothing needs a person, and the metric that the page names is back."""
    assert f'scheduled_events_attention{{kind="{kind}"}}' in codes(part(kind, "Resolved when"))
    agent.wait_metric(0, "attention", kind=kind)
    agent.wait_until(lambda: agent.status()["attention"] == [], "nothing needs a person")
    status = agent.run("status", "--state-dir", str(agent.state_dir))
    assert (status.returncode, "runbook " in status.stdout) == (0, False)


def write_hooks(agent: Agent, failing: str) -> Path:
    """A policy with a hook that fails until the returned file is there."""
    repaired = agent.directory / "repaired"
    hook = {"shell": f"echo {OUTPUT[2:]}; test -e {repaired}"}
    agent.write_policy(rules=[RULE], hooks={**agent.hooks("drain", "resume"), failing: hook})
    return repaired


def test_recovery_failed(agent: Agent, sim: Simulator) -> None:
    repaired = write_hooks(agent, "resume")
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=0.1)
    agent.wait_metric(1, "attention", kind="recovery_failed")
    assert agent.metric("ready") == 0
    history = "sudo scheduled-events-agent history --event ID"
    assert OUTPUT in look(agent, "recovery_failed", STATUS, "ACT  Recovery from")
    assert OUTPUT in look(agent, "recovery_failed", history, event=event)
    repaired.touch()
    retry = "sudo scheduled-events-agent retry ID"
    assert follow(agent, "recovery_failed", "Mitigation", retry, event).returncode == 0
    wait_resolved(agent, "recovery_failed")
    agent.wait_metric(1, "ready")


def test_prepare_failed(agent: Agent, sim: Simulator) -> None:
    repaired = write_hooks(agent, "drain")
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None, start_delay_seconds=600)
    agent.wait_metric(1, "attention", kind="prepare_failed")
    history = "sudo scheduled-events-agent history --event ID"
    assert OUTPUT in look(agent, "prepare_failed", STATUS, "is held:")
    assert OUTPUT in look(agent, "prepare_failed", history, event=event)
    repaired.touch()
    retry = "sudo scheduled-events-agent retry ID"
    assert follow(agent, "prepare_failed", "Mitigation", retry, event).returncode == 0
    wait_resolved(agent, "prepare_failed")
    sim.wait_approved(event)


def test_polling_is_stale(agent: Agent) -> None:
    section, metric = "ScheduledEventsPollingStale", "last_successful_poll_timestamp_seconds"
    assert f"scheduled_events_{metric}" in codes(part(section, "Resolved when"))
    agent.write_policy(imds={"endpoint": f"http://127.0.0.1:{free_port()}"}, agent={"healthy_within": "1s"})
    agent.start(is_awaited=False)
    agent.wait_log("agent started")
    agent.wait_metric(1, "attention", kind="unhealthy")
    assert time.time() - agent.metric(metric) > 120
    look(agent, section, STATUS, "last poll  failed:")
    assert re.search("^error +endpoint", look(agent, section, "sudo scheduled-events-agent doctor"))
    agent.write_policy(agent={"healthy_within": "1m"})  # with the right address
    reload(agent, section)
    agent.wait_until(lambda: time.time() - agent.metric(metric) < 120, "a poll has succeeded")
    wait_resolved(agent, "unhealthy")


def test_policy_rejected(agent: Agent) -> None:
    good = {"rules": [RULE], "hooks": agent.hooks("drain", "resume")}
    agent.write_policy(**good)
    agent.start()
    agent.write_policy(**good, rulez=[])
    reload(agent, "policy_rejected")
    agent.wait_metric(1, "attention", kind="policy_rejected")
    assert agent.metric("config_last_reload_successful") == 0
    check = "sudo scheduled-events-agent check"
    line = 1 + agent.config.read_text().splitlines().index("rulez: []")
    assert f'{agent.config}:{line}: unknown key "rulez"' in look(agent, "policy_rejected", check)
    agent.write_policy(**good)
    assert follow(agent, "policy_rejected", "Mitigation", check).returncode == 0
    reload(agent, "policy_rejected")
    wait_resolved(agent, "policy_rejected")
    agent.wait_metric(1, "config_last_reload_successful")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("fuser") is None, reason="there is no fuser (package psmisc)")
def test_errors_of_the_state_file(agent: Agent, sim: Simulator) -> None:
    agent.write_policy(rules=[RULE], hooks=agent.hooks("drain", "resume"))
    agent.start()
    state = agent.state_dir / "state.db"
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None, start_delay_seconds=600)
            agent.wait_metric(1, "attention", kind="unhealthy")
            assert agent.metric("store_errors_total") > 0
            reason = "database is locked"
            assert f'"{reason}": ' in part("unhealthy", "Mitigation")
            assert reason in look(agent, "unhealthy", STATUS, "ACT")
            fuser = "sudo fuser -v /var/lib/scheduled-events-agent/state.db"
            users = follow(agent, "unhealthy", "Mitigation", fuser).stdout.split()
            assert {*users} == {str(agent.process.pid), str(other.pid)}
        finally:
            other.kill()
    wait_resolved(agent, "unhealthy")
    sim.wait_approved(event)
    errors = agent.metric("store_errors_total")
    sim.wait_polls(8)
    assert agent.metric("store_errors_total") == errors
