"""Every measured recipe has its table, of all three ways, on its page, and its row in the cookbook's list."""

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
def test_its_page_has_its_table_and_the_cookbook_its_name_and_date(name: str) -> None:
    recipes = recipes_of(name)
    ((page, columns),) = {(recipe.page, recipe.columns) for recipe in recipes}
    cases = {recipe.case: dict.fromkeys(WAYS, Outcome(1, 2, 3, 4)) for recipe in recipes}
    assert len(cases) == len(recipes)
    head, rule, *rows = table(columns, cases).splitlines()
    cell = r" [\d,.]+(?: of [\d,]+| s)? \|"
    firsts = [re.escape(row.partition(" 1 of 2 ")[0]) for row in rows]
    expected = "\n".join(
        [re.escape(head), re.escape(rule), *(f"{first}(?:{cell}){{{len(columns)}}}" for first in firsts)]
    )
    assert re.search(rf"^{expected}\n\n", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    listed = (ROOT / page).with_name("README.md").read_text("utf-8")
    row = rf"^\| \[[^]]+\]\({Path(page).name}\) \|.*`NAME={name}` \(\d{{4}}-\d\d-\d\d[^)]*\)"
    assert len(re.findall(row, listed, re.MULTILINE)) == 1


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
    files = (page, page.with_name("README.md"))
    before = [(ROOT / file.relative_to(tmp_path)).read_text("utf-8") for file in files]
    for file, text in zip(files, before, strict=True):
        file.write_text(text, "utf-8")
    write(name, results, "2031-02-03, load average 0.1 before", tmp_path)
    after = [file.read_text("utf-8") for file in files]
    rows = table(recipes[0].columns, cases)
    assert after[0].count(rows) == 1
    assert after[1].count("(2031-02-03, load average 0.1 before)") == 1
    start = after[0].index(rows)
    assert before[0].startswith(after[0][:start])
    assert before[0].endswith(after[0][start + len(rows) :])
    start = after[1].index("2031-02-03")
    assert before[1].startswith(after[1][:start])
    assert before[1].endswith(after[1][after[1].index(")", start) :])


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
