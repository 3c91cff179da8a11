"""What the recipes of the cookbook save, measured with load; printed as Markdown tables.

Installs what a recipe needs, which root on Debian or Ubuntu may do. recipe_NAME.py is for one page of the
cookbook, and has a ``Recipe`` for each table on it.
"""

import argparse
import contextlib
import importlib
import io
import json
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from frame import WAYS, Outcome, Recipe, Way, run, table

from benchmarks.sides import describe_machine

NAMES = sorted(path.stem.removeprefix("recipe_") for path in Path(__file__).parent.glob("recipe_*.py"))


def recipes_of(name: str) -> list[type[Recipe]]:
    """The recipes of a file of this folder, in its order."""
    module = importlib.import_module(f"recipe_{name}")
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Recipe)]
    own = [recipe for recipe in classes if recipe.__module__ == module.__name__]
    return [recipe for recipe in own if not recipe.__name__.startswith("_")]


def main() -> int:
    """Print the tables; exits with 1 if a recipe could not run here, or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures as JSON, too")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the programs")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    results: list[dict[str, Any]] = []
    missing = 0
    for name in arguments.names or NAMES:
        for recipe in recipes_of(name):
            try:
                results.append(_measure(name, recipe, is_verbose=arguments.verbose))
            except pytest.skip.Exception as reason:
                missing += 1
                print(f"{recipe.title}: not run: {reason}", file=sys.stderr)
            except Exception:  # noqa: BLE001 - the tables of the others are worth having
                missing += 1
                print(f"{recipe.title}: failed:\n{traceback.format_exc()}", file=sys.stderr)
    machine = describe_machine()
    print(f"\n{machine}")
    for result in results:
        print(
            f"\n{result['title']}, {result['versions']}; {result['event']}; {result['load']}\n\n{result['table']}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "recipes": results}, indent=2), "utf-8")
    return 1 if missing else 0


def _measure(name: str, recipe: type[Recipe], *, is_verbose: bool) -> dict[str, Any]:
    outcomes: dict[Way, Outcome] = {}
    versions = ""
    for way in WAYS:
        print(f"{recipe.title}: {way} ...", file=sys.stderr, flush=True)
        logs = contextlib.redirect_stdout(sys.stderr if is_verbose else io.StringIO())
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="recipe-") as place, logs:
            versions, outcomes[way] = run(recipe(Path(place), way))
        took = time.monotonic() - began
        print(f"{recipe.title}: {way}: {outcomes[way]} in {took:.0f} s", file=sys.stderr, flush=True)
    return {
        "name": name,
        "title": recipe.title,
        "versions": versions,
        "event": recipe.event,
        "load": recipe.load,
        "outcomes": {way: asdict(outcome) for way, outcome in outcomes.items()},
        "table": table(recipe.columns, outcomes),
    }


if __name__ == "__main__":
    sys.exit(main())
