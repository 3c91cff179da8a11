"""``service status``: shows the state of the service, from Windows' service control manager (SCM)."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime

import msgspec

from scheduled_events_agent.cli.terminal import Cell, Terminal, print_json
from scheduled_events_agent.host.windows import service_manager as windows_service
from scheduled_events_agent.status import SCHEMA_VERSION

_STATE_IS_GOOD = ("running", "start pending")


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``service status --json``. Fields are None if the service is not installed."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    state: str = "not installed"
    pid: int | None = None
    exit_code: int | None = None
    start: str | None = None
    account: str | None = None
    command: str | None = None


def print_status(*, as_json: bool) -> int:
    """Print it; returns the exit code."""
    facts = windows_service.query()
    values = asdict(facts) if facts else {}
    status = ServiceStatus(at=datetime.now(UTC), **values)
    if as_json:
        print_json(status)
    else:
        shown = values or {"state": status.state}
        rows = [(Cell(name.replace("_", " ")), Cell(str(value))) for name, value in shown.items()]
        print(*Terminal.of(sys.stdout).table(rows), sep="\n")
    return 0 if status.state in _STATE_IS_GOOD else 1
