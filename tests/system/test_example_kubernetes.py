"""The example policy for a Kubernetes node, with a real API server: evictions, disruption budgets, the account."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import kube_cluster
from examples import copy_hooks, example
from harness import CHECKOUT, Agent, Simulator
from kube_cluster import NODE, OTHER, Cluster

pytest_plugins = ["one_vm"]

pytestmark = [
    pytest.mark.nightly,  # the first time, Kubernetes is built
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here"),
]

MARK = "scheduled-events-agent/cordoned-for"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """With the account that the page describes."""
    directory = tmp_path / "cluster"
    directory.mkdir()
    with kube_cluster.cluster(directory) as one:
        page = (CHECKOUT / "docs/cookbook/kubernetes.md").read_text(encoding="utf-8")
        account = page.partition("## The account")[2].partition("```yaml\n")[2].partition("```")[0]
        one.apply(yaml.safe_load(account))
        yield one


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator, cluster: Cluster) -> Iterator[Agent]:
    """With the example's policy, as this account; started."""
    with Agent(tmp_path / "agent", sim.endpoint()) as one:
        kubeconfig = tmp_path / "kubeconfig"
        cluster.write_kubeconfig(kubeconfig, cluster.token_of("scheduled-events-agent"))
        found = "KUBECONFIG: /etc/scheduled-events-agent/credentials/kubeconfig"
        variables = (
            f"KUBECONFIG: {kubeconfig}\n      KUBECACHEDIR: {tmp_path}/cache\n      KUBERNETES_NODE: {NODE}"
        )
        policy = example("kubernetes-node.yaml", copy_hooks(tmp_path), sim.endpoint(), {found: variables})
        one.config.write_text(policy, encoding="utf-8")
        one.start()
        yield one


def told(agent: Agent, event: str) -> str:
    return "\n".join(line["line"] for line in agent.log("hook output", event_id=event))


def test_a_node_is_empty_when_a_reboot_is_approved_and_its_budget_was_kept(
    cluster: Cluster, sim: Simulator, agent: Agent
) -> None:
    cluster.run_pods("web", 2, at_least=1)
    assert cluster.apps_on(NODE) == ["web", "web"]
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_approved(event)
    assert cluster.apps_on(NODE) == []
    assert "violate the pod's disruption budget" in told(
        agent, event
    )  # so the second pod waited for the first one
    cluster.wait_ready("web", 2)
    assert cluster.apps_on(OTHER) == ["web", "web"]
    assert cluster.node()["metadata"]["annotations"][MARK] == event

    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert "unschedulable" not in cluster.node()["spec"]
    assert MARK not in cluster.node()["metadata"].get("annotations", {})


def test_an_eviction_evicts_what_it_may_and_names_what_a_budget_keeps(
    cluster: Cluster, sim: Simulator, agent: Agent
) -> None:
    cluster.run_pods("kept", 1, at_least=1)
    cluster.run_pods("web", 1)
    cluster.run_bare_pod("lonely")
    event = sim.schedule("Preempt", notice_seconds=30, lasts_seconds=None)
    agent.wait_log("hook finished", event_id=event)
    assert cluster.apps_on(NODE) == ["kept"]
    assert sorted(cluster.ended) == ["lonely", "web"]
    assert re.search(rf"{NODE} is not drained; .*: default/kept-\w+ ?$", told(agent, event))
    sim.wait_started(event)
    assert sim.approvals() == ()


def test_a_pod_without_a_controller_stops_the_drain_before_a_reboot_with_nothing_evicted(
    cluster: Cluster, sim: Simulator, agent: Agent
) -> None:
    cluster.run_pods("web", 1)
    cluster.run_bare_pod("lonely")
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
    agent.wait_log("hook finished", event_id=event)
    assert "default/lonely" in told(agent, event)
    assert cluster.apps_on(NODE) == ["lonely", "web"]
    assert cluster.ended == []
    assert cluster.node()["spec"]["unschedulable"]
    sim.cancel(event)
    agent.wait_log("closed", event_id=event)
    assert "unschedulable" not in cluster.node()["spec"]
