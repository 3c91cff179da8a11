"""What happens next: the life of one event, from first sight to recovery, as a pure state machine.

Owns every decision about when to run hooks, when to approve and when to recover. Does no I/O, reads no
clock and keeps no state: ``proceed`` takes the board of open workflows and signals, and returns the new
board with the steps that led to it; the caller commits the steps to disk and then performs their effects.
The one invariant: what a step does follows from what is in the workflow, so that after a crash at any
moment the same workflow leads to the same next step.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Literal

import msgspec
from msgspec.structs import replace

from agent import AgentError
from agent.events import Gone, Missing, ScheduledEvent, Seen
from agent.policy import Decision, Facts, MaintenanceWindow, Rule, Start, decide

Phase = Literal[
    "waiting", "preparing", "prepared", "held", "approved", "started", "recovering", "recovery_failed", "closed",
]  # fmt: skip
Outcome = Literal["", "completed", "canceled", "unknown"]
Stage = Literal["prepare", "on_start", "recover"]
HookOutcome = Literal["succeeded", "failed", "timed_out", "canceled", "not_started"]
Word = Literal["", "approved", "held", "retry", "resolve"]
"""What an operator says of an event; "" takes back approved and held."""
NoteKind = Literal[
    "seen", "changed", "renamed", "missing", "gone", "decided", "preparing", "hook_started", "hook_finished",
    "hook_canceled", "prepared", "held", "approving", "approved", "approval_failed", "started", "recovering",
    "recovery_failed",
    "waits", "blocked", "closed", "operator", "restarted",
]  # fmt: skip

# Every arrow of the life of an event. A step along any other one is a bug and raises.
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "waiting": frozenset({"preparing", "prepared", "held", "started", "closed"}),
    "preparing": frozenset({"prepared", "held", "started", "recovering", "closed"}),
    "prepared": frozenset({"preparing", "held", "approved", "started", "recovering", "closed"}),
    "held": frozenset({"waiting", "preparing", "prepared", "approved", "started", "recovering", "closed"}),
    "approved": frozenset({"preparing", "started", "recovering", "closed"}),
    "started": frozenset({"recovering", "closed"}),
    # Back to an earlier phase: the event is in the document again, and no recover hook has begun.
    "recovering": frozenset({"prepared", "approved", "started", "recovery_failed", "closed"}),
    "recovery_failed": frozenset({"recovering", "closed"}),
    "closed": frozenset(),
}

_HELD = "an operator holds it"
# A failed approval is repeated after 1, 2, 4, ... seconds (2, 4, 8, ... after a 429), but at least this often: it
# is all that stands between the machine and the end of its maintenance.
_MAX_RETRY_SECONDS = 30.0
_STILL_NEEDS_IT = " still needs it prepared"
# Of a value that has changed, in the log and the journal: the event itself is kept whole.
_SHOWN_CHARACTERS = 200


class WorkflowError(AgentError):
    """A step that the table of transitions does not allow: a bug, never a circumstance."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one stage (a list of hooks, run in order) has come."""

    state: Literal["idle", "running", "succeeded", "failed", "canceled", "resolved"] = "idle"
    """resolved: it failed, and an operator has put it right by hand."""
    done: tuple[str, ...] = ()
    """Hooks that need not run (again): they succeeded, or failed where a failure does not matter."""
    current: str | None = None
    """The hook in flight; None between two hooks."""
    run: int = 0
    """Counts the hooks started in this stage; tells the end of this run from the end of an earlier one."""
    is_canceling: bool = False
    failure: str = ""
    """The last failure, as a phrase."""
    failed_hook: str = ""
    """The hook at which the stage has failed, until it is tried again."""


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """How far the approval has come."""

    state: Literal["none", "requested", "confirmed"] = "none"
    failures: int = 0
    retry_at: datetime | None = None
    failed_at: datetime | None = None
    """The next try also waits for a document that was read later than this: it may say that the event is over."""


class Workflow(msgspec.Struct, frozen=True, kw_only=True):
    """One event and all that has been done about it. Kept on disk as it is."""

    id: str
    """Unique to this appearance of the event: an event may vanish, and come back under the same id."""
    event: ScheduledEvent
    decision: Decision
    first_seen_at: datetime
    noticed_at: datetime
    """When the event was first seen with its present NotBefore."""
    boot_id: str
    """The boot during which the event was first seen."""
    phase: Phase = "waiting"
    prepare: Progress = Progress()
    on_start: Progress = Progress()
    recover: Progress = Progress()
    drain_until: datetime | None = None
    approval: Approval = Approval()
    operator: Literal["", "approved", "held"] = ""
    missing_since: datetime | None = None
    """When an answer first lacked the event; it is gone once a second one does."""
    is_gone: bool = False
    was_started: bool = False
    is_doubtful: bool = False
    """First seen when the state file had been lost: what was done about it before is not known."""
    begun_at: datetime | None = None
    """When its time had come; with ``shared: first``, the other VMs' turns to approve are counted from it."""
    waits_for: str = ""
    """Why the workflow does not move, as a clause; for people."""
    outcome: Outcome = ""

    @property
    def is_open(self) -> bool:
        return self.phase != "closed"

    @property
    def stages(self) -> tuple[Progress, ...]:
        return self.prepare, self.on_start, self.recover

    @property
    def is_missing(self) -> bool:
        """Whether the last answer lacks the event and the next one tells if it is over."""
        return self.missing_since is not None and not self.is_gone

    @property
    def is_prepared_for(self) -> bool:
        """Preparation has begun and is not yet undone."""
        return self.is_open and self.prepare.state != "idle"


class HookFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The hook in flight has ended."""

    workflow_id: str
    stage: Stage
    hook: str
    run: int
    outcome: HookOutcome
    is_required: bool = True
    """False: the stage goes on even if it failed."""
    detail: str = ""
    tail: str = ""
    """The last output, for the journal."""


class ApprovalAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The service has answered the request to start, or has not been reached (``error_kind``)."""

    workflow_id: str
    error_kind: str = ""
    detail: str = ""


class OperatorSpoke(msgspec.Struct, frozen=True, kw_only=True):
    """An operator has said what to do about the event."""

    workflow_id: str
    word: Word
    user: str


class AgentRestarted(msgspec.Struct, frozen=True):
    """The agent begins anew with workflows from disk: nothing that was in flight is any more."""


class Reconsider(msgspec.Struct, frozen=True):
    """The rules or this VM's names have changed: decide anew."""


class ClockSet(msgspec.Struct, frozen=True):
    """Somebody has set the wall clock: a drain that goes on is to last as long as it would have."""

    seconds: float


Signal = (
    Seen
    | Missing
    | Gone
    | HookFinished
    | ApprovalAnswered
    | OperatorSpoke
    | AgentRestarted
    | Reconsider
    | ClockSet
)


class RunHook(msgspec.Struct, frozen=True, kw_only=True):
    """Start the hook; its end comes back as HookFinished."""

    workflow_id: str
    stage: Stage
    hook: str
    run: int


class CancelHook(msgspec.Struct, frozen=True, kw_only=True):
    """End the hook in flight; its end comes back as HookFinished."""

    workflow_id: str
    stage: Stage


class MoveDeadline(msgspec.Struct, frozen=True, kw_only=True):
    """NotBefore has changed while a prepare hook runs."""

    workflow_id: str


class Approve(msgspec.Struct, frozen=True, kw_only=True):
    """Ask Azure to start the event; the answer comes back as ApprovalAnswered."""

    workflow_id: str
    event_id: str
    is_alone: bool


Effect = RunHook | CancelHook | MoveDeadline | Approve


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened, for the journal, the log and the metrics."""

    kind: NoteKind
    text: str
    stage: str = ""
    hook: str = ""
    outcome: str = ""
    """How the hook ended; "" in other notes."""
    detail: str = ""
    """What else there is to keep, such as the last output of a hook."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The workflow after one move, what is to be done, and what there is to tell."""

    workflow: Workflow
    effects: tuple[Effect, ...] = ()
    notes: tuple[Note, ...] = ()


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a move rests on besides the workflows."""

    now: datetime
    names: tuple[str, ...]
    rules: tuple[Rule, ...]
    windows: Mapping[str, MaintenanceWindow]
    hooks: Container[str]
    """Names of the hooks that there are."""
    hook_seconds: Mapping[str, float] = {}
    """How long each of them may take."""
    reserve: float = 0.0
    """Prepare hooks must end so many seconds before NotBefore."""
    boot_id: str
    is_acting: bool = True
    """False in observe mode: neither hooks nor approvals."""
    document_at: datetime | None
    """When the last document was read; None since the agent started. Before, nothing on disk is acted on."""
    is_state_lost: bool = False
    """The state file was found damaged and this is the first document since."""


Board = Mapping[str, Workflow]
"""Open workflows by their id, oldest first."""


class Progression(msgspec.Struct, frozen=True, kw_only=True):
    """What ``proceed`` returns."""

    board: dict[str, Workflow]
    """The new board, without closed workflows."""
    steps: tuple[Step, ...]
    """In the order in which they were made."""
    faults: tuple[tuple[str, Exception], ...]
    """Bugs met on the way, with the workflow's id: that workflow rests where it was, the others went on."""


class Leave(msgspec.Struct, frozen=True):
    """A gate's answer to the question whether the event may be approved now."""

    answer: Literal["yes", "not yet", "no"]
    reason: str = ""


def proceed(board: Board, signals: Iterable[Signal], context: Context) -> Progression:
    """Take in ``signals``, then move every workflow as far as it goes."""
    workflows = dict(board)
    by_key = {workflow.event.key: key for key, workflow in board.items() if not workflow.is_gone}
    appearances: dict[str, list[str]] = {}
    for workflow in board.values():
        appearances.setdefault(workflow.event.key, []).append(workflow.id)
    steps: list[Step] = []
    faults: dict[str, Exception] = {}

    def apply(step: Step) -> None:
        new, old = step.workflow, workflows.get(step.workflow.id)
        if old is not None and new.phase != old.phase and new.phase not in TRANSITIONS[old.phase]:
            raise WorkflowError(f"{old.phase} -> {new.phase} is no step in the life of an event", kind="bug")
        if old == new and not step.effects and not step.notes:
            return
        workflows[new.id] = new
        # An event that is over may share its key with its own next appearance.
        if old is not None and by_key.get(old.event.key) == old.id:
            del by_key[old.event.key]
        if not new.is_gone:
            by_key[new.event.key] = new.id
        ids = appearances.setdefault(new.event.key, [])
        if new.id not in ids:
            ids.append(new.id)
        steps.append(step)

    for signal in signals:
        same = appearances.get(signal.event.key, ()) if isinstance(signal, Seen) else ()
        gone = [workflows[key] for key in same if workflows[key].is_gone]
        for target in _targets(signal, workflows, by_key, gone):
            try:
                step = _take_in(workflows.get(target), signal, context)
                if step is not None:
                    followed = _may_return(step.workflow.event, gone) if not target else ()
                    apply(step)
                    for old in followed:
                        apply(Step(workflow=replace(old, missing_since=None)))
            except Exception as error:  # noqa: BLE001 - a bug in one event must not stop the others
                faults[target] = error
    # Workflows wait for each other, so each move may let another one move. Every move brings its workflow
    # nearer to the end or to waiting for a signal; the bound only guards against a bug.
    # What is still to come goes first: once that has begun, a recovery that it would cut short is not started.
    moving = sorted((key for key in workflows if key not in faults), key=lambda key: workflows[key].is_gone)
    for _ in range(1000):
        before = len(steps)
        for key in moving:
            try:
                step = _move(workflows[key], workflows, context)
                if step is not None:
                    apply(step)
            except Exception as error:  # noqa: BLE001 - as above
                faults[key] = error
        moving = [key for key in moving if key not in faults]
        if len(steps) == before:
            break
    else:
        faults[""] = WorkflowError(f"workflows do not come to rest: {moving}", kind="bug")
    open_ = {key: workflow for key, workflow in workflows.items() if workflow.is_open}
    return Progression(board=open_, steps=tuple(steps), faults=tuple(faults.items()))


def known_events(board: Board) -> dict[str, ScheduledEvent]:
    """The events that are not over, by key; what the next document is compared with."""
    return {workflow.event.key: workflow.event for workflow in board.values() if not workflow.is_gone}


def has_obeyed(workflow: Workflow, word: str) -> bool:
    """Whether an operator's word that was just taken in stands; a change may have come with it."""
    match word:
        case "retry":
            stage = workflow.recover if workflow.is_gone else workflow.prepare
            return workflow.is_open and stage.state != "failed"
        case "resolve":
            return workflow.recover.state == "resolved"
        case _:
            return workflow.operator == word


def is_ready(board: Board) -> bool:
    """Whether this VM may get work: nothing is prepared for, and all recovery is done."""
    return not any(workflow.is_prepared_for for workflow in board.values())


def next_wake_at(board: Board, context: Context) -> datetime | None:
    """When time alone will next let a workflow move."""
    times = []
    for workflow in board.values():
        if workflow.drain_until and workflow.prepare.state == "running" and workflow.prepare.current is None:
            times.append(workflow.drain_until)
        if workflow.approval.state == "none" and workflow.approval.retry_at:
            times.append(workflow.approval.retry_at)
        if _may_begin(workflow) and workflow.decision.rule and not workflow.is_gone:
            times.append(_start(workflow, context).at)
        if workflow.approval.state == "none" and (speaks_at := _speaks_at(workflow)):
            times.append(speaks_at)
    return min((time for time in times if time > context.now), default=None)


def hook_deadline_at(workflow: Workflow, stage: Stage, reserve_seconds: float, now: datetime) -> datetime | None:
    """When a hook that is started now must have ended; None if only its own time limit counts.

    Prepare hooks end the reserve before NotBefore. With less than the reserve and a second left they get
    what there is until NotBefore; past it the event may start at any moment, and trying is all one can do.
    """
    not_before = workflow.event.not_before
    if stage != "prepare" or not_before is None:
        return None
    for seconds in (reserve_seconds, 0.0):
        left = not_before - now - timedelta(seconds=seconds)
        if left > timedelta(seconds=1):
            return now + left
    return None


# --- Gates: each answers whether the event may be approved now. A further one (all VMs of the event have
# reported ready to a coordination service) would be one more function in this list.


def ask_gates(workflow: Workflow, context: Context) -> Leave:
    """The strictest of all gates' answers."""
    answers = [gate(workflow, context) for gate in GATES]
    for word in ("no", "not yet"):
        reasons = [leave.reason for leave in answers if leave.answer == word]
        if reasons:
            return Leave("no" if word == "no" else "not yet", reasons[0])
    return Leave("yes")


def _service_gate(workflow: Workflow, context: Context) -> Leave:
    """What nobody may overrule: only a scheduled event of this VM can be approved, and only by an acting agent."""
    event = workflow.event
    if workflow.is_gone or workflow.was_started or event.status != "Scheduled":
        return Leave(
            "no", f"only a scheduled event can be approved, and its status is {event.status or 'missing'}"
        )
    if event.affects(context.names) not in ("self", "shared"):
        return Leave("no", "it does not name this VM")
    if workflow.is_missing:
        return Leave("not yet", "it is not in the last document")
    if event.approval_fault:
        return Leave("no", event.approval_fault)
    if not context.is_acting or context.document_at is None:
        return Leave("not yet", "the agent only observes")
    return Leave("yes")


def _rule_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    decision, prepare = workflow.decision, workflow.prepare
    is_overruled = workflow.operator == "approved"
    if decision.approve == "never" and not is_overruled:
        return Leave("no", f"approve is never ({decision.reason})" if decision.rule else decision.reason)
    if decision.approve == "immediately" or prepare.state == "succeeded" or not decision.has_preparation:
        return Leave("yes")
    if prepare.state == "failed":
        if decision.on_failure == "approve" or is_overruled:
            return Leave("yes")
        return Leave("no", f"preparation failed ({prepare.failure})")
    if prepare.state == "canceled":
        return Leave("yes") if is_overruled else Leave("no", "preparation was canceled")
    return Leave("not yet", "preparation is not done")


def _operator_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    if workflow.operator == "held":
        return Leave("no", _HELD)
    if workflow.decision.approve == "manual" and workflow.operator != "approved":
        return Leave("not yet", "an operator must approve it")
    return Leave("yes")


def _time_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    return Leave("not yet", "its time has not come") if workflow.phase == "waiting" else Leave("yes")


def _spokesman_gate(workflow: Workflow, context: Context) -> Leave:
    """An approval covers every VM that the event names; not every VM may speak for all."""
    decision, speaks_at = workflow.decision, _speaks_at(workflow)
    if workflow.operator == "approved":
        return Leave("yes")
    if not decision.may_speak:
        others = ", ".join(workflow.event.resources[:3])
        return Leave("no", f"it names other VMs too ({others}) and shared is {decision.shared}")
    if speaks_at is not None and not _is_due(speaks_at, context.now, decision.speaks_after):
        return Leave("not yet", f"VMs listed before this one may approve it until {_show(speaks_at)}")
    return Leave("yes")


def _speaks_at(workflow: Workflow) -> datetime | None:
    """When this VM approves though VMs listed before it have not; None if it need not wait for them."""
    seconds = workflow.decision.speaks_after
    return workflow.begun_at + timedelta(seconds=seconds) if seconds and workflow.begun_at else None


def _doubt_gate(workflow: Workflow, context: Context) -> Leave:
    del context
    if workflow.is_doubtful and workflow.operator != "approved":
        return Leave("no", "the state file was lost, and what was done before is not known")
    return Leave("yes")


GATES: tuple[Callable[[Workflow, Context], Leave], ...] = (
    _service_gate, _rule_gate, _operator_gate, _time_gate, _spokesman_gate, _doubt_gate,
)  # fmt: skip


# --- Taking in a signal: only facts change here.


def _targets(
    signal: Signal, workflows: Mapping[str, Workflow], by_key: Mapping[str, str], gone: Iterable[Workflow]
) -> list[str]:
    """The ids of the workflows that the signal is for; "" stands for one that is not there yet.

    ``gone``: earlier appearances of the event that is seen.
    """
    match signal:
        case Seen(event, renamed_from):
            return [by_key.get(renamed_from or event.key, "") or _find_returning(event, gone)]
        case Missing(key) | Gone(key):
            return [by_key[key]] if key in by_key else []
        case HookFinished():
            return _who_awaits(signal, workflows)
        case ApprovalAnswered() | OperatorSpoke():
            return [signal.workflow_id] if signal.workflow_id in workflows else []
        case AgentRestarted() | Reconsider() | ClockSet():
            return list(workflows)


def _who_awaits(signal: HookFinished, workflows: Mapping[str, Workflow]) -> list[str]:
    """The workflow whose hook has ended, and those that want the same hook run to recover."""
    owner = workflows.get(signal.workflow_id)
    if owner is None:
        return []
    progress = _progress(owner, signal.stage)
    if (progress.current, progress.run) != (signal.hook, signal.run):
        return []  # the end of a run that a restart has already written off
    if signal.stage != "recover" or (signal.outcome == "canceled" and progress.is_canceling):
        return [owner.id]
    return [owner.id, *(peer.id for peer in _peers(owner, workflows) if _is_to_recover(peer, signal.hook))]


def _take_in(workflow: Workflow | None, signal: Signal, context: Context) -> Step | None:
    if workflow is None:
        return _admit(signal.event, context) if isinstance(signal, Seen) else None
    match signal:
        case Seen(event):
            return _see(workflow, event, context)
        case Missing():
            return _miss(workflow, context)
        case Gone():
            return _lose(workflow, signal, context)
        case HookFinished():
            return (
                _finish_hook(workflow, signal)
                if workflow.id == signal.workflow_id
                else _share_finished_hook(workflow, signal)
            )
        case ApprovalAnswered():
            return _answer(workflow, signal, context)
        case OperatorSpoke():
            return _hear(workflow, signal, context)
        case AgentRestarted():
            return _restart(workflow, context)
        case Reconsider():
            return None if workflow.is_gone else _decide_anew(workflow, context)
        case ClockSet(seconds):
            return _move_times(workflow, seconds, context)


def _admit(event: ScheduledEvent, context: Context) -> Step:
    facts = Facts(names=context.names, noticed_at=context.now)
    decision = decide(context.rules, context.windows, event, facts)
    workflow = Workflow(
        id=f"{event.key}@{context.now:%Y%m%dT%H%M%S.%fZ}",
        event=event,
        decision=decision,
        first_seen_at=context.now,
        noticed_at=context.now,
        boot_id=context.boot_id,
        is_doubtful=context.is_state_lost,
    )
    notes = (Note(kind="seen", text=_describe(event, context.now)), Note(kind="decided", text=decision.reason))
    return Step(workflow=workflow, notes=notes)


def _see(workflow: Workflow, event: ScheduledEvent, context: Context) -> Step:
    old = workflow.event
    notes = []
    if workflow.is_missing or workflow.is_gone:
        notes.append(Note(kind="changed", text="is in the document again"))
        workflow = _bring_back(workflow)
    if event.key != old.key:
        notes.append(Note(kind="renamed", text=f"goes on under the id {event.id} (was {old.id})"))
    fields = ("status", "type", "not_before", "resources", "source", "duration_seconds", "description")
    changed = [name for name in fields if getattr(event, name) != getattr(old, name)]
    # NotBefore goes blank when the event starts; that is no news of its own.
    told = [name for name in changed if not (name == "not_before" and event.is_started)]
    if told:
        text = "; ".join(f"{name} {_show(getattr(old, name))} -> {_show(getattr(event, name))}" for name in told)
        notes.append(Note(kind="changed", text=text))
    operator = workflow.operator
    is_more = event.type != old.type or (event.resources and event.affects(old.resources) != "self")
    is_more = is_more or (event.is_ambiguous and not old.is_ambiguous)
    if operator == "approved" and is_more and workflow.approval.state != "confirmed":
        # It cannot be taken back, and would count for what nobody has looked at.
        operator = ""
        void = (
            "the document contradicts itself now"
            if event.is_ambiguous
            else "it was for another type, or for fewer VMs"
        )
        text = f"the operator's approval is void: {void}"
        notes.append(Note(kind="operator", text=text))
    noticed_at = context.now if event.not_before != old.not_before else workflow.noticed_at
    drain_until = workflow.drain_until
    if drain_until is not None and "not_before" in changed:
        drain_until = min(drain_until, _drain_until(workflow.decision, event, context))
    workflow = replace(workflow, event=event, noticed_at=noticed_at, drain_until=drain_until, operator=operator)
    step = _decide_anew(workflow, context)
    effects: tuple[Effect, ...] = ()
    goes_on = not event.is_started or workflow.decision.on_early_start == "finish"
    if "not_before" in changed and goes_on and workflow.prepare.current is not None:
        effects = (MoveDeadline(workflow_id=workflow.id),)
    return Step(workflow=step.workflow, effects=effects, notes=(*notes, *step.notes))


def _decide_anew(workflow: Workflow, context: Context) -> Step:
    facts = Facts(names=context.names, noticed_at=workflow.noticed_at)
    old, new = workflow.decision, decide(context.rules, context.windows, workflow.event, facts)
    has_begun = workflow.prepare.state != "idle" or workflow.on_start.state != "idle"
    lost: tuple[str, ...] = ()
    if has_begun or (workflow.event.is_started and old.rule is not None):
        # What has begun is carried through, and undone, by the rule that began it. What the new rule wants
        # prepared besides is added: it must not be approved without. A hook that the policy has lost before its
        # turn came is left out: failing, it would keep those from running that the new rule wants.
        more = tuple(hook for hook in new.prepare if hook not in old.prepare)
        lost = _lost_hooks(workflow, context)
        kept = tuple(hook for hook in old.prepare if hook not in lost)
        if more and _may_prepare_more(workflow):
            # What was prepared without any hook, by the promise to recover, has been begun all the same.
            run = max(1, workflow.prepare.run) if workflow.prepare.state == "succeeded" else workflow.prepare.run
            workflow = replace(workflow, prepare=replace(workflow.prepare, state="running", run=run))
            more_recover = tuple(hook for hook in new.recover if hook not in old.recover)
        else:
            more, more_recover = (), ()
        new = replace(
            new,
            rule=old.rule,
            prepare=kept + more,
            recover=old.recover + more_recover,
            drain_for=old.drain_for,
            on_start=old.on_start,
            on_early_start=old.on_early_start,
        )
    if new == old:
        return Step(workflow=workflow)
    # The conditions' values are part of the reason: a changed status alone is not a new decision to tell.
    is_news = replace(new, reason=old.reason) != old
    text = f"{new.reason}; no hook any more: {', '.join(lost)}" if lost else new.reason
    notes = (Note(kind="decided", text=text),) if is_news else ()
    return Step(workflow=replace(workflow, decision=new), notes=notes)


def _lost_hooks(workflow: Workflow, context: Context) -> tuple[str, ...]:
    """Prepare hooks that are still to run and that there are no more."""
    progress = workflow.prepare
    if progress.state != "running":
        return ()
    ran = (*progress.done, progress.current)
    return tuple(hook for hook in workflow.decision.prepare if hook not in ran and hook not in context.hooks)


def _may_prepare_more(workflow: Workflow) -> bool:
    is_in_time = workflow.phase in ("preparing", "prepared", "held", "approved") and not workflow.event.is_started
    return is_in_time and workflow.prepare.state in ("running", "succeeded")


def _may_return(event: ScheduledEvent, gone: Iterable[Workflow]) -> list[Workflow]:
    """The last appearance of an event that is gone; one that another has followed does not return."""
    same = [workflow for workflow in gone if workflow.event.key == event.key and workflow.is_open]
    return [workflow for workflow in same if workflow.missing_since is not None]


def _find_returning(event: ScheduledEvent, gone: Iterable[Workflow]) -> str:
    """The event's last workflow, if the event was gone and nothing has been undone or cut short since; else ""."""
    workflow = next(iter(_may_return(event, gone)), None)
    if workflow is None:
        return ""
    is_idle = all(progress.current is None for progress in workflow.stages)
    recover = workflow.recover
    is_untouched = recover.run == 0 and not recover.done and recover.state in ("idle", "running")
    is_cut_short = workflow.prepare.state == "canceled" and not workflow.was_started
    return workflow.id if is_idle and is_untouched and not is_cut_short else ""


def _bring_back(workflow: Workflow) -> Workflow:
    """As if the event had never been missing."""
    if workflow.phase == "recovering":
        is_confirmed = workflow.approval.state == "confirmed"
        phase: Phase = "started" if workflow.was_started else "approved" if is_confirmed else "prepared"
        workflow = replace(workflow, phase=phase, recover=Progress(), waits_for="")
    return replace(workflow, missing_since=None, is_gone=False, outcome="")


def _miss(workflow: Workflow, context: Context) -> Step | None:
    if workflow.missing_since is not None:
        return None
    note = Note(kind="missing", text="is not in the document; over, if the next answer lacks it too")
    return Step(workflow=replace(workflow, missing_since=context.now), notes=(note,))


def _lose(workflow: Workflow, signal: Gone, context: Context) -> Step:
    outcome: Outcome = "unknown"
    not_before = workflow.event.not_before
    missing_since = workflow.missing_since or context.now
    if signal.status:
        outcome = "completed" if signal.status == "Completed" else "canceled"
    elif workflow.was_started or workflow.event.is_started:
        outcome = "completed"
    elif workflow.boot_id != context.boot_id and workflow.event.type in ("Reboot", "Redeploy"):
        outcome = "completed"  # nobody saw it Started because this machine was away for it
    elif workflow.approval.state == "none" and not_before is not None and missing_since < not_before:
        outcome = "canceled"
    note = Note(kind="gone", text=f"is no longer in the document: {outcome}")
    gone = replace(workflow, is_gone=True, missing_since=missing_since, outcome=outcome)
    return Step(workflow=gone, notes=(note,))


def _move_times(workflow: Workflow, seconds: float, context: Context) -> Step:
    moved = timedelta(seconds=seconds)
    if workflow.begun_at is not None:
        workflow = replace(workflow, begun_at=workflow.begun_at + moved)
    if workflow.drain_until is not None:
        latest = _drain_until(workflow.decision, workflow.event, context)
        workflow = replace(workflow, drain_until=min(workflow.drain_until + moved, latest))
    return Step(workflow=workflow)


def _hear(workflow: Workflow, signal: OperatorSpoke, context: Context) -> Step:
    word = signal.word
    note = Note(kind="operator", text=f"{signal.user or 'an operator'} says: {word or 'released'}")
    if word == "retry":
        return _retry(workflow, note, context)
    if word == "resolve":
        return Step(workflow=replace(workflow, recover=replace(workflow.recover, state="resolved")), notes=(note,))
    is_untouched = workflow.prepare.state == "idle" and workflow.approval.state == "none"
    if workflow.phase == "held" and workflow.operator == "held" != word and is_untouched:
        workflow = replace(workflow, phase="waiting", waits_for="")
    return Step(workflow=replace(workflow, operator=word), notes=(note,))


def _retry(workflow: Workflow, note: Note, context: Context) -> Step:
    """The hook that failed runs again, and then the rest of its stage."""
    stage: Stage = "recover" if workflow.is_gone else "prepare"
    progress = _progress(workflow, stage)
    if progress.state != "failed":
        return Step(workflow=workflow, notes=(note,))
    again = _with_progress(workflow, stage, _tried_again(progress))
    if workflow.is_gone:
        return Step(workflow=again, notes=(note,))
    step = _decide_anew(again, context)  # the policy may have lost the hook meanwhile
    return replace(step, notes=(note, *step.notes))


def _tried_again(progress: Progress) -> Progress:
    return replace(progress, state="running", failure="", failed_hook="")


def _finish_hook(workflow: Workflow, signal: HookFinished) -> Step:
    progress = _progress(workflow, signal.stage)
    phrase = f"hook {signal.hook}: {signal.detail or signal.outcome}"
    was_cut_short = signal.outcome == "canceled" and progress.is_canceling
    progress = replace(progress, current=None, is_canceling=False)
    if not was_cut_short:
        progress = _with_end(progress, signal)
    text = f"{phrase} ({signal.outcome})" if signal.detail else phrase
    note = Note(
        kind="hook_canceled" if was_cut_short else "hook_finished",
        text=text if signal.is_required or signal.outcome == "succeeded" else f"{text}, and it is not required",
        stage=signal.stage,
        hook=signal.hook,
        outcome=signal.outcome,
        detail=signal.tail,
    )
    return Step(workflow=_with_progress(workflow, signal.stage, progress), notes=(note,))


def _with_end(progress: Progress, signal: HookFinished) -> Progress:
    """The stage after one of its hooks has ended by itself."""
    is_success = signal.outcome == "succeeded"
    if not is_success:
        progress = replace(progress, failure=f"hook {signal.hook}: {signal.detail or signal.outcome}")
        if signal.is_required and signal.stage != "on_start":
            return replace(progress, state="failed", failed_hook=signal.hook)
    if progress.failed_hook == signal.hook:
        progress = _tried_again(progress)
    return replace(progress, done=(*progress.done, signal.hook))


def _share_finished_hook(workflow: Workflow, signal: HookFinished) -> Step | None:
    """What the recovery of one event has run need not run again for another one that is over as well."""
    recover = workflow.recover
    if recover.state == "resolved":
        return None
    progress = _with_end(recover, signal)
    if progress.state == "failed" != recover.state:
        # An event that was about to run it has failed with it; one that has other hooks before it tries it again.
        is_next = signal.hook == _next_hook(workflow, "recover")
        if not (is_next and workflow.phase == "recovering" and recover.current is None):
            return None
    elif progress.state == "failed" and signal.hook not in progress.done:
        return None
    text = f"hook {signal.hook}: has run for another event, once for both"
    note = Note(kind="hook_finished", text=text, stage=signal.stage, hook=signal.hook, outcome=signal.outcome)
    return Step(workflow=replace(workflow, recover=progress), notes=(note,))


def _answer(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Step | None:
    if workflow.approval.state != "requested":
        return None
    if not signal.error_kind:
        approval = Approval(state="confirmed")
        note = Note(kind="approved", text="Azure has taken the approval")
        return Step(workflow=replace(workflow, approval=approval), notes=(note,))
    failures = workflow.approval.failures + 1
    # Who has asked too often is to leave the service alone for longer than the second that its limit is about.
    exponent = failures if signal.error_kind == "throttled" else failures - 1
    delay = min(_MAX_RETRY_SECONDS, 2.0 ** min(exponent, 10))
    approval = Approval(
        failures=failures,
        retry_at=context.now + timedelta(seconds=delay),
        failed_at=context.now,
    )
    text = f"approval failed ({signal.error_kind}), next try in {delay:g}s: {signal.detail}"
    note = Note(kind="approval_failed", text=text)
    return Step(workflow=replace(workflow, approval=approval), notes=(note,))


def _restart(workflow: Workflow, context: Context) -> Step:
    """Nothing is in flight any more: a hook that was runs again, an approval without an answer is sent again."""
    for stage in _STAGES:
        progress = _progress(workflow, stage)
        if progress.current is not None:
            state = "canceled" if progress.is_canceling and stage == "prepare" else progress.state
            progress = replace(progress, current=None, is_canceling=False, state=state)
            workflow = _with_progress(workflow, stage, progress)
    if workflow.approval.state == "requested":
        workflow = replace(workflow, approval=replace(workflow.approval, state="none", retry_at=None))
    where = "the same boot" if workflow.boot_id == context.boot_id else "after a reboot"
    note = Note(kind="restarted", text=f"the agent restarted ({where}) in phase {workflow.phase}")
    return Step(workflow=workflow, notes=(note,))


# --- Moving: what follows from the facts.


def _move(workflow: Workflow, workflows: Mapping[str, Workflow], context: Context) -> Step | None:
    """The next step that is due; None if the workflow waits for a signal or for time."""
    if not workflow.is_open or workflow.is_missing or context.document_at is None:
        return None
    if workflow.is_gone:
        return _move_gone(workflow, workflows, context)
    if workflow.event.is_started:
        return _move_started(workflow, workflows, context)
    return _move_scheduled(workflow, workflows, context)


def _move_scheduled(workflow: Workflow, workflows: Mapping[str, Workflow], context: Context) -> Step | None:
    if workflow.was_started:
        return None  # it cannot start twice; only its end is awaited
    decision = workflow.decision
    if workflow.operator == "held" and _is_to_begin(workflow) and context.is_acting:
        if workflow.approval.state == "confirmed":
            return _ask_for_approval(workflow, context)
        return _wait(workflow, _HELD) if workflow.phase == "held" else _hold(workflow, _HELD)
    is_wanted = decision.rule is not None and (decision.has_preparation or decision.approve != "never")
    if _may_begin(workflow):
        if not (is_wanted or workflow.operator == "approved"):
            return None
        if not context.is_acting:
            return _wait(workflow, f"the agent only observes; it would {_plan(workflow, context)}")
        start = _start(workflow, context)
        may_start = workflow.operator == "approved" or workflow.approval.state == "confirmed"
        if start.at > context.now and not may_start:
            return _wait(workflow, f"begins at {_show(start.at)}: {start.reason}")
        return _begin(workflow, context)
    if not context.is_acting:
        return None
    if workflow.prepare.state == "running" and workflow.phase in ("prepared", "held", "approved"):
        more = ", ".join(hook for hook in decision.prepare if hook not in workflow.prepare.done)
        return _to(workflow, "preparing", Note(kind="preparing", text=f"preparation goes on: {more}"))
    if workflow.phase == "preparing" and workflow.prepare.state == "running":
        step = _run_next(workflow, "prepare", workflows, context)
        if step is not None:
            return step
    elif workflow.phase == "preparing":
        return _end_preparation(workflow)
    return _ask_for_approval(workflow, context)


def _may_begin(workflow: Workflow) -> bool:
    """Whether nothing has been done yet; a new decision may want something done where the old one did not."""
    return workflow.phase == "waiting" or (
        workflow.phase in ("prepared", "held", "approved")
        and workflow.prepare.state == "idle"
        and workflow.decision.has_preparation
    )


def _start(workflow: Workflow, context: Context) -> Start:
    return workflow.decision.start(workflow.event, context.now, needed_seconds(workflow.decision, context))


def needed_seconds(decision: Decision, context: Context) -> float:
    """How long before NotBefore the preparation must begin, so that nothing of it is cut short."""
    hooks = sum(context.hook_seconds.get(hook, 0.0) for hook in decision.prepare)
    return decision.drain_for + hooks + context.reserve


def _is_to_begin(workflow: Workflow) -> bool:
    """Whether a drain or a prepare hook is to begin next, once its time has come."""
    prepare = workflow.prepare
    is_between = prepare.state == "running" and prepare.current is None
    return _may_begin(workflow) or (is_between and _next_hook(workflow, "prepare") is not None)


def _begin(workflow: Workflow, context: Context) -> Step:
    decision = workflow.decision
    workflow = replace(workflow, begun_at=context.now)
    if not decision.has_preparation:
        return _to(workflow, "prepared", Note(kind="prepared", text="there is nothing to prepare"))
    drain_until = _drain_until(decision, workflow.event, context) if decision.drain_for else None
    drained = f"not ready for {decision.drain_for:g}s" if decision.drain_for else ""
    plan = ", ".join(filter(None, [drained, *decision.prepare])) or "nothing to run"
    workflow = replace(workflow, prepare=Progress(state="running"), drain_until=drain_until)
    return _to(workflow, "preparing", Note(kind="preparing", text=f"preparation begins: {plan}"))


def _plan(workflow: Workflow, context: Context) -> str:
    """What an agent that acts would do about an event for which nothing has begun, as a clause."""
    decision = workflow.decision
    start = _start(workflow, context)
    steps = [f"answer /readyz with 503 for {decision.drain_for:g}s"] if decision.drain_for else []
    steps += [f"run {', '.join(decision.prepare)}"] if decision.prepare else []
    ready = replace(workflow, phase="prepared", prepare=Progress(state="succeeded"))
    leave = ask_gates(ready, replace(context, is_acting=True))
    if leave.answer == "yes":
        approval = "approve it at once" if decision.approve == "immediately" or not steps else "approve it"
        if decision.speaks_after:
            approval += f" ({decision.speaks_after:g}s after the first VM that it names)"
        steps.insert(0 if decision.approve == "immediately" else len(steps), approval)
    elif leave.answer == "not yet":
        steps.append("wait for an operator to approve it")
    else:
        steps.append(f"not approve it ({leave.reason})")
    if decision.on_start:
        steps.append(f"run {', '.join(decision.on_start)} when it has started")
    if decision.recover:
        steps.append(f"run {', '.join(decision.recover)} when it is over")
    when = "now" if start.at <= context.now else f"at {_show(start.at)} ({start.reason})"
    return f"{when} {', then '.join(steps)}"


def _drain_until(decision: Decision, event: ScheduledEvent, context: Context) -> datetime:
    """When a drain that begins now ends."""
    drain = decision.drain_for
    if event.not_before is not None:
        left = (event.not_before - context.now).total_seconds()
        hooks = needed_seconds(decision, context) - drain
        # With little notice, what the hooks leave of it, but half of it at least.
        drain = min(drain, max(left - hooks, left / 2) if decision.prepare else left)
    return context.now + timedelta(seconds=max(0.0, drain))


def _is_due(at: datetime, now: datetime, longest_seconds: float) -> bool:
    """Whether the time has come. One that is farther away than it can have been set: the clock was set back."""
    return not now < at <= now + timedelta(seconds=longest_seconds)


def _end_preparation(workflow: Workflow) -> Step:
    if workflow.prepare.state == "succeeded":
        return _to(workflow, "prepared", Note(kind="prepared", text="preparation is done"))
    has_leave = workflow.approval.state == "confirmed"
    if has_leave or (workflow.prepare.state == "failed" and workflow.decision.on_failure == "approve"):
        why = "Azure has taken the approval already" if has_leave else "the rule goes on all the same"
        text = f"preparation {workflow.prepare.state} ({workflow.prepare.failure}), and {why}"
        return _to(workflow, "prepared", Note(kind="prepared", text=text))
    return _hold(workflow, f"preparation {workflow.prepare.state} ({workflow.prepare.failure})")


def _ask_for_approval(workflow: Workflow, context: Context) -> Step | None:
    approval = workflow.approval
    if approval.state == "confirmed":
        return None if workflow.phase in ("approved", "preparing") else _to(workflow, "approved")
    leave = ask_gates(workflow, context)
    if leave.answer == "no" and workflow.phase == "prepared":
        return _hold(workflow, leave.reason)
    if leave.answer != "no" and workflow.phase == "held":
        return _to(workflow, "prepared")
    if approval.state == "requested":
        return None
    if leave.answer != "yes":
        return _wait(workflow, leave.reason) if workflow.phase != "preparing" else None
    if approval.retry_at is not None and not _is_due(approval.retry_at, context.now, _MAX_RETRY_SECONDS):
        return None
    if (
        approval.failed_at is not None
        and context.document_at is not None
        and context.document_at <= approval.failed_at <= context.now
    ):
        return None
    return Step(
        workflow=replace(workflow, approval=replace(approval, state="requested", retry_at=None), waits_for=""),
        effects=(
            Approve(workflow_id=workflow.id, event_id=workflow.event.approval_id, is_alone=approval.failures > 0),
        ),
        notes=(Note(kind="approving", text=_approval_reason(workflow)),),
    )


def _approval_reason(workflow: Workflow) -> str:
    if workflow.operator == "approved":
        return "an operator approved it"
    decision = workflow.decision
    if decision.approve == "immediately":
        return f"rule {decision.rule} approves immediately"
    state = (
        "its preparation is done"
        if workflow.prepare.state != "failed"
        else "its rule approves despite the failure"
    )
    return f"rule {decision.rule}: {state}"


def _move_started(workflow: Workflow, workflows: Mapping[str, Workflow], context: Context) -> Step | None:
    if workflow.phase != "started":
        how = "approved" if workflow.approval.state == "confirmed" else f"not approved by us, {workflow.phase}"
        text = f"has started ({how})"
        return _to(replace(workflow, was_started=True), "started", Note(kind="started", text=text))
    if workflow.prepare.state == "running":
        # What a reboot has interrupted is not done again after it: the event is what it was to come before.
        may_finish = workflow.decision.on_early_start == "finish" and workflow.boot_id == context.boot_id
        # What an operator has held before its start is not begun after it.
        may_finish = may_finish and not (workflow.operator == "held" and _is_to_begin(workflow))
        step = (
            _run_next(workflow, "prepare", workflows, context) if may_finish else _cut_short(workflow, "prepare")
        )
        if step is not None:
            return step
    if workflow.on_start.state not in ("idle", "running"):
        return None
    if workflow.on_start.state == "idle":
        if not workflow.decision.on_start:
            return None
        if not context.is_acting:
            if workflow.prepare.state == "running":
                return None  # what that waits for is told already, and two reasons would take turns for ever
            hooks = ", ".join(workflow.decision.on_start)
            return _wait(workflow, f"the agent only observes; it would now run {hooks}")
        workflow = replace(workflow, on_start=Progress(state="running"))
    return _run_next(workflow, "on_start", workflows, context)


def _move_gone(workflow: Workflow, workflows: Mapping[str, Workflow], context: Context) -> Step | None:
    for stage in ("prepare", "on_start"):
        if _progress(workflow, stage).state == "running":
            return _cut_short(workflow, stage)
    if workflow.prepare.state == "idle":
        has_started = workflow.was_started or workflow.event.is_started
        if not (workflow.is_doubtful and has_started and workflow.decision.recover):
            return _close(workflow)
        if not workflow.was_started:
            text = "had started, before this VM's name was known"
            return _to(replace(workflow, was_started=True), "started", Note(kind="started", text=text))
        # Recovering what was not prepared does little harm; what is forgotten stays out of service for ever.
        workflow = replace(workflow, prepare=Progress(state="canceled"))
    recover = workflow.recover
    if recover.state == "resolved":
        return _close(workflow)
    if recover.state == "failed" and workflow.phase == "recovering":
        note = Note(kind="recovery_failed", text=f"recovery failed ({recover.failure}): retry or resolve it")
        return _to(workflow, "recovery_failed", note)
    if recover.state != "failed" and workflow.phase != "recovering":
        rest = ", ".join(hook for hook in workflow.decision.recover if hook not in recover.done)
        text = f"recovery {'begins' if recover.state == 'idle' else 'goes on'}: {rest or 'nothing to run'}"
        recovering = replace(workflow, recover=replace(recover, state="running"))
        return _to(recovering, "recovering", Note(kind="recovering", text=text))
    if recover.current is None and _next_hook(workflow, "recover") is None:
        return _close(replace(workflow, recover=replace(recover, state="succeeded")))
    peers = _peers(workflow, workflows)
    needed_by = [peer for peer in peers if _is_preparing(peer) and _share_hooks(peer, workflow)]
    if recover.current is not None and needed_by:
        return _cut_short(workflow, "recover")
    # What has been recovered so far is prepared anew by now: all of it is to be done again.
    is_undone = bool(recover.done) and any(peer.prepare.run > 0 for peer in needed_by)
    afresh = replace(workflow, recover=replace(recover, done=())) if is_undone else workflow
    if recover.state == "failed":
        return Step(workflow=afresh) if is_undone else None
    if not needed_by:
        return _run_next(workflow, "recover", workflows, context)
    reason = f"event {needed_by[0].event.id}{_STILL_NEEDS_IT}"
    if workflow.waits_for.endswith(_STILL_NEEDS_IT) and workflow.waits_for != reason:
        # Of many events that end one by one, each would tell of each.
        return Step(workflow=replace(afresh, waits_for=reason))
    step = _wait(afresh, reason)
    return step or (Step(workflow=afresh) if is_undone else None)


def _run_next(
    workflow: Workflow, stage: Stage, workflows: Mapping[str, Workflow], context: Context
) -> Step | None:
    """Start the stage's next hook, or end the stage; None while a hook is in flight or must wait."""
    progress = _progress(workflow, stage)
    if progress.current is not None:
        return None
    peers = _peers(workflow, workflows)
    recoveries = [peer for peer in peers if peer.is_gone and peer.recover.current is not None]
    if stage == "prepare":
        drain_for = workflow.decision.drain_for
        if workflow.drain_until is not None and not _is_due(workflow.drain_until, context.now, drain_for):
            return None
        if any(_share_hooks(peer, workflow) for peer in recoveries):
            return None  # that recovery is being cut short; undoing beside doing would leave anything behind
    hook = _next_hook(workflow, stage)
    if hook is None:
        return Step(workflow=_with_progress(workflow, stage, replace(progress, state="succeeded")))
    if stage == "recover" and any(peer.recover.current == hook for peer in recoveries):
        return None  # it runs for another event at this moment, once for both
    if not context.is_acting:
        return _wait(workflow, "the agent only observes")
    if stage == "recover" and hook not in context.hooks:
        # Prepare hooks may fail, and the event is held; this machine would stay out of service unseen.
        return _wait(workflow, f"hook {hook} is not in the policy any more: put it back", kind="blocked")
    progress = replace(progress, state="running", current=hook, run=progress.run + 1)
    return Step(
        workflow=replace(_with_progress(workflow, stage, progress), waits_for=""),
        effects=(RunHook(workflow_id=workflow.id, stage=stage, hook=hook, run=progress.run),),
        notes=(Note(kind="hook_started", text=f"hook {hook} starts", stage=stage, hook=hook),),
    )


def _next_hook(workflow: Workflow, stage: Stage) -> str | None:
    """The stage's first hook that is not done."""
    decision = workflow.decision
    hooks = {"prepare": decision.prepare, "on_start": decision.on_start, "recover": decision.recover}[stage]
    return next((hook for hook in hooks if hook not in _progress(workflow, stage).done), None)


def _cut_short(workflow: Workflow, stage: Stage) -> Step | None:
    """End a running stage: its hook in flight first, then the stage itself."""
    progress = _progress(workflow, stage)
    if progress.current is None:
        # What was begun, and held up by another recovery before anything was done, need not be undone.
        is_nothing_done = progress.run == 0 and workflow.drain_until is None and workflow.decision.prepare != ()
        ended = replace(progress, state="idle" if stage == "prepare" and is_nothing_done else "canceled")
        return Step(workflow=_with_progress(workflow, stage, ended))
    if progress.is_canceling:
        return None
    note = Note(
        kind="hook_canceled", text=f"hook {progress.current} is told to end", stage=stage, hook=progress.current
    )
    return Step(
        workflow=_with_progress(workflow, stage, replace(progress, is_canceling=True)),
        effects=(CancelHook(workflow_id=workflow.id, stage=stage),),
        notes=(note,),
    )


def _close(workflow: Workflow) -> Step:
    by_hand = ", an operator has put its recovery right by hand" if workflow.recover.state == "resolved" else ""
    return _to(workflow, "closed", Note(kind="closed", text=f"is over: {workflow.outcome}{by_hand}"))


def _hold(workflow: Workflow, reason: str) -> Step:
    note = Note(kind="held", text=f"held, NotBefore decides: {reason}")
    return _to(replace(workflow, waits_for=reason), "held", note)


def _wait(workflow: Workflow, reason: str, kind: NoteKind = "waits") -> Step | None:
    """Note down why nothing moves, once."""
    if workflow.waits_for == reason:
        return None
    return Step(workflow=replace(workflow, waits_for=reason), notes=(Note(kind=kind, text=reason),))


def _to(workflow: Workflow, phase: Phase, *notes: Note) -> Step:
    waits_for = workflow.waits_for if phase == "held" else ""
    if phase == "recovery_failed":
        waits_for = workflow.recover.failure
    return Step(workflow=replace(workflow, phase=phase, waits_for=waits_for), notes=notes)


def _peers(workflow: Workflow, workflows: Mapping[str, Workflow]) -> list[Workflow]:
    """The other events that something is prepared for."""
    return [other for other in workflows.values() if other.id != workflow.id and other.is_prepared_for]


def _is_preparing(workflow: Workflow) -> bool:
    """Whether what was prepared for it must stay so: until it is over and its last prepare hook has ended."""
    return not workflow.is_gone or workflow.prepare.current is not None


def _is_to_recover(workflow: Workflow, hook: str) -> bool:
    """Whether the hook is still to run, now that the event is over and none of its prepare hooks runs any more."""
    is_waiting = hook in workflow.decision.recover and hook not in workflow.recover.done
    return is_waiting and not _is_preparing(workflow)


def _share_hooks(one: Workflow, other: Workflow) -> bool:
    """Whether what one event needs prepared is what the other's recovery would undo."""
    mine = {*one.decision.prepare, *one.decision.recover}
    return not mine.isdisjoint((*other.decision.prepare, *other.decision.recover))


_STAGES: tuple[Stage, ...] = ("prepare", "on_start", "recover")


def _progress(workflow: Workflow, stage: Stage) -> Progress:
    return {"prepare": workflow.prepare, "on_start": workflow.on_start, "recover": workflow.recover}[stage]


def _with_progress(workflow: Workflow, stage: Stage, progress: Progress) -> Workflow:
    if stage == "prepare":
        return replace(workflow, prepare=progress)
    if stage == "on_start":
        return replace(workflow, on_start=progress)
    return replace(workflow, recover=progress)


def _describe(event: ScheduledEvent, now: datetime) -> str:
    parts = [
        f"{event.type or 'an event without a type'} {event.status or '(no status)'}",
        f"from {event.source}" if event.source else "",
        f"for {', '.join(event.resources[:5])}{', ...' if len(event.resources) > 5 else ''}",
        f"not before {_show(event.not_before)} ({(event.not_before - now).total_seconds():.0f}s)"
        if event.not_before
        else "",
        f"about {event.duration_seconds:g}s long" if event.duration_seconds is not None else "",
        f'"{event.description}"' if event.description else "",
    ]
    return ", ".join(part for part in parts if part)


def _show(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%SZ}"
    text = "[" + ", ".join(map(str, value[:10])) + "]" if isinstance(value, tuple) else str(value) or '""'
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} (cut)"
