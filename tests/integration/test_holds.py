"""An operator's hold counts though its event vanishes and comes back, also over a restart of the agent."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace
from test_engine import START, Clocks

from scheduled_events_agent.engine import Engine, Executor, HookDone, not_run_result
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.store import Store
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import OperatorAction

EVENT = ScheduledEvent(
    id="E1",
    type="Reboot",
    status="Scheduled",
    source="Platform",
    resources=("vm-1",),
    not_before=START + timedelta(days=9),
)
HOURS = 3600.0


class Agent:
    """An engine on a state file, on a machine on which no time passes by itself."""

    def __init__(self, directory: Path, *, lead: float = 10 * 86400.0) -> None:
        self.machine = Clocks()
        self.directory = directory
        rule = Rule(name="all", prepare=("drain",), recover=("resume",), approve="when-prepared", lead=lead)
        hooks = {name: Hook(run=("/bin/true",)) for name in ("drain", "resume")}
        self.settings = Settings(rules=(rule,), hooks=hooks)
        self.start()

    def start(self) -> None:
        self.store = Store.open(self.directory, self.machine.now())
        self.executor = mock.create_autospec(Executor, instance=True)
        self.executor.is_running.return_value = False
        self.engine = Engine(self.settings, self.store, Metrics(tuple), self.executor, self.machine)
        self.engine.start()
        self.engine.receive(Identity(name="vm-1", vm_id="id-1"))

    def restart(self) -> None:
        self.store.close()
        self.start()

    def read(self, *events: ScheduledEvent, times: int = 1) -> None:
        for _ in range(times):
            self.machine.wait(1.0)
            self.engine.receive(Document(incarnation="", events=events, answered=self.machine.seconds))
            assert self.engine.run_cycle(self.machine.now())

    def end(self, hook: str) -> None:
        effect = self.executor.start_hook.call_args.args[0]
        assert effect.hook == hook
        result = replace(not_run_result(hook, "succeeded", ""), has_run=True)
        self.engine.receive(HookDone(effect, result))
        assert self.engine.run_cycle(self.machine.wait(1.0))

    def ask(self, action: OperatorAction, about: str = "") -> str | None:
        with contextlib.closing(Store.open_client(self.directory)) as operator:
            workflow_id = about or next(w.id for w in self.engine.workflows.values() if not w.is_over)
            request = operator.add_request(workflow_id, action, "kim", self.machine.now())
            assert self.engine.run_cycle(self.machine.now())
            answer = operator.load_answer(request)
            return answer.message if answer else None

    def vanish(self) -> None:
        self.read(times=2)
        assert all(workflow.is_over for workflow in self.engine.workflows.values())

    @property
    def started(self) -> list[str]:
        return [call.args[0].hook for call in self.executor.start_hook.call_args_list]

    @property
    def operator_action(self) -> str:
        (workflow,) = [workflow for workflow in self.engine.workflows.values() if not workflow.is_over]
        return workflow.operator_action


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.store.close()


def lead_to(agent: Agent, phase: str) -> None:
    if phase == "waiting":
        agent.settings = replace(agent.settings, rules=(replace(agent.settings.rules[0], lead=HOURS),))
        agent.restart()
    agent.read(EVENT)
    if phase == "prepared":
        agent.settings = replace(agent.settings, rules=(replace(agent.settings.rules[0], approve="manual"),))
        agent.engine.change_settings(agent.settings)
        agent.end("drain")


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("away_seconds", [2.0, 60.0, 23 * HOURS])
@pytest.mark.parametrize("phase", ["waiting", "preparing", "prepared"])
def test_a_hold_counts_when_the_event_comes_back(
    agent: Agent, phase: str, away_seconds: float, *, is_restarted: bool
) -> None:
    lead_to(agent, phase)
    (workflow,) = agent.engine.workflows.values()
    assert workflow.phase == phase
    assert (agent.ask("hold") or "").startswith("hold: set; ")
    agent.vanish()
    if agent.started and agent.engine.workflows:  # what was prepared is recovered meanwhile
        if phase == "preparing":
            effect = agent.executor.start_hook.call_args.args[0]
            result = replace(not_run_result("drain", "canceled", ""), has_run=True)
            agent.engine.receive(HookDone(effect, result))
            assert agent.engine.run_cycle(agent.machine.wait(1.0))
        agent.end("resume")
    assert agent.engine.workflows == {}
    agent.machine.wait(away_seconds)
    agent.engine.maintain()
    if is_restarted:
        agent.restart()
    agent.executor.start_hook.reset_mock()
    agent.read(EVENT)
    assert agent.operator_action == "hold"
    assert any(entry.text.startswith("held by kim since 2026-03-02 12:") for entry in agent.store.load_journal())
    assert agent.started == []
    assert (agent.ask("release") or "").startswith("released")
    if phase != "waiting":
        assert agent.started == ["drain"]


def test_a_hold_ends_a_day_after_the_event_was_last_seen(agent: Agent) -> None:
    agent.read(EVENT)
    agent.end("drain")
    agent.ask("hold")
    agent.vanish()
    agent.end("resume")
    agent.machine.wait(25 * HOURS)
    agent.engine.maintain()
    assert agent.engine.remembered.known == {}
    agent.restart()
    agent.read(EVENT)
    assert agent.operator_action == ""


def test_while_its_event_is_pending_a_hold_does_not_end(agent: Agent) -> None:
    agent.read(EVENT)
    agent.ask("hold")
    for _ in range(3):
        agent.machine.wait(25 * HOURS)
        agent.engine.maintain()
        agent.read(EVENT)
    agent.restart()
    agent.read(EVENT)
    assert agent.operator_action == "hold"
    assert list(agent.engine.remembered.known) == [("hold", "e1")]


@pytest.mark.parametrize("action", ["release", "approve"])
def test_a_released_hold_is_forgotten(agent: Agent, action: OperatorAction) -> None:
    agent.read(EVENT)
    agent.ask("hold")
    agent.ask(action)
    assert (agent.engine.remembered.known, agent.store.load_remembered()) == ({}, {})


@pytest.mark.parametrize("new_id", ["E1", "E9"])
def test_the_start_of_the_event_ends_its_hold(agent: Agent, new_id: str) -> None:
    agent.read(EVENT)
    agent.ask("hold")
    agent.read(replace(EVENT, id=new_id, status="Started", not_before=None))
    assert agent.store.load_remembered() == {}


def test_an_absent_event_can_be_released_and_nothing_else(agent: Agent) -> None:
    agent.read(EVENT)
    agent.end("drain")
    agent.ask("hold")
    agent.vanish()
    agent.end("resume")
    assert agent.ask("approve", "e1") == "rejected: the event is not in the document; its hold can be released"
    assert agent.ask("release", "e1") == "released; the event is not in the document"
    assert agent.store.load_remembered() == {}
    agent.read(EVENT)
    assert agent.operator_action == ""


def test_a_release_counts_when_the_event_comes_back_before_its_recovery(agent: Agent) -> None:
    other = replace(EVENT, id="E2")
    agent.read(EVENT)
    agent.end("drain")
    agent.ask("hold")
    agent.read(EVENT, other)
    agent.end("drain")
    agent.read(other, times=2)
    assert agent.ask("release", "e1") == "released; the event is not in the document"
    agent.read(EVENT, other)
    assert [one.operator_action for one in agent.engine.workflows.values()] == ["", ""]
    assert agent.engine.remembered.known == {}


def test_a_hold_that_comes_with_the_end_of_its_event_counts_when_that_comes_back(agent: Agent) -> None:
    lead_to(agent, "prepared")
    agent.read()
    (workflow_id,) = agent.engine.workflows
    with contextlib.closing(Store.open_client(agent.directory)) as operator:
        operator.add_request(workflow_id, "hold", "kim", agent.machine.now())
    agent.read()
    agent.end("resume")
    agent.read(EVENT)
    assert agent.operator_action == "hold"


def test_a_release_meets_the_event_that_has_just_come_back(agent: Agent) -> None:
    agent.read(EVENT)
    agent.end("drain")
    agent.ask("hold")
    agent.vanish()
    agent.end("resume")
    agent.read(EVENT)
    assert agent.operator_action == "hold"
    assert (agent.ask("release", "e1") or "").startswith("released: the event is preparing")
    assert agent.operator_action == ""


def test_the_holds_of_another_machine_are_forgotten(agent: Agent) -> None:
    agent.read(EVENT)
    agent.ask("hold")
    agent.engine.receive(Identity(name="vm-9", vm_id="another"))
    assert agent.engine.run_cycle(agent.machine.now())
    assert (agent.engine.remembered.known, agent.store.load_remembered()) == ({}, {})
