"""The life of an event whose VM acts together with others: when it begins, when it is approved, what it wishes."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from test_workflow import NOTICE, START, a_rule, an_event

from scheduled_events_agent.engine.fleet import FleetPart
from scheduled_events_agent.events import Gone, Seen
from scheduled_events_agent.status.messages import wait_in_words
from scheduled_events_agent.workflow import (
    ApprovalAnswered,
    Approve,
    Context,
    Fleet,
    HookFinished,
    OperatorSpoke,
    RunHook,
    Signal,
    Standing,
    Step,
    Wish,
    Workflow,
    next_wake_at,
    proceed,
    wishes,
    workflow_id,
)

NAMES = ("vm_1", "vm_2", "vm_3")
FULL = Standing(workflow=workflow_id("a", START), holder="event 602d9444 of vm_9, until 08:40Z")


class Life:
    """One VM's board, moved by signals and by what its fleet tells."""

    def __init__(self, fleet: Fleet | None, event: Any = None, **rule: Any) -> None:
        rules = (a_rule(**{"prepare": ("drain",), "shared": "all-ready", **rule}),)
        self.context = Context(
            now=START,
            names=("vm_1",),
            rules=rules,
            windows={},
            hooks=("drain", "checkpoint", "resume"),
            boot_id="boot",
            document_at=START,
            fleet=fleet,
        )
        self.board: dict[str, Workflow] = {}
        self.steps: tuple[Step, ...] = ()
        self.take(Seen(event or an_event(resources=NAMES)))

    def take(self, *signals: Signal) -> None:
        progression = proceed(self.board, signals, self.context)
        assert not progression.faults
        self.board, self.steps = progression.board, progression.steps

    def tell(self, later: timedelta = timedelta(0), **changes: Any) -> None:
        assert self.context.fleet is not None
        fleet, now = replace(self.context.fleet, **changes), self.context.now + later
        self.context = replace(self.context, fleet=fleet, now=now, document_at=now)
        self.take()

    def stands(self, **fields: Any) -> None:
        self.tell(standings={"a": Standing(workflow=self.workflow.id, **fields)})

    def finish(self, hook: str = "drain", outcome: Any = "succeeded") -> None:
        end = HookFinished(workflow_id=self.workflow.id, stage="prepare", hook=hook, run=1, outcome=outcome)
        self.take(end)

    @property
    def workflow(self) -> Workflow:
        (workflow,) = self.board.values()
        return workflow

    @property
    def wish(self) -> Wish:
        (wish,) = wishes(self.board, self.context)
        return wish

    def phase(self) -> str:
        return self.workflow.phase

    def waits(self) -> str:
        return wait_in_words(self.workflow, self.workflow.waits)

    def effects(self, kind: type) -> list[Any]:
        return [effect for step in self.steps for effect in step.effects if isinstance(effect, kind)]


LIMITED = Fleet(max_events=1)
READY = Fleet()


# --- leave to begin


def test_it_does_not_begin_without_a_slot_and_says_what_it_waits_for() -> None:
    life = Life(replace(LIMITED, standings={"a": FULL}))
    assert life.phase() == "waiting"
    latest = f"{START + NOTICE - timedelta(minutes=5):%Y-%m-%dT%H:%M:%SZ}"
    assert life.waits() == f"waits for a slot: {FULL.holder}; begins without one at {latest}"
    assert life.wish.stage == "begin"


def test_it_begins_with_a_slot() -> None:
    life = Life(LIMITED)
    assert life.waits() == "waits for the first answer of the fleet's table"
    life.stands(has_slot=True)
    assert life.effects(RunHook)
    assert life.wish.stage == "busy"


def test_5_minutes_before_not_before_it_begins_without_a_slot_and_says_so() -> None:
    life = Life(LIMITED)
    latest = START + NOTICE - timedelta(minutes=5)
    assert next_wake_at(life.board, life.context) == latest
    life.tell(latest - START)
    assert life.effects(RunHook)
    assert ("without_slot", "it begins without a slot of the fleet: Azure may start it within 5 minutes") in [
        (note.kind, note.text) for step in life.steps for note in step.notes
    ]


@pytest.mark.parametrize("not_before", [None, START + timedelta(minutes=4)])
def test_with_less_notice_it_begins_at_once(not_before: Any) -> None:
    assert Life(LIMITED, an_event(resources=NAMES, not_before=not_before)).effects(RunHook)


def test_an_operator_has_it_begin_at_once() -> None:
    life = Life(LIMITED)
    life.take(OperatorSpoke(workflow_id=life.workflow.id, word="approved", user="ann"))
    assert life.effects(RunHook)


def test_a_table_that_is_away_holds_it_until_5_minutes_before_not_before() -> None:
    life = Life(replace(LIMITED, failure="no route", away_since=START))
    assert "the table cannot be used (no route)" in life.waits()
    life.tell(timedelta(minutes=9))
    assert life.phase() == "waiting"
    life.tell(timedelta(minutes=1))
    assert life.phase() == "preparing"


def test_with_proceed_it_begins_when_the_table_has_been_away_for_a_minute() -> None:
    life = Life(replace(LIMITED, when_away="proceed", failure="no route", away_since=START))
    assert life.phase() == "waiting"
    assert life.waits().endswith(f"begins without one at {START + timedelta(minutes=1):%Y-%m-%dT%H:%M:%SZ}")
    assert next_wake_at(life.board, life.context) == START + timedelta(minutes=1)
    life.tell(timedelta(minutes=1))
    assert life.phase() == "preparing"


@pytest.mark.parametrize(
    "rule",
    [{"prepare": (), "recover": (), "approve": "immediately", "shared": "any"}, {"name": "none", "when": None}],
)
def test_what_prepares_nothing_needs_no_slot(rule: dict[str, Any]) -> None:
    rule.pop("when", None)
    life = Life(LIMITED, **{"prepare": (), "recover": (), "shared": "any", **rule})
    assert life.phase() == "prepared"
    assert wishes(life.board, life.context) == ()


def test_an_event_that_is_to_begin_later_asks_for_no_slot_yet() -> None:
    life = Life(LIMITED, an_event(resources=NAMES, not_before=START + timedelta(hours=2)), lead=600.0)
    assert life.waits().startswith("begins at")
    assert life.wish.stage == "idle"


# --- readiness


def test_it_is_approved_when_all_are_ready() -> None:
    life = Life(READY)
    life.finish()
    assert life.wish.stage == "ready"
    assert life.waits() == "waits for the first answer of the fleet's table"
    life.stands(ready=frozenset({"vm_1", "vm_3"}))
    assert life.waits() == "waits for vm_2 to be ready"
    assert not life.effects(Approve)
    life.stands(ready=frozenset(NAMES))
    assert life.effects(Approve)


def test_it_does_not_approve_before_its_own_row_was_seen() -> None:
    life = Life(READY)
    life.finish()
    life.stands(ready=frozenset({"vm_2", "vm_3"}))
    assert not life.effects(Approve)


def test_all_ready_does_not_replace_its_own_preparation() -> None:
    life = Life(READY)
    life.stands(ready=frozenset(NAMES))
    assert not life.effects(Approve)
    assert life.wish.stage == "busy"


def test_a_vm_that_joins_is_waited_for() -> None:
    life = Life(READY)
    life.finish()
    life.take(Seen(an_event(resources=(*NAMES, "vm_4"))))
    life.stands(ready=frozenset(NAMES))
    assert life.waits() == "waits for vm_4 to be ready"
    assert life.wish.expected == (*NAMES, "vm_4")


def test_names_are_compared_as_everywhere() -> None:
    life = Life(READY, an_event(resources=("_VM_1", "vm_1", "_Vm_2", "VM_2")))
    assert life.wish.expected == ("vm_1", "vm_2")
    life.finish()
    life.stands(ready=frozenset({"vm_1", "vm_2"}))
    assert life.effects(Approve)


def test_vms_that_are_not_expected_do_not_count_but_this_one_does() -> None:
    life = Life(replace(READY, expect=("vm_2",)))
    assert life.wish.expected == ("vm_1", "vm_2")


def test_an_event_of_this_vm_alone_needs_no_table() -> None:
    life = Life(READY, an_event(resources=("vm_1",)))
    life.finish()
    assert life.effects(Approve)
    assert wishes(life.board, life.context) == ()


@pytest.mark.parametrize("fleet", [READY, None])
def test_without_an_answer_of_the_table_nothing_is_approved(fleet: Fleet | None) -> None:
    life = Life(fleet)
    life.finish()
    assert life.phase() == "prepared"
    assert not life.effects(Approve)


def test_an_operator_approves_although_others_are_not_ready() -> None:
    life = Life(READY)
    life.finish()
    life.take(OperatorSpoke(workflow_id=life.workflow.id, word="approved", user="ann"))
    assert life.effects(Approve)


def test_without_an_event_no_time_wakes_the_agent_while_the_table_is_away() -> None:
    life = Life(replace(LIMITED, when_away="proceed", failure="no route", away_since=START))
    assert next_wake_at(life.board, life.context) is not None
    assert next_wake_at({}, life.context) is None


def test_with_proceed_it_approves_alone_but_only_when_it_is_ready_itself() -> None:
    life = Life(replace(READY, when_away="proceed", failure="no route", away_since=START))
    life.tell(timedelta(minutes=2))
    assert not life.effects(Approve)
    life.finish()
    assert life.effects(Approve)
    (note,) = [note for step in life.steps for note in step.notes if note.kind == "approving"]
    assert note.text.endswith("the table cannot be used, and vm_2, vm_3 may not be ready")


@pytest.mark.parametrize("word", ["held", "failed"])
def test_a_held_or_failed_preparation_is_not_ready(word: Any) -> None:
    life = Life(READY)
    if word == "held":
        life.finish()
        life.take(OperatorSpoke(workflow_id=life.workflow.id, word="held", user="ann"))
    else:
        life.finish(outcome="failed")
    assert life.phase() == "held"
    assert life.wish.stage == "busy"


def test_many_names_are_cut_short() -> None:
    life = Life(READY, an_event(resources=tuple(f"vm_{number}" for number in range(1, 101))))
    life.finish()
    life.stands(ready=frozenset({"vm_1"}))
    assert life.waits() == "waits for vm_2, vm_3, vm_4 and 96 more to be ready"


def test_nobody_counts_as_ready_while_the_table_cannot_be_used() -> None:
    life = Life(READY)
    life.stands(ready=frozenset(NAMES))
    life.tell(failure="no route", away_since=START)
    life.finish()
    assert not life.effects(Approve)
    assert life.waits() == "waits for vm_2, vm_3 to be ready; the table cannot be used (no route)"
    shown = FleetPart(lambda _: None)
    shown.committed(life.board, life.context)
    assert shown.awaited == ("vm_2", "vm_3"), "not itself"
    life.tell(failure="", away_since=None)
    assert life.effects(Approve)


def test_what_was_told_of_an_earlier_appearance_does_not_count() -> None:
    old = Standing(workflow=workflow_id("a", START - NOTICE), has_slot=True, ready=frozenset(NAMES))
    life = Life(Fleet(max_events=1, standings={"a": old}))
    assert life.phase() == "waiting"
    life.stands(has_slot=True)
    life.tell(standings={"a": old})
    life.finish()
    assert life.phase() == "prepared"
    assert not life.effects(Approve)


# --- wishes


@pytest.mark.parametrize(("has_started", "stage"), [(False, "gone"), (True, "away")])
def test_a_vm_that_recovers_from_a_canceled_event_is_not_ready(has_started: bool, stage: str) -> None:
    life = Life(READY, recover=("resume",))
    life.finish()
    if has_started:
        life.take(Seen(an_event(resources=NAMES, status="Started")))
    life.take(Gone("a"))
    assert life.phase() == "recovering"
    assert life.wish.stage == stage


def test_a_prepared_vm_that_the_event_no_longer_names_keeps_its_slot() -> None:
    life = Life(LIMITED)
    life.stands(has_slot=True)
    life.finish()
    life.take(Seen(an_event(resources=NAMES[1:])))
    assert (life.wish.own, life.wish.needs_slot, life.wish.stage) == ("vm_1", True, "busy")


def test_the_wish_follows_the_event_to_its_end() -> None:
    life = Life(Fleet(max_events=1))
    life.stands(has_slot=True, ready=frozenset(NAMES))
    stages = [life.wish.stage]
    life.finish()
    stages.append(life.wish.stage)
    life.take(ApprovalAnswered(workflow_id=life.workflow.id))
    stages.append(life.wish.stage)
    assert stages == ["busy", "ready", "away"]


@pytest.mark.parametrize(("kind", "stage"), [("Terminate", "idle"), ("Preempt", "idle"), ("Reboot", "away")])
def test_a_vm_that_is_deleted_gives_its_slot_back_at_the_start(kind: str, stage: str) -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",), type=kind))
    life.stands(has_slot=True)
    assert life.wish.stage == "busy"
    life.take(Seen(an_event(resources=("vm_1",), type=kind, status="Started")))
    assert life.wish.stage == stage


def test_whom_it_waits_for_is_noted_once_and_told_as_it_is() -> None:
    life = Life(READY)
    life.finish()
    life.stands(ready=frozenset({"vm_1"}))
    assert noted_waits(life) == ["vm_2, vm_3 to be ready"]
    life.stands(ready=frozenset({"vm_1", "vm_3"}))
    assert life.waits() == "waits for vm_2 to be ready"
    assert noted_waits(life) == []


def test_the_holder_of_the_slot_is_noted_as_soon_as_it_is_known() -> None:
    life = Life(LIMITED)
    assert noted_waits(life) == []
    life.stands(holder=FULL.holder)
    assert noted_waits(life) == [FULL.holder]


def noted_waits(life: Life) -> list[str]:
    notes = [note for step in life.steps for note in step.notes]
    return [note.waits.detail for note in notes if note.waits]


def test_an_event_under_a_new_id_keeps_its_key() -> None:
    life = Life(READY)
    life.take(Seen(an_event(id="B", resources=NAMES), "a"))
    assert life.workflow.event.id == "B"
    assert (life.wish.event, life.wish.event_id) == ("a", "B")
