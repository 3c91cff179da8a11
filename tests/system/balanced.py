"""Two nginx behind HAProxy, clients that count what fails, and the set-up that docs/cookbook/web-server.md shows.

What is changed of the policy and the set-up that are shipped and shown (addresses, times) stands in
``Web.policy``, ``Web.policy_without_systemd`` and ``Web.haproxy``. If they are not installed, both programs are
unpacked below .cache from the distribution's packages: nothing is installed, no service is started.
"""

import sys

if sys.platform == "win32":
    raise ImportError("HAProxy, and nginx as servers have it, are for Unix")

import contextlib
import functools
import http.client
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apt
import yaml
from hook_shells import SHIPPED_HOOKS
from ports import free_port

# Far more than anything here takes; only a test that fails waits for so long.
PATIENCE = 60.0
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/cookbook/web-server.md").read_text("utf-8")
CACHE = ROOT / ".cache/web-server"
SMALL = b"hello\n"
SLOW = bytes(range(256)) * 64  # 16 KiB


# --- The programs


@dataclass(frozen=True)
class Programs:
    """Where they are, and the environment that they need."""

    nginx: str
    haproxy: str
    environment: dict[str, str]


@functools.cache
def programs() -> Programs:
    """Both, fetched if they are missing; or skips the test."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    nginx, haproxy = apt.find("nginx"), apt.find("haproxy")
    if nginx and haproxy:
        return Programs(nginx, haproxy, {"PATH": path})
    apt.unpack(CACHE, "nginx", "haproxy")
    libraries = ":".join(str(path) for path in sorted((CACHE / "usr/lib").glob("*-linux-gnu*")))
    return Programs(
        str(CACHE / "usr/sbin/nginx"),
        str(CACHE / "usr/sbin/haproxy"),
        {"PATH": path, "LD_LIBRARY_PATH": libraries},
    )


# --- The servers


def nginx_configuration(name: str, port: int, agent_port: int, pages: Path, temporary: Path) -> str:
    """A server that says who it is, with the location for the probe that the page shows."""
    (block,) = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return f"""
worker_processes 2;
events {{ worker_connections 256; }}
http {{
    keepalive_timeout 600s; keepalive_requests 1000000;  # to have no other end of a connection than the one tested
    access_log off; default_type text/plain; root {pages};
    client_body_temp_path {temporary}/body; proxy_temp_path {temporary}/proxy;
    fastcgi_temp_path {temporary}/fastcgi; uwsgi_temp_path {temporary}/uwsgi; scgi_temp_path {temporary}/scgi;
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        add_header X-Server {name};
        location = /slow {{ limit_rate 12k; }}   # a second and a third
        location = /long {{ limit_rate 2500; }}  # six seconds and a half
        location = /endless {{ limit_rate 50; }}  # five minutes and a half
{block.replace("9769", str(agent_port))}
    }}
}}
"""


class Nginx:
    """One nginx, and the service manager that starts it when a hook asks for it by a line on a pipe."""

    def __init__(self, directory: Path, name: str, agent_port: int) -> None:
        directory.mkdir(parents=True)
        self.name = name
        self.port = free_port()
        self.pid_file = directory / "nginx.pid"
        self.mark = directory / "stopped by agent"  # a path may hold blanks
        self._directory = directory
        self._pipe = directory / "start"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        for file, content in (("index.html", SMALL), ("slow", SLOW), ("long", SLOW), ("endless", SLOW)):
            (directory / file).write_bytes(content)
        (directory / "nginx.conf").write_text(
            f"daemon off; user root; pid {self.pid_file}; error_log {directory}/error.log notice;\n"
            + nginx_configuration(name, self.port, agent_port, directory, directory)
        )
        os.mkfifo(self._pipe)
        self._manager = threading.Thread(target=self._manage, daemon=True)
        self._manager.start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment that points the hooks to this nginx and its service manager."""
        return {
            "NGINX_PID_FILE": str(self.pid_file),
            "NGINX_MARK": str(self.mark),
            "NGINX_START": f"echo start >'{self._pipe}'",
            "NGINX_STOP": "",
        }

    @property
    def is_running(self) -> bool:
        with self._lock:
            return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it unless it runs."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [programs().nginx, "-p", str(self._directory), "-c", "nginx.conf", "-e", "error.log"]
                self._process = subprocess.Popen(
                    command, env=programs().environment, cwd=self._directory, start_new_session=True
                )

    def stop(self) -> None:
        """Stop it as Debian's unit does: requests have five seconds to end."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGQUIT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                self._process.terminate()
                self._process.wait(PATIENCE)

    def kill(self) -> None:
        """End it, master and workers, as a power cut would."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(PATIENCE)

    def close(self) -> None:
        with self._pipe.open("w") as pipe:
            pipe.write("end\n")
        self._manager.join(PATIENCE)
        self.kill()

    def hook(self, name: str, **more: str) -> subprocess.Popen[str]:
        """Start a shipped hook by itself, as its user would."""
        environment = {"PATH": programs().environment["PATH"], **self.environment, **more}
        return subprocess.Popen(
            [str(SHIPPED_HOOKS / name)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_hook(self, name: str, **more: str) -> tuple[int, str]:
        """Exit code and output of a shipped hook."""
        process = self.hook(name, **more)
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output

    def _manage(self) -> None:
        while True:
            with self._pipe.open() as pipe:
                for line in pipe:
                    if line == "end\n":
                        return
                    self.start()


# --- The clients


@dataclass(frozen=True)
class Result:
    """One request: when it began and ended, who answered, and what went wrong."""

    kind: str
    began: float
    ended: float
    server: str
    fault: str


class Load:
    """Clients with a steady pace until ``stop``: new connections, kept ones, and slow downloads."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop_requested = threading.Event()
        self._news = threading.Condition()
        self.results: list[Result] = []
        self.underway: dict[str, list[float]] = {"a": [], "b": []}
        """When the running downloads of each server began."""
        clients = [("new", "/", 0.05)] * 3 + [("kept", "/", 0.05)] * 3 + [("slow", "/slow", 0.1)] * 4
        self._threads = [threading.Thread(target=self._client, args=client) for client in clients]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop_requested.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def faults(self) -> list[Result]:
        return [result for result in self.results if result.fault]

    def of(self, server: str, kind: str = "", since: float = 0.0) -> list[Result]:
        """Answers of a server to requests that began since then."""
        return [
            result
            for result in self.results
            if result.server == server and kind in ("", result.kind) and result.began >= since and not result.fault
        ]

    def wait(self, test: Callable[[], bool], what: str) -> None:
        """Wait until it is so; checked again after each result and each beginning of a download."""
        with self._news:
            assert self._news.wait_for(test, PATIENCE), f"gave up waiting until {what}"

    def wait_served(self, *servers: str, count: int = 20) -> None:
        """Wait until each of them has answered so many new requests of each kind, and slow ones two."""
        since = time.monotonic()
        self.wait(
            lambda: all(
                len(self.of(server, kind, since)) >= (2 if kind == "slow" else count)
                for server in servers
                for kind in ("new", "kept", "slow")
            ),
            f"{servers} had served",
        )

    def _client(self, kind: str, path: str, pause: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        while not self._stop_requested.wait(pause):
            result = self._request(connection, kind, path)
            if kind != "kept" or result.fault:
                connection.close()
            with self._news:
                self.results.append(result)
                self._news.notify_all()
        connection.close()

    def _request(self, connection: http.client.HTTPConnection, kind: str, path: str) -> Result:
        began, server, fault, body = time.monotonic(), "", "", b""
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            server = answer.getheader("X-Server", "")
            with self._is_underway(server, began):
                body = answer.read()
            if answer.status != 200:
                fault = f"status {answer.status}"
            elif body != (SMALL if path == "/" else SLOW):
                fault = f"{len(body)} bytes of another body"
        except (OSError, http.client.HTTPException) as error:
            fault = repr(error)
        return Result(kind, began, time.monotonic(), server, fault)

    @contextlib.contextmanager
    def _is_underway(self, server: str, began: float) -> Iterator[None]:
        mine = self.underway.get(server, [])
        with self._news:
            mine.append(began)
            self._news.notify_all()
        try:
            yield
        finally:
            with self._news:
                mine.remove(began)


# --- All of it


class Web:
    """Two nginx behind a HAProxy that probes A as the page says, and asks of B only whether it listens."""

    def __init__(self, directory: Path, *, interval: str = "200ms", drain_for: str = "4s") -> None:
        self._interval = interval
        self._drain_for = drain_for
        self.agent_port = free_port()
        self.port = free_port()
        self.a = Nginx(directory / "a", "a", self.agent_port)
        self.b = Nginx(directory / "b", "b", self.agent_port)
        self.directory = directory
        self._loads: list[Load] = []
        self._haproxy: subprocess.Popen[bytes] | None = None

    def policy(self, endpoint: str) -> dict[str, Any]:
        """The shipped example, with the addresses and the times of a test."""
        policy: dict[str, Any] = yaml.safe_load((ROOT / "config/examples/web-server.yaml").read_text("utf-8"))
        for rule in policy["rules"]:
            if "drain_for" in rule:
                rule["drain_for"] = self._drain_for
        policy["imds"] = {"endpoint": endpoint, "poll_interval": "250ms"}
        policy["agent"] = {"listen": f"127.0.0.1:{self.agent_port}"}
        return policy

    def policy_without_systemd(self, endpoint: str) -> dict[str, Any]:
        """The policy with the hooks in another place, and with the addresses of A."""
        # A copy: an agent that is root rejects what others could change, as a checkout may be.
        hooks = Path(shutil.copytree(SHIPPED_HOOKS, self.directory / "hooks"))
        policy = self.policy(endpoint)
        for hook in policy["hooks"].values():
            hook["run"] = [word.replace("/etc/scheduled-events-agent/hooks", str(hooks)) for word in hook["run"]]
            hook["env"] = {**hook.get("env", {}), **self.a.environment}
        return policy

    def haproxy(self, probe: str) -> str:
        """The shown set-up, with the addresses and the times of a test; "" is without a probe of the agent."""
        (backend,) = re.findall(
            rf"^(backend web-{probe or 'through-nginx'}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL
        )
        if not probe:
            backend = backend.replace("GET /ready", "GET /")
        changes = {
            "inter 5s": f"inter {self._interval}",
            "port 9769": f"port {self.agent_port}",
            "server a 10.0.0.4:80 check": f"server a 127.0.0.1:{self.a.port} check",
            "server b 10.0.0.5:80 check": f"server b 127.0.0.1:{self.b.port}",
        }
        for old, new in changes.items():
            assert old in backend or old == "port 9769"
            backend = backend.replace(old, new)
        name = backend.split()[1]
        return f"""
global
    maxconn 1000
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout check 5s
    retries 0  # as balancers below HTTP, which cannot try again
frontend web
    bind 127.0.0.1:{self.port}
    default_backend {name}
{backend}"""

    def start(self, probe: str) -> None:
        """Start B and HAProxy."""
        self.b.start()
        file = self.directory / "haproxy.cfg"
        file.write_text(self.haproxy(probe))
        command = [programs().haproxy, "-db", "-f", str(file)]
        self._haproxy = subprocess.Popen(command, env=programs().environment, start_new_session=True)

    def load(self) -> Load:
        """Send clients to HAProxy, until they are stopped or all is closed."""
        self._loads.append(Load(self.port))
        return self._loads[-1]

    def close(self) -> None:
        """End everything, and show what the servers have to say of it."""
        for load in self._loads:
            load.stop()
        if self._haproxy is not None:
            self._haproxy.kill()
            self._haproxy.wait(PATIENCE)
        self.a.close()
        self.b.close()
        for file in sorted(self.directory.glob("*/error.log")):
            sys.stdout.write(f"=== {file}\n{file.read_text('utf-8')}")  # pytest shows it on failure only


def wait_answered(port: int, path: str = "/") -> None:
    """Wait until a server answers there with 200."""
    deadline = time.monotonic() + PATIENCE
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        assert time.monotonic() < deadline, f"no server answers on port {port}"
        time.sleep(0.05)
