"""The hook that asks the service for a CI runner without jobs, with a server that answers as two products do."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("the hooks are scripts for a Unix shell", allow_module_level=True)

from examples import HOOKS as INSTALLED
from examples import ServiceManager, Unit, copy_hooks
from harness import CHECKOUT, PATIENCE, Agent, Answer, Request, Server, Simulator

HOOKS = CHECKOUT / "config/hooks"
TOKEN = "ghp_nobody-must-see-this"


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

    def hook(
        self, place: Path, *arguments: str, program: Path = HOOKS / "ci-runner-api", **environment: str
    ) -> subprocess.Popen[str]:
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
            [str(program), *arguments],
            env={**settings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_hook(self, place: Path, *arguments: str, **options: Any) -> tuple[int, str]:
        process = self.hook(place, *arguments, **options)
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
def test_a_runner_that_was_paused_before_stays_paused(service: Service, tmp_path: Path, product: str) -> None:
    service.labels.remove("azure-vm")
    service.is_enabled = False
    assert service.run_hook(tmp_path, product, "pause") == (0, PAUSED_BEFORE)
    assert service.run_hook(tmp_path, product, "resume") == LEFT_ALONE
    assert (service.labels, service.is_enabled) == ({"self-hosted"}, False)


@both_products
def test_a_request_without_a_response_is_repeated(service: Service, tmp_path: Path, product: str) -> None:
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


def test_a_request_that_is_never_answered_fails_the_hook_after_its_attempts(
    service: Service, tmp_path: Path
) -> None:
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
    """The policy that the page shows for GitHub, with the addresses of the stand-ins."""
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


def test_an_endless_response_is_not_read_completely(service: Service, tmp_path: Path) -> None:
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


def test_an_invalid_token_is_not_shown(service: Service, tmp_path: Path) -> None:
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


def test_a_full_disk_leaves_no_empty_mark(service: Service, tmp_path: Path) -> None:
    """By a limit on the size of files."""
    wrapper = tmp_path / "limited"
    wrapper.write_text(f'#!/bin/sh\nulimit -f 0\nexec {HOOKS}/ci-runner-api "$@"\n')
    wrapper.chmod(0o755)
    code, output = service.run_hook(tmp_path, "github", "pause", program=wrapper)
    assert (code, output.startswith("ci-runner-api: no mark: ")) == (2, True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("mark")] == []
    assert "azure-vm" in service.labels


@pytest.mark.parametrize("left", ["", "5m", "nan", "-1", "OPTIND[$(id)]"])
def test_what_is_no_number_of_seconds_is_as_good_as_none(service: Service, tmp_path: Path, left: str) -> None:
    assert service.run_hook(tmp_path, "github", "pause", SCHEDULED_EVENT_SECONDS_LEFT=left)[0] == 0


@pytest.mark.parametrize("content", [None, [], {}, {"labels": [7]}])
def test_a_program_that_is_no_runner_is_reported(service: Service, tmp_path: Path, content: Any) -> None:
    service.faults = [service.say(200, content)]
    code, output = service.run_hook(tmp_path, "github", "pause")
    assert code == 1
    assert "Traceback" not in output
    assert "not a runner" in output or "not what a runner looks like" in output


@pytest.mark.parametrize("status", [203, 401, 403])
def test_a_service_that_rejects_fails_the_hook_at_once_and_the_token_is_not_shown(
    service: Service, tmp_path: Path, status: int
) -> None:
    service.faults = [service.say(status, {"message": f"Bad credentials {TOKEN}"})]
    code, output = service.run_hook(tmp_path, "azure-pipelines", "pause")
    assert code == 1
    assert f"/agents/23?api-version=7.1: {status} " in output
    assert len(service.asked) == 1
    assert TOKEN not in output


def test_a_missing_runner_is_reported(service: Service, tmp_path: Path) -> None:
    url = f"{service.url}/runners/24"
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_URL=url)
    assert code == 1
    assert output.splitlines()[-1] == f'GET {url}: 404 Not Found: {{"message": "Not Found"}}'


def test_missing_or_wrong_runner_settings_are_reported(service: Service, tmp_path: Path) -> None:
    def said(*arguments: str, **environment: str) -> str:
        code, output = service.run_hook(tmp_path, *(arguments or ("github", "pause")), **environment)
        assert code == 2
        return output

    missing = str(tmp_path / "missing")
    reason = f"no token: [Errno 2] No such file or directory: '{missing}'"
    way_out = "set CI_RUNNER_TOKEN_FILE, or write it to credentials/ci-runner-token"
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


def test_without_a_directory_for_the_mark_the_runner_is_not_paused(service: Service, tmp_path: Path) -> None:
    code, output = service.run_hook(tmp_path, "github", "pause", CI_RUNNER_MARK="/nowhere/mark")
    assert code == 2
    assert output.endswith("'/nowhere/mark'; see CI_RUNNER_MARK\n")
    assert service.labels == {"self-hosted", "azure-vm"}
