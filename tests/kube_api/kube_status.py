"""The answers that say no, as a real API server words them."""

from collections.abc import Mapping, Sequence
from typing import Any

Body = dict[str, Any]

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
}


class ApiError(Exception):
    """A request is denied. ``body``: the Status object for the client."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: Mapping[str, Any] | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.body: Body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.body["message"] = message
        if reason := reason or _REASONS.get(code):
            self.body["reason"] = reason
        if details is not None:
            self.body["details"] = {key: value for key, value in details.items() if value}
        self.body["code"] = code


class UnknownError(Exception):
    """The request asks for something that this stand-in does not have; the answer is 501, and the test fails."""


def success(code: int) -> Body:
    """The Status object of an eviction that was accepted."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}


def forbidden(resource: str, group: str, name: str, why: str, causes: Sequence[Body] = ()) -> ApiError:
    """The denial of a request about this object, or without a name about the resource."""
    full = f"{resource}.{group}" if group else resource
    subject = f'{full} "{name}"' if name else full
    details = {"name": name, "group": group, "kind": resource, "causes": [*causes]}
    return ApiError(403, f"{subject} is forbidden: {why}", details=details)


def invalid(kind: str, group: str, name: str, *, field: str, reason: str, message: str) -> ApiError:
    """The denial of an object whose ``field`` has a value that it may not have."""
    full = f"{kind}.{group}" if group else kind
    cause = {"reason": reason, "message": message, "field": field}
    details = {"name": name, "group": group, "kind": kind, "causes": [cause]}
    return ApiError(422, f'{full} "{name}" is invalid: {field}: {message}', details=details)
