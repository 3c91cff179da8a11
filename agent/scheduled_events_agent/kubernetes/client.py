"""One request to the API server, bounded in time and size: its answer as a value, or an error of one kind.

Source: kubernetes.io/docs/reference/using-api/api-concepts, and recorded answers of an API server 1.36.
"""

import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import httpx
import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.host import HostError
from scheduled_events_agent.http.errors import (
    REQUEST_ERRORS,
    HttpErrorKind,
    classify,
    error_for_status,
    parse_date,
)
from scheduled_events_agent.http.transport import HEADERS, BoundedTransport
from scheduled_events_agent.imds.text import clean_text
from scheduled_events_agent.kubernetes.account import Account, AccountError

BACKOFF_SECONDS = (1.0, 8.0)
"""The first pause after a request that was not answered, and the longest."""
REQUEST_SECONDS = 15.0
"""The longest time for an answer. An admission webhook may take 10 of them, by default."""

_CONNECT_SECONDS = 5.0
_MAX_ANSWER_BYTES = 8 << 20  # a page of 100 pods has about one
_MAX_MESSAGE = 300
_UNAUTHORIZED_SECONDS = 10.0  # as long may a replaced token be unknown
_UNAUTHORIZED_TIMES = 3
_UNAUTHORIZED_PAUSE_SECONDS = 5.0
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

T = TypeVar("T")

ApiErrorKind = Literal[
    "unavailable",  # no answer, or one that says to come again
    "unauthorized",  # the credentials are not known, and will not be
    "forbidden",
    "not_found",
    "conflict",
    "rejected",
]
_KIND_OF_STATUS: dict[int, ApiErrorKind] = {403: "forbidden", 404: "not_found", 409: "conflict"}


class Cause(msgspec.Struct, frozen=True):
    """One reason of a denial."""

    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: tuple[Cause, ...] = ()


class Status(msgspec.Struct):
    """What the API server says when it has no object to send."""

    kind: Literal["Status"]
    message: str = ""
    details: _Details | None = None


_STATUS = msgspec.json.Decoder(Status)


class ApiError(AgentError):
    """The API server has not done what was asked."""

    def __init__(
        self,
        message: str,
        *,
        kind: ApiErrorKind,
        status: int | None = None,
        causes: tuple[Cause, ...] = (),
        retry_after: float | None = None,
        date: datetime | None = None,
        is_outage: bool = False,
        failure: HttpErrorKind | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.status = status
        """None: there was no answer."""
        self.causes = causes
        self.retry_after = retry_after
        """Seconds."""
        self.date = date
        """The API server's time."""
        self.is_outage = is_outage
        """Every other request would end like this one now."""
        self.failure = failure
        """Why there was no answer, or none that can be used; None if the API server has said no."""

    def cause(self, reason: str) -> Cause | None:
        """The cause with this reason."""
        return next((cause for cause in self.causes if cause.reason == reason), None)


class Answer(NamedTuple, Generic[T]):
    """What the API server answers."""

    value: T
    date: datetime | None
    """Its time, to the second."""


class Client:
    """Sends requests as one account, each on a connection of its own. For any thread."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._lock = threading.Lock()
        self._unauthorized_times = 0
        self._unauthorized_since = 0.0

    def send(
        self,
        method: str,
        path: str,
        decoder: msgspec.json.Decoder[T],
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        is_metadata_only: bool = False,
        is_strategic: bool = False,
        seconds: float = REQUEST_SECONDS,
    ) -> Answer[T]:
        """Ask, and wait at most ``seconds``. A PATCH is a merge patch, or a strategic one. Raises ApiError.

        ``decoder``: of the answer's type; made at import, since two threads must not make the same one.
        """
        seconds = max(0.1, min(seconds, REQUEST_SECONDS))
        headers = {**HEADERS, "Accept": _METADATA_ONLY if is_metadata_only else "application/json"}
        if body is not None:
            kind = "json"
            if method == "PATCH":
                kind = "strategic-merge-patch+json" if is_strategic else "merge-patch+json"
            headers["Content-Type"] = f"application/{kind}"
        try:
            account = self._account = self._account.current()
            if token := account.read_token():
                headers["Authorization"] = f"Bearer {token}"
            transport = BoundedTransport(_MAX_ANSWER_BYTES, ssl_context=account.ssl_context())
        except (HostError, AccountError) as error:  # a file that is being replaced
            raise ApiError(str(error), kind="unavailable", is_outage=True, failure="setup") from None
        name = account.tls_server_name
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        with httpx.Client(transport=transport, trust_env=False, timeout=timeout) as client:
            try:
                response = client.request(
                    method,
                    f"{account.server}{path}",
                    params=query,
                    headers=headers,
                    content=None if body is None else msgspec.json.encode(body),
                    extensions={"sni_hostname": name} if name else None,
                )
            except REQUEST_ERRORS as error:
                failure = classify(error)
                is_outage = failure.kind in ("refused", "unreachable", "tls")
                raise ApiError(
                    f"the API server: {failure.message}",
                    kind="unavailable",
                    is_outage=is_outage,
                    failure=failure.kind,
                ) from None
        self._count_unauthorized(response)
        date = parse_date(response.headers.get("date", ""))
        if not response.is_success:
            raise _error_of(response, date)
        try:
            return Answer(decoder.decode(response.content), date)
        except msgspec.MsgspecError:
            text = "the API server's answer is not one of Kubernetes"
            raise ApiError(text, kind="unavailable", date=date, failure="malformed") from None

    def _count_unauthorized(self, response: httpx.Response) -> None:
        """Raises ApiError for an answer 401: to come again, or that it is of no use."""
        with self._lock:
            if response.status_code != 401:
                self._unauthorized_times = 0
                return
            now = time.monotonic()
            if self._unauthorized_times == 0:
                self._unauthorized_since = now
            self._unauthorized_times += 1
            is_for_good = (
                self._unauthorized_times >= _UNAUTHORIZED_TIMES
                and now - self._unauthorized_since >= _UNAUTHORIZED_SECONDS
            )
        raise ApiError(
            f"the API server does not know these credentials (401): {self._account.origin}",
            kind="unauthorized" if is_for_good else "unavailable",
            status=401,
            retry_after=_UNAUTHORIZED_PAUSE_SECONDS,
            is_outage=True,
        )


def _error_of(response: httpx.Response, date: datetime | None) -> ApiError:
    status = response.status_code
    try:
        said = _STATUS.decode(response.content)
    except msgspec.MsgspecError:
        said = Status(kind="Status")
    failure = error_for_status(response, {})
    is_client_error = 400 <= status < 500 and status not in (408, 429)
    kind = _KIND_OF_STATUS.get(status, "rejected") if is_client_error else "unavailable"
    causes = said.details.causes if said.details else ()
    return ApiError(
        clean_text(said.message)[:_MAX_MESSAGE] or f"the API server: {failure.message}",
        kind=kind,
        status=status,
        causes=tuple(Cause(one.reason, clean_text(one.message)[:_MAX_MESSAGE]) for one in causes),
        retry_after=failure.retry_after,
        date=date,
        is_outage=status == 429 and not causes,
    )
