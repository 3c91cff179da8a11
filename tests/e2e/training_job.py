"""A training job as a unit, with the example policy for it: one process (trainer.py), or workers (launcher.py)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples import ServiceManager, Unit, copy_hooks, example
from harness import PATIENCE, Agent

UNIT = "training.service"
TRAINER = Path(__file__).with_name("trainer.py")
LAUNCHER = Path(__file__).with_name("launcher.py")
NEVER = 10**9  # steps


class Job:
    """A training job, the disk with its checkpoint that outlives a VM, and the policy for it."""

    def __init__(self, directory: Path, manager: ServiceManager, checkpoint: str) -> None:
        self.manager = manager
        self.checkpoint = directory / "disk" / checkpoint
        self.mark = directory / "stopped-by-agent"
        self._hooks = copy_hooks(directory)

    def boot(self, agent: Agent) -> None:
        """Start the unit, for it is enabled, and the agent of a VM that has nothing of the one before."""
        self.mark.unlink(missing_ok=True)
        self.manager.start(UNIT)
        self.give_policy(agent)
        agent.start()

    def give_policy(self, agent: Agent) -> None:
        """Write the example policy for it, of which no more is changed than this job needs."""
        variables = {"PATH": f"{self.manager.directory}:/usr/bin:/bin", "TRAINING_MARK": self.mark}
        replacements = {
            "env: &job\n": "".join(
                ["env: &job\n", *(f"      {key}: {value}\n" for key, value in variables.items())]
            ),
            "/mnt/checkpoints/latest": str(self.checkpoint),
            'TRAINING_STOP: "no"': "\n      ".join(
                ['TRAINING_STOP: "no"', *(f"{key}: {value}" for key, value in variables.items())]
            ),
        }
        policy = example("spot-training.yaml", self._hooks, agent.endpoint, replacements)
        agent.config.write_text(policy, encoding="utf-8")

    def numbers(self, pattern: str) -> list[int]:
        """Numbers in the job's log, where the pattern has its group."""
        log = self.manager.log.read_text(encoding="utf-8") if self.manager.log.exists() else ""
        return [int(found) for found in re.findall(rf"^{pattern}$", log, re.MULTILINE)]

    def last_step(self) -> int:
        return max(self.numbers(r"step (\d+)"), default=0)

    def saved_step(self) -> int:
        return int(json.loads(self.checkpoint.read_text(encoding="utf-8"))["step"])

    def hook(self, name: str, event: str = "A", **more: str) -> subprocess.Popen[str]:
        """Start a hook by itself, as its user would."""
        return subprocess.Popen(
            [str(self._hooks / name)],
            env={
                "PATH": f"{self.manager.directory}:/usr/bin:/bin",
                "TRAINING_UNIT": UNIT,
                "TRAINING_CHECKPOINT": str(self.checkpoint),
                "TRAINING_MARK": str(self.mark),
                "TRAINING_SETTLED": "0.2",
                "SCHEDULED_EVENT_ID": event,
                **more,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_hook(self, name: str, event: str = "A", **more: str) -> subprocess.CompletedProcess[str]:
        """``event``: empty for an on_clear hook."""
        with self.hook(name, event, **more) as process:
            output, errors = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def trainer(disk: Path, every: int = NEVER) -> tuple[str, ...]:
    return (sys.executable, "-IS", str(TRAINER), str(disk / "latest"), str(every))


def launched(directory: Path, kind: str) -> tuple[str, ...]:
    return (sys.executable, "-IS", str(LAUNCHER), str(directory / "disk"), kind)


@contextmanager
def a_job(
    directory: Path, *, every: int = NEVER, run: tuple[str, ...] = (), checkpoint: str = "latest"
) -> Iterator[Job]:
    """``checkpoint``: the file that is written last, below the disk."""
    (directory / "disk").mkdir()
    run = run or trainer(directory / "disk", every)
    with ServiceManager(directory / "bin", {UNIT: Unit(run)}) as manager:
        yield Job(directory, manager, checkpoint)
