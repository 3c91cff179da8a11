"""The thread that tells a node's conditions, and the commands that do, against the stand-in of an API server."""

import copy
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kube_status
import pytest
from kube_access import Call, kubelet, service_account
from kube_api import KubeApi
from kube_controllers import ENDS_AFTER
from kube_objects import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, NODES, PODS, Object, is_ready
from kube_samples import budget, owned_by, set_of
from receiver import wait_until
from structlog.testing import capture_logs

from scheduled_events_agent import host
from scheduled_events_agent.cli import main
from scheduled_events_agent.daemon import node as module
from scheduled_events_agent.daemon.node import NodeThread
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.kubernetes import condition_writer, drain
from scheduled_events_agent.kubernetes.client import ApiError
from scheduled_events_agent.kubernetes.condition_writer import ConditionWriter
from scheduled_events_agent.kubernetes.conditions import Condition, drain_begins, drain_ended
from scheduled_events_agent.kubernetes.node_status import ObservedNode
from scheduled_events_agent.kubernetes.own_node import find_own_node
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.policy.settings import KubernetesSettings
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Workflow

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

AGENT = service_account("default", "agent", "vm-1")
NOW = datetime(2026, 11, 24, 11, 45, tzinfo=UTC)
UNAVAILABLE = "scheduled_events_kubernetes_unavailable"
FAILS = "updating the node's conditions fails"
WORKS = "updating the node's conditions works again"
DRAIN_RULES = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
]
STATUS_RULE = {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}


def an_event(status: str = "Scheduled", event_id: str = "602D9444-D2CD", **changed: Any) -> dict[str, Workflow]:
    """The open workflows: one, in a mapping of its own."""
    event = ScheduledEvent(
        id=event_id,
        type="Reboot",
        status=status,
        source="Platform",
        resources=("vm-1",),
        not_before=NOW + timedelta(minutes=15),
    )
    decision = Decision(rule="r", reason="", affects="self", approve="when-prepared")
    workflow = Workflow(
        id="w", event=event, decision=decision, first_seen_at=NOW, not_before_seen_at=NOW, boot_id="b", **changed
    )
    return {"w": workflow}


class Cluster:
    """A cluster with the node vm-1, whose agent tells its conditions."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.boot_id = host.kubelet_boot_id()
        self.set_rules(*DRAIN_RULES, STATUS_RULE)
        self.kubeconfig = str(api.kubeconfig(AGENT))
        self.add_node()

    def set_rules(self, *rules: Object) -> None:
        """Give the agent's account these rights, and no others."""
        for resource in (CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS):
            if old := self.api.store.find(resource, "", "agent"):
                self.api.store.remove(resource, old)
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "agent"}}
        subject = {"kind": "ServiceAccount", "name": "agent", "namespace": "default"}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "agent"}
        self.api.add({**role, "rules": list(rules)})
        self.api.add({**role, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]})

    def add_node(self) -> None:
        self.api.add_node("vm-1", self.boot_id)

    def remove_node(self) -> None:
        self.api.store.remove(NODES, self.node)

    @property
    def node(self) -> Object:
        return self.api.store.get(NODES, "", "vm-1")

    def conditions(self) -> dict[str, Object]:
        return {one["type"]: one for one in self.node["status"]["conditions"]}

    def told(self) -> dict[str, tuple[str, str]]:
        """Status and reason of each condition but the kubelet's."""
        return {
            type_: (one["status"], one.get("reason", ""))
            for type_, one in self.conditions().items()
            if type_ != "Ready"
        }

    def set_condition(self, type_: str, status: str, reason: str, **fields: Any) -> Object:
        """Write a condition as another program does."""
        with self.api.store.lock:
            node = copy.deepcopy(self.node)
            conditions = [one for one in node["status"]["conditions"] if one["type"] != type_]
            condition = {"type": type_, "status": status, "reason": reason, **fields}
            node["status"]["conditions"] = [*conditions, condition]
            self.api.store.update(NODES, node)
            return condition

    def remove_condition(self, type_: str) -> None:
        with self.api.store.lock:
            node = copy.deepcopy(self.node)
            node["status"]["conditions"] = [one for one in node["status"]["conditions"] if one["type"] != type_]
            self.api.store.update(NODES, node)

    def requests(self) -> list[tuple[str, str, int]]:
        return [(one.call.verb, one.call.path, one.status) for one in self.api.seen()]

    def patches(self) -> int:
        return len(self.api.seen("patch", "nodes/status"))

    def settings(self, **changed: Any) -> KubernetesSettings:
        return KubernetesSettings(node="vm-1", kubeconfig=self.kubeconfig, **changed)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with KubeApi(tmp_path) as api:
        yield Cluster(api)


class Telling:
    """A thread that runs."""

    def __init__(self, thread: NodeThread, metrics: Metrics, entries: list[MutableMapping[str, Any]]) -> None:
        self.thread = thread
        self.publish = thread.publish
        self._metrics = metrics
        self._entries = entries

    def unavailable(self) -> bool:
        return f"{UNAVAILABLE} 1.0" in self._metrics.expose().decode().splitlines()

    def logged(self) -> list[str]:
        return [entry["event"] for entry in self._entries]

    def reasons(self) -> list[str]:
        return [entry["reason"] for entry in self._entries if entry["event"] == FAILS]


@contextmanager
def telling(settings: KubernetesSettings) -> Iterator[Telling]:
    metrics = Metrics(list)
    thread = NodeThread(metrics, settings)
    with capture_logs() as entries:
        runner = threading.Thread(target=thread.run)
        runner.start()
        try:
            yield Telling(thread, metrics, entries)
        finally:
            thread.stop()
            runner.join()


NOTHING: dict[str, Workflow] = {}
PLANNED = {"ScheduledEvent": ("True", "RebootScheduled")}


# What is told.


def test_it_reads_the_node_once_and_tells_nothing_before_a_document_has_come(cluster: Cluster) -> None:
    with telling(cluster.settings()) as agent:
        wait_until(cluster.requests, "it has asked")
        assert cluster.requests() == [("get", "nodes", 200)]
        agent.publish(NOTHING, "current")
        wait_until(cluster.patches, "it has told")
    assert cluster.told() == {"ScheduledEvent": ("False", "NoScheduledEvent")}
    assert cluster.requests() == [("get", "nodes", 200), ("patch", "nodes/status", 200)]


def test_an_event_from_its_first_sight_to_its_end(cluster: Cluster) -> None:
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        for workflows, expected in (
            (NOTHING, {"ScheduledEvent": ("False", "NoScheduledEvent")}),
            (an_event(), {**PLANNED, "MaintenancePlanned": ("True", "ScheduledEvent")}),
            (
                an_event("Started", phase="started", was_started=True),
                {
                    "ScheduledEvent": ("True", "RebootStarted"),
                    "MaintenancePlanned": ("False", "NoScheduledEvent"),
                    "MaintenanceInProgress": ("True", "ScheduledEvent"),
                },
            ),
            (
                an_event("Started", phase="recovering", was_started=True, is_over=True),
                {"ScheduledEvent": ("False", "NoScheduledEvent")},
            ),
            ({}, {"MaintenanceInProgress": ("False", "NoScheduledEvent")}),
        ):
            agent.publish(workflows, "current")
            wait_until(lambda wanted=expected: wanted.items() <= cluster.told().items(), str(expected))  # type: ignore[misc]
    assert set(cluster.told()) == {"ScheduledEvent", "MaintenancePlanned", "MaintenanceInProgress"}
    assert agent.logged() == []


def test_a_metadata_service_that_does_not_answer_makes_it_unknown(cluster: Cluster) -> None:
    with telling(cluster.settings()) as agent:
        agent.publish(NOTHING, "overdue")
        unknown = {"ScheduledEvent": ("Unknown", "MetadataServiceUnavailable")}
        wait_until(lambda: cluster.told() == unknown, "it is unknown")


def test_the_account_of_a_kubelet_may_tell_its_own_node(cluster: Cluster) -> None:
    kubeconfig = cluster.api.kubeconfig(kubelet("vm-1"), certificate=True)
    with telling(KubernetesSettings(kubeconfig=str(kubeconfig), lifecycle_conditions=True)) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: len(cluster.told()) == 2, "it is told")
    assert {one.call.user.name for one in cluster.api.seen()} == {"system:node:vm-1"}


def test_a_patch_names_no_version_and_times_are_whole_seconds(cluster: Cluster) -> None:
    with telling(cluster.settings()) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: cluster.told() == PLANNED, "it is told")
        before = cluster.conditions()["ScheduledEvent"]
        time.sleep(1.1)
        agent.publish(an_event("Started", was_started=True), "current")
        wait_until(lambda: cluster.told() != PLANNED, "the start is told")
        after = cluster.conditions()["ScheduledEvent"]
    assert [one.call.body.keys() for one in cluster.api.seen("patch")] == [{"status"}, {"status"}]
    since = before["lastHeartbeatTime"]
    assert (before["lastTransitionTime"], after["lastTransitionTime"]) == (since, since)
    assert after["lastHeartbeatTime"] > before["lastHeartbeatTime"]
    assert len(before["lastHeartbeatTime"]) == len("2026-11-24T12:00:00Z")


# Others beside it.


def test_a_second_writer_between_reading_and_writing_loses_nothing(cluster: Cluster) -> None:
    written: dict[str, Object] = {}
    count = 0

    def write_meanwhile(call: Call) -> None:
        nonlocal count
        if call.path == "nodes/status":
            count += 1
            for type_ in ("Ready", "VMEventScheduled", "MaintenanceInProgress"):
                condition = cluster.set_condition(type_, "True", "Other", message=f"{count}")
                written[type_] = condition

    cluster.api.before = write_meanwhile
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        for number in range(10):
            workflows = an_event(event_id=f"E{number}")
            agent.publish(workflows, "current")
            text = f"Reboot E{number} "
            wait_until(
                lambda text=text: (
                    cluster.conditions().get("ScheduledEvent", {}).get("message", "").startswith(text)
                ),  # type: ignore[misc]
                "it is told",
            )
            assert {type_: cluster.conditions()[type_] for type_ in written} == written
    assert count == 10
    assert {one.status for one in cluster.api.seen()} == {200}


def test_a_lifecycle_condition_that_another_has_written_since_is_left_alone(cluster: Cluster) -> None:
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        agent.publish(NOTHING, "current")
        wait_until(lambda: cluster.patches() == 1, "it has told that there is none")
        others = cluster.set_condition("MaintenancePlanned", "True", "Autoscaler")
        agent.publish(an_event(), "current")
        wait_until(lambda: cluster.told()["ScheduledEvent"] == PLANNED["ScheduledEvent"], "it is told")
        agent.publish({}, "current")
        wait_until(lambda: cluster.told()["ScheduledEvent"][0] == "False", "it is over")
    assert cluster.conditions()["MaintenancePlanned"] == others


def test_what_others_have_removed_is_back_within_one_check(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.3)
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: len(cluster.told()) == 2, "it is told")
        told = cluster.told()
        for type_ in told:
            cluster.remove_condition(type_)
        wait_until(lambda: cluster.told() == told, "it is back")
        cluster.set_condition("ScheduledEvent", "False", "Nonsense")
        wait_until(lambda: cluster.told() == told, "it is right again")


def test_a_node_that_is_registered_again_has_all_within_one_check(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.3)
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", (0.05, 0.1))
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: len(cluster.told()) == 2, "it is told")
        told = cluster.told()
        cluster.remove_node()
        wait_until(agent.unavailable, "it has seen that the node is gone")
        cluster.add_node()
        wait_until(lambda: cluster.told() == told, "all is back")
        wait_until(lambda: not agent.unavailable(), "it works")
    assert agent.logged() == [FAILS, WORKS]
    assert agent.reasons() == ['nodes "vm-1" not found']


def test_two_agents_on_one_node_write_the_same(cluster: Cluster) -> None:
    with telling(cluster.settings()) as one, telling(cluster.settings()) as other:
        for workflows in (an_event(), an_event("Started", was_started=True), {}):
            one.publish(workflows, "current")
            other.publish(workflows, "current")
        wait_until(lambda: cluster.told() == {"ScheduledEvent": ("False", "NoScheduledEvent")}, "both are done")
    assert (one.logged(), other.logged()) == ([], [])
    assert {one.status for one in cluster.api.seen()} == {200}


def test_an_agent_that_was_killed_after_its_patch_finds_it_done(cluster: Cluster) -> None:
    workflows = an_event()
    with telling(cluster.settings()) as agent:
        agent.publish(workflows, "current")
        wait_until(lambda: cluster.told() == PLANNED, "it is told")
    before = cluster.conditions()
    with telling(cluster.settings()) as agent:
        agent.publish(workflows, "current")
        wait_until(lambda: len(cluster.requests()) == 3, "the next one has read the node")
        time.sleep(0.3)
    assert cluster.requests()[2:] == [("get", "nodes", 200)]
    assert cluster.conditions() == before


def test_a_drain_that_was_killed_is_cleared(cluster: Cluster) -> None:
    times = {"lastHeartbeatTime": "2026-11-24T11:00:00Z", "lastTransitionTime": "2026-11-24T11:00:00Z"}
    cluster.set_condition("DrainInProgress", "True", "ScheduledEvent", **times)
    with telling(cluster.settings(lifecycle_conditions=True)):
        wait_until(lambda: cluster.told()["DrainInProgress"] == ("False", "DrainEnded"), "it is cleared")


def test_conditions_stay_when_the_agent_stops(cluster: Cluster) -> None:
    with telling(cluster.settings()) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: cluster.told() == PLANNED, "it is told")
    assert cluster.told() == PLANNED


OFF = {"condition": False, "lifecycle_conditions": False}
NONE_PLANNED = {
    "ScheduledEvent": ("False", "NoScheduledEvent"),
    "MaintenancePlanned": ("False", "NoScheduledEvent"),
}


@pytest.mark.parametrize("has_section", [False, True])
def test_what_a_reload_takes_away_is_false_once_and_then_the_thread_is_idle(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, has_section: bool
) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.2)
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", (0.05, 0.1))
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: len(cluster.told()) == 2, "it is told")
        cluster.api.stop()
        agent.thread.reconfigure(cluster.settings(**OFF) if has_section else None)
        wait_until(agent.unavailable, "it has failed")
        cluster.api.start()
        wait_until(lambda: cluster.told() == NONE_PLANNED, "it is withdrawn")
        wait_until(lambda: not agent.unavailable(), "it works")
        requests = cluster.requests()
        agent.publish(an_event(event_id="B"), "current")
        time.sleep(0.5)
        assert cluster.requests() == requests
        agent.thread.reconfigure(cluster.settings(lifecycle_conditions=True))
        wait_until(lambda: cluster.told().get("MaintenancePlanned") == ("True", "ScheduledEvent"), "it is back")


def test_the_condition_alone_can_be_switched_off(cluster: Cluster) -> None:
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: len(cluster.told()) == 2, "it is told")
        agent.thread.reconfigure(cluster.settings(condition=False, lifecycle_conditions=True))
        off = {**NONE_PLANNED, "MaintenancePlanned": ("True", "ScheduledEvent")}
        wait_until(lambda: cluster.told() == off, "it has ended")


def test_nothing_is_withdrawn_that_was_never_reported(cluster: Cluster) -> None:
    cluster.set_condition("ScheduledEvent", "True", "RebootScheduled")
    with telling(cluster.settings(**OFF)) as agent:
        agent.publish(an_event(), "current")
        agent.thread.reconfigure(None)
        time.sleep(0.3)
    assert cluster.requests() == []


def test_of_a_node_that_is_gone_nothing_is_withdrawn(cluster: Cluster) -> None:
    with telling(cluster.settings()) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: cluster.told() == PLANNED, "it is told")
        cluster.remove_node()
        agent.thread.reconfigure(None)
        wait_until(lambda: cluster.requests()[-1] == ("get", "nodes", 404), "it has asked")
        requests = cluster.requests()
        time.sleep(1.5)
        assert cluster.requests() == requests
    assert agent.logged() == []


# When it cannot tell.


def test_while_the_api_server_is_away_there_is_one_line_and_the_newest_state_is_told_afterwards(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", (0.05, 0.2))
    with telling(cluster.settings()) as agent:
        agent.publish(NOTHING, "current")
        wait_until(cluster.patches, "it has told")
        cluster.api.stop()
        for workflows in (an_event(), an_event("Started", was_started=True), an_event(event_id="B")):
            agent.publish(workflows, "current")
            time.sleep(0.3)
        assert agent.unavailable()
        failure = agent.thread.failure
        assert failure is not None
        assert failure.reason == agent.reasons()[0]
        wait_until(lambda: agent.thread.failure is not failure, "it has failed once more")
        assert agent.thread.failure == failure, "it fails since the first time"
        cluster.api.start()
        wait_until(lambda: cluster.told() == PLANNED, "the newest state is told")
        wait_until(lambda: not agent.unavailable(), "it works")
        assert agent.thread.failure is None
        assert cluster.conditions()["ScheduledEvent"]["message"].startswith("Reboot B ")
    assert agent.logged() == [FAILS, WORKS]


def test_it_leaves_the_api_server_alone_for_as_long_as_that_asks(cluster: Cluster) -> None:
    cluster.api.go_wrong("too many requests", times=1)  # with Retry-After: 3
    begun_at = time.monotonic()
    with telling(cluster.settings()) as agent:
        wait_until(agent.unavailable, "it was turned away")
        for number in range(20):
            agent.publish(an_event(event_id=f"E{number}"), "current")
            time.sleep(0.05)
        assert len(cluster.requests()) == 1
        wait_until(lambda: cluster.told() == PLANNED, "it is told")
    assert time.monotonic() - begun_at >= 3


@pytest.mark.parametrize("rules", [(), ({**DRAIN_RULES[0], "verbs": ["get"]},)], ids=["get", "patch"])
def test_a_right_that_is_missing_is_named(cluster: Cluster, rules: tuple[Object, ...]) -> None:
    cluster.set_rules(*rules)
    with telling(cluster.settings()) as agent:
        agent.publish(an_event(), "current")
        wait_until(agent.reasons, "it has failed")
        cluster.set_rules(*DRAIN_RULES, STATUS_RULE)
        agent.publish(an_event(), "current")
        wait_until(lambda: cluster.told() == PLANNED, "it has the right now")
    (reason,) = agent.reasons()
    assert ('cannot patch resource "nodes/status"' if rules else 'cannot get resource "nodes"') in reason


def test_another_machine_is_not_told_about_and_a_late_kubelet_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", (0.05, 0.1))
    cluster.remove_node()
    cluster.api.add_node("vm-1", "7c9d1f1e-another-boot")
    with telling(cluster.settings()) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: len(cluster.requests()) >= 5, "it has asked again")
        assert (agent.logged(), agent.unavailable(), cluster.patches()) == ([], False, 0)
        monkeypatch.setattr(module, "_LATE_KUBELET_SECONDS", 0.0)
        wait_until(agent.reasons, "it is reported")
        assert "node vm-1 is another machine (bootID 7c9d1f1e-another-boot" in agent.reasons()[0]
        assert cluster.patches() == 0
        cluster.remove_node()
        cluster.add_node()
        wait_until(lambda: cluster.told() == PLANNED, "its kubelet has told the boot")


def test_an_account_that_cannot_be_used_is_tried_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", (0.05, 0.1))
    later = Path(cluster.kubeconfig).with_name("later")
    with telling(KubernetesSettings(node="vm-1", kubeconfig=str(later))) as agent:
        agent.publish(an_event(), "current")
        wait_until(agent.reasons, "it has failed")
        shutil.copy(cluster.kubeconfig, later)
        wait_until(lambda: cluster.told() == PLANNED, "it is told")
    assert agent.logged() == [FAILS, WORKS]


# What it costs.


def test_with_nothing_to_tell_it_sleeps_until_the_next_check(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    real = NodeThread._step

    def step(self: NodeThread, current: Any) -> float | None:
        waits.append(real(self, current))
        return waits[-1]

    monkeypatch.setattr(NodeThread, "_step", step)
    with telling(cluster.settings()) as agent:
        agent.publish(NOTHING, "current")
        wait_until(cluster.patches, "it has told")
        time.sleep(0.3)
        steps = len(waits)
        for _ in range(100):  # as after each cycle of the engine
            agent.publish(NOTHING, "current")
        time.sleep(0.5)
        assert len(waits) == steps
    assert waits[steps - 1] is not None
    assert 479 < waits[steps - 1] <= 720  # type: ignore[operator]
    assert cluster.requests() == [("get", "nodes", 200), ("patch", "nodes/status", 200)]


class FakeNode:
    """A node whose API server answers, or does not."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.is_away = False
        self._conditions: dict[str, Condition] = {}

    def read(self) -> ObservedNode:
        return self._answer("GET")

    def write(self, conditions: Iterable[Condition]) -> ObservedNode:
        answer = self._answer("PATCH")
        self._conditions |= {one.type: one for one in conditions}
        return answer._replace(conditions=dict(self._conditions))

    def _answer(self, method: str) -> ObservedNode:
        self.requests.append(method)
        if self.is_away:
            raise ApiError("the API server: connection refused", kind="unavailable", is_outage=True)
        return ObservedNode(
            uid="uid",
            version="1",
            mark=None,
            is_unschedulable=False,
            conditions=dict(self._conditions),
            date=None,
        )


class Hours:
    """The thread's steps by a clock of their own, as if it slept between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.node = FakeNode()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        settings = KubernetesSettings()
        node: Any = self.node
        self.thread = NodeThread(Metrics(list), settings, lambda _: node)

    def is_woken(self, workflows: dict[str, Workflow]) -> bool:
        """Whether a decision of the engine ends the thread's sleep."""
        self.thread._changed.clear()
        self.thread.publish(workflows, "current")
        return self.thread._changed.is_set()

    def live(self, seconds: float) -> int:
        """How often it wakes up in this time."""
        end_at = self.now + seconds
        count = 0
        while self.now < end_at:
            count += 1
            self.now += self.thread._step(self.thread._input) or float("inf")
        return count


def test_with_nothing_to_tell_it_asks_once_in_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch)
    hours.thread.publish(NOTHING, "current")
    hours.live(1)
    assert hours.node.requests == ["GET", "PATCH"]
    day = 24 * 3600
    wake_ups = hours.live(day)
    assert hours.node.requests[2:] == ["GET"] * wake_ups
    assert day / 720 <= wake_ups <= day / 480 + 1
    assert abs(wake_ups - day / 600) < 10


def test_only_what_the_node_reports_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch)
    assert hours.is_woken(NOTHING)
    assert not hours.is_woken({})
    assert hours.is_woken(an_event())
    assert not hours.is_woken(an_event(approval_needed_since=NOW)), "a decision of which the node reports nothing"
    assert hours.is_woken(an_event(phase="preparing"))
    hours.thread.reconfigure(KubernetesSettings(condition=False, lifecycle_conditions=True))
    assert not hours.is_woken(an_event(phase="prepared")), "the phase is in the condition alone"
    hours.thread._changed.clear()
    hours.thread.reconfigure(KubernetesSettings(condition=False, lifecycle_conditions=True))
    assert not hours.thread._changed.is_set()


def test_an_api_server_that_is_away_for_ten_minutes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch)
    with capture_logs() as entries:
        hours.thread.publish(an_event(), "current")
        hours.live(1)
        hours.node.is_away = True
        hours.thread.publish(an_event("Started", was_started=True), "current")
        tries = hours.live(600)
        hours.node.is_away = False
        hours.live(1)
    assert [entry["event"] for entry in entries] == [FAILS, WORKS]
    assert 15 <= tries <= 30  # 1, 2, 4 ... 60 s, less up to half
    assert hours.node.requests[-2:] == ["GET", "PATCH"]


# The commands.


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_LATE_BINDING_SECONDS", 0.1)
    monkeypatch.setenv("SCHEDULED_EVENT_ID", "602D9444")
    for name in ("SCHEDULED_EVENT_TYPE", "SCHEDULED_EVENT_TIMEOUT_SECONDS", "KUBERNETES_NODE"):
        monkeypatch.delenv(name, raising=False)


def call(cluster: Cluster, action: str, *options: str) -> int:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return main(["kubernetes", action, "--kubeconfig", cluster.kubeconfig, "--conditions", *options])
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def drain_in_vain(cluster: Cluster) -> None:
    """A drain that fails: a budget keeps it from evicting the only pod."""
    cluster.api.add(set_of("ReplicaSet", "web", 1))
    cluster.api.add(budget("web", minAvailable=1))
    wait_until(lambda: any(map(is_ready, cluster.api.store.list(PODS))), "the pod is ready")
    assert call(cluster, "drain", "--timeout", "3s") == 1


DRAINED = {"DrainInProgress": ("False", "DrainEnded"), "Drained": ("True", "DrainCompleted")}
BACK = {"DrainInProgress": ("False", "DrainEnded"), "Drained": ("False", "NotDrained")}


def history(cluster: Cluster) -> list[str]:
    """What was written, one after the other."""
    return [
        f"{condition['type']}={condition['status']}"
        for one in cluster.api.seen("patch", "nodes/status")
        for condition in one.call.body["status"]["conditions"]
    ]


def test_a_drain_that_runs_when_an_agent_starts_is_left_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second agent, as in an upgrade; or the policy gets the section."""
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.2)
    renewed_at = (datetime.now(UTC) - timedelta(minutes=4)).isoformat(timespec="seconds").replace("+00:00", "Z")
    cluster.set_condition("DrainInProgress", "True", "ScheduledEvent", lastHeartbeatTime=renewed_at)
    with telling(cluster.settings(lifecycle_conditions=True)):
        wait_until(lambda: len(cluster.requests()) >= 3, "it has looked again")
    assert cluster.told() == {"DrainInProgress": ("True", "ScheduledEvent")}


def test_a_drain_says_every_minute_that_it_runs_until_it_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condition_writer, "RENEWAL_SECONDS", 0.1)
    monkeypatch.setattr(condition_writer, "BACKOFF_SECONDS", (0.05, 0.1))
    lines: list[str] = []
    node = find_own_node(cluster.settings())
    writer = ConditionWriter(node, lines.append, is_on=True)
    writer.write(drain_begins("E1"))
    wait_until(lambda: cluster.patches() >= 3, "it is renewed")
    cluster.api.stop()
    time.sleep(0.3)
    cluster.api.start()
    patches = cluster.patches()
    wait_until(lambda: cluster.patches() >= patches + 2, "it is renewed again")
    writer.write(drain_ended(is_drained=True, event_id="E1"))
    writer.close(60)
    assert cluster.told() == DRAINED
    assert set(history(cluster)[:-2]) == {"DrainInProgress=True"}
    cluster.set_rules()
    writer = ConditionWriter(node, lines.append, is_on=True)
    writer.write(drain_begins("E2"))
    wait_until(lambda: lines, "it is denied")
    requests = cluster.requests()
    time.sleep(0.5)
    assert cluster.requests() == requests, "what is denied is not renewed"
    writer.close(60)
    assert len(lines) == 1


def test_lifecycle_conditions_that_are_switched_off_end(cluster: Cluster) -> None:
    with telling(cluster.settings(lifecycle_conditions=True)) as agent:
        agent.publish(an_event(), "current")
        wait_until(lambda: cluster.told().get("MaintenancePlanned") == ("True", "ScheduledEvent"), "it is told")
        agent.thread.reconfigure(cluster.settings())
        wait_until(lambda: cluster.told()["MaintenancePlanned"] == ("False", "NoScheduledEvent"), "it has ended")
        assert cluster.told()["ScheduledEvent"] == ("True", "RebootScheduled")


@pytest.mark.usefixtures("by_hand")
def test_a_drain_tells_that_it_runs_and_that_it_is_done_and_uncordon_ends_it(cluster: Cluster) -> None:
    cluster.api.add_pod("one", "vm-1", ownerReferences=owned_by("ReplicaSet"))
    assert call(cluster, "drain") == 0
    assert cluster.told() == DRAINED
    assert cluster.conditions()["Drained"]["message"] == "drained for event 602D9444"
    assert history(cluster) == ["DrainInProgress=True", "DrainInProgress=False", "Drained=True"]
    assert call(cluster, "uncordon") == 0
    assert cluster.told() == BACK
    assert call(cluster, "uncordon") == 0
    assert history(cluster)[3:] == ["Drained=False"]


@pytest.mark.usefixtures("by_hand")
def test_a_drain_that_fails_tells_no_more_than_that_it_has_ended(cluster: Cluster) -> None:
    drain_in_vain(cluster)
    assert cluster.told() == {"DrainInProgress": ("False", "DrainEnded")}


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("status", [409, 503])
def test_a_request_that_fails_is_sent_again(cluster: Cluster, status: int) -> None:
    cluster.api.add_pod("one", "vm-1", ownerReferences=owned_by("ReplicaSet"))
    told = 0

    def fail_at_the_end(call_: Call) -> None:
        nonlocal told
        if call_.path == "nodes/status":
            told += 1
            if told == 2:
                raise kube_status.ApiError(status, "busy")

    cluster.api.before = fail_at_the_end
    assert call(cluster, "drain") == 0
    assert cluster.told() == DRAINED


@pytest.mark.usefixtures("by_hand")
def test_a_node_is_not_called_drained_while_the_next_drain_runs_or_has_failed(cluster: Cluster) -> None:
    assert call(cluster, "drain") == 0
    found = cluster.node
    cluster.api.store.update(NODES, {**found, "spec": {**found["spec"], "unschedulable": False}})
    drain_in_vain(cluster)
    assert cluster.told() == BACK


@pytest.mark.usefixtures("by_hand")
def test_an_uncordon_whose_conditions_a_webhook_denies_has_succeeded(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(cluster, "drain") == 0
    cluster.api.go_wrong("webhook 422", lambda one: one.path == "nodes/status")
    assert call(cluster, "uncordon") == 0
    assert "unschedulable" not in cluster.node["spec"]
    assert "its conditions are not set: admission webhook" in capsys.readouterr().out


@pytest.mark.usefixtures("by_hand")
def test_without_the_option_nothing_is_told(cluster: Cluster) -> None:
    arguments = ["kubernetes", "drain", "--kubeconfig", cluster.kubeconfig]
    assert main(arguments) == 0
    assert cluster.told() == {}


@pytest.mark.usefixtures("by_hand")
def test_a_drain_goes_on_if_its_conditions_cannot_be_told(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.set_rules(*DRAIN_RULES)
    cluster.api.add_pod("one", "vm-1", ownerReferences=owned_by("ReplicaSet"))
    assert call(cluster, "drain") == 0
    assert cluster.api.pod_names() == []
    assert call(cluster, "uncordon") == 0
    assert "unschedulable" not in cluster.node["spec"]
    assert 'its conditions are not set: nodes "vm-1" is forbidden' in capsys.readouterr().out


@pytest.mark.usefixtures("by_hand")
def test_a_drain_of_a_node_that_is_gone_has_nothing_to_tell(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.remove_node()
    assert (call(cluster, "drain"), call(cluster, "uncordon")) == (0, 0)
    assert "not set" not in capsys.readouterr().out


@pytest.mark.usefixtures("by_hand")
def test_conditions_of_another_are_left_alone_by_the_commands(cluster: Cluster) -> None:
    for type_ in ("DrainInProgress", "Drained"):
        cluster.set_condition(type_, "True", "KubectlDrain")
    before = cluster.told()
    assert (call(cluster, "drain"), call(cluster, "uncordon")) == (0, 0)
    assert cluster.told() == before
    assert cluster.patches() == 0


def start_drain(cluster: Cluster) -> "subprocess.Popen[str]":
    """A drain as a process of its own, which has told that it runs and waits for a pod."""
    cluster.api.add_pod("slow", "vm-1", annotations={ENDS_AFTER: "never"}, ownerReferences=owned_by("Job"))
    command = [sys.executable, "-m", "scheduled_events_agent", "kubernetes", "drain", "--conditions"]
    process = subprocess.Popen(
        [*command, "--kubeconfig", cluster.kubeconfig], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    running = {"DrainInProgress": ("True", "ScheduledEvent")}
    wait_until(lambda: cluster.told() == running, "it has told that it runs")
    return process


@pytest.mark.usefixtures("by_hand")
@pytest.mark.skipif(sys.platform == "win32", reason="no signal ends a process there")
def test_a_drain_that_is_ended_by_a_signal_says_so_within_a_second(cluster: Cluster) -> None:
    process = start_drain(cluster)
    begun_at = time.monotonic()
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended by a signal" in error
    assert time.monotonic() - begun_at < 2  # one of them for the end of Python on a busy machine
    assert cluster.told() == {"DrainInProgress": ("False", "DrainEnded")}


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("cleared_by", ["drain", "uncordon"])
def test_a_drain_that_is_killed_is_cleared_by_the_next_command(cluster: Cluster, cleared_by: str) -> None:
    process = start_drain(cluster)
    process.kill()
    process.communicate(timeout=60)
    assert cluster.told() == {"DrainInProgress": ("True", "ScheduledEvent")}
    cluster.api.store.remove(PODS, cluster.api.store.get(PODS, "default", "slow"))
    assert call(cluster, cleared_by) == 0
    assert cluster.told()["DrainInProgress"] == ("False", "DrainEnded")


# doctor.


@pytest.fixture
def doctor(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[tuple[str, str]]]:
    def examine(policy: str = "", kubernetes: str = "") -> list[tuple[str, str]]:
        """Severity and message of each finding about the cluster."""
        file = tmp_path / "policy.yaml"
        section = f"kubernetes: {{kubeconfig: {cluster.kubeconfig}, node: vm-1{kubernetes}}}"
        imds = "imds: {endpoint: 'http://127.0.0.1:9', request_timeout: 1s}"
        file.write_text(f"{imds}\nagent: {{state_dir: {tmp_path / 'state'}}}\n{section}\n{policy}\n")
        main(["doctor", "--json", "--config", str(file)])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return [(one["state"], one["message"]) for one in checks if one["check"] == "kubernetes"]

    return examine


EVENTS_RULE = {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}
DRAINS = "hooks: {drain: {run: [scheduled-events-agent, kubernetes, drain]}}\non_clear: [drain]"


def test_doctor_says_that_all_is_well(cluster: Cluster, doctor: Callable[..., list[tuple[str, str]]]) -> None:
    cluster.set_rules(*DRAIN_RULES, STATUS_RULE, EVENTS_RULE)
    before = cluster.node
    ((state, message),) = doctor()
    assert state == "ok"
    assert message.startswith(
        f"{cluster.api.url} answers {cluster.kubeconfig}, which has all rights; node vm-1 is"
    )
    assert cluster.node == before


def test_doctor_finds_all_rights_of_a_kubelet(
    cluster: Cluster, doctor: Callable[..., list[tuple[str, str]]]
) -> None:
    cluster.kubeconfig = str(cluster.api.kubeconfig(kubelet("vm-1"), certificate=True))
    ((state, message),) = doctor(DRAINS)
    assert state == "ok", message


def test_doctor_names_each_right_that_is_missing_and_what_needs_it(
    cluster: Cluster, doctor: Callable[..., list[tuple[str, str]]]
) -> None:
    cluster.set_rules(DRAIN_RULES[0])
    assert doctor() == [
        ("error", "the account may not patch nodes/status, which conditions needs"),
        ("error", "the account may not create events in the namespace default, which events needs"),
    ]
    assert doctor(DRAINS, ", condition: false, events: false") == [
        ("error", "the account may not list pods, which drain needs"),
        ("error", "the account may not create pods/eviction, which drain needs"),
        ("warning", "the account may not delete pods, which the last resort of drain needs"),
    ]
    cluster.set_rules()
    found = doctor("", ", events: false")
    assert found[0][1].startswith("node vm-1 cannot be read: ")
    assert [message for _, message in found[1:]] == [
        "the account may not get nodes, which conditions needs",
        "the account may not patch nodes/status, which conditions needs",
    ]


def test_doctor_knows_another_machine_and_a_node_that_is_not_there(
    cluster: Cluster, doctor: Callable[..., list[tuple[str, str]]]
) -> None:
    cluster.set_rules(*DRAIN_RULES, STATUS_RULE, EVENTS_RULE)
    cluster.remove_node()
    assert doctor() == [("error", "the cluster has no node vm-1")]
    cluster.api.add_node("vm-1", "another-boot")
    ((state, message),) = doctor()
    assert (state, "is another machine (bootID another-boot" in message) == ("error", True)


def test_doctor_says_why_the_cluster_cannot_be_asked(
    cluster: Cluster, doctor: Callable[..., list[tuple[str, str]]]
) -> None:
    cluster.api.stop()
    assert doctor() == [("error", "the API server: connection refused")]
    cluster.api.start()
    cluster.api.go_wrong("unauthorized")
    ((state, message),) = doctor()
    assert (state, "does not know these credentials (401)" in message) == ("error", True)
    Path(cluster.kubeconfig).unlink()
    ((state, message),) = doctor()
    assert (state, cluster.kubeconfig in message) == ("error", True)


def test_doctor_has_nothing_to_look_at_without_the_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("imds: {endpoint: 'http://127.0.0.1:9', request_timeout: 1s}")
    main(["doctor", "--json", "--config", str(file), "--state-dir", str(tmp_path / "state")])
    checks = json.loads(capsys.readouterr().out)["checks"]
    found = [one["message"] for one in checks if one["check"] == "kubernetes"]
    assert found == ["the policy uses no cluster"]
