"""The whole story: a web server drained, approved, rebooted and put back in service by the installed agent."""

import http.client
import sys
from collections.abc import Iterator
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from container import Container
from hanging import hanging_thread, outer_pid, wait_killed
from ports import free_port
from service import Service

from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, Debian is fetched

# The load balancer asks /health; a server out of service stays so through a reboot, until it is put back.
NGINX = """
events {{}}
http {{
  access_log off;
  server {{
    listen 127.0.0.1:{port};
    location = /health {{
      if (!-f /var/lib/web/in-service) {{ return 503; }}
      return 200 "in service";
    }}
    location / {{ return 200 "hello"; }}
  }}
}}
"""
DRAIN = """#!/bin/sh
set -eu
rm -f /var/lib/web/in-service      # the load balancer sends no new clients
echo "drain for $SCHEDULED_EVENT_TYPE $SCHEDULED_EVENT_ID" >> /root/notes
while [ -e /root/wait ]; do sleep 0.1; done
systemctl stop nginx               # waits for the requests that are being answered
echo drained
"""
RESUME = """#!/bin/sh
set -eu
systemctl start nginx
touch /var/lib/web/in-service
echo "resume, $SCHEDULED_EVENT_OUTCOME" >> /root/notes
while [ -e /root/wait ]; do sleep 0.1; done
"""
POLICY: dict[str, Any] = {
    "rules": [
        {
            "name": "impactful",
            "when": {"type": ["Reboot", "Redeploy"]},
            "prepare": ["drain"],
            "recover": ["resume"],
            "approve": "when-prepared",
        }
    ],
    "hooks": {"drain": {"run": ["/usr/local/sbin/drain"]}, "resume": {"run": ["/usr/local/sbin/resume"]}},
}


class WebServer(Service):
    """A machine that serves pages, with the agent that drains it."""

    port = 0

    def set_up(self) -> None:
        self.port = free_port()
        self.machine.write("/etc/nginx/nginx.conf", NGINX.format(port=self.port))
        self.machine.write("/var/lib/web/in-service", "")
        for name, script in (("drain", DRAIN), ("resume", RESUME)):
            self.machine.write(f"/usr/local/sbin/{name}", script, 0o755)
        self.machine.run("systemctl", "unmask", "nginx")
        self.machine.run("systemctl", "enable", "--now", "nginx")
        self.write_policy(**POLICY)
        self.systemctl("restart")

    def health(self) -> int:
        """The load balancer's view: the status of /health, 0 if there is no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def wait_notes(self, *notes: str) -> None:
        self.machine.wait_for(lambda: self.records() == list(notes), f"the hooks had noted {notes}")


@pytest.fixture
def web(installed: Container, sim: Simulator) -> Iterator[WebServer]:
    with Container(installed) as machine:
        server = WebServer(machine, sim.endpoint())
        server.set_up()
        assert server.health() == 200
        yield server
        sys.stdout.write(machine.account())  # pytest shows it on failure only


def test_a_web_server_is_drained_approved_rebooted_and_recovered_exactly_once(
    web: WebServer, sim: Simulator
) -> None:
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
    sim.wait_approved(event)
    assert web.health() == 0  # out of service, and stopped, before the event was approved
    web.wait_notes(f"drain for Reboot {event}")
    web.wait_log("started")
    web.wait_status("Reboot is under way")

    boot = web.machine.boot_id()
    web.machine.reboot()  # what Azure does to it now
    assert web.machine.boot_id() != boot
    web.machine.wait_for(lambda: web.health() == 503, "nginx was up again, and still out of service")
    web.wait_log("agent started", pending=1)
    web.wait_log("this VM is known")
    before = len(sim.requests())
    sim.wait_until(lambda: len(sim.requests()) > before + 4, "it polled, and the event was still there")
    assert web.records() == [f"drain for Reboot {event}"]  # it has begun, but is not over
    sim.end(event)
    web.machine.wait_for(lambda: web.health() == 200, "it was back in service")
    web.wait_notes(f"drain for Reboot {event}", "resume, completed")
    web.wait_status("Nothing is pending")

    web.machine.reboot()
    web.machine.wait_for(lambda: web.health() == 200, "it was up again")
    web.wait_log("agent started", pending=0)
    web.wait_log("this VM is known")
    assert web.records() == [f"drain for Reboot {event}", "resume, completed"]

    story = [
        entry["message"] + (f" {entry['hook']}" if "hook" in entry else "")
        for entry in web.entries(boot=None)
        if entry.get("event_id") == event or entry["message"] in ("agent started", "agent stopped")
        if entry["message"] != "missing"  # written unless a poll meets the short time of "Completed"
    ]
    assert story[story.index("seen") :] == [
        "seen",
        "decided",
        "preparing",
        "hook started drain",
        "hook output drain",
        "hook finished drain",
        "prepared",
        "approving",
        "approved",
        "changed",
        "started",
        "agent stopped",
        "agent started",
        "restarted",
        "gone",
        "recovering",
        "hook started resume",
        "hook finished resume",
        "closed",
        "agent stopped",
        "agent started",
    ]


def test_an_agent_killed_during_recovery_completes_it(web: WebServer, sim: Simulator) -> None:
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
    web.wait_log("started")
    web.machine.write("/root/wait", "")
    sim.end(event)
    web.wait_notes(f"drain for Reboot {event}", "resume, completed")
    web.machine.run("kill", "-KILL", web.pid())
    web.machine.path("/root/wait").unlink()
    web.wait_notes(f"drain for Reboot {event}", "resume, completed", "resume, completed")
    web.wait_log("closed")
    web.wait_status("Nothing is pending")
    assert web.health() == 200
    assert len(sim.approvals(event)) == 1


def test_a_hook_that_the_shutdown_cut_short_runs_again_after_the_boot(web: WebServer, sim: Simulator) -> None:
    # A unit of its own, which systemd stops when it likes, before or after it tells the agent.
    unit = (
        "[Service]\nType=oneshot\nExecStart=/usr/local/sbin/resume\nEnvironment=SCHEDULED_EVENT_OUTCOME=by-unit\n"
    )
    web.machine.write("/etc/systemd/system/resume-web.service", unit)
    resume = {"run": ["systemctl", "start", "resume-web.service"]}
    web.write_policy(**{**POLICY, "hooks": {**POLICY["hooks"], "resume": resume}})
    web.machine.run("systemctl", "daemon-reload")
    web.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
    web.wait_log("started")
    web.machine.write("/root/wait", "")
    sim.end(event)
    web.wait_notes(f"drain for Reboot {event}", "resume, by-unit")
    web.machine.run("systemctl", "reboot", "--no-block")
    assert web.machine.wait_end()
    web.machine.path("/root/wait").unlink()
    web.machine.start()
    web.wait_notes(f"drain for Reboot {event}", "resume, by-unit", "resume, by-unit")
    web.wait_log("closed")
    assert web.health() == 200


def test_a_watchdog_in_the_middle_of_an_event_loses_nothing(web: WebServer, sim: Simulator) -> None:
    web.add_drop_in("[Service]\nWatchdogSec=8s\nTimeoutAbortSec=2s\nRestartSec=500ms\n")
    web.systemctl("restart")
    web.machine.write("/root/wait", "")
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
    web.wait_notes(f"drain for Reboot {event}")
    pid = outer_pid(web.machine, web.pid())
    with hanging_thread(pid, pid):
        wait_killed(pid, pid, 120.0)
    web.machine.path("/root/wait").unlink()
    web.wait_log("started")
    web.wait_notes(*[f"drain for Reboot {event}"] * 2)  # the hook was killed with it, and begun again
    sim.end(event)
    web.machine.wait_for(lambda: web.health() == 200, "it was back in service")
    assert web.show("NRestarts") == "1"


def test_a_bad_policy_in_the_middle_of_an_event_changes_nothing(web: WebServer, sim: Simulator) -> None:
    web.machine.write("/root/wait", "")
    event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
    web.wait_notes(f"drain for Reboot {event}")
    web.write_policy(rules=[{"name": "impactful", "prepair": ["drain"]}])
    assert "Job for scheduled-events-agent.service failed." in web.systemctl("reload", check=False)
    web.wait_status("runs hook drain; The policy file is rejected: ")
    web.machine.path("/root/wait").unlink()
    web.wait_log("started")
    sim.end(event)
    web.machine.wait_for(lambda: web.health() == 200, "it was back in service")
    web.wait_notes(f"drain for Reboot {event}", "resume, completed")
