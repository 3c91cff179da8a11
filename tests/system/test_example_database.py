"""The example policy for a database, with a real PostgreSQL: a clean stop, and no committed row is lost.

A cluster of our own in a temporary directory, on a Unix socket; ``systemctl`` is a stand-in (see examples.py).
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import apt
from examples import ServiceManager, Unit, copy_hooks, example
from harness import PATIENCE, Agent, Simulator

BIN = Path("/usr/lib/postgresql/15/bin")
USER = "postgres"
UNIT = "postgresql@15-main.service"
STANDBY_UNIT = "standby.service"


@pytest.fixture(scope="module", autouse=True)
def postgresql() -> None:
    """PostgreSQL 15's programs; installed if need be."""
    apt.need(str(BIN / "postgres"), "postgresql-15")


def as_user(program: str, *arguments: str) -> str:
    """Run one of PostgreSQL's programs as its account."""
    command = ["runuser", "-u", USER, "--", str(BIN / program), *arguments]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class Writer:
    """A client that inserts without a pause, comes back after each failure, and notes what was committed."""

    def __init__(self, socket: Path) -> None:
        self.committed: list[int] = []
        self._command = ["runuser", "-u", USER, "--", str(BIN / "psql"), "-XAtq", "-h", str(socket), "postgres"]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE)

    def _write(self) -> None:
        number = 0
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
                try:
                    while not self._is_over.is_set():
                        number += 1  # a number whose answer was lost is never used again
                        client.stdin.write(f"INSERT INTO numbers VALUES ({number}) RETURNING n;\n")
                        client.stdin.flush()
                        if client.stdout.readline() != f"{number}\n":
                            break
                        self.committed.append(number)
                    client.stdin.close()
                except BrokenPipeError:
                    client.stdin = None  # what is in its buffer cannot be written any more
            self._is_over.wait(0.1)


class Stage:
    """A primary, an agent with the example policy, and what there is to look at."""

    def __init__(self, directory: Path, sim: Simulator, *, has_standby: bool, stop_signal: int) -> None:
        self.server = directory / "server"  # PostgreSQL's own: its sockets and its data
        self.data = self.server / "primary"
        self.standby_data = self.server / "standby"
        units = {
            UNIT: self._unit(self.data, 5432, stop_signal),
            STANDBY_UNIT: self._unit(self.standby_data, 5433, signal.SIGINT),
        }
        self.manager = ServiceManager(directory / "bin", units)
        self.agent = Agent(directory / "agent", sim.endpoint())
        self.hooks = copy_hooks(directory)
        self.environment = {
            "PATH": f"{directory}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PGDATA": str(self.data),
            "PGHOST": str(self.server),
            "POSTGRESQL_BIN": str(BIN),
            "POSTGRESQL_UNIT": UNIT,
        }
        self.conninfo = f"host={self.server} port=5433 user={USER}"
        failover = {"POSTGRESQL_FAILOVER": "standby", "POSTGRESQL_STANDBY": self.conninfo} if has_standby else {}
        self.environment |= failover
        # All that the test changes in the example.
        replacements = {
            "/var/lib/postgresql/15/main": str(self.data),
            "/var/run/postgresql": str(self.server),
            "env: &server\n": f"env: &server\n      PATH: {self.environment['PATH']}\n",
            "POSTGRESQL_FAILOVER: none": "\n      ".join(f"{name}: {value}" for name, value in failover.items()),
            "    window: night\n": "",  # at once, not in the night
        }
        policy = example("database.yaml", self.hooks, sim.endpoint(), replacements)
        self.agent.config.write_text(policy, encoding="utf-8")

    def _unit(self, data: Path, port: int, stop_signal: int) -> Unit:
        run = [str(BIN / "postgres"), "-D", str(data), "-k", str(self.server), "-p", str(port), "-h", ""]
        # No machine crashes here, only processes end; and a standby should be back in less than its usual 5 s.
        run += ["-c", "fsync=off", "-c", "wal_retrieve_retry_interval=200ms"]
        return Unit(run, USER, stop_signal)

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
        self.agent.wait_until(lambda: self.ask(question) == "streaming", "the standby streamed")

    def wait_up(self, port: int) -> None:
        ready = [str(BIN / "pg_isready"), "-q", "-h", str(self.server), "-p", str(port)]
        self.agent.wait_until(lambda: subprocess.run(ready, check=False).returncode == 0, f"{port} was up")

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
        for mark in ("stopped-by-agent", "standby.signal"):
            (self.data / mark).touch()
            shutil.chown(self.data / mark, USER)

    def run_hook(self, name: str, event: str = "A") -> subprocess.CompletedProcess[str]:
        """``event``: empty for an on_clear hook."""
        return subprocess.run(
            [str(self.hooks / name)],
            cwd="/",
            env=self.environment | {"SCHEDULED_EVENT_ID": event},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(rate_limit=None) as simulator:
        yield simulator


@contextmanager
def staged(sim: Simulator, *, has_standby: bool = False, stop_signal: int = signal.SIGINT) -> Iterator[Stage]:
    # Not in tmp_path, which is pytest's account's alone.
    directory = Path(tempfile.mkdtemp(prefix="database-", dir="/tmp"))
    directory.chmod(0o755)
    stage = Stage(directory, sim, has_standby=has_standby, stop_signal=stop_signal)
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


def test_a_reboot_waits_for_a_checkpoint_and_a_clean_stop_and_loses_no_row(sim: Simulator) -> None:
    with staged(sim) as stage, closing(Writer(stage.server)) as writer:
        agent = stage.agent
        agent.start()
        agent.wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
        event = sim.schedule("Reboot", lasts_seconds=None)
        sim.wait_started(event)
        assert stage.state() == "shut down"
        assert not stage.manager.runs(UNIT)
        stopped = next(call for call in stage.manager.calls if call.arguments == ("stop", UNIT))
        assert sim.approvals(event)[0].monotonic > stopped.answered_at
        log = stage.manager.log.read_text(encoding="utf-8")
        assert 0 < log.index("checkpoint starting: immediate force wait") < log.index("received fast shutdown")
        told = [line["line"] for line in agent.log("hook output", hook="stop-cleanly")]
        assert told == ["postgresql-prepare: checkpoint done", "postgresql-prepare: stopped: shut down"]

        committed = list(writer.committed)
        sim.end(event)
        agent.wait_log("closed", event_id=event)
        told = [line["line"] for line in agent.log("hook output", hook="start", event_id=event)]
        assert told == ["postgresql-recover: accepts connections, as primary"]
        assert set(committed) <= stage.rows()
        agent.wait_until(lambda: len(writer.committed) > len(committed), "the writer was at work again")
        log = stage.manager.log.read_text(encoding="utf-8")
        assert "was not properly shut down" not in log  # what a crash would have left to do


def test_an_eviction_leaves_time_for_a_clean_stop(sim: Simulator) -> None:
    with staged(sim) as stage, closing(Writer(stage.server)) as writer:
        stage.agent.start()
        stage.agent.wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
        event = sim.schedule("Preempt", notice_seconds=30, lasts_seconds=None)
        stage.agent.wait_log("hook finished", reason="hook stop-cleanly: exit code 0 (succeeded)")
        assert sim.event(event).status == "Scheduled"
        assert sim.approvals() == ()
        assert stage.state() == "shut down"


def test_a_stop_that_was_not_clean_is_no_success(sim: Simulator) -> None:
    with staged(sim) as stage:
        stage.manager.power_off(UNIT)
        done = stage.run_hook("postgresql-prepare")
        assert (done.returncode, done.stdout, done.stderr) == (
            1,
            "",
            f'postgresql-prepare: not a clean stop: {stage.data} was "in production"\n',
        )
        assert not stage.manager.runs(UNIT)


def test_a_server_that_is_held_after_an_unclean_stop_serves_again(sim: Simulator) -> None:
    with staged(sim, stop_signal=signal.SIGQUIT) as stage:  # as if systemd had lost its patience
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "postgresql-prepare: starting the server again, as no other server has taken over",
            f'postgresql-prepare: not a clean stop: {stage.data} was "in production"',
        ]
        stage.wait_up(5432)


def test_a_server_that_was_stopped_before_is_not_started_nor_handed_over(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.systemctl("stop")
        runs = [stage.run_hook(f"postgresql-{stage_}") for stage_ in ("recover", "prepare", "recover")]
        assert [(done.returncode, done.stdout) for done in runs] == [
            (0, "postgresql-recover: not stopped by postgresql-prepare: left as it is\n"),
            (0, "postgresql-prepare: stopped: shut down\n"),
            (0, "postgresql-recover: not stopped by postgresql-prepare: left as it is\n"),
        ]
        assert stage.ask("SELECT pg_is_in_recovery()", 5433) == "t"
        assert not stage.manager.runs(UNIT)


def test_a_server_started_and_stopped_since_is_left_alone(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        mark = stage.data / "stopped-by-agent"
        stage.environment["POSTGRESQL_FAILOVER"] = "none"
        assert stage.run_hook("postgresql-prepare").returncode == 0
        old = mark.read_bytes()
        stage.manager.start(UNIT)
        stage.wait_up(5432)
        stage.systemctl("stop")
        left = "postgresql-recover: the server was started and stopped since then: left as it is\n"
        assert stage.run_hook("postgresql-recover", "").stdout == left
        assert not mark.exists()

        mark.write_bytes(old)
        stage.environment["POSTGRESQL_FAILOVER"] = "standby"
        done = stage.run_hook("postgresql-prepare", "B")
        assert (done.returncode, done.stdout) == (0, "postgresql-prepare: stopped: shut down\n")
        assert stage.ask("SELECT pg_is_in_recovery()", 5433) == "t"  # not handed over
        done = stage.run_hook("postgresql-recover", "B")
        assert done.stdout == "postgresql-recover: not stopped by postgresql-prepare: left as it is\n"
        assert not stage.manager.runs(UNIT)


def test_a_server_that_is_found_stopped_for_another_event_is_started_after_it(sim: Simulator) -> None:
    with staged(sim) as stage:
        runs = [
            stage.run_hook(f"postgresql-{stage_}", event) for stage_, event in (("prepare", "A"), ("prepare", "B"))
        ]
        assert [done.returncode for done in runs] == [0, 0]
        done = stage.run_hook("postgresql-recover", "")
        assert done.stdout == "postgresql-recover: accepts connections, as primary\n"


def test_a_server_that_has_not_answered_yet_is_still_the_agents_to_start(sim: Simulator) -> None:
    with staged(sim) as stage:
        assert stage.run_hook("postgresql-prepare").returncode == 0
        stage.environment |= {"PGHOST": str(stage.server / "nowhere"), "POSTGRESQL_START_LIMIT": "0"}
        assert stage.run_hook("postgresql-recover").returncode == 1
        stage.manager.power_off(UNIT)
        stage.environment |= {"PGHOST": str(stage.server), "POSTGRESQL_START_LIMIT": "60"}
        done = stage.run_hook("postgresql-recover", "")
        assert done.stdout == "postgresql-recover: accepts connections, as primary\n"


def test_a_missing_data_directory_is_no_recovery(sim: Simulator) -> None:
    with staged(sim) as stage:
        stage.environment["PGDATA"] = str(stage.server / "not-mounted")
        done = stage.run_hook("postgresql-recover")
        assert (done.returncode, done.stderr) == (
            1,
            f"postgresql-recover: {stage.server}/not-mounted is no data directory: is its disk there?\n",
        )


def test_both_hooks_may_run_again(sim: Simulator) -> None:
    with staged(sim) as stage:
        runs = [stage.run_hook(f"postgresql-{stage_}") for stage_ in ("prepare", "prepare", "recover", "recover")]
        assert [done.returncode for done in runs] == [0, 0, 0, 0]
        assert runs[1].stdout == "postgresql-prepare: stopped: shut down\n"
        assert runs[2].stdout == "postgresql-recover: accepts connections, as primary\n"
        assert runs[3].stdout == "postgresql-recover: not stopped by postgresql-prepare: left as it is\n"


def test_a_standby_takes_over_with_every_row_and_the_old_primary_follows(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage, closing(Writer(stage.server)) as writer:
        stage.start_standby()
        agent = stage.agent
        agent.start()
        agent.wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
        event = sim.schedule("Redeploy", lasts_seconds=None)
        sim.wait_started(event)
        writer.close()
        assert stage.ask("SELECT pg_is_in_recovery()", 5433) == "f"
        assert set(writer.committed) <= stage.rows(5433)
        assert stage.run_hook("postgresql-prepare").returncode == 0
        assert (stage.data / "postgresql.auto.conf").read_text().count(stage.conninfo) == 1

        stage.ask("INSERT INTO numbers VALUES (-1)", 5433)
        sim.end(event)
        agent.wait_log("closed", event_id=event)
        told = [line["line"] for line in agent.log("hook output", hook="start", event_id=event)]
        assert told == ["postgresql-recover: accepts connections, as standby"]
        agent.wait_until(lambda: -1 in stage.rows(), "the old primary followed the new one")


def test_without_a_standby_to_take_over_nothing_is_stopped_and_the_event_is_held(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.agent.start()
        event = sim.schedule("Reboot", lasts_seconds=None)
        stage.agent.wait_phase(event, "held")
        assert sim.approvals() == ()
        assert stage.ask("SELECT pg_is_in_recovery()") == "f"
        told = [line["line"] for line in stage.agent.log("hook output", hook="stop-cleanly")]
        assert told[-1] == (
            "postgresql-prepare: the server at POSTGRESQL_STANDBY does not answer, or is none of this one's; "
            "nothing was stopped"
        )


def test_a_standby_that_lags_behind_is_not_promoted_and_the_primary_serves_again(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.ask("SELECT pg_wal_replay_pause()", 5433)  # it goes on to receive
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 1
        started, failed = done.stderr.splitlines()
        assert started == "postgresql-prepare: starting the server again, as no other server has taken over"
        assert re.fullmatch(
            r"postgresql-prepare: the standby has not replayed everything up to \S+: not promoted", failed
        )
        stage.wait_up(5432)
        assert [stage.ask("SELECT pg_is_in_recovery()", port) for port in (5432, 5433)] == ["f", "t"]


def test_a_server_that_does_not_say_whether_it_is_the_primary_is_not_handed_over(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.environment["PGDATABASE"] = "missing"
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            "postgresql-prepare: the server does not say whether it is the primary; nothing was stopped"
        )
        assert stage.manager.runs(UNIT)


def test_a_hand_over_that_ended_before_the_promotion_leaves_one_primary(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.stop_for_a_hand_over()
        done = stage.run_hook("postgresql-recover")  # the event was taken back
        assert done.stdout.splitlines() == [
            "postgresql-recover: the standby was not promoted: starting as the primary",
            "postgresql-recover: accepts connections, as primary",
        ]
        stage.wait_streaming()
        stage.stop_for_a_hand_over()
        done = stage.run_hook("postgresql-prepare")  # the event is still there
        assert done.returncode == 0, done.stderr
        assert stage.ask("SELECT pg_is_in_recovery()", 5433) == "f"
