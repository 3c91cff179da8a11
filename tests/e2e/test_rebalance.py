"""Azure's early warning of a Spot eviction, as an agent with the real command meets it."""

from harness import Agent, Simulator

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
    refused = agent.wait_log(
        "api-version 2024-07-09 is refused, and asked for again in a day: no recommendation is seen"
    )
    assert refused["level"] == "warning"
    eviction = sim.schedule("Preempt", notice_seconds=600, lasts_seconds=None)
    sim.wait_approved(eviction)
    assert agent.status()["api_version"] == "2020-07-01"
    assert agent.log("polling the metadata service fails") == []
    assert {r.status for r in sim.requests() if "2020-07-01" in r.path} == {200}


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
