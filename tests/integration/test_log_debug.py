"""Lines that the log has only at level debug: why the agent does what it does, without secrets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from receiver import Receiver

from scheduled_events_agent.engine.debugging import DebugReporter
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.simulator.table import SimulatedTable
from scheduled_events_agent.telemetry.log import set_up

if sys.platform == "win32":
    pytest.skip("the hooks are Unix commands", allow_module_level=True)

SECRETS = (
    "correct-horse",
    "battery-staple",
    "shell-secret",
    "Bearer-secret",
    "secret-path",
    "secret-query",
    "sig-secret",
)
GATES = {
    "schedule", "slot", "eligibility", "preparation", "state_loss", "id", "rule", "operator", "not_started",
    "shared_event", "fleet", "approval_slot", "stale",
}  # fmt: skip


def story(directory: Path, level: str) -> tuple[str, list[dict[str, Any]]]:
    """The id of a reboot from first sight to its end, and the lines of the log."""
    (directory / "sas").touch(mode=0o600)
    (directory / "sas").write_text("sv=1&sig=sig-secret")
    log = directory / "log"
    with (
        Simulator(vms=("vm-1",), rate_limit=None) as sim,
        SimulatedTable() as table,
        Receiver() as receiver,
        log.open("wb") as stream,
    ):
        policy = {
            "imds": {"endpoint": sim.endpoint(), "poll_interval": "250ms"},
            "agent": {"listen": "off", "log": {"level": level, "format": "json"}},
            "fleet": {
                "table": table.url,
                "group": "web",
                "max_events": 1,
                "credential": {"sas_file": str(directory / "sas")},
            },
            "notify": [
                {
                    "name": "ops",
                    "to": receiver.url,
                    "headers": {"Authorization": "Bearer-secret"},
                    "on": ["seen", "started", "recovered"],
                }
            ],
            "rules": [
                {"name": "user", "when": {"source": "User"}, "approve": "immediately"},
                {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"},
            ],
            "hooks": {
                "drain": {"run": ["/bin/true", "--token=correct-horse"], "env": {"TOKEN": "battery-staple"}},
                "resume": {"shell": "true shell-secret", "timeout": "20s", "attempts": 2},
            },
        }
        (directory / "policy.yaml").write_text(json.dumps(policy))
        arguments = ("run", "--config", str(directory / "policy.yaml"), "--state-dir", str(directory / "state"))
        process = subprocess.Popen([sys.executable, "-m", "scheduled_events_agent", *arguments], stderr=stream)
        try:
            event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=0.5)
            sim.wait_approved(event, timeout_seconds=60)
            sim.wait_gone(event, timeout_seconds=60)
            sim.wait_until(lambda: len(receiver.taken) == 3, "all notices had arrived")
        finally:
            process.terminate()
            process.wait(60)
    return event, [json.loads(line) for line in log.read_text().splitlines()]


def test_a_reboot_writes_each_kind_of_debug_line_and_no_secret(tmp_path: Path) -> None:
    event, lines = story(tmp_path, "debug")
    debug = [line for line in lines if line["level"] == "debug"]

    def told(message: str) -> list[dict[str, Any]]:
        return [line for line in debug if line["message"] == message]

    with_event = [line for line in told("another document") if line["events"] == [f"Reboot {event[:8]} Scheduled"]]
    (document,) = with_event
    assert document["incarnation"] != document["incarnation_before"]
    assert (document["count"], document["milliseconds"] >= 0) == (1, True)
    assert document["api_version"]
    (passed,) = told("rule user does not match")
    assert (passed["event_id"], passed["reason"]) == (event, "source is Platform, not User")
    gates = {line["message"].removeprefix("gate ") for line in debug if line["message"].startswith("gate ")}
    assert gates == GATES
    answers = [line["reason"] for line in told("gate preparation")]
    assert answers == ["wait: preparation is not done", "allow"]
    drain, resume = told("hook command")
    assert drain["command"] == "/bin/true with 1 argument"
    assert 0 < drain["deadline_seconds"] < 600
    assert (drain["hook"], drain["event_id"], bool(drain["account"])) == ("drain", event, True)
    assert (resume["command"], resume["limit_seconds"], resume["attempts"]) == ("a line for the shell", 20.0, 2)
    assert resume["deadline_seconds"] is None
    asked = told("request to fleet")
    assert {line["status"] for line in asked} >= {200, 204}
    assert {line["method"] for line in asked} >= {"GET", "PUT"}
    sent = told("request to notification target")
    assert [(line["target"], line["kind"], line["event_id"], line["status"]) for line in sent] == [
        ("ops", what, event, 202) for what in ("seen", "started", "recovered")
    ]
    assert min(line["milliseconds"] for line in (*asked, *sent)) > 0
    text = (tmp_path / "log").read_text()
    assert [secret for secret in SECRETS if secret in text] == []


def test_at_level_info_there_are_no_debug_lines(tmp_path: Path) -> None:
    _, lines = story(tmp_path, "info")
    assert "debug" not in {line["level"] for line in lines}
    kinds = ("another document", "rule ", "gate ", "hook command", "request to ")
    assert [line for line in lines if line["message"].startswith(kinds)] == []


def test_at_level_info_no_debug_value_is_computed() -> None:
    unread: Any = None  # neither steps nor workflows nor context are looked at
    set_up("info", "json")
    try:
        DebugReporter(unread).report(unread, unread, unread)
    finally:
        structlog.reset_defaults()
