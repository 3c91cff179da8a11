"""What users rely on is still there: docs/compatibility.md, the record of the code, and the code as it is."""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import interface
import msgspec
import pytest
from msgspec import NODEFAULT, Meta
from msgspec.inspect import type_info

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.imds.document import ApiVersion
from scheduled_events_agent.policy.schema import json_schema
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.status.status import AgentStatus

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
WAY_OUT = """
Users rely on it. Keep it, beside its successor, as long as docs/compatibility.md#taking-something-away says; then
delete it from this record too. Until the first release, write the record anew: python tests/fixtures/interface.py
"""
SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13", "bullseye": "Debian 11", "jammy": "Ubuntu 22.04"}


@pytest.fixture(scope="module")
def today() -> dict[str, Any]:
    return interface.interface()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(interface.newest_record().read_text(encoding="utf-8"))
    return loaded


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# --- the promise


def test_what_users_rely_on_is_still_there(recorded: dict[str, Any], today: dict[str, Any]) -> None:
    broken = [*interface.breaks(recorded, today)]
    if broken:
        pytest.fail("\n".join([f"{interface.newest_record()} has it, the code does not:", *broken, WAY_OUT]))


def test_there_is_a_record_for_this_minor_version() -> None:
    assert interface.newest_record().stem == interface.MINOR, "run: python tests/fixtures/interface.py"


def structs(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for one in base.__subclasses__():
        yield one
        yield from structs(one)


def test_every_json_output_is_recorded() -> None:
    build_parser()  # imports all commands
    versioned = {
        one
        for one in structs(msgspec.Struct)
        if one.__module__.startswith("scheduled_events_agent.") and "schema_version" in one.__struct_fields__
    }
    # Facts is what a Status is made from, and no output.
    assert versioned - {AgentStatus, Facts} == set(interface.JSON_OUTPUTS.values())


def containers(value: Any) -> Iterator[Any]:
    """Each mapping and each list in it."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def test_each_entry_of_the_record_is_missed_when_it_is_gone(recorded: dict[str, Any]) -> None:
    count = 0
    for container in containers(recorded):
        for key in container if isinstance(container, dict) else range(len(container)):
            rest = container.copy()
            del rest[key]
            assert len([*interface.breaks(container, rest)]) == 1, (container, key)
            count += 1
    assert count > 2500


# --- the comparison


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, ["a: c: is gone"]),
        ({"a": ["x", "y"]}, {"a": ["z", "y", "x"]}, []),
        ({"a": ["x", "y"]}, {"a": ["y"]}, ['a: "x" is gone']),
        ({"a": "x"}, {"a": "y"}, ['a: was "x", is "y"']),
        ({"a": 1}, {"a": True}, ["a: was 1, is true"]),
        ({"a": None}, {"a": "x"}, ['a: was null, is "x"']),
        ({"a": {"b": 1}}, {"a": ["b"]}, ['a: was {"b": 1}, is ["b"]']),
    ],
)
def test_only_additions_are_no_break(old: Any, new: Any, expected: list[str]) -> None:
    assert [*interface.breaks(old, new)] == expected


class Vm(msgspec.Struct):
    name: str


class LargerVm(Vm):
    id: str


def a_policy(**changes: Any) -> dict[str, Any]:
    """The keys of a small file; a change is the type and the default of a key, or None to take it away."""
    fields = {
        "name": (str, NODEFAULT),
        "mode": (Literal["act", "observe"], "act"),
        "times": (Annotated[int, Meta(ge=1, le=9)], 3),
        "on": (tuple[Literal["a", "b"], ...], ("a",)),
        **changes,
    }
    known = [(name, *of) for name, of in fields.items() if of is not None]
    return dict(interface.keys_of(json_schema(msgspec.defstruct("Policy", known, kw_only=True))))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"more": (bool, False)}, []),
        ({"mode": (Literal["act", "observe", "ask"], "act")}, []),
        ({"mode": (Literal["act", "observe"] | None, "act")}, []),
        ({"times": None}, ["times: is gone"]),
        ({"mode": (Literal["act"], "act")}, ['mode: takes: "observe" is gone']),
        ({"mode": (Literal["act", "observe"], "observe")}, ['mode: default: was "act", is "observe"']),
        ({"times": (str, 3)}, ['times: takes: "any integer from 1 to 9" is gone']),
        ({"times": (Annotated[int, Meta(ge=1, le=5)], 3)}, ['times: takes: "any integer from 1 to 9" is gone']),
        ({"on": (tuple[Literal["b"], ...], ("a",))}, ['on[]: takes: "a" is gone']),
        (
            {"on": (tuple[Literal["a", "b"], ...], ("a", "b"))},
            [r'on: default: was "[\"a\"]", is "[\"a\", \"b\"]"'],
        ),
        ({"must": (str, NODEFAULT)}, ['the whole file: takes: "any object with name" is gone']),
    ],
)
def test_a_policy_that_was_valid_stays_valid_and_means_the_same(changes: Any, expected: list[str]) -> None:
    assert [*interface.breaks(a_policy(), a_policy(**changes))] == expected


def an_output(**changes: Any) -> dict[str, Any]:
    """The fields of a small output; a change is the type of a field, or None to take it away."""
    fields = {"at": str, "phase": Literal["held", "approved"], "vms": tuple[Vm, ...], **changes}
    known = [(name, type_) for name, type_ in fields.items() if type_ is not None]
    return dict(interface.fields_of(type_info(msgspec.defstruct("Output", known))))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"more": int}, []),
        ({"phase": Literal["held", "approved", "started"]}, []),
        ({"vms": tuple[LargerVm, ...]}, []),
        ({"at": None}, ["at: is gone"]),
        ({"at": int}, ['at: is: was "a text", is "a whole number"']),
        ({"at": str | None}, ['at: is: was "a text", is "a text or null"']),
        ({"phase": Literal["held"]}, ['phase: values: "approved" is gone']),
        ({"vms": tuple[str, ...]}, ['vms[]: is: was "an object", is "a text"', "vms[].name: is gone"]),
    ],
)
def test_a_program_that_read_the_json_still_reads_it(changes: Any, expected: list[str]) -> None:
    assert [*interface.breaks(an_output(), an_output(**changes))] == expected


def a_command(*changed: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A command line; None in place of what an option is takes it away."""
    options: dict[str, Any] = {
        "what": {"choices": ["on", "off"]},
        "--json": {"action": "store_true"},
        "--limit": {"default": 20},
        **dict(changed),
    }
    parser = argparse.ArgumentParser()
    for name, of in options.items():
        if of is not None:
            parser.add_argument(name, **of)
    return dict(interface.commands_of(parser, "agent"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("--more", {}), []),
        (("more", {"nargs": "?"}), []),
        (("what", {"choices": ["on", "off", "auto"]}), []),
        (("--json", None), ["agent: --json: is gone"]),
        (("--json", {"default": False}), ['agent: --json: takes: "no value" is gone']),
        (("--limit", {"default": 10}), ["agent: --limit: default: was 20, is 10"]),
        (("--limit", {"default": 20, "choices": [20]}), ['agent: --limit: takes: "any value" is gone']),
        (("what", {"choices": ["on"]}), ['agent: argument 1: takes: "off" is gone']),
        (("more", {}), ['agent: required: was "argument 1", is "argument 1, argument 2"']),
        (("--more", {"required": True}), ['agent: required: was "argument 1", is "argument 1, --more"']),
    ],
)
def test_a_command_line_that_worked_still_works(change: Any, expected: list[str]) -> None:
    assert [*interface.breaks(a_command(), a_command(change))] == expected


# --- the page


def test_the_page_promises_what_is_recorded_and_nothing_else(recorded: dict[str, Any]) -> None:
    assert re.findall(r"^- \*\*(.+?)\*\*: ", section("Stable"), re.MULTILINE) == [*recorded]
    assert f"`{interface.newest_record().relative_to(ROOT).as_posix()}`" in section("How this is kept")


def test_the_page_names_every_exit_code(today: dict[str, Any]) -> None:
    (text,) = re.findall(r"^- \*\*exit codes\*\*: (.+?)^- ", PAGE, re.MULTILINE | re.DOTALL)
    assert set(map(int, re.findall(r"\d+", text))) == set(today["exit codes"].values())


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    build = (ROOT / "packaging/build.py").read_text(encoding="utf-8")
    (pythons,) = re.findall(r"^PYTHONS = \((.+)\)$", build, re.MULTILINE)
    (systemd,) = re.findall(r'^SYSTEMD = "(\d+)"', build, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classified = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    assert re.findall(r"[\d.]+", pythons) == classified
    assert project["requires-python"] == f">={classified[0]}"
    versions = get_args(ApiVersion)
    assert list(versions) == sorted(versions)
    assert section("Systems").strip().splitlines()[0] == (
        f"Python {classified[0]} to {classified[-1]}; on Linux systemd {systemd} or newer. "
        f"Of Azure's Scheduled Events, the api-versions {versions[0]} to {versions[-1]}."
    )


def test_the_page_calls_tested_what_the_system_tests_run() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", section("Systems"), re.MULTILINE)
    tested: dict[str, set[str]] = {}
    for systems, how in rows[1:]:
        names = {name.partition(" (")[0] for name in systems.split(", ")}
        tested.setdefault(how, set()).update(names)
    container = (ROOT / "tests/system/container.py").read_text(encoding="utf-8")
    booted = {SUITES[suite] for suite in re.findall(r'^    "(\w+)": _Suite\(', container, re.MULTILINE)}
    managers = (ROOT / "tests/system/package_managers.py").read_text(encoding="utf-8")
    stood_for = re.findall(r"^([A-Z_]+_\d+) = Distribution\(", managers, re.MULTILINE)
    assert tested.pop("tested at each release") == booted
    assert {name.casefold() for name in tested.pop("tested without its own systemd or repository")} == {
        name.replace("_", " ").casefold() for name in stood_for
    }
    release = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    images = re.findall(r"^ +- (debian|ubuntu|almalinux):(\S+)$", release, re.MULTILINE)
    tried = {f"{name.capitalize()} {version}" for name, version in images} - booted - {"Almalinux 9"}  # for RHEL 9
    assert tested.pop("package tried in a container at each release") == tried
    assert tested.keys() == {"expected", "under Wine, not yet on a real Windows"}
    assert set(re.findall(r"^- \*\*(.+?)\*\*: ", section("Systems"), re.MULTILINE)) == {
        "tested at each release",
        "tested without its own systemd or repository",
        "package tried in a container at each release",
        "expected",
    }
