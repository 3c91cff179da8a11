"""The simulated table, asked by the real client of Table Storage, does what a ledger must."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from scheduled_events_agent.fleet.ledger import Ledger
from scheduled_events_agent.fleet.memory import MemoryLedger
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings
from scheduled_events_agent.simulator.table import SimulatedTable


@pytest.fixture(params=["simulated", "memory"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger()
        return
    sas_file = tmp_path / "sas"
    sas_file.touch(mode=0o600)
    sas_file.write_text(SimulatedTable.SAS)
    with SimulatedTable() as table:
        credential = FleetCredential(sas_file=str(sas_file))
        yield connect(FleetSettings(table=table.url, credential=credential), "http://127.0.0.1:9")


def test_a_client_that_gives_up_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    with SimulatedTable() as table:
        client = socket.create_connection(("127.0.0.1", urlsplit(table.url).port or 0))
        client.sendall(b"POST /simulated/scheduledevents HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        client.close()
        assert httpx.get(table.url).status_code == 400
        assert httpx.get(table.url, params={"$filter": "PartitionKey eq 'a'"}).json() == {"value": []}
    assert capfd.readouterr().err == ""


def test_simulate_serves_a_table(tmp_path: Path) -> None:
    command = (
        sys.executable,
        "-m",
        "scheduled_events_agent",
        "simulate",
        "--control",
        "0",
        "--table",
        "0",
        "--json",
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = [json.loads(process.stdout.readline()) for _ in range(4)]
            assert [line["kind"] for line in told] == ["endpoint", "control", "table", "scenario"]
            (tmp_path / "sas").touch(mode=0o600)
            (tmp_path / "sas").write_text("sv=1&sig=1")
            fleet = FleetSettings(table=told[2]["url"], credential=FleetCredential(sas_file=str(tmp_path / "sas")))
            ledger = connect(fleet, told[0]["url"])
            ledger.put("vm|web", "a", {})
            assert [row.key for row in ledger.list_rows("vm|web")] == ["a"]
        finally:
            process.kill()


def test_rows_are_listed_by_partition_in_the_order_of_their_keys(ledger: Ledger) -> None:
    for key in ("b", "a"):
        ledger.put("slot|web", key, {"event": f"of {key}"})
    ledger.put("slot|db", "000", {})
    assert [(row.key, row.content) for row in ledger.list_rows("slot|web")] == [
        ("a", {"event": "of a"}),
        ("b", {"event": "of b"}),
    ]
    assert ledger.list_rows("vm|none") == []


def test_a_row_is_replaced_and_deleted_whatever_was_there(ledger: Ledger) -> None:
    ledger.put("vm|web", "e|vm_1", {"state": "ready", "at": "now"})
    ledger.put("vm|web", "e|vm_1", {"state": "back"})
    assert [row.content for row in ledger.list_rows("vm|web")] == [{"state": "back"}]
    ledger.put("vm|web", "e|vm_1", None)
    ledger.put("vm|web", "e|vm_1", None)
    assert ledger.list_rows("vm|web") == []


def test_rows_are_listed_by_how_their_keys_begin(ledger: Ledger) -> None:
    for key in ("a|vm_1", "a|vm_2", "a", "a}", "ab|vm_1", "b|vm_1"):
        ledger.put("vm|web", key, {})
    assert [row.key for row in ledger.list_rows("vm|web", "a|")] == ["a|vm_1", "a|vm_2"]
    assert len(ledger.list_rows("vm|web")) == 6


def test_a_row_that_was_changed_meanwhile_is_not_deleted(ledger: Ledger) -> None:
    ledger.put("vm|web", "e|vm_1", {"state": "back"})
    (old,) = ledger.list_rows("vm|web")
    ledger.put("vm|web", "e|vm_1", {"state": "ready"})
    assert not ledger.put_if_unchanged("vm|web", "e|vm_1", None, old.version)
    (row,) = ledger.list_rows("vm|web")
    for _ in range(2):
        assert ledger.put_if_unchanged("vm|web", "e|vm_1", None, row.version)
    assert ledger.list_rows("vm|web") == []


def test_one_of_two_that_want_the_same_row_gets_it(ledger: Ledger) -> None:
    assert ledger.put_if_unchanged("slot|web", "000", {"event": "a"}, "")
    assert not ledger.put_if_unchanged("slot|web", "000", {"event": "b"}, "")
    (row,) = ledger.list_rows("slot|web")
    assert ledger.put_if_unchanged("slot|web", "000", {"event": ""}, row.version)
    assert not ledger.put_if_unchanged("slot|web", "000", {"event": "b"}, row.version)
    assert not ledger.put_if_unchanged("slot|web", "001", {"event": "b"}, row.version)
    assert [one.content for one in ledger.list_rows("slot|web")] == [{"event": ""}]
