"""The example of PgBouncer, with real ones: clients wait while the database is away, and none fails."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

import database_environment
from database_environment import UNIT, USER, Servers, wait_until
from harness import PATIENCE, Agent, Simulator
from pgbouncer_environment import Bouncer

pytestmark = [
    pytest.mark.usefixtures("hook_shell"),
    pytest.mark.timeout(600),
]  # the first time, packages are fetched


@contextmanager
def staged(*, has_standby: bool = False) -> Iterator[tuple[Servers, Bouncer]]:
    database_environment.need()
    directory = Path(tempfile.mkdtemp(prefix="pgbouncer-", dir="/tmp"))  # PostgreSQL's account may enter
    directory.chmod(0o755)
    servers = Servers(directory, has_standby=has_standby)
    bouncer = Bouncer(directory, servers)
    servers.server.mkdir()
    shutil.chown(servers.server, USER)
    try:
        with ExitStack() as stack:
            stack.enter_context(servers.manager)
            servers.start_primary()
            stack.callback(bouncer.close)
            bouncer.start()
            yield servers, bouncer
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def bouncer() -> Iterator[Bouncer]:
    """For what needs no writer, and stops nothing."""
    with staged() as (_, bouncer):
        yield bouncer


def test_no_client_fails_while_the_database_is_rebooted(tmp_path: Path) -> None:
    with staged() as (servers, bouncer), Simulator(rate_limit=None) as sim, closing(bouncer.writer()) as writer:
        with Agent(tmp_path / "agent", sim.endpoint()) as agent:
            agent.config.write_text(bouncer.policy(sim.endpoint(), lead="30d"), encoding="utf-8")
            agent.start()
            agent.wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
            event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
            sim.wait_started(event)
            assert (bouncer.is_paused(), servers.manager.runs(UNIT)) == (True, False)
            committed = len(writer.committed)
            sim.end(event)
            agent.wait_log("closed", event_id=event)
            agent.wait_until(lambda: len(writer.committed) > committed + 50, "the writer was at work again")
        writer.close()
        assert writer.tried == len(writer.committed)
        assert set(writer.committed) <= servers.rows()


def test_clients_wait_for_a_hand_over_and_none_fails(tmp_path: Path) -> None:
    with staged(has_standby=True) as (servers, bouncer), closing(bouncer.writer()) as writer:
        servers.start_standby()
        wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
        hand_over = tmp_path / "hand-over"
        hand_over.write_text(
            f"#!/bin/sh\nset -e\n{servers.hooks}/postgresql-prepare\n{bouncer.lead_to_command(5433)}\n"
        )
        hand_over.chmod(0o755)
        code, said = bouncer.run_hook("during", str(hand_over))
        assert (code, said[0], said[-1]) == (
            *(0, "pgbouncer: clients of app wait", "pgbouncer: clients of app go on"),
        )
        committed = len(writer.committed)
        wait_until(lambda: len(writer.committed) > committed + 50, "the writer was at work again")
        writer.close()
        assert writer.tried == len(writer.committed)
        assert set(writer.committed) <= servers.rows(5433)
        assert bouncer.run_hook("resume") == (0, ["pgbouncer: not paused by this hook: left as it is"])


def test_a_transaction_that_does_not_end_lets_clients_go_on_and_the_hook_fail(bouncer: Bouncer) -> None:
    client = ["psql", "-XAtq", bouncer.conninfo]
    with subprocess.Popen(client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as transaction:
        assert transaction.stdin is not None
        assert transaction.stdout is not None
        transaction.stdin.write("BEGIN; SELECT 'begun';\n")
        transaction.stdin.flush()
        assert transaction.stdout.readline() == "begun\n"
        code, said = bouncer.run_hook("pause", "true", PGBOUNCER_LIMIT="1")
        assert code == 1
        assert re.fullmatch(r"pgbouncer: PAUSE at .*: not done after [2-9] s; clients go on", said[-1])
        assert not bouncer.is_paused()
        transaction.stdin.write("COMMIT; SELECT 'ended';\n")
        transaction.stdin.flush()
        assert transaction.stdout.readline() == "ended\n"
        transaction.stdin.close()
        assert transaction.wait(PATIENCE) == 0


def test_when_the_stop_fails_clients_go_on_and_both_hooks_may_run_again(bouncer: Bouncer) -> None:
    assert bouncer.run_hook("pause", "false") == (
        *(1, ["pgbouncer: clients of app wait", "pgbouncer: clients go on, as this failed: false"]),
    )
    assert not bouncer.is_paused()
    for _ in range(2):  # as after a crash
        assert bouncer.run_hook("pause", "true") == (0, ["pgbouncer: clients of app wait"])
    assert bouncer.is_paused()
    assert bouncer.run_hook("resume") == (0, ["pgbouncer: clients of app go on"])
    assert not bouncer.is_paused()


def test_when_another_pgbouncer_does_not_answer_clients_of_this_one_go_on(bouncer: Bouncer) -> None:
    assert bouncer.run_hook("pause", "true")[0] == 0
    both = f"{bouncer.environment['PGBOUNCER']}\nhost=127.0.0.1 port=1"
    code, said = bouncer.run_hook("pause", "true", PGBOUNCER=both)
    assert (code, said[-1]) == (1, "pgbouncer: no answer from host=127.0.0.1 port=1")
    assert not bouncer.is_paused()


def test_a_hook_whose_time_is_over_lets_clients_go_on(bouncer: Bouncer) -> None:
    with bouncer.start_hook("pause", "sleep", "600") as hook:
        wait_until(bouncer.is_paused, "clients waited")
        os.killpg(hook.pid, signal.SIGTERM)
        assert hook.wait(PATIENCE) == 143
        assert not bouncer.is_paused()


def test_a_database_paused_by_an_administrator_stays_paused(bouncer: Bouncer) -> None:
    bouncer.admin("PAUSE app")
    code, said = bouncer.run_hook("pause", "true")
    assert (code, said) == (1, ["pgbouncer: an administrator has paused app; nothing was done"])
    assert bouncer.run_hook("resume") == (0, ["pgbouncer: not paused by this hook: left as it is"])
    assert bouncer.is_paused()
    bouncer.admin("RESUME app")
