"""Two real HAProxy with a virtual address that a real keepalived moves, and clients of that address.

Each machine is a network namespace; a bridge in one more joins them. systemd's place is taken by
``ServiceManager``. The set-up of keepalived is the one that docs/cookbook/haproxy.md shows.
"""

import sys

if sys.platform == "win32":
    raise ImportError("network namespaces are Linux's")

import contextlib
import ctypes
import functools
import http.client
import http.server
import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import apt
from examples import ServiceManager, Unit, example
from harness import CHECKOUT, PATIENCE

ADDRESS = "10.0.0.100"
NODES = {"a": "10.0.0.4", "b": "10.0.0.5"}
CLIENT = "10.0.0.10"
PAGE = CHECKOUT / "docs/cookbook/haproxy.md"
_CACHE = CHECKOUT / ".cache/keepalived"
_CLONE_NEWNET = 0x40000000
_SMALL, _SLOW_PARTS, _SLOW_SECONDS = b"hello\n", 13, 1.3
_HAPROXY = """
global
    maxconn 1000
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend web
    bind *:80
    http-request return status 200 content-type text/plain hdr X-Node {name} string ready if {{ path /ready }}
    http-response add-header X-Node {name}
    default_backend web
backend web
    server web {client}:8080
"""


@dataclass(frozen=True)
class Programs:
    """How they are called: their command, with the libraries that they need."""

    keepalived: tuple[str, ...]
    haproxy: tuple[str, ...]


@functools.cache
def programs() -> Programs:
    """Both, unpacked below .cache if they are missing; or skips the test."""
    apt.need("ip", "iproute2")
    keepalived, haproxy = apt.find("keepalived"), apt.find("haproxy")
    if keepalived and haproxy:
        return Programs((keepalived,), (haproxy,))
    apt.unpack(_CACHE, "keepalived", "haproxy")
    command = ("env", f"LD_LIBRARY_PATH={apt.libraries(_CACHE)}")
    return Programs((*command, str(_CACHE / "usr/sbin/keepalived")), (*command, str(_CACHE / "usr/sbin/haproxy")))


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Network:
    """A namespace for each machine and for the clients, joined by a bridge in one more."""

    def __init__(self) -> None:
        self._prefix = f"pair{os.getpid()}"

    def name(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"

    def __enter__(self) -> Self:
        _ip("netns", "add", self.name("bridge"))
        bridge = ("-n", self.name("bridge"), "link")
        _ip(*bridge, "add", "bridge", "type", "bridge")
        _ip(*bridge, "set", "bridge", "up")
        for machine in (*NODES, "client"):
            name = self.name(machine)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            link = f"to-{machine}"
            _ip(*bridge, "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip(*bridge, "set", link, "master", "bridge", "up")
            self.plug_in(machine)
        return self

    def __exit__(self, *_: object) -> None:
        for line in _ip("netns", "list").splitlines():
            if line.split()[0].startswith(f"{self._prefix}-"):
                _ip("netns", "del", line.split()[0])

    def plug_in(self, machine: str) -> None:
        """Let a machine have its own address, and no other."""
        name = self.name(machine)
        _ip("-n", name, "address", "add", f"{NODES.get(machine, CLIENT)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")

    def unplug(self, machine: str) -> None:
        name = self.name(machine)
        _ip("-n", name, "link", "set", "eth0", "down")
        _ip("-n", name, "address", "flush", "dev", "eth0")

    def has_address(self, machine: str) -> bool:
        return bool(_ip("-n", self.name(machine), "-o", "address", "show", "to", ADDRESS))

    def enter(self, machine: str) -> None:
        """Let the sockets that the calling thread creates from now on be that machine's."""
        with Path(f"/var/run/netns/{self.name(machine)}").open("rb") as namespace:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class _Server(http.server.BaseHTTPRequestHandler):
    """A server behind HAProxy: small answers, and ones that take 1.3 s."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        parts = _SLOW_PARTS if self.path == "/slow" else 1
        self.send_response(200)
        self.send_header("Content-Length", str(parts * len(_SMALL)))
        self.end_headers()
        for number in range(parts):
            if number:
                time.sleep(_SLOW_SECONDS / parts)
            self.wfile.write(_SMALL)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Not on standard error."""


class _Servers(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that was cut off is what the tests are for."""


class Pair:
    """Both machines: the agent's is a, and has the address at first."""

    def __init__(self, directory: Path, *, priority_of_b: int = 150) -> None:
        """``priority_of_b``: a has 150; the higher one takes the address whenever it may."""
        programs()
        self.directory = directory
        directory.mkdir(parents=True)
        self.network = Network()
        self.files = {name: directory / f"{name}-lowered" for name in NODES}
        self.manager = ServiceManager(directory / "bin", dict(self._units(priority_of_b)))
        self._server: _Servers | None = None

    def _units(self, priority_of_b: int) -> Iterator[tuple[str, Unit]]:
        (shown,) = re.findall(r"^```keepalived\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for name, (own, other) in (("a", NODES.values()), ("b", reversed(NODES.values()))):
            inside = ("ip", "netns", "exec", self.network.name(name))
            balancer = self.directory / f"{name}.haproxy"
            balancer.write_text(_HAPROXY.format(name=name, client=CLIENT))
            yield self.unit(name), Unit([*inside, *programs().haproxy, "-W", "-db", "-f", str(balancer)])
            # systemctl of the tests answers on the loopback of the namespace that we are in.
            check = f"/usr/bin/nsenter --net=/proc/{os.getpid()}/ns/net {self.directory}/bin/systemctl"
            changes = {
                "/var/lib/scheduled-events-agent/keepalived-lowered": str(self.files[name]),
                "/usr/bin/systemctl": check,
                "haproxy.service": self.unit(name),
                "unicast_src_ip 10.0.0.4": f"unicast_src_ip {own}",
                "unicast_peer { 10.0.0.5 }": f"unicast_peer {{ {other} }}",
            }
            if name == "b":
                changes["priority 150"] = f"priority {priority_of_b}"
            text = shown
            for old, new in changes.items():
                assert old in text
                text = text.replace(old, new)
            mover = self.directory / f"{name}.keepalived"
            # On a busy machine, too, each has to hear of the other one in time.
            mover.write_text(f"global_defs {{\nscript_user root\nvrrp_priority -20\n}}\n{text}")
            pids = [f"--{kind}={mover}.{kind}" for kind in ("pid", "vrrp_pid", "checkers_pid")]
            yield (
                f"keepalived-{name}.service",
                Unit([*inside, *programs().keepalived, "-nlPf", str(mover), *pids]),
            )

    def unit(self, name: str = "a") -> str:
        return f"haproxy-{name}.service"

    @property
    def environment(self) -> Mapping[str, str]:
        """For the hooks of machine a, which run here: what they ask of the network is asked of a's."""
        for program in ("ip", "ss", "python3"):
            stub = self.manager.directory / program
            if not stub.exists():
                command = f'exec {apt.find("ip")} netns exec {self.network.name("a")} {apt.find(program)} "$@"'
                stub.write_text(f"#!/bin/sh\n{command}\n")
                stub.chmod(0o755)
        return {
            "PATH": f"{self.manager.directory}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "HAPROXY_UNIT": self.unit(),
            "HAPROXY_MARK": str(self.directory / "mark"),
            "KEEPALIVED_FILE": str(self.files["a"]),
            "KEEPALIVED_ADDRESS": ADDRESS,
        }

    def policy(self, hooks: Path, endpoint: str) -> str:
        more = {key: value for key, value in self.environment.items() if key != "KEEPALIVED_ADDRESS"}
        env = ", ".join(f"{key}: '{value}'" for key, value in more.items())
        return example("haproxy.yaml", hooks, endpoint, {"HAPROXY_UNIT: haproxy.service": env})

    def start(self) -> None:
        """Start all, and wait until a has the address and both answer."""
        self.manager.__enter__()
        self.network.__enter__()
        self._in("client", self._serve)
        for name in NODES:  # one after the other, so that a has it first
            self.start_node(name)
            wait(lambda: self.network.has_address("a"), "a had the address")
        self.wait_answered("a")
        for address in NODES.values():
            wait(functools.partial(self.node_at, address), f"{address} answered")

    def start_node(self, name: str) -> None:
        self.manager.start(self.unit(name))
        self.manager.start(f"keepalived-{name}.service")

    def cut_power(self, name: str) -> None:
        self.network.unplug(name)
        for unit in (self.unit(name), f"keepalived-{name}.service"):
            self.manager.power_off(unit)

    def boot(self, name: str) -> None:
        self.network.plug_in(name)
        self.start_node(name)

    def node_at(self, address: str = ADDRESS) -> str:
        """The machine that answers there; "" if none does."""
        found: list[str] = []

        def ask() -> None:
            with contextlib.closing(Client(address)) as client:
                found.append(client.ask("/ready"))

        self._in("client", ask)
        return found[0] if found else ""

    def wait_answered(self, name: str) -> None:
        wait(lambda: self.node_at() == name, f"{name} answered at the address")

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self.manager.__exit__(None, None, None)
        self.network.__exit__()
        self.manager.log.touch()
        sys.stdout.write(self.manager.log.read_text("utf-8"))  # pytest shows it on failure only

    def _serve(self) -> None:
        self._server = _Servers((CLIENT, 8080), _Server)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _in(self, machine: str, work: Callable[[], object]) -> None:
        """Do it in a thread of its own, whose sockets are that machine's."""

        def run() -> None:
            self.network.enter(machine)
            with contextlib.suppress(OSError, http.client.HTTPException):
                work()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PATIENCE)


class Client:
    """One connection to an address, kept until something goes wrong. In a thread that has entered the network."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, 80, timeout=10)

    def ask(self, path: str) -> str:
        """Returns the name of the machine that answered in full; raises OSError and HTTPException."""
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200 or (path == "/slow" and len(body) != _SLOW_PARTS * len(_SMALL)):
            raise OSError(f"{answer.status}, {len(body)} bytes")
        return answer.getheader("X-Node", "")

    def close(self) -> None:
        self._connection.close()


class Load:
    """Clients of the virtual address with a steady pace: new connections, kept ones, and slow downloads."""

    def __init__(self, pair: Pair) -> None:
        self.answered: list[tuple[float, str]] = []
        """When, and by which machine."""
        self.faults: list[str] = []
        self._pair = pair
        self._ends = threading.Event()
        kinds = [("new", "/", 0.05)] * 3 + [("kept", "/", 0.05)] * 3 + [("slow", "/slow", 0.1)] * 4
        self._threads = [threading.Thread(target=self._work, args=kind, daemon=True) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def wait_answered(self, count: int = 50) -> None:
        goal = len(self.answered) + count
        wait(lambda: len(self.answered) >= goal, "requests were answered")

    def longest_gap(self) -> float:
        """The longest time without an answer, in seconds."""
        times = sorted(at for at, _ in self.answered)
        return max(after - before for before, after in itertools.pairwise(times))

    def _work(self, kind: str, path: str, pause: float) -> None:
        self._pair.network.enter("client")
        client = Client(ADDRESS)
        while not self._ends.wait(pause):
            try:
                self.answered.append((time.monotonic(), client.ask(path)))
                if kind == "kept":
                    continue
            except (OSError, http.client.HTTPException) as error:
                self.faults.append(f"{kind}: {error!r}")
            client.close()
        client.close()


def wait(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.05)
