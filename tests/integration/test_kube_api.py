"""What the stand-in of a Kubernetes API server does beyond the recorded answers: time, controllers, faults."""

import base64
import json
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kube_access import ADMIN, kubelet, service_account
from kube_api import KubeApi
from kube_controllers import ENDS_AFTER, READY_AFTER
from kube_faults import FaultName
from kube_objects import BUDGETS, NODES, PODS
from kube_samples import ROLE, budget, set_of
from receiver import wait_until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

RBAC = "rbac.authorization.k8s.io/v1"
EVICTION = {"apiVersion": "policy/v1", "kind": "Eviction"}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubeApi]:
    with KubeApi(tmp_path) as started:
        yield started


@pytest.fixture
def ask(api: KubeApi) -> Iterator[Callable[..., httpx.Response]]:
    """Sends a request as an administrator, or with another token."""
    with client_of(api) as client:

        def send(method: str, path: str, body: Any = None, *, token: str = api.admin_token) -> httpx.Response:
            type_ = "application/merge-patch+json" if method == "PATCH" else "application/json"
            headers = {"Authorization": f"Bearer {token}", "Content-Type": type_, "Connection": "close"}
            return client.request(method, path, content=json.dumps(body) if body else None, headers=headers)

        yield send


def client_of(api: KubeApi, *, seconds: float = 60, certificate: tuple[str, str] | None = None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(api.authority.ca))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return httpx.Client(base_url=api.url, verify=context, timeout=seconds, trust_env=False)


Ask = Callable[..., httpx.Response]


def evict(ask: Ask, name: str, **options: Any) -> httpx.Response:
    body = {**EVICTION, "metadata": {"name": name}, "deleteOptions": options}
    return ask("POST", f"/api/v1/namespaces/default/pods/{name}/eviction", body)


def allowed(api: KubeApi) -> int:
    api.evictions.count_budgets()
    return int(api.store.list(BUDGETS)[0]["status"]["disruptionsAllowed"])


def test_what_it_does_not_know_is_501_and_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not have"):
        ask_for_what_is_not_here(tmp_path)


def ask_for_what_is_not_here(directory: Path) -> None:
    with KubeApi(directory) as api, client_of(api) as client:
        headers = {"Authorization": f"Bearer {api.admin_token}"}
        paths = ("pods?watch=1", "secrets", "pods?fieldSelector=status.podIP%3Da", "pods/p/log")
        answers = [client.get(f"/api/v1/{path}", headers=headers).status_code for path in paths]
        answers.append(client.post("/api/v1/namespaces/default/pods", headers=headers, json={}).status_code)
        if answers != [501] * 5 or len(api.unknown) != 5:
            raise ValueError(answers)


def test_a_pod_is_scheduled_gets_ready_and_is_replaced_when_it_is_evicted(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add_node("vm-2")
    api.add(set_of("ReplicaSet", "web", 2))
    api.add(budget("web", minAvailable=1))
    wait_until(lambda: allowed(api) == 1, "both pods are ready")
    assert sorted(pod["spec"]["nodeName"] for pod in api.store.list(PODS)) == ["vm-1", "vm-2"]
    ask("PATCH", "/api/v1/nodes/vm-1", {"spec": {"unschedulable": True}})
    (name,) = api.pod_names("vm-1")
    assert evict(ask, name).status_code == 201
    wait_until(lambda: len(api.pod_names("vm-2")) == 2 and not api.pod_names("vm-1"), "another one is on vm-2")


def test_a_budget_denies_until_the_replacement_is_ready(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add(set_of("ReplicaSet", "web", 2, {READY_AFTER: "2"}))
    api.add(budget("web", maxUnavailable=1))
    wait_until(lambda: allowed(api) == 1, "both pods are ready")
    first, second = api.pod_names()
    assert evict(ask, first).status_code == 201
    denied = evict(ask, second)
    assert denied.json()["details"]["causes"][0]["message"] == (
        "The disruption budget web needs 1 healthy pods and has 1 currently"
    )
    wait_until(lambda: evict(ask, second).status_code == 201, "the budget allows it")


def test_a_budget_that_is_still_being_processed_says_when_to_come_again(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add_pod("one", "vm-1", labels={"app": "web"})
    api.add(budget("web", minAvailable=0))
    wait_until(lambda: allowed(api) == 1, "the pod is ready")
    api.evictions.counts_budgets = False
    denied = evict(ask, "one")
    assert (denied.status_code, denied.headers["Retry-After"]) == (429, "10")


def test_a_stateful_pod_comes_back_under_its_name_with_another_uid(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add(set_of("StatefulSet", "db", 1))
    wait_until(lambda: api.pod_names() == ["db-0"], "it is there")
    uid = api.store.list(PODS)[0]["metadata"]["uid"]
    assert evict(ask, "db-0", preconditions={"uid": uid}).status_code == 201
    wait_until(lambda: api.pod_names() and api.store.list(PODS)[0]["metadata"]["uid"] != uid, "it is back")
    assert evict(ask, "db-0", preconditions={"uid": uid}).status_code == 409


def test_a_pod_that_ignores_sigterm_ends_with_its_grace(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add_pod("deaf", "vm-1", grace_seconds=600, annotations={ENDS_AFTER: "never"})
    api.add_pod("good", "vm-1", grace_seconds=600)
    begun_at = time.monotonic()
    for name in ("deaf", "good"):
        assert evict(ask, name, gracePeriodSeconds=2).status_code == 201
    assert api.store.get(PODS, "default", "deaf")["metadata"]["deletionGracePeriodSeconds"] == 2
    wait_until(lambda: api.pod_names() == ["deaf"], "the one that listens is gone")
    wait_until(lambda: not api.pod_names(), "the other one is gone")
    assert time.monotonic() - begun_at >= 2


def test_a_grace_is_only_ever_shortened(api: KubeApi, ask: Ask) -> None:
    api.add_pod("deaf", "vm-1", grace_seconds=600, annotations={ENDS_AFTER: "never"})
    seen = []
    for seconds in (None, 100, 200, 100):
        body = None if seconds is None else {"gracePeriodSeconds": seconds}
        metadata = ask("DELETE", "/api/v1/namespaces/default/pods/deaf", body).json()["metadata"]
        seen.append((metadata["deletionGracePeriodSeconds"], metadata["deletionTimestamp"]))
    assert [grace for grace, _ in seen] == [600, 100, 100, 100]
    assert len(set(seen[1:])) == 1
    assert seen[1][1] < seen[0][1]


def test_an_eviction_that_is_only_tried_changes_nothing(api: KubeApi, ask: Ask) -> None:
    before = api.add_pod("one")
    assert evict(ask, "one", dryRun=["All"]).status_code == 201
    assert api.store.get(PODS, "default", "one") == before


def test_a_finalizer_keeps_the_object_of_a_pod_that_has_ended(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add_pod("kept", "vm-1", finalizers=["example.com/wait"])
    evict(ask, "kept")
    wait_until(lambda: api.store.list(PODS)[0]["status"]["phase"] == "Failed", "its containers have ended")
    unfinished = "fieldSelector=status.phase%21%3DFailed"
    assert ask("GET", f"/api/v1/pods?{unfinished}").json()["items"] == []
    ask("PATCH", "/api/v1/namespaces/default/pods/kept", {"metadata": {"finalizers": None}})
    assert api.pod_names() == []


def test_a_namespace_takes_its_pods_with_it(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "old"}})
    api.add_pod("last", "vm-1", namespace="old")
    ask("DELETE", "/api/v1/namespaces/old")
    wait_until(lambda: ask("GET", "/api/v1/namespaces/old").status_code == 404, "it is gone")
    assert api.pod_names() == []


def test_a_pod_goes_where_the_test_binds_it(api: KubeApi) -> None:
    waiting = api.add_pod("late")
    assert api.bind(waiting, "vm-9")["spec"]["nodeName"] == "vm-9"
    wait_until(lambda: api.store.list(PODS)[0]["status"]["phase"] == "Running", "a kubelet has it")


def test_a_role_in_yaml_counts_and_a_token_names_its_node(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.add_all(ROLE)
    token = api.access.issue_token(service_account("default", "agent", "vm-1"))
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims["kubernetes.io"]["node"]["name"] == "vm-1"
    assert ask("GET", "/api/v1/nodes/vm-1", token=token).status_code == 200
    denied = ask("DELETE", "/api/v1/namespaces/default/pods/p1", token=token)
    assert denied.json()["message"] == (
        'pods "p1" is forbidden: User "system:serviceaccount:default:agent" cannot delete resource "pods" '
        'in API group "" in the namespace "default"'
    )
    api.access.revoke_token(token)
    assert ask("GET", "/api/v1/nodes/vm-1", token=token).status_code == 401
    assert [one.status for one in api.seen("get", "nodes", "vm-1")] == [200, 401]


def test_a_role_counts_in_its_namespace_and_a_cluster_role_where_it_is_bound(api: KubeApi, ask: Ask) -> None:
    role = {"apiVersion": RBAC, "kind": "Role", "metadata": {"name": "reader"}}
    api.add({**role, "rules": [{"apiGroups": [""], "resources": ["events"], "verbs": ["list"]}]})
    pods = {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": "pods"}}
    api.add({**pods, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]})
    for kind, name in (("Role", "reader"), ("ClusterRole", "pods"), ("Role", "none")):
        metadata = {"name": f"agent-{name}"}
        subject = {"kind": "ServiceAccount", "name": "agent", "namespace": "kube-public"}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        binding = {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": reference}
        api.add({**binding, "subjects": [subject]})
    token = api.access.issue_token(service_account("kube-public", "agent"))
    paths = (
        "namespaces/default/events",
        "namespaces/default/pods",
        "namespaces/kube-public/events",
        "events",
        "pods",
    )
    answers = [ask("GET", f"/api/v1/{path}", token=token).status_code for path in paths]
    assert answers == [200, 200, 403, 403, 403]
    other = api.access.issue_token(service_account("default", "agent"))
    assert ask("GET", "/api/v1/namespaces/default/events", token=other).status_code == 403


def test_a_kubeconfig_leads_a_kubelet_to_its_own_node(api: KubeApi) -> None:
    api.add_node("vm-1")
    content = json.loads(api.kubeconfig(kubelet("vm-1"), certificate=True).read_text(encoding="utf-8"))
    user = content["users"][0]["user"]
    assert content["clusters"][0]["cluster"] == {"server": api.url, "certificate-authority": str(api.authority.ca)}
    with client_of(api, certificate=(user["client-certificate"], user["client-key"])) as client:
        assert client.get("/api/v1/nodes/vm-1").status_code == 200
        assert client.get("/api/v1/nodes/vm-2").status_code == 403
        gone = client.post("/api/v1/namespaces/default/pods/gone/eviction", json={**EVICTION, "metadata": {}})
        assert gone.status_code == 404


def test_pages_show_the_list_as_it_was_at_the_first_and_may_expire(api: KubeApi, ask: Ask) -> None:
    for number in range(3):
        api.add_pod(f"p{number}")
    token = ask("GET", "/api/v1/pods?limit=2").json()["metadata"]["continue"]
    ask("DELETE", "/api/v1/namespaces/default/pods/p2")
    assert api.pod_names() == ["p0", "p1"]
    rest = ask("GET", f"/api/v1/pods?limit=2&continue={token}").json()["items"]
    assert [pod["metadata"]["name"] for pod in rest] == ["p2"]
    assert len(ask("GET", "/api/v1/pods?limit=1&resourceVersion=0").json()["items"]) == 2  # the cache ignores it
    api.lists.expire()
    assert ask("GET", f"/api/v1/pods?limit=2&continue={token}").status_code == 410


def test_after_a_stop_it_listens_again_on_its_port_with_what_it_knew(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.stop()
    with pytest.raises(httpx.TransportError):
        ask("GET", "/api/v1/nodes/vm-1")
    api.start()
    assert ask("GET", "/api/v1/nodes/vm-1").status_code == 200


def test_while_it_is_paused_a_request_waits(api: KubeApi, ask: Ask) -> None:
    api.add_node("vm-1")
    api.pause()
    headers = {"Authorization": f"Bearer {api.admin_token}"}
    with client_of(api, seconds=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.get("/api/v1/nodes/vm-1", headers=headers)
    assert api.calls == []
    api.resume()
    assert ask("GET", "/api/v1/nodes/vm-1").status_code == 200
    wait_until(lambda: len(api.calls) == 2, "the first one was carried out too, though its client had gone")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("too many requests", 429),
        ("bad gateway", 502),
        ("web page", 200),
        ("unauthorized", 401),
        ("webhook 400", 400),
        ("webhook 403", 403),
        ("webhook 422", 422),
        ("webhook 500", 500),
    ],
)
def test_a_fault_hits_the_requests_it_is_meant_for(api: KubeApi, ask: Ask, name: FaultName, status: int) -> None:
    api.add_node("vm-1")
    api.go_wrong(name, lambda call: call.name == "vm-1", times=1)
    assert ask("GET", "/api/v1/nodes").status_code == 200
    answer = ask("GET", "/api/v1/nodes/vm-1")
    assert (answer.status_code, answer.headers.get("Retry-After")) == (status, "3" if status == 429 else None)
    is_status = answer.headers["Content-Type"] == "application/json"
    assert is_status is (name not in ("too many requests", "bad gateway", "web page"))
    assert ask("GET", "/api/v1/nodes/vm-1").json()["kind"] == "Node"


def test_an_answer_may_break_off_trickle_or_have_no_end(api: KubeApi, ask: Ask) -> None:
    api.go_wrong("broken off", times=1)
    with pytest.raises(httpx.RemoteProtocolError):
        ask("GET", "/api/v1/nodes")
    assert [one.status for one in api.calls] == [0]
    api.go_wrong("trickle", times=1)
    api.go_wrong("endless", times=1)
    headers = {"Authorization": f"Bearer {api.admin_token}"}
    for size, least in (("1000", 1), (str(1024**3), 10_000_000)):
        with client_of(api) as client, client.stream("GET", "/api/v1/nodes", headers=headers) as answer:
            assert answer.headers["Content-Length"] == size
            received = 0
            for piece in answer.iter_raw():
                received += len(piece)
                if received >= least:
                    break
    api.go_wrong("trickle")
    api.recover()
    assert ask("GET", "/api/v1/nodes").status_code == 200


def test_what_happens_between_two_requests_of_a_client_makes_its_version_old(api: KubeApi, ask: Ask) -> None:
    version = api.add_node("vm-1")["metadata"]["resourceVersion"]
    api.before = lambda call: _relabel(api, call.name)
    patch = {"metadata": {"resourceVersion": version}, "spec": {"unschedulable": True}}
    assert ask("PATCH", "/api/v1/nodes/vm-1", patch).status_code == 409
    assert "unschedulable" not in api.store.get(NODES, "", "vm-1")["spec"]


def _relabel(api: KubeApi, name: str) -> None:
    node = api.store.get(NODES, "", name)
    api.store.update(NODES, {**node, "metadata": {**node["metadata"], "labels": {"changed": "yes"}}})


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_cordons_drains_describes_and_uncordons_a_node(api: KubeApi, tmp_path: Path) -> None:
    api.add_node("vm-1")
    api.add_node("vm-2")
    api.add(set_of("ReplicaSet", "web", 4))
    api.add(budget("web", minAvailable=3))
    log = api.add({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "log"}, "spec": {}})
    uid = log["metadata"]["uid"]
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "log", "uid": uid, "controller": True}
    api.add_pod("log-1", "vm-1", ownerReferences=[owner])
    wait_until(lambda: allowed(api) == 1 and len(api.pod_names("vm-1")) == 3, "all pods are ready")
    command = ["kubectl", f"--kubeconfig={api.kubeconfig(ADMIN)}", f"--cache-dir={tmp_path / 'cache'}"]

    def kubectl(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "vm-1 cordoned" in kubectl("cordon", "vm-1")
    assert "vm-1 drained" in kubectl("drain", "vm-1", "--ignore-daemonsets", "--timeout=180s")
    assert api.pod_names("vm-1") == ["log-1"]
    assert 429 in [one.status for one in api.seen("create", "pods/eviction")]
    shown = kubectl("describe", "node", "vm-1")
    assert re.search(r"Unschedulable: +true", shown)
    assert "log-1" in shown
    assert "vm-1 uncordoned" in kubectl("uncordon", "vm-1")
    assert "unschedulable" not in api.store.get(NODES, "", "vm-1")["spec"]
