"""Reads the policy file again, on a thread of its own: a long file must not keep the engine from its next turn.

The one invariant: what is put in force was read after the last request for it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from agent.settings import Settings


@dataclass(frozen=True)
class PolicyRead:
    """What became of reading the policy file."""

    settings: Settings | None
    """None if it was refused."""
    hash: str
    refused: str


class PolicyReader:
    """For the engine's thread."""

    def __init__(
        self,
        load_settings: Callable[[], Settings],
        policy_hash: Callable[[], str],
        put: Callable[[PolicyRead], None],
    ) -> None:
        """``policy_hash``: of what ``load_settings`` has read last. ``put``: into the engine's inbox."""
        self._load_settings = load_settings
        self._policy_hash = policy_hash
        self._put = put
        self._is_reading = False
        self._is_wanted_again = False

    def read(self) -> None:
        """Have the file read; one PolicyRead comes back for all who ask until then."""
        if self._is_reading:
            self._is_wanted_again = True
            return
        self._is_reading = True
        try:
            threading.Thread(target=self._work, name="policy", daemon=True).start()
        except RuntimeError as error:  # no memory for a thread
            self._put(PolicyRead(None, "", str(error)))

    def take(self) -> bool:
        """A PolicyRead has come: whether it counts, or the file is read once more."""
        self._is_reading = False
        if self._is_wanted_again:
            self._is_wanted_again = False
            self.read()
        return not self._is_reading

    def _work(self) -> None:
        try:
            settings = self._load_settings()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the old policy is still good
            self._put(PolicyRead(None, "", str(error)))
        else:
            self._put(PolicyRead(settings, self._policy_hash(), ""))
