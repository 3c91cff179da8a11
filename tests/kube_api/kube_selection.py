"""Lists: selectors, pages, and metadata only."""

import base64
import json
import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from kube_objects import EVENTS, NODES, PODS, Object, Resource, Store
from kube_status import ApiError, UnknownError

_ALWAYS = ("metadata.name", "metadata.namespace")
_FIELDS = {
    PODS: ("spec.nodeName", "status.phase"),
    EVENTS: ("involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid"),
}
_FIELDS_NOT_HERE = {
    PODS: ("spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
           "status.podIP", "status.nominatedNodeName"),
    NODES: ("spec.unschedulable",),
}  # fmt: skip
"""Of those that the real one knows."""
_EXPIRED = "The provided continue parameter is too old to display a consistent list result."


class Lists:
    """Answers lists. A list that goes on over several pages is one of the objects as they were at the first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = count(1)
        self.is_behind = False
        """Whether the cache knows no object yet; of several API servers, one may lag behind."""
        self._rest: dict[str, tuple[int, list[Object]]] = {}
        """By continue token: the list's version, and what is still to be told."""

    def answer(
        self, resource: Resource, namespace: str, query: Mapping[str, str], *, metadata_only: bool
    ) -> Object:
        """The list that is asked for. Raises ApiError 400 for a selector or token that is wrong."""
        with self._store.lock:
            version = self._store.version
            if token := query.get("continue"):
                version, items = self._continue(token)
            else:
                terms = parse_fields(resource, query.get("fieldSelector", ""))
                labels = _parse_labels(query.get("labelSelector", ""))
                items = [
                    item
                    for item in self._store.list(resource, namespace)
                    if has_fields(item, terms) and has_labels(item, labels)
                ]
            # Answered from the API server's cache, which ignores the limit: recorded.
            is_cached = query.get("resourceVersion") == "0"
            items = [] if is_cached and self.is_behind else items
            limit = 0 if is_cached else int(query.get("limit", "0"))
            metadata = {"resourceVersion": str(version)}
            if limit and len(items) > limit:
                metadata["continue"] = self._keep(version, items[limit:])
                items = items[:limit]
        if metadata_only:
            kind = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
            # A real one appends to a list that is nil at first, and writes nil as null; no recorded list is empty.
            reduced = [{**kind, "metadata": item["metadata"]} for item in items] or None
            return {**kind, "kind": "PartialObjectMetadataList", "metadata": metadata, "items": reduced}
        whole = [{key: item[key] for key in item if key not in ("kind", "apiVersion")} for item in items]
        kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
        return {**kind, "metadata": metadata, "items": whole}

    def expire(self) -> None:
        """Forget all lists that have not come to their end, as a compaction does."""
        with self._store.lock:
            self._rest.clear()

    def _keep(self, version: int, rest: list[Object]) -> str:
        text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": str(next(self._numbers))})
        token = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        self._rest[token] = version, rest
        return token

    def _continue(self, token: str) -> tuple[int, list[Object]]:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode(errors="replace")
        if not text.startswith("{"):
            why = f"invalid character '{text[:1]}' looking for beginning of value"
            raise ApiError(400, f"invalid continue token: continue key is not valid: {why}")
        if token not in self._rest:
            raise ApiError(410, _EXPIRED)
        return self._rest[token]


Term = tuple[str, bool, str]
"""A field or label, whether it must have the value or must not, and the value."""


def parse_fields(resource: Resource, selector: str) -> list[Term]:
    """The terms of a field selector. Raises ApiError 400 for a field by which this kind cannot be selected."""
    terms = [_parse_term(text) for text in selector.split(",") if text]
    for field, _, _ in terms:
        if field in _FIELDS_NOT_HERE.get(resource, ()):
            raise UnknownError(f"the field selector {field}")
        if field not in (*_ALWAYS, *_FIELDS.get(resource, ())):
            raise ApiError(400, f"field label not supported: {field}")
    return terms


def has_fields(item: Object, terms: list[Term]) -> bool:
    return all((_field(item, name) == value) is is_equal for name, is_equal, value in terms)


def has_labels(item: Object, terms: list[Term]) -> bool:
    labels: dict[str, str] = item["metadata"].get("labels", {})
    return all((labels.get(name) == value) is is_equal for name, is_equal, value in terms)


def _parse_labels(selector: str) -> list[Term]:
    return [_parse_term(text) for text in selector.split(",") if text]


def _parse_term(text: str) -> Term:
    match = re.fullmatch(r"([^=!\s()]+)(=|==|!=)([^=!\s()]*)", text)
    if match is None:
        raise UnknownError(f"the selector {text}")
    return match[1], match[2] != "!=", match[3]


def _field(item: Object, path: str) -> str:
    value: Any = item
    for key in path.split("."):
        value = value.get(key, {})
    return value if isinstance(value, str) else ""
