"""The example of a CI runner, with stand-ins for the runner and for the services that give it jobs.

The stand-in runner behaves as GitLab documents its own: SIGQUIT has it take no more jobs and end after the one
that it runs, SIGTERM cuts that off. Real runners are not to be had here.
"""

import base64
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import CHECKOUT, PATIENCE, Agent, Simulator

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the hooks are scripts for a Unix shell")

HOOKS = CHECKOUT / "config/hooks"
TOKEN = "a token that nobody must see"
# Takes jobs, each of which lasts until there is a file of its name, and notes what it does.
RUNNER = """
import pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
is_finishing = []
signal.signal(signal.SIGQUIT, lambda *_: is_finishing.append(True))
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
            assert time.monotonic() < deadline, f"waited in vain until {what}"
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


def test_the_running_job_ends_before_the_approval_and_the_next_one_begins_after_the_reboot(
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
    (busy.place / "mark").unlink()  # lay in /run
    with contextlib.closing(sqlite3.connect(agent.state_dir / "state.db")) as state, state:
        state.execute("UPDATE workflow SET body = json_set(body, '$.boot_id', 'the boot before')")
    sim.end(event)
    agent.start()
    busy.wait_asked("started")
    busy.start()
    busy.wait_note("two begins")
    assert agent.wait_log("closed", event_id=event)["reason"] == "is over: completed"
    lines = [line["line"] for line in agent.log("hook output", hook="take-jobs")]
    assert lines == ["the runner was started"]


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
    assert lines == [f"the runner ({pid}) is finishing its jobs; waiting for its end", "the runner was started"]


def test_a_job_that_takes_too_long_has_the_event_held_and_goes_on(
    busy: Runner, agent: Agent, sim: Simulator
) -> None:
    event = sim.schedule("Reboot", notice_seconds=8, lasts_seconds=None)
    held = agent.wait_log("held", event_id=event)
    assert held["reason"].startswith("held, NotBefore decides: ")
    assert busy.notes() == ["one begins"]
    assert sim.approvals() == ()


def test_a_freeze_is_no_reason_to_stop_jobs(busy: Runner, sim: Simulator, agent: Agent) -> None:
    event = sim.schedule("Freeze", lasts_seconds=0.5)
    agent.wait_log("closed", event_id=event)
    assert len(sim.approvals(event)) == 1
    busy.let_end("one")
    busy.give("two")
    busy.wait_note("two begins")


def test_the_hooks_may_run_again(runner: Runner) -> None:
    def run(name: str) -> tuple[int, str]:
        environment = {"PATH": os.environ["PATH"], **runner.environment}
        done = subprocess.run(
            [str(HOOKS / name)], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.returncode, done.stdout + done.stderr

    runner.start()
    pid = runner.pid()
    assert run("ci-runner-recover") == (0, f"the runner ({pid}) runs already\n")
    assert run("ci-runner-prepare") == (
        *(0, f"the runner ({pid}) takes no more jobs; waiting for those that it runs\nthe runner has ended\n"),
    )
    assert run("ci-runner-prepare") == (0, "the runner does not run\n")
    for _ in range(2):
        assert run("ci-runner-recover") == (0, "the runner was started\n")


# --- Services that give a runner its jobs


class Service:
    """A stand-in for the two interfaces, as far as the hook asks them, that notes what it is asked."""

    def __init__(self) -> None:
        self.labels = {"self-hosted", "azure-vm"}
        self.is_enabled = True
        self.is_busy = False
        self.status = 200
        self.asked: list[str] = []
        self.authorizations: set[str] = set()
        self.news = threading.Condition()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                body = json.loads(self.rfile.read(length) or "null")
                with service.news:
                    service.authorizations.add(self.headers["Authorization"])
                    service.asked.append(f"{self.command} {self.path}")
                    status, content = service.answer(self.command, self.path, body)
                    service.news.notify_all()
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - as http.server calls them

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, {"message": "Bad credentials"}
        path, _, query = path.partition("?")
        match method, path, query:
            case "GET", "/runners/23", "":
                return 200, {"id": 23, "busy": self.is_busy, "labels": [{"name": name} for name in self.labels]}
            case "DELETE", "/runners/23/labels/azure-vm", "" if "azure-vm" in self.labels:
                self.labels.remove("azure-vm")
                return 200, {"total_count": 1}
            case "POST", "/runners/23/labels", "":
                self.labels |= set(body["labels"])
                return 200, {"total_count": 2}
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
            "CI_RUNNER_URL": f"http://127.0.0.1:{self._server.server_port}/{kind}/23",
            "CI_RUNNER_LABEL": "azure-vm",
            "CI_RUNNER_TOKEN_FILE": str(token),
            "CI_RUNNER_POLL": "0.05",
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

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(PATIENCE)
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


PAUSED = "the runner is given no more jobs; waiting for the one that it runs\nthe runner is idle\n"


@pytest.mark.parametrize("product", ["github", "azure-pipelines"])
def test_a_paused_runner_is_given_no_job_and_the_hook_ends_when_it_is_idle(
    service: Service, tmp_path: Path, product: str
) -> None:
    service.is_busy = True
    hook = service.hook(tmp_path, product, "pause")
    with service.news:
        assert service.news.wait_for(lambda: len(service.asked) > 4, PATIENCE)
        assert service.asked[0].startswith("DELETE" if product == "github" else "PATCH")
        assert hook.poll() is None
        assert (service.labels, service.is_enabled) == (
            ({"self-hosted"}, True) if product == "github" else ({"self-hosted", "azure-vm"}, False)
        )
        service.is_busy = False
    assert hook.communicate(timeout=PATIENCE)[0] == PAUSED
    assert hook.returncode == 0
    assert service.run_hook(tmp_path, product, "pause") == (0, PAUSED)  # again, after a crash
    assert service.run_hook(tmp_path, product, "resume") == (0, "the runner is given jobs again\n")
    assert (service.labels, service.is_enabled) == ({"self-hosted", "azure-vm"}, True)
    basic = base64.b64encode(f":{TOKEN}".encode()).decode()
    assert service.authorizations == {f"Bearer {TOKEN}" if product == "github" else f"Basic {basic}"}


def test_a_service_that_refuses_fails_the_hook_and_the_token_is_not_shown(
    service: Service, tmp_path: Path
) -> None:
    service.status = 401
    code, output = service.run_hook(tmp_path, "azure-pipelines", "pause")
    assert code == 1
    assert output.endswith('/agents/23?api-version=7.1: 401 Unauthorized: {"message": "Bad credentials"}\n')
    assert TOKEN not in output


def test_a_runner_that_does_not_exist_is_told(service: Service, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{service._server.server_port}/runners/24"
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_URL=url)
    assert code == 1
    assert output.splitlines()[-1] == f'GET {url}: 404 Not Found: {{"message": "Not Found"}}'


def test_without_a_token_or_an_address_the_hook_says_what_to_set(service: Service, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_TOKEN_FILE=missing)
    reason = f"no token: [Errno 2] No such file or directory: '{missing}'"
    way_out = "set CI_RUNNER_TOKEN_FILE, or give the unit the credential ci-runner-token"
    assert (code, output) == (2, f"ci-runner-api: {reason}; {way_out}\n")
    assert service.run_hook(tmp_path, "github", "pause", CI_RUNNER_URL="") == (
        *(2, "ci-runner-api: set CI_RUNNER_URL in the hook's env\n"),
    )
    assert service.run_hook(tmp_path, "jenkins", "pause") == (
        *(2, "ci-runner-api: expected: ci-runner-api github|azure-pipelines pause|resume\n"),
    )
    assert service.asked == []
