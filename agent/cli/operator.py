"""``approve``, ``hold``, ``release``, ``retry``, ``resolve``: an operator's word about one event, for the agent.

Owns the way to the running agent, which is its state file: where that is, whether an agent runs, what it is asked
and how long for an answer is waited. The one invariant: an operator is told only what is so, of a request that was
taken or withdrawn.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import AgentError
from agent.cli import add_config_option
from agent.cli.terminal import print_json, printable

if TYPE_CHECKING:
    from agent.store import RequestWord, Store
    from agent.workflow import Workflow

_ANSWER_WITHIN_SECONDS = 5.0
_LISTED = 20

_WORDS = {
    "approve": ("approved", "approve an event that waits, is held, or that the policy would not approve"),
    "hold": ("held", "begin no drain and no prepare hook for an event, and do not approve it, until release"),
    "release": ("", "take back an earlier approve or hold: the policy decides again"),
    "retry": ("retry", "run the hook that failed again, and then the rest of its stage (prepare or recover)"),
    "resolve": ("resolve", "close an event whose recovery failed: this VM was put right by hand"),
}


def add_parsers(commands: Any) -> None:
    """Register a command for each word."""
    for name, (word, help_) in _WORDS.items():
        parser = commands.add_parser(
            name,
            help=help_,
            description=f"{help_[0].upper()}{help_[1:]}. Exit code 1: the agent refuses, or does not answer.",
        )
        parser.add_argument("id", metavar="ID", help="the event's id, or a beginning of it that fits only one")
        add_state_options(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(handler=_speak, word=word, command=name)


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """--state-dir and --config, for whoever wants to know of the agent that runs."""
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the agent's state directory (overrides the policy file)"
    )
    add_config_option(parser)


def find_state_dir(arguments: argparse.Namespace) -> Path:
    """Where the agent keeps its state. Raises AgentError if nobody knows."""
    from agent import host  # noqa: PLC0415 - as are the imports below: only commands that ask the agent need them
    from agent.settings import ConfigError, find_config, load_settings  # noqa: PLC0415
    from agent.store import FILE_NAME  # noqa: PLC0415

    if arguments.state_dir:
        return Path(arguments.state_dir)
    try:
        settings = load_settings(find_config(arguments.config, host.default_config_path()))
        return Path(settings.agent.state_dir) if settings.agent.state_dir else host.default_state_dir()
    except ConfigError as error:
        # An agent that runs goes on with the policy from before: it must be reachable all the same.
        directory = host.default_state_dir()
        problem, *more = error.problems
        told = f"{problem}{f' (and {len(more)} more problems)' if more else ''}"
        if arguments.config or not _may_exist(directory / FILE_NAME):
            raise AgentError(f"{told}\nso name the state directory with --state-dir", kind="config") from error
        print(f"{told}\nso this looks in {directory}; --state-dir names another", file=sys.stderr)
        return directory


def find_agent(state_dir: Path) -> str | None:
    """The pid of the agent that runs there, "unknown" if that is not known; None if none does."""
    from agent import host  # noqa: PLC0415 - as above

    try:
        return host.lock_holder(state_dir / "lock")
    except host.HostError:
        return "unknown"  # who is to be asked all the same


def ask_agent(store: "Store", workflow_id: str, word: "RequestWord", user: str) -> str | None:
    """The running agent's answer; None if there was none within five seconds: then the request is withdrawn.

    Raises StoreError.
    """
    from agent.store import REQUEST_VALID_SECONDS, StoreError  # noqa: PLC0415 - as above

    request = store.add_request(workflow_id, word, user, datetime.now(UTC))
    deadline = time.monotonic() + _ANSWER_WITHIN_SECONDS
    try:
        while store.load_answer(request) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        try:
            answer = store.withdraw_request(request)
        except StoreError as error:
            within = f"within {REQUEST_VALID_SECONDS:g} s"
            raise StoreError(
                f"{error}, so the request could not be withdrawn, and the agent may still take it {within}"
            ) from error
    return answer


def find_by_prefix(prefix: str, workflows: "Sequence[Workflow]", *, kind: str = "") -> "list[Workflow]":
    """The workflows of the one event that the prefix fits, whatever the case. Raises AgentError, with a list.

    ``kind``: what all of these events are, such as pending.
    """
    folded, of_kind = prefix.casefold(), f"{kind} " if kind else ""
    found = [workflow for workflow in workflows if folded and workflow.event.key.startswith(folded)]
    found = [workflow for workflow in found if workflow.event.key == folded] or found
    if len({workflow.event.key for workflow in found}) == 1:
        return found
    listed = {w.event.key: f"\n  {_line(w)}" for w in (found or workflows)[-_LISTED:]}
    if found:
        count = len({workflow.event.key for workflow in found})
        message = f'"{prefix}" fits {count} {of_kind}events; give more of the id:'
    else:
        message = f'no {of_kind}event begins with "{prefix}"; {kind or "known"} are:'
    raise AgentError(message + ("".join(listed.values()) or " none"))


def _find(prefix: str, word: str, workflows: "Sequence[Workflow]") -> "Workflow":
    """The event that is meant; of one that has come back under its id, its first appearance may be meant."""
    if word not in ("retry", "resolve"):
        workflows = [workflow for workflow in workflows if not workflow.is_gone]
    found = find_by_prefix(prefix, workflows, kind="pending")
    return next((workflow for workflow in found if workflow.phase == "recovery_failed"), found[-1])


def user_name() -> str:
    """Who asks: the account of this process, and, as a mere remark, who became it by sudo."""
    from agent import host  # noqa: PLC0415 - as above

    before = os.environ.get("SUDO_USER", "")
    return f"{host.account_name()} (sudo: {before})" if before and before.isprintable() else host.account_name()


def _speak(arguments: argparse.Namespace) -> int:
    from agent.status import OperatorAnswer  # noqa: PLC0415 - as above

    try:
        workflow, answer = _ask(arguments)
    except AgentError as error:
        if not arguments.json or error.kind in ("config", "usage"):
            raise
        workflow, answer = None, str(error)
    is_done = workflow is not None and not answer.startswith("refused")
    if arguments.json:
        told = OperatorAnswer(
            at=datetime.now(UTC),
            command=arguments.command,
            event_id=workflow.event.id if workflow else "",
            workflow_id=workflow.id if workflow else "",
            is_done=is_done,
            answer=answer,
        )
        print_json(told)
    else:
        print(printable(answer))
    return 0 if is_done else 1


def _ask(arguments: argparse.Namespace) -> "tuple[Workflow, str]":
    """The event that is meant, and what the agent answers. Raises AgentError if it does not."""
    from agent.store import Store  # noqa: PLC0415 - as above

    state_dir = find_state_dir(arguments)
    store = Store.join(state_dir)
    try:
        workflow = _find(arguments.id, arguments.word, store.load_workflows())
        pid = find_agent(state_dir)
        if pid is None:
            raise AgentError(f"no agent runs with the state directory {state_dir}: there is nobody to do that")
        answer = ask_agent(store, workflow.id, arguments.word, user_name())
    finally:
        store.close()
    if answer is None:
        raise AgentError(
            f"the agent (pid {pid}) has not answered within {_ANSWER_WITHIN_SECONDS:g} s, and the request is "
            "withdrawn: is it stopped, or its disk slow? See scheduled-events-agent status"
        )
    return workflow, answer


def _line(workflow: "Workflow") -> str:
    return printable(f"{workflow.event.id or workflow.event.key}  {workflow.event.type}  {workflow.phase}")


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # out of reach for this account, which will be told so
        return True
