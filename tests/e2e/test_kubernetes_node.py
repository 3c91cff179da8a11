"""The example policy for a Kubernetes node: the agent's own commands are its hooks; the cluster is a stand-in."""

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from harness import CHECKOUT, Agent, Simulator
from helm_chart import recorded_access
from kube_access import ADMIN, service_account
from kube_api import KubeApi
from kube_objects import NODES
from kube_samples import budget, owned_by, set_of
from receiver import wait_until

from scheduled_events_agent.kubernetes.node_status import MARK

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubeApi]:
    with KubeApi(tmp_path) as api:
        api.add_node("vm-1")
        yield api


@pytest.fixture
def start(tmp_path: Path, sim: Simulator, api: KubeApi) -> Iterator[Callable[..., Agent]]:
    """Starts an agent with the example, in which texts may be replaced."""
    with Agent(tmp_path / "agent", sim.endpoint()) as agent:

        def start_agent(*, more: str = "", **replacements: str) -> Agent:
            policy = (CHECKOUT / "config/examples/kubernetes-node.yaml").read_text(encoding="utf-8")
            for old, new in replacements.items():
                assert f"timeout: {old}" in policy
                policy = policy.replace(f"timeout: {old}", f"timeout: {new}")
            policy += f"imds: {{endpoint: '{sim.endpoint()}', poll_interval: 250ms}}\n"
            agent.config.write_text(f"{policy}agent: {{listen: '127.0.0.1:0'}}\n{more}\n", encoding="utf-8")
            api.kubeconfig(ADMIN).rename(tmp_path / "kubeconfig")
            agent.environment |= {"CREDENTIALS_DIRECTORY": str(tmp_path), "KUBERNETES_NODE": "vm-1"}
            agent.start()
            return agent

        yield start_agent


def mark_of(api: KubeApi) -> str | None:
    mark: str | None = api.store.get(NODES, "", "vm-1")["metadata"].get("annotations", {}).get(MARK)
    return mark


def test_a_node_is_cordoned_drained_approved_and_uncordoned(
    sim: Simulator, api: KubeApi, start: Callable[..., Agent]
) -> None:
    api.add(set_of("ReplicaSet", "web", 2))
    api.add_pod("log", "vm-1", ownerReferences=owned_by("DaemonSet"))
    wait_until(lambda: len(api.pod_names("vm-1")) == 3, "the pods are on the node")
    agent = start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_started(event)
    assert (mark_of(api), api.pod_names("vm-1")) == (event, ["log"])
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert mark_of(api) is None
    assert "unschedulable" not in api.store.get(NODES, "", "vm-1")["spec"]


def test_a_drain_that_is_denied_needs_an_operator_and_says_which_right_is_missing(
    sim: Simulator, api: KubeApi, start: Callable[..., Agent], tmp_path: Path
) -> None:
    agent = start()
    api.kubeconfig(service_account("default", "agent", "vm-1")).replace(tmp_path / "kubeconfig")
    event = sim.schedule("Reboot", notice_seconds=900)
    agent.wait_phase(event, "held")
    (found,) = agent.status()["attention"]
    assert (found["kind"], found["severity"]) == ("prepare_failed", "act")
    assert [one["command"].split()[1] for one in found["commands"]] == ["retry", "approve"]
    shown = agent.run("status", "--config", str(agent.config), "--state-dir", str(agent.state_dir))
    assert (shown.returncode, 'cannot get resource "nodes"' in " ".join(shown.stdout.split())) == (3, True)
    api.kubeconfig(ADMIN).replace(tmp_path / "kubeconfig")
    assert agent.say("retry", event).returncode == 0
    sim.wait_approved(event)


@pytest.mark.nightly
def test_a_drain_that_a_budget_keeps_ends_before_the_hook_is_ended_and_names_the_pod(
    sim: Simulator, api: KubeApi, start: Callable[..., Agent]
) -> None:
    api.add(set_of("ReplicaSet", "web", 1))
    wait_until(lambda: len(api.pod_names("vm-1")) == 1, "the pod is on the node")
    api.add(budget("web", minAvailable=1))
    agent = start(**{"30m": "8s"})
    event = sim.schedule("Reboot", lasts_seconds=None)
    ended = agent.wait_log("hook finished", event_id=event)
    assert ended["reason"] == "hook drain: exit code 1 (failed)"
    last = agent.log("hook output", event_id=event)[-1]["line"]
    assert re.search(r"node vm-1 is not drained: 1 pod left: default/web-\w+ \(The disruption budget web ", last)
    began = agent.wait_log("hook started", event_id=event)
    seconds = datetime.fromisoformat(ended["time"]) - datetime.fromisoformat(began["time"])
    assert 4.9 <= seconds.total_seconds() < 8
    agent.wait_log("held", event_id=event)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is counted otherwise there")
def test_the_agent_and_its_drain_fit_into_the_memory_of_the_charts_pod(
    sim: Simulator, api: KubeApi, start: Callable[..., Agent]
) -> None:
    """48 MiB while nothing is pending, which the chart requests; 96 while it drains."""
    api.add(set_of("ReplicaSet", "web", 20))
    wait_until(lambda: len(api.pod_names("vm-1")) == 20, "the pods are on the node")
    agent = start(more="kubernetes: {}")
    process = psutil.Process(agent.process.pid)
    event = sim.schedule("Reboot", lasts_seconds=None)
    peak = 0
    while not agent.log("prepared", event_id=event):
        with contextlib.suppress(psutil.Error):  # a child that has just ended
            peak = max(peak, sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))
        time.sleep(0.05)
    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    sim.wait_polls(20)
    assert peak < 96 * 1024**2
    assert process.memory_info().rss < 48 * 1024**2


IN_POD = """
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io
cp -r "$1" /run/secrets/kubernetes.io/serviceaccount
shift
exec "$@"
"""
"""The service account of a pod, for the process alone and what it starts."""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")
def test_an_evicted_vm_drains_by_the_service_account_of_its_pod_and_deletes_what_a_budget_keeps(
    tmp_path: Path, sim: Simulator, api: KubeApi
) -> None:
    account = service_account("scheduled-events-agent", "scheduled-events-agent", "vm-1")
    api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "scheduled-events-agent"}})
    api.add_all(recorded_access())
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "token").write_text(api.access.issue_token(account), encoding="utf-8")
    shutil.copy(api.authority.ca, mounted / "ca.crt")
    api.add(set_of("ReplicaSet", "web", 2))
    wait_until(lambda: len(api.pod_names("vm-1")) == 2, "the pods are on the node")
    api.add(budget("web", minAvailable=2))
    with Agent(tmp_path / "agent", sim.endpoint()) as agent:
        policy = (CHECKOUT / "config/examples/kubernetes-node.yaml").read_text(encoding="utf-8")
        policy += f"imds: {{endpoint: '{sim.endpoint()}', poll_interval: 250ms}}\n"
        agent.config.write_text(f"{policy}agent: {{listen: '127.0.0.1:0'}}\n", encoding="utf-8")
        address, _, port = api.url.removeprefix("https://").partition(":")
        agent.environment |= {"KUBERNETES_SERVICE_HOST": address, "KUBERNETES_SERVICE_PORT": port}
        agent.prefix = ["unshare", "--mount", "sh", "-ec", IN_POD, "sh", str(mounted)]
        agent.start()
        event = sim.schedule("Preempt", lasts_seconds=None)
        ended = agent.wait_log("hook finished", event_id=event)
        assert ended["reason"] == "hook drain: exit code 0 (succeeded)"
        lines = [one["line"] for one in agent.log("hook output", event_id=event)]
    assert sum("kept: The disruption budget web needs 2" in line for line in lines) == 2
    assert sum(": deleted without asking its budgets" in line for line in lines) == 2
    assert api.pod_names("vm-1") == []
