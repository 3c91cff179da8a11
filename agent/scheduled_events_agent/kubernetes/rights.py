"""What the account must be allowed to do, and whether it is: an access review, which changes nothing.

Source: kubernetes.io/docs/reference/kubernetes-api/authorization-resources/self-subject-access-review-v1
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from scheduled_events_agent.kubernetes.client import Client

_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Right(NamedTuple):
    """One verb on one kind of object, and what needs it."""

    verb: str
    resource: str
    """As a role names it: nodes/status."""
    needed_by: str
    group: str = ""
    namespace: str = ""
    is_optional: bool = False
    """Whether an operator may withhold it on purpose."""

    def __str__(self) -> str:
        where = f" in the namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{where}"


def rights_to_report(*, has_conditions: bool, has_events: bool) -> Iterator[Right]:
    """What conditions and events need."""
    if has_conditions:
        yield Right("get", "nodes", "conditions")
        yield Right("patch", "nodes/status", "conditions")
    if has_events:
        yield Right("get", "nodes", "events")
        yield Right("create", "events", "events", namespace="default")


def rights_to_drain(*, has_conditions: bool) -> Iterator[Right]:
    """What ``kubernetes drain`` and ``uncordon`` need."""
    yield Right("get", "nodes", "drain")
    yield Right("patch", "nodes", "drain")
    yield Right("list", "pods", "drain")
    yield Right("create", "pods/eviction", "drain")
    yield Right("delete", "pods", "the last resort of drain", is_optional=True)
    if has_conditions:
        yield Right("patch", "nodes/status", "drain --conditions")


class _Decision(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Decision


_REVIEW = msgspec.json.Decoder(_Review)


def may(client: Client, right: Right, node: str) -> bool:
    """Whether the account has the right, about this node and its pods. Raises ApiError."""
    resource, _, subresource = right.resource.partition("/")
    attributes: dict[str, Any] = {
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "namespace": right.namespace,
        "name": node if resource == "nodes" else "",
    }
    if right.verb == "list":  # a kubelet may list the pods of its own node only
        own = {"key": "spec.nodeName", "operator": "In", "values": [node]}
        attributes["fieldSelector"] = {"requirements": [own]}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return client.send("POST", _PATH, _REVIEW, body=review).value.status.allowed
