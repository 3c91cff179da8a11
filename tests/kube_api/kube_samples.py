"""Objects of a cluster as tests need them."""

from typing import Any

from kube_objects import Object

ROLE = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: agent}
rules:
  - {apiGroups: [""], resources: [nodes], verbs: [get, patch]}
  - {apiGroups: [""], resources: [pods], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: agent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: agent}
subjects: [{kind: ServiceAccount, name: agent, namespace: default}]
"""
"""A role of the account ``agent`` in the namespace ``default``."""


def set_of(
    kind: str, name: str, replicas: int, annotations: Object | None = None, spec: Object | None = None
) -> Object:
    """A ReplicaSet or StatefulSet whose pods have the label ``app``, and behave as the annotations say."""
    metadata = {"labels": {"app": name}, "annotations": annotations or {}}
    whole = {"containers": [{"name": "it", "image": "x"}], **(spec or {})}
    template = {"metadata": metadata, "spec": whole}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "template": template},
    }


def budget(name: str, *, of: str | None = None, **spec: Any) -> Object:
    """A budget for the pods of a set; ``of``: its name, if the budget has another."""
    whole = {"selector": {"matchLabels": {"app": of or name}}, **spec}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": whole}


def owned_by(kind: str) -> list[Object]:
    """Owner references of a pod with a controller that does not replace it."""
    group = "batch/v1" if kind == "Job" else "apps/v1"
    return [{"apiVersion": group, "kind": kind, "name": "it", "uid": "11d9a7c1", "controller": True}]
