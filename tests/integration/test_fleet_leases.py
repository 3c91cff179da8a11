"""The fleet's backend in Leases against the stand-in of an API server, over TLS, and what goes wrong there."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kube_status
import pytest
from kube_access import Call, User, kubelet, service_account
from kube_api import KubeApi
from kube_faults import FaultName
from kube_objects import CLUSTER_ROLE_BINDINGS, LEASES, NAMESPACES, Object

from scheduled_events_agent.cli import main
from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.cli.fleet import examine
from scheduled_events_agent.fleet import backend as fleet_backend
from scheduled_events_agent.fleet.backend import BackendError
from scheduled_events_agent.http.errors import parse_date
from scheduled_events_agent.kubernetes import client, leases
from scheduled_events_agent.kubernetes.leases import ANNOTATION, LABEL, LeaseBackend, connect
from scheduled_events_agent.kubernetes.node_status import NodeStatus

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

NAMESPACE = "events"
AGENT = service_account(NAMESPACE, "agent", "vm-1")
VERBS = ("list", "create", "update", "delete")
FIELDS = {"vm": "vm-1", "state": "requested"}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubeApi]:
    """A cluster in which the agent's account has the rights that docs/fleet.md names, and no others."""
    with KubeApi(tmp_path, has_controllers=False) as started:
        started.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        set_verbs(started, *VERBS)
        yield started


def set_verbs(api: KubeApi, *verbs: str) -> None:
    role: Object = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": f"leases-{len(verbs)}"}}
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": [*verbs]}
    subject = {"kind": "ServiceAccount", "name": "agent", "namespace": NAMESPACE}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role["metadata"]["name"]}
    api.add({**role, "kind": "ClusterRole", "rules": [rule]})
    api.add({**role, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]})


class Asked:
    """What a backend reports of its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int | str]] = []

    def __call__(self, method: str, status: int | str, seconds: float) -> None:
        assert seconds >= 0
        self.requests.append((method, status))


def backend(
    api: KubeApi, user: User = AGENT, *, namespace: str = NAMESPACE, group: str = "web", asked: Asked | None = None
) -> LeaseBackend:
    kubeconfig = api.kubeconfig(user, certificate=user.is_kubelet)
    return connect(namespace, group, asked or Asked(), kubeconfig=str(kubeconfig))


def put(store: LeaseBackend, key: str, **fields: str) -> str:
    etag = store.put(key, fields or FIELDS, "")
    assert etag
    return etag


def error_of(call: Callable[[], object]) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call()
    return caught.value


# --- what is written


def test_a_record_is_a_lease_with_its_fields_in_one_annotation(api: KubeApi) -> None:
    put(backend(api), "e|vm-1")
    (lease,) = api.store.list(LEASES)
    metadata = lease["metadata"]
    assert metadata["name"].startswith("sea-")
    assert len(metadata["name"]) == 36
    assert metadata["namespace"] == NAMESPACE
    assert "ownerReferences" not in metadata
    assert [*metadata["labels"]] == [LABEL]
    assert [*metadata["annotations"]] == [ANNOTATION]
    assert json.loads(metadata["annotations"][ANNOTATION]) == {"key": "e|vm-1", "fields": FIELDS}
    assert lease["spec"]["holderIdentity"] == "vm-1"
    assert lease["spec"]["renewTime"].endswith("Z")


def test_each_group_and_each_doctor_has_records_of_its_own(api: KubeApi) -> None:
    kubeconfig = str(api.kubeconfig(AGENT))
    stores = [
        backend(api),
        backend(api, group="db"),
        connect(NAMESPACE, "web", kubeconfig=kubeconfig, partition="doctor"),
    ]
    for number, store in enumerate(stores):
        put(store, "e|vm-1", of=str(number))
    assert [[record.fields for record in store.list()] for store in stores] == [
        [{"of": "0"}], [{"of": "1"}], [{"of": "2"}],
    ]  # fmt: skip


def test_each_write_is_a_change_even_with_the_same_fields(api: KubeApi) -> None:
    store = backend(api)
    first = put(store, "e|vm-1")
    second = store.put("e|vm-1", FIELDS, first)
    assert second not in (None, first)
    assert store.put("e|vm-1", FIELDS, first) is None
    assert [record.etag for record in store.list()] == [second]


def test_a_late_write_does_not_bring_a_deleted_record_back(api: KubeApi) -> None:
    """The API server itself would: it creates what a PUT with a version alone names."""
    store = backend(api)
    etag = put(store, "e|vm-1")
    assert store.delete("e|vm-1", etag)
    assert store.delete("e|vm-1", etag), "it is gone"
    assert store.put("e|vm-1", FIELDS, etag) is None
    assert store.list() == []
    again = put(store, "e|vm-1")
    assert not store.delete("e|vm-1", etag)
    assert [record.etag for record in store.list()] == [again]


def test_it_needs_no_rights_but_those_four(api: KubeApi) -> None:
    asked = Asked()
    store = backend(api, asked=asked)
    etag = store.put("e|vm-1", FIELDS, put(store, "e|vm-1"))
    assert etag
    assert len(store.list()) == 1
    assert store.delete("e|vm-1", etag)
    assert {one.call.verb for one in api.calls} == set(VERBS)
    assert asked.requests == [("POST", 200), ("PUT", 200), ("GET", 200), ("DELETE", 200)]


# --- lists


def test_a_list_is_current_of_this_group_and_in_pages(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LEASES_PER_PAGE", 4)
    store = backend(api)
    for number in range(11):
        put(store, f"e|vm-{number}")
    put(backend(api, group="other"), "e|vm-1")
    api.calls.clear()
    assert sorted(record.key for record in store.list()) == sorted(f"e|vm-{number}" for number in range(11))
    queries = [one.call.query for one in api.calls]
    assert len(queries) == 3
    assert ["continue" in query for query in queries] == [False, True, True]
    assert {query["limit"] for query in queries} == {"4"}
    assert {query["labelSelector"].partition("=")[0] for query in queries} == {LABEL}
    assert not any("resourceVersion" in query for query in queries), "it would come from a cache"


def test_more_than_the_most_records_are_rejected(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_backend, "MAX_RECORDS", 2)
    store = backend(api)
    for number in range(3):
        put(store, f"e|vm-{number}")
    failed = error_of(store.list)
    assert (failed.kind, str(failed)) == ("bad_response", "more than 2 records: fleet|web")


def test_records_of_nodes_that_are_gone_keep_no_group_from_going_on(
    api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that are gone leave theirs; those that remain must be able to list the group, and to delete them."""
    monkeypatch.setattr(fleet_backend, "MAX_RECORDS", 2)
    monkeypatch.setattr(leases, "_LEASES_PER_PAGE", 1)
    store = backend(api)
    for number in range(4):
        put(store, f"gone|vm-{number}")
    monkeypatch.setattr(leases, "_age", lambda *_: 86_401.0)
    found = store.list()
    assert [(record.is_old, record.key.partition("|")[0]) for record in found] == [(True, "gone")] * 2


def test_a_list_that_takes_too_long_is_given_up(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LEASES_PER_PAGE", 1)
    monkeypatch.setattr(leases, "_LIST_SECONDS", 0.0)
    store = backend(api)
    for number in range(3):
        put(store, f"e|vm-{number}")
    assert error_of(store.list).kind == "timeout"


def test_leases_of_others_are_no_records(api: KubeApi) -> None:
    store = backend(api)
    put(store, "e|vm-1")
    (lease,) = api.store.list(LEASES)
    (annotation,) = lease["metadata"]["annotations"].values()

    def add(name: str, annotations: dict[str, str] | None) -> None:
        metadata = {"name": name, "namespace": NAMESPACE, "labels": lease["metadata"]["labels"]}
        if annotations is not None:
            metadata["annotations"] = annotations
        api.add({"apiVersion": lease["apiVersion"], "kind": "Lease", "metadata": metadata, "spec": {}})

    add("no-annotation", None)
    add("another-annotation", {"row": "1"})
    add("no-json", {ANNOTATION: "{"})
    add("no-record", {ANNOTATION: '{"key": 1, "fields": []}'})
    add("the-key-of-another", {ANNOTATION: annotation})
    assert [record.key for record in store.list()] == ["e|vm-1"]


# --- ages


def _listed(**metadata: Any) -> Any:
    whole = {"name": "x", "uid": "u", "resourceVersion": "1", **metadata}
    return leases._LEASE_LIST.decode(
        json.dumps({"kind": "LeaseList", "metadata": {}, "items": [{"metadata": whole}]})
    ).items[0].metadata  # fmt: skip


@pytest.mark.parametrize(
    ("times", "date", "age"),
    [
        (["2026-03-02T12:00:00Z"], "Mon, 02 Mar 2026 12:01:30 GMT", 90.0),
        (["2026-03-02T12:00:00Z", "2026-03-02T12:01:00Z", None], "Mon, 02 Mar 2026 12:01:30 GMT", 30.0),
        (["2026-03-02T12:00:01Z"], "Mon, 02 Mar 2026 12:00:00 GMT", 0.0),
        (["2026-03-02T12:00:00Z"], "", None),
        (["2026-03-02T12:00:00Z"], f"Mon, 02 Mar {10**20} 12:01:30 GMT", None),
        (["2026-03-02T12:00:00Z"], "Mon, 02 Mar 2026 12:01:30 -0000", None),
        (["2026-03-02T12:00:00Z"], "Mon, 02 Mar 2026 12:01:30 GMT+01:00", None),
        (["2026-03-02T12:00:00"], "Mon, 02 Mar 2026 12:01:30 GMT", None),
        (["soon"], "Mon, 02 Mar 2026 12:01:30 GMT", None),
        ([None], "Mon, 02 Mar 2026 12:01:30 GMT", None),
        ([], "Mon, 02 Mar 2026 12:01:30 GMT", None),
    ],
)
def test_a_record_is_as_old_as_the_newest_write_says(
    times: list[str | None], date: str, age: float | None
) -> None:
    entries = [{"manager": "x"} if time is None else {"manager": "x", "time": time} for time in times]
    managed = _listed(managedFields=entries) if times else _listed()
    assert leases._age(managed.managed_fields, parse_date(date)) == age


def test_ages_go_by_the_clock_of_the_api_server(api: KubeApi) -> None:
    store = backend(api)
    assert store.clock_skew_seconds is None
    put(store, "e|vm-1")
    (record,) = store.list()
    assert record.age is not None
    assert 0 <= record.age < 60
    assert store.clock_skew_seconds is not None
    assert abs(store.clock_skew_seconds) < 60


# --- what goes wrong


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("too many requests", "throttled", "the API server answers 429"),
        ("bad gateway", "bad_response", "the API server answers 502"),
        ("webhook 500", "bad_response", "the API server answers 500: admission webhook"),
        ("webhook 422", "bad_response", "the API server answers 422: admission webhook"),
        ("webhook 403", "denied", "this account may not list Leases in the namespace events: admission webhook"),
        (
            "unauthorized",
            "denied",
            "this account may not list Leases in the namespace events: the API server does",
        ),
        ("web page", "bad_response", "the API server's answer is not one of Kubernetes"),
        ("endless", "bad_response", "over 8 MiB"),
        ("broken off", "unreachable", "the API server: "),
        ("trickle", "timeout", "no whole answer in time"),
    ],
)
def test_an_answer_that_is_no_list_is_an_error(
    api: KubeApi, monkeypatch: pytest.MonkeyPatch, fault: FaultName, kind: str, words: str
) -> None:
    asked = Asked()
    store = backend(api, asked=asked)
    if fault == "trickle":
        monkeypatch.setattr(client, "REQUEST_SECONDS", 0.5)
    api.go_wrong(fault)
    failed = error_of(store.list)
    assert (failed.kind, words in str(failed)) == (kind, True), str(failed)
    assert failed.retry_after == {"too many requests": 3.0, "unauthorized": 5.0}.get(fault, 0.0)
    assert (len(api.calls), len(asked.requests)) == (1, 1), "it is not asked again here"
    with pytest.raises(client.ApiError) as of_node:
        NodeStatus(store._client, "vm-1", "").read()
    # Attention lists the API server once: it tells by this that both have failed for one reason.
    assert str(failed).endswith(str(of_node.value))
    api.recover()
    assert store.list() == []


@pytest.mark.parametrize("kind", ["LeaseList", "PodList"])
def test_an_answer_about_something_else_is_an_error(
    api: KubeApi, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = backend(api)
    put(store, "e|vm-1")
    answer = api.lists.answer
    monkeypatch.setattr(api.lists, "answer", lambda *args, **options: {**answer(*args, **options), "kind": kind})
    if kind == "LeaseList":
        assert len(store.list()) == 1
    else:
        assert error_of(store.list).kind == "bad_response"


@pytest.mark.parametrize("after", ["301", "999999999"])
def test_the_retry_pause_is_at_most_five_minutes(api: KubeApi, after: str) -> None:
    def refuse(_: Call) -> None:
        raise kube_status.ApiError(503, "busy", reason="ServiceUnavailable", retry_after_seconds=int(after))

    api.before = refuse
    failed = error_of(backend(api).list)
    assert (failed.kind, failed.retry_after) == ("throttled", 300.0)


@pytest.mark.parametrize("verb", VERBS)
def test_a_right_that_is_missing_is_named(api: KubeApi, verb: str) -> None:
    api.store.remove(*_role(api))
    set_verbs(api, *(one for one in VERBS if one != verb))
    store = backend(api)
    etag = "9d7a231c-345a-4a1a-82c8-a116945e7604 1"
    calls: dict[str, Callable[[], object]] = {
        "list": store.list,
        "create": lambda: store.put("e|vm-1", FIELDS, ""),
        "update": lambda: store.put("e|vm-1", FIELDS, etag),
        "delete": lambda: store.delete("e|vm-1", etag),
    }
    for name, call in calls.items():
        if name == verb:
            failed = error_of(call)
            assert failed.kind == "denied"
            assert str(failed).startswith(
                f"this account may not {verb} Leases in the namespace events: leases.coord"
            )
        else:
            call()


def _role(api: KubeApi) -> Any:
    return CLUSTER_ROLE_BINDINGS, api.store.list(CLUSTER_ROLE_BINDINGS)[0]


def test_the_account_of_a_kubelet_may_not(api: KubeApi) -> None:
    failed = error_of(backend(api, kubelet("vm-1")).list)
    assert failed.kind == "denied"
    assert "can only access leases in the" in str(failed)


def test_a_namespace_that_is_not_there_is_named(api: KubeApi) -> None:
    store = backend(api, namespace="nosuch")
    assert store.list() == [], "an API server finds none"
    failed = error_of(lambda: store.put("e|vm-1", FIELDS, ""))
    assert (failed.kind, str(failed)) == (
        "not_found", 'there is no namespace nosuch: namespaces "nosuch" not found',
    )  # fmt: skip


def test_a_namespace_that_goes_takes_no_new_records(api: KubeApi) -> None:
    space = api.store.get(NAMESPACES, "", NAMESPACE)
    going = {**space, "metadata": {**space["metadata"], "deletionTimestamp": "2026-03-02T12:00:00Z"}}
    api.store.update(NAMESPACES, going)
    failed = error_of(lambda: backend(api).put("e|vm-1", FIELDS, ""))
    assert failed.kind == "not_found", "its records are gone when it is made anew"
    assert str(failed).startswith(f"there is no namespace {NAMESPACE}: ")
    assert "because it is being terminated" in str(failed)


def test_an_api_server_that_is_away_is_unreachable(api: KubeApi) -> None:
    store = backend(api)
    api.stop()
    assert error_of(store.list).kind == "unreachable"
    api.start()
    assert store.list() == []


def test_a_token_is_read_for_each_request(api: KubeApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(api.access.issue_token(AGENT))
    config = json.loads(api.kubeconfig(AGENT).read_text())
    config["users"][0]["user"] = {"tokenFile": str(token)}
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(json.dumps(config))
    store = connect(NAMESPACE, "web", kubeconfig=str(kubeconfig))
    assert store.list() == []
    api.access.revoke_token(token.read_text())
    assert error_of(store.list).kind == "denied"
    token.write_text(api.access.issue_token(AGENT))
    assert store.list() == []
    token.unlink()
    asked = Asked()
    store._on_request = asked
    failed = error_of(store.list)
    assert (failed.kind, asked.requests) == ("setup", [])
    assert str(token) in str(failed)


# --- the account, and the namespace


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_account")
def test_in_a_pod_its_account_and_its_namespace_are_used(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = api.url.removeprefix("https://").rpartition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    mounted = tmp_path / "serviceaccount"
    mounted.mkdir()
    (mounted / "token").write_text(api.access.issue_token(AGENT))
    (mounted / "ca.crt").write_bytes(api.authority.ca.read_bytes())
    assert error_of(lambda: connect("", "web", mounted=mounted)).kind == "setup"
    (mounted / "namespace").write_text(NAMESPACE)
    put(connect("", "web", mounted=mounted), "e|vm-1")
    assert [lease["metadata"]["namespace"] for lease in api.store.list(LEASES)] == [NAMESPACE]


@pytest.mark.usefixtures("no_account")
def test_without_an_account_or_a_namespace_it_says_what_to_do(api: KubeApi, tmp_path: Path) -> None:
    failed = error_of(lambda: connect(NAMESPACE, "web"))
    assert failed.kind == "setup"
    assert "there is no account for the cluster" in str(failed)
    kubeconfig = str(api.kubeconfig(AGENT))
    failed = error_of(lambda: connect("", "web", kubeconfig=kubeconfig, mounted=tmp_path / "nosuch"))
    assert failed.kind == "setup"
    assert str(failed).startswith("fleet.leases names no namespace, and this is not a pod that has one: ")


@pytest.mark.usefixtures("no_account")
def test_the_folder_of_credentials_that_hooks_get_has_an_account(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "credentials"
    directory.mkdir()
    (directory / "kubeconfig").write_bytes(api.kubeconfig(AGENT).read_bytes())
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    assert connect(NAMESPACE, "web").list() == []


# --- commands


@pytest.fixture
def policy(api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(AGENT)))
    file = tmp_path / "policy.yaml"
    file.write_text(
        f"vm: {{name: vm-1}}\nrules: []\nfleet: {{group: web, leases: {NAMESPACE}, max_events: 1}}\n", "utf-8"
    )
    return file


def test_fleet_status_shows_the_records(api: KubeApi, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"id": "E1", "vm_id": "id", "not_before": "2026-03-02T12:00:00Z", "renew_seconds": "60"}
    put(backend(api), "e|vm-1", **FIELDS, **fields)
    assert main(["fleet", "status", "--config", str(policy)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Group web, in Leases of the namespace events: 0 of 1 slots taken"
    assert "vm-1  requested, heard" in shown[2]
    assert main(["fleet", "status", "--json", "--config", str(policy)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["table"], told["leases"], len(told["events"])) == ("", NAMESPACE, 1)


def test_fleet_status_names_what_is_missing(
    api: KubeApi, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.store.remove(*_role(api))
    assert main(["fleet", "status", "--config", str(policy)]) == 1
    told = capsys.readouterr().err
    assert "this account may not list Leases in the namespace events" in told
    assert "docs/fleet.md has the rights that the account needs" in told


def test_fleet_release_deletes_what_is_silent(
    api: KubeApi, policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend(api), "e|vm-1", **FIELDS, id="E1", renew_seconds="20")
    assert main(["fleet", "release", "E1", "--config", str(policy)]) == 1
    assert "vm-1 was heard" in capsys.readouterr().err
    monkeypatch.setattr(leases, "_age", lambda *_: 3600.0)
    assert main(["fleet", "release", "E1", "--config", str(policy)]) == 0
    assert api.store.list(LEASES) == []


def _examined(policy: Path) -> tuple[str, str]:
    settings = load_policy(policy).settings
    assert settings.fleet is not None
    found = examine(settings, settings.fleet, None)
    return found.state, found.message


def test_doctor_tries_each_right_and_leaves_nothing(api: KubeApi, policy: Path) -> None:
    expected = "group web: Leases of the namespace events can be read, written and deleted from"
    assert _examined(policy) == ("ok", expected)
    assert {one.call.verb for one in api.calls} == set(VERBS)
    assert api.store.list(LEASES) == []
    api.store.remove(*_role(api))
    set_verbs(api, "list", "create", "delete")
    state, message = _examined(policy)
    assert state == "error"
    assert message.startswith("this account may not update Leases in the namespace events")
    assert api.store.list(LEASES) == []


def test_check_says_where_the_records_are(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(policy)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "It acts with the VMs of group web through Leases of the namespace events, 1 event at a time." in told
    policy.write_text(policy.read_text("utf-8").replace(f"leases: {NAMESPACE}", "leases: ''"), "utf-8")
    assert main(["check", "--config", str(policy)]) == 0
    assert "through Leases of its pod's namespace" in " ".join(capsys.readouterr().out.split())


_LOADED = """
import sys
from scheduled_events_agent.cli import fleet
from scheduled_events_agent.daemon.fleet import connect
from scheduled_events_agent.policy.load import parse_settings
settings = parse_settings(sys.argv[1], "policy.yaml").settings
from scheduled_events_agent.fleet import backend as fleet_backend
from scheduled_events_agent.fleet.backend import BackendError
try:
    connect(settings, settings.fleet, "web")
except BackendError as error:
    assert error.kind == "setup", error
print(*sys.modules)
"""


@pytest.mark.usefixtures("no_account")
@pytest.mark.parametrize(
    ("store", "loaded"),
    [("table: 'https://a.example/abc'", "fleet.table"), ("leases: events", "kubernetes.leases")],
)
def test_only_the_backend_that_the_policy_names_is_loaded(store: str, loaded: str) -> None:
    command = [sys.executable, "-c", _LOADED, f"fleet: {{{store}, max_events: 1}}"]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    names = ("fleet.table", "kubernetes", "kubernetes.leases")
    of_stores = {name for name in names if f"scheduled_events_agent.{name}" in modules}
    assert of_stores == {loaded, loaded.partition(".")[0]} - {"fleet"}
