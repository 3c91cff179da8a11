"""The disk under the state file is full, read-only or broken, or another process sits on the file.

On a full disk the agent works on, in the reserve of its state file. Where none is left, and for all the rest:
polling, the pages and what runs go on; nothing is begun and nothing approved that is not on disk first; /healthz,
a metric and the log say so; and it goes on by itself when the disk does.
"""

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fault_injection import DRAIN, longest_gap_seconds, needs_root, see_through
from harness import Agent, Simulator

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.store import RESERVE_BYTES, Store, StoreError
from scheduled_events_agent.workflow import Record, RecordKind, Transition, Workflow

if sys.platform == "win32":
    pytest.skip("file systems are mounted and limited as Linux does it", allow_module_level=True)


def run(*command: str) -> str:
    """Run a command of the system; returns what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not possible here: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    run("mount", *options, str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


@pytest.fixture
def small_disk(agent: Agent) -> Iterator[Path]:
    """The agent's state directory as a file system of its own, of half a megabyte: too small for a reserve."""
    with mounted(agent.state_dir, "-t", "tmpfs", "-o", "size=512k,mode=700", "none"):
        yield agent.state_dir


@pytest.fixture
def disk(agent: Agent) -> Iterator[Path]:
    """The agent's state directory as a file system of its own, with room for a reserve."""
    with mounted(agent.state_dir, "-t", "tmpfs", "-o", "size=32m,mode=700", "none"):
        yield agent.state_dir


def wait_reserve(agent: Agent) -> None:
    agent.wait_until(lambda: agent.metric("state_reserve_bytes") > 0.7 * RESERVE_BYTES, "there was a reserve")


@pytest.fixture
def breakable_disk(agent: Agent, tmp_path: Path) -> Iterator[Path]:
    """The agent's state directory as a file system that becomes read-only when it finds itself damaged."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(4 << 20)
    run("mkfs.ext4", "-q", str(image))
    with mounted(agent.state_dir, "-o", "loop,errors=remount-ro", str(image)):
        agent.state_dir.chmod(0o700)
        yield agent.state_dir


def fill(disk: Path) -> Path:
    """Write until there is no room left; returns the file that took it."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def damage(disk: Path) -> None:
    """Have the file system find damage in itself."""
    device = run("findmnt", "--noheadings", "--output", "SOURCE", str(disk)).removeprefix("/dev/")
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("test")


def check_stuck(agent: Agent, sim: Simulator, kind: str, reason: str) -> None:
    """It can write nothing, and says so, but polls."""
    failed = agent.wait_log("writing the state file fails")
    assert (failed["kind"], failed["level"]) == (kind, "warning")
    assert failed["reason"] == f"cannot write {agent.state_dir / 'state.db'}: {reason}"
    trouble = f"Nothing can be done until the state file can be written: {failed['reason']}.\n"
    agent.wait_until(lambda: agent.get("/healthz") == (503, trouble), "/healthz said so")
    failures = agent.metric("store_errors_total", kind=kind)
    agent.wait_until(lambda: agent.metric("store_errors_total", kind=kind) > failures, "it tried again")
    sim.wait_polls(4)
    assert len(agent.log("writing the state file fails")) == 1  # logged once


def check_at_work(agent: Agent) -> None:
    assert agent.wait_log("writing the state file works again")["failures"] >= 2
    agent.wait_until(lambda: agent.get("/healthz") == (200, "ok\n"), "it was healthy again")


@needs_root
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_an_event_is_handled_and_an_agent_starts_on_a_full_disk(
    sim: Simulator, agent: Agent, disk: Path, end: str
) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    )
    agent.start()
    wait_reserve(agent)
    fill(disk)
    event = sim.schedule("Preempt", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    getattr(agent, end)()
    fill(disk)  # another program takes what the agent has given up, if it has
    agent.let_go("drained")
    agent.start()
    sim.wait_approved(event)
    assert agent.run("status", "--state-dir", str(disk)).returncode == 0  # it is asked through the file
    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "drain", "resume"]
    assert agent.get("/healthz") == (200, "ok\n")
    assert agent.log("writing the state file fails") == []


@needs_root
def test_a_hundred_events_fit_into_the_reserve_and_it_is_refilled(disk: Path) -> None:
    store = Store.open(disk, datetime.now(UTC))
    assert store.ensure_reserve() == ""
    store.close()
    ballast = fill(disk)
    store = Store.open(disk, datetime.now(UTC))
    try:
        for number in range(100):
            live(store, f"event-{number}")
        assert "KiB left" in store.ensure_reserve()
        with pytest.raises(StoreError, match=r"database or disk is full"):  # noqa: PT012 - whichever it is
            for number in range(100, 1000):
                live(store, f"event-{number}")
        known = [workflow.id for workflow in store.find_workflows()]
        assert known == [f"event-{number}" for number in range(len(known))]
        ballast.unlink()
        assert store.ensure_reserve() == ""
        assert store.reserve_bytes() >= RESERVE_BYTES
        fill(disk)
        for number in range(1000, 1100):
            live(store, f"event-{number}")
    finally:
        store.close()


def live(store: Store, name: str) -> None:
    """All that is written in the life of an event with two hooks that write as much as is kept."""
    now = datetime.now(UTC)
    kinds: tuple[RecordKind, ...] = (
        *("seen", "decided", "preparing", "hook_started", "hook_finished", "prepared", "approving", "approved"),
        *("started", "gone", "recovering", "hook_started", "hook_finished", "closed"),
    )
    for kind in kinds:
        event = ScheduledEvent(
            id=name, type="Preempt", status="Scheduled", resources=("vm-1",), description="d" * 500
        )
        workflow = Workflow(
            id=name,
            event=event,
            decision=Decision(rule="drain", reason="type is Preempt", affects="self"),
            first_seen_at=now,
            not_before_seen_at=now,
            boot_id="boot-1",
            phase="closed" if kind == "closed" else "waiting",
        )
        detail = "o" * 4096 if kind == "hook_finished" else ""
        store.commit(
            [Transition(workflow=workflow, records=(Record(kind=kind, text="t" * 200, detail=detail),))], now
        )


@needs_root
def test_without_space_for_a_reserve_the_log_reports_it(sim: Simulator, agent: Agent, small_disk: Path) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    told = agent.wait_log("keeping room in the state file for a full disk fails")
    assert told["level"] == "warning"
    assert told["reason"].startswith(f"the disk of {small_disk / 'state.db'} has ")
    see_through(sim, agent, sim.schedule("Reboot", lasts_seconds=None))


@needs_root
def test_without_a_reserve_events_wait_until_there_is_space(
    sim: Simulator, agent: Agent, small_disk: Path
) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    )
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    ballast = fill(small_disk)
    agent.let_go("drained")  # what runs ends, and that cannot be written down
    check_stuck(agent, sim, "full", "database or disk is full")
    other = sim.schedule("Redeploy", lasts_seconds=None)
    sim.wait_polls(4)
    assert sim.approvals() == ()
    assert agent.ran() == ["drain"]
    assert other not in agent.pending()
    assert agent.pending()[event]["phase"] == "preparing"
    assert not agent.is_ready()
    said = agent.say("approve", event)
    assert said.returncode == 1
    assert "database or disk is full" in said.stderr
    ballast.unlink()
    sim.wait_approved(other)
    check_at_work(agent)
    assert agent.journal_times(kind="hook_finished", hook="drain")
    sim.wait_started(other)
    sim.end(other)
    see_through(sim, agent, event)
    agent.wait_log("closed", event_id=other)
    assert [len(sim.approvals(one)) for one in (event, other)] == [1, 1]
    assert agent.ran().count("resume") == 1


@needs_root
def test_on_a_full_disk_without_a_reserve_an_agent_does_not_start_and_says_why(
    sim: Simulator, agent: Agent, small_disk: Path
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    agent.kill()
    ballast = fill(small_disk)
    agent.start(is_awaited=False)
    assert agent.wait_exit() == 1
    assert agent.why_not() == [f"cannot open the state file {small_disk / 'state.db'}: database or disk is full"]
    ballast.unlink()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.start()
    sim.wait_approved(event)


@needs_root
def test_a_disk_that_is_full_before_the_first_start_is_reported(
    sim: Simulator, agent: Agent, small_disk: Path
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    ballast = fill(small_disk)
    agent.start(is_awaited=False)
    assert agent.wait_exit() == 1
    assert agent.why_not() == [f"cannot open the state file {small_disk / 'state.db'}: database or disk is full"]
    ballast.unlink()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.start()
    sim.wait_approved(event)  # what could not be made is not taken for what was lost


@needs_root
def test_on_a_read_only_disk_nothing_is_approved_until_it_is_repaired(
    sim: Simulator, agent: Agent, breakable_disk: Path, tmp_path: Path
) -> None:
    agent.write_policy(
        rules=[DRAIN], hooks={"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    )
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    damage(breakable_disk)
    agent.let_go("drained")
    check_stuck(agent, sim, "full", "disk I/O error")  # SQLite says the same of a quota that is used up
    assert sim.approvals() == ()
    agent.kill()
    agent.start(is_awaited=False)
    assert agent.wait_exit() == 1
    assert agent.why_not() == [f"{breakable_disk / 'lock'}: cannot be opened for locking; Read-only file system"]
    run("umount", str(breakable_disk))
    subprocess.run(["e2fsck", "-fy", str(tmp_path / "disk")], capture_output=True, check=False)
    run("mount", "-o", "loop", str(tmp_path / "disk"), str(breakable_disk))
    agent.start()
    see_through(sim, agent, event)
    assert agent.ran() == ["drain", "drain", "resume"]  # that it had ended was never written down
    assert len(sim.approvals(event)) == 1


def test_damage_found_at_runtime_ends_the_agent_and_the_next_quarantines_the_file(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", start_delay_seconds=600, lasts_seconds=None)
    agent.wait_log("approved", event_id=event)
    path = agent.state_dir / "state.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with path.open("r+b") as file:
            pages = file.seek(0, 2) // 4096
            file.seek(4096)
            file.write(b"\xff" * 4096 * (pages - 1))
        other.execute("PRAGMA user_version = 1")  # what the agent remembers of the file is out of date now
    assert agent.wait_exit() == 1
    reason = f"cannot read {path}: database disk image is malformed"
    assert agent.wait_log("writing the state file fails", kind="damaged")["reason"] == reason
    assert agent.why_not() == [reason]
    agent.start()
    agent.wait_log("held", event_id=event)
    assert ("state_lost",) in agent.journal("kind")
    assert len(sim.approvals(event)) == 1


def test_a_locked_state_file_stops_all_but_polling_and_running_hooks(sim: Simulator, agent: Agent) -> None:
    hooks = {"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    with contextlib.closing(sqlite3.connect(agent.state_dir / "state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        until = time.monotonic() + 10
        agent.let_go("drained")
        agent.wait_hook("drain")
        check_stuck(agent, sim, "locked", "database is locked")
        while time.monotonic() < until:
            assert sim.approvals() == ()
            assert agent.get("/status")[0] == 200
            time.sleep(0.1)
        other.execute("ROLLBACK")
    sim.wait_approved(event)
    check_at_work(agent)
    assert longest_gap_seconds(sim) < 9  # the file was locked for longer
    sim.wait_started(event)
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    assert agent.ran() == ["drain", "resume"]
    assert len(sim.approvals(event)) == 1
