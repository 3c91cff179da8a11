"""Documents of Azure: every quirk of their text."""

import json
import re
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduled_events_agent.imds.compare import Gone, Missing, Seen, compare
from scheduled_events_agent.imds.document import (
    Affects,
    Document,
    ScheduledEvent,
    parse_document,
    parse_event,
    to_azure_json,
)
from scheduled_events_agent.imds.text import DocumentError

FULL: dict[str, Any] = {
    "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    "EventStatus": "Scheduled",
    "EventType": "Freeze",
    "ResourceType": "VirtualMachine",
    "Resources": ["vm_1"],
    "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
    "Description": "maintenance",
    "EventSource": "Platform",
    "DurationInSeconds": 5,
}
HIDDEN = ("\u200b", "\u200d", "\ufeff", "\u00ad", "\u202e", "\x00", "\x1b", "\U000e0041")
NOON = datetime(2026, 4, 29, 12, 0, tzinfo=UTC)


def body(*events: object, incarnation: object = 1) -> bytes:
    return json.dumps({"DocumentIncarnation": incarnation, "Events": list(events)}).encode()


def parse(**changes: object) -> ScheduledEvent:
    """The full event with some keys changed; a key set to ... is left out."""
    fields = {key: value for key, value in {**FULL, **changes}.items() if value is not ...}
    (event,) = parse_document(body(fields)).events
    return event


def make_event(event_id: str = "A", **changes: Any) -> ScheduledEvent:
    fields: dict[str, Any] = {"type": "Freeze", "status": "Scheduled", "resources": ("vm",), **changes}
    return ScheduledEvent(id=event_id, **fields)


def make_document(*events: ScheduledEvent) -> Document:
    return Document(incarnation="1", events=events)


def message_of(text: bytes) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    return str(caught.value)


# --- times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Wed, 29 Apr 2026 12:00:00 GMT", NOON),
        ("Mon, 29 Apr 2026 12:00:00 GMT", NOON),  # the weekday is wrong
        ("29 Apr 2026 12:00:00 GMT", NOON),
        ("Wed, 29 Apr 2026 14:00:00 +0200", NOON),
        ("Wed, 29 Apr 2026 12:00:00", NOON),
        ("  Wed, 29 Apr 2026 12:00:00 GMT ", NOON),
        ("2026-04-29T12:00:00Z", NOON),
        ("2026-04-29T12:00:00.0000000Z", NOON),
        ("2026-04-29T14:00:00+02:00", NOON),
        ("2026-04-29T12:00:00", NOON),
        ("2026-04-29T12:00", NOON),
        ("2026-04-29 12:00:00Z", NOON),
        ("Thu, 29 Feb 2024 00:00:00 GMT", datetime(2024, 2, 29, tzinfo=UTC)),
        ("2024-02-29T00:00:00Z", datetime(2024, 2, 29, tzinfo=UTC)),
        ("Sun, 29 Feb 2026 00:00:00 GMT", None),  # no leap year
        ("2026-02-29T00:00:00Z", None),
        ("Sat, 31 Dec 2016 23:59:60 GMT", None),  # a leap second
        ("2016-12-31T23:59:60Z", None),
        ("9999-12-31T23:59:59-12:00", None),  # overflows in UTC
        ("0001-01-01T00:00:00+14:00", None),
        ("Fri, 99 Zzz 2026 12:00:00 GMT", None),
        ("Wed, 29 Apr 99999999999999999999 12:00:00 GMT", None),
        ("Wed, 9 Apr 2026 12:00:00 gmt", datetime(2026, 4, 9, 12, 0, tzinfo=UTC)),
        ("Wed, 29 Apr 2026 12:00:00 UTC", NOON),
        ("Wed, 29 Apr 2026 09:30:00 -0230", NOON),
        ("2026-04-29T14:00:00+0200", NOON),
        ("2026-04-29T12:00:00.5Z", NOON.replace(microsecond=500_000)),
        # Of these a part would read as a time, and the rest may mean another one.
        ("Wed, 29 Apr 2026 12:00:00 GMT+01:00", None),
        ("Wed, 29 Apr 2026 12:00:00 GMT-1", None),
        ("Wed, 29 Apr 2026 10:00:00 PM GMT", None),
        ("Wed, 29 Apr 2026 10:00:00 GMT PM", None),
        ("Wed, 29 Apr 2026 10:00 PM", None),
        ("Wed, 29 Apr 2026 12:00:00 CET", None),
        ("Wed, 29 Apr 2026 12:00:00 Z", None),
        ("Wed, 29 Apr 2026 12:00:00 +2", None),
        ("Wed, 29 Apr 2026 12:00:00 +0275", None),
        ("Wed, 29 Apr 2026 12:00 GMT", None),
        ("Wed, 29 Apr 26 12:00:00 GMT", None),
        ("Wednesday, 29-Apr-26 12:00:00 GMT", None),
        ("Wed Apr 29 12:00:00 2026", None),
        ("Wed, 29 Apr 2026 12:00:00 GMT (or later)", None),
        ("Wed, 29 Apr 2026 12:00:00\u200b GMT", None),
        ("Wed, 29 Apr 2026 12:00:0\u0663 GMT", None),
        ("Mi, 29 Apr 2026 12:00:00 GMT", None),
        ("2026-04-29T12:00:00 GMT", None),
        ("2026-04-29T10:00:00 PM", None),
        ("2026-04-29x12:00:00Z", None),
        ("2026-04-29T12", None),
        ("2026-04-29T24:00:00Z", None),
        ("2026-04-29", None),
        ("2026-W18-3T12:00:00Z", None),
        ("04/29/2026 12:00:00", None),
        ("20170702", None),
        ("soon", None),
        ("", None),
        ("   ", None),
        (None, None),
        (..., None),
        (0, None),
        (1777464000, None),
        (True, None),
        ([], None),
        ({"at": "2026-04-29T12:00:00Z"}, None),
    ],
)
def test_not_before_is_read_in_both_forms_and_means_now_when_it_cannot_be_read(
    text: object, expected: datetime | None
) -> None:
    assert parse(NotBefore=text).not_before == expected


# --- durations, words, texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0.0),
        (5, 5.0),
        (6.5, 6.5),
        ("9", 9.0),
        (-1, None),
        (-1.0, None),
        ("-1", None),
        ("", None),
        ("unknown", None),
        ("5 minutes", None),
        ("0_9", None),
        ("0x9", None),
        ("\u0669", None),
        (" 9.5 ", 9.5),
        ("inf", None),
        ("nan", None),
        (None, None),
        (..., None),
        (True, None),
        ([5], None),
        (10**400, None),
        (31_536_000, 31_536_000.0),
        (31_536_001, None),
        (1e308, None),
    ],
)
def test_a_duration_that_is_no_number_of_seconds_is_unknown(value: object, expected: float | None) -> None:
    assert parse(DurationInSeconds=value).duration_seconds == expected


@pytest.mark.parametrize("word", ["Freeze", "freeze", "FREEZE", " Freeze "])
def test_known_values_match_in_any_case(word: str) -> None:
    assert parse(EventType=word).type == "Freeze"


def test_unknown_values_and_unknown_keys_pass() -> None:
    event = parse(EventType="Hibernate", EventStatus="Paused", EventSource="Robot", Extra={"a": [1]})

    assert (event.type, event.status, event.source) == ("Hibernate", "Paused", "Robot")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_word_with_a_hidden_character_is_not_the_known_one(hidden: str) -> None:
    event = parse(EventType=f"Free{hidden}ze", EventStatus=f"Scheduled{hidden}", EventSource=f"{hidden}User")

    assert (event.type, event.status, event.source) == ("Free\ufffdze", "Scheduled\ufffd", "\ufffdUser")
    assert [e.status for e in parse_document(body({**FULL, "EventStatus": f"Completed{hidden}"})).events] != []


@pytest.mark.parametrize("nothing", [None, ..., "", "  ", [], {}, {"a": 1}])
def test_a_field_without_a_value_is_empty(nothing: object) -> None:
    names = ("EventStatus", "EventType", "ResourceType", "Resources", "Description", "EventSource")

    assert parse(**dict.fromkeys(names, nothing)) == ScheduledEvent(
        id=FULL["EventId"],
        type="",
        status="",
        resources=("",) if isinstance(nothing, str) else (),
        not_before=datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC),
        duration_seconds=5.0,
    )


def test_texts_are_one_printable_line_of_bounded_length() -> None:
    event = parse(Description=" one\r\ntwo\x1b[31m\u2028three\u200b\x00", Resources=["vm\n1", "v" * 5000, 7])

    assert event.description == "one  two [31m three"
    assert event.resources == ("vm\ufffd1", "v" * 4095 + "\ufffd", "7")


def test_a_single_resource_may_come_without_a_list() -> None:
    assert parse(Resources="vm_1").resources == ("vm_1",)
    assert parse(Resources="vm_1 vm_2").resources == ("vm_1 vm_2",)  # nothing says that it is two names


# --- api-versions --------------------------------------------------------------------------------------------

LACKS = {
    "2020-07-01": (),
    "2019-08-01": ("DurationInSeconds",),
    "2019-04-01": ("DurationInSeconds", "EventSource"),
    "2019-01-01": ("DurationInSeconds", "EventSource", "Description"),
    "2017-11-01": ("DurationInSeconds", "EventSource", "Description"),
    "2017-08-01": ("DurationInSeconds", "EventSource", "Description"),
    "2017-03-01": ("DurationInSeconds", "EventSource", "Description"),
}


@pytest.mark.parametrize("version", LACKS)
def test_every_api_version_is_read_and_missing_fields_are_unknown(version: str) -> None:
    lacks = LACKS[version]
    name = "_vm_1" if version == "2017-03-01" else "vm_1"

    event = parse(Resources=[name], **dict.fromkeys(lacks, ...))

    assert event.duration_seconds == (None if "DurationInSeconds" in lacks else 5.0)
    assert event.source == ("" if "EventSource" in lacks else "Platform")
    assert event.description == ("" if "Description" in lacks else "maintenance")
    assert event.affects(["vm_1"]) == "self"


# --- who is affected -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "names", "expected"),
    [
        (["vm_1"], ["vm_1"], "self"),
        (["vm_10"], ["vm_1"], "others"),
        (["vm_1"], ["vm_10"], "others"),
        (["my-vm_1"], ["vm_1"], "others"),
        (["VM_1"], ["vm_1"], "self"),
        (["_vm_1"], ["vm_1"], "self"),
        (["vm_1"], ["_vm_1"], "self"),
        (["__vm_1"], ["vm_1"], "others"),
        (["vm_1_"], ["vm_1"], "others"),
        (["issue_0"], ["issue000000"], "others"),  # a host name is not the VM's name
        (["issue_0"], ["issue000000", "issue_0"], "self"),  # unless both were given
        (["vm1"], ["vm1.internal.cloudapp.net"], "others"),
        (["vmss_abcd1234"], ["vmss_ABCD1234"], "self"),
        (["FrontEnd_IN_0", "BackEnd_IN_0"], ["frontend_in_0"], "shared"),
        (["a", "b"], ["a", "b"], "self"),
        (["a", "b"], ["c"], "others"),
        ([], ["vm"], "unknown"),
        (["vm"], [], "unknown"),
        (["vm"], [""], "unknown"),
        (["", "_"], ["", "_"], "unknown"),
        ([""], ["vm"], "others"),
    ],
)
def test_whole_names_decide_whom_an_event_affects(
    resources: list[str], names: list[str], expected: Affects
) -> None:
    assert parse(Resources=resources).affects(names) == expected


@pytest.mark.parametrize("hidden", [*HIDDEN, "\u00a0", "\n", " ", "\ufe0f"])
def test_a_name_with_a_character_more_is_another_name(hidden: str) -> None:
    for name in (f"vm_1{hidden}", f"{hidden}vm_1", f"vm{hidden}_1"):
        event = parse(Resources=[name])

        assert (event.affects(["vm_1"]), event.position(["vm_1"])) == ("others", None)
        assert all(resource.isprintable() for resource in event.resources)
        assert parse(Resources=[name, "vm_1"]).affects(["vm_1"]) == "shared"
        assert parse(Resources=[name]).affects(event.resources) == "self"


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (["vm_1", "vm_2"], 0),
        (["_VM_1", "vm_2"], 0),
        (["vm_10", "vm_1"], 1),
        (["", "vm_1"], 1),
        (["vm_10"], None),
        ([], None),
    ],
)
def test_resources_match_the_whole_name(resources: list[str], expected: int | None) -> None:
    assert parse(Resources=resources).position(["vm_1", ""]) == expected


# --- ids -----------------------------------------------------------------------------------------------------


def test_ids_are_compared_without_case_and_kept_as_received() -> None:
    event = parse(EventId="AbC-1")

    assert (event.id, event.key) == ("AbC-1", "abc-1")


@pytest.mark.parametrize(
    "received",
    [" a", "a ", "a\n", "a\x00b", "a\u202eb", "\x1b[31ma", "x" * 129, "x" * 4096, "a~0123456789ab"],
)
def test_an_id_with_unprintable_characters_is_kept_and_shown_with_a_mark(received: str) -> None:
    event = parse(EventId=received)

    assert (event.approval_id, event.approval_error) == (received, "")
    assert re.fullmatch(r"[ -~]{1,115}~[0-9a-f]{12}", event.id)
    assert (event.received_id, event.key) == (received, event.id)


def test_ids_that_differ_only_in_hidden_characters_are_two_events() -> None:
    ids = ["a", " a", "a\n", "a\r", "x" * 200, "x" * 200 + "y", "x" * 5000, "x" * 5000 + "y"]

    events = parse_document(body(*[{**FULL, "EventId": event_id} for event_id in ids])).events

    assert len(events) == len(ids)
    assert [event.approval_id for event in events] == [*ids[:-2], "", ""]
    assert parse(EventId="A\n").key == parse(EventId="a\n").key


@pytest.mark.parametrize(
    ("received", "shown", "fault"),
    [
        ("x" * 4097, "x" * 115, "its id cannot be sent back exactly (it is longer than 4096 characters)"),
        (7, "7", "its id cannot be sent back exactly (it is not a text)"),
        (True, "True", "its id cannot be sent back exactly (it is not a text)"),
        (["a"], "", "it has no id to approve"),
        (" \n", "", "it has no id to approve"),
    ],
)
def test_an_id_that_cannot_be_kept_exactly_is_not_sent_back(received: object, shown: str, fault: str) -> None:
    event = parse(EventId=received)

    assert event.id.partition("~")[0] == shown
    assert (event.approval_id, event.approval_error) == ("", fault)


def test_one_id_listed_twice_is_one_event_with_the_resources_of_both() -> None:
    document = parse_document(
        body(
            {**FULL, "EventId": "a", "Resources": ["vm_1"]},
            {**FULL, "EventId": "A", "Resources": ["vm_2", "vm_1"]},
        )
    )

    (event,) = document.events
    assert (event.id, event.resources, event.is_ambiguous) == ("a", ("vm_1", "vm_2"), False)
    assert event.affects(["vm_1"]) == "shared"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"EventType": "Redeploy"}, {"type": "Redeploy"}),
        ({"EventStatus": "Started", "NotBefore": ""}, {"status": "Scheduled", "not_before": None}),
        ({"EventStatus": "Completed"}, {"status": "Scheduled"}),
        ({"EventSource": "User"}, {"type": "Freeze"}),
        ({"NotBefore": "2022-04-11T22:20:00Z"}, {"not_before": datetime(2022, 4, 11, 22, 20, tzinfo=UTC)}),
        ({"NotBefore": "2022-04-12T00:00:00Z"}, {"not_before": datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)}),
        ({"NotBefore": ""}, {"not_before": None}),
        ({"DurationInSeconds": 600}, {"duration_seconds": 600.0}),
        ({"Description": "live migration"}, {"type": "Freeze"}),
    ],
)
def test_twins_that_contradict_are_prepared_for_by_the_earliest_and_marked(
    change: dict[str, Any], expected: dict[str, Any]
) -> None:
    twins = [{**FULL, "Resources": ["vm_1"]}, {**FULL, "Resources": ["vm_2"], **change}]

    merged = [parse_document(body(*order)).events for order in (twins, twins[::-1])]

    ((event,), (turned,)) = merged
    assert event.is_ambiguous
    assert {name: getattr(event, name) for name in expected} == expected
    assert set(event.resources) == {"vm_1", "vm_2"}
    assert msgspec.structs.replace(turned, resources=event.resources) == event


def test_an_id_that_is_both_a_text_and_a_number_is_ambiguous() -> None:
    (event,) = parse_document(body({**FULL, "EventId": "7"}, {**FULL, "EventId": 7})).events

    assert event.is_ambiguous


def test_events_without_an_id_are_distinguished_by_type_and_resources() -> None:
    first, second = parse_document(
        body({"EventType": "Freeze"}, {"EventType": "Reboot", "Resources": ["b"]})
    ).events

    assert (first.key, second.key) == ("no-id-freeze", "no-id-reboot-b")


def test_events_without_an_id_and_with_equal_keys_share_one_key() -> None:
    document = parse_document(
        body(
            {"EventType": "Freeze", "Resources": ["a-b"]},
            {"EventType": "Freeze", "Resources": ["a", "b"]},
            {"EventType": "Freeze", "Resources": ["a-b-a-b"]},
        )
    )

    assert [event.key for event in document.events] == ["no-id-freeze-a-b", "no-id-freeze-a-b-a-b"]


@pytest.mark.parametrize("status", ["Completed", "Canceled", "completed"])
def test_an_event_that_says_it_is_over_is_as_good_as_gone(status: str) -> None:
    assert parse_document(body({**FULL, "EventStatus": status})).events == ()


# --- documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (7, "7"), ("7", "7"), ("abc", "abc"), (None, ""), (10**30, "1" + "0" * 30)]
)
def test_the_incarnation_is_kept_as_text_whatever_it_is(value: object, expected: str) -> None:
    assert parse_document(body(incarnation=value)).incarnation == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON (Input data was truncated): nothing"),
        (b"{}", 'expected an object with a list "Events"; got {}'),
        (b"null", 'expected an object with a list "Events"; got null'),
        (b'{"Events": null}', 'expected an object with a list "Events"; got {"Events": null}'),
        (b'{"Events": {}}', 'expected an object with a list "Events"; got {"Events": {}}'),
        (b'{"Events": [null]}', "Events[0]: expected an object; got null"),
        (b'{"Events": [{}, "x"]}', "Events[1]: expected an object; got 'x'"),
        (b'{"Events": [[{}]]}', "Events[0]: expected an object; got a list"),
    ],
)
def test_an_incomplete_document_is_an_error_and_never_read_as_no_events(text: bytes, message: str) -> None:
    assert message_of(text) == message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"Events":[{"EventId":"a"}],"Events":[]}', "Events"),
        (b'{"Events":[{"EventId":"a","EventId":"b"}]}', "EventId"),
        (b'{"Events":[{"EventId":"a","x":{"y":[{"z":1,"\\u007a":1}]}}]}', "z"),
        (b'{"DocumentIncarnation":1,"DocumentIncarnation":1,"Events":[]}', "DocumentIncarnation"),
    ],
)
def test_a_document_with_a_duplicate_key_is_rejected(text: bytes, key: str) -> None:
    assert message_of(text) == f"an object has the key '{key}' twice"


def test_a_document_of_very_many_events_or_values_is_an_error_of_its_own_kind() -> None:
    assert len(parse_document(body(*[{"EventId": str(number)} for number in range(2000)])).events) == 2000
    for text in (body(*[{}] * 2001), b"[" * 400_000, body(*[{**FULL, "Resources": ["a"] * 200}] * 2000)):
        with pytest.raises(DocumentError) as caught:
            parse_document(text)
        assert (caught.value.kind, len(str(caught.value)) < 400) == ("too_many", True)


def test_a_large_document_takes_little_memory_as_its_events_share_their_names() -> None:
    names = [f"production-web_{number:06}" for number in range(100)]
    text = body(*[{**FULL, "EventId": str(number), "Resources": names} for number in range(1000)])
    parse_document(text)  # so that what is made once is there
    tracemalloc.start()
    try:
        document = parse_document(text)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [event.resources for event in document.events] == [tuple(names)] * 1000
    assert kept < 3_000_000, kept
    assert peak < 7_000_000, peak


@pytest.mark.parametrize(
    "text",
    [
        body(FULL)[:-1],
        body(FULL) + b"x",
        b"<html>502 Bad Gateway</html>",
        b"\xff\xfe{\x00}\x00",
        b'{"Events": [], "Description": "\\ud800"}',
        b'{"Events": [], "Description": "\xed\xa0\x80"}',
        b'{"Events": [], "n": 1e999}',
        b'{"Events": [], "n": ' + b"9" * 5000 + b"}",
        b'{"Events": [], "n": NaN}',
        b'{"Events": [], "n": -Infinity}',
        b"[" * 100_000,
        b'{"Events":' * 100_000,
    ],
    ids=[
        "cut",
        "longer",
        "html",
        "utf-16",
        "surrogate",
        "raw-surrogate",
        "1e999",
        "digits",
        "nan",
        "infinity",
        "deep",
        "deep-object",
    ],
)
def test_a_broken_text_is_a_document_error(text: bytes) -> None:
    assert message_of(text).startswith("not JSON (")


@pytest.mark.parametrize("depth", [1, 100, 500, 900, 980, 2000])
def test_values_nested_deep_are_empty_or_an_error(depth: int) -> None:
    text = b'{"Events":[{"EventId":"a","Description":' + b"[" * depth + b"]" * depth + b"}]}"
    try:
        (event,) = parse_document(text).events
    except DocumentError:
        return
    assert event.description == ""


def test_an_excerpt_in_a_message_is_one_short_line() -> None:
    assert message_of(b'\xef\xbb\xbf{\r\n  "error": "' + b"x" * 500 + b'"\r\n}') == (
        'expected an object with a list "Events"; got { "error": "' + "x" * 202 + "..."
    )


# --- one event alone -----------------------------------------------------------------------------------------


def test_a_bare_event_needs_a_type() -> None:
    with pytest.raises(DocumentError) as caught:
        parse_event(b'{"Events": []}')

    assert str(caught.value) == 'expected an object with "EventType"; got {"Events": []}'


def test_the_event_is_written_in_azures_names() -> None:
    event = make_event(
        source="Platform", not_before=NOON, duration_seconds=5.0, description="d", resource_type="VM"
    )

    assert json.loads(to_azure_json(event)) == {
        "EventId": "A",
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VM",
        "Resources": ["vm"],
        "NotBefore": "2026-04-29T12:00:00Z",
        "Description": "d",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }
    assert b'"DurationInSeconds":5}' in to_azure_json(event)


# --- what changed --------------------------------------------------------------------------------------------


def test_a_new_event_is_seen() -> None:
    assert compare({}, make_document(make_event())) == [Seen(make_event())]


def test_an_unchanged_event_is_no_change() -> None:
    assert compare({"a": make_event()}, make_document(make_event())) == []


@pytest.mark.parametrize(
    "change",
    [
        {"status": "Started"},
        {"type": "Reboot"},
        {"not_before": NOON},
        {"resources": ("vm", "other")},
        {"duration_seconds": 9.0},
        {"description": "new"},
    ],
)
def test_any_change_of_an_event_is_seen(change: dict[str, Any]) -> None:
    changed = make_event(**change)

    assert compare({"a": make_event()}, make_document(changed)) == [Seen(changed)]


def test_an_event_is_gone_when_a_second_answer_lacks_it() -> None:
    known, document = {"a": make_event(), "b": make_event("B")}, make_document(make_event("B"))
    assert compare(known, document) == [Missing("a")]
    assert compare(known, document, {"a": False}) == []
    assert compare(known, document, {"a": True}) == [Gone("a")]


def test_an_event_that_was_missing_is_seen_again() -> None:
    assert compare({"a": make_event()}, make_document(make_event()), {"a": True}) == [Seen(make_event())]


def test_an_event_that_is_listed_as_over_is_gone_at_once() -> None:
    text = json.dumps({"Events": [{"EventId": "A", "EventType": "Freeze", "EventStatus": "Completed"}]})
    assert compare({"a": make_event()}, parse_document(text.encode())) == [Gone("a", "Completed")]


@pytest.mark.parametrize("is_due", [False, True])
def test_an_event_may_get_its_new_id_while_it_is_missing(is_due: bool) -> None:
    started = make_event("B", status="Started")
    assert compare({"a": make_event("A")}, make_document(started), {"a": is_due}) == [Seen(started, "a")]


def test_an_id_that_comes_back_in_another_case_is_the_same_event() -> None:
    assert compare({"a": make_event("A")}, make_document(make_event("a"))) == [Seen(make_event("a"))]


def test_an_event_that_starts_under_a_new_id_is_the_old_one_renamed() -> None:
    started = make_event("B", status="Started")

    assert compare({"a": make_event("A")}, make_document(started)) == [Seen(started, renamed_from="a")]


@pytest.mark.parametrize(
    "change",
    [
        {"status": "Scheduled"},
        {"type": "Reboot"},
        {"source": "User"},
        {"resources": ("other",)},
        {"description": "other"},
    ],
)
def test_an_event_that_differs_does_not_match_a_missing_one(change: dict[str, Any]) -> None:
    new = make_event("B", **{"status": "Started", **change})

    assert compare({"a": make_event("A")}, make_document(new)) == [Seen(new), Missing("a")]


def test_an_event_that_gets_a_new_id_after_its_start_is_the_same_one() -> None:
    started = make_event("B", status="Started")

    known = {"a": make_event("A", status="Started")}
    assert compare(known, make_document(started)) == [Seen(started, renamed_from="a")]


def test_a_rename_prefers_the_scheduled_twin() -> None:
    known = {"a": make_event("A", status="Started"), "b": make_event("B"), "c": make_event("C", status="Started")}
    started = make_event("D", status="Started")

    assert compare(known, make_document(started)) == [Seen(started, renamed_from="b"), Missing("a"), Missing("c")]


def test_an_event_still_in_the_document_is_not_renamed() -> None:
    started = make_event("B", status="Started")

    assert compare({"a": make_event("A")}, make_document(make_event("A"), started)) == [Seen(started)]


def test_two_events_that_start_under_new_ids_match_one_old_id_each() -> None:
    known = {"a": make_event("A"), "b": make_event("B")}
    first, second = make_event("C", status="Started"), make_event("D", status="Started")

    assert compare(known, make_document(first, second)) == [Seen(first, "a"), Seen(second, "b")]


# --- whatever comes ------------------------------------------------------------------------------------------

FIELD_NAMES = st.sampled_from([*FULL, "Extra"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text() | FIELD_NAMES, children),
    max_leaves=15,
)
TEXTS = st.text() | st.sampled_from(
    ["Freeze", "Started", "Completed", "User", "vm_1", "a", "A", "no-id-freeze", "Mon, 11 Apr 2022 22:26:58 GMT"]
)
EVENTS = st.dictionaries(FIELD_NAMES, JSON | TEXTS | st.lists(TEXTS, max_size=3))
DOCUMENTS = st.fixed_dictionaries({"Events": st.lists(EVENTS, max_size=4)}, optional={"DocumentIncarnation": JSON})


def check(text: bytes) -> None:
    try:
        document = parse_document(text)
    except DocumentError as error:
        assert str(error).isprintable()  # noqa: PT017 - either outcome is right
        return
    keys = [event.key for event in document.events]
    assert len(keys) == len(set(keys))
    assert document.incarnation.isprintable()
    for event in document.events:
        texts = (event.id, event.type, event.status, event.source, event.description, event.resource_type)
        assert all(text.isprintable() and text == text.strip() for text in texts)
        assert all(name.isprintable() for name in event.resources)
        assert event.not_before is None or event.not_before.tzinfo is UTC
        assert event.duration_seconds is None or event.duration_seconds >= 0
        assert event.affects(["vm_1"]) in {"self", "shared", "others", "unknown"}
        if event.id == event.approval_id and not event.is_ambiguous:
            assert parse_event(to_azure_json(event)) == event
    assert compare({event.key: event for event in document.events}, document) == []
    assert compare({}, document) == [Seen(event) for event in document.events]


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_document_or_a_document_error(text: bytes) -> None:
    check(text)


@settings(deadline=None)
@given(JSON)
def test_any_json_is_a_document_or_a_document_error(value: object) -> None:
    check(json.dumps(value).encode())


@settings(deadline=None)
@given(DOCUMENTS)
def test_any_events_are_read_into_unique_printable_values(value: object) -> None:
    check(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@settings(deadline=None)
@given(st.text() | st.from_regex(r"[A-Z][a-z]{2}, \d{1,3} [A-Z][a-z]{2} \d{1,5} \d\d:\d\d:\d\d [A-Z+-]\w{0,5}"))
def test_any_text_for_not_before_is_a_time_or_none(text: str) -> None:
    check(body({**FULL, "NotBefore": text}))


@settings(deadline=None)
@given(st.datetimes(min_value=datetime(1900, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001 - as the strategy wants
def test_every_time_is_read_back_from_both_forms(time: datetime) -> None:
    time = time.replace(microsecond=0)

    assert parse(NotBefore=time.isoformat()).not_before == time
    assert parse(NotBefore=time.strftime("%a, %d %b %Y %H:%M:%S GMT")).not_before == time


def test_events_are_values() -> None:
    event = make_event()

    assert hash(event) == hash(make_event())
    with pytest.raises(AttributeError):
        event.status = "Started"  # type: ignore[misc]
    assert msgspec.structs.replace(event, status="Started").is_started
