"""config/prometheus against the agent: nothing in it names a metric, label, value or command that there is not.

What only Prometheus itself can judge is in tests/system/test_prometheus.py.
"""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from prometheus_client.parser import text_string_to_metric_families

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.http.errors import IMDS_ERROR_KINDS
from scheduled_events_agent.imds.document import EVENT_TYPES, Affects, ScheduledEvent
from scheduled_events_agent.imds.text import DocumentErrorKind
from scheduled_events_agent.policy import ApproveMode, Decision
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.status import Attention
from scheduled_events_agent.status.attention import ATTENTION_KINDS, WITH_DEADLINE
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import (
    HookOutcome,
    Outcome,
    Phase,
    Record,
    RecordKind,
    Stage,
    StageStatus,
    Workflow,
)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "config" / "prometheus"
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
# Labels that Prometheus adds to every series.
TARGET_LABELS = {"job", "instance"}
# The library's own, where there is a /proc.
PROCESS_METRICS = ("process_cpu_seconds_total", "process_resident_memory_bytes")
VALUES: dict[str, set[str]] = {
    "job": {"scheduled-events-agent"},
    "type": {*EVENT_TYPES, "other"},
    "status": {"Scheduled", "Started", "other"},
    "affects": {*get_args(Affects)},
    "phase": {*get_args(Phase)} - {"closed"},
    "approve": {*get_args(ApproveMode)},
    "stage": {*get_args(Stage), "on_clear"},
    "kind": {*ATTENTION_KINDS},
    "alertstate": {"firing"},
    "result": {"ok", "unreachable", "throttled"},
    "outcome": {
        *("ok", "confirmed", "no_thread", "bug", *get_args(DocumentErrorKind)),
        *IMDS_ERROR_KINDS,
        *get_args(HookOutcome),
        *get_args(Outcome),
    },
}
_TOKEN = re.compile(
    r'\s+|(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<word>[A-Za-z_:][\w:]*)'
    r"|(?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){},])|[\d.]+[\w.]*"
)
_OPERATORS = ("and", "or", "unless", "bool", "offset")


class Selector(NamedTuple):
    """A metric in a query, with the values that it is asked for by label."""

    metric: str
    labels: dict[str, list[str]]


class Query(NamedTuple):
    """Names in a PromQL expression."""

    selectors: list[Selector]
    grouped_by: set[str]


def parse_query(text: str) -> Query:
    """Walk over an expression; enough of the grammar to tell metrics, labels and functions apart."""
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match, f"not understood: {text[position:]}"
        position = match.end()
        if match.lastgroup:
            tokens.append((match.lastgroup, match[0]))
    query = Query([], set())
    index, inside, grouping = 0, "", False
    while index < len(tokens):
        kind, token = tokens[index]
        following = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        index += 1
        if token == "{":
            inside = "{"
        elif token == "}":
            inside = ""
        elif inside and kind == "word":
            value = json.loads(tokens[index + 1][1])
            is_pattern = following in ("=~", "!~")
            query.selectors[-1].labels[token] = value.split("|") if is_pattern else [value]
            index += 2
        elif kind == "word" and token in ("by", "without", "on", "ignoring", "group_left", "group_right"):
            grouping = following == "("
        elif grouping and kind == "word":
            query.grouped_by.add(token)
        elif token == ")":
            grouping = False
        elif kind == "word" and token not in _OPERATORS and following not in ("(", "by", "without"):
            query.selectors.append(Selector(token, {}))
    return query


def exposed(*, has_fleet: bool = False) -> dict[str, dict[str, set[str]]]:
    """Values by label by name of every series that the agent can show."""
    event = ScheduledEvent(
        id="id", type="Reboot", status="Scheduled", source="User", resources=("vm-1",), not_before=NOW
    )
    workflow = Workflow(
        id="w-1",
        event=event,
        decision=Decision(rule="impactful", reason="", affects="self", approve="when-prepared"),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot-1",
        phase="preparing",
        outcome="completed",
        recover=StageStatus(failure="exit code 1"),
    )
    metrics = Metrics(lambda: [workflow])
    kinds: tuple[RecordKind, ...] = ("seen", "decided", "approved", "closed")
    for kind in kinds:
        metrics.count_record(workflow, Record(kind=kind, text=""), NOW.timestamp())
    metrics.record_hook("drain", "prepare", "succeeded", 1.0)
    metrics.set_policy(Settings(notify=(NotifyTarget(name="ops", to="https://example.com"),)), "e3b0")
    metrics.set_waiting({"ops": (0, 0.0)})
    metrics.set_attention([Attention(kind="prepare_failed", severity="act", since=None, message="it failed")])
    if has_fleet:
        metrics.add_fleet()
        metrics.fleet_requests.labels("list", "ok").inc()
    found: dict[str, dict[str, set[str]]] = {name: {} for name in ("up", *PROCESS_METRICS)}
    for family in text_string_to_metric_families(metrics.expose().decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def load(name: str) -> Any:
    return yaml.safe_load((PACKAGE / name).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    (group,) = load("rules.yaml")["groups"]  # one, for a rule sees what another one recorded just before
    found: list[dict[str, Any]] = group["rules"]
    return found


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recordings() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PACKAGE / "dashboard.json").read_text(encoding="utf-8"))
    return found


def dashboard_queries() -> list[tuple[str, str]]:
    """Title of the panel and expression."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in all_panels() if panel["type"] != "row"]


def all_panels() -> list[dict[str, Any]]:
    """With the rows, and what is in those that are collapsed."""
    return [one for panel in dashboard()["panels"] for one in (panel, *panel.get("panels", ()))]


def all_queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and the expression."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    yield from dashboard_queries()
    for alert, rule in alerts().items():
        # A query in a description is written by printf, quotes and all.
        for query in re.findall(r'printf "(.*?)" \$', rule["annotations"]["description"], re.DOTALL):
            yield f"description of {alert}", query.replace("%q", '"$x"').replace("'", '"')
    for group in load("rules.test.yaml")["tests"]:
        for series in group["input_series"]:
            yield f"test of {group['name']}", series["series"]


def test_the_parser_separates_metrics_from_labels_and_functions() -> None:
    query = (
        'sum without (stage) (increase(a_total{x!="1|2", y=~"3|4"}[5m])) / on (job) b_count > 3e2 or c:d:e == 0'
    )
    assert parse_query(query) == Query(
        [Selector("a_total", {"x": ["1|2"], "y": ["3", "4"]}), Selector("b_count", {}), Selector("c:d:e", {})],
        {"stage", "job"},
    )


def test_every_query_names_metrics_labels_and_values_that_the_agent_shows() -> None:
    known = exposed(has_fleet=True)
    known["ALERTS"] = {"alertname": set(), "alertstate": set(), "kind": set()}  # what fires, as Prometheus has it
    for name, expression in recordings().items():
        found = [known[selector.metric] for selector in parse_query(expression).selectors]
        known[name] = {label: set() for labels in found for label in labels}
    queries = list(all_queries())
    assert len(queries) > 70
    for where, expression in queries:
        selectors, grouped_by = parse_query(expression)
        assert selectors, where
        for metric, asked in selectors:
            assert metric in known, f"{where}: no metric {metric}"
            assert asked.keys() <= known[metric].keys() | TARGET_LABELS, f"{where}: labels of {metric}"
            for label, values in asked.items():
                may_be = known[metric].get("le", set()) if label == "le" else VALUES.get(label)
                odd = [value for value in values if not value.startswith("$")]
                if may_be is not None:
                    assert set(odd) <= may_be, f"{where}: {label} of {metric}"
        every_label = {label for metric, _ in selectors for label in known[metric]} | TARGET_LABELS
        assert grouped_by <= every_label, f"{where}: grouped by what is not there"


def test_every_alert_has_a_severity_a_description_and_a_runbook() -> None:
    for name, rule in alerts().items():
        assert re.fullmatch(r"ScheduledEvents[A-Z]\w+", name)
        assert rule["labels"].keys() == {"severity"}, name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, name
        for key in ("summary", "description"):
            text = rule["annotations"][key]
            assert "\n" not in text, name
            assert text.endswith((".", "{{ end }}")), name
        assert "$labels.instance" in rule["annotations"]["summary"] or name == "ScheduledEventsAgentAbsent"


def test_the_names_of_recorded_series_say_level_metric_and_operation() -> None:
    names = [rule.get("alert") or rule["record"] for rule in rules()]
    assert len(names) == len(set(names))
    for name in recordings():
        assert re.fullmatch(r"instance(_\w+)?:scheduled_events_\w+:\w+", name)


def test_every_recorded_series_is_used_after_it_was_recorded() -> None:
    recorded: set[str] = set()
    used: set[str] = set()
    for rule in rules():
        names = {selector.metric for selector in parse_query(rule["expr"]).selectors if ":" in selector.metric}
        assert names <= recorded
        used |= names
        recorded |= {rule["record"]} if "record" in rule else set()
    assert used == recorded


def test_the_commands_that_alerts_advise_exist() -> None:
    texts = [rule["annotations"]["description"] for rule in alerts().values()]
    commands = re.findall(r'"sudo scheduled-events-agent ([^"]+)"', " ".join(texts))
    assert set(commands) == {"status"}  # the runbook has the others
    for command in commands:
        build_parser().parse_args([command])  # exits on what it does not know


def test_alerts_name_commands_and_no_local_pages() -> None:
    for name, rule in alerts().items():
        for text in rule["annotations"].values():
            assert not re.search(
                r"/(status|healthz|history|metrics)\b|(?<!sudo )scheduled-events-agent status", text
            ), name


def test_each_attention_kind_raises_one_alert() -> None:
    raised = [
        (name, kind)
        for name, rule in alerts().items()
        for metric, labels in parse_query(rule["expr"].partition("unless")[0]).selectors
        if "attention" in metric
        for kind in labels.get("kind", WITH_DEADLINE)
    ]
    now, later = "ScheduledEventsOperatorNeeded", "ScheduledEventsOperatorNeededLater"
    assert {kind for name, kind in raised if name == later} == {*WITH_DEADLINE, "not_acting"}
    by_kind = {kind: name for name, kind in raised if name != later}
    assert by_kind.keys() == {*ATTENTION_KINDS} - {"not_acting"}
    assert {kind for kind, name in by_kind.items() if name == now} == {
        "recovery_failed",
        "hook_missing",
        "state_lost",
        "vm_changed",
        *WITH_DEADLINE,
    }
    assert len(raised) == len(ATTENTION_KINDS) + len(WITH_DEADLINE)


def test_every_alert_has_a_severity_and_the_page_explains_each() -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (explained,) = re.findall(r"^- Every alert has a label `severity`: (.+?)\. ", text, re.MULTILINE | re.DOTALL)
    severities = {rule["labels"]["severity"] for rule in alerts().values()}
    assert severities == {*re.findall(r"(\w+)\s+\(", explained)}


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    shown: dict[str, set[bool]] = {}
    for group in load("rules.test.yaml")["tests"]:
        for test in group["alert_rule_test"]:
            shown.setdefault(test["alertname"], set()).add(bool(test["exp_alerts"]))
    assert shown == {name: {True, False} for name in alerts()}


def test_the_dashboard_has_the_required_panels() -> None:
    assert [panel["title"] for panel in panels()] == [
        *("Needs a person", "Agents", "Not ready", "Pending", "Held", "Only observing", "Policy rejected"),
        *(
            "Oldest poll",
            "Hooks running",
            "Pending events",
            "Ready",
            "Pending by phase",
            "Documents",
            "Events seen",
            "Decisions",
        ),
        *("How events ended", "Hooks", "Failures", "Approvals", "Approval delay", "Polls", "Poll latency"),
        *("Measured pauses", "Agent trouble", "Versions", "Agent processor time", "Agent memory"),
        *("Age of the policy in force", "Notifications", "Notifications waiting", "Oldest waiting notification"),
        *("Store unavailable", "VMs not ready", "Wait for slots and VMs", "Requests to the store"),
        "Begun without a slot",
    ]
    shown = {selector.metric for _, query in dashboard_queries() for selector in parse_query(query).selectors}
    agents = {name for name in exposed(has_fleet=True) if name.startswith("scheduled_events_")}
    families = [{re.sub(r"_(bucket|count|sum)$", "", name) for name in names} for names in (shown, agents)]
    assert families[0] == {*families[1], *PROCESS_METRICS}


def test_fleet_panels_are_in_a_collapsed_row() -> None:
    rows = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    (fleet,) = [row for row in rows if row["collapsed"]]
    with_fleet = {title for title, query in dashboard_queries() if "_fleet_" in query}
    assert {panel["title"] for panel in fleet["panels"]} == with_fleet


def test_the_dashboard_can_be_imported_anywhere() -> None:
    model = dashboard()
    assert model["id"] is None
    assert model["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in model["templating"]["list"]}
    assert [variable["type"] for variable in variables.values()] == ["datasource", "query", "query"]
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == source
        assert panel["description"].endswith("."), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == source for target in panel["targets"])
    known = {*variables, "__rate_interval"}
    for title, query in dashboard_queries():
        assert set(re.findall(r"\$(\w+)", query)) <= known, title
        for metric, labels in parse_query(query).selectors:
            assert (labels["job"], labels["instance"]) == (["$job"], ["$instance"]), (title, metric)


def test_no_panel_shows_a_series_for_each_of_thousands_of_machines() -> None:
    told_apart = [
        (panel["title"], target["expr"])
        for panel in panels()
        for target in panel["targets"]
        if "{{instance}}" in target["legendFormat"] or panel["title"] in ("Needs a person", "Pending events")
    ]
    assert len(told_apart) == 18
    unbounded = [title for title, query in told_apart if not re.match(r"(topk|bottomk)\(\d+, ", query)]
    assert unbounded == []


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    every = all_panels()
    assert len({panel["id"] for panel in every}) == len(every)
    places = [panel["gridPos"] for panel in every]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (one, other)


def test_the_scrape_configuration_is_one_for_these_rules_and_this_agent() -> None:
    config = load("prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert (config["rule_files"], job["job_name"], job["metrics_path"]) == (
        ["rules.yaml"],
        "scheduled-events-agent",
        "/metrics",
    )
    assert config["global"]["scrape_interval"] == "15s"
    ((target,),) = [group["targets"] for group in job["static_configs"]]
    assert target == Settings().agent.listen


def test_the_settings_that_are_commented_out_are_in_place() -> None:
    text = (PACKAGE / "prometheus.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(re.sub(r"^( *)#(?! \S)", r"\1", text, flags=re.MULTILINE))
    (job,) = config["scrape_configs"]
    assert config.keys() == {"global", "rule_files", "alerting", "scrape_configs"}
    assert {name for name in job if name.endswith("_configs")} == {
        "static_configs",
        "file_sd_configs",
        "azure_sd_configs",
        "relabel_configs",
    }
    assert (job["scheme"], job["tls_config"].keys()) == ("https", {"ca_file", "cert_file", "key_file"})
    assert [discovery["port"] for discovery in job["azure_sd_configs"]] == [9769]
