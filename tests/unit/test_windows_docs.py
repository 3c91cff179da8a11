"""The page about Windows against the code: policies load there, paths and names are the agent's own."""

import re
from pathlib import Path

import pytest

from agent.config import parse_settings
from agent.host import windows, windows_events, windows_paths

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "windows.md").read_text(encoding="utf-8")
POLICIES = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_a_policy_on_the_page_is_valid_on_windows_and_means_what_it_says(policy: str) -> None:
    loaded = parse_settings(policy, "windows.md", may_change_user=False, may_start_units=False)
    assert [str(warning) for warning in loaded.warnings] == []


def test_the_page_has_policies() -> None:
    assert len(POLICIES) == 2


def test_the_scripts_that_its_policies_run_are_on_the_page() -> None:
    scripts = set(re.findall(r"hooks\\([\w-]+\.ps1)", TEXT))
    assert scripts == {"drain-iis.ps1", "checkpoint.ps1", "resume-iis.ps1"}
    assert TEXT.count("Import-Module WebAdministration") == 2


def test_the_page_tells_how_a_powershell_script_is_started(tmp_path: Path) -> None:
    script = tmp_path / "x.ps1"
    script.touch()
    command = windows._program_command([str(script)], {"SYSTEMROOT": "R"})
    options = command.removeprefix(r"R\System32\WindowsPowerShell\v1.0\powershell.exe ").partition(" -File ")[0]
    assert f"`powershell.exe {options} -File FILE ...`" in TEXT


def test_the_page_names_source_log_and_sizes_as_they_are() -> None:
    assert windows_events.SOURCE == windows_paths.SERVICE
    assert f"source `{windows_events.SOURCE}`" in TEXT
    assert rf"%ProgramData%\ScheduledEventsAgent\logs\{windows_events.LOG_FILE}" in TEXT
    assert (windows_events.MAX_LOG_BYTES, windows_events.LOG_FILES) == (10_000_000, 5)
    assert "set aside at 10 MB, and four older ones are kept" in TEXT
    assert f"labelled `{windows._TEMPORARY_LABEL}`" in TEXT
