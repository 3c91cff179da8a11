"""``proceed``: applies the signals to the open workflows, then moves every workflow as far as it goes."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.imds.compare import Gone, Missing, Seen
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.workflow.approval import why_approval_needed
from scheduled_events_agent.workflow.fleet import begins_alone_at, counts_for_slots, latest_begin
from scheduled_events_agent.workflow.model import (
    TRANSITIONS,
    ApprovalAnswered,
    Approve,
    Board,
    Context,
    HookFinished,
    Note,
    NoteKind,
    OperatorAction,
    OperatorCommand,
    RunHook,
    Signal,
    Step,
    WaitKind,
    Waits,
    Workflow,
    WorkflowError,
)
from scheduled_events_agent.workflow.phases import ask_approval_gates, move
from scheduled_events_agent.workflow.recommendations import expires_at
from scheduled_events_agent.workflow.signals import may_return, take_in, waiting_for_hook
from scheduled_events_agent.workflow.stages import may_begin, share_hooks
from scheduled_events_agent.workflow.timing import start_of, turn_to_approve

# An approval that waits for a later document checks this often whether there is one.
_LATER_DOCUMENT = timedelta(seconds=1)
# These reasons are not written to the journal: the answer of the fleet's table, or of the service, comes soon.
_UNTOLD: tuple[WaitKind, ...] = ("fleet", "missing")
# Of each of these kinds only the first is written: its details change with each VM, or with each event that ends.
_TOLD_ONCE: tuple[WaitKind, ...] = ("slot", "all_ready", "other_event")


class Progression(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``proceed``."""

    board: dict[str, Workflow]
    """The open workflows as they are now. Closed ones are left out."""
    steps: tuple[Step, ...]
    """All steps, in the order in which they were made."""
    faults: tuple[tuple[str, Exception], ...]
    """Bugs that were met, each with the id of its workflow, or of its event if that is new.

    That workflow stays where it was; the others went on.
    """


def proceed(board: Board, signals: Iterable[Signal], context: Context) -> Progression:
    """Apply ``signals``, then move every workflow as far as it goes."""
    turn = _Turn(board, context)
    for signal in signals:
        for key in turn.targets(signal):
            name = signal.event.id if isinstance(signal, Seen) and not key else key
            turn.attempt(name, take_in, turn.workflows.get(key), signal, context)
    turn.move_all()
    open_ = {key: workflow for key, workflow in turn.workflows.items() if workflow.is_open}
    return Progression(board=open_, steps=tuple(turn.steps), faults=tuple(turn.faults.items()))


class _Turn:
    """One call of ``proceed``: the workflows as they change, and the steps that changed them."""

    def __init__(self, board: Board, context: Context) -> None:
        self.workflows = dict(board)
        self.steps: list[Step] = []
        self.faults: dict[str, Exception] = {}
        self._context = context
        # Workflow ids by the event's key. No document has an event twice.
        self._present = {w.event.key: w.id for w in board.values() if not w.is_over}
        self._gone = {w.event.key: w.id for w in board.values() if w.is_over and w.missing_since is not None}

    def targets(self, signal: Signal) -> list[str]:
        """The workflows that the signal is for; "" stands for a new one."""
        match signal:
            case Seen(event, renamed_from):
                gone = self._gone.get(event.key, "")
                returns = gone if gone and may_return(self.workflows[gone], event) else ""
                return [self._present.get(renamed_from or event.key, returns)]
            case Missing(key) | Gone(key):
                return [self._present[key]] if key in self._present else []
            case HookFinished():
                return waiting_for_hook(signal, self.workflows)
            case ApprovalAnswered() | OperatorCommand():
                return [signal.workflow_id] if signal.workflow_id in self.workflows else []
            case _:
                return list(self.workflows)

    def move_all(self) -> None:
        """Move workflows until none moves any more: they wait for each other.

        Events that are not over move first, and evictions before the others: what they begin may keep other
        workflows from beginning.
        """

        def order(key: str) -> tuple[bool, bool]:
            workflow = self.workflows[key]
            return workflow.is_over, workflow.event.type != "Preempt"

        moving = sorted(self.workflows, key=order)
        for _ in range(1000):
            before = len(self.steps)
            reasons = {}
            for key in moving:
                if key not in self.faults:
                    reasons[key] = self.attempt(key, move, self.workflows[key], self.workflows, self._context)
            if len(self.steps) == before:
                for key, waits in reasons.items():
                    self.attempt(key, explain, self.workflows[key], waits, self._context)
                return
        self.faults[""] = WorkflowError(f"workflows do not stop moving: {moving}", kind="bug")

    def attempt(self, key: str, find_step: Callable[..., Step | Waits | None], *arguments: object) -> Waits | None:
        """Make the step, or return why there is none. A bug in one event must not stop the other events."""
        try:
            found = find_step(*arguments)
            if not isinstance(found, Step):
                return found
            self._apply(found)
        except Exception as error:  # noqa: BLE001 - a bug in one event must not stop the others
            self.faults[key] = error
        return None

    def _apply(self, step: Step) -> None:
        new = step.workflow
        old = self.workflows.get(step.workflow.id)
        if old is not None and new.phase != old.phase and new.phase not in TRANSITIONS[old.phase]:
            raise WorkflowError(f"{old.phase} -> {new.phase} is not an allowed transition", kind="bug")
        if breach := _breach(old or new, step, self._context):
            raise WorkflowError(breach, kind="bug")
        if old is not None and new.phase != old.phase:
            new = replace(new, phase_since=self._context.now)
            step = replace(step, workflow=new)
        if old != new or step.effects or step.notes:
            self.steps.append(step)
            self.workflows[new.id] = new
        if old is None and new.event.key in self._gone:
            # Only the last appearance of an event may go on if it comes back.
            followed = self.workflows[self._gone[new.event.key]]
            self._apply(Step(workflow=replace(followed, missing_since=None)))
        if any(isinstance(effect, RunHook) and effect.stage == "recover" for effect in step.effects):
            for peer in list(self.workflows.values()):
                if peer.is_over and share_hooks(peer, new):
                    self._apply(Step(workflow=replace(peer, is_undone=True)))


def _breach(before: Workflow, step: Step, context: Context) -> str:
    """Which effect of the step is not allowed to the workflow as it was before, as a sentence; "" if all are."""
    for effect in step.effects:
        if isinstance(effect, Approve) and ask_approval_gates(before, context).answer != "yes":
            return "it was to be approved although its gates do not allow that"
        is_recovery = isinstance(effect, RunHook) and effect.stage == "recover"
        if is_recovery and before.prepare.state == "idle":
            return "it was to be recovered from although nothing was prepared for it"
    return ""


def explain(workflow: Workflow, waits: Waits | None, context: Context) -> Step | None:
    """Record why the workflow waits now, and since when it needs an operator's approval; news gets a note."""
    if not workflow.is_open:
        return None
    notes = [] if waits is None or not _is_news(workflow.waits, waits) else [Note(kind=_kind(waits), waits=waits)]
    needed_since = workflow.approval_needed_since
    why_needed = why_approval_needed(workflow, context)
    if why_needed and needed_since is None:
        notes.append(Note(kind="approval_needed", text=why_needed))
    needed_since = (needed_since or context.now) if why_needed else None
    explained = replace(workflow, waits=waits, approval_needed_since=needed_since)
    return Step(workflow=explained, notes=tuple(notes)) if explained != workflow else None


def _is_news(before: Waits | None, now: Waits) -> bool:
    is_same_kind = before is not None and before.kind == now.kind
    return before != now and now.kind not in _UNTOLD and not (is_same_kind and now.kind in _TOLD_ONCE)


def _kind(waits: Waits) -> NoteKind:
    return "hook_missing" if waits.kind == "lost_hook" else "waits"


def known_events(board: Board) -> dict[str, ScheduledEvent]:
    """The events that are not over, by key; the next document is compared with them."""
    return {workflow.event.key: workflow.event for workflow in board.values() if not workflow.is_over}


def has_obeyed(workflow: Workflow, action: OperatorAction) -> bool:
    """Whether an operator's action has taken effect; a change that came with it may have made it void."""
    match action:
        case "retry":
            stage = workflow.recover if workflow.is_over else workflow.prepare
            return workflow.is_open and stage.state != "failed"
        case "resolve":
            return workflow.recover.state == "resolved" or workflow.outcome == "expired"
        case "release":
            return workflow.operator_action == ""
        case "approve" | "hold":
            return workflow.operator_action == action


def is_ready(board: Board) -> bool:
    """Whether this VM is ready for work: nothing is prepared for, and all recovery is done."""
    return not any(workflow.is_prepared_for for workflow in board.values())


def next_wake_at(board: Board, context: Context) -> datetime | None:
    """The next time at which a workflow may move without a signal."""
    times = []
    if board and (alone_at := begins_alone_at(context)):
        times.append(alone_at)
    for workflow in board.values():
        prepare = workflow.prepare
        approval = workflow.approval
        if workflow.drain_until and prepare.state == "running" and prepare.current is None:
            times.append(workflow.drain_until)
        if approval.state == "none" and approval.retry_at:
            times.append(approval.retry_at)
            if context.document_at and approval.failed_at and context.document_at <= approval.failed_at:
                times.append(context.now + _LATER_DOCUMENT)
        if approval.state == "none" and (turn_at := turn_to_approve(workflow)):
            times.append(turn_at)
        if may_begin(workflow) and workflow.decision.rule and not workflow.is_over:
            times.append(start_of(workflow, context).at)
            latest = latest_begin(workflow, context)
            if latest is not None and counts_for_slots(workflow, context):
                times.append(latest)
        if expiry := expires_at(workflow):
            times.append(expiry)
    return min((time for time in times if time > context.now), default=None)
