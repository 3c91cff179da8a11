"""Carries the requests of Microsoft's azure-data-tables over the agent's own transport.

So each exchange has one deadline, its answer a limit, and only the policy's proxy is used; the package's own
transport, with requests, has neither, and takes 6 MiB.
"""

import time
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self

import httpx
from azure.core.exceptions import HttpResponseError
from azure.core.pipeline.transport import HttpTransport
from azure.core.rest import HttpRequest, HttpResponse

from scheduled_events_agent import __version__
from scheduled_events_agent.fleet.ledger import LedgerError, OnRequest
from scheduled_events_agent.transport import (
    SecureTransport,
    SetupError,
    TooLargeError,
    connect_fault,
    proxy_for,
    trusting,
)

_MAX_ANSWER_BYTES = 8 * 1024 * 1024  # the service gives 4 MiB at a time
_OWN_HEADERS = {
    "User-Agent": f"scheduled-events-agent/{__version__}",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


class TableTransport(HttpTransport[HttpRequest, HttpResponse]):
    """For any thread. Raises LedgerError."""

    def __init__(self, proxy: str | None, limit_seconds: float, on_request: OnRequest = lambda *_: None) -> None:
        """``proxy``: as in the policy. ``limit_seconds``: of each exchange, without the look-up of the name."""
        self._on_request = on_request
        self._proxy = proxy
        self._limit_seconds = limit_seconds
        self.clock_skew_seconds: float | None = None
        """How far this machine's clock was ahead of the service's, when it last answered."""

    def send(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        del kwargs  # limits of the package's own
        try:
            url = httpx.URL(request.url)
            context = trusting(None) if url.scheme == "https" else None
            transport = SecureTransport(_MAX_ANSWER_BYTES, context, proxy_for(self._proxy, url))
        except (SetupError, httpx.InvalidURL) as error:
            raise LedgerError(f"the table cannot be asked: {error}", kind="setup") from None
        with httpx.Client(transport=transport, trust_env=False, timeout=self._limit_seconds) as client:
            began = time.monotonic()
            try:
                answer = self._exchange(client, request, url)
            except LedgerError as error:
                self._on_request(request.method, error.kind, time.monotonic() - began)
                raise
        self._on_request(request.method, answer.status_code, time.monotonic() - began)
        self._look_at_clock(answer.headers.get("date", ""))
        return _Response(request, answer)

    def _exchange(self, client: httpx.Client, request: HttpRequest, url: httpx.URL) -> httpx.Response:
        try:
            return client.request(
                request.method, url, headers={**request.headers, **_OWN_HEADERS}, content=request.content
            )
        except httpx.TimeoutException:
            kind, what = "timeout", f"no whole answer within {self._limit_seconds:g} s"
        except httpx.ConnectError as error:
            fault, what = connect_fault(error)
            kind = "unreachable"
            if fault == "tls":
                trusting.cache_clear()  # they may be other ones by now
        except httpx.ProxyError:
            kind, what = "unreachable", "the proxy refuses"
        except TooLargeError:
            kind, what = "bad_answer", f"the answer is over {_MAX_ANSWER_BYTES // 1024**2} MiB"
        except httpx.NetworkError:
            kind, what = "unreachable", "the connection was lost"
        except (httpx.TransportError, ValueError):
            kind, what = "bad_answer", "not a whole HTTP answer"
        # Outside of the except clauses, so that no traceback has a URL with a signature.
        raise LedgerError(f"{url.host} gives no answer: {what}", kind=kind)

    def _look_at_clock(self, date: str) -> None:
        try:
            at = parsedate_to_datetime(date)
            self.clock_skew_seconds = (datetime.now(UTC) - at).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return

    def open(self) -> None:
        """Each exchange has a connection of its own."""

    def close(self) -> None:
        """There is nothing to close: each exchange has closed its own connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class _Response(HttpResponse):
    """A whole answer, as Microsoft's packages want it."""

    def __init__(self, request: HttpRequest, answer: httpx.Response) -> None:
        self._request = request
        self._answer = answer
        self.context: Any = None
        """The package keeps its own things here."""

    @property
    def request(self) -> HttpRequest:
        return self._request

    @property
    def status_code(self) -> int:
        return self._answer.status_code

    @property
    def headers(self) -> MutableMapping[str, str]:
        return self._answer.headers

    @property
    def reason(self) -> str:
        return self._answer.reason_phrase

    @property
    def content_type(self) -> str | None:
        content_type: str | None = self._answer.headers.get("content-type")
        return content_type

    @property
    def is_closed(self) -> bool:
        return True

    @property
    def is_stream_consumed(self) -> bool:
        return True

    @property
    def encoding(self) -> str | None:
        return "utf-8"

    @encoding.setter
    def encoding(self, value: str | None) -> None:
        del value  # JSON has no other

    @property
    def url(self) -> str:
        return self._request.url

    @property
    def content(self) -> bytes:
        return self._answer.content

    def text(self, encoding: str | None = None) -> str:
        del encoding
        return self._answer.content.decode("utf-8", "replace")

    def json(self) -> Any:
        return self._answer.json()

    def raise_for_status(self) -> None:
        if self.status_code >= 400:
            raise HttpResponseError(response=self)

    def read(self) -> bytes:
        return self.content

    def iter_raw(self, **kwargs: Any) -> Iterator[bytes]:
        del kwargs
        yield self.content

    def iter_bytes(self, **kwargs: Any) -> Iterator[bytes]:
        del kwargs
        yield self.content

    def close(self) -> None:
        """It is."""

    def __enter__(self) -> HttpResponse:
        return self

    def __exit__(self, *exc: object) -> None:
        return None
