"""The shipped examples and hooks: policies that are valid, programs that exist, and what each says it needs."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from scheduled_events_agent import host
from scheduled_events_agent.cli import main
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.policy.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "config/examples").glob("*.yaml"))
FILES = sorted(path for path in (ROOT / "config/hooks").iterdir() if path.name != "README.md")
HOOKS = [
    path for path in FILES if path.name not in ("common.sh", "iis-common.ps1")
]  # what hooks read is none itself
PAGES = sorted((ROOT / "docs/cookbook").glob("*.md"))
# Where hooks are installed, and what stands there in config/hooks.
PLACES = ("/etc/scheduled-events-agent/hooks/", "C:\\ProgramData\\ScheduledEventsAgent\\hooks\\")
# Problems of an example on a machine that does not have all that it names.
_ABSENT = re.compile(r"does not exist|is not found in PATH|has no account|No such file or directory")

by_name = pytest.mark.parametrize("path", [*EXAMPLES], ids=lambda path: path.stem)


def hook_files(policy: str) -> set[str]:
    """Files of those programs of a policy that are installed where hooks are."""
    hooks = (yaml.safe_load(policy).get("hooks") or {}).values()
    words = [word for hook in hooks for word in [*hook.get("run", ()), *hook.get("shell", "").split()]]
    return {word.removeprefix(place) for word in words for place in PLACES if word.startswith(place)}


def policies_of(page: Path) -> list[str]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if re.search(r"^(rules|hooks|agent):", block, re.MULTILINE)]


@by_name
@pytest.mark.skipif(sys.platform == "win32", reason="there the examples for Linux name what Windows cannot start")
def test_check_finds_nothing_in_an_example_but_what_this_machine_lacks(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copy(path, tmp_path))  # for a checkout may stand where anybody can write
    copy.chmod(0o600)
    assert main(["check", "--json", "--config", str(copy)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [warning for warning in told["warnings"] if not _ABSENT.search(warning["message"])] == []


def test_places_of_an_agent_of_this_machine_are_used_by_no_test(tmp_path_factory: pytest.TempPathFactory) -> None:
    """These directories may exist, with any mode and content."""
    places = {host.default_state_dir(), host.default_config_path()}
    assert all(place.is_relative_to(tmp_path_factory.getbasetemp()) for place in places)


def shown_policies() -> Iterator[tuple[str, str]]:
    """Every policy in config/ and on the pages, with its place."""
    for path in (ROOT / "config/policy.yaml", *EXAMPLES):
        yield path.name, path.read_text("utf-8")
    keys = {field.encode_name for field in msgspec.structs.fields(Settings)}
    for page in sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("config/**/*.md"))):
        text = page.read_text("utf-8")
        for index, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)):
            policy = yaml.safe_load(block)
            if policy.keys() <= keys:
                # Hooks that are shown alone take the place of an example's.
                is_part = "hooks" in policy and "rules" not in policy
                more = f"on_clear: [{', '.join(policy['hooks'])}]\n" if is_part else ""
                yield f"{page.name}-{index}", block + more


SHOWN = [*shown_policies()]


def test_no_policy_that_is_shown_takes_a_node_out_of_a_pacemaker_cluster() -> None:
    """Without its quorum, its maintenance mode and its other nodes in view, that empties a cluster of two."""
    words = r"\b(pcs|crm|crmsh|crm_standby|crm_attribute)\b"
    assert [place for place, policy in SHOWN if re.search(words, policy)] == []
    page = (ROOT / "docs/coming-from.md").read_text("utf-8")
    _, _, section = page.partition("## Pacemaker's azure-events and azure-events-az\n")
    assert section.lstrip().startswith("Keep azure-events-az, version 0.20, and let this agent observe")


@pytest.mark.parametrize(("place", "policy"), SHOWN, ids=[place for place, _ in SHOWN])
def test_check_accepts_every_policy_that_is_shown(
    place: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy, encoding="utf-8")
    file.chmod(0o664)  # as in a checkout
    code = main(["check", "--strict", "--no-files", "--json", "--config", str(file)])
    told = json.loads(capsys.readouterr().out)
    assert (place, code, told["errors"], told["warnings"]) == (place, 0, [], [])


@by_name
def test_an_example_names_the_schema_and_its_page_of_the_documentation(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith("# yaml-language-server: $schema=../policy.schema.json\n#\n# ")
    (page,) = set(re.findall(r"docs/cookbook/[\w-]+\.md", text))
    assert f"](../../config/examples/{path.name})" in (ROOT / page).read_text("utf-8")


@by_name
def test_the_hooks_of_an_example_are_shipped(path: Path) -> None:
    text = path.read_text("utf-8")
    files = hook_files(text)
    assert files != set() or "run: [scheduled-events-agent, " in text
    assert files <= {hook.name for hook in HOOKS}


@by_name
def test_an_example_names_the_unit_that_a_hook_stops_or_starts(path: Path) -> None:
    unnamed = []
    for name, hook in (yaml.safe_load(path.read_text("utf-8"))["hooks"]).items():
        files = [ROOT / "config/hooks" / Path(word).name for word in hook.get("run", ())]
        text = "".join(file.read_text("utf-8") for file in files if file in HOOKS)
        keys = set(re.findall(r"^unit_variable=\W?([A-Z_]+_UNIT)\b", text, re.MULTILINE))
        if not keys <= set(hook.get("env", ())):
            unnamed.append((name, keys))
    assert unnamed == []


def test_no_hook_is_shipped_without_an_example() -> None:
    shown = set[str]().union(*(hook_files(path.read_text("utf-8")) for path in EXAMPLES))
    shown |= {name for page in PAGES for policy in policies_of(page) for name in hook_files(policy)}
    assert {hook.name for hook in HOOKS} == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_policies_of_a_page_are_valid_and_their_hooks_shipped(page: Path) -> None:
    for policy in policies_of(page):
        parse_settings(policy, page.name, may_change_user=True)  # raises what is wrong
        assert hook_files(policy) <= {hook.name for hook in HOOKS}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda path: path.name)
def test_a_hook_states_its_purpose_and_its_needs_in_its_header(hook: Path) -> None:
    text = hook.read_text("utf-8")
    if hook.suffix == ".ps1":
        assert text.startswith("#Requires -Version ")
        head, _, _ = text.partition("#>")
        assert re.search(r"^\.SYNOPSIS\n\S", head, re.MULTILINE)
        assert "$ErrorActionPreference = 'Stop'" in text
    elif text.startswith("#!/usr/bin/env python3\n"):
        head = text.split('"""')[1]
    else:
        first, *lines = text.splitlines()
        assert first == "#!/bin/sh"
        assert "set -eu" in lines
        head = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert re.search(r"\b[Nn]eeds\b", head)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such bit")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda path: path.name)
def test_a_hook_can_be_started(hook: Path) -> None:
    assert os.access(hook, os.X_OK) == (hook.suffix != ".ps1")


def test_the_list_of_hooks_is_complete() -> None:
    text = (ROOT / "config/hooks/README.md").read_text("utf-8")
    listed = set(re.findall(r"`([\w-]+(?:\.ps1|\.sh)?)`", "".join(re.findall(r"^\| .*", text, re.MULTILINE))))
    assert {file.name for file in FILES} <= listed
