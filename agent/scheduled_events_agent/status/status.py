"""Types of the status, history and JSON output.

The text below a field is its meaning in docs/json.md too; a field that its name explains has none. What is not
known, or not there, is None, or "" in a text. ``tests/fixtures/json_page.py`` writes the page's tables.
"""

import json
from datetime import datetime
from typing import Literal

import msgspec
from msgspec.structs import force_setattr

from scheduled_events_agent import RUNBOOK
from scheduled_events_agent.imds.document import Affects
from scheduled_events_agent.policy.rules import ApproveMode
from scheduled_events_agent.workflow import OperatorAction, Outcome, Phase, Stage

SCHEMA_VERSION = 1
"""The version of all JSON output. A new field keeps it; a new meaning or name raises it."""


AgentRecordKind = Literal[
    "agent_started", "agent_stopped", "machine_paused", "notification_lost", "on_clear", "reload_rejected",
    "reloaded", "state_lost", "state_recreated", "state_settled",
]  # fmt: skip
"""The kinds of records about the agent itself."""


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the journal."""

    at: datetime
    key: str
    """Of the event; "" in a record about the agent."""
    event_id: str
    kind: str
    """Such as seen, decided, hook_finished, closed; of the agent: agent_started, machine_paused."""
    stage: str
    hook: str
    outcome: str
    """Of a hook: succeeded, failed, timed_out, canceled, not_started."""
    text: str
    detail: str
    """The end of a hook's output; of agent_started: the id of the boot."""


Waits = Literal[
    "time", "window", "drain", "slot", "fleet", "other_vms", "other_event", "operator", "policy", "mode", "hook",
    "document", "azure", "vm",
]  # fmt: skip
"""What an event may wait for."""


class WaitsFor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an event waits for before the agent goes on with it."""

    kind: Waits
    """vm: it does not name this VM, or nothing says whether it does."""
    until: datetime | None
    """None: until something happens."""
    text: str


class ApprovalView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The approval of an event: what the policy wants, and how far it is."""

    wanted: ApproveMode
    """By the policy."""
    state: Literal["none", "requested", "confirmed"]
    """requested: no answer has come yet; confirmed: Azure has accepted it."""
    failures: int
    """Number in a row."""
    last_error: str
    text: str


HookState = Literal["open", "queued", "running", "done", "failed", "resolved", "not_run"]


class HookView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hook, and how far it is."""

    stage: Stage | Literal["on_clear"]
    hook: str
    state: HookState
    """queued: it waits for another run of the same hook; resolved: an operator has done manually what it does."""
    since: datetime | None = None
    """Of a hook that runs or is queued. null in histories and notifications, and if no agent answers."""
    until: datetime | None = None  # with all its attempts; sooner if an eviction or NotBefore cuts it
    """When a hook that runs is ended at the latest."""
    failure: str = ""
    """Of its last run."""
    output: str = ""
    """The end of what it wrote. Only ``/status`` has it, and only if ``agent.show_hook_output`` is true."""


class OperatorView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator has decided about an event, as long as it counts: a hold until the event starts."""

    action: Literal["", "approve", "hold"] = ""
    by: str = ""
    at: datetime | None = None


class SuggestedCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command line that a person may copy."""

    command: str
    effect: str


class EventView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event as people and programs see it: what Azure says, what the agent does about it, what it waits for."""

    key: str
    """Unique to this appearance of the event; "" of an event that no agent has seen."""
    id: str
    """EventId, printable."""
    type: str
    status: str
    source: str
    """Platform or User; "" before api-version 2019-08-01."""
    resources: tuple[str, ...]
    not_before: datetime | None
    """None: it may start now."""
    duration_seconds: float | None
    """Azure's estimate."""
    description: str
    seen_at: datetime
    """When it was first seen."""
    rule: str | None
    """None: no rule matches it."""
    reason: str
    """Why this rule, or why none."""
    affects: Affects
    """Which VMs it names: this one alone, others too, others only, or nothing says it."""
    phase: Phase
    phase_since: datetime
    outcome: Outcome
    """"" until it is over; expired: of a recommendation."""
    ready: bool
    """Whether it leaves this VM ready: not from the beginning of preparation to the end of recovery."""
    approval: ApprovalView
    hooks: tuple[HookView, ...]
    """In their order."""
    waits_for: WaitsFor | None
    operator: OperatorView
    activity: str
    """What the agent does about it now, as a sentence."""
    commands: tuple[SuggestedCommand, ...]
    """With these an operator can decide otherwise now. ``history`` has none."""


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its records, or a record of the agent alone."""

    event: EventView | None
    """None for records about the agent alone."""
    records: tuple[JournalRecord, ...]


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``history --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    histories: tuple[HistoryItem, ...]
    """Oldest first. ``/history`` has the last 20 events with 41 records each, and the last 20 records of each kind
    about the agent, of these only what ``/status`` shows too."""


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """This VM's names and id."""

    names: tuple[str, ...]
    """In Resources."""
    vm_id: str


class ActivePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that is in force."""

    file: str  # or ``policy.load.BUILT_IN_NAME``
    read_at: datetime
    """When it was accepted."""
    hash: str = ""  # as sha256sum prints it; of the built-in policy: that of an empty file
    """SHA-256."""
    rejected: str = ""
    """Why the current file was rejected."""
    rejected_summary: str = ""
    """``rejected`` in a few words."""
    rejected_at: datetime | None = None
    changed_at: datetime | None = None
    """When the current file was changed, if it is good and not loaded."""
    next_start_failure: str = ""
    """Why the agent would not come back after a restart."""
    needs_restart: tuple[str, ...] = ()
    """Keys whose change takes effect at the next start."""


class StateLost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the agent knew of events is lost, and neither ``on_clear`` nor an operator has settled that."""

    at: datetime
    """When the agent found that."""
    reason: str
    is_foreign: bool = False
    """It was another VM's state, and something was prepared in it."""
    recover: tuple[str, ...] | None = None
    """The recover hooks of all rules; null if no agent answers."""
    on_clear: tuple[str, ...] = ()
    """The hooks that the next start runs if nothing is pending."""


class TargetFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a target does not accept notifications."""

    since: datetime
    reason: str


class NotifiedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A service that is notified of events."""

    name: str
    waiting: int
    oldest_at: datetime | None
    failure: TargetFailure | None
    lost: int = 0
    """Number since one was last delivered."""
    lost_at: datetime | None = None
    """When the first of these was lost."""
    lost_reason: str = ""
    """Why the last of these was lost."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The VMs with which this one acts together."""

    group: str
    error: str
    """Why the store cannot be used."""
    unavailable_since: datetime | None
    not_ready: tuple[str, ...]
    """VMs that an approval waits for."""
    warnings: tuple[str, ...] = ()  # ``members`` does not match this VM, or another VM has its name


class KubernetesFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the conditions of this Kubernetes node cannot be updated."""

    since: datetime
    reason: str


class HeldEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's hold. It also counts if the event comes back."""

    event_id: str
    """In lower case."""
    key: str
    """Of the event; "" if it is not in the document."""
    user: str
    at: datetime
    last_seen_at: datetime
    """The hold ends a day later."""


Polls = Literal["current", "late", "overdue"]
Condition = Literal["act", "fix", "unknown", "busy", "good"]
AttentionKind = Literal[
    "unhealthy", "vm_unknown", "vm_changed", "recovery_failed", "hook_missing", "state_lost", "prepare_failed",
    "approval_needed", "not_acting", "approval_failing", "restart_unsafe", "agent_restarts", "policy_rejected",
    "web_config_rejected", "out_of_service", "clock_wrong", "foreign_state", "fleet_unavailable",
    "kubernetes_unavailable", "notifications_failing",
]  # fmt: skip
"""The reasons why a person may be needed, the worst first."""


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that needs a person."""

    kind: AttentionKind
    severity: Literal["act", "fix"]  # act: an operator must act now; fix: someone must repair it today
    since: datetime | None
    event_id: str = ""
    key: str = ""
    """Of the event."""
    message: str
    consequence: str = ""
    """If no person acts."""
    detail: str = ""
    """The exact error, which may have several lines."""
    deadline: datetime | None = None
    """None also if the event may start at any moment."""
    commands: tuple[SuggestedCommand, ...] = ()
    """The likeliest first."""
    runbook: str = ""  # filled in below, unless an agent has sent it
    """Address of its section, or the path of the page on this VM with the section's anchor."""

    def __post_init__(self) -> None:
        if not self.runbook:
            force_setattr(self, "runbook", f"{RUNBOOK}#{self.kind}")


class WebConfigRejected(msgspec.Struct, frozen=True, kw_only=True):
    """Why the current ``agent.web_config`` is rejected; its previous content is in force."""

    reason: str
    since: datetime


class StartFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why no agent starts, as far as it is known."""

    reason: str
    detail: str = ""
    """The exact error, which may have several lines."""


class ClockWrong(msgspec.Struct, frozen=True, kw_only=True):
    """This VM's clock differs from Azure's by minutes."""

    seconds_ahead: float
    """As first seen; negative: it is behind."""
    since: datetime
    command: str
    """It shows whether something sets the clock."""


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that a command line needs for this agent; "" where the default is right."""

    state: str = ""
    """Such as ``--state-dir DIR``."""
    policy: str = ""
    """Such as ``--config FILE``."""


NO_OPTIONS = CommandOptions()


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at one moment, but for its events and what follows from them."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    source: Literal["agent", "state_file"] = "agent"
    """state_file: no agent answers."""
    faults: tuple[str, ...] = ()
    """Faults of the agent itself, which are a part of ``health``."""
    faults_since: datetime | None = None
    state_file: str = ""
    state_since: datetime | None = None
    """When the state file was created. What was known before is lost, or this is the first start."""
    start_failure: StartFailure | None = None
    """If no agent runs: why none starts."""
    state_lost: StateLost | None = None
    """Until `on_clear` has succeeded, or `resolve state_lost`."""
    agent_log: tuple[JournalRecord, ...] = ()
    """The last start and stop."""
    vm: Vm
    vm_confirmed: bool = True
    """Whether it is certain since the boot that these are this VM's names: the disk may be a copy."""
    vm_failure: str = ""
    """Why the metadata service has not said which VM this is."""
    vm_failure_summary: str = ""
    """``vm_failure`` in a few words."""
    version: str | None = None
    started_at: datetime | None = None
    unclean_starts: tuple[datetime, ...] = ()
    """Starts in this boot that follow no stop, in the hour before the last one."""
    mode: Literal["act", "observe"] | None = None
    ready: bool = False
    """As ``/readyz`` says."""
    policy: ActivePolicy | None = None
    web_config_rejected: WebConfigRejected | None = None
    rules: tuple[str, ...] | None = None
    endpoint: str | None = None
    """Of the metadata service."""
    last_poll_at: datetime | None = None
    """Of the last success."""
    polls: Polls = "current"
    """late: none has succeeded for ten seconds, or since the start; overdue: for ``agent.healthy_within``."""
    poll_failure: str | None = None
    poll_failure_summary: str = ""
    """``poll_failure`` in a few words."""
    guest_proxy: bool = False
    """Whether an answer came through Azure's Guest Proxy Agent."""
    clock_wrong: ClockWrong | None = None
    incarnation: str | None = None  # of the last document
    other_vm_events: int | None = None
    api_version: str | None = None
    recommendations_failure: str = ""
    """Why a rule gets no recommendations."""
    holds: tuple[HeldEvent, ...] = ()
    """Also of events that are not in the document."""
    command_options: CommandOptions = NO_OPTIONS
    """What a command line needs to reach this agent."""
    command_prefix: str = ""
    """sudo, for an account without privileges."""
    reload_command: str = ""  # complete, with its prefix
    """It has the agent read its policy again."""
    supervisor_commands: tuple[SuggestedCommand, ...] = ()  # complete, with their prefix
    """They show why the agent does not answer."""
    notify: tuple[NotifiedTarget, ...] = ()
    fleet: FleetState | None = None
    kubernetes_failure: KubernetesFailure | None = None


class Status(AgentStatus, frozen=True, kw_only=True):
    """The agent at one moment. If it does not answer: what its state file says, and None for the rest."""

    condition: Condition = "unknown"
    """act, fix: as the first of ``attention``; unknown: nothing says yet whether an event would be seen and acted
    on; busy: an event of this VM is pending; good: none is, and one that came now would be acted on."""
    health: Literal["ok"] | tuple[str, ...] = "ok"
    """Why no event could be acted on, as ``/healthz`` says."""
    attention: tuple[Attention, ...] = ()
    """The nearest deadline first, then the worst."""
    headline: str = ""
    """The first ``message`` of ``attention``, or how things are."""
    on_clear: tuple[HookView, ...] = ()
    """Hooks of ``on_clear`` that run or are queued."""
    events: tuple[EventView, ...] = ()
    """The open events, the most urgent first."""


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``approve``, ``hold`` and the like with ``--json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    command: OperatorAction
    event_id: str
    key: str
    """Of the event; `state_lost` for `resolve state_lost`."""
    succeeded: bool
    """True also if there was nothing to release, or no loss of state to resolve."""
    message: str
    """The agent's answer, or why there is none."""


def to_json(answer: msgspec.Struct) -> bytes:
    """The answer as JSON, with a question mark for each byte of a path that is not UTF-8."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(answer), ensure_ascii=False).encode(errors="replace")
