"""Redis with Sentinel: docs/cookbook/redis.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import subprocess
from pathlib import Path

from examples import copy_hooks
from frame import Outcome, Recipe, Way
from harness import Agent
from redis_set import UNIT, RedisSet, Writer


class RedisSentinel(Recipe):
    title = "Redis with Sentinel, the primary's VM"
    case = "reboot"
    page = "docs/cookbook/redis.md"
    load = "one client that writes all the time, and asks Sentinel where; a Sentinel waits 5 s until it acts"
    columns = ("writes failed", "longest outage", "confirmed writes lost")

    _load: Writer

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._servers = RedisSet(place / "redis", down_after_seconds=5)

    def start(self) -> None:
        self.ends.callback(self._servers.close)
        self._servers.start()

    def versions(self) -> str:
        command = ["redis-server", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return "Redis " + done.stdout.partition("v=")[2].split()[0]

    def write_policy(self, agent: Agent) -> None:
        policy = self._servers.policy(copy_hooks(self.place), agent.endpoint)
        agent.config.write_text(policy, encoding="utf-8")

    def start_load(self) -> None:
        self._load = Writer(self._servers)
        self.ends.callback(self._load.stop)
        self._load.wait_written()

    def stop_service(self) -> None:
        self._servers.manager.stop(UNIT)

    def go_down(self) -> None:
        self._servers.manager.power_off(UNIT)

    def come_back(self) -> None:
        self._servers.manager.start(UNIT)

    def settle(self) -> None:
        self._load.wait_written()

    def finish(self) -> Outcome:
        self._load.stop()
        return Outcome(
            failed=self._load.failed,
            total=self._load.failed + len(self._load.written),
            outage_seconds=self._load.longest_gap(),
            lost=len(self._load.lost()),
        )


class RedisEvicted(RedisSentinel):
    title = "Redis with Sentinel, the primary's VM, with the shortest notice there is"
    case = "eviction, 10 s of notice"
    event = "Preempt"
    notice_seconds = 10.0
