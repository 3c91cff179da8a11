"""Evictions, and the budgets that deny them. A budget is counted from the pods whenever it is looked at."""

import copy
from typing import Any

from kube_objects import (
    BUDGETS,
    NAMESPACES,
    PODS,
    REPLICA_SETS,
    STATEFUL_SETS,
    Object,
    Resource,
    Store,
    controller_of,
    is_finished,
    is_ready,
    namespace_is_terminating,
    now,
    write_time,
)
from kube_status import ApiError, UnknownError, success

_TWO_BUDGETS = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
_DENIED = "Cannot evict pod as it would violate the pod's disruption budget."
_OPTIONS = {"apiVersion", "kind", "preconditions", "gracePeriodSeconds", "dryRun"}


class Evictions:
    """Evicts pods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.counts_budgets = True
        """Off: as if the controller of budgets lagged behind; then a client is told to come again."""

    def evict(self, namespace: str, name: str, body: Object, *, is_dry_run: bool) -> Object:
        """Begin the deletion of a pod, unless a budget forbids it. Raises ApiError."""
        if body.get("apiVersion") not in ("policy/v1", "policy/v1beta1") or body.get("kind") != "Eviction":
            raise UnknownError(f"an eviction of {body.get('apiVersion')} {body.get('kind')}")
        options = body.get("deleteOptions", {})
        is_dry_run = is_dry_run or bool(options.get("dryRun"))
        with self._store.lock:
            if "deletionTimestamp" in self._store.get(NAMESPACES, "", namespace)["metadata"]:
                raise namespace_is_terminating(PODS, namespace, name)
            pod = self._store.get(PODS, namespace, name)
            is_going = "deletionTimestamp" in pod["metadata"]
            if not is_going and pod["status"]["phase"] not in ("Pending", "Succeeded", "Failed"):
                self._ask_budgets(pod)
            check_preconditions(PODS, pod, options)
            if not is_dry_run:
                self._store.delete_pod(self._mark(pod), options.get("gracePeriodSeconds"))
        return success(201)

    def count_budgets(self) -> None:
        """Bring the status of each budget up to date, as the disruption controller does."""
        with self._store.lock:
            for budget in self._store.list(BUDGETS) if self.counts_budgets else ():
                status = {**budget["status"], **self._count(budget)}
                if status != budget["status"]:
                    self._store.update(BUDGETS, {**budget, "metadata": {**budget["metadata"]}, "status": status})

    def _ask_budgets(self, pod: Object) -> None:
        """Raises ApiError if a budget denies the eviction of this pod, or if there are two."""
        budgets = [one for one in self._store.list(BUDGETS, pod["metadata"]["namespace"]) if _is_for(one, pod)]
        if len(budgets) > 1:
            raise ApiError(500, _TWO_BUDGETS)
        if not budgets:
            return
        name = budgets[0]["metadata"]["name"]
        if not self.counts_budgets:  # from the API's documentation, not from a recorded answer
            cause = {
                "reason": "DisruptionBudget",
                "message": f"The disruption budget {name} is still being processed by the server.",
            }
            raise ApiError(429, _DENIED, details={"causes": [cause]}, retry_after_seconds=10)
        self.count_budgets()
        status = self._store.get(BUDGETS, pod["metadata"]["namespace"], name)["status"]
        needed, healthy = status["desiredHealthy"], status["currentHealthy"]
        if not is_ready(pod) and healthy >= needed > 0:
            return  # it does not count among the healthy ones anyway
        if status["disruptionsAllowed"] <= 0:
            message = f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
            cause = {"reason": "DisruptionBudget", "message": message}
            raise ApiError(429, _DENIED, details={"causes": [cause]})

    def _count(self, budget: Object) -> Object:
        space = budget["metadata"]["namespace"]
        pods = [pod for pod in self._store.list(PODS, space) if _is_for(budget, pod) and not is_finished(pod)]
        healthy = sum(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)
        spec = budget["spec"]
        limit = spec.get("minAvailable", spec.get("maxUnavailable"))
        if not isinstance(limit, int):
            raise UnknownError(f"a budget of {limit}")
        if "minAvailable" in spec:
            expected = len(pods)
            needed = limit
        else:
            expected = sum(self._replicas(space, pods))
            needed = max(0, expected - limit)
        allowed = max(0, healthy - needed) if expected else 0
        generation = budget["metadata"]["generation"]
        condition = {
            "type": "DisruptionAllowed",
            "status": "True" if allowed else "False",
            "observedGeneration": generation,
            "lastTransitionTime": write_time(now()),
            "reason": "SufficientPods" if allowed else "InsufficientPods",
            "message": "",
        }
        before: list[Object] = budget["status"].get("conditions", [])
        if before and before[0]["status"] == condition["status"]:
            condition["lastTransitionTime"] = before[0]["lastTransitionTime"]
        return {
            "observedGeneration": generation,
            "disruptionsAllowed": allowed,
            "currentHealthy": healthy,
            "desiredHealthy": needed,
            "expectedPods": expected,
            "conditions": [condition],
        }

    def _replicas(self, namespace: str, pods: list[Object]) -> list[int]:
        """How many pods each of their controllers is to have."""
        owners = {owner["uid"] for owner in map(controller_of, pods) if owner is not None}
        sets = (*self._store.list(REPLICA_SETS, namespace), *self._store.list(STATEFUL_SETS, namespace))
        return [one["spec"]["replicas"] for one in sets if one["metadata"]["uid"] in owners]

    def _mark(self, pod: Object) -> Object:
        """The pod with the condition that says why it ends."""
        if "deletionTimestamp" in pod["metadata"]:
            return pod
        marked = copy.deepcopy(pod)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": write_time(now()),
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
        marked["status"].setdefault("conditions", []).append(condition)
        return self._store.update(PODS, marked)


def check_preconditions(resource: Resource, item: Object, options: Object) -> None:
    """Raises ApiError 409 if the object is not the one that the client has seen."""
    unknown = set(options) - _OPTIONS
    if unknown:
        raise UnknownError(f"delete options {sorted(unknown)}")
    metadata = item["metadata"]
    wanted = options.get("preconditions", {})
    names = (("uid", "UID", "deleted and then recreated"), ("resourceVersion", "ResourceVersion", "modified"))
    for key, called, happened in names:
        if wanted.get(key, metadata[key]) == metadata[key]:
            continue
        why = (
            f"the {called} in the precondition ({wanted[key]}) does not match the {called} in record"
            f" ({metadata[key]}). The object might have been {happened}"
        )
        kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
        details = {"name": metadata["name"], "group": resource.group, "kind": resource.kind}
        message = f'Operation cannot be fulfilled on {kind} "{metadata["name"]}": {why}'
        raise ApiError(409, message, details=details)


def _is_for(budget: Object, pod: Object) -> bool:
    selector: dict[str, Any] = budget["spec"].get("selector", {})
    if set(selector) - {"matchLabels"}:
        raise UnknownError(f"a budget's selector with {sorted(selector)}")
    labels = pod["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
