"""Merge patches, and the strategic ones of Kubernetes with the lists that are merged in them."""

import copy
from typing import Any

from kube_objects import NODES, PODS, Object, Resource
from kube_status import UnknownError

_MERGED_LISTS = {(NODES, "status.conditions"): "type", (PODS, "status.conditions"): "type"}
"""By their path: the key by which items are merged."""
_REPLACED_LISTS = {(NODES, "spec.taints")}
_NEW_ITEM = {
    NODES: {"lastHeartbeatTime": None, "lastTransitionTime": None},
    PODS: {"lastProbeTime": None, "lastTransitionTime": None},
}
"""What a condition has if nothing is said of it."""


def merge_patched(old: Object, patch: Object) -> Object:
    """The object after a JSON merge patch."""
    new = copy.deepcopy(old)
    _merge(new, patch)
    return new


def strategic_patched(resource: Resource, old: Object, patch: Object) -> Object:
    """The object after a strategic merge patch. Raises UnknownError for a list that is not known here."""
    new = copy.deepcopy(old)
    _merge_strategic(resource, new, patch, "")
    return new


def _merge(target: Object, patch: Object) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            inner = target.get(key)
            target[key] = inner if isinstance(inner, dict) else {}
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def _merge_strategic(resource: Resource, target: Object, patch: Object, path: str) -> None:
    for key, value in patch.items():
        place = f"{path}.{key}" if path else key
        if key.startswith("$"):
            raise UnknownError(f"a patch has {key} at {path or 'its top'}")
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge_strategic(resource, target.setdefault(key, {}), value, place)
        elif not isinstance(value, list) or (resource, place) in _REPLACED_LISTS:
            target[key] = copy.deepcopy(value)
        elif (resource, place) in _MERGED_LISTS:
            merge_key = _MERGED_LISTS[resource, place]
            target[key] = _merge_list(target.get(key, []), value, merge_key, _NEW_ITEM[resource])
        else:
            raise UnknownError(f"a strategic patch has a list at {place} of {resource.full_name}")


def _merge_list(old: list[Object], patch: list[Object], key: str, defaults: Object) -> list[Object]:
    """Items of the patch that are new come first; the others stay in the order in which they were."""
    kept = {item[key]: item for item in old}
    named: dict[Any, Object] = {}
    for item in patch:
        directive = item.get("$patch")
        if directive == "delete":
            kept.pop(item[key], None)
        elif directive is not None:
            raise UnknownError(f"a patch has $patch: {directive}")
        else:
            named[item[key]] = {**defaults, **kept.get(item[key], {}), **item}
    new = [item for name, item in named.items() if name not in kept]
    return new + [named.get(name, item) for name, item in kept.items()]
