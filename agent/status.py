"""What there is to see: the agent and its events as values, as JSON shows them (docs/json.md)."""

from datetime import datetime
from typing import Literal

import msgspec

from agent.events import Affects, ScheduledEvent
from agent.workflow import Stage, Workflow

OperatorWord = Literal["approve", "hold", "release", "retry", "resolve"]
SCHEMA_VERSION = 1
"""Of all JSON that is shown; see docs/json.md. A further field leaves it; another meaning or name raises it."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    at: datetime
    workflow_id: str
    """"" in what concerns the agent and no single event."""
    event_id: str
    kind: str
    """Of an event: a ``workflow.NoteKind``. Of the agent: agent_started, pause, reloaded and the like."""
    stage: str
    hook: str
    outcome: str
    text: str
    detail: str
    """What else there is, such as the end of a hook's output."""


class ShownWorkflow(Workflow, frozen=True, kw_only=True):
    """A workflow with the words that JSON has besides it."""

    waits_for: str = ""
    """Why it does not move, as a clause; "" if it moves."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One event from first sight to its end, or to now."""

    workflow: Workflow
    entries: tuple[JournalEntry, ...]
    """Oldest first."""


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its entries, or a note of the agent alone."""

    workflow: ShownWorkflow | None
    entries: tuple[JournalEntry, ...]


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """What ``history --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    histories: tuple[HistoryItem, ...]
    """Oldest first."""


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """Who this VM is."""

    names: tuple[str, ...]
    """What Resources may call it; empty as long as it is not known."""
    vm_id: str


class LastKnown(msgspec.Struct, frozen=True, kw_only=True):
    """What the state file says while no agent answers."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    problem: str
    """Why no agent answers, or could not be asked."""
    state_file: str
    vm: Vm
    notes: tuple[JournalEntry, ...]
    """When the agent last started, and last stopped."""
    pending: tuple[ShownWorkflow, ...]
    """As of the last commit; oldest first."""


class PolicyInForce(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy is in force."""

    file: str
    """Its path, or ``settings.BUILT_IN_NAME``."""
    read_at: datetime
    hash: str = ""
    """SHA-256 of the file in force, as sha256sum tells it; of the built-in policy that of an empty file."""
    refused: str = ""
    """Why the file as it is by now was refused, so that an older one is in force; "" if it is the file's."""


class RunningHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that runs now."""

    workflow_id: str
    """"" if it is one of on_clear."""
    stage: Stage | Literal["on_clear"]
    hook: str
    since: datetime


class HookStep(msgspec.Struct, frozen=True, kw_only=True):
    """A hook of an event, and how far it is."""

    stage: Stage
    hook: str
    state: Literal["open", "running", "done", "failed", "not_run"]


class EventSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What people are shown of a pending event, in words."""

    workflow_id: str
    activity: str
    """What the agent does about it, or what it waits for."""
    approval: str
    hooks: tuple[HookStep, ...]
    commands: tuple[str, ...]
    """With which an operator can decide otherwise, likeliest first."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at one moment."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    version: str
    started_at: datetime
    vm: Vm
    mode: Literal["act", "observe"]
    is_paused: bool
    """Paused by the service manager: it watches, and does nothing."""
    ready: bool
    """As /readyz says."""
    health: Literal["ok"] | tuple[str, ...]
    """What is wrong, one sentence each."""
    policy: PolicyInForce
    rules: tuple[str, ...]
    endpoint: str
    """Of the metadata service, as the policy names it."""
    last_poll_at: datetime | None
    """When a request for the document last succeeded."""
    poll_failure: str
    """Why the last one failed; "" if it did not."""
    incarnation: str
    """Of the document that was last decided on."""
    running: tuple[RunningHook, ...]
    pending: tuple[ShownWorkflow, ...]
    """Oldest first."""
    hook_output: tuple[JournalEntry, ...] = ()
    """What the hooks of pending events have written, where the policy has it shown."""
    others_events: int = 0
    """How many events of that document only concern other VMs; they are counted and no more."""
    command_options: str = ""
    """What commands need to find this agent, such as --state-dir DIR; "" if the default leads to it."""
    headline: str = ""
    """How things are, in one line that only changes when that does."""
    tone: Literal["good", "busy", "bad"] = "good"
    """Of the headline: bad if an operator has to act, or the agent is not healthy."""
    summaries: tuple[EventSummary, ...] = ()
    """Of ``pending``, most urgent first."""

    def running_for(self, workflow_id: str) -> tuple[RunningHook, ...]:
        """The hooks that run for this event."""
        return tuple([hook for hook in self.running if hook.workflow_id == workflow_id])


class CurrentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event as Azure tells it now, and what the agent makes of it."""

    event: ScheduledEvent
    affects: Affects
    workflow: ShownWorkflow | None
    """None if the agent has not seen it or does not follow it, or that is not known."""


class CurrentEvents(msgspec.Struct, frozen=True, kw_only=True):
    """What ``events --json`` prints."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    vm: Vm
    incarnation: str
    agent_runs: bool
    problem: str
    """Why it is not known what the agent makes of the events; "" if it is."""
    events: tuple[CurrentEvent, ...]


class OperatorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``approve``, ``hold`` and the like print with ``--json``."""

    schema_version: int = SCHEMA_VERSION
    at: datetime
    command: str
    event_id: str
    """"" if no event, or more than one, was meant."""
    workflow_id: str
    is_done: bool
    """Whether the agent has taken the word; the exit code is 0 then, else 1."""
    answer: str
    """The agent's, or why there is none."""
