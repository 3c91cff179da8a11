"""Scheduler, kubelets, and the controllers of ReplicaSets, StatefulSets and namespaces: one thread.

A pod's annotations say how it behaves: after how many seconds it is ready, and after how many seconds it ends when
it is asked to ("never": only when its grace is over).
"""

import copy
import threading
import time
from collections.abc import Iterable

from kube_objects import (
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Object,
    Store,
    controller_of,
    is_finished,
    is_ready,
    write_time,
)
from kube_objects import now as current_time

READY_AFTER = "kube-api/ready-after-seconds"
ENDS_AFTER = "kube-api/ends-after-seconds"
_EVERY_SECONDS = 0.05
_QUICK_SECONDS = "0.1"
_CORDON = "node.kubernetes.io/unschedulable"


class Controllers:
    """Works from ``start`` to ``stop``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kube-controllers", daemon=True)
        self._bound_at: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        """By uid: since when a kubelet has had the pod, and since when the pod has been asked to end."""
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop_requested.set()
        if self._thread.ident is not None:
            self._thread.join(30)

    def _work(self) -> None:
        try:
            while not self._stop_requested.wait(_EVERY_SECONDS):
                with self._store.lock:
                    self._replace_pods()
                    self._schedule()
                    self._run_pods()
                    self._end_namespaces()
        except BaseException as error:  # noqa: BLE001 - the test is told at its end
            self.failure = error

    def _replace_pods(self) -> None:
        for owner in self._store.list(REPLICA_SETS):
            pods = [pod for pod in self._pods_of(owner) if not _is_over(pod)]
            for _ in range(owner["spec"]["replicas"] - len(pods)):
                self._create_pod(owner, {"generateName": f"{owner['metadata']['name']}-"})
        for owner in self._store.list(STATEFUL_SETS):
            taken = {pod["metadata"]["name"] for pod in self._pods_of(owner)}
            for number in range(owner["spec"]["replicas"]):
                name = f"{owner['metadata']['name']}-{number}"
                if name not in taken:
                    self._create_pod(owner, {"name": name})

    def _pods_of(self, owner: Object) -> Iterable[Object]:
        uid = owner["metadata"]["uid"]
        for pod in self._store.list(PODS, owner["metadata"]["namespace"]):
            controller = controller_of(pod)
            if controller is not None and controller["uid"] == uid:
                yield pod

    def _create_pod(self, owner: Object, name: Object) -> None:
        space = self._store.get(NAMESPACES, "", owner["metadata"]["namespace"])
        if "deletionTimestamp" in space["metadata"]:
            return
        template = copy.deepcopy(owner["spec"]["template"])
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        metadata = {**template.get("metadata", {}), **name, "ownerReferences": [reference]}
        self._store.create(PODS, owner["metadata"]["namespace"], {"metadata": metadata, "spec": template["spec"]})

    def _schedule(self) -> None:
        pods = self._store.list(PODS)
        for pod in pods:
            if pod["spec"].get("nodeName") or _is_over(pod):
                continue
            nodes = [node["metadata"]["name"] for node in self._store.list(NODES) if _is_for(node, pod)]
            if nodes:
                used = [one["spec"].get("nodeName") for one in self._store.list(PODS)]
                emptiest = min(nodes, key=used.count)
                self._store.update(PODS, _changed(pod, spec={"nodeName": emptiest}))

    def _run_pods(self) -> None:
        for pod in self._store.list(PODS):
            if not pod["spec"].get("nodeName"):
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._end_pod(pod)
            elif not is_finished(pod) and not is_ready(pod):
                self._start_pod(pod)

    def _start_pod(self, pod: Object) -> None:
        bound_at = self._bound_at.setdefault(pod["metadata"]["uid"], time.monotonic())
        if time.monotonic() - bound_at < float(_behaviour(pod, READY_AFTER)):
            return
        ready = {"type": "Ready", "status": "True", "lastProbeTime": None}
        ready["lastTransitionTime"] = write_time(current_time())
        others = [one for one in pod["status"].get("conditions", ()) if one["type"] != "Ready"]
        self._store.update(PODS, _changed(pod, status={"phase": "Running", "conditions": [ready, *others]}))

    def _end_pod(self, pod: Object) -> None:
        metadata = pod["metadata"]
        if is_finished(pod):
            return  # a finalizer keeps the object
        asked_at = self._asked_at.setdefault(metadata["uid"], time.monotonic())
        taken = time.monotonic() - asked_at
        behaviour = _behaviour(pod, ENDS_AFTER)
        has_ended = behaviour != "never" and taken >= float(behaviour)
        if has_ended or taken >= metadata["deletionGracePeriodSeconds"]:
            gone = _changed(pod, status={"phase": "Failed"}, metadata={"deletionGracePeriodSeconds": 0})
            self._store.update(PODS, gone)

    def _end_namespaces(self) -> None:
        for space in self._store.list(NAMESPACES):
            if "deletionTimestamp" not in space["metadata"]:
                continue
            pods = self._store.list(PODS, space["metadata"]["name"])
            for pod in pods:
                if "deletionTimestamp" not in pod["metadata"]:
                    self._store.delete_pod(pod, None)
            if not pods:
                self._store.remove(NAMESPACES, space)


def _is_over(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"] or is_finished(pod)


def _is_for(node: Object, pod: Object) -> bool:
    tolerations: list[Object] = pod["spec"]["tolerations"]
    tolerates = any(one.get("operator") == "Exists" and one.get("key", _CORDON) == _CORDON for one in tolerations)
    return tolerates or not (node["spec"].get("unschedulable") or node["spec"].get("taints"))


def _behaviour(pod: Object, annotation: str) -> str:
    annotations: dict[str, str] = pod["metadata"].get("annotations", {})
    return annotations.get(annotation, _QUICK_SECONDS)


def _changed(pod: Object, **changes: Object) -> Object:
    """A copy of the pod with these keys of its spec, status or metadata."""
    return {
        **pod,
        "metadata": {**pod["metadata"]},
        **{part: {**pod[part], **new} for part, new in changes.items()},
    }
