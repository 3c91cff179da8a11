"""The Helm chart with Helm itself: what it renders, by the schemas of Kubernetes, and what it refuses.

Helm is a library here, the code behind the command. No cluster is asked.
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("the chart is packed on Linux", allow_module_level=True)

import helm_chart
from helm_chart import ACCESS_VALUES, NAMESPACE, RELEASE, ChartError, Helm, Object, access, recorded_access
from test_prometheus import programs, promtool

from scheduled_events_agent import __version__
from scheduled_events_agent.cli import main
from scheduled_events_agent.policy.settings import AgentSettings

__all__ = ["programs"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "packaging/helm/scheduled-events-agent"
PODMONITOR = Path(__file__).with_name("chart_podmonitor.yaml")
RECORDED = ROOT / "tests/kube_api/recorded/service-account-and-policy.json"
TAG = f"1.2.3@sha256:{'0' * 64}"
Values = dict[str, Any]
NODE = {"condition": True, "lifecycle_conditions": False, "events": True}
NO_NODE = {"condition": False, "lifecycle_conditions": False, "events": False}
EVENTS = {"name": "kubernetes", "format": "kubernetes"}
ADDED = {"kubernetes": NODE, "notify": [EVENTS]}
"""What the default values add to a policy."""
LEAST: Values = {
    "lastResort": False,
    "restrictToOwnNode": False,
    "node": NO_NODE,
    "resources": {"requests": None, "limits": None},
    "nodeSelector": {"kubernetes.io/os": None},
    "tolerations": [],
    "affinity": {"nodeAffinity": None},
    "serviceAccount": {"create": False, "name": "existing"},
}
ALL: Values = {
    "image": {
        "repository": "registry.example.com/agent",
        "tag": TAG,
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "registry"}],
    "policy": {
        "rules": [{"name": "short", "when": {"type": "Freeze", "duration_below": "9s"}, "approve": "immediately"}],
        "notify": [{"name": "ops", "to": {"file": "/credentials/url"}, "on": ["held"]}],
    },
    "aks": False,
    "lastResort": True,
    "restrictToOwnNode": True,
    "node": {"condition": True, "lifecycle_conditions": True, "events": True},
    "fleet": {"enabled": True, "group": "web", "maxEvents": 2},
    "monitoring": {"podMonitor": True, "rules": True},
    "secret": "notifications",
    "hooks": "my-hooks",
    "statePath": "/srv/agent",
    "resources": {"limits": {"cpu": "1"}},
    "nodeSelector": {"pool": "spot"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "podAnnotations": {"example.com/team": "ops", "checksum/policy": "mine"},
    "podLabels": {"team": "ops", "app.kubernetes.io/name": "mine"},
    "serviceAccount": {"create": True, "name": "drainer"},
    "nameOverride": "events",
    "fullnameOverride": "node-events",
}
LIFECYCLE: Values = {"node": {"lifecycle_conditions": True}}
SETS: dict[str, Values] = {
    "default": {},
    "all": ALL,
    "least": LEAST,
    "aks": {"aks": True},
    "lifecycle": LIFECYCLE,
    "aks-lifecycle": {"aks": True, **LIFECYCLE},
    "fleet": {"fleet": {"enabled": True}},
}
DEFAULT_KINDS = [
    "ClusterRole",
    "ClusterRoleBinding",
    "ConfigMap",
    "DaemonSet",
    "Role",
    "RoleBinding",
    "ServiceAccount",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
]
FLEET_KINDS = ["Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]


@pytest.fixture(scope="module")
def helm() -> Helm:
    return helm_chart.install()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helm_chart.pack(tmp_path_factory.mktemp("chart"))


class Rendered:
    """The objects of one rendering, by kind."""

    def __init__(self, helm: Helm, archive: Path, values: Mapping[str, Any], name: str = RELEASE) -> None:
        self.objects, self.notes = helm.render(archive, values, name=name)
        self.kinds = sorted(one["kind"] for one in self.objects)

    def one(self, kind: str) -> Object:
        (found,) = self.all(kind)
        return found

    def all(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    @property
    def policy(self) -> str:
        text: str = self.one("ConfigMap")["data"]["policy.yaml"]
        return text

    @property
    def pod(self) -> Object:
        spec: Object = self.one("DaemonSet")["spec"]["template"]["spec"]
        return spec

    @property
    def agent(self) -> Object:
        (container,) = self.pod["containers"]
        found: Object = container
        return found


@pytest.fixture(scope="module")
def rendered(helm: Helm, archive: Path) -> dict[str, Rendered]:
    return {name: Rendered(helm, archive, values) for name, values in SETS.items()}


# --- what is rendered


def test_the_set_of_all_values_has_each_of_them() -> None:
    assert list(ALL) == list(yaml.safe_load((SOURCES / "values.yaml").read_text("utf-8")))


def test_the_objects_are_those_that_the_values_ask_for(rendered: dict[str, Rendered]) -> None:
    kinds = {name: one.kinds for name, one in rendered.items()}
    assert kinds == {
        "default": DEFAULT_KINDS,
        "aks": DEFAULT_KINDS,
        "lifecycle": DEFAULT_KINDS,
        "aks-lifecycle": DEFAULT_KINDS,
        "fleet": sorted([*DEFAULT_KINDS, *FLEET_KINDS]),
        "all": sorted([*DEFAULT_KINDS, *FLEET_KINDS, "PodMonitor", "PrometheusRule"]),
        "least": ["ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet"],
    }


@pytest.mark.parametrize("name", SETS)
def test_each_object_is_valid_for_the_oldest_and_the_newest_kubernetes(
    helm: Helm, rendered: dict[str, Rendered], name: str
) -> None:
    objects = [one for one in rendered[name].objects if not one["apiVersion"].startswith("monitoring.coreos.com/")]
    assert helm.problems(objects, "1.30") == []
    assert helm.problems(objects) == []


def test_a_release_may_have_a_number_for_its_name(helm: Helm, archive: Path) -> None:
    assert helm.problems(Rendered(helm, archive, {}, "123").objects) == []


def test_the_schemas_are_strict(helm: Helm, rendered: dict[str, Rendered]) -> None:
    wrong = json.loads(json.dumps(rendered["default"].one("DaemonSet")))
    wrong["spec"]["template"]["spec"]["hostNetworks"] = True
    (problem,) = helm.problems([wrong], "1.30")
    assert "'hostNetworks' was unexpected" in problem


def test_what_is_in_a_namespace_is_in_that_of_the_release_or_where_events_are(
    rendered: dict[str, Rendered],
) -> None:
    cluster = (
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    )
    for one in rendered["all"].objects:
        expected = None if one["kind"] in cluster else NAMESPACE
        if one["metadata"]["name"] == "node-events-events":
            expected = "default"
        assert one["metadata"].get("namespace") == expected, one["kind"]


def test_names_follow_the_release_and_the_overrides(
    helm: Helm, archive: Path, rendered: dict[str, Rendered]
) -> None:
    def name(values: Values, release: str) -> str:
        found: str = Rendered(helm, archive, values, release).one("DaemonSet")["metadata"]["name"]
        return found

    assert name({}, "scheduled-events-agent") == "scheduled-events-agent"
    assert name({}, "maintenance") == "maintenance-scheduled-events-agent"
    assert name({"nameOverride": "events"}, "maintenance") == "maintenance-events"
    assert name({"fullnameOverride": "node-events"}, "maintenance") == "node-events"
    binding = rendered["all"].one("ClusterRoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "drainer", "namespace": NAMESPACE}]
    assert rendered["all"].one("ServiceAccount")["metadata"]["name"] == "drainer"
    assert rendered["all"].pod["serviceAccountName"] == "drainer"
    assert rendered["least"].pod["serviceAccountName"] == "existing"


def test_own_labels_and_annotations_replace_none_of_the_charts(rendered: dict[str, Rendered]) -> None:
    spec = rendered["all"].one("DaemonSet")["spec"]
    metadata = spec["template"]["metadata"]
    assert metadata["labels"] == {**spec["selector"]["matchLabels"], "team": "ops"}
    assert metadata["annotations"]["example.com/team"] == "ops"
    assert re.fullmatch(r"[0-9a-f]{64}", metadata["annotations"]["checksum/policy"])


def test_a_rollout_replaces_a_tenth_of_the_pods_at_a_time(rendered: dict[str, Rendered]) -> None:
    strategy = rendered["default"].one("DaemonSet")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}


def test_a_changed_policy_and_nothing_else_changes_the_checksum(helm: Helm, archive: Path) -> None:
    def checksum(values: Values) -> str:
        template = Rendered(helm, archive, values).one("DaemonSet")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["checksum/policy"]
        return found

    default = checksum({})
    assert checksum({"lastResort": False}) == default
    assert len({default, checksum({"aks": True}), checksum({"policy": {"rules": []}})}) == 3


def test_the_linter_asks_for_an_icon_and_for_nothing_else(helm: Helm, archive: Path) -> None:
    found = helm.lint(archive)
    assert (found["total_charts_linted"], found["errors"]) == (1, [])
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


def test_the_notes_are_three_commands(rendered: dict[str, Rendered]) -> None:
    lines = rendered["default"].notes.strip().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["The agents", "The policy", "An event"]
    assert all(f"kubectl -n {NAMESPACE} " in line for line in lines)


# --- the pod, held to the image


def test_the_pod_runs_as_the_image_wants_it(rendered: dict[str, Rendered]) -> None:
    image = (ROOT / "packaging/container/Containerfile").read_text("utf-8")
    (user,) = re.findall(r"^USER (\d+):\1$", image, re.MULTILINE)
    (state,) = re.findall(r"^VOLUME (\S+)$", image, re.MULTILINE)
    (policy,) = re.findall(r"^COPY config/policy.yaml (\S+)/policy.yaml$", image, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", image, re.MULTILINE)
    for one in rendered.values():
        security = one.pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert {security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        mounts = {mount["name"]: mount for mount in one.agent["volumeMounts"]}
        assert mounts["state"] == {"name": "state", "mountPath": state}
        assert mounts["policy"] == {"name": "policy", "mountPath": policy, "readOnly": True}
        assert json.loads(command) == ["run", "--stop-timeout", "60s"]
        assert one.agent["args"][:3] == json.loads(command)
        assert "command" not in one.agent  # the image's entry point
        assert one.pod["terminationGracePeriodSeconds"] == 75
        assert one.pod["hostNetwork"] is True
        assert one.pod["priorityClassName"] == "system-node-critical"
        assert one.agent["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        (prepares,) = one.pod["initContainers"]
        assert prepares["command"][-1] == f"chown {user}:{user} /state && chmod 0700 /state"
        assert prepares["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
        assert prepares["image"] == one.agent["image"]


def test_the_image_is_the_charts_version_unless_a_tag_is_given(rendered: dict[str, Rendered]) -> None:
    assert rendered["default"].agent["image"].endswith(f"/scheduled-events-agent:{__version__}")
    assert rendered["all"].agent["image"] == f"registry.example.com/agent:{TAG}"


def test_probes_ask_where_the_agent_listens(rendered: dict[str, Rendered]) -> None:
    port = int(AgentSettings().listen.rpartition(":")[2])
    for name, listens, host in (("default", "127.0.0.1", "127.0.0.1"), ("all", "$(NODE_IP)", None)):
        one = rendered[name].agent
        assert one["args"][3:] == ["--listen", f"{listens}:{port}"]
        for probe in (one["startupProbe"], one["livenessProbe"]):
            asked = probe["httpGet"]
            assert (asked.get("host"), asked["port"], asked["path"]) == (host, port, "/status")
            assert asked["scheme"] == "HTTP"
        assert one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"] == 180
    fields = {
        variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in rendered["default"].agent["env"]
    }
    assert fields == {"KUBERNETES_NODE": "spec.nodeName", "NODE_IP": "status.hostIP"}


def test_with_tls_in_the_policy_the_pages_are_asked_for_by_https(helm: Helm, archive: Path) -> None:
    tls = {"policy": {"agent": {"web_config": "/credentials/web.yml"}}, "monitoring": {"podMonitor": True}}
    one = Rendered(helm, archive, tls)
    assert one.agent["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert one.one("PodMonitor")["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


def test_a_secret_and_hooks_are_mounted_where_the_values_say(rendered: dict[str, Rendered]) -> None:
    one = rendered["all"]
    volumes = {volume["name"]: volume for volume in one.pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in one.agent["volumeMounts"]}
    assert volumes["credentials"]["secret"] == {"secretName": "notifications", "defaultMode": 0o440}
    assert volumes["hooks"]["configMap"] == {"name": "my-hooks", "defaultMode": 0o555}
    assert volumes["state"]["hostPath"] == {"path": "/srv/agent", "type": "DirectoryOrCreate"}
    assert volumes["policy"]["configMap"] == {"name": one.one("ConfigMap")["metadata"]["name"]}
    assert (mounts["credentials"], mounts["hooks"]) == ("/credentials", "/hooks")
    assert {"name": "CREDENTIALS_DIRECTORY", "value": "/credentials"} in one.agent["env"]
    assert rendered["default"].pod["volumes"][0]["hostPath"]["path"] == "/var/lib/scheduled-events-agent"
    assert len(rendered["default"].pod["volumes"]) == 2


# --- the policy


@pytest.mark.parametrize("name", SETS)
def test_check_accepts_the_policy(
    rendered: dict[str, Rendered], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_accepted(rendered[name].policy, tmp_path, capsys)


def is_accepted(policy: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether check finds neither an error nor a warning."""
    file = directory / "policy.yaml"
    file.write_text(policy, encoding="utf-8")
    code = main(["check", "--strict", "--no-files", "--json", "--config", str(file)])
    said = json.loads(capsys.readouterr().out)
    assert (said["errors"], said["warnings"]) == ([], [])
    return code == 0


def test_the_policies_are_those_of_config_and_what_the_values_add(rendered: dict[str, Rendered]) -> None:
    for name, source, added in (
        ("default", "kubernetes-node.yaml", ADDED),
        ("aks", "aks-node.yaml", ADDED),
        ("least", "kubernetes-node.yaml", {}),
        (
            "fleet",
            "kubernetes-node.yaml",
            {**ADDED, "fleet": {"leases": NAMESPACE, "group": "nodes", "max_events": 1}},
        ),
    ):
        text = (ROOT / "config/examples" / source).read_text("utf-8")
        assert text.partition("\n#\n")[2].strip() in rendered[name].policy  # with its comments
        assert yaml.safe_load(rendered[name].policy) == {**yaml.safe_load(text), **added}


@pytest.mark.parametrize("source", ["", "aks-"])
def test_with_lifecycle_conditions_the_charts_hooks_tell_theirs(
    rendered: dict[str, Rendered], source: str
) -> None:
    before = yaml.safe_load(rendered["aks" if source else "default"].policy)
    after = yaml.safe_load(rendered[f"{source}lifecycle"].policy)
    for hook in before["hooks"].values():
        hook["run"].append("--conditions")
    assert after == {**before, "kubernetes": {**NODE, "lifecycle_conditions": True}}


def test_a_policy_that_is_given_gets_the_sections_too(
    helm: Helm, archive: Path, rendered: dict[str, Rendered]
) -> None:
    def policy(policy: Values, **values: Any) -> Any:
        return yaml.safe_load(Rendered(helm, archive, {"policy": policy, **values}).policy)

    given = ALL["policy"]
    assert yaml.safe_load(rendered["all"].policy) == {
        "rules": given["rules"],
        "notify": [*given["notify"], EVENTS],
        "kubernetes": ALL["node"],
        "fleet": {"leases": NAMESPACE, "group": "web", "max_events": 2},
    }
    rules = {"rules": given["rules"]}
    assert policy(rules) == {**rules, **ADDED}
    assert policy(given, node={"events": False}) == {**given, "kubernetes": {**NODE, "events": False}}
    mine = {**rules, "notify": [{"name": "node", "format": "kubernetes", "on": ["held"]}]}
    assert policy(mine) == {**mine, "kubernetes": NODE}  # it has one
    whole = {**rules, "kubernetes": {"events": False}, "fleet": {"group": "web", "leases": "fleet"}}
    assert policy(whole, node=NO_NODE) == whole


def test_a_fleet_may_have_the_groups_of_the_scale_sets_and_no_limit(helm: Helm, archive: Path) -> None:
    values = {"fleet": {"enabled": True, "group": "", "maxEvents": None}}
    assert yaml.safe_load(Rendered(helm, archive, values).policy)["fleet"] == {"leases": NAMESPACE}


def test_the_policy_of_the_readme_is_rendered_and_accepted(
    helm: Helm, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(
        r"^```yaml\n(.*?)^```", (SOURCES / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    one = Rendered(helm, archive, yaml.safe_load(block))
    assert is_accepted(one.policy, tmp_path, capsys)
    assert one.pod["volumes"][-1]["secret"]["secretName"] == "notifications"


# --- what is refused


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"polcy": {}}, "polcy"),
        ({"image": {"name": "x"}}, "name"),
        ({"monitoring": {"serviceMonitor": True}}, "serviceMonitor"),
        ({"aks": "yes"}, "aks"),
        ({"policy": "rules: []"}, "policy"),
        ({"statePath": "state"}, "statePath"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"podLabels": {"team": 1}}, "team"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name: name the account"),
        (
            {"aks": True, "policy": {"rules": []}},
            "policy replaces the whole policy, and so that of aks: true; give one of the two",
        ),
        ({"node": {"lifecycleConditions": True}}, "lifecycleConditions"),
        ({"policy": {"notify": [None]}}, "'/policy/notify/0': got null, want object"),
        ({"policy": {"agent": None}}, "'/policy/agent': got null, want object"),
        ({"fleet": {"leases": "web"}}, "leases"),
        ({"fleet": {"group": "a b"}}, "group"),
        ({"fleet": {"maxEvents": 0}}, "maxEvents"),
        ({"policy": {"kubernetes": {}}}, "policy.kubernetes is what the value node adds"),
        ({"policy": {"fleet": {}}, "fleet": {"enabled": True}}, "policy.fleet is what the value fleet adds"),
        (
            {"policy": {"notify": [{"name": "kubernetes", "to": "https://example.com/"}]}},
            "policy.notify has a target kubernetes",
        ),
    ],
)
def test_wrong_values_are_refused(helm: Helm, archive: Path, values: Values, words: str) -> None:
    with pytest.raises(ChartError) as refused:
        helm.render(archive, values)
    assert words in str(refused.value)


# Helm leaves out what is null in the values.
NULL_IS_NONE = {
    "imagePullSecrets", "secret", "hooks", "resources", "nodeSelector", "tolerations", "affinity", "nameOverride",
    "fullnameOverride", "image.tag", "image.pullPolicy", "fleet.group", "fleet.maxEvents", "serviceAccount.name",
    "resources.requests", "resources.limits", "nodeSelector.kubernetes.io/os", "affinity.nodeAffinity",
}  # fmt: skip


def nulls() -> dict[str, tuple[Values, str]]:
    """Each value as null: the values, and where Helm finds that it is missing."""
    found: dict[str, tuple[Values, str]] = {}
    for key, value in yaml.safe_load((SOURCES / "values.yaml").read_text("utf-8")).items():
        found[key] = {key: None}, f"at '': missing property '{key}'"
        for name in value if isinstance(value, dict) else ():
            found[f"{key}.{name}"] = {key: {name: None}}, f"at '/{key}': missing property '{name}'"
    return found


@pytest.mark.parametrize(("name", "case"), nulls().items(), ids=nulls())
def test_null_is_none_or_refused_with_the_name_of_the_value(
    helm: Helm, archive: Path, name: str, case: tuple[Values, str]
) -> None:
    values, words = case
    if name in NULL_IS_NONE:
        assert helm.problems(helm.render(archive, values)[0]) == []
        return
    with pytest.raises(ChartError) as refused:
        helm.render(archive, values)
    assert words in str(refused.value)


@pytest.mark.parametrize("namespace", ["kube-system", "kube-node-lease"])
def test_a_fleet_is_refused_where_the_clusters_own_leases_are(helm: Helm, archive: Path, namespace: str) -> None:
    helm.render(archive, namespace=namespace)
    with pytest.raises(ChartError) as refused:
        helm.render(archive, {"fleet": {"enabled": True}}, namespace=namespace)
    assert f"not for the namespace {namespace}: the agent may change Leases" in str(refused.value)


# --- rights


@pytest.mark.parametrize("name", ["chart_access", "chart_access_fleet"])
def test_the_recorded_rights_are_those_of_the_chart(
    helm: Helm, archive: Path, name: Literal["chart_access", "chart_access_fleet"]
) -> None:
    assert access(Rendered(helm, archive, ACCESS_VALUES[name]).objects) == recorded_access(name)


def test_rights_come_with_the_values(helm: Helm, archive: Path) -> None:
    def verbs(**values: Any) -> dict[str, list[str]]:
        rendered = Rendered(helm, archive, {**LEAST, **values})
        roles = [*rendered.all("ClusterRole"), *rendered.all("Role")]
        bound = [(one["roleRef"]["kind"], one["roleRef"]["name"]) for one in rendered.objects if "roleRef" in one]
        assert sorted(bound) == sorted((one["kind"], one["metadata"]["name"]) for one in roles)
        return {
            f"{one['metadata'].get('namespace', '')}/{rule['resources'][0]}": rule["verbs"]
            for one in roles
            for rule in one["rules"]
        }

    least = {"/nodes": ["get", "patch"], "/pods": ["list"], "/pods/eviction": ["create"]}
    assert verbs() == least
    assert verbs(lastResort=True) == {**least, "/pods": ["list", "delete"]}
    for key in ("condition", "lifecycle_conditions"):
        assert verbs(node={**NO_NODE, key: True}) == {**least, "/nodes/status": ["patch"]}
    assert verbs(node={**NO_NODE, "events": True}) == {**least, "default/events": ["create"]}
    fleet = {f"{NAMESPACE}/leases": ["list", "create", "update", "delete"]}
    assert verbs(fleet={"enabled": True}) == {**least, **fleet}


@pytest.mark.parametrize(
    ("operation", "name", "allowed"),
    [
        ("CREATE", "sea-0123", True),
        ("CREATE", "kube-scheduler", False),
        ("UPDATE", "sea-0123", True),
        ("UPDATE", "not-sea-0123", False),
        ("DELETE", "sea-0123", True),
        ("DELETE", "kube-scheduler", False),
    ],
)
def test_of_leases_only_those_of_a_fleet_may_be_changed(
    helm: Helm, rendered: dict[str, Rendered], operation: str, name: str, allowed: bool
) -> None:
    """The expression, evaluated by a library of CEL. An API server was not tried with it."""
    (policy,) = [
        one
        for one in rendered["fleet"].all("ValidatingAdmissionPolicy")
        if one["metadata"]["name"].endswith("-leases")
    ]
    spec = policy["spec"]
    assert (spec["failurePolicy"], len(spec["validations"])) == ("Fail", 1)
    lease = {"metadata": {"name": name}}
    old, new = {"CREATE": (None, lease), "UPDATE": (lease, lease), "DELETE": (lease, None)}[operation]
    request = {"operation": operation}
    expression = spec["validations"][0]["expression"]
    assert helm.evaluate(expression, request=request, object=new, oldObject=old) is allowed
    (account,) = spec["matchConditions"]
    for user, is_agent in ((RELEASE, True), ("other", False)):
        info = {"username": f"system:serviceaccount:{NAMESPACE}:{user}"}
        assert helm.evaluate(account["expression"], request={"userInfo": info}) is is_agent


def test_the_admission_policy_is_the_one_that_an_api_server_was_tried_with(rendered: dict[str, Rendered]) -> None:
    """But for names, and line breaks in an expression."""
    bodies = [record["request"].get("body") or {} for record in json.loads(RECORDED.read_text("utf-8"))]
    (tried,) = [body for body in bodies if body.get("kind") == "ValidatingAdmissionPolicy"]
    spec = rendered["default"].one("ValidatingAdmissionPolicy")["spec"]
    (condition,) = spec["matchConditions"]
    (tried_condition,) = tried["spec"].pop("matchConditions")
    account = f"{NAMESPACE}:{RELEASE}"
    assert condition["expression"] == tried_condition["expression"].replace("sea:sea", account)
    assert {key: value for key, value in spec.items() if key != "matchConditions"} == tried["spec"]


# --- monitoring


def test_the_pod_monitor_is_the_one_in_the_file(rendered: dict[str, Rendered]) -> None:
    expected = yaml.safe_load(PODMONITOR.read_text("utf-8"))
    found = rendered["all"].one("PodMonitor")
    assert found["metadata"].pop("labels")
    assert found == expected
    (port,) = [port["name"] for port in rendered["all"].agent["ports"]]
    assert expected["spec"]["podMetricsEndpoints"][0]["port"] == port


def test_promtool_accepts_the_rules(rendered: dict[str, Rendered], programs: Path, tmp_path: Path) -> None:
    rule = rendered["all"].one("PrometheusRule")
    assert (rule["apiVersion"], rule["metadata"]["name"]) == ("monitoring.coreos.com/v1", "node-events")
    assert rule["spec"] == yaml.safe_load((ROOT / "config/prometheus/rules.yaml").read_text("utf-8"))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    count = sum(len(group["rules"]) for group in rule["spec"]["groups"])
    assert f"SUCCESS: {count} rules found" in promtool(programs, "check", "rules", "rules.yaml", cwd=tmp_path)


# --- as part of another chart


@pytest.fixture
def whole(archive: Path, tmp_path: Path) -> Path:
    """A chart that has this one as its only part."""
    folder = tmp_path / "whole"
    (folder / "charts").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: whole, version: 0.1.0}")
    shutil.copy(archive, folder / "charts")
    return folder


def test_the_chart_can_be_a_part_of_another_one(helm: Helm, whole: Path) -> None:
    one = Rendered(helm, whole, {"scheduled-events-agent": {"aks": True}, "global": {"region": "west"}}, "whole")
    assert one.kinds == DEFAULT_KINDS
    assert "left-to-aks" in one.policy


@pytest.mark.parametrize(("enabled", "kinds"), [(True, DEFAULT_KINDS), (False, [])])
def test_another_chart_may_turn_it_on_and_off(helm: Helm, whole: Path, enabled: bool, kinds: list[str]) -> None:
    part = {"name": "scheduled-events-agent", "version": "*", "condition": "scheduled-events-agent.enabled"}
    file = whole / "Chart.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"dependencies": [part]}))
    assert Rendered(helm, whole, {"scheduled-events-agent": {"enabled": enabled}}, "whole").kinds == kinds


def test_helm_reads_on_and_off_as_the_readme_says(helm: Helm, whole: Path) -> None:
    values = "scheduled-events-agent: {policy: {notify: [{on: [held], 'on': [seen]}], agent: {listen: off}}}"
    (whole / "values.yaml").write_text(values)
    policy = yaml.safe_load(Rendered(helm, whole, {}, "whole").policy)
    assert policy["notify"][0] == {"true": ["held"], "on": ["seen"]}
    assert policy["agent"] == {"listen": False}
