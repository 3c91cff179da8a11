"""The simulated table, asked as the agents of a fleet ask it, does what their backend must."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from scheduled_events_agent.fleet import table as table_module
from scheduled_events_agent.fleet.backend import Backend
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings, parse_table
from scheduled_events_agent.simulator.table import SimulatedTable


@pytest.fixture
def backends(tmp_path: Path) -> Iterator[tuple[Backend, Backend]]:
    """Backends of two groups in one table."""
    sas_file = tmp_path / "sas"
    sas_file.touch(mode=0o600)
    sas_file.write_text(SimulatedTable.SAS)
    with SimulatedTable() as table:
        settings = FleetSettings(table=table.url, credential=FleetCredential(sas_file=str(sas_file)))
        web, db = (connect(settings, group, "http://127.0.0.1:9") for group in ("web", "db"))
        yield web, db


@pytest.fixture
def backend(backends: tuple[Backend, Backend]) -> Backend:
    return backends[0]


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
            backend = connect(fleet, "web", told[0]["url"])
            assert backend.put("a", {}, "")
            assert [record.key for record in backend.list()] == ["a"]
        finally:
            process.kill()


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0", "192.0.2.1"])
def test_its_address_is_one_that_a_policy_may_name(bind: str) -> None:
    with SimulatedTable(bind=bind) as table:
        assert parse_table(table.url) is not None
        assert httpx.get(table.url).status_code == 400


def put(backend: Backend, key: str, fields: dict[str, str], etag: str = "") -> str:
    new_etag = backend.put(key, fields, etag)
    assert new_etag is not None
    assert new_etag != etag
    return new_etag


def test_a_group_has_its_own_records(backends: tuple[Backend, Backend]) -> None:
    web, db = backends
    etags = {key: put(web, key, {"state": f"of {key}"}) for key in ("b", "a")}
    put(db, "a", {})
    records = web.list()
    assert [(record.key, record.etag, record.fields) for record in records] == [
        ("a", etags["a"], {"state": "of a"}),
        ("b", etags["b"], {"state": "of b"}),
    ]
    assert all(record.age is not None and 0 <= record.age < 300 for record in records)
    assert [record.fields for record in db.list()] == [{}]


def test_a_record_is_created_only_if_there_is_none(backend: Backend) -> None:
    first = put(backend, "e|vm_1", {"state": "requested"})
    assert backend.put("e|vm_1", {"state": "ready"}, "") is None
    assert backend.delete("e|vm_1", first)
    put(backend, "e|vm_1", {"state": "ready"})
    assert [record.fields for record in backend.list()] == [{"state": "ready"}]


def test_a_record_is_replaced_only_with_its_etag(backend: Backend) -> None:
    first = put(backend, "e|vm_1", {"state": "claimed", "waits_for": "x"})
    second = put(backend, "e|vm_1", {"state": "ready"}, first)
    assert backend.put("e|vm_1", {"state": "claimed"}, first) is None
    assert [(record.etag, record.fields) for record in backend.list()] == [(second, {"state": "ready"})]
    assert backend.put("e|vm_2", {"state": "ready"}, second) is None, "there is none that could have it"


def test_a_record_is_deleted_only_with_its_etag(backend: Backend) -> None:
    first = put(backend, "e|vm_1", {"state": "claimed"})
    second = put(backend, "e|vm_1", {"state": "ready"}, first)
    assert not backend.delete("e|vm_1", first)
    assert len(backend.list()) == 1
    assert backend.delete("e|vm_1", second)
    assert backend.delete("e|vm_1", second), "it is gone"
    assert backend.list() == []


def test_many_records_come_in_pages(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_RECORDS_PER_PAGE", 3)
    keys = [f"e|vm_{number}" for number in range(7)]
    for key in keys:
        put(backend, key, {})
    assert [record.key for record in backend.list()] == keys


@pytest.mark.parametrize(
    ("method", "query", "body"),
    [
        ("POST", "", b'{"PartitionKey": "p"}'),
        ("POST", "", b'{"PartitionKey": "p", "RowKey": 7}'),
        ("PUT", "(PartitionKey='p',RowKey='k')", b"{}"),
        ("DELETE", "(PartitionKey='p',RowKey='k')", b""),
        ("GET", "?$filter=RowKey%20eq%20'k'", b""),
        ("GET", "?$filter=PartitionKey%20eq%20'p'&$top=all", b""),
    ],
)
def test_a_request_that_no_agent_makes_is_rejected(method: str, query: str, body: bytes) -> None:
    with SimulatedTable() as table:
        answer = httpx.request(method, f"{table.url}{query}", content=body)
    assert (answer.status_code, answer.json()["odata.error"]["code"]) == (400, "InvalidInput")
