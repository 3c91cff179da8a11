"""The last update from the fleet's thread, and the requests that it gets."""

from collections.abc import Callable

from msgspec.structs import replace

from scheduled_events_agent.engine.messages import FleetUpdate
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.workflow import (
    Context,
    FleetEventStatus,
    FleetRequest,
    FleetView,
    Workflows,
    fleet_requests,
    not_ready_others,
)

# A list of the fleet's records counts for this long. An answer that a pause has made old is not used.
_STATUS_SECONDS = 10.0


class FleetState:
    """The fleet, for the engine's thread. ``last_update`` and ``not_ready`` are replaced, never changed."""

    def __init__(self, publish: Callable[[tuple[FleetRequest, ...]], None]) -> None:
        self._publish = publish
        self._seen_at: dict[str, float] = {}
        self.last_update = FleetUpdate()
        self.has_new_update = False
        """Whether no cycle has decided on the last update yet."""
        self.not_ready: tuple[str, ...] = ()
        """The other VMs that events of this VM wait for."""

    def update(self, update: FleetUpdate) -> None:
        self.last_update = update
        self.has_new_update = True

    def view(self, settings: Settings, names: tuple[str, ...], now: float) -> FleetView | None:
        """The view of the fleet that workflows use; None if this VM acts alone. ``now`` is monotonic."""
        fleet = settings.fleet
        if self.last_update.settings != fleet:
            self.last_update = FleetUpdate()  # another store, other VMs
        if fleet is None:
            return None
        update = self.last_update
        is_old = now - update.listed_at > _STATUS_SECONDS
        since = update.unavailable_from
        return FleetView(
            max_events=fleet.max_events,
            members=fleet.members_for(names),
            on_unavailable=fleet.on_unavailable,
            error=update.error,
            unavailable_seconds=None if since is None else now - since,
            statuses={key: _allows_nothing(one) for key, one in update.statuses.items()}
            if is_old
            else update.statuses,
        )

    def committed(self, workflows: Workflows, context: Context, now: float) -> None:
        """Publish the requests to the fleet, now that the decision is on disk. ``now`` is monotonic."""
        self.has_new_update = False
        if context.fleet is None or context.document_at is None:
            return
        # If an event that is over comes back, that counts as another appearance, even if its workflow goes on.
        self._seen_at = {
            key: self._seen_at.get(key, now) for key, workflow in workflows.items() if not workflow.is_over
        }
        waiting = [w for w in workflows.values() if w.wait_reason and w.wait_reason.kind == "all_ready"]
        self.not_ready = tuple(dict.fromkeys(name for one in waiting for name in not_ready_others(one, context)))
        self._publish(fleet_requests(workflows, context, self._seen_at))


def _allows_nothing(status: FleetEventStatus) -> FleetEventStatus:
    return replace(status, has_slot=False, is_all_ready=False)
