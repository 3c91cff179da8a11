"""What a removal of the Windows service says of events that are prepared: on the terminal, and in the log."""

from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from scheduled_events_agent import cli, host
from scheduled_events_agent.cli import service
from scheduled_events_agent.host.windows import files
from scheduled_events_agent.host.windows import service_manager as windows_service
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.store import Store
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.workflow import StageStatus, Transition, Workflow

NOW = datetime(2026, 4, 11, 22, 12, tzinfo=UTC)
LINES = [
    "Prepared and not recovered: Reboot 602D9444.",
    "Without the agent these recover hooks will not run: resume.",
]
REMOVED = "the service was removed; policy, state and logs stay"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service whose state has one event, which is prepared."""
    directory = tmp_path / "state"
    host.create_private_dir(directory)
    workflow = Workflow(
        id="602d9444@1",
        event=ScheduledEvent(id="602D9444-1B2C-4A5D-9E8F-0123456789AB", type="Reboot", status="Scheduled"),
        decision=Decision(
            rule="all",
            reason="it matches",
            affects="self",
            prepare=("drain",),
            recover=("resume",),
            approve="never",
        ),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot",
        phase="held",
        prepare=StageStatus(state="succeeded", done=("drain",), run=1),
    )
    store = Store.open(directory, NOW)
    store.commit([Transition(workflow=workflow)], NOW)
    store.close()
    facts = windows_service.Facts("running", 7, 0, "automatic", "LocalSystem", "command")
    monkeypatch.setattr(windows_service, "query", lambda: facts)
    monkeypatch.setattr(windows_service, "host_options", lambda: {"state-dir": str(directory)})
    monkeypatch.setattr(windows_service, "remove", lambda: True)


def test_it_names_prepared_events_and_recover_hooks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["service", "remove"]) == 0
    assert capsys.readouterr().out.splitlines() == [REMOVED, *LINES]


@pytest.mark.parametrize("trouble", ["slow", "damaged", "absent"])
def test_a_state_that_cannot_be_read_does_not_hinder_it(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if trouble == "slow":
        monkeypatch.setattr(service, "_PREPARED_TIMEOUT_SECONDS", 0.001)
    elif trouble == "damaged":
        (tmp_path / "state" / "state.db").write_bytes(b"no database")
    else:
        monkeypatch.setattr(windows_service, "host_options", lambda: {"config": str(tmp_path / "absent.yaml")})
    assert cli.main(["service", "remove"]) == 0
    assert capsys.readouterr().out.splitlines() == [REMOVED]


def test_for_an_installer_it_goes_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "logs"
    monkeypatch.setattr(files, "log_dir", lambda: logs)
    service.report_removal()
    (line,) = (logs / "agent.log").read_text().splitlines()
    assert '"the agent is removed while an event is prepared"' in line
    assert " ".join(LINES) in line
    assert LogId.REMOVED_PREPARED.level == "warning"
    opened = [Path(file.path) for file in psutil.Process().open_files()]
    assert logs / "agent.log" not in opened, "with PURGE it is removed"
