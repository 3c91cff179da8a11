"""The commands with which an operator overrules the agent, as one may copy them.

Decides nothing, reads nothing, knows no clock. The one invariant: a word that is offered has an effect.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable

from scheduled_events_agent.status.status import CommandOptions, OperatorWord, Status
from scheduled_events_agent.workflow import Workflow

UNSETTLED_HOLD = "held, unless Azure takes the approval that is under way; see status"
"""The answer to a hold that was given too late to wait for the answer to the approval."""
SHORT_ID = 8
"""Characters of an id that are always shown."""
# Which of the options in force a command has; those that are not here have neither.
_FIND_STATE = {"status", "history", "approve", "hold", "release", "retry", "resolve"}
_READ_POLICY = {"check", "notify", "fleet"}
_DO_BOTH = {"run", "explain", "doctor"}


def overruling(workflow: Workflow) -> tuple[OperatorWord, ...]:
    """With which words an operator can change what an acting agent will do about the event, likeliest first."""
    event = workflow.event
    decision = workflow.decision
    if workflow.phase == "recovery_failed":
        return ("retry", "resolve")
    if workflow.waits is not None and workflow.waits.kind == "lost_hook":
        return ("resolve",)
    is_open = event.status == "Scheduled" and not (workflow.is_over or workflow.was_started)
    if is_open and event.is_recommendation:
        return _overruling_preparation(workflow)
    if not is_open or decision.affects not in ("self", "shared"):
        return ()
    if event.approval_fault or workflow.approval.state == "confirmed":
        return ("retry",) if workflow.prepare.state == "failed" else ()
    if workflow.operator == "held":
        return ("release", "approve")
    if workflow.approval_needed_since and workflow.prepare.state != "failed":
        return ("approve", "hold")
    words: list[OperatorWord] = ["retry"] if workflow.prepare.state == "failed" else []
    if workflow.operator:
        return (*words, "release", "hold")
    is_to_begin = decision.has_preparation and workflow.prepare.state in ("idle", "running")
    approves_itself = decision.approve not in ("manual", "never")
    if workflow.phase != "held" and decision.rule and (is_to_begin or approves_itself):
        words.append("hold")
    return (*words, "approve") if workflow.phase in ("waiting", "held") or not approves_itself else tuple(words)


def _overruling_preparation(workflow: Workflow) -> tuple[OperatorWord, ...]:
    ends: tuple[OperatorWord, ...] = () if workflow.prepare.state == "idle" else ("resolve",)
    if workflow.operator == "held":
        return ("release", *ends)
    if workflow.prepare.state == "failed":
        return ("retry", *ends)
    is_to_begin = bool(workflow.decision.rule) and workflow.decision.has_preparation
    return ("hold", *ends) if is_to_begin and workflow.prepare.state in ("idle", "running") else ends


def words_of_use(status: Status, workflow: Workflow) -> tuple[OperatorWord, ...]:
    """Those words of ``overruling`` that this agent takes; one that does not act takes only ``resolve``."""
    words = overruling(workflow) if status.source == "agent" else ()
    return words if status.mode == "act" else tuple([word for word in words if word == "resolve"])


def effect_of(word: OperatorWord, workflow: Workflow) -> str:
    """What the command does to the event, as a phrase."""
    if word == "retry":
        progress = workflow.recover if workflow.is_over else workflow.prepare
        return f"run {progress.failed_hook or 'the hook'} again, then the rest"
    if word == "approve":
        if workflow.prepare.state in ("failed", "canceled"):
            return "let Azure start it as it is"
        is_ready = workflow.prepare.state == "succeeded" or not workflow.decision.has_preparation
        return "let Azure start it now" if is_ready else "let Azure start it when it is prepared"
    if word == "resolve" and not workflow.is_over:
        return "end it, and recover what was prepared"
    if word == "resolve":
        lost = workflow.waits.detail if workflow.waits and workflow.waits.kind == "lost_hook" else ""
        hook = workflow.recover.failed_hook or lost or "the hook"
        return f"only when you have done manually what {hook} does"
    return {
        "hold": "do not approve it",
        "release": "take the last command back",
    }[word]


def command(options: CommandOptions, name: str, *arguments: str) -> str:
    """The command line that an operator may copy, as it works here. For the arguments, see ``quoted``."""
    state = options.state if name in _FIND_STATE | _DO_BOTH else ""
    policy = options.policy if name in _READ_POLICY | _DO_BOTH else ""
    return " ".join(filter(None, ("scheduled-events-agent", name, *arguments, state, policy)))


def quoted(word: str) -> str:
    """As a shell takes it for one word; a path of Windows as it is."""
    return word if re.fullmatch(r"[\w@%+=:,./\\-]+", word) else shlex.quote(word)


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """For each id a beginning that fits no other, whatever the case; ids that begin alike get the same length."""
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
