"""Starts the agent from a package's directory: this file's own, with one more for each compiled ABI.

Run by the launcher, with ``-I -S``, so nothing but the standard library and what lies here can be imported.
"""  # noqa: INP001 - a script

import os
import sys

_HOME = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost start-up time
sys.path[:0] = [_HOME, f"{_HOME}/cp{sys.version_info.major}{sys.version_info.minor}"]

if __name__ == "__main__":
    from scheduled_events_agent.cli import main

    sys.exit(main())
