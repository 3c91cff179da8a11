"""The thread that keeps the conditions of this Kubernetes node up to date, so that nothing else waits for it.

It is idle until what it reports has changed; once in about ten minutes it looks whether the node still has that.
Invariant: what it writes is what is wanted then, so nothing is sent late.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from scheduled_events_agent import AgentError
from scheduled_events_agent.http.retry import Backoff
from scheduled_events_agent.kubernetes.client import ApiError
from scheduled_events_agent.kubernetes.conditions import (
    Condition,
    Conditions,
    NodeState,
    Polls,
    changes,
    is_lifecycle,
    node_state,
    withdrawn,
    without_killed_drain,
)
from scheduled_events_agent.kubernetes.node_status import NodeStatus, OtherMachineError
from scheduled_events_agent.kubernetes.own_node import find_own_node
from scheduled_events_agent.policy.settings import KubernetesSettings
from scheduled_events_agent.status import KubernetesFailure
from scheduled_events_agent.telemetry.log import ChangeLogger, get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Workflows

_CHECK_SECONDS = 600.0
_CHECK_SHARE = 0.2  # by chance, so that not all nodes ask together
_BACKOFF_SECONDS = (1.0, 60.0)
# So long after a boot a kubelet may still report the boot before.
_LATE_KUBELET_SECONDS = 30.0

Connect = Callable[[KubernetesSettings], NodeStatus]


class _Input(NamedTuple):
    """What to do. Replaced as a whole, so that the thread never reads half of it."""

    settings: KubernetesSettings | None
    wanted: NodeState


class NodeThread:
    """Keeps the conditions of the node as they should be. All methods but ``run`` are for the engine's thread."""

    def __init__(self, metrics: Metrics, settings: KubernetesSettings, connect: Connect = find_own_node) -> None:
        self._metrics = metrics
        self._connect = connect
        self._random = Random()  # noqa: S311
        self._backoff = Backoff(*_BACKOFF_SECONDS, self._random)
        self._log = ChangeLogger("updating the node's conditions", LogId.KUBERNETES_FAILS, LogId.KUBERNETES_WORKS)
        self._workflows: Workflows = {}
        self._polls: Polls = "none_yet"
        self._input = _Input(settings, NodeState())
        self._changed = threading.Event()
        self._is_stopping = False
        self._settings: KubernetesSettings | None = None
        """Those with which ``_node`` was found."""
        self._reported: KubernetesSettings | None = None
        """Those with which conditions may have been set that are not withdrawn yet."""
        self._node: NodeStatus | None = None
        self._conditions: Conditions | None = None
        """Those of the node, as far as it is known; None if it has to be read."""
        self._check_at = 0.0
        self._failing_since: float | None = None
        self.failure: KubernetesFailure | None = None
        """Why nothing can be written now. For any thread."""
        self._not_before = 0.0
        """Until then the API server wants to be left alone."""
        metrics.add_kubernetes()

    def reconfigure(self, settings: KubernetesSettings | None) -> None:
        """Use another policy. What it no longer reports is withdrawn."""
        self._set(settings)

    def publish(self, workflows: Workflows, polls: Polls) -> None:
        """Report these open workflows. ``workflows``: a mapping that is never changed."""
        if workflows is not self._workflows or polls != self._polls:
            self._workflows = workflows
            self._polls = polls
            self._set(self._input.settings)

    def _set(self, settings: KubernetesSettings | None) -> None:
        """Wake the thread, if there is something else to do."""
        wanted = NodeState()
        if settings is not None:
            wanted = node_state(
                self._workflows.values(),
                self._polls,
                has_condition=settings.condition,
                has_lifecycle=settings.lifecycle_conditions,
            )
        if (settings, wanted) != self._input:
            self._input = _Input(settings, wanted)
            self._changed.set()

    def stop(self) -> None:
        """End soon; a request that is under way ends by itself. The conditions stay."""
        self._is_stopping = True
        self._changed.set()

    def run(self) -> None:
        """Blocks until ``stop``."""
        while True:
            self._changed.clear()
            if self._is_stopping:
                return
            self._changed.wait(self._step(self._input))

    def _step(self, current: _Input) -> float | None:
        """Write what has changed. Returns after how many seconds to do so again; None: not before a change."""
        settings = self._settings_for(current.settings)
        if settings != self._settings:
            self._settings = settings
            self._node = self._conditions = None
            self._not_before = 0.0
            self._backoff.reset()
        if settings is None:
            self._set_failure("")
            return None
        if (pause := self._not_before - time.monotonic()) > 0:
            return pause
        try:
            self._update(settings, current.wanted)
        except AgentError as error:
            is_gone = error.kind == "not_found"  # a node, and with it its conditions
            if _has_any(settings) or not is_gone:
                return self._on_failure(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends would never write anything again
            get_logger().exception("a bug in the agent", log_id=LogId.AGENT_FAILED)
            return self._on_failure(AgentError(f"a bug in the agent: {error!r}", kind="bug"))
        self._backoff.reset()
        self._failing_since = None
        self._log.succeeded(time.monotonic())
        self._set_failure("")
        if not _has_any(settings):
            self._reported = None
            return None
        return max(0.0, self._check_at - time.monotonic())

    def _settings_for(self, wanted: KubernetesSettings | None) -> KubernetesSettings | None:
        """Those to work with: what was reported before is withdrawn as it was reported. None: nothing to do."""
        if wanted is not None and _has_any(wanted):
            return wanted
        if self._reported is None:
            return None
        return replace(self._reported, condition=False, lifecycle_conditions=False)

    def _update(self, settings: KubernetesSettings, wanted: NodeState) -> None:
        if self._node is None:
            self._node = self._connect(settings)
        node = self._node
        ended = withdrawn(has_condition=settings.condition, has_lifecycle=settings.lifecycle_conditions)
        wanted = NodeState((*wanted.conditions, *ended.conditions))
        is_fresh = self._conditions is None or time.monotonic() >= self._check_at
        if is_fresh:
            self._read(node)
            if _has_any(settings):
                self._reported = settings
        due = self._due(wanted, settings)
        # Others may have written these since: whose they are is decided on what the node has now.
        if any(map(is_lifecycle, due)) and not is_fresh:
            self._read(node)
            due = self._due(wanted, settings)
        if due:
            self._conditions = None  # not known, if no answer comes
            self._conditions = node.write(due).conditions

    def _read(self, node: NodeStatus) -> None:
        self._conditions = None
        self._conditions = node.read().conditions
        share = self._random.uniform(1 - _CHECK_SHARE, 1 + _CHECK_SHARE)
        self._check_at = time.monotonic() + _CHECK_SECONDS * share

    def _due(self, wanted: NodeState, settings: KubernetesSettings) -> tuple[Condition, ...]:
        found = self._conditions or {}
        now = datetime.now(UTC)
        if settings.lifecycle_conditions:
            wanted = without_killed_drain(wanted, found, now)
        return changes(found, wanted, now)

    def _on_failure(self, error: AgentError) -> float:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        is_late_kubelet = isinstance(error, OtherMachineError)
        if not (is_late_kubelet and now - self._failing_since < _LATE_KUBELET_SECONDS):
            self._log.failed(error.kind, str(error), now)
            self._set_failure(str(error))
        retry_after = error.retry_after if isinstance(error, ApiError) else None
        pause = self._backoff.next_delay(retry_after)
        if retry_after:
            self._not_before = now + pause
        return pause

    def _set_failure(self, reason: str) -> None:
        """Publish why nothing can be written; "" if it can."""
        since = self.failure.since if self.failure else datetime.now(UTC)
        self.failure = KubernetesFailure(since=since, reason=reason) if reason else None
        self._metrics.kubernetes_unavailable.set(bool(reason))


def _has_any(settings: KubernetesSettings) -> bool:
    """Whether the node shall have conditions."""
    return settings.condition or settings.lifecycle_conditions
