"""Every file of tests/payloads, and what the agent makes of it."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from scheduled_events_agent.imds.document import Document, ScheduledEvent, parse_document, parse_event
from scheduled_events_agent.imds.text import DocumentError

PAYLOADS = Path(__file__).parent.parent / "payloads"

MAINTENANCE = "Host server is undergoing maintenance."
LIVE_MIGRATION = "Virtual machine is being paused because of a memory-preserving Live Migration operation."
RESTART = "Virtual machine is going to be restarted as requested by authorized user."
REDEPLOY = "Virtual machine is going to be redeployed as requested by authorized user."
BATCH_1 = "_6EF3169C-3658-4598-ADE5-E0FE62E8CEF8-AzureBatch-Deployment_1"
BATCH_2 = "_9e90cb08-3a7d-4dfc-833a-3d93298cd83e-AzureBatch-Deployment_2"


def at(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=UTC)  # type: ignore[misc,arg-type]


def event(
    event_id: str,
    event_type: str,
    *resources: str,
    status: str = "Scheduled",
    source: str = "",
    not_before: datetime | None = None,
    seconds: float | None = None,
    description: str = "",
    resource_type: str = "VirtualMachine",
) -> ScheduledEvent:
    return ScheduledEvent(
        id=event_id,
        type=event_type,
        status=status,
        source=source,
        resources=resources,
        not_before=not_before,
        duration_seconds=seconds,
        description=description,
        resource_type=resource_type,
    )


def started_freeze(event_id: str, resource: str, seconds: float | None) -> ScheduledEvent:
    return event(
        event_id, "Freeze", resource, status="Started", source="Platform", seconds=seconds, description=MAINTENANCE
    )


def docs_freeze(not_before: datetime | None, *, status: str = "Scheduled", seconds: float | None = 5) -> Document:
    return document(
        "3" if status == "Started" else "2",
        event(
            "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "Freeze",
            "WestNO_0",
            "WestNO_1",
            status=status,
            source="Platform",
            not_before=not_before,
            seconds=seconds,
            description=LIVE_MIGRATION,
        ),
    )


def batch_reboot(*resources: str) -> Document:
    return document(
        "1",
        event(
            "1180B703-3D47-412E-B813-D298F69C51C1",
            "Reboot",
            *resources,
            source="Platform",
            not_before=at(2017, 7, 11, 20, 8, 47),
            seconds=10,
        ),
    )


def document(incarnation: str, *events: ScheduledEvent) -> Document:
    return Document(incarnation=incarnation, events=events)


ROLES = ("FrontEnd_IN_0", "BackEnd_IN_0")

DOCUMENTS: dict[str, Document] = {
    "01-empty-first-document.json": document("1"),
    "02-reboot-user-scheduled.json": document(
        "2",
        event(
            "4CAEA225-A741-474D-A72E-428C86FCD853",
            "Reboot",
            "flatcar-vm1",
            source="User",
            not_before=at(2021, 7, 22, 4, 50, 17),
        ),
    ),
    "03-empty-after-approved-reboot.json": document("4"),
    "04-freeze-started-duration6-a.json": document(
        "32", started_freeze("3474C1DD-0917-49F4-85F7-84B9E366719B", "regular-node-30975042-vmss_6", 6)
    ),
    "05-freeze-started-duration6-b.json": document(
        "2", started_freeze("32504B35-D66B-4D0A-8C64-C9DDBBD0EA13", "spot-node-34525998-vmss_24", 6)
    ),
    "06-freeze-started-duration30.json": document(
        "16", started_freeze("465D3B0F-D7F2-4239-AC11-1B9800E73DBC", "spot-node-34525998-vmss_6", 30)
    ),
    "08-freeze-scheduled-short-notice.json": document(
        "279", event("xxx-xxx-xxx-xxx-xxx", "Freeze", "xxxx", not_before=at(2019, 9, 26, 15, 15, 21))
    ),
    "09-reboot-user-2018-old-api.json": document(
        "1",
        event(
            "8A506C35-679A-4F78-9D76-C16DBE65EE6F",
            "Reboot",
            "aks-nodepool1-34166363-1",
            not_before=at(2018, 11, 26, 10, 52, 34),
        ),
    ),
    "11-freeze-started-no-duration.json": document(
        "208", started_freeze("D3D9DFEC-1DCA-4B49-97AA-780E02F45DFE", "aks-nodepool1-21922338-vmss_47", None)
    ),
    "12-reboot-user-no-duration.json": document(
        "213",
        event(
            "FA298C74-AE95-4154-8EBF-303EED382DB6",
            "Reboot",
            "aks-nodepool1-21922338-vmss_39",
            source="User",
            not_before=at(2021, 3, 30, 13, 39, 24),
            description=RESTART,
        ),
    ),
    "13-redeploy-user-scheduled.json": document(
        "1",
        event(
            "A9A902A0-B0EA-4E7C-B970-E734ECF66A35",
            "Redeploy",
            "win-scheve-eus",
            source="User",
            not_before=at(2024, 2, 21, 3, 8, 47),
            description=REDEPLOY,
        ),
    ),
    "15-preempt-spot-vm.json": document(
        "1",
        event(
            "C1BF8322-4CBF-4FC4-9C45-B40CF3106D0E",
            "Preempt",
            "vm-spot",
            source="Platform",
            not_before=at(2022, 8, 9, 17, 7, 32),
        ),
    ),
    "16-preempt-aks-vmss.json": document(
        "1",
        event(
            "51941B56-8080-45AC-81AE-8BDA818F5958",
            "Preempt",
            "aks-workloads1-15413341-vmss_3",
            source="Platform",
            not_before=at(2024, 3, 16, 19, 52, 9),
        ),
    ),
    "17-preempt-docs-simulate-eviction.json": document(
        "1",
        event(
            "A123BC45-1234-5678-AB90-ABCDEF123456",
            "Preempt",
            "myspotvm",
            source="Platform",
            not_before=at(2021, 3, 16, 0, 58, 46),
        ),
    ),
    # No NotBefore at all: it may start at any moment.
    "18-terminate-aks-partial.json": document(
        "1", event("C37355DB-2C23-4195-90CA-1A712A85650C", "Terminate", "aks-tompool-39923754-vmss_?")
    ),
    "19-reboot-vmss-2019.json": document(
        "1",
        event(
            "F3E6E2D2-E86A-47F0-AA8E-18918049A2B1",
            "Reboot",
            "controlplane_0",
            not_before=at(2019, 6, 30, 16, 22, 3),
        ),
    ),
    "20-batch-empty-bom.json": document("1"),
    "21-batch-underscore-name-bom.json": batch_reboot(BATCH_1),
    "22-batch-two-resources-bom.json": batch_reboot(BATCH_1, BATCH_2),
    # The second event has no Resources: which VMs it affects is unknown.
    "24-reboot-non-vnet-2018-partial.json": document(
        "192",
        event(
            "28512AF7-C957-4500-9BC4-842D6FB531E4",
            "Reboot",
            "sample_4",
            not_before=at(2018, 1, 24, 21, 20, 44),
        ),
        event("A626E37F-793E-44E1-89B5-99AE0B96044C", "Reboot"),
    ),
    "26-live-migration-underscore-mechanic.json": document(
        "2",
        event(
            "73578921-FFE4-4A5B-95C7-FEB9BBBB3B09",
            "Freeze",
            "_test-vmss_1",
            source="Platform",
            not_before=at(2022, 4, 11, 22, 26, 58),
            seconds=5,
            description=LIVE_MIGRATION,
        ),
    ),
    "27-docs-flow-1-empty.json": document("1"),
    "28-docs-flow-2-freeze-scheduled.json": docs_freeze(at(2022, 4, 11, 22, 26, 58)),
    "29-docs-flow-3-freeze-started.json": docs_freeze(None, status="Started"),
    "30-docs-flow-4-empty.json": document("4"),
    "31-docs-2026-freeze-wrong-weekday.json": docs_freeze(at(2026, 4, 11, 22, 26, 58)),
    "32-docs-2026-overview-freeze.json": docs_freeze(at(2026, 4, 20, 22, 26, 58)),
    "33-docs-seed000-freeze-duration-minus1.json": docs_freeze(at(2022, 4, 11, 22, 26, 58), seconds=None),
    "35-docs-template-all-fields.json": document(
        "5",
        event(
            "602d9444-d2cd-49c7-8624-8643e7171297",
            "Reboot",
            *ROLES,
            source="Platform",
            not_before=at(2016, 9, 19, 18, 29, 47),
            seconds=9,
            description=MAINTENANCE,
        ),
    ),
    "38-nomad-incarnation-zero.json": document("0"),
    "39-webdevops-example.json": document(
        "5",
        event("102d9444-d2cd-49c7-8624-8643e7171291", "Reboot", not_before=at(2019, 9, 19, 18, 29, 47)),
        event("202d9444-d2cd-49c7-8624-8643e7171291", "Reboot", "Foobar", not_before=at(2019, 9, 19, 18, 29, 47)),
        event("302d9444-d2cd-49c7-8624-8643e7171291", "Reboot", *ROLES, not_before=at(2019, 9, 19, 18, 29, 47)),
        event("402d9444-d2cd-49c7-8624-8643e7171292", "Reboot", *ROLES, not_before=at(2018, 7, 1, 19, 31, 29)),
        event("502d9444-d2cd-49c7-8624-8643e7171293", "Reboot", *ROLES, not_before=at(2018, 12, 19, 18, 29, 47)),
        event("602d9444-d2cd-49c7-8624-8643e7171293", "Reboot", *ROLES, status="Started"),
    ),
    "40-maksim-paskal-testdata.json": document(
        "1",
        event(
            "602d9444-d2cd-49c7-8624-8643e7171297",
            "Reboot",
            "FrontEnd_IN_0",
            "aks-spotcpu2d2as-24469130-vmss_1",
            source="Platform",
            not_before=at(2016, 9, 19, 18, 29, 47),
            description="Host server is undergoing maintenance",
        ),
    ),
    # An unreadable NotBefore: it may start at any moment.
    "41-giantswarm-string-incarnation.json": document("abc123", event("123", "Terminate", "nodename")),
    "42-mockserver-live-migration-scheduled.json": document(
        "2",
        event(
            "8d4d9f0e-5a0c-4b5b-9f25-3c1f3f6a0d11",
            "Freeze",
            "vmss_vm1",
            source="Platform",
            not_before=at(2026, 1, 5, 12, 15),
            seconds=5,
            description=LIVE_MIGRATION,
        ),
    ),
    "43-mockserver-host-maintenance-started.json": document(
        "3", started_freeze("0b7c2a55-30a9-4a4f-8df5-5a3f4f6f6a27", "vmss_vm1", 9)
    ),
    "44-mockserver-platform-redeploy.json": document(
        "2",
        event(
            "5f0d6c1e-6d53-4b8f-b8a5-1e2d3c4b5a69",
            "Redeploy",
            "vmss_vm1",
            source="Platform",
            not_before=at(2026, 1, 5, 12, 15),
            description="Virtual machine has encountered a failure.",
        ),
    ),
    "45-brynsp-overview-iso.json": document(
        "1",
        event(
            "A123BC45-1234-5678-AB90-ABCDEF123456",
            "Reboot",
            "vm1",
            "vm2",
            source="Platform",
            not_before=at(2024, 1, 15, 10, 0),
            description="The virtual machine is being rebooted due to planned maintenance.",
        ),
    ),
    # Neither id nor status: such events can be followed, and never approved.
    "46-minimal-events-only.json": document(
        "",
        event("", "Freeze", status="", resource_type=""),
        event("", "Terminate", status="", resource_type=""),
    ),
}

BARE_EVENTS: dict[str, ScheduledEvent] = {
    "07-freeze-started-duration30-bare-event.json": started_freeze(
        "B2BC520E-BDA2-44A0-BF75-0C320524BB47", "aks-testspot-38041100-vmss_25", 30
    ),
    "10-reboot-user-scylla-bare-event.json": event(
        "CA9C0DC4-E841-476D-94D5-9FC2FF983BCD",
        "Reboot",
        "longevity-10gb-3h-master-db-node-eastus-2",
        source="User",
        not_before=at(2023, 3, 16, 14, 1, 28),
        description=RESTART,
    ),
    "14-reboot-user-forsen-bare-event.json": event(
        "279D65BA-4C08-4BAD-9209-255F97338C32",
        "Reboot",
        "forsen",
        source="User",
        not_before=at(2024, 6, 19, 15, 26, 51),
        description=RESTART,
    ),
    "25-redeploy-underscore-2017-bare-event.json": event(
        "762D06A2-8289-469B-AB27-4D26C9C745B3",
        "Redeploy",
        "_mysrv",
        not_before=at(2017, 4, 17, 18, 40, 6),
    ),
    "34-docs-maintenance-iso8601-bare-event.json": event(
        "", "Freeze", "myVM", not_before=at(2026, 4, 29, 18, 0), resource_type="VirtualMachine"
    ),
}

NOT_A_DOCUMENT = 'expected an object with a list "Events"; got '
# How each message begins; it goes on with more of the text.
ERRORS: dict[str, str] = {
    "23-batch-two-events-trailing-comma-bom.invalid.json": (
        "not JSON (JSON is malformed: trailing comma in array (byte 320)): "
        '{ "DocumentIncarnation": 1, "Events": [ { "EventId": "1180B703-3D47-412E-B813-D2'
    ),
    "36-eventgrid-sample.json": NOT_A_DOCUMENT
    + '{ "id": "3da1b9aa-5204-4335-8c33-c54e315dcffe", "topic": "/subscriptions/{subscr',
    "37-arn-eventgrid-reboot-started.json": NOT_A_DOCUMENT
    + '[ { "id": "3664cb2f-d24a-4db8-8e6c-0393b4253929", "topic": "/subscriptions/b6989',
    "47-imds-400-bad-api-version.json": NOT_A_DOCUMENT
    + '{ "error": "Bad request. api-version is invalid or was not specified in the requ',
    "48-imds-400-missing-metadata-header.json": NOT_A_DOCUMENT
    + '{ "error": "Bad request. Required metadata header not specified" }',
    "49-empty-body-200.txt": "not JSON (Input data was truncated): nothing",
    "50-request-approve-single.json": NOT_A_DOCUMENT
    + '{ "StartRequests": [ { "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5" } ] }',
    "51-request-approve-2017-03-01.json": NOT_A_DOCUMENT
    + '{ "DocumentIncarnation": "5", "StartRequests": [ { "EventId": "f020ba2e-3bc0-4c4',
    "52-npd-condition-messages.json": NOT_A_DOCUMENT
    + '[ "Reboot Scheduled: Fri, 06 Dec 2024 18:09:55 GMT. DurationInSeconds: -1.", "Pr',
}


def read(name: str) -> bytes:
    return (PAYLOADS / name).read_bytes()


def test_every_payload_has_exactly_one_row_here_and_one_in_the_index() -> None:
    files = sorted(path.name for path in PAYLOADS.iterdir() if path.name != "INDEX.md")

    assert sorted([*DOCUMENTS, *BARE_EVENTS, *ERRORS]) == files
    index = (PAYLOADS / "INDEX.md").read_text(encoding="utf-8")
    assert [name for name in files if f"| {name} |" not in index] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_read_as_expected(name: str) -> None:
    assert parse_document(read(name)) == DOCUMENTS[name]


@pytest.mark.parametrize("name", BARE_EVENTS)
def test_a_bare_event_is_read_as_expected(name: str) -> None:
    assert parse_event(read(name)) == BARE_EVENTS[name]


@pytest.mark.parametrize("name", BARE_EVENTS)
def test_a_bare_event_is_not_accepted_as_a_document(name: str) -> None:
    with pytest.raises(DocumentError, match=r'^expected an object with a list "Events"; got '):
        parse_document(read(name))


@pytest.mark.parametrize("name", ERRORS)
def test_an_invalid_document_is_an_error_and_never_read_as_no_events(name: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(read(name))

    assert str(caught.value).startswith(ERRORS[name])
    assert len(str(caught.value)) < 300
    assert caught.value.kind == "document"
