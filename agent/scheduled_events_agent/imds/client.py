"""Client of the metadata service: fetches the document, posts approvals, asks for this VM's name.

It also has the pause after each kind of failure. It parses no document and decides nothing. Invariant: a request
returns the whole body of an answer with status 200. Everything else is an ImdsError, and comes in time.
"""

import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any, Literal

import httpx
import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.http.errors import (
    REQUEST_ERRORS,
    HttpErrorKind,
    classify,
    clock_skew_seconds,
    error_for_status,
    parse_date,
)
from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.http.transport import HEADERS, BoundedTransport
from scheduled_events_agent.imds.api_version import BASELINE_VERSION
from scheduled_events_agent.imds.document import ApiVersion
from scheduled_events_agent.imds.endpoint import parse_endpoint
from scheduled_events_agent.imds.guest_proxy import GuestProxy
from scheduled_events_agent.imds.text import DocumentError, clean_name, excerpt, parse_json

DEFAULT_ENDPOINT = "http://169.254.169.254"
# DHCP option 245 inside a virtual network: another service of the host, which has no scheduled events.
_WIRE_SERVER = "168.63.129.16"
# The instance document has its own api-versions; only the whole document is the same in all of them.
_DOCUMENT_PATH = "/metadata/scheduledevents"
_INSTANCE_PATH = "/metadata/instance?api-version=2021-12-13&format=json"
_MAX_ANSWER_BYTES = 8 * 1024 * 1024  # 1,000 events with 100 resources each are 3 MiB
_HEADERS = {"Metadata": "true"} | HEADERS

_KIND_OF_STATUS: dict[int, HttpErrorKind] = {400: "bad_request", 401: "denied", 403: "denied", 410: "gone"}
_HINTS: dict[HttpErrorKind, str] = {
    "refused": "; check imds.endpoint, and that this machine is an Azure VM",
    "unreachable": "; check imds.endpoint, and the route and firewall to it",
    "bad_request": "; check imds.api_version",
    "redirect": "; something other than the metadata service answers: check imds.endpoint",
    "empty": "; the service is still switching scheduled events on for this VM",
}

# Other failures do not slow polling down: a Spot VM has 30 s of notice, and a longer pause would use them up.
# Microsoft's page asks for 2, 4, 8, 16 after 429. After 400 one quick retry is enough.
_BACKOFF_SECONDS: dict[str, tuple[float, float]] = {
    "throttled": (2.0, 16.0),
    "bad_request": (5.0, 10.0),
}
"""The first pause, which doubles, and the longest."""
_RETRY_AFTER_SECONDS = (1.0, 16.0)
"""Shortest and longest pause that a 429 can ask for."""


class ImdsError(AgentError):
    """The metadata service gave no usable answer. This says nothing about any event."""

    kind: HttpErrorKind

    def __init__(
        self,
        message: str,
        *,
        kind: HttpErrorKind,
        summary: str = "",
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        """``retry_after``: seconds that the service asks to wait; ``status``: that of its answer, if any."""
        super().__init__(message, kind=kind, summary=summary)
        self.retry_after = retry_after
        self.status = status
        self.is_of_guest_proxy = False
        """Whether Azure's Guest Proxy Agent may be the reason."""


class EndpointError(AgentError):
    """The setting is not an endpoint."""

    def __init__(self, setting: str) -> None:
        super().__init__(
            "imds.endpoint: expected auto or http://ADDRESS[:PORT] with an IPv4 address or a host name; "
            f'got "{setting}"',
            kind="config",
        )


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """This VM; "" where the service did not say."""

    name: str
    """The VM's name as in Resources; it may differ from the host name."""
    vm_id: str
    group: str = ""
    """The scale set that the VM is in."""

    def merged_with(self, known: "Identity") -> "Identity":
        """This identity, completed with the values of ``known`` where it has none."""
        return Identity(
            name=self.name or known.name, vm_id=self.vm_id or known.vm_id, group=self.group or known.group
        )


class RawResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer with any status, for a diagnosis."""

    status: int
    headers: dict[str, str]
    """The headers, with names in lower case."""
    body: bytes
    error: ImdsError | None
    """The error that a client raises for this answer; None for status 200."""


def resolve_endpoint(setting: str) -> str:
    """The endpoint that ``imds.endpoint`` means. ``auto`` reads DHCP leases. Raises EndpointError."""
    if setting != "auto":
        if parse_endpoint(setting) is None:
            raise EndpointError(setting)
        return setting.rstrip("/")
    address = host.dhcp_option_245()
    return DEFAULT_ENDPOINT if address in (None, _WIRE_SERVER) else f"http://{address}"


def parse_identity(body: bytes) -> Identity | None:
    """This VM according to the instance document; None if that is not a JSON object."""
    document = _parse_object(body)
    if document is None:
        return None
    compute = document.get("compute")
    known: dict[str, Any] = compute if isinstance(compute, dict) else {}
    texts = [known.get(field) for field in ("name", "vmId", "vmScaleSetName")]
    name, vm_id, group = [clean_name(text) if isinstance(text, str) else "" for text in texts]
    return Identity(name=name, vm_id=vm_id, group=group)


def _parse_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(body)
    except (ValueError, RecursionError, DocumentError):
        return None
    return value if isinstance(value, dict) else None


class ImdsBackoff:
    """The shortest pause after a failure; 0: the usual one. It grows with failures of one kind in a row."""

    def __init__(self) -> None:
        self._kind = ""
        self._backoff = Backoff(0.0, 0.0)

    def seconds_after(self, error: AgentError) -> float:
        """Call it once for each failure."""
        if error.kind != self._kind:
            self._kind = error.kind
            self._backoff = Backoff(*_BACKOFF_SECONDS.get(error.kind, (0.0, 0.0)))
        delay = self._backoff.next_delay()
        if isinstance(error, ImdsError) and error.kind == "throttled" and error.retry_after is not None:
            least, most = _RETRY_AFTER_SECONDS
            return min(max(error.retry_after, least), most)
        return delay

    def reset(self) -> None:
        """A request has succeeded."""
        self._backoff.reset()


class ImdsClient:
    """The requests of the protocol. Holds no connection between them; for one thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        api_version: str,
        request_timeout: float,
        first_request_timeout: float,
        on_wait: Callable[[float], None] = lambda _: None,
        guest_proxy: GuestProxy | None = None,
    ) -> None:
        """``endpoint``: as ``resolve_endpoint`` returns it.

        ``on_wait`` is called before each wait with the seconds that it may take.

        ``guest_proxy``: what the answers to other clients have shown of Azure's proxy.
        """
        self._guest_proxy = guest_proxy or GuestProxy()
        self._document_url = httpx.URL(f"{endpoint}{_DOCUMENT_PATH}?api-version={api_version}")
        self._instance_url = httpx.URL(endpoint + _INSTANCE_PATH)
        self._echoes_incarnation = api_version == "2017-03-01"
        self._request_timeout = request_timeout
        self._fetch_timeout = max(request_timeout, first_request_timeout)
        self.clock_skew_seconds: float | None = None
        """How far this clock was at least ahead of the last document's Date, negative: behind; None without one.

        Errors do not count: Azure's proxy on the VM dates those that it makes itself by this very clock.
        """
        self._client = httpx.Client(
            transport=BoundedTransport(_MAX_ANSWER_BYTES, on_progress=on_wait, family=socket.AF_INET),
            headers=_HEADERS,
            trust_env=False,
            follow_redirects=False,
        )

    def fetch(self) -> bytes:
        """The scheduled events document as it came. Raises ImdsError."""
        request = self._build("GET", self._document_url, self._fetch_timeout)
        self.clock_skew_seconds = None
        asked_at = datetime.now(UTC)
        response = self._request(request)
        answered_at = datetime.now(UTC)
        if not response.content:
            raise _error(request, "200 with an empty body", "empty")
        self._fetch_timeout = self._request_timeout
        if date := parse_date(response.headers.get("date", "")):
            self.clock_skew_seconds = clock_skew_seconds(date, asked_at, answered_at)
        return response.content

    def approve(self, ids: Sequence[str], incarnation: str) -> None:
        """Ask Azure to start the events ``ids`` now. Harmless to repeat. Raises ImdsError."""
        content: dict[str, object] = {"StartRequests": [{"EventId": event_id} for event_id in ids]}
        if self._echoes_incarnation:
            content["DocumentIncarnation"] = incarnation
        request = self._build("POST", self._document_url, self._request_timeout, msgspec.json.encode(content))
        body = self._request(request).content
        if body.strip() and _parse_object(body) is None:  # such as the page of a captive portal
            what = "200, but neither an empty body nor a JSON object"
            raise _error(request, what, "unconfirmed", detail=f": {excerpt(body)}")

    def fetch_identity(self) -> Identity:
        """This VM's name and id. Raises ImdsError."""
        request = self._build("GET", self._instance_url, self._request_timeout)
        body = self._request(request).content
        identity = parse_identity(body)
        if identity is None:
            raise _error(request, "expected a JSON object", "malformed", detail=f"; got {excerpt(body)}")
        return identity

    def probe(self, what: Literal["document", "instance"]) -> RawResponse:
        """An answer with any status, and its headers. Raises ImdsError if no whole answer comes in time."""
        if what == "document":
            request = self._build("GET", self._document_url, self._fetch_timeout)
        else:
            request = self._build("GET", self._instance_url, self._request_timeout)
        response = self._exchange(request)
        return RawResponse(
            status=response.status_code,
            headers=dict(response.extensions.get("headers", response.headers)),
            body=response.content,
            error=None if response.status_code == 200 else self._error_for_status(request, response),
        )

    def _build(self, method: str, url: httpx.URL, timeout: float, content: bytes | None = None) -> httpx.Request:
        # Only the answer may take long the first time; a service that does not even connect is unavailable.
        limits = httpx.Timeout(timeout, connect=self._request_timeout)
        headers = {"Content-Type": "application/json"} if content else None
        return self._client.build_request(method, url, content=content, headers=headers, timeout=limits)

    def _request(self, request: httpx.Request) -> httpx.Response:
        """An answer with status 200. Raises ImdsError for any other."""
        response = self._exchange(request)
        if response.status_code == 200:
            return response
        raise self._error_for_status(request, response)

    def _exchange(self, request: httpx.Request) -> httpx.Response:
        try:
            response = self._client.send(request)
        except REQUEST_ERRORS as error:
            failure = classify(error)
            reason = failure.message if failure.kind in ("refused", "malformed") else str(error)
            detail = f": {error}" if failure.kind == "malformed" else ""
        else:
            # httpx's own stream refers to the response: each answer would stay in memory until garbage collection.
            response.stream = httpx.ByteStream(b"")
            self._guest_proxy.see(response.headers)
            return response
        of_proxy = self._guest_proxy.hint(request.url, failure.kind)
        raise _error(request, reason, failure.kind, detail=detail, of_proxy=of_proxy)

    def _error_for_status(self, request: httpx.Request, response: httpx.Response) -> ImdsError:
        status = response.status_code
        reason = f"{status} {response.reason_phrase or '(unknown status)'}"
        detail = f": {excerpt(response.content)}" if response.content else ""
        failure = error_for_status(response, _KIND_OF_STATUS)
        of_proxy = self._guest_proxy.hint(request.url, failure.kind, status)
        error = _error(request, reason, failure.kind, detail=detail, of_proxy=of_proxy)
        error.status = status
        error.retry_after = failure.retry_after
        return error


def connect(
    endpoint: str,
    api_version: ApiVersion = BASELINE_VERSION,
    *,
    request_timeout: float,
    first_request_timeout: float = 0.0,
    longest: float = inf,
    on_wait: Callable[[float], None] = lambda _: None,
    guest_proxy: GuestProxy | None = None,
) -> ImdsClient:
    """A client for the service. Raises EndpointError.

    ``endpoint``: as ``imds.endpoint`` of a policy. ``api_version``: of documents and approvals.

    ``first_request_timeout``: for the first request for the document, which may be the VM's first one ever and
    then takes long; 0 if another client has sent it. ``longest``: no request takes more seconds than this.
    """
    return ImdsClient(
        resolve_endpoint(endpoint),
        api_version=api_version,
        request_timeout=min(request_timeout, longest),
        first_request_timeout=min(first_request_timeout, longest),
        on_wait=on_wait,
        guest_proxy=guest_proxy,
    )


def _error(
    request: httpx.Request, reason: str, kind: HttpErrorKind, *, detail: str = "", of_proxy: str = ""
) -> ImdsError:
    """``detail``: the rest of the sentence ``reason``. ``of_proxy``: the hint, if Azure's proxy is the reason."""
    # If an approval is rejected, that is rather because of the event than because of the api-version.
    is_about_event = request.method == "POST" and kind == "bad_request"
    hint = "" if is_about_event else _HINTS.get(kind, "")
    if of_proxy:
        hint = f"; {of_proxy}"
    message = f"{request.method} {request.url}: {reason}{detail}{hint}"
    summary = reason if request.url.path == _DOCUMENT_PATH else f"{request.url.path}: {reason}"
    error = ImdsError(message, kind=kind, summary=summary)
    error.is_of_guest_proxy = bool(of_proxy)
    return error
