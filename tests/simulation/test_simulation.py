"""The agent's whole decision-making, lived through under every kind of trouble, and checked from the outside.

A few hundred lives here; ``python tests/simulation`` lives ten thousand. That they find nothing proves something
only if the simulation finds what is there to be found: so each invariant is broken on purpose, once.
"""

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from mutants import break_workflow
from runs import run_seed, run_seeds
from simulation import START
from vm_simulation import TROUBLES, CrashingStore, Trouble, new_metrics

from scheduled_events_agent.daemon.inbox import Inbox
from scheduled_events_agent.engine import Engine, Executor, HookDone, Host
from scheduled_events_agent.engine import engine as engine_module
from scheduled_events_agent.engine.document_tracker import DocumentTracker
from scheduled_events_agent.engine.hook_runs import HookRuns
from scheduled_events_agent.engine.outbox import Outbox
from scheduled_events_agent.hooks.run import HookResult
from scheduled_events_agent.imds.client import Identity
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Rule
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.store import CommitResult, OutboxItem, OutboxTable, RequestAnswer, Store
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import (
    Approval,
    ApprovalAnswered,
    Context,
    GateResult,
    HookFinished,
    OperatorAction,
    Record,
    Result,
    StageStatus,
    Transition,
    WaitReason,
    Workflow,
    advance,
    approval,
    is_unsettled,
    phases,
    recommendations,
    signals,
    stages,
)
from scheduled_events_agent.workflow.unprepared import with_start_noted


@pytest.mark.parametrize("first", [0, 50])
def test_simulated_faults_break_no_invariant(first: int) -> None:
    events, broken = run_seeds(run_seed, range(first, first + 50))
    assert [result.text() for result in broken] == []
    assert events > 50


def test_a_seed_always_gives_the_same_run() -> None:
    one, other = run_seed(11), run_seed(11)
    assert one == other
    assert len(one.journal) > 5


def test_a_bug_that_another_life_has_met_does_not_count() -> None:
    new_metrics().bugs.inc()
    assert not run_seed(217773675).broken


def test_every_trouble_is_simulated() -> None:
    assert frozenset[str]().union(*(run_seed(seed).troubles for seed in range(30))) == set(TROUBLES)


def test_the_state_of_years_is_no_larger_than_that_of_ninety_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduled_events_agent.store.store.RESERVE_BYTES", 0)
    monkeypatch.setattr("scheduled_events_agent.store.file.RESERVE_BYTES", 0)
    clock = Calendar()
    store = Store.open(tmp_path, clock.now())
    engine = Engine(
        Settings(rules=(Rule(name="all", approve="never"),)), store, Metrics(dict), cast("Executor", None), clock
    )
    sizes = []
    try:
        engine.start()
        engine.receive(Identity(name="vm_1", vm_id="id-1"))
        for day in range(2 * 365):
            clock.days = day
            for events in ((a_freeze(day),), ()):
                engine.receive(Document(incarnation=f"{day}", events=events))
                assert engine.run_cycle(clock.now())
                engine.maintain()
            sizes.append((tmp_path / "state.db").stat().st_size)
        rows = store.load_journal()
    finally:
        store.close()
    oldest = min(row.at for row in rows)
    assert timedelta(days=89) < clock.now() - oldest < timedelta(days=92)
    assert len({row.event_id for row in rows} - {""}) in range(90, 93)
    # The space of what is forgotten is used again.
    assert max(sizes[365:]) <= 1.1 * max(sizes[:365])


class Calendar(Host):
    """A machine whose clock shows noon of some day."""

    days = 0

    def now(self) -> datetime:
        return START + timedelta(days=self.days)

    def monotonic(self) -> float:
        return self.days * 86400.0 + 1.0


def a_freeze(day: int) -> ScheduledEvent:
    return ScheduledEvent(id=f"E{day}", type="Freeze", status="Scheduled", source="Platform", resources=("vm_1",))


# --- Each invariant broken on purpose.


def _yes(*_: object) -> GateResult:
    return GateResult("allow")


def _open_gate(name: str) -> dict[str, Any]:
    return {"APPROVAL_GATES": tuple(_yes if gate.__name__ == name else gate for gate in phases.APPROVAL_GATES)}


REAL_RESTART, REAL_ANSWER, REAL_CUT_SHORT = signals._restart, approval.apply_approval_answer, stages.cancel_stage
REAL_FINISH, REAL_END = Engine.finish, stages.with_result
REAL_TAKE, REAL_EXPIRES, REAL_ADMIT = DocumentTracker.receive, recommendations.expires_at, signals._create
REAL_CLEAR, REAL_END_CLEAR = HookRuns.decide_on_clear, HookRuns.end_on_clear
REAL_UNSETTLED, REAL_NOTE = is_unsettled, with_start_noted
REAL_LOAD_NEXT, REAL_COMMIT = OutboxTable.load_next, CrashingStore.commit
REAL_NEXT, REAL_FINISH_HOOK = phases.next_transition, signals._finish_hook
REAL_BEGIN, REAL_TURN, REAL_DECIDE = phases._begin_when_due, Engine.run_cycle, Engine._decide_commit_perform


def _clear_that_always_succeeds(self: HookRuns, result: HookResult, now: datetime, **_: bool) -> bool:
    REAL_END_CLEAR(self, result, now, is_required=True)
    return True


def _restart_that_prepares_again(workflow: Workflow, context: Context) -> Transition:
    step = REAL_RESTART(workflow, context)
    prepare = replace(step.workflow.prepare, done=(), state="running" if step.workflow.prepare.done else "idle")
    return replace(step, workflow=replace(step.workflow, prepare=prepare))


def _restart_that_forgets_the_hook(workflow: Workflow, context: Context) -> Transition:
    del context
    return Transition(workflow=workflow, records=(Record(kind="restarted", text="it forgot what ran"),))


def _restart_that_repeats_approvals(workflow: Workflow, context: Context) -> Transition:
    step = REAL_RESTART(workflow, context)
    return replace(step, workflow=replace(step.workflow, approval=Approval()))


def _restart_that_waits_for_an_answer(workflow: Workflow, context: Context) -> Transition:
    step = REAL_RESTART(workflow, context)
    return replace(step, workflow=replace(step.workflow, approval=workflow.approval))


def _answer_that_gives_up(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Transition | None:
    step = REAL_ANSWER(workflow, signal, context)
    if step is None or not signal.error_kind:
        return step
    return replace(step, workflow=replace(step.workflow, approval=Approval(state="requested")))


def _cut_nothing_short(workflow: Workflow, stage: Any, *, is_urgent: bool = False) -> Transition | None:
    return None if stage == "prepare" else REAL_CUT_SHORT(workflow, stage, is_urgent=is_urgent)


def _cut_no_recovery_short(workflow: Workflow, stage: Any, *, is_urgent: bool = False) -> Transition | None:
    return None if stage == "recover" else REAL_CUT_SHORT(workflow, stage, is_urgent=is_urgent)


def _restart_that_retries(workflow: Workflow, context: Context) -> Transition:
    step = REAL_RESTART(workflow, context)
    if workflow.recover.state != "failed":
        return step
    return replace(step, workflow=replace(step.workflow, recover=replace(workflow.recover, state="running")))


def _end_that_takes_failures_for_done(progress: StageStatus, signal: HookFinished) -> StageStatus:
    return REAL_END(progress, replace(signal, is_required=signal.stage != "recover"))


def _close_at_once(workflow: Workflow, *_: object) -> Transition | None:
    return phases._close(workflow)


def _never(*_: object) -> bool:
    return False


def _is_prepared_while_it_recovers(workflow: Workflow) -> bool:
    return workflow.is_open and workflow.prepare.state != "idle" and workflow.phase != "recovery_failed"


def _turn_that_acts_before_it_knows(self: Engine, document_at: datetime | None) -> bool:
    self._document_at = document_at or self._machine.now()
    self.is_identity_sure = True
    return REAL_TURN(self, document_at)


def _begin_late(workflow: Workflow, context: Context) -> Transition | WaitReason | None:
    return None if workflow.first_seen_at == context.now else REAL_BEGIN(workflow, context)


def _begin_only_what_it_approves(workflow: Workflow, context: Context) -> Transition | WaitReason | None:
    return None if workflow.decision.why_not_automatic else REAL_BEGIN(workflow, context)


def _proceed_after_performing(engine: Engine, now: datetime) -> None:
    """A cycle whose effects are under way before they are on disk."""
    commit = engine._store.commit
    late: list[Transition] = []
    late_answers: dict[int, RequestAnswer] = {}

    def commit_nothing(
        steps: Any, at: datetime, answers: Any, notifications: Any, remembered: Any
    ) -> CommitResult:
        del at, notifications, remembered
        late.extend(steps)
        late_answers.update(answers)
        return CommitResult()

    engine._store.commit = commit_nothing  # type: ignore[method-assign,assignment]
    try:
        REAL_DECIDE(engine, now)
    finally:
        engine._store.commit = commit  # type: ignore[method-assign]
    commit(late, now, late_answers)


def _load_nothing(_: Store) -> list[Workflow]:
    return []


def _proceed_that_loses_what_fails(workflows: Any, signals: Any, context: Context) -> Result:
    """A mutant that drops the ends of hooks if they come with other signals."""
    signals = list(signals)
    kept = [signal for signal in signals if not isinstance(signal, HookFinished)]
    return advance(workflows, signals if len(signals) < 2 else kept, context)


def _collect_hooks_only(inbox: Inbox, seconds: float) -> None:
    """A stop that throws away all but the ends of hooks."""
    deadline = inbox._monotonic() + seconds
    while inbox._executor.is_busy() and (left := deadline - inbox._monotonic()) > 0:
        with suppress(queue.Empty):
            item = inbox._items.get(timeout=left)
            if isinstance(item, HookDone):
                inbox._engine.receive(item)


def _finish_without_requests(engine: Engine) -> None:
    engine._receive_requests = lambda now: None  # type: ignore[method-assign]  # noqa: ARG005
    REAL_FINISH(engine)


def _needed_by_sharers_only(workflow: Workflow, workflows: Any) -> list[Workflow]:
    peers = stages.other_prepared(workflow, workflows)
    return [peer for peer in peers if stages.still_needs_preparation(peer) and stages.undoes(workflow, peer)]


def _counts_what_only_waited(workflow: Workflow, signal: HookFinished) -> Transition:
    return REAL_FINISH_HOOK(workflow, replace(signal, has_run=True))


def _recovers_all_again(workflow: Workflow, workflows: Any, context: Context) -> Transition | WaitReason | None:
    """All hooks that are done run again if any other event that shares hooks was ever prepared for."""
    recover, needed_by = workflow.recover, phases._dependents(workflow, workflows)
    is_prepared = any(other.prepare.run > 0 for other in needed_by)
    if workflow.phase == "recovering" and recover.current is None and recover.done and is_prepared:
        return Transition(workflow=replace(workflow, recover=replace(recover, done=())))
    return REAL_NEXT(workflow, workflows, context)


def _admit_what_has_expired(event: ScheduledEvent, context: Context) -> Transition | None:
    return REAL_ADMIT(event, replace(context, expired=frozenset()))


def _take_as_if_it_had_all(self: DocumentTracker, document: Document, now: float, names: tuple[str, ...]) -> None:
    REAL_TAKE(self, replace(document, has_recommendations=True), now, names)


def _clear_whatever_is_pending(
    self: HookRuns, settings: Settings, vm: str, now: datetime, *, is_clear: bool
) -> None:
    del is_clear
    REAL_CLEAR(self, settings, vm, now, is_clear=True)


def _expires_at_once(workflow: Workflow) -> datetime | None:
    return workflow.first_seen_at if REAL_EXPIRES(workflow) else None


def _commit_notices_later(self: CrashingStore, steps: Any, at: datetime, *rest: Any) -> CommitResult:
    """Notifications in a transaction of their own, after that of their steps."""
    answers, notifications, remembered = rest
    result = REAL_COMMIT(self, steps, at, answers, (), remembered)
    with self._transaction():
        self.outbox.add(at.isoformat(), notifications)
    return result


def _load_and_delete(self: OutboxTable, target: str, after_id: int) -> OutboxItem | None:
    notice = REAL_LOAD_NEXT(self, target, after_id)
    if notice is not None:
        self.connection.execute("DELETE FROM outbox WHERE id = ?", (notice.id,))
    return notice


def _load_newest(self: OutboxTable, target: str, after_id: int) -> OutboxItem | None:
    notice, last = None, REAL_LOAD_NEXT(self, target, after_id)
    while last is not None:
        notice, last = last, REAL_LOAD_NEXT(self, target, last.id)
    return notice


def _note_without_hold(step: Transition, context: Context) -> Transition:
    """What is said of a start, as if no operator had held the event."""
    workflow = step.workflow
    noted = REAL_NOTE(replace(step, workflow=replace(workflow, operator=None, unprepared=None)), context)
    return replace(noted, workflow=replace(noted.workflow, operator=workflow.operator))


def _only_holds_wait(workflow: Workflow, action: OperatorAction) -> bool:
    return action == "hold" and REAL_UNSETTLED(workflow, action)


WORKFLOW = "scheduled_events_agent.workflow"


@dataclass(frozen=True)
class Mutant:
    """One thing done wrong, and the beginning of what the oracle says to it."""

    where: Any
    """A module or a class, or WORKFLOW: wherever that package uses it."""
    faults: dict[str, Any]
    found: str
    troubles: frozenset[Trouble] | None = None
    """Those in which it comes up, where it seldom does."""
    first: int = 0
    """The seed to begin with, where many lives go by until one shows it."""


MUTANTS: dict[str, Mutant] = {
    "1: no rule is asked": Mutant(WORKFLOW, _open_gate("rule_gate"), "(1"),
    "1: operators are ignored": Mutant(WORKFLOW, _open_gate("operator_gate"), "(1"),
    "1: a reboot undoes nothing": Mutant(
        WORKFLOW,
        {"_without_what_a_reboot_has_undone": lambda workflow, _: workflow},
        "(1",
        frozenset({"reboots", "many events"}),
    ),
    "1: an approval outlives a failure": Mutant(
        WORKFLOW, {"with_void_approval": lambda step, _: step}, "(1", frozenset({"operator", "bad hooks"})
    ),
    "2: the service's gate is open": Mutant(
        WORKFLOW, _open_gate("eligibility_gate"), "(2)", frozenset({"operator"})
    ),
    "2: anybody speaks for all": Mutant(WORKFLOW, _open_gate("shared_event_gate"), "(1, 2"),
    "2: the second VM does not wait for the first": Mutant(
        WORKFLOW, {"approval_turn_at": lambda _: None}, "(2)", frozenset({"many events"})
    ),
    "3: a restart prepares again": Mutant(WORKFLOW, {"_restart": _restart_that_prepares_again}, "(3)"),
    "4: recovery is forgotten": Mutant(WORKFLOW, {"_over": _close_at_once}, "(4)"),
    "4: recovery ignores other events": Mutant(WORKFLOW, {"undoes": _never}, "(4)"),
    "4: a hook that only waited counts as run": Mutant(
        WORKFLOW, {"_finish_hook": _counts_what_only_waited}, "(4)", frozenset({"overlapping rules", "bad hooks"})
    ),
    "4: recovery asks for shared hooks only": Mutant(
        WORKFLOW, {"next_transition": _recovers_all_again}, "(4)", frozenset({"overlapping rules"})
    ),
    "4: recovery is not shared": Mutant(WORKFLOW, {"is_to_recover": _never}, "(4)"),
    "4: a failed recovery is taken for done": Mutant(
        WORKFLOW, {"with_result": _end_that_takes_failures_for_done}, "(4)", frozenset({"bad hooks"})
    ),
    "4: a restart tries a failed recovery again": Mutant(
        WORKFLOW, {"_restart": _restart_that_retries}, "(4)", frozenset({"bad hooks", "kills"})
    ),
    "4: ready though a recovery has failed": Mutant(
        Workflow, {"is_prepared_for": property(_is_prepared_while_it_recovers)}, "(4)", frozenset({"bad hooks"})
    ),
    "2: a recommendation is taken for an event that starts": Mutant(
        ScheduledEvent, {"is_recommendation": property(_never)}, "(2)", frozenset({"recommendations"})
    ),
    "4: a recommendation is recovered from before its eviction": Mutant(
        WORKFLOW, {"_dependents": _needed_by_sharers_only}, "(4)", frozenset({"recommendations"}), first=62
    ),
    "4: an expired recommendation begins again": Mutant(
        WORKFLOW, {"_create": _admit_what_has_expired}, "(", frozenset({"recommendations"})
    ),
    "4: a recommendation expires too early": Mutant(
        WORKFLOW, {"expires_at": _expires_at_once}, "(4)", frozenset({"recommendations"})
    ),
    "4: what an api-version leaves out is taken for gone": Mutant(
        DocumentTracker, {"receive": _take_as_if_it_had_all}, "(4)", frozenset({"recommendations"})
    ),
    "11: a hold stops approvals only": Mutant(
        WORKFLOW, {"starts_next": _never}, "(11)", frozenset({"operator", "bad hooks"})
    ),
    "4: effects before the commit": Mutant(Engine, {"_decide_commit_perform": _proceed_after_performing}, ""),
    "4: on_clear beside a hook of an event": Mutant(
        HookRuns,
        {"decide_on_clear": _clear_whatever_is_pending},
        "on_clear hook",
        frozenset({"on clear", "kills", "stops", "reboots", "lost state"}),
        first=51,
    ),
    "5: a started event is prepared for": Mutant(WORKFLOW, {"cancel_stage": _cut_nothing_short}, ""),
    "6: a restart repeats approvals": Mutant(
        WORKFLOW, {"_restart": _restart_that_repeats_approvals}, "(6)", first=335
    ),
    "6: a restart waits for an answer that cannot come": Mutant(
        WORKFLOW, {"_restart": _restart_that_waits_for_an_answer}, "(6)", frozenset({"power cuts"})
    ),
    "6: a failed approval is given up": Mutant(
        WORKFLOW, {"apply_approval_answer": _answer_that_gives_up}, "(6)", frozenset({"lost answers"})
    ),
    "7: a loss of state is settled by hooks that fail": Mutant(
        HookRuns,
        {"end_on_clear": _clear_that_always_succeeds},
        "(7) a loss of state",
        frozenset({"on clear", "lost state", "bad hooks"}),
    ),
    "7: a loss of state is forgotten at the next start": Mutant(
        Store, {"load_unsettled_loss": lambda _: None}, "(7) a loss of state", frozenset({"lost state"})
    ),
    "7: approvals after the state was lost": Mutant(
        WORKFLOW, _open_gate("state_loss_gate"), "(1, 2, 7)", frozenset({"lost state"})
    ),
    "7: acts before it has read a document": Mutant(Engine, {"run_cycle": _turn_that_acts_before_it_knows}, "(7)"),
    "8: begins at a later turn": Mutant(WORKFLOW, {"_begin_when_due": _begin_late}, "(8)"),
    "8: a recovery in the way is let run": Mutant(
        WORKFLOW, {"cancel_stage": _cut_no_recovery_short}, "(8)", frozenset({"many events"}), first=345
    ),
    "9: a restart forgets the hook in flight": Mutant(WORKFLOW, {"_restart": _restart_that_forgets_the_hook}, ""),
    "9: the state file is not read": Mutant(Store, {"load_workflows": _load_nothing}, "(9)"),
    "9: a stop throws answers away": Mutant(
        Inbox, {"_drain_until_idle": _collect_hooks_only}, "(9) lost by a stop", frozenset({"stops"})
    ),
    "9: a stop forgets operators": Mutant(
        Engine,
        {"finish": _finish_without_requests},
        "(9) a stop leaves",
        frozenset({"stops", "operator"}),
        first=67,
    ),
    "10: what others approve is prepared for at once": Mutant(
        WORKFLOW, {"needed_seconds": lambda *_: 86400.0}, "(10)", frozenset({"many events"})
    ),
    "10: what others approve is never prepared for": Mutant(
        WORKFLOW, {"_begin_when_due": _begin_only_what_it_approves}, "(10)", frozenset({"many events"})
    ),
    "12: a notice is deleted before its answer": Mutant(
        OutboxTable, {"load_next": _load_and_delete}, "(12)", frozenset({"bad receivers"})
    ),
    "12: a notice is not committed with its step": Mutant(
        CrashingStore, {"commit": _commit_notices_later}, "(12)", frozenset({"power cuts"})
    ),
    "12: the newest notice goes first": Mutant(OutboxTable, {"load_next": _load_newest}, "(12)"),
    "12: an event from before the VM's name is not announced": Mutant(
        WORKFLOW, {"_records_of_names": lambda *_: ()}, "(12)", frozenset({"late name"}), first=2
    ),
    "12: what is dropped is not counted": Mutant(
        Outbox, {"_drop": lambda *_: None}, "(12)", frozenset({"bad receivers", "reloads"})
    ),
    "13: an eviction waits for its turn": Mutant(
        WORKFLOW, {"_has_come_to": _never}, "(13)", frozenset({"recommendations"})
    ),
    "14: an operator is answered while the approval is under way": Mutant(
        engine_module, {"is_unsettled": _never}, "(14)", frozenset({"operator"}), first=21
    ),
    "14: a release does not wait for the answer to the approval": Mutant(
        engine_module, {"is_unsettled": _only_holds_wait}, "(14)", frozenset({"operator"}), first=360
    ),
    "15: what is said of a start is forgotten": Mutant(
        WORKFLOW, {"with_start_noted": lambda step, _: step}, "(15)"
    ),
    "15: a hold is not looked at": Mutant(
        WORKFLOW, {"with_start_noted": _note_without_hold}, "(15)", frozenset({"operator"})
    ),
    "15: an event of an unknown VM counts as prepared": Mutant(
        WORKFLOW, {"of_new": lambda *_: None}, "(15)", frozenset({"late name"})
    ),
    "9: results are lost": Mutant(engine_module, {"advance": _proceed_that_loses_what_fails}, "", first=129),
}


@contextmanager
def broken_on_purpose(mutant: Mutant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, fault in mutant.faults.items():
            if mutant.where is WORKFLOW:
                break_workflow(patch, name, fault)
            else:
                patch.setattr(mutant.where, name, fault)
        yield


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_the_simulation_finds_an_agent_that_breaks_an_invariant(mutant: Mutant) -> None:
    with broken_on_purpose(mutant):
        seeds = (*range(mutant.first, 500), *range(mutant.first))
        results = (run_seed(seed, mutant.troubles) for seed in seeds)
        found = next((result for result in results if result.broken.startswith(mutant.found or "(")), None)
    assert found is not None
    assert found.broken
    print(found.text())
