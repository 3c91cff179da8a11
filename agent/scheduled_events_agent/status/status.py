"""What there is to see: the agent and its events as values. docs/json.md says what each field is."""

from datetime import datetime
from typing import Literal

import msgspec

from scheduled_events_agent.workflow import OperatorAction, Stage, Workflow

SCHEMA_VERSION = 1
"""Of all JSON that is shown; see docs/json.md. A further field leaves it; another meaning or name raises it."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class ShownWorkflow(Workflow, frozen=True, kw_only=True):
    """A workflow with the words that JSON has besides it."""

    waits_for: str = ""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One event from first sight to its end, or to now."""

    workflow: Workflow
    entries: tuple[JournalEntry, ...]


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its entries, or a note of the agent alone."""

    workflow: ShownWorkflow | None
    entries: tuple[JournalEntry, ...]


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """What ``history --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    histories: tuple[HistoryItem, ...]


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """Who this VM is."""

    names: tuple[str, ...]
    vm_id: str


class PolicyInForce(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy is in force."""

    file: str
    """Its path, or ``settings.BUILT_IN_NAME``."""
    read_at: datetime
    hash: str = ""
    """SHA-256 of the file in force, as sha256sum tells it; of the built-in policy that of an empty file."""
    refused: str = ""
    """Why the file as it is by now was refused, so that an older one is in force; "" if it is the file's."""
    refused_at: datetime | None = None
    """Since when."""
    needs_restart: tuple[str, ...] = ()
    """Keys that have changed since the agent started, and take effect when it starts again."""


class RunningHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that runs now, or waits for another run of the same hook."""

    workflow_id: str
    stage: Stage | Literal["on_clear"]
    hook: str
    state: Literal["queued", "running"] = "running"
    since: datetime
    """When that began."""


class TargetFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a target does not take notices."""

    since: datetime
    reason: str


class NotifiedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A service that is notified of events."""

    name: str
    waiting: int
    oldest_at: datetime | None
    failure: TargetFailure | None
    lost: int = 0
    """Since one was last delivered, as the next two."""
    lost_at: datetime | None = None
    """When the first of them was lost."""
    lost_reason: str = ""
    """Why the last of them was lost."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The VMs with which this one acts together."""

    group: str
    error: str
    """Why the table cannot be used; "" if it can."""
    unavailable_since: datetime | None
    not_ready: tuple[str, ...]
    """VMs that events of this VM wait for."""
    warnings: tuple[str, ...] = ()
    """What is not set up right."""


class HookStep(msgspec.Struct, frozen=True, kw_only=True):
    """A hook of an event, and how far it is."""

    stage: Stage
    hook: str
    state: Literal["open", "queued", "running", "done", "failed", "not_run"]


class EventSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What people are shown of a pending event, in words."""

    workflow_id: str
    activity: str
    approval: str
    hooks: tuple[HookStep, ...]
    commands: tuple[str, ...]


class HeldEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's hold, which counts also when the event comes back."""

    event_id: str
    """In small letters."""
    user: str
    at: datetime
    last_seen_at: datetime


AttentionKind = Literal[
    "recovery_failed", "hook_missing", "prepare_failed", "approval_needed", "not_acting", "approval_failing",
    "unhealthy", "agent_restarts", "policy_rejected", "web_config_rejected", "vm_unknown", "fleet_unavailable",
    "notifications_failing",
]  # fmt: skip
"""What a person may be needed for, the worst first."""


class SuggestedCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command line that a person may copy."""

    command: str
    effect: str
    """What it does, as a phrase."""


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
    """What happens if no person acts, as a sentence."""
    deadline: datetime | None = None
    """After this time it is too late; None if there is none, or if the event may start at any moment."""
    commands: tuple[SuggestedCommand, ...] = ()
    """The likeliest first."""


class WebConfigRejected(msgspec.Struct, frozen=True, kw_only=True):
    """Why ``agent.web_config`` as it is now is rejected; what it said before is in force."""

    reason: str
    since: datetime


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line needs to be about this agent; "" where the default leads to it."""

    state: str = ""
    """To find its state file, such as --state-dir DIR."""
    policy: str = ""
    """To read its policy file, such as --config FILE."""


NO_OPTIONS = CommandOptions()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at one moment; without an answer from it, what its state file says, and None for the rest."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    source: Literal["agent", "state_file"] = "agent"
    health: Literal["ok"] | tuple[str, ...]
    unhealthy_since: datetime | None = None
    state_file: str = ""
    agent_log: tuple[JournalEntry, ...] = ()
    """When an agent last started and last stopped here, in that order or the other."""
    vm: Vm
    version: str | None = None
    started_at: datetime | None = None
    unclean_starts: tuple[datetime, ...] = ()
    """Starts within an hour before the last one, in this boot, before which the agent did not stop but ended."""
    mode: Literal["act", "observe"] | None = None
    ready: bool = False
    policy: PolicyInForce | None = None
    web_config_rejected: WebConfigRejected | None = None
    rules: tuple[str, ...] | None = None
    endpoint: str | None = None
    last_poll_at: datetime | None = None
    poll_failure: str | None = None
    incarnation: str | None = None
    running: tuple[RunningHook, ...] = ()
    pending: tuple[ShownWorkflow, ...]
    hook_output: tuple[JournalEntry, ...] = ()
    others_events: int | None = None
    api_version: str | None = None
    """In which documents are answered."""
    recommendations_failure: str = ""
    """Why the recommendations that a rule names are not available; "" if they are."""
    holds: tuple[HeldEvent, ...] = ()
    command_options: CommandOptions = NO_OPTIONS
    command_prefix: str = ""
    """What an account without privileges puts before a command, such as sudo and a blank."""
    supervisor_commands: tuple[SuggestedCommand, ...] = ()
    """What tells why the agent does not answer; complete, with their prefix."""
    notify: tuple[NotifiedTarget, ...] = ()
    fleet: FleetState | None = None
    attention: tuple[Attention, ...] = ()
    headline: str = ""
    tone: Literal["good", "busy", "bad"] = "good"
    summaries: tuple[EventSummary, ...] = ()

    def running_for(self, workflow_id: str) -> tuple[RunningHook, ...]:
        """The hooks that run for this event."""
        return tuple([hook for hook in self.running if hook.workflow_id == workflow_id])


class OperatorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``approve``, ``hold`` and the like print with ``--json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    command: OperatorAction
    event_id: str
    workflow_id: str
    is_done: bool
    answer: str
