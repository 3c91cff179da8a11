"""Any service, here one that works off a queue: docs/cookbook/service.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import os
import platform
from itertools import pairwise
from pathlib import Path

from examples import ServiceManager, Unit, copy_hooks, example
from frame import Outcome, Recipe, Way
from harness import Agent

UNIT = "worker.service"


class Worker(Recipe):
    title = "A unit that works off a queue"
    page = "docs/cookbook/service.md"
    load = "four jobs at a time, of 3 s each; `SERVICE_DRAIN` has it begin none, and waits until none runs"
    columns = ("jobs cut off", "longest time without a finished job")

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._observer = Agent(place / "observer", "")  # it only waits
        self._queue = place / "queue"
        self._queue.mkdir()
        run = (sys.executable, "-IS", str(Path(__file__).with_name("worker.py")), str(self._queue))
        self._manager = ServiceManager(place / "bin", {UNIT: Unit(run)})

    def start(self) -> None:
        self.ends.enter_context(self._manager)

    def versions(self) -> str:
        return f"Python {platform.python_version()}"

    def write_policy(self, agent: Agent) -> None:
        drain = f"touch {self._queue}/drain; until [ -e {self._queue}/idle ]; do sleep 0.1; done"
        more = {
            "PATH": f"{self._manager.directory}:{os.environ['PATH']}",
            "SERVICE_MARK": str(self.place / "mark"),
            "SERVICE_DRAIN": drain,
            "SERVICE_RESUME": f"rm -f {self._queue}/drain",
        }
        replacements = {
            "web.service ": f"{UNIT} ",
            "      SERVICE_HEALTH: http://127.0.0.1:8080/health\n": "".join(
                f"      {key}: '{value}'\n" for key, value in more.items()
            ),
        }
        policy = example("service.yaml", copy_hooks(self.place), agent.endpoint, replacements)
        agent.config.write_text(policy, encoding="utf-8")

    def start_load(self) -> None:
        self._manager.start(UNIT)
        self.settle()

    def stop_service(self) -> None:
        self._manager.stop(UNIT)

    def go_down(self) -> None:
        self._manager.power_off(UNIT)

    def come_back(self) -> None:
        self._manager.start(UNIT)

    def settle(self) -> None:
        before = len(self._times("ends"))
        self._observer.wait_until(lambda: len(self._times("ends")) > before, "jobs were done")

    def finish(self) -> Outcome:
        (self._queue / "drain").touch()
        self._observer.wait_until((self._queue / "idle").exists, "the last jobs were done")
        begun, ended = self._times("begins"), self._times("ends")
        longest = max(later - earlier for earlier, later in pairwise(ended))
        return Outcome(failed=len(begun) - len(ended), total=len(begun), outage_seconds=longest)

    def _times(self, what: str) -> list[float]:
        notes = self._queue / "notes"
        lines = notes.read_text("utf-8").splitlines() if notes.exists() else []
        return [float(line.split()[0]) for line in lines if line.endswith(what)]
