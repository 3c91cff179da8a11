"""Sends one notification to its target over HTTP.

Errors get their text here, by their kind: the texts of libraries may hold the URL or a header, which are secrets.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.http.errors import REQUEST_ERRORS, HttpErrorKind, classify, error_for_status
from scheduled_events_agent.http.transport import HEADERS, BoundedTransport, SetupError, proxy_for, tls_context
from scheduled_events_agent.imds.text import excerpt
from scheduled_events_agent.notifications.formats import FormatError, render
from scheduled_events_agent.notifications.masking import mask, secrets_of
from scheduled_events_agent.notifications.notification import SAMPLE, Notification
from scheduled_events_agent.policy.settings import (
    KUBERNETES_FORMAT,
    NotifyTarget,
    SecretFile,
    files_of_target,
    is_foreign_path,
)

_KIND_OF_STATUS: dict[int, HttpErrorKind] = {
    # Final: the body is wrong, and would be the same the next time.
    400: "rejected", 413: "rejected", 414: "rejected", 415: "rejected", 422: "rejected", 431: "rejected",
    401: "denied", 402: "denied", 403: "denied", 407: "denied",
    405: "not_found", 410: "not_found",
    408: "timeout",
}  # fmt: skip

_ROUTING_KEY = "x-routing-key"
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_SECRET_BYTES = 16 * 1024
_MAX_CA_BYTES = 1024 * 1024


class NotificationError(AgentError):
    """A notification was not delivered. The message holds no secret."""

    kind: HttpErrorKind

    def __init__(
        self,
        message: str,
        *,
        kind: HttpErrorKind,
        status: int | None = None,
        retry_after: float | None = None,
        answer: str = "",
    ) -> None:
        """``status``: HTTP status of the answer, if there was one. ``retry_after``: seconds that it asks to wait.

        ``answer``: the beginning of the answer, for people only.
        """
        super().__init__(message, kind=kind)
        self.status = status
        self.retry_after = retry_after
        self.answer = answer


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """The target has accepted a notification."""

    status: int
    answer: str
    """The beginning of the answer, for people only: the target's secrets are removed, but it may hold others."""


Deliver = Callable[[NotifyTarget, Notification], Delivered]
"""Sends a notification once, as ``deliver`` does; a format that is not plain HTTP has its own."""


def deliver(target: NotifyTarget, notification: Notification) -> Delivered:
    """Send a notification once. Raises NotificationError.

    The answer's status decides; of its body at most 64 KiB are read, for people. Blocks for at most the target's
    time limit, and while a name is looked up.
    """
    post = _prepare(target, notification)
    with httpx.Client(
        transport=post.transport, trust_env=False, follow_redirects=False, timeout=target.timeout
    ) as client:
        response = _exchange(client, post)
    answer = excerpt(mask(response.content, post.secrets))
    if response.is_success:
        return Delivered(status=response.status_code, answer=answer)
    raise _error_for_status(response, answer)


def warnings(targets: Iterable[NotifyTarget]) -> Iterator[tuple[str, str]]:
    """Why a notification could not be sent from here, or who else can read its secrets: path and message."""
    for index, target in enumerate(targets):
        path = f"notify[{index}]"
        if target.format == KUBERNETES_FORMAT:
            continue  # it has neither files nor secrets of its own
        if any(is_foreign_path(file) for _, file in files_of_target(target)):
            continue  # the policy is for another system
        for key, value in _secrets_of(target).items():
            if isinstance(value, SecretFile) and (risk := host.find_read_risk(Path(value.file))):
                yield f"{path}.{key}", risk
        try:
            _prepare(target, SAMPLE)
        except NotificationError as error:
            yield path, str(error)


class _Post(msgspec.Struct, frozen=True):
    """A request that is ready to be sent, and the client that sends it."""

    url: httpx.URL
    headers: dict[str, str]
    body: bytes
    transport: BoundedTransport
    secrets: set[str]


def _prepare(target: NotifyTarget, notification: Notification) -> _Post:
    texts = {key: _read_secret(value, key) for key, value in _secrets_of(target).items()}
    url = _parse_url(texts["to"])
    headers = {name.lower(): texts[f"headers.{name}"] for name in target.headers}
    routing_key = headers.pop(_ROUTING_KEY, "") if target.format == "pagerduty" else ""
    try:
        content_type, body = render(target.format, notification, routing_key)
    except FormatError as error:
        raise NotificationError(f"format: {error}", kind="setup") from None
    own = {"content-type": content_type} | {name.lower(): value for name, value in HEADERS.items()}
    try:
        if target.ca_file is not None:
            host.read_trusted_file(Path(target.ca_file), _MAX_CA_BYTES)  # the library would wait for a named pipe
        context = tls_context(target.ca_file) if url.scheme == "https" else None
        proxy = proxy_for(target.proxy, url)
    except host.HostError as error:
        raise NotificationError(f"ca_file: {error}", kind="setup") from None
    except SetupError as error:
        raise NotificationError(str(error), kind="setup") from None
    transport = BoundedTransport(_MAX_ANSWER_BYTES, ssl_context=context, proxy=proxy, is_cut=True)
    secrets = secrets_of(url, texts.values(), proxy)
    return _Post(url=url, headers=own | headers, body=body, transport=transport, secrets=secrets)


def _secrets_of(target: NotifyTarget) -> dict[str, str | SecretFile]:
    return {"to": target.to, **{f"headers.{name}": value for name, value in target.headers.items()}}


def _exchange(client: httpx.Client, post: _Post) -> httpx.Response:
    try:
        return client.post(post.url, headers=post.headers, content=post.body)
    except REQUEST_ERRORS as error:
        failure = classify(error)
    kind, what = failure.kind, failure.message
    if kind == "timeout":
        what = f"no whole answer within {client.timeout.read:g} s"
    elif kind == "too_large":
        kind = "malformed"
    elif kind == "malformed":
        what += ", or a header that cannot be sent"
    # Outside of the except clause, so that no traceback has the library's text.
    raise NotificationError(what, kind=kind)


def _error_for_status(response: httpx.Response, answer: str) -> NotificationError:
    failure = error_for_status(response, _KIND_OF_STATUS)
    return NotificationError(
        failure.message,
        kind=failure.kind,
        status=response.status_code,
        retry_after=failure.retry_after,
        answer=answer,
    )


def _read_secret(secret: str | SecretFile, key: str) -> str:
    if isinstance(secret, str):
        return secret
    try:
        text = host.read_trusted_file(Path(secret.file), _MAX_SECRET_BYTES).decode("ascii").strip()
    except host.HostError as error:
        raise NotificationError(f"{key}: {error}", kind="setup") from None
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        raise NotificationError(f"{key}: {secret.file} is not one line of plain text", kind="setup")
    return text


def _parse_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("https", "http") or not url.host or not 0 < (url.port or 1) < 65536:
        raise NotificationError("to: expected a URL such as https://example.com/hook", kind="setup")
    return url
