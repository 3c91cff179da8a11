"""Types of the workflow: phases, signals, effects, records, context.

A workflow is stored in the form that it has here. Once released, another form needs a migration in
``store/file.py``. Stored types forbid unknown fields, so that a renamed field is an error and not lost silently.
"""

from collections.abc import Container, Mapping
from datetime import datetime
from math import inf
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from scheduled_events_agent import AgentError
from scheduled_events_agent.imds.compare import Gone, Missing, Seen
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision, MaintenanceWindow, Rule
from scheduled_events_agent.policy.durations import format_time

Phase = Literal[
    "waiting", "preparing", "prepared", "held", "approved", "started", "recovering", "recovery_failed", "closed",
]  # fmt: skip
Outcome = Literal["", "completed", "canceled", "expired", "unknown"]
Stage = Literal["prepare", "on_start", "recover"]
HookOutcome = Literal["succeeded", "failed", "timed_out", "canceled", "not_started"]
OperatorAction = Literal["approve", "hold", "release", "retry", "resolve"]
"""The actions of an operator on an event; release takes back approve and hold."""
RecordKind = Literal[
    "seen", "named", "changed", "renamed", "missing", "gone", "decided", "preparing", "hook_started",
    "hook_finished", "hook_canceled", "prepared", "held", "approving", "approved", "approval_failed", "started",
    "unprepared", "recovering", "recovery_failed", "waiting", "without_slot", "hook_missing", "approval_needed",
    "vm_unknown", "closed", "operator", "restarted", "expired",
]  # fmt: skip
WaitKind = Literal[
    # before it begins; window: until its maintenance window opens
    "time", "window", "would_begin", "would_run_on_start", "observes", "slot",
    # before it begins, and before it is approved
    "fleet", "same_name",
    # while it is prepared for
    "other_run",
    # a gate's reason
    "status", "other_vm", "missing", "id", "never", "unprepared", "prepare_failed", "prepare_canceled", "held",
    "manual", "too_early", "window_closed", "shared", "staggered", "all_ready", "state_lost", "stale",
    "approval_slot",
    # a recommendation is never approved
    "recommendation",
    # before it recovers
    "other_event", "lost_hook",
]  # fmt: skip

UnpreparedKind = Literal[
    "slot", "fleet", "time", "hook_failed", "unfinished", "vm_unknown",
    # as an operator or the policy wants it, or nothing could be done
    "held", "manual", "observes", "immediately", "failure_allowed", "no_notice",
]  # fmt: skip

# Every transition that is allowed; ``advance`` rejects any other one.
ALLOWED_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "waiting": frozenset({"preparing", "prepared", "held", "started", "closed"}),
    "preparing": frozenset({"prepared", "held", "started", "recovering", "closed"}),
    "prepared": frozenset({"preparing", "held", "approved", "started", "recovering", "closed"}),
    "held": frozenset({"waiting", "preparing", "prepared", "approved", "started", "recovering", "closed"}),
    "approved": frozenset({"preparing", "started", "recovering", "closed"}),
    "started": frozenset({"recovering", "closed"}),
    # Back to an earlier phase: the event is in the document again, and no recover hook has run.
    "recovering": frozenset({"prepared", "started", "recovery_failed", "closed"}),
    "recovery_failed": frozenset({"recovering", "closed"}),
    "closed": frozenset(),
}

# A changed value is cut to this length in the log and the journal; the event itself is kept whole.
_SHOWN_CHARACTERS = 200


# The names of the actions in the journal and in answers to operators.
ACTION_TEXTS: dict[OperatorAction, str] = {
    "approve": "approved", "hold": "held", "release": "released", "retry": "retried", "resolve": "resolved",
}  # fmt: skip


class WorkflowError(AgentError):
    """A bug: a transition or an effect that is not allowed, or transitions without end."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a stage (a list of hooks, run in order) has come."""

    state: Literal["idle", "running", "succeeded", "failed", "canceled", "resolved"] = "idle"
    """resolved: repaired by an operator."""
    done: tuple[str, ...] = ()  # they succeeded, or are not required
    """Hooks that need not run again."""
    current: str | None = None
    """The hook that runs."""
    run: int = 0  # a result is that of this run if it has the same number
    """Number of hooks started. One that ended before its program was started does not count."""
    is_canceling: bool = False
    """The hook that runs has been asked to end."""
    is_urgent: bool = False
    """It has been asked to end within a second: an eviction waits for that."""
    failure: str = ""  # as a phrase
    failed_hook: str = ""  # until it is tried again
    """The hook whose failure ended the stage."""
    tolerated_failures: Mapping[str, str] = {}
    """By their hooks: failures that did not end the stage."""


class OperatorDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator has decided about the event: it counts until it is released, or void."""

    action: Literal["approve", "hold"]
    user: str
    """"" if the system does not say who it was."""
    at: datetime
    """When it began to count. The same action again changes neither this nor the user."""


class Approval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the approval has come."""

    state: Literal["none", "requested", "confirmed"] = "none"
    taken_back: OperatorDecision | None = None
    """An operator's approval that was taken back while this is under way: it counts if Azure accepts it."""
    is_outlived: bool = False
    """The event was over and came back while it was under way: its answer counts no more, then it is sent anew."""
    failures: int = 0
    """Number in a row."""
    failing_since: datetime | None = None
    failure: str = ""
    """The error of the last try, if it failed."""
    retry_at: datetime | None = None
    failed_at: datetime | None = None  # the next try also waits for a later document: the event may be over


class WaitReason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a workflow does not move; ``status/messages.py`` has the text for it."""

    kind: WaitKind
    at: datetime | None = None
    """Until when it waits."""
    detail: str = ""
    """The other event's id, the lost hook, or why it does not begin earlier."""
    approval: WaitKind | None = None
    """With ``would_begin``: why it would not be approved."""


class Unprepared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why what a rule wants prepared is not prepared; ``status/messages.py`` has the text for it."""

    kind: UnpreparedKind
    at: datetime | None = None
    """When it was to begin."""
    detail: str = ""
    """The hook that had not ended, or how one failed, or why it did not begin earlier."""


class Workflow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event and what was done about it. Stored as it is."""

    id: str
    """Unique to this appearance of the event."""
    event: ScheduledEvent
    named_as: str = ""
    """The name by which the event named this VM when it last did; "" if it never did."""
    decision: Decision
    first_seen_at: datetime
    not_before_seen_at: datetime
    """When the present NotBefore was first seen."""
    change_noted_at: datetime | None = None  # small changes are recorded once a minute
    boot_id: str
    """The boot at first sight."""
    prepare_boot_id: str = ""  # after another reboot it begins again
    """The boot in which preparation began."""
    phase: Phase = "waiting"
    phase_since: datetime | None = None
    """None: since it was first seen."""
    prepare: StageStatus = StageStatus()
    on_start: StageStatus = StageStatus()
    recover: StageStatus = StageStatus()
    drain_until: datetime | None = None
    approval: Approval = Approval()
    operator: OperatorDecision | None = None
    approval_needed_since: datetime | None = None
    early_until: datetime | None = None
    """If it is prepared earlier than its rule asks for, as NotBefore is now: when it would begin."""
    unprepared: Unprepared | None = None  # after a restart it is that of before, until the first document
    """Why it is not prepared, or was not when Azure started it; None if it is, or if no rule wants that."""
    vm_unknown_since: datetime | None = None
    """Since when nothing has said whether it names this VM."""
    is_vm_unknown_noted: bool = False
    """There is a record of it."""
    missing_since: datetime | None = None
    is_over: bool = False  # two answers lacked it, or listed it for other VMs only; or the recommendation ended
    is_reverted: bool = False  # if the event comes back, it is prepared for again
    """A recover hook of this or another event has started."""
    was_started: bool = False
    is_history_unknown: bool = False
    """First seen after the state file was lost."""
    handling_since: datetime | None = None  # with shared: first, this VM's delay counts from then
    was_begun_early: bool = False
    """An operator's approval began it before its time."""
    lacks_slot: bool = False  # until it has one, it is not approved
    """It began without a slot of the fleet, because it could wait no longer."""
    wait_reason: WaitReason | None = None
    """Why nothing is done now."""
    outcome: Outcome = ""
    """expired: of a recommendation."""

    @property
    def is_open(self) -> bool:
        return self.phase != "closed"

    @property
    def stages(self) -> tuple[StageStatus, ...]:
        return self.prepare, self.on_start, self.recover

    def stage_status(self, stage: Stage) -> StageStatus:
        return {"prepare": self.prepare, "on_start": self.on_start, "recover": self.recover}[stage]

    def with_stage(self, stage: Stage, stage_status: StageStatus) -> "Workflow":
        changes: dict[str, Any] = {stage: stage_status}
        return replace(self, **changes)

    @property
    def operator_action(self) -> Literal["", "approve", "hold"]:
        return self.operator.action if self.operator is not None else ""

    @property
    def is_missing(self) -> bool:
        """Whether the last answer lacks the event; the next answer shows whether it is over."""
        return self.missing_since is not None and not self.is_over

    @property
    def is_named_otherwise(self) -> bool:
        """Whether the event named this VM, and no longer does because the VM's names are others now."""
        return self.decision.affects == "others" and self.event.position((self.named_as,)) is not None

    @property
    def is_prepared_for(self) -> bool:
        """Whether preparation has begun and is not yet undone."""
        return self.is_open and self.prepare.state != "idle"

    @property
    def started_unprepared(self) -> Unprepared | None:
        """Why it was not prepared when Azure started it; None if it was, or if it has not started."""
        has_started = self.was_started or self.outcome == "completed"
        return self.unprepared if has_started and self.decision.rule is not None else None


class HookFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A hook has ended."""

    workflow_id: str
    stage: Stage
    hook: str
    run: int
    outcome: HookOutcome
    is_required: bool = True
    """False: a failure does not end the stage."""
    has_run: bool = True
    """False: it ended before its program was started."""
    detail: str = ""
    tail: str = ""
    """The end of its output, for the journal."""


class ApprovalAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The service has answered the start request, or the request failed (``error_kind``)."""

    workflow_id: str
    error_kind: str = ""
    detail: str = ""


class OperatorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An operator acts on the event."""

    workflow_id: str
    action: OperatorAction
    user: str


class AgentRestarted(msgspec.Struct, frozen=True):
    """The agent has loaded its workflows from disk: no hook and no approval is under way."""


class PolicyChanged(msgspec.Struct, frozen=True):
    """The rules or this VM's names have changed: decide again."""


class ClockChanged(msgspec.Struct, frozen=True):
    """The wall clock was set. A running drain lasts as long as it would have lasted."""

    seconds: float


Signal = (
    Seen
    | Missing
    | Gone
    | HookFinished
    | ApprovalAnswered
    | OperatorCommand
    | AgentRestarted
    | PolicyChanged
    | ClockChanged
)


Rank = tuple[int, float, float]
"""How urgent the event is, NotBefore, and when it was first seen."""
_LAST: Rank = (9, 0.0, 0.0)


class RunHook(msgspec.Struct, frozen=True, kw_only=True):
    """Start the hook; its result comes back as HookFinished."""

    workflow_id: str
    stage: Stage
    hook: str
    run: int
    rank: Rank = _LAST
    """Among runs that must not overlap, the run with the lowest rank is next."""


class CancelHook(msgspec.Struct, frozen=True, kw_only=True):
    """Stop the hook that runs; its result comes back as HookFinished."""

    workflow_id: str
    stage: Stage
    is_urgent: bool = False
    """Whether an eviction needs the VM; then the hook gets less time to end by itself."""


class UpdateHookDeadline(msgspec.Struct, frozen=True, kw_only=True):
    """NotBefore has changed while a prepare hook runs."""

    workflow_id: str


class Approve(msgspec.Struct, frozen=True, kw_only=True):
    """Ask Azure to start the event; the answer comes back as ApprovalAnswered."""

    workflow_id: str
    event_id: str
    is_alone: bool


Effect = RunHook | CancelHook | UpdateHookDeadline | Approve


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened, for journal, log and metrics."""

    kind: RecordKind
    text: str = ""
    """The text for the journal. "" if ``waiting`` has the reason, until ``messages.with_messages`` fills it in."""
    log_line: str = ""
    """The text for the log, which also names the event. "" until ``messages.with_messages`` fills it in."""
    wait_reason: WaitReason | None = None
    """Why the workflow waits, or is held."""
    stage: str = ""
    hook: str = ""
    outcome: str = ""
    """How the hook ended; "" in other records."""
    detail: str = ""
    """More about it, such as the end of a hook's output."""
    addition: str | None = None
    """The part of ``text`` that the kind does not say already; None means all of ``text``."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """The workflow after one move, the effects to carry out, and what happened."""

    workflow: Workflow
    effects: tuple[Effect, ...] = ()
    records: tuple[Record, ...] = ()
    is_small: bool = False
    """A change of the event without a meaning for this VM: it is neither stored nor reported."""


class FleetEventStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one event of this VM in the fleet, according to one list of the fleet's records."""

    workflow_id: str = ""
    """The appearance of the event that this is about; it counts for no other appearance."""
    has_slot: bool = False
    """It may begin, or be approved if it began without a slot."""
    is_all_ready: bool = False
    position: int = 0
    """Its place in the queue of events that wait for a slot, from 1; 0 if it does not wait."""
    ahead: tuple[str, ...] = ()
    """Ids of the events that have a slot, or wait before it."""
    requested_vms: tuple[str, ...] = ()
    """Plain names of the VMs that this VM's request named."""
    not_ready: tuple[str, ...] = ()
    """Plain names of those VMs that do not count as ready, and of other VMs that have begun nevertheless."""
    other_vm_id: str = ""
    """The vmId of another VM that goes by the name of this one; "" if there is none."""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """This VM's view of the VMs with which it acts together."""

    max_events: int | None = None
    members: tuple[str, ...] = ("*",)
    on_unavailable: Literal["wait", "begin"] = "wait"
    error: str = ""
    """Why the store cannot be used now; "" if it can."""
    unavailable_seconds: float | None = None
    """For how long it could not be used, by a clock that is never set."""
    statuses: Mapping[str, FleetEventStatus] = {}
    """By the event's fleet key."""


RememberedFact = Literal["hold", "expired"]
"""An operator's hold; or that a recommendation is over, though documents may still list it."""
RememberedKey = tuple[RememberedFact, str]
"""The fact, and the event's key: both facts may be true of one event."""


class RememberedEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fact about an event that still counts after this appearance of the event has ended."""

    user: str = ""
    at: datetime
    last_seen_at: datetime
    """When the event was last known to be in a document."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a transition depends on besides the workflows."""

    now: datetime
    names: tuple[str, ...]
    rules: tuple[Rule, ...]
    windows: Mapping[str, MaintenanceWindow]
    hooks: Container[str]
    """Names of all hooks of the policy."""
    hook_seconds: Mapping[str, float] = {}
    """How long each hook may take."""
    serialized: Container[str] = frozenset()
    """Names of the hooks of which only one run may go on at a time."""
    reserve: float = 0.0
    """Prepare hooks must end so many seconds before NotBefore."""
    boot_id: str
    is_acting: bool = True
    """False in observe mode: neither hooks nor approvals."""
    document_at: datetime | None
    """When the last document was read; None before the first one, and then nothing moves."""
    stale_after: float = inf
    """Nothing is approved if the last document was read more seconds ago than this."""
    is_state_lost: bool = False
    """The state file was found damaged, and this is the first document since."""
    fleet: FleetView | None = None
    """None if this VM acts alone."""
    holds: Mapping[str, RememberedEvent] = {}
    """Operators' holds by the event's key, also of events that are not in the document."""
    expired: Container[str] = frozenset()
    """Keys of the recommendations that are over, though documents may list them."""

    @property
    def is_stale(self) -> bool:
        """Whether the last document was read too long ago: an event in it may have been canceled since."""
        if self.document_at is None:
            return False
        age_seconds = (self.now - self.document_at).total_seconds()
        is_unknown = age_seconds < 0.0  # the clock was set back
        return is_unknown or age_seconds > self.stale_after


Workflows = Mapping[str, Workflow]
"""Open workflows by their id, oldest first."""


def show(value: object) -> str:
    """A field of an event, for a record of its change."""
    if value is None:
        return "unknown"
    if isinstance(value, datetime):
        return format_time(value)
    text = "[" + ", ".join(map(str, value[:10])) + "]" if isinstance(value, tuple) else str(value) or '""'
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} (cut)"
