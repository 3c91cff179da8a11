"""Measures with load what the recipes of the cookbook save; prints Markdown tables.

Installs what a recipe needs, which root on Debian or Ubuntu may do. recipe_NAME.py is for one page of the
cookbook, and has a ``Recipe`` for each case in its table.
"""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import signal
import tempfile
import time
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from frame import WAYS, Outcome, Recipe, Way, run, table
from harness import CHECKOUT

from benchmarks.sides import describe_machine

NAMES = sorted(path.stem.removeprefix("recipe_") for path in Path(__file__).parent.glob("recipe_*.py"))
RUN_SECONDS = 1200
"""How long one way of a recipe may take, with the installation of what it needs."""


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
    parser.add_argument("--write", action="store_true", help="put the tables and the date on their pages")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the programs")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    when = f"{datetime.now(UTC):%Y-%m-%d}, load average {os.getloadavg()[0]:.1f}"
    results: list[dict[str, Any]] = []
    missing: list[str] = []
    for name in arguments.names or NAMES:
        recipes = recipes_of(name)
        own: list[dict[str, Any]] = []
        for recipe in recipes:
            try:
                own.append(_measure(name, recipe, is_verbose=arguments.verbose))
            except pytest.skip.Exception as reason:
                missing.append(f"{name}, {recipe.title}: not run: {reason}")
            except Exception as error:  # noqa: BLE001 - the tables of the others are worth having
                missing.append(f"{name}, {recipe.title}: failed: {error!r}"[:500])
                traceback.print_exc()
        results += own
        if arguments.write and len(own) == len(recipes):
            write(own, when, CHECKOUT)
    machine = describe_machine()
    print(f"\n{machine}; {when}")
    for result in results:
        print(
            f"\n{result['title']}, {result['versions']}; {result['event']}; {result['load']}\n\n{result['table']}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "recipes": results}, indent=2), "utf-8")
    for line in missing:
        print(f"no table: {line}", file=sys.stderr)
    return 1 if missing else 0


def write(results: list[dict[str, Any]], when: str, checkout: Path) -> None:
    """Put the table of one file's recipes on their page, and when they were measured."""
    page = checkout / results[0]["page"]
    cases = {result["case"]: _outcomes(result) for result in results}
    rows = table(results[0]["columns"], cases)
    head = re.escape(rows.partition("\n")[0])
    _replace_once(page, rf"^Measured .*:\n\n{head}\n(?:\|.*\n)+", f"Measured {when}:\n\n{rows}\n")


def _outcomes(result: dict[str, Any]) -> dict[Way, Outcome]:
    return {way: Outcome(**outcome) for way, outcome in result["outcomes"].items()}


def _replace_once(file: Path, pattern: str, text: str) -> None:
    """Raises ValueError if the file does not have exactly one match."""
    changed, matches = re.subn(pattern, lambda _: text, file.read_text("utf-8"), flags=re.MULTILINE)
    if matches != 1:
        raise ValueError(f"{file}: {matches} matches of {pattern}")
    file.write_text(changed, "utf-8")


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done within {RUN_SECONDS} s")


def _measure(name: str, recipe: type[Recipe], *, is_verbose: bool) -> dict[str, Any]:
    outcomes: dict[Way, Outcome] = {}
    versions = ""
    for way in WAYS:
        print(f"{recipe.title}: {way} ...", file=sys.stderr, flush=True)
        kept = io.StringIO()
        logs = contextlib.redirect_stdout(sys.stderr if is_verbose else kept)
        began = time.monotonic()
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(RUN_SECONDS)
        try:
            with tempfile.TemporaryDirectory(prefix="recipe-") as place, logs:
                versions, outcomes[way] = run(recipe(Path(place), way))
        except Exception:
            print(kept.getvalue()[-10_000:], file=sys.stderr)
            raise
        finally:
            signal.alarm(0)
        took = time.monotonic() - began
        print(f"{recipe.title}: {way}: {outcomes[way]} in {took:.0f} s", file=sys.stderr, flush=True)
    return {
        "name": name,
        "title": recipe.title,
        "page": recipe.page,
        "case": recipe.case,
        "columns": recipe.columns,
        "versions": versions,
        "event": recipe.event,
        "load": recipe.load,
        "outcomes": {way: asdict(outcome) for way, outcome in outcomes.items()},
        "table": table(recipe.columns, {recipe.case: outcomes}),
    }


if __name__ == "__main__":
    sys.exit(main())
