"""Tokens for the identity of this VM, from the metadata service."""

from typing import Any

import httpx
from azure.core.credentials import AccessToken

from scheduled_events_agent import __version__
from scheduled_events_agent.events import DocumentError, excerpt, parse_json
from scheduled_events_agent.fleet.ledger import LedgerError
from scheduled_events_agent.transport import BoundedTransport

_PATH = "/metadata/identity/oauth2/token"
_API_VERSION = "2018-02-01"
_MAX_ANSWER_BYTES = 256 * 1024
_UPDATE_SECONDS = 70.0  # at most, that the service is away (410) while it is updated
_HEADERS = {
    "Metadata": "true",
    "User-Agent": f"scheduled-events-agent/{__version__}",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


class VmCredential:
    """A TokenCredential, as Microsoft's packages take one. They keep a token until five minutes before its end."""

    def __init__(self, endpoint: str, client_id: str | None, audience: str, limit_seconds: float) -> None:
        """``endpoint``: of the metadata service. ``audience``: the one service that its tokens are for."""
        self._url = f"{endpoint}{_PATH}"
        self._client_id = client_id
        self._audience = audience
        self._limit_seconds = limit_seconds

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """A token for the audience. Blocks up to the limit. Raises LedgerError."""
        del options  # claims and tenants are for users, not for machines
        # The server may name a scope when it answers 401, and would get the token.
        if {scope.removesuffix("/.default").rstrip("/") for scope in scopes} != {self._audience}:
            raise LedgerError(f"the table asks for a token that is not for {self._audience}", kind="denied")
        query = {"api-version": _API_VERSION, "resource": self._audience}
        if self._client_id:
            query["client_id"] = self._client_id
        transport = BoundedTransport(_MAX_ANSWER_BYTES)
        with httpx.Client(transport=transport, trust_env=False, timeout=self._limit_seconds) as client:
            try:
                answer = client.get(self._url, params=query, headers=_HEADERS)
            except httpx.TimeoutException:
                text = f"the metadata service gives no token within {self._limit_seconds:g} s"
                raise LedgerError(text, kind="timeout") from None
            except (httpx.TransportError, httpx.InvalidURL) as error:
                raise LedgerError(f"the metadata service gives no token: {error}", kind="unreachable") from None
        if answer.status_code != 200:
            raise self._refusal(answer)
        return _parse_token(answer.content)

    def _refusal(self, answer: httpx.Response) -> LedgerError:
        status = answer.status_code
        if status in (408, 410, 429, 500, 502, 503, 504):
            after = _UPDATE_SECONDS if status == 410 else 0.0
            text = f"the metadata service gives no token now: it answers {status}"
            return LedgerError(text, kind="throttled", retry_after=after)
        why = f"the metadata service gives no token (it answers {status}: {excerpt(answer.content)})"
        if self._client_id:
            way = f"this VM has no identity {self._client_id}: assign it, or correct fleet.credential.client_id"
        else:
            way = (
                "this VM has no managed identity, or several: assign one, or name it as fleet.credential.client_id"
            )
        text = f"{why}: {way}"
        return LedgerError(text, kind="denied")


def _parse_token(body: bytes) -> AccessToken:
    try:
        document = parse_json(body)
        token = document["access_token"]
        ends_at = float(document["expires_on"])
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise ValueError
        return AccessToken(token, int(ends_at))
    except (ValueError, RecursionError, DocumentError, KeyError, TypeError, OverflowError):
        raise LedgerError("the metadata service's answer holds no token", kind="bad_answer") from None
