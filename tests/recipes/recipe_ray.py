"""A node of a Ray cluster: docs/cookbook/ray.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import ray_cluster
from frame import Outcome, Recipe
from harness import Agent
from ray_cluster import UNIT, Cluster


class RayNode(Recipe):
    title = "A node of a Ray cluster"
    page = "docs/cookbook/ray.md"
    load = "tasks of 1 s on every CPU, and an actor on the node, called ten times a second; `RAY_WAIT` is 15 s"
    columns = ("tasks cut off", "actor's longest silence")

    _cluster: Cluster

    def start(self) -> None:
        self._cluster = self.ends.enter_context(ray_cluster.cluster(self.place))

    def versions(self) -> str:
        return f"Ray {ray_cluster.VERSION}"

    def write_policy(self, agent: Agent) -> None:
        agent.config.write_text(self._cluster.policy(agent.endpoint), encoding="utf-8")

    def start_load(self) -> None:
        self._cluster.start_work()

    def stop_service(self) -> None:
        self._cluster.manager.stop(UNIT)

    def go_down(self) -> None:
        self._cluster.manager.hang(UNIT)

    def come_back(self) -> None:
        self._cluster.manager.power_off(UNIT)
        self._cluster.manager.start(UNIT)

    def settle(self) -> None:
        self._cluster.wait_nodes(2)
        self._cluster.wait_answers()

    def finish(self) -> Outcome:
        work = self._cluster.finish_work()
        return Outcome(failed=work.lost, total=work.tasks + work.lost, outage_seconds=work.silence_seconds)
