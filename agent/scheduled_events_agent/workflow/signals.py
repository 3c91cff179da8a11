"""The change that each signal makes to its workflow. It records facts only; ``phases`` acts on them."""

from collections.abc import Container
from datetime import datetime, timedelta

from msgspec.structs import replace

from scheduled_events_agent.imds.compare import Gone, Missing, Seen
from scheduled_events_agent.imds.document import RESTARTING_TYPES, Affects, ScheduledEvent
from scheduled_events_agent.policy import Decision, MatchContext, decide, names_recommendations
from scheduled_events_agent.policy.durations import format_estimate, format_left, format_time
from scheduled_events_agent.workflow import recommendations
from scheduled_events_agent.workflow.approval import apply_approval_answer
from scheduled_events_agent.workflow.fleet import workflow_id
from scheduled_events_agent.workflow.model import (
    ACTION_TEXTS,
    AgentRestarted,
    Approval,
    ApprovalAnswered,
    ClockChanged,
    Context,
    Effect,
    HookFinished,
    OperatorCommand,
    OperatorDecision,
    Outcome,
    Phase,
    PolicyChanged,
    Record,
    Signal,
    Stage,
    StageStatus,
    Transition,
    UpdateHookDeadline,
    Workflow,
    Workflows,
    show,
)
from scheduled_events_agent.workflow.stages import (
    is_nothing_done,
    is_to_recover,
    next_hook,
    other_prepared,
    retried,
    with_result,
    with_void_approval,
)
from scheduled_events_agent.workflow.timing import drain_deadline, is_due
from scheduled_events_agent.workflow.unprepared import is_begun, of_new, with_start_noted

# A small change of an event is noted only once in this time.
_NOTED_EVERY = timedelta(minutes=1)
_SMALL_MOVE_SECONDS = 60.0


def apply_signal(workflow: Workflow | None, signal: Signal, context: Context) -> Transition | None:
    """Apply the signal to the workflow, or to a new one if there is none. None if nothing changes."""
    if workflow is None:
        return _create(signal.event, context) if isinstance(signal, Seen) else None
    match signal:
        case Seen(event):
            return _update(workflow, event, context)
        case Missing():
            return _mark_missing(workflow, signal, context)
        case Gone():
            return _mark_gone(workflow, signal, context)
        case HookFinished() if workflow.id == signal.workflow_id:
            return _finish_hook(workflow, signal)
        case HookFinished():
            return _apply_shared_hook(workflow, signal)
        case ApprovalAnswered():
            return apply_approval_answer(workflow, signal, context)
        case OperatorCommand():
            return _apply_command(workflow, signal, context)
        case AgentRestarted():
            return _restart(workflow, context)
        case PolicyChanged():
            # Of an event that was over before this VM's name was known, it is decided now whose it was.
            is_decided = workflow.is_over and workflow.decision.affects != "unknown"
            return None if is_decided else _decide_anew(workflow, context)
        case ClockChanged(seconds):
            return _shift_times(workflow, seconds, context)


def waiting_for_hook(signal: HookFinished, workflows: Workflows) -> list[str]:
    """The workflow whose hook has ended, and those whose recovery needs the same hook."""
    owner = workflows.get(signal.workflow_id)
    if owner is None:
        return []
    stage_status = owner.stage_status(signal.stage)
    if (stage_status.current, stage_status.run) != (signal.hook, signal.run):
        return []  # a restart has given up this run
    if signal.stage != "recover" or (signal.outcome == "canceled" and stage_status.is_canceling):
        return [owner.id]
    return [owner.id, *(peer.id for peer in other_prepared(owner, workflows) if is_to_recover(peer, signal.hook))]


def _create(event: ScheduledEvent, context: Context) -> Transition | None:
    if event.key in context.expired or (event.is_recommendation and not names_recommendations(context.rules)):
        return None
    facts = MatchContext(names=context.names, not_before_seen_at=context.now)
    decision = decide(context.rules, context.windows, event, facts)
    workflow = Workflow(
        id=workflow_id(event.key, context.now),
        event=event,
        named_as=_name_in(event, context.names),
        decision=decision,
        first_seen_at=context.now,
        not_before_seen_at=context.now,
        boot_id=context.boot_id,
        is_history_unknown=context.is_state_lost,
    )
    workflow = replace(workflow, unprepared=of_new(workflow, context))
    records = [
        Record(kind="seen", text=_describe(event, context.now)),
        Record(kind="decided", text=decision.reason),
    ]
    hold = context.holds.get(event.key)
    if hold is not None and not event.is_started:
        workflow = replace(workflow, operator=OperatorDecision(action="hold", user=hold.user, at=hold.at))
        text = f"held by {hold.user or 'an operator'} since {format_time(hold.at)}"
        records.append(Record(kind="operator", text=text))
    return Transition(workflow=workflow, records=tuple(records))


def _update(workflow: Workflow, event: ScheduledEvent, context: Context) -> Transition:
    old = workflow.event
    void = _why_approval_is_void(workflow, event)
    back: list[Record] = []
    if workflow.is_missing or workflow.is_over:
        back.append(Record(kind="changed", text="is in the document again"))
        workflow = _without_what_a_reboot_has_undone(_resume(workflow, event, context), context)
    if event.key != old.key:
        back.append(Record(kind="renamed", text=f"goes on under the id {event.id} (was {old.id})"))
    changed = {name for name in event.__struct_fields__ if getattr(event, name) != getattr(old, name)}
    is_small = changed <= _small_changes(old, event, context)
    is_moved = "not_before" in changed
    drain_until = workflow.drain_until
    if drain_until is not None and is_moved:
        drain_until = min(drain_until, drain_deadline(workflow.decision, event, context))
    not_before_seen_at = context.now if is_moved and not is_small else workflow.not_before_seen_at
    seen = replace(workflow, event=event, not_before_seen_at=not_before_seen_at, drain_until=drain_until)
    decided = _decide_anew(seen, context)
    records = [*back]
    if decided.records or not (is_small and _was_just_noted(workflow, context)):
        records += _describe_changes(old, event, changed)
    transition = Transition(workflow=decided.workflow, records=tuple(records))
    if void:
        transition = with_void_approval(transition, void)
    new = transition.workflow
    if len(records) > len(back):
        new = replace(new, change_noted_at=context.now)
    effects: tuple[Effect, ...] = ()
    if is_moved and _has_deadline(new) and new.prepare.current is not None:
        effects = (UpdateHookDeadline(workflow_id=new.id),)
    is_same = not transition.records and replace(new, event=old, decision=workflow.decision) == workflow
    return Transition(
        workflow=new,
        effects=effects,
        records=(*transition.records, *decided.records),
        is_small=is_same and not decided.records,
    )


def _describe_changes(old: ScheduledEvent, new: ScheduledEvent, changed: Container[str]) -> list[Record]:
    """One record about all changes; none if they need no line."""
    fields = ("status", "type", "not_before", "resources", "source", "duration_seconds", "description")
    # NotBefore becomes blank when the event starts.
    named = [name for name in fields if name in changed and not (name == "not_before" and new.is_started)]
    text = "; ".join(f"{name} {show(getattr(old, name))} -> {show(getattr(new, name))}" for name in named)
    return [Record(kind="changed", text=text)] if named else []


def _small_changes(old: ScheduledEvent, new: ScheduledEvent, context: Context) -> set[str]:
    """The fields whose change means nothing for this VM."""
    small = {"description", "duration_seconds", "source"}
    if new.affects(context.names) == old.affects(context.names):
        small.add("resources")
    if old.not_before is not None and new.not_before is not None:
        moved_seconds = abs((new.not_before - old.not_before).total_seconds())
        small |= {"not_before"} if moved_seconds < _SMALL_MOVE_SECONDS else set()
    return small


def _was_just_noted(workflow: Workflow, context: Context) -> bool:
    """Whether a change of the event was noted less than a minute ago."""
    noted_at = workflow.change_noted_at
    return noted_at is not None and not is_due(noted_at + _NOTED_EVERY, context.now, _NOTED_EVERY.total_seconds())


def _why_approval_is_void(workflow: Workflow, new: ScheduledEvent) -> str:
    """Why an operator's approval of the event as it was does not count for ``new``; "" if it counts.

    An approval cannot be withdrawn, and the operator has not seen this change.
    """
    old = workflow.event
    if workflow.is_over and not new.is_started:
        return "two answers lacked the event"
    if new.is_ambiguous and not old.is_ambiguous:
        return "the document contradicts itself now"
    names_more_vms = bool(new.resources) and new.affects(old.resources) != "self"
    if new.type != old.type or names_more_vms:
        return "it was for another type, or for fewer VMs"
    return ""


def _decide_anew(workflow: Workflow, context: Context) -> Transition:
    facts = MatchContext(names=context.names, not_before_seen_at=workflow.not_before_seen_at)
    workflow = replace(workflow, named_as=_name_in(workflow.event, context.names) or workflow.named_as)
    old = workflow.decision
    new = decide(context.rules, context.windows, workflow.event, facts)
    has_begun = workflow.prepare.state != "idle" or workflow.on_start.state != "idle"
    lost: tuple[str, ...] = ()
    if has_begun or (workflow.event.is_started and old.rule is not None):
        lost = _lost_hooks(workflow, context)
        workflow, new = _begun_by(workflow, new, lost, context)
    if new == old:
        return Transition(workflow=workflow)
    # The reason holds the values of the conditions: a changed status alone is not a new decision.
    is_news = replace(new, reason=old.reason) != old
    text = f"{new.reason}; no hook any more: {', '.join(lost)}" if lost else new.reason
    records = _records_of_names(workflow.event, old.affects, new.affects, context.now)
    if is_news:
        records = (*records, Record(kind="decided", text=text))
    has_started = workflow.was_started or workflow.outcome == "completed"
    is_known_late = old.affects == "unknown" and old.rule is None and has_started
    wait_reason = workflow.wait_reason
    if is_news and wait_reason is not None and wait_reason.kind in ("would_begin", "would_run_on_start"):
        wait_reason = None  # its text contains the decision, so it is noted again
    decided = Transition(workflow=replace(workflow, decision=new, wait_reason=wait_reason), records=records)
    return with_start_noted(decided, context) if is_known_late else decided


def _name_in(event: ScheduledEvent, names: tuple[str, ...]) -> str:
    """The name by which the event names this VM; "" if it does not."""
    position = event.position(names)
    return "" if position is None else event.resources[position]


def _records_of_names(
    event: ScheduledEvent, before: Affects, affects: Affects, now: datetime
) -> tuple[Record, ...]:
    """A record if the event is known as this VM's only now, or as other VMs': until now no target heard of it."""
    is_own = affects in ("self", "shared")
    if is_own and before in ("unknown", "others"):
        return (Record(kind="named", text=f"names this VM: {_describe(event, now)}"),)
    if affects == "others" and before == "unknown":
        return (Record(kind="named", text=f"names other VMs: {_describe(event, now)}"),)
    return ()


def _begun_by(
    workflow: Workflow, new: Decision, lost: tuple[str, ...], context: Context
) -> tuple[Workflow, Decision]:
    """The workflow and its decision, if a rule has begun its work: this rule also ends it.

    Further hooks and a longer drain of the new rule are added: the event must not be approved without them.
    ``lost``: hooks that are no longer in the policy. They are left out: their failure would stop those after them.
    """
    old = workflow.decision
    by_whom = f"rule {old.rule}" if old.rule else "no rule"
    decision = replace(
        new,
        rule=old.rule,
        reason=new.reason if new.rule == old.rule else f"{by_whom} began it; now {new.reason}",
        prepare=tuple(hook for hook in old.prepare if hook not in lost),
        recover=old.recover,
        drain_for=old.drain_for,
        on_start=old.on_start,
        on_early_start=old.on_early_start,
        expire_after=new.expire_after if new.rule else old.expire_after,
    )
    if not _may_prepare_more(workflow):
        return workflow, decision
    if more := tuple(hook for hook in new.prepare if hook not in old.prepare):
        # A preparation without hooks counts as begun, so that it is recovered.
        run = max(1, workflow.prepare.run) if workflow.prepare.state == "succeeded" else workflow.prepare.run
        workflow = replace(workflow, prepare=replace(workflow.prepare, state="running", run=run))
        more_recover = tuple(hook for hook in new.recover if hook not in old.recover)
        decision = replace(decision, prepare=decision.prepare + more, recover=old.recover + more_recover)
    if new.drain_for > old.drain_for:
        decision = replace(decision, drain_for=new.drain_for)
        workflow = _drained_longer(workflow, decision, context)
    return workflow, decision


def _drained_longer(workflow: Workflow, decision: Decision, context: Context) -> Workflow:
    """The workflow with the drain of ``decision``. It is not ready since its preparation began: that counts."""
    since = workflow.handling_since or context.now
    until = since + timedelta(seconds=decision.drain_for)
    if workflow.drain_until is not None:
        until = max(until, workflow.drain_until)  # after a reboot it has begun anew
    until = min(until, drain_deadline(decision, workflow.event, context))
    if until <= context.now:
        return workflow
    return replace(workflow, prepare=replace(workflow.prepare, state="running"), drain_until=until)


def _lost_hooks(workflow: Workflow, context: Context) -> tuple[str, ...]:
    """Prepare hooks that have still to run and are no longer in the policy."""
    stage_status = workflow.prepare
    if stage_status.state != "running":
        return ()
    ran = (*stage_status.done, stage_status.current)
    return tuple(hook for hook in workflow.decision.prepare if hook not in ran and hook not in context.hooks)


def _may_prepare_more(workflow: Workflow) -> bool:
    is_in_time = workflow.phase in ("preparing", "prepared", "held", "approved") and not workflow.event.is_started
    return is_in_time and workflow.prepare.state in ("running", "succeeded")


def can_resume(workflow: Workflow, event: ScheduledEvent) -> bool:
    """Whether the event, which was gone, may go on as it was: nothing was undone or cut short since.

    An event cannot start twice: one that is Scheduled after it was Started is another one under the same id.
    """
    if (workflow.was_started or workflow.event.is_started) and not event.is_started:
        return False
    is_idle = all(stage_status.current is None for stage_status in workflow.stages)
    is_untouched = not workflow.is_reverted and workflow.recover.state in ("idle", "running")
    is_aborted_by_stop = workflow.prepare.state == "canceled" and not workflow.was_started
    return is_idle and is_untouched and not is_aborted_by_stop


def _resume(workflow: Workflow, event: ScheduledEvent, context: Context) -> Workflow:
    """The workflow as if the event had never been missing. If it was over, it is approved anew.

    Azure's confirmation and an operator's approval count for one appearance, a hold until its own end.
    """
    if workflow.is_over and workflow.operator_action == "hold" and workflow.event.key not in context.holds:
        workflow = replace(workflow, operator=None)
    if workflow.is_over and not event.is_started:
        is_under_way = workflow.approval.state == "requested"
        approval = Approval(state="requested", is_outlived=True) if is_under_way else Approval()
        workflow = replace(workflow, approval=approval)
    if workflow.phase == "recovering":
        phase: Phase = "started" if workflow.was_started else "prepared"
        workflow = replace(workflow, phase=phase, recover=StageStatus())
    return replace(workflow, missing_since=None, is_over=False, outcome="")


def _mark_missing(workflow: Workflow, signal: Missing, context: Context) -> Transition | None:
    if workflow.missing_since is not None:
        return None
    text = "is not in the document; over, if the next answer lacks it too"
    if signal.names_others:
        text = "does not name this VM any more; over for it, if the next answer does not name it either"
    record = Record(kind="missing", text=text)
    return Transition(workflow=replace(workflow, missing_since=context.now), records=(record,))


def _mark_gone(workflow: Workflow, signal: Gone, context: Context) -> Transition:
    outcome: Outcome = "unknown"
    not_before = workflow.event.not_before
    missing_since = workflow.missing_since or context.now
    # Azure may have accepted an approval whose answer was lost.
    is_unapproved = workflow.approval.state == "none" and workflow.approval.failing_since is None
    is_early = is_unapproved and not_before is not None and missing_since < not_before
    if signal.status:
        outcome = "completed" if signal.status == "Completed" else "canceled"
    elif workflow.was_started or workflow.event.is_started:
        outcome = "completed"
    elif workflow.boot_id != context.boot_id and workflow.event.type in RESTARTING_TYPES:
        outcome = "completed"  # this machine was down while it was Started
    elif workflow.event.is_recommendation:
        pass  # it says nothing about the eviction
    elif is_early:
        outcome = "canceled"
    text = "names only other VMs now" if signal.names_others else "is no longer in the document"
    record = Record(kind="gone", text=f"{text} ({outcome})")
    # If it names this VM again later, it counts as another event: so ``missing_since`` is None then.
    since = None if signal.names_others else missing_since
    gone = replace(workflow, is_over=True, missing_since=since, outcome=outcome)
    if workflow.was_started:
        return Transition(workflow=gone, records=(record,))
    # No document has shown its start. What vanishes before NotBefore, or in this boot, may have been canceled.
    if outcome == "completed" and not (is_early or is_begun(workflow, context)):
        return with_start_noted(Transition(workflow=gone, records=(record,)), context)
    return Transition(workflow=replace(gone, unprepared=None), records=(record,))


def _shift_times(workflow: Workflow, seconds: float, context: Context) -> Transition:
    moved = timedelta(seconds=seconds)
    if workflow.handling_since is not None:
        workflow = replace(workflow, handling_since=workflow.handling_since + moved)
    if workflow.vm_unknown_since is not None:
        workflow = replace(workflow, vm_unknown_since=workflow.vm_unknown_since + moved)
    if workflow.drain_until is not None:
        latest = drain_deadline(workflow.decision, workflow.event, context)
        workflow = replace(workflow, drain_until=min(workflow.drain_until + moved, latest))
    effects: tuple[Effect, ...] = ()
    if workflow.prepare.current is not None and _has_deadline(workflow):
        effects = (UpdateHookDeadline(workflow_id=workflow.id),)
    return Transition(workflow=workflow, effects=effects)


def _has_deadline(workflow: Workflow) -> bool:
    """Whether NotBefore, and not only its own time limit, ends a prepare hook."""
    return not workflow.event.is_started or workflow.decision.on_early_start == "finish"


def _apply_command(workflow: Workflow, signal: OperatorCommand, context: Context) -> Transition | None:
    action = signal.action
    is_withdrawal = action == "hold" or (action == "release" and workflow.operator_action == "approve")
    if is_withdrawal and workflow.approval.state == "confirmed":
        return None  # Azure's answer has come with the command
    record = Record(kind="operator", text=f"{ACTION_TEXTS[action]} by {signal.user or 'an operator'}")
    if action == "retry":
        return _retry(workflow, record, context)
    if action == "resolve" and not workflow.is_over:
        released = replace(workflow, operator=None)
        transition = recommendations.end(released, f"{signal.user or 'an operator'} has resolved it")
        return replace(transition, records=(record, *transition.records))
    if action == "resolve":
        return Transition(
            workflow=replace(workflow, recover=replace(workflow.recover, state="resolved")), records=(record,)
        )
    is_untouched = workflow.prepare.state == "idle" and workflow.approval.state == "none"
    ends_hold = workflow.operator_action == "hold" and action != "hold"
    if workflow.phase == "held" and ends_hold and is_untouched:
        workflow = replace(workflow, phase="waiting")
    if is_withdrawal and workflow.operator_action == "approve" and workflow.approval.state == "requested":
        workflow = replace(workflow, approval=replace(workflow.approval, taken_back=workflow.operator))
    if action == "release":
        return Transition(workflow=replace(workflow, operator=None), records=(record,))
    if action != workflow.operator_action:
        workflow = replace(workflow, operator=OperatorDecision(action=action, user=signal.user, at=context.now))
    return Transition(workflow=workflow, records=(record,))


def _retry(workflow: Workflow, record: Record, context: Context) -> Transition:
    """Run the hook that failed again, and then the rest of its stage."""
    stage: Stage = "recover" if workflow.is_over else "prepare"
    stage_status = workflow.stage_status(stage)
    if stage_status.state != "failed":
        return Transition(workflow=workflow, records=(record,))
    again = workflow.with_stage(stage, retried(stage_status))
    if workflow.is_over:
        return Transition(workflow=again, records=(record,))
    transition = _decide_anew(again, context)  # the hook may have been removed from the policy meanwhile
    return replace(transition, records=(record, *transition.records))


def _finish_hook(workflow: Workflow, signal: HookFinished) -> Transition:
    stage_status = workflow.stage_status(signal.stage)
    phrase = f"hook {signal.hook}: {signal.detail or signal.outcome}"
    was_cut_short = signal.outcome == "canceled" and stage_status.is_canceling
    run = stage_status.run if signal.has_run else stage_status.run - 1
    stage_status = replace(stage_status, current=None, is_canceling=False, is_urgent=False, run=run)
    if not was_cut_short:
        stage_status = with_result(stage_status, signal)
    text = f"{phrase} ({signal.outcome})" if signal.detail else phrase
    record = Record(
        kind="hook_canceled" if was_cut_short else "hook_finished",
        text=text if signal.is_required or signal.outcome == "succeeded" else f"{text}, and it is not required",
        stage=signal.stage,
        hook=signal.hook,
        outcome=signal.outcome,
        detail=signal.tail,
    )
    workflow = workflow.with_stage(signal.stage, stage_status)
    if signal.stage == "prepare" and stage_status.state == "failed":
        return with_void_approval(Transition(workflow=workflow, records=(record,)), f"hook {signal.hook} failed")
    return Transition(workflow=workflow, records=(record,))


def _apply_shared_hook(workflow: Workflow, signal: HookFinished) -> Transition | None:
    """A recover hook that ran for one event need not run again for another event that is over as well."""
    recover = workflow.recover
    if recover.state == "resolved":
        return None
    stage_status = with_result(recover, signal)
    fails_now = stage_status.state == "failed" and recover.state != "failed"
    has_failed_before = stage_status.state == "failed" and recover.state == "failed"
    would_run_it_next = workflow.phase == "recovering" and signal.hook == next_hook(workflow, "recover")
    # The failure counts for an event that would run the hook next. Others have hooks before it, and try it later.
    if fails_now and not (would_run_it_next and recover.current is None):
        return None
    if has_failed_before and signal.hook not in stage_status.done:
        return None
    text = f"hook {signal.hook}: has run for another event, once for both"
    record = Record(kind="hook_finished", text=text, stage=signal.stage, hook=signal.hook, outcome=signal.outcome)
    return Transition(workflow=replace(workflow, recover=stage_status), records=(record,))


def _restart(workflow: Workflow, context: Context) -> Transition:
    """No hook runs any more. A hook that ran runs again, and an approval without an answer is sent again."""
    stages: tuple[Stage, ...] = ("prepare", "on_start", "recover")
    for stage in stages:
        stage_status = workflow.stage_status(stage)
        if stage_status.current is not None:
            is_cut = stage_status.is_canceling and stage == "prepare" and _is_past(workflow)
            state = "canceled" if is_cut else stage_status.state
            stage_status = replace(stage_status, current=None, is_canceling=False, is_urgent=False, state=state)
            workflow = workflow.with_stage(stage, stage_status)
    if workflow.approval.state == "requested":
        since = workflow.approval.failing_since or context.now  # its answer is lost
        approval = replace(
            workflow.approval,
            state="none",
            taken_back=None,
            is_outlived=False,
            retry_at=None,
            failing_since=since,
        )
        workflow = replace(workflow, approval=approval)
    workflow = _without_what_a_reboot_has_undone(workflow, context)
    is_same_boot = context.boot_id in (workflow.boot_id, workflow.prepare_boot_id)
    where = "the same boot" if is_same_boot else "after a reboot"
    record = Record(kind="restarted", text=f"the agent restarted ({where}) in phase {workflow.phase}")
    return Transition(workflow=workflow, records=(record,))


def _without_what_a_reboot_has_undone(workflow: Workflow, context: Context) -> Workflow:
    """Reset the prepare stage to its beginning, if it began in another boot and may still be needed.

    The number of its runs stays: what was done, perhaps outside of this VM, is recovered in any case.
    """
    has_begun = workflow.prepare.state != "idle"
    if not has_begun or _is_past(workflow) or workflow.prepare_boot_id == context.boot_id:
        return workflow
    prepare = StageStatus(state="running", run=0 if is_nothing_done(workflow) else max(1, workflow.prepare.run))
    return replace(workflow, prepare=prepare, drain_until=None)


def _is_past(workflow: Workflow) -> bool:
    """Whether the event has started or is over: no preparation for it begins any more."""
    return workflow.was_started or workflow.event.is_started or workflow.is_over


def _describe(event: ScheduledEvent, now: datetime) -> str:
    more = ", ..." if len(event.resources) > 5 else ""
    starts = ""
    if at := event.not_before:
        starts = f"not before {format_time(at)}{format_left(at, now)}"
    parts = [
        f"{event.type or 'an event without a type'} {event.status or '(no status)'}",
        f"from {event.source}" if event.source else "",
        f"for {', '.join(event.resources[:5])}{more}",
        starts,
        f"about {format_estimate(event.duration_seconds)} long" if event.duration_seconds is not None else "",
        f'"{event.description}"' if event.description else "",
    ]
    return ", ".join(part for part in parts if part)
