"""Workflows as they are stored: an agent that starts reads them, and an event goes on in the middle."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from test_workflow import START, Agent, a_rule, an_event, started

from scheduled_events_agent.workflow import AgentRestarted, OperatorSpoke, Reconsider, Workflow, is_ready

IDLE: dict[str, Any] = {
    "state": "idle", "done": [], "current": None, "run": 0, "is_canceling": False, "failure": "",
    "failed_hook": "",
}  # fmt: skip
DONE = {**IDLE, "state": "succeeded", "done": ["drain", "checkpoint"], "run": 2}
STORED: dict[str, Any] = {
    "id": "a@20260302T120001.000000Z",
    "event": {
        "id": "A", "type": "Reboot", "status": "Scheduled", "source": "Platform", "resources": ["vm_1"],
        "not_before": "2026-03-02T12:15:00Z", "duration_seconds": 9.0, "description": "maintenance",
        "resource_type": "", "received_id": "", "id_fault": "", "is_ambiguous": False,
    },
    "decision": {
        "rule": "impactful", "reason": "rule impactful takes it: affects self", "affects": "self",
        "prepare": ["drain", "checkpoint"], "on_start": [], "recover": ["resume", "load"], "drain_for": 0.0,
        "approve": "when-prepared", "on_failure": "hold", "shared": "hold", "may_speak": True, "speaks_after": 0.0,
        "on_early_start": "cancel", "lead": None, "window_name": None, "window": None,
        "expire_after": 3600.0,
    },
    "first_seen_at": "2026-03-02T12:00:01Z", "noticed_at": "2026-03-02T12:00:01Z", "boot_id": "boot 1",
    "prepare_boot_id": "boot 1",
    "phase": "preparing",
    "prepare": {**IDLE, "state": "running", "done": ["drain"], "current": "checkpoint", "run": 2},
    "on_start": IDLE, "recover": IDLE, "drain_until": None,
    "approval": {"state": "none", "failures": 0, "failing_since": None, "retry_at": None, "failed_at": None},
    "operator": "", "approval_needed_since": None, "phase_since": None,
    "change_noted_at": None, "missing_since": None, "is_over": False, "is_undone": False, "was_started": False,
    "is_doubtful": False, "begun_at": "2026-03-02T12:00:01Z", "waits": None, "outcome": "",
}  # fmt: skip
OVER = {
    "prepare": DONE, "missing_since": "2026-03-02T12:00:05Z", "is_over": True, "was_started": True,
    "outcome": "completed",
}  # fmt: skip
EVENT = an_event(description="maintenance", duration_seconds=9.0)


def an_agent_that_goes_on(**changes: Any) -> Agent:
    """The agent after a restart, before its first document."""
    workflow = msgspec.json.decode(msgspec.json.encode({**STORED, **changes}), type=Workflow)
    agent = Agent(a_rule(recover=("resume", "load")))
    agent.context = replace(agent.context, now=START, document_at=None)
    agent.board = {workflow.id: workflow}
    assert agent.send(AgentRestarted(), Reconsider()) == []
    return agent


def test_what_is_stored_keeps_its_form() -> None:
    stored = msgspec.json.encode(STORED)
    assert msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(stored, type=Workflow))) == STORED


def test_a_hook_that_the_restart_cut_off_runs_again() -> None:
    agent = an_agent_that_goes_on()
    assert agent.document(EVENT) == ["A: prepare checkpoint"]
    assert agent.ends("checkpoint") == ["A: approve A"]


def test_an_approval_without_an_answer_is_sent_again() -> None:
    agent = an_agent_that_goes_on(
        phase="prepared", prepare=DONE, approval={**STORED["approval"], "state": "requested"}
    )
    assert agent.document(EVENT) == ["A: approve A"]


def test_a_recovery_goes_on_with_the_hook_that_ran() -> None:
    recover = {**IDLE, "state": "running", "done": ["resume"], "current": "load", "run": 2}
    agent = an_agent_that_goes_on(**OVER, phase="recovering", recover=recover)
    assert agent.document() == ["A: recover load"]
    assert agent.ends("load") == []
    assert agent.board == {}


def test_a_recovery_that_has_failed_waits_for_a_retry() -> None:
    recover = {
        **IDLE,
        "state": "failed",
        "done": ["resume"],
        "run": 2,
        "failure": "it broke",
        "failed_hook": "load",
    }
    agent = an_agent_that_goes_on(**OVER, phase="recovery_failed", recover=recover)
    assert agent.document() == []
    assert not is_ready(agent.board)
    (workflow_id,) = agent.board
    assert agent.send(OperatorSpoke(workflow_id=workflow_id, word="retry", user="kim")) == ["A: recover load"]


@pytest.mark.parametrize("phase", ["waiting", "held", "approved", "started"])
def test_an_event_of_every_other_phase_goes_on_to_its_end(phase: str) -> None:
    is_approved = phase in ("approved", "started")
    changes: dict[str, Any] = {
        "phase": phase,
        "prepare": DONE if is_approved else IDLE,
        "approval": {**STORED["approval"], "state": "confirmed" if is_approved else "none"},
        "operator": "held" if phase == "held" else "",
        "was_started": phase == "started",
    }
    agent = an_agent_that_goes_on(**changes)
    agent.document(started(EVENT) if phase == "started" else EVENT)
    effects = agent.document()
    ends_with = {"waiting": ["A: cancel prepare"], "held": []}
    assert effects == ends_with.get(phase, ["A: recover resume"])
