"""The command line of a hook. One that is a command of the agent itself runs this very agent, wherever it is."""

import sys

from scheduled_events_agent.policy import Hook

OWN_NAME = "scheduled-events-agent"


def command_of(hook: Hook) -> tuple[str, ...] | None:
    """The program and its arguments; None for a shell line.

    For the agent's own name the command that has started this process, which may have a venv and no place on PATH.
    """
    if not hook.run or hook.run[0] != OWN_NAME:
        return hook.run
    return (*own_command(), *hook.run[1:])


def own_command() -> tuple[str, ...]:
    """How this process was started, without its arguments."""
    _, *words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return (sys.executable, *words)
