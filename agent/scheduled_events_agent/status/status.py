"""Types of the status, history and JSON output. docs/json.md describes each field."""

from datetime import datetime
from typing import Literal

import msgspec
from msgspec.structs import force_setattr

from scheduled_events_agent.workflow import OperatorAction, Stage, Workflow

SCHEMA_VERSION = 1
"""The version of all JSON output; see docs/json.md. A new field keeps it; a new meaning or name raises it."""
RUNBOOK_URL = "https://source.scheduled-events-agent.invalid/blob/main/docs/runbook.md"
"""Address of the runbook, as in pyproject.toml. It has a section for each ``AttentionKind`` and each alert."""


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the journal."""

    at: datetime
    workflow_id: str
    event_id: str
    kind: str
    stage: str
    hook: str
    outcome: str
    text: str
    detail: str


class WorkflowView(Workflow, frozen=True, kw_only=True):
    """A workflow with the additional text that JSON has."""

    wait_message: str = ""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One event from first sight to its end, or to now."""

    workflow: Workflow
    records: tuple[JournalRecord, ...]


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its records, or a record of the agent alone."""

    workflow: WorkflowView | None
    records: tuple[JournalRecord, ...]


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``history --json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    histories: tuple[HistoryItem, ...]


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """This VM's names and id."""

    names: tuple[str, ...]
    vm_id: str


class ActivePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that is in force."""

    file: str
    """Its path, or ``settings.BUILT_IN_NAME``."""
    read_at: datetime
    hash: str = ""
    """SHA-256 of the file in force, as sha256sum prints it; for the built-in policy that of an empty file."""
    refused: str = ""
    """Why the current file was rejected, so that an older policy is in force; "" if the file is in force."""
    refused_at: datetime | None = None
    """Since when the file is rejected."""
    needs_restart: tuple[str, ...] = ()
    """Keys that have changed since the agent started, and take effect when it starts again."""


class RunningHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that runs now, or waits for another run of the same hook."""

    workflow_id: str
    stage: Stage | Literal["on_clear"]
    hook: str
    state: Literal["queued", "running"] = "running"
    since: datetime
    """Since when it runs or waits."""


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
    """Number of notifications lost since one was last delivered."""
    lost_at: datetime | None = None
    """When the first of these was lost."""
    lost_reason: str = ""
    """Why the last of these was lost."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The VMs with which this one acts together."""

    group: str
    error: str
    """Why the table cannot be used; "" if it can."""
    unavailable_since: datetime | None
    not_ready: tuple[str, ...]
    """VMs that events of this VM wait for."""
    warnings: tuple[str, ...] = ()
    """Problems of the set-up."""


class HookStep(msgspec.Struct, frozen=True, kw_only=True):
    """A hook of an event, and how far it is."""

    stage: Stage
    hook: str
    state: Literal["open", "queued", "running", "done", "failed", "not_run"]


class EventSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The texts that people see about a pending event."""

    workflow_id: str
    activity: str
    approval: str
    hooks: tuple[HookStep, ...]
    commands: tuple[str, ...]


class HeldEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's hold. It also counts if the event comes back."""

    event_id: str
    """The event's id in lower case."""
    user: str
    at: datetime
    last_seen_at: datetime


AttentionKind = Literal[
    "recovery_failed", "hook_missing", "prepare_failed", "approval_needed", "not_acting", "approval_failing",
    "unhealthy", "agent_restarts", "policy_rejected", "web_config_rejected", "vm_unknown", "fleet_unavailable",
    "notifications_failing",
]  # fmt: skip
"""The reasons why a person may be needed, the worst first."""


class SuggestedCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command line that a person may copy."""

    command: str
    effect: str
    """The command's effect, as a phrase."""


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that needs a person."""

    kind: AttentionKind
    severity: Literal["act", "fix"]
    """act: an operator must act; fix: the agent or its set-up is broken, to be repaired today."""
    since: datetime | None
    """None if that is not known."""
    event_id: str = ""
    workflow_id: str = ""
    message: str
    consequence: str = ""
    """The consequence if no person acts, as a sentence."""
    deadline: datetime | None = None
    """After this time it is too late; None if there is none, or if the event may start at any moment."""
    commands: tuple[SuggestedCommand, ...] = ()
    """Commands to copy, the likeliest first."""
    runbook: str = ""
    """Address of the runbook's section about the kind. Filled in here, unless an agent has sent it."""

    def __post_init__(self) -> None:
        if not self.runbook:
            force_setattr(self, "runbook", f"{RUNBOOK_URL}#{self.kind}")


class WebConfigRejected(msgspec.Struct, frozen=True, kw_only=True):
    """Why the current ``agent.web_config`` is rejected; its previous content is in force."""

    reason: str
    since: datetime


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that a command line needs for this agent; "" where the default is right."""

    state: str = ""
    """The option for its state file, such as --state-dir DIR."""
    policy: str = ""
    """The option for its policy file, such as --config FILE."""


NO_OPTIONS = CommandOptions()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at one moment. If it does not answer: what its state file says, and None for the rest."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    source: Literal["agent", "state_file"] = "agent"
    health: Literal["ok"] | tuple[str, ...]
    unhealthy_since: datetime | None = None
    state_file: str = ""
    agent_log: tuple[JournalRecord, ...] = ()
    """The last start and the last stop of an agent here, in either order."""
    vm: Vm
    version: str | None = None
    started_at: datetime | None = None
    unclean_starts: tuple[datetime, ...] = ()
    """Starts after a crash: in this boot, and within an hour before the last start."""
    mode: Literal["act", "observe"] | None = None
    ready: bool = False
    policy: ActivePolicy | None = None
    web_config_rejected: WebConfigRejected | None = None
    rules: tuple[str, ...] | None = None
    endpoint: str | None = None
    last_poll_at: datetime | None = None
    poll_failure: str | None = None
    incarnation: str | None = None
    running: tuple[RunningHook, ...] = ()
    pending: tuple[WorkflowView, ...]
    hook_output: tuple[JournalRecord, ...] = ()
    other_vm_events: int | None = None
    api_version: str | None = None
    """The api-version in which documents are answered."""
    recommendations_failure: str = ""
    """Why the recommendations that a rule names are not available; "" if they are."""
    holds: tuple[HeldEvent, ...] = ()
    command_options: CommandOptions = NO_OPTIONS
    command_prefix: str = ""
    """The text that an account without privileges puts before a command, such as sudo and a blank."""
    supervisor_commands: tuple[SuggestedCommand, ...] = ()
    """Commands that show why the agent does not answer; complete, with their prefix."""
    notify: tuple[NotifiedTarget, ...] = ()
    fleet: FleetState | None = None
    attention: tuple[Attention, ...] = ()
    headline: str = ""
    summaries: tuple[EventSummary, ...] = ()

    def running_for(self, workflow_id: str) -> tuple[RunningHook, ...]:
        """The hooks that run for this event."""
        return tuple([hook for hook in self.running if hook.workflow_id == workflow_id])


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``approve``, ``hold`` and the like with ``--json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    command: OperatorAction
    event_id: str
    workflow_id: str
    succeeded: bool
    message: str
