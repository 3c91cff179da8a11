"""The documentation's statements about the code, and its links."""

import argparse
import json
import re
from pathlib import Path
from typing import get_args

import json_page
import msgspec
import pytest
from interface import JSON_OUTPUTS

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.status import SCHEMA_VERSION
from scheduled_events_agent.telemetry.log import JOURNAL_FIELDS
from scheduled_events_agent.workflow import Phase

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for place in ("", "docs/**/", "config/**/", "tests/", "packaging/**/", "winservice/")
    for page in ROOT.glob(f"{place}*.md")
)
FOLDERS = sorted(
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and not path.name.startswith(".") and path.name not in ("build", "dist")  # of make packages
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_design_explains_every_phase_of_an_event() -> None:
    text = text_of("docs/design.md").partition("## The life of an event")[2].partition("## What always")[0]
    assert re.findall(r"^- (\w+): ", text, re.MULTILINE) == list(get_args(Phase))


def test_the_page_about_systemd_has_every_field_of_the_journal() -> None:
    page = text_of("docs/systemd.md")
    assert all(f"`{name}`" in page for name in JOURNAL_FIELDS.values())


def test_the_page_about_json_has_the_fields_of_the_types_and_what_the_sources_say_of_them() -> None:
    page = text_of("docs/json.md")
    assert page.endswith(json_page.tables(json_page.examples()))  # if not: python tests/fixtures/json_page.py
    assert "|`policy.rejected`|text|Why the current file was rejected.|\n" in page
    assert f"`schema_version` is {SCHEMA_VERSION}." in page
    for answer in JSON_OUTPUTS.values():
        assert [field.name for field in msgspec.structs.fields(answer)][:2] == ["schema_version", "at"]


@pytest.mark.parametrize(("command", "output"), JSON_OUTPUTS.items(), ids=[*JSON_OUTPUTS])
def test_the_page_about_json_has_an_example_of_each_command_with_all_fields(
    command: str, output: type[msgspec.Struct]
) -> None:
    example = json.loads(json_page.examples()[command])
    assert json.loads(msgspec.json.encode(msgspec.convert(example, output))) == example


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        names = {re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings}
        assert not heading or heading in names, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_project_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(\w+))?`", text)
    for path, test in named:
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), f"{page.name}: {path}"
        assert f"def {test}" in (ROOT / path).read_text("utf-8") if test else True, f"{page.name}: {path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_is_one(page: Path) -> None:
    parser = build_parser()
    for line in re.findall(
        r"^(?:\$ )?(?:sudo )?scheduled-events-agent (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        words = re.split(r"[#|]| \d?>| &$", line)[0].split()
        parser.parse_args(words)  # exits, and so fails, on what it does not know


def test_documented_operator_commands_match_the_help() -> None:
    (commands,) = (one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    page = text_of("docs/operations.md")
    shown = dict(re.findall(r"^\$ sudo scheduled-events-agent (\w+) [0-9a-f]{8} +# (.+)$", page, re.MULTILINE))
    assert shown == {name: helps[name] for name in ("approve", "hold", "release", "retry", "resolve")}


NEEDS_ROOT = re.compile(
    r"(?:apt|dnf|tdnf|zypper|install|ln|cp|mv|iptables|journalctl|systemd-sysusers) |env PGDATA="
    r"|python3 -m venv /opt/|/opt/|systemctl (?!status)"
    r"|scheduled-events-agent (?!simulate|demo|completion|check --strict --no-files|.*(?:policy|web)\.yaml)"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_prompt_is_a_users_and_what_needs_root_has_sudo(page: Path) -> None:
    blocks = re.findall(r"^[ ]*```(?:console)?\n(.*?)^[ ]*```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in map(str.strip, block.splitlines())]
    assert [line for line in lines if line.startswith("# ")] == []  # it looks like a comment
    commands = [command for line in lines if line.startswith("$ ") for command in line[2:].split(" && ")]
    assert [command for command in commands if NEEDS_ROOT.match(command)] == []
