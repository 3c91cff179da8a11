"""The command line of a hook. One that is a command of the agent itself runs this very agent, wherever it is."""

import os
import sys
from pathlib import Path

from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.settings import OWN_NAME, is_started_as_root

# Where scheduled-events-agent-hook@.service has its programs.
_PROGRAMS_OF_ROOT = Path("/etc/scheduled-events-agent/hooks")


def command_of(hook: Hook) -> tuple[str, ...] | None:
    """The program and its arguments; None for a shell line.

    For the agent's own name the command that has started this process, which may have a venv and no place on PATH.
    """
    if not hook.run or hook.run[0] != OWN_NAME:
        return hook.run
    return (*_OWN_COMMAND, *hook.run[1:])


def program_of_root(hook: Hook) -> Path | None:
    """The program that systemd runs for a hook that is ``run-as-root``; None for another hook."""
    if not hook.run or len(hook.run) != 2 or not is_started_as_root(hook):
        return None
    return _PROGRAMS_OF_ROOT / hook.run[1]


def _own_command() -> tuple[str, ...]:
    """How this process was started, without its arguments."""
    _, *words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return (sys.executable, *(os.path.abspath(word) if word == sys.argv[0] else word for word in words))  # noqa: PTH100


_OWN_COMMAND = _own_command()  # at import: a hook has another working directory
