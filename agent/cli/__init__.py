"""The command line: one file per group of commands, and the only place that wires parts together.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from agent import AgentError, __version__

# Each module adds its parsers and sets ``handler``: a function of the parsed arguments that returns the exit code.
# Modules keep heavy imports inside their handlers, so that --help and a wrong option answer at once.
_GROUPS = (
    "run",
    "policy",
    "operator",
    "status",
    "history",
    "doctor",
    "simulate",
    "demo",
    "install_unit",
    "service",
    "completion",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not so under pythonw, nor in some tests
            stream.reconfigure(errors="backslashreplace")  # Azure's texts may hold what this locale lacks
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.handler(arguments)
    except AgentError as error:
        # What is wrong with a file begins with the file's name and line, as compilers write it.
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


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = argparse.ArgumentParser(
        prog="scheduled-events-agent",
        description="Prepares this VM for Azure Scheduled Events, approves them when it is ready, and recovers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in _GROUPS:
        importlib.import_module(f"agent.cli.{group}").add_parsers(commands)
    return parser


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """--config, as every command that reads the policy file has it."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the policy file (default: $SCHEDULED_EVENTS_AGENT_CONFIG, else the system's place for it)",
    )
