"""retry, resolve and hold through the state file: what the engine answers, and what of it outlives the agent."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from scheduled_events_agent.engine import Engine, Executor, HookDone
from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import AgentSettings, Settings
from scheduled_events_agent.status.actions import available_actions
from scheduled_events_agent.store import RequestAnswer, Store
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import ApprovalAnswered, Approve, HookOutcome, OperatorAction, RunHook

EVENT = ScheduledEvent(
    id="E1", type="Reboot", status="Scheduled", source="Platform", resources=("vm-1",),
    not_before=datetime.now(UTC) + timedelta(hours=1),
)  # fmt: skip
RULE = Rule(name="all", prepare=("drain", "save"), recover=("load", "resume", "tell"), approve="when-prepared")
HOOKS = {name: Hook(run=("/bin/true",)) for name in ("drain", "save", "load", "resume")}
HOOKS["tell"] = Hook(run=("/bin/false",), required=False)


class Recorder:
    """An executor that notes down what it is to do."""

    def __init__(self) -> None:
        self.started: list[RunHook] = []

    def start_hook(self, effect: RunHook, *_: object, **__: object) -> None:
        self.started.append(effect)

    def is_running(self, _: object) -> bool:
        return False

    def hook_received(self, _: object) -> None: ...

    def cancel_hook(self, _: object, *, is_urgent: bool) -> None: ...

    def approve(self, _: list[Approve], __: str) -> None: ...

    def approval_received(self, _: object) -> None: ...


class Agent:
    """An engine on a state file, and an operator beside it."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.store = Store.open(directory, datetime.now(UTC))
        self.executor = Recorder()
        values = Settings(rules=(RULE,), hooks=HOOKS, **settings)  # type: ignore[arg-type]
        self.engine = Engine(values, self.store, Metrics(tuple), cast("Executor", self.executor))
        self._answered = 0.0
        self.engine.start()
        self.engine.receive(Identity(name="vm-1", vm_id="id-1"))

    def read(self, *events: ScheduledEvent) -> None:
        for _ in range(1 if events else 2):  # an event is gone when two answers lack it
            self._answered += 60.0
            self.engine.receive(Document(incarnation="", events=events, answered=self._answered))
            self.turn()

    def turn(self) -> None:
        assert self.engine.run_cycle(datetime.now(UTC))

    def end(self, hook: str, outcome: HookOutcome = "succeeded") -> None:
        effect = self.executor.started[-1]
        assert effect.hook == hook
        detail = "exit code 3" if outcome == "failed" else ""
        result = HookResult(
            hook=hook, outcome=outcome, exit_code=3, attempts=1, duration_seconds=0.1, tail="", detail=detail
        )
        self.engine.receive(HookDone(effect, result))
        self.turn()

    def say(self, action: OperatorAction) -> str | None:
        (workflow_id,) = self.engine.workflows
        operator = Store.open_client(self.store.path.parent)
        try:
            request = operator.add_request(workflow_id, action, "kim", datetime.now(UTC))
            self.turn()
            answer = operator.load_answer(request)
            return answer.message if answer else None
        finally:
            operator.close()

    @property
    def phase(self) -> str:
        (workflow,) = self.engine.workflows.values()
        return workflow.phase

    def told(self) -> list[str]:
        return [entry.text for entry in self.store.load_journal()]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    agent.read(EVENT)
    yield agent
    agent.store.close()


@pytest.fixture
def failed(agent: Agent) -> Agent:
    """Its recovery failed."""
    agent.end("drain")
    agent.end("save")
    agent.read()
    agent.end("load", "failed")
    assert agent.phase == "recovery_failed"
    return agent


def test_a_failed_recovery_is_retried_and_an_optional_hook_may_fail(failed: Agent) -> None:
    assert failed.say("retry") == "retried: the event is recovering, hook load runs"
    failed.end("load")
    failed.end("resume")
    failed.end("tell", "failed")
    assert failed.engine.workflows == {}
    assert "retried by kim" in failed.told()
    assert "hook tell: exit code 3 (failed), and it is not required" in failed.told()


def test_a_failed_recovery_is_resolved_and_the_journal_says_by_whom(failed: Agent) -> None:
    assert failed.say("resolve") == "resolved: the event is closed"
    assert failed.engine.workflows == {}
    assert failed.told()[-2:] == [
        "resolved by kim",
        "is over: unknown, resolved by an operator",
    ]


def test_a_failed_recovery_and_a_retry_survive_a_restart(failed: Agent, tmp_path: Path) -> None:
    failed.store.close()
    second = Agent(tmp_path)
    second.read()
    assert (second.phase, second.executor.started) == ("recovery_failed", [])
    second.say("retry")
    second.store.close()
    third = Agent(tmp_path)
    third.read()
    assert [effect.hook for effect in third.executor.started] == ["load"]
    third.store.close()


def test_a_recovery_is_neither_retried_nor_resolved_while_its_hook_runs(failed: Agent) -> None:
    failed.say("retry")
    assert failed.say("retry") == "rejected: its recovery has not failed"
    assert failed.say("resolve") == "rejected: its hook load runs"
    assert failed.say("hold") == "rejected: the event is over"


def test_a_recovery_that_waits_for_a_missing_hook_can_be_resolved(agent: Agent, tmp_path: Path) -> None:
    agent.end("drain")
    agent.end("save")
    agent.store.close()
    second = Agent(tmp_path)
    second.engine.settings = Settings(rules=(RULE,), hooks={})
    second.read()
    assert second.phase == "recovering"
    (workflow,) = second.engine.workflows.values()
    assert available_actions(workflow) == ("resolve",)
    assert second.say("resolve") == "resolved: the event is closed"
    second.store.close()


def test_a_failed_preparation_is_retried(agent: Agent) -> None:
    assert agent.say("retry") == "rejected: no hook of it has failed"
    assert agent.say("resolve") == "rejected: the event is not over; resolve is for a recovery that failed"
    agent.end("drain", "failed")
    assert agent.phase == "held"
    assert agent.say("retry") == "retried: the event is preparing, hook drain runs"
    agent.end("drain")
    agent.end("save")
    assert agent.phase == "prepared"


def test_a_failed_preparation_is_not_retried_under_a_hold(agent: Agent) -> None:
    agent.say("hold")
    agent.end("drain", "failed")
    assert agent.say("retry") == "rejected: an operator holds it; release it first"


def test_an_agent_that_only_observes_retries_nothing(failed: Agent) -> None:
    failed.engine.settings = Settings(rules=(RULE,), hooks=HOOKS, agent=AgentSettings(mode="observe"))
    assert failed.say("retry") == "rejected: the agent only observes (agent.mode, --observe)"
    assert failed.say("resolve") == "resolved: the event is closed"


def test_a_hold_names_the_hook_that_may_finish(agent: Agent) -> None:
    assert agent.say("hold") == "hold: set; the event is preparing, hook drain runs to its end"
    agent.end("drain")
    assert agent.phase == "held"
    assert agent.say("release") == "released: the event is preparing, hook save runs"


def test_a_hold_of_an_event_that_is_held_says_that_it_was_set(agent: Agent) -> None:
    agent.end("drain", "failed")
    assert agent.phase == "held"
    assert agent.say("hold") == "hold: set; the event stays held because preparation failed"
    assert agent.say("release") == "released: the event is held: hook drain: exit code 3"


def test_a_release_without_an_operator_action_does_nothing_and_is_not_recorded(agent: Agent) -> None:
    agent.end("drain", "failed")
    before = agent.told()
    assert [agent.say("release") for _ in range(2)] == ["nothing to release"] * 2
    assert agent.told() == before
    agent.say("hold")
    assert (agent.say("release") or "").startswith("released: ")
    assert agent.told().count("released by kim") == 1
    assert agent.say("release") == "nothing to release"


def test_a_release_does_not_take_back_what_azure_has_accepted(agent: Agent) -> None:
    agent.say("approve")
    agent.end("drain")
    agent.end("save")
    (workflow_id,) = agent.engine.workflows
    agent.engine.receive(ApprovalAnswered(workflow_id=workflow_id))
    agent.turn()
    assert agent.phase == "approved"
    for action in ("hold", "release"):
        assert agent.say(action) == "rejected: Azure has accepted the approval; it cannot be withdrawn"


def test_a_release_cancels_the_hold_requested_just_before_it(agent: Agent, tmp_path: Path) -> None:
    (workflow_id,) = agent.engine.workflows
    with closing(Store.open_client(tmp_path)) as operator:
        actions: tuple[OperatorAction, ...] = ("hold", "release", "release")
        asked = [operator.add_request(workflow_id, one, "kim", datetime.now(UTC)) for one in actions]
        agent.turn()
        answers = list(filter(None, map(operator.load_answer, asked)))
    assert [(answer.succeeded, answer.message.partition(":")[0]) for answer in answers] == [
        (False, "rejected"), (True, "released"), (True, "nothing to release"),
    ]  # fmt: skip
    assert [text for text in agent.told() if "kim" in text] == ["held by kim", "released by kim"]


@pytest.fixture
def under_way(agent: Agent) -> Agent:
    """An operator's approval has been sent, and Azure has not answered yet."""
    rule = replace(RULE, approve="manual")
    agent.engine.change_settings(Settings(rules=(rule,), hooks=HOOKS))
    agent.end("drain")
    agent.end("save")
    assert agent.say("approve") == "approved: the event is prepared, approval requested"
    return agent


def answer(agent: Agent, error_kind: str = "") -> None:
    (workflow_id,) = agent.engine.workflows
    agent.engine.receive(ApprovalAnswered(workflow_id=workflow_id, error_kind=error_kind))


TAKING_BACK: tuple[OperatorAction, ...] = ("hold", "release")


@pytest.mark.parametrize("action", TAKING_BACK)
@pytest.mark.parametrize("comes", ["before", "with", "after"])
def test_what_takes_back_an_approval_too_late_says_so_and_leaves_the_action_as_before(
    under_way: Agent, action: OperatorAction, comes: str
) -> None:
    (workflow_id,) = under_way.engine.workflows
    with closing(Store.open_client(under_way.store.path.parent)) as operator:
        if comes == "after":
            answer(under_way)
            under_way.turn()
        request = operator.add_request(workflow_id, action, "kim", datetime.now(UTC))
        if comes == "before":
            under_way.turn()
            assert operator.load_answer(request) is None
        if comes != "after":
            answer(under_way)
        under_way.turn()
        found = operator.load_answer(request)
    assert found is not None
    assert not found.succeeded
    assert found.message.startswith("rejected: Azure has accepted the approval")
    (workflow,) = under_way.engine.workflows.values()
    assert (workflow.phase, workflow.operator_action) == ("approved", "approve")
    void = f"the operator's {action} is void: Azure has accepted the approval"
    assert (void in under_way.told()) == (comes == "before")
    assert under_way.engine.remembered.known == {}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("hold", "hold: set; the event is held"),
        ("release", "released: the event is prepared: an operator must approve it"),
    ],
)
def test_what_takes_back_an_approval_in_time_is_answered_then(
    under_way: Agent, action: OperatorAction, message: str
) -> None:
    (workflow_id,) = under_way.engine.workflows
    with closing(Store.open_client(under_way.store.path.parent)) as operator:
        request = operator.add_request(workflow_id, action, "kim", datetime.now(UTC))
        under_way.turn()
        assert operator.load_answer(request) is None
        answer(under_way, "server")
        under_way.turn()
        assert operator.load_answer(request) == RequestAnswer(succeeded=True, message=message)
        # A second approval counts for itself.
        under_way.say("approve")
        assert under_way.engine.workflows[workflow_id].approval.taken_back is None


def test_a_second_release_waits_as_the_first_one_does(under_way: Agent) -> None:
    (workflow_id,) = under_way.engine.workflows
    with closing(Store.open_client(under_way.store.path.parent)) as operator:
        requests = []
        for action in ("hold", "release", "release"):
            requests.append(operator.add_request(workflow_id, action, "kim", datetime.now(UTC)))
            under_way.turn()
        found = [operator.load_answer(request) for request in requests]
        assert [one and one.succeeded for one in found] == [False, None, None]
        answer(under_way)
        under_way.turn()
        found = [operator.load_answer(request) for request in requests[1:]]
    assert [one and one.message for one in found] == ["rejected: Azure has accepted the approval"] * 2
    (workflow,) = under_way.engine.workflows.values()
    assert workflow.operator_action == "approve"


def test_a_hold_during_the_approval_of_a_rule_is_released_at_once(agent: Agent) -> None:
    agent.end("drain")
    agent.end("save")
    assert agent.say("hold") is None
    assert agent.say("release") == "released: the event is prepared, approval requested"
    answer(agent)
    agent.turn()
    assert (agent.phase, agent.told()[-1]) == ("approved", "Azure has accepted the approval")


@pytest.mark.parametrize("action", TAKING_BACK)
def test_a_stop_answers_what_waits_for_azure(under_way: Agent, action: OperatorAction) -> None:
    (workflow_id,) = under_way.engine.workflows
    with closing(Store.open_client(under_way.store.path.parent)) as operator:
        request = operator.add_request(workflow_id, action, "kim", datetime.now(UTC))
        under_way.turn()
        under_way.engine.begin_stop()
        under_way.engine.finish()
        found = operator.load_answer(request)
    assert found is not None
    word = "held" if action == "hold" else "released"
    text = f"{word}, unless Azure accepts the approval that is under way; see status"
    assert (found.succeeded, found.message) == (False, text)


@pytest.mark.parametrize("action", TAKING_BACK)
def test_what_was_taken_back_before_a_restart_is_not_sent_again(under_way: Agent, action: OperatorAction) -> None:
    assert under_way.say(action) is None
    directory = under_way.store.path.parent
    under_way.store.close()
    second = Agent(directory)
    second.engine.change_settings(under_way.engine.settings)
    second.read(EVENT)
    (workflow,) = second.engine.workflows.values()
    assert (workflow.operator_action, workflow.approval.state) == ("hold" if action == "hold" else "", "none")
    assert workflow.approval.taken_back is None
    second.store.close()
