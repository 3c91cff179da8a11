"""What a cluster sees of a node from first sight of an event to its end: agent, drain and uncordon, for real."""

import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import CHECKOUT, Agent, Simulator
from kube_access import ADMIN
from kube_api import KubeApi
from kube_objects import EVENTS, NODES, Object
from kube_samples import budget, owned_by, set_of
from receiver import wait_until

import scheduled_events_agent
from scheduled_events_agent import host

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl"),
    pytest.mark.skipif(sys.platform == "win32", reason="a container for Windows nodes is not served"),
]

COMMAND = ["scheduled-events-agent", "kubernetes"]
RULES = [
    {
        "name": "evictions",
        "when": {"type": "Preempt"},
        "prepare": ["drain"],
        "recover": [],
        "approve": "when-prepared",
    },
    {"name": "maintenance", "prepare": ["drain"], "recover": ["uncordon"], "approve": "when-prepared"},
]
FALSE = ("False", "NoScheduledEvent")
TRUE = ("True", "ScheduledEvent")
SCHEDULED = ("True", "RebootScheduled")
STARTED = ("True", "RebootStarted")
DRAIN = [TRUE, ("False", "DrainEnded")]
DRAINED = ("True", "DrainCompleted")
NOT_DRAINED = ("False", "NotDrained")


class Written(NamedTuple):
    """A condition as it was written."""

    status: str
    reason: str
    heartbeat: datetime
    transition: datetime


class Cluster:
    """A cluster with the node vm-1, which is this machine."""

    def __init__(self, api: KubeApi, directory: Path) -> None:
        self.api = api
        self.admin = api.kubeconfig(ADMIN)
        self.kubeconfig = str(self.admin.rename(directory / "kubeconfig"))
        api.add_node("vm-1", host.kubelet_boot_id())
        for name in ("web-1", "web-2"):
            api.add_pod(name, "vm-1", ownerReferences=owned_by("ReplicaSet"))

    @property
    def node(self) -> Object:
        return self.api.store.get(NODES, "", "vm-1")

    def history(self) -> dict[str, list[Written]]:
        """By type, what was written of each condition; without what only its message says."""
        found: dict[str, list[Written]] = defaultdict(list)
        for one in self.api.seen("patch", "nodes/status"):
            assert one.status in (0, 200)
            for condition in one.call.body["status"]["conditions"]:
                written = Written(
                    condition["status"],
                    condition["reason"],
                    datetime.fromisoformat(condition["lastHeartbeatTime"]),
                    datetime.fromisoformat(condition["lastTransitionTime"]),
                )
                before = found[condition["type"]]
                if not before or written[:2] != before[-1][:2]:
                    before.append(written)
        return dict(found)

    def told(self) -> dict[str, list[tuple[str, str]]]:
        return {type_: [one[:2] for one in written] for type_, written in self.history().items()}

    def now(self, type_: str) -> tuple[str, str]:
        conditions = {one["type"]: one for one in self.node["status"]["conditions"]}
        one = conditions.get(type_, {})
        return one.get("status", ""), one.get("reason", "")

    def events(self) -> list[str]:
        """Reasons of the events about the node, in the order in which they were posted."""
        events = sorted(self.api.store.list(EVENTS), key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [event["reason"].removeprefix("ScheduledEvent") for event in events]

    def check_times(self) -> None:
        """A time of transition changes with the status, and only then; none is out of order."""
        for written in self.history().values():
            since = None
            for before, one in zip([None, *written], written, strict=False):
                if before is None or before.status != one.status:
                    since = one.heartbeat
                assert one.transition == since
                assert before is None or before.heartbeat <= one.heartbeat


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with KubeApi(tmp_path) as api:
        yield Cluster(api, tmp_path)


@pytest.fixture
def started(agent: Agent, cluster: Cluster) -> Agent:
    start(agent, cluster)
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "nothing is pending")
    return agent


def start(agent: Agent, cluster: Cluster, *, lifecycle: bool = True, timeout: str = "60s") -> None:
    option = ["--kubeconfig", cluster.kubeconfig, "--node", "vm-1", *(["--conditions"] if lifecycle else [])]
    env = {"PYTHONPATH": str(Path(scheduled_events_agent.__file__).parents[1])}  # hooks run this very code
    agent.write_policy(
        rules=RULES,
        hooks={
            "drain": {"run": [*COMMAND, "drain", *option], "timeout": timeout, "env": env},
            "uncordon": {"run": [*COMMAND, "uncordon", *option], "timeout": "60s", "env": env},
        },
        kubernetes={"node": "vm-1", "kubeconfig": cluster.kubeconfig, "lifecycle_conditions": lifecycle},
    )
    agent.start()


def finish(sim: Simulator, agent: Agent, cluster: Cluster, event: str) -> None:
    """Start and end an event that was approved, and wait until the cluster knows that it is over."""
    sim.wait_started(event)
    wait_until(lambda: cluster.now("ScheduledEvent") == STARTED, "its start is told")
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "it is over")
    wait_until(lambda: cluster.now("MaintenanceInProgress") in (FALSE, ("", "")), "maintenance is over")


@pytest.mark.nightly
def test_a_reboot(sim: Simulator, started: Agent, cluster: Cluster) -> None:
    (others,) = [one for one in cluster.node["status"]["conditions"] if one["type"] == "Ready"]
    event = sim.schedule("Reboot", lasts_seconds=None)
    finish(sim, started, cluster, event)
    assert cluster.told() == {
        "ScheduledEvent": [FALSE, SCHEDULED, STARTED, FALSE],
        "MaintenancePlanned": [TRUE, FALSE],
        "MaintenanceInProgress": [TRUE, FALSE],
        "DrainInProgress": DRAIN,
        "Drained": [DRAINED, NOT_DRAINED],
    }
    cluster.check_times()
    seen = cluster.history()["ScheduledEvent"][1]
    logged = datetime.fromisoformat(started.wait_log("seen", event_id=event)["time"])
    assert timedelta(seconds=-1) < seen.transition - logged < timedelta(seconds=2)
    wait_until(lambda: cluster.events()[-1:] == ["Recovered"], "all events are posted")
    assert cluster.events() == ["Seen", "Preparing", "Prepared", "Approved", "Started", "Recovered"]
    assert others in cluster.node["status"]["conditions"]


def test_a_reboot_that_is_canceled(sim: Simulator, started: Agent, cluster: Cluster) -> None:
    cluster.api.add(set_of("ReplicaSet", "web", 1))
    event = sim.schedule("Reboot", lasts_seconds=None)
    wait_until(lambda: cluster.now("DrainInProgress") == TRUE, "the drain runs")
    sim.cancel(event)
    started.wait_log("closed", event_id=event)
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "it is over")
    wait_until(lambda: cluster.now("MaintenancePlanned") == FALSE, "nothing is planned")
    told = cluster.told()
    assert told.pop("Drained", [NOT_DRAINED])[-1] == NOT_DRAINED, "the drain may just have ended"
    assert told == {
        "ScheduledEvent": [FALSE, SCHEDULED, FALSE],
        "MaintenancePlanned": [TRUE, FALSE],
        "DrainInProgress": DRAIN,
    }
    cluster.check_times()


def test_a_preemption_leaves_what_it_has_told(sim: Simulator, started: Agent, cluster: Cluster) -> None:
    event = sim.schedule("Preempt", notice_seconds=30, start_delay_seconds=0.2, lasts_seconds=None)
    sim.wait_started(event)
    wait_until(lambda: cluster.now("ScheduledEvent") == ("True", "PreemptStarted"), "its start is told")
    started.kill()  # the VM is gone
    assert cluster.told() == {
        "ScheduledEvent": [FALSE, ("True", "PreemptScheduled"), ("True", "PreemptStarted")],
        "MaintenancePlanned": [TRUE, FALSE],
        "MaintenanceInProgress": [TRUE],
        "DrainInProgress": DRAIN,
        "Drained": [DRAINED],
    }
    cluster.check_times()


@pytest.mark.nightly
def test_a_drain_that_fails(sim: Simulator, agent: Agent, cluster: Cluster) -> None:
    cluster.api.add(set_of("ReplicaSet", "web", 1))
    wait_until(lambda: len(cluster.api.pod_names("vm-1")) == 3, "the pod is on the node")
    cluster.api.add(budget("web", minAvailable=1))
    start(agent, cluster, timeout="8s")
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_log("held", event_id=event)
    sim.start_event(event)
    finish(sim, agent, cluster, event)
    assert cluster.told() == {
        "ScheduledEvent": [FALSE, SCHEDULED, STARTED, FALSE],
        "MaintenancePlanned": [TRUE, FALSE],
        "MaintenanceInProgress": [TRUE, FALSE],
        "DrainInProgress": DRAIN,
    }
    cluster.check_times()
    wait_until(lambda: cluster.events()[-1:] == ["Recovered"], "all events are posted")
    assert cluster.events() == ["Seen", "Preparing", "Held", "Started", "Recovered"]


@pytest.mark.nightly
def test_two_events(sim: Simulator, started: Agent, cluster: Cluster) -> None:
    def told(reason: str) -> None:
        wait_until(lambda: cluster.now("ScheduledEvent")[1] == reason, f"{reason} is told")

    first = sim.schedule("Reboot", lasts_seconds=None)
    told("RebootStarted")
    second = sim.schedule("Redeploy", start_delay_seconds=2, lasts_seconds=None)
    told("RedeployScheduled")  # what is still to come is the more urgent one
    told("RebootStarted")
    sim.end(first)
    told("RedeployStarted")
    sim.end(second)
    for event in (first, second):
        started.wait_log("closed", event_id=event)
    told("NoScheduledEvent")
    wait_until(lambda: cluster.now("MaintenanceInProgress") == FALSE, "maintenance is over")
    assert cluster.told() == {
        "ScheduledEvent": [
            FALSE,
            SCHEDULED,
            STARTED,
            ("True", "RedeployScheduled"),
            STARTED,
            ("True", "RedeployStarted"),
            FALSE,
        ],
        "MaintenancePlanned": [TRUE, FALSE, TRUE, FALSE],
        "MaintenanceInProgress": [TRUE, FALSE],
        "DrainInProgress": [*DRAIN, *DRAIN],
        "Drained": [DRAINED, NOT_DRAINED, DRAINED, NOT_DRAINED],
    }
    cluster.check_times()


def test_an_event_costs_at_most_sixteen_requests(sim: Simulator, agent: Agent, cluster: Cluster) -> None:
    start_plain(agent, cluster)
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "nothing is pending")
    before = len(cluster.api.calls)
    event = sim.schedule("Reboot", lasts_seconds=None)
    finish(sim, agent, cluster, event)
    wait_until(lambda: cluster.events()[-1:] == ["Recovered"], "all events are posted")
    time.sleep(1)
    sent = [f"{one.call.verb} {one.call.path}" for one in cluster.api.calls[before:]]
    assert sent.count("create events") == 6
    assert sent.count("get nodes") == 1, "for the node's uid, which is known for ten minutes"
    assert len(sent) <= 16
    print("requests of an event:", len(sent))


def test_without_a_cluster_to_tell_an_event_takes_no_longer(
    sim: Simulator, agent: Agent, cluster: Cluster
) -> None:
    start_plain(agent, cluster)
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "nothing is pending")
    cluster.api.pause()  # each request waits until its time-out
    event = sim.schedule("Reboot", lasts_seconds=None)
    approved = sim.wait_approved(event)
    assert sim.approvals(event)[0].monotonic - agent.records("start")[0]["monotonic"] < 5
    assert approved.id == event
    sim.wait_started(event)
    cluster.api.stop()
    agent.wait_log("started", event_id=event)
    assert agent.metric("kubernetes_unavailable") == 1
    assert agent.status()["kubernetes_failure"]["reason"].startswith("the API server: ")
    cluster.api.start()
    wait_until(lambda: cluster.now("ScheduledEvent") == STARTED, "the state is right afterwards")
    wait_until(lambda: agent.status()["kubernetes_failure"] is None, "it works again")
    sim.end(event)
    agent.wait_log("closed", event_id=event)
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "it is over")
    wait_until(lambda: cluster.events()[-1:] == ["Recovered"], "no event was lost")
    assert cluster.events() == ["Seen", "Preparing", "Prepared", "Approved", "Started", "Recovered"]
    assert len(agent.log("updating the node's conditions fails")) == 1
    assert len(agent.log("updating the node's conditions works again")) == 1


@pytest.mark.parametrize("reason", ["RebootScheduled", "RebootStarted"])
def test_an_agent_that_is_killed_right_after_its_patch_goes_on(
    sim: Simulator, agent: Agent, cluster: Cluster, reason: str
) -> None:
    start_plain(agent, cluster)
    event = sim.schedule("Reboot", start_delay_seconds=1, lasts_seconds=None)
    wait_until(lambda: cluster.now("ScheduledEvent")[1] == reason, "it is told")
    agent.kill()
    agent.start()
    finish(sim, agent, cluster, event)
    assert cluster.told() == {"ScheduledEvent": [FALSE, SCHEDULED, STARTED, FALSE]}
    cluster.check_times()


@pytest.mark.nightly
def test_while_the_metadata_service_does_not_answer_the_condition_is_unknown(
    sim: Simulator, agent: Agent, cluster: Cluster
) -> None:
    unknown = ("Unknown", "MetadataServiceUnavailable")
    start_plain(agent, cluster, healthy_within="2s")
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "nothing is pending")
    sim.fault("vm-1", "reset", on="poll")
    wait_until(lambda: cluster.now("ScheduledEvent") == unknown, "it is not known what is pending")
    assert agent.get("/healthz")[0] == 503
    sim.clear_faults()
    wait_until(lambda: cluster.now("ScheduledEvent") == FALSE, "it is known again")
    cluster.check_times()


def test_an_agent_that_only_observes_tells_the_event_too(sim: Simulator, agent: Agent, cluster: Cluster) -> None:
    start_plain(agent, cluster, mode="observe")
    event = sim.schedule("Reboot", lasts_seconds=None)
    wait_until(lambda: cluster.now("ScheduledEvent") == SCHEDULED, "it is told")
    sim.start_event(event)
    finish(sim, agent, cluster, event)
    assert agent.ran() == []
    wait_until(lambda: cluster.events()[-1:] == ["Recovered"], "all events are posted")


def start_plain(agent: Agent, cluster: Cluster, **settings: str) -> None:
    """Start an agent whose hooks have nothing to do with the cluster."""
    agent.write_policy(
        agent=settings,
        rules=[{"name": "all", "prepare": ["note"], "recover": ["note"], "approve": "when-prepared"}],
        hooks=agent.hooks("note"),
        kubernetes={"node": "vm-1", "kubeconfig": cluster.kubeconfig},
    )
    agent.start()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_shows_conditions_and_events(
    sim: Simulator, started: Agent, cluster: Cluster, tmp_path: Path
) -> None:
    command = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", f"--cache-dir={tmp_path / 'cache'}"]

    def kubectl(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    event = sim.schedule("Reboot", lasts_seconds=None)
    started.wait_log("started", event_id=event)
    wait_until(lambda: cluster.events()[-1:] == ["Started"], "its start is told")
    wait_until(lambda: cluster.now("MaintenanceInProgress") == TRUE, "maintenance is told")
    shown = kubectl("describe", "node", "vm-1")
    page = (CHECKOUT / "docs/kubernetes.md").read_text(encoding="utf-8")
    block = page.partition("\n```\nConditions:\n")[2].partition("\n```\n")[0]
    rows = [row for row in block.splitlines() if re.search("ScheduledEvent|Drain|Maintenance", row)]
    assert len(rows) == 10
    for row in rows:
        words = [
            re.escape(part)
            for part in row.strip().replace("E6D7949E-8705-46CB-8A8B-0C0ED570B568", event).split("...")
        ]
        pattern = ".*".join(words).replace("E6D7949E", event[:8])
        assert re.search(re.sub(r"(\\ )+", " +", pattern), shown), row
    path = "{range .status.conditions[*]}{.type}={.status} {end}"
    printed = kubectl("get", "node", "vm-1", "-o", f"jsonpath={path}").split()
    assert {"ScheduledEvent=True", "MaintenanceInProgress=True", "Drained=True", "Ready=True"} <= set(printed)
    assert event.startswith(re.findall(r"Reboot ([0-9A-F]{8}) from", shown)[0])
    started.stop()
    gone = '{"status":{"conditions":[{"type":"ScheduledEvent","$patch":"delete"}]}}'
    kubectl("patch", "node", "vm-1", "--subresource=status", "--type=strategic", f"--patch={gone}")
    assert cluster.now("ScheduledEvent") == ("", "")
    assert cluster.now("Ready")[0] == "True"
