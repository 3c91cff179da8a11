"""What kubectl asks before anything else: which kinds of objects there are."""

from kube_objects import BUDGETS, NODES, PODS, RESOURCES, Object

_VERBS = ["create", "delete", "get", "list", "patch", "update"]
_GROUPS = sorted({resource.group for resource in RESOURCES} - {""})


def discover(path: str) -> Object | None:
    """The answer for one of the paths at which an API server tells what it has; None for any other path."""
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in _GROUPS]}
    if path == "/api/v1":
        return _resources("", "v1")
    for name in _GROUPS:
        if path == f"/apis/{name}/v1":
            return _resources(name, f"{name}/v1")
    return None


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _resources(group: str, version: str) -> Object:
    listed: list[Object] = []
    for resource in RESOURCES:
        if resource.group != group:
            continue
        about = {"namespaced": resource.is_namespaced, "singularName": resource.kind.lower()}
        listed.append({"name": resource.plural, "kind": resource.kind, "verbs": _VERBS, **about})
        if resource in (NODES, PODS, BUDGETS):
            listed.append(
                {"name": f"{resource.plural}/status", "kind": resource.kind, "verbs": ["patch"], **about}
            )
        if resource is PODS:
            eviction = {"name": "pods/eviction", "kind": "Eviction", "group": "policy", "version": "v1"}
            listed.append({**about, **eviction, "verbs": ["create"]})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}
