"""Workflows as they are stored: an agent that starts reads them, and an event goes on in the middle."""

import ast
import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from msgspec.structs import replace
from test_workflow import START, Agent, a_rule, an_event, started

import scheduled_events_agent
from scheduled_events_agent.hooks.durations import HookTimes
from scheduled_events_agent.notifications import Notification
from scheduled_events_agent.store import Loss
from scheduled_events_agent.workflow import AgentRestarted, OperatorCommand, PolicyChanged, Workflow, is_ready

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
        "resource_type": "", "received_id": "", "id_error": "", "is_ambiguous": False,
    },
    "decision": {
        "rule": "impactful", "reason": "rule impactful matches it: affects self", "affects": "self",
        "prepare": ["drain", "checkpoint"], "on_start": [], "recover": ["resume", "load"], "drain_for": 0.0,
        "approve": "when-prepared", "on_failure": "hold", "shared": "hold",
        "can_approve_for_all": True, "approve_after_seconds": 0.0,
        "on_early_start": "cancel", "lead": None, "window_name": None, "window": None,
        "expire_after": 3600.0,
    },
    "first_seen_at": "2026-03-02T12:00:01Z", "not_before_seen_at": "2026-03-02T12:00:01Z", "boot_id": "boot 1",
    "prepare_boot_id": "boot 1",
    "phase": "preparing",
    "prepare": {**IDLE, "state": "running", "done": ["drain"], "current": "checkpoint", "run": 2},
    "on_start": IDLE, "recover": IDLE, "drain_until": None,
    "approval": {"state": "none", "failures": 0, "failing_since": None, "retry_at": None, "failed_at": None},
    "operator_action": "", "approval_needed_since": None, "phase_since": None,
    "change_noted_at": None, "missing_since": None, "is_over": False, "is_reverted": False, "was_started": False,
    "is_history_unknown": False, "handling_since": "2026-03-02T12:00:01Z", "wait_reason": None, "outcome": "",
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
    agent.workflows = {workflow.id: workflow}
    assert agent.send(AgentRestarted(), PolicyChanged()) == []
    return agent


def test_the_stored_form_does_not_change() -> None:
    stored = msgspec.json.encode(STORED)
    assert msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(stored, type=Workflow))) == STORED


def places_in(value: Any, *place: str) -> Iterator[tuple[str, ...]]:
    """Each field of the JSON, also those of objects in it."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*place, name)
        yield from places_in(inner, *place, name)


@pytest.mark.parametrize("place", tuple(places_in(STORED)), ids=".".join)
def test_a_stored_field_that_was_renamed_is_an_error(place: tuple[str, ...]) -> None:
    stored = copy.deepcopy(STORED)
    inner = stored
    for name in place[:-1]:
        inner = inner[name]
    inner[f"new_{place[-1]}"] = inner.pop(place[-1])
    with pytest.raises(
        msgspec.ValidationError, match=rf"unknown field `new_|missing required field `{place[-1]}`"
    ):
        msgspec.json.decode(msgspec.json.encode(stored), type=Workflow)


def types_read_back() -> Iterator[Any]:
    """All types as which the agent reads JSON and rows; what it writes is read as one of them.

    Commands and simulator read what is not stored.
    """
    package = Path(scheduled_events_agent.__file__).parent
    for path in package.rglob("*.py"):
        place = path.relative_to(package)
        if place.parts[0] in ("cli", "simulator"):
            continue
        names = [one for one in place.with_suffix("").parts if one != "__init__"]
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Attribute(attr="decode"), keywords=[ast.keyword(arg="type", value=type_)]):
                    pass
                case ast.Call(func=ast.Attribute(attr="convert"), args=[_, type_]):
                    pass
                case ast.Call(func=ast.Attribute(attr="Decoder"), args=[type_]):
                    pass
                case _:
                    continue
            module = importlib.import_module(".".join([package.name, *names]))
            yield eval(ast.unparse(type_), vars(module))


def structs_in(found: Any) -> Iterator[type[msgspec.Struct]]:
    """The Structs that this type is made of."""
    if isinstance(found, msgspec.inspect.StructType):
        yield found.cls
    for name in found.__struct_fields__:
        inner = getattr(found, name)
        for one in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
                yield from structs_in(one)


def test_all_that_is_stored_forbids_unknown_fields() -> None:
    found = {struct for type_ in types_read_back() for struct in structs_in(msgspec.inspect.type_info(type_))}
    assert found > {Workflow, Notification, HookTimes, Loss}
    assert [struct for struct in found if not struct.__struct_config__.forbid_unknown_fields] == []


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
    assert agent.workflows == {}


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
    assert not is_ready(agent.workflows)
    (workflow_id,) = agent.workflows
    assert agent.send(OperatorCommand(workflow_id=workflow_id, action="retry", user="kim")) == ["A: recover load"]


@pytest.mark.parametrize("phase", ["waiting", "held", "approved", "started"])
def test_an_event_of_every_other_phase_goes_on_to_its_end(phase: str) -> None:
    is_approved = phase in ("approved", "started")
    changes: dict[str, Any] = {
        "phase": phase,
        "prepare": DONE if is_approved else IDLE,
        "approval": {**STORED["approval"], "state": "confirmed" if is_approved else "none"},
        "operator_action": "hold" if phase == "held" else "",
        "was_started": phase == "started",
    }
    agent = an_agent_that_goes_on(**changes)
    agent.document(started(EVENT) if phase == "started" else EVENT)
    effects = agent.document()
    ends_with = {"waiting": ["A: cancel prepare"], "held": []}
    assert effects == ends_with.get(phase, ["A: recover resume"])
