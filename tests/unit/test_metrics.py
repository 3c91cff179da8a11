"""The metrics as a scraper sees them: what docs/metrics.md promises, closed labels, no series left behind."""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import scheduled_events_agent.telemetry.metrics
from scheduled_events_agent import __version__
from scheduled_events_agent.http.errors import IMDS_ERROR_KINDS, NOTIFICATION_ERROR_KINDS
from scheduled_events_agent.imds.document import EVENT_TYPES, Affects, ScheduledEvent
from scheduled_events_agent.imds.text import DocumentErrorKind
from scheduled_events_agent.policy import ApproveMode, Decision, Rule
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.status import Attention
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

SOURCES = ("Platform", "User", "unknown")
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
PENDING = "scheduled_events_pending_not_before_timestamp_seconds"


def make_workflow(name: str = "w-1", event_id: str = ID, phase: Phase = "preparing") -> Workflow:
    return Workflow(
        id=name,
        event=ScheduledEvent(
            id=event_id, type="Reboot", status="Scheduled", source="User", resources=("vm-1",), not_before=NOW
        ),
        decision=Decision(rule="reboots", reason="", affects="self", approve="when-prepared"),
        first_seen_at=NOW,
        not_before_seen_at=NOW,
        boot_id="boot-1",
        phase=phase,
    )


@pytest.fixture
def pending() -> list[Workflow]:
    return []


@pytest.fixture
def metrics(pending: list[Workflow]) -> Metrics:
    return Metrics(lambda: pending)


def record(metrics: Metrics, workflow: Workflow, *kinds: RecordKind, seconds_later: float = 0.0) -> None:
    for kind in kinds:
        metrics.count_record(workflow, Record(kind=kind, text=""), NOW.timestamp() + seconds_later)


def families(metrics: Metrics) -> dict[str, Metric]:
    """Metric families as a scraper parses them, by the names in the table."""
    found = text_string_to_metric_families(metrics.expose().decode())
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in found}


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values by the values of the labels, these in alphabetical order."""
    found = [sample for sample in families(metrics)[name].samples if sample.name == name]
    return {tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in found}


def counted(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric, without those that are 0."""
    return {labels: value for labels, value in samples(metrics, name).items() if value}


def use_everything(metrics: Metrics, pending: list[Workflow]) -> None:
    """Bring every metric and every label to light."""
    workflow = replace(make_workflow(), outcome="completed", recover=StageStatus(failure="exit code 1"))
    pending.append(workflow)
    record(metrics, workflow, "seen", "decided", "approved", "closed")
    metrics.record_hook("drain", "prepare", "succeeded", 1.0)
    metrics.set_policy(Settings(notify=(NotifyTarget(name="ops", to="https://example.com"),)), "e3b0")
    metrics.set_waiting({"ops": (1, NOW.timestamp())})
    needed = Attention(kind="prepare_failed", severity="act", since=None, message="it failed")
    metrics.set_attention([needed])
    metrics.add_fleet()
    metrics.fleet_requests.labels("put", "ok").inc()
    metrics.add_kubernetes()


def table(metrics: Metrics) -> Iterator[str]:
    """The rows of docs/metrics.md."""
    for name, family in families(metrics).items():
        labels: set[str] = set()
        for sample in family.samples:
            labels |= sample.labels.keys() - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels)) or "-"
        yield f"|`{name}`|{family.type}|{shown}|{family.documentation}|"


def test_the_documented_table_is_what_a_scraper_gets(metrics: Metrics, pending: list[Workflow]) -> None:
    use_everything(metrics, pending)
    documented = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|`scheduled_")
    ]
    # The process_ metrics are the library's own, and exist where there is a /proc.
    exposed = [line for line in table(metrics) if not line.startswith("|`process_")]
    assert documented == exposed


def test_every_value_of_a_label_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Labels")[2]
    rows = dict(re.findall(r"^- (.+?): (.+(?:\n  .+)*)", text, re.MULTILINE))
    for row, words in {
        "`type`": EVENT_TYPES,
        "`affects`": get_args(Affects),
        "`phase`": set(get_args(Phase)) - {"closed"},
        "`approve`": get_args(ApproveMode),
        "`stage`": (*get_args(Stage), "on_clear"),
        "`outcome` of a poll": ("ok", *IMDS_ERROR_KINDS, *get_args(DocumentErrorKind)),
        "`outcome` of an approval": ("confirmed", *IMDS_ERROR_KINDS, "no_thread", "bug"),
        "`outcome` of a hook": get_args(HookOutcome),
        "`outcome` of an event": set(get_args(Outcome)) - {""},
        "`kind` of a notification": NOTIFICATION_ERROR_KINDS,
    }.items():
        assert set(words) <= set(re.findall(r"[\w-]+", whole_row(rows, row))), row


def whole_row(rows: dict[str, str], name: str) -> str:
    """The row with the values that it does not list itself: of failures, and of a field of JSON."""
    text = rows[name]
    if "a failure as of a poll" in text:
        text += " " + whole_row(rows, "`outcome` of a poll")
    elif "a failure" in text:
        text += " " + rows["a failure of a poll or a notification"]
    for type_, field in re.findall(r"as \[`(\w+)\.([\w.]+)`\]", text):
        page = DOCUMENT.with_name("json.md").read_text(encoding="utf-8")
        (table,) = re.findall(rf"^### {type_}\n(.+?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
        text += " ".join(re.findall(rf"^\|`{re.escape(field)}`\|.+$", table, re.MULTILINE))
    return text


def test_names_say_their_unit_and_begin_alike(metrics: Metrics, pending: list[Workflow]) -> None:
    use_everything(metrics, pending)
    for name, family in families(metrics).items():
        assert name.startswith(("scheduled_events_", "process_"))
        assert name.endswith("_total") == (family.type == "counter")
        assert not name.endswith(("_ms", "_milliseconds", "_minutes", "_created"))
        assert family.documentation


def test_every_line_can_be_parsed_and_no_series_is_there_twice(metrics: Metrics, pending: list[Workflow]) -> None:
    use_everything(metrics, pending)
    # A second appearance of an event, while its first one is being recovered from; and events without an id.
    pending += [make_workflow("w-2"), make_workflow("w-3", event_id=""), make_workflow("w-4", event_id="")]
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families(metrics).values()
        for sample in family.samples
    ]
    assert len(series) == len(set(series))


def test_text_from_azure_makes_no_new_label_values(metrics: Metrics, pending: list[Workflow]) -> None:
    for number in range(50):
        event = ScheduledEvent(
            id=f"id-{number}",
            type=f"type-{number}",
            status=f"status-{number}",
            source=f"source-{number}",
            resources=(f"vm-{number}",),
            description=f"description-{number}",
        )
        workflow = replace(make_workflow(f"w-{number}"), event=event, outcome="completed")
        record(metrics, workflow, "seen", "decided", "approved", "closed")
        pending.append(workflow)
    assert counted(metrics, "scheduled_events_events_total") == {("self", "unknown", "other"): 50}
    assert counted(metrics, "scheduled_events_closed_total") == {("completed", "other"): 50}
    text = metrics.expose().decode()
    for word in ("type-", "status-", "source-", "vm-", "description-"):
        assert word not in text


def test_an_id_is_only_in_the_gauge_of_pending_events(metrics: Metrics, pending: list[Workflow]) -> None:
    use_everything(metrics, pending)
    assert [line.partition("{")[0] for line in metrics.expose().decode().splitlines() if ID in line] == [PENDING]
    pending.clear()
    assert ID not in metrics.expose().decode()


def test_pending_metrics_are_rendered_again_only_after_a_change(
    metrics: Metrics, pending: list[Workflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    class Watched(scheduled_events_agent.telemetry.metrics._Pending):
        def collect(self) -> Iterable[Metric]:
            families = tuple(super().collect())
            written.extend(sample.labels["phase"] for sample in families[0].samples)
            return families

    monkeypatch.setattr(scheduled_events_agent.telemetry.metrics, "_Pending", Watched)
    pending.append(make_workflow())
    texts = [metrics.expose().decode() for _ in range(3)]
    assert written == ["preparing"]
    pending[0] = replace(pending[0], phase="prepared")
    texts.append(metrics.expose().decode())
    assert written == ["preparing", "prepared"]
    phases = [re.findall(f'{PENDING}{{[^}}]*phase="(\\w+)"', text) for text in texts]
    assert phases == [["preparing"]] * 3 + [["prepared"]]


def test_an_id_cannot_break_the_exposition(metrics: Metrics, pending: list[Workflow]) -> None:
    event_id = 'quote" backslash\\ brace} newline\n end'
    pending.append(make_workflow(event_id=event_id))
    ((labels, value),) = samples(metrics, PENDING).items()
    assert labels == ("self", event_id, "preparing", "reboots", "Scheduled", "Reboot")
    assert value == NOW.timestamp()


def test_an_event_that_may_start_at_any_moment_has_the_time_0(metrics: Metrics, pending: list[Workflow]) -> None:
    workflow = make_workflow()
    pending.append(replace(workflow, event=replace(workflow.event, not_before=None)))
    assert list(samples(metrics, PENDING).values()) == [0.0]


def test_a_recommendation_has_no_time_but_is_counted(metrics: Metrics, pending: list[Workflow]) -> None:
    workflow = make_workflow(phase="prepared")
    recommendation = replace(workflow.event, type="SpotRebalanceRecommendation", not_before=None)
    pending.append(replace(workflow, event=recommendation))
    record(metrics, pending[0], "seen")
    assert samples(metrics, PENDING) == {}
    assert counted(metrics, "scheduled_events_pending") == {("self", "prepared"): 1}
    assert counted(metrics, "scheduled_events_events_total") == {
        ("self", "User", "SpotRebalanceRecommendation"): 1
    }


def test_an_event_without_an_id_is_labeled_by_its_key(metrics: Metrics, pending: list[Workflow]) -> None:
    pending.append(make_workflow(event_id=""))
    ((labels, _),) = samples(metrics, PENDING).items()
    assert labels[1] == "no-id-reboot-vm-1"


def test_pending_events_are_counted_by_phase(metrics: Metrics, pending: list[Workflow]) -> None:
    phases: tuple[Phase, ...] = ("waiting", "preparing", "preparing")
    pending += [make_workflow(f"w-{n}", f"id-{n}", phase) for n, phase in enumerate(phases)]
    assert counted(metrics, "scheduled_events_pending") == {("self", "waiting"): 1, ("self", "preparing"): 2}


def test_hooks_that_run_are_counted(metrics: Metrics, pending: list[Workflow]) -> None:
    assert samples(metrics, "scheduled_events_hooks_running") == {(): 0}
    running = StageStatus(state="running", current="drain", run=1)
    pending += [
        replace(make_workflow("w-1", "id-1"), prepare=running),
        replace(make_workflow("w-2", "id-2"), prepare=replace(running, current=None)),
        replace(make_workflow("w-3", "id-3"), recover=running, on_start=running),
    ]
    assert samples(metrics, "scheduled_events_hooks_running") == {(): 3}


def test_an_approval_is_counted_with_its_delay(metrics: Metrics) -> None:
    record(metrics, make_workflow(), "approved", seconds_later=42.0)
    assert counted(metrics, "scheduled_events_approvals_total") == {("confirmed",): 1}
    family = families(metrics)["scheduled_events_approval_delay_seconds"]
    sums = [sample.value for sample in family.samples if sample.name.endswith("_sum")]
    assert sums == [42.0]


def test_a_clock_that_was_set_back_makes_no_negative_delay(metrics: Metrics) -> None:
    record(metrics, make_workflow(), "approved", seconds_later=-42.0)
    family = families(metrics)["scheduled_events_approval_delay_seconds"]
    assert [sample.value for sample in family.samples if sample.name.endswith("_sum")] == [0.0]


def test_an_event_without_a_matching_rule_counts_under_none(metrics: Metrics) -> None:
    workflow = make_workflow()
    record(metrics, replace(workflow, decision=replace(workflow.decision, rule=None, approve="never")), "decided")
    assert counted(metrics, "scheduled_events_decisions_total") == {("never", "none"): 1}


def test_an_event_that_is_over_is_not_announced_while_the_name_is_not_known(
    metrics: Metrics, pending: list[Workflow]
) -> None:
    over = replace(make_workflow(phase="waiting"), is_over=True, outcome="canceled")
    pending.append(replace(over, decision=replace(over.decision, rule=None, affects="unknown")))
    assert samples(metrics, PENDING) == {}


def test_a_failed_recovery_is_counted_and_shown_until_it_is_solved(
    metrics: Metrics, pending: list[Workflow]
) -> None:
    failed = replace(make_workflow(), outcome="canceled", phase="recovery_failed")
    record(metrics, failed, "recovery_failed")
    pending.append(failed)
    assert samples(metrics, "scheduled_events_recovery_failures_total") == {(): 1}
    assert counted(metrics, "scheduled_events_pending") == {("self", "recovery_failed"): 1}
    pending.remove(failed)
    record(metrics, replace(failed, phase="closed"), "closed")
    assert samples(metrics, "scheduled_events_recovery_failures_total") == {(): 1}
    assert counted(metrics, "scheduled_events_pending") == {}
    assert counted(metrics, "scheduled_events_closed_total") == {("canceled", "Reboot"): 1}


def test_failure_counters_start_at_0_so_that_the_first_failure_is_an_increase(metrics: Metrics) -> None:
    kinds = {(kind,) for kind in IMDS_ERROR_KINDS}
    counters: dict[str, set[tuple[str, ...]]] = {
        "scheduled_events_polls_total": {("ok",), *kinds, *((kind,) for kind in get_args(DocumentErrorKind))},
        "scheduled_events_approvals_total": {("confirmed",), *kinds, ("no_thread",), ("bug",)},
        "scheduled_events_hook_failures_total": {(stage,) for stage in get_args(Stage)},
        "scheduled_events_store_errors_total": {
            (kind,) for kind in ("locked", "full", "write", "read", "damaged", "removed")
        },
        "scheduled_events_recovery_failures_total": {()},
        "scheduled_events_bugs_total": {()},
    }
    for name, labels in counters.items():
        assert samples(metrics, name) == dict.fromkeys(labels, 0.0), name


def test_events_and_their_ends_are_counted_from_0_whatever_they_will_be(metrics: Metrics) -> None:
    types = (*EVENT_TYPES, "other")
    events = {(affects, source, type_) for affects in get_args(Affects) for source in SOURCES for type_ in types}
    assert samples(metrics, "scheduled_events_events_total") == dict.fromkeys(events, 0.0)
    outcomes = set(get_args(Outcome)) - {""}
    ends = {(outcome, type_) for outcome in outcomes for type_ in types}
    assert samples(metrics, "scheduled_events_closed_total") == dict.fromkeys(ends, 0.0)


def test_nothing_pending_is_0_in_every_phase(metrics: Metrics) -> None:
    phases = set(get_args(Phase)) - {"closed"}
    labels = {(affects, phase) for affects in get_args(Affects) for phase in phases}
    assert samples(metrics, "scheduled_events_pending") == dict.fromkeys(labels, 0.0)


POLICY = Settings(
    rules=(
        Rule(name="impactful", prepare=("drain",), recover=("resume", "tell"), approve="when-prepared"),
        Rule(name="rest", on_start=("tell",)),
    ),
    on_clear=("resume",),
)


def test_the_rules_and_hooks_of_the_policy_are_counted_from_0(metrics: Metrics) -> None:
    metrics.set_policy(POLICY, "1234")
    decisions = samples(metrics, "scheduled_events_decisions_total")
    assert decisions == {("never", "none"): 0, ("when-prepared", "impactful"): 0, ("never", "rest"): 0}
    stages = (
        *(("drain", "prepare"), ("resume", "recover"), ("tell", "recover"), ("tell", "on_start")),
        ("resume", "on_clear"),
    )
    runs = {(hook, outcome, stage) for hook, stage in stages for outcome in get_args(HookOutcome)}
    assert samples(metrics, "scheduled_events_hook_runs_total") == dict.fromkeys(runs, 0.0)
    metrics.record_hook("drain", "prepare", "failed", 1.0)
    assert counted(metrics, "scheduled_events_hook_runs_total") == {("drain", "failed", "prepare"): 1}


def test_a_policy_of_a_thousand_rules_and_hooks_makes_no_thousand_series(metrics: Metrics) -> None:
    rules = tuple(Rule(name=f"rule-{n}", prepare=(f"hook-{n}",)) for n in range(1000))
    metrics.set_policy(Settings(rules=rules), "1234")
    assert len(samples(metrics, "scheduled_events_decisions_total")) == 201
    assert len(samples(metrics, "scheduled_events_hook_runs_total")) == 1000


def test_the_hash_is_that_of_the_policy_in_force_alone(metrics: Metrics) -> None:
    metrics.set_policy(POLICY, "1234")
    metrics.set_policy(Settings(), "5678")
    assert samples(metrics, "scheduled_events_policy_info") == {("5678",): 1}


def test_hooks_that_fail_are_counted_by_stage(metrics: Metrics) -> None:
    outcomes: tuple[HookOutcome, ...] = get_args(HookOutcome)
    for outcome in outcomes:
        note = Record(kind="hook_finished", text="", stage="recover", hook="resume", outcome=outcome)
        metrics.count_record(make_workflow(), note, NOW.timestamp())
    # succeeded is none, and canceled is what the agent wanted.
    assert samples(metrics, "scheduled_events_hook_failures_total") == {
        ("prepare",): 0,
        ("on_start",): 0,
        ("recover",): 3,
    }


def test_the_version_is_there(metrics: Metrics) -> None:
    assert samples(metrics, "scheduled_events_agent_info") == {(__version__,): 1}
