"""Urgent events do not wait: hooks of which only one run goes on at a time, and an eviction among them."""

from collections import Counter

import pytest
from harness import Agent, Simulator

pytestmark = pytest.mark.timeout(120)

RULE = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}


def begin_reboots(sim: Simulator, agent: Agent, count: int) -> list[str]:
    """Begin ``count`` Reboots; the first one has a drain, and a hook that SIGTERM does not end."""
    drain = agent.hook("drain", until="drained", ignores_sigterm=True, serialize=True)
    agent.write_policy(rules=[RULE], hooks={"drain": drain, "resume": agent.hook("resume")})
    agent.start()
    reboots = []
    for number in range(count):
        reboots.append(sim.schedule("Reboot", notice_seconds=600.0 + number, lasts_seconds=None))
        agent.wait_log("hook started", event_id=reboots[-1], hook="drain")
        agent.wait_hook("drain", "start")
    return reboots


@pytest.mark.parametrize("queued", [0, 2])
def test_an_eviction_does_not_wait_for_the_hooks_of_less_urgent_events(
    sim: Simulator, agent: Agent, queued: int
) -> None:
    reboots = begin_reboots(sim, agent, 1 + queued)
    preempt = sim.schedule("Preempt", notice_seconds=30.0, lasts_seconds=None)
    agent.wait_hook("drain", "start", count=2)
    assert drained(agent) == [reboots[0], preempt]
    (seen,) = agent.journal_times(event_id=preempt, kind="seen")
    (told,) = agent.journal_times(event_id=reboots[0], kind="hook_canceled", outcome="")
    assert (told - seen).total_seconds() < 1.0
    gives_way = f"hook drain gives way to {preempt}"
    assert agent.log("hook canceled", event_id=reboots[0], reason=gives_way)
    assert agent.pending()[reboots[0]]["phase"] == "preparing"
    assert "another run of hook drain" in agent.wait_text(reboots[0])

    agent.let_go("drained")
    for event in (preempt, *reboots):
        sim.wait_approved(event)
    ended = Counter(note["given"]["ID"] for note in agent.records("start"))
    assert ended == {reboots[0]: 2, preempt: 1} | dict.fromkeys(reboots[1:], 1)
    assert len(agent.records("end")) == 2 + queued
    assert drained(agent)[2:] == reboots  # what starts sooner is drained for first
    assert [line for line in agent.log("hook finished") if line["level"] != "info"] == []


def test_a_termination_goes_first_and_cancels_nothing(sim: Simulator, agent: Agent) -> None:
    reboots = begin_reboots(sim, agent, 2)
    terminate = sim.schedule("Terminate", notice_seconds=900.0, lasts_seconds=None)
    expected = {reboots[0]: ["running"], reboots[1]: ["queued"], terminate: ["queued"]}

    def states() -> dict[str, list[str]]:
        """Of the hooks that run or wait, by event."""
        return {
            event: [hook["state"] for hook in shown["hooks"] if hook["since"]]
            for event, shown in agent.pending().items()
        }

    agent.wait_until(lambda: sum(map(len, states().values())) == 3, "all three are there")
    assert states() == expected
    shown = " ".join(agent.run("status", "--state-dir", str(agent.state_dir)).stdout.split())
    assert shown.count("waits for another run of hook drain") == 2
    assert shown.count("runs the prepare hook drain") == 1
    agent.let_go("drained")
    for event in (terminate, *reboots):
        sim.wait_approved(event)
    assert drained(agent) == [reboots[0], terminate, reboots[1]]
    assert agent.log("hook canceled") == []


def test_an_agent_killed_while_a_hook_is_preempted_continues_with_both_events(
    sim: Simulator, agent: Agent
) -> None:
    (reboot,) = begin_reboots(sim, agent, 1)
    preempt = sim.schedule("Preempt", notice_seconds=600.0, lasts_seconds=None)
    agent.wait_log("hook canceled", event_id=reboot)
    agent.kill()
    agent.start()
    agent.wait_hook("drain", "start", count=2)
    agent.wait_until(lambda: drained(agent)[-1] == preempt, "the eviction is drained for")
    agent.let_go("drained")
    sim.wait_approved(preempt)
    sim.wait_approved(reboot)
    assert drained(agent)[-1] == reboot


def test_an_event_whose_hook_only_waited_is_not_recovered(sim: Simulator, agent: Agent) -> None:
    freezes = {**RULE, "name": "freezes", "when": {"type": "Freeze"}, "recover": ["thaw"]}
    drain = agent.hook("drain", until="drained", serialize=True)
    agent.write_policy(
        rules=[freezes, RULE], hooks={"drain": drain, "resume": agent.hook("resume"), "thaw": agent.hook("thaw")}
    )
    agent.start()
    reboot = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    freeze = sim.schedule("Freeze", lasts_seconds=None)
    agent.wait_log("hook started", event_id=freeze, hook="drain")
    sim.cancel(freeze)
    agent.wait_log("closed", event_id=freeze)
    agent.let_go("drained")
    sim.wait_approved(reboot)
    sim.end(reboot)
    agent.wait_log("closed", event_id=reboot)
    assert agent.ran() == ["drain", "resume"]


def drained(agent: Agent) -> list[str]:
    """The events that hooks were started for, in that order."""
    return [note["given"]["ID"] for note in agent.records("start") if note["hook"] == "drain"]
