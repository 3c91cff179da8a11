"""The examples under a real systemd: a web server is rebooted, services of nginx, a runner, a job are stopped."""

import http.client
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from balanced import PATIENCE, SLOW, SMALL, Web, nginx_configuration, wait_answered
from container import CHECKOUT, Container
from hook_machine import PROGRAMS
from ports import free_port
from service import POLICY, Service, shown_commands, use_shell

from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, a Debian is fetched

HOOKS = CHECKOUT / "config/hooks"
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


def installing(page: str) -> str:
    """Commands that install the hooks and the policy that a page of the cookbook names, as its README shows it."""
    text = (CHECKOUT / f"docs/cookbook/{page}.md").read_text("utf-8")
    hooks = re.findall(
        r"\]\(\.\./\.\./config/hooks/([\w-]+)\)", re.findall(r"^- hooks: .*", text, re.MULTILINE)[0]
    )
    (policy,) = re.findall(r"^- policy: .*/config/examples/([\w.-]+)\)$", text, re.MULTILINE)
    (commands,) = shown_commands("docs/cookbook/README.md", "## Install")
    script = "\n".join(command for command in commands if not command.startswith("sudoedit "))
    return script.replace("redis-prepare redis-recover", " ".join(hooks)).replace("redis.yaml", policy)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    web = Web(tmp_path / "web")
    yield web
    web.close()


@pytest.fixture
def machine(installed: Container, hook_shell: str) -> Iterator[Container]:
    with Container(installed) as machine:
        use_shell(machine, hook_shell)
        for hook in (
            "common.sh",
            "service",
            "nginx-prepare",
            "nginx-recover",
            "ci-runner-prepare",
            "ci-runner-recover",
        ):
            machine.copy_in(HOOKS / hook, f"{PLACE}/{hook}")
        yield machine
        sys.stdout.write(machine.account())


def test_no_request_fails_through_the_reboot_of_a_machine(
    installed: Container, web: Web, sim: Simulator, hook_shell: str
) -> None:
    with Container(installed) as machine:
        use_shell(machine, hook_shell)
        for name, content in (("index.html", SMALL), ("slow", SLOW)):
            (web.directory / name).write_bytes(content)
            machine.copy_in(web.directory / name, f"/var/www/{name}")
        configuration = nginx_configuration(
            "a", web.a.port, web.agent_port, Path("/var/www"), Path("/var/lib/nginx")
        )
        machine.write("/etc/nginx/nginx.conf", f"user www-data; pid /run/nginx.pid;\n{configuration}")
        machine.run("systemctl", "unmask", "nginx")
        machine.run("systemctl", "enable", "--now", "nginx")
        machine.run("systemctl", "restart", "scheduled-events-agent")
        machine.run("sh", "-ec", installing("web-server"))
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


def test_nginx_finishes_its_requests_before_systemd_stops_and_starts_it(machine: Container) -> None:
    port = free_port()
    machine.write("/var/www/slow", SLOW.decode("latin-1"))
    size = len(SLOW.decode("latin-1").encode())
    # Longer than the five seconds that Debian's unit gives it at a stop.
    server = f"server {{ listen 127.0.0.1:{port}; root /var/www; location = /slow {{ limit_rate {size // 8}; }} }}"
    site = f"user www-data; pid /run/nginx.pid; events {{}} http {{ access_log off; {server} }}"
    machine.write("/etc/nginx/nginx.conf", site)
    machine.run("systemctl", "unmask", "nginx")
    machine.run("systemctl", "start", "nginx")
    assert recover(machine, "nginx") == "nginx-recover: not stopped by nginx-prepare: left as it is\n"

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/slow")
    answer = connection.getresponse()
    bodies: list[bytes] = []
    reader = threading.Thread(target=lambda: bodies.append(answer.read()))
    reader.start()
    said = machine.run(f"{PLACE}/nginx-prepare").stdout
    reader.join(60)
    connection.close()
    assert said.splitlines()[1:] == ["nginx-prepare: nginx has answered them all"]
    assert [len(body) for body in bodies] == [size]
    assert is_active(machine, "nginx") == "inactive"
    assert machine.run(f"{PLACE}/nginx-prepare").stdout == "nginx-prepare: nginx does not run\n"
    assert recover(machine, "nginx").endswith(" takes requests\n")
    assert is_active(machine, "nginx") == "active"

    # By a plain stop, the same request is cut off: what the hook is for.
    connection.request("GET", "/slow")
    answer = connection.getresponse()
    machine.run("systemctl", "stop", "nginx")
    with pytest.raises((http.client.IncompleteRead, OSError)):
        answer.read()
    connection.close()


def test_an_nginx_that_systemd_restarts_at_once_is_still_stopped(simple: Container) -> None:
    restart = "[Service]\nRestart=always\nRestartSec=0\n"
    simple.write("/etc/systemd/system/nginx.service.d/restart.conf", restart)
    simple.run("systemctl", "daemon-reload")
    for event in ("A", "B"):
        simple.run("systemctl", "start", "nginx")
        said = prepare(simple, "nginx", event, NGINX_FINISH="5")
        assert said.endswith("nginx has answered them all\n")
        assert is_active(simple, "nginx") in ("inactive", "failed")  # failed: its next start was cut off
        assert recover(simple, "nginx", event).endswith(" takes requests\n")


@pytest.fixture
def simple(machine: Container) -> Container:
    """A machine with an nginx that is not started at boot, and has nothing to do; and with a runner."""
    port = free_port()
    site = f"user www-data; pid /run/nginx.pid; events {{}} http {{ server {{ listen 127.0.0.1:{port}; }} }}"
    machine.write("/etc/nginx/nginx.conf", site)
    machine.run("systemctl", "unmask", "nginx")
    machine.write("/usr/local/bin/gitlab-runner", RUNNER, 0o755)
    machine.path("/root/done").touch()
    machine.write("/etc/systemd/system/gitlab-runner.service", f"{UNIT}[Install]\nWantedBy=multi-user.target\n")
    machine.run("systemctl", "daemon-reload")
    return machine


def prepare(machine: Container, name: str, event: str = "A", **more: str) -> str:
    environment = {"SCHEDULED_EVENT_ID": event, **more}
    return machine.run(f"{PLACE}/{name}-prepare", environment=environment).stdout


def recover(machine: Container, name: str, event: str = "A") -> str:
    """``event``: empty for an on_clear hook."""
    environment = {"SCHEDULED_EVENT_ID": event} if event else {}
    return machine.run(f"{PLACE}/{name}-recover", environment=environment).stdout


services = pytest.mark.parametrize(("unit", "name"), [("nginx", "nginx"), ("gitlab-runner", "ci-runner")])


@services
def test_a_service_that_an_administrator_has_stopped_stays_stopped(
    simple: Container, unit: str, name: str
) -> None:
    simple.run("systemctl", "enable", "--now", unit)
    simple.run("systemctl", "stop", unit)
    prepare(simple, name)
    assert recover(simple, name) == f"{name}-recover: not stopped by {name}-prepare: left as it is\n"
    assert is_active(simple, unit) == "inactive"


@services
def test_a_service_that_is_not_started_at_boot_is_started_when_the_event_is_over(
    simple: Container, unit: str, name: str
) -> None:
    simple.run("systemctl", "start", unit)
    prepare(simple, name)
    simple.reboot()
    assert is_active(simple, unit) == "inactive"
    prepare(simple, name, "B")  # another event, which finds it stopped for the first
    recover(simple, name, "B")
    assert is_active(simple, unit) == "active"
    assert recover(simple, name) == f"{name}-recover: not stopped by {name}-prepare: left as it is\n"


@services
@pytest.mark.parametrize("is_rebooted", [False, True])
def test_a_service_started_and_stopped_since_is_not_started_for_an_old_event(
    simple: Container, unit: str, name: str, *, is_rebooted: bool
) -> None:
    simple.run("systemctl", "enable", "--now", unit)
    time.sleep(1.1)  # what systemd tells of a start is its second
    prepare(simple, name)
    if is_rebooted:  # starts it
        simple.reboot()
    else:  # nothing has recovered it, so the test starts it
        simple.run("systemctl", "start", unit)
    simple.run("systemctl", "stop", unit)
    mark = simple.path(f"/var/lib/scheduled-events-agent/{unit}.service.stopped-by-agent")
    old = mark.read_text()
    said = recover(simple, name, "")
    assert " was started and stopped since then: left as it is\n" in said
    mark.write_text(old)
    prepare(simple, name, "B")
    assert recover(simple, name, "B") == f"{name}-recover: not stopped by {name}-prepare: left as it is\n"
    assert is_active(simple, unit) == "inactive"


@services
def test_a_service_that_waits_for_its_restart_is_started_when_the_event_is_over(
    simple: Container, unit: str, name: str
) -> None:
    restart = "[Service]\nRestart=always\nRestartSec=600\n"
    simple.write(f"/etc/systemd/system/{unit}.service.d/restart.conf", restart)
    simple.run("systemctl", "daemon-reload")
    simple.run("systemctl", "start", unit)
    simple.run("systemctl", "kill", "--signal=KILL", unit)
    simple.wait_for(lambda: is_active(simple, unit) == "activating", "it waited")
    assert prepare(simple, name).endswith("is not up yet\n")
    assert is_active(simple, unit) == "inactive"
    recover(simple, name)
    assert is_active(simple, unit) == "active"


BROKEN = """[Unit]
StartLimitIntervalSec=600
StartLimitBurst=2
[Service]
Type=simple
PIDFile=
ExecStartPre=
ExecStart=
ExecStart=/bin/true
ExecStop=
Restart=always
RestartSec=2
"""


@pytest.mark.nightly
def test_an_nginx_that_ends_after_the_hooks_own_start_is_started_again(simple: Container) -> None:
    simple.run("systemctl", "start", "nginx")
    prepare(simple, "nginx", NGINX_FINISH="5")
    drop_in = "/etc/systemd/system/nginx.service.d/broken.conf"
    simple.write(drop_in, BROKEN)
    simple.run("systemctl", "daemon-reload")
    environment = {"SCHEDULED_EVENT_ID": "A", "NGINX_WAIT": "30"}  # long enough for systemd to give it up
    failed = simple.run(f"{PLACE}/nginx-recover", environment=environment, check=False)
    assert failed.stderr == "nginx-recover: nginx takes no requests 30 s after: systemctl start nginx.service\n"
    assert is_active(simple, "nginx") == "failed"
    simple.path(drop_in).unlink()
    simple.run("systemctl", "daemon-reload")
    simple.run("systemctl", "reset-failed", "nginx")
    assert recover(simple, "nginx", "").endswith(" takes requests\n")


def test_any_unit_is_stopped_and_after_a_reboot_started_and_checked(simple: Container) -> None:
    site = simple.path("/etc/nginx/nginx.conf").read_text()
    (port,) = re.findall(r"127\.0\.0\.1:(\d+)", site)
    environment = {"SERVICE_UNIT": "nginx.service", "SCHEDULED_EVENT_ID": "A"}
    simple.run("systemctl", "start", "nginx")
    stop = simple.run(f"{PLACE}/service", "stop", environment=environment)
    assert stop.stdout == "service: nginx.service has stopped\n"
    assert is_active(simple, "nginx") == "inactive"
    simple.reboot()
    environment["SERVICE_HEALTH"] = f"tcp:127.0.0.1:{port}"
    start = simple.run(f"{PLACE}/service", "start", environment=environment)
    assert start.stdout == "service: nginx.service runs, and is healthy\n"
    assert is_active(simple, "nginx") == "active"


def test_a_service_whose_process_is_no_nginx_is_not_stopped(simple: Container) -> None:
    simple.write("/etc/systemd/system/web.service", "[Service]\nExecStart=/bin/sleep 600\n")
    simple.run("systemctl", "start", "web")
    failed = simple.run(f"{PLACE}/nginx-prepare", environment={"NGINX_UNIT": "web.service"}, check=False)
    said = "nginx-prepare: web.service runs, and its main process is no nginx: set NGINX_PID_FILE\n"
    assert (failed.returncode, failed.stderr) == (1, said)
    assert is_active(simple, "web") == "active"


def test_without_the_service_nginx_is_not_said_to_be_stopped(machine: Container) -> None:
    failed = machine.run(
        f"{PLACE}/nginx-prepare", environment={"NGINX_STOP": "systemctl stop web.service"}, check=False
    )
    assert failed.returncode == 5
    assert "web.service not loaded" in failed.stderr


def test_a_runners_policy_and_token_are_installed_as_the_page_says(machine: Container) -> None:
    machine.run("sh", "-ec", installing("ci-runner"))
    service = Service(machine, "")
    assert service.wait_log("the policy file was read again")["rules"] == "freeze, evicted, interrupting"
    ((credential,),) = shown_commands("docs/cookbook/ci-runner.md", "## GitHub Actions")
    machine.run("sh", "-ec", f"cd /root; echo a token >token\n{credential}")
    given = "/etc/scheduled-events-agent/credentials/ci-runner-token"
    assert machine.run("cat", given, user="scheduled-events-agent").stdout == "a token\n"


def test_a_runners_job_is_done_before_its_service_stops_and_it_stays_stopped(machine: Container) -> None:
    machine.write("/usr/local/bin/gitlab-runner", RUNNER, 0o755)
    machine.write("/etc/systemd/system/gitlab-runner.service", UNIT)
    machine.run("systemctl", "daemon-reload")
    notes = machine.path("/root/notes")
    machine.run("systemctl", "start", "gitlab-runner")
    machine.wait_for(notes.exists, "it had begun a job")
    machine.run("systemd-run", "--unit=hook", "--property=RemainAfterExit=yes", f"{PLACE}/ci-runner-prepare")
    machine.wait_for(lambda: "takes no more jobs" in log_of(machine), "it was asked to finish")
    assert notes.read_text() == "begins\n"
    machine.path("/root/done").touch()
    machine.wait_for(lambda: "the runner has ended" in log_of(machine), "it had ended")
    machine.wait_for(lambda: is_active(machine, "gitlab-runner") == "inactive", "it was stopped")
    assert notes.read_text() == "begins\ndone\nends\n"
    assert machine.run("systemctl", "show", "--property=Result", "--value", "hook").stdout == "success\n"
    assert machine.run(f"{PLACE}/ci-runner-prepare").stdout == "ci-runner-prepare: the runner does not run\n"
    assert machine.run(f"{PLACE}/ci-runner-recover").stdout == "ci-runner-recover: the runner was started\n"
    assert is_active(machine, "gitlab-runner") == "active"


def runs_with_a_unit() -> list[tuple[str, tuple[str, ...]]]:
    """Every hook that has a variable for its unit, the variable, and the arguments with which it needs a unit."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for hook in sorted(HOOKS.iterdir()):
        variables = set(re.findall(r"\b[A-Z_]+_UNIT\b", hook.read_text("utf-8")))
        if variables:
            stages = [("stop",), ("start",)] if hook.name == "service" else [()]
            found += [(hook.name, (*variables, *stage)) for stage in stages]
    return found


def test_a_hook_of_a_unit_that_does_not_exist_fails_and_says_what_to_set(
    installed: Container, hook_shell: str
) -> None:
    """Also one of recovery, if there is a mark that the unit was stopped."""
    hooks = runs_with_a_unit()
    assert {"redis-prepare", "redis-recover", "service", "training-resume"} <= {name for name, *_ in hooks}
    with Container(installed) as machine:
        use_shell(machine, hook_shell)
        for hook in HOOKS.iterdir():
            machine.copy_in(hook, f"{PLACE}/{hook.name}")
        for program in PROGRAMS:
            if machine.run("sh", "-c", f"command -v {program}", check=False).returncode != 0:
                machine.write(f"/usr/bin/{program}", "#!/bin/sh\n", 0o755)
        machine.run("systemctl", "mask", "idle.service")
        for path in ("lib/scheduled-events-agent/absent.service.stopped-by-agent", "data/stopped-by-agent"):
            machine.write(f"/var/{path}", "A\n\n\n")
        machine.write("/var/data/PG_VERSION", "15\n")
        others = {"PGDATA": "/var/data", "TRAINING_CHECKPOINT": "/var/data/last", "TRAINING_STOP": "no"}
        answers = {}
        for name, (variable, *stage) in hooks:
            done = machine.run(
                *(f"{PLACE}/{name}", *stage),
                environment={"SCHEDULED_EVENT_ID": "A", **others, variable: "absent.service"},
                check=False,
            )
            said = f"{name}: systemd does not know absent.service: set {variable}"
            lines = [re.sub("; without systemd.*", "", line) for line in done.stderr.splitlines()]
            if (done.returncode, done.stdout, lines) != (1, "", [said]):
                answers[name, *stage] = done
        assert answers == {}
        masked = machine.run(f"{PLACE}/redis-prepare", environment={"REDIS_UNIT": "idle.service"})
        assert masked.stdout == "redis-prepare: idle.service does not run\n"


TRAINER = """#!/bin/sh
trap 'echo checkpoint >/root/latest' USR1
while :; do sleep 0.1; done
"""


def test_a_training_job_is_started_again_only_if_the_hook_has_stopped_it(machine: Container) -> None:
    machine.write("/usr/local/bin/trainer", TRAINER, 0o755)
    service = "[Service]\nExecStart=/usr/local/bin/trainer\nRestart=on-failure\nRestartSec=600\n"
    machine.write("/etc/systemd/system/training.service", f"{service}[Install]\nWantedBy=multi-user.target\n")
    for hook in ("common.sh", "training-checkpoint", "training-resume"):
        machine.copy_in(HOOKS / hook, f"{PLACE}/{hook}")

    def run(hook: str, event: str = "A") -> str:
        environment = {"TRAINING_UNIT": "training.service", "TRAINING_CHECKPOINT": "/root/latest"}
        environment |= {"SCHEDULED_EVENT_ID": event} if event else {}
        return machine.run(f"{PLACE}/{hook}", environment=environment).stdout

    left = "training-resume: not stopped by training-checkpoint: left as it is\n"
    stands = "training-checkpoint: training.service does not run; the last checkpoint is valid\n"
    runs = "training-resume: training.service runs\n"
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", "training")
    time.sleep(1.1)  # what systemd tells of a start is its second

    assert run("training-checkpoint").startswith("training-checkpoint: checkpoint complete: /root/latest, ")
    assert is_active(machine, "training") == "inactive"
    assert run("training-checkpoint", "B") == stands  # another event, which finds it stopped for the first
    assert [run("training-resume", "B"), run("training-resume", "B")] == [runs, left]
    assert is_active(machine, "training") == "active"

    run("training-checkpoint", "C")
    machine.reboot()  # starts it
    assert run("training-resume", "C") == "training-resume: training.service runs already\n"

    machine.run("systemctl", "kill", "--signal=KILL", "training")
    machine.wait_for(lambda: is_active(machine, "training") == "activating", "it waited to be started again")
    assert run("training-checkpoint", "D") == stands
    assert is_active(machine, "training") == "inactive"
    assert run("training-resume", "D") == runs

    machine.run("systemctl", "stop", "training")
    assert run("training-checkpoint", "E") == stands
    assert run("training-resume", "E") == left
    assert is_active(machine, "training") == "inactive"

    machine.run("systemctl", "start", "training")
    run("training-checkpoint", "F")
    time.sleep(1.1)
    machine.run("systemctl", "start", "training")
    machine.run("systemctl", "stop", "training")
    said = "training-resume: training.service was started and stopped since then: left as it is\n"
    assert run("training-resume", "") == said
    assert is_active(machine, "training") == "inactive"


def log_of(machine: Container) -> str:
    return "\n".join(str(entry["MESSAGE"]) for entry in machine.journal("hook.service"))
