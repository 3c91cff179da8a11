"""Errors of requests: one list of kinds, the kind of each exception and status, and the times in headers.

Invariant: a message has neither a URL nor a text of the service or of a library, so it holds no secret. Each
client adds its own sentence.
"""

import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import httpx

HttpErrorKind = Literal[
    # no whole answer
    "timeout", "refused", "unreachable", "tls", "proxy", "too_large", "malformed",
    # an answer of another status
    "redirect", "bad_request", "denied", "not_found", "gone", "throttled", "server_error", "unexpected_status",
    # an answer that says nothing, or not what was asked for
    "empty", "unconfirmed",
    # the error is on this machine, or in the request
    "setup", "bug", "rejected",
]  # fmt: skip
IMDS_ERROR_KINDS: tuple[HttpErrorKind, ...] = (
    "timeout", "refused", "unreachable", "bad_request", "denied", "not_found", "gone", "throttled",
    "server_error", "redirect", "too_large", "empty", "malformed", "unexpected_status", "unconfirmed",
)  # fmt: skip
"""Kinds with which a request to the metadata service can end."""
NOTIFICATION_ERROR_KINDS: tuple[HttpErrorKind, ...] = (
    "timeout", "refused", "unreachable", "tls", "proxy", "malformed", "throttled", "server_error", "denied",
    "not_found", "redirect", "unexpected_status", "setup", "bug", "rejected",
)  # fmt: skip
"""Kinds with which a notification can fail."""
REQUEST_ERRORS = (httpx.TransportError, httpx.InvalidURL, ValueError)
"""The exceptions of sending a request, for ``classify``."""

_KIND_OF_STATUS: dict[int, HttpErrorKind] = {404: "not_found", 429: "throttled"}


class TooLargeError(httpx.ReadError):
    """The answer is over its limit."""


class HttpFailure(NamedTuple):
    """Why a request did not succeed."""

    kind: HttpErrorKind
    message: str
    retry_after: float | None = None
    """Seconds that the service asks to wait."""


def classify(error: Exception) -> HttpFailure:
    """The kind and message of an exception of ``REQUEST_ERRORS``."""
    if isinstance(error, httpx.TimeoutException):
        return HttpFailure("timeout", "no whole answer in time")
    if isinstance(error, httpx.ConnectError):
        return _classify_cause(error.__cause__)
    if isinstance(error, httpx.ProxyError):
        status = re.match(r"\d{3}\b", str(error))
        answer = status[0] if status else "with an error"
        return HttpFailure("proxy", f"the proxy answers {answer}")
    if isinstance(error, TooLargeError):
        return HttpFailure("too_large", str(error))
    if isinstance(error, httpx.NetworkError):
        return HttpFailure("unreachable", "the connection was lost")
    return HttpFailure("malformed", "not a whole HTTP answer")


def _classify_cause(cause: BaseException | None) -> HttpFailure:
    """Why there is no connection."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return HttpFailure("tls", f"its certificate is not trusted: {cause.verify_message}")
    if isinstance(cause, ssl.SSLError):
        return HttpFailure("tls", f"no TLS: {cause.reason or 'the handshake failed'}")
    if isinstance(cause, ConnectionRefusedError):
        return HttpFailure("refused", "connection refused")
    reason = cause.strerror if isinstance(cause, OSError) else None
    return HttpFailure("unreachable", reason or "it cannot be reached")


def error_for_status(response: httpx.Response, own_kinds: Mapping[int, HttpErrorKind]) -> HttpFailure:
    """The kind and message of an answer that is no success. ``own_kinds``: this service's own kinds, by status."""
    status = response.status_code
    if 300 <= status < 400:
        usual: HttpErrorKind = "redirect"
    elif status >= 500:
        usual = "server_error"
    else:
        usual = _KIND_OF_STATUS.get(status, "unexpected_status")
    retry_after = _parse_retry_after(response.headers.get("retry-after", ""))
    return HttpFailure(own_kinds.get(status, usual), f"it answers {status}", retry_after)


def _parse_retry_after(value: str) -> float | None:
    """Seconds from now according to the header, a number or an HTTP date; None for anything else."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    date = parse_date(value)
    return None if date is None else (date - datetime.now(UTC)).total_seconds()


def parse_date(value: str) -> datetime | None:
    """The time in a header such as Date; None if the header is not a date of HTTP to its end."""
    try:
        return datetime.strptime(value, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    except ValueError:
        return None


def clock_skew_seconds(reported: datetime, asked_at: datetime, answered_at: datetime) -> float:
    """How far this clock is at least ahead of a Date header; negative if it is behind.

    The header has whole seconds, and was written between the two moments.
    """
    latest = reported + timedelta(seconds=1)
    return (max(asked_at - latest, timedelta()) + min(answered_at - reported, timedelta())).total_seconds()
