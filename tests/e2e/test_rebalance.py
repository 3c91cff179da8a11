"""Azure's early warning of a Spot eviction, as an agent with the real command meets it."""

import pytest
from harness import Agent, Simulator

from scheduled_events_agent.simulator.faults import FaultKind

ADVICE = {
    "name": "advice",
    "when": {"type": "SpotRebalanceRecommendation"},
    "prepare": ["drain", "checkpoint"],
    "recover": ["resume"],
}
EVICTION = {
    "name": "eviction",
    "when": {"type": "Preempt"},
    "prepare": ["drain", "checkpoint"],
    "recover": ["resume"],
    "approve": "when-prepared",
}
ANY = {"name": "any", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}


def hooks(agent: Agent) -> dict[str, object]:
    return agent.hooks("drain", "checkpoint", "resume")


def versions(sim: Simulator) -> set[str]:
    """In which the present agent has asked for documents."""
    return {r.path.rpartition("=")[2] for r in sim.requests() if "scheduledevents" in r.path}


def test_a_recommendation_and_then_the_eviction(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[ADVICE, EVICTION, ANY], hooks=hooks(agent))
    agent.start()
    advice = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    agent.wait_log("prepared", event_id=advice)
    assert agent.ran() == ["drain", "checkpoint"]
    assert not agent.is_ready()
    assert versions(sim) == {"2024-07-09"}

    agent.kill()
    agent.start()
    eviction = sim.schedule("Preempt", notice_seconds=600, lasts_seconds=None)
    sim.wait_approved(eviction)
    assert agent.ran() == ["drain", "checkpoint", "drain", "checkpoint"]
    assert sim.approvals(advice) == ()
    sim.end(advice)
    agent.wait_log("gone", event_id=advice)
    assert agent.ran() == ["drain", "checkpoint", "drain", "checkpoint"]

    # Azure takes the eviction back: the VM lives on.
    sim.end(eviction)
    agent.wait_log("closed", event_id=advice)
    agent.wait_log("closed", event_id=eviction)
    assert agent.ran() == ["drain", "checkpoint", "drain", "checkpoint", "resume"]
    assert agent.is_ready()


def test_a_recommendation_that_expires_is_recovered_from_and_does_not_begin_again(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[{**ADVICE, "expire_after": "1s"}], hooks=hooks(agent))
    agent.start()
    advice = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    agent.wait_log("hook finished", event_id=advice, hook="resume")
    agent.wait_log("waits", event_id=advice, reason="it has expired, and nothing more is done about it")
    agent.kill()
    agent.start()
    sim.wait_polls(5)
    assert agent.ran()[-1] == "resume"
    assert agent.ran().count("resume") == 1
    assert agent.is_ready()
    sim.end(advice)
    assert agent.wait_log("closed", event_id=advice)["reason"] == "is over: expired"


def test_a_service_without_the_preview_is_asked_in_the_version_that_it_has(sim: Simulator, agent: Agent) -> None:
    sim.fault(None, "status", status=404, api_version="2024-07-09")
    sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    agent.write_policy(rules=[ADVICE, EVICTION], hooks=hooks(agent))
    agent.start()
    told = "SpotRebalanceRecommendation events are not available: api-version 2024-07-09 answers 404"
    assert agent.wait_log(told)["level"] == "warning"
    assert agent.status()["recommendations_failure"] == told
    assert told in " ".join(agent.run("status", "--state-dir", str(agent.state_dir)).stdout.split())
    eviction = sim.schedule("Preempt", notice_seconds=600, lasts_seconds=None)
    sim.wait_approved(eviction)
    assert agent.status()["api_version"] == "2020-07-01"
    assert agent.log("polling the metadata service fails") == []
    assert {r.status for r in sim.requests() if "2020-07-01" in r.path} == {200}


WAYS_TO_FAIL: dict[str, tuple[FaultKind, int]] = {
    **{str(status): ("status", status) for status in (400, 403, 404, 410, 500, 503)},
    "no answer": ("stall", 500),
    "no whole answer": ("truncated", 500),
}


@pytest.mark.parametrize("begins", ["from the start", "amid an event"])
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_events_are_acted_on_though_the_preview_version_fails(
    sim: Simulator, agent: Agent, way: str, begins: str
) -> None:
    kind, status = WAYS_TO_FAIL[way]
    agent.write_policy(rules=[ADVICE, EVICTION, {**ANY, "approve": "manual", "lead": "1h"}], hooks=hooks(agent))
    if begins == "from the start":
        sim.fault(None, kind, api_version="2024-07-09", status=status)
    agent.start(is_awaited=False)
    reboot = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
    agent.wait_log("prepared", event_id=reboot)
    if begins == "amid an event":
        sim.fault(None, kind, api_version="2024-07-09", status=status)
    asked = len(sim.requests())
    eviction = sim.schedule("Preempt", notice_seconds=600, lasts_seconds=None)
    sim.wait_approved(eviction)
    # Each of these takes two seconds at most. One more may have been sent beside one that hangs.
    assert sum("2024-07-09" in request.path for request in sim.requests()[asked:]) <= 3
    agent.wait_until(lambda: agent.status()["recommendations_failure"], "it said that there are none")
    assert agent.status()["health"] == "ok"
    sim.end(reboot)
    agent.wait_log("gone", event_id=reboot)


def test_a_change_to_the_older_version_and_back_ends_no_recommendation(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[ADVICE], hooks=hooks(agent))
    agent.start()
    advice = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    agent.wait_log("prepared", event_id=advice)
    agent.kill()
    agent.write_policy(rules=[ADVICE], hooks=hooks(agent), imds={"api_version": "2020-07-01"})
    agent.start()
    sim.wait_polls(5)
    assert agent.status()["api_version"] == "2020-07-01"
    assert agent.ran() == ["drain", "checkpoint"]
    agent.kill()
    agent.write_policy(rules=[ADVICE], hooks=hooks(agent))
    agent.start()
    sim.wait_polls(5)
    assert agent.ran() == ["drain", "checkpoint"]
    sim.end(advice)
    agent.wait_log("closed", event_id=advice)
    assert agent.ran() == ["drain", "checkpoint", "resume"]


def test_a_policy_that_does_not_name_it_never_asks_for_it(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[EVICTION, ANY], hooks=hooks(agent))
    agent.start()
    sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    sim.wait_polls(5)
    assert versions(sim) == {"2020-07-01"}
    assert agent.ran() == []
    assert agent.is_ready()
