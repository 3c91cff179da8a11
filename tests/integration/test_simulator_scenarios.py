"""Time in the simulator: waiting for what happens, scenarios, and the command that serves them."""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from problems import as_lines

from scheduled_events_agent.cli import main
from scheduled_events_agent.simulator import (
    Simulator,
    SimulatorError,
    list_scenarios,
    load_scenario,
    parse_scenario,
)

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


def poll(endpoint: str) -> int:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", EVENTS, headers={"Metadata": "true"})
        response = connection.getresponse()
        return len(json.loads(response.read() or b'{"Events": []}')["Events"]) if response.status == 200 else -1
    finally:
        connection.close()


def kinds(simulator: Simulator) -> list[str]:
    return [entry.kind for entry in simulator.history()]


def test_a_test_can_wait_for_each_step_of_an_event() -> None:
    with Simulator() as simulator:
        event_id = simulator.schedule("Reboot", start_delay_seconds=0.05, lasts_seconds=0.05)
        poller = threading.Thread(target=poll, args=(simulator.endpoint(),))
        poller.start()
        assert simulator.wait_polled(event_id).seen_by == ("vm-1",)
        poller.join()
        simulator.approve(event_id)
        assert simulator.wait_approved(event_id).approved_by == "the portal"
        assert simulator.wait_started(event_id).started_at is not None
        assert simulator.wait_gone(event_id).outcome == "completed"
        assert kinds(simulator) == ["scheduled", "polled", "approved", "started", "gone"]


def test_one_can_wait_for_further_polls() -> None:
    with Simulator() as simulator:
        poll(simulator.endpoint())
        timer = threading.Timer(0.05, poll, args=(simulator.endpoint(),))
        timer.start()
        simulator.wait_polls(1)
        timer.join()
        assert len(simulator.requests()) == 2


def test_a_wait_that_times_out_shows_the_current_state() -> None:
    with Simulator() as simulator:
        event_id = simulator.schedule("Reboot")
        simulator.fault("vm-1", "status", status=404)
        poll(simulator.endpoint())
        with pytest.raises(SimulatorError) as caught:
            simulator.wait_approved(event_id, timeout_seconds=0.05)
    assert caught.value.kind == "timeout"
    assert str(caught.value) == (
        f"gave up after 0.05 s of waiting until event {event_id} was approved; "
        f"events: Reboot {event_id} Scheduled; 1 requests, the last: vm-1 GET 404 (status)"
    )


def test_waiting_ends_when_the_simulator_is_closed() -> None:
    simulator = Simulator().start()
    event_id = simulator.schedule("Reboot")
    threading.Timer(0.05, simulator.close).start()
    with pytest.raises(SimulatorError, match=r"^the simulator was closed while waiting until event"):
        simulator.wait_gone(event_id, timeout_seconds=30)


def test_an_event_starts_at_not_before_without_a_request() -> None:
    with Simulator() as simulator:
        event = simulator.wait_started(simulator.schedule("Preempt", notice_seconds=0.2))
        assert event.started_at == event.not_before_at


def test_a_scenario_is_played_at_its_speed() -> None:
    scenario = parse_scenario(
        """
        timeline:
          - {at: 10s, event: {name: pause, type: Freeze, notice: 15m, lasts: null}}
          - {at: 20s, start: pause}
          - {at: 30s, end: pause}
          - {at: 40s, cancel: pause}
        """,
        "mine.yaml",
    )
    with Simulator(scenario=scenario, speed=100) as simulator:
        event = simulator.wait_gone("pause")
        simulator.wait_until(lambda: kinds(simulator)[-1] == "skipped", "the last step was skipped")
        began_at = simulator.history()[0].at

    assert event.started_at is not None
    assert event.gone_at is not None
    times = [(at - began_at).total_seconds() for at in (event.scheduled_at, event.started_at, event.gone_at)]
    assert times == pytest.approx([0.1, 0.2, 0.3], abs=0.001)
    assert simulator.history()[-1].text == (f"event {event.id} is Gone; only a Scheduled one can be canceled")


def test_a_scenarios_time_can_begin_with_the_first_request_and_its_faults_apply() -> None:
    with Simulator(scenario=load_scenario("first-call"), speed=60, begins_at_first_poll=True) as simulator:
        assert simulator.history() == ()
        began = time.monotonic()
        assert poll(simulator.endpoint()) == 0
        assert time.monotonic() - began >= 60 / 60
        assert [poll(simulator.endpoint()) for _ in range(3)] == [0, 0, 0]
        assert [record.fault for record in simulator.requests()] == ["slow", "empty", "empty", "empty"]


def test_every_shipped_scenario_comes_to_its_end() -> None:
    with ExitStack() as stack:
        playing = {
            # A week passes in seconds; a notice is at least the rest of the present second.
            name: stack.enter_context(
                Simulator(scenario=load_scenario(name), speed=500_000, shutdown_delay_seconds=0)
            )
            for name in list_scenarios()
        }
        for name, simulator in playing.items():
            simulator.wait_until(partial(getattr, simulator, "is_finished"), f"{name} had ended", 20)
            assert all(event.status == "Gone" for event in simulator.events()), name
            assert "skipped" not in kinds(simulator), name


def test_a_scenario_that_says_so_ends_with_an_event_pending() -> None:
    scenario = parse_scenario("{timeline: [{at: 0s, event: {type: Reboot}}], ends: 10s}", "mine.yaml")
    with Simulator(scenario=scenario, speed=100) as simulator:
        assert [entry.kind for entry in simulator.stream()] == ["began", "scheduled"]
        assert simulator.events()[0].status == "Scheduled"


def test_the_python_in_the_guide_works() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "testing-hooks.md").read_text(encoding="utf-8")
    (sample,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(compile(sample, "testing-hooks.md", "exec"), {})


# The command


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command without a process of its own; returns its exit code and output."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(["simulate", *arguments])
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def test_the_command_lists_the_shipped_scenarios() -> None:
    listed = run_command("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(list_scenarios())

    as_json = json.loads(run_command("--list", "--json").stdout)
    assert {item["name"]: item["shows"] for item in as_json["scenarios"]} == list_scenarios()


def test_the_command_reports_the_validity_of_a_file_to_programs(tmp_path: Path) -> None:
    def checked(name: str | Path) -> tuple[int, bool, list[str], object]:
        ran = run_command("--check", "--json", str(name))
        assert ran.stderr == ""
        told = json.loads(ran.stdout)
        return ran.returncode, told["valid"], as_lines(told["errors"]), (told["steps"], told["vms"])

    assert checked("platform-reboot") == (0, True, [], (1, ["vm-1"]))
    path = tmp_path / "mine.yaml"
    path.write_text("vms: []\ntimeline: 1\n")
    problems = [
        f"{path}:1: vms: expected at least 1 items; got 0",
        f'{path}:2: timeline: expected a list; got "1"; write [1]',
    ]
    assert checked(path) == (2, False, problems, (None, []))
    assert run_command("--check", str(path)).stderr.splitlines() == problems
    missing = [f"scenario {tmp_path}/none.yaml: cannot be read: No such file or directory"]
    assert checked(tmp_path / "none.yaml") == (2, False, missing, (None, []))


def test_the_command_serves_a_scenario_from_the_first_request_to_its_end(tmp_path: Path) -> None:
    path, record = tmp_path / "mine.yaml", tmp_path / "requests.jsonl"
    path.write_text("timeline: [{at: 0s, event: {type: Redeploy, begins_started: true, lasts: 10s}}]\n")
    command = [
        sys.executable,
        "-m",
        "scheduled_events_agent",
        "simulate",
        str(path),
        "--speed",
        "20",
        "--vm",
        "real",
    ]
    with subprocess.Popen([*command, "--requests", str(record)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        vm, url = first_line.split()
        assert poll(url.removesuffix("/metadata/scheduledevents")) == 1
        lines = [line.split() for line in process.stdout.read().splitlines()]

    assert process.returncode == 0
    assert vm == "real"
    assert lines[0][:2] == ["scenario", str(path)]
    assert [line[1:3] for line in lines[1:-1]] == [
        ["begins"],
        ["started", "Redeploy"],
        ["polled", "Redeploy"],
        ["gone", "Redeploy"],
    ]
    assert lines[-1] == ["the", "scenario", "is", "finished"]
    assert json.loads(record.read_text())["status"] == 200


def test_the_command_prints_events_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{vms: [a, b], timeline: [{at: 0s, event: {type: Reboot, vms: b}}], ends: 1s}\n")
    ran = run_command(str(path), "--json", "--now", "--speed", "10")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]

    assert [line["kind"] for line in lines] == ["endpoint", "endpoint", "scenario", "began", "scheduled", "end"]
    assert [line["vm"] for line in lines[:2]] == ["a", "b"]
    assert lines[4]["event"]["vms"] == ["b"]


def test_a_policy_in_place_of_a_scenario_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("rules: []\n")
    ran = run_command(str(path))
    hint = f"{path}: this is a policy; run and explain take it with --config"
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, hint)


def test_the_command_rejects_an_invalid_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("vms: []\n")
    for arguments, message in (
        ([str(path)], f"{path}:1: vms: expected at least 1 items; got 0"),
        (["--speed", "0"], "scheduled-events-agent: speed: expected a number from 0.1 to 1000000; got 0"),
        (["--vm", ""], 'scheduled-events-agent: --vm: expected a name without blanks; got ""'),
        (
            ["--control", "0", "--vm", "a", "--vm", "b c"],
            'scheduled-events-agent: --vm: expected a name without blanks; got "b c"',
        ),
    ):
        ran = run_command(*arguments)
        assert (ran.returncode, ran.stderr) == (2, f"{message}\n")
