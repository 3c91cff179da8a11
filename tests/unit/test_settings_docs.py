"""docs/policy.md, config/policy.yaml and the types say the same."""

import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.policy import Hook, MaintenanceWindow, Rule, When
from scheduled_events_agent.policy.durations import format_duration
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.policy.schema import plain
from scheduled_events_agent.policy.settings import (
    AgentSettings,
    FleetCredential,
    FleetSettings,
    ImdsSettings,
    KubernetesSettings,
    LogSettings,
    NotifyTarget,
    SecretFile,
    Settings,
    VmSettings,
)
from scheduled_events_agent.policy.typed_yaml import default_of

ROOT = Path(__file__).parents[2]
TYPES = (
    Settings, Rule, When, Hook, MaintenanceWindow, VmSettings, ImdsSettings, AgentSettings, LogSettings,
    NotifyTarget, SecretFile, FleetSettings, FleetCredential, KubernetesSettings,
)  # fmt: skip
# The only key of the type that is missing here stands with the values of those that take it.
TABLES = tuple(type_ for type_ in TYPES if type_ is not SecretFile)


def kind_of(annotation: Any) -> str:
    """The type of a key as the reference names it."""
    words = get_args(annotation)
    origin = get_origin(annotation)
    if hasattr(annotation, "__metadata__"):
        kinds = [meta.extra.get("kind") for meta in annotation.__metadata__ if meta.extra]
        inner = annotation.__origin__
        if "duration" in kinds:
            return "duration"
        if "one-or-many" in kinds:
            many = get_args(inner)[0] if NoneType in get_args(inner) else inner
            item = kind_of(get_args(many)[0])
            return f"{item}; or a list"
        return kind_of(inner)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in words)
    if origin is tuple:
        return f"list of {kind_of(words[0])}"
    if origin is dict:
        return f"names with {kind_of(words[1])}"
    if NoneType in words:
        return kind_of(next(word for word in words if word is not NoneType))
    if SecretFile in words:
        (key,) = SecretFile.__struct_fields__
        return f"text, or `{{{key}: PATH}}`"
    if FleetCredential in words:
        return "`managed-identity`, or keys below"
    names = {str: "text", int: "whole number", bool: "`true`, `false`", Rule: "rules", Hook: "hooks"}
    names |= {MaintenanceWindow: "windows", When: "conditions", NotifyTarget: "targets"}
    return names.get(annotation, "keys below" if issubclass(annotation, msgspec.Struct) else "time of day")


def table_of(type_: type[msgspec.Struct]) -> str:
    """The reference's table of one type."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for item in msgspec.structs.fields(type_):
        default = default_of(item)
        if default is msgspec.NODEFAULT:
            shown = "required"
        elif default in (None, "", (), {}) or isinstance(default, msgspec.Struct) or item.name == "rules":
            shown = "see below" if item.name == "rules" else ""
        else:
            value = plain(default, item.type)
            value = ", ".join(value) if isinstance(value, list) else value
            value = str(value).lower() if isinstance(value, bool) else value
            shown = f"`{value}`"
        meaning = item.type.__metadata__[-1].description
        lines.append(f"| `{item.encode_name}` | {kind_of(item.type)} | {shown} | {meaning} |")
    return "\n".join(lines)


@pytest.mark.parametrize("type_", TABLES, ids=lambda type_: type_.__name__)
def test_the_reference_has_every_key_value_and_default_of_the_types(type_: type[msgspec.Struct]) -> None:
    assert table_of(type_) in (ROOT / "docs/policy.md").read_text()


def test_every_type_of_the_policy_file_is_in_the_reference() -> None:
    found: set[type] = set()

    def visit(type_: Any) -> None:
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct) and type_ not in found:
            found.add(type_)
            for item in msgspec.structs.fields(type_):
                visit(item.type)
        for inner in get_args(type_):
            visit(inner)

    visit(Settings)
    assert found == set(TYPES)


def test_every_policy_in_the_reference_is_valid_and_gives_no_warning() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/policy.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert parse_settings(block, "docs/policy.md", may_change_user=True).warnings == ()


def test_the_shipped_policy_matches_the_built_in_one() -> None:
    assert load_policy(ROOT / "config/policy.yaml").settings == Settings()
    assert load_policy(None).settings == Settings()


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.__name__)
def test_the_shipped_policy_shows_every_key(type_: type[msgspec.Struct]) -> None:
    text = (ROOT / "config/policy.yaml").read_text()
    missing = [
        item.encode_name
        for item in msgspec.structs.fields(type_)
        if not re.search(rf"(?<![\w-]){item.encode_name}:", text)
    ]
    assert missing == []


def test_the_comments_of_the_shipped_policy_are_themselves_a_valid_policy() -> None:
    text = (ROOT / "config/policy.yaml").read_text()
    text = text.replace("hooks: {}", "hooks:").replace("maintenance_windows: {}", "maintenance_windows:")
    text = text.replace("notify: []", "notify:").replace("# fleet:", "fleet:")
    text = text.replace("# kubernetes:", "kubernetes:")
    head, rules = text.split("# Every key that a rule can have is here; only the name is needed.\n")
    rules = re.sub(r"^  # ( *[-a-z])", r"  \1", rules, count=0, flags=re.MULTILINE)
    rules = re.sub(r"^#( {2,})", r"\1", rules, flags=re.MULTILINE)
    settings = parse_settings(head + rules, "policy.yaml", may_change_user=True).settings
    assert [rule.name for rule in settings.rules] == ["user-initiated", "short-freeze", "impactful"]
    assert list(settings.hooks) == ["drain", "checkpoint", "resume"]
    assert list(settings.maintenance_windows) == ["night"]
    assert [target.name for target in settings.notify] == ["ops", "kubernetes"]
    assert settings.fleet is not None
    assert settings.fleet.max_events == 1
    assert settings.kubernetes is not None
    assert settings.kubernetes.node == "vm-1"
    assert format_duration(settings.rules[2].lead or 0) == "15m"


@pytest.mark.parametrize("path", sorted((ROOT / "config/examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_valid_and_gives_no_warning(path: Path) -> None:
    assert parse_settings(path.read_bytes(), path.name).warnings == ()
