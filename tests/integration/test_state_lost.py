"""A loss of state, until on_clear or an operator has settled it: an engine alone, on real state files."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from metric_values import value_of
from msgspec.structs import replace
from state_file import do_not_wait_for_locks, locked

from scheduled_events_agent.engine import Engine, Executor, HookCommand, HookDone, HookKey, hook_key
from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import AgentSettings, Settings
from scheduled_events_agent.status import StateLost
from scheduled_events_agent.store import FILE_NAME, RequestAnswer, Store, StoreError
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import HookOutcome, OperatorAction

EVENT = ScheduledEvent(
    id="E1", type="Reboot", status="Scheduled", source="Platform", resources=("vm-1",),
    not_before=datetime.now(UTC) + timedelta(hours=1),
)  # fmt: skip
RULE = Rule(name="all", prepare=("drain",), recover=("resume",), approve="manual", lead=30 * 86400.0)
HOOKS = {name: Hook(run=("/bin/true",)) for name in ("drain", "resume", "undo", "greet")}
HOOKS["tell"] = Hook(run=("/bin/false",), required=False)
POLICY = Settings(rules=(RULE,), hooks=HOOKS)
CLEARING = replace(POLICY, on_clear=("undo", "greet"))
ID_1, ID_2, ID_3 = (Identity(name="vm-1", vm_id=vm_id) for vm_id in ("id-1", "id-2", "id-3"))
RESOLVED = RequestAnswer(succeeded=True, message="resolved: this VM counts as recovered from what was lost")
NOTHING = RequestAnswer(succeeded=True, message="nothing to resolve: no loss of state is open")


class Hooks:
    """An executor whose hooks run until a test ends them."""

    def __init__(self) -> None:
        self.running: dict[HookKey, HookCommand] = {}
        self.started: list[str] = []

    def start_hook(self, effect: HookCommand, *_: object, **__: object) -> None:
        self.running[hook_key(effect)] = effect
        self.started.append(effect.hook)

    def is_running(self, key: HookKey) -> bool:
        return key in self.running

    def hook_received(self, effect: HookCommand) -> None:
        del self.running[hook_key(effect)]

    def cancel_hook(self, key: HookKey, *, is_urgent: bool) -> None: ...


class Agent:
    """An engine on a state file. A new one on the same directory is the next start."""

    def __init__(self, directory: Path, settings: Settings, identity: Identity = ID_1) -> None:
        self.store = Store.open(directory, datetime.now(UTC))
        do_not_wait_for_locks(self.store)
        self.hooks = Hooks()
        self.metrics = Metrics(tuple)
        self.engine = Engine(settings, self.store, self.metrics, cast("Executor", self.hooks))
        self.engine.start()
        self.engine.receive(identity)
        self._answered = 0.0

    @property
    def loss(self) -> StateLost | None:
        return self.engine.snapshot.state_lost

    def read(self, *events: ScheduledEvent) -> None:
        """Two answers: an event is gone when two lack it."""
        for _ in range(2):
            self._answered += 60.0
            self.engine.receive(Document(incarnation="", events=events, answered=self._answered))
            assert self.engine.run_cycle(datetime.now(UTC))

    def end(self, hook: str, outcome: HookOutcome = "succeeded") -> None:
        (effect,) = [one for one in self.hooks.running.values() if one.hook == hook]
        result = HookResult(
            hook=hook, outcome=outcome, exit_code=0, attempts=1, duration_seconds=0.1, tail="", detail=outcome
        )
        self.engine.receive(HookDone(effect, result))

    def turn(self) -> bool:
        return self.engine.run_cycle(datetime.now(UTC))

    def ask(self, word: str, action: OperatorAction = "resolve") -> RequestAnswer | None:
        with contextlib.closing(Store.open_client(self.store.path.parent)) as operator:
            request = operator.add_request(word, action, "kim", datetime.now(UTC))
            assert self.turn()
            return operator.load_answer(request)

    def records(self, kind: str) -> list[str]:
        return [entry.text for entry in self.store.load_records(kind=kind)]


class Machine:
    """The machine on which one agent after the other runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._agent: Agent | None = None

    def start(self, settings: Settings = POLICY, identity: Identity = ID_1) -> Agent:
        self.stop()
        self._agent = Agent(self.directory, settings, identity)
        return self._agent

    def stop(self) -> None:
        if self._agent is not None:
            self._agent.store.close()
        self._agent = None

    def prepare(self) -> None:
        """Stop the agent when the machine is prepared for an event."""
        agent = self.start()
        agent.read(EVENT)
        agent.end("drain")
        agent.read(EVENT)
        (workflow,) = agent.engine.workflows.values()
        assert workflow.phase == "prepared"
        self.stop()

    def damage(self) -> None:
        """Stop the agent, and leave no database of its state file."""
        self.stop()
        for path in self.directory.glob(f"{FILE_NAME}-*"):
            if not path.name.startswith(f"{FILE_NAME}.damaged"):
                path.unlink()
        (self.directory / FILE_NAME).write_bytes(b"no database " * 1000)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


@pytest.fixture
def lost(machine: Machine) -> Machine:
    """Its state file was damaged when it was prepared; no agent has been started since."""
    machine.prepare()
    machine.damage()
    return machine


def is_open(agent: Agent) -> bool:
    return agent.loss is not None


# --- its beginning


def test_a_damaged_file_is_counted_and_the_loss_outlasts_documents_and_restarts(lost: Machine) -> None:
    agent = lost.start()
    first = agent.loss
    assert first is not None
    assert (first.reason, first.is_foreign) == ("file is not a database", False)
    assert value_of(agent.metrics.store_errors.labels("damaged")) == 1
    agent.read()
    assert agent.store.get_meta("state_lost") == ""  # what is pending from now on may be approved
    again = lost.start()
    again.read()
    assert again.loss == first
    assert value_of(again.metrics.store_errors.labels("damaged")) == 0


def test_an_agent_killed_right_after_the_quarantine_leaves_the_loss_to_the_next(
    lost: Machine, tmp_path: Path
) -> None:
    Store.open(tmp_path, datetime.now(UTC)).close()
    assert is_open(lost.start())


def test_a_first_start_is_no_loss(machine: Machine) -> None:
    assert not is_open(machine.start())


def test_a_second_damage_begins_the_loss_anew(lost: Machine) -> None:
    first = lost.start().loss
    lost.damage()
    again = lost.start()
    assert first is not None
    assert again.loss is not None
    assert again.loss.at > first.at
    assert agent_resolves(again)
    lost.damage()
    assert is_open(lost.start())


# --- its end by an operator


def agent_resolves(agent: Agent) -> bool:
    return agent.ask("state_lost") == RESOLVED and not is_open(agent)


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_an_operator_resolves_it_once_and_for_all(lost: Machine, mode: str) -> None:
    policy = replace(POLICY, agent=AgentSettings(mode="observe" if mode == "observe" else "act"))
    agent = lost.start(policy)
    assert agent.ask("state_lost") == RESOLVED
    assert not is_open(agent)
    assert agent.records("state_settled") == ["resolved by kim"]
    assert agent.ask("state_lost") == NOTHING
    assert not is_open(lost.start(policy))


@pytest.mark.parametrize("action", ["approve", "hold", "release", "retry"])
def test_no_other_command_knows_the_word(lost: Machine, action: OperatorAction) -> None:
    agent = lost.start()
    answer = agent.ask("state_lost", action)
    assert answer == RequestAnswer(succeeded=False, message="rejected: the event is not pending any more")
    assert is_open(agent)


def test_a_hold_of_an_event_with_that_name_is_released_and_resolves_nothing(lost: Machine) -> None:
    agent = lost.start()
    named = replace(EVENT, id="state_lost")
    agent.read(named)
    (workflow_id,) = agent.engine.workflows
    answer = agent.ask(workflow_id, "hold")
    assert answer is not None
    assert answer.succeeded
    agent.read()
    agent.end("drain")
    agent.read()
    agent.end("resume")
    agent.read()
    answer = agent.ask("state_lost", "release")
    assert answer is not None
    assert answer.message.startswith("released")
    assert is_open(agent)
    assert agent_resolves(agent)


# --- its end by on_clear


def test_it_ends_when_all_hooks_of_on_clear_have_succeeded(lost: Machine) -> None:
    agent = lost.start(CLEARING)
    agent.read()
    agent.end("undo")
    assert agent.turn()
    assert is_open(agent)
    agent.end("greet")
    assert agent.turn()
    assert not is_open(agent)
    assert agent.records("state_settled") == ["on_clear has succeeded"]
    assert not is_open(lost.start(POLICY))


@pytest.mark.parametrize("failed", ["undo", "greet"])
def test_it_stays_if_a_hook_of_on_clear_fails_until_all_succeed_later(lost: Machine, failed: str) -> None:
    agent = lost.start(CLEARING)
    agent.read()
    for hook in CLEARING.on_clear:
        agent.end(hook, "failed" if hook == failed else "succeeded")
        assert agent.turn()
    assert agent.hooks.started == ["undo", "greet"]
    assert is_open(agent)
    again = lost.start(CLEARING)
    again.read()
    for hook in CLEARING.on_clear:
        again.end(hook)
        assert again.turn()
    assert not is_open(again)


def test_a_hook_that_is_not_required_may_fail(lost: Machine) -> None:
    agent = lost.start(replace(POLICY, on_clear=("tell",)))
    agent.read()
    agent.end("tell", "failed")
    assert agent.turn()
    assert not is_open(agent)


def test_on_clear_that_an_event_interrupts_settles_it_when_the_rest_has_run(lost: Machine) -> None:
    agent = lost.start(CLEARING)
    agent.read()
    agent.read(EVENT)
    agent.end("undo", "canceled")
    assert agent.turn()
    agent.end("drain")
    agent.read()
    agent.end("resume")
    agent.read()
    assert agent.hooks.started == ["undo", "drain", "resume", "undo"]
    assert is_open(agent)
    for hook in CLEARING.on_clear:
        agent.end(hook)
        assert agent.turn()
    assert not is_open(agent)


def test_it_stays_if_something_is_pending_at_the_start_or_the_agent_observes(lost: Machine) -> None:
    agent = lost.start(CLEARING)
    agent.read(EVENT)
    agent.end("drain")
    agent.read()
    agent.end("resume")  # this recovery says nothing about what was prepared before
    agent.read()
    assert "undo" not in agent.hooks.started
    assert is_open(agent)
    observes = lost.start(replace(CLEARING, agent=AgentSettings(mode="observe")))
    observes.read()
    assert observes.hooks.started == []
    assert is_open(observes)


def test_a_stop_while_on_clear_runs_does_not_settle_it(lost: Machine) -> None:
    agent = lost.start(CLEARING)
    agent.read()
    agent.end("undo")
    assert agent.turn()
    agent.engine.begin_stop()
    agent.end("greet", "canceled")
    agent.engine.finish()
    assert is_open(lost.start(POLICY))


def test_a_stop_does_not_settle_it_either_while_a_hook_runs_that_is_not_required(lost: Machine) -> None:
    agent = lost.start(replace(POLICY, on_clear=("tell",)))
    agent.read()
    agent.engine.begin_stop()
    agent.end("tell", "canceled")
    agent.engine.finish()
    assert is_open(lost.start(POLICY))


def test_a_success_of_on_clear_that_cannot_be_written_is_written_later(lost: Machine, tmp_path: Path) -> None:
    agent = lost.start(CLEARING)
    agent.read()
    agent.end("undo")
    assert agent.turn()
    agent.end("greet")
    with locked(tmp_path):
        assert not agent.turn()
        assert is_open(agent)
    assert agent.turn()
    assert not is_open(agent)


# --- another VM's state


def test_a_foreign_state_counts_only_if_something_was_prepared_in_it(machine: Machine) -> None:
    agent = machine.start()
    agent.read(replace(EVENT, resources=("vm-2",)))
    copied = machine.start(identity=ID_2)
    copied.read()
    assert not is_open(copied)
    machine.prepare()
    agent = machine.start(identity=ID_2)
    agent.read()
    assert agent.loss is not None
    assert agent.loss.is_foreign
    assert agent.loss.reason == "the state file is of VM id-1, and this VM is id-2"
    assert agent.engine.workflows == {}
    again = machine.start(identity=ID_2)
    again.read()
    assert again.loss == agent.loss
    assert agent_resolves(again)


def test_a_copy_of_a_copy_asks_the_same_again(machine: Machine) -> None:
    machine.prepare()
    machine.start(Settings(), identity=ID_2).read()
    third = machine.start(Settings(), identity=ID_3)
    third.read()
    assert third.loss is not None
    assert third.loss.is_foreign
    assert third.loss.reason == "the state file is of VM id-2, and this VM is id-3"


@pytest.mark.parametrize(("policy", "stays"), [(POLICY, True), (Settings(), False)], ids=["recovers", "default"])
def test_an_open_loss_in_an_image_calls_no_operator(lost: Machine, policy: Settings, *, stays: bool) -> None:
    lost.start().read()
    copied = lost.start(policy, identity=ID_2)
    copied.read()
    assert (copied.loss is not None and copied.loss.is_foreign) == stays
    assert is_open(copied) == stays


@pytest.mark.parametrize("write", ["set_unsettled_loss", "discard_workflows"])
def test_an_agent_that_ends_while_it_discards_a_foreign_state_finds_it_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    machine.prepare()
    copied = machine.start(identity=ID_2)

    def fail(*_: object) -> None:
        raise StoreError("cannot write", kind="full")

    monkeypatch.setattr(copied.store, write, fail)
    assert not copied.turn()
    again = machine.start(identity=ID_2)
    again.read()
    assert again.loss is not None
    assert again.loss.is_foreign
    assert again.engine.workflows == {}
