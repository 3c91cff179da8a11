"""PostgreSQL behind PgBouncer: docs/cookbook/pgbouncer.md."""

import sys

if sys.platform == "win32":
    raise ImportError("the hooks are shell scripts for Linux")

from pathlib import Path

from frame import Way
from harness import Agent
from pgbouncer_environment import Bouncer
from recipe_database import Alone


class BehindPgBouncer(Alone):
    title = "PostgreSQL without a standby, behind PgBouncer on another machine"
    page = "docs/cookbook/pgbouncer.md"
    columns = ("inserts failed", "longest wait", "commits lost")

    def __init__(self, place: Path, way: Way) -> None:
        super().__init__(place, way)
        self._bouncer = Bouncer(place, self._servers)

    def start(self) -> None:
        super().start()
        self.ends.callback(self._bouncer.close)
        self._bouncer.start()

    def versions(self) -> str:
        return f"{super().versions()}, {self._bouncer.version()}"

    def write_policy(self, agent: Agent) -> None:
        agent.config.write_text(self._bouncer.policy(agent.endpoint), encoding="utf-8")

    def start_load(self) -> None:
        self.start_writers(self._bouncer.conninfo)
