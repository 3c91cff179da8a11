"""The pages of a daemon that runs: it protects the machine with or without a port, and no client keeps it busy."""

import http.client
import io
import json
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from msgspec.structs import replace
from static_policy import Given
from test_daemon import open_pages, running

from scheduled_events_agent.cli.status import ask_status
from scheduled_events_agent.daemon import poller
from scheduled_events_agent.daemon.daemon import Daemon
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.policy.settings import AgentSettings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.status import JournalRecord, Status
from scheduled_events_agent.store import Store
from scheduled_events_agent.telemetry import log
from scheduled_events_agent.web import endpoints as module
from scheduled_events_agent.web.server import Response
from scheduled_events_agent.web.static import HEADERS

OUTPUT = "x" * 4096


@pytest.fixture
def lines() -> Iterator[list[Mapping[str, object]]]:
    """The log's lines so far."""
    said: list[Mapping[str, object]] = []
    log.set_up("info", "json", stream=io.StringIO(), on_entry=lambda _, entry: said.append(entry))
    yield said
    structlog.reset_defaults()


def get(port: int, path: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def wait_until(test: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_agent_whose_port_is_in_use_works_and_serves_its_endpoints_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Mapping[str, object]]
) -> None:
    monkeypatch.setattr(module, "_WEB_RETRY_SECONDS", 0.2)
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    settings = AgentSettings(listen=f"127.0.0.1:{port}")
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint(), agent=settings) as daemon:
        assert azure.wait_approved(azure.schedule("Reboot", notice_seconds=600)).approved_at is not None
        wait_until(lambda: daemon._endpoints.failure)
        failure = daemon._endpoints.failure
        assert failure.startswith(f"cannot listen on 127.0.0.1:{port}: ")
        assert failure.endswith("; set agent.listen to a free ADDRESS:PORT, or to off")
        assert daemon._status.status().health == (f"The web server is not listening: {failure}.",)
        assert f"The web server is not listening: {failure}" in daemon._reporter.line()
        wait_until(lambda: sum(line["message"] == "agent started" for line in lines))
        said = [line for line in lines if "cannot be opened" in str(line["message"])]
        assert [(line["level"], line["reason"]) for line in said] == [
            ("error", failure)
        ]  # once, though tried often
        other.close()
        wait_until(lambda: daemon.web)
        assert get(port, "/healthz")[1] == "ok\n"
        wait_until(lambda: any(line["message"] == "the web server is listening" for line in lines))
        assert "not shown" not in daemon._reporter.line()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_agent_that_never_gets_its_port_can_be_stopped(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, Simulator(vms=("vm-1",)) as azure:
        settings = AgentSettings(listen=f"127.0.0.1:{other.getsockname()[1]}")
        with running(tmp_path, azure.endpoint(), agent=settings) as daemon:
            azure.wait_polls(1)
            assert daemon.web is None


def test_endpoints_with_access_control_are_not_served_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WEB_RETRY_SECONDS", 0.2)
    file = tmp_path / "web.yml"
    settings = AgentSettings(listen="127.0.0.1:0", web_config=str(file))
    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path / "state", azure.endpoint(), agent=settings) as daemon,
    ):
        azure.wait_polls(2)
        wait_until(lambda: daemon._endpoints.failure)
        assert daemon.web is None
        assert daemon._endpoints.failure.startswith(f"{file}: cannot be read: ")
        file.write_text("basic_auth_users: {ada: x}\n")
        wait_until(lambda: "reverse proxy" in daemon._endpoints.failure)
        assert daemon.web is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen", "127.0.0.1:1"),
        ("listen_names", ("foo.example",)),
        ("web_config", "/etc/scheduled-events-agent/web.yml"),
        ("state_dir", "/var/lib/other"),
    ],
)
def test_a_reload_reports_changes_that_take_effect_at_the_next_start(
    tmp_path: Path, lines: list[Mapping[str, object]], key: str, value: object
) -> None:
    agent = AgentSettings(listen="127.0.0.1:0")

    def needs_restart(daemon: Daemon, **changes: Any) -> list[str]:
        settings = replace(daemon._engine.settings, agent=replace(agent, **changes))
        read_at = daemon._policy.in_force.read_at
        daemon._policy.file = Given(lambda: settings)
        daemon.reload()
        wait_until(lambda: daemon._policy.in_force.read_at != read_at)
        assert daemon.web is not None
        policy = json.loads(get(daemon.web.port, "/status")[1])["policy"]
        shown = daemon._status.status().policy
        assert shown is not None
        assert shown.needs_restart == tuple(policy["needs_restart"])
        return list(policy["needs_restart"])

    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint(), agent=agent) as daemon:
        wait_until(lambda: daemon.web)
        assert needs_restart(daemon) == []
        assert needs_restart(daemon, **{key: value}) == [f"agent.{key}"]
        assert needs_restart(daemon, **{key: value}, mode="observe") == [f"agent.{key}"]
        assert needs_restart(daemon) == []  # it is as it was at the start again
    said = [line for line in lines if "need a restart" in str(line["message"])]
    assert [(line["level"], line["keys"]) for line in said] == [("warning", (f"agent.{key}",))]


def test_a_request_during_rendering_gets_the_new_response() -> None:
    began, may_end = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> Response:
        made.append(len(made))
        if len(made) > 1:
            began.set()
            assert may_end.wait(60.0)
        return Response(HTTPStatus.OK, str(made[-1]).encode())

    shared = module._CachedResponse(make, 0.0)
    assert shared().body == b"0"
    got: list[bytes] = []
    first = threading.Thread(target=shared)
    first.start()
    assert began.wait(60.0)
    second = threading.Thread(target=lambda: got.append(shared().body))
    second.start()
    may_end.set()
    first.join()
    second.join()
    assert got in ([b"1"], [b"2"])  # the old one was 0


@pytest.mark.parametrize(
    "listen", ["999.1.1.1:9769", "127.0.0.1", "127.0.0.1:99999", "[::g]:1", "[127.0.0.1:1", ":1"]
)
def test_an_address_that_can_never_work_is_rejected_at_once(listen: str) -> None:
    with pytest.raises(Exception, match="expected ADDRESS:PORT or off; got") as caught:
        parse_settings(f"agent: {{listen: '{listen}'}}", "p")
    assert str(caught.value) == f'p:1: agent.listen: expected ADDRESS:PORT or off; got "{listen}"'


def test_history_is_read_once_a_second_for_any_number_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    open_readonly = Store.open_readonly

    def counting(directory: Path) -> Store:
        made.append(time.monotonic())
        return open_readonly(directory)

    monkeypatch.setattr(Store, "open_readonly", counting)
    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path, azure.endpoint()) as daemon,
    ):
        wait_until(daemon._engine.names)
        wait_until(lambda: daemon.web)
        assert daemon.web is not None
        began = time.monotonic()
        answers = [get(daemon.web.port, "/history") for _ in range(100)]
        passed = time.monotonic() - began
        assert 1 <= len(made) <= passed / module._PAGE_SECONDS + 1
    assert {answer.status for answer, _ in answers} == {200}


def test_simultaneous_status_requests_share_one_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path, azure.endpoint(), agent=AgentSettings(listen="127.0.0.1:0")) as daemon,
    ):
        wait_until(lambda: daemon.web)
        assert daemon.web is not None
        make = daemon._endpoints._handlers()["/status"]
        polls, began = azure.polls(), time.monotonic()
        answers = [make() for _ in range(200)]
        changes = 3 * (azure.polls() - polls + 1)  # a poll changes when it last succeeded, and what is known
        most = (time.monotonic() - began) / module._STATUS_SECONDS + changes
        assert 1 <= len({id(answer.body) for answer in answers}) <= most
        monkeypatch.setattr(daemon._endpoints, "failure", "a new one")  # what has changed is shown at once
        assert b"a new one" in make().body
        before = msgspec.json.decode(get(daemon.web.port, "/status")[1])["at"]
        wait_until(lambda: daemon.web and msgspec.json.decode(get(daemon.web.port, "/status")[1])["at"] > before)


def test_the_page_and_its_files_are_served_with_a_content_security_policy(tmp_path: Path) -> None:
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        wait_until(lambda: daemon.web)
        assert daemon.web is not None
        answer, page = get(daemon.web.port, "/")
        loaded = re.findall(r' (?:src|href)="([^"]+)"', page)
        assert {name: answer.getheader(name) for name in HEADERS} == HEADERS
        assert loaded == ["data:,", "status.css", "status.js", "status"]
        for name in loaded[1:]:
            assert get(daemon.web.port, f"/{name}")[0].status == 200


@pytest.mark.skipif(sys.platform == "win32", reason="paths are text on Windows")
def test_the_status_of_an_agent_whose_directory_has_no_text_as_its_name(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"st\xffate")
    with Simulator(vms=("vm-1",)) as azure, running(place, azure.endpoint()) as daemon:
        wait_until(lambda: daemon.web)
        assert daemon.web is not None
        answer, page = get(daemon.web.port, "/status")
        assert answer.status == 200
        assert msgspec.json.decode(page)["state_file"] == str(tmp_path / "st?ate" / "state.db")
        assert isinstance(ask_status(place, "1"), Status)


def test_a_hung_disk_keeps_the_status_and_the_last_known_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE_TIMEOUT_SECONDS", 0.2)
    open_readonly, may_go_on, hangs = Store.open_readonly, threading.Event(), threading.Event()

    def hanging(directory: Path) -> Store:
        hangs.set()
        assert may_go_on.wait(60)
        return open_readonly(directory)

    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path, azure.endpoint()) as daemon,
    ):
        wait_until(daemon._engine.names)
        wait_until(lambda: daemon.web)
        assert daemon.web is not None
        port = daemon.web.port
        monkeypatch.setattr(Store, "open_readonly", hanging)
        first = threading.Thread(target=get, args=(port, "/history"))
        first.start()
        assert hangs.wait(60.0)
        assert get(port, "/history")[0].status == 503  # there is no view yet
        assert get(port, "/healthz")[1] == "ok\n"
        assert '"headline": "Nothing is pending"' in get(port, "/status")[1]
        may_go_on.set()
        first.join()
        may_go_on.clear()
        hangs.clear()
        time.sleep(module._PAGE_SECONDS)  # what was read is old then
        second = threading.Thread(target=get, args=(port, "/history"))
        second.start()
        assert hangs.wait(60.0)
        assert get(port, "/history")[0].status == 200
        may_go_on.set()
        second.join()


def test_history_has_the_records_about_the_agent_without_what_only_the_journal_may_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "_PAUSE_SECONDS", inf)  # a busy machine is paused, too
    began = datetime.now(UTC) - timedelta(hours=1)
    rejected = "p.yaml:7: hooks.drain.run: expected a list such as [one, two]; got SECRET"
    with closing(Store.open(tmp_path, began)) as store:
        for number in range(25):
            at = began + timedelta(seconds=number)
            store.record("agent_started", "version 0.1.0, mode act", at, detail="SECRET boot")
            store.record("machine_paused", f"was paused for {number}.0s", at)
            store.record("notification_lost", f"pager: seen of E{number}: HTTP 422", at)
            store.record("reload_rejected", rejected, at)
            store.record("on_clear", "hook x: cannot be started (no such file): /opt/SECRET (not_started)", at)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        azure.wait_approved(azure.schedule("Reboot", notice_seconds=600))
        daemon.reload()
        wait_until(lambda: any(record.kind == "reloaded" for record in load_agent_records(tmp_path)))
        answer, body = get(open_pages(daemon).port, "/history")
        journal = load_agent_records(tmp_path)
    assert answer.status == 200
    items = msgspec.json.decode(body)["histories"]
    (event,) = [item for item in items if item["event"]]
    records = [item["records"][0] for item in items if item["event"] is None]
    assert items.index(event) < items.index(
        next(item for item in items if item["records"][0]["kind"] == "reloaded")
    )
    kinds = {record.kind for record in journal}
    expected = [[r for r in journal if r.kind == kind][-module._RECENT :] for kind in kinds]
    in_journal = sorted((record.at, record.kind) for records in expected for record in records)
    assert sorted((datetime.fromisoformat(one["at"]), one["kind"]) for one in records) == in_journal
    texts = {kind: [one["text"] for one in records if one["kind"] == kind] for kind in kinds}
    assert texts["machine_paused"] == [f"was paused for {number}.0s" for number in range(5, 25)]
    assert texts["notification_lost"][-1] == "pager: seen of E24: HTTP 422"
    assert texts["reloaded"] == ["rules: all"]
    assert set(texts["on_clear"]) == {"the command history says what its hooks did"}
    assert set(texts["reload_rejected"]) == {
        "the policy file is rejected; the policy that was accepted last stays in force"
    }
    assert "SECRET" not in body


def load_agent_records(state_dir: Path) -> list[JournalRecord]:
    with closing(Store.open_readonly(state_dir)) as store:
        return store.load_records()


def test_the_history_of_ninety_busy_days_is_read_quickly(tmp_path: Path) -> None:
    """4,000 events with 60,000 entries, which is 45 a day; most of the time goes into reading the last twenty."""
    with Simulator(vms=("vm-1",)) as azure:
        with running(tmp_path, azure.endpoint()):
            azure.wait_approved(azure.schedule("Reboot", notice_seconds=600))
            with closing(Store.open_client(tmp_path)) as store:
                (one,) = store.load_workflows()
        database = sqlite3.connect(tmp_path / "state.db")
        begin = datetime.now(UTC) - timedelta(days=90)
        at = [
            (begin + timedelta(minutes=number * 32)).isoformat(timespec="microseconds") for number in range(4000)
        ]
        closed = msgspec.structs.replace(one, phase="closed", outcome="completed", is_over=True)
        rows = [
            (f"w{n}", f"e{n}", 0, at[n], msgspec.json.encode(msgspec.structs.replace(closed, id=f"w{n}")).decode())
            for n in range(4000)
        ]
        sql = "INSERT INTO workflow (id, event_id, is_open, updated_at, body) VALUES (?, ?, ?, ?, ?)"
        database.executemany(sql, rows)
        sql = "INSERT INTO journal (at, workflow_id, event_id, kind, stage, hook, outcome, text, detail) VALUES "
        entries = [(at[n], f"w{n}", f"e{n}", "hook_finished", OUTPUT if k % 5 == 0 else "") for n in range(4000)
                   for k in range(15)]  # fmt: skip
        database.executemany(
            sql + "(?, ?, ?, ?, 'prepare', 'drain', 'succeeded', 'hook drain succeeded', ?)", entries
        )
        database.commit()
        database.close()
        with running(tmp_path, azure.endpoint()) as daemon:
            azure.wait_polls(1)
            began = time.thread_time()
            page = daemon._endpoints._history_page()
            seconds = time.thread_time() - began
    assert page.status == 200
    histories = msgspec.json.decode(page.body)["histories"]
    assert [len(history["records"]) for history in histories if history["event"]] == [15] * 20
    assert OUTPUT.encode()[:20] not in page.body
    assert len(page.body) < 700_000
    print(f"made in {seconds:.3f} s, {len(page.body):,} bytes")
    assert seconds < 5  # 0.02 s where nothing else runs
