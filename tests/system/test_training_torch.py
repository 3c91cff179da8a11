"""The example policy for a training job, with a real torchrun: two workers on CPU, checkpoints by DCP."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from harness import PATIENCE, Agent, Simulator
from torch_job import torch_job
from training_job import UNIT, Job

pytestmark = [
    pytest.mark.usefixtures("hook_shell"),
    pytest.mark.timeout(900),
]  # the first time, PyTorch is fetched


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with torch_job(tmp_path) as job:
        yield job
        sys.stdout.write(job.manager.log.read_text("utf-8"))


def said(job: Job, what: str) -> set[tuple[str, str, str]]:
    """Lines of each worker at each time: its rank, the step, and the sum of its weights."""
    return set(re.findall(rf"rank (\d) {what} step (\d+) with ([\d.-]+)", job.manager.log.read_text("utf-8")))


def begin(job: Job, agent: Agent) -> None:
    job.boot(agent)
    progress = job.checkpoint.parents[1] / "progress"
    agent.wait_until(lambda: progress.exists() or not job.manager.runs(UNIT), "it trained", 2 * PATIENCE)
    assert {rank for rank, _, _ in said(job, "begins after")} == {"0", "1"}


def checkpoint(job: Job) -> Path:
    """The last file of the only one; it has a part of each worker."""
    (last,) = job.checkpoint.parents[1].glob("step-*/.metadata")
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in last.parent.iterdir()}
    return last


def wait_goes_on(job: Job, agent: Agent) -> None:
    """Wait until both workers have begun with what both had saved."""
    saved = said(job, "has saved")
    assert {rank for rank, _, _ in saved} == {"0", "1"}
    agent.wait_until(lambda: said(job, "begins after") >= saved, "the job went on", 2 * PATIENCE)


def test_an_eviction_with_30_seconds_leaves_a_complete_checkpoint(
    job: Job, sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    begin(job, agent)
    event = sim.schedule("Preempt", notice_seconds=30, lasts_seconds=None)
    agent.wait_log("hook finished", event_id=event, reason="hook checkpoint: exit code 0 (succeeded)")
    told = [line["line"] for line in agent.log("hook output", event_id=event)]
    assert told[0].startswith(f"training-checkpoint: checkpoint complete: {checkpoint(job).parent}, ")
    assert not job.manager.runs(UNIT)
    sim.wait_started(event)
    assert sim.approvals() == ()

    agent.kill()  # the VM is gone
    sim.end(event)
    successor = Agent(tmp_path / "successor", sim.endpoint())
    try:
        job.boot(successor)
        wait_goes_on(job, successor)
    finally:
        successor.close()


def test_a_redeployment_is_approved_when_the_checkpoint_is_complete(
    job: Job, sim: Simulator, agent: Agent
) -> None:
    begin(job, agent)
    event = sim.schedule("Redeploy", notice_seconds=200, lasts_seconds=None)
    approved_at = sim.wait_approved(event).approved_at
    assert approved_at is not None
    assert checkpoint(job).stat().st_mtime < approved_at.timestamp()
    assert not job.manager.runs(UNIT)
    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    wait_goes_on(job, agent)

    # The hook keeps the signal from the launcher, which would end and leave no other checkpoint.
    systemctl = str(job.manager.directory / "systemctl")
    subprocess.run([systemctl, "kill", "--kill-who=main", "--signal=USR1", UNIT], check=True, timeout=PATIENCE)
    agent.wait_until(lambda: not job.manager.runs(UNIT), "the launcher had ended")
    checkpoint(job)
