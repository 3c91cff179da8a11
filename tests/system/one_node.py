"""A Slurm of one controller and one node, both on loopback.

Jobs run as root without authentication between the daemons, which only a test may do.
"""

import sys

if sys.platform == "win32":
    raise ImportError("Slurm is for Unix")

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import apt
import psutil
from examples import copy_hooks, example
from harness import PATIENCE, Agent
from ports import free_port

NODE = "node-1"
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


class Slurm:
    """A cluster of one node; installed if need be, or the test is skipped."""

    def __init__(self, directory: Path) -> None:
        apt.need_root("Slurm")
        for program in ("slurmctld", "slurmd", "scontrol"):
            apt.need(program, "slurmctld", "slurmd", "slurm-client")
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

    def policy(self, endpoint: str) -> str:
        """The shipped example; all that is changed in it stands here."""
        replacements = {
            "SLURM_CONF: /etc/slurm/slurm.conf\n": f"SLURM_CONF: {self.configuration}\n      SLURM_NODE: {NODE}\n",
            "retry_delay: 15s": "retry_delay: 500ms",
        }
        return example("slurm-node.yaml", copy_hooks(self.directory), endpoint, replacements)

    def start_all(self, agent: Agent) -> None:
        """Start both daemons, and wait until the node is idle."""
        self.start("slurmctld")
        self.start("slurmd", "-N", NODE)
        agent.wait_until(lambda: self.node("State") == "IDLE", "the node was idle")

    def start(self, daemon: str, *arguments: str) -> None:
        with (self.directory / f"{daemon}.out").open("ab") as log:
            command = [daemon, "-D", *arguments]
            self._daemons[daemon] = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def stop(self, daemon: str) -> None:
        self._daemons[daemon].terminate()
        self._daemons.pop(daemon).wait(PATIENCE)

    def reboot_node(self, agent: Agent) -> None:
        """Let the controller see a node that was booted again."""
        self.stop("slurmd")
        self.boot_node(agent)

    def cut_power(self) -> None:
        """End slurmd, its steps and the jobs on the node, as a power cut does."""
        if "slurmd" in self._daemons:
            self._daemons["slurmd"].kill()
            self._daemons.pop("slurmd").wait(PATIENCE)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if "SLURM_JOB_ID" in environment and environment.get("SLURM_CONF") == str(self.configuration):
                    step = process.parent()
                    if step is not None and step.name() == "slurmstepd":
                        step.kill()
                    process.kill()

    def boot_node(self, agent: Agent) -> None:
        """Start slurmd, which says whenever it registers that the node has rebooted (-b), then without that."""
        self.start("slurmd", "-N", NODE, "-b")
        log = self.directory / "slurmctld.log"
        agent.wait_until(lambda: "unexpectedly rebooted" in log.read_text(), "the controller saw the reboot")
        self.stop("slurmd")
        self.start("slurmd", "-N", NODE)

    def close(self) -> None:
        """End the daemons; and the jobs first, which outlive them."""
        try:
            self._end_jobs()
        finally:
            for process in self._daemons.values():
                process.terminate()
            for process in self._daemons.values():
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(PATIENCE)
            self._daemons.clear()
            self.cut_power()  # of what has outlived them

    def _end_jobs(self) -> None:
        (self.directory / "prolog-waits").unlink(missing_ok=True)
        for number in self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", number)
        until = time.monotonic() + PATIENCE  # without slurmd, the controller waits for longer
        # Empty as well if the controller is gone.
        while self.run("squeue", "--noheader", "--format=%A") and time.monotonic() < until:
            time.sleep(0.1)

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

    def is_drained(self) -> bool:
        """Whether the node takes no jobs; fails if Slurm does not say."""
        state = self.node("State")
        assert state, "Slurm says nothing of the node"
        return "DRAIN" in state

    def submit(self, script: str, *options: str) -> str:
        """Submit a job; returns its number."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *options, f"--wrap={script}")

    @contextlib.contextmanager
    def srun(self, script: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a job that has a terminal, and no batch script; its client ends with the block."""
        command = ["srun", "--job-name=by-srun", "--chdir=/", "sh", "-c", script]
        with subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL) as client:
            try:
                yield client
            finally:
                client.kill()

    def job(self, number: str) -> str:
        """The state of a job, such as R or PD; empty when it is over."""
        return self.run("squeue", "--noheader", f"--jobs={number}", "--format=%t")
