"""The output of each command with ``--json``: objects of the kinds that docs/json.md lists."""

import argparse
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from scheduled_events_agent import cli, host
from scheduled_events_agent.cli.check import PolicyCheck
from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.cli.doctor import Diagnosis
from scheduled_events_agent.cli.explain import Explanations
from scheduled_events_agent.cli.fleet import FleetRelease, FleetStatus
from scheduled_events_agent.cli.notify import NotifyTest
from scheduled_events_agent.cli.service import ServiceStatus
from scheduled_events_agent.cli.simulate import (
    ScenarioCheck,
    ScenarioList,
    SimulatorEndpoint,
    SimulatorRecord,
    SimulatorStart,
)
from scheduled_events_agent.fleet.plan import record_key
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.host.windows import service_manager as windows_service
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.simulator.table import SimulatedTable
from scheduled_events_agent.status import SCHEMA_VERSION, Journal, OperatorResult, Status
from scheduled_events_agent.store import Store

ANSWERS: dict[str, list[tuple[str, list[type]]]] = {
    "check": [("", [PolicyCheck]), ("absent.yaml", [PolicyCheck])],
    "explain": [
        ("", [Explanations]),
        ("document.json", [Explanations]),
        ("scenario.yaml", [Explanations]),
        ("spot-eviction", [Explanations]),
    ],
    "approve": [("E1", [OperatorResult])],
    "hold": [("E1", [OperatorResult])],
    "release": [("E1", [OperatorResult])],
    "retry": [("E1", [OperatorResult])],
    "resolve": [("E1", [OperatorResult])],
    "status": [("", [Status])],
    "history": [("", [Journal])],
    "notify": [("test", [NotifyTest])],
    "fleet": [("status", [FleetStatus]), ("release E1", [FleetRelease])],
    "doctor": [("", [Diagnosis])],
    "simulate": [
        ("--list", [ScenarioList]),
        ("--check platform-reboot", [ScenarioCheck]),
        ("--check absent.yaml", [ScenarioCheck]),
        (
            "--now --speed 10 scenario.yaml",
            [SimulatorEndpoint, SimulatorStart, SimulatorRecord, SimulatorRecord, SimulatorRecord],
        ),
    ],
    "service status": [("", [ServiceStatus])],
}
"""Command -> its arguments, and the objects that it prints."""
OF_A_CLUSTER = ("kubernetes drain", "kubernetes uncordon")
"""They are run in test_kubernetes_drain.py."""


def commands_with_json(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    for action in parser._actions:
        if "--json" in action.option_strings:
            yield " ".join(words)
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from commands_with_json(command, (*words, word))


def objects_in(text: str) -> list[dict[str, Any]]:
    """All objects in one JSON document, or in lines of JSON."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files that the commands read. No agent runs; the metadata service and the fleet's table are simulated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scheduled_events_agent.fleet.plan._FRESH_INTERVALS", -1.0)  # each VM has been silent
    secret = tmp_path / "sas"
    secret.touch(mode=0o600)
    secret.write_text(SimulatedTable.SAS, encoding="utf-8")
    (tmp_path / "document.json").write_text('{"DocumentIncarnation": 1, "Events": []}', encoding="utf-8")
    (tmp_path / "scenario.yaml").write_text("{timeline: [{at: 0s, event: {type: Reboot}}], ends: 1s}\n", "utf-8")
    host.create_private_dir(tmp_path / "state")
    Store.open(tmp_path / "state", datetime.now(UTC)).close()
    with Simulator() as azure, SimulatedTable() as table:
        policy = tmp_path / "policy.yaml"
        policy.write_text(
            f"imds: {{endpoint: '{azure.endpoint()}'}}\n"
            f"agent: {{state_dir: {json.dumps(str(tmp_path / 'state'))}}}\n"
            f"notify: [{{name: ops, to: '{azure.endpoint()}/'}}]\n"
            f"fleet: {{group: web, table: '{table.url}', max_events: 1, "
            f"credential: {{sas_file: {json.dumps(str(secret))}}}}}\n",
            encoding="utf-8",
        )
        policy.chmod(0o600)
        monkeypatch.setenv("SCHEDULED_EVENTS_AGENT_CONFIG", str(policy))
        fleet = load_policy(policy).settings.fleet
        assert fleet is not None
        fields = {"id": "E1", "vm": "vm-2", "vm_id": "2", "state": "ready", "renew_seconds": "60"}
        assert connect(fleet, "web", azure.endpoint()).put(record_key("E1", "vm-2"), fields, "")
        httpx.get(
            f"{azure.endpoint()}/metadata/scheduledevents?api-version=2020-07-01", headers={"Metadata": "true"}
        )
        yield tmp_path


def test_every_command_with_json_is_run_here() -> None:
    assert sorted(commands_with_json(cli.build_parser())) == sorted((*ANSWERS, *OF_A_CLUSTER))


@pytest.mark.parametrize(
    ("words", "types"),
    [
        pytest.param(f"{command} {more}", types, id=f"{command} {more}".strip())
        for command, answers in ANSWERS.items()
        for more, types in answers
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_command_prints_objects_with_their_version_and_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, types: list[type]
) -> None:
    monkeypatch.setattr(windows_service, "query", lambda: None)
    cli.main([*words.split(), "--json"])
    found = objects_in(capsys.readouterr().out)
    assert len(found) == len(types)
    for one, type_ in zip(found, types, strict=True):
        assert one["schema_version"] == SCHEMA_VERSION
        assert one["at"]
        assert list(one) == [field.encode_name for field in msgspec.structs.fields(type_)]
        msgspec.convert(one, type_)


def test_the_state_of_an_installed_service_is_shown_as_text_and_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = windows_service.Facts("stopped", 0, 1077, "automatic", "LocalSystem", "agent service host")
    monkeypatch.setattr(windows_service, "query", lambda: facts)
    assert cli.main(["service", "status"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "state      stopped",
        "pid        0",
        "exit code  1077",
        "start      automatic",
        "account    LocalSystem",
        "command    agent service host",
    ]
    assert cli.main(["service", "status", "--json"]) == 1
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["exit_code"], status["command"]) == ("stopped", 1077, "agent service host")
    monkeypatch.setattr(windows_service, "query", lambda: None)
    assert cli.main(["service", "status"]) == 1
    assert capsys.readouterr().out == "state  not installed\n"
