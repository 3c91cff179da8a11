"""YAML text to its tree of nodes, with syntax errors in plain words. Only this module imports PyYAML."""

import re
from typing import Any, NamedTuple

import yaml

_MAX_DEPTH = 50
# Characters that YAML does not allow. The library would report them (NUL above all) without a line.
_CONTROL = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]"
# An anchor or a tag in the library's words; it may be a secret that needs quotes.
_NAME = r" '[^']{2,}'(?=;|$)"

Node = Any
"""A yaml.Node, whose published types lack ``id``."""


EMPTY = yaml.MappingNode("tag:yaml.org,2002:map", [], yaml.Mark("", 0, 0, 0, "", 0))


class Place(NamedTuple):
    """A line and a column of a text, both counted from 1."""

    line: int
    column: int | None = None
    """In characters; None if only the line is known."""


def place_of(node: Node) -> Place:
    """Where a node begins."""
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


class YamlSyntaxError(Exception):
    """The text is not YAML."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Rejects a text nested so deeply that the C code would run out of stack."""

    depth = 0

    def descend_resolver(self, parent: Any, index: Any) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nesting", problem_mark=parent.start_mark)
        super().descend_resolver(parent, index)

    def ascend_resolver(self) -> None:
        self.depth -= 1
        super().ascend_resolver()


def compose(text: str | bytes) -> Node:
    """The root of the tree; EMPTY if there is none. Raises YamlSyntaxError."""
    text = (_decoded(text) if isinstance(text, bytes) else text).removeprefix("\ufeff")
    if odd := re.search(_CONTROL, text):
        place = _place_after(text[: odd.start()])
        raise YamlSyntaxError(place, f"the character U+{ord(odd[0]):04X} is not allowed in YAML: remove it")
    try:
        return yaml.compose(text, _Loader) or EMPTY
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or EMPTY.start_mark
        line, column = mark.line, mark.column
        if "scanning an a" in (error.context or ""):  # an alias or an anchor, whose sign is before the mark
            column -= 1
        lines = text.splitlines()
        # The mark of the text's end is one line further than an editor shows.
        is_end = line >= len(lines)
        place = _place_after("\n".join(lines)) if is_end else Place(line + 1, column + 1)
        message = _explain(error, "" if is_end else lines[line], column)
        raise YamlSyntaxError(place, message) from error
    except yaml.YAMLError as error:
        raise YamlSyntaxError(Place(1), f"not YAML: {error}") from error


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        place = _place_after(error.object[: error.start].decode())
        byte = error.object[error.start]
        message = f"expected UTF-8; got the byte 0x{byte:02x}: save the file as UTF-8"
        raise YamlSyntaxError(place, message) from error


def _place_after(text: str) -> Place:
    _, _, last_line = text.rpartition("\n")
    return Place(text.count("\n") + 1, len(last_line) + 1)


def _explain(error: yaml.MarkedYAMLError, content: str, column: int) -> str:
    """Why a text is not YAML, in plain words. ``content``: the line with the error. ``column``: from 0."""
    lacks_name = "scanning an a" in (error.context or "")
    character = content[column : column + 1]
    begun = f"that begins in line {error.context_mark.line + 1}" if error.context_mark else "around it"
    problem = error.problem or ""
    if "\t" in content[: column + 1] and not content[:column].strip():
        message = "a tab cannot indent: use spaces"
    elif lacks_name or "cannot start any token" in problem:
        message = f"a value cannot begin with {character}: put it in quotes"
    elif "mapping values are not allowed" in problem:
        message = 'unexpected ":": check the indentation, or put a text that has ": " in it in quotes'
    elif "',' or '" in problem:
        opening, closing = "[]" if "]" in problem else "{}"
        message = f'the "{opening}" {begun} is not closed: a "," or "{closing}" is missing'
    elif "end of stream" in problem and "quoted" in (error.context or ""):
        message = f"the quoted text {begun} is not closed"
    elif "escape character" in problem:
        message = "unknown escape in double quotes: write a backslash twice, or use single quotes"
    elif "undefined alias" in problem:
        message = "the alias has no anchor above it: put a text that begins with * in quotes"
    elif problem == "nesting" or "maximum nesting depth" in problem:  # libyaml 0.2.6 has a limit of its own
        message = f"nested more than {_MAX_DEPTH} deep"
    elif "another document" in problem:
        message = "only one document is allowed: remove what follows ---"
    elif "expected ':'" in problem:
        message = 'a ":" is missing after the key'
    elif "expected key" in problem or "<block end>" in problem or "'-' indicator" in problem:
        message = f"does not continue the block {begun}: check the indentation"
    else:
        text = " ".join(filter(None, (error.context, problem)))
        message = f"not YAML: {re.sub(_NAME, '', text)}"
    return message
