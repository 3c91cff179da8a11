"""A fleet's records in Azure Table Storage: four requests of its REST interface, over the agent's own transport.

It defines how a record is stored, and the meaning of each answer of the service. Invariant: each call ends in
bounded time, and every error is a BackendError whose text has neither the signature nor the URL with it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx

from scheduled_events_agent import host
from scheduled_events_agent.fleet.backend import BackendError, ErrorKind, OnRequest, Record, limited, plain_key
from scheduled_events_agent.fleet.credentials import ManagedIdentityCredential, read_sas, sas_warnings
from scheduled_events_agent.http.errors import (
    REQUEST_ERRORS,
    HttpErrorKind,
    classify,
    error_for_status,
    parse_date,
)
from scheduled_events_agent.http.transport import HEADERS, BoundedTransport, SetupError, proxy_for, tls_context
from scheduled_events_agent.imds.text import DocumentError, parse_json
from scheduled_events_agent.policy.settings import (
    FleetCredential,
    FleetSettings,
    TableAddress,
    is_foreign_path,
    parse_table,
)

ROLE = "Storage Table Data Contributor"

_EXCHANGE_SECONDS = 10.0
_LIST_SECONDS = 30.0
_MAX_ANSWER_BYTES = 8 * 1024 * 1024  # the service gives 4 MiB at a time
_RECORDS_PER_PAGE = 1000  # the service gives no more
_MAX_RECORD_CHARACTERS = 4096  # an agent writes a quarter of that; the service allows a MiB
_MAX_RETRY_AFTER_SECONDS = 300.0
# The URLs of Azure's clouds: https://ACCOUNT.table.core.windows.net, .usgovcloudapi.net, .chinacloudapi.cn.
_AUDIENCE = "https://storage.azure.com"
_AUDIENCES = {".usgovcloudapi.net": "https://storage.azure.us", ".chinacloudapi.cn": "https://storage.azure.cn"}
_HEADERS = {
    "x-ms-version": "2020-12-06",
    "DataServiceVersion": "3.0",
    "Accept": "application/json;odata=minimalmetadata",
    **HEADERS,
}
_KIND_OF_STATUS: dict[int, HttpErrorKind] = {
    401: "denied", 403: "denied",
    408: "timeout", 500: "timeout", 502: "timeout", 504: "timeout",
    503: "throttled",
}  # fmt: skip
_KINDS: dict[HttpErrorKind, ErrorKind] = {
    "timeout": "timeout",
    "too_large": "bad_response",
    "malformed": "bad_response",
}
"""Kinds of requests without an answer; each other kind becomes ``unreachable``."""
_CODE = r'(?i)"code"\s*:\s*"([A-Za-z]{1,64})"|<(?:\w+:)?code>([A-Za-z]{1,64})<'
_OWN_NAMES = ("PartitionKey", "RowKey", "Timestamp")
_CHANGED = {
    (409, "EntityAlreadyExists"),
    (412, "UpdateConditionNotSatisfied"),
    (412, "ConditionNotMet"),
    (404, "ResourceNotFound"),
}


def connect(
    settings: FleetSettings,
    group: str,
    endpoint: str,
    on_request: OnRequest = lambda *_: None,
    *,
    partition: str = "fleet",
) -> "TableBackend":
    """The table of a group; sends no request yet. ``endpoint``: the metadata service's. Raises BackendError."""
    address = parse_table(settings.table or "")
    if address is None:
        raise BackendError("fleet.table is no URL of a table", kind="setup")
    return TableBackend(settings, address, endpoint, f"{partition}|{plain_key(group)}", on_request)


def errors(settings: FleetSettings) -> Iterator[tuple[str, str]]:
    """Why the table's secret cannot be used: path and message. An agent that runs tries it again."""
    sas_file = _credential_of(settings).sas_file
    if sas_file and not is_foreign_path(sas_file):
        try:
            read_sas(Path(sas_file))
        except BackendError as error:
            yield "fleet.credential.sas_file", str(error)


def warnings(settings: FleetSettings) -> Iterator[tuple[str, str]]:
    """Warnings about the table's secret: who else can read it, when it expires. Path and message of each."""
    sas_file = _credential_of(settings).sas_file
    if not sas_file or is_foreign_path(sas_file):
        return
    if risk := host.find_read_risk(Path(sas_file)):
        yield "fleet.credential.sas_file", risk
    for text in sas_warnings(Path(sas_file), datetime.now(UTC)):
        yield "fleet.credential.sas_file", text


def _credential_of(settings: FleetSettings) -> FleetCredential:
    return settings.credential if isinstance(settings.credential, FleetCredential) else FleetCredential()


class TableBackend:
    """The records of one partition: see ``scheduled_events_agent.fleet.backend``. For one thread.

    A write takes up to 40 seconds (a token and an exchange, both once more if the token is rejected), a list 70,
    plus the time that the system needs to look up a name.
    """

    def __init__(
        self,
        settings: FleetSettings,
        address: TableAddress,
        endpoint: str,
        partition: str,
        on_request: OnRequest,
    ) -> None:
        """Raises BackendError."""
        self._account_url, self._table = address
        self._partition = partition
        self._proxy = settings.proxy
        self._on_request = on_request
        credential = _credential_of(settings)
        self._client_id = credential.client_id
        self._sas_file = Path(credential.sas_file) if credential.sas_file else None
        url = urlsplit(self._account_url)
        if self._sas_file is None and url.scheme != "https":
            raise BackendError("the table cannot be asked: a token is sent over HTTPS only", kind="setup")
        host_name = url.hostname or ""
        audience = next((one for end, one in _AUDIENCES.items() if host_name.endswith(end)), _AUDIENCE)
        self._identity = ManagedIdentityCredential(endpoint, credential.client_id, audience, _EXCHANGE_SECONDS)
        self.clock_skew_seconds: float | None = None
        """Seconds that this machine's clock was ahead of the service's at its last answer; None before that."""

    def list(self) -> list[Record]:
        deadline = monotonic() + _LIST_SECONDS
        records: list[Record] = []
        query = {"$filter": f"PartitionKey eq '{self._partition}'", "$top": str(_RECORDS_PER_PAGE)}
        next_page: dict[str, str] = {}
        while True:
            answer = self._call("GET", f"()?{urlencode(query | next_page, quote_via=quote)}")
            page = _parse_page(answer.content, parse_date(answer.headers.get("date", "")))
            if page is None:
                text = f"{self._account_url}: the answer does not come from a table"
                raise BackendError(text, kind="bad_response")
            records = limited([*records, *page], self._partition)
            next_page = _parse_continuation(answer.headers)
            if not next_page:
                return records
            if monotonic() > deadline:
                raise BackendError(f"no whole list within {_LIST_SECONDS:g} s", kind="timeout")

    def put(self, key: str, fields: Mapping[str, str], etag: str) -> str | None:
        try:
            if etag:
                answer = self._call("PUT", self._entity(key), fields, etag)
            else:
                answer = self._call("POST", "", {**fields, "PartitionKey": self._partition, "RowKey": key})
        except _PreconditionFailedError:
            return None
        new_etag: str = answer.headers.get("etag", "")
        if not new_etag:
            text = f"{self._account_url} answers {answer.status_code} without an ETag"
            raise BackendError(text, kind="bad_response")
        return new_etag

    def delete(self, key: str, etag: str) -> bool:
        try:
            self._call("DELETE", self._entity(key), etag=etag)
        except _PreconditionFailedError as error:
            return error.is_gone
        return True

    def _entity(self, key: str) -> str:
        row = quote(key.replace("'", "''"))  # another program may have written it
        return f"(PartitionKey='{quote(self._partition)}',RowKey='{row}')"

    def _call(
        self, method: str, place: str, fields: Mapping[str, str] | None = None, etag: str = ""
    ) -> httpx.Response:
        """The answer, if it is a success. ``place``: the part of the URL after the table. Raises BackendError."""
        url = f"{self._account_url}/{self._table}{place}"
        headers = _HEADERS | {"x-ms-date": formatdate(usegmt=True)}
        if fields is not None:
            headers |= {"Content-Type": "application/json", "Prefer": "return-no-content"}
        if etag:
            headers["If-Match"] = etag
        body = b"" if fields is None else json.dumps(dict(fields)).encode()
        if self._sas_file is not None:
            separator = "&" if "?" in place else "?"
            answer = self._send(method, f"{url}{separator}{read_sas(self._sas_file)}", headers, body)
        else:
            answer = self._send(method, url, headers | self._authorization(), body)
            if answer.status_code == 401:  # it may have been withdrawn, or this machine's clock is wrong
                self._identity.forget_token()
                answer = self._send(method, url, headers | self._authorization(), body)
        if answer.status_code == (200 if method == "GET" else 204):
            return answer
        raise self._error_for_status(answer)

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._identity.fetch_token()}"}

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Response:
        began = monotonic()
        answer = _exchange(self._proxy, method, url, headers, body)
        seconds = monotonic() - began
        if isinstance(answer, BackendError):
            if answer.kind != "setup":
                self._on_request(method, answer.kind, seconds)
            raise answer
        self._on_request(method, answer.status_code, seconds)
        date = parse_date(answer.headers.get("date", ""))
        if date is not None:
            self.clock_skew_seconds = (datetime.now(UTC) - date).total_seconds()
        return answer

    def _error_for_status(self, answer: httpx.Response) -> BackendError:
        """The error for an answer that is no success."""
        status = answer.status_code
        failure = error_for_status(answer, _KIND_OF_STATUS)
        code = _parse_code(answer.content)
        text = f"{self._account_url} answers {status}"
        if code:
            text += f" ({code})"
        if (status, code) in _CHANGED:
            return _PreconditionFailedError(text, is_gone=status == 404)
        if failure.kind == "not_found" or code == "TableBeingDeleted":
            remedy = "create it, or correct fleet.table"
            return BackendError(f"{text}: there is no table {self._table}: {remedy}", kind="not_found")
        if failure.kind == "denied":
            return BackendError(f"{text}: {self._access_remedy(code)}", kind="denied")
        if failure.kind in ("throttled", "timeout"):
            after = failure.retry_after or 0.0
            return BackendError(
                f"{text}: it is busy",
                kind="throttled" if failure.kind == "throttled" else "timeout",
                retry_after=min(max(0.0, after), _MAX_RETRY_AFTER_SECONDS),
            )
        return BackendError(f"{text}: not the answer of a table that can be used", kind="bad_response")

    def _access_remedy(self, code: str) -> str:
        if code == "KeyBasedAuthenticationNotPermitted":
            return "the storage account accepts no shared access signatures: use the identity of this VM"
        if self._sas_file:
            needs = "it must be valid now, for this table, and allow read, add, update and delete"
            remedy = f"the shared access signature in {self._sas_file} is not accepted: {needs}"
        else:
            who = f"the identity {self._client_id}" if self._client_id else "the identity of this VM"
            scope = f"the table {self._table} or its storage account"
            remedy = f'{who} may not use it: assign the role "{ROLE}" to it, at the scope of {scope}'
        if code == "AuthorizationFailure":
            return f"the network rules of the storage account do not let this VM in, or {remedy}"
        return remedy


class _PreconditionFailedError(BackendError):
    """The record exists although it must not, has another ETag, or is gone."""

    def __init__(self, message: str, *, is_gone: bool) -> None:
        super().__init__(message, kind="bad_response")
        self.is_gone = is_gone


def _exchange(
    proxy: str | None, method: str, url: str, headers: Mapping[str, str], body: bytes
) -> httpx.Response | BackendError:
    """The whole answer. An error is returned, not raised, so that its traceback has no URL with a signature."""
    try:
        target = httpx.URL(url)
        context = tls_context(None) if target.scheme == "https" else None
        transport = BoundedTransport(_MAX_ANSWER_BYTES, ssl_context=context, proxy=proxy_for(proxy, target))
    except (SetupError, httpx.InvalidURL) as error:
        return BackendError(f"the table cannot be asked: {error}", kind="setup")
    try:
        with httpx.Client(transport=transport, trust_env=False, timeout=_EXCHANGE_SECONDS) as client:
            return client.request(method, target, headers=headers, content=body)
    except REQUEST_ERRORS as error:
        failure = classify(error)
    what = failure.message
    if failure.kind == "timeout":
        what = f"no whole answer within {_EXCHANGE_SECONDS:g} s"
    elif failure.kind == "proxy":
        what = "the proxy refuses"
    return BackendError(f"{target.host} gives no answer: {what}", kind=_KINDS.get(failure.kind, "unreachable"))


def _parse_page(body: bytes, date: datetime | None) -> list[Record] | None:
    """The records of one page, which has this Date; None if it is no page."""
    try:
        entities = parse_json(body)["value"]
    except (ValueError, RecursionError, DocumentError, KeyError, TypeError):
        return None
    if not isinstance(entities, list) or not all(isinstance(entity, dict) for entity in entities):
        return None
    return list(filter(None, [_parse_record(entity, date) for entity in entities]))


def _parse_record(entity: Mapping[str, Any], date: datetime | None) -> Record | None:
    """A record, which any program may have written: only its texts count. None if it has no key or ETag."""
    key = entity.get("RowKey")
    etag = entity.get("odata.etag")
    if not isinstance(key, str) or not isinstance(etag, str) or not etag.isascii() or not etag.isprintable():
        return None
    fields = {
        name: value
        for name, value in entity.items()
        if isinstance(value, str)
        and name not in _OWN_NAMES
        and "odata." not in name
        and f"{name}@odata.type" not in entity  # a number or a time, written as text
    }
    if sum(map(len, [*fields, *fields.values()])) > _MAX_RECORD_CHARACTERS:
        fields = {}
    return Record(key, etag, _age(entity.get("Timestamp"), date), fields)


def _age(written: Any, date: datetime | None) -> float | None:
    """Seconds from the Timestamp of an entity to the Date of the answer; None without one of them."""
    try:
        seconds = (date - datetime.fromisoformat(written)).total_seconds() if date else None
    except (ValueError, TypeError):
        return None
    return None if seconds is None else max(0.0, seconds)


def _parse_continuation(headers: httpx.Headers) -> dict[str, str]:
    """The parameters of the request for the next page; empty if there is none."""
    names = ("NextPartitionKey", "NextRowKey")
    return {name: headers[f"x-ms-continuation-{name}"] for name in names if f"x-ms-continuation-{name}" in headers}


def _parse_code(body: bytes) -> str:
    """The code of an error, of Azure's or of a proxy's; "" if it has none."""
    match = re.search(_CODE, body[:4096].decode("utf-8", "replace"))
    return (match[1] or match[2]) if match else ""
