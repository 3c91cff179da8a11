"""Notices of events: written with the step that they tell of, kept until their sender has ended with them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from scheduled_events_agent.engine.parts import Executor
from scheduled_events_agent.log import get_logger
from scheduled_events_agent.log_ids import LogId
from scheduled_events_agent.metrics import Metrics
from scheduled_events_agent.notices import happenings, is_wanted
from scheduled_events_agent.settings import Settings
from scheduled_events_agent.store import NO_CHANGES, RememberedChanges, Store, StoreError, Waiting
from scheduled_events_agent.workflow import Step

# An event of these types may leave only seconds: its notices do not wait for a pause after a failure to end.
_URGENT_TYPES = ("SpotRebalanceRecommendation", "Preempt", "Terminate")


class Notifying:
    """For the engine's thread."""

    def __init__(self, settings: Settings, store: Store, metrics: Metrics, executor: Executor) -> None:
        self._store = store
        self._metrics = metrics
        self._executor = executor
        self.waiting: Mapping[str, Waiting] = {}
        """What waits for which target. Replaced, never changed, so that other threads may read it."""
        self._ended: list[int] = []
        self._has_new = False
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Another policy is in force."""
        self._settings = settings
        self._is_settled = False

    def end(self, notice_id: int) -> None:
        """The sender has delivered the notice, or given it up."""
        self._ended.append(notice_id)

    def commit(
        self,
        steps: Sequence[Step],
        now: datetime,
        answers: Mapping[int, str],
        names: tuple[str, ...],
        vm_id: str,
        *,
        remembered: RememberedChanges = NO_CHANGES,
    ) -> None:
        """Put steps, answers, notices and what is remembered on the disk. Raises as Store.commit does."""
        notices = self._make(steps, now, names, vm_id)
        try:
            lost = self._store.commit(steps, now, answers, notices, remembered)
        except StoreError as error:
            if not notices or error.kind != "full":
                raise
            # Notices must not take the room that events need.
            self._store.commit(steps, now, answers, remembered=remembered)
            for target, count in Counter(target for target, _ in notices).items():
                self._drop(target, count, "no_room")
            return
        for target, count in lost.items():
            self._drop(target, count, "too_many")
        self._has_new = bool(notices)

    def _make(
        self, steps: Iterable[Step], now: datetime, names: tuple[str, ...], vm_id: str
    ) -> list[tuple[str, str]]:
        """Target and body of each notice of these steps."""
        targets = self._settings.notify
        if not targets:
            return []
        notices: list[tuple[str, str]] = []
        try:
            for step, happening in happenings(
                steps, now, names=names, vm_id=vm_id, mode=self._settings.agent.mode
            ):
                body = msgspec.json.encode(happening).decode()
                wanting = [target for target in targets if is_wanted(target, step, happening, names)]
                notices += [(target.name, body) for target in wanting]
        except Exception:  # noqa: BLE001 - no event may suffer from it
            get_logger().exception("a bug in the agent: a notice is missing", log_id=LogId.NOTICES_DROPPED)
        return notices

    def perform(self, steps: Iterable[Step]) -> None:
        """Have what was committed sent."""
        if self._has_new:
            is_urgent = any(step.workflow.event.type in _URGENT_TYPES for step in steps)
            self._executor.notify(is_urgent=is_urgent)
            self._has_new = self._is_settled = False

    def settle(self) -> None:
        """Forget what has ended, and what waits for targets that the policy lacks. Raises StoreError."""
        if self._is_settled and not self._ended:
            return
        if self._ended:
            self._store.notices.delete(self._ended)
            self._ended = []
        waiting = self._store.notices.waiting()
        names = [target.name for target in self._settings.notify]
        if removed := waiting.keys() - set(names):
            self._store.notices.drop(removed)
            for target in removed:
                self._drop(target, waiting.pop(target).count, "removed")
        self.waiting = waiting
        self._is_settled = True
        self._metrics.set_waiting(
            {
                name: (waiting[name].count, waiting[name].oldest_at.timestamp()) if name in waiting else (0, 0.0)
                for name in names
            }
        )

    def _drop(self, target: str, count: int, reason: str) -> None:
        self._metrics.notices_dropped.labels(target, reason).inc(count)
        get_logger().warning(
            "notices are dropped", log_id=LogId.NOTICES_DROPPED, target=target, count=count, reason=reason
        )
