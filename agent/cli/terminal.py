"""What people read: lines that fit a terminal, with colours there, and plain ones anywhere else.

Owns widths, colours, redrawing, and the cleaning of what came from outside. Knows nothing of events. The one
invariant: no control character is printed but those that stand here, whatever a description or a hook says.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal, Self, TextIO

from agent import AgentError

FIRST_ANSWER_IS_SLOW = "waits for the metadata service, whose very first answer may take two minutes"

Style = Literal["", "bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "1;33", "cyan": "36"}
# Lines of text that are longer than this are tiring to read, however wide the window.
_MAX_WIDTH = 120
_MIN_WIDTH = 40
_MIN_TEXT = 18
_SLOW_SECONDS = 3.0
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
        """The text in as many lines as it needs, the further ones indented by this, or less in a narrow window."""
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
                lines.append(f"{' ' * indent}{self.paint(label, 'dim')}{self.paint(part.lstrip(' '), row.style)}")
        return [line.rstrip() for line in lines]

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


def print_json(value: object) -> None:
    """As docs/json.md describes it. Not by msgspec alone: a hook's output may be no text in UTF-8's sense."""
    from msgspec import to_builtins  # noqa: PLC0415 - heavy, and --help does not need it

    print(json.dumps(to_builtins(value), indent=2))


@contextmanager
def remark_if_slow(text: str) -> Iterator[None]:
    """Say this on standard error if what is done within takes long, lest the silence be taken for a fault."""
    timer = threading.Timer(_SLOW_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch(look: Callable[[Terminal], View]) -> None:
    """Show what there is each second until Ctrl-C: redrawn on a terminal, else printed anew when it changes."""
    essence: Hashable = object()
    is_first = True
    with _CtrlC() as ctrl_c:
        while not ctrl_c.is_pressed:
            terminal = Terminal.of(sys.stdout)
            view = _look_aside(look, terminal, ctrl_c)
            if view is None:
                return
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
            ctrl_c.wait(1.0)


class _CtrlC:
    """Ctrl-C as something to wait for.

    It is noted, and not raised: Python runs finalizers at any moment, and drops what is raised in one. The second
    one is raised as usual, so that nothing can hang for good.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self._ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)  # a signal must not wait for whoever hears it

    def __enter__(self) -> Self:
        self._bell_before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        self._handler_before = signal.getsignal(signal.SIGINT)
        if self._handler_before is not signal.SIG_IGN:  # as it is for what a script runs in the background
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._handler_before)
        signal.set_wakeup_fd(self._bell_before)
        self._bell.close()
        self._ear.close()

    def wait(self, seconds: float | None = None) -> None:
        """Until it is pressed, somebody rings, or the time is over."""
        self._ear.settimeout(seconds)
        with suppress(TimeoutError):
            self._ear.recv(1)

    def ring(self) -> None:
        """End the wait, from another thread; in vain if nobody waits any more."""
        with suppress(OSError):
            self._bell.send(b"\0")

    def _note(self, *_: object) -> None:
        self.is_pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _look_aside(look: Callable[[Terminal], View], terminal: Terminal, ctrl_c: _CtrlC) -> View | None:
    """What there is to be seen; None if Ctrl-C came first: to look may take minutes, and nobody waits for that."""
    seen: View | BaseException | None = None

    def run() -> None:
        nonlocal seen
        try:
            seen = look(terminal)
        except BaseException as error:  # noqa: BLE001 - it goes on where the result is wanted
            seen = error
        ctrl_c.ring()

    threading.Thread(target=run, name="look", daemon=True).start()
    ctrl_c.wait()
    if ctrl_c.is_pressed:
        return None
    if isinstance(seen, AgentError):  # it may be better in a second
        return View(terminal.line(str(seen), "red"), str(seen))
    if isinstance(seen, BaseException):
        raise seen
    return seen
