"""Every measured recipe has its table, of all three ways, on its page of the cookbook, with the command for it."""

import re
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the recipes are for Linux", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from frame import WAYS, Outcome, Recipe, table, table_head
from run_recipes import NAMES, recipes_of

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


def test_a_table_has_a_row_for_each_way() -> None:
    outcomes = {way: Outcome(failed=5, total=12_345, outage_seconds=1.25, lost=3) for way in WAYS}
    columns = ("requests failed", "longest outage", "transactions lost")
    assert table(columns, outcomes).splitlines() == [
        "| | requests failed | longest outage | transactions lost |",
        "|---|---|---|---|",
        "| nothing | 5 of 12,345 | 1.2 s | 3 |",
        "| naive stop hook | 5 of 12,345 | 1.2 s | 3 |",
        "| agent | 5 of 12,345 | 1.2 s | 3 |",
    ]
