"""A node of a RabbitMQ cluster: docs/cookbook/rabbitmq.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

from pathlib import Path

import rabbitmq_cluster
from examples import copy_hooks
from frame import Outcome, Recipe, Way
from harness import Agent
from rabbitmq_cluster import Cluster, Load


class RabbitMQ(Recipe):
    title = "RabbitMQ, the node that clients are connected to"
    page = "docs/cookbook/rabbitmq.md"
    load = "one client that writes to a quorum queue with confirms, and one that reads from it"
    columns = ("writes failed", "longest outage", "confirmed messages lost")

    _load: Load

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._cluster = Cluster(place / "cluster")

    def start(self) -> None:
        self.ends.callback(self._cluster.close)
        self._cluster.start()

    def versions(self) -> str:
        return f"RabbitMQ {rabbitmq_cluster.version()}"

    def write_policy(self, agent: Agent) -> None:
        policy = self._cluster.policy(copy_hooks(self.place), agent.endpoint)
        agent.config.write_text(policy, encoding="utf-8")

    def start_load(self) -> None:
        self._load = Load(self._cluster.ports)
        self.ends.callback(self._load.stop)
        self._load.wait_confirmed()

    def stop_service(self) -> None:
        self._cluster.manager.stop(self._cluster.unit())

    def go_down(self) -> None:
        self._cluster.hang()

    def come_back(self) -> None:
        self._cluster.manager.power_off(self._cluster.unit())
        self._cluster.manager.start(self._cluster.unit())

    def settle(self) -> None:
        self._load.wait_confirmed()

    def finish(self) -> Outcome:
        lost = len(self._load.lost())
        failed, confirmed = self._load.failed, len(self._load.confirmed)
        return Outcome(failed, failed + confirmed, self._load.longest_gap(), lost)
