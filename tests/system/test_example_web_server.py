"""The example of a web server, with the real nginx and HAProxy: clients notice a reboot only if there is no agent.

On A's machine runs the agent, with the policy and the hooks that are shipped; balanced.py has the rest.
"""

import contextlib
import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("HAProxy, and nginx as servers have it, are for Unix", allow_module_level=True)

from balanced import PATIENCE, SLOW, Nginx, Web, wait_answered
from harness import Agent, Simulator

PREPARE, RECOVER = "nginx-prepare: ", "nginx-recover: "  # what their lines begin with
PROBES = ("through-nginx", "directly")

pytestmark = [
    pytest.mark.usefixtures("hook_shell"),
    pytest.mark.timeout(300),
]  # on a machine with far too much to do


@pytest.fixture
def web(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Web]:
    """With a parameter, so long the balancer waits from probe to probe."""
    web = Web(tmp_path / "web", interval=getattr(request, "param", "200ms"))
    yield web
    web.close()


def long_download(web: Web, path: str = "/long") -> tuple[threading.Thread, list[bytes]]:
    """A download from A that takes longer than the balancer needs to notice, and what came of it."""
    results: list[bytes] = []
    connection = http.client.HTTPConnection("127.0.0.1", web.a.port, timeout=PATIENCE)
    connection.request("GET", path)
    answer = connection.getresponse()

    def read() -> None:
        with contextlib.suppress(http.client.IncompleteRead, OSError):
            results.append(answer.read())
        connection.close()

    thread = threading.Thread(target=read)
    thread.start()
    return thread, results


@pytest.mark.parametrize("probe", PROBES)
def test_no_request_fails_through_drain_approval_reboot_and_recovery(
    web: Web, agent: Agent, sim: Simulator, probe: str
) -> None:
    agent.write_policy(**web.policy_without_systemd(sim.endpoint()))
    web.a.start()
    web.start(probe)
    agent.start()
    agent.wait_log("on_clear hook ended", hook="start-nginx", outcome="succeeded")
    for port in (web.a.port, web.b.port, web.port):
        wait_answered(port)
    load = web.load()
    load.wait_served("a", "b")

    thread, downloads = long_download(web)
    event = sim.schedule("Reboot", notice_seconds=600, start_delay_seconds=0.2, lasts_seconds=None)
    sim.wait_approved(event, PATIENCE)
    approved = time.monotonic()
    assert not web.a.is_running  # nothing was under way when the event was approved
    thread.join(PATIENCE)
    assert downloads == [SLOW]  # whole, although nothing runs that could send the rest: it was waited for
    agent.wait_log("started", event_id=event)

    # The reboot: nothing of the machine's is left, and when it is up again, that is another boot.
    agent.kill()
    web.a.kill()
    agent.forget_boot()
    load.wait_served("b")
    if probe == "through-nginx":  # a service that starts with the machine, before the agent
        web.a.start()
        wait_answered(web.a.port)
    agent.start()
    assert "after a reboot" in agent.wait_log("restarted", event_id=event)["reason"]
    agent.wait_phase(event, "started")
    load.wait_served("b")
    recovered = time.monotonic()
    sim.end(event)
    assert agent.wait_log("closed", event_id=event)["reason"] == "is over: completed"
    load.wait_served("a", "b")
    load.stop()

    assert load.faults() == []
    assert [result for result in load.of("a", since=approved) if result.began < recovered] == []
    output = [line["line"] for line in agent.log("hook output", hook="start-nginx")]
    assert len(output) == 1
    assert output[0].endswith("runs already" if probe == "through-nginx" else "takes requests")


def test_without_an_agent_the_same_reboot_fails_requests(web: Web) -> None:
    web.a.start()
    web.start("")
    for port in (web.a.port, web.b.port, web.port):
        wait_answered(port)
    load = web.load()
    load.wait_served("a", "b")
    load.wait(
        lambda: any(time.monotonic() - began < 0.5 for began in load.underway["a"]), "A had begun a download"
    )
    web.a.kill()
    load.wait_served("b")
    web.a.start()
    wait_answered(web.a.port)
    load.wait_served("a", "b")
    load.stop()
    assert len(load.faults()) > 0
    assert {result.server for result in load.faults()} <= {"a", ""}  # B's clients have noticed nothing


# On a slow machine, too, the balancer notices after the stop only.
@pytest.mark.parametrize("web", ["60s"], indirect=True)
def test_without_time_to_drain_requests_fail_that_the_balancer_still_sends(
    web: Web, agent: Agent, sim: Simulator
) -> None:
    policy = web.policy_without_systemd(sim.endpoint())
    for rule in policy["rules"]:
        rule.pop("drain_for", None)
    agent.write_policy(**policy)
    web.a.start()
    agent.start()
    wait_answered(web.a.port, "/ready")  # before the balancer's first probe
    web.start("through-nginx")
    for port in (web.b.port, web.port):
        wait_answered(port)
    load = web.load()
    load.wait_served("a", "b")
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None), PATIENCE)
    load.wait_served("b")
    load.stop()
    assert load.faults() != []
    assert {result.server for result in load.faults()} <= {"a", ""}  # B's clients have noticed nothing


# --- The hooks by themselves


@pytest.fixture
def nginx(web: Web) -> Nginx:
    """A's, running."""
    web.a.start()
    wait_answered(web.a.port)
    return web.a


def master(nginx: Nginx) -> int:
    return int(nginx.pid_file.read_text())


def wait_gone(nginx: Nginx) -> None:
    deadline = time.monotonic() + PATIENCE
    while nginx.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.02)


LEFT = (0, "nginx-recover: not stopped by nginx-prepare: left as it is\n")


def test_the_hooks_may_run_again(nginx: Nginx) -> None:
    pid = master(nginx)
    assert nginx.run_hook("nginx-recover") == LEFT
    told = f"{PREPARE}nginx ({pid}) has 60 s for the requests that it is answering\n"
    assert nginx.run_hook("nginx-prepare") == (0, f"{told}{PREPARE}nginx has answered them all\n")
    wait_gone(nginx)
    assert nginx.run_hook("nginx-prepare") == (0, f"{PREPARE}nginx does not run\n")
    code, output = nginx.run_hook("nginx-recover")
    assert (code, output) == (0, f"{RECOVER}nginx ({master(nginx)}) takes requests\n")
    wait_answered(nginx.port)
    assert nginx.run_hook("nginx-recover") == LEFT
    wait_answered(nginx.port)


def test_an_nginx_that_did_not_run_before_the_event_is_not_started_after_it(nginx: Nginx) -> None:
    nginx.kill()
    assert nginx.run_hook("nginx-prepare") == (0, f"{PREPARE}nginx does not run\n")
    assert nginx.run_hook("nginx-recover") == LEFT
    assert not nginx.is_running


def test_an_nginx_that_was_started_meanwhile_is_no_more_the_agents(nginx: Nginx) -> None:
    nginx.run_hook("nginx-prepare")
    wait_gone(nginx)
    nginx.start()  # by a boot, say
    wait_answered(nginx.port)
    assert nginx.run_hook("nginx-recover") == (0, f"{RECOVER}nginx ({master(nginx)}) runs already\n")
    nginx.kill()
    assert nginx.run_hook("nginx-recover") == LEFT


def test_two_events_may_have_the_same_hooks_at_a_time(web: Web, nginx: Nginx) -> None:
    thread, downloads = long_download(web)
    runs = [nginx.hook("nginx-prepare", SCHEDULED_EVENT_ID=event) for event in ("A", "B")]
    for run in runs:
        output, _ = run.communicate(timeout=PATIENCE)
        assert (run.returncode, output.splitlines()[-1]) == (0, f"{PREPARE}nginx has answered them all")
    thread.join(PATIENCE)
    assert downloads == [SLOW]
    code, output = nginx.run_hook("nginx-recover", SCHEDULED_EVENT_ID="A")  # once for both
    assert (code, output) == (0, f"{RECOVER}nginx ({master(nginx)}) takes requests\n")


def test_without_a_directory_for_the_mark_nothing_is_stopped(nginx: Nginx) -> None:
    code, output = nginx.run_hook("nginx-prepare", NGINX_MARK="/nowhere/mark")
    assert code == 1
    assert output.splitlines()[-1] == f"{PREPARE}the mark cannot be written: /nowhere/mark"
    wait_answered(nginx.port)


def test_an_nginx_that_another_program_restarts_at_once_is_reported(nginx: Nginx) -> None:
    start = f"{nginx.environment['NGINX_START']}; until [ -s '{nginx.pid_file}' ]; do sleep 0.1; done"
    code, output = nginx.run_hook("nginx-prepare", NGINX_STOP=start)
    assert (code, output.splitlines()[-1]) == (
        1,
        f"{PREPARE}nginx ({master(nginx)}) was started again: see NGINX_STOP",
    )


def test_a_request_that_takes_too_long_is_cut_off_and_reported(web: Web, nginx: Nginx) -> None:
    thread, downloads = long_download(web, "/endless")
    pid = master(nginx)
    code, output = nginx.run_hook("nginx-prepare", NGINX_FINISH="1")
    assert (code, output.splitlines()) == (
        0,
        [
            f"{PREPARE}nginx ({pid}) has 1 s for the requests that it is answering",
            f"{PREPARE}requests still run after 1 s: nginx ends them",
        ],
    )
    thread.join(PATIENCE)
    assert downloads == []
    wait_gone(nginx)


@pytest.mark.parametrize(("left", "seconds"), [("21", 11), ("7", 0), ("900", 60), ("", 60)])
def test_requests_have_no_longer_than_the_event_leaves(nginx: Nginx, left: str, seconds: int) -> None:
    _, output = nginx.run_hook("nginx-prepare", SCHEDULED_EVENT_SECONDS_LEFT=left)
    assert output.startswith(
        f"{PREPARE}nginx ({output.split('(')[1].split(')')[0]}) has {seconds} s for the requests "
    )


def titles(pid: int) -> list[str]:
    """The process titles of a master's workers."""
    found = []
    for worker in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it may be ending just now
            found.append(" ".join(worker.cmdline()))
    return [title for title in found if title]


def test_an_nginx_that_is_finishing_is_waited_for_and_restarted(web: Web, nginx: Nginx) -> None:
    thread, downloads = long_download(web)
    pid = master(nginx)
    with nginx.hook("nginx-prepare") as stop:
        deadline = time.monotonic() + PATIENCE
        while not all("shutting down" in title for title in titles(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stop.kill()  # the event is canceled
    code, output = nginx.run_hook("nginx-recover")
    assert (code, output) == (0, f"{RECOVER}nginx ({master(nginx)}) takes requests\n")
    assert master(nginx) != pid
    wait_answered(nginx.port)
    thread.join(PATIENCE)
    assert downloads == [SLOW]


def test_a_stale_pid_file_that_names_another_process_is_ignored(nginx: Nginx) -> None:
    nginx.run_hook("nginx-prepare")
    wait_gone(nginx)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        nginx.pid_file.write_text(f"{stranger.pid}\n")
        assert nginx.run_hook("nginx-prepare") == (0, f"{PREPARE}nginx does not run\n")
        assert nginx.run_hook("nginx-recover")[0] == 0
        wait_answered(nginx.port)
        assert stranger.poll() is None
        stranger.kill()


def test_an_nginx_that_does_not_start_is_reported_and_started_by_the_next_attempt(nginx: Nginx) -> None:
    nginx.run_hook("nginx-prepare")
    wait_gone(nginx)
    code, output = nginx.run_hook("nginx-recover", NGINX_START="echo trying", NGINX_WAIT="1")
    assert (code, output) == (1, f"trying\n{RECOVER}nginx takes no requests 1 s after: echo trying\n")
    code, output = nginx.run_hook("nginx-recover", NGINX_START="echo no such service; exit 5")
    assert (code, output) == (5, "no such service\n")
    assert nginx.run_hook("nginx-recover") == (0, f"{RECOVER}nginx ({master(nginx)}) takes requests\n")
