"""The life of an event whose VM acts together with others: when it begins, when it is approved, what it asks."""

from datetime import timedelta
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace
from test_workflow import NOTICE, START, a_rule, an_event

from scheduled_events_agent.engine.fleet import FleetState
from scheduled_events_agent.engine.messages import FleetUpdate
from scheduled_events_agent.imds.compare import Gone, Missing, Seen
from scheduled_events_agent.policy.settings import FleetSettings, Settings
from scheduled_events_agent.status.messages import wait_message
from scheduled_events_agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    Context,
    FleetEventStatus,
    FleetRequest,
    FleetView,
    HookFinished,
    OperatorCommand,
    RunHook,
    Signal,
    Transition,
    Workflow,
    advance,
    fleet_requests,
    next_wake_at,
    workflow_id,
)

NAMES = ("vm_1", "vm_2", "vm_3")
FULL = FleetEventStatus(workflow_id=workflow_id("a", START), position=1, ahead=("602d9444-1234",))


class Life:
    """One VM's open workflows, changed by signals and by updates from its fleet."""

    def __init__(self, fleet: FleetView | None, event: Any = None, **rule: Any) -> None:
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
        self.workflows: dict[str, Workflow] = {}
        self.transitions: tuple[Transition, ...] = ()
        self.take(Seen(event or an_event(resources=NAMES)))

    def take(self, *signals: Signal) -> None:
        progression = advance(self.workflows, signals, self.context)
        assert not progression.errors
        self.workflows, self.transitions = progression.workflows, progression.transitions

    def tell(self, later: timedelta = timedelta(0), **changes: Any) -> None:
        assert self.context.fleet is not None
        fleet, now = replace(self.context.fleet, **changes), self.context.now + later
        self.context = replace(self.context, fleet=fleet, now=now, document_at=now)
        self.take()

    def status(self, **fields: Any) -> None:
        status = FleetEventStatus(workflow_id=self.workflow.id, requested_vms=NAMES, **fields)
        self.tell(statuses={"a": status})

    def finish(self, hook: str = "drain", outcome: Any = "succeeded") -> None:
        end = HookFinished(workflow_id=self.workflow.id, stage="prepare", hook=hook, run=1, outcome=outcome)
        self.take(end)

    @property
    def workflow(self) -> Workflow:
        (workflow,) = self.workflows.values()
        return workflow

    @property
    def requests(self) -> tuple[FleetRequest, ...]:
        return fleet_requests(self.workflows, self.context, {self.workflow.id: 7.0})

    @property
    def request(self) -> FleetRequest:
        (request,) = self.requests
        return request

    def phase(self) -> str:
        return self.workflow.phase

    def wait_reason(self) -> str:
        return wait_message(self.workflow, self.workflow.wait_reason)

    def effects(self, kind: type) -> list[Any]:
        return [effect for step in self.transitions for effect in step.effects if isinstance(effect, kind)]


LIMITED = FleetView(max_events=1)
READY = FleetView()


# --- leave to begin


def test_it_does_not_begin_without_a_slot_and_records_its_wait_reason() -> None:
    life = Life(replace(LIMITED, statuses={"a": FULL}))
    assert life.phase() == "waiting"
    latest = f"{START + NOTICE - timedelta(minutes=5):%Y-%m-%d %H:%M:%S UTC}"
    line = "1st in line, behind event 602d9444"
    assert life.wait_reason() == f"waits for a slot: {line}; begins without one at {latest}"
    assert (life.request.stage, life.request.needs_slot) == ("requested", True)


def test_it_begins_with_a_slot() -> None:
    life = Life(LIMITED)
    assert life.wait_reason() == "waits for an answer of the fleet's store"
    life.status(has_slot=True)
    assert life.effects(RunHook)
    assert life.request.stage == "not_ready"


def test_an_urgent_event_starts_without_a_slot() -> None:
    life = Life(LIMITED)
    latest = START + NOTICE - timedelta(minutes=5)
    assert next_wake_at(life.workflows, life.context) == latest
    life.tell(latest - START)
    assert life.effects(RunHook)
    assert ("without_slot", "it begins without a slot of the fleet: it can wait no longer", "late") in [
        (note.kind, note.text, note.detail) for step in life.transitions for note in step.records
    ]


@pytest.mark.parametrize("not_before", [None, START + timedelta(minutes=4)])
def test_with_a_shorter_lead_time_it_begins_at_once(not_before: Any) -> None:
    assert Life(LIMITED, an_event(resources=NAMES, not_before=not_before)).effects(RunHook)


def test_an_operator_approval_begins_it_at_once() -> None:
    life = Life(LIMITED)
    life.take(OperatorCommand(workflow_id=life.workflow.id, action="approve", user="ann"))
    assert life.effects(RunHook)


def test_hooks_that_need_longer_begin_earlier() -> None:
    life = Life(LIMITED, drain_for=420.0)
    life.context = replace(life.context, hook_seconds={"drain": 60.0}, reserve=10.0)
    latest = START + NOTICE - timedelta(seconds=490)
    assert next_wake_at(life.workflows, life.context) == latest
    life.tell(latest - START)
    assert life.phase() == "preparing"


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_an_urgent_event_waits_for_no_slot_and_is_counted(kind: str) -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",), type=kind))
    assert life.effects(RunHook)
    assert (life.request.stage, life.request.needs_slot) == ("not_ready", False)
    assert "urgent" in [note.detail for step in life.transitions for note in step.records]


def test_an_unavailable_backend_delays_it_until_its_latest_begin() -> None:
    life = Life(replace(LIMITED, error="no route", unavailable_seconds=0.0))
    assert "the store cannot be used (no route)" in life.wait_reason()
    life.tell(timedelta(minutes=9), unavailable_seconds=540.0)
    assert life.phase() == "waiting"
    life.tell(timedelta(minutes=1), unavailable_seconds=600.0)
    assert life.phase() == "preparing"


def test_on_unavailable_begin_starts_it_after_a_minute() -> None:
    life = Life(replace(LIMITED, on_unavailable="begin", error="no route", unavailable_seconds=0.0))
    assert life.phase() == "waiting"
    assert life.wait_reason().endswith(
        f"begins without one at {START + timedelta(minutes=1):%Y-%m-%d %H:%M:%S UTC}"
    )
    assert next_wake_at(life.workflows, life.context) == START + timedelta(minutes=1)
    life.tell(unavailable_seconds=60.0)
    assert life.phase() == "preparing"
    assert "unavailable" in [note.detail for step in life.transitions for note in step.records]


def test_two_vms_of_one_name_wait_and_both_are_named() -> None:
    life = Life(LIMITED)
    life.status(other_vm_id="5f0c-other")
    assert life.wait_reason().startswith(
        "waits for a slot: another VM, with vmId 5f0c-other, uses the name of this one; begins without one at "
    )
    assert life.phase() == "waiting"
    shared = Life(READY)
    shared.finish()
    shared.status(other_vm_id="5f0c-other")
    assert shared.wait_reason() == "another VM, with vmId 5f0c-other, uses the name of this one in the fleet"


@pytest.mark.parametrize(
    ("position", "ahead", "words"),
    [
        (1, (), "1st in line"),
        (2, ("aaaaaaaa-1", "bbbbbbbb-2"), "2nd in line, behind events aaaaaaaa, bbbbbbbb"),
        (3, tuple("abcde"), "3rd in line, behind events a, b, c and 2 more"),
        (11, (), "11th in line"),
        (22, (), "22nd in line"),
    ],
)
def test_the_place_in_the_queue_is_shown(position: int, ahead: tuple[str, ...], words: str) -> None:
    life = Life(LIMITED)
    life.status(position=position, ahead=ahead)
    assert life.wait_reason().startswith(f"waits for a slot: {words}; begins")


@pytest.mark.parametrize(
    "rule",
    [{"prepare": (), "recover": (), "approve": "immediately", "shared": "any"}, {"name": "none", "when": None}],
)
def test_an_event_without_preparation_needs_no_slot(rule: dict[str, Any]) -> None:
    rule.pop("when", None)
    life = Life(LIMITED, **{"prepare": (), "recover": (), "shared": "any", **rule})
    assert life.phase() == "prepared"
    assert life.requests == ()


def test_an_event_that_is_to_begin_later_asks_for_no_slot_yet() -> None:
    life = Life(LIMITED, an_event(resources=NAMES, not_before=START + timedelta(hours=2)), lead=600.0)
    assert life.wait_reason().startswith("begins at")
    assert life.requests == ()


# --- readiness


def test_it_is_approved_when_all_are_ready() -> None:
    life = Life(READY)
    life.finish()
    assert life.request.stage == "ready"
    assert life.wait_reason() == "waits for an answer of the fleet's store"
    life.status(not_ready=("vm_2",))
    assert life.wait_reason() == "waits for vm_2 to be ready"
    assert not life.effects(Approve)
    life.status(is_all_ready=True)
    assert life.effects(Approve)


def test_it_does_not_approve_before_its_own_record_was_seen() -> None:
    life = Life(READY)
    life.finish()
    life.status(not_ready=("vm_1",))
    assert not life.effects(Approve)


def test_all_ready_does_not_replace_its_own_preparation() -> None:
    life = Life(READY)
    life.status(is_all_ready=True)
    assert not life.effects(Approve)
    assert life.request.stage == "not_ready"


def test_a_vm_that_joins_is_waited_for() -> None:
    life = Life(READY)
    life.finish()
    life.tell(
        statuses={"a": FleetEventStatus(workflow_id=life.workflow.id, requested_vms=NAMES, not_ready=("vm_2",))}
    )
    life.context = replace(
        life.context,
        fleet=FleetView(
            statuses={"a": FleetEventStatus(workflow_id=life.workflow.id, requested_vms=NAMES, is_all_ready=True)}
        ),
    )
    life.take(Seen(an_event(resources=(*NAMES, "vm_4"))))
    assert not life.effects(Approve), "all of those were ready that it named before"
    assert life.wait_reason() == "waits for vm_4 to be ready"
    assert life.request.requested_vms == (*NAMES, "vm_4")


def test_names_are_compared_as_everywhere() -> None:
    life = Life(READY, an_event(resources=("_VM_1", "vm_1", "_Vm_2", "VM_2")))
    assert life.request.requested_vms == ("vm_1", "vm_2")
    life.finish()
    life.status(is_all_ready=True)
    assert life.effects(Approve)


def test_vms_that_are_no_members_do_not_count_but_this_one_does() -> None:
    life = Life(replace(READY, members=("vm_2",)))
    assert life.request.requested_vms == ("vm_1", "vm_2")


def test_an_event_of_this_vm_alone_needs_no_table() -> None:
    life = Life(READY, an_event(resources=("vm_1",)))
    life.finish()
    assert life.effects(Approve)
    assert life.requests == ()


@pytest.mark.parametrize("fleet", [READY, None])
def test_without_a_response_of_the_table_nothing_is_approved(fleet: FleetView | None) -> None:
    life = Life(fleet)
    life.finish()
    assert life.phase() == "prepared"
    assert not life.effects(Approve)


def test_an_operator_approves_although_others_are_not_ready() -> None:
    life = Life(READY)
    life.finish()
    life.take(OperatorCommand(workflow_id=life.workflow.id, action="approve", user="ann"))
    assert life.effects(Approve)


def test_without_an_event_an_unavailable_backend_wakes_nothing() -> None:
    life = Life(replace(LIMITED, on_unavailable="begin", error="no route", unavailable_seconds=0.0))
    assert next_wake_at(life.workflows, life.context) is not None
    assert next_wake_at({}, life.context) is None


@pytest.mark.parametrize("word", ["wait", "begin"])
def test_an_unavailable_backend_never_skips_the_other_vms(word: Any) -> None:
    life = Life(replace(READY, on_unavailable=word, error="no route", unavailable_seconds=0.0))
    life.finish()
    life.tell(timedelta(minutes=10), unavailable_seconds=600.0)
    assert not life.effects(Approve)
    assert life.wait_reason() == "waits for vm_2, vm_3 to be ready; the store cannot be used (no route)"
    shown = FleetState(lambda _: None)
    shown.committed(life.workflows, life.context, 0.0)
    assert shown.not_ready == ("vm_2", "vm_3"), "not itself"


@pytest.mark.parametrize("word", ["held", "failed"])
def test_a_held_or_failed_preparation_is_not_ready(word: Any) -> None:
    life = Life(READY)
    if word == "held":
        life.finish()
        life.take(OperatorCommand(workflow_id=life.workflow.id, action="hold", user="ann"))
    else:
        life.finish(outcome="failed")
    assert life.phase() == "held"
    assert life.request.stage == "not_ready"


def test_many_names_are_truncated() -> None:
    life = Life(READY, an_event(resources=tuple(f"vm_{number}" for number in range(1, 101))))
    life.finish()
    life.status(not_ready=("vm_2", "vm_3"))
    assert life.wait_reason() == "waits for vm_2, vm_3, vm_4 and 96 more to be ready"


def test_a_status_of_an_earlier_appearance_does_not_count() -> None:
    old = FleetEventStatus(
        workflow_id=workflow_id("a", START - NOTICE), has_slot=True, is_all_ready=True, requested_vms=NAMES
    )
    life = Life(FleetView(max_events=1, statuses={"a": old}))
    assert life.phase() == "waiting"
    life.status(has_slot=True)
    life.tell(statuses={"a": old})
    life.finish()
    assert life.phase() == "prepared"
    assert not life.effects(Approve)


# --- requests


@pytest.mark.parametrize("has_started", [False, True])
def test_a_vm_that_recovers_is_not_ready(has_started: bool) -> None:
    life = Life(READY, recover=("resume",))
    life.finish()
    if has_started:
        life.take(Seen(an_event(resources=NAMES, status="Started")))
    life.take(Gone("a"))
    assert life.phase() == "recovering"
    assert life.request.stage == "not_ready"


def test_a_prepared_vm_that_the_event_no_longer_names_keeps_its_slot() -> None:
    life = Life(LIMITED)
    life.status(has_slot=True)
    life.finish()
    life.take(Seen(an_event(resources=NAMES[1:])))
    assert (life.request.vm, life.request.stage) == ("vm_1", "not_ready")


def test_the_request_follows_the_event_to_its_end() -> None:
    life = Life(FleetView(max_events=1))
    stages = [life.request.stage]
    life.status(has_slot=True, is_all_ready=True)
    stages.append(life.request.stage)
    life.finish()
    stages.append(life.request.stage)
    life.take(ApprovalAnswered(workflow_id=life.workflow.id))
    stages.append(life.request.stage)
    assert stages == ["requested", "not_ready", "ready", "not_ready"]
    assert life.request.seen_at == 7.0


@pytest.mark.parametrize(("kind", "has_request"), [("Terminate", False), ("Preempt", False), ("Reboot", True)])
def test_a_vm_that_is_deleted_asks_for_nothing_once_that_has_started(kind: str, has_request: bool) -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",), type=kind))
    life.status(has_slot=True)
    assert life.request.stage == "not_ready"
    life.take(Seen(an_event(resources=("vm_1",), type=kind, status="Started")))
    assert bool(life.requests) == has_request


def test_an_event_of_this_vm_alone_is_never_ready_for_others() -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",)))
    life.status(has_slot=True)
    life.finish()
    assert (life.request.stage, life.request.needs_all) == ("not_ready", False)


def test_vms_it_waits_for_are_recorded_once_and_shown_unchanged() -> None:
    life = Life(READY)
    life.finish()
    life.status(not_ready=("vm_2", "vm_3"))
    assert noted_waits(life) == ["vm_2, vm_3 to be ready"]
    life.status(not_ready=("vm_2",))
    assert life.wait_reason() == "waits for vm_2 to be ready"
    assert noted_waits(life) == []


def test_the_place_in_the_queue_is_recorded_as_soon_as_it_is_known() -> None:
    life = Life(LIMITED)
    assert noted_waits(life) == []
    life.status(position=1, ahead=FULL.ahead)
    assert noted_waits(life) == ["1st in line, behind event 602d9444"]


def noted_waits(life: Life) -> list[str]:
    notes = [note for step in life.transitions for note in step.records]
    return [note.wait_reason.detail for note in notes if note.wait_reason]


def test_an_event_under_a_new_id_keeps_its_key() -> None:
    life = Life(READY)
    life.take(Seen(an_event(id="B", resources=NAMES), "a"))
    assert life.workflow.event.id == "B"
    assert (life.request.event, life.request.event_id) == ("a", "B")


# --- what the engine keeps of it


def test_a_list_allows_nothing_any_more_after_ten_seconds() -> None:
    settings = Settings(fleet=FleetSettings(table="https://a.example/abc", max_events=1))
    status = FleetEventStatus(workflow_id="a@1", has_slot=True, is_all_ready=True, position=1)
    state = FleetState(lambda _: None)
    state.update(FleetUpdate(statuses={"a": status}, listed_at=100.0, settings=settings.fleet))
    young, old = state.view(settings, ("vm_1",), 110.0), state.view(settings, ("vm_1",), 110.1)
    assert young is not None
    assert old is not None
    assert young.statuses == {"a": status}
    assert old.statuses == {"a": replace(status, has_slot=False, is_all_ready=False)}


def test_members_that_do_not_match_this_vm_are_read_as_all() -> None:
    settings = Settings(fleet=FleetSettings(table="https://a.example/abc", members=("wbe_*",)))
    assert settings.fleet is not None
    view = FleetState(lambda _: None).view(settings, ("web_0",), 0.0)
    assert view is not None
    assert view.members == ("*",)
    fault = settings.fleet.members_error(("web_0",))
    assert fault == "members does not match this VM, web_0: all VMs are waited for"
    assert settings.fleet.members_for(("_WBE_7",)) == ("wbe_*",)
    assert settings.fleet.members_for(()) == ("wbe_*",), "nothing is known yet"


def test_when_an_appearance_was_first_seen_is_kept_until_it_is_closed() -> None:
    published: list[tuple[FleetRequest, ...]] = []
    state = FleetState(published.append)
    life = Life(LIMITED)
    for now in (5.0, 9.0):
        state.committed(life.workflows, life.context, now)
    state.committed({}, life.context, 11.0)
    state.committed(life.workflows, life.context, 12.0)
    assert [[request.seen_at for request in requests] for requests in published] == [[5.0], [5.0], [], [12.0]]


def test_a_reappeared_and_prepared_event_is_ready_while_its_first_recovery_waits() -> None:
    life = Life(READY)
    event = life.workflow.event
    first = life.workflow.id
    life.finish()
    life.take(Missing(event.key))
    life.take(Gone(event.key))
    (recovery,) = life.effects(RunHook)
    assert fleet_requests(life.workflows, life.context, {})[0].stage == "not_ready"
    life.context = replace(life.context, now=START + timedelta(seconds=20))
    life.take(Seen(event))
    (second,) = life.workflows.keys() - {first}
    life.take(
        HookFinished(workflow_id=first, stage="recover", hook=recovery.hook, run=recovery.run, outcome="canceled")
    )
    life.take(HookFinished(workflow_id=second, stage="prepare", hook="drain", run=1, outcome="succeeded"))
    assert life.workflows[first].phase == "recovering"
    (request,) = fleet_requests(life.workflows, life.context, {})
    assert (request.workflow_id, request.stage) == (second, "ready")


def test_an_event_that_comes_back_is_seen_anew() -> None:
    """Reports of others before it came back may be about what they have recovered from since."""
    published: list[tuple[FleetRequest, ...]] = []
    state = FleetState(published.append)
    life = Life(READY)
    life.finish()
    key = life.workflow.id
    state.committed(life.workflows, life.context, 5.0)
    over = {key: replace(life.workflow, is_over=True)}
    state.committed(over, life.context, 60.0)
    state.committed(life.workflows, life.context, 90.0)
    assert [[request.seen_at for request in requests] for requests in published] == [[5.0], [inf], [90.0]]


def test_a_shared_eviction_that_has_started_asks_for_nothing() -> None:
    life = Life(LIMITED, an_event(resources=NAMES, type="Preempt"))
    life.take(Seen(an_event(resources=NAMES, type="Preempt", status="Started")))
    assert life.requests == ()


def test_by_an_old_document_it_is_not_ready() -> None:
    life = Life(READY)
    life.finish()
    stages = [life.request.stage]
    life.context = replace(life.context, now=START + timedelta(minutes=5), stale_after=30.0)
    stages.append(life.request.stage)
    assert stages == ["ready", "not_ready"]


def test_it_reports_that_its_first_appearance_comes_first() -> None:
    other = FleetEventStatus(workflow_id=workflow_id("a", START - NOTICE))
    life = Life(FleetView(max_events=1, statuses={"a": other}))
    assert life.wait_reason().startswith(
        "waits for a slot: its first appearance is not recovered from; begins without"
    )


# --- what began late, without a slot


SECOND = {"position": 1, "ahead": ("602d9444-1234",)}
AZURE_STARTS = f"Azure starts it at {START + NOTICE:%Y-%m-%d %H:%M:%S UTC}"


def begun_late(fleet: FleetView = LIMITED, event: Any = None, **rule: Any) -> Life:
    """An event of this VM alone that has waited for its slot until it could wait no longer."""
    life = Life(fleet, event or an_event(resources=("vm_1",)), **{"recover": ("resume",), **rule})
    life.status(**SECOND)
    life.tell(timedelta(minutes=10))
    return life


def prepared_late(fleet: FleetView = LIMITED, event: Any = None, **rule: Any) -> Life:
    life = begun_late(fleet, event, **rule)
    life.finish()
    return life


def test_what_began_late_is_approved_with_a_slot_only() -> None:
    life = begun_late()
    assert life.phase() == "preparing"
    assert (life.request.stage, life.request.needs_slot, life.request.lacks_slot) == ("not_ready", False, True)
    life.finish()
    assert life.phase() == "prepared"
    assert not life.effects(Approve)
    assert (life.request.stage, life.request.needs_slot, life.request.lacks_slot) == ("not_ready", True, True)
    life.status(**SECOND)
    line = "1st in line, behind event 602d9444"
    assert life.wait_reason() == f"waits for a slot to approve: {line}; {AZURE_STARTS}"
    life.status(has_slot=True, position=1)
    assert life.effects(Approve)
    assert not life.workflow.lacks_slot
    assert (life.request.needs_slot, life.request.lacks_slot) == (False, False)


def test_that_it_lacks_a_slot_outlives_its_agent_and_a_reboot() -> None:
    life = prepared_late()
    life.take(AgentRestarted())
    assert life.request.lacks_slot
    life.context = replace(life.context, boot_id="another")
    life.take(AgentRestarted())
    life.finish()
    assert not life.effects(Approve)
    life.take(
        HookFinished(workflow_id=life.workflow.id, stage="prepare", hook="drain", run=2, outcome="succeeded")
    )
    assert not life.effects(Approve)
    assert life.request.lacks_slot


def test_what_began_late_asks_only_when_nothing_else_keeps_it() -> None:
    life = prepared_late()
    assert life.request.needs_slot
    life.take(OperatorCommand(workflow_id=life.workflow.id, action="hold", user="ann"))
    assert (life.request.needs_slot, life.request.lacks_slot) == (False, True)
    life.status(has_slot=True)
    assert not life.effects(Approve)


def test_one_that_is_never_approved_asks_for_no_slot() -> None:
    life = prepared_late(approve="never", lead=900.0)
    assert (life.request.needs_slot, life.request.lacks_slot) == (False, True)


def test_what_began_late_and_is_approved_immediately_waits_too() -> None:
    life = begun_late(approve="immediately")
    assert life.phase() == "preparing"
    assert not life.effects(Approve)
    assert life.request.needs_slot
    life.status(has_slot=True)
    assert life.effects(Approve)


def test_what_began_late_needs_a_slot_and_all_vms() -> None:
    life = prepared_late(event=an_event(resources=NAMES))
    assert (life.request.stage, life.request.needs_slot) == ("ready", True)
    life.status(is_all_ready=True)
    assert not life.effects(Approve)
    life.status(has_slot=True)
    assert not life.effects(Approve)
    life.status(has_slot=True, is_all_ready=True)
    assert life.effects(Approve)


def test_what_began_with_a_slot_is_approved_without_asking_again() -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",)))
    life.status(has_slot=True)
    life.tell(timedelta(minutes=12), statuses={})
    life.finish()
    assert life.effects(Approve)


@pytest.mark.parametrize("not_before", [None, START + timedelta(minutes=3)])
def test_what_has_nothing_to_prepare_is_approved_without_a_slot(not_before: Any) -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",), not_before=not_before), prepare=(), recover=())
    assert life.effects(Approve)


@pytest.mark.parametrize("changes", [{"type": "Preempt"}, {"type": "Terminate"}, {"not_before": None}])
def test_what_is_urgent_is_approved_without_a_slot(changes: dict[str, Any]) -> None:
    life = Life(LIMITED, an_event(resources=("vm_1",), **changes))
    life.finish()
    assert life.effects(Approve)


@pytest.mark.parametrize("changes", [{"type": "Terminate"}, {"not_before": None}])
def test_what_becomes_urgent_no_longer_waits(changes: dict[str, Any]) -> None:
    life = prepared_late()
    life.take(Seen(an_event(resources=("vm_1",), **changes)))
    assert life.effects(Approve)


def test_an_operator_approves_what_began_late() -> None:
    life = prepared_late()
    life.take(OperatorCommand(workflow_id=life.workflow.id, action="approve", user="ann"))
    assert life.effects(Approve)
    assert life.workflow.lacks_slot
    life.take(ApprovalAnswered(workflow_id=life.workflow.id, error_kind="timeout"))
    life.take(OperatorCommand(workflow_id=life.workflow.id, action="release", user="ann"))
    assert life.request.needs_slot, "Azure has not accepted it"


@pytest.mark.parametrize("fleet", [None, READY])
def test_a_reload_that_takes_the_limit_away_lets_it_be_approved(fleet: FleetView | None) -> None:
    life = prepared_late()
    life.context = replace(life.context, fleet=fleet)
    life.take()
    assert life.effects(Approve)


def test_while_the_store_is_unavailable_what_began_late_waits_for_azure() -> None:
    life = prepared_late()
    life.tell(timedelta(minutes=4), error="no route", unavailable_seconds=240.0, statuses={})
    assert not life.effects(Approve)
    assert (
        life.wait_reason() == f"waits for a slot to approve: the store cannot be used (no route); {AZURE_STARTS}"
    )


def needs_operator(life: Life) -> bool:
    return life.workflow.approval_needed_since is not None


def test_an_event_that_lacks_only_the_fleets_store_needs_an_operator_after_a_minute() -> None:
    life = Life(READY)
    life.finish()
    life.status(not_ready=("vm_2",))
    assert not needs_operator(life)
    life.tell(error="no route", unavailable_seconds=0.0)
    assert not needs_operator(life)
    assert next_wake_at(life.workflows, life.context) == life.context.now + timedelta(minutes=1)
    life.tell(timedelta(minutes=1), unavailable_seconds=60.0)
    assert needs_operator(life)
    (record,) = (note for step in life.transitions for note in step.records)
    assert (record.kind, record.text) == ("approval_needed", "the fleet's store cannot be used (no route)")
    life.take(Missing("a"))
    assert needs_operator(life), "a single answer without the event changes nothing"
    life.take(Seen(an_event(resources=NAMES)))
    life.tell(error="", unavailable_seconds=None)
    assert not needs_operator(life)


@pytest.mark.parametrize(
    "rule", [{"shared": "any"}, {"shared": "hold"}, {"approve": "never"}, {"prepare": ("drain", "checkpoint")}]
)
def test_an_event_that_the_fleets_store_does_not_keep_from_its_approval_needs_no_operator(rule: Any) -> None:
    life = Life(READY, **rule)
    life.finish()
    life.tell(timedelta(minutes=2), error="no route", unavailable_seconds=120.0)
    assert not needs_operator(life)


def test_an_event_whose_vms_are_ready_needs_no_operator_when_the_store_fails() -> None:
    life = Life(READY)
    life.finish()
    life.status(is_all_ready=True)
    life.tell(timedelta(minutes=2), error="no route", unavailable_seconds=120.0)
    assert not needs_operator(life)


def test_an_operator_approves_what_waits_for_the_fleets_store() -> None:
    life = Life(replace(READY, error="no route", unavailable_seconds=90.0))
    life.finish()
    assert needs_operator(life)
    life.take(OperatorCommand(workflow_id=life.workflow.id, action="approve", user="ann"))
    assert life.effects(Approve)
    assert not needs_operator(life)


def test_on_unavailable_begin_what_began_late_is_approved_after_a_minute() -> None:
    life = prepared_late(replace(LIMITED, on_unavailable="begin"))
    life.tell(error="no route", unavailable_seconds=0.0, statuses={})
    assert not life.effects(Approve)
    minute = timedelta(minutes=1)
    assert next_wake_at(life.workflows, life.context) == life.context.now + minute
    life.tell(minute, unavailable_seconds=60.0)
    assert life.effects(Approve)


@pytest.mark.parametrize("is_back", [False, True])
def test_what_began_because_of_the_store_is_approved_as_ever(is_back: bool) -> None:
    life = Life(
        replace(LIMITED, on_unavailable="begin", error="no route", unavailable_seconds=60.0),
        an_event(resources=("vm_1",)),
    )
    assert life.phase() == "preparing"
    back: dict[str, Any] = {"error": "", "unavailable_seconds": None} if is_back else {}
    life.tell(timedelta(minutes=12), **back)
    life.finish()
    assert life.effects(Approve)
