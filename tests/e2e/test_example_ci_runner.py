"""The example of a CI runner, with stand-ins for the runner and for the services that give it jobs.

The stand-in runner behaves as GitLab documents its own: SIGQUIT has it take no more jobs and end after the one
that it runs, SIGTERM cuts that off. Real runners are not to be had here.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import sqlite3
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
from examples import HOOKS as INSTALLED
from examples import ServiceManager, Unit, copy_hooks
from harness import CHECKOUT, PATIENCE, Agent, Answer, Request, Server, Simulator

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the hooks are scripts for a Unix shell")

PREPARE, RECOVER = "ci-runner-prepare: ", "ci-runner-recover: "  # what their lines begin with
HOOKS = CHECKOUT / "config/hooks"
TOKEN = "ghp_nobody-must-see-this"
# Takes jobs, each of which lasts until there is a file of its name, and notes what it does. Told twice to finish,
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
        """What tells the hooks of it."""
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

    def notes(self) -> list[str]:
        file = self.place / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def wait_note(self, note: str) -> None:
        self.wait(lambda: note in self.notes(), f"it had noted {note!r}")

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
    """The shipped example, with the shipped hooks where they are installed, told of the stand-in."""
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
    assert busy.notes() == ["one begins"]
    busy.let_end("one")
    sim.wait_approved(event, PATIENCE)
    assert busy.notes() == ["one begins", "one is done", "ends"]
    busy.wait_asked("stopped")
    agent.wait_log("started", event_id=event)

    agent.kill()
    with contextlib.closing(sqlite3.connect(agent.state_dir / "state.db")) as state, state:
        state.execute("UPDATE workflow SET body = json_set(body, '$.boot_id', 'the boot before')")
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
    assert busy.notes() == ["one begins", "one is done", "ends"]
    lines = [line["line"] for line in agent.log("hook output", hook="take-jobs", event_id=event)]
    assert lines == [
        f"{RECOVER}the runner ({pid}) is finishing its jobs; waiting for its end",
        f"{RECOVER}the runner was started",
    ]


def test_a_job_that_takes_too_long_has_the_event_held_and_goes_on(
    busy: Runner, agent: Agent, sim: Simulator
) -> None:
    event = sim.schedule("Reboot", notice_seconds=8, lasts_seconds=None)
    held = agent.wait_log("held", event_id=event)
    assert held["reason"].startswith("held, Azure starts it at NotBefore: ")
    assert busy.notes() == ["one begins"]
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


def test_a_runner_is_told_once_to_finish_whatever_hooks_wait_for_it(runner: Runner) -> None:
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
    assert runner.notes() == ["one begins", "one is done", "ends"]
    assert run_hook(runner, "ci-runner-recover") == (0, f"{RECOVER}the runner was started\n")


def test_a_mark_that_is_older_than_the_boot_is_of_no_runner_that_finishes(runner: Runner) -> None:
    runner.start()
    mark = runner.place / "mark"
    mark.write_text(f"A\n\n{runner.pid()} the-boot-before\n")
    assert run_hook(runner, "ci-runner-recover") == (
        0,
        f"{RECOVER}the runner ({runner.pid()}) runs already\n",
    )
    assert not mark.exists()


def test_without_a_place_for_the_mark_no_runner_is_stopped(runner: Runner) -> None:
    runner.start()
    code, output = run_hook(runner, "ci-runner-prepare", CI_RUNNER_MARK="/nowhere/mark")
    assert code == 1
    assert output.splitlines()[-1] == f"{PREPARE}the mark cannot be written: /nowhere/mark"
    runner.give("one")
    runner.wait_note("one begins")


def test_a_runner_that_is_started_again_at_once_is_told(runner: Runner) -> None:
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


def test_a_runner_that_has_ended_unnoticed_does_not_run(runner: Runner, zombie: int) -> None:
    (runner.place / "pid").write_text(str(zombie))
    assert run_hook(runner, "ci-runner-prepare") == (0, f"{PREPARE}the runner does not run\n")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    (runner.place / "mark").write_text(f"A\n\n{zombie} {boot}")
    assert run_hook(runner, "ci-runner-recover") == (0, f"{RECOVER}the runner was started\n")


@pytest.mark.parametrize("hook", ["ci-runner-prepare", "ci-runner-recover"])
def test_a_runner_whose_end_is_noticed_during_a_look_at_it_does_not_run(
    runner: Runner, tmp_path: Path, hook: str
) -> None:
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
def test_a_runner_that_ends_unnoticed_is_not_waited_for_any_longer(runner: Runner, hook: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:  # nobody asks after it before this block ends
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


# --- Services that give a runner its jobs


class Service(Server):
    """A stand-in for the two interfaces, as far as the hook asks them, that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = {"self-hosted", "azure-vm"}
        self.is_enabled = True
        self.is_busy = False
        self.faults: list[Answer] = []
        """What it answers first, before it comes to its senses."""
        self.asked: list[str] = []
        self.authorizations: set[str] = set()
        self.news = threading.Condition()

    def answer(self, request: Request) -> Answer:
        with self.news:
            self.authorizations.add(request.headers["Authorization"])
            self.asked.append(f"{request.method} {request.path}")
            answer = self.faults.pop(0) if self.faults else self.say(*self.do(request))
            self.news.notify_all()
        return answer

    def say(self, status: int, content: Any) -> Answer:
        return Answer(status, json.dumps(content).encode())

    def do(self, request: Request) -> tuple[int, Any]:
        path, _, query = request.path.partition("?")
        body = json.loads(request.body or b"null")
        match request.method, path, query:
            case "GET", "/runners/23", "":
                return 200, {"id": 23, "busy": self.is_busy, "labels": [{"name": name} for name in self.labels]}
            case "DELETE", "/runners/23/labels/azure-vm", "" if "azure-vm" in self.labels:
                self.labels.remove("azure-vm")
                return 200, {"total_count": 1}
            case "POST", "/runners/23/labels", "":
                self.labels |= set(body["labels"])
                return 200, {"total_count": 2}
            case "GET", "/agents/23", "api-version=7.1":
                return 200, {"id": 23, "enabled": self.is_enabled}
            case "GET", "/agents/23", "includeAssignedRequest=true&api-version=7.1":
                return 200, {"id": 23, **({"assignedRequest": {"requestId": 4}} if self.is_busy else {})}
            case "PATCH", "/agents/23", "api-version=7.1" if body["id"] == 23:
                self.is_enabled = body["enabled"]
                return 200, {"id": 23}
        return 404, {"message": "Not Found"}

    def hook(self, place: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        token = place / "token"
        token.write_text(f"{TOKEN}\n")
        kind = "agents" if "azure-pipelines" in arguments else "runners"
        settings = {
            "PATH": os.environ["PATH"],
            "CI_RUNNER_URL": f"{self.url}/{kind}/23",
            "CI_RUNNER_LABEL": "azure-vm",
            "CI_RUNNER_TOKEN_FILE": str(token),
            "CI_RUNNER_POLL": "0.05",
            "CI_RUNNER_MARK": str(place / "mark"),
        }
        return subprocess.Popen(
            [str(HOOKS / "ci-runner-api"), *arguments],
            env={**settings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_hook(self, place: Path, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.hook(place, *arguments, **environment)
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        yield service


PAUSED = "the runner is given no more jobs; waiting for the one that it runs\nthe runner is idle\n"
PAUSED_BEFORE = PAUSED.replace("no more jobs", "no jobs already")
LEFT_ALONE = (0, "not paused by ci-runner-api: left as it is\n")
both_products = pytest.mark.parametrize("product", ["github", "azure-pipelines"])


@both_products
def test_a_paused_runner_is_given_no_job_and_the_hook_ends_when_it_is_idle(
    service: Service, tmp_path: Path, product: str
) -> None:
    service.is_busy = True
    hook = service.hook(tmp_path, product, "pause")
    with service.news:
        assert service.news.wait_for(lambda: len(service.asked) > 4, PATIENCE)
        assert service.asked[1].startswith("DELETE" if product == "github" else "PATCH")
        assert hook.poll() is None
        assert TOKEN not in " ".join(psutil.Process(hook.pid).cmdline())
        assert (service.labels, service.is_enabled) == (
            ({"self-hosted"}, True) if product == "github" else ({"self-hosted", "azure-vm"}, False)
        )
        service.is_busy = False
    assert hook.communicate(timeout=PATIENCE)[0] == PAUSED
    assert hook.returncode == 0
    assert service.run_hook(tmp_path, product, "pause") == (0, PAUSED_BEFORE)  # again, after a crash
    assert service.run_hook(tmp_path, product, "resume") == (0, "the runner is given jobs again\n")
    assert (service.labels, service.is_enabled) == ({"self-hosted", "azure-vm"}, True)
    assert service.run_hook(tmp_path, product, "resume") == LEFT_ALONE
    basic = base64.b64encode(f":{TOKEN}".encode()).decode()
    assert service.authorizations == {f"Bearer {TOKEN}" if product == "github" else f"Basic {basic}"}


@both_products
def test_a_runner_that_was_paused_before_stays_so(service: Service, tmp_path: Path, product: str) -> None:
    service.labels.remove("azure-vm")
    service.is_enabled = False
    assert service.run_hook(tmp_path, product, "pause") == (0, PAUSED_BEFORE)
    assert service.run_hook(tmp_path, product, "resume") == LEFT_ALONE
    assert (service.labels, service.is_enabled) == ({"self-hosted"}, False)


@both_products
def test_a_question_that_is_not_answered_is_asked_again(service: Service, tmp_path: Path, product: str) -> None:
    service.faults = [
        service.say(503, {"message": "Sorry"}),
        Answer(200, b"<html>"),
        Answer(403, b"slower", {"Retry-After": "1"}),
        Answer(200, b"{}", {"Content-Length": "3"}),  # cut off
        *[service.say(429, None)] * 3,
    ]
    code, output = service.run_hook(tmp_path, product, "pause")
    assert code == 0
    assert output.endswith(PAUSED)
    assert output.count("; asking again in ") == 7
    assert '503 Service Unavailable: {"message": "Sorry"}; asking again in 0.05 s\n' in output


def test_one_that_is_never_answered_fails_the_hook_after_so_many_tries(service: Service, tmp_path: Path) -> None:
    service.faults = [Answer(500)] * 9
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_TRIES="3")
    assert code == 1
    assert output.splitlines()[-1].endswith(": 500 Internal Server Error: ; asked 3 times")
    assert len(service.asked) == 3


GITHUB_UNIT = "actions.runner.example-project.vm-1.service"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    """The service manager, with the unit of an idle runner that does not run."""
    with ServiceManager(tmp_path / "bin", {GITHUB_UNIT: Unit(["sleep", "600"])}) as manager:
        yield manager


@pytest.fixture
def github_policy(service: Service, manager: ServiceManager, tmp_path: Path) -> dict[str, Any]:
    """The policy that the page shows for GitHub, told of the stand-ins."""
    page = (CHECKOUT / "docs/cookbook/ci-runner.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(rules:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    policy: dict[str, Any] = yaml.safe_load(text.replace(INSTALLED, str(copy_hooks(tmp_path))))
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    for name, hook in policy["hooks"].items():
        mark = {"pause": "paused", "resume": "paused", "stop": "stopped", "start": "stopped"}[name]
        hook["env"] = {
            **hook.get("env", {}),
            "PATH": f"{manager.directory}:{os.environ['PATH']}",
            "CI_RUNNER_MARK": str(tmp_path / mark),
            "CI_RUNNER_POLL": "0.05",
            **({"CI_RUNNER_URL": f"{service.url}/runners/23"} if mark == "paused" else {}),
            **({"CI_RUNNER_TOKEN_FILE": str(token)} if mark == "paused" else {}),
        }
    return policy


def reboot(agent: Agent, sim: Simulator) -> None:
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=0.5)
    agent.wait_log("closed", event_id=event)
    assert len(sim.approvals(event)) == 1
    outcomes = {line["reason"] for line in agent.log("hook finished", event_id=event)}
    assert all(outcome.endswith("(succeeded)") for outcome in outcomes), outcomes


def test_the_runner_of_github_is_started_after_an_event_unless_it_was_stopped(
    github_policy: dict[str, Any], manager: ServiceManager, service: Service, agent: Agent, sim: Simulator
) -> None:
    agent.write_policy(**github_policy)
    agent.start()
    agent.wait_log("on_clear hook ended", hook="resume", outcome="succeeded")
    assert not manager.runs(GITHUB_UNIT)
    reboot(agent, sim)
    assert not manager.runs(GITHUB_UNIT)
    assert not any(call.arguments[0] == "start" for call in manager.calls)

    manager.start(GITHUB_UNIT)
    reboot(agent, sim)
    verbs = [call.arguments[0] for call in manager.calls if call.arguments[0] in ("stop", "start")]
    assert verbs[-2:] == ["stop", "start"]
    assert manager.runs(GITHUB_UNIT)
    assert service.labels == {"self-hosted", "azure-vm"}


def test_an_answer_without_end_is_not_read_to_its_end(service: Service, tmp_path: Path) -> None:
    service.faults = [Answer(200, b" " * (5 << 20))]
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_TRIES="1")
    assert (code, output.partition(": ")[2]) == (1, "more than 4194304 bytes; asked 1 times\n")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_token_does_not_follow_a_redirection(service: Service, tmp_path: Path, status: int) -> None:
    with Service() as stranger:
        goal = f"{stranger.url}/runners/23"
        service.faults = [Answer(status, b"", {"Location": goal})]
        code, output = service.run_hook(tmp_path, "github", "pause")
        assert code == 1
        assert output.endswith(f", to {goal}: see CI_RUNNER_URL, and the token\n")
        assert stranger.asked == []


@pytest.mark.parametrize("url", ["http://192.0.2.1/runners/23", "file:///etc/runners/23", "192.0.2.1/23"])
def test_the_token_is_not_sent_without_tls(service: Service, tmp_path: Path, url: str) -> None:
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_URL=url)
    expected = f"ci-runner-api: CI_RUNNER_URL: expected one that begins with https://; got {url}\n"
    assert (code, output) == (2, expected)


def test_a_token_that_is_none_is_not_shown(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "two words"
    for text, words in (("half a token\nand the rest", 6), ("", 0)):
        file.write_text(text)
        said = f"ci-runner-api: no token: {file}: expected one word, got {words}\n"
        assert service.run_hook(tmp_path, "github", "pause", CI_RUNNER_TOKEN_FILE=str(file)) == (2, said)
    assert service.asked == []


def test_the_hook_ends_by_itself_when_the_event_leaves_no_more_time(service: Service, tmp_path: Path) -> None:
    service.is_busy = True
    code, output = service.run_hook(tmp_path, "github", "pause", SCHEDULED_EVENT_SECONDS_LEFT="11")
    assert code == 1
    assert output.splitlines()[-1] == "the event leaves no more time to wait until the runner is idle"
    assert service.labels == {"self-hosted"}


@pytest.mark.parametrize("content", [None, [], {}, {"labels": [7]}])
def test_what_is_no_runner_is_told(service: Service, tmp_path: Path, content: Any) -> None:
    service.faults = [service.say(200, content)]
    code, output = service.run_hook(tmp_path, "github", "pause")
    assert code == 1
    assert "Traceback" not in output
    assert "not a runner" in output or "not what a runner looks like" in output


@pytest.mark.parametrize("status", [203, 401, 403])
def test_a_service_that_refuses_fails_the_hook_at_once_and_the_token_is_not_shown(
    service: Service, tmp_path: Path, status: int
) -> None:
    service.faults = [service.say(status, {"message": f"Bad credentials {TOKEN}"})]
    code, output = service.run_hook(tmp_path, "azure-pipelines", "pause")
    assert code == 1
    assert f"/agents/23?api-version=7.1: {status} " in output
    assert len(service.asked) == 1
    assert TOKEN not in output


def test_a_runner_that_does_not_exist_is_told(service: Service, tmp_path: Path) -> None:
    url = f"{service.url}/runners/24"
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_URL=url)
    assert code == 1
    assert output.splitlines()[-1] == f'GET {url}: 404 Not Found: {{"message": "Not Found"}}'


def test_what_is_missing_or_wrong_in_its_settings_is_told(service: Service, tmp_path: Path) -> None:
    def said(*arguments: str, **environment: str) -> str:
        code, output = service.run_hook(tmp_path, *(arguments or ("github", "pause")), **environment)
        assert code == 2
        return output

    missing = str(tmp_path / "missing")
    reason = f"no token: [Errno 2] No such file or directory: '{missing}'"
    way_out = "set CI_RUNNER_TOKEN_FILE, or give the unit the credential ci-runner-token"
    assert said(CI_RUNNER_TOKEN_FILE=missing) == f"ci-runner-api: {reason}; {way_out}\n"
    assert said(CI_RUNNER_TOKEN_FILE="") == f"ci-runner-api: no token: {way_out}\n"
    assert said(CI_RUNNER_URL="") == "ci-runner-api: set CI_RUNNER_URL in the hook's env\n"
    assert said(CI_RUNNER_LABEL="") == "ci-runner-api: set CI_RUNNER_LABEL in the hook's env\n"
    expected = "ci-runner-api: CI_RUNNER_POLL: expected a number greater than 0; got 'often'\n"
    assert said(CI_RUNNER_POLL="often") == expected
    expected = "ci-runner-api: CI_RUNNER_URL: expected one that ends with the runner's number; got "
    assert said(CI_RUNNER_URL=f"{service.url}/runners") == f"{expected}{service.url}/runners\n"
    expected = "ci-runner-api: expected: ci-runner-api github|azure-pipelines pause|resume\n"
    assert said("jenkins", "pause") == expected
    assert service.asked == []


def test_without_a_place_for_the_mark_the_runner_is_not_paused(service: Service, tmp_path: Path) -> None:
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_MARK="/nowhere/mark")
    assert code == 2
    assert output.endswith("'/nowhere/mark'; see CI_RUNNER_MARK\n")
    assert service.labels == {"self-hosted", "azure-vm"}
