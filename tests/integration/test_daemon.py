"""The daemon inside this process, where its threads and its time limits can be reached."""

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace
from static_policy import Given, loaded

from scheduled_events_agent import host
from scheduled_events_agent.daemon import daemon as module
from scheduled_events_agent.daemon import status_source
from scheduled_events_agent.daemon.daemon import Daemon
from scheduled_events_agent.daemon.poller import Poller
from scheduled_events_agent.daemon.service_status import ServiceReporter
from scheduled_events_agent.daemon.status_source import StatusSource
from scheduled_events_agent.engine import HookDone, RunOnClear, not_run_result
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import AgentSettings, ImdsSettings, LogSettings, Settings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.store import CommitResult, Store
from scheduled_events_agent.web import endpoints as pages
from scheduled_events_agent.web.server import WebServer
from scheduled_events_agent.workflow import Context, RunHook, Transition, Workflow, signals

RULES = (Rule(name="all", approve="immediately"),)
AGENT = AgentSettings(listen="127.0.0.1:0", log=LogSettings(level="error", format="json"))


@contextmanager
def running(
    directory: Path,
    endpoint: str,
    rules: tuple[Rule, ...] = RULES,
    hooks: dict[str, Hook] = {},  # noqa: B006 - no test changes it
    agent: AgentSettings = AGENT,
    *,
    request_timeout: float = 10.0,
) -> Iterator[Daemon]:
    imds = ImdsSettings(endpoint=endpoint, poll_interval=0.25, request_timeout=request_timeout)
    settings = Settings(imds=imds, agent=agent, rules=rules, hooks=hooks)
    directory.mkdir(exist_ok=True)
    store = Store.open(directory, datetime.now(UTC))
    daemon = Daemon(loaded(settings), Given(lambda: settings), store)
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        yield daemon
    finally:
        daemon.stop()
        thread.join(60.0)
        store.close()
    assert not thread.is_alive()


def open_pages(daemon: Daemon) -> WebServer:
    """Serve the pages; they open while the first poll is under way."""
    assert daemon._endpoints.has_tried.wait(60.0)
    assert daemon.web is not None, daemon._endpoints.failure
    return daemon.web


def get(daemon: Daemon, path: str) -> tuple[int, str]:
    web = open_pages(daemon)
    if path == "/metrics":
        time.sleep(pages._METRICS_SECONDS)  # the page may be so old
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_health_endpoint_reports_when_the_engine_hangs_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_source, "_STALL_SECONDS", 1.5)
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.2)
    hangs, may_go_on = threading.Event(), threading.Event()

    def commit(*_: object) -> CommitResult:
        hangs.set()
        may_go_on.wait(60.0)
        return CommitResult()

    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        azure.wait_polls(1)
        assert get(daemon, "/healthz") == (200, "ok\n")
        monkeypatch.setattr(Store, "commit", commit)
        azure.schedule("Reboot", notice_seconds=60)
        assert hangs.wait(60.0)
        threading.Event().wait(2.0)
        status, text = get(daemon, "/healthz")
        assert status == 503
        assert text == "The engine has run no cycle for more than 1.5s.\n"
        azure.wait_polls(2)  # polling waits for nothing
        monkeypatch.undo()
        may_go_on.set()
        azure.wait_until(lambda: get(daemon, "/healthz") == (200, "ok\n"), "it was healthy again")


def test_the_health_page_names_an_event_that_a_bug_keeps_from_being_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> Transition:
        raise OverflowError("a bug")

    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        with monkeypatch.context() as patch:
            patch.setattr(signals, "_create", faulty)
            event = azure.schedule("Reboot", notice_seconds=60)
            told = (503, f"Event {event} cannot be handled: a bug in the agent (OverflowError); see the log.\n")
            azure.wait_until(lambda: get(daemon, "/healthz") == told, "the page said so")
            status = json.loads(get(daemon, "/status")[1])
            assert status["health"] == [told[1].removesuffix("\n")]
        azure.wait_until(lambda: get(daemon, "/healthz") == (200, "ok\n"), "it was handled")


def test_an_event_skipped_by_a_bug_is_created_in_the_next_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = signals._create
    failures: list[str] = []
    admitted: list[str] = []

    def faulty(event: ScheduledEvent, context: Context) -> Transition | None:
        if event.type == "Freeze" and (len(failures) < 2 or not admitted):
            failures.append(event.id)
            raise RuntimeError("a bug")
        admitted.append(event.id)
        return admit(event, context)

    monkeypatch.setattr(signals, "_create", faulty)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        azure.wait_polls(1)
        freeze = azure.schedule("Freeze", notice_seconds=60)
        reboot = azure.schedule("Reboot", notice_seconds=60)
        first, second = azure.wait_approved(reboot), azure.wait_approved(freeze)
        assert first.approved_at is not None
        assert second.approved_at is not None
        assert first.approved_at < second.approved_at
        assert set(failures) == {freeze}
        assert f"scheduled_events_bugs_total {len(failures)}.0" in get(daemon, "/metrics")[1]


class Told(host.ServiceManager):
    """A service manager that keeps the messages it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def notify(self, state: str, status: str) -> None:
        del status
        self.words.append(state)


def test_a_reload_during_the_start_makes_no_agent_ready() -> None:
    manager, poller, on_ready = Told(), mock.create_autospec(Poller, instance=True), mock.Mock()
    poller.has_tried = False
    now = mock.Mock(cycle_began_at=0.0)
    status = mock.create_autospec(StatusSource, instance=True)
    status.headline.return_value = "Nothing is pending"
    reporter = ServiceReporter(manager, lambda: now, poller, status, running=tuple, on_ready=on_ready)
    reporter.report_reloading()
    reporter.report_reloaded()
    assert manager.words == []
    poller.has_tried = True
    reporter.report()
    assert (manager.words, on_ready.call_count) == (["ready"], 1)


def test_a_policy_that_is_slow_to_read_blocks_nothing(tmp_path: Path) -> None:
    reads, may_go_on = threading.Semaphore(0), threading.Semaphore(0)
    readings: list[int] = []

    def load_slowly() -> Settings:
        readings.append(len(readings) + 1)
        reads.release()
        assert may_go_on.acquire(timeout=60.0)
        name = f"reading-{readings[-1]}"
        return replace(settings, rules=(Rule(name=name, approve="immediately"),))

    with Simulator(vms=("vm-1",)) as azure:
        imds = ImdsSettings(endpoint=azure.endpoint(), poll_interval=0.25)
        settings = Settings(imds=imds, agent=AGENT, rules=RULES)
        store, manager = Store.open(tmp_path, datetime.now(UTC)), Told()
        daemon = Daemon(loaded(settings), Given(load_slowly), store, service=manager)
        thread = threading.Thread(target=daemon.run)
        thread.start()
        try:
            azure.wait_until(lambda: manager.words == ["ready"], "it is ready")
            daemon.reload()
            assert reads.acquire(timeout=60.0)
            azure.wait_approved(azure.schedule("Reboot", notice_seconds=60))
            assert manager.words == ["ready", "reloading"]
            for _ in range(3):
                daemon.reload()
            azure.wait_until(lambda: manager.words == ["ready", *["reloading"] * 4], "all were heard")
            may_go_on.release()
            # A file read before the last request is not put in force: it may have changed since.
            assert reads.acquire(timeout=60.0)
            assert daemon._engine.settings.rules == RULES
            may_go_on.release()
            azure.wait_until(lambda: manager.words[-1] == "ready", "it has ended")
            assert [rule.name for rule in daemon._engine.settings.rules] == ["reading-2"]
            assert readings == [1, 2]
            # A reload under way does not hold up the end.
            daemon.reload()
            assert reads.acquire(timeout=60.0)
        finally:
            daemon.stop()
            thread.join(60.0)
            may_go_on.release()
            store.close()
        assert not thread.is_alive()
        assert manager.words[-1] == "stopping"


def test_a_waiting_on_clear_hook_is_dropped_with_the_workflow_of_another_vm(tmp_path: Path) -> None:
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        daemon = Daemon(loaded(Settings()), Given(Settings), store)
        # The workflows were discarded while the on_clear hook was being ended.
        daemon._engine._hook_runs._delayed = [
            RunHook(workflow_id="another's", stage="prepare", hook="drain", run=1)
        ]
        daemon._engine.receive(
            HookDone(RunOnClear("uncordon"), not_run_result("uncordon", "canceled", "canceled"))
        )
        assert daemon._engine._hook_runs._delayed == []
        assert not daemon._executor.is_busy()
    finally:
        store.close()


def test_a_thread_that_ends_by_a_bug_ends_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Poller, "run", poll)
    settings = replace(Settings(), agent=AgentSettings(listen="off", log=LogSettings(level="error")))
    store = Store.open(tmp_path, datetime.now(UTC))
    try:
        with Simulator() as azure:
            imds = ImdsSettings(endpoint=azure.endpoint())
            with pytest.raises(RuntimeError, match=r"^a bug$"):
                Daemon(loaded(replace(settings, imds=imds)), Given(lambda: settings), store).run()
    finally:
        store.close()


def test_a_hook_that_failed_during_a_canceled_shutdown_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_down, was_asked = [True], threading.Event()

    def is_shutting_down() -> bool:
        answer = goes_down[0]
        was_asked.set()
        return answer

    monkeypatch.setattr(processes, "is_shutting_down", is_shutting_down)
    marker = tmp_path / "up"
    code = f"import pathlib, sys; sys.exit(not pathlib.Path({str(marker)!r}).exists())"
    rules = (Rule(name="all", prepare=("drain",), approve="when-prepared"),)
    hooks = {"drain": Hook(run=(sys.executable, "-I", "-S", "-c", code))}
    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path / "state", azure.endpoint(), rules=rules, hooks=hooks),
    ):
        event = azure.schedule("Reboot", notice_seconds=600)
        assert was_asked.wait(60.0)
        marker.touch()
        goes_down[0] = False
        azure.wait_approved(event)


def test_a_hook_that_is_canceled_while_the_machine_goes_down_does_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "is_shutting_down", lambda: True)
    started, recovered = tmp_path / "started", tmp_path / "recovered"
    drain = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    resume = f"import pathlib; pathlib.Path({str(recovered)!r}).touch()"
    rules = (Rule(name="all", prepare=("drain",), recover=("resume",), approve="when-prepared"),)
    hooks = {
        "drain": Hook(run=(sys.executable, "-I", "-S", "-c", drain)),
        "resume": Hook(run=(sys.executable, "-I", "-S", "-c", resume)),
    }
    with (
        Simulator(vms=("vm-1",)) as azure,
        running(tmp_path / "state", azure.endpoint(), rules=rules, hooks=hooks),
    ):
        event = azure.schedule("Reboot", notice_seconds=600)
        azure.wait_until(started.exists, "the hook ran")
        azure.cancel(event)
        azure.wait_until(recovered.exists, "what the canceled hook had begun was undone")


def test_a_reload_switches_between_observe_and_act(tmp_path: Path) -> None:
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        azure.wait_polls(2)
        acting = daemon._engine.settings
        observing = replace(acting, agent=replace(AGENT, mode="observe"))
        daemon._policy.file = Given(lambda: observing)
        daemon.reload()
        azure.wait_until(lambda: '"mode": "observe"' in get(daemon, "/status")[1], "the agent observed")
        event = azure.schedule("Reboot", notice_seconds=600)
        azure.wait_until(lambda: event in get(daemon, "/status")[1], "it saw the event")
        assert "scheduled_events_acting 0.0" in get(daemon, "/metrics")[1]
        before = len(azure.requests())
        azure.wait_until(lambda: len(azure.requests()) > before + 4, "it polled on")
        assert azure.approvals() == ()
        daemon._policy.file = Given(lambda: acting)
        daemon.reload()
        assert azure.wait_approved(event).approved_at is not None
        assert "scheduled_events_acting 1.0" in get(daemon, "/metrics")[1]


def test_a_restarted_agent_applies_its_new_policy_to_pending_events(tmp_path: Path) -> None:
    by_hand, never = Rule(name="by-hand", approve="manual"), Rule(name="never", approve="never")

    def has_decided(daemon: Daemon, rule: str) -> bool:
        return daemon.web is not None and f'"rule": "{rule}"' in get(daemon, "/status")[1]

    with Simulator(vms=("vm-1",)) as azure:
        with running(tmp_path, azure.endpoint(), rules=(by_hand,)) as daemon:
            azure.schedule("Reboot", notice_seconds=600)
            azure.wait_until(lambda: has_decided(daemon, "by-hand"), "the event was decided on")
        with running(tmp_path, azure.endpoint(), rules=(never,)) as daemon:
            azure.wait_until(lambda: has_decided(daemon, "never"), "it was decided on anew")


def test_a_restarted_agent_is_ready_only_when_its_preparation_state_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = Rule(name="drain", drain_for=600.0, approve="manual", lead=86400.0)
    load, daemons, answers = Store.load_workflows, list[Daemon](), list[int]()

    def slow_load(store: Store) -> list[Workflow]:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not answers:
            time.sleep(0.05)
            answers.extend(get(daemon, "/readyz")[0] for daemon in daemons if daemon.web)
        return load(store)

    with Simulator(vms=("vm-1",)) as azure:
        with running(tmp_path, azure.endpoint(), rules=(drain,)) as daemon:
            azure.schedule("Reboot", notice_seconds=3600)
            azure.wait_until(lambda: get(daemon, "/readyz")[0] == 503, "it drains")
        monkeypatch.setattr(Store, "load_workflows", slow_load)
        with running(tmp_path, azure.endpoint(), rules=(drain,)) as daemon:
            daemons.append(daemon)
            azure.wait_until(lambda: bool(daemon.web), "its pages are shown")
            assert (answers, get(daemon, "/readyz")[0]) == ([], 503)
