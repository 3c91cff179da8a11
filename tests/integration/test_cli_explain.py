"""explain beside an agent: the agent's view of each event, and what would come of it from there."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from test_cli_status import FACTS, an_agent

from scheduled_events_agent import cli, host
from scheduled_events_agent.cli import status as cli_status
from scheduled_events_agent.cli.explain import EventPlan
from scheduled_events_agent.imds.document import ScheduledEvent, parse_document
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.status import EventView, Status
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import RunningHook
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.workflow import Phase, StageStatus, Transition, Workflow

POLICY = """\
agent: {{state_dir: '{state_dir}'}}
imds: {{endpoint: '{endpoint}'}}
rules:
  - {{name: never, when: {{type: Freeze}}, approve: never}}
  - name: all
    prepare: [drain, checkpoint]
    on_start: [announce]
    recover: [resume]
    approve: when-prepared
hooks:
  drain: {{shell: drain, timeout: 2m}}
  checkpoint: {{shell: checkpoint}}
  announce: {{shell: announce}}
  resume: {{shell: resume}}
"""
DECISION = Decision(
    rule="all",
    reason="rule all matches it: affects self",
    affects="self",
    prepare=("drain", "checkpoint"),
    on_start=("announce",),
    recover=("resume",),
    approve="when-prepared",
    can_approve_for_all=True,
)
DONE = StageStatus(state="succeeded", done=("drain", "checkpoint"), run=2)


class Place(NamedTuple):
    """A machine with a policy, a metadata service, and the state of an agent that has run."""

    azure: Simulator
    policy: Path
    state_dir: Path
    capsys: pytest.CaptureFixture[str]

    def explain(self, *options: str) -> str:
        """The output, with one blank between words."""
        code = cli.main(["explain", "--config", str(self.policy), *options])
        captured = self.capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return re.sub(" +", " ", captured.out)

    def explain_events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.explain("--json"))["events"]
        return found

    def schedule(self, type_: Any = "Reboot") -> ScheduledEvent:
        """An event that the document lists."""
        id_ = self.azure.schedule(type_, notice_seconds=3600)
        url = f"{self.azure.endpoint()}/metadata/scheduledevents?api-version=2020-07-01"
        events = parse_document(httpx.get(url, headers={"Metadata": "true"}).content).events
        (event,) = [event for event in events if event.id == id_]
        return event

    def commit(self, workflow: Workflow) -> Workflow:
        """As the agent does."""
        store = Store.open_client(self.state_dir)
        store.commit([Transition(workflow=workflow)], workflow.first_seen_at)
        store.close()
        return workflow

    def status(self, *workflows: Workflow, **changes: Any) -> Status:
        """That of an agent whose policy is the one of the file."""
        now = datetime.now(UTC)
        facts = replace(FACTS, at=now, last_poll_at=now, policy=None, endpoint=self.azure.endpoint())
        return to_status(replace(facts, workflows=workflows, **changes))


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Place]:
    policy, state_dir = tmp_path / "policy.yaml", tmp_path / "state"
    host.create_private_dir(state_dir)
    store = Store.open(state_dir, datetime.now(UTC))
    store.set_meta({"vm_name": "web-1"})
    store.close()
    with Simulator(vms=("web-1",)) as azure:
        text = POLICY.format(state_dir=state_dir.as_posix(), endpoint=azure.endpoint())
        policy.write_text(text, encoding="utf-8")
        yield Place(azure, policy, state_dir, capsys)


def a_workflow(event: ScheduledEvent, phase: Phase, **fields: Any) -> Workflow:
    seen_at = datetime.now(UTC) - timedelta(minutes=5)
    known: dict[str, Any] = {
        "id": f"{event.key}@1",
        "event": event,
        "decision": DECISION,
        "first_seen_at": seen_at,
        "not_before_seen_at": seen_at,
        "boot_id": "boot",
        "phase": phase,
        "phase_since": seen_at,
    }
    return Workflow(**{**known, **fields})


def preparing(event: ScheduledEvent) -> Workflow:
    return a_workflow(
        event,
        "preparing",
        prepare=StageStatus(state="running", current="drain", run=1),
        handling_since=datetime.now(UTC) - timedelta(minutes=5),
    )


def answers(place: Place, status: Status) -> Any:
    return an_agent(place.state_dir, msgspec.json.encode(status))


def clock(at: datetime) -> str:
    return format_time(at, datetime.now(UTC))


def view_in(explained: dict[str, Any]) -> EventView:
    return msgspec.convert({name: one for name, one in explained.items() if name != "plan"}, EventView)


def test_the_running_agents_view_of_an_event_comes_first_and_then_what_would_come(place: Place) -> None:
    workflow = place.commit(preparing(place.schedule()))
    began = datetime.now(UTC) - timedelta(seconds=12)
    drains = RunningHook(workflow_id=workflow.id, stage="prepare", hook="drain", since=began, limit_seconds=120.0)
    status = place.status(workflow, running=(drains,), ready=False)
    with answers(place, status):
        text = place.explain()
        (explained,) = place.explain_events()
    assert "rehears" not in text
    rows = text.splitlines()
    not_before = workflow.event.not_before
    assert not_before is not None
    (expected,) = status.events
    assert expected.activity.startswith("runs the prepare hook drain, ")
    assert rows[5:] == [
        " rule not never: type is Reboot, not Freeze",
        " rule all matches it: affects self",
        f" agent {expected.activity}; first seen {clock(workflow.first_seen_at)}",
        f" prepare run drain, checkpoint, until {clock(not_before - timedelta(seconds=5))} at the latest",
        " on start once it has started: run announce",
        " approve as soon as its 2 hooks have succeeded; a failed hook holds it",
        " recover once it is over: run resume",
    ]
    assert view_in(explained) == expected
    assert [*explained] == [*EventView.__struct_fields__, "plan"]
    plan = msgspec.convert(explained["plan"], EventPlan)
    assert (plan.begins_at, plan.prepare) == (workflow.handling_since, ("drain", "checkpoint"))
    assert (plan.approval.verdict, plan.on_start, plan.recover) == ("allow", ("announce",), ("resume",))


def test_an_event_that_the_agent_has_not_seen_yet_is_rehearsed(place: Place) -> None:
    event = place.schedule()
    with answers(place, place.status()):
        text = place.explain()
        (explained,) = place.explain_events()
    assert " agent has not seen it yet\n" in text
    view = view_in(explained)
    assert (view.key, view.id, view.phase, view.rule) == ("", event.id, "waiting", "all")
    assert view.activity == "the agent has not seen it yet"
    assert explained["seen_at"] == explained["plan"]["at"]
    assert explained["plan"]["prepare"] == ["drain", "checkpoint"]


@pytest.mark.parametrize("can_ask", [True, False])
def test_without_a_right_to_the_state_each_event_is_rehearsed_as_a_new_one_and_that_is_said(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, can_ask: bool
) -> None:
    workflow = place.commit(preparing(place.schedule()))
    refused = StoreError("cannot read state.db: Permission denied", kind="denied")

    def refuse(_: Path) -> Store:
        raise refused

    with answers(place, place.status(workflow)):
        monkeypatch.setattr(Store, "open_readonly", refuse)
        if not can_ask:
            monkeypatch.setattr(cli_status, "ask_status", lambda *_: str(refused))
        text = place.explain()
        (explained,) = place.explain_events()
    assert text.startswith(f"{refused}; this is what an agent started now would do\n")
    assert "\n agent " not in text
    assert " prepare run drain, checkpoint, until" in text
    view = view_in(explained)
    assert (view.key, view.phase, view.activity) == ("", "waiting", "rehearsed as if it were seen now")
    assert explained["seen_at"] == explained["plan"]["at"]


def test_without_an_agent_the_state_file_says_how_far_an_event_is(place: Place) -> None:
    workflow = place.commit(preparing(place.schedule()))
    other = place.schedule("Redeploy")
    text = place.explain()
    explained, second = place.explain_events()
    assert text.startswith("no agent runs; this is what an agent started now would do\n")
    assert f" agent when it last ran: preparing; first seen {clock(workflow.first_seen_at)}\n" in text
    assert " prepare run drain, checkpoint, until" in text
    view = view_in(explained)
    assert (view.key, view.phase, view.activity, view.commands) == (workflow.id, "preparing", "preparing", ())
    assert [(hook.hook, hook.state) for hook in view.hooks][:2] == [("drain", "running"), ("checkpoint", "open")]
    assert explained["plan"]["prepare"] == ["drain", "checkpoint"]
    assert " agent had not seen it\n" in text
    assert (second["id"], second["key"], second["activity"]) == (other.id, "", "rehearsed as if it were seen now")


def unrecovered(event: ScheduledEvent) -> Workflow:
    return a_workflow(
        event,
        "recovery_failed",
        prepare=DONE,
        recover=StageStatus(state="failed", failed_hook="resume", failure="hook resume: exit code 3", run=1),
        was_started=True,
        is_over=True,
        outcome="completed",
    )


def test_what_is_over_stands_above_and_its_event_if_it_comes_back_is_a_new_one(place: Place) -> None:
    event = place.schedule()
    workflow = place.commit(unrecovered(event))
    failed = "recovery failed, an operator must retry or resolve it: hook resume: exit code 3"
    with answers(place, place.status(workflow, ready=False)):
        text = place.explain()
        (explained,) = place.explain_events()
    over, retry, resolve, blank, head = text.splitlines()[1:6]
    assert over == f"Reboot {event.id} is over; the agent: {failed}"
    assert retry == f" retry run resume again, then the rest: scheduled-events-agent retry {event.id}"
    assert resolve.split()[0] == "resolve"
    assert (blank, head.partition(":")[0]) == ("", f"Reboot {event.id}")
    assert (explained["key"], explained["activity"]) == ("", "the agent has not seen it yet")


def test_if_only_the_agent_answers_its_events_are_explained_also_what_is_over(place: Place) -> None:
    over = place.commit(unrecovered(place.schedule()))
    pending = place.commit(preparing(place.schedule("Redeploy")))
    place.azure.fault("web-1", "garbage")
    status = place.status(over, pending)
    with answers(place, status):
        text = place.explain()
        first, second = place.explain_events()
    assert "these are the events that the agent knows" in text.splitlines()[0]
    assert [view_in(first), view_in(second)] == [*status.events]
    assert " recover now, as it is over: run resume\n" in text
    assert (first["outcome"], first["plan"]["prepare"], first["plan"]["on_start"]) == ("completed", [], [])
    assert first["plan"]["approval"]["text"] == "not approved: it is over"
    assert (second["plan"]["prepare"], second["plan"]["recover"]) == (["drain", "checkpoint"], ["resume"])


def test_an_event_that_is_back_while_its_earlier_appearance_recovers_is_shown_as_the_agent_has_it(
    place: Place,
) -> None:
    event = place.schedule()
    earlier = place.commit(
        replace(unrecovered(event), id=f"{event.key}@0", phase="recovering", recover=StageStatus())
    )
    pending = place.commit(preparing(event))
    status = place.status(pending, earlier)
    with answers(place, status):
        (explained,) = place.explain_events()
        place.azure.fault("web-1", "garbage")
        both = place.explain_events()
    assert (view_in(explained), *map(view_in, both)) == (status.events[0], *status.events)
    assert [one["key"] for one in both] == [pending.id, earlier.id]
