"""The fleet's backend in Leases of a Kubernetes cluster: one Lease for each record.

A Lease has its name from the hash of group and key, a label with the hash of the group, by which a list selects,
and one annotation with key and fields. ``holderIdentity`` and ``renewTime`` are for people who look, and
``renewTime`` makes each write a change: only changes get a new version, and a time of the API server's clock in
``managedFields``. Ages are by that clock, and up to a second off, as its times have whole seconds.

Invariant: an ETag names version and uid. With the version alone, a PUT of a Lease that is gone creates it again.
Source: recorded answers of an API server 1.36; for ``managedFields`` and the Date header its documentation.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec

from scheduled_events_agent import host
from scheduled_events_agent.fleet.backend import BackendError, ErrorKind, OnRequest, Record, limited, plain_key
from scheduled_events_agent.http.errors import HttpErrorKind
from scheduled_events_agent.kubernetes.account import SERVICE_ACCOUNT, AccountError, agent_environ, find_account
from scheduled_events_agent.kubernetes.client import Answer, ApiError, Client

LABEL = "scheduled-events-agent/group"
ANNOTATION = "scheduled-events-agent/record"

_LIST_SECONDS = 30.0
_LEASES_PER_PAGE = 500
_MAX_RETRY_AFTER_SECONDS = 300.0
_MAX_NAMESPACE_BYTES = 1024
_KIND_OF_STATUS: dict[int, ErrorKind] = {
    401: "denied", 403: "denied", 404: "not_found", 429: "throttled", 503: "throttled",
}  # fmt: skip
_KIND_OF_FAILURE: dict[HttpErrorKind, ErrorKind] = {
    "timeout": "timeout",
    "too_large": "bad_response",
    "malformed": "bad_response",
    "setup": "setup",
}
"""Kinds of requests without an answer that can be used; each other kind becomes ``unreachable``."""

T = TypeVar("T")


class _ManagedFields(msgspec.Struct):
    time: str = ""


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    resource_version: str
    annotations: dict[str, str] = {}
    managed_fields: tuple[_ManagedFields, ...] = ()


class _Item(msgspec.Struct):
    metadata: _Metadata


class _Lease(_Item):
    kind: Literal["Lease"]


class _ListMetadata(msgspec.Struct):
    next_page: str = msgspec.field(default="", name="continue")


class _LeaseList(msgspec.Struct):
    kind: Literal["LeaseList"]
    metadata: _ListMetadata
    items: tuple[_Item, ...]


class _Content(msgspec.Struct):
    """The annotation."""

    key: str
    fields: dict[str, str]


class _Object(msgspec.Struct):
    """What answers a deletion."""

    kind: Literal["Lease", "Status"]


_LEASE = msgspec.json.Decoder(_Lease)
_LEASE_LIST = msgspec.json.Decoder(_LeaseList)
_CONTENT = msgspec.json.Decoder(_Content)
_OBJECT = msgspec.json.Decoder(_Object)


def connect(
    namespace: str,
    group: str,
    on_request: OnRequest = lambda *_: None,
    *,
    kubeconfig: str | None = None,
    partition: str = "fleet",
    mounted: Path = SERVICE_ACCOUNT,
) -> "LeaseBackend":
    """The Leases of a group; sends no request yet. ``namespace`` "": that of this pod. Raises BackendError.

    ``kubeconfig``: None takes the first account that a hook of this agent would find.
    """
    try:
        account = find_account(kubeconfig, agent_environ(), mounted)
        if not namespace:
            namespace = host.read_small_file(mounted / "namespace", _MAX_NAMESPACE_BYTES).decode("ascii").strip()
    except AccountError as error:
        raise BackendError(str(error), kind="setup") from None
    except (host.HostError, UnicodeDecodeError) as error:
        text = f"fleet.leases names no namespace, and this is not a pod that has one: {error}"
        raise BackendError(text, kind="setup") from None
    return LeaseBackend(Client(account), namespace, f"{partition}|{plain_key(group)}", on_request)


class LeaseBackend:
    """The records of one group: see ``scheduled_events_agent.fleet.backend``. For one thread.

    A write takes up to 15 seconds, a list 45.
    """

    def __init__(self, client: Client, namespace: str, partition: str, on_request: OnRequest) -> None:
        self._client = client
        self.namespace = namespace
        self._partition = partition
        self._on_request = on_request
        self._group = _hash(partition)
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases"
        self.clock_skew_seconds: float | None = None
        """Seconds that this machine's clock was ahead of the API server's at its last answer; None before that."""

    def list(self) -> list[Record]:
        deadline = monotonic() + _LIST_SECONDS
        records: list[Record] = []
        query = {"labelSelector": f"{LABEL}={self._group}", "limit": str(_LEASES_PER_PAGE)}
        next_page: dict[str, str] = {}
        while True:
            page, date = self._send("list", "", _LEASE_LIST, query=query | next_page)
            found = filter(None, [self._parse_record(item.metadata, date) for item in page.items])
            records = limited([*records, *found], self._partition)
            if not page.metadata.next_page:
                return records
            if monotonic() > deadline:
                raise BackendError(f"no whole list within {_LIST_SECONDS:g} s", kind="timeout")
            next_page = {"continue": page.metadata.next_page}

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        lease = self._lease(key, fields)
        try:
            if etag:
                lease["metadata"] |= _preconditions(etag)
                written = self._send("update", self._name(key), _LEASE, body=lease)
            else:
                written = self._send("create", "", _LEASE, body=lease)
        except _ConflictError:
            return None
        return _etag(written.value.metadata)

    def delete(self, key: str, etag: str) -> bool:
        try:
            self._send("delete", self._name(key), _OBJECT, body={"preconditions": _preconditions(etag)})
        except _ConflictError:
            return False
        except BackendError as error:
            if error.kind != "not_found":
                raise
        return True

    def _lease(self, key: str, fields: Mapping[str, str]) -> dict[str, Any]:
        renewed_at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name(key),
                "labels": {LABEL: self._group},
                "annotations": {ANNOTATION: msgspec.json.encode(_Content(key, dict(fields))).decode()},
            },
            "spec": {"holderIdentity": fields.get("vm") or key, "renewTime": renewed_at},
        }

    def _name(self, key: str) -> str:
        return f"sea-{_hash(f'{self._partition}|{key}')}"

    def _parse_record(self, metadata: _Metadata, date: datetime | None) -> Record | None:
        """The record of a Lease; None if it has none, or one of another name: any program may have written it."""
        try:
            content = _CONTENT.decode(metadata.annotations.get(ANNOTATION, ""))
        except msgspec.MsgspecError:
            return None
        if metadata.name != self._name(content.key):
            return None
        return Record(content.key, _etag(metadata), _age(metadata.managed_fields, date), content.fields)

    def _send(
        self,
        verb: Literal["list", "create", "update", "delete"],
        name: str,
        decoder: msgspec.json.Decoder[T],
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> Answer[T]:
        """Ask. Raises BackendError, _ConflictError among them."""
        method = {"list": "GET", "create": "POST", "update": "PUT", "delete": "DELETE"}[verb]
        path = f"{self._path}/{name}" if name else self._path
        began = monotonic()
        try:
            answer = self._client.send(method, path, decoder, query=query, body=body)
        except ApiError as api_error:
            self._learn_clock(api_error.date)
            error = self._backend_error(verb, api_error)
            if error.kind != "setup":
                self._on_request(method, api_error.status or error.kind, monotonic() - began)
            raise error from None
        self._on_request(method, 200, monotonic() - began)
        self._learn_clock(answer.date)
        return answer

    def _learn_clock(self, date: datetime | None) -> None:
        if date is not None:
            self.clock_skew_seconds = (datetime.now(UTC) - date).total_seconds()

    def _backend_error(self, verb: str, error: ApiError) -> BackendError:
        """The error for an answer that is no success, or for none."""
        if error.status == 409:
            return _ConflictError(str(error), kind="bad_response")
        if error.status is None:
            kind = _KIND_OF_FAILURE.get(error.failure or "unreachable", "unreachable")
        elif error.cause("NamespaceTerminating"):
            kind = "not_found"
        else:
            kind = _KIND_OF_STATUS.get(error.status, "bad_response")
        text = str(error)
        if kind == "denied":
            text = f"this account may not {verb} Leases in the namespace {self.namespace}: {text}"
        elif kind == "not_found":
            text = f"there is no namespace {self.namespace}: {text}"
        elif error.status is not None:
            text = f"the API server answers {error.status}: {text}"
        after = min(max(0.0, error.retry_after or 0.0), _MAX_RETRY_AFTER_SECONDS)
        return BackendError(text, kind=kind, retry_after=after)


class _ConflictError(BackendError):
    """The Lease exists although it must not, or has another version or uid, or is gone."""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _etag(metadata: _Metadata) -> str:
    return f"{metadata.uid} {metadata.resource_version}"


def _preconditions(etag: str) -> dict[str, str]:
    uid, _, version = etag.partition(" ")
    return {"uid": uid, "resourceVersion": version}


def _age(managed_fields: tuple[_ManagedFields, ...], date: datetime | None) -> float | None:
    """Seconds from the newest write to the answer, both by the API server's clock; None if it does not tell."""
    try:
        times = [datetime.fromisoformat(one.time) for one in managed_fields if one.time]
        return None if date is None or not times else max(0.0, (date - max(times)).total_seconds())
    except (ValueError, TypeError):  # not a time, or one without an offset
        return None
