"""The actions that are open to an operator on an event now, and their command lines to copy.

Pure: reads no file and no clock. Invariant: an action that is offered has an effect.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable

from scheduled_events_agent.status.status import AgentStatus, CommandOptions
from scheduled_events_agent.workflow import ACTION_TEXTS, OperatorAction, Workflow

SHORT_ID = 8
"""Characters of an id that are always shown."""
STATE_LOST = "state_lost"
"""The word that ``resolve`` accepts beside the ids of events: for the loss of state."""
# Commands that have the option for the state file, for the policy file, or both. All others have neither.
_FIND_STATE = {"status", "history", "approve", "hold", "release", "retry", "resolve"}
_READ_POLICY = {"check", "notify", "fleet"}
_DO_BOTH = {"run", "explain", "doctor"}


def available_actions(workflow: Workflow) -> tuple[OperatorAction, ...]:
    """Given a workflow, return the actions that change what an acting agent does about it, likeliest first."""
    event = workflow.event
    decision = workflow.decision
    if workflow.phase == "recovery_failed":
        return ("retry", "resolve")
    if workflow.wait_reason is not None and workflow.wait_reason.kind == "lost_hook":
        return ("resolve",)
    is_open = event.status == "Scheduled" and not (workflow.is_over or workflow.was_started)
    if is_open and event.is_recommendation:
        return _preparation_actions(workflow)
    if not is_open or decision.affects not in ("self", "shared"):
        return ()
    if event.approval_error or workflow.approval.state == "confirmed":
        return ("retry",) if workflow.prepare.state == "failed" else ()
    if workflow.operator_action == "hold":
        return ("release", "approve")
    if workflow.approval_needed_since and workflow.prepare.state != "failed":
        return ("approve", "hold")
    actions: list[OperatorAction] = ["retry"] if workflow.prepare.state == "failed" else []
    if workflow.operator_action:
        return (*actions, "release", "hold")
    if workflow.early_until and not actions:
        return ("approve", "hold")
    starts_next = decision.has_preparation and workflow.prepare.state in ("idle", "running")
    approves_itself = decision.approve not in ("manual", "never")
    if workflow.phase != "held" and decision.rule and (starts_next or approves_itself):
        actions.append("hold")
    if workflow.phase in ("waiting", "held") or not approves_itself or workflow.approval_needed_since:
        actions.append("approve")
    return tuple(actions)


def _preparation_actions(workflow: Workflow) -> tuple[OperatorAction, ...]:
    """Given a recommendation that is not over, return the actions that change its preparation, likeliest first."""
    ends: tuple[OperatorAction, ...] = () if workflow.prepare.state == "idle" else ("resolve",)
    if workflow.operator_action == "hold":
        return ("release", *ends)
    if workflow.prepare.state == "failed":
        return ("retry", *ends)
    starts_next = bool(workflow.decision.rule) and workflow.decision.has_preparation
    return ("hold", *ends) if starts_next and workflow.prepare.state in ("idle", "running") else ends


def unsettled_message(action: OperatorAction) -> str:
    """The answer to hold or release, if Azure's answer to the approval under way is not known in time."""
    return f"{ACTION_TEXTS[action]}, unless Azure accepts the approval that is under way; see status"


def offered_actions(status: AgentStatus, workflow: Workflow) -> tuple[OperatorAction, ...]:
    """Given an agent's status and one of its workflows, return the actions that it accepts, likeliest first.

    In observe mode it accepts only resolve. An agent that does not answer accepts none.
    """
    actions = available_actions(workflow) if status.source == "agent" else ()
    return actions if status.mode == "act" else tuple([action for action in actions if action == "resolve"])


def effect_of(action: OperatorAction, workflow: Workflow) -> str:
    """Given an action and the workflow that it is for, return what it does to the event, as a phrase."""
    if action == "retry":
        stage_status = workflow.recover if workflow.is_over else workflow.prepare
        return f"run {stage_status.failed_hook or 'the hook'} again, then the rest"
    if action == "approve":
        where = ""
        if workflow.decision.affects == "shared":
            where = f", on all {len(workflow.event.resources)} VMs that it names"
        if workflow.prepare.state in ("failed", "canceled"):
            return f"let Azure start it as it is{where}"
        is_ready = workflow.prepare.state == "succeeded" or not workflow.decision.has_preparation
        when = "now" if is_ready else "when it is prepared"
        return f"let Azure start it {when}{where}"
    if action == "resolve" and not workflow.is_over:
        return "end it, and recover what was prepared"
    if action == "resolve":
        reason = workflow.wait_reason
        lost = reason.detail if reason is not None and reason.kind == "lost_hook" else ""
        hook = lost or workflow.recover.failed_hook or "the hook"
        return f"only when you have done manually what {hook} does"
    return {
        "hold": "do not approve it",
        "release": "take the last command back",
    }[action]


def command(options: CommandOptions, name: str, *arguments: str) -> str:
    """Given options, a command and its arguments as ``quoted`` returns them, return the command line to copy."""
    state = options.state if name in _FIND_STATE | _DO_BOTH else ""
    policy = options.policy if name in _READ_POLICY | _DO_BOTH else ""
    return " ".join(filter(None, ("scheduled-events-agent", name, *arguments, state, policy)))


def with_prefix(line: str, prefix: str) -> str:
    """Given a command line and sudo, or "", return it as it is typed; what is not of this program is complete."""
    return f"{prefix}{line}" if line.startswith("scheduled-events-agent ") else line


def quoted(argument: str) -> str:
    """Given an argument, return it as a shell reads it as one word; a path of Windows stays as it is."""
    return argument if re.fullmatch(r"[\w@%+=:,./\\-]+", argument) else shlex.quote(argument)


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Given ids, return for each a beginning that fits no other, whatever the case.

    Ids that begin alike get the same length.
    """
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for id_ in ids:
        alike[id_.casefold()[:SHORT_ID]].add(id_)
    short: dict[str, str] = {}
    for group in alike.values():
        folded = {id_.casefold() for id_ in group}
        length = SHORT_ID
        while len({id_[:length] for id_ in folded}) < len(folded):
            length += 1
        short |= {id_: id_[:length] for id_ in group}
    return short
