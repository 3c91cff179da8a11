"""The page on reliability names tests, numbers and commands that there are."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
SIMULATION = ROOT / "tests" / "simulation"


def test_every_file_of_tests_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)", PAGE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_test_that_the_page_names_is_there() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(?:\.\.\._?)?(test_\w+?|\w+?)(?:_\.\.\.)?(?:\[\w+\])?`", PAGE)
    named = [name for name in named if name.startswith("test_")]
    assert len(named) > 15
    assert [name for name in named if f"def {name}" not in sources and f"{name}.py" not in PAGE] == []


def test_the_page_explains_every_trouble_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SIMULATION))
    from world import TROUBLES

    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+ \|$", PAGE.partition("## The process itself")[0], re.MULTILINE)
    assert rows == ["trouble", *TROUBLES]
    for name in ("world", "judge"):
        sys.modules.pop(name, None)
