"""The JSON schema of the policy file, for editors."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scheduled_events_agent.imds.document import EVENT_TYPES
from scheduled_events_agent.policy.schema import policy_schema

ROOT = Path(__file__).parents[2]
POLICIES = [ROOT / "config/policy.yaml", *sorted((ROOT / "config/examples").glob("*.yaml"))]


class EditorLoader(yaml.SafeLoader):
    """Reads YAML as editors do: of the plain words, only true, false, null and numbers are not text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.endswith(":null") or (tag.endswith(":bool") and letter in "tTfF")
        ]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


EditorLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("^[0-9]+$"), list("0123456789"))


def faults(text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(policy_schema())
    data: Any = yaml.load(text, EditorLoader)
    return [error.message for error in validator.iter_errors(data)]


def test_the_shipped_schema_is_current() -> None:
    shipped = (ROOT / "config/policy.schema.json").read_text()
    expected = json.dumps(policy_schema(), indent=2) + "\n"
    assert shipped == expected, "run: scheduled-events-agent check --schema > config/policy.schema.json"


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(policy_schema())


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_shipped_policies_are_valid_by_the_schema(path: Path) -> None:
    assert faults(path.read_text()) == []
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == ROOT / "config/policy.schema.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{name: a, aprove: never}]", "('aprove' was unexpected)"),
        ("rules: [{approve: never}]", "'name' is a required property"),
        ("rules: [{name: a, when: {type: Freez}}]", "'Freez' is not valid under any of the given schemas"),
        ("rules: [{name: a, drain_for: 5}]", "5 is not of type 'string'"),
        ("rules: [{name: a, drain_for: 5 s}]", "'5 s' does not match"),
        ("hooks: {a: {run: [x], shell: x}}", "is valid under each of"),
        ("hooks: {a: {timeout: 5s}}", "is not valid under any of the given schemas"),
        ("hooks: {a: {run: [x], attempts: 0}}", "0 is less than the minimum of 1"),
        ("maintenance_windows: {w: {start: '25:00', length: 1h}}", "'25:00' does not match"),
    ],
)
def test_the_schema_and_the_parser_reject_the_same_policies(text: str, message: str) -> None:
    assert message in " ".join(faults(text))


def test_a_list_may_be_written_as_its_only_item() -> None:
    assert faults("rules: [{name: a, when: {type: Freeze, source: [User]}}]") == []


def test_values_are_in_reading_order() -> None:
    definitions = policy_schema()["$defs"]
    assert definitions["When"]["properties"]["type"]["anyOf"][0] == {"enum": list(EVENT_TYPES)}
    assert definitions["Rule"]["properties"]["approve"] == {
        "enum": ["immediately", "when-prepared", "manual", "never"],
        "description": "When to let Azure start the event early.",
        "default": "never",
    }


def test_durations_are_strings_with_defaults_in_policy_notation() -> None:
    assert policy_schema()["$defs"]["Hook"]["properties"]["timeout"] == {
        "type": "string",
        "pattern": r"^([0-9]+(\.[0-9]+)?(d|h|m|s|ms))+$",
        "description": "Time limit of one attempt.",
        "default": "5m",
    }
