"""A real PgBouncer in front of the servers of database_environment.py, and the policy for both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import apt
from database_environment import USER, Servers, Writer, wait_until
from examples import example
from harness import CHECKOUT, PATIENCE
from ports import free_port

_CACHE = CHECKOUT / ".cache/pgbouncer"
_CONFIGURATION = """
[databases]
app = host={server} port={port} dbname=postgres user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
admin_users = {user}
pool_mode = transaction
query_wait_timeout = 600
server_login_retry = 1
"""


def program() -> tuple[str, ...]:
    """How PgBouncer is called; unpacked below .cache if it is missing."""
    if found := apt.find("pgbouncer"):
        return (found,)
    apt.unpack(_CACHE, "pgbouncer")
    return ("env", f"LD_LIBRARY_PATH={apt.libraries(_CACHE)}", str(_CACHE / "usr/sbin/pgbouncer"))


class Bouncer:
    """One PgBouncer for the servers, which clients reach at ``conninfo``."""

    def __init__(self, directory: Path, servers: Servers) -> None:
        self._servers = servers
        self._port = free_port()
        self._directory = directory / "pgbouncer"
        self._configuration = self._directory / "pgbouncer.ini"
        self._log = self._directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.conninfo = f"host=127.0.0.1 port={self._port} user={USER} dbname=app connect_timeout=5"
        self.environment = {
            "PATH": servers.environment["PATH"],
            "PGBOUNCER": f"host=127.0.0.1 port={self._port} user={USER}",
            "PGBOUNCER_DATABASE": "app",
            "PGBOUNCER_MARK": str(directory / "paused"),
        }

    def policy(self, endpoint: str, *, lead: str = "45s") -> str:
        """The example, with all that is changed in it."""
        more = {key: value for key, value in self.environment.items() if key != "PGBOUNCER_DATABASE"}
        lines = "".join(f"      {key}: '{value}'\n" for key, value in more.items())
        replacements = {
            "/var/lib/postgresql/15/main": str(self._servers.data),
            "/var/run/postgresql": str(self._servers.server),
            "      PGBOUNCER: host=10.0.0.7 port=6432 user=admin\n": lines,
            "lead: 45s": f"lead: {lead}",
        }
        return example("pgbouncer.yaml", self._servers.hooks, endpoint, replacements)

    def start(self) -> None:
        """Start it, for the primary; wait until it answers."""
        self._directory.mkdir()
        text = _CONFIGURATION.format(server=self._servers.server, port=5432, own_port=self._port, user=USER)
        self._configuration.write_text(text)
        shutil.chown(self._directory, USER)
        with self._log.open("wb") as log:
            command = ["runuser", "-u", USER, "--", *program(), str(self._configuration)]
            self._process = subprocess.Popen(command, cwd="/", stdout=log, stderr=log)
        wait_until(lambda: self._run(self.conninfo, "SELECT 1") == "1", "PgBouncer answered")

    def lead_to_command(self, port: int) -> str:
        """Lets it use another server of these, as an administrator would: a line of shell."""
        reload = f"psql -Xqw -d '{self.environment['PGBOUNCER']} dbname=pgbouncer' -c RELOAD"
        return f"sed -i 's/port=5432/port={port}/' {self._configuration}; {reload}"

    def admin(self, command: str) -> str:
        return self._run(f"{self.environment['PGBOUNCER']} dbname=pgbouncer", command)

    def is_paused(self) -> bool:
        (line,) = [line for line in self.admin("SHOW DATABASES").splitlines() if line.startswith("app|")]
        return line.split("|")[-2] == "1"

    def version(self) -> str:
        done = subprocess.run([*program(), "--version"], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()[0]

    def start_hook(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """In a session of its own, as the agent does."""
        return subprocess.Popen(
            [str(self._servers.hooks / "pgbouncer"), *arguments],
            cwd="/",
            env={**self._servers.environment, **self.environment, "SCHEDULED_EVENT_ID": "A", **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run_hook(self, *arguments: str, **more: str) -> tuple[int, list[str]]:
        with self.start_hook(*arguments, **more) as hook:
            said, _ = hook.communicate(timeout=PATIENCE)
        return hook.returncode, said.splitlines()

    def writer(self) -> Writer:
        return Writer(self.conninfo)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()  # runuser passes it on
            self._process.wait(PATIENCE)
            sys.stdout.write(self._log.read_text("utf-8"))  # pytest shows it on failure only

    def _run(self, conninfo: str, command: str) -> str:
        done = subprocess.run(
            ["psql", "-XAtqw", "-d", conninfo, "-c", command],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.stdout.strip()
