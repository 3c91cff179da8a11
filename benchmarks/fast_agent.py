"""The agent's real daemon at a pace that no policy file allows, so that an hour of polls passes in seconds.

Run as a program: ``fast_agent POLICY STATE_DIR INTERVAL_SECONDS``. What ``run`` imports and starts is imported and
started here; only the pace differs, of the polls and of the engine, so that each poll has its turn.
"""

import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

import agent.daemon
from agent import host
from agent.config import Settings, check_files, load_policy
from agent.log import set_up
from agent.store import Store


def run(policy: Path, state_dir: Path, interval_seconds: float) -> None:
    """Run the daemon until SIGTERM."""

    def load_settings() -> Settings:
        loaded = load_policy(policy)
        check_files(loaded)
        set_up(loaded.settings.agent.log.level, loaded.settings.agent.log.format)
        return replace(loaded.settings, imds=replace(loaded.settings.imds, poll_interval=interval_seconds))

    agent.daemon._TICK_SECONDS = interval_seconds  # noqa: SLF001
    agent.daemon._IDLE_TICK_SECONDS = interval_seconds  # noqa: SLF001
    host.create_private_dir(state_dir)
    store = Store.open(state_dir, datetime.now(UTC))
    daemon = agent.daemon.Daemon(load_settings(), load_settings, store)
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
    daemon.run()
    store.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
