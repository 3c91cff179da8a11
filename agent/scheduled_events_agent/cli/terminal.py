"""Output for people: lines that fit the terminal and have colours there, plain lines anywhere else.

Invariant: no control character is printed except those written here, whatever a description or a hook's output
contains.
"""

import json
import re
import shutil
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Literal, NamedTuple, TextIO

from msgspec import to_builtins

from scheduled_events_agent import host

FIRST_ANSWER_IS_SLOW = "waits for the metadata service, whose very first answer may take two minutes"

Style = Literal["", "bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "1;33", "cyan": "36"}
# Longer lines are hard to read, however wide the window is.
_MAX_WIDTH = 120
_MIN_WIDTH = 40
_MIN_TEXT = 18
_SLOW_SECONDS = 3.0
_COLOR_SEQUENCE = r"\x1b\[[0-9;]*m"


class Row(NamedTuple):
    """A label and its text."""

    label: str
    text: str
    style: Style = ""


class Cell(NamedTuple):
    """The text of one column in a row of a table."""

    text: str
    style: Style = ""
    indent: int = 0
    """How far the lines after the first are indented below it, in the last column."""


class Terminal(NamedTuple):
    """Where the output goes."""

    width: int | None
    """Columns; None if it is no terminal. Lines are not broken then: each fact stays in its line."""
    has_colors: bool

    @classmethod
    def of(cls, stream: TextIO) -> "Terminal":
        """The terminal of the stream."""
        if not stream.isatty():
            return cls(width=None, has_colors=False)
        return cls(
            width=max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size().columns)),
            has_colors=host.has_terminal_colors(),
        )

    def paint(self, text: str, style: Style = "") -> str:
        """The cleaned text, in this style if the terminal has colours."""
        clean = printable(text)
        return f"\x1b[{_CODES[style]}m{clean}\x1b[0m" if style and clean and self.has_colors else clean

    def line(self, text: str, style: Style = "", *, indent: int = 0) -> list[str]:
        """The text in as many lines as it needs, all but the first indented by this (less in a narrow window)."""
        return [self.paint(part, style) for part in self._broken(printable(text), indent)]

    def rows(self, rows: Iterable[Row], *, indent: int = 2) -> list[str]:
        """The rows as lines, indented, with their texts in one column."""
        return [*self.table([(Cell(row.label, "dim"), Cell(row.text, row.style)) for row in rows], indent=indent)]

    def table(
        self,
        rows: Iterable[Sequence[Cell]],
        *,
        indent: int = 0,
        widest: Sequence[str] = (),
        right: Container[int] = (),
    ) -> Iterator[str]:
        """Lines with the rows in columns; the texts of the last column are broken to fit the window.

        ``widest``: the longest text that each column but the last will have. With it, the lines of a row are there
        as soon as the row is; without it, the rows are measured first. ``right``: the columns whose texts stand at
        their right.
        """
        if not widest:
            rows = list(rows)
            columns = zip(*[row[:-1] for row in rows], strict=True)
            widths = [max(len(printable(cell.text)) for cell in column) for column in columns]
        else:
            widths = [len(text) for text in widest]
        for row in rows:
            yield from self._table_row(row, widths, indent, right)

    def _table_row(
        self, row: Sequence[Cell], widths: Sequence[int], indent: int, right: Container[int]
    ) -> Iterator[str]:
        *leading, last = row
        pieces: list[str] = []
        for index, (cell, width) in enumerate(zip(leading, widths, strict=True)):
            text = printable(cell.text)
            piece = text.rjust(width) if index in right else text.ljust(width)
            pieces.append(f"{piece}  ")
        lead = f"{' ' * indent}{''.join(pieces)}"
        first, *more = self._broken(f"{lead}{printable(last.text)}", len(lead) + last.indent)
        if lead.isspace():  # in a narrow window its blanks give way
            leading, pieces, indent = [], [], 0
        painted = first[:indent]
        for cell, piece in zip(leading, pieces, strict=True):
            part = first[indent : indent + len(piece)]
            text = part.strip(" ")
            painted += part.replace(text, self.paint(text, cell.style), 1) if text else part
            indent += len(piece)
        yield f"{painted}{self.paint(first[indent:], last.style)}".rstrip()
        for part in more:
            yield self.paint(part, last.style)

    def _broken(self, text: str, indent: int) -> list[str]:
        if self.width is None or len(text) <= self.width:
            return [text]
        bare = text.lstrip(" ")
        most = self.width - _MIN_TEXT
        return wrap(
            bare,
            self.width,
            initial_indent=" " * min(len(text) - len(bare), most),
            subsequent_indent=" " * min(indent, most),
            break_on_hyphens=False,
        )


def printable(text: str) -> str:
    """The text in one line: without colours, and with each control character as its code."""
    if text.isprintable():
        return text
    text = re.sub(_COLOR_SEQUENCE, "", text).replace("\t", "    ")
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def print_error(text: str) -> None:
    """Print the lines on standard error, without what could control a terminal: they may repeat an argument."""
    print(*map(printable, text.split("\n")), sep="\n", file=sys.stderr)


def print_json(value: object, *, is_line: bool = False) -> None:
    """Print a value as docs/json.md describes. The json module is used: a hook's output may be invalid UTF-8."""
    print(json.dumps(to_builtins(value), indent=None if is_line else 2), flush=is_line)


@contextmanager
def warn_if_slow(text: str) -> Iterator[None]:
    """Print the text on standard error if the body takes longer than three seconds."""
    timer = threading.Timer(_SLOW_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
