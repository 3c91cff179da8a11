"""The documentation's pictures: each is used, described in words, and small; what shows code agrees with it."""

import re
from pathlib import Path

import life_picture
import pytest

from scheduled_events_agent.workflow import ALLOWED_TRANSITIONS

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs/pictures").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "config").rglob("*.md"))]
MOST_BYTES = 80_000


def test_each_picture_is_used_once_and_described_in_words() -> None:
    used = [
        ((page.parent / target).resolve(), words)
        for page in PAGES
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.read_text(encoding="utf-8"))
    ]
    assert sorted(picture for picture, _ in used) == PICTURES
    assert [words for _, words in used if len(words.split()) < 10] == []


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small(picture: Path) -> None:
    content = picture.read_bytes()
    assert len(content) <= MOST_BYTES
    if picture.suffix == ".svg":
        return
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == 900  # pixels wide


def test_the_picture_of_an_events_life_has_every_allowed_transition() -> None:
    picture = life_picture.PICTURE.read_text(encoding="utf-8")
    arrows = re.findall(r"<title>(\w+) → (\w+)</title>", picture)
    assert sorted(arrows) == sorted(
        (phase, to) for phase, following in ALLOWED_TRANSITIONS.items() for to in following
    )
    assert picture == life_picture.life()  # else: make pictures


def test_each_diagram_is_described_in_words() -> None:
    diagrams = [
        diagram
        for page in PAGES
        for diagram in re.findall(
            r"^```mermaid\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    ]
    assert diagrams
    assert all(re.search(r"^ *accTitle: .+\n *accDescr: .+\n", diagram, re.MULTILINE) for diagram in diagrams)
