"""The example of a pair of HAProxy, with real ones, a real keepalived, and clients of the virtual address."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("keepalived, and the hooks, are for Linux", allow_module_level=True)

from examples import ServiceManager, Unit, copy_hooks
from haproxy_pair import Load, Pair, wait
from harness import PATIENCE, Agent, Simulator
from hook_shells import SHIPPED_HOOKS

pytestmark = [
    pytest.mark.usefixtures("hook_shell"),
    pytest.mark.timeout(600),
]  # the first time, packages are fetched


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("haproxy") / "pair", priority_of_b=140)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@pytest.fixture
def load(pair: Pair) -> Iterator[Load]:
    pair.wait_answered("a")  # its priority is the higher one
    load = Load(pair)
    load.wait_answered()
    yield load
    load.stop()


def run_hook(pair: Pair, name: str, **more: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [SHIPPED_HOOKS / name],
        env={**pair.environment, "SCHEDULED_EVENT_ID": "A", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    return done.returncode, [line.removeprefix(f"{name}: ") for line in done.stdout.splitlines()]


def test_the_other_one_has_the_address_before_the_event_and_gives_it_back(
    pair: Pair, load: Load, tmp_path: Path
) -> None:
    with Simulator(vms=("vm-1",), rate_limit=None) as sim, Agent(tmp_path / "agent", sim.endpoint()) as agent:
        agent.config.write_text(pair.policy(copy_hooks(tmp_path), sim.endpoint()), encoding="utf-8")
        agent.start()
        event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
        sim.wait_started(event)
        assert (pair.node_at(), pair.manager.runs(pair.unit())) == ("b", False)
        pair.cut_power("a")
        load.wait_answered()
        pair.boot("a")
        pair.manager.stop(pair.unit())  # a machine on which HAProxy does not start by itself
        sim.end(event)
        agent.wait_log("closed", event_id=event)
    pair.wait_answered("a")
    load.wait_answered()
    load.stop()
    # A move of the address cuts off one request of each of the ten clients, at most; a busy machine may add one.
    assert len(load.faults) <= 3 * 10, load.faults


def test_during_a_freeze_haproxy_runs_on_and_gets_the_address_back_once_healthy(pair: Pair) -> None:
    pair.wait_answered("a")
    assert run_hook(pair, "haproxy-prepare", HAPROXY_STOP="no") == (0, ["another machine has 10.0.0.100"])
    assert (pair.node_at(), pair.manager.runs(pair.unit())) == ("b", True)
    code, said = run_hook(pair, "haproxy-recover", HAPROXY_HEALTH="tcp:127.0.0.1:1", HAPROXY_HEALTH_LIMIT="0")
    message = f"{pair.unit()} is not healthy after 0 s; 10.0.0.100 stays with the other machine"
    assert (code, said) == (1, [message])
    assert pair.files["a"].read_text() == "1\n"
    code, said = run_hook(pair, "haproxy-recover", HAPROXY_HEALTH="http://127.0.0.1/ready")
    assert (code, said) == (0, ["this machine may have 10.0.0.100 again", f"{pair.unit()} is healthy"])
    pair.wait_answered("a")


def test_without_another_machine_nothing_is_stopped(pair: Pair) -> None:
    pair.wait_answered("a")
    pair.cut_power("b")
    try:
        code, said = run_hook(pair, "haproxy-prepare", KEEPALIVED_LIMIT="1")
        assert (code, said) == (1, ["no other machine answers at 10.0.0.100 within 1 s; nothing was stopped"])
        assert pair.files["a"].read_text() == "0\n"
        assert (pair.node_at(), pair.manager.runs(pair.unit())) == ("a", True)
    finally:
        pair.boot("b")
    assert run_hook(pair, "haproxy-recover") == (0, ["not stopped by haproxy-prepare: left as it is"])


def test_one_that_fails_after_the_hooks_own_start_is_started_again(pair: Pair) -> None:
    pair.wait_answered("a")
    wait(lambda: pair.node_at("10.0.0.5") == "b", "b was up")
    assert run_hook(pair, "haproxy-prepare")[0] == 0
    more = {"HAPROXY_HEALTH": "tcp:127.0.0.1:1", "HAPROXY_HEALTH_LIMIT": "0"}
    assert run_hook(pair, "haproxy-recover", **more)[0] == 1
    pair.manager.power_off(pair.unit())
    assert run_hook(pair, "haproxy-recover", SCHEDULED_EVENT_ID="")[0] == 0
    pair.wait_answered("a")


def test_a_node_stopped_by_an_administrator_stays_stopped(pair: Pair) -> None:
    pair.wait_answered("a")
    wait(lambda: pair.node_at("10.0.0.5") == "b", "b was up")
    assert run_hook(pair, "haproxy-prepare")[0] == 0
    assert run_hook(pair, "haproxy-prepare") == (0, [f"{pair.unit()} does not run"])
    pair.manager.start(pair.unit())
    pair.manager.stop(pair.unit())
    said = f"{pair.unit()} was stopped by an administrator: left as it is, and 10.0.0.100 with the other machine"
    assert run_hook(pair, "haproxy-recover", SCHEDULED_EVENT_ID="") == (0, [said])
    assert pair.node_at() == "b"
    pair.manager.start(pair.unit())
    assert run_hook(pair, "haproxy-recover")[0] == 0


def test_a_unit_whose_process_has_just_ended_gets_no_signal(tmp_path: Path) -> None:
    unit = "haproxy.service"
    with ServiceManager(tmp_path / "bin", {unit: Unit(("true",))}) as manager:
        manager.states[unit] = "active"  # and its main process is 0: to kill, all of the caller's group
        done = subprocess.run(
            [SHIPPED_HOOKS / "haproxy-prepare"],
            env={"PATH": f"{manager.directory}:{os.environ['PATH']}", "HAPROXY_MARK": str(tmp_path / "mark")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            start_new_session=True,
        )
    assert (done.returncode, done.stderr) == (1, f"haproxy-prepare: {unit} has no main process\n")
