"""The agent's real daemon at a pace that no policy file allows, so that an hour of polls passes in seconds.

Run as a program: ``fast_agent POLICY STATE_DIR INTERVAL_SECONDS [KEEP_SECONDS]``. What ``run`` imports and starts
is imported and started here; only the pace differs, of the polls and of the engine, so that each poll has its
turn, and (if it is given) how long the journal is kept: it is pruned a ninetieth of that apart, as of 90 days
once a day.
"""

import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from msgspec.structs import replace

import agent.daemon
from agent import host
from agent.engine import upkeep
from agent.log import set_up
from agent.settings import Settings, load_policy
from agent.settings.files import check_files
from agent.store import Store


def run(policy: Path, state_dir: Path, interval_seconds: float, keep_seconds: float | None = None) -> None:
    """Run the daemon until SIGTERM; SIGHUP has it read its policy again."""

    def load_settings() -> Settings:
        loaded = load_policy(policy)
        check_files(loaded)
        set_up(loaded.settings.agent.log.level, loaded.settings.agent.log.format)
        return replace(loaded.settings, imds=replace(loaded.settings.imds, poll_interval=interval_seconds))

    agent.daemon._TICK_SECONDS = interval_seconds  # noqa: SLF001
    if keep_seconds is not None:
        upkeep.KEEP_JOURNAL = timedelta(seconds=keep_seconds)
        upkeep.TIDY_SECONDS = keep_seconds / 90
    host.create_private_dir(state_dir)
    store = Store.open(state_dir, datetime.now(UTC))
    daemon = agent.daemon.Daemon(load_settings(), load_settings, store)
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, lambda *_: daemon.reload())
    daemon.run()
    store.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:5]))
