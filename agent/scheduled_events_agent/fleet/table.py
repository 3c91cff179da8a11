"""The way to the fleet's table; loads Microsoft's azure-data-tables, an extra, when it is first gone."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from scheduled_events_agent import host
from scheduled_events_agent.fleet.ledger import LedgerError, OnRequest
from scheduled_events_agent.settings.files import read_named_file
from scheduled_events_agent.settings.model import FleetCredential, FleetSettings, is_foreign_path, parse_table

if TYPE_CHECKING:
    from scheduled_events_agent.fleet.table_ledger import TableLedger

ROLE = "Storage Table Data Contributor"

_MAX_SAS_BYTES = 16 * 1024
_RENEW_BEFORE = timedelta(days=7)
# The letters of its permissions, as the service names them.
_NEEDED = {"r": "read", "a": "add", "u": "update", "d": "delete"}
_NOT_INSTALLED = "azure-data-tables is not installed: pip install 'scheduled-events-agent[fleet]'"


def connect(settings: FleetSettings, endpoint: str, on_request: OnRequest = lambda *_: None) -> "TableLedger":
    """The ledger of a policy; asks nothing yet. ``endpoint``: of the metadata service. Raises LedgerError."""
    address = parse_table(settings.table)
    if address is None:
        raise LedgerError("fleet.table is no URL of a table", kind="setup")
    try:
        from scheduled_events_agent.fleet.table_ledger import TableLedger  # noqa: PLC0415  # 5 MiB, and an extra
    except ImportError as error:
        raise LedgerError(f"{_NOT_INSTALLED} (no module {error.name})", kind="setup") from error
    return TableLedger(settings, address, endpoint, on_request)


def faults(settings: FleetSettings) -> Iterator[tuple[str, str]]:
    """Why the table's secret cannot be used: path and message. An agent that runs tries it again."""
    credential = settings.credential
    sas_file = credential.sas_file if isinstance(credential, FleetCredential) else None
    if sas_file and not is_foreign_path(sas_file):
        try:
            read_sas(Path(sas_file))
        except LedgerError as error:
            yield "fleet.credential.sas_file", str(error)


def doubts(settings: FleetSettings) -> Iterator[tuple[str, str]]:
    """Why the table could not be used from this machine, or who else can read its secret: path and message."""
    if find_spec("azure") is None or find_spec("azure.data") is None:
        yield "fleet", _NOT_INSTALLED
    credential = settings.credential
    sas_file = credential.sas_file if isinstance(credential, FleetCredential) else None
    if not sas_file or is_foreign_path(sas_file):
        return
    if fault := host.exposure_fault(Path(sas_file)):
        yield "fleet.credential.sas_file", fault
    for text in sas_doubts(Path(sas_file), datetime.now(UTC)):
        yield "fleet.credential.sas_file", text


def sas_doubts(path: Path, now: datetime) -> Iterator[str]:
    """What its own text says against the signature in a file, if it can be read: its end, and what it allows.

    One with a stored access policy (``si``) says neither; the account has that.
    """
    try:
        fields = parse_qs(read_sas(path))
    except LedgerError:
        return
    try:
        ends_at = datetime.fromisoformat(fields["se"][0])
    except (KeyError, ValueError):
        pass
    else:
        ends_at = ends_at if ends_at.tzinfo else ends_at.replace(tzinfo=UTC)
        if ends_at - now < _RENEW_BEFORE:
            ends = "has expired" if ends_at <= now else "expires soon"
            at = f"{ends_at:%Y-%m-%dT%H:%M:%SZ}"
            yield f"the signature in {path} {ends}, at {at}: write a new one into the file"
    missing = [word for letter, word in _NEEDED.items() if "sp" in fields and letter not in fields["sp"][0]]
    if missing:
        yield f"the signature in {path} does not allow what the agent does: {', '.join(missing)}"


def read_sas(path: Path) -> str:
    """The signature that a file holds, with or without a question mark before it. Raises LedgerError."""
    try:
        text = read_named_file(path, _MAX_SAS_BYTES).decode("ascii").strip().removeprefix("?")
    except host.HostError as error:
        raise LedgerError(str(error), kind="setup") from None
    except UnicodeDecodeError:
        raise LedgerError(f"{path} is not in ASCII: write it without a byte order mark", kind="setup") from None
    if text.startswith(("'", '"')):
        raise LedgerError(f"{path} has quotes around the signature: take them out", kind="setup")
    if not {"sv", "sig"} <= parse_qs(text).keys() or re.search(r"\s", text):
        form = "a shared access signature such as sv=...&sig=..., in one line"
        raise LedgerError(f"{path} does not hold {form}", kind="setup")
    return text
