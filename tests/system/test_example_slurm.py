"""The example policy for a Slurm node, with a real Slurm: one controller, one node, both on loopback."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from harness import PATIENCE, Agent, Simulator
from one_node import NODE, Slurm

pytestmark = pytest.mark.usefixtures("hook_shell")
MARK = "scheduled-events-agent:"


@pytest.fixture
def slurm(tmp_path: Path, sim: Simulator, agent: Agent) -> Iterator[Slurm]:
    """A cluster whose node is idle, and the policy of its agent."""
    one = Slurm(tmp_path)
    agent.config.write_text(one.policy(sim.endpoint()), encoding="utf-8")
    with closing(one):
        one.start_all(agent)
        yield one
        for name in ("slurmctld.log", "slurmd.log"):  # pytest shows them on failure only
            sys.stdout.write(f"--- {name}\n{(tmp_path / name).read_text()}")


def test_a_node_is_drained_approved_after_its_job_and_accepts_jobs_again(
    slurm: Slurm, sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    agent.start()
    running = slurm.submit(f"until [ -e {tmp_path}/finish ]; do sleep 0.1; done")
    agent.wait_until(lambda: slurm.job(running) == "R", "the job ran")
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_until(lambda: "DRAIN" in slurm.node("State"), "the node was drained")
    assert slurm.node("Reason").startswith(f"{MARK} Reboot {event} ")
    waiting = slurm.submit(f"touch {tmp_path}/second")
    agent.wait_until(lambda: slurm.job(waiting) == "PD", "the second job waited")
    sim.wait_polls(5)  # in this time the agent would have approved
    assert slurm.job(running) == "R"
    assert sim.approvals() == ()

    (tmp_path / "finish").touch()
    sim.wait_started(event)
    assert slurm.job(running) == ""
    assert slurm.job(waiting) == "PD"
    slurm.reboot_node(agent)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert not slurm.is_drained()
    agent.wait_until((tmp_path / "second").exists, "the second job had run")


def test_an_eviction_requeues_the_job_in_time(slurm: Slurm, sim: Simulator, agent: Agent) -> None:
    agent.start()
    running = slurm.submit("sleep 300")
    agent.wait_until(lambda: slurm.job(running) == "R", "the job ran")
    event = sim.schedule("Preempt", notice_seconds=30, lasts_seconds=None)
    agent.wait_log("hook finished", reason="hook requeue: exit code 0 (succeeded)")
    assert sim.event(event).status == "Scheduled"
    assert sim.approvals() == ()
    assert slurm.job(running) == "PD"


def test_a_job_whose_prolog_still_runs_is_waited_for_as_well(
    slurm: Slurm, sim: Simulator, agent: Agent, tmp_path: Path
) -> None:
    agent.start()
    (tmp_path / "prolog-waits").touch()
    job = slurm.submit(f"until [ -e {tmp_path}/finish ]; do sleep 0.1; done")
    agent.wait_until(lambda: slurm.job(job) == "CF", "the job had the node")
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("hook output", line=f"slurm-prepare: {NODE} takes no new jobs")
    (tmp_path / "prolog-waits").unlink()
    agent.wait_until(lambda: slurm.job(job) == "R", "the job ran")
    finished_at = time.monotonic()
    (tmp_path / "finish").touch()
    sim.wait_started(event)
    assert sim.approvals(event)[0].monotonic > finished_at
    assert slurm.job(job) == ""


def start_hook(slurm: Slurm, name: str, **more: str) -> subprocess.Popen[str]:
    """Start a hook by itself, as its user would."""
    environment = {
        "PATH": os.environ["PATH"],
        "SLURM_CONF": str(slurm.configuration),
        "SLURM_NODE": NODE,
        "SCHEDULED_EVENT_TYPE": "Reboot",
        "SCHEDULED_EVENT_ID": "ABC-1",
        **more,
    }
    return subprocess.Popen(
        [str(slurm.directory / "hooks" / name)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_that_cannot_be_requeued_is_reported_regularly_and_waited_for(
    slurm: Slurm, agent: Agent, tmp_path: Path
) -> None:
    job = slurm.submit(f"until [ -e {tmp_path}/finish ]; do sleep 0.1; done", "--no-requeue")
    agent.wait_until(lambda: slurm.job(job) == "R", "the job ran")
    with start_hook(slurm, "slurm-prepare", SLURM_REQUEUE="yes", SCHEDULED_EVENT_SECONDS_LEFT="110") as hook:
        assert hook.stdout is not None
        until = time.monotonic() + 6
        assert [hook.stdout.readline() for _ in range(2)][1] == f"slurm-prepare: requeueing job {job}\n"
        time.sleep(max(0.0, until - time.monotonic()))
        (tmp_path / "finish").touch()
        rest, _ = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 0
    assert rest.count("requeueing") <= 1
    assert rest.endswith(f"slurm-prepare: no job runs on {NODE}\n")


def test_a_job_of_srun_is_named_once_and_ends_with_the_machine(slurm: Slurm, agent: Agent) -> None:
    with slurm.srun("exec sleep 300") as client:
        job = agent.wait_until(
            lambda: slurm.run("squeue", "--noheader", "--name=by-srun", "--states=R", "--format=%A"), "the job ran"
        )
        with start_hook(slurm, "slurm-prepare", SLURM_REQUEUE="yes", SCHEDULED_EVENT_SECONDS_LEFT="30") as hook:
            output, errors = hook.communicate(timeout=PATIENCE)
        assert hook.returncode == 1
        taken, kill_wait, named = output.splitlines()
        assert taken == f"slurm-prepare: {NODE} takes no new jobs"
        assert kill_wait.startswith("slurm-prepare: jobs have 30 s to end (KillWait), and the event leaves ")
        assert named == (
            f"slurm-prepare: of srun or salloc, cannot be requeued, and end with the machine at the latest: {job}"
        )
        assert errors == f"slurm-prepare: the event comes, and on {NODE} still run: {job}\n"
        assert slurm.job(job) == "R"
        slurm.run("scancel", job)
        client.wait(PATIENCE)


def test_of_a_job_array_the_task_is_requeued_and_not_the_whole(slurm: Slurm, agent: Agent) -> None:
    array = slurm.submit("[ $SLURM_ARRAY_TASK_ID = 1 ] || exec sleep 300", "--array=1-2%1")
    task = f"{array}_2"  # the last one, whose own id is that of the array
    agent.wait_until(
        lambda: (
            slurm.run("squeue", "--noheader", "--states=R", "--Format=JobArrayID:20,JobID:20").split()
            == [task, array]
        ),
        "the last task ran",
    )
    with start_hook(slurm, "slurm-prepare", SLURM_REQUEUE="yes", SCHEDULED_EVENT_SECONDS_LEFT="110") as hook:
        output, _ = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 0
    assert f"slurm-prepare: requeueing job {task}\n" in output
    assert f"requeueing job {array}\n" not in output


def test_a_hook_that_the_agent_ends_names_the_jobs_that_still_run(slurm: Slurm, agent: Agent) -> None:
    job = slurm.submit("exec sleep 300", "--no-requeue")
    agent.wait_until(lambda: slurm.job(job) == "R", "the job ran")
    with start_hook(slurm, "slurm-prepare", SLURM_REQUEUE="yes", SCHEDULED_EVENT_SECONDS_LEFT="110") as hook:
        assert hook.stdout is not None
        assert [hook.stdout.readline() for _ in range(2)][1] == f"slurm-prepare: requeueing job {job}\n"
        hook.terminate()
        _, errors = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 143
    assert errors.endswith(f"slurm-prepare: ended; on {NODE} still run: {job}\n")


def test_a_node_that_does_not_respond_is_drained_and_one_taken_down_is_not(slurm: Slurm) -> None:
    for reason, is_drained in (("Not responding", True), ("bad disk", False)):
        slurm.run("scontrol", "update", f"NodeName={NODE}", "State=DOWN", f"Reason={reason}")
        with start_hook(slurm, "slurm-prepare") as hook:
            hook.communicate(timeout=PATIENCE)
        assert hook.returncode == 0
        assert ("DRAIN" in slurm.node("State")) == is_drained
        assert slurm.node("Reason").startswith(MARK if is_drained else reason)
        with start_hook(slurm, "slurm-recover") as hook:
            hook.communicate(timeout=PATIENCE)
        assert hook.returncode == 0
        assert ("DOWN" in slurm.node("State")) != is_drained


def test_a_rejected_request_is_repeated_unless_the_node_is_unknown(slurm: Slurm, tmp_path: Path) -> None:
    real = shutil.which("scontrol")
    refusing = tmp_path / "bin" / "scontrol"
    refusing.parent.mkdir()
    # The first run of each command fails, as while the controller is being restarted; the later ones are Slurm's.
    refusing.write_text(f'#!/bin/sh\nmkdir "{tmp_path}/refused-$1" 2>/dev/null && exit 1\nexec {real} "$@"\n')
    refusing.chmod(0o755)
    path = f"{refusing.parent}:{os.environ['PATH']}"
    with start_hook(slurm, "slurm-prepare", PATH=path) as hook:
        output, errors = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 0
    assert output == f"slurm-prepare: {NODE} takes no new jobs\nslurm-prepare: no job runs on {NODE}\n"
    assert errors.count("slurm-prepare: did not succeed, and is tried again: ask scontrol ") == 2
    with start_hook(slurm, "slurm-prepare", SLURM_NODE="not-there") as hook:
        _, errors = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 1
    assert errors == "slurm-prepare: Node not-there not found\n"


def test_a_freeze_of_unknown_length_that_is_announced_days_ahead_drains_nothing(
    slurm: Slurm, sim: Simulator, agent: Agent
) -> None:
    agent.start()
    event = sim.schedule("Freeze", notice_seconds=3 * 86400, duration_seconds=-1, lasts_seconds=None)
    sim.wait_polled(event)
    sim.wait_polls(5)
    assert not slurm.is_drained()
    sim.start_event(event)
    agent.wait_log("started", event_id=event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert not slurm.is_drained()
    assert sim.approvals() == ()


def test_a_configuration_file_that_is_not_there_is_left_to_slurm(slurm: Slurm, tmp_path: Path) -> None:
    finds = tmp_path / "bin" / "scontrol"
    finds.parent.mkdir()
    # A configless node's programs find the configuration by themselves, unless SLURM_CONF leads them astray.
    script = f'#!/bin/sh\nSLURM_CONF="${{SLURM_CONF:-{slurm.configuration}}}" exec "/usr/bin/${{0##*/}}" "$@"\n'
    finds.write_text(script)
    finds.chmod(0o755)
    (finds.parent / "squeue").symlink_to(finds)
    path = f"{finds.parent}:{os.environ['PATH']}"
    for hook in ("slurm-prepare", "slurm-recover"):
        with start_hook(slurm, hook, PATH=path, SLURM_CONF="/etc/slurm/not-here") as process:
            process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    assert not slurm.is_drained()


def test_a_request_without_an_answer_is_sent_again(slurm: Slurm, tmp_path: Path) -> None:
    real = shutil.which("scontrol")
    hanging = tmp_path / "bin" / "scontrol"
    hanging.parent.mkdir()
    # The first run of this program hangs; the later ones are Slurm's.
    hanging.write_text(f'#!/bin/sh\nmkdir "{tmp_path}/hung" 2>/dev/null && exec sleep 600\nexec {real} "$@"\n')
    hanging.chmod(0o755)
    with start_hook(slurm, "slurm-prepare", PATH=f"{hanging.parent}:{os.environ['PATH']}") as hook:
        output, _ = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 0
    assert (tmp_path / "hung").is_dir()
    assert output == f"slurm-prepare: {NODE} takes no new jobs\nslurm-prepare: no job runs on {NODE}\n"


def test_a_controller_that_never_answers_fails_the_hook_in_time(slurm: Slurm, tmp_path: Path) -> None:
    hanging = tmp_path / "bin" / "scontrol"
    hanging.parent.mkdir()
    hanging.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n")
    hanging.chmod(0o755)
    path = {"PATH": f"{hanging.parent}:{os.environ['PATH']}", "SCHEDULED_EVENT_SECONDS_LEFT": "25"}
    with start_hook(slurm, "slurm-prepare", **path) as hook:
        _, errors = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 1
    assert errors.endswith(f"slurm-prepare: gave up: ask scontrol show node {NODE} --oneliner\n")


def test_a_node_that_has_not_registered_since_the_boot_stays_drained(slurm: Slurm, tmp_path: Path) -> None:
    with start_hook(slurm, "slurm-prepare") as hook:
        hook.communicate(timeout=PATIENCE)
    forgetful = tmp_path / "bin" / "scontrol"
    forgetful.parent.mkdir()
    forgetful.write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@" | sed "s/BootTime=[^ ]*/BootTime=None/"\n')
    forgetful.chmod(0o755)
    path = f"{forgetful.parent}:{os.environ['PATH']}"
    with start_hook(slurm, "slurm-recover", PATH=path, SLURM_WAIT="1") as hook:
        _, errors = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 1
    assert (
        errors
        == f"slurm-recover: slurmd has not registered {NODE} since this machine was booted, for 1 s: see its log\n"
    )
    assert slurm.is_drained()
    with start_hook(slurm, "slurm-recover") as hook:
        hook.communicate(timeout=PATIENCE)
    assert not slurm.is_drained()


def test_a_node_drained_by_others_stays_drained_and_hooks_may_run_again(
    slurm: Slurm,
) -> None:
    def run_hook(name: str) -> tuple[int, str]:
        process = start_hook(slurm, name)
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output

    assert run_hook("slurm-prepare") == (
        0,
        f"slurm-prepare: {NODE} takes no new jobs\nslurm-prepare: no job runs on {NODE}\n",
    )
    assert run_hook("slurm-prepare") == (
        0,
        f"slurm-prepare: {NODE} is drained by us already\nslurm-prepare: no job runs on {NODE}\n",
    )
    assert run_hook("slurm-recover") == (0, f"slurm-recover: {NODE} is back in service\n")
    assert run_hook("slurm-recover") == (0, f"slurm-recover: {NODE} was not drained\n")

    slurm.run("scontrol", "update", f"NodeName={NODE}", "State=DRAIN", "Reason=bad disk")
    reason = slurm.node("Reason")
    assert reason.startswith("bad disk")
    stays = f"{NODE} was not drained by this agent, and is left as it is: {reason}"
    assert run_hook("slurm-prepare") == (0, f"slurm-prepare: {stays}\nslurm-prepare: no job runs on {NODE}\n")
    assert run_hook("slurm-recover") == (0, f"slurm-recover: {stays}\n")
    assert slurm.node("Reason") == reason
