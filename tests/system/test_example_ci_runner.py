"""The example of a CI runner, with a program that takes jobs as a runner does.

It behaves as GitLab documents its own: SIGQUIT has it take no more jobs and end after the one that it runs, and
SIGTERM cuts that off.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("the hooks are scripts for a Unix shell", allow_module_level=True)

from harness import CHECKOUT, PATIENCE, Agent, Simulator
from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")
PREPARE, RECOVER = "ci-runner-prepare: ", "ci-runner-recover: "  # what their lines begin with
HOOKS = SHIPPED_HOOKS
# Takes jobs, each of which lasts until there is a file of its name, and notes what it does. Asked twice to finish,
# it cuts the job off, as some runners do.
RUNNER = """
import pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
is_finishing = []
def finish(*_):
    if is_finishing:
        notes.write("is cut off\\n")
        sys.exit(1)
    is_finishing.append(True)
signal.signal(signal.SIGQUIT, finish)
(place / "pid").write_text(str(__import__("os").getpid()))
notes = (place / "notes").open("a", buffering=1)
while not is_finishing:
    for job in sorted((place / "queue").iterdir()):
        if is_finishing:
            break
        job.unlink()
        notes.write(f"{job.name} begins\\n")
        while not (place / f"{job.name} is done").exists():
            time.sleep(0.01)
        notes.write(f"{job.name} is done\\n")
    time.sleep(0.01)
notes.write("ends\\n")
"""


class Runner:
    """The stand-in, its queue, and the service manager that starts it: the test itself."""

    def __init__(self, place: Path) -> None:
        (place / "queue").mkdir(parents=True)
        self.place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """The environment that points the hooks to this stand-in."""
        return {
            "CI_RUNNER_PID_FILE": str(self.place / "pid"),
            "CI_RUNNER_MARK": str(self.place / "mark"),
            "CI_RUNNER_START": f": >'{self.place}/to be started'",
            "CI_RUNNER_STOP": f": >'{self.place}/to be stopped'",
        }

    def start(self) -> None:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", RUNNER, str(self.place)])
        self._processes.append(process)
        threading.Thread(target=process.wait).start()  # as a service manager would
        self.wait(lambda: (self.place / "pid").exists() and self.pid() == process.pid, "it had started")

    def pid(self) -> int:
        return int((self.place / "pid").read_text() or 0)

    def give(self, job: str) -> None:
        (self.place / "queue" / job).touch()

    def let_end(self, job: str) -> None:
        (self.place / f"{job} is done").touch()

    def records(self) -> list[str]:
        file = self.place / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def wait_note(self, note: str) -> None:
        self.wait(lambda: note in self.records(), f"it had noted {note!r}")

    def wait_asked(self, what: str) -> None:
        """Wait until a hook has asked for its start, or its stop."""
        file = self.place / f"to be {what}"
        self.wait(file.exists, f"it was {file.name}")
        file.unlink()

    def wait(self, test: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not test():
            assert time.monotonic() < deadline, f"gave up waiting until {what}"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path / "runner")
    yield runner
    runner.close()


@pytest.fixture
def policy(runner: Runner, tmp_path: Path) -> dict[str, Any]:
    """The shipped example with the shipped hooks in their installed places, and with the stand-in's address."""
    text = (CHECKOUT / "config/examples/ci-runner.yaml").read_text("utf-8")
    hooks = Path(shutil.copytree(HOOKS, tmp_path / "hooks"))
    policy: dict[str, Any] = yaml.safe_load(text.replace("/etc/scheduled-events-agent/hooks", str(hooks)))
    for hook in policy["hooks"].values():
        hook["env"] |= runner.environment
    return policy


@pytest.fixture
def busy(runner: Runner, agent: Agent, policy: dict[str, Any]) -> Runner:
    """The runner at a job, beside an agent that has started."""
    runner.start()
    agent.write_policy(**policy)
    agent.start()
    agent.wait_log("on_clear hook ended", hook="take-jobs", outcome="succeeded")
    runner.give("one")
    runner.wait_note("one begins")
    return runner


def test_a_job_ends_before_the_approval_and_the_next_begins_after_the_reboot(
    busy: Runner, agent: Agent, sim: Simulator
) -> None:
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
    agent.wait_log("hook output", hook="finish-jobs")
    busy.give("two")
    sim.wait_polls(3)
    assert sim.approvals() == ()
    assert busy.records() == ["one begins"]
    busy.let_end("one")
    sim.wait_approved(event, PATIENCE)
    assert busy.records() == ["one begins", "one is done", "ends"]
    busy.wait_asked("stopped")
    agent.wait_log("started", event_id=event)

    agent.kill()
    agent.forget_boot()
    sim.end(event)
    agent.start()
    busy.wait_asked("started")
    busy.start()
    busy.wait_note("two begins")
    assert agent.wait_log("closed", event_id=event)["reason"] == "is over: completed"
    lines = [line["line"] for line in agent.log("hook output", hook="take-jobs")]
    assert lines == [f"{RECOVER}the runner was started"]


def test_when_the_event_is_canceled_the_runner_ends_its_job_and_is_started_anew(
    busy: Runner, agent: Agent, sim: Simulator
) -> None:
    pid = busy.pid()
    event = sim.schedule("Reboot", notice_seconds=900)
    agent.wait_log("hook output", hook="finish-jobs")
    sim.cancel(event)
    agent.wait_log("hook output", hook="take-jobs", event_id=event)
    busy.let_end("one")
    busy.wait_asked("started")
    busy.start()
    agent.wait_log("closed", event_id=event)
    assert busy.records() == ["one begins", "one is done", "ends"]
    lines = [line["line"] for line in agent.log("hook output", hook="take-jobs", event_id=event)]
    assert lines == [
        f"{RECOVER}the runner ({pid}) is finishing its jobs; waiting for its end",
        f"{RECOVER}the runner was started",
    ]


def test_a_job_that_takes_too_long_has_the_event_held_and_continues(
    busy: Runner, agent: Agent, sim: Simulator
) -> None:
    event = sim.schedule("Reboot", notice_seconds=8, lasts_seconds=None)
    held = agent.wait_log("held", event_id=event)
    assert "; Azure starts it at " in held["reason"]
    assert busy.records() == ["one begins"]
    assert sim.approvals() == ()


def test_a_freeze_is_no_reason_to_stop_jobs(busy: Runner, sim: Simulator, agent: Agent) -> None:
    event = sim.schedule("Freeze", lasts_seconds=0.5)
    agent.wait_log("closed", event_id=event)
    assert len(sim.approvals(event)) == 1
    busy.let_end("one")
    busy.give("two")
    busy.wait_note("two begins")


def environment_of(runner: Runner, event: str = "A") -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "SCHEDULED_EVENT_ID": event, **runner.environment}


def start_hook(runner: Runner, name: str, event: str = "A") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(HOOKS / name)], env=environment_of(runner, event), stdout=subprocess.PIPE, text=True
    )


def run_hook(runner: Runner, name: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(HOOKS / name)],
        env={**environment_of(runner), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


LEFT = (0, f"{RECOVER}not stopped by ci-runner-prepare: left as it is\n")


def test_the_hooks_may_run_again(runner: Runner) -> None:
    runner.start()
    pid = runner.pid()
    assert run_hook(runner, "ci-runner-recover") == LEFT
    waits = f"{PREPARE}the runner ({pid}) takes no more jobs; waiting for those that it runs\n"
    assert run_hook(runner, "ci-runner-prepare") == (0, f"{waits}{PREPARE}the runner has ended\n")
    assert run_hook(runner, "ci-runner-prepare") == (0, f"{PREPARE}the runner does not run\n")
    assert run_hook(runner, "ci-runner-recover") == (0, f"{RECOVER}the runner was started\n")
    assert run_hook(runner, "ci-runner-recover") == LEFT


def test_a_runner_that_did_not_run_before_the_event_is_not_started_after_it(runner: Runner) -> None:
    assert run_hook(runner, "ci-runner-prepare") == (0, f"{PREPARE}the runner does not run\n")
    assert run_hook(runner, "ci-runner-recover") == LEFT
    assert not (runner.place / "to be started").exists()


def test_a_runner_is_asked_once_to_finish_however_many_hooks_wait_for_it(runner: Runner) -> None:
    runner.start()
    runner.give("one")
    runner.wait_note("one begins")
    with start_hook(runner, "ci-runner-prepare") as first:
        assert first.stdout is not None
        assert "takes no more jobs" in first.stdout.readline()
        with start_hook(runner, "ci-runner-prepare", "B") as second:
            assert second.stdout is not None
            assert "was asked to finish before" in second.stdout.readline()
            first.terminate()  # one of the two events is canceled
            runner.let_end("one")
            assert second.wait(PATIENCE) == 0
    assert runner.records() == ["one begins", "one is done", "ends"]
    assert run_hook(runner, "ci-runner-recover") == (0, f"{RECOVER}the runner was started\n")


def test_a_mark_older_than_the_boot_is_ignored(runner: Runner) -> None:
    runner.start()
    mark = runner.place / "mark"
    mark.write_text(f"A\n\n{runner.pid()} the-boot-before\n")
    assert run_hook(runner, "ci-runner-recover") == (
        0,
        f"{RECOVER}the runner ({runner.pid()}) runs already\n",
    )
    assert not mark.exists()


def test_without_a_directory_for_the_mark_no_runner_is_stopped(runner: Runner) -> None:
    runner.start()
    code, output = run_hook(runner, "ci-runner-prepare", CI_RUNNER_MARK="/nowhere/mark")
    assert code == 1
    assert output.splitlines()[-1] == f"{PREPARE}the mark cannot be written: /nowhere/mark"
    runner.give("one")
    runner.wait_note("one begins")


def test_a_runner_that_is_restarted_at_once_is_asked_to_finish(runner: Runner) -> None:
    runner.start()
    runner_file = runner.place / "pid"
    with subprocess.Popen(["sleep", "600"]) as another:
        stop = f"echo {another.pid} >'{runner_file}'"
        code, output = run_hook(runner, "ci-runner-prepare", CI_RUNNER_STOP=stop)
        another.kill()
    said = f"{PREPARE}the runner ({another.pid}) was started again: see CI_RUNNER_STOP"
    assert (code, output.splitlines()[-1]) == (1, said)


@pytest.fixture
def zombie() -> Iterator[int]:
    """A runner that has ended, and whose parent has not asked after it."""
    with subprocess.Popen(["true"]) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        yield process.pid


def test_a_runner_that_exited_unseen_is_not_running(runner: Runner, zombie: int) -> None:
    (runner.place / "pid").write_text(str(zombie))
    assert run_hook(runner, "ci-runner-prepare") == (0, f"{PREPARE}the runner does not run\n")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    (runner.place / "mark").write_text(f"A\n\n{zombie} {boot}")
    assert run_hook(runner, "ci-runner-recover") == (0, f"{RECOVER}the runner was started\n")


@pytest.mark.parametrize("hook", ["ci-runner-prepare", "ci-runner-recover"])
def test_a_runner_that_exits_during_a_check_is_not_running(runner: Runner, tmp_path: Path, hook: str) -> None:
    with subprocess.Popen(["true"]) as process:
        (runner.place / "pid").write_text(str(process.pid))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        (runner.place / "mark").write_text(f"A\n\n{process.pid} {boot}")
        # Looks only when the parent has asked after the process.
        slow = tmp_path / "bin" / "grep"
        slow.parent.mkdir()
        slow.write_text(
            f"#!/bin/sh\n>'{tmp_path}/looks'\nuntil [ -e '{tmp_path}/reaped' ]; do sleep 0.02; done\n"
            f'exec {shutil.which("grep")} "$@"\n'
        )
        slow.chmod(0o755)
        environment = {**environment_of(runner), "PATH": f"{slow.parent}:{os.environ['PATH']}"}
        with subprocess.Popen([HOOKS / hook], env=environment, stdout=subprocess.PIPE, text=True) as looking:
            runner.wait((tmp_path / "looks").exists, "it looked")
            process.wait(PATIENCE)
            (tmp_path / "reaped").touch()
            try:
                output, _ = looking.communicate(timeout=PATIENCE)
            finally:
                looking.kill()
    does = f"{PREPARE}the runner does not run\n" if "prepare" in hook else f"{RECOVER}the runner was started\n"
    assert (looking.returncode, output) == (0, does)


@pytest.mark.parametrize("hook", ["ci-runner-prepare", "ci-runner-recover"])
def test_a_hook_stops_waiting_for_a_runner_that_exited_unseen(runner: Runner, hook: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:  # it is not waited for before this block ends
        (runner.place / "pid").write_text(str(process.pid))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        (runner.place / "mark").write_text(f"A\n\n{process.pid} {boot}")
        with start_hook(runner, hook) as waiting:
            assert waiting.stdout is not None
            waiting.stdout.readline()
            process.kill()
            try:
                assert waiting.wait(PATIENCE) == 0
            finally:
                waiting.kill()
    if hook == "ci-runner-recover":
        runner.wait_asked("started")
