"""The engine alone, on a real state file that others use and that fails it."""

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import pytest
import structlog
from msgspec.structs import replace
from state_file import do_not_wait_for_locks, locked, query, refuse_writes

from scheduled_events_agent.engine import (
    Engine,
    Executor,
    FleetUpdate,
    HookCommand,
    HookDone,
    Host,
    RunOnClear,
    hook_key,
    not_run_result,
)
from scheduled_events_agent.engine.hook_runs import HookRuns
from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent, check_limits
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.notifications import Notification
from scheduled_events_agent.policy import Hook, Rule, When
from scheduled_events_agent.policy.settings import (
    AgentSettings,
    FleetSettings,
    ImdsSettings,
    NotificationKind,
    NotifyTarget,
    Settings,
)
from scheduled_events_agent.status.messages import wait_message
from scheduled_events_agent.store import MAX_EVENT_RECORDS, CommitResult, RequestAnswer, Store
from scheduled_events_agent.telemetry.log import set_up
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import (
    ApprovalAnswered,
    Approve,
    CancelHook,
    OperatorAction,
    RunHook,
    advance,
)

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
EVENT = ScheduledEvent(id="E1", type="Reboot", status="Scheduled", resources=("vm-1",))


class Approvals:
    """An executor that only ever has to approve."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []

    @property
    def sent(self) -> list[str]:
        return [event_id for request in self.requests for event_id in request]

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        del incarnation
        self.requests.append([one.event_id for one in approvals])

    def approval_received(self, workflow_id: str) -> None:
        pass

    def is_running(self, key: object) -> bool:
        del key
        return False


class Clocks(Host):
    """A machine on which no time passes by itself."""

    def __init__(self) -> None:
        self.wall, self.seconds = START, 1000.0

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, seconds: float, *, jump: float = 0.0) -> datetime:
        """Let time pass, and set the wall clock besides; returns what it is then."""
        self.seconds += seconds
        self.wall += timedelta(seconds=seconds + jump)
        return self.wall


@pytest.fixture
def executor() -> Approvals:
    return Approvals()


@pytest.fixture
def engine(tmp_path: Path, executor: Approvals) -> Iterator[Engine]:
    """One that has an event before it which waits for an operator."""
    store = Store.open(tmp_path, datetime.now(UTC))
    do_not_wait_for_locks(store)
    engine = Engine(
        Settings(rules=(Rule(name="hand", approve="manual"),)), store, Metrics(tuple), cast("Executor", executor)
    )
    engine.start()
    engine.receive(Identity(name="vm-1", vm_id="id-1"))
    engine.receive(Document(incarnation="1", events=(EVENT,)))
    assert engine.run_cycle(datetime.now(UTC))
    yield engine
    store.close()


@pytest.fixture
def operator(engine: Engine, tmp_path: Path) -> Iterator[Store]:
    """The state file, as the command of an operator has it open."""
    del engine
    store = Store.open_client(tmp_path)
    yield store
    store.close()


def ask_for_approval(engine: Engine, operator: Store) -> int:
    (workflow_id,) = engine.workflows
    return operator.add_request(workflow_id, "approve", "kim", datetime.now(UTC))


def test_an_operator_action_that_could_not_be_stored_is_applied_later(
    engine: Engine, operator: Store, executor: Approvals, tmp_path: Path
) -> None:
    request = ask_for_approval(engine, operator)
    with locked(tmp_path):
        assert not engine.run_cycle(datetime.now(UTC))
        assert not engine.run_cycle(datetime.now(UTC))
    assert executor.sent == []
    assert engine.run_cycle(datetime.now(UTC))
    assert executor.sent == ["E1"]
    assert operator.load_answer(request) == RequestAnswer(
        succeeded=True, message="approved: the event is prepared, approval requested"
    )


def test_an_unstored_operator_action_that_is_withdrawn_is_void(
    engine: Engine, operator: Store, executor: Approvals, tmp_path: Path
) -> None:
    request = ask_for_approval(engine, operator)
    with locked(tmp_path):
        assert not engine.run_cycle(datetime.now(UTC))
    operator.withdraw_request(request)
    assert engine.run_cycle(datetime.now(UTC))
    assert executor.sent == []
    assert [workflow.operator_action for workflow in engine.workflows.values()] == [""]


def test_an_answer_that_cannot_be_written_loses_no_other_operator_action(
    engine: Engine, operator: Store, executor: Approvals, tmp_path: Path
) -> None:
    late = operator.add_request("one that is over", "approve", "kim", datetime.now(UTC))
    request = ask_for_approval(engine, operator)
    with locked(tmp_path):
        assert not engine.run_cycle(datetime.now(UTC))
    assert engine.run_cycle(datetime.now(UTC))
    assert operator.load_answer(late) == RequestAnswer(
        succeeded=False, message="rejected: the event is not pending any more"
    )
    answer = operator.load_answer(request)
    assert answer is not None
    assert answer.succeeded
    assert executor.sent == ["E1"]


def test_an_operator_action_withdrawn_during_the_decision_is_void(
    engine: Engine, operator: Store, executor: Approvals, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workflow_id,) = engine.workflows
    impatient = ask_for_approval(engine, operator)
    patient = operator.add_request(workflow_id, "hold", "lee", datetime.now(UTC))
    commit = engine._store.commit
    withdrawn: list[RequestAnswer | None] = []

    def commit_late(*arguments: object) -> CommitResult:
        if not withdrawn:
            withdrawn.append(operator.withdraw_request(impatient))
        return commit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._store, "commit", commit_late)
    assert engine.run_cycle(datetime.now(UTC))
    assert withdrawn == [None]  # so its operator was informed that it is withdrawn
    assert executor.sent == []
    assert operator.load_answer(patient) == RequestAnswer(succeeded=True, message="hold: set; the event is held")
    said = [entry.text for entry in operator.load_journal() if entry.kind == "operator"]
    assert said == ["held by lee"]


def test_an_answered_request_is_applied_even_if_the_disk_fails(
    engine: Engine, operator: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask_for_approval(engine, operator)
    perform = engine._perform

    def perform_on_a_full_disk(*arguments: object) -> None:
        perform(*arguments)  # type: ignore[arg-type]
        refuse_writes(engine._store)

    monkeypatch.setattr(engine, "_perform", perform_on_a_full_disk)
    engine.run_cycle(datetime.now(UTC))
    answer = operator.load_answer(request)
    assert answer is not None
    assert answer.succeeded


@pytest.mark.parametrize("action", ["hold", "release"])
def test_what_comes_with_the_answer_to_the_approval_cannot_withdraw_it(
    engine: Engine, operator: Store, action: OperatorAction
) -> None:
    ask_for_approval(engine, operator)
    assert engine.run_cycle(datetime.now(UTC))
    (workflow_id,) = engine.workflows
    engine.receive(ApprovalAnswered(workflow_id=workflow_id))
    request = operator.add_request(workflow_id, action, "kim", datetime.now(UTC))
    assert engine.run_cycle(datetime.now(UTC))
    answer = operator.load_answer(request)
    assert answer is not None
    assert not answer.succeeded
    assert (engine.workflows[workflow_id].phase, engine.remembered.known) == ("approved", {})


def test_a_late_approval_of_a_changed_event_is_rejected(
    engine: Engine, operator: Store, executor: Approvals
) -> None:
    request = ask_for_approval(engine, operator)
    engine.receive(Document(incarnation="", events=(replace(EVENT, type="Redeploy"),)))
    assert engine.run_cycle(datetime.now(UTC))
    assert executor.sent == []
    assert operator.load_answer(request) == RequestAnswer(
        succeeded=False, message="rejected: the event has just changed, or another operator was faster"
    )


class Clearing(Approvals):
    """An executor whose on_clear hook runs until it is stopped, and what it was to report."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.reported: list[HookDone] = []

    def start_hook(self, effect: HookCommand, *_: object, **__: object) -> None:
        self.started.append(effect.hook)

    def is_running(self, key: object) -> bool:
        return key == hook_key(RunOnClear("go"))

    def cancel_hook(self, key: object, *, is_urgent: bool) -> None:
        pass

    def hook_received(self, effect: object) -> None:
        pass


def test_an_event_that_ends_before_its_hook_starts_is_closed(tmp_path: Path) -> None:
    hooks = {name: Hook(run=("/bin/true",)) for name in ("clear", "drain", "resume")}
    rule = Rule(name="drain", prepare=("drain",), approve="when-prepared")
    executor = Clearing()
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        settings = Settings(rules=(rule,), hooks=hooks, on_clear=("clear",))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), put=executor.reported.append)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for number, events in enumerate(((), (EVENT,), (), ()), start=1):
            engine.receive(Document(incarnation="", events=events, answered=number))
            assert engine.run_cycle(datetime.now(UTC))
        (canceled,) = executor.reported
        assert canceled.result.detail == "canceled before it started"
        assert list(engine.workflows) != []
        engine.receive(canceled)
        assert engine.run_cycle(datetime.now(UTC))
        assert (engine.workflows, executor.started) == ({}, ["clear"])
    finally:
        store.close()


def test_on_clear_begins_no_hook_while_the_agent_observes_and_then_goes_on(tmp_path: Path) -> None:
    hooks = {name: Hook(run=("/bin/true",)) for name in ("clear", "go")}
    acting = Settings(hooks=hooks, on_clear=("clear", "go"))
    executor = Clearing()
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        engine = Engine(acting, store, Metrics(tuple), cast("Executor", executor))
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="", events=()))
        assert engine.run_cycle(datetime.now(UTC))
        engine.change_settings(replace(acting, agent=replace(acting.agent, mode="observe")))
        result = HookResult(
            hook="clear", outcome="succeeded", exit_code=0, attempts=1, duration_seconds=1.0, detail="", tail=""
        )
        with mock.patch.object(executor, "is_running", return_value=False):
            engine.receive(HookDone(RunOnClear("clear"), result))
            assert engine.run_cycle(datetime.now(UTC))
            assert executor.started == ["clear"]
            engine.change_settings(acting)
            assert engine.run_cycle(datetime.now(UTC))
        assert executor.started == ["clear", "go"]
    finally:
        store.close()


def test_on_clear_does_not_run_beside_a_hook_of_an_event_of_another_vm(tmp_path: Path) -> None:
    hooks = {name: Hook(run=("/bin/true",)) for name in ("clear", "tell")}
    rule = Rule(name="others", when=When(affects=("others",)), on_start=("tell",))
    executor = Clearing()
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        settings = Settings(rules=(rule,), hooks=hooks, on_clear=("clear",))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor))
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        event = replace(EVENT, status="Started", resources=("vm-2",))
        engine.receive(Document(incarnation="", events=(event,)))
        with mock.patch.object(executor, "is_running", return_value=False):
            assert engine.run_cycle(datetime.now(UTC))
        assert executor.started == ["tell"]
    finally:
        store.close()


def test_events_ready_together_are_approved_in_one_request_then_each_alone(
    tmp_path: Path, executor: Approvals
) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    try:
        settings = Settings(rules=(Rule(name="now", approve="immediately"),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        other = ScheduledEvent(id="E2", type="Freeze", status="Scheduled", resources=("vm-1",))
        engine.receive(Document(incarnation="7", events=(EVENT, other)))
        assert engine.run_cycle(machine.now())
        assert executor.requests == [["E1", "E2"]]
        for workflow_id in engine.workflows:
            engine.receive(ApprovalAnswered(workflow_id=workflow_id, error_kind="bad_request"))
        assert engine.run_cycle(machine.now())
        assert engine.run_cycle(machine.wait(5.0))
        assert executor.requests == [["E1", "E2"], ["E1"], ["E2"]]
    finally:
        store.close()


def test_a_reload_keeps_the_hooks_of_open_workflows(tmp_path: Path, executor: Approvals) -> None:
    rule = Rule(name="old", on_start=("tell",), recover=("resume",), approve="when-prepared")
    old = Settings(rules=(rule,), hooks={name: Hook(run=("/bin/true",)) for name in ("tell", "resume", "spare")})
    new = Settings(rules=(), hooks={"call": Hook(run=("/bin/true",))})
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        engine = Engine(old, store, Metrics(tuple), cast("Executor", executor))
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="", events=(EVENT,)))
        assert engine.run_cycle(datetime.now(UTC))
        engine.change_settings(new)
        assert sorted(engine.settings.hooks) == ["call", "resume", "tell"]
    finally:
        store.close()


class Recovering(Approvals):
    """An executor that keeps the commands to hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}
        self.effects: list[RunHook] = []

    def start_hook(self, effect: RunHook, *_: object, environment: dict[str, str], **__: object) -> None:
        self.effects.append(effect)
        self.told[effect.hook] = environment["SCHEDULED_EVENT_SECONDS_LEFT"]

    def hook_received(self, effect: object) -> None:
        pass


def test_a_recovery_gets_no_deadline_in_the_past(tmp_path: Path) -> None:
    executor = Recovering()
    rule = Rule(name="all", prepare=("drain",), recover=("resume",), approve="when-prepared")
    settings = Settings(rules=(rule,), hooks={name: Hook(run=("/bin/true",)) for name in ("drain", "resume")})
    machine = Clocks()
    event = replace(EVENT, not_before=machine.now() + timedelta(minutes=15))
    store = Store.open(tmp_path, machine.now())
    try:
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="1", events=(event,)))
        assert engine.run_cycle(machine.now())
        canceled = replace(not_run_result("drain", "canceled", ""), has_run=True)
        engine.receive(HookDone(executor.effects[0], canceled))
        for _ in range(2):
            engine.receive(Document(incarnation="2", events=()))
            assert engine.run_cycle(machine.wait(2.0))
        assert executor.told == {"drain": "900", "resume": ""}
    finally:
        store.close()


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_drain_keeps_its_length_when_the_clock_is_set(jump: float, tmp_path: Path, executor: Approvals) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    try:
        settings = Settings(rules=(Rule(name="drain", drain_for=120.0, approve="when-prepared"),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="", events=(EVENT,)))
        assert engine.run_cycle(machine.now())
        for seconds, set_by in ((20.0, 0.0), (1.0, jump), (98.0, 0.0)):
            assert engine.run_cycle(machine.wait(seconds, jump=set_by))
            assert executor.requests == []
        assert engine.run_cycle(machine.wait(2.0))
        assert executor.requests == [["E1"]]
    finally:
        store.close()


def test_an_outage_of_the_fleets_store_that_counts_while_a_cycle_is_stored_wakes_the_next_one(
    tmp_path: Path, executor: Approvals, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    try:
        fleet = FleetSettings(leases="default", max_events=1, on_unavailable="begin")
        rule = Rule(name="drain", drain_for=120.0, approve="when-prepared")
        settings = Settings(rules=(rule,), fleet=fleet)
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        event = replace(EVENT, not_before=machine.now() + timedelta(minutes=15))
        engine.receive(Document(incarnation="", events=(event,)))
        away = machine.monotonic() - 59.0
        engine.receive(FleetUpdate(error="no route", unavailable_from=away, settings=fleet))
        commit = store.commit

        def commit_slowly(*arguments: Any) -> CommitResult:
            machine.wait(2.0)
            return commit(*arguments)

        monkeypatch.setattr(store, "commit", commit_slowly)
        now = machine.now()
        assert engine.run_cycle(now)
        assert [workflow.phase for workflow in engine.workflows.values()] == ["waiting"]
        assert engine.wake_at == now + timedelta(seconds=1)
    finally:
        store.close()


def test_nothing_is_approved_by_an_answer_that_is_old(tmp_path: Path, executor: Approvals) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    with contextlib.closing(store):
        settings = Settings(rules=(Rule(name="drain", drain_for=40.0, approve="when-prepared"),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        document = Document(incarnation="", events=(EVENT,))
        answered_at = machine.now()
        engine.receive(document)
        assert engine.run_cycle(answered_at)
        assert not engine.snapshot.needs_answer
        machine.wait(41.0)  # polls have failed meanwhile
        assert engine.run_cycle(answered_at)
        assert executor.requests == []
        (workflow,) = engine.workflows.values()
        waits_for = f"the metadata service has not answered since {answered_at:%Y-%m-%d %H:%M:%S} UTC"
        assert wait_message(workflow, workflow.wait_reason) == waits_for
        assert engine.snapshot.needs_answer  # also if it is that of before
        engine.receive(document)
        assert engine.run_cycle(machine.wait(1.0))
        assert executor.requests == [["E1"]]
        assert not engine.snapshot.needs_answer


def test_two_long_polls_may_pass_before_an_answer_is_old(tmp_path: Path, executor: Approvals) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    with contextlib.closing(store):
        settings = Settings(
            imds=ImdsSettings(poll_interval=60.0),
            rules=(Rule(name="drain", drain_for=100.0, approve="when-prepared"),),
        )
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="", events=(EVENT,)))
        answered_at = machine.now()
        assert engine.run_cycle(answered_at)
        machine.wait(101.0)
        assert engine.run_cycle(answered_at)
        assert executor.requests == [["E1"]]


def a_shared_event(machine: Clocks) -> ScheduledEvent:
    return ScheduledEvent(
        id="E1", type="Reboot", status="Scheduled", resources=("vm-1", "vm-2"),
        not_before=machine.now() + timedelta(hours=1),
    )  # fmt: skip


def test_a_hook_that_was_quick_before_begins_later_also_after_a_restart(tmp_path: Path) -> None:
    machine, executor = Clocks(), Recovering()
    rule = Rule(name="all", prepare=("drain",), approve="when-prepared")
    settings = Settings(rules=(rule,), hooks={"drain": Hook(run=("/bin/drain",), timeout=600.0)})
    reasons: list[str] = []
    for life in range(2):
        store = Store.open(tmp_path, machine.now())
        try:
            engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
            engine.start()
            engine.receive(Identity(name="vm-1", vm_id="id-1"))
            event = a_shared_event(machine)
            engine.receive(Document(incarnation="1", events=(event,)))
            assert engine.run_cycle(machine.now())
            reasons.append(*(wait_message(one, one.wait_reason) for one in engine.workflows.values()))
            assert executor.effects == []
            if life == 0:
                assert engine.run_cycle(machine.wait(3600 - 605))
                (effect,) = executor.effects
                result = replace(
                    not_run_result("drain", "succeeded", ""), attempts=1, duration_seconds=20.0, has_run=True
                )
                engine.receive(HookDone(effect, result))
                for _ in range(2):
                    engine.receive(Document(incarnation="2", events=()))
                    assert engine.run_cycle(machine.wait(1.0))
                assert engine.workflows == {}
                executor.effects.clear()
        finally:
            store.close()
    takes = [reason.rpartition("preparation may take ")[2].removesuffix(")") for reason in reasons]
    assert takes == ["10m5s", "55s"]


@pytest.mark.parametrize("has_run", [True, False])
def test_a_hook_that_a_shutdown_cut_short_has_run_though_it_is_canceled_later(
    tmp_path: Path, *, has_run: bool
) -> None:
    done: list[HookDone] = []
    drain = RunHook(workflow_id="w-1", stage="prepare", hook="drain", run=1)
    failed = replace(not_run_result("drain", "failed", "exit code 1"), has_run=has_run)
    executor = mock.Mock()
    with contextlib.closing(Store.open(tmp_path, START)) as store:
        hook_runs = HookRuns(store, executor, GoingDown(), mock.Mock(), done.append)
        assert hook_runs.to_signal(drain, failed, None) is None
        hook_runs.resume()
        hook_runs.cancel(CancelHook(workflow_id="w-1", stage="prepare"))
        (canceled,) = done
        signal = hook_runs.to_signal(drain, canceled.result, None)
    assert signal is not None
    assert (signal.outcome, signal.has_run) == ("canceled", has_run)


class GoingDown(Host):
    """A machine that shuts down."""

    def is_shutting_down(self) -> bool:
        return True


def test_a_hold_on_a_shared_event_warns_that_other_vms_may_approve_it(tmp_path: Path) -> None:
    machine, executor = Clocks(), Approvals()
    store = Store.open(tmp_path, machine.now())
    operator = Store.open_client(tmp_path)
    try:
        settings = Settings(rules=(Rule(name="hand", approve="manual"),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="1", events=(a_shared_event(machine),)))
        assert engine.run_cycle(machine.now())
        (workflow_id,) = engine.workflows
        number = operator.add_request(workflow_id, "hold", "kim", machine.now())
        assert engine.run_cycle(machine.now())
        answer = operator.load_answer(number)
        assert answer is not None
        assert answer.succeeded
        assert answer.message.startswith("hold: set; ")
        assert answer.message.endswith("; the other VMs that it names may still approve it")
    finally:
        operator.close()
        store.close()


def test_journal_log_and_notification_have_the_same_text_of_a_record(tmp_path: Path) -> None:
    settings = Settings(
        rules=(Rule(name="hand", approve="manual"),),
        notify=(NotifyTarget(name="ops", to="https://example.com", on=("seen", "approval_needed", "held")),),
    )
    executor = mock.create_autospec(Executor, instance=True)
    with contextlib.closing(Store.open(tmp_path, START)) as store, structlog.testing.capture_logs() as log:
        engine = Engine(settings, store, Metrics(tuple), executor)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="1", events=(EVENT,)))
        assert engine.run_cycle(datetime.now(UTC))
        (workflow_id,) = engine.workflows
        store.add_request(workflow_id, "hold", "kim", datetime.now(UTC))
        assert engine.run_cycle(datetime.now(UTC))
        journal = {entry.kind: entry.text for entry in store.load_journal() if entry.key}
        notified: dict[str, str] = {}
        last = store.outbox.load_next("ops", 0)
        while last is not None:
            happening = msgspec.json.decode(last.body, type=Notification)
            notified[happening.kind] = happening.reason
            last = store.outbox.load_next("ops", last.id)
    logged = {line["event"].replace(" ", "_"): line["reason"] for line in log if "sentence" in line}
    assert logged == journal
    assert set(notified) == {"seen", "approval_needed", "held"}
    assert notified == {kind: journal[kind] for kind in notified}
    assert journal["approval_needed"].startswith("an operator must approve it: ")
    assert journal["held"] == "held: an operator holds it; Azure may start it at any moment"


def notifications_of(store: Store, target: str) -> list[Notification]:
    found: list[Notification] = []
    last = store.outbox.load_next(target, 0)
    while last is not None:
        found.append(msgspec.json.decode(last.body, type=Notification))
        last = store.outbox.load_next(target, last.id)
    return found


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("has_started", [False, True])
def test_an_event_from_before_the_name_is_notified_as_seen_when_the_name_comes(
    tmp_path: Path, *, has_started: bool, is_restarted: bool
) -> None:
    kinds: tuple[NotificationKind, ...] = ("seen", "started")
    targets = (
        NotifyTarget(name="ops", to="https://example.com", on=kinds),
        NotifyTarget(name="all", to="https://example.com", on=kinds, when=When(affects=("self", "others"))),
    )
    settings = Settings(rules=(Rule(name="all", when=When(affects=("self", "others"))),), notify=targets)
    executor = mock.create_autospec(Executor, instance=True)
    other = replace(EVENT, id="E-2", resources=("vm-2",))
    event = replace(EVENT, status="Started" if has_started else "Scheduled", not_before=None)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(Store.open(tmp_path, START)))
        engine = Engine(settings, store, Metrics(tuple), executor)
        engine.start()
        for _ in range(2):
            engine.receive(Document(incarnation="1", events=(event, other)))
            assert engine.run_cycle(datetime.now(UTC))
        assert notifications_of(store, "all") == []
        if is_restarted:
            store.close()
            store = stack.enter_context(contextlib.closing(Store.open(tmp_path, START)))
            engine = Engine(settings, store, Metrics(tuple), executor)
            engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for _ in range(2):
            engine.receive(Document(incarnation="1", events=(event, other)))
            assert engine.run_cycle(datetime.now(UTC))
        told = {
            name: [(one.kind, one.event.id) for one in notifications_of(store, name)] for name in ("ops", "all")
        }
    started = [("started", EVENT.id)] if has_started else []
    assert told["ops"] == [("seen", EVENT.id), *started]
    assert sorted(told["all"]) == sorted([*told["ops"], ("seen", "E-2")])
    assert told["all"][-1:] == started or not has_started


def test_an_event_that_was_over_before_the_name_came_is_notified_from_its_begin_to_its_end(tmp_path: Path) -> None:
    target = NotifyTarget(name="ops", to="https://example.com", on=("seen", "recovered"))
    settings = Settings(rules=(Rule(name="all"),), notify=(target,))
    executor = mock.create_autospec(Executor, instance=True)
    with contextlib.closing(Store.open(tmp_path, START)) as store:
        engine = Engine(settings, store, Metrics(tuple), executor)
        engine.start()
        for number, events in enumerate(((EVENT,), (), (), ())):
            engine.receive(Document(incarnation="1", events=events, answered=100.0 * (number + 1)))
            assert engine.run_cycle(datetime.now(UTC))
        assert len(engine.workflows) == 1
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        assert engine.run_cycle(datetime.now(UTC))
        assert engine.workflows == {}
        assert [one.kind for one in notifications_of(store, "ops")] == ["seen", "recovered"]


@pytest.mark.parametrize("resources", [("vm-1",), ("vm-2", "vm-1")])
def test_an_event_that_comes_to_name_this_vm_is_notified_as_seen(
    tmp_path: Path, resources: tuple[str, ...]
) -> None:
    target = NotifyTarget(name="ops", to="https://example.com", on=("seen",))
    settings = Settings(rules=(Rule(name="all", when=When(affects=("self", "others"))),), notify=(target,))
    executor = mock.create_autospec(Executor, instance=True)
    with contextlib.closing(Store.open(tmp_path, START)) as store:
        engine = Engine(settings, store, Metrics(tuple), executor)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for named in (("vm-2",), resources, resources):
            engine.receive(Document(incarnation="1", events=(replace(EVENT, resources=named),)))
            assert engine.run_cycle(datetime.now(UTC))
        assert [one.event.resources for one in notifications_of(store, "ops")] == [resources]
        (reason,) = [one.reason for one in notifications_of(store, "ops")]
    assert reason.startswith(f"names this VM: {EVENT.type} Scheduled")


def events_of(*vms: str) -> Document:
    return Document(incarnation="2", events=tuple(replace(EVENT, id=f"E-{vm}", resources=(vm,)) for vm in vms))


def followed(engine: Engine) -> list[str]:
    return [workflow.event.id for workflow in engine.workflows.values()]


def test_events_of_other_vms_are_counted_and_no_more(engine: Engine, operator: Store) -> None:
    before = len(list(operator.load_histories(limit=-1)))
    with structlog.testing.capture_logs() as log:
        engine.receive(Document(incarnation="2", events=(EVENT, *events_of("vm-2", "vm-3").events)))
        assert engine.run_cycle(datetime.now(UTC))
    assert followed(engine) == ["E1"]
    assert engine.documents.other_vm_events == 2
    assert [line for line in log if line["log_level"] != "debug"] == []
    assert len(list(operator.load_histories(limit=-1))) == before
    engine.receive(Document(incarnation="3", events=(EVENT,)))
    assert engine.run_cycle(datetime.now(UTC))
    assert engine.documents.other_vm_events == 0


def test_a_rule_for_other_vms_creates_workflows_for_their_events(engine: Engine) -> None:
    engine.receive(Document(incarnation="2", events=(EVENT, *events_of("vm-2").events)))
    assert engine.run_cycle(datetime.now(UTC))
    engine.change_settings(Settings(rules=(Rule(name="tell", when=When(affects=("others",))),)))
    assert engine.run_cycle(datetime.now(UTC))
    assert followed(engine) == ["E1", "E-vm-2"]
    assert engine.documents.other_vm_events == 0


def test_an_event_seen_before_the_vm_name_keeps_its_workflow(tmp_path: Path) -> None:
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        engine = Engine(Settings(), store, Metrics(tuple), cast("Executor", Approvals()))
        engine.start()
        engine.receive(events_of("vm-1", "vm-2"))
        assert engine.run_cycle(datetime.now(UTC))
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(events_of("vm-1", "vm-2", "vm-3"))
        assert engine.run_cycle(datetime.now(UTC))
        assert followed(engine) == ["E-vm-1", "E-vm-2"]
        assert engine.documents.other_vm_events == 1
    finally:
        store.close()


def test_more_than_100_events_of_this_vm_are_not_acted_on(engine: Engine) -> None:
    others = events_of(*(f"vm-{number}" for number in range(2, 1900))).events
    mine = tuple(replace(EVENT, id=f"E-{number}") for number in range(100))
    names = engine.snapshot.names
    check_limits(Document(incarnation="2", events=(*others, *mine)), names)
    with pytest.raises(DocumentError, match=r"^101 events name this VM; at most 100 are followed$") as caught:
        check_limits(Document(incarnation="2", events=(*mine, EVENT)), names)
    assert caught.value.kind == "too_many"


def test_of_very_many_events_at_once_the_log_shows_some(engine: Engine, operator: Store) -> None:
    many = tuple(replace(EVENT, id=f"E-{number}") for number in range(100))
    with structlog.testing.capture_logs() as log:
        engine.receive(Document(incarnation="2", events=(EVENT, *many)))
        assert engine.run_cycle(datetime.now(UTC))
    assert len(followed(engine)) == 101
    assert len(list(operator.load_histories(limit=-1))) == 101
    assert {line["event_id"] for line in log if line["log_level"] == "debug"} == {"E1", "E-0", "E-1", "E-2"}
    log = [line for line in log if line["log_level"] != "debug"]
    assert len({line.get("event_id") for line in log}) == 4
    assert [line["events"] for line in log if line["event"].startswith("very many events at once")] == [100]
    assert len(log) < 20


def test_of_very_many_reloads_the_log_shows_some_and_the_journal_all(
    engine: Engine, operator: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(50):
        set_up("info", "json")  # as each reload does
        engine.change_settings(engine.settings)
        engine.reject_settings("policy.yaml:1: it is bad")
    structlog.reset_defaults()
    lines = Counter(json.loads(line)["message"] for line in capsys.readouterr().err.splitlines())
    read, kept = "the policy file was read again", "the policy file is rejected; the old policy stays in force"
    for message in (read, kept):
        assert 20 <= lines[message] <= 22  # as long as this takes less than two minutes
    for kind in ("reloaded", "reload_rejected"):
        assert len(operator.load_records(kind=kind, limit=100)) == 50


def flapping(name: str, poll: int) -> ScheduledEvent:
    """The event as it is at some poll, in one of the worlds that never come to rest."""
    changes: dict[str, dict[str, Any]] = {
        "description": {"description": f"{poll} " + "x" * 4000},
        "NotBefore": {"not_before": START + timedelta(hours=1, seconds=poll)},
        "resources": {"resources": ("vm-1", "vm-2") if poll % 2 else ("vm-1",)},
        "type": {"type": "Freeze" if poll % 2 else "Reboot"},
        "id": {"id": f"E{poll}", "status": "Started"},
        "clock": {},
    }
    return replace(EVENT, **changes[name])


@pytest.mark.parametrize("name", ["description", "NotBefore", "resources", "type", "id", "clock"])
def test_an_ever_changing_document_floods_neither_log_nor_journal(
    tmp_path: Path,
    executor: Approvals,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    polls = 700
    store, machine = Store.open(tmp_path, START), Clocks()
    monkeypatch.setattr("scheduled_events_agent.telemetry.log.time", SimpleNamespace(monotonic=machine.monotonic))
    set_up("info", "json")
    try:
        rules = (Rule(name="late", lead=600.0, approve="manual"),)
        engine = Engine(Settings(rules=rules), store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for poll in range(polls):
            engine.receive(Document(incarnation=str(poll), events=(flapping(name, poll),)))
            jump = (-1) ** poll * 3600.0 if name == "clock" else 0.0
            assert engine.run_cycle(machine.wait(1.0, jump=jump))
            engine.maintain()
        ((entries, longest),) = query(store, "SELECT count(*), max(length(text)) FROM journal")
    finally:
        store.close()
        structlog.reset_defaults()
    lines = Counter(json.loads(line)["message"] for line in capsys.readouterr().err.splitlines())
    most = 500 if name == "id" else 20  # each id is another event's, as far as the log knows
    assert {message: count for message, count in lines.items() if count > most + polls / 60 + 1} == {}
    assert entries < MAX_EVENT_RECORDS + 4 * 60 + 10  # what came since it was last tidied up is more
    assert longest < 8000


@pytest.mark.parametrize(("seconds", "is_over"), [(0.5, False), (1.0, True)])
def test_two_documents_without_an_event_count_only_a_poll_apart(
    seconds: float, is_over: bool, tmp_path: Path, executor: Approvals
) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    try:
        settings = Settings(rules=(Rule(name="hand", approve="manual"),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for events in ((EVENT,), (), ()):
            engine.receive(Document(incarnation="", events=events))
            assert engine.run_cycle(machine.wait(seconds, jump=-3600.0))  # the clock that is set does not count
        assert (engine.workflows == {}) is is_over
    finally:
        store.close()


def test_a_document_with_the_event_restarts_the_missing_count(tmp_path: Path, executor: Approvals) -> None:
    store, machine = Store.open(tmp_path, datetime.now(UTC)), Clocks()
    try:
        settings = Settings(rules=(Rule(name="hand", approve="manual"),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for answers in ([(EVENT,)], [()], [(EVENT,), ()], [()]):
            assert engine.workflows or answers == [(EVENT,)], "it is over too early"
            for events in answers:
                machine.wait(1.0)
                engine.receive(Document(incarnation="", events=events))
            assert engine.run_cycle(machine.now())
        assert engine.workflows == {}
    finally:
        store.close()


def test_the_identity_of_another_vm_leaves_nothing_behind(engine: Engine, operator: Store) -> None:
    engine.receive(Identity(name="vmss_1", vm_id="id-1", group="vmss"))
    assert engine.run_cycle(datetime.now(UTC))
    engine.receive(Identity(name="", vm_id="another"))
    assert engine.run_cycle(datetime.now(UTC))
    assert (engine.names(), engine.identity.group) == ((), "")
    assert (operator.get_meta("vm_name"), operator.get_meta("vm_group")) == ("", "")


def test_a_name_that_the_service_changes_counts_as_one_that_the_policy_changes(engine: Engine) -> None:
    engine.receive(Identity(name="vm-9", vm_id="id-1"))
    assert engine.run_cycle(datetime.now(UTC))
    (workflow,) = engine.workflows.values()
    assert (workflow.named_as, workflow.is_named_otherwise) == ("vm-1", True)


def test_without_a_change_no_decision_is_repeated(
    tmp_path: Path, executor: Approvals, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, machine, decided = Store.open(tmp_path, datetime.now(UTC)), Clocks(), []

    def counting(*arguments: Any) -> Any:
        decided.append(machine.seconds)
        return advance(*arguments)

    monkeypatch.setattr("scheduled_events_agent.engine.engine.advance", counting)
    event = replace(EVENT, not_before=machine.now() + timedelta(seconds=1000))
    try:
        settings = Settings(rules=(Rule(name="late", approve="immediately", lead=900.0),))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor), machine)
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="1", events=(event,)))
        assert engine.run_cycle(machine.now())
        assert decided == [1000.0]
        assert engine.needs_early_cycle  # the clock may be set
        assert engine.wake_at == machine.now() + timedelta(seconds=100)
        for _ in range(9):
            assert engine.run_cycle(machine.wait(11.0))
        assert decided == [1000.0, 1066.0]  # once a minute, to be safe
        assert executor.sent == []
        assert engine.run_cycle(machine.wait(1.0))
        assert decided[-1] == 1100.0
        assert executor.sent == ["E1"]
    finally:
        store.close()


def test_a_waiting_on_clear_hook_does_not_start_during_a_hold(tmp_path: Path) -> None:
    hooks = {name: Hook(run=("/bin/true",)) for name in ("clear", "drain")}
    rule = Rule(name="drain", prepare=("drain",), approve="when-prepared")
    executor = Clearing()
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        settings = Settings(rules=(rule,), hooks=hooks, on_clear=("clear",))
        engine = Engine(settings, store, Metrics(tuple), cast("Executor", executor))
        engine.start()
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        for number, events in enumerate(((), (EVENT,)), start=1):
            engine.receive(Document(incarnation="", events=events, answered=number))
            assert engine.run_cycle(datetime.now(UTC))
        with contextlib.closing(Store.open_client(tmp_path)) as operator:
            cases: dict[OperatorAction, list[str]] = {"hold": ["clear"], "release": ["clear", "drain"]}
            for action, started in cases.items():
                (workflow_id,) = engine.workflows
                operator.add_request(workflow_id, action, "kim", datetime.now(UTC))
                with mock.patch.object(executor, "is_running", return_value=False):  # the on_clear hook has ended
                    assert engine.run_cycle(datetime.now(UTC))
                    assert engine.run_cycle(datetime.now(UTC))
                assert executor.started == started
    finally:
        store.close()


def test_a_performed_effect_finds_its_event_in_the_published_workflows(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    engines: list[Engine] = []

    class Asking(Approvals):
        def approve(self, approvals: list[Approve], incarnation: str) -> None:
            super().approve(approvals, incarnation)
            seen.append([workflow.approval.state for workflow in engines[0].snapshot.workflows.values()])

    executor = Asking()
    rules = (Rule(name="all", approve="immediately"),)
    with contextlib.closing(Store.open(tmp_path, datetime.now(UTC))) as store:
        engine = Engine(Settings(rules=rules), store, Metrics(tuple), cast("Executor", executor))
        engines.append(engine)
        engine.start()
        before = engine.snapshot
        engine.receive(Identity(name="vm-1", vm_id="id-1"))
        engine.receive(Document(incarnation="7", events=(EVENT,)))
        assert engine.snapshot is before  # nothing is published but by a cycle
        assert engine.run_cycle(datetime.now(UTC))
        after = engine.snapshot
        assert seen == [["requested"]]
        assert (before.workflows, before.names, before.incarnation) == ({}, (), "")
        assert (list(after.workflows), after.names, after.incarnation) == (list(engine.workflows), ("vm-1",), "7")
        assert after.cycle_began_at == engine.cycle_began_at


def test_a_reload_and_a_failed_cycle_are_published_at_once(engine: Engine, tmp_path: Path) -> None:
    observing = Settings(agent=AgentSettings(mode="observe"))
    engine.change_settings(observing)
    assert engine.snapshot.settings.agent.mode == "observe"
    with locked(tmp_path):
        assert not engine.run_cycle(datetime.now(UTC))
    assert engine.snapshot.store_failure != ""
    assert engine.run_cycle(datetime.now(UTC))
    assert engine.snapshot.store_failure == ""


def test_what_the_log_tells_of_is_published_by_then(tmp_path: Path) -> None:
    published: dict[str, str] = {}
    engines: list[Engine] = []

    def note(_: object, entry: Mapping[str, object]) -> None:
        snapshot = engines[0].snapshot
        phases = ", ".join(workflow.phase for workflow in snapshot.workflows.values())
        published[str(entry["message"])] = f"{snapshot.settings.agent.mode}; {phases}; {snapshot.store_failure}"

    with contextlib.closing(Store.open(tmp_path, datetime.now(UTC))) as store:
        do_not_wait_for_locks(store)
        rules = (Rule(name="hand", approve="manual"),)
        engine = Engine(Settings(rules=rules), store, Metrics(tuple), cast("Executor", Approvals()))
        engines.append(engine)
        engine.start()
        set_up("info", "json", stream=io.StringIO(), on_entry=note)
        try:
            engine.receive(Identity(name="vm-1", vm_id="id-1"))
            engine.receive(Document(incarnation="1", events=(EVENT,)))
            assert engine.run_cycle(datetime.now(UTC))
            assert published["prepared"] == "act; prepared; "
            engine.change_settings(Settings(rules=rules, agent=AgentSettings(mode="observe")))
            assert published["the policy file was read again"] == "observe; prepared; "
            with locked(tmp_path):
                assert not engine.run_cycle(datetime.now(UTC))
            assert "locked" in published["writing the state file fails"]
        finally:
            structlog.reset_defaults()
