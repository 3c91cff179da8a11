"""Three nodes of the real RabbitMQ on loopback with a quorum queue, and clients that write to it and read from it.

The first node is the one of the machine in question: systemd's place is taken by ``ServiceManager``. Clients speak
STOMP, which RabbitMQ brings a plugin for: a SEND is confirmed as AMQP's publisher confirms are.
"""

import sys

if sys.platform == "win32":
    raise ImportError("RabbitMQ as Debian has it is for Unix")

import contextlib
import functools
import itertools
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import apt
import psutil
from examples import ServiceManager, Unit, example
from harness import CHECKOUT, PATIENCE
from ports import free_port

_CACHE = CHECKOUT / ".cache/rabbitmq"
_NODES = ("r1", "r2", "r3")
_HOST = "localhost"
_LOOPBACK = "-kernel inet_dist_use_interface {127,0,0,1}"
_CONFIGURATION = """
listeners.tcp.1 = 127.0.0.1:{amqp}
stomp.listeners.tcp.1 = 127.0.0.1:{stomp}
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.randomized_startup_delay_range.min = 0
cluster_formation.randomized_startup_delay_range.max = 1
disk_free_limit.absolute = 1MB
"""


@functools.cache
def _programs() -> tuple[str, Path]:
    """Where Erlang and RabbitMQ have their programs; unpacked below .cache, or skips the test."""
    apt.unpack(_CACHE, "rabbitmq-server")
    (erlang,) = (_CACHE / "usr/lib/erlang").glob("erts-*/bin")
    (scripts,) = (_CACHE / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin")
    return str(erlang), scripts


def version() -> str:
    return _programs()[1].parent.name.partition("-")[2]


@dataclass(frozen=True)
class _Node:
    name: str
    stomp: int
    amqp: int = field(default_factory=free_port)
    distribution: int = field(default_factory=free_port)


class Cluster:
    """All three nodes, each a unit; the machine's own is the first."""

    def __init__(self, directory: Path) -> None:
        erlang, self._scripts = _programs()
        self.directory = directory
        directory.mkdir(parents=True)
        self.nodes = [_Node(name, free_port()) for name in _NODES]
        self._epmd_port = free_port()
        self._epmd: subprocess.Popen[bytes] | None = None
        self._erlang = erlang
        self.bin = directory / "bin"
        units = {self.unit(number): Unit(self._command(node)) for number, node in enumerate(self.nodes)}
        self.manager = ServiceManager(self.bin, units)

    def unit(self, number: int = 0) -> str:
        return f"rabbitmq-{number + 1}.service"

    @property
    def ports(self) -> list[int]:
        """Where clients connect."""
        return [node.stomp for node in self.nodes]

    @property
    def environment(self) -> Mapping[str, str]:
        """For the hooks."""
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "RABBITMQ_UNIT": self.unit(),
            "RABBITMQ_MARK": str(self.directory / "mark"),
        }

    def policy(self, hooks: Path, endpoint: str) -> str:
        more = ", ".join(f"{key}: '{value}'" for key, value in self.environment.items())
        return example("rabbitmq.yaml", hooks, endpoint, {"RABBITMQ_UNIT: rabbitmq-server.service": more})

    def start(self) -> None:
        """Start all, and wait until the three are one cluster."""
        self.manager.__enter__()
        self._write_programs()
        (self.directory / ".erlang.cookie").write_text("demo")
        (self.directory / ".erlang.cookie").chmod(0o400)
        epmd = [f"{self._erlang}/epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"]
        epmd = ["env", f"LD_LIBRARY_PATH={apt.libraries(_CACHE)}", *epmd]
        self._epmd = subprocess.Popen(epmd)
        for number in range(len(self.nodes)):
            self.manager.start(self.unit(number))
        wait(self._is_complete, "the three nodes were a cluster")
        self.run("rabbitmqctl", "enable_feature_flag", "all")

    def run(self, program: str, *arguments: str, number: int = 0) -> str:
        """The output of one of RabbitMQ's programs; raises CalledProcessError."""
        command = [*self._environment(self.nodes[number]), str(self._scripts / program), "-q", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return done.stdout.strip()

    def is_drained(self) -> bool:
        question = "rabbit_maintenance:is_being_drained_local_read(node())."
        return self.run("rabbitmqctl", "eval", question) == "true"

    def hang(self) -> None:
        """Let the machine's node be as one that is gone: it neither answers nor rejects a connection."""
        node = self.nodes[0].name
        if self.manager.runs(self.unit()):
            psutil.Process(int((self.directory / node / "data" / f"{node}@{_HOST}.pid").read_text())).suspend()

    def close(self) -> None:
        self.manager.__exit__(None, None, None)
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(PATIENCE)

    def _is_complete(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            for number in range(len(self.nodes)):
                self.run("rabbitmqctl", "await_startup", number=number)
            running = self.run("rabbitmqctl", "eval", "rabbit_mnesia:cluster_nodes(running).")
            return all(name in running for name in _NODES)
        return False

    def _environment(self, node: _Node) -> list[str]:
        place = self.directory / node.name
        variables = {
            "HOME": self.directory,
            "PATH": f"{self.bin}:{self._scripts}:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": apt.libraries(_CACHE),
            "RABBITMQ_NODENAME": f"{node.name}@{_HOST}",
            "RABBITMQ_BASE": place,
            "RABBITMQ_MNESIA_BASE": place / "data",
            "RABBITMQ_LOG_BASE": place / "log",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_ENABLED_PLUGINS_FILE": place / "plugins",
            "RABBITMQ_CONFIG_FILE": place / "rabbitmq.conf",
            "RABBITMQ_DIST_PORT": node.distribution,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _LOOPBACK,
            "RABBITMQ_CTL_ERL_ARGS": _LOOPBACK,
            "ERL_EPMD_PORT": self._epmd_port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        return ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]

    def _command(self, node: _Node) -> list[str]:
        place = self.directory / node.name
        place.mkdir()
        (place / "plugins").write_text("[rabbitmq_stomp].\n")
        peers = [
            f"cluster_formation.classic_config.nodes.{number + 1} = {name}@{_HOST}\n"
            for number, name in enumerate(_NODES)
        ]
        text = _CONFIGURATION.format(amqp=node.amqp, stomp=node.stomp)
        (place / "rabbitmq.conf").write_text(text + "".join(peers))
        return [*self._environment(node), str(self._scripts / "rabbitmq-server")]

    def _write_programs(self) -> None:
        """Erlang where it was unpacked, for Debian's knows only where it is installed; and what the hooks call."""
        root = Path(self._erlang).parents[1]
        variables = f"ROOTDIR={root} BINDIR={self._erlang} EMU=beam PROGNAME=erl"
        scripts = {"erl": f'{variables} exec {self._erlang}/erlexec "$@"'}
        for name in ("rabbitmqctl", "rabbitmq-queues", "rabbitmq-upgrade", "rabbitmq-diagnostics"):
            command = [*self._environment(self.nodes[0]), str(self._scripts / name)]
            scripts[name] = f'exec {shlex.join(command)} "$@"'
        for name, line in scripts.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{line}\n")
            (self.bin / name).chmod(0o755)


class _Connection:
    """One connection of STOMP."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._stream = self._socket.makefile("rb")
        self.send("CONNECT", **{"accept-version": "1.2", "host": "/", "login": "guest", "passcode": "guest"})
        self.receive("CONNECTED")

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def cut_off(self) -> None:
        """End the connection from any thread: a thread that waits for a frame gets an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, command: str, body: str = "", **headers: str) -> None:
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        self._socket.sendall(f"{command}\n{lines}\n{body}\0".encode())

    def receive(self, command: str) -> tuple[dict[str, str], str]:
        """Headers and body of the next frame; raises OSError if it is another one, or the connection has ended."""
        frame = b""
        while not frame.endswith(b"\0"):
            byte = self._stream.read(1)
            if not byte:
                raise OSError("the connection has ended")
            frame = (frame + byte).lstrip(b"\n")
        head, _, body = frame[:-1].decode().partition("\n\n")
        name, *lines = head.split("\n")
        if name != command:
            raise OSError(f"{name}: {lines} {body}")
        return dict(line.split(":", 1) for line in lines), body


class Load:
    """A client that writes numbers to a quorum queue, and one that reads them, each at any node that lets it."""

    def __init__(self, ports: list[int]) -> None:
        self.confirmed: list[tuple[int, float]] = []
        """What RabbitMQ has confirmed, and when."""
        self.failed = 0
        """How many attempts to connect or to write."""
        self.consumed: set[int] = set()
        self._ports = ports
        self._reads: _Connection | None = None
        self._next = itertools.count(1)
        self._ends = threading.Event()
        self._ends_reading = threading.Event()
        self._writer = threading.Thread(target=self._keep, args=(self._write, self._ends), daemon=True)
        self._reader = threading.Thread(target=self._keep, args=(self._read, self._ends_reading), daemon=True)
        self._writer.start()
        self.wait_confirmed(1)
        self._reader.start()

    def wait_confirmed(self, count: int = 50) -> None:
        goal = len(self.confirmed) + count
        wait(lambda: len(self.confirmed) >= goal, "numbers were confirmed")

    def lost(self) -> set[int]:
        """End the writer, let the reader read; returns what was confirmed and never read."""
        self._ends.set()
        self._writer.join(PATIENCE)
        written = {number for number, _ in self.confirmed}
        with contextlib.suppress(AssertionError):
            wait(lambda: written <= self.consumed, "all numbers were read")
        return written - self.consumed

    def longest_gap(self) -> float:
        """The longest time without a confirmed number, in seconds."""
        times = [at for _, at in self.confirmed]
        return max(after - before for before, after in itertools.pairwise(times))

    def stop(self) -> None:
        self._ends.set()
        self._ends_reading.set()
        if self._reads is not None:
            self._reads.cut_off()
        for thread in (self._writer, self._reader):
            thread.join(PATIENCE)

    def _keep(self, work: Callable[[_Connection], None], ends: threading.Event) -> None:
        ports = itertools.cycle(self._ports)
        while not ends.is_set():
            try:
                with contextlib.closing(_Connection(next(ports))) as connection:
                    work(connection)
            except OSError:
                if work == self._write:
                    self.failed += not ends.is_set()
                time.sleep(0.05)

    def _write(self, connection: _Connection) -> None:
        queue = {"destination": "/queue/numbers", "x-queue-type": "quorum", "durable": "true"}
        kind = {**queue, "auto-delete": "false", "exclusive": "false", "persistent": "true"}
        while not self._ends.is_set():
            number = next(self._next)
            connection.send("SEND", str(number), **kind, receipt=str(number))
            connection.receive("RECEIPT")
            self.confirmed.append((number, time.monotonic()))
            time.sleep(0.005)

    def _read(self, connection: _Connection) -> None:
        self._reads = connection
        connection.send("SUBSCRIBE", id="0", ack="client-individual", destination="/amq/queue/numbers")
        while not self._ends_reading.is_set():
            headers, body = connection.receive("MESSAGE")
            self.consumed.add(int(body))
            connection.send("ACK", id=headers["ack"])


def wait(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 3 * PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.1)
