"""The simulator's control port: what it allows, for which clients, and what it rejects."""

import http.client
import json
import math
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from scheduled_events_agent.cli.simulate import _warn_if_open
from scheduled_events_agent.simulator import Simulator, SimulatorError, parse_scenario
from scheduled_events_agent.simulator.azure import EventType, Plan
from scheduled_events_agent.simulator.control import Control
from scheduled_events_agent.simulator.faults import Fault, FaultKind
from scheduled_events_agent.simulator.scenario import Step

JSON = {"Content-Type": "application/json"}
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1", "vm-2"), others=("vm-3",), rate_limit=None) as running:
        yield running


@pytest.fixture
def port(simulator: Simulator) -> Iterator[int]:
    with Control(simulator) as running:
        yield running.port


def ask(
    port: int, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, method: str = ""
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def post(port: int, path: str, content: Any, **headers: str) -> tuple[int, dict[str, str]]:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, body = ask(port, path, json.dumps(content).encode(), {**JSON, **more})
    return status, json.loads(body)


def state(port: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(ask(port, "/state")[2])
    return told


def test_an_event_is_announced_with_the_keys_of_a_scenario_file(simulator: Simulator, port: int) -> None:
    content = {
        "type": "Freeze", "name": "pause", "vms": ["vm-2", "vm-3"], "source": "User", "notice": "5m",
        "duration": "9s", "description": "a <pause> \ud83d\ude00 / \\", "lasts": None, "id": "my-id",
    }  # fmt: skip
    assert post(port, "/schedule", content) == (200, {"event": "my-id"})

    plan = simulator.event("pause").plan
    assert (plan.type, plan.vms, plan.source, plan.duration_seconds) == ("Freeze", ("vm-2", "vm-3"), "User", 9)
    assert (plan.notice_seconds, plan.lasts_seconds) == (300.0, None)
    assert plan.description == "a <pause> \U0001f600 / \\"


def test_an_event_is_advanced_by_its_name_or_its_id(simulator: Simulator, port: int) -> None:
    _, first = post(port, "/schedule", {"type": "Reboot", "name": "first", "start_delay": "1h", "lasts": None})
    assert post(port, "/approve", {"event": "first"}) == (200, first)
    assert simulator.event("first").approved_by == "the portal"
    assert post(port, "/start", {"event": first["event"]}) == (200, first)
    assert simulator.event("first").status == "Started"
    assert post(port, "/end", {"event": "first"}) == (200, first)
    assert simulator.event("first").outcome == "completed"

    _, second = post(port, "/schedule", {"type": "Redeploy"})
    assert post(port, "/cancel", second) == (200, second)
    assert simulator.event(second["event"]).outcome == "canceled"


def test_faults_and_numbering_can_be_started_and_stopped(simulator: Simulator, port: int) -> None:
    assert post(port, "/fault", {"kind": "status", "status": 410, "vms": "vm-2", "on": "poll", "count": 3}) == (
        200,
        {},
    )
    assert simulator.faults("vm-1") == ()
    ((fault, _, left),) = simulator.faults("vm-2")
    assert (fault.kind, fault.status, fault.on, left) == ("status", 410, "poll", 3)
    assert post(port, "/clear-faults", {}) == (200, {})
    assert simulator.faults("vm-2") == ()
    assert post(port, "/reset-incarnation", {"incarnation": 41}) == (200, {})
    assert state(port)["incarnation"] == 41


def test_the_state_lists_vms_faults_events_and_history(simulator: Simulator, port: int) -> None:
    event_id = simulator.schedule("Preempt", vms=["vm-2"])
    gone_id = simulator.schedule("Reboot")
    simulator.cancel(gone_id)
    simulator.fault("vm-1", "stall", count=2)
    ask(int(simulator.endpoint("vm-2").rpartition(":")[2]), EVENTS, headers={"Metadata": "true"})
    told = state(port)

    assert [(vm["name"], vm["endpoint"], vm["polls"]) for vm in told["vms"]] == [
        ("vm-1", simulator.endpoint("vm-1"), 0),
        ("vm-2", simulator.endpoint("vm-2"), 1),
    ]
    assert told["vms"][0]["faults"] == [{"kind": "stall", "on": "any", "status": None, "until": None, "count": 2}]
    assert [(event["id"], event["status"], event["outcome"], event["seen_by"]) for event in told["events"]] == [
        (event_id, "Scheduled", "", ["vm-2"]),
        (gone_id, "Gone", "canceled", []),
    ]
    assert told["events"][0]["plan"]["vms"] == ["vm-2"]
    assert [(one["kind"], one["event"] and one["event"]["id"], one["vm"]) for one in told["history"]] == [
        ("polled", event_id, "vm-2"),
        ("fault", None, "vm-1"),
        ("gone", gone_id, ""),
        ("scheduled", gone_id, ""),
        ("scheduled", event_id, ""),
    ]
    assert told["choices"]["type"] == list(get_args(EventType))
    assert told["choices"]["kind"] == list(get_args(FaultKind))


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/schedule", b'{"type": "Reboot", "source": "Me"}', 'source: expected one of Platform, User; got "Me"'),
        ("/schedule", b"{}", 'the key "type" is missing'),
        ("/schedule", b'{"type": "Reboot", "notise": "5s"}', 'unknown key "notise"; did you mean "notice"?'),
        (
            "/schedule",
            b'{"type": "Reboot", "notice": 30}',
            'notice: expected a duration such as 9s, 5m, 1h30m or 2d; got "30": write 30s if seconds are meant',
        ),
        ("/fault", b'{"kind": "status", "status": 99}', "status: expected at least 100; got 99"),
        (
            "/fault",
            b'{"kind": "status", "status": 1e300}',
            'status: expected a whole number; got "1e+300"',
        ),
        ("/approve", b"[]", "expected keys with values; got a list"),
        ("/approve", b'{"event": ', "expected JSON; Expecting value: line 1 column 11 (char 10)"),
        (
            "/approve",
            b"\xff",
            "expected JSON; 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        ("/clear-faults", b'{"vms": []}', 'unknown key "vms"; known here: '),
        ("/reset-incarnation", b'{"incarnation": -1}', "incarnation: expected at least 0; got -1"),
    ],
)  # fmt: skip
def test_an_error_is_reported_as_in_a_scenario_file(port: int, path: str, body: bytes, message: str) -> None:
    status, _, answer = ask(port, path, body, JSON)
    assert (status, json.loads(answer)) == (400, {"error": f"{path[1:]}: {message}"})


def test_an_impossible_request_is_reported(simulator: Simulator, port: int) -> None:
    first = post(port, "/schedule", {"type": "Reboot", "name": "first", "lasts": None})[1]["event"]
    assert [
        post(port, "/schedule", {"type": "Reboot", "vms": ["vm-9"]}),
        post(port, "/fault", {"kind": "stall", "vms": ["vm-3"]}),
        post(port, "/schedule", {"type": "Freeze", "name": "first"}),
        post(port, "/cancel", {"event": "second"}),
    ] == [
        (400, {"error": "no VM 'vm-9' here; expected one of vm-1, vm-2, vm-3"}),
        (400, {"error": "no VM 'vm-3' here; expected one of vm-1, vm-2"}),
        (400, {"error": 'there is an event "first" already; give another name'}),
        (400, {"error": "there has never been an event 'second'"}),
    ]
    simulator.start_event("first")
    assert post(port, "/cancel", {"event": "first"}) == (
        400,
        {"error": f"event {first} is Started; only a Scheduled one can be canceled"},
    )


def test_the_longest_times_at_the_slowest_pace_are_still_dates() -> None:
    with Simulator(speed=0.1) as slow, Control(slow) as running:
        assert post(running.port, "/schedule", {"type": "Freeze", "notice": "3650d", "lasts": "3650d"})[0] == 200
        assert post(running.port, "/fault", {"kind": "stall", "for": "3650d"})[0] == 200
        told = state(running.port)
        assert told["events"][0]["not_before_at"] > "2100"
        assert told["vms"][0]["faults"][0]["until"] > "2100"


def test_a_name_that_resolves_to_this_machine_is_not_enough(port: int) -> None:
    for path in ("/", "/state", "/nowhere"):
        status, _, body = ask(port, path, headers={"Host": f"rebound.example:{port}"})
        assert (status, json.loads(body)["error"]) == (
            403,
            f'expected the Host 127.0.0.1:{port}; got "rebound.example:{port}"',
        )
    assert ask(port, "/state", headers={"Host": f"localhost:{port}"})[0] == 200


def test_a_port_open_to_the_network_may_be_called_by_any_name(simulator: Simulator) -> None:
    with Control(simulator) as running:
        own = {"Host": "simulator:9000", "Origin": "http://simulator:9000"}
        assert post(running.port, "/schedule", {"type": "Reboot"}, **own)[0] == 403
        running._server.is_open = True  # as with --bind 0.0.0.0
        assert post(running.port, "/schedule", {"type": "Reboot"}, **own)[0] == 200
        own["Origin"] = "http://other:9000"
        assert post(running.port, "/schedule", {"type": "Reboot"}, **own)[0] == 403


def test_a_port_open_to_the_network_is_warned_of(simulator: Simulator, capsys: pytest.CaptureFixture[str]) -> None:
    _warn_if_open(simulator, has_control=True)
    assert capsys.readouterr().err == ""
    simulator._server.is_open = True  # as with --bind 0.0.0.0
    _warn_if_open(simulator, has_control=False)
    _warn_if_open(simulator, has_control=True)
    warning = "warning: clients on other machines can read and approve the simulated events"
    assert capsys.readouterr().err == (
        f"{warning}\n{warning}; through the control port they can schedule events and faults\n"
    )


def test_a_page_of_another_site_can_change_nothing(simulator: Simulator, port: int) -> None:
    event = {"type": "Reboot"}
    assert [
        post(port, "/schedule", event, Origin="https://evil.example")[0],
        post(port, "/schedule", event, Origin="null")[0],
        post(port, "/schedule", event, Origin=f"http://127.0.0.1:{port + 1}")[0],
        # A request that a form, or a script that does not ask first, may send to any host.
        ask(port, "/schedule", b'{"type": "Reboot"}', {"Content-Type": "text/plain"})[0],
        ask(port, "/schedule", b'{"type": "Reboot"}', {"Content-Type": "application/x-www-form-urlencoded"})[0],
        ask(port, "/schedule", b'{"type": "Reboot"}')[0],
        ask(port, "/schedule", headers=JSON, method="OPTIONS")[0],
    ] == [403, 403, 403, 415, 415, 415, 405]
    assert simulator.events() == ()

    assert post(port, "/schedule", event, Origin=f"http://127.0.0.1:{port}")[0] == 200


def test_other_paths_and_methods_are_rejected_with_a_hint(port: int) -> None:
    status, _, body = ask(port, "/nowhere")
    paths = "/, /state, /schedule, /approve, /cancel, /start, /end, /fault, /clear-faults, /reset-incarnation"
    assert (status, json.loads(body)) == (404, {"error": f"there is no /nowhere here; there are {paths}"})
    status, headers, body = ask(port, "/schedule")
    assert (status, headers["Allow"], json.loads(body)) == (
        405,
        "POST",
        {"error": "/schedule is for POST; got GET"},
    )


@pytest.mark.parametrize("length", ["-1", "x", "1048577", "9" * 5000])
def test_an_impossible_length_is_rejected(port: int, length: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"POST /schedule HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_the_page_and_its_files_load_nothing_from_elsewhere(port: int) -> None:
    files = {path: ask(port, path) for path in ("/", "/control.css", "/control.js")}
    for status, headers, _ in files.values():
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    assert [headers["Content-Type"] for _, headers, _ in files.values()] == [
        "text/html; charset=utf-8",
        "text/css; charset=utf-8",
        "text/javascript; charset=utf-8",
    ]
    # Nothing from elsewhere, no handler or style in an attribute, and no text that could become markup.
    forbidden = r"https?://|\bon\w+=\"|\bstyle=|innerHTML|insertAdjacent|document\.write|eval\(|<script>|<style>"
    assert [re.findall(forbidden, text) for _, _, text in files.values()] == [[], [], []]
    assert re.findall(r'\b(?:src|href)="(.*?)"', files["/"][2]) == ["control.css", "control.js"]


def test_the_page_has_a_field_for_every_key_of_an_event_and_a_fault(port: int) -> None:
    page = ask(port, "/")[2]
    forms = dict(re.findall(r'<form id="(\w+)">(.*?)</form>', page, re.DOTALL))
    fields = {name: set(re.findall(r'name="(\w+)"', form)) for name, form in forms.items()}
    assert fields["schedule"] == set(Plan.__struct_encode_fields__)
    assert fields["fault"] == set(Fault.__struct_encode_fields__) - {
        "api_version",
        "by",
        "delay",
        "request_is_processed",
    }


def test_the_command_without_a_scenario_serves_only_requested_events() -> None:
    command = [
        sys.executable,
        "-m",
        "scheduled_events_agent",
        "simulate",
        "--control",
        "0",
        "--vm",
        "a",
        "--vm",
        "b",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = [json.loads(process.stdout.readline()) for _ in range(4)]
            assert [line["kind"] for line in told] == ["endpoint", "endpoint", "control", "scenario"]
            assert [line["vm"] for line in told[:2]] == ["a", "b"]
            status, answer = post(
                int(told[2]["url"].rstrip("/").rpartition(":")[2]), "/schedule", {"type": "Preempt"}
            )
            happened = json.loads(process.stdout.readline())
            assert (status, answer["event"]) == (200, happened["event"]["id"])
            document = ask(int(told[0]["url"].rpartition(":")[2]), EVENTS, headers={"Metadata": "true"})[2]
            assert [event["EventId"] for event in json.loads(document)["Events"]] == [answer["event"]]
        finally:
            process.kill()


def test_a_name_of_a_later_event_of_the_scenario_is_rejected() -> None:
    scenario = parse_scenario("{timeline: [{at: 1h, event: {type: Reboot, name: r}}]}", "mine.yaml")
    with Simulator(scenario=scenario, shutdown_delay_seconds=math.inf) as azure:
        with pytest.raises(SimulatorError, match='there is an event "r" already'):
            azure.play(Step(at=0.0, event=Plan(type="Freeze", name="r")))
        assert azure.events() == ()


@pytest.mark.parametrize("shutdown_delay_seconds", [math.inf, 3.0])
def test_a_scenario_with_a_control_port_does_not_end_by_itself(shutdown_delay_seconds: float) -> None:
    scenario = parse_scenario("{timeline: [{at: 0s, event: {type: Reboot, name: r}}], ends: 1s}", "mine.yaml")
    now = [1000.0]
    with Simulator(
        scenario=scenario, shutdown_delay_seconds=shutdown_delay_seconds, clock=lambda: now[0]
    ) as simulator:
        now[0] += 60.0
        assert simulator.event("r").status == "Scheduled"
        assert simulator.is_finished is (shutdown_delay_seconds < math.inf)
