"""Reloads the policy of the Windows service, and waits for the service's answer."""

import time
from datetime import UTC, datetime
from pathlib import Path

from agent import AgentError, host
from agent.host.windows import service
from agent.host.windows.files import log_dir
from agent.settings import ConfigError, find_config, load_settings
from agent.store import Store

# A policy of a thousand rules is read in a second.
_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_REFUSAL = "the policy is refused, and the one from before stays in force: "


def reload_policy() -> str:
    """What the service says of the policy that it has read again. Raises AgentError if the service refuses it."""
    before = datetime.now(UTC)
    service.reload()
    facts = service.query()
    state_dir = _state_dir_of(service.options_of(facts.command if facts else ""))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for kind, text in _notes_of_reload(state_dir, before):
            if kind == "reload_refused":
                raise AgentError(f"{_REFUSAL}{text}")
            return text
        time.sleep(_LOOK_SECONDS)
    raise AgentError(f"the service has not answered the reload within {_PATIENCE_SECONDS:.0f}s: see {log_dir()}")


def _state_dir_of(options: dict[str, str]) -> Path:
    """Where the service with these options keeps its state."""
    directory = options.get("state-dir")
    if not directory:
        try:
            path = find_config(options.get("config"), host.default_config_path())
            directory = load_settings(path).agent.state_dir
        except ConfigError as error:  # the service reads the same file
            raise AgentError(f"{_REFUSAL}{error}") from error
    return Path(directory) if directory else host.default_state_dir()


def _notes_of_reload(state_dir: Path, since: datetime) -> list[tuple[str, str]]:
    """What the service has put into its journal since then."""
    store = Store.look_into(state_dir)
    try:
        notes = [
            note for kind in ("reload_refused", "reloaded") for note in store.load_notes(kind=kind, since=since)
        ]
    finally:
        store.close()
    return [(note.kind, note.text) for note in notes]
