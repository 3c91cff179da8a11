"""Every measured recipe has its table, of all three ways, on its page, with the date."""

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the recipes are for Linux", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import run_recipes
from frame import WAYS, Outcome, Recipe, table
from run_recipes import NAMES, recipes_of, write

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_has_a_recipe() -> None:
    assert {"database", "redis", "slurm", "web_server"} <= {*NAMES}
    assert all(recipes_of(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_its_page_has_its_table_with_the_date(name: str) -> None:
    recipes = recipes_of(name)
    ((page, columns),) = {(recipe.page, recipe.columns) for recipe in recipes}
    assert Path(page).stem == name.replace("_", "-")
    cases = {recipe.case: dict.fromkeys(WAYS, Outcome(1, 2, 3, 4)) for recipe in recipes}
    assert len(cases) == len(recipes)
    head, rule, *rows = table(columns, cases).splitlines()
    cell = r" [\d,.]+(?: of [\d,]+| s)? \|"
    firsts = [re.escape(row.partition(" 1 of 2 ")[0]) for row in rows]
    expected = "\n".join(
        [re.escape(head), re.escape(rule), *(f"{first}(?:{cell}){{{len(columns)}}}" for first in firsts)]
    )
    dated = rf"^Measured \d{{4}}-\d\d-\d\d(?:, [^:\n]+)?:\n\n{expected}\n\n"
    assert len(re.findall(dated, (ROOT / page).read_text("utf-8"), re.MULTILINE)) == 1


def test_no_page_has_a_date_without_a_recipe() -> None:
    pages = {recipe.page for name in NAMES for recipe in recipes_of(name)}
    cookbook = (ROOT / "docs/cookbook").glob("*.md")
    dated = {page for page in cookbook if re.search("^Measured ", page.read_text("utf-8"), re.MULTILINE)}
    assert {page.relative_to(ROOT).as_posix() for page in dated} == pages


def test_a_table_has_a_row_for_each_mode() -> None:
    outcomes = {way: Outcome(failed=5, total=12_345, outage_seconds=1.25, lost=3) for way in WAYS}
    columns = ("requests failed", "longest outage", "transactions lost")
    assert table(columns, {"": outcomes}).splitlines() == [
        "| | requests failed | longest outage | transactions lost |",
        "|---|---|---|---|",
        "| nothing | 5 of 12,345 | 1.2 s | 3 |",
        "| naive stop hook | 5 of 12,345 | 1.2 s | 3 |",
        "| agent | 5 of 12,345 | 1.2 s | 3 |",
    ]


def test_a_table_of_several_cases_names_each_once() -> None:
    outcomes = {way: Outcome(failed=5, total=12_345) for way in WAYS}
    assert table(("jobs failed",), {"reboot": outcomes, "eviction": outcomes}).splitlines() == [
        "| | | jobs failed |",
        "|---|---|---|",
        "| reboot | nothing | 5 of 12,345 |",
        "| | naive stop hook | 5 of 12,345 |",
        "| | agent | 5 of 12,345 |",
        "| eviction | nothing | 5 of 12,345 |",
        "| | naive stop hook | 5 of 12,345 |",
        "| | agent | 5 of 12,345 |",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_new_table_and_its_date_replace_only_the_old_ones(name: str, tmp_path: Path) -> None:
    recipes = recipes_of(name)
    results = []
    cases = {}
    for number, recipe in enumerate(recipes):
        outcome = Outcome(number, 12_345)
        if len(recipe.columns) > 1:
            outcome = replace(outcome, outage_seconds=1.0)
        if len(recipe.columns) > 2:
            outcome = replace(outcome, lost=3)
        cases[recipe.case] = dict.fromkeys(WAYS, outcome)
        results.append(
            {
                "page": recipe.page,
                "case": recipe.case,
                "columns": recipe.columns,
                "outcomes": dict.fromkeys(WAYS, asdict(outcome)),
            }
        )
    page = tmp_path / recipes[0].page
    page.parent.mkdir(parents=True)
    before = (ROOT / recipes[0].page).read_text("utf-8")
    page.write_text(before, "utf-8")
    write(results, "2031-02-03, load average 0.1", tmp_path)
    after = page.read_text("utf-8")
    dated = f"\nMeasured 2031-02-03, load average 0.1:\n\n{table(recipes[0].columns, cases)}\n"
    assert after.count(dated) == 1
    start = after.index(dated)
    assert before.startswith(after[:start])
    assert before.endswith(after[start + len(dated) :])


def test_a_recipe_that_fails_keeps_no_other_from_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, recipe: type[Recipe], **_: bool) -> dict[str, str]:
        if name == "redis":
            raise RuntimeError("no primary")
        rows = table(recipe.columns, {recipe.case: dict.fromkeys(WAYS, Outcome(0, 5))})
        return {"title": recipe.title, "versions": "1.0", "event": "Reboot", "load": "some", "table": rows}

    monkeypatch.setattr(run_recipes, "_measure", measure)
    monkeypatch.setattr(sys, "argv", ["run_recipes.py", "redis", "slurm"])
    assert run_recipes.main() == 1
    told = capsys.readouterr()
    assert "| jobs failed |\n|---|---|\n| nothing | 0 of 5 |" in told.out
    missing = [line for line in told.err.splitlines() if line.startswith("no table: ")]
    assert missing[0].startswith("no table: redis, Redis with Sentinel, the primary's VM: failed: ")
    assert len(missing) == len(recipes_of("redis"))
