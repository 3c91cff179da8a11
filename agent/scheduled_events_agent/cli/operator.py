"""``approve``, ``hold``, ``release``, ``retry``, ``resolve``: an operator's request about one event.

Finds the running agent's state file, through which the agent gets requests.
Invariant: a request without an answer is withdrawn before the command reports that.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.terminal import print_error, print_json, printable
from scheduled_events_agent.policy.durations import format_time, plural
from scheduled_events_agent.status import CommandOptions, OperatorResult
from scheduled_events_agent.status.actions import STATE_LOST, command, quoted, unsettled_message, with_prefix
from scheduled_events_agent.store import (
    LOCK_NAME,
    REQUEST_VALID_SECONDS,
    RequestAnswer,
    Store,
    StoreError,
)
from scheduled_events_agent.workflow import OperatorAction, Workflow, is_unsettled

# Longer than the agent ever sleeps, in case the wake-up is lost.
_ANSWER_WITHIN_SECONDS = 12.0
_POLL_SECONDS = 0.01
_LISTED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of each of these commands."""
    parser.description = f"{parser.description} Exit code 1: the agent rejects the request, or does not answer."
    help_ = "the event's id, or a beginning of it that fits only one"
    if parser.get_default("command") == "resolve":
        help_ += f"; or {STATE_LOST}, for a loss of the agent's state"
    parser.add_argument("id", metavar="ID", help=help_)
    add_state_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_request)


def find_state_dir(arguments: argparse.Namespace, report: Callable[[str], None] = print_error) -> Path:
    """Where the agent keeps its state. Raises AgentError if that is not known.

    A running agent still uses the policy from before, so one that is rejected now does not matter: ``report`` gets
    a line about it.
    """
    if arguments.state_dir:
        return Path(arguments.state_dir)
    from scheduled_events_agent.cli.config import find_config, load_policy, state_dir_of  # noqa: PLC0415  # 25 ms, most of it PyYAML's
    from scheduled_events_agent.policy.load import ConfigError  # noqa: PLC0415  # 25 ms, most of it PyYAML's

    path = find_config(arguments.config)
    try:
        return state_dir_of(load_policy(path).settings)
    except ConfigError as error:
        directory = host.default_state_dir()
        if error.state_dir is not None:
            directory = Path(error.state_dir) if error.state_dir else directory
            line = as_typed(command(options_in_force(None, path, directory), "check"))
            report(f"{path} is rejected: {line} says why")
            return directory
        problem, *more = error.problems
        problems = f"{problem} (and {plural(len(more), 'more problem')})" if more else str(problem)
        if arguments.config:
            raise AgentError(f"{problems}\nso name the state directory with --state-dir", kind="config") from error
        report(f"{problems}\nso this looks in {directory}; --state-dir names another")
        return directory


def options_in_force(state_option: str | None, policy: Path | None, state_dir: Path) -> CommandOptions:
    """The options that a suggested command needs to reach the same agent as one with these options."""
    own_policy = policy if policy != host.default_config_path() else None
    is_elsewhere = bool(state_option) or own_policy is not None
    return CommandOptions(
        state=f"--state-dir {quoted(str(state_dir.absolute()))}" if is_elsewhere else "",
        policy=f"--config {quoted(str(own_policy.absolute()))}" if own_policy is not None else "",
    )


def options_of(arguments: argparse.Namespace, state_dir: Path) -> CommandOptions:
    """The options in force, by this command line and its environment."""
    from scheduled_events_agent.cli.config import find_config  # noqa: PLC0415  # 25 ms, most of it PyYAML's

    return options_in_force(arguments.state_dir, find_config(arguments.config), state_dir)


def find_agent(state_dir: Path) -> str | None:
    """The pid of the agent that runs there, "unknown" if that is not known; None if none does."""
    try:
        return host.lock_owner(state_dir / LOCK_NAME)
    except host.HostError:
        return "unknown"  # it is asked anyway


def wait_for_answer(store: Store, request: int) -> RequestAnswer | None:
    """The running agent's answer; None if none came within twelve seconds. The request is withdrawn in any case.

    Raises StoreError.
    """
    deadline = time.monotonic() + _ANSWER_WITHIN_SECONDS
    try:
        while store.load_answer(request) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        try:
            answer = store.withdraw_request(request)
        except StoreError as error:
            within = f"within {REQUEST_VALID_SECONDS:g} s"
            raise StoreError(
                f"{error}, so the request could not be withdrawn, and the agent may still carry it out {within}"
            ) from error
    return answer


def find_by_prefix(prefix: str, workflows: Sequence[Workflow], *, kind: str = "") -> list[Workflow]:
    """The workflows of the one event whose id has the prefix, whatever the case. Raises AgentError, with a list.

    ``kind``: a word for all of these events, such as pending.
    """
    folded = prefix.casefold()
    of_kind = f"{kind} " if kind else ""
    found = [workflow for workflow in workflows if folded and workflow.event.key.startswith(folded)]
    found = [workflow for workflow in found if workflow.event.key == folded] or found
    if len({workflow.event.key for workflow in found}) == 1:
        return found
    listed = {w.event.key: f"\n  {_line(w)}" for w in (found or workflows)[-_LISTED:]}
    if found:
        count = len({workflow.event.key for workflow in found})
        message = f'"{prefix}" matches {count} {of_kind}events; give more of the id:'
    else:
        message = f'no {of_kind}event id begins with "{prefix}"; {kind or "known"} are:'
    raise AgentError(message + ("".join(listed.values()) or " none"))


def user_name() -> str:
    """The account of this process, and the account that used sudo to become it."""
    before = os.environ.get("SUDO_USER", "")
    return f"{host.account_name()} (sudo: {before})" if before and before.isprintable() else host.account_name()


def as_typed(line: str) -> str:
    """The command line as its reader has to type it: with sudo again, if this process was started with it."""
    prefix = host.supervisor_commands().prefix if os.environ.get("SUDO_USER") else ""
    return with_prefix(line, prefix)


def _find(prefix: str, action: OperatorAction, workflows: Sequence[Workflow]) -> Workflow:
    """The event that is meant. If it came back under its id, retry and resolve mean the one that is over."""
    if action not in ("retry", "resolve"):
        workflows = [workflow for workflow in workflows if not workflow.is_over]
    found = find_by_prefix(prefix, workflows, kind="pending")
    return next((workflow for workflow in found if workflow.phase == "recovery_failed"), found[-1])


def _how_it_ended(prefix: str, action: OperatorAction, pending: Sequence[Workflow], store: Store) -> str:
    """The message for an event that is over, from the history; "" if a pending event may be meant, or none."""
    folded = prefix.casefold()
    may_be_over = action in ("retry", "resolve")
    if not folded or any(w.event.key.startswith(folded) for w in pending if may_be_over or not w.is_over):
        return ""
    for history in store.load_histories(limit=1, is_wanted=lambda w: w.event.key.startswith(folded)):
        workflow = history.workflow
        gone = [entry for entry in history.records if entry.kind in ("gone", "closed")]
        ended = f" since {format_time(gone[0].at, datetime.now(UTC))}" if gone else ""
        outcome = f": {workflow.outcome}" if workflow.outcome else ""
        recovery = "; its recovery is not done" if workflow.is_open else ""
        return printable(f"event {workflow.event.id} is over{ended}{outcome}{recovery}")
    return ""


class _RequestResult(NamedTuple):
    """The event of a request, and the agent's answer."""

    event_id: str
    workflow_id: str
    """The event's workflow; or the key of an event that is held and not pending; or ``STATE_LOST``."""
    answer: RequestAnswer


def _request(arguments: argparse.Namespace) -> int:
    try:
        outcome = _ask(arguments)
    except AgentError as error:
        if not arguments.json or error.kind in ("config", "usage"):
            raise
        outcome = _RequestResult("", "", RequestAnswer(succeeded=False, message=str(error)))
    if arguments.json:
        result = OperatorResult(
            at=datetime.now(UTC),
            command=arguments.command,
            event_id=outcome.event_id,
            key=outcome.workflow_id,
            succeeded=outcome.answer.succeeded,
            message=outcome.answer.message,
        )
        print_json(result)
    else:
        print(printable(outcome.answer.message))
    return 0 if outcome.answer.succeeded else 1


def _ask(arguments: argparse.Namespace) -> _RequestResult:
    """Find the event, and ask the agent. Raises AgentError if there is no such event, or no answer."""
    action: OperatorAction = arguments.command
    state_dir = find_state_dir(arguments)
    with closing(Store.open_client(state_dir)) as store:
        event_id, workflow_id = _find_target(arguments.id, action, store)
        pid = find_agent(state_dir)
        if pid is None:
            raise AgentError(f"no agent runs with the state directory {state_dir}: start the agent first")
        request = store.add_request(workflow_id, action, user_name(), datetime.now(UTC))
        answer = wait_for_answer(store, request)
        has_no_result = answer is None and _waits_for_azure(store, workflow_id, action)
    if has_no_result:
        raise AgentError(unsettled_message(action))
    if answer is None:
        look = as_typed(command(options_of(arguments, state_dir), "status"))
        raise AgentError(
            f"the agent (pid {pid}) has not answered within {_ANSWER_WITHIN_SECONDS:g} s, and the request is "
            f"withdrawn: is it stopped, or its disk slow? See {look}"
        )
    return _RequestResult(event_id, workflow_id, answer)


def _find_target(prefix: str, action: OperatorAction, store: Store) -> tuple[str, str]:
    """The ids for ``_RequestResult`` of what the prefix means. Raises AgentError if that is nothing."""
    if action == "resolve" and prefix == STATE_LOST:
        return "", STATE_LOST  # Azure's ids of events are GUIDs
    workflows = store.load_workflows()
    held = _find_absent_hold(prefix, workflows, store)
    if held and action == "release":
        return held, held
    if over := _how_it_ended(prefix, action, workflows, store):
        remembered = "; an operator's hold of it is remembered, release ends that" if held else ""
        raise AgentError(f"{over}{remembered}")
    workflow = _find(prefix, action, workflows)
    return workflow.event.id, workflow.id


def _find_absent_hold(prefix: str, workflows: Sequence[Workflow], store: Store) -> str:
    """The key of the one event with this prefix that is held and not pending; "" if there is none."""
    folded = prefix.casefold()
    present = {workflow.event.key for workflow in workflows if not workflow.is_over}
    if not folded or any(key.startswith(folded) for key in present):
        return ""
    keys = [key for fact, key in store.load_remembered() if fact == "hold" and key.startswith(folded)]
    return keys[0] if len(keys) == 1 else ""


def _waits_for_azure(store: Store, workflow_id: str, action: OperatorAction) -> bool:
    """Whether the action is in force, but an approval that was sent before it has no answer yet."""
    return any(
        workflow.id == workflow_id and is_unsettled(workflow, action) for workflow in store.load_workflows()
    )


def _line(workflow: Workflow) -> str:
    return printable(f"{workflow.event.id or workflow.event.key}  {workflow.event.type}  {workflow.phase}")
