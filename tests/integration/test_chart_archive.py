"""The Helm chart without Helm: its archive, its values, and what its account may do in a cluster's stand-in."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from helm_chart import NAMESPACE, RELEASE, pack, recorded_access
from kube_access import ADMIN, service_account
from kube_api import KubeApi
from kube_objects import NODES

from scheduled_events_agent import __version__
from scheduled_events_agent.kubernetes.account import find_account
from scheduled_events_agent.kubernetes.client import Client
from scheduled_events_agent.kubernetes.rights import may, rights_to_drain, rights_to_report

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "packaging/helm/scheduled-events-agent"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
Ask = Callable[..., httpx.Response]
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
EVENT = {
    "metadata": {"generateName": "vm-1."},
    "involvedObject": {"kind": "Node", "name": "vm-1"},
    "type": "Normal",
}
with_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
on_linux = pytest.mark.skipif(sys.platform == "win32", reason="the chart is packed on Linux")


# --- the archive


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The files of the archive, by their paths in it."""
    with tarfile.open(pack(tmp_path)) as archive:
        contents = {one.name: archive.extractfile(one) for one in archive.getmembers()}
    return {name: file.read().decode() for name, file in contents.items() if file is not None}


@on_linux
def test_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first = pack(tmp_path / "one")
    before = os.umask(0o077)
    try:
        second = pack(tmp_path / "two")
    finally:
        os.umask(before)
    assert first.name == f"scheduled-events-agent-{__version__}.tgz"
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        members = archive.getmembers()
    assert [one.name for one in members] == sorted(one.name for one in members)
    assert {(one.uid, one.gid, one.mode) for one in members} == {(0, 0, 0o644)}
    assert len({one.mtime for one in members}) == 1


@on_linux
def test_the_archive_has_the_policies_and_rules_of_config(tmp_path: Path) -> None:
    with tarfile.open(pack(tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    chart = tmp_path / "scheduled-events-agent"
    for name, source in (
        ("policies/kubernetes.yaml", "config/examples/kubernetes-node.yaml"),
        ("policies/aks.yaml", "config/examples/aks-node.yaml"),
        ("prometheus/rules.yaml", "config/prometheus/rules.yaml"),
    ):
        packed, original = (path.read_text("utf-8") for path in (chart / name, ROOT / source))
        assert yaml.safe_load(packed) == yaml.safe_load(original)
        assert "$schema=" not in packed
    about = yaml.safe_load((chart / "Chart.yaml").read_text("utf-8"))
    assert (about["version"], about["appVersion"]) == (__version__, __version__)
    assert "@" not in re.sub(r"\w@\w", "", (chart / "Chart.yaml").read_text("utf-8").partition("\n")[2])
    page = (chart / "README.md").read_text("utf-8")
    assert "](../" not in page
    assert "](values.yaml)" in page
    assert ".invalid" not in f"{about}{page}"


@on_linux
def test_a_prerelease_has_no_chart_as_it_has_no_image(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"the chart needs an image, .* a prerelease such as 0\.2\.0rc1"):
        pack(tmp_path, "0.2.0rc1")
    assert list(tmp_path.iterdir()) == []


# --- the values


def test_the_default_values_are_valid_and_the_schema_has_each_of_them() -> None:
    jsonschema.validate(VALUES, SCHEMA)
    assert SCHEMA["properties"].keys() - VALUES.keys() == {"global", "enabled"}, "those of other charts"


def test_every_object_of_the_schema_that_is_ours_refuses_unknown_keys() -> None:
    named = [("", SCHEMA), *((name, one) for name, one in SCHEMA["properties"].items() if "properties" in one)]
    assert [name for name, one in named if one["additionalProperties"] is not False] == ["policy"]


def test_each_value_has_a_comment() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    paragraphs = re.split(r"\n\n+", text)
    named = [
        (re.findall(r"^(\w+):", paragraph, re.MULTILINE), paragraph.count("#"))
        for paragraph in paragraphs
        if not paragraph.startswith("# What each value")
    ]
    assert [key for keys, _ in named for key in keys] == list(VALUES)
    assert [keys for keys, comments in named if comments == 0] == []


# --- the rights


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubeApi]:
    """A cluster of two nodes, and the namespace of the chart."""
    with KubeApi(tmp_path, has_controllers=False) as api:
        api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        for node in ("vm-1", "vm-2"):
            api.add_node(node)
            api.add_pod(f"on-{node}", node)
        yield api


@pytest.fixture
def ask(api: KubeApi) -> Iterator[Ask]:
    """Sends a request as the chart's account, with the token of a pod on vm-1."""
    token = api.access.issue_token(service_account(NAMESPACE, RELEASE, "vm-1"))
    context = ssl.create_default_context(cafile=str(api.authority.ca))
    with httpx.Client(base_url=api.url, verify=context, trust_env=False) as client:

        def send(method: str, path: str, body: Any = None) -> httpx.Response:
            type_ = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
            headers = {"Authorization": f"Bearer {token}", "Content-Type": type_, "Connection": "close"}
            content = json.dumps(body) if body else None
            return client.request(method, path, content=content, headers=headers)

        yield send


@with_openssl
def test_the_account_may_drain_and_tell_of_its_own_node_and_do_little_else(api: KubeApi, ask: Ask) -> None:
    api.add_all(recorded_access())
    condition = {"status": {"conditions": [{"type": "ScheduledEvent", "status": "False"}]}}
    cordon = {"spec": {"unschedulable": True}}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    pods = "/api/v1/namespaces/default/pods"
    answers = {
        "get its node": ask("GET", "/api/v1/nodes/vm-1"),
        "cordon its node": ask("PATCH", "/api/v1/nodes/vm-1", cordon),
        "cordon another node": ask("PATCH", "/api/v1/nodes/vm-2", cordon),
        "tell of its node": ask("PATCH", "/api/v1/nodes/vm-1/status", condition),
        "tell of another node": ask("PATCH", "/api/v1/nodes/vm-2/status", condition),
        "create an event": ask("POST", "/api/v1/namespaces/default/events", EVENT),
        "create an event elsewhere": ask("POST", f"/api/v1/namespaces/{NAMESPACE}/events", EVENT),
        "list events": ask("GET", "/api/v1/namespaces/default/events"),
        "list nodes": ask("GET", "/api/v1/nodes"),
        "list pods": ask("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dvm-1"),
        "get a pod": ask("GET", f"{pods}/on-vm-1"),
        "evict elsewhere": ask("POST", f"{pods}/on-vm-2/eviction", eviction | {"metadata": {"name": "on-vm-2"}}),
        "delete a pod": ask("DELETE", f"{pods}/on-vm-1"),
        "delete a pod elsewhere": ask("DELETE", f"{pods}/on-vm-2"),
        "list Leases": ask("GET", LEASES),
    }
    assert {what: answer.status_code for what, answer in answers.items()} == {
        "get its node": 200,
        "cordon its node": 200,
        "cordon another node": 422,
        "tell of its node": 200,
        "tell of another node": 422,
        "create an event": 201,
        "create an event elsewhere": 403,
        "list events": 403,
        "list nodes": 403,
        "list pods": 200,
        "get a pod": 403,
        "evict elsewhere": 201,
        "delete a pod": 200,
        "delete a pod elsewhere": 422,
        "list Leases": 403,
    }
    assert answers["cordon another node"].json()["message"].endswith("the agent may change its own node only")


@with_openssl
def test_doctor_misses_no_right_of_the_account(api: KubeApi) -> None:
    api.add_all(recorded_access())
    kubeconfig = api.kubeconfig(service_account(NAMESPACE, RELEASE, "vm-1"))
    client = Client(find_account(str(kubeconfig), {}))
    needed = [
        *rights_to_report(has_conditions=True, has_events=True),
        *rights_to_drain(has_conditions=True),
    ]
    assert [str(right) for right in needed if not may(client, right, "vm-1")] == []


@with_openssl
def test_with_a_fleet_the_account_may_change_the_leases_of_its_records_and_no_others(
    api: KubeApi, ask: Ask
) -> None:
    api.add_all(recorded_access("chart_access_fleet"))
    for namespace in (NAMESPACE, "kube-system"):
        metadata = {"name": "kube-scheduler", "namespace": namespace}
        api.add({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}})
    elsewhere = LEASES.replace(NAMESPACE, "kube-system")
    record = {"metadata": {"name": "sea-1"}, "spec": {}}
    other = {"metadata": {"name": "kube-scheduler"}, "spec": {"holderIdentity": "vm-1"}}
    asked = [
        ("POST", LEASES, record, 201),
        ("PUT", f"{LEASES}/sea-1", record, 200),
        ("PUT", f"{LEASES}/sea-2", {"metadata": {"name": "sea-2"}, "spec": {}}, 201),
        ("GET", LEASES, None, 200),
        ("DELETE", f"{LEASES}/sea-1", None, 200),
        ("POST", LEASES, {"metadata": {"name": "mine"}, "spec": {}}, 422),
        ("PUT", f"{LEASES}/kube-scheduler", other, 422),
        ("DELETE", f"{LEASES}/kube-scheduler", None, 422),
        ("GET", f"{LEASES}/sea-2", None, 403),
        ("PATCH", f"{LEASES}/sea-2", record, 403),
        ("GET", elsewhere, None, 403),
        ("GET", "/apis/coordination.k8s.io/v1/leases", None, 403),
        ("POST", elsewhere, record, 403),
        ("PUT", f"{elsewhere}/kube-scheduler", other, 403),
    ]
    answers = [ask(method, path, body) for method, path, body, _ in asked]
    assert [answer.status_code for answer in answers] == [status for *_, status in asked]
    assert answers[5].json()["message"] == (
        f"leases.coordination.k8s.io \"mine\" is forbidden: ValidatingAdmissionPolicy '{RELEASE}-leases' "
        f"with binding '{RELEASE}-leases' denied request: the agent may change Leases of its fleet only"
    )


@with_openssl
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_the_readmes_command_takes_the_conditions_away_and_leaves_those_of_others(
    api: KubeApi, tmp_path: Path
) -> None:
    (command,) = re.findall(r"^\$ (kubectl get nodes .*)$", (CHART / "README.md").read_text("utf-8"), re.MULTILINE)
    before = {}
    for name in ("vm-1", "vm-2"):
        node = api.store.get(NODES, "", name)
        before[name] = node["status"]["conditions"]
        ours = {"type": "ScheduledEvent", "status": "False", "reason": "NoScheduledEvent"}
        status = {**node["status"], "conditions": [ours, *before[name]] if name == "vm-1" else before[name]}
        api.store.update(NODES, {**node, "metadata": {**node["metadata"]}, "status": status})
    environment = {**os.environ, "HOME": str(tmp_path), "KUBECONFIG": str(api.kubeconfig(ADMIN))}
    done = subprocess.run(
        ["/bin/sh", "-ec", command], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    after = {name: api.store.get(NODES, "", name)["status"]["conditions"] for name in before}
    assert after == before
