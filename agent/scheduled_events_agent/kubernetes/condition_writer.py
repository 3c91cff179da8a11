"""Writes a node's conditions beside a drain, which never waits for it."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from queue import SimpleQueue

from scheduled_events_agent import AgentError
from scheduled_events_agent.kubernetes.client import ApiError
from scheduled_events_agent.kubernetes.conditions import NodeState, changes
from scheduled_events_agent.kubernetes.node_status import NodeStatus


class ConditionWriter:
    """Writes one state after the other on a thread of its own. What fails is a line, and nothing else."""

    def __init__(self, node: NodeStatus, on_line: Callable[[str], None], *, is_on: bool) -> None:
        """``is_on`` False: nothing is written."""
        self._node = node
        self._on_line = on_line
        self._is_on = is_on
        self._states: SimpleQueue[NodeState | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="conditions", daemon=True)
        if is_on:
            self._thread.start()

    def write(self, state: NodeState) -> None:
        """Write this state after those before it. Returns at once."""
        self._states.put(state)

    def close(self, seconds: float) -> None:
        """Wait at most so long until all is written."""
        self._states.put(None)
        if self._is_on:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (state := self._states.get()) is not None:
            try:
                due = changes(self._node.read().conditions, state, datetime.now(UTC))
                if due:
                    self._node.write(due)
            except ApiError as error:
                if error.kind != "not_found":  # a node that is gone has no conditions
                    self._fail(error)
            except AgentError as error:
                self._fail(error)

    def _fail(self, error: AgentError) -> None:
        self._on_line(f"node {self._node.name}: its conditions are not told: {error}")
