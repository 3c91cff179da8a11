"""Kinds and objects: defaults, checks, versions, and deletion with a grace period.

Invariant: an object in the store is never changed, only replaced by its next version. So whoever holds one sees it
as it was.
"""

import copy
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from kube_status import ApiError, UnknownError, forbidden, invalid

Object = dict[str, Any]

_MAX_ANNOTATIONS_BYTES = 256 * 1024
_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # those that the real one takes for generated names
_LABEL = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_BAD_LABEL = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', "
    "and must start and end with an alphanumeric character "
    f"(e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '{_LABEL}')"
)
_TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True)
class Resource:
    """A kind of object, and where it is found."""

    group: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Of every kind here there is one version."""
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def full_name(self) -> str:
        """The resource with its group, as messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def not_found(self, name: str) -> ApiError:
        details = {"name": name, "group": self.group, "kind": self.plural}
        return ApiError(404, f'{self.full_name} "{name}" not found', details=details)

    def conflict(self, name: str, why: str) -> ApiError:
        details = {"name": name, "group": self.group, "kind": self.plural}
        return ApiError(409, f'Operation cannot be fulfilled on {self.full_name} "{name}": {why}', details=details)


NODES = Resource("", "nodes", "Node", is_namespaced=False)
NAMESPACES = Resource("", "namespaces", "Namespace", is_namespaced=False)
PODS = Resource("", "pods", "Pod")
EVENTS = Resource("", "events", "Event")
CONFIG_MAPS = Resource("", "configmaps", "ConfigMap")
SERVICE_ACCOUNTS = Resource("", "serviceaccounts", "ServiceAccount")
LEASES = Resource("coordination.k8s.io", "leases", "Lease")
BUDGETS = Resource("policy", "poddisruptionbudgets", "PodDisruptionBudget")
DAEMON_SETS = Resource("apps", "daemonsets", "DaemonSet")
REPLICA_SETS = Resource("apps", "replicasets", "ReplicaSet")
STATEFUL_SETS = Resource("apps", "statefulsets", "StatefulSet")
JOBS = Resource("batch", "jobs", "Job")
_RBAC = "rbac.authorization.k8s.io"
CLUSTER_ROLES = Resource(_RBAC, "clusterroles", "ClusterRole", is_namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(_RBAC, "clusterrolebindings", "ClusterRoleBinding", is_namespaced=False)
ROLES = Resource(_RBAC, "roles", "Role")
ROLE_BINDINGS = Resource(_RBAC, "rolebindings", "RoleBinding")
_ADMISSION = "admissionregistration.k8s.io"
POLICIES = Resource(_ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", is_namespaced=False)
POLICY_BINDINGS = Resource(
    _ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", is_namespaced=False
)
REVIEWS = Resource(
    "authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview", is_namespaced=False
)
"""What the sender may do; nothing is stored."""
RESOURCES = (
    NODES, NAMESPACES, PODS, EVENTS, CONFIG_MAPS, SERVICE_ACCOUNTS, LEASES, BUDGETS, DAEMON_SETS, REPLICA_SETS,
    STATEFUL_SETS, JOBS, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS, ROLES, ROLE_BINDINGS, POLICIES, POLICY_BINDINGS,
    REVIEWS,
)  # fmt: skip


class Store:
    """All objects. ``lock`` is held by whoever does more than one thing that belongs together."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 200
        self.clock: Callable[[], datetime] = now
        """What new objects and changes get their times from."""
        self._objects: dict[tuple[Resource, str, str], Object] = {}
        self._random = random.Random(35)
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create(NAMESPACES, "", {"metadata": {"name": name}})

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        """All objects of a kind, or those of a namespace, in the order of namespaces and names."""
        with self.lock:
            keys = [key for key in self._objects if key[0] is resource and namespace in ("", key[1])]
            return [self._objects[key] for key in sorted(keys, key=lambda key: key[1:])]

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.lock:
            return self._objects.get((resource, namespace, name))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Raises ApiError 404."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise resource.not_found(name)
        return found

    def create(self, resource: Resource, namespace: str, new: Object) -> Object:
        """Add an object, with the defaults of its kind. Raises ApiError."""
        with self.lock:
            made: Object = {"kind": resource.kind, "apiVersion": resource.api_version, **copy.deepcopy(new)}
            if (made["kind"], made["apiVersion"]) != (resource.kind, resource.api_version):
                raise UnknownError(f"{made['apiVersion']} {made['kind']} is posted to {resource.full_name}")
            metadata = made.setdefault("metadata", {})
            if "name" not in metadata:
                suffix = "".join(self._random.choices(_NAME_LETTERS, k=5))
                metadata["name"] = metadata["generateName"] + suffix
            name: str = metadata["name"]
            if resource.is_namespaced:
                self._check_namespace(resource, namespace, name)
                metadata["namespace"] = namespace
            if (resource, namespace, name) in self._objects:
                details = {"name": name, "group": resource.group, "kind": resource.plural}
                message = f'{resource.full_name} "{name}" already exists'
                raise ApiError(409, message, reason="AlreadyExists", details=details)
            uid = UUID(int=self._random.getrandbits(128), version=4)  # the same in each run, as all else is
            metadata |= {"uid": str(uid), "creationTimestamp": write_time(self.clock())}
            if resource in (PODS, BUDGETS, POLICIES, POLICY_BINDINGS):
                metadata["generation"] = 1
            _set_defaults(resource, made)
            _check(resource, made)
            return self._put(resource, made)

    def update(self, resource: Resource, new: Object) -> Object:
        """Replace an object by its next version; a pod that has ended, and that no finalizer keeps, goes."""
        with self.lock:
            _check(resource, new)
            metadata = new["metadata"]
            has_ended = metadata.get("deletionGracePeriodSeconds") == 0 and not metadata.get("finalizers")
            if resource is PODS and "deletionTimestamp" in metadata and has_ended:
                return self.remove(resource, new)
            old = self.find(resource, metadata.get("namespace", ""), metadata["name"])
            if old is not None and _without_version(old) == _without_version(new):
                return old  # nothing changes: neither version nor time
            return self._put(resource, new)

    def remove(self, resource: Resource, old: Object) -> Object:
        """Take an object away at once; its last version."""
        with self.lock:
            self._objects.pop((resource, old["metadata"].get("namespace", ""), old["metadata"]["name"]))
            self.version += 1
            return old

    def delete_pod(self, pod: Object, grace_seconds: int | None) -> Object:
        """Begin the deletion of a pod, or shorten its grace; None: the pod's own. The pod as it is then."""
        with self.lock:
            changed = copy.deepcopy(pod)
            metadata = changed["metadata"]
            own: int = changed["spec"]["terminationGracePeriodSeconds"]
            seconds = own if grace_seconds is None else grace_seconds
            if not changed["spec"].get("nodeName") or is_finished(pod):
                seconds = 0
            current: int | None = metadata.get("deletionGracePeriodSeconds")
            if current is not None and (grace_seconds is None or seconds >= current):
                return pod
            end_at = now() + timedelta(seconds=seconds)
            if current is None:
                metadata["generation"] += 1
            else:
                end_at = parse_time(metadata["deletionTimestamp"]) + timedelta(seconds=seconds - current)
            if end_at < now() and seconds:
                end_at = now()
                seconds = 1
            metadata |= {"deletionTimestamp": write_time(end_at), "deletionGracePeriodSeconds": seconds}
            return self.update(PODS, changed)

    def _put(self, resource: Resource, new: Object) -> Object:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        # Of a real one there is an entry for each program that has written, with the fields that it has set.
        written = {"manager": "agent", "operation": "Update", "apiVersion": resource.api_version}
        new["metadata"]["managedFields"] = [{**written, "time": write_time(self.clock())}]
        self._objects[resource, new["metadata"].get("namespace", ""), new["metadata"]["name"]] = new
        return new

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        space = self.get(NAMESPACES, "", namespace)
        if "deletionTimestamp" in space["metadata"]:
            raise namespace_is_terminating(resource, namespace, name)


def _without_version(item: Object) -> Object:
    metadata = {
        key: value for key, value in item["metadata"].items() if key not in ("resourceVersion", "managedFields")
    }
    return {**item, "metadata": metadata}


def namespace_is_terminating(resource: Resource, namespace: str, name: str) -> ApiError:
    """The denial of whatever would be new in a namespace that is being deleted."""
    cause = {
        "reason": "NamespaceTerminating",
        "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }
    why = f"unable to create new content in namespace {namespace} because it is being terminated"
    return forbidden(resource.plural, resource.group, name, why, [cause])


def now() -> datetime:
    """The time as objects have it: in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def write_time(at: datetime) -> str:
    """The time as it is written into objects."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """The time that stands in an object."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def is_finished(pod: Object) -> bool:
    """Whether its containers have ended for good."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    """Whether the pod has its Ready condition."""
    conditions: list[Object] = pod["status"].get("conditions", [])
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def controller_of(pod: Object) -> Object | None:
    """The owner that would replace the pod."""
    owners: Iterator[Object] = (one for one in pod["metadata"].get("ownerReferences", ()) if one.get("controller"))
    return next(owners, None)


def _set_defaults(resource: Resource, new: Object) -> None:
    """What the API server adds to a new object, of that which this project or a recorded answer looks at."""
    if resource is PODS:
        _set_pod_defaults(new)
    elif resource is NODES:
        # A node of which no kubelet has said yet that it is ready.
        taints = [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]
        new["spec"] = {"taints": taints, **new.get("spec", {})}
        new["status"] = {"nodeInfo": {"bootID": ""}, **new.get("status", {})}
    elif resource is NAMESPACES:
        new["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = new["metadata"]["name"]
        new["spec"] = {"finalizers": ["kubernetes"]}
        new["status"] = {"phase": "Active"}
    elif resource is BUDGETS:
        new["status"] = {"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0}
    elif resource is EVENTS:
        nothing: Object = {"source": {}, "firstTimestamp": None, "lastTimestamp": None, "eventTime": None}
        new.update({**nothing, **new})
    elif resource is POLICIES:
        constraints = new["spec"]["matchConstraints"]
        constraints |= {"namespaceSelector": {}, "objectSelector": {}, "matchPolicy": "Equivalent", **constraints}
        for rule in constraints["resourceRules"]:
            rule.setdefault("scope", "*")


def _set_pod_defaults(pod: Object) -> None:
    spec = pod["spec"]
    for container in spec.get("containers", ()):
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("imagePullPolicy", "Always")
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("priority", 0)
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    tolerations = spec.setdefault("tolerations", [])
    if {"operator": "Exists"} not in tolerations:
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            toleration = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            tolerations.append(toleration)
    pod["status"] = {"phase": "Pending", "qosClass": "BestEffort", **pod.get("status", {})}


def _check(resource: Resource, new: Object) -> None:
    """Raises ApiError 422 for what the API server does not take, of that which a recorded answer shows."""
    metadata = new["metadata"]

    def wrong(field: str, reason: str, message: str) -> ApiError:
        name = metadata["name"]
        return invalid(resource.kind, resource.group, name, field=field, reason=reason, message=message)

    annotations: dict[str, str] = metadata.get("annotations") or {}
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > _MAX_ANNOTATIONS_BYTES:
        message = f"Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes"
        raise wrong("metadata.annotations", "FieldValueTooLong", message)
    for value in (metadata.get("labels") or {}).values():
        if len(value) > 63 or not re.fullmatch(_LABEL, value):
            raise wrong("metadata.labels", "FieldValueInvalid", f'Invalid value: "{value}": {_BAD_LABEL}')
    if resource is NODES:
        for number, taint in enumerate(new["spec"].get("taints") or ()):
            if taint["effect"] not in _TAINT_EFFECTS:
                known = ", ".join(f'"{effect}"' for effect in _TAINT_EFFECTS)
                message = f'Unsupported value: "{taint["effect"]}": supported values: {known}'
                raise wrong(f"metadata.taints[{number}].effect", "FieldValueNotSupported", message)
    if resource is EVENTS:
        about: str = new["involvedObject"].get("namespace", "")
        if (about or "default") != metadata["namespace"]:
            message = f'Invalid value: "{about}": does not match event.namespace'
            raise wrong("involvedObject.namespace", "FieldValueInvalid", message)
