"""The example policy for a Slurm node, with a real Slurm: one controller, one node, both on loopback.

Jobs run as root without authentication between the daemons, which only a test may do.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import apt
from examples import copy_hooks, example
from harness import PATIENCE, Agent, Simulator

NODE = "node-1"
MARK = "scheduled-events-agent:"
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,sched_min_interval=100000
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1
PrologSlurmctld={directory}/prolog
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Slurm:
    """A cluster of one node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.configuration = directory / "slurm.conf"
        text = CONFIGURATION.format(
            directory=directory,
            controller_port=free_port(),
            node_port=free_port(),
            node=NODE,
            host=socket.gethostname().partition(".")[0],
        )
        self.configuration.write_text(text, encoding="utf-8")
        prolog = directory / "prolog"
        prolog.write_text(f"#!/bin/sh\nwhile [ -e {directory}/prolog-waits ]; do sleep 0.1; done\n")
        prolog.chmod(0o755)
        self._environment = {**os.environ, "SLURM_CONF": str(self.configuration)}

        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, daemon: str, *arguments: str) -> None:
        with (self.directory / f"{daemon}.out").open("ab") as log:
            command = [daemon, "-D", *arguments]
            self._daemons[daemon] = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def stop(self, daemon: str) -> None:
        self._daemons[daemon].terminate()
        self._daemons.pop(daemon).wait(PATIENCE)

    def reboot_node(self, agent: Agent) -> None:
        """Let the controller see a node that was booted anew: slurmd -b says so, whenever it registers."""
        self.stop("slurmd")
        self.start("slurmd", "-N", NODE, "-b")
        log = self.directory / "slurmctld.log"
        agent.wait_until(lambda: "unexpectedly rebooted" in log.read_text(), "the controller saw the reboot")
        self.stop("slurmd")
        self.start("slurmd", "-N", NODE)

    def close(self) -> None:
        """End the daemons; and the jobs first, which outlive them."""
        (self.directory / "prolog-waits").unlink(missing_ok=True)
        for number in self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", number)
        while self.run("squeue", "--noheader", "--format=%A"):  # empty as well if the controller is gone
            time.sleep(0.1)
        for daemon in [*self._daemons]:
            self.stop(daemon)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def node(self, field: str) -> str:
        """A field of the node, such as State; of the reason, all of it."""
        facts = self.run("scontrol", "show", "node", NODE, "--oneliner")
        after = facts.partition(f" {field}=")[2]
        return after if field == "Reason" else after.partition(" ")[0]

    def submit(self, script: str, *options: str) -> str:
        """Submit a job; returns its number."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *options, f"--wrap={script}")

    def job(self, number: str) -> str:
        """The state of a job, such as R or PD; empty when it is over."""
        return self.run("squeue", "--noheader", f"--jobs={number}", "--format=%t")


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator) -> Iterator[Agent]:
    one = Agent(tmp_path / "agent", sim.endpoint())
    yield one
    one.close()
    sys.stdout.write("".join(one.history))  # pytest shows it on failure only


@pytest.fixture
def slurm(tmp_path: Path, sim: Simulator, agent: Agent) -> Iterator[Slurm]:
    """A cluster whose node is idle, and the policy of its agent."""
    for program in ("slurmctld", "slurmd", "scontrol"):
        apt.need(program, "slurmctld", "slurmd", "slurm-client")
    one = Slurm(tmp_path)
    # All that the test changes in the example.
    replacements = {
        "SLURM_CONF: /etc/slurm/slurm.conf\n": f"SLURM_CONF: {one.configuration}\n      SLURM_NODE: {NODE}\n",
        "retry_delay: 15s": "retry_delay: 500ms",
    }
    policy = example("slurm-node.yaml", copy_hooks(tmp_path), sim.endpoint(), replacements)
    agent.config.write_text(policy, encoding="utf-8")
    with closing(one):
        one.start("slurmctld")
        one.start("slurmd", "-N", NODE)
        agent.wait_until(lambda: one.node("State") == "IDLE", "the node was idle")
        yield one
        for name in ("slurmctld.log", "slurmd.log"):  # pytest shows them on failure only
            sys.stdout.write(f"--- {name}\n{(tmp_path / name).read_text()}")


def test_a_node_is_drained_approved_after_its_job_and_takes_jobs_again(
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
    assert "DRAIN" not in slurm.node("State")
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
        [str(slurm.directory / "hooks" / name)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_job_that_cannot_be_requeued_is_said_so_from_time_to_time_and_waited_for(
    slurm: Slurm, agent: Agent, tmp_path: Path
) -> None:
    job = slurm.submit(f"until [ -e {tmp_path}/finish ]; do sleep 0.1; done", "--no-requeue")
    agent.wait_until(lambda: slurm.job(job) == "R", "the job ran")
    with start_hook(slurm, "slurm-prepare", SLURM_REQUEUE="yes", SCHEDULED_EVENT_SECONDS_LEFT="25") as hook:
        assert hook.stdout is not None
        until = time.monotonic() + 6
        assert [hook.stdout.readline() for _ in range(2)][1] == f"slurm-prepare: requeueing job {job}\n"
        time.sleep(max(0.0, until - time.monotonic()))
        (tmp_path / "finish").touch()
        rest, _ = hook.communicate(timeout=PATIENCE)
    assert hook.returncode == 0
    assert rest.count("requeueing") <= 1
    assert rest.endswith(f"slurm-prepare: no job runs on {NODE}\n")


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
