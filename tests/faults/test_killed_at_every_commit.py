"""Killed at each commit in turn, before it and after it, with and without a reboot: the end is the same.

The life is that of an event with two hooks before and two after it. What one commit writes, several rows of the
journal mostly, is on disk whole or not at all: so between its rows there is no other place to be killed at.
"""

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
from harness import PATIENCE, Agent, MakeAgent, Simulator

pytestmark = pytest.mark.timeout(300)

KILLER = Path(__file__).with_name("killer.py")
HOOKS = ("one", "two", "back", "up")
RULE = {"name": "all", "prepare": ["one", "two"], "recover": ["back", "up"], "approve": "when-prepared"}
# Lives at a time: they mostly wait.
AT_A_TIME = 4
# The journal's records of such a life.
STORY = [
    ("seen", ""),
    ("decided", ""),
    ("preparing", ""),
    ("hook_started", "one"),
    ("hook_finished", "one"),
    ("hook_started", "two"),
    ("hook_finished", "two"),
    ("prepared", ""),
    ("approving", ""),
    ("approved", ""),
    ("changed", ""),
    ("started", ""),
    ("missing", ""),
    ("gone", ""),
    ("recovering", ""),
    ("hook_started", "back"),
    ("hook_finished", "back"),
    ("hook_started", "up"),
    ("hook_finished", "up"),
    ("closed", ""),
]

When = Literal["before", "after"]


@dataclass(frozen=True)
class Life:
    """The facts about a life when it is over."""

    kills: int
    story: list[tuple[str, str]]
    """The journal's lines of the event: kind and hook."""
    ran: list[str]
    approvals: int


def live(agent: Agent, sim: Simulator, position: int, when: When, *, is_rebooted: bool, kills: int) -> Life:
    """A life in which so many processes, at most, kill themselves at their commit number ``position``."""
    event = sim.schedule("Reboot", start_delay_seconds=600.0, lasts_seconds=None)
    agent.write_policy(rules=[RULE], hooks=agent.hooks(*HOOKS))
    killed = 0

    def boot() -> str:
        return f"boot {killed}" if is_rebooted else ""

    def start() -> None:
        number = position if killed < kills else 0
        agent.program = [sys.executable, str(KILLER), str(number), when, boot()]
        agent.start(is_awaited=False)

    start()
    deadline = time.monotonic() + 2 * PATIENCE * kills
    is_over = False
    while True:
        assert time.monotonic() < deadline, "a life without an end"
        time.sleep(0.02)
        if not agent.is_alive():
            code = agent.wait_exit()
            if code == 0:
                break
            assert code in (-9, 9), code
            killed += 1
            start()
        elif is_over:
            agent.wait_log("agent started")  # an agent that has only just started does not handle signals yet
            agent.process.terminate()
            agent.process.wait(PATIENCE)
        else:
            is_over = lead(agent, sim, event, boot())
    story = [(kind, hook) for kind, hook, event_id in agent.journal("kind", "hook", "event_id") if event_id]
    return Life(killed, story, agent.ran(), len(sim.approvals(event)))


def lead(agent: Agent, sim: Simulator, event: str, boot: str) -> bool:
    """Have Azure go on when the agent has got so far; returns whether the event is over and dealt with.

    After a reboot an approved event is prepared for once more, in ``boot``; Azure waits for the end of that.
    """
    code, text = agent.get("/status")
    if code != 200:
        return False
    phases = {one["id"]: one["phase"] for one in json.loads(text)["events"]}
    status = sim.event(event).status
    if phases.get(event) == "approved" and is_prepared(agent, event, boot) and status == "Scheduled":
        sim.start_event(event)
    if phases.get(event) == "started" and status == "Started":
        sim.end(event)
    return status == "Gone" and not phases


def is_prepared(agent: Agent, event: str, boot: str) -> bool:
    """Whether the event is prepared for in ``boot``; "" for any."""
    workflow = agent.stored()[event]
    return boot in ("", workflow.prepare_boot_id) and workflow.prepare.state == "succeeded"


def check(life: Life, where: str, *, is_rebooted: bool) -> None:
    """The end is that of a life without a kill, and nothing was done twice but what a kill had cut.

    After a reboot, what was prepared counts as undone: it is prepared again, from its first hook.
    """
    told = Counter(line for line in life.story if line[0] != "restarted")
    assert list(dict.fromkeys(line for line in life.story if line[0] != "restarted")) == STORY, where
    assert list(dict.fromkeys(life.ran)) == list(HOOKS), where
    repeated = {line: number for line, number in told.items() if number > 1}
    may_repeat = {*(("hook_started", hook) for hook in HOOKS), ("approving", "")}
    if is_rebooted:
        may_repeat |= set(STORY[STORY.index(("preparing", "")) : STORY.index(("approving", ""))])
        assert all(number <= life.kills + 1 for number in repeated.values()), where
    else:
        assert sum(repeated.values()) - len(repeated) <= life.kills, where
    assert repeated.keys() <= may_repeat, where
    for hook, runs in Counter(life.ran).items():
        assert runs <= told["hook_started", hook], where  # each of which was committed
    assert 1 <= life.approvals <= told["approving", ""], where


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM that a process could end by in order")
@pytest.mark.parametrize("is_rebooted", [False, True], ids=["same-boot", "reboot"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_killed_at_any_commit_reaches_the_same_state(
    when: When, make_agent: MakeAgent, *, is_rebooted: bool
) -> None:
    def try_position(position: int) -> Life:
        with Simulator(vms=("vm-1",), rate_limit=None) as sim:
            agent = make_agent(sim.endpoint(), f"{when}-{position}")
            return live(agent, sim, position, when, is_rebooted=is_rebooted, kills=1)

    lives: list[Life] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for first in count(1, AT_A_TIME):
            lives += pool.map(try_position, range(first, first + AT_A_TIME))
            if not lives[-1].kills:
                break
    for number, life in enumerate(lives, start=1):
        check(life, f"killed {when} commit {number}: {life}", is_rebooted=is_rebooted)
    # Once something was prepared, and until the event has started, it is prepared again.
    prepared_again = [life for life in lives if life.ran.count("one") > 1 and ("prepared", "") in life.story]
    assert bool(prepared_again) or not is_rebooted
    kills = [life.kills for life in lives]
    # The schema, the start, the VM's name, eleven steps of the workflow, the stop: a cycle may commit two of them.
    assert sum(kills) >= 12
    assert kills == sorted(kills, reverse=True)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM that a process could end by in order")
def test_an_agent_killed_after_each_transition_completes_the_event(sim: Simulator, agent: Agent) -> None:
    # Its start, that the file is in use, that it goes on where it was, what has become old, that the service has
    # answered, what it does when it has read a document; the seventh is what comes of that, at the latest.
    life = live(agent, sim, 7, "after", is_rebooted=False, kills=30)
    check(life, str(life), is_rebooted=False)
    assert 3 <= life.kills < 30
