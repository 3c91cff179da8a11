"""A Slurm node: docs/cookbook/slurm.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import time
from pathlib import Path

from frame import Outcome, Recipe, Way
from harness import Agent
from one_node import Slurm

JOBS = 8
JOB_SECONDS = 10
# After the machine is back: all jobs one after the other, and half as long again.
FAIR_SECONDS = 1.5 * JOBS * JOB_SECONDS


class SlurmNode(Recipe):
    title = "A Slurm node"
    page = "docs/cookbook/slurm.md"
    load = f"{JOBS} jobs of {JOB_SECONDS} s, one at a time; done {FAIR_SECONDS:.0f} s after the reboot or failed"
    columns = ("jobs failed",)
    notice_seconds = 30.0
    counts_notice = True  # jobs are done meanwhile

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._slurm = Slurm(place)
        self._agent = Agent(place / "observer", "")  # it only waits
        self._done = place / "done"
        self._done.mkdir()

    def start(self) -> None:
        self.ends.callback(self._slurm.close)
        self._slurm.start_all(self._agent)

    def versions(self) -> str:
        return self._slurm.run("scontrol", "--version")

    def write_policy(self, agent: Agent) -> None:
        agent.config.write_text(self._slurm.policy(agent.endpoint), encoding="utf-8")

    def start_load(self) -> None:
        first, *_ = [
            self._slurm.submit(f"sleep {JOB_SECONDS} && touch {self._done}/{number}") for number in range(JOBS)
        ]
        self._agent.wait_until(lambda: self._slurm.job(first) == "R", "the first job ran")

    def stop_service(self) -> None:
        self._slurm.stop("slurmd")

    def go_down(self) -> None:
        self._slurm.cut_power()

    def come_back(self) -> None:
        self._slurm.boot_node(self._agent)

    def settle(self) -> None:
        until = time.monotonic() + FAIR_SECONDS
        while self._count() < JOBS and time.monotonic() < until:
            time.sleep(0.5)

    def finish(self) -> Outcome:
        return Outcome(failed=JOBS - self._count(), total=JOBS)

    def _count(self) -> int:
        return len(list(self._done.iterdir()))
