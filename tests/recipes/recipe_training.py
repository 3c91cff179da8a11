"""A training job under torchrun: docs/cookbook/training.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

from pathlib import Path
from typing import ClassVar

import torch_job
from frame import Outcome, Recipe, Way
from harness import PATIENCE, Agent
from training_job import UNIT, Job

from scheduled_events_agent.simulator.azure import EventType


class _Training(Recipe):
    page = "docs/cookbook/training.md"
    columns = ("steps of work lost", "time without training")
    counts_notice = True  # what is lost is the work until then
    load = "two workers under torchrun, on CPU; no periodic checkpoint falls into the run"

    _job: Job

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._progress = place / "disk" / "progress"
        self._last_step = 0
        self._stood_still_at = 0.0
        self._went_on_at = 0.0

    def start(self) -> None:
        self._job = self.ends.enter_context(torch_job.torch_job(self.place))

    def versions(self) -> str:
        return f"PyTorch {torch_job.version()}"

    def write_policy(self, agent: Agent) -> None:
        self._job.give_policy(agent)

    def start_load(self) -> None:
        self._job.manager.start(UNIT)
        self._wait_step()

    def stop_service(self) -> None:
        self._job.manager.stop(UNIT)

    def go_down(self) -> None:
        self._job.manager.power_off(UNIT)
        self._last_step = int(self._progress.read_text(encoding="utf-8"))
        self._stood_still_at = self._progress.stat().st_mtime

    def come_back(self) -> None:
        self._progress.unlink()
        self._job.manager.start(UNIT)

    def settle(self) -> None:
        self._wait_step()
        self._went_on_at = self._progress.stat().st_mtime

    def finish(self) -> Outcome:
        goes_on_from = self._job.numbers(r"rank 0 begins after step (\d+) with \S+")[-1]
        lost = self._last_step - goes_on_from
        return Outcome(lost, self._last_step, outage_seconds=self._went_on_at - self._stood_still_at)

    def _wait_step(self) -> None:
        observer = Agent(self.place / "observer", "")  # it only waits
        observer.wait_until(self._progress.exists, "the job trained", 2 * PATIENCE)


class Evicted(_Training):
    title = "A training job on a Spot VM"
    case = "eviction"
    event: ClassVar[EventType] = "Preempt"
    notice_seconds = 30.0


class Rebooted(_Training):
    title = "A training job"
    case = "reboot"
