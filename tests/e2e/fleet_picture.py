"""Draws docs/fleet.svg from what the demo prints.

python -m agent demo fleet | python tests/e2e/fleet_picture.py
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "fleet.svg"

# What the demo says, and what the one it says it of does from then on.
_STEPS = (
    (r"announces (\w+ \w+),", "announced"),
    (r"gets the approval of (\w+ \w+)", "approved"),
    (r"starts (\w+ \w+)", "started"),
    (r"is done with (\w+ \w+)", ""),
    (r"waits for a slot: ", "waits for a slot"),
    (r"preparation begins: drain|drain: taking ", "drains"),
    (r"hook drain: exit code 0 ", "is drained, until the event is over"),
    (r"its agent is killed", "its agent is dead"),
    (r"recovery begins: resume", "recovers"),
    (r"is over: completed", ""),
)
_COLOURS_OF_EVENTS = {"announced": "#d0d7de", "approved": "#8250df", "started": "#cf222e"}
_COLOURS_OF_VMS = {
    "waits for a slot": "#eac54f",
    "drains": "#54aeff",
    "is drained, until the event is over": "#4ac26b",
    "its agent is dead": "#57606a",
    "recovers": "#116329",
}
_COLOURS = _COLOURS_OF_EVENTS | _COLOURS_OF_VMS
_LEFT, _SECOND, _ROW, _BAR = 130, 16, 24, 14


class Bar(NamedTuple):
    """What one of them did for a while."""

    row: str
    """A VM, or an event."""
    state: str
    begin: float
    end: float


def bars_of(told: Iterable[str]) -> list[Bar]:
    """What the lines of the demo tell, by time; in seconds since the first."""
    now: dict[str, tuple[str, float]] = {}
    bars = []
    for line in told:
        if (match := re.match(r" *([\d.]+)s  (\S+) +(.*)", line)) is None:
            continue
        at, row, text = float(match[1]), match[2], match[3]
        for pattern, state in _STEPS:
            if said := re.match(pattern, text):
                name = said[1] if said.re.groups else row
                before, since = now.pop(name, ("", at))
                if before == state:
                    now[name] = (before, since)
                    break
                if before:
                    bars.append(Bar(name, before, since, at))
                if state:
                    now[name] = (state, at)
                break
    bars.sort(key=lambda bar: bar.begin)
    first = bars[0].begin if bars else 0.0
    return [bar._replace(begin=round(bar.begin - first, 1), end=round(bar.end - first, 1)) for bar in bars]


def states_of(bars: Iterable[Bar]) -> dict[str, list[str]]:
    """What each does, in order; an event by its type and number, as its id is another each time."""
    bars = list(bars)
    events = list(dict.fromkeys(bar.row for bar in bars if " " in bar.row))
    names = {row: f"{row.split()[0]} {index}" for index, row in enumerate(events)}
    found: dict[str, list[str]] = {}
    for bar in bars:
        found.setdefault(names.get(bar.row, bar.row), []).append(bar.state)
    return found


def draw(bars: list[Bar]) -> Iterator[str]:
    """The lines of the picture."""
    events = list(dict.fromkeys(bar.row for bar in bars if " " in bar.row))
    rows = [*events, *sorted({bar.row for bar in bars} - set(events))]
    last = max(bar.end for bar in bars)
    legend = (len(rows) + 1) * _ROW + 14
    width, height = int(_LEFT + (last + 2) * _SECOND), legend + len(_COLOURS_OF_VMS) * 20
    style = 'font-family="sans-serif" font-size="12"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {style}>'
    yield "<title>What scheduled-events-agent demo fleet printed: three events and five VMs, by seconds</title>"
    yield f'<rect width="{width}" height="{height}" fill="#fff"/>'
    for second in range(0, int(last) + 1, 5):
        x = _LEFT + second * _SECOND
        yield f'<path d="M{x} 4V{legend - 20}" stroke="#d0d7de"/><text x="{x}" y="{legend - 8}">{second} s</text>'
    for index, row in enumerate(rows):
        yield f'<text x="4" y="{index * _ROW + 19}">{escape(row)}</text>'
    for row, state, begin, end in bars:
        place = f'x="{_LEFT + begin * _SECOND:.1f}" y="{rows.index(row) * _ROW + 8}"'
        size = f'width="{max(2.0, (end - begin) * _SECOND):.1f}" height="{_BAR}"'
        title = f"{row} {state}: {begin:.1f} s to {end:.1f} s"
        yield f'<rect {place} {size} fill="{_COLOURS[state]}"><title>{escape(title)}</title></rect>'
    for x, who, colours in ((4, "event", _COLOURS_OF_EVENTS), (_LEFT + 100, "VM", _COLOURS_OF_VMS)):
        for y, (state, colour) in enumerate(colours.items()):
            yield f'<rect x="{x}" y="{legend + y * 20}" width="14" height="{_BAR}" fill="{colour}"/>'
            yield f'<text x="{x + 20}" y="{legend + y * 20 + 11}">{who}: {escape(state)}</text>'
    yield "</svg>"


def drawn_bars(picture: str) -> list[Bar]:
    """What the picture shows, by time."""
    titles = re.findall(r"<title>(\S+(?: [0-9A-F]{8})?) (.+): ([\d.]+) s to ([\d.]+) s<", picture)
    return [Bar(row, state, float(begin), float(end)) for row, state, begin, end in titles]


if __name__ == "__main__":
    PICTURE.write_text("\n".join(draw(bars_of(sys.stdin))) + "\n", encoding="utf-8")
