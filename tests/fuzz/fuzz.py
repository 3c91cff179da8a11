"""``python tests/fuzz/fuzz.py``: gives every reader of foreign bytes a million inputs, and reports what they did.

Each target runs in a process of its own, whose address space is bounded and whose resident memory must not grow.
This one watches them: an input that hangs or kills the process is found as well. Invariant: a fault is reported
with the seed that makes its input again.

    python tests/fuzz/fuzz.py                            a million inputs
    python tests/fuzz/fuzz.py --seed 7000000             a million others
    python tests/fuzz/fuzz.py --replay policy:1234       one input: shows it, and what it does
    python tests/fuzz/fuzz.py --file policy:crash.bin    the same with the bytes of a file
    python tests/fuzz/fuzz.py --guided policy            guided by coverage (pip install atheris)
"""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_FIRST = 10
"""Faults of one target after which there is no use in going on."""
_SLOW_SECONDS = 5.0
"""Seconds of the processor for one input."""
_HANG_SECONDS = 120.0
_ADDRESS_SPACE = 2 << 30
_GROWTH = 48 << 20
"""Growth of resident memory, from a quarter of the inputs to the last one."""
_PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Fault:
    """One input that was not survived."""

    target: str
    seed: int
    text: str
    """What was raised, or what became of the process."""

    def __str__(self) -> str:
        from inputs import make_input

        data = make_input(self.target, self.seed)
        shown = repr(data[:400]) + ("..." if len(data) > 400 else "")
        return (
            f"FAULT {self.target}, seed {self.seed}, {len(data)} bytes: {shown}\n{self.text}\n"
            f"again: python tests/fuzz/fuzz.py --replay {self.target}:{self.seed}"
        )


@dataclass(frozen=True)
class Report:
    """The results of one target's inputs."""

    target: str
    inputs: int
    seconds: float
    slowest_seconds: float
    slowest_seed: int
    peak_bytes: int
    growth_bytes: int
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.target:9} {self.inputs:>8} inputs {self.seconds:7.1f} s {self.inputs / self.seconds:7.0f}/s"
            f"  slowest {1000 * self.slowest_seconds:6.1f} ms (seed {self.slowest_seed})"
            f"  memory {self.peak_bytes >> 20} MiB, grew {self.growth_bytes / (1 << 20):+.1f} MiB"
            f"  {len(self.faults)} faults"
        )


def fuzz_target(target: str, first: int, count: int, at: Any = None) -> Report:
    """Give a target the inputs of ``count`` seeds from ``first`` on; ``at.value`` tells others the present one."""
    import psutil
    from inputs import make_input
    from targets import TARGETS

    check = TARGETS[target].check
    process, parent = psutil.Process(), multiprocessing.parent_process()
    faults: list[Fault] = []
    slowest, base, peak, resident = (0.0, first), 0, 0, 0
    began = time.perf_counter()
    done = 0
    for seed in range(first, first + count):
        if at is not None:
            at.value = seed
        data = make_input(target, seed)
        began_cpu = time.process_time()
        try:
            check(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is a fault
            faults.append(Fault(target, seed, traceback.format_exc(limit=-4)))
        took = time.process_time() - began_cpu
        slowest = max(slowest, (took, seed))
        if took > _SLOW_SECONDS:
            faults.append(Fault(target, seed, f"took {took:.1f} s of the processor"))
        done += 1
        if len(faults) >= _FIRST:
            break
        if done % 500 == 0 and parent is not None and not parent.is_alive():
            break
        if done % 500 == 0 or done == count:
            resident = process.memory_info().rss
            peak = max(peak, resident)
            if done <= count // 4 or not base:
                base = resident
    growth = resident - base
    if growth > _GROWTH:
        faults.append(Fault(target, first, f"memory grew by {growth >> 20} MiB"))
    seconds = time.perf_counter() - began
    return Report(target, done, seconds, *slowest, peak, growth, tuple(faults))


def _work(target: str, first: int, count: int, at: Any, results: Connection) -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    results.send(fuzz_target(target, first, count, at))


@dataclass
class _Run:
    """A target's process, and the seed that it is at."""

    target: str
    first: int
    count: int
    results: Any
    at: Any
    process: Any
    seed: int = -1
    since: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        return self._has_report() or not self.process.is_alive()

    def _has_report(self) -> bool:
        try:
            has_report: bool = self.results.poll()
        except (
            BrokenPipeError
        ):  # what Windows says when the other end is gone; Linux says there is something to read
            return True
        return has_report

    def hangs(self) -> bool:
        if self.at.value != self.seed:
            self.seed, self.since = self.at.value, time.monotonic()
        return time.monotonic() - self.since > _HANG_SECONDS

    def end(self) -> Report:
        """The process's report, or what can be said of one that could not make it."""
        seed = self.at.value
        try:
            if self.process.is_alive() and not self._has_report():
                self.process.kill()
                raise EOFError
            report: Report = self.results.recv()
        except (EOFError, BrokenPipeError):
            self.process.join()
            text = f"the process hangs or died, with exit code {self.process.exitcode}"
            fault = Fault(self.target, seed, text)
            report = Report(self.target, seed - self.first + 1, 1.0, 0.0, seed, 0, 0, (fault,))
        self.process.join()
        return report


def fuzz(shares: dict[str, int], first: int, jobs: int) -> list[Report]:
    """Give each target its number of inputs, some targets at a time; prints progress and reports."""
    context = multiprocessing.get_context("spawn")
    waiting = sorted(
        shares, key=lambda target: target not in ("policy", "story", "scenario")
    )  # the slow ones first
    running: list[_Run] = []
    reports: list[Report] = []
    told = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            target = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            at = context.Value("q", first, lock=False)
            arguments = (target, first, shares[target], at, sender)
            process = context.Process(target=_work, args=arguments, name=target)
            process.start()
            sender.close()
            running.append(_Run(target, first, shares[target], receiver, at, process))
        for run in list(running):
            if run.is_over() or run.hangs():
                running.remove(run)
                reports.append(run.end())
                print(reports[-1], *reports[-1].faults, sep="\n", flush=True)
        if time.monotonic() - told > _PROGRESS_SECONDS:
            told = time.monotonic()
            now = ", ".join(f"{run.target} {run.at.value - first} of {run.count}" for run in running)
            print(f"... {now}", file=sys.stderr, flush=True)
        time.sleep(0.05)
    return reports


def _replay(target: str, data: bytes) -> int:
    from targets import TARGETS

    print(f"{len(data)} bytes:\n{data.decode('utf-8', 'backslashreplace')}\n{data!r}")
    began = time.process_time()
    try:
        TARGETS[target].check(data)
    except Exception:  # noqa: BLE001 - whatever it is, it is a fault
        traceback.print_exc()
        return 1
    print(f"survived in {1000 * (time.process_time() - began):.1f} ms")
    return 0


def _guided(target: str, seconds: int, directory: Path) -> None:
    """Let atheris look for inputs that reach new code; it ends the process."""
    import importlib

    atheris: Any = importlib.import_module("atheris")  # it is no dependency: 35 MB, for Linux alone
    with atheris.instrument_imports(include=["scheduled_events_agent"]):
        from inputs import corpus
        from targets import TARGETS
    directory.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(corpus(target)):
        (directory / f"seed-{number}").write_bytes(text)
    options = [f"-max_total_time={seconds}", "-max_len=16384", "-timeout=30", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], str(directory), f"-artifact_prefix={directory}-", *options], TARGETS[target].check)
    atheris.Fuzz()


def shares_of(inputs: int, targets: Sequence[str] = ()) -> dict[str, int]:
    """How many of so many inputs each target gets."""
    from targets import TARGETS

    chosen = {name: target.share for name, target in TARGETS.items() if not targets or name in targets}
    total = sum(chosen.values())
    return {name: -(-inputs * share // total) for name, share in chosen.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every input was survived."""
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz/fuzz.py",
        description="Give every reader of foreign bytes inputs that no sane sender makes.",
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, metavar="N", help="how many in all (a million)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="targets at a time (2)")
    parser.add_argument(
        "--target", action="append", default=[], metavar="NAME", help="only this one; again for more"
    )
    parser.add_argument("--replay", metavar="NAME:SEED", help="one input again")
    parser.add_argument("--file", metavar="NAME:PATH", help="the bytes of a file")
    parser.add_argument("--guided", metavar="NAME", help="guided by coverage, with atheris")
    parser.add_argument("--seconds", type=int, default=600, metavar="N", help="for --guided (600)")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="for --guided: where to keep what it finds")
    given = parser.parse_args(arguments)
    if given.guided:
        _guided(given.guided, given.seconds, given.corpus or Path("fuzz-corpus") / given.guided)
        return 0
    if given.file:
        target, _, path = given.file.partition(":")
        return _replay(target, Path(path).read_bytes())
    if given.replay:
        from inputs import make_input

        target, _, seed = given.replay.partition(":")
        return _replay(target, make_input(target, int(seed)))
    began = time.monotonic()
    reports = fuzz(shares_of(given.inputs, given.target), given.seed, given.jobs)
    faults = sum(len(report.faults) for report in reports)
    print(f"{sum(r.inputs for r in reports)} inputs in {time.monotonic() - began:.0f} s, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
