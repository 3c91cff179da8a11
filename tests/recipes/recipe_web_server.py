"""nginx behind HAProxy: docs/cookbook/web-server.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

import re
import subprocess
from pathlib import Path

from balanced import Load, Web, programs, wait_answered
from frame import Outcome, Recipe, Way
from harness import Agent


class WebServer(Recipe):
    title = "nginx behind HAProxy"
    page = "docs/cookbook/web-server.md"
    load = "10 clients for two servers, of which 4 with downloads of 1.3 s; probes every 5 s"

    _load: Load

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._web = Web(place / "web", interval="5s", drain_for="15s")

    def start(self) -> None:
        self.ends.callback(self._web.close)
        self._web.a.start()
        self._web.start("through-nginx" if self.way == "agent" else "")

    def versions(self) -> str:
        found = []
        for program in (programs().nginx, programs().haproxy):
            environment = programs().environment
            done = subprocess.run(
                [program, "-v"], env=environment, capture_output=True, text=True, check=True, timeout=60
            )
            version = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
            number = version[0] if version else "of an unknown version"
            found.append(f"{Path(program).name} {number}")
        return ", ".join(found)

    def write_policy(self, agent: Agent) -> None:
        agent.write_policy(**self._web.policy_without_systemd(agent.endpoint))

    def start_load(self) -> None:
        for port in (self._web.a.port, self._web.b.port, self._web.port):
            wait_answered(port)
        self._load = self._web.load()
        self._load.wait_served("a", "b")

    def stop_service(self) -> None:
        self._web.a.stop()

    def go_down(self) -> None:
        self._web.a.kill()

    def come_back(self) -> None:
        self._web.a.start()
        wait_answered(self._web.a.port)

    def settle(self) -> None:
        self._load.wait_served("a", "b")

    def finish(self) -> Outcome:
        self._load.stop()
        return Outcome(failed=len(self._load.faults()), total=len(self._load.results))
