"""Every page of the cookbook says what its readers have to know before they rely on it."""

import re
from pathlib import Path
from typing import get_args

import pytest

from scheduled_events_agent.imds.document import EventTypeName

ROOT = Path(__file__).resolve().parents[2]
COOKBOOK = ROOT / "docs/cookbook"
CONFIG = ROOT / "config"
EVENTS = [name for name in get_args(EventTypeName) if name != "SpotRebalanceRecommendation"]  # a preview
PAGES = [pytest.param(page, id=page.stem) for page in sorted(COOKBOOK.glob("*.md")) if page.stem != "README"]


def rows_about_events(text: str) -> dict[str, str]:
    """Rows of the table that begins with "event": the first cell of each row, and the other cells."""
    _, begins, rest = text.partition("\n| event |")
    assert begins, "no table of events"
    _, _, *rows = rest.partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: " ".join(others).strip() for first, *others in cells}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_happens_at_each_event(page: Path) -> None:
    rows = rows_about_events(page.read_text(encoding="utf-8"))
    first = " ".join(rows)
    assert [name for name in EVENTS if not re.search(rf"\b{name}\b", first)] == []
    assert rows.get("how long it takes")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_several_vms_and_a_failed_hook_mean_or_where_that_stands(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    own = rows_about_events(text)
    defaults = rows_of("Several VMs, failed hooks")
    for name in ("several VMs", "a hook fails"):
        assert own.get(name) or ("](README.md#several-vms-failed-hooks)" in text and any(defaults[name]))


def rows_of(section: str) -> dict[str, list[str]]:
    """Rows of the table in a section of the cookbook: the first cell of each row, and the other cells."""
    text = (
        (COOKBOOK / "README.md")
        .read_text(encoding="utf-8")
        .partition(f"\n## {section}\n")[2]
        .partition("\n## ")[0]
    )
    lines = re.findall(r"^\| .*", text, re.MULTILINE)[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


def rows_of_recipes() -> dict[str, list[str]]:
    """Rows of the cookbook's first table: the file of each page, and the cells after its link."""
    head = (COOKBOOK / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \| (.*) \|$", head, re.MULTILINE)
    return {page: [cell.strip() for cell in cells.split("|")] for page, cells in rows}


@pytest.mark.parametrize("page", PAGES)
def test_the_cookbook_says_what_of_a_page_was_tried_and_what_was_not(page: Path) -> None:
    assert "](README.md#what-was-tried-and-measured)" in page.read_text(encoding="utf-8")
    cells = rows_of_recipes()[page.name]
    assert len(cells) == 3  # in short, tried, not tried
    assert all(cells)


def test_the_cookbook_lists_its_pages_and_no_other() -> None:
    assert {*rows_of_recipes()} == {page.name for page in COOKBOOK.glob("*.md")} - {"README.md"}


def links_to(text: str, folder: str) -> set[str]:
    """Files of a folder of config/ that the list at the head of a page names."""
    head = "\n".join(re.findall(r"^- (?:policy|hooks): .*", text, re.MULTILINE))
    return set(re.findall(rf"\]\(\.\./\.\./config/{folder}/([\w.-]+)\)", head))


def test_the_cookbook_says_how_to_install_what_a_page_names() -> None:
    text = (
        (COOKBOOK / "README.md").read_text(encoding="utf-8").partition("\n## Install\n")[2].partition("\n## ")[0]
    )
    assert "Each page names its policy and its hooks at its head" in text
    assert "install -m 0755 common.sh " in text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_files_to_install_and_they_are_shipped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "config/hooks/common.sh" not in text
    hooks = links_to(text, "hooks")
    if page.stem in ("aks", "connections"):  # they show their policies
        assert hooks == set()
        return
    (policy,) = links_to(text, "examples")
    if page.stem == "kubernetes":  # its hooks are the agent's own commands
        assert hooks == set()
        return
    assert [name for name in hooks if not (CONFIG / "hooks" / name).is_file()] == []
    run = re.findall(
        r"(?:/etc/scheduled-events-agent/|ScheduledEventsAgent\\)hooks[/\\]([\w.-]+)",
        (CONFIG / "examples" / policy).read_text("utf-8"),
    )
    assert set(run) <= hooks
    assert run
    assert page.stem == "windows-web-server" or "](README.md#install)" in text  # that page has commands of its own
