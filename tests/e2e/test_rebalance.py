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


def test_a_held_recommendation_that_has_expired_is_still_held_when_it_comes_back(
    sim: Simulator, agent: Agent
) -> None:
    agent.write_policy(rules=[{**ADVICE, "expire_after": "3s"}], hooks=hooks(agent))
    agent.start()
    advice = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    agent.wait_log("prepared", event_id=advice)
    place = ("--state-dir", str(agent.state_dir))
    assert agent.run("hold", advice, *place).returncode == 0
    agent.wait_log("closed", event_id=advice)
    assert agent.ran() == ["drain", "checkpoint", "resume"]
    agent.kill()
    agent.start()
    assert [held["event_id"] for held in agent.status()["holds"]] == [f"{advice}-recommendation".lower()]
    done = agent.run("release", advice, *place)
    assert (done.returncode, done.stdout) == (0, "released; the recommendation has expired\n")
    assert agent.status()["holds"] == []


@pytest.mark.parametrize(
    "end", ["it expires", "its rule goes", "an operator resolves it", "the document lacks it"]
)
def test_a_recommendation_that_is_over_is_recovered_from_and_closed(
    sim: Simulator, agent: Agent, end: str
) -> None:
    expire_after = "1s" if end == "it expires" else "1h"
    policy = {"hooks": agent.hooks("drain", "checkpoint", "resume", "clear"), "on_clear": ["clear"]}
    agent.write_policy(rules=[{**ADVICE, "expire_after": expire_after}], **policy)
    agent.start()
    agent.wait_log("on_clear hook ended")
    advice = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    agent.wait_log("prepared", event_id=advice)
    if end == "its rule goes":
        agent.write_policy(rules=[ANY], **policy)
        agent.reload()
    elif end == "an operator resolves it":
        assert agent.run("resolve", advice[:8], "--state-dir", str(agent.state_dir)).returncode == 0
    elif end == "the document lacks it":
        sim.end(advice)
    outcome = "unknown" if end == "the document lacks it" else "expired"
    assert agent.wait_log("closed", event_id=advice)["reason"] == f"is over: {outcome}"
    assert_nothing_is_pending(agent)
    ran = agent.ran()
    assert ran == ["clear", "drain", "checkpoint", "resume"]

    # Still listed, it does not begin again, not even after a restart.
    agent.kill()
    agent.start()
    agent.wait_until(lambda: agent.ran() == [*ran, "clear"], "the hook of on_clear has run")
    sim.wait_polls(3)
    assert_nothing_is_pending(agent)
    assert agent.ran() == [*ran, "clear"]

    # After answers that lack it, it begins anew.
    if end != "the document lacks it":
        sim.end(advice)
    sim.wait_polls(4)
    if end != "its rule goes":
        again = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
        agent.wait_log("prepared", event_id=again)


def assert_nothing_is_pending(agent: Agent) -> None:
    status = agent.status()
    assert (status["events"], status["headline"], status["ready"]) == ([], "Nothing is pending", True)
    assert all(value == 0.0 for _, value in agent.metrics()["pending"])


def test_a_service_without_the_preview_is_asked_in_the_older_version(sim: Simulator, agent: Agent) -> None:
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


def test_a_policy_without_recommendations_never_uses_the_preview(sim: Simulator, agent: Agent) -> None:
    agent.write_policy(rules=[EVICTION, ANY], hooks=hooks(agent))
    agent.start()
    sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
    sim.wait_polls(5)
    assert versions(sim) == {"2020-07-01"}
    assert agent.ran() == []
    assert agent.is_ready()
