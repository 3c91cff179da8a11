"""Builds the status from what the engine, the poller, the hooks and the senders publish. Changes none of them."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from scheduled_events_agent import AgentError, __version__, host
from scheduled_events_agent.daemon.poller import Poller
from scheduled_events_agent.engine import Snapshot
from scheduled_events_agent.status import (
    NO_OPTIONS,
    ActivePolicy,
    Attention,
    CommandOptions,
    FleetState,
    HeldEvent,
    KubernetesFailure,
    NotifiedTarget,
    Polls,
    StateLost,
    Status,
    SuggestedCommand,
    TargetFailure,
    Vm,
)
from scheduled_events_agent.status.attention import attention, health
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts, RunningHook
from scheduled_events_agent.status.messages import headline
from scheduled_events_agent.store import FILE_NAME, notified
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.web.endpoints import WebState
from scheduled_events_agent.workflow import is_ready

# An engine that has begun no cycle for this long hangs. (It idles for ten seconds, and waits two for a slow disk.)
_STALL_SECONDS = 20.0
_MAX_BUGS = 5  # that are named
# Without a successful poll for this long, and for this many intervals, it is not known what is pending.
_LATE_SECONDS = 10.0
_LATE_INTERVALS = 3


class StatusSource:
    """For any thread."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        poller: Poller,
        metrics: Metrics,
        *,
        policy: Callable[[], ActivePolicy],
        running: Callable[[], tuple[RunningHook, ...]],
        target_failures: Callable[[], dict[str, TargetFailure]],
        vm_error: Callable[[], AgentError | None],
        kubernetes_failure: Callable[[], KubernetesFailure | None],
        web: Callable[[], WebState],
        state_dir: Path,
        state_since: datetime | None = None,
        command_options: CommandOptions = NO_OPTIONS,
    ) -> None:
        """``target_failures``: why targets accept no notifications.

        ``vm_error``: why the metadata service has not said which VM this is.

        ``kubernetes_failure``, ``command_options``: those of ``Status``.
        """
        self._snapshot = snapshot
        self._poller = poller
        self._metrics = metrics
        self._policy = policy
        self._running = running
        self._target_failures = target_failures
        self._vm_error = vm_error
        self._kubernetes_failure = kubernetes_failure
        self._web = web
        self._state_dir = state_dir
        self._state_since = state_since
        self._command_options = command_options
        self._faults_since: datetime | None = None
        self._started = time.monotonic()
        self._started_at = datetime.now(UTC)

    def status(self) -> Status:
        """The agent's status, with its texts for people."""
        return to_status(self._facts())

    def attention(self) -> tuple[Attention, ...]:
        """All that needs a person now."""
        return attention(self._facts())

    def headline(self) -> str:
        """The agent's state in one line."""
        facts = self._facts()
        return headline(facts, attention(facts))

    def basis(self) -> object:
        """The data of a status, except the time: a different value if the status has changed."""
        poller = self._poller
        snapshot = replace(self._snapshot(), cycle_began_at=0.0)
        polled = poller.succeeded_at, str(poller.error), poller.clock_wrong, self.polls()
        return snapshot, self._policy(), self._running(), self._web(), polled, self._kubernetes_failure()

    def metrics(self) -> bytes:
        """The metrics, including those that are computed only on request."""
        self._metrics.is_ready.set(is_ready(self._snapshot().workflows))
        self._metrics.set_attention(self.attention())
        if self._poller.succeeded_at is not None:
            self._metrics.last_poll_at.set(self._poller.succeeded_at.timestamp())
        return self._metrics.expose()

    def health(self) -> Literal["ok"] | tuple[str, ...]:
        """Why the agent could act on no event; ok if it could."""
        return health(self.attention())

    def _faults(self) -> list[str]:
        """Faults of the agent itself. No running time is in their texts: they are in the headline."""
        snapshot = self._snapshot()
        problems = []
        if time.monotonic() - snapshot.cycle_began_at > _STALL_SECONDS:
            problems.append(f"the engine has run no cycle for more than {_STALL_SECONDS:g}s")
        if failure := snapshot.store_failure:
            problems.append(f"nothing can be done until the state file can be written: {failure}")
        for event_id, kind in list(snapshot.bugs.items())[:_MAX_BUGS]:
            what = f"event {event_id}" if event_id else "what is pending"
            problems.append(f"{what} cannot be handled: a bug in the agent ({kind}); see the log")
        if self._poller.stalled_seconds() > _STALL_SECONDS:
            problems.append(f"the poller has sent no heartbeat for more than {_STALL_SECONDS:g}s")
        if failure := self._web().failure:  # for the command status, which asks through the state file
            problems.append(f"the web server is not listening: {failure}")
        return problems

    def polls(self) -> Polls:
        """Whether documents are up to date."""
        if self._seconds_since_poll() > self._snapshot().settings.agent.healthy_within:
            return "overdue"
        return "late" if self._poller.succeeded is None or self.seconds_until_late() <= 0.0 else "current"

    def seconds_until_late(self) -> float:
        """When the last successful poll will be too old to say what is pending; 0 or less if it is so already."""
        interval = self._snapshot().settings.imds.poll_interval
        return max(_LATE_SECONDS, _LATE_INTERVALS * interval) - self._seconds_since_poll()

    def _seconds_since_poll(self) -> float:
        return time.monotonic() - (self._poller.succeeded or self._started)

    def _facts(self) -> Facts:
        """What the status is made from. The first with a fault notes since when there is one."""
        snapshot = self._snapshot()
        settings = snapshot.settings
        now = datetime.now(UTC)
        supervisor = host.supervisor_commands()
        poll_error = self._poller.error
        vm_error = self._vm_error()
        faults = self._faults()
        faults_since = (self._faults_since or now) if faults else None
        self._faults_since = faults_since
        keys = {one.event.key: one.id for one in snapshot.workflows.values() if not one.is_over}
        return Facts(
            at=now,
            state_file=str(self._state_dir / FILE_NAME),
            state_since=self._state_since,
            state_lost=_state_lost(snapshot),
            agent_log=snapshot.agent_log,
            unclean_starts=snapshot.unclean_starts,
            vm_failure=str(vm_error) if vm_error else "",
            vm_failure_summary=vm_error.summary if vm_error else "",
            version=__version__,
            started_at=self._started_at,
            vm=Vm(names=snapshot.names, vm_id=snapshot.identity.vm_id),
            vm_confirmed=snapshot.is_identity_sure or bool(settings.vm.name),
            mode=settings.agent.mode,
            ready=is_ready(snapshot.workflows),
            faults=tuple(faults),
            faults_since=faults_since,
            web_config_rejected=self._web().config_rejected,
            policy=self._policy(),
            rules=tuple([rule.name for rule in settings.rules]),
            endpoint=settings.imds.endpoint,
            api_version=self._poller.api_version,
            recommendations_failure=self._poller.recommendations_failure,
            last_poll_at=self._poller.succeeded_at,
            polls=self.polls(),
            poll_failure=str(poll_error) if poll_error else "",
            poll_failure_summary=poll_error.summary if poll_error else "",
            guest_proxy=self._poller.guest_proxy.has_answered,
            clock_wrong=self._poller.clock_wrong,
            incarnation=snapshot.incarnation,
            other_vm_events=snapshot.other_vm_events,
            holds=tuple(
                [
                    HeldEvent(
                        event_id=id_,
                        key=keys.get(id_, ""),
                        user=one.user,
                        at=one.at,
                        last_seen_at=one.last_seen_at,
                    )
                    for id_, one in snapshot.holds.items()
                ]
            ),
            running=self._running(),
            workflows=tuple(snapshot.workflows.values()),
            command_options=self._command_options,
            command_prefix=supervisor.prefix,
            reload_command=supervisor.reload if self._command_options == NO_OPTIONS else "",
            supervisor_commands=(
                SuggestedCommand(command=supervisor.status, effect="show whether it runs"),
                SuggestedCommand(command=supervisor.log, effect="show the end of its log"),
            ),
            notify=tuple(self._notified(snapshot)),
            fleet=_fleet(snapshot),
            kubernetes_failure=self._kubernetes_failure(),
        )

    def _notified(self, snapshot: Snapshot) -> Iterator[NotifiedTarget]:
        failures = self._target_failures()
        for target in snapshot.settings.notify:
            name = target.name
            shown = notified(name, snapshot.waiting.get(name), snapshot.losses.get(name))
            yield replace(shown, failure=failures.get(name))


def _state_lost(snapshot: Snapshot) -> StateLost | None:
    settings, loss = snapshot.settings, snapshot.state_lost
    return loss and replace(loss, recover=settings.recover_hooks, on_clear=settings.on_clear)


def _fleet(snapshot: Snapshot) -> FleetState | None:
    settings, update = snapshot.settings.fleet, snapshot.fleet
    if settings is None:
        return None
    same_name = update.same_name_warnings(snapshot.identity.vm_id)
    return FleetState(
        group=settings.group or update.group,
        error=update.error,
        unavailable_since=update.unavailable_since,
        not_ready=snapshot.fleet_not_ready,
        warnings=tuple(filter(None, (settings.members_error(snapshot.names), *same_name))),
    )
