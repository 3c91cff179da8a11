"""The example policy for a Kubernetes node: the real kubectl, and an API server that knows one node and its pods.

The API server is a stand-in on loopback, with only what kubectl asks for here. This shows the commands to kubectl
and that it accepts them, not what a real API server does with them.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from examples import copy_hooks, example
from harness import CHECKOUT, PATIENCE, Agent, Answer, Request, Server, Simulator

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the hooks are shell scripts for Linux"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here, and Debian has no package of it"),
]

MARK = "scheduled-events-agent/cordoned-for"
NODE = "node-1"


def resource(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "singularName": "",
        "namespaced": True,
        "kind": kind,
        "verbs": ["get", "list", "patch"],
        **more,
    }


class Cluster(Server):
    """One node, its pods, and what kubectl asked for; a pod that is evicted is gone at once."""

    def __init__(self) -> None:
        super().__init__()
        self.node: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "annotations": {}},
            "spec": {},
        }
        self.pods: dict[str, dict[str, Any]] = {}
        self.budgets_allow = True
        self.budgets_keep: set[str] = set()
        self.refuses: set[str] = set()
        """Methods whose next request fails."""
        self.writes: list[tuple[str, str, Any]] = []
        self.asked: set[tuple[str, str, str]] = set()
        """API group, resource and verb of each request, discovery left out."""

    def answer(self, request: Request) -> Answer:
        path = request.path.partition("?")[0]
        if path == f"/api/v1/nodes/{NODE}" and request.method in self.refuses:
            self.refuses.remove(request.method)
            code, content = 500, status("InternalError", 500, "the server is being restarted")
        elif request.method == "GET":
            code, content = self.get(path)
        else:
            code, content = self.write(request.method, path, json.loads(request.body))
        return Answer(code, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def add_pod(self, name: str, owner: str = "") -> None:
        controller = {"apiVersion": "apps/v1", "kind": owner, "name": "owner", "uid": owner, "controller": True}
        owners = [controller] if owner else []
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "uid": name, "ownerReferences": owners},
            "spec": {"nodeName": NODE, "containers": []},
            "status": {"phase": "Running"},
        }

    @property
    def is_cordoned(self) -> bool:
        return bool(self.node["spec"].get("unschedulable"))

    @property
    def mark(self) -> str | None:
        annotations: dict[str, str] = self.node["metadata"]["annotations"]
        return annotations.get(MARK)

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            version = {"groupVersion": "apps/v1", "version": "v1"}
            groups = [{"name": "apps", "versions": [version], "preferredVersion": version}]
            policy = {"groupVersion": "policy/v1", "version": "v1"}
            groups.append({"name": "policy", "versions": [policy], "preferredVersion": policy})
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path == "/api/v1":
            resources = [
                resource("nodes", "Node", namespaced=False),
                resource("pods", "Pod"),
                resource("pods/eviction", "Eviction", group="policy", version="v1", verbs=["create"]),
            ]
            return 200, {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources}
        if path == "/apis/apps/v1":
            resources = [resource("daemonsets", "DaemonSet")]
            return 200, {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": resources}
        if path == "/apis/policy/v1":
            return 200, {"kind": "APIResourceList", "groupVersion": "policy/v1", "resources": []}
        if path == f"/api/v1/nodes/{NODE}":
            self.asked.add(("", "nodes", "get"))
            return 200, self.node
        if path == "/api/v1/pods":
            self.asked.add(("", "pods", "list"))
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [*self.pods.values()]}
        if path == "/apis/apps/v1/namespaces/default/daemonsets/owner":
            self.asked.add(("apps", "daemonsets", "get"))
            return 200, {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "owner"}}
        name = path.rpartition("/")[2]
        if path == f"/api/v1/namespaces/default/pods/{name}":
            self.asked.add(("", "pods", "get"))
            if name in self.pods:
                return 200, self.pods[name]
        return 404, status("NotFound", 404, f"{path} not found")

    def write(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.writes.append((method, path, body))
        if method == "PATCH" and path == f"/api/v1/nodes/{NODE}":
            self.asked.add(("", "nodes", "patch"))
            merge(self.node, body)
            return 200, self.node
        if method == "POST" and path.endswith("/eviction"):
            self.asked.add(("", "pods/eviction", "create"))
            if not self.budgets_allow or path.split("/")[-2] in self.budgets_keep:
                return 429, status("TooManyRequests", 429, "Cannot evict pod as it would violate the budget.")
            del self.pods[path.split("/")[-2]]
            return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 405, status("MethodNotAllowed", 405, path)


def status(reason: str, code: int, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
        "message": message,
    }


def merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply a JSON merge patch."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


class Node:
    """A node's hooks and its kubeconfig."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.hooks = copy_hooks(directory)
        self.kubeconfig = directory / "kubeconfig"
        self.cache = directory / "cache"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(content), encoding="utf-8")

    def run_hook(self, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.cache),
            "KUBERNETES_NODE": NODE,
            "SCHEDULED_EVENT_ID": "ABC-1",
            **variables,
        }
        return subprocess.run(
            [str(self.hooks / name)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as one:
        one.add_pod("web", "ReplicaSet")
        one.add_pod("logs", "DaemonSet")
        yield one


@pytest.fixture
def node(tmp_path: Path, cluster: Cluster) -> Node:
    return Node(tmp_path, cluster)


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator, node: Node) -> Iterator[Agent]:
    """An agent with the example's policy, started."""
    with Agent(tmp_path / "agent", sim.endpoint()) as one:
        # All that the test changes in the example.
        replacements = {
            "KUBECONFIG: /etc/scheduled-events-agent/credentials/kubeconfig": "\n      ".join(
                [f"KUBECONFIG: {node.kubeconfig}", f"KUBECACHEDIR: {node.cache}", f"KUBERNETES_NODE: {NODE}"]
            )
        }
        policy = example("kubernetes-node.yaml", node.hooks, sim.endpoint(), replacements)
        one.config.write_text(policy, encoding="utf-8")
        one.start()
        yield one


def test_a_node_is_cordoned_drained_approved_and_uncordoned(
    cluster: Cluster, sim: Simulator, agent: Agent
) -> None:
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_started(event)
    assert cluster.is_cordoned
    assert cluster.mark == event
    assert list(cluster.pods) == ["logs"]
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert not cluster.is_cordoned
    assert cluster.mark is None
    cordon, eviction, uncordon = cluster.writes
    node_path = f"/api/v1/nodes/{NODE}"
    assert cordon == (
        "PATCH",
        node_path,
        {"spec": {"unschedulable": True}, "metadata": {"annotations": {MARK: event}}},
    )
    assert eviction[:2] == ("POST", "/api/v1/namespaces/default/pods/web/eviction")
    assert "gracePeriodSeconds" not in eviction[2].get("deleteOptions", {})  # there is time for the pod's own
    assert uncordon == (
        "PATCH",
        node_path,
        {"spec": {"unschedulable": None}, "metadata": {"annotations": {MARK: None}}},
    )


def test_an_eviction_gives_pods_the_time_that_is_left(cluster: Cluster, sim: Simulator, agent: Agent) -> None:
    event = sim.schedule("Preempt", notice_seconds=30, lasts_seconds=None)
    agent.wait_log("hook finished", reason="hook drain: exit code 0 (succeeded)")
    assert sim.event(event).status == "Scheduled"
    assert sim.approvals() == ()
    assert list(cluster.pods) == ["logs"]
    eviction = cluster.writes[-1][2]
    assert 1 <= eviction["deleteOptions"]["gracePeriodSeconds"] <= 10


def test_a_node_cordoned_by_another_tool_stays_cordoned(cluster: Cluster, node: Node) -> None:
    cluster.node["spec"]["unschedulable"] = True
    done = node.run_hook("kubernetes-prepare")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"kubernetes-prepare: {NODE} was cordoned already, and stays cordoned\n")
    assert list(cluster.pods) == ["logs"]
    done = node.run_hook("kubernetes-recover")
    assert done.stdout == f"kubernetes-recover: {NODE} was not cordoned by this agent: left as it is\n"
    assert cluster.is_cordoned
    assert [method for method, _, _ in cluster.writes] == ["POST"]


def test_a_budget_that_forbids_the_eviction_is_a_failure_in_time(cluster: Cluster, node: Node) -> None:
    cluster.budgets_allow = False
    done = node.run_hook("kubernetes-prepare", SCHEDULED_EVENT_SECONDS_LEFT="13")
    assert done.returncode == 1
    assert "web" in done.stderr
    assert list(cluster.pods) == ["web", "logs"]
    assert cluster.mark == "ABC-1"  # so that the recovery uncordons it


def test_an_unmanaged_pod_is_evicted_only_on_request(cluster: Cluster, node: Node) -> None:
    cluster.add_pod("lonely")
    done = node.run_hook("kubernetes-prepare")
    assert done.returncode == 1
    assert "lonely" in done.stderr
    assert [*cluster.pods] == ["web", "logs", "lonely"]
    assert node.run_hook("kubernetes-prepare", KUBERNETES_FORCE="yes").returncode == 0
    assert [*cluster.pods] == ["logs"]


@pytest.mark.parametrize("type_", ["Preempt", "Terminate"])
def test_a_pod_without_a_controller_does_not_stop_the_drain_before_a_deletion(
    cluster: Cluster, node: Node, type_: str
) -> None:
    cluster.add_pod("lonely")
    done = node.run_hook("kubernetes-prepare", SCHEDULED_EVENT_TYPE=type_)
    assert done.returncode == 0, done.stderr
    assert [*cluster.pods] == ["logs"]
    assert re.search(r"declare no controller.*: default/lonely", done.stderr)
    cluster.add_pod("lonely")
    done = node.run_hook("kubernetes-prepare", SCHEDULED_EVENT_TYPE=type_, KUBERNETES_FORCE="no")
    assert done.returncode == 1
    assert [*cluster.pods] == ["logs", "lonely"]


def test_a_request_that_fails_before_the_drain_is_sent_again(cluster: Cluster, node: Node) -> None:
    cluster.refuses = {"GET", "PATCH"}
    done = node.run_hook("kubernetes-prepare")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kubernetes-prepare: did not succeed, and is tried again: kubectl ") == 2
    assert cluster.mark == "ABC-1"
    assert list(cluster.pods) == ["logs"]


def test_the_drain_ends_in_time_and_names_the_remaining_pods(cluster: Cluster, node: Node) -> None:
    cluster.budgets_allow = False
    done = node.run_hook("kubernetes-prepare", KUBERNETES_WAIT="5")
    assert done.returncode == 1
    assert "daemon sets' included: default/web default/logs" in done.stderr


def test_pods_kept_by_a_budget_are_named_and_the_rest_is_evicted(cluster: Cluster, node: Node) -> None:
    cluster.add_pod("guarded", "ReplicaSet")
    cluster.budgets_keep = {"guarded"}
    done = node.run_hook("kubernetes-prepare", SCHEDULED_EVENT_TYPE="Preempt", SCHEDULED_EVENT_SECONDS_LEFT="40")
    assert done.returncode == 1
    assert [*cluster.pods] == ["logs", "guarded"]
    assert done.stderr.endswith(
        f"kubernetes-prepare: {NODE} is not drained; "
        "pods there, daemon sets' included: default/logs default/guarded \n"
    )


def test_the_role_in_the_cookbook_allows_what_the_hooks_ask_for_and_no_more(cluster: Cluster, node: Node) -> None:
    for name in ("kubernetes-prepare", "kubernetes-recover"):
        assert node.run_hook(name).returncode == 0
    page = (CHECKOUT / "docs" / "cookbook" / "kubernetes.md").read_text(encoding="utf-8")
    (manifest,) = re.findall(r"^```yaml\n(apiVersion.*?)^```", page, re.MULTILINE | re.DOTALL)
    (role,) = (item for item in yaml.safe_load(manifest)["items"] if item["kind"] == "ClusterRole")
    allowed = {
        key for rule in role["rules"] for key in product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }
    assert cluster.asked == allowed


def test_both_hooks_may_run_again(cluster: Cluster, node: Node) -> None:
    names = ["kubernetes-prepare", "kubernetes-prepare", "kubernetes-recover", "kubernetes-recover"]
    runs = [node.run_hook(name) for name in names]
    assert [done.returncode for done in runs] == [0, 0, 0, 0]
    assert runs[1].stdout.startswith(f"kubernetes-prepare: {NODE} has the mark of this agent already, for ABC-1\n")
    assert runs[3].stdout == f"kubernetes-recover: {NODE} was not cordoned by this agent: left as it is\n"
    assert [method for method, _, _ in cluster.writes] == ["PATCH", "POST", "PATCH"]


def test_without_credentials_nothing_is_asked(cluster: Cluster, node: Node) -> None:
    done = node.run_hook("kubernetes-prepare", KUBECONFIG="")
    assert done.returncode == 2
    assert done.stderr.endswith("KUBECONFIG: is not set: the file with the credentials\n")
    assert cluster.writes == []
