"""A fleet's records in Azurite, Microsoft's emulator of Table Storage, over HTTPS with the VM's identity."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from azurite import Azurite, running_azurite  # noqa: F401 - a fixture
from receiver import wait_until

from scheduled_events_agent import cli
from scheduled_events_agent.fleet import table as table_module
from scheduled_events_agent.fleet.backend import BackendError
from scheduled_events_agent.fleet.table import TableBackend, connect
from scheduled_events_agent.http.transport import tls_context
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings
from scheduled_events_agent.simulator import Simulator


@pytest.fixture(scope="module")
def azure() -> Iterator[Simulator]:
    with Simulator(["web_3"], rate_limit=None) as running:
        yield running


@pytest.fixture
def url(azurite: Azurite) -> str:
    return azurite.create_table()


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """An exchange may take long, but where a test is about that."""
    if request.node.name != "test_nothing_hangs_while_the_table_is_stopped":
        monkeypatch.setattr(table_module, "_EXCHANGE_SECONDS", 120.0)
        monkeypatch.setattr(table_module, "_LIST_SECONDS", 240.0)


@pytest.fixture
def table(url: str, azure: Simulator) -> TableBackend:
    return connect(FleetSettings(table=url), "web", azure.endpoint())


def put(table: TableBackend, key: str, fields: dict[str, str], etag: str = "") -> str:
    new_etag = table.put(key, fields, etag)
    assert new_etag is not None
    return new_etag


def contents(table: TableBackend) -> dict[str, dict[str, str]]:
    return {record.key: dict(record.fields) for record in table.list()}


def test_records_are_written_listed_by_group_and_deleted(table: TableBackend, url: str, azure: Simulator) -> None:
    fields = {"state": "claimed", "not_before": "2026-03-02T12:03:55Z", "empty": "", "text": "\u20ac <&> '\"\\"}
    first = put(table, "e|web_3", fields)
    put(table, "e|web_1", {"state": "ready"})
    put(connect(FleetSettings(table=url), "db", azure.endpoint()), "e|web_3", {"state": "other"})
    assert contents(table) == {"e|web_1": {"state": "ready"}, "e|web_3": fields}
    second = put(table, "e|web_3", {"state": "ready"}, first)
    assert contents(table)["e|web_3"] == {"state": "ready"}, "a record is replaced, not merged"
    assert {record.key: record.etag for record in table.list()}["e|web_3"] == second
    assert table.delete("e|web_3", second)
    assert contents(table) == {"e|web_1": {"state": "ready"}}


def test_each_record_has_an_age_by_the_services_clock(table: TableBackend) -> None:
    put(table, "old", {})
    wait_until(lambda: [True for record in table.list() if (record.age or 0) >= 2], "the record is 2 s old")
    put(table, "new", {})
    ages = {record.key: record.age for record in table.list()}
    assert ages["old"] is not None
    assert ages["new"] is not None
    assert 0 <= ages["new"] < ages["old"]


def test_only_a_record_with_the_etag_that_was_seen_is_changed(table: TableBackend) -> None:
    first = put(table, "k", {"n": "a"})
    assert table.put("k", {"n": "b"}, "") is None
    second = put(table, "k", {"n": "c"}, first)
    assert table.put("k", {"n": "d"}, first) is None
    assert contents(table) == {"k": {"n": "c"}}
    assert table.delete("k", second)
    assert table.put("k", {"n": "e"}, second) is None
    assert contents(table) == {}


def test_only_a_record_with_the_etag_that_was_seen_is_deleted(table: TableBackend) -> None:
    first = put(table, "k", {"n": "a"})
    second = put(table, "k", {"n": "b"}, first)
    assert not table.delete("k", first)
    assert contents(table) == {"k": {"n": "b"}}
    for _ in range(2):
        assert table.delete("k", second)
    assert contents(table) == {}


def test_only_one_of_many_concurrent_creates_succeeds(url: str, azure: Simulator) -> None:
    tables = [connect(FleetSettings(table=url), "web", azure.endpoint()) for _ in range(8)]
    for table in tables:
        table.list()  # with a token, so that all begin at the same time
    created: list[int] = []
    together = threading.Barrier(len(tables))

    def create(number: int) -> None:
        together.wait(120)
        if tables[number].put("k", {"vm": str(number)}, ""):
            created.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(len(tables))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(created) == 1
    assert contents(tables[0]) == {"k": {"vm": str(created[0])}}


def test_many_records_come_in_pages(table: TableBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_RECORDS_PER_PAGE", 7)
    names = [f"web_{number:04}" for number in range(30)]
    for name in names:
        put(table, name, {"state": "ready"})
    assert [record.key for record in table.list()] == names


def test_a_token_is_asked_for_once_with_the_client_id(url: str, azure: Simulator) -> None:
    client_id = azure.vms["web_3"].client_id
    settings = FleetSettings(table=url, credential=FleetCredential(client_id=client_id))
    table = connect(settings, "web", azure.endpoint())
    before = len(azure.requests())
    for _ in range(5):
        table.list()
    asked = [record.path for record in azure.requests()[before:]]
    assert len(asked) == 1
    assert f"client_id={client_id}" in asked[0]
    assert table.clock_skew_seconds is not None
    assert abs(table.clock_skew_seconds) < 60


def test_a_missing_managed_identity_is_reported(url: str, azure: Simulator) -> None:
    other = "00000000-0000-0000-0000-000000000001"
    settings = FleetSettings(table=url, credential=FleetCredential(client_id=other))
    with pytest.raises(
        BackendError, match=f"Identity not found.*this VM has no identity {other}: assign it"
    ) as caught:
        connect(settings, "web", azure.endpoint()).list()
    assert caught.value.kind == "denied"


def test_a_signature_is_read_for_each_request(
    azurite: Azurite, url: str, azure: Simulator, tmp_path: Path
) -> None:
    file, name = tmp_path / "sas", url.rpartition("/")[2]
    settings = FleetSettings(table=url, credential=FleetCredential(sas_file=str(file)))
    table = connect(settings, "web", azure.endpoint())
    with pytest.raises(BackendError, match="cannot be read") as caught:
        table.list()
    assert caught.value.kind == "setup"
    file.write_text(f"?{azurite.sas(name)}\n")
    etag = put(table, "k", {"a": "b"})
    for sas in (azurite.sas(name, permissions="r"), azurite.sas(name, ends_in=timedelta(days=-1))):
        file.write_text(sas)
        with pytest.raises(
            BackendError, match=r"answers 403 .*the shared access signature in .* is not"
        ) as caught:
            table.put("k", {"a": "c"}, etag)
        assert caught.value.kind == "denied"
        assert sas not in repr(caught.value.__dict__) + str(caught.value)
    file.write_text(azurite.sas(name))
    assert contents(table) == {"k": {"a": "b"}}


def test_a_table_that_does_not_exist_is_named(azurite: Azurite, azure: Simulator) -> None:
    table = connect(FleetSettings(table=f"{azurite.account_url}/nosuch"), "web", azure.endpoint())
    requests: tuple[Callable[[], object], ...] = (
        table.list,
        lambda: table.put("k", {"a": "b"}, ""),
        lambda: table.put("k", {"a": "b"}, "W/\"datetime'2026-03-02T12%3A00%3A00.0000000Z'\""),
    )
    for ask in requests:
        with pytest.raises(BackendError, match="there is no table nosuch") as caught:
            ask()
        assert caught.value.kind == "not_found"


def test_a_certificate_that_is_not_trusted_ends_the_exchange(
    azurite: Azurite, url: str, azure: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    tls_context.cache_clear()
    try:
        with pytest.raises(BackendError, match="its certificate is not trusted: self-signed") as caught:
            connect(FleetSettings(table=url), "web", azure.endpoint()).list()
        assert caught.value.kind == "unreachable"
    finally:
        monkeypatch.setenv("SSL_CERT_FILE", str(azurite.certificate))
        tls_context.cache_clear()


@pytest.fixture
def run(
    url: str, azure: Simulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """A command with a policy whose fleet has this table."""
    policy = tmp_path / "policy.yaml"

    def run_command(*words: str, more: str = ", group: web") -> tuple[int, str]:
        fleet = f"fleet: {{table: '{url}', max_events: 2{more}}}"
        policy.write_text(f"imds: {{endpoint: '{azure.endpoint()}'}}\n{fleet}\n")
        code = cli.main((*words, "--config", str(policy)))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run_command


def test_doctor_says_whether_the_table_can_be_used(
    run: Callable[..., tuple[int, str]], azurite: Azurite, azure: Simulator, url: str, tmp_path: Path
) -> None:
    def checked(more: str) -> dict[str, str]:
        checks = json.loads(run("doctor", "--json", "--state-dir", str(tmp_path / "state"), more=more)[1])
        (found,) = [check for check in checks["checks"] if check["check"] == "fleet"]
        return dict(found)

    records = connect(FleetSettings(table=url), "web", azure.endpoint(), partition="doctor")
    assert checked(", group: web")["state"] == "ok"
    assert records.list() == []
    assert checked("")["hint"] == "give all VMs that act together the same fleet.group"
    file = tmp_path / "sas"
    for permissions in ("r", "rad"):
        file.write_text(azurite.sas(url.rpartition("/")[2], permissions=permissions))
        refused = checked(f", group: web, credential: {{sas_file: {file}}}")
        assert refused["state"] == "error"
        assert "the shared access signature in" in refused["message"]
    assert records.list() == []


def test_nothing_hangs_while_the_table_is_stopped(azurite: Azurite, table: TableBackend) -> None:
    etag = put(table, "k", {"a": "b"})
    with azurite.stopped():
        requests: tuple[Callable[[], object], ...] = (table.list, lambda: table.put("k", {"a": "c"}, etag))
        for ask in requests:
            with pytest.raises(BackendError) as caught:
                ask()
            assert caught.value.kind == "timeout"
    wait_until(table.list, "it answers again")
