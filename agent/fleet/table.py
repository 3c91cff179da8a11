"""The way to the fleet's table; loads Microsoft's azure-data-tables, an extra, when it is first gone."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from agent import host
from agent.fleet.ledger import LedgerError
from agent.settings.model import FleetCredential, FleetSettings, parse_table

if TYPE_CHECKING:
    from agent.fleet.table_ledger import TableLedger

ROLE = "Storage Table Data Contributor"

_MAX_SAS_BYTES = 16 * 1024
_NOT_INSTALLED = "azure-data-tables is not installed: pip install 'scheduled-events-agent[fleet]'"


def connect(settings: FleetSettings, endpoint: str) -> "TableLedger":
    """The ledger of a policy; asks nothing yet. ``endpoint``: of the metadata service. Raises LedgerError."""
    address = parse_table(settings.table)
    if address is None:
        raise LedgerError("fleet.table is no URL of a table", kind="setup")
    try:
        from agent.fleet.table_ledger import TableLedger  # noqa: PLC0415  # 5 MiB, and an extra
    except ImportError as error:
        raise LedgerError(f"{_NOT_INSTALLED} (no module {error.name})", kind="setup") from error
    return TableLedger(settings, address, endpoint)


def faults(settings: FleetSettings) -> Iterator[tuple[str, str]]:
    """Why the table's secret cannot be used: path and message. An agent that runs tries it again."""
    credential = settings.credential
    if isinstance(credential, FleetCredential) and credential.sas_file:
        try:
            read_sas(Path(credential.sas_file))
        except LedgerError as error:
            yield "fleet.credential.sas_file", str(error)


def doubts(settings: FleetSettings) -> Iterator[tuple[str, str]]:
    """Why the table could not be used from this machine, or who else can read its secret: path and message."""
    if find_spec("azure") is None or find_spec("azure.data") is None:
        yield "fleet", _NOT_INSTALLED
    credential = settings.credential
    sas_file = credential.sas_file if isinstance(credential, FleetCredential) else None
    if sas_file and (fault := host.exposure_fault(Path(sas_file))):
        yield "fleet.credential.sas_file", fault


def read_sas(path: Path) -> str:
    """The signature that a file holds, with or without a question mark before it. Raises LedgerError."""
    try:
        if path.exists() and not path.is_file():
            raise LedgerError(f"{path} is not a regular file", kind="setup")
        with path.open("rb") as file:
            text = file.read(_MAX_SAS_BYTES).decode("ascii").strip().removeprefix("?")
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}", kind="setup") from None
    except UnicodeDecodeError:
        raise LedgerError(f"{path} is not in ASCII: write it without a byte order mark", kind="setup") from None
    if text.startswith(("'", '"')):
        raise LedgerError(f"{path} has quotes around the signature: take them out", kind="setup")
    if not {"sv", "sig"} <= parse_qs(text).keys() or re.search(r"\s", text):
        form = "a shared access signature such as sv=...&sig=..., in one line"
        raise LedgerError(f"{path} does not hold {form}", kind="setup")
    return text
