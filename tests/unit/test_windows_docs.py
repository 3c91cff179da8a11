"""The page about Windows against the code: policies load there, paths and names are the agent's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from status_samples import NOW, a_workflow, some_facts

from scheduled_events_agent.host.windows import event_log, files, permissions
from scheduled_events_agent.host.windows import processes as process
from scheduled_events_agent.host.windows import service_manager as service
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.status import to_json
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import RunningHook

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "windows.md").read_text(encoding="utf-8")
WORKFLOW = a_workflow()
POLICIES = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_page_has_a_policy() -> None:
    assert len(POLICIES) == 1


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_policies_on_the_page_are_valid_on_windows_and_have_the_stated_effect(policy: str) -> None:
    loaded = parse_settings(policy, "windows.md", may_change_user=False)
    assert [str(warning) for warning in loaded.warnings] == []


def test_the_page_shows_how_a_powershell_script_is_started(tmp_path: Path) -> None:
    script = tmp_path / "x.ps1"
    script.touch()
    command = process._program_command([str(script)], {"SYSTEMROOT": "R"})
    options = command.removeprefix(r"R\System32\WindowsPowerShell\v1.0\powershell.exe ").partition(" -File ")[0]
    assert f"`powershell.exe {options} -File FILE ...`" in TEXT


def test_the_page_names_source_log_and_sizes_as_they_are() -> None:
    assert f"source `{permissions.SERVICE}`" in TEXT
    assert rf"%ProgramData%\ScheduledEventsAgent\logs\{event_log.LOG_FILE}" in TEXT
    assert (event_log.MAX_LOG_BYTES, event_log.LOG_FILES) == (10_000_000, 5)
    assert "renamed at 10 MB, and four older ones are kept" in TEXT
    assert f"labelled `{files._TEMPORARY_LABEL}`" in TEXT


def test_the_page_and_the_script_set_another_account_with_the_same_lines() -> None:
    page = re.findall(r"^(?:(?:sc|icacls)\.exe|\$privileges =) .*$", TEXT, re.MULTILINE)
    script = (ROOT / "winservice/install.ps1").read_text(encoding="utf-8")
    lines = re.findall(r"^    (?:Invoke-Checked (\S+\.exe) @\((.*)\)|(\$privileges = .*))$", script, re.MULTILINE)
    from_script = [
        " ".join([program, *re.sub("'", "", arguments).split(", ")]) if program else line
        for program, arguments, line in lines
    ]
    assert [line.casefold() for line in from_script] == [line.casefold() for line in page]
    assert page[0] == f"$privileges = '{'/'.join(service._PRIVILEGES)}'"


def test_the_script_waits_for_the_hooks_that_run_by_what_the_status_says_of_them() -> None:
    script = (ROOT / "winservice/install.ps1").read_text(encoding="utf-8")
    lists = re.findall(r"@\(\$status\.([\w.]+)\)", script)
    (mark,) = re.findall(r"Where-Object \{ \$_\.(\w+) \}", script)

    def found(*running: RunningHook) -> list[str]:
        """The hooks that the script takes for running."""
        facts = some_facts(workflows=(WORKFLOW, replace(WORKFLOW, id="other@1")), running=running)
        status = json.loads(to_json(to_status(facts)))
        hooks = [hook for path in lists for hook in with_powershell(status, path)]
        return [hook["hook"] for hook in hooks if hook[mark]]

    clearing = RunningHook(workflow_id="", stage="on_clear", hook="resume", since=NOW)
    draining = RunningHook(workflow_id=WORKFLOW.id, stage="prepare", hook="drain", since=NOW, limit_seconds=5.0)
    waiting = replace(draining, workflow_id="other@1", state="queued", limit_seconds=None)
    assert found() == []
    assert found(clearing) == ["resume"]
    assert found(draining) == ["drain"]
    assert found(clearing, draining, waiting) == ["resume", "drain", "drain"]


def with_powershell(value: Any, path: str) -> list[Any]:
    """What PowerShell makes of a path: of a list it takes the member of each element, in one list."""
    elements = [value]
    for name in path.split("."):
        members = [element[name] for element in elements]
        elements = [one for member in members for one in (member if isinstance(member, list) else [member])]
    return elements


def test_the_commands_give_an_account_the_access_of_an_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(
        permissions, "_create_or_restrict", lambda path, further: given.update({path.name: further})
    )
    permissions.make_data_dirs(Path("root"), rf"NT SERVICE\{permissions.SERVICE}")
    names = {permissions._READ: "RX", permissions._ALL: "F"}
    grant = r'^icacls\.exe "?\$data\\?(\w*)"? /grant "\$\{account\}:\(OI\)\(CI\)(\w+)"$'
    grants = re.findall(grant, TEXT, re.MULTILINE)
    assert {name or "root": right for name, right in grants} == {
        name: names[further.split(";")[2]] for name, further in given.items()
    }


def test_both_pages_list_each_property_of_the_msi() -> None:
    source = (ROOT / "packaging/windows/msi.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r'"SecureCustomProperties": ";"\.join\((.*?)\n        \),', source, re.DOTALL)
    for_operators = set(re.findall(r'"(\w+)"', listed)) - {"NEWER_FOUND", "OLDER_FOUND"}
    for page in ("docs/windows.md", "packaging/README.md"):
        table = re.findall(r"^\| `([A-Z]+)(?:=\w+)?` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert set(table) == for_operators, page


def test_file_names_on_the_page_match_the_product() -> None:
    source = (ROOT / "packaging/windows/msi.py").read_text(encoding="utf-8")
    (product,) = re.findall(r'^PRODUCT = "(.+)"$', source, re.MULTILINE)
    assert f"'{product}'" in (ROOT / "packaging/windows/dsc.ps1").read_text(encoding="utf-8")
    assert rf"%ProgramFiles%\{product}\python\python.exe" in TEXT
    command = rf"$env:ProgramFiles\{product}\bin\scheduled-events-agent.cmd"
    assert command in (ROOT / "packaging/windows/startup.ps1").read_text(encoding="utf-8")
    assert '_LOG = _HOME / "install.log"' in (ROOT / "packaging/windows/installation.py").read_text(
        encoding="utf-8"
    )
