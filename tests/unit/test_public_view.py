"""What is promised of an event is chosen: no output has a type of the state machine, which may change freely."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import interface
import msgspec
import pytest
from msgspec.inspect import type_info
from test_stored_types import structs_in

import scheduled_events_agent
from scheduled_events_agent.notifications import Notification
from scheduled_events_agent.status import EventView
from scheduled_events_agent.status.facts import RunningHook
from scheduled_events_agent.workflow import Phase, WaitReason, Workflow

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = Path(scheduled_events_agent.__file__).parent
INSIDE = ("scheduled_events_agent.workflow", "scheduled_events_agent.status.facts")


def inside_types(output: Any) -> set[str]:
    """The types in an output that the agent keeps inside: of the state machine, and what it stores in them."""
    stored = {*structs_in(type_info(Workflow))}
    return {
        found.__name__
        for found in structs_in(type_info(output))
        if found.__module__.startswith(INSIDE) or found in stored
    }


@pytest.mark.parametrize("name", [*interface.JSON_OUTPUTS, "a notification"])
def test_no_output_has_a_type_that_the_agent_keeps_inside(name: str) -> None:
    outputs: Mapping[str, Any] = {**interface.JSON_OUTPUTS, "a notification": Notification}
    assert inside_types(outputs[name]) == set()


class Inner(msgspec.Struct):
    phase: Phase  # its values are no type of the state machine
    reasons: dict[str, tuple[WaitReason | None, ...]]


class Heir(Workflow, frozen=True, kw_only=True):
    more: str


class Output(msgspec.Struct):
    inner: list[Inner]
    heir: Heir | Literal["none"]
    facts: tuple[RunningHook, ...] = ()


def test_such_a_type_is_found_wherever_it_stands() -> None:
    assert inside_types(Inner) == {"WaitReason"}
    of_workflow = {"ScheduledEvent", "Decision", "StageStatus", "Approval", "WaitReason", "RunningHook"}
    assert inside_types(Output) >= of_workflow
    assert inside_types(EventView) == set()


# --- With other fields in the state machine, the promise is the same.

STORED = ("Workflow", "StageStatus", "Approval", "WaitReason")
# The samples of the generators have them.
_KEPT = frozenset({"phase", "outcome", "recover", "failure"})
_PROMISED = """
import json, sys
import interface, json_page, notification_schema, scheduled_events_agent
print(json.dumps({
    "package": scheduled_events_agent.__file__,
    "docs/json.md": json_page.tables({}),
    "docs/notification.schema.json": notification_schema.event_schema(),
    "the record of compatibility": interface.interface(),
}))
"""


def promised(sources: Path) -> dict[str, Any]:
    """What the generators of docs and record make of the package in this folder."""
    places = (sources, TESTS / "fixtures", TESTS / "unit")
    done = subprocess.run(
        [sys.executable, "-c", _PROMISED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found.pop("package")).is_relative_to(sources)
    return found


@pytest.fixture(scope="module")
def today() -> dict[str, Any]:
    return promised(PACKAGE.parent)


def with_every_field_renamed(class_: ast.ClassDef) -> None:
    """In JSON, where a user would see it."""
    rename = ast.parse("f(rename=lambda name: f'renamed_{name}')", mode="eval").body
    assert isinstance(rename, ast.Call)
    class_.keywords += rename.keywords


def with_a_field_added(class_: ast.ClassDef) -> None:
    class_.body += ast.parse("added_field: int = 0\n'''It is new.'''").body


def without_fields(class_: ast.ClassDef) -> None:
    """Without each field that may be left out: what is left is a constant of the class."""
    for field in class_.body:
        match field:
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr()) if name not in _KEPT:
                field.annotation = ast.parse("__import__('typing').ClassVar", mode="eval").body


def change(sources: Path, module: str, names: tuple[str, ...], edit: Callable[[ast.ClassDef], None]) -> None:
    """Copy the package to the folder, with the classes of one module changed."""
    copy = sources / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / module
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name in names]
    assert {one.name for one in classes} == {*names}
    for class_ in classes:
        before = ast.unparse(class_)
        edit(class_)
        assert ast.unparse(class_) != before
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


EDITS = (with_every_field_renamed, with_a_field_added, without_fields)


@pytest.mark.parametrize("edit", EDITS)
def test_other_fields_in_the_state_machine_change_nothing_that_is_promised(
    edit: Callable[[ast.ClassDef], None], tmp_path: Path, today: dict[str, Any]
) -> None:
    change(tmp_path, "workflow/model.py", STORED, edit)
    assert promised(tmp_path) == today


@pytest.mark.parametrize("edit", EDITS)
def test_another_field_of_an_event_in_the_output_changes_all_that_is_promised(
    edit: Callable[[ast.ClassDef], None], tmp_path: Path, today: dict[str, Any]
) -> None:
    change(tmp_path, "status/status.py", ("HookView",), edit)
    found = promised(tmp_path)
    assert {name for name in today if found[name] != today[name]} == {*today}
