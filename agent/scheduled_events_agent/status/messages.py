"""Texts for people about events: status lines, wait reasons, records, titles of notifications.

The terminal, the status page, the log and the service manager use them. Pure: reads no file and no clock.
Invariant: a text states only what the workflow or the journal states, and nothing that is only expected.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec.structs import replace

from scheduled_events_agent.imds.document import RECOMMENDATION
from scheduled_events_agent.policy.durations import (
    format_deadline,
    format_duration,
    format_elapsed,
    format_estimate,
    format_rounded,
    format_time,
    plural,
)
from scheduled_events_agent.status.actions import SHORT_ID
from scheduled_events_agent.status.facts import Facts, RunningHook
from scheduled_events_agent.status.status import Attention, EventView, OperatorView
from scheduled_events_agent.workflow import Record, Transition, UnpreparedKind, WaitKind, WaitReason, Workflow

_WAIT_MESSAGES = {
    "time": "begins at {at}: {detail}",
    "window": "begins at {at}: {detail}",
    "slot": "waits for a slot: {detail}; begins without one at {at}",
    "fleet": "waits for an answer of the fleet's store",
    "same_name": "another VM, with vmId {detail}, uses the name of this one in the fleet",
    "other_run": "waits for another run of hook {detail}",
    "would_run_on_start": "the agent only observes; it would now run {on_start}",
    "observes": "the agent only observes",
    "status": "only a scheduled event can be approved, and its status is {status}",
    "other_vm": "it does not name this VM",
    "missing": "it is not in the last document, and the next one shows whether it is over",
    "id": "{event.approval_error}",
    "never": "{never}",
    "unprepared": "preparation is not done",
    "prepare_failed": "{prepare.failure}",
    "prepare_canceled": "preparation was canceled",
    "held": "an operator holds it",
    "manual": "an operator must approve it",
    "approval_slot": "waits for a slot to approve: {detail}; Azure starts it at {at}",
    "stale": "the metadata service has not answered since {at}",
    "too_early": "its time has not come",
    "window_closed": "its time has not come",
    "shared": "it names several VMs ({names}) and shared is {decision.shared}",
    "staggered": "VMs listed before this one may approve it until {at}",
    "all_ready": "waits for {detail}",
    "state_lost": "the state file was lost, and what was done before is not known",
    "recommendation": "prepared until it is over, at the latest until {at}",
    "other_event": "event {detail} still needs it prepared",
    "lost_hook": "hook {detail} is not in the policy any more: put it back",
}
_UNPREPARED_MESSAGES: dict[UnpreparedKind, str] = {
    "slot": "it waited for a slot{detail_clause}",
    "fleet": "it waited for an answer of the fleet's store",
    "time": "its time had not come, it was to begin at {at} ({detail})",
    "hook_failed": "{detail}",
    "unfinished": "preparation was not done, {open} had not ended",
    "vm_unknown": "nothing said whether it names this VM",
    "held": "an operator held it",
    "manual": "no operator has approved it",
    "observes": "the agent only observed",
    "immediately": "its rule approves it immediately, and {open} had not ended",
    "failure_allowed": "{detail}, which its rule or an operator allowed",
    "no_notice": "it had started when it was first seen",
}
_HEADLINES = {
    "waiting": "{type} is pending",
    "preparing": "Preparing for a {type}",
    "prepared": "Prepared for a {type}, which is not approved yet",
    "recommendation_prepared": "Prepared for a {type}",
    "held": "{type} is held: {wait_message}",
    "approved": "{type} is approved and may start",
    "started": "{type} is under way",
    "over": "{type} is over",
    "recovering": "Recovering from a {type}",
}
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))
# The texts of these kinds already say that the event waits.
_COMPLETE_MESSAGES: frozenset[WaitKind] = frozenset({"slot", "approval_slot", "fleet", "other_run", "all_ready"})


def wait_message(workflow: Workflow, wait_reason: WaitReason | None, now: datetime | None = None) -> str:
    """Why the event waits, as a clause; "" if it does not. With ``now`` the text also says how long."""
    if wait_reason is None:
        return workflow.recover.failure if workflow.phase == "recovery_failed" else ""
    event = workflow.event
    decision = workflow.decision
    at = format_deadline(wait_reason.at, now) if wait_reason.at else ""
    if wait_reason.kind == "other_vm" and decision.affects == "unknown":
        return "nothing says whether it names this VM"
    if wait_reason.kind == "other_vm" and workflow.is_named_otherwise:
        return f"it names {workflow.named_as}, which is no name of this VM any more"
    if wait_reason.kind == "would_begin":
        return f"the agent only observes; it would {_plan(workflow, wait_reason, at)}"
    return _WAIT_MESSAGES[wait_reason.kind].format(
        at=at,
        detail=wait_reason.detail,
        event=event,
        decision=decision,
        prepare=workflow.prepare,
        status=event.status or "missing",
        names=", ".join(event.resources[:3]),
        on_start=", ".join(decision.on_start),
        never=f"approve is never ({decision.reason})" if decision.rule else decision.reason,
    )


def shown_reason(workflow: Workflow) -> WaitReason | None:
    """Why the event waits; also of one of which nothing says whether it names this VM: no rule handles it."""
    if workflow.wait_reason is None and workflow.decision.affects == "unknown" and is_ahead(workflow):
        return WaitReason(kind="other_vm")
    return workflow.wait_reason


def unprepared_message(workflow: Workflow, now: datetime | None = None) -> str:
    """Why Azure has started the event unprepared, as a clause; "" if it has not. ``now``: as in format_time."""
    unprepared = workflow.started_unprepared
    if unprepared is None:
        return ""
    why = _UNPREPARED_MESSAGES[unprepared.kind].format(
        at=format_time(unprepared.at, now) if unprepared.at else "",
        detail=unprepared.detail,
        detail_clause=f" ({unprepared.detail})" if unprepared.detail else "",
        open=f"hook {unprepared.detail}" if unprepared.detail else "its drain",
    )
    return f"unprepared: {why}"


def _plan(workflow: Workflow, wait_reason: WaitReason, at: str) -> str:
    """The actions of an acting agent about the event, as a clause."""
    decision = workflow.decision
    drain_for = format_duration(decision.drain_for)
    steps = [f"answer /readyz with 503 for {drain_for}"] if decision.drain_for else []
    steps += [f"run {', '.join(decision.prepare)}"] if decision.prepare else []
    if wait_reason.approval is None:
        approval = "approve it at once" if decision.approve == "immediately" or not steps else "approve it"
        if decision.approve_after_seconds:
            approval += f" ({format_duration(decision.approve_after_seconds)} after the first VM that it names)"
        steps.insert(0 if decision.approve == "immediately" else len(steps), approval)
    elif wait_reason.approval == "manual":
        steps.append("wait for an operator to approve it")
    else:
        steps.append(f"not approve it ({wait_message(workflow, WaitReason(kind=wait_reason.approval))})")
    steps += [f"run {', '.join(decision.on_start)} when it has started"] if decision.on_start else []
    steps += [f"run {', '.join(decision.recover)} when it is over"] if decision.recover else []
    actions = ", then ".join(steps)
    return f"begin at {at}: {wait_reason.detail}; it would {actions}" if at else f"now {actions}"


def with_messages(transition: Transition) -> Transition:
    """The transition with the finished texts of its records, for the journal, the log and notifications."""
    workflow = transition.workflow
    records: list[Record] = []
    for record in transition.records:
        text = record_message(workflow, record)
        log_line = record_log_message(workflow, record, text)
        records.append(replace(record, text=text, log_line=log_line, addition=record_addition(workflow, record)))
    return replace(transition, records=tuple(records))


def record_message(workflow: Workflow, record: Record) -> str:
    """The text of a record for the journal."""
    if record.kind == "approval_needed":
        starts = _not_before(workflow)
        before = f" before {starts}" if starts else ""
        return f"an operator must approve it{before}: {record.text}"
    if record.kind == "unprepared":
        return unprepared_message(workflow)
    if record.kind == "vm_unknown":
        return f"nothing says whether it names this VM: {_why_vm_unknown(workflow)}"
    if record.wait_reason is None:
        return record.text
    reason = wait_message(workflow, record.wait_reason)
    return f"held: {_with_start(workflow, reason)}" if record.kind == "held" else reason


def record_addition(workflow: Workflow, record: Record) -> str | None:
    """The part of the record that the title of its notification does not say; None means all of its text."""
    if record.kind == "approval_needed":
        return record.text
    if record.kind == "held" and record.wait_reason is not None:
        return _with_start(workflow, wait_message(workflow, record.wait_reason))
    return _why_vm_unknown(workflow) if record.kind == "vm_unknown" else record.addition


def _why_vm_unknown(workflow: Workflow) -> str:
    """Why nothing says whether the event names this VM, what to do about it, and when Azure starts it."""
    why = "this VM's name is not known; give it as vm.name in the policy, then reload"
    if not workflow.event.resources:
        why = "the event names no VM"
    return why if workflow.was_started else _with_start(workflow, why)


def _with_start(workflow: Workflow, reason: str, now: datetime | None = None) -> str:
    """Why the event is held, and when Azure starts it all the same."""
    if workflow.event.is_recommendation:
        return reason
    starts = _not_before(workflow, now)
    start = f"Azure starts it at {starts}" if starts else "Azure may start it at any moment"
    return f"{reason}; {start}"


def _not_before(workflow: Workflow, now: datetime | None = None) -> str:
    """NotBefore as people read it; "" if none is known. ``now``: as in format_time."""
    at = workflow.event.not_before
    return format_time(at, now) if at else ""


def record_log_message(workflow: Workflow, record: Record, text: str) -> str:
    """The text of a record as one log line for people, which names the event. ``text``: that of the journal."""
    match record.kind:
        case "seen":
            text = _seen(workflow)
        case "named":
            text, _, _ = text.partition(":")
        case "approving":
            text = f"asks Azure to start it ({text})"
        case "approved":
            by = "an operator" if workflow.operator_action == "approve" else f"rule {workflow.decision.rule}"
            text = f"approved ({by})"
        case "waiting":
            text = _waiting(record.wait_reason, text)
    return of_event(workflow.event.type, workflow.event.id, text)


def of_event(type_: str, event_id: str, text: str) -> str:
    """A line of the log for people: the event's type, the beginning of its id, then the text."""
    return f"{type_ or 'event'} {event_id[:SHORT_ID]}: {text}"


def _seen(workflow: Workflow) -> str:
    """The event at first sight, in short; the journal's text has more."""
    event = workflow.event
    starts = _not_before(workflow)
    parts = [
        f"seen, {event.status or 'no status'}",
        f"from {event.source}" if event.source else "",
        f"not before {starts}" if starts else "",
        f"about {format_estimate(event.duration_seconds)} long" if event.duration_seconds is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _waiting(wait_reason: WaitReason | None, text: str) -> str:
    return text if wait_reason is not None and wait_reason.kind in _COMPLETE_MESSAGES else f"waits: {text}"


def notification_title(kind: str, event: EventView, vm: str) -> str:
    """The title of a notification. ``kind``: as in the policy, or test."""
    name = event.type or "event"
    vm = vm or "this VM"
    before = f" before {format_time(event.not_before)}" if event.not_before else ""
    return {
        "test": f"Test of the notifications of {vm}",
        "seen": f"Azure announces a {name} of {vm}",
        "preparing": f"Preparing {vm} for a {name}",
        "prepared": f"{vm} is prepared for a {name}",
        "approval_needed": f"The {name} of {vm} needs your approval{before}",
        "held": f"The {name} of {vm} is held",
        "approved": f"The {name} of {vm} is approved and may start",
        "started": f"The {name} of {vm} has started",
        "recovered": f"The {name} of {vm} is over: {event.outcome}",
        "recovery_failed": f"{vm} has not recovered from a {name}: an operator must act",
        "hook_missing": f"{vm} has not recovered from a {name}: a hook is missing",
        "vm_unknown": f"A {name} is pending, and nothing says whether it names {vm}",
    }[kind]


def headline(facts: Facts, needs: Sequence[Attention]) -> str:
    """The state in one line, for terminal, page and service manager.

    It is the first message of what needs a person, else it is about the most urgent event of this VM. It has no
    running time, so it changes only when something happens.
    """
    if needs:
        return needs[0].message
    if not any(map(is_for_this_vm, facts.workflows)) and (unknown := _unknown(facts)):
        return unknown
    text = _state(facts)
    only_observes = "the agent only observes"
    is_by_choice = facts.mode == "observe" or facts.rules == ()
    return f"{text}; {only_observes}" if is_by_choice and only_observes not in text else text


def _state(facts: Facts) -> str:
    if not facts.workflows:
        return "Nothing is pending"
    first = next(filter(is_for_this_vm, by_urgency(facts.workflows)), None)
    if first is None:
        is_unknown = any(workflow.decision.affects == "unknown" for workflow in facts.workflows)
        whose = "and nothing says whether for this VM" if is_unknown else "none for this VM"
        return f"{plural(len(facts.workflows), 'event')} pending, {whose}"
    phase: str = first.phase
    if first.event.is_recommendation and phase == "prepared":
        phase = "recommendation_prepared"
    elif first.is_over and phase not in ("recovering", "recovery_failed"):
        phase = "over"
    text = _HEADLINES.get(phase, "{type}: {phase}").format(
        type=first.event.type or "event", phase=phase, wait_message=wait_message(first, first.wait_reason)
    )
    if phase == "started" and (unprepared := unprepared_message(first, facts.at)):
        text = f"{text}, {unprepared}"
    return f"{text}, and {len(facts.workflows) - 1} more" if len(facts.workflows) > 1 else text


def _unknown(facts: Facts) -> str:
    """Why it is not known whether an event would be seen and acted on; "" if it is."""
    why = f": {facts.poll_failure_summary}" if facts.poll_failure_summary else ""
    if facts.last_poll_at is None:
        return f"Azure's metadata service has not answered yet{why}"
    if facts.polls != "current":
        return f"Azure's metadata service has not answered since {format_time(facts.last_poll_at, facts.at)}{why}"
    why = f": {facts.vm_failure_summary}" if facts.vm_failure_summary else ""
    if not facts.vm.names:
        return f"The name of this VM is not known yet{why}"
    return "" if facts.vm_confirmed else f"The metadata service has not said yet which VM this is{why}"


def activity(workflow: Workflow, running: Iterable[RunningHook], now: datetime, shown_at: datetime | None) -> str:
    """The agent's work on the event now, or what it waits for, as one sentence without a full stop.

    ``shown_at``: when that is read; None, if later: then each time has its date.
    """
    unprepared = unprepared_message(workflow, shown_at) if workflow.phase == "started" else ""
    return "; ".join(filter(None, [_activity(workflow, running, now, shown_at), unprepared]))


def _activity(workflow: Workflow, running: Iterable[RunningHook], now: datetime, shown_at: datetime | None) -> str:
    hooks = [_hook_activity(hook, now) for hook in running]
    if hooks and is_held(workflow):
        hooks.append("held by an operator: no other begins")
    if hooks:
        return "; ".join(hooks)
    reason = shown_reason(workflow)
    if workflow.phase == "recovery_failed":
        return f"recovery failed, an operator must retry or resolve it: {wait_message(workflow, reason)}"
    if workflow.phase == "preparing" and workflow.drain_until and workflow.drain_until > now:
        return f"drains for {format_elapsed(now, workflow.drain_until)} more (/readyz answers 503)"
    if workflow.phase == "held":
        return f"held: {_with_start(workflow, wait_message(workflow, reason, shown_at), shown_at)}"
    text = wait_message(workflow, reason, shown_at)
    return _waiting(reason, text) if text else _phase_message(workflow)


def _hook_activity(hook: RunningHook, now: datetime) -> str:
    if hook.state == "queued":
        return f"waits for another run of hook {hook.hook}"
    return f"runs the {hook.stage} hook {hook.hook}, {hook_time(hook.since, hook.limit_seconds, now)}"


def hook_time(since: datetime, limit_seconds: float | None, now: datetime) -> str:
    """How long the hook has run, and how long it may."""
    so_far = format_elapsed(since, now)
    if limit_seconds is None:
        return f"{so_far} so far"
    return f"{so_far} of at most {re.sub(' 0[smh]$', '', format_rounded(limit_seconds))}"


def _phase_message(workflow: Workflow) -> str:
    """The text for the phase alone, when no hook runs and nothing is waited for."""
    phases = {
        "approved": "approved; the event is Azure's to start",
        "started": "under way",
        "closed": f"over: {workflow.outcome}",
    }
    if workflow.phase in phases:
        return phases[workflow.phase]
    is_observed = not workflow.decision.has_preparation and workflow.decision.approve == "never"
    if workflow.phase == "waiting" and is_observed:
        return "only observed"
    approval = workflow.approval
    is_asking = approval.state == "requested" or (approval.state == "none" and approval.failures)
    if not (is_asking and is_ahead(workflow)):
        return workflow.phase
    if not approval.failures:
        return "asks Azure to start it"
    tries = "1 try" if approval.failures == 1 else f"{approval.failures} tries"
    return f"asks Azure to start it; {tries} failed"


def operator_message(operator: OperatorView, now: datetime) -> str:
    """Who holds or has approved the event, and when, as a clause; "" if no operator does."""
    if operator.at is None:
        return ""
    done = "approved by {by} at {at}" if operator.action == "approve" else "held by {by} since {at}"
    return done.format(by=operator.by or "an operator", at=format_time(operator.at, now))


def phase_text(workflow: Workflow) -> str:
    """The phase alone, in the word that the status page has for it."""
    return "pending" if workflow.phase == "waiting" else workflow.phase.replace("_", " ")


def duration_text(event: EventView) -> str:
    """Azure's estimate of the interruption, as a phrase."""
    if event.duration_seconds is None:
        return "for an unknown time"
    if event.duration_seconds == 0:
        return "without an interruption"
    return f"for about {format_estimate(event.duration_seconds)}"


def time_left(event: EventView, now: datetime) -> str:
    """When the event may start, and how long until then, as a phrase."""
    at = event.not_before
    was_not_before = f" ({format_time(at, now)})" if at else ""
    if event.type == RECOMMENDATION:
        return f"an eviction may follow{was_not_before}"
    if event.status == "Started":
        return "has started"
    if at is None or at <= now:
        return f"may start at any moment{was_not_before}"
    return f"not before {format_deadline(at, now)}"


def pending_message(pending: Iterable[Workflow]) -> str:
    """How many events are pending, and which of them may wait for an operator."""
    workflows = list(pending)
    if not workflows:
        return "nothing is pending"
    counts = {
        "not recovered": sum(workflow.phase == "recovery_failed" for workflow in workflows),
        "held": sum(workflow.phase == "held" for workflow in workflows),
        "started": sum(workflow.phase == "started" for workflow in workflows),
        "recovering": sum(workflow.phase == "recovering" for workflow in workflows),
        "of other VMs": sum(workflow.decision.affects == "others" for workflow in workflows),
    }
    counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    are = "is" if len(workflows) == 1 else "are"
    events = f"{plural(len(workflows), 'event')} {are} pending"
    return f"{events} ({counted})" if counted else events


def is_for_this_vm(workflow: Workflow) -> bool:
    """Whether it is known that the event names this VM."""
    return workflow.decision.affects in ("self", "shared")


def is_ahead(workflow: Workflow) -> bool:
    """Whether the event has neither started nor ended."""
    return not (workflow.is_over or workflow.was_started)


def is_held(workflow: Workflow) -> bool:
    """Whether an operator's hold is in force; it ends with the start of the event."""
    return workflow.operator_action == "hold" and is_ahead(workflow)


def by_urgency(pending: Iterable[Workflow]) -> list[Workflow]:
    """Sorted: failed recoveries first, then this VM's events: the soonest start, then started, then over."""

    def rank(workflow: Workflow) -> tuple[bool, bool, bool, bool, bool, float]:
        not_before = workflow.event.not_before
        return (
            workflow.phase != "recovery_failed",
            workflow.decision.affects == "others",
            workflow.event.is_recommendation,
            workflow.is_over,
            workflow.event.is_started,
            not_before.timestamp() if not_before else 0.0,
        )

    return sorted(pending, key=rank)


def clock_difference(seconds_ahead: float) -> str:
    """How far this VM's clock is from Azure's, in one unit, as in: it is 10 minutes behind Azure's."""
    seconds = abs(seconds_ahead)
    size, unit = next(one for one in _UNITS if seconds >= 2 * one[0] or one[0] == 1.0)
    direction = "ahead of" if seconds_ahead > 0 else "behind"
    return f"{plural(round(seconds / size), unit)} {direction} Azure's"


def clock_effect(seconds_ahead: float) -> str:
    """What a wrong clock spoils, as a clause."""
    if seconds_ahead > 0:
        return "preparation and maintenance windows begin too early, and hooks get less time than there is"
    return "preparation and maintenance windows begin too late, and hooks may still run when Azure starts an event"
