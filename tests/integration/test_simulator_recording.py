"""Documents of a real endpoint: how they are recorded, and how they are played."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduled_events_agent.cli import main
from scheduled_events_agent.simulator import Simulator, SimulatorError, recorder
from scheduled_events_agent.simulator.recorder import record
from scheduled_events_agent.simulator.recording import (
    Origin,
    Recorded,
    Recording,
    load_recording,
    make_recorded,
    parse_recording,
    rename_vm,
)

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NOON = datetime(2026, 6, 28, 12, tzinfo=UTC)


def get(simulator: Simulator, path: str = EVENTS) -> bytes:
    import http.client

    connection = http.client.HTTPConnection(simulator.endpoint().removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", path, headers={"Metadata": "true"})
        return connection.getresponse().read()
    finally:
        connection.close()


class Told:
    """The lines of the recorder, for tests that wait for one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, _: datetime, text: str) -> None:
        with self._changed:
            self.texts.append(text)
            self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= count, 60), self.texts
            return list(self.texts)


@contextmanager
def recording_of(endpoint: str, path: Path) -> Iterator[Told]:
    told, stop = Told(), threading.Event()
    thread = threading.Thread(target=record, args=(endpoint, path, stop, told), kwargs={"interval_seconds": 0.02})
    thread.start()
    try:
        yield told
    finally:
        stop.set()
        thread.join()


def test_each_document_that_differs_is_recorded_once_and_nothing_is_approved(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Simulator(vms=("web_0",), rate_limit=None) as azure:
        with recording_of(azure.endpoint(), path) as told:
            assert told.wait(2) == ["records the documents of web_0", "no events"]
            azure.wait_polls(3, timeout_seconds=60)
            event_id = azure.schedule("Reboot", vms=["web_0"], id_="602d9444", lasts_seconds=None)
            assert told.wait(3)[2] == "Reboot 602d9444 Scheduled"
            documents = [get(azure)]
            azure.start_event(event_id)
            assert told.wait(4)[3] == "Reboot 602d9444 Started"
        requests = azure.requests()
        vm_id = azure.vms["web_0"].id

    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"vm": "web_0", "vm_id": vm_id, "scale_set": ""}
    assert [line["document"]["DocumentIncarnation"] for line in lines[1:]] == [1, 2, 3]
    assert lines[2]["document"] == json.loads(documents[0])
    assert {request.method for request in requests} == {"GET"}
    assert {request.headers["metadata"] for request in requests} == {"true"}


def test_a_recording_uses_the_newest_api_version_of_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Simulator(rate_limit=None) as azure:
        azure.schedule("SpotRebalanceRecommendation", id_="602d9444", lasts_seconds=None)
        with recording_of(azure.endpoint(), path) as told:
            assert told.wait(2)[1] == "SpotRebalanceRecommendation 602d9444 Scheduled"
            azure.fault(None, "status", status=400, api_version="2024-07-09")
            assert told.wait(4)[2:] == [f"{azure.endpoint()} answers 400 Bad Request", "no events"]


def test_an_invalid_document_is_recorded_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Simulator(rate_limit=None) as azure:
        azure.fault(None, "empty", on="poll", count=1)
        azure.fault(None, "html", on="poll", count=1)
        with recording_of(azure.endpoint(), path) as told:
            assert told.wait(4)[1:] == ["empty", "not a document", "no events"]

    recording = load_recording(str(path))
    assert [recorded.body and recorded.body[:15] for recorded in recording.documents] == [
        "",
        "<!DOCTYPE html>",
        None,
    ]
    with Simulator(scenario=recording, clock=NOON.timestamp) as replay:  # another body follows soon
        assert get(replay) == b""


@pytest.mark.parametrize(
    "body",
    [
        b'{"Events": [{"Description": "half of a pair: \\ud83e"}]}',
        b'{"Events": [], "DocumentIncarnation": NaN}',
        b'{"Events": [], "DocumentIncarnation": 1e400}',
        b'{"Events": ' + b"[" * 990 + b"]" * 990 + b"}",
        b'\xef\xbb\xbf{"Events": []}',
        b'{"Events": "\xff"}',
    ],
)
def test_a_response_that_json_cannot_hold_is_recorded_as_text(body: bytes) -> None:
    recorded = make_recorded(NOON, body)
    assert recorded.body == body.decode("utf-8", "replace")
    line = b'{"vm": "a"}\n' + msgspec.json.encode(recorded)
    assert parse_recording(line, "r.jsonl").documents == (recorded,)


@pytest.mark.parametrize(
    ("fault", "options", "news"),
    [
        ("status", {"status": 410}, "answers 410 Gone"),
        ("redirect", {}, "answers 302 Found"),
        ("endless", {}, "answers more than 1 MiB"),
        ("truncated", {}, "answers with less than it announced"),
        ("stall", {}, "does not answer: "),
    ],
)
def test_an_error_is_reported_and_the_request_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, options: dict[str, Any], news: str
) -> None:
    path = tmp_path / "mine.jsonl"
    monkeypatch.setattr(recorder, "_FIRST_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no proxy is there
    with Simulator(rate_limit=None) as azure:
        azure.fault(None, fault, on="poll", count=1, **options)
        with recording_of(azure.endpoint(), path) as told:
            texts = told.wait(3)
        assert not [request for request in azure.requests() if request.path == "/redirected"]

    assert texts[0] == "records the documents of vm-1"
    assert texts[1].startswith(f"{azure.endpoint()} {news}")
    assert texts[2] == "no events"
    assert len(load_recording(str(path)).documents) == 1


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("precious")
    with pytest.raises(SimulatorError) as caught:
        record("http://127.0.0.1:9", path, threading.Event(), lambda _at, _text: None)
    assert str(caught.value) == f"{path} is there already: name a new file, or remove it"
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "endpoint",
    ["https://a", "169.254.169.254", "http://", "http://a:b", "http://a/path", "http://me@a", "http://[", ""],
)
def test_an_invalid_address_is_reported(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(SimulatorError) as caught:
        record(endpoint, tmp_path / "mine.jsonl", threading.Event(), lambda _at, _text: None)
    assert str(caught.value) == f'--from: expected http://ADDRESS[:PORT]; got "{endpoint}"'


def event(status: str = "Scheduled", not_before: Any = "", **more: Any) -> dict[str, Any]:
    return {"EventId": "A-1", "EventStatus": status, "EventType": "Reboot", "NotBefore": not_before, **more}


def recorded(seconds: float, *events: dict[str, Any], incarnation: int = 1) -> Recorded:
    at = datetime.fromtimestamp(NOON.timestamp() + seconds, UTC)
    return Recorded(at=at, document={"DocumentIncarnation": incarnation, "Events": list(events)})


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_documents_are_served_when_they_were_with_not_before_as_far_ahead(speed: float) -> None:
    recording = Recording(
        origin=Origin(vm="web_0", vm_id="v-1"),
        documents=(
            recorded(0.0),
            recorded(8.0, event(not_before="Sun, 28 Jun 2026 12:15:08 GMT"), incarnation=2),
            recorded(12.0, event("Started"), incarnation=5),
            recorded(20.0, incarnation=6),
        ),
    )
    began = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    now = [began]
    with Simulator(scenario=recording, speed=speed, clock=lambda: now[0], begins_at_first_poll=True) as replay:
        served = []
        for seconds in (0.0, 7.9, 8.0, 11.9, 12.0, 20.0):
            now[0] = began + seconds / speed
            served.append(json.loads(get(replay)))
        compute = json.loads(get(replay, "/metadata/instance/compute?api-version=2021-12-13"))

    # 908 s after the beginning, which at four times the speed is 227 s.
    not_before = {1.0: "Tue, 01 Jan 2030 00:15:08 GMT", 4.0: "Tue, 01 Jan 2030 00:03:47 GMT"}[speed]
    assert [document["DocumentIncarnation"] for document in served] == [1, 1, 2, 2, 5, 6]
    assert served[2]["Events"] == [event(not_before=not_before)]
    assert served[4]["Events"] == [event("Started")]
    assert (compute["name"], compute["vmId"]) == ("web_0", "v-1")


@pytest.mark.parametrize(
    ("written", "played"),
    [
        ("Sun, 28 Jun 2026 12:00:10 GMT", "Tue, 01 Jan 2030 00:00:10 GMT"),
        ("2026-06-28T12:00:10Z", "2030-01-01T00:00:10Z"),
        ("2026-06-28T12:00:10.250Z", "2030-01-01T00:00:11Z"),  # no VM gets less notice
        ("Mon, 28 Jun 2026 12:00:10 GMT", "Tue, 01 Jan 2030 00:00:10 GMT"),  # with the wrong weekday
        ("", ""),
        (None, None),
        ("28 Jun 2026 12:00:10 GMT", "Tue, 01 Jan 2030 00:00:10 GMT"),
        ("Sun, 28 Jun 2026 12:00:10 GMT+01:00", "Sun, 28 Jun 2026 12:00:10 GMT+01:00"),
        ("soon", "soon"),
        (17, 17),
        ("9999-99-99T00:00:00Z", "9999-99-99T00:00:00Z"),
    ],
)
def test_only_times_are_moved_and_they_keep_their_form(written: Any, played: Any) -> None:
    document = {
        "Events": [event(not_before=written, Odd=[1, {"NotBefore": "2026-06-28T12:00:10Z"}]), 3],
        "More": None,
    }
    recording = Recording(origin=Origin(vm="vm-1"), documents=(Recorded(at=NOON, document=document),))
    began = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    with Simulator(scenario=recording, clock=lambda: began) as replay:
        served = json.loads(get(replay))
    expected = event(not_before=played, Odd=[1, {"NotBefore": "2026-06-28T12:00:10Z"}])
    assert served == {"Events": [expected, 3], "More": None}


def test_approvals_are_counted_and_change_nothing() -> None:
    import http.client

    recording = Recording(origin=Origin(vm="vm-1"), documents=(recorded(0.0, event(), incarnation=7),))
    with Simulator(scenario=recording, shutdown_delay_seconds=math.inf) as replay:
        before = get(replay)
        statuses = []
        for event_id in ("a-1", "other"):
            connection = http.client.HTTPConnection(replay.endpoint().removeprefix("http://"), timeout=60)
            body = json.dumps({"StartRequests": [{"EventId": event_id}]})
            connection.request("POST", EVENTS, body, {"Metadata": "true"})
            statuses.append(connection.getresponse().status)
            connection.close()
        assert statuses == [200, 400]
        assert [(record.accepted, record.approved) for record in replay.approvals()] == [(("a-1",), ())]
        assert get(replay) == before
        with pytest.raises(SimulatorError) as caught:
            replay.schedule("Reboot")
        assert str(caught.value) == "a recording is played, which has its own events; play a scenario instead"
        assert [(one.kind, one.text) for one in replay.history()] == [
            ("began", ""),
            ("document", "Reboot A-1 Scheduled"),
            ("approved", "a-1; the recording does not change"),
        ]


def test_the_vm_of_a_recording_can_be_called_by_another_name() -> None:
    first = recorded(0.0, event(Resources=["web_0", "web_01"]))
    recording = Recording(origin=Origin(vm="web_0"), documents=(first, Recorded(at=NOON, body="")))
    renamed = rename_vm(recording, "mine")
    assert renamed.origin.vm == "mine"
    assert renamed.documents[0].document == {
        "DocumentIncarnation": 1,
        "Events": [event(Resources=["mine", "web_01"])],
    }
    assert renamed.documents[1].body == ""


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (b"", ["r.jsonl:1: there is no document in it; make one with simulate --record r.jsonl"]),
        (b'{"vm": "a"}\n', ["r.jsonl:1: there is no document in it; make one with simulate --record r.jsonl"]),
        (b"{}", ["r.jsonl:1: not the first line of a recording: Object missing required field `vm`"]),
        (
            b'{"vm": "a"}\n{"at": "2026-01-01T00:00:00", "body": ""}\n[]',
            ["r.jsonl:2: not a line of a recording: Expected `datetime` with a timezone component - at `$.at`"],
        ),
        (
            b'{"vm": "a"}\n\n{"at": "2026-01-01T00:00:00Z"}\n',
            ["r.jsonl:3: not a line of a recording: expected either document or body"],
        ),
        (b'{"vm": "a"}\n[]', ["r.jsonl:2: not a line of a recording: Expected `object`, got `array`"]),
    ],
)
def test_the_first_error_in_a_recording_is_reported_with_its_line(text: bytes, problems: list[str]) -> None:
    with pytest.raises(SimulatorError) as caught:
        parse_recording(text, "r.jsonl")
    assert caught.value.kind == "config"
    assert str(caught.value).splitlines() == problems


def test_the_name_of_a_vm_has_no_line_break() -> None:
    with pytest.raises(SimulatorError):
        parse_recording(b'{"vm": "a\\n"}\n{"at": "2026-01-01T00:00:00Z", "body": ""}', "r.jsonl")


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command without a process of its own; returns its exit code and output."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(["simulate", *arguments])
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def test_the_command_records_and_plays_its_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduled_events_agent.cli.simulate._SHUTDOWN_DELAY_SECONDS", 0.0)
    path = tmp_path / "mine.jsonl"
    with Simulator(vms=("web_0",)) as azure:
        azure.schedule("Reboot", vms=["web_0"], id_="602d9444")
        ran = run_command("--record", str(path), "--from", azure.endpoint(), "--for", "100ms")
    assert (ran.returncode, ran.stderr) == (0, "")
    told = ran.stdout.splitlines()
    assert told[0] == f"records {azure.endpoint()} to {path}; Ctrl-C ends it"
    assert [line.partition("  ")[2] for line in told[1:-1]] == [
        "records the documents of web_0",
        "Reboot 602d9444 Scheduled",
    ]
    assert told[-1] == f"recorded; play it with: scheduled-events-agent simulate {path}"

    assert run_command("--check", str(path)).stdout == f"{path}: valid, with 1 document for web_0\n"
    checked = json.loads(run_command("--check", "--json", str(path)).stdout)
    assert (checked["valid"], checked["steps"], checked["documents"], checked["vms"]) == (True, None, 1, ["web_0"])
    played = run_command(str(path), "--now", "--vm", "mine").stdout.splitlines()
    assert played[0].split()[0] == "mine"
    assert [line.split("  ")[-1].strip() for line in played[2:]] == [
        "begins",
        "Reboot 602d9444 Scheduled",
        "the scenario is finished",
    ]


def test_the_command_leaves_no_empty_recording_behind(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    ran = run_command("--record", str(path), "--from", "http://127.0.0.1:9", "--for", "100ms")
    assert (ran.returncode, ran.stderr) == (
        1,
        "scheduled-events-agent: http://127.0.0.1:9 has given nothing to record\n",
    )
    assert not path.exists()


def test_the_command_leaves_no_recording_without_a_document_behind(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Simulator() as azure:
        azure.fault("vm-1", "status", on="poll")
        ran = run_command("--record", str(path), "--from", azure.endpoint(), "--for", "100ms")
    assert (ran.returncode, ran.stderr) == (
        1,
        f"scheduled-events-agent: {azure.endpoint()} has given nothing to record\n",
    )
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="the size of files can be limited on Unix only")
def test_a_disk_that_is_full_ends_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    code = (
        "import resource, sys; from scheduled_events_agent.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(main(sys.argv[1:]))"
    )
    with Simulator() as azure:
        for _ in range(5):
            azure.schedule("Reboot", begins_started=True, lasts_seconds=None)
        command = [sys.executable, "-c", code, "simulate", "--record", str(path), "--from", azure.endpoint()]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    told = f"scheduled-events-agent: cannot record to {path}: File too large\n"
    assert (ran.returncode, ran.stderr) == (1, told)
    assert list(json.loads(path.read_text().splitlines()[0])) == ["vm", "vm_id", "scale_set"]


def test_the_command_checks_a_scenario_without_playing_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("timeline:\n  - {at: 1s, event: {type: Rebot}}\n  - {at: 2s, cancel: x}\n")
    ran = run_command("--check", str(path))
    choices = "Freeze, Reboot, Redeploy, Preempt, Terminate, SpotRebalanceRecommendation"
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        2,
        "",
        f'{path}:2: timeline[0].event.type: expected one of {choices}; got "Rebot"; did you mean "Reboot"?\n',
    )
    assert run_command("outage", "--check").stdout.startswith("outage: valid, with ")
    assert run_command("--check").stderr == (
        "scheduled-events-agent: --check: expected SCENARIO, the file to look at; got none\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("r.jsonl", "--vm", "a", "--vm", "b"), "--vm: a recording has 1 VM; got 2 names"),
        (("--record", "a.txt"), "--record: expected a file that ends in .jsonl; got a.txt"),
        (("--from", "http://a"), "--from and --for say what to record: name a file with --record"),
        (
            ("--record", "a.jsonl", "--for", "5"),
            '--for: expected a duration such as 9s, 5m, 1h30m or 2d; got "5": write 5s if seconds are meant',
        ),
    ],
)
def test_the_command_rejects_conflicting_options(arguments: tuple[str, ...], message: str) -> None:
    ran = run_command(*arguments)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"scheduled-events-agent: {message}\n")
