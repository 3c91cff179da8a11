"""A strict stand-in of a Kubernetes API server over TLS on loopback: as much of one as the agent uses.

``with KubeApi(directory) as api``: ``add`` puts objects into the cluster, ``kubeconfig`` is for a client, and
``calls`` are its requests. What a request asks for that is not here is answered with 501, and the end of the
``with`` fails the test. tests/integration/test_kube_api_recorded.py compares it with the answers of a real one.

- ``kube_objects``: kinds, objects and their defaults, versions, graceful deletion
- ``kube_status``: the answers that say no
- ``kube_patches``: merge patches of both kinds
- ``kube_discovery``: which kinds there are, for kubectl
- ``kube_selection``: lists, with selectors and pages
- ``kube_evictions``: evictions and budgets
- ``kube_access``: who asks, and whether they may
- ``kube_controllers``: scheduler, kubelets and controllers
- ``kube_faults``: what goes wrong on purpose
- ``kube_certificates``: an authority of its own
"""

import copy
import json
import math
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import kube_objects
import yaml
from harness import Answer, Request, Server
from kube_access import ADMIN, ANONYMOUS, Access, Call, User, check_policy
from kube_certificates import Authority
from kube_controllers import Controllers
from kube_discovery import discover
from kube_evictions import Evictions, check_preconditions
from kube_faults import Fault, FaultName
from kube_objects import (
    BUDGETS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    RESOURCES,
    REVIEWS,
    SERVICE_ACCOUNTS,
    Object,
    Resource,
    Store,
)
from kube_patches import merge_patched, strategic_patched
from kube_selection import Lists
from kube_status import ApiError, UnknownError
from ports import free_port

_MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"
_QUERY = {"limit", "continue", "fieldSelector", "labelSelector", "resourceVersion", "dryRun", "timeout",
          "fieldManager", "fieldValidation"}  # fmt: skip
_SUBRESOURCES = {
    PODS: {"PATCH": "status", "POST": "eviction"},
    NODES: {"GET": "status", "PATCH": "status"},
    BUDGETS: {"PATCH": "status"},
    SERVICE_ACCOUNTS: {"POST": "token"},
}
_PATCHES = {
    "application/merge-patch+json": lambda _, old, patch: merge_patched(old, patch),
    "application/strategic-merge-patch+json": strategic_patched,
}


@dataclass(frozen=True)
class Seen:
    """A request as it was answered."""

    call: Call
    status: int
    """0 if there was no answer."""
    at: float
    """When it came, monotonic."""


class KubeApi:
    """A Kubernetes API server with one cluster. ``directory``: for certificates and kubeconfigs."""

    def __init__(self, directory: Path, *, has_controllers: bool = True) -> None:
        """``has_controllers`` False: neither scheduler nor kubelets nor controllers."""
        self.store = Store()
        self.access = Access(self.store)
        self.evictions = Evictions(self.store)
        self.lists = Lists(self.store)
        self.controllers = Controllers(self.store)
        self.calls: list[Seen] = []
        """Each request about objects, in the order of the answers."""
        self.unknown: list[str] = []
        """What was asked for and is not here."""
        self.before: Callable[[Call], None] = lambda _: None
        """Called for each request before it is carried out: for what happens meanwhile, or takes its time."""
        self._directory = directory
        self._has_controllers = has_controllers
        self._faults: list[Fault] = []
        self._loses: Callable[[Call], bool] = lambda _: False
        self._port = 0
        """Where it listens from the first start on."""
        self._server: _Front | None = None
        self._runs = threading.Event()
        self._runs.set()
        self.admin_token = self.access.issue_token(ADMIN)

    @cached_property
    def authority(self) -> Authority:
        """Made once something listens, or needs a certificate."""
        return Authority(self._directory)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self.authority.server_context()

    def __enter__(self) -> Self:
        self.start()
        if self._has_controllers:
            self.controllers.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.controllers.stop()
        self.stop()
        if kind is None:
            assert self.controllers.failure is None, self.controllers.failure
            assert self.unknown == [], "requests for something that the stand-in does not have"

    @property
    def url(self) -> str:
        """Its address, once it has been started."""
        return f"https://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, again on the same port."""
        while self._server is None:
            port = self._port or free_port()
            try:
                self._server = _Front(self, port)
            except OSError:  # another run of the tests was quicker
                if self._port:
                    raise
            else:
                self._port = port
        self._server.__enter__()

    def stop(self) -> None:
        """End, as a killed API server does: nothing listens, and what is under way breaks off."""
        if self._server is not None:
            self._server.closing.set()
            self._runs.set()
            self._server.__exit__()
            self._server = None

    def pause(self) -> None:
        """Answer nothing until ``resume``, as an API server that is stopped with a signal: requests wait."""
        self._runs.clear()

    def resume(self) -> None:
        """Carry out the requests that wait, and those that come."""
        self._runs.set()

    def add(self, manifest: Object) -> Object:
        """Add an object as an administrator does, with the status that it has; the object with its defaults."""
        kind = manifest["apiVersion"], manifest["kind"]
        resource = {(one.api_version, one.kind): one for one in RESOURCES}[kind]
        if resource is POLICIES:
            check_policy(manifest)
        namespace = manifest["metadata"].get("namespace", "default") if resource.is_namespaced else ""
        return self.store.create(resource, namespace, manifest)

    def add_all(self, manifests: str) -> None:
        """Add the objects of a YAML text, as a chart renders it. A role in it counts from then on."""
        for manifest in yaml.safe_load_all(manifests):
            if manifest:
                self.add(manifest)

    def add_node(self, name: str, boot_id: str = "") -> Object:
        """Add a node whose kubelet is ready."""
        conditions = [{"type": "Ready", "status": "True", "lastHeartbeatTime": None, "lastTransitionTime": None}]
        status = {"conditions": conditions, "nodeInfo": {"bootID": boot_id}}
        spec: Object = {"taints": []}
        return self.add(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec, "status": status}
        )

    def add_pod(
        self,
        name: str,
        node: str = "",
        *,
        namespace: str = "default",
        grace_seconds: int = 30,
        spec: Object | None = None,
        **metadata: Any,
    ) -> Object:
        """Add a pod, bound to a node if one is named. How it behaves: see ``kube_controllers``."""
        containers = [{"name": "it", "image": "x"}]
        whole = {"containers": containers, "terminationGracePeriodSeconds": grace_seconds, **(spec or {})}
        if node:
            whole["nodeName"] = node
        metadata = {"name": name, "namespace": namespace, **metadata}
        return self.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole})

    def bind(self, pod: Object, node: str) -> Object:
        """Bind a pod to a node, whatever the scheduler thinks of it."""
        spec = {**pod["spec"], "nodeName": node}
        return self.store.update(PODS, {**pod, "metadata": {**pod["metadata"]}, "spec": spec})

    def pod_names(self, node: str = "") -> list[str]:
        """The pods there are, or those of a node."""
        pods = self.store.list(PODS)
        return [pod["metadata"]["name"] for pod in pods if node in ("", pod["spec"].get("nodeName"))]

    def go_wrong(
        self, name: FaultName, hits: Callable[[Call], bool] = lambda _: True, times: float = math.inf
    ) -> None:
        """From now on this happens to the requests for which ``hits`` is true, the first ``times`` of them."""
        self._faults.append(Fault(name, hits, times))

    @property
    def is_out_of_order(self) -> bool:
        """Whether something goes wrong for some requests."""
        return bool(self._faults)

    def lose_answer(self, hits: Callable[[Call], bool]) -> None:
        """Carry out the next request for which ``hits`` is true, and break off the connection."""
        self._loses = hits

    def recover(self) -> None:
        """From now on nothing goes wrong."""
        self._faults.clear()

    def seen(self, verb: str = "", path: str = "", name: str = "") -> list[Seen]:
        """The requests with this verb, about this resource (``pods/eviction``), and this object."""
        return [
            one
            for one in self.calls
            if verb in ("", one.call.verb) and path in ("", one.call.path) and name in ("", one.call.name)
        ]

    def kubeconfig(self, user: User, *, certificate: bool = False) -> Path:
        """Write a kubeconfig for this user, with a token, or as kubelets have it with a certificate."""
        credentials: Object
        if certificate:
            subject = f"/O=system:nodes/CN={user.name}"
            pem, key = self.authority.issue(f"client-{user.node}", subject, "extendedKeyUsage=clientAuth")
            credentials = {"client-certificate": str(pem), "client-key": str(key)}
        else:
            credentials = {"token": self.access.issue_token(user)}
        cluster = {"server": self.url, "certificate-authority": str(self.authority.ca)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": "user", "user": credentials}],
            "contexts": [{"name": "context", "context": {"cluster": "cluster", "user": "user"}}],
            "current-context": "context",
        }
        file = self._directory / f"{user.name.replace(':', '-')}.kubeconfig"
        file.write_text(json.dumps(content), encoding="utf-8")
        return file

    def respond(self, request: Request, is_closing: Callable[[], bool]) -> Answer:
        """The answer to a request; raises ConnectionError if there is none."""
        at = time.monotonic()
        call: Call | None = None
        answer: Answer | None = None
        try:
            kinds = discover(request.path.partition("?")[0]) if request.method == "GET" else None
            call = _parse(request) if kinds is None else None
            user = self.access.user_of(request.header("Authorization"), request.certificate)
            if call is None:
                return _answer(200, kinds or {})
            call = replace(call, user=user)
            self.before(call)
            self._runs.wait()
            if is_closing():
                raise ConnectionError("stopped before it was carried out")
            answer = self._fault_answer(call, is_closing) or self._answer_call(call, request)
            if self._loses(call):
                self._loses = lambda _: False
                answer = None
                raise ConnectionError("carried out, and its answer lost on purpose")
        except ApiError as error:
            headers = {} if error.retry_after_seconds is None else {"Retry-After": str(error.retry_after_seconds)}
            answer = _answer(error.code, error.body, headers)
        except (UnknownError, ValueError, TypeError, LookupError, AttributeError) as error:
            # Of another type than UnknownError: an object has not the form that is expected here.
            self.unknown.append(f"{request.method} {request.path}: {error!r}")
            answer = _answer(501, {"kind": "Status", "status": "Failure", "message": repr(error), "code": 501})
        finally:
            if call is not None:
                self.calls.append(Seen(call, 0 if answer is None else answer.status, at))
        return answer

    def _fault_answer(self, call: Call, is_closing: Callable[[], bool]) -> Answer | None:
        with self.store.lock:
            fault = next((one for one in self._faults if one.times > 0 and one.hits(call)), None)
            if fault is None:
                return None
            fault.times -= 1
        return fault.answer(is_closing)

    def _answer_call(self, call: Call, request: Request) -> Answer:
        self.access.authorize(call)
        with self.store.lock:
            status, body = self._carry_out(call, request)
            return _answer(status, body)

    def _carry_out(self, call: Call, request: Request) -> tuple[int, Object]:
        resource = call.resource
        if resource is BUDGETS and call.verb != "create":
            self.evictions.count_budgets()
        match call.verb:
            case "list":
                metadata_only = "as=PartialObjectMetadataList" in request.header("Accept")
                answer = self.lists.answer(resource, call.namespace, call.query, metadata_only=metadata_only)
                return 200, answer
            case "get":
                return 200, self.store.get(resource, call.namespace, call.name)
            case "create":
                return self._create(call)
            case "delete":
                return 200, self._delete(call)
            case "update":
                return self._update(call)
        return 200, self._patch(call, request)

    def _create(self, call: Call) -> tuple[int, Object]:
        is_dry_run = "dryRun" in call.query
        if call.resource is REVIEWS:
            return 201, self.access.review(call)
        if call.subresource == "eviction":
            self.access.admit(call, self.store.get(PODS, call.namespace, call.name))
            return 201, self.evictions.evict(call.namespace, call.name, call.body, is_dry_run=is_dry_run)
        if call.subresource == "token":
            return 201, self.access.token_request(call.namespace, call.name, call.body)
        if is_dry_run:
            raise UnknownError("a new object that is only tried")
        if call.resource is POLICIES:
            check_policy(call.body)
        self.access.admit(call, None)
        return 201, self.store.create(call.resource, call.namespace, call.body)

    def _delete(self, call: Call) -> Object:
        resource = call.resource
        options: Object = call.body or {}
        old = self.store.get(resource, call.namespace, call.name)
        self.access.admit(call, old)
        check_preconditions(resource, old, options)
        if "dryRun" in options or "dryRun" in call.query:
            raise UnknownError("a deletion that is only tried")
        if resource is PODS:
            return self.store.delete_pod(old, options.get("gracePeriodSeconds"))
        if resource is NAMESPACES:
            new = copy.deepcopy(old)
            new["metadata"]["deletionTimestamp"] = kube_objects.write_time(kube_objects.now())
            new["status"]["phase"] = "Terminating"
            return self.store.update(NAMESPACES, new)
        self.store.remove(resource, old)
        details = {
            "name": call.name,
            "group": resource.group,
            "kind": resource.plural,
            "uid": old["metadata"]["uid"],
        }
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _update(self, call: Call) -> tuple[int, Object]:
        resource = call.resource
        new: Object = copy.deepcopy(call.body)
        metadata = new["metadata"]
        old = self.store.find(resource, call.namespace, call.name)
        self.access.admit(call, old, new)
        found_uid = old["metadata"]["uid"] if old else ""
        if metadata.get("uid", found_uid) != found_uid:
            key = f"/registry/{resource.plural}/{call.namespace}/{call.name}"
            why = (
                f"StorageError: invalid object, Code: 4, Key: {key}, "
                "ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: "
                f"UID in precondition: {metadata['uid']}, UID in object meta: {found_uid}"
            )
            raise resource.conflict(call.name, why)
        if old is None:
            if resource is not LEASES:
                raise resource.not_found(call.name)
            metadata.pop("resourceVersion", None)
            return 201, self.store.create(resource, call.namespace, new)
        return 200, self._replace(call, old, new)

    def _patch(self, call: Call, request: Request) -> Object:
        kind = request.header("Content-Type").partition(";")[0]
        if kind == "application/json":
            raise ApiError(415, "415: Unsupported Media Type", details={})
        if kind not in _PATCHES:
            raise UnknownError(f"a patch of type {kind}")
        if "dryRun" in call.query:
            raise UnknownError("a patch that is only tried")
        if not isinstance(call.body, dict):
            raise ApiError(400, "error decoding patch: unexpected end of JSON input")
        old = self.store.get(call.resource, call.namespace, call.name)
        new = _PATCHES[kind](call.resource, old, call.body)
        self.access.admit(call, old, new)
        return self._replace(call, old, new)

    def _replace(self, call: Call, old: Object, new: Object) -> Object:
        """Store a new version of an object, unless it has changed since the client has seen it."""
        seen_version = new["metadata"].get("resourceVersion", old["metadata"]["resourceVersion"])
        if seen_version != old["metadata"]["resourceVersion"]:
            raise call.resource.conflict(call.name, _MODIFIED)
        for key in ("uid", "creationTimestamp", "name", "namespace"):
            if key in old["metadata"]:
                new["metadata"][key] = old["metadata"][key]
        # The status is changed where it is, and the rest is not changed there.
        kept = ("spec",) if call.subresource == "status" else ("status",)
        for part in kept:
            if part in old:
                new[part] = old[part]
        if not new["metadata"].get("annotations", True):
            del new["metadata"]["annotations"]
        return self.store.update(call.resource, new)


class _Front(Server):
    """Takes requests for the stand-in, until the next stop."""

    def __init__(self, api: KubeApi, port: int) -> None:
        self.closing = threading.Event()
        self._api = api
        super().__init__(port=port, tls=api._tls)

    def answer(self, request: Request) -> Answer:
        answer = self._api.respond(request, self.closing.is_set)
        if self.closing.is_set():
            raise ConnectionError("the server has been stopped")
        return answer


def _answer(status: int, body: Object, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})


def _parse(request: Request) -> Call:
    """What is asked for. Raises UnknownError."""
    url = urlsplit(request.path)
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    if unknown := set(query) - _QUERY:
        raise UnknownError(f"the parameters {sorted(unknown)}")
    if query.get("resourceVersion", "0") not in ("", "0"):
        raise UnknownError("a list of a certain version")
    resource, namespace, rest = _parse_path(url.path)
    name, _, subresource = "/".join(rest).partition("/")
    verbs = {
        "GET": "get" if name else "list",
        "POST": "create",
        "PUT": "update",
        "PATCH": "patch",
        "DELETE": "delete",
    }
    if subresource and _SUBRESOURCES.get(resource, {}).get(request.method) != subresource:
        raise UnknownError(f"{request.method} of the subresource {subresource}")
    if request.method == "DELETE" and not name:
        raise UnknownError("to delete all objects of a kind")
    try:
        body = json.loads(request.body) if request.body else None
    except ValueError:
        body = request.body.decode(errors="replace")
    return Call(ANONYMOUS, verbs[request.method], resource, subresource, namespace, name, query, body)


def _parse_path(path: str) -> tuple[Resource, str, list[str]]:
    """The kind of object, the namespace, and what follows."""
    match path.strip("/").split("/"):
        case ["api", "v1", *rest]:
            group = ""
        case ["apis", group, "v1", *rest]:
            pass
        case _:
            raise UnknownError("nothing is at this path")
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace = rest[1]
        rest = rest[2:]
    for resource in RESOURCES:
        if rest and (resource.group, resource.plural) == (group, rest[0]):
            return resource, namespace, rest[1:]
    raise UnknownError("there is no such kind of object")
