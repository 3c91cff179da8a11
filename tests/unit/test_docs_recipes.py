"""Every measured recipe has its table, of all three ways, on its page of the cookbook, with the command for it."""

import re
import shutil
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the recipes are for Linux", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import run_recipes
from frame import WAYS, Outcome, Recipe, table, table_head
from run_recipes import NAMES, recipes_of, write

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [pytest.param(name, recipe, id=recipe.__name__) for name in NAMES for recipe in recipes_of(name)]


def test_every_file_has_a_recipe() -> None:
    assert {"database", "redis", "slurm", "web_server"} <= {*NAMES}
    assert all(recipes_of(name) for name in NAMES)


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_its_page_has_its_table_and_the_command(name: str, recipe: type[Recipe]) -> None:
    page = (ROOT / recipe.page).read_text(encoding="utf-8")
    assert f"make recipes NAME={name}`" in page
    cell = r" [\d,.]+(?: of [\d,]+| s)? \|"
    rows = "".join(rf"\| {way} \|(?:{cell}){{{len(recipe.columns)}}}\n" for way in WAYS)
    assert re.search(re.escape(table_head(recipe.columns)) + r"\n[|-]+\n" + rows, page)


def test_a_table_has_a_row_for_each_mode() -> None:
    outcomes = {way: Outcome(failed=5, total=12_345, outage_seconds=1.25, lost=3) for way in WAYS}
    columns = ("requests failed", "longest outage", "transactions lost")
    assert table(columns, outcomes).splitlines() == [
        "| | requests failed | longest outage | transactions lost |",
        "|---|---|---|---|",
        "| nothing | 5 of 12,345 | 1.2 s | 3 |",
        "| naive stop hook | 5 of 12,345 | 1.2 s | 3 |",
        "| agent | 5 of 12,345 | 1.2 s | 3 |",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_new_tables_and_their_date_replace_only_the_old_ones_on_the_page(name: str, tmp_path: Path) -> None:
    results = []
    for number, recipe in enumerate(recipes_of(name)):
        outcome = Outcome(number, 12_345, *(1, 3)[: len(recipe.columns) - 1])
        rows = table(recipe.columns, dict.fromkeys(WAYS, outcome))
        results.append({"title": recipe.title, "page": recipe.page, "table": rows})
    page = tmp_path / results[0]["page"]
    page.parent.mkdir(parents=True)
    before = Path(shutil.copy(ROOT / results[0]["page"], page)).read_text("utf-8")
    write(name, results, "2031-02-03, load average 0.1 before", tmp_path)
    after = page.read_text("utf-8")
    assert after.count("(2031-02-03, load average 0.1 before)") == 1
    assert all(result["table"] in after for result in results)
    table_rows = r"^\| (?:" + "|".join(WAYS) + r") \|.*\n"
    dates = r"\(20\d\d-\d\d-\d\d.*?\)"
    bare = [
        re.sub(dates, "", re.sub(table_rows, "", text, flags=re.MULTILINE), count=1) for text in (before, after)
    ]
    assert bare[0] == bare[1]


def test_a_recipe_that_fails_keeps_no_other_from_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, recipe: type[Recipe], **_: bool) -> dict[str, str]:
        if name == "redis":
            raise RuntimeError("no primary")
        rows = table(recipe.columns, dict.fromkeys(WAYS, Outcome(0, 5)))
        return {"title": recipe.title, "versions": "1.0", "event": "Reboot", "load": "some", "table": rows}

    monkeypatch.setattr(run_recipes, "_measure", measure)
    monkeypatch.setattr(sys, "argv", ["run_recipes.py", "redis", "slurm"])
    assert run_recipes.main() == 1
    told = capsys.readouterr()
    assert "| jobs failed |\n|---|---|\n| nothing | 0 of 5 |" in told.out
    missing = [line for line in told.err.splitlines() if line.startswith("no table: ")]
    assert missing[0].startswith("no table: redis, Redis with Sentinel, the primary's VM: failed: ")
    assert len(missing) == len(recipes_of("redis"))
