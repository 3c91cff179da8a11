"""Notifications as events about a node, against the stand-in of an API server."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from kube_access import Call, service_account
from kube_api import KubeApi
from kube_faults import FaultName
from kube_objects import CLUSTER_ROLES, EVENTS, NODES, Object
from metric_values import value_of
from msgspec.structs import replace
from receiver import wait_until
from test_notifier import Run, put, quick, store  # noqa: F401 - fixtures

from scheduled_events_agent import host
from scheduled_events_agent.cli import main
from scheduled_events_agent.kubernetes import events as module
from scheduled_events_agent.kubernetes.events import EventSender
from scheduled_events_agent.notifications import SAMPLE, Notification, NotificationError
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.policy.settings import KubernetesSettings, NotificationKind, NotifyTarget
from scheduled_events_agent.store import Store

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

TARGET = NotifyTarget(name="kubernetes", format="kubernetes")
KINDS: tuple[str, ...] = (*get_args(NotificationKind), "test")
SEEN = replace(SAMPLE, kind="seen", addition="")
ROLE: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "agent"},
    "rules": [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ],
}
BINDING: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "agent"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "agent"},
    "subjects": [{"kind": "ServiceAccount", "name": "agent", "namespace": "default"}],
}


class Cluster:
    def __init__(self, api: KubeApi) -> None:
        self.api = api
        api.add(ROLE)
        api.add(BINDING)
        self.kubeconfig = str(api.kubeconfig(service_account("default", "agent", "vm-1")))
        self.settings = KubernetesSettings(node="vm-1", kubeconfig=self.kubeconfig)
        self.add_node()

    def add_node(self) -> None:
        self.api.add_node("vm-1", host.kubelet_boot_id())

    @property
    def node(self) -> Object:
        return self.api.store.get(NODES, "", "vm-1")

    def events(self) -> list[Object]:
        return self.api.store.list(EVENTS)

    def statuses(self, verb: str = "create") -> list[int]:
        return [one.status for one in self.api.seen(verb)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with KubeApi(tmp_path) as api:
        yield Cluster(api)


def deliver(cluster: Cluster, *notifications: Notification) -> list[int]:
    sender = EventSender(cluster.settings)
    return [sender.deliver(TARGET, notification).status for notification in notifications]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_notification_is_an_event_about_the_node(cluster: Cluster, kind: Any) -> None:
    assert deliver(cluster, replace(SAMPLE, kind=kind)) == [201]
    (event,) = cluster.events()
    name = "".join(word.title() for word in kind.split("_"))
    assert event["reason"] == ("AgentTest" if kind == "test" else f"ScheduledEvent{name}")
    assert event["type"] == "Normal"
    uid = cluster.node["metadata"]["uid"]
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "vm-1", "uid": uid}
    assert event["metadata"]["namespace"] == "default"
    assert event["source"] == {"component": "scheduled-events-agent"}
    assert {event["firstTimestamp"], event["lastTimestamp"]} == {"2026-01-01T12:00:00Z"}
    assert "(event A123BC45" in event["message"]


def test_the_message_has_what_status_says_and_is_bounded(cluster: Cluster) -> None:
    long = replace(SEEN, kind="approval_needed", addition="x" * 2000, seconds_left=None)
    held = "hook drain failed; Azure starts it at 2026-01-01 12:15:00 UTC"
    deliver(cluster, SEEN, replace(SEEN, kind="held", addition=held), long)
    messages = sorted((event["message"] for event in cluster.events()), key=len)
    # When Azure starts it is said once.
    assert messages[:2] == [
        "Azure announces a Freeze of vm-1 (event A123BC45, not before 2026-01-01 12:15:00 UTC)",
        f"The Freeze of vm-1 is held (event A123BC45): {held}",
    ]
    assert len(messages[2]) == 1024


def test_a_retry_finds_its_event_there_and_counts_as_delivered(cluster: Cluster) -> None:
    later = replace(SEEN, at=SEEN.at + timedelta(seconds=1))
    again = replace(SEEN, id="another id of the same")
    assert deliver(cluster, SEEN, again, replace(SEEN, kind="started"), later) == [201, 409, 201, 201]
    names = [event["metadata"]["name"] for event in cluster.events()]
    assert len(set(names)) == 3
    assert all(name.startswith("vm-1.") and len(name) == len("vm-1.") + 20 for name in names)


def test_the_node_is_asked_for_its_uid_once_in_ten_minutes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: tuple[Any, ...] = get_args(NotificationKind)
    assert deliver(cluster, *(replace(SEEN, kind=kind) for kind in kinds)) == [201] * len(kinds)
    assert cluster.statuses("get") == [200]
    monkeypatch.setattr(module, "_UID_SECONDS", 0.0)
    sender = EventSender(cluster.settings)
    sender.deliver(TARGET, replace(SEEN, kind="test"))
    cluster.api.store.remove(NODES, cluster.node)
    cluster.add_node()
    sender.deliver(TARGET, replace(SEEN, kind="test", at=datetime.now(UTC)))
    about = [event["involvedObject"]["uid"] for event in cluster.events() if event["reason"] == "AgentTest"]
    assert len(set(about)) == 2, "a node that is registered again has another uid"


@pytest.mark.parametrize(
    ("fault", "kind", "status"),
    [
        ("too many requests", "throttled", 429),
        ("bad gateway", "server_error", 502),
        ("web page", "malformed", None),
        ("broken off", "unreachable", None),
        ("unauthorized", "denied", 401),
        ("webhook 403", "denied", 403),
        ("webhook 400", "rejected", 400),
        ("webhook 422", "rejected", 422),
        ("webhook 500", "server_error", 500),
    ],
)
def test_each_failure_has_the_kind_of_a_notification(
    cluster: Cluster, fault: FaultName, kind: str, status: int | None
) -> None:
    def is_creation(call: Call) -> bool:
        return call.verb == "create"

    cluster.api.go_wrong(fault, is_creation)
    with pytest.raises(NotificationError) as failed:
        deliver(cluster, SEEN)
    assert (failed.value.kind, failed.value.status) == (kind, status)
    assert failed.value.retry_after == {429: 3.0, 401: 5.0}.get(status or 0)


def test_a_node_that_is_gone_or_another_machine_gets_no_event(cluster: Cluster, tmp_path: Path) -> None:
    cluster.api.store.remove(NODES, cluster.node)
    with pytest.raises(NotificationError, match='nodes "vm-1" not found') as gone:
        deliver(cluster, SEEN)
    cluster.api.add_node("vm-1", "another-boot")
    with pytest.raises(NotificationError, match="is another machine") as other:
        deliver(cluster, SEEN)
    with pytest.raises(NotificationError, match="cannot be read") as account:
        EventSender(KubernetesSettings(kubeconfig=str(tmp_path / "none"))).deliver(TARGET, SEEN)
    assert [error.value.kind for error in (gone, other, account)] == ["not_found", "setup", "setup"]
    assert cluster.events() == []


# As a target like every other.


def target(cluster: Cluster) -> tuple[NotifyTarget, ...]:
    policy = f"kubernetes: {{kubeconfig: {cluster.kubeconfig}, node: vm-1}}"
    return parse_settings(policy, "policy.yaml").settings.notify


def test_the_section_brings_the_target_unless_there_is_one() -> None:
    (target,) = parse_settings("kubernetes: {}", "policy.yaml").settings.notify
    assert (target.name, target.format, target.kinds) == ("kubernetes", "kubernetes", get_args(NotificationKind))
    own = "notify: [{name: mine, format: kubernetes, 'on': held}]\nkubernetes: {}"
    (mine,) = parse_settings(own, "policy.yaml").settings.notify
    assert (mine.name, mine.kinds) == ("mine", ("held",))
    assert parse_settings("kubernetes: {events: false}", "policy.yaml").settings.notify == ()


@pytest.mark.usefixtures("quick")
def test_it_is_stored_retried_and_counted_like_every_other(cluster: Cluster, store: Store) -> None:  # noqa: F811
    (one,) = target(cluster)
    run = Run(store, one)
    cluster.api.go_wrong("unauthorized", times=2)
    cluster.api.go_wrong("webhook 403", lambda call: call.verb == "create", times=2)
    cluster.api.go_wrong("webhook 422", lambda call: call.verb == "create", times=1)
    put(store, 1, "kubernetes")
    body = msgspec.json.encode(replace(SEEN, id="next", at=datetime.now(UTC))).decode()
    with store._transaction():
        store.outbox.add(datetime.now(UTC).isoformat(), [("kubernetes", body)])
    run.notifier.reconfigure([one], cluster.settings)
    wait_until(lambda: run.reports.qsize() == 2, "both are reported")
    run.notifier.reconfigure(())
    first, second = run.reports.get(), run.reports.get()
    assert "it is in use" in first.lost, "what is rejected is lost"
    assert second.lost == ""
    sent = {
        kind: value_of(run.metrics.notification_failures.labels("kubernetes", kind))
        for kind in ("denied", "rejected")
    }
    assert sent == {"denied": 4, "rejected": 1}
    assert value_of(run.metrics.notifications_sent.labels("kubernetes")) == 1
    assert run.dropped("refused", "kubernetes") == 1
    assert [event["reason"] for event in cluster.events()] == ["ScheduledEventSeen"]


@pytest.mark.usefixtures("quick")
def test_what_has_waited_for_an_hour_is_dropped_without_a_request(cluster: Cluster, store: Store) -> None:  # noqa: F811
    (one,) = target(cluster)
    run = Run(store, one)
    now = datetime.now(UTC)
    put(store, 1, "kubernetes", at=now - timedelta(minutes=61))
    put(store, 1, "kubernetes", at=now - timedelta(minutes=59))
    run.notifier.reconfigure([one], cluster.settings)
    wait_until(lambda: run.reports.qsize() == 2, "both are reported")
    run.notifier.reconfigure(())
    reports = [run.reports.get(), run.reports.get()]
    assert [(one.lost, one.is_expired) for one in reports] == [
        ("expired: a cluster keeps an event for an hour", True),
        ("", False),
    ]
    assert run.dropped("too_old", "kubernetes") == 1
    assert cluster.statuses() == [201]


def test_notify_test_posts_one(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"kubernetes: {{kubeconfig: {cluster.kubeconfig}, node: vm-1}}")
    assert main(["notify", "test", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "kubernetes: delivered, it answers 201\n"
    assert [event["reason"] for event in cluster.events()] == ["AgentTest"]
    cluster.api.store.remove(CLUSTER_ROLES, cluster.api.store.get(CLUSTER_ROLES, "", "agent"))
    cluster.api.add({**ROLE, "rules": ROLE["rules"][:1]})
    assert main(["notify", "test", "--config", str(file)]) == 1
    assert 'cannot create resource "events"' in capsys.readouterr().out
