"""YAML text to frozen typed values, with every error at once and its place.

Reads the files that people write: the policy, the web server's TLS file, the simulator's scenarios. Does no I/O.
A scalar is judged as it is written (``02:00``, ``2020-07-01``, ``off``), not as YAML would guess its type.
Invariant: a value comes out only if the text has no error.
"""

import operator
import re
from collections.abc import Container, Iterable, Mapping
from datetime import time
from functools import lru_cache
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from scheduled_events_agent.policy import yaml_nodes
from scheduled_events_agent.policy.durations import format_duration, parse_duration, quote, shortened
from scheduled_events_agent.policy.yaml_nodes import Node, Place, place_of

T = TypeVar("T")

# Far more than a file that a person writes holds; it ends aliases that double at every step.
_MAX_VALUES = 100_000
# An alias may repeat a value that has many errors, or a long text, often.
_MAX_PROBLEMS = 100
_MAX_MESSAGE = 1000
_KNOWN_TAGS = frozenset(
    f"tag:yaml.org,2002:{word}"
    for word in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value")
)
_INTEGER = r"[-+]?[0-9]+"
TIME = r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?"
_SCALARS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    time: "a time of day such as 02:00",
}
_MAX_KNOWN = 1000  # there are six hundred time zones
_BARE_KEY = r"[A-Za-z0-9_.-]{1,64}"
_PLAIN_WORD = r"[A-Za-z0-9_./\\%+=-]+"
_HIDDEN = "not shown here, for it may be secret"
_LAST_PART = r"[.\[]?[^.\[]*$"


Severity = Literal["error", "warning"]
Finding = tuple[str, str] | tuple[str, str, str]
"""The result of a check of a value: its path, a message, and a hint if there is one."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with a file, or perhaps wrong; its str() is the line to show, as compilers write it."""

    file: str
    """As the command line names it; "" if it is about none."""
    line: int | None = None
    """Counted from 1; null if it is about the whole file."""
    column: int | None = None
    """In characters, counted from 1; null if it is not known."""
    path: str = ""
    """Such as ``rules[2].approve``; "" for the whole file."""
    severity: Severity = "error"
    message: str
    hint: str = ""
    """What to do, if the message does not say it."""

    @property
    def place(self) -> str:
        """The line and the key, for a sentence about the file."""
        _, _, key = self.path.rpartition(".")
        line = f"line {self.line}" if self.line is not None else ""
        return ", ".join(filter(None, (line, key))) or self.message

    @property
    def text(self) -> str:
        """The line to show beside a verdict of its own: without the severity."""
        return self._line(severity="")

    def __str__(self) -> str:
        return self._line(severity="warning" if self.severity == "warning" else "")

    def _line(self, *, severity: str) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        message = f"{self.message}; {self.hint}" if self.hint else self.message
        return ": ".join(filter(None, (place, severity, self.path, message)))


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems by their lines, those of the whole file first."""
    return tuple(sorted(problems, key=lambda problem: problem.line or 0))


class Parsed(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The result for a text: a value, or the first hundred problems, in the order of their lines."""

    name: str
    value: T | None
    problems: tuple[Problem, ...]
    partial_value: T | None = None
    """The value without its wrong parts, so that later checks can look for further problems."""
    places: Mapping[str, Place] = {}
    """Where each key and each item of a list begins, by its path."""

    def place_of(self, path: str) -> Place | None:
        """The place of a key, or of the nearest one around it; None if the text has neither."""
        while path and path not in self.places:
            path = re.sub(_LAST_PART, "", path)
        return self.places.get(path)

    def problem(self, path: str, message: str, hint: str = "", *, severity: Severity = "error") -> Problem:
        """A problem found by a later check, at the place of ``path``."""
        place = self.place_of(path)
        return Problem(
            file=self.name,
            line=place.line if place else None,
            column=place.column if place else None,
            path=path,
            severity=severity,
            message=shortened(message, _MAX_MESSAGE),
            hint=shortened(hint, _MAX_MESSAGE),
        )

    def to_problems(self, findings: Iterable[Finding], *, severity: Severity = "error") -> tuple[Problem, ...]:
        """The problems of findings, in the order of their lines; no further than the first hundred."""
        return in_order(self.problem(*finding, severity=severity) for finding in islice(findings, _MAX_PROBLEMS))


def parse(text: str | bytes, type_: type[T], name: str, *, shown_keys: Container[str] | None = None) -> Parsed[T]:
    """Read a YAML text as a ``type_`` (a msgspec.Struct); ``name`` is how problems call the file.

    Bytes are UTF-8, with or without a byte order mark. Annotations may use Struct, str, int, bool, None, Literal,
    ``str | Struct``, tuple, dict, datetime.time and msgspec.Meta, whose ``extra`` may say ``{"kind": "duration"}``
    (a float of seconds, written 1h30m), ``{"kind": "one-or-many"}`` (a tuple that may be written as its only item)
    or ``{"kind": "secret"}`` (nothing of it and below it is quoted in a problem). A ValueError from a Struct's
    ``__post_init__`` becomes a problem. ``shown_keys``: if given, a problem quotes no other unknown key, as
    the file may have been named by mistake.
    """
    reader = _Reader(name, shown_keys)
    try:
        partial_value = reader.read_text(text, type_)
    except _TooManyProblemsError:
        partial_value = _INVALID
    partial_value = None if partial_value is _INVALID else partial_value
    problems = in_order(reader.problems)
    value = None if problems else partial_value
    return Parsed(name=name, value=value, problems=problems, partial_value=partial_value, places=reader.places)


def text_at(text: str | bytes, *keys: str) -> str | None:
    """The text at these keys, whatever else is wrong; "" if it is not there, None if that is not known."""
    try:
        node = yaml_nodes.compose(text)
    except yaml_nodes.YamlSyntaxError:
        return None
    for key in keys:
        if _is_null(node):
            return ""
        if node.id != "mapping":
            return None
        node = next((value for key_node, value in node.value if key_node.value == key), yaml_nodes.EMPTY)
    if node is yaml_nodes.EMPTY or _is_null(node):
        return ""
    is_text = node.id == "scalar" and "\0" not in node.value
    return str(node.value) if is_text else None


def without_value(message: str) -> str:
    """A message such as ``expected a number; got "x"`` without what was found."""
    expected, got, _ = message.partition("; got ")
    return f"{expected}{got}a text, {_HIDDEN}" if got else message


def default_of(item: msgspec.structs.FieldInfo) -> Any:
    """The default of a Struct's field; NODEFAULT if it must be given."""
    return item.default if item.default_factory is NODEFAULT else item.default_factory()


class _ValueProblemError(Exception):
    """A value does not fit its type; the message says what was expected and found."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class _TooManyProblemsError(Exception):
    """The limit of problems is reached: no more are reported."""


class _Invalid:
    """A wrong value, or a Struct that lacks a required key."""


_INVALID = _Invalid()


class _Reader:
    """One walk through the node tree along the types; gathers problems and the place of every value."""

    def __init__(self, name: str, shown_keys: Container[str] | None) -> None:
        self.name = name
        self._shown_keys = shown_keys
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}
        self._open: set[int] = set()
        self._count = 0
        self._is_secret = False
        """Whether the node that is being read, or one around it, is secret."""
        self._secrets: set[int] = set()
        """Nodes that were read as secret: an alias may repeat one elsewhere."""

    def read_text(self, text: str | bytes, type_: Any) -> Any:
        try:
            root = yaml_nodes.compose(text)
        except yaml_nodes.YamlSyntaxError as error:
            return self._problem(error.place, "", str(error))
        return self._read(yaml_nodes.EMPTY if _is_null(root) else root, type_, "")

    def _problem(self, place: Place, path: str, message: str, hint: str = "") -> _Invalid:
        self.problems.append(
            Problem(
                file=self.name,
                line=place.line,
                column=place.column,
                path=path,
                message=shortened(message, _MAX_MESSAGE),
                hint=shortened(hint, _MAX_MESSAGE),
            )
        )
        if len(self.problems) >= _MAX_PROBLEMS:
            raise _TooManyProblemsError
        return _INVALID

    def _read(self, node: Node, annotation: Any, path: str) -> Any:
        """The value of a node, converted to its annotation, or _INVALID after a problem was noted."""
        place = place_of(node)
        self._count += 1
        if self._count > _MAX_VALUES:
            self._problem(place, path, f"more than {_MAX_VALUES} values")
            raise _TooManyProblemsError
        if id(node) in self._open:
            return self._problem(place, path, "an alias cannot be inside the value it repeats")
        is_around_secret = self._is_secret
        if "secret" in meta_kinds(unwrap_annotated(annotation)[1]) or id(node) in self._secrets:
            self._is_secret = True
        if self._is_secret:
            self._secrets.add(id(node))
        self._open.add(id(node))
        try:
            self._check_tag(node)
            return self._convert(node, annotation, path)
        except _ValueProblemError as error:
            is_hidden = self._is_secret and node.id == "scalar" and not _is_null(node)
            message = without_value(str(error)) if is_hidden else str(error)
            own_hint = "" if is_hidden else error.hint  # it may quote the value
            hints = (own_hint, _extra(unwrap_annotated(annotation)[1], "hint"))
            return self._problem(place, path, message, "; ".join(filter(None, hints)))
        finally:
            self._is_secret = is_around_secret
            self._open.discard(id(node))

    def _check_tag(self, node: Node) -> None:
        if node.tag in _KNOWN_TAGS:
            return
        if self._is_secret or self._shown_keys is not None:
            raise _ValueProblemError(
                f"a tag, {_HIDDEN}, means nothing here: put a text that begins with ! in quotes"
            )
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise _ValueProblemError(f"the tag {tag} means nothing here: remove it")

    def _convert(self, node: Node, annotation: Any, path: str) -> Any:
        type_, metas = unwrap_annotated(annotation)
        origin = get_origin(type_)
        if origin in (Union, UnionType):
            first, last = get_args(type_)
            if last is NoneType:
                return None if _is_null(node) else self._convert(node, Annotated[first, Meta(), *metas], path)
            chosen = last if node.id == "mapping" else first
            return self._convert(node, Annotated[chosen, Meta(), *metas], path)
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            return self._struct(node, type_, path)
        if origin is tuple:
            return self._sequence(node, get_args(type_)[0], metas, path)
        if origin is dict:
            return self._mapping(node, get_args(type_), metas, path)
        return _check(_scalar(node, type_, metas), metas)

    def _struct(self, node: Node, type_: type[msgspec.Struct], path: str) -> Any:
        fields = _fields(type_)
        values: dict[str, Any] = {}
        before = len(self.problems)
        for key, value in self._items(node, path):
            if key not in fields:
                hint = _hint(key, fields, has_value=not _is_null(value))
                self._problem(self.places[_join(path, key)], path, f"unknown {self._key(key)}", hint)
                continue
            values[fields[key].name] = self._read(value, fields[key].type, _join(path, key))
        for item in fields.values():
            if default_of(item) is NODEFAULT and _join(path, item.encode_name) not in self.places:
                self._problem(place_of(node), path, f'the key "{item.encode_name}" is missing')
        good = {key: value for key, value in values.items() if value is not _INVALID}
        if any(default_of(item) is NODEFAULT and item.name not in good for item in fields.values()):
            return _INVALID
        try:
            return type_(**good)
        except ValueError as error:
            if len(self.problems) > before:
                return _INVALID
            raise _ValueProblemError(str(error)) from error

    def _sequence(self, node: Node, item_type: Any, metas: tuple[Meta, ...], path: str) -> Any:
        if isinstance(node.value, list) and node.id == "sequence":
            items = []
            for index, item in enumerate(node.value):
                self.places[f"{path}[{index}]"] = place_of(item)
                items.append(self._read(item, item_type, f"{path}[{index}]"))
        elif "one-or-many" in meta_kinds(metas) and not _is_null(node):
            try:
                items = [self._convert(node, item_type, path)]
            except _ValueProblemError as error:
                is_list = "," in node.value and not self._is_secret
                hint = f"write {_as_list(node.value.replace(',', ' '))}" if is_list else error.hint
                raise _ValueProblemError(str(error), hint) from error
        else:
            hint = _extra(unwrap_annotated(item_type)[1], "hint") or ""
            if node.id == "scalar" and node.value and not (hint and re.search(r"\s", node.value)):
                hint = f"write {_as_list(node.value)}"
            expected = "a list such as [one, two]" if self._is_secret else "a list"
            message = f"expected {expected}; got {_found(node, '[]')}"
            raise _ValueProblemError(message, "" if _is_null(node) else hint)
        if _INVALID in items:
            return tuple(items[: items.index(_INVALID)])  # those after it would get a wrong index
        return _check(tuple(items), metas)

    def _mapping(self, node: Node, types: tuple[Any, ...], metas: tuple[Meta, ...], path: str) -> Any:
        values: dict[Any, Any] = {}
        before = len(self.problems)
        _, key_metas = unwrap_annotated(types[0])
        for key, value in self._items(node, path):
            try:
                _check(key, key_metas)
            except _ValueProblemError as error:
                self._problem(self.places[_join(path, key)], path, f"the {self._key(key)}: {error}")
            # Of what is secret, the key is shown if it is a name; without a value, it may have been meant as one.
            is_name = re.fullmatch(_BARE_KEY, key) and not _is_null(value)
            key_path = _join(path, key) if is_name or not self._is_secret else f"{path}[...]"
            values[key] = self._read(value, types[1], key_path)
        if len(self.problems) > before:
            return {key: value for key, value in values.items() if value is not _INVALID}
        return _check(values, metas)

    def _items(self, node: Node, path: str) -> list[tuple[str, Node]]:
        """Keys and their nodes; notes the line of each key, and the keys that cannot be."""
        if node.id != "mapping":
            # A text in the place of keys may be the value of any of them, also of a secret one.
            is_text = node.id == "scalar" and not _is_null(node)
            found = f"a text, {_HIDDEN}" if is_text else _found(node)
            if _is_null(node):
                found = "nothing: indent its keys below it, or remove it"
            raise _ValueProblemError(f"expected keys with values; got {found}")
        items: dict[str, Node] = {}
        for key_node, value in node.value:
            place = place_of(key_node)
            if key_node.id != "scalar":
                self._problem(place, path, f"expected a key; got {_found(key_node)}")
            elif key_node.tag.endswith(":merge"):
                self._problem(place, path, "merge keys (<<) cannot be used: write the keys out")
            elif key_node.value in items:
                first = self.places[_join(path, key_node.value)].line
                self._problem(place, path, f"the {self._key(key_node.value)} is in line {first} already")
            else:
                items[key_node.value] = value
                self.places[_join(path, key_node.value)] = place
        return list(items.items())

    def _key(self, key: str) -> str:
        is_hidden = self._is_secret or (self._shown_keys is not None and key not in self._shown_keys)
        return f"key ({_HIDDEN})" if is_hidden else f"key {quote(key)}"


def _scalar(node: Node, type_: Any, metas: tuple[Meta, ...]) -> Any:
    text: str = node.value
    if node.id != "scalar" or _is_null(node):
        empty = '""' if type_ is str else ""
        raise _ValueProblemError(f"expected {_expected(type_, metas)}; got {_found(node, empty)}")
    if type_ is str:
        if "\0" in text:
            raise _ValueProblemError("the character U+0000 cannot be part of it: remove it")
        return text
    value = _duration(text) if type_ is float and "duration" in meta_kinds(metas) else _plain_value(text, type_)
    if value is not None:
        return value
    is_word = get_origin(type_) is Literal and "," not in text
    hint = ""
    if known := (_extra(metas, "hints") or {}).get(text.lower()):
        hint = known
    elif is_word and (guess := nearest(text, get_args(type_))):
        hint = f'did you mean "{guess}"?'
    raise _ValueProblemError(f"expected {_expected(type_, metas)}; got {quote(text)}", hint)


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise _ValueProblemError(str(error)) from error


def _plain_value(text: str, type_: Any) -> Any:
    """The text converted to this type; None if it is no value of it."""
    if get_origin(type_) is Literal:
        return text if text in get_args(type_) else None
    if type_ is bool:
        return {"true": True, "false": False}.get(text.lower())
    if type_ is int:
        return int(text) if re.fullmatch(_INTEGER, text) and len(text) < 20 else None
    match = re.fullmatch(TIME, text) if type_ is time else None
    return time(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _expected(type_: Any, metas: tuple[Meta, ...]) -> str:
    if get_origin(type_) is Literal:
        words = get_args(type_)
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    if type_ is float and "duration" in meta_kinds(metas):
        return "a duration such as 9s, 5m, 1h30m or 2d"
    return _SCALARS[type_]


def _check(value: Any, metas: tuple[Meta, ...]) -> Any:
    """The value, if it is within the limits of its annotations."""
    found = quote(value) if isinstance(value, str) else value
    for meta in metas:
        if meta.extra and (check := meta.extra.get("check")) and (error := check(value)):
            raise _ValueProblemError(error)
        # Python's $ also matches before a line break at the end.
        if meta.pattern is not None and (not re.search(meta.pattern, value) or value.endswith("\n")):
            what = f" ({meta.description})" if meta.description else ""
            raise _ValueProblemError(f"expected a text that matches {meta.pattern}{what}; got {found}")
        for limit, words, is_kept in (
            (meta.ge, "at least", operator.ge),
            (meta.gt, "more than", operator.gt),
            (meta.le, "at most", operator.le),
        ):
            if limit is not None and not is_kept(value, limit):
                show = format_duration if "duration" in meta_kinds(metas) else str
                raise _ValueProblemError(f"expected {words} {show(limit)}; got {show(value)}")
        if meta.min_length is not None and len(value) < meta.min_length:
            raise _ValueProblemError(f"expected at least {meta.min_length} items; got {len(value)}")
    return value


@lru_cache(maxsize=64)
def _fields(type_: type[msgspec.Struct]) -> Mapping[str, msgspec.structs.FieldInfo]:
    """The fields by their names in the YAML; working them out anew for each of thousands of rules takes long."""
    return {item.encode_name: item for item in msgspec.structs.fields(type_)}


def _hint(key: str, fields: Mapping[str, msgspec.structs.FieldInfo], *, has_value: bool) -> str:
    """What an unknown key was probably meant to be."""
    for name, item in fields.items():
        if key in _inner_fields(item.type):
            return f'it is a key of "{name}": indent it below that'
    if key == "true" and "on" in fields:
        return 'put "on" in quotes: Helm and other programs read it as true'
    places = _places_of_word(key, fields)
    if len(places) == 1:
        return f"write {places[0]}"
    if guess := nearest(key, fields):
        return f'did you mean "{guess}"?'
    known = f"known here: {', '.join(fields)}"
    return known if has_value else f"{known}; a list is written [one, two]"


def _inner_fields(annotation: Any) -> Mapping[str, msgspec.structs.FieldInfo]:
    """The keys of the Struct that a field holds; none if it holds something else."""
    type_, _ = unwrap_annotated(annotation)
    options = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
    structs = [one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    return {key: field for one in structs for key, field in _fields(one).items()}


def _places_of_word(word: str, fields: Mapping[str, msgspec.structs.FieldInfo]) -> list[str]:
    """The fields, and those of the Structs that these hold, that take this word, with it as their value."""
    places = [f"{name}: {word}" for name, item in fields.items() if word in _words(item.type)]
    for name, item in fields.items():
        inner = _places_of_word(word, _inner_fields(item.type))
        places += [f"{name}: {{{place}}}" for place in inner]
    return places


def _words(annotation: Any) -> tuple[Any, ...]:
    """The words that a field takes, alone or in a list; none if it takes other values."""
    type_, _ = unwrap_annotated(annotation)
    if get_origin(type_) in (Union, UnionType):
        type_, _ = unwrap_annotated(get_args(type_)[0])
    if get_origin(type_) is tuple:
        type_, _ = unwrap_annotated(get_args(type_)[0])
    return get_args(type_) if get_origin(type_) is Literal else ()


def _as_list(text: str) -> str:
    """The words of a text as YAML lists them; an example if they might need quotes."""
    words = text.split()
    if all(re.fullmatch(_PLAIN_WORD, word) for word in words):
        return f"[{', '.join(words)}]"
    return "a list such as [one, two]"


def unwrap_annotated(annotation: Any) -> tuple[Any, tuple[Meta, ...]]:
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        return inner, tuple(extra for extra in extras if isinstance(extra, Meta))
    return annotation, ()


def meta_kinds(metas: tuple[Meta, ...]) -> list[Any]:
    return [meta.extra.get("kind") for meta in metas if meta.extra]


def _extra(metas: tuple[Meta, ...], key: str) -> Any:
    """The value under this key of an annotation's ``extra``; None if it has none."""
    return next((meta.extra[key] for meta in metas if meta.extra and key in meta.extra), None)


def _is_null(node: Node) -> bool:
    return node.id == "scalar" and node.tag.endswith(":null") and node.value.lower() in ("", "~", "null")


def _found(node: Node, empty: str = "") -> str:
    if node.id == "sequence":
        return "a list"
    if node.id == "mapping":
        return "keys with values"
    if _is_null(node):
        return "nothing: remove the key" + (f", or write {empty}" if empty else "")
    return quote(node.value)


def _join(path: str, key: str) -> str:
    if not re.fullmatch(_BARE_KEY, key):
        return f"{path}[{quote(key)}]"
    return f"{path}.{key}" if path else key


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be, of the first thousand."""
    from difflib import get_close_matches  # noqa: PLC0415  # only a faulty file needs it

    by_folded = {name.casefold(): name for name in islice(known, _MAX_KNOWN)}
    found = get_close_matches(word.casefold(), by_folded, n=1)
    return by_folded[found[0]] if found else None
