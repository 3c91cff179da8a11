"""One agent with a prepared event goes through every fault of the endpoint: it forgets nothing, and comes back.

All tests but one leave the agent as they found it, and share it. The exact pace after each kind of fault
is shown by a simulated clock in test_imds_faults.py; here it is the real process, with room for a slow machine.
"""

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import SLOWNESS, Agent, Simulator

from scheduled_events_agent.simulator.faults import FaultKind

INTERVAL = 0.25
TIME_LIMIT = 0.5 + SLOWNESS / 3
POLLS = 4
# Seconds for a slow machine. Pauses that grow, which are ruled out, would add far more to so many failures.
ROOM = 30.0

FAULTS: Mapping[str, tuple[FaultKind, dict[str, Any], str]] = {
    "a byte a second": ("drip", {"delay_seconds": 1.0}, "timeout"),
    "an answer that comes too late": ("slow", {"delay_seconds": 2 * TIME_LIMIT}, "timeout"),
    "accepted and never answered": ("stall", {}, "timeout"),
    "reset": ("reset", {}, "unreachable"),
    "closed in the middle": ("truncated", {}, "malformed"),
    "a body without end": ("endless", {}, "too_large"),
    "a redirect": ("redirect", {}, "redirect"),
    "a web page": ("html", {}, "document"),
    "garbage": ("garbage", {}, "document"),
    "200 without a body": ("empty", {}, "empty"),
    "401": ("status", {"status": 401}, "denied"),
    "404": ("status", {"status": 404}, "not_found"),
    "410": ("status", {"status": 410}, "gone"),
    "500": ("status", {"status": 500}, "server_error"),
    "503": ("status", {"status": 503}, "server_error"),
    "a proxy's denial": ("denied", {}, "denied"),
    "a proxy without a record": ("misdirected", {}, "unexpected_status"),
    "a proxy without rules": ("no_rules", {}, "server_error"),
}
# With these a poll succeeds: test_metadata_proxy.py and the tests of the clock have them.
HARMLESS: set[FaultKind] = {"proxied", "clock_ahead", "clock_behind", "undated"}
# Where the service asks for more than the interval: the seconds after the first failure.
ASKS_FOR_MORE = {429: ("throttled", 2.0), 400: ("bad_request", 5.0)}

needs_reload = pytest.mark.skipif(sys.platform == "win32", reason="a reload is a SIGHUP")


@dataclass(frozen=True)
class Scene:
    """An agent that has prepared for an event and waits for an operator."""

    sim: Simulator
    agent: Agent
    event: str
    journal: list[tuple[str, ...]]

    def journal_now(self) -> list[tuple[str, ...]]:
        """The journal's lines about events."""
        return [row for row in self.agent.journal("workflow_id", "kind", "hook", "text") if row[0]]

    def check_nothing_is_forgotten(self) -> None:
        assert self.journal_now() == self.journal
        assert self.agent.ran() == ["drain"]
        assert self.agent.pending()[self.event]["phase"] == "prepared"
        assert not self.agent.is_ready()
        assert self.sim.approvals() == ()

    def failed(self, kind: str) -> float:
        return self.agent.metric("polls_total", outcome=kind)

    def write_policy(self, endpoint: str = "") -> None:
        limit = f"{1000 * TIME_LIMIT:.0f}ms"
        self.agent.write_policy(
            imds={
                "endpoint": endpoint or self.agent.endpoint,
                "poll_interval": f"{1000 * INTERVAL:.0f}ms",
                "request_timeout": limit,
                "first_request_timeout": limit,
            },
            rules=[
                {"name": "hand", "prepare": ["drain"], "recover": ["resume"], "approve": "manual", "lead": "30d"}
            ],
            hooks=self.agent.hooks("drain", "resume"),
        )


@contextmanager
def scene_in(directory: Path) -> Iterator[Scene]:
    with Simulator(vms=("vm-1",), rate_limit=None) as sim:
        agent = Agent(directory, sim.endpoint())
        try:
            Scene(sim, agent, "", []).write_policy()
            agent.start()
            event = sim.schedule("Reboot", notice_seconds=3600)
            agent.wait_log("prepared", event_id=event)
            scene = Scene(sim, agent, event, [])
            yield Scene(sim, agent, event, scene.journal_now())
        finally:
            agent.close()
            sys.stdout.write("".join(agent.history))  # pytest shows it on failure only


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("agent")) as scene:
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    told = len(shared.agent.history)
    yield shared
    sys.stdout.write("".join(shared.agent.history[told:]))  # pytest shows it on failure only


class Trouble:
    """A time in which polls fail, by the metrics: the log holds back what repeats."""

    def __init__(self, scene: Scene) -> None:
        self._agent = scene.agent
        self._before = self._after = self._polls()
        self._began = time.monotonic()
        self.failures = 0.0
        self.seconds = 0.0

    def _polls(self) -> dict[str, float]:
        """How many polls there were, by their outcome, all at one moment."""
        return {labels["outcome"]: count for labels, count in self._agent.metrics()["polls_total"]}

    @staticmethod
    def _failures(polls: Mapping[str, float]) -> float:
        return sum(count for outcome, count in polls.items() if outcome != "ok")

    def failed(self, kind: str) -> float:
        """How many polls have failed this way until the end."""
        return self._after.get(kind, 0.0) - self._before.get(kind, 0.0)

    def late(self, timeouts: int = 0) -> float:
        """How many polls beside these ran out of their half second, as on a busy machine any poll may."""
        return max(0.0, self.failed("timeout") - timeouts)

    def wait_end(self) -> None:
        """Wait until polls have failed, and one has succeeded after that."""
        failures = self._failures(self._before)
        self._agent.wait_until(lambda: self._failures(self._polls()) > failures, "a poll had failed")
        succeeded = self._polls()["ok"]
        self._agent.wait_until(lambda: self._polls()["ok"] > succeeded, "a poll succeeded again")
        self.seconds = time.monotonic() - self._began
        self._after = self._polls()
        self.failures = self._failures(self._after) - self._failures(self._before)

    def check_pace(self) -> None:
        """Check that each poll followed the one before after an interval, or at once if that was given up later.

        Polls without a pause between them would need next to none.
        """
        room = ROOM + INTERVAL
        assert 0.5 * (self.failures - 1) * INTERVAL < self.seconds
        assert self.seconds < self.failures * max(INTERVAL, TIME_LIMIT) + room


def test_every_simulator_fault_is_covered_here() -> None:
    kinds = {kind for kind, _, _ in FAULTS.values()}
    # An endpoint that refuses is a test of its own below.
    assert kinds | HARMLESS | {"refused"} == set(get_args(FaultKind))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_never_read_as_no_events_and_ends_when_cleared(scene: Scene, name: str) -> None:
    fault, options, kind = FAULTS[name]
    agent, failed, trouble = scene.agent, scene.failed(kind), Trouble(scene)
    scene.sim.fault("vm-1", fault, on="poll", **options)
    agent.wait_until(lambda: scene.failed(kind) >= failed + POLLS, f"{POLLS} polls had failed")
    scene.check_nothing_is_forgotten()
    scene.sim.clear_faults()

    trouble.wait_end()
    trouble.check_pace()
    late = trouble.late() if kind != "timeout" else 0.0
    assert trouble.failed(kind) + late == trouble.failures
    scene.check_nothing_is_forgotten()


@pytest.mark.parametrize("status", [429, pytest.param(400, marks=pytest.mark.nightly)])
def test_a_throttled_agent_slows_down_and_keeps_its_events(scene: Scene, status: int) -> None:
    kind, pause = ASKS_FOR_MORE[status]
    trouble = Trouble(scene)
    scene.sim.fault("vm-1", "status", status=status, on="poll", count=1)

    trouble.wait_end()
    assert (trouble.failures - trouble.late(), trouble.failed(kind)) == (1, 1)
    assert pause - INTERVAL < trouble.seconds < pause + ROOM
    scene.check_nothing_is_forgotten()


def test_an_agent_survives_a_series_of_different_faults(scene: Scene) -> None:
    trouble = Trouble(scene)
    for fault, options, _ in FAULTS.values():
        scene.sim.fault("vm-1", fault, on="poll", count=1, **options)

    trouble.wait_end()
    timeouts = sum(kind == "timeout" for _, _, kind in FAULTS.values())
    # A reset of the kept connection is made good within the poll that it befalls.
    assert len(FAULTS) - 1 <= trouble.failures <= len(FAULTS) + trouble.late(timeouts)
    trouble.check_pace()
    scene.check_nothing_is_forgotten()


@needs_reload
@pytest.mark.parametrize("where", ["refused", "unreachable", "timeout"])
def test_a_missing_endpoint_is_never_read_as_no_events(scene: Scene, where: str) -> None:
    agent, failed, trouble = scene.agent, scene.failed(where), Trouble(scene)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoints = {
            "refused": f"http://127.0.0.1:{bound.getsockname()[1]}",  # no server listens there
            "unreachable": "http://255.255.255.255",  # TCP has no way to it, and no packet is sent
            "timeout": f"http://127.0.0.1:{listener.getsockname()[1]}",  # accepted by the system alone
        }
        scene.write_policy(endpoints[where])
        agent.reload()
        agent.wait_until(lambda: scene.failed(where) > failed + POLLS, "polls had failed")
        scene.check_nothing_is_forgotten()
        scene.write_policy()
        agent.reload()
        trouble.wait_end()
    trouble.check_pace()
    scene.check_nothing_is_forgotten()


@needs_reload
def test_an_agent_that_restarts_during_a_fault_keeps_its_events(tmp_path: Path) -> None:
    with scene_in(tmp_path) as scene:  # of its own: the event ends here
        scene.sim.fault("vm-1", "html", on="poll")
        scene.agent.kill()
        scene.agent.start(is_awaited=False)
        scene.agent.wait_log("agent started")
        scene.agent.wait_until(lambda: scene.failed("document") >= POLLS, f"{POLLS} polls had failed")
        assert scene.agent.ran() == ["drain"]
        assert scene.agent.pending()[scene.event]["phase"] == "prepared"
        assert not scene.agent.is_ready()
        scene.sim.clear_faults()
        scene.sim.cancel(scene.event)
        scene.agent.wait_log("closed", event_id=scene.event)
        assert scene.agent.ran() == ["drain", "resume"]
