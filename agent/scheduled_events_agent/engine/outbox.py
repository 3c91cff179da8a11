"""Notices of events: written with the step that they tell of, kept until their sender has ended with them."""

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from scheduled_events_agent import host
from scheduled_events_agent.engine.messages import NoticeEnded, Notify
from scheduled_events_agent.notifications import decode_happening, happenings, has_news, is_wanted
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.status import CommandOptions, Status, Vm
from scheduled_events_agent.status.messages import as_shown
from scheduled_events_agent.store import CommitResult, Loss, Store, StoreError, Waiting
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Board, Step

# An event of these types may leave only seconds: its notices do not wait for a pause after a failure to end.
_URGENT_TYPES = ("SpotRebalanceRecommendation", "Preempt", "Terminate")
# Why a commit has dropped a notice, as a phrase.
_DROPPED = {"too_many": "too many waited", "no_room": "the disk is full"}
# Records of lost notices that wait until the journal can be written; of more, the oldest go.
_MAX_UNWRITTEN = 1000


class Notifying:
    """For the engine's thread."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        notify: Notify,
        command_options: CommandOptions,
    ) -> None:
        self._command_options = command_options
        self._store = store
        self._metrics = metrics
        self._notify = notify
        self.waiting: Mapping[str, Waiting] = {}
        """What waits for which target. Replaced, never changed, so that it need not be copied to be published."""
        self.losses: Mapping[str, Loss] = store.load_losses()
        """What which target has lost. Replaced, never changed, too."""
        self._written_losses: Mapping[str, Loss] = self.losses
        self._ended: list[NoticeEnded] = []
        self._ended_ids: list[int] = []
        """What is still to be deleted; how it ended has been looked at."""
        self._unwritten: deque[tuple[str, str, datetime]] = deque(maxlen=_MAX_UNWRITTEN)
        self._has_new = False
        self._settled_for: Sequence[NotifyTarget] | None = None
        """The targets for which all is settled that is known by now; None if something may have changed."""

    def end(self, ended: NoticeEnded) -> None:
        """The sender has delivered the notice, or it is lost."""
        self._ended.append(ended)

    def make(
        self, steps: Sequence[Step], board: Board, now: datetime, vm: Vm, settings: Settings
    ) -> list[tuple[str, str]]:
        """Target and body of each notice of these steps, to be committed with them.

        ``board``: as it is after the steps.
        """
        targets = settings.notify
        if not targets or not any(map(has_news, steps)):
            return []
        notices: list[tuple[str, str]] = []
        try:
            for step, happening in happenings(steps, self._status(board, now, vm, settings)):
                body = msgspec.json.encode(happening).decode()
                wanting = [target for target in targets if is_wanted(target, step, happening, vm.names)]
                notices += [(target.name, body) for target in wanting]
        except Exception:  # noqa: BLE001 - no event may suffer from it
            get_logger().exception("a bug in the agent: a notice is missing", log_id=LogId.NOTICES_DROPPED)
        return notices

    def committed(self, notices: Sequence[tuple[str, str]], result: CommitResult, now: datetime) -> None:
        """Count and record what was lost when these were committed."""
        for target, body in result.dropped:
            self._metrics.notices_dropped.labels(target, result.reason).inc()
            self._lose(target, body, _DROPPED[result.reason], now)
        self._has_new = bool(notices) and result.reason != "no_room"

    def _status(self, board: Board, now: datetime, vm: Vm, settings: Settings) -> Status:
        """As much of it as notices need."""
        return Status(
            at=now,
            health="ok",
            vm=vm,
            mode=settings.agent.mode,
            pending=tuple(map(as_shown, board.values())),
            command_options=self._command_options,
            command_prefix=host.supervisor_commands().prefix,
        )

    def perform(self, steps: Iterable[Step]) -> None:
        """Have what was committed sent."""
        if self._has_new:
            is_urgent = any(step.workflow.event.type in _URGENT_TYPES for step in steps)
            self._notify(is_urgent=is_urgent)
            self._has_new = False
            self._settled_for = None

    def settle(self, targets: Sequence[NotifyTarget], now: datetime) -> None:
        """Forget what has ended, and what waits for targets that the policy lacks. Raises StoreError."""
        if targets is self._settled_for and not (self._ended or self._ended_ids or self._unwritten):
            return
        names = [target.name for target in targets]
        self._look_at_ended(now)
        if self.losses.keys() - set(names):
            self.losses = {name: loss for name, loss in self.losses.items() if name in names}
        if self._ended_ids or self._unwritten or self.losses is not self._written_losses:
            self._write_ended()
        waiting = self._store.notices.waiting()
        if removed := waiting.keys() - set(names):
            self._store.notices.drop(removed)
            for target in removed:
                self._drop(target, waiting.pop(target).count)
        self.waiting = waiting
        self._settled_for = targets
        self._metrics.set_waiting(
            {
                name: (waiting[name].count, waiting[name].oldest_at.timestamp()) if name in waiting else (0, 0.0)
                for name in names
            }
        )

    def _drop(self, target: str, count: int) -> None:
        """What waited for a target that the policy lacks."""
        self._metrics.notices_dropped.labels(target, "removed").inc(count)
        text = "notices are dropped"
        get_logger().warning(text, log_id=LogId.NOTICES_DROPPED, target=target, count=count, reason="removed")

    def _look_at_ended(self, now: datetime) -> None:
        # A notice that is lost is still in the state file, which says what it was.
        bodies = {ended.id: self._store.notices.load_body(ended.id) for ended in self._ended if ended.lost}
        for ended in self._ended:
            if ended.lost:
                body = bodies[ended.id]
                if body is not None:  # else it was one too many meanwhile, and is counted already
                    self._lose(ended.target, body, ended.lost, now)
            elif ended.target in self.losses:
                self.losses = {name: loss for name, loss in self.losses.items() if name != ended.target}
        self._ended_ids += [ended.id for ended in self._ended]
        self._ended = []

    def _write_ended(self) -> None:
        try:
            self._store.end_notices(self._ended_ids, self._unwritten, self.losses)
        except StoreError as error:
            if error.kind != "full":
                raise
            # What is told of losses must not take the room that events need: it is written later.
            if self._ended_ids:
                self._store.end_notices(self._ended_ids)
        else:
            self._unwritten.clear()
            self._written_losses = self.losses
        self._ended_ids = []

    def _lose(self, target: str, body: str, reason: str, now: datetime) -> None:
        what, event_id = "unknown", ""
        with contextlib.suppress(msgspec.MsgspecError):  # another version of the agent may have written it
            happening = decode_happening(body)
            what, event_id = happening.what, happening.event.id
        before = self.losses.get(target)
        since = before.since if before else now
        loss = Loss(count=before.count + 1 if before else 1, since=since, reason=reason)
        self.losses = {**self.losses, target: loss}
        self._unwritten.append(("notification_lost", f"{target}: {what} of {event_id}: {reason}", now))
        get_logger().warning(
            "a notification is lost",
            log_id=LogId.NOTICES_DROPPED,
            target=target,
            what=what,
            event_id=event_id,
            reason=reason,
        )
