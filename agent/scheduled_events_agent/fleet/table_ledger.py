"""The ledger in Azure Table Storage, through Microsoft's azure-data-tables.

Owns how a row is stored, and what each answer of the service means. The one invariant: each call ends in bounded
time, and everything that goes wrong is a LedgerError.
"""

import logging
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TypeVar

from azure.core import MatchConditions
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import HttpResponseError
from azure.core.rest import HttpResponse
from azure.data.tables import TableClient, TableEntity, UpdateMode

from scheduled_events_agent.events import clean_text
from scheduled_events_agent.fleet.identity import VmCredential
from scheduled_events_agent.fleet.ledger import LedgerError, OnRequest, Row
from scheduled_events_agent.fleet.table import ROLE, read_sas
from scheduled_events_agent.fleet.table_transport import TableTransport
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings, TableAddress
from scheduled_events_agent.transport import parse_retry_after

# They log each request, with its URL.
logging.getLogger("azure").setLevel(logging.CRITICAL)

T = TypeVar("T")

_EXCHANGE_SECONDS = 10.0
_LIST_SECONDS = 30.0
_MAX_ROWS = 10_000
_ROWS_PER_PAGE = 1000
_MAX_RETRY_AFTER_SECONDS = 300.0
# With Azure's own names of clouds: https://ACCOUNT.table.core.windows.net, .usgovcloudapi.net, .chinacloudapi.cn.
_AUDIENCE = "https://storage.azure.com"
_AUDIENCES = {"usgovcloudapi.net": "https://storage.azure.us", "chinacloudapi.cn": "https://storage.azure.cn"}
_CODE = re.compile(r'"code"\s*:\s*"([A-Za-z]{1,64})"|<(?:\w+:)?code>([A-Za-z]{1,64})<', re.IGNORECASE)
_IS_CHANGED = ("EntityAlreadyExists", "UpdateConditionNotSatisfied", "ConditionNotMet", "ResourceNotFound")


class TableLedger:
    """A table as a ledger: see ``scheduled_events_agent.fleet.ledger``. For any thread.

    A call takes up to 40 seconds (a token and an exchange, both once more if the token is refused), a list 70, and
    what the system takes to look up a name.
    """

    def __init__(
        self,
        settings: FleetSettings,
        address: TableAddress,
        endpoint: str,
        on_request: OnRequest = lambda *_: None,
    ) -> None:
        self._address = address
        self._transport = TableTransport(settings.proxy, _EXCHANGE_SECONDS, on_request)
        given = settings.credential if isinstance(settings.credential, FleetCredential) else FleetCredential()
        self._client_id = given.client_id
        self._sas_file = Path(given.sas_file) if given.sas_file else None
        self._sas = AzureSasCredential("sv=&sig=")  # the file is read before each request
        audience = next((url for end, url in _AUDIENCES.items() if end in address.account_url), _AUDIENCE)
        identity = VmCredential(endpoint, given.client_id, audience, _EXCHANGE_SECONDS)
        try:
            self._client = TableClient(
                address.account_url,
                address.name,
                credential=self._sas if self._sas_file else identity,
                transport=self._transport,
                retry_total=0,  # the fleet decides when to ask again
                audience=audience,
                logging_enable=False,
            )
        except ValueError as error:  # a token over plain http
            raise LedgerError(f"the table cannot be asked: {error}", kind="setup") from None

    @property
    def clock_skew_seconds(self) -> float | None:
        """How far this machine's clock was ahead of the service's, when it last answered."""
        return self._transport.clock_skew_seconds

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        if content is None:
            self._ask(lambda: self._client.delete_entity(partition, key))
        else:
            entity = _to_entity(partition, key, content)
            self._ask(lambda: self._client.upsert_entity(entity, UpdateMode.REPLACE))

    def put_if_unchanged(self, partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        entity = _to_entity(partition, key, content or {})
        unchanged = MatchConditions.IfNotModified
        try:
            if content is None:
                self._ask(lambda: self._client.delete_entity(entity, etag=version, match_condition=unchanged))
            elif version:
                self._ask(
                    lambda: self._client.update_entity(
                        entity, UpdateMode.REPLACE, etag=version, match_condition=unchanged
                    )
                )
            else:
                self._ask(lambda: self._client.create_entity(entity))
        except _ChangedError:
            return False
        return True

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        return sorted(self._ask(lambda: self._list(partition, prefix)), key=lambda row: row.key)

    def _list(self, partition: str, prefix: str) -> list[Row]:
        deadline = monotonic() + _LIST_SECONDS
        rows: list[Row] = []
        which = "PartitionKey eq @partition"
        parameters = {"partition": partition}
        if prefix:
            which += " and RowKey ge @first and RowKey lt @after"
            parameters |= {"first": prefix, "after": prefix[:-1] + chr(ord(prefix[-1]) + 1)}
        pages = self._client.query_entities(
            which, parameters=parameters, results_per_page=_ROWS_PER_PAGE
        ).by_page()
        for page in pages:
            rows += filter(None, map(_to_row, islice(page, _MAX_ROWS + 1)))
            if len(rows) > _MAX_ROWS:
                raise LedgerError(f"more than {_MAX_ROWS:,} rows: {partition}", kind="bad_answer")
            if monotonic() > deadline:
                raise LedgerError(f"no whole list within {_LIST_SECONDS:g} s", kind="timeout")
        return rows

    def _ask(self, call: Callable[[], T]) -> T:
        """What the call returns; everything that goes wrong in it as a LedgerError."""
        if self._sas_file:
            self._sas.update(read_sas(self._sas_file))
        fault: LedgerError
        try:
            return call()
        except LedgerError as error:
            fault = error
        except HttpResponseError as error:
            fault = self._refusal(error)
        except Exception as error:  # noqa: BLE001  # what the package raises for an answer that it cannot read
            what = type(error).__name__
            fault = LedgerError(
                f"{self._address.account_url}: the answer is not one of a table ({what})", kind="bad_answer"
            )
        # Outside of the except clauses, so that no traceback has a URL with a signature.
        raise fault from None

    def _refusal(self, error: HttpResponseError) -> LedgerError:
        """What an answer that is no success means."""
        account, name = self._address
        status = error.status_code or 0
        response = error.response if isinstance(error.response, HttpResponse) else None
        match = _CODE.search(response.text()[:4096]) if response else None
        code = clean_text((match[1] or match[2]) if match else "")
        says = f"{account} answers {status}"
        if code:
            says += f" ({code})"
        if (status, code) == (404, "TableNotFound") or (status == 404 and code != "ResourceNotFound"):
            way = "create it, or correct fleet.table"
            return LedgerError(f"{says}: there is no table {name}: {way}", kind="missing")
        if status in (404, 409, 412) and code in _IS_CHANGED:
            return _ChangedError(says, kind="bad_answer")
        if status in (401, 403):
            return LedgerError(f"{says}: {self._way_in(code)}", kind="denied")
        if status in (408, 429, 500, 502, 503, 504):
            after = parse_retry_after(response.headers.get("retry-after", "")) if response else None
            kind = "throttled" if status in (429, 503) else "timeout"
            return LedgerError(
                f"{says}: it is busy", kind=kind, retry_after=min(max(0.0, after or 0.0), _MAX_RETRY_AFTER_SECONDS)
            )
        return LedgerError(f"{says}: not the answer of a table that can be used", kind="bad_answer")

    def _way_in(self, code: str) -> str:
        if code == "KeyBasedAuthenticationNotPermitted":
            return "the storage account takes no shared access signatures: use the identity of this VM"
        if self._sas_file:
            needs = "it must be valid now, for this table, and allow read, add, update and delete"
            way = f"the shared access signature in {self._sas_file} is not accepted: {needs}"
        else:
            who = f"the identity {self._client_id}" if self._client_id else "the identity of this VM"
            scope = f"the table {self._address.name} or its storage account"
            way = f'{who} may not use it: assign the role "{ROLE}" to it, at the scope of {scope}'
        if code == "AuthorizationFailure":
            return f"the network rules of the storage account do not let this VM in, or {way}"
        return way


class _ChangedError(LedgerError):
    """The row has not the version that was asked for."""


def _to_entity(partition: str, key: str, content: Mapping[str, str]) -> TableEntity:
    return TableEntity({**content, "PartitionKey": partition, "RowKey": key})


def _to_row(entity: TableEntity) -> Row | None:
    """A row that any program may have written: only its texts count. None if it has no key."""
    key = entity.get("RowKey")
    version = entity.metadata.get("etag")
    if not isinstance(key, str) or not isinstance(version, str):
        return None
    texts = {name: value for name, value in entity.items() if isinstance(value, str)}
    return Row(
        key, {name: value for name, value in texts.items() if name not in ("PartitionKey", "RowKey")}, version
    )
