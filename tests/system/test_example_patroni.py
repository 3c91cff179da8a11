"""The hooks for a database under a real Patroni: the other member leads, no row is lost, every wait ends."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

import patroni_cluster
from database_environment import BIN, USER, Writer, as_user, wait_until
from examples import ServiceManager, copy_hooks
from harness import PATIENCE, Agent, Simulator
from patroni_cluster import MEMBERS, PatroniCluster

pytestmark = pytest.mark.usefixtures("hook_shell")


class Stage:
    """Two members, and what there is to do with them."""

    def __init__(self, directory: Path, cluster: PatroniCluster, manager: ServiceManager) -> None:
        self.directory, self.cluster, self.manager = directory, cluster, manager
        self.hooks = copy_hooks(directory)
        self.path = f"{manager.directory}:/usr/sbin:/usr/bin:/sbin:/bin"

    def run_hook(self, name: str, member: str, lag_limit: str = "60") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": self.path, "SCHEDULED_EVENT_ID": "A", **self.cluster.environment(member)}
        environment |= {"POSTGRESQL_HANDOVER_LIMIT": "3", "POSTGRESQL_LAG_LIMIT": lag_limit}
        return subprocess.run(
            [str(self.hooks / name)],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    def ask(self, question: str) -> str:
        return as_user("psql", "-XAtq", "-d", self.cluster.conninfo, "-c", question).strip()

    def wait_complete(self) -> None:
        wait_until(self.cluster.is_complete, "both members ran")


@pytest.fixture
def stage() -> Iterator[Stage]:
    patroni_cluster.need()
    directory = Path(tempfile.mkdtemp(prefix="patroni-", dir="/tmp"))  # not pytest's account's alone
    directory.chmod(0o755)
    cluster = PatroniCluster(directory / "cluster")
    cluster.configure()
    with ServiceManager(directory / "bin", cluster.units) as manager:
        try:
            for unit in cluster.units:
                manager.start(unit)
            stage = Stage(directory, cluster, manager)
            stage.wait_complete()
            yield stage
        finally:
            cluster.close(manager)
            sys.stdout.write(manager.log.read_text(encoding="utf-8"))  # pytest shows it on failure only
            shutil.rmtree(directory)


@pytest.fixture
def agent(stage: Stage, sim: Simulator) -> Iterator[Agent]:
    with Agent(stage.directory / "agent", sim.endpoint()) as agent:
        yield agent


def test_the_other_member_leads_with_every_row_and_this_one_becomes_a_standby(
    sim: Simulator, stage: Stage, agent: Agent
) -> None:
    cluster = stage.cluster
    old = cluster.leader()
    (new,) = set(MEMBERS) - {old}
    env = {"PATH": stage.path, "POSTGRESQL_LAG_LIMIT": "60", **cluster.environment(old)}
    agent.write_policy(
        rules=[
            {
                "name": "maintenance",
                "when": {"type": "Reboot"},
                "prepare": ["stop-cleanly"],
                "recover": ["start"],
                "approve": "when-prepared",
            }
        ],
        hooks={
            "stop-cleanly": {"run": [str(stage.hooks / "postgresql-prepare")], "timeout": "2m", "env": env},
            "start": {"run": [str(stage.hooks / "postgresql-recover")], "timeout": "2m", "env": env},
        },
    )
    stage.ask("CREATE TABLE numbers (n integer)")
    with closing(Writer(cluster.conninfo)) as writer:
        agent.start()
        agent.wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
        event = sim.schedule("Reboot", lasts_seconds=None)
        sim.wait_started(event, 3 * PATIENCE)
        committed = len(writer.committed)
        assert cluster.leader() == new
        assert "shut down in recovery" in as_user("pg_controldata", "-D", str(cluster.data(old)))
        assert not stage.manager.runs(cluster.unit(old))
        agent.wait_until(lambda: len(writer.committed) > committed, "the writer was at work again")
    rows = {int(row) for row in stage.ask("SELECT n FROM numbers").split()}
    assert set(writer.committed) <= rows

    sim.end(event)
    agent.wait_log("closed", event_id=event)
    told = [line["line"] for line in agent.log("hook output", hook="start", event_id=event)]
    assert told == ["postgresql-recover: accepts connections, as standby"]
    stage.wait_complete()
    assert cluster.leader() == new


def test_a_replica_that_lags_is_not_handed_over_to(stage: Stage) -> None:
    cluster = stage.cluster
    leader = cluster.leader()
    (replica,) = set(MEMBERS) - {leader}
    where = cluster.environment(replica)
    ask_replica = ("psql", "-XAtq", "-h", where["PGHOST"], "-p", where["PGPORT"], "-c")
    stage.ask("CREATE TABLE not_replayed (n integer)")
    known = "SELECT to_regclass('not_replayed') IS NOT NULL"
    wait_until(lambda: as_user(*ask_replica, known).strip() == "t", "the replica had it")
    # Patroni ends a pause of the replay by itself, but not a query that is in its way.
    reads = [str(BIN / "psql"), *ask_replica[1:], "SELECT n FROM not_replayed; SELECT pg_sleep(600)"]
    with subprocess.Popen(["runuser", "-u", USER, "--", *reads], cwd="/", stdin=subprocess.DEVNULL) as reader:
        held = "SELECT count(*) FROM pg_locks WHERE relation = 'not_replayed'::regclass AND granted"
        wait_until(lambda: as_user(*ask_replica, held).strip() == "1", "the replica's query ran")
        stage.ask("TRUNCATE not_replayed")
        done = stage.run_hook("postgresql-prepare", leader, lag_limit="1")
        reader.kill()
    assert done.returncode == 1
    assert re.fullmatch(
        r"postgresql-prepare: no standby streams and has replayed up to \S+ within 1 s; nothing was stopped. "
        r"When one has, then: scheduled-events-agent retry A\n",
        done.stderr,
    )
    assert cluster.leader() == leader


def test_in_a_paused_cluster_each_hook_fails_in_time_and_both_members_run(stage: Stage) -> None:
    cluster = stage.cluster
    leader = cluster.leader()
    (replica,) = set(MEMBERS) - {leader}
    cluster.patronictl("pause", "--wait")
    done = stage.run_hook("postgresql-prepare", leader)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "postgresql-prepare: not handed over within 3 s (the lines of patronictl say why); nothing was stopped. "
        "Put that right, then: scheduled-events-agent retry A"
    )
    assert stage.manager.runs(cluster.unit(leader))

    done = stage.run_hook("postgresql-prepare", replica)  # Patroni ends, and leaves PostgreSQL running
    assert done.returncode == 1
    assert done.stderr == (
        "postgresql-prepare: starting the server again, as no other server has taken over\n"
        f"postgresql-prepare: PostgreSQL runs on after the stop of {cluster.unit(replica)}; Patroni does that in "
        "a paused cluster: patronictl resume, then: scheduled-events-agent retry A\n"
    )
    stage.wait_complete()
    assert cluster.leader() == leader
    cluster.patronictl("resume", "--wait")
