"""``approve`` and ``hold``: an operator's word about one event, carried to the running agent by its state file."""

import argparse
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import AgentError
from agent.cli import add_config_option

if TYPE_CHECKING:
    from agent.store import RequestWord, Store

_ANSWER_WITHIN_SECONDS = 5.0

_WORDS = {
    "approve": ("approved", "approve an event that waits, is held, or that the policy would not approve"),
    "hold": ("held", "do not approve an event, whatever the policy says"),
    "release": ("", "take back an earlier approve or hold: the policy decides again"),
}


def add_parsers(commands: Any) -> None:
    """Register ``approve``, ``hold`` and ``release``."""
    for name, (word, help_) in _WORDS.items():
        parser = commands.add_parser(name, help=help_, description=f"{help_[0].upper()}{help_[1:]}.")
        parser.add_argument("id", metavar="ID", help="the event's id, or a beginning of it that fits only one")
        parser.add_argument(
            "--state-dir", metavar="DIR", help="the agent's state directory (overrides the policy file)"
        )
        add_config_option(parser)
        parser.set_defaults(handler=_ask, word=word)


def ask_agent(store: "Store", workflow_id: str, word: "RequestWord", user: str) -> str | None:
    """The running agent's answer; None if there was none within five seconds: then the request is withdrawn."""
    request = store.add_request(workflow_id, word, user, datetime.now(UTC))
    deadline = time.monotonic() + _ANSWER_WITHIN_SECONDS
    try:
        while store.load_answer(request) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        answer = store.withdraw_request(request)
    return answer


def _ask(arguments: argparse.Namespace) -> int:
    from agent import host  # noqa: PLC0415 - as are the imports below: only these commands need them
    from agent.config import find_config, load_settings  # noqa: PLC0415
    from agent.store import FILE_NAME, Store  # noqa: PLC0415

    if arguments.state_dir is None:
        arguments.state_dir = load_settings(
            find_config(arguments.config, host.default_config_path())
        ).agent.state_dir
    state_dir = Path(arguments.state_dir) if arguments.state_dir else host.default_state_dir()
    if not (state_dir / FILE_NAME).exists():
        raise AgentError(f"no agent has run with the state directory {state_dir}: name it with --state-dir")
    store = Store.join(state_dir)
    try:
        answer = ask_agent(store, _find(store, arguments.id), arguments.word, _user())
    finally:
        store.close()
    if answer is None:
        raise AgentError("no agent has answered, and the request is withdrawn: is the agent running?")
    print(answer)
    return 1 if answer.startswith("refused") else 0


def _find(store: Any, prefix: str) -> str:
    pending = [workflow for workflow in store.load_workflows() if not workflow.is_gone]
    found = [workflow for workflow in pending if workflow.event.key.startswith(prefix.casefold())]
    if len(found) == 1:
        workflow_id: str = found[0].id
        return workflow_id
    listed = "".join(f"\n  {w.event.id}  {w.event.type}  {w.phase}" for w in (found or pending))
    if found:
        raise AgentError(f'"{prefix}" fits {len(found)} pending events; give more of the id:{listed}')
    raise AgentError(f'no pending event begins with "{prefix}"; pending are:{listed or " none"}')


def _user() -> str:
    """Who asks: the account of this process, and, as a mere remark, who became it by sudo."""
    from agent import host  # noqa: PLC0415 - as above

    before = os.environ.get("SUDO_USER", "")
    return f"{host.account_name()} (sudo: {before})" if before and before.isprintable() else host.account_name()
