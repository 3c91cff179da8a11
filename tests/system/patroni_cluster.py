"""A real Patroni of two members and a witness (raft, no other service) on loopback: units of a ServiceManager.

This file has the configuration of its processes and the queries to them, and nothing about the agent.
"""

import contextlib
import shutil
import subprocess
from pathlib import Path

import apt
import httpx
import psutil
from examples import ServiceManager, Unit
from harness import PATIENCE
from ports import free_port

BIN = Path("/usr/lib/postgresql/15/bin")
USER = "postgres"
MEMBERS = ("a", "b")
_CONFIGURATION = """
scope: demo
name: {name}
restapi: {{listen: '127.0.0.1:{rest}', connect_address: '127.0.0.1:{rest}'}}
raft:
  data_dir: {directory}/raft
  self_addr: 127.0.0.1:{raft}
  partner_addrs: ['127.0.0.1:{partner}', '127.0.0.1:{witness}']
bootstrap:
  dcs:
    postgresql: {{use_pg_rewind: true}}
  initdb: [{{auth-host: trust}}, {{auth-local: trust}}, {{encoding: UTF8}}, no-sync]
  pg_hba: ['local all all trust', 'host all all 127.0.0.1/32 trust', 'host replication all 127.0.0.1/32 trust']
postgresql:
  listen: 127.0.0.1:{port}
  connect_address: 127.0.0.1:{port}
  data_dir: {directory}/data
  bin_dir: {bin}
  pgpass: {directory}/pgpass
  authentication:
    superuser: {{username: postgres}}
    replication: {{username: replicator, password: replicator}}
    rewind: {{username: rewinder, password: rewinder}}
  parameters: {{unix_socket_directories: '{directory}', fsync: 'off', max_standby_streaming_delay: '-1'}}
"""


def need() -> None:
    """PostgreSQL 15 and Patroni, installed if need be, and root to run them as their account."""
    apt.need_root("Patroni")
    apt.need(str(BIN / "postgres"), "postgresql-15")
    apt.need("patroni", "patroni", "python3-pysyncobj")
    apt.need("syncobj_admin", "python3-pysyncobj")


class PatroniCluster:
    """Its folder belongs to PostgreSQL's account; ``start`` waits until both members run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ports = [free_port() for _ in range(7)]
        self.witness_unit = "patroni-witness.service"
        self._ports = dict(zip(MEMBERS, ports[:2], strict=True))
        self._rafts, self._witness = dict(zip(MEMBERS, ports[2:4], strict=True)), ports[4]
        self._rests = dict(zip(MEMBERS, ports[5:], strict=True))
        controller = ["/usr/bin/patroni_raft_controller", str(directory / "witness.yml")]
        self.units = {
            self.unit(name): Unit(["/usr/bin/patroni", str(self.configuration(name))], USER) for name in MEMBERS
        } | {self.witness_unit: Unit(controller, USER)}
        self.conninfo = (
            f"host=127.0.0.1,127.0.0.1 port={ports[0]},{ports[1]} user={USER} dbname=postgres "
            "target_session_attrs=read-write connect_timeout=2"
        )

    def unit(self, name: str) -> str:
        return f"patroni-{name}.service"

    def configuration(self, name: str) -> Path:
        return self.directory / f"{name}.yml"

    def data(self, name: str) -> Path:
        return self.directory / name / "data"

    def environment(self, name: str) -> dict[str, str]:
        """The variables of postgresql-prepare on this member's machine."""
        return {
            "PGDATA": str(self.data(name)),
            "PGHOST": str(self.directory / name),
            "PGPORT": str(self._ports[name]),
            "POSTGRESQL_BIN": str(BIN),
            "POSTGRESQL_UNIT": self.unit(name),
            "POSTGRESQL_FAILOVER": "patroni",
            "PATRONI_CONFIG": str(self.configuration(name)),
        }

    def configure(self) -> None:
        self.directory.mkdir()
        shutil.chown(self.directory, USER)
        for name in MEMBERS:
            (self.directory / name).mkdir()
            shutil.chown(self.directory / name, USER)
            text = _CONFIGURATION.format(
                name=name,
                rest=self._rests[name],
                raft=self._rafts[name],
                partner=next(port for other, port in self._rafts.items() if other != name),
                witness=self._witness,
                directory=self.directory / name,
                port=self._ports[name],
                bin=BIN,
            )
            self.configuration(name).write_text(text, encoding="utf-8")
        partners = ", ".join(f"'127.0.0.1:{port}'" for port in self._rafts.values())
        (self.directory / "witness.yml").write_text(
            f"raft: {{self_addr: '127.0.0.1:{self._witness}', partner_addrs: [{partners}], "
            f"data_dir: '{self.directory}/witness'}}\n",
            encoding="utf-8",
        )

    def members(self) -> dict[str, tuple[str, str]]:
        """Role and state of each member that answers."""
        found = {}
        for name, port in self._rests.items():
            with contextlib.suppress(httpx.HTTPError):
                told = httpx.get(f"http://127.0.0.1:{port}/patroni", trust_env=False, timeout=10).json()
                found[name] = (str(told["role"]), str(told["state"]))
        return found

    def leader(self) -> str:
        """The member that leads and runs; "" while there is none."""
        return next((name for name, told in self.members().items() if told == ("master", "running")), "")

    def is_complete(self) -> bool:
        return sorted(self.members().values()) == [("master", "running"), ("replica", "running")]

    def patronictl(self, *arguments: str) -> None:
        """Once the cluster is complete: before that it waits for ever."""
        command = ["runuser", "-u", USER, "--", "patronictl", "-c", str(self.configuration("a")), *arguments]
        subprocess.run(command, cwd="/", stdout=subprocess.DEVNULL, timeout=60, check=True)

    def close(self, manager: ServiceManager) -> None:
        """End Patroni, then all that it has left, however far it came: initdb, a copy of the data, PostgreSQL."""
        for name in self.units:
            manager.power_off(name)
        left = [process for process in psutil.process_iter() if self._is_of_this(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, PATIENCE)

    def _is_of_this(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any(text.startswith(f"{self.directory}/") for text in (process.cwd(), *process.cmdline()))
        return False
