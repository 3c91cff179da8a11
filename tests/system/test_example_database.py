"""The example policy for a database, with a real PostgreSQL: a clean stop, and no committed row is lost."""

import re
import signal
import subprocess
import sys
from contextlib import closing

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

import database_environment
from database_environment import BIN, UNIT, USER, Writer, staged
from harness import PATIENCE, Simulator

pytestmark = pytest.mark.usefixtures("hook_shell")


@pytest.fixture(scope="module", autouse=True)
def postgresql() -> None:
    database_environment.need()


def test_a_reboot_waits_for_a_checkpoint_and_a_clean_stop_and_loses_no_row(sim: Simulator) -> None:
    with staged(sim) as stage, closing(Writer(stage.primary)) as writer:
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
        told = [line["line"] for line in agent.log("hook output", hook="stop-in-time")]
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


def test_a_freeze_waits_for_a_checkpoint_and_stops_nothing(sim: Simulator) -> None:
    with staged(sim) as stage, closing(Writer(stage.primary)) as writer:
        stage.agent.start()
        event = sim.schedule("Freeze", lasts_seconds=None)
        sim.wait_started(event)
        told = [line["line"] for line in stage.agent.log("hook output", hook="checkpoint")]
        assert told == ["postgresql-prepare: checkpoint done"]
        committed = len(writer.committed)
        stage.agent.wait_until(lambda: len(writer.committed) > committed, "the writer was at work")
        sim.end(event)
        stage.agent.wait_log("closed", event_id=event)
        assert stage.stops() == []
        stage.systemctl("stop")
        done = stage.run_hook("postgresql-prepare", "B", "checkpoint")
        left = "postgresql-prepare: the server accepts no connections: no checkpoint\n"
        assert (done.returncode, done.stdout) == (0, left)


def test_without_a_standby_the_server_is_stopped_in_the_last_half_minute_only(sim: Simulator) -> None:
    with staged(sim, is_late=True) as stage:
        stage.agent.start()
        event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
        stage.agent.wait_phase(event, "waiting")
        explained = stage.agent.run("explain", "--config", str(stage.agent.config))
        assert "lead 30s" in explained.stdout, explained
        soon = sim.schedule("Reboot", notice_seconds=29, lasts_seconds=None)
        stage.agent.wait_log("hook started", hook="stop-in-time", event_id=soon)
        assert stage.agent.log("hook started", event_id=event) == []


def test_an_eviction_leaves_time_for_a_clean_stop(sim: Simulator) -> None:
    with staged(sim) as stage, closing(Writer(stage.primary)) as writer:
        stage.agent.start()
        stage.agent.wait_until(lambda: len(writer.committed) > 50, "the writer was at work")
        event = sim.schedule("Preempt", notice_seconds=300, lasts_seconds=None)
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
    with staged(sim, stop_signal=signal.SIGQUIT) as stage:  # as if systemd's time limit had passed
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
        left = f"postgresql-recover: {UNIT} was started and stopped since then: left as it is\n"
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


def test_a_server_that_has_not_answered_yet_is_started_by_the_next_run(sim: Simulator) -> None:
    with staged(sim) as stage:
        assert stage.run_hook("postgresql-prepare").returncode == 0
        stage.environment |= {"PGHOST": str(stage.server / "nowhere"), "POSTGRESQL_START_LIMIT": "0"}
        assert stage.run_hook("postgresql-recover").returncode == 1
        stage.manager.power_off(UNIT)
        stage.environment |= {"PGHOST": str(stage.server), "POSTGRESQL_START_LIMIT": "60"}
        done = stage.run_hook("postgresql-recover", "")
        assert done.stdout == "postgresql-recover: accepts connections, as primary\n"


def test_a_server_that_is_just_starting_is_stopped_and_started_after_the_event(sim: Simulator) -> None:
    with staged(sim) as stage:
        stage.systemctl("stop")
        stage.manager.states[UNIT] = "activating"
        assert stage.run_hook("postgresql-prepare").returncode == 0
        assert len(stage.stops()) == 2
        done = stage.run_hook("postgresql-recover")
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


def test_a_standby_is_promoted_with_every_row_and_the_old_primary_follows(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage, closing(Writer(stage.primary)) as writer:
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


def test_without_a_standby_nothing_is_stopped_and_the_event_is_held(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.agent.start()
        event = sim.schedule("Reboot", lasts_seconds=None)
        stage.agent.wait_phase(event, "held")
        assert sim.approvals() == ()
        assert stage.ask("SELECT pg_is_in_recovery()") == "f"
        told = [line["line"] for line in stage.agent.log("hook output", hook="stop-in-time")]
        assert told[-1] == (
            "postgresql-prepare: the server at POSTGRESQL_STANDBY does not answer, or is none of this one's; "
            "nothing was stopped"
        )


def test_a_standby_that_lags_behind_is_found_before_anything_is_stopped(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.ask("SELECT pg_wal_replay_pause()", 5433)  # it goes on to receive
        stage.environment["POSTGRESQL_LAG_LIMIT"] = "1"
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 1
        assert re.fullmatch(
            r"postgresql-prepare: the standby has not replayed up to \S+ within 1 s; nothing was stopped. "
            r"When it has, then: scheduled-events-agent retry A\n",
            done.stderr,
        )
        assert stage.stops() == []


def test_a_standby_that_lags_after_the_stop_is_not_promoted(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.ask("SELECT pg_wal_replay_pause()", 5433)
        stage.systemctl("stop")
        stage.mark("stopped-by-agent")  # a run before this one has stopped it
        stage.environment["POSTGRESQL_LAG_LIMIT"] = "1"
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 1
        started, failed = done.stderr.splitlines()
        assert started == "postgresql-prepare: starting the server again, as no other server has taken over"
        assert re.fullmatch(
            r"postgresql-prepare: the standby has not replayed everything up to \S+: not promoted", failed
        )
        stage.wait_up(5432)
        assert [stage.ask("SELECT pg_is_in_recovery()", port) for port in (5432, 5433)] == ["f", "t"]


def test_pg_receivewal_does_not_count_as_a_standby(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.ask("ALTER SYSTEM SET primary_conninfo = 'host=/nowhere'", 5433)
        stage.ask("SELECT pg_reload_conf()", 5433)
        receive = [str(BIN / "pg_receivewal"), "-h", str(stage.server), "-D", str(stage.server)]
        with subprocess.Popen(["runuser", "-u", USER, "--", *receive], cwd="/") as receiver:
            try:
                names = "SELECT string_agg(application_name, ' ') FROM pg_stat_replication"
                stage.agent.wait_until(lambda: stage.ask(names) == "pg_receivewal", "only pg_receivewal streamed")
                done = stage.run_hook("postgresql-prepare")
            finally:
                receiver.terminate()
                receiver.wait(PATIENCE)
        assert done.returncode == 1
        assert done.stderr == "postgresql-prepare: no standby streams from this server; nothing was stopped\n"
        assert stage.stops() == []


def test_a_standby_that_would_wait_for_this_server_is_promoted_only_if_allowed(sim: Simulator) -> None:
    with staged(sim, has_standby=True) as stage:
        stage.start_standby()
        stage.ask("ALTER SYSTEM SET synchronous_standby_names = '*'", 5433)
        stage.ask("SELECT pg_reload_conf()", 5433)
        waits = "SHOW synchronous_standby_names"
        stage.agent.wait_until(lambda: stage.ask(waits, 5433) == "*", "the standby had read its setting")
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 1
        assert done.stderr == (
            "postgresql-prepare: the standby has synchronous_standby_names = '*': once it is promoted, every "
            "commit waits until this server is back; nothing was stopped. On the standby, ALTER SYSTEM RESET "
            "synchronous_standby_names; SELECT pg_reload_conf(); or set POSTGRESQL_COMMITS_MAY_WAIT: yes; "
            "then: scheduled-events-agent retry A\n"
        )
        assert stage.stops() == []

        stage.environment["POSTGRESQL_COMMITS_MAY_WAIT"] = "yes"
        done = stage.run_hook("postgresql-prepare")
        assert done.returncode == 0, done.stderr
        assert "after the promotion commits wait for '*': until this server is back\n" in done.stdout
        assert stage.ask("SELECT pg_is_in_recovery()", 5433) == "f"


def test_a_server_of_unknown_role_is_not_handed_over(sim: Simulator) -> None:
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
