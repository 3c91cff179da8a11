"""The agent's command, which kills itself at its n-th commit.

killer.py POSITION WHEN BOOT_ID ARGUMENT...

WHEN is ``before`` (all of it is written and nothing committed) or ``after`` (it is committed, and nothing has been
done about it). POSITION 0 is never. BOOT_ID, if it is not empty, is what the system says of this boot.
"""

import os
import sqlite3
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import scheduled_events_agent.host
from scheduled_events_agent.cli import main

_KILL = 9  # SIGKILL; on Windows the exit code with which the process is ended at once

position, when, boot, *arguments = sys.argv[1:]
connect = sqlite3.connect
numbers = count(1)


def commit(write: Callable[[], Any], do: Callable[[], Any]) -> Any:
    is_last = next(numbers) == int(position)
    if is_last and when == "before":
        write()
        os.kill(os.getpid(), _KILL)
    result = do()
    if is_last:
        os.kill(os.getpid(), _KILL)
    return result


class Deadly(sqlite3.Connection):
    """Knows every way in which the store commits."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        run = super().execute
        cursor: sqlite3.Cursor = (
            commit(lambda: None, lambda: run(sql)) if sql == "COMMIT" else run(sql, *parameters)
        )
        return cursor

    def executescript(self, sql: str) -> sqlite3.Cursor:
        begun, word, nothing = sql.partition("COMMIT;")
        assert (word, nothing) == ("COMMIT;", ""), sql
        run = super().executescript
        cursor: sqlite3.Cursor = commit(lambda: run(begun), lambda: run(sql))
        return cursor


def connect_deadly(*args: Any, **settings: Any) -> sqlite3.Connection:
    return connect(*args, factory=Deadly, **settings)


sqlite3.connect = connect_deadly  # type: ignore[assignment]
if boot:
    scheduled_events_agent.host.boot_id = lambda: boot
    scheduled_events_agent.host.is_same_boot = lambda one, other: one == other
sys.exit(main(arguments))
