"""The rows of the table; and the record of a complete run, in docs/benchmarks.json and on docs/benchmarks.md."""

import math
import os
import platform
import re
import sqlite3
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

import scheduled_events_agent

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "benchmarks.md"
RECORD = CHECKOUT / "docs" / "benchmarks.json"
SIDES = ("agent", "httpx", "http.client")
MAX_LOAD_PER_CORE = 0.5
"""A machine with a higher load average is busy."""
_LINE = "{:<57}{:>6}{:>10}{:>10}{:>12}  {}"
HEADER = _LINE.format("figure", "n", *SIDES, "target")
_SECTION = re.compile(r"^## The last run\n.*?(?=\n## )", re.MULTILINE | re.DOTALL)


class UnfitError(Exception):
    """A complete run makes no sense here and now, or its figures belong to no commit."""


class Row(msgspec.Struct, frozen=True):
    figure: str
    """With its unit."""
    samples: int
    values: dict[str, float]
    """By side. Some figures exist for the agent alone."""
    target: float | None
    """What the agent's value may be at most."""


class Run(msgspec.Struct, frozen=True):
    commit: str
    began_at: datetime
    agent: str
    python: str
    libraries: dict[str, str]
    """The version of everything that the packages bring, and of SQLite."""
    kernel: str
    cores: int
    load_before: float
    load_after: float = 0.0
    minutes: int = 0
    rows: list[Row] = []

    @property
    def is_busy(self) -> bool:
        return self.load_before > MAX_LOAD_PER_CORE * self.cores


def row(figure: str, samples: Sequence[Sequence[float]], target: float | None = None, percent: int = 50) -> Row:
    """Reduce samples to a row. Each has the agent's value and, if they have one, those of the bare loops.

    ``percent``: which percentile is the figure, the smallest value that this part of all does not exceed.
    """
    last = math.ceil(len(samples) * percent / 100) - 1
    values = [round(sorted(column)[last], 2) for column in zip(*samples, strict=True)]
    return Row(figure, len(samples), dict(zip(SIDES, values, strict=False)), target)


def format_row(row: Row) -> str:
    cells = [f"{row.values[side]:.2f}" if side in row.values else "-" for side in SIDES]
    verdict = ""
    if row.target is not None:
        verdict = f"<= {row.target:g} " + ("met" if row.values["agent"] <= row.target else "MISSED")
    return _LINE.format(row.figure, f"{row.samples:,}", *cells, verdict).rstrip()


def begin(is_busy_allowed: bool) -> Run:
    """Describe the run that begins now; raises UnfitError."""
    pinned = (CHECKOUT / "packaging" / "requirements.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([\w.-]+)==", pinned, re.MULTILINE)
    run = Run(
        commit=_commit(),
        began_at=datetime.now(UTC).replace(microsecond=0),
        agent=scheduled_events_agent.__version__,
        python=platform.python_version(),
        libraries={name: metadata.version(name) for name in names} | {"SQLite": sqlite3.sqlite_version},
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        load_before=round(psutil.getloadavg()[0], 2),
    )
    if run.is_busy and not is_busy_allowed:
        limit = f"{MAX_LOAD_PER_CORE:g} for each of {run.cores} cores"
        raise UnfitError(f"the load average is {run.load_before:.2f}, above {limit}: wait, or measure --anyway")
    return run


def end(run: Run, rows: list[Row]) -> Run:
    """Complete the description of a run that ends now; raises UnfitError."""
    load_after = round(psutil.getloadavg()[0], 2)
    if _commit() != run.commit:
        raise UnfitError("another commit was checked out during the run: nothing is written")
    minutes = round((datetime.now(UTC) - run.began_at).total_seconds() / 60)
    return msgspec.structs.replace(run, load_after=load_after, minutes=minutes, rows=rows)


def _commit() -> str:
    """The commit that is checked out; raises UnfitError if it is not what runs."""
    if not Path(scheduled_events_agent.__file__).is_relative_to(CHECKOUT):
        raise UnfitError(f"{scheduled_events_agent.__file__} would be measured, not the agent in {CHECKOUT}")
    if changes := _git("status", "--porcelain"):
        raise UnfitError(f"there are changes without a commit:\n{changes}")
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnfitError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.rstrip()


def render(run: Run) -> str:
    """The section of the page about a run, from its heading on."""
    versions = ", ".join(f"{name} {version}" for name, version in run.libraries.items())
    facts = [
        f"Agent {run.agent}, commit `{run.commit}`",
        f"Began at {run.began_at:%Y-%m-%d %H:%M} UTC, took {run.minutes} minutes",
        f"{run.cores} cores, {run.kernel}; load average {run.load_before:.2f} before, {run.load_after:.2f} after",
        f"Python {run.python}, {versions}",
    ]
    if run.is_busy:
        facts.append("**The machine was busy when it began.** On a calm one the figures are better.")
    lines = (
        "## The last run",
        "",
        "All rows are from one run, which `make bench` wrote here and into [benchmarks.json](benchmarks.json).",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "```",
        HEADER,
        *map(format_row, run.rows),
        "```",
    )
    return "\n".join(lines) + "\n"


def section_of(page: str) -> str:
    """The section of the page about a run, as it stands there."""
    (section,) = _SECTION.findall(page)
    return str(section)


def write(run: Run) -> None:
    """Replace the run before, in the JSON and on the page."""
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(section_of(page), render(run)), encoding="utf-8")
