"""Operators wake the agent, and nothing else does while nothing happens."""

import stat
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from test_daemon import running

from scheduled_events_agent import host
from scheduled_events_agent.cli import operator
from scheduled_events_agent.daemon import daemon as module
from scheduled_events_agent.daemon import watchdog
from scheduled_events_agent.daemon.daemon import Daemon
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.store import Store

PATIENCE = 60.0
NEVER = 3600.0


@pytest.fixture(autouse=True)
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs a cycle only for news and for operators' commands."""
    monkeypatch.setattr(module, "_TICK_SECONDS", NEVER)
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", NEVER)
    monkeypatch.setattr(operator, "_ANSWER_WITHIN_SECONDS", PATIENCE)


def wait_asleep(daemon: Daemon, azure: Simulator) -> None:
    """It waits for the hour to pass, or for news."""
    azure.wait_until(lambda: daemon._reporter.reported is not None, "it has said that it is ready", PATIENCE)
    cycle_began_at = None
    while cycle_began_at != daemon._engine.cycle_began_at:
        cycle_began_at = daemon._engine.cycle_began_at
        azure.wait_polls(3)


def test_a_wake_up_ends_the_wait_and_a_close_ends_it_for_good(tmp_path: Path) -> None:
    path, heard = tmp_path / "wake", [threading.Event(), threading.Event()]
    host.wake(path)  # no agent is there
    wake_up = host.WakeUp(path)

    def listen() -> None:
        while wake_up.wait():
            heard[0].set()
        heard[1].set()

    thread = threading.Thread(target=listen)
    thread.start()
    host.wake(path)
    assert heard[0].wait(PATIENCE)
    assert not heard[1].is_set()
    wake_up.close()
    assert heard[1].wait(PATIENCE)
    thread.join(PATIENCE)
    host.wake(path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipe there: the directory's list decides")
@pytest.mark.parametrize("leave", [Path.touch, lambda path: path.symlink_to("/dev/null")], ids=["file", "link"])
def test_a_file_in_place_of_the_pipe_is_replaced(tmp_path: Path, leave: Callable[[Path], None]) -> None:
    path = tmp_path / "wake"
    leave(path)
    wake_up = host.WakeUp(path)
    assert stat.S_ISFIFO(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    host.wake(path)
    assert wake_up.wait()
    wake_up.close()
    assert not wake_up.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows nothing is written")
def test_a_wake_up_writes_through_no_link(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    (tmp_path / "wake").symlink_to(file)
    host.wake(tmp_path / "wake")
    assert file.read_text() == "kept"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipe there to be full")
def test_an_unresponsive_agent_does_not_block_an_operator(tmp_path: Path) -> None:
    wake_up = host.WakeUp(tmp_path / "wake")
    for _ in range(100_000):  # more than a pipe holds
        host.wake(tmp_path / "wake")
    assert wake_up.wait()
    wake_up.close()
    assert not wake_up.wait()


def test_a_sleeping_agent_handles_operator_requests_at_once(tmp_path: Path) -> None:
    rules = (Rule(name="hand", approve="manual"),)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint(), rules) as daemon:
        event = azure.schedule("Reboot", notice_seconds=NEVER)
        with closing(Store.open_client(tmp_path)) as store:
            (workflow,) = azure.wait_until(store.load_workflows, "the event is known", PATIENCE)
            wait_asleep(daemon, azure)
            answer = operator.wait_for_answer(store, store.add_status_request(datetime.now(UTC)))
            assert answer is not None
            assert "vm-1" in answer.message
            assert operator.wait_for_answer(
                store, store.add_request(workflow.id, "approve", "kim", datetime.now(UTC))
            )
        azure.wait_approved(event, timeout_seconds=PATIENCE)


def test_an_agent_that_cannot_be_woken_looks_for_requests_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the file system has no pipes")

    monkeypatch.setattr(host.WakeUp, "__init__", fail)
    monkeypatch.setattr(module, "_EARLY_TICK_SECONDS", 0.1)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        azure.wait_until(lambda: daemon._reporter.reported is not None, "it has said that it is ready", PATIENCE)
        with closing(Store.open_client(tmp_path)) as store:
            assert operator.wait_for_answer(store, store.add_status_request(datetime.now(UTC)))


def test_a_sleeping_agent_notifies_the_service_manager_when_polling_fails(tmp_path: Path) -> None:
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint()) as daemon:
        wait_asleep(daemon, azure)
        azure.fault("vm-1", "status", status=500)
        failing = "Azure's metadata service has not answered since "
        azure.wait_until(lambda: (daemon._reporter.reported or "").startswith(failing), "it is sent", PATIENCE)
        azure.clear_faults()
        azure.wait_until(lambda: daemon._reporter.reported == "Nothing is pending", "its end is sent", PATIENCE)


def test_the_status_line_of_a_running_hook_starts_as_the_package_expects(tmp_path: Path) -> None:
    """The script of the packages reads the line of the agent that it replaces: these words never change."""
    script = Path(__file__).parents[2] / "systemd" / "restart.sh"
    assert 'case $(show StatusText) in\n        "runs hook"*) return 0 ;;\n' in script.read_text(encoding="utf-8")
    hooks = {"drain": Hook(run=(sys.executable, "-c", "import time; time.sleep(600)"))}
    rules = (Rule(name="all", prepare=("drain",), approve="when-prepared"),)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint(), rules, hooks) as daemon:
        event = azure.schedule("Reboot", notice_seconds=NEVER)
        azure.wait_until(lambda: (daemon._reporter.reported or "").startswith("runs hook"), "it is sent", PATIENCE)
        azure.cancel(event)


def test_an_event_is_begun_when_its_time_comes_although_no_document_says_so(tmp_path: Path) -> None:
    rules = (Rule(name="late", approve="immediately", lead=NEVER),)
    with Simulator(vms=("vm-1",)) as azure, running(tmp_path, azure.endpoint(), rules):
        event = azure.schedule("Reboot", notice_seconds=NEVER + 4.0)
        assert azure.wait_approved(event, timeout_seconds=PATIENCE).approved_at
        with closing(Store.open_client(tmp_path)) as store:
            (workflow,) = store.load_workflows()
        assert workflow.event.not_before is not None
        assert datetime.now(UTC) >= workflow.event.not_before - timedelta(seconds=NEVER)
