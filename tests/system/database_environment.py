"""A real PostgreSQL with the example policy, and with a standby where a test wants one; and a client that writes.

A cluster of our own in a temporary directory, on a Unix socket; ``systemctl`` is a stand-in (see examples.py).
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apt
from examples import Call, ServiceManager, Unit, copy_hooks, example
from harness import PATIENCE, Agent, Simulator

BIN = Path("/usr/lib/postgresql/15/bin")
USER = "postgres"
UNIT = "postgresql@15-main.service"
STANDBY_UNIT = "standby.service"


def need() -> None:
    """PostgreSQL 15's programs, installed if need be, and root to run them as their account."""
    apt.need_root("PostgreSQL")
    apt.need(str(BIN / "postgres"), "postgresql-15")


def wait_until(test: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 3 * PATIENCE
    while not test():
        assert time.monotonic() < deadline, f"{what}: not within {3 * PATIENCE:.0f} s"
        time.sleep(0.05)


def as_user(program: str, *arguments: str) -> str:
    """Run one of PostgreSQL's programs as its account."""
    command = ["runuser", "-u", USER, "--", str(BIN / program), *arguments]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class Writer:
    """A client that inserts without a pause, comes back after each failure, and notes what was committed."""

    def __init__(self, conninfo: str, first: int = 1) -> None:
        self.committed: list[int] = []
        self.committed_at: list[float] = []
        self.tried = 0
        self._first = first
        self._command = ["runuser", "-u", USER, "--", str(BIN / "psql"), "-XAtq", conninfo]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE)

    def _write(self) -> None:
        while not self._is_over.is_set():
            with subprocess.Popen(
                self._command,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as client:
                assert client.stdin is not None
                assert client.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    while not self._is_over.is_set():
                        number = self._first + self.tried  # one whose answer was lost is never used again
                        self.tried += 1
                        client.stdin.write(f"INSERT INTO numbers VALUES ({number}) RETURNING n;\n")
                        client.stdin.flush()
                        if client.stdout.readline() != f"{number}\n":
                            break
                        self.committed.append(number)
                        self.committed_at.append(time.monotonic())
                with contextlib.suppress(BrokenPipeError):  # what is in its buffer cannot be written
                    client.stdin.close()
            self._is_over.wait(0.1)


class Servers:
    """A primary, a standby where there is one, the example policy for them, and what there is to look at."""

    def __init__(self, directory: Path, *, has_standby: bool, stop_signal: int = signal.SIGINT) -> None:
        self.server = directory / "server"  # PostgreSQL's own: its sockets and its data
        self.data = self.server / "primary"
        self.standby_data = self.server / "standby"
        units = {
            UNIT: self._unit(self.data, 5432, stop_signal),
            STANDBY_UNIT: self._unit(self.standby_data, 5433, signal.SIGINT),
        }
        self.manager = ServiceManager(directory / "bin", units)
        self.hooks = copy_hooks(directory)
        self.environment = {
            "PATH": f"{directory}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PGDATA": str(self.data),
            "PGHOST": str(self.server),
            "POSTGRESQL_BIN": str(BIN),
            "POSTGRESQL_UNIT": UNIT,
        }
        self.primary = f"host={self.server} user={USER} dbname=postgres"
        self.conninfo = f"host={self.server} port=5433 user={USER}"
        failover = {"POSTGRESQL_FAILOVER": "standby", "POSTGRESQL_STANDBY": self.conninfo} if has_standby else {}
        if has_standby:  # of a busy machine
            failover["POSTGRESQL_LAG_LIMIT"] = "60"
        self.environment |= failover
        self._failover = failover

    def policy(self, endpoint: str, *, is_late: bool) -> str:
        """The example, with all that is changed in it."""
        replacements = {
            "/var/lib/postgresql/15/main": str(self.data),
            "/var/run/postgresql": str(self.server),
            "env: &server\n": f"env: &server\n      PATH: {self.environment['PATH']}\n",
            "POSTGRESQL_FAILOVER: none": "\n      ".join(
                f'{name}: "{value}"' for name, value in self._failover.items()
            ),
        }
        if not is_late:
            replacements |= {"lead: 30s": "lead: 30d", "timeout: 30s": "timeout: 10m"}
        return example("database.yaml", self.hooks, endpoint, replacements)

    def _unit(self, data: Path, port: int, stop_signal: int) -> Unit:
        run = [str(BIN / "postgres"), "-D", str(data), "-k", str(self.server), "-p", str(port), "-h", ""]
        # No machine crashes here, only processes end; and a standby should be back in less than its usual 5 s.
        run += ["-c", "fsync=off", "-c", "wal_retrieve_retry_interval=200ms"]
        return Unit(run, USER, stop_signal, is_mixed=True)

    def start_primary(self) -> None:
        as_user("initdb", "-D", str(self.data), "--auth=trust", "--no-sync", "--encoding=UTF8")
        self.manager.start(UNIT)
        self.wait_up(5432)
        self.ask("CREATE TABLE numbers (n integer)")

    def start_standby(self) -> None:
        options = ["-D", str(self.standby_data), "-R", "--checkpoint=fast", "--no-sync"]
        as_user("pg_basebackup", "-h", str(self.server), *options)
        self.manager.start(STANDBY_UNIT)
        self.wait_up(5433)
        self.wait_streaming()

    def wait_streaming(self) -> None:
        question = "SELECT state FROM pg_stat_replication"
        wait_until(lambda: self.ask(question) == "streaming", "the standby streamed")

    def wait_up(self, port: int) -> None:
        ready = [str(BIN / "pg_isready"), "-q", "-h", str(self.server), "-p", str(port)]
        wait_until(lambda: subprocess.run(ready, check=False).returncode == 0, f"{port} was up")

    def ask(self, question: str, port: int = 5432) -> str:
        return as_user(
            "psql", "-XAtq", "-h", str(self.server), "-p", str(port), "-c", question, "postgres"
        ).strip()

    def rows(self, port: int = 5432) -> set[int]:
        return {int(row) for row in self.ask("SELECT n FROM numbers", port).split()}

    def state(self) -> str:
        lines = as_user("pg_controldata", "-D", str(self.data)).splitlines()
        return next(line for line in lines if line.startswith("Database cluster state:")).partition(":")[2].strip()

    def systemctl(self, verb: str) -> None:
        subprocess.run([str(self.manager.directory / "systemctl"), verb, UNIT], check=True)

    def stop_for_a_hand_over(self) -> None:
        """As postgresql-prepare does, when it is ended just before the promotion."""
        self.systemctl("stop")
        self.mark("stopped-by-agent")
        self.mark("standby.signal")

    def mark(self, name: str) -> None:
        (self.data / name).write_text("A\n", encoding="utf-8")
        shutil.chown(self.data / name, USER)

    def stops(self) -> list[Call]:
        return [call for call in self.manager.calls if call.arguments[0] == "stop"]

    def run_hook(self, name: str, event: str = "A", *arguments: str) -> subprocess.CompletedProcess[str]:
        """``event``: empty for an on_clear hook."""
        return subprocess.run(
            [str(self.hooks / name), *arguments],
            cwd="/",
            env=self.environment | {"SCHEDULED_EVENT_ID": event},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


class Stage(Servers):
    """A stage with an agent, on a simulated endpoint."""

    def __init__(
        self, directory: Path, sim: Simulator, *, has_standby: bool, stop_signal: int, is_late: bool
    ) -> None:
        super().__init__(directory, has_standby=has_standby, stop_signal=stop_signal)
        self.agent = Agent(directory / "agent", sim.endpoint())
        self.agent.config.write_text(self.policy(sim.endpoint(), is_late=is_late), encoding="utf-8")


@contextlib.contextmanager
def staged(
    sim: Simulator, *, has_standby: bool = False, stop_signal: int = signal.SIGINT, is_late: bool = False
) -> Iterator[Stage]:
    """``is_late``: as late as the example has it, which is too late for most tests."""
    # Not in tmp_path, which is pytest's account's alone.
    directory = Path(tempfile.mkdtemp(prefix="database-", dir="/tmp"))
    directory.chmod(0o755)
    stage = Stage(directory, sim, has_standby=has_standby, stop_signal=stop_signal, is_late=is_late)
    stage.server.mkdir()
    shutil.chown(stage.server, USER)
    try:
        with stage.manager:
            stage.start_primary()
            yield stage
    finally:
        stage.agent.close()
        sys.stdout.write("".join(stage.agent.history))  # pytest shows it on failure only
        sys.stdout.write(stage.manager.log.read_text(encoding="utf-8"))
        shutil.rmtree(directory)
