"""The simulated events themselves: time goes in as a number, documents come out."""

import itertools
import json
from typing import Any

import pytest

from scheduled_events_agent.simulator import list_scenarios, load_scenario, parse_scenario
from scheduled_events_agent.simulator.azure import EVENTS_VERSIONS, Azure, EventType, Plan, SimulatorError
from scheduled_events_agent.simulator.service import Service, announcements

NOON = 1_782_648_000.0  # Sun, 28 Jun 2026 12:00:00 GMT
LATEST = EVENTS_VERSIONS[-1]


def make_azure(*vms: str, **options: Any) -> Azure:
    numbers = itertools.count(1)
    return Azure(vms or ("vm-1",), new_id=lambda: f"ID-{next(numbers)}", **options)


def plan(type_: EventType = "Reboot", *vms: str, notice_seconds: float = 900.0, **options: Any) -> Plan:
    return Plan(type=type_, vms=vms or ("vm-1",), notice_seconds=notice_seconds, **options)


def read(azure: Azure, version: str = LATEST) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(azure.document(version))
    return document


def statuses(azure: Azure) -> list[tuple[str, str]]:
    return [(event["EventId"], event["EventStatus"]) for event in read(azure)["Events"]]


def test_the_first_document_is_empty() -> None:
    assert make_azure().document(LATEST) == b'{"DocumentIncarnation":1,"Events":[]}'


def test_a_document_has_azures_fields_in_azures_order() -> None:
    azure = make_azure("WestNO_0", "WestNO_1")
    azure.schedule(NOON, plan("Freeze", "WestNO_0", "WestNO_1", description="A pause.", duration_seconds=5))

    assert azure.document(LATEST) == (
        b'{"DocumentIncarnation":2,"Events":[{"EventId":"ID-1","EventStatus":"Scheduled","EventType":"Freeze",'
        b'"ResourceType":"VirtualMachine","Resources":["WestNO_0","WestNO_1"],'
        b'"NotBefore":"Sun, 28 Jun 2026 12:15:00 GMT","Description":"A pause.","EventSource":"Platform",'
        b'"DurationInSeconds":5}]}'
    )


def test_an_approved_event_starts_after_its_delay_and_then_goes() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(start_delay_seconds=2, lasts_seconds=10))
    azure.approve(NOON + 5, "ID-1", "vm-1")
    before = azure.document(LATEST)

    azure.advance(NOON + 6.9)
    assert azure.document(LATEST) is before
    azure.advance(NOON + 7)
    (started,) = read(azure)["Events"]
    assert (started["EventId"], started["EventStatus"], started["NotBefore"]) == ("ID-1", "Started", "")
    azure.advance(NOON + 16.9)
    assert statuses(azure) == [("ID-1", "Started")]
    azure.advance(NOON + 17)
    assert read(azure) == {"DocumentIncarnation": 4, "Events": []}
    assert azure.event("ID-1").outcome == "completed"


def test_an_event_without_an_approval_starts_at_not_before() -> None:
    azure = make_azure()
    azure.schedule(NOON + 0.3, plan(notice_seconds=30))

    assert read(azure)["Events"][0]["NotBefore"] == "Sun, 28 Jun 2026 12:00:31 GMT"
    azure.advance(NOON + 30.9)
    assert statuses(azure) == [("ID-1", "Scheduled")]
    azure.advance(NOON + 31)
    assert statuses(azure) == [("ID-1", "Started")]


def test_an_approval_never_delays_the_start() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(notice_seconds=10, start_delay_seconds=60))
    azure.approve(NOON + 1, "ID-1", "vm-1")

    assert azure.next_due == NOON + 10


def test_an_event_that_is_held_up_starts_at_not_before_although_it_is_approved() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(notice_seconds=60, starts_when_approved=False))
    azure.approve(NOON + 1, "ID-1", "vm-1")

    assert azure.next_due == NOON + 60


def test_the_first_approval_counts_and_further_ones_change_nothing() -> None:
    azure = make_azure("vm-1", "vm-2")
    azure.schedule(NOON, plan("Reboot", "vm-1", "vm-2"))
    azure.approve(NOON + 1, "ID-1", "vm-2")
    azure.approve(NOON + 2, "ID-1", "vm-1")

    event = azure.event("id-1")
    assert event.approved_by == "vm-2"
    assert event.approved_at is not None
    assert event.approved_at.timestamp() == NOON + 1


def test_a_canceled_event_disappears() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan())
    azure.cancel(NOON + 1, "ID-1")

    assert read(azure) == {"DocumentIncarnation": 3, "Events": []}
    assert (azure.event("ID-1").outcome, azure.event("ID-1").started_at) == ("canceled", None)


def test_a_started_event_cannot_be_canceled() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(begins_started=True))

    with pytest.raises(SimulatorError, match=r"^event ID-1 is Started; only a Scheduled one can be canceled$"):
        azure.cancel(NOON + 1, "ID-1")


def test_a_hardware_failure_is_started_when_it_first_appears() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan("Redeploy", begins_started=True))

    assert statuses(azure) == [("ID-1", "Started")]
    assert [notification.kind for notification in azure.history] == ["started"]


def test_an_event_can_be_over_without_a_document_that_showed_it_started() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(notice_seconds=10, shows_started=False))
    azure.advance(NOON + 10)

    assert read(azure) == {"DocumentIncarnation": 3, "Events": []}
    assert (azure.event("ID-1").outcome, azure.event("ID-1").gone_at) == (
        "completed",
        azure.event("ID-1").started_at,
    )


def test_an_event_can_go_on_under_a_new_id_at_its_start() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(new_id_at_start=True))
    azure.start(NOON + 1, "ID-1")

    assert statuses(azure) == [("ID-2", "Started")]
    assert azure.event("ID-1") == azure.event("ID-2")
    assert azure.event("ID-1").ids == ("ID-1", "ID-2")
    assert (azure.is_pending("ID-1"), azure.is_pending("id-2")) == (False, True)


def test_an_event_without_an_end_stays_started_until_completed() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(begins_started=True, lasts_seconds=None))
    azure.advance(NOON + 1e7)
    assert statuses(azure) == [("ID-1", "Started")]

    azure.end(NOON + 1e7, "ID-1")
    assert statuses(azure) == []


def test_the_incarnation_changes_exactly_with_the_document() -> None:
    azure = make_azure(incarnation=7, incarnation_step=3)
    seen = [read(azure)["DocumentIncarnation"]]
    azure.schedule(NOON, plan(start_delay_seconds=1, lasts_seconds=1))
    seen.append(read(azure)["DocumentIncarnation"])
    azure.approve(NOON, "ID-1", "vm-1")
    seen.append(read(azure)["DocumentIncarnation"])
    azure.advance(NOON + 1)
    seen.append(read(azure)["DocumentIncarnation"])
    azure.advance(NOON + 2)
    seen.append(read(azure)["DocumentIncarnation"])

    assert seen == [7, 10, 10, 13, 16]


def test_the_incarnation_can_begin_anew_while_an_event_is_pending() -> None:
    azure = make_azure(incarnation=41)
    azure.schedule(NOON, plan())
    azure.reset_incarnation(NOON + 1)

    assert read(azure)["DocumentIncarnation"] == 1
    assert statuses(azure) == [("ID-1", "Scheduled")]


@pytest.mark.parametrize(
    ("version", "types"),
    [
        ("2017-03-01", ["Freeze"]),
        ("2017-08-01", ["Freeze"]),
        ("2017-11-01", ["Freeze", "Preempt"]),
        ("2019-01-01", ["Freeze", "Preempt", "Terminate"]),
        ("2020-07-01", ["Freeze", "Preempt", "Terminate"]),
        ("2024-07-09", ["Freeze", "Preempt", "Terminate", "SpotRebalanceRecommendation"]),
    ],
)
def test_types_are_hidden_from_versions_older_than_they_are(version: str, types: list[str]) -> None:
    azure = make_azure()
    types_of_all: tuple[EventType, ...] = ("Freeze", "Preempt", "Terminate", "SpotRebalanceRecommendation")
    for type_ in types_of_all:
        azure.schedule(NOON, plan(type_))

    assert [event["EventType"] for event in read(azure, version)["Events"]] == types


def test_a_recommendation_never_starts_and_an_approval_has_no_effect() -> None:
    azure = make_azure()
    azure.schedule(NOON, Plan(type="SpotRebalanceRecommendation", lasts_seconds=600.0))
    assert not azure.approve(NOON + 1, "ID-1", "vm-1")
    with pytest.raises(SimulatorError, match=r"event ID-1 is a recommendation, which does not start"):
        azure.start(NOON + 2, "ID-1")
    azure.advance(NOON + 599)
    (shown,) = read(azure)["Events"]
    assert (shown["EventStatus"], shown["NotBefore"]) == ("Scheduled", "")

    azure.advance(NOON + 600)
    assert read(azure)["Events"] == []
    assert azure.event("ID-1").started_at is None


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        ("2017-03-01", []),
        ("2019-01-01", []),
        ("2019-04-01", ["Description"]),
        ("2019-08-01", ["Description", "EventSource"]),
        ("2020-07-01", ["Description", "EventSource", "DurationInSeconds"]),
    ],
)
def test_fields_are_hidden_from_versions_older_than_they_are(version: str, fields: list[str]) -> None:
    azure = make_azure()
    azure.schedule(NOON, plan())

    always = ["EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore"]
    assert list(read(azure, version)["Events"][0]) == always + fields


def test_only_the_first_preview_puts_an_underscore_before_names() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan())

    names = {version: read(azure, version)["Events"][0]["Resources"] for version in EVENTS_VERSIONS}
    assert names.pop("2017-03-01") == ["_vm-1"]
    assert set(map(tuple, names.values())) == {("vm-1",)}


def test_terminations_of_a_scale_set_wait_for_earlier_and_simultaneous_ones() -> None:
    azure = make_azure("web_0", "web_1", "web_2")
    azure.schedule(NOON, plan("Terminate", "web_0", notice_seconds=300, start_delay_seconds=1))
    azure.schedule(NOON, plan("Terminate", "web_1", notice_seconds=300, start_delay_seconds=1))
    azure.schedule(NOON, plan("Terminate", "web_2", notice_seconds=600, start_delay_seconds=1))
    azure.approve(NOON + 10, "ID-1", "web_0")
    azure.approve(NOON + 10, "ID-3", "web_2")
    azure.advance(NOON + 60)
    assert statuses(azure) == [("ID-1", "Scheduled"), ("ID-2", "Scheduled"), ("ID-3", "Scheduled")]

    azure.approve(NOON + 60, "ID-2", "web_1")
    azure.advance(NOON + 61)
    assert statuses(azure) == [("ID-1", "Started"), ("ID-2", "Started"), ("ID-3", "Started")]


def test_an_overdue_action_happens_at_its_own_time() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(notice_seconds=10, lasts_seconds=5))
    azure.advance(NOON + 1000)

    event = azure.event("ID-1")
    assert event.started_at is not None
    assert event.gone_at is not None
    assert (event.started_at.timestamp(), event.gone_at.timestamp()) == (NOON + 10, NOON + 15)


def test_a_vm_sees_an_event_once_and_in_a_version_that_shows_it() -> None:
    azure = make_azure("vm-1", "vm-2")
    azure.schedule(NOON, plan("Preempt"))
    azure.mark_served(NOON + 1, "vm-1", "2017-08-01")
    assert azure.event("ID-1").seen_by == ()

    azure.mark_served(NOON + 2, "vm-1", LATEST)
    azure.mark_served(NOON + 3, "vm-1", LATEST)
    azure.mark_served(NOON + 4, "vm-2", LATEST)
    assert azure.event("ID-1").seen_by == ("vm-1", "vm-2")
    assert [(told.kind, told.vm) for told in azure.history[1:]] == [("polled", "vm-1"), ("polled", "vm-2")]


def test_an_event_for_an_unknown_vm_is_rejected() -> None:
    with pytest.raises(SimulatorError, match=r"^no VM 'vm-9' here; expected one of vm-1, vm-2$"):
        make_azure("vm-1", "vm-2").schedule(NOON, plan("Reboot", "vm-9"))


def test_an_event_can_wait_for_the_approvals_of_all_its_vms() -> None:
    azure = make_azure("vm-1", "vm-2", "vm-3")
    azure.schedule(NOON, plan("Reboot", "vm-1", "vm-2", all_must_approve=True, start_delay_seconds=1.0))
    had_effect = [azure.approve(NOON + n, "ID-1", vm) for n, vm in enumerate(("vm-3", "vm-2", "vm-2"))]
    assert had_effect == [False, True, False]
    azure.advance(NOON + 100)
    event = azure.event("ID-1")
    assert (event.status, event.approved_at, event.approvers) == ("Scheduled", None, ("vm-2",))
    assert azure.history[-1].text == "still without vm-1"

    assert azure.approve(NOON + 100, "ID-1", "vm-1")
    assert not azure.approve(NOON + 100, "ID-1", "vm-1")
    azure.advance(NOON + 101)
    event = azure.event("ID-1")
    assert (event.status, event.approved_by, event.approvers) == ("Started", "vm-1", ("vm-2", "vm-1"))


def test_the_portal_approves_for_all_vms_also_when_each_must_approve() -> None:
    azure = make_azure("vm-1", "vm-2")
    azure.schedule(NOON, plan("Reboot", "vm-1", "vm-2", all_must_approve=True, start_delay_seconds=0.0))
    assert azure.approve(NOON, "ID-1", "the portal")
    azure.advance(NOON)
    assert azure.event("ID-1").status == "Started"


def test_an_id_can_be_used_only_once() -> None:
    azure = make_azure()
    azure.schedule(NOON, plan(id="abc"))

    with pytest.raises(SimulatorError, match=r"^there has been an event ABC before; give another id$"):
        azure.schedule(NOON, plan(id="ABC"))


# --- what a scenario announces


@pytest.mark.parametrize("version", EVENTS_VERSIONS)
@pytest.mark.parametrize("name", list_scenarios())
def test_a_scenario_announces_what_its_documents_show_for_the_first_time(name: str, version: str) -> None:
    scenario = load_scenario(name)
    numbers = itertools.count(1)
    service = Service(
        (),
        (),
        scenario,
        speed=1.0,
        rate_limit=None,
        shutdown_delay_seconds=0.0,
        new_id=lambda: f"00000000-0000-0000-0000-{next(numbers):012x}",
    )
    service.begin(NOON)
    shown: dict[str, tuple[float, dict[str, Any]]] = {}
    while not service.has_ended:
        now = service.next_due()
        service.advance(now)
        for event in json.loads(service.azure.document(version))["Events"]:
            first_id = service.azure.event(event["EventId"]).ids[0]
            shown.setdefault(first_id, (now, event))

    found = announcements(scenario, NOON, version)
    assert [(at.timestamp(), json.loads(body)) for at, body in found] == [*shown.values()]


def test_an_event_is_announced_once_and_a_hidden_one_never() -> None:
    scenario = parse_scenario(
        """
        timeline:
          - {at: 1s, event: {type: Reboot, begins_started: true, new_id_at_start: true, id: A}}
          - {at: 2s, event: {type: Reboot, notice: 5s, new_id_at_start: true, id: B}}
          - {at: 3s, event: {type: Freeze, begins_started: true, shows_started: false, id: C}}
          - {at: 4s, event: {type: SpotRebalanceRecommendation, begins_started: true, id: D}}
          - {at: 8s, event: {type: Terminate, id: E, lasts: null}}
          - {at: 9s, event: {type: Terminate, id: F}}
        ends: 8s
        """,
        "mine.yaml",
    )
    events = [json.loads(body) for _, body in announcements(scenario, NOON, LATEST)]
    assert [(event["EventId"], event["EventStatus"]) for event in events] == [
        ("00000000-0000-0000-0000-000000000001", "Started"),
        ("B", "Scheduled"),
        ("D", "Scheduled"),
        ("E", "Scheduled"),
    ]
