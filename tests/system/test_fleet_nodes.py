"""Three agents of one group, each on a node of a cluster without a table: "at most one node" means that.

Real are the agents, their fleet in Leases, ``kubernetes drain`` and ``uncordon`` as their hooks, and the rights of
the chart. The API server with its kubelets is the stand-in; Azure is the simulator.
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import Agent, Simulator
from helm_chart import NAMESPACE, RELEASE, recorded_access
from kube_access import Call, service_account
from kube_api import KubeApi
from kube_objects import LEASES, NODES, PODS
from kube_samples import budget, owned_by
from receiver import wait_until

from scheduled_events_agent import host

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

VMS = ("vm-1", "vm-2", "vm-3")


class Cordons:
    """Counts the nodes that are cordoned at the same time, at each request."""

    def __init__(self, api: KubeApi) -> None:
        self.most = 0
        self._api = api
        self._lock = threading.Lock()
        api.before = self._look

    def _look(self, _: Call) -> None:
        cordoned = sum(bool(node["spec"].get("unschedulable")) for node in self._api.store.list(NODES))
        with self._lock:
            self.most = max(self.most, cordoned)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubeApi]:
    """Three nodes with three pods each."""
    with KubeApi(tmp_path) as cluster:
        cluster.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        cluster.add_all(recorded_access("chart_access_fleet"))
        for vm in VMS:
            cluster.add_node(vm, host.kubelet_boot_id())
            for number in range(3):
                owners = owned_by("ReplicaSet")
                cluster.add_pod(
                    f"app-{vm}-{number}", vm, grace_seconds=1, labels={"app": "app"}, ownerReferences=owners
                )
        yield cluster


@pytest.fixture
def azure() -> Iterator[Simulator]:
    with Simulator(vms=VMS, rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agents(api: KubeApi, azure: Simulator, tmp_path: Path) -> Iterator[dict[str, Agent]]:
    """One for each VM, started."""
    with ExitStack() as stack:
        started = {vm: stack.enter_context(closing(Agent(tmp_path / vm, azure.endpoint(vm)))) for vm in VMS}
        for vm, agent in started.items():
            account = service_account(NAMESPACE, RELEASE, vm)
            kubeconfig = api.kubeconfig(account).rename(tmp_path / f"{vm}.kubeconfig")
            _start(agent, vm, str(kubeconfig))
        yield started
        for agent in started.values():  # pytest shows it on failure only
            sys.stdout.write(f"=== {agent.directory.name}\n{''.join(agent.history)}")


def _start(agent: Agent, vm: str, kubeconfig: str) -> None:
    environment = {"KUBECONFIG": kubeconfig, "KUBERNETES_NODE": vm}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]

    def hook(action: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "scheduled_events_agent", "kubernetes", action]
        return {"run": command, "timeout": "4m", "env": environment}

    rule = {"name": "maintenance", "prepare": ["drain"], "recover": ["uncordon"], "approve": "when-prepared"}
    agent.write_policy(
        rules=[rule],
        hooks={"drain": hook("drain"), "uncordon": hook("uncordon")},
        fleet={"group": "web", "leases": NAMESPACE, "max_events": 1},
    )
    agent.environment["KUBECONFIG"] = kubeconfig
    agent.start()


def _one_batch(azure: Simulator, notice_seconds: float) -> dict[str, str]:
    """An event for each VM at the same time; their ids by VM."""
    return {
        vm: azure.schedule("Reboot", vms=(vm,), notice_seconds=notice_seconds, lasts_seconds=1.0) for vm in VMS
    }


def test_of_three_nodes_one_is_drained_at_a_time(api: KubeApi, azure: Simulator, agents: dict[str, Agent]) -> None:
    cordons = Cordons(api)
    events = _one_batch(azure, 900)
    for vm, event in events.items():
        agents[vm].wait_log("closed", event_id=event)
    assert cordons.most == 1
    begun = sorted((agents[vm].journal_times(kind="preparing")[0], vm) for vm in VMS)
    for (_, before), (began, _) in pairwise(begun):
        (recovered,) = agents[before].journal_times(kind="closed")
        assert recovered < began, f"{before} had not recovered when the next one began"
    assert api.store.list(PODS) == []
    assert not any(node["spec"].get("unschedulable") for node in api.store.list(NODES))
    wait_until(lambda: api.store.list(LEASES) == [], "no record is left")
    (agent, *_) = agents.values()
    assert agent.metric("fleet_requests_total", operation="create", result="ok") > 0


def test_nodes_that_wait_begin_in_time(api: KubeApi, azure: Simulator, agents: dict[str, Agent]) -> None:
    """The first node's budget never allows: it does not get ready, and keeps its slot."""
    api.add(budget("never", of="app", maxUnavailable=0))
    cordons = Cordons(api)
    events = _one_batch(azure, 315)
    waiting: set[str] = set()

    def two_wait() -> bool:
        for vm, event in events.items():
            if "waits for a slot" in agents[vm].wait_text(event):
                waiting.add(vm)
        return len(waiting) == 2

    wait_until(two_wait, "two of them wait")
    (first,) = set(VMS) - waiting
    agents[first].wait_phase(events[first], "preparing")
    assert cordons.most <= 1
    for vm in waiting:
        agents[vm].wait_phase(events[vm], "preparing")
        (began,) = agents[vm].journal_times(kind="preparing")
        latest_begin = azure.event(events[vm]).not_before_at - timedelta(minutes=5)
        assert timedelta(0) <= began - latest_begin < timedelta(seconds=5)
        assert agents[vm].metric("fleet_begun_without_slot_total", reason="late") == 1
    wait_until(lambda: cordons.most == 3, "their drains run")
