"""The ledger in Table Storage against Azurite, Microsoft's emulator, over HTTPS with the VM's identity."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from azurite import Azurite, running_azurite  # noqa: F401 - a fixture
from receiver import wait_until

from scheduled_events_agent import cli
from scheduled_events_agent.fleet import table_ledger
from scheduled_events_agent.fleet.ledger import LedgerError, Row
from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.fleet.table_ledger import TableLedger
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.transport import trusting


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
        monkeypatch.setattr(table_ledger, "_EXCHANGE_SECONDS", 120.0)
        monkeypatch.setattr(table_ledger, "_LIST_SECONDS", 240.0)


@pytest.fixture
def table(url: str, azure: Simulator) -> TableLedger:
    return connect(FleetSettings(table=url), azure.endpoint())


def contents(rows: list[Row]) -> dict[str, dict[str, str]]:
    return {row.key: dict(row.content) for row in rows}


def test_rows_are_written_listed_by_key_and_deleted(table: TableLedger) -> None:
    table.put("slot|web", "001", {"event": "b"})
    table.put("slot|web", "000", {"event": "a", "vm": "web_3", "until": "2026-03-02T12:03:55Z", "empty": ""})
    table.put("slot|db", "000", {"event": "c"})
    rows = table.list_rows("slot|web")
    assert [row.key for row in rows] == ["000", "001"]
    assert contents(rows)["000"] == {"event": "a", "vm": "web_3", "until": "2026-03-02T12:03:55Z", "empty": ""}
    table.put("slot|web", "000", {"event": "d"})
    assert contents(table.list_rows("slot|web"))["000"] == {"event": "d"}, "a row is replaced, not merged"
    table.put("slot|web", "000", None)
    table.put("slot|web", "000", None)
    assert contents(table.list_rows("slot|web")) == {"001": {"event": "b"}}


def test_only_a_row_with_the_version_that_was_seen_is_changed(table: TableLedger) -> None:
    assert table.put_if_unchanged("slot|web", "000", {"event": "a"}, "")
    assert not table.put_if_unchanged("slot|web", "000", {"event": "b"}, "")
    (seen,) = table.list_rows("slot|web")
    assert table.put_if_unchanged("slot|web", "000", {"event": "c"}, seen.version)
    assert not table.put_if_unchanged("slot|web", "000", {"event": "d"}, seen.version)
    table.put("slot|web", "000", None)
    assert not table.put_if_unchanged("slot|web", "000", {"event": "e"}, seen.version)
    assert table.list_rows("slot|web") == []


def test_only_a_row_with_the_version_that_was_seen_is_deleted(table: TableLedger) -> None:
    table.put("vm|web", "e|web_1", {"state": "back"})
    (old,) = table.list_rows("vm|web")
    table.put("vm|web", "e|web_1", {"state": "ready"})
    assert not table.put_if_unchanged("vm|web", "e|web_1", None, old.version)
    (seen,) = table.list_rows("vm|web")
    for _ in range(2):
        assert table.put_if_unchanged("vm|web", "e|web_1", None, seen.version)
    assert table.list_rows("vm|web") == []


def test_rows_are_listed_by_how_their_keys_begin(table: TableLedger) -> None:
    for key in ("a|web_1", "a|web_2", "a", "a}", "ab|web_1", "b|web_1"):
        table.put("vm|web", key, {})
    assert [row.key for row in table.list_rows("vm|web", "a|")] == ["a|web_1", "a|web_2"]
    assert len(table.list_rows("vm|web")) == 6


def test_of_many_who_take_the_same_row_one_gets_it(url: str, azure: Simulator) -> None:
    ledgers = [connect(FleetSettings(table=url), azure.endpoint()) for _ in range(8)]
    for ledger in ledgers:
        ledger.list_rows("slot|web")  # with a token, so that all begin at the same time
    has_it: list[int] = []
    together = threading.Barrier(len(ledgers))

    def take(number: int) -> None:
        together.wait(120)
        if ledgers[number].put_if_unchanged("slot|web", "000", {"vm": str(number)}, ""):
            has_it.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(len(ledgers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(has_it) == 1
    assert contents(ledgers[0].list_rows("slot|web")) == {"000": {"vm": str(has_it[0])}}


def test_many_rows_come_in_pages(table: TableLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_ledger, "_ROWS_PER_PAGE", 7)
    names = [f"web_{number:04}" for number in range(30)]
    for name in names:
        table.put("vm|web", name, {"state": "ready"})
    assert [row.key for row in table.list_rows("vm|web", "web_")] == names


def test_a_token_is_asked_for_once_with_the_client_id(url: str, azure: Simulator) -> None:
    client_id = azure.vms["web_3"].client_id
    ledger = connect(FleetSettings(table=url, credential=FleetCredential(client_id=client_id)), azure.endpoint())
    before = len(azure.requests())
    for _ in range(5):
        ledger.put("p", "k", {"a": "b"})
    asked = [record.path for record in azure.requests()[before:]]
    assert len(asked) == 1
    assert f"client_id={client_id}" in asked[0]
    assert ledger.clock_skew_seconds is not None
    assert abs(ledger.clock_skew_seconds) < 60


def test_an_identity_that_this_vm_has_not_is_told(url: str, azure: Simulator) -> None:
    other = "00000000-0000-0000-0000-000000000001"
    ledger = connect(FleetSettings(table=url, credential=FleetCredential(client_id=other)), azure.endpoint())
    with pytest.raises(
        LedgerError, match=f"Identity not found.*this VM has no identity {other}: assign it"
    ) as caught:
        ledger.list_rows("p")
    assert caught.value.kind == "denied"


def test_a_signature_is_read_for_each_request(
    azurite: Azurite, url: str, azure: Simulator, tmp_path: Path
) -> None:
    file, name = tmp_path / "sas", url.rpartition("/")[2]
    ledger = connect(FleetSettings(table=url, credential=FleetCredential(sas_file=str(file))), azure.endpoint())
    with pytest.raises(LedgerError, match="cannot be read") as caught:
        ledger.list_rows("p")
    assert caught.value.kind == "setup"
    file.write_text(f"?{azurite.sas(name)}\n")
    ledger.put("p", "k", {"a": "b"})
    for sas in (azurite.sas(name, permissions="r"), azurite.sas(name, ends_in=timedelta(days=-1))):
        file.write_text(sas)
        with pytest.raises(LedgerError, match=r"answers 403 .*the shared access signature in .* is not") as caught:
            ledger.put("p", "k", {"a": "c"})
        assert caught.value.kind == "denied"
        assert sas not in repr(caught.value.__dict__) + str(caught.value)
    file.write_text(azurite.sas(name))
    assert contents(ledger.list_rows("p")) == {"k": {"a": "b"}}


def test_a_table_that_does_not_exist_is_named(azurite: Azurite, azure: Simulator) -> None:
    ledger = connect(FleetSettings(table=f"{azurite.account_url}/nosuch"), azure.endpoint())
    for ask in (
        lambda: ledger.list_rows("p"),
        lambda: ledger.put("p", "k", {"a": "b"}),
        lambda: ledger.put_if_unchanged("p", "k", {"a": "b"}, ""),
    ):
        with pytest.raises(LedgerError, match="there is no table nosuch") as caught:
            ask()
        assert caught.value.kind == "missing"


def test_a_certificate_that_is_not_trusted_ends_the_exchange(
    azurite: Azurite, url: str, azure: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    trusting.cache_clear()
    try:
        with pytest.raises(LedgerError, match="its certificate is not trusted: self-signed") as caught:
            connect(FleetSettings(table=url), azure.endpoint()).list_rows("p")
        assert caught.value.kind == "unreachable"
    finally:
        monkeypatch.setenv("SSL_CERT_FILE", str(azurite.certificate))
        trusting.cache_clear()


@pytest.fixture
def run(
    url: str, azure: Simulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """A command with a policy whose fleet has this table."""
    policy = tmp_path / "policy.yaml"

    def run_command(*words: str, more: str = "group: web") -> tuple[int, str]:
        fleet = f"fleet: {{table: '{url}', max_events: 2, {more}}}"
        policy.write_text(f"imds: {{endpoint: '{azure.endpoint()}'}}\n{fleet}\n")
        code = cli.main((*words, "--config", str(policy)))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run_command


def test_people_see_and_free_slots_from_any_vm(run: Callable[..., tuple[int, str]], table: TableLedger) -> None:
    until = (datetime.now(UTC) + timedelta(minutes=40)).isoformat()
    row = {"event": "x", "id": "602D9444-D2CD", "vm": "web_1", "until": until, "resources": '["web_1"]'}
    table.put("slot|web", "000", row)
    code, out = run("fleet", "status")
    assert code == 0
    assert "slot 000        event 602D9444 of web_1, until " in out
    assert "slot 001        free" in out
    assert "event 602D9444  awaited: web_1" in out
    assert run("fleet", "release", "602d") == (0, "slot 000 of group web free: event 602D9444-D2CD had it\n")
    status = json.loads(run("fleet", "status", "--json")[1])
    assert [slot["event_id"] for slot in status["slots"]] == ["", ""]
    assert run("fleet", "release", "602d")[0] == 1
    code, out = run("fleet", "status", more="expect: '*'")
    assert (code, out) == (
        1,
        "scheduled-events-agent: this VM is in no scale set: name the group as fleet.group\n",
    )


def test_doctor_says_whether_the_table_can_be_used(
    run: Callable[..., tuple[int, str]], azurite: Azurite, url: str, table: TableLedger, tmp_path: Path
) -> None:
    def checked(more: str) -> dict[str, str]:
        checks = json.loads(run("doctor", "--json", "--state-dir", str(tmp_path / "state"), more=more)[1])
        (found,) = [check for check in checks["checks"] if check["check"] == "fleet"]
        return dict(found)

    assert checked("group: web")["state"] == "ok"
    assert table.list_rows("doctor|web") == []
    assert checked("expect: '*'")["advice"] == "give all VMs that act together the same fleet.group"
    file = tmp_path / "sas"
    for permissions in ("r", "rad"):
        file.write_text(azurite.sas(url.rpartition("/")[2], permissions=permissions))
        refused = checked(f"group: web, credential: {{sas_file: {file}}}")
        assert refused["state"] == "failure"
        assert "the shared access signature in" in refused["finding"]
    assert table.list_rows("doctor|web") == []


def test_nothing_hangs_while_the_table_is_stopped(azurite: Azurite, table: TableLedger) -> None:
    table.put("p", "k", {"a": "b"})
    with azurite.stopped():
        for ask in (lambda: table.list_rows("p"), lambda: table.put("p", "k", {"a": "c"})):
            with pytest.raises(LedgerError) as caught:
                ask()
            assert caught.value.kind == "timeout"
    wait_until(lambda: table.list_rows("p"), "it answers again")
