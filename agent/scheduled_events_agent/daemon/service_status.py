"""Reports to the service manager: that the agent is ready, its work in one line, and that it is alive."""

from collections.abc import Callable

from scheduled_events_agent import host
from scheduled_events_agent.daemon.poller import Poller
from scheduled_events_agent.daemon.status_source import StatusSource
from scheduled_events_agent.engine import Snapshot
from scheduled_events_agent.status.facts import RunningHook

# The agent reports that it is ready after its first poll, or if that takes longer than this.
_READY_TIMEOUT_SECONDS = 2.0


class ServiceReporter:
    """For the engine's thread."""

    def __init__(
        self,
        service: host.ServiceManager,
        snapshot: Callable[[], Snapshot],
        poller: Poller,
        status: StatusSource,
        *,
        running: Callable[[], tuple[RunningHook, ...]],
        on_ready: Callable[[], None],
    ) -> None:
        """``on_ready`` is called once, after the report that the agent is ready."""
        self._service = service
        self._snapshot = snapshot
        self._poller = poller
        self._status = status
        self._running = running
        self._on_ready = on_ready
        self._started = snapshot().cycle_began_at
        self.reported: str | None = None
        """The line that was reported last; None until it was reported that the agent is ready."""

    def report(self) -> None:
        """Report the state after a cycle."""
        line = self.line()
        if self.reported is None:
            has_waited = self._snapshot().cycle_began_at - self._started > _READY_TIMEOUT_SECONDS
            if not (self._poller.has_tried or has_waited):
                return
            self._service.notify("ready", line)
            self._on_ready()
        elif line != self.reported:
            self._service.notify_status(line)
        self.reported = line

    def report_reloading(self) -> None:
        if self.reported is not None:
            self._service.notify("reloading", self.line())

    def report_reloaded(self) -> None:
        """Report that a reload has ended, in success or failure. One during the start makes no agent ready."""
        if self.reported is not None:
            self.reported = self.line()
            self._service.notify("ready", self.reported)

    def report_stopping(self, line: str) -> None:
        self._service.notify("stopping", line)

    def keep_alive(self) -> None:
        self._service.keep_alive()

    def line(self) -> str:
        """One line about the agent's work now. It changes only when that changes."""
        parts = []
        if hooks := [one.hook for one in self._running() if one.state == "running"]:
            # That the line begins with "runs hook" is a contract: systemd/restart.sh reads it of the agent that
            # it replaces, whatever its version, and restarts the service when no hook runs.
            noun = "hook" if len(hooks) == 1 else "hooks"
            parts.append(f"runs {noun} {', '.join(hooks)}")
        return "; ".join([*parts, self._status.headline()])
