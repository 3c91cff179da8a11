"""The examples under a real systemd: a web server is rebooted, nginx's service and a runner's are stopped."""

import http.client
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from balanced import HOOKS, PATIENCE, SLOW, SMALL, Web, nginx_configuration, wait_answered
from container import PROJECT, Container
from service import POLICY, Service

from agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, a Debian is fetched

PLACE = "/etc/scheduled-events-agent/hooks"
# A stand-in, for real runners are not to be had: SIGQUIT has it end after its job, SIGTERM cuts that off. Its unit
# is what "gitlab-runner install" writes, in short.
RUNNER = """#!/bin/bash
trap 'finishing=1' QUIT
echo begins >>/root/notes
until [ -e /root/done ]; do sleep 0.1; done
echo done >>/root/notes
until [ "$finishing" ]; do sleep 0.1; done
echo ends >>/root/notes
"""
UNIT = "[Service]\nExecStart=/usr/local/bin/gitlab-runner\nRestart=always\nRestartSec=120\n"


def console(page: str) -> list[str]:
    """The commands for root that a page of the cookbook shows, block by block."""
    text = (HOOKS.parents[1] / f"docs/cookbook/{page}.md").read_text("utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^# ", "", block, flags=re.MULTILINE) for block in blocks]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    web = Web(tmp_path / "web")
    yield web
    web.close()


@pytest.fixture
def machine(installed: Container) -> Iterator[Container]:
    with Container(installed) as machine:
        for hook in ("nginx-prepare", "nginx-recover", "ci-runner-prepare", "ci-runner-recover"):
            machine.copy_in(HOOKS / hook, f"{PLACE}/{hook}")
        yield machine
        sys.stdout.write(machine.account())


def test_no_request_fails_through_the_reboot_of_a_machine(installed: Container, web: Web, sim: Simulator) -> None:
    with Container(installed) as machine:
        for name, content in (("index.html", SMALL), ("slow", SLOW)):
            (web.directory / name).write_bytes(content)
            machine.copy_in(web.directory / name, f"/var/www/{name}")
        configuration = nginx_configuration(
            "a", web.a.port, web.agent_port, Path("/var/www"), Path("/var/lib/nginx")
        )
        machine.write("/etc/nginx/nginx.conf", f"user www-data; pid /run/nginx.pid;\n{configuration}")
        machine.run("systemctl", "unmask", "nginx")
        machine.run("systemctl", "enable", "--now", "nginx")
        (install,) = console("web-server")
        machine.run("systemctl", "restart", "scheduled-events-agent")
        machine.run("sh", "-ec", f"cd {PROJECT}\n{install}")
        machine.write(POLICY, yaml.safe_dump(web.policy(sim.endpoint()), sort_keys=False))
        service = Service(machine, sim.endpoint())
        service.systemctl("restart")
        web.start("through-nginx")
        load = web.load()
        wait_answered(web.a.port, "/ready")
        load.wait(lambda: len(load.of("a")) > 0, "A was in the rotation")
        begun = time.monotonic()
        load.wait_served("a", "b")

        event = sim.schedule("Reboot", notice_seconds=600, start_delay_seconds=0.2, lasts_seconds=None)
        sim.wait_approved(event, PATIENCE)
        assert is_active(machine, "nginx") == "inactive"
        service.wait_log("started")
        machine.reboot()
        service.wait_log("restarted")
        load.wait_served("b")
        assert is_active(machine, "nginx") == "active"  # it starts with the machine
        recovered = time.monotonic()
        sim.end(event)
        service.wait_log("closed")
        load.wait_served("a", "b")
        load.stop()
        sys.stdout.write(machine.account())
    assert [result for result in load.faults() if result.began > begun] == []
    assert load.of("a", since=recovered) != []


def is_active(machine: Container, unit: str) -> str:
    return machine.run("systemctl", "is-active", unit, check=False).stdout.strip()


def test_nginx_answers_what_it_has_begun_and_is_then_stopped_and_started_by_systemd(machine: Container) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machine.write("/var/www/slow", SLOW.decode("latin-1"))
    size = len(SLOW.decode("latin-1").encode())
    # Longer than the five seconds that Debian's unit gives it at a stop.
    server = f"server {{ listen 127.0.0.1:{port}; root /var/www; location = /slow {{ limit_rate {size // 8}; }} }}"
    site = f"user www-data; pid /run/nginx.pid; events {{}} http {{ access_log off; {server} }}"
    machine.write("/etc/nginx/nginx.conf", site)
    machine.run("systemctl", "unmask", "nginx")
    assert machine.run(f"{PLACE}/nginx-recover").stdout.endswith(" takes requests\n")
    assert is_active(machine, "nginx") == "active"
    assert machine.run(f"{PLACE}/nginx-recover").stdout.endswith(" runs already\n")

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/slow")
    answer = connection.getresponse()
    bodies: list[bytes] = []
    reader = threading.Thread(target=lambda: bodies.append(answer.read()))
    reader.start()
    said = machine.run(f"{PLACE}/nginx-prepare").stdout
    reader.join(60)
    connection.close()
    assert said.splitlines()[1:] == ["nginx has answered them all"]
    assert [len(body) for body in bodies] == [size]
    assert is_active(machine, "nginx") == "inactive"
    assert machine.run(f"{PLACE}/nginx-prepare").stdout == "nginx does not run: /run/nginx.pid names none\n"
    assert machine.run(f"{PLACE}/nginx-recover").stdout.endswith(" takes requests\n")
    assert is_active(machine, "nginx") == "active"

    # By a plain stop, the same request is cut off: what the hook is for.
    connection.request("GET", "/slow")
    answer = connection.getresponse()
    machine.run("systemctl", "stop", "nginx")
    with pytest.raises((http.client.IncompleteRead, OSError)):
        answer.read()
    connection.close()


def test_without_the_service_nginx_is_not_said_to_be_stopped(machine: Container) -> None:
    failed = machine.run(
        f"{PLACE}/nginx-prepare", environment={"NGINX_STOP": "systemctl stop web.service"}, check=False
    )
    assert failed.returncode == 5
    assert "web.service not loaded" in failed.stderr


def test_a_runners_policy_and_token_are_installed_as_the_page_says(machine: Container) -> None:
    install, credential = console("ci-runner")
    machine.run("sh", "-ec", f"cd {PROJECT}\n{install}")
    service = Service(machine, "")
    assert service.wait_log("the policy file was read again")["rules"] == ["freeze", "evicted", "interrupting"]
    machine.run("sh", "-ec", f"cd /root; echo a token >token\n{credential}")
    given = "/run/credentials/scheduled-events-agent.service/hooks_ci-runner-token"
    assert machine.run("cat", given).stdout == "a token\n"


def test_a_runners_job_is_done_before_its_service_stops_and_it_stays_stopped(machine: Container) -> None:
    machine.write("/usr/local/bin/gitlab-runner", RUNNER, 0o755)
    machine.write("/etc/systemd/system/gitlab-runner.service", UNIT)
    machine.run("systemctl", "daemon-reload")
    notes = machine.path("/root/notes")
    assert machine.run(f"{PLACE}/ci-runner-recover").stdout == "the runner was started\n"
    machine.wait_for(notes.exists, "it had begun a job")
    machine.run("systemd-run", "--unit=hook", "--property=RemainAfterExit=yes", f"{PLACE}/ci-runner-prepare")
    machine.wait_for(lambda: "takes no more jobs" in log_of(machine), "it was told to finish")
    assert notes.read_text() == "begins\n"
    machine.path("/root/done").touch()
    machine.wait_for(lambda: "the runner has ended" in log_of(machine), "it had ended")
    machine.wait_for(lambda: is_active(machine, "gitlab-runner") == "inactive", "it was stopped")
    assert notes.read_text() == "begins\ndone\nends\n"
    assert machine.run("systemctl", "show", "--property=Result", "--value", "hook").stdout == "success\n"
    assert machine.run(f"{PLACE}/ci-runner-prepare").stdout == "the runner does not run\n"
    assert machine.run(f"{PLACE}/ci-runner-recover").stdout == "the runner was started\n"
    assert is_active(machine, "gitlab-runner") == "active"


def test_a_runner_of_another_name_is_not_taken_for_an_idle_one(machine: Container) -> None:
    failed = machine.run(f"{PLACE}/ci-runner-prepare", check=False)
    assert failed.returncode == 1
    assert failed.stderr == "No files found for gitlab-runner.service.\n"


def log_of(machine: Container) -> str:
    return "\n".join(str(entry["MESSAGE"]) for entry in machine.journal("hook.service"))
