"""PostgreSQL, with a standby and without: docs/cookbook/database.md."""

import contextlib
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import database_environment
import psutil
from database_environment import UNIT, USER, Servers, Writer, wait_until
from frame import Outcome, Recipe, Way
from harness import Agent

from scheduled_events_agent.simulator.azure import EventType

CLIENTS = 4


class _Database(Recipe):
    page = "docs/cookbook/database.md"
    load = f"{CLIENTS} clients, each inserts row after row and connects again after a failure"
    columns = ("inserts failed", "outage", "commits lost")
    has_standby: ClassVar[bool] = False

    def __init__(self, place: Path, way: Way) -> None:
        database_environment.need()
        super().__init__(place, way)
        place.chmod(0o755)
        self._servers = Servers(place, has_standby=self.has_standby)
        self._writers: list[Writer] = []

    def start(self) -> None:
        self._servers.server.mkdir()
        shutil.chown(self._servers.server, USER)
        self.ends.enter_context(self._servers.manager)
        self._servers.start_primary()
        if self.has_standby:
            self._servers.start_standby()

    def versions(self) -> str:
        return f"PostgreSQL {self._servers.ask('SHOW server_version', self._port()).split()[0]}"

    def write_policy(self, agent: Agent) -> None:
        agent.config.write_text(self._servers.policy(agent.endpoint, is_late=True), encoding="utf-8")

    def start_load(self) -> None:
        server = self._servers.server
        primary = f"host={server} port=5432"
        both = f"host={server},{server} port=5432,5433 target_session_attrs=read-write"
        servers = both if self.has_standby else primary
        conninfo = f"{servers} user={USER} dbname=postgres connect_timeout=2"
        self.start_writers(conninfo)

    def start_writers(self, conninfo: str) -> None:
        """Start the clients, and wait until each has written."""
        for number in range(CLIENTS):
            self._writers.append(Writer(conninfo, first=number * 10**8))
            self.ends.callback(self._writers[-1].close)
        self.settle()

    def stop_service(self) -> None:
        self._servers.manager.stop(UNIT)

    def go_down(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if self.event == "Freeze":
                    process.suspend()
                else:
                    process.kill()
        if self.event != "Freeze":
            self._servers.manager.power_off(UNIT)

    def come_back(self) -> None:
        if self.event == "Freeze":
            for process in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        self._servers.manager.start(UNIT)

    def settle(self) -> None:
        now = time.monotonic()
        wait_until(lambda: all(writer.committed_at[-1:] > [now] for writer in self._writers), "all clients wrote")

    def finish(self) -> Outcome:
        for writer in self._writers:
            writer.close()
        committed = {number for writer in self._writers for number in writer.committed}
        tried = sum(writer.tried for writer in self._writers)
        at = sorted(at for writer in self._writers for at in writer.committed_at)
        return Outcome(
            failed=tried - len(committed),
            total=tried,
            outage_seconds=max(later - earlier for earlier, later in pairwise(at)),
            lost=len(committed - self._servers.rows(self._port())),
        )

    def _port(self) -> int:
        is_promoted = self.has_standby and self._servers.ask("SELECT pg_is_in_recovery()", 5433) == "f"
        return 5433 if is_promoted else 5432

    def _processes(self) -> list[psutil.Process]:
        """The primary's, as far as it runs."""
        try:
            main = psutil.Process(int((self._servers.data / "postmaster.pid").read_text().split()[0]))
            return [main, *main.children()]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return []


class WithStandby(_Database):
    title = "PostgreSQL with an asynchronous standby"
    case = "standby"
    has_standby = True


class Alone(_Database):
    title = "PostgreSQL without a standby"
    case = "no standby"


class AloneAndAwaited(Alone):
    title = "PostgreSQL without a standby, on a host that waits for other VMs"
    case = "no standby, host waits"
    is_awaited = True


class Frozen(_Database):
    title = "PostgreSQL without a standby, paused"
    case = "no standby, freeze"
    event: ClassVar[EventType] = "Freeze"
