"""Messages that come while the agent stops, in every order: the real inbox and engine, on a real state file."""

import itertools
import queue
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from scheduled_events_agent.daemon.inbox import Command, Inbox
from scheduled_events_agent.engine import Engine, HookCommand, HookDone, HookKey, hook_key, not_run_result
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Hook, Rule, When
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.store import Store
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import ApprovalAnswered, Approve, Workflow

RULES = (
    Rule(name="first", when=When(type=("Reboot",)), prepare=("drain",), approve="when-prepared"),
    Rule(name="second", approve="immediately"),
)
SETTINGS = Settings(rules=RULES, hooks={"drain": Hook(run=("/bin/true",))})
NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
METRICS = Metrics(tuple)
ITEMS = ("hook", "answer", "identity", "document", "word", "stop")


class Executor:
    """An executor whose hooks and approvals go on until the test says how they ended."""

    def __init__(self) -> None:
        self.hooks: dict[HookKey, HookCommand] = {}
        self.approvals: set[str] = set()
        self.begun: list[str] = []
        self.canceled = 0
        self.seconds: Callable[[], float] = float
        self.graces: list[tuple[float, float]] = []
        """When all hooks were to end, and within how many seconds."""

    def start_hook(self, effect: HookCommand, *_: object, **__: object) -> None:
        self.hooks[hook_key(effect)] = effect
        self.begun.append(effect.hook)

    def hook_received(self, effect: HookCommand) -> None:
        self.hooks.pop(hook_key(effect), None)

    def is_running(self, key: HookKey) -> bool:
        return key in self.hooks

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        del incarnation
        self.approvals |= {approve.workflow_id for approve in approvals}
        self.begun += [approve.event_id for approve in approvals]

    def approval_received(self, workflow_id: str) -> None:
        self.approvals.discard(workflow_id)

    def is_busy(self) -> bool:
        return bool(self.hooks or self.approvals)

    def cancel_all(self, grace_seconds: float) -> None:
        self.canceled += 1
        self.graces.append((self.seconds(), grace_seconds))


class Items:
    """The queue: all is there at once, or one item comes after the other."""

    def __init__(self, items: list[Any], *, at_once: bool) -> None:
        self.items = items
        self.seconds = 0.0
        self._at_once = at_once

    def get(self, timeout: float) -> Any:
        while self.items and callable(self.items[0]):
            self.items.pop(0)()
        if self.items:
            return self.items.pop(0)
        self.seconds += max(timeout, 0.1)
        raise queue.Empty

    def get_nowait(self) -> Any:
        if not self._at_once:
            raise queue.Empty
        return self.get(0.0)

    def monotonic(self) -> float:
        return self.seconds


class Agent:
    """An agent with a hook and an approval under way."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store.open(directory, NOW)
        self.executor = Executor()
        self.engine = Engine(SETTINGS, self.store, METRICS, cast("Any", self.executor))
        self.engine.start()
        self.engine.receive(Identity(name="vm-1", vm_id=""))
        self.engine.receive(Document(incarnation="1", events=(an_event("A", "Reboot"), an_event("B", "Freeze"))))
        assert self.engine.run_cycle(datetime.now(UTC))
        assert self.executor.begun == ["drain", "B"]
        self.executor.begun.clear()

    def workflow(self, event_id: str) -> Workflow:
        return next(w for w in self.store.load_workflows() if w.event.id == event_id)

    def item(self, word: str) -> Any:
        workflow = self.workflow("A")
        match word:
            case "hook":
                (effect,) = self.executor.hooks.values()
                return HookDone(effect, replace(not_run_result("drain", "succeeded", ""), has_run=True))
            case "answer":
                return ApprovalAnswered(workflow_id=self.workflow("B").id)
            case "identity":
                return Identity(name="vm-1", vm_id="id-1")
            case "document":
                events = (an_event("A", "Reboot"), an_event("B", "Freeze"), an_event("C", "Redeploy"))
                return Document(incarnation="2", events=events)
            case "word":
                return lambda: self.ask(workflow.id)
        return Command("stop")

    def ask(self, workflow_id: str) -> None:
        operator = Store.open_client(self.directory)
        try:
            operator.add_request(workflow_id, "hold", "kim", datetime.now(UTC))
        finally:
            operator.close()

    def live(self, items: Items) -> None:
        """Runs cycles until it is stopped, as the daemon does."""
        inbox = Inbox(cast("Any", items), self.engine, cast("Any", self.executor), fail, monotonic=items.monotonic)
        while inbox.drain(1.0):
            assert self.engine.run_cycle(datetime.now(UTC))
        begun = len(self.executor.begun)
        self.executor.seconds = items.monotonic
        self.stopping_at = items.seconds
        inbox.shutdown(10.0)
        assert len(self.executor.begun) == begun, "something is begun by an agent that stops"


def fail(command: object) -> None:
    raise AssertionError(command)


def an_event(event_id: str, type_: str) -> ScheduledEvent:
    return ScheduledEvent(id=event_id, type=type_, status="Scheduled", resources=("vm-1",))


@pytest.fixture
def start() -> Iterator[Callable[[], Agent]]:
    """Agents on a disk that costs no time, if there is one."""
    agents: list[Agent] = []
    root = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="inbox-", dir=root if root.is_dir() else None))

    def start_one() -> Agent:
        for agent in agents:
            agent.store.close()
        path = directory / str(len(agents))
        path.mkdir()
        agents.append(Agent(path))
        return agents[-1]

    yield start_one
    for agent in agents:
        agent.store.close()
    shutil.rmtree(directory, ignore_errors=True)


def some_orders(items: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Each item is the last one in two of them, and comes before each other item in some."""
    for way in (items, items[::-1]):
        for turn in range(len(way)):
            yield (*way[turn:], *way[:turn])


@pytest.mark.parametrize(
    "orders",
    [some_orders, pytest.param(itertools.permutations, marks=pytest.mark.nightly)],
    ids=["some orders", "every order"],
)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("first", ITEMS)
def test_messages_that_arrive_before_the_stop_ends_are_kept(
    start: Callable[[], Agent], first: str, at_once: bool, orders: Callable[..., Iterable[tuple[str, ...]]]
) -> None:
    for rest in orders(tuple(item for item in ITEMS if item != first)):
        order = (first, *rest)
        if not at_once and order[-1] not in ("hook", "answer"):
            continue  # what it waits for has come: it does not wait for the last item
        agent = start()
        agent.live(Items([agent.item(word) for word in order], at_once=at_once))
        held, approved, new = (agent.workflow(event_id) for event_id in "ABC")
        assert held.prepare.done == ("drain",), order
        assert approved.approval.state == "confirmed", order
        assert agent.store.get_meta("vm_id") == "id-1", order
        assert new.event.type == "Redeploy", order
        assert held.operator_action == "hold", order
        # Where its hook has ended before, the approval is under way.
        answer = agent.store.load_answer(1)
        assert answer is not None, order
        begins = "hold: set; the event is " if answer.succeeded else "held, unless Azure accepts the approval"
        assert answer.message.startswith(begins), order
        last = agent.store.load_records()[-1]
        assert last.kind == "agent_stopped"
        assert last.text.startswith("3 events are pending"), last.text


def test_a_stop_ends_in_time_although_no_hook_ends(start: Callable[[], Agent]) -> None:
    agent = start()
    items = Items([Command("stop")], at_once=False)
    agent.live(items)
    ((canceled_at, grace),) = agent.executor.graces
    assert 5.0 < canceled_at - agent.stopping_at < canceled_at - agent.stopping_at + grace < 10.0
    assert 9.0 < items.seconds - agent.stopping_at < 10.0


def test_a_second_stop_ends_the_waiting_and_loses_nothing(start: Callable[[], Agent]) -> None:
    agent = start()
    words = ("stop", "stop", "stop", "answer", "word", "hook")
    agent.live(Items([agent.item(word) for word in words], at_once=True))
    assert agent.executor.canceled == 1
    assert agent.workflow("A").operator_action == "hold"
    assert agent.workflow("A").prepare.done == ("drain",)
    assert agent.workflow("B").approval.state == "confirmed"


def test_a_hook_that_ends_badly_while_the_agent_stops_is_left_open(start: Callable[[], Agent]) -> None:
    agent = start()
    (effect,) = agent.executor.hooks.values()
    failed = HookDone(effect, replace(not_run_result("drain", "failed", "exit code 1"), has_run=True))
    agent.live(Items([Command("stop"), failed], at_once=False))
    assert agent.workflow("A").phase == "preparing"
    assert agent.workflow("A").prepare.current == "drain"


def test_a_message_that_hits_a_bug_loses_no_other_message(
    start: Callable[[], Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start()
    receive = Engine.receive

    def faulty(self: Engine, news: Any) -> None:
        if isinstance(news, Document):
            raise TypeError("a bug")
        receive(self, news)

    monkeypatch.setattr(Engine, "receive", faulty)
    items = Items([agent.item(word) for word in ("stop", "document", "answer", "hook")], at_once=False)
    agent.live(items)
    assert agent.workflow("A").prepare.done == ("drain",)
    assert agent.workflow("B").approval.state == "confirmed"
