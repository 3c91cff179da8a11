"""Every metric of the agent: names, types and labels.

Pending events come from the snapshot that the engine publishes. Counters start at 0 for each of their labels:
Prometheus sees no increase in a counter that appears with its first count.
Invariant: labels come from closed sets (types, sources, rules, hooks, stages, outcomes, kinds), never from an
event's id or a resource's name. Only the gauge of pending events carries ids; its series end with the event.
"""

from collections import Counter as Counting
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, product
from time import time
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduled_events_agent import __version__
from scheduled_events_agent.http.errors import IMDS_ERROR_KINDS, NOTIFICATION_ERROR_KINDS
from scheduled_events_agent.imds.document import EVENT_TYPES, Affects
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status import Attention
from scheduled_events_agent.status.attention import ATTENTION_KINDS, has_deadline
from scheduled_events_agent.workflow import HookOutcome, Outcome, Phase, Record, UnpreparedKind, Workflow

_PREFIX = "scheduled_events_"
_DROPPED = ("too_many", "too_old", "refused", "removed", "no_room")
_STAGES = ("prepare", "on_start", "recover")
_HOOK_FAILURES = ("failed", "timed_out", "not_started")
_FAST_SECONDS = (0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)
# Rules and hooks beyond this number start when they are first counted.
_MAX_NAMED = 200
_SLOW_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)


class Metrics:
    """All metrics of the agent. For any thread."""

    def __init__(self, load_pending: Callable[[], Iterable[Workflow]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series of each counter
        self._registry = CollectorRegistry()
        self._targets: set[str] = set()
        self._add_agent()
        self._add_polls()
        self._add_events()
        self._add_hooks()
        self._add_outcomes_and_state()
        self._add_notifications()
        self._count_from_zero()
        self.set_attention(())
        self._load_pending = load_pending
        self._exposed: tuple[tuple[Workflow, ...], bytes] | None = None
        """The pending events of the last scrape, and the text made from them."""
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self._registry)

    def _add_agent(self) -> None:
        self._gauge("agent_info", "Which version runs; always 1.", "version").labels(__version__).set(1)
        self._policy = self._gauge("policy_info", "SHA-256 of the policy file in force; always 1.", "hash")
        self.is_acting = self._gauge("acting", "1 if the agent acts, 0 if it only observes.")
        self.is_ready = self._gauge(
            "ready", "1 unless an event is prepared for or being recovered from: as /readyz."
        )

        self._attention = self._gauge("attention", "What needs a person, by kind; see the command status.", "kind")
        self._deadlines = self._gauge(
            "attention_deadline_timestamp_seconds",
            "Unix time after which it is too late to act, the earliest of each kind; 0: at any moment.",
            "kind",
        )

    def _add_polls(self) -> None:
        self.polls = self._counter("polls_total", "Requests for the document, by how they ended.", "outcome")
        self.poll_seconds = self._histogram(
            "poll_duration_seconds", "Time of a successful request.", buckets=_FAST_SECONDS
        )
        self.last_poll_at = self._gauge(
            "last_successful_poll_timestamp_seconds", "Unix time of the last successful poll; 0 if there was none."
        )
        self.documents = self._counter("documents_total", "Documents that differed from the one before.")
        self.other_vm_events = self._gauge(
            "other_vm_events", "Events of the last document that only concern other VMs and are not followed."
        )

    def _add_events(self) -> None:
        self.events = self._counter("events_total", "Events seen for the first time.", "type", "source", "affects")
        self.decisions = self._counter(
            "decisions_total", "Decisions, by rule; none means: observe.", "rule", "approve"
        )
        self.unprepared = self._counter(
            "unprepared_total", "Events that Azure started before they were prepared as wanted, by why.", "reason"
        )
        self.approvals = self._counter(
            "approvals_total", "Answers to approvals: confirmed, or how they failed.", "outcome"
        )
        self.approval_seconds = self._histogram(
            "approval_delay_seconds", "From first sight of an event to its confirmed approval.", "rule",
            buckets=_SLOW_SECONDS,
        )  # fmt: skip

    def _add_hooks(self) -> None:
        self.hook_seconds = self._histogram(
            "hook_duration_seconds", "Run time of hooks, by how they ended.", "hook", "stage", "outcome",
            buckets=_SLOW_SECONDS,
        )  # fmt: skip
        self.hook_runs = self._counter("hook_runs_total", "Hooks, by how they ended.", "hook", "stage", "outcome")
        self.hook_failures = self._counter(
            "hook_failures_total", "Hooks of events that failed, ran out of time or could not be started.", "stage"
        )

    def _add_outcomes_and_state(self) -> None:
        self.closed = self._counter("closed_total", "Events that are over, by how they ended.", "type", "outcome")
        self.recovery_failures = self._counter(
            "recovery_failures_total", "How often the recovery from an event failed, retries included."
        )
        self.pause_seconds = self._histogram(
            "pause_seconds", "Times for which this machine was paused, as measured by the agent.",
            buckets=(1, 2, 5, 10, 15, 30, 60, 300),
        )  # fmt: skip
        self.last_pause_seconds = self._gauge("last_pause_seconds", "Length of the last measured pause.")
        self.reload_ok = self._gauge(
            "config_last_reload_successful", "1 if the policy file was good at the last start or reload."
        )
        self.reloaded_at = self._gauge(
            "config_last_reload_success_timestamp_seconds", "Unix time when the policy in force was read."
        )
        self.store_errors = self._counter("store_errors_total", "Failed accesses to the state file.", "kind")
        self.state_reserve = self._gauge(
            "state_reserve_bytes", "How much can still be written to the state file while its disk is full."
        )
        self.bugs = self._counter("bugs_total", "Bugs met while handling an event; the log has the details.")

    def _add_notifications(self) -> None:
        self.notifications_sent = self._counter(
            "notifications_sent_total", "Notifications that were delivered.", "target"
        )
        self.notification_failures = self._counter(
            "notification_failures_total", "Attempts to deliver a notification that failed.", "target", "kind"
        )
        self.notifications_dropped = self._counter(
            "notifications_dropped_total", "Notifications that were lost before delivery.", "target", "reason"
        )
        self._notifications_waiting = self._gauge(
            "notifications_waiting", "Notifications to be delivered.", "target"
        )
        self._notifications_oldest = self._gauge(
            "notifications_oldest_waiting_seconds",
            "How long the oldest of them has waited; 0 if there is none.",
            "target",
        )

    def add_fleet(self) -> None:
        """Metrics of the fleet. Only agents whose policy has a fleet show them."""
        self.fleet_requests = self._counter(
            "fleet_requests_total", "Requests to the fleet's store, by how they ended.", "operation", "result"
        )
        self.fleet_wait_seconds = self._histogram(
            "fleet_wait_seconds", "How long events waited for a slot, or for other VMs to be ready.", "what",
            buckets=_SLOW_SECONDS,
        )  # fmt: skip
        self.fleet_not_ready = self._gauge(
            "fleet_not_ready_vms", "VMs that are not ready for events which this VM is ready for."
        )
        self.fleet_unavailable = self._gauge(
            "fleet_unavailable", "1 if the fleet's store could not be used when last asked."
        )
        self.fleet_begun_without_slot = self._counter(
            "fleet_begun_without_slot_total", "Events that began without a slot, by why.", "reason"
        )
        for reason in ("urgent", "operator", "late", "unavailable"):
            self.fleet_begun_without_slot.labels(reason)
        for what in ("slot", "ready"):
            self.fleet_wait_seconds.labels(what)

    def add_kubernetes(self) -> None:
        """Metrics of a node of a Kubernetes cluster. Only agents whose policy has the section show them."""
        self.kubernetes_unavailable = self._gauge(
            "kubernetes_unavailable",
            "1 if the node's conditions could not be updated when last tried.",
        )

    def set_waiting(self, waiting: Mapping[str, tuple[int, float]]) -> None:
        """Show how many notifications wait for each target, and since when (Unix time) the oldest has waited.

        Targets that are not given are no longer shown.
        """
        for target in self._targets - waiting.keys():
            self._notifications_waiting.remove(target)
            self._notifications_oldest.remove(target)
        for target, (count, since) in waiting.items():
            self._notifications_waiting.labels(target).set(count)
            self._notifications_oldest.labels(target).set_function(partial(_age, since if count else None))
        self._targets = set(waiting)

    def _count_from_zero(self) -> None:
        """Show each counter from the start, for each of its labels."""
        types = (*sorted(EVENT_TYPES), "other")
        sources = ("Platform", "User", "unknown")
        affects = get_args(Affects)
        outcomes = [outcome for outcome in get_args(Outcome) if outcome]
        for family, label_values in (
            (self.polls, (("ok", *IMDS_ERROR_KINDS, "document", "too_many"),)),
            (self.events, (types, sources, affects)),
            (self.decisions, (("none",), ("never",))),
            (self.unprepared, (get_args(UnpreparedKind),)),
            (self.approvals, (("confirmed", *IMDS_ERROR_KINDS, "no_thread", "bug"),)),
            (self.hook_failures, (_STAGES,)),
            (self.closed, (types, outcomes)),
            (self.store_errors, (("locked", "full", "write", "read", "damaged", "removed"),)),
        ):
            for labels in product(*label_values):
                family.labels(*labels)

    def set_attention(self, found: Sequence[Attention]) -> None:
        """Show how much of each kind needs a person, and until when."""
        counts = Counting(one.kind for one in found)
        for kind in ATTENTION_KINDS:
            self._attention.labels(kind).set(counts[kind])
        self._deadlines.clear()
        deadlines: dict[str, float] = {}
        for one in found:
            if has_deadline(one):
                deadline = one.deadline.timestamp() if one.deadline else 0.0
                deadlines[one.kind] = min(deadline, deadlines.get(one.kind, deadline))
        for name, deadline in deadlines.items():
            self._deadlines.labels(name).set(deadline)

    def set_policy(self, settings: Settings, policy_hash: str) -> None:
        """Show which policy is in force, and count its rules and hooks from 0."""
        self._policy.clear()
        self._policy.labels(policy_hash).set(1)
        for rule in settings.rules[:_MAX_NAMED]:
            self.decisions.labels(rule.name, rule.approve)
        hooks = {
            (hook, stage): None for rule in settings.rules for stage in _STAGES for hook in getattr(rule, stage)
        }
        hooks |= {(hook, "on_clear"): None for hook in settings.on_clear}
        for target in settings.notify[:_MAX_NAMED]:
            self.notifications_sent.labels(target.name)
            for kind in NOTIFICATION_ERROR_KINDS:
                self.notification_failures.labels(target.name, kind)
            for reason in _DROPPED:
                self.notifications_dropped.labels(target.name, reason)
        for (hook, stage), outcome in product(islice(hooks, _MAX_NAMED), get_args(HookOutcome)):
            self.hook_runs.labels(hook, stage, outcome)

    def record_hook(self, hook: str, stage: str, outcome: str, seconds: float) -> None:
        """Count a hook that has ended."""
        self.hook_runs.labels(hook, stage, outcome).inc()
        self.hook_seconds.labels(hook, stage, outcome).observe(seconds)

    def count_record(self, workflow: Workflow, record: Record, now: float) -> None:
        """Count what happened; ``now`` is Unix time."""
        event = workflow.event
        rule = workflow.decision.rule or "none"
        if record.kind == "seen":
            self.events.labels(event_type(event.type), _source(event.source), workflow.decision.affects).inc()
        elif record.kind == "decided":
            self.decisions.labels(rule, workflow.decision.approve).inc()
        elif record.kind == "approved":
            self.approvals.labels("confirmed").inc()
            self.approval_seconds.labels(rule).observe(max(0.0, now - workflow.first_seen_at.timestamp()))
        elif record.kind == "hook_finished":
            if record.outcome in _HOOK_FAILURES:
                self.hook_failures.labels(record.stage).inc()
        elif record.kind == "without_slot":
            self.fleet_begun_without_slot.labels(record.detail).inc()
        elif record.kind == "unprepared":
            self.count_unprepared(workflow)
        elif record.kind == "recovery_failed":
            self.recovery_failures.inc()
        elif record.kind == "closed":
            self.closed.labels(event_type(event.type), workflow.outcome).inc()

    def count_unprepared(self, workflow: Workflow) -> None:
        """Count the event if it has started unprepared."""
        if unprepared := workflow.started_unprepared:
            self.unprepared.labels(unprepared.kind).inc()

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format. Those of pending events are rendered only after a change."""
        pending = tuple(self._load_pending())
        exposed = self._exposed
        if exposed is None or exposed[0] != pending:
            registry = CollectorRegistry()
            registry.register(_Pending(pending))
            exposed = self._exposed = (pending, generate_latest(registry))
        return generate_latest(self._registry) + exposed[1]


def _age(since: float | None) -> float:
    return 0.0 if since is None else max(0.0, time() - since)


def event_type(text: str) -> str:
    """The type as a label: "other" for one that is not known."""
    return text if text in EVENT_TYPES else "other"


def _source(text: str) -> str:
    return text if text in ("Platform", "User") else "unknown"


def _status(text: str) -> str:
    return text if text in ("Scheduled", "Started") else "other"


class _Pending(Collector):
    """The series of pending events, made anew for each snapshot: no series outlives its event."""

    def __init__(self, pending: Iterable[Workflow]) -> None:
        self._pending = pending

    def collect(self) -> Iterable[Metric]:
        not_before = GaugeMetricFamily(
            f"{_PREFIX}pending_not_before_timestamp_seconds",
            "One series for each pending event, except recommendations, which never start: Unix time of "
            "NotBefore, 0 if it may start at any moment.",
            labels=("event_id", "type", "status", "affects", "phase", "rule"),
        )
        # By labels: an event may come back under its id while its first appearance still recovers, and a series
        # that is there twice makes the whole scrape fail.
        times: dict[tuple[str, ...], float] = {}
        phases = [phase for phase in get_args(Phase) if phase != "closed"]
        counts: dict[tuple[str, str], int] = dict.fromkeys(product(phases, get_args(Affects)), 0)
        hooks = 0
        for workflow in self._pending:
            event = workflow.event
            decision = workflow.decision
            what = (event.id or event.key, event_type(event.type), _status(event.status), decision.affects)
            # Until this VM's name is known, an event that is over stays as it was.
            has_vanished = workflow.is_over and workflow.phase not in ("recovering", "recovery_failed")
            if not (event.is_recommendation or has_vanished):
                time = event.not_before.timestamp() if event.not_before else 0.0
                times[*what, workflow.phase, decision.rule or "none"] = time
            hooks += sum(
                stage.current is not None for stage in (workflow.prepare, workflow.on_start, workflow.recover)
            )
            key: tuple[str, str] = (workflow.phase, decision.affects)
            counts[key] = counts.get(key, 0) + 1
        for labels, time in times.items():
            not_before.add_metric(labels, time)
        pending = GaugeMetricFamily(
            f"{_PREFIX}pending", "Events that are not over yet, by phase.", labels=("phase", "affects")
        )
        for key, count in counts.items():
            pending.add_metric(key, count)
        running = GaugeMetricFamily(
            f"{_PREFIX}hooks_running",
            "Hooks that run now for events, or wait for another run of the same hook.",
            value=hooks,
        )
        return (not_before, pending, running)
