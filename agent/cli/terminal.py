"""What people read: lines that fit a terminal, with colours there, and plain ones anywhere else.

Owns widths, colours, redrawing, and the cleaning of what came from outside. Knows nothing of events. The one
invariant: no control character is printed but those that stand here, whatever a description or a hook says.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal, TextIO

from agent import AgentError

Style = Literal["", "bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "1;33", "cyan": "36"}
# Lines of text that are longer than this are tiring to read, however wide the window.
_MAX_WIDTH = 120
_MIN_WIDTH = 40
_COLOR_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Row:
    """A word and what there is to say of it."""

    label: str
    text: str
    style: Style = ""


@dataclass(frozen=True)
class Terminal:
    """Where it is printed to."""

    width: int | None
    """Columns; None where nobody looks: lines are not broken there, so that each fact stays in its line."""
    height: int
    """Lines of the window; 0 where there is none."""
    has_colors: bool
    can_redraw: bool

    @classmethod
    def of(cls, stream: TextIO) -> "Terminal":
        """What stands behind the stream. NO_COLOR takes the colours, TERM=dumb redrawing too."""
        from agent import host  # noqa: PLC0415 - heavy, and --help does not need it

        if not stream.isatty():
            return cls(width=None, height=0, has_colors=False, can_redraw=False)
        size = shutil.get_terminal_size()
        understands = host.has_terminal_colors() and os.environ.get("TERM") != "dumb"
        return cls(
            width=max(_MIN_WIDTH, min(_MAX_WIDTH, size.columns)),
            height=size.lines,
            has_colors=understands and not os.environ.get("NO_COLOR"),
            can_redraw=understands,
        )

    def paint(self, text: str, style: Style = "") -> str:
        """The text, clean, and in this style where there are colours."""
        clean = printable(text)
        return f"\x1b[{_CODES[style]}m{clean}\x1b[0m" if style and clean and self.has_colors else clean

    def line(self, text: str, style: Style = "", *, indent: int = 0) -> list[str]:
        """The text in as many lines as it needs, the further ones indented by this."""
        return [self.paint(part, style) for part in self._broken(printable(text), indent)]

    def rows(self, rows: Iterable[Row], *, indent: int = 2) -> list[str]:
        """The rows with their texts in one column."""
        rows = list(rows)
        column = max((len(row.label) for row in rows), default=0) + 2
        lines = []
        for row in rows:
            parts = self._broken(f"{' ' * (indent + column)}{printable(row.text)}", indent + column)
            for index, part in enumerate(parts):
                label = f"{'' if index else printable(row.label):<{column}}"
                lines.append(
                    f"{' ' * indent}{self.paint(label, 'dim')}{self.paint(part[indent + column :], row.style)}"
                )
        return [line.rstrip() for line in lines]

    def _broken(self, text: str, indent: int) -> list[str]:
        if self.width is None or len(text) <= self.width:
            return [text]
        bare = text.lstrip(" ")
        lead = " " * (len(text) - len(bare))
        return wrap(
            bare,
            max(self.width, indent + _MIN_WIDTH // 2),
            initial_indent=lead,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )


@dataclass(frozen=True)
class View:
    """What is to be seen at one moment."""

    lines: list[str]
    essence: Hashable
    """What of it is news when it changes; not how much time has passed."""


def printable(text: str) -> str:
    """The text in one line; each control character as its code, and colours gone."""
    if text.isprintable():
        return text
    text = _COLOR_SEQUENCE.sub("", text).replace("\t", "    ")
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def watch(look: Callable[[Terminal], View]) -> None:
    """Show what there is each second until Ctrl-C: redrawn on a terminal, else printed anew when it changes."""
    essence: Hashable = object()
    is_first = True
    try:
        while True:
            terminal = Terminal.of(sys.stdout)
            try:
                view = look(terminal)
            except AgentError as error:  # it may be better in a second
                view = View(terminal.line(str(error), "red"), str(error))
            if terminal.can_redraw:
                # Over the old picture, so that nothing flickers; what the window does not hold is cut.
                lines = view.lines
                if len(lines) >= terminal.height:
                    more = f"... {len(lines) - terminal.height + 2} more lines; without --watch there are all"
                    lines = [*lines[: max(1, terminal.height - 2)], terminal.paint(more, "dim")]
                start = "\x1b[2J\x1b[H" if is_first else "\x1b[H"
                print(start + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)
            elif view.essence != essence:
                print(*([] if is_first else [""]), *view.lines, sep="\n", flush=True)
            essence, is_first = view.essence, False
            time.sleep(1.0)
    except KeyboardInterrupt:
        return
