"""The example of Redis with Sentinel, with real ones and a client that writes all the time."""

import contextlib
import itertools
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Redis, and the hooks, are for Unix", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from examples import copy_hooks
from harness import CHECKOUT, PATIENCE, Agent, Simulator
from ports import free_port
from redis_set import NAME, UNIT, RedisError, RedisSet, Writer, ask, wait

pytest_plugins = ["one_vm"]

pytestmark = pytest.mark.timeout(600)  # the first time, packages are fetched

HOOKS = CHECKOUT / "config/hooks"
CLIENT = """#!/bin/sh
answer=$({real} "$@") || exit
case $*:$(echo "$answer" | tail -n 1) in
    *GET-MASTER*:{port}) ;;
    *GET-MASTER*) mkdir {place}/ending 2>/dev/null &&
        kill -s {signal} $(cat {place}/pid) && answer="127.0.0.1\n{port}" ;;
esac
echo "$answer"
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[RedisSet]:
    servers = RedisSet(tmp_path / "redis")
    try:
        servers.start()
        yield servers
    finally:
        servers.close()


@pytest.fixture
def writer(servers: RedisSet) -> Iterator[Writer]:
    writer = Writer(servers)
    writer.wait_written()
    yield writer
    writer.stop()


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator, servers: RedisSet) -> Iterator[Agent]:
    with Agent(tmp_path / "agent", sim.endpoint()) as agent:
        agent.config.write_text(servers.policy(copy_hooks(tmp_path), sim.endpoint()), encoding="utf-8")
        yield agent


def run_hook(servers: RedisSet, name: str, **more: str) -> tuple[int, str]:
    done = subprocess.run(
        [HOOKS / name],
        env={**servers.environment, "SCHEDULED_EVENT_ID": "A", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_primary_hands_over_loses_no_write_and_comes_back_as_a_replica(
    servers: RedisSet, writer: Writer, agent: Agent, sim: Simulator
) -> None:
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
    sim.wait_started(event)
    assert not servers.manager.runs(UNIT)
    assert servers.primary() in servers.replicas
    writer.wait_written()
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert servers.fact(servers.port, "role") == "slave"
    assert servers.fact(servers.port, "master_link_status") == "up"
    writer.wait_written()
    writer.stop()
    assert writer.lost() == set()


@pytest.mark.nightly
def test_after_sentinels_own_failover_the_old_primary_confirms_what_is_lost(servers: RedisSet) -> None:
    def has_confirmed_what_is_lost() -> bool:
        old = servers.primary()
        ask(servers.sentinels[0], "SENTINEL", "FAILOVER", NAME)
        wait(lambda: servers.primary() != old, "there was a new primary")
        with contextlib.suppress(RedisError):  # a test that is late finds a replica
            ask(old, "RPUSH", "numbers", "1")
            wait(lambda: servers.fact(old, "master_link_status") == "up", "the old primary was a replica")
            return ask(servers.primary(), "LRANGE", "numbers", "0", "-1") == []
        return False

    wait(has_confirmed_what_is_lost, "a confirmed write was lost")


def end_after_the_promotion(servers: RedisSet, directory: Path, signal: str) -> int:
    """The client tells of the promotion only a hook that is ending by then; returns its exit code."""
    client = directory / "bin" / "redis-cli"
    client.parent.mkdir()
    real = shutil.which("redis-cli")
    client.write_text(CLIENT.format(real=real, place=directory, port=servers.port, signal=signal))
    client.chmod(0o755)
    environment = {**servers.environment, "SCHEDULED_EVENT_ID": "A", "REDIS_LIMIT": "300"}
    environment["PATH"] = f"{client.parent}:{environment['PATH']}"
    with subprocess.Popen([HOOKS / "redis-prepare"], env=environment) as hook:
        (directory / "pid").write_text(str(hook.pid))
        return hook.wait(2 * PATIENCE)


def test_a_hand_over_that_ends_after_the_promotion_loses_no_write(
    servers: RedisSet, writer: Writer, tmp_path: Path
) -> None:
    assert end_after_the_promotion(servers, tmp_path, "TERM") == 143
    assert servers.fact(servers.port, "role") == "slave"
    writer.wait_written()
    writer.stop()
    assert writer.lost() == set()


def test_a_hand_over_that_is_killed_after_the_promotion_goes_on_and_loses_no_write(
    servers: RedisSet, writer: Writer, tmp_path: Path
) -> None:
    assert end_after_the_promotion(servers, tmp_path, "KILL") == -9
    assert servers.fact(servers.port, "role") == "master"
    with socket.create_connection(("127.0.0.1", servers.port), PATIENCE) as client:
        client.sendall(b"RPUSH numbers 0\r\n")  # waits for the end of the pause, and would be lost
        code, said = run_hook(servers, "redis-prepare", REDIS_STOP="no")
        goes_on = "redis-prepare: the hand-over has begun already"
        assert said.splitlines() == [goes_on, f"redis-prepare: 127.0.0.1:{servers.primary()} is the primary now"]
        assert code == 0
        assert not client.recv(100).startswith(b":")
    assert servers.fact(servers.port, "role") == "slave"
    writer.wait_written()
    writer.stop()
    assert writer.lost() == set()


def test_the_primary_of_a_foreign_set_is_never_followed(servers: RedisSet, tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen(["redis-server", "--port", str(port), "--dir", tmp_path, "--save", ""]) as stranger:
        try:
            wait(lambda: servers.fact(port, "role") == "master", "it ran")
            code, said = run_hook(servers, "redis-prepare", REDIS_ADDRESS=f"127.0.0.1:{port}")
        finally:
            stranger.kill()
    assert (code, said) == (1, "redis-prepare: to Sentinel this server is not the primary; nothing was stopped\n")
    assert servers.manager.runs(UNIT)


def test_for_a_freeze_of_unknown_length_it_hands_over_and_runs_on(
    servers: RedisSet, writer: Writer, agent: Agent, sim: Simulator
) -> None:
    agent.start()
    event = sim.schedule("Freeze", notice_seconds=600, lasts_seconds=None)
    sim.wait_started(event)
    assert servers.manager.runs(UNIT)
    assert servers.fact(servers.port, "role") == "slave"
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    writer.wait_written()
    writer.stop()
    assert writer.lost() == set()


def test_the_hooks_may_run_again_and_a_replica_is_just_stopped(servers: RedisSet) -> None:
    assert run_hook(servers, "redis-recover") == (
        0,
        "redis-recover: not stopped by redis-prepare: left as it is\n",
    )
    code, said = run_hook(servers, "redis-prepare")
    new = servers.primary()
    assert (code, said.splitlines()) == (
        *(0, [f"redis-prepare: 127.0.0.1:{new} is the primary now", "redis-prepare: stopped"]),
    )
    assert run_hook(servers, "redis-prepare") == (0, f"redis-prepare: {UNIT} does not run\n")
    assert run_hook(servers, "redis-recover") == (0, f"redis-recover: {UNIT} serves as a replica\n")
    code, said = run_hook(servers, "redis-prepare")
    assert (code, said.splitlines()) == (
        *(0, ["redis-prepare: this server is a replica", "redis-prepare: stopped"]),
    )
    assert servers.primary() == new


def test_a_server_that_fails_after_the_hooks_own_start_is_started_again(servers: RedisSet) -> None:
    assert run_hook(servers, "redis-prepare")[0] == 0
    code, _ = run_hook(servers, "redis-recover", REDIS_WAIT="0", REDIS_ADDRESS="127.0.0.1:1")
    assert code == 1
    servers.manager.power_off(UNIT)
    code, said = run_hook(servers, "redis-recover", SCHEDULED_EVENT_ID="")
    assert (code, said) == (0, f"redis-recover: {UNIT} serves as a replica\n")


def test_without_a_replica_nothing_is_stopped_and_writes_go_on(servers: RedisSet, writer: Writer) -> None:
    for port in servers.replicas:
        ask(port, "REPLICAOF", "NO", "ONE")
    wait(lambda: servers.fact(servers.port, "connected_slaves") == "0", "it had none")
    code, said = run_hook(servers, "redis-prepare")
    assert (code, said) == (1, "redis-prepare: no replica is online; nothing was stopped\n")
    assert servers.manager.runs(UNIT)
    assert servers.fact(servers.port, "role") == "master"
    writer.wait_written()


def test_when_sentinel_refuses_writes_go_on(servers: RedisSet, writer: Writer) -> None:
    for port in servers.replicas:  # which Sentinel then promotes none of
        ask(port, "CONFIG", "SET", "replica-priority", "0")
    wait(lambda: _priorities(servers) == {"0"}, "Sentinel knew it")
    code, said = run_hook(servers, "redis-prepare")
    assert (code, said.splitlines()[-1]) == (
        *(1, "redis-prepare: Sentinel does not hand over; nothing was stopped"),
    )
    assert servers.fact(servers.port, "role") == "master"
    writer.wait_written()


def _priorities(servers: RedisSet) -> set[str]:
    words = ask(servers.sentinels[0], "SENTINEL", "REPLICAS", NAME)
    return {after for word, after in itertools.pairwise(words) if word == "slave-priority"}
