"""The example of RabbitMQ, with three real nodes, a quorum queue, and clients that write and read all the time."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from examples import ServiceManager, Unit, copy_hooks
from harness import PATIENCE, Agent, Simulator
from hook_shells import SHIPPED_HOOKS
from rabbitmq_cluster import Cluster, Load

pytestmark = [
    pytest.mark.usefixtures("hook_shell"),
    pytest.mark.timeout(900),
]  # the first time, packages are fetched


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("rabbitmq") / "cluster")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        sys.stdout.write(cluster.manager.log.read_text("utf-8"))  # pytest shows it on failure only


@pytest.fixture
def load(cluster: Cluster) -> Iterator[Load]:
    load = Load(cluster.ports)
    load.wait_confirmed()
    yield load
    load.stop()


def run_hook(cluster: Cluster, name: str, **more: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [SHIPPED_HOOKS / name],
        env={**cluster.environment, "SCHEDULED_EVENT_ID": "A", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    return done.returncode, [line.removeprefix(f"{name}: ") for line in done.stdout.splitlines()]


def test_a_node_is_drained_and_stopped_and_no_message_is_lost(
    cluster: Cluster, load: Load, tmp_path: Path
) -> None:
    with Simulator(vms=("vm-1",), rate_limit=None) as sim, Agent(tmp_path / "agent", sim.endpoint()) as agent:
        agent.config.write_text(cluster.policy(copy_hooks(tmp_path), sim.endpoint()), encoding="utf-8")
        agent.start()
        event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
        sim.wait_started(event, 3 * PATIENCE)
        assert not cluster.manager.runs(cluster.unit())
        load.wait_confirmed()
        sim.end(event)
        agent.wait_log("closed", timeout=3 * PATIENCE, event_id=event)
    assert not cluster.is_drained()
    load.wait_confirmed()
    assert load.lost() == set()


@pytest.mark.nightly
def test_for_a_freeze_it_is_drained_and_runs_on_and_is_revived(cluster: Cluster) -> None:
    assert run_hook(cluster, "rabbitmq-prepare", RABBITMQ_STOP="no") == (0, ["drained"])
    assert (cluster.is_drained(), cluster.manager.runs(cluster.unit())) == (True, True)
    assert run_hook(cluster, "rabbitmq-recover") == (0, ["serves"])
    assert not cluster.is_drained()
    left = "not stopped by rabbitmq-prepare: left as it is"
    assert run_hook(cluster, "rabbitmq-recover") == (0, [left])

    cluster.run("rabbitmq-upgrade", "drain")
    said = "an administrator has drained this node"
    assert run_hook(cluster, "rabbitmq-prepare", RABBITMQ_STOP="no") == (0, [said])
    assert run_hook(cluster, "rabbitmq-recover") == (0, [left])
    assert cluster.is_drained()
    cluster.run("rabbitmq-upgrade", "revive")


def test_a_drain_that_fails_is_reverted_and_nothing_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program = tmp_path / "rabbitmq-upgrade"
    program.write_text(f'#!/bin/sh\necho "$*" >>{calls}\n[ "$2" = revive ]\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{cluster.environment['PATH']}"
    code, said = run_hook(cluster, "rabbitmq-prepare", PATH=path)
    assert code == 1
    assert re.fullmatch(r"not drained: exit code 1 \(after [0-9]+ s\); nothing was stopped", said[-1])
    assert calls.read_text().splitlines() == ["-q drain", "-q revive"]
    assert cluster.manager.runs(cluster.unit())
    assert not Path(cluster.environment["RABBITMQ_MARK"]).exists()


def test_a_drain_that_cannot_be_reverted_is_left_to_the_recover_hook(tmp_path: Path) -> None:
    unit, place, mark = "rabbitmq-server.service", tmp_path / "bin", tmp_path / "mark"
    with ServiceManager(place, {unit: Unit(("sleep", "600"))}) as manager:
        manager.start(unit)
        for program, script in (("ctl", "echo false"), ("-queues", "true"), ("-upgrade", "false")):
            path = place / f"rabbitmq{program}"
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        done = subprocess.run(
            [SHIPPED_HOOKS / "rabbitmq-prepare"],
            env={"PATH": f"{place}:{os.environ['PATH']}", "RABBITMQ_MARK": str(mark)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 1
        assert "rabbitmq-recover has to revive it" in done.stderr
        assert manager.runs(unit)
    assert mark.exists()


def test_a_node_that_a_queue_needs_is_not_drained(cluster: Cluster, load: Load) -> None:
    cluster.manager.power_off(cluster.unit(2))
    code, said = run_hook(cluster, "rabbitmq-prepare", RABBITMQ_WAIT="0")
    assert code == 1
    assert said[-1].startswith("nothing was drained: "), said
    assert (cluster.is_drained(), cluster.manager.runs(cluster.unit())) == (False, True)
    load.wait_confirmed()
