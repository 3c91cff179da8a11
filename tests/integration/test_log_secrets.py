"""Texts in hooks that may be secret stay out of the log, the pages and the journal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.store import Store

SECRET = "correct-horse-battery-staple"


@pytest.mark.skipif(sys.platform == "win32", reason="the hooks are Unix commands")
def test_arguments_and_environment_of_hooks_appear_nowhere(tmp_path: Path) -> None:
    hooks = {
        "succeeds": {"run": ["/bin/true", f"--token={SECRET}"], "env": {"TOKEN": SECRET}},
        "fails": {"shell": f"exit 3 # {SECRET}", "env": {"TOKEN": SECRET}},
        "is-missing": {"run": ["/nonexistent/program", SECRET], "env": {"TOKEN": SECRET}},
        "hangs": {"run": ["/bin/sh", "-c", f"sleep 60 # {SECRET}"], "timeout": "200ms"},
    }
    with Simulator(vms=("vm-1",), rate_limit=None) as sim:
        policy = tmp_path / "policy.yaml"
        rules = [
            {
                "name": name,
                "when": {"description": name},
                "prepare": ["succeeds", name],
                "recover": ["fails", "is-missing"],
                "approve": "when-prepared",
                "on_failure": "approve",
            }
            for name in ("fails", "is-missing", "hangs")
        ]
        settings = {
            "imds": {"endpoint": sim.endpoint(), "poll_interval": "250ms"},
            "agent": {"listen": "127.0.0.1:0", "log": {"level": "debug", "format": "json"}},
            "rules": rules,
            "hooks": hooks,
        }
        policy.write_text(json.dumps(settings))
        log = tmp_path / "log"
        arguments = [
            "-m",
            "scheduled_events_agent",
            "run",
            "--config",
            str(policy),
            "--state-dir",
            str(tmp_path / "state"),
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen([sys.executable, *arguments], stderr=stream)
        try:
            ids = [
                sim.schedule("Reboot", notice_seconds=60, lasts_seconds=0.5, description=str(rule["name"]))
                for rule in rules
            ]
            for event_id in ids:
                sim.wait_approved(event_id, timeout_seconds=30)
            for event_id in ids:
                sim.wait_gone(event_id, timeout_seconds=30)
            sim.wait_polls(3)
        finally:
            process.terminate()
            process.wait(60)
    text = log.read_text()
    store = Store.open_client(tmp_path / "state")
    journal = store.load_journal()
    store.close()
    # The hooks did run, and ended as they should; and still:
    assert {entry.hook for entry in journal if entry.kind == "hook_finished"} == set(hooks)
    assert SECRET not in text
    assert all(SECRET not in entry.text + entry.detail for entry in journal)
