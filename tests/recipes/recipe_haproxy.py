"""A pair of HAProxy with keepalived: docs/cookbook/haproxy.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import re
import subprocess
from pathlib import Path

from examples import copy_hooks
from frame import Outcome, Recipe, Way
from haproxy_pair import Load, Pair, programs, wait
from harness import Agent


class HAProxyPair(Recipe):
    title = "A pair of HAProxy with keepalived, the VM that has the address"
    page = "docs/cookbook/haproxy.md"
    load = "10 clients of the address, of which 4 with downloads of 1.3 s and 3 that keep their connection"
    columns = ("requests failed", "longest outage")

    _load: Load

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._pair = Pair(place / "pair")

    def start(self) -> None:
        self.ends.callback(self._pair.close)
        self._pair.start()

    def versions(self) -> str:
        found = []
        for name, command in (("HAProxy", programs().haproxy), ("keepalived", programs().keepalived)):
            done = subprocess.run([*command, "-v"], capture_output=True, text=True, check=True, timeout=60)
            version = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
            number = version[0] if version else "of an unknown version"
            found.append(f"{name} {number}")
        return ", ".join(found)

    def write_policy(self, agent: Agent) -> None:
        policy = self._pair.policy(copy_hooks(self.place), agent.endpoint)
        agent.config.write_text(policy, encoding="utf-8")

    def start_load(self) -> None:
        self._load = Load(self._pair)
        self.ends.callback(self._load.stop)
        self._load.wait_answered()

    def stop_service(self) -> None:
        self._pair.manager.stop(self._pair.unit())

    def go_down(self) -> None:
        self._pair.cut_power("a")

    def come_back(self) -> None:
        self._pair.boot("a")

    def settle(self) -> None:
        self._load.wait_answered()
        wait(lambda: self._pair.node_at("10.0.0.4") == "a", "both machines answered again")

    def finish(self) -> Outcome:
        self._load.stop()
        failed, answered = len(self._load.faults), len(self._load.answered)
        return Outcome(failed, failed + answered, outage_seconds=self._load.longest_gap())
