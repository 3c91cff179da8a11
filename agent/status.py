"""What there is to see: the agent and its events as values for people, and the words for them.

Owns the shape of /status and of ``status --json``, and the sentences that the terminal, the status page and the
service manager share. Decides nothing, reads nothing, knows no clock. The one invariant: nothing is said here that
``workflow`` or the journal does not say, and nothing that is only expected.
"""

import re
import shlex
from collections.abc import Iterable
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


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One event from first sight to its end, or to now."""

    workflow: Workflow
    entries: tuple[JournalEntry, ...]
    """Oldest first."""


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its entries, or a note of the agent alone."""

    workflow: Workflow | None
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
    pending: tuple[Workflow, ...]
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
    """The service manager has told it to pause: it watches, and does nothing."""
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
    pending: tuple[Workflow, ...]
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
    workflow: Workflow | None
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


def summarize(workflow: Workflow) -> str:
    """The event in one line, which changes only when something happens to it."""
    event = workflow.event
    rule = f"rule {workflow.decision.rule}" if workflow.decision.rule else "no rule"
    not_before = f", not before {event.not_before:%Y-%m-%dT%H:%M:%SZ}" if event.not_before else ""
    reason = f", {workflow.waits_for}" if workflow.waits_for else ""
    return f"{event.type} {event.id} ({rule}{not_before}): {workflow.phase.replace('_', ' ')}{reason}"


def activity(workflow: Workflow, running: Iterable[RunningHook], now: datetime) -> str:
    """What the agent does about the event now, or what it waits for, as one sentence without its stop."""
    hooks = [f"runs the {hook.stage} hook {hook.hook}, {span(hook.since, now)} so far" for hook in running]
    if hooks and is_held(workflow):
        hooks.append("held by an operator: no other begins")
    if hooks:
        return "; ".join(hooks)
    if workflow.phase == "recovery_failed":
        return f"recovery failed, an operator must retry or resolve it: {workflow.waits_for}"
    if workflow.is_missing:
        return "waits: it is not in the last document, and the next one tells if it is over"
    if workflow.phase == "preparing" and workflow.drain_until and workflow.drain_until > now:
        return f"drains for {span(now, workflow.drain_until)} more (/readyz answers 503)"
    if workflow.phase == "held":
        return f"held, Azure starts it at NotBefore: {workflow.waits_for}"
    if workflow.waits_for:
        return f"waits: {workflow.waits_for}"
    match workflow.phase:
        case "waiting" if not (workflow.decision.has_preparation or workflow.decision.approve != "never"):
            return "only observed"
        case "approved":
            return "approved; the event is Azure's to start"
        case "started":
            return "under way"
        case "closed":
            return f"over: {workflow.outcome}"
        case _ if workflow.approval.state == "requested":
            return "asks Azure to start it"
        case phase:
            return phase


def last_known_activity(workflow: Workflow) -> str:
    """What the agent was about when it last wrote about the event; whether it goes on is not known."""
    if workflow.phase == "recovery_failed":
        return f"recovery had failed: {workflow.waits_for}"
    stages = {"prepare": workflow.prepare, "on_start": workflow.on_start, "recover": workflow.recover}
    hooks = [
        f"had begun the {stage} hook {progress.current}" for stage, progress in stages.items() if progress.current
    ]
    waits = f"waited: {workflow.waits_for}" if workflow.waits_for else ""
    approval = f"approval {workflow.approval.state}" if workflow.approval.state != "none" else ""
    return "; ".join(filter(None, [f"was {workflow.phase.replace('_', ' ')}", *hooks, approval, waits]))


def lasting(event: ScheduledEvent) -> str:
    """Azure's estimate of the interruption, as a phrase."""
    if event.duration_seconds is None:
        return "for an unknown time"
    return f"for about {event.duration_seconds:g}s" if event.duration_seconds else "without an interruption"


def time_left(event: ScheduledEvent, now: datetime) -> str:
    """How long until the event may start, as a phrase."""
    if event.status == "Started":
        return "has started"
    if event.not_before is None or event.not_before <= now:
        return "may start at any moment"
    return f"not before {span(now, event.not_before)} from now"


def verdict(status: Status) -> str:
    """The agent in one line: is it well, what may it do, is anything pending."""
    acts = "acts" if status.mode == "act" else "only observes"
    parts = [
        *(["RECOVERY FAILED"] if any(w.phase == "recovery_failed" for w in status.pending) else []),
        "healthy" if status.health == "ok" else "NOT HEALTHY",
        "paused: watches, and does nothing" if status.is_paused else acts,
        pending_in_words(status.pending),
    ]
    if not status.vm.names:
        parts.append("the name of this VM is not known")
    if status.policy.refused:
        parts.append("the policy file is refused")
    return "; ".join(parts)


def pending_in_words(pending: Iterable[Workflow]) -> str:
    """How many events are pending, and which of them may wait for an operator."""
    workflows = list(pending)
    if not workflows:
        return "nothing is pending"
    of_others = sum(workflow.decision.affects == "others" for workflow in workflows)
    counts = {
        "not recovered": sum(workflow.phase == "recovery_failed" for workflow in workflows),
        "held": sum(workflow.phase == "held" for workflow in workflows),
        "started": sum(workflow.phase == "started" for workflow in workflows),
        "recovering": sum(workflow.phase == "recovering" for workflow in workflows),
        "waiting for an operator": sum(map(waits_for_operator, workflows)),
        "of other VMs": of_others,
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    events = "1 event is pending" if len(workflows) == 1 else f"{len(workflows)} events are pending"
    return f"{events} ({told})" if told else events


def is_held(workflow: Workflow) -> bool:
    """Whether an operator's hold is in force; it ends with the start of the event."""
    return workflow.operator == "held" and not (workflow.is_gone or workflow.was_started)


def waits_for_operator(workflow: Workflow) -> bool:
    """Whether its rule wants an operator to approve it, and that is all it waits for."""
    is_manual = workflow.decision.approve == "manual" and not workflow.operator
    return is_manual and workflow.phase in ("waiting", "prepared") and not workflow.event.is_started


def by_urgency(pending: Iterable[Workflow]) -> list[Workflow]:
    """What was not recovered first, then what concerns this VM: what may start soonest, has started, is over."""

    def rank(workflow: Workflow) -> tuple[bool, bool, bool, bool, float]:
        not_before = workflow.event.not_before
        return (
            workflow.phase != "recovery_failed",
            workflow.decision.affects == "others",
            workflow.is_gone,
            workflow.event.is_started,
            not_before.timestamp() if not_before else 0.0,
        )

    return sorted(pending, key=rank)


def overruling(workflow: Workflow) -> tuple[OperatorWord, ...]:
    """With which words an operator can change what an acting agent will do about the event, likeliest first."""
    event, decision = workflow.event, workflow.decision
    if workflow.phase == "recovery_failed":
        return ("retry", "resolve")
    is_open = event.status == "Scheduled" and not (workflow.is_gone or workflow.was_started)
    if not is_open or event.approval_fault or decision.affects not in ("self", "shared"):
        return ()
    if workflow.approval.state == "confirmed":
        return ("retry",) if workflow.prepare.state == "failed" else ()
    if workflow.operator == "held":
        return ("release", "approve")
    words: list[OperatorWord] = ["retry"] if workflow.prepare.state == "failed" else []
    if workflow.operator:
        return (*words, "release", "hold")
    is_to_begin = decision.has_preparation and workflow.prepare.state in ("idle", "running")
    approves_itself = decision.approve not in ("manual", "never")
    if workflow.phase != "held" and decision.rule and (is_to_begin or approves_itself):
        words.append("hold")
    return (*words, "approve") if workflow.phase in ("waiting", "held") or not approves_itself else tuple(words)


def words_of_use(status: Status, workflow: Workflow) -> tuple[OperatorWord, ...]:
    """The same for the agent as it is: one that does not act takes no word but that a recovery was put right."""
    words = overruling(workflow)
    is_acting = status.mode == "act" and not status.is_paused
    return words if is_acting else tuple([word for word in words if word == "resolve"])


def command(words: str, short_id: str, options: str = "") -> str:
    """The command line that an operator may copy. ``options``: see ``Status.command_options``."""
    return " ".join(filter(None, ("scheduled-events-agent", words, quoted(short_id), options)))


def quoted(word: str) -> str:
    """As a shell takes it for one word; a path of Windows as it is."""
    return word if re.fullmatch(r"[\w@%+=:,./\\-]+", word) else shlex.quote(word)


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """For each id its shortest beginning that fits no other, whatever the case; at least 8 characters."""
    folded = {id_: id_.casefold() for id_ in ids}
    short = {}
    for id_, mine in folded.items():
        others = [other for other in folded.values() if other != mine]
        length = min(8, len(id_))
        while length < len(id_) and any(other.startswith(mine[:length]) for other in others):
            length += 1
        short[id_] = id_[:length]
    return short


def clock(at: datetime, now: datetime) -> str:
    """Time of day, UTC, with the date if it is another one than that of ``now``."""
    return f"{at:%H:%M:%S}Z" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}Z"


def span(earlier: datetime, later: datetime) -> str:
    """The time between, in at most two units, rounded down; 0s if there is none."""
    seconds = max(0, int((later - earlier).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {seconds % 60}s" if minutes else f"{seconds}s"
