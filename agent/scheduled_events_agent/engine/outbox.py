"""Outbox: stores notifications with the transition that they report, and deletes delivered and lost ones."""

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from scheduled_events_agent import host
from scheduled_events_agent.engine.messages import NotificationDone, Notify
from scheduled_events_agent.notifications import (
    decode_notification,
    leads_to_notification,
    matches,
    notifications_of,
)
from scheduled_events_agent.policy.settings import NotifyTarget, Settings
from scheduled_events_agent.status import CommandOptions, Vm, to_json
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.store import AgentRecord, Backlog, CommitResult, Loss, Store, StoreError
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Transition, Workflows

# An event of these types may leave only seconds: its notifications do not wait for the end of a retry pause.
_URGENT_TYPES = ("SpotRebalanceRecommendation", "Preempt", "Terminate")
# Why a commit has dropped a notification, as a phrase.
_DROPPED = {"too_many": "too many waited", "no_room": "the disk is full"}
# Number of records of lost notifications that wait until the journal can be written; more drop the oldest.
_MAX_UNWRITTEN = 1000


class Outbox:
    """The notifications that are not delivered yet. For the engine's thread."""

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
        self.waiting: Mapping[str, Backlog] = {}
        """The notifications that wait, by target. Replaced, never changed: so publishing needs no copy."""
        self.losses: Mapping[str, Loss] = store.load_losses()
        """The losses, by target. Replaced, never changed: other threads may read it."""
        self._written_losses: Mapping[str, Loss] = self.losses
        self._ended: list[NotificationDone] = []
        self._ended_ids: list[int] = []
        """Notifications still to be deleted, whose result has been handled."""
        self._unwritten: deque[AgentRecord] = deque(maxlen=_MAX_UNWRITTEN)
        self._has_new = False
        self._settled_for: Sequence[NotifyTarget] | None = None
        """The targets for which all known notifications were handled; None if something may have changed."""

    def end(self, ended: NotificationDone) -> None:
        """Note that the notification was delivered, or is lost."""
        self._ended.append(ended)

    def make(
        self, transitions: Sequence[Transition], workflows: Workflows, now: datetime, vm: Vm, settings: Settings
    ) -> list[tuple[str, str]]:
        """Target and body of each notification about these transitions, to be committed with them.

        ``workflows``: the open workflows after the transitions.
        """
        targets = settings.notify
        if not targets or not any(map(leads_to_notification, transitions)):
            return []
        notifications: list[tuple[str, str]] = []
        try:
            for transition, notification in notifications_of(
                transitions, self._facts(workflows, now, vm, settings)
            ):
                body = to_json(notification).decode()
                wanting = [target for target in targets if matches(target, transition, notification, vm.names)]
                notifications += [(target.name, body) for target in wanting]
        except Exception:  # noqa: BLE001 - a bug in notifications must not affect events
            get_logger().exception(
                "a bug in the agent: a notification is missing", log_id=LogId.NOTIFICATIONS_DROPPED
            )
        return notifications

    def committed(self, notifications: Sequence[tuple[str, str]], result: CommitResult, now: datetime) -> None:
        """Count and record the notifications that were lost in the commit of these."""
        for target, body in result.dropped:
            self._metrics.notifications_dropped.labels(target, result.reason).inc()
            self._lose(target, body, _DROPPED[result.reason], now)
        self._has_new = bool(notifications) and result.reason != "no_room"

    def _facts(self, workflows: Workflows, now: datetime, vm: Vm, settings: Settings) -> Facts:
        """The facts that notifications need."""
        return Facts(
            at=now,
            vm=vm,
            mode=settings.agent.mode,
            workflows=tuple(workflows.values()),
            command_options=self._command_options,
            command_prefix=host.supervisor_commands().prefix,
        )

    def perform(self, transitions: Iterable[Transition]) -> None:
        """Have the notifications sent that were committed."""
        if self._has_new:
            is_urgent = any(transition.workflow.event.type in _URGENT_TYPES for transition in transitions)
            self._notify(is_urgent=is_urgent)
            self._has_new = False
            self._settled_for = None

    def purge(self, targets: Sequence[NotifyTarget], now: datetime) -> None:
        """Delete notifications that have ended, or whose target is not in the policy. Raises StoreError."""
        if targets is self._settled_for and not (self._ended or self._ended_ids or self._unwritten):
            return
        names = [target.name for target in targets]
        self._handle_ended(now)
        if self.losses.keys() - set(names):
            self.losses = {name: loss for name, loss in self.losses.items() if name in names}
        if self._ended_ids or self._unwritten or self.losses is not self._written_losses:
            self._write_ended()
        waiting = self._store.outbox.waiting()
        if removed := waiting.keys() - set(names):
            self._store.outbox.drop(removed)
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
        """Count and report the notifications that waited for a target that is no longer in the policy."""
        self._metrics.notifications_dropped.labels(target, "removed").inc(count)
        text = "notifications are dropped"
        get_logger().warning(
            text, log_id=LogId.NOTIFICATIONS_DROPPED, target=target, count=count, reason="removed"
        )

    def _handle_ended(self, now: datetime) -> None:
        # A lost notification is still in the state file, with its body.
        bodies = {ended.id: self._store.outbox.load_body(ended.id) for ended in self._ended if ended.lost}
        for ended in self._ended:
            if ended.lost:
                body = bodies[ended.id]
                if body is not None:  # else it was deleted meanwhile as one too many, and is counted already
                    self._lose(ended.target, body, ended.lost, now, is_expected=ended.is_expired)
            elif ended.target in self.losses:
                self.losses = {name: loss for name, loss in self.losses.items() if name != ended.target}
        self._ended_ids += [ended.id for ended in self._ended]
        self._ended = []

    def _write_ended(self) -> None:
        try:
            self._store.end_notifications(self._ended_ids, self._unwritten, self.losses)
        except StoreError as error:
            if error.kind != "full":
                raise
            # Records of losses must not take the room that events need: they are written later.
            if self._ended_ids:
                self._store.end_notifications(self._ended_ids)
        else:
            self._unwritten.clear()
            self._written_losses = self.losses
        self._ended_ids = []

    def _lose(self, target: str, body: str, reason: str, now: datetime, *, is_expected: bool = False) -> None:
        """Record and log a loss. ``is_expected``: it needs no one's attention."""
        kind, event_id = "unknown", ""
        with contextlib.suppress(msgspec.MsgspecError):  # another version of the agent may have written it
            notification = decode_notification(body)
            kind, event_id = notification.kind, notification.event.id
        if not is_expected:
            before = self.losses.get(target)
            since = before.since if before else now
            loss = Loss(count=before.count + 1 if before else 1, since=since, reason=reason)
            self.losses = {**self.losses, target: loss}
        self._unwritten.append(("notification_lost", f"{target}: {kind} of {event_id}: {reason}", now))
        get_logger().warning(
            "a notification is lost",
            log_id=LogId.NOTIFICATIONS_DROPPED,
            target=target,
            kind=kind,
            event_id=event_id,
            reason=reason,
        )
