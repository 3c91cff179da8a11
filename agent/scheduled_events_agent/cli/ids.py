"""``ids``: the ids of pending events, which completion offers."""

import argparse
import re
from contextlib import closing

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli import add_state_options
from scheduled_events_agent.cli.operator import find_state_dir
from scheduled_events_agent.store import Store

# An administrator's shell expands these words, so an id that a shell could read as something else is left out.
_PLAIN_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ids``."""
    parser.description = "Prints the ids of pending events, each on a line. Completion offers them."
    add_state_options(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        # In silence: a shell completes a command line just now.
        with closing(Store.look_into(find_state_dir(arguments, report=lambda _: None))) as store:
            ids = {workflow.event.id: None for workflow in store.load_workflows()}
    except AgentError:
        return 1
    for event_id in filter(_PLAIN_ID.fullmatch, ids):
        print(event_id)
    return 0
