"""``completion``: a script that makes a shell complete this command line.

shtab makes it from the grammar. The packages for Linux contain the scripts; elsewhere shtab has to be installed.
"""

import argparse
import importlib
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.cli.operator import find_state_dir
from scheduled_events_agent.status.actions import STATE_LOST
from scheduled_events_agent.store import Store

_IDS = "scheduled-events-agent completion ids"
# An administrator's shell expands these words, so an id that a shell could read as something else is left out.
_PLAIN_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
STATUS_URL = "http://127.0.0.1:9769/status"
"""Where an agent says what is pending, by default."""
# The user waits for the next character.
_STATUS_TIMEOUT_SECONDS = 0.5
_MAX_STATUS_BYTES = 4 * 1024 * 1024


class _Shells(tuple[str, ...]):
    """The shells. ``ids``, which the scripts use, is accepted too, but not listed."""

    __slots__ = ()

    def __contains__(self, word: object) -> bool:
        return word == "ids" or super().__contains__(word)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``completion``."""
    parser.description = (
        "Prints a script that makes a shell complete commands and options. The packages for Linux bring those for "
        "bash, zsh and fish; an installation with pip makes them, and PowerShell's, if it has the extra: "
        "pip install 'scheduled-events-agent[completion]'."
    )
    parser.add_argument("shell", choices=_Shells(("bash", "zsh", "fish", "powershell")), help="which shell")
    parser.set_defaults(handler=_run)


def parser_with_completers() -> argparse.ArgumentParser:
    """The grammar, with a completer at each action, where shtab looks for it. Raises ImportError."""
    shtab = importlib.import_module("shtab")  # an extra
    ids = shtab.cmd(_IDS)
    ids["zsh"] = "_scheduled_events_agent_ids"  # shtab's own would ask once, when the script is read
    ids["preamble"]["zsh"] = f'{ids["zsh"]}() {{ compadd -- ${{(f)"$({_IDS})"}} }}'
    scenarios = _scenario_or_file()
    hints = {"FILE": shtab.FILE, "DOCUMENT": scenarios, "SCENARIO": scenarios, "DIR": shtab.DIRECTORY, "ID": ids}
    parser = build_parser()
    for action in _actions(parser):
        if hint := hints.get(str(action.metavar)):
            vars(action)["complete"] = hint
    return parser


def _scenario_or_file() -> dict[str, Any]:
    """A completer, as shtab has them: the names of the shipped scenarios, and files."""
    from scheduled_events_agent.simulator.scenario import list_scenarios  # noqa: PLC0415  # only to make a script

    names = " ".join(list_scenarios())
    function = "_scheduled_events_agent_scenarios"
    word = "param([string]$WordToComplete)"
    matching = 'Where-Object { $_ -like "$WordToComplete*" }'
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "powershell": function,
        "preamble": {
            "bash": f'{function}() {{ compgen -W "{names}" -- "$1"; _shtab_compgen_files "$1"; }}',
            "zsh": f"{function}() {{ _alternative 'scenarios:scenario:({names})' 'files:file:_files' }}",
            "fish": (
                f"function {function}\n"
                f"  string split ' ' -- '{names}'\n"
                "  __fish_complete_path (commandline -ct)\n"
                "end"
            ),
            "powershell": (
                f"function {function} {{\n"
                f"  {word}\n"
                f"  -split '{names}' | {matching}\n"
                "  _shtab_powershell_compgen_files $WordToComplete\n"
                "}"
            ),
        },
    }


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option and argument of the command and of its commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for command in action.choices.values():
                yield from _actions(command)


class _EventId(msgspec.Struct):
    id: str


class _Answer(msgspec.Struct):
    """What is of use here in the answer of ``/status``."""

    events: tuple[_EventId, ...]
    state_lost: dict[str, Any] | None = None


def _print_ids() -> int:
    """Print the ids of pending events, one on a line, and the word for a loss of state.

    No error is shown: the user is typing a command line.
    """
    default = argparse.Namespace(state_dir=None, config=None)
    try:
        with closing(Store.open_readonly(find_state_dir(default, report=lambda _: None))) as store:
            ids: Iterable[str] = [workflow.event.id for workflow in store.load_workflows()]
            is_state_lost = store.load_unsettled_loss() is not None
    except AgentError:  # most accounts may not read the state
        answer = _fetch_status()
        if answer is None:
            return 1
        ids = [event.id for event in answer.events]
        is_state_lost = answer.state_lost is not None
    for event_id in filter(_PLAIN_ID.fullmatch, dict.fromkeys(ids)):
        print(event_id)
    if is_state_lost:
        print(STATE_LOST)
    return 0


def _fetch_status() -> _Answer | None:
    """The status of the agent that serves its pages at the default address; None if there is none."""
    import httpx  # noqa: PLC0415  # half of this command's start, and an account that reads the state needs none

    from scheduled_events_agent.http.transport import BoundedTransport  # noqa: PLC0415  # with httpx

    transport = BoundedTransport(_MAX_STATUS_BYTES)
    try:
        with httpx.Client(transport=transport, timeout=_STATUS_TIMEOUT_SECONDS, trust_env=False) as client:
            content = client.get(STATUS_URL).raise_for_status().content
        return msgspec.json.decode(content, type=_Answer)
    except (httpx.HTTPError, msgspec.MsgspecError):
        return None


def _run(arguments: argparse.Namespace) -> int:
    if arguments.shell == "ids":
        return _print_ids()
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise AgentError(
            f"the script for {arguments.shell} is made with shtab, which is not installed: install it beside the "
            "agent (pip install 'scheduled-events-agent[completion]'); the packages for Linux bring the script"
        ) from None
    print(shtab.complete(parser_with_completers(), shell=arguments.shell, root_prefix="scheduled_events_agent"))
    return 0
