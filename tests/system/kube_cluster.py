"""A real API server of Kubernetes on loopback, with etcd and the controllers that a drain depends on.

The nodes are rows in it, not machines: a thread stands for the scheduler and for their kubelets. It binds pods
to a node that takes some, says some time later that they are ready, and removes those that are to end.
"""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import base64
import contextlib
import fcntl
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apt
import httpx
import pytest
import yaml
from harness import CHECKOUT, PATIENCE
from ports import free_port

VERSION = "1.34.3"
NODE, OTHER = "vm-1", "vm-2"
_PLACE = CHECKOUT / f".cache/kubernetes-{VERSION}"
_READY_AFTER_SECONDS = 2.0  # a second pod of a budget is refused meanwhile
_CONTROLLERS = "disruption-controller,replicaset-controller,serviceaccount-token-controller"
_PROGRAMS = ("kube-apiserver", "kube-controller-manager")


def programs() -> Path:
    """Where API server and controllers are; built from the Go module k8s.io/kubernetes if they are not here yet.

    That takes ten minutes on two cores. Skips the test if there is no Go.
    """
    go = shutil.which("go")
    if not (_PLACE / "ready").exists() and go is None:
        pytest.skip("Kubernetes is built from its Go module, and there is no go here")
    _PLACE.mkdir(parents=True, exist_ok=True)
    with (_PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_PLACE / "ready").exists():
            _build(str(go))
            (_PLACE / "ready").touch()
    return _PLACE / "bin"


def _build(go: str) -> None:
    found = _run_go(go, "mod", "download", "-json", f"k8s.io/kubernetes@v{VERSION}")
    text = Path(json.loads(found)["GoMod"]).read_text(encoding="utf-8")
    # Its own libraries have no versions there, since they lie beside it where it is developed.
    libraries = sorted(set(re.findall(r"^\s*(k8s\.io/\S+) v0\.0\.0\s", text, re.MULTILINE)))
    release = f"v0.{VERSION.partition('.')[2]}"
    module = [
        "module example/kube",
        "go 1.24",
        f"require k8s.io/kubernetes v{VERSION}",
        *(f"replace {library} => {library} {release}" for library in libraries),
    ]
    (_PLACE / "go.mod").write_text("\n".join(module) + "\n", encoding="utf-8")
    packages = [f"k8s.io/kubernetes/cmd/{program}" for program in _PROGRAMS]
    _run_go(go, "build", "-mod=mod", "-p", "2", "-ldflags=-s", "-o", "bin/", *packages)


def _run_go(go: str, *arguments: str) -> str:
    done = subprocess.run([go, *arguments], cwd=_PLACE, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Cluster:
    """API server, etcd and controllers, below one directory; two nodes that take pods."""

    def __init__(self, directory: Path) -> None:
        self.kubeconfig = directory / "admin.kubeconfig"
        self.ended: list[str] = []  # by their "app" label, in the order in which they ended
        self._directory = directory
        self._programs = programs()
        apt.unpack(CHECKOUT / ".cache/etcd", "etcd-server")
        self._url = f"https://127.0.0.1:{free_port()}"
        self._client = httpx.Client(
            base_url=self._url, verify=False, headers={"Authorization": "Bearer admin"}, timeout=PATIENCE
        )
        self._bound_at: dict[str, float] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._be_scheduler_and_kubelets)

    def start(self) -> None:
        """Start all, and wait until pods can be made."""
        key = self._directory / "key.pem"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True, timeout=PATIENCE
        )
        (self._directory / "tokens.csv").write_text('admin,admin,admin,"system:masters"\n')
        self.write_kubeconfig(self.kubeconfig, "admin")
        etcd, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._start(
            str(CHECKOUT / ".cache/etcd/usr/bin/etcd"), f"--data-dir={self._directory}/etcd",
            f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip
        self._start(
            str(self._programs / "kube-apiserver"), f"--etcd-servers={etcd}", "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
            f"--secure-port={self._url.rpartition(':')[2]}", f"--cert-dir={self._directory}/certificates",
            "--service-account-issuer=https://127.0.0.1", f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}", "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self._directory}/tokens.csv", "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip
        self._wait(lambda: self._client.get("/readyz").status_code == httpx.codes.OK, "the API server was ready")
        self._start(
            str(self._programs / "kube-controller-manager"), f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={key}", f"--controllers={_CONTROLLERS}", "--leader-elect=false",
            "--secure-port=0",
        )  # fmt: skip
        for name in (NODE, OTHER):
            self.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        self._thread.start()

    def write_kubeconfig(self, path: Path, token: str) -> None:
        """For kubectl, as the account that this token is of."""
        cluster = {"server": self._url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """What it says, as an administrator; raises CalledProcessError."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=PATIENCE)
        return done.stdout

    def apply(self, *what: dict[str, Any]) -> None:
        self.kubectl("apply", "--filename=-", text=yaml.safe_dump_all(what))

    def run_pods(self, app: str, count: int, *, at_least: int | None = None) -> None:
        """Run a replica set on the node, with a disruption budget if ``at_least``; wait until it is ready."""
        pod = {"metadata": {"labels": {"app": app}}, "spec": _pod_spec()}
        selector = {"matchLabels": {"app": app}}
        spec = {"replicas": count, "selector": selector, "template": pod}
        self.apply({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": app}, "spec": spec})
        self.wait_ready(app, count)
        if at_least is not None:
            budget = {"minAvailable": at_least, "selector": selector}
            kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
            self.apply({**kind, "metadata": {"name": app}, "spec": budget})
            self._wait(
                lambda: (
                    self._get("/apis/policy/v1/namespaces/default/poddisruptionbudgets/" + app)
                    .get("status", {})
                    .get("currentHealthy")
                    == count
                ),
                "the budget counted its pods",
            )

    def run_bare_pod(self, name: str) -> None:
        """Run a pod without a controller."""
        metadata = {"name": name, "labels": {"app": name}}
        self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _pod_spec()})
        self.wait_ready(name, 1)

    def wait_ready(self, app: str, count: int) -> None:
        self._wait(lambda: len([pod for pod in self._pods() if _app(pod) == app and _is_ready(pod)]) == count, app)

    def apps_on(self, node: str) -> list[str]:
        """Which pods run there, by their label, sorted."""
        return sorted(_app(pod) for pod in self._pods() if pod["spec"].get("nodeName") == node and _is_ready(pod))

    def node(self) -> dict[str, Any]:
        return self._get(f"/api/v1/nodes/{NODE}")

    def token_of(self, secret: str) -> str:
        """The token that the controllers have put into this secret of kube-system."""
        path = f"/api/v1/namespaces/kube-system/secrets/{secret}"
        self._wait(lambda: "token" in self._get(path).get("data", {}), "there was a token")
        return base64.b64decode(self._get(path)["data"]["token"]).decode()

    def close(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)
        for process in reversed(self._processes):
            process.kill()
            process.wait(PATIENCE)
        self._client.close()

    def _start(self, *command: str) -> None:
        with (self._directory / f"{Path(command[0]).name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=log))

    def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.get(path).json()
        return answer

    def _pods(self) -> list[dict[str, Any]]:
        pods: list[dict[str, Any]] = self._get("/api/v1/namespaces/default/pods").get("items", [])
        return pods

    def _wait(self, test: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(httpx.TransportError):
                if test():
                    return
            logs = {path.name: path.read_text("utf-8")[-2000:] for path in self._directory.glob("*.log")}
            assert time.monotonic() < deadline, f"gave up waiting until {what}: {logs}"
            time.sleep(0.1)

    def _be_scheduler_and_kubelets(self) -> None:
        while not self._is_over.wait(0.2):
            with contextlib.suppress(httpx.TransportError):
                for pod in self._pods():
                    self._move(pod)

    def _move(self, pod: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self._client.request("DELETE", path, json={"gracePeriodSeconds": 0})
            self.ended.append(_app(pod))
        elif "nodeName" not in pod["spec"]:
            node = OTHER if self.node()["spec"].get("unschedulable") else NODE
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": pod["metadata"]["name"]},
                "target": target,
            }
            self._client.post(f"{path}/binding", json=binding)
            self._bound_at[path] = time.monotonic()
        elif not _is_ready(pod) and time.monotonic() > self._bound_at[path] + _READY_AFTER_SECONDS:
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            merge = {"Content-Type": "application/merge-patch+json"}
            self._client.patch(f"{path}/status", content=json.dumps({"status": status}), headers=merge)


def _pod_spec() -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "it", "image": "example"}],
    }


def _app(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["app"])


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """One that runs, and ends."""
    with contextlib.closing(Cluster(directory)) as made:
        made.start()
        yield made
