"""Who asks, and whether they may: tokens, roles, the Node authorizer, NodeRestriction and an admission policy.

Of admission policies two are known: that an account may change only the node that its token names, and that it may
change only Leases whose name has a prefix. Their expressions are not evaluated here: they must be those of the
first, which a real API server was tried with, or that of the second, which tests/system/test_chart.py evaluates.
"""

import base64
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kube_objects import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    POLICIES,
    POLICY_BINDINGS,
    RESOURCES,
    REVIEWS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    Object,
    Resource,
    Store,
)
from kube_selection import parse_fields
from kube_status import ApiError, UnknownError, forbidden

_KUBELET = "system:node:"
_LEASE_PREFIX = (
    "request.operation == 'DELETE' ? oldObject.metadata.name.startsWith('sea-')"
    " : object.metadata.name.startsWith('sea-')"
)
_OWN_NODE_VARIABLE = "request.userInfo.extra[?'authentication.kubernetes.io/node-name'][?0].orValue('')"
_OWN_NODE = (
    "request.resource.resource == 'nodes' ? object.metadata.name == variables.node"
    " : oldObject.spec.nodeName == variables.node"
)
_REVIEWED = {"verb", "group", "resource", "subresource", "namespace", "name", "fieldSelector"}
_ACCOUNT = re.compile(r"request\.userInfo\.username == '([^']+)'")


@dataclass(frozen=True)
class User:
    """Who sends a request. ``node``: of a kubelet its own; of a service account the one that its token names."""

    name: str
    node: str = ""
    is_admin: bool = False

    @property
    def is_kubelet(self) -> bool:
        return self.name.startswith(_KUBELET)


@dataclass(frozen=True)
class Call:
    """A request about objects, as authorization sees it."""

    user: User
    verb: str
    resource: Resource
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    query: dict[str, str] = field(default_factory=dict)
    body: Any = None
    """Of a request with a body what it says: JSON, or the text if it is none."""

    @property
    def object_name(self) -> str:
        """The name of the object; that of a new one is in the body alone."""
        name: str = self.name or self.body["metadata"]["name"]
        return name

    @property
    def path(self) -> str:
        """The resource as roles name it."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural


ADMIN = User("admin", is_admin=True)
ANONYMOUS = User("system:anonymous")


def kubelet(node: str) -> User:
    """The account of the kubelet of a node."""
    return User(f"{_KUBELET}{node}", node)


def service_account(namespace: str, name: str, node: str = "") -> User:
    """A service account; ``node``: whose token is bound to a pod there."""
    return User(f"system:serviceaccount:{namespace}:{name}", node)


class Access:
    """Knows users by their tokens, and decides what they may do."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[str, User] = {}

    def issue_token(self, user: User) -> str:
        """A new token. That of a service account names its node in a claim, as a real one does from 1.30 on."""
        claims: Object = {"sub": user.name}
        if user.node and not user.is_kubelet:
            claims["kubernetes.io"] = {"node": {"name": user.node}}
        parts = ({"alg": "RS256"}, claims)
        texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
        token = ".".join([*texts, secrets.token_urlsafe(16)])
        self._users[token] = user
        return token

    def revoke_token(self, token: str) -> None:
        """From now on the answer to this token is 401."""
        del self._users[token]

    def user_of(self, authorization: str, certificate_name: str) -> User:
        """Who sends this header, or has shown a certificate of this name. Raises ApiError 401."""
        if authorization:
            user = self._users.get(authorization.removeprefix("Bearer "))
        elif certificate_name.startswith(_KUBELET):
            user = kubelet(certificate_name.removeprefix(_KUBELET))
        else:
            user = None
        if user is None:
            raise ApiError(401, "Unauthorized")
        return user

    def authorize(self, call: Call) -> None:
        """Raises ApiError 403 if the user may not do this with any object."""
        if call.user.is_admin or call.resource is REVIEWS:  # which everyone may create about himself
            return
        why: str | None
        if call.user.is_kubelet:
            why = self._why_kubelet_may_not(call)
        else:
            is_allowed = any(_allows(rule, call) for rule in self._rules(call.user, call.namespace))
            why = None if is_allowed else ""
        if why is None:
            return
        scope = f'in the namespace "{call.namespace}"' if call.namespace else "at the cluster scope"
        attempt = f'cannot {call.verb} resource "{call.path}" in API group "{call.resource.group}" {scope}'
        reason = f'User "{call.user.name}" {attempt}{why}'
        raise forbidden(call.resource.plural, call.resource.group, call.name, reason)

    def review(self, call: Call) -> Object:
        """Whether the sender of this review may do what it asks for, by authorization alone."""
        asked: Object = call.body["spec"]["resourceAttributes"]
        if unknown := set(asked) - _REVIEWED:
            raise UnknownError(f"a review of {sorted(unknown)}")
        resource = {(one.group, one.plural): one for one in RESOURCES}[asked["group"], asked["resource"]]
        query = {}
        for term in asked.get("fieldSelector", {}).get("requirements", ()):
            if term["operator"] != "In" or len(term["values"]) != 1:
                raise UnknownError("a review of another selector than key=value")
            query["fieldSelector"] = f"{term['key']}={term['values'][0]}"
        wanted = Call(
            call.user, asked["verb"], resource, asked["subresource"], asked["namespace"], asked["name"], query
        )
        try:
            self.authorize(wanted)
        except ApiError as error:
            return {**call.body, "status": {"allowed": False, "reason": error.body["message"]}}
        return {**call.body, "status": {"allowed": True}}

    def admit(self, call: Call, old: Object | None, new: Object | None = None) -> None:
        """Raises ApiError if the user may do this, but not with this object, or not this change to it."""
        if call.user.is_kubelet:
            _restrict_to_node(call, old, new)
        for binding in self._store.list(POLICY_BINDINGS):
            if set(binding["spec"]) != {"policyName", "validationActions"}:
                raise UnknownError("an admission policy that is bound to a part of the cluster")
            if binding["spec"]["validationActions"] != ["Deny"]:
                raise UnknownError("an admission policy that does more than to deny, or less")
            policy = self._store.get(POLICIES, "", binding["spec"]["policyName"])
            if _is_restricted(policy, call) and not _is_valid(policy, call, old):
                message = policy["spec"]["validations"][0]["message"]
                name = policy["metadata"]["name"]
                bound = binding["metadata"]["name"]
                denial = f"ValidatingAdmissionPolicy '{name}' with binding '{bound}' denied request: {message}"
                resource = call.resource
                details = {
                    "name": call.object_name,
                    "group": resource.group,
                    "kind": resource.plural,
                    "causes": [{"message": denial}],
                }
                raise ApiError(
                    422, f'{resource.full_name} "{call.object_name}" is forbidden: {denial}', details=details
                )

    def token_request(self, namespace: str, name: str, body: Object) -> Object:
        """A token of a service account, bound to a pod."""
        self._store.get(SERVICE_ACCOUNTS, namespace, name)
        bound = body["spec"].get("boundObjectRef")
        if not bound or bound["kind"] != "Pod":
            raise UnknownError("a token that is bound to no pod")
        pod = self._store.get(PODS, namespace, bound["name"])
        token = self.issue_token(service_account(namespace, name, pod["spec"]["nodeName"]))
        return {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "status": {"token": token}}

    def _rules(self, user: User, namespace: str) -> Iterable[Object]:
        """The rules of all roles that count for a service account in this namespace; "": for what is in none."""
        _, _, account_namespace, name = user.name.split(":")
        subject = {"kind": "ServiceAccount", "namespace": account_namespace, "name": name}
        bindings = self._store.list(CLUSTER_ROLE_BINDINGS)
        if namespace:
            bindings += self._store.list(ROLE_BINDINGS, namespace)
        for binding in bindings:
            if any(subject.items() <= one.items() for one in binding["subjects"]):
                yield from self._rules_of(binding["roleRef"], namespace)

    def _rules_of(self, reference: Object, namespace: str) -> list[Object]:
        """The rules of the role that a binding names. One that is not there gives no right."""
        if reference["kind"] == "ClusterRole":
            role = self._store.find(CLUSTER_ROLES, "", reference["name"])
        else:
            role = self._store.find(ROLES, namespace, reference["name"])
        return [] if role is None else role["rules"]

    def _why_kubelet_may_not(self, call: Call) -> str | None:
        """What is added to the denial of a kubelet's request; None if it is allowed."""
        node = call.user.node
        attempt = call.verb, call.resource, call.subresource
        if call.resource is LEASES and call.namespace != "kube-node-lease":
            return ': can only access leases in the "kube-node-lease" system namespace'
        if attempt == ("get", NODES, ""):
            return None if call.name == node else ""
        if attempt == ("list", PODS, ""):
            terms = parse_fields(PODS, call.query.get("fieldSelector", ""))
            is_own = ("spec.nodeName", True, node) in terms
            return None if is_own else ": can only list/watch pods with spec.nodeName field selector"
        allowed = (
            ("patch", NODES, ""), ("patch", NODES, "status"), ("get", PODS, ""), ("delete", PODS, ""),
            ("create", PODS, "eviction"), ("create", EVENTS, ""), ("patch", EVENTS, ""),
        )  # fmt: skip
        return None if attempt in allowed or call.resource is LEASES else ""


def check_policy(policy: Object) -> None:
    """Raises UnknownError for an admission policy whose meaning is not known here."""
    spec = policy["spec"]
    conditions = spec.get("matchConditions", ())
    variables = [(one["name"], one["expression"]) for one in spec.get("variables", ())]
    known = {_OWN_NODE: [("node", _OWN_NODE_VARIABLE)], _LEASE_PREFIX: []}
    is_known = len(spec["validations"]) == 1 and known.get(_validation(spec)) == variables
    if not is_known or len(conditions) != 1 or not _ACCOUNT.fullmatch(conditions[0]["expression"]):
        raise UnknownError("an admission policy with other expressions than those that were tried")


def _validation(spec: Object) -> str:
    """The only expression that a policy validates with, in one line."""
    return " ".join(spec["validations"][0]["expression"].split())


def _allows(rule: Object, call: Call) -> bool:
    names = rule.get("resourceNames")
    return (
        _names(rule["apiGroups"], call.resource.group)
        and _names(rule["resources"], call.path)
        and _names(rule["verbs"], call.verb)
        and (not names or call.name in names)
    )


def _names(listed: list[str], wanted: str) -> bool:
    return wanted in listed or "*" in listed


def _restrict_to_node(call: Call, old: Object | None, new: Object | None) -> None:
    """As the NodeRestriction plugin does: a kubelet changes its own node, and pods that are bound to it."""
    node = call.user.node

    def denied(why: str) -> ApiError:
        return forbidden(call.resource.plural, "", call.name, why)

    if call.resource is NODES and call.name != node:
        raise denied(f'node "{node}" is not allowed to modify node "{call.name}"')
    if call.resource is NODES and _taints(old) != _taints(new):
        raise denied(f'node "{node}" is not allowed to modify taints')
    is_going = call.subresource == "eviction" or call.verb == "delete"
    if call.resource is PODS and is_going and old is not None and old["spec"].get("nodeName") != node:
        action = "delete" if call.verb == "delete" else "evict"
        raise denied(f"node {node} can only {action} pods with spec.nodeName set to itself")


def _taints(node: Object | None) -> Any:
    return None if node is None else node["spec"].get("taints")


def _is_restricted(policy: Object, call: Call) -> bool:
    spec = policy["spec"]
    account = _ACCOUNT.fullmatch(spec["matchConditions"][0]["expression"])
    if account is None or account[1] != call.user.name:
        return False
    operation = {"create": "CREATE", "delete": "DELETE"}.get(call.verb, "UPDATE")
    return any(
        call.resource.group in rule["apiGroups"]
        and call.path in rule["resources"]
        and operation in rule["operations"]
        for rule in spec["matchConstraints"]["resourceRules"]
    )


def _is_valid(policy: Object, call: Call, old: Object | None) -> bool:
    """What the policy's expression says of a request that it is for."""
    if _validation(policy["spec"]) == _LEASE_PREFIX:
        return call.object_name.startswith("sea-")
    if call.resource is NODES:
        return call.name == call.user.node
    return old is not None and old["spec"].get("nodeName") == call.user.node
