"""The example of any service: a real HTTP server as a unit; containers and projects of a stand-in for docker."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hook is a shell script for Linux", allow_module_level=True)

from examples import ServiceManager, Unit, copy_hooks, example
from harness import PATIENCE, Agent, Simulator
from hook_shells import SHIPPED_HOOKS
from ports import free_port

pytestmark = pytest.mark.usefixtures("hook_shell")
HOOK = SHIPPED_HOOKS / "service"
UNIT = "web.service"
SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port}, bind='127.0.0.1')"
# Knows containers by a file of JSON in its folder: name -> whether it runs, and when it was started last. The
# containers of project P are named P-SERVICE.
DOCKER = """#!{python}
import json, pathlib, sys
file = pathlib.Path({file!r})
containers = json.loads(file.read_text())
def change(names, runs):
    for name in names:
        if runs and not containers[name]["runs"]:
            containers[name]["started"] += 1
        containers[name]["runs"] = runs
    file.write_text(json.dumps(containers))
match sys.argv[1:]:
    case ["container", "inspect", "--format", "{{{{.State.Status}}}}", name] if name in containers:
        print("running" if containers[name]["runs"] else "exited")
    case ["container", "inspect", "--format", "{{{{.State.StartedAt}}}}", name] if name in containers:
        print(containers[name]["started"])
    case ["stop", "-t", seconds, name] if int(seconds) >= 0:
        change([name], False)
    case ["start", name]:
        change([name], True)
    case ["compose", "--project-name", project, *rest]:
        prefix = project + "-"
        services = {{name.removeprefix(prefix): name for name in containers if name.startswith(prefix)}}
        match rest:
            case ["ps", "--services", "--status", "running", "--status", "paused", "--status", "restarting"]:
                print("\\n".join(short for short, name in services.items() if containers[name]["runs"]))
            case ["ps", "--all", "--quiet"]:
                print("\\n".join(services.values()))
            case ["stop", "-t", seconds] if int(seconds) >= 0:
                change(services.values(), False)
            case ["start", *names]:
                change([services[name] for name in names] or services.values(), True)
            case _:
                sys.exit(f"unknown: {{rest}}")
    case unknown:
        sys.exit(f"unknown, or no such container: {{unknown}}")
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def manager(tmp_path: Path, port: int) -> Iterator[ServiceManager]:
    command = (sys.executable, "-c", SERVER.format(port=port))
    with ServiceManager(tmp_path / "bin", {UNIT: Unit(command)}) as manager:
        yield manager


class Docker:
    """The stand-in, and what it knows."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self._file = directory / "containers.json"
        program = directory / "docker"
        program.write_text(DOCKER.format(python=sys.executable, file=str(self._file)))
        program.chmod(0o755)
        runs = {"shop-web": True, "shop-db": True, "shop-once": False}
        self._file.write_text(json.dumps({name: {"runs": is_up, "started": 1} for name, is_up in runs.items()}))

    def start(self, name: str) -> None:
        subprocess.run([self.directory / "docker", "start", name], check=True, timeout=PATIENCE)

    def stop(self, name: str) -> None:
        subprocess.run([self.directory / "docker", "stop", "-t", "1", name], check=True, timeout=PATIENCE)

    @property
    def running(self) -> set[str]:
        return {name for name, known in json.loads(self._file.read_text()).items() if known["runs"]}


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path / "docker")


def run(place: Path, *arguments: str, event: str = "A", **more: str) -> tuple[int, str]:
    """Run the hook by itself, with the programs in ``place`` first on its PATH."""
    environment = {
        "PATH": f"{place}:{os.environ['PATH']}",
        "SERVICE_MARK": str(place / "mark"),
        "SERVICE_HEALTH_LIMIT": "60",
        **({"SCHEDULED_EVENT_ID": event} if event else {}),
        **more,
    }
    done = subprocess.run(
        [HOOK, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def wait_answered(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not answers(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def agent(tmp_path: Path, sim: Simulator, manager: ServiceManager, port: int) -> Iterator[Agent]:
    path = f"{manager.directory}:{os.environ['PATH']}"
    more = f"SERVICE_MARK: {tmp_path / 'mark'}\n      PATH: {path}\n      SERVICE_HEALTH: "
    replacements = {"SERVICE_HEALTH: http://127.0.0.1:8080/health": f"{more}http://127.0.0.1:{port}/"}
    with Agent(tmp_path / "agent", sim.endpoint()) as one:
        one.config.write_text(example("service.yaml", copy_hooks(tmp_path), sim.endpoint(), replacements))
        manager.start(UNIT)
        wait_answered(port)
        yield one


def test_a_unit_is_stopped_before_the_approval_and_healthy_after_the_event(
    agent: Agent, sim: Simulator, manager: ServiceManager, port: int
) -> None:
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    sim.wait_started(event)
    assert not manager.runs(UNIT)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert answers(port)
    said = [line["line"] for line in agent.log("hook output", event_id=event)]
    assert said == [f"service: {UNIT} has stopped", f"service: {UNIT} runs, and is healthy"]


def test_a_freeze_is_approved_and_nothing_is_stopped(
    agent: Agent, sim: Simulator, manager: ServiceManager
) -> None:
    agent.start()
    event = sim.schedule("Freeze", lasts_seconds=None)
    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert manager.runs(UNIT)
    assert "stop" not in {call.arguments[0] for call in manager.calls}


def test_an_eviction_stops_it_and_is_not_approved(agent: Agent, sim: Simulator, manager: ServiceManager) -> None:
    agent.start()
    sim.schedule("Preempt", notice_seconds=200, lasts_seconds=None)
    agent.wait_log("hook finished", hook="stop-service")
    assert not manager.runs(UNIT)
    assert sim.approvals() == ()


def test_the_hook_may_run_again_and_starts_only_units_it_stopped(manager: ServiceManager) -> None:
    place = manager.directory
    unit = {"SERVICE_UNIT": UNIT}
    left = (0, f"service: {UNIT} was not stopped by this hook: left as it is\n")
    assert run(place, "stop", **unit) == (0, f"service: {UNIT} does not run\n")
    assert run(place, "start", **unit) == left
    manager.start(UNIT)
    assert run(place, "stop", **unit) == (0, f"service: {UNIT} has stopped\n")
    assert run(place, "stop", **unit) == (0, f"service: {UNIT} does not run\n")
    assert run(place, "start", **unit) == (0, f"service: {UNIT} runs, and is healthy\n")
    assert manager.runs(UNIT)
    assert run(place, "start", **unit) == left

    run(place, "stop", **unit)
    manager.start(UNIT)  # an administrator
    manager.stop(UNIT)
    since = f"service: {UNIT} was started and stopped since then: left as it is\n"
    assert run(place, "start", event="", **unit) == (0, since)
    assert not manager.runs(UNIT)


def test_a_drain_that_fails_stops_nothing(manager: ServiceManager) -> None:
    manager.start(UNIT)
    code, said = run(manager.directory, "stop", SERVICE_UNIT=UNIT, SERVICE_DRAIN="echo busy; exit 3")
    assert code == 1
    assert said.endswith(f"{UNIT} was not drained, and is left running: see SERVICE_DRAIN\n")
    assert manager.runs(UNIT)


@pytest.mark.parametrize("seconds_left", ["", "600", "20"])
def test_a_drained_server_accepts_work_again_even_after_a_timeout(
    manager: ServiceManager, tmp_path: Path, seconds_left: str
) -> None:
    manager.start(UNIT)
    place, drained = manager.directory, tmp_path / "drained"
    more = {"SERVICE_UNIT": UNIT, "SERVICE_RESUME": f"rm -f '{drained}'"}
    code, _ = run(place, "stop", SERVICE_DRAIN=f"touch '{drained}'; exit 3", **more)
    assert (code, drained.exists()) == (1, False)

    hook = [str(HOOK), "stop"]
    drain = {"SERVICE_DRAIN": f"touch '{drained}'; while sleep 1; do :; done", "SERVICE_MARK": str(place / "mark")}
    drain |= {"PATH": f"{place}:{os.environ['PATH']}", "SCHEDULED_EVENT_SECONDS_LEFT": seconds_left}
    with subprocess.Popen(hook, env={**more, **drain}, start_new_session=True) as process:
        deadline = time.monotonic() + PATIENCE
        while not drained.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 143
    assert drained.exists() == (seconds_left == "20")  # the event comes: no new work until it is over
    assert run(place, "start", **more) == (0, f"service: {UNIT} runs, and is healthy\n")
    assert manager.runs(UNIT)
    assert not drained.exists()
    assert not (place / "mark").exists()


def test_a_service_whose_start_failed_is_started_by_the_next_run(manager: ServiceManager) -> None:
    manager.start(UNIT)
    place, unit = manager.directory, {"SERVICE_UNIT": UNIT}
    run(place, "stop", **unit)
    assert run(place, "start", "false", SERVICE_HEALTH_LIMIT="0", **unit)[0] == 1
    manager.power_off(UNIT)  # as if it had ended by itself
    assert run(place, "start", event="", **unit) == (0, f"service: {UNIT} runs, and is healthy\n")


@pytest.mark.parametrize("name", ["wbe.service", r"w\nbe.service"])
def test_a_missing_unit_does_not_count_as_stopped(manager: ServiceManager, name: str) -> None:
    code, said = run(manager.directory, "stop", SERVICE_UNIT=name)
    assert code == 1
    assert said == f"service: systemd does not know {name}: set SERVICE_UNIT\n"


@pytest.mark.parametrize("check", ["http://127.0.0.1:{}/none", "tcp:127.0.0.1:{}", "command"])
def test_an_unhealthy_unit_fails_the_recovery_and_the_next_attempt_continues(
    manager: ServiceManager, port: int, check: str
) -> None:
    manager.start(UNIT)
    place, unit = manager.directory, {"SERVICE_UNIT": UNIT}
    run(place, "stop", **unit)
    bad = {"SERVICE_HEALTH_LIMIT": "1", **unit}
    if check == "command":
        code, said = run(place, "start", "sh", "-c", "echo is warming up; false", **bad)
        assert said.endswith(": is warming up\n")
    else:
        with socket.socket() as taken:  # by what does not listen
            taken.bind(("127.0.0.1", 0))
            where = taken.getsockname()[1] if check.startswith("tcp") else port
            code, said = run(place, "start", SERVICE_HEALTH=check.format(where), **bad)
    assert code == 1
    assert f"{UNIT} is not healthy 1 s after its start: " in said
    wait_answered(port)
    healthy = (0, f"service: {UNIT} runs, and is healthy\n")
    if check == "command":
        assert run(place, "start", "true", **unit) == healthy
    else:
        good = f"tcp:127.0.0.1:{port}" if check.startswith("tcp") else f"http://127.0.0.1:{port}/"
        assert run(place, "start", SERVICE_HEALTH=good, **unit) == healthy


def test_a_container_is_stopped_and_started(docker: Docker) -> None:
    place, container = docker.directory, {"SERVICE_CONTAINER": "shop-web"}
    assert run(place, "stop", **container) == (0, "service: shop-web has stopped\n")
    assert docker.running == {"shop-db"}
    assert run(place, "start", **container) == (0, "service: shop-web runs, and is healthy\n")
    assert docker.running == {"shop-db", "shop-web"}
    run(place, "stop", **container)
    docker.start("shop-web")
    docker.stop("shop-web")
    assert "left as it is" in run(place, "start", event="", **container)[1]
    code, said = run(place, "stop", SERVICE_CONTAINER="none")
    assert (code, said.splitlines()[-1]) == (*(1, "service: the state of none is not known"),)


def test_only_services_of_a_project_that_ran_are_started(docker: Docker) -> None:
    place, project = docker.directory, {"SERVICE_COMPOSE": "shop"}
    assert run(place, "stop", **project) == (0, "service: shop has stopped\n")
    assert docker.running == set()
    docker.start("shop-web")  # as if a run before this one had been cut off in the middle
    assert run(place, "stop", **project) == (0, "service: shop has stopped\n")
    assert run(place, "start", **project) == (0, "service: shop runs, and is healthy\n")
    assert docker.running == {"shop-db", "shop-web"}


def test_a_project_without_one_of_its_services_is_not_healthy(docker: Docker) -> None:
    place, project = docker.directory, {"SERVICE_COMPOSE": "shop"}
    run(place, "stop", **project)
    program = place / "docker"
    real = program.read_text()
    program.write_text(real.replace('containers[name]["runs"] = runs', 'containers[name]["runs"] = "db" in name'))
    code, said = run(place, "start", SERVICE_HEALTH_LIMIT="1", **project)
    assert (code, said) == (1, "service: shop is not healthy 1 s after its start: web does not run\n")
    program.write_text(real)
    assert run(place, "start", event="", **project) == (0, "service: shop runs, and is healthy\n")
    assert docker.running == {"shop-db", "shop-web"}


@pytest.mark.parametrize("names", [(), ("SERVICE_UNIT", "SERVICE_CONTAINER")])
def test_exactly_one_service_has_to_be_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    code, said = run(tmp_path, "stop", **dict.fromkeys(names, "web"))
    assert (code, said) == (1, "service: set one of SERVICE_UNIT, SERVICE_CONTAINER and SERVICE_COMPOSE\n")
