"""A primary, two replicas and three Sentinels of the real Redis, on loopback; and a client that writes to them.

The primary is the server of the machine in question: systemd's place is taken by ``ServiceManager``.
"""

import sys

if sys.platform == "win32":
    raise ImportError("Redis is for Unix")

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apt
from examples import ServiceManager, Unit, example
from harness import PATIENCE
from ports import free_port

UNIT = "redis-server.service"
NAME = "mymaster"
SENTINEL = """
port {port}
bind 127.0.0.1
dir {directory}
sentinel monitor {name} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {name} {down_after}
sentinel failover-timeout {name} 20000
"""


class RedisError(Exception):
    """An error that a server answered with."""


def ask(port: int, *words: str) -> list[str]:
    """Send one command; returns the words of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(_request(words))
        with connection.makefile("rb") as stream:
            return _answer(stream.readline)


def _request(words: tuple[str, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(w.encode()), w.encode()) for w in words)]
    return b"".join(parts)


def _answer(read_line: Callable[[], bytes]) -> list[str]:
    """Texts hold no line breaks here, except those of INFO, which come as lines."""
    line = _line(read_line)
    kind, rest = line[:1], line[1:].rstrip("\r\n")
    match kind:
        case "+" | ":":
            return [rest]
        case "-":
            raise RedisError(rest)
        case "$" if rest == "-1":
            return []
        case "$":
            text = ""
            while len(text.encode()) < int(rest) + 2:
                text += _line(read_line)
            return text.splitlines()
        case "*":
            return [word for _ in range(max(0, int(rest))) for word in _answer(read_line)]
        case _:
            raise OSError(f"no answer of Redis: {line!r}")


def _line(read_line: Callable[[], bytes]) -> str:
    line = read_line().decode()
    if not line.endswith("\n"):
        raise OSError(f"the connection has ended: {line!r}")
    return line


class RedisSet:
    """All of it; the machine's own server is ``port``, started as a unit."""

    def __init__(self, directory: Path, *, down_after_seconds: int = 60) -> None:
        """``down_after_seconds``: until Sentinel takes a server for down; on a busy machine one may be slow."""
        for program in ("redis-server", "redis-sentinel", "redis-cli"):
            apt.need(program, "redis-server", "redis-sentinel", "redis-tools")
        self.directory = directory
        self.port, *self.replicas = ports = [free_port() for _ in range(3)]
        self.sentinels = [free_port() for _ in range(3)]
        self._processes: list[subprocess.Popen[bytes]] = []
        for port in ports:
            place = directory / str(port)
            place.mkdir(parents=True)
            follow = "" if port == self.port else f"replicaof 127.0.0.1 {self.port}\n"
            text = (
                f"port {port}\nbind 127.0.0.1\ndir {place}\nappendonly yes\nrepl-diskless-sync-delay 0\n{follow}"
            )
            (place / "redis.conf").write_text(text)
        for port in self.sentinels:
            text = SENTINEL.format(
                port=port,
                directory=directory,
                name=NAME,
                primary=self.port,
                down_after=1000 * down_after_seconds,
            )
            (directory / f"{port}.conf").write_text(text)
        own = ("redis-server", str(directory / str(self.port) / "redis.conf"))
        self.manager = ServiceManager(directory / "bin", {UNIT: Unit(own)})
        self.manager.__enter__()

    @property
    def environment(self) -> dict[str, str]:
        """For the hooks."""
        return {
            "PATH": f"{self.manager.directory}:{os.environ['PATH']}",
            "REDIS_ADDRESS": f"127.0.0.1:{self.port}",
            "REDIS_SENTINEL": f"127.0.0.1:{self.sentinels[0]}",
            "REDIS_MARK": str(self.directory / "mark"),
        }

    def policy(self, hooks: Path, endpoint: str) -> str:
        more = "".join(f", {key}: '{value}'" for key, value in self.environment.items())
        return example("redis.yaml", hooks, endpoint, {f"REDIS_NAME: {NAME}": f"REDIS_NAME: {NAME}{more}"})

    def start(self) -> None:
        """Start all, and wait until Sentinel could hand over."""
        self.manager.start(UNIT)
        wait(lambda: self.fact(self.port, "role") == "master", "the primary ran")
        for port in self.replicas:
            self._run("redis-server", self.directory / str(port) / "redis.conf")
        wait(self._is_replicated, "both replicas had everything")
        for port in self.sentinels:
            self._run("redis-sentinel", self.directory / f"{port}.conf")
        wait(self._is_watched, "the Sentinels knew each other and the replicas")

    def _run(self, program: str, configuration: Path) -> None:
        with (self.directory / "servers.log").open("ab") as log:
            command = [program, str(configuration)]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _is_replicated(self) -> bool:
        return all("state=online" in self.fact(self.port, name) for name in ("slave0", "slave1"))

    def _is_watched(self) -> bool:
        for port in self.sentinels:
            words = ask(port, "SENTINEL", "MASTER", NAME)
            known = dict(zip(words[::2], words[1::2], strict=True))
            if (known["num-slaves"], known["num-other-sentinels"], known["flags"]) != ("2", "2", "master"):
                return False
        return True

    def fact(self, port: int, name: str) -> str:
        """A line of a server's INFO replication; empty if it does not answer."""
        with contextlib.suppress(OSError, RedisError):
            for line in ask(port, "INFO", "replication"):
                if line.startswith(f"{name}:"):
                    return line.partition(":")[2]
        return ""

    def primary(self) -> int:
        """The port of the server that Sentinel calls the primary."""
        told = ask(self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        if not told:
            raise RedisError("Sentinel knows no primary")
        return int(told[1])

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(PATIENCE)
        self.manager.__exit__(None, None, None)


class Writer:
    """A client that asks Sentinel where the primary is, and appends numbers to a list, one after the other."""

    def __init__(self, servers: RedisSet) -> None:
        self.written: list[tuple[int, float]] = []
        """What the primary has confirmed, and when."""
        self.failed = 0
        """How many attempts to connect or to write."""
        self._servers = servers
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(PATIENCE)

    def wait_written(self, count: int = 50) -> None:
        """Wait until so many more numbers are written."""
        goal = len(self.written) + count
        wait(lambda: len(self.written) >= goal, "numbers were written")

    def lost(self) -> set[int]:
        """Writes that were confirmed and that the present primary does not have."""
        there = {int(word) for word in ask(self._servers.primary(), "LRANGE", "numbers", "0", "-1")}
        return {number for number, _ in self.written} - there

    def longest_gap(self) -> float:
        """The longest time without a confirmed number, in seconds."""
        times = [at for _, at in self.written]
        return max(after - before for before, after in itertools.pairwise(times))

    def _write(self) -> None:
        number = 0
        while not self._ends.is_set():
            try:
                with self._connected() as (connection, read_line):
                    while not self._ends.is_set():
                        number += 1
                        connection.sendall(_request(("RPUSH", "numbers", str(number))))
                        _answer(read_line)
                        self.written.append((number, time.monotonic()))
                        time.sleep(0.002)
            except (OSError, RedisError):
                self.failed += 1
                time.sleep(0.02)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[tuple[socket.socket, Callable[[], bytes]]]:
        address = ("127.0.0.1", self._servers.primary())
        with socket.create_connection(address, timeout=2) as connection, connection.makefile("rb") as stream:
            yield connection, stream.readline


def wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError, RedisError):
            if is_so():
                return
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.05)
