"""The command line: one file for each command or group of commands, and the only place that wires parts together.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.
"""

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from scheduled_events_agent import AgentError, __version__

# Command -> the module of this package that has it, and a line of help. The module's ``add_arguments(parser)``
# adds the command's options and sets ``handler``: a function of the parsed arguments that returns the exit code.
_COMMANDS = {
    "run": ("run", "run the agent until it is stopped"),
    "check": ("check", "is the policy file right?"),
    "explain": ("explain", "which rule takes each event, why, and what would happen when"),
    "approve": ("operator", "approve an event that waits, is held, or that the policy would not approve"),
    "hold": ("operator", "begin no drain and no prepare hook for an event, and do not approve it, until release"),
    "release": ("operator", "take back an earlier approve or hold: the policy decides again"),
    "retry": ("operator", "run the hook that failed again, and then the rest of its stage (prepare or recover)"),
    "resolve": ("operator", "close an event whose recovery failed: this VM was put right by hand"),
    "status": ("status", "what the agent does now, and why"),
    "events": ("events", "what Azure says now, readable"),
    "history": ("history", "what was done about which event, and how it ended"),
    "notify": ("notify", "send a test to the services that are notified of events"),
    "fleet": ("fleet", "slots and readiness of the VMs that act together; release frees a slot by hand"),
    "doctor": ("doctor", "would the agent do its work on this machine?"),
    "simulate": ("simulate", "serve a simulated Scheduled Events endpoint"),
    "demo": ("demo", "watch the agent handle five events of a simulated Azure"),
    "service": ("service", "the agent as a Windows service: install, remove, start, stop, status, reload"),
    "completion": ("completion", "print a script that makes a shell complete these commands"),
    "ids": ("ids", "print the ids of pending events, which completion offers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not so under pythonw, nor in some tests
            stream.reconfigure(errors="backslashreplace")  # Azure's texts may hold what this locale lacks
    if (
        argv is None
    ):  # in a process of its own: modules are no garbage, and to look for some takes a tenth of the start
        gc.disable()
    words = sys.argv[1:] if argv is None else argv
    arguments = build_parser(words[0] if words else "").parse_args(words)
    if argv is None:
        gc.freeze()
        gc.enable()
    try:
        code: int = arguments.handler(arguments)
    except AgentError as error:
        # A problem of a file begins with the file's name and line, as compilers write it.
        print(error if error.kind == "config" else f"scheduled-events-agent: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        sys.stderr.close()
        return 1
    return code


def exit_code(error: AgentError) -> int:
    """2 if the command line or the policy file has an error, else 1."""
    return 2 if error.kind in ("config", "usage") else 1


def build_parser(word: str | None = None) -> argparse.ArgumentParser:
    """The grammar of the command line: all of it, or what is needed if its first word is known.

    That is the command alone; for any other word all commands, without their options. So each starts quickly.
    """
    parser = argparse.ArgumentParser(
        prog="scheduled-events-agent",
        description="Prepares this VM for Azure Scheduled Events, approves them when it is ready, and recovers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in [word] if word in _COMMANDS else _COMMANDS:
        module, help_ = _COMMANDS[name]
        is_whole = word in (None, name)
        description = f"{help_[0].upper()}{help_[1:]}."
        command = commands.add_parser(name, help=help_, description=description, add_help=is_whole)
        if is_whole:
            command.set_defaults(command=name)
            importlib.import_module(f"scheduled_events_agent.cli.{module}").add_arguments(command)
    return parser


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """--config, as every command that reads the policy file has it."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the policy file (default: $SCHEDULED_EVENTS_AGENT_CONFIG, else the system's place for it)",
    )


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """--state-dir and --config, as every command that asks the running agent has them."""
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the agent's state directory (overrides the policy file)"
    )
    add_config_option(parser)
