"""The example policy for a training job on a Spot VM, with jobs that answer SIGUSR1 with a checkpoint.

One is a single process; another has a launcher and workers, and writes as three frameworks do under torchrun.
"""

import os
import platform
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from examples import ServiceManager, Unit
from harness import PATIENCE, Agent, MakeAgent, Simulator
from training_job import UNIT, Job, a_job, launched, trainer

pytestmark = pytest.mark.usefixtures("hook_shell")

WAITS = "training-checkpoint: the workers have the signal of another run: waiting for its checkpoint\n"
LEFT = "training-resume: not stopped by training-checkpoint: left as it is\n"
ENDS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
print("up", flush=True)
time.sleep(300)
"""
# Writes a checkpoint at SIGUSR1, and ends after SIGTERM only when it may: disk/latest, disk/end.
SLOW_TO_END = """
import pathlib, signal, sys, time
disk = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: disk.joinpath("latest").write_text("all"))
signal.signal(signal.SIGTERM, lambda *_: print("is to end", flush=True))
print("up", flush=True)
while not disk.joinpath("end").exists():
    time.sleep(0.05)
"""
# Writes a checkpoint at SIGUSR1, but not before a file allows it.
WRITES_WHEN_ALLOWED = """
import pathlib, signal, sys, time
checkpoint, allowed = map(pathlib.Path, sys.argv[1:])
wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(print("is to write", flush=True)))
print("up", flush=True)
while not (wanted and allowed.exists()):
    time.sleep(0.05)
checkpoint.write_text("all")
time.sleep(300)
"""
# Answers each SIGUSR1 with one more checkpoint, which grows until a file allows its end; some signals it loses.
# After SIGTERM it writes nothing more, and ends some seconds later.
WRITES_EACH = """
import pathlib, signal, sys, time
disk, allowed = map(pathlib.Path, sys.argv[1:3])
wanted, step = -int(sys.argv[3]), 0
def want(*_):
    global wanted
    wanted += 1
signal.signal(signal.SIGUSR1, want)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(time.sleep(int(sys.argv[4]))))
print("up", flush=True)
while True:
    if wanted > step:
        step += 1
        folder = disk / f"step-{step}"
        folder.mkdir()
        with (folder / "part").open("w") as part:
            while not allowed.with_name(f"may {step}").exists():
                print("more", file=part, flush=True)
                time.sleep(0.05)
        (folder / ".metadata").touch()
    time.sleep(0.01)
"""


class Steps:
    """A job that writes a checkpoint for each signal, and what the hook has to know of it."""

    def __init__(self, job: Job, directory: Path) -> None:
        self.job = job
        self.disk = directory / "disk"
        self._directory = directory

    def start(self, agent: Agent) -> None:
        self.job.manager.start(UNIT)
        self.wait_up(agent)

    def wait_up(self, agent: Agent) -> None:
        agent.wait_until(lambda: "up" in self.job.manager.log.read_text("utf-8"), "the job was at work")

    def wait_for_half(self, agent: Agent, step: int) -> None:
        agent.wait_until((self.disk / f"step-{step}" / "part").exists, f"checkpoint {step} was begun")

    def allow(self, step: int) -> None:
        (self._directory / f"may {step}").touch()

    def complete(self) -> dict[str, bool]:
        return {folder.name: (folder / ".metadata").exists() for folder in self.disk.iterdir() if folder.is_dir()}


@contextmanager
def steps(directory: Path, lost: int = 0, ends_after: int = 0) -> Iterator[Steps]:
    places = (str(directory / "disk"), str(directory / "may"))
    run = (sys.executable, "-ISc", WRITES_EACH, *places, str(lost), str(ends_after))
    with a_job(directory, run=run, checkpoint="step-*/.metadata") as job:
        yield Steps(job, directory)


def test_an_eviction_leaves_a_complete_checkpoint_for_the_next_vm(
    sim: Simulator, make_agent: MakeAgent, tmp_path: Path
) -> None:
    with a_job(tmp_path) as job:
        agent = make_agent(sim.endpoint())
        job.boot(agent)
        agent.wait_until(lambda: job.last_step() > 20, "the job was at work")
        assert not job.checkpoint.exists()

        before = job.last_step()
        event = sim.schedule("Preempt", notice_seconds=300, lasts_seconds=None)
        agent.wait_log("hook finished", reason="hook checkpoint: exit code 0 (succeeded)")
        assert sim.event(event).status == "Scheduled"  # there was time to spare
        assert sim.approvals() == ()
        assert not job.manager.runs(UNIT)
        saved = job.saved_step()
        assert saved > before
        assert [path.name for path in job.checkpoint.parent.iterdir()] == ["latest"]

        agent.kill()  # the VM is gone
        sim.end(event)
        successor = make_agent(sim.endpoint(), "successor")
        job.boot(successor)
        successor.wait_until(lambda: len(job.numbers(r"begins after step (\d+)")) == 2, "the job was back")
        assert job.numbers(r"begins after step (\d+)") == [0, saved]


def test_an_early_warning_leaves_a_checkpoint_and_a_job_at_work(
    sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    with a_job(tmp_path) as job:
        job.boot(agent)
        agent.wait_until(lambda: job.last_step() > 20, "the job was at work")
        warning = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
        agent.wait_log("prepared", event_id=warning)
        early = job.saved_step()
        agent.wait_until(lambda: job.last_step() > early + 20, "the job was still at work")
        assert job.manager.runs(UNIT)
        assert not job.mark.exists()
        assert [path.name for path in job.checkpoint.parent.iterdir()] == ["latest"]

        eviction = sim.schedule("Preempt", notice_seconds=200, lasts_seconds=None)
        agent.wait_log("hook finished", event_id=eviction, hook="checkpoint")
        assert job.saved_step() > early + 20
        assert not job.manager.runs(UNIT)

        # The eviction is taken back, and the warning stands: there is work to do.
        sim.cancel(eviction)
        agent.wait_log("closed", event_id=eviction)
        agent.wait_until(lambda: job.numbers(r"begins after step (\d+)")[1:] != [], "the job was back")
        sim.end(warning)
        agent.wait_log("closed", event_id=warning)
        assert job.manager.runs(UNIT)
        assert sim.approvals() == ()


def test_a_job_that_does_not_run_is_left_alone_by_an_early_warning(
    sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    with a_job(tmp_path) as job:
        job.boot(agent)
        job.manager.stop(UNIT)
        warning = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
        agent.wait_log("prepared", event_id=warning)
        told = [line["line"] for line in agent.log("hook output", event_id=warning)]
        assert told == [f"training-checkpoint: {UNIT} does not run: nothing to do"]
        assert not job.mark.exists()


def test_a_redeployment_is_approved_after_the_checkpoint_and_training_goes_on(
    sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    with a_job(tmp_path) as job:
        job.boot(agent)
        agent.wait_until(lambda: job.last_step() > 20, "the job was at work")
        event = sim.schedule("Redeploy", notice_seconds=200, lasts_seconds=None)
        approved_at = sim.wait_approved(event).approved_at
        assert approved_at is not None
        assert approved_at.timestamp() > job.checkpoint.stat().st_mtime
        assert not job.manager.runs(UNIT)
        saved = job.saved_step()
        sim.wait_started(event)
        sim.end(event)
        agent.wait_log("closed", event_id=event)
        agent.wait_until(lambda: job.numbers(r"begins after step (\d+)") == [0, saved], "the job was back")
        agent.wait_until(lambda: job.last_step() > saved + 5, "the job was at work again")


def test_without_the_agent_the_work_since_the_last_periodic_checkpoint_is_lost(
    agent: Agent, tmp_path: Path
) -> None:
    with a_job(tmp_path, every=200) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() % 200 > 20 and job.checkpoint.exists(), "there was work to lose")
        job.manager.power_off(UNIT)
        lost = job.last_step()
        job.manager.start(UNIT)
        agent.wait_until(lambda: len(job.numbers(r"begins after step (\d+)")) == 2, "the job was back")
        again = job.numbers(r"begins after step (\d+)")[1]
        assert again % 200 == 0
        assert lost > again


# The last file that each kind writes, and the other files of a complete checkpoint.
KINDS = {
    "dcp": ("step-*/.metadata", {"step-1/__0_0.distcp", "step-1/__1_0.distcp"}),
    "lightning": ("*.ckpt", {"step=1.ckpt"}),
    "huggingface": ("checkpoint-*/trainer_state.json", {"checkpoint-1/rng_state_1.pth"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_below_a_launcher_write_a_checkpoint_that_is_complete(
    agent: Agent, tmp_path: Path, kind: str
) -> None:
    last, others = KINDS[kind]
    with a_job(tmp_path, run=launched(tmp_path, kind)) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: len(job.numbers(r"worker (\d) is ready")) == 2, "the workers were ready")
        disk = tmp_path / "disk"
        done = job.run_hook("training-checkpoint", TRAINING_CHECKPOINT=str(disk / last), TRAINING_STOP="no")
        complete = {file for file in others if (disk / file).read_text() == "first second"}
        (path,) = disk.glob(last)
        assert complete == others
        assert (done.returncode, done.stderr) == (0, "")
        folder = path if path.parent == disk else path.parent
        assert done.stdout.startswith(f"training-checkpoint: checkpoint complete: {folder}, ")
        assert job.manager.runs(UNIT)  # the launcher did not get the signal

        # Another one, from which the job goes on elsewhere. The first does not count.
        done = job.run_hook("training-checkpoint", TRAINING_CHECKPOINT=str(disk / last))
        assert (done.returncode, done.stderr) == (0, "")
        assert len([*disk.glob(last)]) == 2
        assert not job.manager.runs(UNIT)


def test_a_checkpoint_that_is_late_is_a_failure_that_says_how_far_it_came(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path, run=launched(tmp_path, "stuck")) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: len(job.numbers(r"worker (\d) is ready")) == 2, "the workers were ready")
        disk = tmp_path / "disk"
        last = {"TRAINING_CHECKPOINT": str(disk / "step-*/.metadata")}
        shard = disk / "step-1/__0_0.distcp"
        with job.hook("training-checkpoint", **last) as hook:
            agent.wait_until(lambda: shard.exists() and shard.read_text() == "first ", "a part was written")
            hook.terminate()
            output, errors = hook.communicate(timeout=PATIENCE)
        how_far = "6 bytes in 1 file written since the signal"
        assert (hook.returncode, output, errors) == (143, "", f"training-checkpoint: not complete: {how_far}\n")
        assert list(disk.glob(".asked*")) == []
        assert job.manager.runs(UNIT)

        done = job.run_hook("training-checkpoint", **last, TRAINING_WAIT="1")
        how_far = r"\d+ bytes in \d files? written since the signal; the job runs on"
        assert re.fullmatch(rf"training-checkpoint: no new checkpoint is complete: {how_far}\n", done.stderr)
        assert (done.returncode, done.stdout) == (1, WAITS)
        assert job.manager.runs(UNIT)


def test_an_eviction_amid_a_checkpoint_for_a_reboot_leaves_no_other_half_written(
    sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    with steps(tmp_path) as job:
        job.job.boot(agent)
        job.wait_up(agent)
        sim.schedule("Reboot", notice_seconds=200, lasts_seconds=None)
        job.wait_for_half(agent, 1)
        eviction = sim.schedule("Preempt", notice_seconds=100, lasts_seconds=None)
        agent.wait_log("hook output", event_id=eviction, line=WAITS.strip())
        job.allow(1)
        agent.wait_log("hook finished", event_id=eviction, reason="hook checkpoint: exit code 0 (succeeded)")
        assert not job.job.manager.runs(UNIT)
        assert job.complete() == {"step-1": True}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_after_one_that_was_ended_waits_for_its_checkpoint(
    agent: Agent, tmp_path: Path, end: signal.Signals
) -> None:
    with steps(tmp_path) as job:
        job.start(agent)
        with job.job.hook("training-checkpoint") as hook:
            job.wait_for_half(agent, 1)
            hook.send_signal(end)
        with job.job.hook("training-checkpoint", "B") as hook:
            job.allow(1)
            output, errors = hook.communicate(timeout=PATIENCE)
        assert (hook.returncode, errors) == (0, "")
        assert output.startswith(f"{WAITS}training-checkpoint: checkpoint complete: {job.disk / 'step-1'}, ")
        assert job.complete() == {"step-1": True}

        # This one was seen complete: the next run asks for another.
        job.start(agent)
        (job.disk / "step-1").rename(job.disk / "step-0")
        job.allow(1)
        assert job.job.run_hook("training-checkpoint", "C").stdout.startswith(
            f"training-checkpoint: checkpoint complete: {job.disk / 'step-1'}, "
        )


def test_a_run_beside_an_early_one_waits_for_the_same_checkpoint(agent: Agent, tmp_path: Path) -> None:
    with steps(tmp_path) as job:
        job.start(agent)
        with job.job.hook("training-checkpoint", TRAINING_STOP="no") as early:
            job.wait_for_half(agent, 1)
            with job.job.hook("training-checkpoint", "B") as hook:
                assert hook.stdout is not None
                assert hook.stdout.readline() == WAITS
                job.allow(1)
                _, errors = hook.communicate(timeout=PATIENCE)
            assert early.wait(PATIENCE) == 0
        assert (hook.returncode, errors) == (0, "")
        assert job.complete() == {"step-1": True}


def test_runs_that_begin_at_the_same_moment_look_at_the_clock_of_the_disk_in_turn(
    agent: Agent, tmp_path: Path
) -> None:
    """Each creates the file for that and removes it."""
    looks = tmp_path / "looks"
    with steps(tmp_path) as job:
        programs = job.job.manager.directory
        for name, text in {
            "find": f"case $1 in */.asked-*) echo looks >>{looks}; {wait_for(tmp_path / 'may look')} ;; esac",
            "flock": f"echo waits >>{looks}",
        }.items():
            (programs / name).write_text(f'#!/bin/sh\n{text}\nexec /usr/bin/{name} "$@"\n')
            (programs / name).chmod(0o755)
        job.start(agent)
        job.allow(1)
        job.allow(2)
        with job.job.hook("training-checkpoint") as hook:
            agent.wait_until(lambda: looks.exists() and "looks" in looks.read_text(), "one looked at the clock")
            with job.job.hook("training-checkpoint", "B") as other:
                agent.wait_until(
                    lambda: looks.read_text().split()[2:] or looks.read_text().count("looks") > 1,
                    "the other one waits, or looks too",
                )
                seen = looks.read_text().split()
                (tmp_path / "may look").touch()
                errors = [process.communicate(timeout=PATIENCE)[1] for process in (hook, other)]
        assert seen == ["waits", "looks", "waits"]
        assert (errors, hook.returncode, other.returncode) == (["", ""], 0, 0)
        assert job.complete() == {"step-1": True}


def wait_for(file: Path) -> str:
    """A line of shell."""
    return f"until [ -e '{file}' ]; do sleep 0.05; done"


def test_a_signal_that_the_job_has_lost_is_sent_again(agent: Agent, tmp_path: Path) -> None:
    with steps(tmp_path, lost=1) as job:
        job.start(agent)
        job.allow(1)
        assert job.job.run_hook("training-checkpoint", TRAINING_WAIT="1").returncode == 1
        done = job.job.run_hook("training-checkpoint")
        assert (done.returncode, done.stderr) == (0, "")
        assert job.complete() == {"step-1": True}


def test_a_checkpoint_long_after_a_run_that_did_not_see_it_is_not_the_next_ones(
    agent: Agent, tmp_path: Path
) -> None:
    with steps(tmp_path) as job:
        job.start(agent)
        assert job.job.run_hook("training-checkpoint", TRAINING_WAIT="1").returncode == 1
        job.allow(1)
        last = job.disk / "step-1/.metadata"
        agent.wait_until(last.exists, "it was complete")
        earlier = last.stat().st_mtime - 11
        for path in (last, job.disk / "step-1/part"):
            os.utime(path, (earlier, earlier))
        note = job.job.mark.with_name(f"{job.job.mark.name}.signaled")
        event, start, text = note.read_text().splitlines()
        boot, asked, signaled, worker = text.split()
        text = f"{boot} {float(asked) - 11} {int(signaled) - 11} {worker}"
        note.write_text(f"{event}\n{start}\n{text}\n")
        job.allow(2)
        done = job.job.run_hook("training-checkpoint", "B")
        assert done.stdout.startswith(f"training-checkpoint: checkpoint complete: {job.disk / 'step-2'}, ")


def one_beside(job: Steps, agent: Agent) -> None:
    """Have the job begin a second checkpoint as soon as the hook's one is complete."""
    job.wait_for_half(agent, 1)
    (worker,) = (job.job.manager.directory / f"{UNIT}.cgroup/cgroup.procs").read_text().split()
    os.kill(int(worker), signal.SIGUSR1)  # type: ignore[attr-defined,unused-ignore] # not on Windows
    job.allow(1)
    job.wait_for_half(agent, 2)


def test_a_job_is_not_stopped_amid_a_checkpoint_beside_the_complete_one(agent: Agent, tmp_path: Path) -> None:
    with steps(tmp_path) as job:
        job.start(agent)
        with job.job.hook("training-checkpoint") as hook:
            one_beside(job, agent)
            looked = len(job.job.manager.calls) + 20
            agent.wait_until(
                lambda: len(job.job.manager.calls) > looked or hook.poll() is not None, "it looked some times"
            )
            job.allow(2)
            _, errors = hook.communicate(timeout=PATIENCE)
        assert (hook.returncode, errors) == (0, "")
        assert not job.job.manager.runs(UNIT)
        assert job.complete() == {"step-1": True, "step-2": True}


@pytest.mark.parametrize("seconds", [0, 11])
def test_a_job_that_the_event_makes_it_stop_amid_a_checkpoint_is_a_failure(
    agent: Agent, tmp_path: Path, seconds: int
) -> None:
    """Also if the job takes longer to end than a checkpoint that does not grow may be under way."""
    with steps(tmp_path, ends_after=seconds) as job:
        job.start(agent)
        with job.job.hook("training-checkpoint", SCHEDULED_EVENT_SECONDS_LEFT="12") as hook:
            one_beside(job, agent)
            _, errors = hook.communicate(timeout=PATIENCE)
        message = f"the job was stopped while it wrote {job.disk / 'step-2'}, which is not complete"
        assert (hook.returncode, errors) == (1, f"training-checkpoint: {message}\n")
        assert not job.job.manager.runs(UNIT)


def test_a_job_goes_on_with_a_checkpoint_that_takes_longer_than_the_hook_may(agent: Agent, tmp_path: Path) -> None:
    more = {"TRAINING_WAIT": "5", "SCHEDULED_EVENT_SECONDS_LEFT": "900", "SCHEDULED_EVENT_TIMEOUT_SECONDS": "5"}
    with steps(tmp_path) as job:
        job.start(agent)
        with job.job.hook("training-checkpoint", **more) as hook:
            one_beside(job, agent)
            _, errors = hook.communicate(timeout=PATIENCE)
        one, other = job.disk / "step-1", job.disk / "step-2"
        message = f"{one} is complete, but {other} is not; the job runs on"
        assert (hook.returncode, errors) == (1, f"training-checkpoint: {message}\n")
        assert job.job.manager.runs(UNIT)


def test_logs_in_the_folder_of_the_checkpoints_are_none(agent: Agent, tmp_path: Path) -> None:
    with steps(tmp_path) as job:
        job.start(agent)
        job.allow(1)
        log = job.disk / "runs/log"
        log.parent.mkdir()
        is_done = threading.Event()

        def write() -> None:
            with log.open("w") as file:
                while not is_done.wait(0.02):
                    print("a line", file=file, flush=True)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            done = job.job.run_hook("training-checkpoint")
            is_done.set()
            writing.result(PATIENCE)
        assert (done.returncode, done.stderr) == (0, "")
        assert not job.job.manager.runs(UNIT)


def test_the_hook_of_another_job_with_the_same_folder_does_not_disturb(agent: Agent, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    units = {
        f"{name}.service": Unit(
            (sys.executable, "-ISc", WRITES_WHEN_ALLOWED, str(disk / name), str(tmp_path / f"{name} may"))
        )
        for name in ("slow", "quick")
    }
    with ServiceManager(tmp_path / "bin", units) as manager:
        job = Job(tmp_path, manager, "")

        def variables(name: str) -> dict[str, str]:
            return {
                "TRAINING_UNIT": f"{name}.service",
                "TRAINING_CHECKPOINT": str(disk / name),
                "TRAINING_MARK": str(tmp_path / f"{name} mark"),
                "TRAINING_WAIT": "20",
            }

        for unit in units:
            manager.start(unit)
        agent.wait_until(
            lambda: manager.log.read_text("utf-8").count("up") == len(units), "both jobs were at work"
        )
        with job.hook("training-checkpoint", **variables("slow")) as slow:
            agent.wait_until(
                lambda: "is to write" in manager.log.read_text("utf-8"), "the slow one had the signal"
            )
            (tmp_path / "quick may").touch()
            assert job.run_hook("training-checkpoint", **variables("quick")).returncode == 0
            (tmp_path / "slow may").touch()
            _, errors = slow.communicate(timeout=PATIENCE)
        assert (slow.returncode, errors) == (0, "")


def test_the_wait_for_a_checkpoint_ends_before_the_event(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path, run=launched(tmp_path, "stuck")) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: len(job.numbers(r"worker (\d) is ready")) == 2, "the workers were ready")
        # It would wait for longer than this test may take.
        done = job.run_hook("training-checkpoint", TRAINING_WAIT="900", SCHEDULED_EVENT_SECONDS_LEFT="9")
        assert done.returncode == 1
        assert "no new checkpoint is complete: " in done.stderr


def test_a_job_that_does_not_handle_the_signal_fails_the_hook_and_keeps_running(tmp_path: Path) -> None:
    with a_job(tmp_path, run=("sleep", "300")) as job:
        job.manager.start(UNIT)
        done = job.run_hook("training-checkpoint", TRAINING_WAIT="1")
        assert (done.returncode, done.stdout, done.stderr) == (
            1,
            "",
            f"training-checkpoint: no process of {UNIT} handles USR1; the job runs on\n",
        )
        assert job.manager.runs(UNIT)
        # Nor may a second run call that a success, while there is no checkpoint at all.
        job.manager.stop(UNIT)
        done = job.run_hook("training-checkpoint")
        assert (done.returncode, done.stderr) == (
            1,
            f"training-checkpoint: {UNIT} does not run, and there is no {job.checkpoint}\n",
        )


def test_a_job_that_ends_without_a_checkpoint_is_a_failure(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path, run=(sys.executable, "-ISc", ENDS)) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: "up" in job.manager.log.read_text("utf-8"), "the job was at work")
        done = job.run_hook("training-checkpoint")
        message = "no new checkpoint is complete: 0 bytes in 0 files written since the signal; the job has ended"
        assert (done.returncode, done.stderr) == (1, f"training-checkpoint: {message}\n")


def test_only_processes_that_match_the_pattern_get_the_signal(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        done = job.run_hook("training-checkpoint", TRAINING_PROCESSES="no-such-job", TRAINING_WAIT="1")
        assert done.stderr == f"training-checkpoint: no process of {UNIT} handles USR1; the job runs on\n"
        assert job.run_hook("training-checkpoint", TRAINING_PROCESSES="trainer[.]py").returncode == 0


def test_both_hooks_may_run_again(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        assert job.run_hook("training-checkpoint").returncode == 0
        saved = job.saved_step()
        for event in ("A", "B"):  # another one finds it stopped for the first
            done = job.run_hook("training-checkpoint", event)
            assert done.stdout == f"training-checkpoint: {UNIT} does not run; the last checkpoint is valid\n"
        assert job.saved_step() == saved
        assert job.run_hook("training-resume", "B").stdout == f"training-resume: {UNIT} runs\n"
        assert job.run_hook("training-resume", "B").stdout == LEFT
        assert job.manager.runs(UNIT)


def test_a_job_that_an_administrator_has_stopped_stays_stopped(
    sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    with a_job(tmp_path) as job:
        job.boot(agent)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        for hook in ("training-checkpoint", "training-resume"):  # so that there is a checkpoint
            assert job.run_hook(hook).returncode == 0
        assert job.manager.runs(UNIT)
        job.manager.stop(UNIT)
        event = sim.schedule("Redeploy", notice_seconds=200, lasts_seconds=0.1)
        agent.wait_log("closed", event_id=event)
        told = [line["line"] for line in agent.log("hook output", event_id=event)]
        assert told == [f"training-checkpoint: {UNIT} does not run; the last checkpoint is valid", LEFT.strip()]
        assert not job.manager.runs(UNIT)


def test_a_job_started_and_stopped_since_is_not_started_for_an_old_event(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        assert job.run_hook("training-checkpoint").returncode == 0
        job.manager.start(UNIT)
        job.manager.stop(UNIT)
        mark = job.mark.read_bytes()
        assert job.run_hook("training-resume", "").stdout == (
            f"training-resume: {UNIT} was started and stopped since then: left as it is\n"
        )
        job.mark.write_bytes(mark)
        assert job.run_hook("training-checkpoint", "B").returncode == 0
        assert job.run_hook("training-resume", "B").stdout == LEFT
        assert not job.manager.runs(UNIT)


def test_a_job_whose_start_failed_is_started_by_the_next_run(agent: Agent, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    broken = disk / "broken"
    run = ("/bin/sh", "-c", f"[ ! -e {broken} ] || exit 1; exec {shlex.join(trainer(disk))}")
    with a_job(tmp_path, run=run) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        assert job.run_hook("training-checkpoint").returncode == 0
        broken.touch()
        done = job.run_hook("training-resume")
        assert (done.returncode, done.stderr) == (1, f"training-resume: {UNIT} has not stayed up\n")
        broken.unlink()
        assert job.run_hook("training-resume", "").stdout == f"training-resume: {UNIT} runs\n"
        assert job.manager.runs(UNIT)


def test_a_job_whose_event_is_canceled_before_its_checkpoint_keeps_running(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path, run=launched(tmp_path, "deaf")) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: "deaf" in job.manager.log.read_text("utf-8"), "the job was deaf")
        with job.hook("training-checkpoint") as hook:
            agent.wait_until(job.mark.exists, "it was about to stop the job")
            hook.terminate()
        assert job.run_hook("training-resume").stdout == f"training-resume: {UNIT} runs already\n"
        assert not job.mark.exists()


@pytest.mark.parametrize("stop", ["yes", "no"])
def test_a_job_that_systemd_sees_as_starting_fails_the_hook_and_keeps_running(
    agent: Agent, tmp_path: Path, stop: str
) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        job.manager.states[UNIT] = "activating"  # as Type=oneshot for as long as it runs
        job.checkpoint.write_text('{"step": 0, "slope": 0, "offset": 0}')
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        done = job.run_hook("training-checkpoint", TRAINING_STOP=stop)
        message = f"to systemd {UNIT} is still starting, but its workers run: give it Type=simple or Type=exec"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"training-checkpoint: {message}\n")
        assert job.manager.runs(UNIT)


def test_root_creates_no_file_through_a_link_of_the_job(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        (tmp_path / "disk" / f".asked-{UNIT}-{platform.node()}").symlink_to(tmp_path / "nologin")
        assert job.run_hook("training-checkpoint").returncode == 0
    assert not (tmp_path / "nologin").exists()


def test_a_hook_without_disk_space_for_its_file_still_gets_a_checkpoint(agent: Agent, tmp_path: Path) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        (tmp_path / "disk" / f".asked-{UNIT}-{platform.node()}").mkdir()
        done = job.run_hook("training-checkpoint")
        assert done.returncode == 1
        assert done.stderr.endswith("the workers have the signal, but their checkpoint is not waited for\n")
        agent.wait_until(job.checkpoint.exists, "there was a checkpoint")
        assert job.manager.runs(UNIT)


def test_a_hook_stopped_while_it_stops_the_job_reports_a_complete_checkpoint(agent: Agent, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with a_job(tmp_path, run=(sys.executable, "-ISc", SLOW_TO_END, str(disk))) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: "up" in job.manager.log.read_text("utf-8"), "the job was at work")
        with job.hook("training-checkpoint") as hook:
            agent.wait_until(lambda: "is to end" in job.manager.log.read_text("utf-8"), "it was being stopped")
            hook.terminate()
            (disk / "end").touch()
            _, errors = hook.communicate(timeout=PATIENCE)
        said = "training-checkpoint: the checkpoint is complete; the job may not have ended yet\n"
        assert (hook.returncode, errors) == (143, said)


@pytest.mark.parametrize("enabled", [True, False])
def test_only_a_job_that_was_disabled_since_its_stop_stays_stopped(
    agent: Agent, tmp_path: Path, enabled: bool
) -> None:
    with a_job(tmp_path) as job:
        job.manager.start(UNIT)
        agent.wait_until(lambda: job.last_step() > 0, "the job was at work")
        if not enabled:
            job.manager.disabled.add(UNIT)
        assert job.run_hook("training-checkpoint").returncode == 0
        job.manager.disabled.add(UNIT)
        said = f"{UNIT} has been disabled since then: left as it is" if enabled else f"{UNIT} runs"
        assert job.run_hook("training-resume").stdout == f"training-resume: {said}\n"
        assert job.manager.runs(UNIT) is not enabled
