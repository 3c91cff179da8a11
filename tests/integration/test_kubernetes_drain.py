"""``kubernetes drain`` and ``uncordon`` against the stand-in of an API server."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import kube_objects
import kube_status
import pytest
from helm_chart import recorded_access
from kube_access import ADMIN, Call, User, kubelet, service_account
from kube_api import KubeApi
from kube_controllers import ENDS_AFTER, READY_AFTER
from kube_faults import FaultName
from kube_objects import CLUSTER_ROLES, NODES, PODS, Object
from kube_samples import budget, owned_by, set_of
from memory_peak import wait_for_peak
from receiver import wait_until

from scheduled_events_agent.cli import main
from scheduled_events_agent.kubernetes import client, drain, node, node_status, pods

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

MARK = node_status.MARK
AGENT = service_account("scheduled-events-agent", "scheduled-events-agent", "vm-1")
EVENT = "602d9444-d2cd-49c7-8624-8643e7171297"
RIGHTS: dict[str, Object] = {
    "nodes": {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
    "pods": {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    "evictions": {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    "deletions": {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]},
}


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        return json.loads(self.out)

    def names(self, key: str) -> list[str]:
        return sorted(one["name"] for one in self.result[key])


class Cluster:
    """A cluster whose agent drains vm-1."""

    def __init__(self, api: KubeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.api = api
        self._capsys = capsys
        for name in ("SCHEDULED_EVENT_TYPE", "SCHEDULED_EVENT_TIMEOUT_SECONDS", "KUBERNETES_NODE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("SCHEDULED_EVENT_ID", EVENT)
        api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": AGENT.name.split(":")[2]}})
        api.add_all(recorded_access())
        self.kubeconfig = api.kubeconfig(AGENT)
        api.add_node("vm-1")

    def set_rights(self, *rights: str) -> None:
        """Give the agent's account only these of the rights that it has with the chart."""
        role = self.api.store.get(CLUSTER_ROLES, "", "scheduled-events-agent")
        rules = [RIGHTS[right] for right in rights]
        self.api.store.update(CLUSTER_ROLES, {**role, "metadata": {**role["metadata"]}, "rules": rules})

    def call(self, action: str, *options: str) -> Done:
        """Run the command in this process."""
        self._capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = main(["kubernetes", action, "--kubeconfig", str(self.kubeconfig), *options])
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return Done(code, *self._capsys.readouterr())

    def drain(self, *options: str) -> Done:
        return self.call("drain", "--json", *options)

    def start(self, action: str, *options: str) -> "subprocess.Popen[str]":
        """Run the command as a process of its own."""
        command = [sys.executable, "-m", "scheduled_events_agent", "kubernetes", action]
        return subprocess.Popen(
            [*command, "--kubeconfig", str(self.kubeconfig), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def drain_until(self, is_seen: Callable[[str], object], *options: str) -> Done:
        """Run the command as a process, and end it with SIGTERM when it has printed something."""
        process = self.start("drain", "--timeout", "10m", *options)
        assert process.stdout is not None
        out = ""
        give_up = later(120, process.kill)
        try:
            while not is_seen(out):
                line = process.stdout.readline()
                assert line, f"it has ended, or took two minutes: {out}"
                out += line
            process.terminate()
            code, rest, err = _end_of(process)
            return Done(code, out + rest, err)
        finally:
            give_up.cancel()
            process.kill()
            process.communicate()

    def add_sets(self, **replicas: int) -> None:
        """Add ReplicaSets, and wait until their pods are ready."""
        for name, count in replicas.items():
            self.api.add(set_of("ReplicaSet", name, count))
        self.wait_for(sum(replicas.values()))

    def wait_for(self, count: int) -> None:
        """Wait until so many pods are ready on the node, and the budgets have seen it."""

        def ready() -> int:
            conditions = [pod["status"].get("conditions", ()) for pod in self.api.store.list(PODS)]
            return sum(one["type"] == "Ready" for each in conditions for one in each)

        wait_until(lambda: ready() >= count, f"{count} pods are ready")

    @property
    def node(self) -> Object:
        return self.api.store.get(NODES, "", "vm-1")

    @property
    def mark(self) -> str | None:
        mark: str | None = self.node["metadata"].get("annotations", {}).get(MARK)
        return mark

    def is_cordoned(self) -> bool:
        return bool(self.node["spec"].get("unschedulable"))

    def evictions(self, name: str = "") -> list[int]:
        return [one.status for one in self.api.seen("create", "pods/eviction", name)]


def _end_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cluster]:
    monkeypatch.setattr(drain, "_LATE_BINDING_SECONDS", 0.1)
    with KubeApi(tmp_path) as api:
        yield Cluster(api, monkeypatch, capsys)


def later(seconds: float, do: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()
    return timer


def is_eviction(call: Call) -> bool:
    return call.subresource == "eviction"


def after_the_cordon(call: Call) -> bool:
    return call.resource is PODS


# What goes, and what stays.


def test_all_pods_go_and_the_node_is_cordoned_with_a_mark(cluster: Cluster) -> None:
    cluster.add_sets(web=3)
    done = cluster.drain()
    assert done.code == 0
    assert (done.result["node"], done.result["cordoned"], done.result["left"]) == ("vm-1", "ours", [])
    assert len(done.result["evicted"]) == 3
    assert cluster.api.pod_names("vm-1") == []
    assert (cluster.is_cordoned(), cluster.mark) == (True, EVENT)
    assert cluster.call("uncordon").out == "node vm-1: uncordoned\n"
    assert (cluster.is_cordoned(), cluster.mark) == (False, None)


def test_json_has_a_version_and_a_time(cluster: Cluster) -> None:
    for action, has_done in (("drain", True), ("uncordon", True), ("uncordon", False)):
        result = cluster.call(action, "--json").result
        assert result["schema_version"] == 1
        assert datetime.fromisoformat(result["at"]) <= datetime.now(UTC)
        assert result.get("is_uncordoned", True) is has_done


def test_each_change_is_a_line(cluster: Cluster) -> None:
    cluster.api.add_pod("one", "vm-1", ownerReferences=owned_by("ReplicaSet"))
    cluster.api.add_pod("log", "vm-1", ownerReferences=owned_by("DaemonSet"))
    done = cluster.call("drain")
    assert (done.code, done.err) == (0, "")
    *lines, last = done.out.splitlines()
    assert lines == [
        f"node vm-1: cordoned for event {EVENT}",
        "default/log: stays: of a DaemonSet",
        "default/one: evicted",
        "default/one: gone",
    ]
    assert last.startswith("node vm-1: drained in ")


def test_a_budget_that_never_allows_is_named_and_the_others_go(cluster: Cluster) -> None:
    cluster.add_sets(web=2, other=2)
    cluster.api.add(budget("web", minAvailable=2))
    done = cluster.drain_until(lambda out: out.count(": kept: ") == 2 and out.count(": evicted\n") == 2)
    assert done.code == 1
    denial = "The disruption budget web needs 2 healthy pods and has 2 currently"
    assert len(re.findall(rf"^default/web-\w+: kept: {denial}$", done.out, re.MULTILINE)) == 2
    assert len(re.findall(r"^default/other-\w+: evicted$", done.out, re.MULTILINE)) == 2
    assert done.err.startswith("scheduled-events-agent: node vm-1 is not drained: ended by a signal; ")
    assert done.err.count(denial) == 2


def test_the_drain_ends_at_its_deadline(cluster: Cluster) -> None:
    cluster.add_sets(web=1)
    cluster.api.add(budget("web", minAvailable=1))
    done = cluster.drain("--timeout", "3s")
    assert done.code == 1
    (left,) = done.result["left"]
    assert left["reason"] == "The disruption budget web needs 1 healthy pods and has 1 currently"
    assert done.result["seconds"] >= 2.9
    assert done.err.startswith("scheduled-events-agent: node vm-1 is not drained: 1 pod left: default/web-")


def test_the_last_resort_deletes_what_a_budget_keeps(cluster: Cluster) -> None:
    cluster.add_sets(web=2, other=1)
    cluster.api.add(budget("web", minAvailable=2))
    done = cluster.drain("--timeout", "60s", "--last-resort", "58s")
    assert done.code == 0
    assert (len(done.result["evicted"]), len(done.result["deleted"])) == (1, 2)
    deletions = cluster.api.seen("delete", "pods")
    assert all(one.call.body["preconditions"]["uid"] for one in deletions)


def test_a_webhook_that_denies_one_deletion_does_not_keep_the_others(cluster: Cluster) -> None:
    cluster.add_sets(web=9, guarded=1)
    for name, replicas in (("web", 9), ("guarded", 1)):
        cluster.api.add(budget(name, minAvailable=replicas))
    cluster.api.go_wrong(
        "webhook 403", lambda call: call.verb == "delete" and call.name.startswith("guarded"), times=1
    )
    done = cluster.drain_until(
        lambda out: out.count(": deleted without") == 9 and "the request: it is in use" in out,
        "--last-resort",
        "10m",
    )
    assert done.code == 1
    denial = 'admission webhook "guard.example.com" denied the request: it is in use'
    assert re.search(rf"^default/guarded-\w+: kept: {denial}$", done.out, re.MULTILINE)
    assert "pods cannot be deleted" not in done.out


def test_without_the_right_to_delete_it_says_so_once_and_goes_on(cluster: Cluster) -> None:
    cluster.set_rights("nodes", "pods", "evictions")
    cluster.add_sets(web=2)
    cluster.api.add(budget("web", minAvailable=2))
    done = cluster.drain_until(lambda out: out.count(": kept: ") == 2, "--last-resort", "10m")
    assert done.code == 1
    assert done.out.count("pods cannot be deleted without asking their budgets: ") == 1
    assert "needs 2 healthy pods" in done.err


def test_a_pod_with_two_budgets_is_asked_for_every_ten_seconds_only(cluster: Cluster) -> None:
    cluster.add_sets(web=1, other=1)
    cluster.api.add(budget("one", of="web", minAvailable=0))
    cluster.api.add(budget("two", of="web", minAvailable=0))
    asked_for = sorted(cluster.evictions())
    done = cluster.drain_until(lambda out: out.count(": kept: ") == 1 and ": gone" in out)
    assert done.code == 1
    assert done.err.count("more than one PodDisruptionBudget") == 1
    assert (asked_for, sorted(cluster.evictions())) == ([], [201, 500])


def test_a_budget_that_allows_one_at_a_time_takes_its_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_BUDGET_PAUSE_SECONDS", (1.0, 1.0))
    cluster.api.add(set_of("ReplicaSet", "web", 3, {READY_AFTER: "0.5"}))
    cluster.wait_for(3)
    cluster.api.add(budget("web", maxUnavailable=1))
    cluster.api.add_node("vm-2")
    names = cluster.api.pod_names("vm-1")
    done = cluster.drain("--timeout", "90s")
    assert done.code == 0
    assert done.names("evicted") == sorted(names)
    for name in names:
        times = [one.at for one in cluster.api.seen("create", "pods/eviction", name)]
        assert all(later_ - earlier >= 1 for earlier, later_ in pairwise(times))


def test_a_budget_that_asks_for_an_hour_is_asked_again_sooner(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_BUDGET_PAUSE_SECONDS", (0.1, 0.1))
    cluster.api.add_pod("one", "vm-1", ownerReferences=owned_by("ReplicaSet"))
    denials = 1

    def deny(call: Call) -> None:
        nonlocal denials
        if is_eviction(call) and denials:
            denials -= 1
            causes = {"causes": [{"reason": "DisruptionBudget", "message": "not now"}]}
            raise kube_status.ApiError(429, "not now", details=causes, retry_after_seconds=3600)

    cluster.api.before = deny
    assert cluster.drain("--timeout", "20s").code == 0
    assert cluster.evictions() == [429, 201]


def test_a_grace_period_is_shortened_only_where_it_does_not_fit(cluster: Cluster) -> None:
    for name, seconds in (("long", 600), ("short", 1)):
        cluster.api.add_pod(name, "vm-1", grace_seconds=seconds, ownerReferences=owned_by("ReplicaSet"))
    done = cluster.drain("--timeout", "60s")
    assert done.code == 0
    options = {
        one.call.name: one.call.body["deleteOptions"].get("gracePeriodSeconds")
        for one in cluster.api.seen("create", "pods/eviction")
    }
    assert options["short"] is None
    assert 30 < options["long"] <= 58
    reasons = {one["name"]: one["reason"] for one in done.result["evicted"]}
    assert reasons == {"short": "evicted", "long": f"evicted, with {options['long']} s of grace instead of 600"}


@pytest.mark.nightly
def test_a_pod_that_ignores_sigterm_for_ten_minutes_gets_what_there_is(cluster: Cluster) -> None:
    annotations = {ENDS_AFTER: "never"}
    cluster.api.add_pod(
        "deaf", "vm-1", grace_seconds=600, annotations=annotations, ownerReferences=owned_by("Job")
    )
    done = cluster.drain("--timeout", "40s")
    assert done.code == 0
    (eviction,) = cluster.api.seen("create", "pods/eviction")
    assert eviction.call.body["deleteOptions"]["gracePeriodSeconds"] in (37, 38)


def test_a_pod_that_a_finalizer_keeps_does_not_count_once_it_has_ended(cluster: Cluster) -> None:
    cluster.api.add_pod("kept", "vm-1", finalizers=["example.com/wait"], ownerReferences=owned_by("ReplicaSet"))
    done = cluster.drain("--timeout", "60s")
    assert (done.code, done.names("evicted")) == (0, ["kept"])
    assert cluster.api.pod_names() == ["kept"]


def test_volumes_on_the_node_keep_no_pod(cluster: Cluster) -> None:
    volumes: dict[str, Object] = {
        "scratch": {"emptyDir": {}},
        "host": {"hostPath": {"path": "/data"}},
        "local": {"persistentVolumeClaim": {"claimName": "local"}},
    }
    for name, volume in volumes.items():
        spec = {"volumes": [{"name": "it", **volume}]}
        cluster.api.add_pod(name, "vm-1", spec=spec, ownerReferences=owned_by("ReplicaSet"))
    done = cluster.drain()
    assert (done.code, done.names("evicted")) == (0, sorted(volumes))


@pytest.mark.parametrize(
    ("event_type", "options", "goes"),
    [
        ("Reboot", (), False),
        ("Terminate", (), True),
        ("Preempt", (), True),
        ("Preempt", ("--bare-pods", "leave"), False),
        ("Reboot", ("--bare-pods", "evict"), True),
    ],
)
def test_a_pod_without_a_controller_goes_if_the_vm_goes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, event_type: str, options: tuple[str, ...], *, goes: bool
) -> None:
    monkeypatch.setenv("SCHEDULED_EVENT_TYPE", event_type)
    cluster.api.add_pod("bare", "vm-1")
    done = cluster.drain(*options)
    assert done.code == 0
    assert done.names("evicted") == (["bare"] if goes else [])
    reasons = [one["reason"] for one in done.result["stays"]]
    assert reasons == ([] if goes else ["no controller: its kubelet starts it again"])


def test_pods_that_stay_are_not_asked_for(cluster: Cluster) -> None:
    cluster.api.add_pod("log", "vm-1", ownerReferences=owned_by("DaemonSet"))
    cluster.api.add_pod("etcd", "vm-1", annotations={"kubernetes.io/config.mirror": "5f3c"})
    cluster.api.add_pod("job", "vm-1", ownerReferences=owned_by("Job"))
    job = cluster.api.store.get(PODS, "default", "job")
    cluster.api.store.update(PODS, {**job, "status": {"phase": "Succeeded"}})
    done = cluster.drain()
    assert (done.code, cluster.evictions()) == (0, [])
    assert {one["name"]: one["reason"] for one in done.result["stays"]} == {
        "log": "of a DaemonSet",
        "etcd": "static pod",
        "job": "finished",
    }


def test_a_running_job_is_evicted_once(cluster: Cluster) -> None:
    cluster.api.add_pod("job", "vm-1", ownerReferences=owned_by("Job"))
    assert cluster.drain().code == 0
    assert cluster.evictions() == [201]


def test_a_pod_that_is_being_deleted_is_waited_for(cluster: Cluster) -> None:
    cluster.api.add_pod("slow", "vm-1", annotations={ENDS_AFTER: "1"}, ownerReferences=owned_by("Job"))
    cluster.api.store.delete_pod(cluster.api.store.get(PODS, "default", "slow"), None)
    done = cluster.call("drain")
    assert (done.code, cluster.evictions()) == (0, [])
    assert "default/slow: is being deleted already\n" in done.out
    assert cluster.api.pod_names() == []


def test_a_pod_of_a_namespace_that_is_being_deleted_is_waited_for(cluster: Cluster) -> None:
    cluster.api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "old"}})
    cluster.api.add_pod("last", "vm-1", namespace="old", ownerReferences=owned_by("Job"))

    def end_namespace(call: Call) -> None:
        if is_eviction(call):
            cluster.api.before = lambda _: None
            from kube_objects import NAMESPACES, now, write_time

            space = cluster.api.store.get(NAMESPACES, "", "old")
            metadata = {**space["metadata"], "deletionTimestamp": write_time(now())}
            cluster.api.store.update(NAMESPACES, {**space, "metadata": metadata})

    cluster.api.before = end_namespace
    done = cluster.call("drain")
    assert (done.code, cluster.evictions()) == (0, [403])
    assert "old/last: goes with its namespace\n" in done.out


def test_pods_that_tolerate_the_cordon_go_once_and_then_stay(cluster: Cluster) -> None:
    spec = {"tolerations": [{"operator": "Exists"}]}
    cluster.api.add(set_of("ReplicaSet", "everywhere", 2, spec=spec))
    cluster.wait_for(2)
    before = cluster.api.pod_names("vm-1")
    time.sleep(1.1)  # times of the API server are whole seconds
    done = cluster.drain("--timeout", "60s")
    assert (done.code, done.names("evicted")) == (0, sorted(before))
    assert len(cluster.api.pod_names("vm-1")) == 2
    assert {one["reason"] for one in done.result["stays"]} == {"tolerates the cordon: created after it"}


def test_a_pod_that_was_bound_just_after_the_cordon_goes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("SCHEDULED_EVENT_ID", EVENT)
    full = cluster.node
    taints = [{"key": "example.com/full", "effect": "NoSchedule"}]
    cluster.api.store.update(NODES, {**full, "spec": {**full["spec"], "taints": taints}})
    late = cluster.api.add_pod("late", ownerReferences=owned_by("ReplicaSet"))
    later(2, lambda: cluster.api.bind(late, "vm-1"))
    done = cluster.drain()
    assert (done.code, done.names("evicted")) == (0, ["late"])


def test_without_a_list_that_shows_it_nothing_counts_as_drained(cluster: Cluster) -> None:
    """A pod is bound late, and no list comes any more."""
    late = cluster.api.add_pod("late", "elsewhere", ownerReferences=owned_by("ReplicaSet"))
    listed = threading.Event()

    def fail_after_the_first_list(call: Call) -> None:
        if call.verb == "list" and listed.is_set():
            cluster.api.go_wrong("bad gateway", lambda one: one.verb == "list")
            cluster.api.bind(late, "vm-1")
        elif call.verb == "list":
            listed.set()

    cluster.api.before = fail_after_the_first_list
    done = cluster.drain("--timeout", "4s")
    assert done.code == 1
    assert "no list of its pods shows that none is left: it answers 502" in done.err.replace(
        "the API server: ", ""
    )


@pytest.mark.parametrize("status", [410, 429, 500])
def test_a_list_that_breaks_off_between_pages_begins_anew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(drain, "_PAGE", "2")
    for number in range(5):
        cluster.api.add_pod(f"pod-{number}", "vm-1", ownerReferences=owned_by("Job"))
    failures = 0

    def fail(call: Call) -> None:
        nonlocal failures
        if "continue" in call.query and failures < 1:
            failures += 1
            raise kube_status.ApiError(status, "not now", retry_after_seconds=1 if status == 429 else None)

    cluster.api.before = fail
    done = cluster.drain("--timeout", "60s")
    assert (done.code, len(done.result["evicted"]), cluster.api.pod_names("vm-1")) == (0, 5, [])
    pages = ["continue" in one.call.query for one in cluster.api.seen("list", "pods") if "limit" in one.call.query]
    assert pages[:5] == [False, True, False, True, True]


def test_a_list_that_is_denied_after_one_that_was_not_is_asked_for_again(cluster: Cluster) -> None:
    """An API server that has just started denies everything until it has read the roles."""
    lists = 0

    def deny(call: Call) -> None:
        nonlocal lists
        lists += call.verb == "list"
        if call.verb == "list" and lists == 2:
            raise kube_status.forbidden("pods", "", "", 'User "x" cannot list resource "pods"')

    cluster.api.before = deny
    cluster.add_sets(web=1)
    assert cluster.drain().code == 0
    assert [one.status for one in cluster.api.seen("list", "pods")][:3] == [200, 403, 200]


def test_a_pod_that_is_newer_than_the_cordon_by_another_clock_goes(cluster: Cluster) -> None:
    """An API server has created it whose clock is ahead of that of the one that answers."""
    cluster.api.add_pod("one", "vm-1", ownerReferences=owned_by("Job"))
    pod = cluster.api.store.get(PODS, "default", "one")
    ahead = kube_objects.write_time(kube_objects.now() + timedelta(seconds=30))
    cluster.api.store.update(PODS, {**pod, "metadata": {**pod["metadata"], "creationTimestamp": ahead}})
    done = cluster.drain("--timeout", "60s")
    assert (done.code, done.names("evicted"), cluster.api.pod_names()) == (0, ["one"], [])


def test_a_list_that_is_old_makes_no_pod_gone(cluster: Cluster) -> None:
    cluster.add_sets(web=2)
    cluster.api.add(budget("web", minAvailable=2))
    cluster.api.lists.is_behind = True
    done = cluster.drain("--timeout", "4s")
    assert done.code == 1
    assert len(done.result["left"]) == 2
    cluster.api.lists.is_behind = False
    process = cluster.drain_until(lambda out: out.count(": kept: ") == 2)
    assert ": gone" not in process.out


def test_a_pod_of_the_same_name_with_another_uid_is_left_alone(cluster: Cluster) -> None:
    cluster.api.add_pod("db-0", "vm-1", ownerReferences=owned_by("StatefulSet"))

    def replace(call: Call) -> None:
        if is_eviction(call):
            cluster.api.before = lambda _: None
            cluster.api.store.remove(PODS, cluster.api.store.get(PODS, "default", "db-0"))
            cluster.api.add_pod("db-0", "vm-2", ownerReferences=owned_by("StatefulSet"))

    cluster.api.before = replace
    done = cluster.drain()
    assert (done.code, cluster.evictions()) == (0, [409])
    assert cluster.api.pod_names() == ["db-0"]
    assert "deletionTimestamp" not in cluster.api.store.get(PODS, "default", "db-0")["metadata"]


# What goes wrong.


def test_while_the_api_server_hangs_or_is_gone_the_drain_waits(cluster: Cluster) -> None:
    cluster.add_sets(web=8)
    cluster.api.before = lambda call: time.sleep(0.2) if is_eviction(call) else None
    later(0.4, cluster.api.stop)
    later(2.0, cluster.api.start)
    later(2.5, cluster.api.pause)
    later(4.0, cluster.api.resume)
    done = cluster.call("drain", "--timeout", "120s")
    assert done.code == 0
    assert cluster.api.pod_names("vm-1") == []
    assert done.out.count("; trying again\n") <= 2
    assert "the API server answers again\n" in done.out


@pytest.mark.nightly
def test_the_api_server_may_hang_for_fifteen_seconds(cluster: Cluster) -> None:
    cluster.add_sets(web=3)
    cluster.api.before = lambda call: cluster.api.pause() if is_eviction(call) else None

    def go_on() -> None:
        cluster.api.before = lambda _: None
        cluster.api.resume()

    later(15, go_on)
    assert cluster.drain("--timeout", "60s").code == 0


@pytest.mark.parametrize(
    "fault",
    [
        "too many requests",
        "bad gateway",
        "endless",
        "web page",
        "broken off",
        pytest.param("trickle", marks=pytest.mark.nightly),  # 15 s until it is no answer
    ],
)
def test_an_api_server_out_of_order_is_asked_again(cluster: Cluster, fault: FaultName) -> None:
    cluster.add_sets(web=3)
    cluster.api.before = lambda call: _break_after_first(cluster, call, fault)
    done = cluster.drain_until(lambda out: out.count("\n") >= 3)
    assert done.code == 1
    assert "is not drained: ended by a signal; " in done.err
    cluster.api.recover()
    cluster.api.before = lambda _: None
    assert cluster.drain("--timeout", "120s").code == 0
    assert sorted(cluster.evictions()).count(201) == 3


def _break_after_first(cluster: Cluster, call: Call, fault: FaultName) -> None:
    if is_eviction(call) and not cluster.api.is_out_of_order:
        cluster.api.go_wrong(fault, lambda one: one.resource is PODS and one.name != call.name)


def test_an_endless_answer_takes_no_memory(cluster: Cluster) -> None:
    cluster.api.go_wrong("endless", lambda call: call.verb == "list")
    process = cluster.start("drain", "--timeout", "3s")
    peak_mib = wait_for_peak(process)
    done = Done(*_end_of(process))
    assert done.code == 1
    assert peak_mib < 80  # about 32 without an answer; a pod of the chart has 128, and the agent takes 40
    assert "the answer is over 8 MiB" in done.err


def test_a_token_that_was_replaced_is_read_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_UNAUTHORIZED_PAUSE_SECONDS", 1.0)
    old = cluster.api.access.issue_token(AGENT)
    token = _use_token_file(cluster, tmp_path, old)
    cluster.add_sets(web=2)
    replaced = False

    def replace(call: Call) -> None:
        nonlocal replaced
        if is_eviction(call) and not replaced:
            replaced = True
            cluster.api.access.revoke_token(old)
            later(0.5, lambda: token.write_text(cluster.api.access.issue_token(AGENT)))

    cluster.api.before = replace
    done = cluster.drain("--timeout", "90s")
    assert done.code == 0
    assert 401 in [one.status for one in cluster.api.calls]


def test_a_kubeconfig_that_was_replaced_is_read_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_UNAUTHORIZED_PAUSE_SECONDS", 1.0)
    cluster.add_sets(web=2)
    config = json.loads(cluster.kubeconfig.read_text())
    old = config["users"][0]["user"]["token"]
    config["users"][0]["user"]["token"] = cluster.api.access.issue_token(AGENT)

    def replace(call: Call) -> None:
        if is_eviction(call):
            cluster.api.before = lambda _: None
            cluster.api.access.revoke_token(old)
            later(0.5, lambda: cluster.kubeconfig.write_text(json.dumps(config)))

    cluster.api.before = replace
    assert cluster.drain("--timeout", "90s").code == 0
    assert 401 in [one.status for one in cluster.api.calls]


def _use_token_file(cluster: Cluster, directory: Path, token: str) -> Path:
    file = directory / "token"
    file.write_text(token)
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"tokenFile": "token"}
    cluster.kubeconfig.write_text(json.dumps(config))
    return file


def test_credentials_that_stay_unknown_end_the_drain(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_UNAUTHORIZED_SECONDS", 2.0)
    monkeypatch.setattr(client, "_UNAUTHORIZED_PAUSE_SECONDS", 1.0)
    cluster.api.go_wrong("unauthorized", after_the_cordon)
    begun_at = time.monotonic()
    done = cluster.drain("--timeout", "60s")
    assert done.code == 1
    assert "does not know these credentials (401)" in done.err
    assert 2 <= time.monotonic() - begun_at < 50


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        (("pods", "evictions"), 'cannot get resource "nodes"'),
        (("nodes", "evictions"), 'cannot list resource "pods"'),
        (("nodes", "pods", "deletions"), 'cannot create resource "pods/eviction"'),
    ],
)
def test_a_missing_right_ends_the_drain_at_once(cluster: Cluster, rules: tuple[str, ...], missing: str) -> None:
    cluster.set_rights(*rules)
    cluster.add_sets(web=7)
    begun_at = time.monotonic()
    done = cluster.drain("--timeout", "60s")
    assert done.code == 1
    assert missing in done.err
    assert time.monotonic() - begun_at < 50


@pytest.mark.parametrize("status", [400, 403, 422, 500])
def test_a_webhook_that_denies_one_pod_does_not_keep_the_others(cluster: Cluster, status: int) -> None:
    cluster.add_sets(web=9, guarded=1)
    fault: Any = f"webhook {status}"
    cluster.api.go_wrong(fault, lambda call: is_eviction(call) and call.name.startswith("guarded"))
    done = cluster.drain_until(lambda out: out.count(": evicted\n") == 9 and ": kept: " in out)
    assert done.code == 1
    denial = 'admission webhook "guard.example.com" denied the request: it is in use'
    assert re.search(rf"^default/guarded-\w+: kept: {denial}$", done.out, re.MULTILINE)
    assert denial in done.err


def test_a_pod_that_was_not_asked_for_yet_comes_before_one_that_was(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pods whose webhook is slow would take all places again and again, and the others would never go."""
    monkeypatch.setattr(drain, "_MAX_UNDER_WAY", 1)
    monkeypatch.setattr(drain, "BACKOFF_SECONDS", (0.0, 0.0))  # an answer takes longer than the pause after it
    cluster.add_sets(guarded=1, web=1)
    cluster.api.go_wrong(
        "webhook 500", lambda call: is_eviction(call) and call.name.startswith("guarded"), times=10
    )
    assert cluster.drain().code == 0
    asked = [one.call.name.partition("-")[0] for one in cluster.api.seen("create", "pods/eviction")]
    assert asked[:3] == ["guarded", "web", "guarded"]


# The node.


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_node_that_was_deleted_is_no_failure(cluster: Cluster, when: str) -> None:
    cluster.add_sets(web=2)
    if when == "before":
        cluster.api.store.remove(NODES, cluster.node)
    elif when == "during":

        def remove(call: Call) -> None:
            if is_eviction(call):
                cluster.api.before = lambda _: None
                cluster.api.store.remove(NODES, cluster.node)

        cluster.api.before = remove
    done = cluster.drain()
    assert (done.code, len(done.result["evicted"])) == (0, 2)
    assert done.result["cordoned"] == ("gone" if when == "before" else "ours")
    if when == "after":
        cluster.api.store.remove(NODES, cluster.node)
    assert cluster.call("uncordon").out == "node vm-1: the cluster has none: nothing to do\n"


def _set_cordon(cluster: Cluster, *, is_on: bool) -> None:
    found = cluster.node
    cluster.api.store.update(NODES, {**found, "spec": {**found["spec"], "unschedulable": is_on}})


def test_the_cordon_of_an_administrator_stays_theirs(cluster: Cluster) -> None:
    _set_cordon(cluster, is_on=True)
    done = cluster.drain()
    assert (done.code, done.result["cordoned"], cluster.mark) == (0, "others", None)
    assert cluster.call("uncordon").out == "node vm-1: has no mark of this agent: left as it is\n"
    assert cluster.is_cordoned()


def test_a_cordon_whose_answer_is_lost_is_found(cluster: Cluster) -> None:
    cluster.api.lose_answer(lambda call: call.verb == "patch")
    done = cluster.call("drain")
    assert done.code == 0
    assert f"node vm-1: cordoned already, for event {EVENT}\n" in done.out


def test_json_is_printed_though_the_node_could_not_be_cordoned(cluster: Cluster) -> None:
    cluster.set_rights("pods")
    done = cluster.drain()
    assert (done.code, done.result["cordoned"], done.result["left"]) == (1, None, [])


def test_no_time_at_all_is_wrong_usage(cluster: Cluster) -> None:
    done = cluster.drain("--timeout", "0s")
    assert done.code == 2
    assert "argument --timeout: expected more than 0s" in done.err
    assert cluster.api.calls == []


def test_a_node_that_was_uncordoned_meanwhile_is_cordoned_for_the_next_event(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.drain().code == 0
    _set_cordon(cluster, is_on=False)
    monkeypatch.setenv("SCHEDULED_EVENT_ID", "another")
    assert cluster.drain().code == 0
    assert (cluster.is_cordoned(), cluster.mark) == (True, "another")
    again = cluster.call("drain")
    assert again.out.startswith("node vm-1: cordoned already, for event another\n")


def test_a_node_that_others_uncordon_meanwhile_is_not_drained(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "_LATE_AFTER", timedelta(seconds=0))
    cluster.add_sets(web=2)
    begun_at = time.time()

    def uncordon(call: Call) -> None:
        if is_eviction(call):
            cluster.api.before = lambda _: None
            while int(time.time()) <= int(begun_at) + 1:  # the API server's times are whole seconds
                time.sleep(0.1)
            _set_cordon(cluster, is_on=False)

    cluster.api.before = uncordon
    done = cluster.drain("--timeout", "60s")
    assert done.code == 1
    assert done.err == ("scheduled-events-agent: node vm-1 is not drained: others have uncordoned it meanwhile\n")
    assert len(cluster.api.pod_names("vm-1")) == 2
    again = cluster.drain("--timeout", "60s")
    assert (again.code, cluster.is_cordoned(), cluster.api.pod_names("vm-1")) == (0, True, [])


def test_an_eviction_that_is_answered_late_does_not_stand_for_the_nodes_cordon(cluster: Cluster) -> None:
    for name in ("one", "two"):
        cluster.api.add_pod(name, "vm-1", ownerReferences=owned_by("Job"))
    is_denied, is_asked_again, is_answered = threading.Event(), threading.Event(), threading.Event()

    def answer_late(call: Call) -> None:
        if is_eviction(call) and call.name == "two":
            is_denied.set()
            raise kube_status.ApiError(500, "not now", retry_after_seconds=30)
        if is_eviction(call):
            is_denied.wait(60)
            for pod in cluster.api.store.list(PODS):  # both go, and others uncordon the node
                cluster.api.store.remove(PODS, pod)
            _set_cordon(cluster, is_on=False)
            is_asked_again.wait(60)
            later(0.5, is_answered.set)
        elif (call.verb, call.path) == ("get", "nodes") and not cluster.api.pod_names():
            is_asked_again.set()
            is_answered.wait(60)

    cluster.api.before = answer_late
    done = cluster.drain("--timeout", "60s")
    assert (done.code, "others have uncordoned it meanwhile" in done.err) == (1, True)


def test_a_cordon_that_is_under_way_at_a_signal_is_undone_by_the_uncordon_after_it(cluster: Cluster) -> None:
    asked = threading.Event()
    go_on = threading.Event()

    def hold(call: Call) -> None:
        if (call.verb, call.path) == ("patch", "nodes") and not asked.is_set():
            asked.set()
            go_on.wait(60)

    cluster.api.before = hold
    process = cluster.start("drain", "--timeout", "60s")
    assert asked.wait(60)
    process.terminate()
    later(0.5, go_on.set)
    code, _, err = _end_of(process)
    assert (code, "is not drained: ended by a signal" in err) == (1, True)
    assert cluster.call("uncordon").out == "node vm-1: uncordoned\n"
    assert (cluster.is_cordoned(), cluster.mark) == (False, None)


@pytest.mark.parametrize("action", ["drain", "uncordon"])
def test_a_name_that_takes_long_to_look_up_does_not_move_the_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    config = json.loads(cluster.kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]
    server |= {"server": server["server"].replace("127.0.0.1", "localhost"), "tls-server-name": "127.0.0.1"}
    cluster.kubeconfig.write_text(json.dumps(config))
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def wait_for_name(*given: Any, **named: Any) -> Any:
        may_answer.wait(60)
        return look_up(*given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", wait_for_name)
    begun_at = time.monotonic()
    done = cluster.call(action, "--timeout", "1s")
    may_answer.set()
    assert (done.code, "no whole answer in time" in done.err) == (1, True)
    assert time.monotonic() - begun_at < 30


@pytest.mark.parametrize("changes", [3, 7])
def test_a_node_that_changes_meanwhile_is_read_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    monkeypatch.setattr(node, "_CONFLICT_SECONDS", (0.01, 0.01))
    conflicts = [409] * changes

    def change(call: Call) -> None:
        nonlocal changes
        if call.verb == "patch" and changes:
            changes -= 1
            found = cluster.node
            labels = {"changes": str(changes)}
            cluster.api.store.update(NODES, {**found, "metadata": {**found["metadata"], "labels": labels}})

    cluster.api.before = change
    assert cluster.drain().code == 0
    assert [one.status for one in cluster.api.seen("patch", "nodes")] == [*conflicts, 200]
    assert cluster.mark == EVENT


def test_a_node_that_changes_all_the_time_is_read_again_until_the_deadline(cluster: Cluster) -> None:
    def refuse(call: Call) -> None:
        if call.verb == "patch":
            raise kube_status.ApiError(409, "the object has been modified", reason="Conflict")

    cluster.api.before = refuse
    done = cluster.drain("--timeout", "3s")
    assert (done.code, "the object has been modified" in done.err) == (1, True)


def test_a_drain_that_was_killed_is_finished_by_the_next(cluster: Cluster) -> None:
    cluster.add_sets(web=10)
    for count in (0, 5):
        reached = threading.Event()
        cluster.api.before = lambda call, count=count, reached=reached: _hold_after(cluster, call, count, reached)  # type: ignore[misc]
        killed = cluster.start("drain", "--timeout", "60s")
        assert reached.wait(30)
        killed.kill()
        killed.communicate(timeout=30)
    cluster.api.before = lambda _: None
    cluster.api.resume()
    done = cluster.drain()
    assert done.code == 0
    assert (cluster.api.pod_names("vm-1"), cluster.mark) == ([], EVENT)


def _hold_after(cluster: Cluster, call: Call, count: int, reached: threading.Event) -> None:
    if is_eviction(call) and cluster.evictions().count(201) >= count:
        reached.set()
        raise ConnectionError("held back")


def test_two_agents_drain_for_one_event_without_an_error(cluster: Cluster) -> None:
    cluster.add_sets(web=6)
    both = [cluster.start("drain", "--timeout", "60s") for _ in range(2)]
    ended = [one.communicate(timeout=60) for one in both]
    assert [one.returncode for one in both] == [0, 0], ended
    assert cluster.mark == EVENT
    both = [cluster.start("uncordon") for _ in range(2)]
    assert [_end_of(one)[0] for one in both] == [0, 0]
    changes = [one.call.body for one in cluster.api.seen("patch", "nodes") if one.status == 200]
    assert [one["spec"]["unschedulable"] for one in changes] == [True, None]


@pytest.mark.nightly
def test_a_thousand_pods_are_read_page_by_page_in_little_memory(cluster: Cluster) -> None:
    peaks = []
    for count in (10, 1000):
        for number in range(count):
            cluster.api.add_pod(f"pod-{count}-{number}", "vm-1", ownerReferences=owned_by("Job"))
        process = cluster.start("drain", "--timeout", "300s")
        reader = threading.Thread(target=process.stdout.read if process.stdout else print)
        reader.start()
        peaks.append(wait_for_peak(process))
        reader.join()
        assert _end_of(process)[0] == 0
        assert cluster.api.pod_names("vm-1") == []
        assert cluster.call("uncordon").code == 0
    assert peaks[1] - peaks[0] < 20
    assert any("continue" in one.call.query for one in cluster.api.seen("list", "pods"))


def test_sigterm_ends_it_although_a_request_waits_for_its_answer(cluster: Cluster) -> None:
    cluster.add_sets(web=2)
    cluster.api.add(budget("web", minAvailable=2))
    process = cluster.start("drain", "--timeout", "10m")
    wait_until(lambda: len(cluster.evictions()) == 2, "both are denied", seconds=60)
    asked = threading.Event()
    cluster.api.before = lambda _: asked.set()
    cluster.api.pause()
    assert asked.wait(60)
    begun_at = time.monotonic()
    process.terminate()
    code, _, err = _end_of(process)
    assert time.monotonic() - begun_at < client.REQUEST_SECONDS / 2
    assert code == 1
    assert "is not drained: ended by a signal; 2 pods left: default/web-" in err
    cluster.api.resume()
    assert cluster.is_cordoned()


@pytest.mark.parametrize(("action", "code"), [("drain", 2), ("uncordon", 1)])
def test_a_node_that_is_another_machine_is_not_changed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, action: str, code: int
) -> None:
    monkeypatch.setattr(node, "_OTHER_MACHINE_SECONDS", 2.5)
    cluster.kubeconfig = cluster.api.kubeconfig(ADMIN)
    cluster.api.add_node("vm-2", boot_id="fd9d7d5a-62f4-4a4c-8e60-b2f3f0a4ee7a")
    found = cluster.api.store.get(NODES, "", "vm-2")
    marked = {**found["metadata"], "annotations": {MARK: "of-another"}}
    cluster.api.store.update(NODES, {**found, "metadata": marked})
    done = cluster.call(action, "--node", "vm-2")
    assert done.code == code
    assert "node vm-2 is another machine" in done.err
    assert {one.call.verb for one in cluster.api.calls} == {"get"}
    assert cluster.call(action, "--node", "vm-2", "--any-node").code == 0


def test_a_kubelet_that_tells_its_boot_late_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scheduled_events_agent import host

    monkeypatch.setattr(node, "_LOOK_AGAIN_SECONDS", 0.3)
    cluster.kubeconfig = cluster.api.kubeconfig(ADMIN)
    cluster.api.add_node("vm-2", boot_id="of the last boot")
    found = cluster.api.store.get(NODES, "", "vm-2")
    fresh = {**found, "status": {**found["status"], "nodeInfo": {"bootID": host.kubelet_boot_id()}}}
    later(1, lambda: cluster.api.store.update(NODES, fresh))
    assert cluster.call("drain", "--node", "vm-2").code == 0


@pytest.mark.parametrize("user", [kubelet("vm-1"), AGENT], ids=["kubelet", "service account"])
def test_the_account_names_the_node(cluster: Cluster, user: User) -> None:
    cluster.kubeconfig = cluster.api.kubeconfig(user, certificate=user.is_kubelet)
    cluster.add_sets(web=2)
    done = cluster.drain("--timeout", "60s")
    assert (done.code, done.result["node"], len(done.result["evicted"])) == (0, "vm-1", 2)


@pytest.mark.nightly
def test_half_of_the_time_that_the_agent_leaves_is_for_the_last_resort(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDULED_EVENT_TIMEOUT_SECONDS", "23")
    monkeypatch.setenv("SCHEDULED_EVENT_TYPE", "Preempt")
    cluster.add_sets(web=2)
    cluster.api.add(budget("web", minAvailable=2))
    done = cluster.drain()
    assert (done.code, len(done.result["deleted"])) == (0, 2)
    first = min(one.at for one in cluster.api.seen("delete", "pods"))
    assert first - cluster.api.calls[0].at == pytest.approx(10, abs=2)


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({}, (), (1800, 0, False)),
        ({"TYPE": "Reboot", "TIMEOUT_SECONDS": "297"}, (), (294, 0, False)),
        ({"TYPE": "Terminate", "TIMEOUT_SECONDS": "297"}, (), (294, 60, True)),
        ({"TYPE": "Preempt", "TIMEOUT_SECONDS": "25"}, (), (22, 11, True)),
        ({"TYPE": "Preempt", "TIMEOUT_SECONDS": "2"}, (), (1, 0.5, True)),
        ({"TYPE": "Preempt", "TIMEOUT_SECONDS": "25"}, ("--timeout=20s", "--last-resort=0s"), (20, 0, True)),
        ({"TYPE": "Preempt"}, ("--bare-pods=leave",), (1800, 60, False)),
    ],
)
def test_the_time_and_what_it_is_for(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    options: tuple[str, ...],
    expected: tuple[float, float, bool],
) -> None:
    seen: list[Any] = []

    class Recorder(drain.Drain):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            seen.append(named)

    monkeypatch.setattr("scheduled_events_agent.cli.kubernetes.Drain", Recorder)
    for name, value in variables.items():
        monkeypatch.setenv(f"SCHEDULED_EVENT_{name}", value)
    begun_at = time.monotonic()
    cluster.drain(*options)
    seconds, last_resort, evicts_bare_pods = expected
    (named,) = seen
    assert begun_at + seconds <= named["deadline"] <= time.monotonic() + seconds
    assert (named["last_resort_seconds"], named["evicts_bare_pods"]) == (last_resort, evicts_bare_pods)
