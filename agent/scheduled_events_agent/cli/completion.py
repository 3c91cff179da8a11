"""``completion``: a script that makes a shell complete this command line.

shtab makes it from the grammar. The packages for Linux contain the scripts; elsewhere shtab has to be installed.
"""

import argparse
import importlib
from collections.abc import Iterator

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import build_parser

_IDS = "scheduled-events-agent ids"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``completion``."""
    parser.description = (
        "Prints a script that makes a shell complete commands and options. The packages for Linux bring those for "
        "bash, zsh and fish; an installation with pip makes them, and PowerShell's, if it has the extra: "
        "pip install 'scheduled-events-agent[completion]'."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "powershell"), help="which shell")
    parser.set_defaults(handler=_run)


def hinted_parser() -> argparse.ArgumentParser:
    """The grammar, with what completes each value, which shtab finds at the actions. Raises ImportError."""
    shtab = importlib.import_module("shtab")  # an extra
    ids = shtab.cmd(_IDS)
    ids["zsh"] = "_scheduled_events_agent_ids"  # shtab's own would ask once, when the script is read
    ids["preamble"]["zsh"] = f'{ids["zsh"]}() {{ compadd -- ${{(f)"$({_IDS})"}} }}'
    hints = {"FILE": shtab.FILE, "DOCUMENT": shtab.FILE, "SCENARIO": shtab.FILE, "DIR": shtab.DIRECTORY, "ID": ids}
    parser = build_parser()
    for action in _actions(parser):
        if hint := hints.get(str(action.metavar)):
            vars(action)["complete"] = hint
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option and argument of the command and of its commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for command in action.choices.values():
                yield from _actions(command)


def _run(arguments: argparse.Namespace) -> int:
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise AgentError(
            f"the script for {arguments.shell} is made with shtab, which is not installed: install it beside the "
            "agent (pip install 'scheduled-events-agent[completion]'); the packages for Linux bring the script"
        ) from None
    print(shtab.complete(hinted_parser(), shell=arguments.shell, root_prefix="scheduled_events_agent"))
    return 0
