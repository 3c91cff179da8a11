"""Credentials for a fleet's table: tokens for the managed identity of this VM, or the shared access signature."""

import re
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs

import httpx

from scheduled_events_agent import host
from scheduled_events_agent.fleet.backend import BackendError
from scheduled_events_agent.http.errors import REQUEST_ERRORS, classify
from scheduled_events_agent.http.transport import HEADERS, BoundedTransport
from scheduled_events_agent.imds.guest_proxy import GuestProxy
from scheduled_events_agent.imds.text import DocumentError, excerpt, parse_json
from scheduled_events_agent.policy.durations import format_time, parse_time

_PATH = "/metadata/identity/oauth2/token"
_API_VERSION = "2018-02-01"
_MAX_ANSWER_BYTES = 256 * 1024
_RENEW_TOKEN_SECONDS = 300.0  # before its end
_UPDATE_SECONDS = 70.0  # longest time for which the service is unavailable (410) while it is updated
_HEADERS = {"Metadata": "true"} | HEADERS
_MAX_SAS_BYTES = 16 * 1024
_RENEW_SAS_BEFORE = timedelta(days=7)
# The letters of its permissions, as the service names them.
_NEEDED = {"r": "read", "a": "add", "u": "update", "d": "delete"}


class ManagedIdentityCredential:
    """Tokens for the identity of this VM, from the metadata service. For one thread."""

    def __init__(self, endpoint: str, client_id: str | None, audience: str, limit_seconds: float) -> None:
        """``endpoint``: that of the metadata service. ``audience``: the one service that its tokens are for."""
        self._url = f"{endpoint}{_PATH}"
        self._client_id = client_id
        self._audience = audience
        self._limit_seconds = limit_seconds
        self._token = ""
        self._ends_at = 0.0

    def fetch_token(self) -> str:
        """A token for the audience, the same until five minutes before its end. Raises BackendError."""
        if not self._token or self._ends_at - time.time() < _RENEW_TOKEN_SECONDS:
            self._token, self._ends_at = self._fetch()
        return self._token

    def forget_token(self) -> None:
        """Get another token next time: this one was rejected."""
        self._token = ""

    def _fetch(self) -> tuple[str, float]:
        """A token, and when it ends. Blocks up to the limit."""
        query = {"api-version": _API_VERSION, "resource": self._audience}
        if self._client_id:
            query["client_id"] = self._client_id
        transport = BoundedTransport(_MAX_ANSWER_BYTES, family=socket.AF_INET)
        with httpx.Client(transport=transport, trust_env=False, timeout=self._limit_seconds) as client:
            try:
                answer = client.get(self._url, params=query, headers=_HEADERS)
            except REQUEST_ERRORS as error:
                if classify(error).kind == "timeout":
                    text = f"the metadata service gives no token within {self._limit_seconds:g} s"
                    raise BackendError(text, kind="timeout") from None
                raise BackendError(f"the metadata service gives no token: {error}", kind="unreachable") from None
        if answer.status_code != 200:
            raise self._error_for_status(answer)
        return _parse_token(answer.content)

    def _error_for_status(self, answer: httpx.Response) -> BackendError:
        status = answer.status_code
        if status in (408, 410, 421, 429, 500, 502, 503, 504):
            after = _UPDATE_SECONDS if status == 410 else 0.0
            text = f"the metadata service gives no token now: it answers {status}"
            return BackendError(text, kind="throttled", retry_after=after)
        why = f"the metadata service gives no token (it answers {status}: {excerpt(answer.content)})"
        if status in (401, 403):
            remedy = GuestProxy().hint(answer.url, "denied", status)
        elif self._client_id:
            remedy = f"this VM has no identity {self._client_id}: assign it, or correct fleet.credential.client_id"
        else:
            remedy = (
                "this VM has no managed identity, or several: assign one, or name it as fleet.credential.client_id"
            )
        return BackendError(f"{why}: {remedy}", kind="denied")


def _parse_token(body: bytes) -> tuple[str, float]:
    try:
        document = parse_json(body)
        token = document["access_token"]
        ends_at = int(float(document["expires_on"]))
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise ValueError
    except (ValueError, RecursionError, DocumentError, KeyError, TypeError, OverflowError):
        raise BackendError("the metadata service's answer holds no token", kind="bad_response") from None
    return token, ends_at


def read_sas(path: Path) -> str:
    """The signature that a file holds, with or without a question mark before it. Raises BackendError."""
    try:
        text = host.read_trusted_file(path, _MAX_SAS_BYTES).decode("ascii").strip().removeprefix("?")
    except host.HostError as error:
        raise BackendError(str(error), kind="setup") from None
    except UnicodeDecodeError:
        raise BackendError(f"{path} is not in ASCII: write it without a byte order mark", kind="setup") from None
    if text.startswith(("'", '"')):
        raise BackendError(f"{path} has quotes around the signature: take them out", kind="setup")
    if not {"sv", "sig"} <= parse_qs(text).keys() or re.search(r"\s", text):
        form = "a shared access signature such as sv=...&sig=..., in one line"
        raise BackendError(f"{path} does not hold {form}", kind="setup")
    return text


def sas_warnings(path: Path, now: datetime) -> Iterator[str]:
    """Warnings about the signature in a file, if it can be read: it expires, or does not allow enough.

    If it has a stored access policy (``si``), the account has its expiry and permissions, and there is no warning.
    """
    try:
        fields = parse_qs(read_sas(path))
    except BackendError:
        return
    try:
        ends_at = parse_time(fields["se"][0])
    except (KeyError, ValueError):
        pass
    else:
        if ends_at - now < _RENEW_SAS_BEFORE:
            ends = "has expired" if ends_at <= now else "expires soon"
            yield f"the signature in {path} {ends}, at {format_time(ends_at)}: write a new one into the file"
    missing = [
        permission for letter, permission in _NEEDED.items() if "sp" in fields and letter not in fields["sp"][0]
    ]
    if missing:
        yield f"the signature in {path} does not allow what the agent does: {', '.join(missing)}"
