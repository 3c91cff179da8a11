"""Lists what needs a person. Status, page, exit code, /healthz, metrics, alerts and notifications use this list.

Pure: reads no file and no clock. Invariants: it never lists what a rule or an operator wants; and the condition is
"good" only if the agent could act on an event that came now.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Literal, get_args

from scheduled_events_agent.imds.document import RESTARTING_TYPES
from scheduled_events_agent.policy.durations import format_time, plural
from scheduled_events_agent.status.actions import (
    STATE_LOST,
    command,
    effect_of,
    offered_actions,
    quoted,
    short_ids,
)
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.status.messages import (
    by_urgency,
    clock_difference,
    clock_effect,
    is_ahead,
    is_for_this_vm,
)
from scheduled_events_agent.status.status import (
    Attention,
    AttentionKind,
    Condition,
    NotifiedTarget,
    StateLost,
    Status,
    SuggestedCommand,
)
from scheduled_events_agent.workflow import WaitKind, Workflow, needs_all

ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""The kinds of attention, the worst first."""
WITH_DEADLINE: tuple[AttentionKind, ...] = (
    "prepare_failed",
    "approval_needed",
    "approval_failing",
    "restart_unsafe",
)
"""Kinds of events that Azure has not started. Without a deadline the event may start at any moment."""
_FAILED_APPROVALS = 3
_CRASHES = 3
CRASHED_WITHIN = timedelta(hours=1)
"""How long a start after a crash counts."""
_NAMED_WITHIN = timedelta(minutes=5)
# Until the disk is known to be no copy, nothing is done about what is pending. The answer mostly comes at once.
_CONFIRMED_WITHIN = timedelta(minutes=3)
_CONFIRMED_WITHIN_IF_PENDING = timedelta(seconds=10)
_NOTIFIED_WITHIN = timedelta(minutes=5)
_KUBERNETES_WITHIN = timedelta(minutes=5)
_OUT_OF_SERVICE_WITHIN = timedelta(minutes=5)
_ENDING_WAITS: tuple[WaitKind, ...] = ("missing", "stale", "fleet", "approval_slot", "staggered")
"""What an approval waits for, and what comes by itself before NotBefore."""

_MESSAGES: dict[AttentionKind, str] = {
    "recovery_failed": "Recovery from {the_event} failed: {why}.",
    "hook_missing": "Recovery from {the_event} waits for hook {hook}, which is not in the policy.",
    "prepare_failed": "{The_event} is held: {why}.",
    "approval_needed": "{The_event} needs an operator's approval{store_failure}.",
    "not_acting": "{The_event} is over, and what was prepared stays prepared: the agent only observes.",
    "approval_failing": "Azure does not accept the approval of {the_event}: {failures} tries have failed.",
    "out_of_service": "{vm} is out of service{until}.",
    "vm_changed": "This VM is prepared for the {type} of {named_as}{more}, and its name is {vm} now.",
}
NO_AGENT = "no agent runs"
"""The fault of ``Status`` if none does."""
_ABSENT = "Until one runs, no event is prepared for, approved or recovered from."
_UNREADY = "/readyz answers 503 since {unready_since}: no traffic until this is settled."
_CONSEQUENCES: dict[AttentionKind, str] = {
    "recovery_failed": _UNREADY,
    "hook_missing": _UNREADY,
    "prepare_failed": "Azure starts it {when}, prepared or not.",
    "approval_needed": "Without an approval Azure starts it {when}.",
    "not_acting": _UNREADY,
    "approval_failing": "The agent goes on trying; without an approval Azure starts it {when}.",
    "out_of_service": "It stays prepared for {the_event}, which Azure starts {when}.",
    "vm_changed": "The agent acts on no other event of {named_as}.{start}",
}


def attention(facts: Facts) -> tuple[Attention, ...]:
    """All that needs a person: what has the nearest deadline first, then the worst.

    If no agent answers, that comes before all: until one does, no command has an effect.
    """
    found = [
        *of_events(facts),
        *_of_agent(facts),
        *_of_identity(facts),
        *_of_state(facts),
        *_of_next_start(facts),
        *_of_setup(facts),
    ]

    def rank(one: Attention) -> tuple[bool, bool, float, int]:
        is_absence = facts.source == "state_file" and one.kind == "unhealthy"
        return (not is_absence, one.severity != "act", _due_at(one), ATTENTION_KINDS.index(one.kind))

    return tuple(sorted(found, key=rank))


def _due_at(one: Attention) -> float:
    """The time of the deadline; infinite without one, and before all others if Azure may start the event now."""
    if one.deadline is not None:
        return one.deadline.timestamp()
    return -inf if has_deadline(one) else inf


def has_deadline(one: Attention) -> bool:
    """Whether it must be settled before an event starts, which is at any moment if no deadline is known."""
    is_of_start = one.kind in WITH_DEADLINE or (one.kind == "vm_unknown" and bool(one.event_id))
    return one.severity == "act" and (is_of_start or one.deadline is not None)


def condition(facts: Facts, needs: Sequence[Attention]) -> Condition:
    """The agent's condition, for everything that shows a sign or a color, given all that needs a person."""
    if needs:
        return needs[0].severity
    if any(map(is_for_this_vm, facts.workflows)):
        return "busy"
    is_vm_known = bool(facts.vm.names) and facts.vm_confirmed
    is_matched = all(workflow.is_over or workflow.decision.affects != "unknown" for workflow in facts.workflows)
    return "good" if is_vm_known and facts.polls == "current" and is_matched else "unknown"


def health(found: Iterable[Attention]) -> Literal["ok"] | tuple[str, ...]:
    """Why no event could be acted on, given all that needs a person: the answer of ``/healthz``."""
    return tuple([one.message for one in found if is_inability(one)]) or "ok"


def exit_code(status: Status) -> int:
    """Exit code of ``status``. 3: an operator must act; 1: no agent runs, or it could act on no event."""
    acts = [one for one in status.attention if one.severity == "act"]
    if any(one.event_id or not is_inability(one) for one in acts):
        return 3
    return 1 if acts else 0


def is_inability(one: Attention) -> bool:
    """Whether the agent could act on no event that came now."""
    return one.severity == "act" and one.kind in ("unhealthy", "vm_unknown", "vm_changed")


def of_events(facts: Facts) -> Iterator[Attention]:
    """The events that need a person, in the order of ``workflows``: at most one entry for each event.

    Of several that no longer name this VM, the most urgent has the entry: there is but one cause.
    """
    judged = [(workflow, _kind_of(facts, workflow)) for workflow in facts.workflows]
    renamed = by_urgency(workflow for workflow, kind in judged if kind == "vm_changed")
    needed = [(workflow, kind) for workflow, kind in judged if kind is not None and workflow not in renamed[1:]]
    short = short_ids([workflow.event.id for workflow in facts.workflows]) if needed else {}
    for workflow, kind in needed:
        event = workflow.event
        values = _placeholders(facts, workflow)
        # Nothing starts by itself.
        is_warning = event.is_recommendation and not workflow.is_over and kind != "vm_changed"
        is_to_fix = is_warning or kind == "out_of_service"
        yield Attention(
            kind=kind,
            severity="fix" if is_to_fix else "act",
            since=_since(kind, workflow),
            event_id=event.id,
            key=workflow.id,
            message=_MESSAGES[kind].format(**values),
            consequence="" if is_warning else _consequence(kind, facts, values),
            detail=workflow.approval.failure if kind == "approval_failing" else "",
            deadline=_deadline(kind, workflow) if not is_warning else None,
            commands=tuple(_event_commands(kind, facts, workflow, short[event.id])),
        )


def _deadline(kind: AttentionKind, workflow: Workflow) -> datetime | None:
    has_one = kind in WITH_DEADLINE or (kind == "vm_changed" and _may_start(workflow))
    return workflow.event.not_before if has_one else None


def _consequence(kind: AttentionKind, facts: Facts, values: dict[str, str]) -> str:
    text = _CONSEQUENCES[kind]
    if text == _UNREADY and facts.source == "state_file":
        return ""  # no agent answers at /readyz
    return text.format(**values)


def _kind_of(facts: Facts, workflow: Workflow) -> AttentionKind | None:
    """Why the event needs a person: the worst kind if there are several, None if there is none."""
    waits_for = workflow.wait_reason.kind if workflow.wait_reason else ""
    if workflow.phase == "recovery_failed":
        return "recovery_failed"
    if workflow.is_over:
        if facts.mode == "observe" and workflow.is_prepared_for:
            return "not_acting"
        if waits_for == "lost_hook":
            return "hook_missing"
    if facts.mode == "act" and _has_changed_name(facts, workflow):
        return "vm_changed"
    if workflow.is_over or workflow.event.is_started or workflow.was_started or facts.mode == "observe":
        return None
    return _kind_before_start(workflow) or ("out_of_service" if _is_out_of_service(facts, workflow) else None)


def _has_changed_name(facts: Facts, workflow: Workflow) -> bool:
    """Whether this VM is prepared for an event that named it, until the VM's names became others."""
    is_prepared = workflow.is_prepared_for and workflow.is_named_otherwise
    return is_prepared and workflow.event.affects(facts.vm.names) == "others"


def _may_start(workflow: Workflow) -> bool:
    return is_ahead(workflow) and not workflow.event.is_recommendation


def _kind_before_start(workflow: Workflow) -> AttentionKind | None:
    """Why a scheduled event needs an operator before Azure starts it."""
    if workflow.event.status != "Scheduled":
        return None
    waits_for = workflow.wait_reason.kind if workflow.wait_reason else ""
    prepare = workflow.prepare.state
    if workflow.phase == "held" and prepare in ("failed", "canceled") and workflow.operator_action != "hold":
        return "prepare_failed"
    is_asking = workflow.phase != "held" and waits_for in ("", "missing", "stale")
    if is_asking and workflow.approval.failures >= _FAILED_APPROVALS:
        return "approval_failing"
    return "approval_needed" if workflow.approval_needed_since else None


def _is_out_of_service(facts: Facts, workflow: Workflow) -> bool:
    """Whether the VM is prepared, and nothing ends that by itself in the time that its rule asks for.

    An operator's hold is wanted, and an event that Azure has been asked to start is Azure's.
    """
    if not workflow.is_prepared_for or workflow.event.is_recommendation or workflow.operator_action == "hold":
        return False
    if workflow.prepare.state == "running" or workflow.approval.state != "none":
        return False
    if workflow.wait_reason is None or workflow.wait_reason.kind in _ENDING_WAITS:
        return False
    if workflow.early_until is not None:
        return workflow.early_until - facts.at >= _OUT_OF_SERVICE_WITHIN
    since = workflow.event.not_before or workflow.phase_since or workflow.first_seen_at
    return facts.at - since >= _OUT_OF_SERVICE_WITHIN


def _waits_for_store(facts: Facts, workflow: Workflow) -> bool:
    """Whether an operator must approve the event because the fleet's store cannot be used."""
    is_known = not (workflow.is_history_unknown or workflow.event.is_ambiguous)
    is_automatic = workflow.decision.approve != "manual" and is_known
    is_needed = workflow.approval_needed_since is not None and needs_all(workflow) and is_automatic
    return is_needed and facts.fleet is not None and bool(facts.fleet.error)


def _store_failure(facts: Facts) -> str:
    return f"The store of the fleet cannot be used: {facts.fleet.error}" if facts.fleet else ""


def _since(kind: AttentionKind, workflow: Workflow) -> datetime:
    if kind == "approval_needed" and workflow.approval_needed_since:
        return workflow.approval_needed_since
    if kind == "approval_failing" and workflow.approval.failing_since:
        return workflow.approval.failing_since
    return workflow.phase_since or workflow.first_seen_at


def _placeholders(facts: Facts, workflow: Workflow) -> dict[str, str]:
    event = workflow.event
    stage_status = workflow.recover if workflow.is_over else workflow.prepare
    name = f"{event.type or 'event'} of {next(iter(facts.vm.names), 'this VM')}"
    unready_since = workflow.handling_since or workflow.phase_since or workflow.first_seen_at
    others = sum(_has_changed_name(facts, one) for one in facts.workflows) - 1
    until = ", and Azure does not say until when"
    if event.not_before is not None and event.not_before > facts.at:
        until = f" until {format_time(event.not_before, facts.at)}: earlier than its lead"
    return {
        "vm": next(iter(facts.vm.names), "This VM"),
        "type": event.type or "event",
        "named_as": workflow.named_as,
        "more": f" and {plural(others, 'other event')}" if others > 0 else "",
        "start": f" Azure starts this one {_when(workflow, facts.at)}." if _may_start(workflow) else "",
        "until": until,
        "the_event": f"the {name}",
        "The_event": f"The {name}",
        "why": stage_status.failure or f"it was {stage_status.state}",
        "store_failure": f": {_store_failure(facts)}" if _waits_for_store(facts, workflow) else "",
        "hook": workflow.wait_reason.detail if workflow.wait_reason else "",
        "failures": str(workflow.approval.failures),
        "when": _when(workflow, facts.at),
        "unready_since": format_time(unready_since, facts.at),
    }


def _event_commands(
    kind: AttentionKind, facts: Facts, workflow: Workflow, short_id: str
) -> Iterator[SuggestedCommand]:
    if kind == "hook_missing" and workflow.wait_reason:
        yield _edit(facts, f"hook {workflow.wait_reason.detail} again", "; recovery goes on by itself")
    if kind == "vm_changed":
        yield _edit(facts, f"vm.name: {workflow.named_as}, or the same in vm.aliases")
        if facts.reload_command:  # else the command above is check
            yield _check(facts, "see before the reload that the policy is right")
        yield _doctor(facts)
    if kind == "not_acting":
        yield _edit(facts, "mode: act", ", or restart it without --observe")
    if kind == "approval_failing" and facts.poll_failure:
        yield _doctor(facts)
    elif kind == "approval_failing":
        line = command(facts.command_options, "history", "--event", quoted(short_id))
        yield SuggestedCommand(command=line, effect="show each try and its error")
    if kind == "approval_failing":
        yield from _approval_from_outside(facts, workflow)
    for action in offered_actions(facts, workflow):
        line = command(facts.command_options, action, quoted(short_id))
        yield SuggestedCommand(command=line, effect=effect_of(action, workflow))
    if _waits_for_store(facts, workflow):
        yield _ask_store(facts)


def _of_agent(facts: Facts) -> Iterator[Attention]:
    for fault in facts.faults:
        is_absence = facts.source == "state_file"
        failure = facts.start_failure
        text = f"{fault}: {failure.reason}" if failure else fault
        yield Attention(
            kind="unhealthy",
            severity="act",
            since=facts.faults_since,
            message=_sentence(_capitalized(text)),
            consequence=_ABSENT if fault == NO_AGENT else "",
            detail=failure.detail if failure else "",
            commands=facts.supervisor_commands if is_absence else (_doctor(facts),),
        )
    if facts.polls == "overdue":
        since = facts.last_poll_at or facts.started_at
        start = "" if facts.last_poll_at else "the agent started at "
        ago = f" since {start}{format_time(since, facts.at)}" if since else ""
        yield Attention(
            kind="unhealthy",
            severity="act",
            since=since,
            message=_sentence(
                f"Azure's metadata service has not answered{ago}: {facts.poll_failure_summary or 'it hangs'}"
            ),
            consequence="No new event is seen.",
            detail=facts.poll_failure or "",
            commands=(_doctor(facts),),
        )
    crashes = [at for at in facts.unclean_starts if facts.at - at < CRASHED_WITHIN]
    if len(crashes) >= _CRASHES:
        yield Attention(
            kind="agent_restarts",
            severity="fix",
            since=crashes[0],
            message=f"The agent ended by itself and was started again, {len(crashes)} times within an hour.",
            commands=facts.supervisor_commands,
        )


def _of_identity(facts: Facts) -> Iterator[Attention]:
    """What can be done about no event, because it is not known which VM this is."""
    started_at = facts.started_at
    if started_at is None or (facts.vm.names and facts.vm_confirmed):
        return
    pending = [workflow for workflow in facts.workflows if workflow.decision.affects != "others"]
    ahead = [one for one in pending if facts.mode == "act" and one.event.status == "Scheduled" and _may_start(one)]
    first = min(ahead, key=_starts_at, default=None)
    if facts.vm.names:
        within = _CONFIRMED_WITHIN_IF_PENDING if pending else _CONFIRMED_WITHIN
        message = "The metadata service has not said since the boot which VM this is"
        consequence = "Its disk may be a copy of another VM's: until it is known, no event is acted on."
    elif first:
        within = timedelta(0)
        others = f", nor of {len(ahead) - 1} more" if len(ahead) > 1 else ""
        type_ = first.event.type or "event"
        message = f"It is not known whether the {type_} is of this VM{others}, for its name is not known"
        consequence = f"Azure starts it {_when(first, facts.at)}, prepared or not."
    else:
        within = _NAMED_WITHIN
        message = "The name of this VM is not known"
        consequence = "The agent cannot match any event to this VM."
    is_known_cause = not first and facts.polls == "overdue"
    if facts.at - started_at < within or is_known_cause:
        return
    why = f": {facts.vm_failure_summary}" if facts.vm_failure_summary else ""
    yield Attention(
        kind="vm_unknown",
        severity="act",
        since=first.first_seen_at if first else started_at,
        event_id=first.event.id if first else "",
        key=first.id if first else "",
        message=_sentence(f"{message}{why}"),
        consequence=consequence,
        deadline=first.event.not_before if first else None,
        detail=facts.vm_failure,
        commands=(_doctor(facts), _edit(facts, "vm.name: this VM's name in Azure")),
    )


def _when(workflow: Workflow, now: datetime) -> str:
    at = workflow.event.not_before
    return f"at {format_time(at, now)}" if at and at > now else "at any moment"


def kind_of_loss(loss: StateLost) -> AttentionKind:
    """The kind under which a loss of state is listed."""
    return "foreign_state" if loss.is_foreign else "state_lost"


def loss_message(loss: StateLost, now: datetime) -> str:
    """What happened, as one sentence without a capital letter and a full stop."""
    if loss.is_foreign:
        return f"this disk may be prepared for an event of another VM: {loss.reason}"
    return f"the state file was damaged at {format_time(loss.at, now)}: {loss.reason}"


def _of_state(facts: Facts) -> Iterator[Attention]:
    """A loss of state, unless no rule recovers: then nothing that was forgotten puts this VM back into service."""
    loss = facts.state_lost
    if loss is None or (loss.recover == () and not loss.is_foreign):
        return
    hooks = f"the recover hooks ({', '.join(loss.recover)})" if loss.recover else "the recover hooks"
    line = command(facts.command_options, "resolve", STATE_LOST)
    resolve = SuggestedCommand(command=line, effect="only when you have done manually what these hooks do")
    if loss.is_foreign:
        line = command(facts.command_options, "history")
        history = SuggestedCommand(command=line, effect="show what was prepared")
        yield Attention(
            kind=kind_of_loss(loss),
            severity="fix",
            since=loss.at,
            message=_sentence(_capitalized(loss_message(loss, facts.at))),
            consequence=f"The agent does not run {hooks} for it: this VM may be out of service.",
            commands=(history, resolve) if facts.source == "agent" else (),
        )
        return
    consequence = f"Whether {hooks} have run is not known: what was prepared before may still be out of service."
    if loss.on_clear and facts.mode == "act":
        hooks = ", ".join(loss.on_clear)
        consequence += f" The next start with nothing pending runs on_clear ({hooks}), which settles this."
    yield Attention(
        kind=kind_of_loss(loss),
        severity="act",
        since=loss.at,
        message=_sentence(_capitalized(loss_message(loss, facts.at))),
        consequence=consequence,
        commands=(resolve,) if facts.source == "agent" else (),
    )


def _of_next_start(facts: Facts) -> Iterator[Attention]:
    """What keeps the next start from working. A restart by an event may come before an operator does."""
    policy = facts.policy
    if policy is None:
        return
    restart = _next_restart(facts)
    failure = policy.next_start_failure
    if policy.rejected:
        in_force = f"In force is the policy accepted at {format_time(policy.read_at, facts.at)}"
        yield Attention(
            kind="policy_rejected",
            severity="act" if failure else "fix",
            since=policy.rejected_at,
            message=_sentence(f"The policy file is rejected: {policy.rejected_summary}"),
            consequence=_sentence(f"{in_force}. After a restart no agent runs: {failure}")
            if failure
            else f"{in_force}, also after a restart.",
            detail=policy.rejected,
            deadline=restart.event.not_before if restart and failure else None,
            commands=(_check(facts, "show all that is wrong with it"),),
        )
        return
    if not failure and "agent.state_dir" in policy.needs_restart:
        failure = "the next start begins with another agent.state_dir, in which no event is known"
    if restart is not None and failure and facts.mode == "act":
        yield Attention(
            kind="restart_unsafe",
            severity="act",
            since=restart.first_seen_at,
            event_id=restart.event.id,
            key=restart.id,
            message=_sentence(f"After the {restart.event.type} the agent does not go on: {failure}"),
            consequence="What was prepared is not recovered.",
            deadline=restart.event.not_before,
            commands=(_doctor(facts),),
        )


def _next_restart(facts: Facts) -> Workflow | None:
    """The first event that will restart this VM."""
    restarts = [
        workflow
        for workflow in facts.workflows
        if workflow.event.type in RESTARTING_TYPES
        and workflow.event.status == "Scheduled"
        and is_for_this_vm(workflow)
    ]
    return min(restarts, key=_starts_at, default=None)


def _starts_at(workflow: Workflow) -> float:
    return workflow.event.not_before.timestamp() if workflow.event.not_before else 0.0


def _of_setup(facts: Facts) -> Iterator[Attention]:
    if rejected := facts.web_config_rejected:
        yield Attention(
            kind="web_config_rejected",
            severity="fix",
            since=rejected.since,
            message=_sentence(f"agent.web_config is rejected: {_first_line(rejected.reason)}"),
            consequence="Its previous content is in force, and its certificate may expire. "
            "After a restart no pages are served.",
            commands=(_check(facts, "show what is wrong with it"),),
        )
    if clock := facts.clock_wrong:
        yield Attention(
            kind="clock_wrong",
            severity="fix",
            since=clock.since,
            message=f"The clock of this VM is {clock_difference(clock.seconds_ahead)}.",
            consequence=_capitalized(f"{clock_effect(clock.seconds_ahead)}."),
            commands=(
                SuggestedCommand(command=clock.command, effect="show whether something sets the clock"),
                _doctor(facts),
            ),
        )
    is_of_event = any(_waits_for_store(facts, workflow) for workflow in facts.workflows)
    if facts.fleet is not None and facts.fleet.error and not is_of_event:
        yield Attention(
            kind="fleet_unavailable",
            severity="fix",
            since=facts.fleet.unavailable_since,
            message=_sentence(_store_failure(facts)),
            commands=(_ask_store(facts),),
        )
    yield from _of_kubernetes(facts)
    for target in facts.notify:
        if found := _of_target(facts, target):
            yield found


def _of_kubernetes(facts: Facts) -> Iterator[Attention]:
    """What the node's requests say of the API server. If it is also the fleet's store, that entry is enough."""
    failure = facts.kubernetes_failure
    if failure is None or facts.at - failure.since < _KUBERNETES_WITHIN:
        return
    if facts.fleet is not None and facts.fleet.error.endswith(failure.reason):  # what it asked for comes first
        return
    yield Attention(
        kind="kubernetes_unavailable",
        severity="fix",
        since=failure.since,
        message=_sentence(f"The conditions of the Kubernetes node cannot be updated: {failure.reason}"),
        consequence="The cluster does not see what happens to this node; events are handled all the same.",
        commands=(_doctor(facts),),
    )


def _of_target(facts: Facts, target: NotifiedTarget) -> Attention | None:
    failure = target.failure
    if target.lost_at is not None:
        are = "is" if target.lost == 1 else "are"
        what = plural(target.lost, "notification")
        message = f"{what} to {target.name} {are} lost: {target.lost_reason}"
        since = target.lost_at
    elif failure is not None and facts.at - failure.since >= _NOTIFIED_WITHIN:
        if facts.kubernetes_failure is not None and failure.reason == facts.kubernetes_failure.reason:
            return None  # the same API server, for the same reason
        message = f"Notifications to {target.name} fail: {failure.reason}"
        since = failure.since
    else:
        return None
    test = command(facts.command_options, "notify", "test", quoted(target.name))
    return Attention(
        kind="notifications_failing",
        severity="fix",
        since=since,
        message=_sentence(message),
        commands=(SuggestedCommand(command=test, effect="send it a test"),),
    )


def _doctor(facts: Facts) -> SuggestedCommand:
    return SuggestedCommand(command=command(facts.command_options, "doctor"), effect="find the problem")


def _ask_store(facts: Facts) -> SuggestedCommand:
    line = command(facts.command_options, "fleet", "status")
    return SuggestedCommand(command=line, effect="ask the store")


def _edit(facts: Facts, change: str, then: str = "") -> SuggestedCommand:
    """The command that has the agent read the policy again, for when a person has changed it."""
    file = facts.policy.file if facts.policy else "the policy file"
    effect = f"edit {file}: {change}, then reload{then}"
    if not facts.reload_command:
        return _check(facts, effect)
    return SuggestedCommand(command=facts.reload_command, effect=effect)


def _approval_from_outside(facts: Facts, workflow: Workflow) -> Iterator[SuggestedCommand]:
    """The approval that needs no metadata service. Its options were read in the reference, and tried nowhere."""
    name = next(iter(facts.vm.names), "")
    if name and workflow.event.id:
        line = "az maintenance scheduledevents acknowledge --resource-group GROUP --resource-type virtualMachines"
        line += f" --resource-name {quoted(name)} --scheduled-events-id {quoted(workflow.event.id)}"
        yield SuggestedCommand(command=line, effect="approve it from outside the VM; more in docs/azure.md")


def _check(facts: Facts, effect: str) -> SuggestedCommand:
    return SuggestedCommand(command=command(facts.command_options, "check"), effect=effect)


def _sentence(text: str) -> str:
    """The text with a full stop, unless it ends as a sentence already."""
    return text if text.endswith((".", "?")) else f"{text}."


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
