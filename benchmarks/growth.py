"""What may grow over a soak, and by how much: a line is fitted to the samples of each measure."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Allowance(NamedTuple):
    """How much of something may come over the run; by the line, or (``bound``) at any time in all."""

    unit: str
    absolute: float
    relative: float = 0.0
    bound: float | None = None


ALLOWED = {
    # An answer that is too large is read up to 8 MiB, and the allocator keeps some of that for a while.
    "resident memory between faults": Allowance("MiB", 2.0),
    "resident memory in the worst moment": Allowance("MiB", 0.0, bound=80.0),
    "file descriptors": Allowance("", 1.0),
    "threads": Allowance("", 1.0),
    "state file": Allowance("KiB", 64.0, 0.1),
    # Its size is what it once needed: SQLite goes back to its beginning, and does not shorten it.
    "write-ahead log of it": Allowance("KiB", 0.0, bound=16 * 1024.0),
    "rows of the journal": Allowance("", 50.0, 0.1),
    "rows of workflows": Allowance("", 10.0, 0.1),
    "rows of requests": Allowance("", 10.0, 0.1),
    "state file, agent that is killed": Allowance("KiB", 64.0, 0.1),
    "write-ahead log of that": Allowance("KiB", 0.0, bound=16 * 1024.0),
}


class Sample(NamedTuple):
    """What was measured at one time."""

    at: float
    values: dict[str, float]


class Verdict(NamedTuple):
    """One row of the table."""

    what: str
    unit: str
    least: float
    most: float
    growth: float
    allowed: str
    is_met: bool


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Fit a line to each measure and say whether it is flat enough. Needs two samples at least."""
    verdicts = []
    span = samples[-1].at - samples[0].at
    for what, allowance in ALLOWED.items():
        values = [sample.values[what] for sample in samples]
        growth = statistics.linear_regression([sample.at for sample in samples], values).slope * span
        if allowance.bound is not None:
            allowed, is_met = f"at most {allowance.bound:,.0f} in all", max(values) <= allowance.bound
        else:
            most = allowance.absolute + allowance.relative * statistics.fmean(values)
            allowed, is_met = f"growth of {most:,.1f}", growth <= most
        verdicts.append(Verdict(what, allowance.unit, min(values), max(values), growth, allowed, is_met))
    return verdicts
