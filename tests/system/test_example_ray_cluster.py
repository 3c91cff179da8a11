"""The example policy for a node of a Ray cluster, with a real Ray: a head and a node, both on loopback."""

import re
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from harness import Agent, Simulator
from ray_cluster import UNIT, cluster

# Ray takes long to start and to notice on a busy machine; the first time, it is fetched.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900), pytest.mark.usefixtures("hook_shell")]


def test_a_node_leaves_before_a_redeployment_and_joins_again(sim: Simulator, agent: Agent, tmp_path: Path) -> None:
    with cluster(tmp_path) as ray:
        ray.start_work()
        agent.config.write_text(ray.policy(sim.endpoint()), encoding="utf-8")
        agent.start()
        event = sim.schedule("Redeploy", notice_seconds=600, lasts_seconds=None)
        agent.wait_log("hook finished", event_id=event, reason="hook leave: exit code 0 (succeeded)")
        told = [line["line"] for line in agent.log("hook output", event_id=event)]
        assert "takes no new work" in told[0]
        # The actor, and no task.
        assert re.fullmatch(r"ray-prepare: still at work, and stopped now: +1 ray::Counter(\.where)? ?", told[1])
        assert told[2] == f"ray-prepare: {UNIT} is stopped"
        sim.wait_approved(event)
        assert not ray.manager.runs(UNIT)
        ray.wait_nodes(1)
        ray.wait_answers()
        assert ray.answers()[-1][1] == "other"

        sim.wait_started(event)
        sim.end(event)
        agent.wait_log("closed", event_id=event)
        ray.wait_nodes(2)
        work = ray.finish_work()
        assert work.tasks > 0
        assert work.lost == 0  # no task was cut off


def test_a_canceled_drain_ends_with_a_node_that_accepts_work(sim: Simulator, agent: Agent, tmp_path: Path) -> None:
    with cluster(tmp_path) as ray:
        ray.start_work()
        agent.config.write_text(ray.policy(sim.endpoint()), encoding="utf-8")
        agent.start()
        event = sim.schedule("Redeploy", notice_seconds=600, lasts_seconds=None)
        agent.wait_log("hook output", event_id=event)
        sim.cancel(event)
        agent.wait_log("closed", event_id=event)
        assert agent.log("hook output", event_id=event)[-1]["line"] == f"ray-recover: {UNIT} is started"
        ray.wait_nodes(2)


def test_the_head_of_a_cluster_is_not_drained(tmp_path: Path) -> None:
    with cluster(tmp_path) as ray:
        done = ray.run_hook("ray-prepare", RAY_UNIT="head.service")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "ray-prepare: this is the head of the cluster: it cannot leave\n"
        assert ray.manager.runs("head.service")
        assert ray.run_hook("ray-recover").stdout == "ray-recover: not drained by ray-prepare: left as it is\n"
        ray.manager.stop(UNIT)
        assert ray.run_hook("ray-prepare").stdout == f"ray-prepare: {UNIT} does not run\n"
