"""Writes a node's conditions beside a drain, which never waits for it."""

import threading
from collections.abc import Callable

from scheduled_events_agent import AgentError
from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.kubernetes.client import BACKOFF_SECONDS, ApiError
from scheduled_events_agent.kubernetes.conditions import RENEWAL_SECONDS, NodeState
from scheduled_events_agent.kubernetes.node_status import NodeStatus


class ConditionWriter:
    """Writes the newest state on a thread of its own, again until it is answered, and renews it.

    What fails is a line.
    """

    def __init__(self, node: NodeStatus, on_line: Callable[[str], None], *, is_on: bool) -> None:
        """``is_on`` False: nothing is written."""
        self._node = node
        self._on_line = on_line
        self._is_on = is_on
        self._state: NodeState | None = None
        """The state to write; None after it was written."""
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="conditions", daemon=True)
        if is_on:
            self._thread.start()

    def write(self, state: NodeState) -> None:
        """Write this state, in place of one that could not be written yet. Returns at once."""
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Wait at most so long until the last state is written."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._is_on:
            self._thread.join(seconds)

    def _run(self) -> None:
        backoff = Backoff(*BACKOFF_SECONDS)
        written: NodeState | None = None
        while True:
            with self._changed:
                if not self._changed.wait_for(self._has_to_act, RENEWAL_SECONDS):
                    self._state = written
                state = self._state
                if state is None:
                    if self._is_closing:
                        return
                    continue
            pause = 0.0
            try:
                self._node.update(state)
                written = state
                backoff.reset()
            except ApiError as error:
                if error.kind in ("unavailable", "conflict"):
                    pause = backoff.next_delay(error.retry_after)
                else:
                    written = None
                    self._fail(error)
            except AgentError as error:
                written = None
                self._fail(error)
            with self._changed:
                if pause:
                    self._changed.wait_for(lambda state=state: self._state is not state, pause)  # type: ignore[misc]
                elif self._state is state:
                    self._state = None

    def _has_to_act(self) -> bool:
        return self._state is not None or self._is_closing

    def _fail(self, error: AgentError) -> None:
        if error.kind == "not_found":  # a node that is gone has no conditions
            return
        self._on_line(f"node {self._node.name}: its conditions are not set: {error}")
