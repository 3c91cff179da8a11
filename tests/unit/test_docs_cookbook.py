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
    assert [name for name in ("several VMs", "a hook fails", "how long it takes") if not rows.get(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_was_tried_and_measured_and_what_was_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tried = text.partition("\n## What was tried\n")[2].partition("\n## ")[0]
    assert re.search(r"\bNot\b", tried)
    assert re.search(r"`make recipes NAME=\w+`|Nothing was measured|figures were measured once, manually", text)


INSTALLED = re.compile(
    r"^\[As all examples\]\(README\.md#install\), "
    r"with the hooks (.+) and `([\w-]+)`, and the policy `([\w-]+\.yaml)`\.$",
    re.MULTILINE,
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_files_to_install_and_they_are_shipped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "config/hooks/common.sh" not in text
    heading = re.search(r"^## (?:Install|GitLab)$", text, re.MULTILINE)
    if heading is None or page.stem == "windows-web-server":
        return
    ((first, last, policy),) = INSTALLED.findall(text)
    hooks = [*re.findall(r"`([\w.-]+)`", first), last]
    assert hooks[0] == "common.sh"
    assert [name for name in hooks if not (CONFIG / "hooks" / name).is_file()] == []
    assert f"](../../config/examples/{policy})" in text
    run = set(
        re.findall(
            r"/etc/scheduled-events-agent/hooks/([\w-]+)", (CONFIG / "examples" / policy).read_text("utf-8")
        )
    )
    assert run <= set(hooks)
