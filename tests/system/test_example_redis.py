"""The example of Redis with Sentinel, with real ones and a client that writes all the time."""

import contextlib
import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Redis, and the hooks, are for Unix", allow_module_level=True)

from examples import copy_hooks
from harness import PATIENCE, Agent, Simulator
from hook_shells import SHIPPED_HOOKS
from ports import free_port
from redis_set import NAME, UNIT, RedisError, RedisSet, Writer, ask, wait

pytestmark = [
    pytest.mark.usefixtures("hook_shell"),
    pytest.mark.timeout(600),
]  # the first time, packages are fetched

HOOKS = SHIPPED_HOOKS
TELLS_OF_THE_PROMOTION_AT_THE_END = """#!/bin/sh
answer=$({real} "$@") || exit
case $*:$(echo "$answer" | tail -n 1) in
    *GET-MASTER*:{port}) ;;
    *GET-MASTER*) mkdir {place}/ending 2>/dev/null &&
        kill -s {signal} $(cat {place}/pid) && answer="127.0.0.1\n{port}" ;;
esac
echo "$answer"
"""
ENDS_THE_HOOK_AMID_THE_HAND_OVER = """#!/bin/sh
{real} "$@"
case $* in *FAILOVER*) kill -s {signal} $(cat {place}/pid) ;; esac
"""
TELLS_OF_NO_PROMOTION = """#!/bin/sh
case $* in
    *GET-MASTER*) printf '127.0.0.1\\n{port}\\n' ;;
    *) exec {real} "$@" ;;
esac
"""


@pytest.fixture
def down_after_seconds() -> int:
    """Until Sentinel takes a server for down; on a busy machine one may be slow."""
    return 60


# Less than the pause of writes: Sentinel cannot speak to the old primary before.
soon_down = pytest.mark.parametrize("down_after_seconds", [10])


@pytest.fixture
def servers(tmp_path: Path, down_after_seconds: int) -> Iterator[RedisSet]:
    servers = RedisSet(tmp_path / "redis", down_after_seconds=down_after_seconds)
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
def test_after_a_failover_by_sentinel_the_old_primary_confirms_the_losses(servers: RedisSet) -> None:
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


def hand_over_with(
    client: str, servers: RedisSet, directory: Path, signal: str = "TERM", **more: str
) -> tuple[int, str]:
    """With this program in place of redis-cli, which may end the hook; returns its exit code, and what it said."""
    program = directory / "bin" / "redis-cli"
    program.parent.mkdir()
    real = shutil.which("redis-cli")
    program.write_text(client.format(real=real, place=directory, port=servers.port, signal=signal))
    program.chmod(0o755)
    environment = {**servers.environment, "SCHEDULED_EVENT_ID": "A", "REDIS_LIMIT": "300", **more}
    environment["PATH"] = f"{program.parent}:{environment['PATH']}"
    with subprocess.Popen(
        [HOOKS / "redis-prepare"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as hook:
        (directory / "pid").write_text(str(hook.pid))
        said, _ = hook.communicate(timeout=2 * PATIENCE)
        return hook.returncode, said


def has_settled(servers: RedisSet) -> bool:
    """Whether the machine's server can confirm nothing more that is lost."""
    if not servers.manager.runs(UNIT):
        return servers.primary() != servers.port
    follows = servers.fact(servers.port, "role") == "slave" and servers.primary() != servers.port
    return follows and servers.fact(servers.port, "master_link_status") == "up"


def lost_in_the_end(servers: RedisSet, writer: Writer) -> set[int]:
    wait(lambda: has_settled(servers), "another server was the primary, and this one no other")
    writer.wait_written()
    writer.stop()
    return writer.lost()


def test_a_hand_over_that_ends_after_the_promotion_loses_no_write(
    servers: RedisSet, writer: Writer, tmp_path: Path
) -> None:
    code, _ = hand_over_with(TELLS_OF_THE_PROMOTION_AT_THE_END, servers, tmp_path)
    assert code == 143
    assert servers.fact(servers.port, "role") == "slave"
    writer.wait_written()
    writer.stop()
    assert writer.lost() == set()


def test_a_hand_over_killed_after_the_promotion_continues_without_a_lost_write(
    servers: RedisSet, writer: Writer, tmp_path: Path
) -> None:
    code, _ = hand_over_with(TELLS_OF_THE_PROMOTION_AT_THE_END, servers, tmp_path, "KILL")
    assert code == -9
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


@pytest.mark.parametrize("stop", ["yes", "no"])
def test_a_hand_over_ended_before_the_promotion_waits_for_it_without_a_lost_write(
    servers: RedisSet, writer: Writer, tmp_path: Path, stop: str
) -> None:
    code, said = hand_over_with(ENDS_THE_HOOK_AMID_THE_HAND_OVER, servers, tmp_path, REDIS_STOP=stop)
    assert (code, said) == (143, f"redis-prepare: 127.0.0.1:{servers.primary()} is the primary now\n")
    assert lost_in_the_end(servers, writer) == set()


@soon_down
def test_without_another_primary_it_stops_the_server_to_lose_no_write(
    servers: RedisSet, writer: Writer, tmp_path: Path
) -> None:
    code, said = hand_over_with(TELLS_OF_NO_PROMOTION, servers, tmp_path, SCHEDULED_EVENT_SECONDS_LEFT="9")
    late = "redis-prepare: there is no other primary within 4 s"
    stopped = f"{UNIT} was stopped, for what is written here now may be lost"
    assert code == 1
    assert said.splitlines() == [late, f"redis-prepare: there is no other primary yet: {stopped}"]
    assert not servers.manager.runs(UNIT)
    assert lost_in_the_end(servers, writer) == set()
    code, said = run_hook(servers, "redis-recover")
    assert said.startswith(f"redis-recover: {UNIT} serves")  # at first as a primary, until Sentinel finds it
    assert code == 0


@soon_down
def test_without_another_primary_or_a_stop_writes_wait_until_the_pause_ends(
    servers: RedisSet, writer: Writer, tmp_path: Path
) -> None:
    code, said = hand_over_with(
        TELLS_OF_NO_PROMOTION, servers, tmp_path, SCHEDULED_EVENT_SECONDS_LEFT="9", REDIS_STOP="no"
    )
    waits = "writes here wait until the pause ends, within 35 s"
    assert (code, said.splitlines()[-1]) == (1, f"redis-prepare: there is no other primary yet: {waits}")
    assert servers.manager.runs(UNIT)
    assert lost_in_the_end(servers, writer) == set()


def at_night(*values: str) -> list[object]:
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


PAUSE_IS_OVER_SECONDS = 40


@pytest.mark.parametrize("stop", ["yes", "no"])
@pytest.mark.parametrize("seconds_left", ["9", *at_night("5", "8", "10", "11", "12")])
def test_with_a_short_lead_time_a_hand_over_succeeds_and_loses_no_write(
    servers: RedisSet, writer: Writer, seconds_left: str, stop: str
) -> None:
    code, said = run_hook(servers, "redis-prepare", SCHEDULED_EVENT_SECONDS_LEFT=seconds_left, REDIS_STOP=stop)
    assert code == 0, said
    assert servers.manager.runs(UNIT) == (stop == "no")
    assert lost_in_the_end(servers, writer) == set()


@pytest.mark.nightly
@soon_down
@pytest.mark.parametrize("stop", ["yes", "no"])
@pytest.mark.parametrize("after_seconds", [round(0.2 * step, 1) for step in range(1, 11)])
def test_a_hand_over_that_is_ended_at_any_time_loses_no_write(
    servers: RedisSet, writer: Writer, after_seconds: float, stop: str
) -> None:
    environment = {**servers.environment, "SCHEDULED_EVENT_ID": "A", "REDIS_STOP": stop}
    with subprocess.Popen([HOOKS / "redis-prepare"], env=environment) as hook:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hook.wait(after_seconds)
        hook.terminate()
        hook.wait(PATIENCE)
    time.sleep(PAUSE_IS_OVER_SECONDS)
    writer.wait_written()
    writer.stop()
    assert writer.lost() == set()


@soon_down
def test_an_eviction_with_the_shortest_lead_time_loses_no_write(
    servers: RedisSet, writer: Writer, agent: Agent, sim: Simulator
) -> None:
    agent.start()
    sim.schedule("Preempt", notice_seconds=10, lasts_seconds=None)
    agent.wait_log("hook finished")
    assert not servers.manager.runs(UNIT)
    assert lost_in_the_end(servers, writer) == set()


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


def test_when_sentinel_rejects_the_failover_writes_continue(servers: RedisSet, writer: Writer) -> None:
    for port in servers.replicas:  # which Sentinel then promotes none of
        ask(port, "CONFIG", "SET", "replica-priority", "0")
    wait(lambda: _priorities(servers) == {"0"}, "Sentinel knew it")
    refusal = "NOGOODSLAVE No suitable replica to promote"
    code, said = run_hook(servers, "redis-prepare")
    assert (code, said.splitlines()[-1]) == (
        *(1, f"redis-prepare: Sentinel does not hand over: {refusal}; nothing was stopped"),
    )
    # A password that Sentinel does not ask for: redis-cli complains of that first.
    code, said = run_hook(servers, "redis-prepare", REDISCLI_AUTH="secret")
    assert code == 1
    assert f"redis-prepare: Sentinel does not hand over: {refusal}; nothing was stopped" in said.splitlines()
    assert servers.manager.runs(UNIT)
    assert servers.fact(servers.port, "role") == "master"
    writer.wait_written()


def _priorities(servers: RedisSet) -> set[str]:
    words = ask(servers.sentinels[0], "SENTINEL", "REPLICAS", NAME)
    return {after for word, after in itertools.pairwise(words) if word == "slave-priority"}
