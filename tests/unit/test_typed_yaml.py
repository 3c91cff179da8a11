"""YAML text to typed values: what is read, and every fault with its line."""

from datetime import time
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from scheduled_events_agent.policy.schema import json_schema, plain
from scheduled_events_agent.policy.typed_yaml import Parsed, parse, text_at

Span = Annotated[float, Meta(extra={"kind": "duration"})]


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """Something inside."""

    name: Annotated[str, Meta(pattern="^[a-z]+$", description="small letters")]
    span: Span = 0.0
    count: Annotated[int, Meta(ge=1, le=9)] = 1


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is."""

    text: str = ""
    maybe: str | None = None
    number: int = 0
    flag: bool = False
    mode: Literal["never", "on", "2020-07-01"] = "never"
    at: time | None = None
    span: Span | None = None
    few: Annotated[tuple[str, ...], Meta(min_length=1)] = ()
    any_of: Annotated[tuple[Literal["a", "b"], ...], Meta(extra={"kind": "one-or-many"})] = ()
    items: tuple[Inner, ...] = ()
    table: dict[str, str] = {}
    inner: Inner | None = None


class Strict(msgspec.Struct, frozen=True):
    """Rejects odd numbers."""

    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError(f"expected an even number; got {self.number}")


def read(text: str | bytes) -> Parsed[Outer]:
    return parse(text, Outer, "f.yaml")


def value(text: str | bytes) -> Outer:
    parsed = read(text)
    assert parsed.problems == ()
    assert parsed.value is not None
    return parsed.value


def faults(text: str | bytes) -> list[str]:
    parsed = read(text)
    assert parsed.value is None
    return [str(problem) for problem in parsed.problems]


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "~", b"", b"\xef\xbb\xbf", "\ufeff# nothing"])
def test_an_empty_text_is_all_defaults(text: str | bytes) -> None:
    assert value(text) == Outer()


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("text: yes", "text", "yes"),
        ("text: 02:00", "text", "02:00"),
        ("text: 0x1F", "text", "0x1F"),
        ("text: 2020-07-01", "text", "2020-07-01"),
        ('text: "null"', "text", "null"),
        ("text: |\n  two\n  lines\n", "text", "two\nlines\n"),
        ("maybe: null", "maybe", None),
        ("maybe: ~", "maybe", None),
        ("maybe:", "maybe", None),
        ("maybe: none", "maybe", "none"),
        ("number: -12", "number", -12),
        ("number: 010", "number", 10),
        ("flag: true", "flag", True),
        ("flag: False", "flag", False),
        ("mode: on", "mode", "on"),
        ("mode: 2020-07-01", "mode", "2020-07-01"),
        ("at: 02:00", "at", time(2)),
        ("at: 2:05:09", "at", time(2, 5, 9)),
        ("span: 1h30m", "span", 5400.0),
        ("few: [yes, 1]", "few", ("yes", "1")),
        ("any_of: a", "any_of", ("a",)),
        ("any_of: [a, b]", "any_of", ("a", "b")),
        ("items:\n  - {name: x, span: 2s}", "items", (Inner(name="x", span=2.0),)),
        ("table: {A B: yes, C: 1.0}", "table", {"A B": "yes", "C": "1.0"}),
        ("items: [&x {name: x}, *x]", "items", (Inner(name="x"), Inner(name="x"))),
    ],
)
def test_values_come_from_the_operators_own_letters(text: str, key: str, expected: Any) -> None:
    assert getattr(value(text), key) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("number: 1.5", 'f.yaml:1: number: expected a whole number; got "1.5"'),
        ("flag: yes", 'f.yaml:1: flag: expected true or false; got "yes"'),
        ("mode: off", 'f.yaml:1: mode: expected one of never, on, 2020-07-01; got "off"'),
        ("at: 24:00", 'f.yaml:1: at: expected a time of day such as 02:00; got "24:00"'),
        ("text:", 'f.yaml:1: text: expected a text; got nothing: remove the key, or write ""'),
        ("text: [a]", "f.yaml:1: text: expected a text; got a list"),
        ("text: {a: b}", "f.yaml:1: text: expected a text; got keys with values"),
        ("few: a", 'f.yaml:1: few: expected a list; got "a"; write [a]'),
        ("few:", "f.yaml:1: few: expected a list; got nothing: remove the key, or write []"),
        ("few: []", "f.yaml:1: few: expected at least 1 items; got 0"),
        ("table: [a]", "f.yaml:1: table: expected keys with values; got a list"),
        (
            "table:",
            "f.yaml:1: table: expected keys with values; got nothing: indent its keys below it, or remove it",
        ),
        ("any_of:\n  - a\n  - c", 'f.yaml:3: any_of[1]: expected one of a, b; got "c"'),
        ("any_of: c", 'f.yaml:1: any_of: expected one of a, b; got "c"'),
        ("any_of: a, b", 'f.yaml:1: any_of: expected one of a, b; got "a, b"; write [a, b]'),
        (
            "mode: Never",
            'f.yaml:1: mode: expected one of never, on, 2020-07-01; got "Never"; did you mean "never"?',
        ),
        ("tabel: {}", 'f.yaml:1: unknown key "tabel"; did you mean "table"?'),
        ("inner: {}", 'f.yaml:1: inner: the key "name" is missing'),
        ("inner: {name: a, zzz: 1}", 'f.yaml:1: inner: unknown key "zzz"; known here: name, span, count'),
        ("count: 2", 'f.yaml:1: unknown key "count"; it is a key of "inner": indent it below that'),
        (
            "inner: {name: a, zzz}",
            'f.yaml:1: inner: unknown key "zzz"; known here: name, span, count; a list is written [one, two]',
        ),
        ("inner: {name: a, count: 0}", "f.yaml:1: inner.count: expected at least 1; got 0"),
        ("inner: {name: a, count: 10}", "f.yaml:1: inner.count: expected at most 9; got 10"),
        (
            'inner: {name: "a\\n"}',
            'f.yaml:1: inner.name: expected a text that matches ^[a-z]+$ (small letters); got "a\\n"',
        ),
        ("table: {a: 1, b: 2,\n  a: 3}", 'f.yaml:2: table: the key "a" is in line 1 already'),
        ("table: {[a]: b}", "f.yaml:1: table: expected a key; got a list"),
        ("table: {'a b': }", 'f.yaml:1: table["a b"]: expected a text; got nothing: remove the key, or write ""'),
        ("[a]", "f.yaml:1: expected keys with values; got a list"),
        ("just text", "f.yaml:1: expected keys with values; got a text, not shown here, for it may be secret"),
        ("<<: {text: a}", "f.yaml:1: merge keys (<<) cannot be used: write the keys out"),
        ("text: !secret a", "f.yaml:1: text: the tag !secret means nothing here: remove it"),
        ("text: !!binary aa", "f.yaml:1: text: the tag !!binary means nothing here: remove it"),
        ("few: &a [*a]", "f.yaml:1: few[0]: an alias cannot be inside the value it repeats"),
    ],
)
def test_an_error_names_its_place_the_expected_and_the_found_value(text: str, problem: str) -> None:
    assert faults(text) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "text: a: b",
            'f.yaml:1: unexpected ":": check the indentation, or put a text that has ": " in it in quotes',
        ),
        ("table:\n\ta: b", "f.yaml:2: a tab cannot indent: use spaces"),
        ("text: @a", "f.yaml:1: a value cannot begin with @: put it in quotes"),
        ("few: [a,\n  b\n", 'f.yaml:2: the "[" that begins in line 1 is not closed: a "," or "]" is missing'),
        ("table: {a: b", 'f.yaml:1: the "{" that begins in line 1 is not closed: a "," or "}" is missing'),
        ("text: 'a\n", "f.yaml:1: the quoted text that begins in line 1 is not closed"),
        (
            'text: "C:\\d"',
            "f.yaml:1: unknown escape in double quotes: write a backslash twice, or use single quotes",
        ),
        (
            "text: *a",
            "f.yaml:1: the alias has no anchor above it: put a text that begins with * in quotes",
        ),
        ("text: *", "f.yaml:1: a value cannot begin with *: put it in quotes"),
        ("text: & a", "f.yaml:1: a value cannot begin with &: put it in quotes"),
        ("text: *.web", "f.yaml:1: a value cannot begin with *: put it in quotes"),
        ("text: a\n---\ntext: b", "f.yaml:2: only one document is allowed: remove what follows ---"),
        (
            "few:\n  - a\n b: c",
            "f.yaml:3: does not continue the block that begins in line 1: check the indentation",
        ),
        ("text: a\x00b", "f.yaml:1: the character U+0000 is not allowed in YAML: remove it"),
        (b"a: b\ntext: \xe4", "f.yaml:2: expected UTF-8; got the byte 0xe4: save the file as UTF-8"),
        (b"\xff\xfet\0", "f.yaml:1: expected UTF-8; got the byte 0xff: save the file as UTF-8"),
        ("[" * 100_000, "f.yaml:1: nested more than 50 deep"),
        ("- " * 100_000, "f.yaml:1: nested more than 50 deep"),
    ],
)
def test_invalid_yaml_is_one_error_with_its_line(text: str | bytes, problem: str) -> None:
    assert faults(text) == [problem]


NOT_A_DURATION = 'expected a duration such as 9s, 5m, 1h30m or 2d; got "5": write 5s if seconds are meant'


def test_all_errors_are_reported_at_once_in_line_order() -> None:
    assert faults("nubmer: 1\nitems:\n  - {name: A}\n  - {span: 5}\nflag: 1\n") == [
        'f.yaml:1: unknown key "nubmer"; did you mean "number"?',
        'f.yaml:3: items[0].name: expected a text that matches ^[a-z]+$ (small letters); got "A"',
        f"f.yaml:4: items[1].span: {NOT_A_DURATION}",
        'f.yaml:4: items[1]: the key "name" is missing',
        'f.yaml:5: flag: expected true or false; got "1"',
    ]


def test_aliases_that_double_at_every_step_end_at_a_limit() -> None:
    rows: Any = str
    for _ in range(6):
        rows = tuple[rows, ...]
    deep = msgspec.defstruct("Deep", [("x", dict[str, rows])])
    steps = "".join(f"  y{i}: &a{i + 1} [{','.join([f'*a{i}'] * 10)}]\n" for i in range(12))
    problems = parse(f"x:\n  y: &a0 [{','.join('1' * 10)}]\n{steps}", deep, "f.yaml").problems
    assert 0 < len(problems) <= 100


def test_a_long_file_says_so_once() -> None:
    problems = faults("few: [" + "a," * 100_001 + "]")
    assert problems == ["f.yaml:1: few[99998]: more than 100000 values"]


def test_a_value_error_of_the_type_itself_is_a_problem() -> None:
    problems = parse("# first\nnumber: 3", Strict, "f.yaml").problems
    assert [str(problem) for problem in problems] == ["f.yaml:2: expected an even number; got 3"]


def test_places_are_known_for_later_checks() -> None:
    parsed = read("text: a\nitems:\n  - name: x\n  - name: y\n    span: 1s\n")
    assert parsed.place_of("items") == (2, 1)
    assert parsed.place_of("items[1]") == (4, 5)
    assert parsed.place_of("items[1].span") == (5, 5)
    assert parsed.place_of("items[1].count") == (4, 5)
    assert parsed.place_of("inner.name") is None
    assert str(parsed.problem("items[0].name", "is odd")) == "f.yaml:3: items[0].name: is odd"


@given(st.text() | st.binary())
def test_no_text_makes_the_parser_fail(text: str | bytes) -> None:
    parsed = read(text)
    assert (parsed.value is None) == bool(parsed.problems)


def test_a_value_is_written_as_the_file_writes_it() -> None:
    outer = Outer(span=90.0, at=time(2), items=(Inner(name="x", span=0.5),), flag=True, any_of=("a",))
    assert plain(outer, Outer) == {
        "flag": True,
        "at": "02:00",
        "span": "1m30s",
        "any_of": ["a"],
        "items": [{"name": "x", "span": "500ms"}],
    }


def test_the_schema_describes_what_the_parser_accepts() -> None:
    schema = json_schema(Outer)
    assert schema["properties"]["any_of"] == {
        "anyOf": [{"enum": ["a", "b"]}, {"type": "array", "items": {"enum": ["a", "b"]}}]
    }
    assert schema["properties"]["mode"] == {"enum": ["never", "on", "2020-07-01"], "default": "never"}
    assert schema["$defs"]["Inner"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$", "description": "small letters"},
            "span": {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(d|h|m|s|ms))+$", "default": "0s"},
            "count": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1},
        },
        "additionalProperties": False,
        "description": "Something inside.",
        "required": ["name"],
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: {b: /x, c: [}", None),
        ("q: [1]\na: {q: 1, b: /x}\nb: /y", "/x"),
        ("a: {b: 02:00, b: two}", "02:00"),
        ("a: &a {b: *a}", None),
        ("{? [a] : 1, a: {b: /x}}", "/x"),
        ('a: {b: "\\0"}', None),
        ("a: {b: [x]}", None),
        ("a: x", None),
        ("- a", None),
        ("a: {b: ~}", ""),
        ("a:", ""),
        ("b: /y", ""),
        ("", ""),
        (b"\xff", None),
    ],
)
def test_one_value_is_read_despite_other_errors(text: str | bytes, found: str | None) -> None:
    assert text_at(text, "a", "b") == found
