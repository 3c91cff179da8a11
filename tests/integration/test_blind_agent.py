"""The states in which no event could be acted on, lived by an agent: what its pages, metrics and commands say."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_daemon import AGENT, get, running

from scheduled_events_agent import cli, host
from scheduled_events_agent.daemon.daemon import Daemon
from scheduled_events_agent.policy.settings import AgentSettings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.store import LOCK_NAME

Story = Callable[[Simulator, Daemon], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A state, how an agent gets into it, and what it shows then."""

    live: Story
    condition: str
    exit_code: int = 0
    health: int = 200
    headline: str
    kind: str = ""
    """Of what needs a person."""
    agent: AgentSettings = AGENT
    fails: str = ""
    """The requests that are denied from the start."""


def let_pass(daemon: Daemon, **time: float) -> None:
    """Have so much time pass since the start and the last successful poll. Nothing waits for it."""
    passed = timedelta(**time)
    status, poller = daemon._status, daemon._poller
    status._started -= passed.total_seconds()
    status._started_at -= passed
    if poller.succeeded is not None and poller.succeeded_at is not None:
        poller.succeeded -= passed.total_seconds()
        poller.succeeded_at -= passed


def nothing(sim: Simulator, daemon: Daemon) -> None:
    sim.wait_until(lambda: daemon._poller.succeeded is not None, "it had polled")
    sim.wait_until(lambda: daemon._snapshot().names or daemon._identifier.error, "it had asked for its name")


def announce(sim: Simulator, daemon: Daemon) -> None:
    nothing(sim, daemon)
    sim.schedule("Preempt", notice_seconds=3600)
    sim.wait_until(lambda: daemon._snapshot().workflows, "it had seen the event")


def five_minutes(sim: Simulator, daemon: Daemon) -> None:
    nothing(sim, daemon)
    daemon._status._started_at -= timedelta(minutes=5)


def no_answer(sim: Simulator, daemon: Daemon) -> None:
    sim.wait_until(lambda: daemon._poller.error, "a poll had failed")


def no_answer_for_long(sim: Simulator, daemon: Daemon) -> None:
    no_answer(sim, daemon)
    let_pass(daemon, minutes=3.1)


def fail(sim: Simulator, daemon: Daemon) -> None:
    nothing(sim, daemon)
    sim.fault(None, "denied", on="poll")
    no_answer(sim, daemon)


def a_poll(sim: Simulator, daemon: Daemon) -> None:
    fail(sim, daemon)
    let_pass(daemon, hours=-1)  # on a busy machine ten seconds may have passed


def ten_seconds(sim: Simulator, daemon: Daemon) -> None:
    fail(sim, daemon)
    let_pass(daemon, seconds=10)


def three_minutes(sim: Simulator, daemon: Daemon) -> None:
    fail(sim, daemon)
    let_pass(daemon, minutes=3.1)


ROWS = {
    "all is well": Row(live=nothing, condition="good", headline="Nothing is pending"),
    "the name is not known, an event is pending": Row(
        live=announce,
        fails="instance",
        condition="act",
        exit_code=3,
        health=503,
        headline="It is not known whether the Preempt is of this VM, for its name is not known: ",
        kind="vm_unknown",
    ),
    "the name is not known yet": Row(
        live=nothing, fails="instance", condition="unknown", headline="The name of this VM is not known yet: "
    ),
    "the name is not known for five minutes": Row(
        live=five_minutes,
        fails="instance",
        condition="act",
        exit_code=1,
        health=503,
        headline="The name of this VM is not known: ",
        kind="vm_unknown",
    ),
    "no answer has ever come": Row(
        live=no_answer,
        fails="poll",
        condition="unknown",
        headline="Azure's metadata service has not answered yet: ",
    ),
    "no answer has come for three minutes": Row(
        live=no_answer_for_long,
        fails="poll",
        condition="act",
        exit_code=1,
        health=503,
        headline="",
        kind="unhealthy",
    ),
    "a poll fails": Row(live=a_poll, condition="good", headline="Nothing is pending"),
    "polls fail for ten seconds": Row(
        live=ten_seconds, condition="unknown", headline="Azure's metadata service has not answered since "
    ),
    "polls fail for three minutes": Row(
        live=three_minutes, condition="act", exit_code=1, health=503, headline="", kind="unhealthy"
    ),
    "an agent observes": Row(
        live=nothing, agent=replace(AGENT, mode="observe"), condition="good", headline="Nothing is pending"
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_state_is_shown_alike_on_all_surfaces(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, state_dir = ROWS[name], tmp_path / "state"
    with Simulator(vms=("vm-1",), rate_limit=None) as sim:
        if row.fails:
            sim.fault(None, "denied", on=row.fails)
        host.create_private_dir(state_dir)
        with (
            closing(host.acquire_lock(state_dir / LOCK_NAME)),
            running(state_dir, sim.endpoint(), agent=row.agent) as daemon,
        ):
            row.live(sim, daemon)
            status = json.loads(get(daemon, "/status")[1])
            capsys.readouterr()
            code = cli.main(("status", "--state-dir", str(state_dir)))
            said = capsys.readouterr().out
            health = get(daemon, "/healthz")
            metrics = get(daemon, "/metrics")[1]
            line = daemon._reporter.line()
            is_ready = get(daemon, "/readyz")[0]
    assert (status["condition"], code, health[0], is_ready) == (row.condition, row.exit_code, row.health, 200)
    assert status["headline"].startswith(row.headline)
    assert line == status["headline"]
    assert " ".join(status["headline"].split()) in " ".join(said.split())
    assert status["health"] == ("ok" if row.health == 200 else [status["headline"]])
    assert [one["kind"] for one in status["attention"]] == ([row.kind] if row.kind else [])
    counted = [line for line in metrics.splitlines() if line.startswith("scheduled_events_attention{")]
    assert [line for line in counted if not line.endswith(" 0.0")] == [
        f'scheduled_events_attention{{kind="{kind}"}} 1.0' for kind in filter(None, [row.kind])
    ]
